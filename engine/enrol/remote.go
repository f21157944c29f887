package enrol

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	_ "embed" // the script
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/plan"
	"constellation/engine/sshhost"
)

//go:embed steps.sh
var script string

// Exit codes of the script.
const (
	exitBusy   = 96 // a step of an earlier connection still runs
	exitBroken = 97 // stdin came incomplete
	exitFenced = 98 // another console has the lock
)

// remote runs steps on one machine.
type remote struct {
	m           Machine
	state, lock string
	token       string // of the lock, and mark of answers
	op          string // for errors
}

func (r *Request) remote(m Machine, verb string) *remote {
	return &remote{m: m, state: cmp.Or(r.state, StateDir), lock: cmp.Or(r.lock, lockFile), token: rand.Text(), op: verb + " " + m.Target().String()}
}

// begin becomes root once, so that a prompt for a password comes before time counts.
func (r *remote) begin(ctx context.Context) error {
	_, err := r.m.Run(ctx, sshhost.Command{Argv: []string{"true"}, Root: true})
	return err
}

func (r *remote) argv(step string, args []string) []string {
	return append([]string{"sh", "-c", script, "sh", step, r.state, r.lock, r.token}, args...)
}

// run runs a step as root and returns what it printed.
func (r *remote) run(ctx context.Context, within time.Duration, step string, stdin []byte, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, within, &plan.Error{Op: r.op, Err: fmt.Errorf("the step %s did not end within %s", step, within), Remedy: "check the load of the machine, then run the same command again"})
	defer cancel()
	res, err := r.m.Run(ctx, sshhost.Command{Argv: r.argv(step, args), Root: true, Stdin: bytes.NewReader(stdin)})
	if err != nil {
		return nil, err
	}
	again := "run the same command again"
	switch res.Exit {
	case 0:
		return res.Stdout, nil
	case exitBusy:
		return nil, &plan.Error{Op: r.op, Err: fmt.Errorf("%w: a step of an earlier connection still runs there", ErrHeld), Remedy: "wait a minute, then " + again, Exit: plan.ExitHeld}
	case exitFenced:
		return nil, &plan.Error{Op: r.op, Err: ErrHeld, Remedy: "wait until it ended, then " + again, Exit: plan.ExitHeld}
	case exitBroken:
		return nil, &plan.Error{Op: r.op, Err: res.Err(), Remedy: again}
	}
	if step == "simulate" || step == "install" {
		return nil, &plan.Error{Op: r.op, Err: fmt.Errorf("step %s: %w", step, res.Err()), Remedy: "check that apt of the machine reaches a repository and has space; if it needs a proxy or has no repository, use --proxy or --packages; then " + again}
	}
	return nil, &plan.Error{Op: r.op, Err: fmt.Errorf("step %s: %w", step, res.Err()), Remedy: "mend it on the machine, such as its free space (`df -h`), then " + again}
}

// answers are the lines that a step printed with the mark. The last one must be "end".
func (r *remote) answers(out []byte) ([]string, error) {
	var list []string
	for line := range strings.Lines(string(out)) {
		if a, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), r.token+" "); ok {
			list = append(list, a)
		}
	}
	if len(list) == 0 || list[len(list)-1] != "end" {
		return nil, &plan.Error{Op: r.op, Err: errors.New("the machine's answer is incomplete: " + sshhost.Text(out)), Remedy: "check that sh, stat and sha256sum work on the machine"}
	}
	return list[:len(list)-1], nil
}

