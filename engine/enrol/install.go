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

// difference is what a machine lacks of a Spec.
type difference struct {
	o *observation
	// files are the indices in the Spec of files that must be placed.
	files   []int
	missing []string // packages
	// unfinished are packages of an enrolment that did not end.
	unfinished []string
	notes      []string
	// restart is whether files changed since units were started.
	restart bool
	// reset is whether the machine is a node that must be reset.
	reset bool
	// start are units that are not enabled or do not run.
	start []string
}

// changes describes it.
func (d *difference) changes(s *Spec) (out []string) {
	if d.reset {
		out = append(out, "reset the node, which is not in the cluster any more")
	}
	if len(d.missing) > 0 {
		from := "of the distribution"
		if n := len(s.Debs); n > 0 {
			from = "from " + words.Count(n, "file") + " of this computer"
		}
		out = append(out, "install "+words.And(d.missing)+" "+from+", held back from upgrades")
	}
	for _, i := range d.files {
		f := s.Files[i]
		verb := "write"
		if d.o.files[i].Kind != kindAbsent {
			verb = "replace"
		}
		out = append(out, verb+" "+f.Path)
	}
	switch {
	case d.restart || len(d.files) > 0:
		if units := s.started(false); len(units) > 0 {
			out = append(out, "restart "+words.And(units))
		}
		if units := s.started(true); len(units) > 0 {
			out = append(out, "start or reload "+words.And(units))
		}
	case len(d.start) > 0:
		out = append(out, "start "+words.And(d.start))
	}
	return out
}

// started are the units to start: those that reload their files, or the others.
func (s *Spec) started(reload bool) (out []string) {
	for _, u := range s.Units {
		if u.Start && u.Reload == reload {
			out = append(out, u.Name)
		}
	}
	return out
}

// compare returns what an observed machine lacks of the Spec, whose files should be as in wants.
func (s *Spec) compare(wants []entry, o *observation, j *Journal) (*difference, error) {
	d := &difference{o: o, restart: j != nil && j.State == Installing}
	for i := range s.Files {
		switch place, note, err := s.compareFile(i, wants[i], o, j); {
		case err != nil:
			return nil, err
		case place:
			d.files = append(d.files, i)
		case note != "":
			d.notes = append(d.notes, note)
		}
	}
	for i, p := range s.Packages {
		switch {
		case !o.programs[i]:
			d.missing = append(d.missing, p.Name)
		case d.restart && slices.Contains(j.Packages, p.Name):
			d.unfinished = append(d.unfinished, p.Name)
		}
	}
	for i, u := range s.Units {
		if u.Start && (!o.units[i].Enabled || !o.units[i].Active) {
			d.start = append(d.start, u.Name)
		}
	}
	return d, nil
}

// compareFile returns whether a file must be placed, or a note about one that stays.
func (s *Spec) compareFile(i int, want entry, o *observation, j *Journal) (place bool, note string, err error) {
	f, is := s.Files[i], o.files[i]
	foreign := is.Kind != kindAbsent && (j == nil || j.file(f.Path) == nil)
	switch {
	case is == want || f.Keep && foreign:
		return false, "", nil
	case f.Own && foreign && !o.defaults[i]:
		return false, "", &plan.Error{Op: "enrol " + s.Machine, Err: errors.New(f.Path + " is there, and it is not the file of the package"), Remedy: f.Needs, Exit: plan.ExitBlocked}
	case f.Default != "" && foreign && !o.defaults[i]:
		return false, f.Path + " was changed by hand and stays: a node needs " + f.Needs, nil
	case is.Kind == kindFolder || is.Kind == kindOther:
		return false, "", &plan.Error{Op: "enrol " + s.Machine, Err: errors.New(f.Path + " exists and is no file"), Remedy: "move it away, then run the same command again", Exit: plan.ExitBlocked}
	}
	return true, "", nil
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
	d, err := c.compare(ctx, s, wants, j)
	if err == nil && r.Rejoin {
		err = c.rejoins(s, j, d)
	}
	if err != nil {
		return Outcome{}, err
	}
	return Outcome{Changes: d.changes(s), Notes: d.notes}, nil
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

// compare observes the machine and compares it with the Spec.
func (c *remote) compare(ctx context.Context, s *Spec, wants []entry, j *Journal) (*difference, error) {
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
		return Outcome{}, &plan.Error{Op: c.op, Err: errors.New("its removal began and did not end"), Remedy: fmt.Sprintf("end it first: `constellation machine remove %s %s`", j.Machine, reach(m)), Exit: plan.ExitBlocked}
	}
	d, err := c.compare(ctx, s, wants, j)
	if err == nil && r.Rejoin {
		err = c.rejoins(s, j, d)
	}
	if err != nil {
		return Outcome{}, err
	}
	out := Outcome{Changes: d.changes(s), Notes: d.notes}
	p.total = 5 + s.sends(d.files)
	if len(s.started(false)) > 0 && len(s.started(true)) > 0 {
		p.total++ // they start one after the other
	}
	if len(out.Changes) == 0 && j != nil && j.State == Installed && j.Machine == s.Machine && (s.Part || j.Release == s.Release) {
		return out, r.prepare(ctx, m, p)
	}
	if j == nil && s.Part {
		return Outcome{}, &plan.Error{Op: c.op, Err: ErrNotEnrolled, Remedy: "check the address; a machine that was reinstalled has left the cluster: remove its Node, then its row with `constellation machine remove " + s.Machine + " --gone`", Exit: plan.ExitBlocked}
	}
	if j == nil {
		j = &Journal{Version: journalVersion, Cluster: s.Cluster, Begun: r.Now().UTC()}
	}
	j.ClusterName, j.Machine = s.ClusterName, s.Machine
	if !s.Part { // its programs may be of another release
		j.Release = s.Release
	}
	j.State, j.Changed = Installing, r.Now().UTC()
	j.extend(s, wants, d)
	if err := c.write(ctx, j); err != nil {
		return Outcome{}, err
	}
	if err := r.change(ctx, c, j, d, p); err != nil {
		return Outcome{}, err
	}
	p.next("verify")
	if d, err = c.compare(ctx, s, wants, j); err != nil {
		return Outcome{}, err
	}
	if len(d.files) > 0 {
		return Outcome{}, &plan.Error{Op: c.op, Err: fmt.Errorf("%s is not as it was sent", s.Files[d.files[0]].Path), Remedy: "check what else changes this file, then run the same command again"}
	}
	j.State, j.Changed = Installed, r.Now().UTC()
	return out, c.write(ctx, j)
}

