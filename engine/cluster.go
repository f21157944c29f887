package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"constellation/assets"
	"constellation/engine/attestation"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/registry"
	"constellation/engine/revocation"
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
	Components(ctx context.Context, name string) (cluster.Components, error)
	// PublishComponents creates it, immutable. One of that name with other content is
	// an error.
	PublishComponents(ctx context.Context, c cluster.Components) error

	// JoinConfig returns what the join service demands of joining machines.
	JoinConfig(ctx context.Context) (cluster.JoinConfig, error)
	// PublishJoinConfig creates it, or replaces it as a whole. With a Revision the error
	// wraps ErrConflict, and nothing is changed, if the cluster has another one by now.
	PublishJoinConfig(ctx context.Context, c cluster.JoinConfig) error

	// OutdatedKinds returns the names of those kinds that the cluster does not have, or
	// has otherwise.
	OutdatedKinds(ctx context.Context, kinds []assets.File) ([]string, error)
	// ApplyKinds brings the kinds and returns when the API server serves them. report
	// is called for each.
	ApplyKinds(ctx context.Context, kinds []assets.File, report func(name string)) error

	// ChartCurrent reports whether the chart is installed just so and nothing of it is
	// half-way.
	ChartCurrent(ctx context.Context, c cluster.Chart) (bool, error)
	// ApplyChart installs or upgrades a chart and returns when what it deploys is
	// ready. If it does not get ready in time, the cluster has what it had before. If
	// ctx is cancelled it returns soon; what was applied stays, and another call goes on
	// from there. report says what is waited for, with how many of how many pods are
	// ready.
	ApplyChart(ctx context.Context, c cluster.Chart, report func(text string, ready, wanted int64)) error
	// CompareChart returns what ApplyChart would change, without values that are secret. The
	// error wraps ErrChart if the chart cannot be rendered with its values.
	CompareChart(ctx context.Context, c cluster.Chart) (plan.ChartChange, error)
	// ChartSet returns the revisions, by ChartKey, that charts had before a set of them began
	// that has not come to its end; nil if none has begun. SetChartSet records them; with nil
	// it forgets them.
	ChartSet(ctx context.Context) (map[string]int, error)
	SetChartSet(ctx context.Context, before map[string]int) error
	// ChartRevision returns the number of the revision of the chart that is deployed; zero if
	// none is.
	ChartRevision(ctx context.Context, c cluster.Chart) (int, error)
	// RevertChart brings back what an earlier revision of the chart deployed, as a new
	// revision; with zero it removes the chart. If that revision is deployed nothing happens.
	// It does not wait until anything is ready.
	RevertChart(ctx context.Context, c cluster.Chart, revision int) error
	// OtherPlans names the Deployment that carries out Plans in PlansNamespace and is not of our
	// charts; empty if none does.
	OtherPlans(ctx context.Context) (string, error)

	// BoundSigning writes into the cluster's kubeadm configuration how long the certificates live
	// that it signs for nodes, such as 336h0m0s, unless a duration is there already, and reports
	// whether it did. It takes effect where kubeadm next makes a control plane's manifests.
	BoundSigning(ctx context.Context, duration string) (changed bool, err error)

	// EtcdTag returns the tag of etcd's image that the cluster's kubeadm configuration names; empty if
	// it names none. The error wraps ErrAbsent if there is no such configuration.
	EtcdTag(ctx context.Context) (string, error)
	// SetEtcdTag replaces one tag by another there; an empty one is none. Everything else stays as
	// it was written. The error wraps ErrConflict if the configuration names a third one.
	SetEtcdTag(ctx context.Context, from, to string) error

	// Registry returns the registry that the cluster was given, with its login; the zero value
	// without one.
	Registry(ctx context.Context) (registry.Registry, error)
	// HasRegistry reports whether the cluster pulls from want: Secrets with its login, and kubeadm's
	// configuration. The zero value is no registry of ours. plans is whether there is PlansNamespace.
	HasRegistry(ctx context.Context, want registry.Registry, plans bool) (bool, error)
	// SetRegistry makes it so, and reports whether kubeadm's configuration changed. That takes effect
	// where kubeadm next makes a control plane's manifests or upgrades its add-ons.
	SetRegistry(ctx context.Context, want registry.Registry, plans bool) (changed bool, err error)

	// Expect records a machine that is becoming a node, unless that node is annotated
	// with its components already.
	Expect(ctx context.Context, n cluster.ExpectedNode) error
	// NodeTarget returns what the nodes are brought to.
	NodeTarget(ctx context.Context) (cluster.NodeTarget, error)
	// SetNodeTarget sets it in one write, and ends the cancelling of an earlier one. What
	// else NodeVersion says stays.
	SetNodeTarget(ctx context.Context, t cluster.NodeTarget) error
	// TryNodeTarget asks whether SetNodeTarget would be accepted and changes nothing.
	TryNodeTarget(ctx context.Context, t cluster.NodeTarget) error
	// Rollout returns how far the nodes are on their way to the target.
	Rollout(ctx context.Context) (cluster.Rollout, error)
	// ChangeRollout changes it, in one write.
	ChangeRollout(ctx context.Context, c cluster.RolloutChange) error
	// SkipState returns whether the node, or else the group, of a name is left as it is. The
	// error is ErrAbsent if there is neither.
	SkipState(ctx context.Context, name string) (cluster.SkipState, error)
	// SetSkipState puts h on hold, or resumes it; a resumed node is no longer postponed either.
	SetSkipState(ctx context.Context, h cluster.SkipState, held bool) error
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
	Hold(ctx context.Context, h cluster.Holder, lost func(error)) (release func(), err error)

	// Nodes returns the nodes, sorted by name. Their Current is not set. They are shared, and
	// nobody changes them: of one that has not changed the next call may return the same.
	Nodes(ctx context.Context) ([]*cluster.Node, error)
	// Expected returns the machines that are becoming nodes, sorted by name.
	Expected(ctx context.Context) ([]cluster.ExpectedNode, error)
	// Watch calls changed at once and after every change of nodes or expected nodes
	// until ctx ends or the connection is lost, and returns why.
	Watch(ctx context.Context, changed func()) error
	// Plans returns the Plans of all namespaces, by name. The error wraps ErrAbsent if the
	// cluster does not have the kind, ErrForbidden if they may not be listed.
	Plans(ctx context.Context) ([]cluster.NodePlan, error)
	// WatchRollout is Watch that also tells changes of the rollout and of Plans. That Plans
	// cannot be seen does not end it.
	WatchRollout(ctx context.Context, changed func()) error
	// Follow calls line for every line that the pods of a service write, from since
	// on, until ctx ends. Pods that come and go are followed. It returns only an error
	// that no waiting cures.
	Follow(ctx context.Context, service string, since time.Time, line func(cluster.LogLine)) error
	// Services returns what runs in the cluster and has a version, sorted by name.
	Services(ctx context.Context) ([]cluster.Service, error)
}

// enforces returns an error if one of the demands refuses no machine. Join services refuse
// the whole of join-config then. Enrolled machines are not measured.
func enforces(j cluster.JoinConfig) error {
	all := maps.Clone(j.Generations)
	if all == nil {
		all = map[string]string{}
	}
	all[""] = j.Attestation
	for _, image := range slices.Sorted(maps.Keys(all)) {
		var d cluster.Demand
		if err := json.Unmarshal([]byte(all[image]), &d); err != nil || d.Measurements.Enforces() || d.Variant == string(attestation.Enrolled) {
			continue // unreadable releases report the problem themselves
		}
		key := "attestationConfig"
		if image != "" {
			key += "." + image
		}
		return &plan.Error{
			Op: "publish join configuration", Err: fmt.Errorf("%s enforces no measurement: any machine could join", key), Exit: plan.ExitBlocked,
			Remedy: "give it a register without warnOnly, or remove the key: `kubectl -n kube-system edit configmap join-config`; then run the same command again",
		}
	}
	return nil
}
