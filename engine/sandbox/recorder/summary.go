package recorder

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Summary has the durations of the parts of a rollout.
type Summary struct {
	// Makespan is from the first entry of a new target, or Begin, to End.
	Makespan time.Duration
	// Upgrade is the duration of the agent's reported run; zero: there was none.
	Upgrade time.Duration
	// Replacements are in order of their start.
	Replacements []Replacement
	// Machines is the maximum number of machines at a time.
	Machines int
	// API counts the answers of the API server; Services those of a service to all
	// machines while they were Ready nodes.
	API, Services Answers
}

// Replacement is the replacement of a node by another, or its upgrade in place: then it has
// no replacement node. Durations are from Begun.
type Replacement struct {
	Donor, Heir string
	InPlace     bool
	Begun       time.Time
	// Joined is until the replacement node was Ready, Cordoned until the old node was, Over until the
	// intent was cleared. Zero: it did not happen.
	Joined, Cordoned, Over time.Duration
}

// Answers counts requests.
type Answers struct {
	Asked, Failed int
	// Gap is the longest time between two answers to the same machine, if there
	// were failures in between.
	Gap time.Duration
}

// Summarize evaluates the entries between Begin and End.
func Summarize(journal []Entry) Summary {
	var (
		s       Summary
		v       = newView()
		begin   time.Time
		upgrade time.Time
		last    = map[string]time.Time{} // answer, by machine
		failed  = map[string]bool{}
		open    = map[string]int{} // token to index
	)
	for i := range journal {
		e := &journal[i]
		was := v.target
		v.apply(e)
		if e.Mark == Begin {
			begin = e.Time
		}
		if begin.IsZero() {
			continue
		}
		switch {
		case e.Mark == End:
			s.Makespan = e.Time.Sub(begin)
			return s
		case e.Target != nil:
			if was != nil && (was.Components != e.Target.Components || was.Image != e.Target.Image) {
				begin = e.Time
			}
			if v.upgrading() && upgrade.IsZero() {
				upgrade = e.Time
			} else if !v.upgrading() && !upgrade.IsZero() {
				s.Upgrade += e.Time.Sub(upgrade)
				upgrade = time.Time{}
			}
		case e.Machines != nil:
			s.Machines = max(s.Machines, len(v.machines))
		case e.Pending != nil && !e.Pending.Gone && (e.Pending.Donor != "" && e.Pending.Token != "" || e.Pending.Goal == "Upgrade"):
			if _, ok := open[e.Pending.key()]; !ok {
				open[e.Pending.key()] = len(s.Replacements)
				s.Replacements = append(s.Replacements, Replacement{Donor: cmp.Or(e.Pending.Donor, e.Pending.Node), InPlace: e.Pending.Goal == "Upgrade", Begun: e.Time})
			}
		case e.Pending != nil && e.Pending.Gone:
			if r, ok := open[e.Pending.key()]; ok {
				s.Replacements[r].Over = e.Time.Sub(s.Replacements[r].Begun)
				delete(open, e.Pending.key())
			}
		case e.Node != nil:
			for i := range s.Replacements {
				r := &s.Replacements[i]
				since := e.Time.Sub(r.Begun)
				if r.Over == 0 && e.Node.Donor == r.Donor && e.Node.Ready && !e.Node.Gone {
					r.Heir, r.Joined = e.Node.Name, cmp.Or(r.Joined, since)
				}
				if e.Node.Name == r.Donor && e.Node.CordonedByUs {
					r.Cordoned = cmp.Or(r.Cordoned, since)
				}
			}
		case e.Probe != nil:
			a := &s.Services
			if e.Probe.From == "" {
				a = &s.API
			} else if n, ok := v.nodes[e.Probe.From]; !ok || !n.Ready || v.leaves(n.ProviderID) || last[e.Probe.From].IsZero() && e.Probe.Err != "" {
				continue // services need not answer it yet, or any more
			}
			a.Asked++
			if e.Probe.Err != "" {
				a.Failed++
				failed[e.Probe.From] = true
				continue
			}
			if failed[e.Probe.From] {
				a.Gap = max(a.Gap, e.Time.Sub(last[e.Probe.From]))
			}
			last[e.Probe.From], failed[e.Probe.From] = e.Time, false
		}
	}
	return s
}

// String formats the summary for users, in several lines.
func (s Summary) String() string {
	var b strings.Builder
	round := func(d time.Duration) time.Duration { return d.Round(100 * time.Millisecond) }
	fmt.Fprintf(&b, "makespan %v, agent's run %v, at most %d machines\n", round(s.Makespan), round(s.Upgrade), s.Machines)
	for _, r := range s.Replacements {
		if r.InPlace {
			fmt.Fprintf(&b, "%s in place: cordoned %v, over %v\n", r.Donor, round(r.Cordoned), round(r.Over))
			continue
		}
		fmt.Fprintf(&b, "%s → %s: new node Ready after %v, old node cordoned %v, over %v\n", r.Donor, cmp.Or(r.Heir, "?"), round(r.Joined), round(r.Cordoned), round(r.Over))
	}
	slowest := slices.MaxFunc(append(slices.Clone(s.Replacements), Replacement{}), func(a, b Replacement) int { return cmp.Compare(a.Over, b.Over) })
	fmt.Fprintf(&b, "slowest replacement %v\n", round(slowest.Over))
	fmt.Fprintf(&b, "API server: %d of %d requests failed, longest gap %v\n", s.API.Failed, s.API.Asked, round(s.API.Gap))
	fmt.Fprintf(&b, "services: %d of %d requests failed, longest gap %v", s.Services.Failed, s.Services.Asked, round(s.Services.Gap))
	return b.String()
}
