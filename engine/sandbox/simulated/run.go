package simulated

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"constellation/engine/attestation/certifier"
	"constellation/engine/attestation/certifier/signer"
	"constellation/engine/kms"
	"constellation/engine/kubeadm"
	"constellation/engine/sandbox/machine"
	"constellation/internal/delay"
)

// stopGrace is how long the programs of a machine may take to end at its shutdown.
const stopGrace = 8 * time.Second

// computer is the simulated machine, inside its own process.
type computer struct {
	record
	dir string // of the machine
	log *slog.Logger

	// pods survive a restart of the kubelet.
	pods *pods
	tpm  *tpmState

	mu      sync.Mutex
	kubelet *kubeletRun
	units   map[string]*process // the latest of each, by name
	life    context.Context     //nolint:containedctx // of the machine: from power on to shutdown
}

func (c *computer) path(elem ...string) string {
	return filepath.Join(append([]string{c.dir}, elem...)...)
}

// root returns the path of a file of the machine.
func (c *computer) root(elem ...string) string {
	return c.path(append([]string{rootDir}, elem...)...)
}

// Run is the process of the machine in dir: it runs the TPM from the start and its programs
// after a byte from gate. It ends when gate closes before that, and when ctx ends, then
// gracefully. The output of the programs goes to standard error.
func Run(ctx context.Context, dir string, gate io.Reader, log *slog.Logger) error {
	r, err := readRecord(dir)
	if err != nil {
		return fmt.Errorf("run simulated machine %s: %w", dir, err)
	}
	fail := func(err error) error { return fmt.Errorf("run simulated machine %s: %w", r.Name, err) }
	lock, held, err := tryLock(filepath.Join(dir, lockName))
	if err != nil || held {
		return fail(errors.Join(err, errors.New("it runs already")))
	}
	defer lock.Close()
	if err := replaceFile(filepath.Join(dir, pidName), fmt.Appendf(nil, "%d\n", os.Getpid()), 0o600); err != nil {
		return fail(err)
	}
	t, err := openTPM(filepath.Join(dir, "tpm.json"))
	if err != nil {
		return fail(err)
	}
	socket := filepath.Join(dir, tpmDir, tpmSocket)
	var lc net.ListenConfig
	tpmListener, err := lc.Listen(ctx, "unix", socket)
	if err != nil {
		return fail(err)
	}
	defer tpmListener.Close()
	go func() { _ = t.serve(tpmListener) }()
	if _, err := io.ReadFull(gate, make([]byte, 1)); err != nil {
		return fail(errors.New("nobody switched it on"))
	}

	c := &computer{record: r, dir: dir, log: log, life: ctx, tpm: t.tpmState}
	c.pods = newPods(c)
	control, err := lc.Listen(ctx, "unix", filepath.Join(dir, controlName))
	if err != nil {
		return fail(err)
	}
	s := &http.Server{Handler: c.control(), ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = s.Serve(control) }()
	defer s.Close()
	if err := writeBelow(c.root(), bootIDFile, []byte(c.bootID()+"\n"), 0o444); err != nil { // for the agent
		return fail(err)
	}
	log.Info("simulated machine started", "node", r.Name, "address", r.IP.String(), "image", r.Image.Version, "boot", r.Boots)

	var wg sync.WaitGroup
	wg.Go(func() { c.unit(ctx, "bootstrapper", 3, c.bootstrapper) })
	wg.Go(func() { c.unit(ctx, "agent", -1, c.agent) })
	wg.Go(func() {
		c.runWithKeys(ctx, signer.SealedFile, "certifier", []string{"-certifier-socket", c.local(certifier.Socket)})
	})
	wg.Go(func() { c.runWithKeys(ctx, kms.SealedFile, "kms", []string{"-kms-socket", c.local(kubeadm.KMSSocket)}) })
	<-ctx.Done()
	c.stopKubelet()
	wg.Wait()
	c.pods.stopAll()
	log.Info("simulated machine ended", "node", r.Name)
	return nil
}

// metadata is the URL of the cloud's metadata server.
func (r record) metadata() string { return fmt.Sprintf("http://%s:%d", r.IP, MetadataPort) }

