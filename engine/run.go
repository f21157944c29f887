package engine

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/user"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// wasRehearsal is the result of a rehearsal.
const wasRehearsal = "this was a rehearsal: nothing was changed"

// addSteps adds steps to a plan, and notes which are done. In a rehearsal they have no effect, and report what they would do.
func addSteps(ctx context.Context, p *plan.Plan, steps []plan.Step) (err error) {
	for _, s := range steps {
		if s.Finished, err = s.Done(ctx); err != nil {
			return err
		}
		if p.Rehearsal {
			effect := s.Effect
			s.Final = false
			s.Run = func(_ context.Context, to *plan.Reporter) error {
				to.Conclude("would: " + effect)
				return nil
			}
		}
		p.Steps = append(p.Steps, s)
	}
	if p.Rehearsal {
		p.End.Done = wasRehearsal
	}
	return nil
}

// newRunID returns "<verb>-<YYYYMMDDhhmmss>-<8 hex digits>"; IDs of one verb sort by
// time.
func newRunID(v plan.Verb, now time.Time) string {
	b := make([]byte, 4)
	rand.Read(b)
	name := strings.ReplaceAll(string(v), " ", "-")
	if v == plan.VerbApply {
		name = "upgrade"
	}
	return fmt.Sprintf("%s-%s-%x", name, now.UTC().Format("20060102150405"), b)
}

// Run executes a plan and emits everything that happens, the result included.
//
// emit is called from one place at a time, in the order of Seq, and holds the run up
// while it works. The run is recorded in RunsDir.
//
// When ctx ends the run stops soon, having finished what must not be cut in half: as
// an error with ExitStopped before the final step of the plan was done, else without
// an error, since the cluster continues on its own. A plan whose effects are all there gives
// an error with ExitNothing, a second run in the same workspace, or of another one in the
// same cluster where the plan needs it for itself, one with ExitHeld. A finding that is
// to be accepted by name and is not gives ExitUnacknowledged. A rehearsal leaves no trace.
func (e *Engine) Run(ctx context.Context, p *plan.Plan, emit func(plan.Event)) (err error) {
	p.By = cmp.Or(p.By, someone())
	r := &run{plan: p, out: emit, now: e.now, log: e.log, started: e.now(), dir: e.ws.Path(filepath.Join(plan.RunsDir, p.ID))}
	r.final = p.Verb == plan.VerbWatch // the cluster continues on its own from the beginning
	r.resume = cmp.Or(p.End.Command, e.command(string(p.Verb)))
	defer r.close()
	defer func() { err = r.finish(ctx, err, e) }()
	if p.End.Cleanup != nil {
		defer p.End.Cleanup()
	}

	if !p.Rehearsal && p.Verb != plan.VerbWatch {
		var unlock func()
		unlock, err = e.ws.Lock(p.ID, r.started)
		switch {
		case err == nil:
			defer unlock()
			err = r.record(p)
		case p.Verb == plan.VerbRevoke && plan.ExitCode(err) == plan.ExitHeld:
			// A captured machine does not wait for an upgrade to end. Each write of a revocation
			// is safe beside any other run.
			err = r.record(p)
		}
	}
	r.Send(plan.Event{Kind: plan.KindHello, Schema: plan.Schema, Tool: "constellation " + version.Release, Object: p.Cluster, Simulated: p.Simulated, NotAttested: p.NotAttested, Text: r.title(), By: p.By})
	if err != nil {
		return err
	}
	if err := r.SendPlan(); err != nil {
		return err
	}
	if b := p.Blocked(); len(b) > 0 {
		return blocked(b)
	}
	if f := p.Unacknowledged(); len(f) > 0 {
		return &plan.Error{Op: "check before start", Err: errors.New(f[0].Title + " (not accepted by name)"), Remedy: f[0].Remedy, Exit: plan.ExitUnacknowledged}
	}
	if p.Hold != nil && !p.Rehearsal && !p.Finished() {
		held, stop := context.WithCancelCause(ctx)
		defer stop(nil)
		release, err := p.Hold(held, plan.NewReporter(r, ""), stop)
		if err != nil {
			return err
		}
		defer release()
		ctx = held
		r.lost = func() error { return context.Cause(held) }
	}
	did := 0
	for i := range p.Steps {
		ran, err := r.step(ctx, &p.Steps[i])
		if err != nil {
			return err
		}
		if ran {
			did++
		}
	}
	if did == 0 {
		return &plan.Error{Err: errors.New(cmp.Or(p.End.Nothing, "cluster "+p.Cluster+" is complete: nothing to do")), Exit: plan.ExitNothing}
	}
	return nil
}

