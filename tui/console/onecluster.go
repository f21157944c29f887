package console

import (
	"context"
	"strconv"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/tui/term"
	"constellation/tui/view"
)

func itoa(n int) string { return strconv.Itoa(n) }

// clusterScreen shows the check of one cluster of a kubeconfig.
type clusterScreen struct {
	defaults
	c      *console
	row    int // in the list of clusters
	first  int // line at the top
	most   int // greatest first of the last frame
	err    error
	doing  string // what the check does
	plugin string // what the credential plugin printed
	// unlocked is set when the name of a guarded cluster was typed. It ends with the screen.
	unlocked bool
	types    bool
	name     string // being typed
}

// clusterChecked is the end of a check.
type clusterChecked struct {
	row int
	k   check.ClusterCheck
	err error
}

// pluginLines bounds what is shown of a credential plugin's output.
const pluginLines = 3

func (scr *clusterScreen) x() *view.ClusterRow { return &scr.c.clusters.rows[scr.row] }

func (scr *clusterScreen) title() string   { return "cluster" }
func (scr *clusterScreen) command() string { return checkCommand(scr.c, scr.x().Name, false) }
func (scr *clusterScreen) locked() bool    { return scr.x().Guarded && !scr.unlocked }

func (scr *clusterScreen) mode() string {
	switch {
	case scr.locked():
		return "GUARDED: READ-ONLY"
	case scr.x().Guarded:
		return "GUARDED: UNLOCKED"
	}
	return "READ-ONLY"
}

// open shows a cluster and checks it. A credential plugin may run.
func (scr *clusterScreen) open(row int) tea.Cmd {
	*scr = clusterScreen{c: scr.c, row: row}
	scr.c.screen = scr
	if err := scr.c.deps.Clusters.Opened(scr.x().Name); err != nil {
		scr.c.note = "recent clusters were not written: " + term.Clean(err.Error())
	}
	if scr.x().Checked != nil {
		return nil
	}
	return scr.check(false)
}

// check checks the cluster.
func (scr *clusterScreen) check(dryRun bool) tea.Cmd {
	row, name, run := scr.row, scr.x().Name, scr.c.deps.Clusters.Check
	scr.err, scr.doing, scr.plugin, scr.first = nil, "", "", 0
	return scr.c.task.launch("checking "+term.Clean(name), scr.events, func(ctx context.Context, emit func(plan.Event)) tea.Msg {
		k, err := run(ctx, name, dryRun, emit)
		return clusterChecked{row, k, err}
	})
}

func (scr *clusterScreen) events(events []plan.Event) tea.Cmd {
	for _, e := range events {
		if e.Text != "" {
			scr.doing = term.Clean(e.Text)
		}
	}
	scr.readPlugin()
	return nil
}

func (scr *clusterScreen) readPlugin() {
	if text := scr.c.deps.Clusters.PluginText(); text != "" {
		scr.plugin += text
		if n := len(scr.plugin) - 4096; n > 0 {
			scr.plugin = scr.plugin[n:]
		}
	}
}

func (scr *clusterScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	m, ok := msg.(clusterChecked)
	if !ok {
		return nil, false
	}
	scr.readPlugin()
	x := &scr.c.clusters.rows[m.row]
	if m.err != nil {
		scr.err = m.err
		return nil, true
	}
	x.Checked = &m.k
	if x.Glance == nil || x.Glance.State != check.GlanceReachable { // its plugin ran for this check
		x.Glance = &check.Glance{Context: x.Name, Server: x.Server, State: check.GlanceReachable, Kubernetes: m.k.Kubernetes, Distribution: m.k.Distribution, NodesUnknown: "not read"}
	}
	return nil, true
}

func (scr *clusterScreen) header() []string {
	t, x := scr.c.th, scr.x()
	r := t.Row(scr.c.w).Add(term.Accent, " "+t.Brand+" ").Add(term.Strong, term.Clean(x.Name))
	if scr.c.w >= 80 {
		r.Add(term.Faint, "  "+term.Clean(x.Server))
	}
	st := term.Faint
	if x.Guarded {
		st = term.Bad
	}
	return []string{r.Right(st, scr.mode()).String()}
}

func (scr *clusterScreen) view(w, h int) []string {
	inner, room := w, h
	if scr.x().Guarded {
		inner, room = view.GuardedWidth(w), h-2
	}
	all := scr.body(inner)
	scr.most = max(0, len(all)-room)
	scr.first = min(scr.first, scr.most)
	lines := all[scr.first:min(len(all), scr.first+room)]
	if !scr.x().Guarded {
		return lines
	}
	title := "guarded: read-only until its name is typed"
	if scr.unlocked {
		title = "guarded: unlocked"
	}
	return view.Guarded(scr.c.page(), w, h, title, lines)
}

