package tui

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/tui/term"
)

// hopPlan is a realistic plan of an image and Kubernetes upgrade of a small cluster.
func hopPlan() *plan.Plan {
	const digest = "3f1c9e5b7a2d4c6e8f0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60"
	p := upgradePlan()
	p.Components = []plan.ComponentCheck{{Name: "Kubernetes", Kind: "kubernetes", Now: "v1.35.4", NextHop: "v1.36.3"}, {Name: "OS image", Kind: "image", Now: "v1.0.0", NextHop: "v1.1.0"}}
	p.To.Kubernetes = "v1.36.3"
	p.Changes = &plan.Changes{
		Nodes: map[string]int{"control-plane": 1, "workers": 2}, KindsChanged: []string{"nodeversions.update.edgeless.systems"},
		Measurements: []plan.MeasurementChange{{PCR: 9, From: digest, To: "8" + digest[1:]}},
		ConfigMaps:   []string{"kube-system/join-config (changed)"}, Charts: []string{"constellation-operators"},
		Least: 3 * time.Minute, Most: 8 * time.Minute, Basis: "three replacements, as long as those before",
	}
	p.Findings = []plan.Finding{
		{
			ID: "local-data", Severity: plan.Warn, Named: true, Title: "1 volume goes with its node", Source: "disruption",
			Detail: "db/pg-0 is on worker-0", Objects: []string{"persistentvolume/pg-0"}, Remedy: "if it is meant as it is, `--ack local-data`",
		},
		{
			ID: "oldest-supports-kubernetes", Severity: plan.Warn, Named: true, Title: "image v1.0.0 does not list Kubernetes v1.36.3", Source: "versions",
			Detail: "control planes of the old image run it until they are replaced",
		},
		{ID: "probes", Severity: plan.Warn, Title: "2 workloads have no readiness probe", Source: "disruption"},
	}
	p.Notes = []string{"Image and Kubernetes go up in one write."}
	p.Steps = []plan.Step{
		{ID: check.StepBackup, Title: "Back up what an upgrade can destroy", Effect: "every definition and custom resource is in /home/ops/demo/constellation-upgrade/upgrade-20261121070501-1a2b3c4d"},
		{ID: engine.StepComponents, Title: "Publish node components", Effect: "ConfigMap k8s-components-sha256-cb7e says what nodes install", Finished: true},
		{ID: engine.StepJoinConfig, Title: "Let in machines of the new image", Effect: "machines of image v1.1.0 are let in, beside those of v1.0.0", Details: []string{"PCR 9: 3f1c9e5b to 8f1c9e5b"}},
		{ID: plan.StepCharts, Title: "Upgrade the services", Effect: "4 kinds and 2 charts with operator v1.1.0, join-service v1.1.0"},
		{ID: check.StepTarget, Title: "Set the target of all nodes", Effect: "NodeVersion asks for image v1.1.0 and Kubernetes v1.36.3 in one write", Final: true, Warning: "The disks of replaced nodes are gone for good, and Kubernetes never goes down again."},
		{ID: plan.StepRollout, Title: "Wait until all nodes are new", Effect: "replaces 3 nodes, control planes first, one after the other"},
	}
	return p
}

