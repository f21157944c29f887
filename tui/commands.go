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
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"constellation/engine"
)

// session is one invocation of the program.
type session struct {
	App
	dir   string // as given with -C
	debug bool
	// accessible says that nothing is drawn; see plainly.
	accessible bool
	began      bool // the arguments were fine, and a verb has begun
	runs       bool // the verb changes things step by step; others answer
	out        *guarded
	level      *slog.LevelVar
	log        *slog.Logger
	debugFile  *os.File

	mu     sync.Mutex
	caught syscall.Signal // that ended a verb; 0 if none did
	wrote  string         // the file that a verb wrote which else only answers
}

// exitStatus ends the program with a code and without a word: somebody else has
// said what there was to say.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// longVerbs are those that leave something behind when they are interrupted, and go
// on where it can be taken up again. All others answer.
var longVerbs = []string{"init", "upgrade prepare", "backup create", "backup restore", "upgrade apply", "upgrade execute", "machine revoke", "sandbox up", "sandbox down", "sandbox fetch", "sandbox daemon"}

func newSession(a App) *session {
	s := &session{App: a, level: &slog.LevelVar{}}
	s.out = &guarded{w: a.Stdout, gone: func() {
		if !s.runs {
			return // who has read enough of an answer knows that
		}
		s.remark("nobody reads stdout any more; what runs goes on, and its record is in the workspace")
	}}
	// Debug output goes to stderr; without --debug nothing is logged: users read events.
	s.level.Set(slog.LevelError + 4)
	s.log = slog.New(slog.NewTextHandler(stderrOf{s}, &slog.HandlerOptions{Level: s.level}))
	return s
}

// stderrOf lets the log follow to another place while the console has the terminal.
type stderrOf struct{ s *session }

func (w stderrOf) Write(p []byte) (int, error) {
	if f := w.s.debugFile; f != nil {
		return f.Write(p)
	}
	return w.s.Stderr.Write(p)
}

// execute runs the command line and returns the exit code.
func (s *session) execute(args []string) int {
	// A reader of ours that goes away must not kill a run half-way; see guarded.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE)
	defer signal.Stop(pipe)

	root := s.root()
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
		writeError(s.Stderr, s.speller(), &engine.Error{Op: "write the answer", Err: s.out.failed, Remedy: "make room, or write it somewhere else, and ask again"})
		return engine.ExitFailed
	case err == nil && caught == 0:
		return engine.ExitDone
	case caught != 0 && !s.runs:
		switch {
		case s.wrote != "":
			s.remark("%s; %s was written", signalName(caught), clean(s.wrote))
		case err != nil:
			s.remark("%s; nothing was changed", signalName(caught))
		default:
			s.remark("%s", signalName(caught))
		}
		return 128 + int(caught)
	case !s.began && err != nil:
		err = &engine.Error{Op: err.Error(), Remedy: "see " + cmd.CommandPath() + " --help", Exit: engine.ExitUsage}
	}
	switch {
	case err != nil && engine.ExitCode(err) == engine.ExitNothing:
		s.remark("%s", explain(err, s.speller()).what)
	case err != nil:
		writeError(s.Stderr, s.speller(), err)
	}
	if caught != 0 {
		return 128 + int(caught)
	}
	return engine.ExitCode(err)
}

// remark tells about the invocation, on stderr.
func (s *session) remark(format string, args ...any) {
	fmt.Fprintf(s.Stderr, "remark  "+format+"\n", args...)
}

// signals ends the returned context at SIGINT, SIGTERM or SIGHUP; the second signal
// ends the program at once. Verbs without the console use it.
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
					s.remark("%s: stopping where it can be taken up again; once more stops at once", signalName(got))
				}
				// The engine's result then says the exit code that the process will have.
				cancel(&engine.Error{Err: errors.New(signalName(got)), Exit: 128 + int(got)})
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
func (s *session) workspace() (*engine.Workspace, string, error) {
	dir, err := filepath.Abs(s.dir)
	if err != nil {
		return nil, "", &engine.Error{Op: "open workspace " + s.dir, Err: err, Exit: engine.ExitUsage}
	}
	ws, err := engine.OpenWorkspace(dir)
	return ws, dir, err
}

