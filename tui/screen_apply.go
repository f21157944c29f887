package tui

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
)

// upgradeStart says which upgrade the console is about.
type upgradeStart struct {
	request engine.ApplyRequest
	// verb is the command line that does the same, without flags.
	verb string
	// yes says that the plan is accepted.
	yes  bool
	plan func(context.Context, Engine, engine.ApplyRequest, func(engine.Event)) (*engine.Plan, error)
}

// applyStart is an upgrade with all of its steps.
func applyStart(r engine.ApplyRequest, yes bool) *upgradeStart {
	return &upgradeStart{
		request: r, yes: yes, verb: string(engine.VerbApply),
		plan: func(ctx context.Context, e Engine, r engine.ApplyRequest, emit func(engine.Event)) (*engine.Plan, error) {
			return e.PlanApply(ctx, r, emit)
		},
	}
}

// executeStart is an upgrade of the services alone.
func executeStart(r engine.ApplyRequest, yes bool) *upgradeStart {
	return &upgradeStart{
		request: r, yes: yes, verb: string(engine.VerbExecute) + " --helm",
		plan: func(ctx context.Context, e Engine, r engine.ApplyRequest, _ func(engine.Event)) (*engine.Plan, error) {
			return e.PlanExecute(ctx, r)
		},
	}
}

// upgradeScreen is an upgrade from its check to the answer; then the run screen has it.
// Text in it is as it came; it is cleaned when it is drawn.
type upgradeScreen struct {
	start *upgradeStart // nil: the console is not about an upgrade
	from  screenID      // where Esc leads; screenStart if the upgrade was asked for on the command line

	planning bool
	began    time.Time
	live     checkLive
	scroll   int // of the plan

	// The question: names that must be typed, one after the other, then yes or no.
	need    consent
	at      int    // of need.names: the one that is typed
	typed   string // of it
	wrong   bool   // what was typed is no name
	yes     bool   // the cursor is on yes
	shown   time.Time
	watched bool   // the watch screen was shown for the rollout
	held    string // who holds the cluster or the workspace, if that is somebody else
}

// question is asked before something is done to the cluster.
type question struct {
	text, detail, yes string
	do                func(*console) tea.Cmd
}

// Messages of upgrades.
type (
	upgradePlanned struct {
		plan *engine.Plan
		err  error
	}
	rolloutChanged struct {
		what string
		err  error
	}
)

// upgrading reports whether the console is about an upgrade.
func (c *console) upgrading() bool { return c.upg.start != nil }

// openUpgrade plans an upgrade, which checks first, and shows the plan.
func (c *console) openUpgrade(u *upgradeStart) tea.Cmd {
	c.upg = upgradeScreen{start: u, from: c.upg.from, planning: true, began: c.now}
	switch c.screen {
	case screenHome, screenCheck, screenStart:
		c.upg.from = c.screen
	}
	c.screen, c.plan, c.err, c.exit = screenPlan, nil, nil, engine.ExitDone
	c.ran, c.t, c.bak.ended = false, timeline{}, false
	c.chk.busy, c.chk.live = false, checkLive{} // a check that was under way is given up
	plan := c.launch("planning the upgrade", func(ctx context.Context, emit func(engine.Event)) tea.Msg {
		p, err := u.plan(ctx, c.deps.engine, u.request, emit)
		return upgradePlanned{p, err}
	})
	return tea.Batch(plan, c.readBackups())
}

// startUpgrade is openUpgrade for the next hop.
func (c *console) startUpgrade() tea.Cmd {
	return c.openUpgrade(applyStart(engine.ApplyRequest{}, false))
}

// tookUpgradePlan shows the plan; one that needs nothing more runs at once.
func (c *console) tookUpgradePlan(msg upgradePlanned) tea.Cmd {
	u := &c.upg
	u.planning, u.live, c.note = false, checkLive{}, "" // Enter is not off any more
	if msg.err != nil {
		c.fail(msg.err)
		return nil
	}
	c.plan = msg.plan
	c.t.cluster = clean(c.plan.Cluster)
	u.need = consentTo(c.plan, u.start.yes, u.start.request.Acknowledge)
	switch {
	case len(c.plan.Blocked()) > 0:
		c.exit = engine.ExitBlocked
	case len(u.need.names) == 0 && !u.need.yes && (u.start.yes || !c.plan.Rehearsal):
		return c.runUpgrade() // accepted, or there is nothing but to wait
	case !c.plan.Rehearsal:
		c.exit = engine.ExitUnacknowledged // whoever leaves now has not accepted it
	}
	return nil
}

