package hollow_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/assets/render"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/providers"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/hollow"
	"constellation/internal/testneeds"
	"constellation/operator/api/v1alpha1"
)

// BenchmarkRollout has the operator replace all workers of a cluster with hollow
// machines. Everything else is real: the operator's binary, etcd, API server,
// controllers and scheduler. A worker holds one pod, of a Deployment. Three control
// planes are at the target already.
//
// It reports the makespan, from the moment that the operator may start until it reports the
// target reached, and that time over the ideal, ceil(N/surge) × (boot + drain), where
// boot ends with a Ready Node and a deletion is immediate. It also reports
// the operator's writes in the API server's audit log, without evictions; the
// writes of joining machines; calls to the cloud; memory and processor time of the
// operator.
//
// The latency from an event to its consequence is measured twice. In the API
// server: from the response to the write that makes a replacement node Ready to the
// arrival of the write that cordons the old node, and from the end of a node's last pod to
// the write that binds its machine for deletion. This includes both network directions and
// contention for the shared processors. In the operator: from the arrival of an event to the
// request that follows, and the duration of a reconcile. Calls to the cloud are batched to
// reduce their number; the log has the delays.
//
// The benchmark of 5000 takes a quarter of an hour, so it runs only if it is named explicitly.
func BenchmarkRollout(b *testing.B) { benchmarkRollout(b, providers.Local) }

// BenchmarkRolloutAtEmulatedGoogleCloud is BenchmarkRollout with Google's client. The emulator refuses requests above the
// documented rate limits.
func BenchmarkRolloutAtEmulatedGoogleCloud(b *testing.B) { benchmarkRollout(b, gcp.Name) }

func benchmarkRollout(b *testing.B, provider string) {
	b.Helper()
	for _, size := range []struct{ workers, surge int }{{100, 10}, {1000, 100}, {5000, 100}} {
		b.Run(strconv.Itoa(size.workers), func(b *testing.B) {
			if f := flag.Lookup("test.bench"); size.workers > 1000 && !strings.Contains(f.Value.String(), strconv.Itoa(size.workers)) {
				b.Skip("takes a quarter of an hour; run it with -bench 'Rollout$/^5000$'")
			}
			for b.Loop() {
				r := rollout(b, provider, size.workers, size.surge, hollow.Times{
					Boot: 5 * time.Second, Join: 500 * time.Millisecond, Settle: 500 * time.Millisecond, Drain: 3 * time.Second, Heartbeat: time.Minute,
				})
				for unit, v := range r {
					b.ReportMetric(v, unit)
				}
			}
		})
	}
}

// TestRolloutEndsWhateverTheCloudDoes replaces workers while the cloud has nearly
// every possible fault.
func TestRolloutEndsWhateverTheCloudDoes(t *testing.T) {
	testneeds.Time(t, "a minute")
	times := hollow.Times{Boot: 500 * time.Millisecond, Join: 200 * time.Millisecond, Drain: 500 * time.Millisecond, Off: 500 * time.Millisecond}
	rollout(t, providers.Local, 12, 3, times,
		"api-429=0.1", "api-500=0.1", "api-latency=20ms", "partial-list=0.2", "partial-list-told=0.1", "lost-delete=0.3",
		"create-timeout=0.3", "describe-lag=3s", "boot-delay=0.2:5s", "quota=17")
}

const controlPlanes = 3