// change makes the changes of a difference, which the journal names already.
func (r *Request) change(ctx context.Context, c *remote, j *Journal, d *difference, p *progress) error {
	if err := r.reset(ctx, c, j, d, p); err != nil {
		return err
	}
	if err := c.packages(ctx, &r.Spec, j, d, p); err != nil {
		return err
	}
	if err := c.place(ctx, &r.Spec, j, d, p); err != nil {
		return err
	}
	if err := r.prepare(ctx, c.m, p); err != nil {
		return err
	}
	return c.start(ctx, &r.Spec, d, p)
}

// rejoins adds to a difference that the machine is reset. Only a machine of this name that the journal has can be, and
// not while its bootstrapper makes it a node.
func (c *remote) rejoins(s *Spec, j *Journal, d *difference) error {
	switch {
	case j == nil:
		return &plan.Error{Op: c.op, Err: fmt.Errorf("it was a node of this cluster, and %w", ErrNotEnrolled), Remedy: "run `kubeadm reset` on the machine, or reinstall it, then run the same command again", Exit: plan.ExitBlocked}
	case j.Machine != s.Machine:
		return &plan.Error{Op: c.op, Err: fmt.Errorf("it is the machine %s of this cluster, not %s", j.Machine, s.Machine), Remedy: "correct --name or --ssh", Exit: plan.ExitUsage}
	}
	for i, u := range s.Units {
		if u.Name == bootstrapperUnit && d.o.units[i].Active {
			return &plan.Error{Op: c.op, Err: errors.New("it is becoming a node: its bootstrapper is at work"), Remedy: fmt.Sprintf("wait, or read `constellation machine logs %s --ssh %s`", s.Machine, c.m.Target()), Exit: plan.ExitBlocked}
		}
	}
	d.reset, d.restart = true, true
	return nil
}

// reset stops the units of a node and resets it, if the difference says so.
func (r *Request) reset(ctx context.Context, c *remote, j *Journal, d *difference, p *progress) error {
	if !d.reset {
		return nil
	}
	p.total += 2
	p.next("stop units")
	if _, err := c.run(ctx, limit, "halt", nil, j.halt(true)...); err != nil {
		return err
	}
	p.next("reset the node")
	return r.Reset(ctx, c.m)
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
func (c *remote) start(ctx context.Context, s *Spec, d *difference, p *progress) error {
	changed := d.restart || len(d.files) > 0
	for _, reload := range []bool{false, true} {
		units := s.started(reload)
		if len(units) == 0 {
			continue
		}
		p.next("start " + words.And(units))
		how := "start"
		switch {
		case changed && reload:
			how = "reload-or-restart"
		case changed:
			how = "restart"
		}
		if _, err := c.run(ctx, limit, "start", nil, append([]string{how}, units...)...); err != nil {
			return err
		}
	}
	return nil
}

// packages installs packages. The journal names them before.
func (c *remote) packages(ctx context.Context, s *Spec, j *Journal, d *difference, p *progress) error {
	missing := append(d.unfinished, d.missing...)
	if len(missing) == 0 {
		return nil
	}
	p.total += 1 + len(s.Debs)
	if err := c.bring(ctx, s.Debs, p); err != nil {
		return err
	}
	p.next("install " + words.And(missing))
	out, err := c.run(ctx, packageLimit, "simulate", []byte(s.Proxy+"\n"), missing...)
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
	for _, name := range list {
		if !slices.Contains(j.Packages, name) {
			j.Packages = append(j.Packages, name)
		}
	}
	if err := c.write(ctx, j); err != nil {
		return err
	}
	_, err = c.run(ctx, packageLimit, "install", []byte(s.Proxy+"\n"), missing...)
	return err
}

// place makes folders, copies of files that are replaced, files and links.
func (c *remote) place(ctx context.Context, s *Spec, j *Journal, d *difference, p *progress) error {
	if len(d.files) == 0 {
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
	for _, i := range d.files {
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
