package tui

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/attestation/authority"
	"constellation/engine/callhome/caller"
	"constellation/engine/cloud/machines"
	"constellation/engine/enrol"
	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/internal/syncbuffer"
	"constellation/tui/console"
)

// callStage is an enrolStage whose machines call.
type callStage struct {
	*enrolStage
	out, errs syncbuffer.Buffer
	code      chan int
}

func newCallStage(t *testing.T) *callStage {
	e := &callStage{enrolStage: newEnrolStage(t), code: make(chan int, 1)}
	e.bootstrapper = filepath.Join(t.TempDir(), "bootstrapper")
	if err := os.WriteFile(e.bootstrapper, []byte("program"), 0o600); err != nil {
		t.Fatal(err)
	}
	e.checkCaller = e.checkLocalCaller
	return e
}

// checkLocalCaller is the result of a check of a machine that calls from this computer.
func (e *enrolStage) checkLocalCaller(_ context.Context, m machinecheck.Machine, _ machinecheck.Needs) machinecheck.Result {
	r := e.checked[0]
	r.Machine = m.Target().String()
	facts := *r.Facts
	facts.Addresses = append(slices.Clone(facts.Addresses), addresses("127.0.0.1/8")...)
	r.Facts = &facts
	return r
}

func (e *callStage) start(args ...string) {
	e.t.Helper()
	go func() { e.code <- e.runTo(&e.out, &e.errs, args...) }()
	e.waitFor(func() bool { return strings.Contains(e.errs.String(), "waiting at") })
}

func (e *callStage) waitFor(what func() bool) {
	e.t.Helper()
	for begin := time.Now(); !what(); time.Sleep(5 * time.Millisecond) {
		select {
		case code := <-e.code:
			e.t.Fatalf("it ended with %d\n%s%s", code, e.out.String(), e.errs.String())
		default:
		}
		if time.Since(begin) > 20*time.Second {
			e.t.Fatalf("it did not happen\n%s%s", e.out.String(), e.errs.String())
		}
	}
}

// call runs the i-th printed command, as far as it concerns the console.
func (e *callStage) call(printed string, i int) (lines string, err error) {
	e.t.Helper()
	var all []string
	c := caller.Call{Print: func(line string) { all = append(all, line) }, Patience: time.Second}
	for line := range strings.Lines(strings.ReplaceAll(printed, "\\\n", "")) {
		if console, ok := strings.CutPrefix(strings.TrimLeft(line, " "), "console="); ok {
			c.Console = strings.TrimSpace(console)
		}
		if f := strings.Fields(line); len(f) == 7 && f[0] == "echo" && f[4] == "call" {
			if i--; i < 0 {
				c.Token, c.Pin = f[1], f[6]
				break
			}
		}
	}
	err = c.Run(e.t.Context())
	return strings.Join(all, "\n"), err
}

func (e *callStage) want(code int, parts ...string) {
	e.t.Helper()
	select {
	case is := <-e.code:
		if is != code {
			e.t.Errorf("exit code %d, want %d", is, code)
		}
	case <-time.After(20 * time.Second):
		e.t.Fatal("it did not end")
	}
	for _, p := range parts {
		if !strings.Contains(e.errs.String(), p) {
			e.t.Errorf("%q is not on stderr:\n%s", p, e.errs.String())
		}
	}
}

var callArgs = []string{"machine", "add", "worker-1", "--address", "127.0.0.1", "--print-command"}

