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
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// Calls are machines to add that call this console. It is a pointer, as an Addition.
type Calls interface {
	// Wait waits until each machine is prepared or its token expired. It writes each machine that is prepared into the
	// configuration. At its end all tokens are worthless.
	Wait(context.Context, CallEvents) ([]view.AddedMachine, error)
	// Save writes the text of the i-th machine to a file of the workspace that only its owner can read, and returns its
	// name. The file is deleted when Wait ends, and by Machines.Close.
	Save(i int) (name string, err error)
}

// CallEvents are the callbacks of a wait. They are called from several goroutines.
type CallEvents struct {
	// Listening is called first.
	Listening func(Listening)
	// Step is a step of the i-th machine, which called. Ended is the end of its work; after an error it can call again.
	Step  func(i int, s enrol.Step)
	Ended func(i int, err error)
	// Note is a line about something that happened.
	Note func(line string)
}

// Listening is how machines reach this console.
type Listening struct {
	// Texts are the command or the user data of each machine. They are secrets.
	Texts []string
	// At is the ADDRESS:PORT of this console, and Until the end of the tokens.
	At    string
	Until time.Time
}

// calling is the wait of the add screen.
type calling struct {
	work      Calls
	listening *Listening // nil until it listens
	at        int        // the machine whose text is shown
	notes     []string
}

// callNotes is how many notes are kept.
const callNotes = 6

// Messages of the wait. callListens carries the work that it belongs to: it is no event of a task.
type (
	callListens struct {
		work      Calls
		listening Listening
	}
	callEnded struct {
		added []view.AddedMachine
		err   error
	}
)

// wait makes the tokens and waits for the machines. The tokens are worthless when it ends.
func (scr *machineAddScreen) wait() tea.Cmd {
	if scr.c.guard.stops() {
		return nil
	}
	n := scr.wanted()
	work, err := scr.c.deps.Machines.Calls(n)
	if scr.err = err; err != nil {
		scr.stage = addForm
		return nil
	}
	scr.stage, scr.first, scr.added = addWaits, 0, nil
	scr.calls = calling{work: work}
	scr.steps = nil
	for _, x := range n.Callers {
		name, address, _ := strings.Cut(x, "=")
		scr.steps = append(scr.steps, view.MachineStep{Name: name, Title: "waits for a call from " + cmp.Or(n.Source, address)})
	}
	scr.c.changes.wait(scr.command())
	send := scr.c.deps.send
	return scr.c.task.launch("waiting for "+words.Count(len(n.Callers), "machine"), scr.callEvents, func(ctx context.Context, emit func(plan.Event)) tea.Msg {
		added, err := work.Wait(ctx, CallEvents{
			Listening: func(l Listening) { send(callListens{work, l}) },
			Step:      emitSteps(emit),
			Ended: func(i int, err error) {
				e := plan.Event{Kind: plan.KindStep, Attempt: i, State: plan.StateDone, Text: "prepared"}
				if err != nil {
					e.State, e.Text = plan.StateFailed, "failed, and can call again: "+err.Error()
				}
				emit(e)
			},
			Note: func(line string) { emit(plan.Event{Kind: plan.KindLog, Text: line}) },
		})
		return callEnded{added, err}
	})
}

// callEvents adds events to the live table and the notes, and selects the machine whose text is shown.
func (scr *machineAddScreen) callEvents(events []plan.Event) tea.Cmd {
	x := &scr.calls
	for _, e := range events {
		if e.Kind == plan.KindLog {
			x.notes = append(x.notes, e.Text)
			x.notes = x.notes[max(0, len(x.notes)-callNotes):]
			continue
		}
		applySteps(scr.steps, []plan.Event{e})
		scr.c.changes.made = true
	}
	for i := range scr.steps { // a machine that is prepared needs no text any more
		if next := (x.at + i) % len(scr.steps); scr.steps[next].State != plan.StateDone {
			x.at = next
			break
		}
	}
	return nil
}

// working reports whether a machine that called is being prepared.
func (scr *machineAddScreen) working() bool {
	return slices.ContainsFunc(scr.steps, func(s view.MachineStep) bool { return s.State == plan.StateRunning })
}