// chartPlan is hopPlan with a third-party chart whose upgrade is destructive, and a chart that
// was changed by hand.
func chartPlan() *plan.Plan {
	const lost = "CustomResourceDefinition orders.example.com is deleted, and 12 objects of it with it"
	p := hopPlan()
	p.Changes.Charts = []string{"constellation-operators 1.0.0 to 1.1.0", "cert-manager v1.18.2 to v1.19.1", "cilium 1.17.4"}
	p.Changes.ChartChanges = []plan.ChartChange{
		{Chart: "constellation-operators", Namespace: "constellation-system", From: "1.0.0", To: "1.1.0", Values: []plan.ValueChange{{Path: "release", From: `"v1.0.0"`, To: `"v1.1.0"`}}},
		{
			Chart: "cert-manager", Namespace: "cert-manager", From: "v1.18.2", To: "v1.19.1", Destroys: []string{lost}, Objects: []string{"customresourcedefinition/orders.example.com"},
			Values: []plan.ValueChange{{Path: "acme.accountKey", Hidden: true}, {Path: "replicaCount", From: "1", To: "2"}, {Path: "webhook.hostNetwork", To: "true"}},
		},
		{Chart: "cilium", Namespace: "kube-system", From: "1.17.4", To: "1.17.4", ByHand: `revision 3 of 2026-11-20 17:05 UTC ("Upgrade complete")`, Values: []plan.ValueChange{{Path: "hubble.enabled", From: "true", To: "false"}}},
	}
	p.Findings = append([]plan.Finding{
		{
			ID: "destructive-cert-manager", Severity: plan.Warn, Named: true, Title: "chart cert-manager v1.18.2 to v1.19.1 destroys what it cannot bring back", Source: "charts",
			Detail: lost, Objects: []string{"customresourcedefinition/orders.example.com"}, Remedy: "copy what you need before; if it is meant as it is, `--ack destructive-cert-manager`",
		},
		{
			ID: "chart-by-hand", Severity: plan.Warn, Title: "chart cilium was changed by hand, and goes to what release and configuration say", Source: "charts",
			Detail: `revision 3 of 2026-11-20 17:05 UTC ("Upgrade complete"); overwritten: hubble.enabled: true to false`, Remedy: "put what is to stay into the values of the chart",
			Command: "helm history -n kube-system cilium",
		},
	}, p.Findings...)
	p.Steps[3].Details = []string{"chart cert-manager v1.18.2 to v1.19.1, 3 values change, 14 of its defaults change"}
	return p
}

// hopEvents are the events of a run of a plan; middle is an index in its rollout.
func hopEvents(t *testing.T, p *plan.Plan) (events []plan.Event, middle int) {
	t.Helper()
	data, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	at := start
	add := func(after time.Duration, ev plan.Event) {
		at = at.Add(after)
		ev.Seq, ev.Time, ev.Run = uint64(len(events)+1), at, p.ID
		events = append(events, ev)
	}
	add(0, plan.Event{Kind: plan.KindHello, Schema: plan.Schema, Tool: "constellation v1.1.0", Object: p.Cluster})
	add(0, plan.Event{Kind: plan.KindPlan, Data: data})
	for i, s := range p.Steps {
		switch {
		case s.Finished:
			add(time.Second, plan.Event{Kind: plan.KindStep, Step: s.ID, State: plan.StateSkipped, Text: s.Title})
			continue
		default:
			add(time.Second, plan.Event{Kind: plan.KindStep, Step: s.ID, State: plan.StateRunning, Text: s.Title})
		}
		if i == len(p.Steps)-1 {
			add(time.Second, plan.Event{Kind: plan.KindProgress, Step: s.ID, Current: 1, Total: 3, Counts: map[string]int64{plan.NodeReady: 1, plan.NodeOutdated: 1, plan.NodeDraining: 1}})
			for _, n := range [][3]string{{"control-plane-1", "control-plane", plan.NodeReady}, {"worker-0", "workers", plan.NodeDraining}, {"worker-1", "workers", plan.NodeOutdated}, {"worker-2", "workers", plan.NodeReady}} {
				add(0, plan.Event{Kind: plan.KindNode, Step: s.ID, Node: n[0], Group: n[1], To: n[2]})
			}
			add(time.Second, plan.Event{Kind: plan.KindLog, Step: s.ID, Source: "operator", Level: "info", Text: "worker-0 is drained: 3 of 7 pods"})
			add(time.Second, plan.Event{
				Kind: plan.KindWait, Step: s.ID, Object: "rollout", State: "DrainBlocked", Node: "worker-0", Text: "the budget shop/cart allows no eviction of shop/cart-0",
				Remedy: "make room for the pod that is named",
			})
			middle = len(events)
			add(40*time.Second, plan.Event{Kind: plan.KindWait, Step: s.ID})
			add(0, plan.Event{Kind: plan.KindProgress, Step: s.ID, Current: 3, Total: 3, Counts: map[string]int64{plan.NodeReady: 3}})
		}
		add(5*time.Second, plan.Event{Kind: plan.KindStep, Step: s.ID, State: plan.StateDone, Text: s.Title, TookMS: 5000})
	}
	exit := 0
	res, err := json.Marshal(plan.Result{Status: plan.StateDone, Nodes: 3, Next: []string{"export KUBECONFIG=/home/ops/demo/constellation-admin.conf", "constellation status -C /home/ops/demo"}})
	if err != nil {
		t.Fatal(err)
	}
	add(0, plan.Event{Kind: plan.KindResult, State: plan.StateDone, Text: "cluster demo runs release v1.1.0 with image v1.1.0 and Kubernetes v1.36.3", Exit: &exit, Data: res})
	return events, middle
}

