package tui

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/bubbles/textinput"
	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/tui/term"
	"constellation/tui/view"
)

// The screens of the init wizard: config, preflight, confirm.

// configScreen edits the few configuration values that a new user chooses. The others are
// shown here and edited in the file.
type configScreen struct {
	c *console
	exists   bool // the file exists
	locked   string
	fields   []formField
	at       int
	editing  bool
	input    textinput.Model
	problems []engine.Finding
	err      error
	rows     [][2]string // other values of the configuration
}

type formField struct {
	key, title, value, was string
	hint                   string
	choices                []string
}

func (f formField) changed() bool { return f.value != f.was }

func newConfigScreen(con *console, h *engine.Home, versions []string) *configScreen {
	f := &configScreen{c: con, exists: h.Stage != engine.StageEmpty, problems: h.Problems}
	name, kubernetes := "demo", ""
	if len(versions) > 0 {
		kubernetes = versions[0]
	}
	if c := h.Config; c != nil {
		name, kubernetes = c.Name, c.Kubernetes.String()
		f.rows = [][2]string{
			{"provider", c.Provider.Name()},
			{"image", c.Image.String()},
			{"release", c.Services.String()},
			{"control planes", fmt.Sprint(c.ControlPlanes())},
			{"workers", fmt.Sprint(c.Workers())},
			{"pods", c.PodCIDR.String()},
			{"services", c.ServiceCIDR.String()},
		}
	}
	if h.Stage == engine.StagePartial || h.Stage == engine.StageCluster {
		f.locked = "init has started with these values"
	}
	if f.exists && h.Config == nil {
		f.locked = "the file has errors"
	}
	choices := versions
	if !slices.Contains(choices, kubernetes) && kubernetes != "" {
		choices = append([]string{kubernetes}, choices...)
	}
	f.fields = []formField{
		{key: "name", title: "cluster name", value: name, was: name, hint: "a-z, 0-9 and -, at most 37"},
		{key: "kubernetesVersion", title: "Kubernetes", value: kubernetes, was: kubernetes, choices: choices},
	}
	f.input = textinput.New()
	f.input.Prompt = ""
	f.input.CharLimit = 64
	return f
}

func (f *configScreen) changed() bool {
	return slices.ContainsFunc(f.fields, formField.changed)
}

var configKeys = []binding{
	on("enter", "Enter", "continue to the checks", "wizard", (*console).configNext).footed("continue").unless(func(c *console) string {
		switch {
		case c.home == nil:
			return "the workspace cannot be read"
		case c.form.exists && c.home.Config == nil:
			return "correct the file first, then r"
		}
		return ""
	}),
	on("e", "e", "edit the selected field", "wizard", (*console).editField).footed("edit").unless((*console).configLocked),
	on("left h", "← h", "previous choice", "wizard", act(func(c *console) { c.chooseField(-1) })).unless((*console).configLocked),
	on("right l", "→ l", "next choice", "wizard", act(func(c *console) { c.chooseField(1) })).unless((*console).configLocked),
	on("up k shift+tab", "↑ k", "previous field", "move", act(func(c *console) { c.form.at = max(0, c.form.at-1) })),
	on("down j tab", "↓ j", "next field", "move", act(func(c *console) { c.form.at = min(len(c.form.fields)-1, c.form.at+1) })),
	on("r", "r", "reload the file", "wizard", (*console).reread).footed("reload"),
	on("y", "y", "copy the path of the file", "copy", act(func(c *console) {
		if c.home != nil {
			c.copyText(c.home.Dir+"/constellation-conf.yaml", "the path")
		}
	})),
	on("esc", "Esc", "home", "back", (*console).goHome).footed("home"),
}

func (c *console) reread() tea.Cmd {
	c.busy = "reading the workspace"
	return c.readHome()
}

func (c *console) configLocked() string { return c.form.locked }

// typing reports whether keys go into a text field.
func (c *console) typing() bool {
	if c.confirmLeave || c.help || c.rolloutPrompt != nil {
		return false
	}
	if c.pal.open {
		return true
	}
	return c.typingID() || c.screen == screenConfig && c.form.editing || c.screen == screenLog && c.log.typing || c.screen == screenCheck && c.chk.typing || c.screen == screenWatch && c.wat.typing
}

