package console

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/charmbracelet/x/ansi"
	"github.com/google/go-cmp/cmp"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
	"constellation/tui/view"
)

// attached are the events of a watch that is opened at a time: all nodes in their current
// state, then the changes.
func attached(events []plan.Event, d time.Duration) []plan.Event {
	var b rollout.Board
	before := enginefake.Until(events, d)
	for _, e := range before {
		b.Apply(e)
	}
	out := slices.Clone(events[:2])
	out = append(out, plan.Event{Kind: plan.KindStep, Step: plan.StepRollout, State: plan.StateRunning, Text: "Watch the nodes"})
	var names []string
	for n := range b.Nodes() {
		if n.State != plan.NodeGone {
			names = append(names, n.Name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		n, role := b.Node(name), ""
		if n.Control {
			role = "control-plane"
		}
		out = append(out, plan.Event{Kind: plan.KindNode, Step: plan.StepRollout, Node: n.Name, Group: n.Group, Role: role, With: n.Counterpart, To: n.State, Text: n.Text})
	}
	for i := range out {
		out[i].Time = enginefake.Start.Add(d)
	}
	return append(out, events[len(before):]...)
}

// watching is a console with a live watch that has received some events.
func watching(s *stage, events []plan.Event, d time.Duration) *stage {
	s.at(d)
	s.c.task.busy = ""
	s.c.screen = s.c.watch
	s.c.watch.restart(watchScreen{origin: fromLive, gen: 1, board: &rollout.Board{}, cancel: func() {}}, "")
	s.tell(watchBatch{1, events})
	return s
}

// live shows a watch of a rollout at a time.
func live(workers int, d time.Duration, keys ...string) func(*testing.T, func(*enginefake.Engine) *stage) *stage {
	return func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return watching(s(&enginefake.Engine{}), enginefake.Until(enginefake.RolloutOf(t, workers), d), d).view(keys)
	}
}

const middle = 9 * time.Minute

// failing are the events of a rollout that ends with failed machines.
func failing(t testing.TB) []plan.Event {
	events := slices.Clone(enginefake.Until(enginefake.RolloutOf(t, 500), middle))
	at := enginefake.Start.Add(middle)
	for i := range 6 {
		events = append(events, plan.Event{
			Time: at, Kind: plan.KindNode, Node: fmt.Sprintf("gpu-%05d", 9000+i), Group: "gpu", From: plan.NodeBooting, To: plan.NodeFailed,
			Text: "attestation rejected: PCR 9 expected 3f1c… got 88a0…",
		})
	}
	exit := 1
	return append(events,
		plan.Event{Time: at, Kind: plan.KindStep, Step: plan.StepRollout, State: plan.StateFailed, Text: "wait for the nodes: 6 machines failed"},
		plan.Event{Time: at, Kind: plan.KindResult, State: plan.StateFailed, Text: "wait for the nodes: 6 machines failed", Remedy: "`constellation upgrade pause` ends further attempts", Exit: &exit})
}

var watchScenes = []scene{
	{"watch-5", live(5, 70*time.Second)},
	{"watch-5-node", live(5, 70*time.Second, "down", "enter")},
	{"watch-plans", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return watching(s(&enginefake.Engine{}), enginefake.WithPlans(t), 70*time.Second)
	}},
	{"watch-5-done", live(5, time.Hour)},
	{"watch-500", live(500, middle)},
	{"watch-500-map", live(500, middle, "m", "n")},
	{"watch-500-log", live(500, middle, "l", "f", "f")},
	{"watch-500-filter", live(500, middle, "/", "state:drain group:gpu,workers", "enter", "s")},
	{"watch-5000", live(5000, 20*time.Minute)},
	{"watch-5000-map", live(5000, 20*time.Minute, "m", "tab", "n", "right")},
	{"watch-5000-node", live(5000, 20*time.Minute, "G", "enter")},
	{"watch-failed", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return watching(s(&enginefake.Engine{}), failing(t), middle+time.Minute)
	}},
	{"watch-failed-trouble", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return watching(s(&enginefake.Engine{}), failing(t), middle+time.Minute).view([]string{"t", "down"})
	}},
	{"watch-resumed", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return watching(s(&enginefake.Engine{}), enginefake.Until(attached(enginefake.RolloutOf(t, 500), 5*time.Minute), middle), middle)
	}},
	{"watch-away", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := watching(s(&enginefake.Engine{}), enginefake.Until(enginefake.RolloutOf(t, 5), 70*time.Second), 95*time.Second)
		st.tell(watchBatch{1, []plan.Event{{
			Time: enginefake.Start.Add(75 * time.Second), Kind: plan.KindWait, Object: "api-server",
			Text:   "the API server at 127.0.0.1:41943 has not answered since 07:06:16Z; the run continues when it does; last seen at 07:06:15Z: 1 of 8 nodes at the target, 6 outdated",
			Remedy: "`constellation sandbox status` shows whether a control plane is up",
		}}})
		return st
	}},
	{"watch-frozen", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := watching(s(&enginefake.Engine{}), enginefake.Until(enginefake.RolloutOf(t, 500), middle), middle).press(" ")
		st.at(middle + 40*time.Second)
		st.tell(watchBatch{1, enginefake.RolloutOf(t, 500)[len(enginefake.Until(enginefake.RolloutOf(t, 500), middle)):]})
		return st
	}},
	{"watch-pause", live(5, 70*time.Second, "P")},
	{"watch-palette", live(5, 70*time.Second, ":", "m", "i", "n", "u", "t", "e")},
	{"watch-blocked", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := watching(s(&enginefake.Engine{}), enginefake.Until(enginefake.RolloutOf(t, 5), 80*time.Second), 15*time.Minute)
		st.tell(watchBatch{1, []plan.Event{{
			Time: enginefake.Start.Add(85 * time.Second), Kind: plan.KindWait, Object: "rollout", State: "DrainBlocked", Node: "control-plane-1",
			Text:   "pod web/frontend-5d9c of control-plane-1 cannot be evicted: budget web/frontend allows 0 disruptions",
			Remedy: "make room for the named pod; `constellation upgrade check` has the command that clears it",
		}}})
		return st.view([]string{"t"})
	}},
	{"watch-replay", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := s(&enginefake.Engine{})
		st.c.task.busy = ""
		st.c.deps.Replay = &Record{Path: "events.jsonl", Events: enginefake.RolloutOf(t, 500), At: enginefake.Start.Add(middle)}
		st.c.deps.OnlyWatch = true
		st.do(st.c.Init())
		return st.press("]", "]", "[", "+")
	}},
	{"watch-denied", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := watching(s(&enginefake.Engine{}), nil, 0)
		st.tell(watchEnded{1, &plan.Error{Op: "look at the rollout of demo", Err: errors.New("denied by the API server: too few rights"), Remedy: "ask for the right to read nodes, and nodeversions, pendingnodes and joiningnodes of update.edgeless.systems"}})
		return st
	}},
	{"watch-connecting", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return watching(s(&enginefake.Engine{}), nil, 0)
	}},
}

