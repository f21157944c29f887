//go:build unix

package sandboxexec

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"constellation/engine/cloud"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/internal/testneeds"
)

// runEnv makes this test binary a console that executes its arguments with Run.
const runEnv = "SANDBOXEXEC_TEST_RUN"

func TestMain(m *testing.M) {
	if os.Getenv(runEnv) == "" {
		os.Exit(m.Run())
	}
	code, err := Run(os.Args[1:])
	if err != nil {
		var e *plan.Error
		if errors.As(err, &e) {
			os.Stderr.WriteString(e.Error() + "\n" + e.Remedy + "\n")
		}
		code = plan.ExitCode(err)
	}
	os.Exit(code)
}

// install links the real program as that of a release, puts it alone in PATH, and returns its path.
func install(t *testing.T, release string) string {
	t.Helper()
	testneeds.Time(t, "half a minute: it links constellation-sandbox")
	dir := t.TempDir()
	p := filepath.Join(dir, Name)
	testneeds.Tree()
	build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags", "-s -w -X constellation/engine/version.Release="+release, "-o", p, "constellation/engine/sandbox/cmd")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	t.Setenv("PATH", dir)
	return p
}

// runSelf executes args with Run in a process of its own, because Run replaces the process.
func runSelf(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append(os.Environ(), runEnv+"=1")
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// isolate gives the program empty directories. The Go toolchain's cache follows the same variables, so
// call it after install.
func isolate(t *testing.T) {
	t.Helper()
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
}

func TestProgramOfTheSameRelease(t *testing.T) {
	install(t, version.Release)
	isolate(t)
	if _, err := Find(t.Context(), t.TempDir()); !errors.Is(err, cloud.ErrNotFound) {
		t.Errorf("Find returned %v, want an error that wraps cloud.ErrNotFound", err)
	}
	if code, out, errs := runSelf(t, "sandbox", "--help"); code != 0 || !strings.Contains(out, "local test cloud") {
		t.Errorf("sandbox --help exited with %d and printed %q, %q", code, out, errs)
	}
	if code, _, errs := runSelf(t, "sandbox", "no-such-verb"); code != plan.ExitUsage {
		t.Errorf("an unknown verb exited with %d, want %d: %s", code, plan.ExitUsage, errs)
	}
}

func TestProgramOfAnotherRelease(t *testing.T) {
	p := install(t, "v0.9.0")
	isolate(t)
	for name, err := range map[string]error{"Find": func() error { _, err := Find(t.Context(), t.TempDir()); return err }(), "sameRelease": sameRelease(t.Context(), p)} {
		var e *plan.Error
		if !errors.As(err, &e) || plan.ExitCode(err) != plan.ExitUsage || errors.Is(err, cloud.ErrNotFound) {
			t.Fatalf("%s returned %v, want a usage error", name, err)
		}
		for _, want := range []string{p, `"v0.9.0"`, version.Release} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s returned %q without %s", name, err, want)
			}
		}
		if !strings.Contains(e.Remedy, "from the same release") {
			t.Errorf("%s has the remedy %q", name, e.Remedy)
		}
	}
	code, out, errs := runSelf(t, "sandbox", "--help")
	if code != plan.ExitUsage || out != "" || !strings.Contains(errs, "from the same release") {
		t.Errorf("sandbox --help exited with %d and printed %q, %q; want %d and the remedy alone", code, out, errs, plan.ExitUsage)
	}
}

// script puts a script alone in PATH in place of the program.
func script(t *testing.T, content string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, Name), []byte(content), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":/usr/bin:/bin")
}

// A program of the same release gets the arguments and its exit code is passed on.
func TestArgumentsAndExitCode(t *testing.T) {
	script(t, "#!/bin/sh\nif [ \"$1\" = --version ]; then echo constellation "+version.Release+"; exit; fi\necho \"$@\"\nexit 7\n")
	if code, out, errs := runSelf(t, "sandbox", "down", "--name", "a b"); code != 7 || out != "sandbox down --name a b\n" || errs != "" {
		t.Errorf("Run exited with %d and printed %q, %q", code, out, errs)
	}
}

