package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/kube/preflight"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/operator/api/v1alpha1"
)

var _ check.Inspector = (*Client)(nil)

// inspectLimit bounds what Running retries.
const inspectLimit = 30 * time.Second

// Labels, and their values, that kubeadm and our charts set.
const (
	componentLabel = "component"
	dnsSelector    = "kube-dns" // value of k8s-app, for CoreDNS too
	partOfLabel    = "app.kubernetes.io/part-of"
	partOf         = "constellation"
)

// seen is the data that Running has read, one field per request.
type seen struct {
	version     string
	nodes       []cluster.Node
	pods        []corev1.Pod // of kube-system, without those of DaemonSets
	daemonSets  []cluster.Service
	deployments []cluster.Service
	target      cluster.NodeTarget
	join        cluster.JoinConfig
	kinds       []string
}

// Running implements [check.Inspector].
//
// It sends eight requests concurrently, so that high latency costs one round trip. The API
// servers' versions come from one /version and from the images of the static pods. Asking each
// API server would cost a request per control plane node, and many are unreachable from
// outside.
func (c *Client) Running(ctx context.Context) (compat.Running, error) {
	ctx, cancel := context.WithTimeout(ctx, inspectLimit)
	defer cancel()
	// All types here are built in, and nodes may be thousands.
	config := rest.CopyConfig(c.config)
	config.AcceptContentTypes, config.ContentType = runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON, runtime.ContentTypeProtobuf
	core, err := kubernetes.NewForConfig(config)
	if err != nil {
		return compat.Running{}, fmt.Errorf("make Kubernetes client: %w", err)
	}

	var s seen
	reads := map[string]func() error{
		"nodes":       func() (err error) { s.nodes, err = c.allNodes(ctx, core); return err },
		"system pods": func() (err error) { s.pods, err = systemPods(ctx, core); return err },
		"DaemonSets":  func() (err error) { s.daemonSets, err = daemonSetServices(ctx, core); return err },
		"Deployments": func() (err error) { s.deployments, err = deploymentServices(ctx, core); return err },
		"NodeVersion": func() (err error) { s.target, err = c.NodeTarget(ctx); return err },
		"join-config": func() (err error) { s.join, err = c.JoinConfig(ctx); return err },
		"kinds":       func() (err error) { s.kinds, err = c.ownKinds(ctx); return err },
	}
	failed := map[string]error{}
	var mu sync.Mutex // of failed
	var reading sync.WaitGroup
	for name, read := range reads {
		reading.Go(func() {
			if err := read(); err != nil {
				mu.Lock()
				failed[name] = err
				mu.Unlock()
			}
		})
	}
	// This request is not retried: it shows quickly whether the API server is reachable.
	var down error
	if s.version, down = c.Version(ctx); down != nil {
		cancel()
	}
	reading.Wait()
	if down != nil {
		return compat.Running{}, down
	}
	if err := failed["nodes"]; err != nil && !errors.Is(err, cluster.ErrForbidden) {
		return compat.Running{}, fmt.Errorf("list nodes: %w", err)
	}
	out := s.running()
	for _, name := range slices.Sorted(maps.Keys(failed)) {
		switch err := failed[name]; {
		case errors.Is(err, context.Canceled):
			return compat.Running{}, err
		case errors.Is(err, cluster.ErrAbsent):
			out.Missing = append(out.Missing, name+": not in the cluster")
		case errors.Is(err, cluster.ErrForbidden):
			out.Denied = append(out.Denied, denial(name, err))
		case errors.Is(err, cluster.ErrDenied):
			out.Missing = append(out.Missing, name+": "+err.Error())
		default:
			out.Missing = append(out.Missing, fmt.Sprintf("%s: %v", name, err))
		}
	}
	slices.SortFunc(out.Denied, func(a, b cluster.Denial) int {
		return cmp.Or(cmp.Compare(a.Resource, b.Resource), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Verb, b.Verb))
	})
	out.Denied = slices.Compact(out.Denied)
	return out, nil
}

// refusal matches the message of a forbidden request.
var refusal = regexp.MustCompile(`User "((?:[^"\\]|\\.)*)" cannot (\S+) resource "([^"]*)" in API group "([^"]*)"(?: in the namespace "([^"]*)")?`)

