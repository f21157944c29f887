package console

import (
	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
	"constellation/tui/term"
)

// changing is the change of machines that runs. Leaving stops it, and the same command continues.
type changing struct {
	c      *console
	resume string // the command that continues; empty: nothing runs, and nothing was left
	made   bool   // machines were changed
}

func (x *changing) begin(command string) {
	x.wait(command)
	x.made = true
}

// wait begins a wait for machines that call. None is changed yet.
func (x *changing) wait(command string) { x.resume, x.c.running = command, true }

// end takes the result, and quits if the user has left.
func (x *changing) end(err error) tea.Cmd {
	c := x.c
	c.running, c.quit.asking = false, false
	if err == nil || !c.quit.pending {
		x.resume = ""
	}
	if c.quit.pending {
		if !c.quit.exitSet && err != nil {
			c.quit.exit = plan.ExitStopped
		}
		return tea.Quit
	}
	return tea.Batch(c.machines.read(), c.overview.read())
}

// drop forgets a change that ended without an effect.
func (x *changing) drop() { x.resume, x.c.running = "", false }

// running is why another key is off.
func (x *changing) running() string {
	if x.resume != "" {
		return "machines are being changed; q leaves, and loses nothing"
	}
	return ""
}

// doing is the line about the current work; nil if there is none.
func (x *changing) doing() []string {
	c := x.c
	text := "Now: " + c.task.busy
	switch {
	case c.quit.pending && x.resume != "":
		text = "Leaving when the step can be repeated. Ctrl-C leaves at once."
	case c.task.busy == "":
		return nil
	}
	return []string{c.th.Row(c.w).Add(term.Plain, " ").Add(term.Accent, c.th.Spin(c.frame)+" ").Add(term.Plain, text).String()}
}

// init plans init, which publishes the list and makes machines nodes.
func (x *changing) init() tea.Cmd {
	x.c.wizard.resumed = false
	return x.c.wizard.makePlan()
}