// typed passes a key to the open text field. It reports false for keys that keep their
// binding.
func (c *console) typed(k tea.KeyMsg) bool {
	if k.Type == tea.KeyCtrlC {
		return false
	}
	if c.pal.open {
		return c.typedPalette(k)
	}
	if c.screen == screenUpgradeConfirm {
		c.typeID(k)
		return true
	}
	if c.screen == screenLog {
		c.log.typed(k)
		return true
	}
	if c.screen == screenWatch {
		c.typedWatch(k)
		return true
	}
	if c.screen == screenCheck {
		c.chk.typeFilter(k)
		return true
	}
	f := c.form
	switch k.Type {
	case tea.KeyEnter, tea.KeyTab:
		f.fields[f.at].value = strings.TrimSpace(f.input.Value())
		f.editing = false
		f.input.Blur()
	case tea.KeyEsc:
		f.editing = false
		f.input.Blur()
	default:
		f.input, _ = f.input.Update(k) // its command only makes the cursor blink
	}
	return true
}

func (c *console) editField() tea.Cmd {
	f := c.form
	if len(f.fields[f.at].choices) > 0 {
		c.chooseField(1)
		return nil
	}
	f.editing = true
	f.input.SetValue(f.fields[f.at].value)
	f.input.CursorEnd()
	f.input.Focus()
	return nil
}

func (c *console) chooseField(by int) {
	f := &c.form.fields[c.form.at]
	if n := len(f.choices); n > 0 {
		i := slices.Index(f.choices, f.value)
		f.value = f.choices[(i+by+n)%n]
	}
}

// configNext writes the changed values and continues to the checks.
func (c *console) configNext() tea.Cmd {
	f := c.form
	if f.exists && !f.changed() {
		return c.startPreflight()
	}
	fields, exists := slices.Clone(f.fields), f.exists
	d := c.deps
	c.busy = "writing the configuration"
	ctx := c.ctx
	return func() tea.Msg {
		path, err := writeConfig(ctx, d, exists, fields)
		return configSet{path, err}
	}
}

// writeConfig generates the configuration, or changes only its edited fields.
func writeConfig(ctx context.Context, d consoleDeps, exists bool, fields []formField) (path string, err error) {
	if !exists {
		o := engine.GenerateOptions{Name: fields[0].value, Kubernetes: fields[1].value}
		if d.sandbox != nil {
			o.Sandbox = d.sandbox(ctx)
		}
		if o.Sandbox == nil {
			// `sandbox up` writes the file with the machines' measurements. A file without
			// them would only be in its way.
			return "", &engine.Error{
				Op: "write a configuration", Err: errors.New("this workspace has no machines yet"),
				Remedy: "run `constellation sandbox up`, which creates machines and writes the file",
			}
		}
		b, err := engine.GenerateConfig("sandbox", o)
		if err != nil {
			return "", err
		}
		return d.ws.WriteConfig(b)
	}
	b, err := d.ws.ReadConfig()
	if err != nil {
		return "", err
	}
	for _, f := range fields {
		if f.changed() {
			b = setScalar(b, f.key, f.value)
		}
	}
	if _, err := engine.ParseConfig(b); err != nil {
		return "", err
	}
	return "constellation-conf.yaml", d.ws.ReplaceConfig(b)
}

// setScalar replaces the value of a top-level key of a YAML file and keeps the comment
// behind it.
func setScalar(b []byte, key, value string) []byte {
	re := regexp.MustCompile(`(?m)^(` + regexp.QuoteMeta(key) + `:[ \t]*)("[^"\n]*"|'[^'\n]*'|[^#\s]+)`)
	at := re.FindSubmatchIndex(b)
	if at == nil {
		return b
	}
	return slices.Concat(b[:at[4]], []byte(value), b[at[5]:])
}

func (c *console) tookConfig(msg configSet) tea.Cmd {
	c.busy = ""
	if msg.err != nil {
		c.form.err = msg.err
		return nil
	}
	c.form.err = nil
	c.note = "wrote " + term.Clean(msg.path)
	if c.form.exists {
		for i := range c.form.fields {
			c.form.fields[i].was = c.form.fields[i].value
		}
		return tea.Batch(c.readHome(), c.startPreflight())
	}
	return c.goHome() // a new file needs machines first: home suggests how to create them
}