// hopEngine is an engine that can run hopPlan.
func hopEngine(t *testing.T) *fakeEngine {
	p := hopPlan()
	events, _ := hopEvents(t, p)
	return &fakeEngine{
		home: demoHome(engine.StageCluster), status: demoStatus(), plan: p, events: events,
		backups: []engine.BackupEntry{{ID: "backup-20261120050501-1a2b3c4d", Created: start.Add(-26 * time.Hour), Objects: 214, Bytes: 1 << 20, Complete: true, Etcd: true}},
		local:   cluster.LocalData{Volumes: []cluster.LocalVolume{{Namespace: "db", Claim: "pg-0", Volume: "pg-0", Nodes: []string{"worker-0"}, Workloads: []string{"statefulset/db/postgres"}}}, EmptyDirs: 3},
	}
}

// upgrades opens the plan, like `upgrade apply`.
func upgrades(s *stage, change ...func(*upgradeStart)) *stage {
	u := applyStart(engine.ApplyRequest{}, false)
	for _, f := range change {
		f(u)
	}
	s.c.deps.upgrade = u
	s.begin()
	s.settle()
	return s
}

// accepts types the names and says yes.
func accepts(s *stage) *stage {
	s.press("enter")
	s.press("local-data", "enter", "oldest-supports-kubernetes", "enter")
	s.at(s.clock.Sub(start) + confirmDelay)
	return s.press("y", "enter")
}

func rehearses(u *upgradeStart) { u.request.Rehearse = true }

