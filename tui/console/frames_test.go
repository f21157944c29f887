package console

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/charmbracelet/x/ansi"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/internal/testneeds"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
)

// scene is a state of the console.
type scene struct {
	name string
	show func(t *testing.T, s func(*enginefake.Engine) *stage) *stage
}

// scenes are typical states of the console.
var scenes = []scene{
	{"home-cluster", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		h := enginefake.DemoHome(engine.StageCluster)
		h.Runs = []plan.RunSummary{{ID: "init-1", Verb: plan.VerbInit, Started: enginefake.Start.Add(-26 * time.Hour), Ended: enginefake.Start.Add(-26*time.Hour + 34*time.Second), Status: plan.StateDone}}
		return s(&enginefake.Engine{HomeData: h, StatusData: enginefake.DemoStatus()}).begin()
	}},
	{"home-guarded", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageCluster), StatusData: enginefake.DemoStatus()})
		guarded(&st.c.deps)
		return st.begin()
	}},
	{"home-unlocking", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageCluster), StatusData: enginefake.DemoStatus()})
		guarded(&st.c.deps)
		return st.begin().press("U", "d", "e")
	}},
	{"home-trouble", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := enginefake.DemoStatus()
		st.Nodes[1].State, st.Nodes[1].Message = plan.NodeNotReady, "container runtime is down"
		st.Machines = []engine.Machine{{Name: "worker-2", Group: "workers", Role: "worker", State: plan.NodeBooting, Image: "sandboxes/demo/images/v1.1.0", ImageVersion: "v1.1.0", IP: "10.42.0.6"}}
		st.Health = []plan.Finding{{ID: "nodes", Severity: plan.Warn, Title: "1 of 3 nodes is not ready", Detail: "worker-0 since 4m", Remedy: "constellation -C .demo sandbox shell worker-0"}}
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageCluster), StatusData: st}).begin()
	}},
	{"home-reasons", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageCluster), StatusData: enginefake.WordyStatus()}).begin()
	}},
	{"home-stale", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageCluster), StatusData: enginefake.DemoStatus()}).begin()
		st.eng.StatusErr = errors.New("the API server at 127.0.0.1:41943 does not answer")
		st.at(47 * time.Second)
		st.tell(statusRead{st.c.overview.statusGen, engine.Status{}, st.eng.StatusErr})
		return st
	}},
	{"home-update", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		h := enginefake.DemoHome(engine.StageCluster)
		h.Next = []engine.Suggestion{{Title: "Use the cluster", Command: "export KUBECONFIG=$PWD/constellation-admin.conf"}}
		st := s(&enginefake.Engine{HomeData: h, StatusData: enginefake.DemoStatus()})
		st.c.deps.Newer = func(context.Context) string { return "v1.2.0" }
		return st.begin()
	}},
	{"home-no-machines", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		h := enginefake.DemoHome(engine.StageConfigured)
		h.Next = []engine.Suggestion{{Title: "Start machines", Command: "constellation -C .demo sandbox up"}}
		st := s(&enginefake.Engine{HomeData: h}).begin()
		return st.press("esc")
	}},
	{"home-empty", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: engine.Home{Dir: "/home/ops/demo", Stage: engine.StageEmpty, Next: []engine.Suggestion{
			{Title: "Start a sandbox", Command: "constellation sandbox up", Why: "a cloud on this computer, with machines that boot for real"},
			{Title: "Write a configuration", Command: "constellation config generate sandbox", Why: "with comments, to be filled in"},
		}}}).begin()
	}},
	{"config-new", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: engine.Home{Dir: "/home/ops/demo", Stage: engine.StageEmpty}}).begin().press("i", "e", "x")
	}},
	{"config-broken", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		h := enginefake.DemoHome(engine.StageConfigured)
		h.Config = nil
		h.Problems = []plan.Finding{
			{ID: "config-1", Severity: plan.Block, Title: "line 4: kubernetesVersion", Detail: `"1.35" is not a version`, Remedy: "write v1.35.4"},
			{ID: "config-2", Severity: plan.Block, Title: "line 9: nodeGroups.workers.cuont", Detail: "unknown key", Remedy: "did you mean count?"},
		}
		return s(&enginefake.Engine{HomeData: h}).begin()
	}},
	{"config-edit", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).begin().press("down", "right")
	}},
	{"preflight-blocked", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady), Findings: quorumFindings(t)}
		e.Findings[3] = plan.Finding{
			ID: "machines", Severity: plan.Block, Title: "2 of 3 machines run", Source: "cloud",
			Detail: "worker-1 is stopped", Remedy: "constellation -C .demo sandbox up", Took: 41 * time.Millisecond,
		}
		st := s(e).begin()
		st.do(st.c.preflight.start())
		st.settle()
		return st.press("enter")
	}},
	{"preflight-ready", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady), Findings: quorumFindings(t)}).begin()
		st.do(st.c.preflight.start())
		st.settle()
		return st
	}},
	{"confirm", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady), Plan: enginefake.PlanIn(t, enginefake.Recorded(t, "init"))}
		e.Plan.Findings = quorumFindings(t)
		st := s(e).begin()
		st.do(st.c.wizard.makePlan())
		st.settle()
		return st
	}},
	{"confirm-blocked", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StagePartial), Plan: enginefake.PlanIn(t, enginefake.Recorded(t, "init"))}
		e.Plan.Findings = []plan.Finding{{
			ID: "endpoints", Severity: plan.Block, Title: "initEndpoint in constellation-state.yaml leads elsewhere", Detail: "it says 127.0.0.1:4711, and the cloud has 127.0.0.1:20182",
			Remedy: "write initEndpoint: 127.0.0.1:20182 in constellation-state.yaml, or run `constellation sandbox up`, which writes the right addresses",
		}}
		st := s(e).begin()
		st.settle()
		return st
	}},
	{"run-kubeadm", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(enginefake.Recorded(t, "init"), 5*time.Second)
	}},
	{"run-joining", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(enginefake.Recorded(t, "init"), 28500*time.Millisecond)
	}},
	{"run-leaving", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(enginefake.Recorded(t, "init"), 5*time.Second).press("ctrl+c")
	}},
	{"run-resumed", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StagePartial)})
		st.c.wizard.resumed = true
		return st.replay(enginefake.Recorded(t, "taken-up"), 3*time.Second)
	}},
	{"run-components", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(enginefake.Recorded(t, "init"), 310*time.Millisecond)
	}},
	{"run-charts", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(enginefake.Recorded(t, "init"), 20*time.Second)
	}},
	{"run-reason", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		events, i := untilCharts(t)
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(events, events[i].Time.Add(12*time.Second).Sub(enginefake.Start))
	}},
	{"run-away", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		events, i := untilCharts(t)
		at := events[i].Time
		away := plan.Event{
			Time: at.Add(time.Second), Kind: plan.KindWait, Step: "charts", Object: "api-server",
			Text:   "the cloud has stopped, so the cluster is unreachable: the API server at 127.0.0.1:20919 has not answered since 07:05:16Z; the run continues when it does",
			Remedy: "run `constellation sandbox up -C /home/ops/demo` in another terminal: it restarts the cloud and keeps its machines",
		}
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(append(events, away), at.Add(12*time.Second).Sub(enginefake.Start))
	}},
	{"run-many", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(enginefake.Recorded(t, "many"), 56*time.Second)
	}},
	{"result-done", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(enginefake.Recorded(t, "init"), time.Minute)
	}},
	{"result-far", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		const far = "/srv/clusters/europe-west3/production/customers/acme-corporation/constellation"
		events := slices.Clone(enginefake.Recorded(t, "init"))
		last := &events[len(events)-1]
		last.Data = json.RawMessage(strings.ReplaceAll(string(last.Data), "/home/ops/demo", far))
		h := enginefake.DemoHome(engine.StageReady)
		h.Dir = "/home/ops/demo"
		return s(&enginefake.Engine{HomeData: h}).replay(events, time.Minute)
	}},
	{"result-failed", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(enginefake.Recorded(t, "failed"), 5*time.Minute)
	}},
	{"result-hung", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(enginefake.Recorded(t, "hung"), 5*time.Minute)
	}},
	{"result-long-cause", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(longFailure(t), 5*time.Minute)
	}},
	{"result-long-cause-log", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(longFailure(t), 5*time.Minute).press("l", "w")
	}},
	{"result-dead-end", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(deadEnd(t), 5*time.Minute).press("r")
	}},
	{"log", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(enginefake.Recorded(t, "hung"), 241200*time.Millisecond).press("l", "/", "e", "r", "r", "o", "enter")
	}},
	{"help", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).replay(enginefake.Recorded(t, "init"), 12*time.Second).press("?")
	}},
	{"adopt-report", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage { return adoptScene(s).press("a") }},
	{"adopt-written", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return adoptScene(s).press("a", "right").later().press("enter")
	}},
	{"adopt-operator", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return adoptScene(s).press("a", "right").later().press("enter", "right").later().press("enter", "right")
	}},
}