// newWorkspace is workspace for the verbs that begin one: the directory given with -C is
// made if only it is missing.
func (s *session) newWorkspace() (*engine.Workspace, string, error) {
	if err := os.Mkdir(s.dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) && !errors.Is(err, fs.ErrNotExist) {
		return nil, "", &engine.Error{Op: "make workspace " + s.dir, Err: err, Exit: engine.ExitUsage, Remedy: "name another directory with -C"}
	}
	return s.workspace()
}

// speller writes commands for the user of this invocation.
func (s *session) speller() speller {
	sp := speller{program: s.Program, dir: s.dir}
	if dir, err := filepath.Abs(s.dir); err == nil { // else commands name no cluster
		sp.home, sp.kubeconfig = dir, filepath.Join(dir, engine.KubeconfigFile)
	}
	return sp
}

// command writes a command line of this program for the same workspace.
func (s *session) command(args string) string { return s.speller().command(args) }

// format is the value of -o.
type format string

const (
	text   format = "text"
	asJSON format = "json"
	// asMarkdown is for the verbs that say so.
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

// fixed completes from a list.
func fixed(values ...string) func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return values, cobra.ShellCompDirectiveNoFileComp
	}
}

func (s *session) root() *cobra.Command {
	var nonInteractive bool
	root := &cobra.Command{
		Use:   "constellation",
		Short: "Take a Kubernetes cluster of attested machines through its life",
		Long: `Constellation takes a Kubernetes cluster through its life: it brings up attested
machines, makes a cluster of them with kubeadm, and shows what happens while it does.

Without a verb it opens the console on the workspace, the folder that holds the files
of one cluster: home if there is a cluster, else the way to one. Without a terminal
it prints the same as text. With --accessible it prints that too, and asks in words what
to do next.`,
		Example: `  constellation                       # the console, on this folder
  constellation -C demo               # on another one
  constellation init --non-interactive --yes -o json | jq .kind`,
		Args:          cobra.NoArgs,
		Version:       s.Release,
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			s.began = true
			s.runs = slices.Contains(longVerbs, strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" "))
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
			return s.console(cmd.Context(), consoleOptions{})
		},
	}
	f := root.PersistentFlags()
	f.StringVarP(&s.dir, "workspace", "C", ".", "folder with the files of the cluster")
	f.BoolVar(&s.debug, "debug", false, "log to stderr what goes on inside")
	f.BoolVar(&s.accessible, "accessible", false, "no console: line by line, questions in words (also with ACCESSIBLE=1)")
	root.Flags().BoolVar(&nonInteractive, "non-interactive", false, "print, ask nothing")
	_ = root.MarkPersistentFlagDirname("workspace")
	root.Flags().Bool("version", false, "print the version of this program")
	root.SetVersionTemplate("constellation {{.Version}}\n")
	root.SetHelpCommandGroupID("around")
	root.AddGroup(&cobra.Group{ID: "cluster", Title: "The cluster:"}, &cobra.Group{ID: "around", Title: "Around it:"})
	for _, c := range []*cobra.Command{s.initCommand(), s.upgradeCommand(), s.backupCommand(), s.machineCommand(), s.statusCommand(), s.watchCommand(), s.historyCommand()} {
		c.GroupID = "cluster"
		root.AddCommand(c)
	}
	for _, c := range []*cobra.Command{s.configCommand(), s.releaseCommand(), s.sandboxCommand(), s.versionCommand()} {
		c.GroupID = "around"
		root.AddCommand(c)
	}
	root.SetCompletionCommandGroupID("around")
	root.SetFlagErrorFunc(flagError)
	s.completionExamples(root)
	return root
}

