package engine_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/workspace"
)

// applyStage is a cluster that an operator looks after.
type applyStage struct {
	*checkStage
	dumps int
	holes bool
	moves bool            // whether the operator does anything
	told  chan plan.Event // node events, for those who wait for one
}

func newApplyStage(t *testing.T) *applyStage {
	s := &applyStage{checkStage: newPrepareStage(t), moves: true, told: make(chan plan.Event, 1000)}
	for i := range s.inside.running.Nodes {
		n := &s.inside.running.Nodes[i]
		n.Components = s.inside.running.Target.Components
		s.cluster.PutNode(*n)
	}
	s.hook(nil)
	return s
}

// hook has f called at each call of the cluster.
func (s *applyStage) hook(f func(call string) error) {
	s.cluster.OnCall(func(call string) error {
		if f != nil {
			if err := f(call); err != nil {
				return err
			}
		}
		if call == "WatchRollout" {
			s.operate()
		}
		return nil
	})
}

// dumper is what reads a backup.
type dumper struct {
	engine.BackupCluster
	s *applyStage
}

func (d dumper) Dump(_ context.Context, w *backup.Writer, _ engine.DumpOptions, report func(engine.BackupProgress)) error {
	d.s.dumps++
	tw, err := w.Type(backup.Type{Version: "v1", Resource: "configmaps", Kind: "ConfigMap", Namespaced: true}, "")
	if err != nil {
		return err
	}
	if err := tw.Add(&backup.Item{JSON: []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","namespace":"b"}}`)}); err != nil {
		return err
	}
	if d.s.holes {
		w.Hole(backup.Hole{Resource: "widgets", Reason: "its webhook does not answer"})
	}
	report(engine.BackupProgress{Types: 1, AllTypes: 1, Objects: 1})
	return tw.Close("1")
}

func (s *applyStage) engine() *engine.Engine {
	s.Helper()
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		s.Fatal(err)
	}
	e := engine.New(w, engine.Deps{
		Connect: func(context.Context, []byte) (engine.Cluster, error) { return s.cluster, nil },
		Inspect: func(context.Context, []byte) (check.Inspector, error) { return s.inside, nil },
		Backups: func(context.Context, []byte) (engine.BackupCluster, error) { return dumper{s: s}, nil },
		Provider: func(context.Context, *workspace.Config, *workspace.State) (engine.Cloud, error) {
			return s.cloud, nil
		},
		Releases: openOlder,
	})
	e.SetLimits(2*time.Second, 5*time.Second, time.Second, 500*time.Millisecond, time.Second, 1500*time.Millisecond)
	return e
}

// apply plans and runs once. see is called with every event.
func (s *applyStage) apply(ctx context.Context, r engine.ApplyRequest, see func(plan.Event)) (*plan.Plan, []plan.Event, error) {
	s.Helper()
	e := s.engine()
	p, err := e.PlanApply(ctx, r, func(plan.Event) {})
	if err != nil {
		return nil, nil, err
	}
	var events []plan.Event
	err = e.Run(ctx, p, func(ev plan.Event) {
		events = append(events, ev)
		if ev.Kind == plan.KindNode {
			s.told <- ev
		}
		if see != nil {
			see(ev)
		}
	})
	checkStream(s.T, events, err)
	return p, events, err
}

