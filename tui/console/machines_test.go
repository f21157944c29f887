package console

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine"
	"constellation/engine/cluster"
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
}

func newMachinesFake() *machinesFake {
	node := func(name, role, state string, ago time.Duration) *cluster.Node {
		return &cluster.Node{Name: name, Role: role, State: state, Kubernetes: "v1.36.4", Created: enginefake.Start.Add(-ago)}
	}
	down := node("worker-0", "worker", plan.NodeNotReady, 26*time.Hour)
	down.Message = "container runtime is down"
	return &machinesFake{
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
	}
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
	{"machine-adopted", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		f := newMachinesFake()
		f.listing.Adopted = true
		return f.show(s).press("enter")
	}},
}

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
