// Package operator brings a cluster's nodes to their target. It finds the scaling
// groups of the cloud, notes on every Node what it was made from, replaces machines
// that differ from the target, one safe step at a time, lets the agent upgrade
// Kubernetes, and says in NodeVersion how far all that is and what it waits for.
//
// One round is: observe, decide, act, report. What was observed is a plain value
// (world); it may be old or incomplete. All policy is in one pure function of it,
// decide: the target and the world go in, actions that are safe in any order come out,
// each on a condition that it names (actionKind). Its conditions have names (rule),
// and an explorer runs it through all states of small worlds and shows that each is
// needed; docs/design/operator.md says how to change one. Whoever acts (act.go) makes every
// effect conditional on what it was decided from, so rounds may be repeated, may stop
// anywhere, and may be done by two leaders at a time.
//
// Nothing is kept but in the cluster: intents are PendingNodes, written before the
// cloud is asked for anything, and marks are annotations of Nodes. What the operator
// itself remembers (fleet, view, hostView, efforts) only saves it from asking again
// or too often; a new process starts without it.
//
// No machine is deleted unless a PendingNode is bound to it, and no ScalingGroup is
// ever removed: a cloud's list may be partial, and the object carries what its owner
// set.
package operator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
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
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/crash"
	"constellation/operator/decision"
	"constellation/operator/liblog"
	"constellation/operator/nodelock"
)

// LeaseName is the Lease of the leader, in the operator's namespace.
const LeaseName = "constellation-operator"

// cloudAPI is where the cluster's nodes come from. Its methods are called at the same
// time by several goroutines. Errors wrap those of package cloud; after one, nothing
// is known about what was asked for.
type cloudAPI interface {
	// Groups returns the scaling groups. The list may be partial.
	Groups(context.Context) ([]cloud.Group, error)
	// Instances returns the machines of all groups, those that are being deleted
	// included. The list may be partial.
	Instances(context.Context) ([]cloud.Instance, error)
	// Instance returns one instance; the error wraps cloud.ErrNotFound if the cloud
	// does not know it, or no longer.
	Instance(ctx context.Context, providerID string) (cloud.Instance, error)
	// SetGroupImage sets the image of the group's next machines.
	SetGroupImage(ctx context.Context, groupID, image string) error
	// CreateInstances makes a machine per token, and none for a token that was used
	// before: that one's instance is returned, Terminated if it is gone. The answer is
	// in the order of the tokens.
	CreateInstances(ctx context.Context, groupID string, tokens []string) ([]cloud.Instance, error)
	// DeleteInstances asks for the machines to be deleted. What is not there is a
	// success.
	DeleteInstances(ctx context.Context, providerIDs []string) error
}

// host is the machine that the operator runs on, through its agent. Only control
// planes have members of etcd, and all of these know all members.
type host interface {
	// Members returns the members of etcd.
	Members(context.Context) ([]decision.Member, error)
	// MoveLeader makes another member than from the leader: that of node to, or, if to
	// is empty, one that the agent chooses.
	MoveLeader(ctx context.Context, from, to string) error
	// RemoveMember removes the member of a node, unless fewer than voters started ones
	// would stay. If there is none nothing happens.
	RemoveMember(ctx context.Context, node string, voters int) error
	// Run returns the latest run of this machine's agent; zero: there was none.
	Run(context.Context) (decision.UpgradeRun, error)
	// Upgrade asks for an upgrade of Kubernetes, or attaches to it, and follows it to its
	// end, over cut connections and restarts of the agent. What happens goes to tell. It
	// returns nil when the machine runs the version.
	Upgrade(ctx context.Context, token, version, reference string, components component.Signed, tell func(decision.UpgradeRun)) error
}

