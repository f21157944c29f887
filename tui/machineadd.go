package tui

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/callhome"
	"constellation/engine/cluster"
	"constellation/engine/enrol"
	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

// adding are the flags of `machine add`.
type adding struct {
	ssh                            sshOptions
	group, name, address, programs string
	tpm, tpmRoots, packages, proxy string
	labels, taints                 []string
	spare                          bool
	yes, rehearse                  bool
	out                            format
	call                           calling
}

func machineAdd(s *session) *cobra.Command {
	var a adding
	cmd := &cobra.Command{
		Use:   "add [NAME[=ADDRESS]...]",
		Short: "Prepare Linux machines for the cluster of the workspace",
		Long: `Prepare Linux machines by SSH, so that init makes them nodes, or so that they join the cluster.
Add works in a workspace of ` + "`constellation config generate machines`" + `. It checks each machine as
` + "`machine check`" + ` does, lists the changes, and after a prompt, or with --yes, makes them on all
machines side by side:

  - containerd, runc and network plugins of the distribution, where they are missing; they are
    held back from upgrades
  - bootstrapper and agent of this release, their units and configuration
  - a key of the machine, which the authority of the workspace certifies
  - on control planes, if the configuration has a balancer: haproxy and keepalived of the
    distribution, and their configuration

The key is in the machine's TPM if it has one that works. Otherwise it is in a file, and the machine
is not attested: see --tpm.

A listed machine whose Node was deleted is reset, and joins again. Control planes leave etcd with that.

Then it writes the machine into constellation-conf.yaml. Each step can be repeated: an
interrupted run is continued by the same command, and files that the machine has are not sent
again. A journal on the machine has the previous files, and ` + "`machine remove`" + ` restores them.

The name of a machine is its host name, and its address the one that --ssh names, if the machine
has it. Add control planes before workers: a worker gets their addresses. The Nodes of all machines
of --ssh get the labels and taints. To change them later, edit the row and run init. Programs for another
architecture than that of this computer are in the archive of that architecture: unpack it, and
name its folder with --programs.

Where this console cannot log in, --print-command prints a command that the owner of the machine
runs there as root, and --cloud-init prints user data of a new machine. Name the machine and its
address. Add then waits: the machine connects to this console, and gets the same checks and steps.
The printed command is a secret until the machine is prepared. It is valid for 30 minutes
(--valid-for), for one use and from that address, and worthless when add ends. To continue an
interrupted add, repeat it and run the new command. stdout has the printed command alone.

Packages come from the repositories of the machine. Where it reaches them by a proxy alone, name
that with --proxy; it then serves downloads of components and images, too. Where it reaches none,
--packages names a folder of this computer with the packages and their dependencies.

With a balancer, every control plane has the addresses of all. So name all of them when you add
one: the others get the new list first, also if they are nodes already.

Exit code: 0 all machines are prepared; 1 one could not be prepared; 2 bad flag or workspace;
3 a machine is a node already; 4 a finding stands in the way, or the machine belongs to another
cluster; 5 the changes were not accepted; 8 another console works on the machine.`,
		Example: `  constellation machine add --ssh root@10.0.0.11 --group control-plane
  constellation machine add --ssh admin@10.0.0.12 --ssh admin@10.0.0.13 --sudo
  constellation machine add --ssh root@10.0.0.14 --label disk=ssd --taint team=batch:NoSchedule
  constellation machine add --ssh root@10.0.0.15 --spare
  constellation machine add --ssh root@10.0.0.12 --dry-run
  constellation machine add --ssh root@node.example.com --name worker-1 --address 10.0.0.12
  constellation machine add worker-1 --address 10.0.0.12 --print-command
  constellation machine add worker-1=10.0.0.12 worker-2=10.0.0.13 --print-command --listen :9443
  constellation machine add worker-1 --address 10.0.0.12 --cloud-init --valid-for 2h >user-data
  constellation machine add --ssh root@10.0.0.12 --yes -o json | jq '.machines[] | {name, error}'`,
		RunE: func(cmd *cobra.Command, args []string) error {
			calls, err := a.call.wanted(cmd)
			switch {
			case err != nil:
				return err
			case calls:
				return runMachineCall(cmd.Context(), s, &a, args)
			case len(args) > 0:
				return &plan.Error{Op: "read arguments", Err: fmt.Errorf("%q needs --print-command or --cloud-init", args[0]), Remedy: "with --ssh, name the machine with --name", Exit: plan.ExitUsage}
			}
			return runMachineAdd(cmd.Context(), s, &a)
		},
		ValidArgsFunction: fixed(),
	}
	sshFlags(cmd, &a.ssh, "; may be repeated")
	callFlags(cmd, &a.call, "prepares it")
	cmd.Flags().BoolVar(&a.call.cloudInit, "cloud-init", false, "print user data for cloud-init that prepares a new machine, and wait for it")
	fl := cmd.Flags()
	fl.StringVar(&a.group, "group", "worker", "`group` of the machines: control-plane or worker")
	fl.StringVar(&a.name, "name", "", "`name` of the machine's Node (default: its host name)")
	fl.StringVar(&a.address, "address", "", "`IP` address at which the other machines reach it (default: the one of --ssh)")
	fl.StringVar(&a.tpm, "tpm", "auto", "where a new key is: auto, none for a file, or the `address` of a TPM on the machine")
	fl.StringVar(&a.tpmRoots, "tpm-roots", "", "`folder` with certificates of TPM vendors; only machines with such a TPM are added")
	fl.StringArrayVar(&a.labels, "label", nil, "`key=value` of a label that the Node gets; may be repeated")
	fl.StringArrayVar(&a.taints, "taint", nil, "`key=value:Effect` of a taint that the Node gets; may be repeated")
	fl.BoolVar(&a.spare, "spare", false, "the machines are spares: they join the group when it needs them")
	fl.StringVar(&a.programs, "programs", "", "`folder` with bootstrapper and agent for the machine's architecture")
	fl.StringVar(&a.packages, "packages", "", "`folder` with Debian packages to install, for machines without a repository")
	fl.StringVar(&a.proxy, "proxy", "", "HTTP proxy, as a `URL`, for apt, containerd, bootstrapper and agent of the machines")
	fl.BoolVar(&a.rehearse, "dry-run", false, "show the changes and make none")
	fl.BoolVarP(&a.yes, "yes", "y", false, "make the changes without a prompt")
	_ = cmd.RegisterFlagCompletionFunc("group", fixed("control-plane", "worker"))
	_ = cmd.RegisterFlagCompletionFunc("tpm", fixed("auto", "none"))
	_ = cmd.RegisterFlagCompletionFunc("name", fixed())
	_ = cmd.RegisterFlagCompletionFunc("address", fixed())
	_ = cmd.RegisterFlagCompletionFunc("proxy", fixed())
	_ = cmd.RegisterFlagCompletionFunc("label", fixed())
	_ = cmd.RegisterFlagCompletionFunc("taint", fixed())
	_ = cmd.MarkFlagDirname("programs")
	_ = cmd.MarkFlagDirname("tpm-roots")
	_ = cmd.MarkFlagDirname("packages")
	outputFlag(cmd, &a.out, "output format: text, or json for one document")
	return cmd
}

