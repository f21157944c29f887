package kubetest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"constellation/assets"
	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/component"
	"constellation/engine/plan"
	"constellation/engine/registry"
	"constellation/engine/revocation"
	"constellation/internal/delay"
)

// World changes a cluster from outside, as kubelets, the operator and people do.
type World interface {
	PutNode(n cluster.Node)
	RemoveNode(name string)
	SetPaused(paused bool)
	Paused() bool
	Revisions(c cluster.Chart) int
	GiveToken(node string)
	HasToken(node string) bool
	// Tainted reports whether the node has a taint that evicts its pods.
	Tainted(node string) bool
	EndMove(name string)
	// PutKubeadmConfig creates the ConfigMap of kubeadm.
	PutKubeadmConfig()
}

// Contract checks the contract of [engine.Cluster]. The cluster must be empty, and a chart with a
// deployment of one replica must never become ready in it.
func Contract(t *testing.T, c engine.Cluster, w World) {
	ctx := t.Context()
	mustRun := func(name string, f func(t *testing.T)) {
		if !t.Run(name, f) {
			t.FailNow() // later tests depend on it
		}
	}

	mustRun("the version is that of Kubernetes", func(t *testing.T) {
		if v, err := c.Version(ctx); err != nil || !strings.HasPrefix(v, "v1.") {
			t.Errorf("%q, %v", v, err)
		}
	})

	list := component.List{{Name: "kubelet", URL: "http://mirror/kubelet", Digest: "sha256:" + strings.Repeat("ab", 32), Path: "/usr/local/bin/kubelet", Mode: 0o755}}
	components := cluster.Components{Name: cluster.ComponentsName(list), Kubernetes: "v1.35.4", List: list}
	mustRun("components are published once and for all", func(t *testing.T) {
		if _, err := c.Components(ctx, components.Name); !errors.Is(err, cluster.ErrAbsent) {
			t.Errorf("before: %v", err)
		}
		for range 2 {
			if err := c.PublishComponents(ctx, components); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := c.Components(ctx, components.Name); err != nil || got.Kubernetes != "v1.35.4" || !slices.Equal(got.List, list) || got.Name != components.Name {
			t.Errorf("read back %+v, %v", got, err)
		}
		// An older program publishes no statement. A newer one adds it, and no program removes
		// it.
		signed := components
		signed.Statement = "a statement"
		enrols := signed
		enrols.Agent = &component.Component{Name: "kubeadm", URL: "https://example/agent", Digest: "sha256:" + strings.Repeat("ab", 32), Path: "/usr/local/bin/kubeadm"}
		enrols.Unenrolled = []string{"worker-7", "worker-8"}
		for i, x := range []cluster.Components{signed, signed, components, enrols, signed, components} {
			if err := c.PublishComponents(ctx, x); err != nil {
				t.Fatal(err)
			}
			got, err := c.Components(ctx, x.Name)
			if err != nil || got.Statement != signed.Statement || !slices.Equal(got.List, list) {
				t.Errorf("read back %+v, %v", got, err)
			}
			if enrolled := i >= 3; enrolled != (got.Agent != nil) || enrolled && *got.Agent != *enrols.Agent {
				t.Errorf("after %d writes the enrolment program is %+v", i+1, got.Agent)
			} else if enrolled && !slices.Equal(got.Unenrolled, enrols.Unenrolled) {
				t.Errorf("after %d writes the nodes that had the components before are %v", i+1, got.Unenrolled)
			}
		}
		other := components
		other.Kubernetes = "v1.36.3"
		if err := c.PublishComponents(ctx, other); err == nil {
			t.Error("other content under the same name was accepted")
		}
		other = components
		other.List = component.List{{Name: "kubeadm"}}
		if err := c.PublishComponents(ctx, other); err == nil {
			t.Error("a name that does not belong to the list was accepted")
		}
	})

	mustRun("the registry is published, changed and removed", func(t *testing.T) {
		w.PutKubeadmConfig()
		one := registry.Registry{Address: "one.example.com:5000/mirror", Username: "robot", Password: "secret"}
		login, moved := one, one
		login.Password = "other"
		moved.Address = "two.example.com"
		open := registry.Registry{Address: moved.Address}
		none := registry.Registry{}
		at := none
		for i, step := range []struct {
			to      registry.Registry
			changed bool // of kubeadm's configuration
		}{{none, false}, {one, true}, {one, false}, {login, false}, {one, false}, {moved, true}, {open, false}, {none, true}, {none, false}, {one, true}, {none, true}} {
			if has, err := c.HasRegistry(ctx, step.to, true); err != nil || has != (at == step.to) {
				t.Errorf("before step %d the cluster has its registry: %t, %v", i, has, err)
			}
			if changed, err := c.SetRegistry(ctx, step.to, true); err != nil || changed != step.changed {
				t.Fatalf("step %d changed kubeadm's configuration: %t, %v", i, changed, err)
			}
			if is, err := c.Registry(ctx); err != nil || is != step.to {
				t.Errorf("after step %d the registry is %s: %v", i, is.Address, err)
			}
			for _, other := range []registry.Registry{none, one, login, moved, open} {
				if has, err := c.HasRegistry(ctx, other, true); err != nil || has != (other == step.to) {
					t.Errorf("after step %d the cluster has %q: %t, %v", i, other.Address, has, err)
				}
			}
			at = step.to
		}
	})

	mustRun("the join configuration is replaced as a whole", func(t *testing.T) {
		if _, err := c.JoinConfig(ctx); !errors.Is(err, cluster.ErrAbsent) {
			t.Errorf("before: %v", err)
		}
		for _, want := range []cluster.JoinConfig{
			{Attestation: `{"variant":"tpm2"}`, TrustRoots: "PEM", ClusterID: "00"},
			{
				Attestation: `{"variant":"tpm2","measurements":{}}`, TrustRoots: "PEM2", ClusterID: "00",
				Generations: map[string]string{"v1.0.0": `{"variant":"tpm2"}`, "v1.1.0-rc.1": `{"variant":"tpm2","measurements":{}}`}, Weakened: "at five: PCR 9\nat six: PCR 11",
			},
			{Attestation: `{"variant":"tpm2"}`, TrustRoots: "PEM2", ClusterID: "00", Generations: map[string]string{"v1.1.0": `{"variant":"tpm2"}`}},
			{Attestation: `{"variant":"tpm2","measurements":{}}`, TrustRoots: "PEM2", ClusterID: "00"},
		} {
			if err := c.PublishJoinConfig(ctx, want); err != nil {
				t.Fatal(err)
			}
			got, err := c.JoinConfig(ctx)
			got.Revision = ""
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("read back %+v, %v", got, err)
			}
		}
	})

	mustRun("of two concurrent changes of the join configuration one fails with a conflict", func(t *testing.T) {
		read, err := c.JoinConfig(ctx)
		if err != nil || read.Revision == "" {
			t.Fatalf("%+v, %v", read, err)
		}
		mine, theirs := read, read
		mine.TrustRoots, theirs.TrustRoots = "mine", "theirs"
		if err := c.PublishJoinConfig(ctx, theirs); err != nil {
			t.Fatal(err)
		}
		if err := c.PublishJoinConfig(ctx, mine); !errors.Is(err, cluster.ErrConflict) {
			t.Errorf("mine: %v", err)
		}
		if got, err := c.JoinConfig(ctx); err != nil || got.TrustRoots != "theirs" {
			t.Errorf("afterwards %+v, %v", got, err)
		}
		read.Revision = ""
		if err := c.PublishJoinConfig(ctx, read); err != nil {
			t.Fatal(err)
		}
	})

	mustRun("objects of a kind that is not there are absent", func(t *testing.T) {
		if _, err := c.NodeTarget(ctx); !errors.Is(err, cluster.ErrAbsent) {
			t.Errorf("target: %v", err)
		}
		if l, err := c.Expected(ctx); len(l) > 0 || err != nil && !errors.Is(err, cluster.ErrAbsent) {
			t.Errorf("expected nodes: %v, %v", l, err)
		}
	})

	mustRun("kinds are brought, and changes of them noticed", func(t *testing.T) {
		for _, release := range []string{"v1.0.0", "v1.1.0"} {
			kinds, err := assets.CRDsFor(release)
			if err != nil {
				t.Fatal(err)
			}
			outdated, err := c.OutdatedKinds(ctx, kinds)
			// v1.1.0 changes two kinds: see additions.yaml.
			if want := map[string]int{"v1.0.0": len(kinds), "v1.1.0": 2}[release]; err != nil || len(outdated) != want {
				t.Errorf("%s: outdated %v, %v; want %d", release, outdated, err, want)
			}
			var told []string
			if err := c.ApplyKinds(ctx, kinds, func(name string) { told = append(told, name) }); err != nil {
				t.Fatal(err)
			}
			if len(told) != len(kinds) {
				t.Errorf("%s: told %v", release, told)
			}
			if outdated, err = c.OutdatedKinds(ctx, kinds); err != nil || len(outdated) > 0 {
				t.Errorf("%s: afterwards outdated %v, %v", release, outdated, err)
			}
		}
	})

	mustRun("the target is set in one write and leaves the rest alone", func(t *testing.T) {
		if _, err := c.NodeTarget(ctx); !errors.Is(err, cluster.ErrAbsent) {
			t.Errorf("before: %v", err)
		}
		want := cluster.NodeTarget{Image: "sandboxes/demo/images/v1.0.0", ImageVersion: "v1.0.0", Components: components.Name, Kubernetes: "v1.35.4"}
		if err := c.SetNodeTarget(ctx, want); err != nil {
			t.Fatal(err)
		}
		w.SetPaused(true)
		want.Image, want.ImageVersion = "sandboxes/demo/images/v1.1.0", "v1.1.0"
		for range 2 {
			if err := c.SetNodeTarget(ctx, want); err != nil {
				t.Fatal(err)
			}
		}
		got, err := c.NodeTarget(ctx)
		got.Conditions = nil
		if err != nil || got.Image != want.Image || got.ImageVersion != want.ImageVersion || got.Components != want.Components || got.Kubernetes != want.Kubernetes {
			t.Errorf("read back %+v, %v", got, err)
		}
		if !w.Paused() {
			t.Error("the rollout is not paused any more")
		}
		for _, keep := range []bool{true, false} {
			want.KeepWorkers = keep
			if err := c.SetNodeTarget(ctx, want); err != nil {
				t.Fatal(err)
			}
			if got, err := c.NodeTarget(ctx); err != nil || got.KeepWorkers != keep || !w.Paused() {
				t.Errorf("keep workers %t: read back %+v, %v", keep, got, err)
			}
		}
	})

	mustRun("a rollout is paused, resumed and cancelled, and a new target ends the cancelling", func(t *testing.T) {
		yes, no := true, false
		target, err := c.NodeTarget(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range []struct {
			change            cluster.RolloutChange
			paused, cancelled bool
		}{
			{cluster.RolloutChange{Paused: &yes}, true, false},
			{cluster.RolloutChange{Cancelled: &yes}, true, true},
			{cluster.RolloutChange{Paused: &no}, false, true},
			{cluster.RolloutChange{Paused: &yes, Cancelled: &no}, true, false},
			{cluster.RolloutChange{Paused: &no, Cancelled: &yes}, false, true},
		} {
			if err := c.ChangeRollout(ctx, x.change); err != nil {
				t.Fatal(err)
			}
			ro, err := c.Rollout(ctx)
			if got := ro.Target; err != nil || got.Paused != x.paused || got.Cancelled != x.cancelled || got.Image != target.Image {
				t.Errorf("%+v: %+v, %v", x, got, err)
			}
		}
		target.MaxSurge = "10%"
		if err := c.TryNodeTarget(ctx, target); err != nil {
			t.Error(err)
		}
		if got, err := c.NodeTarget(ctx); err != nil || !got.Cancelled || got.MaxSurge == "10%" {
			t.Errorf("trying changed the target: %+v, %v", got, err)
		}
		if err := c.SetNodeTarget(ctx, target); err != nil {
			t.Fatal(err)
		}
		if got, err := c.NodeTarget(ctx); err != nil || got.Cancelled || got.MaxSurge != "10%" {
			t.Errorf("target %+v, %v", got, err)
		}
		if ro, err := c.Rollout(ctx); err != nil || ro.Observed || ro.Reached || len(ro.Moves) > 0 {
			t.Errorf("the operator has not observed it yet: %+v, %v", ro, err)
		}
	})

	mustRun("a node that does not exist cannot be skipped", func(t *testing.T) {
		if h, err := c.SkipState(ctx, "nobody"); !errors.Is(err, cluster.ErrAbsent) {
			t.Errorf("%+v, %v", h, err)
		}
		if err := c.SetSkipState(ctx, cluster.SkipState{Name: "nobody", Kind: cluster.SkipNode}, true); !errors.Is(err, cluster.ErrAbsent) {
			t.Error(err)
		}
	})

	mustRun("one holds the cluster, and who comes back takes over at once", func(t *testing.T) {
		mine := cluster.Holder{User: "ops", Host: "laptop", Workspace: "/clusters/demo", PID: 1, Run: "upgrade-1", Since: time.Now().UTC().Truncate(time.Second)}
		again, other := mine, mine
		again.PID, again.Run = 2, "upgrade-2"
		other.Host, other.Run = "desk", "upgrade-3"
		lost := make(chan error, 1)
		first, err := c.Hold(ctx, mine, func(err error) { lost <- err })
		if err != nil {
			t.Fatal(err)
		}
		var held *cluster.HeldError
		if _, err := c.Hold(ctx, other, func(error) {}); !errors.As(err, &held) || held.By != mine {
			t.Fatalf("another one: %v", err)
		}
		second, err := c.Hold(ctx, again, func(error) { t.Error("lost without anybody who took it") })
		if err != nil {
			t.Fatal(err)
		}
		if err := <-lost; !errors.As(err, &held) || held.By != again {
			t.Errorf("lost: %v", err)
		}
		first() // leaves it to whom it belongs
		if _, err := c.Hold(ctx, other, func(error) {}); !errors.As(err, &held) || held.By != again {
			t.Errorf("another one: %v", err)
		}
		second()
		third, err := c.Hold(ctx, other, func(error) {})
		if err != nil {
			t.Fatalf("after it was given back: %v", err)
		}
		third()
	})

	mustRun("a machine is expected until its node has its components", func(t *testing.T) {
		x := cluster.ExpectedNode{Name: "control-plane-0", Components: components.Name, ControlPlane: true, ProviderID: "sandbox://demo/control-plane-0", Deadline: time.Now().Add(time.Hour).Truncate(time.Second)}
		for range 2 {
			if err := c.Expect(ctx, x); err != nil {
				t.Fatal(err)
			}
		}
		l, err := c.Expected(ctx)
		if err != nil || len(l) != 1 || l[0].Name != x.Name || !l[0].ControlPlane || l[0].Components != x.Components || l[0].ProviderID != x.ProviderID || !l[0].Deadline.Equal(x.Deadline) {
			t.Errorf("expected %+v, %v", l, err)
		}
		w.PutNode(cluster.Node{Name: "worker-7", Role: "worker", State: plan.NodeReady, Components: components.Name})
		if err := c.Expect(ctx, cluster.ExpectedNode{Name: "worker-7", Components: components.Name}); err != nil {
			t.Fatal(err)
		}
		if l, err = c.Expected(ctx); err != nil || len(l) != 1 {
			t.Errorf("a node that has its components is expected: %+v, %v", l, err)
		}
		w.RemoveNode("worker-7")
	})

	mustRun("nodes are seen as they come, change and go", func(t *testing.T) {
		ctx, cancel := context.WithCancel(ctx)
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		changed := make(chan struct{}, 100)
		wg.Go(func() {
			if err := c.Watch(ctx, func() { changed <- struct{}{} }); !errors.Is(err, context.Canceled) {
				t.Errorf("watch ended with %v", err)
			}
		})
		wait := func(what string, ok func([]*cluster.Node) bool) {
			t.Helper()
			deadline := time.After(20 * time.Second)
			for {
				nodes, err := c.Nodes(ctx)
				if err != nil {
					t.Fatal(err)
				}
				if ok(nodes) {
					return
				}
				select {
				case <-changed:
				case <-deadline:
					t.Fatalf("%s: not seen; nodes are %+v", what, nodes)
				}
			}
		}
		wait("no node", func(n []*cluster.Node) bool { return len(n) == 0 })
		w.PutNode(cluster.Node{Name: "worker-1", Role: "worker", Group: "workers", State: plan.NodeNotReady, ProviderID: "sandbox://demo/worker-1", Kubernetes: "v1.35.4"})
		wait("a node", func(n []*cluster.Node) bool { return len(n) == 1 && n[0].State == plan.NodeNotReady })
		w.PutNode(cluster.Node{Name: "control-plane-0", Role: "control-plane", Group: "control-plane", State: plan.NodeReady, Image: "i", Components: components.Name, ProviderID: "sandbox://demo/control-plane-0", Kubernetes: "v1.35.4", IP: "10.42.0.2"})
		w.PutNode(cluster.Node{Name: "worker-1", Role: "worker", Group: "workers", State: plan.NodeReady, ProviderID: "sandbox://demo/worker-1", Kubernetes: "v1.35.4"})
		wait("two that are ready", func(n []*cluster.Node) bool {
			return len(n) == 2 && n[0].State == plan.NodeReady && n[1].State == plan.NodeReady
		})
		nodes, err := c.Nodes(ctx)
		if n := nodes[0]; err != nil || n.Name != "control-plane-0" || n.Role != "control-plane" || n.Group != "control-plane" || n.Image != "i" || n.Components != components.Name ||
			n.Kubernetes != "v1.35.4" || n.ProviderID != "sandbox://demo/control-plane-0" || n.IP != "10.42.0.2" || n.Message != "" {
			t.Errorf("control plane %+v, %v", n, err)
		}
		w.RemoveNode("worker-1")
		wait("one gone", func(n []*cluster.Node) bool { return len(n) == 1 })
	})

	mustRun("a machine is revoked: record, token and note first, then the machine", func(t *testing.T) {
		if l, err := c.Revoked(ctx); err != nil || len(l) > 0 {
			t.Fatalf("before: %v, %v", l, err)
		}
		const node = "worker-3"
		w.PutNode(cluster.Node{Name: node, Role: "worker", Group: "workers", State: plan.NodeReady, ProviderID: "sandbox://demo/worker-3"})
		if err := c.Expect(ctx, cluster.ExpectedNode{Name: node, Components: components.Name, ProviderID: "sandbox://demo/worker-3", Deadline: time.Now().Add(time.Hour)}); err != nil {
			t.Fatal(err)
		}
		w.GiveToken(node)
		w.GiveToken("worker-4")
		since := time.Now().UTC().Truncate(time.Second)
		e := revocation.Entry{ProviderID: "sandbox://demo/worker-3", Group: "sandboxes/demo/groups/workers", Address: "10.42.0.9", By: "ops@laptop", Reason: "captured", Since: since, Until: since.Add(time.Hour)}
		old := revocation.Entry{ProviderID: "sandbox://demo/worker-0", By: "ops@laptop", Since: since.Add(-2 * time.Hour), Until: since.Add(-time.Hour)}
		if err := c.Revoke(ctx, "worker-0", old); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := c.Revoke(ctx, node, e); err != nil {
				t.Fatal(err)
			}
		}
		if l, err := c.Revoked(ctx); err != nil || len(l) != 1 || !reflect.DeepEqual(l[node], e) {
			t.Errorf("record %+v, %v; want that of %s alone, since the other entry has expired", l, err, node)
		}
		if err := c.ExpireRevocations(ctx, e.Until.Add(-time.Second)); err != nil {
			t.Fatal(err)
		}
		if l, err := c.Revoked(ctx); err != nil || len(l) != 1 {
			t.Errorf("record %+v, %v: an entry that has not expired was removed", l, err)
		}
		if w.HasToken(node) || !w.HasToken("worker-4") {
			t.Error("not exactly the token of the revoked machine is gone")
		}
		if l, err := c.Expected(ctx); err != nil || slices.ContainsFunc(l, func(x cluster.ExpectedNode) bool { return x.Name == node }) {
			t.Errorf("it is still expected: %+v, %v", l, err)
		}
		for _, token := range []string{"first", "second"} {
			if err := c.RefillMachine(ctx, node, e, token, since.Add(time.Hour)); err != nil {
				t.Fatal(err)
			}
			if err := c.RemoveMachine(ctx, node, e); err != nil {
				t.Fatal(err)
			}
		}
		if !w.Tainted(node) {
			t.Error("pods stay on its Node")
		}
		ro, err := c.Rollout(ctx)
		want := []cluster.Move{
			{Name: "refill-worker-3", Group: "workers", Donor: node},
			{Name: "revoke-worker-3", Node: node, Group: "workers", Leaves: true, Revoked: "by ops@laptop: captured"},
		}
		if err != nil || !slices.Equal(ro.Moves, want) {
			t.Errorf("moves %+v, %v; want %+v", ro.Moves, err, want)
		}
		// A machine without a Node is removed as well.
		w.RemoveNode(node)
		if err := c.RemoveMachine(ctx, "worker-5", revocation.Entry{ProviderID: "sandbox://demo/worker-5", By: "ops@laptop"}); err != nil {
			t.Error(err)
		}
		for _, name := range []string{"refill-worker-3", "revoke-worker-3", "revoke-worker-5"} {
			w.EndMove(name)
		}
		if ro, err := c.Rollout(ctx); err != nil || len(ro.Moves) != 0 {
			t.Errorf("moves %+v, %v", ro.Moves, err)
		}
		for range 2 {
			if err := c.ExpireRevocations(ctx, e.Until.Add(time.Second)); err != nil {
				t.Error(err)
			}
		}
		if l, err := c.Revoked(ctx); err != nil || len(l) > 0 {
			t.Errorf("record %+v, %v: an expired entry is left", l, err)
		}
	})

	chart := func(values map[string]any) cluster.Chart {
		return cluster.Chart{Name: "probe", Namespace: "constellation-system", Version: "1.1.0", Values: values, Files: []assets.File{
			{Name: "Chart.yaml", Data: []byte("apiVersion: v2\nname: probe\nversion: 1.1.0\n")},
			{Name: "values.yaml", Data: []byte("text: default\nreplicas: 0\n")},
			{Name: "templates/all.yaml", Data: []byte(probe)},
		}}
	}
	good := chart(map[string]any{"text": "one"})
	mustRun("a chart is installed once", func(t *testing.T) {
		if ok, err := c.ChartCurrent(ctx, good); ok || err != nil {
			t.Errorf("before: %t, %v", ok, err)
		}
		for range 2 {
			if err := c.ApplyChart(ctx, good, func(string, int64, int64) {}); err != nil {
				t.Fatal(err)
			}
		}
		if ok, err := c.ChartCurrent(ctx, good); !ok || err != nil {
			t.Errorf("afterwards: %t, %v", ok, err)
		}
		if n := w.Revisions(good); n != 1 {
			t.Errorf("%d revisions, want 1", n)
		}
	})

	mustRun("other values and other content are upgrades", func(t *testing.T) {
		for i, next := range []cluster.Chart{chart(map[string]any{"text": "two"}), chart(map[string]any{"text": "two"})} {
			if i == 1 {
				next.Files = slices.Clone(next.Files)
				next.Files[1].Data = []byte("text: default\nreplicas: 0\nmore: true\n")
			}
			if ok, err := c.ChartCurrent(ctx, next); ok || err != nil {
				t.Errorf("%d before: %t, %v", i, ok, err)
			}
			if err := c.ApplyChart(ctx, next, func(string, int64, int64) {}); err != nil {
				t.Fatal(err)
			}
			if ok, err := c.ChartCurrent(ctx, next); !ok || err != nil {
				t.Errorf("%d afterwards: %t, %v", i, ok, err)
			}
			good = next
		}
	})

	mustRun("a chart goes back to a revision that it had", func(t *testing.T) {
		revision := func(ch cluster.Chart) int {
			t.Helper()
			n, err := c.ChartRevision(ctx, ch)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		before := revision(good)
		if err := c.ApplyChart(ctx, chart(map[string]any{"text": "more"}), func(string, int64, int64) {}); err != nil {
			t.Fatal(err)
		}
		changed := revision(good)
		for range 2 { // the second time the node exists
			if err := c.RevertChart(ctx, good, before); err != nil {
				t.Fatal(err)
			}
			before = revision(good)
		}
		if ok, err := c.ChartCurrent(ctx, good); !ok || err != nil || changed <= 1 || before != changed+1 {
			t.Errorf("the previous revision is current: %t, %v; revision %d after %d", ok, err, before, changed)
		}
		gone := chart(nil)
		gone.Name = "gone"
		gone.Files = slices.Clone(gone.Files)
		gone.Files[0].Data = []byte("apiVersion: v2\nname: gone\nversion: 1.1.0\n")
		gone.Files[2].Data = []byte("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: gone, namespace: {{ .Release.Namespace }}}\n")
		if n := revision(gone); n != 0 {
			t.Errorf("a chart that was never there has revision %d", n)
		}
		if err := c.ApplyChart(ctx, gone, func(string, int64, int64) {}); err != nil {
			t.Fatal(err)
		}
		if err := c.RevertChart(ctx, gone, 0); err != nil {
			t.Fatal(err)
		}
		if n := revision(gone); n != 0 {
			t.Errorf("a chart that was removed has revision %d", n)
		}
	})

	mustRun("the diff of a chart has no secrets", func(t *testing.T) {
		compare := func(ch cluster.Chart) plan.ChartChange {
			t.Helper()
			got, err := c.CompareChart(ctx, ch)
			if err != nil {
				t.Fatal(err)
			}
			return got
		}
		want := plan.ChartChange{Chart: "probe", Namespace: "constellation-system", From: "1.1.0", To: "1.1.0"}
		if got := compare(good); !reflect.DeepEqual(got, want) || !got.Same() {
			t.Errorf("as it is: %+v", got)
		}
		want.Values = []plan.ValueChange{{Path: "adminPassword", Hidden: true}, {Path: "text", From: `"two"`, To: `"three"`}}
		other := good
		other.Values = map[string]any{"text": "three", "adminPassword": "S3CR3T"}
		if got := compare(other); !reflect.DeepEqual(got, want) || got.Same() {
			t.Errorf("with other values: %+v", got)
		}
		fresh := good
		fresh.Name, fresh.OwnName, fresh.Namespace = "fresh", "probe", "default"
		if got := compare(fresh); !reflect.DeepEqual(got, plan.ChartChange{Chart: "fresh", Namespace: "default", To: "1.1.0"}) || got.Same() {
			t.Errorf("one that is new: %+v", got)
		}
	})
	mustRun("what charts were before a set is remembered until it ends", func(t *testing.T) {
		for _, want := range []map[string]int{nil, {"a/b": 3}, {"a/b": 3, "c/d": 0}, nil, nil} {
			if err := c.SetChartSet(ctx, want); err != nil {
				t.Fatal(err)
			}
			if got, err := c.ChartSet(ctx); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("got %v, want %v: %v", got, want, err)
			}
		}
	})
	mustRun("a chart that does not become ready is taken back", func(t *testing.T) {
		bad := good
		bad.Values = map[string]any{"text": "three", "replicas": 1}
		limited, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		var told []string
		err := c.ApplyChart(limited, bad, func(text string, ready, wanted int64) { told = append(told, fmt.Sprint(text, " ", ready, "/", wanted)) })
		if err == nil || errors.Is(err, context.Canceled) {
			t.Fatalf("got %v", err)
		}
		if len(told) == 0 || !strings.Contains(told[len(told)-1], "probe") || !strings.HasSuffix(told[len(told)-1], " 0/1") {
			t.Errorf("told %v", told)
		}
		// A controller has to observe the objects of the previous revision, too.
		settled, done := context.WithTimeout(ctx, 30*time.Second)
		defer done()
		for {
			ok, err := c.ChartCurrent(ctx, good)
			if ok && err == nil {
				break
			}
			if !delay.For(settled, 100*time.Millisecond) {
				t.Errorf("the previous revision is current: %t, %v", ok, err)
				break
			}
		}
	})

	mustRun("an interrupted install leaves a chart that is not ready in place", func(t *testing.T) {
		slow := good
		slow.Values = map[string]any{"text": "four", "replicas": 1}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		start := time.Now()
		err := c.ApplyChart(ctx, slow, func(string, int64, int64) { cancel() })
		if !errors.Is(err, context.Canceled) || time.Since(start) > 10*time.Second {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
		if ok, err := c.ChartCurrent(t.Context(), slow); ok || err != nil {
			t.Errorf("a chart that is not ready is current: %t, %v", ok, err)
		}
		if err := c.ApplyChart(t.Context(), good, func(string, int64, int64) {}); err != nil {
			t.Fatal(err)
		}
		if ok, err := c.ChartCurrent(t.Context(), good); !ok || err != nil {
			t.Errorf("another chart afterwards: %t, %v", ok, err)
		}
	})

	mustRun("a first installation that fails leaves nothing", func(t *testing.T) {
		bad := chart(map[string]any{"replicas": 1})
		bad.Name = "second"
		bad.Files = slices.Clone(bad.Files)
		bad.Files[0].Data = []byte("apiVersion: v2\nname: second\nversion: 1.1.0\n")
		limited, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		if err := c.ApplyChart(limited, bad, func(string, int64, int64) {}); err == nil {
			t.Fatal("no error")
		}
		bad.Values = map[string]any{"replicas": 0}
		if err := c.ApplyChart(ctx, bad, func(string, int64, int64) {}); err != nil {
			t.Errorf("a second try: %v", err)
		}
	})

	t.Run("a call whose context ended changes nothing", func(t *testing.T) {
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		if err := c.PublishJoinConfig(ctx, cluster.JoinConfig{ClusterID: "ff"}); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		if got, err := c.JoinConfig(t.Context()); err != nil || got.ClusterID != "00" {
			t.Errorf("afterwards %+v, %v", got, err)
		}
	})
}

// probe is a chart with one object per readiness rule.
const probe = `apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ .Chart.Name }}
  namespace: {{ .Release.Namespace }}
data:
  text: {{ .Values.text | quote }}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .Chart.Name }}
  namespace: {{ .Release.Namespace }}
spec:
  replicas: {{ .Values.replicas }}
  selector:
    matchLabels: {app: {{ .Chart.Name }}}
  template:
    metadata:
      labels: {app: {{ .Chart.Name }}}
    spec:
      containers:
        - name: main
          image: registry.k8s.io/pause:3.10
`
