package console

import (
	"context"
	"slices"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/tui/term"
	"constellation/tui/view"
)

// machineScreen shows one machine: its row in the list, and what a check by SSH finds.
type machineScreen struct {
	defaults
	c      *console
	name   string
	logins map[string]*form // by machine, once they were entered
	form   *form            // the open login form; nil if it is closed
	then   func() tea.Cmd   // what the login is for; nil: nothing

	report  *machinecheck.Report // of the last check of this machine; nil if there is none
	checked time.Time
	err     error
	first   int // line at the top
	most    int // greatest first of the last frame
}

// machineChecked is the end of a check.
type machineChecked struct {
	name   string
	report machinecheck.Report
	err    error
}

// open shows a machine.
func (scr *machineScreen) open(name string) tea.Cmd {
	logins := scr.logins
	if logins == nil {
		logins = map[string]*form{}
	}
	if scr.name != name {
		*scr = machineScreen{c: scr.c, name: name, logins: logins}
	}
	scr.c.screen = scr
	if m := scr.c.machines; !m.pending && scr.c.now.Sub(m.readAt) >= refreshAfter { // such as after its log
		return m.read()
	}
	return nil
}

// row is the machine in the list; nil if it is not there any more.
func (scr *machineScreen) row() *view.ListedMachine {
	if l := scr.c.machines.listing; l != nil {
		for i := range l.Machines {
			if l.Machines[i].Name == scr.name {
				return &l.Machines[i]
			}
		}
	}
	return nil
}

// withLogin runs an action once it is known how to log in.
func (scr *machineScreen) withLogin(then func() tea.Cmd) func() tea.Cmd {
	return func() tea.Cmd {
		if scr.logins[scr.name] != nil {
			return then()
		}
		scr.edit(then)
		return nil
	}
}

// edit opens the form of the login.
func (scr *machineScreen) edit(then func() tea.Cmd) {
	scr.then, scr.form = then, &form{c: scr.c, fields: scr.fields()}
}

// fields are those of the login: as they were entered, or proposed.
func (scr *machineScreen) fields() []formField {
	if f := scr.logins[scr.name]; f != nil {
		return slices.Clone(f.fields)
	}
	machine := ""
	if m := scr.row(); m != nil && m.Address != "" {
		machine = "root@" + m.Address
	}
	return loginFields(scr.c.machines.last, machine)
}

// accept takes the login of the form and continues with what it is for.
func (scr *machineScreen) accept() tea.Cmd {
	scr.logins[scr.name], scr.c.machines.last = scr.form, scr.form
	then := scr.then
	scr.form, scr.then = nil, nil
	if then == nil {
		return nil
	}
	return then()
}

// login is the login of the machine: that of the open form, else the one that was entered.
func (scr *machineScreen) login() MachineLogin {
	f := scr.form
	if f == nil {
		f = scr.logins[scr.name]
	}
	if f == nil {
		return MachineLogin{}
	}
	return loginOf(f)
}

// check checks the machine.
func (scr *machineScreen) check() tea.Cmd {
	m := scr.row()
	if m == nil {
		return nil
	}
	name, group, login, run := scr.name, m.Group, scr.login(), scr.c.deps.Machines.Check
	scr.report, scr.err, scr.first = nil, nil, 0
	return scr.c.task.launch("checking "+term.Clean(name), nil, func(ctx context.Context, _ func(plan.Event)) tea.Msg {
		r, err := run(ctx, login, group, scr.c.secret.ask)
		return machineChecked{name, r, err}
	})
}

func (scr *machineScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	m, ok := msg.(machineChecked)
	if !ok {
		return nil, false
	}
	if m.name == scr.name {
		scr.checked, scr.err = scr.c.now, m.err
		if len(m.report.Machines) == 1 && m.report.Machines[0].Err == nil {
			scr.report, scr.err = &m.report, nil
		}
	}
	return nil, true
}

func (scr *machineScreen) title() string { return "machine" }
func (scr *machineScreen) mode() string  { return scr.c.machines.mode() }
func (scr *machineScreen) stale() bool   { return scr.c.machines.stale() && scr.form == nil }

