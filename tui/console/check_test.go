package console

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
	"constellation/tui/view"
)

// checkShown opens the check screen.
func checkShown(name string, keys ...string) func(*testing.T, func(*enginefake.Engine) *stage) *stage {
	return func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := &enginefake.Engine{HomeData: enginefake.UpgradeHome(), StatusData: enginefake.DemoStatus(), CheckData: enginefake.CheckIn(t, name)}
		if e.CheckData.Current == (plan.Target{}) {
			e.StatusErr = errors.New("the API server at 127.0.0.1:36443 does not answer")
			e.CheckErr = &plan.Error{Op: "ask the cluster which versions it runs", Err: e.StatusErr, Remedy: e.CheckData.Findings[0].Remedy}
		}
		st := s(e).begin().press("c")
		st.settle()
		return st.press(keys...)
	}
}

// checkScenes are typical states of the check screen.
var checkScenes = []scene{
	{"check-two-hops", checkShown("two-hops")},
	{"check-newest", checkShown("newest")},
	{"check-patch", checkShown("patch")},
	{"check-blocked", checkShown("blocked")},
	{"check-blocked-goal", checkShown("blocked-goal")},
	{"check-old-kubelet", checkShown("old-kubelet")},
	{"check-trouble", checkShown("trouble")},
	{"check-api-down", checkShown("api-down")},
	{"check-stale-feed", checkShown("stale-feed")},
	{"check-mixed", checkShown("mixed")},
	{"check-hostile", checkShown("hostile")},
	{"check-hostile-open", checkShown("hostile", "enter")},
	{"check-many", checkShown("many")},
	{"check-many-end", checkShown("many", "G")},
	{"check-filter", checkShown("many", "/", "t", "e", "a", "m", "-", "1")},
	{"check-finding", checkShown("trouble", "down", "down", "enter")},
	{"check-rule", checkShown("two-hops", "tab", "enter")},
	{"check-path", checkShown("two-hops", "tab")},
	{"check-changes", checkShown("two-hops", "tab", "tab")},
	{"check-write", checkShown("two-hops", "W")},
	{"check-written", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := checkShown("two-hops", "W")(t, s)
		st.eng.CheckData = enginefake.CheckIn(t, "written")
		st.press("enter")
		st.settle()
		return st
	}},
	{"check-fine", checkShown("two-hops", "enter")},
	{"check-help", checkShown("two-hops", "?")},
	{"check-old", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := checkShown("trouble")(t, s)
		st.at(checkStale + 7*time.Minute)
		return st.press("up")
	}},
	{"check-again-failed", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := checkShown("two-hops")(t, s)
		st.eng.CheckData, st.eng.CheckErr = enginefake.CheckIn(t, "api-down"), &plan.Error{Op: "ask the cluster which versions it runs", Err: errors.New("the API server at 127.0.0.1:36443 does not answer"), Remedy: "is the control plane up?"}
		st.at(40 * time.Second)
		st.press("r")
		st.settle()
		return st
	}},
	{"check-running", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage { return checking(t, s, 31) }},
	{"check-begun", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage { return checking(t, s, 0) }},
	{"check-quiet", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := enginefake.DemoStatus()
		st.Target = enginefake.CheckIn(t, "two-hops").Current
		return s(&enginefake.Engine{HomeData: enginefake.UpgradeHome(), StatusData: st, CheckData: enginefake.CheckIn(t, "two-hops")}).begin()
	}},
}

// checking shows a check that hangs after told findings.
func checking(t *testing.T, s func(*enginefake.Engine) *stage, told int) *stage {
	e := &enginefake.Engine{HomeData: enginefake.UpgradeHome(), StatusData: enginefake.DemoStatus(), CheckData: enginefake.CheckIn(t, "trouble"), CheckPause: told + 1}
	st := s(e).begin()
	st.press("c")
	st.settle()
	time.Sleep(2 * term.FrameGap) // of the synctest bubble: the pending batch is sent
	st.settle()
	st.at(2300 * time.Millisecond)
	return st
}

