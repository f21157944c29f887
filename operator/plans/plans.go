// Package plans carries out Plans: in-place upgrades of nodes, by one privileged Job per node.
// Package upgradev1 has the API, docs/plans.md the contract.
//
// One round is about one Plan: observe, decide, act. The observation is a plain value (view), read
// from a book that informers and our own writes update (book.go). The book sorts nodes in the order
// of each Plan's upgrades, so that an event costs the logarithm of their number and heartbeats cost
// nothing. All policy is in one pure function, decide. Effects are in act.go. A round records its
// intent before each effect, so it may stop anywhere and another process can continue.
//
// The Node's label is the only record of finished upgrades, and status.applying the only record of
// started ones. It is written before the Job. A Job runs only on nodes in status.applying.
package plans

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"constellation/operator/api/upgradev1"
	"constellation/operator/crash"
	"constellation/operator/replica"
)

// Config is what Run needs. Cluster, Name and Namespace are required.
type Config struct {
	// Cluster is the access to the API server. Its rate limits are replaced.
	Cluster *rest.Config
	// Name is the name of the controller, of its Lease, and in a label of its Jobs. Jobs of other
	// controllers are ignored.
	Name string
	// Namespace holds the Plans, the Jobs, the Secrets and the Lease.
	Namespace string
	// Identity distinguishes replicas, for example by the name of the Node; empty: the host's name.
	Identity string
	// Settings are the common settings of Jobs and Plans.
	Settings Settings
	// Election enables leader election, so that only one replica acts.
	Election bool
	// Threads is the number of concurrent rounds, each of another Plan. Zero means 2.
	Threads int
	// MetricsAddress and HealthAddress are host:port of plain HTTP; empty serves none.
	MetricsAddress, HealthAddress string
	Log                           *slog.Logger

	// For tests. at is called before and after each effect, now is the clock of all decisions, and
	// drainsAsked replaces the constant of that name.
	at          func(point string)
	now         func() time.Time
	drainsAsked time.Duration
}

// Run carries out the Plans of a namespace until ctx ends or leadership is lost. It first creates or
// updates the CRD, unless that is up to date.
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
	c.drainsAsked = cmp.Or(c.drainsAsked, drainsAsked)
	if c.Name == "" || c.Namespace == "" {
		return errors.New("run plans controller: name or namespace is empty: set both, for example to system-upgrade-controller and system-upgrade")
	}
	scheme := runtime.NewScheme() // only of the types in use: all of Kubernetes takes megabytes
	if err := errors.Join(corev1.AddToScheme(scheme), batchv1.AddToScheme(scheme), coordinationv1.AddToScheme(scheme), eventsv1.AddToScheme(scheme), upgradev1.AddToScheme(scheme)); err != nil {
		return fmt.Errorf("register kinds: %w", err)
	}
	access := replica.Access(c.Cluster, "constellation-plans")
	if err := bringKind(ctx, access, c.Log); err != nil {
		return err
	}
	var turn resourcelock.Interface
	if c.Election {
		var err error
		host, _ := os.Hostname()
		turn, err = resourcelock.NewFromKubeconfig(resourcelock.LeasesResourceLock, c.Namespace, c.Name,
			resourcelock.ResourceLockConfig{Identity: cmp.Or(c.Identity, host) + "_" + rand.Text()}, rest.AddUserAgent(access, "leader-election"), replica.RenewDeadline)
		if err != nil {
			return fmt.Errorf("set up election: %w", err)
		}
	}
	o := replica.Options(scheme, c.Log, c.MetricsAddress, c.HealthAddress)
	o.Cache = cache.Options{
		DefaultTransform:  cache.TransformStripManagedFields(),
		DefaultNamespaces: map[string]cache.Config{c.Namespace: {}},
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Node{}: {Transform: trimNode},
			&batchv1.Job{}: {Transform: trimJob, Label: ours(c.Name)},
			// The Job reports the result of a succeeded pod.
			&corev1.Pod{}: {Transform: trimPod, Label: ours(c.Name), Field: fields.OneTermNotEqualSelector("status.phase", string(corev1.PodSucceeded))},
		},
	}
	o.LeaderElection, o.LeaderElectionResourceLockInterface = c.Election, turn
	mgr, err := manager.New(access, o)
	if err != nil {
		return fmt.Errorf("connect to API server: %w", err)
	}
	m, err := newFigures()
	if err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	k := newController(c, mgr, m)
	if k.pods, err = corev1client.NewForConfig(access); err != nil {
		return fmt.Errorf("connect to API server: %w", err)
	}
	if err := errors.Join(k.watch(ctx, mgr.GetCache()), mgr.Add(k), replica.AddHealthChecks(mgr)); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	c.Log.Info("plans controller started", "name", c.Name, "namespace", c.Namespace)
	// All work of the leader ends before Run returns.
	defer k.wait()
	if err := mgr.Start(ctx); err != nil && ctx.Err() == nil {
		return fmt.Errorf("run controllers: %w", err)
	}
	return nil
}

// ours selects the Jobs and pods of a controller.
func ours(controller string) labels.Selector {
	return labels.SelectorFromSet(labels.Set{upgradev1.LabelController: controller})
}

// tasks are goroutines that must end before Run returns.
type tasks struct{ sync.WaitGroup }
