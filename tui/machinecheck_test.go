package tui

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/engine/sshhost/sshdtest"
	"constellation/engine/workspace"
	"constellation/internal/golden"
	"constellation/tui/internal/enginefake"
)

// checkedMachines returns results as of a check: one machine that is ready, one that is not, and one that
// could not be reached.
func checkedMachines() []machinecheck.Result {
	facts := machinecheck.Facts{
		Root: true, OS: machinecheck.OS{ID: "debian", Version: "12", Name: "Debian GNU/Linux 12 (bookworm)"}, Arch: "x86_64", Kernel: "6.1.0-39-amd64", HostName: "node-11", Systemd: true,
		Memory: 4020116, Cores: 2, Cgroup: machinecheck.Cgroup{Version: "v2", Controllers: []string{"cpu", "cpuset", "memory", "pids"}},
		Modules: []machinecheck.Module{{Name: "overlay", State: "loaded", AtBoot: true}}, Sysctls: []machinecheck.Sysctl{}, Disks: []machinecheck.Disk{},
		AppArmor: "enabled", SELinux: "disabled", TPM: "2", Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.11/24")}, DefaultRoute: machinecheck.Yes,
		Clock: machinecheck.Clock{Offset: time.Millisecond, Uncertainty: 20 * time.Millisecond, Synchronized: machinecheck.Yes},
	}
	bad := facts
	bad.HostName, bad.TPM, bad.Swaps, bad.SwapAtBoot = "node-12", "", []machinecheck.Swap{{Name: "/dev/sda2", Type: "partition", KiB: 2097148}}, true
	bad.Listens, bad.OS = []machinecheck.Listen{{Port: 10250, Program: "evil\x1b[2J"}}, machinecheck.OS{ID: "fedora", Version: "42", Name: "Fedora Linux 42"}
	role, _ := machinecheck.ParseRole("worker")
	needs := machinecheck.Needs{Role: role}
	lost := &plan.Error{Op: "connect to 10.0.0.13:22", Err: fmt.Errorf("%w: connection refused", sshhost.ErrUnreachable), Remedy: "start the SSH server of the machine (`systemctl start ssh`)"}
	return []machinecheck.Result{
		{Machine: "root@10.0.0.11", HostKey: "SHA256:x", Ready: true, Facts: &facts, Findings: machinecheck.Judge(facts, needs), Took: time.Second},
		{Machine: "root@10.0.0.12:2222", HostKey: "SHA256:y", Facts: &bad, Findings: machinecheck.Judge(bad, needs), Took: time.Second},
		{Machine: "root@10.0.0.13", Error: lost.Error(), Remedy: lost.Remedy, Err: lost},
	}
}

// machineVerb runs `machine check`, with these results or, without any, with real machines.
func machineVerb(t *testing.T, results []machinecheck.Result, args ...string) (stdout, stderr string, code int, got machinecheck.Request) {
	t.Helper()
	check := func(_ context.Context, r machinecheck.Request, done func(machinecheck.Result)) []machinecheck.Result {
		got = r
		for _, x := range results {
			done(x)
		}
		return results
	}
	if results == nil {
		check = machinecheck.Check
	}
	var out, errs bytes.Buffer
	home := t.TempDir()
	code = App{
		Release: "v1.1.0", Program: "constellation", CheckMachines: check, Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs,
		Env: func(name string) string { return map[string]string{"HOME": home, "LANG": "C.UTF-8"}[name] }, Now: func() time.Time { return enginefake.Start },
	}.Run(append([]string{"machine", "check"}, args...))
	return out.String(), errs.String(), code, got
}

