package tui

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

// unplanned ends the event stream of a verb whose planning failed with err, so that
// readers of events get a complete stream. It returns err.
func (s *session) unplanned(out sink, f format, err error) error {
	if f != text {
		s.framed(out, "").end("", err, plan.Result{})
	}
	return err
}

// limited is signals with a timeout, unless limit is 0.
func (s *session) limited(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	ctx, stop := s.signals(ctx)
	if limit <= 0 {
		return ctx, stop
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	return ctx, func() { cancel(); stop() }
}

// printer returns the renderer of a run's events without the console. With live it shows a
// status line at the bottom of a terminal; without a terminal it prints progress lines at
// intervals.
func (s *session) printer(f format, live bool) sink {
	switch f {
	case asJSON:
		return jsonPrinter{s.out}
	case asMarkdown: // progress lines go to stderr, the page to stdout
		p := newPlainPrinter(&guarded{w: s.Stderr}, nil, s.Now)
		p.sp = s.formatter()
		return &runSummary{out: s.out, lines: p, sp: p.sp}
	}
	var l *term.LiveLine
	if file, ok := s.Stdout.(*os.File); ok && live && !s.plainly() && term.NotInteractive(file, file, s.Env) == "" {
		l = &term.LiveLine{Out: file, Display: term.Display{Ascii: term.DisplayOf(s.Env).Ascii}}
	}
	p := newPlainPrinter(s.out, l, s.Now)
	p.sp = s.formatter()
	return p
}

// term.LiveLine returns a progress line on stderr. It shows nothing if stderr is not a terminal
// or lines must not be overwritten.
func (s *session) liveLine() term.LiveLine {
	if f, ok := s.Stderr.(*os.File); ok && term.IsTerminal(f) && !s.plainly() {
		return term.LiveLine{Out: f, Display: term.Display{Ascii: term.DisplayOf(s.Env).Ascii}}
	}
	return term.LiveLine{}
}

// plainly reports accessible mode: output is only appended, line by line, and prompts are
// plain text. Screen readers and braille displays need this.
func (s *session) plainly() bool { return s.accessible || s.Env("ACCESSIBLE") != "" }

// engineOf returns the engine of the workspace.
func (s *session) engineOf() (Engine, *workspace.Workspace, string, error) {
	ws, dir, err := s.workspace()
	if err != nil {
		return nil, nil, "", err
	}
	eng, err := s.Engine(ws, s.log)
	return eng, ws, dir, err
}

// runOptions are the flags of a verb that plans, prompts and runs, beside its request.
type runOptions struct {
	yes, nonInteractive bool
	timeout             time.Duration
	out                 format
}

// planAndRun runs a verb without the console: it plans, gets the plan accepted as a
// describes, and runs it. It sets a.yes and a.asks from o.
func (s *session) planAndRun(ctx context.Context, o runOptions, a acceptance, plan func(context.Context, Engine) (*plan.Plan, error)) error {
	out := s.printer(o.out, true)
	defer func() { out.close() }()
	eng, _, _, err := s.engineOf()
	if err != nil {
		return s.unplanned(out, o.out, err)
	}
	ctx, stop := s.limited(ctx, o.timeout)
	defer stop()
	p, err := plan(ctx, eng)
	if err != nil {
		return s.unplanned(out, o.out, err)
	}
	a.yes, a.asks = o.yes, o.out == text && !o.nonInteractive && s.asks()
	out, err = s.accept(p, out, o.out, a)
	if err != nil {
		return err
	}
	return eng.Run(ctx, p, out.event)
}

// scriptedInit runs init without the console. Unless asks is set it never prompts, and all
// consent must come from flags.
func (s *session) scriptedInit(ctx context.Context, o consoleOptions, f format, asks bool) error {
	out := s.printer(f, false)
	defer func() { out.close() }()
	eng, _, _, err := s.engineOf()
	if err != nil {
		return s.unplanned(out, f, err)
	}
	ctx, stop := s.limited(ctx, o.timeout)
	defer stop()
	plan, err := eng.PlanInit(ctx)
	if err != nil {
		return s.unplanned(out, f, err)
	}
	out, err = s.accept(plan, out, f, acceptance{yes: o.yes, asks: asks, question: fixedQuestion("Create cluster " + term.Clean(plan.Cluster) + "?"), show: s.printPreview})
	if err != nil {
		return err
	}
	return eng.Run(ctx, plan, out.event)
}

// refuse reports a plan that will not run as the event stream of a run that ended before
// its first step, so that JSON output has the same information as stderr.
func (s *session) refuse(p *plan.Plan, out sink, exit int, cause error, remedy string) error {
	emit := s.preview(p, out)
	emit(plan.Event{
		Kind: plan.KindResult, State: plan.StateFailed, Text: "nothing was done: " + cause.Error(), Remedy: remedy, Exit: &exit,
		Data: s.data(plan.Result{Status: plan.StateFailed}),
	})
	return &plan.Error{Op: string(p.Verb) + " " + p.Cluster, Err: cause, Remedy: remedy, Exit: exit}
}

// data encodes the payload of an event.
func (s *session) data(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		s.log.Debug("event data not encoded", "err", err)
		return nil
	}
	return b
}

