package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrl "sigs.k8s.io/controller-runtime/pkg/log"

	"constellation/assets"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/hollow"
	"constellation/internal/testneeds"
	"constellation/operator/api/v1alpha1"
)

// These tests watch rollouts with the built program. The machines are hollow; etcd, the API
// server, its controllers and the operator's binary are real. `make test` builds the required
// programs.

const controlPlanes = 3

// hollowRollout is a cluster of hollow machines whose workers wait to be replaced.
type hollowRollout struct {
	t          *testing.T
	cp         *controlplane.ControlPlane
	api        client.Client
	owner      *sandboxapi.Client
	bin        string
	kubeconfig string
	workers    int
}

func newHollowRollout(t *testing.T, workers, surge, pods int, times hollow.Times) *hollowRollout {
	t.Helper()
	testneeds.Time(t, "a minute")
	testneeds.Hollow(t)
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	operator := filepath.Join(wd, "bin", "releases", "v1.1.0", "operator")
	if _, err := os.Stat(operator); err != nil {
		t.Fatal("bin/releases is missing: run `make build` first, or `make test`, which does")
	}
	ctrl.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard()) // klog reports watches that end with a test
	ctx := t.Context()
	r := &hollowRollout{t: t, bin: filepath.Join(wd, "bin", "constellation"), workers: workers, kubeconfig: filepath.Join(t.TempDir(), "kubeconfig")}
	r.cp = controlplane.ForTest(t, controlplane.Options{
		Controllers:           true,
		ControllerManagerArgs: []string{"--kube-api-qps=1000", "--kube-api-burst=2000", "--node-monitor-grace-period=10m", "--controllers=*,-ttl-controller"},
		SchedulerArgs:         []string{"--kube-api-qps=1000", "--kube-api-burst=2000"},
	})
	crds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range crds {
		if err := r.cp.Apply(ctx, f.Data); err != nil {
			t.Fatal(err)
		}
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	if r.api, err = client.New(r.cp.Config(), client.Options{Scheme: scheme}); err != nil {
		t.Fatal(err)
	}
	k, err := r.cp.Kubeconfig()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(r.kubeconfig, k, 0o600); err != nil {
		t.Fatal(err)
	}
	ref := "k8s-components-sha256-" + strings.Repeat("a", 64)
	most := intstr.FromInt(surge)
	nv := &v1alpha1.NodeVersion{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName},
		Spec: v1alpha1.NodeVersionSpec{
			Image: sandboxapi.ImageReference("hollow", "v1.1.0"), ImageVersion: "v1.1.0", KubernetesComponentsReference: ref, KubernetesClusterVersion: current,
			Rollout: v1alpha1.Rollout{MaxSurge: &most, Paused: true},
		},
	}
	r.create(
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: ref}, Data: map[string]string{"cluster-version": current, "components": "[]"}},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "constellation-system"}}, nv,
	)
	nv.Status.JoinComponents = v1alpha1.JoinComponents{ControlPlane: ref, Worker: ref}
	if err := r.api.Status().Update(ctx, nv); err != nil {
		t.Fatal(err)
	}
	machines, wait, err := hollow.Start(ctx, hollow.Options{Cluster: r.cp.Config(), Images: []string{"v1.0.0", "v1.1.0"}, Times: times})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(wait) // the context has ended by then
	r.owner = sandboxapi.NewClient(machines.Host, "")
	err = errors.Join(
		r.owner.SetGroupImage(ctx, sandboxapi.GroupID("hollow", sandboxapi.ControlPlaneGroup), sandboxapi.ImageReference("hollow", "v1.1.0")), // these are at the target
		machines.Seed(ctx, sandboxapi.ControlPlaneGroup, controlPlanes, ref), machines.Seed(ctx, sandboxapi.WorkerGroup, workers, ref),
	)
	if err != nil {
		t.Fatal(err)
	}
	labels := map[string]string{"app": "web"}
	r.create(&appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(pods)), Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{
				Containers: []corev1.Container{{Name: "web", Image: "none", Resources: corev1.ResourceRequirements{
					Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("3")}, // one for each machine
				}}},
			}},
		},
	})
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	metrics := l.Addr().String()
	l.Close()
	out, err := os.Create(filepath.Join(t.TempDir(), "operator.log"))
	if err != nil {
		t.Fatal(err)
	}
	var runs sync.WaitGroup
	t.Cleanup(func() { // the context has ended by then, and with it the operator
		runs.Wait()
		out.Close()
		if b, err := os.ReadFile(out.Name()); t.Failed() && err == nil {
			t.Logf("the operator's log ends with\n%s", tail(string(b)))
		}
	})
	runs.Go(func() {
		for ctx.Err() == nil { // as a kubelet does; it ends when the API server is unavailable for long
			op := exec.CommandContext(ctx, operator, "--kubeconfig", r.kubeconfig, "--provider", providers.Local, "--metadata", machines.Metadata, "--cloud", machines.Control, "--metrics", metrics, "--health", "")
			op.Stdout, op.Stderr = out, out
			_ = op.Run()
			pause(ctx, time.Second)
		}
	})
	r.until("pods run and the operator has observed all nodes", func() (string, bool) {
		var d appsv1.Deployment
		var nv v1alpha1.NodeVersion
		err := errors.Join(r.api.Get(ctx, client.ObjectKey{Namespace: "default", Name: "web"}, &d), r.api.Get(ctx, client.ObjectKey{Name: v1alpha1.NodeVersionName}, &nv))
		return fmt.Sprintf("%+v, %+v, %v", d.Status, nv.Status.Nodes, err), err == nil && d.Status.ReadyReplicas == int32(pods) && nv.Status.Nodes.Outdated == int32(workers)
	})
	return r
}

