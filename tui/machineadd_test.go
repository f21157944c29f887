package tui

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/attestation/authority"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cluster"
	"constellation/engine/enrol"
	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/engine/sshhost/sshdtest"
	"constellation/engine/workspace"
	"constellation/internal/golden"
	"constellation/tui/internal/enginefake"
	"constellation/tui/view"
)

// enrolStage is a workspace with `machine` verbs. Machines are not real: package enrol has the tests with
// real ones.
type enrolStage struct {
	t       *testing.T
	ws      *workspace.Workspace
	checked []machinecheck.Result
	fails   map[string]error // by name of the machine
	keys    map[string]enrol.Key
	batch   enrol.Batch
	batches []enrol.Batch // installations
	ran     int           // installations
	same    bool          // the machines lack nothing
	removed *enrol.Removal
	remove  error
	log     string
	engine  enginefake.Engine
	// Of machines that call:
	bootstrapper string
	checkCaller  func(context.Context, machinecheck.Machine, machinecheck.Needs) machinecheck.Result
	check        func(context.Context, machinecheck.Request, func(machinecheck.Result)) []machinecheck.Result
}

func newEnrolStage(t *testing.T) *enrolStage {
	t.Helper()
	b, err := workspace.GenerateConfig("machines", workspace.GenerateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ws, err := workspace.OpenWorkspace(t.TempDir())
	if err == nil {
		_, err = ws.WriteConfig(b)
	}
	if err != nil {
		t.Fatal(err)
	}
	good := checkedMachines()[0]
	second, facts := good, *good.Facts
	facts.HostName, facts.Addresses = "Node-12", []netip.Prefix{netip.MustParsePrefix("10.0.0.12/24"), netip.MustParsePrefix("192.168.0.12/24")}
	second.Machine, second.Facts = "root@10.0.0.12", &facts
	return &enrolStage{t: t, ws: ws, checked: []machinecheck.Result{good, second}, fails: map[string]error{}}
}

func (e *enrolStage) run(args ...string) (stdout, stderr string, code int) {
	e.t.Helper()
	var out, errs bytes.Buffer
	code = e.runTo(&out, &errs, args...)
	return out.String(), errs.String(), code
}

// runTo is run that writes while it runs.
func (e *enrolStage) runTo(out, errs io.Writer, args ...string) int {
	e.t.Helper()
	home := e.t.TempDir()
	check := e.check
	if check == nil {
		check = func(_ context.Context, r machinecheck.Request, done func(machinecheck.Result)) []machinecheck.Result {
			return slices.Clone(e.checked[:len(r.Targets)])
		}
	}
	return App{
		Release: "v1.1.0", Program: "constellation", CheckMachines: check, Stdin: strings.NewReader(""), Stdout: out, Stderr: errs,
		Env: func(name string) string {
			return map[string]string{"HOME": home, "LANG": "C.UTF-8", "USER": "admin"}[name]
		}, Now: func() time.Time { return enginefake.Start },
		Engine: func(*workspace.Workspace, *slog.Logger) (Engine, error) { return &e.engine, nil },
		Enrol:  e.enrol(),
	}.Run(append([]string{"-C", e.ws.Dir()}, args...))
}

// enrol are the functions of package enrol with the answers of the stage.
func (e *enrolStage) enrol() Enrol {
	return Enrol{
		Check: e.checkCaller,
		Programs: func(_, _, arch string) (enrol.Programs, error) {
			if e.bootstrapper != "" {
				return enrol.Programs{Bootstrapper: e.bootstrapper, Agent: e.bootstrapper}, nil
			}
			return enrol.Programs{Bootstrapper: "/" + arch + "/bootstrapper", Agent: "/" + arch + "/agent"}, nil
		},
		Install: func(_ context.Context, b enrol.Batch, step func(int, enrol.Step), done func(int, enrol.Result)) []enrol.Result {
			e.batch = b
			if !b.Rehearse {
				e.batches = append(e.batches, b)
			}
			for i, j := range b.Jobs {
				step(i, enrol.Step{Title: "send", Done: 1, Total: 2})
				r := enrol.Result{Took: 1500 * time.Millisecond, Outcome: enrol.Outcome{Changes: []string{"install runc of the distribution, held back from upgrades", "write /etc/constellation/a", "write /etc/constellation/b", "replace /usr/lib/c", "restart x.service"}}}
				if e.same {
					r.Changes = nil
				}
				if !b.Rehearse {
					e.ran++
					r.Err = e.fails[j.Spec.Machine]
					r.Key = e.keys[j.Spec.Machine]
					if j.Accept == nil {
						done(i, r)
						continue
					}
					if err := j.Accept(r.Key); err != nil {
						r = enrol.Result{Err: err}
					}
				} else if err := e.fails["rehearsal"]; err != nil {
					r = enrol.Result{Err: err}
				}
				done(i, r)
			}
			return nil
		},
		Remove: func(_ context.Context, r enrol.Removal) (enrol.Outcome, error) {
			e.removed = &r
			r.Report(enrol.Step{Title: "log in"})
			return enrol.Outcome{Changes: []string{"deleted 3 files"}, Notes: []string{"restart the machine"}}, e.remove
		},
		Logs: func(_ context.Context, r enrol.LogRequest, w io.Writer) error {
			_, err := io.WriteString(w, e.log)
			return err
		},
	}
}

func (e *enrolStage) machines() []machines.Machine {
	e.t.Helper()
	c, err := e.ws.Config()
	if err != nil {
		e.t.Fatal(err)
	}
	return machines.List(c.Provider.Section)
}

var (
	oneSSH   = []string{"machine", "add", "--ssh", "root@10.0.0.11"}
	twoSSH   = append(slices.Clone(oneSSH), "--ssh", "root@10.0.0.12")
	lostConn = &plan.Error{Op: "run sh on root@10.0.0.12", Err: sshhost.ErrLost, Remedy: "run the command again"}
	ofOthers = &plan.Error{Op: "examine root@10.0.0.11", Err: fmt.Errorf("%w: other", enrol.ErrOtherCluster), Remedy: "remove it there", Exit: plan.ExitBlocked}
)

func TestMachineAdd(t *testing.T) {
	t.Parallel()
	blocked := checkedMachines()[1]
	member := checkedMachines()[0]
	member.Findings = []plan.Finding{{ID: "machine-member", Severity: plan.Info}}
	for _, tt := range []struct {
		name    string
		args    []string
		checked *machinecheck.Result
		fails   map[string]error
		code    int
		want    string // on stdout or stderr
		rows    int
		runs    int
	}{
		{name: "accepted", args: append(slices.Clone(twoSSH), "--yes"), code: plan.ExitDone, want: "next  constellation", rows: 2, runs: 2},
		{name: "not accepted", args: twoSSH, code: plan.ExitUnacknowledged, want: "with --yes"},
		{name: "not accepted as JSON", args: append(slices.Clone(twoSSH), "-o", "json"), code: plan.ExitUnacknowledged, want: "with --yes"},
		{name: "rehearsed", args: append(slices.Clone(twoSSH), "--dry-run"), code: plan.ExitDone, want: "write /etc/constellation/b"},
		{name: "one fails", args: append(slices.Clone(twoSSH), "--yes"), fails: map[string]error{"node-12": lostConn}, code: plan.ExitFailed, want: "1 of them could not be added", rows: 1, runs: 2},
		{name: "the only one fails", args: append(slices.Clone(oneSSH), "--yes"), fails: map[string]error{"node-11": lostConn}, code: plan.ExitFailed, want: "the connection was lost", runs: 1},
		{name: "of another cluster", args: append(slices.Clone(oneSSH), "--yes"), fails: map[string]error{"rehearsal": ofOthers}, code: plan.ExitBlocked, want: "remove it there"},
		{name: "findings", args: append(slices.Clone(oneSSH), "--yes"), checked: &blocked, code: plan.ExitBlocked, want: "swap is on: /dev/sda2"},
		{name: "a node already", args: append(slices.Clone(oneSSH), "--yes"), checked: &member, code: plan.ExitNothing, want: "is a node of this cluster already"},
		{name: "no machine", args: []string{"machine", "add"}, code: plan.ExitUsage, want: "no machine is named"},
		{name: "bad group", args: append(slices.Clone(oneSSH), "--group", "master"), code: plan.ExitUsage, want: "want control-plane or worker"},
		{name: "one name for two", args: append(slices.Clone(twoSSH), "--name", "a"), code: plan.ExitUsage, want: "--ssh names several"},
		{name: "bad name", args: append(slices.Clone(oneSSH), "--name", "A_b"), code: plan.ExitUsage, want: "cannot name a node"},
		{name: "a proxy with a password", args: append(slices.Clone(oneSSH), "--proxy", "http://u:secret@10.0.0.1:3128"), code: plan.ExitUsage, want: "without a password"},
		{name: "no packages", args: append(slices.Clone(oneSSH), "--yes", "--packages", "/nonexistent"), code: plan.ExitUsage, want: "name a folder with --packages"},
		{name: "bad address", args: append(slices.Clone(oneSSH), "--address", "host"), code: plan.ExitUsage, want: "is no IP address"},
		{name: "address of another machine", args: append(slices.Clone(oneSSH), "--address", "10.0.0.99"), code: plan.ExitUsage, want: "which has 10.0.0.11"},
		{name: "named", args: append(slices.Clone(oneSSH), "--name", "worker-1", "--yes"), code: plan.ExitDone, want: "worker-1", rows: 1, runs: 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			e := newEnrolStage(t)
			if tt.fails != nil {
				e.fails = tt.fails
			}
			if tt.checked != nil {
				e.checked[0] = *tt.checked
			}
			out, errs, code := e.run(tt.args...)
			if code != tt.code || !strings.Contains(out+errs, tt.want) {
				t.Errorf("exit code %d, want %d, and %q in\n%s%s", code, tt.code, tt.want, out, errs)
			}
			if got := e.machines(); len(got) != tt.rows || e.ran != tt.runs {
				t.Errorf("%d installations, rows %+v", e.ran, got)
			}
			if e.ws.Has(workspace.StateFile) != (tt.runs > 0) {
				t.Errorf("the workspace has a state: %t", tt.runs == 0)
			}
		})
	}
}

