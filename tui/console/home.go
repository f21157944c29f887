package console

import (
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/tui/term"
	"constellation/tui/view"
)

// homeScreen is the cursor in the list of suggestions.
type homeScreen struct {
	defaults
	c     *console
	at    int
	nodes int // first node shown
}

func (scr *homeScreen) title() string   { return "home" }
func (scr *homeScreen) command() string { return scr.c.deps.Commands.Command("status") }

func (scr *homeScreen) stale() bool {
	c := scr.c
	return c.status != nil && (c.statusErr != nil || c.now.Sub(c.statusAt) > staleAfter)
}

func (scr *homeScreen) mode() string {
	c := scr.c
	utc := c.now.UTC().Format("15:04:05 UTC")
	switch {
	case c.status == nil:
		return utc
	case scr.stale():
		return "STALE " + term.Duration(c.now.Sub(c.statusAt)) + "  " + utc
	}
	return "LIVE  as of " + c.statusAt.UTC().Format("15:04:05 UTC")
}

func (scr *homeScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	c := scr.c
	switch msg := msg.(type) {
	case statusRead:
		if msg.gen != c.statusGen {
			return nil, true
		}
		c.statusPending = false
		if c.statusErr = msg.err; msg.err == nil {
			c.status, c.statusAt = &msg.st, c.now
		}
		gen := c.statusGen
		again := tea.Tick(refreshAfter, func(time.Time) tea.Msg { return refresh{gen} })
		if c.screen == scr && msg.err == nil && msg.st.Reachable {
			return tea.Batch(again, c.check.backgroundCheck()), true
		}
		return again, true
	case refresh:
		if msg.gen == c.statusGen && c.screen == scr && !c.statusPending {
			return c.readStatus(), true
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
			if scr.c.status != nil {
				scr.nodes = max(0, min(scr.nodes+1, len(scr.c.status.Nodes)+len(scr.c.status.Machines)-1))
			}
		})),
		on("pgup K", "K PgUp", "fewer nodes", "move", act(func() { scr.nodes = max(0, scr.nodes-1) })),
		on("c", "c", "check for upgrades", "do", scr.c.openCheck).footed("check versions").unless(scr.noCluster),
		on("u", "u", "upgrade: plan the next hop and confirm it", "do", scr.c.startUpgrade).footed("upgrade").unless(scr.noCluster),
		on("b", "b", "list backups or create one", "do", scr.c.openBackup).footed("back up").unless(scr.noCluster),
		on("w", "w", "watch the rollout of the nodes", "do", scr.c.watch.open).footed("watch").unless(scr.noCluster),
		on("i", "i", "set up a cluster", "do", scr.c.toWizard).footed("set up").unless(func() string {
			if scr.c.home != nil && scr.c.home.Stage == engine.StageCluster {
				return "this workspace has a cluster"
			}
			return ""
		}),
		on("r", "r", "refresh the status", "do", scr.c.goHome).footed("refresh"),
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
	case isVerb(cmd, "init"):
		return scr.c.toWizard()
	case isVerb(cmd, "status"):
		return scr.c.goHome()
	case isVerb(cmd, "upgrade") && strings.Contains(cmd+" ", " apply "):
		return scr.c.startUpgrade()
	case isVerb(cmd, "upgrade"):
		return scr.c.openCheck()
	case isVerb(cmd, "backup"):
		return scr.c.openBackup()
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
		return []string{"", scr.c.th.Row(w).Add(term.Accent, "  "+scr.c.th.Spin(scr.c.frame)+" ").Add(term.Plain, scr.c.busy).String()}
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
	st := scr.c.status
	if st == nil {
		if scr.c.statusErr != nil {
			return view.Problem(scr.c.page(), w, scr.c.statusErr)
		}
		return append([]string{
			scr.c.th.Rule(w, "Cluster", ""),
			scr.c.th.Row(w).Add(term.Accent, "  "+scr.c.th.Spin(scr.c.frame)+" ").Add(term.Plain, "querying the cluster").String(),
		}, view.Recent(scr.c.page(), w, h-2, scr.c.home)...)
	}
	lines := []string{scr.c.th.Rule(w, "Cluster", term.Clean(st.Provider))}
	lines = append(lines, view.ClusterSummary(scr.c.page(), w, st, scr.c.check.result)...)
	if scr.c.statusErr != nil {
		lines = append(lines, scr.c.th.Row(w).Add(term.Plain, "  ").Add(term.Bad, scr.c.th.Fail+" ").Add(term.Plain, term.Clean(scr.c.statusErr.Error())).String())
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