// denial parses a forbidden request. Authorizers may word it differently; then only the name
// of the resource is known.
func denial(name string, err error) cluster.Denial {
	m := refusal.FindStringSubmatch(err.Error())
	if m == nil {
		return cluster.Denial{Verb: "read", Resource: name}
	}
	d := cluster.Denial{User: m[1], Verb: m[2], Resource: m[3], Namespace: m[5]}
	if m[4] != "" {
		d.Resource += "." + m[4]
	}
	return d
}

// Preflight implements [check.Inspector].
func (c *Client) Preflight(ctx context.Context, hops []check.PreflightRequest, emit func(plan.Event)) ([][]plan.Finding, error) {
	found, err := preflight.Run(ctx, c.config, hops, emit)
	if err != nil {
		return nil, fmt.Errorf("run preflight checks: %w", classify(err))
	}
	return found, nil
}

// running evaluates the data that was read.
func (s *seen) running() compat.Running {
	out := compat.Running{Nodes: s.nodes, Target: s.target, JoinConfig: s.join, Kinds: s.kinds, NoImages: s.target.Components != "" && s.target.Image == ""}
	missing := func(format string, args ...any) { out.Missing = append(out.Missing, fmt.Sprintf(format, args...)) }
	add := func(to *compat.Span, of, v string) {
		parsed, err := version.Parse(v)
		if err != nil {
			missing("%s: invalid version %q", of, v)
			return
		}
		*to = to.Add(parsed)
	}

	add(&out.Kubernetes, "version of the API server", s.version)
	servers := map[string]bool{} // by node
	var silent []string          // nodes of API servers that are not ready
	for i := range s.pods {
		// The pods of a machine outlive its Node until they are collected.
		if len(s.nodes) > 0 && !slices.ContainsFunc(s.nodes, func(n cluster.Node) bool { return n.Name == s.pods[i].Spec.NodeName }) {
			continue
		}
		switch p := &s.pods[i]; p.Labels[componentLabel] {
		case "kube-apiserver":
			servers[p.Spec.NodeName] = true
			add(&out.Kubernetes, "version of the API server on "+p.Spec.NodeName, tagOf(p))
			if !podReady(p) {
				silent = append(silent, p.Spec.NodeName)
			}
		case "etcd":
			// The oldest version decides the next upgrade target.
			if tag := tagOf(p); out.Etcd == "" || older(tag, out.Etcd) {
				out.Etcd = tag
			}
		}
	}
	out.ExternalEtcd = len(servers) > 0 && out.Etcd == ""
	for _, node := range silent {
		if len(servers) > 1 { // the only API server has just answered, even if the kubelet has not reported it ready
			missing("API server on %s: not ready", node)
		}
	}
	for _, n := range s.nodes {
		image, kubelet := &out.WorkerImage, &out.WorkerKubelet
		if n.Role == "control-plane" {
			image, kubelet = &out.ControlPlaneImage, &out.ControlPlaneKubelet
			if !servers[n.Name] && len(servers) > 0 {
				missing("API server on %s: no pod found", n.Name)
			}
		}
		out.WorkersInPlace = out.WorkersInPlace || n.InPlace && n.Role != "control-plane"
		add(kubelet, "kubelet of "+n.Name, n.Kubernetes)
		switch {
		case out.NoImages:
		case n.Image == "":
			missing("image of %s: annotation is missing", n.Name)
		case n.Image == s.target.Image:
			add(image, "image of "+n.Name, s.target.ImageVersion)
		}
	}

	out.Parts = slices.Concat(s.daemonSets, s.deployments, s.dns())
	for i := range out.Parts {
		p := &out.Parts[i]
		p.Name = cmp.Or(friendly[p.Name], p.Name)
		if p.Kind == cluster.ServiceOfRelease {
			add(&out.Services, "version of "+p.Name, p.Version)
		}
	}
	slices.SortFunc(out.Parts, func(a, b cluster.Service) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// dns returns the version of CoreDNS from its pods; none without pods.
func (s *seen) dns() []cluster.Service {
	out := cluster.Service{Name: "coredns", Kind: cluster.ServiceOfKubernetes}
	for i := range s.pods {
		p := &s.pods[i]
		if p.Labels["k8s-app"] != dnsSelector || p.DeletionTimestamp != nil {
			continue
		}
		out.Wanted++
		if podReady(p) {
			out.Ready++
		}
		if tag := tagOf(p); out.Version == "" || older(tag, out.Version) {
			out.Version = tag
		}
		out.Message = cmp.Or(out.Message, podProblem(p))
	}
	if out.Wanted == 0 {
		return nil
	}
	return []cluster.Service{out}
}

func tagOf(p *corev1.Pod) string { return versionOf(nil, p.Spec) }

// older compares tags as versions. An invalid version is older than a valid one.
func older(a, b string) bool {
	x, errA := version.Parse(a)
	y, errB := version.Parse(b)
	if errA != nil || errB != nil {
		return errB == nil
	}
	return x.Less(y)
}

func podReady(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(x corev1.PodCondition) bool {
		return x.Type == corev1.PodReady && x.Status == corev1.ConditionTrue
	})
}

// allNodes lists the nodes in one request: in protobuf even thousands are a few megabytes, and
// each page would cost a request.
func (c *Client) allNodes(ctx context.Context, core kubernetes.Interface) (out []cluster.Node, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		l, err := core.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		out = make([]cluster.Node, len(l.Items))
		for i := range l.Items {
			out[i] = *c.toNode(ctx, &l.Items[i])
		}
		return nil
	})
	slices.SortFunc(out, func(a, b cluster.Node) int { return cmp.Compare(a.Name, b.Name) })
	return out, err
}

