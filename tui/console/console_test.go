package console

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
	"constellation/tui/view"
)

func TestWizardFromConfigToResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		events := enginefake.Recorded(t, "init")
		e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady), Plan: enginefake.PlanIn(t, events), Findings: quorumFindings(t), Events: events}
		e.Plan.Findings = e.Findings
		s := newStage(t, e, term.Display{}, 80, 24).begin()
		if s.c.screen != s.c.config {
			t.Fatalf("starts with %s, want config", s.c.screen.title())
		}
		s.press("enter")
		s.settle()
		if s.c.screen != s.c.preflight || !s.c.preflight.done {
			t.Fatalf("config is followed by %s", s.c.screen.title())
		}
		s.press("enter")
		s.settle()
		if s.c.screen != s.c.initConfirm || s.c.initConfirm.yes {
			t.Fatalf("the checks are followed by %s, create selected: %v; want confirm on the safe answer, since there is a warning", s.c.screen.title(), s.c.initConfirm.yes)
		}
		s.press("right", "enter") // typed ahead: must not create anything
		s.settle()
		if e.Ran != 0 || s.c.screen != s.c.initConfirm {
			t.Fatalf("keys typed ahead started the run")
		}
		s.at(confirmDelay)
		s.press("enter")
		s.settle()
		if e.Ran != 1 || s.c.screen != s.c.result || s.c.quit.exit != 0 {
			t.Fatalf("ran %d times, shows %s, exit %d; want one run and its result", e.Ran, s.c.screen.title(), s.c.quit.exit)
		}
		if ready, _ := s.c.t.Ready(); ready != 3 {
			t.Errorf("%d nodes ready, want 3: events were lost", ready)
		}
		s.press("y")
		if want := []string{"export KUBECONFIG=/home/ops/demo/constellation-admin.conf"}; !slices.Equal(s.copied, want) {
			t.Errorf("copied %q, want %q", s.copied, want)
		}
		s.press("q")
		if !s.quit {
			t.Error("q does not leave although nothing runs")
		}
	})
}

func TestBlockedPreflightStopsTheWizard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady), Findings: []plan.Finding{{ID: "cloud", Severity: plan.Block, Title: "the cloud does not answer", Remedy: "constellation sandbox up"}}}
		s := newStage(t, e, term.Display{}, 80, 24).begin().press("enter")
		s.settle()
		s.press("enter")
		s.settle()
		if s.c.screen != s.c.preflight || !strings.Contains(s.c.note, "1 check failed") {
			t.Fatalf("shows %s with note %q, want the checks and the reason", s.c.screen.title(), s.c.note)
		}
		s.press("y")
		if !slices.Equal(s.copied, []string{"constellation sandbox up"}) {
			t.Errorf("copied %q, want the remedy", s.copied)
		}
		e.Findings, e.Plan = nil, enginefake.PlanIn(t, enginefake.Recorded(t, "init"))
		s.press("r")
		s.settle()
		s.press("enter")
		s.settle()
		if s.c.screen != s.c.initConfirm {
			t.Errorf("after the cause is gone, shows %s", s.c.screen.title())
		}
	})
}

// A partial init was confirmed before: the console resumes it without asking.
func TestPartialInitIsResumed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		events := enginefake.Recorded(t, "taken-up")
		e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StagePartial), Plan: enginefake.PlanIn(t, events), Events: events}
		s := newStage(t, e, term.Display{}, 80, 24).begin()
		s.settle()
		if e.Ran != 1 || s.c.screen != s.c.result || !s.c.wizard.resumed {
			t.Fatalf("ran %d times, shows %s", e.Ran, s.c.screen.title())
		}
		if got := s.c.t.Steps[1].State; got != plan.StateSkipped {
			t.Errorf("the second step is %q, want skipped", got)
		}
	})
}

func TestPartialInitThatIsBlockedAsks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := enginefake.PlanIn(t, enginefake.Recorded(t, "taken-up"))
		p.Findings = append(p.Findings, plan.Finding{ID: "cloud", Severity: plan.Block, Title: "the cloud does not answer"})
		e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StagePartial), Plan: p}
		s := newStage(t, e, term.Display{}, 80, 24).begin()
		s.settle()
		if e.Ran != 0 || s.c.screen != s.c.initConfirm {
			t.Fatalf("ran %d times, shows %s; want the plan with what blocks it", e.Ran, s.c.screen.title())
		}
	})
}