// operate brings all nodes to the target one after the other, as the operator does. Before each
// change it waits until the previous one was reported.
func (s *applyStage) operate() {
	if !s.moves {
		return
	}
	s.moves = false
	go func() {
		await := func(node, state string) {
			for ev := range s.told {
				if ev.Node == node && ev.To == state {
					return
				}
			}
		}
		target, err := s.cluster.NodeTarget(s.Context())
		if err != nil {
			return
		}
		await(s.inside.running.Nodes[0].Name, plan.NodeOutdated)
		s.cluster.SetRollout(func(r *cluster.Rollout) { r.Observed, r.Busy, r.Reason = true, true, "RollingOut" })
		for _, old := range s.inside.running.Nodes {
			heir := strings.TrimRight(old.Name, "0123456789") + "9"
			if strings.HasSuffix(old.Name, "1") {
				heir = "worker-8"
			}
			move := cluster.Move{Name: "replace-0", Node: heir, Group: old.Group, Donor: old.Name, Machine: "Creating"}
			set := func() { s.cluster.SetRollout(func(r *cluster.Rollout) { r.Moves = []cluster.Move{move} }) }
			set()
			await(heir, plan.NodeCreating)
			n := old
			n.Name, n.Image, n.Components, n.Kubernetes = heir, target.Image, target.Components, target.Kubernetes
			s.cluster.PutNode(n)
			await(heir, plan.NodeReady)
			old.Cordoned, old.Heir = true, heir
			s.cluster.PutNode(old)
			move.Node, move.Leaves = old.Name, true
			set()
			await(old.Name, plan.NodeDraining)
			s.cluster.RemoveNode(old.Name)
			await(old.Name, plan.NodeLeaving)
			s.cluster.SetRollout(func(r *cluster.Rollout) { r.Moves = nil })
			await(old.Name, plan.NodeGone)
		}
		s.cluster.SetRollout(func(r *cluster.Rollout) { r.Observed, r.Reached, r.Busy, r.Reason = true, true, false, "UpToDate" })
	}()
}

// steps are what became of the steps.
func steps(events []plan.Event) (out []string) {
	for _, e := range events {
		if e.Kind == plan.KindStep && e.State != plan.StateRunning {
			out = append(out, e.Step+" "+e.State)
		}
	}
	return out
}

// upgrade is a request for image and Kubernetes in one write.
var upgrade = engine.ApplyRequest{PrepareRequest: both, Surge: "10%"}

func TestApplyUpgradesACluster(t *testing.T) {
	s := newApplyStage(t)
	p, events, err := s.apply(t.Context(), upgrade, nil)
	if err != nil {
		t.Fatalf("%v (remedy %q)", err, plan.Remedy(err))
	}
	if d := cmp.Diff([]string{"backup done", "components done", "join-config done", "charts done", "set-target done", "wait-for-rollout done", "etcd-members done"}, steps(events)); d != "" {
		t.Errorf("steps (-want +got):\n%s", d)
	}
	var nodes []string
	for _, e := range events {
		if e.Kind == plan.KindNode && e.Node != "worker-1" && e.Node != "worker-8" && e.Node != "worker-0" && e.Node != "worker-9" {
			nodes = append(nodes, e.Node+" "+e.To)
		}
	}
	if d := cmp.Diff([]string{
		"control-plane-0 outdated", "control-plane-0 replacing", "control-plane-9 creating", "control-plane-9 ready",
		"control-plane-0 draining", "control-plane-0 leaving", "control-plane-0 gone",
	}, nodes); d != "" {
		t.Errorf("node events of control planes (-want +got):\n%s", d)
	}
	target, err := s.cluster.NodeTarget(t.Context())
	if err != nil || target.ImageVersion != "v1.1.0" || target.Kubernetes != "v1.36.3" || target.MaxSurge != "10%" || target.KeepWorkers {
		t.Errorf("target %+v, %v", target, err)
	}
	if got := s.joined(); got.Attestation != newDemand {
		t.Errorf("join-config %+v", got)
	}
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := backup.Open(w.Path(plan.RunsDir), p.ID, backup.Keys{}); err != nil {
		t.Error(err)
	} else if err := b.Verify(t.Context(), nil); err != nil {
		t.Error(err)
	}
	if h := s.cluster.Holder(); h.Run != "" {
		t.Errorf("the cluster is still held by %v", h)
	}
	final := 0
	for _, st := range p.Steps {
		if st.Final {
			final++
			if st.ID != check.StepTarget || !strings.Contains(st.Warning, "Back up etcd") || !slices.Contains(st.Details, "kubelets get new certificates; the certificate authority of the cluster stays") {
				t.Errorf("%+v", st)
			}
		}
	}
	if final != 1 || !strings.HasPrefix(p.ID, "upgrade-2") || len(p.Components) == 0 || p.Changes == nil || !strings.HasPrefix(p.Steps[5].Details[0], "takes about ") {
		t.Errorf("plan %+v", p)
	}

	r := &s.inside.running
	r.Target, r.ControlPlaneImage, r.WorkerImage = target, at("v1.1.0"), at("v1.1.0")
	for i := range r.Nodes {
		r.Nodes[i].Image = target.Image
	}
	r.Kubernetes, r.ControlPlaneKubelet, r.WorkerKubelet, r.Etcd = at("v1.36.3"), at("v1.36.3"), at("v1.36.3"), "3.6.8-0"
	if _, _, err := s.apply(t.Context(), upgrade, nil); plan.ExitCode(err) != plan.ExitNothing || !strings.Contains(err.Error(), "the cluster runs the requested versions already") {
		t.Errorf("again: %v", err)
	}
}