// A script gets the document of changes before the error that it has not accepted them. Without changes it needs no --yes.
func TestMachineAddInScripts(t *testing.T) {
	t.Parallel()
	e := newEnrolStage(t)
	out, errs, code := e.run(append(slices.Clone(twoSSH), "-o", "json")...)
	var r addReport
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != plan.ExitUnacknowledged || len(r.Machines) != 2 || len(r.Machines[0].Changes) != 5 || e.ran > 0 {
		t.Errorf("not accepted: exit code %d, %v: %s%s", code, err, out, errs)
	}
	e.same = true
	if out, errs, code := e.run(twoSSH...); code != plan.ExitDone || e.ran != 2 || len(e.machines()) != 2 {
		t.Errorf("nothing to change: exit code %d, %d installations, %s%s", code, e.ran, out, errs)
	}
}

func TestMachineAddTexts(t *testing.T) {
	t.Parallel()
	e := newEnrolStage(t)
	out, _, _ := e.run(append(slices.Clone(twoSSH), "--yes", "--group", "control-plane")...)
	golden.Equal(t, "testdata/machineadd.txt", strings.ReplaceAll(out, e.ws.Dir(), "WORKSPACE"))
	want := []machines.Machine{{Name: "node-11", Address: "10.0.0.11", Group: cloud.ControlPlane}, {Name: "node-12", Address: "10.0.0.12", Group: cloud.ControlPlane}}
	if got := e.machines(); !slices.Equal(got, want) {
		t.Errorf("rows %+v", got)
	}
	// Each machine gets the addresses of all, its own identity, and nothing twice.
	for i, j := range e.batch.Jobs {
		var data machines.MachineData
		for _, f := range j.Spec.Files {
			if f.Path == machines.MachineFile {
				if err := json.Unmarshal(f.Data, &data); err != nil {
					t.Fatal(err)
				}
			}
		}
		if data.Self != want[i].Name || len(data.Machines) != 2 || j.Identity.Name != want[i].Name || j.Identity.IP.String() != want[i].Address || j.Authority == nil || j.Spec.Cluster == "" || !strings.HasPrefix(e.batch.Who, "admin@") {
			t.Errorf("job %d: %+v %+v", i, data, j.Identity)
		}
	}
	// The same command again changes no row; another role is refused.
	if _, errs, code := e.run(append(slices.Clone(twoSSH), "--yes", "--group", "control-plane")...); code != plan.ExitDone || len(e.machines()) != 2 {
		t.Errorf("again: exit code %d, %s", code, errs)
	}
	// The machine has another address after a reboot, and another machine has its old one.
	moved, other := *e.checked[0].Facts, *e.checked[0].Facts
	moved.Addresses, other.HostName = []netip.Prefix{netip.MustParsePrefix("10.0.0.99/24")}, "node-99"
	for _, f := range []*machinecheck.Facts{&moved, &other} {
		was := e.checked[0].Facts
		e.checked[0].Facts = f
		host := f.Addresses[0].Addr().String()
		_, errs, code := e.run("machine", "add", "--ssh", "root@"+host, "--yes", "--group", "control-plane")
		if code != plan.ExitUsage || !strings.Contains(errs, "there is node-11 with address 10.0.0.11") || !strings.Contains(errs, "with address "+host) || !strings.Contains(errs, "machine remove node-11") || len(e.machines()) != 2 {
			t.Errorf("%s at %s: exit code %d, %s", f.HostName, host, code, errs)
		}
		e.checked[0].Facts = was
	}
	if _, errs, code := e.run(append(slices.Clone(oneSSH), "--yes")...); code != plan.ExitUsage || !strings.Contains(errs, "there is node-11 with address 10.0.0.11 and group control-plane") || !strings.Contains(errs, "machine remove node-11") {
		t.Errorf("another group: exit code %d, %s", code, errs)
	}
	out, _, code := e.run(append(slices.Clone(twoSSH), "--yes", "--group", "control-plane", "-o", "json")...)
	var r addReport
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != plan.ExitDone || len(r.Machines) != 2 || r.Machines[1].Name != "node-12" || len(r.Machines[1].Changes) != 5 || r.Machines[1].HostKey == "" {
		t.Errorf("document %v, exit code %d: %s", err, code, out)
	}
}