func TestYesSkipsTheConfirmation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		events := enginefake.Recorded(t, "init")
		e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady), Plan: enginefake.PlanIn(t, events), Findings: quorumFindings(t), Events: events}
		s := newStage(t, e, term.Display{}, 80, 24, func(d *consoleDeps) { d.Wizard, d.Yes = true, true }).begin()
		s.settle()
		s.press("enter")
		s.settle()
		if e.Ran != 1 || s.c.screen != s.c.result {
			t.Fatalf("ran %d times, shows %s", e.Ran, s.c.screen.title())
		}
	})
}

// running returns a console with a run in its first step.
func running(t *testing.T) *stage {
	events := enginefake.Recorded(t, "init")
	e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StagePartial), Plan: enginefake.PlanIn(t, events), Events: events, PauseAt: 60}
	s := newStage(t, e, term.Display{}, 80, 24).begin()
	s.settle()
	if !s.c.running || s.c.screen != s.c.run {
		t.Fatalf("shows %s, running %v", s.c.screen.title(), s.c.running)
	}
	return s
}

func TestLeaving(t *testing.T) {
	for _, tt := range []struct {
		name string
		keys []string
		then func(*stage)
		quit bool
		exit int
	}{
		{name: "q asks once", keys: []string{"q"}},
		{name: "Ctrl-C asks once", keys: []string{"ctrl+c"}},
		{name: "Esc stays", keys: []string{"ctrl+c", "esc"}},
		{name: "Enter leaves when the step has stopped", keys: []string{"q", "enter"}, quit: true, exit: plan.ExitStopped},
		{name: "Ctrl-C twice leaves at once", keys: []string{"ctrl+c", "ctrl+c"}, quit: true, exit: plan.ExitStopped},
		{name: "Ctrl-C after two seconds leaves in order", keys: []string{"ctrl+c"}, then: func(s *stage) { s.at(3 * time.Second); s.press("ctrl+c") }, quit: true, exit: plan.ExitStopped},
		{name: "other keys do nothing during the question", keys: []string{"q", "l", "tab"}},
		{name: "Ctrl-C in the help asks", keys: []string{"?", "ctrl+c", "enter"}, quit: true, exit: plan.ExitStopped},
		{name: "Ctrl-C in the log asks", keys: []string{"l", "ctrl+c", "enter"}, quit: true, exit: plan.ExitStopped},
		{name: "Ctrl-C in the filter asks", keys: []string{"l", "/", "x", "ctrl+c", "enter"}, quit: true, exit: plan.ExitStopped},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := running(t).press(tt.keys...)
				if tt.then != nil {
					tt.then(s)
				}
				s.settle()
				if s.quit != tt.quit || tt.quit && s.c.quit.exit != tt.exit {
					t.Errorf("left: %v with exit %d; want %v with %d", s.quit, s.c.quit.exit, tt.quit, tt.exit)
				}
				if tt.quit {
					if f := strings.Join(s.c.exitSummary(), "\n"); !strings.Contains(f, "constellation -C .demo") || !strings.Contains(f, "of 8 done") {
						t.Errorf("the exit summary does not show how to come back:\n%s", f)
					}
				}
			})
		})
	}
}

// After the final step the cluster continues on its own: leaving is no failure.
func TestLeavingAfterTheTargetIsSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		events := enginefake.Recorded(t, "init")
		at := slices.IndexFunc(events, func(e plan.Event) bool { return e.Step == "wait-ready" })
		e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StagePartial), Plan: enginefake.PlanIn(t, events), Events: events, PauseAt: at}
		s := newStage(t, e, term.Display{}, 80, 24).begin()
		s.settle()
		s.press("ctrl+c", "ctrl+c")
		if !s.quit || s.c.quit.exit != plan.ExitDone {
			t.Errorf("left: %v with exit %d, want 0", s.quit, s.c.quit.exit)
		}
	})
}