func (scr *clusterScreen) body(w int) []string {
	pg, x := scr.c.page(), scr.x()
	pg.Commands = scr.c.deps.Commands
	pg.Commands.Context = x.Name
	if x.Checked != nil && scr.err == nil && scr.c.task.busy == "" {
		return view.ClusterCheck(pg, w, x.Checked)
	}
	lines := view.ClusterGlance(pg, w, x)
	if scr.err != nil {
		lines = append(lines, view.Problem(pg, w, scr.err)...)
	}
	if scr.plugin != "" {
		lines = append(lines, pg.Rule(w, "Credential plugin", ""))
		said := term.Wrap(term.CleanLines(scr.plugin), w-2)
		for _, l := range said[max(0, len(said)-pluginLines):] {
			lines = append(lines, pg.Row(w).Pad(2).Add(term.Plain, l).String())
		}
	}
	return lines
}

func (scr *clusterScreen) why() []string {
	switch {
	case scr.types:
		return []string{scr.c.th.Row(scr.c.w).Add(term.Caution, " Type "+term.Clean(scr.x().Name)+" to unlock: ").Add(term.Plain, scr.name+"▏").String()}
	case scr.c.task.busy != "":
		text := "Now: " + scr.c.task.busy
		if scr.doing != "" {
			text += ": " + scr.doing
		}
		return []string{scr.c.th.Row(scr.c.w).Add(term.Plain, " "+scr.c.th.Spin(scr.c.frame)+" "+text).String()}
	}
	return nil
}

func (scr *clusterScreen) safety() string {
	if scr.most > 0 {
		return "line " + itoa(scr.first+1) + " of " + itoa(scr.most+1)
	}
	return ""
}

func (scr *clusterScreen) takesText() bool { return scr.types }

func (scr *clusterScreen) typed(k tea.KeyMsg) {
	name, typing := editFilter(scr.name, k)
	scr.types = typing
	if !typing && k.Type == tea.KeyEnter {
		if name == term.Clean(scr.x().Name) {
			scr.unlocked = true
		} else {
			scr.c.note = "that is not the name: the cluster stays read-only"
		}
		name = ""
	}
	scr.name = name
}

func (scr *clusterScreen) scroll(by int) func() tea.Cmd {
	return act(func() { scr.first = max(0, min(scr.first+by, scr.most)) })
}

func (scr *clusterScreen) keys() []binding {
	busy := func() string {
		if scr.c.task.busy != "" {
			return "the check is running"
		}
		return ""
	}
	keys := []binding{
		on("esc", "Esc", "back to the list; ends a running check", "back", scr.back).footed("clusters"),
		on("down j", "↑↓ jk", "scroll down", "move", scr.scroll(1)).footed("scroll"),
		on("up k", "↑", "scroll up", "move", scr.scroll(-1)),
		on("pgdown ctrl+d space", "PgDn", "next page", "move", func() tea.Cmd { return scr.scroll(max(1, scr.c.h-8))() }),
		on("pgup ctrl+u", "PgUp", "previous page", "move", func() tea.Cmd { return scr.scroll(-max(1, scr.c.h-8))() }),
		on("home g", "g", "first line", "move", act(func() { scr.first = 0 })),
		on("end G", "G", "last line", "move", act(func() { scr.first = scr.most })),
	}
	if a := scr.c.deps.Clusters.Adopt; a != nil {
		help, foot := "adopt the cluster: report first, then a workspace", "adopt"
		if _, own := a.Own[scr.x().Name]; own {
			help, foot = "install the operator: shows its plan first", "operator"
		}
		keys = append(keys, on("a", "a", help, "adopt", func() tea.Cmd { return scr.c.adopt.open(scr.x().Name) }).footed(foot).unless(busy))
	}
	keys = append(keys,
		on("r", "r", "check again", "check", func() tea.Cmd { return scr.check(false) }).footed("check again").unless(busy),
		on("d", "d", "check with dry-run requests, which others can notice", "check", func() tea.Cmd { return scr.check(true) }).footed("dry-run requests").unless(func() string {
			if scr.locked() {
				return "this cluster is guarded; press U and type its name"
			}
			return busy()
		}),
	)
	if scr.locked() {
		keys = append(keys, on("U", "U", "unlock the guarded cluster by typing its name", "check", act(func() { scr.types, scr.name = true, "" })).footed("unlock"))
	}
	return keys
}

func (scr *clusterScreen) back() tea.Cmd {
	scr.c.task.drop()
	scr.unlocked = false
	scr.c.screen = scr.c.clusters
	return nil
}
