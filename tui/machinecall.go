package tui

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine/callhome"
	"constellation/engine/enrol"
	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

// calling are the flags for machines that this console cannot log in to.
type calling struct {
	printCommand, cloudInit bool
	listen, source          string
	validFor                time.Duration
}

func callFlags(cmd *cobra.Command, c *calling, verb string) {
	fl := cmd.Flags()
	fl.BoolVar(&c.printCommand, "print-command", false, "print a command that "+verb+" on the machine, and wait for it; no SSH")
	fl.StringVar(&c.listen, "listen", "", "`ADDRESS:PORT` to wait at (default: a free port of the address that routes to the machine)")
	fl.StringVar(&c.source, "source", "", "`IP` address that the machine connects from (default: its own)")
	fl.DurationVar(&c.validFor, "valid-for", 30*time.Minute, "how long the printed command is valid, such as 2h")
	for _, name := range []string{"listen", "source", "valid-for"} {
		_ = cmd.RegisterFlagCompletionFunc(name, fixed())
	}
}

// wanted returns whether machines call, and an error for flags that do not go together.
func (c *calling) wanted(cmd *cobra.Command) (bool, error) {
	usage := func(format, remedy string, args ...any) error { return badFlag(fmt.Errorf(format, args...), remedy) }
	set := func(names ...string) string {
		for _, n := range names {
			if f := cmd.Flags().Lookup(n); f != nil && f.Changed {
				return "--" + n
			}
		}
		return ""
	}
	if !c.printCommand && !c.cloudInit {
		if name := set("listen", "source", "valid-for"); name != "" {
			return false, usage("%s needs --print-command", "leave it out for machines with --ssh", name)
		}
		return false, nil
	}
	how := "--print-command"
	if c.cloudInit {
		how = "--cloud-init"
	}
	if name := set("ssh", "key", "jump", "host-key", "sudo", "timeout", "dry-run", "name", "gone"); name != "" {
		return false, usage("%s and %s exclude each other", "leave one of them out", how, name)
	}
	if c.printCommand && c.cloudInit {
		return false, usage("--print-command and --cloud-init exclude each other", "leave one of them out")
	}
	return true, cmp.Or(c.invalid("--source"), c.invalid("--valid-for"))
}

// waiting is a console that waits for machines that call.
type waiting struct {
	s        *session
	c        *calling
	show     waitingView
	machines []callhome.Machine
	programs map[string]string
	// work works on a machine that called.
	work func(ctx context.Context, i int, h *callhome.Host) (lines []string, err error)

	mu       sync.Mutex
	results  []error // of each machine; nil: done
	refusals []callhome.Refusal
}

// waitingView shows what happens while a console waits. Its methods are called from several goroutines.
type waitingView interface {
	// listening shows the commands, before anything else happens.
	listening(w *waiting, l *callhome.Listener)
	// step is a step of the i-th machine, which called. ended is the end of its work; it can call again after an error.
	step(i int, s enrol.Step)
	ended(i int, err error)
	// note is a line about something that happened.
	note(line string)
}

// newWaiting returns a console that waits for no machine yet.
func newWaiting(s *session, c *calling, show waitingView, programs string) (w *waiting, err error) {
	w = &waiting{s: s, c: c, show: show}
	w.programs, err = bootstrappers(s, programs)
	return w, err
}

// expect adds a machine, with the work for it.
func (w *waiting) expect(m workspace.Machine, work string) error {
	from, err := netip.ParseAddr(cmp.Or(w.c.source, m.Address))
	if err != nil {
		return err
	}
	w.machines = append(w.machines, callhome.Machine{Name: m.Name, Address: from.Unmap(), Work: work})
	return nil
}

// text is what the i-th machine needs: a command, or user data. It contains the token.
func (w *waiting) text(l *callhome.Listener, i int) string {
	if w.c.cloudInit {
		return l.CloudInit(i)
	}
	return l.Command(i)
}

// run shows the commands and waits until each machine is done or its token expired.
func (w *waiting) run(ctx context.Context) error {
	l, err := callhome.Listen(ctx, callhome.Options{Listen: w.c.listen, Machines: w.machines, Programs: w.programs, ValidFor: w.c.validFor, Now: w.s.Now})
	if err != nil {
		return err
	}
	defer l.Close()
	w.show.listening(w, l)
	w.results = make([]error, len(w.machines))
	for i, m := range w.machines {
		w.results[i] = &plan.Error{Op: "wait for " + m.Name, Err: fmt.Errorf("it did not call until %s", clock(l.Expires())), Remedy: "repeat the command for a new token, such as with --valid-for 2h"}
	}
	l.Serve(ctx, callhome.Events{
		Work: func(ctx context.Context, i int, h *callhome.Host) ([]string, error) {
			w.show.note(fmt.Sprintf("%s called from %s", w.machines[i].Name, h.Target()))
			lines, err := w.work(ctx, i, h)
			w.mu.Lock()
			w.results[i] = err
			w.mu.Unlock()
			w.show.ended(i, err)
			if err != nil {
				w.show.note(fmt.Sprintf("%s: %v", w.machines[i].Name, err))
				if r := plan.Remedy(err); r != "" {
					w.show.note("  " + r)
				}
			}
			return lines, err
		},
		Refused: func(r callhome.Refusal) {
			w.mu.Lock()
			w.refusals = append(w.refusals, r)
			w.mu.Unlock()
			w.show.note(fmt.Sprintf("refused a call from %s: %s", r.From, r.Reason))
		},
		Expired: func(i int) { w.show.note(fmt.Sprintf("the token of %s expired", w.machines[i].Name)) },
	})
	return nil
}