// Each control plane gets a balancer with all of them. Those that exist get it before a new one starts.
func TestMachineAddWithABalancer(t *testing.T) {
	t.Parallel()
	e := newEnrolStage(t)
	b, err := e.ws.ReadConfig()
	if err == nil {
		err = e.ws.ReplaceConfig(bytes.Replace(b, []byte("endpoint: api.example.com"), []byte("endpoint: 10.0.0.10\n    balancer: {address: 10.0.0.10}"), 1))
	}
	if err != nil {
		t.Fatal(err)
	}
	var needs machinecheck.Needs
	e.checked = nil
	for _, n := range []string{"11", "12", "13"} {
		r := checkedMachines()[0]
		facts := *r.Facts
		p := netip.MustParsePrefix("10.0.0." + n + "/24")
		facts.HostName, facts.Addresses, facts.Networks = "node-"+n, []netip.Prefix{p}, []machinecheck.Network{{Interface: "eth0", Address: p}}
		r.Machine, r.Facts = "root@10.0.0."+n, &facts
		e.checked = append(e.checked, r)
	}
	all := slices.Clone(e.checked)
	e.check = func(_ context.Context, r machinecheck.Request, _ func(machinecheck.Result)) []machinecheck.Result {
		needs = r.Needs
		return slices.Clone(e.checked[:len(r.Targets)])
	}
	add := func(hosts ...string) (string, int) {
		args := []string{"machine", "add", "--group", "control-plane", "--yes"}
		for _, h := range hosts {
			args = append(args, "--ssh", "root@10.0.0."+h)
		}
		out, errs, code := e.run(args...)
		return out + errs, code
	}
	if out, code := add("11", "12"); code != plan.ExitDone || len(e.batches) != 1 || needs.Balancer == nil || needs.Balancer.Expected || needs.Balancer.Port != 8443 {
		t.Fatalf("two control planes: exit code %d, needs %+v\n%s", code, needs.Balancer, out)
	}
	for _, j := range e.batch.Jobs {
		for path, want := range map[string]string{enrol.HAProxyFile: "server node-11 10.0.0.11:6443\n\tserver node-12 10.0.0.12:6443", enrol.KeepalivedFile: "10.0.0.10/32 dev eth0", enrol.EnvironmentFile: "CONSTELLATION_API_SERVER_PORT=8443"} {
			if n := slices.IndexFunc(j.Spec.Files, func(f enrol.File) bool { return f.Path == path }); n < 0 || !strings.Contains(string(j.Spec.Files[n].Data), want) {
				t.Errorf("%s of %s lacks %q", path, j.Spec.Machine, want)
			}
		}
	}

	// The third one alone is refused: the others would not know it.
	e.checked, e.batches = all[2:], nil
	if out, code := add("13"); code != plan.ExitUsage || !strings.Contains(out, "the balancer on node-11 and node-12") || !strings.Contains(out, "--ssh USER@10.0.0.11 --ssh USER@10.0.0.12") || len(e.batches) > 0 || !needs.Balancer.Expected || needs.Listed["node-12"] != netip.MustParseAddr("10.0.0.12") {
		t.Errorf("one more: exit code %d, %s", code, out)
	}
	if out, errs, code := e.run("machine", "add", "node-13", "--address", "10.0.0.13", "--group", "control-plane", "--print-command"); code != plan.ExitUsage || !strings.Contains(errs, "name the other control planes in the same command") || out != "" {
		t.Errorf("one more that calls: exit code %d, %s%s", code, out, errs)
	}
	// A worker has no balancer.
	if out, errs, code := e.run("machine", "add", "--ssh", "root@10.0.0.13", "--dry-run"); code != plan.ExitDone || slices.ContainsFunc(e.batch.Jobs[0].Spec.Files, func(f enrol.File) bool { return f.Path == enrol.HAProxyFile }) {
		t.Errorf("a worker: exit code %d, %s%s", code, out, errs)
	}

	// Two are nodes by now.
	e.checked = []machinecheck.Result{all[2], all[0], all[1]}
	for i := range 2 {
		e.checked[i+1].Findings = []plan.Finding{{ID: "machine-member", Severity: plan.Info}}
	}
	e.fails = map[string]error{"node-12": lostConn}
	if out, code := add("13", "11", "12"); code != plan.ExitFailed || len(e.batches) != 1 || len(e.machines()) != 2 || !strings.Contains(out, "another control plane did not get its address") {
		t.Errorf("a node does not answer: exit code %d, %d batches, %s", code, len(e.batches), out)
	}
	e.fails, e.batches = nil, nil
	out, code := add("13", "11", "12")
	if code != plan.ExitDone || len(e.batches) != 2 || len(e.machines()) != 3 || !strings.Contains(out, "a node already") {
		t.Fatalf("with the others: exit code %d, %d batches, %s", code, len(e.batches), out)
	}
	for _, j := range e.batches[0].Jobs {
		if !j.Spec.Part || j.Authority != nil || len(j.Spec.Files) != 3 || !strings.Contains(string(j.Spec.Files[1].Data), "node-13") {
			t.Errorf("a node gets %+v", j.Spec)
		}
	}
	if j := e.batches[1].Jobs; len(j) != 1 || j[0].Spec.Part || j[0].Spec.Machine != "node-13" {
		t.Errorf("the new machine gets %+v", j)
	}
	// Without a new one, the nodes are compared alone.
	e.checked, e.batches, e.same = e.checked[1:], nil, true
	if out, code := add("11", "12"); code != plan.ExitDone || len(e.machines()) != 3 || !strings.Contains(out, "its balancer has all control planes") {
		t.Errorf("nodes alone: exit code %d, %s", code, out)
	}
	if out, errs, code := e.run("machine", "remove", "node-13", "--gone", "--yes"); code != plan.ExitDone || !strings.Contains(out, "the balancer on node-11 and node-12 still lists it") || !strings.Contains(out, "machine add --group control-plane --ssh USER@10.0.0.11 --ssh USER@10.0.0.12") {
		t.Errorf("remove: exit code %d, %s%s", code, out, errs)
	}
	e.checked[0].Findings, e.checked[1].Findings = []plan.Finding{{ID: "machine-member", Severity: plan.Info}}, nil
	if out, errs, code := e.run("machine", "add", "--ssh", "root@10.0.0.11"); code != plan.ExitNothing {
		t.Errorf("a node as a worker: exit code %d, %s%s", code, out, errs)
	}
}