func (r *hollowRollout) create(all ...client.Object) {
	r.t.Helper()
	for _, o := range all {
		if err := r.api.Create(r.t.Context(), o); err != nil {
			r.t.Fatalf("create %T %s: %v", o, o.GetName(), err)
		}
	}
}

// pause pauses or resumes the rollout.
func (r *hollowRollout) pause(paused bool) {
	r.t.Helper()
	patch := fmt.Appendf(nil, `{"spec":{"rollout":{"paused":%t}}}`, paused)
	if err := r.api.Patch(r.t.Context(), &v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName}}, client.RawPatch("application/merge-patch+json", patch)); err != nil {
		r.t.Fatal(err)
	}
}

// until waits for a condition, and fails with the current state after a timeout.
func (r *hollowRollout) until(what string, holds func() (string, bool)) {
	r.t.Helper()
	for end := time.Now().Add(5 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		is, ok := holds()
		if ok {
			return
		}
		if time.Now().After(end) {
			r.t.Fatalf("timeout after 5 minutes waiting until %s; state: %s", what, is)
		}
	}
}

// replaced returns the number of workers at the target.
func (r *hollowRollout) replaced() int {
	r.t.Helper()
	var nv v1alpha1.NodeVersion
	if err := r.api.Get(r.t.Context(), client.ObjectKey{Name: v1alpha1.NodeVersionName}, &nv); err != nil {
		return -1 // it is unavailable
	}
	return int(nv.Status.Nodes.UpToDate) - controlPlanes
}

// face is a running `watch` without the console.
type face struct {
	cmd  *exec.Cmd
	done chan struct{} // closed at its end

	mu  sync.Mutex
	out bytes.Buffer
}

// Write collects the output of the program.
func (f *face) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.out.Write(p)
}

func (f *face) text() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.out.String()
}

func (r *hollowRollout) watch(args ...string) *face {
	r.t.Helper()
	f := &face{done: make(chan struct{})}
	f.cmd = exec.Command(r.bin, append([]string{"watch", "--kubeconfig", r.kubeconfig, "--non-interactive"}, args...)...)
	f.cmd.Dir, f.cmd.Env = r.t.TempDir(), append(os.Environ(), "NO_COLOR=1")
	f.cmd.Stdout, f.cmd.Stderr = f, r.t.Output()
	if err := f.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	go func() { _ = f.cmd.Wait(); close(f.done) }()
	r.t.Cleanup(func() {
		_ = f.cmd.Process.Kill()
		<-f.done
	})
	return f
}

// ends waits for the program to exit with 0 and returns its output.
func (r *hollowRollout) ends(f *face) string {
	r.t.Helper()
	select {
	case <-f.done:
	case <-time.After(5 * time.Minute):
		r.t.Fatalf("watch did not end; output\n%s", tail(f.text()))
	}
	if code := f.cmd.ProcessState.ExitCode(); code != plan.ExitDone {
		r.t.Fatalf("exit code %d; output\n%s", code, tail(f.text()))
	}
	return f.text()
}

// screen is the console in a tmux terminal with a separate tmux server.
type screen struct {
	t      *testing.T
	socket string
	env    []string
}

func newScreen(t *testing.T, dir string, argv ...string) *screen {
	t.Helper()
	testneeds.Program(t, "tmux", "tmux")
	s := &screen{t: t, socket: filepath.Join(t.TempDir(), "tmux")}
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); name != "CI" && name != "TMUX" && name != "NO_COLOR" {
			s.env = append(s.env, v)
		}
	}
	s.env = append(s.env, "LC_ALL=C.UTF-8", "TERM=xterm-256color", "SHELL=/bin/sh") // whatever the user has configured
	s.tmux("-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "40", "-c", dir, "-s", "watch", "env -u TMUX PS1='$ ' sh")
	t.Cleanup(func() {
		kill := exec.Command("tmux", "-S", s.socket, "kill-server")
		_ = kill.Run()
	})
	var quoted []string
	for _, a := range argv {
		quoted = append(quoted, "'"+a+"'")
	}
	s.keys("-l", strings.Join(quoted, " "))
	s.keys("Enter")
	return s
}