// TestWatchFitsEverySize renders each scene in all sizes. A frame depends only on the events,
// not on earlier frames.
func TestWatchFitsEverySize(t *testing.T) {
	for _, sc := range watchScenes {
		t.Run(sc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := sc.show(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
				fresh := sc.show(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
				for w := view.MinWidth; w <= 300; w += 24 {
					for h := view.MinHeight; h <= 90; h += 15 {
						s.c.w, s.c.h = w, h
						s.c.View() // the map learns its scale
						frame := s.c.View()
						lines := strings.Split(frame, "\n")
						if len(lines) != h {
							t.Fatalf("%dx%d: %d lines", w, h, len(lines))
						}
						for i, l := range lines {
							if got := ansi.StringWidth(l); got > w {
								t.Fatalf("%dx%d: line %d takes %d columns: %q", w, h, i+1, got, l)
							}
						}
						if (w-view.MinWidth)%96 == 0 && h%30 == 1 {
							fresh.c.w, fresh.c.h = w, h
							fresh.c.View()
							if other := fresh.c.View(); other != frame {
								t.Fatalf("%dx%d: the frame depends on earlier frames:\n%s", w, h, cmp.Diff(other, frame))
							}
						}
					}
				}
			})
		})
	}
}

func TestWatchInAscii(t *testing.T) {
	for _, sc := range watchScenes {
		t.Run(sc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := sc.show(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{Ascii: true}, 120, 40) })
				for _, r := range s.c.View() {
					if r > 0x7e {
						t.Fatalf("%q is not ASCII:\n%s", r, s.c.View())
					}
				}
			})
		})
	}
}

