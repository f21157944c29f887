// Package console is the console: the only Bubble Tea model of the program, and its screens.
// Run shows it on a terminal.
//
// The type console (console.go) has what all screens share: the engine, the run, and the screen
// that is shown. Its parts are the background task (task.go), the way through init (wizard.go),
// the current upgrade (upgrade.go), changes to a rollout (rollout.go), the end of the console
// (quit.go), and what covers a screen (help.go, palette.go).
//
// A screen (screen.go) is one type with its view, its keys, its command line, and the messages
// that it takes. To add a screen, write its type in a file of its own and add it to screens,
// newScreens and list; the compiler or a test reports what is missing. Pages are functions of
// package view.
//
// A key press becomes a command in keys.go: console.key looks the key up in console.bindings,
// which are those of the innermost prompt or overlay, or those of the current screen (its
// method keys) and globalKeys. The binding's action, do, returns the tea.Cmd. Key line, help
// and palette use the same bindings.
//
// The result of a command comes back as a message: console.take handles those of the task and
// gives all others to the screens' take.
package console

import (
	"context"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

const (
	// A second Ctrl-C within doublePress exits immediately.
	doublePress = 2 * time.Second
	// refreshAfter is the poll interval of the home screen. A status older than
	// staleAfter is shown as STALE.
	refreshAfter, staleAfter = 10 * time.Second, 30 * time.Second
	// spinGap is the time between two frames of a spinner. Without a spinner there are no ticks.
	spinGap = 200 * time.Millisecond
	// stopTimeout is how long the console waits after a signal for the run to stop in order.
	stopTimeout = 3 * time.Second
	// confirmDelay is the minimum age of a confirm screen that accepts Enter: keys typed
	// ahead must not create a cluster.
	confirmDelay = 700 * time.Millisecond
)

// Options are what a console shows and works with.
type Options struct {
	Engine    Engine
	Workspace *workspace.Workspace
	// Commands formats commands to copy.
	Commands view.CommandFormatter
	// Versions are the Kubernetes versions to choose from, the default first.
	Versions []string
	// Wizard opens the init wizard even if there is a cluster. Yes skips the confirmation
	// before a run.
	Wizard, Yes bool
	// Upgrade is the upgrade to open at the start; nil if there is none.
	Upgrade *Upgrade
	// Watch is the request of a live watch. OnlyWatch opens the watch screen at the start, with
	// Filter, and with the record Replay if that is not nil. Such a console has no home screen.
	Watch     engine.WatchRequest
	OnlyWatch bool
	Filter    string
	Replay    *Record
	// Sandbox finds the sandbox of the workspace; nil if there is none.
	Sandbox func(context.Context) *workspace.SandboxInfo
	Now     func() time.Time
	// Newer returns a release that is newer than this program; empty if there is none. It may be nil.
	Newer func(context.Context) string
	// Cluster is the name of the workspace's cluster, or the selected context; it may be empty.
	// Guarded reports whether a cluster of that name is read-only until the name is typed; nil
	// means that none is.
	Cluster string
	Guarded func(name string) bool
	// Clusters, if not nil, are shown instead of a workspace.
	Clusters *Clusters
	// Machines works with the machines that the workspace lists; nil: it has no such list.
	Machines *Machines
	// Setup writes the configuration of a new workspace; nil: the console cannot.
	Setup *Setup
	// Display changes the capabilities of the terminal as preferences want it; it may be nil.
	Display func(term.Display) term.Display
	// FixedBackground keeps the background of Display instead of the one that the terminal
	// reports.
	FixedBackground bool
}

// consoleDeps are the dependencies of a console.
type consoleDeps struct {
	Options
	send   func(tea.Msg)
	copy   func(string) bool
	redraw func()
	// after replaces time.After for the clocks and polls of a watch; nil means time.After.
	after func(time.Duration) <-chan time.Time
	// releaseMemory releases memory that only the start of a watch needs; it may be nil.
	releaseMemory func()
}

// console is the only Bubble Tea model of the program. Update never blocks: slow work runs
// in commands, which return messages.
type console struct {
	deps    consoleDeps
	ctx     context.Context
	display term.Display
	th      *term.Theme
	w, h    int
	now     time.Time

	screens        // all screens
	screen  screen // the one that is shown

	// Overlays of a screen, and the questions of all screens.
	help    helpPage
	pal     palette
	quit    quitting
	rollout rolloutControl
	guard   guard
	secret  secretPrompt
	changes changing
	note    string // replaces the key line for noteTTL
	// lastNote is the note shown since lastNoteAt.
	lastNote   string
	lastNoteAt time.Time

	frame   int // of the spinner
	ticking bool

	task    task
	home    *engine.Home
	homeErr error

	wizard wizard
	upg    upgradeState

	// The run, which several screens show.
	t       view.Timeline
	plan    *plan.Plan
	running bool // a run is in progress
	ran     bool // a run was started
	err     error
}

// Messages of the console's own commands.
type (
	tick         time.Time
	stopTimedOut struct{}
)

func newConsole(ctx context.Context, l term.Display, d consoleDeps) *console {
	c := &console{deps: d, ctx: ctx, display: l, th: term.NewTheme(l), w: 80, h: 24, now: d.Now()}
	if c.deps.copy == nil {
		c.deps.copy = func(string) bool { return true }
	}
	if c.deps.redraw == nil {
		c.deps.redraw = func() {}
	}
	c.screens = newScreens(c)
	c.help.c, c.quit.c, c.rollout.c, c.guard.c, c.secret.c, c.changes.c, c.task.c, c.wizard.c, c.upg.c = c, c, c, c, c, c, c, c, c
	c.task.busy, c.task.take = "reading the workspace", c.run.takeEvents
	c.screen, c.log.back = c.start, c.start
	if d.Clusters != nil { // the first frame is drawn before Init
		c.screen, c.task.busy = c.clusters, ""
	}
	return c
}

// Init reads the workspace, or starts a watch.
func (c *console) Init() tea.Cmd {
	if c.deps.OnlyWatch {
		return c.watch.begin()
	}
	if c.deps.Clusters != nil {
		return c.clusters.observe()
	}
	return tea.Batch(c.overview.read(), c.scheduleTick(), c.overview.lookForRelease())
}

// noteTTL is how long a note replaces the key line. Later it may be wrong: somebody else
// may have resumed a rollout that was paused here.
const noteTTL = 10 * time.Second

// Update takes a message.
func (c *console) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	c.now = c.deps.Now()
	if c.note != c.lastNote {
		c.lastNote, c.lastNoteAt = c.note, c.now
	} else if c.now.Sub(c.lastNoteAt) > noteTTL {
		c.note, c.lastNote = "", ""
	}
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		c.w, c.h = msg.Width, msg.Height
		return c, nil
	case term.Background:
		if msg.Light != c.display.Light && !c.deps.FixedBackground {
			c.display.Light = msg.Light
			c.th = term.NewTheme(c.display)
		}
		return c, nil
	case term.Signalled:
		return c, c.quit.signal(msg.Sig)
	case stopTimedOut:
		return c, tea.Quit
	case tick:
		c.frame++
		c.ticking = false
		return c, c.scheduleTick()
	case tea.KeyMsg:
		return c, tea.Batch(c.keys(msg), c.scheduleTick())
	}
	return c, tea.Batch(c.take(msg), c.scheduleTick())
}

