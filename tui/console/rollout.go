package console

import (
	"context"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/cluster"
	"constellation/tui/view"
)

// rolloutPrompt is the confirmation of a change to the rollout: pause, resume, cancel.
type rolloutPrompt struct {
	text, detail, yes string
	do                func() tea.Cmd
}

// rolloutKeys change a rollout in progress, after a confirmation.
func (c *console) rolloutKeys() []binding {
	return []binding{
		on("P", "P", "pause: start no more replacements", "changes the cluster", act(func() {
			yes := true
			c.rolloutPrompt = &rolloutPrompt{
				"Pause the rollout?", "Replacements in progress finish, no new ones start. After 10 minutes the cluster autoscaler runs again.", "pause",
				c.changeRollout("paused", cluster.RolloutChange{Paused: &yes}),
			}
		})).footed("pause").unless(c.targetNotSet),
		on("R", "R", "resume: continue a paused or cancelled rollout", "changes the cluster", act(func() {
			no := false
			c.rolloutPrompt = &rolloutPrompt{"Resume the rollout?", "It continues to the same target.", "resume", c.changeRollout("resumed", cluster.RolloutChange{Paused: &no, Cancelled: &no})}
		})).footed("resume").unless(c.targetNotSet),
		on("C", "C", "cancel: leave the other nodes on the old version", "changes the cluster", act(func() {
			yes := true
			c.rolloutPrompt = &rolloutPrompt{
				"Cancel the rollout?", "Replacements in progress finish, other nodes keep the old version. R resumes to the same target.", "cancel it",
				c.changeRollout("cancelled", cluster.RolloutChange{Cancelled: &yes}),
			}
		})).unless(c.targetNotSet),
	}
}

// targetNotSet returns why a rollout cannot be changed yet.
func (c *console) targetNotSet() string {
	if c.screen == c.watch && c.watch.origin != fromRun {
		return c.watch.readOnlyReason()
	}
	switch {
	case c.plan != nil && c.plan.Rehearsal:
		return "this is a rehearsal"
	case c.upgrading() && !c.t.PastFinal():
		return "no node is being replaced yet; q stops after this step"
	}
	return ""
}

func (c *console) rolloutPromptKeys() []binding {
	return []binding{
		on("enter y", "Enter", "confirm", "do", c.confirmRolloutChange).footed("confirm"),
		on("esc n q", "Esc", "go back without a change", "back", act(func() { c.rolloutPrompt = nil })).footed("back"),
		on("ctrl+c", "Ctrl-C", "leave", "leave", func() tea.Cmd { c.rolloutPrompt = nil; return c.leave() }),
	}
}

func (c *console) confirmRolloutChange() tea.Cmd {
	q := c.rolloutPrompt
	c.rolloutPrompt = nil
	return q.do()
}

// changeRollout returns an action that changes the rollout without disturbing the current task.
func (c *console) changeRollout(what string, change cluster.RolloutChange) func() tea.Cmd {
	return func() tea.Cmd {
		c.note = "sending the request"
		eng, ctx := c.deps.Engine, c.ctx
		return func() tea.Msg {
			ctx, cancel := context.WithTimeout(ctx, staleAfter)
			defer cancel()
			_, err := eng.ChangeRollout(ctx, change)
			return rolloutChanged{what, err}
		}
	}
}

func (c *console) tookRolloutChange(msg rolloutChanged) {
	if msg.err != nil {
		x := view.Explain(msg.err, c.deps.Commands)
		c.note = x.What
		if x.Why != "" {
			c.note += ": " + x.Why
		}
		return
	}
	c.note = "the rollout is " + msg.what
}
