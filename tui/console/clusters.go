package console

import (
	"context"
	"strings"
	"sync"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/tui/term"
	"constellation/tui/view"
)

// Clusters are what a console without a workspace shows: the contexts of a kubeconfig.
type Clusters struct {
	// List are the contexts in the order of display.
	List []cluster.Context
	// Look observes a cluster until the deadline of its context.
	Look func(ctx context.Context, name string) check.Glance
	// Check checks a cluster. A credential plugin of its context may run.
	Check func(ctx context.Context, name string, dryRun bool, emit func(plan.Event)) (check.ClusterCheck, error)
	// Guarded reports whether a cluster is read-only until its name is typed.
	Guarded func(name, server string) bool
	// Opened records that a context was opened.
	Opened func(name string) error
	// Adopt makes workspaces of clusters; nil: that is not offered.
	Adopt *Adoption
	// PluginText returns what credential plugins have printed since the last call.
	PluginText func() string
	// Answer is how long a cluster of the list may take to answer, Parallel how many are observed
	// at a time.
	Answer   time.Duration
	Parallel int
}

// clustersScreen is the home of several clusters.
type clustersScreen struct {
	defaults
	c      *console
	rows   []view.ClusterRow
	at     int // of the selected row in shown
	first  int // of the first visible row in shown
	fit    int // rows that the last frame had
	filter string
	types  bool          // the filter is being typed
	gen    int           // of the observation
	left   int           // clusters that have not answered
	drawn  chan struct{} // closed with the first frame, which must not wait for connections
}

// glanced is the answer of a cluster, or the end of its time.
type glanced struct {
	gen, row int
	glance   check.Glance
}

func newClustersScreen(c *console) *clustersScreen {
	scr := &clustersScreen{c: c, fit: 1, drawn: make(chan struct{})}
	if k := c.deps.Clusters; k != nil {
		for _, x := range k.List {
			scr.rows = append(scr.rows, view.ClusterRow{Context: x, Guarded: k.Guarded(x.Name, x.Server)})
		}
	}
	return scr
}

func (scr *clustersScreen) title() string { return "clusters" }
func (scr *clustersScreen) mode() string  { return "" }

func (scr *clustersScreen) command() string {
	if x := scr.selected(); x != nil {
		return checkCommand(scr.c, x.Name, false)
	}
	return scr.c.deps.Commands.Command("")
}

// checkCommand is the command line that checks a context.
func checkCommand(c *console, name string, dryRun bool) string {
	args := "check --context " + view.QuoteArg(name)
	if dryRun {
		args += " --dry-run-requests"
	}
	return c.deps.Commands.Command(args)
}

// observe queries all clusters that need no credential plugin.
func (scr *clustersScreen) observe() tea.Cmd {
	k := scr.c.deps.Clusters
	scr.gen++
	gen, send, parent := scr.gen, scr.c.deps.send, scr.c.ctx
	var rows []int
	for i := range scr.rows {
		if x := &scr.rows[i]; x.Plugin == "" && x.Server != "" {
			rows = append(rows, i)
			x.Glance = nil
		}
	}
	scr.left = len(rows)
	names := make([]string, len(scr.rows))
	for i := range scr.rows {
		names[i] = scr.rows[i].Name
	}
	return func() tea.Msg {
		select {
		case <-scr.drawn:
		case <-parent.Done():
		}
		slots := make(chan struct{}, max(1, k.Parallel))
		var wg sync.WaitGroup
		for _, i := range rows {
			slots <- struct{}{}
			if parent.Err() != nil {
				break
			}
			wg.Go(func() {
				defer func() { <-slots }()
				ctx, cancel := context.WithTimeout(parent, k.Answer)
				defer cancel()
				send(glanced{gen, i, k.Look(ctx, names[i])})
			})
		}
		wg.Wait()
		return nil
	}
}

func (scr *clustersScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	m, ok := msg.(glanced)
	if !ok {
		return nil, false
	}
	if m.gen == scr.gen {
		scr.rows[m.row].Glance = &m.glance
		scr.left--
	}
	return nil, true
}

// shown are the rows that match the filter.
func (scr *clustersScreen) shown() []view.ClusterRow {
	if scr.filter == "" {
		return scr.rows
	}
	var out []view.ClusterRow
	for i := range scr.rows {
		if strings.Contains(strings.ToLower(scr.rows[i].Name), strings.ToLower(scr.filter)) {
			out = append(out, scr.rows[i])
		}
	}
	return out
}