// TestWatchThemes renders one frame in each theme.
func TestWatchThemes(t *testing.T) {
	for name, l := range map[string]term.Display{
		"16-dark": {Colours: term.Colours16}, "16-light": {Colours: term.Colours16, Light: true}, "256-light": {Colours: term.Colours256, Light: true},
		"true-dark": {Colours: term.TrueColour}, "ascii": {Ascii: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				events := enginefake.StreamOf(t, "500-good")
				d := inTheMiddle(events)
				s := watching(newStage(t, &enginefake.Engine{}, l, 80, 24), enginefake.Until(events, d), d).view([]string{"m", "n"})
				enginefake.CheckGolden(t, "themes/watch-"+name+".txt", strings.ReplaceAll(s.c.View(), "\x1b", "␛")+"\n")
			})
		})
	}
}

// TestEveryLensIsReached presses all enabled keys, starting at the table, until there is no new
// state: every lens is reached, each has a way back, and no key has two meanings.
func TestEveryLensIsReached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type state struct {
			lens lens
			asks bool
		}
		at := func(c *console) state { return state{c.watch.lens, c.rollout.prompt != nil} }
		open := func(path []string) *stage {
			s := watching(newStage(t, &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageCluster), StatusData: enginefake.DemoStatus()}, term.Display{}, 80, 24), failing(t), middle)
			return s.view(path)
		}
		found := map[state][]string{}
		queue := [][]string{nil}
		found[at(open(nil).c)] = nil
		for len(queue) > 0 {
			path := queue[0]
			queue = queue[1:]
			seen := map[string]bool{}
			for _, b := range open(path).c.bindings() {
				for _, k := range b.keys {
					if seen[k] && slices.ContainsFunc(open(path).c.watch.keys(), func(o binding) bool { return &o != &b && slices.Contains(o.keys, k) && o.help != b.help }) {
						t.Errorf("after %v %q has two meanings", path, k)
					}
					seen[k] = true
				}
				if b.group == "leave" || b.keys[0] == "?" || b.disabled() != "" {
					continue
				}
				next := append(slices.Clone(path), b.keys[0])
				s := open(next)
				if s.c.screen != s.c.watch {
					continue
				}
				if _, ok := found[at(s.c)]; !ok {
					found[at(s.c)] = next
					queue = append(queue, next)
				}
			}
		}
		for l := lensTable; l <= lensTrouble; l++ {
			path, ok := found[state{l, false}]
			if !ok {
				t.Errorf("lens %d is not reached", l)
				continue
			}
			s := open(path)
			for range 4 {
				s.press("esc")
			}
			if s.c.screen != s.c.overview {
				t.Errorf("from lens %d Esc leads to %s", l, s.c.screen.title())
			}
		}
		if _, ok := found[state{lensTable, true}]; !ok {
			t.Error("the question whether to pause is not reached")
		}
	})
}

func TestFilterMatches(t *testing.T) {
	now := enginefake.Start.Add(10 * time.Minute)
	n := &rollout.BoardNode{Name: "worker-0412", Group: "workers-b", State: plan.NodeDraining, Since: now.Add(-6 * time.Minute), Attempts: 2, Text: "PDB web/frontend", Counterpart: "worker-5412"}
	for _, tt := range []struct {
		filter string
		want   bool
	}{
		{"", true},
		{"state:drain", true},
		{"state:ready,DRAINING", true},
		{"state:join", false},
		{"!state:ready", true},
		{"!state:drain", false},
		{"group:workers-b node:worker-04*", true},
		{"group:gpu", false},
		{"age>5m", true},
		{"age>7m", false},
		{"age<7m try>1", true},
		{"try>2", false},
		{"with:worker-54", true},
		{"FRONTEND 0412", true},
		{"backend", false},
		{"web/front", true},
	} {
		f, err := view.ParseFilter(tt.filter)
		if err != nil {
			t.Errorf("%q: %v", tt.filter, err)
			continue
		}
		if got := f.Node(n, now); got != tt.want {
			t.Errorf("%q matches: %v, want %v", tt.filter, got, tt.want)
		}
	}
	for filter, want := range map[string]string{
		"age:5m": `"age:5m": write age>… or age<…`, "age>5": `"age>5": want a time such as 90s, 5m or 1h`, "state>ready": `"state>ready": write state:…`,
		"try>x": `"try>x": want a number`, "state:": `"state:": want state:VALUE`, "node:[": `"node:[": not a pattern`,
		"state:ready,nope !state:nope": `"state:nope": no such state, want one of ready, outdated, replacing, draining, upgrading, leaving, not-ready, joining, booting, creating, failed, gone`,
	} {
		if _, err := view.ParseFilter(filter); err == nil || err.Error() != want {
			t.Errorf("%q: error %v, want %s", filter, err, want)
		}
	}
}