// drains empties nodes in the background. See drainer.
type drains interface {
	// drain begins to evict what is on the node, or goes on. It returns at once.
	drain(node string)
	// state returns what was seen last: whether nothing is left to evict, and what
	// refuses. Of a node that was never drained nothing is known: false, "".
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
	// Agent is the path of the socket of this machine's agent. Empty: there is none, and
	// then no control plane is replaced and Kubernetes is not upgraded. Host, if not nil,
	// is asked instead.
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
	// SnapshotAddress is host:port where snapshots of etcd are had, see [SnapshotPath];
	// empty, or without Agent, serves none.
	SnapshotAddress string
	// DiscoveryInterval is how often the cloud is asked for its groups, besides when
	// nodes come and go. Zero means 15 minutes.
	DiscoveryInterval time.Duration
	// CloudInterval is how often machines are listed while some come or go. Zero means
	// 2 seconds.
	CloudInterval time.Duration
	// NoElection acts without being elected, for development.
	NoElection bool
	Log        *slog.Logger

	// For tests. at is told before and after each effect; leave takes the place of what
	// makes another replica the leader; now is the clock of all deadlines.
	at     func(point string)
	leave  func(context.Context) error
	now    func() time.Time
	agents agents // asked instead of those that Relay reaches
}

const (
	defaultDiscovery = 15 * time.Minute

	// The API server sheds load by itself; these only keep a bug from becoming a flood.
	clientQPS, clientBurst = 500, 1000

	// A leader that hangs is replaced after leaseDuration, one that stops at once.
	leaseDuration = 15 * time.Second
	renewDeadline = 10 * time.Second
	retryPeriod   = 2 * time.Second
)

// Run runs the operator until ctx ends or leadership is lost. After an error the
// process must end: what it began as leader it may not continue.
func Run(ctx context.Context, c Config) error {
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
	// The framework's logger is the process's; so is the operator.
	libraries := logr.FromSlogHandler(liblog.Handler(c.Log.Handler()))
	ctrl.SetLogger(libraries)
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return fmt.Errorf("register kinds: %w", err)
	}
	access := rest.CopyConfig(c.Cluster)
	access.QPS, access.Burst = clientQPS, clientBurst
	access.UserAgent = "constellation-operator"
	hangUp(access)
	if err := await(ctx, access, c.Log); err != nil {
		return err
	}
	yes := true
	metrics := c.MetricsAddress
	if metrics == "" {
		metrics = "0" // controller-runtime's word for none
	}
	mgr, err := manager.New(access, manager.Options{
		Scheme: scheme,
		Logger: libraries,
		Cache: cache.Options{
			DefaultTransform: cache.TransformStripManagedFields(),
			ByObject: map[client.Object]cache.ByObject{
				&corev1.Node{}: {Transform: trimNode},
				// The only one that is removed; so its name can stand in our role.
				&rbacv1.ClusterRoleBinding{}: {Field: fields.OneTermEqualSelector("metadata.name", autoApproval)},
				// The only one there is; so its name can stand in our role.
				&v1alpha1.NodeVersion{}: {Field: fields.OneTermEqualSelector("metadata.name", v1alpha1.NodeVersionName)},
			},
		},
		// These are read by name and now and then; nobody may list them.
		Client:         client.Options{Cache: &client.CacheOptions{DisableFor: []client.Object{&corev1.ConfigMap{}, &appsv1.Deployment{}}}},
		LeaderElection: !c.NoElection, LeaderElectionID: LeaseName, LeaderElectionNamespace: c.Namespace,
		LeaderElectionReleaseOnCancel: true,
		LeaseDuration:                 ptr(leaseDuration), RenewDeadline: ptr(renewDeadline), RetryPeriod: ptr(retryPeriod),
		Metrics:                metricsserver.Options{BindAddress: metrics},
		HealthProbeBindAddress: c.HealthAddress,
		// Names are for metrics; a process that runs two operators is a test.
		Controller: config.Controller{SkipNameValidation: &yes},
	})
	if err != nil {
		return fmt.Errorf("connect to API server: %w", err)
	}
	gauges, err := newGauges()
	if err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	counters, err := newCounters()
	if err != nil {
		return fmt.Errorf("register metrics: %w", err)
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
		h.log = c.Log
		c.Host = h
		if c.SnapshotAddress != "" {
			// Every replica does, leader or not: each speaks for its own host.
			s := newSnapshots(core, h.snapshot, c.Log)
			s.state = h.etcdState
			if err := mgr.Add(everywhere(func(ctx context.Context) error { return s.serve(ctx, c.SnapshotAddress) })); err != nil {
				return err
			}
		}
	}
	if c.leave == nil {
		c.leave = func(ctx context.Context) error { return leave(ctx, core, c.Namespace, c.Pod) }
	}
	if c.agents == nil && c.Relay {
		r := newRelays(access, core, c.Namespace, c.Pod, c.Log)
		defer r.keep(nil)
		c.agents = r
	}
	// What was begun as leader ends before Run returns.
	lead, resign := context.WithCancel(ctx)
	var begun sync.WaitGroup
	defer begun.Wait()
	defer resign()
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
	defer drainer.close()
	versions.drains = drainer
	versions.gate = newReadinessGate(core, versions.wake, c.Log)
	defer versions.gate.close()
	versions.lock = nodelock.New(mgr.GetClient(), mgr.GetAPIReader(), c.now)
	versions.init()
	for _, add := range []func(manager.Manager) error{
		(&joiningNodes{client: mgr.GetClient(), cloud: fleet, events: events, log: c.Log, now: c.now}).setup,
		(&servingRequests{client: mgr.GetClient(), cloud: fleet.cloudAPI, events: events, counters: counters, log: c.Log, now: c.now}).setup,
		(&autoApprovals{client: mgr.GetClient(), log: c.Log}).setup,
		groups.setup, scaling.setup, versions.setup,
		(&mirror{client: mgr.GetClient(), fresh: mgr.GetAPIReader(), log: c.Log}).setup,
		addHealthChecks,
		func(mgr manager.Manager) error {
			return mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
				versions.lock.Keep(ctx)
				return nil
			}))
		},
	} {
		if err := add(mgr); err != nil {
			return err
		}
	}
	c.Log.Info("operator started", "namespace", c.Namespace)
	if err := mgr.Start(ctx); err != nil && ctx.Err() == nil {
		return fmt.Errorf("run controllers: %w", err)
	}
	return nil
}

