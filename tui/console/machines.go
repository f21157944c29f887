package console

import (
	"context"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/machinecheck"
	"constellation/tui/term"
	"constellation/tui/view"
)

// Machines is how a console works with the machines that its workspace lists.
type Machines struct {
	// List returns the machines, and which of them are nodes.
	List func(context.Context) (view.MachineListing, error)
	// Check checks a machine for its group.
	Check func(ctx context.Context, to MachineLogin, group string, ask Ask) (machinecheck.Report, error)
	// Logs gives each line of a machine's journal to a function, without control characters, until ctx ends.
	Logs func(ctx context.Context, name string, to MachineLogin, ask Ask, line func(string)) error
	// Add begins to add machines by SSH, Calls those that call, and Remove to give one back. All only validate.
	Add    func(NewMachines, Ask) (Addition, error)
	Calls  func(NewMachines) (Calls, error)
	Remove func(Removing, Ask) (Removal, error)
	// Invalid returns an error if the value of one flag is not valid alone.
	Invalid func(n NewMachines, flag string) error
	// Close deletes the files of Save that are left. It is called when the console ends, also while a Wait runs; nil: there
	// are none.
	Close func()
}

// adoptedMachines is why the list of an adopted cluster is not changed here.
const adoptedMachines = "kubeadm made this cluster: add and remove nodes with kubeadm, then correct the list"

// MachineLogin is how machines are logged in to.
type MachineLogin struct {
	Machines       []string // USER@HOST[:PORT]
	Key            string   // file; empty: the agent's keys and those in ~/.ssh
	Jump, HostKeys []string
	Sudo           bool
}

// loginOf returns the login that a form names.
func loginOf(f *form) MachineLogin {
	return MachineLogin{Machines: f.list("--ssh"), Key: f.path("--key"), Jump: f.list("--jump"), HostKeys: f.list("--host-key"), Sudo: f.yes("--sudo")}
}

// flags are the flags of a verb for the same login.
func (l MachineLogin) flags() string {
	var out []string
	add := func(flag string, values ...string) {
		for _, v := range values {
			if v != "" {
				out = append(out, flag+" "+view.QuoteArg(v))
			}
		}
	}
	add("--ssh", l.Machines...)
	add("--key", l.Key)
	add("--jump", strings.Join(l.Jump, ","))
	add("--host-key", l.HostKeys...)
	if l.Sudo {
		out = append(out, "--sudo")
	}
	return strings.Join(out, " ")
}

// loginFields are the fields of a login. Values of the last one stay, except for the machine.
func loginFields(last *form, machine string) []formField {
	fields := []formField{
		{key: "--ssh", title: "login", value: machine, hint: "USER@HOST, or USER@HOST:PORT"},
		{key: "--sudo", title: "use sudo", value: "no", choices: []string{"no", "yes"}, help: "sudo is for logins that are not root. Its password is prompted for."},
		{key: "--key", title: "private key", hint: "file; default: the agent's, and those in ~/.ssh", help: "A file on this computer. Without one: the agent's keys, and those in ~/.ssh."},
		{key: "--jump", title: "jump hosts", hint: "USER@HOST, in order", help: "Logins pass through these machines, the first one first."},
		{key: "--host-key", title: "host key", hint: "SHA256:… if known_hosts lacks the machine", help: "The fingerprint to accept. Compare it with the one on the machine's console."},
	}
	if last == nil {
		return fields
	}
	for i := range fields {
		if k := fields[i].key; k != "--ssh" && k != "--host-key" {
			fields[i].value = last.value(k)
		}
	}
	return fields
}

// machinesScreen lists the machines of the workspace.
type machinesScreen struct {
	defaults
	c       *console
	listing *view.MachineListing // the newest; nil if there is none yet
	err     error
	readAt  time.Time
	pending bool
	gen     int // older listings and refreshes are dropped
	at      int
	last    *form // the last login
}

// Messages of the machines screen.
type (
	machinesListed struct {
		gen     int
		listing view.MachineListing
		err     error
	}
	machinesRefresh struct{ gen int }
)

func (scr *machinesScreen) title() string { return "machines" }

func (scr *machinesScreen) command() string { return scr.c.deps.Commands.Command("machine list") }

func (scr *machinesScreen) stale() bool {
	return scr.listing != nil && (scr.err != nil || scr.c.now.Sub(scr.readAt) > staleAfter)
}

func (scr *machinesScreen) mode() string {
	switch {
	case scr.listing == nil:
		return scr.c.now.UTC().Format("15:04:05 UTC")
	case scr.stale():
		return "STALE " + term.Duration(scr.c.now.Sub(scr.readAt))
	}
	return "LIVE  as of " + scr.readAt.UTC().Format("15:04:05 UTC")
}

// show shows the list and reads it.
func (scr *machinesScreen) show() tea.Cmd {
	scr.c.screen = scr
	return scr.read()
}

