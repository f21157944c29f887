package tui

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"constellation/engine/cloud/providers"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

// session is one invocation of the program.
type session struct {
	App
	dir   string // as given with -C
	debug bool
	// accessible disables the console; see plainly.
	accessible bool
	began      bool // the arguments were valid and the verb started
	runs       bool // the verb is in longVerbs
	out        *guarded
	level      *slog.LevelVar
	log        *slog.Logger
	debugFile  *os.File

	mu     sync.Mutex
	caught syscall.Signal // the signal that ended the verb; 0 if none did
	wrote  string         // the file that a read-only verb wrote
}

// exitStatus ends the program with an exit code and prints no error: the verb has
// printed everything already.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// longVerbs are the verbs that change something step by step. A signal stops them at a
// point where they can be resumed; see also Resumable. All other verbs are read-only or short.
var longVerbs = []string{"init", "upgrade prepare", "backup create", "backup restore", "upgrade apply", "upgrade execute", "machine revoke"}

func newSession(a App) *session {
	s := &session{App: a, level: &slog.LevelVar{}}
	s.out = &guarded{w: a.Stdout, gone: func() {
		if !s.runs {
			return // the reader, such as head, closed the pipe on purpose
		}
		s.remark("stdout was closed by its reader; the run continues, and its record is in the workspace")
	}}
	// Without --debug nothing is logged: users read events.
	s.level.Set(slog.LevelError + 4)
	s.log = slog.New(slog.NewTextHandler(stderrOf{s}, &slog.HandlerOptions{Level: s.level}))
	return s
}

// stderrOf is the log's writer: stderr, or debugFile while the console owns the terminal.
type stderrOf struct{ s *session }

func (w stderrOf) Write(p []byte) (int, error) {
	if f := w.s.debugFile; f != nil {
		return f.Write(p)
	}
	return w.s.Stderr.Write(p)
}

// execute runs the command line and returns the exit code.
func (s *session) execute(args []string) int {
	// A closed pipe must not kill a run half-way; see guarded.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE)
	defer signal.Stop(pipe)

	root := s.root()
	if s.RunSandbox != nil && delegated(root, SandboxVerb, args) {
		code, err := s.RunSandbox(args)
		if err != nil {
			view.WriteError(s.Stderr, s.formatter(), err)
			return plan.ExitCode(err)
		}
		return code
	}
	root.SetArgs(args)
	root.SetIn(s.Stdin)
	root.SetOut(s.out)
	root.SetErr(s.Stderr)
	cmd, err := root.ExecuteContextC(context.Background())
	s.mu.Lock()
	caught := s.caught
	s.mu.Unlock()
	var status exitStatus
	switch {
	case errors.As(err, &status):
		return int(status)
	case err == nil && caught == 0 && s.out.failed != nil:
		view.WriteError(s.Stderr, s.formatter(), &plan.Error{Op: "write output", Err: s.out.failed, Remedy: "free disk space or redirect the output, then run the command again"})
		return plan.ExitFailed
	case err == nil && caught == 0:
		return plan.ExitDone
	case caught != 0 && !s.runs:
		switch {
		case s.wrote != "":
			s.remark("%s; %s was written", signalName(caught), term.Clean(s.wrote))
		case err != nil:
			s.remark("%s; nothing was changed", signalName(caught))
		default:
			s.remark("%s", signalName(caught))
		}
		return 128 + int(caught)
	case !s.began && err != nil:
		err = &plan.Error{Op: err.Error(), Remedy: "see " + cmd.CommandPath() + " --help", Exit: plan.ExitUsage}
	}
	switch {
	case err != nil && plan.ExitCode(err) == plan.ExitNothing:
		s.remark("%s", view.Explain(err, s.formatter()).What)
	case err != nil:
		view.WriteError(s.Stderr, s.formatter(), err)
	}
	if caught != 0 {
		return 128 + int(caught)
	}
	return plan.ExitCode(err)
}

