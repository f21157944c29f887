package console

import (
	"encoding/json"
	"errors"
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
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
)

// chartPlan is hopPlan with a third-party chart whose upgrade is destructive, and a chart that
// was changed by hand.
func chartPlan() *plan.Plan {
	const lost = "CustomResourceDefinition orders.example.com is deleted, and 12 objects of it with it"
	p := enginefake.HopPlan()
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

// hopEngine is an engine that can run hopPlan.
func hopEngine(t *testing.T) *enginefake.Engine {
	p := enginefake.HopPlan()
	events, _ := enginefake.HopEvents(t, p)
	return &enginefake.Engine{
		HomeData: enginefake.DemoHome(engine.StageCluster), StatusData: enginefake.DemoStatus(), Plan: p, Events: events,
		Backups: []engine.BackupEntry{{ID: "backup-20261120050501-1a2b3c4d", Created: enginefake.Start.Add(-26 * time.Hour), Objects: 214, Bytes: 1 << 20, Complete: true, Etcd: true}},
		Local:   cluster.LocalData{Volumes: []cluster.LocalVolume{{Namespace: "db", Claim: "pg-0", Volume: "pg-0", Nodes: []string{"worker-0"}, Workloads: []string{"statefulset/db/postgres"}}}, EmptyDirs: 3},
	}
}

// upgrades opens the plan, like `upgrade apply`.
func upgrades(s *stage, change ...func(*Upgrade)) *stage {
	u := Apply(engine.ApplyRequest{}, false)
	for _, f := range change {
		f(u)
	}
	s.c.deps.Upgrade = u
	s.begin()
	s.settle()
	return s
}

// accepts types the names and says yes.
func accepts(s *stage) *stage {
	s.press("enter")
	s.press("local-data", "enter", "oldest-supports-kubernetes", "enter")
	s.at(s.clock.Sub(enginefake.Start) + confirmDelay)
	return s.press("y", "enter")
}

func rehearses(u *Upgrade) { u.Request.Rehearse = true }

// upgradeScenes are typical states of an upgrade.
var upgradeScenes = []scene{
	{"upgrade-plan", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage { return upgrades(s(hopEngine(t))) }},
	{"upgrade-plan-end", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return upgrades(s(hopEngine(t))).press("G")
	}},
	{"upgrade-plan-charts", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := hopEngine(t)
		e.Plan = chartPlan()
		return upgrades(s(e))
	}},
	{"upgrade-names-charts", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := hopEngine(t)
		e.Plan = chartPlan()
		return upgrades(s(e)).press("enter")
	}},
	{"upgrade-plan-blocked", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := hopEngine(t)
		e.Plan.Findings = append([]plan.Finding{{
			ID: "pdb-room", Severity: plan.Block, Title: "the budget shop/cart allows no eviction", Source: "disruption", Detail: "1 of 1 pods are wanted",
			Remedy: "let one pod be away: `kubectl -n shop patch pdb cart --type=merge -p '{\"spec\":{\"maxUnavailable\":1}}'`",
		}}, e.Plan.Findings...)
		return upgrades(s(e)).press("enter")
	}},
	{"upgrade-rehearsal", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := hopEngine(t)
		e.Plan.Rehearsal = true
		e.Plan.Steps[4].Final = false
		return upgrades(s(e), rehearses).press("enter")
	}},
	{"upgrade-rehearsed", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := hopEngine(t)
		e.Plan.Rehearsal = true
		e.Plan.Steps[4].Final = false
		for i := range e.Events {
			if ev := &e.Events[i]; ev.Kind == plan.KindStep && ev.State == plan.StateDone {
				ev.Text, ev.TookMS = "would: "+e.Plan.Steps[slices.IndexFunc(e.Plan.Steps, func(s plan.Step) bool { return s.ID == ev.Step })].Effect, 1
			}
		}
		e.Events = slices.DeleteFunc(e.Events, func(ev plan.Event) bool {
			return ev.Kind == plan.KindNode || ev.Kind == plan.KindWait || ev.Kind == plan.KindLog || ev.Kind == plan.KindPlan
		})
		e.Events[len(e.Events)-1].Text = "this was a rehearsal: nothing was changed"
		st := upgrades(s(e), rehearses).press("enter").at(confirmDelay).press("enter")
		st.settle()
		return st
	}},
	{"upgrade-names", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return upgrades(s(hopEngine(t))).press("enter", "local", "enter")
	}},
	{"upgrade-answer", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return upgrades(s(hopEngine(t))).press("enter", "local-data", "enter", "oldest-supports-kubernetes", "enter")
	}},
	{"upgrade-run-charts", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := hopEngine(t)
		e.PauseAt = slices.IndexFunc(e.Events, func(ev plan.Event) bool { return ev.Step == plan.StepCharts }) + 1
		st := accepts(upgrades(s(e)))
		st.settle()
		return st.at(20 * time.Second)
	}},
	{"upgrade-run-leave", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := hopEngine(t)
		e.PauseAt = slices.IndexFunc(e.Events, func(ev plan.Event) bool { return ev.Step == plan.StepCharts }) + 1
		st := accepts(upgrades(s(e)))
		st.settle()
		return st.at(20 * time.Second).press("q")
	}},
	{"upgrade-rollout", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := hopEngine(t)
		_, e.PauseAt = enginefake.HopEvents(t, e.Plan)
		st := accepts(upgrades(s(e)))
		st.settle()
		return st.at(50 * time.Second)
	}},
	{"upgrade-pause", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := hopEngine(t)
		_, e.PauseAt = enginefake.HopEvents(t, e.Plan)
		st := accepts(upgrades(s(e)))
		st.settle()
		return st.at(50 * time.Second).press("P")
	}},
	{"upgrade-held", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := hopEngine(t)
		by := cluster.Holder{User: "eve", Host: "build-7", Workspace: "/srv/demo", PID: 4711, Run: "upgrade-20261121065501-5e6f7a8b", Since: enginefake.Start.Add(-10 * time.Minute)}
		e.Watched, _ = enginefake.HopEvents(t, enginefake.HopPlan())
		e.Watched = e.Watched[:len(e.Watched)-4]
		e.RunErr = &plan.Error{Op: "take the cluster for this run", Err: &cluster.HeldError{By: by}, Exit: plan.ExitHeld, Remedy: "wait for that run to end"}
		e.Events = e.Events[:2]
		st := accepts(upgrades(s(e)))
		st.settle()
		return st
	}},
	{"upgrade-done", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := accepts(upgrades(s(hopEngine(t))))
		st.settle()
		return st
	}},
	{"upgrade-failed", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := hopEngine(t)
		i := slices.IndexFunc(e.Events, func(ev plan.Event) bool { return ev.Step == plan.StepCharts })
		e.RunErr = &plan.Error{Op: "install chart join-service", Err: errors.New("pod join-service-x2x8p: image cannot be pulled"), Remedy: "run the same command again when the registry answers"}
		exit := plan.ExitFailed
		failed, result := e.Events[i], e.Events[len(e.Events)-1]
		failed.State, failed.Text, failed.Remedy, failed.TookMS = plan.StateFailed, e.RunErr.Error(), plan.Remedy(e.RunErr), 9000
		result.State, result.Text, result.Remedy, result.Exit, result.Time = plan.StateFailed, e.RunErr.Error(), plan.Remedy(e.RunErr), &exit, failed.Time
		result.Data = json.RawMessage(`{"status":"failed","resume":"constellation upgrade apply -C /home/ops/demo"}`)
		e.Events = append(slices.Clone(e.Events[:i+1]), failed, result)
		st := accepts(upgrades(s(e)))
		st.settle()
		return st
	}},
	{"upgrade-nothing", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := hopEngine(t)
		e.PlanErr = &plan.Error{
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
		e.CheckData = check.Check{Schema: "1.0", Cluster: "demo", Path: []compat.Hop{{Number: 1}}, Exit: plan.ExitUpgradeAvailable}
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
		if !s.c.upgradeConfirm.wrong || s.c.upgradeConfirm.at != 0 {
			t.Fatal("a wrong name was accepted")
		}
		s.press("ctrl+u", "local-data", "enter", "oldest-supports-kubernetes", "enter", "y", "enter") // typed ahead
		s.settle()
		if e.Ran != 0 {
			t.Fatal("keys typed ahead started the upgrade")
		}
		s.at(confirmDelay).press("enter")
		s.settle()
		if want := []string{"local-data", "oldest-supports-kubernetes"}; e.Ran != 1 || s.c.screen != s.c.result || s.c.quit.exit != 0 || !slices.Equal(e.Plan.Acknowledged, want) {
			t.Fatalf("ran %d times, shows %s, exit %d, accepted %q; want one run, its result and %q", e.Ran, s.c.screen.title(), s.c.quit.exit, e.Plan.Acknowledged, want)
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
		{name: "left at the plan", keys: []string{"q"}, exit: plan.ExitUnacknowledged},
		{name: "Ctrl-C at the name", keys: []string{"enter", "ctrl+c"}, exit: plan.ExitUnacknowledged},
		{name: "No", keys: []string{"enter", "local-data", "enter", "oldest-supports-kubernetes", "enter", "wait", "enter"}, exit: plan.ExitUnacknowledged},
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
				if !s.quit || s.c.quit.exit != tt.exit || s.eng.Ran != 0 {
					t.Errorf("left: %t, exit %d, ran %d times; want exit %d and no run", s.quit, s.c.quit.exit, s.eng.Ran, tt.exit)
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
		{name: "only the wait is left", change: func(p *plan.Plan) {
			p.Findings = nil
			for i := range p.Steps[:len(p.Steps)-1] {
				p.Steps[i].Finished = true
			}
		}, yes: false},
		{name: "accepted on the command line", change: func(p *plan.Plan) {
			p.Acknowledged = []string{"local-data", "oldest-supports-kubernetes"}
		}, yes: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := hopEngine(t)
				tt.change(e.Plan)
				s := upgrades(newStage(t, e, term.Display{}, 80, 24), func(u *Upgrade) { u.yes = tt.yes })
				s.settle()
				if e.Ran != 1 || s.c.screen != s.c.result {
					t.Errorf("ran %d times, shows %s", e.Ran, s.c.screen.title())
				}
			})
		})
	}
}

