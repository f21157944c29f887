package console

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/enrol"
	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
	"constellation/tui/view"
)

// machinesFake has fixed answers about machines.
type machinesFake struct {
	listing  view.MachineListing
	listErr  error
	report   machinecheck.Report
	checkErr error
	asks     string // the secret that a login asks for; empty: none
	secret   []byte // the answer
	logins   []MachineLogin
	group    string

	log    []string
	logErr error
	wanted NewMachines
	added  []view.AddedMachine
	fails  map[string]error // of steps: check, compare, install, outside, give
	pause  bool             // install and give wait for the end of their context
	did    []string         // steps, in order
	gives  Removing
	happen chan func(CallEvents) // what happens during a wait; nil ends it
}

func newMachinesFake() *machinesFake {
	node := func(name, role, state string, ago time.Duration) *cluster.Node {
		return &cluster.Node{Name: name, Role: role, State: state, Kubernetes: "v1.36.4", Created: enginefake.Start.Add(-ago)}
	}
	down := node("worker-0", "worker", plan.NodeNotReady, 26*time.Hour)
	down.Message = "container runtime is down"
	return &machinesFake{
		fails: map[string]error{}, happen: make(chan func(CallEvents)),
		log: []string{
			"2026-11-27T07:04:58+0000 worker-0 kubelet[812]: \\x1b[2Jnode is ready",
			"2026-11-27T07:04:59+0000 worker-0 constellation-agent[77]: listening on /run/constellation-agent/agent.sock, waiting for the operator of the cluster",
			"-- No entries --",
		},
		added: []view.AddedMachine{
			{Machine: "root@10.42.0.7", Name: "worker-3", Address: "10.42.0.7", Group: "worker", Attested: true, Outcome: enrol.Outcome{Changes: []string{"install runc of the distribution, held back from upgrades", "write /etc/constellation/environment", "write /usr/lib/constellation/agent", "restart constellation-agent.service"}}},
			{Machine: "root@10.42.0.8", Name: "worker-4", Address: "10.42.0.8", Group: "worker", Outcome: enrol.Outcome{Changes: []string{"write /usr/lib/constellation/agent"}}},
		},
		listing: view.MachineListing{Cluster: "demo", Initialised: true, Machines: []view.ListedMachine{
			{Name: "control-plane-0", Group: "control-plane", Address: "10.42.0.3", Attested: true, EK: "sha256:" + strings.Repeat("0a", 32), TPM: "/dev/tpmrm0", Node: node("control-plane-0", "control-plane", plan.NodeReady, 26*time.Hour)},
			{Name: "worker-0", Group: "worker", Address: "10.42.0.4", Node: down},
			{Name: "worker-1", Group: "worker", Address: "10.42.0.5", Joins: true},
			{Name: "worker-2", Group: "worker", Address: "10.42.0.6"},
		}},
		report: machinecheck.Report{Role: "worker", Machines: []machinecheck.Result{{
			Machine: "root@10.42.0.4", HostKey: "SHA256:abc", Facts: &machinecheck.Facts{HostName: "worker-0", OS: machinecheck.OS{Name: "Debian GNU/Linux 12"}, Arch: "amd64", Kernel: "6.1.0", Cores: 4, Memory: 8 << 20, TPM: "2", Addresses: []netip.Prefix{netip.MustParsePrefix("10.42.0.4/24")}},
			Findings: []plan.Finding{
				{ID: "machine-swap", Severity: plan.Block, Title: "swap is on: /dev/sda2\x1b[2J", Remedy: "turn it off", Command: "swapoff -a"},
				{ID: "machine-firewall", Severity: plan.Warn, Title: "a firewall is active: nftables"},
			},
		}}},
	}
}