// The page of a machine names its page in the console of the vendor, unless the machines are simulated.
func TestMachineNamesItsPage(t *testing.T) {
	const page = "https://console.cloud.google.com/compute/instancesDetail/zones/europe-west3-a/instances/worker-x7?project=my-project"
	for _, simulated := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "record.jsonl")
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		enc := json.NewEncoder(f)
		for _, ev := range []plan.Event{
			{Kind: plan.KindHello, Schema: plan.Schema, Object: "demo", Simulated: simulated},
			{Kind: plan.KindStep, Step: plan.StepRollout, State: plan.StateRunning},
			{Kind: plan.KindNode, Node: "worker-x7", Group: "workers", To: plan.NodeDraining, ProviderID: "gce://my-project/europe-west3-a/worker-x7"},
		} {
			ev.Time = enginefake.Start
			if err := enc.Encode(ev); err != nil {
				t.Fatal(err)
			}
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		r, err := ReadRecord(path, nil, func(string) {})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Test(t, func(t *testing.T) {
			s := newStage(t, &enginefake.Engine{}, term.Display{}, 140, 40)
			s.c.task.busy, s.c.deps.Replay, s.c.deps.OnlyWatch = "", r, true
			s.do(s.c.Init())
			s.view([]string{"enter"})
			if out := s.c.View(); !strings.Contains(out, "Machine worker-x7") || strings.Contains(out, page) == simulated {
				t.Errorf("simulated %v:\n%s", simulated, out)
			}
		})
	}
}

