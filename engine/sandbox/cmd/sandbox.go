package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/sandboxapi/sandboxexec"
	"constellation/engine/plan"
	"constellation/engine/sandbox/build"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui"
	"constellation/tui/term"
	"constellation/tui/view"
)

func (v *verbs) sandboxCommand() *cobra.Command {
	cmd := tui.Group("sandbox", "Run a local test cloud on this computer",
		`Run a local test cloud on this computer: machines with systemd, containerd and a TPM, a
load balancer, an image registry, and the cloud API that a cluster needs. It needs no cloud
account and, after sandbox fetch, no network. Real machines need Linux and root. Without these, machines are
simulated: the same control plane and services run as plain processes.

With --hollow, all machines are fake (like kubemark's hollow nodes), up to thousands of
them, in a cluster with a real control plane. It needs no root. Use it to watch rollouts.

A sandbox belongs to the workspace that it was started for.`,
		`  constellation -C demo sandbox up
  constellation -C demo sandbox shell worker-0
  constellation -C demo sandbox down
  constellation -C many sandbox up --hollow 500`)
	cmd.AddCommand(v.sandboxUp(), v.sandboxStatus(), v.sandboxDown(), v.sandboxShell(), v.sandboxMachine(), v.sandboxFault(), v.sandboxDrill(), v.sandboxFetch(), v.sandboxFind(), v.sandboxDaemon())
	return cmd
}

// sandboxName returns the argument for the methods of engine.Sandbox: the given name, or
// the absolute path of the workspace, which identifies its sandbox.
func (v *verbs) sandboxName(name string) (string, error) {
	if name != "" {
		return name, nil
	}
	dir, err := filepath.Abs(v.Dir())
	if err != nil {
		return "", &plan.Error{Op: "open workspace " + v.Dir(), Err: err, Exit: plan.ExitUsage}
	}
	return dir, nil
}

// withSandbox calls do with the sandboxes and a context that ends with a signal.
func (v *verbs) withSandbox(ctx context.Context, do func(ctx context.Context, box engine.Sandbox) error) error {
	ctx, stop := v.Signals(ctx)
	defer stop()
	box, err := v.sandbox(v.Log())
	if err != nil {
		return err
	}
	return do(ctx, box)
}

// withNamed does so too, with the argument for methods that take the name of a sandbox.
func (v *verbs) withNamed(ctx context.Context, name string, do func(ctx context.Context, box engine.Sandbox, name string) error) error {
	name, err := v.sandboxName(name)
	if err != nil {
		return err
	}
	return v.withSandbox(ctx, func(ctx context.Context, box engine.Sandbox) error { return do(ctx, box, name) })
}

func (v *verbs) nameFlag(cmd *cobra.Command, name *string) {
	cmd.Flags().StringVar(name, "name", "", "name of the sandbox (default: the sandbox of the workspace)")
	_ = cmd.RegisterFlagCompletionFunc("name", tui.Fixed())
}

// noFaults is the value of --fault that removes all faults.
const noFaults = "none"

