package engine

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// What is assumed where nothing was recorded. The ranges are wide on purpose: clouds
// differ, and a hop that takes longer than it was said to is worse than one that does not.
var (
	assumedBoot   = interval{20 * time.Second, 4 * time.Minute} // from the order to a machine that joins
	assumedJoin   = interval{5 * time.Second, time.Minute}      // from there to a Ready node
	assumedDrain  = interval{time.Second, 2 * time.Minute}      // of one node
	assumedCharts = interval{10 * time.Second, 5 * time.Minute}
	// kubeadm upgrades one control plane in place, once per hop; the others are replaced.
	// With one control plane it was measured to take 3m5s, the time without an API server
	// included; images may have to be pulled from far, and one run may take ten minutes.
	assumedKubeadm = interval{90 * time.Second, 10 * time.Minute}
)

// recordedRuns is how many of the newest runs are looked at.
const recordedRuns = 10

// interval is the least and the most that something takes.
type interval struct{ least, most time.Duration }

func (i interval) add(o interval) interval { return interval{i.least + o.least, i.most + o.most} }

func (i interval) times(n int) interval {
	return interval{i.least * time.Duration(n), i.most * time.Duration(n)}
}

// String is "2s-1m30s".
func (i interval) String() string { return roughly(i.least) + "-" + roughly(i.most) }

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
func beyond(samples []time.Duration) interval {
	return interval{slices.Min(samples) * 4 / 5, slices.Max(samples) * 3 / 2}
}

// experience is how long things took in the recorded runs of a workspace.
type experience struct {
	boot   []time.Duration // of machines, from the order to Ready
	join   []time.Duration // of machines whose boot was not seen, from joining to Ready
	charts []time.Duration
	runs   int // that had any of it
}

// learn reads the newest runs of the workspace. What cannot be read is left out: it
// only makes the estimate rougher.
func (w *Workspace) learn() experience {
	var x experience
	dir := w.Path(RunsDir)
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
		path := filepath.Join(dir, entry.Name(), eventsFile)
		if info, err := os.Stat(path); err == nil {
			all = append(all, record{path, info.ModTime()})
		}
	}
	slices.SortFunc(all, func(a, b record) int { return b.at.Compare(a.at) })
	for _, r := range all[:min(len(all), recordedRuns)] {
		before := len(x.boot) + len(x.join) + len(x.charts)
		x.read(r.path)
		if len(x.boot)+len(x.join)+len(x.charts) > before {
			x.runs++
		}
	}
	return x
}

// read adds what one record of events tells.
func (x *experience) read(path string) {
	f, err := os.Open(path)
	if err != nil {
		return
	}
	defer f.Close()
	ordered, joined := map[string]time.Time{}, map[string]time.Time{}
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Bytes()
		if !bytes.Contains(line, []byte(`"kind":"node"`)) && !bytes.Contains(line, []byte(`"step":"`+StepCharts+`"`)) {
			continue
		}
		var e Event
		if json.Unmarshal(line, &e) != nil {
			continue // cut off by a crash
		}
		switch {
		case e.Kind == KindStep && e.Step == StepCharts && e.State == StateDone && e.TookMS > 0:
			x.charts = append(x.charts, time.Duration(e.TookMS)*time.Millisecond)
		case e.Kind != KindNode:
		case e.To == NodeCreating || e.To == NodeBooting:
			if _, ok := ordered[e.Node]; !ok {
				ordered[e.Node] = e.Time
			}
		case e.To == NodeJoining:
			if _, ok := joined[e.Node]; !ok {
				joined[e.Node] = e.Time
			}
		case e.To == NodeReady:
			if at, ok := ordered[e.Node]; ok && e.Time.After(at) {
				x.boot = append(x.boot, e.Time.Sub(at))
			} else if at, ok := joined[e.Node]; ok && e.Time.After(at) {
				x.join = append(x.join, e.Time.Sub(at))
			}
			delete(ordered, e.Node)
			delete(joined, e.Node)
		case e.To == NodeGone || e.To == NodeFailed:
			delete(ordered, e.Node)
			delete(joined, e.Node)
		}
	}
}

// estimate says how long a hop takes that replaces so many nodes, one after the other,
// after it has brought Kubernetes to another version if kubernetes is set, and where that
// comes from.
func (x experience) estimate(replaced int, kubernetes bool) (whole interval, basis string) {
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
		var machine interval
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
		whole = whole.add(machine.add(assumedDrain).times(replaced))
		parts = append(parts, fmt.Sprintf("%d machine(s) one after the other, each %s (%s) and %s for draining (assumed)", replaced, machine, from, assumedDrain))
	}
	if x.runs > 0 {
		return whole, fmt.Sprintf("%d run(s) recorded in %s: %s", x.runs, RunsDir, strings.Join(parts, "; "))
	}
	return whole, "no run is recorded in this workspace: " + strings.Join(parts, "; ")
}