// runUpgrade carries the accepted plan out.
func (c *console) runUpgrade() tea.Cmd {
	c.plan.Accept(ids(c.upg.need.names)...)
	c.exit = engine.ExitDone
	return c.startRun()
}

var planKeys = []binding{
	on("enter", "Enter", "go on to the question", "do", act((*console).askUpgrade)).footed("go on").unless(func(c *console) string {
		switch {
		case c.upg.planning:
			return "it is being checked and planned"
		case c.plan == nil:
			return "there is no plan"
		case len(c.plan.Blocked()) > 0:
			return count(len(c.plan.Blocked()), "finding") + " in the way; correct it, then r"
		}
		return ""
	}),
	on("r", "r", "check and plan again", "do", func(c *console) tea.Cmd { return c.openUpgrade(c.upg.start) }).footed("plan again").unless(func(c *console) string {
		if c.upg.planning {
			return "it is being checked and planned"
		}
		return ""
	}),
	on("up k", "↑ k", "up", "move", act(func(c *console) { c.scrollPlan(-1) })),
	on("down j", "↓ j", "down", "move", act(func(c *console) { c.scrollPlan(1) })),
	on("pgup ctrl+u", "PgUp", "page up", "move", act(func(c *console) { c.scrollPlan(-c.h / 2) })),
	on("pgdown ctrl+d", "PgDn", "page down", "move", act(func(c *console) { c.scrollPlan(c.h / 2) })),
	on("g home", "g", "to the beginning", "move", act(func(c *console) { c.upg.scroll = 0 })),
	on("G end", "G", "to the end", "move", act(func(c *console) { c.scrollPlan(1 << 20) })),
	on("y", "y", "copy what stands in the way, or the command that does the same", "copy", act(func(c *console) {
		if c.plan != nil && len(c.plan.Blocked()) > 0 {
			f := c.plan.Blocked()[0]
			c.copyText(clean(f.Title+": "+oneLine(f.Detail)), "what stands in the way")
			return
		}
		c.copyText(c.command(), "the command")
	})).footed("copy"),
	on("esc", "Esc", "back; nothing has been changed", "leave", (*console).leavePlan).footed("back"),
}

var acceptKeys = []binding{
	on("enter", "Enter", "take the name, or do what is chosen", "do", (*console).answerUpgrade).footed("answer"),
	on("left right tab shift+tab h l", "← →", "choose", "do", act(func(c *console) { c.upg.yes = !c.upg.yes })).footed("choose"),
	on("y", "y", "choose yes", "do", act(func(c *console) { c.upg.yes = true })),
	on("n", "n", "choose no", "do", act(func(c *console) { c.upg.yes = false })),
	on("esc", "Esc", "back to the plan", "leave", act(func(c *console) { c.screen = screenPlan })).footed("plan"),
}

// rolloutKeys change a rollout that is under way; they ask before they do.
var rolloutKeys = []binding{
	on("P", "P", "pause: begin no further replacement (asks)", "changes the cluster", act(func(c *console) {
		yes := true
		c.question = &question{
			"Pause the rollout?", "What is under way is finished, nothing more is begun. The autoscaler is given back after 10 minutes.", "pause",
			changeRollout("paused", engine.RolloutChange{Paused: &yes}),
		}
	})).footed("pause").unless(targetNotSet),
	on("R", "R", "resume a rollout that was paused or cancelled (asks)", "changes the cluster", act(func(c *console) {
		no := false
		c.question = &question{"Resume the rollout?", "It goes on with the same target.", "resume", changeRollout("going on", engine.RolloutChange{Paused: &no, Cancelled: &no})}
	})).footed("resume").unless(targetNotSet),
	on("C", "C", "cancel: end the rollout where it stands (asks)", "changes the cluster", act(func(c *console) {
		yes := true
		c.question = &question{
			"Cancel the rollout?", "What is under way is finished, all other nodes stay as they are. R goes on with the same target.", "cancel it",
			changeRollout("cancelled", engine.RolloutChange{Cancelled: &yes}),
		}
	})).unless(targetNotSet),
}