// clock is a time of this day.
func clock(t time.Time) string { return t.UTC().Format("15:04 UTC") }

// step shows a step at both ends.
func (w *waiting) step(i int, h *callhome.Host) func(enrol.Step) {
	return func(x enrol.Step) {
		w.show.step(i, x)
		h.Say(x.Title)
	}
}

// waitingText is the waitingView of a verb. text gets the commands, notes the rest.
type waitingText struct {
	live        *enrolTable
	text, notes io.Writer
	idle        string
}

func newWaitingText(s *session, f format) *waitingText {
	v := &waitingText{live: &enrolTable{t: s.liveTable()}, text: s.out, notes: s.Stderr}
	if f == asJSON {
		v.text = s.Stderr
	}
	return v
}

func (v *waitingText) listening(w *waiting, l *callhome.Listener) {
	for i, m := range w.machines {
		v.live.names = append(v.live.names, m.Name)
		if w.c.cloudInit {
			fmt.Fprint(v.text, w.text(l, i))
			continue
		}
		fmt.Fprintf(v.notes, "Run this as root on %s (%s). It is valid until %s, and once.\n\n", m.Name, m.Address, clock(l.Expires()))
		fmt.Fprintln(v.text, w.text(l, i))
	}
	v.idle = fmt.Sprintf("waiting at %s until %s", l.Console(0), clock(l.Expires()))
	fmt.Fprintf(v.notes, "%s for %s; Ctrl-C ends it, and makes the command worthless\n", v.idle, words.Count(len(w.machines), "machine"))
	v.live.all(v.idle)
}

func (v *waitingText) step(i int, s enrol.Step) { v.live.step(i, s) }

func (v *waitingText) ended(i int, err error) {
	if err != nil {
		v.live.step(i, enrol.Step{Title: v.idle})
		return
	}
	v.live.done(i, enrol.Result{})
}

func (v *waitingText) note(line string) {
	v.live.around(func() { fmt.Fprintln(v.notes, term.Clean(line)) })
}

// bootstrappers are those of each architecture that this console has.
func bootstrappers(s *session, dir string) (map[string]string, error) {
	out := map[string]string{}
	var failed error
	for _, arch := range enrol.Architectures() {
		p, err := s.Enrol.Programs(dir, s.Release, arch)
		if err != nil {
			failed = cmp.Or(failed, err)
			continue
		}
		out[arch] = p.Bootstrapper
	}
	if len(out) == 0 {
		return nil, failed
	}
	return out, nil
}

// callers reads the arguments NAME or NAME=ADDRESS.
func (a *adding) callers(args []string, role workspace.Machine) (list []workspace.Machine, err error) {
	usage := func(err error, remedy string) ([]workspace.Machine, error) {
		return nil, &plan.Error{Op: "read arguments", Err: err, Remedy: remedy, Exit: plan.ExitUsage}
	}
	if len(args) == 0 {
		return usage(errors.New("no machine is named"), "name it, with its address, as "+nameAddress+": worker-1=10.0.0.12")
	}
	if a.call.cloudInit && len(args) > 1 {
		return usage(errors.New("--cloud-init is for one machine"), "run it for each machine; several may wait at the same time")
	}
	if len(args) > 1 && (a.address != "" || a.call.source != "") {
		return usage(errors.New("--address and --source are of one machine, and there are several"), "write each as NAME=ADDRESS")
	}
	for _, arg := range args {
		m := role
		var inline bool
		if m.Name, m.Address, inline = strings.Cut(arg, "="); !inline {
			m.Address = a.address
		} else if a.address != "" {
			return usage(fmt.Errorf("%s has its address, and there is --address", arg), "leave one of them out")
		}
		ip, err := netip.ParseAddr(m.Address)
		switch {
		case !workspace.ValidMachineName(m.Name):
			return usage(fmt.Errorf("%q cannot name a node", m.Name), "use at most 253 of a-z, 0-9, - and .")
		case m.Address == "":
			return usage(fmt.Errorf("the address of %s is missing", m.Name), "write it as "+m.Name+"=IP")
		case err != nil || ip.Zone() != "":
			return usage(fmt.Errorf("%q is no IP address", m.Address), "write the address at which the other machines reach it, without a port")
		}
		m.Address = ip.Unmap().String()
		if slices.ContainsFunc(list, func(x workspace.Machine) bool { return x.Name == m.Name || x.Address == m.Address }) {
			return usage(fmt.Errorf("%s with %s is there twice", m.Name, m.Address), "name each machine once")
		}
		list = append(list, m)
	}
	return list, nil
}

