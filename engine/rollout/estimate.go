package rollout

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/words"
)

// Assumptions without recorded runs. The ranges are wide on purpose: clouds differ, and a hop
// that exceeds its estimate is worse than one that does not.
var (
	assumedBoot   = Interval{20 * time.Second, 4 * time.Minute} // from the order to a machine that joins
	assumedJoin   = Interval{5 * time.Second, time.Minute}      // from there to a Ready node
	assumedDrain  = Interval{time.Second, 2 * time.Minute}      // of one node
	assumedCharts = Interval{10 * time.Second, 5 * time.Minute}
	// In-place upgrade of a drained node: binaries come from the mirror, kubeadm writes
	// configuration, the kubelet is restarted. A worker took 15 s in measurements; a control
	// plane also replaces its static pods.
	assumedInPlace = Interval{10 * time.Second, 5 * time.Minute}
	// kubeadm upgrades one control plane in place, once per hop; the others are replaced.
	// With one control plane it was measured to take 3m5s, the time without an API server
	// included; images may have to be pulled from far, and one run may take ten minutes.
	assumedKubeadm = Interval{90 * time.Second, 10 * time.Minute}
)

// recordedRuns is how many of the newest runs are looked at.
const recordedRuns = 10

// Interval is the least and the most that something takes.
type Interval struct{ Least, Most time.Duration }

func (i Interval) add(o Interval) Interval { return Interval{i.Least + o.Least, i.Most + o.Most} }

func (i Interval) times(n int) Interval {
	return Interval{i.Least * time.Duration(n), i.Most * time.Duration(n)}
}

// String is "2s-1m30s".
func (i Interval) String() string { return roughly(i.Least) + "-" + roughly(i.Most) }

// roughly writes a duration with no more digits than an estimate deserves.
func roughly(d time.Duration) string {
	switch {
	case d >= time.Hour:
		d = d.Round(5 * time.Minute)
	case d >= 10*time.Minute:
		d = d.Round(time.Minute)
	case d >= time.Second:
		d = d.Round(time.Second)
	default:
		d = d.Round(100 * time.Millisecond)
	}
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// beyond returns what samples say about the next one: a little beyond the least and the
// most of them, since few samples have not seen everything.
func beyond(samples []time.Duration) Interval {
	return Interval{slices.Min(samples) * 4 / 5, slices.Max(samples) * 3 / 2}
}

// History is how long things took in the recorded runs of a workspace.
type History struct {
	boot   []time.Duration // of machines, from the order to Ready
	join   []time.Duration // of machines whose boot was not seen, from joining to Ready
	drain  []time.Duration // of nodes, until their machines are gone
	kept   []time.Duration // of workers upgraded in place, from the cordon to Ready
	charts []time.Duration
	runs   int // that had any of it
}

// ReadHistory reads the newest runs recorded in dir. It skips unreadable runs, which only
// makes the estimate rougher.
func ReadHistory(dir string) History {
	var x History
	entries, err := os.ReadDir(dir)
	if err != nil {
		return x
	}
	type record struct {
		path string
		at   time.Time
	}
	var all []record
	for _, entry := range entries {
		path := filepath.Join(dir, entry.Name(), plan.EventsFile)
		if info, err := os.Stat(path); err == nil {
			all = append(all, record{path, info.ModTime()})
		}
	}
	slices.SortFunc(all, func(a, b record) int { return b.at.Compare(a.at) })
	for _, r := range all[:min(len(all), recordedRuns)] {
		before := len(x.boot) + len(x.join) + len(x.kept) + len(x.charts)
		x.read(r.path)
		if len(x.boot)+len(x.join)+len(x.kept)+len(x.charts) > before {
			x.runs++
		}
	}
	return x
}

// read adds what one record of events tells.
func (x *History) read(path string) {
	f, err := os.Open(path)
	if err != nil {
		return
	}
	defer f.Close()
	began := stageTimes{}
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Bytes()
		if !bytes.Contains(line, []byte(`"kind":"node"`)) && !bytes.Contains(line, []byte(`"step":"`+plan.StepCharts+`"`)) {
			continue
		}
		var e plan.Event
		if json.Unmarshal(line, &e) != nil {
			continue // cut off by a crash
		}
		switch {
		case e.Kind == plan.KindStep && e.Step == plan.StepCharts && e.State == plan.StateDone && e.TookMS > 0:
			x.charts = append(x.charts, time.Duration(e.TookMS)*time.Millisecond)
		case e.Kind == plan.KindNode:
			x.add(&e, began)
		}
	}
}