func (f *machinesFake) machines() *Machines {
	return &Machines{
		List: func(context.Context) (view.MachineListing, error) { return f.listing, f.listErr },
		Check: func(ctx context.Context, to MachineLogin, group string, ask Ask) (machinecheck.Report, error) {
			if err := f.login(ctx, to, ask); err != nil {
				return machinecheck.Report{}, err
			}
			f.group = group
			return f.report, f.checkErr
		},
		Logs: func(ctx context.Context, _ string, to MachineLogin, ask Ask, line func(string)) error {
			if err := f.login(ctx, to, ask); err != nil {
				return err
			}
			for _, l := range f.log {
				line(l)
			}
			if f.logErr == nil {
				<-ctx.Done()
			}
			return f.logErr
		},
		Add: func(n NewMachines, _ Ask) (Addition, error) {
			f.wanted = n
			if len(n.Machines) == 0 {
				return nil, &plan.Error{Op: "read flags", Err: errors.New("no machine is named"), Remedy: "name each machine with --ssh USER@HOST"}
			}
			return machineSteps{f}, nil
		},
		Calls: func(n NewMachines) (Calls, error) {
			f.wanted = n
			return &machineCalls{f}, f.fails["calls"]
		},
		Invalid: func(n NewMachines, flag string) error {
			if flag == "--proxy" && !strings.HasPrefix(n.Proxy, "http://") {
				return &plan.Error{Op: "read flags", Err: errors.New("--proxy is no address of an HTTP proxy"), Remedy: "write it as http://HOST:PORT", Exit: plan.ExitUsage}
			}
			return nil
		},
		Remove: func(r Removing, _ Ask) (Removal, error) {
			f.gives = r
			return machineSteps{f}, nil
		},
	}
}

// machineCalls are machines that call, with the answers of a fake.
type machineCalls struct{ f *machinesFake }

func (x *machineCalls) Wait(ctx context.Context, e CallEvents) ([]view.AddedMachine, error) {
	l := Listening{At: "10.42.0.1:9443", Until: enginefake.Start.Add(30 * time.Minute)}
	for _, m := range x.f.wanted.Callers {
		l.Texts = append(l.Texts, "sh <<'CONSTELLATION'\nset -eu\n# "+m+"\nsum="+strings.Repeat("0a", 32)+" ;;\necho SECRET | \"$dir/bootstrapper\" call \"$console\" \\\n  "+strings.Repeat("1b", 32)+"\nCONSTELLATION\n")
	}
	e.Listening(l)
	for {
		select {
		case do := <-x.f.happen:
			if do == nil {
				x.f.did = append(x.f.did, "waited")
				return x.f.added, x.f.fails["wait"]
			}
			do(e)
		case <-ctx.Done():
			x.f.did = append(x.f.did, "void")
			return x.f.added, &plan.Error{Op: "add machines", Err: context.Cause(ctx), Remedy: "run the same command again"}
		}
	}
}

func (x *machineCalls) Save(i int) (string, error) {
	x.f.did = append(x.f.did, "save "+x.f.wanted.Callers[i])
	return "constellation-worker-3-command.sh", nil
}

// machineSteps are an addition and a removal with the answers of a fake.
type machineSteps struct{ f *machinesFake }

func (x machineSteps) do(ctx context.Context, step string, pauses bool) error {
	x.f.did = append(x.f.did, step)
	if pauses && x.f.pause {
		<-ctx.Done()
		return &plan.Error{Op: step, Err: context.Cause(ctx), Remedy: "run the same command again"}
	}
	return x.f.fails[step]
}

func (x machineSteps) Check(ctx context.Context) (machinecheck.Report, error) {
	return x.f.report, x.do(ctx, "check", false)
}

func (x machineSteps) Compare(ctx context.Context, step func(int, enrol.Step)) ([]view.AddedMachine, error) {
	step(0, enrol.Step{Title: "log in"})
	return x.f.added, x.do(ctx, "compare", false)
}

func (x machineSteps) Install(ctx context.Context, step func(int, enrol.Step), done func(int, enrol.Result)) ([]view.AddedMachine, error) {
	step(0, enrol.Step{Title: "send /usr/lib/constellation/agent", Done: 4, Total: 9})
	if len(x.f.added) > 1 {
		done(1, enrol.Result{Err: errors.New("the connection was lost")})
	}
	err := x.do(ctx, "install", true)
	out := slices.Clone(x.f.added)
	for i := range out {
		out[i].Took = 1500 * time.Millisecond
		if err != nil && i > 0 {
			out[i].Error = err.Error()
		}
	}
	return out, err
}

func (x machineSteps) Outside(ctx context.Context) error { return x.do(ctx, "outside", false) }

