package tui

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

// checks are the checks with goldens; their values are from real checks.
var checks = []string{
	"two-hops", "newest", "patch", "blocked", "blocked-goal", "old-kubelet", "trouble", "api-down", "stale-feed", "mixed", "hostile", "many", "written",
}

// checkIn reads a check from testdata.
func checkIn(t testing.TB, name string) check.Check {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "checks", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	var k check.Check
	if err := d.Decode(&k); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return k
}

// printedHere runs a verb in the current directory as workspace and returns its output.
func printedHere(t *testing.T, e *fakeEngine, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	t.Chdir(t.TempDir())
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	code = App{
		Release: "v1.1.0", Program: "constellation", Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs,
		Env: func(k string) string { return map[string]string{"LANG": "C.UTF-8"}[k] }, Now: func() time.Time { return start },
		Engine: func(*workspace.Workspace, *slog.Logger) (Engine, error) { return e, nil },
	}.Run(args)
	return strings.ReplaceAll(out.String(), dir, "/home/ops/demo"), errs.String(), code
}

func TestPrintedChecks(t *testing.T) {
	root, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range checks {
		// The JSON output must equal the file that the check is read from.
		for _, f := range []struct{ format, file string }{{"text", "checked/" + name + ".txt"}, {"json", "checks/" + name + ".json"}, {"markdown", "checked/" + name + ".md"}} {
			t.Run(name+"/"+f.format, func(t *testing.T) {
				out, errs, code := printedHere(t, &fakeEngine{check: checkIn(t, name)}, "upgrade", "check", "-o", f.format)
				t.Chdir(root)
				if code != 0 || errs != "" {
					t.Errorf("exit %d, stderr %q", code, errs)
				}
				if i := strings.IndexAny(out, "\x1b\x07\u202e"); i >= 0 {
					t.Errorf("a control character is printed: %q", out[i:min(len(out), i+20)])
				}
				checkGolden(t, f.file, out)
			})
		}
	}
}

// The next command repeats the flags of the check.
func TestNextRepeatsFlags(t *testing.T) {
	for _, tt := range []struct {
		name, check string
		args        []string
		want        string
	}{
		{"none were given", "two-hops", nil, "next  constellation upgrade check --write-config"},
		{
			"all were given", "two-hops",
			[]string{"--to", "v1.1.0", "--kubernetes=1.36.3", "--feed", "my feed", "--feed-key", "a.pub", "--feed-key", "it's.pub", "--no-dry-run", "--no-preflight"},
			`next  constellation upgrade check --write-config --to v1.1.0 --kubernetes v1.36.3 --feed 'my feed' --feed-key a.pub --feed-key 'it'\''s.pub' --no-dry-run --no-preflight`,
		},
		{"a script asks", "two-hops", []string{"--non-interactive"}, "next  constellation upgrade check --write-config"},
		{"it was written", "written", []string{"--write-config", "--to", "v1.1.0"}, "next  constellation upgrade apply"},
		{"nothing to write", "newest", []string{"--to", "v1.1.0"}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, errs, code := printedHere(t, &fakeEngine{check: checkIn(t, tt.check)}, append([]string{"upgrade", "check"}, tt.args...)...)
			got := ""
			for l := range strings.Lines(out) {
				if strings.HasPrefix(l, "next ") {
					got += strings.TrimSuffix(l, "\n")
				}
			}
			if got != tt.want || code != 0 || errs != "" {
				t.Errorf("exit %d, stderr %q, says\n%s\nwant\n%s", code, errs, got, tt.want)
			}
		})
	}
}

// checkShown opens the check screen.
func checkShown(name string, keys ...string) func(*testing.T, func(*fakeEngine) *stage) *stage {
	return func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		e := &fakeEngine{home: upgradeHome(), status: demoStatus(), check: checkIn(t, name)}
		if e.check.Current == (plan.Target{}) {
			e.statusErr = errors.New("the API server at 127.0.0.1:36443 does not answer")
			e.checkErr = &plan.Error{Op: "ask the cluster which versions it runs", Err: e.statusErr, Remedy: e.check.Findings[0].Remedy}
		}
		st := s(e).begin().press("c")
		st.settle()
		return st.press(keys...)
	}
}

