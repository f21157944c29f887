package console

import (
	tea "github.com/charmbracelet/bubbletea"
)

// screen is one page of the console with its keys. A screen is one type in a file of its own.
// It may change the console, such as show another screen, and never blocks.
type screen interface {
	// title names the screen in the help.
	title() string
	// view renders the body in w columns and at most h lines.
	view(w, h int) []string
	// keys are the keys of the screen and the commands that they start.
	keys() []binding
	// promptKeys replace all keys while the screen asks a question; nil if it asks none.
	promptKeys() []binding
	// command is the equivalent command line.
	command() string
	// take handles a message that a command of the screen returned; ok is false if msg is
	// another one.
	take(msg tea.Msg) (cmd tea.Cmd, ok bool)

	// mode is the right end of the first line, rail the second line; an empty rail has no line.
	mode() string
	rail() string
	// why are the lines above the key line, safety is the line below it.
	why() []string
	safety() string
	// stale reports whether the body may be out of date.
	stale() bool
	// takesText reports whether keys go into a text field; typed then handles them.
	takesText() bool
	typed(tea.KeyMsg)
}

// defaults are the methods of a screen without the parts that few screens have.
type defaults struct{}

func (defaults) take(tea.Msg) (tea.Cmd, bool) { return nil, false }
func (defaults) promptKeys() []binding        { return nil }
func (defaults) rail() string                 { return "" }
func (defaults) why() []string                { return nil }
func (defaults) safety() string               { return "" }
func (defaults) stale() bool                  { return false }
func (defaults) takesText() bool              { return false }
func (defaults) typed(tea.KeyMsg)             {}

// screens are the screens of the console.
type screens struct {
	start          *startScreen
	overview       *homeScreen
	setup          *setupScreen
	infra          *infraScreen
	config         *configScreen
	preflight      *preflightScreen
	initConfirm    *initConfirmScreen
	run            *runScreen
	result         *resultScreen
	log            *logScreen
	check          *checkScreen
	backup         *backupScreen
	watch          *watchScreen // also gets the events of a run
	upgradePlan    *upgradePlanScreen
	upgradeConfirm *upgradeConfirmScreen
	clusters       *clustersScreen
	oneCluster     *clusterScreen
	adopt          *adoptScreen
	machines       *machinesScreen
	machine        *machineScreen
	machineLog     *machineLogScreen
	machineAdd     *machineAddScreen
	machineRemove  *machineRemoveScreen
}

// newScreens makes the screens in their initial states. The fields have no names here, so that
// the compiler finds a missing screen.
func newScreens(c *console) screens {
	return screens{
		&startScreen{c: c},
		&homeScreen{c: c},
		&setupScreen{c: c},
		&infraScreen{c: c},
		&configScreen{c: c},
		&preflightScreen{c: c},
		&initConfirmScreen{c: c},
		newRunScreen(c),
		&resultScreen{c: c},
		&logScreen{c: c},
		&checkScreen{c: c},
		&backupScreen{c: c},
		newWatchScreen(c),
		&upgradePlanScreen{c: c},
		&upgradeConfirmScreen{c: c},
		newClustersScreen(c),
		&clusterScreen{c: c},
		&adoptScreen{c: c},
		&machinesScreen{c: c},
		&machineScreen{c: c},
		&machineLogScreen{c: c},
		&machineAddScreen{c: c},
		&machineRemoveScreen{c: c},
	}
}

// list returns all screens.
func (s *screens) list() []screen {
	return []screen{
		s.start, s.overview, s.setup, s.infra, s.config, s.preflight, s.initConfirm, s.run, s.result, s.log, s.check, s.backup, s.watch, s.upgradePlan, s.upgradeConfirm,
		s.clusters, s.oneCluster, s.adopt, s.machines, s.machine, s.machineLog, s.machineAdd, s.machineRemove,
	}
}

// startScreen is shown until the workspace has been read.
type startScreen struct {
	defaults
	c *console
}

func (scr *startScreen) title() string   { return "start" }
func (scr *startScreen) keys() []binding { return nil }
func (scr *startScreen) command() string { return scr.c.runCommand() }
func (scr *startScreen) mode() string    { return "" }

func (scr *startScreen) view(int, int) []string {
	return []string{"", " " + scr.c.th.Spin(scr.c.frame) + " " + scr.c.task.busy}
}