func (x machineSteps) Give(ctx context.Context, step func(enrol.Step)) (enrol.Outcome, error) {
	step(enrol.Step{Title: "reset the node", Done: 1, Total: 5})
	return enrol.Outcome{Changes: []string{"deleted 12 files"}, Notes: []string{"restart the machine"}}, x.do(ctx, "give", true)
}

// login records a login, and asks for its secret.
func (f *machinesFake) login(ctx context.Context, to MachineLogin, ask Ask) (err error) {
	f.logins = append(f.logins, to)
	if f.asks != "" {
		f.secret, err = ask(ctx, f.asks)
	}
	return err
}

// show opens the machines screen from the home.
func (f *machinesFake) show(s func(*enginefake.Engine) *stage) *stage {
	st := s(&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageCluster), StatusData: enginefake.DemoStatus()})
	st.c.deps.Machines = f.machines()
	return st.begin().press("m")
}

// call waits for two machines that call.
func (f *machinesFake) call(s func(*enginefake.Engine) *stage) *stage {
	st := f.show(s).press("a", "up", "right", "down", "worker-3=10.42.0.7 worker-4=10.42.0.8", "enter")
	st.settle()
	return st
}

// happens has something happen during a wait; nil ends it.
func (f *machinesFake) happens(st *stage, do func(CallEvents)) {
	f.happen <- do
	st.settle()
}

var machineScenes = []scene{
	{"machines", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return newMachinesFake().show(s).press("down")
	}},
	{"machines-empty", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		f := newMachinesFake()
		f.listing.Machines, f.listing.Initialised = nil, false
		return f.show(s)
	}},
	{"machines-unknown", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		f := newMachinesFake()
		for i := range f.listing.Machines {
			f.listing.Machines[i].Node = nil
		}
		f.listing.Problem, f.listing.Remedy = "list the nodes of demo: the API server does not answer", "check whether the control plane is up; the machines of the cloud are listed below"
		return f.show(s)
	}},
	{"machine-login", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return newMachinesFake().show(s).press("down", "enter", "c", "tab", "right")
	}},
	{"machine-secret", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		f := newMachinesFake()
		f.asks = "Password of admin for sudo"
		return f.show(s).press("down", "enter", "c", "enter", "abc")
	}},
	{"machine-findings", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return newMachinesFake().show(s).press("down", "enter", "c", "enter")
	}},
	{"machine-log", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return newMachinesFake().show(s).press("down", "enter", "l", "enter", "w")
	}},
	{"machine-add-form", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return newMachinesFake().show(s).press("a", "root@10.42.0.7 root@10.42.0.8", "tab")
	}},
	{"machine-add-more", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return newMachinesFake().show(s).press("a", "root@10.42.0.7", "up", "up", "enter", "down", "down", "down", "down", "down", "down", "down", "ftp://proxy", "tab")
	}},
	{"machine-call-form", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return newMachinesFake().show(s).press("a", "up", "right", "down")
	}},
	{"machine-call-waiting", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		f := newMachinesFake()
		return f.call(s)
	}},
	{"machine-call-steps", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		f := newMachinesFake()
		st := f.call(s)
		f.happens(st, func(e CallEvents) {
			e.Note("refused a call from 10.42.0.9: the token of worker-3 is for 10.42.0.7, and the connection comes from 10.42.0.9")
			e.Note("worker-3 called from 10.42.0.7")
			e.Step(0, enrol.Step{Title: "send /usr/lib/constellation/agent", Done: 4, Total: 9})
		})
		return st
	}},
	{"machine-call-done", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		f := newMachinesFake()
		st := f.call(s)
		f.happens(st, nil)
		return st
	}},
	{"machine-add-blocked", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		f := newMachinesFake()
		f.fails["check"] = blockedMachines
		return f.show(s).press("a", "root@10.42.0.7", "enter")
	}},
	{"machine-add-question", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return newMachinesFake().show(s).press("a", "root@10.42.0.7 root@10.42.0.8", "enter")
	}},
	{"machine-add-running", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		f := newMachinesFake()
		f.pause = true
		st := f.show(s).press("a", "root@10.42.0.7 root@10.42.0.8", "enter", "right").later().press("enter")
		st.settle()
		return st
	}},
	{"machine-add-failed", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		f := newMachinesFake()
		f.fails["install"] = &plan.Error{Op: "add 2 machines", Err: errors.New("1 of them could not be added: the connection was lost"), Remedy: "run the same command again when that is mended"}
		return f.show(s).press("a", "root@10.42.0.7 root@10.42.0.8", "enter", "right").later().press("enter")
	}},
	{"machine-add-done", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return newMachinesFake().show(s).press("a", "root@10.42.0.7 root@10.42.0.8", "enter", "right").later().press("enter")
	}},
	{"machine-remove-node", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		f := newMachinesFake()
		f.fails["outside"] = isNode
		return f.show(s).press("down", "enter", "x", "enter")
	}},
	{"machine-remove-question", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return newMachinesFake().show(s).press("down", "enter", "x", "enter")
	}},
	{"machine-remove-done", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return newMachinesFake().show(s).press("down", "enter", "x", "enter", "right").later().press("enter")
	}},
	{"machine-adopted", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		f := newMachinesFake()
		f.listing.Adopted = true
		return f.show(s).press("enter")
	}},
}

