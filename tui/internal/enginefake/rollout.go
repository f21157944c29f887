package enginefake

import (
	"compress/gzip"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
)

// rollouts caches simulated rollouts for all tests.
var rollouts = struct {
	sync.Mutex
	of map[int][]plan.Event
}{of: map[int][]plan.Event{}}

// RolloutOf are the events of a rollout of workers nodes; with 500 or more some machines fail.
func RolloutOf(t testing.TB, workers int) []plan.Event {
	rollouts.Lock()
	defer rollouts.Unlock()
	if rollouts.of[workers] == nil {
		rollouts.of[workers] = Simulated(t, workers, max(1, workers/60), workers/100, 1)
	}
	return rollouts.of[workers]
}

// Until are the events up to a time.
func Until(events []plan.Event, d time.Duration) []plan.Event {
	i := slices.IndexFunc(events, func(e plan.Event) bool { return e.Time.After(Start.Add(d)) })
	if i < 0 {
		return events
	}
	return events[:i]
}

// WithPlans are the events of a rollout of a few nodes with Plans.
func WithPlans(t testing.TB) []plan.Event {
	at := Start.Add(69 * time.Second)
	p := func(name, state, version, text string, total, done int64, counts map[string]int64) plan.Event {
		return plan.Event{Time: at, Kind: plan.KindNodePlan, Object: name, State: state, Text: text, Total: total, Current: done, Counts: counts, Data: json.RawMessage(`{"version":"` + version + `"}`)}
	}
	alone := p("system-upgrade/k3s-server", cluster.PlanApplying, "v1.36.3-k3s1", "", 3, 1, map[string]int64{"done": 1, "applying": 1, "pending": 1})
	alone.Data = json.RawMessage(`{"version":"v1.36.3-k3s1","channel":"https://update.example.org/stable","alone":true}`)
	return append(slices.Clone(Until(RolloutOf(t, 5), 70*time.Second)),
		p("system-upgrade/os-patches", cluster.PlanComplete, "24.04", "", 8, 8, map[string]int64{"done": 8}),
		p("system-upgrade/k3s-agent", cluster.PlanWaiting, "v1.36.3-k3s1", "Plan k3s-server is not complete", 5, 0, map[string]int64{"pending": 5}),
		alone,
		plan.Event{Time: at, Kind: plan.KindNodePlan, Object: "system-upgrade/gone", State: cluster.PlanComplete},
		plan.Event{Time: at, Kind: plan.KindNodePlan, Object: "system-upgrade/gone", State: cluster.PlanGone},
	)
}

