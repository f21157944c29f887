package tui

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"constellation/engine"
)

// explanation is an error in the parts that the console and stderr show.
type explanation struct {
	what, why, remedy string
	details           []string // one line each
}

// explain splits an error into its parts. All text is clean, and commands are formatted for
// the user.
func explain(err error, sp commandFormatter) explanation {
	var x explanation
	var list *engine.ConfigErrors
	var e *engine.Error
	switch {
	case errors.As(err, &list):
		x.what = fmt.Sprintf("%s has %s", clean(list.File), count(len(list.Errors), "error"))
		for _, f := range list.Errors {
			var parts []string
			if f.Line > 0 {
				parts = append(parts, fmt.Sprintf("line %d", f.Line))
			}
			if f.Field != "" {
				parts = append(parts, clean(f.Field))
			}
			x.details = append(x.details, strings.Join(append(parts, clean(f.Problem)), ": "))
			if f.Remedy != "" {
				x.details = append(x.details, "  fix: "+sp.text(clean(f.Remedy)))
			}
		}
	case errors.As(err, &e) && e.Op != "" && e.Err != nil:
		x.what, x.why = clean(e.Op), oneLine(cleanLines(e.Err.Error()))
	default:
		x.what = oneLine(cleanLines(err.Error()))
	}
	x.remedy = sp.text(clean(engine.Remedy(err)))
	if x.remedy == "" && errors.Is(err, context.DeadlineExceeded) {
		x.remedy = "run the same command again; completed steps are kept"
	}
	return x
}

// writeError writes err in the form that all errors have:
//
//	error   connect to the first machine at 127.0.0.1:9000
//	cause   connection refused
//	fix     start the sandbox: constellation sandbox up
func writeError(w io.Writer, sp commandFormatter, err error) {
	x := explain(err, sp)
	fmt.Fprintf(w, "error   %s\n", x.what)
	if x.why != "" {
		fmt.Fprintf(w, "cause   %s\n", x.why)
	}
	for _, d := range x.details {
		fmt.Fprintf(w, "        %s\n", d)
	}
	if x.remedy != "" {
		fmt.Fprintf(w, "fix     %s\n", x.remedy)
	}
}