var (
	blockedMachines = &plan.Error{Op: "check 1 machine", Err: errors.New("1 finding in the way: swap is on"), Remedy: "turn it off", Exit: plan.ExitBlocked}
	isNode          = &plan.Error{Op: "remove machine worker-0", Err: errors.New("its Node is in the cluster"), Remedy: "run `kubectl drain worker-0 --ignore-daemonsets --delete-emptydir-data`, then `kubectl delete node worker-0`", Exit: plan.ExitBlocked}
)

// machineStage shows the machines of a fake.
func machineStage(t *testing.T, f *machinesFake) *stage {
	return f.show(func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
}

// shows fails unless the frame contains each text.
func (s *stage) shows(texts ...string) {
	s.t.Helper()
	s.settle()
	frame := s.c.View()
	for _, x := range texts {
		if !strings.Contains(frame, x) {
			s.t.Fatalf("the frame lacks %q:\n%s", x, frame)
		}
	}
}

func TestMachineIsCheckedBySSH(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newMachinesFake()
		f.asks = "Password of admin for sudo"
		s := machineStage(t, f)
		s.shows("2 of 4", "worker-2", "not a node")
		s.press("down", "enter").shows("reason", "container runtime is down", "c logs in")
		s.press("c").shows("Login to worker-0", "root@10.42.0.4")
		for range len("root@10.42.0.4") {
			s.press("backspace")
		}
		s.press("admin@10.42.0.4", "tab", "right", "tab", "q", "enter")
		s.shows("Password of admin for sudo")
		s.press("pa", "q", "?", "enter")
		s.shows("swap is on", "Findings on root@10.42.0.4", "login         admin@10.42.0.4")
		if !bytes.Equal(f.secret, []byte("paq?")) || f.group != "worker" {
			t.Errorf("the password is %q, the group %q", f.secret, f.group)
		}
		if got := f.logins[0]; !got.Sudo || got.Key != "q" || got.Machines[0] != "admin@10.42.0.4" {
			t.Errorf("login %+v", got)
		}
		if frame := s.c.View(); strings.Contains(frame, "\x1b[2J") || strings.Contains(frame, "paq") {
			t.Errorf("the frame has what it must not show:\n%q", frame)
		}
		if want := "machine check --ssh admin@10.42.0.4 --key q --sudo"; !strings.Contains(s.c.screen.command(), want) {
			t.Errorf("the command is %q, want %q", s.c.screen.command(), want)
		}

		// The login stays for this machine, and its values for the next one.
		s.press("c", "esc")
		s.shows("the prompt was not answered")
		s.press("esc", "down", "enter", "c").shows("root@10.42.0.5", "yes")
		s.press("esc", "esc", "esc")
		if s.c.screen != s.c.overview {
			t.Errorf("Esc leads to %s", s.c.screen.title())
		}
	})
}

