// Package benchmark compares a cluster with the CIS Kubernetes Benchmark and the NSA/CISA Kubernetes
// Hardening Guide.
//
// It hides how evidence is read: one list per kind, command lines of static pods from their mirror pods,
// and the configuration of kubelets through the API server. Each check is a row of a table: what should
// be so, in words of our own, where the guides ask for it, and a pure function of what was read.
//
// The package changes nothing. What it cannot read is never reported as passed: the result is then not
// visible, with the reason.
package benchmark

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/rest"

	"constellation/engine/check"
	"constellation/engine/distribution"
	"constellation/engine/kube/preflight"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/words"
)

// Guides are the sources of the checks.
func Guides() []check.Guide {
	return []check.Guide{
		{ID: "cis", Title: "CIS Kubernetes Benchmark", Version: "1.12", URL: "https://www.cisecurity.org/benchmark/kubernetes"},
		{ID: "nsa", Title: "NSA/CISA Kubernetes Hardening Guide", Version: "1.2", URL: "https://media.defense.gov/2022/Aug/29/2003066362/-1/-1/0/CTR_KUBERNETES_HARDENING_GUIDANCE_1.2_20220829.PDF"},
	}
}

// Parts of the NSA/CISA guide.
const (
	guidePods    = "Pod security"
	guideNetwork = "Network separation and hardening"
	guideAccess  = "Authentication and authorization"
	guideAudit   = "Audit logging and threat detection"
	guideUpgrade = "Upgrading and application security practices"
)

// section is a part of the list of checks.
type section struct {
	title string
	items []item
}

// item is a check.
type item struct {
	// number is that of CIS. A check of the NSA/CISA guide alone has an id instead.
	number, id string
	// nsa is the part of the NSA/CISA guide that asks for it; often empty.
	nsa   string
	level int
	// manual: a person decides.
	manual bool

	title, looks, remedy, command string

	needs []source
	// judge decides by what was read. Without it, nothing of the check is visible through the API.
	judge func(*facts) verdict
}

// verdict is the result of a check.
type verdict struct {
	status   check.SecurityStatus
	reason   string
	evidence []check.Evidence
}

// sections are all checks, in the order of the output.
func sections() []section {
	return slices.Concat(controlPlaneSections(), etcdSections(), configurationSections(), nodeSections(), policySections(), guideSections())
}

// Checks returns all checks.
func Checks() (out []check.SecurityCheck) {
	for _, s := range sections() {
		for i := range s.items {
			out = append(out, s.items[i].check(s.title))
		}
	}
	return out
}

// check returns what the check demands.
func (c *item) check(section string) check.SecurityCheck {
	out := check.SecurityCheck{
		ID: "nsa-" + c.id, Section: section, Title: c.title, Level: c.level, Automated: !c.manual && c.judge != nil, LooksAt: c.looks, Remedy: c.remedy, Command: c.command,
	}
	if c.number != "" {
		out.ID = "cis-" + c.number
		out.Sources = append(out.Sources, "CIS "+c.number)
	}
	if c.nsa != "" {
		out.Sources = append(out.Sources, "NSA/CISA "+c.nsa)
	}
	return out
}

// run returns the result of the check.
func (c *item) run(section string, f *facts) check.SecurityResult {
	out := check.SecurityResult{SecurityCheck: c.check(section)}
	for _, s := range c.needs {
		if why, unread := f.unread[s]; unread {
			out.Status, out.Reason = check.SecurityNotVisible, why
			return out
		}
	}
	switch {
	case c.judge != nil:
		v := c.judge(f)
		out.Status, out.Reason, out.Evidence = v.status, v.reason, v.evidence
		if c.manual && (v.status == check.SecurityPassed || v.status == check.SecurityFailed) {
			out.Status = check.SecurityManual
		}
	case c.manual:
		out.Status = check.SecurityManual
	default:
		out.Status, out.Reason = check.SecurityNotVisible, hiddenFiles
	}
	return out
}

// hiddenFiles is why checks of files have no result.
const hiddenFiles = "the API does not show files of machines: check manually with the command"

// Request describes a run.
type Request struct {
	Version      version.Version
	Distribution distribution.Distribution
	// Only is the ID of the one check to run; empty: all.
	Only string
}

// Run compares the cluster of config with the guides. It fills in results, counts and the numbers of
// nodes and workloads. emit gets an event for each kind of object before it is read, and one afterwards.
// Calls do not overlap. The error is the context's.
func Run(ctx context.Context, config *rest.Config, r Request, emit func(plan.Event)) (out check.Security, err error) {
	var wanted []source
	all := sections()
	for _, s := range all {
		for i := range s.items {
			if c := &s.items[i]; r.Only == "" || c.check("").ID == r.Only {
				wanted = append(wanted, c.needs...)
			}
		}
	}
	slices.Sort(wanted)
	f, err := collect(ctx, config, r, slices.Compact(wanted), emit)
	if err != nil {
		return out, err
	}
	out = check.Security{Guides: Guides(), Counts: map[check.SecurityStatus]int{}, Results: []check.SecurityResult{}, Nodes: len(f.nodes), Workloads: len(f.workloads)}
	for _, s := range check.SecurityStatuses {
		out.Counts[s] = 0
	}
	for _, s := range all {
		for i := range s.items {
			if id := s.items[i].check("").ID; r.Only != "" && id != r.Only {
				continue
			}
			result := s.items[i].run(s.title, f)
			out.Counts[result.Status]++
			out.Results = append(out.Results, result)
		}
	}
	return out, nil
}

