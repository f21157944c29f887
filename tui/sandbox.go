package tui

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"constellation/engine"
)

func (s *session) sandboxCommand() *cobra.Command {
	cmd := group("sandbox", "Run a throwaway cloud on this computer",
		`Run a throwaway cloud on this computer: machines with systemd, containerd and a TPM
each, a load balancer, an image registry, and the cloud API that a cluster needs. No
account and no network are needed. Real machines need Linux and root; without, they are
simulated: the same control plane and services as plain processes.

With --hollow machines are simulated instead, up to thousands of them, as nodes of a
cluster that is real but for that. It takes no root, and is made to watch rollouts.

A sandbox belongs to the workspace that it was started for.`,
		`  constellation -C demo sandbox up
  constellation -C demo sandbox shell worker-0
  constellation -C demo sandbox down
  constellation -C many sandbox up --hollow 500`)
	cmd.AddCommand(s.sandboxUp(), s.sandboxStatus(), s.sandboxDown(), s.sandboxShell(), s.sandboxMachine(), s.sandboxFault(), s.sandboxDrill(), s.sandboxFetch(), s.sandboxDaemon())
	return cmd
}

// sandboxName returns what the methods of engine.Sandbox take: a name, or the
// workspace that stands for its sandbox.
func (s *session) sandboxName(name string) (string, error) {
	if name != "" {
		return name, nil
	}
	dir, err := filepath.Abs(s.dir)
	if err != nil {
		return "", &engine.Error{Op: "open workspace " + s.dir, Err: err, Exit: engine.ExitUsage}
	}
	return dir, nil
}

func (s *session) nameFlag(cmd *cobra.Command, name *string) {
	cmd.Flags().StringVar(name, "name", "", "name of the sandbox (default: that of the workspace)")
	_ = cmd.RegisterFlagCompletionFunc("name", fixed())
}

// noFaults is the fault that ends all others.
const noFaults = "none"