// A prompt of a check that the user leaves is closed.
func TestSecretPromptEndsWithItsCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newMachinesFake()
		f.asks = "Password"
		s := machineStage(t, f)
		s.press("enter", "c", "enter").shows("Password:")
		s.c.task.drop()
		s.settle()
		if s.c.secret.open() {
			t.Error("the prompt is open after its task has ended")
		}
		s.press("esc")
		if s.c.screen != s.c.machines {
			t.Errorf("Esc leads to %s", s.c.screen.title())
		}
		s.press("enter", "c").shows("Password:")
		s.press("ctrl+c")
		if !s.quit {
			t.Error("Ctrl-C does not leave")
		}
	})
}

// The list follows the cluster, keeps its cursor, and is never shown as live when it is old.
func TestMachinesListIsLive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newMachinesFake()
		s := machineStage(t, f).press("G").press("down", "down", "down")
		f.listing.Machines = append([]view.ListedMachine{{Name: "worker-9", Group: "worker", Address: "10.42.0.9"}}, f.listing.Machines...)
		s.tell(machinesRefresh{s.c.machines.gen})
		if _, cmd := s.c.Update(machinesRefresh{s.c.machines.gen}); cmd != nil {
			s.do(cmd)
		}
		s.shows("worker-9")
		if m := s.c.machines.selected(); m.Name != "worker-2" {
			t.Errorf("the cursor moved to %s", m.Name)
		}
		f.listErr = errors.New("read constellation-conf.yaml: it is not YAML")
		s.press("r").shows("STALE", "it is not YAML", "worker-9")
	})
}

func TestHomeWithoutListHasNoMachines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageCluster), StatusData: enginefake.DemoStatus()}, term.Display{}, 80, 24).begin().press("m")
		if s.c.screen != s.c.overview || !strings.Contains(s.c.note, "no list of machines") {
			t.Errorf("screen %s, note %q", s.c.screen.title(), s.c.note)
		}
	})
}

// Machines are added after a question whose cursor is on the safe answer, and a failure can be repeated.
func TestMachinesAreAdded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newMachinesFake()
		s := machineStage(t, f)
		s.press("a", "enter").shows("no machine is named", "logins")
		s.press("root@10.42.0.7,root@10.42.0.8", "tab").shows("control-plane", "worker")
		f.fails["check"] = blockedMachines
		s.press("enter").shows("1 finding in the way", "swap is on")
		if slices.Contains(f.did, "compare") {
			t.Errorf("machines that are blocked were compared: %v", f.did)
		}
		delete(f.fails, "check")
		s.press("r").shows("install runc", "Make these changes on 2 machines", "▸  Back")
		s.press("right", "enter").shows("read it first")
		s.press("left").later().press("enter").shows("root@10.42.0.7,root@10.42.0.8")
		if slices.Contains(f.did, "install") {
			t.Fatalf("Back makes changes: %v", f.did)
		}
		f.fails["install"] = errors.New("the connection was lost")
		s.press("enter", "right").later().press("enter").shows("the connection was lost", "attested by its TPM")
		delete(f.fails, "install")
		s.press("r").shows("Make these changes")
		s.press("right").later().press("enter").shows("prepared as worker", "Next: i runs init")
		if !slices.Equal(f.wanted.Machines, []string{"root@10.42.0.7", "root@10.42.0.8"}) || f.wanted.Group != "worker" || f.wanted.TPM != "auto" {
			t.Errorf("wanted %+v", f.wanted)
		}
		if want := "machine add --ssh root@10.42.0.7 --ssh root@10.42.0.8"; !strings.HasSuffix(s.c.screen.command(), want) {
			t.Errorf("the command is %q, want %q", s.c.screen.command(), want)
		}
		s.eng.Plan = operatorPlan()
		if s.press("i"); s.c.screen != s.c.initConfirm {
			t.Errorf("i does not plan init: %s", s.c.screen.title())
		}
	})
}