func TestMachineCheck(t *testing.T) {
	key := filepath.Join(t.TempDir(), "id")
	if err := os.WriteFile(key, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	all := checkedMachines()
	three := []string{"--ssh", "root@10.0.0.11", "--ssh", "root@10.0.0.12:2222", "--ssh", "root@10.0.0.13"}
	for _, tt := range []struct {
		name    string
		results []machinecheck.Result
		args    []string
		code    int
		want    string // on stdout or stderr
	}{
		{name: "one that is ready", results: all[:1], args: []string{"--ssh", "root@10.0.0.11"}, code: plan.ExitDone, want: "can become a worker"},
		{name: "one in the way", results: all[:2], args: three[:4], code: plan.ExitBlocked, want: "2 findings in the way on 1 of them, such as root@10.0.0.12:2222: swap is on: /dev/sda2"},
		{name: "the only one in the way", results: all[1:2], args: three[2:4], code: plan.ExitBlocked, want: "2 findings in the way: swap is on: /dev/sda2"},
		{name: "the only one that is not reached", results: all[2:], args: three[4:], code: plan.ExitFailed, want: "connection refused"},
		{name: "one that is not reached", results: all, args: three, code: plan.ExitFailed, want: "1 of them could not be checked, such as root@10.0.0.13"},
		{name: "none", results: all, code: plan.ExitUsage, want: "no machine is named"},
		{name: "no user", results: all, args: []string{"--ssh", "10.0.0.11"}, code: plan.ExitUsage, want: "USER@HOST"},
		{name: "one twice", results: all, args: []string{"--ssh", "root@10.0.0.11", "--ssh", "admin@10.0.0.11:22"}, code: plan.ExitUsage, want: "names 10.0.0.11:22 twice"},
		{name: "bad role", results: all, args: []string{"--ssh", "root@10.0.0.11", "--role", "master"}, code: plan.ExitUsage, want: "want control-plane or worker"},
		{name: "bad jump host", results: all, args: []string{"--ssh", "root@10.0.0.11", "--jump", "bastion"}, code: plan.ExitUsage, want: "it names no user"},
		{name: "no such key", results: all, args: []string{"--ssh", "root@10.0.0.11", "--key", key + "x"}, code: plan.ExitUsage, want: "the file does not exist"},
		{name: "bad timeout", results: all, args: []string{"--ssh", "root@10.0.0.11", "--timeout", "-1s"}, code: plan.ExitUsage, want: "more than 0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, errs, code, _ := machineVerb(t, tt.results, tt.args...)
			if code != tt.code || !strings.Contains(out+errs, tt.want) {
				t.Errorf("exit code %d, want %d, and %q in\n%s%s", code, tt.code, tt.want, out, errs)
			}
			if strings.ContainsRune(out+errs, 0x1b) {
				t.Errorf("the output has escape sequences: %q", out+errs)
			}
		})
	}
	out, _, _, _ := machineVerb(t, all, three...)
	golden.Equal(t, "testdata/machinecheck.txt", out)
	_, _, _, got := machineVerb(t, all[:1], "--ssh", "admin@10.0.0.11", "--key", key, "--sudo", "--jump", "a@b,c@d:2222", "--host-key", "SHA256:z", "--role", "control-plane", "--timeout", "3s")
	x := got.Targets[0]
	if len(got.Targets) != 1 || x.String() != "admin@10.0.0.11" || x.KeyFile != key || !x.Sudo || len(x.Jump) != 2 || x.Jump[1].String() != "c@d:2222" ||
		!slices.Equal(got.SSH.Fingerprints, []string{"SHA256:z"}) || got.SSH.Timeout != 3*time.Second || got.Needs.Role != "control-plane" || got.SSH.SudoPassword != nil || got.SSH.Passphrase != nil {
		t.Errorf("request %+v", got)
	}
	out, _, code, _ := machineVerb(t, all, append(three, "-o", "json")...)
	var r machinecheck.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != plan.ExitFailed || len(r.Machines) != 3 || r.Machines[2].Error == "" || r.Machines[2].Remedy == "" || r.Machines[1].Findings[0].Command == "" || r.Machines[0].Facts.HostName != "node-11" {
		t.Errorf("document %v %+v", err, r)
	}
}

// TestMachineCheckBySSH checks this computer through a real sshd.
func TestMachineCheckBySSH(t *testing.T) {
	t.Parallel()
	s := sshdtest.Start(t, sshdtest.Options{})
	target := s.Options().Target.String()
	_, errs, code, _ := machineVerb(t, nil, "--ssh", target, "--key", s.Key)
	if code != plan.ExitFailed || !strings.Contains(errs, sshhost.ErrUnknownHost.Error()) || !strings.Contains(errs, "--host-key SHA256:") {
		t.Fatalf("an unknown machine: exit code %d\n%s", code, errs)
	}
	_, fingerprint, _ := strings.Cut(errs, "--host-key ")
	fingerprint = strings.Fields(fingerprint)[0]
	out, errs, code, _ := machineVerb(t, nil, "--ssh", target, "--key", s.Key, "--host-key", fingerprint, "-o", "json")
	var r machinecheck.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil || len(r.Machines) != 1 || r.Machines[0].Facts == nil || r.Machines[0].HostKey != fingerprint {
		t.Fatalf("%v %s\n%s", err, out, errs)
	}
	name, err := os.Hostname()
	if err != nil || r.Machines[0].Facts.HostName != name {
		t.Errorf("host name %s, want %s", r.Machines[0].Facts.HostName, name)
	}
	if want := map[bool]int{true: plan.ExitDone, false: plan.ExitBlocked}[r.Machines[0].Ready]; code != want {
		t.Errorf("exit code %d, want %d\n%s", code, want, errs)
	}
}

