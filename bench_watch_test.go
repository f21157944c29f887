package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/assets"
	"constellation/engine/sandbox/controlplane"
	"constellation/operator/api/v1alpha1"
)

// BenchmarkWatchCluster runs the built program on a 120x40 terminal to watch a cluster of
// 5,000 nodes with a real API server. The nodes are objects without machines, so that only
// the benchmark changes them. It reports
//
//   - idle-wakes/s and idle-B/s: wakeups of the program's threads and bytes written, in 20 s
//     without a change;
//   - CPU share and bytes to the terminal for ten updates a second over 20 s, of one node each
//     and then of 20 nodes each;
//   - the latency from a key press to the resulting bytes, meanwhile;
//   - peak memory after that, as the kernel counts it, and without pages of the program file;
//   - the latency from the request that changes a node to the bytes that show it, while ten
//     other nodes change each second.
func BenchmarkWatchCluster(b *testing.B) {
	bin := built(b, "constellation")
	const nodes = 5000
	for b.Loop() {
		c := nodesOnly(b, nodes)
		w := watchOnTerminal(b, bin, c.kubeconfig)
		w.await("Pipeline", time.Minute)
		w.rest()

		was, asleep := w.written(), w.sleeps()
		time.Sleep(20 * time.Second)
		b.ReportMetric(float64(w.sleeps()-asleep)/20, "idle-wakes/s")
		b.ReportMetric(float64(w.written()-was)/20, "idle-B/s")

		for _, each := range []int{1, 20} {
			stop := c.change(each)
			of := fmt.Sprintf("-of-%d", each)
			was, used := w.written(), w.processor()
			time.Sleep(20 * time.Second)
			b.ReportMetric((w.processor()-used).Seconds()/20*100, "%cpu"+of)
			b.ReportMetric(float64(w.written()-was)/20/1000, "kB/s"+of)
			w.types("/")
			w.await("Enter keeps it", time.Minute)
			var keys []time.Duration
			for i := range 200 {
				if i%20 == 0 {
					w.types("\x15") // clears the filter
				}
				sign := string(rune('А' + i%32)) // other than the one that was at its place
				w.forget()
				begun := time.Now()
				w.types(sign)
				keys = append(keys, w.await(sign, time.Minute).Sub(begun))
				time.Sleep(time.Duration(37*i%100) * time.Millisecond) // at any moment between two updates
			}
			w.types("\x1b") // no filter any more
			stop()
			reportQuantiles(b, keys, "key"+of)
		}
		b.ReportMetric(w.memory("VmHWM"), "MB")
		b.ReportMetric(w.memory("RssAnon"), "MB-own")
		w.stop()

		w = watchOnTerminal(b, bin, c.kubeconfig, "--filter", "node:worker-0000")
		w.await("Pipeline", time.Minute)
		w.rest()
		stop := c.change(1)
		var pixels []time.Duration
		for i := range 200 {
			sign := string(rune('А' + i%32))
			w.forget()
			begun := time.Now()
			c.set(0, sign+" in the kubelet's message")
			pixels = append(pixels, w.await(sign, time.Minute).Sub(begun))
			time.Sleep(time.Duration(37*i%100) * time.Millisecond) // at any moment between two updates
		}
		stop()
		w.stop()
		reportQuantiles(b, pixels, "pixel")
	}
}

func reportQuantiles(b *testing.B, took []time.Duration, name string) {
	slices.Sort(took)
	for _, q := range []int{50, 99} {
		b.ReportMetric(float64(took[len(took)*q/100].Microseconds())/1000, fmt.Sprintf("ms-p%d-%s", q, name))
	}
}

// objects are nodes without machines: one half is at the target, and a few of the others
// are being replaced.
type objects struct {
	b          *testing.B
	kubeconfig string
	api        client.Client
	count      int
}

