package tui

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/enrol"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

// listed returns an error if the configuration lists no machine of this name.
func listed(l workspace.MachineList, name string) error {
	if slices.ContainsFunc(l.Machines, func(m workspace.Machine) bool { return m.Name == name }) {
		return nil
	}
	return &plan.Error{Op: "find machine " + name, Err: errors.New("the configuration does not list it"), Remedy: "run `constellation machine list`", Exit: plan.ExitUsage}
}

// completeMachines completes the name of a machine of the configuration.
func completeMachines(s *session) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, _ string) (out []string, d cobra.ShellCompDirective) {
		d = cobra.ShellCompDirectiveNoFileComp
		ws, _, err := s.workspace()
		if err != nil || len(args) > 0 {
			return nil, d
		}
		e, err := ws.MachineList()
		if err != nil {
			return nil, d
		}
		for _, m := range e.Machines {
			out = append(out, m.Name)
		}
		return out, d
	}
}

// inventory is a workspace that may list machines, for the verbs or for a console.
type inventory struct {
	s      *session
	ws     *workspace.Workspace
	engine func() (Engine, error)
}

// inventoryOf is that of the workspace of the invocation.
func inventoryOf(s *session) (*inventory, error) {
	ws, _, err := s.workspace()
	return &inventory{s, ws, func() (Engine, error) {
		eng, _, _, err := s.engineOf()
		return eng, err
	}}, err
}

// status returns the status of the cluster, and an error if it is unknown which machines are nodes. Both are nil
// if there is no cluster.
func (v *inventory) status(ctx context.Context) (*engine.Status, error) {
	eng, err := v.engine()
	if err != nil || !v.ws.Has(workspace.KubeconfigFile) {
		return nil, err
	}
	st, err := eng.Status(ctx)
	if err != nil {
		return nil, err
	}
	if st.Stage != engine.StageCluster || !st.Reachable {
		problem := st.Problem
		if problem == "" {
			problem = "the API server does not answer"
		}
		return nil, &plan.Error{Op: "list the nodes of " + st.Cluster, Err: errors.New(problem), Remedy: st.Remedy}
	}
	return &st, nil
}

// nodes returns the nodes of the cluster by name; nil if there is no cluster.
func (v *inventory) nodes(ctx context.Context) (map[string]cluster.Node, error) {
	st, err := v.status(ctx)
	if st == nil {
		return nil, err
	}
	out := map[string]cluster.Node{}
	for _, n := range st.Nodes {
		out[n.Name] = n
	}
	return out, nil
}