// upgradeScenes are typical states of an upgrade.
var upgradeScenes = []scene{
	{"upgrade-plan", func(t *testing.T, s func(*fakeEngine) *stage) *stage { return upgrades(s(hopEngine(t))) }},
	{"upgrade-plan-end", func(t *testing.T, s func(*fakeEngine) *stage) *stage { return upgrades(s(hopEngine(t))).press("G") }},
	{"upgrade-plan-charts", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		e := hopEngine(t)
		e.plan = chartPlan()
		return upgrades(s(e))
	}},
	{"upgrade-names-charts", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		e := hopEngine(t)
		e.plan = chartPlan()
		return upgrades(s(e)).press("enter")
	}},
	{"upgrade-plan-blocked", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		e := hopEngine(t)
		e.plan.Findings = append([]plan.Finding{{
			ID: "pdb-room", Severity: plan.Block, Title: "the budget shop/cart allows no eviction", Source: "disruption", Detail: "1 of 1 pods are wanted",
			Remedy: "let one pod be away: `kubectl -n shop patch pdb cart --type=merge -p '{\"spec\":{\"maxUnavailable\":1}}'`",
		}}, e.plan.Findings...)
		return upgrades(s(e)).press("enter")
	}},
	{"upgrade-rehearsal", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		e := hopEngine(t)
		e.plan.Rehearsal = true
		e.plan.Steps[4].Final = false
		return upgrades(s(e), rehearses).press("enter")
	}},
	{"upgrade-rehearsed", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		e := hopEngine(t)
		e.plan.Rehearsal = true
		e.plan.Steps[4].Final = false
		for i := range e.events {
			if ev := &e.events[i]; ev.Kind == plan.KindStep && ev.State == plan.StateDone {
				ev.Text, ev.TookMS = "would: "+e.plan.Steps[slices.IndexFunc(e.plan.Steps, func(s plan.Step) bool { return s.ID == ev.Step })].Effect, 1
			}
		}
		e.events = slices.DeleteFunc(e.events, func(ev plan.Event) bool {
			return ev.Kind == plan.KindNode || ev.Kind == plan.KindWait || ev.Kind == plan.KindLog || ev.Kind == plan.KindPlan
		})
		e.events[len(e.events)-1].Text = "this was a rehearsal: nothing was changed"
		st := upgrades(s(e), rehearses).press("enter").at(confirmDelay).press("enter")
		st.settle()
		return st
	}},
	{"upgrade-names", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		return upgrades(s(hopEngine(t))).press("enter", "local", "enter")
	}},
	{"upgrade-answer", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		return upgrades(s(hopEngine(t))).press("enter", "local-data", "enter", "oldest-supports-kubernetes", "enter")
	}},
	{"upgrade-run-charts", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		e := hopEngine(t)
		e.pauseAt = slices.IndexFunc(e.events, func(ev plan.Event) bool { return ev.Step == plan.StepCharts }) + 1
		st := accepts(upgrades(s(e)))
		st.settle()
		return st.at(20 * time.Second)
	}},
	{"upgrade-run-leave", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		e := hopEngine(t)
		e.pauseAt = slices.IndexFunc(e.events, func(ev plan.Event) bool { return ev.Step == plan.StepCharts }) + 1
		st := accepts(upgrades(s(e)))
		st.settle()
		return st.at(20 * time.Second).press("q")
	}},
	{"upgrade-rollout", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		e := hopEngine(t)
		_, e.pauseAt = hopEvents(t, e.plan)
		st := accepts(upgrades(s(e)))
		st.settle()
		return st.at(50 * time.Second)
	}},
	{"upgrade-pause", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		e := hopEngine(t)
		_, e.pauseAt = hopEvents(t, e.plan)
		st := accepts(upgrades(s(e)))
		st.settle()
		return st.at(50 * time.Second).press("P")
	}},
	{"upgrade-held", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		e := hopEngine(t)
		by := cluster.Holder{User: "eve", Host: "build-7", Workspace: "/srv/demo", PID: 4711, Run: "upgrade-20261121065501-5e6f7a8b", Since: start.Add(-10 * time.Minute)}
		e.watched, _ = hopEvents(t, hopPlan())
		e.watched = e.watched[:len(e.watched)-4]
		e.runErr = &plan.Error{Op: "take the cluster for this run", Err: &cluster.HeldError{By: by}, Exit: plan.ExitHeld, Remedy: "wait for that run to end"}
		e.events = e.events[:2]
		st := accepts(upgrades(s(e)))
		st.settle()
		return st
	}},
	{"upgrade-done", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		st := accepts(upgrades(s(hopEngine(t))))
		st.settle()
		return st
	}},
	{"upgrade-failed", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		e := hopEngine(t)
		i := slices.IndexFunc(e.events, func(ev plan.Event) bool { return ev.Step == plan.StepCharts })
		e.runErr = &plan.Error{Op: "install chart join-service", Err: errors.New("pod join-service-x2x8p: image cannot be pulled"), Remedy: "run the same command again when the registry answers"}
		exit := plan.ExitFailed
		failed, result := e.events[i], e.events[len(e.events)-1]
		failed.State, failed.Text, failed.Remedy, failed.TookMS = plan.StateFailed, e.runErr.Error(), plan.Remedy(e.runErr), 9000
		result.State, result.Text, result.Remedy, result.Exit, result.Time = plan.StateFailed, e.runErr.Error(), plan.Remedy(e.runErr), &exit, failed.Time
		result.Data = json.RawMessage(`{"status":"failed","resume":"constellation upgrade apply -C /home/ops/demo"}`)
		e.events = append(slices.Clone(e.events[:i+1]), failed, result)
		st := accepts(upgrades(s(e)))
		st.settle()
		return st
	}},
	{"upgrade-nothing", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		e := hopEngine(t)
		e.planErr = &plan.Error{
			Err:  errors.New("cluster demo runs release v1.1.0 with Kubernetes v1.36.3: nothing that can be reached is newer"),
			Exit: plan.ExitNothing, Remedy: "`constellation upgrade check` says what there is",
		}
		return upgrades(s(e))
	}},
}