func upgradeHome() engine.Home {
	h := demoHome(engine.StageCluster)
	h.Next = []engine.Suggestion{{Title: "Look at the cluster", Command: "constellation -C .demo status"}, {Title: "Check for upgrades", Command: "constellation -C .demo upgrade check", Why: "release v1.1.0 and Kubernetes v1.36.4 are known"}}
	return h
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
	{"check-written", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		st := checkShown("two-hops", "W")(t, s)
		st.eng.check = checkIn(t, "written")
		st.press("enter")
		st.settle()
		return st
	}},
	{"check-fine", checkShown("two-hops", "enter")},
	{"check-help", checkShown("two-hops", "?")},
	{"check-old", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		st := checkShown("trouble")(t, s)
		st.at(checkStale + 7*time.Minute)
		return st.press("up")
	}},
	{"check-again-failed", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		st := checkShown("two-hops")(t, s)
		st.eng.check, st.eng.checkErr = checkIn(t, "api-down"), &plan.Error{Op: "ask the cluster which versions it runs", Err: errors.New("the API server at 127.0.0.1:36443 does not answer"), Remedy: "is the control plane up?"}
		st.at(40 * time.Second)
		st.press("r")
		st.settle()
		return st
	}},
	{"check-running", func(t *testing.T, s func(*fakeEngine) *stage) *stage { return checking(t, s, 31) }},
	{"check-begun", func(t *testing.T, s func(*fakeEngine) *stage) *stage { return checking(t, s, 0) }},
	{"check-quiet", func(t *testing.T, s func(*fakeEngine) *stage) *stage {
		st := demoStatus()
		st.Target = checkIn(t, "two-hops").Current
		return s(&fakeEngine{home: upgradeHome(), status: st, check: checkIn(t, "two-hops")}).begin()
	}},
}