func (v *verbs) sandboxUp() *cobra.Command {
	var (
		spec   engine.SandboxSpec
		hollow int
		out    tui.Format
	)
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start or resize the sandbox of this workspace",
		Long: `Start the sandbox of this workspace and wait for its machines to boot. The command writes
constellation-conf.yaml and constellation-state.yaml if they are missing; run init next.
If the sandbox is running, the command resizes its groups, and replaces its faults if
--fault is given.

Machines are real if this computer can run them, otherwise simulated; the command prints
the reason. --machines selects the kind. All output about simulated machines marks them as
simulated.

With --cloud gcp, the machines are in an emulated Google Cloud: the console and the services
use them through Google's client of Compute Engine and a metadata server. Nothing leaves
this computer. These machines are simulated, unless --machines real is given.

If Debian packages are missing, the command lists them and prompts before it installs them;
--yes installs them without a prompt.

With --hollow, all workers and control planes (three by default) are fake: nothing runs in
them, and they boot, join and drain with the configured delays. The cluster is up when the
command ends. etcd, the API server, controllers, scheduler and operator are the real
programs, run as plain processes of this user. Every worker has one pod. The kubeconfig is
constellation-admin.conf. The cluster ends with the sandbox's daemon; up then creates a
new one.`,
		Example: `  constellation sandbox up
  constellation -C demo sandbox up --control-planes 3 --workers 2 --yes
  constellation sandbox up --release v1.0.0 --image v1.0.0
  constellation sandbox up --machines simulated
  constellation -C google sandbox up --cloud gcp --machines simulated
  constellation sandbox up --fault boot-delay=worker-1:30s --fault api-429=0.2
  constellation -C many sandbox up --hollow 500 --image v1.0.0
  constellation -C many sandbox up --hollow 1000 --boot 20s --join 5s --drain 10s
  constellation -C many sandbox up --fault never-join=0.05 --fault lost-delete=0.1`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("hollow") {
				if hollow < 1 {
					return &plan.Error{
						Op: "start sandbox", Err: fmt.Errorf("--hollow is %d, want 1 or more", hollow), Exit: plan.ExitUsage,
						Remedy: "pass the number of workers to simulate, or omit the flag",
					}
				}
				spec.Machines = "hollow"
			}
			// In a SandboxSpec 0 means the default and -1 means none.
			for flag, n := range map[string]*int{"control-planes": &spec.ControlPlanes, "workers": &spec.Workers} {
				switch changed := cmd.Flags().Changed(flag); {
				case *n < 0:
					return &plan.Error{
						Op: "start sandbox", Err: fmt.Errorf("--%s is %d, want 0 or more", flag, *n), Exit: plan.ExitUsage,
						Remedy: "pass a number of machines that this computer can run, or omit the flag",
					}
				case changed && *n == 0:
					*n = -1
				case !changed:
					*n = 0
				}
			}
			if spec.ControlPlanes < 0 {
				return &plan.Error{
					Op: "start sandbox", Err: errors.New("--control-planes is 0, want 1 or more"), Exit: plan.ExitUsage,
					Remedy: "pass 1 or more, or omit the flag",
				}
			}
			if hollow > 0 {
				spec.Workers = hollow
			}
			return v.upSandbox(cmd.Context(), spec, out)
		},
	}
	f := cmd.Flags()
	f.IntVar(&spec.ControlPlanes, "control-planes", 1, "number of control planes (hollow: 3)")
	f.IntVar(&spec.Workers, "workers", 2, "number of workers")
	f.IntVar(&hollow, "hollow", 0, "run this `number` of fake workers instead of machines")
	f.DurationVar(&spec.Boot, "boot", 0, "boot time of a hollow machine (default 5s)")
	f.DurationVar(&spec.Join, "join", 0, "time from boot to a Ready node of a hollow machine (default 1s)")
	f.DurationVar(&spec.Drain, "drain", 0, "termination time of pods on a hollow machine (default 3s)")
	cmd.MarkFlagsMutuallyExclusive("hollow", "workers")
	f.StringVar(&spec.Kubernetes, "kubernetes", "", "Kubernetes version (default "+build.DefaultVersion+")")
	f.StringVar(&spec.Image, "image", "", "OS image version (default: the release)")
	f.StringVar(&spec.Release, "release", "", "release that init deploys (default "+v.releases[0]+")")
	f.StringVar(&spec.Machines, "machines", "auto", "kind of machines: auto, real or simulated; auto prefers real ones")
	_ = cmd.RegisterFlagCompletionFunc("machines", tui.Fixed("auto", "real", "simulated"))
	f.StringVar(&spec.Cloud, "cloud", "", "cloud of the machines: "+words.Or(providers.Sandboxed())+" (default "+providers.Local+")")
	_ = cmd.RegisterFlagCompletionFunc("cloud", tui.Fixed(providers.Sandboxed()...))
	f.StringArrayVar(&spec.Faults, "fault", nil, "fault to inject, such as never-boot=worker-1; may be repeated; "+noFaults+" removes all faults")
	f.IntVar(&spec.RegistryPort, "registry-port", 0, "pull all images from the registry on this computer at 127.0.0.1:`PORT`; it is 10.42.0.1:PORT for machines")
	f.BoolVarP(&spec.Install, "yes", "y", false, "install missing Debian packages without a prompt")
	v.nameFlag(cmd, &spec.Name)
	v.OutputFlag(cmd, &out, "output format: text, or json for one event per line")
	_ = cmd.RegisterFlagCompletionFunc("kubernetes", tui.Fixed(v.kubernetes...))
	_ = cmd.RegisterFlagCompletionFunc("image", tui.Fixed(v.images...))
	_ = cmd.RegisterFlagCompletionFunc("release", tui.Fixed(v.releases...))
	_ = cmd.RegisterFlagCompletionFunc("fault", tui.Fixed(append([]string{noFaults}, v.faults...)...))
	return tui.Resumable(cmd)
}

