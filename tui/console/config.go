package console

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/charmbracelet/bubbles/textinput"
	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/engine/cloud/providers"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

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

// configSet is the end of writing the configuration.
type configSet struct {
	path string
	err  error
}

func (scr *configScreen) title() string   { return "config" }
func (scr *configScreen) mode() string    { return scr.c.wizard.mode(scr) }
func (scr *configScreen) rail() string    { return scr.c.wizard.rail(scr.c.wizard.at(scr)) }
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
	hint                   string // an example, shown in an empty field
	help                   string // one line, shown while the field is selected
	choices                []string
	// more hides the field until moreKey shows it. when reports whether the form has the field; nil: it always has.
	more bool
	when func(*form) bool
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
			{"release", c.Services.String()},
			{"control planes", fmt.Sprint(c.ControlPlanes())},
			{"workers", fmt.Sprint(c.Workers())},
			{"pods", c.PodCIDR.String()},
			{"services", c.ServiceCIDR.String()},
		}
		if !c.Image.IsZero() {
			f.rows = slices.Insert(f.rows, 1, [2]string{"image", c.Image.String()})
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
		on("esc", "Esc", "home", "back", scr.c.overview.show).footed("home"),
	}
}

func (scr *configScreen) reread() tea.Cmd {
	scr.c.task.busy = "reading the workspace"
	return scr.c.overview.read()
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
		return scr.c.preflight.start()
	}
	fields, exists := slices.Clone(f.fields), f.exists
	d := scr.c.deps
	scr.c.task.busy = "writing the configuration"
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
			// The verb that creates machines writes the file with the machines' measurements. A file without
			// them would only be in its way.
			return "", &plan.Error{
				Op: "write a configuration", Err: errors.New("this workspace has no machines yet"),
				Remedy: providers.Start(),
			}
		}
		b, err := workspace.GenerateConfig(o.Sandbox.Provider(), o)
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
	scr.c.task.busy = ""
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
		return tea.Batch(scr.c.overview.read(), scr.c.preflight.start())
	}
	return scr.c.overview.show() // a new file needs machines first: home suggests how to create them
}

// why is the line that says what Enter does.
func (f *configScreen) why() []string {
	c := f.c
	r := c.th.Row(c.w).Add(term.Plain, " ")
	switch {
	case c.task.busy != "":
		r.Add(term.Accent, c.th.Spin(c.frame)+" ").Add(term.Plain, c.task.busy)
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