// someone is who runs this program: ops@laptop.
func someone() string {
	name := "somebody"
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	if host, err := os.Hostname(); err == nil && host != "" {
		name += "@" + host
	}
	return name
}

// SendPlan emits the plan.
func (r *run) SendPlan() error {
	p := r.plan
	data, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("marshal plan: %w", err)
	}
	r.Send(plan.Event{Kind: plan.KindPlan, From: p.From.String(), To: p.To.String(), Total: int64(len(p.Steps)), Data: data})
	return nil
}

// blocked makes one error of the findings that forbid a plan.
func blocked(findings []plan.Finding) error {
	f := findings[0]
	text := f.Title
	if f.Detail != "" {
		text += ": " + f.Detail
	}
	if n := len(findings) - 1; n > 0 {
		text += fmt.Sprintf(" (and %d more)", n)
	}
	return &plan.Error{Op: "check before start", Err: errors.New(text), Remedy: f.Remedy, Exit: plan.ExitBlocked}
}

// run is one execution of a plan.
type run struct {
	plan    *plan.Plan
	now     func() time.Time
	log     *slog.Logger
	started time.Time
	dir     string
	resume  string

	mu       sync.Mutex // held while an event is numbered, recorded and emitted
	out      func(plan.Event)
	seq      uint64
	file     *os.File // nil if the run is not recorded
	hidden   []string
	replacer *strings.Replacer
	waiting  string // what the last wait event said
	final    bool   // the final step is done
	current  string // ID of the step that runs
	nodes    int    // that are Ready
	// lost is why the cluster was lost to somebody else, or the run's context ended; nil if
	// it needs no cluster for itself.
	lost func() error
	// complete adds when a rollout will be over; nil before one is waited for.
	complete func(e *plan.Event)
}

// Forecast has complete called with every event from now on.
func (r *run) Forecast(complete func(e *plan.Event)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.complete = complete
}

func (r *run) title() string {
	if r.plan.Node != "" {
		return fmt.Sprintf("%s %s in cluster %s", r.plan.Verb, r.plan.Node, r.plan.Cluster)
	}
	if r.plan.Resumes() {
		return fmt.Sprintf("continue %s of cluster %s", r.plan.Verb, r.plan.Cluster)
	}
	return fmt.Sprintf("%s cluster %s", r.plan.Verb, r.plan.Cluster)
}

// record starts the directory of the run.
func (r *run) record(p *plan.Plan) error {
	fail := func(err error) error {
		return &plan.Error{Op: "record run in " + r.dir, Err: workspace.WithoutPath(err), Remedy: "free disk space and make the directory writable; nothing has been started"}
	}
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return fail(err)
	}
	b, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return fail(err)
	}
	if err := workspace.WriteIn(r.dir, workspace.PlanFile, append(b, '\n'), 0o600); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(r.dir, plan.EventsFile), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fail(err)
	}
	r.file = f
	return nil
}

func (r *run) close() {
	if r.file != nil {
		r.file.Close()
	}
}

// Send numbers an event, records it and emits it.
func (r *run) Send(e plan.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sendLocked(e)
}

func (r *run) sendLocked(e plan.Event) {
	if e.Kind == plan.KindWait {
		if e.Text == r.waiting { // the same reason again is no news
			return
		}
		r.waiting = e.Text
	}
	r.seq++
	e.Seq, e.Time, e.Run = r.seq, r.now().UTC(), r.plan.ID
	e.Text, e.Remedy = r.clean(e.Text), r.clean(e.Remedy)
	if r.replacer != nil && len(e.Data) > 0 {
		e.Data = json.RawMessage(r.replacer.Replace(string(e.Data)))
	}
	if r.complete != nil {
		r.complete(&e)
	}
	if r.file != nil {
		b, err := json.Marshal(e)
		if err == nil {
			_, err = r.file.Write(append(b, '\n'))
		}
		if err != nil {
			// The run matters more than its record. The user is informed once.
			r.file.Close()
			r.file = nil
			defer r.sendLocked(plan.Event{Kind: plan.KindLog, Level: "warn", Source: "engine", Text: fmt.Sprintf("the rest of this run is not recorded: %v", workspace.WithoutPath(err))})
		}
	}
	r.out(e)
}