// Wherever it is interrupted, the same command goes on, and makes no second backup.
func TestApplyIsInterruptedAnywhereAndGoesOn(t *testing.T) {
	for _, call := range []string{"PublishComponents", "PublishJoinConfig", "ApplyKinds", "ApplyChart constellation-operator", "SetNodeTarget", "WatchRollout"} {
		t.Run(call, func(t *testing.T) {
			s := newApplyStage(t)
			ctx, cancel := context.WithCancel(t.Context())
			s.moves = false
			s.hook(func(c string) error {
				if c == call {
					cancel()
					return ctx.Err()
				}
				return nil
			})
			_, events, err := s.apply(ctx, upgrade, nil)
			want := plan.ExitStopped
			if call == "WatchRollout" {
				want = plan.ExitDone // the cluster continues on its own
			}
			if plan.ExitCode(err) != want {
				t.Fatalf("interrupted: %v", err)
			}
			resume := "constellation upgrade apply -C " + s.dir + " --to v1.1.0 --kubernetes v1.36.3 --ack oldest-supports-kubernetes --surge 10%"
			if r := result(t, events); r.Resume != resume {
				t.Errorf("resume %q, want %q", r.Resume, resume)
			}
			s.moves = true
			s.hook(nil)
			if s.inside.running.Target, err = s.cluster.NodeTarget(t.Context()); err != nil {
				t.Fatal(err)
			}
			_, events, err = s.apply(t.Context(), upgrade, nil)
			if err != nil {
				t.Fatalf("%v (remedy %q)", err, plan.Remedy(err))
			}
			if s.dumps != 1 {
				t.Errorf("%d backups", s.dumps)
			}
			if target, err := s.cluster.NodeTarget(t.Context()); err != nil || target.ImageVersion != "v1.1.0" {
				t.Errorf("target %+v, %v; steps %q", target, err, steps(events))
			}
		})
	}
}

