package console

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// upgradeStart describes the upgrade that the console shows.
type Upgrade struct {
	Request engine.ApplyRequest
	// verb is the equivalent command line without flags.
	verb string
	// yes skips the confirmation.
	yes  bool
	Plan func(context.Context, Engine, engine.ApplyRequest, func(plan.Event)) (*plan.Plan, error)
}

// applyStart is an upgrade with all of its steps.
func Apply(r engine.ApplyRequest, yes bool) *Upgrade {
	return &Upgrade{
		Request: r, yes: yes, verb: string(plan.VerbApply),
		Plan: func(ctx context.Context, e Engine, r engine.ApplyRequest, emit func(plan.Event)) (*plan.Plan, error) {
			return e.PlanApply(ctx, r, emit)
		},
	}
}

// executeStart is an upgrade of the services alone.
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

// rolloutPrompt is the confirmation of a change to the rollout: pause, resume, cancel.
type rolloutPrompt struct {
	text, detail, yes string
	do                func() tea.Cmd
}

// upgradePlanScreen shows the plan of an upgrade, or the progress of planning.
type upgradePlanScreen struct {
	defaults
	c *console
}

func (scr *upgradePlanScreen) title() string   { return "plan" }
func (scr *upgradePlanScreen) command() string { return scr.c.runCommand() }
func (scr *upgradePlanScreen) mode() string    { return scr.c.upgradeMode(scr) }
func (scr *upgradePlanScreen) rail() string    { return scr.c.upgradeRail(scr) }
func (scr *upgradePlanScreen) why() []string   { return scr.c.upgradeWhy() }
func (scr *upgradePlanScreen) safety() string  { return "scripted  " + scr.command() }

func (scr *upgradePlanScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	if msg, ok := msg.(upgradePlanned); ok {
		return scr.c.tookUpgradePlan(msg), true
	}
	return nil, false
}

// upgradeConfirmScreen asks for the acceptance of an upgrade. upgradeState has its state.
type upgradeConfirmScreen struct {
	defaults
	c *console
}

func (scr *upgradeConfirmScreen) title() string   { return "confirm" }
func (scr *upgradeConfirmScreen) command() string { return scr.c.runCommand() }
func (scr *upgradeConfirmScreen) mode() string    { return scr.c.upgradeMode(scr) }
func (scr *upgradeConfirmScreen) rail() string    { return scr.c.upgradeRail(scr) }
func (scr *upgradeConfirmScreen) why() []string   { return scr.c.upgradeWhy() }
func (scr *upgradeConfirmScreen) safety() string  { return "scripted  " + scr.command() }

func (scr *upgradeConfirmScreen) takesText() bool { return scr.typing() }

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
	plan := c.launch("planning the upgrade", func(ctx context.Context, emit func(plan.Event)) tea.Msg {
		p, err := u.Plan(ctx, c.deps.Engine, u.Request, emit)
		return upgradePlanned{p, err}
	})
	return tea.Batch(plan, c.backup.read())
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

func (scr *upgradePlanScreen) keys() []binding {
	return []binding{
		on("enter", "Enter", "continue to the confirmation", "do", act(scr.c.upgradeConfirm.show)).footed("continue").unless(func() string {
			switch {
			case scr.c.upg.planning:
				return "checking and planning"
			case scr.c.plan == nil:
				return "there is no plan"
			case len(scr.c.plan.Blocked()) > 0:
				return words.Count(len(scr.c.plan.Blocked()), "blocking finding") + "; fix it, then r"
			}
			return ""
		}),
		on("r", "r", "check and plan again", "do", func() tea.Cmd { return scr.c.openUpgrade(scr.c.upg.start) }).footed("plan again").unless(func() string {
			if scr.c.upg.planning {
				return "checking and planning"
			}
			return ""
		}),
		on("up k", "↑ k", "up", "move", act(func() { scr.scroll(-1) })),
		on("down j", "↓ j", "down", "move", act(func() { scr.scroll(1) })),
		on("pgup ctrl+u", "PgUp", "page up", "move", act(func() { scr.scroll(-scr.c.h / 2) })),
		on("pgdown ctrl+d", "PgDn", "page down", "move", act(func() { scr.scroll(scr.c.h / 2) })),
		on("g home", "g", "to the beginning", "move", act(func() { scr.c.upg.scroll = 0 })),
		on("G end", "G", "to the end", "move", act(func() { scr.scroll(1 << 20) })),
		on("y", "y", "copy the blocking finding, or the equivalent command", "copy", act(func() {
			if scr.c.plan != nil && len(scr.c.plan.Blocked()) > 0 {
				f := scr.c.plan.Blocked()[0]
				scr.c.copyText(term.Clean(f.Title+": "+term.OneLine(f.Detail)), "the blocking finding")
				return
			}
			scr.c.copyText(scr.command(), "the command")
		})).footed("copy"),
		on("esc", "Esc", "back; nothing has been changed", "leave", scr.c.leavePlan).footed("back"),
	}
}