// Keys of the check screen work, or the note says why they are off.
func TestKeysOfACheck(t *testing.T) {
	const pdb = `kubectl --kubeconfig /home/ops/demo/constellation-admin.conf -n shop patch poddisruptionbudget cart --type=merge -p '{"spec":{"maxUnavailable":1}}'`
	for _, tt := range []struct {
		name, check string
		keys        []string
		copied      []string
		note        string
	}{
		{name: "Y copies the finding's command", check: "trouble", keys: []string{"Y"}, copied: []string{pdb}, note: "copied the command"},
		{name: "Y copies the check if the finding has no command", check: "trouble", keys: []string{"down", "down", "Y"}, copied: []string{"constellation -C .demo upgrade check"}, note: "copied the command of the check"},
		{name: "Y copies the check where no finding is chosen", check: "two-hops", keys: []string{"tab", "Y"}, copied: []string{"constellation -C .demo upgrade check"}, note: "copied the command of the check"},
		{name: "Y copies no command with control characters", check: "hostile", keys: []string{"Y"}, note: "it is not copied"},
		{name: "Y copies what is open", check: "trouble", keys: []string{"enter", "Y"}, copied: []string{pdb}, note: "copied the command"},
		{name: "y copies the line", check: "trouble", keys: []string{"down", "y"}, copied: []string{`the API v1beta1.metrics.k8s.io is registered and not available: ServiceNotFound: service/metrics-server in "kube-system" is not present`}, note: "copied the line"},
		{name: "y copies no control characters", check: "hostile", keys: []string{"down", "y"}, copied: []string{`not known: image of \x1b]0;x\x07worker-0: it has no annotation`}, note: "copied the line"},
		{name: "y copies the reason", check: "blocked", keys: []string{"y"}, copied: []string{"Kubernetes v1.35.5 to v1.36.4 (9): the mirror has no v1.36.4, likewise the other 8"}, note: "copied the line"},
		{name: "y copies the answer", check: "two-hops", keys: []string{"y"}, copied: []string{"Hop 1 of 2 is possible: release v1.1.0."}, note: "copied the line"},
		{name: "Y knows what the filter left", check: "many", keys: []string{"/", "t", "e", "a", "m", "-", "0", "2", "enter", "Y"}, copied: []string{`kubectl --kubeconfig /home/ops/demo/constellation-admin.conf -n team-02 patch poddisruptionbudget web --type=merge -p '{"spec":{"maxUnavailable":1}}'`}, note: "copied"},
		{name: "W is off without a hop", check: "newest", keys: []string{"W"}, note: "W is off: there is no next hop"},
		{name: "W is off if the configuration has all", check: "mixed", keys: []string{"W"}, note: "W is off: the configuration already has the next hop"},
		{name: "W is off after it has written", check: "written", keys: []string{"W"}, note: "W is off: it is written already"},
		{name: "Enter is off where there is nothing", check: "newest", keys: []string{"enter"}, note: "Enter is off: there is nothing to open here"},
		{name: "a is off without a hop", check: "newest", keys: []string{"a"}, note: "a is off: there is no next hop"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := checkShown(tt.check, tt.keys...)(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
				if !slices.Equal(s.copied, tt.copied) || !strings.Contains(s.c.note, tt.note) || tt.note == "" && s.c.note != "" {
					t.Errorf("copied %q and says %q; want %q and %q", s.copied, s.c.note, tt.copied, tt.note)
				}
				if v := strings.Join(strings.Fields(s.c.View()), " "); !strings.Contains(v, s.c.note) || !strings.Contains(v, fmt.Sprintf(" exit %d", s.eng.CheckData.Exit)) {
					t.Errorf("the note or the exit code is not whole in\n%s", s.c.View())
				}
			})
		})
	}
}

// The smallest window still shows the reachable versions and the hops.
func TestSmallestChecks(t *testing.T) {
	for _, tt := range []struct {
		check string
		keys  []string
		want  []string
	}{
		{check: "two-hops", want: []string{"1 hop\n", "in hop 2\n", "  hop 1  now, with this CLI  replaces the control planes\n", "  hop 2  with this CLI       replaces every node\n"}},
		{check: "two-hops", keys: []string{"tab"}, want: []string{"▸ ✗ Kubernetes v1.36.4", "  hop 2  with this CLI "}},
		{check: "trouble", want: []string{"2 hops\n", "in hop 2\n", "hop 1 needs v1.0.0\n", "  hop 1  with v1.0.0 ", "▸ ✗ disruption"}},
		{check: "mixed", want: []string{"v1.35.4-v1.36.3", "  hop 1  "}},
	} {
		t.Run(strings.Join(append([]string{tt.check}, tt.keys...), " "), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				v := checkShown(tt.check, tt.keys...)(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 60, 16) }).c.View()
				for _, want := range tt.want {
					if !strings.Contains(v, want) {
						t.Errorf("there is no %q in\n%s", want, v)
					}
				}
				enginefake.CheckGolden(t, "frames/check-"+strings.Join(append([]string{tt.check}, tt.keys...), "-")+".60x16.txt", v+"\n")
			})
		})
	}
}

func TestWritingAsksOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := checkShown("two-hops", "W", "esc")(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
		if s.eng.CheckedAs.WriteConfig || s.c.check.confirmWrite {
			t.Fatalf("Esc wrote: %v, still asks: %v", s.eng.CheckedAs.WriteConfig, s.c.check.confirmWrite)
		}
		s.eng.CheckData = enginefake.CheckIn(t, "written")
		s.press("W", "enter")
		s.settle()
		if want := (check.Request{WriteConfig: true, NoPreflight: true}); !reflect.DeepEqual(s.eng.CheckedAs, want) {
			t.Errorf("asked for %+v, want %+v", s.eng.CheckedAs, want)
		}
		if !s.c.check.result.Config.Written || len(s.c.check.result.Findings) != 71 || !strings.Contains(s.c.note, "wrote 6 values") {
			t.Errorf("written: %v with %d findings, says %q", s.c.check.result.Config.Written, len(s.c.check.result.Findings), s.c.note)
		}
		s.press("W")
		if s.c.check.confirmWrite || s.c.note != "W is off: it is written already" {
			t.Errorf("after writing W asks: %v, says %q", s.c.check.confirmWrite, s.c.note)
		}
		s.eng.CheckData = enginefake.CheckIn(t, "two-hops") // the file was changed back meanwhile
		s.press("r")
		s.settle()
		s.press("W")
		if !s.c.check.confirmWrite {
			t.Errorf("after r W does not ask, and says %q", s.c.note)
		}
		s.press("esc")
		s.eng.CheckErr = &plan.Error{Op: "write constellation-conf.yaml", Err: errors.New("it was changed meanwhile")}
		s.c.check.result.Config.Written = false
		s.press("W", "enter")
		s.settle()
		if v := strings.Join(strings.Fields(s.c.View()), " "); !strings.Contains(v, s.c.note) {
			t.Errorf("the error is not whole in\n%s", s.c.View())
		}
		if s.c.check.result.Config.Written || s.c.note != "not written: write constellation-conf.yaml: it was changed meanwhile" {
			t.Errorf("written: %v, says %q", s.c.check.result.Config.Written, s.c.note)
		}
	})
}

// Without a next hop, W writes what runs, if the configuration describes something else.
func TestWritingWhatRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := checkShown("newest")(t, func(e *enginefake.Engine) *stage {
			e.CheckData.Config = &check.ConfigChange{Path: "demo/constellation-conf.yaml", Fields: []workspace.FieldChange{{Field: "image", From: "v1.0.0", To: "v1.1.0"}}}
			e.CheckData.Notes = append(e.CheckData.Notes, check.NoteOtherConfig)
			return newStage(t, e, term.Display{}, 80, 24)
		})
		s.press("W")
		if v := s.c.View(); !s.c.check.confirmWrite || !strings.Contains(v, "Write the configuration?") || !strings.Contains(v, "v1.0.0") {
			t.Fatalf("W asks: %v, the note is %q, in\n%s", s.c.check.confirmWrite, s.c.note, v)
		}
		written := *s.eng.CheckData.Config
		written.Written = true
		s.eng.CheckData.Config = &written
		s.press("enter")
		s.settle()
		if !strings.HasPrefix(s.c.note, "wrote 1 value into ") {
			t.Errorf("the note is %q", s.c.note)
		}
		if slices.Contains(s.c.check.result.Notes, check.NoteOtherConfig) {
			t.Error("the screen keeps the note about the former configuration")
		}
	})
}

// Versions and path are shown while the check runs, and keys work meanwhile.
func TestCheckShowsPartialResults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := checking(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) }, 31)
		v := s.c.View()
		for _, want := range []string{"v1.34.2 ━━1━━▶ v1.35.4", "PodDisruptionBudget shop/cart", "Now (2.3s): 9 of 49 checked"} {
			if !strings.Contains(v, want) {
				t.Errorf("the screen has no %q:\n%s", want, v)
			}
		}
		s.press("W")
		if s.c.check.confirmWrite || s.c.note != "W is off: a check is running" {
			t.Errorf("W during a check: asks %v, says %q", s.c.check.confirmWrite, s.c.note)
		}
		s.press("r")
		if s.c.note != "r is off: a check is running" {
			t.Errorf("r during a check says %q", s.c.note)
		}
		s.press("esc")
		s.settle()
		if s.c.screen != s.c.overview || s.c.check.busy || s.c.task.busy != "" {
			t.Errorf("Esc leads to %s, busy %v with %q", s.c.screen.title(), s.c.check.busy, s.c.task.busy)
		}
		s.eng.CheckPause = 0
		s.press("c")
		s.settle()
		if !s.c.check.complete || len(s.c.check.findingsNow()) != 71 {
			t.Errorf("after coming back the check is whole: %v, with %d findings", s.c.check.complete, len(s.c.check.findingsNow()))
		}
	})
}

