// Package operator brings a cluster's nodes to their target. It discovers the scaling groups of the
// cloud, records on every Node its image and components, replaces machines that differ from the
// target, starts upgrades of Kubernetes through the agent, and reports in NodeVersion.
//
// One round is: observe, decide, act, report. The observation is a plain value and may be stale or
// incomplete. Package decision decides; it is pure. effects.go has one row for each kind of action.
// Every effect is conditional on the observation that it was decided from. So rounds may be
// repeated, may stop anywhere, and may run in two leaders at a time. docs/design/operator.md
// describes how to change a rule.
//
// All state is in the cluster. Intents are PendingNodes, written before any request to the cloud.
// Marks are annotations of Nodes. The process itself keeps caches and backoff alone (fleet, view,
// hostView, retries); a new process starts without them.
//
// No machine is deleted unless a PendingNode is bound to it. No ScalingGroup is ever removed,
// because a cloud's list may be partial and the object has settings of its owner.
package operator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/crash"
	"constellation/operator/decision"
	"constellation/operator/nodelock"
	"constellation/operator/replica"
)

// LeaseName is the Lease of the leader, in the operator's namespace.
const LeaseName = "constellation-operator"

// cloudAPI is the cloud of the cluster's machines. Its methods are called concurrently. Errors wrap
// those of package cloud; after an error the outcome of a request is unknown.
type cloudAPI interface {
	// Groups returns the scaling groups. The list may be partial.
	Groups(context.Context) ([]cloud.Group, error)
	// Instances returns the machines of all groups, those that are being deleted
	// included. The list may be partial.
	Instances(context.Context) ([]cloud.Instance, error)
	// Instance returns the instance of a cloud.Key; the error wraps cloud.ErrNotFound if the
	// cloud does not know it, or no longer.
	Instance(ctx context.Context, key string) (cloud.Instance, error)
	// SetGroupImage sets the image of the group's next machines.
	SetGroupImage(ctx context.Context, groupID, image string) error
	// CreateInstances creates a machine per token. For a token that was used before, it returns
	// the instance of that request, Terminated if that is gone. The result is in the order of the
	// tokens.
	CreateInstances(ctx context.Context, groupID string, tokens []string) ([]cloud.Instance, error)
	// DeleteInstances requests the deletion of the machines with these keys. A machine that
	// does not exist is a success.
	DeleteInstances(ctx context.Context, keys []string) error
}

// host is the machine that the operator runs on, through its agent. Only control
// planes have members of etcd, and all of these know all members.
type host interface {
	// Members returns the members of etcd.
	Members(context.Context) ([]decision.Member, error)
	// MoveLeader moves etcd leadership from one node to another. If to is empty, the agent chooses.
	MoveLeader(ctx context.Context, from, to string) error
	// RemoveMember removes the member of a node, unless fewer than voters started voters would remain.
	// Of several members of one name it removes that at address; empty: the address is not known.
	// A node without such a member is a success.
	RemoveMember(ctx context.Context, node, address string, voters int) error
	// Run returns the latest run of this machine's agent; zero: there was none.
	Run(context.Context) (decision.UpgradeRun, error)
	// Upgrade requests an upgrade of Kubernetes or attaches to it, and follows it to its end, over cut
	// connections and restarts of the agent. It reports progress to tell, and returns nil when the
	// machine's control plane runs the version, and its kubelet unless keepKubelet is set.
	Upgrade(ctx context.Context, token, version, reference string, components component.Signed, keepKubelet bool, tell func(decision.UpgradeRun)) error
	// UpgradeAddons requests an upgrade of add-ons or attaches to it, as Upgrade does. It returns nil
	// when kubeadm has upgraded those that it manages.
	UpgradeAddons(ctx context.Context, token, version, reference string, components component.Signed, addons []string, tell func(decision.UpgradeRun)) error
}

// drains drains nodes in the background. See drainer.
type drains interface {
	// drain starts or continues evictions from the node. It returns at once.
	drain(node string)
	// state returns whether nothing is left to evict, and what blocks. It returns false and "" for a
	// node that was never drained.
	state(node string) (drained bool, blocker string)
	// keep ends work on all other nodes and forgets them.
	keep(nodes map[string]bool)
}

