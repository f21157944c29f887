package console

import (
	"context"
	"fmt"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/enrol"
	"constellation/engine/plan"
	"constellation/tui/term"
	"constellation/tui/view"
)

// Removing is how a machine is given back.
type Removing struct {
	Name string
	MachineLogin
	// Gone only deletes its row. IgnoreCluster removes it although the cluster does not answer.
	Gone, IgnoreCluster bool
}

// Removal is the return of a machine in two steps, in this order. Both may be repeated. It is a pointer, as an Addition.
type Removal interface {
	// Outside returns an error if the machine is a node of the cluster, or may be one.
	Outside(context.Context) error
	// Give restores the machine and deletes its row.
	Give(context.Context, func(enrol.Step)) (enrol.Outcome, error)
}

// removeStage is what the screen shows.
type removeStage int

const (
	removeForm     removeStage = iota
	removeCheck                // whether it is a node
	removeQuestion             // whether to give it back
	removeRuns                 // the live table
	removeDone                 // the result
)

// machineRemoveScreen gives a machine back: form, refusal of a node, question, live table, result.
type machineRemoveScreen struct {
	defaults
	c       *console
	stage   removeStage
	name    string
	form    *form
	work    Removal
	steps   []view.MachineStep
	outcome enrol.Outcome
	err     error
	yes     bool // the cursor is on the action
	shown   time.Time
	first   int // line at the top
	most    int // greatest first of the last frame
}

// Messages of the remove screen.
type (
	removeChecked struct {
		work Removal
		err  error
	}
	removeEnded struct {
		outcome enrol.Outcome
		err     error
	}
)

// open shows the form.
func (scr *machineRemoveScreen) open(name string) tea.Cmd {
	*scr = machineRemoveScreen{c: scr.c, name: name}
	scr.form = &form{c: scr.c, fields: append(scr.c.machine.fields(),
		formField{key: "--gone", title: "it is lost", value: "no", choices: []string{"no", "yes"}},
		formField{key: "--ignore-cluster", title: "no cluster", value: "no", choices: []string{"no", "yes"}},
	)}
	scr.c.screen = scr
	return nil
}

func (scr *machineRemoveScreen) wanted() Removing {
	r := Removing{Name: scr.name, MachineLogin: loginOf(scr.form), Gone: scr.form.yes("--gone"), IgnoreCluster: scr.form.yes("--ignore-cluster")}
	if r.Gone {
		r.MachineLogin = MachineLogin{}
	}
	return r
}

func (scr *machineRemoveScreen) command() string {
	r := scr.wanted()
	args := "machine remove " + view.QuoteArg(r.Name)
	if f := r.flags(); f != "" {
		args += " " + f
	}
	for _, k := range []string{"--gone", "--ignore-cluster"} {
		if scr.form.yes(k) {
			args += " " + k
		}
	}
	return scr.c.deps.Commands.Command(args)
}

// submit begins with the question whether it is a node.
func (scr *machineRemoveScreen) submit() tea.Cmd {
	work, err := scr.c.deps.Machines.Remove(scr.wanted(), scr.c.secret.ask)
	if scr.err = err; err != nil {
		return nil
	}
	scr.work = work
	return scr.check()
}

func (scr *machineRemoveScreen) check() tea.Cmd {
	scr.stage, scr.err, scr.first, scr.yes = removeCheck, nil, 0, false
	work := scr.work
	return scr.c.task.launch("reading whether "+term.Clean(scr.name)+" is a node", nil, func(ctx context.Context, _ func(plan.Event)) tea.Msg {
		return removeChecked{work, work.Outside(ctx)}
	})
}

// give gives the machine back. Leaving stops that at a step that the same command repeats.
func (scr *machineRemoveScreen) give() tea.Cmd {
	if scr.c.guard.stops() {
		return nil
	}
	scr.stage, scr.err = removeRuns, nil
	scr.steps = []view.MachineStep{{Name: scr.name, Title: "waiting", State: plan.StateRunning}}
	work := scr.work
	scr.c.changes.begin(scr.command())
	return scr.c.task.launch("restoring "+term.Clean(scr.name), func(events []plan.Event) tea.Cmd {
		applySteps(scr.steps, events)
		return nil
	}, func(ctx context.Context, emit func(plan.Event)) tea.Msg {
		step := emitSteps(emit)
		out, err := work.Give(ctx, func(s enrol.Step) { step(0, s) })
		return removeEnded{out, err}
	})
}

func (scr *machineRemoveScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	switch msg := msg.(type) {
	case removeChecked:
		if msg.work != scr.work {
			break
		}
		if scr.err = msg.err; msg.err == nil {
			scr.stage, scr.shown = removeQuestion, scr.c.now
		}
	case removeEnded:
		scr.stage, scr.outcome, scr.err, scr.first = removeDone, msg.outcome, msg.err, 0
		return scr.c.changes.end(msg.err), true
	default:
		return nil, false
	}
	return nil, true
}

func (scr *machineRemoveScreen) title() string  { return "remove machine" }
func (scr *machineRemoveScreen) safety() string { return scrolledSafety(scr, scr.first, scr.most) }

func (scr *machineRemoveScreen) mode() string {
	return fmt.Sprintf("remove machine  step %d of %d", int(scr.stage)+1, int(removeDone)+1)
}