// targetNotSet says why a rollout cannot be changed yet.
func targetNotSet(c *console) string {
	if c.screen == screenWatch && c.wat.origin != fromRun {
		return c.cannotChange()
	}
	switch {
	case c.plan != nil && c.plan.Rehearsal:
		return "this is a rehearsal"
	case c.upgrading() && !c.t.pastFinal():
		return "no node is being replaced yet; q stops after this step"
	}
	return ""
}

// handOver shows the watch screen when there is nothing left but to wait for nodes. Whoever
// has left it is not taken there again.
func (c *console) handOver() tea.Cmd {
	s := c.t.running()
	if c.screen != screenRun || !c.upgrading() || c.upg.watched || c.plan.Rehearsal || s == nil || s.id != engine.StepRollout {
		return nil
	}
	c.upg.watched = true
	return c.showWatch()
}

// attach shows what somebody else's run does, to look only.
func (c *console) attach(err error) tea.Cmd {
	x := explain(err, c.deps.sp)
	c.upg.held = orElse(x.why, x.what)
	return c.openWatch()
}

// watchAgain shows the nodes from the run screen or the result.
func (c *console) watchAgain() tea.Cmd {
	if c.upg.held != "" {
		return c.openWatch()
	}
	return c.showWatch()
}

var watchKey = on("w", "w", "look at the nodes", "view", (*console).watchAgain).footed("nodes").unless(func(c *console) string {
	switch {
	case !c.upgrading() || c.wat.board == nil:
		return "no rollout was watched"
	case c.upg.held == "" && !c.upg.watched:
		return "no node is being replaced yet"
	}
	return ""
})

var questionKeys = []binding{
	on("enter y", "Enter", "do it", "do", (*console).answerQuestion).footed("do it"),
	on("esc n q", "Esc", "leave it as it is", "back", act(func(c *console) { c.question = nil })).footed("leave it as it is"),
	on("ctrl+c", "Ctrl-C", "leave", "leave", func(c *console) tea.Cmd { c.question = nil; return c.leave() }),
}

func (c *console) answerQuestion() tea.Cmd {
	q := c.question
	c.question = nil
	return q.do(c)
}

// changeRollout is a command that changes the rollout, beside whatever runs.
func changeRollout(what string, change engine.RolloutChange) func(*console) tea.Cmd {
	return func(c *console) tea.Cmd {
		c.note = "asking the cluster"
		eng, ctx := c.deps.engine, c.ctx
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
		x := explain(msg.err, c.deps.sp)
		c.note = x.what
		if x.why != "" {
			c.note += ": " + x.why
		}
		return
	}
	c.note = "the rollout is " + msg.what
}

func (c *console) scrollPlan(by int) {
	c.upg.scroll = max(0, min(c.upg.scroll+by, len(c.upgradeRows(c.planWidth()))-1))
}

// planWidth is how wide the rows of the plan are.
func (c *console) planWidth() int {
	if c.w >= 110 && c.h >= 26 {
		return c.w * 3 / 5
	}
	return c.w
}

// leavePlan goes back to where the upgrade was asked for.
func (c *console) leavePlan() tea.Cmd {
	if c.upg.planning && c.cancel != nil {
		c.cancel()
		c.cancel, c.busy = nil, ""
		c.task++ // what it still says is not taken
	}
	from := c.upg.from
	c.upg = upgradeScreen{}
	switch from {
	case screenCheck:
		c.exit = engine.ExitDone
		return c.openCheck()
	case screenHome:
		c.exit = engine.ExitDone
	}
	return c.goHome()
}

// askUpgrade shows the question. The cursor is on the safe answer.
func (c *console) askUpgrade() {
	c.screen = screenAccept
	c.upg.at, c.upg.typed, c.upg.wrong = 0, "", false
	c.upg.shown, c.upg.yes = c.now, c.plan.Rehearsal
}

// naming reports whether the name of a finding is being typed.
func (c *console) naming() bool { return c.screen == screenAccept && c.upg.at < len(c.upg.need.names) }

