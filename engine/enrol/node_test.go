package enrol

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"constellation/engine/plan"
)

// program writes the beginning of a program for an architecture.
func program(t *testing.T, file string, m elf.Machine) {
	t.Helper()
	b := make([]byte, 64)
	copy(b, "\x7fELF\x02\x01\x01")
	b[16], b[18], b[20], b[52] = byte(elf.ET_EXEC), byte(m), 1, 64
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, b, 0o755); err != nil {
		t.Fatal(err)
	}
}

func TestFindPrograms(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"bootstrapper", "agent"} {
		program(t, filepath.Join(dir, name), elf.EM_X86_64)
		program(t, filepath.Join(dir, "linux_arm64", name), elf.EM_AARCH64)
		program(t, filepath.Join(dir, "unpacked/releases/v1.1.0", name), elf.EM_AARCH64)
	}
	mixed := filepath.Join(dir, "mixed")
	program(t, filepath.Join(mixed, "bootstrapper"), elf.EM_X86_64)
	program(t, filepath.Join(mixed, "agent"), elf.EM_AARCH64)
	if err := os.Mkdir(filepath.Join(dir, "empty"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, dir, arch, want, problem string }{
		{name: "amd64", dir: dir, arch: "x86_64", want: filepath.Join(dir, "agent")},
		{name: "arm64 beside it", dir: dir, arch: "aarch64", want: filepath.Join(dir, "linux_arm64/agent")},
		{name: "an unpacked archive", dir: filepath.Join(dir, "unpacked"), arch: "aarch64", want: filepath.Join(dir, "unpacked/releases/v1.1.0/agent")},
		{name: "another architecture", dir: filepath.Join(dir, "unpacked"), arch: "x86_64", problem: "is a program for EM_AARCH64"},
		{name: "mixed architectures", dir: mixed, arch: "x86_64", problem: "agent is a program for EM_AARCH64"},
		{name: "none", dir: filepath.Join(dir, "empty"), arch: "x86_64", problem: "no such file"},
		{name: "none beside this program", arch: "x86_64", problem: "no such file"},
		{name: "unsupported", dir: dir, arch: "riscv64", problem: "none for the architecture riscv64"},
	} {
		p, err := FindPrograms(tt.dir, "v1.1.0", tt.arch)
		switch {
		case tt.problem == "" && (err != nil || p.Agent != tt.want):
			t.Errorf("%s: %v %v", tt.name, p, err)
		case tt.problem != "" && (err == nil || !strings.Contains(err.Error(), tt.problem) || plan.Remedy(err) == ""):
			t.Errorf("%s: %v, remedy %q", tt.name, err, plan.Remedy(err))
		}
	}
}

func TestNode(t *testing.T) {
	s, err := Node(Spec{Cluster: "uid", Machine: "w", Release: "v1.1.0", Files: []File{{Path: "/etc/constellation/machine.json", Mode: 0o600, Data: []byte("{}")}}}, Programs{"/b", "/a"})
	if err != nil {
		t.Fatal(err)
	}
	// Each unit of a file is one that a removal stops, and each folder of our own is deleted with later files.
	for _, f := range s.Files {
		if strings.HasSuffix(f.Path, ".service") {
			found := false
			for _, u := range s.Units {
				found = found || strings.HasSuffix(f.Path, "/"+u.Name)
			}
			if !found {
				t.Errorf("%s is no unit of the Spec", f.Path)
			}
		}
	}
	for _, bad := range []Spec{
		{Cluster: "uid"},
		{Cluster: "uid", Machine: "w", Files: []File{{Path: "/etc/a b", Mode: 0o600}}},
		{Cluster: "uid", Machine: "w", Files: []File{{Path: "/etc/../x", Mode: 0o600}}},
		{Cluster: "uid", Machine: "w", Files: []File{{Path: "/etc/x"}}},
		{Cluster: "uid", Machine: "w", Files: []File{{Path: "/etc/x", Link: "$(reboot)"}}},
		{Cluster: "uid", Machine: "w", Trees: []string{"/etc"}},
		{Cluster: "uid", Machine: "w", Packages: []Package{{"-o", "/x/y"}}},
		{Cluster: "uid", Machine: "w", Units: []Unit{{Name: "a b"}}},
	} {
		if err := bad.validate(); err == nil {
			t.Errorf("accepted: %+v", bad)
		}
	}
}

func TestParseJournal(t *testing.T) {
	const good = `{"version":1,"cluster":"u","machine":"w","release":"v1","state":"installed","begun":"2026-11-27T16:00:00Z","changed":"2026-11-27T16:00:00Z","files":[{"path":"/etc/x","before":{"kind":"absent"},"after":{"kind":"link","target":"/y"}}],"trees":["/var/lib/x"],"packages":["runc"],"units":[{"name":"a.service"}]}`
	if _, err := parseJournal([]byte(good)); err != nil {
		t.Fatal(err)
	}
	for _, edit := range [][2]string{
		{`"version":1`, `"version":2`},
		{`"cluster":"u"`, `"cluster":""`},
		{`"machine":"w"`, `"machine":"w\u001b[2J"`},
		{`"state":"installed"`, `"state":"x"`},
		{`"/etc/x"`, `"/etc/x y"`},
		{`"/etc/x"`, `"etc"`},
		{`"absent"`, `"file"`},
		{`"absent"}`, `"absent"},"copy":"1"`},
		{`"absent"}`, `"other"},"copy":"../1"`},
		{`"/var/lib/x"`, `"/var"`},
		{`"runc"`, `"-x"`},
		{`"a.service"`, `"a;b"`},
		{`"files"`, `"Unknown":1,"files"`},
		{`]}`, `]}{}`},
		{`{"version"`, `["version"`},
	} {
		bad := strings.Replace(good, edit[0], edit[1], 1)
		if bad == good {
			t.Fatalf("no %s", edit[0])
		}
		if _, err := parseJournal([]byte(bad)); err == nil {
			t.Errorf("accepted with %s", edit[1])
		}
	}
}

// TestScriptIsPortable parses the script with the shells that a machine may have.
func TestScriptIsPortable(t *testing.T) {
	for _, shell := range []string{"dash", "bash"} {
		if path, err := exec.LookPath(shell); err == nil {
			if out, err := exec.Command(path, "-n", "-c", script).CombinedOutput(); err != nil {
				t.Errorf("%s: %s", shell, out)
			}
		}
	}
}