// tokenRE matches a bootstrap token, which lets a machine into the cluster.
var tokenRE = regexp.MustCompile(`\b[a-z0-9]{6}\.[a-z0-9]{16}\b`)

// clean removes secrets from a text. Those who speak have the duty not to say them;
// this is the second line.
func (r *run) clean(s string) string {
	if s == "" {
		return s
	}
	if r.replacer != nil {
		s = r.replacer.Replace(s)
	}
	if strings.IndexByte(s, '.') >= 0 {
		s = tokenRE.ReplaceAllString(s, "(hidden)")
	}
	return s
}

// Hide keeps a secret out of all events from now on, in the forms it could take.
func (r *run) Hide(secrets ...[]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range secrets {
		if len(s) < 8 { // would hide ordinary words
			continue
		}
		quoted, _ := json.Marshal(s) // base64
		for _, form := range []string{string(s), hex.EncodeToString(s), strings.ToUpper(hex.EncodeToString(s)), strings.Trim(string(quoted), `"`)} {
			if !slices.Contains(r.hidden, form) {
				r.hidden = append(r.hidden, form)
			}
		}
	}
	pairs := make([]string, 0, 2*len(r.hidden))
	for _, h := range r.hidden {
		pairs = append(pairs, h, "(hidden)")
	}
	r.replacer = strings.NewReplacer(pairs...)
}

// step runs one step unless its effect is there already, and reports whether it ran.
func (r *run) step(ctx context.Context, s *plan.Step) (ran bool, err error) {
	defer func() {
		if err == nil && s.Final {
			r.final = true
		}
	}()
	r.current = s.ID
	start := r.now()
	if s.Done != nil {
		done, err := r.observe(ctx, s)
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		if err != nil {
			err = fmt.Errorf("look at what step %s has done: %w", s.ID, err)
			r.Send(plan.Event{Kind: plan.KindStep, Step: s.ID, State: plan.StateFailed, Text: err.Error(), Remedy: plan.Remedy(err), TookMS: r.since(start)})
			return false, err
		}
		if done {
			r.Send(plan.Event{Kind: plan.KindStep, Step: s.ID, State: plan.StateSkipped, Text: s.Title, TookMS: r.since(start)})
			return false, nil
		}
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	r.Send(plan.Event{Kind: plan.KindStep, Step: s.ID, State: plan.StateRunning, Text: s.Title})
	to := plan.NewReporter(r, s.ID)
	err = r.guard(s.ID, func() error { return s.Run(ctx, to) })
	r.Send(plan.Event{Kind: plan.KindWait, Step: s.ID}) // ends a wait, if there was one
	e := plan.Event{Kind: plan.KindStep, Step: s.ID, State: plan.StateDone, Text: cmp.Or(to.Concluded(), s.Title), TookMS: r.since(start)}
	if err != nil {
		e.State, e.Text, e.Remedy = plan.StateFailed, err.Error(), plan.Remedy(err)
		if left(ctx, err) {
			e.State, e.Text, e.Remedy = plan.StateStopped, "stopped on request", ""
			if r.final {
				e.State, e.Text = plan.StateDetached, "the cluster continues on its own"
			}
		}
	}
	r.Send(e)
	return true, err
}

func (r *run) observe(ctx context.Context, s *plan.Step) (done bool, err error) {
	err = r.guard(s.ID, func() error { done, err = s.Done(ctx); return err })
	return done, err
}

// guard turns a panic into an error, so that the run ends in order and is recorded.
func (r *run) guard(step string, f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			r.log.Error("step panicked", "step", step, "err", v, "stack", string(debug.Stack()))
			err = &plan.Error{Op: "run step " + step, Err: fmt.Errorf("bug in this program: %v", v), Remedy: "run the same command again; finished steps are skipped. Please report this with " + filepath.Join(r.dir, plan.EventsFile)}
		}
	}()
	return f()
}