// During a new check, the old result is shown without colours.
func TestOldCheckIsDimmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := checkShown("two-hops", "esc")(t, func(e *enginefake.Engine) *stage {
			return newStage(t, e, term.Display{Colours: term.Colours256}, 80, 24)
		})
		s.settle()
		s.at(staleAfter + time.Second)
		cmd := s.c.check.show()
		row := func() string {
			for l := range strings.Lines(s.c.View()) {
				if strings.Contains(l, "v1.36.4") {
					return strings.TrimSuffix(l, "\n")
				}
			}
			return ""
		}
		if got := row(); !s.c.check.busy || got != view.Dim(s.c.page(), got) {
			t.Errorf("busy %v, shows %q", s.c.check.busy, got)
		}
		s.do(cmd)
		s.settle()
		if got := row(); s.c.check.busy || got == view.Dim(s.c.page(), got) {
			t.Errorf("busy %v, shows %q", s.c.check.busy, got)
		}
	})
}

// A recent check is shown again without a new one; an old one is not.
func TestCheckIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := checkShown("two-hops", "esc")(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
		s.settle()
		s.eng.CheckData = enginefake.CheckIn(t, "trouble")
		s.press("c")
		s.settle()
		if n := len(s.c.check.result.Path); n != 2 {
			t.Errorf("the path has %d hops, want those of the check before", n)
		}
		s.press("esc")
		s.settle()
		s.at(staleAfter + time.Second)
		s.press("c")
		s.settle()
		if n := len(s.c.check.result.Path); n != 3 {
			t.Errorf("the path has %d hops, want those of a new check", n)
		}
	})
}

// The home screen checks versions in the background and hides errors of that.
func TestHomeChecksForUpgrades(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := enginefake.DemoStatus()
		st.Target = enginefake.CheckIn(t, "two-hops").Current
		e := &enginefake.Engine{HomeData: enginefake.UpgradeHome(), StatusData: st, CheckData: enginefake.CheckIn(t, "two-hops")}
		s := newStage(t, e, term.Display{}, 80, 24).begin()
		if !e.CheckedAs.NoPreflight {
			t.Fatalf("asked for %+v, want versions alone", e.CheckedAs)
		}
		v := s.c.View()
		for _, want := range []string{"v1.35.4  ▲ v1.36.3 available", "▸ Check hop 1 of 2: release v1.1.0  constellation -C .demo upgrade check"} {
			if !strings.Contains(v, want) {
				t.Errorf("home has no %q:\n%s", want, v)
			}
		}
		s.press("enter")
		s.settle()
		if s.c.screen != s.c.check || !s.c.check.complete || e.CheckedAs.NoPreflight {
			t.Errorf("Enter shows %s, a whole check: %v", s.c.screen.title(), s.c.check.complete)
		}

		e = &enginefake.Engine{HomeData: enginefake.UpgradeHome(), StatusData: st, CheckErr: errors.New("no answer")}
		s = newStage(t, e, term.Display{}, 80, 24).begin()
		if v := s.c.View(); strings.Contains(v, "no answer") || !strings.Contains(v, "release v1.1.0 and") {
			t.Errorf("home says\n%s", v)
		}

		e = &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}
		s = newStage(t, e, term.Display{}, 80, 24).begin()
		s.c.screen = s.c.overview
		s.press("c")
		if s.c.screen != s.c.overview || s.c.note != "c is off: there is no cluster yet" {
			t.Errorf("without a cluster c shows %s and says %q", s.c.screen.title(), s.c.note)
		}
	})
}

// The frames on these pages are those that the console renders.
func TestPagesShowTheConsole(t *testing.T) {
	for name, page := range map[string]string{"check-trouble": "README.md", "upgrade-plan": "docs/upgrade-apply.md", "machines": "docs/enrol.md"} {
		text, err := os.ReadFile("../../" + page)
		if err != nil {
			t.Fatal(err)
		}
		frame, err := os.ReadFile("testdata/frames/" + name + ".80x24.txt")
		if err != nil {
			t.Fatal(err)
		}
		if want := strings.ReplaceAll(string(frame), "-C .demo", "-C demo"); !strings.Contains(string(text), "```\n"+want+"```\n") {
			t.Errorf("%s does not show\n%s", page, want)
		}
	}
}

func TestChecksInASCII(t *testing.T) {
	for _, name := range enginefake.Checks {
		for _, keys := range [][]string{nil, {"tab"}, {"tab", "tab"}, {"enter"}} {
			synctest.Test(t, func(t *testing.T) {
				s := checkShown(name, keys...)(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{Ascii: true}, 120, 40) })
				for _, r := range s.c.View() {
					if r > 0x7e {
						t.Fatalf("%s after %q: %q is not ASCII", name, keys, r)
					}
				}
			})
		}
	}
}
