package kube

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/operator/api/v1alpha1"
)

const versionLabel = "app.kubernetes.io/version"

// friendly are display names of services whose workload has an unclear name.
var friendly = map[string]string{"joinservice": "join-service", "constellation-operator": "operator"}

// plansName is the Deployment of our charts that applies Plans.
const plansName = "constellation-plans"

// OtherPlans implements [engine.Cluster].
func (c *Client) OtherPlans(ctx context.Context) (name string, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		list, err := c.core.AppsV1().Deployments(engine.PlansNamespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		name = ""
		for i := range list.Items {
			d := &list.Items[i]
			if d.Name != plansName && name == "" && (d.Spec.Replicas == nil || *d.Spec.Replicas > 0) && slices.ContainsFunc(d.Spec.Template.Spec.Containers, carriesOutPlans) {
				name = d.Name
			}
		}
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("find controllers of Plans in namespace %s: %w", engine.PlansNamespace, err)
	}
	return name, nil
}

// carriesOutPlans reports whether a container is system-upgrade-controller or a replacement of
// it, which is configured by the same environment variable.
func carriesOutPlans(c corev1.Container) bool {
	return slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == "SYSTEM_UPGRADE_CONTROLLER_NAME" })
}

// Services implements [engine.Cluster].
func (c *Client) Services(ctx context.Context) ([]cluster.Service, error) {
	var out []cluster.Service
	err := retry(ctx, func(ctx context.Context) error {
		out = nil
		for _, place := range []struct {
			namespace, selector string
			kind                string
			only                []string
		}{
			{Namespace, "app.kubernetes.io/part-of=constellation", cluster.ServiceOfRelease, nil},
			{systemNamespace, "", cluster.ServiceOfKubernetes, []string{"kube-proxy", "coredns"}},
		} {
			o := metav1.ListOptions{LabelSelector: place.selector}
			sets, err := c.core.AppsV1().DaemonSets(place.namespace).List(ctx, o)
			if err != nil {
				return err
			}
			deployments, err := c.core.AppsV1().Deployments(place.namespace).List(ctx, o)
			if err != nil {
				return err
			}
			wanted := func(name string) bool { return place.only == nil || slices.Contains(place.only, name) }
			for i := range sets.Items {
				if d := &sets.Items[i]; wanted(d.Name) && !unused(d) {
					out = append(out, ofDaemonSet(d, place.kind))
				}
			}
			for i := range deployments.Items {
				if d := &deployments.Items[i]; wanted(d.Name) {
					out = append(out, ofDeployment(d, place.kind))
				}
			}
		}
		for i := range out {
			if out[i].Ready < out[i].Wanted {
				out[i].Message = c.whyNotReady(ctx, out[i])
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list services: %w", err)
	}
	for i := range out {
		if n := friendly[out[i].Name]; n != "" {
			out[i].Name = n
		}
	}
	slices.SortFunc(out, func(a, b cluster.Service) int { return cmp.Compare(a.Name, b.Name) })
	return out, nil
}

// unused reports whether d is the relay of a cluster without in-place upgrades.
func unused(d *appsv1.DaemonSet) bool {
	return d.Spec.Template.Spec.NodeSelector[v1alpha1.LabelInPlace] != "" && d.Status.DesiredNumberScheduled == 0
}

func ofDaemonSet(d *appsv1.DaemonSet, kind string) cluster.Service {
	return cluster.Service{
		Name: d.Name, Version: versionOf(d.Labels, d.Spec.Template.Spec), Kind: kind,
		Ready: int(d.Status.NumberReady), Wanted: int(d.Status.DesiredNumberScheduled),
	}
}

func ofDeployment(d *appsv1.Deployment, kind string) cluster.Service {
	wanted := 1
	if d.Spec.Replicas != nil {
		wanted = int(*d.Spec.Replicas)
	}
	return cluster.Service{Name: d.Name, Version: versionOf(d.Labels, d.Spec.Template.Spec), Kind: kind, Ready: int(d.Status.ReadyReplicas), Wanted: wanted}
}

// versionOf is the chart's version, or else the tag of the first image.
func versionOf(labels map[string]string, spec corev1.PodSpec) string {
	if v := labels[versionLabel]; v != "" {
		return v
	}
	if len(spec.Containers) == 0 {
		return ""
	}
	image, _, _ := strings.Cut(spec.Containers[0].Image, "@")
	if i := strings.LastIndexByte(image, ':'); i > strings.LastIndexByte(image, '/') {
		return image[i+1:]
	}
	return ""
}

// whyNotReady describes why the first unready pod is not ready; empty if unknown.
func (c *Client) whyNotReady(ctx context.Context, s cluster.Service) string {
	namespace, selector := Namespace, podLabel+"="+s.Name
	if s.Kind == cluster.ServiceOfKubernetes {
		namespace, selector = systemNamespace, "k8s-app="+map[string]string{"coredns": "kube-dns"}[s.Name]
		if s.Name == "kube-proxy" {
			selector = "k8s-app=kube-proxy"
		}
	}
	l, err := c.core.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return ""
	}
	for i := range l.Items {
		if why := c.trouble(ctx, &l.Items[i]); why != "" {
			return why
		}
	}
	return ""
}

// trouble is podProblem with further details of the cause.
func (c *Client) trouble(ctx context.Context, p *corev1.Pod) string {
	why := podProblem(p)
	if why == "" {
		return ""
	}
	return joinNonEmpty(why, c.lastWords(ctx, p), c.pressure(ctx, p))
}

// pressure names the nodes with resource pressure if p is unschedulable: the scheduler only
// reports taints.
func (c *Client) pressure(ctx context.Context, p *corev1.Pod) string {
	if p.Spec.NodeName != "" {
		return ""
	}
	l, err := c.core.CoreV1().Nodes().List(ctx, metav1.ListOptions{Limit: 100})
	if err != nil {
		return ""
	}
	var short []string
	for i := range l.Items {
		for _, x := range l.Items[i].Status.Conditions {
			if strings.HasSuffix(string(x.Type), "Pressure") && x.Status == corev1.ConditionTrue {
				short = append(short, fmt.Sprintf("node %s has %s", l.Items[i].Name, x.Type))
			}
		}
	}
	if len(short) > 3 {
		short = append(short[:3], fmt.Sprintf("and %d more", len(short)-3))
	}
	return strings.Join(short, ", ")
}

// podProblem describes why a pod is not ready: "joinservice-x4k2z: ImagePullBackOff: ...". It
// is empty if the pod is ready or starting normally.
func podProblem(p *corev1.Pod) string {
	for _, s := range append(slices.Clone(p.Status.InitContainerStatuses), p.Status.ContainerStatuses...) {
		switch w, t := s.State.Waiting, s.LastTerminationState.Terminated; {
		case w != nil && w.Reason != "ContainerCreating" && w.Reason != "PodInitializing":
			return joinNonEmpty(p.Name, w.Reason, w.Message)
		case t != nil && !s.Ready:
			return joinNonEmpty(p.Name, fmt.Sprintf("restarted %d times", s.RestartCount), t.Reason, fmt.Sprintf("exit code %d", t.ExitCode))
		}
	}
	for _, x := range p.Status.Conditions {
		if x.Type == corev1.PodScheduled && x.Status == corev1.ConditionFalse {
			// The scheduler's message goes on about preemption for several sentences.
			first, _, _ := strings.Cut(x.Message, ". ")
			return joinNonEmpty(p.Name, x.Reason, first)
		}
	}
	return ""
}

func joinNonEmpty(parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), ": ")
}
