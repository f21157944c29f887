package tui

import (
	"encoding/json"
	"time"

	"constellation/engine/plan"
)

// framed turns the events of a verb without a plan into a complete stream: hello first,
// result last, all with sequence numbers and times.
type framed struct {
	out    sink
	now    func() time.Time
	seq    uint64
	began  time.Time
	opened bool
	ended  bool
	hello  plan.Event
}

func (f *framed) event(ev plan.Event) {
	if !f.opened {
		f.opened = true
		if ev.Kind != plan.KindHello {
			f.event(f.hello)
		}
	}
	f.seq++
	ev.Seq = f.seq
	if ev.Time.IsZero() {
		ev.Time = f.now().UTC()
	}
	f.ended = f.ended || ev.Kind == plan.KindResult
	f.out.event(ev)
}

// end emits the result, unless there was one.
func (f *framed) end(text string, err error, res plan.Result) {
	if f.ended {
		return
	}
	exit := plan.ExitCode(err)
	res.Status, res.TookMS = plan.StateDone, f.now().Sub(f.began).Milliseconds()
	ev := plan.Event{Kind: plan.KindResult, State: plan.StateDone, Text: text, Exit: &exit, TookMS: res.TookMS}
	if err != nil {
		ev.State, ev.Text, ev.Remedy = plan.StateFailed, err.Error(), plan.Remedy(err)
		res = plan.Result{Status: plan.StateFailed, TookMS: res.TookMS}
	}
	if b, err := json.Marshal(res); err == nil {
		ev.Data = b
	}
	f.event(ev)
}

// unplanned ends the event stream of a verb whose planning failed with err, so that
// readers of events get a complete stream. It returns err.
func unplanned(s *session, out sink, f format, err error) error {
	if f != text {
		s.framed(out, "").end("", err, plan.Result{})
	}
	return err
}
