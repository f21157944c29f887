package tui

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"constellation/engine"
)

// consent is what a person must still say before a plan may run.
type consent struct {
	// names are findings that are accepted by their name alone.
	names []engine.Finding
	// yes says that the plan itself must be accepted, with its ordinary warnings.
	yes bool
}

// consentTo returns what a plan still needs. yes says that it was accepted, acknowledged
// are the IDs of findings that were. All warnings accepted by name are as good as a yes.
// What has no effect needs nothing.
func consentTo(p *engine.Plan, yes bool, acknowledged []string) consent {
	if p.Rehearsal {
		return consent{}
	}
	warned := slices.DeleteFunc(p.Warnings(), func(f engine.Finding) bool { return f.Named || slices.Contains(acknowledged, f.ID) })
	harmless := p.Finished() || p.OnlyWatches()
	return consent{names: p.Unacknowledged(), yes: !yes && !harmless && (len(warned) > 0 || len(p.Warnings()) == 0)}
}

// acceptance is how a verb has its plan accepted where the console is not shown.
type acceptance struct {
	// yes says that the plan is accepted, acknowledged are findings that are.
	yes          bool
	acknowledged []string
	// asks says that somebody is there to answer, question what they are asked.
	asks     bool
	question string
	// name, if not empty, is what must be typed in answer to the question; else it is y or
	// yes.
	name string
	// show tells whoever is asked what it is about.
	show func(*engine.Plan, sink)
}

// accept makes sure that a plan may run: that no finding forbids it, and that all is
// accepted that must be, with flags or by whoever is asked. Nothing is asked later. It
// returns where events go to from now on; with an error all was told.
func (s *session) accept(p *engine.Plan, out sink, f format, a acceptance) (sink, error) {
	if list := p.Blocked(); len(list) > 0 {
		return out, s.refuse(p, out, engine.ExitBlocked, fmt.Errorf("%s: %s", count(len(list), "check")+" failed", list[0].Title), list[0].Remedy)
	}
	c := consentTo(p, a.yes, a.acknowledged)
	names := ids(c.names)
	switch {
	case len(names) == 0 && !c.yes:
	case a.asks:
		a.show(p, out)
		out.close()
		declined := func(what string) error {
			return &engine.Error{Op: string(p.Verb) + " " + p.Cluster, Err: errors.New(what + " was not accepted; nothing was changed"), Exit: engine.ExitUnacknowledged}
		}
		for _, id := range names {
			if !s.typed(c.names[slices.IndexFunc(c.names, func(f engine.Finding) bool { return f.ID == id })]) {
				return out, declined(id)
			}
		}
		confirmed := s.confirmed
		if a.name != "" {
			confirmed = func(question string) bool { return s.typedAs(question, a.name) }
		}
		if c.yes && !confirmed(a.question) {
			return out, declined("the plan")
		}
		out = s.printer(f, true)
	case len(names) > 0:
		return out, s.refuse(p, out, engine.ExitUnacknowledged, fmt.Errorf("%s must be accepted by name", strings.Join(names, ", ")),
			"read the plan above; if it is meant as it is, run the same command with --ack "+strings.Join(names, " --ack "))
	default:
		return out, s.refuse(p, out, engine.ExitUnacknowledged, errors.New("the plan was not accepted"), "read the plan above, then run the same command with --yes")
	}
	p.Accept(names...)
	return out, nil
}

// ids are those of findings, each once.
func ids(findings []engine.Finding) (out []string) {
	for _, f := range findings {
		if !slices.Contains(out, f.ID) {
			out = append(out, f.ID)
		}
	}
	return out
}

// typed asks for the name of a finding. Anything else is a no.
func (s *session) typed(f engine.Finding) bool {
	return s.typedAs(fmt.Sprintf("%s\nType %s to accept it: ", clean(f.Title), clean(f.ID)), f.ID)
}

// typedAs asks for a word. Anything else is a no.
func (s *session) typedAs(question, word string) bool {
	if f, ok := s.Stdin.(*os.File); ok {
		dropTyped(f)
	}
	fmt.Fprint(s.Stderr, question)
	line, err := bufio.NewReader(s.Stdin).ReadString('\n')
	return err == nil && strings.TrimSpace(line) == word
}
