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

// Ways to reach machines.
const (
	BySSH       = "SSH"
	ByCommand   = "command"
	ByCloudInit = "cloud-init"
)

// NewMachines are machines to add.
type NewMachines struct {
	// Way is how they are reached. Without SSH they call this console, and MachineLogin is empty.
	Way string
	MachineLogin
	// Callers are NAME=ADDRESS of each machine that calls. Listen, Source and ValidFor are of these.
	Callers                  []string
	Listen, Source, ValidFor string
	// Group is control-plane or worker. Name and Address are of one machine with a login; empty means its own.
	Group, Name, Address string
	// Labels and Taints are key=value and key=value:Effect.
	Labels, Taints []string
	Spare          bool
	// TPM is where a new key is: auto, none, or the address of a TPM. TPMRoots is a folder with certificates of vendors,
	// Programs one with programs, Packages one with packages; empty means none, and those of this program.
	TPM, TPMRoots, Programs, Packages string
	Proxy                             string
}

// args are the arguments of `machine add`.
func (n NewMachines) args() string {
	var out []string
	add := func(flag, value, usual string) {
		if value != "" && value != usual {
			out = append(out, flag+" "+view.QuoteArg(value))
		}
	}
	if n.Way == BySSH {
		if len(n.Machines) == 0 {
			n.Machines = []string{"USER@HOST"}
		}
		out = append(out, n.flags())
	} else {
		if len(n.Callers) == 0 {
			n.Callers = []string{callersKey}
		}
		for _, x := range n.Callers {
			out = append(out, view.QuoteArg(x))
		}
		out = append(out, map[string]string{ByCommand: "--print-command", ByCloudInit: "--cloud-init"}[n.Way])
	}
	add("--group", n.Group, "worker")
	for _, l := range n.Labels {
		add("--label", l, "")
	}
	for _, t := range n.Taints {
		add("--taint", t, "")
	}
	if n.Spare {
		out = append(out, "--spare")
	}
	add("--tpm", n.TPM, "auto")
	add("--tpm-roots", n.TPMRoots, "")
	add("--name", n.Name, "")
	add("--address", n.Address, "")
	add("--proxy", n.Proxy, "")
	add("--packages", n.Packages, "")
	add("--programs", n.Programs, "")
	add("--valid-for", n.ValidFor, validFor)
	add("--listen", n.Listen, "")
	add("--source", n.Source, "")
	return strings.Join(out, " ")
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
	addWaits             // for machines that call, in place of check, question and live table
)

// machineAddScreen adds machines: form, check, changes, question, live table, result. Machines that call are waited for
// (machinecall.go).
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
	calls   calling
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

// Fields of the form that are no flags, and the default of --valid-for.
const (
	wayKey     = "way"
	callersKey = "NAME=ADDRESS"
	validFor   = "30m"
)

// open shows the form. Values of the last one stay, except for those of its machines.
func (scr *machineAddScreen) open() tea.Cmd {
	before, last := scr.form, scr.c.machines.last
	*scr = machineAddScreen{c: scr.c}
	group := "worker"
	if l := scr.c.machines.listing; l != nil && len(l.Machines) == 0 {
		group = "control-plane"
	}
	f := &form{c: scr.c, fields: addFields(loginFields(cmp.Or(before, last), ""), group)}
	scr.form = f
	if invalid := scr.c.deps.Machines.Invalid; invalid != nil {
		f.invalid = func(key string) error { return invalid(scr.wanted(), key) }
	}
	if before != nil {
		for _, key := range []string{wayKey, "--tpm", "--tpm-roots", "--proxy", "--packages", "--programs", "--valid-for", "--listen"} {
			f.set(key, before.value(key))
		}
	}
	for i, x := range f.fields {
		if usual := map[string]string{"--tpm": "auto", "--valid-for": validFor}[x.key]; x.more && f.exists(i) && x.value != "" && x.value != usual {
			f.set(moreKey, moreShow) // a value that is set is visible
		}
	}
	f.move(1) // the way is SSH in most cases
	scr.c.screen = scr
	return nil
}