func TestSignalsEndTheConsole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for sig, exit := range map[syscall.Signal]int{syscall.SIGHUP: 129, syscall.SIGINT: 130, syscall.SIGTERM: 143} {
			s := running(t)
			s.tell(term.Signalled{Sig: sig})
			s.settle()
			if !s.quit || s.c.quit.exit != exit {
				t.Errorf("%v: left %v with exit %d, want %d", sig, s.quit, s.c.quit.exit, exit)
			}
			idle := newStage(t, &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageCluster)}, term.Display{}, 80, 24).begin()
			idle.tell(term.Signalled{Sig: sig})
			if !idle.quit || idle.c.quit.exit != exit {
				t.Errorf("%v with nothing under way: left %v with exit %d, want %d", sig, idle.quit, idle.c.quit.exit, exit)
			}
		}
	})
}

func TestFailedRunIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		events := enginefake.Recorded(t, "failed")
		e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StagePartial), Plan: enginefake.PlanIn(t, events), Events: events, RunErr: &plan.Error{Op: "init demo", Err: errors.New("kubeadm failed"), Remedy: "look"}}
		s := newStage(t, e, term.Display{}, 80, 24).begin()
		s.settle()
		if s.c.screen != s.c.result || s.c.quit.exit != plan.ExitFailed {
			t.Fatalf("shows %s, exit %d", s.c.screen.title(), s.c.quit.exit)
		}
		s.press("enter")
		if s.c.screen != s.c.result || !strings.Contains(s.c.note, "off") {
			t.Errorf("Enter on a failure leads to %s", s.c.screen.title())
		}
		ok := enginefake.Recorded(t, "taken-up")
		e.Plan, e.Events, e.RunErr = enginefake.PlanIn(t, ok), ok, nil
		s.press("r")
		s.settle()
		if e.Ran != 2 || s.c.screen != s.c.result || s.c.quit.exit != 0 {
			t.Errorf("ran %d times, shows %s, exit %d", e.Ran, s.c.screen.title(), s.c.quit.exit)
		}
	})
}

func TestRunIsNotRetriedIfEveryRetryMustFail(t *testing.T) {
	for name, tt := range map[string]struct {
		exit int
		ran  int
	}{
		"the cause is permanent":               {plan.ExitFailed, 1},
		"another run may have ended meanwhile": {plan.ExitHeld, 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				events := deadEnd(t)
				e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StagePartial), Plan: enginefake.PlanIn(t, events), Events: events, RunErr: &plan.Error{Op: "init demo", Err: errors.New("no"), Exit: tt.exit}}
				s := newStage(t, e, term.Display{}, 80, 24).begin()
				s.settle()
				s.press("r")
				s.settle()
				if e.Ran != tt.ran || s.c.screen != s.c.result || tt.ran == 1 && !strings.Contains(s.c.note, "a retry would fail the same way") {
					t.Errorf("ran %d times, want %d; shows %s, says %q", e.Ran, tt.ran, s.c.screen.title(), s.c.note)
				}
			})
		})
	}
}

func TestNothingToDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := enginefake.PlanIn(t, enginefake.Recorded(t, "taken-up"))
		for i := range p.Steps {
			p.Steps[i].Finished = true
		}
		e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageCluster), StatusData: enginefake.DemoStatus(), Plan: p}
		s := newStage(t, e, term.Display{}, 80, 24, func(d *consoleDeps) { d.Wizard = true }).begin()
		s.press("enter")
		s.press("enter")
		if s.c.screen != s.c.overview || s.c.quit.exit != plan.ExitNothing || e.Ran != 0 || !strings.Contains(s.c.View(), "nothing to do") {
			t.Errorf("shows %s, exit %d, ran %d times", s.c.screen.title(), s.c.quit.exit, e.Ran)
		}
	})
}

func TestLockedRunNamesTheHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &enginefake.Engine{
			HomeData: enginefake.DemoHome(engine.StagePartial), Plan: enginefake.PlanIn(t, enginefake.Recorded(t, "taken-up")),
			RunErr: &plan.Error{Op: "lock workspace", Err: errors.New("process 41 on box holds it"), Exit: plan.ExitHeld, Remedy: "wait for it to end"},
		}
		s := newStage(t, e, term.Display{}, 80, 24).begin()
		s.settle()
		if v := s.c.View(); s.c.quit.exit != plan.ExitHeld || !strings.Contains(v, "process 41 on box holds it") || !strings.Contains(v, "wait for it to end") {
			t.Errorf("exit %d, shows\n%s", s.c.quit.exit, v)
		}
	})
}