func (s *session) sandboxUp() *cobra.Command {
	var (
		spec   engine.SandboxSpec
		hollow int
		out    format
	)
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start the sandbox of this workspace, or change its size",
		Long: `Start the sandbox of this workspace and wait for its machines to boot. Where they are
absent it writes constellation-conf.yaml and constellation-state.yaml, so that init can
follow. If the sandbox runs already, its groups get the sizes that are asked for, and
the faults that are asked for take the place of those that it has.

Machines are real where they can be, else simulated, and why is said; --machines decides
it. All that is told of simulated machines calls them so.

Debian packages that this computer lacks are named and installed only after a question,
or without one with --yes.

With --hollow the workers are simulated, and so are the control planes, three if nothing
else is asked for: nothing runs in them, they take the times that they are told, and what
happens to them is seen in the cluster alone. That is complete when the command ends: etcd,
API server, controllers, scheduler and operator are the real programs, as plain processes
of this user. Every worker has a pod. constellation-admin.conf leads to it. All of it ends
with the sandbox's daemon; up makes a new one then.`,
		Example: `  constellation sandbox up
  constellation -C demo sandbox up --control-planes 3 --workers 2 --yes
  constellation sandbox up --release v1.0.0 --image v1.0.0
  constellation sandbox up --machines simulated
  constellation sandbox up --fault boot-delay=worker-1:30s --fault api-429=0.2
  constellation -C many sandbox up --hollow 500 --image v1.0.0
  constellation -C many sandbox up --hollow 1000 --boot 20s --join 5s --drain 10s
  constellation -C many sandbox up --fault never-join=0.05 --fault lost-delete=0.1`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("hollow") {
				if hollow < 1 {
					return &engine.Error{
						Op: "start sandbox", Err: fmt.Errorf("--hollow is %d, want 1 or more", hollow), Exit: engine.ExitUsage,
						Remedy: "say how many workers shall be simulated, or leave the flag out",
					}
				}
				spec.Machines = "hollow"
			}
			// Nobody asks for "none" with a zero that was left out.
			for flag, n := range map[string]*int{"control-planes": &spec.ControlPlanes, "workers": &spec.Workers} {
				switch changed := cmd.Flags().Changed(flag); {
				case *n < 0:
					return &engine.Error{
						Op: "start sandbox", Err: fmt.Errorf("--%s is %d, want 0 or more", flag, *n), Exit: engine.ExitUsage,
						Remedy: "ask for a number of machines that this computer can run, or leave the flag out",
					}
				case changed && *n == 0:
					*n = -1
				case !changed:
					*n = 0
				}
			}
			if spec.ControlPlanes < 0 {
				return &engine.Error{
					Op: "start sandbox", Err: errors.New("--control-planes is 0, and a cluster needs one"), Exit: engine.ExitUsage,
					Remedy: "ask for 1 or more, or leave the flag out",
				}
			}
			if hollow > 0 {
				spec.Workers = hollow
			}
			return s.upSandbox(cmd.Context(), spec, out)
		},
	}
	f := cmd.Flags()
	f.IntVar(&spec.ControlPlanes, "control-planes", 1, "how many control planes (hollow: 3)")
	f.IntVar(&spec.Workers, "workers", 2, "how many workers")
	f.IntVar(&hollow, "hollow", 0, "simulate so `many` workers, instead of real machines")
	f.DurationVar(&spec.Boot, "boot", 0, "how long a hollow machine boots (default 5s)")
	f.DurationVar(&spec.Join, "join", 0, "how long it takes from there to a Ready node (default 1s)")
	f.DurationVar(&spec.Drain, "drain", 0, "how long its pods take to end (default 3s)")
	cmd.MarkFlagsMutuallyExclusive("hollow", "workers")
	f.StringVar(&spec.Kubernetes, "kubernetes", "", "version of Kubernetes (default "+first(s.Kubernetes)+")")
	f.StringVar(&spec.Image, "image", "", "version of the OS image (default: the release)")
	f.StringVar(&spec.Release, "release", "", "release that init will deploy (default "+s.Release+")")
	f.StringVar(&spec.Machines, "machines", "auto", "auto, real or simulated: auto takes real ones where there can be any, and says why not")
	_ = cmd.RegisterFlagCompletionFunc("machines", fixed("auto", "real", "simulated"))
	f.StringArrayVar(&spec.Faults, "fault", nil, "what the cloud shall do wrong, such as never-boot=worker-1; may be repeated; "+noFaults+" ends those that there are")
	f.BoolVarP(&spec.Install, "yes", "y", false, "install missing Debian packages without asking")
	s.nameFlag(cmd, &spec.Name)
	s.outputFlag(cmd, &out, "what to print: text, or json for one event per line")
	_ = cmd.RegisterFlagCompletionFunc("kubernetes", fixed(s.Kubernetes...))
	_ = cmd.RegisterFlagCompletionFunc("image", fixed(s.Images...))
	_ = cmd.RegisterFlagCompletionFunc("release", fixed(s.Releases...))
	_ = cmd.RegisterFlagCompletionFunc("fault", fixed(append([]string{noFaults}, s.Faults...)...))
	return cmd
}

