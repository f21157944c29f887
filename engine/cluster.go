package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"constellation/assets"
	"constellation/engine/component"
	"constellation/engine/revocation"
)

// Errors that implementations of [Cluster] wrap.
var (
	// ErrAbsent means that the cluster has no such object, or not its kind yet.
	ErrAbsent = errors.New("not found")
	// ErrUnreachable means that the API server did not answer. Trying again may help.
	ErrUnreachable = errors.New("the API server does not answer")
	// ErrDenied means that the kubeconfig does not allow the call, or is not of this
	// cluster. Trying again does not help.
	ErrDenied = errors.New("denied by the API server")
	// ErrForbidden is an ErrDenied of a user that the API server knows: the kubeconfig is
	// of this cluster, and its user has not the rights that the call needs.
	ErrForbidden = fmt.Errorf("%w: too few rights", ErrDenied)
	// ErrConflict means that the object was changed after it was read.
	ErrConflict = errors.New("changed by somebody else")
)

// Cluster is what the engine needs from the inside of a cluster. engine/kube
// implements it on the Kubernetes API.
//
// Every method that changes something is idempotent: after an interruption it is
// called again with the same arguments. Methods retry what may pass by itself until
// their context ends. All may be called concurrently.
type Cluster interface {
	// Version returns the version of the API server that answered, such as v1.35.4.
	Version(ctx context.Context) (string, error)

	// Components returns the components ConfigMap called name.
	Components(ctx context.Context, name string) (Components, error)
	// PublishComponents creates it, immutable. One of that name with other content is
	// an error.
	PublishComponents(ctx context.Context, c Components) error

	// JoinConfig returns what the join service demands of joining machines.
	JoinConfig(ctx context.Context) (JoinConfig, error)
	// PublishJoinConfig creates it, or replaces it as a whole. With a Revision the error
	// wraps ErrConflict, and nothing is changed, if the cluster has another one by now.
	PublishJoinConfig(ctx context.Context, c JoinConfig) error

	// OutdatedKinds returns the names of those kinds that the cluster does not have, or
	// has otherwise.
	OutdatedKinds(ctx context.Context, kinds []assets.File) ([]string, error)
	// ApplyKinds brings the kinds and returns when the API server serves them. report
	// is called for each.
	ApplyKinds(ctx context.Context, kinds []assets.File, report func(name string)) error

	// ChartCurrent reports whether the chart is installed just so and nothing of it is
	// half-way.
	ChartCurrent(ctx context.Context, c Chart) (bool, error)
	// ApplyChart installs or upgrades a chart and returns when what it deploys is
	// ready. If it does not get ready in time, the cluster has what it had before. If
	// ctx is cancelled it returns soon; what was applied stays, and another call goes on
	// from there. report says what is waited for, with how many of how many pods are
	// ready.
	ApplyChart(ctx context.Context, c Chart, report func(text string, ready, wanted int64)) error
	// CompareChart returns what ApplyChart would change, without values that are secret. The
	// error wraps ErrChart if the chart cannot be rendered with its values.
	CompareChart(ctx context.Context, c Chart) (ChartChange, error)
	// ChartSet returns the revisions, by ChartKey, that charts had before a set of them began
	// that has not come to its end; nil if none has begun. SetChartSet records them; with nil
	// it forgets them.
	ChartSet(ctx context.Context) (map[string]int, error)
	SetChartSet(ctx context.Context, before map[string]int) error
	// ChartRevision returns the number of the revision of the chart that is deployed; zero if
	// none is.
	ChartRevision(ctx context.Context, c Chart) (int, error)
	// RevertChart brings back what an earlier revision of the chart deployed, as a new
	// revision; with zero it removes the chart. If that revision is deployed nothing happens.
	// It does not wait until anything is ready.
	RevertChart(ctx context.Context, c Chart, revision int) error
	// OtherPlans names the Deployment that carries out Plans in PlansNamespace and is not of our
	// charts; empty if none does.
	OtherPlans(ctx context.Context) (string, error)

	// BoundSigning writes into the cluster's kubeadm configuration how long the certificates live
	// that it signs for nodes, such as 336h0m0s, unless a duration is there already, and reports
	// whether it did. It takes effect where kubeadm next makes a control plane's manifests.
	BoundSigning(ctx context.Context, duration string) (changed bool, err error)

	// Expect records a machine that is becoming a node, unless that node is annotated
	// with its components already.
	Expect(ctx context.Context, n ExpectedNode) error
	// NodeTarget returns what the nodes are brought to.
	NodeTarget(ctx context.Context) (NodeTarget, error)
	// SetNodeTarget sets it in one write, and ends the cancelling of an earlier one. What
	// else NodeVersion says stays.
	SetNodeTarget(ctx context.Context, t NodeTarget) error
	// TryNodeTarget asks whether SetNodeTarget would be accepted and changes nothing.
	TryNodeTarget(ctx context.Context, t NodeTarget) error
	// Rollout returns how far the nodes are on their way to the target.
	Rollout(ctx context.Context) (Rollout, error)
	// ChangeRollout changes it, in one write.
	ChangeRollout(ctx context.Context, c RolloutChange) error
	// Holding returns whether the node, or else the group, of a name is left as it is. The
	// error is ErrAbsent if there is neither.
	Holding(ctx context.Context, name string) (Holding, error)
	// SetHolding has h left as it is, or lets it go; a node that is let go is not postponed
	// any more either.
	SetHolding(ctx context.Context, h Holding, held bool) error
	// Revoked returns the record of revoked machines; empty if there is none.
	Revoked(ctx context.Context) (revocation.List, error)
	// Revoke writes the entry of a node into the record, drops entries that have expired,
	// and deletes the bootstrap token of the node and the note that it is about to join, in
	// this order. Events of the cluster report it once per revocation.
	Revoke(ctx context.Context, node string, e revocation.Entry) error
	// ExpireRevocations removes the entries of the record that have expired at a time.
	ExpireRevocations(ctx context.Context, now time.Time) error
	// RemoveMachine has the pods of a revoked node deleted, and its machine and Node
	// removed by the operator without a drain. It does not wait for that.
	RemoveMachine(ctx context.Context, node string, e revocation.Entry) error
	// RefillMachine has the operator make a machine in the group of a revoked one as soon
	// as that is removed, unless it was asked for that already. The same token never makes
	// a second machine. After the deadline none is made.
	RefillMachine(ctx context.Context, node string, e revocation.Entry, token string, deadline time.Time) error
	// Hold takes the cluster for one run, for as long as the process lives, until release
	// is called. The error is a *HeldError if somebody else has it; one who has died is
	// waited for, 15 s at most, and not at all if h is the Same. lost is called once if
	// somebody else took it all the same.
	Hold(ctx context.Context, h Holder, lost func(error)) (release func(), err error)

	// Nodes returns the nodes, sorted by name. Their Current is not set. They are shared, and
	// nobody changes them: of one that has not changed the next call may return the same.
	Nodes(ctx context.Context) ([]*Node, error)
	// Expected returns the machines that are becoming nodes, sorted by name.
	Expected(ctx context.Context) ([]ExpectedNode, error)
	// Watch calls changed at once and after every change of nodes or expected nodes
	// until ctx ends or the connection is lost, and returns why.
	Watch(ctx context.Context, changed func()) error
	// Plans returns the Plans of all namespaces, by name. The error wraps ErrAbsent if the
	// cluster does not have the kind, ErrForbidden if they may not be listed.
	Plans(ctx context.Context) ([]NodePlan, error)
	// WatchRollout is Watch that also tells changes of the rollout and of Plans. That Plans
	// cannot be seen does not end it.
	WatchRollout(ctx context.Context, changed func()) error
	// Follow calls line for every line that the pods of a service write, from since
	// on, until ctx ends. Pods that come and go are followed. It returns only an error
	// that no waiting cures.
	Follow(ctx context.Context, service string, since time.Time, line func(LogLine)) error
	// Services returns what runs in the cluster and has a version, sorted by name.
	Services(ctx context.Context) ([]Service, error)
}

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

