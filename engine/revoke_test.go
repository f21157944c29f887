package engine_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/attestation/authority"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/revocation"
	"constellation/engine/workspace"
)

// revokeStage is a cluster of control planes and workers that an operator looks after, with
// the machines that its cloud lists.
type revokeStage struct {
	*applyStage
	t *testing.T
}

func newRevokeStage(t *testing.T, controlPlanes int) *revokeStage {
	s := &revokeStage{newApplyStage(t), t}
	s.moves = false // there is no rollout
	names := []string{"worker-0", "worker-1"}
	for i := range controlPlanes {
		names = append(names, fmt.Sprintf("control-plane-%d", i))
	}
	for i, name := range names {
		role := cloud.Worker
		if strings.HasPrefix(name, "control") {
			role = cloud.ControlPlane
		}
		s.cloud.add(name, role, i)
		s.node(name)
	}
	s.cluster.SetRollout(func(r *cluster.Rollout) { r.Observed, r.Reached = true, true })
	return s
}

// node puts a Ready node into the cluster.
func (s *revokeStage) node(name string, edit ...func(*cluster.Node)) {
	n := cluster.Node{
		Name: name, Role: "worker", Group: "workers", GroupID: "sandboxes/demo/groups/workers", State: plan.NodeReady, ProviderID: "sandbox://demo/" + name, IP: "10.42.0.99", UID: "uid-" + name,
		Image: "sandboxes/demo/images/v1.0.0", Components: s.inside.running.Target.Components, Kubernetes: "v1.35.4",
	}
	if strings.HasPrefix(name, "control") {
		n.Role, n.Group, n.GroupID = "control-plane", "control-plane", "sandboxes/demo/groups/control-plane"
	}
	for _, e := range edit {
		e(&n)
	}
	s.cluster.PutNode(n)
}

// operator removes revoked machines and makes others, until the test ends. It begins when
// begin is closed.
func (s *revokeStage) operatorFrom(begin <-chan struct{}) {
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	s.t.Cleanup(func() { cancel(); wg.Wait() })
	wg.Go(func() {
		select {
		case <-begin:
		case <-ctx.Done():
		}
		for next := 2; ctx.Err() == nil; time.Sleep(2 * time.Millisecond) {
			ro, err := s.cluster.Rollout(ctx)
			if err != nil {
				continue
			}
			removal := slices.IndexFunc(ro.Moves, func(m cluster.Move) bool { return m.Leaves })
			if removal >= 0 {
				m := ro.Moves[removal]
				s.cloud.set(m.Node, func(c *cluster.CloudMachine) { c.State, c.Stage = cloud.Terminated, plan.NodeGone })
				s.cluster.RemoveNode(m.Node)
				s.cluster.EndMove(m.Name)
				continue
			}
			for _, m := range ro.Moves {
				name := fmt.Sprintf("worker-%d", next)
				next++
				s.cloud.add(name, cloud.Worker, next)
				s.node(name, func(n *cluster.Node) { n.State, n.Donor = plan.NodeNotReady, m.Donor })
				s.cluster.EndMove(m.Name)
				time.Sleep(30 * time.Millisecond)
				s.node(name, func(n *cluster.Node) { n.Donor = m.Donor })
			}
		}
	})
}

func (s *revokeStage) operator() {
	now := make(chan struct{})
	close(now)
	s.operatorFrom(now)
}

func (s *revokeStage) plan(r engine.RevokeRequest) *plan.Plan {
	s.t.Helper()
	p, err := s.engine().PlanRevoke(s.t.Context(), r)
	if err != nil {
		s.t.Fatalf("%v (remedy %q)", err, plan.Remedy(err))
	}
	return p
}

