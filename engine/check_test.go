package engine_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/assets"
	"constellation/engine"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/component"
	"constellation/engine/kube/kubetest"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

var v = version.MustParse

func at(s string) compat.Span { return compat.At(v(s)) }

func value(b byte) string { return strings.Repeat(fmt.Sprintf("%02x", b), 32) }

// pretendedCluster has fixed versions and preflight findings. Tests of package kube and the
// benchmark read both from real clusters.
type pretendedCluster struct {
	mu       sync.Mutex
	running  compat.Running
	err      error
	findings []plan.Finding
	broken   error // of the preflight
	asked    []check.PreflightRequest
	// meanwhile is called when the preflight begins.
	meanwhile func()
	// later is what a preflight finds that also replaces workers.
	later []plan.Finding
}

func (p *pretendedCluster) Running(ctx context.Context) (compat.Running, error) {
	if p.err != nil {
		return compat.Running{}, p.err
	}
	return p.running, nil
}

func (p *pretendedCluster) LocalData(context.Context) (cluster.LocalData, error) {
	return cluster.LocalData{}, nil
}

func (p *pretendedCluster) Preflight(_ context.Context, hops []check.PreflightRequest, emit func(plan.Event)) ([][]plan.Finding, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked = append(p.asked, hops...)
	if p.meanwhile != nil {
		p.meanwhile()
		p.meanwhile = nil
	}
	for _, f := range p.findings {
		emit(plan.Event{Kind: plan.KindCheck, Object: f.ID, State: string(f.Severity)})
	}
	if p.broken != nil {
		return nil, p.broken
	}
	var found [][]plan.Finding
	for _, r := range hops {
		if r.ReplaceWorkers {
			found = append(found, append(slices.Clone(p.findings), p.later...))
		} else {
			found = append(found, p.findings)
		}
	}
	return found, nil
}

// pretendedCloud has two images and some versions of Kubernetes.
type pretendedCloud struct {
	testCloud
	kubernetes []version.Version
	extra      string // an image whose measurements it does not tell; empty for none
	agent      *component.Component
}

func (c *pretendedCloud) Describe(context.Context) (cluster.ProviderInfo, error) {
	return cluster.ProviderInfo{UID: c.uid, Name: "demo", Kubernetes: c.kubernetes}, c.state()
}

// Components are other files for each version.
func (c *pretendedCloud) Components(ctx context.Context, k version.Version) (component.Signed, error) {
	if !slices.ContainsFunc(c.kubernetes, k.Equal) {
		return component.Signed{}, fmt.Errorf("%w: the mirror has no %s", cloud.ErrNotFound, k)
	}
	l, err := c.testCloud.Components(ctx, v("v1.35.4"))
	for i := range l.List {
		l.List[i].URL = strings.Replace(l.List[i].URL, ":8080/", ":8080/"+k.String()+"/", 1)
	}
	out := component.Signed{List: l.List}
	if !c.unsigned {
		out = signed(l.List)
	}
	out.Agent = c.agent
	return out, err
}

func (c *pretendedCloud) Groups(context.Context) ([]cloud.Group, error) {
	const image = "sandboxes/demo/images/v1.0.0"
	return []cloud.Group{
		{ID: "sandboxes/demo/groups/control-plane", Name: "control-plane", Role: cloud.ControlPlane, Image: image, Count: 1},
		{ID: "sandboxes/demo/groups/workers", Name: "workers", Role: cloud.Worker, Image: image, Count: 2},
	}, c.state()
}

func (c *pretendedCloud) Images(context.Context) ([]cloud.Image, error) {
	out := []cloud.Image{
		{Reference: "sandboxes/demo/images/v1.0.0", Version: "v1.0.0", Measurements: map[uint32]string{4: value(1), 9: value(2), 11: value(3)}},
		{Reference: "sandboxes/demo/images/v1.1.0", Version: "v1.1.0", Measurements: map[uint32]string{4: value(1), 9: value(12), 11: value(13), 12: value(14)}},
	}
	if c.extra != "" {
		out = append(out, cloud.Image{Reference: "sandboxes/demo/images/" + c.extra, Version: c.extra})
	}
	return out, c.state()
}

// checkStage is a workspace of a cluster of release v1.0.0 with Kubernetes v1.35.4, one
// control plane and two workers.
type checkStage struct {
	*testing.T
	dir     string
	cloud   *pretendedCloud
	inside  *pretendedCluster
	cluster *kubetest.Cluster
	// feed opens releases; nil means openOlder.
	feed func(ctx context.Context, location string, keys []release.Key) (release.Source, error)
}

// checkTime is when all checks are made.
var checkTime = time.Date(2026, 11, 21, 7, 5, 1, 0, time.UTC)

const clusterID = "c1d2e3f405162738c1d2e3f405162738c1d2e3f405162738c1d2e3f405162738"

func newCheckStage(t *testing.T) *checkStage {
	t.Helper()
	s := &checkStage{T: t, dir: t.TempDir(), inside: &pretendedCluster{}, cluster: kubetest.New()}
	s.cloud = &pretendedCloud{testCloud: testCloud{uid: "0123456789abcdef"}, kubernetes: []version.Version{v("v1.34.2"), v("v1.35.4"), v("v1.36.3")}}
	rootPEM, _, err := attestationtest.CreateCA("test")
	if err != nil {
		t.Fatal(err)
	}
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.AdoptSandbox(workspace.SandboxInfo{
		Name: "demo", UID: s.cloud.uid, Release: "v1.0.0", Kubernetes: "v1.35.4", Image: "v1.0.0", TrustRoots: string(rootPEM),
		Measurements:    map[uint32]string{4: value(1), 9: value(2), 11: value(3)},
		ClusterEndpoint: "127.0.0.1:36443", InitEndpoint: "127.0.0.1:39000", InClusterEndpoint: "10.42.0.1",
		NodeCIDR: "10.42.0.0/24", PodCIDR: "10.244.0.0/16", ServiceCIDR: "10.96.0.0/12",
		ControlPlanes: 1, Workers: 2, Socket: "/nowhere/api.sock", InitSecret: []byte("init-secret-0123456789-abcdefghi"),
	}); err != nil {
		t.Fatal(err)
	}
	s.write(workspace.StateFile, s.read(workspace.StateFile)+"clusterValues:\n  clusterID: "+clusterID+"\n  measurementSalt: "+clusterID+"\n")
	s.write(workspace.KubeconfigFile, "leads to it")
	s.inside.running = compat.Running{
		Services: at("v1.0.0"), ControlPlaneImage: at("v1.0.0"), WorkerImage: at("v1.0.0"), Kubernetes: at("v1.35.4"),
		ControlPlaneKubelet: at("v1.35.4"), WorkerKubelet: at("v1.35.4"), Etcd: "3.6.6-0",
		Parts: []cluster.Service{
			{Name: "coredns", Version: "v1.13.1", Kind: cluster.ServiceOfKubernetes},
			{Name: "join-service", Version: "v1.0.0", Kind: cluster.ServiceOfRelease},
			{Name: "kube-proxy", Version: "v1.35.4", Kind: cluster.ServiceOfKubernetes},
			{Name: "operator", Version: "v1.0.0", Kind: cluster.ServiceOfRelease},
		},
		Nodes: []cluster.Node{
			{Name: "control-plane-0", Group: "control-plane", Role: "control-plane"}, {Name: "worker-0", Group: "workers", Role: "worker"}, {Name: "worker-1", Group: "workers", Role: "worker"},
		},
		Target: cluster.NodeTarget{ImageVersion: "v1.0.0", Kubernetes: "v1.35.4", Components: "k8s-components-old"},
		JoinConfig: cluster.JoinConfig{ClusterID: clusterID, Attestation: fmt.Sprintf(
			`{"variant":"tpm2","measurements":{"4":{"expected":"%s","warnOnly":false},"9":{"expected":"%s","warnOnly":false},"11":{"expected":"%s","warnOnly":false}}}`, value(1), value(2), value(3))},
	}
	kinds, err := assets.CRDsFor("v1.0.0")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cluster.ApplyKinds(t.Context(), kinds, func(name string) { s.inside.running.Kinds = append(s.inside.running.Kinds, name) }); err != nil {
		t.Fatal(err)
	}
	s.backup(time.Hour, clusterID)
	return s
}

func (s *checkStage) read(name string) string {
	s.Helper()
	b, err := os.ReadFile(filepath.Join(s.dir, name))
	if err != nil {
		s.Fatal(err)
	}
	return string(b)
}

func (s *checkStage) write(name, text string) {
	s.Helper()
	if err := os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o600); err != nil {
		s.Fatal(err)
	}
}

