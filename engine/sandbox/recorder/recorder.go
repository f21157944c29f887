// Package recorder records a rollout from outside and checks it afterwards.
//
// A [Recorder] watches a cluster in a sandbox with its owner's access: Nodes, the operator's
// objects, the autoscaler, budgets of workloads and the leader's lease through the API server, machines
// through the cloud, members through etcd itself, and services from the network of every
// machine. It records each change in an [Entry], and does not depend on the
// operator. [Check] is a pure function of such a journal: it returns the violated invariants of a
// rollout. [Summarize] returns durations.
//
// Observations lag by the network latency, usually a few milliseconds. Interrupted watches
// are recorded, and polls run every [Poll].
package recorder

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/engine/cloud"
	"constellation/engine/sandbox/machine"
	"constellation/internal/delay"
	"constellation/operator/api/v1alpha1"
)

// Poll is the interval of polls of the cloud, etcd and services.
const Poll = 500 * time.Millisecond

// Config selects what to watch. Cluster and Cloud are required.
type Config struct {
	Cluster *rest.Config
	// Cloud lists the machines, with the provider IDs that their Nodes have.
	Cloud Cloud
	// Host gives access to the machines. Without it (nil) neither etcd nor a
	// service is polled; see [Limits.NoMembers].
	Host Host
	// Namespace and Lease identify the lease of the operator's leader. Empty means
	// constellation-system and constellation-operator.
	Namespace, Lease string
	// Nameless means that the lease does not name the leader's node, since machines have no
	// host names of their own: the leader's location is not recorded.
	Nameless bool
	// Service is the address, as IP:port, of a web server. Every machine requests "/"
	// from it. Empty disables that.
	Service string
	// File is the path of the journal in JSON Lines. If it is empty, none is written.
	File string
	Log  *slog.Logger
}

// Cloud lists machines.
type Cloud interface {
	Instances(ctx context.Context) ([]cloud.Instance, error)
}

// Host gives access to machines.
type Host interface {
	// Exec runs a command in the root directory of a machine, and returns its exit code.
	Exec(ctx context.Context, name string, command []string, stdio machine.Stdio) (int, error)
	// Dial connects to an address in the machines' network, DialFrom does so from a machine.
	Dial(ctx context.Context, network, address string) (net.Conn, error)
	DialFrom(ctx context.Context, name, network, address string) (net.Conn, error)
}

// Recorder records until it is closed. Its methods may be called concurrently.
type Recorder struct {
	cfg    Config
	api    client.WithWatch
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu      sync.Mutex
	file    *os.File
	journal []Entry
	err     error // of writing the file

	probing map[string]context.CancelFunc // by machine
	synced  map[string]bool               // kinds that were listed
	change  chan struct{}                 // closed and replaced at each entry
}

// Start starts recording, and returns after the first complete observation. The caller must
// call Close.
func Start(ctx context.Context, cfg Config) (*Recorder, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Namespace == "" {
		cfg.Namespace = "constellation-system"
	}
	if cfg.Lease == "" {
		cfg.Lease = "constellation-operator"
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, fmt.Errorf("start recorder: %w", err)
	}
	access := rest.CopyConfig(cfg.Cluster)
	access.QPS, access.Burst, access.UserAgent = 50, 100, "constellation-recorder"
	api, err := client.NewWithWatch(access, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("start recorder: %w", err)
	}
	r := &Recorder{cfg: cfg, api: api, probing: map[string]context.CancelFunc{}, synced: map[string]bool{}, change: make(chan struct{})}
	if cfg.File != "" {
		if r.file, err = os.OpenFile(cfg.File, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600); err != nil {
			return nil, fmt.Errorf("start recorder: %w", err)
		}
	}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	r.cancel = cancel
	kinds := r.kinds()
	for _, k := range kinds {
		r.done.Go(func() { r.watch(run, k) })
	}
	r.done.Go(func() { r.pollMachines(run) })
	r.done.Go(func() { r.pollAPI(run, access) })
	all := len(kinds) + 1
	if cfg.Host != nil {
		r.done.Go(func() { r.pollMembers(run) })
		all++
	}
	if err := r.Wait(ctx, func([]Entry) bool { return len(r.synced) == all }); err != nil {
		r.Close()
		return nil, fmt.Errorf("start recorder: see everything once: %w", err)
	}
	return r, nil
}

