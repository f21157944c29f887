package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestPages(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "man")
	if err := write(dir); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"constellation.1": "constellation-check(1)", "constellation-check.1": "--print-rbac", "constellation-mcp.1": "Model Context", "constellation-upgrade-apply.1": "EXAMPLE",
	} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || !strings.Contains(string(b), want) {
			t.Errorf("%s lacks %q: %v", name, want, err)
		}
	}
	// Two runs write the same pages: they have no date of the day.
	again := filepath.Join(t.TempDir(), "man")
	if err := write(again); err != nil {
		t.Fatal(err)
	}
	a, err := os.ReadFile(filepath.Join(dir, "constellation-check.1"))
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(again, "constellation-check.1")); err != nil || string(a) != string(b) {
		t.Errorf("a second run wrote another page: %v", err)
	}
}
