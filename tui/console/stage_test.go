package console

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
	"constellation/tui/view"
)

// stage drives a console without a terminal: it delivers messages, runs commands at once and
// delivers their messages. Its clock is that of the events. It works only in a synctest
// bubble.
type stage struct {
	t      *testing.T
	c      *console
	eng    *enginefake.Engine
	clock  time.Time
	copied []string
	quit   bool
	queue  chan tea.Msg
}

func newStage(t *testing.T, eng *enginefake.Engine, l term.Display, w, h int, change ...func(*consoleDeps)) *stage {
	t.Helper()
	s := &stage{t: t, eng: eng, clock: enginefake.Start, queue: make(chan tea.Msg, 1024)}
	t.Cleanup(func() { time.Sleep(time.Hour) }) // of the bubble: ticks under way end
	ws, err := workspace.OpenWorkspace(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	d := consoleDeps{
		Options: Options{
			Engine: eng, Workspace: ws, Commands: view.CommandFormatter{Dir: ".demo", Home: "/home/ops/demo", Kubeconfig: "/home/ops/demo/constellation-admin.conf"}, Versions: []string{"v1.35.4", "v1.36.3"},
			Now: func() time.Time { return s.clock },
		},
		send: func(m tea.Msg) { s.queue <- m },
		copy: func(text string) bool { s.copied = append(s.copied, text); return true },
	}
	for _, f := range change {
		f(&d)
	}
	s.c = newConsole(t.Context(), l, d)
	s.c.w, s.c.h = w, h
	return s
}

// begin starts the console, which reads the workspace.
func (s *stage) begin() *stage {
	s.do(s.c.Init())
	return s
}

// do runs a command and delivers its immediate messages. Commands that wait for time or for
// a run continue; settle delivers their messages.
func (s *stage) do(cmd tea.Cmd) {
	s.t.Helper()
	if cmd == nil {
		return
	}
	go func() {
		if m := cmd(); m != nil {
			s.queue <- m
		}
	}()
	s.settle()
}

func (s *stage) tell(m tea.Msg) {
	s.t.Helper()
	switch m := m.(type) {
	case nil, tick, refresh, stopTimedOut: // time is the test's
		return
	case tea.QuitMsg:
		s.quit = true
		return
	case tea.BatchMsg:
		for _, c := range m {
			s.do(c)
		}
		return
	}
	_, cmd := s.c.Update(m)
	s.do(cmd)
}

// settle delivers messages until all goroutines wait for time or for the test.
func (s *stage) settle() {
	s.t.Helper()
	for idle := false; ; {
		synctest.Wait()
		select {
		case m := <-s.queue:
			s.tell(m)
			idle = false
		default:
			if idle {
				return
			}
			idle = true
			time.Sleep(term.FrameGap) // of the bubble: a batch that is being collected comes
		}
	}
}

// press sends keys: single characters, or names such as "enter" and "ctrl+c".
func (s *stage) press(keys ...string) *stage {
	s.t.Helper()
	for _, k := range keys {
		s.tell(keyOf(k))
	}
	return s
}

func keyOf(name string) tea.KeyMsg {
	types := map[string]tea.KeyType{
		"enter": tea.KeyEnter, "esc": tea.KeyEsc, "tab": tea.KeyTab, "shift+tab": tea.KeyShiftTab, "up": tea.KeyUp, "down": tea.KeyDown,
		"left": tea.KeyLeft, "right": tea.KeyRight, "ctrl+c": tea.KeyCtrlC, "backspace": tea.KeyBackspace, "pgup": tea.KeyPgUp, "pgdown": tea.KeyPgDown,
		"home": tea.KeyHome, "end": tea.KeyEnd, "ctrl+l": tea.KeyCtrlL, "ctrl+u": tea.KeyCtrlU, "ctrl+d": tea.KeyCtrlD,
	}
	if kt, ok := types[name]; ok {
		return tea.KeyMsg{Type: kt}
	}
	return tea.KeyMsg{Type: tea.KeyRunes, Runes: []rune(name)}
}

// at sets the clock to a time after start.
func (s *stage) at(d time.Duration) *stage {
	s.clock = enginefake.Start.Add(d)
	s.c.now = s.clock
	return s
}

// replay shows the run screen after the events of a recorded run up to a time.
func (s *stage) replay(events []plan.Event, until time.Duration) *stage {
	s.t.Helper()
	s.c.home = &s.eng.HomeData
	s.c.task.busy = "running"
	s.c.plan = enginefake.PlanIn(s.t, events)
	s.c.screen, s.c.running, s.c.ran = s.c.run, true, true
	s.c.t, *s.c.run = view.Timeline{}, *newRunScreen(s.c)
	s.c.t.SetPlan(s.c.plan)
	s.at(until)
	cut := slices.IndexFunc(events, func(e plan.Event) bool { return e.Time.After(s.clock) })
	if cut < 0 {
		cut = len(events)
	}
	s.tell(batch{s.c.task.id, events[:cut]})
	if s.c.t.Result != nil {
		var err error
		if code := s.c.t.Result.Exit; code != 0 {
			err = &plan.Error{Op: "init demo", Err: errors.New(s.c.t.Result.Text), Remedy: s.c.t.Result.Remedy, Exit: code}
		}
		s.tell(ended{s.c.task.id, runEnded{err}})
	}
	return s
}

// view renders a frame before each key, because some keys depend on the last frame.
func (s *stage) view(keys []string) *stage {
	for _, k := range keys {
		s.c.View()
		s.press(k)
	}
	return s
}