// preview emits a plan before a run as an event stream. The returned function continues
// the stream.
func (s *session) preview(pl *plan.Plan, out sink) (emit func(plan.Event)) {
	seq := uint64(0)
	emit = func(ev plan.Event) {
		seq++
		ev.Seq, ev.Time, ev.Run = seq, s.Now().UTC(), pl.ID
		out.event(ev)
	}
	data := s.data
	emit(plan.Event{Kind: plan.KindHello, Schema: plan.Schema, Tool: "constellation " + s.Release, Object: pl.Cluster, Simulated: pl.Simulated})
	emit(plan.Event{Kind: plan.KindPlan, Data: data(pl)})
	for _, f := range pl.Findings {
		emit(plan.Event{
			Kind: plan.KindCheck, Object: f.ID, State: string(f.Severity), Source: f.Source, Text: f.Title, Remedy: f.Remedy,
			TookMS: f.Took.Milliseconds(), Data: data(f),
		})
	}
	// The steps of a blocked plan will not run.
	if p, ok := out.(*plainPrinter); ok && len(pl.Blocked()) == 0 {
		p.printSteps(pl)
	}
	return emit
}

// printPreview is preview as acceptance.show.
func (s *session) printPreview(p *plan.Plan, out sink) { s.preview(p, out) }

// printSteps writes the steps of a plan for the prompt.
func (p *plainPrinter) printSteps(plan *plan.Plan) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, st := range plan.Steps {
		state := "would"
		if st.Finished {
			state = "skip"
		}
		p.line(p.now(), term.Clean(st.ID), state, term.Clean(st.Title)+": "+term.Clean(st.Effect))
		if st.Warning != "" && !st.Finished {
			p.line(p.now(), term.Clean(st.ID), "WARN", term.Clean(st.Warning))
		}
	}
}

// page is what printed pages share: without colours, in a width that fits most windows and
// logs. It needs no console.
func (s *session) page() view.Page {
	th := term.NewTheme(term.Display{Ascii: term.DisplayOf(s.Env).Ascii})
	return view.Page{Theme: th.Printed(), Now: s.Now(), Commands: s.formatter()}
}

// answerWidth is the line width of printed output: the width of the terminal within
// limits, else view.PrintedWidth.
func (s *session) answerWidth() int {
	w := term.Columns(s.Stdout)
	if w <= 0 {
		return view.PrintedWidth
	}
	return max(view.MinWidth, min(w, 120))
}

// print writes lines without trailing spaces.
func (s *session) print(lines []string) {
	for _, l := range lines {
		fmt.Fprintln(s.out, strings.TrimRight(l, " "))
	}
}

// printStatus runs `status`.
func (s *session) printStatus(ctx context.Context, f format) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	st, err := eng.Status(ctx)
	if err != nil {
		return err
	}
	if f == asJSON {
		if err := document(s.out, st); err != nil {
			return err
		}
	} else {
		s.print(s.statusText(&st))
	}
	if st.Stage == engine.StageCluster && !st.Reachable {
		return &plan.Error{Op: "get status of cluster " + st.Cluster, Err: errors.New(cmp.Or(st.Problem, "the API server does not answer")), Remedy: st.Remedy}
	}
	return nil
}

// asks reports whether the program can prompt: stdin and stdout are terminals, outside CI.
func (s *session) asks() bool {
	return term.IsTerminal(s.Stdin) && term.IsTerminal(s.Stdout) && s.Env("CI") == ""
}