// TestHostileRecordIsHarmless replays a malicious record: no control character reaches the
// terminal in any lens.
func TestHostileRecordIsHarmless(t *testing.T) {
	evil := "\x1b]0;owned\x07\x1b[2J\u202eevil\r\n\x9b31m\x00"
	path := filepath.Join(t.TempDir(), "evil.jsonl")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(f, "\x1b[2J this is no event")
	enc := json.NewEncoder(f)
	for i := range 40 {
		for _, ev := range []plan.Event{
			{Kind: plan.KindHello, Tool: evil, Object: evil, Run: evil},
			{Kind: plan.KindPlan, From: evil, To: evil, Data: json.RawMessage(`{"cluster":"\u001b[2Jx","to":{"kubernetes":"\u001b[31m","image":"\u202e"},"steps":[{"id":"\u001b[1m","title":"\u0007"}]}`)},
			{Kind: plan.KindStep, Step: evil, State: evil, Text: evil, Remedy: evil},
			{Kind: plan.KindStep, Step: plan.StepRollout, State: plan.StateRunning},
			{Kind: plan.KindProgress, Step: plan.StepRollout, Object: evil, State: evil, Text: evil},
			{Kind: plan.KindNode, Node: evil + fmt.Sprint(i), Group: evil, To: []string{evil, plan.NodeFailed, plan.NodeDraining}[i%3], Text: evil, With: evil, Role: evil},
			{Kind: plan.KindLog, Source: evil, Node: evil + fmt.Sprint(i), Level: evil, Text: evil},
			{Kind: plan.KindWait, Text: evil, Node: evil, Object: evil, Remedy: "`" + evil + "`"},
		} {
			ev.Time = enginefake.Start.Add(time.Duration(i) * time.Second)
			if err := enc.Encode(ev); err != nil {
				t.Fatal(err)
			}
		}
	}
	fmt.Fprintln(f, `{"kind":"node","node":"cut o`)
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	r, err := ReadRecord(path+"@+30s", nil, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	var bad []string
	for _, b := range r.Bad {
		bad = append(bad, b.String())
	}
	if diff := cmp.Diff([]string{"line 1: it is not JSON, at character 1", "line 322: it is not JSON, at character 29"}, bad); diff != "" {
		t.Errorf("bad lines (-want +got):\n%s", diff)
	}
	synctest.Test(t, func(t *testing.T) {
		for _, keys := range [][]string{{}, {"m", "n"}, {"enter"}, {"l"}, {"l", "w", "up"}, {"t"}, {"?"}} {
			s := newStage(t, &enginefake.Engine{}, term.Display{}, 120, 40)
			s.c.task.busy, s.c.deps.Replay, s.c.deps.OnlyWatch = "", r, true
			s.do(s.c.Init())
			s.view(keys)
			frame := s.c.View() + strings.Join(s.c.exitSummary(), "\n")
			for _, c := range frame {
				if c != '\n' && engine.HiddenRune(c) {
					t.Errorf("after %v %q is shown", keys, c)
					break
				}
			}
			if n := strings.Count(s.c.View(), "\n") + 1; n != 40 {
				t.Errorf("after %v the frame has %d lines", keys, n)
			}
		}
	})
}

func TestReplaySeeks(t *testing.T) {
	events := enginefake.RolloutOf(t, 500)
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, &enginefake.Engine{}, term.Display{}, 120, 40)
		s.c.task.busy, s.c.deps.OnlyWatch = "", true
		s.c.deps.Replay = &Record{Path: "x", Events: events, At: enginefake.Start.Add(middle)}
		s.do(s.c.Init())
		want := func(what string, d time.Duration) {
			t.Helper()
			var b rollout.Board
			for _, e := range enginefake.Until(events, d) {
				b.Apply(e)
			}
			if got := s.c.watch.board.Counts(); !cmp.Equal(b.Counts(), got) {
				t.Errorf("%s: counts %v, want %v", what, got, b.Counts())
			}
			if got := s.c.watch.clock(); !got.Equal(enginefake.Start.Add(d)) {
				t.Errorf("%s: at %s, want %s", what, got, enginefake.Start.Add(d))
			}
		}
		want("opened", middle)
		s.press("]")
		want("one minute forward", middle+time.Minute)
		s.press("[", "[", "[")
		want("two minutes back", middle-2*time.Minute)
		s.press("{")
		want("the beginning", 0)
		s.press("}")
		last := events[len(events)-1].Time.Sub(enginefake.Start)
		want("the end", last)
		if mode, _ := s.c.watch.badge(s.c.watch.board); mode != "REPLAY end" {
			t.Errorf("mode %q", mode)
		}
		s.press("{", " ")
		s.clock = s.clock.Add(100 * time.Millisecond)
		s.c.now = s.clock
		s.tell(watchTick{s.c.watch.gen})
		want("played for a tenth of a second, eight times as fast", 800*time.Millisecond)
		if why := s.press("P").c.note; !strings.Contains(why, "this is a replay") {
			t.Errorf("P says %q", why)
		}
	})
}

// While a large record is read, its progress is shown.
func TestReplayShowsReadingProgress(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events.jsonl")
	var lines bytes.Buffer
	for lines.Len() < 5*progressEach/2 {
		for _, ev := range enginefake.RolloutOf(t, 500) {
			if err := json.NewEncoder(&lines).Encode(ev); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := os.WriteFile(path, lines.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	var told []string
	r, err := ReadRecord(path, nil, func(text string) { told = append(told, text) })
	if err != nil {
		t.Fatal(err)
	}
	if want := "reading the record " + path + ": 1 MiB of " + term.Bytes(int64(lines.Len())); len(told) != lines.Len()/progressEach || told[0] != want {
		t.Errorf("progress %q, want %q first", told, want)
	}
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, &enginefake.Engine{}, term.Display{}, 120, 40)
		s.c.deps.OnlyWatch, s.c.deps.Replay, s.c.screen = true, r, s.c.watch
		frame := s.c.View() // before the first message
		for _, want := range []string{"REPLAY opening", "opening the record " + path, "Opening the record"} {
			if !strings.Contains(frame, want) {
				t.Errorf("there is no %q in\n%s", want, frame)
			}
		}
		for _, wrong := range []string{"connecting", "No run is in progress", "first response"} {
			if strings.Contains(frame, wrong) {
				t.Errorf("there is %q in\n%s", wrong, frame)
			}
		}
	})
}

