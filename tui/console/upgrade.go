package console

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/tui/term"
	"constellation/tui/view"
)

// Upgrade describes the upgrade that the console shows.
type Upgrade struct {
	Request engine.ApplyRequest
	// verb is the equivalent command line without flags.
	verb string
	// yes skips the confirmation.
	yes  bool
	Plan func(context.Context, Engine, engine.ApplyRequest, func(plan.Event)) (*plan.Plan, error)
}

// Apply is an upgrade with all of its steps.
func Apply(r engine.ApplyRequest, yes bool) *Upgrade {
	return &Upgrade{
		Request: r, yes: yes, verb: string(plan.VerbApply),
		Plan: func(ctx context.Context, e Engine, r engine.ApplyRequest, emit func(plan.Event)) (*plan.Plan, error) {
			return e.PlanApply(ctx, r, emit)
		},
	}
}

// Execute is an upgrade of the services alone.
func Execute(r engine.ApplyRequest, yes bool) *Upgrade {
	return &Upgrade{
		Request: r, yes: yes, verb: string(plan.VerbExecute) + " --helm",
		Plan: func(ctx context.Context, e Engine, r engine.ApplyRequest, _ func(plan.Event)) (*plan.Plan, error) {
			return e.PlanExecute(ctx, r)
		},
	}
}

// upgradeState is an upgrade from its check to its confirmation; then the run screen takes
// over. Its text comes unfiltered from outside; rendering cleans it.
type upgradeState struct {
	start *Upgrade // nil: the console shows no upgrade
	from  screen   // where Esc leads; screenStart if the upgrade comes from the command line

	planning bool
	began    time.Time
	progress view.RunningCheck
	scroll   int // of the plan

	// The confirmation: finding IDs that must be typed, one after the other, then yes or no.
	need     plan.Consent
	at       int    // index in need.Findings of the ID being typed
	typed    string // the part typed so far
	wrong    bool   // the typed ID did not match
	yes      bool   // the cursor is on yes
	shown    time.Time
	watched  bool   // the watch screen was shown for the rollout
	lockedBy string // the other run that holds the lock of cluster or workspace; "" if none
}

// Messages of upgrades.
type (
	upgradePlanned struct {
		plan *plan.Plan
		err  error
	}
	rolloutChanged struct {
		what string
		err  error
	}
)

// upgrading reports whether the console shows an upgrade.
func (c *console) upgrading() bool { return c.upg.start != nil }

// openUpgrade checks and plans an upgrade and shows the plan.
func (c *console) openUpgrade(u *Upgrade) tea.Cmd {
	c.upg = upgradeState{start: u, from: c.upg.from, planning: true, began: c.now}
	switch c.screen {
	case c.overview, c.check, c.start:
		c.upg.from = c.screen
	}
	c.screen, c.plan, c.err, c.exit = c.upgradePlan, nil, nil, plan.ExitDone
	c.ran, c.t, c.backup.ended = false, view.Timeline{}, false
	c.check.busy, c.check.progress = false, view.RunningCheck{} // launch cancels a running check
	plan := c.launch("planning the upgrade", c.takePlanEvents, func(ctx context.Context, emit func(plan.Event)) tea.Msg {
		p, err := u.Plan(ctx, c.deps.Engine, u.Request, emit)
		return upgradePlanned{p, err}
	})
	return tea.Batch(plan, c.backup.read())
}

// takePlanEvents takes events of the check that precedes the plan.
func (c *console) takePlanEvents(events []plan.Event) tea.Cmd {
	for _, ev := range events {
		if ev.Object != check.CheckVersions {
			c.upg.progress.Apply(ev)
		}
	}
	return nil
}

// startUpgrade is openUpgrade for the next hop.
func (c *console) startUpgrade() tea.Cmd {
	return c.openUpgrade(Apply(engine.ApplyRequest{}, false))
}

// tookUpgradePlan shows the plan; it starts one that needs no confirmation.
func (c *console) tookUpgradePlan(msg upgradePlanned) tea.Cmd {
	u := &c.upg
	u.planning, u.progress, c.note = false, view.RunningCheck{}, "" // the note may say that Enter is off
	if msg.err != nil {
		c.fail(msg.err)
		return nil
	}
	c.plan = msg.plan
	c.t.Cluster = term.Clean(c.plan.Cluster)
	u.need = plan.ConsentTo(c.plan, u.start.yes, u.start.Request.Acknowledge)
	switch {
	case len(c.plan.Blocked()) > 0:
		c.exit = plan.ExitBlocked
	case len(u.need.Findings) == 0 && !u.need.Plan && (u.start.yes || !c.plan.Rehearsal):
		return c.runUpgrade() // accepted, or the plan only waits
	case !c.plan.Rehearsal:
		c.exit = plan.ExitUnacknowledged // the exit code if the user leaves without accepting
	}
	return nil
}