func machineList(s *session) *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the machines of the workspace",
		Long: `List the machines of constellation-conf.yaml that ` + "`machine add`" + ` prepared, or those of an adopted
cluster: name, group, address, where the key is (TPM, or file: not attested), and, if the cluster
answers, whether each is a node and since when, and why a spare is not usable.

It changes nothing. Exit code: 0, also if the cluster does not answer; 2 the workspace has no such
machines.`,
		Example: `  constellation machine list
  constellation machine list -o json | jq -r '.machines[] | select(.node == null) | .name'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runMachineList(cmd.Context(), s, out) },
	}
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

func runMachineList(ctx context.Context, s *session, f format) error {
	ctx, stop := s.signals(ctx)
	defer stop()
	v, err := inventoryOf(s)
	if err != nil {
		return err
	}
	l, err := v.list(ctx)
	if err != nil {
		return err
	}
	if f == asJSON {
		return document(s.out, l)
	}
	s.print(view.MachineTable(s.page(), s.answerWidth(), &l))
	if len(l.Machines) == 0 {
		fmt.Fprintf(s.out, "next  %s --group control-plane --ssh USER@HOST\n", s.command("machine add"))
	}
	return nil
}

// list returns the machines, and which of them are nodes if the cluster answers.
func (v *inventory) list(ctx context.Context) (view.MachineListing, error) {
	s := v.s
	e, err := v.ws.MachineList()
	if err != nil {
		return view.MachineListing{}, err
	}
	l := view.MachineListing{
		Schema: plan.Schema, Time: s.Now().UTC(), CLI: s.Release, Cluster: e.Cluster, Adopted: e.Adopted, Machines: []view.ListedMachine{},
		Initialised: v.ws.Has(workspace.KubeconfigFile),
	}
	st, err := v.status(ctx)
	if ctx.Err() != nil {
		return l, context.Cause(ctx)
	}
	if err != nil {
		l.Problem, l.Remedy = err.Error(), plan.Remedy(err)
	}
	for _, m := range e.Machines {
		x := view.ListedMachine{Name: m.Name, Group: string(m.Group), Address: m.Address, Attested: m.Attested, EK: m.EK, TPM: m.TPM, Vendor: m.Vendor, Labels: m.Labels, Taints: m.Taints}
		if st != nil {
			for i := range st.Nodes {
				if st.Nodes[i].Name == m.Name {
					x.Node = &st.Nodes[i]
				}
			}
			for i := range st.Spares {
				if st.Spares[i].Name == m.Name {
					x.Spare = &st.Spares[i]
				}
			}
			for _, w := range st.Machines {
				x.Joins = x.Joins || w.Name == m.Name && w.State == plan.NodeJoining
			}
		}
		if m.Spare && x.Spare == nil {
			x.Spare = &engine.Spare{Name: m.Name, Group: string(m.Group), State: "idle"}
		}
		l.Machines = append(l.Machines, x)
	}
	return l, nil
}

// oneTarget returns the machine of --ssh.
func (o *sshOptions) oneTarget() (sshhost.Target, error) {
	if len(o.machines) == 0 {
		return sshhost.Target{}, &plan.Error{Op: "read flags", Err: errors.New("it is not known how to log in to the machine"), Remedy: "name its login with --ssh USER@HOST", Exit: plan.ExitUsage}
	}
	list, err := o.targets()
	if err != nil {
		return sshhost.Target{}, err
	}
	if len(list) > 1 {
		return sshhost.Target{}, &plan.Error{Op: "read flags", Err: errors.New("--ssh names several machines"), Remedy: "name the one machine of the argument", Exit: plan.ExitUsage}
	}
	return list[0], nil
}

func machineLogs(s *session) *cobra.Command {
	var (
		o sshOptions
		r enrol.LogRequest
	)
	cmd := &cobra.Command{
		Use:   "logs NAME",
		Short: "Print log messages of a machine that was added",
		Long: `Log in to a machine of the workspace and print the newest messages of its bootstrapper, agent,
kubelet and containerd from the journal of systemd. Control characters in them are not printed.

