package view

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// programName is the name of this program in the engine's texts.
const programName = "constellation"

// PluginName is the name of this program when kubectl starts it as a plugin.
const PluginName = "kubectl " + programName

// CommandFormatter writes commands so that the user can copy and run them from the current
// directory. The zero value leaves commands as the engine writes them.
type CommandFormatter struct {
	Program string // as the user called it; "" means programName
	Dir     string // the workspace, as given with -C; "" or "." if it is the current one
	// Home is the workspace's absolute path, which the engine uses; "" if unknown.
	Home string
	// Kubeconfig is the path of the cluster's kubeconfig; "" if unknown.
	Kubeconfig string
	// Context is the context for kubectl commands; "" means the current one.
	Context string
}

func (sp CommandFormatter) name() string {
	if sp.Program == "" {
		return programName
	}
	if sp.Program == PluginName {
		return PluginName
	}
	return QuoteArg(sp.Program)
}

// Command returns a command line for the same workspace; without args it opens the console.
func (sp CommandFormatter) Command(args string) string {
	cmd := sp.name()
	if sp.Dir != "" && sp.Dir != "." {
		cmd += " -C " + QuoteArg(sp.Dir)
	}
	if args != "" {
		cmd += " " + args
	}
	return cmd
}

// Line formats a whole command line of the engine.
func (sp CommandFormatter) Line(cmd string) string {
	if rest, ok := strings.CutPrefix(cmd, programName+" "); ok {
		return sp.args(rest)
	}
	if sp.Context != "" {
		cmd = kubectl.ReplaceAllStringFunc(cmd, func(s string) string { return s + "--context " + QuoteArg(sp.Context) + " " })
	}
	return cmd
}

// args returns a command line with these arguments. It replaces the engine's -C for this
// workspace by the user's.
func (sp CommandFormatter) args(args string) string {
	if sp.Home != "" {
		if before, after, ok := strings.Cut(args+" ", " -C "+QuoteArg(sp.Home)+" "); ok {
			return sp.Command(strings.TrimSpace(before + " " + after))
		}
	}
	return sp.name() + " " + args
}

// export returns the command that sets KUBECONFIG for later kubectl commands.
func (sp CommandFormatter) export() string { return "export KUBECONFIG=" + QuoteArg(sp.Kubeconfig) }

// kubectl matches calls of kubectl in a command line, also after another command.
var kubectl = regexp.MustCompile(`(^|[;&|] )kubectl `)

// needsExport reports whether a command line calls kubectl and depends on KUBECONFIG.
func (sp CommandFormatter) needsExport(cmd string) bool {
	return sp.Kubeconfig != "" && kubectl.MatchString(cmd)
}

// Alone formats a command line that does not depend on KUBECONFIG.
func (sp CommandFormatter) Alone(cmd string) string {
	cmd = sp.Line(cmd)
	if sp.Kubeconfig == "" {
		return cmd
	}
	return kubectl.ReplaceAllStringFunc(cmd, func(s string) string { return s + "--kubeconfig " + QuoteArg(sp.Kubeconfig) + " " })
}

// Text formats the commands in a sentence, which are enclosed in backquotes. Commands
// without -C get this workspace.
func (sp CommandFormatter) Text(s string) string {
	const start = "`" + programName + " "
	var b strings.Builder
	for {
		i := strings.Index(s, start)
		if i < 0 {
			b.WriteString(s)
			return b.String()
		}
		b.WriteString(s[:i] + "`")
		s = s[i+len(start):]
		args, rest, closed := strings.Cut(s, "`")
		switch {
		case !closed:
			b.WriteString(sp.name() + " " + s)
			return b.String()
		case strings.Contains(" "+args+" ", " -C "):
			b.WriteString(sp.args(args))
		default:
			b.WriteString(sp.Command(args))
		}
		b.WriteByte('`')
		s = rest
	}
}

// CalledAs returns the shortest command that starts arg0 from the directory wd: its base
// name if PATH resolves it, else a path.
func CalledAs(arg0, wd string) string {
	base := filepath.Base(arg0)
	if arg0 == "" || base == "." {
		return programName
	}
	if base == "kubectl-"+programName {
		return PluginName
	}
	if !strings.ContainsRune(arg0, filepath.Separator) {
		return base
	}
	if found, err := exec.LookPath(base); err == nil && sameFile(found, arg0) {
		return base
	}
	if !filepath.IsAbs(arg0) {
		return arg0
	}
	rel, err := filepath.Rel(wd, arg0)
	if err != nil || len(rel) >= len(arg0) || strings.HasPrefix(rel, "../..") {
		return arg0
	}
	if !strings.ContainsRune(rel, filepath.Separator) {
		rel = "." + string(filepath.Separator) + rel // a bare name would be searched in PATH
	}
	return rel
}

func sameFile(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// QuoteArg quotes an argument for a shell.
func QuoteArg(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./_-") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