// A stage of a node's rollout whose duration is recorded.
type stageName string

const (
	ordered  stageName = "ordered"
	joined   stageName = "joined"
	drained  stageName = "drained"
	upgraded stageName = "upgraded"
)

// stageTimes are the times at which the stages of nodes began, by node.
type stageTimes map[string]map[stageName]time.Time

// begin records that a stage of e's node begins at t, unless it has begun before.
func (s stageTimes) begin(e *plan.Event, of stageName, t time.Time) {
	node := s[e.Node]
	if node == nil {
		node = map[stageName]time.Time{}
		s[e.Node] = node
	}
	if _, ok := node[of]; !ok {
		node[of] = t
	}
}

// since returns the time from the beginning of a stage until e, and whether it is known.
func (s stageTimes) since(e *plan.Event, of stageName) (time.Duration, bool) {
	at, ok := s[e.Node][of]
	return e.Time.Sub(at), ok && e.Time.After(at)
}

// add adds the duration of each stage that a node's event ends.
func (x *History) add(e *plan.Event, began stageTimes) {
	switch e.To {
	case plan.NodeCreating, plan.NodeBooting:
		began.begin(e, ordered, e.Time)
	case plan.NodeJoining:
		began.begin(e, joined, e.Time)
	case plan.NodeDraining:
		if e.From != "" {
			began.begin(e, drained, e.Time)
		}
	case plan.NodeUpgrading:
		if e.From == "" {
			return
		}
		at := e.Time
		if drain, ok := began[e.Node][drained]; ok {
			at = drain // an upgrade in place includes its drain
		}
		began.begin(e, upgraded, at)
	case plan.NodeReady:
		if took, ok := began.since(e, ordered); ok {
			x.boot = append(x.boot, took)
		} else if took, ok := began.since(e, joined); ok {
			x.join = append(x.join, took)
		}
		if took, ok := began.since(e, upgraded); ok && e.Role != cluster.ControlPlaneRole {
			x.kept = append(x.kept, took)
		}
		delete(began, e.Node)
	case plan.NodeGone, plan.NodeFailed:
		if took, ok := began.since(e, drained); ok && e.To == plan.NodeGone {
			x.drain = append(x.drain, took)
		}
		delete(began, e.Node)
	}
}

// Estimate says how long a hop takes that replaces so many nodes, and upgrades so many in
// place, one after the other, after it has brought Kubernetes to another version if
// kubernetes is set, and where that comes from.
func (x History) Estimate(replaced, kept int, kubernetes bool) (whole Interval, basis string) {
	var parts []string
	whole = assumedCharts
	charts := "assumed"
	if len(x.charts) > 0 {
		whole, charts = beyond(x.charts), "recorded"
	}
	parts = append(parts, fmt.Sprintf("services %s (%s)", whole, charts))
	if kubernetes {
		whole = whole.add(assumedKubeadm)
		parts = append(parts, fmt.Sprintf("kubeadm on one control plane %s (assumed)", assumedKubeadm))
	}
	if replaced > 0 {
		var machine Interval
		var from string
		switch {
		case len(x.boot) > 0:
			machine = beyond(x.boot)
			from = fmt.Sprintf("from boot to Ready, %d recorded", len(x.boot))
		case len(x.join) > 0:
			machine = assumedBoot.add(beyond(x.join))
			from = fmt.Sprintf("boot %s assumed, join %s of %d recorded", assumedBoot, beyond(x.join), len(x.join))
		default:
			machine = assumedBoot.add(assumedJoin)
			from = "assumed: none was recorded"
		}
		drain, known := assumedDrain, "assumed"
		if len(x.drain) > 0 {
			drain, known = beyond(x.drain), fmt.Sprintf("%d recorded", len(x.drain))
		}
		whole = whole.add(machine.add(drain).times(replaced))
		how := "one machine,"
		if replaced > 1 {
			how = fmt.Sprintf("%d machines one after the other, each", replaced)
		}
		parts = append(parts, fmt.Sprintf("%s %s (%s) and %s for draining (%s)", how, machine, from, drain, known))
	}
	if kept > 0 {
		each, known := assumedInPlace.add(assumedDrain), "assumed"
		if len(x.kept) > 0 {
			each, known = beyond(x.kept), fmt.Sprintf("%d recorded", len(x.kept))
		}
		whole = whole.add(each.times(kept))
		parts = append(parts, fmt.Sprintf("%s in place one after the other, each %s with draining (%s)", words.Count(kept, "node"), each, known))
	}
	if x.runs > 0 {
		return whole, fmt.Sprintf("%s recorded in %s: %s", words.Count(x.runs, "run"), plan.RunsDir, strings.Join(parts, "; "))
	}
	return whole, "no run is recorded in this workspace: " + strings.Join(parts, "; ")
}

