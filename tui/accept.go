package tui

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

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
	// show prints the plan before the prompt.
	show func(*plan.Plan, sink)
}

// fixedQuestion is a question that does not depend on the plan.
func fixedQuestion(text string) func(*plan.Plan) string {
	return func(*plan.Plan) string { return text }
}

// accept reports an error unless no finding blocks the plan and everything that needs
// consent is accepted, with flags or at prompts. It returns the sink for the events of the
// run. If it returns an error, it has written the refusal to out.
func (s *session) accept(p *plan.Plan, out sink, f format, a acceptance) (sink, error) {
	if list := p.Blocked(); len(list) > 0 {
		return out, s.refuse(p, out, plan.ExitBlocked, fmt.Errorf("%s: %s", words.Count(len(list), "check")+" failed", list[0].Title), list[0].Remedy)
	}
	c := plan.ConsentTo(p, a.yes, a.acknowledged)
	names := plan.IDs(c.Findings)
	switch {
	case len(names) == 0 && !c.Plan:
	case a.asks:
		a.show(p, out)
		out.close()
		declined := func(what string) error {
			return &plan.Error{Op: string(p.Verb) + " " + p.Cluster, Err: errors.New(what + " was not accepted; nothing was changed"), Exit: plan.ExitUnacknowledged}
		}
		for _, id := range names {
			if !s.acknowledged(c.Findings[slices.IndexFunc(c.Findings, func(f plan.Finding) bool { return f.ID == id })]) {
				return out, declined(id)
			}
		}
		confirmed := s.confirmed
		if a.name != "" {
			confirmed = func(question string) bool { return s.prompted(question, a.name) }
		}
		if c.Plan && !confirmed(a.question(p)) {
			return out, declined("the plan")
		}
		out = s.printer(f, true)
	case len(names) > 0:
		return out, s.refuse(p, out, plan.ExitUnacknowledged, fmt.Errorf("%s must be acknowledged by ID", strings.Join(names, ", ")),
			"read the plan above; to acknowledge, run the same command with --ack "+strings.Join(names, " --ack "))
	default:
		return out, s.refuse(p, out, plan.ExitUnacknowledged, errors.New("the plan was not accepted"), "read the plan above, then run the same command with --yes")
	}
	p.Accept(names...)
	return out, nil
}

// acknowledged prompts for the ID of a finding. Anything else is a no.
func (s *session) acknowledged(f plan.Finding) bool {
	return s.prompted(fmt.Sprintf("%s\nType %s to accept it: ", term.Clean(f.Title), term.Clean(f.ID)), f.ID)
}

// prompted prints question and reports whether the user typed want.
func (s *session) prompted(question, want string) bool {
	if f, ok := s.Stdin.(*os.File); ok {
		term.DiscardInput(f)
	}
	fmt.Fprint(s.Stderr, question)
	line, err := bufio.NewReader(s.Stdin).ReadString('\n')
	return err == nil && strings.TrimSpace(line) == want
}