// addFields are the fields of the form, with those of a login.
func addFields(login []formField, group string) []formField {
	ssh := func(f *form) bool { return f.value(wayKey) == BySSH }
	calls := func(f *form) bool { return !ssh(f) }
	of := map[string]formField{}
	for _, x := range login {
		x.when = ssh
		of[x.key] = x
	}
	logins, jump, hostKey := of["--ssh"], of["--jump"], of["--host-key"]
	logins.title, logins.hint, logins.help = "logins", "root@10.0.0.11 root@10.0.0.12", "USER@HOST or USER@HOST:PORT of each machine. They are prepared side by side."
	jump.more, hostKey.more = true, true
	return []formField{
		{key: wayKey, title: "reach it by", value: BySSH, choices: []string{BySSH, ByCommand, ByCloudInit}, help: "SSH logs in. Otherwise the machine calls: by a command, or at its first boot."},
		logins,
		{key: callersKey, title: "machines", when: calls, hint: "worker-1=10.0.0.12 worker-2=10.0.0.13", help: "Name and address of each machine. Only this address can use the command."},
		{key: "--group", title: "group", value: group, choices: []string{"control-plane", "worker"}, help: "Control planes run API server and etcd. Add them before workers."},
		of["--sudo"], of["--key"],
		{key: "--label", title: "labels", hint: "disk=ssd example.com/rack=3", help: "key=value of each label that the Nodes get."},
		{key: "--taint", title: "taints", hint: "batch=yes:NoSchedule", help: "key=value:Effect of each taint that the Nodes get."},
		{key: "--spare", title: "spare", value: "no", choices: []string{"no", "yes"}, help: "A spare waits, and joins when its group grows or loses a machine."},
		{key: moreKey, title: "more", value: moreHide, choices: []string{moreHide, moreShow}, help: "TPM, proxy, packages, names, addresses: their defaults fit most machines."},
		jump, hostKey,
		{key: "--name", title: "name", more: true, when: ssh, hint: "default: its host name", help: "The name of the Node. Only for one machine."},
		{key: "--address", title: "address", more: true, when: ssh, hint: "default: that of the login", help: "The IP address at which other machines reach it. Only for one machine."},
		{key: "--tpm", title: "new key in", more: true, value: "auto", hint: "auto", help: "auto: the TPM if it works, else a file. none: a file. Or the address of a TPM."},
		{key: "--tpm-roots", title: "TPM vendors", more: true, hint: "default: not verified", help: "A folder with certificates of vendors: only such TPMs are accepted."},
		{key: "--proxy", title: "proxy", more: true, hint: "http://HOST:PORT", help: "HTTP proxy for downloads of the machines: packages, components, images."},
		{key: "--packages", title: "packages", more: true, hint: "default: the machine's repositories", help: "A folder here with Debian packages, for machines without a repository."},
		{key: "--programs", title: "programs", more: true, hint: "default: those beside this program", help: "A folder with bootstrapper and agent, for machines of another architecture."},
		{key: "--valid-for", title: "valid for", more: true, when: calls, value: validFor, hint: validFor, help: "How long the command can be used, such as 2h. It ends with this screen, too."},
		{key: "--listen", title: "listen at", more: true, when: calls, hint: "default: a free port", help: "ADDRESS:PORT of this computer that the machines connect to."},
		{key: "--source", title: "calls from", more: true, when: calls, hint: "default: its own address", help: "The IP address that this computer sees, as behind address translation."},
	}
}

// wanted are the machines of the form.
func (scr *machineAddScreen) wanted() NewMachines {
	f := scr.form
	text := func(key string) string { return strings.TrimSpace(f.value(key)) }
	n := NewMachines{
		Way: text(wayKey), Group: text("--group"), Labels: f.list("--label"), Taints: f.list("--taint"), Spare: f.yes("--spare"),
		TPM: text("--tpm"), TPMRoots: f.path("--tpm-roots"), Programs: f.path("--programs"), Packages: f.path("--packages"), Proxy: text("--proxy"),
	}
	if n.Way == BySSH {
		n.MachineLogin, n.Name, n.Address = loginOf(f), text("--name"), text("--address")
	} else {
		n.Callers, n.Listen, n.Source, n.ValidFor = f.list(callersKey), text("--listen"), text("--source"), cmp.Or(text("--valid-for"), validFor)
	}
	n.TPM = cmp.Or(n.TPM, "auto")
	return n
}

