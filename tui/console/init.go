package console

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
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

// The screens of the init wizard: config, preflight, confirm.

// configScreen edits the few configuration values that a new user chooses. The others are
// shown here and edited in the file.
type configScreen struct {
	defaults
	c        *console
	exists   bool // the file exists
	locked   string
	fields   []formField
	at       int
	editing  bool
	input    textinput.Model
	problems []plan.Finding
	err      error
	rows     [][2]string // other values of the configuration
}

func (scr *configScreen) title() string   { return "config" }
func (scr *configScreen) mode() string    { return scr.c.wizardMode(scr) }
func (scr *configScreen) rail() string    { return scr.c.rail(scr.c.wizardAt(scr)) }
func (scr *configScreen) safety() string  { return "scripted  " + scr.command() }
func (scr *configScreen) command() string { return scr.c.deps.Commands.Command("config validate") }
func (scr *configScreen) takesText() bool { return scr.editing }

// typed handles a key of the field being edited.
func (scr *configScreen) typed(k tea.KeyMsg) {
	switch k.Type {
	case tea.KeyEnter, tea.KeyTab:
		scr.fields[scr.at].value = strings.TrimSpace(scr.input.Value())
		scr.editing = false
		scr.input.Blur()
	case tea.KeyEsc:
		scr.editing = false
		scr.input.Blur()
	default:
		scr.input, _ = scr.input.Update(k) // its command only makes the cursor blink
	}
}

