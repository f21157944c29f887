//go:build linux

package plans

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/yaml"

	"constellation/operator/api/upgradev1"
)

// BenchmarkPlans runs the operator's binary with role plans. It carries out a Plan on kubemark-style
// hollow nodes, a hundred at a time, with Jobs of one second. BENCH_PLAN_NODES sets the number of
// nodes; the default is 10,000. etcd, API server, controllers and scheduler are real.
//
// It reports the duration relative to the ideal of nodes/concurrency seconds, and the controller's
// writes per node including events. It also reports the controller's peak memory, its anonymous
// memory at the end, and the time per round for observation and decision.
func BenchmarkPlans(b *testing.B) {
	nodes := planNodes(b)
	const concurrency = 100
	for b.Loop() {
		w := newWorld(b)
		s := w.site(b, "bench", 0)
		each(nodes, func(i int) { s.bare(fmt.Sprintf("bench-%d", i), nil) })
		s.set(func(ctx context.Context, _ *corev1.Pod, _ string) error {
			select {
			case <-time.After(time.Second): // duration of a Job
			case <-ctx.Done():
			}
			return ctx.Err()
		})
		c := startProcess(b, s)
		s.plan(fmt.Sprintf(`{metadata: {name: bench}, spec: {concurrency: %d, version: v1, upgrade: {image: a}, constellation: {state: Paused}}}`, concurrency))
		counts := func(want upgradev1.Counts) func() (string, bool) {
			return func() (string, bool) {
				o := s.get("bench").Status.Constellation
				return fmt.Sprintf("%+v", o), o != nil && o.Counts == want
			}
		}
		s.within(10*time.Minute, "the controller has observed all nodes", counts(upgradev1.Counts{Total: int32(nodes)}))
		before, begun := c.figures(b), time.Now()
		s.edit("bench", `{"spec":{"constellation":{"state":"Running"}}}`)
		s.within(60*time.Minute, "all nodes are done", counts(upgradev1.Counts{Total: int32(nodes), Done: int32(nodes)}))
		took, after := time.Since(begun), c.figures(b)
		b.ReportMetric(took.Seconds(), "s-makespan")
		b.ReportMetric(took.Seconds()/(float64(nodes)/concurrency), "x-ideal")
		b.ReportMetric((after.writes-before.writes)/float64(nodes), "writes/node")
		b.ReportMetric(after.p99*1000, "ms-p99-decision")
		b.ReportMetric(after.mean*1000, "ms-mean-decision")
		b.ReportMetric(after.cpu99*1000, "ms-p99-cpu-decision")
		b.ReportMetric(after.cpuMean*1000, "ms-mean-cpu-decision")
		b.ReportMetric(c.memory(b, "VmHWM"), "MB")
		b.ReportMetric(c.memory(b, "RssAnon"), "MB-own")
		c.end()
	}
}

// BenchmarkPlansAtRest starts the operator's binary with role plans where all nodes are done and
// their Jobs still exist. It reports the peak memory, which is after the start, the anonymous memory
// afterwards, and the cost of two heartbeats of all nodes.
func BenchmarkPlansAtRest(b *testing.B) {
	nodes := planNodes(b)
	for b.Loop() {
		w := newWorld(b)
		s := w.site(b, "rest", 0)
		p := &upgradev1.Plan{ObjectMeta: metav1.ObjectMeta{Name: "rest", Namespace: s.ns}, Spec: upgradev1.PlanSpec{
			Concurrency: 1, Version: "v1", Upgrade: &upgradev1.ContainerSpec{Image: "a"}, NodeSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"site": s.ns}},
			Constellation: &upgradev1.Rollout{State: upgradev1.Paused}, // so that a node that is not done is detected
		}}
		text, err := yaml.Marshal(p)
		if err != nil {
			b.Fatal(err)
		}
		hash, err := latestHash(p, "v1", nil)
		if err != nil {
			b.Fatal(err)
		}
		p.Status = upgradev1.PlanStatus{LatestVersion: "v1", LatestHash: hash}
		each(nodes, func(i int) {
			name := fmt.Sprintf("rest-%d", i)
			s.bare(name, map[string]string{upgradev1.LabelOfPlan(p.Name): hash})
			j := makeJob(p, node{name: name, host: name}, "system-upgrade-controller", DefaultSettings(), 0)
			j.Spec.ManagedBy = new("example.com/nobody") // it has no pods
			s.create(j)
			now := metav1.Now()
			j.Status = batchv1.JobStatus{StartTime: &now, CompletionTime: &now, Succeeded: 1, Conditions: []batchv1.JobCondition{
				{Type: batchv1.JobSuccessCriteriaMet, Status: corev1.ConditionTrue, Reason: batchv1.JobReasonCompletionsReached, LastTransitionTime: now},
				{Type: batchv1.JobComplete, Status: corev1.ConditionTrue, Reason: batchv1.JobReasonCompletionsReached, Message: "Reached expected number of succeeded pods", LastTransitionTime: now},
			}}
			if err := w.admin.Status().Update(b.Context(), j); err != nil {
				b.Fatal(err)
			}
		})
		c := startProcess(b, s)
		s.plan(string(text))
		s.within(10*time.Minute, "the controller has observed that all nodes are done", func() (string, bool) {
			o := s.get("rest").Status.Constellation
			return fmt.Sprintf("%+v", o), o != nil && o.Counts == upgradev1.Counts{Total: int32(nodes), Done: int32(nodes)}
		})
		used, begun := c.seconds(b), time.Now()
		for range 2 {
			each(nodes, func(i int) { s.ready(fmt.Sprintf("rest-%d", i), true) })
		}
		// A kubelet reports every five minutes, if nothing changes.
		perBeat := (c.seconds(b) - used) / float64(2*nodes)
		b.ReportMetric(perBeat*float64(nodes)/300*100, "%core-idle")
		b.ReportMetric(float64(2*nodes)/time.Since(begun).Seconds(), "heartbeats/s")
		b.ReportMetric(c.memory(b, "VmHWM"), "MB")
		b.ReportMetric(c.memory(b, "RssAnon"), "MB-own")
		c.end()
	}
}

