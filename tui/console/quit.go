package console

import (
	"syscall"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
	"constellation/tui/term"
)

// quitting is how the console ends: the question during a run, the stop of the run, and the
// exit code.
type quitting struct {
	c       *console
	asking  bool // the question whether to leave is shown
	askedAt time.Time
	pending bool // quit when the run has stopped
	exit    int
	exitSet bool // the end of the run does not change exit
}

// leave quits; during a run it asks for confirmation first.
func (q *quitting) leave() tea.Cmd {
	q.c.help.open, q.c.pal, q.c.rollout.prompt = false, palette{}, nil
	if !q.c.running {
		return tea.Quit
	}
	if q.pending {
		return q.now()
	}
	q.asking, q.askedAt = true, q.c.now
	return nil
}

// interruptAgain handles Ctrl-C while the question whether to leave is shown.
func (q *quitting) interruptAgain() tea.Cmd {
	if q.c.now.Sub(q.askedAt) <= doublePress {
		return q.now()
	}
	return q.detach()
}

// detach stops the run at a point from which it can be resumed, then quits.
func (q *quitting) detach() tea.Cmd {
	q.asking, q.pending = false, true
	if q.c.task.cancel == nil {
		return tea.Quit
	}
	q.c.task.cancel()
	return nil
}

// now quits without waiting for the current step: the machines finish it, and the next
// start finds the result.
func (q *quitting) now() tea.Cmd {
	q.asking, q.pending = false, true
	if q.c.backup.running { // the partial backup is deleted first
		q.c.task.stop()
		return tea.Tick(stopTimeout, func(time.Time) tea.Msg { return stopTimedOut{} })
	}
	q.c.task.stop()
	if !q.exitSet {
		q.exit = plan.ExitStopped
		if q.c.t.PastFinal() && q.c.changes.resume == "" {
			q.exit = plan.ExitDone
		}
		q.exitSet = true
	}
	return tea.Quit
}

// signal quits with the exit code of a signal.
func (q *quitting) signal(sig syscall.Signal) tea.Cmd {
	q.exit, q.exitSet = 128+int(sig), true
	q.pending = true
	if !q.c.running || q.c.task.cancel == nil {
		return tea.Quit
	}
	q.c.task.cancel()
	return tea.Tick(stopTimeout, func(time.Time) tea.Msg { return stopTimedOut{} })
}

// label is the label of the key q.
func (q *quitting) label() string {
	if q.c.running && !q.c.backup.running && q.c.changes.resume == "" {
		return "detach"
	}
	return "quit"
}

// question asks whether to leave and says what that does.
func (q *quitting) question() []string {
	what := "The current step finishes first; the same command resumes."
	if q.c.backup.running {
		return []string{
			q.c.th.Row(q.c.w).Add(term.Plain, " ").Add(term.Caution, q.c.th.Warn+" Stop this backup, and leave? ").Add(term.Plain, "Its files are deleted.").String(),
			q.c.th.Row(q.c.w).Add(term.Faint, "   Enter leaves, Esc stays. Complete backups are kept.").String(),
		}
	}
	switch {
	case q.c.machineAdd.stage == addWaits:
		what = "The token is worthless then; the same command makes another."
	case q.c.changes.resume != "":
		what = "The work stops; the same command continues it."
	case q.c.t.PastFinal():
		what = "The cluster continues alone; the same command reattaches."
	}
	return []string{
		q.c.th.Row(q.c.w).Add(term.Plain, " ").Add(term.Caution, q.c.th.Warn+" Leave this run? ").Add(term.Plain, what).String(),
		q.c.th.Row(q.c.w).Add(term.Faint, "   Enter leaves, Esc stays, Ctrl-C again leaves at once. Nothing is lost.").String(),
	}
}

// keys answer the question.
func (q *quitting) keys() []binding {
	stay := on("n esc q", "Esc", "stay", "leave", act(func() { q.asking = false })).footed("stay")
	if q.c.backup.running {
		return []binding{
			on("y enter ctrl+c", "Enter", "stop the backup, delete its files, and leave", "leave", q.detach).footed("stop it and leave"),
			stay,
		}
	}
	return []binding{
		on("y enter", "Enter", "leave; the run can be resumed", "leave", q.detach).footed("leave, resume later"),
		on("ctrl+c", "Ctrl-C", "leave at once", "leave", q.interruptAgain).footed("leave at once"),
		stay,
	}
}