// statusText renders the output of status.
func (s *session) statusText(st *engine.Status) []string {
	pg := s.page()
	w := view.PrintedWidth
	lines := []string{pg.Row(w).Add(term.Plain, "cluster "+cmp.Or(term.Clean(st.Cluster), "(none)")+"   "+stageWord(st.Stage)+view.Marked(st.Simulated, "   ")).String()}
	lines = append(lines, view.ClusterSummary(pg, w, st, nil)...)
	lines = append(lines, view.Findings(pg, w, st.Health, len(st.Health))...)
	lines = append(lines, view.NodeRows(pg, w, len(st.Nodes)+len(st.Machines)+2, st, 0)...)
	if len(st.Services) > 0 {
		lines = append(lines, pg.Rule(w, "Services", ""))
		for _, v := range st.Services {
			sign, sty := pg.OK, term.Good
			if v.Ready < v.Wanted {
				sign, sty = pg.Warn, term.Caution
			}
			lines = append(lines, pg.Row(w).Add(term.Plain, " ").Add(sty, sign).Add(term.Plain, " ").Col(term.Plain, term.Clean(v.Name), 30).
				Col(term.Plain, fmt.Sprintf("%d/%d", v.Ready, v.Wanted), 7).Col(term.Plain, term.Clean(v.Version), 16).Add(term.Faint, term.Clean(v.Message)).String())
		}
	}
	return lines
}

// stageWord describes the stage of a workspace.
func stageWord(s engine.Stage) string {
	switch s {
	case engine.StageEmpty:
		return "not configured"
	case engine.StageConfigured:
		return "configured, no machines"
	case engine.StageReady:
		return "machines started, no cluster"
	case engine.StagePartial:
		return "init incomplete"
	case engine.StageCluster:
		return "initialised"
	}
	return string(s)
}

// printHome prints an overview of the workspace and the next commands.
func (s *session) printHome(ctx context.Context) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	h, err := eng.Home(ctx)
	if err != nil {
		return err
	}
	pg := s.page()
	fmt.Fprintf(s.out, "workspace %s\ncluster   %s, %s\n", term.Clean(h.Dir), cmp.Or(term.Clean(h.Cluster), "(none)"), stageWord(h.Stage)+view.Marked(h.Simulated, ", "))
	s.print(view.Findings(pg, view.PrintedWidth, h.Problems, len(h.Problems)))
	s.print(view.Recent(pg, view.PrintedWidth, 6, &h))
	for _, n := range h.Next {
		line := "next      " + s.formatter().Line(term.Clean(n.Command))
		if t := term.Clean(n.Title); t != "" {
			line += "   # " + t
		}
		fmt.Fprintln(s.out, line)
	}
	return nil
}

// framed turns the events of a verb without a plan into a complete stream: hello first,
// result last, all with sequence numbers and times.
type framed struct {
	out    sink
	now    func() time.Time
	seq    uint64
	began  time.Time
	opened bool
	ended  bool
	hello  plan.Event
}

func (s *session) framed(out sink, object string) *framed {
	return &framed{out: out, now: s.Now, began: s.Now(), hello: plan.Event{
		Kind: plan.KindHello, Schema: plan.Schema, Tool: "constellation " + s.Release, Object: object,
	}}
}

func (f *framed) event(ev plan.Event) {
	if !f.opened {
		f.opened = true
		if ev.Kind != plan.KindHello {
			f.event(f.hello)
		}
	}
	f.seq++
	ev.Seq = f.seq
	if ev.Time.IsZero() {
		ev.Time = f.now().UTC()
	}
	f.ended = f.ended || ev.Kind == plan.KindResult
	f.out.event(ev)
}

// end emits the result, unless there was one.
func (f *framed) end(text string, err error, res plan.Result) {
	if f.ended {
		return
	}
	exit := plan.ExitCode(err)
	res.Status, res.TookMS = plan.StateDone, f.now().Sub(f.began).Milliseconds()
	ev := plan.Event{Kind: plan.KindResult, State: plan.StateDone, Text: text, Exit: &exit, TookMS: res.TookMS}
	if err != nil {
		ev.State, ev.Text, ev.Remedy = plan.StateFailed, err.Error(), plan.Remedy(err)
		res = plan.Result{Status: plan.StateFailed, TookMS: res.TookMS}
	}
	if b, err := json.Marshal(res); err == nil {
		ev.Data = b
	}
	f.event(ev)
}