// verdict is the line that says what Enter does.
func (f *configScreen) verdict(c *console) string {
	r := c.th.Row(c.w).Add(term.Plain, " ")
	switch {
	case c.busy != "":
		r.Add(term.Accent, c.th.Spin(c.frame)+" ").Add(term.Plain, c.busy)
	case f.exists && c.home != nil && c.home.Config == nil:
		r.Add(term.Bad, c.th.Fail+" ").Add(term.Strong, "The configuration has errors. Correct the file and press r.")
	case f.editing:
		r.Add(term.Plain, "Enter accepts the value, Esc discards it")
	case !f.exists:
		r.Add(term.Strong, "Enter writes constellation-conf.yaml")
	case f.changed():
		r.Add(term.Strong, "Enter writes the changes and continues to the checks")
	default:
		r.Add(term.Strong, "Enter continues to the checks; nothing is created before you confirm")
	}
	return r.String()
}

func (c *console) configView(w, h int) []string {
	f := c.form
	where := "new file"
	if f.exists {
		where = "constellation-conf.yaml"
	}
	lines := []string{c.th.Rule(w, "Configuration", where), ""}
	for i, x := range f.fields {
		here := i == f.at
		st := term.Plain
		if here {
			st = term.Strong
		}
		r := c.th.Row(w).Add(term.Plain, "  ").Add(term.Accent, view.Marker(c.page(), here)).Col(st, x.title, 16)
		switch {
		case here && f.editing:
			r.Add(term.Chosen, " "+f.input.Value()+" ").Add(term.Accent, "▏").Add(term.Faint, "  "+x.hint)
		case len(x.choices) > 1 && here && f.locked == "":
			for _, v := range x.choices {
				if v == x.value {
					r.Add(term.Chosen, " "+v+" ")
				} else {
					r.Add(term.Faint, " "+v+" ")
				}
			}
			r.Add(term.Faint, "  ← →")
		default:
			r.Add(st, " "+view.Dash(term.Clean(x.value)))
		}
		if x.changed() && f.exists {
			r.Add(term.Caution, "  was "+term.Clean(x.was))
		}
		r.Right(term.Faint, x.key)
		lines = append(lines, r.String())
	}
	if f.locked != "" {
		lines = append(lines, c.th.Row(w).Pad(4).Add(term.Faint, "read-only: "+f.locked).String())
	}
	lines = append(lines, "")
	for _, kv := range f.rows {
		lines = append(lines, c.th.Row(w).Pad(4).Col(term.Faint, kv[0], 16).Add(term.Plain, term.Clean(kv[1])).String())
	}
	if f.err != nil {
		lines = append(lines, "")
		lines = append(lines, view.Problem(c.page(), w, f.err)...)
	}
	lines = append(lines, view.Findings(c.page(), w, f.problems, max(1, (h-len(lines))/2))...)
	return lines
}

// preflightScreen is the screen of the preflight checks and their results.
type preflightScreen struct {
	c *console
	t        view.Timeline
	done     bool
	err      error
	findings []engine.Finding
	at       int
}

// results returns the results: the checks of events, and findings without an event.
func (p *preflightScreen) results() []view.Check {
	list := p.t.Checks
	for _, f := range p.findings {
		if !slices.ContainsFunc(list, func(c view.Check) bool { return c.ID == term.Clean(f.ID) }) {
			list = append(list[:len(list):len(list)], view.CheckOf(f))
		}
	}
	return list
}

// selectWorst selects the worst check.
func (p *preflightScreen) selectWorst() {
	for _, s := range []engine.Severity{engine.Block, engine.Warn} {
		if i := slices.IndexFunc(p.results(), func(c view.Check) bool { return c.State == string(s) }); i >= 0 {
			p.at = i
			return
		}
	}
}

func (p *preflightScreen) counts() (done, warn, block, total int) {
	for _, c := range p.results() {
		total++
		switch engine.Severity(c.State) {
		case engine.Warn:
			warn++
			done++
		case engine.Block:
			block++
			done++
		case engine.Info:
			done++
		}
	}
	return done, warn, block, total
}

