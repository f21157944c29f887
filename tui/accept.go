package tui

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
)

// acceptance is how a verb gets its plan accepted without the console.
type acceptance struct {
	// yes is the flag --yes, acknowledged the findings that were acknowledged with flags.
	yes          bool
	acknowledged []string
	// asks allows prompts; question is the text of the prompt for the plan.
	asks     bool
	question func(*plan.Plan) string
	// name, if not empty, is what the user must type at that prompt; else y or yes.
	name string
	// flag is what a script passes instead; empty: --yes.
	flag string
	// access selects the cluster whose guard applies; empty means that of the workspace.
	access cluster.Access
	// show prints the plan before the prompt; nil prints its events and steps.
	show func(*plan.Plan, sink)
}

// fixedQuestion is a question that does not depend on the plan.
func fixedQuestion(text string) func(*plan.Plan) string {
	return func(*plan.Plan) string { return text }
}

// accept reports an error unless no finding blocks the plan and everything that needs
// consent is accepted, with flags or at prompts. It returns the sink for the events of the
// run. If it returns an error, it has written the refusal to out.
func (a acceptance) accept(s *session, p *plan.Plan, out sink, f format) (sink, error) {
	if list := p.Blocked(); len(list) > 0 {
		return out, refuse(s, p, out, plan.ExitBlocked, fmt.Errorf("%s: %s", words.Count(len(list), "check")+" failed", list[0].Title), list[0].Remedy)
	}
	c := plan.ConsentTo(p, a.yes, a.acknowledged)
	names := plan.IDs(c.Findings)
	switch {
	case len(names) == 0 && !c.Plan:
	case a.asks:
		if a.show != nil {
			a.show(p, out)
		} else {
			preview(s, p, out)
		}
		out.close()
		declined := func(what string) error {
			return &plan.Error{Op: string(p.Verb) + " " + p.Cluster, Err: errors.New(what + " was not accepted; nothing was changed"), Exit: plan.ExitUnacknowledged}
		}
		for _, id := range names {
			if !acknowledged(s.prompt(), c.Findings[slices.IndexFunc(c.Findings, func(f plan.Finding) bool { return f.ID == id })]) {
				return out, declined(id)
			}
		}
		confirmed := s.prompt().confirmed
		if a.name != "" {
			confirmed = func(question string) bool { return s.prompt().typed(question, a.name) }
		}
		if c.Plan && !confirmed(a.question(p)) {
			return out, declined("the plan")
		}
		out = s.printer(f, true)
	case len(names) > 0:
		return out, refuse(s, p, out, plan.ExitUnacknowledged, fmt.Errorf("%s must be acknowledged by ID", strings.Join(names, ", ")),
			"read the plan above; to acknowledge, run the same command with --ack "+strings.Join(names, " --ack "))
	default:
		return out, refuse(s, p, out, plan.ExitUnacknowledged, errors.New("the plan was not accepted"), "read the plan above, then run the same command with "+cmp.Or(a.flag, "--yes"))
	}
	p.Accept(names...)
	return out, nil
}

// acknowledged prompts for the ID of a finding. Anything else is a no.
func acknowledged(in prompt, f plan.Finding) bool {
	return in.typed(fmt.Sprintf("%s\nType %s to accept it: ", term.Clean(f.Title), term.Clean(f.ID)), f.ID)
}

// refuse reports a plan that will not run as the event stream of a run that ended before
// its first step, so that JSON output has the same information as stderr.
func refuse(s *session, p *plan.Plan, out sink, exit int, cause error, remedy string) error {
	emit := preview(s, p, out)
	emit(plan.Event{
		Kind: plan.KindResult, State: plan.StateFailed, Text: "nothing was done: " + cause.Error(), Remedy: remedy, Exit: &exit,
		Data: eventData(s.log, plan.Result{Status: plan.StateFailed}),
	})
	return &plan.Error{Op: string(p.Verb) + " " + p.Cluster, Err: cause, Remedy: remedy, Exit: exit}
}

// preview emits a plan before a run as an event stream. The returned function continues
// the stream.
func preview(s *session, pl *plan.Plan, out sink) (emit func(plan.Event)) {
	seq := uint64(0)
	emit = func(ev plan.Event) {
		seq++
		ev.Seq, ev.Time, ev.Run = seq, s.Now().UTC(), pl.ID
		out.event(ev)
	}
	data := func(v any) json.RawMessage { return eventData(s.log, v) }
	emit(plan.Event{Kind: plan.KindHello, Schema: plan.Schema, Tool: "constellation " + s.Release, Object: pl.Cluster, Simulated: pl.Simulated, NotAttested: pl.NotAttested})
	emit(plan.Event{Kind: plan.KindPlan, Data: data(pl)})
	for _, f := range pl.Findings {
		emit(plan.Event{
			Kind: plan.KindCheck, Object: f.ID, State: string(f.Severity), Source: f.Source, Text: f.Title, Remedy: f.Remedy,
			TookMS: f.Took.Milliseconds(), Data: data(f),
		})
	}
	// The steps of a blocked plan will not run.
	if p, ok := out.(*plainPrinter); ok && len(pl.Blocked()) == 0 {
		p.printSteps(pl)
	}
	return emit
}

// eventData encodes the payload of an event.
func eventData(log *slog.Logger, v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		log.Debug("event data not encoded", "err", err)
		return nil
	}
	return b
}

// runOptions are the flags of a verb that plans, prompts and runs, beside its request.
type runOptions struct {
	yes, nonInteractive bool
	timeout             time.Duration
	out                 format
}

// planAndRun runs a verb without the console: it plans, gets the plan accepted as a
// describes, and runs it. It sets a.yes and a.asks from o.
func planAndRun(ctx context.Context, s *session, o runOptions, a acceptance, plan func(context.Context, Engine) (*plan.Plan, error)) error {
	out := s.printer(o.out, true)
	defer func() { out.close() }()
	eng, _, _, err := s.engineOf()
	if err != nil {
		return unplanned(s, out, o.out, err)
	}
	if err := unlock(s, a.access, o.out, o.nonInteractive); err != nil {
		return err
	}
	ctx, stop := s.limited(ctx, o.timeout)
	defer stop()
	p, err := plan(ctx, eng)
	if err != nil {
		return unplanned(s, out, o.out, err)
	}
	a.yes, a.asks = o.yes, o.out == text && !o.nonInteractive && s.asks()
	out, err = a.accept(s, p, out, o.out)
	if err != nil {
		return err
	}
	return eng.Run(ctx, p, out.event)
}
