package kube

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/cluster"
)

const (
	joinServiceName = "joinservice" // its label
	joinServicePort = "atls"        // the name of its container's port
)

// JoinServices implements [engine.Verifier].
func (c *Client) JoinServices(ctx context.Context) ([]cluster.JoinService, error) {
	var nodes []corev1.Node
	var pods []corev1.Pod
	err := retry(ctx, func(ctx context.Context) error {
		l, err := c.core.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: roleLabel})
		if err != nil {
			return err
		}
		p, err := c.core.CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{LabelSelector: podLabel + "=" + joinServiceName})
		if err != nil {
			return err
		}
		nodes, pods = l.Items, p.Items
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list join services: %w", err)
	}
	out := make([]cluster.JoinService, 0, len(nodes))
	for _, n := range nodes {
		out = append(out, joinServiceOf(n.Name, pods))
	}
	slices.SortFunc(out, func(a, b cluster.JoinService) int { return strings.Compare(a.Node, b.Node) })
	return out, nil
}

// joinServiceOf returns the join service of a node among pods.
func joinServiceOf(node string, pods []corev1.Pod) cluster.JoinService {
	s := cluster.JoinService{Node: node, Problem: "no pod of the join service is on it"}
	for _, p := range pods {
		if p.Spec.NodeName != node || p.DeletionTimestamp != nil {
			continue
		}
		s.Pod, s.Port, s.Problem = p.Name, 0, ""
		for _, c := range p.Spec.Containers {
			for _, port := range c.Ports {
				if port.Name == joinServicePort {
					s.Port = port.ContainerPort
				}
			}
		}
		switch {
		case p.Status.Phase != corev1.PodRunning:
			s.Problem = "the pod " + p.Name + " does not run"
		case s.Port == 0:
			s.Problem = "the pod " + p.Name + " serves no attested TLS"
		}
	}
	return s
}

// DialJoinService implements [engine.Verifier]. The port is forwarded through the API server.
func (c *Client) DialJoinService(ctx context.Context, s cluster.JoinService) (net.Conn, error) {
	t, err := c.tunnel(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: s.Pod}}, s.Port)
	if err != nil {
		return nil, err
	}
	t.CloseOnRefusal()
	return t, nil
}
