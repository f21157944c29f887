package preflight

import (
	"slices"

	admissionv1 "k8s.io/api/admissionregistration/v1"

	"constellation/engine/version"
)

// Removal is a version of an API that a minor of Kubernetes no longer serves.
type Removal struct {
	Group, Version, Resource, Kind string
	// Minor is the first minor of v1 without it.
	Minor int
	// Remedy is what to do about a client that uses it.
	Remedy string
}

// Removals returns all known removals, in the order of the minors. who, the client that must
// change, is named in the remedies.
func Removals(who string) (out []Removal) {
	for _, a := range knownRemovals() {
		r := a.resource
		out = append(out, Removal{Group: r.Group, Version: r.Version, Resource: r.Resource, Kind: a.kind, Minor: a.minor, Remedy: a.remedy(who)})
	}
	return out
}

// Info describes one check.
type Info struct {
	// ID is stable, Title what should be true.
	ID, Title, Area, Reference string
}

// Checks returns all checks of a cluster.
func Checks() (out []Info) {
	for _, c := range checks() {
		out = append(out, Info{c.id, c.title, c.area, c.ref})
	}
	return out
}

// Reviews returns the requests of an upgrade that rules of a webhook match, such as "new pods"
// and "nodes". pods is whether new pods are among them.
func Reviews(rules []admissionv1.RuleWithOperations) (requests []string, pods bool) {
	for i := range targets {
		if t := &targets[i]; slices.ContainsFunc(rules, func(r admissionv1.RuleWithOperations) bool { return t.hits(&r) }) && !slices.Contains(requests, t.text) {
			requests = append(requests, t.text)
			pods = pods || i == 0
		}
	}
	return requests, pods
}

// Printable returns untrusted text in a form that is safe for a terminal, at most 300 runes of
// it.
func Printable(s string) string { return printable(s) }

// Object is "kind/namespace/name" of untrusted names, as findings have it.
func Object(kind, namespace, name string) string { return object(kind, namespace, name) }

// NextMinor is the first patch of the minor after a version.
func NextMinor(v version.Version) version.Version { return minorAfter(v) }