// Events of an earlier task must not reach the screen of a later one.
func TestLateEventsOfAnEarlierTaskAreDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := running(t)
		n := s.c.t.Events
		s.tell(batch{s.c.task.id - 1, []plan.Event{{Kind: plan.KindNode, Node: "ghost", To: plan.NodeReady}}})
		s.tell(ended{s.c.task.id - 1, runEnded{errors.New("late")}})
		if s.c.t.Events != n || s.c.screen != s.c.run {
			t.Errorf("%d events of %d, shows %s", s.c.t.Events, n, s.c.screen.title())
		}
	})
}

func TestConfigIsEditedInPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady), Findings: quorumFindings(t)}
		s := newStage(t, e, term.Display{}, 80, 24)
		b, err := workspace.GenerateConfig("sandbox", workspace.GenerateOptions{Name: "demo", Kubernetes: "v1.35.4"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.c.deps.Workspace.WriteConfig(b); err != nil {
			t.Fatal(err)
		}
		s.begin().press("down", "right", "enter")
		s.settle()
		// The generated file has no measurements, so it must be rejected and left unchanged.
		after, err := s.c.deps.Workspace.ReadConfig()
		if err != nil {
			t.Fatal(err)
		}
		if s.c.config.err == nil || string(after) != string(b) || s.c.screen != s.c.config {
			t.Errorf("error %v, file changed: %v, shows %s", s.c.config.err, string(after) != string(b), s.c.screen.title())
		}
		if v := s.c.View(); !strings.Contains(v, "attestation") {
			t.Errorf("the screen does not say what is wrong:\n%s", v)
		}
	})
}

func TestNewConfigIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var box *workspace.SandboxInfo
		e := &enginefake.Engine{HomeData: engine.Home{Dir: "/x", Stage: engine.StageEmpty}}
		s := newStage(t, e, term.Display{}, 80, 24, func(d *consoleDeps) {
			d.Sandbox = func(context.Context) *workspace.SandboxInfo { return box }
		}).begin()
		s.press("i", "e", "backspace", "backspace", "backspace", "backspace", "p", "1", "enter", "down", "right", "enter")
		if _, err := s.c.deps.Workspace.ReadConfig(); err == nil || !strings.Contains(s.c.View(), "constellation -C .demo sandbox up") {
			t.Errorf("without machines a file was written (%v), or the screen does not say what to do:\n%s", err, s.c.View())
		}
		box = &workspace.SandboxInfo{
			Name: "box", Kubernetes: "v1.35.4", Image: "v1.1.0", Release: "v1.1.0", ControlPlanes: 1, Workers: 2,
			Measurements: map[uint32]string{4: strings.Repeat("ab", 32)}, TrustRoots: certificate(t),
		}
		s.press("enter")
		b, err := s.c.deps.Workspace.ReadConfig()
		if err != nil {
			t.Fatalf("%v, form says %v", err, s.c.config.err)
		}
		if !strings.Contains(string(b), "name: p1") || !strings.Contains(string(b), "kubernetesVersion: v1.36.3") {
			t.Errorf("the file holds\n%s", b)
		}
		if s.c.screen != s.c.overview {
			t.Errorf("shows %s, want home, which says what comes next", s.c.screen.title())
		}
	})
}

// certificate returns a PEM certificate of a CA.
func certificate(t *testing.T) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	b, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: b}))
}