// TestMachineAddRefusesAChangedHostKey has a real SSH server with another key than the known one.
func TestMachineAddRefusesAChangedHostKey(t *testing.T) {
	t.Parallel()
	e := newEnrolStage(t)
	s := sshdtest.Start(t, sshdtest.Options{})
	known := strings.Replace(sshdtest.Authorized(t, sshdtest.NewKey(t)), "\n", "", 1)
	e.check = func(ctx context.Context, r machinecheck.Request, done func(machinecheck.Result)) []machinecheck.Result {
		file := filepath.Join(t.TempDir(), "known_hosts")
		if err := os.WriteFile(file, fmt.Appendf(nil, "[127.0.0.1]:%d %s\n", s.Port, known), 0o600); err != nil {
			t.Error(err)
		}
		r.SSH.KnownHosts = []string{file}
		return machinecheck.Check(ctx, r, done)
	}
	_, errs, code := e.run("machine", "add", "--ssh", fmt.Sprintf("%s@127.0.0.1:%d", s.User, s.Port), "--key", s.Key, "--yes")
	if code != plan.ExitFailed || !strings.Contains(errs, "the host key is not the known one") || len(e.machines()) > 0 || e.ran > 0 {
		t.Errorf("exit code %d, %s", code, errs)
	}
}