// Config is what the operator needs. Cluster, Namespace and Cloud are required.
type Config struct {
	// Cluster is the access to the API server. Its rate limits are replaced.
	Cluster *rest.Config
	// Namespace holds the leader's Lease.
	Namespace string
	Cloud     cloudAPI
	// KeepApprovals leaves the certificates of kubelets to the cluster: none is approved or denied, and
	// kubeadm's own approval of bootstrap tokens stays.
	KeepApprovals bool
	// RotateKey is whether the key that encrypts Secrets is rotated after each upgrade of all nodes.
	RotateKey bool
	// Spares is whether the machines of Cloud are enrolled, and some belong to their group only while they are assigned.
	Spares bool
	// Agent is the path of the socket of this machine's agent. If it is empty, no control plane is
	// replaced and Kubernetes is not upgraded. Host, if not nil, is used instead.
	Agent string
	Host  host
	// Relay reaches the agents of other machines, through the relays in Namespace. Without
	// it groups that are upgraded in place wait.
	Relay bool
	// Node is the name of this machine's Node and Pod that of the operator's pod; both
	// are empty outside of the cluster.
	Node, Pod string
	// MetricsAddress and HealthAddress are host:port of plain HTTP; empty serves none.
	MetricsAddress, HealthAddress string
	// SnapshotAddress is host:port of the server of etcd snapshots, see [SnapshotPath]. Empty, or
	// without Agent: no server.
	SnapshotAddress string
	// DiscoveryInterval is how often the cloud's groups are listed, besides when nodes come and go. Zero
	// means 15 minutes.
	DiscoveryInterval time.Duration
	// CloudInterval is how often machines are listed while some come or go. Zero means
	// 2 seconds.
	CloudInterval time.Duration
	// NoElection acts without being elected, for development.
	NoElection bool
	Log        *slog.Logger

	// For tests. at is called before and after each effect, leave replaces the release of the leader
	// election lease, and now is the clock of all deadlines.
	at     func(point string)
	leave  func(context.Context) error
	now    func() time.Time
	agents agents // used instead of the agents that Relay reaches
}

const defaultDiscovery = 15 * time.Minute

// fill sets what is empty to its default.
func (c *Config) fill() {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.at == nil {
		c.at = crash.At
	}
	if c.now == nil {
		c.now = time.Now
	}
	if c.DiscoveryInterval == 0 {
		c.DiscoveryInterval = defaultDiscovery
	}
}

// Run runs the operator until ctx ends or leadership is lost. After an error the process must end,
// because it may not continue as leader.
func Run(ctx context.Context, c Config) error {
	c.fill()
	access := replica.Access(c.Cluster, "constellation-operator")
	closeHungConnections(access)
	if err := await(ctx, access, c.Log); err != nil {
		return err
	}
	mgr, err := newManager(c, access)
	if err != nil {
		return err
	}
	binary := rest.CopyConfig(access)
	binary.ContentType, binary.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	core, err := kubernetes.NewForConfig(binary)
	if err != nil {
		return fmt.Errorf("connect to API server: %w", err)
	}
	if c.Host == nil && c.Agent != "" {
		h, err := newHost(c.Agent, c.Node)
		if err != nil {
			return err
		}
		defer func() { _ = h.Close() }()
		h.log, h.packages = c.Log, upgradesPackages(c.Cloud)
		c.Host = h
		if err := serveSnapshots(c, mgr, core, h); err != nil {
			return err
		}
	}
	if c.leave == nil {
		c.leave = func(ctx context.Context) error { return leave(ctx, core, c.Namespace, c.Pod) }
	}
	if c.agents == nil && c.Relay {
		r := newRelays(access, core, c.Namespace, c.Pod, c.Log)
		defer r.keep(nil)
		r.packages = upgradesPackages(c.Cloud)
		c.agents = r
	}
	end, err := addControllers(ctx, c, mgr, core)
	if err != nil {
		return err
	}
	defer end()
	c.Log.Info("operator started", "namespace", c.Namespace)
	if err := mgr.Start(ctx); err != nil && ctx.Err() == nil {
		return fmt.Errorf("run controllers: %w", err)
	}
	return nil
}

