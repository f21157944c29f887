package view

import (
	"fmt"
	"slices"

	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/tui/term"
)

// RailStop is an entry of the progress line of an upgrade.
type RailStop struct {
	Name, Sign string
	SignStyle  term.Style
	NameStyle  term.Style
	Done       bool
}

// ScreenStops are the screens of an upgrade before its run. at is the current one, failed
// whether it cannot continue.
func ScreenStops(pg Page, names []string, at int, failed bool) (stops []RailStop) {
	for i, n := range names {
		x := RailStop{n, pg.Pending, term.Faint, term.Faint, i < at}
		switch {
		case i < at:
			x.Sign, x.SignStyle, x.NameStyle = pg.OK, term.Good, term.Plain
		case i == at && failed:
			x.Sign, x.SignStyle, x.NameStyle = pg.Fail, term.Bad, term.Strong
		case i == at:
			x.Sign, x.SignStyle, x.NameStyle = pg.Running, term.Accent, term.Strong
		}
		stops = append(stops, x)
	}
	return stops
}

// StepStops are the steps of a run; running reports whether it is in progress.
func StepStops(pg Page, steps []Step, running bool) (stops []RailStop) {
	for i := range steps {
		p := &steps[i]
		x := RailStop{Name: p.ID, NameStyle: term.Plain}
		x.Sign, x.SignStyle = StepSign(pg, p, running)
		x.Done = p.State == plan.StateDone || p.State == plan.StateSkipped
		switch p.State {
		case "":
			x.Sign, x.SignStyle, x.NameStyle = pg.Pending, term.Faint, term.Faint
		case plan.StateRunning:
			if x.NameStyle = term.Strong; running {
				x.Sign = pg.Running
			}
		}
		stops = append(stops, x)
	}
	return stops
}

// Rail draws the progress line of an upgrade in w columns. If it is too long, finished entries
// lose their names, the first one first.
func Rail(pg Page, w int, stops []RailStop) string {
	used := 1
	for _, x := range stops {
		used += term.Width(x.Sign) + term.Width(x.Name) + 4
	}
	r := pg.Row(w).Add(term.Plain, " ")
	for i, x := range stops {
		r.Add(x.SignStyle, x.Sign)
		if used-3 > w && x.Done && i < len(stops)-1 {
			used -= term.Width(x.Name) + 1
		} else {
			r.Add(x.NameStyle, " "+x.Name)
		}
		if i < len(stops)-1 {
			line := pg.Signs.Rule
			if x.Done {
				line = pg.Heavy
			}
			r.Add(term.Faint, " "+line+" ")
		}
	}
	return r.String()
}

// railPart is an entry of the progress line of a watch: a step or a group of nodes.
type railPart struct {
	name, state string
}

// BoardRail is the progress line of a watch: the steps of the run, then the groups of nodes.
func BoardRail(pg Page, w int, b *rollout.Board) string {
	r := pg.Row(w).Add(term.Plain, " ")
	parts := railParts(b, w)
	for i, p := range parts {
		sign, st, name := pg.Pending, term.Faint, term.Faint
		switch p.state {
		case plan.StateDone, plan.StateSkipped:
			sign, st, name = pg.OK, term.Good, term.Plain
		case plan.StateRunning:
			sign, st, name = pg.Running, term.Accent, term.Strong
		case plan.StateFailed:
			sign, st, name = pg.Fail, term.Bad, term.Strong
		case plan.StateStopped, plan.StateDetached:
			sign, st, name = pg.Stopped, term.Caution, term.Plain
		}
		if i > 0 {
			line := pg.Signs.Rule
			if p.state != "" {
				line = pg.Heavy
			}
			r.Add(term.Faint, " "+line+" ")
		}
		r.Add(st, sign).Add(name, " "+p.name)
	}
	if len(parts) == 0 {
		r.Add(term.Faint, "nothing is known yet")
	}
	return r.String()
}

// railParts are the entries of BoardRail that fit w columns: finished steps are folded first,
// then only the first groups are shown.
func railParts(b *rollout.Board, w int) []railPart {
	parts := stepParts(b)
	steps := 0
	for _, s := range b.Steps {
		if s.ID != plan.StepRollout {
			steps++
		}
	}
	parts = append(parts, groupParts(b)...)
	long := func(ps []railPart) int {
		n := 1
		for _, p := range ps {
			n += term.Width(p.name) + 5
		}
		return n
	}
	finished := func(p railPart) bool { return p.state == plan.StateDone || p.state == plan.StateSkipped }
	if steps > 1 && long(parts) > w && !slices.ContainsFunc(parts[:steps], func(p railPart) bool { return !finished(p) }) {
		parts = append([]railPart{{fmt.Sprintf("%d steps", steps), plan.StateDone}}, parts[steps:]...)
	}
	if most := max(2, (w-20)/14); len(parts) > most && long(parts) > w {
		more := len(parts) - most
		parts = append(parts[:most:most], railPart{fmt.Sprintf("%d more", more), ""})
	}
	return parts
}

// stepParts are the steps before the rollout, then the upgrade of Kubernetes in it.
func stepParts(b *rollout.Board) (parts []railPart) {
	for _, s := range b.Steps {
		if s.ID != plan.StepRollout {
			parts = append(parts, railPart{term.Clean(s.ID), term.Clean(s.State)})
		}
	}
	for _, s := range b.Steps {
		for _, p := range s.Parts {
			if s.ID == plan.StepRollout && p.Name == "kubernetes" {
				parts = append(parts, railPart{"kubeadm", term.Clean(p.State)})
			}
		}
	}
	return parts
}

// groupParts are the groups of nodes, control planes first.
func groupParts(b *rollout.Board) (parts []railPart) {
	for _, control := range []bool{true, false} {
		for _, g := range b.Groups() {
			if g.Control != control || g.Total == 0 {
				continue
			}
			p := railPart{fmt.Sprintf("%s %d/%d", term.Clean(g.Name), g.Done(), g.Total), plan.StateRunning}
			switch {
			case g.Done() == g.Total:
				p.state = plan.StateDone
			case g.Counts[plan.NodeFailed] > 0:
				p.state = plan.StateFailed
			case g.Counts[plan.NodeOutdated]+g.Done() == g.Total:
				p.state = ""
			}
			parts = append(parts, p)
		}
	}
	return parts
}
