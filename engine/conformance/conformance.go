// Package conformance is the suite that proves a cloud with real machines. It makes the smallest cluster there, verifies and
// upgrades it, replaces a worker, and deletes everything again. It keeps to a budget, and its report can be published.
//
// The suite executes the verbs of this program one after the other, as a user does, so it proves what users run. It decides
// nothing about a cluster. Its record is in the workspace, so an interrupted suite resumes at the step that was interrupted.
//
// # Money
//
// Prices come from the user; this package has none. Machines cost from the beginning of the step that makes them until the
// step that deletes them has passed, also while no suite runs. The suite stops so early that the deletion stays within the
// budget, and then deletes everything, as after a failure. Nothing guards the budget while the suite itself does not run.
package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"constellation/engine/plan"
)

// Files of the suite in the workspace. LogDir has the output of each step.
const (
	RecordFile = "constellation-conformance.json"
	PageFile   = "constellation-conformance.md"
	LogDir     = "constellation-conformance"
)

const (
	// DefaultLimit is how long the suite takes at most.
	DefaultLimit = 3 * time.Hour
	// least is the time that the budget must allow for.
	least = time.Hour
	// reserve is the part of that time that is kept for the deletion of everything.
	reserve = 20 * time.Minute
)

// Runner executes a verb of this program in the workspace. It writes the output to out, and returns the exit code. When ctx
// ends, it stops the verb as Ctrl-C does, and returns when it has ended.
type Runner func(ctx context.Context, out io.Writer, args ...string) (exit int, err error)

// Cost are prices that the user has found, in one currency.
type Cost struct {
	Budget float64 `json:"budget"`
	// Machine is the price of one machine for an hour, with its disk and its address. Other is that of everything else.
	Machine float64 `json:"machine_hour"`
	Other   float64 `json:"other_hour"`
	// Source says where the prices come from, and from when they are.
	Source string `json:"source,omitempty"`
}

// Spec is what a suite needs. Dir, Provider, Cluster and Machines are required.
type Spec struct {
	Dir      string // of the workspace
	Provider string
	Cluster  string
	// Emulated is whether the machines are those of an emulator. They cost nothing, and exist already.
	Emulated bool
	// Machines is the number of machines of the configuration.
	Machines int
	// Hide are texts, such as the ID of a project, that the report must not contain.
	Hide []string
	// Cost and Limit bound the suite. Pay is whether the user has agreed to the cost.
	Cost  Cost
	Limit time.Duration
	Pay   bool
	// Terminate deletes everything, and runs no other step.
	Terminate bool
	Run       Runner       // nil: this program
	Tell      func(string) // progress; nil: none
	Now       func() time.Time
}

// Verdicts of a step.
const (
	Passed  = "passed"
	Failed  = "failed"
	Skipped = "skipped"
	Stopped = "stopped" // by the budget
	Running = "running" // or interrupted
	NotRun  = "not-run"
)

// Step is a step of the report.
type Step struct {
	ID      string `json:"id"`
	Title   string `json:"title"`
	Command string `json:"command,omitempty"`
	Verdict string `json:"verdict"`
	// Why is the reason of a verdict other than passed, or what a step has proven.
	Why     string    `json:"why,omitempty"`
	Started time.Time `json:"started,omitzero"`
	TookMS  int64     `json:"took_ms"`
	Exit    int       `json:"exit"`
	// On is the node that the step works on; empty: none.
	On string `json:"on,omitempty"`
	// Calls are the calls of the emulated API; absent at a real cloud, where they are not counted.
	Calls *int `json:"calls,omitempty"`
	// Attempts counts the starts of the step: more than one after an interruption.
	Attempts int `json:"attempts,omitempty"`
}

// Versions are what nodes run.
type Versions struct {
	Kubernetes []string `json:"kubernetes"`
	Images     []string `json:"images"`
	Nodes      int      `json:"nodes"`
}