Exit code: 0 done; 1 the messages could not be read; 2 bad flag, or another machine.`,
		Example: `  constellation machine logs worker-1 --ssh root@10.0.0.12
  constellation machine logs worker-1 --ssh admin@10.0.0.12 --sudo --unit kubelet -f`,
		Args:              oneArg("the name of a machine", "run `constellation machine list`"),
		ValidArgsFunction: completeMachines(s),
		RunE: func(cmd *cobra.Command, args []string) error {
			r.Machine = args[0]
			return runMachineLogs(cmd.Context(), s, &o, r)
		},
	}
	sshFlags(cmd, &o, "")
	fl := cmd.Flags()
	fl.BoolVarP(&r.Follow, "follow", "f", false, "print new messages until interrupted")
	fl.IntVarP(&r.Lines, "lines", "n", logLines, "`number` of messages before")
	fl.StringSliceVar(&r.Units, "unit", nil, "comma-separated `units` (default: "+strings.Join(enrol.Logs, ", ")+")")
	_ = cmd.RegisterFlagCompletionFunc("unit", fixed(enrol.Logs...))
	_ = cmd.RegisterFlagCompletionFunc("lines", fixed())
	return cmd
}

func runMachineLogs(ctx context.Context, s *session, o *sshOptions, r enrol.LogRequest) error {
	target, err := o.oneTarget()
	if err != nil {
		return err
	}
	for _, u := range r.Units {
		if !slices.Contains(enrol.Logs, u) {
			return &plan.Error{Op: "read flags", Err: fmt.Errorf("--unit %q is none of %s", u, strings.Join(enrol.Logs, ", ")), Remedy: "name one of them", Exit: plan.ExitUsage}
		}
	}
	if r.Lines < 0 || r.Lines > 1_000_000 {
		return &plan.Error{Op: "read flags", Err: fmt.Errorf("--lines is %d, want 0 to 1000000", r.Lines), Remedy: "omit it for the default", Exit: plan.ExitUsage}
	}
	v, err := inventoryOf(s)
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	reach := o.options(s, func(prompt func()) { prompt() })
	reach.Target = target
	w := &cleanWriter{to: s.out}
	err = v.logs(ctx, r, reach, w)
	w.end()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// logs writes messages of a machine to w, as the machine prints them.
func (v *inventory) logs(ctx context.Context, r enrol.LogRequest, reach sshhost.Options, w io.Writer) error {
	e, err := v.ws.MachineList()
	if err != nil {
		return err
	}
	if err := listed(e, r.Machine); err != nil {
		return err
	}
	r.Cluster, r.SSH = e.UID, reach
	return v.s.Enrol.Logs(ctx, r, w)
}

// cleanWriter writes lines without control characters, and cuts long ones.
type cleanWriter struct {
	to   io.Writer
	rest []byte
}

// logLines is how many messages are read before the new ones.
const logLines = 200

// longestLine is the maximum length of a message, in bytes.
const longestLine = 16 << 10

func (c *cleanWriter) Write(p []byte) (int, error) {
	c.rest = append(c.rest, p...)
	for {
		i := bytes.IndexByte(c.rest, '\n')
		if i < 0 && len(c.rest) < longestLine {
			return len(p), nil
		}
		if i < 0 || i > longestLine {
			i = longestLine
		}
		line := term.Clean(string(c.rest[:i]))
		c.rest = bytes.TrimPrefix(c.rest[i:], []byte("\n"))
		if _, err := fmt.Fprintln(c.to, line); err != nil {
			return 0, err
		}
	}
}

func (c *cleanWriter) end() {
	if len(c.rest) > 0 {
		fmt.Fprintln(c.to, term.Clean(string(c.rest)))
	}
}

// removing are the flags of `machine remove`.
type removing struct {
	ssh                 sshOptions
	gone, ignoreCluster bool
	yes                 bool
	out                 format
	call                calling
	programs            string
}

func machineRemove(s *session) *cobra.Command {
	var r removing
	cmd := &cobra.Command{
		Use:   "remove NAME",
		Short: "Remove a machine that was added, and restore it",
		Long: `Take a machine out of the workspace, and restore it by the journal of ` + "`machine add`" + `: the
bootstrapper resets it, units are stopped, files that were replaced are restored, others deleted,
and packages that add installed are purged. Then its row is deleted from constellation-conf.yaml.
Each step can be repeated: an interrupted removal is continued by the same command.

A machine whose Node is in the cluster is refused. Drain and delete the Node first; on a control
plane, remove its etcd member with ` + "`kubeadm reset`" + ` before.

Where this console cannot log in, --print-command prints a command that the owner runs on the machine
as root, and waits for it, as ` + "`machine add --print-command`" + ` does.

Settings of ` + "`machine check --fix`" + ` stay: kernel modules, kernel parameters, swap. Restart the machine
afterwards: network interfaces and packet filters of pods last until then.