// edit replaces text in the configuration.
func (s *checkStage) edit(old, with string) {
	s.Helper()
	text := s.read(workspace.ConfigFile)
	if !strings.Contains(text, old) {
		s.Fatalf("the configuration has no %q", old)
	}
	s.write(workspace.ConfigFile, strings.ReplaceAll(text, old, with))
}

func (s *checkStage) engine() *engine.Engine {
	s.Helper()
	if s.feed == nil {
		s.feed = openOlder
	}
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		s.Fatal(err)
	}
	return engine.New(w, engine.Deps{
		Connect: func(context.Context, []byte) (engine.Cluster, error) { return s.cluster, nil },
		Inspect: func(context.Context, []byte) (check.Inspector, error) { return s.inside, nil },
		Provider: func(context.Context, *workspace.Config, *workspace.State) (engine.Cloud, error) {
			return s.cloud, nil
		},
		Releases: s.feed,
		Now:      func() time.Time { return checkTime },
	})
}

// check runs one check and returns what it emitted, too.
func (s *checkStage) check(r check.Request) (check.Check, []plan.Event, error) {
	s.Helper()
	var events []plan.Event
	c, err := s.engine().Check(s.Context(), r, func(e plan.Event) { events = append(events, e) })
	return c, events, err
}

func (s *checkStage) mustCheck(r check.Request) check.Check {
	s.Helper()
	c, _, err := s.check(r)
	if err != nil {
		s.Fatalf("%v (remedy %q)", err, plan.Remedy(err))
	}
	return c
}

// found returns the findings that are worth reading, as "severity id: title".
func found(c check.Check) (out []string) {
	for _, f := range c.Findings {
		if f.Severity != plan.Info {
			out = append(out, fmt.Sprintf("%s %s: %s", f.Severity, f.ID, f.Title))
		}
	}
	return out
}

// table is the version table as text.
func table(c check.Check) string {
	var b strings.Builder
	for _, r := range c.Components {
		fmt.Fprintf(&b, "%s | %s | %s | %s | %s | %s | %s | %s\n", r.Name, r.Kind, r.Now, strings.Join(r.Reachable, ","), r.NextHop, r.Goal, r.Newest, r.Verdict)
	}
	return b.String()
}