// Estimate says when a rollout will be over, from how it goes and from how earlier ones
// went. It is used from one place at a time, but for look.
type Estimate struct {
	board Board
	past  History

	mu    sync.Mutex
	held  bool // nothing goes on until somebody does something
	surge int
	kept  int // nodes that are left and are upgraded in place
	to    cluster.NodeTarget
}

// NewEstimate returns an estimate that starts from the durations of past rollouts.
func NewEstimate(past History) *Estimate { return &Estimate{past: past, surge: 1} }

// Look adds an observation of the rollout.
func (o *Estimate) Look(v *View) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.held = v.Stalled || v.Target.Paused || v.Target.Cancelled || !v.Observed
	o.surge, o.kept = surgeOf(v.Target.MaxSurge, int(v.Total)), int(v.Machines.kept)
	if !v.Target.Same(o.to) { // the pace of one rollout says little about the next
		o.to, o.board.ended, o.board.worked = v.Target, recently{}, time.Time{}
	}
}

// surgeOf is how many machines there may be beyond the wanted number: of "2" two, of "10%"
// a tenth of all.
func surgeOf(s string, nodes int) int {
	n, err := strconv.Atoi(strings.TrimSuffix(s, "%"))
	switch {
	case err != nil || n < 1:
		return 1
	case strings.HasSuffix(s, "%"):
		return max(1, (nodes*n+99)/100)
	}
	return n
}

// Complete adds an event, and sets the estimated end of the rollout on events that report its
// progress.
func (o *Estimate) Complete(e *plan.Event) {
	switch {
	case e.Kind == plan.KindNode:
		o.board.Apply(*e)
	case e.Kind == plan.KindProgress && len(e.Counts) > 0 && e.Object == "":
		e.ETALeast, e.ETAMost = o.over(e.Time)
	}
}

// enough is how many nodes must have been replaced until their pace says more than the
// record of earlier rollouts.
const enough = 3

// over returns the estimated range of the rollout's end; zero if unknown.
func (o *Estimate) over(now time.Time) (least, most time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	done, total := o.board.Places()
	left := total - done
	if left <= 0 || o.held {
		return time.Time{}, time.Time{}
	}
	var i Interval
	switch n := o.board.ended.total; {
	case n >= enough:
		// The pace of all the time and that of the last minutes, and less trust in few.
		whole := now.Sub(o.board.worked) / time.Duration(n)
		i = Interval{whole, whole}
		if lately := o.board.ended.over(now, flowOver); lately > 0 && now.Sub(o.board.worked) > flowOver {
			each := flowOver / time.Duration(lately)
			i = Interval{min(whole, each), max(whole, each)}
		}
		i = i.times(left)
		doubt := min(0.5, 1/math.Sqrt(float64(n)))
		i.Least -= time.Duration(float64(i.Least) * doubt)
		i.Most += time.Duration(float64(i.Most) * doubt)
	default:
		// One node after another in place takes other times than one that is replaced.
		kept := min(left, o.kept)
		replaced := left - kept
		if replaced > 0 && (len(o.past.boot) == 0 || len(o.past.drain) == 0) || kept > 0 && len(o.past.kept) == 0 {
			return time.Time{}, time.Time{}
		}
		if replaced > 0 {
			i = beyond(o.past.boot).add(beyond(o.past.drain)).times((replaced + o.surge - 1) / o.surge)
		}
		if kept > 0 {
			i = i.add(beyond(o.past.kept).times((kept + o.surge - 1) / o.surge))
		}
	}
	// Seconds would promise more than anybody knows.
	return now.Add(i.Least).Truncate(time.Second), now.Add(i.Most).Truncate(time.Second)
}