// remark writes a remark about the invocation to stderr.
func (s *session) remark(format string, args ...any) {
	fmt.Fprintf(s.Stderr, "remark  "+format+"\n", args...)
}

// signals cancels the returned context at SIGINT, SIGTERM or SIGHUP; the second signal
// ends the program at once. The console handles signals itself.
func (s *session) signals(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	ch := make(chan os.Signal, 2)
	watched := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // nohup
		watched = append(watched, syscall.SIGHUP)
	}
	signal.Notify(ch, watched...)
	done := make(chan struct{})
	go func() {
		for n := 0; ; n++ {
			select {
			case <-done:
				return
			case sig := <-ch:
				if n > 0 {
					os.Exit(128 + int(sig.(syscall.Signal)))
				}
				got := sig.(syscall.Signal)
				s.mu.Lock()
				s.caught = got
				s.mu.Unlock()
				if s.runs {
					s.remark("%s: stopping at the next point where the command can be resumed; repeat to stop at once", signalName(got))
				}
				// The result event then carries the exit code of the process.
				cancel(&plan.Error{Err: errors.New(signalName(got)), Exit: 128 + int(got)})
			}
		}
	}()
	var once sync.Once
	return ctx, func() { once.Do(func() { signal.Stop(ch); close(done) }); cancel(nil) }
}

func signalName(s syscall.Signal) string {
	switch s {
	case syscall.SIGINT:
		return "interrupted"
	case syscall.SIGTERM:
		return "terminated"
	case syscall.SIGHUP:
		return "hung up"
	}
	return s.String()
}

// workspace opens the directory given with -C.
func (s *session) workspace() (*workspace.Workspace, string, error) {
	dir, err := filepath.Abs(s.dir)
	if err != nil {
		return nil, "", &plan.Error{Op: "open workspace " + s.dir, Err: err, Exit: plan.ExitUsage}
	}
	ws, err := workspace.OpenWorkspace(dir)
	return ws, dir, err
}

// newWorkspace is workspace for the verbs that create one. It creates the directory given
// with -C if its parent exists.
func (s *session) newWorkspace() (*workspace.Workspace, string, error) {
	if err := os.Mkdir(s.dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) && !errors.Is(err, fs.ErrNotExist) {
		return nil, "", &plan.Error{Op: "create workspace " + s.dir, Err: err, Exit: plan.ExitUsage, Remedy: "name another directory with -C"}
	}
	return s.workspace()
}

// formatter returns the command formatter of this invocation.
func (s *session) formatter() view.CommandFormatter {
	sp := view.CommandFormatter{Program: s.Program, Dir: s.dir}
	if dir, err := filepath.Abs(s.dir); err == nil { // else kubectl commands get no --kubeconfig
		sp.Home, sp.Kubeconfig = dir, filepath.Join(dir, workspace.KubeconfigFile)
	}
	return sp
}

// command returns a command line of this program for the same workspace.
func (s *session) command(args string) string { return s.formatter().Command(args) }

// format is the value of -o.
type format string

const (
	text   format = "text"
	asJSON format = "json"
	// asMarkdown is accepted by verbs whose flag is a checkFormat.
	asMarkdown format = "markdown"
)

func (f *format) String() string { return string(*f) }
func (f *format) Type() string   { return "text|json" }
func (f *format) Set(s string) error {
	if s != string(text) && s != string(asJSON) {
		return errors.New("want text or json")
	}
	*f = format(s)
	return nil
}

func (s *session) outputFlag(cmd *cobra.Command, f *format, usage string) {
	*f = text
	cmd.Flags().VarP(f, "output", "o", usage)
	_ = cmd.RegisterFlagCompletionFunc("output", fixed("text", "json"))
}

// fixed completes a value from a list.
func fixed(values ...string) func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return values, cobra.ShellCompDirectiveNoFileComp
	}
}

