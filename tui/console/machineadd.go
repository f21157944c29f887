package console

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/enrol"
	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// NewMachines are machines to add.
type NewMachines struct {
	MachineLogin
	// Group is control-plane or worker. Name and Address are of one machine; empty means its own.
	Group, Name, Address string
	// TPM is where a new key is: auto, none, or the address of a TPM. TPMRoots is a folder with certificates of vendors,
	// Programs one with programs; empty means none, and that of this program.
	TPM, TPMRoots, Programs string
}

// Addition is the preparation of machines in three steps, in this order. All may be repeated. It is a pointer: messages
// are compared by it.
type Addition interface {
	// Check checks the machines. It returns an error if one cannot be added.
	Check(context.Context) (machinecheck.Report, error)
	// Compare reads what the machines lack. It changes nothing.
	Compare(ctx context.Context, step func(i int, s enrol.Step)) ([]view.AddedMachine, error)
	// Install makes the changes, and writes each machine that is done into the configuration.
	Install(ctx context.Context, step func(i int, s enrol.Step), done func(i int, r enrol.Result)) ([]view.AddedMachine, error)
}

// addStage is what the screen shows.
type addStage int

const (
	addForm     addStage = iota
	addChecks            // the check runs, or has found what stands in the way
	addQuestion          // the changes, and the question whether to make them
	addInstalls          // the live table
	addDone              // the result
)

// machineAddScreen adds machines: form, check, changes, question, live table, result.
type machineAddScreen struct {
	defaults
	c       *console
	stage   addStage
	form    *form
	work    Addition
	steps   []view.MachineStep // the live table
	report  *machinecheck.Report
	added   []view.AddedMachine
	err     error
	yes     bool // the cursor is on the action
	shown   time.Time
	first   int // line at the top
	most    int // greatest first of the last frame
	changes bool
}

// Messages of the add screen. They carry the addition that they belong to.
type (
	addChecked struct {
		work   Addition
		report machinecheck.Report
		added  []view.AddedMachine
		err    error
	}
	addInstalled struct {
		work  Addition
		added []view.AddedMachine
		err   error
	}
)

// open shows the form. Values of the last one stay, except for the machines.
func (scr *machineAddScreen) open() tea.Cmd {
	before := scr.form
	*scr = machineAddScreen{c: scr.c}
	group := "worker"
	if l := scr.c.machines.listing; l != nil && len(l.Machines) == 0 {
		group = "control-plane"
	}
	login := loginFields(cmp.Or(before, scr.c.machines.last), "")
	login[0].title, login[0].hint = "logins", "root@10.0.0.11 root@10.0.0.12"
	fields := append(login[:1:1], formField{key: "--group", title: "group", value: group, choices: []string{"control-plane", "worker"}})
	fields = append(fields, login[1:]...)
	fields = append(fields,
		formField{key: "--tpm", title: "new key in", value: "auto", hint: "auto, none for a file, or the address of a TPM"},
		formField{key: "--tpm-roots", title: "TPM vendors", hint: "folder with their certificates; default: not verified"},
		formField{key: "--name", title: "name", hint: "of one machine; default: its host name"},
		formField{key: "--address", title: "address", hint: "of one machine; default: that of the login"},
		formField{key: "--programs", title: "programs", hint: "folder, for another architecture"},
	)
	scr.form = &form{c: scr.c, fields: fields}
	if before != nil {
		for i := range fields {
			if k := fields[i].key; k == "--tpm" || k == "--tpm-roots" || k == "--programs" {
				fields[i].value = before.value(k)
			}
		}
	}
	scr.c.screen = scr
	return nil
}

// wanted are the machines of the form.
func (scr *machineAddScreen) wanted() NewMachines {
	text := func(key string) string { return strings.TrimSpace(scr.form.value(key)) }
	return NewMachines{MachineLogin: loginOf(scr.form), Group: text("--group"), Name: text("--name"), Address: text("--address"), TPM: text("--tpm"), TPMRoots: text("--tpm-roots"), Programs: text("--programs")}
}

func (scr *machineAddScreen) command() string {
	n := scr.wanted()
	if len(n.Machines) == 0 {
		n.Machines = []string{"USER@HOST"}
	}
	args := "machine add " + n.flags()
	for _, x := range [][3]string{{"--group", n.Group, "worker"}, {"--tpm", n.TPM, "auto"}, {"--tpm-roots", n.TPMRoots}, {"--name", n.Name}, {"--address", n.Address}, {"--programs", n.Programs}} {
		if x[1] != "" && x[1] != x[2] {
			args += " " + x[0] + " " + view.QuoteArg(x[1])
		}
	}
	return scr.c.deps.Commands.Command(args)
}