// unlisted returns an error if a machine is in the list already, or another one has its name or address.
func unlisted(m workspace.Machine, have []workspace.Machine) error {
	for _, x := range have {
		remedy := "remove that machine first: `constellation machine remove " + x.Name + " --print-command`"
		switch {
		case x.Name == m.Name && x.Address == m.Address:
			return &plan.Error{Op: m.Name + " is enrolled already", Remedy: "for another enrolment, " + remedy, Exit: plan.ExitNothing}
		case x.Name == m.Name || x.Address == m.Address:
			return &plan.Error{Op: "add machine " + m.Name, Err: fmt.Errorf("the configuration has %s with address %s", x.Name, x.Address), Remedy: "choose another name or address, or " + remedy, Exit: plan.ExitUsage}
		}
	}
	return nil
}

// runMachineCall runs `machine add` for machines that call.
func runMachineCall(ctx context.Context, s *session, a *adding, args []string) error {
	v, err := inventoryOf(s)
	if err != nil {
		return err
	}
	show := newWaitingText(s, a.out)
	x, err := a.beginCalls(v, args, show)
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	err = x.wait(ctx)
	show.live.clear()
	if ctx.Err() != nil || len(x.waiting.results) == 0 { // it was ended, or did not listen
		return err
	}
	x.report.Refused = x.waiting.refusals
	if a.out != asJSON { // stdout has the commands alone
		defer func(o io.Writer) { s.out.w = o }(s.out.w)
		s.out.w = s.Stderr
	}
	return a.print(s, &x.report, err)
}

// callers are machines to add that call.
type callers struct {
	*addition
	waiting *waiting
}

// beginCalls validates flags, arguments and workspace. It writes nothing.
func (a *adding) beginCalls(v *inventory, args []string, show waitingView) (*callers, error) {
	as, err := a.common()
	if err != nil {
		return nil, err
	}
	list, err := a.callers(args, as)
	if err != nil {
		return nil, err
	}
	own := *v
	own.engine = sync.OnceValues(v.engine) // machines may call at the same time
	e, err := v.ws.RehearseEnrolment()     // nothing is written before a machine called
	if err != nil {
		return nil, err
	}
	for _, m := range list {
		if err := unlisted(m, e.Machines); err != nil {
			return nil, err
		}
	}
	vendors, err := a.vendors()
	if err != nil {
		return nil, err
	}
	x := &callers{addition: &addition{adding: a, inventory: &own, needs: a.needsOf(v.ws, as.Group), machines: list, vendors: vendors}}
	if err := x.alone(e); err != nil {
		return nil, err
	}
	if x.waiting, err = newWaiting(v.s, &a.call, show, a.programs); err != nil {
		return nil, err
	}
	x.report = addReport{Schema: plan.Schema, Time: v.s.Now().UTC(), CLI: v.s.Release, Cluster: e.Cluster}
	for _, m := range list {
		err := x.waiting.expect(m, fmt.Sprintf("prepare this machine as %s, a %s of the cluster %s", m.Name, strings.ReplaceAll(string(as.Group), "-", " "), e.Cluster))
		if err != nil {
			return nil, err
		}
		x.report.Machines = append(x.report.Machines, view.AddedMachine{Machine: m.Address, Name: m.Name, Address: m.Address, Group: string(as.Group), Spare: m.Spare, Labels: m.Labels, Taints: m.Taints})
	}
	x.waiting.work = x.prepare
	return x, nil
}

// prepare prepares the i-th machine, which called.
func (x *callers) prepare(ctx context.Context, i int, h *callhome.Host) ([]string, error) {
	began := x.s.Now()
	m, err := x.called(ctx, x.waiting, i, h)
	if m.Took = x.s.Now().Sub(began).Round(time.Millisecond); err != nil {
		m.Error, m.Remedy = err.Error(), plan.Remedy(err)
	}
	x.waiting.mu.Lock()
	defer x.waiting.mu.Unlock()
	x.report.Machines[i] = m
	lines := append(findingLines(m.Findings), m.Notes...)
	if err == nil {
		trust := "not attested: its key is in a file"
		if m.Attested {
			trust = "attested by its TPM"
		}
		lines = append(lines, "this machine is prepared as "+m.Name+", "+trust)
	}
	return lines, err
}