// addReport is the document of `machine add -o json`.
type addReport struct {
	Schema  string    `json:"schema"`
	Time    time.Time `json:"time"`
	CLI     string    `json:"cli"`
	Cluster string    `json:"cluster"`
	DryRun  bool      `json:"dryRun,omitempty"`
	// Machines are in the order of --ssh.
	Machines []view.AddedMachine `json:"machines"`
	// Refused are calls that were refused, with --print-command or --cloud-init.
	Refused []callhome.Refusal `json:"refused,omitempty"`
}

// request validates the flags of machines with a login.
func (a *adding) request() ([]sshhost.Target, error) {
	targets, err := a.ssh.targets()
	if err != nil {
		return nil, err
	}
	if len(targets) > 1 && (a.name != "" || a.address != "") {
		return nil, badFlag(errors.New("--name and --address are of one machine, and --ssh names several"), "add this machine alone")
	}
	return targets, cmp.Or(a.invalid("--name"), a.invalid("--address"))
}

// addition is one run of `machine add`, by the verb or by the console.
type addition struct {
	*adding
	*inventory
	needs    machinecheck.Needs
	as       workspace.Machine // what all of them have in common
	targets  []sshhost.Target
	reach    sshhost.Options
	results  []machinecheck.Result // of the check
	rejoins  []bool                // which of them are nodes to reset
	machines []workspace.Machine   // as rows of the configuration
	batch    enrol.Batch
	report   addReport
	vendors  *x509.CertPool // of TPMs; nil: they are not verified

	connected enrol.Machine       // the only machine, if it called
	others    []workspace.Machine // that are added at the same time
}

