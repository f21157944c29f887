package machinecheck

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"constellation/engine/plan"
	"constellation/engine/sshhost"
)

// fixable are the findings whose commands change settings of the kernel and nothing else. Each can be repeated.
var fixable = []string{"machine-kernel-modules", "machine-sysctls", "machine-swap"}

// Fixes returns the commands that mend findings of a machine, in the order of the findings: those about
// kernel modules, parameters and swap.
func Fixes(r *Result) (out []string) {
	for _, f := range r.Findings {
		if f.Command != "" && slices.Contains(fixable, f.ID) && !slices.Contains(out, f.Command) {
			out = append(out, f.Command)
		}
	}
	return out
}

// Fixed is what became of the commands of one machine. It marshals as a part of the document of
// `machine check --fix -o json`.
type Fixed struct {
	Machine string `json:"machine"`
	// Done are the commands that succeeded.
	Done []string `json:"done"`
	// Failed is the command that did not; those after it were not run. Error is why, Remedy what to do about it.
	Failed string `json:"failed,omitempty"`
	Error  string `json:"error,omitempty"`
	Remedy string `json:"remedy,omitempty"`

	// Err is the error with its causes.
	Err error `json:"-"`
}

// Fix runs the commands of [Fixes] as root on each machine of a check, side by side, and returns what became of
// them, in the order of the results. Machines without such commands are left out. done is called after each
// machine, never concurrently.
func Fix(ctx context.Context, r Request, results []Result, done func(Fixed)) []Fixed {
	type job struct {
		target   sshhost.Target
		commands []string
	}
	var jobs []job
	for i := range results {
		if list := Fixes(&results[i]); len(list) > 0 {
			jobs = append(jobs, job{r.Targets[i], list})
		}
	}
	out := make([]Fixed, len(jobs))
	places := make(chan struct{}, parallel)
	var mu sync.Mutex
	var all sync.WaitGroup
	for i, j := range jobs {
		all.Go(func() {
			places <- struct{}{}
			defer func() { <-places }()
			out[i] = fixOne(ctx, r.SSH, j.target, j.commands)
			mu.Lock()
			defer mu.Unlock()
			done(out[i])
		})
	}
	all.Wait()
	return out
}

func fixOne(ctx context.Context, o sshhost.Options, t sshhost.Target, commands []string) (out Fixed) {
	out = Fixed{Machine: t.String(), Done: []string{}}
	fail := func(command string, err error) Fixed {
		if ctx.Err() != nil && errors.Is(err, context.Canceled) {
			err = &plan.Error{Op: "mend " + t.String(), Err: errors.New("it was stopped"), Remedy: "run the same command again", Exit: plan.ExitStopped}
		}
		out.Failed, out.Err, out.Error, out.Remedy = command, err, err.Error(), plan.Remedy(err)
		return out
	}
	if ctx.Err() != nil {
		return fail(commands[0], context.Cause(ctx))
	}
	o.Target = t
	h, err := sshhost.Dial(ctx, o)
	if err != nil {
		return fail(commands[0], err)
	}
	defer h.Close()
	limit := limitOf(o)
	for _, c := range commands {
		one, cancel := context.WithTimeoutCause(ctx, limit, &plan.Error{
			Op: fmt.Sprintf("run `%s` on %s", c, t), Err: fmt.Errorf("it did not end within %s", limit), Remedy: "check the load of the machine, then run the same command again; raise --timeout for a slow machine",
		})
		r, err := h.Run(one, sshhost.Command{Argv: []string{"sh", "-c", c}, Root: true})
		cancel()
		if err == nil {
			if err = r.Err(); err != nil {
				err = &plan.Error{Op: fmt.Sprintf("run `%s` on %s", c, t), Err: err, Remedy: "mend it by hand, then check the machine again"}
			}
		}
		if err != nil {
			return fail(c, err)
		}
		out.Done = append(out.Done, c)
	}
	return out
}