// Close ends the recording. It returns the first error of writing the file.
func (r *Recorder) Close() error {
	r.cancel()
	r.done.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.file != nil {
		r.err = errors.Join(r.err, r.file.Close())
		r.file = nil
	}
	return r.err
}

// Begin marks the current state as the one that a rollout must preserve.
func (r *Recorder) Begin() { r.add(Entry{Fact: Begin}) }

// End marks the end of the rollout.
func (r *Recorder) End() { r.add(Entry{Fact: End}) }

// Record records an observation of the caller.
func (r *Recorder) Record(f Fact) { r.add(Entry{Fact: f}) }

// Note records an action of the caller.
func (r *Recorder) Note(format string, args ...any) {
	r.add(Entry{Fact: Note(fmt.Sprintf(format, args...))})
}

// Journal returns the entries so far.
func (r *Recorder) Journal() []Entry {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.journal)
}

// Wait returns when reached returns true for the journal, or when ctx ends, with its error.
// It calls reached after every entry. reached must not retain the journal.
func (r *Recorder) Wait(ctx context.Context, reached func([]Entry) bool) error {
	for {
		r.mu.Lock()
		ok, change := reached(r.journal), r.change
		r.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-change:
		}
	}
}

func (r *Recorder) add(e Entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e.Time = time.Now().UTC()
	r.journal = append(r.journal, e)
	if r.change != nil { // it is nil in a Recorder that was not started
		close(r.change)
	}
	r.change = make(chan struct{})
	if r.file == nil {
		return
	}
	b, err := json.Marshal(e)
	if err == nil {
		_, err = r.file.Write(append(b, '\n'))
	}
	r.err = errors.Join(r.err, err)
}

// seen records the first list of a kind.
func (r *Recorder) seen(what string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.synced[what] {
		r.synced[what] = true
		close(r.change)
		r.change = make(chan struct{})
	}
}

// kind is one kind of watched objects.
type kind struct {
	name string
	list func() client.ObjectList
	only []client.ListOption
	// entry returns the relevant state of an object; zero if there is none. Repeated equal
	// entries of an object are recorded once.
	entry func(o client.Object, gone bool) Entry
}

func (r *Recorder) kinds() []kind {
	named := func(name string) client.ListOption {
		return client.MatchingFieldsSelector{Selector: fields.OneTermEqualSelector("metadata.name", name)}
	}
	return []kind{
		{"nodes", func() client.ObjectList { return &corev1.NodeList{} }, nil, nodeEntry},
		{"pendingnodes", func() client.ObjectList { return &v1alpha1.PendingNodeList{} }, nil, func(o client.Object, gone bool) Entry {
			p := o.(*v1alpha1.PendingNode).Spec
			e := &Pending{Name: o.GetName(), Gone: gone, Goal: string(p.Goal), Token: p.Token, Donor: p.Donor, Machine: p.ProviderID, Node: p.NodeName, Group: p.GroupID}
			if u := o.(*v1alpha1.PendingNode).Status.Upgrade; u != nil {
				e.Phase = u.Phase
			}
			return Entry{Fact: e}
		}},
		{"joiningnodes", func() client.ObjectList { return &v1alpha1.JoiningNodeList{} }, nil, func(o client.Object, gone bool) Entry {
			return Entry{Fact: &Joining{Name: o.GetName(), Gone: gone}}
		}},
		{"nodeversions", func() client.ObjectList { return &v1alpha1.NodeVersionList{} }, []client.ListOption{named(v1alpha1.NodeVersionName)}, targetEntry},
		{"autoscalingstrategies", func() client.ObjectList { return &v1alpha1.AutoscalingStrategyList{} }, nil, r.strategyEntry},
		{"deployments", func() client.ObjectList { return &appsv1.DeploymentList{} }, nil, r.deploymentEntry},
		{"leases", func() client.ObjectList { return &coordinationv1.LeaseList{} }, []client.ListOption{client.InNamespace(r.cfg.Namespace), named(r.cfg.Lease)}, r.leaseEntry},
		{"pods", func() client.ObjectList { return &corev1.PodList{} }, []client.ListOption{
			client.InNamespace("kube-system"), client.MatchingLabelsSelector{Selector: labels.SelectorFromSet(labels.Set{"component": "kube-apiserver"})},
		}, serverEntry},
		{"poddisruptionbudgets", func() client.ObjectList { return &policyv1.PodDisruptionBudgetList{} }, []client.ListOption{client.InNamespace("default")}, budgetEntry},
	}
}