// Rights are the permissions of a complete run.
func Rights() (out []preflight.Right) {
	for _, list := range rightsOf {
		for _, r := range list {
			if !slices.Contains(out, r) {
				out = append(out, r)
			}
		}
	}
	slices.SortFunc(out, func(a, b preflight.Right) int {
		return cmp.Or(cmp.Compare(a.URL, b.URL), cmp.Compare(a.Group, b.Group), cmp.Compare(a.Resource, b.Resource))
	})
	return out
}

// maxObjects is the number of objects that evidence has.
const maxObjects = 300

// tally groups objects by what was seen of them.
type tally struct {
	seen map[string]*group
	// hidden is why something was not visible, with the objects.
	hidden map[string][]string
}

type group struct {
	wrong   bool
	objects []string
}

// add notes what was seen of an object; an empty object is the cluster.
func (t *tally) add(s state, text, object string) {
	if s == hidden {
		if t.hidden == nil {
			t.hidden = map[string][]string{}
		}
		t.hidden[text] = append(t.hidden[text], object)
		return
	}
	if t.seen == nil {
		t.seen = map[string]*group{}
	}
	g := t.seen[text]
	if g == nil {
		g = &group{}
		t.seen[text] = g
	}
	g.wrong = g.wrong || s == bad
	if object != "" {
		g.objects = append(g.objects, object)
	}
}

// verdict is failed if anything is wrong, and passed only if all was seen. fine is the evidence if
// nothing was seen at all.
func (t *tally) verdict(fine string) verdict {
	v := verdict{status: check.SecurityPassed}
	for text, g := range t.seen {
		if g.wrong {
			v.status = check.SecurityFailed
		}
		v.evidence = append(v.evidence, evidenceOf(text, g.wrong, g.objects))
	}
	for why, objects := range t.hidden {
		if v.status == check.SecurityPassed {
			v.status = check.SecurityNotVisible
		}
		e := evidenceOf(why, false, objects)
		if v.reason = cmp.Or(v.reason, e.String()); e.String() < v.reason {
			v.reason = e.String()
		}
	}
	if v.status != check.SecurityNotVisible {
		v.reason = ""
		for why, objects := range t.hidden {
			v.evidence = append(v.evidence, evidenceOf("not visible: "+why, false, objects))
		}
	}
	if len(v.evidence) == 0 && fine != "" && v.status == check.SecurityPassed {
		v.evidence = []check.Evidence{{Text: fine}}
	}
	slices.SortFunc(v.evidence, func(a, b check.Evidence) int {
		if a.Wrong != b.Wrong {
			if a.Wrong {
				return -1
			}
			return 1
		}
		return cmp.Or(strings.Compare(a.Text, b.Text), strings.Compare(a.Names(1), b.Names(1)))
	})
	return v
}

// evidenceOf returns evidence with sorted objects.
func evidenceOf(text string, wrong bool, objects []string) check.Evidence {
	objects = slices.DeleteFunc(slices.Clone(objects), func(o string) bool { return o == "" })
	slices.Sort(objects)
	objects = slices.Compact(objects)
	e := check.Evidence{Text: text, Wrong: wrong, Objects: objects}
	if n := len(objects); n > maxObjects {
		e.Objects, e.More = objects[:maxObjects:maxObjects], n-maxObjects
	}
	return e
}

// notVisible is the verdict of what could not be seen.
func notVisible(why string) verdict {
	return verdict{status: check.SecurityNotVisible, reason: why}
}

// notApplicable is the verdict if the cluster does not have what a check is about.
func notApplicable(why string) verdict {
	return verdict{status: check.SecurityNotApplicable, reason: why}
}

// state is what was seen of one object.
type state int

const (
	good state = iota
	bad
	hidden
)

// goodIf is good if ok, else bad.
func goodIf(ok bool) state {
	if ok {
		return good
	}
	return bad
}

// reading is the event that a kind of objects is read, or was.
func reading(s source, state string) plan.Event {
	return plan.Event{Time: time.Now(), Kind: plan.KindCheck, Object: "security-" + string(s), State: state, Text: "read " + names[s]}
}

// denied is why a source is not visible without rights.
func denied(rights []preflight.Right) string {
	var list []string
	for i := 0; i < len(rights); {
		r := rights[i]
		var resources []string
		for ; i < len(rights) && rights[i].Verb == r.Verb && rights[i].Group == r.Group; i++ {
			resources = append(resources, rights[i].Resource)
		}
		what := r.Verb + " " + words.And(resources)
		if r.Group != "" {
			what += " of " + r.Group
		}
		list = append(list, what)
	}
	return "it needs the right to " + words.And(list) + ", which the user lacks"
}

// Missing returns the rights that a run needed and did not have. sent and refused are those of its
// requests; after a refused request, later ones of the same source are not sent.
func Missing(sent, refused []preflight.Right) (out []preflight.Right) {
	for _, list := range rightsOf {
		if !slices.ContainsFunc(list, func(r preflight.Right) bool { return slices.Contains(refused, r) }) {
			continue
		}
		for _, r := range list {
			has := slices.Contains(sent, r) && !slices.Contains(refused, r)
			if !has && !slices.Contains(out, r) {
				out = append(out, r)
			}
		}
	}
	return out
}