func TestCheckReportsVersionsPathAndChanges(t *testing.T) {
	s := newCheckStage(t)
	s.inside.findings = []plan.Finding{{ID: "pdb", Severity: plan.Warn, Title: "a budget without room"}}
	c, events, err := s.check(check.Request{NoDryRun: true})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(`Kubernetes | kubernetes | v1.35.4 |  |  | v1.36.3 | v1.37.2 | v1.36.3 in hop 2
coredns | kubernetes | v1.13.1 |  |  | v1.14.2 | v1.14.6 | in Kubernetes
kube-proxy | kubernetes | v1.35.4 |  |  | v1.36.3 | v1.37.2 | in Kubernetes
OS image | image | v1.0.0 | v1.1.0 | v1.1.0 | v1.1.0 | v1.1.0 | 1 hop
Services | services | v1.0.0 | v1.1.0 | v1.1.0 | v1.1.0 | v1.1.0 | 1 hop
agent | release | v1.0.0 | v1.1.0 | v1.1.0 | v1.1.0 | v1.1.0 | in OS image
join-service | release | v1.0.0 | v1.1.0 | v1.1.0 | v1.1.0 | v1.1.0 | in services
operator | release | v1.0.0 | v1.1.0 | v1.1.0 | v1.1.0 | v1.1.0 | in services
CLI | cli | v1.1.0 |  |  |  |  | not updated
`, table(c)); d != "" {
		t.Errorf("table (-want +got):\n%s", d)
	}
	if d := cmp.Diff(plan.Target{Release: "v1.1.0", Image: "v1.1.0", Kubernetes: "v1.36.3"}, c.Goal); d != "" || len(c.Path) != 2 {
		t.Errorf("goal (-want +got):\n%s%+v", d, c.Path)
	}
	components, err := s.cloud.Components(t.Context(), v("v1.35.4"))
	if err != nil {
		t.Fatal(err)
	}
	want := &plan.Changes{
		Nodes:        map[string]int{"control-plane": 1},
		KindsChanged: []string{"nodeversions.update.edgeless.systems", "scalinggroups.update.edgeless.systems"},
		Measurements: []plan.MeasurementChange{{PCR: 9, From: value(2), To: value(12)}, {PCR: 11, From: value(3), To: value(13)}, {PCR: 12, To: value(14)}},
		ConfigMaps:   []string{"kube-system/" + cluster.ComponentsName(components.List) + " (new)", "kube-system/join-config (changed)"},
		Charts:       []string{"constellation-policies 1.1.0 (new)", "constellation-operator 1.1.0 (new)", "constellation-services 1.1.0 (new)"}, // as the twin has none
		ChartChanges: []plan.ChartChange{
			{Chart: "constellation-policies", Namespace: "constellation-system", To: "1.1.0"}, {Chart: "constellation-operator", Namespace: "constellation-system", To: "1.1.0"}, {Chart: "constellation-services", Namespace: "constellation-system", To: "1.1.0"},
		},
		Images: []plan.ImageChange{
			{Service: "join-service", From: "registry.constellation.example/joinservice:v1.0.0", To: "registry.constellation.example/joinservice:v1.1.0"},
			{Service: "operator", From: "registry.constellation.example/operator:v1.0.0", To: "registry.constellation.example/operator:v1.1.0"},
		},
		Least: 36 * time.Second, Most: 12 * time.Minute,
		Basis: "no run is recorded in this workspace: services 10s-5m (assumed); one machine, 25s-5m (assumed: none was recorded) and 1s-2m for draining (assumed)",
	}
	if d := cmp.Diff(want, c.Changes); d != "" {
		t.Errorf("changes (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]string{"warn pdb: a budget without room"}, found(c)); d != "" {
		t.Errorf("findings (-want +got):\n%s", d)
	}
	if c.Exit != plan.ExitUpgradeAvailable || c.Config == nil || c.Config.Written || len(c.Config.Fields) != 6 {
		t.Errorf("exit %d, configuration %+v", c.Exit, c.Config)
	}
	request := check.PreflightRequest{From: v("v1.35.4"), To: v("v1.35.4"), Release: v("v1.1.0"), Etcd: "3.6.6-0", ReplaceControlPlanes: true, Surge: 1}
	later := request // what the path ends with
	later.To, later.Etcd, later.ReplaceWorkers = v("v1.36.3"), "3.6.8-0", true
	if d := cmp.Diff([]check.PreflightRequest{request, later}, s.inside.asked); d != "" {
		t.Errorf("preflight (-want +got):\n%s", d)
	}

	// Versions and path come first, so that a screen can show them at once.
	var first check.Check
	var told []string
	for _, e := range events {
		told = append(told, e.Object+" "+e.State)
	}
	if d := cmp.Diff([]string{"versions ok", "pdb warn", "later-hops ok"}, told); d != "" {
		t.Fatalf("events (-want +got):\n%s", d)
	}
	if err := json.Unmarshal(events[0].Data, &first); err != nil {
		t.Fatal(err)
	}
	if first.Changes == nil || len(found(first)) > 0 || table(first) != table(c) || !cmp.Equal(first.Path, c.Path) {
		t.Errorf("the first event holds %+v", first)
	}
}

// An invalid kubeconfig is reported as such, not as an API server that does not answer.
func TestInvalidKubeconfig(t *testing.T) {
	s := newCheckStage(t)
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	none := errors.New("read kubeconfig: it is not valid")
	e := engine.New(w, engine.Deps{
		Connect: func(context.Context, []byte) (engine.Cluster, error) { return nil, none },
		Inspect: func(context.Context, []byte) (check.Inspector, error) { return nil, none },
		Provider: func(context.Context, *workspace.Config, *workspace.State) (engine.Cloud, error) {
			return s.cloud, nil
		},
		Releases: s.feed,
		Now:      func() time.Time { return checkTime },
	})
	want := "read " + filepath.Join(s.dir, workspace.KubeconfigFile) + ": read kubeconfig: it is not valid"
	const fix = "restore the file from a backup"
	if _, err := e.Check(t.Context(), check.Request{}, func(plan.Event) {}); err == nil || err.Error() != want || plan.Remedy(err) != fix || plan.ExitCode(err) != plan.ExitUsage {
		t.Errorf("check says %v, fix %q, exit %d", err, plan.Remedy(err), plan.ExitCode(err))
	}
	st, err := e.Status(t.Context())
	if err != nil || st.Reachable || st.Problem != want || st.Remedy != fix {
		t.Errorf("status says %q, fix %q, %v", st.Problem, st.Remedy, err)
	}
	if len(st.Health) == 0 || st.Health[0].ID != workspace.KubeconfigFile || st.Health[0].Title != "constellation-admin.conf leads to no cluster" || st.Health[0].Remedy != fix {
		t.Errorf("health %+v", st.Health)
	}
	if err := e.Watch(t.Context(), engine.WatchRequest{Once: true}, func(plan.Event) {}); err == nil || plan.ExitCode(err) != plan.ExitUsage || !strings.HasPrefix(plan.Remedy(err), fix) {
		t.Errorf("watch says %v, fix %q", err, plan.Remedy(err))
	}
}

// A watch that cannot read the rollout reports the cause with a remedy.
func TestWatchOnceReportsWhyItCannotRead(t *testing.T) {
	s := newCheckStage(t)
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	e := engine.New(w, engine.Deps{Connect: func(context.Context, []byte) (engine.Cluster, error) { return awayCluster{}, nil }})
	err = e.Watch(t.Context(), engine.WatchRequest{Once: true}, func(plan.Event) {})
	if want := "the API server at 127.0.0.1:36443 does not answer"; err == nil || !strings.Contains(err.Error(), want) || plan.Remedy(err) != "try again when the API server answers" {
		t.Errorf("it says %v, fix %q, want %q", err, plan.Remedy(err), want)
	}
	if err := os.Remove(filepath.Join(s.dir, workspace.KubeconfigFile)); err != nil {
		t.Fatal(err)
	}
	err = e.Watch(t.Context(), engine.WatchRequest{Once: true}, func(plan.Event) {})
	if err == nil || !strings.Contains(err.Error(), "there is no constellation-admin.conf") || !strings.Contains(plan.Remedy(err), "`--kubeconfig`") || plan.ExitCode(err) != plan.ExitUsage {
		t.Errorf("without a kubeconfig it says %v, fix %q", err, plan.Remedy(err))
	}
}

// awayCluster is a cluster whose API server does not answer.
type awayCluster struct{ engine.Cluster }

func (awayCluster) Rollout(context.Context) (cluster.Rollout, error) {
	return cluster.Rollout{}, fmt.Errorf("read the rollout: %w", cluster.ErrUnreachable)
}

func TestCheckWithInjectedErrors(t *testing.T) {
	feed := func(err error, state release.State) func(context.Context, string, []release.Key) (release.Source, error) {
		return func(ctx context.Context, location string, keys []release.Key) (release.Source, error) {
			own, _ := openOlder(ctx, "", nil)
			switch {
			case location == "":
				return own, nil
			case err != nil:
				return nil, err
			}
			return staleSource{own, state}, nil
		}
	}
	for _, tt := range []struct {
		name    string
		given   func(*checkStage)
		request check.Request
		// err is a part of the error, remedy of its remedy; exit is its exit code, or that of
		// the result.
		err, remedy string
		exit        int
		find        []string
	}{
		{
			name: "the API server is down", given: func(s *checkStage) { s.inside.err = fmt.Errorf("read version: %w", cluster.ErrUnreachable) },
			request: check.Request{},
			err:     "the API server at 127.0.0.1:36443 does not answer", remedy: "is the control plane up?", exit: 1,
		},
		{
			name: "the API server is slow", given: func(s *checkStage) { s.inside.err = context.DeadlineExceeded },
			request: check.Request{},
			err:     "the API server at 127.0.0.1:36443 does not answer", remedy: "is the control plane up?", exit: 1,
		},
		{
			name: "the API server denies everything", given: func(s *checkStage) { s.inside.err = fmt.Errorf("list nodes: %w", cluster.ErrDenied) },
			request: check.Request{},
			err:     "denied by the API server", remedy: "restore the file", exit: 1,
		},
		{
			name: "the user is authenticated and has too few rights", given: func(s *checkStage) { s.inside.err = fmt.Errorf("list nodes: %w", cluster.ErrForbidden) },
			request: check.Request{},
			err:     "denied by the API server: too few rights", remedy: "use a kubeconfig with this right", exit: 1,
		},
		{
			name: "the kubeconfig leads to another cluster", given: func(s *checkStage) { s.inside.running.JoinConfig.ClusterID = strings.Repeat("ab", 32) },
			request: check.Request{},
			err:     "it leads to another cluster", remedy: "put the files of one cluster back together", exit: 2,
		},
		{
			name: "there is no cluster yet", given: func(s *checkStage) {
				os.Remove(filepath.Join(s.dir, workspace.KubeconfigFile))
				text, _, _ := strings.Cut(s.read(workspace.StateFile), "clusterValues:")
				s.write(workspace.StateFile, text)
			}, request: check.Request{}, err: "there is no constellation-admin.conf", remedy: "create the cluster first", exit: 2,
		},
		{
			name: "the configuration is broken", given: func(s *checkStage) { s.edit("count: 2", "count: two") },
			request: check.Request{},
			err:     "constellation-conf.yaml has 1 problem", remedy: "correct the file", exit: 2,
		},
		{
			name:    "a missing key file",
			request: check.Request{Feed: "/nowhere", FeedKeys: []string{"/nowhere.pub"}},
			err:     "read key /nowhere.pub: no such file or directory", remedy: "pass a file with", exit: 2,
		},
		{
			name: "the preflight fails", given: func(s *checkStage) { s.inside.broken = fmt.Errorf("run preflight: %w", cluster.ErrUnreachable) },
			request: check.Request{}, exit: 6,
			find: []string{"not-checked preflight: preflight checks of the hop did not run"},
		},
		{
			name: "the preflight forbids the hop", given: func(s *checkStage) {
				s.inside.findings = []plan.Finding{{ID: "pdb", Severity: plan.Block, Title: "no room"}}
			}, request: check.Request{}, exit: 4, find: []string{"block pdb: no room"},
		},
		{
			name: "the cloud does not answer", given: func(s *checkStage) { s.cloud.end(fmt.Errorf("ask: %w", cloud.ErrUnavailable)) },
			request: check.Request{}, exit: 6,
			find: []string{"warn measurements-unknown: the measurements of image v1.1.0 are not known", "not-checked cloud-offers: not checked whether the cloud has the images and versions"},
		},
		{
			name: "the sandbox was recreated", given: func(s *checkStage) { s.cloud.uid = "another" },
			request: check.Request{NoPreflight: true}, exit: 6,
			find: []string{"warn measurements-unknown: the measurements of image v1.1.0 are not known", "not-checked cloud-offers: not checked whether the cloud has the images and versions"},
		},
		{
			name: "the feed cannot be used", given: func(s *checkStage) {
				s.feed = feed(errors.New("read index.json: it is signed by none of the keys"), release.State{})
			}, request: check.Request{Feed: "https://releases.example"}, exit: 6, find: []string{"not-checked feed: not checked what the feed knows"},
		},
		{
			name: "the feed is old", given: func(s *checkStage) {
				s.feed = feed(nil, release.State{Source: "https://releases.example", Stale: true, Problem: "no route to host"})
			}, request: check.Request{Feed: "https://releases.example"}, exit: 6, find: []string{"warn feed: an older copy of the feed was used"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newCheckStage(t)
			if tt.given != nil {
				tt.given(s)
			}
			c, events, err := s.check(tt.request)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) || !strings.Contains(plan.Remedy(err), tt.remedy) || plan.ExitCode(err) != tt.exit {
					t.Errorf("error %v, remedy %q, exit %d", err, plan.Remedy(err), plan.ExitCode(err))
				}
				if tt.exit == 1 && c.Exit != 1 {
					t.Errorf("the document says exit %d", c.Exit)
				}
				if tt.exit == 1 { // the data known without the cluster is emitted
					if len(events) != 1 || events[0].State != "block" || !strings.HasPrefix(table(c), "Kubernetes | kubernetes |  |  |  |  | v1.37.2 | not known\n") || c.Components[len(c.Components)-1].Now != "v1.1.0" {
						t.Errorf("told %d events\n%s", len(events), table(c))
					}
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.find, found(c)); d != "" || c.Exit != tt.exit {
				t.Errorf("exit %d, findings (-want +got):\n%s", c.Exit, d)
			}
			for _, f := range c.Findings {
				if f.Severity != plan.Info && f.ID != "pdb" && (f.Detail == "" || f.Remedy == "") {
					t.Errorf("finding %+v lacks detail or remedy", f)
				}
			}
		})
	}
}

// staleSource is a source with a configurable state.
type staleSource struct {
	release.Source
	state release.State
}

func (s staleSource) State() release.State { return s.state }

// encrypts has the cluster encrypt Secrets.
func (s *checkStage) encrypts() {
	s.Helper()
	s.write(workspace.StateFile, s.read(workspace.StateFile)+"  encryptsSecrets: true\n")
}