// vendors reads the certificates of vendors of TPMs; nil without the flag.
func (a *adding) vendors() (*x509.CertPool, error) {
	if a.tpmRoots == "" {
		return nil, nil
	}
	return enrol.VendorRoots(a.tpmRoots)
}

// common validates the flags of all machines, and returns what they have in common as a row of the configuration.
func (a *adding) common() (m workspace.Machine, err error) {
	for _, flag := range []string{"--tpm", "--proxy", "--packages"} {
		if err := a.invalid(flag); err != nil {
			return m, err
		}
	}
	if m.Group, err = machinecheck.ParseRole(a.group); err != nil {
		return m, err
	}
	m.Spare = a.spare
	m.Labels, m.Taints, err = workspace.MachineSettings(a.labels, a.taints)
	return m, err
}

// begin validates flags and workspace. It writes nothing.
func (a *adding) begin(v *inventory, reach sshhost.Options) (*addition, error) {
	x := &addition{adding: a, inventory: v, reach: reach}
	var err error
	if x.targets, err = a.request(); err != nil {
		return nil, err
	}
	if x.as, err = a.common(); err != nil {
		return nil, err
	}
	if x.vendors, err = a.vendors(); err != nil {
		return nil, err
	}
	x.needs = a.needsOf(v.ws, x.as.Group)
	if _, err = x.ws.RehearseEnrolment(); err != nil {
		return nil, err
	}
	return x, nil
}

// needsOf are what the check of machines to add is for.
func (a *adding) needsOf(ws *workspace.Workspace, role workspace.Role) machinecheck.Needs {
	n := needsOf(ws, role)
	n.TPM = a.tpm
	return n
}

// check checks the machines. It returns an error if one cannot be added.
func (x *addition) check(ctx context.Context) (machinecheck.Report, error) {
	x.results = x.s.CheckMachines(ctx, machinecheck.Request{Targets: x.targets, SSH: x.reach, Needs: x.needs}, func(machinecheck.Result) {})
	return x.judge(ctx)
}

// judge returns an error if one of the checked machines cannot be added.
func (x *addition) judge(ctx context.Context) (machinecheck.Report, error) {
	r := machinecheck.Report{Schema: plan.Schema, Time: x.s.Now().UTC(), CLI: x.s.Release, Role: x.needs.Role, Machines: x.results}
	if ctx.Err() != nil {
		return r, context.Cause(ctx)
	}
	if err := x.meet(ctx); err != nil {
		return r, err
	}
	for i := range r.Machines {
		m := &r.Machines[i]
		if x.isMember(i) && (x.needs.Balancer == nil || x.needs.Role != controlPlane || x.connected != nil) {
			return r, &plan.Error{Op: m.Machine + " is a node of this cluster already; if its Node was deleted, repeat the command when the cluster answers", Exit: plan.ExitNothing}
		}
	}
	return r, machineVerdict(r.Machines)
}

// used are findings about a machine that is, or was becoming, a node.
var used = []string{"machine-member", "machine-half-initialised", "machine-claimed"}