func TestApplyRefuses(t *testing.T) {
	other := cluster.Holder{User: "ops", Host: "desk", Workspace: "/w", PID: 7, Run: "upgrade-1", Since: checkTime}
	with := func(f func(*engine.ApplyRequest)) engine.ApplyRequest {
		r := upgrade
		f(&r)
		return r
	}
	for _, tt := range []struct {
		name    string
		given   func(*applyStage)
		request engine.ApplyRequest
		exit    int
		says    string
	}{
		{name: "a surge of zero", request: with(func(r *engine.ApplyRequest) { r.Surge = "0" }), exit: plan.ExitUsage, says: `surge is "0"`},
		{name: "an unknown step", request: with(func(r *engine.ApplyRequest) { r.Skip = []string{"preflight"} }), exit: plan.ExitUsage, says: `no step "preflight"`},
		{name: "the configuration requests image and minor in one hop without --ack", given: func(s *applyStage) {
			s.edit("image: v1.0.0", "image: v1.1.0")
			s.edit("kubernetesVersion: v1.35.4", "kubernetesVersion: v1.36.3")
			s.edit(value(2), value(12))
			s.edit(value(3), value(13))
		}, request: engine.ApplyRequest{}, exit: plan.ExitUnacknowledged, says: "not accepted by name"},
		{name: "local volumes go", given: func(s *applyStage) {
			s.inside.findings = []plan.Finding{{ID: "local-data", Severity: plan.Warn, Title: "data will be lost", Objects: []string{"statefulset/db/pg", "persistentvolumeclaim/db/data"}}}
		}, request: upgrade, exit: plan.ExitUnacknowledged, says: "data will be lost"},
		{name: "no backup", request: with(func(r *engine.ApplyRequest) { r.Skip = []string{check.StepBackup} }), exit: plan.ExitUnacknowledged, says: "no backup is made"},
		{name: "a blocking finding", given: func(s *applyStage) {
			s.inside.findings = []plan.Finding{{ID: "pdb", Severity: plan.Block, Title: "no room"}}
		}, request: upgrade, exit: plan.ExitBlocked, says: "no room"},
		{name: "skipped components that are not published", request: with(func(r *engine.ApplyRequest) { r.Skip = []string{engine.StepComponents} }), exit: plan.ExitBlocked, says: "without step components"},
		{name: "an incomplete backup", given: func(s *applyStage) { s.holes = true }, request: upgrade, exit: plan.ExitFailed, says: "back up before the upgrade"},
		{name: "another run holds the lock of the cluster", given: func(s *applyStage) { s.cluster.Seize(other, true) }, request: upgrade, exit: plan.ExitHeld, says: "held by ops@desk (process 7 in /w, run upgrade-1) since 2026-11-21T07:05:01Z"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newApplyStage(t)
			if tt.given != nil {
				tt.given(s)
			}
			before := len(s.cluster.Calls())
			_, _, err := s.apply(t.Context(), tt.request, nil)
			if plan.ExitCode(err) != tt.exit || err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%v (exit %d), want exit %d and %q", err, plan.ExitCode(err), tt.exit, tt.says)
			}
			if calls := s.cluster.Calls()[before:]; len(calls) > 0 {
				t.Errorf("changed: %q", calls)
			}
		})
	}
}