// left reports whether err is nothing but the end of ctx.
func left(ctx context.Context, err error) bool {
	return ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded))
}

// SetNodes notes how many nodes are Ready, for the result.
func (r *run) SetNodes(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nodes = n
}

func (r *run) since(t time.Time) int64 { return r.now().Sub(t).Milliseconds() }

// finish emits the result and returns the error of Run. A cause of ctx's end that is an
// Error gives its exit code: that of a signal.
func (r *run) finish(ctx context.Context, err error, e *Engine) error {
	res := plan.Result{Status: plan.StateDone, TookMS: r.since(r.started), Nodes: r.nodes}
	for _, f := range r.plan.Files {
		if _, err := os.Lstat(f.Path); err == nil {
			res.Files = append(res.Files, f)
		}
	}
	// `adopt --undo` removes the kubeconfig afterwards.
	givenBack := r.plan.Verb == plan.VerbAdopt && !e.ws.Managed() || r.plan.Verb == plan.VerbInfraTerminate
	if e.ws.Has(workspace.KubeconfigFile) && r.plan.Verb != plan.VerbWatch && r.plan.Verb != plan.VerbBackup && !givenBack {
		res.Next = []string{"export KUBECONFIG=" + check.ShellQuote(e.ws.Path(workspace.KubeconfigFile)), "kubectl get nodes"}
	}
	if end := r.plan.End; err == nil || plan.ExitCode(err) == plan.ExitNothing {
		if len(end.Next) > 0 && len(res.Next) > 0 {
			res.Next = res.Next[:1] // access to the cluster
		}
		res.Next, res.Patch = append(res.Next, end.Next...), end.Patch
	}
	res.Etcd = r.plan.End.Etcd
	text := cmp.Or(r.plan.End.Done, "cluster "+r.plan.Cluster+" is up")
	switch {
	case err == nil:
	case plan.ExitCode(err) == plan.ExitNothing:
		res.Status, text = plan.StateNothing, err.Error()
	case errors.Is(err, context.Canceled) || left(ctx, err):
		text, err = r.stopped(ctx, &res)
	default:
		res.Status, res.Resume, text = plan.StateFailed, r.resume, err.Error()
		var end *deadEnd
		if c := plan.ExitCode(err); c == plan.ExitHeld || c == plan.ExitUsage || c == plan.ExitBlocked || errors.As(err, &end) {
			res.Resume = ""
		}
	}
	data, merr := json.Marshal(res)
	if merr != nil { // a struct of strings and numbers
		panic(merr)
	}
	exit := plan.ExitCode(err)
	r.Send(plan.Event{Kind: plan.KindResult, State: res.Status, Text: text, Remedy: plan.Remedy(err), TookMS: res.TookMS, Data: data, Exit: &exit})
	if r.file != nil {
		if serr := r.file.Sync(); serr != nil {
			r.log.Warn("run not flushed to disk", "dir", r.dir, "err", serr)
		}
	}
	return err
}

// stopped returns the text and the error of a run whose context has ended, and sets the status of res. In
// a step that only watches, the cluster continues without this program.
func (r *run) stopped(ctx context.Context, res *plan.Result) (text string, err error) {
	res.Status, res.Resume = plan.StateStopped, r.resume
	stop := &plan.Error{Err: fmt.Errorf("stopped before step %s was done", r.current), Exit: plan.ExitStopped, Remedy: "run `" + r.resume + "` to go on; finished steps are skipped"}
	if r.plan.Verb == plan.VerbBackup { // a backup that was not finished is removed
		stop.Remedy = "run `" + r.resume + "` to start again; this run has left nothing behind"
	}
	var why *plan.Error
	signalled := errors.As(context.Cause(ctx), &why) && why.Exit > 128
	if signalled {
		stop.Exit = why.Exit
	}
	if r.lost != nil && errors.As(r.lost(), &why) && why.Exit == plan.ExitHeld {
		stop.Err, stop.Exit, stop.Remedy = fmt.Errorf("stopped before step %s was done: %w", r.current, why), plan.ExitHeld, why.Remedy
		if r.final { // another console watches or continues now
			stop.Err, stop.Remedy = fmt.Errorf("%w; the cluster continues on its own", why), "`constellation status` shows how far it is"
		}
		return stop.Error(), stop
	}
	if !r.final {
		return stop.Error(), stop
	}
	switch {
	case signalled:
		res.Status, stop.Err = plan.StateDetached, fmt.Errorf("%w; the cluster continues on its own", why.Err)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		stop.Err = errors.New("the time was over before all nodes were ready; the cluster continues on its own")
	default:
		res.Status = plan.StateDetached
		return "you left; the cluster continues on its own", nil
	}
	stop.Remedy = "run `" + r.resume + "` to see the rest of it"
	return stop.Error(), stop
}

