package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/assets"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/cluster"
	"constellation/engine/kubeadm"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// adopted returns the workspace of an adopted cluster.
func adopted(t *testing.T) *workspace.Workspace {
	t.Helper()
	w, err := workspace.OpenWorkspace(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.Adopt(workspace.Adoption{
		Name: "old", UID: "uid", Kubernetes: "v1.36.4", Server: "https://10.0.0.1:6443",
		Kubeconfig: []byte("apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{name: k, cluster: {server: 'https://10.0.0.1:6443'}}]\nusers: [{name: u, user: {token: x}}]\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n"),
		Machines:   []machines.Machine{{Name: "cp", Group: cloud.ControlPlane}},
	}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestComponentsOfAnAdoptedCluster(t *testing.T) {
	t.Parallel()
	w := adopted(t)
	row := func(v, name string) section.Values {
		return section.Values{"kubernetes": v, "name": name, "url": "https://example.com/" + name, "digest": "sha256:" + strings.Repeat("a", 64)}
	}
	c := vouching{
		machines.NewConsole(section.Values{machines.ComponentsTable: []section.Values{
			row("v1.37.2", "kubeadm"), row("v1.37.2", "kubelet"), row("v1.37.2", "kubectl"), row("v1.36.3", "kubeadm"),
		}}), "uid", w, OpenReleases,
	}
	of := func(v string) (names []string, url, statement string, err error) {
		l, err := c.Components(t.Context(), version.MustParse(v))
		for _, x := range l.List {
			names = append(names, x.Name)
			url = x.URL
		}
		return names, url, l.Statement, err
	}
	all := []string{"kubeadm", "kubelet", "kubectl"}
	if names, url, statement, err := of("v1.37.2"); err != nil || !slices.Equal(names, all) || !strings.HasPrefix(url, "https://example.com/") || statement != "" {
		t.Errorf("of the configuration, without a key: %q, %s, statement %q, %v", names, url, statement, err)
	}
	if w.Has(workspace.SigningKeyFile) {
		t.Error("reading components made a key")
	}
	key, err := w.SigningKey()
	if err != nil {
		t.Fatal(err)
	}
	names, url, statement, err := of("v1.36.4")
	if err != nil || !slices.Equal(names, all) || !strings.HasPrefix(url, "https://dl.k8s.io/v1.36.4/") {
		t.Errorf("of the release: %q, %s, %v", names, url, err)
	}
	l, err := c.Components(t.Context(), version.MustParse("v1.36.4"))
	if err == nil {
		err = release.NewTrust(key.Key).Verify(statement, version.MustParse("v1.36.4"), runtime.GOARCH, l.List)
	}
	if err != nil {
		t.Errorf("the statement of the workspace's key: %v", err)
	}
	// The release pins v1.36.3. An incomplete list must not be passed over.
	if _, _, _, err := of("v1.36.3"); err == nil || !strings.Contains(err.Error(), "needs all") {
		t.Errorf("one of three components in the configuration: %v", err)
	}
	if _, _, _, err := of("v1.37.9"); !errors.Is(err, cloud.ErrNotFound) || !errors.Is(err, release.ErrNotOffered) {
		t.Errorf("a version of neither: %v", err)
	}
}

func TestJudgeOperator(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name     string
		change   func(nodes []*cluster.Node) []*cluster.Node
		etcd     bool     // external
		versions []string // of the control planes, besides v1.36.4
		want     string   // ID and detail of the only finding; empty: there is none
	}{
		{name: "ready", change: func(n []*cluster.Node) []*cluster.Node { return n }},
		{name: "an external etcd", etcd: true, want: "adopt-external-etcd before each control plane the operator needs the health of every member of etcd, and it reads that with kubeadm's certificates of a stacked member", change: func(n []*cluster.Node) []*cluster.Node { return n }},
		{name: "an upgrade of somebody else", versions: []string{"v1.37.2"}, want: "adopt-mixed-versions kubeadm-config and API servers have v1.36.4 and v1.37.2", change: func(n []*cluster.Node) []*cluster.Node { return n }},
		{name: "an older kubelet", want: "adopt-kubelets others: w", change: func(n []*cluster.Node) []*cluster.Node { n[1].Kubernetes = "v1.35.4"; return n }},
		{name: "a kubelet without a version", want: "adopt-kubelets others: w", change: func(n []*cluster.Node) []*cluster.Node { n[1].Kubernetes = ""; return n }},
		{name: "a node that is not Ready", want: "adopt-nodes w", change: func(n []*cluster.Node) []*cluster.Node { n[1].State = plan.NodeNotReady; return n }},
		{name: "a node that joined since", want: "adopt-inventory not in the configuration: x", change: func(n []*cluster.Node) []*cluster.Node {
			return append(n, &cluster.Node{Name: "x", Kubernetes: "v1.36.4", State: plan.NodeReady})
		}},
		{name: "a node that left since", want: "adopt-inventory no nodes: w", change: func(n []*cluster.Node) []*cluster.Node { return n[:1] }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := &operatorRun{inventory: machines.Inventory{Machines: []machines.Entry{{Name: "cp"}, {Name: "w"}}}}
			nodes := tt.change([]*cluster.Node{{Name: "cp", Kubernetes: "v1.36.4", State: plan.NodeReady}, {Name: "w", Kubernetes: "v1.36.4", State: plan.NodeReady}})
			var got []string
			for _, f := range o.judge(nodes, version.MustParse("v1.36.4"), append([]string{"v1.36.4"}, tt.versions...), tt.etcd) {
				if f.Severity != plan.Block || f.Remedy == "" {
					t.Errorf("finding %+v", f)
				}
				got = append(got, f.ID+" "+f.Detail)
			}
			if is := strings.Join(got, "; "); is != tt.want {
				t.Errorf("found %q, want %q", is, tt.want)
			}
		})
	}
}

// TestHardeningReachesThePolicies: the chart of policies gets the names of the configuration, also where a verb
// reads a part of that alone.
func TestHardeningReachesThePolicies(t *testing.T) {
	t.Parallel()
	w := adopted(t)
	b, err := w.ReadConfig()
	if err == nil {
		err = os.WriteFile(w.Path(workspace.ConfigFile), []byte(strings.Replace(string(b), "\n  machines:\n", "\n  machines:\n    hardening: [kubelet-pods]\n", 1)), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	whole, err := w.Config()
	if err != nil {
		t.Fatal(err)
	}
	part, err := workspace.PartOfConfig(w, executeFields()...)
	if err != nil {
		t.Fatal(err)
	}
	s, err := w.State()
	if err != nil {
		t.Fatal(err)
	}
	feed, err := release.Embedded(assets.Releases())
	if err != nil {
		t.Fatal(err)
	}
	r, err := feed.Release(t.Context(), version.MustParse("v1.1.0"))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]*workspace.Config{"the whole configuration": whole, "the part of upgrade execute": part} {
		run := &clusterRun{facts: &facts{state: s, release: r}}
		run.want(c)
		charts, err := run.charts("", nil)
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(charts, func(c cluster.Chart) bool { return c.Name == "constellation-policies" })
		if i < 0 || fmt.Sprint(charts[i].Values["hardening"]) != "[kubelet-pods]" || charts[i].Values["ownAccountsOnly"] != true {
			t.Errorf("with %s: chart %d of %d", name, i, len(charts))
		}
		if i := slices.IndexFunc(charts, func(c cluster.Chart) bool { return c.Name == "constellation-operator" }); i < 0 || charts[i].Values["networkPolicies"] != false {
			t.Errorf("with %s: an adopted cluster gets NetworkPolicies", name)
		}
		// Nodes of an adopted cluster join by kubeadm's tokens.
		if effect := run.chartsEffect(); strings.Contains(effect, release.JoinService) || !strings.Contains(effect, fmt.Sprintf("%d charts", len(charts))) {
			t.Errorf("the plan says %q, and installs %d charts", effect, len(charts))
		}
	}
}

// TestNetworkPoliciesCanBeSwitchedOff reads the item of hardening.
func TestNetworkPoliciesCanBeSwitchedOff(t *testing.T) {
	t.Parallel()
	feed, err := release.Embedded(assets.Releases())
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, release string
		hardening     map[string]bool
		want          any
	}{
		{name: "not named", release: "v1.1.0", want: true},
		{name: "switched on", release: "v1.1.0", hardening: map[string]bool{kubeadm.ItemNetworkPolicies: true}, want: true},
		{name: "switched off", release: "v1.1.0", hardening: map[string]bool{kubeadm.ItemNetworkPolicies: false}, want: false},
		{name: "a release whose chart has none", release: "v1.0.0", want: nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := feed.Release(t.Context(), version.MustParse(tt.release))
			if err != nil {
				t.Fatal(err)
			}
			s := &workspace.State{}
			s.Infrastructure.Provider = providers.Local
			run := &clusterRun{facts: &facts{state: s, release: r}}
			run.want(&workspace.Config{Hardening: tt.hardening})
			charts, err := run.charts("", nil)
			if err != nil {
				t.Fatal(err)
			}
			if i := slices.IndexFunc(charts, func(c cluster.Chart) bool { return c.Name == "constellation-operator" }); i < 0 || charts[i].Values["networkPolicies"] != tt.want {
				t.Errorf("the chart of the operator has the values %v, want networkPolicies %v", charts[max(i, 0)].Values, tt.want)
			}
		})
	}
}

// TestPlanOperatorElsewhere plans in a workspace that was not adopted.
func TestPlanOperatorElsewhere(t *testing.T) {
	t.Parallel()
	w, err := workspace.OpenWorkspace(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, planned := range []func(*Engine, context.Context) (*plan.Plan, error){(*Engine).PlanOperator, (*Engine).PlanRemoveOperator} {
		if _, err := planned(New(w, Deps{}), t.Context()); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(plan.Remedy(err), "adopt") {
			t.Errorf("in an empty folder: %v", err)
		}
	}
}
