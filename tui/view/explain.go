package view

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui/term"
)

// explanation is an error in the parts that the console and stderr show.
type explanation struct {
	What, Why, Remedy string
	details           []string // one line each
}

// Explain splits an error into its parts. All text is clean, and commands are formatted for
// the user.
func Explain(err error, sp CommandFormatter) explanation {
	var x explanation
	var list *workspace.ConfigErrors
	var e *plan.Error
	switch {
	case errors.As(err, &list):
		x.What = fmt.Sprintf("%s has %s", term.Clean(list.File), words.Count(len(list.Errors), "error"))
		for _, f := range list.Errors {
			var parts []string
			if f.Line > 0 {
				parts = append(parts, fmt.Sprintf("line %d", f.Line))
			}
			if f.Field != "" {
				parts = append(parts, term.Clean(f.Field))
			}
			x.details = append(x.details, strings.Join(append(parts, term.Clean(f.Problem)), ": "))
			if f.Remedy != "" {
				x.details = append(x.details, "  fix: "+sp.Text(term.Clean(f.Remedy)))
			}
		}
	case errors.As(err, &e) && e.Op != "" && e.Err != nil:
		x.What, x.Why = term.Clean(e.Op), term.OneLine(term.CleanLines(e.Err.Error()))
	default:
		x.What = term.OneLine(term.CleanLines(err.Error()))
	}
	x.Remedy = sp.Text(term.Clean(plan.Remedy(err)))
	if x.Remedy == "" && errors.Is(err, context.DeadlineExceeded) {
		x.Remedy = "run the same command again; completed steps are kept"
	}
	return x
}

// WriteError writes err in the form that all errors have:
//
//	error   connect to the first machine at 127.0.0.1:9000
//	cause   connection refused
//	fix     start the sandbox: constellation sandbox up
func WriteError(w io.Writer, sp CommandFormatter, err error) {
	x := Explain(err, sp)
	fmt.Fprintf(w, "error   %s\n", x.What)
	if x.Why != "" {
		fmt.Fprintf(w, "cause   %s\n", x.Why)
	}
	for _, d := range x.details {
		fmt.Fprintf(w, "        %s\n", d)
	}
	if x.Remedy != "" {
		fmt.Fprintf(w, "fix     %s\n", x.Remedy)
	}
}
