package console

import (
	"context"
	"fmt"
	"slices"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/adopt"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// Adoption is how a console without a workspace adopts clusters.
type Adoption struct {
	// Examine reports what adopting a context would do. It only reads. A credential plugin may run.
	Examine func(ctx context.Context, name string, emit func(plan.Event)) (adopt.Report, error)
	// Folder is where Write writes the workspace of a cluster.
	Folder func(r *adopt.Report) string
	// Write writes the workspace of an examined cluster and opens it.
	Write func(name string, r *adopt.Report) (Adopted, error)
	// Own are the workspaces of clusters that are adopted already, by context.
	Own map[string]Adopted
}

// Adopted is the workspace of an adopted cluster.
type Adopted struct {
	Dir string
	// Written are the files that were written, with paths below Dir.
	Written []plan.File
	// Options are those of a console of this workspace.
	Options Options
}

// adoptStage is what the adopt screen shows.
type adoptStage int

const (
	adoptExamined adoptStage = iota // the report, and the question whether to write the workspace
	adoptWritten                    // the files, and the question whether to plan the operator
	adoptPlanned                    // the plan, and the question whether to install the operator
)

// adoptScreen adopts a cluster: report, workspace, and the plan that installs the operator. The run screen
// executes that plan.
type adoptScreen struct {
	defaults
	c       *console
	stage   adoptStage
	context string
	report  *adopt.Report // nil until the cluster was examined
	done    *Adopted      // nil until there is a workspace
	before  Options       // of the console without the workspace
	plan    *plan.Plan    // of the operator
	err     error
	doing   string // what the examination does
	yes     bool   // the cursor is on the action
	shown   time.Time
	first   int // line at the top
	most    int // greatest first of the last frame
	// active is set from the plan on: run and result are those of the adoption.
	active bool
}

// Messages of the adopt screen.
type (
	examined struct {
		report adopt.Report
		err    error
	}
	workspaceWritten struct {
		done Adopted
		err  error
	}
	operatorPlanned struct {
		plan *plan.Plan
		err  error
	}
)

// open examines a context, or plans the operator if its workspace exists.
func (scr *adoptScreen) open(name string) tea.Cmd {
	*scr = adoptScreen{c: scr.c, context: name, before: scr.c.deps.Options}
	scr.c.screen = scr
	a := scr.c.deps.Clusters.Adopt
	if own, ok := a.Own[name]; ok {
		scr.done = &own
		return scr.makePlan()
	}
	return scr.c.task.launch("examining "+term.Clean(name), scr.events, func(ctx context.Context, emit func(plan.Event)) tea.Msg {
		r, err := a.Examine(ctx, name, emit)
		return examined{r, err}
	})
}

func (scr *adoptScreen) events(events []plan.Event) tea.Cmd {
	for _, e := range events {
		if e.Text != "" {
			scr.doing = term.Clean(e.Text)
		}
	}
	return nil
}

// makePlan plans the operator. From here on the console works with the engine of the workspace.
func (scr *adoptScreen) makePlan() tea.Cmd {
	scr.ask(adoptPlanned)
	scr.plan, scr.err, scr.c.plan = nil, nil, nil
	scr.c.screen, scr.active = scr, true
	scr.c.deps.Options = scr.done.Options
	scr.c.deps.Clusters = scr.before.Clusters // Esc goes back
	return scr.c.task.launch("planning", nil, func(ctx context.Context, _ func(plan.Event)) tea.Msg {
		p, err := scr.c.deps.Engine.PlanOperator(ctx)
		return operatorPlanned{p, err}
	})
}

// ask shows a stage with its question. The cursor is on the safe answer.
func (scr *adoptScreen) ask(s adoptStage) {
	scr.stage, scr.yes, scr.first, scr.shown = s, false, 0, scr.c.now
}

func (scr *adoptScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	switch msg := msg.(type) {
	case examined:
		scr.err = msg.err
		if msg.err == nil {
			scr.report = &msg.report
		}
		scr.ask(adoptExamined)
	case workspaceWritten:
		scr.err = msg.err
		if msg.err == nil {
			scr.done = &msg.done
			scr.ask(adoptWritten)
		}
	case operatorPlanned:
		scr.err = msg.err
		scr.plan, scr.c.plan = msg.plan, msg.plan
		if msg.err == nil && scr.plan.Finished() && len(scr.plan.Blocked()) == 0 {
			scr.c.note = "the operator is installed: there is nothing to do"
		}
		scr.ask(adoptPlanned)
	default:
		return nil, false
	}
	return nil, true
}

// action is the label of the affirmative answer, and why it cannot be given; empty if it can.
func (scr *adoptScreen) action() (label, off string) {
	if scr.c.task.busy != "" {
		return "", scr.c.task.busy
	}
	if scr.err != nil {
		return "", "it failed; r retries"
	}
	switch scr.stage {
	case adoptExamined:
		if n := len(scr.report.Blocked()); n > 0 {
			off = words.Count(n, "finding") + " in the way"
		} else if scr.c.oneCluster.locked() {
			off = "this cluster is guarded; go back, press U and type its name"
		}
		return "Write the workspace", off
	case adoptWritten:
		return "Plan the operator", ""
	default:
		switch {
		case len(scr.plan.Blocked()) > 0:
			off = "the plan is blocked"
		case scr.plan.Finished():
			off = "the operator is installed"
		default:
			off = scr.c.guard.reason()
		}
		return "Install operator and agents", off
	}
}

// answer carries out the selected answer.
func (scr *adoptScreen) answer() tea.Cmd {
	if scr.c.now.Sub(scr.shown) < confirmDelay {
		scr.c.note = "read it first, then press Enter"
		return nil
	}
	switch {
	case !scr.yes:
		return scr.leave()
	case scr.stage == adoptWritten:
		return scr.makePlan()
	case scr.stage == adoptPlanned:
		return scr.c.run.start()
	}
	name, report, write := scr.context, scr.report, scr.c.deps.Clusters.Adopt.Write
	return scr.c.task.launch("writing the workspace", nil, func(context.Context, func(plan.Event)) tea.Msg {
		done, err := write(name, report)
		return workspaceWritten{done, err}
	})
}

// leave goes back to the cluster. A workspace that was written stays.
func (scr *adoptScreen) leave() tea.Cmd {
	scr.c.task.drop()
	scr.active, scr.c.plan, scr.c.deps.Options = false, nil, scr.before
	if scr.done != nil {
		scr.c.note = "the workspace is in " + term.Clean(scr.done.Dir)
		scr.c.deps.Clusters.Adopt.Own[scr.context] = *scr.done
	}
	scr.c.screen = scr.c.oneCluster
	return nil
}

// retry repeats what failed.
func (scr *adoptScreen) retry() tea.Cmd {
	if scr.stage == adoptPlanned {
		return scr.makePlan()
	}
	return scr.open(scr.context)
}

func (scr *adoptScreen) title() string { return "adopt" }

func (scr *adoptScreen) mode() string {
	return fmt.Sprintf("adopt  step %d of 3", int(scr.stage)+1)
}

func (scr *adoptScreen) command() string {
	if scr.done == nil {
		return scr.c.deps.Commands.Command("adopt --context " + view.QuoteArg(scr.context))
	}
	return scr.done.Options.Commands.Command("adopt --operator")
}

func (scr *adoptScreen) safety() string {
	return scrolledSafety(scr, scr.first, scr.most)
}

func (scr *adoptScreen) header() []string {
	t := scr.c.th
	return []string{t.Row(scr.c.w).Add(term.Accent, " "+t.Brand+" ").Add(term.Strong, term.Clean(scr.context)).Right(term.Faint, scr.mode()).String()}
}

func (scr *adoptScreen) why() []string {
	label, off := scr.action()
	if scr.c.task.busy != "" {
		text := "Now: " + scr.c.task.busy
		if scr.doing != "" {
			text += ": " + scr.doing
		}
		return []string{scr.c.th.Row(scr.c.w).Add(term.Plain, " "+scr.c.th.Spin(scr.c.frame)+" "+text).String()}
	}
	return scr.c.answerLine(label, off, scr.yes)
}

func (scr *adoptScreen) view(w, h int) []string {
	return scrolled(scr.body(w), h, &scr.first, &scr.most)
}

func (scr *adoptScreen) body(w int) []string {
	pg := scr.c.page()
	switch {
	case scr.err != nil:
		return view.Problem(pg, w, scr.err)
	case scr.stage == adoptExamined && scr.report != nil:
		pg.Commands.Context = scr.context
		lines := view.AdoptReport(pg, w, scr.report)
		if len(scr.report.Blocked()) == 0 {
			lines = append(lines, "")
			lines = append(lines, term.Wrap("The workspace is written to "+term.Clean(scr.c.deps.Clusters.Adopt.Folder(scr.report))+". The cluster is not changed.", w)...)
		}
		return lines
	case scr.stage == adoptWritten:
		lines := []string{pg.Rule(w, "Adopted", "")}
		lines = append(lines, view.FilesWritten(pg, w, scr.done.Written, term.Clean(scr.done.Dir))...)
		lines = append(lines, "")
		return append(lines, term.Wrap("Upgrades stay with kubeadm until the operator is installed. It upgrades nodes in place and is taken out again by `adopt --undo`. The next step shows its plan.", w)...)
	case scr.stage == adoptPlanned && scr.plan != nil:
		return append([]string{pg.Rule(w, "Plan: install the operator", words.Count(len(scr.plan.Steps), "step"))}, view.InitPlanRows(pg, w, scr.plan)...)
	}
	return []string{""}
}

func (scr *adoptScreen) keys() []binding {
	return slices.Concat(answerKeys("adopt", &scr.yes, scr.action, scr.answer), scr.c.scrollKeys(&scr.first, &scr.most), []binding{
		on("r", "r", "repeat what failed", "adopt", scr.retry).footed("retry").unless(func() string {
			if scr.err == nil {
				return "nothing has failed"
			}
			return ""
		}),
		on("esc", "Esc", "back to the cluster; what was written stays", "back", scr.leave).footed("back"),
	})
}