// longFailure is a run with a failure cause of many lines that can be retried.
func longFailure(t *testing.T) []plan.Event {
	events := slices.Clone(enginefake.Recorded(t, "hung"))
	last := &events[len(events)-1]
	var why []string
	for _, name := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd", "pause", "coredns", "kube-proxy"} {
		why = append(why, "failed to pull image registry.k8s.io/"+name+":v1.35.4: failed to resolve reference: connection refused")
	}
	last.Text = "kubeadm init on control-plane-0: pull images: " + strings.Join(why, "\n")
	return events
}

// deadEnd is a run with a failure cause that a retry cannot fix.
func deadEnd(t *testing.T) []plan.Event {
	events := slices.Clone(enginefake.Recorded(t, "hung"))
	last := &events[len(events)-1]
	last.Text, last.Remedy = "store the result of control-plane-0: it is of another cluster", "take the machines down and up again"
	last.Data = json.RawMessage(`{"status": "failed", "took_ms": 241400}`)
	return events
}

// quorumFindings are findings with a warning.
func quorumFindings(t *testing.T) []plan.Finding {
	return enginefake.PlanIn(t, enginefake.Recorded(t, "hung")).Findings
}

// untilCharts are the events of a run until a pod of a chart cannot start. The last event has
// the cause.
func untilCharts(t *testing.T) (events []plan.Event, last int) {
	events = enginefake.Recorded(t, "init")
	i := slices.IndexFunc(events, func(e plan.Event) bool { return e.Object == "constellation-operator" })
	operator := events[i]
	operator.Text, operator.Current, operator.Total = "pod constellation-operator-7d4b9c6f5-x2x8p: image registry.k8s.io/constellation/operator:v1.1.0 cannot be pulled: connection refused", 0, 1
	return append(slices.Clone(events[:i+1]), operator), i + 1
}

