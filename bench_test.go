package main

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"constellation/engine/plan"
	"constellation/internal/testneeds"
)

// These benchmarks run the programs in bin/, which `make bench` builds.

// frameEnd is the escape sequence at the end of every frame of the console.
const frameEnd = "\x1b[?2026l"

// BenchmarkFirstFrame measures the startup latency of the console: until its first frame on a
// terminal in an empty folder, and until its first frame with the contents of the folder.
// Each round also measures `constellation version` and `kubectl version --client` from exec
// to exit on the same kind of terminal. The order rotates with the rounds, and the figures
// are medians, so that the load of the machine affects all alike.
func BenchmarkFirstFrame(b *testing.B) {
	constellation, kubectl := built(b, "constellation"), built(b, "kubectl")
	var frame, contents, version, peer []time.Duration
	measures := []func(){
		func() {
			p := startOnTerminal(b, constellation)
			frame = append(frame, p.until(b, frameEnd))
			// The choices that the console shows for an empty folder.
			contents = append(contents, p.until(b, "constellation-conf.yaml", frameEnd))
			p.stop(b)
		},
		func() { version = append(version, startOnTerminal(b, constellation, "version").exit(b)) },
		func() { peer = append(peer, startOnTerminal(b, kubectl, "version", "--client").exit(b)) },
	}
	for _, measure := range measures { // so that all files are in memory
		measure()
	}
	frame, contents, version, peer = nil, nil, nil, nil
	for round := 0; b.Loop(); round++ {
		for i := range measures {
			measures[(i+round)%len(measures)]()
		}
	}
	reportMedian(b, frame, time.Millisecond, "frame-ms")
	reportMedian(b, contents, time.Millisecond, "contents-ms")
	reportMedian(b, version, time.Millisecond, "version-ms")
	reportMedian(b, peer, time.Millisecond, "kubectl-ms")
}

// BenchmarkClusters measures the console on a kubeconfig with 20 contexts, of which five never
// answer: until its first frame, and until all clusters have answered or are reported as not
// reachable. The API servers are HTTP servers of this process, so that 15 answers cost little.
// Each round also measures `kubectl version --client`. The order rotates with the rounds. The
// figures are medians, and the slowest time until all have answered.
func BenchmarkClusters(b *testing.B) {
	constellation, kubectl := built(b, "constellation"), built(b, "kubectl")
	config := contextsOf(b, 15, 5)
	var frame, all, peer []time.Duration
	measures := []func(){
		func() {
			p := startOnTerminal(b, constellation)
			frame = append(frame, p.until(b, frameEnd))
			all = append(all, p.until(b, "15 reachable, 5 not reachable"))
			p.stop(b)
		},
		func() { peer = append(peer, startOnTerminal(b, kubectl, "version", "--client").exit(b)) },
	}
	b.Setenv("KUBECONFIG", config)
	for _, measure := range measures { // so that all files are in memory
		measure()
	}
	frame, all, peer = nil, nil, nil
	for round := 0; b.Loop(); round++ {
		for i := range measures {
			measures[(i+round)%len(measures)]()
		}
	}
	reportMedian(b, frame, time.Millisecond, "frame-ms")
	reportMedian(b, peer, time.Millisecond, "kubectl-ms")
	reportMedian(b, all, time.Millisecond, "answers-ms")
	reportMedian(b, []time.Duration{slices.Max(all)}, time.Millisecond, "answers-max-ms")
}

// contextsOf returns a kubeconfig of clusters of three nodes, and of others that accept
// connections and never answer.
func contextsOf(b *testing.B, answering, silent int) (path string) {
	b.Helper()
	nodes := corev1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}}
	for i := range 3 {
		nodes.Items = append(nodes.Items, corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%d", i), Annotations: map[string]string{"kubeadm.alpha.kubernetes.io/cri-socket": "x"}},
			Status:     corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{KubeletVersion: "v1.35.4"}, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
		})
	}
	answers := map[string]any{
		"/version":      map[string]string{"gitVersion": "v1.35.4"},
		"/apis":         metav1.APIGroupList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "APIGroupList"}, Groups: []metav1.APIGroup{{Name: "apps"}}},
		"/api/v1/nodes": nodes,
	}
	k := clientcmdapi.NewConfig()
	k.AuthInfos["user"] = &clientcmdapi.AuthInfo{Token: "token"}
	add := func(name, address string, ca []byte) {
		k.Clusters[name] = &clientcmdapi.Cluster{Server: "https://" + address, CertificateAuthorityData: ca}
		k.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: "user"}
	}
	var ca []byte
	for i := range answering {
		s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			a, ok := answers[r.URL.Path]
			if !ok {
				w.WriteHeader(http.StatusNotFound)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(a) // the client reports a truncated answer
		}))
		b.Cleanup(s.Close)
		ca = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
		add(fmt.Sprintf("cluster-%02d", i), s.Listener.Addr().String(), ca)
	}
	for i := range silent {
		l, err := net.Listen("tcp", "127.0.0.1:0") // the kernel accepts connections, and nothing reads them
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { l.Close() })
		add(fmt.Sprintf("silent-%d", i), l.Addr().String(), ca)
	}
	path = filepath.Join(b.TempDir(), "config")
	if err := clientcmd.WriteToFile(*k, path); err != nil {
		b.Fatal(err)
	}
	return path
}