// wait waits for the machines. Its error is that of machines that could not be added.
func (x *callers) wait(ctx context.Context) error {
	if err := x.waiting.run(ctx); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return ended(ctx, "add")
	}
	var failed error
	for i, err := range x.waiting.results {
		if err != nil {
			x.report.Machines[i].Error, x.report.Machines[i].Remedy = err.Error(), plan.Remedy(err)
			failed = cmp.Or(failed, err)
		}
	}
	return x.failure(failed)
}

// ended is the error of a console that was stopped while it waited.
func ended(ctx context.Context, verb string) error {
	cause := context.Cause(ctx)
	return &plan.Error{
		Op: verb + " machines", Err: cause, Exit: plan.ExitCode(cause),
		Remedy: "run the same command again, and what it prints then on the machine: it continues, and repeats no finished step; what was printed before is worthless",
	}
}

// called prepares the i-th of several machines, which called.
func (all *addition) called(ctx context.Context, w *waiting, i int, h *callhome.Host) (view.AddedMachine, error) {
	m, step := all.machines[i], w.step(i, h)
	report := view.AddedMachine{Machine: h.Target().String(), Name: m.Name, Address: m.Address, Group: string(m.Group), Spare: m.Spare, Labels: m.Labels, Taints: m.Taints}
	have, err := all.ws.MachineList()
	if err == nil {
		err = unlisted(m, have.Machines) // another console may have enrolled it meanwhile
	}
	if err != nil {
		return report, err
	}
	own := *all.adding
	own.name, own.address = m.Name, m.Address
	x := &addition{
		adding: &own, inventory: all.inventory, needs: all.needs, targets: []sshhost.Target{h.Target()}, connected: h,
		vendors: all.vendors, others: slices.Delete(slices.Clone(all.machines), i, i+1),
	}
	if b := ownBalancer(x.ws); b != nil {
		b.Expected = b.Expected || len(all.machines) > 1 // another one of these may have the address by now
		x.needs.Balancer = b
	}
	step(enrol.Step{Title: "check the machine"})
	x.results = []machinecheck.Result{x.s.Enrol.Check(ctx, h, x.needs)}
	_, err = x.judge(ctx)
	if report.Findings = x.results[0].Findings; err != nil {
		for _, line := range findingLines(report.Findings) {
			w.show.note(m.Name + ": " + line)
		}
		return report, err
	}
	if x.machines, err = x.rows(x.results, x.targets, m, &workspace.Enrolment{Machines: have.Machines, Balancer: have.Balancer}); err != nil {
		return report, err
	}
	x.report.Machines = []view.AddedMachine{report}
	err = x.install(ctx, func(_ int, s enrol.Step) { step(s) }, func(int, enrol.Result) {})
	return x.report.Machines[0], err
}

// findingLines are findings that block or warn, with the commands that mend them.
func findingLines(list []plan.Finding) (out []string) {
	for _, f := range list {
		if f.Severity != plan.Block && f.Severity != plan.Warn {
			continue
		}
		out = append(out, string(f.Severity)+": "+f.Title)
		switch {
		case f.Command != "":
			out = append(out, "  run: "+f.Command)
		case f.Remedy != "":
			out = append(out, "  "+f.Remedy)
		}
	}
	return out
}

// waitForCall waits until the machine called, and restores it.
func (x *removal) waitForCall(ctx context.Context) error {
	if err := x.outside(ctx); err != nil {
		return err
	}
	if err := x.confirm(x.s, x.name, x.target); err != nil {
		return err
	}
	show := newWaitingText(x.s, x.out)
	w, err := newWaiting(x.s, &x.call, show, x.programs)
	if err == nil {
		err = w.expect(workspace.Machine{Name: x.name, Address: x.target.Host}, "reset this machine, "+x.name+", and restore what was changed for its cluster")
	}
	if err != nil {
		return err
	}
	var report removeReport
	w.work = func(ctx context.Context, i int, h *callhome.Host) (lines []string, err error) {
		unlock, err := x.hold()
		if err != nil {
			return nil, err
		}
		defer unlock()
		if err := x.outside(ctx); err != nil { // it may have joined meanwhile
			return nil, err
		}
		x.connected = h
		report, err = x.give(ctx, sshhost.Options{}, w.step(i, h))
		if err != nil {
			return nil, err
		}
		return append(slices.Concat(report.Changes, report.Notes), x.name+" is removed"), nil
	}
	err = w.run(ctx)
	show.live.clear()
	switch {
	case err != nil:
		return err
	case ctx.Err() != nil:
		return ended(ctx, "remove")
	case w.results[0] != nil:
		return w.results[0]
	}
	return x.print(x.s.Stderr, report) // stdout has the command alone
}