// action is the label of the affirmative answer, and why it cannot be given; empty if it can.
func (scr *machineRemoveScreen) action() (label, off string) {
	switch {
	case scr.stage != removeQuestion:
		return "", "there is nothing to answer"
	case scr.wanted().Gone:
		return "Delete its row", scr.c.guard.reason()
	}
	return "Reset and restore the machine", scr.c.guard.reason()
}

func (scr *machineRemoveScreen) why() []string {
	if scr.stage == removeForm {
		return []string{scr.c.th.Row(scr.c.w).Add(term.Plain, " ").Add(term.Strong, "Enter reads whether it is a node; nothing is changed before you confirm").String()}
	}
	if l := scr.c.changes.doing(); l != nil {
		return l
	}
	label, off := scr.action()
	return scr.c.answerLine(label, off, scr.yes)
}

func (scr *machineRemoveScreen) view(w, h int) []string {
	if scr.stage == removeForm {
		return scr.form.page(w, h, "Remove "+term.Clean(scr.name), "", scr.err)
	}
	return scrolled(scr.body(w), h, &scr.first, &scr.most)
}

func (scr *machineRemoveScreen) body(w int) []string {
	pg := scr.c.page()
	name := term.Clean(scr.name)
	lines := []string{pg.Rule(w, "Remove "+name, "")}
	add := func(text string) {
		for k, p := range term.Wrap(term.Clean(text), max(20, w-6)) {
			lines = append(lines, []string{"  - ", "    "}[min(k, 1)]+p)
		}
	}
	switch scr.stage {
	case removeQuestion:
		if scr.wanted().Gone {
			add("its row is deleted from constellation-conf.yaml")
			add("the machine is not changed: if it is not lost, use its login instead")
			return lines
		}
		add("the bootstrapper resets the machine: kubeadm's files, pods and their data are deleted")
		add("units are stopped, files that were replaced are restored, others are deleted")
		add("packages that were installed for it are purged")
		add("last, its row is deleted from constellation-conf.yaml")
		add("settings of `machine check --fix` stay; restart the machine afterwards")
		return lines
	case removeRuns:
		return append(lines, view.MachineSteps(pg, w, scr.steps)...)
	case removeDone:
		for _, c := range scr.outcome.Changes {
			add(c)
		}
		for _, n := range scr.outcome.Notes {
			add("note: " + n)
		}
		if scr.err == nil {
			lines = append(lines, "", pg.Row(w).Add(term.Plain, " ").Add(term.Good, pg.OK+" ").Add(term.Plain, name+" is removed").String())
			if l := scr.c.machines.listing; l != nil && l.Initialised {
				lines = append(lines, pg.Below(w, 3, 2, term.Faint, "i plans init, which publishes the shorter list in the cluster")...)
			}
		}
	}
	if scr.err != nil {
		lines = append(lines, view.Problem(pg, w, scr.err)...)
	}
	return lines
}

func (scr *machineRemoveScreen) takesText() bool         { return scr.stage == removeForm }
func (scr *machineRemoveScreen) typed(k tea.KeyMsg)      { scr.err = nil; scr.form.typed(k) }
func (scr *machineRemoveScreen) bound(k tea.KeyMsg) bool { return scr.form.bound(k) }

func (scr *machineRemoveScreen) promptKeys() []binding {
	if scr.stage != removeForm {
		return nil
	}
	return scr.form.keys("continue", scr.submit, func() { scr.c.screen = scr.c.machine })
}

// answer carries out the selected answer.
func (scr *machineRemoveScreen) answer() tea.Cmd {
	switch {
	case scr.c.now.Sub(scr.shown) < confirmDelay:
		scr.c.note = "read it first, then press Enter"
		return nil
	case !scr.yes:
		return scr.back()
	}
	return scr.give()
}

// back goes back to the machine, or from a removed one to the list.
func (scr *machineRemoveScreen) back() tea.Cmd {
	scr.c.task.drop()
	scr.work = nil
	if scr.stage == removeDone && scr.err == nil {
		return scr.c.machines.show()
	}
	return scr.c.machine.open(scr.name)
}

func (scr *machineRemoveScreen) keys() []binding {
	keys := append(questionKeys("machine", &scr.yes, scr.action, scr.answer), scr.c.scrollKeys(&scr.first, &scr.most)...)
	return append(keys,
		on("r", "r", "try again; finished steps are not repeated", "machine", scr.check).footed("retry").unless(func() string {
			if scr.err == nil || scr.work == nil {
				return "nothing has failed"
			}
			return scr.c.task.busy
		}),
		on("i", "i", "plan init, which publishes the list", "machine", scr.c.changes.init).footed("init").unless(func() string {
			if scr.stage != removeDone || scr.err != nil || !scr.c.machines.listing.Initialised {
				return "there is nothing to publish"
			}
			return scr.c.task.busy
		}),
		on("y", "y", "copy the remedy", "copy", act(func() { scr.c.copyText(plan.Remedy(scr.err), "the remedy") })).unless(func() string {
			if scr.err == nil {
				return "nothing has failed"
			}
			return ""
		}),
		on("esc", "Esc", "back", "back", scr.back).footed("back").unless(scr.c.changes.running))
}