func TestFrames(t *testing.T) {
	for _, sc := range slices.Concat(scenes, checkScenes, backupScenes, upgradeScenes, watchScenes, recordedScenes, imagelessScenes, machineScenes) {
		for _, v := range []struct {
			name    string
			display term.Display
			w, h    int
		}{
			{name: "80x24", display: term.Display{}, w: 80, h: 24},
			{name: "120x40", display: term.Display{}, w: 120, h: 40},
			{name: "80x24-colour", display: term.Display{Colours: term.Colours256}, w: 80, h: 24},
		} {
			t.Run(sc.name+"/"+v.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := sc.show(t, func(e *enginefake.Engine) *stage { return newStage(t, e, v.display, v.w, v.h) })
					frame := s.c.View()
					lines := strings.Split(frame, "\n")
					if len(lines) != v.h {
						t.Errorf("the frame has %d lines, want %d", len(lines), v.h)
					}
					for i, l := range lines {
						if w := ansi.StringWidth(l); w > v.w {
							t.Errorf("line %d takes %d columns of %d: %q", i+1, w, v.w, l)
						}
						lines[i] = strings.TrimRight(strings.ReplaceAll(l, "\x1b", "␛"), " ")
					}
					enginefake.CheckGolden(t, fmt.Sprintf("frames/%s.%s.txt", sc.name, v.name), strings.Join(lines, "\n")+"\n")
				})
			})
		}
	}
}

func TestThemes(t *testing.T) {
	for _, v := range []struct {
		name    string
		display term.Display
	}{
		{"ascii", term.Display{Ascii: true}},
		{"16-dark", term.Display{Colours: term.Colours16}},
		{"16-light", term.Display{Colours: term.Colours16, Light: true}},
		{"256-light", term.Display{Colours: term.Colours256, Light: true}},
		{"true-dark", term.Display{Colours: term.TrueColour}},
	} {
		t.Run(v.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStage(t, &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}, v.display, 80, 24).replay(enginefake.Recorded(t, "init"), 12*time.Second)
				frame := s.c.View()
				if v.display.Ascii {
					for _, r := range frame {
						if r > 0x7e {
							t.Errorf("%q is not ASCII", r)
						}
					}
				}
				enginefake.CheckGolden(t, "themes/"+v.name+".txt", strings.ReplaceAll(frame, "\x1b", "␛")+"\n")
			})
		})
	}
}