// An upgrade from the check to the result by keys.
func TestUpgradeFromCheckToResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := hopEngine(t)
		e.check = check.Check{Schema: "1.0", Cluster: "demo", Path: []compat.Hop{{Number: 1}}, Exit: plan.ExitUpgradeAvailable}
		s := newStage(t, e, term.Display{}, 80, 24).begin()
		s.settle()
		s.press("c")
		s.settle()
		s.press("a")
		s.settle()
		if s.c.screen != s.c.upgradePlan || s.c.plan == nil {
			t.Fatalf("a shows %s", s.c.screen.title())
		}
		s.press("enter")
		if s.c.screen != s.c.upgradeConfirm || !s.c.upgradeConfirm.typing() {
			t.Fatalf("the plan is followed by %s", s.c.screen.title())
		}
		s.press("n", "o", "enter")
		if !s.c.upg.wrong || s.c.upg.at != 0 {
			t.Fatal("a wrong name was accepted")
		}
		s.press("ctrl+u", "local-data", "enter", "oldest-supports-kubernetes", "enter", "y", "enter") // typed ahead
		s.settle()
		if e.ran != 0 {
			t.Fatal("keys typed ahead started the upgrade")
		}
		s.at(confirmDelay).press("enter")
		s.settle()
		if want := []string{"local-data", "oldest-supports-kubernetes"}; e.ran != 1 || s.c.screen != s.c.result || s.c.exit != 0 || !slices.Equal(e.plan.Acknowledged, want) {
			t.Fatalf("ran %d times, shows %s, exit %d, accepted %q; want one run, its result and %q", e.ran, s.c.screen.title(), s.c.exit, e.plan.Acknowledged, want)
		}
		if f := strings.Join(s.c.exitSummary(), "\n"); !strings.Contains(f, "cluster demo runs release v1.1.0 with image v1.1.0") || !strings.Contains(f, "back constellation -C .demo\n") {
			t.Errorf("the exit summary does not show the result or how to come back:\n%s", f)
		}
		s.press("enter")
		s.settle()
		if v := s.c.View(); s.c.screen != s.c.overview || strings.Contains(v, "v1.0.0→v1.1.0") {
			t.Errorf("Enter on the result shows %s, still with the upgrade:\n%s", s.c.screen.title(), v)
		}
	})
}

func TestUpgradesThatAreNotAccepted(t *testing.T) {
	for _, tt := range []struct {
		name string
		keys []string
		exit int
	}{
		{"left at the plan", []string{"q"}, plan.ExitUnacknowledged},
		{"Ctrl-C at the name", []string{"enter", "ctrl+c"}, plan.ExitUnacknowledged},
		{"No", []string{"enter", "local-data", "enter", "oldest-supports-kubernetes", "enter", "wait", "enter"}, plan.ExitUnacknowledged},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := upgrades(newStage(t, hopEngine(t), term.Display{}, 80, 24))
				for _, k := range tt.keys {
					if k == "wait" {
						s.at(confirmDelay)
						continue
					}
					s.press(k)
				}
				if !s.quit || s.c.exit != tt.exit || s.eng.ran != 0 {
					t.Errorf("left: %t, exit %d, ran %d times; want exit %d and no run", s.quit, s.c.exit, s.eng.ran, tt.exit)
				}
				if f := strings.Join(s.c.exitSummary(), "\n"); !strings.Contains(f, "nothing has been changed; come back: constellation -C .demo upgrade apply") {
					t.Errorf("the exit summary is %q", f)
				}
			})
		})
	}
}

