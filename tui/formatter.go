package tui

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// programName is the name of this program in the engine's texts.
const programName = "constellation"

// commandFormatter writes commands so that the user can copy and run them from the current
// directory. The zero value leaves commands as the engine writes them.
type commandFormatter struct {
	program string // as the user called it; "" means programName
	dir     string // the workspace, as given with -C; "" or "." if it is the current one
	// home is the workspace's absolute path, which the engine uses; "" if unknown.
	home string
	// kubeconfig is the path of the cluster's kubeconfig; "" if unknown.
	kubeconfig string
}

func (sp commandFormatter) name() string {
	if sp.program == "" {
		return programName
	}
	return quoteArg(sp.program)
}

// command returns a command line for the same workspace; without args it opens the console.
func (sp commandFormatter) command(args string) string {
	cmd := sp.name()
	if sp.dir != "" && sp.dir != "." {
		cmd += " -C " + quoteArg(sp.dir)
	}
	if args != "" {
		cmd += " " + args
	}
	return cmd
}

// line formats a whole command line of the engine.
func (sp commandFormatter) line(cmd string) string {
	if rest, ok := strings.CutPrefix(cmd, programName+" "); ok {
		return sp.args(rest)
	}
	return cmd
}

// args returns a command line with these arguments. It replaces the engine's -C for this
// workspace by the user's.
func (sp commandFormatter) args(args string) string {
	if sp.home != "" {
		if before, after, ok := strings.Cut(args+" ", " -C "+quoteArg(sp.home)+" "); ok {
			return sp.command(strings.TrimSpace(before + " " + after))
		}
	}
	return sp.name() + " " + args
}

// export returns the command that sets KUBECONFIG for later kubectl commands.
func (sp commandFormatter) export() string { return "export KUBECONFIG=" + quoteArg(sp.kubeconfig) }

// kubectl matches calls of kubectl in a command line, also after another command.
var kubectl = regexp.MustCompile(`(^|[;&|] )kubectl `)

// needsExport reports whether a command line calls kubectl and depends on KUBECONFIG.
func (sp commandFormatter) needsExport(cmd string) bool {
	return sp.kubeconfig != "" && kubectl.MatchString(cmd)
}

// alone formats a command line that does not depend on KUBECONFIG.
func (sp commandFormatter) alone(cmd string) string {
	cmd = sp.line(cmd)
	if sp.kubeconfig == "" {
		return cmd
	}
	return kubectl.ReplaceAllStringFunc(cmd, func(s string) string { return s + "--kubeconfig " + quoteArg(sp.kubeconfig) + " " })
}

// text formats the commands in a sentence, which are enclosed in backquotes. Commands
// without -C get this workspace.
func (sp commandFormatter) text(s string) string {
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
			b.WriteString(sp.command(args))
		}
		b.WriteByte('`')
		s = rest
	}
}

// calledAs returns the shortest command that starts arg0 from the directory wd: its base
// name if PATH resolves it, else a path.
func calledAs(arg0, wd string) string {
	base := filepath.Base(arg0)
	if arg0 == "" || base == "." {
		return programName
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

// quoteArg quotes an argument for a shell.
func quoteArg(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./_-") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
