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
	s := summarizer{v: newView(), last: map[string]time.Time{}, failed: map[string]bool{}, open: map[string]int{}}
	for i := range journal {
		if s.add(&journal[i]) {
			break
		}
	}
	return s.Summary
}

// summarizer has what a Summary needs of the entries so far.
type summarizer struct {
	Summary

	v       *view
	begin   time.Time            // zero: not yet
	upgrade time.Time            // when the agent's run began; zero: none is running
	last    map[string]time.Time // answer, by machine
	failed  map[string]bool      // machines whose latest request failed
	open    map[string]int       // indices of Replacements that are not over, by token
}

// add adds an entry and reports whether it is the last one.
func (s *summarizer) add(e *Entry) (ended bool) {
	was := s.v.target
	s.v.apply(e)
	if e.Fact == Begin {
		s.begin = e.Time
	}
	if s.begin.IsZero() {
		return false
	}
	switch f := e.Fact.(type) {
	case Mark:
		if f == End {
			s.Makespan = e.Time.Sub(s.begin)
			return true
		}
	case *Target:
		if was != nil && (was.Components != f.Components || was.Image != f.Image) {
			s.begin = e.Time
		}
		s.addRun(e.Time)
	case *Machines:
		s.Machines = max(s.Machines, len(s.v.machines))
	case *Pending:
		s.addPending(e.Time, f)
	case *Node:
		s.addNode(e.Time, f)
	case *Probe:
		s.addProbe(e.Time, f)
	}
	return false
}

// addRun adds the time that the agent's run took, if it has ended.
func (s *summarizer) addRun(now time.Time) {
	switch running := s.v.upgrading(); {
	case running && s.upgrade.IsZero():
		s.upgrade = now
	case !running && !s.upgrade.IsZero():
		s.Upgrade += now.Sub(s.upgrade)
		s.upgrade = time.Time{}
	}
}

// addPending begins or ends a replacement.
func (s *summarizer) addPending(now time.Time, p *Pending) {
	r, open := s.open[p.key()]
	switch {
	case p.Gone && open:
		s.Replacements[r].Over = now.Sub(s.Replacements[r].Begun)
		delete(s.open, p.key())
	case !p.Gone && !open && (p.Donor != "" && p.Token != "" || p.Goal == "Upgrade"):
		s.open[p.key()] = len(s.Replacements)
		s.Replacements = append(s.Replacements, Replacement{Donor: cmp.Or(p.Donor, p.Node), InPlace: p.Goal == "Upgrade", Begun: now})
	}
}

// addNode records how far the replacements are that n takes part in.
func (s *summarizer) addNode(now time.Time, n *Node) {
	for i := range s.Replacements {
		r := &s.Replacements[i]
		since := now.Sub(r.Begun)
		if r.Over == 0 && n.Donor == r.Donor && n.Ready && !n.Gone {
			r.Heir, r.Joined = n.Name, cmp.Or(r.Joined, since)
		}
		if n.Name == r.Donor && n.CordonedByUs {
			r.Cordoned = cmp.Or(r.Cordoned, since)
		}
	}
}

// addProbe counts a request to the API server, or to a service from a node that is Ready and stays.
func (s *summarizer) addProbe(now time.Time, p *Probe) {
	a := &s.Services
	if p.From == "" {
		a = &s.API
	} else if n, ok := s.v.nodes[p.From]; !ok || !n.Ready || s.v.leaves(n.ProviderID) || s.last[p.From].IsZero() && p.Err != "" {
		return // services need not answer it yet, or any more
	}
	a.Asked++
	if p.Err != "" {
		a.Failed++
		s.failed[p.From] = true
		return
	}
	if s.failed[p.From] {
		a.Gap = max(a.Gap, now.Sub(s.last[p.From]))
	}
	s.last[p.From], s.failed[p.From] = now, false
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
