package tui

import (
	"slices"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/tui/term"
	"constellation/tui/view"
)

// homeScreen is the cursor in the list of suggestions.
type homeScreen struct {
	c *console
	at    int
	nodes int // first node shown
}

var homeKeys = []binding{
	on("enter", "Enter", "run or copy the selected suggestion", "do", (*console).doNext).footed("choose"),
	on("up k", "↑ k", "up", "move", act(func(c *console) { c.overview.at = max(0, c.overview.at-1) })),
	on("down j", "↓ j", "down", "move", act(func(c *console) { c.overview.at = max(0, min(c.overview.at+1, len(c.suggestions())-1)) })),
	on("pgdown J", "J PgDn", "more nodes", "move", act(func(c *console) {
		if c.status != nil {
			c.overview.nodes = max(0, min(c.overview.nodes+1, len(c.status.Nodes)+len(c.status.Machines)-1))
		}
	})),
	on("pgup K", "K PgUp", "fewer nodes", "move", act(func(c *console) { c.overview.nodes = max(0, c.overview.nodes-1) })),
	on("c", "c", "check for upgrades", "do", (*console).openCheck).footed("check versions").unless(func(c *console) string {
		if c.home == nil || c.home.Stage != engine.StageCluster {
			return "there is no cluster yet"
		}
		return ""
	}),
	on("u", "u", "upgrade: plan the next hop and confirm it", "do", (*console).startUpgrade).footed("upgrade").unless(func(c *console) string {
		if c.home == nil || c.home.Stage != engine.StageCluster {
			return "there is no cluster yet"
		}
		return ""
	}),
	on("b", "b", "list backups or create one", "do", (*console).openBackup).footed("back up").unless(func(c *console) string {
		if c.home == nil || c.home.Stage != engine.StageCluster {
			return "there is no cluster yet"
		}
		return ""
	}),
	on("w", "w", "watch the rollout of the nodes", "do", (*console).openWatch).footed("watch").unless(func(c *console) string {
		if c.home == nil || c.home.Stage != engine.StageCluster {
			return "there is no cluster yet"
		}
		return ""
	}),
	on("i", "i", "set up a cluster", "do", (*console).toWizard).footed("set up").unless(func(c *console) string {
		if c.home != nil && c.home.Stage == engine.StageCluster {
			return "this workspace has a cluster"
		}
		return ""
	}),
	on("r", "r", "refresh the status", "do", (*console).goHome).footed("refresh"),
	on("y", "y", "copy the selected command", "copy", act(func(c *console) {
		if s := c.suggestions(); c.overview.at < len(s) {
			c.copyText(s[c.overview.at].Command, "the command")
		}
	})).footed("copy command"),
}

func (c *console) toWizard() tea.Cmd {
	c.screen = screenConfig
	return nil
}

func (c *console) suggestions() []engine.Suggestion {
	if c.home == nil {
		return nil
	}
	i := slices.IndexFunc(c.home.Next, func(s engine.Suggestion) bool { return isVerb(s.Command, "upgrade") })
	words := view.UpgradeSummary(c.page(), c.chk.result)
	if i < 0 || words == "" {
		return c.home.Next
	}
	// An available upgrade comes first.
	s := c.home.Next[i]
	s.Title, s.Why = "Check "+words, ""
	return slices.Concat([]engine.Suggestion{s}, c.home.Next[:i], c.home.Next[i+1:])
}

// doNext runs the selected suggestion if the console can, else it copies the command.
func (c *console) doNext() tea.Cmd {
	s := c.suggestions()
	if c.overview.at >= len(s) {
		return nil
	}
	switch cmd := s[c.overview.at].Command; {
	case isVerb(cmd, "init"):
		return c.toWizard()
	case isVerb(cmd, "status"):
		return c.goHome()
	case isVerb(cmd, "upgrade") && strings.Contains(cmd+" ", " apply "):
		return c.startUpgrade()
	case isVerb(cmd, "upgrade"):
		return c.openCheck()
	case isVerb(cmd, "backup"):
		return c.openBackup()
	default:
		c.copyText(cmd, "the command to run in a shell")
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

func (c *console) homeView(w, h int) []string {
	var lines []string
	switch {
	case c.homeErr != nil:
		lines = append(lines, view.Problem(c.page(), w, c.homeErr)...)
	case c.home == nil:
		return []string{"", c.th.Row(w).Add(term.Accent, "  "+c.th.Spin(c.frame)+" ").Add(term.Plain, c.busy).String()}
	}
	var foot []string
	if n := c.suggestions(); len(n) > 0 {
		foot = append(foot, c.th.Rule(w, "Do next", ""))
		for i, s := range n {
			if i >= 4 {
				break
			}
			st := term.Plain
			if i == c.overview.at {
				st = term.Strong
			}
			r := c.th.Row(w).Add(term.Plain, " ").Add(term.Accent, view.Marker(c.page(), i == c.overview.at)).Add(st, term.Clean(s.Title)).Add(term.Plain, "  ").Add(term.Accent, term.Clean(s.Command))
			if s.Why != "" {
				r.Add(term.Faint, "  "+term.Clean(s.Why))
			}
			foot = append(foot, r.String())
		}
	}
	if c.home != nil && c.home.Stage == engine.StageCluster {
		room := h - len(foot) - len(lines)
		lines = append(lines, c.clusterView(w, room)...)
	} else if c.home != nil {
		lines = append(lines, view.WorkspaceView(c.page(), w, c.home)...)
		if room := h - len(foot) - len(lines); room > 2 {
			lines = append(lines, view.Recent(c.page(), w, room, c.home)...)
		}
	}
	lines = lines[:max(0, min(len(lines), h-len(foot)))]
	for len(lines)+len(foot) < h {
		lines = append(lines, "")
	}
	return append(lines, foot...)
}

// clusterView renders the cluster in h lines.
func (c *console) clusterView(w, h int) []string {
	st := c.status
	if st == nil {
		if c.statusErr != nil {
			return view.Problem(c.page(), w, c.statusErr)
		}
		return append([]string{
			c.th.Rule(w, "Cluster", ""),
			c.th.Row(w).Add(term.Accent, "  "+c.th.Spin(c.frame)+" ").Add(term.Plain, "querying the cluster").String(),
		}, view.Recent(c.page(), w, h-2, c.home)...)
	}
	lines := []string{c.th.Rule(w, "Cluster", term.Clean(st.Provider))}
	lines = append(lines, view.ClusterSummary(c.page(), w, st, c.chk.result)...)
	if c.statusErr != nil {
		lines = append(lines, c.th.Row(w).Add(term.Plain, "  ").Add(term.Bad, c.th.Fail+" ").Add(term.Plain, term.Clean(c.statusErr.Error())).String())
	}
	lines = append(lines, view.Findings(c.page(), w, st.Health, 3)...)
	room := h - len(lines)
	recentRows := 0
	if room > 9 {
		recentRows = min(3, room-8) + 1
	}
	lines = append(lines, view.NodeRows(c.page(), w, room-recentRows, st, c.overview.nodes)...)
	if recentRows > 1 {
		lines = append(lines, view.Recent(c.page(), w, recentRows, c.home)...)
	}
	return lines
}