func nodesOnly(b *testing.B, count int) *objects {
	b.Helper()
	cp := controlplane.ForTest(b, controlplane.Options{})
	crds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		b.Fatal(err)
	}
	for _, f := range crds {
		if err := cp.Apply(b.Context(), f.Data); err != nil {
			b.Fatal(err)
		}
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		b.Fatal(err)
	}
	o := &objects{b: b, kubeconfig: filepath.Join(b.TempDir(), "kubeconfig"), count: count}
	if o.api, err = client.New(cp.Config(), client.Options{Scheme: scheme}); err != nil {
		b.Fatal(err)
	}
	k, err := cp.Kubeconfig()
	if err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(o.kubeconfig, k, 0o600); err != nil {
		b.Fatal(err)
	}
	surge := intstr.FromInt(75)
	ref := "k8s-components-sha256-" + strings.Repeat("a", 64)
	nv := &v1alpha1.NodeVersion{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName},
		Spec: v1alpha1.NodeVersionSpec{
			Image: "images/v1.1.0", ImageVersion: "v1.1.0", KubernetesComponentsReference: ref, KubernetesClusterVersion: "v1.36.3", Rollout: v1alpha1.Rollout{MaxSurge: &surge},
		},
	}
	if err := o.api.Create(b.Context(), nv); err != nil {
		b.Fatal(err)
	}
	nv.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: "Replacing", Message: "nodes are replaced", ObservedGeneration: nv.Generation, LastTransitionTime: metav1.Now(),
	}}
	if err := o.api.Status().Update(b.Context(), nv); err != nil {
		b.Fatal(err)
	}
	o.each(32, func(i int) error {
		image, version := "images/v1.1.0", "v1.36.3"
		if i >= count/2 {
			image, version = "images/v1.0.0", "v1.35.4"
		}
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
			Name: o.name(i),
			Annotations: map[string]string{
				v1alpha1.AnnotationImage: image, v1alpha1.AnnotationComponents: ref, v1alpha1.AnnotationGroup: "groups/workers-" + string(rune('a'+i%3)),
			},
		}, Spec: corev1.NodeSpec{ProviderID: "bench:///" + o.name(i)}}
		if err := o.api.Create(b.Context(), n); err != nil {
			return err
		}
		n.Status.NodeInfo.KubeletVersion = version
		n.Status.Conditions = readiness("")
		return o.api.Status().Update(b.Context(), n)
	})
	for i := range 75 {
		p := &v1alpha1.PendingNode{ObjectMeta: metav1.ObjectMeta{Name: "replace-" + strconv.Itoa(i)}, Spec: v1alpha1.PendingNodeSpec{
			GroupID: "groups/workers-" + string(rune('a'+(count/2+i)%3)), Goal: v1alpha1.JoinGoal, Token: "token-" + strconv.Itoa(i), Donor: o.name(count/2 + i), NodeName: o.name(count + i),
		}}
		if err := o.api.Create(b.Context(), p); err != nil {
			b.Fatal(err)
		}
		p.Status.CSPState = "Creating"
		if err := o.api.Status().Update(b.Context(), p); err != nil {
			b.Fatal(err)
		}
	}
	return o
}

func (o *objects) name(i int) string { return fmt.Sprintf("worker-%04d", i) }

// each calls f for all nodes with limited concurrency.
func (o *objects) each(writers int, f func(i int) error) {
	o.b.Helper()
	var all sync.WaitGroup
	errs := make([]error, writers)
	for w := range writers {
		all.Go(func() {
			for i := w; i < o.count && errs[w] == nil; i += writers {
				errs[w] = f(i)
			}
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		o.b.Fatal(err)
	}
}

// readiness is the Ready condition of a node, as a kubelet would report it.
func readiness(why string) []corev1.NodeCondition {
	c := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", Message: "kubelet is posting ready status"}
	if why != "" {
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, "KubeletNotReady", why
	}
	return []corev1.NodeCondition{c}
}

// set sets a node to not Ready with the reason why, or to Ready if why is empty.
func (o *objects) set(i int, why string) {
	o.b.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: o.name(i)}}
	before := n.DeepCopy()
	n.Status.Conditions = readiness(why)
	if err := o.api.Status().Patch(o.b.Context(), n, client.MergeFrom(before)); err != nil && o.b.Context().Err() == nil {
		o.b.Error(err)
	}
}

// change changes a number of nodes ten times a second until the returned function is called:
// each is not Ready for some seconds, then Ready again.
func (o *objects) change(each int) (stop func()) {
	ctx, cancel := context.WithCancel(o.b.Context())
	var all sync.WaitGroup
	all.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for down, up, n := 0, 0, o.count/2-1; ; {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			for range each {
				if down-up < 25*each {
					o.set(1+down%n, "container runtime network not ready")
					down++
				} else {
					o.set(1+up%n, "")
					up++
				}
			}
		}
	})
	return func() { cancel(); all.Wait() }
}

