package enrol

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"constellation/engine/plan"
	"constellation/engine/words"
)

// undo is a step of a removal.
type undo struct {
	title, step string
	within      time.Duration
	stdin       string
	args        []string
	did         []string // sentences for the outcome
}

// Remove takes back what Install did, and what programs of the machine left.
func Remove(ctx context.Context, m Machine, r Request) (Outcome, error) {
	p := &progress{report: r.Report}
	c, j, release, err := r.open(ctx, m, "remove", p)
	if err != nil {
		return Outcome{}, err
	}
	defer release()
	if j == nil {
		if _, err := c.run(ctx, limit, "forget", nil); err != nil {
			return Outcome{}, err
		}
		return Outcome{}, &plan.Error{Op: c.op, Err: ErrNotEnrolled, Remedy: "check the address; a machine that was reinstalled has nothing to give back", Exit: plan.ExitNothing}
	}
	j.State, j.Changed = Removing, r.Now().UTC()
	if err := c.write(ctx, j); err != nil {
		return Outcome{}, err
	}
	// The reset needs containerd, so a unit of a package stops after it.
	early, late := j.halt(true), j.halt(false)
	steps := j.undo()
	p.total = 5 + len(steps)
	p.next("stop units")
	if _, err := c.run(ctx, limit, "halt", nil, early...); err != nil {
		return Outcome{}, err
	}
	if r.Reset != nil {
		p.next("reset the node")
		if err := r.Reset(ctx, m); err != nil {
			return Outcome{}, err
		}
	}
	p.next("disable units")
	if _, err := c.run(ctx, limit, "halt", nil, late...); err != nil {
		return Outcome{}, err
	}
	var out Outcome
	if units := slices.Concat(early, late); len(units) > 0 {
		out.Changes = append(out.Changes, "stopped and disabled "+words.And(units))
	}
	for _, u := range steps {
		p.next(u.title)
		if _, err := c.run(ctx, u.within, u.step, []byte(u.stdin), u.args...); err != nil {
			return out, err
		}
		out.Changes = append(out.Changes, u.did...)
	}
	out.Notes = []string{
		"kernel modules, kernel parameters and swap stay as `machine check --fix` set them",
		"restart the machine: network interfaces and packet filters of pods last until then",
	}
	return out, nil
}

// halt are the units that did not exist before: those of files of the enrolment, or those of packages.
func (j *Journal) halt(ours bool) (out []string) {
	for _, u := range slices.Backward(j.Units) {
		own := slices.ContainsFunc(j.Files, func(f fileRecord) bool { return strings.HasSuffix(f.Path, "/"+u.Name) })
		if !u.Existed && own == ours {
			out = append(out, u.Name)
		}
	}
	return out
}

// undo returns the steps that take everything back, in order. Each can be repeated.
func (j *Journal) undo() (out []undo) {
	var files, settle strings.Builder
	give := undo{title: "give files back", step: "restore", within: limit}
	deleted := 0
	for _, f := range slices.Backward(j.Files) {
		if f.Copy == "" {
			fmt.Fprintf(&files, "delete %s\n", f.Path)
			deleted++
			continue
		}
		fmt.Fprintf(&files, "restore %s %s\n", f.Copy, f.Path)
		give.did = append(give.did, "restored "+f.Path)
	}
	if deleted > 0 {
		give.did = append(give.did, "deleted "+words.Count(deleted, "file"))
	}
	give.stdin = files.String()
	out = append(out, give)
	if len(j.Packages) > 0 {
		out = append(out, undo{title: "remove packages", step: "purge", within: packageLimit, args: j.Packages, did: []string{"removed the packages " + words.And(j.Packages)}})
	}
	if len(j.Trees) > 0 {
		out = append(out, undo{title: "delete folders", step: "trees", within: limit, args: j.Trees, did: []string{"deleted what programs left in " + words.And(j.Trees)}})
	}
	for _, dir := range slices.Backward(j.Folders) {
		fmt.Fprintf(&settle, "folder %s\n", dir)
	}
	for _, u := range j.Units {
		if u.Existed {
			fmt.Fprintf(&settle, "unit %s %s %s\n", u.Name, either(u.Enabled, "enabled", "disabled"), either(u.Active, "active", "inactive"))
		}
	}
	return append(out, undo{title: "restore units", step: "settle", within: limit, stdin: settle.String()}, undo{title: "delete the journal", step: "forget", within: limit})
}