// planNodes returns the number of nodes.
func planNodes(b *testing.B) int {
	n, err := strconv.Atoi(cmp.Or(os.Getenv("BENCH_PLAN_NODES"), "10000"))
	if err != nil {
		b.Fatal(err)
	}
	return n
}

// each calls a function n times, a few at a time.
func each(n int, do func(int)) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, 32)
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			do(i)
		})
	}
	wg.Wait()
}

// bare creates a node without cleanup, because the control plane ends with the benchmark.
func (s *site) bare(name string, more map[string]string) {
	s.Helper()
	l := map[string]string{corev1.LabelHostname: name, corev1.LabelOSStable: "linux", "site": s.ns}
	maps.Copy(l, more)
	s.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: l}})
	s.ready(name, true)
}

func (s *site) within(limit time.Duration, what string, holds func() (string, bool)) {
	s.Helper()
	for deadline := time.Now().Add(limit); ; time.Sleep(100 * time.Millisecond) {
		is, ok := holds()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			s.Fatalf("%s: not so after %s; it is: %s", what, limit, is)
		}
	}
}

// running is a controller in a process of its own.
type running struct {
	cmd     *exec.Cmd
	metrics string
	end     func()
}

func startProcess(b *testing.B, s *site) *running {
	b.Helper()
	dir := b.TempDir()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	r := &running{metrics: l.Addr().String()}
	_ = l.Close()
	kubeconfig, bin := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "operator")
	if err := writeKubeconfig(s.controller, kubeconfig); err != nil {
		b.Fatal(err)
	}
	build := exec.CommandContext(b.Context(), "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", bin, "constellation/operator/cmd")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // as it is released
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("build operator: %v\n%s", err, out)
	}
	var said lines
	r.cmd = exec.Command(bin, "--role=plans", "--kubeconfig="+kubeconfig, "--namespace="+s.ns, "--name=system-upgrade-controller", "--metrics="+r.metrics)
	r.cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "GOGC=") })
	r.cmd.Stdout, r.cmd.Stderr = &said, &said
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := r.cmd.Start(); err != nil {
		b.Fatal(err)
	}
	r.end = sync.OnceFunc(func() {
		_ = r.cmd.Process.Kill()
		_ = r.cmd.Wait()
		if b.Failed() {
			b.Log(said.tail())
		}
	})
	b.Cleanup(r.end)
	return r
}

// processFigures are writes to the API server, and seconds that a decision took.
type processFigures struct{ writes, p99, mean, cpu99, cpuMean float64 }

// figures returns the controller's own metrics.
func (r *running) figures(b *testing.B) (f processFigures) {
	b.Helper()
	resp, err := http.Get("http://" + r.metrics + "/metrics")
	if err != nil {
		b.Fatal(err)
	}
	defer resp.Body.Close()
	p := expfmt.NewTextParser(model.UTF8Validation)
	all, err := p.TextToMetricFamilies(resp.Body)
	if err != nil {
		b.Fatal(err)
	}
	for _, m := range all["rest_client_requests_total"].GetMetric() {
		for _, l := range m.Label {
			if l.GetName() == "method" && l.GetValue() != http.MethodGet {
				f.writes += m.GetCounter().GetValue()
			}
		}
	}
	f.p99, f.mean = quantile(all["constellation_plan_decision_seconds"])
	f.cpu99, f.cpuMean = quantile(all["constellation_plan_decision_cpu_seconds"])
	return f
}