// watching is the running program.
type watching struct {
	*program
	b *testing.B

	mu    sync.Mutex
	total int
	fresh []byte        // unread output
	news  chan struct{} // holds that there is some
	gone  chan struct{}
}

func watchOnTerminal(b *testing.B, bin, kubeconfig string, more ...string) *watching {
	b.Helper()
	w := &watching{b: b, program: startOnTerminal(b, bin, append([]string{"watch", "--kubeconfig", kubeconfig}, more...)...), news: make(chan struct{}, 1), gone: make(chan struct{})}
	if err := pty.Setsize(w.tty, &pty.Winsize{Cols: 120, Rows: 40}); err != nil {
		b.Fatal(err)
	}
	go func() {
		defer close(w.gone)
		buf := make([]byte, 1<<16)
		for {
			n, err := w.tty.Read(buf)
			w.mu.Lock()
			w.total += n
			w.fresh = append(w.fresh, buf[:n]...)
			w.mu.Unlock()
			select {
			case w.news <- struct{}{}:
			default:
			}
			if err != nil {
				return
			}
		}
	}()
	return w
}

func (w *watching) written() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.total
}

// forget discards the output so far.
func (w *watching) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fresh = w.fresh[:0]
}

// await waits for a text in the output since the last forget, discards the output, and
// returns when the text appeared.
func (w *watching) await(text string, limit time.Duration) time.Time {
	w.b.Helper()
	end := time.After(limit)
	for {
		w.mu.Lock()
		found := bytes.Contains(w.fresh, []byte(text))
		w.mu.Unlock()
		if found {
			w.forget()
			return time.Now()
		}
		select {
		case <-w.news:
		case <-w.gone:
			w.b.Fatalf("the program ended before it wrote %q", text)
		case <-end:
			w.b.Fatalf("%q was not written in %s; what was ends with %q", text, limit, w.fresh[max(0, len(w.fresh)-300):])
		}
	}
}

func (w *watching) types(keys string) {
	w.b.Helper()
	if _, err := w.tty.WriteString(keys); err != nil {
		w.b.Fatal(err)
	}
}

// rest waits until the program is idle and writes nothing but its clock.
func (w *watching) rest() {
	w.b.Helper()
	for end := time.Now().Add(time.Minute); ; {
		was, used := w.written(), w.processor()
		time.Sleep(2 * time.Second)
		if w.written()-was < 400 && w.processor()-used < 20*time.Millisecond {
			w.forget()
			return
		}
		if time.Now().After(end) {
			w.b.Fatal("the program does not come to rest")
		}
	}
}

// stop ends the program.
func (w *watching) stop() {
	w.program.stop(w.b)
	<-w.gone
}

// tasks calls f with the contents of a /proc file of each thread.
func (w *watching) tasks(file string, f func(string)) {
	w.b.Helper()
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/%s", w.cmd.Process.Pid, file))
	if err != nil || len(paths) == 0 {
		w.b.Fatalf("the program has ended: %v", err)
	}
	for _, p := range paths {
		if data, err := os.ReadFile(p); err == nil { // a thread may end meanwhile
			f(string(data))
		}
	}
}

// sleeps returns the number of voluntary context switches of all threads so far.
func (w *watching) sleeps() (n int) {
	w.tasks("status", func(s string) {
		for line := range strings.Lines(s) {
			var k int
			if _, err := fmt.Sscanf(line, "voluntary_ctxt_switches: %d", &k); err == nil {
				n += k
			}
		}
	})
	return n
}

// processor returns the CPU time of the program so far.
func (w *watching) processor() (d time.Duration) {
	w.tasks("schedstat", func(s string) {
		ns, err := strconv.ParseInt(strings.Fields(s)[0], 10, 64)
		if err != nil {
			w.b.Fatal(err)
		}
		d += time.Duration(ns)
	})
	return d
}

// memory returns a memory figure of the program in MB.
func (w *watching) memory(name string) float64 {
	w.b.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", w.cmd.Process.Pid))
	if err != nil {
		w.b.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		var kib float64
		if _, err := fmt.Sscanf(line, name+": %f kB", &kib); err == nil {
			return kib / 1000
		}
	}
	w.b.Fatalf("no %s", name)
	return 0
}