// submit begins with the check.
func (scr *machineAddScreen) submit() tea.Cmd {
	work, err := scr.c.deps.Machines.Add(scr.wanted(), scr.c.secret.ask)
	if scr.err = err; err != nil {
		return nil
	}
	scr.work, scr.c.machines.last = work, scr.form
	return scr.check()
}

// check checks the machines, and compares them with what nodes need.
func (scr *machineAddScreen) check() tea.Cmd {
	scr.stage, scr.report, scr.added, scr.err, scr.first, scr.yes = addChecks, nil, nil, nil, 0, false
	scr.table(scr.wanted().Machines, "checking")
	work := scr.work
	return scr.c.task.launch("checking "+words.Count(len(scr.steps), "machine"), scr.events, func(ctx context.Context, emit func(plan.Event)) tea.Msg {
		m := addChecked{work: work}
		if m.report, m.err = work.Check(ctx); m.err == nil {
			m.added, m.err = work.Compare(ctx, emitSteps(emit))
		}
		return m
	})
}

// table begins a live table.
func (scr *machineAddScreen) table(names []string, title string) {
	scr.steps = nil
	for _, n := range names {
		scr.steps = append(scr.steps, view.MachineStep{Name: n, Title: title, State: plan.StateRunning})
	}
}

// emitSteps returns a function that emits the steps of machines as events, numbered by Attempt.
func emitSteps(emit func(plan.Event)) func(int, enrol.Step) {
	return func(i int, s enrol.Step) {
		emit(plan.Event{Kind: plan.KindStep, Attempt: i, Text: s.Title, Current: int64(s.Done), Total: int64(s.Total), State: plan.StateRunning})
	}
}

// applySteps takes such events into a live table.
func applySteps(table []view.MachineStep, events []plan.Event) {
	for _, e := range events {
		if e.Attempt < len(table) {
			x := &table[e.Attempt]
			x.Title, x.Done, x.Total, x.State = e.Text, int(e.Current), int(e.Total), e.State
		}
	}
}

func (scr *machineAddScreen) events(events []plan.Event) tea.Cmd {
	applySteps(scr.steps, events)
	return nil
}

// install makes the changes. Leaving stops them at a step that the same command repeats.
func (scr *machineAddScreen) install() tea.Cmd {
	if scr.c.guard.stops() {
		return nil
	}
	scr.stage, scr.err, scr.first = addInstalls, nil, 0
	var names []string
	for _, m := range scr.added {
		names = append(names, m.Name)
	}
	scr.table(names, "waiting")
	work := scr.work
	scr.c.changes.begin(scr.command())
	return scr.c.task.launch("preparing "+words.Count(len(names), "machine"), scr.events, func(ctx context.Context, emit func(plan.Event)) tea.Msg {
		m := addInstalled{work: work}
		m.added, m.err = work.Install(ctx, emitSteps(emit), func(i int, r enrol.Result) {
			e := plan.Event{Kind: plan.KindStep, Attempt: i, State: plan.StateDone, Text: "done"}
			if r.Err != nil {
				e.State, e.Text = plan.StateFailed, r.Err.Error()
			}
			emit(e)
		})
		return m
	})
}

func (scr *machineAddScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	switch msg := msg.(type) {
	case addChecked:
		if msg.work != scr.work {
			break
		}
		scr.err, scr.report, scr.added = msg.err, &msg.report, msg.added
		if msg.err == nil {
			scr.stage, scr.shown, scr.changes = addQuestion, scr.c.now, false
			for _, m := range msg.added {
				scr.changes = scr.changes || len(m.Changes) > 0
			}
		}
	case addInstalled:
		scr.stage, scr.added, scr.err, scr.first = addDone, msg.added, msg.err, 0
		return scr.c.changes.end(msg.err), true
	default:
		return nil, false
	}
	return nil, true
}

func (scr *machineAddScreen) title() string { return "add machines" }

func (scr *machineAddScreen) mode() string {
	return fmt.Sprintf("add machines  step %d of %d", int(scr.stage)+1, int(addDone)+1)
}

func (scr *machineAddScreen) safety() string {
	return scrolledSafety(scr, scr.first, scr.most)
}

