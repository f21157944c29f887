package main

import (
	"bytes"
	"os/exec"
	"strings"
	"testing"
)

// runtimePackages are the packages that an enrolled machine has for its container runtime.
var runtimePackages = []string{"containerd", "runc", "containernetworking-plugins"}

// newerPackages returns an archive, as debianPackages does, with the runtime's packages of a release of Debian under a
// higher version. Their programs are the same.
func newerPackages(t *testing.T, release string) []byte {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "bash", "-ec", `tar -xf -
cd repo
for f in *.deb; do
  dpkg-deb -R "$f" content
  sed -i 's/^Version: .*/&+newer1/' content/DEBIAN/control
  rm -rf "$f" content/usr/share/doc content/usr/share/man # machines have none
  dpkg-deb -Znone -b content "newer-${f%%_*}.deb" >&2
  rm -r content
done
dpkg-scanpackages -m . >Packages
cd .. && tar -cf - repo`)
	cmd.Dir, cmd.Stdin = t.TempDir(), bytes.NewReader(debianPackages(t, release, append([]string{"--reinstall"}, runtimePackages...)...))
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("repack the packages of the runtime: %v\n%s", err, errs.String())
	}
	return out
}

// wantNewer checks that a machine has the packages of newerPackages completely, which of them are held, and that its agent
// reported that.
func (c *cloud) wantNewer(machine string, held bool) {
	c.t.Helper()
	out, _ := c.asRoot(machine, `dpkg-query -W -f '${Package} ${db:Status-Want} ${db:Status-Status} ${Version}\n' `+strings.Join(runtimePackages, " "))
	want := "install"
	if held {
		want = "hold"
	}
	for _, name := range runtimePackages {
		ok := false
		for _, line := range strings.Split(out, "\n") {
			ok = ok || strings.HasPrefix(line, name+" "+want+" installed ") && strings.HasSuffix(line, "+newer1")
		}
		if !ok {
			c.t.Errorf("packages of %s, want %s newer and with the selection %s:\n%s", machine, name, want, out)
		}
	}
	said, _ := c.asRoot(machine, "cat /var/lib/constellation/agent/upgrade.jsonl")
	for _, line := range []string{"package containerd was upgraded from ", "containerd was restarted, and answers"} {
		if !strings.Contains(said, line) {
			c.t.Errorf("the agent of %s did not report %q", machine, line)
		}
	}
	if left, _ := c.asRoot(machine, "ls /var/lib/constellation/agent/packages.json 2>/dev/null; dpkg --audit"); strings.TrimSpace(left) != "" {
		c.t.Errorf("left on %s:\n%s", machine, left)
	}
}