func (c *computer) bootstrapper() *exec.Cmd {
	cmd := exec.Command(filepath.Join(c.Image.Dir, "bootstrapper"), "-root", c.root(), "-listen", net.JoinHostPort(c.IP.String(), "9000")) //nolint:noctx // see spawn
	cmd.Env = append(append(os.Environ(), c.cloudEnvironment()...), "CONSTELLATION_TPM=unix:"+c.path(tpmDir, tpmSocket), "CONSTELLATION_KEYS_SOCKET="+c.local(kms.KeysSocket))
	return cmd
}

// runWithKeys runs a verb of the bootstrapper's program from the time on at which the bootstrapper has stored its keys, as the systemd
// units of the verb do.
func (c *computer) runWithKeys(ctx context.Context, sealed, verb string, flags []string) {
	for {
		if _, err := os.Stat(c.root("var/lib/constellation", sealed)); err == nil {
			break
		}
		if !delay.For(ctx, time.Second) {
			return
		}
	}
	c.unit(ctx, verb, -1, func() *exec.Cmd {
		cmd := exec.Command(filepath.Join(c.Image.Dir, "bootstrapper"), slices.Concat([]string{"-root", c.root()}, flags, []string{verb})...) //nolint:noctx // see spawn
		cmd.Env = append(append(os.Environ(), c.cloudEnvironment()...), "CONSTELLATION_TPM=unix:"+c.path(tpmDir, tpmSocket), "CONSTELLATION_KEYS_SOCKET="+c.local(kms.KeysSocket))
		return cmd
	})
}

// cloudEnvironment returns the cloud of the machine, as the bootstrapper's unit has it. Machines of older programs have no
// file.
func (c *computer) cloudEnvironment() (env []string) {
	b, err := os.ReadFile(c.root(machine.EnvironmentFile))
	if err != nil {
		return []string{"CONSTELLATION_PROVIDER=sandbox", "CONSTELLATION_METADATA=" + c.metadata()}
	}
	for line := range strings.Lines(string(b)) {
		env = append(env, c.translate(strings.TrimSpace(line), nil))
	}
	return env
}

func (c *computer) agent() *exec.Cmd {
	program := filepath.Join(c.root(), "usr/lib/constellation/agent") // the version that was installed on the machine
	if _, err := os.Stat(program); err != nil {
		program = filepath.Join(c.Image.Dir, "agent")
	}
	cmd := exec.Command(program, "-root", c.root(), "-socket", c.path(agentDir, "agent.sock"), "-name", c.Name, "-address", c.IP.String()) //nolint:noctx // see spawn
	cmd.Env = append(os.Environ(), c.cloudEnvironment()...)
	return cmd
}

// unit restarts a program as its systemd unit would: after a failure, unless
// its exit code is stuck, and in any case if stuck is negative.
func (c *computer) unit(ctx context.Context, name string, stuck int, command func() *exec.Cmd) {
	for {
		cmd := command()
		cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
		p, err := spawn(cmd)
		if err == nil {
			c.ranUnit(name, p)
		}
		code := -1
		if err == nil {
			select {
			case <-p.done:
			case <-ctx.Done():
				p.stop(stopGrace)
				return
			}
			code = cmd.ProcessState.ExitCode()
		}
		c.log.Info("program ended", "program", name, "code", code, "err", err)
		if stuck >= 0 && (code == 0 || code == stuck) {
			return
		}
		if !delay.For(ctx, time.Second) {
			return
		}
	}
}

func (c *computer) ranUnit(name string, p *process) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.units == nil {
		c.units = map[string]*process{}
	}
	c.units[name] = p
}

// killUnit kills the process of a unit, which starts again, and reports whether it ran.
func (c *computer) killUnit(name string) bool {
	c.mu.Lock()
	p := c.units[name]
	c.mu.Unlock()
	if p == nil {
		return false
	}
	select {
	case <-p.done:
		return false
	default:
		return p.cmd.Process.Kill() == nil
	}
}

// process is a child that ends with the machine.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
}

