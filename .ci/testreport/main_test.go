package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const events = `# output of a build
{"Action":"pass","Package":"p","Test":"TestPlain"}
{"Action":"pass","Package":"p","Test":"TestPlain/sub"}
{"Action":"attr","Package":"p","Test":"TestRoot","Key":"needs","Value":"root"}
{"Action":"output","Package":"p","Test":"TestRoot","Output":"    root_test.go:7: needs root: to mount\n"}
{"Action":"output","Package":"p","Test":"TestRoot","Output":"--- SKIP: TestRoot (0.00s)\n"}
{"Action":"skip","Package":"p","Test":"TestRoot"}
{"Action":"attr","Package":"p","Test":"TestMounts/one","Key":"needs","Value":"root"}
{"Action":"pass","Package":"p","Test":"TestMounts/one"}
{"Action":"output","Package":"p","Test":"TestOdd","Output":"    odd_test.go:7: no terminal\n"}
{"Action":"skip","Package":"p","Test":"TestOdd"}
{"Action":"fail","Package":"p","Elapsed":2}
{"Action":"fail","Package":"q","Test":"TestTimes"}
{"Action":"pass","Package":"q","Test":"TestTimes"}
{"Action":"fail","Package":"q","Test":"TestBroken"}
{"Action":"fail","Package":"q","Test":"TestBroken"}
`

var day = time.Date(2026, 3, 4, 5, 0, 0, 0, time.UTC)

func TestTable(t *testing.T) {
	_, got := report1(t, filepath.Join(t.TempDir(), "flaky.txt"))
	for _, want := range []string{
		"nothing 2 1 0",
		"root 1 0 1 needs root: to mount",
		"other (not declared) 0 0 1 no terminal",
		"2.0 s p",
	} {
		if !strings.Contains(strings.Join(strings.Fields(got), " "), want) {
			t.Errorf("no row %q in:\n%s", want, got)
		}
	}
}

func TestRepeatedTestIsListedThenRejected(t *testing.T) {
	flaky := filepath.Join(t.TempDir(), "flaky.txt")
	if err := os.WriteFile(flaky, []byte("# comment\n2026-01-02 p TestPlain\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if ok, out := report1(t, flaky); !ok || !strings.Contains(out, "warning: q TestTimes passed only when repeated") {
		t.Errorf("the first time: %v\n%s", ok, out)
	}
	b, err := os.ReadFile(flaky)
	if want := "# comment\n2026-01-02 p TestPlain\n2026-03-04 q TestTimes\n"; err != nil || string(b) != want {
		t.Errorf("list is %q (%v), want %q", b, err, want)
	}
	if ok, out := report1(t, flaky); ok || !strings.Contains(out, "error: q TestTimes passed only when repeated, as on 2026-03-04") {
		t.Errorf("the second time: %v\n%s", ok, out)
	}
}

func TestMalformedListIsRejected(t *testing.T) {
	for _, line := range []string{"q TestTimes", "yesterday q TestTimes"} {
		flaky := filepath.Join(t.TempDir(), "flaky.txt")
		if err := os.WriteFile(flaky, []byte(line), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readFlaky(flaky); err == nil || !strings.Contains(err.Error(), "flaky.txt:1") {
			t.Errorf("%q: %v", line, err)
		}
	}
}

func report1(t *testing.T, flaky string) (ok bool, out string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "test.json")
	if err := os.WriteFile(path, []byte(events), 0o600); err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	ok, err := run(path, flaky, 3, day, &b)
	if err != nil {
		t.Fatal(err)
	}
	return ok, b.String()
}