// BenchmarkInit creates clusters of one control plane and two workers on real machines of a
// new sandbox. The parts come from the events of the run and from the journals of the joining
// machines:
//
//   - own is the time of one machine for evidence, claim and components, by its own clock:
//     for the first node from the console's request until kubeadm starts, for a joiner from
//     the successful ticket request until kubeadm starts. Waiting for the load balancer or
//     for a turn counts for joiners, below. own-slowest is the slowest machine of each run,
//     own-median the median machine;
//   - evidence, claim and components are the times of the first node;
//   - joiners is the time from when machines may join until the last one starts kubeadm;
//   - kubeadm is the time of the first node, image pulls included; joins is kubeadm and the
//     start of the other nodes.
func BenchmarkInit(b *testing.B) {
	testneeds.Machines(b)
	bin := built(b, "constellation")
	aloneWithMachines(b)
	parts := map[string][]time.Duration{}
	for b.Loop() {
		for name, took := range initOnce(b, bin) {
			parts[name] = append(parts[name], took)
		}
	}
	for name, took := range parts {
		reportMedian(b, took, time.Second, name+"-s")
	}
	reportMedian(b, []time.Duration{slices.Max(parts["init"])}, time.Second, "init-max-s")
}

// initOnce returns the wall-clock times of up, init and down, and of the parts of init.
func initOnce(b *testing.B, bin string) map[string]time.Duration {
	b.Helper()
	const workers = 2
	dir := b.TempDir()
	run := func(args ...string) ([]byte, time.Duration) {
		cmd := exec.Command(bin, append([]string{"-C", dir}, args...)...)
		var out, errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errs
		start := time.Now()
		if err := cmd.Run(); err != nil {
			o := out.String()
			b.Errorf("constellation %s: %v\n%s\n%s", strings.Join(args, " "), err, o[max(0, len(o)-4000):], errs.String())
		}
		return out.Bytes(), time.Since(start)
	}
	took := map[string]time.Duration{}
	var stream []byte
	_, took["up"] = run("sandbox", "up", "--yes", "--control-planes", "1", "--workers", fmt.Sprint(workers))
	var own []time.Duration
	if !b.Failed() {
		stream, took["init"] = run("init", "--non-interactive", "--yes", "-o", "json")
	}
	for i := range workers {
		if b.Failed() {
			break
		}
		name := fmt.Sprint("worker-", i)
		journal, _ := run("sandbox", "shell", name, "--", "journalctl", "-u", "constellation-bootstrapper", "-o", "cat", "--no-pager")
		own = append(own, ofJoiner(b, name, journal))
	}
	_, took["down"] = run("sandbox", "down")
	if b.Failed() {
		b.FailNow()
	}

	var events []plan.Event
	for line := range bytes.Lines(stream) {
		var e plan.Event
		if err := json.Unmarshal(line, &e); err != nil {
			b.Fatalf("parse event: %v: %q", err, line)
		}
		events = append(events, e)
	}
	// when returns the time of the first matching event after another one.
	when := func(what string, after time.Time, fits func(plan.Event) bool) time.Time {
		for _, e := range events {
			if !e.Time.Before(after) && fits(e) {
				return e.Time
			}
		}
		b.Fatalf("no event reports %s", what)
		return time.Time{}
	}
	step := func(id, state string) time.Time {
		return when("step "+id+" "+state, time.Time{}, func(e plan.Event) bool {
			return e.Kind == plan.KindStep && e.Step == id && e.State == state
		})
	}
	part := func(object string) time.Time {
		return when(object+" done", time.Time{}, func(e plan.Event) bool {
			return e.Kind == plan.KindProgress && e.Object == object && e.State == plan.StateDone
		})
	}
	line := func(prefix string, after time.Time) time.Time {
		return when(prefix, after, func(e plan.Event) bool {
			return e.Kind == plan.KindLog && e.Source == "kubeadm" && strings.HasPrefix(e.Text, prefix)
		})
	}

	began := step("init-first-node", plan.StateRunning)
	attested := when("evidence", began, func(e plan.Event) bool { return e.Kind == plan.KindNode && e.Text == "attested" })
	claimed, installed, made := part("claim-node"), part("install-components"), part("kubeadm-init")
	pulling := line("[preflight] Pulling images", began)
	open, ready := step("wait-ready", plan.StateRunning), step("wait-ready", plan.StateDone)
	started := map[string]time.Time{}
	for _, e := range events {
		if e.Kind == plan.KindLog && e.Source == "bootstrapper" && e.Step == "wait-ready" && strings.HasPrefix(e.Text, "Kubernetes ") {
			started[e.Node] = e.Time
		}
	}
	if len(started) != workers {
		b.Fatalf("%d machines reported that kubeadm starts, want %d", len(started), workers)
	}
	last := open
	for _, t := range started {
		if t.After(last) {
			last = t
		}
	}
	took["evidence"] = attested.Sub(began)
	took["claim"] = claimed.Sub(attested)
	took["components"] = installed.Sub(claimed)
	took["joiners"] = last.Sub(open)
	own = append(own, installed.Sub(began))
	slices.Sort(own)
	took["own-median"], took["own-slowest"] = own[len(own)/2], own[len(own)-1]
	took["kubeadm"] = made.Sub(installed)
	took["pulls"] = line("[certs]", pulling).Sub(pulling)
	took["charts"] = step("charts", plan.StateDone).Sub(step("charts", plan.StateRunning))
	took["joins"] = ready.Sub(last)
	return took
}