// TestCheckAnnouncesTheEncryptionOfSecrets checks clusters that the next hop encrypts, and others.
func TestCheckAnnouncesTheEncryptionOfSecrets(t *testing.T) {
	const note = "This upgrade encrypts the Secrets of the cluster in etcd. `encryptSecrets: false` in the configuration prevents that."
	for _, tt := range []struct {
		name  string
		given func(*checkStage)
		want  bool
	}{
		{name: "an existing cluster", given: func(*checkStage) {}, want: true},
		{name: "one that encrypts", given: (*checkStage).encrypts},
		{name: "one whose owner does not want it", given: func(s *checkStage) {
			s.write(workspace.ConfigFile, s.read(workspace.ConfigFile)+"encryptSecrets: false\n")
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newCheckStage(t)
			tt.given(s)
			if c := s.mustCheck(check.Request{}); slices.Contains(c.Notes, note) != tt.want {
				t.Errorf("notes %q, want the announcement %t", c.Notes, tt.want)
			}
		})
	}
}

func TestCheckWritesTheNextHopIntoTheConfiguration(t *testing.T) {
	s := newCheckStage(t)
	s.encrypts()
	before := s.read(workspace.ConfigFile)
	if err := os.Chmod(filepath.Join(s.dir, workspace.ConfigFile), 0o640); err != nil {
		t.Fatal(err)
	}
	c := s.mustCheck(check.Request{WriteConfig: true})
	if !c.Config.Written {
		t.Errorf("configuration %+v", c.Config)
	}
	want := strings.NewReplacer(
		"image: v1.0.0", "image: v1.1.0", "microserviceVersion: v1.0.0", "microserviceVersion: v1.1.0",
		"# keepWorkers: false\n", "# keepWorkers: false\nkeepWorkers: true\n", value(2), value(12),
		`"`+value(3)+"\"\n        warnOnly: false\n", `"`+value(13)+"\"\n        warnOnly: false\n      12:\n        expected: \""+value(14)+"\"\n        warnOnly: false\n",
	).Replace(before)
	if d := cmp.Diff(want, s.read(workspace.ConfigFile)); d != "" {
		t.Errorf("written (-want +got):\n%s", d)
	}
	if info, err := os.Stat(filepath.Join(s.dir, workspace.ConfigFile)); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}

	c = s.mustCheck(check.Request{WriteConfig: true})
	if note := "Nothing to write: constellation-conf.yaml has the values of the next hop already."; c.Config.Written || !cmp.Equal(c.Notes, []string{note}) || s.read(workspace.ConfigFile) != want {
		t.Errorf("a second time: %+v, notes %q", c.Config, c.Notes)
	}
}

// The configuration keeps the former versions when flags named those of an upgrade. A check without a next hop can write those that run.
func TestCheckWritesWhatRunsIntoTheConfiguration(t *testing.T) {
	upgraded := func(s *checkStage) {
		r := &s.inside.running
		r.Services, r.ControlPlaneImage, r.WorkerImage = at("v1.1.0"), at("v1.1.0"), at("v1.1.0")
		r.Kubernetes, r.ControlPlaneKubelet, r.WorkerKubelet, r.Target.Kubernetes = at("v1.36.3"), at("v1.36.3"), at("v1.36.3"), "v1.36.3"
		r.Target.ImageVersion = "v1.1.0"
	}
	all := []workspace.FieldChange{
		{Field: "image", From: "v1.0.0", To: "v1.1.0"},
		{Field: "microserviceVersion", From: "v1.0.0", To: "v1.1.0"},
		{Field: "kubernetesVersion", From: "v1.35.4", To: "v1.36.3"},
		{Field: "attestation.tpm2.measurements.9.expected", From: value(2), To: value(12)},
		{Field: "attestation.tpm2.measurements.11.expected", From: value(3), To: value(13)},
		{Field: "attestation.tpm2.measurements.12", To: value(14)},
	}
	for _, tt := range []struct {
		name    string
		given   func(*checkStage)
		request check.Request
		want    []workspace.FieldChange
		note    string
	}{
		{name: "after an upgrade to versions that flags named", given: upgraded, want: all},
		{name: "it has what runs", given: func(*checkStage) {}, request: check.Request{Release: v("v1.0.0")}, note: "Nothing to write: there is no next hop."},
		{
			name: "the configuration is newer", given: func(s *checkStage) { s.edit("image: v1.0.0", "image: v1.1.0") }, request: check.Request{Kubernetes: v("v1.35.4")},
			note: "constellation-conf.yaml names newer versions than the cluster runs. `constellation upgrade check --write-config --to v1.0.0` writes those that run.",
		},
		{
			name: "the user names the older release", given: func(s *checkStage) { s.edit("image: v1.0.0", "image: v1.1.0") }, request: check.Request{Release: v("v1.0.0")},
			want: []workspace.FieldChange{{Field: "image", From: "v1.1.0", To: "v1.0.0"}},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newCheckStage(t)
			tt.given(s)
			before := s.read(workspace.ConfigFile)
			r := tt.request
			r.NoPreflight = true
			if c := s.mustCheck(r); tt.want != nil && (c.Config == nil || c.Config.Written || len(c.Path) > 0) || s.read(workspace.ConfigFile) != before {
				t.Fatalf("without the flag: path %v, configuration %+v, notes %q", c.Path, c.Config, c.Notes)
			}
			r.WriteConfig = true
			c := s.mustCheck(r)
			if tt.want == nil {
				if c.Config != nil || s.read(workspace.ConfigFile) != before || !slices.Contains(c.Notes, tt.note) {
					t.Errorf("configuration %+v, notes %q, want %q", c.Config, c.Notes, tt.note)
				}
				return
			}
			if c.Config == nil || !c.Config.Written {
				t.Fatalf("nothing was written: %q", c.Notes)
			}
			if d := cmp.Diff(tt.want, c.Config.Fields); d != "" {
				t.Errorf("written (-want +got):\n%s", d)
			}
			if c = s.mustCheck(r); c.Config != nil {
				t.Errorf("a second time: %+v", c.Config)
			}
		})
	}
}

func TestCheckCorrectsMeasurementsOfAnImageEditedByHand(t *testing.T) {
	s := newCheckStage(t)
	s.edit("image: v1.0.0", "image: v1.1.0")
	c := s.mustCheck(check.Request{WriteConfig: true, NoPreflight: true})
	want := []workspace.FieldChange{
		{Field: "microserviceVersion", From: "v1.0.0", To: "v1.1.0"},
		{Field: "keepWorkers", From: "false", To: "true"},
		{Field: "attestation.tpm2.measurements.9.expected", From: value(2), To: value(12)},
		{Field: "attestation.tpm2.measurements.11.expected", From: value(3), To: value(13)},
	}
	if d := cmp.Diff(want, c.Config.Fields); d != "" {
		t.Errorf("changes (-want +got):\n%s", d)
	}
}

func TestCheckReportsFindingsOfLaterHops(t *testing.T) {
	s := newCheckStage(t)
	s.inside.findings = []plan.Finding{{ID: "pdb", Severity: plan.Warn, Title: "a budget without room"}, {ID: "nodes", Severity: plan.Info, Title: "fine"}}
	s.inside.later = []plan.Finding{
		{ID: "webhook", Severity: plan.Block, Title: "no endpoint answers it"},
		{ID: "capacity", Severity: plan.Info, Title: "fine"},
		{ID: "metrics", Severity: plan.NotChecked, Title: "not read"},
	}
	c := s.mustCheck(check.Request{})
	if d := cmp.Diff([]string{"warn pdb: a budget without room", "warn webhook: a later hop: no endpoint answers it"}, found(c)); d != "" {
		t.Errorf("findings (-want +got):\n%s", d)
	}
	if c.Exit != plan.ExitUpgradeAvailable {
		t.Errorf("exit %d: a blocking finding of a later hop must not block this one", c.Exit)
	}
}

func TestCheckDoesNotOverwriteAConcurrentEdit(t *testing.T) {
	s := newCheckStage(t)
	s.inside.meanwhile = func() { s.edit("count: 2", "count: 3") }
	before := s.read(workspace.ConfigFile)
	_, _, err := s.check(check.Request{WriteConfig: true})
	if err == nil || !strings.Contains(err.Error(), "somebody changed it meanwhile") || plan.ExitCode(err) != plan.ExitUsage {
		t.Errorf("got %v", err)
	}
	if got := s.read(workspace.ConfigFile); got != strings.Replace(before, "count: 2", "count: 3", 1) {
		t.Errorf("the configuration became\n%s", got)
	}

	s = newCheckStage(t)
	s.cloud.end(cloud.ErrUnavailable)
	before = s.read(workspace.ConfigFile)
	_, _, err = s.check(check.Request{WriteConfig: true})
	if err == nil || !strings.Contains(err.Error(), "the measurements of image v1.1.0 are not known") || plan.Remedy(err) == "" || s.read(workspace.ConfigFile) != before {
		t.Errorf("without measurements: %v", err)
	}
}