func TestMachineAddPrintsACommand(t *testing.T) {
	t.Parallel()
	e := newCallStage(t)
	vendor := t.TempDir()
	cert, _, err := authority.Create("vendor")
	if err == nil {
		err = os.WriteFile(filepath.Join(vendor, "vendor.pem"), cert, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	e.start(append(slices.Clone(callArgs), "--tpm-roots", vendor)...)
	if e.ws.Has("constellation-state.yaml") {
		t.Error("something was written before a machine called")
	}
	lines, err := e.call(e.out.String(), 0)
	if err != nil || !strings.HasSuffix(lines, "this machine is prepared as worker-1, not attested: its key is in a file") || !strings.Contains(lines, "will prepare this machine as worker-1, a worker of the cluster") || !strings.Contains(lines, "check the machine") {
		t.Errorf("the machine: %v\n%s", err, lines)
	}
	e.want(plan.ExitDone, "worker-1 called from 127.0.0.1", "prepared as worker", "next  constellation")
	if out := e.out.String(); !strings.HasPrefix(out, "$([ \"$(id -u)\" = 0 ] || echo sudo) sh <<'CONSTELLATION'\n") || !strings.HasSuffix(out, "\nCONSTELLATION\n\n") {
		t.Errorf("stdout has more than the command:\n%s", out)
	}
	if m := e.machines(); len(m) != 1 || m[0].Name != "worker-1" || m[0].Address != "127.0.0.1" || e.batch.Connected == nil || e.batch.Jobs[0].Authority.EKRoots == nil {
		t.Errorf("the list has %+v", m)
	}
	if out, errs, code := e.run(callArgs...); code != plan.ExitNothing || !strings.Contains(errs, "worker-1 is enrolled already") || out != "" {
		t.Errorf("again: %d\n%s", code, errs)
	}
}

func TestMachineAddOfSeveralCallers(t *testing.T) {
	t.Parallel()
	e := newCallStage(t)
	e.start("machine", "add", "cp-0=127.0.0.1", "cp-1=10.0.0.11", "--group", "control-plane", "--print-command", "--listen", "127.0.0.1:0", "-o", "json", "--valid-for", "1m")
	printed := e.errs.String()
	if _, err := e.call(printed, 1); err == nil || !strings.Contains(err.Error(), "is for 10.0.0.11, and the connection comes from 127.0.0.1") {
		t.Errorf("from another address: %v", err)
	}
	if _, err := e.call(printed, 0); err != nil {
		t.Error(err)
	}
	if _, err := e.call(printed, 0); err == nil || !strings.Contains(err.Error(), "the token of cp-0 was used") {
		t.Errorf("a second use: %v", err)
	}
	if m := e.machines(); len(m) != 1 {
		t.Errorf("the list has %+v", m)
	}
	if len(e.batch.Jobs) != 1 || !bytes.Contains(e.batch.Jobs[0].Spec.Files[slices.IndexFunc(e.batch.Jobs[0].Spec.Files, func(f enrol.File) bool { return f.Path == machines.MachineFile })].Data, []byte("10.0.0.11")) {
		t.Error("the machine does not get the address of the other one")
	}
}

// TestMachineAddMended has a machine with a finding, which is mended and calls again.
func TestMachineAddMended(t *testing.T) {
	t.Parallel()
	e := newCallStage(t)
	good, check := e.checked[0], e.checkCaller
	e.checked[0] = checkedMachines()[1]
	e.checkCaller = func(ctx context.Context, m machinecheck.Machine, n machinecheck.Needs) machinecheck.Result {
		r := check(ctx, m, n)
		e.checked[0] = good
		return r
	}
	e.start(append(slices.Clone(callArgs), "-o", "json")...)
	printed := e.errs.String()
	lines, err := e.call(printed, 0)
	if err == nil || !strings.Contains(err.Error(), "in the way") || !strings.Contains(lines, "swap is on: /dev/sda2") || !strings.Contains(lines, "run: swapoff") {
		t.Errorf("the machine: %v\n%s", err, lines)
	}
	if !strings.Contains(e.errs.String(), "swap is on: /dev/sda2") || len(e.machines()) > 0 {
		t.Errorf("the console:\n%s", e.errs.String())
	}
	e.fails["worker-1"] = &plan.Error{Op: "run sh on 127.0.0.1", Err: sshhost.ErrLost, Remedy: "again"}
	if _, err := e.call(printed, 0); err == nil || len(e.machines()) > 0 {
		t.Errorf("a failed enrolment: %v", err)
	}
	delete(e.fails, "worker-1")
	if _, err := e.call(printed, 0); err != nil {
		t.Errorf("the same command after it was mended: %v", err)
	}
	e.want(plan.ExitDone)
	var r addReport
	if err := json.Unmarshal([]byte(e.out.String()), &r); err != nil || len(r.Machines) != 1 || r.Machines[0].Error != "" || r.Machines[0].Name != "worker-1" || r.Machines[0].Machine != "127.0.0.1" {
		t.Errorf("%v %+v\n%s", err, r, e.out.String())
	}
}

// TestMachineAddOfTwoConsoles has a second console that enrols the same name, which the first one refuses then.
func TestMachineAddOfTwoConsoles(t *testing.T) {
	t.Parallel()
	first := newCallStage(t)
	second := &callStage{enrolStage: first.enrolStage, code: make(chan int, 1)}
	first.start(callArgs...)
	second.start(callArgs...)
	if _, err := first.call(second.out.String(), 0); err != nil {
		t.Fatal(err)
	}
	second.want(plan.ExitDone)
	_, err := first.call(first.out.String(), 0)
	var e *caller.Error
	if !errors.As(err, &e) || !strings.Contains(err.Error(), "worker-1 is enrolled already") || first.ran != 1 {
		t.Errorf("the first console: %v", err)
	}
	if !strings.Contains(first.errs.String(), "worker-1 is enrolled already") {
		t.Errorf("the first console:\n%s", first.errs.String())
	}
}

func TestMachineAddUserData(t *testing.T) {
	t.Parallel()
	e := newCallStage(t)
	e.start("machine", "add", "worker-1=127.0.0.1", "--cloud-init")
	if out := e.out.String(); !strings.HasPrefix(out, "#cloud-config\n# worker-1 at 127.0.0.1.") {
		t.Errorf("user data:\n%s", out)
	}
	if _, err := e.call(e.out.String(), 0); err != nil {
		t.Error(err)
	}
	e.want(plan.ExitDone)
}

func TestMachineRemovePrintsACommand(t *testing.T) {
	t.Parallel()
	e := newCallStage(t)
	e.start(callArgs...)
	if _, err := e.call(e.out.String(), 0); err != nil {
		t.Fatal(err)
	}
	e.want(plan.ExitDone)
	r := &callStage{enrolStage: e.enrolStage, code: make(chan int, 1)}
	r.start("machine", "remove", "worker-1", "--print-command", "--yes")
	lines, err := r.call(r.out.String(), 0)
	if err != nil || !strings.HasSuffix(lines, "restart the machine\nworker-1 is removed") {
		t.Errorf("the machine: %v\n%s", err, lines)
	}
	r.want(plan.ExitDone, "deleted 3 files", "deleted its row")
	if len(e.machines()) > 0 || e.removed.Connected == nil || e.removed.Machine != "worker-1" {
		t.Errorf("the list has %+v", e.machines())
	}
}

// Each field of the form has its own sentence and a remedy for a wrong value, and repeats no password.
func TestFieldsOfTheFormAreValidated(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		flag, want string
		n          console.NewMachines
	}{
		{flag: "--ssh", want: "it names no user", n: console.NewMachines{MachineLogin: console.MachineLogin{Machines: []string{"10.0.0.11"}}}},
		{flag: "--key", want: `--key "/nope": the file does not exist`, n: console.NewMachines{MachineLogin: console.MachineLogin{Key: "/nope"}}},
		{flag: "--jump", want: "the port is not a number", n: console.NewMachines{MachineLogin: console.MachineLogin{Jump: []string{"root@j:0"}}}},
		{flag: "--host-key", want: "it is not SHA256: and 43 characters", n: console.NewMachines{MachineLogin: console.MachineLogin{HostKeys: []string{"MD5:aa"}}}},
		{flag: nameAddress, want: "write it as w=IP", n: console.NewMachines{Callers: []string{"w"}}},
		{flag: "--group", want: "want control-plane or worker", n: console.NewMachines{Group: "x"}},
		{flag: "--label", want: `"a" is no label`, n: console.NewMachines{Labels: []string{"a"}}},
		{flag: "--taint", want: `"a" is no taint`, n: console.NewMachines{Taints: []string{"a"}}},
		{flag: "--name", want: `--name "A_b" cannot name a node`, n: console.NewMachines{Name: "A_b"}},
		{flag: "--address", want: `--address "10.0.0.1:22" is no IP address`, n: console.NewMachines{Address: "10.0.0.1:22"}},
		{flag: "--tpm", want: `--tpm "x" is no TPM`, n: console.NewMachines{TPM: "x"}},
		{flag: "--tpm-roots", want: "no such file", n: console.NewMachines{TPMRoots: "/nope"}},
		{flag: "--proxy", want: "--proxy is no address of an HTTP proxy", n: console.NewMachines{Proxy: "http://u:hunter2@p:1"}},
		{flag: "--packages", want: "name a folder with --packages", n: console.NewMachines{Packages: "/nope"}},
		{flag: "--programs", want: "name a folder with --programs", n: console.NewMachines{Programs: "/nope"}},
		{flag: "--valid-for", want: `--valid-for "5" is no duration`, n: console.NewMachines{ValidFor: "5"}},
		{flag: "--valid-for", want: "--valid-for is 25h0m0s, want 1m to 24h", n: console.NewMachines{ValidFor: "25h"}},
		{flag: "--listen", want: `--listen "9443" is no ADDRESS:PORT`, n: console.NewMachines{Listen: "9443"}},
		{flag: "--source", want: `--source "x" is no IP address`, n: console.NewMachines{Source: "x"}},
	} {
		err := invalidField(tt.n, tt.flag)
		if err == nil || plan.Remedy(err) == "" || strings.Contains(err.Error(), "hunter2") || !strings.Contains(err.Error()+"; "+plan.Remedy(err), tt.want) {
			t.Errorf("%s: %v; %s", tt.flag, err, plan.Remedy(err))
		}
	}
	if err := invalidField(console.NewMachines{ValidFor: "2h"}, "--valid-for"); err != nil {
		t.Error(err)
	}
}

func TestMachineCallUsage(t *testing.T) {
	t.Parallel()
	e := newCallStage(t)
	for want, args := range map[string]string{
		"needs --print-command or --cloud-init":               "add worker-1",
		"--listen needs --print-command":                      "add --ssh root@10.0.0.11 --listen :1",
		"--print-command and --ssh exclude each other":        "add worker-1 --print-command --ssh root@10.0.0.11",
		"--print-command and --cloud-init exclude each other": "add worker-1 --print-command --cloud-init",
		"no machine is named":                                 "add --print-command",
		"the address of worker-1 is missing":                  "add worker-1 --print-command",
		`"A_b" cannot name a node`:                            "add A_b=10.0.0.1 --print-command",
		`"host" is no IP address`:                             "add a=host --print-command",
		"a with 10.0.0.1 is there twice":                      "add a=10.0.0.1 a=10.0.0.1 --print-command",
		"--address and --source are of one machine":           "add a=10.0.0.1 b=10.0.0.2 --print-command --source 10.0.0.9",
		"--cloud-init is for one machine":                     "add a=10.0.0.1 b=10.0.0.2 --cloud-init",
		"--valid-for is 1s, want 1m to 24h":                   "add a=10.0.0.1 --print-command --valid-for 1s",
		`--listen "x" is no ADDRESS:PORT`:                     "add a=127.0.0.1 --print-command --listen x",
		"--cloud-init and --dry-run exclude each other":       "add a=10.0.0.1 --cloud-init --dry-run",
		"--print-command and --gone exclude each other":       "remove a --print-command --gone",
		"the configuration does not list it":                  "remove a --print-command",
		"read the certificates of TPM vendors":                "add a=127.0.0.1 --print-command --tpm-roots /nowhere",
		`--tpm "x" is no TPM`:                                 "add a=127.0.0.1 --print-command --tpm x",
		"want control-plane or worker":                        "add a=127.0.0.1 --print-command --group x",
		`--source "x" is no IP address`:                       "add a=127.0.0.1 --print-command --source x",
		"a=127.0.0.1 has its address, and there is --address": "add a=127.0.0.1 --address 127.0.0.1 --print-command",
	} {
		if out, errs, code := e.run(append([]string{"machine"}, strings.Fields(args)...)...); code != plan.ExitUsage || !strings.Contains(errs, want) || out != "" {
			t.Errorf("%s: %d\n%s", args, code, errs)
		}
	}
}

func addresses(list ...string) (out []netip.Prefix) {
	for _, a := range list {
		out = append(out, netip.MustParsePrefix(a))
	}
	return out
}
