package view

import (
	"fmt"
	"slices"

	"constellation/engine/plan"
	"constellation/tui/term"
)

// CheckRow is a check on one line.
func CheckRow(pg Page, x Check, w int, here bool) string {
	sign, st := severitySign(pg, plan.Severity(x.State))
	if x.State == plan.StateRunning {
		sign, st = pg.Spin(), term.Accent
	}
	name := term.Plain
	if here {
		name = term.Strong
	}
	r := pg.Row(w).Add(term.Accent, Marker(pg, here)).Add(st, sign).Add(term.Plain, " ").Col(term.Faint, x.source, 11)
	tail := ""
	if x.took > 0 {
		tail = fmt.Sprintf("%.2fs", x.took.Seconds())
	}
	return r.Add(name, term.Cut(x.Title, w-r.Used-term.Width(tail)-3, pg.Ellipsis)).Right(term.Faint, tail).String()
}

// CheckDetail renders the cause and the remedy of a check.
func CheckDetail(pg Page, x Check, w, indent int) []string {
	var lines []string
	parts := []struct{ head, text string }{{"why", x.Detail}, {"fix", pg.Commands.Text(x.Remedy)}}
	if indent > 0 && term.Width(x.Title) > w-indent-3 { // the row shows only its beginning
		parts = slices.Insert(parts, 0, struct{ head, text string }{"what", x.Title})
	}
	for _, p := range parts {
		if p.text == "" {
			continue
		}
		for i, l := range term.Wrap(p.text, max(10, w-indent-7)) {
			r := pg.Row(w).Pad(indent)
			if i == 0 {
				r.Col(term.Faint, p.head, 4)
			} else {
				r.Pad(5)
			}
			st := term.Plain
			if p.head == "fix" {
				st = term.Accent
			}
			lines = append(lines, r.Add(st, l).String())
		}
	}
	return lines
}

// InitPlanRows are the findings and the steps of the plan, with the effect of each.
func InitPlanRows(pg Page, w int, plan *plan.Plan) []string {
	var rows []string
	for _, f := range slices.Concat(plan.Blocked(), plan.Warnings()) {
		sign, st := severitySign(pg, f.Severity)
		for i, l := range term.Wrap(term.Clean(f.Title), w-6) {
			r := pg.Row(w).Pad(5)
			if i == 0 {
				r = pg.Row(w).Add(term.Plain, " ").Add(st, " "+sign+"  ")
			}
			rows = append(rows, r.Add(term.Strong, l).String())
		}
		for _, l := range term.Wrap(term.CleanLines(f.Detail), w-8) {
			if l != "" {
				rows = append(rows, pg.Row(w).Pad(5).Add(term.Faint, l).String())
			}
		}
		if f.Remedy != "" {
			for _, l := range term.Wrap(pg.Commands.Text(term.Clean(f.Remedy)), w-8) {
				rows = append(rows, pg.Row(w).Pad(5).Add(term.Accent, l).String())
			}
		}
	}
	if len(plan.Blocked()) > 0 {
		return rows // the steps of a blocked plan will not run
	}
	for i, s := range plan.Steps {
		sign, st := fmt.Sprintf("%2d", i+1), term.Faint
		if s.Finished {
			sign, st = " "+pg.OK, term.Good
		}
		r := pg.Row(w).Add(term.Plain, " ").Add(st, sign).Add(term.Plain, "  ").Add(term.Strong, term.Clean(s.Title))
		switch {
		case s.Finished:
			r.Right(term.Faint, "already done")
		case s.Final:
			r.Right(term.Caution, "point of no return")
		}
		rows = append(rows, r.String())
		for _, l := range term.Wrap(term.Clean(s.Effect), w-8) {
			if l != "" {
				rows = append(rows, pg.Row(w).Pad(5).Add(term.Faint, l).String())
			}
		}
		if s.Warning != "" && !s.Finished {
			for i, l := range term.Wrap(term.Clean(s.Warning), w-10) {
				lead := "  "
				if i == 0 {
					lead = pg.Warn + " "
				}
				rows = append(rows, pg.Row(w).Pad(5).Add(term.Caution, lead).Add(term.Plain, l).String())
			}
		}
	}
	return rows
}