func (s *session) upSandbox(ctx context.Context, spec engine.SandboxSpec, f format) error {
	_, dir, err := s.newWorkspace()
	if err != nil {
		return err
	}
	spec.Workspace = dir
	if slices.Equal(spec.Faults, []string{noFaults}) {
		spec.Faults = []string{}
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	box, err := s.Sandbox(s.log)
	if err != nil {
		return err
	}
	for {
		out := s.printer(f, true)
		stream := s.framed(out, "sandbox")
		info, err := box.Up(ctx, spec, stream.event)
		if engine.ExitCode(err) == engine.ExitUnacknowledged && f == text && !spec.Install && s.asks() {
			out.close()
			if !s.ask(err) {
				return err
			}
			spec.Install = true
			continue
		}
		kind, next := marked(info.Simulated, ", "), []string{s.command("init")}
		if info.Hollow {
			kind, next = " (hollow: all machines are simulated)", s.afterHollow(info)
		}
		stream.end(fmt.Sprintf("sandbox %s: %s, %s, Kubernetes %s, image %s%s", info.Name, count(info.ControlPlanes, "control plane"),
			count(info.Workers, "worker"), info.Kubernetes, info.Image, kind), err, engine.Result{Next: next})
		out.close()
		return err
	}
}

// afterHollow are the commands that make sense with hollow machines: to look, and to give
// them another target.
func (s *session) afterHollow(info engine.SandboxInfo) []string {
	next := []string{s.command("watch"), s.command("status")}
	if i := slices.IndexFunc(s.Images, func(v string) bool { return v != info.Image }); i >= 0 {
		next = append(next, fmt.Sprintf("kubectl --kubeconfig %s patch nodeversion constellation-version --type merge -p '{\"spec\":{\"image\":\"sandboxes/%s/images/%s\",\"imageVersion\":\"%s\"}}'",
			quoteArg(filepath.Join(s.dir, "constellation-admin.conf")), info.Name, s.Images[i], s.Images[i]))
	}
	return next
}

// asks reports whether there is somebody to ask.
func (s *session) asks() bool {
	return isTerminal(s.Stdin) && isTerminal(s.Stdout) && s.Env("CI") == ""
}

// ask tells what is missing and asks whether to do something about it. No is the
// default.
func (s *session) ask(err error) bool {
	x := explain(err, s.speller())
	fmt.Fprintf(s.Stderr, "\n%s\n", orElse(x.why, x.what))
	if x.remedy != "" {
		fmt.Fprintf(s.Stderr, "  %s\n", x.remedy)
	}
	return s.confirmed("Install them now?")
}

// confirmed asks a question. No is the default.
func (s *session) confirmed(question string) bool {
	if f, ok := s.Stdin.(*os.File); ok {
		dropTyped(f)
	}
	fmt.Fprintf(s.Stderr, "%s [y/N] ", question)
	line, err := bufio.NewReader(s.Stdin).ReadString('\n')
	answer := strings.ToLower(strings.TrimSpace(line))
	return err == nil && (answer == "y" || answer == "yes")
}

func (s *session) sandboxDown() *cobra.Command {
	var (
		name string
		out  format
	)
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Remove the sandbox and all that it left on this computer",
		Long: `Remove the sandbox of this workspace: its machines, its cloud, their networks, mounts
and files. What is left of one that crashed is removed as well. It is no error if there
is none.

The files of the workspace that belong to you stay.`,
		Example: `  constellation sandbox down
  constellation sandbox down --name demo`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			name, err := s.sandboxName(name)
			if err != nil {
				return err
			}
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			box, err := s.Sandbox(s.log)
			if err != nil {
				return err
			}
			p := s.printer(out, true)
			defer p.close()
			stream := s.framed(p, "sandbox")
			err = box.Down(ctx, name, stream.event)
			stream.end("the sandbox is gone", err, engine.Result{})
			return err
		},
	}
	s.nameFlag(cmd, &name)
	cmd.Flags().BoolP("yes", "y", false, "nothing is asked anyway; taken so that up and down can be called alike")
	s.outputFlag(cmd, &out, "what to print: text, or json for one event per line")
	return cmd
}