// flagError says in words what value a flag wants; the library would show what its
// parser said.
func flagError(_ *cobra.Command, err error) error {
	var bad *pflag.InvalidValueError
	if !errors.As(err, &bad) {
		return err
	}
	f := bad.GetFlag()
	want := map[string]string{
		"bool": "true or false", "int": "a whole number", "duration": "a time such as 90s, 10m or 1h30m", "text|json": "text or json",
		"text|json|markdown": "text, json or markdown",
		"":                   "a version such as v1.35.4", // the type of what TextVar makes, and all of that are versions
		"days":               "a time such as 30d or 36h",
	}[f.Value.Type()]
	if want == "" {
		return err
	}
	return fmt.Errorf("--%s is %q, want %s", f.Name, clean(bad.GetValue()), want)
}

// completionExamples gives the library's commands for completion examples, as all
// others have.
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

// group is a command that only has others below it.
func group(use, short, long, example string) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: long, Example: example,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("unknown command %q for %q", args[0], cmd.CommandPath())
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
}

// interactive reports whether the console can be shown; if it was wanted and cannot
// be, it says so.
func (s *session) interactive(declined bool) bool {
	if declined || s.plainly() {
		return false
	}
	why := notInteractive(s.Stdin, s.Stdout, s.Env)
	if why != "" {
		s.remark("%s: going on as with --non-interactive", why)
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
		Short: "Make a cluster of the machines",
		Long: `Make a cluster of the machines that the configuration names: verify the evidence of
the first one, run kubeadm init on it, install the services, and wait until the
others have joined and are ready.

On a terminal the console shows the checks, the plan and what each step will do, and
asks before anything is created. With --non-interactive it prints one line for each
change, or with -o json one event per line, and needs --yes.

Init can be left and interrupted at any time: the same command goes on where it was.`,
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
	cmd.Flags().BoolVar(&nonInteractive, "non-interactive", false, "print, ask nothing")
	cmd.Flags().BoolVarP(&o.yes, "yes", "y", false, "the plan and its warnings are accepted")
	cmd.Flags().DurationVar(&o.timeout, "timeout", 0, "stop after this long, such as 10m; init can be taken up again (0: never)")
	s.outputFlag(cmd, &out, "what to print: text, or json for one event per line")
	return cmd
}

func (s *session) statusCommand() *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the cluster as it is now",
		Long: `Show the cluster as it is now: the versions it has and is brought to, its nodes, the
machines that are not nodes yet, and what is not as it should be.

It changes nothing. The exit code is 1 if the cluster does not answer.`,
		Example: `  constellation status
  constellation status -o json | jq '.nodes[].name'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return s.printStatus(cmd.Context(), out) },
	}
	s.outputFlag(cmd, &out, "what to print: text, or json for one document")
	return cmd
}

func (s *session) configCommand() *cobra.Command {
	cmd := group("config", "Write, check and migrate the configuration",
		"Write, check and migrate constellation-conf.yaml, which says what cluster is wanted.",
		`  constellation config generate sandbox
  constellation config validate`)
	cmd.AddCommand(s.configGenerate(), s.configValidate(), s.configMigrate())
	return cmd
}

func (s *session) configGenerate() *cobra.Command {
	var o engine.GenerateOptions
	cmd := &cobra.Command{
		Use:   "generate PROVIDER",
		Short: "Write a new configuration",
		Long: `Write a new constellation-conf.yaml with comments into the workspace. A file that is
there is never replaced.

If the workspace has a sandbox, its measurements and versions are filled in.`,
		Example: `  constellation config generate sandbox --name demo
  constellation -C demo config generate sandbox --kubernetes ` + first(s.Kubernetes),
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: fixed("sandbox"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ws, dir, err := s.newWorkspace()
			if err != nil {
				return err
			}
			if args[0] == "sandbox" {
				o.Sandbox = s.findSandbox(cmd.Context(), dir)
			}
			b, err := engine.GenerateConfig(args[0], o)
			if err != nil {
				return err
			}
			path, err := ws.WriteConfig(b)
			if err != nil {
				return err
			}
			fmt.Fprintf(s.out, "wrote %s\n", clean(path))
			if args[0] == "sandbox" && o.Sandbox == nil {
				fmt.Fprintf(s.out, "next  %s\n", s.command("sandbox up"))
			} else {
				fmt.Fprintf(s.out, "next  %s\n", s.command("init"))
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&o.Name, "name", "", "name of the cluster")
	cmd.Flags().StringVar(&o.Kubernetes, "kubernetes", "", "version of Kubernetes, such as "+first(s.Kubernetes))
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

// validation is the answer of config validate.
type validation struct {
	Schema string              `json:"schema"`
	File   string              `json:"file"`
	Valid  bool                `json:"valid"`
	Errors []engine.FieldError `json:"errors"`
}

func (s *session) configValidate() *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use:   "validate",
		Short: "Check the configuration",
		Long: `Check constellation-conf.yaml and tell everything that is wrong with it, each with its
line and what to do. The exit code is 2 if there is anything.`,
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
			c, err := engine.ParseConfig(b)
			var list *engine.ConfigErrors
			if err != nil && !errors.As(err, &list) {
				return err
			}
			if out == asJSON {
				v := validation{Schema: engine.Schema, File: configFile, Valid: err == nil, Errors: []engine.FieldError{}}
				if list != nil {
					v.Errors = list.Errors
				}
				if err := document(s.out, v); err != nil {
					return err
				}
				if list != nil {
					return exitStatus(engine.ExitUsage)
				}
				return nil
			}
			if list != nil {
				return &engine.Error{Err: list, Exit: engine.ExitUsage}
			}
			fmt.Fprintf(s.out, "%s is valid: cluster %s, %s, %s, Kubernetes %s, image %s, release %s\n", configFile, clean(c.Name),
				count(c.ControlPlanes(), "control plane"), count(c.Workers(), "worker"), c.Kubernetes, c.Image, c.Services)
			return nil
		},
	}
	s.outputFlag(cmd, &out, "what to print: text, or json for one document")
	return cmd
}

// configFile is the name of the configuration in a workspace.
const configFile = "constellation-conf.yaml"

func (s *session) configMigrate() *cobra.Command {
	return &cobra.Command{
		Use:   "migrate",
		Short: "Bring the configuration to the current format",
		Long: `Bring constellation-conf.yaml to the format of this program. Comments and layout stay.
The exit code is 3 if there is nothing to do.`,
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
			b, changed, err := engine.MigrateConfig(b)
			if err != nil {
				return usage(err)
			}
			if !changed {
				fmt.Fprintf(s.out, "%s has the current format already\n", configFile)
				return exitStatus(engine.ExitNothing)
			}
			if err := ws.ReplaceConfig(b); err != nil {
				return err
			}
			fmt.Fprintf(s.out, "%s now has the current format\n", configFile)
			return nil
		},
	}
}

// usage gives an error about a file the exit code of bad configuration, unless it
// has one.
func usage(err error) error {
	var list *engine.ConfigErrors
	var e *engine.Error
	if errors.As(err, &list) && !errors.As(err, &e) {
		return &engine.Error{Err: list, Exit: engine.ExitUsage}
	}
	return err
}

// versionAnswer is the answer of version.
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
		Long:    "Show the version of this program and of the Kubernetes it can run in a sandbox.",
		Example: "  constellation version -o json | jq -r .release",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			v := versionAnswer{engine.Schema, s.Release, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH, s.Kubernetes}
			if out == asJSON {
				return document(s.out, v)
			}
			fmt.Fprintf(s.out, "constellation %s (%s, %s)\nkubernetes    %s\n", v.Release, v.Go, v.Platform, strings.Join(v.Kubernetes, " "))
			return nil
		},
	}
	s.outputFlag(cmd, &out, "what to print: text, or json for one document")
	return cmd
}

// findSandbox returns the sandbox of a workspace; nil if it has none.
func (s *session) findSandbox(ctx context.Context, dir string) *engine.SandboxInfo {
	box, err := s.Sandbox(s.log)
	if err != nil {
		return nil
	}
	st, err := box.Status(ctx, dir)
	if err != nil {
		s.log.Debug("sandbox not found", "workspace", dir, "err", err)
		return nil
	}
	return &st.SandboxInfo
}