// revoke plans and runs once.
func (s *revokeStage) revoke(ctx context.Context, r engine.RevokeRequest, see func(plan.Event)) ([]plan.Event, error) {
	s.t.Helper()
	e := s.engine()
	p, err := e.PlanRevoke(ctx, r)
	if err != nil {
		return nil, err
	}
	var events []plan.Event
	err = e.Run(ctx, p, func(ev plan.Event) {
		events = append(events, ev)
		if see != nil {
			see(ev)
		}
	})
	checkStream(s.t, events, err)
	return events, err
}

func (s *revokeStage) entry(node string) revocation.Entry {
	s.t.Helper()
	l, err := s.cluster.Revoked(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	return l[node]
}

func findingIDs(p *plan.Plan, severity plan.Severity) (out []string) {
	for _, f := range p.Findings {
		if f.Severity == severity {
			out = append(out, f.ID)
			if severity == plan.Block && (f.Remedy == "" || f.Title == "") {
				out = append(out, "no remedy")
			}
		}
	}
	return out
}

func TestRevokeRemovesAMachineAndHasAnotherOneMade(t *testing.T) {
	s := newRevokeStage(t, 1)
	s.cluster.GiveToken("worker-1")
	shown := make(chan struct{})
	show := sync.OnceFunc(func() { close(shown) })
	s.operatorFrom(shown)
	var order []string
	s.hook(func(call string) error {
		if strings.HasSuffix(call, " worker-1") {
			order = append(order, strings.Fields(call)[0])
		}
		return nil
	})
	events, err := s.revoke(t.Context(), engine.RevokeRequest{Node: "worker-1", Replace: true, Reason: "its keys were copied"}, func(ev plan.Event) {
		if ev.Kind == plan.KindNode && ev.Node == "worker-1" && ev.To == plan.NodeLeaving {
			show()
		}
	})
	if err != nil {
		t.Fatalf("%v (remedy %q)", err, plan.Remedy(err))
	}
	// The record comes before everything else; the last two note what has become of it.
	if want := []string{"Revoke", "RefillMachine", "RemoveMachine", "Revoke", "Revoke"}; !slices.Equal(order, want) {
		t.Errorf("writes %v, want %v", order, want)
	}
	e := s.entry("worker-1")
	if e.ProviderID != "sandbox://demo/worker-1" || e.Group != "sandboxes/demo/groups/workers" || e.Role != "worker" || e.Address != "10.42.0.11" || e.UID != "uid-worker-1" ||
		e.Reason != "its keys were copied" || !strings.Contains(e.By, "@") || e.Until.Sub(e.Since) != revocation.CertificateLifetime || e.Removed.IsZero() || e.Replacement != "worker-2" {
		t.Errorf("entry %+v", e)
	}
	if s.cluster.HasToken("worker-1") {
		t.Error("its token is still there")
	}
	nodes, err := s.cluster.Nodes(t.Context())
	if err != nil || len(nodes) != 3 || nodes[2].Name != "worker-2" {
		t.Errorf("nodes %v, %v", nodes, err)
	}
	last := events[len(events)-1]
	if want := "machine worker-1 is revoked and removed; worker-2 has taken its place and is Ready"; last.Text != want {
		t.Errorf("it ended with %q, want %q", last.Text, want)
	}
	var leaves, comes bool
	for _, ev := range events {
		leaves = leaves || ev.Kind == plan.KindNode && ev.Node == "worker-1" && ev.From == plan.NodeLeaving && ev.To == plan.NodeGone
		comes = comes || ev.Kind == plan.KindNode && ev.Node == "worker-2" && ev.To == plan.NodeReady
	}
	if !leaves || !comes {
		t.Errorf("events report that the old machine leaves: %t, that the new one is Ready: %t", leaves, comes)
	}
	runs, err := s.engine().Runs()
	if err != nil || len(runs) == 0 || runs[0].Verb != plan.VerbRevoke || runs[0].By != e.By || runs[0].Node != "worker-1" || !strings.Contains(runs[0].Text, "worker-1") {
		t.Errorf("history %+v, %v", runs, err)
	}

	// Once more: everything is there.
	_, err = s.revoke(t.Context(), engine.RevokeRequest{Node: "worker-1", Replace: true}, nil)
	if plan.ExitCode(err) != plan.ExitNothing {
		t.Errorf("a second time: %v", err)
	}
}

// A run can be interrupted at any write and at any event; the same command goes on, with
// the first reason and time, and asks for one new machine.
func TestRevokeIsResumed(t *testing.T) {
	r := engine.RevokeRequest{Node: "worker-1", Replace: true, Reason: "captured"}
	for _, call := range []string{"Revoke worker-1", "RefillMachine worker-1", "RemoveMachine worker-1", "WatchRollout"} {
		t.Run("it dies in "+call, func(t *testing.T) {
			s := newRevokeStage(t, 1)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			s.hook(func(c string) error {
				if c == call && ctx.Err() == nil {
					cancel()
					return ctx.Err()
				}
				return nil
			})
			_, err := s.revoke(ctx, r, nil)
			final := call == "WatchRollout" // the cluster continues on its own
			if final && err != nil || !final && plan.ExitCode(err) != plan.ExitStopped {
				t.Fatalf("interrupted: %v", err)
			}
			first := s.entry("worker-1")
			s.hook(nil)
			s.operator()
			again := r
			again.Reason = "another one"
			if _, err := s.revoke(t.Context(), again, nil); err != nil {
				t.Fatalf("%v (remedy %q)", err, plan.Remedy(err))
			}
			e := s.entry("worker-1")
			if !first.Since.IsZero() && (!e.Since.Equal(first.Since) || e.Reason != "captured") {
				t.Errorf("entry %+v, first %+v", e, first)
			}
			refills := 0
			for _, c := range s.cluster.Calls() {
				if c == "RefillMachine worker-1" {
					refills++
				}
			}
			if refills != 1 || e.Replacement != "worker-2" || e.Removed.IsZero() {
				t.Errorf("%d machines were asked for; entry %+v", refills, e)
			}
		})
	}
}

func TestRevokeWithoutReplacementAndThenWithOne(t *testing.T) {
	s := newRevokeStage(t, 1)
	s.operator()
	if _, err := s.revoke(t.Context(), engine.RevokeRequest{Node: "worker-1"}, nil); err != nil {
		t.Fatal(err)
	}
	if nodes, err := s.cluster.Nodes(t.Context()); err != nil || len(nodes) != 2 {
		t.Errorf("nodes %v, %v", nodes, err)
	}
	if _, err := s.revoke(t.Context(), engine.RevokeRequest{Node: "worker-1", Replace: true}, nil); err != nil {
		t.Fatal(err)
	}
	if e := s.entry("worker-1"); e.Replacement != "worker-2" {
		t.Errorf("entry %+v", e)
	}
}

// Machines of a list stay in it: the removal ends with the Node. None can be made in the place of one.
func TestRevokeOfAnEnrolledMachine(t *testing.T) {
	s := newRevokeStage(t, 1)
	cert, _, err := authority.Create("demo machines")
	if err != nil {
		t.Fatal(err)
	}
	state, err := os.ReadFile(filepath.Join(s.dir, workspace.StateFile))
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Replace(string(state), "provider: sandbox", "provider: enrolled", 1)
	text = regexp.MustCompile(`(?m)^  sandbox:\n(    .*\n)+`).ReplaceAllLiteralString(text, "  enrolled:\n    uid: u\n    authority: "+strconv.Quote(string(cert))+"\n")
	if err := os.WriteFile(filepath.Join(s.dir, workspace.StateFile), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	config := "version: v2\nname: demo\nmicroserviceVersion: v1.1.0\nkubernetesVersion: v1.35.4\nprovider:\n  enrolled:\n    endpoint: api.example.com\n"
	if err := os.WriteFile(filepath.Join(s.dir, workspace.ConfigFile), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	ctx, end := context.WithCancel(t.Context())
	defer wg.Wait()
	defer end()
	wg.Go(func() { // an operator, which cannot delete machines
		for ; ctx.Err() == nil; time.Sleep(2 * time.Millisecond) {
			if ro, err := s.cluster.Rollout(ctx); err == nil && len(ro.Moves) > 0 {
				s.cluster.RemoveNode(ro.Moves[0].Node)
				s.cluster.EndMove(ro.Moves[0].Name)
			}
		}
	})
	if _, err := s.engine().PlanRevoke(t.Context(), engine.RevokeRequest{Node: "worker-1", Replace: true}); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(plan.Remedy(err), "constellation machine add") {
		t.Errorf("a replacement: %v (%s)", err, plan.Remedy(err))
	}
	p := s.plan(engine.RevokeRequest{Node: "worker-1"})
	if all := strings.Join(texts(p), "\n"); strings.Contains(all, "disks are deleted") || strings.Contains(all, "the cloud has confirmed") || !slices.ContainsFunc(p.End.Next, func(c string) bool { return strings.Contains(c, "machine remove worker-1 --gone") }) {
		t.Errorf("the plan:\n%s\nnext %q", all, p.End.Next)
	}
	limited, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := s.revoke(limited, engine.RevokeRequest{Node: "worker-1"}, nil); err != nil {
		t.Fatal(err)
	}
	if e := s.entry("worker-1"); e.Removed.IsZero() {
		t.Errorf("entry %+v", e)
	}
}

// The other console's upgrade goes on; a captured machine does not wait for its end.
func TestRevokeRunsBesideAnotherRun(t *testing.T) {
	s := newRevokeStage(t, 1)
	s.operator()
	e := s.engine()
	held := make(chan struct{})
	free := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		other := engine.PlanFor(e, plan.Step{ID: "upgrade", Run: func(context.Context, *plan.Reporter) error { close(held); <-free; return nil }})
		if err := e.Run(context.Background(), other, func(plan.Event) {}); err != nil {
			t.Error(err)
		}
	})
	<-held
	if _, err := s.revoke(t.Context(), engine.RevokeRequest{Node: "worker-1"}, nil); err != nil {
		t.Error(err)
	}
	close(free)
	wg.Wait()
}

func TestRevokeFindsWhatForbidsIt(t *testing.T) {
	for _, tt := range []struct {
		name          string
		controlPlanes int
		node          string
		edit          func(*revokeStage)
		block, warn   []string
	}{
		{name: "a worker", controlPlanes: 1, node: "worker-1"},
		{name: "the only control plane", controlPlanes: 1, node: "control-plane-0", block: []string{"last-control-plane"}},
		{name: "one of three control planes", controlPlanes: 3, node: "control-plane-1", warn: []string{"control-plane-keys"}},
		{name: "one of two", controlPlanes: 2, node: "control-plane-1", warn: []string{"control-plane-keys"}},
		{name: "one of two, and the other one is not Ready", controlPlanes: 2, node: "control-plane-1", edit: func(s *revokeStage) {
			s.node("control-plane-0", func(n *cluster.Node) { n.State = plan.NodeNotReady })
		}, block: []string{"etcd-quorum"}},
		{name: "one of three, and another one is not Ready", controlPlanes: 3, node: "control-plane-1", edit: func(s *revokeStage) {
			s.node("control-plane-0", func(n *cluster.Node) { n.State = plan.NodeNotReady })
		}, block: []string{"etcd-quorum"}},
		{name: "one of two, and the other one is cordoned", controlPlanes: 2, node: "control-plane-1", edit: func(s *revokeStage) {
			s.node("control-plane-0", func(n *cluster.Node) { n.Cordoned = true })
		}, block: []string{"control-planes-cordoned"}},
		{name: "one of three, and another one is cordoned", controlPlanes: 3, node: "control-plane-1", edit: func(s *revokeStage) {
			s.node("control-plane-0", func(n *cluster.Node) { n.Cordoned = true })
		}, warn: []string{"control-plane-keys"}},
		{name: "one of four, and another one is not Ready", controlPlanes: 4, node: "control-plane-1", edit: func(s *revokeStage) {
			s.node("control-plane-0", func(n *cluster.Node) { n.State = plan.NodeNotReady })
		}, warn: []string{"control-plane-not-ready", "control-plane-keys"}},
		{name: "a Node that claims the machine of another one", controlPlanes: 1, node: "worker-1", edit: func(s *revokeStage) {
			s.node("worker-1", func(n *cluster.Node) { n.ProviderID = "sandbox://demo/control-plane-0" })
		}, warn: []string{"node-claims-other-machine"}},
		{name: "a Node without a machine, and a cloud that is away", controlPlanes: 1, node: "worker-1", edit: func(s *revokeStage) {
			s.node("worker-1", func(n *cluster.Node) { n.ProviderID, n.GroupID = "", "" })
			s.cloud.end(fmt.Errorf("ask: %w", cloud.ErrUnavailable))
		}, block: []string{"machine-unknown", "group-unknown"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newRevokeStage(t, tt.controlPlanes)
			if tt.edit != nil {
				tt.edit(s)
			}
			p := s.plan(engine.RevokeRequest{Node: tt.node, Replace: true})
			if got := findingIDs(p, plan.Block); !slices.Equal(got, tt.block) {
				t.Errorf("blocked by %v, want %v", got, tt.block)
			}
			if got := findingIDs(p, plan.Warn); tt.block == nil && !slices.Equal(got, tt.warn) {
				t.Errorf("warned of %v, want %v", got, tt.warn)
			}
			if tt.block == nil {
				return
			}
			if len(p.Blocked()) == 0 {
				return
			}
			err := s.engine().Run(t.Context(), p, func(plan.Event) {})
			if plan.ExitCode(err) != plan.ExitBlocked || plan.Remedy(err) == "" {
				t.Errorf("exit %d (remedy %q), want %d", plan.ExitCode(err), plan.Remedy(err), plan.ExitBlocked)
			}
			if l, err := s.cluster.Revoked(t.Context()); err != nil || len(l) > 0 {
				t.Errorf("record %v, %v", l, err)
			}
		})
	}
}

// The machine that the cloud calls so is removed, and not the one that its Node claims.
func TestRevokeBelievesTheCloud(t *testing.T) {
	s := newRevokeStage(t, 1)
	s.node("worker-1", func(n *cluster.Node) {
		n.ProviderID, n.GroupID = "sandbox://demo/control-plane-0", "sandboxes/demo/groups/control-plane"
	})
	s.operator()
	if _, err := s.revoke(t.Context(), engine.RevokeRequest{Node: "worker-1"}, nil); err != nil {
		t.Fatal(err)
	}
	if e := s.entry("worker-1"); e.ProviderID != "sandbox://demo/worker-1" || e.Group != "sandboxes/demo/groups/workers" || e.Role != "worker" {
		t.Errorf("entry %+v", e)
	}
}

// incarnation adds a machine called worker-1 to a cloud that reuses names and IDs.
func (s *revokeStage) incarnation(serial string, state cloud.State, before bool) {
	c := s.cloud
	c.mu.Lock()
	defer c.mu.Unlock()
	m := cluster.CloudMachine{Instance: cloud.Instance{
		Name: "worker-1", ProviderID: "sandbox://demo/worker-1", Incarnation: serial, Group: "sandboxes/demo/groups/workers", Role: cloud.Worker, State: state, Created: time.Now(),
	}, GroupName: "workers"}
	if c.machines = append(c.machines, m); before {
		c.machines = slices.Insert(c.machines[:len(c.machines)-1], 0, m)
	}
}

// reuseNames gives the machine worker-1 and its Node an incarnation.
func (s *revokeStage) reuseNames() {
	s.cloud.set("worker-1", func(m *cluster.CloudMachine) { m.Incarnation = "1" })
	s.node("worker-1", func(n *cluster.Node) { n.ProviderID = "sandbox://demo/worker-1#1" })
}

// A resumed revocation removes the machine that it recorded, and not a machine that has got its
// name meanwhile. The order of the cloud's list does not matter.
func TestResumedRevokeKeepsItsMachine(t *testing.T) {
	for _, before := range []bool{false, true} {
		t.Run(fmt.Sprintf("the new machine is listed first: %t", before), func(t *testing.T) {
			s := newRevokeStage(t, 1)
			s.reuseNames()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			s.hook(func(c string) error {
				if c == "RemoveMachine worker-1" && ctx.Err() == nil {
					cancel()
					return ctx.Err()
				}
				return nil
			})
			r := engine.RevokeRequest{Node: "worker-1"}
			if _, err := s.revoke(ctx, r, nil); plan.ExitCode(err) != plan.ExitStopped {
				t.Fatalf("interrupted: %v", err)
			}
			s.cloud.set("worker-1", func(m *cluster.CloudMachine) { m.State = cloud.Terminating })
			s.incarnation("2", cloud.Creating, before)
			s.hook(func(c string) error {
				if c == "WatchRollout" { // the operator removes the machine that is named, and no other
					s.cloud.set("worker-1", func(m *cluster.CloudMachine) {
						if m.Incarnation == "1" {
							m.Stage = plan.NodeGone
						}
					})
					s.cluster.RemoveNode("worker-1")
					s.cluster.EndMove(revocation.RemovalPrefix + "worker-1")
				}
				return nil
			})
			if _, err := s.revoke(t.Context(), r, nil); err != nil {
				t.Fatalf("%v (remedy %q)", err, plan.Remedy(err))
			}
			if e := s.entry("worker-1"); e.ProviderID != "sandbox://demo/worker-1#1" || e.Removed.IsZero() {
				t.Errorf("entry %+v", e)
			}
			// The same command finds nothing to do: the later machine has no credentials.
			if p := s.plan(r); slices.ContainsFunc(p.Steps, func(st plan.Step) bool { return !st.Finished }) {
				t.Errorf("steps are left: %+v", p.Steps)
			}
		})
	}
}

func TestRevokeSaysThatTheNewMachineGotTheRefusedName(t *testing.T) {
	s := newRevokeStage(t, 1)
	s.reuseNames()
	made := false
	s.hook(func(call string) error {
		if call == "WatchRollout" && !made {
			made = true
			s.cloud.set("worker-1", func(m *cluster.CloudMachine) { m.Stage = plan.NodeGone })
			s.cluster.RemoveNode("worker-1")
			s.cluster.EndMove(revocation.RemovalPrefix + "worker-1")
			s.incarnation("2", cloud.Creating, false)
			s.cluster.EndMove(revocation.RefillPrefix + "worker-1") // as an operator of an older release
		}
		return nil
	})
	_, err := s.revoke(t.Context(), engine.RevokeRequest{Node: "worker-1", Replace: true}, nil)
	if plan.ExitCode(err) != plan.ExitFailed || !strings.Contains(err.Error(), "gave the name worker-1 to the new machine sandbox://demo/worker-1#2") || !strings.Contains(plan.Remedy(err), "gets another name") {
		t.Fatalf("%v (remedy %q)", err, plan.Remedy(err))
	}
	if e := s.entry("worker-1"); e.ProviderID != "sandbox://demo/worker-1#1" || e.Removed.IsZero() {
		t.Errorf("entry %+v", e)
	}
}

func TestRevokeRefusesUnknownMachines(t *testing.T) {
	s := newRevokeStage(t, 1)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte("leads to it"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name    string
		request engine.RevokeRequest
		says    string
	}{
		{name: "no such node", request: engine.RevokeRequest{Node: "worker-9"}, says: "there is no such node"},
		{name: "nor with a kubeconfig", request: engine.RevokeRequest{Node: "worker-9", Kubeconfig: kubeconfig}, says: "there is no such node"},
		{name: "no kubeconfig", request: engine.RevokeRequest{Node: "worker-1", Kubeconfig: kubeconfig + "-none"}, says: "no such file"},
		{name: "a long reason", request: engine.RevokeRequest{Node: "worker-1", Reason: strings.Repeat("x", 201)}, says: "201 bytes"},
		{name: "a reason that moves the cursor", request: engine.RevokeRequest{Node: "worker-1", Reason: "a\x1b[2J"}, says: "cannot be printed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := s.engine().PlanRevoke(t.Context(), tt.request)
			if plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(err.Error(), tt.says) || plan.Remedy(err) == "" {
				t.Errorf("exit %d, %v (remedy %q)", plan.ExitCode(err), err, plan.Remedy(err))
			}
		})
	}
}