// ofJoiner returns the time of a joined machine for evidence, claim and components, from the
// journal of its bootstrapper.
func ofJoiner(b *testing.B, name string, journal []byte) time.Duration {
	b.Helper()
	var sum time.Duration
	var received time.Time
	for line := range bytes.Lines(journal) {
		var l struct {
			Time             time.Time
			Msg, Step, State string
			Took             time.Duration
		}
		if json.Unmarshal(line, &l) != nil {
			continue // of systemd
		}
		switch {
		case l.Msg == "join ticket received":
			sum, received = l.Took, l.Time
		case l.Step == "install-components" && l.State == "done" && !received.IsZero():
			return sum + l.Time.Sub(received)
		}
	}
	b.Fatalf("the journal of %s lacks ticket or components:\n%s", name, journal)
	return 0
}

// built returns the path of a program that `make build` builds.
func built(b *testing.B, name string) string {
	b.Helper()
	p, err := filepath.Abs(filepath.Join("bin", name))
	if err != nil {
		b.Fatal(err)
	}
	if _, err := os.Stat(p); err != nil {
		b.Fatalf("bin/%s is missing: run `make build` first", name)
	}
	return p
}

// aloneWithMachines waits until no test runs machines on this computer, as exclusive does for
// tests.
func aloneWithMachines(b *testing.B) {
	b.Helper()
	f, err := os.OpenFile(filepath.Join(os.TempDir(), "constellation-machines.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		b.Fatal(err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		b.Fatalf("lock %s: %v", f.Name(), err)
	}
	b.Cleanup(func() { f.Close() })
}

// program is a process on its own pseudo terminal.
type program struct {
	cmd   *exec.Cmd
	tty   *os.File
	start time.Time
	seen  []byte // what it wrote
}

func startOnTerminal(b testing.TB, path string, args ...string) *program {
	b.Helper()
	tty, own, err := pty.Open()
	if err != nil {
		b.Skipf("needs pseudo terminals: %v", err)
	}
	defer own.Close()
	if err := pty.Setsize(tty, &pty.Winsize{Cols: 80, Rows: 24}); err != nil {
		b.Fatal(err)
	}
	home := b.TempDir()
	p := &program{cmd: exec.Command(path, args...), tty: tty}
	p.cmd.Dir = home
	// A minimal environment: with CI set, for example, the console would not open.
	p.cmd.Env = []string{"TERM=xterm-256color", "LANG=C.UTF-8", "HOME=" + home, "PATH=" + os.Getenv("PATH"), "KUBECONFIG=" + os.Getenv("KUBECONFIG")}
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = own, own, own
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	p.start = time.Now()
	if err := p.cmd.Start(); err != nil {
		b.Fatal(err)
	}
	return p
}

// until waits for texts, one after the other, in the output of the program, and returns the
// times from its start.
func (p *program) until(b testing.TB, texts ...string) time.Duration {
	b.Helper()
	buf := make([]byte, 1<<16)
	guard := time.AfterFunc(time.Minute, func() { _ = p.cmd.Process.Kill() }) // ends the reads
	defer guard.Stop()
	for !inOrder(p.seen, texts) {
		n, err := p.tty.Read(buf)
		p.seen = append(p.seen, buf[:n]...)
		if err != nil {
			b.Fatalf("%q was not written: %v; output: %q", texts, err, p.seen)
		}
	}
	return time.Since(p.start)
}

func inOrder(s []byte, texts []string) bool {
	for _, text := range texts {
		i := bytes.Index(s, []byte(text))
		if i < 0 {
			return false
		}
		s = s[i+len(text):]
	}
	return true
}

// press writes keys to the terminal of the program.
func (p *program) press(b testing.TB, keys string) {
	b.Helper()
	if _, err := p.tty.WriteString(keys); err != nil {
		b.Fatal(err)
	}
}

// stop kills the program.
func (p *program) stop(b testing.TB) {
	b.Helper()
	if err := p.cmd.Process.Kill(); err != nil {
		b.Fatal(err)
	}
	_ = p.cmd.Wait() // it was killed
	p.tty.Close()
}

// exit waits for the program to exit with 0, and returns how long it ran.
func (p *program) exit(b testing.TB) time.Duration {
	b.Helper()
	err := p.cmd.Wait()
	took := time.Since(p.start)
	p.tty.Close()
	if err != nil {
		b.Fatalf("run %s: %v", p.cmd, err)
	}
	return took
}

func reportMedian(b *testing.B, took []time.Duration, unit time.Duration, name string) {
	b.Helper()
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2])/float64(unit), name)
}