func TestCheckStopsWhenInterrupted(t *testing.T) {
	s := newCheckStage(t)
	ctx, cancel := context.WithCancel(t.Context())
	s.inside.meanwhile = cancel
	if _, err := s.engine().Check(ctx, check.Request{WriteConfig: true}, func(plan.Event) {}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if strings.Contains(s.read(workspace.ConfigFile), "image: v1.1.0") {
		t.Error("the interrupted check has written the configuration")
	}
}

func TestHomeSuggestsToCheckForUpgrades(t *testing.T) {
	for _, tt := range []struct{ name, old, with, why string }{
		{name: "release and Kubernetes are older", why: "release v1.1.0 and Kubernetes v1.37.2 are known"},
		{name: "Kubernetes is older", old: "v1.0.0", with: "v1.1.0", why: "Kubernetes v1.37.2 is known"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newCheckStage(t)
			if tt.old != "" {
				s.edit(tt.old, tt.with)
			}
			h, err := s.engine().Home(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			want := engine.Suggestion{Title: "Check for upgrades", Command: "constellation upgrade check -C " + s.dir, Why: tt.why}
			if len(h.Next) != 2 || h.Next[1] != want {
				t.Errorf("next %+v, want %+v", h.Next, want)
			}
		})
	}
}

func TestEstimatesComeFromRecordedRuns(t *testing.T) {
	s := newCheckStage(t)
	dir := filepath.Join(s.dir, plan.RunsDir, "init-20261121070501-1a2b3c4d")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	start := time.Date(2026, 11, 21, 7, 0, 0, 0, time.UTC)
	var lines []byte
	for _, e := range []plan.Event{
		{Kind: plan.KindNode, Node: "a", To: plan.NodeBooting, Time: start},
		{Kind: plan.KindNode, Node: "b", To: plan.NodeCreating, Time: start},
		{Kind: plan.KindNode, Node: "b", To: plan.NodeBooting, Time: start.Add(5 * time.Second)},
		{Kind: plan.KindNode, Node: "c", To: plan.NodeBooting, Time: start},
		{Kind: plan.KindNode, Node: "a", To: plan.NodeReady, Time: start.Add(10 * time.Second)},
		{Kind: plan.KindNode, Node: "c", To: plan.NodeFailed, Time: start.Add(12 * time.Second)},
		{Kind: plan.KindNode, Node: "c", To: plan.NodeReady, Time: start.Add(time.Hour)},
		{Kind: plan.KindNode, Node: "b", To: plan.NodeReady, Time: start.Add(20 * time.Second)},
		{Kind: plan.KindStep, Step: plan.StepCharts, State: plan.StateDone, TookMS: 10_000},
	} {
		b, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		lines = append(append(lines, b...), '\n')
	}
	if err := os.WriteFile(filepath.Join(dir, engine.EventsFile), append(lines, `{"kind":"node","no`...), 0o600); err != nil {
		t.Fatal(err)
	}
	c := s.mustCheck(check.Request{NoPreflight: true})
	want := "1 run recorded in constellation-upgrade: services 8s-15s (recorded); one machine, 8s-30s (from boot to Ready, 2 recorded) and 1s-2m for draining (assumed)"
	if c.Changes.Basis != want || c.Changes.Least != 17*time.Second || c.Changes.Most != 165*time.Second {
		t.Errorf("%s to %s: %s", c.Changes.Least, c.Changes.Most, c.Changes.Basis)
	}
}

// If Kubernetes changes, the estimate includes kubeadm.
func TestEstimateOfANewKubernetesCountsKubeadm(t *testing.T) {
	s := newCheckStage(t)
	r := &s.inside.running
	r.Services, r.ControlPlaneImage, r.WorkerImage = at("v1.1.0"), at("v1.1.0"), at("v1.1.0")
	r.Target = cluster.NodeTarget{ImageVersion: "v1.1.0", Kubernetes: "v1.35.4"}
	for old, now := range map[string]string{"image: v1.0.0": "image: v1.1.0", "microserviceVersion: v1.0.0": "microserviceVersion: v1.1.0"} {
		s.edit(old, now)
	}
	c := s.mustCheck(check.Request{NoPreflight: true, Kubernetes: v("v1.36.3")})
	if c.Changes == nil {
		t.Fatalf("no hop: %v", found(c))
	}
	want := "no run is recorded in this workspace: services 10s-5m (assumed); kubeadm on one control plane 1m30s-10m (assumed); 3 machines one after the other, each 25s-5m (assumed: none was recorded) and 1s-2m for draining (assumed)"
	if c.Changes.Basis != want || c.Changes.Least != 178*time.Second || c.Changes.Most != 36*time.Minute {
		t.Errorf("%s to %s: %s", c.Changes.Least, c.Changes.Most, c.Changes.Basis)
	}

	for i := range r.Nodes { // workers stay the machines that they are: none of them boots or joins
		r.Nodes[i].InPlace = r.Nodes[i].Role != "control-plane"
	}
	c = s.mustCheck(check.Request{NoPreflight: true, Kubernetes: v("v1.36.3")})
	want = "no run is recorded in this workspace: services 10s-5m (assumed); kubeadm on one control plane 1m30s-10m (assumed); one machine, 25s-5m (assumed: none was recorded) and 1s-2m for draining (assumed); " +
		"2 nodes in place one after the other, each 11s-7m with draining (assumed)"
	if h := c.Path[0]; h.ControlPlanesInPlace != "" || h.WorkersInPlace != compat.AllNodes {
		t.Errorf("workers in place: hop 1 has %q and %q", h.ControlPlanesInPlace, h.WorkersInPlace)
	}
	if c.Changes.Basis != want || c.Changes.Least != 148*time.Second || c.Changes.Most != 36*time.Minute || len(c.Changes.InPlace) != 1 {
		t.Errorf("%s to %s: %s, in place %v", c.Changes.Least, c.Changes.Most, c.Changes.Basis, c.Changes.InPlace)
	}
	for i := range r.Nodes { // the first control plane needs no more than kubeadm
		r.Nodes[i].InPlace = true
	}
	c = s.mustCheck(check.Request{NoPreflight: true, Kubernetes: v("v1.36.3")})
	if h := c.Path[0]; h.ControlPlanesInPlace != compat.AllNodes || h.WorkersInPlace != compat.AllNodes {
		t.Errorf("all in place: hop 1 has %q and %q", h.ControlPlanesInPlace, h.WorkersInPlace)
	}
	if c.Changes.Least != (10+90+2*11)*time.Second || len(c.Changes.Nodes) != 0 || len(c.Changes.InPlace) != 2 {
		t.Errorf("all in place: %s: %s, replaced %v, in place %v", c.Changes.Least, c.Changes.Basis, c.Changes.Nodes, c.Changes.InPlace)
	}
}

func TestCheckFollowsTheMatrix(t *testing.T) {
	newest := func(s *checkStage) {
		r := &s.inside.running
		r.Services, r.ControlPlaneImage, r.WorkerImage = at("v1.1.0"), at("v1.1.0"), at("v1.1.0")
		r.Kubernetes, r.ControlPlaneKubelet, r.WorkerKubelet, r.Etcd = at("v1.37.2"), at("v1.37.2"), at("v1.37.2"), "3.7.0-0"
		r.Target = cluster.NodeTarget{ImageVersion: "v1.1.0", Kubernetes: "v1.37.2"}
		for old, now := range map[string]string{
			"image: v1.0.0": "image: v1.1.0", "microserviceVersion: v1.0.0": "microserviceVersion: v1.1.0", "v1.35.4": "v1.37.2",
			value(2): value(12), `"` + value(3) + "\"\n        warnOnly: false\n": `"` + value(13) + "\"\n        warnOnly: false\n      12:\n        expected: \"" + value(14) + "\"\n        warnOnly: false\n",
		} {
			s.edit(old, now)
		}
	}
	for _, tt := range []struct {
		name    string
		given   func(*checkStage)
		request check.Request
		path    []string // CLI: target
		exit    int
		find    []string // beginnings of findings, in order
		notes   []string
	}{
		{
			name: "an older CLI must bring Kubernetes up first", given: func(s *checkStage) {
				r := &s.inside.running
				r.Kubernetes, r.ControlPlaneKubelet, r.WorkerKubelet, r.Etcd, r.Target.Kubernetes = at("v1.34.2"), at("v1.34.2"), at("v1.34.2"), "3.6.5-0", "v1.34.2"
				s.edit("v1.35.4", "v1.34.2")
			},
			request: check.Request{},
			path:    []string{"v1.0.0: v1.0.0, image v1.0.0, Kubernetes v1.35.4", "v1.1.0: v1.1.0, image v1.1.0, Kubernetes v1.35.4", "v1.1.0: v1.1.0, image v1.1.0, Kubernetes v1.36.3"},
			exit:    6,
		},
		{name: "everything is new", given: newest, request: check.Request{}, notes: []string{"The cluster runs the newest known versions."}},
		{
			name: "the mirror has nothing newer", given: func(s *checkStage) {
				newest(s)
				r := &s.inside.running
				r.Kubernetes, r.ControlPlaneKubelet, r.WorkerKubelet, r.Target.Kubernetes = at("v1.36.3"), at("v1.36.3"), at("v1.36.3"), "v1.36.3"
				s.edit("v1.37.2", "v1.36.3")
			}, request: check.Request{}, exit: 4,
		},
		{name: "a goal that is reached already", given: newest, request: check.Request{Release: v("v1.1.0")}, notes: []string{"The cluster runs the requested versions already."}},
		{name: "a release alone comes with the newest Kubernetes", request: check.Request{Release: v("v1.1.0")}, path: []string{"v1.1.0: v1.1.0, image v1.1.0, Kubernetes v1.35.4", "v1.1.0: v1.1.0, image v1.1.0, Kubernetes v1.36.3"}, exit: 6},
		{name: "a Kubernetes alone comes with the newest release", request: check.Request{Kubernetes: v("v1.36.3")}, path: []string{"v1.1.0: v1.1.0, image v1.1.0, Kubernetes v1.35.4", "v1.1.0: v1.1.0, image v1.1.0, Kubernetes v1.36.3"}, exit: 6},
		{name: "a release and a Kubernetes", request: check.Request{Release: v("v1.1.0"), Kubernetes: v("v1.35.4")}, path: []string{"v1.1.0: v1.1.0, image v1.1.0, Kubernetes v1.35.4"}, exit: 6},
		{name: "the release that runs", request: check.Request{Release: v("v1.0.0")}, notes: []string{"The cluster runs the requested versions already."}},
		{name: "the Kubernetes that runs", request: check.Request{Kubernetes: v("v1.35.4")}, notes: []string{"The cluster runs the requested versions already."}},
		{name: "an unknown release", request: check.Request{Release: v("v1.7.0")}, exit: 4, find: []string{"block unknown-release: release v1.7.0 is unknown"}},
		{name: "a Kubernetes that no release has", request: check.Request{Kubernetes: v("v1.36.99")}, exit: 4, find: []string{"block kubernetes-offered: "}},
		{name: "a Kubernetes that the mirror does not have", request: check.Request{Kubernetes: v("v1.36.4")}, exit: 4, find: []string{"block "}},
		{name: "a downgrade", given: newest, request: check.Request{Release: v("v1.0.0")}, exit: 4, find: []string{"block never-down: "}},
		{
			name: "a cluster that is newer than this program", given: func(s *checkStage) {
				r := &s.inside.running
				r.Services, r.ControlPlaneImage, r.WorkerImage, r.Target.ImageVersion = at("v1.2.0"), at("v1.2.0"), at("v1.2.0"), "v1.2.0"
			},
			request: check.Request{}, exit: 4,
			find: []string{"block cli-older: the cluster runs release v1.2.0, which is newer than this program, v1.1.0", "warn running-release: the running release v1.2.0 is unknown", "warn config-target: ", "warn config-target: "},
		},
		{
			name: "a patch of Kubernetes that was never supported", given: func(s *checkStage) {
				r := &s.inside.running
				r.Kubernetes, r.ControlPlaneKubelet, r.WorkerKubelet, r.Target.Kubernetes = at("v1.35.77"), at("v1.35.77"), at("v1.35.77"), "v1.35.77"
			},
			request: check.Request{Release: v("v1.1.0"), Kubernetes: v("v1.35.77")},
			path:    []string{"v1.1.0: v1.1.0, image v1.1.0, Kubernetes v1.35.77"},
			exit:    6,
			find:    []string{"warn running-kubernetes: the running Kubernetes v1.35.77 is not in release v1.0.0", "warn config-target: constellation-conf.yaml, line 15 requests an impossible combination: Kubernetes would be downgraded from v1.35.77 to v1.35.4"},
		},
		{
			name: "a rollout that is under way", given: func(s *checkStage) {
				r := &s.inside.running
				r.Services, r.ControlPlaneImage, r.Target.ImageVersion = at("v1.1.0"), compat.Span{Oldest: v("v1.0.0"), Newest: v("v1.1.0")}, "v1.1.0"
			},
			request: check.Request{},
			path:    []string{"v1.1.0: v1.1.0, image v1.1.0, Kubernetes v1.35.4", "v1.1.0: v1.1.0, image v1.1.0, Kubernetes v1.36.3"},
			exit:    6,
			find:    []string{"warn rollout-running: a rollout is in progress (image of the control planes v1.0.0 to v1.1.0)", "warn config-target: ", "warn config-target: "},
		},
		{
			name: "measurements that get weaker", given: func(s *checkStage) {
				s.edit("expected: \""+value(2)+"\"\n        warnOnly: false", "expected: \""+value(2)+"\"\n        warnOnly: true")
			},
			request: check.Request{Release: v("v1.1.0"), Kubernetes: v("v1.35.4")},
			path:    []string{"v1.1.0: v1.1.0, image v1.1.0, Kubernetes v1.35.4"},
			exit:    4,
			find:    []string{"block measurements-weaker: PCR 9 would no longer be enforced"},
		},
		{
			name: "another variant of attestation", given: func(s *checkStage) {
				s.inside.running.JoinConfig.Attestation = strings.Replace(s.inside.running.JoinConfig.Attestation, "tpm2", "sev-snp", 1)
			},
			request: check.Request{Release: v("v1.1.0"), Kubernetes: v("v1.35.4")},
			path:    []string{"v1.1.0: v1.1.0, image v1.1.0, Kubernetes v1.35.4"},
			exit:    4,
			find:    []string{`block variant: the attestation variant would change from "sev-snp" to "tpm2"`},
		},
		{
			name: "an API server that forbids what the path does not need", given: func(s *checkStage) {
				s.inside.running.Denied = []cluster.Denial{{Verb: "get", Resource: "configmaps", Namespace: "kube-system", User: "reader"}, {Verb: "list", Resource: "customresourcedefinitions.apiextensions.k8s.io", User: "reader"}}
			},
			request: check.Request{NoPreflight: true},
			path:    []string{"v1.1.0: v1.1.0, image v1.1.0, Kubernetes v1.35.4", "v1.1.0: v1.1.0, image v1.1.0, Kubernetes v1.36.3"},
			exit:    6,
			find:    []string{`not-checked running-denied: user "reader" may not read all objects that have the running versions`},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newCheckStage(t)
			s.encrypts()
			if tt.given != nil {
				tt.given(s)
			}
			c := s.mustCheck(tt.request)
			if c.Exit == plan.ExitUpgradeAvailable && slices.ContainsFunc(c.Findings, func(f plan.Finding) bool { return f.Severity == plan.Block }) {
				t.Errorf("exit %d although something blocks: %q", c.Exit, found(c))
			}
			var path []string
			for _, h := range c.Path {
				path = append(path, h.CLI.String()+": "+h.To.String())
			}
			if d := cmp.Diff(tt.path, path); d != "" {
				t.Errorf("path (-want +got):\n%s", d)
			}
			if c.Exit != tt.exit {
				t.Errorf("exit %d, want %d", c.Exit, tt.exit)
			}
			got := found(c)
			if len(got) < len(tt.find) || len(tt.find) == 0 && len(got) > 0 {
				t.Fatalf("findings %q, want %q", got, tt.find)
			}
			for i, f := range tt.find {
				if !strings.HasPrefix(got[i], f) {
					t.Errorf("finding %q, want %q", got[i], f)
				}
			}
			if d := cmp.Diff(tt.notes, c.Notes); d != "" {
				t.Errorf("notes (-want +got):\n%s", d)
			}
		})
	}
}

