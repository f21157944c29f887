package bootstrapper

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/bootstrapper/initproto"
	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/internal/swtpm"
)

// settings are those of a bootstrapper in a process of its own.
type settings struct {
	Ctl, TPM, Metadata, Listen, Roots string
	APIPort, JoinPort                 int
}

// process is the bootstrapper that tests kill. Everything except kubeadm is real, also the
// TPM.
func process(arg string) int {
	var s settings
	if err := json.Unmarshal([]byte(arg), &s); err != nil {
		return 9
	}
	os.Unsetenv(processEnv) // kubeadm is this binary too
	roots, err := attestation.ParseRoots([]byte(s.Roots))
	if err != nil {
		return 9
	}
	err = Run(context.Background(), Machine{
		StateDir: filepath.Join(s.Ctl, "state"), RunDir: filepath.Join(s.Ctl, "run"), Root: filepath.Join(s.Ctl, "root"),
		Listen: s.Listen, Metadata: sandboxapi.NewMetadata(s.Metadata), TPM: s.TPM, Issuer: attestation.NewTPMIssuer(s.TPM), Validator: attestation.TPMMethod().Validator, Roots: roots,
		StartKubelet: func(context.Context) error { return os.WriteFile(filepath.Join(s.Ctl, "kubelet"), nil, 0o600) },
		Log:          slog.New(slog.NewTextHandler(os.Stderr, nil)), APIServerPort: s.APIPort, joinPort: s.JoinPort,
	})
	switch {
	case err == nil:
		return 0
	case errors.Is(err, ErrStuck):
		return 3
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// machine is a rig whose bootstrapper is a process, with a real TPM and a metadata
// server.
type machine struct {
	*rig
	settings settings
	cmd      *exec.Cmd
	out      *bytes.Buffer
}

func newMachine(t *testing.T, role cloud.Role) (m *machine, powerCycle func()) {
	t.Helper()
	r := newRig(t, role)
	address, reset := swtpm.Start(t)
	boot := func() {
		t.Helper()
		if err := attestationtest.Measure(t.Context(), address, filepath.Join(r.ctl, "eventlog"), r.tpm.events); err != nil {
			t.Fatal(err)
		}
	}
	if err := attestationtest.Provision(t.Context(), address, r.ca, r.tpm.id); err != nil {
		t.Fatal(err)
	}
	boot()
	mux := http.NewServeMux()
	answer := func(path string, v func() any) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) { json.NewEncoder(w).Encode(v()) })
	}
	hash := sha256.Sum256(initSecret)
	answer("/v1/self", func() any { return r.cloud.instance })
	answer("/v1/peers", func() any { return sandboxapi.Peers{Instances: r.cloud.peers} })
	answer("/v1/loadbalancer", func() any { return sandboxapi.LoadBalancer{Host: "127.0.0.1"} })
	answer("/v1/initsecrethash", func() any { return sandboxapi.InitSecretHash{SHA256: hex.EncodeToString(hash[:])} })
	meta := httptest.NewServer(mux)
	t.Cleanup(meta.Close)
	cert, key, err := attestationtest.CreateCA("cloud")
	if err != nil {
		t.Fatal(err)
	}
	if r.ca, err = attestationtest.ParseCA(cert, key); err != nil {
		t.Fatal(err)
	}
	r.tpm.ca = r.ca
	if err := attestationtest.Provision(t.Context(), address, r.ca, r.tpm.id); err != nil {
		t.Fatal(err)
	}
	return &machine{rig: r, settings: settings{
		Ctl: r.ctl, TPM: address, Metadata: meta.URL, Listen: fmt.Sprintf("127.0.0.1:%d", closedPort(t)), Roots: string(cert),
		APIPort: r.m.APIServerPort, JoinPort: r.m.joinPort,
	}}, func() { t.Helper(); reset(); boot() }
}

// up starts the bootstrapper's process.
func (m *machine) up() {
	m.t.Helper()
	arg, err := json.Marshal(m.settings)
	if err != nil {
		m.t.Fatal(err)
	}
	m.cmd = exec.Command(os.Args[0])
	m.cmd.Env = append(os.Environ(), processEnv+"="+string(arg))
	m.out = &bytes.Buffer{}
	m.cmd.Stdout, m.cmd.Stderr = m.out, m.out
	if err := m.cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	cmd := m.cmd
	m.t.Cleanup(func() {
		if cmd.ProcessState == nil {
			cmd.Process.Kill()
			cmd.Wait()
		}
	})
}