// What the flags can do, the form can do: the command line that it shows has all of them.
func TestFormHasTheFlagsOfMachineAdd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newMachinesFake()
		s := machineStage(t, f).press("a", "root@10.42.0.7", "tab", "tab", "tab", "tab", "disk=ssd, a=b", "tab", "x=y:NoSchedule", "tab", "right", "tab")
		s.shows("TPM, proxy, packages", "Enter more")
		s.press("enter").shows("--packages")
		for _, text := range []string{"", "bastion", "SHA256:abc", "worker-9", "10.0.0.9", "", "/roots", "ftp://x", "/debs", "/programs"} {
			if text != "" {
				s.press(text)
			}
			s.press("tab")
		}
		s.shows("--proxy is no address of an HTTP proxy; write it as http://HOST:PORT")
		s.press("enter")
		if s.c.machineAdd.stage != addForm || s.c.machineAdd.form.fields[s.c.machineAdd.form.at].key != "--proxy" {
			t.Fatalf("a wrong proxy is accepted, or the cursor is elsewhere:\n%s", s.c.View())
		}
		s.press("ctrl+u", "http://p:3128", "enter").shows("Make these changes")
		const want = "machine add --ssh root@10.42.0.7 --jump bastion --host-key SHA256:abc --label disk=ssd --label a=b --taint x=y:NoSchedule --spare " +
			"--tpm-roots /roots --name worker-9 --address 10.0.0.9 --proxy http://p:3128 --packages /debs --programs /programs"
		if !strings.HasSuffix(s.c.screen.command(), want) {
			t.Errorf("the command is %q, want %q", s.c.screen.command(), want)
		}
		if n := f.wanted; !slices.Equal(n.Labels, []string{"disk=ssd", "a=b"}) || !slices.Equal(n.Taints, []string{"x=y:NoSchedule"}) || !n.Spare || n.Packages != "/debs" || n.Proxy != "http://p:3128" {
			t.Errorf("wanted %+v", n)
		}

		// Values of one machine are forgotten, the rest stays and is visible.
		s.press("esc", "esc", "a").shows("http://p:3128", "/debs")
		if n := s.c.machineAdd.wanted(); n.Spare || len(n.Labels)+len(n.Taints)+len(n.Machines)+len(n.HostKeys) > 0 || n.Name+n.Address != "" || n.Jump[0] != "bastion" {
			t.Errorf("the next form has %+v", n)
		}
	})
}

// Control characters that are pasted into a field reach neither the screen nor the command to copy.
func TestHostileTextIsPastedIntoTheForm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := machineStage(t, newMachinesFake()).press("a", "root@10.42.0.7\x1b[2J\x07\u202e", "tab")
		if all := s.c.View() + s.c.screen.command(); strings.Contains(all, "\x1b[2J") || strings.ContainsAny(all, "\x07\u202e") {
			t.Errorf("control characters are written: %q", all)
		}
	})
}

// Machines that call get a command, which can be copied, and their steps are shown.
func TestMachinesThatCallAreAdded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newMachinesFake()
		f.fails["calls"] = errors.New("no machine is named")
		s := machineStage(t, f).press("a", "up", "right", "down")
		s.press("enter").shows("no machine is named", "NAME=ADDRESS")
		delete(f.fails, "calls")
		s.press("worker-3=10.42.0.7,worker-4=10.42.0.8", "tab", "tab", "disk=ssd", "enter")
		s.shows("Waiting for 2 machines", "at 10.42.0.1:9443 until", "Command for worker-3", "waits for a call from 10.42.0.8", "Run the command on worker-3 as root")
		if f.wanted.Way != ByCommand || f.wanted.ValidFor != "30m" || f.wanted.Labels[0] != "disk=ssd" || len(f.wanted.Machines) > 0 {
			t.Errorf("wanted %+v", f.wanted)
		}
		const want = "machine add worker-3=10.42.0.7 worker-4=10.42.0.8 --print-command --label disk=ssd"
		if is := s.c.screen.command(); !strings.HasSuffix(is, want) {
			t.Errorf("the command is %q, want %q", is, want)
		}
		s.press("y", "tab", "y", "w").shows("Command for worker-4", "constellation-worker-3-command.sh")
		if len(s.copied) != 2 || !strings.Contains(s.copied[0], "# worker-3=10.42.0.7") || !strings.Contains(s.copied[1], "# worker-4=10.42.0.8") || !slices.Contains(f.did, "save worker-4=10.42.0.8") {
			t.Errorf("copied %q, did %q", s.copied, f.did)
		}

		// While a machine is prepared, Esc does not stop that. Afterwards what the other one needs is shown.
		before := s.c.changes.made
		f.happens(s, func(e CallEvents) { e.Step(1, enrol.Step{Title: "send agent", Done: 1, Total: 9}) })
		if before || !s.c.changes.made {
			t.Errorf("machines were changed: %t before a call, %t after it", before, s.c.changes.made)
		}
		s.shows("send agent", "2/9")
		s.press("esc").shows("loses nothing")
		f.happens(s, func(e CallEvents) { e.Ended(1, nil); e.Note("refused a call from 10.42.0.9: \x1b[2Jits token") })
		s.shows("Command for worker-3", "prepared", "refused a call")
		f.happens(s, func(e CallEvents) { e.Ended(0, errors.New("swap is on")) })
		s.shows("can call again: swap is on", "Command for worker-3")
		f.added[0].Error, f.fails["wait"] = "it did not call", errors.New("worker-3 did not call")
		f.happens(s, nil)
		s.shows("worker-3 did not call", "prepared as worker")

		// A second try is for the machine that is left.
		f.fails["wait"] = nil
		s.press("r").shows("Waiting for 1 machine")
		f.added = f.added[:1]
		f.added[0].Error = ""
		f.happens(s, nil)
		s.shows("Next: i runs init")
		if !slices.Equal(f.wanted.Callers, []string{"worker-3=10.42.0.7"}) {
			t.Errorf("the second try is for %q", f.wanted.Callers)
		}
		s.eng.Plan = operatorPlan()
		if s.press("i"); s.c.screen != s.c.initConfirm {
			t.Errorf("i does not plan init: %s", s.c.screen.title())
		}
	})
}