// publish makes a signed feed of the program's releases and one that comes after them,
// with its measurements, and returns where it is and the file of the public key.
func publish(t *testing.T) (feed, key string) {
	t.Helper()
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	from, dir := t.TempDir(), t.TempDir()
	put := func(name string, b []byte) {
		t.Helper()
		path := filepath.Join(from, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"v1.0.0.yaml", "v1.1.0.yaml"} {
		b := olderRelease(t, name)
		put(name, b)
		if name == "v1.1.0.yaml" {
			put("v1.2.0.yaml", []byte(strings.NewReplacer("v1.1.0", "v1.2.0", "upgradeFrom: v1.0.0", "upgradeFrom: v1.1.0").Replace(string(b))))
		}
	}
	put("v1.2.0/measurements/sandbox.json", fmt.Appendf(nil, `{"schema": "1", "version": "v1.2.0", "provider": "sandbox", "measurements": {"4": "%s", "9": "%s"}}`, value(21), value(22)))
	k, err := engine.NewFeedKey(filepath.Join(dir, "feed.key"))
	if err != nil {
		t.Fatal(err)
	}
	feed = filepath.Join(dir, "feed")
	if _, err := engine.BuildFeed(t.Context(), engine.FeedBuild{From: from, Out: feed, KeyFile: k.Private}); err != nil {
		t.Fatal(err)
	}
	return feed, k.Public
}

func TestCheckLearnsOfNewerReleasesFromAFeed(t *testing.T) {
	feed, key := publish(t)
	var requests atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		http.FileServer(http.Dir(feed)).ServeHTTP(w, r)
	}))
	defer server.Close()
	pem, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name    string
		given   func(*checkStage)
		request check.Request
	}{
		{name: "an address", request: check.Request{Feed: server.URL, FeedKeys: []string{key}, NoPreflight: true}},
		{name: "a directory", request: check.Request{Feed: feed, FeedKeys: []string{key}, NoPreflight: true}},
		{name: "one that the configuration names", given: func(s *checkStage) {
			if err := os.CopyFS(filepath.Join(s.dir, "feed"), os.DirFS(feed)); err != nil {
				s.Fatal(err)
			}
			s.write(workspace.ConfigFile, s.read(workspace.ConfigFile)+"releases:\n  feed: feed\n  keys: |\n    "+strings.ReplaceAll(strings.TrimSpace(string(pem)), "\n", "\n    ")+"\n")
		}, request: check.Request{NoPreflight: true}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newCheckStage(t)
			s.cloud.extra = "v1.2.0"
			if tt.given != nil {
				tt.given(s)
			}
			requests.Store(0)
			c := s.mustCheck(tt.request)
			if n := requests.Load(); n > 4 { // one is for v1.2.0, which only the feed has
				t.Errorf("%d requests of the feed", n)
			}
			if c.Feed.Problem != "" || c.Feed.Source == "embedded" || c.Feed.Signer == "" || c.Feed.Sequence != 1 {
				t.Errorf("feed %+v", c.Feed)
			}
			var path []string
			for _, h := range c.Path {
				path = append(path, h.CLI.String()+": "+h.To.String()+": "+h.Get)
			}
			if d := cmp.Diff([]string{
				"v1.1.0: v1.1.0, image v1.1.0, Kubernetes v1.35.4: ",
				"v1.2.0: v1.2.0, image v1.2.0, Kubernetes v1.36.3: get constellation v1.2.0 from the publisher of this program",
			}, path); d != "" {
				t.Errorf("path (-want +got):\n%s", d)
			}
			if d := cmp.Diff([]string{compat.NoteNewerCLI, compat.NoteFinishServices}, c.Notes); d != "" {
				t.Errorf("notes (-want +got):\n%s", d)
			}
			if last := c.Components[len(c.Components)-1]; last.Newest != "v1.2.0" || last.Verdict != "hop 2 needs v1.2.0" {
				t.Errorf("CLI %+v", last)
			}

			// The cluster has arrived at v1.1.0: now the other program is needed.
			r := &s.inside.running
			r.Services, r.ControlPlaneImage, r.WorkerImage, r.Target.ImageVersion = at("v1.1.0"), at("v1.1.0"), at("v1.1.0"), "v1.1.0"
			s.edit("image: v1.0.0", "image: v1.1.0")
			s.edit("microserviceVersion: v1.0.0", "microserviceVersion: v1.1.0")
			s.edit(value(2), value(12))
			r.JoinConfig.Attestation = strings.Replace(r.JoinConfig.Attestation, value(2), value(12), 1)
			c = s.mustCheck(tt.request)
			if len(c.Path) != 1 || !c.Path[0].CLI.Equal(v("v1.2.0")) || len(c.Changes.KindsChanged) > 0 {
				t.Errorf("path %+v, kinds %v", c.Path, c.Changes.KindsChanged)
			}
			want := []plan.MeasurementChange{{PCR: 4, From: value(1), To: value(21)}, {PCR: 9, From: value(12), To: value(22)}, {PCR: 11, From: value(3), Weaker: true}}
			if d := cmp.Diff(want, c.Changes.Measurements); d != "" {
				t.Errorf("measurements (-want +got):\n%s", d)
			}
			if d := cmp.Diff([]string{compat.NoteNewerCLI, "Which kinds hop 1 changes only constellation v1.2.0 knows."}, c.Notes); d != "" {
				t.Errorf("notes (-want +got):\n%s", d)
			}
		})
	}
}