// A damaged entry is rewritten: role and group come from the cloud, so etcd's quorum is checked.
func TestRevokeRepairsADamagedEntry(t *testing.T) {
	s := newRevokeStage(t, 1)
	if err := s.cluster.Revoke(t.Context(), "control-plane-0", revocation.Entry{}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err := s.revoke(ctx, engine.RevokeRequest{Node: "control-plane-0"}, nil)
	if err == nil || !strings.Contains(err.Error(), "is the only control plane") {
		t.Errorf("a damaged entry of the only control plane: %v", err)
	}
}

func TestRevokeWithAKubeconfigAlone(t *testing.T) {
	s := newRevokeStage(t, 1)
	s.operator()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte("leads to it"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.cloud.end(errors.New("must not be asked"))
	if _, err := s.revoke(t.Context(), engine.RevokeRequest{Node: "worker-1", Replace: true, Kubeconfig: kubeconfig}, nil); err != nil {
		t.Fatal(err)
	}
	// What the Node claims of itself is not recorded: the name is enough, and the join service
	// takes the address from the cloud.
	if e := s.entry("worker-1"); e.Address != "" || e.ProviderID != "" || e.Replacement != "worker-2" {
		t.Errorf("entry %+v", e)
	}
}

// Without the cloud, the ID of the machine is that of its Node. With a false incarnation the operator
// would search for a machine that never existed.
func TestRevokeWithAKubeconfigAloneIgnoresTheIncarnationOfANode(t *testing.T) {
	s := newRevokeStage(t, 1)
	s.node("worker-1", func(n *cluster.Node) { n.ProviderID = "sandbox://demo/worker-1#999" })
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte("leads to it"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.cloud.end(errors.New("must not be asked"))
	var effects []string
	for _, step := range s.plan(engine.RevokeRequest{Node: "worker-1", Kubeconfig: kubeconfig}).Steps {
		effects = append(effects, step.Effect)
	}
	if all := strings.Join(effects, "\n"); !strings.Contains(all, "its machine sandbox://demo/worker-1 ") {
		t.Errorf("effects:\n%s", all)
	}
}

func TestRehearsedRevokeChangesNothing(t *testing.T) {
	s := newRevokeStage(t, 3)
	events, err := s.revoke(t.Context(), engine.RevokeRequest{Node: "control-plane-1", Replace: true, Rehearse: true}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if l, err := s.cluster.Revoked(t.Context()); err != nil || len(l) > 0 {
		t.Errorf("record %v, %v", l, err)
	}
	if ro, err := s.cluster.Rollout(t.Context()); err != nil || len(ro.Moves) > 0 || s.cluster.Tainted("control-plane-1") {
		t.Errorf("moves %v, %v", ro.Moves, err)
	}
	if runs, err := s.engine().Runs(); err != nil || slices.ContainsFunc(runs, func(r plan.RunSummary) bool { return r.Verb == plan.VerbRevoke }) {
		t.Errorf("a rehearsal left a run: %v, %v", runs, err)
	}
	told := 0
	for _, ev := range events {
		if ev.Kind == plan.KindStep && strings.HasPrefix(ev.Text, "would: ") {
			told++
		}
	}
	if told != 4 {
		t.Errorf("%d steps say what they would do, want 4", told)
	}
}

func TestRevokeSaysWhenNoMachineCame(t *testing.T) {
	s := newRevokeStage(t, 1)
	s.hook(func(call string) error {
		if call == "WatchRollout" { // the operator removes the machine and gives the other one up
			s.cloud.set("worker-1", func(c *cluster.CloudMachine) { c.Stage = plan.NodeGone })
			s.cluster.RemoveNode("worker-1")
			s.cluster.EndMove(revocation.RemovalPrefix + "worker-1")
			s.cluster.EndMove(revocation.RefillPrefix + "worker-1")
		}
		return nil
	})
	r := engine.RevokeRequest{Node: "worker-1", Replace: true}
	_, err := s.revoke(t.Context(), r, nil)
	if plan.ExitCode(err) != plan.ExitFailed || !strings.Contains(err.Error(), "no machine was created in time") || plan.Remedy(err) == "" {
		t.Fatalf("%v (remedy %q)", err, plan.Remedy(err))
	}
	s.hook(nil)
	s.operator()
	if _, err := s.revoke(t.Context(), r, nil); err != nil {
		t.Errorf("once more: %v", err)
	}
	if e := s.entry("worker-1"); e.Replacement != "worker-2" {
		t.Errorf("entry %+v", e)
	}
}

func TestWatchShowsARevokedMachine(t *testing.T) {
	s := newRevokeStage(t, 1)
	if err := s.cluster.RemoveMachine(t.Context(), "worker-1", revocation.Entry{ProviderID: "sandbox://demo/worker-1", By: "ops@laptop", Reason: "captured"}); err != nil {
		t.Fatal(err)
	}
	var got plan.Event
	if err := s.engine().Watch(t.Context(), engine.WatchRequest{Once: true}, func(ev plan.Event) {
		if ev.Kind == plan.KindNode && ev.Node == "worker-1" {
			got = ev
		}
	}); err != nil {
		t.Fatal(err)
	}
	if got.To != plan.NodeLeaving || got.Text != "revoked by ops@laptop: captured" {
		b, _ := json.Marshal(got)
		t.Errorf("event %s", b)
	}
}

// Entries whose certificates have expired are removed by the next upgrade, and no others. The
// plan names them. A cluster without such entries has no step for it.
func TestUpgradeRemovesExpiredRevocations(t *testing.T) {
	s := newApplyStage(t)
	find := func(p *plan.Plan) *plan.Step {
		if i := slices.IndexFunc(p.Steps, func(x plan.Step) bool { return x.ID == engine.StepRevocations }); i >= 0 {
			return &p.Steps[i]
		}
		return nil
	}
	plan := func() *plan.Plan {
		t.Helper()
		p, err := s.engine().PlanApply(t.Context(), upgrade, func(plan.Event) {})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	if x := find(plan()); x != nil {
		t.Errorf("step without a revocation: %+v", x)
	}
	now := time.Now()
	// The later one comes first: Revoke itself removes expired entries.
	s.must(s.cluster.Revoke(t.Context(), "worker-8", revocation.Entry{By: "ops@laptop", Since: now, Until: now.Add(revocation.CertificateLifetime)}))
	s.must(s.cluster.Revoke(t.Context(), "worker-9", revocation.Entry{By: "ops@laptop", Since: now.Add(-2 * revocation.CertificateLifetime), Until: now.Add(-revocation.CertificateLifetime)}))
	x := find(plan())
	if x == nil || !strings.Contains(x.Effect, "worker-9") || strings.Contains(x.Effect, "worker-8") {
		t.Fatalf("step %+v", x)
	}
	if _, _, err := s.apply(t.Context(), upgrade, nil); err != nil {
		t.Fatal(err)
	}
	list, err := s.cluster.Revoked(t.Context())
	if _, kept := list["worker-8"]; err != nil || len(list) != 1 || !kept {
		t.Errorf("record %+v, %v; want worker-8 alone", list, err)
	}
}