// quantile returns the 99th percentile of a histogram, and its mean.
func quantile(of *dto.MetricFamily) (p99, mean float64) {
	for _, m := range of.GetMetric() {
		h := m.GetHistogram()
		for _, bucket := range h.Bucket {
			if float64(bucket.GetCumulativeCount()) >= .99*float64(h.GetSampleCount()) {
				return bucket.GetUpperBound(), h.GetSampleSum() / float64(h.GetSampleCount())
			}
		}
	}
	return math.Inf(1), math.Inf(1)
}

// memory returns a field of the controller's /proc status, in MB.
func (r *running) memory(b *testing.B, word string) float64 {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.cmd.Process.Pid))
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), word+":")
	n, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		b.Fatal(err)
	}
	return float64(n) * 1024 / 1e6
}

// seconds returns the processor time that the controller has used.
func (r *running) seconds(b *testing.B) float64 {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.cmd.Process.Pid))
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	var ticks float64
	for _, f := range fields[11:13] {
		n, err := strconv.ParseFloat(f, 64)
		if err != nil {
			b.Fatal(err)
		}
		ticks += n
	}
	return ticks / 100
}

// BenchmarkDecide is one look and decision about a Plan of 10,000 nodes, a hundred at a time, after
// a Job has completed, without an API server: the processor time of its thread, which other
// programs do not prolong. The Jobs of all nodes that are done are there, 10,000 in the end.
func BenchmarkDecide(b *testing.B) {
	const nodes, concurrency = 10_000, 100
	d := newDesk(b, planOf(func(p *upgradev1.Plan) { p.Spec.Concurrency = concurrency }), nodes)
	running := creates(d.step())
	var took []time.Duration
	for b.Loop() {
		b.StopTimer()
		if len(running) == 0 {
			d.edit(func(p *upgradev1.Plan) { p.Spec.Version += "0" })
			for range 2 {
				running = creates(d.step())
			}
		}
		name := running[0]
		running = running[1:]
		d.end(name, batchv1.JobComplete)
		b.StartTimer()
		watch := start()
		v := d.fill()
		_ = decide(v)
		_, worked := watch.stop()
		took = append(took, worked)
		b.StopTimer()
		for _, s := range v.suspects { // for the step, which looks again
			d.book.suspect(d.name, s.job.name)
		}
		running = append(running, creates(d.step())...)
		b.StartTimer()
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "ms-p50-cpu")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "ms-p99-cpu")
}

// BenchmarkHeld measures the memory of 10,000 realistic Nodes and their finished Jobs in the stores
// of informers and in the book.
func BenchmarkHeld(b *testing.B) {
	const nodes = 10_000
	heap := func() float64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	for b.Loop() {
		p := planOf()
		d := newDesk(b, p, 0)
		d.fill()
		store := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
		p.Status.LatestHash, p.Status.LatestVersion = known, "v1"
		before := heap()
		for i := range nodes {
			n := record[*node](b, trimNode, reported(i))
			if err := store.Add(n); err != nil {
				b.Fatal(err)
			}
			d.book.setNode(n, false)
		}
		with := heap()
		for i := range nodes {
			j := makeJob(p, *d.book.nodes[reported(i).Name], "system-upgrade-controller", DefaultSettings(), 0)
			j.UID, j.ResourceVersion = types.UID(uuid(1<<32+i)), d.version()
			j.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobComplete, Status: corev1.ConditionTrue, Reason: "CompletionsReached", Message: "Reached expected number of succeeded pods"}}
			r := record[*job](b, trimJob, j)
			if err := store.Add(r); err != nil {
				b.Fatal(err)
			}
			d.book.setJob(r, false)
		}
		b.ReportMetric((with-before)/nodes, "B/node")
		b.ReportMetric((heap()-with)/nodes, "B/job")
		runtime.KeepAlive(d)
		runtime.KeepAlive(store)
	}
}

func uuid(i int) string { return fmt.Sprintf("%08x-6a0f-4f5e-9f8b-%012x", i, i) }

// reported is a Node with as many labels as there are in clouds, none of its strings another's.
func reported(i int) *corev1.Node {
	name := fmt.Sprintf("ip-10-%d-%d-%d.eu-central-1.compute.internal", i>>16&255, i>>8&255, i&255)
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(uuid(i)), ResourceVersion: fmt.Sprint(1000 + i), Labels: map[string]string{}}}
	for k, v := range map[string]string{
		corev1.LabelHostname: name, corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64", corev1.LabelInstanceTypeStable: "m6i.large",
		corev1.LabelTopologyRegion: "eu-central-1", corev1.LabelTopologyZone: "eu-central-1a", "beta.kubernetes.io/os": "linux", "beta.kubernetes.io/arch": "amd64",
		"node.kubernetes.io/pool": "workers", "topology.ebs.csi.aws.com/zone": "eu-central-1a", "team": "platform", "tier": "standard",
	} {
		n.Labels[strings.Clone(k)] = strings.Clone(v)
	}
	n.Status.NodeInfo.KubeletVersion = strings.Clone("v1.35.4")
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", Message: strings.Clone("kubelet is posting ready status")}}
	return n
}