func TestApplyTakesNamesForWhatItDestroys(t *testing.T) {
	s := newApplyStage(t)
	s.inside.findings = []plan.Finding{{ID: "local-data", Severity: plan.Warn, Title: "data will be lost", Objects: []string{"persistentvolumeclaim/db/data"}}}
	r := upgrade
	r.Acknowledge = append(slices.Clone(r.Acknowledge), "local-data", "no-backup")
	r.Skip = []string{check.StepBackup}
	p, events, err := s.apply(t.Context(), r, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := steps(events); s.dumps > 0 || got[0] != "components done" || !slices.Contains(p.Acknowledged, "local-data") {
		t.Errorf("%d backups, steps %q, acknowledged %q", s.dumps, got, p.Acknowledged)
	}
}

func TestARehearsalHasNoEffect(t *testing.T) {
	s := newApplyStage(t)
	before := len(s.cluster.Calls())
	r := upgrade
	r.Rehearse = true
	p, events, err := s.apply(t.Context(), r, nil)
	if err != nil {
		t.Fatal(err)
	}
	if calls := s.cluster.Calls()[before:]; len(calls) > 0 || s.dumps > 0 {
		t.Errorf("changed: %q, %d backups", calls, s.dumps)
	}
	if left, err := filepath.Glob(filepath.Join(s.dir, plan.RunsDir, "upgrade-*")); err != nil || len(left) > 0 {
		t.Errorf("a record was made: %q, %v", left, err)
	}
	if !p.Rehearsal || len(steps(events)) != 7 || !strings.Contains(events[len(events)-1].Text, "nothing was changed") {
		t.Errorf("steps %q, result %+v", steps(events), events[len(events)-1])
	}
}

// A run that loses the lock of the cluster stops, and reports the new holder.
func TestApplyStopsWhenItLosesTheLock(t *testing.T) {
	s := newApplyStage(t)
	other := cluster.Holder{User: "ops", Host: "desk", Run: "upgrade-2"}
	s.hook(func(call string) error {
		if call == "PublishJoinConfig" {
			s.cluster.Seize(other, true)
		}
		return nil
	})
	_, events, err := s.apply(t.Context(), upgrade, nil)
	if plan.ExitCode(err) != plan.ExitHeld || !strings.Contains(err.Error(), "ops@desk") || result(t, events).Status != plan.StateStopped {
		t.Errorf("%v; %+v", err, events[len(events)-1])
	}
}

func TestDetachLeavesWhenTheTargetIsSet(t *testing.T) {
	s := newApplyStage(t)
	r := upgrade
	r.Detach = true
	_, events, err := s.apply(t.Context(), r, nil)
	if err != nil {
		t.Fatal(err)
	}
	got := steps(events)
	if last := events[len(events)-1]; got[len(got)-1] != "set-target done" || !strings.Contains(last.Text, "the cluster upgrades itself") || result(t, events).Next[1] != "constellation upgrade apply -C "+s.dir {
		t.Errorf("steps %q, result %+v", got, last)
	}
}

// The step that waits for the rollout reports each state of the rollout, and how the wait ended.
func TestWaitForRolloutReportsItsState(t *testing.T) {
	yes := true
	for _, tt := range []struct {
		name string
		do   func(*applyStage)
		wait string // text of the wait event; empty: the run ends
		exit int
		says string
	}{
		{name: "the rollout is cancelled", do: func(s *applyStage) {
			s.must(s.cluster.ChangeRollout(s.Context(), cluster.RolloutChange{Cancelled: &yes}))
			s.cluster.SetRollout(func(r *cluster.Rollout) { r.Observed, r.Reason = true, "Cancelled" })
		}, exit: plan.ExitStopped, says: "it was cancelled with 0 of 3 nodes at the target, 3 outdated"},
		{name: "the operator refuses the target", do: func(s *applyStage) {
			s.cluster.SetRollout(func(r *cluster.Rollout) {
				r.Observed, r.Stalled, r.Reason, r.Message = true, true, "TargetRefused", "it is older"
			})
		}, exit: plan.ExitFailed, says: "the operator refuses the target: it is older"},
		{name: "all nodes that are left are skipped", do: func(s *applyStage) {
			s.cluster.SetRollout(func(r *cluster.Rollout) {
				r.Observed, r.Reached, r.Reason, r.Message = true, true, "NodesHeld", "all other nodes are at the target; on hold: 1"
			})
		}, exit: plan.ExitStopped, says: "on hold: 1"},
		{name: "the permission to read the rollout is lost for good", do: func(s *applyStage) { s.deny(1 << 30) }, exit: plan.ExitFailed, says: "too few rights"},
		{name: "an API server that starts denies everything for a moment", do: func(s *applyStage) {
			s.deny(3)
			s.cluster.SetRollout(func(r *cluster.Rollout) {
				r.Waiting = cluster.RolloutWait{Reason: "DrainBlocked", Message: "no room on the second try"}
				r.Observed = true
			})
		}, wait: "no room on the second try"},
		{name: "another target is set meanwhile", do: func(s *applyStage) {
			s.must(s.cluster.SetNodeTarget(s.Context(), cluster.NodeTarget{Image: "x", ImageVersion: "v1.2.0", Kubernetes: "v1.36.4"}))
		}, exit: plan.ExitFailed, says: "the target was changed meanwhile, to image v1.2.0 and Kubernetes v1.36.4"},
		{name: "a drain is blocked", do: func(s *applyStage) {
			s.cluster.SetRollout(func(r *cluster.Rollout) {
				r.Observed, r.Stalled = true, true
				r.Waiting = cluster.RolloutWait{Reason: "DrainBlocked", Message: "no room for shop/cart", Node: "worker-0", NextTry: checkTime}
			})
		}, wait: "no room for shop/cart; it is tried again at 07:05:01Z"},
		{name: "it is paused while a node drains", do: func(s *applyStage) {
			s.must(s.cluster.ChangeRollout(s.Context(), cluster.RolloutChange{Paused: &yes}))
			s.cluster.SetRollout(func(r *cluster.Rollout) {
				r.Observed, r.Waiting = true, cluster.RolloutWait{Reason: "DrainBlocked", Message: "no room for shop/cart", Node: "worker-0"}
			})
		}, wait: "it is being paused: no room for shop/cart"},
		{name: "no operator has observed the target", do: func(*applyStage) {}, wait: "the operator has not observed the target yet"},
		{name: "the API server does not answer", do: func(s *applyStage) { s.cluster.SetDown(true) }, wait: "0 of 3 nodes at the target, 3 outdated"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newApplyStage(t)
			s.moves = false
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			seen := 0
			_, events, err := s.apply(ctx, upgrade, func(ev plan.Event) {
				if ev.Kind == plan.KindNode {
					if seen++; seen == 3 {
						go tt.do(s)
					}
				}
				if ev.Kind == plan.KindWait && tt.wait != "" && strings.Contains(ev.Text, tt.wait) {
					cancel()
				}
			})
			if tt.wait != "" {
				if err != nil || result(t, events).Status != plan.StateDetached {
					t.Errorf("left: %v", err)
				}
				return
			}
			if plan.ExitCode(err) != tt.exit || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%v (exit %d), want exit %d and %q", err, plan.ExitCode(err), tt.exit, tt.says)
			}
		})
	}
}