// runUpgrade executes the accepted plan.
func (c *console) runUpgrade() tea.Cmd {
	c.plan.Accept(plan.IDs(c.upg.need.Findings)...)
	c.exit = plan.ExitDone
	return c.startRun()
}

// openWatchForRollout shows the watch screen once, when the run only waits for nodes. It does not come
// back after the user has left it.
func (c *console) openWatchForRollout() tea.Cmd {
	s := c.t.Running()
	if c.screen != c.run || !c.upgrading() || c.upg.watched || c.plan.Rehearsal || s == nil || s.ID != plan.StepRollout {
		return nil
	}
	c.upg.watched = true
	return c.watch.show()
}

// attach shows the run that holds the lock, read-only.
func (c *console) attach(err error) tea.Cmd {
	x := view.Explain(err, c.deps.Commands)
	c.upg.lockedBy = cmp.Or(x.Why, x.What)
	return c.watch.open()
}

// watchAgain opens the watch screen from the run screen or the result.
func (c *console) watchAgain() tea.Cmd {
	if c.upg.lockedBy != "" {
		return c.watch.open()
	}
	return c.watch.show()
}

func (c *console) watchKey() binding {
	return on("w", "w", "watch the nodes", "view", c.watchAgain).footed("nodes").unless(func() string {
		switch {
		case !c.upgrading() || c.watch.board == nil:
			return "no rollout was watched"
		case c.upg.lockedBy == "" && !c.upg.watched:
			return "no node is being replaced yet"
		}
		return ""
	})
}

// leavePlan goes back to the screen from which the upgrade was opened.
func (c *console) leavePlan() tea.Cmd {
	if c.upg.planning && c.cancel != nil {
		c.cancel()
		c.cancel, c.busy = nil, ""
		c.task++ // its late messages are dropped
	}
	from := c.upg.from
	c.upg = upgradeState{}
	switch from {
	case c.check:
		c.exit = plan.ExitDone
		return c.openCheck()
	case c.overview:
		c.exit = plan.ExitDone
	}
	return c.goHome()
}

// upgradeCommand is the equivalent command line of the upgrade.
func (c *console) upgradeCommand() string {
	u := c.upg.start
	line := u.verb
	if c.plan != nil && !c.plan.Rehearsal && !c.plan.Finished() && !c.plan.OnlyWatches() {
		line += " --yes"
	}
	acked := slices.Clone(u.Request.Acknowledge)
	if c.plan != nil && !c.plan.Rehearsal {
		for _, id := range append(plan.IDs(c.upg.need.Findings), c.plan.Acknowledged...) {
			if !slices.Contains(acked, id) {
				acked = append(acked, id)
			}
		}
	}
	return c.deps.Commands.Command(line + upgradeFlags(u.Request, acked))
}

// upgradeFlags are the flags of a request, with a leading space each.
func upgradeFlags(r engine.ApplyRequest, acked []string) string {
	s := ""
	for _, id := range acked {
		s += " --ack " + view.QuoteArg(id)
	}
	s += view.PlanFlags(r.Request)
	if r.Surge != "" {
		s += " --surge " + view.QuoteArg(r.Surge)
	}
	if len(r.Skip) > 0 {
		s += " --skip-phases " + view.QuoteArg(strings.Join(r.Skip, ","))
	}
	for _, f := range []struct {
		set  bool
		name string
	}{{r.Detach, "detach"}, {r.Rehearse, "dry-run"}} {
		if f.set {
			s += " --" + f.name
		}
	}
	return s
}

// resumeCommand is the command that resumes or reattaches to the upgrade.
func (c *console) resumeCommand() string {
	u := c.upg.start
	return c.deps.Commands.Command(u.verb + upgradeFlags(u.Request, u.Request.Acknowledge))
}

