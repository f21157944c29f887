package console

import (
	"fmt"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// resultScreen shows how a run ended.
type resultScreen struct {
	defaults
	c *console
}

func (scr *resultScreen) title() string   { return "result" }
func (scr *resultScreen) command() string { return scr.c.runCommand() }
func (scr *resultScreen) mode() string    { return scr.c.run.modeOf(scr) }
func (scr *resultScreen) rail() string    { return scr.c.run.railOf(scr) }

func (scr *resultScreen) keys() []binding {
	return []binding{
		on("enter", "Enter", "home", "do", scr.c.overview.show).footed("home").unless(func() string {
			if !scr.c.result.succeeded() && !scr.c.upg.active() {
				return "there is no cluster to show; r retries"
			}
			return ""
		}),
		on("r", "r", "retry; finished steps are skipped", "do", scr.retry).footed("retry").unless(func() string {
			if scr.c.result.succeeded() {
				return "the run succeeded"
			}
			if scr.deadEnd() {
				return "a retry would fail the same way; apply the fix first"
			}
			return ""
		}),
		scr.c.upg.watchKey(),
		on("l", "l", "full log", "view", act(func() { scr.c.log.show() })).footed("full log"),
		on("y", "y", "copy the next command, or the cause", "copy", act(scr.copyResult)).footed("copy"),
		on("esc", "Esc", "home", "back", scr.c.overview.show),
	}
}

// deadEnd reports whether every retry of this plan must fail. If the obstacle is outside of
// the plan, such as another run or a file, a retry checks for it again.
func (scr *resultScreen) deadEnd() bool {
	return scr.c.ran && scr.c.t.Result != nil && scr.c.t.Result.Resume == "" && plan.ExitCode(scr.c.err) == plan.ExitFailed
}

// retry makes a new plan and resumes the run.
func (scr *resultScreen) retry() tea.Cmd {
	if scr.c.upg.active() {
		return scr.c.upgradePlan.open(scr.c.upg.start)
	}
	if own := scr.c.ownRun(); own != nil {
		return own.again()
	}
	scr.c.wizard.resumed = scr.c.ran
	scr.c.err = nil
	if scr.c.ran {
		scr.c.screen = scr.c.run
		scr.c.plan = nil
		return scr.c.wizard.makePlan()
	}
	return scr.c.preflight.start()
}

func (scr *resultScreen) copyResult() {
	if scr.c.t.Result != nil && scr.c.result.succeeded() && len(scr.c.t.Result.Next) > 0 {
		scr.c.copyText(scr.c.deps.Commands.Line(scr.c.t.Result.Next[0]), "the command")
		return
	}
	if scr.c.err != nil {
		scr.c.copyText(term.Clean(scr.c.err.Error()), "the cause")
		return
	}
	scr.c.copyText("", "")
}

func (scr *resultScreen) view(w, h int) []string {
	if scr.c.result.succeeded() {
		return scr.successView(w, h)
	}
	return scr.failureView(w, h)
}

// successTitle returns the heading of a successful run and its remark.
func (scr *resultScreen) successTitle() (title, remark string) {
	name := scr.c.t.Cluster
	if name == "" && scr.c.home != nil {
		name = term.Clean(scr.c.home.Cluster)
	}
	if name == "" {
		name = "the cluster"
	}
	title = name + " is up"
	if own := scr.c.ownRun(); own != nil {
		title = own.finished(name)
	}
	if scr.c.upg.active() {
		title = name + " is upgraded"
	}
	if scr.c.t.Result != nil {
		if nodes := scr.c.t.Result.Nodes; nodes > 0 {
			remark = words.Count(nodes, "node") + " ready in " + term.Duration(scr.c.t.Elapsed(scr.c.now))
		}
		switch scr.c.t.Result.Ended {
		case plan.StateNothing:
			title = name + ": nothing to do"
		case plan.StateDetached:
			title = name + " continues on its own"
		}
	}
	switch {
	case scr.c.upg.active() && !scr.c.ran && scr.c.err != nil: // nothing to upgrade
		title = name + ": nothing to do"
	case scr.c.plan != nil && scr.c.plan.Rehearsal:
		title = name + ": rehearsed"
	}
	return title, remark
}

func (scr *resultScreen) successView(w, h int) []string {
	title, remark := scr.successTitle()
	var res plan.Result
	if scr.c.t.Result != nil {
		res = scr.c.t.Result.Result
	}
	lines := []string{scr.c.th.Rule(w, title, remark)}
	if scr.c.t.Result != nil && scr.c.t.Result.Text != "" {
		for i, l := range scr.c.th.Below(w, 4, 3, term.Plain, scr.c.t.Result.Text) {
			if i == 0 {
				l = "  " + scr.c.th.Paint(term.Good, scr.c.th.OK+" ") + strings.TrimPrefix(l, "    ")
			}
			lines = append(lines, l)
		}
	}
	for _, m := range res.Etcd {
		lines = append(lines, scr.c.th.Below(w, 4, 3, term.Faint, term.Clean(m))...)
	}
	if scr.c.plan != nil && scr.c.plan.Rehearsal {
		lines = append(append(lines, ""), view.Rehearsed(scr.c.page(), w, scr.c.t.Steps)...)
	}
	if scr.c.t.Result == nil && scr.c.err != nil {
		x := view.Explain(scr.c.err, scr.c.deps.Commands)
		lines = append(lines, scr.c.th.Below(w, 2, 3, term.Plain, x.What)...)
		lines = append(lines, scr.c.th.Below(w, 2, 3, term.Faint, x.Remedy)...)
	}
	dir := ""
	if scr.c.home != nil {
		dir = term.Clean(scr.c.home.Dir)
	}
	lines = append(lines, view.FilesWritten(scr.c.page(), w, res.Files, dir)...)
	lines = append(lines, view.NextCommands(scr.c.page(), w, res.Next)...)
	if left := h - len(lines); left > len(scr.c.t.Machines)+1 && len(scr.c.t.Machines) > 0 {
		lines = append(lines, "")
		lines = append(lines, scr.c.run.machinesView(w, min(len(scr.c.t.Machines), left-2))...)
	}
	return lines
}

// causeLines is the maximum number of lines of the failed operation and of its cause.
const causeLines = 4

func (scr *resultScreen) failureView(w, h int) []string {
	rest := "l shows the log"
	if !scr.c.ran {
		rest = "y copies them" // there is no log yet
	}
	lines := view.ProblemWithin(scr.c.page(), w, causeLines, rest, scr.c.err)
	if !scr.c.ran && scr.c.upg.active() {
		return append(lines, "", scr.c.th.Row(w).Add(term.Plain, "   ").Add(term.Faint, "Nothing has been changed. r checks and plans again.").String())
	}
	if !scr.c.ran {
		return append(lines, "", scr.c.th.Row(w).Add(term.Plain, "   ").Add(term.Faint, "Nothing has been created.").String())
	}
	lines = append(lines, scr.c.th.Rule(w, "State", view.StepsRemark(scr.c.page(), &scr.c.t)))
	for i := range scr.c.t.Steps {
		s := &scr.c.t.Steps[i]
		if s.State == "" {
			continue
		}
		sign, st := view.StepSign(scr.c.page(), s, scr.c.running)
		r := scr.c.th.Row(w).Add(term.Plain, "  ").Add(st, sign).Add(term.Plain, " ").Col(term.Plain, s.Title, min(48, w-24))
		lines = append(lines, r.Right(term.Faint, term.Duration(s.Took)).String())
	}
	ready, wanted := scr.c.t.Ready()
	on := "Finished steps are kept; r or the same command resumes."
	if scr.deadEnd() {
		on = "The same command cannot resume: see the fix."
	}
	nodes := fmt.Sprintf("nodes %d/%d ready", ready, wanted)
	if scr.c.upg.active() {
		n, total := scr.c.upg.atTarget()
		if nodes = fmt.Sprintf("%d/%d nodes at the target", n, total); total == 0 {
			nodes = "No node was changed"
		}
	}
	lines = append(lines, scr.c.th.Below(w, 4, 2, term.Faint, nodes+". "+on)...)
	if scr.c.upg.active() {
		lines = append(lines, scr.c.th.Row(w).Pad(4).Add(term.Faint, "come back: ").Add(term.Accent, scr.c.upg.resumeCommand()).String())
	}
	if room := h - len(lines); room > 3 {
		lines = append(lines, scr.c.run.logTail(w, room)...)
	}
	return lines
}

// fail shows an error on the result screen.
func (scr *resultScreen) fail(err error) {
	scr.c.err, scr.c.quit.exit = err, plan.ExitCode(err)
	scr.c.screen = scr.c.result
}

func (scr *resultScreen) succeeded() bool {
	return scr.c.err == nil || plan.ExitCode(scr.c.err) == plan.ExitNothing
}