// take handles the messages of commands.
func (c *console) take(msg tea.Msg) tea.Cmd {
	switch msg := msg.(type) {
	case batch:
		if c.task.current(msg.task) && c.task.take != nil {
			return c.task.take(msg.events)
		}
	case ended:
		if c.task.current(msg.task) {
			c.task.busy, c.task.cancel = "", nil
			return c.take(msg.msg)
		}
	case rolloutChanged:
		c.rollout.took(msg)
	default:
		if c.secret.take(msg) {
			return nil
		}
		for _, s := range c.list() {
			if cmd, ok := s.take(msg); ok {
				return cmd
			}
		}
	}
	return nil
}

// hasSpinner reports whether the screen shows a spinner.
func (c *console) hasSpinner() bool {
	return c.task.busy != "" || c.infra.reads || c.overview.statusPending && c.overview.status == nil
}

// scheduleTick schedules the next tick if there is a spinner and no tick is pending.
func (c *console) scheduleTick() tea.Cmd {
	if c.ticking || !c.hasSpinner() {
		return nil
	}
	c.ticking = true
	return tea.Tick(spinGap, func(t time.Time) tea.Msg { return tick(t) })
}

func (c *console) copyText(text, what string) {
	switch {
	case text == "":
		c.note = "nothing to copy here"
	case c.deps.copy(text):
		c.note = "copied " + what
	default:
		c.note = "too long for the terminal's clipboard"
	}
}

// runCommand is the command line of the run: init or the upgrade.
func (c *console) runCommand() string {
	if c.upg.active() {
		return c.upg.command()
	}
	if own := c.ownRun(); own != nil {
		return own.command()
	}
	return c.deps.Commands.Command("init --non-interactive --yes")
}
