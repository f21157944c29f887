package console

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

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

// upgradeState is what the screens of an upgrade share, from its check to its result. Its text
// comes unfiltered from outside; rendering cleans it.
type upgradeState struct {
	c     *console
	start *Upgrade // nil: the console shows no upgrade
	from  screen   // where Esc leads; the start screen if the upgrade comes from the command line

	need     plan.Consent // what the user must accept
	watched  bool         // the watch screen was shown for the rollout
	lockedBy string       // the other run that holds the lock of cluster or workspace; "" if none
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

// about reports whether a screen belongs to an upgrade.
func (u *upgradeState) about(s screen) bool {
	return u.active() && (s == u.c.upgradePlan || s == u.c.upgradeConfirm || s == u.c.run || s == u.c.result)
}

// active reports whether the console shows an upgrade.
func (u *upgradeState) active() bool { return u.start != nil }

// openNextHop opens the upgrade to the next hop.
func (u *upgradeState) openNextHop() tea.Cmd {
	return u.c.upgradePlan.open(Apply(engine.ApplyRequest{}, false))
}

// run executes the accepted plan.
func (u *upgradeState) run() tea.Cmd {
	if u.c.guard.stops() {
		return nil
	}
	u.c.plan.Accept(plan.IDs(u.need.Findings)...)
	u.c.quit.exit = plan.ExitDone
	return u.c.run.start()
}

// watchRollout shows the watch screen once, when the run only waits for nodes. It does not come
// back after the user has left it.
func (u *upgradeState) watchRollout() tea.Cmd {
	s := u.c.t.Running()
	if u.c.screen != u.c.run || !u.active() || u.watched || u.c.plan.Rehearsal || s == nil || s.ID != plan.StepRollout {
		return nil
	}
	u.watched = true
	return u.c.watch.show()
}

// attach shows the run that holds the lock, read-only.
func (u *upgradeState) attach(err error) tea.Cmd {
	x := view.Explain(err, u.c.deps.Commands)
	u.lockedBy = cmp.Or(x.Why, x.What)
	return u.c.watch.open()
}

// watchAgain opens the watch screen from the run screen or the result.
func (u *upgradeState) watchAgain() tea.Cmd {
	if u.lockedBy != "" {
		return u.c.watch.open()
	}
	return u.c.watch.show()
}

func (u *upgradeState) watchKey() binding {
	return on("w", "w", "watch the nodes", "view", u.watchAgain).footed("nodes").unless(func() string {
		switch {
		case !u.active() || u.c.watch.board == nil:
			return "no rollout was watched"
		case u.lockedBy == "" && !u.watched:
			return "no node is being changed yet"
		}
		return ""
	})
}

// leave goes back to the screen from which the upgrade was opened.
func (u *upgradeState) leave() tea.Cmd {
	if u.c.upgradePlan.planning && u.c.task.cancel != nil {
		u.c.task.drop()
	}
	from := u.from
	u.c.upg = upgradeState{c: u.c}
	switch from {
	case u.c.check:
		u.c.quit.exit = plan.ExitDone
		return u.c.check.show()
	case u.c.overview:
		u.c.quit.exit = plan.ExitDone
	}
	return u.c.overview.show()
}

// command is the equivalent command line of the upgrade.
func (u *upgradeState) command() string {
	r := u.start.Request
	line := u.start.verb
	if u.c.plan != nil && !u.c.plan.Rehearsal && !u.c.plan.Finished() && !u.c.plan.OnlyWatches() {
		line += " --yes"
	}
	acked := slices.Clone(r.Acknowledge)
	if u.c.plan != nil && !u.c.plan.Rehearsal {
		for _, id := range append(plan.IDs(u.need.Findings), u.c.plan.Acknowledged...) {
			if !slices.Contains(acked, id) {
				acked = append(acked, id)
			}
		}
	}
	return u.c.deps.Commands.Command(line + upgradeFlags(r, acked))
}

// resumeCommand is the command that resumes or reattaches to the upgrade.
func (u *upgradeState) resumeCommand() string {
	r := u.start.Request
	return u.c.deps.Commands.Command(u.start.verb + upgradeFlags(r, r.Acknowledge))
}

// badge begins the mode of the screens of an upgrade.
func (u *upgradeState) badge() string {
	if u.start.Request.Rehearse {
		return "REHEARSAL  "
	}
	return ""
}

// runMode is the mode of the screens from the run on.
func (u *upgradeState) runMode() string {
	elapsed := "elapsed " + term.Clock(u.c.t.Elapsed(u.c.now))
	switch badge := u.badge(); {
	case u.c.running && badge == "":
		return "LIVE  " + elapsed
	case u.c.ran:
		return badge + elapsed
	default:
		return badge + "upgrade"
	}
}

// rail is the second line before a run: the screens, of which number at is shown.
func (u *upgradeState) rail(at int) string {
	failed := u.c.err != nil || u.c.plan != nil && len(u.c.plan.Blocked()) > 0
	return view.Rail(u.c.page(), u.c.w, view.ScreenStops(u.c.page(), []string{"Check", "Plan", "Confirm", "Run", "Result"}, at, failed))
}

// runRail is the second line from the run on: its steps.
func (u *upgradeState) runRail() string {
	if !u.c.ran && len(u.c.t.Steps) == 0 {
		return u.rail(0)
	}
	return view.Rail(u.c.page(), u.c.w, view.StepStops(u.c.page(), u.c.t.Steps, u.c.running))
}

// blockedWhy are the lines above the keys if the plan is blocked.
func (u *upgradeState) blockedWhy() []string {
	f := u.c.plan.Blocked()[0]
	lines := view.Signed(u.c.page(), u.c.w, term.Bad, u.c.th.Fail, "Blocked: "+term.Clean(f.Title))
	if f.Remedy != "" {
		lines = append(lines, u.c.th.Below(u.c.w, 3, 2, term.Accent, term.Clean(u.c.deps.Commands.Text(f.Remedy)))...)
	}
	return lines
}

// atTarget is how many of all nodes are at the target; zero while unknown.
func (u *upgradeState) atTarget() (n, total int64) {
	if b := u.c.watch.board; b != nil {
		if done, of := b.Places(); of > 0 { // a node and its replacement count as one
			return int64(done), int64(of)
		}
	}
	for i := range u.c.t.Steps {
		if s := &u.c.t.Steps[i]; s.ID == plan.StepRollout {
			return s.Progress, s.Total
		}
	}
	return 0, 0
}

// safety is the last line of a run.
func (u *upgradeState) safety() string {
	var parts []string
	if n, total := u.atTarget(); total > 0 {
		parts = append(parts, fmt.Sprintf("%d/%d nodes at the target", n, total))
	}
	switch {
	case u.c.plan != nil && u.c.plan.Rehearsal:
		parts = append(parts, "a rehearsal changes nothing")
	case u.c.t.PastFinal():
		parts = append(parts, "the rollout continues without this console")
	default:
		parts = append(parts, "no node is changed before set-target; leaving loses nothing")
	}
	if i := slices.IndexFunc(u.c.t.Steps, func(s view.Step) bool { return s.ID == check.StepBackup }); i >= 0 && u.c.w >= 100 {
		switch u.c.t.Steps[i].State {
		case plan.StateDone:
			parts = append(parts, "backup taken and verified")
		case plan.StateSkipped:
			parts = append(parts, "backup already taken")
		}
	}
	if u.c.t.Run != "" && u.c.w >= 140 {
		parts = append(parts, "record "+plan.RunsDir+"/"+u.c.t.Run)
	}
	return "safety  " + strings.Join(parts, " "+u.c.th.Dot+" ")
}