// Simulated returns the events of a watched rollout of workers and three control planes with
// a surge: first all nodes, then each replacement. It is deterministic for a seed. breaks is
// the number of machines that fail once and are retried.
func Simulated(t testing.TB, workers, surge, breaks int, seed uint64) []plan.Event {
	t.Helper()
	rnd := rand.New(rand.NewPCG(seed, 7))
	var out []plan.Event
	states := map[string]string{}
	counts := map[string]int64{}
	const controls = 3
	total := int64(workers + controls)
	reached := int64(0)
	add := func(at time.Duration, ev plan.Event) {
		ev.Seq, ev.Time, ev.Run = uint64(len(out)+1), Start.Add(at), "upgrade-20261121070501-1a2b3c4d"
		if ev.Kind != plan.KindHello && ev.Kind != plan.KindPlan && ev.Kind != plan.KindResult {
			ev.Step = plan.StepRollout
		}
		out = append(out, ev)
	}
	node := func(at time.Duration, name, with, to, text string) {
		group, role := "workers-"+string('a'+rune(len(name)%2)), ""
		if name[0] == 'c' {
			group, role = "control-plane", "control-plane"
		}
		if i := slices.Index([]string{"g"}, name[:1]); i >= 0 {
			group = "gpu"
		}
		from := states[name]
		add(at, plan.Event{Kind: plan.KindNode, Node: name, With: with, Role: role, Group: group, From: from, To: to, Text: text})
		if from != "" {
			counts[from]--
			if counts[from] == 0 {
				delete(counts, from)
			}
		}
		states[name] = to
		if to != plan.NodeGone {
			counts[to]++
		} else {
			delete(states, name)
		}
	}
	progress := func(at time.Duration) {
		c := map[string]int64{}
		for k, v := range counts {
			c[k] = v
		}
		ev := plan.Event{Kind: plan.KindProgress, Current: reached, Total: total, Counts: c}
		if reached > 2 {
			each := at / time.Duration(reached)
			ev.ETALeast, ev.ETAMost = Start.Add(at+each*time.Duration(total-reached)*4/5), Start.Add(at+each*time.Duration(total-reached)*3/2)
		}
		add(at, ev)
	}
	p := plan.Plan{
		ID: "upgrade-20261121070501-1a2b3c4d", Verb: plan.VerbApply, Cluster: "prod-eu", From: plan.Target{Kubernetes: "v1.35.4", Image: "v1.0.0"}, By: "ops@laptop", Surge: fmt.Sprint(surge),
		To: plan.Target{Release: "v1.1.0", Kubernetes: "v1.36.3", Image: "v1.1.0"},
		Steps: []plan.Step{
			{ID: "backup", Title: "Back up the cluster"},
			{ID: "components", Title: "Publish components", Finished: true},
			{ID: "set-target", Title: "Set the target of all nodes"},
			{ID: plan.StepRollout, Title: "Wait until all nodes are new"},
		},
	}
	data, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	add(0, plan.Event{Kind: plan.KindHello, Schema: plan.Schema, Tool: "constellation v1.1.0", Object: "prod-eu", By: "ops@laptop"})
	add(0, plan.Event{Kind: plan.KindPlan, From: p.From.String(), To: p.To.String(), Data: data})
	for i, id := range []string{"backup", "components", "set-target"} {
		at := time.Duration(i) * time.Second
		out = append(out, plan.Event{Seq: uint64(len(out) + 1), Time: Start.Add(at), Run: p.ID, Kind: plan.KindStep, Step: id, State: plan.StateDone, Text: "done", TookMS: 900})
	}
	add(3*time.Second, plan.Event{Kind: plan.KindStep, State: plan.StateRunning, Text: "Wait until all nodes are new"})
	type job struct{ oldNode, newNode string }
	var jobs []job
	for i := range controls {
		jobs = append(jobs, job{fmt.Sprintf("control-plane-%d", i), fmt.Sprintf("control-plane-%d", i+controls)})
	}
	for i := range workers {
		name := "worker-%04d"
		if i%10 == 9 {
			name = "gpu-%05d"
		}
		jobs = append(jobs, job{fmt.Sprintf(name, i), fmt.Sprintf(name, i+workers)})
	}
	for _, j := range jobs {
		node(4*time.Second, j.oldNode, "", plan.NodeOutdated, "")
	}
	progress(4 * time.Second)
	// Each surge slot takes the next node in turn. The events are collected first and then
	// sorted by time.
	type moment struct {
		at time.Duration
		do func(time.Duration)
	}
	var moments []moment
	free := make([]time.Duration, surge)
	for i := range free {
		free[i] = 5*time.Second + time.Duration(i)*700*time.Millisecond
	}
	var controlsEnd time.Duration
	for i, j := range jobs {
		k := 0
		for x := range free {
			if free[x] < free[k] {
				k = x
			}
		}
		if i < controls {
			k = 0
		}
		at := free[k]
		if i >= controls {
			at = max(at, controlsEnd)
		}
		step := func(d time.Duration, f func(time.Duration)) {
			moments = append(moments, moment{at, f})
			at += d
		}
		some := func(s float64) time.Duration {
			return time.Duration((0.6 + rnd.Float64()) * s * float64(time.Second))
		}
		step(0, func(at time.Duration) { node(at, j.oldNode, "", plan.NodeReplacing, "") })
		step(some(4), func(at time.Duration) { node(at, j.newNode, j.oldNode, plan.NodeCreating, "") })
		if i >= controls && breaks > 0 && (i-controls)%max(1, workers/breaks) == 0 {
			dead := j.newNode + "x"
			step(some(9), func(at time.Duration) {
				node(at, j.newNode, j.oldNode, plan.NodeGone, "")
				node(at, dead, j.oldNode, plan.NodeFailed, "attestation rejected: PCR 9 expected 3f1c… got 88a0…")
				add(at, plan.Event{Kind: plan.KindWait, Object: "rollout", State: "Postponed", Node: j.oldNode, Text: j.oldNode + " is postponed by 10m: its replacement node failed", Remedy: "`constellation upgrade pause` ends further attempts"})
			})
			step(some(20), func(at time.Duration) {
				node(at, dead, j.oldNode, plan.NodeGone, "")
				node(at, j.oldNode, "", plan.NodeOutdated, "")
				add(at, plan.Event{Kind: plan.KindWait})
			})
			step(0, func(at time.Duration) { node(at, j.oldNode, "", plan.NodeReplacing, "") })
			step(some(4), func(at time.Duration) { node(at, j.newNode, j.oldNode, plan.NodeCreating, "") })
		}
		step(some(10), func(at time.Duration) { node(at, j.newNode, j.oldNode, plan.NodeBooting, "") })
		step(some(3), func(at time.Duration) {
			node(at, j.newNode, j.oldNode, plan.NodeJoining, "attested")
			add(at, plan.Event{Kind: plan.KindLog, Source: "kubeadm", Node: j.newNode, Level: "info", Text: "[preflight] Running pre-flight checks"})
		})
		step(some(5), func(at time.Duration) {
			node(at, j.newNode, j.oldNode, plan.NodeNotReady, "container runtime network not ready")
		})
		step(some(1), func(at time.Duration) {
			node(at, j.newNode, j.oldNode, plan.NodeReady, "")
			add(at, plan.Event{Kind: plan.KindLog, Source: "operator", Node: "", Level: "info", Text: "node cordoned  node=" + j.oldNode})
		})
		step(some(25), func(at time.Duration) { node(at, j.oldNode, j.newNode, plan.NodeDraining, "evicting 4 pods") })
		step(some(3), func(at time.Duration) { node(at, j.oldNode, j.newNode, plan.NodeLeaving, "") })
		step(0, func(at time.Duration) { node(at, j.oldNode, j.newNode, plan.NodeGone, ""); reached++ })
		free[k] = at
		if i < controls {
			controlsEnd = at
		}
	}
	slices.SortStableFunc(moments, func(a, b moment) int { return int(a.at - b.at) })
	var end time.Duration
	for _, m := range moments {
		m.do(m.at)
		progress(m.at)
		end = m.at
	}
	exit := 0
	out = append(out, plan.Event{Seq: uint64(len(out) + 1), Time: Start.Add(end), Run: p.ID, Kind: plan.KindStep, Step: plan.StepRollout, State: plan.StateDone, Text: "all nodes are at the target", TookMS: end.Milliseconds()})
	add(end+time.Second, plan.Event{Kind: plan.KindResult, State: plan.StateDone, Text: "cluster prod-eu runs release v1.1.0", Exit: &exit, Data: json.RawMessage(`{"status":"done","took_ms":1}`)})
	return out
}