func (v *verbs) upSandbox(ctx context.Context, spec engine.SandboxSpec, f tui.Format) error {
	dir, err := v.NewWorkspace()
	if err != nil {
		return err
	}
	spec.Workspace = dir
	if slices.Equal(spec.Faults, []string{noFaults}) {
		spec.Faults = []string{}
	}
	return v.withSandbox(ctx, func(ctx context.Context, box engine.Sandbox) error { return v.upWithPackages(ctx, box, spec, f) })
}

// upWithPackages starts the sandbox. If packages are missing, it prompts for their installation once.
func (v *verbs) upWithPackages(ctx context.Context, box engine.Sandbox, spec engine.SandboxSpec, f tui.Format) error {
	for {
		stream := v.Stream(f, "sandbox")
		info, err := box.Up(ctx, spec, stream.Event)
		if plan.ExitCode(err) == plan.ExitUnacknowledged && f == tui.Text && !spec.Install && v.Prompts() {
			stream.Close()
			if !v.Confirmed(err, "Install them now?") {
				return err
			}
			spec.Install = true
			continue
		}
		kind, next := view.Marked(info.Simulated, false, ", "), []string{v.Command("init")}
		if info.Hollow {
			kind, next = " (hollow: all machines are simulated)", v.afterHollow(info)
		}
		stream.End(fmt.Sprintf("sandbox %s: %s, %s, Kubernetes %s, image %s%s", info.Name, words.Count(info.ControlPlanes, "control plane"),
			words.Count(info.Workers, "worker"), info.Kubernetes, info.Image, kind), err, plan.Result{Next: next})
		stream.Close()
		return err
	}
}

// afterHollow returns the next commands for hollow machines: watch, status, and a patch
// that sets another target.
func (v *verbs) afterHollow(info workspace.SandboxInfo) []string {
	next := []string{v.Command("watch"), v.Command("status")}
	if i := slices.IndexFunc(v.images, func(v string) bool { return v != info.Image }); i >= 0 {
		next = append(next, fmt.Sprintf("kubectl --kubeconfig %s patch nodeversion constellation-version --type merge -p '{\"spec\":{\"image\":\"sandboxes/%s/images/%s\",\"imageVersion\":\"%s\"}}'",
			view.QuoteArg(filepath.Join(v.Dir(), "constellation-admin.conf")), info.Name, v.images[i], v.images[i]))
	}
	return next
}

func (v *verbs) sandboxDown() *cobra.Command {
	var (
		name           string
		nonInteractive bool
		out            tui.Format
	)
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Delete the sandbox and everything it created",
		Long: `Delete the sandbox of this workspace: its machines, its cloud, and their networks, mounts
and files. Leftovers of a crashed sandbox are deleted too. It is not an error if there is
no sandbox.

The command keeps your own files in the workspace. If your preferences guard the cluster, it
prompts for the name of the cluster on a terminal, also with --yes.`,
		Example: `  constellation sandbox down
  constellation sandbox down --name demo`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := v.Unlock(name, out, nonInteractive); err != nil {
				return err
			}
			return v.withNamed(cmd.Context(), name, func(ctx context.Context, box engine.Sandbox, name string) error {
				stream := v.Stream(out, "sandbox")
				defer stream.Close()
				err := box.Down(ctx, name, stream.Event)
				stream.End("sandbox deleted", err, plan.Result{})
				return err
			})
		},
	}
	v.nameFlag(cmd, &name)
	cmd.Flags().BoolP("yes", "y", false, "accepted for consistency; a guarded cluster's name is prompted for")
	cmd.Flags().BoolVar(&nonInteractive, "non-interactive", false, "never prompt")
	v.OutputFlag(cmd, &out, "output format: text, or json for one event per line")
	return tui.Resumable(cmd)
}