// Frames of all scenes fit every terminal size.
func TestFramesFitEverySize(t *testing.T) {
	testneeds.Time(t, "10 s")
	for _, sc := range slices.Concat(scenes, checkScenes, backupScenes, upgradeScenes, watchScenes, recordedScenes, imagelessScenes, machineScenes) {
		t.Run(sc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := sc.show(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
				for w := 20; w <= 200; w += 9 {
					for h := 5; h <= 70; h += 5 {
						s.c.w, s.c.h = w, h
						lines := strings.Split(s.c.View(), "\n")
						if len(lines) > h {
							t.Fatalf("%dx%d: %d lines", w, h, len(lines))
						}
						for i, l := range lines {
							if got := ansi.StringWidth(l); got > w {
								t.Fatalf("%dx%d: line %d takes %d columns: %q", w, h, i+1, got, l)
							}
						}
					}
				}
			})
		})
	}
}

// In the smallest window the selected row is visible.
func TestSmallestWindow(t *testing.T) {
	for _, sc := range slices.Concat(scenes, checkScenes, backupScenes) {
		if !slices.Contains([]string{"home-cluster", "check-quiet", "backup-list", "backup-verified", "backup-damaged", "backup-volumes"}, sc.name) {
			continue
		}
		t.Run(sc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := sc.show(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 60, 16) })
				frame := s.c.View()
				enginefake.CheckGolden(t, "frames/"+sc.name+".60x16.txt", frame+"\n")
				if s.c.screen == s.c.backup && !s.c.backup.open {
					for range 3 {
						if b := s.c.backup.chosen(); !strings.Contains(s.c.View(), b.ID) {
							t.Errorf("%s is selected and not visible:\n%s", b.ID, s.c.View())
						}
						s.press("down")
					}
				}
			})
		})
	}
}

// The key line always has the help key.
func TestKeyLineAlwaysHasHelp(t *testing.T) {
	for _, sc := range slices.Concat(scenes, checkScenes, backupScenes, upgradeScenes, watchScenes, recordedScenes, imagelessScenes, machineScenes) {
		t.Run(sc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := sc.show(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
				if !slices.ContainsFunc(s.c.bindings(), func(b binding) bool { return b.label == "?" }) {
					return // a question, or the help itself
				}
				for _, w := range []int{60, 80, 120} {
					if line := s.c.keyLine(w); !strings.Contains(line, "? help") || ansi.StringWidth(line) > w {
						t.Errorf("%d columns: %q", w, line)
					}
				}
			})
		})
	}
}

func TestTooSmallWindowNamesTheDimension(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, tt := range []struct {
			w, h int
			want string
		}{
			{w: 52, h: 30, want: "width 52 of 60"},
			{w: 90, h: 14, want: "height 14 of 16"},
			{w: 30, h: 10, want: "width 30 of 60, height 10 of 16"},
		} {
			s := newStage(t, &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}, term.Display{}, tt.w, tt.h).replay(enginefake.Recorded(t, "init"), 12*time.Second)
			got := strings.Join(strings.Fields(s.c.View()), " ")
			if !strings.Contains(got, tt.want) || !strings.Contains(got, "The run continues.") {
				t.Errorf("%dx%d shows %q, want %q", tt.w, tt.h, got, tt.want)
			}
		}
	})
}

// adoptScene is a console with one cluster that can be adopted.
func adoptScene(s func(*enginefake.Engine) *stage) *stage {
	st := s(&enginefake.Engine{})
	st.c.deps.Clusters = (&kubeconfigFake{}).clusters(contextsFake("dev")...)
	st.c.deps.Clusters.Adopt = newAdoptFake().adoption(st)
	*st.c.clusters = *newClustersScreen(st.c)
	st.c.screen, st.c.task.busy = st.c.clusters, ""
	st.do(st.c.Init())
	st.c.View()
	st.settle()
	return st.view([]string{"enter"})
}
