// Package cluster answers: what does a cluster hold, in values that need no client?
//
// It describes nodes, services, targets, rollouts, Plans and the machines of the cloud as
// the engine sees them, and the errors that clients wrap. It reaches no API server: the
// interfaces are at their consumers, and engine/kube implements them.
package cluster

import (
	"slices"
	"strings"
	"time"

	"constellation/assets"
	"constellation/engine/attestation"
	"constellation/engine/component"
	"constellation/engine/version"
)

// ChartKey names the installation of a chart in a cluster.
func ChartKey(c Chart) string { return c.Namespace + "/" + c.Name }

// Components is a components ConfigMap.
type Components struct {
	// Name is ComponentsName of List.
	Name       string
	Kubernetes string // such as v1.35.4
	List       component.List
	// Statement vouches for List as what nodes of Kubernetes install, see package release.
	// Empty: what is published keeps the statement that it has, if any.
	Statement string
	// Agent is the enrolment program for agents that verify nothing; nil: what is published
	// keeps its own, if any. It is published before any node has the components, so a node that
	// has them was enrolled, except for those of Unenrolled.
	Agent *component.Component
	// Unenrolled are the sorted names of the Nodes that already had the components, or claimed
	// to have them, when the program was published. Their agents stay as they are.
	Unenrolled []string
}

// Enrolled reports whether a node with these components was given an agent that verifies.
func (c Components) Enrolled(node string) bool {
	return c.Agent != nil && !slices.Contains(c.Unenrolled, node)
}

// Serves reports whether c, as it is published, is want, which may have no statement and no
// enrolment program.
func (c Components) Serves(want Components) bool {
	return c.Kubernetes == want.Kubernetes && slices.Equal(c.List, want.List) && (want.Statement == "" || c.Statement == want.Statement) && (want.Agent == nil || c.Agent != nil && *c.Agent == *want.Agent)
}

// ComponentsName returns the name of the ConfigMap that holds l. It covers every field
// that decides what is installed, so equal names mean equal content.
func ComponentsName(l component.List) string {
	const algorithm = len("sha256:")
	return "k8s-components-sha256-" + l.Digest()[algorithm:]
}

// JoinConfig is what the join service demands of joining machines.
type JoinConfig struct {
	// Attestation is JSON: {"variant": "tpm2", "measurements": {...}}. It is what the newest
	// image is to show, and all that join services of v1.1.0 and before look at.
	Attestation string
	TrustRoots  string // PEM
	ClusterID   string // hex
	// Generations are all demands of which a machine must satisfy one, Attestation among
	// them, by the version of the image that they describe. Nil: Attestation alone.
	Generations map[string]string
	// Weakened records when and how attestation requirements were weakened on request, a line per
	// change, oldest first. Empty: never.
	Weakened string
	// Revision says what was read, for PublishJoinConfig; empty: whatever is there.
	Revision string
}

// Accepts reports whether a machine that satisfies a demand is let in.
func (j JoinConfig) Accepts(demanded string) bool {
	for _, g := range j.Generations {
		if g == demanded {
			return true
		}
	}
	return j.Attestation == demanded
}

// Migration is what join-config of a cluster has that is older than its encryption of Secrets.
type Migration struct {
	// Fingerprint is that of the keys; empty: nothing was begun.
	Fingerprint string
	// Encrypts is whether API servers are to encrypt Secrets; otherwise they read encrypted ones.
	Encrypts bool
	// Done is when all Secrets were encrypted, in RFC 3339; empty: not yet.
	Done string
}

// APIServerKey is the key with which the API server of a control plane encrypts Secrets.
type APIServerKey struct {
	Node string
	// Key is its hashed ID, see kms.HashedID; empty if Err is why it is not known.
	Key string
	Err error
}

// JoinService is the join service of a control plane.
type JoinService struct {
	Node string
	// Pod and Port are where it serves attested TLS.
	Pod  string
	Port int32
	// Problem is why it cannot be reached; empty: none is known.
	Problem string
}

// Chart is a chart with its values.
type Chart struct {
	// Name is that of its installation.
	Name      string
	Namespace string
	// Version is that of the chart, as in its Chart.yaml.
	Version string
	Files   []assets.File
	Values  map[string]any
	// Needs are names of charts of the same set that must be ready before.
	Needs []string
	// Foreign says that it does not come with the program: it may run hooks and bring kinds
	// of its own.
	Foreign bool
	// OwnName is the name in its Chart.yaml; empty if that is Name.
	OwnName string
	// SkipKinds leaves the kinds in its folder crds to somebody else.
	SkipKinds bool
	// Destructive is what is lost when it replaces another version; empty if nothing is.
	Destructive string
	// Recreate lets objects be deleted and made again where something is to change that
	// cannot be changed.
	Recreate bool
}