func (v *verbs) sandboxStatus() *cobra.Command {
	var (
		name string
		out  tui.Format
	)
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the sandbox and its machines",
		Long:  "Show the sandbox of this workspace: versions, endpoints, faults, and the boot state of its machines.",
		Example: `  constellation sandbox status
  constellation sandbox status -o json | jq '.machines[] | {name, boot}'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return v.withNamed(cmd.Context(), name, func(ctx context.Context, box engine.Sandbox, name string) error {
				st, err := box.Status(ctx, name)
				if err != nil {
					return err
				}
				if out == tui.JSON {
					return v.Document(struct {
						Schema string `json:"schema"`
						engine.SandboxStatus
					}{plan.Schema, st})
				}
				v.Print(v.sandboxText(&st))
				return nil
			})
		},
	}
	v.nameFlag(cmd, &name)
	v.OutputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// sandboxText renders the output of sandbox status.
func (v *verbs) sandboxText(st *engine.SandboxStatus) []string {
	t := v.Theme()
	lines := []string{
		t.Row(view.PrintedWidth).Add(term.Plain, "sandbox "+term.Clean(st.Name)+"   "+term.Clean(st.State)+view.Marked(st.Simulated, false, "   ")).String(),
		t.Row(view.PrintedWidth).Add(term.Plain, "  ").Col(term.Faint, "Kubernetes", 12).Col(term.Plain, term.Clean(st.Kubernetes), 22).Col(term.Faint, "API server", 12).Add(term.Plain, term.Clean(st.ClusterEndpoint)).String(),
	}
	image, release := t.Row(view.PrintedWidth).Add(term.Plain, "  ").Col(term.Faint, "OS image", 12), t.Row(view.PrintedWidth).Add(term.Plain, "  ").Col(term.Faint, "Release", 12)
	if st.Hollow { // hollow machines need no init and no mirror
		lines = append(lines, image.Add(term.Plain, term.Clean(st.Image)).String(), release.Add(term.Plain, term.Clean(st.Release)).String())
	} else {
		lines = append(lines, image.Col(term.Plain, term.Clean(st.Image), 22).Col(term.Faint, "init", 12).Add(term.Plain, term.Clean(st.InitEndpoint)).String(),
			release.Col(term.Plain, term.Clean(st.Release), 22).Col(term.Faint, "mirror has", 12).Add(term.Plain, term.Clean(strings.Join(st.KubernetesVersions, " "))).String())
	}
	if st.Cloud != "" {
		calls := 0
		for _, n := range st.Calls {
			calls += n
		}
		style, text := term.Plain, fmt.Sprintf("%s, emulated: %s of its API", term.Clean(st.Cloud), words.Count(calls, "call"))
		if st.Problems > 0 {
			style, text = term.Bad, text+fmt.Sprintf(", and %d outside of its schema", st.Problems)
		}
		lines = append(lines, t.Row(view.PrintedWidth).Add(term.Plain, "  ").Col(term.Faint, "cloud", 12).Add(style, text).String())
	}
	switch {
	case st.Hollow && st.State == "stopped":
		lines = append(lines, t.Row(view.PrintedWidth).Add(term.Plain, "  ").Col(term.Faint, "stopped", 12).Add(term.Caution, "the daemon and the hollow cluster have ended; `"+v.Command("sandbox up")+"` creates a new one").String())
	case st.Hollow:
		lines = append(lines, t.Row(view.PrintedWidth).Add(term.Plain, "  ").Col(term.Faint, "hollow", 12).Add(term.Caution, "all machines are simulated: nothing runs in them").String())
	case st.State == "stopped":
		lines = append(lines, t.Row(view.PrintedWidth).Add(term.Plain, "  ").Col(term.Faint, "stopped", 12).Add(term.Caution, "the daemon is not running; `"+v.Command("sandbox up")+"` restarts it and keeps the machines").String())
	}
	for _, f := range st.Faults {
		lines = append(lines, t.Row(view.PrintedWidth).Add(term.Plain, "  ").Col(term.Faint, "fault", 12).Add(term.Caution, term.Clean(f)).String())
	}
	if st.Hollow {
		lines = append(lines, t.Rule(view.PrintedWidth, fmt.Sprintf("Hollow machines %d", len(st.Machines)), ""))
		return append(lines, v.hollowRows(st)...)
	}
	lines = append(lines, t.Rule(view.PrintedWidth, fmt.Sprintf("Machines %d", len(st.Machines)), ""))
	width := 18
	for _, m := range st.Machines {
		width = max(width, len(m.Name)+2)
	}
	for _, m := range st.Machines {
		sign, sty := t.Pending, term.Faint
		switch m.Boot {
		case "ready":
			sign, sty = t.OK, term.Good
		case "failed":
			sign, sty = t.Fail, term.Bad
		case "stopped":
			sign, sty = t.Stopped, term.Caution
		}
		lines = append(lines, t.Row(view.PrintedWidth).Add(term.Plain, " ").Add(sty, sign).Add(term.Plain, " ").Col(term.Plain, term.Clean(m.Name), width).Col(sty, term.Clean(m.Boot), 9).
			Col(term.Plain, term.Clean(m.Group), 14).Col(term.Plain, term.Clean(m.IP), 15).Col(term.Plain, term.Clean(m.Image), 8).Add(term.Faint, term.Clean(m.Message)).String())
		if (m.Boot == "failed" || m.Boot == "stopped") && m.Console != "" {
			lines = append(lines, t.Row(view.PrintedWidth).Pad(3).Col(term.Faint, "console", width).Add(term.Plain, term.Clean(m.Console)).String())
		}
	}
	return lines
}

// hollowRows renders one row for each group, boot state and image, with the number of
// machines.
func (v *verbs) hollowRows(st *engine.SandboxStatus) []string {
	t := v.Theme()
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
		sign, sty := t.Pending, term.Faint
		switch k.boot {
		case "ready":
			sign, sty = t.OK, term.Good
		case "stopped":
			sign, sty = t.Stopped, term.Caution
		}
		lines = append(lines, t.Row(view.PrintedWidth).Add(term.Plain, " ").Add(sty, sign).Add(term.Plain, " ").Col(term.Plain, fmt.Sprint(counts[k]), 7).Col(sty, term.Clean(k.boot), 9).
			Col(term.Plain, term.Clean(k.group), 16).Add(term.Plain, term.Clean(k.image)).String())
	}
	return lines
}

func (v *verbs) sandboxShell() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "shell MACHINE [-- COMMAND...]",
		Short: "Open a shell in a machine",
		Long: `Open a shell in a machine of the sandbox, or run one command there. The exit code is that
of the shell or the command.`,
		Example: `  constellation sandbox shell control-plane-0
  constellation sandbox shell worker-0 -- journalctl -u constellation-bootstrapper`,
		Args: func(cmd *cobra.Command, args []string) error {
			switch dash := cmd.ArgsLenAtDash(); {
			case len(args) == 0 || dash == 0:
				return errors.New("name a machine")
			case dash < 0 && len(args) > 1 || dash > 1:
				return errors.New("put -- before the command")
			}
			return nil
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveDefault
			}
			return v.machineNames(cmd.Context(), name), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			box, err := v.sandboxName(name)
			if err != nil {
				return err
			}
			return v.shell(cmd.Context(), box, args[0], args[1:])
		},
	}
	v.nameFlag(cmd, &name)
	return cmd
}

// machineNames returns the machines of a sandbox, for completion.
func (v *verbs) machineNames(ctx context.Context, name string) []string {
	var names []string
	// Without a sandbox there are no completions.
	_ = v.withNamed(ctx, name, func(ctx context.Context, box engine.Sandbox, name string) error {
		st, err := box.Status(ctx, name)
		for _, m := range st.Machines {
			names = append(names, term.Clean(m.Name))
		}
		return err
	})
	slices.Sort(names)
	return names
}

func (v *verbs) shell(ctx context.Context, name, machine string, command []string) error {
	box, err := v.sandbox(v.Log())
	if err != nil {
		return err
	}
	tty := v.Terminal()
	if tty {
		// In raw mode the shell in the machine gets line editing and Ctrl-C.
		restore, err := v.RawTerminal()
		if err != nil {
			return &plan.Error{Op: "set up the terminal", Err: err}
		}
		defer restore()
	}
	code, err := box.Exec(ctx, name, machine, command, v.Stdin(), v.Stdout(), v.Stderr(), tty)
	if err != nil {
		return err
	}
	if code != 0 {
		return tui.ExitStatus(code)
	}
	return nil
}

func (v *verbs) sandboxFetch() *cobra.Command {
	var out tui.Format
	from := engine.FetchOptions{Mirror: os.Getenv(mirrorVariable)}
	cmd := &cobra.Command{
		Use:   "fetch [VERSION]",
		Short: "Get Kubernetes into the cache",
		Long: `Get the binaries and images of a Kubernetes version into the cache. Later calls return at once.

Programs come from the archives that Kubernetes and etcd publish (dl.k8s.io and github.com), if their
digest is part of this program or if the project's signature vouches for them. CoreDNS, pause and
agnhost are compiled from source, and so is all that cannot be downloaded: within 5 seconds a line
says what and why. No other command downloads or compiles Kubernetes.

A mirror has copies of the same files below the names of their hosts. It is not trusted, so only
files whose digest is part of this program come from it:
  MIRROR/dl.k8s.io/v1.36.3/kubernetes-server-linux-amd64.tar.gz
Proxies are taken from HTTPS_PROXY, HTTP_PROXY and NO_PROXY, and the mirror from ` + mirrorVariable + `.`,
		Example: `  constellation sandbox fetch
  constellation sandbox fetch ` + v.kubernetes[len(v.kubernetes)-1] + `
  constellation sandbox fetch --mirror https://mirror.example/files
  constellation sandbox fetch --from-source`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: tui.Fixed(v.kubernetes...),
		RunE: func(cmd *cobra.Command, args []string) error {
			version := build.DefaultVersion
			if len(args) > 0 {
				version = args[0]
			}
			return v.withSandbox(cmd.Context(), func(ctx context.Context, box engine.Sandbox) error {
				stream := v.Stream(out, "Kubernetes "+version)
				defer stream.Close()
				err := box.Fetch(ctx, version, from, stream.Event)
				stream.End("Kubernetes "+version+" is cached", err, plan.Result{})
				return err
			})
		},
	}
	v.OutputFlag(cmd, &out, "output format: text, or json for one event per line")
	cmd.Flags().BoolVar(&from.FromSource, "from-source", false, "compile all programs, download none")
	cmd.Flags().StringVar(&from.Mirror, "mirror", from.Mirror, "`URL` of copies of the published files")
	return tui.Resumable(cmd)
}

// mirrorVariable is the environment variable with the default of fetch's --mirror.
const mirrorVariable = "CONSTELLATION_MIRROR"

func (v *verbs) sandboxDaemon() *cobra.Command {
	return tui.Resumable(&cobra.Command{
		Use:    "daemon NAME",
		Short:  "Run a sandbox in the foreground (started by sandbox up)",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := v.Signals(cmd.Context())
			defer stop()
			v.LogToStderr() // the log is the daemon's only output
			return v.daemon(ctx, args[0], v.Log())
		},
	})
}

// sandboxFind is the verb with which constellation finds the sandbox of a workspace: its status
// as JSON, or null if there is none.
func (v *verbs) sandboxFind() *cobra.Command {
	return &cobra.Command{
		Use:    sandboxexec.FindVerb + " NAME",
		Short:  "Print the status of a sandbox as JSON, for constellation",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return v.withSandbox(cmd.Context(), func(ctx context.Context, box engine.Sandbox) error {
				st, err := box.Status(ctx, args[0])
				if errors.Is(err, cloud.ErrNotFound) {
					return v.Document(nil)
				}
				if err != nil {
					return err
				}
				return v.Document(st)
			})
		},
	}
}