// hold takes the lock until release is called or the connection ends.
func (r *remote) hold(ctx context.Context, who string, now time.Time) (release func(), err error) {
	if err := r.begin(ctx); err != nil {
		return nil, err
	}
	in, out := io.Pipe()
	w := &watch{token: r.token, first: make(chan string, 1)}
	ended := make(chan error, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		res, err := r.m.Run(context.WithoutCancel(ctx), sshhost.Command{
			Argv: r.argv("hold", []string{sshhost.Text([]byte(who)), now.UTC().Format(time.RFC3339)}), Root: true, Stdin: in, Stdout: w,
		})
		_ = in.Close()
		if err == nil {
			err = res.Err()
		}
		ended <- err
	}()
	release = sync.OnceFunc(func() {
		_ = out.Close()
		<-done
	})
	select {
	case line := <-w.first:
		if line == "locked" {
			return release, nil
		}
		release()
		by, _ := strings.CutPrefix(line, "held ")
		return nil, &plan.Error{Op: r.op, Err: fmt.Errorf("%w: %s", ErrHeld, sshhost.Text([]byte(by))), Remedy: "wait until it ended; the lock is free when its connection ends", Exit: plan.ExitHeld}
	case err := <-ended:
		_ = out.Close()
		if err == nil {
			err = errors.New("the lock was not taken")
		}
		var known *plan.Error
		if !errors.As(err, &known) {
			err = &plan.Error{Op: r.op, Err: fmt.Errorf("take the lock: %w", err), Remedy: "check that flock (package util-linux) works on the machine, and that /run is writable"}
		}
		return nil, err
	case <-ctx.Done():
		go release()
		return nil, context.Cause(ctx)
	}
}

// watch finds the first marked line.
type watch struct {
	token string
	first chan string
	seen  []byte
}

func (w *watch) Write(p []byte) (int, error) {
	if len(w.seen) > 64<<10 {
		return len(p), nil
	}
	w.seen = append(w.seen, p...)
	if _, rest, ok := strings.Cut(string(w.seen), "\n"+w.token+" "); ok {
		if line, _, ok := strings.Cut(rest, "\n"); ok {
			select {
			case w.first <- line:
			default:
			}
		}
	}
	return len(p), nil
}

// read returns the journal; nil if there is none.
func (r *remote) read(ctx context.Context) (*Journal, error) {
	out, err := r.run(ctx, limit, "journal", nil)
	if err != nil {
		return nil, err
	}
	if i := bytes.IndexByte(out, '{'); i > 0 { // a startup file of the shell may print before
		out = out[i:]
	}
	if len(bytes.TrimSpace(out)) == 0 {
		return nil, nil
	}
	j, err := parseJournal(out)
	if err != nil {
		return nil, &plan.Error{
			Op: r.op, Err: fmt.Errorf("read %s/%s on the machine: %s", r.state, journalFile, sshhost.Text([]byte(err.Error()))),
			Remedy: "a newer release may have written it: use that one; a damaged journal cannot be undone, so reinstall the machine",
		}
	}
	return j, nil
}

// write replaces the journal.
func (r *remote) write(ctx context.Context, j *Journal) error {
	b, err := j.marshal()
	if err != nil {
		return err
	}
	sum := sha256.Sum256(b)
	_, err = r.run(ctx, limit, "write", b, hex.EncodeToString(sum[:]))
	return err
}

// belongs returns an error if the journal is of another cluster or machine.
func (r *remote) belongs(j *Journal, s *Spec) error {
	switch {
	case j == nil || j.Cluster == s.Cluster && !slices.Contains(s.Others, j.Machine):
		return nil
	case j.Cluster == s.Cluster:
		return &plan.Error{
			Op: r.op, Err: fmt.Errorf("it has the journal of %s, which is another machine of this cluster: its disk was copied", j.Machine), Exit: plan.ExitBlocked,
			Remedy: "reinstall it, or delete " + StateDir + " and /var/lib/constellation-identity there, then run the same command again",
		}
	}
	name := cmp.Or(j.ClusterName, j.Cluster)
	return &plan.Error{
		Op: r.op, Err: fmt.Errorf("%w: %s (%s) as %s, since %s", ErrOtherCluster, name, j.Cluster, j.Machine, j.Begun.Format(time.DateOnly)), Exit: plan.ExitBlocked,
		// The command is for another workspace than that of this program, so it does not name the program.
		Remedy: fmt.Sprintf("in the workspace of that cluster, run `machine remove %s %s`; if that workspace is gone, reinstall the machine", j.Machine, reach(r.m)),
	}
}