var preflightKeys = []binding{
	on("enter", "Enter", "continue to the plan", "wizard", (*console).makePlan).footed("show plan").unless(func(c *console) string {
		_, _, block, _ := c.pre.counts()
		switch {
		case !c.pre.done:
			return "the checks are still running"
		case c.pre.err != nil:
			return "the checks could not run"
		case block > 0:
			return term.Count(block, "check") + " failed; fix it, then r"
		case c.busy != "":
			return "planning"
		}
		return ""
	}),
	on("r", "r", "run the checks again", "wizard", (*console).startPreflight).footed("check again"),
	on("up k", "↑ k", "previous check", "move", act(func(c *console) { c.pre.at = max(0, c.pre.at-1) })),
	on("down j", "↓ j", "next check", "move", act(func(c *console) { c.pre.at = max(0, min(len(c.pre.results())-1, c.pre.at+1)) })),
	on("y", "y", "copy the remedy of the selected check", "copy", act(func(c *console) {
		if l := c.pre.results(); c.pre.at < len(l) {
			c.copyText(c.deps.commands.Text(l[c.pre.at].Remedy), "the remedy")
		}
	})).footed("copy fix"),
	on("esc", "Esc", "back to the configuration", "back", act(func(c *console) {
		if c.cancel != nil {
			c.cancel()
		}
		c.screen = screenConfig
	})).footed("back"),
}

func (p *preflightScreen) verdict(c *console) string {
	r := c.th.Row(c.w).Add(term.Plain, " ")
	_, warn, block, _ := p.counts()
	switch {
	case p.err != nil:
		r.Add(term.Bad, c.th.Fail+" ").Add(term.Strong, "The checks could not run. Nothing has been created.")
	case !p.done || c.busy != "":
		r.Add(term.Accent, c.th.Spin(c.frame)+" ").Add(term.Plain, c.busy)
	case block > 0:
		r.Add(term.Bad, c.th.Fail+" ").Add(term.Strong, "Blocked: "+term.Count(block, "failed check")+". Fix it and press r; nothing has been created yet.")
	case warn > 0:
		r.Add(term.Caution, c.th.Warn+" ").Add(term.Strong, term.Count(warn, "warning")+": read before you continue. Enter shows the plan.")
	default:
		r.Add(term.Good, c.th.OK+" ").Add(term.Strong, "All checks passed. Enter shows the plan; nothing has been created yet.")
	}
	return r.String()
}

func (c *console) preflightView(w, h int) []string {
	p := c.pre
	done, warn, block, total := p.counts()
	remark := fmt.Sprintf("%d of %d done", done, total)
	if warn > 0 {
		remark += ", " + term.Count(warn, "warning")
	}
	if block > 0 {
		remark += fmt.Sprintf(", %d failed", block)
	}
	lines := []string{c.th.Rule(w, "Preflight", remark)}
	if p.err != nil {
		return append(lines, view.Problem(c.page(), w, p.err)...)
	}
	list := p.results()
	if len(list) == 0 && p.done {
		return append(lines, c.th.Row(w).Add(term.Faint, "   there was nothing to check").String())
	}
	left := w
	if w >= 110 { // the details of the selected check are beside the list
		left = w * 6 / 10
	}
	var rows []string
	top := 0
	for i, x := range list {
		if i == p.at {
			top = len(rows)
		}
		rows = append(rows, view.CheckRow(c.page(), x, left, i == p.at))
		if left == w && (i == p.at || engine.Severity(x.State) == engine.Block || engine.Severity(x.State) == engine.Warn) {
			rows = append(rows, view.CheckDetail(c.page(), x, w, 16)...)
		}
	}
	from, to := view.Window(len(rows), top, h-1)
	if hidden := len(rows) - (to - from); hidden > 0 && h > 3 { // the last row shows their number
		from, to = view.Window(len(rows), top, h-2)
		rows = append(rows[from:to:to], c.th.Row(left).Pad(3).Add(term.Faint, fmt.Sprintf("%s %s: ↑↓ scrolls", c.th.Ellipsis, term.Count(hidden+1, "more line"))).String())
	} else {
		rows = rows[from:to]
	}
	if left == w {
		return append(lines, rows...)
	}
	var side []string
	if p.at < len(list) {
		x := list[p.at]
		for _, l := range term.Wrap(x.Title, w-left-4) {
			side = append(side, c.th.Paint(term.Strong, l))
		}
		side = append(side, "")
		side = append(side, view.CheckDetail(c.page(), x, w-left-3, 0)...)
	}
	for i := range max(len(rows), len(side)) {
		var l, r string
		if i < len(rows) {
			l = rows[i]
		}
		if i < len(side) {
			r = side[i]
		}
		lines = append(lines, l+strings.Repeat(" ", max(0, left-term.StyledWidth(l)))+c.th.Paint(term.Faint, c.th.Side)+" "+r)
	}
	return lines
}

