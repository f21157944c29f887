package console

import (
	"context"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/engine/cloud/providers"
	"constellation/tui/term"
	"constellation/tui/view"
)

// homeScreen shows workspace and cluster, and suggests what to do.
type homeScreen struct {
	defaults
	c     *console
	at    int // the selected suggestion
	nodes int // first node shown

	status        *engine.Status // the newest; nil if there is none yet
	statusErr     error
	statusAt      time.Time
	statusPending bool
	statusGen     int // statuses and refreshes of others are dropped

	newer string // a release that is newer than this program; empty if there is none
}

// Messages of the home screen.
type (
	homeRead struct {
		home engine.Home
		err  error
	}
	statusRead struct {
		gen int
		st  engine.Status
		err error
	}
	refresh    struct{ gen int }
	newerFound struct{ release string }
)

func (scr *homeScreen) title() string   { return "home" }
func (scr *homeScreen) command() string { return scr.c.deps.Commands.Command("status") }

func (scr *homeScreen) stale() bool {
	c := scr.c
	return c.overview.status != nil && (c.overview.statusErr != nil || c.now.Sub(c.overview.statusAt) > staleAfter)
}

func (scr *homeScreen) mode() string {
	c := scr.c
	utc := c.now.UTC().Format("15:04:05 UTC")
	switch {
	case c.overview.status == nil:
		return utc
	case scr.stale():
		return "STALE " + term.Duration(c.now.Sub(c.overview.statusAt)) + "  " + utc
	}
	return "LIVE  as of " + c.overview.statusAt.UTC().Format("15:04:05 UTC")
}

func (scr *homeScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	c := scr.c
	switch msg := msg.(type) {
	case homeRead:
		return scr.took(msg), true
	case statusRead:
		if msg.gen != c.overview.statusGen {
			return nil, true
		}
		c.overview.statusPending = false
		if c.overview.statusErr = msg.err; msg.err == nil {
			c.overview.status, c.overview.statusAt = &msg.st, c.now
		}
		gen := c.overview.statusGen
		again := tea.Tick(refreshAfter, func(time.Time) tea.Msg { return refresh{gen} })
		if c.screen == scr && msg.err == nil && msg.st.Reachable {
			return tea.Batch(again, c.check.backgroundCheck()), true
		}
		return again, true
	case newerFound:
		scr.newer = msg.release
		return nil, true
	case refresh:
		if msg.gen == c.overview.statusGen && c.screen == scr && !c.overview.statusPending {
			return c.overview.readStatus(), true
		}
		return nil, true
	}
	return nil, false
}

func (scr *homeScreen) keys() []binding {
	return []binding{
		on("enter", "Enter", "run or copy the selected suggestion", "do", scr.doNext).footed("choose"),
		on("up k", "↑ k", "up", "move", act(func() { scr.at = max(0, scr.at-1) })),
		on("down j", "↓ j", "down", "move", act(func() { scr.at = max(0, min(scr.at+1, len(scr.suggestions())-1)) })),
		on("pgdown J", "J PgDn", "more nodes", "move", act(func() {
			if scr.c.overview.status != nil {
				scr.nodes = max(0, min(scr.nodes+1, len(scr.c.overview.status.Nodes)+len(scr.c.overview.status.Machines)-1))
			}
		})),
		on("pgup K", "K PgUp", "fewer nodes", "move", act(func() { scr.nodes = max(0, scr.nodes-1) })),
		on("c", "c", "check for upgrades", "do", scr.c.check.show).footed("upgrade check").unless(scr.noCluster),
		on("u", "u", "upgrade: plan the next hop and confirm it", "do", scr.c.upg.openNextHop).footed("upgrade").unless(scr.noCluster),
		on("b", "b", "list backups or create one", "do", scr.c.backup.show).footed("back up").unless(scr.noCluster),
		on("w", "w", "watch the rollout of the nodes", "do", scr.c.watch.open).footed("watch").unless(scr.noCluster),
		on("m", "m", "list the machines: check, add, log, remove", "do", scr.c.machines.show).footed("machines").unless(scr.noMachines),
		on("i", "i", "set up a cluster", "do", scr.c.wizard.show).footed("set up").unless(func() string {
			if scr.c.home != nil && scr.c.home.Stage == engine.StageCluster {
				return "this workspace has a cluster"
			}
			return ""
		}),
		on("r", "r", "refresh the status", "do", scr.c.overview.show).footed("refresh"),
		on("y", "y", "copy the selected command", "copy", act(func() {
			if s := scr.suggestions(); scr.at < len(s) {
				scr.c.copyText(s[scr.at].Command, "the command")
			}
		})).footed("copy command"),
	}
}

// noCluster disables keys that need a cluster.
func (scr *homeScreen) noCluster() string {
	if scr.c.home == nil || scr.c.home.Stage != engine.StageCluster {
		return "there is no cluster yet"
	}
	return ""
}