// meet compares the checked machines with the nodes of the cluster, if it answers. A listed machine that was a node, and
// has neither a Node nor a ticket, rejoins: findings about its past do not stand in its way any more. It is an error if
// the cluster has a Node of the name of a machine that is not a node.
func (x *addition) meet(ctx context.Context) error {
	x.rejoins = make([]bool, len(x.results))
	list, err := x.ws.MachineList()
	if err != nil {
		return err
	}
	st, _ := x.status(ctx) // without an answer, machines stay as they are
	if ctx.Err() != nil || st == nil {
		return context.Cause(ctx)
	}
	for i := range x.results {
		r := &x.results[i]
		if r.Facts == nil {
			continue
		}
		name := x.nameOf(r)
		node := slices.ContainsFunc(st.Nodes, func(n cluster.Node) bool { return n.Name == name })
		joins := slices.ContainsFunc(st.Machines, func(m engine.Machine) bool { return m.Name == name && m.State == plan.NodeJoining })
		was := slices.ContainsFunc(r.Findings, func(f plan.Finding) bool { return slices.Contains(used, f.ID) })
		switch {
		case node && !was && r.Ready:
			return &plan.Error{
				Op: "add " + r.Machine, Err: fmt.Errorf("the cluster has the node %s, and this machine is none: it was reinstalled, or another machine has that name", name), Exit: plan.ExitBlocked,
				Remedy: fmt.Sprintf("if it was reinstalled, run `kubectl delete node %s`, then the same command again; otherwise choose another --name", name),
			}
		case node || joins || !was || !slices.ContainsFunc(list.Machines, func(m workspace.Machine) bool { return m.Name == name }):
			continue
		}
		x.rejoins[i] = true
		r.Findings = slices.Clone(r.Findings)
		for k := range r.Findings {
			if f := &r.Findings[k]; slices.Contains(used, f.ID) {
				f.Severity, f.Detail = plan.Warn, "its Node is not in the cluster: the machine is reset and joins again"
				f.Remedy, f.Command = "accept the changes, or leave the machine as it is", ""
			}
		}
		r.Ready = len(r.Blocked()) == 0
	}
	return nil
}

// nameOf is the name that a machine gets.
func (a *adding) nameOf(r *machinecheck.Result) string {
	return cmp.Or(a.name, strings.ToLower(r.Facts.HostName))
}

// compare reads what each of the checked machines lacks. Nothing is written before the changes are accepted.
func (x *addition) compare(ctx context.Context, step func(int, enrol.Step)) error {
	e, err := x.ws.RehearseEnrolment()
	if err != nil {
		return err
	}
	x.report = addReport{Schema: plan.Schema, Time: x.s.Now().UTC(), CLI: x.s.Release, Cluster: e.Cluster, DryRun: x.rehearse}
	if x.machines, err = x.rows(x.results, x.targets, x.as, e); err != nil {
		return err
	}
	if err := x.balanced(e); err != nil {
		return err
	}
	if x.batch, err = x.work(e); err != nil {
		return err
	}
	x.report.fill(x.results, x.machines)
	for i := range x.report.Machines {
		x.report.Machines[i].Member = x.isMember(i)
	}
	x.batch.Rehearse = true
	var failed error
	x.s.Enrol.Install(ctx, x.batch, step, func(i int, r enrol.Result) {
		x.report.Machines[i].Result(r)
		failed = cmp.Or(failed, r.Err)
	})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return failed
}

// install makes the changes, and writes each machine that is done into the configuration.
func (x *addition) install(ctx context.Context, step func(int, enrol.Step), done func(int, enrol.Result)) error {
	e, err := x.ws.Enrolment()
	if err != nil {
		return err
	}
	if x.batch, err = x.work(e); err != nil {
		return err
	}
	failed := x.inOrder(ctx, e, step, func(i int, r enrol.Result) error {
		if r.Err == nil && !x.batch.Jobs[i].Spec.Part {
			var m workspace.Machine
			if m, r.Err = x.machines[i].Pinned(r.Key.Hash, r.Key.Attested, r.Key.EK, r.Key.TPM); r.Err == nil {
				m.Vendor = r.Key.Vendor
				r.Err = x.ws.AddMachine(m)
			} else {
				r.Err = &plan.Error{Op: "add machine " + x.machines[i].Name, Err: r.Err, Remedy: "remove the folder of its identity, /var/lib/constellation-identity, and run the same command with --tpm none"}
			}
		}
		x.report.Machines[i].Result(r)
		done(i, r)
		return r.Err
	})
	if ctx.Err() != nil {
		return resumed(ctx, "add")
	}
	return x.failure(failed)
}