func (s *session) root() *cobra.Command {
	var nonInteractive bool
	root := &cobra.Command{
		Use:   "constellation",
		Short: "Create, upgrade and operate Kubernetes on attested machines",
		Long: `Constellation creates a Kubernetes cluster on attested machines with kubeadm, checks and
runs its upgrades, and backs it up.

Without a verb it opens the console on the workspace, the folder that holds the files of
one cluster. In a folder without such files it lists the clusters of your kubeconfig; -C .
opens the console on the folder. Without a terminal it prints an overview of the workspace as
text. With --accessible it prints that text, lists the possible next commands and prompts for one.

Exit codes, unless a verb's help lists others: 0 done; 1 failed; 2 bad usage or configuration; 3 nothing to do;
4 blocked by a finding; 5 an acknowledgement is missing; 6 upgrade available (upgrade check
--exit-code only); 7 stopped part-way, can be resumed; 8 another console holds the run;
9 differences found (backup diff only); 129 hung up; 130 interrupted; 143 terminated.`,
		Example: `  constellation                       # open the console on this folder
  constellation -C demo               # open it on another folder
  constellation init --non-interactive --yes -o json | jq .kind`,
		Args:          noVerb,
		Version:       s.Release,
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			// Cobra checks groups of flags after this hook, when a wrong use would no longer end with 2.
			if err := cmd.ValidateFlagGroups(); err != nil {
				return exclusive(err)
			}
			s.began = true
			_, s.runs = cmd.Annotations[resumable]
			s.runs = s.runs || slices.Contains(longVerbs, strings.TrimPrefix(cmd.CommandPath(), cmd.Root().DisplayName()+" "))
			if s.debug {
				s.level.Set(slog.LevelDebug)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !s.interactive(nonInteractive) {
				if err := s.printHome(cmd.Context()); err != nil || nonInteractive || !s.plainly() || !s.asks() {
					return err
				}
				return s.askNext(cmd.Context())
			}
			if k, prefs, err := s.severalClusters(cmd.Flags().Changed("workspace")); err != nil || k != nil {
				if err != nil {
					return err
				}
				return s.clustersConsole(cmd.Context(), k, prefs)
			}
			return s.console(cmd.Context(), consoleOptions{})
		},
	}
	if s.Program == view.PluginName {
		root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: s.Program}
	}
	f := root.PersistentFlags()
	f.StringVarP(&s.dir, "workspace", "C", ".", "`folder` with the files of the cluster")
	f.BoolVar(&s.debug, "debug", false, "write a debug log to stderr")
	f.BoolVar(&s.accessible, "accessible", false, "no console: print line by line, prompt in plain text (also ACCESSIBLE=1)")
	root.Flags().BoolVar(&nonInteractive, "non-interactive", false, "print and never prompt")
	_ = root.MarkPersistentFlagDirname("workspace")
	root.Flags().Bool("version", false, "print the version of this program")
	root.SetVersionTemplate("constellation {{.Version}}\n")
	root.SetFlagErrorFunc(flagError)
	if s.Verbs != nil {
		root.Short, root.Long, root.Example = SandboxShort, "Run the verb sandbox of constellation. Call it as `constellation sandbox`.", "  constellation sandbox --help"
		root.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		root.AddCommand(s.Verbs(&Invocation{s})...)
		return root
	}
	root.SetHelpCommandGroupID("around")
	root.AddGroup(&cobra.Group{ID: "cluster", Title: "Cluster commands:"}, &cobra.Group{ID: "around", Title: "Other commands:"})
	for _, c := range []*cobra.Command{s.initCommand(), s.checkCommand(), s.upgradeCommand(), s.backupCommand(), s.machineCommand(), s.statusCommand(), s.watchCommand(), s.historyCommand()} {
		c.GroupID = "cluster"
		root.AddCommand(c)
	}
	for _, c := range []*cobra.Command{s.configCommand(), s.releaseCommand(), s.sandboxStub(), s.mcpCommand(), s.selfCommand(), s.versionCommand()} {
		c.GroupID = "around"
		root.AddCommand(c)
	}
	root.SetCompletionCommandGroupID("around")
	s.completionExamples(root)
	return root
}