func TestCheckSaysWhatIsInTheWayBeyondThePath(t *testing.T) {
	s := newCheckStage(t)
	c := s.mustCheck(check.Request{NoPreflight: true})
	if n := len(c.Path); n == 0 || c.Path[n-1].To.Kubernetes != "v1.36.3" {
		t.Fatalf("path %+v", c.Path)
	}
	for _, b := range c.Blocked {
		if b.Component == "kubernetes" && b.Version == "v1.36.4" {
			if b.Rule != "offered-kubernetes" || b.Reason != "the mirror has no v1.36.4" {
				t.Errorf("v1.36.4 is not reachable because of %s: %s; the path clears what is in its way now", b.Rule, b.Reason)
			}
			return
		}
	}
	t.Errorf("nothing is said about v1.36.4: %+v", c.Blocked)
}

// faultySource says of versions of its own releases that they were found faulty.
type faultySource struct {
	release.Source
	why map[string]string
}

func (f faultySource) Summaries(ctx context.Context) ([]release.Summary, error) {
	all, err := f.Source.Summaries(ctx)
	for i := range all {
		all[i].Faulty = f.why[all[i].Version.String()]
		all[i].Kubernetes = slices.Clone(all[i].Kubernetes)
		for j, k := range all[i].Kubernetes {
			all[i].Kubernetes[j].Faulty = f.why[k.Version.String()]
		}
	}
	return all, err
}

func (f faultySource) State() release.State { return release.State{Source: "https://releases.example"} }

// faulty makes the stage's feed say what was found faulty.
func (s *checkStage) faulty(why map[string]string) {
	s.feed = func(ctx context.Context, location string, _ []release.Key) (release.Source, error) {
		own, err := openOlder(ctx, "", nil)
		if location == "" {
			return own, err
		}
		return faultySource{own, why}, err
	}
}

func TestCheckReportsFaultyReleasesThatRun(t *testing.T) {
	for _, tt := range []struct {
		name   string
		given  func(*checkStage)
		why    map[string]string
		titles []string
		remedy string
	}{
		{name: "nothing"},
		{name: "a release that the next hop leaves", why: map[string]string{"v1.0.0": "leaks"}, titles: []string{"the running release v1.0.0 is marked as faulty: leaks"}, remedy: "the next hop leads away from it, to v1.1.0"},
		{name: "an image alone", given: func(s *checkStage) { s.inside.running.Services = at("v1.1.0") }, why: map[string]string{"v1.0.0": "leaks"}, titles: []string{"the running image v1.0.0 is marked as faulty: leaks"}, remedy: "the next hop leads away from it, to v1.1.0"},
		{name: "a Kubernetes that the second hop leaves", why: map[string]string{"v1.35.4": "crashes"}, titles: []string{"the running Kubernetes v1.35.4 is marked as faulty: crashes"}, remedy: "hop 2 leads away from it, to v1.36.3"},
		{name: "one of those that nodes run", given: func(s *checkStage) { s.inside.running.WorkerKubelet = at("v1.34.2") }, why: map[string]string{"v1.34.2": "crashes"}, titles: []string{"the running Kubernetes v1.34.2 is marked as faulty: crashes"}, remedy: "hop 2 leads away from it, to v1.36.3"},
		{name: "a release that there is no way from", why: map[string]string{"v1.0.0": "leaks", "v1.1.0": "leaks more", "v1.35.4": "", "v1.36.3": "", "v1.36.4": ""}, titles: []string{"the running release v1.0.0 is marked as faulty: leaks"}, remedy: "wait for a newer version, and check again then"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newCheckStage(t)
			if tt.given != nil {
				tt.given(s)
			}
			s.faulty(tt.why)
			c := s.mustCheck(check.Request{NoPreflight: true, Feed: "https://releases.example"})
			var titles []string
			for _, f := range c.Findings {
				if f.ID == "running-faulty" || f.ID == "faulty" && f.Severity != plan.Info {
					titles = append(titles, f.Title)
					if f.Severity != plan.Warn || f.Remedy != tt.remedy {
						t.Errorf("%s: remedy %q, want %q", f.Severity, f.Remedy, tt.remedy)
					}
				}
			}
			if d := cmp.Diff(tt.titles, titles); d != "" {
				t.Errorf("findings (-want +got):\n%s\n%+v", d, c.Path)
			}
		})
	}
}