// fixVerb runs `machine check --fix` against a machine with swap, which is off after the commands, unless they fail.
func fixVerb(t *testing.T, answer string, failure error, args ...string) (stdout, stderr string, code, fixes int) {
	t.Helper()
	all := checkedMachines()
	mended := all[0]
	mended.Machine = all[1].Machine
	var out, errs bytes.Buffer
	home, checks := t.TempDir(), 0
	code = App{
		Release: "v1.1.0", Program: "constellation", Stdin: strings.NewReader(answer), Stdout: &out, Stderr: &errs,
		Env: func(name string) string { return map[string]string{"HOME": home, "LANG": "C.UTF-8"}[name] }, Now: func() time.Time { return enginefake.Start },
		CheckMachines: func(context.Context, machinecheck.Request, func(machinecheck.Result)) []machinecheck.Result {
			if checks++; checks > 1 && failure == nil {
				return []machinecheck.Result{mended}
			}
			return all[1:2]
		},
		FixMachines: func(_ context.Context, r machinecheck.Request, results []machinecheck.Result, done func(machinecheck.Fixed)) []machinecheck.Fixed {
			fixes++
			x := machinecheck.Fixed{Machine: results[0].Machine, Done: machinecheck.Fixes(&results[0])}
			if failure != nil {
				x = machinecheck.Fixed{Machine: results[0].Machine, Done: []string{}, Failed: "swapoff -a", Err: failure, Error: failure.Error(), Remedy: plan.Remedy(failure)}
			}
			done(x)
			return []machinecheck.Fixed{x}
		},
	}.Run(append([]string{"machine", "check", "--ssh", "root@10.0.0.12:2222", "--fix"}, args...))
	return out.String(), errs.String(), code, fixes
}

func TestMachineCheckFix(t *testing.T) {
	failed := &plan.Error{Op: "run `swapoff -a` on root@10.0.0.12", Err: errors.New("exit code 255"), Remedy: "mend it by hand"}
	for _, tt := range []struct {
		name    string
		args    []string
		failure error
		code    int
		fixes   int
		want    string // on stdout or stderr
	}{
		{name: "not accepted", code: plan.ExitUnacknowledged, want: "with --yes"},
		{name: "not accepted as JSON", args: []string{"-o", "json"}, code: plan.ExitUnacknowledged, want: "with --yes"},
		{name: "accepted", args: []string{"--yes"}, code: plan.ExitDone, fixes: 1, want: "swapoff -a"},
		{name: "accepted, and a command fails", args: []string{"--yes"}, failure: failed, code: plan.ExitFailed, fixes: 1, want: "mend it by hand"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, errs, code, fixes := fixVerb(t, "", tt.failure, tt.args...)
			if code != tt.code || fixes != tt.fixes || !strings.Contains(out+errs, tt.want) {
				t.Errorf("exit code %d, want %d; %d fixes, want %d; want %q in\n%s%s", code, tt.code, fixes, tt.fixes, tt.want, out, errs)
			}
		})
	}
	out, _, _, _ := fixVerb(t, "", nil, "--yes")
	if !strings.Contains(out, "on root@10.0.0.12:2222, as root:\n  swapoff -a") || !strings.Contains(out, "can become a worker") {
		t.Errorf("the report after the commands:\n%s", out)
	}
	out, _, code, _ := fixVerb(t, "", nil, "--yes", "-o", "json")
	var r machinecheck.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != plan.ExitDone || len(r.Fixed) != 1 || len(r.Fixed[0].Done) == 0 || !r.Machines[0].Ready {
		t.Errorf("document %v, exit code %d: %s", err, code, out)
	}
	_, errs, code, _ := machineVerb(t, checkedMachines()[:1], "--ssh", "root@10.0.0.11", "--yes")
	if code != plan.ExitUsage || !strings.Contains(errs, "--yes needs --fix") {
		t.Errorf("--yes alone: exit code %d\n%s", code, errs)
	}
	out, _, code, _ = machineVerb(t, checkedMachines()[:1], "--ssh", "root@10.0.0.11", "--fix")
	if code != plan.ExitDone || strings.Contains(out, "as root") {
		t.Errorf("nothing to mend: exit code %d\n%s", code, out)
	}
}

// In the workspace of a cluster, the check knows the cluster's own nodes, and does not recommend to reset them.
func TestMachineCheckKnowsItsCluster(t *testing.T) {
	dir := t.TempDir()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("authority")})
	kubeconfig := "clusters: [{name: k, cluster: {server: 'https://10.0.0.1:6443', certificate-authority-data: " + base64.StdEncoding.EncodeToString(ca) + "}}]\nusers: [{name: u, user: {token: x}}]\n"
	if err := os.WriteFile(filepath.Join(dir, workspace.KubeconfigFile), []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	_, _, _, got := machineVerb(t, checkedMachines()[:1], "-C", dir, "--ssh", "root@10.0.0.11")
	if got.Needs.CA != machinecheck.CADigest(ca) || got.Needs.CA == "" {
		t.Errorf("the check looks for nodes of %q, want %q", got.Needs.CA, machinecheck.CADigest(ca))
	}
	if _, _, _, got := machineVerb(t, checkedMachines()[:1], "-C", t.TempDir(), "--ssh", "root@10.0.0.11"); got.Needs.CA != "" {
		t.Errorf("without a cluster: %q", got.Needs.CA)
	}
}
