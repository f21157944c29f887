package enrol

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"constellation/engine/plan"
	"constellation/engine/words"
)

// todo is what an enrolment still has to do.
type todo struct {
	wants   []entry
	o       *observation
	missing []string // packages
	// unfinished are packages of an enrolment that did not end.
	unfinished []string
	notes      []string
	// restart is whether files changed since units were started.
	restart bool
	// start are units that are not enabled or do not run.
	start []string
}

// changes describes it.
func (t *todo) changes(s *Spec) (out []string) {
	if len(t.missing) > 0 {
		out = append(out, "install "+words.And(t.missing)+" of the distribution, held back from upgrades")
	}
	for _, i := range t.o.change {
		f := s.Files[i]
		verb := "write"
		if t.o.files[i].Kind != kindAbsent {
			verb = "replace"
		}
		out = append(out, verb+" "+f.Path)
	}
	switch {
	case t.restart || len(t.o.change) > 0:
		out = append(out, "restart "+words.And(s.started()))
	case len(t.start) > 0:
		out = append(out, "start "+words.And(t.start))
	}
	return out
}

// started are the units to start.
func (s *Spec) started() (out []string) {
	for _, u := range s.Units {
		if u.Start {
			out = append(out, u.Name)
		}
	}
	return out
}

// compare returns what is to do.
func (s *Spec) compare(wants []entry, o *observation, j *Journal) (*todo, error) {
	t := &todo{wants: wants, o: o, restart: j != nil && j.State == Installing}
	o.change = nil
	for i, f := range s.Files {
		is := o.files[i]
		ours := j != nil && j.file(f.Path) != nil
		switch {
		case is == wants[i]:
		case f.Keep && is.Kind != kindAbsent && !ours:
		case f.Default != "" && is.Kind != kindAbsent && !ours && !o.defaults[i]:
			t.notes = append(t.notes, f.Path+" was changed by hand and stays: compare it with what a node needs")
		case is.Kind == kindFolder || is.Kind == kindOther:
			return nil, &plan.Error{Op: "enrol " + s.Machine, Err: errors.New(f.Path + " exists and is no file"), Remedy: "move it away, then run the same command again", Exit: plan.ExitBlocked}
		default:
			o.change = append(o.change, i)
		}
	}
	for i, p := range s.Packages {
		switch {
		case !o.programs[i]:
			t.missing = append(t.missing, p.Name)
		case t.restart && slices.Contains(j.Packages, p.Name):
			t.unfinished = append(t.unfinished, p.Name)
		}
	}
	for i, u := range s.Units {
		if u.Start && (!o.units[i].Enabled || !o.units[i].Active) {
			t.start = append(t.start, u.Name)
		}
	}
	return t, nil
}

// Examine returns what Install would do, and changes nothing.
func Examine(ctx context.Context, m Machine, r Request) (Outcome, error) {
	s := &r.Spec
	if err := s.validate(); err != nil {
		return Outcome{}, err
	}
	wants, err := s.wants()
	if err != nil {
		return Outcome{}, err
	}
	c := r.remote(m, "examine")
	if err := c.begin(ctx); err != nil {
		return Outcome{}, err
	}
	j, err := c.read(ctx)
	if err == nil {
		err = c.belongs(j, s)
	}
	if err != nil {
		return Outcome{}, err
	}
	t, err := c.observe(ctx, s, wants, j)
	if err != nil {
		return Outcome{}, err
	}
	return Outcome{Changes: t.changes(s), Notes: t.notes}, nil
}

// open takes the lock and reads the journal, which is nil if there is none. It returns an error for a
// machine of another cluster.
func (r *Request) open(ctx context.Context, m Machine, verb string, p *progress) (*remote, *Journal, func(), error) {
	c := r.remote(m, verb)
	p.next("take the lock")
	release, err := c.hold(ctx, r.Who, r.Now())
	if err != nil {
		return nil, nil, nil, err
	}
	p.next("read the state of the machine")
	j, err := c.read(ctx)
	if err == nil {
		err = c.belongs(j, &r.Spec)
	}
	if err != nil {
		release()
		return nil, nil, nil, err
	}
	return c, j, release, nil
}

// observe returns what is to do.
func (c *remote) observe(ctx context.Context, s *Spec, wants []entry, j *Journal) (*todo, error) {
	o, err := c.look(ctx, s)
	if err != nil {
		return nil, err
	}
	return s.compare(wants, o, j)
}