// reach is the flag by which the console reaches a machine.
func reach(m Machine) string {
	t := m.Target()
	if t.User == "" { // it called
		return "--print-command"
	}
	return "--ssh " + t.String()
}

// observation is the state of a machine, as far as a Spec concerns it.
type observation struct {
	files    []entry
	defaults []bool // the file is that of the package
	folders  map[string]kind
	trees    []kind
	programs []bool
	units    []unitRecord
}

// look observes a machine.
func (r *remote) look(ctx context.Context, s *Spec) (*observation, error) {
	var in bytes.Buffer
	n := 0
	ask := func(format string, args ...any) {
		fmt.Fprintf(&in, format+"\n", args...)
		n++
	}
	var folders []string
	for _, f := range s.Files {
		ask("entry %s", f.Path)
		for _, dir := range parents(f.Path) {
			if !slices.Contains(folders, dir) {
				folders = append(folders, dir)
			}
		}
	}
	for _, dir := range folders {
		ask("entry %s", dir)
	}
	for _, t := range s.Trees {
		ask("entry %s", t)
	}
	for _, p := range s.Packages {
		ask("entry %s", p.Program)
	}
	for _, f := range s.Files {
		if f.Default != "" {
			ask("default %s %s", f.Path, f.Default)
		}
	}
	for _, u := range s.Units {
		ask("unit %s", u.Name)
	}
	out, err := r.run(ctx, limit, "look", in.Bytes())
	if err != nil {
		return nil, err
	}
	list, err := r.answers(out)
	if err == nil && len(list) != n {
		err = &plan.Error{Op: r.op, Err: fmt.Errorf("the machine gave %d answers, want %d", len(list), n), Remedy: "check that sh, stat and sha256sum work on the machine"}
	}
	if err != nil {
		return nil, err
	}
	next := func() string {
		a := list[0]
		list = list[1:]
		return a
	}
	var failed error
	nextEntry := func() entry {
		e, err := parseEntry(next())
		if err != nil && failed == nil {
			failed = &plan.Error{Op: r.op, Err: err, Remedy: "check that stat and sha256sum work on the machine"}
		}
		return e
	}
	o := &observation{folders: map[string]kind{}, defaults: make([]bool, len(s.Files))}
	for range s.Files {
		o.files = append(o.files, nextEntry())
	}
	for _, dir := range folders {
		o.folders[dir] = nextEntry().Kind
	}
	for range s.Trees {
		o.trees = append(o.trees, nextEntry().Kind)
	}
	for range s.Packages {
		o.programs = append(o.programs, nextEntry().Kind != kindAbsent)
	}
	for i, f := range s.Files {
		if f.Default != "" {
			o.defaults[i] = next() == "default"
		}
	}
	for _, u := range s.Units {
		words := strings.Fields(next())
		x := unitRecord{Name: u.Name}
		if len(words) > 0 && words[0] == "known" {
			x.Existed = true
			x.Enabled = slices.Contains(words[1:], "enabled")
			x.Active = slices.Contains(words[1:], "active")
		}
		o.units = append(o.units, x)
	}
	return o, failed
}

// parseEntry reads what the script prints about a path.
func parseEntry(line string) (entry, error) {
	words := strings.SplitN(line, " ", 2)
	e := entry{Kind: kind(words[0])}
	if len(words) > 1 {
		fields := strings.Fields(words[1])
		switch {
		case e.Kind == kindLink:
			e.Target = words[1]
		case e.Kind == kindFile && len(fields) == 3:
			e.Mode, e.Owner, e.Digest = fields[0], fields[1], fields[2]
		case e.Kind == kindFolder && len(fields) == 2:
			e.Mode, e.Owner = fields[0], fields[1]
		}
	}
	if err := e.validate(); err != nil {
		return entry{}, errors.New("the machine reports the file as " + sshhost.Text([]byte(line)))
	}
	return e, nil
}