// A key has only one meaning on a screen, all keys are in the help, and every screen has a key
// to leave.
func TestBindings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := running(t)
		for _, id := range []screen{s.c.overview, s.c.config, s.c.preflight, s.c.initConfirm, s.c.run, s.c.result, s.c.log} {
			s.c.screen = id
			seen := map[string]string{}
			leave := false
			for _, b := range append(slices.Clone(s.c.screen.keys()), s.c.globalKeys()...) {
				if b.help == "" || b.label == "" || b.group == "" || b.do == nil {
					t.Errorf("%s: %+v lacks something", id.title(), b)
				}
				for _, k := range b.keys {
					if other, taken := seen[k]; taken {
						t.Errorf("%s: key %s is %q and %q", id.title(), k, other, b.help)
					}
					seen[k] = b.help
					leave = leave || k == "ctrl+c"
				}
			}
			if !leave {
				t.Errorf("%s: no way out", id.title())
			}
			s.c.help.open = true
			s.c.w, s.c.h = 100, 60
			v := s.c.View()
			for _, b := range s.c.screen.keys() {
				if !strings.Contains(v, b.help) {
					t.Errorf("%s: the help does not name %q", id.title(), b.help)
				}
			}
			s.c.help.open = false
		}
	})
}

// Without a spinner there are no ticks.
func TestNothingTicksWhenIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageCluster), StatusData: enginefake.DemoStatus()}, term.Display{}, 80, 24).begin()
		s.c.ticking = false
		if s.c.hasSpinner() || s.c.scheduleTick() != nil {
			t.Error("the home screen ticks")
		}
		r := running(t)
		r.c.ticking = false
		if r.c.scheduleTick() == nil {
			t.Error("a run does not tick")
		}
		if r.c.scheduleTick() != nil {
			t.Error("a second tick is started while one is under way")
		}
	})
}

// On a slow line one message holds several keys; pasted text is no command.
func TestKeysThatComeTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := running(t)
		s.tell(tea.KeyMsg{Type: tea.KeyRunes, Runes: []rune("l/certs")})
		if s.c.screen != s.c.log || s.c.log.filter != "certs" {
			t.Errorf("shows %s with filter %q, want the log filtered by certs", s.c.screen.title(), s.c.log.filter)
		}
		p := running(t)
		p.tell(tea.KeyMsg{Type: tea.KeyRunes, Runes: []rune("lq"), Paste: true})
		if p.c.screen != p.c.run || p.c.quit.asking {
			t.Errorf("pasted text was read as keys: shows %s", p.c.screen.title())
		}
	})
}

func TestBackgroundChangesTheTheme(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageCluster)}, term.Display{Colours: term.Colours256}, 80, 24)
		dark := s.c.View()
		s.tell(term.Background{Light: true})
		if s.c.View() == dark {
			t.Error("a light background changes nothing")
		}
		s.tell(term.Background{Light: false})
		if s.c.View() != dark {
			t.Error("the dark theme does not come back")
		}
	})
}

func TestLogScreen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}, term.Display{}, 80, 24).replay(enginefake.Recorded(t, "hung"), 241200*time.Millisecond)
		s.press("l")
		count := func() int { return len(s.c.log.matching()) }
		if count() != s.c.t.Log.Len() {
			t.Fatalf("%d of %d lines", count(), s.c.t.Log.Len())
		}
		s.press("e")
		if count() != 2 {
			t.Errorf("%d lines are warnings or worse, want 2", count())
		}
		s.press("e", "/", "k", "u", "b", "e", "a", "d", "m", " ", "c", "e", "r", "t", "s", "enter")
		if count() != 3 {
			t.Errorf("%d lines hold kubeadm and certs, want 3", count())
		}
		s.press("g", "y")
		if len(s.copied) != 1 || !strings.HasPrefix(s.copied[0], "[certs] Using") {
			t.Errorf("copied %q", s.copied)
		}
		s.press("esc")
		if s.c.screen != s.c.log || s.c.log.filter != "" {
			t.Error("the first Esc must clear the filter")
		}
		s.press("esc")
		if s.c.screen != s.c.run {
			t.Errorf("the second Esc leads to %s", s.c.screen.title())
		}
		var log view.Lines
		for i := range view.LogLines + 10 {
			log.Add(view.LogLine{Text: string(rune('a' + i%26))})
		}
		if log.Len() != view.LogLines || log.Dropped != 10 || log.At(0).Text != string(rune('a'+10)) {
			t.Errorf("%d lines, %d dropped, the first is %q", log.Len(), log.Dropped, log.At(0).Text)
		}
	})
}

var _ tea.Model = term.Host{}