// rolling returns a console with a rollout in progress.
func rolling(t *testing.T, w, h int) *stage {
	e := hopEngine(t)
	_, e.PauseAt = enginefake.HopEvents(t, e.Plan)
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
			if s.c.rollout.prompt == nil || !strings.Contains(s.c.View(), s.c.rollout.prompt.text) {
				t.Fatalf("%s does not ask", key)
			}
			s.press("esc")
			if s.eng.Changed != (cluster.RolloutChange{}) {
				t.Fatalf("%s changed the rollout after Esc", key)
			}
			s.press(key, "enter")
			s.settle()
			same := func(a, b *bool) bool { return (a == nil) == (b == nil) && (a == nil || *a == *b) }
			if got := s.eng.Changed; !same(got.Paused, want.Paused) || !same(got.Cancelled, want.Cancelled) {
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
		e.PauseAt = slices.IndexFunc(e.Events, func(ev plan.Event) bool { return ev.Step == plan.StepCharts }) + 1
		s := accepts(upgrades(newStage(t, e, term.Display{}, 80, 24)))
		s.settle()
		s.press("P")
		if s.c.rollout.prompt != nil || !strings.Contains(s.c.note, "no node is being changed yet") {
			t.Errorf("asks: %v, note %q", s.c.rollout.prompt, s.c.note)
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
		{name: "a step before the target, q", until: plan.StepCharts, leave: func(s *stage) { s.press("q", "enter") }, exit: plan.ExitStopped, says: "left after"},
		{name: "a step before the target, Ctrl-C twice", until: plan.StepCharts, leave: func(s *stage) { s.press("ctrl+c", "ctrl+c") }, exit: plan.ExitStopped, says: "left after"},
		{name: "the rollout, Ctrl-C twice", until: plan.StepRollout, leave: func(s *stage) { s.press("ctrl+c", "ctrl+c") }, exit: plan.ExitDone, says: "2 of 4 at the target"},
		{name: "hung up", until: plan.StepCharts, leave: func(s *stage) { s.tell(term.Signalled{Sig: syscall.SIGHUP}) }, exit: 129, says: "left after"},
		{name: "terminated", until: plan.StepRollout, leave: func(s *stage) { s.tell(term.Signalled{Sig: syscall.SIGTERM}) }, exit: 143, says: "2 of 4 at the target"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := hopEngine(t)
				e.PauseAt = slices.IndexFunc(e.Events, func(ev plan.Event) bool { return ev.Step == tt.until }) + 1
				if tt.until == plan.StepRollout {
					_, e.PauseAt = enginefake.HopEvents(t, e.Plan)
				}
				s := accepts(upgrades(newStage(t, e, term.Display{}, 80, 24)))
				s.settle()
				tt.leave(s)
				s.settle()
				if !s.quit || s.c.quit.exit != tt.exit {
					t.Errorf("left: %t, exit %d; want %d", s.quit, s.c.quit.exit, tt.exit)
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
				s = sc.show(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
			}
		}
		v := s.c.View()
		if s.c.screen != s.c.watch || !strings.Contains(v, "READ-ONLY") || !strings.Contains(v, "it is held by eve@build-7 (process 4711") || !strings.Contains(v, "since 2026-11-21T06:55:01Z") {
			t.Fatalf("it shows\n%s", v)
		}
		s.press("P")
		if s.c.rollout.prompt != nil || !strings.Contains(s.c.note, "another run holds the lock of the cluster") {
			t.Errorf("P asks %v, note %q", s.c.rollout.prompt, s.c.note)
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
		if !s.quit || s.c.quit.exit != plan.ExitHeld {
			t.Errorf("left: %t, exit %d", s.quit, s.c.quit.exit)
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
		s.tell(batch{s.c.task.id, []plan.Event{{Time: s.clock, Kind: plan.KindLog, Source: "operator", Text: "more"}}})
		if s.c.screen != s.c.run {
			t.Errorf("Esc shows %s", s.c.screen.title())
		}
		s.press("w")
		if s.c.screen != s.c.watch {
			t.Errorf("w shows %s", s.c.screen.title())
		}
	})
}