// typeName gives a key to the name that is being typed.
func (c *console) typeName(k tea.KeyMsg) {
	u := &c.upg
	u.wrong = false
	switch k.Type {
	case tea.KeyEsc:
		c.screen = screenPlan
	case tea.KeyEnter:
		id := u.need.names[u.at].ID
		if strings.TrimSpace(u.typed) != id {
			u.wrong = true
			return
		}
		u.typed = ""
		for u.at < len(u.need.names) && u.need.names[u.at].ID == id { // of two findings with one name
			u.at++
		}
		u.shown = c.now
	case tea.KeyBackspace:
		if r := []rune(u.typed); len(r) > 0 {
			u.typed = string(r[:len(r)-1])
		}
	case tea.KeyCtrlU:
		u.typed = ""
	case tea.KeyRunes, tea.KeySpace:
		if u.typed += clean(string(k.Runes)); len(u.typed) > 64 {
			u.typed = u.typed[:64]
		}
	}
}

func (c *console) answerUpgrade() tea.Cmd {
	if c.now.Sub(c.upg.shown) < armAfter {
		c.note = "read it first, then press Enter"
		return nil
	}
	if c.upg.yes {
		return c.runUpgrade()
	}
	if c.upg.from == screenStart {
		return tea.Quit
	}
	c.note = "nothing was changed"
	return c.leavePlan()
}

// upgradeCommand is the command line that makes the same upgrade.
func (c *console) upgradeCommand() string {
	u := c.upg.start
	line := u.verb
	if c.plan != nil && !c.plan.Rehearsal && !c.plan.Finished() && !c.plan.OnlyWatches() {
		line += " --yes"
	}
	acked := slices.Clone(u.request.Acknowledge)
	if c.plan != nil && !c.plan.Rehearsal {
		for _, id := range append(ids(c.upg.need.names), c.plan.Acknowledged...) {
			if !slices.Contains(acked, id) {
				acked = append(acked, id)
			}
		}
	}
	return c.deps.sp.command(line + upgradeFlags(u.request, acked))
}

