package rollout

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"constellation/engine/plan"
)

// maxRecordLine bounds one line of a record in bytes: plans with thousands of objects fit.
const maxRecordLine = 16 << 20

// BadLine is a line of a record that is no event.
type BadLine struct {
	Number int // from 1
	Why    string
}

// String is "line 7: invalid character 'x'".
func (b BadLine) String() string { return fmt.Sprintf("line %d: %s", b.Number, b.Why) }

// ReadRecord reads events, a line each, as a run records them and -o json prints them, and
// calls take for each. Lines that are no events are left out and returned, the first
// hundred of them. The error is about reading, or take's own.
func ReadRecord(r io.Reader, take func(plan.Event) error) (bad []BadLine, err error) {
	lines := bufio.NewReaderSize(r, 64<<10)
	for n := 1; ; n++ {
		line, long, err := readLine(lines)
		if err != nil && !errors.Is(err, io.EOF) {
			return bad, err
		}
		if len(bytes.TrimSpace(line)) > 0 || long {
			var e plan.Event
			why := ""
			switch {
			case long:
				why = fmt.Sprintf("it is longer than %d MB", maxRecordLine>>20)
			default:
				if jerr := json.Unmarshal(line, &e); jerr != nil {
					why = jsonTrouble(jerr)
				} else if e.Kind == "" || e.Time.IsZero() {
					why = "it is no event: it has no kind, or no time"
				}
			}
			if why == "" {
				if terr := take(e); terr != nil {
					return bad, terr
				}
			} else if len(bad) < 100 {
				bad = append(bad, BadLine{n, why})
			}
		}
		if errors.Is(err, io.EOF) {
			return bad, nil
		}
	}
}

// jsonTrouble says what is wrong with a line, without its content.
func jsonTrouble(err error) string {
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		return fmt.Sprintf("it is not JSON, at character %d", syntax.Offset)
	case errors.As(err, &kind) && kind.Field != "":
		return "its " + kind.Field + " is a " + kind.Value
	}
	return "it is no event"
}

// readLine reads a line; one that is too long is read and left out.
func readLine(r *bufio.Reader) (line []byte, long bool, err error) {
	for {
		part, err := r.ReadSlice('\n')
		if !long {
			line = append(line, part...)
			if len(line) > maxRecordLine {
				line, long = nil, true
			}
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, long, err
		}
	}
}

// PastRun is what a record tells about a run.
type PastRun struct {
	plan.RunSummary
	Tool string      `json:"tool,omitempty"`
	From plan.Target `json:"from,omitzero"`
	// Accepted are the warnings that the plan was run with, those accepted by name among
	// them, which are Named.
	Accepted []plan.Finding `json:"accepted"`
	Steps    []PastStep     `json:"steps"`
	// TookMS is how long it took, until its last event if it has no end.
	TookMS int64 `json:"took_ms"`
	// Nodes is how many machines changed their state, Replaced how many nodes came to the
	// target, Failed how many machines failed.
	Nodes    int `json:"nodes"`
	Replaced int `json:"replaced"`
	Failed   int `json:"failed"`
	// Stages are how long machines stayed in a state, in the order of a rollout.
	Stages []PastStage `json:"stages"`
	// Waits are what was waited for longest, the longest first.
	Waits  []PastWait `json:"waits"`
	Resume string     `json:"resume,omitempty"`
	Bad    []string   `json:"bad,omitempty"` // lines of the record that cannot be read
}

// PastStep is a step of a run.
type PastStep struct {
	ID     string `json:"id"`
	Title  string `json:"title"`
	State  string `json:"state"`
	Text   string `json:"text,omitempty"`
	TookMS int64  `json:"took_ms"`
}

// PastStage is how long machines stayed in a state.
type PastStage struct {
	State string `json:"state"`
	// Machines is how many left it; half of the last few hundred of them did within P50MS,
	// and 95 of a hundred within P95MS.
	Machines int   `json:"machines"`
	P50MS    int64 `json:"p50_ms"`
	P95MS    int64 `json:"p95_ms"`
}

// PastWait is something that was waited for.
type PastWait struct {
	Text   string    `json:"text"`
	Since  time.Time `json:"since"`
	TookMS int64     `json:"took_ms"`
}

// pastWaits is how many waits a past run tells of.
const pastWaits = 5

// step notes what became of a step.
func (p *PastRun) step(e plan.Event) {
	i := slices.IndexFunc(p.Steps, func(x PastStep) bool { return x.ID == e.Step })
	if i < 0 {
		if len(p.Steps) >= boardSteps {
			return
		}
		p.Steps = append(p.Steps, PastStep{ID: e.Step, Title: e.Step})
		i = len(p.Steps) - 1
	}
	x := &p.Steps[i]
	x.State, x.TookMS = e.State, e.TookMS
	if e.State != plan.StateRunning {
		x.Text = e.Text
	} else if x.Title == x.ID {
		x.Title = cmp.Or(e.Text, x.Title)
	}
}

// ReadPastRun makes a PastRun of the summary of a run and its record.
func ReadPastRun(s plan.RunSummary, record io.Reader) (PastRun, error) {
	var b Board
	out := PastRun{RunSummary: s, Accepted: []plan.Finding{}, Steps: []PastStep{}, Stages: []PastStage{}, Waits: []PastWait{}}
	failed := map[string]bool{}
	bad, err := ReadRecord(record, func(ev plan.Event) error {
		was := b.Wait
		if ev.Kind != plan.KindLog {
			b.Apply(ev)
		}
		if was.Text != "" && b.Wait.Since != was.Since {
			out.Waits = append(out.Waits, PastWait{was.Text, was.Since, ev.Time.Sub(was.Since).Milliseconds()})
		}
		if ev.Kind == plan.KindNode && ev.To == plan.NodeFailed {
			failed[ev.Node] = true
		}
		if ev.Kind == plan.KindStep && ev.Step != "" {
			out.step(ev)
		}
		return nil
	})
	if err != nil {
		return PastRun{}, err
	}
	for _, x := range bad {
		out.Bad = append(out.Bad, x.String())
	}
	out.By = cmp.Or(out.By, b.By)
	out.Tool, out.TookMS = b.Tool, b.Last.Sub(b.Started).Milliseconds()
	out.Replaced, out.Failed, out.Nodes = b.ended.total, len(failed), len(b.nodes)
	if b.Result != nil {
		out.Resume = b.Result.Resume
	}
	if p := b.Plan; p != nil {
		out.From = p.From
		out.Accepted = append(out.Accepted, p.Warnings()...)
		for _, st := range p.Steps {
			if i := slices.IndexFunc(out.Steps, func(x PastStep) bool { return x.ID == st.ID }); i >= 0 {
				out.Steps[i].Title = st.Title
			} else {
				x := PastStep{ID: st.ID, Title: st.Title}
				if st.Finished {
					x.State = plan.StateSkipped
				}
				out.Steps = append(out.Steps, x)
			}
		}
	}
	for _, list := range [][]string{StagesOld, StagesNew} {
		for _, name := range list {
			if st := b.stages[name]; st != nil && st.total > 0 && name != plan.NodeReady && name != plan.NodeOutdated {
				out.Stages = append(out.Stages, PastStage{name, st.total, b.Dwell(name, 0.5).Milliseconds(), b.Dwell(name, 0.95).Milliseconds()})
			}
		}
	}
	slices.SortStableFunc(out.Waits, func(a, b PastWait) int { return cmp.Compare(b.TookMS, a.TookMS) })
	out.Waits = out.Waits[:min(len(out.Waits), pastWaits)]
	return out, nil
}
