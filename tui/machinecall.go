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
	usage := func(format, remedy string, args ...any) error {
		return &plan.Error{Op: "read flags", Err: fmt.Errorf(format, args...), Remedy: remedy, Exit: plan.ExitUsage}
	}
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
	if _, err := netip.ParseAddr(c.source); c.source != "" && err != nil {
		return false, usage("--source %q is no IP address", "write the address without a port", c.source)
	}
	if c.validFor < time.Minute || c.validFor > 24*time.Hour {
		return false, usage("--valid-for is %s, want 1m to 24h", "omit it for the default", c.validFor)
	}
	return true, nil
}

// waiting is a console that waits for machines that call.
type waiting struct {
	s    *session
	c    *calling
	live *enrolTable
	// text gets the commands, notes what happens meanwhile.
	text, notes io.Writer
	machines    []callhome.Machine
	programs    map[string]string
	// work works on a machine that called.
	work func(ctx context.Context, i int, h *callhome.Host) (lines []string, err error)

	mu       sync.Mutex
	results  []error // of each machine; nil: done
	refusals []callhome.Refusal
}

// newWaiting returns a console that waits for no machine yet.
func newWaiting(s *session, c *calling, f format, programs string) (w *waiting, err error) {
	w = &waiting{s: s, c: c, live: &enrolTable{t: s.liveTable()}, text: s.out, notes: s.Stderr}
	if f == asJSON {
		w.text = s.Stderr
	}
	w.programs, err = bootstrappers(s, programs)
	return w, err
}

// expect adds a machine, with the work for it.
func (w *waiting) expect(m workspace.Machine, work string) error {
	from, err := netip.ParseAddr(cmp.Or(w.c.source, m.Address))
	if err != nil {
		return err
	}
	w.live.names = append(w.live.names, m.Name)
	w.machines = append(w.machines, callhome.Machine{Name: m.Name, Address: from.Unmap(), Work: work})
	return nil
}

// run prints the commands and waits until each machine is done or its token expired.
func (w *waiting) run(ctx context.Context) error {
	l, err := callhome.Listen(ctx, callhome.Options{Listen: w.c.listen, Machines: w.machines, Programs: w.programs, ValidFor: w.c.validFor, Now: w.s.Now})
	if err != nil {
		return err
	}
	defer l.Close()
	until := l.Expires().UTC().Format("15:04 UTC")
	for i, m := range w.machines {
		if w.c.cloudInit {
			fmt.Fprint(w.text, l.CloudInit(i))
			continue
		}
		fmt.Fprintf(w.notes, "Run this as root on %s (%s). It is valid until %s, and once.\n\n", m.Name, m.Address, until)
		fmt.Fprintln(w.text, l.Command(i))
	}
	w.results = make([]error, len(w.machines))
	for i, m := range w.machines {
		w.results[i] = &plan.Error{Op: "wait for " + m.Name, Err: fmt.Errorf("it did not call until %s", until), Remedy: "repeat the command for a new token, such as with --valid-for 2h"}
	}
	idle := fmt.Sprintf("waiting at %s until %s", l.Console(0), until)
	fmt.Fprintf(w.notes, "%s for %s; Ctrl-C ends it, and makes the command worthless\n", idle, words.Count(len(w.machines), "machine"))
	w.live.all(idle)
	l.Serve(ctx, callhome.Events{
		Work: func(ctx context.Context, i int, h *callhome.Host) ([]string, error) {
			w.note(fmt.Sprintf("%s called from %s", w.machines[i].Name, h.Target()))
			lines, err := w.work(ctx, i, h)
			w.mu.Lock()
			w.results[i] = err
			w.mu.Unlock()
			if err != nil {
				w.live.step(i, enrol.Step{Title: idle})
				w.note(fmt.Sprintf("%s: %v", w.machines[i].Name, err))
				if r := plan.Remedy(err); r != "" {
					w.note("  " + r)
				}
			} else {
				w.live.done(i, enrol.Result{})
			}
			return lines, err
		},
		Refused: func(r callhome.Refusal) {
			w.mu.Lock()
			w.refusals = append(w.refusals, r)
			w.mu.Unlock()
			w.note(fmt.Sprintf("refused a call from %s: %s", r.From, r.Reason))
		},
		Expired: func(i int) { w.note(fmt.Sprintf("the token of %s expired", w.machines[i].Name)) },
	})
	w.live.clear()
	return nil
}