func rollout(b testing.TB, provider string, workers, surge int, times hollow.Times, faults ...string) map[string]float64 {
	b.Helper()
	ctx := b.Context()
	dir := b.TempDir()
	log := filepath.Join(dir, "audit.log")
	policy := filepath.Join(dir, "policy.yaml")
	if err := os.WriteFile(policy, []byte(`apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules:
- {level: None, verbs: [get, list, watch]}
- {level: None, namespaces: [kube-node-lease]}
- {level: Metadata}
`), 0o600); err != nil {
		b.Fatal(err)
	}
	// All processes share the operator's processors. Those that are not measured may use memory
	// instead.
	b.Setenv("GOGC", "400")
	c := newCluster(b, controlplane.Options{
		APIServerArgs: []string{
			"--audit-policy-file=" + policy, "--audit-log-path=" + log, "--audit-log-maxsize=4000",
			"--audit-log-mode=batch", "--audit-log-batch-max-wait=1s", "--audit-log-batch-buffer-size=200000",
		},
		// Defaults are made for machines that take minutes, and heartbeats are rarer here.
		ControllerManagerArgs: []string{"--kube-api-qps=1000", "--kube-api-burst=2000", "--node-monitor-grace-period=5m", "--controllers=*,-ttl-controller"},
		SchedulerArgs:         []string{"--kube-api-qps=1000", "--kube-api-burst=2000"},
	})
	policies, err := render.Chart("constellation-policies", "v1.1.0", "constellation-system", nil, map[string]any{"release": "v1.1.0"})
	if err != nil {
		b.Fatal(err)
	}
	if err := c.cp.Apply(ctx, policies); err != nil { // as in every cluster; each write is judged by them
		b.Fatal(err)
	}
	h, v := vendorOf(b, c, provider, times)

	// Everything is at the target except the workers, which may not be replaced yet.
	nv := c.target("v1.1.0", func(s *v1alpha1.NodeVersionSpec) {
		max := intstr.FromInt(surge)
		s.Image = v.Image("v1.1.0")
		s.Rollout = v1alpha1.Rollout{MaxSurge: &max, Paused: true}
	})
	c.publish(nv, v1alpha1.JoinComponents{ControlPlane: refA, Worker: refA})
	// The emulator of another cloud gives control planes an account, which the owner uses for the group.
	for role, n := range map[cloud.Role]int{cloud.ControlPlane: controlPlanes, cloud.Worker: workers} {
		if role == cloud.ControlPlane {
			if err := v.SetImage(ctx, role, "v1.1.0"); err != nil {
				b.Fatal(err)
			}
		}
		if err := v.Seed(ctx, role, n, refA); err != nil {
			b.Fatal(err)
		}
	}
	c.workload(workers)
	long(b, "a pod runs on every worker", func() (string, bool) {
		pods := c.pods()
		return fmt.Sprint(len(pods), " have one"), len(pods) == workers
	})
	op := startOperator(b, c, v)
	total := int32(workers + controlPlanes)
	status := func() (v1alpha1.NodeVersion, string) {
		var nv v1alpha1.NodeVersion
		if err := c.admin.Get(ctx, client.ObjectKey{Name: v1alpha1.NodeVersionName}, &nv); err != nil {
			b.Fatal(err)
		}
		return nv, fmt.Sprintf("%+v, waiting %+v; the operator's log ends with %s", nv.Status.Nodes, nv.Status.Waiting, op.tail())
	}
	long(b, "the operator has all nodes in its status", func() (string, bool) {
		nv, is := status()
		return is, nv.Status.Nodes.Total == total && nv.Status.Nodes.Outdated == int32(workers)
	})

	if err := v.SetFaults(faults); err != nil {
		b.Fatal(err)
	}
	spent := func() map[string]float64 {
		out := map[string]float64{"operator": op.seconds(), "hollow machines": seconds(b, os.Getpid())}
		for _, name := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"} {
			out[name] = seconds(b, c.cp.PID(name))
		}
		return out
	}
	before, calls, figures := spent(), v.Calls(), op.figures()
	begun := time.Now()
	if err := c.admin.Patch(ctx, &v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName}},
		client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"rollout":{"paused":false}}}`))); err != nil {
		b.Fatal(err)
	}
	most := 0
	long(b, "all nodes are at the target", func() (string, bool) {
		most = max(most, len(h.Instances()))
		nv, is := status()
		done := false
		for _, cond := range nv.Status.Conditions {
			done = done || cond.Type == v1alpha1.ConditionReady && cond.Status == metav1.ConditionTrue && cond.ObservedGeneration == nv.Generation
		}
		return is, done && nv.Status.Nodes.UpToDate == total
	})
	ended := time.Now()
	if most > int(total)+surge {
		b.Errorf("there were %d machines at a time, %d more than the surge of %d allows", most, most-int(total)-surge, surge)
	}
	// Nothing is left behind.
	long(b, "no machine is there but those of the nodes", func() (string, bool) {
		l := h.Instances()
		old := slices.ContainsFunc(l, func(i cloud.Instance) bool { return i.Image != v.Image("v1.1.0") })
		return fmt.Sprint(len(l), " machines"), len(l) == int(total) && !old
	})
	for name, node := range c.nodes() {
		if _, ok := h.Instance(name); !ok || node.Spec.Unschedulable || !isReady(node) {
			b.Errorf("Node %s: its machine exists: %t, unschedulable %t, ready %t", name, ok, node.Spec.Unschedulable, isReady(node))
		}
	}
	for _, list := range []client.ObjectList{&v1alpha1.PendingNodeList{}, &v1alpha1.JoiningNodeList{}} {
		if err := c.admin.List(ctx, list); err != nil {
			b.Fatal(err)
		}
		if n := meta.LenList(list); n > 0 {
			b.Errorf("%d left in %T", n, list)
		}
	}
	used := map[string]float64{}
	for name, after := range spent() {
		used[name] = after - before[name]
	}
	b.Logf("seconds of processor meanwhile: %s", perNode(used, 1))
	out := map[string]float64{}
	makespan := ended.Sub(begun).Seconds()
	ideal := float64((workers+surge-1)/surge) * (times.Boot + times.Join + times.Settle + times.Drain).Seconds()
	n := float64(workers)
	out["s-makespan"], out["x-ideal"] = makespan, makespan/ideal
	out["MB-operator"] = op.megabytes()
	out["cpu-ms/node"] = used["operator"] * 1000 / n
	for kind, after := range v.Calls() {
		out["calls/node"] += float64(after-calls[kind]) / n
	}
	b.Logf("calls of the cloud: %v, before: %v", v.Calls(), calls)
	inside, rounds := op.figures().since(figures, steps), op.figures().since(figures, roundTime)
	out["ms-p50-event-to-request"], out["ms-p99-event-to-request"] = inside.quantile(0.5)*1000, inside.quantile(0.99)*1000
	out["ms/round"], out["rounds/s"] = rounds.sum/max(1, rounds.count)*1000, rounds.count/makespan

	time.Sleep(3 * time.Second) // the audit log is written in batches, each second
	w := readAudit(b, log, begun, ended)
	b.Logf("writes per node by operator: %v", perNode(w.operator, n))
	b.Logf("writes per node by others: %v", perNode(w.others, n))
	evictions := 0
	for what, times := range w.operator {
		if strings.HasPrefix(what, "create pods/eviction") {
			evictions += times
		}
	}
	out["writes/node"] = float64(sum(w.operator)-evictions) / n
	out["evictions/node"] = float64(evictions) / n
	out["join-writes/node"] = float64(w.join) / n
	took := op.steps(w, h.Lives(), begun)
	said := ""
	for _, step := range stepNames {
		said += fmt.Sprintf("; %s: %d times, p50 %.0f ms, p99 %.0f ms", step, len(took[step]), quantile(took[step], 0.5), quantile(took[step], 0.99))
	}
	b.Log("steps" + said)
	for unit, step := range map[string]string{"ready-to-cordon": readyToCordon, "empty-to-bind": emptyToBind} {
		out["ms-p50-"+unit], out["ms-p99-"+unit] = quantile(took[step], 0.5), quantile(took[step], 0.99)
	}
	return out
}

// The steps of a replacement, and their order.
const (
	recordToCreate = "from the intent's being written down to its machine's creation"
	joinToAdopt    = "from the annotation with a replacement node's components to its adoption"
	readyToCordon  = "from a replacement node's being Ready and adopted to the cordon of the old node"
	cordonToEvict  = "from the cordon of an old node to the first observed end of a pod there"
	emptyToBind    = "from the end of an old node's last pod to the decision to delete its machine"
	bindToDelete   = "from there to the machine's deletion"
	goneToClear    = "from the machine's being gone to the end of its intent"
	clearToRecord  = "from there to the next one in its place"
)

var stepNames = []string{recordToCreate, joinToAdopt, readyToCordon, cordonToEvict, emptyToBind, bindToDelete, goneToClear, clearToRecord}

// steps returns the duration of each step for each old node, in milliseconds.
func (p *operatorProcess) steps(w audit, lives map[string]hollow.Life, begun time.Time) map[string][]float64 {
	p.b.Helper()
	data, err := os.ReadFile(p.log)
	if err != nil {
		p.b.Fatal(err)
	}
	type replaced struct {
		heir  string
		place string
		turn  int // of those in the place
	}
	all, turns := map[string]*replaced{}, map[string]int{}
	of := func(donor string) *replaced {
		if all[donor] == nil {
			all[donor] = &replaced{}
		}
		return all[donor]
	}
	for line := range bytes.Lines(data) {
		var e struct {
			Action, Node, Heir, Replaces string
			PendingNode                  string `json:"pending_node"`
		}
		if json.Unmarshal(line, &e) != nil {
			continue
		}
		switch e.Action {
		case "cordon":
			of(e.Node).heir = e.Heir
		case "record intent":
			r := of(e.Replaces)
			r.place, r.turn = e.PendingNode, turns[e.PendingNode]
			turns[e.PendingNode]++
		}
	}
	out := map[string][]float64{}
	note := func(step string, from, to time.Time) {
		if !from.IsZero() && !to.IsZero() && to.After(begun) {
			out[step] = append(out[step], max(0, to.Sub(from).Seconds()*1000))
		}
	}
	at := func(all []request, n int) request {
		if n < len(all) {
			return all[n]
		}
		return request{}
	}
	for donor, r := range all {
		heir, old := lives[r.heir], lives[donor]
		recorded, bound, cleared := at(w.recorded[r.place], r.turn), at(w.bound[r.place], r.turn), at(w.cleared[r.place], r.turn)
		noted, adopted, cordoned := at(w.patched[r.heir], 0), at(w.patched[r.heir], 1), at(w.patched[donor], 0)
		ready := w.ready[r.heir]
		if adopted.answered.After(ready) {
			ready = adopted.answered
		}
		note(recordToCreate, recorded.answered, heir.Requested)
		note(joinToAdopt, noted.answered, adopted.came)
		note(readyToCordon, ready, cordoned.came)
		note(cordonToEvict, cordoned.answered, old.Emptying)
		note(emptyToBind, old.Emptied, bound.came)
		note(bindToDelete, bound.answered, old.Deleted)
		note(goneToClear, old.Gone, cleared.came)
		note(clearToRecord, cleared.answered, at(w.recorded[r.place], r.turn+1).came)
	}
	return out
}

func long(b testing.TB, what string, holds func() (string, bool)) {
	b.Helper()
	deadline := time.Now().Add(30 * time.Minute)
	for {
		is, ok := holds()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			b.Fatalf("%s: not so after 30 minutes; it is: %s", what, is)
		}
		time.Sleep(250 * time.Millisecond)
	}
}

// operatorProcess is the operator's own binary.
type operatorProcess struct {
	b   testing.TB
	cmd *exec.Cmd
	log string
	// metrics is the address where its figures are.
	metrics string
}

func startOperator(b testing.TB, c *cluster, v hollow.Vendor) *operatorProcess {
	b.Helper()
	dir := b.TempDir()
	bin, kubeconfig := buildOperator(b), filepath.Join(dir, "kubeconfig")
	k, err := c.cp.Kubeconfig()
	if err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(kubeconfig, k, 0o600); err != nil {
		b.Fatal(err)
	}
	c.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "constellation-system"}})
	p := &operatorProcess{b: b, log: filepath.Join(dir, "operator.log"), metrics: freeAddress(b)}
	f, err := os.Create(p.log)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	p.cmd = exec.CommandContext(context.WithoutCancel(b.Context()), bin, append(v.Flags(), "--kubeconfig", kubeconfig, "--metrics", p.metrics, "--health", "")...)
	p.cmd.Stdout, p.cmd.Stderr = f, f
	p.cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "GOGC=") })
	if err := p.cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	})
	return p
}

// buildOperator builds the operator's binary and returns its path.
func buildOperator(b testing.TB, flags ...string) string {
	b.Helper()
	bin := filepath.Join(b.TempDir(), "operator")
	args := append([]string{"build", "-o", bin}, flags...)
	if out, err := exec.CommandContext(b.Context(), "go", append(args, "constellation/operator/cmd")...).CombinedOutput(); err != nil {
		b.Fatalf("build operator: %v\n%s", err, out)
	}
	return bin
}

func (p *operatorProcess) tail() string { return tail(p.log) }

func tail(log string) string {
	data, err := os.ReadFile(log)
	if err != nil {
		return err.Error()
	}
	return string(data[max(0, len(data)-1500):])
}

func (p *operatorProcess) seconds() float64 { return seconds(p.b, p.cmd.Process.Pid) }

// seconds is the processor time of a process so far.
func seconds(b testing.TB, pid int) float64 {
	b.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		b.Fatalf("a process ended: %v", err)
	}
	// After the name in parentheses: utime and stime, in hundredths of a second.
	f := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+2:]))
	u, err1 := strconv.ParseFloat(f[11], 64)
	s, err2 := strconv.ParseFloat(f[12], 64)
	if err1 != nil || err2 != nil {
		b.Fatal(err1, err2)
	}
	return (u + s) / 100
}

// megabytes is the most memory that was resident.
func (p *operatorProcess) megabytes() float64 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		p.b.Fatalf("operator ended: %v; its log ends with %s", err, p.tail())
	}
	for line := range strings.Lines(string(data)) {
		var kib float64
		if _, err := fmt.Sscanf(line, "VmHWM: %f kB", &kib); err == nil {
			return kib / 1000
		}
	}
	p.b.Fatal("no VmHWM")
	return 0
}

// Figures of the operator about itself.
const (
	steps     = "constellation_event_to_action_duration_seconds"
	roundTime = "controller_runtime_reconcile_time_seconds"
)

// histogram is one of a process's figures.
type histogram struct {
	sum, count float64
	buckets    map[float64]float64 // how many were not above a bound
}

type histograms map[string]histogram

// figures reads the operator's metrics.
func (p *operatorProcess) figures() histograms {
	p.b.Helper()
	rsp, err := http.Get("http://" + p.metrics + "/metrics")
	if err != nil {
		p.b.Fatalf("read the operator's figures: %v; its log ends with %s", err, p.tail())
	}
	defer rsp.Body.Close()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	all, err := parser.TextToMetricFamilies(rsp.Body)
	if err != nil {
		p.b.Fatalf("read the operator's figures: %v", err)
	}
	out := histograms{}
	for _, name := range []string{steps, roundTime} {
		for _, m := range all[name].GetMetric() {
			if l := m.GetLabel(); len(l) > 0 && l[0].GetValue() != "nodeversion" {
				continue
			}
			h := histogram{sum: m.GetHistogram().GetSampleSum(), count: float64(m.GetHistogram().GetSampleCount()), buckets: map[float64]float64{}}
			for _, b := range m.GetHistogram().GetBucket() {
				h.buckets[b.GetUpperBound()] = float64(b.GetCumulativeCount())
			}
			out[name] = h
		}
	}
	return out
}

// since is what has come to a figure.
func (h histograms) since(before histograms, name string) histogram {
	is, was := h[name], before[name]
	out := histogram{sum: is.sum - was.sum, count: is.count - was.count, buckets: map[float64]float64{}}
	for bound, n := range is.buckets {
		out.buckets[bound] = n - was.buckets[bound]
	}
	return out
}

// quantile is about where q of all are not above, even between two bounds.
func (h histogram) quantile(q float64) float64 {
	from, below := 0.0, 0.0
	for _, bound := range slices.Sorted(maps.Keys(h.buckets)) {
		n := h.buckets[bound]
		if n >= q*h.count && n > below && !math.IsInf(bound, 1) {
			return from + (bound-from)*(q*h.count-below)/(n-below)
		}
		if !math.IsInf(bound, 1) {
			from, below = bound, n
		}
	}
	return from // or above
}

// freeAddress returns an unused loopback address.
func freeAddress(b testing.TB) string {
	b.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// request is one that the API server was asked.
type request struct{ came, answered time.Time }

// audit is the content of the API server's audit log.
type audit struct {
	operator, others map[string]int       // writes by verb and resource
	join             int                  // writes by which machines join
	ready            map[string]time.Time // of Nodes, when they became so
	// By the operator, in order, by name: writes to Nodes, and those to PendingNodes by what
	// they do.
	patched, recorded, bound, cleared map[string][]request
}

func readAudit(b testing.TB, path string, from, to time.Time) audit {
	b.Helper()
	f, err := os.Open(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	type event struct {
		Verb, UserAgent string
		ObjectRef       struct{ Resource, Subresource, Name string }
		User            struct{ Username string }
		ResponseStatus  struct{ Code int }
		// The request came in at the first, the answer went out at the second.
		RequestReceivedTimestamp, StageTimestamp time.Time
	}
	var all []event
	in := bufio.NewScanner(f)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		var e event
		if err := json.Unmarshal(in.Bytes(), &e); err != nil {
			b.Fatal(err)
		}
		if e.RequestReceivedTimestamp.After(from) && e.RequestReceivedTimestamp.Before(to) {
			all = append(all, e)
		}
	}
	if err := in.Err(); err != nil {
		b.Fatal(err)
	}
	slices.SortStableFunc(all, func(a, b event) int { return a.RequestReceivedTimestamp.Compare(b.RequestReceivedTimestamp) })
	out := audit{
		operator: map[string]int{}, others: map[string]int{}, ready: map[string]time.Time{},
		patched: map[string][]request{}, recorded: map[string][]request{}, bound: map[string][]request{}, cleared: map[string][]request{},
	}
	for _, e := range all {
		what := e.Verb + " " + e.ObjectRef.Resource
		if e.ObjectRef.Subresource != "" {
			what += "/" + e.ObjectRef.Subresource
		}
		if e.ResponseStatus.Code >= 400 {
			what += fmt.Sprint(" ", e.ResponseStatus.Code)
		}
		agent, _, _ := strings.Cut(e.UserAgent, "/")
		switch {
		case agent == "constellation-operator":
			out.operator[what]++
			name, is := e.ObjectRef.Name, request{e.RequestReceivedTimestamp, e.StageTimestamp}
			switch what {
			case "patch nodes":
				out.patched[name] = append(out.patched[name], is)
			case "create pendingnodes":
				out.recorded[name] = append(out.recorded[name], is)
			case "patch pendingnodes":
				out.bound[name] = append(out.bound[name], is)
			case "delete pendingnodes":
				out.cleared[name] = append(out.cleared[name], is)
			}
			continue
		case agent == hollow.JoinServiceAgent:
			out.join++
		case agent == hollow.KubeletAgent && e.ObjectRef.Resource == "nodes":
			out.join++
			if e.ObjectRef.Subresource == "status" {
				out.ready[e.ObjectRef.Name] = e.StageTimestamp
			}
		}
		out.others[agent+": "+what]++
	}
	return out
}

func sum(m map[string]int) int {
	n := 0
	for _, v := range m {
		n += v
	}
	return n
}

func perNode[V int | float64](m map[string]V, nodes float64) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, fmt.Sprintf("%s %.2f", k, float64(m[k])/nodes))
	}
	return strings.Join(out, ", ")
}

func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return 0
	}
	slices.Sort(v)
	return v[min(len(v)-1, int(float64(len(v))*q))]
}
