//go:build linux

package plans

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/operator/api/upgradev1"
)

// BenchmarkPlans has the controller, in a process of its own, carry a Plan out on hollow nodes, a
// hundred at a time, whose Jobs take a second. BENCH_PLAN_NODES says how many nodes, 10,000 if
// nothing does. Real are etcd, API server, controllers and scheduler.
//
// It reports the time that it took over the ideal, nodes/concurrency seconds; writes of the
// controller per node, events included; its memory at most; how long it looks and decides; and,
// afterwards, what it costs while all nodes say twice that they are alive.
func BenchmarkPlans(b *testing.B) {
	nodes, err := strconv.Atoi(cmp.Or(os.Getenv("BENCH_PLAN_NODES"), "10000"))
	if err != nil {
		b.Fatal(err)
	}
	const concurrency = 100
	for b.Loop() {
		w := newWorld(b)
		s := w.site(b, "bench", 0)
		var wg sync.WaitGroup
		slots := make(chan struct{}, 32)
		for i := range nodes {
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				s.bare(fmt.Sprintf("bench-%d", i))
			})
		}
		wg.Wait()
		s.set(func(ctx context.Context, _ *corev1.Pod, _ string) error {
			select {
			case <-time.After(time.Second): // what a Job takes
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
		s.within(10*time.Minute, "the controller knows all nodes", counts(upgradev1.Counts{Total: int32(nodes)}))
		before, begun := c.figures(b), time.Now()
		s.edit("bench", `{"spec":{"constellation":{"state":"Running"}}}`)
		s.within(60*time.Minute, "all nodes are done", counts(upgradev1.Counts{Total: int32(nodes), Done: int32(nodes)}))
		took, after := time.Since(begun), c.figures(b)
		b.ReportMetric(took.Seconds(), "s-makespan")
		b.ReportMetric(took.Seconds()/(float64(nodes)/concurrency), "x-ideal")
		b.ReportMetric((after.writes-before.writes)/float64(nodes), "writes/node")
		b.ReportMetric(after.p99*1000, "ms-p99-decision")
		b.ReportMetric(c.peak(b), "MB")

		used, begun := c.seconds(b), time.Now()
		for range 2 {
			for i := range nodes {
				slots <- struct{}{}
				wg.Go(func() {
					defer func() { <-slots }()
					s.ready(fmt.Sprintf("bench-%d", i), true)
				})
			}
			wg.Wait()
		}
		// A kubelet reports every five minutes, if nothing changes.
		perBeat := (c.seconds(b) - used) / float64(2*nodes)
		b.ReportMetric(perBeat*float64(nodes)/300*100, "%core-idle")
		b.ReportMetric(float64(2*nodes)/time.Since(begun).Seconds(), "heartbeats/s")
		c.end()
	}
}

// bare makes a node that stays when the benchmark ends: so does nothing of its control plane.
func (s *site) bare(name string) {
	s.Helper()
	s.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name, corev1.LabelOSStable: "linux", "site": s.ns}}})
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
	c := processConfig{Kubeconfig: filepath.Join(dir, "kubeconfig"), Namespace: s.ns, Metrics: r.metrics}
	body, err := json.Marshal(c)
	if err != nil {
		b.Fatal(err)
	}
	file := filepath.Join(dir, "config")
	if err := writeKubeconfig(s.controller, c.Kubeconfig); err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(file, body, 0o600); err != nil {
		b.Fatal(err)
	}
	var said lines
	r.cmd = exec.Command(os.Args[0])
	r.cmd.Env = append(os.Environ(), processEnv+"="+file, "GOGC=50")
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

type processFigures struct{ writes, p99 float64 }

// figures are those that the controller tells of itself.
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
	for _, m := range all["constellation_plan_decision_seconds"].GetMetric() {
		h := m.GetHistogram()
		for _, bucket := range h.Bucket {
			if float64(bucket.GetCumulativeCount()) >= .99*float64(h.GetSampleCount()) {
				f.p99 = bucket.GetUpperBound()
				break
			}
		}
	}
	return f
}

// peak is the most memory that the controller had, in MB.
func (r *running) peak(b *testing.B) float64 {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.cmd.Process.Pid))
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "VmHWM:")
	n, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		b.Fatal(err)
	}
	return float64(n) * 1024 / 1e6
}

// seconds is the processor time that the controller has used.
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