// A plan that needs no acceptance runs without a question, so that the same command reattaches.
func TestUpgradesWithoutConfirmation(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*plan.Plan)
		yes    bool
	}{
		{"only the wait is left", func(p *plan.Plan) {
			p.Findings = nil
			for i := range p.Steps[:len(p.Steps)-1] {
				p.Steps[i].Finished = true
			}
		}, false},
		{"accepted on the command line", func(p *plan.Plan) {
			p.Acknowledged = []string{"local-data", "oldest-supports-kubernetes"}
		}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := hopEngine(t)
				tt.change(e.plan)
				s := upgrades(newStage(t, e, term.Display{}, 80, 24), func(u *upgradeStart) { u.yes = tt.yes })
				s.settle()
				if e.ran != 1 || s.c.screen != s.c.result {
					t.Errorf("ran %d times, shows %s", e.ran, s.c.screen.title())
				}
			})
		})
	}
}

// rolling returns a console with a rollout in progress.
func rolling(t *testing.T, w, h int) *stage {
	e := hopEngine(t)
	_, e.pauseAt = hopEvents(t, e.plan)
	s := accepts(upgrades(newStage(t, e, term.Display{}, w, h)))
	s.settle()
	if !s.c.running || !s.c.t.PastFinal() {
		t.Fatalf("shows %s, running %t", s.c.screen.title(), s.c.running)
	}
	return s
}

func TestRolloutIsChangedFromTheConsole(t *testing.T) {
	yes, no := true, false
	for key, want := range map[string]cluster.RolloutChange{"P": {Paused: &yes}, "R": {Paused: &no, Cancelled: &no}, "C": {Cancelled: &yes}} {
		synctest.Test(t, func(t *testing.T) {
			s := rolling(t, 80, 24).press(key)
			if s.c.rolloutPrompt == nil || !strings.Contains(s.c.View(), s.c.rolloutPrompt.text) {
				t.Fatalf("%s does not ask", key)
			}
			s.press("esc")
			if s.eng.changed != (cluster.RolloutChange{}) {
				t.Fatalf("%s changed the rollout after Esc", key)
			}
			s.press(key, "enter")
			s.settle()
			same := func(a, b *bool) bool { return (a == nil) == (b == nil) && (a == nil || *a == *b) }
			if got := s.eng.changed; !same(got.Paused, want.Paused) || !same(got.Cancelled, want.Cancelled) {
				t.Errorf("%s changed %+v", key, got)
			}
			if !s.c.running || !strings.Contains(s.c.note, "the rollout is ") {
				t.Errorf("running: %t, note %q", s.c.running, s.c.note)
			}
		})
	}
}

// A rollout cannot be paused before the target is set.
func TestRolloutKeysAreOffBeforeTheTargetIsSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := hopEngine(t)
		e.pauseAt = slices.IndexFunc(e.events, func(ev plan.Event) bool { return ev.Step == plan.StepCharts }) + 1
		s := accepts(upgrades(newStage(t, e, term.Display{}, 80, 24)))
		s.settle()
		s.press("P")
		if s.c.rolloutPrompt != nil || !strings.Contains(s.c.note, "no node is being replaced yet") {
			t.Errorf("asks: %v, note %q", s.c.rolloutPrompt, s.c.note)
		}
	})
}