// checking shows a check that hangs after told findings.
func checking(t *testing.T, s func(*fakeEngine) *stage, told int) *stage {
	e := &fakeEngine{home: upgradeHome(), status: demoStatus(), check: checkIn(t, "trouble"), checkPause: told + 1}
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
		{"Y copies the finding's command", "trouble", []string{"Y"}, []string{pdb}, "copied the command"},
		{"Y copies the check if the finding has no command", "trouble", []string{"down", "down", "Y"}, []string{"constellation -C .demo upgrade check"}, "copied the command of the check"},
		{"Y copies the check where no finding is chosen", "two-hops", []string{"tab", "Y"}, []string{"constellation -C .demo upgrade check"}, "copied the command of the check"},
		{"Y copies no command with control characters", "hostile", []string{"Y"}, nil, "it is not copied"},
		{"Y copies what is open", "trouble", []string{"enter", "Y"}, []string{pdb}, "copied the command"},
		{"y copies the line", "trouble", []string{"down", "y"}, []string{`the API v1beta1.metrics.k8s.io is registered and not available: ServiceNotFound: service/metrics-server in "kube-system" is not present`}, "copied the line"},
		{"y copies no control characters", "hostile", []string{"down", "y"}, []string{`not known: image of \x1b]0;x\x07worker-0: it has no annotation`}, "copied the line"},
		{"y copies the reason", "blocked", []string{"y"}, []string{"Kubernetes v1.35.5 to v1.36.4 (9): the mirror has no v1.36.4, same for the others"}, "copied the line"},
		{"y copies the answer", "two-hops", []string{"y"}, []string{"Hop 1 of 2 is possible: release v1.1.0."}, "copied the line"},
		{"Y knows what the filter left", "many", []string{"/", "t", "e", "a", "m", "-", "0", "2", "enter", "Y"}, []string{`kubectl --kubeconfig /home/ops/demo/constellation-admin.conf -n team-02 patch poddisruptionbudget web --type=merge -p '{"spec":{"maxUnavailable":1}}'`}, "copied"},
		{"W is off without a hop", "newest", []string{"W"}, nil, "W is off: there is no next hop"},
		{"W is off if the configuration has all", "mixed", []string{"W"}, nil, "W is off: the configuration already has the next hop"},
		{"W is off after it has written", "written", []string{"W"}, nil, "W is off: it is written already"},
		{"Enter is off where there is nothing", "newest", []string{"enter"}, nil, "Enter is off: there is nothing to open here"},
		{"a is off without a hop", "newest", []string{"a"}, nil, "a is off: there is no next hop"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := checkShown(tt.check, tt.keys...)(t, func(e *fakeEngine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
				if !slices.Equal(s.copied, tt.copied) || !strings.Contains(s.c.note, tt.note) || tt.note == "" && s.c.note != "" {
					t.Errorf("copied %q and says %q; want %q and %q", s.copied, s.c.note, tt.copied, tt.note)
				}
				if v := strings.Join(strings.Fields(s.c.View()), " "); !strings.Contains(v, s.c.note) || !strings.Contains(v, fmt.Sprintf(" exit %d", s.eng.check.Exit)) {
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
		{"two-hops", nil, []string{"1 hop\n", "in hop 2\n", "  hop 1  now, with this CLI  replaces the control planes\n", "  hop 2  with this CLI       replaces every node\n"}},
		{"two-hops", []string{"tab"}, []string{"▸ ✗ Kubernetes v1.36.4", "  hop 2  with this CLI "}},
		{"trouble", nil, []string{"2 hops\n", "in hop 2\n", "needed for hop 1\n", "  hop 1  with v1.0.0 ", "▸ ✗ disruption"}},
		{"mixed", nil, []string{"v1.35.4-v1.36.3", "  hop 1  "}},
	} {
		t.Run(strings.Join(append([]string{tt.check}, tt.keys...), " "), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				v := checkShown(tt.check, tt.keys...)(t, func(e *fakeEngine) *stage { return newStage(t, e, term.Display{}, 60, 16) }).c.View()
				for _, want := range tt.want {
					if !strings.Contains(v, want) {
						t.Errorf("there is no %q in\n%s", want, v)
					}
				}
				checkGolden(t, "frames/check-"+strings.Join(append([]string{tt.check}, tt.keys...), "-")+".60x16.txt", v+"\n")
			})
		})
	}
}

// On a terminal, printed answers use its width.
func TestAnswersFitTheTerminal(t *testing.T) {
	for _, tt := range []struct{ columns, least, most int }{{60, 50, 60}, {80, 76, 80}, {118, 110, 118}, {200, 110, 120}, {40, 50, 60}} {
		t.Run(strconv.Itoa(tt.columns), func(t *testing.T) {
			p := startOn(t, uint16(tt.columns), 24, []string{answering(t, "two-hops")}, nil, "upgrade", "check")
			if code := p.ends(); code != 0 {
				t.Fatalf("ended with %d", code)
			}
			p.sees("Will change in hop 1")
			widest := 0
			for l := range strings.Lines(p.output()) {
				l = strings.TrimRight(l[strings.LastIndexByte(strings.TrimRight(l, "\r\n"), '\r')+1:], "\r\n")
				widest = max(widest, term.Width(term.StripStyle(l)))
			}
			if widest < tt.least || widest > tt.most {
				t.Errorf("the widest line has %d columns, want %d to %d:\n%s", widest, tt.least, tt.most, p.output())
			}
		})
	}
}

func TestWritingAsksOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := checkShown("two-hops", "W", "esc")(t, func(e *fakeEngine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
		if s.eng.checkedAs.WriteConfig || s.c.check.confirmWrite {
			t.Fatalf("Esc wrote: %v, still asks: %v", s.eng.checkedAs.WriteConfig, s.c.check.confirmWrite)
		}
		s.eng.check = checkIn(t, "written")
		s.press("W", "enter")
		s.settle()
		if want := (check.Request{WriteConfig: true, NoPreflight: true}); !reflect.DeepEqual(s.eng.checkedAs, want) {
			t.Errorf("asked for %+v, want %+v", s.eng.checkedAs, want)
		}
		if !s.c.check.result.Config.Written || len(s.c.check.result.Findings) != 71 || !strings.Contains(s.c.note, "wrote 6 values") {
			t.Errorf("written: %v with %d findings, says %q", s.c.check.result.Config.Written, len(s.c.check.result.Findings), s.c.note)
		}
		s.press("W")
		if s.c.check.confirmWrite || s.c.note != "W is off: it is written already" {
			t.Errorf("after writing W asks: %v, says %q", s.c.check.confirmWrite, s.c.note)
		}
		s.eng.check = checkIn(t, "two-hops") // the file was changed back meanwhile
		s.press("r")
		s.settle()
		s.press("W")
		if !s.c.check.confirmWrite {
			t.Errorf("after r W does not ask, and says %q", s.c.note)
		}
		s.press("esc")
		s.eng.checkErr = &plan.Error{Op: "write constellation-conf.yaml", Err: errors.New("it was changed meanwhile")}
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

// Versions and path are shown while the check runs, and keys work meanwhile.
func TestCheckShowsPartialResults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := checking(t, func(e *fakeEngine) *stage { return newStage(t, e, term.Display{}, 80, 24) }, 31)
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
		if s.c.screen != s.c.overview || s.c.check.busy || s.c.busy != "" {
			t.Errorf("Esc leads to %s, busy %v with %q", s.c.screen.title(), s.c.check.busy, s.c.busy)
		}
		s.eng.checkPause = 0
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
		s := checkShown("two-hops", "esc")(t, func(e *fakeEngine) *stage { return newStage(t, e, term.Display{Colours: term.Colours256}, 80, 24) })
		s.settle()
		s.at(staleAfter + time.Second)
		cmd := s.c.openCheck()
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
		s := checkShown("two-hops", "esc")(t, func(e *fakeEngine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
		s.settle()
		s.eng.check = checkIn(t, "trouble")
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
		st := demoStatus()
		st.Target = checkIn(t, "two-hops").Current
		e := &fakeEngine{home: upgradeHome(), status: st, check: checkIn(t, "two-hops")}
		s := newStage(t, e, term.Display{}, 80, 24).begin()
		if !e.checkedAs.NoPreflight {
			t.Fatalf("asked for %+v, want versions alone", e.checkedAs)
		}
		v := s.c.View()
		for _, want := range []string{"v1.35.4  ▲ v1.36.3 available", "▸ Check hop 1 of 2: release v1.1.0  constellation -C .demo upgrade check"} {
			if !strings.Contains(v, want) {
				t.Errorf("home has no %q:\n%s", want, v)
			}
		}
		s.press("enter")
		s.settle()
		if s.c.screen != s.c.check || !s.c.check.complete || e.checkedAs.NoPreflight {
			t.Errorf("Enter shows %s, a whole check: %v", s.c.screen.title(), s.c.check.complete)
		}

		e = &fakeEngine{home: upgradeHome(), status: st, checkErr: errors.New("no answer")}
		s = newStage(t, e, term.Display{}, 80, 24).begin()
		if v := s.c.View(); strings.Contains(v, "no answer") || !strings.Contains(v, "release v1.1.0 and") {
			t.Errorf("home says\n%s", v)
		}

		e = &fakeEngine{home: demoHome(engine.StageReady)}
		s = newStage(t, e, term.Display{}, 80, 24).begin()
		s.c.screen = s.c.overview
		s.press("c")
		if s.c.screen != s.c.overview || s.c.note != "c is off: there is no cluster yet" {
			t.Errorf("without a cluster c shows %s and says %q", s.c.screen.title(), s.c.note)
		}
	})
}

func TestNewer(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		want bool
	}{
		{"v1.36.10", "v1.36.9", true},
		{"v1.36.3", "v1.36.3", false},
		{"v1.36.0-rc.1", "v1.36.0", false},
		{"v1.36.3", "", true},
		{"", "v1.36.3", false},
		{"v1.36.3", "v1.35.4-v1.36.3", true},
	} {
		if got := view.Newer(tt.a, tt.b); got != tt.want {
			t.Errorf("%q after %q: %v, want %v", tt.a, tt.b, got, tt.want)
		}
	}
}