// exclusiveRE matches cobra's error about flags that exclude each other.
var exclusiveRE = regexp.MustCompile(`; \[(.+)\] were all set$`)

// exclusive words cobra's error about flags that exclude each other.
func exclusive(err error) error {
	m := exclusiveRE.FindStringSubmatch(err.Error())
	if m == nil {
		return err
	}
	return errors.New("--" + strings.ReplaceAll(m[1], " ", " and --") + " exclude each other")
}

// flagError returns which values a flag accepts. pflag would return the parser's error.
func flagError(cmd *cobra.Command, err error) error {
	var absent *pflag.NotExistError
	if errors.As(err, &absent) {
		return suggestFlag(cmd, absent)
	}
	var bad *pflag.InvalidValueError
	if !errors.As(err, &bad) {
		return err
	}
	f := bad.GetFlag()
	want := map[string]string{
		"bool": "true or false", "int": "a whole number", "duration": "a time such as 90s, 10m or 1h30m", "text|json": "text or json",
		"text|json|markdown": "text, json or markdown", "blocking|warning": "blocking or warning",
		"":     "a version such as v1.35.4", // the type of TextVar flags; all of them are versions
		"days": "a time such as 30d or 36h",
	}[f.Value.Type()]
	if want == "" {
		return err
	}
	return fmt.Errorf("--%s is %q, want %s", f.Name, term.Clean(bad.GetValue()), want)
}

// completionExamples adds examples to cobra's completion commands.
func (s *session) completionExamples(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() != "completion" {
			continue
		}
		c.Example = "  source <(constellation completion bash)\n  constellation completion fish > ~/.config/fish/completions/constellation.fish"
		for _, sh := range c.Commands() {
			sh.Example = map[string]string{
				"bash":       "  source <(constellation completion bash)",
				"zsh":        "  constellation completion zsh > \"${fpath[1]}/_constellation\"",
				"fish":       "  constellation completion fish > ~/.config/fish/completions/constellation.fish",
				"powershell": "  constellation completion powershell | Out-String | Invoke-Expression",
			}[sh.Name()]
		}
	}
}

// group is a command that only has subcommands.
func group(use, short, long, example string) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: long, Example: example,
		Args: noVerb,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
}

// interactive reports whether the console can be shown. If the user did not decline it
// and it cannot be shown, it prints why.
func (s *session) interactive(declined bool) bool {
	if declined || s.plainly() {
		return false
	}
	why := term.NotInteractive(s.Stdin, s.Stdout, s.Env)
	if why != "" {
		s.remark("%s: continuing as with --non-interactive", why)
	}
	return why == ""
}

func (s *session) initCommand() *cobra.Command {
	var (
		o              consoleOptions
		nonInteractive bool
		out            format
	)
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Create the cluster",
		Long: `Create the cluster that constellation-conf.yaml describes. Init verifies the attestation
evidence of the first machine, runs kubeadm init on it, installs the services, and waits
until the other machines have joined and are Ready.

On a terminal the console shows the preflight checks and the plan, and asks before it
creates anything. With --non-interactive it needs --yes and prints one line per change,
or with -o json one event per line.

Init can be interrupted at any time. Run the same command again to resume it.`,
		Example: `  constellation init
  constellation init --non-interactive --yes
  constellation init --yes -o json > events.jsonl
  constellation init --yes --timeout 10m`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if out == asJSON || !s.interactive(nonInteractive) {
				return s.scriptedInit(cmd.Context(), o, out, out == text && !nonInteractive && s.plainly() && s.asks())
			}
			o.wizard = true
			return s.console(cmd.Context(), o)
		},
	}
	cmd.Flags().BoolVar(&nonInteractive, "non-interactive", false, "print and never prompt")
	cmd.Flags().BoolVarP(&o.yes, "yes", "y", false, "accept the plan and its warnings")
	cmd.Flags().DurationVar(&o.timeout, "timeout", 0, "stop after this time, such as 10m; run again to resume (0: no limit)")
	s.outputFlag(cmd, &out, "output format: text, or json for one event per line")
	return cmd
}