// ExpectedNode is a machine that is becoming a node.
type ExpectedNode struct {
	Name         string
	Components   string
	ControlPlane bool
	ProviderID   string
	// Deadline is when it is given up; zero means never.
	Deadline time.Time
}

// NodeTarget is what nodes are brought to.
type NodeTarget struct {
	// Image is the cloud's reference, ImageVersion its release. Both are empty in a cloud that
	// selects no image.
	Image        string
	ImageVersion string
	Components   string
	Kubernetes   string
	// Etcd is the tag of etcd's image that control planes run at least, such as 3.6.11-0. Empty:
	// that of Kubernetes.
	Etcd string
	// KeepWorkers says that workers stay as they are. SetNodeTarget takes back only what it
	// has set itself.
	KeepWorkers bool
	// MaxSurge is how many machines there may be beyond the wanted number, such as 2 or
	// 10%. Empty: SetNodeTarget leaves it to the default, unless somebody else has set it.
	MaxSurge string
	// Paused and Cancelled say that the rollout does not go on. SetNodeTarget ignores them.
	Paused, Cancelled bool
	// Conditions and Members are reported by the operator. SetNodeTarget ignores them.
	Conditions []Condition
	// Members are those of etcd as they last answered, by the names of their nodes. Operators
	// before v1.1.0 report none.
	Members []EtcdMember
}

// EtcdMember is a member of etcd.
type EtcdMember struct {
	Node    string
	Version string // such as 3.6.11
	// Storage is the version of the format of its data; empty if it is not known.
	Storage string
}

// EtcdVersion parses the tag of etcd's image, such as 3.6.11-0, or what a member reports. It is
// zero if that is invalid.
func EtcdVersion(tag string) version.Version {
	core, _, _ := strings.Cut(tag, "-")
	v, err := version.Parse(core)
	if err != nil {
		return version.Version{}
	}
	return v
}

// Same reports whether nodes are brought to the same, whichever of them are.
func (t NodeTarget) Same(o NodeTarget) bool {
	return t.Image == o.Image && t.ImageVersion == o.ImageVersion && t.Components == o.Components && t.Kubernetes == o.Kubernetes && t.Etcd == o.Etcd
}

// LogLine is one line of a pod.
type LogLine struct {
	Time time.Time
	Pod  string
	Node string // that the pod runs on
	Text string
}

// Demand is the attestation policy for joining machines.
type Demand struct {
	Variant      string                   `json:"variant"`
	Measurements attestation.Measurements `json:"measurements"`
}

// WeakenedBy returns, in order, the registers that d enforces and the policy then does not.
func (d Demand) WeakenedBy(then Demand) (lost []uint32) {
	for i, m := range d.Measurements {
		if after, ok := then.Measurements[i]; !m.WarnOnly && (!ok || after.WarnOnly) {
			lost = append(lost, i)
		}
	}
	slices.Sort(lost)
	return lost
}

// Has reports whether a node is at the target.
func (t NodeTarget) Has(n *Node) bool {
	return t.Components != "" && n.Components == t.Components && (n.InPlace || t.HasImage(n)) && t.HasEtcd(n)
}

// HasEtcd reports whether a node runs the etcd of the target, as far as the target names one.
func (t NodeTarget) HasEtcd(n *Node) bool {
	if t.Etcd == "" || n.Role != ControlPlaneRole {
		return true
	}
	want := EtcdVersion(t.Etcd)
	return slices.ContainsFunc(t.Members, func(m EtcdMember) bool {
		return m.Node == n.Name && !EtcdVersion(m.Version).Less(want)
	})
}

// String names the versions: "image v1.1.0 and Kubernetes v1.36.3".
func (t NodeTarget) String() string {
	kubernetes := "Kubernetes " + t.Kubernetes
	if t.Etcd != "" {
		kubernetes += " with etcd " + t.Etcd
	}
	if t.ImageVersion == "" {
		return kubernetes
	}
	return "image " + t.ImageVersion + " and " + kubernetes
}

// HasImage reports whether a node has the image of the target. A target without an image is met
// by every node: its cloud selects none.
func (t NodeTarget) HasImage(n *Node) bool {
	return t.Image == "" || strings.EqualFold(n.Image, t.Image)
}

// Noted reports whether the operator has noted the image of the node, or what it installed if the
// target has no image.
func (t NodeTarget) Noted(n *Node) bool {
	return n.Image != "" || t.Image == "" && n.Components != ""
}
