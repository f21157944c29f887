package view

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"constellation/engine/check"
	"constellation/tui/term"
)

// A user copies the command of a note into a terminal in any folder.
func TestCommandsOfNotesNameTheWorkspace(t *testing.T) {
	k := &check.Check{Notes: []string{"It differs. `constellation upgrade check --write-config` writes it."}}
	sp := CommandFormatter{Program: "constellation", Dir: "demo"}
	const want = "constellation -C demo upgrade check --write-config"
	if rows := strings.Join(NoteRows(Page{Theme: term.NewTheme(term.Display{}), Commands: sp}, 120, k), "\n"); !strings.Contains(rows, want) {
		t.Errorf("rows: %q, want %q in them", rows, want)
	}
	if text := Markdown(k, sp); !strings.Contains(text, want) {
		t.Errorf("Markdown: %q, want %q in it", text, want)
	}
}

func TestCommandFormatter(t *testing.T) {
	const said = "is it running? `constellation sandbox status` tells, `constellation init -C /x` goes on; see constellation's log"
	for _, tt := range []struct {
		name string
		sp   CommandFormatter
		text string
		line string // of "constellation status -C /x"
		cmd  string
	}{
		{name: "as the engine does", sp: CommandFormatter{}, text: said, line: "constellation status -C /x", cmd: "constellation init"},
		{name: "here", sp: CommandFormatter{Program: "constellation", Dir: "."}, text: said, line: "constellation status -C /x", cmd: "constellation init"},
		{
			name: "by another name",
			sp:   CommandFormatter{Program: "bin/constellation", Dir: "."},
			text: "is it running? `bin/constellation sandbox status` tells, `bin/constellation init -C /x` goes on; see constellation's log",
			line: "bin/constellation status -C /x", cmd: "bin/constellation init",
		},
		{
			name: "about another directory",
			sp:   CommandFormatter{Program: "constellation", Dir: "my demo"},
			text: "is it running? `constellation -C 'my demo' sandbox status` tells, `constellation init -C /x` goes on; see constellation's log",
			line: "constellation status -C /x", cmd: "constellation -C 'my demo' init",
		},
		{
			name: "about this directory, which the engine names by its path",
			sp:   CommandFormatter{Program: "constellation", Dir: "demo", Home: "/x"},
			text: "is it running? `constellation -C demo sandbox status` tells, `constellation -C demo init` goes on; see constellation's log",
			line: "constellation -C demo status", cmd: "constellation -C demo init",
		},
		{
			name: "about another than this one",
			sp:   CommandFormatter{Program: "constellation", Dir: "demo", Home: "/x/demo"},
			text: "is it running? `constellation -C demo sandbox status` tells, `constellation init -C /x` goes on; see constellation's log",
			line: "constellation status -C /x", cmd: "constellation -C demo init",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.sp.Text(said); got != tt.text {
				t.Errorf("text %q\nwant %q", got, tt.text)
			}
			if got := tt.sp.Line("constellation status -C /x"); got != tt.line {
				t.Errorf("line %q, want %q", got, tt.line)
			}
			if got := tt.sp.Command("init"); got != tt.cmd {
				t.Errorf("command %q, want %q", got, tt.cmd)
			}
		})
	}
}

func TestCalledAs(t *testing.T) {
	dir := t.TempDir()
	onPath := filepath.Join(dir, "path", "constellation")
	for _, p := range []string{onPath, filepath.Join(dir, "src", "bin", "constellation")} {
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", filepath.Dir(onPath))
	src := filepath.Join(dir, "src")
	for _, tt := range []struct{ arg0, wd, want string }{
		{arg0: "constellation", wd: src, want: "constellation"},
		{arg0: "bin/constellation", wd: src, want: "bin/constellation"},
		{arg0: "./constellation", wd: src, want: "./constellation"},
		{arg0: onPath, wd: src, want: "constellation"},
		{arg0: src + "/bin/constellation", wd: src, want: "bin/constellation"},
		{arg0: src + "/bin/constellation", wd: src + "/bin", want: "./constellation"},
		{arg0: src + "/bin/constellation", wd: src + "/demo", want: "../bin/constellation"},
		{arg0: src + "/bin/constellation", wd: "/usr/share/doc", want: src + "/bin/constellation"},
		{arg0: "", wd: src, want: "constellation"},
	} {
		if got := CalledAs(tt.arg0, tt.wd); got != tt.want {
			t.Errorf("%s in %s is %s, want %s", tt.arg0, tt.wd, got, tt.want)
		}
	}
}

func TestKubectlGetsAKubeconfig(t *testing.T) {
	sp := CommandFormatter{Program: "./bin/constellation", Kubeconfig: "/home/my ops/admin.conf"}
	for _, tt := range []struct {
		cmd, want string
		needs     bool
	}{
		{cmd: "kubectl uncordon worker-0", want: "kubectl --kubeconfig '/home/my ops/admin.conf' uncordon worker-0", needs: true},
		{cmd: "kubectl get csr; kubectl -n kubectl get pods", want: "kubectl --kubeconfig '/home/my ops/admin.conf' get csr; kubectl --kubeconfig '/home/my ops/admin.conf' -n kubectl get pods", needs: true},
		{cmd: "constellation config validate", want: "./bin/constellation config validate", needs: false},
		{cmd: "", want: "", needs: false},
	} {
		if got, needs := sp.Alone(tt.cmd), sp.needsExport(tt.cmd); got != tt.want || needs != tt.needs {
			t.Errorf("%q is %q, needs the export: %v; want %q, %v", tt.cmd, got, needs, tt.want, tt.needs)
		}
	}
	if got, want := sp.export(), "export KUBECONFIG='/home/my ops/admin.conf'"; got != want {
		t.Errorf("export is %q, want %q", got, want)
	}
	if got := (CommandFormatter{}).Alone("kubectl get nodes"); got != "kubectl get nodes" {
		t.Errorf("without a kubeconfig: %q", got)
	}
}