// Report is the result of a suite.
type Report struct {
	Schema   string `json:"schema"`
	Tool     string `json:"tool"` // version of this program
	Provider string `json:"provider"`
	// Emulated is whether no cloud took part.
	Emulated bool      `json:"emulated"`
	Machines int       `json:"machines"`
	Started  time.Time `json:"started"`
	Ended    time.Time `json:"ended,omitzero"`
	// Charged is since when machines cost.
	Charged time.Time `json:"charged,omitzero"`
	Limit   string    `json:"limit"`
	Cost    *Cost     `json:"cost,omitempty"`
	// Spent is an upper estimate of the cost so far.
	Spent  float64   `json:"spent,omitempty"`
	Before *Versions `json:"before,omitempty"`
	After  *Versions `json:"after,omitempty"`
	Steps  []Step    `json:"steps"`
	Passed bool      `json:"passed"`
}

// Estimate is what a suite would make and cost.
type Estimate struct {
	// Machines is the largest number of machines at a time. Each one may have a replacement.
	Machines int
	// Allowed is how long the suite may take, with the deletion, and Most what it costs then.
	Allowed time.Duration
	Most    float64
}

// Estimate returns what the suite would make and cost at most. The error has a remedy.
func (s Spec) Estimate() (Estimate, error) {
	e := Estimate{Machines: 2 * s.Machines, Allowed: s.limit()}
	if s.Emulated {
		return e, nil
	}
	c := s.Cost
	if c.Machine <= 0 || c.Other < 0 {
		return e, &plan.Error{
			Op: "estimate the cost", Err: errors.New("prices are not known"), Exit: plan.ExitUsage,
			Remedy: "look up the prices of the machine type, its disk, an address and a load balancer, and pass --price-per-hour for one machine and --other-per-hour for the rest",
		}
	}
	if c.Budget <= 0 {
		return e, &plan.Error{Op: "estimate the cost", Err: errors.New("there is no budget"), Exit: plan.ExitUsage, Remedy: "pass --budget, in the currency of the prices"}
	}
	rate := float64(e.Machines)*c.Machine + c.Other
	e.Allowed = min(e.Allowed, time.Duration(c.Budget/rate*float64(time.Hour)))
	e.Most = e.Allowed.Hours() * rate
	if e.Allowed < least {
		return e, &plan.Error{
			Op: "keep to the budget", Err: fmt.Errorf("%.2f pay for %s, and the suite needs up to %s", c.Budget, e.Allowed.Round(time.Minute), least), Exit: plan.ExitBlocked,
			Remedy: fmt.Sprintf("pass a --budget of %.2f or more, or a smaller machine type and its price", least.Hours()*rate),
		}
	}
	return e, nil
}

func (s Spec) limit() time.Duration {
	if s.Limit > 0 {
		return s.Limit
	}
	return DefaultLimit
}

// suite is a suite in progress.
type suite struct {
	Spec
	tool   string
	report *Report
}

// Run runs the suite, or continues one that was interrupted, and returns its report. The error is about what kept the suite
// from running or from ending, and has a remedy. Whether the cloud conforms is in the report.
func Run(ctx context.Context, tool string, s Spec) (*Report, error) {
	if s.Now == nil {
		s.Now = time.Now
	}
	if s.Tell == nil {
		s.Tell = func(string) {}
	}
	if s.Run == nil {
		s.Run = thisProgram(s.Dir)
	}
	x := &suite{Spec: s, tool: tool}
	if err := x.open(); err != nil {
		return nil, err
	}
	if !s.Terminate {
		if err := x.agreed(); err != nil {
			return nil, err
		}
		if err := x.check(ctx); err != nil {
			return x.report, err
		}
	}
	if err := x.end(ctx); err != nil {
		return x.report, err
	}
	return x.report, nil
}

// agreed returns why no money may be spent; nil: it may.
func (x *suite) agreed() error {
	if x.Emulated {
		return nil
	}
	e, err := x.Estimate()
	if err != nil || x.Pay {
		return err
	}
	return &plan.Error{
		Op: "run the suite at provider " + x.Provider, Exit: plan.ExitUnacknowledged,
		Err: fmt.Errorf("it costs money: a network, a load balancer and %d machines, %d while they are replaced, for %s at most. By your prices that is %.2f at most, and the budget is %.2f. Nothing was made",
			x.Machines, e.Machines, e.Allowed.Round(time.Minute), e.Most, x.Cost.Budget),
		Remedy: "add --i-pay to make them. The suite deletes everything at its end; after an interruption, --terminate does",
	}
}