func TestParseMoment(t *testing.T) {
	first := time.Date(2026, 11, 21, 23, 50, 0, 0, time.UTC)
	last := first.Add(2 * time.Hour)
	for text, want := range map[string]time.Time{
		"+5m": first.Add(5 * time.Minute), "23:55": first.Add(5 * time.Minute), "00:10:30": first.Add(20*time.Minute + 30*time.Second), "00:10:30Z": first.Add(20*time.Minute + 30*time.Second),
		"2026-11-22T00:00:00Z": first.Add(10 * time.Minute),
	} {
		if got, err := parseMoment(text, first, last); err != nil || !got.Equal(want) {
			t.Errorf("%s is %s, %v, want %s", text, got, err, want)
		}
	}
	for _, text := range []string{"", "5m", "+x", "-5m", "25:00"} {
		if got, err := parseMoment(text, first, last); err == nil {
			t.Errorf("%q is %s", text, got)
		}
	}
}

// The end of a watch is not reported as the end of the rollout.
func TestEndOfAWatchIsNotTheEndOfTheRollout(t *testing.T) {
	var b rollout.Board
	b.Result, b.Outcome = &plan.Result{Status: plan.StateDone}, "1 of 2 nodes at the target"
	for verb, want := range map[plan.Verb]string{
		plan.VerbWatch: "At the last observation: 1 of 2 nodes at the target",
		plan.VerbApply: "Ended: 1 of 2 nodes at the target",
	} {
		b.Plan = &plan.Plan{Verb: verb}
		if got, _ := view.BoardReason((&console{}).page(), &b); got != want {
			t.Errorf("%s: %q", verb, got)
		}
	}
}

// Notes disappear after a while, because they may be out of date.
func TestNotesExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := watching(newStage(t, &enginefake.Engine{}, term.Display{}, 80, 24), enginefake.Until(enginefake.RolloutOf(t, 5), time.Minute), time.Minute)
		s.tell(rolloutChanged{what: "paused"})
		for _, after := range []time.Duration{time.Second, noteTTL} {
			s.at(time.Minute + after).c.Update(nil)
			if !strings.Contains(s.c.View(), "the rollout is paused") {
				t.Errorf("after %s the note is not shown", after)
			}
		}
		s.at(time.Minute + 2*noteTTL).c.Update(nil)
		if v := s.c.View(); strings.Contains(v, "the rollout is paused") || !strings.Contains(v, "? help") {
			t.Errorf("the note still replaces the key line:\n%s", v)
		}
	})
}

// The Kubernetes upgrade, which takes minutes, comes before the first replacement.
func TestWatchShowsTheKubernetesUpgrade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		at := enginefake.Start.Add(time.Second)
		s := newStage(t, &enginefake.Engine{}, term.Display{}, 120, 40)
		s.c.home = &engine.Home{Backup: &plan.LastBackup{Created: enginefake.Start.Add(-26 * time.Hour)}}
		watching(s, []plan.Event{
			{Time: enginefake.Start, Kind: plan.KindPlan, Data: json.RawMessage(`{"cluster":"demo","steps":[{"id":"backup","title":"Back up"},{"id":"wait-for-rollout","title":"Wait"}]}`)},
			{Time: enginefake.Start, Kind: plan.KindStep, Step: check.StepBackup, State: plan.StateRunning},
			{Time: at, Kind: plan.KindStep, Step: check.StepBackup, State: plan.StateDone, TookMS: 1000},
			{Time: at, Kind: plan.KindStep, Step: plan.StepRollout, State: plan.StateRunning},
			{Time: at, Kind: plan.KindNode, Step: plan.StepRollout, Node: "control-plane-0", Group: "control-plane", Role: "control-plane", To: plan.NodeOutdated},
			{Time: at, Kind: plan.KindProgress, Step: plan.StepRollout, Object: "kubernetes", State: plan.StateRunning, Text: "v1.36.3 on control-plane-0, apply: etcd"},
		}, time.Minute)
		v := s.c.View()
		for _, want := range []string{"Now: kubernetes: v1.36.3 on control-plane-0, apply: etcd", "backup 59s old"} {
			if !strings.Contains(v, want) {
				t.Errorf("%q is not shown:\n%s", want, v)
			}
		}
	})
}
