package engine_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// demand is what join-config demands of machines with these registers.
func demand(registers map[uint32]string) string {
	m := map[string]map[string]any{}
	for i, x := range registers {
		expected, warns := strings.CutSuffix(x, " warns")
		m[fmt.Sprint(i)] = map[string]any{"expected": expected, "warnOnly": warns}
	}
	b, err := json.Marshal(map[string]any{"variant": "tpm2", "measurements": m})
	if err != nil {
		panic(err)
	}
	return sorted(string(b))
}

// sorted is a JSON text with its keys in order.
func sorted(text string) string {
	var x any
	if err := json.Unmarshal([]byte(text), &x); err != nil {
		return text
	}
	b, _ := json.Marshal(x)
	return string(b)
}

var (
	oldDemand = demand(map[uint32]string{4: value(1), 9: value(2), 11: value(3)})
	newDemand = demand(map[uint32]string{4: value(1), 9: value(12), 11: value(13), 12: value(14)})
)

// newPrepareStage is a cluster of services v1.1.0 on image v1.0.0 with Kubernetes v1.35.4.
func newPrepareStage(t *testing.T) *checkStage {
	t.Helper()
	s := newCheckStage(t)
	s.edit("microserviceVersion: v1.0.0", "microserviceVersion: v1.1.0")
	r := &s.inside.running
	r.Services = at("v1.1.0")
	for i := range r.Parts {
		if r.Parts[i].Kind == cluster.ServiceOfRelease {
			r.Parts[i].Version = "v1.1.0"
		}
	}
	for i := range r.Nodes {
		r.Nodes[i].Image, r.Nodes[i].Kubernetes, r.Nodes[i].State = "sandboxes/demo/images/v1.0.0", "v1.35.4", plan.NodeReady
		s.cluster.PutNode(r.Nodes[i])
	}
	r.Target.Image = "sandboxes/demo/images/v1.0.0"
	if err := s.cluster.SetNodeTarget(t.Context(), r.Target); err != nil {
		t.Fatal(err)
	}
	r.JoinConfig.Attestation = oldDemand
	s.join(cluster.JoinConfig{Attestation: oldDemand, ClusterID: clusterID})
	return s
}

// join sets what the cluster demands, with the trust roots of the configuration.
func (s *checkStage) join(j cluster.JoinConfig) {
	s.Helper()
	c, err := workspace.ParseConfig([]byte(s.read(workspace.ConfigFile)))
	if err != nil {
		s.Fatal(err)
	}
	j.TrustRoots = c.Attestation.TPM2.TrustRoots
	if err := s.cluster.PublishJoinConfig(s.Context(), j); err != nil {
		s.Fatal(err)
	}
	s.inside.running.JoinConfig = s.joined()
}

// joined is what the cluster demands, with sorted keys.
func (s *checkStage) joined() cluster.JoinConfig {
	s.Helper()
	j, err := s.cluster.JoinConfig(context.Background())
	if err != nil {
		s.Fatal(err)
	}
	j.Attestation = sorted(j.Attestation)
	for k, g := range j.Generations {
		j.Generations[k] = sorted(g)
	}
	return j
}

// prepare plans and runs once.
func (s *checkStage) prepare(ctx context.Context, r engine.PrepareRequest) (*plan.Plan, []plan.Event, error) {
	s.Helper()
	e := s.engine()
	p, err := e.PlanPrepare(ctx, r, func(plan.Event) {})
	if err != nil {
		return nil, nil, err
	}
	var events []plan.Event
	err = e.Run(ctx, p, func(ev plan.Event) { events = append(events, ev) })
	checkStream(s.T, events, err)
	return p, events, err
}