Exit code: 0 done; 1 it could not be restored; 2 bad flag; 4 its Node is in the cluster, or the
machine belongs to another cluster; 5 not accepted; 8 another console works on the machine.`,
		Example: `  constellation machine remove worker-1 --ssh root@10.0.0.12
  constellation machine remove worker-1 --ssh admin@10.0.0.12 --sudo --yes
  constellation machine remove worker-1 --print-command
  constellation machine remove worker-1 --gone   # the machine is lost: only forget it`,
		Args:              oneArg("the name of a machine", "run `constellation machine list`"),
		ValidArgsFunction: completeMachines(s),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := r.call.wanted(cmd); err != nil {
				return err
			}
			return runMachineRemove(cmd.Context(), s, &r, args[0])
		},
	}
	sshFlags(cmd, &r.ssh, "")
	callFlags(cmd, &r.call, "restores it")
	fl := cmd.Flags()
	fl.StringVar(&r.programs, "programs", "", "`folder` with the bootstrapper for the machine's architecture")
	_ = cmd.MarkFlagDirname("programs")
	fl.BoolVar(&r.gone, "gone", false, "the machine is lost: only delete its row")
	fl.BoolVar(&r.ignoreCluster, "ignore-cluster", false, "remove it although the cluster does not answer")
	fl.BoolVarP(&r.yes, "yes", "y", false, "remove it without a prompt")
	outputFlag(cmd, &r.out, "output format: text, or json for one document")
	return cmd
}

// removeReport is the document of `machine remove -o json`.
type removeReport struct {
	Schema string    `json:"schema"`
	Time   time.Time `json:"time"`
	CLI    string    `json:"cli"`
	Name   string    `json:"name"`
	enrol.Outcome
}

// removal is one run of `machine remove`, by the verb or by the console.
type removal struct {
	*removing
	*inventory
	uid    string // of the cluster
	name   string
	target sshhost.Target // zero with --gone

	connected enrol.Machine // the machine, if it called
}

// begin validates flags and workspace.
func (r *removing) begin(v *inventory, name string) (*removal, error) {
	x := &removal{removing: r, inventory: v, name: name}
	var err error
	switch {
	case r.gone && len(r.ssh.machines) > 0:
		err = &plan.Error{Op: "read flags", Err: errors.New("--gone and --ssh exclude each other"), Remedy: "leave out --gone to restore the machine", Exit: plan.ExitUsage}
	case !r.gone && !r.call.printCommand:
		x.target, err = r.ssh.oneTarget()
	}
	if err != nil {
		return nil, err
	}
	e, err := v.ws.MachineList()
	if err == nil {
		err = e.Enrolled()
	}
	if err != nil {
		return nil, err
	}
	x.uid = e.UID
	for _, m := range e.Machines {
		if m.Name == name && r.call.printCommand {
			x.target.Host = m.Address
		}
	}
	return x, listed(e, name)
}

// hold keeps init away: it waits for the machines that were listed when it began.
func (x *removal) hold() (unlock func(), err error) {
	return x.ws.Lock("machine remove "+x.name, x.s.Now())
}

// give restores the machine and deletes its row. The caller has hold.
func (x *removal) give(ctx context.Context, reach sshhost.Options, step func(enrol.Step)) (removeReport, error) {
	report := removeReport{Schema: plan.Schema, Time: x.s.Now().UTC(), CLI: x.s.Release, Name: x.name}
	if !x.gone {
		reach.Target = x.target
		var err error
		report.Outcome, err = x.s.Enrol.Remove(ctx, enrol.Removal{Connected: x.connected, SSH: reach, Cluster: x.uid, Machine: x.name, Who: enrol.Self(x.s.Env), Now: x.s.Now, Report: step})
		if errors.Is(err, enrol.ErrNotEnrolled) { // such as after an interruption
			report.Notes, err = []string{"the machine has no journal: nothing was changed on it"}, nil
		}
		if ctx.Err() != nil {
			return report, resumed(ctx, "remove")
		}
		if err != nil {
			return report, err
		}
	}
	list, err := x.ws.MachineList()
	if err != nil {
		return report, err
	}
	if err := x.ws.RemoveMachine(x.name); err != nil {
		return report, err
	}
	report.Notes = append(report.Notes, shorten(x.s, &list, x.name)...)
	report.Changes = append(report.Changes, "deleted its row from "+workspace.ConfigFile)
	return report, nil
}