// systemPods lists the static pods of the control plane and CoreDNS. They have no label in
// common, but they lack the label of DaemonSet pods, of which there are as many as nodes.
func systemPods(ctx context.Context, core kubernetes.Interface) (out []corev1.Pod, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		l, err := core.CoreV1().Pods(systemNamespace).List(ctx, metav1.ListOptions{LabelSelector: "!" + appsv1.ControllerRevisionHashLabelKey})
		if err != nil {
			return err
		}
		out = l.Items
		return nil
	})
	return out, err
}

// daemonSetServices lists all DaemonSets in one request, and returns ours and kube-proxy.
func daemonSetServices(ctx context.Context, core kubernetes.Interface) (out []cluster.Service, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		l, err := core.AppsV1().DaemonSets(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		out = nil
		for i := range l.Items {
			switch d := &l.Items[i]; {
			case d.Namespace == Namespace && d.Labels[partOfLabel] == partOf && !unused(d):
				out = append(out, ofDaemonSet(d, cluster.ServiceOfRelease))
			case d.Namespace == systemNamespace && d.Name == "kube-proxy":
				out = append(out, ofDaemonSet(d, cluster.ServiceOfKubernetes))
			}
		}
		return nil
	})
	return out, err
}

// deploymentServices returns our Deployments.
func deploymentServices(ctx context.Context, core kubernetes.Interface) (out []cluster.Service, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		l, err := core.AppsV1().Deployments(Namespace).List(ctx, metav1.ListOptions{LabelSelector: partOfLabel + "=" + partOf})
		if err != nil {
			return err
		}
		out = nil
		for i := range l.Items {
			out = append(out, ofDeployment(&l.Items[i], cluster.ServiceOfRelease))
		}
		return nil
	})
	return out, err
}

// ownKinds returns the names of our definitions. It lists our API group only, since the cost
// of a full list depends on what else is installed.
func (c *Client) ownKinds(ctx context.Context) (out []string, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		b, err := c.core.Discovery().RESTClient().Get().AbsPath("/apis", v1alpha1.GroupVersion.Group, v1alpha1.GroupVersion.Version).
			SetHeader("Accept", runtime.ContentTypeJSON).DoRaw(ctx)
		if err != nil {
			return err
		}
		var l metav1.APIResourceList
		if err := unmarshal(b, &l); err != nil {
			return err
		}
		out = nil
		for _, r := range l.APIResources {
			if !strings.Contains(r.Name, "/") {
				out = append(out, r.Name+"."+v1alpha1.GroupVersion.Group)
			}
		}
		return nil
	})
	slices.Sort(out)
	return out, err
}

// LocalData implements [check.Inspector].
func (c *Client) LocalData(ctx context.Context) (cluster.LocalData, error) {
	d, err := preflight.LocalData(ctx, c.config)
	if err != nil {
		return d, fmt.Errorf("list volumes on nodes: %w", classify(err))
	}
	return d, nil
}
