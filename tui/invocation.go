package tui

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/tui/term"
	"constellation/tui/view"
)

// Invocation is one call of a program whose verbs are defined outside this package; see
// App.Verbs. Its output has the same forms as that of the verbs in this package.
type Invocation struct{ s *session }

// Format is the value of -o.
type Format = format

// Values of -o. Markdown is allowed only for flags of MarkdownFlag.
const (
	Text     = text
	JSON     = asJSON
	Markdown = asMarkdown
)

// Log is the debug log of the call.
func (i *Invocation) Log() *slog.Logger { return i.s.log }

// LogToStderr logs messages of level info and above even without --debug. It is for verbs
// whose only output is their log.
func (i *Invocation) LogToStderr() { i.s.level.Set(min(i.s.level.Level(), slog.LevelInfo)) }

// Dir is the workspace's directory as the user gave it with -C.
func (i *Invocation) Dir() string { return i.s.dir }

// Program is the command that starts this program, as the user called it.
func (i *Invocation) Program() string { return i.s.Program }

// Now returns the time.
func (i *Invocation) Now() time.Time { return i.s.Now() }

// Stdin returns the standard input of the process.
func (i *Invocation) Stdin() io.Reader { return i.s.Stdin }

// Stdout returns the standard output of the process.
func (i *Invocation) Stdout() io.Writer { return i.s.Stdout }

// Stderr returns the standard error of the process.
func (i *Invocation) Stderr() io.Writer { return i.s.Stderr }

// Out is stdout for the verb's output: it survives a reader that closes the pipe.
func (i *Invocation) Out() io.Writer { return i.s.out }

// NewWorkspace opens the workspace, creates its directory if only that is missing, and
// returns its absolute path.
func (i *Invocation) NewWorkspace() (dir string, err error) {
	_, dir, err = i.s.newWorkspace()
	return dir, err
}

// Signals cancels the returned context at SIGINT, SIGTERM or SIGHUP; the second signal ends
// the program at once. The exit code of the program is then that of the signal.
func (i *Invocation) Signals(ctx context.Context) (context.Context, context.CancelFunc) {
	return i.s.signals(ctx)
}

// Resumable marks a verb that changes something step by step. A signal stops it at a point
// where it can be resumed.
func Resumable(cmd *cobra.Command) *cobra.Command {
	cmd.Annotations = map[string]string{resumable: ""}
	return cmd
}

// resumable is the annotation of Resumable.
const resumable = "constellation/resumable"

// Command returns a command line of this program for the same workspace.
func (i *Invocation) Command(args string) string { return i.s.command(args) }

// Prompts reports whether the program can prompt: stdin and stdout are terminals, outside CI.
func (i *Invocation) Prompts() bool { return i.s.asks() }

// Confirmed prints cause and remedy of err, prompts, and reports whether the answer was yes. No
// is the default.
func (i *Invocation) Confirmed(err error, question string) bool {
	x := view.Explain(err, i.s.formatter())
	fmt.Fprintf(i.s.Stderr, "\n%s\n", cmp.Or(x.Why, x.What))
	if x.Remedy != "" {
		fmt.Fprintf(i.s.Stderr, "  %s\n", x.Remedy)
	}
	return i.s.prompt().confirmed(question)
}

// Unlock prompts for the name of a cluster that the preferences guard, before a verb changes it. name
// is that of a sandbox; empty means that of the workspace. It prompts only on a terminal, for text,
// and without nonInteractive.
func (i *Invocation) Unlock(name string, f Format, nonInteractive bool) error {
	if name != "" {
		return unlockNamed(i.s, name, f, nonInteractive)
	}
	return unlock(i.s, cluster.Access{}, f, nonInteractive)
}

// OutputFlag adds -o text|json to cmd.
func (i *Invocation) OutputFlag(cmd *cobra.Command, f *Format, usage string) {
	outputFlag(cmd, f, usage)
}

// MarkdownFlag adds -o text|json|markdown to cmd.
func (i *Invocation) MarkdownFlag(cmd *cobra.Command, f *Format, usage string) {
	*f = text
	cmd.Flags().VarP((*checkFormat)(f), "output", "o", usage)
	_ = cmd.RegisterFlagCompletionFunc("output", fixed("text", "json", "markdown"))
}

// Document prints v as the JSON output of a verb.
func (i *Invocation) Document(v any) error { return document(i.s.out, v) }

// Print writes lines without trailing spaces.
func (i *Invocation) Print(lines []string) { i.s.print(lines) }

// Stream is the event stream of a verb, printed as lines or as JSON Lines: hello first, result
// last, all with sequence numbers and times.
type Stream struct {
	*framed
	out sink
}

// Stream starts the event stream of a verb that works on object. End and Close must follow.
func (i *Invocation) Stream(f Format, object string) *Stream {
	out := i.s.printer(f, true)
	return &Stream{i.s.framed(out, object), out}
}

// Event prints an event.
func (s *Stream) Event(ev plan.Event) { s.event(ev) }

// End prints the result, unless the stream has one. text describes a success; err is nil then.
func (s *Stream) End(text string, err error, res plan.Result) { s.end(text, err, res) }

// Close ends the output. Nothing else may be printed before.
func (s *Stream) Close() { s.out.close() }

// Theme returns the theme of the display of stdout, for lines that are printed.
func (i *Invocation) Theme() *term.Theme { return i.s.page().Theme }

// ExitStatus returns an error that ends the program with code and prints nothing.
func ExitStatus(code int) error { return exitStatus(code) }

// Group returns a command that only has subcommands.
func Group(use, short, long, example string) *cobra.Command { return group(use, short, long, example) }

// Fixed completes a value from a list.
func Fixed(values ...string) func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return fixed(values...)
}

// Terminal reports whether stdin and stdout are terminals.
func (i *Invocation) Terminal() bool {
	return term.IsTerminal(i.s.Stdin) && term.IsTerminal(i.s.Stdout)
}

// RawTerminal sets the terminal on stdin to raw mode and returns a function that restores it.
func (i *Invocation) RawTerminal() (restore func(), err error) {
	return term.MakeRaw(i.s.Stdin.(*os.File)) // Terminal has checked it
}

// delegated reports whether args run, explain or complete the verb name. Then another program
// executes them; see App.RunSandbox.
func delegated(root *cobra.Command, name string, args []string) bool {
	if len(args) > 1 && (args[0] == cobra.ShellCompRequestCmd || args[0] == cobra.ShellCompNoDescRequestCmd) {
		args = args[1 : len(args)-1] // the last one is the word to complete
	}
	root.InitDefaultHelpCmd()
	cmd, rest, err := root.Find(args)
	if err != nil {
		return false
	}
	if cmd.Name() == "help" && cmd.Parent() == root {
		return len(rest) > 0 && rest[0] == name
	}
	return cmd.Name() == name && cmd.Parent() == root
}

// sandboxStub lists the verb sandbox in the help of a program that delegates it.
func sandboxStub() *cobra.Command {
	return &cobra.Command{
		Use: SandboxVerb, Short: SandboxShort, DisableFlagParsing: true,
		Long:              SandboxShort + ". The program constellation-sandbox executes this verb.",
		Example:           "  constellation sandbox --help",
		ValidArgsFunction: fixed(),
		RunE: func(*cobra.Command, []string) error {
			return &plan.Error{Op: "run sandbox", Err: errors.New("this program has no sandbox"), Exit: plan.ExitUsage}
		},
	}
}

// The verb that App.RunSandbox executes, and its short help.
const (
	SandboxVerb  = "sandbox"
	SandboxShort = "Run a local test cloud on this computer"
)