func (s *session) statusCommand() *cobra.Command {
	var (
		out    format
		access cluster.Access
	)
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show versions, nodes and health of the cluster",
		Long: `Show the current state of the cluster: current and target versions, nodes, machines that
have not joined yet, services and health problems.

Without a workspace, or with --kubeconfig or --context, it shows any cluster: versions,
nodes, cordons, Plans, and what keeps a drain stuck.

It changes nothing. The exit code is 1 if the API server does not answer.`,
		Example: `  constellation status
  constellation status --context prod-eu
  constellation status -o json | jq '.nodes[].name'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			sel, err := s.selectCluster("get status of", access, true)
			if err != nil {
				return err
			}
			if sel != nil {
				return s.printStatusOf(cmd.Context(), out, access, sel)
			}
			return s.printStatus(cmd.Context(), out)
		},
	}
	s.accessFlags(cmd, &access)
	s.outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

func (s *session) configCommand() *cobra.Command {
	cmd := group("config", "Write, check and migrate the configuration",
		"Write, check and migrate constellation-conf.yaml, which describes the desired cluster.\nPrint your preferences.",
		`  constellation config generate sandbox
  constellation config validate`)
	cmd.AddCommand(s.configGenerate(), s.configValidate(), s.configMigrate(), s.configPreferences())
	return cmd
}

func (s *session) configGenerate() *cobra.Command {
	var o workspace.GenerateOptions
	cmd := &cobra.Command{
		Use:   "generate PROVIDER",
		Short: "Write a new configuration",
		Long: `Write a new, commented constellation-conf.yaml into the workspace. An existing file is
never replaced.

If the workspace has a sandbox, the file gets the sandbox's measurements and versions.`,
		Example: `  constellation config generate sandbox --name demo
  constellation -C demo config generate sandbox --kubernetes ` + first(s.Kubernetes),
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: fixed(providers.Names()...),
		RunE: func(cmd *cobra.Command, args []string) error {
			ws, dir, err := s.newWorkspace()
			if err != nil {
				return err
			}
			if args[0] == providers.Default {
				o.Sandbox = s.findSandbox(cmd.Context(), dir)
			}
			b, err := workspace.GenerateConfig(args[0], o)
			if err != nil {
				return err
			}
			path, err := ws.WriteConfig(b)
			if err != nil {
				return err
			}
			fmt.Fprintf(s.out, "wrote %s\n", term.Clean(path))
			if up := providers.AdviceFor(args[0], nil).Up; up != "" && o.Sandbox == nil {
				fmt.Fprintf(s.out, "next  %s\n", s.command(up))
			} else {
				fmt.Fprintf(s.out, "next  %s\n", s.command("init"))
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&o.Name, "name", "", "name of the cluster")
	cmd.Flags().StringVar(&o.Kubernetes, "kubernetes", "", "Kubernetes version, such as "+first(s.Kubernetes))
	_ = cmd.RegisterFlagCompletionFunc("kubernetes", fixed(s.Kubernetes...))
	_ = cmd.RegisterFlagCompletionFunc("name", fixed())
	return cmd
}

func first(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[0]
}

// validation is the JSON output of config validate.
type validation struct {
	Schema string                 `json:"schema"`
	File   string                 `json:"file"`
	Valid  bool                   `json:"valid"`
	Errors []workspace.FieldError `json:"errors"`
}

func (s *session) configValidate() *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use:   "validate",
		Short: "Check the configuration",
		Long: `Check constellation-conf.yaml and list all errors, each with its line and a remedy. The
exit code is 2 if there are errors.`,
		Example: `  constellation config validate
  constellation config validate -o json | jq '.errors[].field'`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			ws, _, err := s.workspace()
			if err != nil {
				return err
			}
			b, err := ws.ReadConfig()
			if err != nil {
				return err
			}
			c, err := workspace.ParseConfig(b)
			var list *workspace.ConfigErrors
			if err != nil && !errors.As(err, &list) {
				return err
			}
			if out == asJSON {
				v := validation{Schema: plan.Schema, File: view.ConfigFile, Valid: err == nil, Errors: []workspace.FieldError{}}
				if list != nil {
					v.Errors = list.Errors
				}
				if err := document(s.out, v); err != nil {
					return err
				}
				if list != nil {
					return exitStatus(plan.ExitUsage)
				}
				return nil
			}
			if list != nil {
				return &plan.Error{Err: list, Exit: plan.ExitUsage}
			}
			fmt.Fprintf(s.out, "%s is valid: cluster %s, %s, %s, Kubernetes %s, image %s, release %s\n", view.ConfigFile, term.Clean(c.Name),
				words.Count(c.ControlPlanes(), "control plane"), words.Count(c.Workers(), "worker"), c.Kubernetes, c.Image, c.Services)
			return nil
		},
	}
	s.outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

