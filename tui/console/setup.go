package console

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

// Setup is how a console writes the configuration of a new workspace.
type Setup struct {
	// Find finds what this computer knows of a cloud. It may read files, and sends nothing.
	Find func(provider string) providers.Found
	// Write writes the configuration, and returns its path and the list of machines that it has; nil: it has none.
	Write func(provider string, o workspace.GenerateOptions) (path string, m *Machines, err error)
}

// Keys of the form. Those of a provider's section are its name, a dot, and the path of the field.
const (
	providerKey      = "provider"
	nameKey          = "name"
	kubernetesKey    = "kubernetesVersion"
	controlPlanesKey = "controlPlanes"
	workersKey       = "workers"
)

// setupScreen asks for the provider of a new workspace and its most important settings, and writes the configuration.
type setupScreen struct {
	defaults
	c      *console
	form   *form
	clouds []providers.Provider
	found  map[string]providers.Found // by name of a provider, once it was looked up
	err    error
}

// Messages of the setup screen.
type (
	cloudFound struct {
		provider string
		found    providers.Found
	}
	setUp struct {
		provider, path string
		machines       *Machines
		err            error
	}
)

// open shows the form for a provider; an empty name is the first one.
func (scr *setupScreen) open(provider string) tea.Cmd {
	*scr = setupScreen{c: scr.c, found: map[string]providers.Found{}, clouds: providers.Clouds()}
	slices.SortStableFunc(scr.clouds, func(a, b providers.Provider) int { return strings.Compare(a.Title, b.Title) })
	scr.form = &form{c: scr.c, fields: scr.fields(), invalid: scr.invalid}
	for _, p := range scr.clouds {
		if p.Name == provider {
			scr.form.set(providerKey, p.Title)
		}
	}
	scr.c.screen = scr
	return scr.find()
}

// fields are the fields of all providers. Those of the others are hidden.
func (scr *setupScreen) fields() []formField {
	var titles []string
	for _, p := range scr.clouds {
		titles = append(titles, p.Title)
	}
	made := func(*form) bool { return scr.cloud().Infra }
	local := func(*form) bool { return scr.cloud().Advice.Up != "" }
	version, versions := workspace.DefaultKubernetes, scr.c.deps.Versions
	if len(versions) > 0 && !slices.Contains(versions, version) {
		version = versions[0]
	}
	out := []formField{
		{key: providerKey, title: "machines", value: titles[0], choices: titles, help: "Where the machines of the cluster come from."},
		{key: nameKey, title: "cluster name", value: "demo", when: func(f *form) bool { return !local(f) }, hint: "a-z, 0-9 and -, at most 37", help: "The name of the cluster, in all its files and objects."},
		{key: kubernetesKey, title: "Kubernetes", value: version, choices: versions, when: func(f *form) bool { return !local(f) }, help: "The version that init installs. upgrade apply installs later ones."},
	}
	for _, p := range scr.clouds {
		name := p.Name
		for _, f := range asked(p.Config, "") {
			f.key, f.when = name+"."+f.key, func(*form) bool { return scr.cloud().Name == name }
			out = append(out, f)
		}
	}
	return append(out,
		formField{key: controlPlanesKey, title: "control planes", value: "3", choices: []string{"1", "3", "5"}, when: made, help: "Three survive the loss of one."},
		formField{key: workersKey, title: "workers", value: "2", when: made, hint: "2", help: "How many workers there are at first."},
	)
}

// asked are the fields of a section that the console asks for. Fields of a map have its name and a dot before theirs.
func asked(schema section.Schema, prefix string) (out []formField) {
	for _, f := range schema {
		if f.Kind == section.Map {
			out = append(out, asked(f.Columns, prefix+f.Name+".")...)
		} else if f.Ask != "" {
			out = append(out, formField{key: prefix + f.Name, title: f.Ask, hint: f.Hint, help: f.Help})
		}
	}
	return out
}

// cloud is the provider that is selected.
func (scr *setupScreen) cloud() providers.Provider {
	title := scr.clouds[0].Title
	if scr.form != nil {
		title = scr.form.value(providerKey)
	}
	i := slices.IndexFunc(scr.clouds, func(p providers.Provider) bool { return p.Title == title })
	return scr.clouds[max(0, i)]
}

// find looks up what this computer knows of the selected cloud, once.
func (scr *setupScreen) find() tea.Cmd {
	p, look := scr.cloud(), scr.c.deps.Setup.Find
	if _, ok := scr.found[p.Name]; ok || p.Find == nil || look == nil {
		return nil
	}
	scr.found[p.Name] = providers.Found{}
	return func() tea.Msg { return cloudFound{p.Name, look(p.Name)} }
}