func (scr *clustersScreen) selected() *view.ClusterRow {
	rows := scr.shown()
	if scr.at >= len(rows) {
		return nil
	}
	return &rows[scr.at]
}

func (scr *clustersScreen) header() []string {
	t := scr.c.th
	return []string{t.Row(scr.c.w).Add(term.Accent, " "+t.Brand+" ").Add(term.Strong, "clusters of your kubeconfig").Right(term.Faint, scr.c.now.UTC().Format("15:04:05 UTC")).String()}
}

func (scr *clustersScreen) view(w, h int) []string {
	select {
	case <-scr.drawn:
	default:
		close(scr.drawn)
	}
	rows := scr.shown()
	scr.fit = view.VisibleClusters(h)
	scr.at = max(0, min(scr.at, len(rows)-1))
	if scr.at < scr.first {
		scr.first = scr.at
	}
	if scr.at >= scr.first+scr.fit {
		scr.first = scr.at - scr.fit + 1
	}
	scr.first = max(0, min(scr.first, len(rows)-scr.fit))
	lines := view.Clusters(scr.c.page(), w, h, rows, scr.at, scr.first)
	if len(rows) == 0 {
		lines = append(lines, scr.c.th.Row(w).Pad(3).Add(term.Faint, "no context contains "+scr.filter+": Esc shows all").String())
	}
	return lines
}

func (scr *clustersScreen) why() []string {
	switch {
	case scr.types:
		return []string{scr.c.th.Row(scr.c.w).Add(term.Accent, " / ").Add(term.Plain, scr.filter+"▏").String()}
	case scr.filter != "":
		return []string{scr.c.th.Row(scr.c.w).Add(term.Faint, " filter: "+scr.filter+", Esc shows all").String()}
	}
	return nil
}

func (scr *clustersScreen) safety() string {
	if n := len(scr.shown()); n > scr.fit {
		return strings.TrimSpace(term.AsciiIf(scr.c.th.Ascii, "rows "+itoa(scr.first+1)+" to "+itoa(min(n, scr.first+scr.fit))+" of "+itoa(n)))
	}
	return ""
}

func (scr *clustersScreen) takesText() bool { return scr.types }

func (scr *clustersScreen) typed(k tea.KeyMsg) {
	scr.filter, scr.types = editFilter(scr.filter, k)
	scr.at = 0
}

func (scr *clustersScreen) move(by int) func() tea.Cmd {
	return act(func() { scr.at = max(0, min(scr.at+by, len(scr.shown())-1)) })
}

func (scr *clustersScreen) keys() []binding {
	keys := []binding{
		on("enter", "Enter", "look at the cluster: check it for an upgrade", "cluster", scr.open).footed("check"),
		on("down j", "↑↓ jk", "next context", "move", scr.move(1)).footed("move"),
		on("up k", "↑", "previous context", "move", scr.move(-1)),
		on("pgdown ctrl+d", "PgDn", "next page", "move", func() tea.Cmd { return scr.move(scr.fit)() }),
		on("pgup ctrl+u", "PgUp", "previous page", "move", func() tea.Cmd { return scr.move(-scr.fit)() }),
		on("home g", "g", "first context", "move", act(func() { scr.at = 0 })),
		on("end G", "G", "last context", "move", act(func() { scr.at = max(0, len(scr.shown())-1) })),
		on("/", "/", "filter by name", "cluster", act(func() { scr.types = true })).footed("filter"),
		on("r", "r", "query all clusters again", "cluster", scr.observe).footed("refresh").unless(func() string {
			if scr.left > 0 {
				return "clusters are still answering"
			}
			return ""
		}),
	}
	if scr.filter != "" {
		keys = append(keys, on("esc", "Esc", "show all contexts", "cluster", act(func() { scr.filter = "" })).footed("all"))
	}
	return keys
}

// open shows the selected cluster and checks it.
func (scr *clustersScreen) open() tea.Cmd {
	x := scr.selected()
	if x == nil {
		return nil
	}
	for i := range scr.rows {
		if scr.rows[i].Name == x.Name {
			return scr.c.oneCluster.open(i)
		}
	}
	return nil
}