func (scr *machineAddScreen) command() string {
	return scr.c.deps.Commands.Command("machine add " + scr.wanted().args())
}

// submit begins with the check, or waits for machines that call.
func (scr *machineAddScreen) submit() tea.Cmd {
	if scr.err = nil; scr.form.more() || !scr.form.valid() {
		return nil
	}
	if scr.wanted().Way != BySSH {
		return scr.wait()
	}
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
		return scr.takeCall(msg)
	}
	return nil, true
}

func (scr *machineAddScreen) title() string { return "add machines" }

func (scr *machineAddScreen) mode() string {
	if scr.calls.work != nil || scr.stage == addForm && scr.wanted().Way != BySSH {
		return fmt.Sprintf("add machines  step %d of 3", map[addStage]int{addForm: 1, addWaits: 2, addDone: 3}[scr.stage])
	}
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
	switch scr.stage {
	case addForm:
		return []string{r.Add(term.Plain, scr.form.help()).String()}
	case addWaits:
		return scr.whyWaiting()
	}
	if l := scr.c.changes.doing(); l != nil {
		return l
	}
	label, off := scr.action()
	return scr.c.answerLine(label, off, scr.yes)
}

func (scr *machineAddScreen) view(w, h int) []string {
	if scr.stage == addForm {
		remark := "nothing is changed before you confirm"
		if scr.wanted().Way != BySSH {
			remark = "nothing is changed before the machine calls"
		}
		return scr.form.page(w, h, "Add machines", remark, scr.err)
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
	case addWaits:
		return scr.waiting(w)
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
	word := "check"
	switch {
	case scr.form.fields[scr.form.at].key == moreKey:
		word = "more"
	case scr.wanted().Way == ByCommand:
		word = "make a command"
	case scr.wanted().Way == ByCloudInit:
		word = "make user data"
	}
	return scr.form.keys(word, scr.submit, func() { scr.c.screen = scr.c.machines })
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

// again repeats what has failed.
func (scr *machineAddScreen) again() tea.Cmd {
	if scr.calls.work != nil {
		return scr.wait()
	}
	return scr.check()
}

// held is why Esc is off.
func (scr *machineAddScreen) held() string {
	if scr.stage == addWaits && !scr.working() {
		return ""
	}
	return scr.c.changes.running()
}

func (scr *machineAddScreen) backWord() string {
	if scr.stage == addWaits {
		return "cancel"
	}
	return "back"
}

// back goes back to the form, or from the result to the list.
func (scr *machineAddScreen) back() tea.Cmd {
	scr.c.task.drop()
	if scr.stage == addWaits {
		scr.c.changes.drop()
		scr.c.note = "the printed text is worthless now"
	}
	scr.work, scr.calls = nil, calling{}
	if scr.stage == addDone && scr.err == nil {
		return scr.c.machines.show()
	}
	scr.stage, scr.err, scr.first = addForm, nil, 0
	return nil
}

func (scr *machineAddScreen) keys() []binding {
	return slices.Concat(
		questionKeys("machine", &scr.yes, scr.action, scr.answer),
		scr.callKeys(),
		scr.c.scrollKeys(&scr.first, &scr.most),
		[]binding{
			on("r", "r", "try again; finished steps are not repeated", "machine", scr.again).footed("retry").unless(func() string {
				switch {
				case scr.err == nil || scr.work == nil && scr.calls.work == nil:
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
			on("esc", "Esc", "back to the form, or from the result to the list", "back", scr.back).footed(scr.backWord()).unless(scr.held),
		})
}