// takeCall handles the messages of a wait.
func (scr *machineAddScreen) takeCall(msg tea.Msg) (tea.Cmd, bool) {
	switch msg := msg.(type) {
	case callListens:
		if msg.work == scr.calls.work {
			scr.calls.listening = &msg.listening
		}
	case callEnded:
		scr.stage, scr.added, scr.err, scr.first = addDone, msg.added, msg.err, 0
		scr.calls.listening = nil
		if len(msg.added) == 0 { // it did not listen
			scr.stage, scr.calls = addForm, calling{}
		}
		var left []string // r waits for these again
		for i, x := range scr.wanted().Callers {
			if i < len(msg.added) && msg.added[i].Error != "" {
				left = append(left, x)
			}
		}
		if len(left) > 0 {
			scr.form.set(callersKey, strings.Join(left, " "))
		}
		return scr.c.changes.end(msg.err), true
	default:
		return nil, false
	}
	return nil, true
}

// text is the command or the user data of the selected machine; empty unless the machine still needs it.
func (scr *machineAddScreen) text() string {
	x := &scr.calls
	if scr.stage != addWaits || x.listening == nil || x.at >= len(x.listening.Texts) || scr.steps[x.at].State == plan.StateDone {
		return ""
	}
	return x.listening.Texts[x.at]
}

// noText is why copying and writing are off.
func (scr *machineAddScreen) noText() string {
	if scr.text() == "" {
		return "nothing is printed for a machine"
	}
	return ""
}

// textName is the name of a text.
func (scr *machineAddScreen) textName() string {
	if scr.wanted().Way == ByCloudInit {
		return "user data"
	}
	return "command"
}

// waiting is the page of the wait.
func (scr *machineAddScreen) waiting(w int) []string {
	pg, x := scr.c.page(), &scr.calls
	remark := ""
	if l := x.listening; l != nil {
		remark = "at " + l.At + " until " + l.Until.UTC().Format("15:04 UTC")
	}
	lines := append([]string{pg.Rule(w, "Waiting for "+words.Count(len(scr.steps), "machine"), remark)}, view.MachineSteps(pg, w, scr.steps)...)
	for _, n := range x.notes {
		lines = append(lines, pg.Below(w, 3, 2, term.Faint, n)...)
	}
	text := scr.text()
	if text == "" {
		return lines
	}
	title := strings.ToUpper(scr.textName()[:1]) + scr.textName()[1:] + " for " + term.Clean(scr.steps[x.at].Name)
	if len(scr.steps) > 1 {
		remark = fmt.Sprintf("%d of %d, ", x.at+1, len(scr.steps))
	} else {
		remark = ""
	}
	lines = append(lines, "", pg.Rule(w, title, remark+"a secret, for one use"))
	for l := range strings.Lines(text) { // as it is, to be selected with the mouse
		lines = append(lines, pg.Row(w).Add(term.Plain, term.Clean(strings.TrimSuffix(l, "\n"))).String())
	}
	return lines
}

// whyWaiting is how to use the text, or shows the current work.
func (scr *machineAddScreen) whyWaiting() []string {
	if scr.working() || scr.text() == "" || scr.c.quit.pending {
		return scr.c.changes.doing()
	}
	what := "Run the command on " + term.Clean(scr.steps[scr.calls.at].Name) + " as root: y copies it, w writes a file."
	if scr.wanted().Way == ByCloudInit {
		what = "Give these user data to the new machine: y copies them, w writes a file."
	}
	return []string{scr.c.th.Row(scr.c.w).Add(term.Plain, " ").Add(term.Strong, what).String()}
}

// callKeys are the keys of the wait.
func (scr *machineAddScreen) callKeys() []binding {
	if scr.stage != addWaits {
		return nil
	}
	keys := []binding{
		on("y", "y", "copy the "+scr.textName()+" of the machine", "machine", act(func() { scr.c.copyText(scr.text(), "the "+scr.textName()+", which is a secret") })).footed("copy").unless(scr.noText),
		on("w", "w", "write the "+scr.textName()+" to a file, which is deleted when this screen ends", "machine", act(scr.save)).footed("write").unless(scr.noText),
	}
	if len(scr.steps) > 1 {
		keys = append(keys, on("tab n", "Tab", "the next machine", "machine", act(func() {
			scr.calls.at, scr.first = (scr.calls.at+1)%len(scr.steps), 0
		})).footed("next machine"))
	}
	return keys
}

// save writes the text of the machine to a file.
func (scr *machineAddScreen) save() {
	name, err := scr.calls.work.Save(scr.calls.at)
	if err != nil {
		scr.c.note = term.Clean(err.Error())
		return
	}
	scr.c.note = "written to " + term.Clean(name) + " in the workspace, until this screen ends"
}