func (scr *machinesScreen) read() tea.Cmd {
	scr.gen++
	gen, list := scr.gen, scr.c.deps.Machines.List
	scr.pending = true
	return func() tea.Msg {
		ctx, cancel := context.WithTimeout(scr.c.ctx, staleAfter)
		defer cancel()
		l, err := list(ctx)
		return machinesListed{gen, l, err}
	}
}

func (scr *machinesScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	switch msg := msg.(type) {
	case machinesListed:
		if msg.gen != scr.gen {
			return nil, true
		}
		scr.pending = false
		if scr.err = msg.err; msg.err == nil {
			name := ""
			if m := scr.selected(); m != nil {
				name = m.Name
			}
			scr.listing, scr.readAt = &msg.listing, scr.c.now
			scr.choose(name)
		}
		gen := scr.gen
		return tea.Tick(refreshAfter, func(time.Time) tea.Msg { return machinesRefresh{gen} }), true
	case machinesRefresh:
		if msg.gen == scr.gen && !scr.pending && (scr.c.screen == scr || scr.c.screen == scr.c.machine) {
			return scr.read(), true
		}
		return nil, true
	}
	return nil, false
}

// choose moves the cursor to a machine. It stays where it is if there is none of this name.
func (scr *machinesScreen) choose(name string) {
	if i := slices.IndexFunc(scr.listing.Machines, func(m view.ListedMachine) bool { return m.Name == name }); i >= 0 {
		scr.at = i
	}
	scr.at = max(0, min(scr.at, len(scr.listing.Machines)-1))
}

// selected is the machine under the cursor; nil if there is none.
func (scr *machinesScreen) selected() *view.ListedMachine {
	if scr.listing == nil || scr.at >= len(scr.listing.Machines) {
		return nil
	}
	return &scr.listing.Machines[scr.at]
}

func (scr *machinesScreen) move(by int) func() tea.Cmd {
	return act(func() {
		if scr.listing != nil {
			scr.at = max(0, min(scr.at+by, len(scr.listing.Machines)-1))
		}
	})
}

func (scr *machinesScreen) keys() []binding {
	return []binding{
		on("enter", "Enter", "open the machine: its row, findings and log", "machine", func() tea.Cmd { return scr.c.machine.open(scr.selected().Name) }).footed("open").unless(func() string {
			if scr.selected() == nil {
				return "there is no machine to open"
			}
			return ""
		}),
		on("a", "a", "add machines: by SSH, or by a command that they run", "machine", scr.c.machineAdd.open).footed("add").effects().unless(func() string {
			if scr.listing == nil {
				return "the list was not read yet"
			}
			if scr.listing.Adopted {
				return adoptedMachines
			}
			return scr.c.task.busy
		}),
		on("down j", "↑↓ jk", "next machine", "move", scr.move(1)).footed("move"),
		on("up k", "↑", "previous machine", "move", scr.move(-1)),
		on("pgdown ctrl+d", "PgDn", "next page", "move", scr.move(10)),
		on("pgup ctrl+u", "PgUp", "previous page", "move", scr.move(-10)),
		on("r", "r", "read the list again", "machine", scr.read).footed("refresh"),
		on("esc", "Esc", "home", "back", scr.c.overview.show).footed("home"),
	}
}

// why is what keeps the selected machine from being a healthy node.
func (scr *machinesScreen) why() []string {
	m := scr.selected()
	if m == nil {
		return nil
	}
	why := view.MachineReason(scr.listing, m)
	if why == "" {
		return nil
	}
	return scr.c.th.Below(scr.c.w, 1, 2, term.Caution, m.Name+": "+why)
}

func (scr *machinesScreen) view(w, h int) []string {
	pg := scr.c.page()
	l := scr.listing
	switch {
	case l == nil && scr.err != nil:
		return view.Problem(pg, w, scr.err)
	case l == nil:
		return []string{pg.Rule(w, "Machines", ""), pg.Row(w).Add(term.Accent, "  "+pg.Spin()+" ").Add(term.Plain, "reading the list").String()}
	}
	var below []string
	switch {
	case scr.err != nil:
		below = view.ProblemWithin(pg, w, 2, "r repeats", scr.err)
	case l.Problem != "" && l.Remedy != "":
		below = pg.Below(w, 1, 2, term.Accent, pg.Commands.Text(l.Remedy))
	}
	if len(l.Machines) == 0 {
		return append(append([]string{pg.Rule(w, "Machines", "none")}, scr.first(w)...), below...)
	}
	return append(view.MachineRows(pg, w, max(3, h-len(below)), l, scr.at), below...)
}

// first says what to do with an empty list.
func (scr *machinesScreen) first(w int) (lines []string) {
	for _, l := range term.Wrap("No machine was added yet. Add the first control plane, then workers: each needs Linux, and an SSH login of root or with sudo, or an owner who runs a command there. Then create the cluster with init.", w-3) {
		lines = append(lines, scr.c.th.Row(w).Pad(3).Add(term.Plain, l).String())
	}
	return append(lines, scr.c.th.Row(w).Pad(3).Add(term.Accent, "a").Add(term.Plain, " adds machines here. Scripted: ").Add(term.Accent, scr.c.deps.Commands.Command("machine add")).String())
}