// deny has the API server forbid the next n looks at the rollout.
func (s *applyStage) deny(n int64) {
	var looks atomic.Int64
	s.hook(func(call string) error {
		if call == "Rollout" && looks.Add(1) <= n {
			return fmt.Errorf("read NodeVersion: %w", cluster.ErrForbidden)
		}
		return nil
	})
}

func (s *applyStage) must(err error) {
	if err != nil {
		s.Error(err)
	}
}

func TestExecuteBringsTheServicesAlone(t *testing.T) {
	s := newApplyStage(t)
	if err := os.Remove(filepath.Join(s.dir, workspace.ConfigFile)); err != nil {
		t.Fatal(err)
	}
	execute := func() ([]plan.Event, error) {
		e := s.engine()
		p, err := e.PlanExecute(t.Context(), engine.ApplyRequest{})
		if err != nil {
			t.Fatal(err)
		}
		var events []plan.Event
		err = e.Run(t.Context(), p, func(ev plan.Event) { events = append(events, ev) })
		checkStream(t, events, err)
		return events, err
	}
	events, err := execute()
	if d := cmp.Diff([]string{"backup done", "charts done"}, steps(events)); d != "" || err != nil {
		t.Errorf("steps (-want +got):\n%s%v", d, err)
	}
	if target, err := s.cluster.NodeTarget(t.Context()); err != nil || target.ImageVersion != "v1.0.0" {
		t.Errorf("target %+v, %v", target, err)
	}
	if _, err := execute(); plan.ExitCode(err) != plan.ExitNothing {
		t.Errorf("again: %v", err)
	}
}

func TestChangeRollout(t *testing.T) {
	s := newApplyStage(t)
	yes, no := true, false
	for _, tt := range []struct {
		change cluster.RolloutChange
		exit   int
	}{
		{cluster.RolloutChange{Paused: &no, Cancelled: &no}, plan.ExitNothing},
		{cluster.RolloutChange{Paused: &yes}, plan.ExitDone},
		{cluster.RolloutChange{Paused: &yes}, plan.ExitNothing},
		{cluster.RolloutChange{Cancelled: &yes}, plan.ExitDone},
		{cluster.RolloutChange{Paused: &no, Cancelled: &no}, plan.ExitDone},
	} {
		if _, err := s.engine().ChangeRollout(t.Context(), tt.change); plan.ExitCode(err) != tt.exit {
			b, _ := json.Marshal(tt.change)
			t.Errorf("%s: %v, want exit %d", b, err, tt.exit)
		}
	}

	if err := os.Remove(filepath.Join(s.dir, workspace.KubeconfigFile)); err != nil {
		t.Fatal(err)
	}
	_, err := s.engine().ChangeRollout(t.Context(), cluster.RolloutChange{Paused: &yes})
	if told := (*plan.Error)(nil); plan.ExitCode(err) != plan.ExitUsage || !errors.As(err, &told) || told.Remedy == "" {
		t.Errorf("without a kubeconfig: %v, want a remedy", err)
	}
}

