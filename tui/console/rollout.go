package console

import (
	"context"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/cluster"
	"constellation/tui/view"
)

// rolloutControl changes a rollout in progress, each time after a confirmation.
type rolloutControl struct {
	c      *console
	prompt *rolloutPrompt // the pending confirmation; nil if there is none
}

// rolloutChanged is the answer to a change.
type rolloutChanged struct {
	what string
	err  error
}

// rolloutPrompt is the confirmation of a change to the rollout: pause, resume, cancel.
type rolloutPrompt struct {
	text, detail, yes string
	do                func() tea.Cmd
}

// keys pause, resume and cancel the rollout.
func (r *rolloutControl) keys() []binding {
	return []binding{
		on("P", "P", "pause: start no more "+r.unit(), "changes the cluster", act(func() {
			yes := true
			detail := r.finish() + ", no new ones start."
			if r.c.deps.Machines == nil { // which no autoscaler makes
				detail += " After 10 minutes the cluster autoscaler runs again."
			}
			r.prompt = &rolloutPrompt{
				"Pause the rollout?", detail, "pause",
				r.change("paused", cluster.RolloutChange{Paused: &yes}),
			}
		})).footed("pause").effects().unless(r.targetNotSet),
		on("R", "R", "resume: continue a paused or cancelled rollout", "changes the cluster", act(func() {
			no := false
			r.prompt = &rolloutPrompt{"Resume the rollout?", "It continues to the same target.", "resume", r.change("resumed", cluster.RolloutChange{Paused: &no, Cancelled: &no})}
		})).footed("resume").effects().unless(r.targetNotSet),
		on("C", "C", "cancel: leave the other nodes on the old version", "changes the cluster", act(func() {
			yes := true
			r.prompt = &rolloutPrompt{
				"Cancel the rollout?", r.finish() + ", other nodes keep the old version. R resumes to the same target.", "cancel it",
				r.change("cancelled", cluster.RolloutChange{Cancelled: &yes}),
			}
		})).effects().unless(r.targetNotSet),
	}
}

// unit is what a rollout consists of: nodes of a list of machines are upgraded in place.
func (r *rolloutControl) unit() string {
	if r.c.deps.Machines != nil {
		return "upgrades of nodes"
	}
	return "replacements"
}

// finish is the beginning of the sentence about those in progress.
func (r *rolloutControl) finish() string {
	u := r.unit()
	return strings.ToUpper(u[:1]) + u[1:] + " in progress finish"
}

// targetNotSet returns why a rollout cannot be changed yet.
func (r *rolloutControl) targetNotSet() string {
	if r.c.screen == r.c.watch && r.c.watch.origin != fromRun {
		return r.c.watch.readOnlyReason()
	}
	switch {
	case r.c.plan != nil && r.c.plan.Rehearsal:
		return "this is a rehearsal"
	case r.c.upg.active() && !r.c.t.PastFinal():
		return "no node is being changed yet; q stops after this step"
	}
	return ""
}

func (r *rolloutControl) promptKeys() []binding {
	return []binding{
		on("enter y", "Enter", "confirm", "do", r.confirm).footed("confirm"),
		on("esc n q", "Esc", "go back without a change", "back", act(func() { r.prompt = nil })).footed("back"),
		on("ctrl+c", "Ctrl-C", "leave", "leave", func() tea.Cmd { r.prompt = nil; return r.c.quit.leave() }),
	}
}

func (r *rolloutControl) confirm() tea.Cmd {
	q := r.prompt
	r.prompt = nil
	return q.do()
}

// change returns an action that changes the rollout without disturbing the current task.
func (r *rolloutControl) change(what string, change cluster.RolloutChange) func() tea.Cmd {
	return func() tea.Cmd {
		if r.c.guard.stops() {
			return nil
		}
		r.c.note = "sending the request"
		eng, ctx := r.c.deps.Engine, r.c.ctx
		return func() tea.Msg {
			ctx, cancel := context.WithTimeout(ctx, staleAfter)
			defer cancel()
			_, err := eng.ChangeRollout(ctx, change)
			return rolloutChanged{what, err}
		}
	}
}

func (r *rolloutControl) took(msg rolloutChanged) {
	if msg.err != nil {
		x := view.Explain(msg.err, r.c.deps.Commands)
		r.c.note = x.What
		if x.Why != "" {
			r.c.note += ": " + x.Why
		}
		return
	}
	r.c.note = "the rollout is " + msg.what
}