// initConfirmScreen is the screen of init's plan and its confirmation.
type initConfirmScreen struct {
	c *console
	yes    bool // the cursor is on "create"
	scroll int
	shown  time.Time
	plan   *engine.Plan
}

// newInitConfirm selects the safe answer if there are warnings.
func newInitConfirm(c *console, p *engine.Plan, now time.Time) *initConfirmScreen {
	return &initConfirmScreen{c: c, plan: p, shown: now, yes: len(p.Warnings()) == 0 && !slices.ContainsFunc(p.Steps, func(s engine.Step) bool { return s.Warning != "" && !s.Finished })}
}

var initConfirmKeys = []binding{
	on("enter", "Enter", "confirm the selected answer", "wizard", (*console).answerInitConfirm).footed("answer").unless(func(c *console) string {
		if c.initConfirm.yes && c.plan != nil && len(c.plan.Blocked()) > 0 {
			return "the plan is blocked"
		}
		return ""
	}),
	on("left right tab h l shift+tab", "← →", "choose", "wizard", act(func(c *console) { c.initConfirm.yes = !c.initConfirm.yes })).footed("choose"),
	on("up k", "↑ k", "scroll up", "move", act(func(c *console) { c.initConfirm.scroll = max(0, c.initConfirm.scroll-1) })),
	on("down j", "↓ j", "scroll down", "move", act(func(c *console) {
		c.initConfirm.scroll = min(c.initConfirm.scroll+1, len(view.InitPlanRows(c.page(), c.w, c.plan)))
	})),
	on("esc", "Esc", "back to the checks", "back", (*console).startPreflight).footed("back"),
}

func (c *console) answerInitConfirm() tea.Cmd {
	if c.now.Sub(c.initConfirm.shown) < confirmDelay {
		c.note = "read it first, then press Enter"
		return nil
	}
	if c.initConfirm.yes {
		return c.startRun()
	}
	return c.startPreflight()
}

func (a *initConfirmScreen) verdict(c *console) string {
	create, back := "Create the cluster", "Back"
	if a.plan != nil && a.plan.Resumes() {
		create = "Resume"
	}
	r := c.th.Row(c.w).Add(term.Plain, " ")
	if a.plan != nil && len(a.plan.Blocked()) > 0 {
		return r.Add(term.Bad, c.th.Fail+" ").Add(term.Strong, "Blocked: "+term.Clean(a.plan.Blocked()[0].Title)).String()
	}
	if a.yes {
		return r.Add(term.Accent, c.th.Cursor+" ").Add(term.Chosen, " "+create+" ").Add(term.Plain, "   ").Add(term.Faint, "  "+back+" ").String()
	}
	return r.Add(term.Faint, "   "+create+" ").Add(term.Plain, "   ").Add(term.Accent, c.th.Cursor+" ").Add(term.Chosen, " "+back+" ").String()
}

func (c *console) initConfirmView(w, h int) []string {
	p := c.plan
	remark := term.Count(len(p.Steps), "step")
	if n := view.NodesOf(p); n > 0 {
		remark += ", " + term.Count(n, "machine")
	}
	lines := []string{c.th.Rule(w, "Plan: "+string(p.Verb)+" "+term.Clean(p.Cluster), remark)}
	if to := view.Target(p.To); to != "" {
		lines = append(lines, c.th.Row(w).Add(term.Plain, " ").Add(term.Faint, "to ").Add(term.Plain, to).String())
	}
	rows := view.InitPlanRows(c.page(), w, p)
	room := h - len(lines)
	from := max(0, min(c.initConfirm.scroll, len(rows)-room))
	to := min(len(rows), from+room)
	shown := rows[from:to]
	lines = append(lines, shown...)
	if to < len(rows) {
		lines[len(lines)-1] = c.th.Row(w).Pad(5).Add(term.Faint, fmt.Sprintf("… %d more lines: ↓", len(rows)-to+1)).String()
	}
	return lines
}