// failure is the error of machines that could not be added; nil if there is none.
func (x *addition) failure(failed error) error {
	bad := 0
	for _, m := range x.report.Machines {
		if m.Error != "" {
			bad++
		}
	}
	switch n := len(x.report.Machines); {
	case bad == 0:
		return nil
	case n == 1:
		return failed
	default:
		return &plan.Error{Op: "add " + words.Count(n, "machine"), Err: fmt.Errorf("%d of them could not be added: %w", bad, failed), Remedy: "run the same command again when that is mended; machines that are done are not changed again"}
	}
}

// runMachineAdd runs `machine add`.
func runMachineAdd(ctx context.Context, s *session, a *adding) error {
	live := &enrolTable{t: s.liveTable(), names: a.ssh.machines}
	v, err := inventoryOf(s)
	if err != nil {
		return err
	}
	x, err := a.begin(v, a.ssh.options(s, live.around))
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	live.all("checking")
	checked, err := x.check(ctx)
	live.clear()
	if ctx.Err() != nil {
		return err
	}
	if err := a.verdict(s, checked, err); err != nil {
		return err
	}
	live.all("comparing")
	err = x.compare(ctx, live.step)
	live.clear()
	if err != nil {
		if a.out == asJSON && ctx.Err() == nil && len(x.report.Machines) > 0 {
			if err := document(s.out, x.report); err != nil {
				return err
			}
		}
		return err
	}
	if a.rehearse {
		return a.print(s, &x.report, nil)
	}
	if err := a.confirm(s, &x.report); err != nil {
		return err
	}
	live.names = nil
	for _, m := range x.machines {
		live.names = append(live.names, m.Name)
	}
	live.all("waiting")
	err = x.install(ctx, live.step, live.done)
	live.clear()
	if ctx.Err() != nil {
		return err
	}
	return a.print(s, &x.report, err)
}

// resumed is the error of an interrupted change of machines.
func resumed(ctx context.Context, verb string) error {
	cause := context.Cause(ctx)
	return &plan.Error{Op: verb + " machines", Err: cause, Exit: plan.ExitCode(cause), Remedy: "run the same command again: it continues, and repeats no finished step"}
}

// verdict prints the findings of a check whose error is err, and returns err.
func (a *adding) verdict(s *session, report machinecheck.Report, err error) error {
	results := report.Machines
	if plan.ExitCode(err) == plan.ExitNothing {
		return err
	}
	warned := slices.ContainsFunc(results, func(r machinecheck.Result) bool {
		return slices.ContainsFunc(r.Findings, func(f plan.Finding) bool { return f.Severity == plan.Warn })
	})
	switch {
	case a.out == asJSON && err != nil:
		if err := document(s.out, report); err != nil {
			return err
		}
	case a.out != asJSON && (err != nil || warned) && (len(results) != 1 || results[0].Err == nil):
		s.print(append(view.MachineReport(s.page(), s.answerWidth(), &report), ""))
	}
	return err
}

// rows returns the machines as rows of the configuration.
func (a *adding) rows(results []machinecheck.Result, targets []sshhost.Target, as workspace.Machine, e *workspace.Enrolment) ([]workspace.Machine, error) {
	var out []workspace.Machine
	for i := range results {
		r := &results[i]
		address, err := ownAddress(targets[i], r.Facts, a.address, e.Balancer)
		if err != nil {
			return nil, err
		}
		m := as
		m.Name, m.Address = a.nameOf(r), address.String()
		for _, x := range append(slices.Clone(out), e.Machines...) {
			if x.Name == m.Name && x.Address == m.Address && x.Group == m.Group {
				if m, err = workspace.WithSettings(x, m); err != nil {
					return nil, err
				}
				continue
			}
			if x.ProviderID = ""; x.Name == m.Name || x.Address == m.Address {
				return nil, &plan.Error{
					Op: "add " + r.Machine, Err: fmt.Errorf("it would be %s with address %s and group %s, and there is %s with address %s and group %s", m.Name, m.Address, m.Group, x.Name, x.Address, x.Group), Exit: plan.ExitUsage,
					Remedy: "choose another --name or --address, or remove that machine first: `constellation machine remove " + x.Name + " --ssh USER@HOST`",
				}
			}
		}
		out = append(out, m)
	}
	return out, nil
}