func (scr *machineScreen) command() string {
	args := "machine check"
	if m := scr.row(); m != nil && m.Group != "worker" {
		args += " --role " + m.Group
	}
	login := scr.login()
	if len(login.Machines) == 0 {
		login.Machines = []string{"USER@HOST"}
	}
	return scr.c.deps.Commands.Command(args + " " + login.flags())
}

func (scr *machineScreen) safety() string {
	return scrolledSafety(scr, scr.first, scr.most)
}

func (scr *machineScreen) why() []string {
	r := scr.c.th.Row(scr.c.w).Add(term.Plain, " ")
	switch {
	case scr.form != nil:
		return []string{r.Add(term.Strong, "Enter logs in; no password is needed for the login itself").String()}
	case scr.c.task.busy != "":
		return []string{r.Add(term.Accent, scr.c.th.Spin(scr.c.frame)+" ").Add(term.Plain, "Now: "+scr.c.task.busy).String()}
	}
	return nil
}

func (scr *machineScreen) view(w, h int) []string {
	if f := scr.form; f != nil {
		return f.page(w, h, "Login to "+term.Clean(scr.name), "", nil)
	}
	return scrolled(scr.body(w), h, &scr.first, &scr.most)
}

func (scr *machineScreen) body(w int) []string {
	pg := scr.c.page()
	m := scr.row()
	if m == nil {
		return append([]string{pg.Rule(w, "Machine "+term.Clean(scr.name), "")}, pg.Below(w, 2, 2, term.Plain, "It is not in the list any more.")...)
	}
	login := ""
	if f := scr.logins[scr.name]; f != nil {
		login = f.value("--ssh")
	}
	lines := append(view.MachineFacts(pg, w, scr.c.machines.listing, m, login), "")
	switch {
	case scr.err != nil:
		lines = append(lines, view.Problem(pg, w, scr.err)...)
	case scr.report != nil:
		r := &scr.report.Machines[0]
		lines = append(lines, pg.Rule(w, "Findings on "+term.Clean(r.Machine), "as of "+scr.checked.UTC().Format("15:04:05 UTC")))
		lines = append(lines, view.MachineFindings(pg, w, r)...)
	default:
		lines = append(lines, pg.Rule(w, "Findings", ""))
		lines = append(lines, pg.Below(w, 2, 2, term.Faint, "c logs in by SSH and checks the machine. It changes nothing.")...)
	}
	return lines
}

// takesText reports whether keys go into the form of the login.
func (scr *machineScreen) takesText() bool         { return scr.form != nil }
func (scr *machineScreen) typed(k tea.KeyMsg)      { scr.form.typed(k) }
func (scr *machineScreen) bound(k tea.KeyMsg) bool { return scr.form.bound(k) }
func (scr *machineScreen) promptKeys() []binding {
	if scr.form == nil {
		return nil
	}
	return scr.form.keys("log in", scr.accept, func() { scr.form, scr.then = nil, nil })
}

// busy disables what logs in while a task does.
func (scr *machineScreen) busy() string {
	if scr.row() == nil {
		return "the machine is not in the list any more"
	}
	return scr.c.task.busy
}

func (scr *machineScreen) keys() []binding {
	return slices.Concat([]binding{
		on("c", "c", "check the machine by SSH", "machine", scr.withLogin(scr.check)).footed("check").unless(scr.busy),
		on("l", "l", "follow its log by SSH", "machine", scr.withLogin(func() tea.Cmd { return scr.c.machineLog.open(scr.name) })).footed("log").unless(scr.busy),
		on("x", "x", "give the machine back: reset and restore it, or forget a lost one", "machine", func() tea.Cmd { return scr.c.machineRemove.open(scr.name) }).footed("remove").effects().unless(scr.fixed),
		on("e", "e", "edit the login", "machine", act(func() { scr.edit(nil) })).footed("login").unless(scr.busy),
		on("r", "r", "read the list again", "machine", scr.c.machines.read).footed("refresh"),
		on("esc", "Esc", "back to the machines; stops a check", "back", func() tea.Cmd {
			scr.c.task.drop()
			return scr.c.machines.show()
		}).footed("back"),
	}, scr.c.scrollKeys(&scr.first, &scr.most))
}

// fixed disables what changes the machine.
func (scr *machineScreen) fixed() string {
	if scr.c.machines.listing.Adopted {
		return adoptedMachines
	}
	return scr.busy()
}