// upgradeFlags are the flags of a request, with a leading space each.
func upgradeFlags(r engine.ApplyRequest, acked []string) string {
	s := ""
	for _, id := range acked {
		s += " --ack " + quoteArg(id)
	}
	s += planFlags(r.CheckRequest)
	if r.Surge != "" {
		s += " --surge " + quoteArg(r.Surge)
	}
	if len(r.Skip) > 0 {
		s += " --skip-phases " + quoteArg(strings.Join(r.Skip, ","))
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

// comeBack is the command that comes back to the upgrade.
func (c *console) comeBack() string {
	u := c.upg.start
	return c.deps.sp.command(u.verb + upgradeFlags(u.request, u.request.Acknowledge))
}

// planView draws the plan in h lines, or how far the planning is.
func (c *console) planView(w, h int) []string {
	u := &c.upg
	if u.planning || c.plan == nil {
		what := "asking cluster, cloud and releases"
		if u.live.total > 0 {
			what = u.live.words()
		}
		lines := []string{"", c.th.row(w).add(accent, "  "+c.th.spin(c.frame)+" ").add(plain, "Checking the next hop, as upgrade check does").String()}
		lines = append(lines, c.th.below(w, 4, 3, faint, what)...)
		return append(lines, "", c.th.row(w).pad(4).add(faint, "Then the plan is shown, and you are asked once. Nothing is changed before.").String())
	}
	left := c.planWidth()
	rows := c.upgradeRows(left)
	from := max(0, min(u.scroll, len(rows)-h))
	to := min(len(rows), from+h)
	lines := slices.Clone(rows[from:to])
	if to < len(rows) {
		lines[len(lines)-1] = c.th.row(left).pad(3).add(faint, fmt.Sprintf("%s %s: ↓", c.th.ellipsis, count(len(rows)-to+1, "more line"))).String()
	}
	if left == w {
		return lines
	}
	right := w - left - 3
	side := c.riskRows(right, h)
	return beside(lines, side, left, h, c.th)
}

// upgradeRows is the plan: what changes, what goes with it, and by which steps. What
// matters for the answer comes first.
func (c *console) upgradeRows(w int) []string {
	p := c.plan
	lines := c.upgradeSections(w, p)
	if w == c.w { // else it stands beside
		i := slices.Index(lines, c.th.rule(w, "Steps", count(len(p.Steps), "step")))
		if i < 0 {
			i = len(lines)
		}
		lines = slices.Insert(lines, i, c.riskRows(w, 24)...)
	}
	return lines
}

// riskRows say what is at stake: what is kept, what is lost, and what there is no way back
// from.
func (c *console) riskRows(w, h int) []string {
	p := c.plan
	lines := []string{c.th.rule(w, "Before nodes are replaced", "")}
	lines = append(lines, c.keptRows(w, h)...)
	i := slices.IndexFunc(p.Steps, func(s engine.Step) bool { return s.ID == engine.StepBackup })
	switch {
	case i >= 0 && p.Steps[i].Finished:
		lines = append(lines, c.signed(w, good, c.th.ok, "a backup was made for this upgrade before")...)
	case i >= 0:
		lines = append(lines, c.signed(w, good, c.th.ok, "a backup is made first, and verified")...)
	case !p.OnlyWatches():
		lines = append(lines, c.signed(w, caution, c.th.warn, "no backup is made")...)
	}
	return append(lines, c.returnRows(w)...)
}

// returnRows say from where on there is no way back, and where one can stop.
func (c *console) returnRows(w int) []string {
	p := c.plan
	lines := []string{c.th.rule(w, "Ways back", "")}
	add := func(head, text string) {
		for i, l := range wrap(text, max(20, w-18)) {
			if i > 0 {
				head = ""
			}
			lines = append(lines, c.th.row(w).pad(2).col(faint, head, 14).add(plain, l).String())
		}
	}
	if i := slices.IndexFunc(p.Steps, func(s engine.Step) bool { return s.Final && !s.Finished }); i >= 0 || p.Rehearsal {
		add("stop points", "until set-target after each step: q; then P pauses, C ends it where it stands")
	}
	if replaced(p) > 0 {
		add("no way back", "the disks of replaced nodes are gone, and Kubernetes never goes down")
		add("certificates", "kubelets get new ones with their machines; the certificate authority stays")
	}
	add("way back", "services with helm rollback; nodes forward only, or to the image before with another upgrade")
	return lines
}

// inPlaceOf says how many nodes of which groups are upgraded in place, as "2 of workers".
func inPlaceOf(x *engine.Changes) []string {
	var groups []string
	for _, g := range slices.Sorted(maps.Keys(x.InPlace)) {
		groups = append(groups, fmt.Sprintf("%d of %s", x.InPlace[g], clean(g)))
	}
	return groups
}

// replaced is how many nodes a plan replaces.
func replaced(p *engine.Plan) (n int) {
	if p.Changes != nil {
		for _, x := range p.Changes.Nodes {
			n += x
		}
	}
	return n
}

// acceptView draws the question in h lines: what it is about in a few words, the names
// that must be typed, and the answers.
func (c *console) acceptView(w, h int) []string {
	p, u := c.plan, &c.upg
	lines := []string{c.th.rule(w, "Upgrade cluster "+clean(p.Cluster), count(len(p.Steps), "step"))}
	add := func(head string, st style, text string) {
		for i, l := range wrap(text, max(20, w-20)) {
			if i > 0 {
				head = ""
			}
			lines = append(lines, c.th.row(w).pad(2).col(faint, head, 16).add(st, l).String())
		}
	}
	for _, x := range p.Components {
		if !x.Part {
			add(clean(x.Name), strong, orElse(clean(x.Now), "(none)")+" "+c.th.to+" "+clean(x.NextHop))
		}
	}
	if x := p.Changes; x != nil {
		var groups []string
		for _, g := range slices.Sorted(maps.Keys(x.Nodes)) {
			groups = append(groups, fmt.Sprintf("%d of %s", x.Nodes[g], clean(g)))
		}
		add("nodes replaced", plain, orElse(strings.Join(groups, ", "), "none"))
		if kept := inPlaceOf(x); len(kept) > 0 {
			add("in place", plain, strings.Join(kept, ", "))
		}
		if x.Most > 0 {
			add("takes", plain, durationRange(x.Least, x.Most))
		}
	}
	if s := u.start.request.Surge; s != "" {
		add("surge", plain, "at most "+clean(s)+" beyond the wanted number")
	}
	if i := slices.IndexFunc(p.Steps, func(s engine.Step) bool { return s.Final && !s.Finished }); i >= 0 {
		add("no return from", caution, clean(p.Steps[i].ID)+" on: "+orElse(clean(p.Steps[i].Warning), "the cluster goes on alone"))
	}
	if p.Rehearsal {
		add("rehearsal", plain, "the API server is asked whether it would take the target; nothing is changed or recorded")
	}
	if n := len(p.Warnings()) - len(u.need.names); n > 0 {
		add("warnings", caution, fmt.Sprintf("%s in the plan; yes accepts them", count(n, "ordinary one")))
	}
	if names := ids(u.need.names); len(names) > 0 {
		lines = append(lines, c.th.rule(w, "Accepted by name alone", fmt.Sprintf("%d of %d", len(ids(u.need.names[:u.at])), len(names))))
		var blocks [][]string
		here := 0
		for i, f := range u.need.names {
			if i == u.at {
				here = len(blocks)
			}
			blocks = append(blocks, c.nameRows(w, i, f))
		}
		from := 0
		for room := h - len(lines) - 1; from < here; from++ { // the one that is typed must be in sight
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

// nameRows draw one finding that is accepted by name.
func (c *console) nameRows(w, i int, f engine.Finding) []string {
	u := &c.upg
	if i < u.at {
		return []string{c.th.row(w).pad(1).add(good, c.th.ok+" ").add(plain, clean(f.ID)).add(faint, "  accepted: "+clean(f.Title)).String()}
	}
	lines := c.signed(w, caution, c.th.warn, clean(f.Title))
	if i > u.at {
		return lines
	}
	lines = append(lines, c.th.below(w, 3, 2, faint, oneLine(cleanLines(f.Detail)))...)
	if len(f.Objects) > 0 {
		lines = append(lines, c.th.below(w, 3, 2, faint, clean(someNames(f.Objects, 6)))...)
	}
	r := c.th.row(w).pad(3).add(plain, "Type ").add(strong, clean(f.ID)).add(plain, " to accept it: ").add(chosen, " "+u.typed+" ").add(accent, "▏")
	if u.wrong {
		r.add(bad, "  that is not its name")
	}
	return append(lines, r.String())
}

// upgradeWhy is the line above the keys: what goes on, or the question.
func (c *console) upgradeWhy() []string {
	u := &c.upg
	r := c.th.row(c.w).add(plain, " ")
	switch {
	case u.planning:
		return []string{r.add(accent, c.th.spin(c.frame)+" ").add(strong, "Now ("+short(c.now.Sub(u.began))+"): checking and planning. Nothing is changed.").String()}
	case c.plan == nil:
		return nil
	case len(c.plan.Blocked()) > 0:
		f := c.plan.Blocked()[0]
		lines := c.signed(c.w, bad, c.th.fail, "Blocked: "+clean(f.Title))
		if f.Remedy != "" {
			lines = append(lines, c.th.below(c.w, 3, 2, accent, clean(c.deps.sp.text(f.Remedy)))...)
		}
		return lines
	case c.screen == screenPlan && c.plan.Rehearsal:
		return []string{r.add(strong, "Read it, then press Enter. It is a rehearsal: nothing will be changed.").String()}
	case c.screen == screenPlan:
		return []string{r.add(strong, "Read it, then press Enter: you are asked once. Nothing has been changed yet.").String()}
	case c.naming():
		return []string{r.add(faint, "Enter takes the name, Esc goes back to the plan. Nothing has been changed yet.").String()}
	}
	text := "Upgrade cluster " + clean(c.plan.Cluster) + "?"
	if c.plan.Rehearsal {
		text = "Rehearse it?"
	}
	r.add(strong, text+"  ")
	for _, a := range []struct {
		word string
		here bool
	}{{"yes", u.yes}, {"No", !u.yes}} {
		if a.here {
			r.add(accent, c.th.cursor+" ").add(chosen, " "+a.word+" ").add(plain, "   ")
		} else {
			r.add(faint, "   "+a.word+" ").add(plain, "   ")
		}
	}
	return []string{r.String()}
}

// upgradeMode is the right end of the first line.
func (c *console) upgradeMode(s screenID) string {
	badge := ""
	if c.upg.start.request.Rehearse {
		badge = "REHEARSAL  "
	}
	switch {
	case s == screenPlan && c.upg.planning:
		return badge + "planning"
	case s == screenPlan:
		return badge + "plan"
	case s == screenAccept:
		return badge + "confirm"
	case c.running && badge == "":
		return "LIVE  " + clock(c.t.elapsed(c.now))
	case c.ran:
		return badge + "elapsed " + clock(c.t.elapsed(c.now))
	}
	return badge + "upgrade"
}

// changeWords say what an upgrade changes: "image v1.0.0→v1.1.0  k8s v1.35.4→v1.36.3".
func (c *console) changeWords(p *engine.Plan) string {
	var parts []string
	for _, x := range [][3]string{{"release", p.From.Release, p.To.Release}, {"image", p.From.Image, p.To.Image}, {"k8s", p.From.Kubernetes, p.To.Kubernetes}} {
		if x[2] != "" && x[1] != x[2] {
			oldest, _, _ := strings.Cut(clean(x[1]), "-v") // of a range, as in the middle of an upgrade
			parts = append(parts, x[0]+" "+orElse(oldest, "?")+c.th.to+clean(x[2]))
		}
	}
	return strings.Join(parts, "  ")
}

// upgradeRail is the second line: the way to the run, then its steps.
func (c *console) upgradeRail(s screenID) string {
	type stop struct {
		name, sign string
		st, word   style
		done       bool
	}
	var stops []stop
	at := 0
	if (s == screenPlan || s == screenAccept || !c.ran) && len(c.t.steps) == 0 {
		names := []string{"Check", "Plan", "Confirm", "Run", "Result"}
		switch {
		case s == screenPlan && !c.upg.planning:
			at = 1
		case s == screenAccept:
			at = 2
		}
		for i, n := range names {
			x := stop{n, c.th.pending, faint, faint, i < at}
			switch {
			case i < at:
				x.sign, x.st, x.word = c.th.ok, good, plain
			case i == at && (c.err != nil || c.plan != nil && len(c.plan.Blocked()) > 0):
				x.sign, x.st, x.word = c.th.fail, bad, strong
			case i == at:
				x.sign, x.st, x.word = c.th.running, accent, strong
			}
			stops = append(stops, x)
		}
	} else {
		for i := range c.t.steps {
			p := &c.t.steps[i]
			x := stop{name: p.id, word: plain}
			x.sign, x.st = c.stepSign(p)
			x.done = p.state == engine.StateDone || p.state == engine.StateSkipped
			switch p.state {
			case "":
				x.sign, x.st, x.word = c.th.pending, faint, faint
			case engine.StateRunning:
				if x.word = strong; c.running {
					x.sign = c.th.running
				}
			}
			stops = append(stops, x)
		}
	}
	// What does not fit loses the names of what is done, the first one first.
	used := 1
	for _, x := range stops {
		used += width(x.sign) + width(x.name) + 4
	}
	r := c.th.row(c.w).add(plain, " ")
	for i, x := range stops {
		r.add(x.st, x.sign)
		if used-3 > c.w && x.done && i < len(stops)-1 {
			used -= width(x.name) + 1
		} else {
			r.add(x.word, " "+x.name)
		}
		if i < len(stops)-1 {
			line := c.th.signs.rule
			if x.done {
				line = c.th.heavy
			}
			r.add(faint, " "+line+" ")
		}
	}
	return r.String()
}

// atTarget is how many nodes are at the target, of how many; zero before that is known.
func (c *console) atTarget() (n, total int64) {
	if b := c.wat.board; b != nil {
		if done, of := b.Places(); of > 0 { // a machine and the one that replaces it are one
			return int64(done), int64(of)
		}
	}
	for i := range c.t.steps {
		if s := &c.t.steps[i]; s.id == engine.StepRollout {
			return s.progress, s.total
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
	case c.t.pastFinal():
		parts = append(parts, "the cluster goes on alone, also without this console")
	default:
		parts = append(parts, "no node is replaced before set-target; leaving loses nothing")
	}
	if i := slices.IndexFunc(c.t.steps, func(s step) bool { return s.id == engine.StepBackup }); i >= 0 && c.w >= 100 {
		switch c.t.steps[i].state {
		case engine.StateDone:
			parts = append(parts, "backup made and verified")
		case engine.StateSkipped:
			parts = append(parts, "backup was made before")
		}
	}
	if c.t.run != "" && c.w >= 140 {
		parts = append(parts, "record "+engine.RunsDir+"/"+c.t.run)
	}
	return "safety  " + strings.Join(parts, " "+c.th.dot+" ")
}