// open reads the record of a suite that was interrupted, or begins a new one.
func (x *suite) open() error {
	const op = "open the record of the suite"
	b, err := os.ReadFile(x.path(RecordFile))
	switch {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return &plan.Error{Op: op, Err: err}
	default:
		var r Report
		if err := json.Unmarshal(b, &r); err != nil || r.Schema != plan.Schema || len(r.Steps) == 0 {
			return &plan.Error{Op: op, Err: fmt.Errorf("%s is no record of a suite", RecordFile), Exit: plan.ExitUsage, Remedy: "move it away; if machines exist, delete them first with `constellation infra terminate`"}
		}
		if r.Ended.IsZero() {
			if r.Provider != x.Provider || r.Emulated != x.Emulated {
				return &plan.Error{Op: op, Err: fmt.Errorf("%s is a suite of provider %s", RecordFile, r.Provider), Exit: plan.ExitUsage, Remedy: "continue it, or use another folder with -C"}
			}
			x.Tell("continues the suite of " + r.Started.Format(time.RFC3339))
			x.report = &r
			if x.Cost == (Cost{}) && r.Cost != nil { // as before
				x.Cost = *r.Cost
				x.Limit, _ = time.ParseDuration(r.Limit) // zero: the default
			} else if r.Cost != nil {
				cost := x.Cost
				r.Cost, r.Limit = &cost, x.limit().String()
			}
			x.Machines = r.Machines // they were made for it
			return nil
		}
	}
	now := x.Now().UTC()
	x.report = &Report{Schema: plan.Schema, Tool: x.tool, Provider: x.Provider, Emulated: x.Emulated, Machines: x.Machines, Started: now, Limit: x.limit().String()}
	if !x.Emulated {
		cost := x.Cost
		x.report.Cost = &cost
	}
	for _, s := range steps() {
		x.report.Steps = append(x.report.Steps, Step{ID: s.id, Title: s.title, Verdict: NotRun})
	}
	return nil
}

func (x *suite) path(name string) string { return filepath.Join(x.Dir, name) }

// save writes the record and the page.
func (x *suite) save() error {
	if c := x.report.Cost; c != nil && !x.report.Charged.IsZero() {
		until := x.report.Ended
		if until.IsZero() {
			until = x.Now()
		}
		x.report.Spent = until.Sub(x.report.Charged).Hours() * (float64(2*x.report.Machines)*c.Machine + c.Other)
	}
	b, err := json.MarshalIndent(x.report, "", "  ")
	if err == nil {
		err = write(x.path(RecordFile), append(b, '\n'))
	}
	if err == nil {
		err = write(x.path(PageFile), []byte(x.report.Markdown()))
	}
	if err != nil {
		return &plan.Error{Op: "write the report of the suite", Err: err, Remedy: "free disk space, and run the same command again"}
	}
	return nil
}

