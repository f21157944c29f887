package tui

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"constellation/tui/view"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
)

// plainOf replays a recorded run in its own time to the plain printer.
func plainOf(t *testing.T, events []plan.Event) string {
	t.Helper()
	var b bytes.Buffer
	synctest.Test(t, func(t *testing.T) {
		// The synctest clock starts in 2000; the printer's clock follows the events.
		began := time.Now()
		now := func() time.Time { return enginefake.Start.Add(time.Since(began)) }
		p := newPlainPrinter(&guarded{w: &b}, nil, now)
		for _, ev := range events {
			if d := ev.Time.Sub(now()); d > 0 {
				time.Sleep(d)
			}
			p.event(ev)
		}
		p.close()
	})
	return b.String()
}

func TestPlainPrinter(t *testing.T) {
	for _, name := range []string{"init", "failed", "hung", "stopped", "resumed", "taken-up", "many", "prepare"} {
		t.Run(name, func(t *testing.T) {
			out := plainOf(t, enginefake.Recorded(t, name))
			enginefake.CheckGolden(t, "plain/"+name+".txt", out)
			for _, r := range out {
				if r != '\n' && engine.HiddenRune(r) {
					t.Errorf("the output holds %q", r)
				}
			}
		})
	}
}

// The printer writes a heartbeat after 10 s, then 30, then every 60; any other line resets
// the interval.
func TestHeartbeat(t *testing.T) {
	p, _ := json.Marshal(plan.Plan{ID: "r", Verb: plan.VerbInit, Cluster: "demo", Steps: []plan.Step{{ID: "wait-ready", Title: "Wait"}}})
	at := func(s int) time.Time { return enginefake.Start.Add(time.Duration(s) * time.Second) }
	out := plainOf(t, []plan.Event{
		{Time: at(0), Kind: plan.KindPlan, Data: p},
		{Time: at(0), Kind: plan.KindStep, Step: "wait-ready", State: plan.StateRunning},
		{Time: at(1), Kind: plan.KindProgress, Step: "wait-ready", Text: "pods start", Current: 1, Total: 4},
		{Time: at(175), Kind: plan.KindNode, Node: "worker-0", To: plan.NodeReady},
		{Time: at(190), Kind: plan.KindStep, Step: "wait-ready", State: plan.StateDone},
	})
	var got []string
	for line := range strings.Lines(out) {
		if strings.Contains(line, " still ") {
			f := strings.SplitN(line, " ", 2)
			got = append(got, f[0]+" "+line[strings.Index(line, "next report"):len(line)-1])
		}
	}
	want := []string{"07:05:11Z next report in 30s", "07:05:41Z next report in 1m00s", "07:06:41Z next report in 1m00s", "07:07:41Z next report in 1m00s", "07:08:06Z next report in 30s"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("heartbeats %q, want %q\n%s", got, want, out)
	}
	if !strings.Contains(out, "Wait for 10s: pods start, 1 of 4;") {
		t.Errorf("the heartbeat does not name the running step:\n%s", out)
	}
}

func TestJSONLinesAreTheEvents(t *testing.T) {
	for _, name := range []string{"init", "failed", "hung", "prepare"} {
		events := enginefake.Recorded(t, name)
		var b bytes.Buffer
		p := jsonPrinter{&b}
		for _, ev := range events {
			p.event(ev)
		}
		lines := bytes.Split(bytes.TrimSuffix(b.Bytes(), []byte("\n")), []byte("\n"))
		if len(lines) != len(events) {
			t.Fatalf("%d lines for %d events", len(lines), len(events))
		}
		for i, l := range lines {
			for _, r := range string(l) {
				if engine.HiddenRune(r) {
					t.Errorf("line %d holds %q as it is", i+1, r)
				}
			}
			var back plan.Event
			if err := json.Unmarshal(l, &back); err != nil {
				t.Fatal(err)
			}
			if back.Text != events[i].Text || back.Seq != events[i].Seq || back.Kind != events[i].Kind {
				t.Errorf("line %d reads back as %+v, want %+v", i+1, back, events[i])
			}
		}
		if name == "hung" || name == "prepare" {
			enginefake.CheckGolden(t, "json/"+name+".jsonl", b.String())
		}
	}
}

