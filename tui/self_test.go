package tui

import (
	"strings"
	"testing"

	"constellation/engine"
	"constellation/engine/provenance"
)

// Other installations are listed and change no verdict.
func TestSelfListsOtherInstallations(t *testing.T) {
	r := engine.SelfReport{
		Report: provenance.Report{Executable: "/usr/lib/constellation/constellation", SHA256: "abc", Programs: []provenance.Program{{Name: "constellation", SHA256: "abc"}}},
		Others: []provenance.Other{
			{File: "/opt/old/constellation", First: true, Commit: "0123", CommitTime: "2026-11-24T01:30:03Z"},
			{File: "/home/a\x1b[2J/constellation"},
		},
	}
	var out strings.Builder
	writeSelf(&out, "v1.1.0", r, false)
	for _, want := range []string{
		"other    /opt/old/constellation (commit 0123 of 2026-11-24T01:30:03Z) is another installation in PATH, found before this one\n",
		"/constellation is another installation in PATH\n", "remedy   remove the installation", "\nverified\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	if strings.Count(out.String(), "remedy") != 1 || strings.Contains(out.String(), "\x1b") {
		t.Errorf("printed\n%q", out.String())
	}
	out.Reset()
	r.Others = nil
	writeSelf(&out, "v1.1.0", r, false)
	if strings.Contains(out.String(), "remedy") {
		t.Errorf("without another installation it printed\n%s", &out)
	}
}