func TestOwners(t *testing.T) {
	for _, tt := range []struct{ owner, want string }{
		{"kubectl-client-side-apply", "last changed with kubectl"},
		{"namespace shop, kubectl-client-side-apply", "namespace shop, last changed with kubectl"},
		{"namespace shop, kubectl; namespace web, kubectl-edit", "namespace shop, last changed with kubectl; namespace web, last changed with kubectl"},
		{"namespace kubectl, Helm release kubectl-tools", "namespace kubectl, Helm release kubectl-tools"},
		{"argocd-controller", "argocd-controller"},
		{"", ""},
	} {
		if got := view.OwnerText(tt.owner); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.owner, got, tt.want)
		}
	}
}

func TestEstimates(t *testing.T) {
	for _, tt := range []struct {
		least, most time.Duration
		want        string
	}{
		{36 * time.Second, 12 * time.Minute, "36s to 12m"},
		{90 * time.Second, 90*time.Second + time.Millisecond, "about 90s"},
		{190 * time.Minute, 230 * time.Minute, "3h10m to 3h50m"},
		{119 * time.Second, 2 * time.Hour, "119s to 2h00m"},
	} {
		if got := view.DurationRange(tt.least, tt.most); got != tt.want {
			t.Errorf("%s, %s: %q, want %q", tt.least, tt.most, got, tt.want)
		}
	}
}

// Output to a pipe does not truncate commands and addresses.
func TestPrintedCommandsAreWhole(t *testing.T) {
	k := checkIn(t, "trouble")
	out, _, _ := printedHere(t, &fakeEngine{check: k}, "upgrade", "check")
	for _, f := range k.Findings {
		if f.Severity != plan.Info && (!strings.Contains(out, f.Command) || !strings.Contains(out, f.Reference)) {
			t.Errorf("%q or %q is not whole in\n%s", f.Command, f.Reference, out)
		}
	}
}

// Findings of several checks about one object are grouped.
func TestRelatedFindingsAreGrouped(t *testing.T) {
	finding := func(id, title, command string, objects ...string) plan.Finding {
		return plan.Finding{ID: id, Severity: plan.Block, Source: "disruption", Title: title, Command: command, Objects: objects}
	}
	const allow, scale = "kubectl -n shop patch poddisruptionbudget cart", "kubectl -n shop scale deployment/cart --replicas=2"
	k := &check.Check{Findings: []plan.Finding{
		finding("pdb-room", "the budget never lets a pod go", allow, "poddisruptionbudget/shop/cart", "pod/shop/cart-0"),
		finding("node-conditions", "worker-1 is not ready", "", "node/worker-1"),
		finding("drain-rehearsal", "the drain of worker-0 would hang on it", allow, "node/worker-0", "pod/shop/cart-0", "poddisruptionbudget/shop/cart", "pod/web/w-0"),
		finding("pdb-overlap", "the budget is not alone", scale, "poddisruptionbudget/shop/cart"),
		finding("volume-attachments", "a volume stays on worker-1", "", "volumeattachment/v", "node/worker-1"),
		finding("feed", "the feed is old", ""),
		finding("running", "an image is not known", ""),
	}}
	got := ""
	for _, l := range view.FindingGroups((&session{App: App{Now: func() time.Time { return start }, Env: func(string) string { return "" }}}).page(), 100, k) {
		got += strings.TrimRight(l, " ") + "\n"
	}
	want := `
  x disruption   the budget never lets a pod go
                 objects poddisruptionbudget/shop/cart, pod/shop/cart-0
                 command kubectl -n shop patch poddisruptionbudget cart
                 also    the drain of worker-0 would hang on it
                 also    the budget is not alone
                         kubectl -n shop scale deployment/cart --replicas=2
  x disruption   worker-1 is not ready
                 objects node/worker-1
  x disruption   a volume stays on worker-1
                 objects volumeattachment/v, node/worker-1
  x disruption   the feed is old
  x disruption   an image is not known
`
	if _, rest, _ := strings.Cut(got, "\n"); !strings.HasSuffix(rest, want[1:]) {
		t.Errorf("it says\n%s\nwant at its end\n%s", got, want)
	}
}