// upgradeWhy is the line above the keys: the progress of planning, the verdict, or the answers.
func (c *console) upgradeWhy() []string {
	u := &c.upg
	r := c.th.Row(c.w).Add(term.Plain, " ")
	switch {
	case u.planning:
		return []string{r.Add(term.Accent, c.th.Spin(c.frame)+" ").Add(term.Strong, "Now ("+term.Duration(c.now.Sub(u.began))+"): checking and planning. Nothing is changed.").String()}
	case c.plan == nil:
		return nil
	case len(c.plan.Blocked()) > 0:
		f := c.plan.Blocked()[0]
		lines := view.Signed(c.page(), c.w, term.Bad, c.th.Fail, "Blocked: "+term.Clean(f.Title))
		if f.Remedy != "" {
			lines = append(lines, c.th.Below(c.w, 3, 2, term.Accent, term.Clean(c.deps.Commands.Text(f.Remedy)))...)
		}
		return lines
	case c.screen == c.upgradePlan && c.plan.Rehearsal:
		return []string{r.Add(term.Strong, "Review the plan, then press Enter. Rehearsal: nothing will be changed.").String()}
	case c.screen == c.upgradePlan:
		return []string{r.Add(term.Strong, "Review the plan, then press Enter. Nothing is changed before you confirm.").String()}
	case c.upgradeConfirm.typing():
		return []string{r.Add(term.Faint, "Enter accepts the name, Esc returns to the plan. Nothing has been changed yet.").String()}
	}
	text := "Upgrade cluster " + term.Clean(c.plan.Cluster) + "?"
	if c.plan.Rehearsal {
		text = "Rehearse it?"
	}
	r.Add(term.Strong, text+"  ")
	for _, a := range []struct {
		word string
		here bool
	}{{"yes", u.yes}, {"No", !u.yes}} {
		if a.here {
			r.Add(term.Accent, c.th.Cursor+" ").Add(term.Chosen, " "+a.word+" ").Add(term.Plain, "   ")
		} else {
			r.Add(term.Faint, "   "+a.word+" ").Add(term.Plain, "   ")
		}
	}
	return []string{r.String()}
}

// upgradeMode is the right end of the first line.
func (c *console) upgradeMode(s screen) string {
	badge := ""
	if c.upg.start.Request.Rehearse {
		badge = "REHEARSAL  "
	}
	switch {
	case s == c.upgradePlan && c.upg.planning:
		return badge + "planning"
	case s == c.upgradePlan:
		return badge + "plan"
	case s == c.upgradeConfirm:
		return badge + "confirm"
	case c.running && badge == "":
		return "LIVE  " + term.Clock(c.t.Elapsed(c.now))
	case c.ran:
		return badge + "elapsed " + term.Clock(c.t.Elapsed(c.now))
	}
	return badge + "upgrade"
}

// upgradeRail is the second line: the screens up to the run, then the steps of the run.
func (c *console) upgradeRail(s screen) string {
	if (s == c.upgradePlan || s == c.upgradeConfirm || !c.ran) && len(c.t.Steps) == 0 {
		at := 0
		switch {
		case s == c.upgradePlan && !c.upg.planning:
			at = 1
		case s == c.upgradeConfirm:
			at = 2
		}
		failed := c.err != nil || c.plan != nil && len(c.plan.Blocked()) > 0
		return view.Rail(c.page(), c.w, view.ScreenStops(c.page(), []string{"Check", "Plan", "Confirm", "Run", "Result"}, at, failed))
	}
	return view.Rail(c.page(), c.w, view.StepStops(c.page(), c.t.Steps, c.running))
}

// atTarget is how many of all nodes are at the target; zero while unknown.
func (c *console) atTarget() (n, total int64) {
	if b := c.watch.board; b != nil {
		if done, of := b.Places(); of > 0 { // a node and its replacement count as one
			return int64(done), int64(of)
		}
	}
	for i := range c.t.Steps {
		if s := &c.t.Steps[i]; s.ID == plan.StepRollout {
			return s.Progress, s.Total
		}
	}
	return 0, 0
}

// upgradeSafety is the last line of a run.
func (c *console) upgradeSafety() string {
	var parts []string
	if n, total := c.atTarget(); total > 0 {
		parts = append(parts, fmt.Sprintf("%d/%d nodes at the target", n, total))
	}
	switch {
	case c.plan != nil && c.plan.Rehearsal:
		parts = append(parts, "a rehearsal changes nothing")
	case c.t.PastFinal():
		parts = append(parts, "the rollout continues without this console")
	default:
		parts = append(parts, "no node is replaced before set-target; leaving loses nothing")
	}
	if i := slices.IndexFunc(c.t.Steps, func(s view.Step) bool { return s.ID == check.StepBackup }); i >= 0 && c.w >= 100 {
		switch c.t.Steps[i].State {
		case plan.StateDone:
			parts = append(parts, "backup taken and verified")
		case plan.StateSkipped:
			parts = append(parts, "backup already taken")
		}
	}
	if c.t.Run != "" && c.w >= 140 {
		parts = append(parts, "record "+plan.RunsDir+"/"+c.t.Run)
	}
	return "safety  " + strings.Join(parts, " "+c.th.Dot+" ")
}