func TestHiddenCharactersAreEscaped(t *testing.T) {
	for _, tt := range []struct{ in, plain, json string }{
		{in: "all is well", plain: "all is well", json: `"all is well"`},
		{in: "schön ✓ 日本", plain: "schön ✓ 日本", json: `"schön ✓ 日本"`},
		{in: "\x1b[31mred\x1b[0m", plain: `\x1b[31mred\x1b[0m`, json: `"\u001b[31mred\u001b[0m"`},
		{in: "\x1b]0;title\a", plain: `\x1b]0;title\x07`, json: `"\u001b]0;title\u0007"`},
		{in: "a\tb\r\n", plain: "a    b", json: `"a\tb\r\n"`},
		{in: "one\ntwo", plain: `one\ntwo`, json: `"one\ntwo"`},
		{in: "c1 \u009b31m", plain: `c1 \u009b31m`, json: `"c1 \u009b31m"`},
		{in: "\u202eevil\u2066", plain: `\u202eevil\u2066`, json: `"\u202eevil\u2066"`},
		{in: "zero\u200bwidth", plain: `zero\u200bwidth`, json: `"zero\u200bwidth"`},
		{in: "tag \U000e0041", plain: `tag \ue0041`, json: `"tag \udb40\udc41"`},
		{in: "fillers \u3164\u115f\u1160\uffa0\u2800", plain: `fillers \u3164\u115f\u1160\uffa0\u2800`, json: `"fillers \u3164\u115f\u1160\uffa0\u2800"`},
		{in: "variation \u2713\ufe0e \U000e0100", plain: "variation ✓\\ufe0e \\ue0100", json: `"variation ✓\ufe0e \udb40\udd00"`},
		{in: "tower a\u0301\u0302\u0303\u0304\u0305\u0306b", plain: "tower a\u0301\u0302\u0303\u0304\\u0305\\u0306b", json: "\"tower a\u0301\u0302\u0303\u0304\\u0305\\u0306b\""},
		{in: "\u0301 joins what is before", plain: `\u0301 joins what is before`, json: "\"\u0301 joins what is before\""},
		{in: "bad \xff", plain: `bad \xff`, json: `"bad \ufffd"`},
		{in: "del \x7f", plain: `del \x7f`, json: `"del \u007f"`},
	} {
		if got := term.Clean(tt.in); got != tt.plain {
			t.Errorf("clean(%q) = %q, want %q", tt.in, got, tt.plain)
		}
		b, err := encode(tt.in, "")
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.TrimSuffix(string(b), "\n"); got != tt.json {
			t.Errorf("encode(%q) = %s, want %s", tt.in, got, tt.json)
		}
		var back string
		if err := json.Unmarshal(b, &back); err != nil || back != strings.ToValidUTF8(tt.in, "\ufffd") {
			t.Errorf("encode(%q) reads back as %q, %v", tt.in, back, err)
		}
	}
}

func FuzzClean(f *testing.F) {
	for _, s := range []string{"a", "\x1b[2J", "\u202e", "\xff\xfe", "日本\t", "\u3164\u115f", "a\u0301\u0301\u0301\u0301\u0301\u0301", "\t\u0301"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		out := term.Clean(s)
		var filter engine.TextFilter
		for _, r := range out {
			if !filter.Shows(r) {
				t.Fatalf("clean(%q) = %q holds %q", s, out, r)
			}
		}
		if again := term.Clean(out); again != out {
			t.Fatalf("clean(%q) = %q, and again %q", s, out, again)
		}
	})
}

// The printer has the counts of the timeline after every event, as the console does.
func TestPrinterFoldsTheTimeline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, name := range []string{"init", "many", "resumed", "taken-up"} {
			var tl view.Timeline
			p := newPlainPrinter(&guarded{w: &bytes.Buffer{}}, nil, func() time.Time { return enginefake.Start })
			for i, ev := range enginefake.Recorded(t, name) {
				tl.Apply(ev)
				p.event(ev)
				if a, b := enginefake.CountsOf(&tl), enginefake.CountsOf(&p.t); a != b {
					t.Fatalf("%s, event %d: the timeline has %s, the printer %s", name, i+1, a, b)
				}
			}
			p.close()
		}
	})
}

// A closed pipe is reported once, and writing stops.
func TestClosedPipe(t *testing.T) {
	w := &failingWriter{err: syscall.EPIPE}
	told := 0
	g := &guarded{w: w, gone: func() { told++ }}
	p := newPlainPrinter(g, nil, time.Now)
	for _, ev := range enginefake.Recorded(t, "init") {
		p.event(ev)
	}
	p.close()
	if told != 1 || w.calls != 1 || p.t.Result == nil {
		t.Errorf("reported %d times after %d writes, result %v; want once after one write, and the whole run", told, w.calls, p.t.Result)
	}
}

// A full disk is not a closed pipe: the error is kept for the end.
func TestFullDisk(t *testing.T) {
	told := 0
	g := &guarded{w: &failingWriter{err: &os.PathError{Op: "write", Path: "/dev/stdout", Err: syscall.ENOSPC}}, gone: func() { told++ }}
	if _, err := g.Write([]byte("the answer")); err != nil {
		t.Errorf("write: %v; a run must not end because of it", err)
	}
	if told != 0 || !errors.Is(g.failed, syscall.ENOSPC) {
		t.Errorf("reported a closed pipe %d times, kept %v; want the full disk", told, g.failed)
	}
}

type failingWriter struct {
	calls int
	err   error
}

func (f *failingWriter) Write([]byte) (int, error) { f.calls++; return 0, f.err }