// invalid returns an error if the value of a field is not valid.
func (scr *setupScreen) invalid(key string) error {
	if key == workersKey {
		if n, err := strconv.Atoi(strings.TrimSpace(scr.form.value(key))); err != nil || n < 0 {
			return errors.New("it is no number of machines")
		}
		return nil
	}
	f, ok := fieldOf(scr.cloud(), key)
	if !ok || f.Valid == nil {
		return nil
	}
	texts := []string{strings.TrimSpace(scr.form.value(key))}
	if f.Kind == section.List {
		texts = scr.form.list(key)
	}
	for _, text := range texts {
		if !f.Valid(text) {
			return &plan.Error{Err: errors.New(text + " " + f.Problem), Remedy: f.Remedy}
		}
	}
	return nil
}

// fieldOf returns the field of a provider's section with a key of the form.
func fieldOf(p providers.Provider, key string) (section.Field, bool) {
	path, ok := strings.CutPrefix(key, p.Name+".")
	if !ok {
		return section.Field{}, false
	}
	name, column, nested := strings.Cut(path, ".")
	f, ok := named(p.Config, name)
	if nested {
		return named(f.Columns, column)
	}
	return f, ok
}

// named returns the field of a name.
func named(schema section.Schema, name string) (section.Field, bool) {
	i := slices.IndexFunc(schema, func(f section.Field) bool { return f.Name == name })
	if i < 0 {
		return section.Field{}, false
	}
	return schema[i], true
}

// options are what the form has. Fields of the section that are empty are left out.
func (scr *setupScreen) options() workspace.GenerateOptions {
	f, p := scr.form, scr.cloud()
	o := workspace.GenerateOptions{Name: strings.TrimSpace(f.value(nameKey)), Kubernetes: f.value(kubernetesKey), Section: section.Values{}}
	if p.Infra {
		o.ControlPlanes, _ = strconv.Atoi(f.value(controlPlanesKey)) // a choice
		o.Workers, _ = strconv.Atoi(strings.TrimSpace(f.value(workersKey)))
		if o.Workers == 0 {
			o.Workers = -1 // none
		}
	}
	for _, x := range f.fields {
		of, ok := fieldOf(p, x.key)
		if !ok {
			continue
		}
		text := strings.TrimSpace(x.value)
		name, column, nested := strings.Cut(strings.TrimPrefix(x.key, p.Name+"."), ".")
		switch {
		case of.Kind == section.List:
			o.Section[name] = f.list(x.key)
		case !nested:
			o.Section[name] = text
		case text != "": // a map without fields is left out
			if o.Section.Map(name) == nil {
				o.Section[name] = section.Values{}
			}
			o.Section.Map(name)[column] = text
		}
	}
	return o
}

// missing returns the key of the first empty field that the configuration needs; empty: there is none.
func (scr *setupScreen) missing() string {
	for _, x := range scr.form.fields {
		of, ok := fieldOf(scr.cloud(), x.key)
		if ok && of.Required && !strings.Contains(strings.TrimPrefix(x.key, scr.cloud().Name+"."), ".") && strings.TrimSpace(x.value) == "" {
			return x.key
		}
	}
	return ""
}

// submit writes the configuration. The test cloud writes its own when it starts.
func (scr *setupScreen) submit() tea.Cmd {
	p := scr.cloud()
	if p.Advice.Up != "" {
		scr.c.copyText(scr.c.deps.Commands.Command(p.Advice.Up), "the command to run in a shell")
		return nil
	}
	scr.err = nil
	if key := scr.missing(); key != "" {
		i := slices.IndexFunc(scr.form.fields, func(x formField) bool { return x.key == key })
		scr.form.at, scr.form.wrong = i, map[string]error{key: errors.New("it is required")}
		return nil
	}
	if !scr.form.valid() {
		return nil
	}
	name, o, write := p.Name, scr.options(), scr.c.deps.Setup.Write
	return scr.c.task.launch("writing the configuration", nil, func(context.Context, func(plan.Event)) tea.Msg {
		path, m, err := write(name, o)
		return setUp{name, path, m, err}
	})
}

func (scr *setupScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	switch msg := msg.(type) {
	case cloudFound:
		scr.found[msg.provider] = msg.found
		for name, value := range msg.found.Config {
			for i := range scr.form.fields {
				if x := &scr.form.fields[i]; x.key == msg.provider+"."+name && x.value == "" {
					x.value = fmt.Sprint(value)
				}
			}
		}
	case setUp:
		if scr.err = msg.err; msg.err != nil {
			return nil, true
		}
		scr.c.note = "wrote " + term.Clean(msg.path)
		scr.c.deps.Machines = msg.machines
		p, _ := providers.Named(msg.provider)
		switch {
		case msg.machines != nil:
			return tea.Batch(scr.c.overview.read(), scr.c.machines.show()), true
		case p.Infra:
			return tea.Batch(scr.c.overview.read(), scr.c.infra.show()), true
		}
		return scr.c.overview.show(), true
	default:
		return nil, false
	}
	return nil, true
}