// A program of another release, or one that reports none, never gets the arguments.
func TestRefusedPrograms(t *testing.T) {
	for name, content := range map[string]string{
		"damaged":         "\x7fELF",
		"older release":   "#!/bin/sh\nif [ \"$1\" = --version ]; then echo constellation v0.9.0; exit; fi\ntouch \"$MARK\"\n",
		"no release":      "#!/bin/sh\nif [ \"$1\" != --version ]; then touch \"$MARK\"; fi\n",
		"fails":           "#!/bin/sh\nif [ \"$1\" = --version ]; then exit 3; fi\ntouch \"$MARK\"\n",
		"too long answer": "#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8 9; do echo 0123456789; done\n",
	} {
		t.Run(name, func(t *testing.T) {
			mark := filepath.Join(t.TempDir(), "executed")
			t.Setenv("MARK", mark)
			script(t, content)
			_, err := Find(t.Context(), t.TempDir())
			var e *plan.Error
			if !errors.As(err, &e) || plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(e.Remedy, "from the same release") || len(err.Error()) > 300 {
				t.Errorf("Find returned %v, want a usage error with a remedy", err)
			}
			_ = os.Remove(mark) // Find reads only, and executes both at once
			code, out, errs := runSelf(t, "sandbox", "down")
			if code != plan.ExitUsage || out != "" || !strings.Contains(errs, Name) {
				t.Errorf("Run exited with %d and printed %q, %q", code, out, errs)
			}
			if _, err := os.Stat(mark); err == nil {
				t.Error("Run executed the program with its arguments")
			}
		})
	}
}

// With two installations, a console executes the program beside itself, whatever PATH has first.
// Without one beside itself it takes that in PATH, and an error names both files.
func TestTwoInstallations(t *testing.T) {
	script(t, "#!/bin/sh\necho constellation v0.9.0\n")
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	console, beside := filepath.Join(dir, "constellation"), filepath.Join(dir, Name)
	b, err := os.ReadFile(exe)
	if err == nil {
		err = os.WriteFile(console, b, 0o700)
	}
	if err == nil {
		err = os.WriteFile(beside, []byte("#!/bin/sh\nif [ \"$1\" = --version ]; then echo constellation "+version.Release+"; exit; fi\necho beside\n"), 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
	run := func() (code int, out string) {
		cmd := exec.CommandContext(t.Context(), console, "sandbox", "status")
		cmd.Env = append(os.Environ(), runEnv+"=1")
		b, err := cmd.CombinedOutput()
		if cmd.ProcessState == nil {
			t.Fatal(err)
		}
		return cmd.ProcessState.ExitCode(), string(b)
	}
	if code, out := run(); code != 0 || out != "beside\n" {
		t.Errorf("the console exited with %d and printed %q, want the program beside it", code, out)
	}
	if err := os.Remove(beside); err != nil {
		t.Fatal(err)
	}
	code, out := run()
	for _, want := range []string{console, filepath.Join(strings.Split(os.Getenv("PATH"), ":")[0], Name), `"v0.9.0"`, "start constellation again"} {
		if code != plan.ExitUsage || !strings.Contains(out, want) {
			t.Errorf("the console exited with %d and printed %q; want %d and %s", code, out, plan.ExitUsage, want)
		}
	}
}

func TestMissingProgram(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if _, err := Find(t.Context(), t.TempDir()); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(err.Error(), "not found beside constellation") {
		t.Errorf("Find returned %v, want a usage error", err)
	}
	if code, _, errs := runSelf(t, "sandbox", "status"); code != plan.ExitUsage || !strings.Contains(errs, "install "+Name) {
		t.Errorf("Run exited with %d and printed %q", code, errs)
	}
}