// spawn starts cmd, which runs until it ends or is stopped.
func spawn(cmd *exec.Cmd) (*process, error) {
	p := &process{cmd: cmd, done: make(chan struct{})}
	cmd.SysProcAttr = child()
	started := make(chan error)
	go func() {
		// The kernel kills the child when the thread that forked it ends, so that thread is
		// kept until the child has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		_ = cmd.Wait() // its state has the result
		close(p.done)
	}()
	return p, <-started
}

// stop terminates a process, kills it after grace, and returns when it is gone.
func (p *process) stop(grace time.Duration) {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may be gone already
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case <-p.done:
		return
	case <-t.C:
	}
	_ = p.cmd.Process.Kill()
	<-p.done
}

// control serves the requests of the stand-ins for systemd and kubeadm, and of the host.
func (c *computer) control() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /kubelet/{verb}", func(w http.ResponseWriter, r *http.Request) {
		switch r.PathValue("verb") {
		case "start":
			c.startKubelet()
		case "restart":
			c.stopKubelet()
			c.startKubelet()
		case "stop":
			c.stopKubelet()
		case "reset": // kubeadm reset also ends what ran
			c.stopKubelet()
			c.pods.stopAll()
		default:
			http.Error(w, "no such verb", http.StatusNotFound)
		}
	})
	mux.HandleFunc("POST /tpm/{fault}", func(w http.ResponseWriter, r *http.Request) {
		if !c.tpm.set(tpmFault(r.PathValue("fault"))) {
			http.Error(w, "no such fault", http.StatusNotFound)
		}
	})
	mux.HandleFunc("POST /kill/{container}", func(w http.ResponseWriter, r *http.Request) {
		if !c.pods.kill(r.PathValue("container")) {
			http.Error(w, "none runs", http.StatusNotFound)
		}
	})
	mux.HandleFunc("POST /kill-unit/{unit}", func(w http.ResponseWriter, r *http.Request) {
		if !c.killUnit(r.PathValue("unit")) {
			http.Error(w, "it does not run", http.StatusNotFound)
		}
	})
	return mux
}

// kubeletRun is a running kubelet stand-in.
type kubeletRun struct {
	cancel context.CancelFunc
	done   chan struct{}
}

func (c *computer) startKubelet() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.kubelet != nil || c.life.Err() != nil {
		return
	}
	ctx, cancel := context.WithCancel(c.life)
	run := &kubeletRun{cancel, make(chan struct{})}
	c.kubelet = run
	go func() {
		defer close(run.done)
		c.runKubelet(ctx)
	}()
}

func (c *computer) stopKubelet() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.kubelet == nil {
		return
	}
	c.kubelet.cancel()
	<-c.kubelet.done
	c.kubelet = nil
}

// ask sends a request to the machine in dir: "kubelet/restart".
func ask(ctx context.Context, dir, what string) error {
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(dir, controlName))
	}}}
	defer client.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://machine/"+what, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("the machine answers %s", resp.Status)
	}
	return nil
}

// Systemctl is the stand-in for systemctl: it starts, restarts and stops the
// kubelet of the calling machine.
func Systemctl(ctx context.Context, args []string) error {
	words := slices.DeleteFunc(slices.Clone(args), func(s string) bool { return strings.HasPrefix(s, "-") })
	if len(words) != 2 || strings.TrimSuffix(words[1], ".service") != "kubelet" || !slices.Contains([]string{"start", "restart", "stop"}, words[0]) {
		return fmt.Errorf("systemd stand-in (simulated): it knows start, restart and stop of kubelet.service, not %q", strings.Join(args, " "))
	}
	dir, err := here()
	if err != nil {
		return err
	}
	if err := ask(ctx, dir, "kubelet/"+words[0]); err != nil {
		return fmt.Errorf("systemd stand-in (simulated): %s the kubelet: %w", words[0], err)
	}
	return nil
}

// here returns the directory of this process's machine.
func here() (string, error) {
	dir := os.Getenv(machineEnv)
	if dir == "" {
		return "", errors.New("this works on a simulated machine only: `constellation sandbox shell MACHINE` leads to one")
	}
	return dir, nil
}