// noMachines disables keys that need a list of machines.
func (scr *homeScreen) noMachines() string {
	if scr.c.deps.Machines == nil {
		return "the configuration has no list of machines"
	}
	return ""
}

func (scr *homeScreen) suggestions() []engine.Suggestion {
	if scr.c.home == nil {
		return nil
	}
	i := slices.IndexFunc(scr.c.home.Next, func(s engine.Suggestion) bool { return isVerb(s.Command, "upgrade") })
	words := view.UpgradeSummary(scr.c.page(), scr.c.check.result)
	if i < 0 || words == "" {
		return scr.c.home.Next
	}
	// An available upgrade comes first.
	s := scr.c.home.Next[i]
	s.Title, s.Why = "Check "+words, ""
	return slices.Concat([]engine.Suggestion{s}, scr.c.home.Next[:i], scr.c.home.Next[i+1:])
}

// doNext runs the selected suggestion if the console can, else it copies the command.
func (scr *homeScreen) doNext() tea.Cmd {
	s := scr.suggestions()
	if scr.at >= len(s) {
		return nil
	}
	switch cmd := s[scr.at].Command; {
	case isVerb(cmd, "machine") && scr.noMachines() == "":
		return scr.c.machines.show()
	case isVerb(cmd, "config") && scr.c.deps.Setup != nil && scr.c.home.Stage == engine.StageEmpty:
		_, provider, _ := strings.Cut(cmd, " generate ")
		return scr.c.setup.open(strings.TrimSpace(provider))
	case isVerb(cmd, "infra"):
		return scr.c.infra.show()
	case isVerb(cmd, "init"):
		return scr.c.wizard.show()
	case isVerb(cmd, "status"):
		return scr.c.overview.show()
	case isVerb(cmd, "upgrade") && strings.Contains(cmd+" ", " apply "):
		return scr.c.upg.openNextHop()
	case isVerb(cmd, "upgrade"):
		return scr.c.check.show()
	case isVerb(cmd, "backup"):
		return scr.c.backup.show()
	default:
		scr.c.copyText(cmd, "the command to run in a shell")
	}
	return nil
}

// isVerb reports whether a command line runs a verb of this program.
func isVerb(command, verb string) bool {
	words := strings.Fields(command)
	if len(words) < 2 || !strings.HasSuffix(words[0], "constellation") {
		return false
	}
	for i := 1; i < len(words); i++ {
		if words[i] == "-C" || words[i] == "--workspace" {
			i++
			continue
		}
		return words[i] == verb
	}
	return false
}

func (scr *homeScreen) view(w, h int) []string {
	var lines []string
	switch {
	case scr.c.homeErr != nil:
		lines = append(lines, view.Problem(scr.c.page(), w, scr.c.homeErr)...)
	case scr.c.home == nil:
		return []string{"", scr.c.th.Row(w).Add(term.Accent, "  "+scr.c.th.Spin(scr.c.frame)+" ").Add(term.Plain, scr.c.task.busy).String()}
	}
	var foot []string
	if n := scr.suggestions(); len(n) > 0 {
		foot = append(foot, scr.c.th.Rule(w, "Do next", ""))
		for i, s := range n {
			if i >= 4 {
				break
			}
			st := term.Plain
			if i == scr.at {
				st = term.Strong
			}
			r := scr.c.th.Row(w).Add(term.Plain, " ").Add(term.Accent, view.Marker(scr.c.page(), i == scr.at)).Add(st, term.Clean(s.Title)).Add(term.Plain, "  ").Add(term.Accent, term.Clean(s.Command))
			if s.Why != "" {
				r.Add(term.Faint, "  "+term.Clean(s.Why))
			}
			foot = append(foot, r.String())
		}
	}
	if scr.newer != "" {
		foot = append(foot, scr.c.th.Row(w).Add(term.Faint, "   Release "+term.Clean(scr.newer)+" is available: "+scr.c.deps.Commands.Command("release show "+term.Clean(scr.newer))).String())
	}
	if scr.c.home != nil && scr.c.home.Stage == engine.StageCluster {
		room := h - len(foot) - len(lines)
		lines = append(lines, scr.clusterView(w, room)...)
	} else if scr.c.home != nil {
		lines = append(lines, view.WorkspaceView(scr.c.page(), w, scr.c.home)...)
		if room := h - len(foot) - len(lines); room > 2 {
			lines = append(lines, view.Recent(scr.c.page(), w, room, scr.c.home)...)
		}
	}
	lines = lines[:max(0, min(len(lines), h-len(foot)))]
	for len(lines)+len(foot) < h {
		lines = append(lines, "")
	}
	return append(lines, foot...)
}