// Esc and leaving end a wait: the tokens are worthless, and nothing of them stays on the screen.
func TestWaitIsCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newMachinesFake()
		s := machineStage(t, f)
		s.press("a", "up", "left", "down", "worker-3=10.42.0.7", "enter").shows("User data for worker-3", "Give these user data")
		s.c.h = 16
		f.happens(s, func(e CallEvents) {
			for range callNotes {
				e.Note("refused a call")
			}
		})
		s.c.View() // it measures the page
		s.press("G").shows("line ")
		s.press("esc").shows("worthless now", "worker-3=10.42.0.7")
		if strings.Contains(s.c.View(), "line 1 of") {
			t.Errorf("the form has the position of the wait:\n%s", s.c.View())
		}
		s.c.h = 24
		if !slices.Equal(f.did, []string{"void"}) || s.c.running || strings.Contains(s.c.View(), "SECRET") {
			t.Fatalf("did %q, running %t", f.did, s.c.running)
		}
		s.press("enter").shows("User data for worker-3")
		s.press("q").shows("Leave this run?", "worthless then")
		s.press("enter")
		s.settle()
		if !s.quit || len(f.did) != 2 || s.c.quit.exit != plan.ExitStopped {
			t.Errorf("quit %t with %d, did %q", s.quit, s.c.quit.exit, f.did)
		}
		if got := strings.Join(s.c.exitSummary(), "\n"); !strings.Contains(got, "machine add worker-3=10.42.0.7 --cloud-init") || strings.Contains(got, "SECRET") {
			t.Errorf("the last lines:\n%s", got)
		}
	})
}

// Leaving a change asks first, stops it, and names the command that continues.
func TestLeavingAChangeOfMachines(t *testing.T) {
	for _, tt := range []struct {
		name, command string
		keys          []string
	}{
		{name: "add", command: "machine add --ssh root@10.42.0.7 --sudo", keys: []string{"a", "root@10.42.0.7", "tab", "tab", "right", "enter"}},
		{name: "remove", command: "machine remove worker-0 --ssh root@10.42.0.4", keys: []string{"down", "enter", "x", "enter"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newMachinesFake()
				f.pause = true
				s := machineStage(t, f).press(tt.keys...).press("right").later().press("enter")
				s.settle()
				s.press("esc").shows("loses nothing")
				s.press("ctrl+c").shows("Leave this run?", "the same command continues it")
				s.press("esc")
				if s.quit || !s.c.running {
					t.Fatal("Esc does not stay")
				}
				s.press("q", "enter")
				s.settle()
				if !s.quit || s.c.quit.exit != plan.ExitStopped {
					t.Errorf("quit %t with %d", s.quit, s.c.quit.exit)
				}
				if got := strings.Join(s.c.exitSummary(), "\n"); !strings.Contains(got, tt.command) {
					t.Errorf("the last lines lack %q:\n%s", tt.command, got)
				}
			})
		})
	}
}