func nodeEntry(o client.Object, gone bool) Entry {
	n := o.(*corev1.Node)
	_, controlPlane := n.Labels["node-role.kubernetes.io/control-plane"]
	_, ours := n.Annotations[v1alpha1.AnnotationCordoned]
	_, postponed := n.Annotations[v1alpha1.AnnotationPostponed]
	e := &Node{
		Name: n.Name, UID: string(n.UID), Gone: gone, ControlPlane: controlPlane, ProviderID: n.Spec.ProviderID, Kubelet: n.Status.NodeInfo.KubeletVersion,
		Image: n.Annotations[v1alpha1.AnnotationImage], Components: n.Annotations[v1alpha1.AnnotationComponents], Group: n.Annotations[v1alpha1.AnnotationGroup],
		Donor: n.Annotations[v1alpha1.AnnotationDonor], Heir: n.Annotations[v1alpha1.AnnotationHeir], Obsolete: n.Annotations[v1alpha1.AnnotationObsolete] == "true",
		InPlace:  n.Labels[v1alpha1.LabelInPlace] == "true",
		Cordoned: n.Spec.Unschedulable, CordonedByUs: ours && n.Spec.Unschedulable, Postponed: postponed,
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			e.Ready = c.Status == corev1.ConditionTrue
		}
	}
	for _, t := range n.Spec.Taints {
		e.Taints = append(e.Taints, t.Key)
	}
	slices.Sort(e.Taints)
	return Entry{Fact: e}
}

func targetEntry(o client.Object, gone bool) Entry {
	nv := o.(*v1alpha1.NodeVersion)
	if gone {
		return Entry{Fact: Note("NodeVersion was deleted")}
	}
	t := &Target{
		Image: nv.Spec.Image, Components: nv.Spec.KubernetesComponentsReference, Kubernetes: nv.Spec.KubernetesClusterVersion,
		ControlPlane: nv.Status.JoinComponents.ControlPlane, Worker: nv.Status.JoinComponents.Worker, KeepWorkers: nv.Spec.Rollout.KeepWorkers,
	}
	if u := nv.Status.Upgrade; u != nil {
		t.Phase, t.Line, t.Node = u.Phase, u.Line, u.Node
	}
	if w := nv.Status.Waiting; w != nil {
		t.Waiting = w.Reason + ": " + w.Message
	}
	for _, c := range nv.Status.Conditions {
		if c.Type == v1alpha1.ConditionReady {
			t.Ready = c.Status == metav1.ConditionTrue && c.ObservedGeneration == nv.Generation
			t.Reason = c.Reason
		}
	}
	return Entry{Fact: t}
}

func (r *Recorder) strategyEntry(o client.Object, gone bool) Entry {
	if gone {
		return Entry{Fact: Note("AutoscalingStrategy was deleted")}
	}
	s := o.(*v1alpha1.AutoscalingStrategy)
	return Entry{Fact: &Strategy{Enabled: s.Spec.Enabled, Paused: s.Annotations[v1alpha1.AnnotationPaused] == "true"}}
}

// autoscalerName is the prefix of the Deployment's name in an AutoscalingStrategy
// by default.
const autoscalerName = "constellation-cluster-autoscaler"

func (r *Recorder) deploymentEntry(o client.Object, gone bool) Entry {
	d := o.(*appsv1.Deployment)
	if d.Name != autoscalerName {
		return Entry{}
	}
	e := &Scaler{Gone: gone, Replicas: 1, Pods: d.Status.Replicas}
	if d.Spec.Replicas != nil {
		e.Replicas = *d.Spec.Replicas
	}
	return Entry{Fact: e}
}

func (r *Recorder) leaseEntry(o client.Object, gone bool) Entry {
	l := o.(*coordinationv1.Lease)
	holder := ""
	if h := l.Spec.HolderIdentity; h != nil && !gone && !r.cfg.Nameless {
		holder, _, _ = strings.Cut(*h, "_") // host name, which is the node's, and an ID of the process
	}
	return Entry{Fact: &Lease{Holder: holder}}
}

func budgetEntry(o client.Object, gone bool) Entry {
	b := o.(*policyv1.PodDisruptionBudget)
	if b.Status.ObservedGeneration != b.Generation {
		return Entry{}
	}
	return Entry{Fact: &Budget{Name: b.Name, Gone: gone, Healthy: b.Status.CurrentHealthy, Wanted: b.Status.DesiredHealthy}}
}

