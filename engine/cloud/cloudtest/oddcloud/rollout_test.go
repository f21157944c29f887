package oddcloud_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/assets"
	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/oddcloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/hollow"
	"constellation/internal/testneeds"
	"constellation/operator"
	"constellation/operator/api/v1alpha1"
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

// TestOddCloudRollsOut replaces all workers of a cluster in the odd cloud. Control plane and
// operator are real. The creation of the first replacement does not end before the others
// have been replaced.
func TestOddCloudRollsOut(t *testing.T) {
	testneeds.Time(t, "two minutes")
	t.Parallel()
	const controlPlanes, workers, kubernetes = 3, 4, "v1.35.4"
	old, target := "k8s-components-sha256-"+strings.Repeat("a", 64), "k8s-components-sha256-"+strings.Repeat("b", 64)
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	cp := controlplane.ForTest(t, controlplane.Options{Controllers: true})
	t.Cleanup(func() { cancel(); work.Wait() })
	crds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range crds {
		if err := cp.Apply(ctx, f.Data); err != nil {
			t.Fatal(err)
		}
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	admin, err := client.New(cp.Config(), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	surge := intstr.FromInt(2)
	nv := &v1alpha1.NodeVersion{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName},
		Spec: v1alpha1.NodeVersionSpec{
			KubernetesComponentsReference: target, KubernetesClusterVersion: kubernetes,
			Rollout: v1alpha1.Rollout{MaxSurge: &surge},
		},
	}
	objects := []client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "constellation-system"}}, nv}
	for _, ref := range []string{old, target} {
		objects = append(objects, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: ref}, Data: map[string]string{"cluster-version": kubernetes, "components": "[]"}})
	}
	for _, o := range objects {
		if err := admin.Create(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	nv.Status.JoinComponents = v1alpha1.JoinComponents{ControlPlane: target, Worker: target}
	if err := admin.Status().Update(ctx, nv); err != nil {
		t.Fatal(err)
	}
	c, wait, err := oddcloud.Start(ctx, oddcloud.Options{
		Lag: 10 * time.Second, Throttle: 50 * time.Millisecond,
		Hollow: hollow.Options{Cluster: cp.Config(), Times: hollow.Times{Boot: 200 * time.Millisecond, Join: 200 * time.Millisecond, Off: 500 * time.Millisecond}},
	})
	if err != nil {
		t.Fatal(err)
	}
	work.Go(wait)
	const stuck = "worker-4" // the first name that is free
	if err := errors.Join(
		c.Machines.Seed(ctx, sandboxapi.ControlPlaneGroup, controlPlanes, target), c.Machines.Seed(ctx, sandboxapi.WorkerGroup, workers, old),
		c.Machines.SetFaults([]string{"never-boot=" + stuck}),
	); err != nil {
		t.Fatal(err)
	}
	work.Go(func() {
		if err := operator.Run(ctx, operator.Config{Cluster: cp.Config(), Namespace: "constellation-system", Cloud: c, NoElection: true}); err != nil && ctx.Err() == nil {
			t.Errorf("run operator: %v", err)
		}
	})
	status := func() (nodes v1alpha1.NodeVersion) {
		if err := admin.Get(ctx, client.ObjectKey{Name: v1alpha1.NodeVersionName}, &nodes); err != nil {
			t.Fatal(err)
		}
		return nodes
	}
	until := func(what string, holds func() (string, bool)) {
		t.Helper()
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for end := time.Now().Add(8 * time.Minute); ; <-tick.C {
			is, ok := holds()
			if ok {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("timeout after 8 minutes waiting until %s: %s", what, is)
			}
		}
	}
	until("a name is reused while a creation does not end", func() (string, bool) {
		i, _ := c.Machines.Instance(stuck)
		v := status()
		var reused bool
		for _, m := range c.Machines.Instances() {
			serial, _ := strconv.Atoi(m.Incarnation)
			reused = reused || serial > controlPlanes+workers && m.Name < stuck && m.Role == cloud.Worker
		}
		return fmt.Sprintf("%+v, waiting %+v, %s is %s", v.Status.Nodes, v.Status.Waiting, stuck, i.State), reused && i.State == cloud.Creating && v.Status.Nodes.UpToDate > controlPlanes
	})
	if err := c.Machines.SetFaults(nil); err != nil {
		t.Fatal(err)
	}
	until("all nodes are at the target", func() (string, bool) {
		v := status()
		return fmt.Sprintf("%+v, waiting %+v", v.Status.Nodes, v.Status.Waiting), v.Status.Nodes.UpToDate == controlPlanes+workers && v.Status.Nodes.Total == controlPlanes+workers &&
			meta.IsStatusConditionTrue(v.Status.Conditions, v1alpha1.ConditionReady) && len(c.Machines.Instances()) == controlPlanes+workers
	})
	var nodes corev1.NodeList
	if err := admin.List(ctx, &nodes); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.Items {
		i, ok := c.Machines.Instance(n.Name)
		if a := n.Annotations; !ok || a[v1alpha1.AnnotationIncarnation] != i.Incarnation || a[v1alpha1.AnnotationComponents] != target || n.Spec.Unschedulable {
			t.Errorf("Node %s: annotations %v, unschedulable %t, its machine is %+v", n.Name, a, n.Spec.Unschedulable, i)
		}
	}
	if n := len(c.Machines.Tokens()); n != workers {
		t.Errorf("%d tokens made machines, want one for each of %d workers", n, workers)
	}
}