// packagesCloud is a cloud whose owner decides whether upgrades in place upgrade packages of the distribution.
type packagesCloud interface {
	UpgradesPackages(ctx context.Context) (bool, error)
}

// upgradesPackages returns how to ask a cloud; nil: its machines have images.
func upgradesPackages(c cloudAPI) func(context.Context) (bool, error) {
	if p, ok := c.(packagesCloud); ok {
		return p.UpgradesPackages
	}
	return nil
}

// serveSnapshots serves snapshots of the host's etcd if c has an address for them. Every replica
// serves those of its own host, leader or not.
func serveSnapshots(c Config, mgr manager.Manager, core kubernetes.Interface, h *agentHost) error {
	if c.SnapshotAddress == "" {
		return nil
	}
	s := newSnapshots(core, h.snapshot, c.Log)
	s.state = h.etcdState
	return mgr.Add(replica.Everywhere(func(ctx context.Context) error { return s.serve(ctx, c.SnapshotAddress) }))
}

// addControllers adds all controllers to mgr. end ends all work of the leader and returns when it
// has ended.
func addControllers(ctx context.Context, c Config, mgr manager.Manager, core kubernetes.Interface) (end func(), err error) {
	gauges, err := newGauges()
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	counters, err := newCounters()
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	lead, resign := context.WithCancel(ctx)
	var begun sync.WaitGroup
	fleet := newFleet(countedCloud{c.Cloud, counters}, c.now)
	events := mgr.GetEventRecorder("constellation-operator")
	groups := &groups{client: mgr.GetClient(), cloud: fleet, events: events, log: c.Log, interval: c.DiscoveryInterval}
	scaling := newAutoscaling(mgr.GetClient(), mgr.GetAPIReader(), c.Log)
	versions := &nodeVersions{
		client: mgr.GetClient(), live: mgr.GetAPIReader(), fleet: fleet, host: c.Host, agents: c.agents, scaling: scaling,
		events: events, gauges: gauges, counters: counters, log: c.Log, nodeName: c.Node, interval: c.CloudInterval, regrouped: groups.wake, at: c.at,
		leave: c.leave, now: c.now,
		spawn: func(do func(context.Context)) { begun.Go(func() { do(lead) }) },
	}
	drainer := newDrainer(core, versions.wake, c.Log)
	versions.drains = drainer
	versions.gate = newReadinessGate(core, versions.wake, c.Log)
	disrupted := &disruptions{client: mgr.GetClient(), events: events, log: c.Log, now: c.now, drains: newDrainer(core, func() {}, c.Log.With("reason", "disruption"))}
	end = func() {
		disrupted.drains.close()
		versions.gate.close()
		drainer.close()
		resign()
		begun.Wait()
	}
	versions.lock = nodelock.New(mgr.GetClient(), mgr.GetAPIReader(), c.now)
	versions.init()
	var optional []func(manager.Manager) error
	if !c.KeepApprovals {
		optional = append(optional,
			(&servingRequests{client: mgr.GetClient(), cloud: fleet.cloudAPI, events: events, counters: counters, log: c.Log, now: c.now}).setup,
			(&autoApprovals{client: mgr.GetClient(), log: c.Log}).setup,
		)
	}
	if e, ok := c.Cloud.(enrolledCloud); ok && c.Spares {
		e.Use(configMaps{mgr.GetClient(), mgr.GetAPIReader(), c.Namespace}, c.now)
		versions.sizes = &sizes{client: mgr.GetClient(), cloud: e, wake: versions.wake, log: c.Log, now: c.now}
		optional = append(optional, versions.sizes.setup)
	}
	if c.RotateKey {
		optional = append(optional, (&keyRotations{client: mgr.GetClient(), fresh: mgr.GetAPIReader(), events: events, log: c.Log, now: c.now, namespace: c.Namespace}).setup)
	}
	if l, ok := c.Cloud.(settingsLister); ok {
		optional = append(optional, (&nodeSettings{client: mgr.GetClient(), cloud: l, log: c.Log}).setup)
	}
	for _, add := range append(optional,
		(&joiningNodes{client: mgr.GetClient(), cloud: fleet, events: events, log: c.Log, now: c.now}).setup,
		groups.setup, scaling.setup, versions.setup, disrupted.setup,
		(&mirror{client: mgr.GetClient(), fresh: mgr.GetAPIReader(), log: c.Log}).setup,
		replica.AddHealthChecks,
		func(mgr manager.Manager) error {
			return mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
				versions.lock.Keep(ctx)
				return nil
			}))
		},
	) {
		if err := add(mgr); err != nil {
			end()
			return nil, err
		}
	}
	return end, nil
}

