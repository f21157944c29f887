package tui

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// programName is how the user calls this program: what a command must begin with to be
// copied. The engine's words always call it constellation.
const programName = "constellation"

// speller writes commands as the user would type them, where the user stands. The zero
// value writes them as the engine does.
type speller struct {
	program string // "" means programName
	dir     string // the workspace, as given with -C; "" or "." if it is the current one
	// home is the workspace's absolute path, which the engine names it by; "" if it is not known.
	home string
	// kubeconfig is the file that leads kubectl to the cluster; "" if none is known.
	kubeconfig string
}

func (sp speller) name() string {
	if sp.program == "" {
		return programName
	}
	return quoteArg(sp.program)
}

// command is a command line for the same workspace; without args it opens the console.
func (sp speller) command(args string) string {
	cmd := sp.name()
	if sp.dir != "" && sp.dir != "." {
		cmd += " -C " + quoteArg(sp.dir)
	}
	if args != "" {
		cmd += " " + args
	}
	return cmd
}

// line is a whole command line that the engine wrote.
func (sp speller) line(cmd string) string {
	if rest, ok := strings.CutPrefix(cmd, programName+" "); ok {
		return sp.args(rest)
	}
	return cmd
}

// args is a command line with these arguments, where the engine's name for this workspace is
// what the user calls it.
func (sp speller) args(args string) string {
	if sp.home != "" {
		if before, after, ok := strings.Cut(args+" ", " -C "+quoteArg(sp.home)+" "); ok {
			return sp.command(strings.TrimSpace(before + " " + after))
		}
	}
	return sp.name() + " " + args
}

// export is the line that leads kubectl to the cluster from there on.
func (sp speller) export() string { return "export KUBECONFIG=" + quoteArg(sp.kubeconfig) }

// kubectl matches where a command line calls kubectl, be it after another command.
var kubectl = regexp.MustCompile(`(^|[;&|] )kubectl `)

// needsExport reports whether a command line leads to a cluster that it does not name.
func (sp speller) needsExport(cmd string) bool {
	return sp.kubeconfig != "" && kubectl.MatchString(cmd)
}

// alone is a command line that needs nothing to be exported before.
func (sp speller) alone(cmd string) string {
	cmd = sp.line(cmd)
	if sp.kubeconfig == "" {
		return cmd
	}
	return kubectl.ReplaceAllStringFunc(cmd, func(s string) string { return s + "--kubeconfig " + quoteArg(sp.kubeconfig) + " " })
}

// text is a sentence with commands in it, which stand between backquotes. Those that
// name no workspace are about this one.
func (sp speller) text(s string) string {
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

// calledAs is the shortest way to call the program that was started as arg0, from the
// directory wd: its name alone if the shell finds it, else a path.
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
		rel = "." + string(filepath.Separator) + rel // else the shell would look for it elsewhere
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