// action is the label of the affirmative answer, and why it cannot be given; empty if it can.
func (scr *machineAddScreen) action() (label, off string) {
	switch {
	case scr.stage != addQuestion:
		return "", "there is nothing to answer"
	case !scr.changes:
		return "Write the list", scr.c.guard.reason()
	}
	return "Make these changes on " + words.Count(len(scr.added), "machine"), scr.c.guard.reason()
}

func (scr *machineAddScreen) why() []string {
	r := scr.c.th.Row(scr.c.w).Add(term.Plain, " ")
	if scr.stage == addForm {
		return []string{r.Add(term.Strong, "Enter checks the machines; nothing is changed before you confirm").String()}
	}
	if l := scr.c.changes.doing(); l != nil {
		return l
	}
	label, off := scr.action()
	return scr.c.answerLine(label, off, scr.yes)
}

func (scr *machineAddScreen) view(w, h int) []string {
	if scr.stage == addForm {
		return scr.form.page(w, h, "Add machines", "Linux, by SSH", scr.err)
	}
	return scrolled(scr.body(w), h, &scr.first, &scr.most)
}

func (scr *machineAddScreen) body(w int) []string {
	pg := scr.c.page()
	var lines []string
	switch scr.stage {
	case addChecks:
		switch {
		case scr.err == nil:
			return append([]string{pg.Rule(w, "Check", "nothing is changed")}, view.MachineSteps(pg, w, scr.steps)...)
		case scr.report != nil && len(scr.report.Machines) > 0:
			lines = append(view.Problem(pg, w, scr.err), "")
			return append(append(lines, pg.Rule(w, "Findings", "")), view.MachineReport(pg, w, scr.report)...)
		}
		return view.Problem(pg, w, scr.err)
	case addQuestion:
		lines = []string{pg.Rule(w, "Changes", words.Count(len(scr.added), "machine"))}
		lines = append(lines, view.MachineChanges(pg, w, scr.added, false)...)
		return append(append(lines, pg.Rule(w, "Findings", "")), view.MachineReport(pg, w, scr.report)...)
	case addInstalls:
		return append([]string{pg.Rule(w, "Preparing", "leaving loses nothing")}, view.MachineSteps(pg, w, scr.steps)...)
	}
	lines = append([]string{pg.Rule(w, "Result", "")}, view.MachinesAdded(pg, w, scr.added)...)
	if scr.err != nil {
		return append(append(lines, ""), view.Problem(pg, w, scr.err)...)
	}
	return append(append(lines, ""), pg.Below(w, 1, 3, term.Plain, "Next: i runs init, which makes them nodes. Add all machines first if you have more.")...)
}

func (scr *machineAddScreen) takesText() bool         { return scr.stage == addForm }
func (scr *machineAddScreen) typed(k tea.KeyMsg)      { scr.err = nil; scr.form.typed(k) }
func (scr *machineAddScreen) bound(k tea.KeyMsg) bool { return scr.form.bound(k) }

func (scr *machineAddScreen) promptKeys() []binding {
	if scr.stage != addForm {
		return nil
	}
	return scr.form.keys("check", scr.submit, func() { scr.c.screen = scr.c.machines })
}

// answer carries out the selected answer.
func (scr *machineAddScreen) answer() tea.Cmd {
	if scr.c.now.Sub(scr.shown) < confirmDelay {
		scr.c.note = "read it first, then press Enter"
		return nil
	}
	if !scr.yes {
		return scr.back()
	}
	return scr.install()
}

// back goes back to the form, or from the result to the list.
func (scr *machineAddScreen) back() tea.Cmd {
	scr.c.task.drop()
	scr.work = nil
	if scr.stage == addDone && scr.err == nil {
		return scr.c.machines.show()
	}
	scr.stage, scr.err, scr.first = addForm, nil, 0
	return nil
}

func (scr *machineAddScreen) keys() []binding {
	return slices.Concat(
		questionKeys("machine", &scr.yes, scr.action, scr.answer),
		scr.c.scrollKeys(&scr.first, &scr.most),
		[]binding{
			on("r", "r", "check and try again; finished steps are not repeated", "machine", scr.check).footed("retry").unless(func() string {
				switch {
				case scr.err == nil || scr.work == nil:
					return "nothing has failed"
				}
				return scr.c.task.busy
			}),
			on("i", "i", "plan init, which makes the machines nodes", "machine", scr.c.changes.init).footed("init").unless(func() string {
				if scr.stage != addDone || scr.err != nil {
					return "machines were not added yet"
				}
				return scr.c.task.busy
			}),
			on("esc", "Esc", "back to the form, or from the result to the list", "back", scr.back).footed("back").unless(scr.c.changes.running),
		})
}