func TestRowsOfComponentsThatAreNotRequested(t *testing.T) {
	for _, tt := range []struct {
		name    string
		request check.Request
		want    map[string]string
	}{
		{name: "a release that runs", request: check.Request{Release: v("v1.0.0")}, want: map[string]string{
			"Kubernetes": "not asked for", "coredns": "not asked for", "kube-proxy": "not asked for", "OS image": "not asked for", "Services": "not asked for",
			"agent": "not asked for", "join-service": "not asked for", "operator": "not asked for", "CLI": "not updated",
		}},
		{name: "a Kubernetes that stays", request: check.Request{Release: v("v1.1.0"), Kubernetes: v("v1.35.4")}, want: map[string]string{
			"Kubernetes": "not asked for", "coredns": "not asked for", "kube-proxy": "not asked for", "OS image": "1 hop", "Services": "1 hop",
			"agent": "in OS image", "join-service": "in services", "operator": "in services", "CLI": "not updated",
		}},
		{name: "an impossible version", request: check.Request{Kubernetes: v("v1.36.99")}, want: map[string]string{
			"Kubernetes": "not reachable", "coredns": "not reachable", "kube-proxy": "not reachable", "OS image": "not reachable", "Services": "not reachable",
			"agent": "not reachable", "join-service": "not reachable", "operator": "not reachable", "CLI": "not updated",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.request.NoPreflight = true
			c, got := newCheckStage(t).mustCheck(tt.request), map[string]string{}
			for _, r := range c.Components {
				got[r.Name] = r.Verdict
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("verdicts (-want +got):\n%s", d)
			}
		})
	}
}

func TestCheckWithFewRights(t *testing.T) {
	s := newCheckStage(t)
	r := &s.inside.running
	r.Parts, r.Services, r.Kinds, r.Target, r.JoinConfig = nil, compat.Span{}, nil, cluster.NodeTarget{}, cluster.JoinConfig{}
	r.Denied = []cluster.Denial{
		{Verb: "get", Resource: "configmaps", Namespace: "kube-system", User: "system:serviceaccount:ops:reader"},
		{Verb: "list", Resource: "deployments.apps", Namespace: "constellation-system", User: "system:serviceaccount:ops:reader"},
		{Verb: "get", Resource: "nodeversions.update.edgeless.systems", User: "system:serviceaccount:ops:reader"},
	}
	c, events, err := s.check(check.Request{})
	if err == nil || plan.ExitCode(err) != 1 || c.Exit != 1 || !errors.Is(err, cluster.ErrForbidden) || len(events) != 1 || events[0].State != "block" {
		t.Errorf("error %v, the document says exit %d, told %+v", err, c.Exit, events)
	}
	const command = "kubectl create clusterrole constellation-check --verb=get,list --resource=configmaps,deployments.apps,nodeversions.update.edgeless.systems" +
		" && kubectl create clusterrolebinding constellation-check --clusterrole=constellation-check --serviceaccount=ops:reader"
	want := []plan.Finding{{
		ID: "running-denied", Severity: plan.Block, Source: "versions", Title: `user "system:serviceaccount:ops:reader" may not read all objects that have the running versions`,
		Detail:  "the API server refused to get configmaps in kube-system, list deployments.apps in constellation-system and get nodeversions.update.edgeless.systems",
		Remedy:  "use a kubeconfig that may, such as the one that `constellation init` wrote, or let an administrator allow it: `" + command + "`",
		Command: command, Reference: "https://kubernetes.io/docs/reference/access-authn-authz/rbac/",
	}}
	if d := cmp.Diff(want, c.Findings); d != "" {
		t.Errorf("findings (-want +got):\n%s", d)
	}
	if len(c.Path) > 0 || len(c.Blocked) > 0 || !strings.HasPrefix(table(c), "Kubernetes | kubernetes | v1.35.4 |  |  |  | v1.37.2 | not known\n") {
		t.Errorf("path %v, blocked %v\n%s", c.Path, c.Blocked, table(c))
	}

	// No part of a user's name gets into a command.
	for i := range r.Denied {
		r.Denied[i].User = "x; rm -rf /"
	}
	c, _, _ = s.check(check.Request{})
	if f := c.Findings[0]; !strings.HasSuffix(f.Command, " --user=NAME") || !strings.HasPrefix(f.Title, `user "x; rm -rf /" may`) {
		t.Errorf("%q, command %q", f.Title, f.Command)
	}
}

func TestCheckTellsMeasurementsThatGetWeaker(t *testing.T) {
	s := newCheckStage(t)
	s.edit("expected: \""+value(2)+"\"\n        warnOnly: false", "expected: \""+value(2)+"\"\n        warnOnly: true")
	s.edit("      11:\n        expected: \""+value(3)+"\"\n        warnOnly: false\n", "")
	changes := []plan.MeasurementChange{
		{PCR: 9, From: value(2), To: value(12) + " (warns only)", Weaker: true}, {PCR: 11, From: value(3), Weaker: true}, {PCR: 12, To: value(14)},
	}
	const title = "PCR 9 and 11 would no longer be enforced"
	detail := "PCR 9 of image v1.1.0 is " + value(12) + "; PCR 11 of image v1.1.0 is " + value(13)
	remedy := "write the expected value of PCR 9 and 11 of the new image into the configuration, without warnOnly"
	note := "--write-config leaves measurements weakened: " + title + " (" + detail + "); " + remedy + "."
	for _, tt := range []struct {
		name    string
		request check.Request
		written bool
		notes   []string
	}{
		{name: "before the configuration is written", request: check.Request{NoPreflight: true}},
		{name: "while it is written", request: check.Request{NoPreflight: true, WriteConfig: true}, written: true, notes: []string{note}},
		{name: "after it was written", request: check.Request{NoPreflight: true}},
		{name: "with nothing left to write", request: check.Request{NoPreflight: true, WriteConfig: true}, notes: []string{note, "Nothing else to write: constellation-conf.yaml has the values of the next hop already, except the measurements."}},
	} {
		c := s.mustCheck(tt.request)
		if d := cmp.Diff(changes, c.Changes.Measurements); d != "" {
			t.Errorf("%s: changes (-want +got):\n%s", tt.name, d)
		}
		i := slices.IndexFunc(c.Findings, func(f plan.Finding) bool { return f.ID == "measurements-weaker" })
		if f := c.Findings[i]; f.Severity != plan.Block || f.Title != title || f.Detail != detail || f.Remedy != remedy {
			t.Errorf("%s: finding %+v", tt.name, f)
		}
		if d := cmp.Diff(tt.notes, c.Notes); d != "" {
			t.Errorf("%s: notes (-want +got):\n%s", tt.name, d)
		}
		if c.Config == nil || c.Config.Written != tt.written || c.Exit != plan.ExitBlocked {
			t.Errorf("%s: configuration %+v, exit %d", tt.name, c.Config, c.Exit)
		}
	}
}

func TestCheckPrintsTheNextHopIfTheFileCannotBeEdited(t *testing.T) {
	s := newCheckStage(t)
	s.edit("image: v1.0.0", "image: &same v1.0.0")
	s.write(workspace.ConfigFile, s.read(workspace.ConfigFile)+"releases:\n  feed: *same\n") // which must not change with it
	c := s.mustCheck(check.Request{NoPreflight: true})
	if len(c.Notes) != 1 || !strings.HasPrefix(c.Notes[0], "--write-config cannot be used: ") {
		t.Errorf("notes %q", c.Notes)
	}
	if d := cmp.Diff(&check.ConfigChange{Path: filepath.Join(s.dir, workspace.ConfigFile), Fields: []workspace.FieldChange{}}, c.Config); d != "" {
		t.Errorf("configuration (-want +got):\n%s", d)
	}
}

func TestVerdictsNameWhereThePathEnds(t *testing.T) {
	feed, key := publish(t) // with v1.2.0, of which the cloud has no image
	s := newCheckStage(t)
	c, got := s.mustCheck(check.Request{Feed: feed, FeedKeys: []string{key}, NoPreflight: true}), map[string][3]string{}
	for _, r := range c.Components {
		if !r.Part {
			got[r.Name] = [3]string{r.Goal, r.Newest, r.Verdict}
		}
	}
	want := map[string][3]string{
		"Kubernetes": {"v1.36.3", "v1.37.2", "v1.36.3 in hop 2, another CLI"}, "OS image": {"v1.1.0", "v1.2.0", "v1.1.0 in 1 hop"},
		"Services": {"v1.2.0", "v1.2.0", "2 hops, another CLI"}, "CLI": {"", "v1.2.0", "hop 2 needs v1.2.0"},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("goal, newest and verdict (-want +got):\n%s", d)
	}
}
