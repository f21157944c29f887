package machinecheck

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
)

// parallel is how many machines are checked at a time.
const parallel = 16

// Request is a check of several machines.
type Request struct {
	Targets []sshhost.Target
	// SSH are the options for all of them; its Target is not used.
	SSH   sshhost.Options
	Needs Needs
}

// Report is the document of `machine check -o json`.
type Report struct {
	Schema string     `json:"schema"`
	Time   time.Time  `json:"time"`
	CLI    string     `json:"cli"`
	Role   cloud.Role `json:"role"`
	// Fixed is what `--fix` did before this check.
	Fixed    []Fixed  `json:"fixed,omitempty"`
	Machines []Result `json:"machines"`
}

// ParseRole reads the role of a machine.
func ParseRole(s string) (cloud.Role, error) {
	r := cloud.Role(s)
	if !r.Valid() {
		return "", &plan.Error{Op: fmt.Sprintf("read role %q", s), Err: errors.New("want control-plane or worker"), Remedy: "name one of them", Exit: plan.ExitUsage}
	}
	return r, nil
}

// Result is the check of one machine. It marshals as a part of the document of `machine check -o json`.
type Result struct {
	// Machine is USER@HOST, with the port if it is not 22.
	Machine string `json:"machine"`
	// HostKey is the fingerprint of the host key.
	HostKey string `json:"hostKey,omitempty"`
	// Ready is whether nothing stands in the way.
	Ready bool `json:"ready"`
	// Error is why the machine could not be checked, Remedy what to do about it. Facts and findings are
	// absent then.
	Error    string         `json:"error,omitempty"`
	Remedy   string         `json:"remedy,omitempty"`
	Facts    *Facts         `json:"facts,omitempty"`
	Findings []plan.Finding `json:"findings,omitempty"`
	Took     time.Duration  `json:"took"` // nanoseconds in JSON

	// Err is the error with its causes.
	Err error `json:"-"`
}

// Blocked returns the findings that stand in the way.
func (r *Result) Blocked() (out []plan.Finding) {
	for _, f := range r.Findings {
		if f.Severity == plan.Block {
			out = append(out, f)
		}
	}
	return out
}

// Check checks machines side by side, and returns their results in the order of the targets. done is
// called after each one, never concurrently; its result lacks findings about several machines.
func Check(ctx context.Context, r Request, done func(Result)) []Result {
	out := make([]Result, len(r.Targets))
	places := make(chan struct{}, parallel)
	var mu sync.Mutex
	var all sync.WaitGroup
	for i, t := range r.Targets {
		all.Go(func() {
			places <- struct{}{}
			defer func() { <-places }()
			out[i] = checkOne(ctx, r, t)
			mu.Lock()
			defer mu.Unlock()
			done(out[i])
		})
	}
	all.Wait()
	var names []string
	var facts []Facts
	var index []int
	for i := range out {
		if out[i].Facts != nil {
			names, facts, index = append(names, out[i].Machine), append(facts, *out[i].Facts), append(index, i)
		}
	}
	if b := r.Needs.Balancer; b != nil && slices.ContainsFunc(facts, b.heldBy) {
		for i := range out { // it is that of one of these machines
			out[i].Findings = slices.DeleteFunc(out[i].Findings, func(f plan.Finding) bool { return f.ID == findingHeld })
			out[i].Ready = out[i].Facts != nil && len(out[i].Blocked()) == 0
		}
	}
	for k, found := range Together(names, facts) {
		x := &out[index[k]]
		x.Findings = slices.Concat(found, x.Findings)
		sortWorst(x.Findings)
		x.Ready = len(x.Blocked()) == 0
	}
	return out
}

func checkOne(ctx context.Context, r Request, t sshhost.Target) Result {
	return check(ctx, t, r.Needs, func() (f Facts, hostKey string, err error) {
		o := r.SSH
		o.Target = t
		h, err := sshhost.Dial(ctx, o)
		if err != nil {
			return Facts{}, "", err
		}
		defer h.Close()
		f, err = Observe(ctx, h, r.Needs.address(), limitOf(r.SSH))
		return f, h.Fingerprint(), err
	})
}

// CheckConnected checks one machine that is connected already.
func CheckConnected(ctx context.Context, m Machine, n Needs) Result {
	return check(ctx, m.Target(), n, func() (f Facts, hostKey string, err error) {
		f, err = Observe(ctx, m, n.address(), Limit)
		return f, "", err
	})
}

func check(ctx context.Context, t sshhost.Target, n Needs, observe func() (Facts, string, error)) (out Result) {
	began := time.Now()
	out.Machine = t.String()
	defer func() { out.Took = time.Since(began).Round(time.Millisecond) }()
	var f Facts
	err := context.Cause(ctx)
	if err == nil {
		f, out.HostKey, err = observe()
	}
	if err != nil {
		out.Err, out.Error, out.Remedy = err, err.Error(), plan.Remedy(err)
		if ctx.Err() != nil && errors.Is(err, context.Canceled) {
			out.Error = "the check was stopped"
		}
		return out
	}
	out.Facts, out.Findings = &f, Judge(f, n)
	out.Ready = len(out.Blocked()) == 0
	return out
}