// A machine that is a node is refused with the commands; a lost one needs no login.
func TestMachineIsRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newMachinesFake()
		f.fails["outside"] = isNode
		s := machineStage(t, f)
		s.press("down", "enter", "x", "enter").shows("its Node is in the cluster", "kubectl drain worker-0")
		s.press("right").later().press("enter")
		if slices.Contains(f.did, "give") {
			t.Fatalf("a node was given back: %v", f.did)
		}
		delete(f.fails, "outside")
		s.press("r").shows("Reset and restore the machine", "▸  Back")
		s.press("enter", "right").later().press("enter").shows("worker-0 is removed", "deleted 12 files", "note: restart the machine")

		s.press("esc", "down", "enter", "x", "tab", "tab", "tab", "tab", "tab", "right", "enter").shows("Delete its row")
		if !f.gives.Gone || len(f.gives.Machines) > 0 || !strings.HasSuffix(s.c.screen.command(), "machine remove worker-1 --gone") {
			t.Errorf("removed as %+v by %q", f.gives, s.c.screen.command())
		}
	})
}

// A log is followed, filtered and bounded, whatever the machine writes.
func TestMachineLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newMachinesFake()
		for range 3 * machineLogLines {
			f.log = append(f.log, "2026-11-27T07:05:00+0000 worker-0 kubelet[812]: "+strings.Repeat("é", 9000))
		}
		f.log = append(f.log, "last line")
		s := machineStage(t, f).press("down", "enter", "l", "enter")
		s.shows("Log of worker-0", "5000 lines, 10004 older ones dropped, following", "last line")
		s.press("g").shows("07:05:00 kubelet[812]")
		s.press("/", "last", "enter").shows("1 of 5000 lines", "last line")
		s.press("y")
		if len(s.copied) == 0 || s.copied[0] != "last line" {
			t.Errorf("copied %q", s.copied)
		}
		s.press("esc", "esc").shows("Machine worker-0")
		f.logErr = errors.New("log in to 10.42.0.4: connection refused")
		s.press("l").shows("connection refused", "ENDED")
	})
}

// Machines of an adopted cluster are shown, and not changed.
func TestAdoptedMachinesAreNotChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newMachinesFake()
		f.listing.Adopted = true
		s := machineStage(t, f)
		s.press("a").shows("kubeadm made this cluster")
		s.press("enter", "x").shows("kubeadm made this cluster")
		s.press("c", "enter").shows("swap is on")
	})
}

// Nodes of listed machines are upgraded in place, so no screen promises replacements, lost disks or an autoscaler.
func TestListedMachinesAreNotReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := machineStage(t, newMachinesFake())
		s.press("esc", "b").shows("their disks stay")
		for _, b := range s.c.rollout.keys() {
			b.do()
			if q := s.c.rollout.prompt; strings.Contains(b.help+q.text+q.detail, "eplacement") || strings.Contains(q.detail, "autoscaler") {
				t.Errorf("%s: %s: %s %s", b.label, b.help, q.text, q.detail)
			}
		}
	})
}

// A prompt closes the help: what is typed for it must not be lost, and Enter must not send an empty secret.
func TestSecretPromptClosesTheHelp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newMachinesFake()
		s := machineStage(t, f).press("enter", "?")
		reply := make(chan []byte, 1)
		s.tell(secretWanted{"Password", reply})
		s.shows("Password:")
		s.press("a?b", "enter")
		if got := <-reply; string(got) != "a?b" {
			t.Errorf("the secret is %q", got)
		}
	})
}

// The list is read again on the way back from a log that was followed for long.
func TestListIsFreshAfterALog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newMachinesFake()
		s := machineStage(t, f).press("down", "enter", "l", "enter")
		s.settle()
		f.listing.Machines[1].Node.Message = "disk is full"
		s.at(time.Minute).press("esc").shows("disk is full")
		if s.c.screen.stale() {
			t.Error("the machine is shown as old")
		}
	})
}