// TestRetryWaitsForTheOperator: a watch that begins after `upgrade retry` must not read that all other nodes are at
// the target, which the operator wrote before.
func TestRetryWaitsForTheOperator(t *testing.T) {
	s := newApplyStage(t)
	s.cluster.PutNode(cluster.Node{Name: "worker-9", Group: "edge", Role: "worker", State: plan.NodeReady})
	held := func(n int) {
		s.cluster.SetRollout(func(ro *cluster.Rollout) {
			ro.Observed, ro.Reached, ro.Reason, ro.Message = true, true, rollout.SomeSkipped, fmt.Sprintf("on hold: %d", n)
		})
	}
	for _, tt := range []struct {
		name   string
		notice func() // what the operator writes
	}{
		{name: "the rollout continues", notice: func() {
			s.cluster.SetRollout(func(ro *cluster.Rollout) { ro.Reached, ro.Reason = false, "Progressing" })
		}},
		{name: "another node is still on hold", notice: func() { held(1) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			held(2)
			if _, err := s.engine().Skip(t.Context(), "worker-9", true); err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() {
				_, err := s.engine().Skip(t.Context(), "worker-9", false)
				done <- err
			}()
			select {
			case err := <-done:
				t.Fatalf("it ended before the operator noticed: %v", err)
			case <-time.After(300 * time.Millisecond):
			}
			tt.notice()
			select {
			case err := <-done:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(5 * time.Second):
				t.Error("it did not end")
			}
		})
	}
}

func TestSkip(t *testing.T) {
	s := newApplyStage(t)
	for _, name := range []string{"worker-8", "control-plane-8"} {
		s.cluster.PutNode(cluster.Node{Name: name, Group: "core", State: plan.NodeReady, InPlace: true})
	}
	s.cluster.PutNode(cluster.Node{Name: "worker-9", Group: "edge", Role: "worker", State: plan.NodeReady})
	target, err := s.cluster.NodeTarget(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s.cluster.SetRollout(func(ro *cluster.Rollout) {
		ro.Agent = cluster.AgentRun{Node: "control-plane-8", Phase: "failed", Version: target.Kubernetes}
		ro.Moves = []cluster.Move{{Name: "replace-0", Node: "worker-8", Upgrades: true, Phase: "failed"}, {Name: "replace-1", Node: "worker-9", Upgrades: true, Phase: "apply"}}
	})
	for _, tt := range []struct {
		name string
		skip bool
		exit int
		says string
	}{
		{name: "worker-9", exit: plan.ExitNothing, says: "neither skipped nor postponed, and no upgrade of it has failed"},
		{name: "worker-9", skip: true, exit: plan.ExitDone},
		{name: "worker-9", skip: true, exit: plan.ExitNothing, says: "node worker-9 is skipped already"},
		{name: "worker-9", exit: plan.ExitDone},
		{name: "edge", skip: true, exit: plan.ExitDone},
		{name: "worker-9", skip: true, exit: plan.ExitNothing, says: "with its group edge"},
		{name: "worker-9", exit: plan.ExitUsage, says: "skipped with all of its group edge"},
		{name: "edge", skip: true, exit: plan.ExitNothing, says: "group edge is skipped already"},
		{name: "edge", exit: plan.ExitDone},
		{name: "worker-8", exit: plan.ExitDone}, // its upgrade in place has failed
		{name: "control-plane-8", exit: plan.ExitDone},
		{name: "worker-99", skip: true, exit: plan.ExitUsage, says: `no node and no group is called "worker-99"`},
	} {
		_, err := s.engine().Skip(t.Context(), tt.name, tt.skip)
		if plan.ExitCode(err) != tt.exit || tt.says != "" && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s %t: %v, want exit %d and %q", tt.name, tt.skip, err, tt.exit, tt.says)
		}
	}
}