// The frames on these pages are those that the console renders.
func TestPagesShowTheConsole(t *testing.T) {
	for name, page := range map[string]string{"check-trouble": "README.md", "upgrade-plan": "docs/upgrade-apply.md"} {
		text, err := os.ReadFile("../" + page)
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

// Help and docs describe exit code 4 in the same words.
func TestExitCodeInHelpAndDocs(t *testing.T) {
	pages := ""
	for _, name := range []string{"../docs/workspace.md", "../docs/upgrade-check.md"} {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		pages += string(b)
	}
	const blocked = "every path is blocked or a finding blocks the next hop"
	out, _, _ := printedHere(t, &fakeEngine{}, "upgrade", "check", "--help")
	if n := strings.Count(strings.Join(strings.Fields(out), " "), blocked); n != 2 {
		t.Errorf("the help contains %d times %q:\n%s", n, blocked, out)
	}
	for _, row := range []string{"| 4 | - | something is newer, and " + blocked + " |", "| 4 | blocked by a finding; `upgrade check --exit-code`: " + blocked + " |"} {
		if !strings.Contains(pages, row) {
			t.Errorf("no page has the row %q", row)
		}
	}
}

// The page names every field of the JSON document.
func TestDocsNameEveryField(t *testing.T) {
	page, err := os.ReadFile("../docs/upgrade-check.md")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[reflect.Type]bool{}
	var visit func(reflect.Type)
	visit = func(v reflect.Type) {
		switch v.Kind() {
		case reflect.Pointer, reflect.Slice:
			visit(v.Elem())
			return
		case reflect.Struct:
		default:
			return
		}
		if seen[v] {
			return
		}
		seen[v] = true
		for i := range v.NumField() {
			f := v.Field(i)
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if name == "" || name == "-" {
				continue
			}
			if !strings.Contains(string(page), "`"+name+"`") {
				t.Errorf("docs/upgrade-check.md does not name %s of %s", name, v)
			}
			visit(f.Type)
		}
	}
	visit(reflect.TypeFor[check.Check]())
	if len(seen) < 10 {
		t.Errorf("only %d types were visited", len(seen))
	}
}

// A check with several findings counts once.
func TestChecksAreCounted(t *testing.T) {
	var l view.RunningCheck
	tell := func(kind plan.Kind, object, state string) {
		ev := plan.Event{Kind: kind, Object: object, State: state}
		if state != "" && state != plan.StateRunning {
			ev.Data = json.RawMessage(`{"id":"x","severity":"` + state + `"}`)
		}
		l.Apply(ev)
	}
	for _, id := range []string{"pdb-room", "capacity", "drain-rehearsal", "evil\x1b[2J", "leaders"} {
		tell(plan.KindCheck, id, plan.StateRunning)
	}
	tell(plan.KindCheck, "pdb-room", "block")
	tell(plan.KindCheck, "pdb-room", "warn")
	l.Apply(plan.Event{Kind: plan.KindProgress, Object: "drain-rehearsal", Current: 42, Total: 300})
	l.Apply(plan.Event{Kind: plan.KindProgress, Object: "pdb-room", Current: 1, Total: 2})
	if got, want := l.Summary(), `1 of 5 checked; capacity, drain-rehearsal 42 of 300, evil\x1b[2J and 1 more`; got != want || len(l.Found) != 2 {
		t.Errorf("%q with %d findings, want %q", got, len(l.Found), want)
	}
}

func TestChecksInASCII(t *testing.T) {
	for _, name := range checks {
		for _, keys := range [][]string{nil, {"tab"}, {"tab", "tab"}, {"enter"}} {
			synctest.Test(t, func(t *testing.T) {
				s := checkShown(name, keys...)(t, func(e *fakeEngine) *stage { return newStage(t, e, term.Display{Ascii: true}, 120, 40) })
				for _, r := range s.c.View() {
					if r > 0x7e {
						t.Fatalf("%s after %q: %q is not ASCII", name, keys, r)
					}
				}
			})
		}
	}
}