func (m *machine) listens() {
	m.t.Helper()
	wait(m.t, "it listens", func() bool {
		c, err := net.Dial("tcp", m.settings.Listen)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

// kill ends the process without a shutdown.
func (m *machine) kill() {
	m.t.Helper()
	m.cmd.Process.Kill()
	m.cmd.Wait()
}

// exit waits for the process and returns its code.
func (m *machine) exit() int {
	m.t.Helper()
	done := make(chan struct{})
	go func() { m.cmd.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		m.cmd.Process.Kill()
		<-done
		m.t.Fatalf("does not end:\n%s", m.out)
	}
	return m.cmd.ProcessState.ExitCode()
}

// register is the value of the real TPM's register 15 for the cluster.
func (m *machine) register() []byte {
	m.t.Helper()
	pcrs, err := attestation.ReadPCRs(m.t.Context(), m.settings.TPM, clusterRegister)
	if err != nil {
		m.t.Fatal(err)
	}
	return pcrs[clusterRegister]
}

func TestKilledInitContinues(t *testing.T) {
	for _, at := range []string{"init-phase-certs-ca", "init"} {
		for _, power := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, power lost %t", at, power), func(t *testing.T) {
				m, powerCycle := newMachine(t, cloud.ControlPlane)
				m.script("hang-"+at, "")
				m.up()
				m.listens()
				stream, err := m.console(m.settings.Listen).Init(t.Context(), m.request(clusterA))
				if err != nil {
					t.Fatal(err)
				}
				first, err := stream.Recv()
				if err != nil {
					t.Fatalf("%v\n%s", err, m.out)
				}
				wait(t, "kubeadm hangs", func() bool { return exists(filepath.Join(m.ctl, "hanging-"+at)) })
				m.kill()
				if !bytes.Equal(m.register(), attestation.ClusterIDPCR(clusterA)) {
					t.Errorf("register 15 is %x", m.register())
				}
				if power {
					powerCycle()
				}
				m.unscript("hang-" + at)
				m.up()
				m.listens()
				if !bytes.Equal(m.register(), attestation.ClusterIDPCR(clusterA)) {
					t.Errorf("it listens while register 15 is %x", m.register())
				}
				got, err := collect(m.console(m.settings.Listen).Init(t.Context(), m.request(clusterA)))
				if err != nil || !strings.HasSuffix(outline(got), "kubeadm-init:done success control-plane-0") || fmt.Sprint(got[0]) != fmt.Sprint(first) {
					t.Fatalf("%s, %v\n%s", outline(got), err, m.out)
				}
				if calls := m.calls(); strings.Count(calls, "reset") != 1 || !strings.HasSuffix(calls, " reset init-phase-certs-ca init") {
					t.Errorf("kubeadm was called with %s", calls)
				}
				if left, _ := os.ReadDir(filepath.Join(m.ctl, "run")); len(left) > 0 {
					t.Errorf("configuration of the killed kubeadm was left: %v", left)
				}
				m.kill() // again, before the result was acknowledged
				m.up()
				m.listens()
				again, err := collect(m.console(m.settings.Listen).Init(t.Context(), m.request(clusterA)))
				if err != nil || fmt.Sprint(again) != fmt.Sprint(got) {
					t.Errorf("replay: %s, %v", outline(again), err)
				}
				if _, err := m.console(m.settings.Listen).Ack(t.Context(), &initproto.AckRequest{InitSecret: initSecret}); err != nil {
					t.Fatal(err)
				}
				if code := m.exit(); code != 0 || strings.Contains(m.out.String(), "canary") {
					t.Errorf("exit %d\n%s", code, m.out)
				}
			})
		}
	}
}

func TestKilledJoinContinues(t *testing.T) {
	for _, power := range []bool{false, true} {
		t.Run(fmt.Sprintf("power lost %t", power), func(t *testing.T) {
			m, powerCycle := newMachine(t, cloud.Worker)
			m.script("hang-join", "")
			s := m.serveJoins(nil)
			m.up()
			wait(t, "kubeadm hangs", func() bool { return exists(filepath.Join(m.ctl, "hanging-join")) })
			m.kill()
			if power {
				powerCycle()
			}
			m.unscript("hang-join")
			m.up()
			if code := m.exit(); code != 0 {
				t.Fatalf("exit %d\n%s", code, m.out)
			}
			if s.asked() != 1 || m.calls() != "join reset join" || !bytes.Equal(m.register(), attestation.ClusterIDPCR(clusterB)) {
				t.Errorf("%d tickets, kubeadm was called with %s, register 15 is %x", s.asked(), m.calls(), m.register())
			}
			powerCycle()
			m.up()
			if code := m.exit(); code != 0 || !exists(filepath.Join(m.ctl, "kubelet")) || !bytes.Equal(m.register(), attestation.ClusterIDPCR(clusterB)) {
				t.Errorf("a member that boots: exit %d, register 15 is %x\n%s", code, m.register(), m.out)
			}
		})
	}
}

// TestKilledAtAnyMoment kills the process repeatedly at random moments until the machine is a
// member. Exactly one init wins, once.
func TestKilledAtAnyMoment(t *testing.T) {
	m, powerCycle := newMachine(t, cloud.ControlPlane)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	life := 20 * time.Millisecond
	var got []*initproto.InitResponse
	for kills := 0; ; kills++ {
		m.up()
		gone := make(chan struct{})
		go func() { m.cmd.Wait(); close(gone) }()
		over := time.AfterFunc(life, func() { m.cmd.Process.Kill() })
		alive := true
		for alive && ctx.Err() == nil {
			var err error
			attempt, done := context.WithTimeout(ctx, 5*time.Second)
			if got, err = collect(m.console(m.settings.Listen).Init(attempt, m.request(clusterA))); err == nil {
				alive = false
			}
			done()
			select {
			case <-gone:
				alive = false
			case <-time.After(2 * time.Millisecond):
			}
		}
		over.Stop()
		m.cmd.Process.Kill()
		<-gone
		if len(got) > 0 && (got[len(got)-1].GetSuccess() != nil || got[len(got)-1].GetFailure() != nil) {
			t.Logf("killed %d times", kills)
			break
		}
		if ctx.Err() != nil {
			t.Fatalf("never became a member:\n%s", m.out)
		}
		if kills%4 == 2 {
			powerCycle()
		}
		life = life * 9 / 8
	}
	if s := got[len(got)-1].GetSuccess(); s.GetNodeName() != "control-plane-0" || len(s.GetKubeconfig()) == 0 {
		t.Errorf("reported %s\n%s", outline(got), m.out)
	}
	for i, r := range got {
		if r.Seq != uint64(i)+1 {
			t.Errorf("message %d has number %d", i+1, r.Seq)
		}
	}
	if !bytes.Equal(m.register(), attestation.ClusterIDPCR(clusterA)) {
		t.Errorf("register 15 is %x", m.register())
	}
	if h, _ := m.holder(); h.State != member || h.By != byInit || h.Failure != "" {
		t.Errorf("holder %+v", h)
	}
}