// await returns when the API server answers, or ctx ends. On a new machine the operator
// may start before the machine's network leads to it, and giving up would cost it
// kubelet's pause before the next start.
func await(ctx context.Context, access *rest.Config, log *slog.Logger) error {
	d, err := discovery.NewDiscoveryClientForConfig(access)
	if err != nil {
		return fmt.Errorf("connect to API server: %w", err)
	}
	const least, most = 100 * time.Millisecond, 500 * time.Millisecond
	for wait := least; ; wait = min(2*wait, most) {
		try, cancel := context.WithTimeout(ctx, renewDeadline)
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

// addHealthChecks says ready once the caches hold what the API server has; a replica that
// is not the leader is ready to become it.
func addHealthChecks(mgr manager.Manager) error {
	var synced atomic.Bool
	return errors.Join(
		mgr.AddHealthzCheck("ping", healthz.Ping),
		mgr.AddReadyzCheck("caches", func(*http.Request) error {
			if !synced.Load() {
				return errors.New("caches are not filled yet")
			}
			return nil
		}),
		mgr.Add(everywhere(func(ctx context.Context) error {
			if mgr.GetCache().WaitForCacheSync(ctx) {
				synced.Store(true)
			}
			<-ctx.Done()
			return nil
		})),
	)
}

// everywhere is a Runnable that needs no leadership.
type everywhere func(context.Context) error

func (f everywhere) Start(ctx context.Context) error { return f(ctx) }
func (everywhere) NeedLeaderElection() bool          { return false }

// trimNode keeps of a Node what the operator reads: at thousands of nodes the rest,
// such as the list of images, is most of the memory.
func trimNode(obj any) (any, error) {
	n, ok := obj.(*corev1.Node)
	if !ok { // a tombstone
		return obj, nil
	}
	n.ManagedFields = nil
	n.Status = corev1.NodeStatus{Conditions: n.Status.Conditions, NodeInfo: corev1.NodeSystemInfo{KubeletVersion: n.Status.NodeInfo.KubeletVersion}}
	return n, nil
}

// roleOf is what kubeadm's label says.
func roleOf(n *corev1.Node) v1alpha1.Role {
	if _, ok := n.Labels["node-role.kubernetes.io/control-plane"]; ok {
		return v1alpha1.ControlPlaneRole
	}
	return v1alpha1.WorkerRole
}

func ptr[T any](v T) *T { return &v }

// named is the request for an object of a name.
func named(name string) ctrl.Request {
	return ctrl.Request{NamespacedName: client.ObjectKey{Name: name}}
}