func runMachineRemove(ctx context.Context, s *session, r *removing, name string) error {
	v, err := inventoryOf(s)
	if err != nil {
		return err
	}
	x, err := r.begin(v, name)
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	if r.call.printCommand {
		return x.waitForCall(ctx)
	}
	unlock, err := x.hold()
	if err != nil {
		return err
	}
	defer unlock()
	if err := x.outside(ctx); err != nil {
		return err
	}
	if err := r.confirm(s, name, x.target); err != nil {
		return err
	}
	live := &enrolTable{t: s.liveTable(), names: []string{name}}
	live.all("waiting")
	report, err := x.give(ctx, r.ssh.options(s, live.around), func(x enrol.Step) { live.step(0, x) })
	live.clear()
	if err != nil {
		return err
	}
	return x.print(s.out, report)
}

// print prints the changes. Text goes to w.
func (x *removal) print(w io.Writer, report removeReport) error {
	if x.out == asJSON {
		return document(x.s.out, report)
	}
	for _, c := range report.Changes {
		fmt.Fprintf(w, "%s\n", term.Clean(c))
	}
	for _, n := range report.Notes {
		fmt.Fprintf(w, "note  %s\n", term.Clean(n))
	}
	if x.ws.Has(workspace.KubeconfigFile) {
		fmt.Fprintf(w, "next  %s\n", x.s.command("init")) // publishes the shorter list
	}
	return nil
}

// outside returns an error if the machine is a node of the cluster.
func (x *removal) outside(ctx context.Context) error {
	name := x.name
	op := "remove machine " + name
	nodes, err := x.nodes(ctx)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil && !x.ignoreCluster {
		return &plan.Error{Op: op, Err: fmt.Errorf("it is unknown whether it is a node: %w", err), Remedy: "repeat when the cluster answers; if there is no cluster any more, add --ignore-cluster", Exit: plan.ExitBlocked}
	}
	n, is := nodes[name]
	if !is {
		return nil
	}
	remedy := fmt.Sprintf("run `kubectl drain %s --ignore-daemonsets --delete-emptydir-data`, then `kubectl delete node %[1]s`", name)
	if n.Role == "control-plane" {
		remedy += "; between the two, run `kubeadm reset` on the machine, which removes its etcd member"
		others := 0
		for other, n := range nodes {
			if other != name && n.Role == "control-plane" {
				others++
			}
		}
		if others == 0 {
			remedy = "it is the only control plane, and the cluster ends with it: if that is intended, stop the machine and add --ignore-cluster"
		}
	}
	return &plan.Error{Op: op, Err: errors.New("its Node is in the cluster"), Remedy: remedy, Exit: plan.ExitBlocked}
}

// confirm returns an error unless the user wants the removal.
func (r *removing) confirm(s *session, name string, t sshhost.Target) error {
	question := fmt.Sprintf("Reset %s and restore it (%s)?", term.Clean(name), term.Clean(t.String()))
	if r.gone {
		question = "Delete the row of " + term.Clean(name) + "?"
	}
	op := "remove machine " + name
	switch {
	case r.yes:
		return nil
	case r.out == asJSON || r.ssh.nonInteractive || !s.asks():
		return &plan.Error{Op: op, Err: errors.New("the removal was not accepted; nothing was changed"), Remedy: "run the same command with --yes", Exit: plan.ExitUnacknowledged}
	case !s.prompt().confirmed(question):
		return &plan.Error{Op: op, Err: errors.New("the removal was not accepted; nothing was changed"), Exit: plan.ExitUnacknowledged}
	}
	return nil
}