// Leaving never stops a rollout and never undoes a step.
func TestLeavingAnUpgrade(t *testing.T) {
	for _, tt := range []struct {
		name  string
		until string // the step at which the user leaves
		leave func(*stage)
		exit  int
		says  string
	}{
		{"a step before the target, q", plan.StepCharts, func(s *stage) { s.press("q", "enter") }, plan.ExitStopped, "left after"},
		{"a step before the target, Ctrl-C twice", plan.StepCharts, func(s *stage) { s.press("ctrl+c", "ctrl+c") }, plan.ExitStopped, "left after"},
		{"the rollout, Ctrl-C twice", plan.StepRollout, func(s *stage) { s.press("ctrl+c", "ctrl+c") }, plan.ExitDone, "2 of 4 at the target"},
		{"hung up", plan.StepCharts, func(s *stage) { s.tell(term.Signalled{Sig: syscall.SIGHUP}) }, 129, "left after"},
		{"terminated", plan.StepRollout, func(s *stage) { s.tell(term.Signalled{Sig: syscall.SIGTERM}) }, 143, "2 of 4 at the target"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := hopEngine(t)
				e.pauseAt = slices.IndexFunc(e.events, func(ev plan.Event) bool { return ev.Step == tt.until }) + 1
				if tt.until == plan.StepRollout {
					_, e.pauseAt = hopEvents(t, e.plan)
				}
				s := accepts(upgrades(newStage(t, e, term.Display{}, 80, 24)))
				s.settle()
				tt.leave(s)
				s.settle()
				if !s.quit || s.c.exit != tt.exit {
					t.Errorf("left: %t, exit %d; want %d", s.quit, s.c.exit, tt.exit)
				}
				f := strings.Join(s.c.exitSummary(), "\n")
				for _, want := range []string{"constellation -C .demo upgrade apply", " ◉ demo", tt.says} { // the head is of the last frame
					if !strings.Contains(f, want) {
						t.Errorf("the exit summary lacks %q:\n%s", want, f)
					}
				}
			})
		})
	}
}

// A second console is read-only: it names the holder of the lock, and exits with the code of a
// run that could not start.
func TestSecondConsoleIsReadOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s *stage
		for _, sc := range upgradeScenes {
			if sc.name == "upgrade-held" {
				s = sc.show(t, func(e *fakeEngine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
			}
		}
		v := s.c.View()
		if s.c.screen != s.c.watch || !strings.Contains(v, "READ-ONLY") || !strings.Contains(v, "it is held by eve@build-7 (process 4711") || !strings.Contains(v, "since 2026-11-21T06:55:01Z") {
			t.Fatalf("it shows\n%s", v)
		}
		s.press("P")
		if s.c.rolloutPrompt != nil || !strings.Contains(s.c.note, "another run holds the lock of the cluster") {
			t.Errorf("P asks %v, note %q", s.c.rolloutPrompt, s.c.note)
		}
		s.press("esc")
		if s.c.screen != s.c.result {
			t.Errorf("Esc shows %s", s.c.screen.title())
		}
		s.press("w")
		if s.c.screen != s.c.watch {
			t.Errorf("w shows %s", s.c.screen.title())
		}
		s.press("q")
		if !s.quit || s.c.exit != plan.ExitHeld {
			t.Errorf("left: %t, exit %d", s.quit, s.c.exit)
		}
		s.settle()
	})
}

// The rollout opens the watch screen once; after Esc the run screen stays.
func TestRolloutOpensTheWatchScreenOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := rolling(t, 80, 24)
		if s.c.screen != s.c.watch {
			t.Fatalf("shows %s", s.c.screen.title())
		}
		s.press("esc")
		s.tell(batch{s.c.task, []plan.Event{{Time: s.clock, Kind: plan.KindLog, Source: "operator", Text: "more"}}})
		if s.c.screen != s.c.run {
			t.Errorf("Esc shows %s", s.c.screen.title())
		}
		s.press("w")
		if s.c.screen != s.c.watch {
			t.Errorf("w shows %s", s.c.screen.title())
		}
	})
}