// clusterView renders the cluster in h lines.
func (scr *homeScreen) clusterView(w, h int) []string {
	st := scr.c.overview.status
	if st == nil {
		if scr.c.overview.statusErr != nil {
			return view.Problem(scr.c.page(), w, scr.c.overview.statusErr)
		}
		return append([]string{
			scr.c.th.Rule(w, "Cluster", ""),
			scr.c.th.Row(w).Add(term.Accent, "  "+scr.c.th.Spin(scr.c.frame)+" ").Add(term.Plain, "querying the cluster").String(),
		}, view.Recent(scr.c.page(), w, h-2, scr.c.home)...)
	}
	lines := []string{scr.c.th.Rule(w, "Cluster", term.Clean(st.Provider))}
	lines = append(lines, view.ClusterSummary(scr.c.page(), w, st, scr.c.check.result)...)
	if scr.c.overview.statusErr != nil {
		lines = append(lines, scr.c.th.Row(w).Add(term.Plain, "  ").Add(term.Bad, scr.c.th.Fail+" ").Add(term.Plain, term.Clean(scr.c.overview.statusErr.Error())).String())
	}
	lines = append(lines, view.Findings(scr.c.page(), w, st.Health, 3)...)
	room := h - len(lines)
	recentRows := 0
	if room > 9 {
		recentRows = min(3, room-8) + 1
	}
	lines = append(lines, view.NodeRows(scr.c.page(), w, room-recentRows, st, scr.nodes)...)
	if recentRows > 1 {
		lines = append(lines, view.Recent(scr.c.page(), w, recentRows, scr.c.home)...)
	}
	return lines
}

func (scr *homeScreen) read() tea.Cmd {
	return func() tea.Msg {
		h, err := scr.c.deps.Engine.Home(scr.c.ctx)
		return homeRead{h, err}
	}
}

// took takes what was read of the workspace.
func (scr *homeScreen) took(msg homeRead) tea.Cmd {
	scr.c.task.busy = ""
	scr.c.home, scr.c.homeErr = &msg.home, msg.err
	if msg.err != nil {
		scr.c.home = nil
		scr.c.screen = scr.c.overview
		return nil
	}
	scr.c.home.Next = slices.Clone(scr.c.home.Next)
	for i := range scr.c.home.Next {
		scr.c.home.Next[i].Command = scr.c.deps.Commands.Line(scr.c.home.Next[i].Command)
	}
	*scr.c.config = *newConfigScreen(scr.c, scr.c.home, scr.c.deps.Versions)
	if scr.c.screen == scr.c.start {
		return scr.first()
	}
	if scr.c.screen == scr.c.overview && scr.c.home.Stage == engine.StageCluster {
		return scr.readStatus()
	}
	return nil
}

// first chooses the first screen of a workspace that was read.
func (scr *homeScreen) first() tea.Cmd {
	d, stage := &scr.c.deps, scr.c.home.Stage
	switch {
	case d.Upgrade != nil:
		return scr.c.upgradePlan.open(d.Upgrade)
	case stage == engine.StagePartial && len(scr.c.home.Problems) == 0:
		// A partial init was confirmed when it started; resuming it needs no second confirmation.
		scr.c.wizard.resumed = true
		scr.c.screen = scr.c.run
		return scr.c.wizard.makePlan()
	case stage == engine.StageCluster && !d.Wizard:
		scr.c.screen = scr.c.overview
		return scr.readStatus()
	case d.Wizard && d.Yes && scr.c.home.Config != nil:
		return scr.c.preflight.start()
	case stage == engine.StageEmpty && d.Wizard && d.Setup != nil:
		return scr.c.setup.open("")
	case stage == engine.StageEmpty || stage == engine.StageConfigured && (d.Machines != nil || scr.makesMachines()) && !d.Wizard:
		scr.c.screen = scr.c.overview // which suggests how to get machines
	default:
		scr.c.screen = scr.c.config
	}
	return nil
}

// makesMachines reports whether `infra create` makes the machines of the configuration.
func (scr *homeScreen) makesMachines() bool {
	if scr.c.home.Config == nil {
		return false
	}
	p, _ := providers.Named(scr.c.home.Config.Provider.Name)
	return p.Infra
}

// lookForRelease waits for a newer release, once.
func (scr *homeScreen) lookForRelease() tea.Cmd {
	if scr.c.deps.Newer == nil {
		return nil
	}
	return func() tea.Msg { return newerFound{scr.c.deps.Newer(scr.c.ctx)} }
}

func (scr *homeScreen) readStatus() tea.Cmd {
	scr.statusGen++
	gen := scr.statusGen
	scr.statusPending = true
	return func() tea.Msg {
		ctx, cancel := context.WithTimeout(scr.c.ctx, staleAfter)
		defer cancel()
		st, err := scr.c.deps.Engine.Status(ctx)
		return statusRead{gen, st, err}
	}
}

// show shows the home screen and reloads all of it.
func (scr *homeScreen) show() tea.Cmd {
	scr.c.screen, scr.c.task.busy = scr.c.overview, "reading the workspace"
	scr.c.check.backgroundStarted = scr.c.check.result != nil // without a result, check again
	if !scr.c.ran {
		scr.c.upg = upgradeState{c: scr.c}
	}
	return scr.read()
}