// enrolled reports whether a node with these components was given an agent that verifies.
func (c Components) enrolled(node string) bool {
	return c.Agent != nil && !slices.Contains(c.Unenrolled, node)
}

// serves reports whether c, as it is published, is want, which may have no statement and no
// enrolment program.
func (c Components) serves(want Components) bool {
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
	// Weakened tells who reads the cluster when and how demands were weakened on request, a
	// line for each time, oldest first. Empty: never.
	Weakened string
	// Revision says what was read, for PublishJoinConfig; empty: whatever is there.
	Revision string
}

// accepts reports whether a machine that satisfies a demand is let in.
func (j JoinConfig) accepts(demanded string) bool {
	for _, g := range j.Generations {
		if g == demanded {
			return true
		}
	}
	return j.Attestation == demanded
}

// enforces returns an error if one of the demands refuses no machine. Join services refuse
// the whole of join-config then.
func (j JoinConfig) enforces() error {
	all := maps.Clone(j.Generations)
	if all == nil {
		all = map[string]string{}
	}
	all[""] = j.Attestation
	for _, image := range slices.Sorted(maps.Keys(all)) {
		var d demand
		if err := json.Unmarshal([]byte(all[image]), &d); err != nil || d.Measurements.Enforces() {
			continue // what cannot be read they say themselves
		}
		key := "attestationConfig"
		if image != "" {
			key += "." + image
		}
		return &Error{
			Op: "publish join configuration", Err: fmt.Errorf("%s enforces no measurement: any machine would be let in", key), Exit: ExitBlocked,
			Remedy: "give it a register without warnOnly, or remove the key: `kubectl -n kube-system edit configmap join-config`; then run the same command again",
		}
	}
	return nil
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
	// Image is the cloud's reference, ImageVersion its release.
	Image        string
	ImageVersion string
	Components   string
	Kubernetes   string
	// KeepWorkers says that workers stay as they are. SetNodeTarget takes back only what it
	// has set itself.
	KeepWorkers bool
	// MaxSurge is how many machines there may be beyond the wanted number, such as 2 or
	// 10%. Empty: SetNodeTarget leaves it to the default, unless somebody else has set it.
	MaxSurge string
	// Paused and Cancelled say that the rollout does not go on. SetNodeTarget ignores them.
	Paused, Cancelled bool
	// Conditions are what the operator says about it. SetNodeTarget ignores them.
	Conditions []Condition
}

// same reports whether nodes are brought to the same, whichever of them are.
func (t NodeTarget) same(o NodeTarget) bool {
	return t.Image == o.Image && t.ImageVersion == o.ImageVersion && t.Components == o.Components && t.Kubernetes == o.Kubernetes
}

// LogLine is one line of a pod.
type LogLine struct {
	Time time.Time
	Pod  string
	Node string // that the pod runs on
	Text string
}