func (scr *upgradeConfirmScreen) keys() []binding {
	return []binding{
		on("enter", "Enter", "accept the name, or confirm the selected answer", "do", scr.answer).footed("answer"),
		on("left right tab shift+tab h l", "← →", "choose", "do", act(func() { scr.c.upg.yes = !scr.c.upg.yes })).footed("choose"),
		on("y", "y", "choose yes", "do", act(func() { scr.c.upg.yes = true })),
		on("n", "n", "choose no", "do", act(func() { scr.c.upg.yes = false })),
		on("esc", "Esc", "back to the plan", "leave", act(func() { scr.c.screen = scr.c.upgradePlan })).footed("plan"),
	}
}

// rolloutKeys change a rollout in progress, after a confirmation.
func (c *console) rolloutKeys() []binding {
	return []binding{
		on("P", "P", "pause: start no further replacement (asks)", "changes the cluster", act(func() {
			yes := true
			c.rolloutPrompt = &rolloutPrompt{
				"Pause the rollout?", "Replacements in progress finish, no new ones start. The autoscaler resumes after 10 minutes.", "pause",
				c.changeRollout("paused", cluster.RolloutChange{Paused: &yes}),
			}
		})).footed("pause").unless(c.targetNotSet),
		on("R", "R", "resume: continue a paused or cancelled one (asks)", "changes the cluster", act(func() {
			no := false
			c.rolloutPrompt = &rolloutPrompt{"Resume the rollout?", "It continues to the same target.", "resume", c.changeRollout("resumed", cluster.RolloutChange{Paused: &no, Cancelled: &no})}
		})).footed("resume").unless(c.targetNotSet),
		on("C", "C", "cancel: keep the other nodes as they are (asks)", "changes the cluster", act(func() {
			yes := true
			c.rolloutPrompt = &rolloutPrompt{
				"Cancel the rollout?", "Replacements in progress finish, other nodes stay as they are. R resumes to the same target.", "cancel it",
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

func (scr *upgradePlanScreen) scroll(by int) {
	scr.c.upg.scroll = max(0, min(scr.c.upg.scroll+by, len(scr.rows(scr.width()))-1))
}

// width is the width of the rows of the plan.
func (scr *upgradePlanScreen) width() int {
	if scr.c.w >= 110 && scr.c.h >= 26 {
		return scr.c.w * 3 / 5
	}
	return scr.c.w
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

// show shows the confirmation of the upgrade. The safe answer is selected.
func (scr *upgradeConfirmScreen) show() {
	scr.c.screen = scr
	scr.c.upg.at, scr.c.upg.typed, scr.c.upg.wrong = 0, "", false
	scr.c.upg.shown, scr.c.upg.yes = scr.c.now, scr.c.plan.Rehearsal
}

// typing reports whether the ID of a finding is being typed.
func (scr *upgradeConfirmScreen) typing() bool {
	return scr.c.screen == scr && scr.c.upg.at < len(scr.c.upg.need.Findings)
}

// typed handles a key of the ID being typed.
func (scr *upgradeConfirmScreen) typed(k tea.KeyMsg) {
	u := &scr.c.upg
	u.wrong = false
	switch k.Type {
	case tea.KeyEsc:
		scr.c.screen = scr.c.upgradePlan
	case tea.KeyEnter:
		id := u.need.Findings[u.at].ID
		if strings.TrimSpace(u.typed) != id {
			u.wrong = true
			return
		}
		u.typed = ""
		for u.at < len(u.need.Findings) && u.need.Findings[u.at].ID == id { // two findings may have one ID
			u.at++
		}
		u.shown = scr.c.now
	case tea.KeyBackspace:
		if r := []rune(u.typed); len(r) > 0 {
			u.typed = string(r[:len(r)-1])
		}
	case tea.KeyCtrlU:
		u.typed = ""
	case tea.KeyRunes, tea.KeySpace:
		if u.typed += term.Clean(string(k.Runes)); len(u.typed) > 64 {
			u.typed = u.typed[:64]
		}
	}
}

func (scr *upgradeConfirmScreen) answer() tea.Cmd {
	if scr.c.now.Sub(scr.c.upg.shown) < confirmDelay {
		scr.c.note = "read it first, then press Enter"
		return nil
	}
	if scr.c.upg.yes {
		return scr.c.runUpgrade()
	}
	if scr.c.upg.from == scr.c.start {
		return tea.Quit
	}
	scr.c.note = "nothing was changed"
	return scr.c.leavePlan()
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

// view renders the plan, or the progress of planning, in h lines.
func (scr *upgradePlanScreen) view(w, h int) []string {
	u := &scr.c.upg
	if u.planning || scr.c.plan == nil {
		what := "querying cluster, cloud and releases"
		if u.progress.Total > 0 {
			what = u.progress.Summary()
		}
		lines := []string{"", scr.c.th.Row(w).Add(term.Accent, "  "+scr.c.th.Spin(scr.c.frame)+" ").Add(term.Plain, "Checking the next hop, like upgrade check").String()}
		lines = append(lines, scr.c.th.Below(w, 4, 3, term.Faint, what)...)
		return append(lines, "", scr.c.th.Row(w).Pad(4).Add(term.Faint, "Then you review and confirm the plan. Nothing is changed before.").String())
	}
	left := scr.width()
	rows := scr.rows(left)
	from := max(0, min(u.scroll, len(rows)-h))
	to := min(len(rows), from+h)
	lines := slices.Clone(rows[from:to])
	if to < len(rows) {
		lines[len(lines)-1] = scr.c.th.Row(left).Pad(3).Add(term.Faint, fmt.Sprintf("%s %s: ↓", scr.c.th.Ellipsis, words.Count(len(rows)-to+1, "more line"))).String()
	}
	if left == w {
		return lines
	}
	right := w - left - 3
	side := scr.riskRows(right, h)
	return view.Beside(lines, side, left, h, scr.c.th)
}

// rows is the plan: changes, risks, steps. The most important for the decision comes
// first.
func (scr *upgradePlanScreen) rows(w int) []string {
	p := scr.c.plan
	lines := view.UpgradeSections(scr.c.page(), w, p)
	if w == scr.c.w { // else the risks are beside the plan
		i := slices.Index(lines, scr.c.th.Rule(w, "Steps", words.Count(len(p.Steps), "step")))
		if i < 0 {
			i = len(lines)
		}
		lines = slices.Insert(lines, i, scr.riskRows(w, 24)...)
	}
	return lines
}

// riskRows show the risks: which data is backed up, which is lost, what is irreversible.
func (scr *upgradePlanScreen) riskRows(w, h int) []string {
	p := scr.c.plan
	lines := []string{scr.c.th.Rule(w, "Before nodes are replaced", "")}
	lines = append(lines, view.BackupCoverageRows(scr.c.page(), w, h, &scr.c.backup.Backups, "")...)
	i := slices.IndexFunc(p.Steps, func(s plan.Step) bool { return s.ID == check.StepBackup })
	switch {
	case i >= 0 && p.Steps[i].Finished:
		lines = append(lines, view.Signed(scr.c.page(), w, term.Good, scr.c.th.OK, "this upgrade already has a backup")...)
	case i >= 0:
		lines = append(lines, view.Signed(scr.c.page(), w, term.Good, scr.c.th.OK, "a backup is taken and verified first")...)
	case !p.OnlyWatches():
		lines = append(lines, view.Signed(scr.c.page(), w, term.Caution, scr.c.th.Warn, "no backup is taken")...)
	}
	return append(lines, view.RollbackRows(scr.c.page(), w, p)...)
}

// view renders the confirmation of an upgrade in h lines: a summary of the changes and
// the findings whose IDs must be typed.
func (scr *upgradeConfirmScreen) view(w, h int) []string {
	p, u := scr.c.plan, &scr.c.upg
	lines := []string{scr.c.th.Rule(w, "Upgrade cluster "+term.Clean(p.Cluster), words.Count(len(p.Steps), "step"))}
	add := func(head string, st term.Style, text string) {
		for i, l := range term.Wrap(text, max(20, w-20)) {
			if i > 0 {
				head = ""
			}
			lines = append(lines, scr.c.th.Row(w).Pad(2).Col(term.Faint, head, 16).Add(st, l).String())
		}
	}
	for _, x := range p.Components {
		if !x.Part {
			add(term.Clean(x.Name), term.Strong, cmp.Or(term.Clean(x.Now), "(none)")+" "+scr.c.th.To+" "+term.Clean(x.NextHop))
		}
	}
	if x := p.Changes; x != nil {
		var groups []string
		for _, g := range slices.Sorted(maps.Keys(x.Nodes)) {
			groups = append(groups, fmt.Sprintf("%d of %s", x.Nodes[g], term.Clean(g)))
		}
		add("nodes replaced", term.Plain, cmp.Or(strings.Join(groups, ", "), "none"))
		if kept := view.InPlaceOf(x); len(kept) > 0 {
			add("in place", term.Plain, strings.Join(kept, ", "))
		}
		if x.Most > 0 {
			add("takes", term.Plain, view.DurationRange(x.Least, x.Most))
		}
	}
	if s := u.start.Request.Surge; s != "" {
		add("surge", term.Plain, "at most "+term.Clean(s)+" extra machines")
	}
	if i := slices.IndexFunc(p.Steps, func(s plan.Step) bool { return s.Final && !s.Finished }); i >= 0 {
		add("no return from", term.Caution, term.Clean(p.Steps[i].ID)+" on: "+cmp.Or(term.Clean(p.Steps[i].Warning), "the cluster continues on its own"))
	}
	if p.Rehearsal {
		add("rehearsal", term.Plain, "server-side dry run; nothing is changed or recorded")
	}
	if n := len(p.Warnings()) - len(u.need.Findings); n > 0 {
		add("warnings", term.Caution, fmt.Sprintf("%d accepted by yes alone", n))
	}
	if names := plan.IDs(u.need.Findings); len(names) > 0 {
		lines = append(lines, scr.c.th.Rule(w, "To be accepted by name", fmt.Sprintf("%d of %d", len(plan.IDs(u.need.Findings[:u.at])), len(names))))
		var blocks [][]string
		here := 0
		for i, f := range u.need.Findings {
			if i == u.at {
				here = len(blocks)
			}
			blocks = append(blocks, scr.findingIDRows(w, i, f))
		}
		from := 0
		for room := h - len(lines) - 1; from < here; from++ { // the one being typed must be visible
			n := 0
			for _, b := range blocks[from : here+1] {
				n += len(b)
			}
			if n <= room {
				break
			}
		}
		for _, b := range blocks[from:] {
			lines = append(lines, b...)
		}
	}
	return lines
}

// findingIDRows render a finding that must be accepted by name.
func (scr *upgradeConfirmScreen) findingIDRows(w, i int, f plan.Finding) []string {
	u := &scr.c.upg
	if i < u.at {
		return []string{scr.c.th.Row(w).Pad(1).Add(term.Good, scr.c.th.OK+" ").Add(term.Plain, term.Clean(f.ID)).Add(term.Faint, "  accepted: "+term.Clean(f.Title)).String()}
	}
	lines := view.Signed(scr.c.page(), w, term.Caution, scr.c.th.Warn, term.Clean(f.Title))
	if i > u.at {
		return lines
	}
	lines = append(lines, scr.c.th.Below(w, 3, 2, term.Faint, term.OneLine(term.CleanLines(f.Detail)))...)
	if len(f.Objects) > 0 {
		lines = append(lines, scr.c.th.Below(w, 3, 2, term.Faint, term.Clean(view.SomeNames(f.Objects, 6)))...)
	}
	r := scr.c.th.Row(w).Pad(3).Add(term.Plain, "Type ").Add(term.Strong, term.Clean(f.ID)).Add(term.Plain, " to accept it: ").Add(term.Chosen, " "+u.typed+" ").Add(term.Accent, "▏")
	if u.wrong {
		r.Add(term.Bad, "  does not match")
	}
	return append(lines, r.String())
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
