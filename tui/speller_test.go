package tui

import (
	"os"
	"path/filepath"
	"testing"
)

func TestCommandsAreSpelledAsTheUserWouldTypeThem(t *testing.T) {
	const said = "is it running? `constellation sandbox status` tells, `constellation init -C /x` goes on; see constellation's log"
	for _, tt := range []struct {
		name string
		sp   speller
		text string
		line string // of "constellation status -C /x"
		cmd  string
	}{
		{"as the engine does", speller{}, said, "constellation status -C /x", "constellation init"},
		{"here", speller{"constellation", "."}, said, "constellation status -C /x", "constellation init"},
		{
			"by another name",
			speller{"bin/constellation", "."},
			"is it running? `bin/constellation sandbox status` tells, `bin/constellation init -C /x` goes on; see constellation's log",
			"bin/constellation status -C /x", "bin/constellation init",
		},
		{
			"about another directory",
			speller{"constellation", "my demo"},
			"is it running? `constellation -C 'my demo' sandbox status` tells, `constellation init -C /x` goes on; see constellation's log",
			"constellation status -C /x", "constellation -C 'my demo' init",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.sp.text(said); got != tt.text {
				t.Errorf("text %q\nwant %q", got, tt.text)
			}
			if got := tt.sp.line("constellation status -C /x"); got != tt.line {
				t.Errorf("line %q, want %q", got, tt.line)
			}
			if got := tt.sp.command("init"); got != tt.cmd {
				t.Errorf("command %q, want %q", got, tt.cmd)
			}
		})
	}
}

func TestProgramIsNamedAsItWasCalled(t *testing.T) {
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
		{"constellation", src, "constellation"},
		{"bin/constellation", src, "bin/constellation"},
		{"./constellation", src, "./constellation"},
		{onPath, src, "constellation"},
		{src + "/bin/constellation", src, "bin/constellation"},
		{src + "/bin/constellation", src + "/bin", "./constellation"},
		{src + "/bin/constellation", src + "/demo", "../bin/constellation"},
		{src + "/bin/constellation", "/usr/share/doc", src + "/bin/constellation"},
		{"", src, "constellation"},
	} {
		if got := calledAs(tt.arg0, tt.wd); got != tt.want {
			t.Errorf("%s in %s is %s, want %s", tt.arg0, tt.wd, got, tt.want)
		}
	}
}
