// Package console is the console: the only Bubble Tea model of the program, and its screens.
// Run shows it on a terminal.
//
// The type console (console.go) has what all screens share: the engine, the current task, the
// run, and the screen that is shown. A screen (screen.go) is one type with its view, its keys,
// its command line, and the messages that it takes. To add a screen, write its type in a file of
// its own and add it to screens, newScreens and list; the compiler or a test reports what is
// missing. Pages are functions of package view.
//
// A key press becomes a command in keys.go: console.key looks the key up in console.bindings,
// which are those of the innermost prompt or overlay, or those of the current screen (its
// method keys) and globalKeys. The binding's action, do, returns the tea.Cmd. Key line, help
// and palette use the same bindings.
//
// The result of a command comes back as a message: console.take handles those of runs and
// tasks and gives all others to the screens' take.
package console

import (
	"context"
	"slices"
	"syscall"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/engine/check"
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

	screen         screen
	back           screen // where Esc leads from the log
	help           bool
	pal            palette
	confirmLeave   bool // the question whether to leave is shown
	confirmLeaveAt time.Time
	leaving        bool // quit when the run has stopped
	note           string
	lastNote       string // the note shown since lastNoteAt
	lastNoteAt     time.Time
	ticking        bool
	frame          int // of the spinner

	home    *engine.Home
	homeErr error
	busy    string // the background work, for display; "" if there is none
	task    int    // ID of the current task; messages of other tasks are dropped
	cancel  context.CancelFunc

	status        *engine.Status
	statusErr     error
	statusAt      time.Time
	statusPending bool
	statusGen     int

	screens // all screens

	t   view.Timeline // of the run
	upg upgradeState
	// rolloutPrompt is the pending confirmation of a change to the rollout; nil if there is none.
	rolloutPrompt *rolloutPrompt

	plan    *plan.Plan
	resumed bool
	running bool // a run is in progress
	ran     bool // a run was started
	err     error
	exit    int
	hasExit bool
}

// Messages of the console's own commands.
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
	refresh struct{ gen int }
	// batch are events of a task, in order.
	batch struct {
		task   int
		events []plan.Event
	}
	// ended is the end of a task; msg is its outcome.
	ended struct {
		task int
		msg  tea.Msg
	}
	preflightEnded struct {
		findings []plan.Finding
		err      error
	}
	planMade struct {
		plan *plan.Plan
		err  error
	}
	runEnded  struct{ err error }
	configSet struct {
		path string
		err  error
	}
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
	c.busy = "reading the workspace"
	c.screens = newScreens(c)
	c.screen, c.back = c.start, c.start
	return c
}

// Init reads the workspace, or starts a watch.
func (c *console) Init() tea.Cmd {
	if c.deps.OnlyWatch {
		return c.watch.begin()
	}
	return tea.Batch(c.readHome(), c.scheduleTick())
}