func serverEntry(o client.Object, gone bool) Entry {
	p := o.(*corev1.Pod)
	e := &Server{Node: p.Spec.NodeName, Gone: gone}
	for _, c := range p.Spec.Containers {
		if i := strings.LastIndexByte(c.Image, ':'); c.Name == "kube-apiserver" && i > 0 {
			e.Version = c.Image[i+1:]
		}
	}
	return Entry{Fact: e}
}

// retry is the delay before an interrupted watch is retried.
const retry = 300 * time.Millisecond

// watch lists and watches one kind until ctx ends.
func (r *Recorder) watch(ctx context.Context, k kind) {
	last := map[string]client.Object{}
	noted := map[string]string{} // the last entry of an object
	note := func(o client.Object, gone bool) {
		key := o.GetNamespace() + "/" + o.GetName()
		if gone {
			delete(last, key)
		} else {
			last[key] = o
		}
		e := k.entry(o, gone)
		if e == (Entry{}) {
			return
		}
		b, err := json.Marshal(e)
		if err != nil {
			r.cfg.Log.Warn("entry not written", "kind", k.name, "err", err)
			return
		}
		if noted[key] != string(b) {
			noted[key] = string(b)
			r.add(e)
		}
	}
	cut := false
	for ctx.Err() == nil {
		l := k.list()
		err := r.once(ctx, k, l, last, note, func() {
			if cut {
				r.add(Entry{Fact: &Stream{Kind: k.name}})
			}
			cut = false
			r.seen(k.name)
		})
		if ctx.Err() != nil {
			return
		}
		if !cut && err != nil {
			cut = true
			r.cfg.Log.Debug("watch cut", "kind", k.name, "err", err)
			r.add(Entry{Fact: &Stream{Kind: k.name, Cut: true}})
		}
		delay.For(ctx, retry)
	}
}

// once lists, compares with the previous list, and watches until the watch ends. A
// watch that the server ends regularly is no error.
func (r *Recorder) once(ctx context.Context, k kind, l client.ObjectList, last map[string]client.Object, note func(client.Object, bool), listed func()) error {
	lctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := r.api.List(lctx, l, k.only...); err != nil {
		return err
	}
	there := map[string]bool{}
	if err := eachItem(l, func(o client.Object) {
		there[o.GetNamespace()+"/"+o.GetName()] = true
		note(o, false)
	}); err != nil {
		return err
	}
	for key, o := range last {
		if !there[key] {
			note(o, true)
		}
	}
	listed()
	w, err := r.api.Watch(ctx, k.list(), append(slices.Clone(k.only), &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: l.GetResourceVersion()}})...)
	if err != nil {
		return err
	}
	defer w.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e, ok := <-w.ResultChan():
			if !ok {
				return errors.New("watch ended")
			}
			o, is := e.Object.(client.Object)
			switch {
			case e.Type == watch.Error || !is:
				return fmt.Errorf("watch refused: %v", e.Object)
			case e.Type == watch.Deleted:
				note(o, true)
			case e.Type != watch.Bookmark:
				note(o, false)
			}
		}
	}
}

// pollMachines polls the cloud, and probes the service from every machine.
func (r *Recorder) pollMachines(ctx context.Context) {
	last := ""
	defer func() {
		for _, stop := range r.probing {
			stop()
		}
	}()
	for ; ctx.Err() == nil; delay.For(ctx, Poll) {
		list, err := r.cloud(ctx)
		if err != nil {
			continue // the daemon restarts
		}
		slices.SortFunc(list, func(a, b cloud.Instance) int { return strings.Compare(a.Name, b.Name) })
		m := &Machines{List: make([]Machine, 0, len(list))}
		for _, i := range list {
			m.List = append(m.List, Machine{
				ID: i.ProviderID, Incarnation: i.Incarnation, Name: i.Name, Group: i.Group, ControlPlane: i.Role == cloud.ControlPlane, State: string(i.State), Token: i.Token, Image: i.Image,
			})
		}
		if b, err := json.Marshal(m); err == nil && string(b) != last {
			last = string(b)
			r.add(Entry{Fact: m})
		}
		r.seen("machines")
		r.probeFrom(ctx, list)
	}
}

func (r *Recorder) cloud(ctx context.Context) ([]cloud.Instance, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return r.cfg.Cloud.Instances(ctx)
}
