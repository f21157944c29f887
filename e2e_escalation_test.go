package main

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"constellation/engine/kubeadm"
	"constellation/engine/sandbox/escalation"
	"constellation/engine/workspace"
)

// escalations makes all attempts to escalate one identity of this cluster to another one.
// tokenGroup is the group of the cluster's bootstrap tokens.
func (c *cloud) escalations(ctx context.Context, tokenGroup string) ([]escalation.Finding, error) {
	cfg, err := clientcmd.BuildConfigFromFlags("", filepath.Join(c.dir, workspace.KubeconfigFile))
	if err != nil {
		return nil, err
	}
	of := escalation.Cluster{Admin: rest.CopyConfig(cfg), TokenGroup: tokenGroup}
	nodes, err := kubernetes.NewForConfigOrDie(cfg).CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for _, n := range nodes.Items {
		if _, ok := n.Labels["node-role.kubernetes.io/control-plane"]; ok {
			of.ControlPlane = n.Name
		} else if !n.Spec.Unschedulable || of.Worker == "" {
			of.Worker = n.Name
		}
	}
	found, _, err := escalation.Run(ctx, of)
	return found, err
}

// wantGuarded fails the test if an attempt succeeds. A round that the API server did not answer, because it restarted, is
// repeated for three minutes.
func (c *cloud) wantGuarded(when string) {
	c.t.Helper()
	found, err := c.escalations(c.t.Context(), kubeadm.JoinGroup)
	for begun := time.Now(); err != nil && time.Since(begun) < 3*time.Minute && c.t.Context().Err() == nil; {
		c.t.Logf("attempts to escalate %s are repeated: %v", when, err)
		pause(c.t.Context(), 2*time.Second)
		found, err = c.escalations(c.t.Context(), kubeadm.JoinGroup)
	}
	if err != nil {
		c.t.Errorf("attempts to escalate %s: %v", when, err)
	}
	for _, f := range found {
		c.t.Errorf("%s: %s", when, f)
	}
}

// guardedEvery is the pause after a round of all attempts. A round has 1,900 requests and takes five seconds of processor
// time, so without a pause the API server would do little else.
const guardedEvery = 20 * time.Second

// guarded repeats the attempts until the returned function is called, which fails the test if one
// of them succeeded. Attempts that were impossible, because the API server restarted or a Node was
// deleted, are repeated in the next round.
func (c *cloud) guarded() (end func()) {
	ctx, cancel := context.WithCancel(c.t.Context())
	var wg sync.WaitGroup
	whole, failed := 0, map[escalation.Finding]bool{}
	wg.Go(func() {
		for ctx.Err() == nil {
			found, err := c.escalations(ctx, kubeadm.JoinGroup)
			wait := 2 * time.Second
			if err == nil {
				whole++
				wait = guardedEvery
			}
			for _, f := range found {
				failed[f] = true
			}
			pause(ctx, wait)
		}
	})
	return func() {
		c.t.Helper()
		cancel()
		wg.Wait()
		for f := range failed {
			c.t.Errorf("during the upgrade: %s", f)
		}
		if whole == 0 {
			c.t.Error("the attempts to escalate were never completed during the upgrade")
		}
		c.t.Logf("%d times all attempts to escalate were made", whole)
	}
}

// wantNoAutoApproval fails the test if kubeadm's binding exists, which approves any node for
// bootstrap tokens.
func (c *cloud) wantNoAutoApproval() {
	c.t.Helper()
	out := c.kubectl("get", "clusterrolebindings", "-o", "name")
	if slices.Contains(strings.Fields(out), "clusterrolebinding.rbac.authorization.k8s.io/kubeadm:node-autoapprove-bootstrap") {
		c.t.Error("kubeadm's binding for auto-approval exists")
	}
}
