//go:build linux

package agent

import (
	"io/fs"
	"strings"
	"testing"

	"constellation/assets"
)

// An adopted host restricts the agent as machines of ours do.
func TestUnitOfAnAdoptedHostIsRestricted(t *testing.T) {
	b, err := fs.ReadFile(assets.Systemd(), "constellation-agent.service")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, begins := strings.Cut(string(b), "\nNoNewPrivileges=yes\n")
	restrictions, _, ends := strings.Cut(rest, "\n[Install]")
	if !begins || !ends || !strings.Contains(restrictions, "SystemCallFilter=") {
		t.Fatalf("the unit of our machines has no restrictions:\n%s", b)
	}
	if !strings.Contains(unit, "\nNoNewPrivileges=yes\n"+restrictions+"\n[Install]") {
		t.Errorf("the unit of adopted hosts has other restrictions:\n%s\nwant\n%s", unit, restrictions)
	}
}