func (scr *setupScreen) title() string   { return "set up" }
func (scr *setupScreen) mode() string    { return "set up" }
func (scr *setupScreen) safety() string  { return "scripted  " + scr.command() }
func (scr *setupScreen) takesText() bool { return true }

func (scr *setupScreen) typed(k tea.KeyMsg)      { scr.err = nil; scr.form.typed(k) }
func (scr *setupScreen) bound(k tea.KeyMsg) bool { return scr.form.bound(k) }

func (scr *setupScreen) command() string {
	p := scr.cloud()
	if p.Advice.Up != "" {
		return scr.c.deps.Commands.Command(p.Advice.Up)
	}
	return scr.c.deps.Commands.Command("config generate " + p.Name + " --name " + view.QuoteArg(strings.TrimSpace(scr.form.value(nameKey))))
}

// The form has all keys. None of a screen that takes no text must work in it.
func (scr *setupScreen) keys() []binding { return scr.promptKeys() }

func (scr *setupScreen) promptKeys() []binding {
	choose := func(by int) func() tea.Cmd {
		return func() tea.Cmd {
			scr.form.choose(by)
			return scr.find()
		}
	}
	word := "write the configuration"
	if scr.cloud().Advice.Up != "" {
		word = "copy the command"
	}
	return []binding{
		on("enter", "Enter", word, "form", scr.submit).footed(word),
		on("down tab", "↓ Tab", "next field", "move", act(func() { scr.form.move(1) })).footed("next field"),
		on("up shift+tab", "↑", "previous field", "move", act(func() { scr.form.move(-1) })),
		on("right", "← →", "next choice", "form", choose(1)).footed("choose"),
		on("left", "←", "previous choice", "form", choose(-1)),
		on("esc", "Esc", "home", "back", scr.c.overview.show).footed("home"),
		on("ctrl+c", "Ctrl-C", "leave", "leave", scr.c.quit.leave).footed("leave"),
	}
}

// why is a line about the selected field.
func (scr *setupScreen) why() []string {
	if scr.c.task.busy != "" {
		return []string{scr.c.th.Row(scr.c.w).Add(term.Plain, " "+scr.c.th.Spin(scr.c.frame)+" "+scr.c.task.busy).String()}
	}
	return []string{scr.c.th.Row(scr.c.w).Add(term.Plain, " ").Add(term.Faint, scr.form.help()).String()}
}

func (scr *setupScreen) view(w, h int) []string {
	pg, p := scr.c.page(), scr.cloud()
	lines := scr.form.page(w, h, "New cluster", "new file "+view.ConfigFile, scr.err)
	below := []string{""}
	add := func(st term.Style, sign, text string) {
		for i, l := range scr.c.th.Below(w, 4, 4, term.Plain, term.Clean(text)) {
			if i == 0 {
				l = "  " + scr.c.th.Paint(st, sign+" ") + strings.TrimPrefix(l, "    ")
			}
			below = append(below, l)
		}
	}
	if f, ok := scr.found[p.Name]; ok {
		if f.Credentials != "" {
			add(term.Good, scr.c.th.OK, "credentials: "+f.Credentials)
		}
		if f.Err != nil {
			add(term.Caution, scr.c.th.Warn, fieldError(f.Err))
		}
	}
	below = append(below, pg.Rule(w, "Next steps", ""))
	for _, text := range next(p) {
		add(term.Faint, scr.c.th.Dot, scr.c.deps.Commands.Text(text))
	}
	return append(lines, below[:max(0, min(len(below), h-len(lines)))]...)
}

// next are sentences about a provider, and about what follows its configuration.
func next(p providers.Provider) []string {
	out := []string{strings.ReplaceAll(p.About, "\n", " ")}
	switch {
	case p.Advice.Up != "":
		return append(out, "Run `constellation "+p.Advice.Up+"` in a shell, then press r on the first screen.")
	case p.Enrolled:
		return append(out, "Add machines by SSH, or by a command that they run. Each one is checked first.", "`constellation init` makes them a cluster.")
	case p.Infra:
		return append(out, "The next screen lists the objects that create makes, and obstacles. Nothing is made before you confirm.", "`constellation init` makes the machines a cluster.")
	}
	return append(out, "`constellation init` makes the machines a cluster.")
}