// streams are rollouts with hollow machines that TestRecordRollouts of the root package
// recorded, by name.
var streams = map[string][]plan.Event{}

// StreamNames are the names of StreamOf.
var StreamNames = []string{"5-good", "5-failed", "5-resumed", "500-good", "500-failed", "500-resumed", "5000-good", "5000-failed", "5000-resumed"}

// StreamOf returns the events of a recorded rollout, shifted to begin at Start. Times in texts
// are not shifted.
func StreamOf(t testing.TB, name string) []plan.Event {
	t.Helper()
	rollouts.Lock()
	defer rollouts.Unlock()
	if streams[name] != nil {
		return streams[name]
	}
	f, err := Data.Open("testdata/streams/rollout-" + name + ".jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var events []plan.Event
	bad, err := rollout.ReadRecord(z, func(e plan.Event) error { events = append(events, e); return nil })
	if err != nil || len(bad) > 0 || len(events) == 0 {
		t.Fatalf("%s: %d events, %v, %v", name, len(events), bad, err)
	}
	by := Start.Sub(events[0].Time)
	for i := range events {
		e := &events[i]
		e.Time = e.Time.Add(by)
		if !e.ETAMost.IsZero() {
			e.ETALeast, e.ETAMost = e.ETALeast.Add(by), e.ETAMost.Add(by)
		}
	}
	streams[name] = events
	return events
}
