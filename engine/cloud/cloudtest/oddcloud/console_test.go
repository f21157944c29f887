package oddcloud_test

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/engine"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/oddcloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/component"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// offered are the components that the cloud offers.
func offered() component.Signed {
	var l component.List
	for _, name := range []string{"kubeadm", "kubelet", "kubectl"} {
		l = append(l, component.Component{Name: name, URL: "http://10.0.0.1:8080/" + name, Digest: "sha256:" + strings.Repeat("ab", 32), Path: "/usr/local/bin/" + name, Mode: 0o755})
	}
	return component.Signed{List: l, Statement: "statement over " + l.Digest()}
}

// configure writes the generated configuration with its placeholders filled in, and a state, as a
// user of the cloud does. It returns the workspace.
func configure(t *testing.T, controlPlanes, workers int) *workspace.Workspace {
	t.Helper()
	root, _, err := attestationtest.CreateCA("odd")
	if err != nil {
		t.Fatal(err)
	}
	return configureRoot(t, root, controlPlanes, workers)
}

// configureRoot is configure for machines that a CA certifies.
func configureRoot(t *testing.T, root []byte, controlPlanes, workers int) *workspace.Workspace {
	t.Helper()
	b, err := workspace.GenerateConfig(oddcloud.Name, workspace.GenerateOptions{Name: "demo", ControlPlanes: controlPlanes, Workers: workers})
	if err != nil {
		t.Fatal(err)
	}
	entry, err := providers.Find(oddcloud.Name)
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	if strings.Contains(text, "sandbox") || strings.Contains(text, "\nimage:") == entry.NoImages || !strings.Contains(text, "  odd:\n    realm: demo\n") {
		t.Fatalf("generated:\n%s", text)
	}
	if _, err := workspace.ParseConfig(b); err == nil || strings.Contains(err.Error(), "sandbox") {
		t.Errorf("placeholders: %v", err)
	}
	if block, _ := pem.Decode(root); block == nil {
		t.Fatal("the root is not PEM")
	}
	pemLines := "        " + strings.ReplaceAll(strings.TrimSpace(string(root)), "\n", "\n        ")
	text = strings.Replace(strings.ReplaceAll(text, strings.Repeat("1234", 16), strings.Repeat("ab", 32)), `trustRoots: ""`, "trustRoots: |\n"+pemLines, 1)
	if _, err := workspace.ParseConfig([]byte(text)); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	w, err := workspace.OpenWorkspace(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteConfig([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := w.WriteState(&workspace.State{Version: "v1", Infrastructure: workspace.Infrastructure{
		UID: oddcloud.UID, Name: "demo", Provider: oddcloud.Name, ClusterEndpoint: "127.0.0.1:6443", InitEndpoint: "127.0.0.1:1", InClusterEndpoint: "10.0.0.1",
		InitSecret: workspace.HexBytes(oddcloud.InitSecret), NodeCIDR: netip.MustParsePrefix("10.42.0.0/24"), PodCIDR: netip.MustParsePrefix("10.244.0.0/16"),
		Section: section.Values{"realm": "demo"},
	}}); err != nil {
		t.Fatal(err)
	}
	return w
}

// clock is a clock that a test advances.
type clock struct {
	mu sync.Mutex
	at time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

// TestOddCloudInTheConsole takes the cloud through configuration, init's preflight and status.
func TestOddCloudInTheConsole(t *testing.T) {
	c := start(t, oddcloud.Options{Throttle: 20 * time.Millisecond, Components: offered()})
	t.Cleanup(providers.Register(c.Provider()))
	for group, n := range map[string]int{"control-plane": 3, "workers": 2} {
		for i := range n {
			if _, err := c.Machines.Create(t.Context(), group, []string{fmt.Sprint(group, i)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	e := engine.New(configure(t, 3, 2), engine.Deps{})
	for range 3 { // each time, other calls are throttled
		findings, err := e.Preflight(t.Context(), func(plan.Event) {})
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range findings {
			if f.Severity == plan.Block {
				t.Errorf("%s blocks init: %s: %s", f.ID, f.Title, f.Detail)
			}
			if strings.Contains(strings.ToLower(f.Title+f.Detail+f.Remedy), "sandbox") {
				t.Errorf("%s names the sandbox: %+v", f.ID, f)
			}
			if strings.Contains(f.Title, "image") {
				t.Errorf("%s is about an image, and the cloud has none: %+v", f.ID, f)
			}
		}
	}
	st, err := e.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(st)
	if err != nil {
		t.Fatal(err)
	}
	if st.Provider != oddcloud.Name || st.Simulated || len(st.Machines) != 5 || strings.Contains(strings.ToLower(string(b)), "sandbox") {
		t.Errorf("status %s", b)
	}
	in := map[string]int{}
	for _, m := range st.Machines {
		in[m.Group]++
	}
	if d := cmp.Diff(map[string]int{"control-plane": 3, "workers": 2}, in); d != "" {
		t.Errorf("machines of groups, whose IDs are opaque (-want +got):\n%s", d)
	}
}

func TestThrottledForLongIsReportedWithItsTime(t *testing.T) {
	k := &clock{at: time.Now()}
	c := start(t, oddcloud.Options{Throttle: time.Hour, Now: k.now, Components: offered()})
	t.Cleanup(providers.Register(c.Provider()))
	e := engine.New(configure(t, 1, 0), engine.Deps{})
	findings, err := e.Preflight(t.Context(), func(plan.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(findings, func(f plan.Finding) bool { return f.ID == "cloud" })
	if want := "run the same command again after " + k.at.Add(time.Hour).UTC().Format(time.RFC3339); i < 0 || findings[i].Remedy != want {
		t.Errorf("findings %+v, want the remedy %q", findings, want)
	}
}

// Lists lag by minutes, and deletions do not end.
func TestMachinesOfTheOddCloudLag(t *testing.T) {
	k := &clock{at: time.Now()}
	c, ctx := start(t, oddcloud.Options{Lag: 5 * time.Minute, Now: k.now}), t.Context()
	list := func() string {
		t.Helper()
		all, err := c.Instances(ctx)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, i := range all {
			names = append(names, i.Name)
		}
		slices.Sort(names)
		return strings.Join(names, " ")
	}
	list()
	made, err := c.CreateInstances(ctx, oddcloud.Group("workers"), []string{"1"})
	if err != nil {
		t.Fatal(err)
	}
	if is := list(); is != "" {
		t.Errorf("at once the list has %q", is)
	}
	k.advance(5 * time.Minute)
	if is := list(); is != "worker-0" {
		t.Errorf("after five minutes the list has %q", is)
	}
	c.StickNext(1)
	if err := c.DeleteInstances(ctx, []string{made[0].Key()}); err != nil {
		t.Fatal(err)
	}
	k.advance(time.Hour)
	if i, err := c.Instance(ctx, made[0].Key()); err != nil || i.State != cloud.Terminating {
		t.Errorf("after an hour the machine is %+v, %v", i, err)
	}
	if is := list(); is != "worker-0" {
		t.Errorf("after an hour the list has %q", is)
	}
	again, err := c.CreateInstances(ctx, oddcloud.Group("workers"), []string{"2"})
	if err != nil || again[0].Name == made[0].Name {
		t.Errorf("the name of a machine whose deletion has not ended is reused: %+v, %v", again, err)
	}
	c.EndStuck()
	for _, err := c.Instance(ctx, made[0].Key()); !errors.Is(err, cloud.ErrNotFound); _, err = c.Instance(ctx, made[0].Key()) {
		if ctx.Err() != nil {
			t.Fatal(ctx.Err())
		}
	}
}

// TestMetadataOfTheOddCloud reads what a joining machine reads.
func TestMetadataOfTheOddCloud(t *testing.T) {
	c := start(t, oddcloud.Options{})
	made, err := c.CreateInstances(t.Context(), oddcloud.Group("workers"), []string{"1"})
	if err != nil {
		t.Fatal(err)
	}
	p := c.Provider()
	m := p.Metadata(oddcloud.ID(made[0].Name))
	if i, err := m.Self(t.Context()); err != nil || i.Key() != made[0].Key() || i.Image != "" {
		t.Errorf("self %+v, %v", i, err)
	}
	if l, err := m.Peers(t.Context()); err != nil || len(l) != 1 {
		t.Errorf("peers %+v, %v", l, err)
	}
	if _, err := m.LoadBalancer(t.Context()); !errors.Is(err, cloud.ErrNotFound) {
		t.Errorf("load balancer: %v", err)
	}
	if h, err := m.InitSecretHash(context.WithoutCancel(t.Context())); err != nil || len(h) != 32 {
		t.Errorf("hash of the init secret has %d bytes, %v", len(h), err)
	}
}