func (s *session) configMigrate() *cobra.Command {
	return &cobra.Command{
		Use:   "migrate",
		Short: "Convert the configuration to the current format",
		Long: `Convert constellation-conf.yaml to the configuration format of this program. Comments and
layout are kept. The exit code is 3 if the file has that format already.`,
		Example: `  constellation config migrate`,
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			ws, _, err := s.workspace()
			if err != nil {
				return err
			}
			b, err := ws.ReadConfig()
			if err != nil {
				return err
			}
			b, changed, err := workspace.MigrateConfig(b)
			if err != nil {
				return usage(err)
			}
			if !changed {
				fmt.Fprintf(s.out, "%s has the current format already\n", view.ConfigFile)
				return exitStatus(plan.ExitNothing)
			}
			if err := ws.ReplaceConfig(b); err != nil {
				return err
			}
			fmt.Fprintf(s.out, "%s now has the current format\n", view.ConfigFile)
			return nil
		},
	}
}

// usage gives configuration errors the exit code for bad usage, unless err has an exit
// code already.
func usage(err error) error {
	var list *workspace.ConfigErrors
	var e *plan.Error
	if errors.As(err, &list) && !errors.As(err, &e) {
		return &plan.Error{Err: list, Exit: plan.ExitUsage}
	}
	return err
}

// versionAnswer is the JSON output of version.
type versionAnswer struct {
	Schema     string   `json:"schema"`
	Release    string   `json:"release"`
	Go         string   `json:"go"`
	Platform   string   `json:"platform"`
	Kubernetes []string `json:"kubernetes"`
}

func (s *session) versionCommand() *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Show the version of this program",
		Long:    "Show the version of this program and the Kubernetes versions that `constellation sandbox fetch` can build.",
		Example: "  constellation version -o json | jq -r .release",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			v := versionAnswer{plan.Schema, s.Release, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH, s.Kubernetes}
			if out == asJSON {
				return document(s.out, v)
			}
			fmt.Fprintf(s.out, "constellation %s (%s, %s)\nkubernetes    %s\n", v.Release, v.Go, v.Platform, strings.Join(v.Kubernetes, " "))
			return nil
		},
	}
	s.outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// findSandbox returns the sandbox of a workspace; nil if it has none.
func (s *session) findSandbox(ctx context.Context, dir string) *workspace.SandboxInfo {
	if s.FindSandbox == nil {
		return nil
	}
	st, err := s.FindSandbox(ctx, dir)
	if err != nil {
		s.log.Debug("sandbox not found", "workspace", dir, "err", err)
		return nil
	}
	return &st.SandboxInfo
}