// Install brings the machine into the state of the Spec.
func Install(ctx context.Context, m Machine, r Request) (Outcome, error) {
	s := &r.Spec
	if err := s.validate(); err != nil {
		return Outcome{}, err
	}
	wants, err := s.wants()
	if err != nil {
		return Outcome{}, err
	}
	p := &progress{report: r.Report}
	c, j, release, err := r.open(ctx, m, "enrol", p)
	if err != nil {
		return Outcome{}, err
	}
	defer release()
	if j != nil && j.State == Removing {
		return Outcome{}, &plan.Error{Op: c.op, Err: errors.New("its removal began and did not end"), Remedy: fmt.Sprintf("end it first: `constellation machine remove %s --ssh %s`", j.Machine, m.Target()), Exit: plan.ExitBlocked}
	}
	t, err := c.observe(ctx, s, wants, j)
	if err != nil {
		return Outcome{}, err
	}
	out := Outcome{Changes: t.changes(s), Notes: t.notes}
	p.total = 5 + s.sends(t.o.change)
	if len(out.Changes) == 0 && j != nil && j.State == Installed && j.Machine == s.Machine && j.Release == s.Release {
		return out, r.prepare(ctx, m, p)
	}
	if j == nil {
		j = &Journal{Version: journalVersion, Cluster: s.Cluster, Begun: r.Now().UTC()}
	}
	j.ClusterName, j.Machine, j.Release = s.ClusterName, s.Machine, s.Release
	j.State, j.Changed = Installing, r.Now().UTC()
	j.extend(s, wants, t.o, nil)
	if err := c.write(ctx, j); err != nil {
		return Outcome{}, err
	}
	if err := c.packages(ctx, s, j, t, p); err != nil {
		return Outcome{}, err
	}
	if err := c.place(ctx, s, j, t, p); err != nil {
		return Outcome{}, err
	}
	if err := r.prepare(ctx, m, p); err != nil {
		return Outcome{}, err
	}
	if err := c.start(ctx, s, t, p); err != nil {
		return Outcome{}, err
	}
	p.next("verify")
	if t, err = c.observe(ctx, s, wants, j); err != nil {
		return Outcome{}, err
	}
	if len(t.o.change) > 0 {
		return Outcome{}, &plan.Error{Op: c.op, Err: fmt.Errorf("%s is not as it was sent", s.Files[t.o.change[0]].Path), Remedy: "check what else changes this file, then run the same command again"}
	}
	j.State, j.Changed = Installed, r.Now().UTC()
	return out, c.write(ctx, j)
}

// sends is how many steps it takes to place files: one for each, and one for all links.
func (s *Spec) sends(files []int) (n int) {
	links := 0
	for _, i := range files {
		if s.Files[i].Link != "" {
			links = 1
			continue
		}
		n++
	}
	return n + links
}

// prepare calls Prepare.
func (r *Request) prepare(ctx context.Context, m Machine, p *progress) error {
	if r.Prepare == nil {
		return nil
	}
	p.next("exchange the identity")
	return r.Prepare(ctx, m)
}

// start starts the units of a Spec.
func (c *remote) start(ctx context.Context, s *Spec, t *todo, p *progress) error {
	units := s.started()
	if len(units) == 0 {
		return nil
	}
	p.next("start " + words.And(units))
	how := "start"
	if t.restart || len(t.o.change) > 0 {
		how = "restart"
	}
	_, err := c.run(ctx, limit, "start", nil, append([]string{how}, units...)...)
	return err
}

// packages installs packages. The journal names them before.
func (c *remote) packages(ctx context.Context, s *Spec, j *Journal, t *todo, p *progress) error {
	missing := append(t.unfinished, t.missing...)
	if len(missing) == 0 {
		return nil
	}
	p.total++
	p.next("install " + words.And(missing))
	out, err := c.run(ctx, packageLimit, "simulate", nil, missing...)
	if err != nil {
		return err
	}
	list, err := c.answers(out)
	if err != nil {
		return err
	}
	for _, name := range list {
		if !nameRE.MatchString(name) {
			return &plan.Error{Op: c.op, Err: fmt.Errorf("apt-get names a package %q", name), Remedy: "check apt on the machine"}
		}
	}
	j.extend(s, nil, &observation{trees: make([]kind, len(s.Trees)), units: make([]unitRecord, len(s.Units))}, list)
	if err := c.write(ctx, j); err != nil {
		return err
	}
	_, err = c.run(ctx, packageLimit, "install", nil, missing...)
	return err
}

// place makes folders, copies of files that are replaced, files and links.
func (c *remote) place(ctx context.Context, s *Spec, j *Journal, t *todo, p *progress) error {
	if len(t.o.change) == 0 {
		return nil
	}
	var in, links bytes.Buffer
	for _, dir := range j.Folders {
		fmt.Fprintf(&in, "folder %s\n", dir)
	}
	for _, f := range j.Files {
		if f.Copy != "" {
			fmt.Fprintf(&in, "copy %s %s\n", f.Copy, f.Path)
		}
	}
	if _, err := c.run(ctx, limit, "prepare", in.Bytes()); err != nil {
		return err
	}
	for _, i := range t.o.change {
		f := s.Files[i]
		if f.Link != "" {
			fmt.Fprintf(&links, "%s %s\n", f.Path, f.Link)
			continue
		}
		p.next("send " + f.Path)
		if err := c.send(ctx, f); err != nil {
			return err
		}
	}
	if links.Len() == 0 {
		return nil
	}
	p.next("make links")
	_, err := c.run(ctx, limit, "links", links.Bytes())
	return err
}

func (c *remote) send(ctx context.Context, f File) error {
	r, size, err := f.open()
	if err != nil {
		return &plan.Error{Op: c.op, Err: err, Remedy: "check the file on this computer, then run the command again"}
	}
	defer r.Close()
	return c.m.Upload(ctx, f.Path, f.Mode, size, r)
}

// progress reports steps.
type progress struct {
	report      func(Step)
	done, total int
}

func (p *progress) next(title string) {
	if p.report != nil {
		p.report(Step{Title: title, Done: p.done, Total: p.total})
	}
	p.done++
}

func either(yes bool, a, b string) string {
	if yes {
		return a
	}
	return b
}

// Read returns the journal of a machine; nil without one.
func Read(ctx context.Context, m Machine) (*Journal, error) {
	c := (&Request{}).remote(m, "read the enrolment of")
	if err := c.begin(ctx); err != nil {
		return nil, err
	}
	return c.read(ctx)
}