func result(t *testing.T, events []plan.Event) (r plan.Result) {
	t.Helper()
	if err := json.Unmarshal(events[len(events)-1].Data, &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// both is a request for image and Kubernetes in one write.
var both = engine.PrepareRequest{
	Request: check.Request{Release: v("v1.1.0"), Kubernetes: v("v1.36.3")}, Acknowledge: []string{"oldest-supports-kubernetes"},
}

func TestPrepareForImageAndKubernetesInOneWrite(t *testing.T) {
	s := newPrepareStage(t)
	p, events, err := s.prepare(t.Context(), both)
	if err != nil {
		t.Fatalf("%v (remedy %q); findings %+v", err, plan.Remedy(err), p.Blocked())
	}
	list, err := s.cloud.Components(t.Context(), v("v1.36.3"))
	if err != nil {
		t.Fatal(err)
	}
	name := cluster.ComponentsName(list.List)
	if got, err := s.cluster.Components(t.Context(), name); err != nil || got.Kubernetes != "v1.36.3" || !slices.Equal(got.List, list.List) || got.Statement != list.Statement {
		t.Errorf("components %+v, %v", got, err)
	}
	want := s.joined()
	want.Attestation, want.Generations, want.Weakened = newDemand, map[string]string{"v1.0.0": oldDemand, "v1.1.0": newDemand}, ""
	if d := cmp.Diff(want, s.joined()); d != "" {
		t.Errorf("join-config (-want +got):\n%s", d)
	}
	patch := `{"spec":{"image":"sandboxes/demo/images/v1.1.0","imageVersion":"v1.1.0","kubernetesComponentsReference":"` + name + `","kubernetesClusterVersion":"v1.36.3"}}`
	r := result(t, events)
	if string(r.Patch) != patch {
		t.Errorf("patch %s, want %s", r.Patch, patch)
	}
	if d := cmp.Diff([]string{
		"export KUBECONFIG=" + filepath.Join(s.dir, workspace.KubeconfigFile),
		"kubectl patch nodeversion constellation-version --type merge -p '" + patch + "'",
	}, r.Next); d != "" {
		t.Errorf("next (-want +got):\n%s", d)
	}
	if d := cmp.Diff(`# The target that `+"`constellation upgrade prepare`"+` has prepared for cluster demo.
# kubectl patch nodeversion constellation-version --type merge --patch-file constellation-nodeversion.yaml
apiVersion: update.edgeless.systems/v1alpha1
kind: NodeVersion
metadata:
  name: constellation-version
spec:
  image: sandboxes/demo/images/v1.1.0
  imageVersion: v1.1.0
  kubernetesComponentsReference: `+name+`
  kubernetesClusterVersion: v1.36.3
`, s.read(engine.TargetFile)); d != "" {
		t.Errorf("file (-want +got):\n%s", d)
	}
	if target, err := s.cluster.NodeTarget(t.Context()); err != nil || target.ImageVersion != "v1.0.0" {
		t.Errorf("the target was changed to %+v, %v", target, err)
	}
	join := p.Steps[1]
	if d := cmp.Diff([]string{
		"PCR 9: 020202020202… to 0c0c0c0c0c0c…", "PCR 11: 030303030303… to 0d0d0d0d0d0d…", "PCR 12: not required to 0e0e0e0e0e0e…",
		"machines of image v1.0.0 are admitted as before",
	}, join.Details); d != "" || !strings.Contains(join.Effect, "PCR 9, 11 and 12 differ") {
		t.Errorf("%q, details (-want +got):\n%s", join.Effect, d)
	}
	if got := p.Warnings(); len(got) != 1 || got[0].ID != "oldest-supports-kubernetes" {
		t.Errorf("warnings %+v", got)
	}

	// The second says that all is done, and how to go on, once more.
	p, again, err := s.prepare(t.Context(), both)
	if plan.ExitCode(err) != plan.ExitNothing || !p.Finished() || !strings.Contains(err.Error(), "was prepared for image v1.1.0 and Kubernetes v1.36.3 before") {
		t.Errorf("again: %v, finished %t", err, p.Finished())
	}
	if d := cmp.Diff(r.Next, result(t, again).Next); d != "" || string(result(t, again).Patch) != patch {
		t.Errorf("again: next (-want +got):\n%s", d)
	}

	// When the target is set there is nothing left to prepare.
	if err := s.cluster.SetNodeTarget(t.Context(), cluster.NodeTarget{Image: "sandboxes/demo/images/v1.1.0", ImageVersion: "v1.1.0", Components: name, Kubernetes: "v1.36.3"}); err != nil {
		t.Fatal(err)
	}
	s.inside.running.Target, err = s.cluster.NodeTarget(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.prepare(t.Context(), both); plan.ExitCode(err) != plan.ExitNothing {
		t.Errorf("after the target was set: %v", err)
	}
}

func TestPrepareTakesTheHopOfTheConfiguration(t *testing.T) {
	s := newPrepareStage(t)
	// Nothing newer is asked for: the next hop, to the newest that can be reached.
	p, err := s.engine().PlanPrepare(t.Context(), engine.PrepareRequest{}, func(plan.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(plan.Target{Release: "v1.1.0", Image: "v1.1.0", Kubernetes: "v1.35.4"}, p.To); d != "" || len(p.Notes) != 1 || !strings.HasPrefix(p.Notes[0], "This is hop 1 of 2;") {
		t.Errorf("target (-want +got):\n%snotes %q", d, p.Notes)
	}

	// What the check writes is what is prepared, workers that are kept included.
	if c := s.mustCheck(check.Request{WriteConfig: true}); !c.Config.Written {
		t.Fatalf("%+v", c.Config)
	}
	p, events, err := s.prepare(t.Context(), engine.PrepareRequest{})
	if err != nil {
		t.Fatalf("%v (remedy %q)", err, plan.Remedy(err))
	}
	if p.To.Image != "v1.1.0" || p.To.Kubernetes != "v1.35.4" || len(p.Warnings()) > 0 {
		t.Errorf("to %+v, warnings %+v", p.To, p.Warnings())
	}
	if r := result(t, events); !strings.HasSuffix(string(r.Patch), `,"kubernetesClusterVersion":"v1.35.4","rollout":{"keepWorkers":true}}}`) {
		t.Errorf("patch %s", r.Patch)
	}
	if file := s.read(engine.TargetFile); !strings.HasSuffix(file, "  rollout:\n    keepWorkers: true\n") {
		t.Errorf("file\n%s", file)
	}

	// Workers that are kept until now must be named when they are kept no longer.
	s.edit("keepWorkers: true", "keepWorkers: false")
	s.inside.running.Target.KeepWorkers = true
	_, events, err = s.prepare(t.Context(), engine.PrepareRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if r := result(t, events); !strings.HasSuffix(string(r.Patch), `"rollout":{"keepWorkers":false}}}`) {
		t.Errorf("patch %s", r.Patch)
	}

	// Workers of a fresh cluster are kept on request, also if the path replaces them.
	s = newPrepareStage(t)
	s.edit("# keepWorkers: false", "keepWorkers: true")
	_, events, err = s.prepare(t.Context(), both)
	if err != nil {
		t.Fatal(err)
	}
	if r := result(t, events); !strings.HasSuffix(string(r.Patch), `"rollout":{"keepWorkers":true}}}`) {
		t.Errorf("patch %s", r.Patch)
	}
}

func TestPrepareRefuses(t *testing.T) {
	config := func(s *checkStage) { // that asks for both at once
		s.edit("image: v1.0.0", "image: v1.1.0")
		s.edit("kubernetesVersion: v1.35.4", "kubernetesVersion: v1.36.3")
		s.edit(value(2), value(12))
		s.edit(value(3), value(13))
	}
	for _, tt := range []struct {
		name    string
		given   func(*checkStage)
		request engine.PrepareRequest
		blocks  []string // IDs
		exit    int      // of an error of the planning
	}{
		{name: "a new image and a new minor at once, without a word", given: config, request: engine.PrepareRequest{}, blocks: []string{"oldest-supports-kubernetes"}},
		{name: "they are asked for with a word, and all is fine", given: config, request: engine.PrepareRequest{Acknowledge: []string{"oldest-supports-kubernetes"}}},
		{name: "a word for something else", given: config, request: engine.PrepareRequest{Acknowledge: []string{"measurements-weaker", "kubernetes-minor"}}, blocks: []string{"oldest-supports-kubernetes"}},
		{name: "a word that no finding knows", given: config, request: engine.PrepareRequest{Acknowledge: []string{"oldest-supports-kubernetes", "measurement-weaker"}}, exit: plan.ExitUsage},
		{name: "a finding that cannot be acknowledged", given: func(s *checkStage) {
			s.inside.findings = []plan.Finding{{ID: "pdb", Severity: plan.Block, Title: "no room"}}
		}, request: engine.PrepareRequest{Acknowledge: []string{"pdb"}}, blocks: []string{"pdb"}},
		{name: "services of the release before", given: func(s *checkStage) {
			s.edit("microserviceVersion: v1.1.0", "microserviceVersion: v1.0.0")
			s.inside.running.Services = at("v1.0.0")
		}, request: engine.PrepareRequest{}, blocks: []string{"services-first"}},
		{name: "a goal without a way", request: engine.PrepareRequest{Request: check.Request{Kubernetes: v("v1.37.0")}}, blocks: []string{"kubernetes-offered", "offered-kubernetes"}},
		{name: "the cloud does not answer", given: func(s *checkStage) { s.cloud.end(fmt.Errorf("ask: %w", cloud.ErrUnavailable)) }, request: engine.PrepareRequest{}, blocks: []string{"cloud"}},
		{name: "the measurements of the new image are not known", given: func(s *checkStage) {
			config(s)
			s.edit("kubernetesVersion: v1.36.3", "kubernetesVersion: v1.35.4")
			s.edit(value(13), value(99))
		}, request: engine.PrepareRequest{}, blocks: []string{"measurements"}},
		{name: "a register is dropped", given: func(s *checkStage) {
			config(s)
			s.edit("kubernetesVersion: v1.36.3", "kubernetesVersion: v1.35.4")
			s.inside.running.JoinConfig.Attestation = demand(map[uint32]string{4: value(1), 9: value(2), 11: value(3), 13: value(7)})
		}, request: engine.PrepareRequest{}, blocks: []string{"measurements-weaker"}},
		{name: "there is no NodeVersion", given: func(s *checkStage) { s.inside.running.Target = cluster.NodeTarget{} }, request: engine.PrepareRequest{}, blocks: []string{"node-version"}},
		{name: "nothing is newer", given: func(s *checkStage) {
			r := &s.inside.running
			r.ControlPlaneImage, r.WorkerImage, r.Kubernetes, r.ControlPlaneKubelet, r.WorkerKubelet = at("v1.1.0"), at("v1.1.0"), at("v1.36.3"), at("v1.36.3"), at("v1.36.3")
			r.Target = cluster.NodeTarget{Image: "sandboxes/demo/images/v1.1.0", ImageVersion: "v1.1.0", Kubernetes: "v1.36.3"}
			r.Etcd = "3.6.8-0"
		}, request: engine.PrepareRequest{}, exit: plan.ExitNothing},
		{name: "the API server is down", given: func(s *checkStage) { s.inside.err = cluster.ErrUnreachable }, request: engine.PrepareRequest{}, exit: plan.ExitFailed},
		{name: "the configuration cannot be read", given: func(s *checkStage) { s.edit("count: 2", "count: two") }, request: engine.PrepareRequest{}, exit: plan.ExitUsage},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newPrepareStage(t)
			if tt.given != nil {
				tt.given(s)
			}
			before := s.joined()
			p, err := s.engine().PlanPrepare(t.Context(), tt.request, func(plan.Event) {})
			if plan.ExitCode(err) != tt.exit {
				t.Fatalf("%v: exit %d, want %d", err, plan.ExitCode(err), tt.exit)
			}
			if len(tt.request.Acknowledge) > 1 && err != nil && (!strings.Contains(err.Error(), "measurement-weaker") || !strings.Contains(plan.Remedy(err), "oldest-supports-kubernetes")) {
				t.Errorf("refused with %q and the remedy %q", err, plan.Remedy(err))
			}
			if err != nil {
				return
			}
			var blocks []string
			for _, f := range p.Blocked() {
				blocks = append(blocks, f.ID)
				if f.Remedy == "" && f.ID != "pdb" {
					t.Errorf("%+v has no remedy", f)
				}
			}
			if d := cmp.Diff(tt.blocks, blocks); d != "" {
				t.Fatalf("blocked by (-want +got):\n%s", d)
			}
			if len(blocks) == 0 {
				return
			}
			if err := s.engine().Run(t.Context(), p, func(plan.Event) {}); plan.ExitCode(err) != plan.ExitBlocked {
				t.Errorf("run: %v", err)
			}
			if d := cmp.Diff(before, s.joined()); d != "" {
				t.Errorf("join-config (-want +got):\n%s", d)
			}
			if _, err := os.Stat(filepath.Join(s.dir, engine.TargetFile)); err == nil {
				t.Error("the target was written")
			}
		})
	}
}

// Weaker attestation requirements are recorded in the cluster.
func TestPrepareRecordsWeakerAttestation(t *testing.T) {
	s := newPrepareStage(t)
	stronger := demand(map[uint32]string{4: value(1), 9: value(2), 11: value(3), 13: value(7)})
	s.join(cluster.JoinConfig{Attestation: stronger, ClusterID: clusterID, Weakened: "2026-01-01T00:00:00Z image v0.9.0: PCR 8 not enforced any more"})
	r := engine.PrepareRequest{Acknowledge: []string{"measurements-weaker"}}
	p, _, err := s.prepare(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if w := p.Warnings(); len(w) != 1 || w[0].ID != "measurements-weaker" || !strings.HasSuffix(w[0].Title, "(acknowledged)") {
		t.Errorf("warnings %+v", w)
	}
	if !slices.Contains(p.Steps[1].Details, "PCR 13: 070707070707… to not required, which is weaker") {
		t.Errorf("details %q", p.Steps[1].Details)
	}
	want := s.joined()
	want.Attestation, want.Generations = newDemand, map[string]string{"v1.0.0": stronger, "v1.1.0": newDemand}
	want.Weakened = "2026-01-01T00:00:00Z image v0.9.0: PCR 8 not enforced any more\n2026-11-21T07:05:01Z image v1.1.0: PCR 13 not enforced any more"
	if d := cmp.Diff(want, s.joined()); d != "" {
		t.Errorf("join-config (-want +got):\n%s", d)
	}
	if _, _, err := s.prepare(t.Context(), r); plan.ExitCode(err) != plan.ExitNothing {
		t.Errorf("again: %v", err)
	}
	if got := s.joined().Weakened; got != want.Weakened {
		t.Errorf("recorded again: %q", got)
	}
}

// A plan that somebody has made wrong since is not carried out.
func TestPrepareRefusesToOverwriteAConcurrentChange(t *testing.T) {
	s := newPrepareStage(t)
	e := s.engine()
	p, err := e.PlanPrepare(t.Context(), engine.PrepareRequest{}, func(plan.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	s.join(cluster.JoinConfig{Attestation: demand(map[uint32]string{4: value(1), 13: value(7)}), ClusterID: clusterID})
	before := s.joined()
	err = e.Run(t.Context(), p, func(plan.Event) {})
	if plan.ExitCode(err) != plan.ExitBlocked || !strings.Contains(err.Error(), "PCR 13 would not be enforced any more") {
		t.Errorf("run: %v (exit %d)", err, plan.ExitCode(err))
	}
	if d := cmp.Diff(before, s.joined()); d != "" {
		t.Errorf("join-config (-want +got):\n%s", d)
	}
}

func TestPreparePrunesGenerationsThatNobodyRuns(t *testing.T) {
	all := map[string]string{"v0.9.0": demand(map[uint32]string{4: value(9)}), "v1.0.0": oldDemand, "v1.2.0": demand(map[uint32]string{4: value(8)})}
	for _, tt := range []struct {
		name  string
		given func(*checkStage)
		want  []string
	}{
		{name: "older ones that nobody runs go, newer ones may be another's", want: []string{"v1.0.0", "v1.1.0", "v1.2.0"}},
		{name: "one node still runs it", given: func(s *checkStage) {
			s.cluster.PutNode(cluster.Node{Name: "worker-9", Image: "sandboxes/demo/images/v0.9.0", State: plan.NodeReady})
		}, want: []string{"v0.9.0", "v1.0.0", "v1.1.0", "v1.2.0"}},
		{name: "a machine that is no node yet runs it", given: func(s *checkStage) {
			s.cloud.add("worker-9", cloud.Worker, 9)
			s.cloud.set("worker-9", func(m *cluster.CloudMachine) { m.Image = "sandboxes/demo/images/v0.9.0" })
		}, want: []string{"v0.9.0", "v1.0.0", "v1.1.0", "v1.2.0"}},
		{name: "a node does not tell what it runs", given: func(s *checkStage) { s.cluster.PutNode(cluster.Node{Name: "worker-9", State: plan.NodeReady}) }, want: []string{"v0.9.0", "v1.0.0", "v1.1.0", "v1.2.0"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newPrepareStage(t)
			s.join(cluster.JoinConfig{Attestation: oldDemand, ClusterID: clusterID, Generations: maps.Clone(all)})
			if tt.given != nil {
				tt.given(s)
			}
			if _, _, err := s.prepare(t.Context(), engine.PrepareRequest{}); err != nil {
				t.Fatal(err)
			}
			j := s.joined()
			if d := cmp.Diff(tt.want, slices.Sorted(maps.Keys(j.Generations))); d != "" || j.Attestation != newDemand {
				t.Errorf("generations (-want +got):\n%s", d)
			}
		})
	}
}

// A generation that somebody has written by hand, and that enforces nothing, lets every
// machine in: join services refuse it, and no console carries it on.
func TestPrepareCarriesNoDemandOnThatOnlyWarns(t *testing.T) {
	s := newPrepareStage(t)
	warns := demand(map[uint32]string{4: value(8) + " warns"})
	s.join(cluster.JoinConfig{Attestation: oldDemand, ClusterID: clusterID, Generations: map[string]string{"v1.0.0": oldDemand, "v1.2.0": warns}})
	before := s.joined()
	_, _, err := s.prepare(t.Context(), engine.PrepareRequest{})
	if err == nil || !strings.Contains(err.Error(), "attestationConfig.v1.2.0 enforces no measurement") || !strings.Contains(plan.Remedy(err), "edit configmap join-config") {
		t.Errorf("got %v, remedy %q", err, plan.Remedy(err))
	}
	if d := cmp.Diff(before, s.joined()); d != "" {
		t.Errorf("join-config (-want +got):\n%s", d)
	}
}

// Two consoles, each with files of its own, prepare at the same moment: what one has
// published the other leaves.
func TestTwoPreparesAtOnce(t *testing.T) {
	s, other := newPrepareStage(t), newPrepareStage(t)
	other.cluster = s.cluster
	roots := func(s *checkStage) { s.join(cluster.JoinConfig{Attestation: oldDemand, ClusterID: clusterID}) }
	roots(s)
	other.inside.running.JoinConfig = s.joined()
	// Both have read join-config before one of them writes it.
	var reads sync.WaitGroup
	reads.Add(2)
	var mu sync.Mutex
	writes := 0
	s.cluster.OnCall(func(call string) error {
		if call == "PublishJoinConfig" {
			mu.Lock()
			writes++
			first := writes <= 2
			mu.Unlock()
			if first {
				reads.Done()
				reads.Wait()
			}
		}
		return nil
	})
	var wg sync.WaitGroup
	errs := make([]error, 2)
	for i, x := range []struct {
		s *checkStage
		r engine.PrepareRequest
	}{{s, both}, {other, engine.PrepareRequest{Request: check.Request{Release: v("v1.1.0"), Kubernetes: v("v1.35.4")}}}} {
		e := x.s.engine()
		p, err := e.PlanPrepare(t.Context(), x.r, func(plan.Event) {})
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() { errs[i] = e.Run(t.Context(), p, func(plan.Event) {}) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"v1.0.0": oldDemand, "v1.1.0": newDemand}
	if j := s.joined(); !maps.Equal(j.Generations, want) || j.Attestation != newDemand {
		t.Errorf("join-config %+v", j)
	}
	if writes < 3 {
		t.Errorf("%d writes: nobody noticed the other", writes)
	}
	for _, k := range []string{"v1.35.4", "v1.36.3"} {
		list, err := s.cloud.Components(t.Context(), v(k))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.cluster.Components(t.Context(), cluster.ComponentsName(list.List)); err != nil {
			t.Errorf("components of %s: %v", k, err)
		}
	}
}

func TestPrepareIsInterruptedAndGoesOn(t *testing.T) {
	s := newPrepareStage(t)
	ctx, cancel := context.WithCancel(t.Context())
	s.cluster.OnCall(func(call string) error {
		if call == "PublishJoinConfig" {
			cancel()
		}
		return ctx.Err()
	})
	_, events, err := s.prepare(ctx, both)
	if plan.ExitCode(err) != plan.ExitStopped {
		t.Fatalf("interrupted: %v", err)
	}
	r := result(t, events)
	if want := "constellation upgrade prepare -C " + s.dir + " --to v1.1.0 --kubernetes v1.36.3 --acknowledge oldest-supports-kubernetes"; r.Resume != want || r.Patch != nil {
		t.Errorf("resume %q, want %q; patch %s", r.Resume, want, r.Patch)
	}
	s.cluster.OnCall(nil)
	_, events, err = s.prepare(t.Context(), both)
	if err != nil {
		t.Fatal(err)
	}
	var steps []string
	for _, e := range events {
		if e.Kind == plan.KindStep && e.State != plan.StateRunning {
			steps = append(steps, e.Step+" "+e.State)
		}
	}
	if d := cmp.Diff([]string{"components skipped", "join-config done", "target-file done"}, steps); d != "" {
		t.Errorf("steps (-want +got):\n%s", d)
	}
}

// A second init of a cluster that is being upgraded takes nothing of it back.
func TestInitLeavesGenerations(t *testing.T) {
	s := newStage(t, 1, 0)
	s.mustInit()
	j, err := s.cluster.JoinConfig(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	next := demand(map[uint32]string{4: value(1)})
	j.Generations, j.Attestation, j.Revision = map[string]string{"v1.1.0": j.Attestation, "v1.2.0": next}, next, ""
	if err := s.cluster.PublishJoinConfig(t.Context(), j); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.init(t.Context(), nil); plan.ExitCode(err) != plan.ExitNothing {
		t.Errorf("init again: %v", err)
	}
	delete(j.Generations, "v1.1.0")
	if err := s.cluster.PublishJoinConfig(t.Context(), j); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.init(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if got, err := s.cluster.JoinConfig(t.Context()); err != nil || len(got.Generations) != 2 || got.Generations["v1.2.0"] != next || got.Attestation != got.Generations["v1.1.0"] {
		t.Errorf("join-config %+v, %v", got, err)
	}
}
