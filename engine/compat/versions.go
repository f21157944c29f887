package compat

import (
	"fmt"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/version"
)

// Is reports whether s contains v only.
func (s Span) Is(v version.Version) bool { return s.Oldest.Equal(v) && s.Newest.Equal(v) }

// String is "block minor-drift: services would go ..."; the remedy is left out.
func (r *RuleResult) String() string { return string(r.Severity) + " " + r.Rule + ": " + r.Title }

// Planned returns the target of a hop as [Matrix.Check] takes it. Fields that are not
// valid versions are zero.
func (h Hop) Planned() Planned {
	parse := func(s string) version.Version {
		v, err := version.Parse(s)
		if err != nil {
			return version.Version{}
		}
		return v
	}
	return Planned{Services: parse(h.To.Release), Image: parse(h.To.Image), Kubernetes: parse(h.To.Kubernetes), KeepWorkers: !h.ReplaceWorkers, Etcd: h.To.Etcd}
}

// Span is the versions of one component that run side by side: the oldest and the
// newest. They are equal unless a rollout is under way. The zero value is unknown.
type Span struct {
	Oldest version.Version `json:"oldest"`
	Newest version.Version `json:"newest"`
}

// At is the span of a component that runs in one version.
func At(v version.Version) Span { return Span{v, v} }

// Add widens s so that it holds v. A zero v changes nothing.
func (s Span) Add(v version.Version) Span {
	if v.IsZero() {
		return s
	}
	if s.Oldest.IsZero() || v.Less(s.Oldest) {
		s.Oldest = v
	}
	if s.Newest.IsZero() || s.Newest.Less(v) {
		s.Newest = v
	}
	return s
}

// IsZero reports whether nothing is known.
func (s Span) IsZero() bool { return s.Oldest.IsZero() }

// Mixed reports whether more than one version runs.
func (s Span) Mixed() bool { return !s.Oldest.Equal(s.Newest) }

// String is "v1.35.4", or "v1.35.4-v1.36.3" for a mixed span; empty if unknown.
func (s Span) String() string {
	if s.Mixed() {
		return s.Oldest.String() + "-" + s.Newest.String()
	}
	return s.Oldest.String()
}

// Running is which versions a cluster runs, as its API server tells.
type Running struct {
	// Services is of what comes with a release and runs in the cluster.
	Services Span
	// Images are those of the OS by role, from the nodes' annotations. The API server has the
	// version of the target's image alone; see AddImages for the others.
	ControlPlaneImage, WorkerImage Span
	// NoImages is whether the cluster's target names no image: then the images are zero, and
	// that is not unknown.
	NoImages bool
	// Kubernetes is of the API servers, by asking each that can be reached.
	Kubernetes Span
	// Kubelets by role. A cluster without workers has a zero WorkerKubelet.
	ControlPlaneKubelet, WorkerKubelet Span
	// WorkersInPlace is whether workers keep their machines in an upgrade.
	WorkersInPlace bool
	// Etcd is the tag of the image of its pods, such as 3.6.6-0; empty if unknown.
	Etcd string
	// ExternalEtcd is whether etcd does not run on the control planes: no hop changes it.
	ExternalEtcd bool
	// Parts are the services one by one, sorted by name.
	Parts []cluster.Service
	// Nodes are all nodes, sorted by name.
	Nodes []cluster.Node
	// Target is what NodeVersion asks for; JoinConfig what joining machines must show.
	Target     cluster.NodeTarget
	JoinConfig cluster.JoinConfig
	// Kinds are the names of the definitions of ours that the cluster has.
	Kinds []string
	// Missing says what could not be learned, and why: "image of worker-3: it has no annotation".
	Missing []string
	// Denied are the reads that the API server refused, sorted by resource.
	Denied []cluster.Denial
}

// AddImages adds the versions of the images that are not the target's. versionOf returns the
// version of an image by its reference. Missing gets the reason why a version is unknown.
func (r *Running) AddImages(versionOf func(reference string) (version.Version, error)) {
	if r.NoImages {
		return
	}
	for i := range r.Nodes {
		n := &r.Nodes[i]
		if n.Image == "" || n.Image == r.Target.Image {
			continue
		}
		v, err := versionOf(n.Image)
		if err != nil {
			r.Missing = append(r.Missing, fmt.Sprintf("image of %s: %v", n.Name, err))
			continue
		}
		to := &r.WorkerImage
		if n.Role == cluster.ControlPlaneRole {
			to = &r.ControlPlaneImage
		}
		*to = to.Add(v)
	}
}

// Share is how many nodes of a role something concerns.
type Share string

// Shares; the zero value is none.
const (
	SomeNodes Share = "some"
	AllNodes  Share = "all"
)

// Hop is one upgrade: one run of `upgrade apply`.
type Hop struct {
	Number int `json:"hop"` // 1 is the next one
	// CLI is the version of this program that the hop needs; it is also that of the
	// services afterwards.
	CLI  version.Version `json:"cli"`
	From plan.Target     `json:"from"`
	To   plan.Target     `json:"to"`
	// ReplaceControlPlanes and ReplaceWorkers are whether the hop replaces these nodes. Workers
	// that are kept are replaced by a later hop.
	ReplaceControlPlanes bool `json:"replaceControlPlanes"`
	ReplaceWorkers       bool `json:"replaceWorkers"`
	// ControlPlanesInPlace and WorkersInPlace are which of these nodes keep their machines.
	ControlPlanesInPlace Share `json:"controlPlanesInPlace,omitempty"`
	WorkersInPlace       Share `json:"workersInPlace,omitempty"`
	// Why explains what forces this hop, a sentence each.
	Why []string `json:"why,omitempty"`
	// Get says how to get the CLI: empty if it is this program.
	Get string `json:"get,omitempty"`
}

// RuleResult is what one rule of the matrix says about a step from one state to another.
type RuleResult struct {
	// Rule is its ID, kebab-case and stable: "minor-skew".
	Rule     string        `json:"rule"`
	Severity plan.Severity `json:"severity"`
	// Title is a sentence with the versions in it, Reference where the rule comes from
	// (policy page, RFC), Remedy what to do.
	Title     string `json:"title"`
	Reference string `json:"reference"`
	Remedy    string `json:"remedy,omitempty"`
}

// Unreachable explains why a newer version cannot be reached.
type Unreachable struct {
	Component string `json:"component"`
	Version   string `json:"version"`
	Rule      string `json:"rule"`
	Reason    string `json:"reason"`
	Remedy    string `json:"remedy,omitempty"`
	Reference string `json:"reference,omitempty"`
}