func (s *screen) tmux(args ...string) string {
	s.t.Helper()
	cmd := exec.Command("tmux", append([]string{"-S", s.socket}, args...)...)
	cmd.Env = s.env
	out, err := cmd.CombinedOutput()
	if err != nil {
		s.t.Fatalf("tmux %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func (s *screen) keys(keys ...string) {
	s.t.Helper()
	s.tmux(append([]string{"send-keys", "-t", "watch"}, keys...)...)
}

func (s *screen) text() string { return s.tmux("capture-pane", "-p", "-t", "watch") }

// shows waits until the screen matches a pattern, and returns the screen.
func (s *screen) shows(pattern string) string {
	s.t.Helper()
	re := regexp.MustCompile(pattern)
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if text := s.text(); re.MatchString(text) {
			return text
		} else if time.Now().After(end) {
			s.t.Fatalf("no match for %s on the screen:\n%s", pattern, text)
		}
	}
}

// TestWatchesOfARolloutAgree watches one rollout in three ways: as JSON from the beginning, as
// lines from the middle, and in a console that starts late and is resized, closed and opened
// again. Meanwhile the API server is down for a while: no output is then marked as live, and
// all watches reconnect. At the end all have the same counts.
func TestWatchesOfARolloutAgree(t *testing.T) {
	t.Parallel()
	const workers = 12
	r := newHollowRollout(t, workers, 2, 6, hollow.Times{Boot: time.Second, Join: 500 * time.Millisecond, Settle: 500 * time.Millisecond, Drain: 2 * time.Second, Off: 500 * time.Millisecond, Heartbeat: 10 * time.Second})
	asJSON := r.watch("-o", "json")
	r.until("the stream has begun", func() (string, bool) { return asJSON.text(), strings.Contains(asJSON.text(), `"state":"Paused"`) })
	r.pause(false)
	r.until("the first nodes are replaced", func() (string, bool) { n := r.replaced(); return fmt.Sprint(n), n >= 2 })
	plain := r.watch()
	console := newScreen(t, t.TempDir(), r.bin, "watch", "--kubeconfig", r.kubeconfig)
	console.shows(`READ-ONLY LIVE(.|\n)*Pipeline(.|\n)*In progress \d+ of 15`)

	r.cp.StopAPIServer()
	console.shows(`READ-ONLY STALE \d+s(.|\n)*Why waiting .*the API server at .* has not\s+answered since`)
	r.until("the other watches report it", func() (string, bool) {
		return asJSON.text() + plain.text(), strings.Contains(asJSON.text(), `"object":"api-server"`) && strings.Contains(plain.text(), "has not answered since")
	})
	if text := console.text(); strings.Contains(text, "LIVE") {
		t.Errorf("marked as live while the API server is down:\n%s", text)
	}
	if err := r.cp.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	console.shows(`READ-ONLY LIVE`)

	// Close and open the console, and resize it to small and large sizes.
	console.keys("q")
	left := console.shows(`of 15 nodes at the target(.|\n)*back +\S*constellation watch --kubeconfig`)
	if strings.Contains(left, "Pipeline") {
		t.Errorf("the terminal was not restored:\n%s", left)
	}
	console.keys("Up", "Enter")
	if text := console.text(); !strings.Contains(text, "READ-ONLY") { // a plain sh has no history
		console.keys("C-u")
		console.keys("-l", "'"+r.bin+"' watch --kubeconfig '"+r.kubeconfig+"'")
		console.keys("Enter")
	}
	console.shows(`READ-ONLY LIVE(.|\n)*In progress \d+ of 15`)
	for i := range 40 {
		console.tmux("resize-window", "-t", "watch", "-x", fmt.Sprint(20+(i*53)%200), "-y", fmt.Sprint(5+(i*31)%70))
	}
	console.tmux("resize-window", "-t", "watch", "-x", "120", "-y", "40")
	console.shows(`^ \S \S+ .*READ-ONLY LIVE(.|\n)*Pipeline(.|\n)*safety  extra machines`)

	events := parseEvents(t, r.ends(asJSON))
	lines := r.ends(plain)
	want := fmt.Sprintf("%d of %d at the target, map[ready:%[2]d]", workers+controlPlanes, workers+controlPlanes)
	if got := totals(events); !strings.HasPrefix(got, want) {
		t.Errorf("the stream ends with %s, want %s", got, want)
	}
	if want := fmt.Sprintf("%d of %d nodes at the target", workers+controlPlanes, workers+controlPlanes); !strings.Contains(lastLine(lines), want) {
		t.Errorf("the lines end with %q, want %s", lastLine(lines), want)
	}
	console.shows(fmt.Sprintf(`%d of %d nodes at the target(.|\n)*Nothing to wait for: all %[2]d nodes`, workers+controlPlanes, workers+controlPlanes))
	for i, e := range events {
		if e.Seq != uint64(i+1) {
			t.Fatalf("event %d has sequence number %d", i+1, e.Seq)
		}
	}
	console.keys("q")
	console.shows(fmt.Sprintf(`%d of %d nodes at the target, \d\d:`, workers+controlPlanes, workers+controlPlanes))
	if text := strings.TrimSpace(console.tmux("display-message", "-p", "-t", "watch", "#{cursor_flag} #{alternate_on} #{bracket_paste_flag}")); !strings.HasPrefix(text, "1 0") {
		t.Errorf("cursor and alternate screen are %q, want 1 0", text)
	}
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}

var recordInto = flag.String("record", "", "directory that TestRecordRollouts writes streams of rollouts to")

// TestRecordRollouts records the events of watched rollouts for the tests of package tui: of
// 5, 500 and 5,000 workers each a successful one, a blocked one, and one that is paused and
// resumed. Of the last one with 5,000 workers it records a minute.
//
//	go test -timeout 60m -run TestRecordRollouts . -args -record tui/internal/enginefake/testdata/streams
func TestRecordRollouts(t *testing.T) {
	if *recordInto == "" {
		t.Skip("records streams for tests of package tui, with -args -record DIR")
	}
	for _, size := range []struct {
		workers, surge, pods int
		cut                  time.Duration // of a rollout that is resumed; zero: to the end
	}{{workers: 5, surge: 1, pods: 4, cut: 0}, {workers: 500, surge: 40, pods: 60, cut: 0}, {workers: 5000, surge: 500, pods: 60, cut: time.Minute}} {
		for _, how := range []string{"good", "failed", "resumed"} {
			t.Run(fmt.Sprintf("%d-%s", size.workers, how), func(t *testing.T) {
				r := newHollowRollout(t, size.workers, size.surge, size.pods, hollow.Times{
					Boot: 2 * time.Second, Join: 500 * time.Millisecond, Settle: 500 * time.Millisecond, Drain: 2 * time.Second, Off: 500 * time.Millisecond, Heartbeat: 10 * time.Minute,
				})
				r.record(how, size.cut)
			})
		}
	}
}

func (r *hollowRollout) record(how string, cut time.Duration) {
	t := r.t
	t.Helper()
	told := func(f *face, text string) {
		t.Helper()
		r.until(text+" is reported", func() (string, bool) { return tail(f.text()), strings.Contains(f.text(), text) })
	}
	var f *face
	leave := func() { // as a user does
		if err := f.cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		<-f.done
	}
	switch how {
	case "good":
		f = r.watch("-o", "json")
		told(f, `"state":"Paused"`)
		r.pause(false)
	case "failed": // a budget blocks all evictions, and a machine never joins
		all := intstr.FromString("100%")
		r.create(&policyv1.PodDisruptionBudget{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
			Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: &all, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}},
		})
		if err := r.owner.SetFaults(t.Context(), []string{fmt.Sprintf("never-boot=worker-%d", r.workers+2)}); err != nil {
			t.Fatal(err)
		}
		f = r.watch("-o", "json")
		told(f, `"state":"Paused"`)
		r.pause(false)
		told(f, `"state":"DrainBlocked"`)
		time.Sleep(5 * time.Second) // all other objects
		leave()
	case "resumed":
		r.pause(false)
		r.until("some nodes are replaced", func() (string, bool) { n := r.replaced(); return fmt.Sprint(n), n >= min(r.workers/3, 60) })
		f = r.watch("-o", "json")
		told(f, `"kind":"progress"`)
		r.pause(true)
		told(f, `"state":"Paused"`)
		time.Sleep(5 * time.Second) // machines that are joining join
		r.pause(false)
	}
	if cut > 0 && how == "resumed" {
		time.Sleep(cut)
		leave()
	}
	select {
	case <-f.done:
	case <-time.After(20 * time.Minute):
		t.Fatalf("the rollout did not end: %s", tail(f.text()))
	}
	var lines bytes.Buffer
	z, err := gzip.NewWriterLevel(&lines, gzip.BestCompression)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for in := bufio.NewScanner(strings.NewReader(f.text())); in.Scan(); n++ {
		if !json.Valid(in.Bytes()) {
			t.Fatalf("invalid event %q", in.Text())
		}
		fmt.Fprintln(z, in.Text())
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(*recordInto, fmt.Sprintf("rollout-%d-%s.jsonl.gz", r.workers, how))
	if err := os.WriteFile(path, lines.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: %d events, %d bytes", path, n, lines.Len())
}