func (c *console) readHome() tea.Cmd {
	return func() tea.Msg {
		h, err := c.deps.Engine.Home(c.ctx)
		return homeRead{h, err}
	}
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
		if msg.Light != c.display.Light {
			c.display.Light = msg.Light
			c.th = term.NewTheme(c.display)
		}
		return c, nil
	case term.Signalled:
		return c, c.signal(msg.Sig)
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

// take handles the messages of the console's own commands.
func (c *console) take(msg tea.Msg) tea.Cmd {
	switch msg := msg.(type) {
	case homeRead:
		return c.tookHome(msg)
	case batch:
		if msg.task != c.task {
			return nil
		}
		if c.backup.running {
			for _, ev := range msg.events {
				c.backup.t.Apply(ev)
			}
			return nil
		}
		if c.check.busy {
			c.check.takeEvents(msg.events)
			return nil
		}
		if c.upg.planning {
			for _, ev := range msg.events {
				if ev.Object != check.CheckVersions {
					c.upg.progress.Apply(ev)
				}
			}
			return nil
		}
		t := &c.t
		if c.screen == c.preflight && !c.running {
			t = &c.preflight.t
		}
		for _, ev := range msg.events {
			t.Apply(ev)
		}
		if t == &c.t {
			c.watch.apply(msg.events)
			return c.openWatchForRollout()
		}
	case ended:
		if msg.task != c.task {
			return nil
		}
		c.busy, c.cancel = "", nil
		return c.take(msg.msg)
	case planMade:
		return c.tookPlan(msg)
	case runEnded:
		return c.tookRunEnd(msg.err)
	case rolloutChanged:
		c.tookRolloutChange(msg)
	default:
		for _, s := range c.list() {
			if cmd, ok := s.take(msg); ok {
				return cmd
			}
		}
	}
	return nil
}

// launch starts a background task that emits events. Its events and its outcome arrive as
// messages. It cancels the previous task, whose messages are dropped.
func (c *console) launch(what string, work func(context.Context, func(plan.Event)) tea.Msg) tea.Cmd {
	if c.cancel != nil {
		c.cancel()
	}
	c.task++
	id, send := c.task, c.deps.send
	ctx, cancel := context.WithCancel(c.ctx)
	c.cancel, c.busy = cancel, what
	return func() tea.Msg {
		defer cancel()
		events := newCollector(func(b []plan.Event) { send(batch{id, b}) })
		collecting, stop := context.WithCancel(context.Background())
		gone := make(chan struct{})
		go func() { defer close(gone); events.Run(collecting) }()
		msg := work(ctx, events.emit)
		stop()
		<-gone
		events.flush()
		return ended{id, msg}
	}
}

// hasSpinner reports whether the screen shows a spinner.
func (c *console) hasSpinner() bool {
	return c.busy != "" || c.statusPending && c.status == nil
}

// scheduleTick schedules the next tick if there is a spinner and no tick is pending.
func (c *console) scheduleTick() tea.Cmd {
	if c.ticking || !c.hasSpinner() {
		return nil
	}
	c.ticking = true
	return tea.Tick(spinGap, func(t time.Time) tea.Msg { return tick(t) })
}

// tookHome chooses the first screen.
func (c *console) tookHome(msg homeRead) tea.Cmd {
	c.busy = ""
	c.home, c.homeErr = &msg.home, msg.err
	if msg.err != nil {
		c.home = nil
		c.screen = c.overview
		return nil
	}
	c.home.Next = slices.Clone(c.home.Next)
	for i := range c.home.Next {
		c.home.Next[i].Command = c.deps.Commands.Line(c.home.Next[i].Command)
	}
	*c.config = *newConfigScreen(c, c.home, c.deps.Versions)
	first := c.screen == c.start
	switch {
	case first && c.deps.Upgrade != nil:
		return c.openUpgrade(c.deps.Upgrade)
	case first && c.home.Stage == engine.StagePartial && len(c.home.Problems) == 0:
		// A partial init was confirmed when it started; resuming it needs no second confirmation.
		c.resumed = true
		c.screen = c.run
		return c.makePlan()
	case first && c.home.Stage == engine.StageCluster && !c.deps.Wizard:
		c.screen = c.overview
		return c.readStatus()
	case first && c.deps.Wizard && c.deps.Yes && c.home.Config != nil:
		return c.startPreflight()
	case first && c.home.Stage == engine.StageEmpty:
		c.screen = c.overview // which suggests how to create machines
		return nil
	case first && (c.deps.Wizard || c.home.Stage != engine.StageCluster):
		c.screen = c.config
		return nil
	}
	if c.screen == c.start {
		c.screen = c.overview
	}
	if c.screen == c.overview && c.home.Stage == engine.StageCluster {
		return c.readStatus()
	}
	return nil
}

func (c *console) readStatus() tea.Cmd {
	c.statusGen++
	gen := c.statusGen
	c.statusPending = true
	return func() tea.Msg {
		ctx, cancel := context.WithTimeout(c.ctx, staleAfter)
		defer cancel()
		st, err := c.deps.Engine.Status(ctx)
		return statusRead{gen, st, err}
	}
}

// goHome shows the home screen and reloads all of it.
func (c *console) goHome() tea.Cmd {
	c.screen, c.busy = c.overview, "reading the workspace"
	c.check.backgroundStarted = c.check.result != nil // without a result, check again
	if !c.ran {
		c.upg = upgradeState{}
	}
	return c.readHome()
}

// startPreflight runs the checks.
func (c *console) startPreflight() tea.Cmd {
	c.screen = c.preflight
	*c.preflight, c.upg = preflightScreen{c: c}, upgradeState{}
	return c.launch("checking", func(ctx context.Context, emit func(plan.Event)) tea.Msg {
		f, err := c.deps.Engine.Preflight(ctx, emit)
		return preflightEnded{f, err}
	})
}

// makePlan asks the engine for the plan of init.
func (c *console) makePlan() tea.Cmd {
	return c.launch("planning", func(ctx context.Context, _ func(plan.Event)) tea.Msg {
		p, err := c.deps.Engine.PlanInit(ctx)
		return planMade{p, err}
	})
}

func (c *console) tookPlan(msg planMade) tea.Cmd {
	if msg.err != nil {
		c.fail(msg.err)
		return nil
	}
	c.plan = msg.plan
	if c.plan.Finished() && len(c.plan.Blocked()) == 0 {
		c.exit = plan.ExitNothing
		c.note = "the cluster is complete: there is nothing to do"
		return c.goHome()
	}
	if c.resumed || c.deps.Yes {
		if len(c.plan.Blocked()) == 0 {
			return c.startRun()
		}
	}
	c.screen = c.initConfirm
	*c.initConfirm = *newInitConfirm(c, c.plan, c.now)
	return nil
}

// startRun executes the plan.
func (c *console) startRun() tea.Cmd {
	p := c.plan
	c.screen, c.running, c.ran = c.run, true, true
	c.err = nil
	c.t, *c.run, *c.watch = view.Timeline{}, *newRunScreen(c), watchScreen{c: c}
	c.t.SetPlan(p)
	c.t.Run = term.Clean(p.ID)
	return c.launch("running", func(ctx context.Context, emit func(plan.Event)) tea.Msg {
		return runEnded{c.deps.Engine.Run(ctx, p, emit)}
	})
}

func (c *console) tookRunEnd(err error) tea.Cmd {
	c.running = false
	c.err = err
	c.confirmLeave = false
	if !c.hasExit {
		c.exit = plan.ExitCode(err)
	}
	if c.leaving {
		return tea.Quit
	}
	c.screen = c.result
	if c.upgrading() && plan.ExitCode(err) == plan.ExitHeld {
		return c.attach(err)
	}
	return nil
}

// fail shows an error on the result screen.
func (c *console) fail(err error) {
	c.err, c.exit = err, plan.ExitCode(err)
	c.screen = c.result
}

// leave quits; during a run it asks for confirmation first.
func (c *console) leave() tea.Cmd {
	c.help, c.pal, c.rolloutPrompt = false, palette{}, nil
	if !c.running {
		return tea.Quit
	}
	if c.leaving {
		return c.quitNow()
	}
	c.confirmLeave, c.confirmLeaveAt = true, c.now
	return nil
}

// interruptAgain handles Ctrl-C while the question whether to leave is shown.
func (c *console) interruptAgain() tea.Cmd {
	if c.now.Sub(c.confirmLeaveAt) <= doublePress {
		return c.quitNow()
	}
	return c.detach()
}

// detach stops the run at a point from which it can be resumed, then quits.
func (c *console) detach() tea.Cmd {
	c.confirmLeave, c.leaving = false, true
	if c.cancel == nil {
		return tea.Quit
	}
	c.cancel()
	return nil
}

// quitNow quits without waiting for the current step: the machines finish it, and the next
// start finds the result.
func (c *console) quitNow() tea.Cmd {
	c.confirmLeave, c.leaving = false, true
	if c.backup.running { // the partial backup is deleted first
		if c.cancel != nil {
			c.cancel()
		}
		return tea.Tick(stopTimeout, func(time.Time) tea.Msg { return stopTimedOut{} })
	}
	if c.cancel != nil {
		c.cancel()
	}
	if !c.hasExit {
		c.exit = plan.ExitStopped
		if c.t.PastFinal() {
			c.exit = plan.ExitDone
		}
		c.hasExit = true
	}
	return tea.Quit
}

// signal quits with the exit code of a signal.
func (c *console) signal(sig syscall.Signal) tea.Cmd {
	c.exit, c.hasExit = 128+int(sig), true
	c.leaving = true
	if !c.running || c.cancel == nil {
		return tea.Quit
	}
	c.cancel()
	return tea.Tick(stopTimeout, func(time.Time) tea.Msg { return stopTimedOut{} })
}

// quitLabel is the label of the key q.
func (c *console) quitLabel() string {
	if c.running && !c.backup.running {
		return "detach"
	}
	return "quit"
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
	if c.upgrading() {
		return c.upgradeCommand()
	}
	return c.deps.Commands.Command("init --non-interactive --yes")
}