// Runs returns the runs that this workspace has a record of, the newest first. A
// record that cannot be read is left out.
func (e *Engine) Runs() ([]plan.RunSummary, error) {
	dir := e.ws.Path(plan.RunsDir)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, workspace.ErrAbsent) {
		return nil, nil
	}
	if err != nil {
		return nil, &plan.Error{Op: "list runs in " + dir, Err: workspace.WithoutPath(err)}
	}
	held := e.ws.HeldBy()
	var out []plan.RunSummary
	for _, entry := range entries {
		if !entry.IsDir() {
			continue
		}
		s, err := summarise(filepath.Join(dir, entry.Name()))
		if err != nil {
			e.log.Debug("run not readable", "dir", entry.Name(), "err", err)
			continue
		}
		if s.ID == held && s.Ended.IsZero() {
			s.Status = plan.StateRunning
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b plan.RunSummary) int { return b.Started.Compare(a.Started) })
	return out, nil
}

// summarise reads a run's plan and the end of its events.
func summarise(dir string) (plan.RunSummary, error) {
	b, err := os.ReadFile(filepath.Join(dir, workspace.PlanFile))
	if err != nil {
		return plan.RunSummary{}, err
	}
	var p plan.Plan
	if err := json.Unmarshal(b, &p); err != nil {
		return plan.RunSummary{}, err
	}
	s := plan.RunSummary{ID: p.ID, Verb: p.Verb, Cluster: p.Cluster, By: p.By, To: p.To, Node: p.Node, Started: p.Created, Status: "interrupted", Dir: dir, Exit: plan.ExitStopped}
	events, err := lastEvents(filepath.Join(dir, plan.EventsFile))
	if err != nil {
		return plan.RunSummary{}, err
	}
	for _, e := range events {
		s.Events = int(e.Seq)
		if e.Seq == 1 {
			s.Started = e.Time
		}
		if e.Step != "" {
			s.Step = e.Step
		}
		if e.Kind == plan.KindResult && e.Exit != nil {
			s.Status, s.Text, s.Exit, s.Ended = e.State, e.Text, *e.Exit, e.Time
		}
	}
	return s, nil
}

// lastEvents returns the first event of a record and those of its last 64 kB. A line
// that was cut off by a crash is left out.
func lastEvents(path string) ([]plan.Event, error) {
	const tail = 64 << 10
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	head := make([]byte, min(info.Size(), 4096))
	if _, err := f.ReadAt(head, 0); err != nil {
		return nil, err
	}
	from := max(0, info.Size()-tail)
	b := make([]byte, info.Size()-from)
	if _, err := f.ReadAt(b, from); err != nil && err != io.EOF {
		return nil, err
	}
	var lines [][]byte
	if from > 0 {
		first, _, _ := bytes.Cut(head, []byte("\n"))
		_, b, _ = bytes.Cut(b, []byte("\n"))
		lines = append(lines, first)
	}
	lines = append(lines, bytes.Split(b, []byte("\n"))...)
	var out []plan.Event
	for _, l := range lines {
		var e plan.Event
		if json.Unmarshal(l, &e) == nil && e.Seq > 0 {
			out = append(out, e)
		}
	}
	return out, nil
}

// command returns the command line for a verb in this workspace.
func (e *Engine) command(verb string) string {
	cmd := "constellation " + verb
	if wd, err := os.Getwd(); err != nil || wd != e.ws.Dir() {
		cmd += " -C " + check.ShellQuote(e.ws.Dir())
	}
	return cmd
}
