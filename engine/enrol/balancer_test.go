package enrol

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"constellation/internal/golden"
)

// exampleBalancer is that of the first of some control planes.
func exampleBalancer(servers int) (Spec, Balancer) {
	all := []Server{
		{"control-plane-2", netip.MustParseAddr("10.0.0.13")}, {"control-plane-0", netip.MustParseAddr("10.0.0.9")}, {"control-plane-1", netip.MustParseAddr("10.0.0.12")},
	}
	s := Spec{Cluster: "0123456789abcdef", Machine: all[0].Name, Files: []File{{Path: "/etc/x", Mode: 0o644}}}
	return s, Balancer{Address: netip.MustParseAddr("10.0.0.10"), Port: 8443, RouterID: 77, Interface: "eth0", Servers: all[:servers]}
}

// The programs of the distribution check the files, where they are installed.
func TestBalancerFiles(t *testing.T) {
	t.Parallel()
	for _, servers := range []int{1, 3} {
		s, b := exampleBalancer(servers)
		out, err := s.WithBalancer(b)
		if err != nil {
			t.Fatal(err)
		}
		if len(s.Files) != 1 || len(out.Files) != 4 || len(out.Packages) != 3 || !slices.Equal(out.started(true), []string{"haproxy.service", "keepalived.service"}) || len(out.started(false)) > 0 {
			t.Errorf("%d control planes: %+v", servers, out)
		}
		dir := t.TempDir()
		at := map[string]string{}
		for _, f := range out.Files[1:] {
			at[f.Path] = filepath.Join(dir, filepath.Base(f.Path))
			if err := os.WriteFile(at[f.Path], f.Data, f.Mode); err != nil {
				t.Fatal(err)
			}
			if servers == 3 {
				golden.Equal(t, filepath.Join("testdata", filepath.Base(f.Path)), string(f.Data))
			}
		}
		if text, err := os.ReadFile(at[KeepalivedFile]); err != nil || strings.Contains(string(text), "unicast") != (servers > 1) {
			t.Errorf("%d control planes, %v:\n%s", servers, err, text)
		}
		for _, check := range [][]string{{"haproxy", "-c", "-f", at[HAProxyFile]}, {"keepalived", "-t", "-f", at[KeepalivedFile]}, {"bash", "-n", at[balancerCheck]}} {
			if _, err := exec.LookPath(check[0]); err != nil {
				t.Logf("%s is not installed", check[0])
				continue
			}
			cmd := exec.CommandContext(t.Context(), check[0], check[1:]...)
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // keepalived ends its process group
			out, err := cmd.CombinedOutput()
			if check[0] == "keepalived" && !strings.Contains(string(out), "Unknown keyword") {
				err = nil // it fails without the interface and the script, and also if all is right
			}
			if err != nil {
				t.Errorf("%q: %v\n%s", check, err, out)
			}
		}
	}
}

// The order of the machines changes no file: haproxy would reload.
func TestBalancerFilesAreStable(t *testing.T) {
	t.Parallel()
	s, b := exampleBalancer(3)
	x, err := s.WithBalancer(b)
	if err != nil {
		t.Fatal(err)
	}
	slices.Reverse(b.Servers)
	y, err := s.WithBalancer(b)
	if err != nil {
		t.Fatal(err)
	}
	for i := range x.Files {
		if string(x.Files[i].Data) != string(y.Files[i].Data) {
			t.Errorf("%s:\n%s\n%s", x.Files[i].Path, x.Files[i].Data, y.Files[i].Data)
		}
	}
	b.Interface = ""
	if _, err := s.WithBalancer(b); err == nil {
		t.Error("a balancer without an interface")
	}
	s.Machine = "worker-0"
	b.Interface = "eth0"
	if _, err := s.WithBalancer(b); err == nil {
		t.Error("a balancer of a machine that is not listed")
	}
}