func (s *session) sandboxStatus() *cobra.Command {
	var (
		name string
		out  format
	)
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the sandbox and its machines",
		Long:  "Show the sandbox of this workspace: what it was made for, its endpoints, and how its machines boot.",
		Example: `  constellation sandbox status
  constellation sandbox status -o json | jq '.machines[] | {name, boot}'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			name, err := s.sandboxName(name)
			if err != nil {
				return err
			}
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			box, err := s.Sandbox(s.log)
			if err != nil {
				return err
			}
			st, err := box.Status(ctx, name)
			if err != nil {
				return err
			}
			if out == asJSON {
				return document(s.out, struct {
					Schema string `json:"schema"`
					engine.SandboxStatus
				}{engine.Schema, st})
			}
			s.print(s.sandboxText(&st))
			return nil
		},
	}
	s.nameFlag(cmd, &name)
	s.outputFlag(cmd, &out, "what to print: text, or json for one document")
	return cmd
}

// sandboxText draws a sandbox on any number of lines.
func (s *session) sandboxText(st *engine.SandboxStatus) []string {
	c := s.sheet()
	w := sheetWidth
	t := c.th
	lines := []string{
		t.row(w).add(plain, "sandbox "+clean(st.Name)+"   "+clean(st.State)+marked(st.Simulated, "   ")).String(),
		t.row(w).add(plain, "  ").col(faint, "Kubernetes", 12).col(plain, clean(st.Kubernetes), 22).col(faint, "API server", 12).add(plain, clean(st.ClusterEndpoint)).String(),
	}
	image, release := t.row(w).add(plain, "  ").col(faint, "OS image", 12), t.row(w).add(plain, "  ").col(faint, "Release", 12)
	if st.Hollow { // there is nothing to init, and nothing to get from a mirror
		lines = append(lines, image.add(plain, clean(st.Image)).String(), release.add(plain, clean(st.Release)).String())
	} else {
		lines = append(lines, image.col(plain, clean(st.Image), 22).col(faint, "init", 12).add(plain, clean(st.InitEndpoint)).String(),
			release.col(plain, clean(st.Release), 22).col(faint, "mirror has", 12).add(plain, clean(strings.Join(st.KubernetesVersions, " "))).String())
	}
	switch {
	case st.Hollow && st.State == "stopped":
		lines = append(lines, t.row(w).add(plain, "  ").col(faint, "stopped", 12).add(caution, "with its daemon all hollow machines and their cluster have ended; `"+s.command("sandbox up")+"` makes new ones").String())
	case st.Hollow:
		lines = append(lines, t.row(w).add(plain, "  ").col(faint, "hollow", 12).add(caution, "its machines are simulated: nothing runs in them").String())
	case st.State == "stopped":
		lines = append(lines, t.row(w).add(plain, "  ").col(faint, "stopped", 12).add(caution, "nobody drives its machines; `"+s.command("sandbox up")+"` starts the cloud again and keeps them").String())
	}
	for _, f := range st.Faults {
		lines = append(lines, t.row(w).add(plain, "  ").col(faint, "fault", 12).add(caution, clean(f)).String())
	}
	if st.Hollow {
		lines = append(lines, t.rule(w, fmt.Sprintf("Hollow machines %d", len(st.Machines)), ""))
		return append(lines, s.hollowRows(st)...)
	}
	lines = append(lines, t.rule(w, fmt.Sprintf("Machines %d", len(st.Machines)), ""))
	for _, m := range st.Machines {
		sign, sty := t.pending, faint
		switch m.Boot {
		case "ready":
			sign, sty = t.ok, good
		case "failed":
			sign, sty = t.fail, bad
		case "stopped":
			sign, sty = t.stopped, caution
		}
		lines = append(lines, t.row(w).add(plain, " ").add(sty, sign).add(plain, " ").col(plain, clean(m.Name), 18).col(sty, clean(m.Boot), 9).
			col(plain, clean(m.Group), 14).col(plain, clean(m.IP), 15).col(plain, clean(m.Image), 8).add(faint, clean(m.Message)).String())
		if (m.Boot == "failed" || m.Boot == "stopped") && m.Console != "" {
			lines = append(lines, t.row(w).pad(3).col(faint, "console", 18).add(plain, clean(m.Console)).String())
		}
	}
	return lines
}

// hollowRows counts machines that differ in nothing but their names.
func (s *session) hollowRows(st *engine.SandboxStatus) []string {
	t := s.sheet().th
	type kind struct{ group, boot, image string }
	counts := map[kind]int{}
	var kinds []kind
	for _, m := range st.Machines {
		k := kind{m.Group, m.Boot, m.Image}
		if counts[k] == 0 {
			kinds = append(kinds, k)
		}
		counts[k]++
	}
	var lines []string
	for _, k := range kinds {
		sign, sty := t.pending, faint
		switch k.boot {
		case "ready":
			sign, sty = t.ok, good
		case "stopped":
			sign, sty = t.stopped, caution
		}
		lines = append(lines, t.row(sheetWidth).add(plain, " ").add(sty, sign).add(plain, " ").col(plain, fmt.Sprint(counts[k]), 7).col(sty, clean(k.boot), 9).
			col(plain, clean(k.group), 16).add(plain, clean(k.image)).String())
	}
	return lines
}

func (s *session) sandboxShell() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "shell MACHINE [-- COMMAND...]",
		Short: "Look inside a machine",
		Long: `Open a shell in a machine of the sandbox, or run one command there. The exit code is
that of the shell or the command.`,
		Example: `  constellation sandbox shell control-plane-0
  constellation sandbox shell worker-0 -- journalctl -u constellation-bootstrapper`,
		Args: func(cmd *cobra.Command, args []string) error {
			switch dash := cmd.ArgsLenAtDash(); {
			case len(args) == 0 || dash == 0:
				return errors.New("name a machine")
			case dash < 0 && len(args) > 1 || dash > 1:
				return errors.New("write -- before the command")
			}
			return nil
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveDefault
			}
			return s.machineNames(cmd.Context(), name), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			box, err := s.sandboxName(name)
			if err != nil {
				return err
			}
			return s.shell(cmd.Context(), box, args[0], args[1:])
		},
	}
	s.nameFlag(cmd, &name)
	return cmd
}

// machineNames are the machines of a sandbox, for completion.
func (s *session) machineNames(ctx context.Context, name string) []string {
	name, err := s.sandboxName(name)
	if err != nil {
		return nil
	}
	box, err := s.Sandbox(s.log)
	if err != nil {
		return nil
	}
	st, err := box.Status(ctx, name)
	if err != nil {
		return nil
	}
	var names []string
	for _, m := range st.Machines {
		names = append(names, clean(m.Name))
	}
	slices.Sort(names)
	return names
}

func (s *session) shell(ctx context.Context, name, machine string, command []string) error {
	box, err := s.Sandbox(s.log)
	if err != nil {
		return err
	}
	tty := isTerminal(s.Stdin) && isTerminal(s.Stdout)
	if tty {
		// The shell inside does the editing, and Ctrl-C is for it.
		restore, err := raw(s.Stdin.(*os.File))
		if err != nil {
			return &engine.Error{Op: "set up the terminal", Err: err}
		}
		defer restore()
	}
	code, err := box.Exec(ctx, name, machine, command, s.Stdin, s.Stdout, s.Stderr, tty)
	if err != nil {
		return err
	}
	if code != 0 {
		return exitStatus(code)
	}
	return nil
}

func (s *session) sandboxFetch() *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use:   "fetch [VERSION]",
		Short: "Build Kubernetes into the cache",
		Long: `Build the binaries and images of a version of Kubernetes from their source modules into
the cache. It takes some minutes once and an instant afterwards. No other verb compiles
anything.`,
		Example:           "  constellation sandbox fetch\n  constellation sandbox fetch " + strings.Join(s.Kubernetes[min(1, len(s.Kubernetes)):], " "),
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: fixed(s.Kubernetes...),
		RunE: func(cmd *cobra.Command, args []string) error {
			version := first(s.Kubernetes)
			if len(args) > 0 {
				version = args[0]
			}
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			box, err := s.Sandbox(s.log)
			if err != nil {
				return err
			}
			p := s.printer(out, true)
			defer p.close()
			stream := s.framed(p, "Kubernetes "+version)
			err = box.Fetch(ctx, version, stream.event)
			stream.end("Kubernetes "+version+" is in the cache", err, engine.Result{})
			return err
		},
	}
	s.outputFlag(cmd, &out, "what to print: text, or json for one event per line")
	return cmd
}

func (s *session) sandboxDaemon() *cobra.Command {
	return &cobra.Command{
		Use:    "daemon NAME",
		Short:  "Run a sandbox in the foreground; sandbox up does that by itself",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			s.level.Set(min(s.level.Level(), slog.LevelInfo)) // nobody watches it: its log is all there is
			return s.Daemon(ctx, args[0], s.log)
		},
	}
}