// newManager returns the manager of the controllers, with its cache and its leader election.
func newManager(c Config, access *rest.Config) (manager.Manager, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, fmt.Errorf("register kinds: %w", err)
	}
	o := replica.Options(scheme, c.Log, c.MetricsAddress, c.HealthAddress)
	o.Cache = cache.Options{
		DefaultTransform: cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Node{}: {Transform: trimNode},
			// Only this binding is removed, so the role can name it.
			&rbacv1.ClusterRoleBinding{}: {Field: fields.OneTermEqualSelector("metadata.name", autoApproval)},
			// There is only one, so the role can name it.
			&v1alpha1.NodeVersion{}: {Field: fields.OneTermEqualSelector("metadata.name", v1alpha1.NodeVersionName)},
		},
	}
	// These are read by name, rarely; the role permits no list.
	o.Client = client.Options{Cache: &client.CacheOptions{DisableFor: []client.Object{&corev1.ConfigMap{}, &appsv1.Deployment{}}}}
	o.LeaderElection, o.LeaderElectionID, o.LeaderElectionNamespace = !c.NoElection, LeaseName, c.Namespace
	mgr, err := manager.New(access, o)
	if err != nil {
		return nil, fmt.Errorf("connect to API server: %w", err)
	}
	return mgr, nil
}

// await returns when the API server answers, or ctx ends. On a new machine the operator may start
// before the network works, and an exit would cost kubelet's restart backoff.
func await(ctx context.Context, access *rest.Config, log *slog.Logger) error {
	d, err := discovery.NewDiscoveryClientForConfig(access)
	if err != nil {
		return fmt.Errorf("connect to API server: %w", err)
	}
	const least, most = 100 * time.Millisecond, 500 * time.Millisecond
	for wait := least; ; wait = min(2*wait, most) {
		try, cancel := context.WithTimeout(ctx, replica.RenewDeadline)
		err := d.RESTClient().Get().AbsPath("/version").Do(try).Error()
		cancel()
		if err == nil || ctx.Err() != nil {
			return nil
		}
		if wait == least {
			log.Info("API server not reachable yet", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// trimNode removes the fields of a Node that the operator does not read. With thousands of nodes they,
// for example the list of images, are most of the memory.
func trimNode(obj any) (any, error) {
	n, ok := obj.(*corev1.Node)
	if !ok { // a tombstone
		return obj, nil
	}
	n.ManagedFields = nil
	n.Status = corev1.NodeStatus{Conditions: n.Status.Conditions, NodeInfo: corev1.NodeSystemInfo{KubeletVersion: n.Status.NodeInfo.KubeletVersion, BootID: n.Status.NodeInfo.BootID}}
	return n, nil
}

// controlPlaneLabel is kubeadm's label of control planes.
const controlPlaneLabel = "node-role.kubernetes.io/control-plane"

// roleOf returns the role of kubeadm's label.
func roleOf(n *corev1.Node) v1alpha1.Role {
	if _, ok := n.Labels[controlPlaneLabel]; ok {
		return v1alpha1.ControlPlaneRole
	}
	return v1alpha1.WorkerRole
}

func ptr[T any](v T) *T { return &v }

// named is the request for an object of a name.
func named(name string) ctrl.Request {
	return ctrl.Request{NamespacedName: client.ObjectKey{Name: name}}
}