// hopStream writes the events of an upgrade to a file for the fake engine.
func hopStream(t *testing.T) string {
	t.Helper()
	events, _ := hopEvents(t, hopPlan())
	var b bytes.Buffer
	for _, ev := range events {
		if err := json.NewEncoder(&b).Encode(ev); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(t.TempDir(), "upgrade.jsonl")
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return "FAKE_RUN=" + path
}

// In accessible mode questions are plain lines, and no output is overwritten.
func TestAccessibleUpgradeAsksInPlainText(t *testing.T) {
	for _, tt := range []struct {
		name string
		env  []string
		args []string
	}{
		{"by the environment", []string{"ACCESSIBLE=1"}, []string{"upgrade", "apply"}},
		{"by a flag", nil, []string{"upgrade", "apply", "--accessible"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := startOn(t, 80, 24, append(tt.env, hopStream(t), "FAKE_STAGE=cluster"), nil, tt.args...)
			p.sees("Type local-data to accept it: ")
			p.types("local-data\n")
			p.sees("Type oldest-supports-kubernetes to accept it: ")
			p.types("oldest-supports-kubernetes\n")
			p.sees("Upgrade cluster demo? [y/N]")
			if strings.Contains(p.output(), "join-config        start") {
				t.Errorf("it began before the answer:\n%s", p.output())
			}
			p.types("y\n")
			p.sees("cluster demo runs release v1.1.0")
			if code := p.ends(); code != 0 {
				t.Errorf("exit %d", code)
			}
			out := strings.ReplaceAll(p.output(), "\r\n", "\n")
			if i := strings.IndexAny(out, "\x1b\r\b"); i >= 0 {
				t.Errorf("%q moves the cursor", out[max(0, i-20):min(len(out), i+20)])
			}
		})
	}
}

// The accessible home screen runs the selected action, then asks again.
func TestAccessibleHomeAsksWhatNext(t *testing.T) {
	p := startOn(t, 80, 24, []string{"ACCESSIBLE=1", hopStream(t), "FAKE_STAGE=cluster"}, nil)
	p.sees("cluster   demo, initialised")
	p.sees("7  List past runs: constellation history")
	p.sees("Type a number from 1 to 7, or q to quit: ")
	p.types("8\n")
	p.types("1\n")
	p.sees("control plane  1/1 ready")
	p.types("q\n")
	if code := p.ends(); code != 0 {
		t.Errorf("exit %d", code)
	}
	out := strings.ReplaceAll(p.output(), "\r\n", "\n")
	if strings.Count(out, "Type a number") != 3 {
		t.Errorf("it did not ask three times:\n%s", out)
	}
	if strings.ContainsAny(out, "\x1b\r\b") {
		t.Errorf("something moves the cursor: %q", out)
	}
}

func TestAccessibleInitAsksInPlainText(t *testing.T) {
	p := startOn(t, 80, 24, []string{stream(t, "init"), "FAKE_STAGE=ready"}, nil, "init", "--accessible")
	p.sees("Create cluster ")
	p.sees("? [y/N]")
	p.types("y\n")
	if code := p.ends(); code != 0 {
		t.Errorf("exit %d\n%s", code, p.output())
	}
	if out := strings.ReplaceAll(p.output(), "\r\n", "\n"); strings.ContainsAny(out, "\x1b\r\b") {
		t.Errorf("something moves the cursor: %q", out)
	}
}

// Signals end the console of an upgrade, restore the terminal and print how to come back.
func TestSignalsEndTheConsoleOfAnUpgrade(t *testing.T) {
	for sig, want := range map[syscall.Signal]int{syscall.SIGTERM: plan.ExitTerminated, syscall.SIGHUP: plan.ExitHungUp, syscall.SIGINT: plan.ExitInterrupted} {
		t.Run(sig.String(), func(t *testing.T) {
			skipIfIgnored(t, sig)
			p := startOn(t, 80, 24, []string{hopStream(t), "FAKE_STAGE=cluster", "FAKE_PACE=1"}, nil,
				"upgrade", "apply", "--yes", "--ack", "local-data", "--ack", "oldest-supports-kubernetes")
			p.sees("Let in machines of the new image")
			if err := p.cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			if code := p.ends(); code != want {
				t.Errorf("ended with %d, want %d", code, want)
			}
			p.restored()
			p.sees("upgrade apply --ack local-data --ack oldest-supports-kubernetes")
		})
	}
}