// note prints a line above the table.
func (w *waiting) note(line string) {
	w.live.around(func() { fmt.Fprintln(w.notes, term.Clean(line)) })
}

// step shows a step at both ends.
func (w *waiting) step(i int, h *callhome.Host) func(enrol.Step) {
	return func(x enrol.Step) {
		w.live.step(i, x)
		h.Say(x.Title)
	}
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
		return usage(errors.New("no machine is named"), "name it, with its address: constellation machine add worker-1 --address 10.0.0.12 --print-command")
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
			return usage(fmt.Errorf("the address of %s is missing", m.Name), "add --address IP, or write "+m.Name+"=IP")
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
	as, err := a.common()
	if err != nil {
		return err
	}
	list, err := a.callers(args, as)
	if err != nil {
		return err
	}
	v, err := inventoryOf(s)
	if err != nil {
		return err
	}
	v.engine = sync.OnceValues(v.engine) // machines may call at the same time
	e, err := v.ws.RehearseEnrolment()   // nothing is written before a machine called
	if err != nil {
		return err
	}
	for _, m := range list {
		if err := unlisted(m, e.Machines); err != nil {
			return err
		}
	}
	vendors, err := a.vendors()
	if err != nil {
		return err
	}
	all := &addition{adding: a, inventory: v, needs: a.needsOf(v.ws, as.Group), machines: list, vendors: vendors}
	if err := all.alone(e); err != nil {
		return err
	}
	w, err := newWaiting(s, &a.call, a.out, a.programs)
	if err != nil {
		return err
	}
	all.report = addReport{Schema: plan.Schema, Time: s.Now().UTC(), CLI: s.Release, Cluster: e.Cluster}
	for _, m := range list {
		err := w.expect(m, fmt.Sprintf("prepare this machine as %s, a %s of the cluster %s", m.Name, strings.ReplaceAll(string(as.Group), "-", " "), e.Cluster))
		if err != nil {
			return err
		}
		all.report.Machines = append(all.report.Machines, view.AddedMachine{Machine: m.Address, Name: m.Name, Address: m.Address, Group: string(as.Group)})
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	w.work = func(ctx context.Context, i int, h *callhome.Host) ([]string, error) {
		began := s.Now()
		m, err := all.called(ctx, w, i, h)
		if m.Took = s.Now().Sub(began).Round(time.Millisecond); err != nil {
			m.Error, m.Remedy = err.Error(), plan.Remedy(err)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		all.report.Machines[i] = m
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
	if err := w.run(ctx); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return ended(ctx, "add")
	}
	var failed error
	for i, err := range w.results {
		if err != nil {
			all.report.Machines[i].Error, all.report.Machines[i].Remedy = err.Error(), plan.Remedy(err)
			failed = cmp.Or(failed, err)
		}
	}
	all.report.Refused = w.refusals
	if a.out != asJSON { // stdout has the commands alone
		defer func(o io.Writer) { s.out.w = o }(s.out.w)
		s.out.w = s.Stderr
	}
	return a.print(s, &all.report, all.failure(failed))
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
	report := view.AddedMachine{Machine: h.Target().String(), Name: m.Name, Address: m.Address, Group: string(m.Group)}
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
		w.live.around(func() {
			for _, line := range findingLines(report.Findings) {
				fmt.Fprintln(w.notes, term.Clean(m.Name+": "+line))
			}
		})
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
	w, err := newWaiting(x.s, &x.call, x.out, x.programs)
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
	if err := w.run(ctx); err != nil {
		return err
	}
	switch {
	case ctx.Err() != nil:
		return ended(ctx, "remove")
	case w.results[0] != nil:
		return w.results[0]
	}
	return x.print(x.s.Stderr, report) // stdout has the command alone
}