// ownAddress is the address of a machine for the others: the given one, that of --ssh, or its only one.
func ownAddress(t sshhost.Target, f *machinecheck.Facts, given string, balancer *workspace.Balancer) (netip.Addr, error) {
	var own []netip.Addr
	var names []string
	for _, p := range f.Addresses {
		if balancer != nil && p.Addr() == balancer.Address {
			continue // it moves
		}
		own, names = append(own, p.Addr()), append(names, p.Addr().String())
	}
	want, named := netip.Addr{}, ""
	if given != "" {
		want, named = netip.MustParseAddr(given), "--address "+given
	} else if ip, err := netip.ParseAddr(t.Host); err == nil {
		want = ip
	}
	switch {
	case want.IsValid() && slices.Contains(own, want):
		return want, nil
	case named == "" && len(own) == 1:
		return own[0], nil
	case named == "":
		named = "the host of --ssh"
	}
	return netip.Addr{}, &plan.Error{
		Op: "add " + t.String(), Err: fmt.Errorf("%s is no address of the machine, which has %s", named, cmp.Or(words.And(names), "none")), Exit: plan.ExitUsage,
		Remedy: "name the one at which the other machines reach it: --address IP",
	}
}

// work returns the work of the enrolment.
func (x *addition) work(e *workspace.Enrolment) (enrol.Batch, error) {
	// Each machine also gets the addresses of those that are added with it.
	all := *e
	all.Machines = slices.Clone(e.Machines)
	for _, m := range slices.Concat(x.machines, x.others) {
		if !slices.ContainsFunc(all.Machines, func(o workspace.Machine) bool { return o.Name == m.Name }) {
			all.Machines = append(all.Machines, m)
		}
	}
	issuer := *e.Authority
	issuer.EKRoots = x.vendors
	b := enrol.Batch{Connected: x.connected, SSH: x.reach, Who: enrol.Self(x.s.Env), Now: x.s.Now}
	for i, m := range x.machines {
		programs, err := x.s.Enrol.Programs(x.programs, x.s.Release, x.results[i].Facts.Arch)
		if err != nil {
			return b, err
		}
		files, err := all.Files(m)
		if err != nil {
			return b, err
		}
		id, err := all.Identity(m)
		if err != nil {
			return b, err
		}
		spec := enrol.Spec{Cluster: e.UID, ClusterName: e.Cluster, Machine: m.Name, Release: x.s.Release}
		for _, o := range all.Machines {
			if o.Name != m.Name {
				spec.Others = append(spec.Others, o.Name)
			}
		}
		for _, f := range files {
			spec.Files = append(spec.Files, enrol.File{Path: f.Path, Mode: f.Mode, Data: f.Data})
		}
		if x.packages != "" {
			if spec.Debs, err = enrol.PackageFiles(x.packages, x.results[i].Facts.Arch); err != nil {
				return b, err
			}
		}
		if spec.Proxy = x.proxy; x.proxy != "" {
			except, err := x.direct(all.Machines, i)
			if err != nil {
				return b, err
			}
			spec.Files = append(spec.Files, enrol.Proxy(x.proxy, except)...)
		}
		if x.isMember(i) {
			spec.Files, spec.Part = nil, true
		} else if spec, err = enrol.Node(spec, programs); err != nil {
			return b, err
		}
		if spec, err = withBalancer(spec, &all, m, x.results[i].Facts); err != nil {
			return b, err
		}
		if spec.Part {
			b.Jobs = append(b.Jobs, enrol.Job{Target: x.targets[i], Spec: spec})
			continue
		}
		b.Jobs = append(b.Jobs, enrol.Job{Target: x.targets[i], Spec: spec, Authority: &issuer, Identity: id, TPM: x.tpm, Rejoin: x.rejoins[i], Accept: func(k enrol.Key) error { return e.CheckKey(m.Name, k.Hash, k.EK) }})
	}
	return b, nil
}