func TestMachineListAndRemove(t *testing.T) {
	t.Parallel()
	e := newEnrolStage(t)
	if out, errs, code := e.run("machine", "list"); code != plan.ExitDone || !strings.Contains(out, "no machine was added") || e.ws.Has(workspace.StateFile) {
		t.Errorf("an empty list: exit code %d, %s%s", code, out, errs)
	}
	if _, errs, code := e.run(append(slices.Clone(twoSSH), "--yes")...); code != plan.ExitDone {
		t.Fatal(errs)
	}
	if out, _, code := e.run("machine", "list"); code != plan.ExitDone || !strings.Contains(out, "node-11   worker          10.0.0.11          file   waits for init") {
		t.Errorf("before init: exit code %d\n%s", code, out)
	}
	remove := []string{"machine", "remove", "node-12", "--ssh", "root@10.0.0.12"}
	if err := e.ws.Write(workspace.KubeconfigFile, []byte("apiVersion: v1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	e.engine.StatusData = engine.Status{Cluster: "mine", Stage: engine.StageCluster, Problem: "no route\x1b[2J", Remedy: "wait"}
	out, _, code := e.run("machine", "list")
	if code != plan.ExitDone || !strings.Contains(out, "unknown") || !strings.Contains(out, "no route") || strings.ContainsRune(out, 0x1b) {
		t.Errorf("a cluster that does not answer: exit code %d\n%s", code, out)
	}
	if _, errs, code := e.run(append(remove, "--yes")...); code != plan.ExitBlocked || !strings.Contains(errs, "--ignore-cluster") || e.removed != nil {
		t.Errorf("removal without an answer: exit code %d, %s", code, errs)
	}
	e.engine.StatusData = engine.Status{Cluster: "mine", Stage: engine.StageCluster, Reachable: true, Nodes: []cluster.Node{{Name: "node-12", Role: "worker", State: "ready", Kubernetes: "v1.36.4", Created: enginefake.Start}}}
	if out, _, code = e.run("machine", "list"); code != plan.ExitDone || !strings.Contains(out, "ready, v1.36.4, since") || !strings.Contains(out, "not a node") {
		t.Errorf("a member: exit code %d\n%s", code, out)
	}
	out, _, _ = e.run("machine", "list", "-o", "json")
	var l view.MachineListing
	if err := json.Unmarshal([]byte(out), &l); err != nil || len(l.Machines) != 2 || l.Machines[0].Node != nil || l.Machines[1].Node == nil {
		t.Errorf("document %v: %s", err, out)
	}
	if _, errs, code := e.run(append(remove, "--yes")...); code != plan.ExitBlocked || !strings.Contains(errs, "kubectl delete node node-12") || e.removed != nil {
		t.Errorf("removal of a member: exit code %d, %s", code, errs)
	}
	e.engine.StatusData.Nodes = nil
	if _, errs, code := e.run(remove...); code != plan.ExitUnacknowledged || e.removed != nil {
		t.Errorf("removal without a word: exit code %d, %s", code, errs)
	}
	for _, bad := range [][]string{{"machine", "remove", "node-12"}, {"machine", "remove", "node-99", "--ssh", "root@10.0.0.12"}, append(slices.Clone(remove), "--gone"), append(slices.Clone(remove), "--ssh", "root@10.0.0.13")} {
		if _, errs, code := e.run(append(bad, "--yes")...); code != plan.ExitUsage || e.removed != nil {
			t.Errorf("%q: exit code %d, %s", bad, code, errs)
		}
	}
	e.remove = lostConn
	if _, _, code := e.run(append(remove, "--yes")...); code != plan.ExitFailed || len(e.machines()) != 2 {
		t.Errorf("a removal that fails: exit code %d, rows %+v", code, e.machines())
	}
	e.remove = nil
	out, errs, code := e.run(append(remove, "--yes")...)
	if code != plan.ExitDone || len(e.machines()) != 1 || !strings.Contains(out, "deleted 3 files") || !strings.Contains(out, "note  restart the machine") || e.removed.Machine != "node-12" || e.removed.Cluster == "" || e.removed.SSH.Target.Host != "10.0.0.12" {
		t.Errorf("removal: exit code %d, %s%s", code, out, errs)
	}
	// The machine of an interrupted removal has no journal any more.
	e.remove = &plan.Error{Err: enrol.ErrNotEnrolled, Exit: plan.ExitNothing}
	if out, _, code := e.run("machine", "remove", "node-11", "--ssh", "root@10.0.0.11", "--yes"); code != plan.ExitDone || len(e.machines()) != 0 || !strings.Contains(out, "no journal") {
		t.Errorf("a removal that ended: exit code %d, %s", code, out)
	}
}

// A node whose Node was deleted is reset and joins again, if the cluster answers and the machine is listed.
func TestMachineAddRejoins(t *testing.T) {
	t.Parallel()
	reachable := engine.Status{Cluster: "mine", Stage: engine.StageCluster, Reachable: true}
	node := reachable
	node.Nodes = []cluster.Node{{Name: "node-11", Role: "worker", State: "ready"}}
	for _, tt := range []struct {
		name   string
		ids    []string
		status engine.Status
		listed bool
		code   int
		want   string
		runs   int
	}{
		{name: "its Node was deleted", ids: []string{"machine-member"}, status: reachable, listed: true, code: plan.ExitDone, want: "next  constellation", runs: 1},
		{name: "a reset that was cut", ids: []string{"machine-half-initialised", "machine-claimed"}, status: reachable, listed: true, code: plan.ExitDone, want: "the machine is reset and joins again", runs: 1},
		{name: "its Node is there", ids: []string{"machine-member"}, status: node, listed: true, code: plan.ExitNothing, want: "is a node of this cluster already"},
		{name: "the cluster does not answer", ids: []string{"machine-member"}, status: engine.Status{Cluster: "mine", Stage: engine.StageCluster}, listed: true, code: plan.ExitNothing, want: "if its Node was deleted, repeat the command when the cluster answers"},
		{name: "half initialised, and the cluster does not answer", ids: []string{"machine-half-initialised"}, status: engine.Status{Cluster: "mine", Stage: engine.StageCluster}, listed: true, code: plan.ExitBlocked, want: "in the way"},
		{name: "there is no cluster yet", ids: []string{"machine-half-initialised"}, listed: true, code: plan.ExitBlocked, want: "in the way"},
		{name: "not listed", ids: []string{"machine-half-initialised"}, status: reachable, code: plan.ExitBlocked, want: "in the way"},
		{name: "reinstalled, and its Node is there", status: node, listed: true, code: plan.ExitBlocked, want: "kubectl delete node node-11"},
		{name: "another finding", ids: []string{"machine-half-initialised", "machine-swap"}, status: reachable, listed: true, code: plan.ExitBlocked, want: "1 finding in the way: title of machine-swap"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			e := newEnrolStage(t)
			if tt.listed {
				if _, errs, code := e.run(append(slices.Clone(oneSSH), "--yes")...); code != plan.ExitDone {
					t.Fatal(errs)
				}
			}
			e.ran = 0
			if tt.status.Stage != "" {
				_, err := e.ws.Enrolment()
				st, err2 := e.ws.State()
				if err = errors.Join(err, err2); err == nil {
					st.ClusterValues = workspace.ClusterValues{ClusterID: bytes.Repeat([]byte{7}, 32), MeasurementSalt: bytes.Repeat([]byte{8}, 32)}
					err = errors.Join(e.ws.WriteState(st), e.ws.Write(workspace.KubeconfigFile, []byte("apiVersion: v1\n"), 0o600))
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			e.engine.StatusData = tt.status
			for _, id := range tt.ids {
				f := plan.Finding{ID: id, Severity: plan.Block, Title: "title of " + id, Remedy: "reset it"}
				if id == "machine-member" {
					f.Severity = plan.Info
				} else {
					e.checked[0].Ready = false
				}
				e.checked[0].Findings = append(slices.Clone(e.checked[0].Findings), f)
			}
			out, errs, code := e.run(append(slices.Clone(oneSSH), "--yes")...)
			if code != tt.code || !strings.Contains(strings.Join(strings.Fields(out+errs), " "), strings.Join(strings.Fields(tt.want), " ")) || e.ran != tt.runs {
				t.Errorf("exit code %d, want %d, %d installations, and %q in\n%s%s", code, tt.code, e.ran, tt.want, out, errs)
			}
			if tt.runs > 0 && !e.batch.Jobs[0].Rejoin {
				t.Error("the machine is not reset")
			}
		})
	}
}

// The vendors of a folder verify TPMs, and the list and the output name the one that did.
func TestMachineAddVerifiesVendors(t *testing.T) {
	t.Parallel()
	e := newEnrolStage(t)
	dir := t.TempDir()
	add := append(slices.Clone(oneSSH), "--tpm-roots", dir, "--yes", "-o", "json")
	if out, errs, code := e.run(add...); code != plan.ExitUsage || e.ran != 0 || !strings.Contains(errs, "has no certificate") {
		t.Errorf("an empty folder: exit code %d, %s%s", code, out, errs)
	}
	cert, _, err := authority.Create("vendor")
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "vendor.pem"), cert, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	e.keys = map[string]enrol.Key{"node-11": {Attested: true, EK: "sha256:" + strings.Repeat("1", 64), Vendor: "CN=vendor"}}
	out, errs, code := e.run(add...)
	if code != plan.ExitDone || !strings.Contains(out, `"vendor": "CN=vendor"`) || e.batch.Jobs[0].Authority.EKRoots == nil {
		t.Errorf("exit code %d, %s%s", code, out, errs)
	}
	if out, _, _ := e.run("machine", "list", "-o", "json"); e.machines()[0].Vendor != "CN=vendor" || !strings.Contains(out, `"vendor": "CN=vendor"`) {
		t.Errorf("the list has %+v:\n%s", e.machines(), out)
	}
	if e.run(append(slices.Clone(oneSSH), "--yes")...); e.batch.Jobs[0].Authority.EKRoots != nil {
		t.Error("without the flag, TPMs are verified")
	}
}

func TestMachineIsGone(t *testing.T) {
	t.Parallel()
	e := newEnrolStage(t)
	if _, errs, code := e.run(append(slices.Clone(oneSSH), "--yes")...); code != plan.ExitDone {
		t.Fatal(errs)
	}
	if _, errs, code := e.run("machine", "remove", "node-11", "--gone", "--yes"); code != plan.ExitDone || len(e.machines()) != 0 || e.removed != nil {
		t.Errorf("exit code %d, %s", code, errs)
	}
}

func TestMachineLogs(t *testing.T) {
	t.Parallel()
	e := newEnrolStage(t)
	if _, errs, code := e.run(append(slices.Clone(oneSSH), "--yes")...); code != plan.ExitDone {
		t.Fatal(errs)
	}
	e.log = "one\ntwo \x1b[2J\x07\u202e\n" + strings.Repeat("x", 40_000) + "\nlast"
	out, errs, code := e.run("machine", "logs", "node-11", "--ssh", "root@10.0.0.11")
	lines := strings.Split(out, "\n")
	if code != plan.ExitDone || lines[0] != "one" || strings.ContainsAny(out, "\x1b\x07\u202e") || lines[len(lines)-2] != "last" || len(lines[2]) != longestLine || len(lines) != 7 {
		t.Errorf("exit code %d, %s, %d lines: %.200q", code, errs, len(lines), out)
	}
	for _, bad := range [][]string{{"--unit", "ssh"}, {"--lines", "-1"}, {"--ssh", "root@10.0.0.12"}} {
		if _, errs, code := e.run(append([]string{"machine", "logs", "node-11", "--ssh", "root@10.0.0.11"}, bad...)...); code != plan.ExitUsage {
			t.Errorf("%q: exit code %d, %s", bad, code, errs)
		}
	}
	if _, errs, code := e.run("machine", "logs", "node-99", "--ssh", "root@10.0.0.11"); code != plan.ExitUsage || !strings.Contains(errs, "machine list") {
		t.Errorf("exit code %d, %s", code, errs)
	}
}

// A workspace of another provider has no such machines.
func TestMachineVerbsNeedTheProvider(t *testing.T) {
	t.Parallel()
	e := newEnrolStage(t)
	b, err := e.ws.ReadConfig()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(e.ws.Path(workspace.ConfigFile), bytes.ReplaceAll(b, []byte("enrolled"), []byte("nowhere")), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{append(slices.Clone(oneSSH), "--yes"), {"machine", "list"}, {"machine", "remove", "a", "--ssh", "root@10.0.0.11", "--yes"}} {
		if _, errs, code := e.run(args...); code != plan.ExitUsage {
			t.Errorf("%q: exit code %d, %s", args, code, errs)
		}
	}
	if err := os.Remove(e.ws.Path(workspace.ConfigFile)); err != nil {
		t.Fatal(err)
	}
	if _, errs, code := e.run(append(slices.Clone(oneSSH), "--dry-run")...); code != plan.ExitUsage {
		t.Errorf("without a configuration: exit code %d, %s", code, errs)
	}
}

// The row of a machine has the TPM with its key. Another computer under that name is refused.
func TestMachineAddWithTPM(t *testing.T) {
	t.Parallel()
	e := newEnrolStage(t)
	ek := func(digit string) string { return "sha256:" + strings.Repeat(digit, 64) }
	e.keys = map[string]enrol.Key{"node-11": {Attested: true, EK: ek("1"), TPM: machines.DefaultTPM}}
	for range 2 {
		out, errs, code := e.run(append(slices.Clone(twoSSH), "--yes")...)
		if code != plan.ExitDone || !strings.Contains(out, "attested by its TPM") || !strings.Contains(out, "not attested: its key is in a file") {
			t.Fatalf("exit %d\n%s%s", code, out, errs)
		}
	}
	if list := e.machines(); len(list) != 2 || !list[0].Attested || list[0].EK != ek("1") || list[0].TPM != "" || list[1].Attested || e.batch.Jobs[0].TPM != "auto" {
		t.Errorf("machines %+v, TPM %q", list, e.batch.Jobs[0].TPM)
	}
	out, _, _ := e.run(append(slices.Clone(oneSSH), "--yes", "--tpm", "none", "-o", "json")...)
	var r addReport
	if err := json.Unmarshal([]byte(out), &r); err != nil || len(r.Machines) != 1 || !r.Machines[0].Attested || r.Machines[0].EK != ek("1") || e.batch.Jobs[0].TPM != "none" {
		t.Errorf("report %s: %v", out, err)
	}
	e.keys["node-11"] = enrol.Key{Attested: true, EK: ek("2")}
	if _, errs, code := e.run(append(slices.Clone(oneSSH), "--yes")...); code != plan.ExitUsage || !strings.Contains(errs, "it is another computer") || !strings.Contains(errs, "machine remove node-11") {
		t.Errorf("another computer: exit %d\n%s", code, errs)
	}
	e.keys["node-11"] = enrol.Key{Attested: true, EK: ek("1"), TPM: "unix:/etc/tpm/tpm.sock"}
	if _, errs, code := e.run(append(slices.Clone(oneSSH), "--yes")...); code == plan.ExitDone || !strings.Contains(errs, "no address of a TPM") {
		t.Errorf("a TPM in another folder: exit %d\n%s", code, errs)
	}
	if _, errs, code := e.run(append(slices.Clone(oneSSH), "--tpm", "moon")...); code != plan.ExitUsage || !strings.Contains(errs, "--tpm") {
		t.Errorf("no TPM: exit %d\n%s", code, errs)
	}
}