func (scr *configScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	if msg, ok := msg.(configSet); ok {
		return scr.tookConfig(msg), true
	}
	return nil, false
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
			{"provider", c.Provider.Name},
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

func (scr *configScreen) keys() []binding {
	return []binding{
		on("enter", "Enter", "continue to the checks", "wizard", scr.next).footed("continue").unless(func() string {
			switch {
			case scr.c.home == nil:
				return "the workspace cannot be read"
			case scr.exists && scr.c.home.Config == nil:
				return "correct the file first, then r"
			}
			return ""
		}),
		on("e", "e", "edit the selected field", "wizard", scr.editField).footed("edit").unless(scr.isLocked),
		on("left h", "← h", "previous choice", "wizard", act(func() { scr.chooseField(-1) })).unless(scr.isLocked),
		on("right l", "→ l", "next choice", "wizard", act(func() { scr.chooseField(1) })).unless(scr.isLocked),
		on("up k shift+tab", "↑ k", "previous field", "move", act(func() { scr.at = max(0, scr.at-1) })),
		on("down j tab", "↓ j", "next field", "move", act(func() { scr.at = min(len(scr.fields)-1, scr.at+1) })),
		on("r", "r", "reload the file", "wizard", scr.reread).footed("reload"),
		on("y", "y", "copy the path of the file", "copy", act(func() {
			if scr.c.home != nil {
				scr.c.copyText(scr.c.home.Dir+"/constellation-conf.yaml", "the path")
			}
		})),
		on("esc", "Esc", "home", "back", scr.c.goHome).footed("home"),
	}
}

func (scr *configScreen) reread() tea.Cmd {
	scr.c.busy = "reading the workspace"
	return scr.c.readHome()
}

func (scr *configScreen) isLocked() string { return scr.locked }

func (scr *configScreen) editField() tea.Cmd {
	f := scr
	if len(f.fields[f.at].choices) > 0 {
		scr.chooseField(1)
		return nil
	}
	f.editing = true
	f.input.SetValue(f.fields[f.at].value)
	f.input.CursorEnd()
	f.input.Focus()
	return nil
}

func (scr *configScreen) chooseField(by int) {
	f := &scr.fields[scr.at]
	if n := len(f.choices); n > 0 {
		i := slices.Index(f.choices, f.value)
		f.value = f.choices[(i+by+n)%n]
	}
}

// next writes the changed values and continues to the checks.
func (scr *configScreen) next() tea.Cmd {
	f := scr
	if f.exists && !f.changed() {
		return scr.c.startPreflight()
	}
	fields, exists := slices.Clone(f.fields), f.exists
	d := scr.c.deps
	scr.c.busy = "writing the configuration"
	ctx := scr.c.ctx
	return func() tea.Msg {
		path, err := writeConfig(ctx, d, exists, fields)
		return configSet{path, err}
	}
}

// writeConfig generates the configuration, or changes only its edited fields.
func writeConfig(ctx context.Context, d consoleDeps, exists bool, fields []formField) (path string, err error) {
	if !exists {
		o := workspace.GenerateOptions{Name: fields[0].value, Kubernetes: fields[1].value}
		if d.Sandbox != nil {
			o.Sandbox = d.Sandbox(ctx)
		}
		if o.Sandbox == nil {
			// `sandbox up` writes the file with the machines' measurements. A file without
			// them would only be in its way.
			return "", &plan.Error{
				Op: "write a configuration", Err: errors.New("this workspace has no machines yet"),
				Remedy: "run `constellation sandbox up`, which creates machines and writes the file",
			}
		}
		b, err := workspace.GenerateConfig("sandbox", o)
		if err != nil {
			return "", err
		}
		return d.Workspace.WriteConfig(b)
	}
	b, err := d.Workspace.ReadConfig()
	if err != nil {
		return "", err
	}
	for _, f := range fields {
		if f.changed() {
			b = setScalar(b, f.key, f.value)
		}
	}
	if _, err := workspace.ParseConfig(b); err != nil {
		return "", err
	}
	return "constellation-conf.yaml", d.Workspace.ReplaceConfig(b)
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

func (scr *configScreen) tookConfig(msg configSet) tea.Cmd {
	scr.c.busy = ""
	if msg.err != nil {
		scr.err = msg.err
		return nil
	}
	scr.err = nil
	scr.c.note = "wrote " + term.Clean(msg.path)
	if scr.exists {
		for i := range scr.fields {
			scr.fields[i].was = scr.fields[i].value
		}
		return tea.Batch(scr.c.readHome(), scr.c.startPreflight())
	}
	return scr.c.goHome() // a new file needs machines first: home suggests how to create them
}

// why is the line that says what Enter does.
func (f *configScreen) why() []string {
	c := f.c
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
	return []string{r.String()}
}

func (scr *configScreen) view(w, h int) []string {
	f := scr
	where := "new file"
	if f.exists {
		where = "constellation-conf.yaml"
	}
	lines := []string{scr.c.th.Rule(w, "Configuration", where), ""}
	for i, x := range f.fields {
		here := i == f.at
		st := term.Plain
		if here {
			st = term.Strong
		}
		r := scr.c.th.Row(w).Add(term.Plain, "  ").Add(term.Accent, view.Marker(scr.c.page(), here)).Col(st, x.title, 16)
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
		lines = append(lines, scr.c.th.Row(w).Pad(4).Add(term.Faint, "read-only: "+f.locked).String())
	}
	lines = append(lines, "")
	for _, kv := range f.rows {
		lines = append(lines, scr.c.th.Row(w).Pad(4).Col(term.Faint, kv[0], 16).Add(term.Plain, term.Clean(kv[1])).String())
	}
	if f.err != nil {
		lines = append(lines, "")
		lines = append(lines, view.Problem(scr.c.page(), w, f.err)...)
	}
	lines = append(lines, view.Findings(scr.c.page(), w, f.problems, max(1, (h-len(lines))/2))...)
	return lines
}

// preflightScreen is the screen of the preflight checks and their results.
type preflightScreen struct {
	defaults
	c        *console
	t        view.Timeline
	done     bool
	err      error
	findings []plan.Finding
	at       int
}

func (scr *preflightScreen) title() string   { return "preflight" }
func (scr *preflightScreen) mode() string    { return scr.c.wizardMode(scr) }
func (scr *preflightScreen) rail() string    { return scr.c.rail(scr.c.wizardAt(scr)) }
func (scr *preflightScreen) safety() string  { return "scripted  " + scr.command() }
func (scr *preflightScreen) command() string { return scr.c.runCommand() }

func (scr *preflightScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	if msg, ok := msg.(preflightEnded); ok {
		scr.done, scr.err, scr.findings = true, msg.err, msg.findings
		scr.selectWorst()
		return nil, true
	}
	return nil, false
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
	for _, s := range []plan.Severity{plan.Block, plan.Warn} {
		if i := slices.IndexFunc(p.results(), func(c view.Check) bool { return c.State == string(s) }); i >= 0 {
			p.at = i
			return
		}
	}
}

func (p *preflightScreen) counts() (done, warn, block, total int) {
	for _, c := range p.results() {
		total++
		switch plan.Severity(c.State) {
		case plan.Warn:
			warn++
			done++
		case plan.Block:
			block++
			done++
		case plan.Info:
			done++
		}
	}
	return done, warn, block, total
}

func (scr *preflightScreen) keys() []binding {
	return []binding{
		on("enter", "Enter", "continue to the plan", "wizard", scr.c.makePlan).footed("show plan").unless(func() string {
			_, _, block, _ := scr.counts()
			switch {
			case !scr.done:
				return "the checks are still running"
			case scr.err != nil:
				return "the checks could not run"
			case block > 0:
				return words.Count(block, "check") + " failed; fix it, then r"
			case scr.c.busy != "":
				return "planning"
			}
			return ""
		}),
		on("r", "r", "run the checks again", "wizard", scr.c.startPreflight).footed("check again"),
		on("up k", "↑ k", "previous check", "move", act(func() { scr.at = max(0, scr.at-1) })),
		on("down j", "↓ j", "next check", "move", act(func() { scr.at = max(0, min(len(scr.results())-1, scr.at+1)) })),
		on("y", "y", "copy the remedy of the selected check", "copy", act(func() {
			if l := scr.results(); scr.at < len(l) {
				scr.c.copyText(scr.c.deps.Commands.Text(l[scr.at].Remedy), "the remedy")
			}
		})).footed("copy fix"),
		on("esc", "Esc", "back to the configuration", "back", act(func() {
			if scr.c.cancel != nil {
				scr.c.cancel()
			}
			scr.c.screen = scr.c.config
		})).footed("back"),
	}
}

func (p *preflightScreen) why() []string {
	c := p.c
	r := c.th.Row(c.w).Add(term.Plain, " ")
	_, warn, block, _ := p.counts()
	switch {
	case p.err != nil:
		r.Add(term.Bad, c.th.Fail+" ").Add(term.Strong, "The checks could not run. Nothing has been created.")
	case !p.done || c.busy != "":
		r.Add(term.Accent, c.th.Spin(c.frame)+" ").Add(term.Plain, c.busy)
	case block > 0:
		r.Add(term.Bad, c.th.Fail+" ").Add(term.Strong, "Blocked: "+words.Count(block, "failed check")+". Fix it and press r; nothing has been created yet.")
	case warn > 0:
		r.Add(term.Caution, c.th.Warn+" ").Add(term.Strong, words.Count(warn, "warning")+": read before you continue. Enter shows the plan.")
	default:
		r.Add(term.Good, c.th.OK+" ").Add(term.Strong, "All checks passed. Enter shows the plan; nothing has been created yet.")
	}
	return []string{r.String()}
}

func (scr *preflightScreen) view(w, h int) []string {
	p := scr
	done, warn, block, total := p.counts()
	remark := fmt.Sprintf("%d of %d done", done, total)
	if warn > 0 {
		remark += ", " + words.Count(warn, "warning")
	}
	if block > 0 {
		remark += fmt.Sprintf(", %d failed", block)
	}
	lines := []string{scr.c.th.Rule(w, "Preflight", remark)}
	if p.err != nil {
		return append(lines, view.Problem(scr.c.page(), w, p.err)...)
	}
	list := p.results()
	if len(list) == 0 && p.done {
		return append(lines, scr.c.th.Row(w).Add(term.Faint, "   there was nothing to check").String())
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
		rows = append(rows, view.CheckRow(scr.c.page(), x, left, i == p.at))
		if left == w && (i == p.at || plan.Severity(x.State) == plan.Block || plan.Severity(x.State) == plan.Warn) {
			rows = append(rows, view.CheckDetail(scr.c.page(), x, w, 16)...)
		}
	}
	from, to := view.Window(len(rows), top, h-1)
	if hidden := len(rows) - (to - from); hidden > 0 && h > 3 { // the last row shows their number
		from, to = view.Window(len(rows), top, h-2)
		rows = append(rows[from:to:to], scr.c.th.Row(left).Pad(3).Add(term.Faint, fmt.Sprintf("%s %s: ↑↓ scrolls", scr.c.th.Ellipsis, words.Count(hidden+1, "more line"))).String())
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
			side = append(side, scr.c.th.Paint(term.Strong, l))
		}
		side = append(side, "")
		side = append(side, view.CheckDetail(scr.c.page(), x, w-left-3, 0)...)
	}
	for i := range max(len(rows), len(side)) {
		var l, r string
		if i < len(rows) {
			l = rows[i]
		}
		if i < len(side) {
			r = side[i]
		}
		lines = append(lines, l+strings.Repeat(" ", max(0, left-term.StyledWidth(l)))+scr.c.th.Paint(term.Faint, scr.c.th.Side)+" "+r)
	}
	return lines
}

// initConfirmScreen is the screen of init's plan and its confirmation.
type initConfirmScreen struct {
	defaults
	c      *console
	yes    bool // the cursor is on "create"
	scroll int
	shown  time.Time
	plan   *plan.Plan
}

func (scr *initConfirmScreen) title() string   { return "confirm" }
func (scr *initConfirmScreen) mode() string    { return scr.c.wizardMode(scr) }
func (scr *initConfirmScreen) rail() string    { return scr.c.rail(scr.c.wizardAt(scr)) }
func (scr *initConfirmScreen) safety() string  { return "scripted  " + scr.command() }
func (scr *initConfirmScreen) command() string { return scr.c.runCommand() }

// newInitConfirm selects the safe answer if there are warnings.
func newInitConfirm(c *console, p *plan.Plan, now time.Time) *initConfirmScreen {
	return &initConfirmScreen{c: c, plan: p, shown: now, yes: len(p.Warnings()) == 0 && !slices.ContainsFunc(p.Steps, func(s plan.Step) bool { return s.Warning != "" && !s.Finished })}
}

func (scr *initConfirmScreen) keys() []binding {
	return []binding{
		on("enter", "Enter", "confirm the selected answer", "wizard", scr.answer).footed("answer").unless(func() string {
			if scr.yes && scr.c.plan != nil && len(scr.c.plan.Blocked()) > 0 {
				return "the plan is blocked"
			}
			return ""
		}),
		on("left right tab h l shift+tab", "← →", "choose", "wizard", act(func() { scr.yes = !scr.yes })).footed("choose"),
		on("up k", "↑ k", "scroll up", "move", act(func() { scr.scroll = max(0, scr.scroll-1) })),
		on("down j", "↓ j", "scroll down", "move", act(func() {
			scr.scroll = min(scr.scroll+1, len(view.InitPlanRows(scr.c.page(), scr.c.w, scr.c.plan)))
		})),
		on("esc", "Esc", "back to the checks", "back", scr.c.startPreflight).footed("back"),
	}
}

func (scr *initConfirmScreen) answer() tea.Cmd {
	if scr.c.now.Sub(scr.shown) < confirmDelay {
		scr.c.note = "read it first, then press Enter"
		return nil
	}
	if scr.yes {
		return scr.c.startRun()
	}
	return scr.c.startPreflight()
}

func (a *initConfirmScreen) why() []string {
	c := a.c
	create, back := "Create the cluster", "Back"
	if a.plan != nil && a.plan.Resumes() {
		create = "Resume"
	}
	r := c.th.Row(c.w).Add(term.Plain, " ")
	if a.plan != nil && len(a.plan.Blocked()) > 0 {
		return []string{r.Add(term.Bad, c.th.Fail+" ").Add(term.Strong, "Blocked: "+term.Clean(a.plan.Blocked()[0].Title)).String()}
	}
	if a.yes {
		return []string{r.Add(term.Accent, c.th.Cursor+" ").Add(term.Chosen, " "+create+" ").Add(term.Plain, "   ").Add(term.Faint, "  "+back+" ").String()}
	}
	return []string{r.Add(term.Faint, "   "+create+" ").Add(term.Plain, "   ").Add(term.Accent, c.th.Cursor+" ").Add(term.Chosen, " "+back+" ").String()}
}

func (scr *initConfirmScreen) view(w, h int) []string {
	p := scr.c.plan
	remark := words.Count(len(p.Steps), "step")
	if n := view.NodesOf(p); n > 0 {
		remark += ", " + words.Count(n, "machine")
	}
	lines := []string{scr.c.th.Rule(w, "Plan: "+string(p.Verb)+" "+term.Clean(p.Cluster), remark)}
	if to := view.Target(p.To); to != "" {
		lines = append(lines, scr.c.th.Row(w).Add(term.Plain, " ").Add(term.Faint, "to ").Add(term.Plain, to).String())
	}
	rows := view.InitPlanRows(scr.c.page(), w, p)
	room := h - len(lines)
	from := max(0, min(scr.scroll, len(rows)-room))
	to := min(len(rows), from+room)
	shown := rows[from:to]
	lines = append(lines, shown...)
	if to < len(rows) {
		lines[len(lines)-1] = scr.c.th.Row(w).Pad(5).Add(term.Faint, fmt.Sprintf("… %d more lines: ↓", len(rows)-to+1)).String()
	}
	return lines
}