// write replaces a file.
func write(path string, b []byte) error {
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// deadline is when steps must have stopped, so that the deletion stays within the budget; zero: machines cost nothing yet.
func (x *suite) deadline() time.Time {
	if x.report.Charged.IsZero() {
		return time.Time{}
	}
	e, _ := x.Estimate() // it was checked before machines were made
	return x.report.Charged.Add(e.Allowed - reserve)
}

// errBudget is why a step was stopped.
var errBudget = errors.New("the budget, or the limit of time, allows no more")

// check runs the steps up to the deletion, until one fails.
func (x *suite) check(ctx context.Context) error {
	for _, s := range steps() {
		done := x.step(s.id)
		if s.deletes || done.Verdict == Passed || done.Verdict == Skipped {
			continue
		}
		if done.Verdict == Failed || done.Verdict == Stopped {
			return nil // of an earlier run, which was interrupted in its deletion
		}
		if s.charges && x.report.Charged.IsZero() && !x.Emulated {
			x.report.Charged = x.Now().UTC()
		}
		limited, cancel := ctx, context.CancelFunc(func() {})
		if at := x.deadline(); !at.IsZero() {
			limited, cancel = context.WithDeadlineCause(ctx, at, errBudget)
		}
		err := x.do(limited, s)
		cancel()
		if err != nil {
			return err
		}
		if v := x.step(s.id).Verdict; v == Failed || v == Stopped {
			return nil
		}
	}
	return nil
}

// end deletes everything, and completes the report.
func (x *suite) end(ctx context.Context) error {
	for _, s := range steps() {
		if !s.deletes || x.step(s.id).Verdict == Passed {
			continue
		}
		if err := x.do(ctx, s); err != nil {
			return err
		}
		if st := x.step(s.id); st.Verdict != Passed {
			return &plan.Error{
				Op: "delete everything", Err: errors.New(st.Why), Exit: plan.ExitFailed,
				Remedy: "machines may still cost money: run `constellation conformance --provider " + x.Provider + " --terminate` until it succeeds",
			}
		}
	}
	x.report.Ended = x.Now().UTC()
	x.report.Passed = !slices.ContainsFunc(x.report.Steps, func(s Step) bool { return s.Verdict != Passed && s.Verdict != Skipped })
	return x.save()
}

// step returns the step of an ID.
func (x *suite) step(id string) *Step {
	n := slices.IndexFunc(x.report.Steps, func(s Step) bool { return s.ID == id })
	if n < 0 { // a record of another version of the suite
		x.report.Steps = append(x.report.Steps, Step{ID: id, Title: id, Verdict: NotRun})
		n = len(x.report.Steps) - 1
	}
	return &x.report.Steps[n]
}

// do runs one step. The error means that the suite cannot go on, and was interrupted.
func (x *suite) do(ctx context.Context, s step) error {
	st := x.step(s.id)
	st.Title, st.Verdict, st.Started, st.Why, st.Exit = s.title, Running, x.Now().UTC(), "", 0
	st.Attempts++
	if err := x.save(); err != nil {
		return err
	}
	x.Tell(s.title)
	before := x.calls(ctx)
	verdict, why, err := s.run(ctx, x, st)
	switch {
	case ctx.Err() != nil && errors.Is(context.Cause(ctx), errBudget):
		verdict, why = Stopped, errBudget.Error()
	case ctx.Err() != nil:
		_ = x.save() // the interruption counts more
		remedy := "run the same command again to continue, or add --terminate to delete everything"
		if !x.Emulated && !x.report.Charged.IsZero() {
			remedy = "machines cost money meanwhile: " + remedy
		}
		return &plan.Error{Op: strings.ToLower(s.title), Err: context.Cause(ctx), Exit: plan.ExitStopped, Remedy: remedy}
	case err != nil:
		verdict, why = Failed, err.Error()
	}
	st.Verdict, st.Why, st.TookMS = verdict, x.hide(why), x.Now().Sub(st.Started).Milliseconds()
	if after := x.calls(context.WithoutCancel(ctx)); before != nil && after != nil {
		n := *after - *before
		st.Calls = &n
	}
	text := "  " + verdict + " after " + (time.Duration(st.TookMS) * time.Millisecond).Round(time.Second).String()
	if st.Why != "" {
		text += ": " + st.Why
	}
	x.Tell(text)
	return x.save()
}

// hide removes what a report must not contain.
func (x *suite) hide(text string) string {
	for _, secret := range x.Hide {
		if secret != "" {
			text = strings.ReplaceAll(text, secret, "PROJECT")
		}
	}
	return text
}

// verb executes a verb, with its output in a file of the step. It returns the output, too.
func (x *suite) verb(ctx context.Context, st *Step, args ...string) (exit int, output []byte, err error) {
	st.Command = x.hide("constellation " + strings.Join(args, " "))
	if err := os.MkdirAll(x.path(LogDir), 0o700); err != nil {
		return 0, nil, err
	}
	f, err := os.OpenFile(filepath.Join(x.path(LogDir), st.ID+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return 0, nil, err
	}
	defer f.Close()
	var b bytes.Buffer
	exit, err = x.Run(ctx, io.MultiWriter(f, &b), args...)
	st.Exit = exit
	return exit, b.Bytes(), err
}