// direct are the destinations that machine i reaches without its proxy: the cluster's.
func (x *addition) direct(list []workspace.Machine, i int) ([]string, error) {
	c, err := x.ws.Config()
	if err != nil {
		return nil, err
	}
	out := []string{c.Provider.Section.Text("endpoint")}
	if b := x.needs.Balancer; b != nil && b.Address.String() != out[0] {
		out = append(out, b.Address.String())
	}
	for _, p := range []netip.Prefix{c.PodCIDR, c.ServiceCIDR} {
		if p.IsValid() {
			out = append(out, p.String())
		}
	}
	for _, p := range x.results[i].Facts.Addresses {
		out = append(out, p.Masked().String())
	}
	for _, m := range list {
		out = append(out, m.Address)
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

func (r *addReport) fill(results []machinecheck.Result, list []workspace.Machine) {
	for i, m := range list {
		r.Machines = append(r.Machines, view.AddedMachine{Machine: results[i].Machine, Name: m.Name, Address: m.Address, Group: string(m.Group), Spare: m.Spare, Labels: m.Labels, Taints: m.Taints, HostKey: results[i].HostKey, Findings: results[i].Findings})
	}
}

// confirm shows the changes and returns an error unless the user wants them.
func (a *adding) confirm(s *session, r *addReport) error {
	if a.out != asJSON {
		s.print(view.MachineChanges(s.page(), s.answerWidth(), r.Machines, false))
	}
	op := "add " + words.Count(len(r.Machines), "machine")
	switch {
	case a.yes || !slices.ContainsFunc(r.Machines, func(m view.AddedMachine) bool { return len(m.Changes) > 0 }):
		return nil
	case a.out == asJSON || a.ssh.nonInteractive || !s.asks():
		if a.out == asJSON {
			if err := document(s.out, r); err != nil {
				return err
			}
		}
		return &plan.Error{Op: op, Err: errors.New("the changes were not accepted; nothing was changed on the machines"), Remedy: "read them with --dry-run, then run the same command with --yes", Exit: plan.ExitUnacknowledged}
	case !s.prompt().confirmed(fmt.Sprintf("Make these changes on %s?", words.Count(len(r.Machines), "machine"))):
		return &plan.Error{Op: op, Err: errors.New("the changes were not accepted; nothing was changed on the machines"), Exit: plan.ExitUnacknowledged}
	}
	return nil
}

// print prints the result of a run or of a rehearsal, and returns failed.
func (a *adding) print(s *session, r *addReport, failed error) error {
	switch {
	case a.out == asJSON:
		if err := document(s.out, r); err != nil {
			return err
		}
	case r.DryRun:
		s.print(view.MachineChanges(s.page(), s.answerWidth(), r.Machines, true))
	default:
		s.print(view.MachinesAdded(s.page(), s.answerWidth(), r.Machines))
		if failed == nil {
			fmt.Fprintf(s.out, "next  %s\n", s.command("init"))
		}
	}
	return failed
}

// enrolTable is the live table of several machines.
type enrolTable struct {
	mu    sync.Mutex
	t     term.LiveTable
	names []string
	texts []string
}

// all sets the text of all machines.
func (e *enrolTable) all(text string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.names = slices.Clone(e.names)
	e.texts = make([]string, len(e.names))
	for i := range e.texts {
		e.texts[i] = text
	}
	e.draw()
}

func (e *enrolTable) draw() {
	if len(e.texts) == 0 {
		return
	}
	width := 0
	for _, n := range e.names {
		width = max(width, term.Width(term.Clean(n)))
	}
	lines := make([]string, len(e.texts))
	for i, t := range e.texts {
		n := term.Clean(e.names[i])
		lines[i] = n + strings.Repeat(" ", width-term.Width(n)+2) + term.Clean(t)
	}
	e.t.Set(lines)
}

func (e *enrolTable) step(i int, s enrol.Step) {
	e.mu.Lock()
	defer e.mu.Unlock()
	text := s.Title
	if s.Total > 0 {
		text = fmt.Sprintf("%d/%d  %s", min(s.Done+1, s.Total), s.Total, s.Title)
	}
	e.texts[i] = text
	e.draw()
}

func (e *enrolTable) done(i int, r enrol.Result) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.texts[i] = "done"
	if r.Err != nil {
		e.texts[i] = "failed: " + r.Err.Error()
	}
	e.draw()
}

func (e *enrolTable) clear() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.t.Clear()
	e.texts = nil
}

// around shows a prompt in place of the table.
func (e *enrolTable) around(prompt func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.t.Clear()
	prompt()
	e.draw()
}
