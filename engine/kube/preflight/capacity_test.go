package preflight

import (
	"context"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"constellation/engine/check"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
)

// await polls the API server until a condition is true.
func (c *testCluster) await(what string, is func(context.Context) (bool, error)) {
	c.t.Helper()
	if err := wait.PollUntilContextTimeout(c.t.Context(), 20*time.Millisecond, 30*time.Second, true, is); err != nil {
		c.t.Fatalf("%s: %v", what, err)
	}
}

var (
	volumeSize  = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
	volumeModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
)

// volume makes a volume that nobody claims yet.
func (c *testCluster) volume(name string, key string, values ...string) {
	_, err := c.core.CoreV1().PersistentVolumes().Create(c.t.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "pv-" + name},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: volumeSize, AccessModes: volumeModes, PersistentVolumeSource: corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: "/mnt"}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: corev1.NodeSelectorOpIn, Values: values}},
			}}}},
		},
	}, metav1.CreateOptions{})
	c.must(err)
}

// claim makes a claim, bound to its volume as the controller would do seconds later.
func (c *testCluster) claim(name string) {
	_, err := c.core.CoreV1().PersistentVolumeClaims("shop").Create(c.t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"pv.kubernetes.io/bind-completed": "yes"}},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: volumeModes, VolumeName: "pv-" + name, StorageClassName: ptr.To(""), Resources: corev1.VolumeResourceRequirements{Requests: volumeSize},
		},
	}, metav1.CreateOptions{})
	c.must(err)
}

// TestPlacesAgreeWithTheScheduler asks kube-scheduler, for pods of many kinds, whether it
// finds them a place if their node takes none, and us.
func TestPlacesAgreeWithTheScheduler(t *testing.T) {
	cp := controlplanetest.Lend(t, controlplane.Options{Controllers: true})
	config := cp.Config()
	config.QPS = -1
	core, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	c := &testCluster{t, cp, core}
	_, err = core.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, metav1.CreateOptions{})
	c.must(err)
	c.await("the namespace has its ServiceAccount", func(ctx context.Context) (bool, error) {
		_, err := core.CoreV1().ServiceAccounts("shop").Get(ctx, "default", metav1.GetOptions{})
		return err == nil, nil
	})

	// worker-0 goes. worker-1 is in the same zone and nearly full; worker-2 is in another,
	// has a taint and a device; worker-3 can have one pod.
	for _, name := range []string{"worker-0", "worker-1", "worker-2", "worker-3"} {
		n := (&world{leases: map[string]time.Time{}}).addNode(name)
		switch name {
		case "worker-2":
			n.Labels[corev1.LabelTopologyZone] = "b"
			n.Spec.Taints = []corev1.Taint{{Key: "only", Value: "gpu", Effect: corev1.TaintEffectNoSchedule}}
			n.Status.Allocatable["example.com/gpu"] = resource.MustParse("2")
		case "worker-3":
			n.Status.Allocatable[corev1.ResourcePods] = resource.MustParse("1")
		}
		n.Status.Capacity = n.Status.Allocatable
		_, err := core.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{})
		c.must(err)
	}
	c.await("nodes are ready", func(ctx context.Context) (bool, error) {
		l, err := core.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		for i := range l.Items {
			if len(l.Items[i].Spec.Taints) > map[string]int{"worker-2": 1}[l.Items[i].Name] {
				return false, err
			}
		}
		return true, err
	})
	c.volume("here", corev1.LabelHostname, "worker-0")
	c.volume("zone-a", corev1.LabelTopologyZone, "a")
	c.volume("zone-b", corev1.LabelTopologyZone, "b")
	// Claims of volumes that their controller has not seen are lost.
	c.await("volumes are seen", func(ctx context.Context) (bool, error) {
		l, err := core.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
		seen := !slices.ContainsFunc(l.Items, func(v corev1.PersistentVolume) bool {
			return v.Status.Phase != corev1.VolumeAvailable && v.Status.Phase != corev1.VolumeBound
		})
		return seen, err
	})
	for _, name := range []string{"here", "zone-a", "zone-b"} {
		c.claim(name)
	}

	requests := func(name corev1.ResourceName, amount string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			l := corev1.ResourceList{name: resource.MustParse(amount)}
			p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: l, Limits: l}
		}
	}
	terms := func(app, key string) []corev1.PodAffinityTerm {
		return []corev1.PodAffinityTerm{{TopologyKey: key, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}}}
	}
	mounts := func(claim string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}}
		}
	}
	tolerates := func(p *corev1.Pod) {
		p.Spec.Tolerations = []corev1.Toleration{{Key: "only", Operator: corev1.TolerationOpEqual, Value: "gpu"}}
	}
	both := func(fs ...func(*corev1.Pod)) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			for _, f := range fs {
				f(p)
			}
		}
	}
	port := func(p *corev1.Pod) {
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80, HostPort: 80}}
	}
	c.pods("settler", "worker-1", both(requests(corev1.ResourceCPU, "3"), port, func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: terms("settler-avoids-it", corev1.LabelHostname)}}
	}))
	c.pods("lodger", "worker-3", nil)

	_, err = core.CoreV1().Nodes().Patch(t.Context(), "worker-0", types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`), metav1.PatchOptions{})
	c.must(err)
	for seen := false; !seen; {
		node, _ := c.schedule("probe", requests(corev1.ResourceCPU, "3500m"))
		seen = node == ""
	}

	for _, tt := range []struct {
		name   string
		change func(*corev1.Pod)
		fits   bool
	}{
		{name: "plain", fits: true},
		{name: "small-cpu", change: requests(corev1.ResourceCPU, "1"), fits: true},
		{name: "large-cpu", change: requests(corev1.ResourceCPU, "1001m"), fits: false},
		{name: "large-memory", change: requests(corev1.ResourceMemory, "9Gi"), fits: false},
		{name: "one-gpu-tolerant", change: both(requests("example.com/gpu", "1"), tolerates), fits: true},
		{name: "three-gpus-tolerant", change: both(requests("example.com/gpu", "3"), tolerates), fits: false},
		{name: "one-gpu-intolerant", change: requests("example.com/gpu", "1"), fits: false},
		{name: "two-cpus-tolerant", change: both(requests(corev1.ResourceCPU, "2"), tolerates), fits: true},
		{name: "taken-host-port", change: port, fits: false},
		{name: "pinned-to-old-node", change: func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: "worker-0"} }, fits: false},
		{name: "zone-selector", change: func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{corev1.LabelTopologyZone: "a"} }, fits: true},
		{name: "not-on-worker-1", change: func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpNotIn, Values: []string{"worker-1"}}},
			}}}}}
		}, fits: false},
		{name: "settler-avoids-it", fits: false},
		{name: "avoids-settler", change: func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: terms("settler", corev1.LabelHostname)}}
		}, fits: false},
		{name: "needs-settler", change: func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: terms("settler", corev1.LabelHostname)}}
		}, fits: true},
		{name: "needs-absent-pod", change: func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: terms("nobody", corev1.LabelHostname)}}
		}, fits: false},
		{name: "data-here", change: mounts("here"), fits: false},
		{name: "data-zone-a", change: mounts("zone-a"), fits: true},
		{name: "data-zone-b", change: mounts("zone-b"), fits: false},
		{name: "data-zone-b-tolerant", change: both(mounts("zone-b"), tolerates), fits: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c.pods(tt.name, "worker-0", tt.change)
			w, err := collect(t.Context(), cp.Config(), core, check.PreflightRequest{ReplaceWorkers: true})
			c.must(err)
			s := newScheduler(w)
			p := w.lookup().byName[types.NamespacedName{Namespace: "shop", Name: tt.name}]
			ours := ""
			for _, r := range s.rooms {
				if why := s.misfit(r, p); r.node.Name != "worker-0" && why == "" {
					ours = r.node.Name
				}
			}
			c.must(core.CoreV1().Pods("shop").Delete(t.Context(), tt.name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))

			theirs, why := c.schedule(tt.name, tt.change)
			if (ours != "") != tt.fits || (theirs != "") != tt.fits {
				t.Errorf("we place it on %q, the scheduler on %q (%s), want a place: %v", ours, theirs, why, tt.fits)
			}
		})
	}
}

func (c *testCluster) podSpec(name, node string, change func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "example.com/main:1"}}},
	}
	if change != nil {
		change(p)
	}
	return p
}

// pods makes a running pod on a node.
func (c *testCluster) pods(name, node string, change func(*corev1.Pod)) {
	p, err := c.core.CoreV1().Pods("shop").Create(c.t.Context(), c.podSpec(name, node, change), metav1.CreateOptions{})
	c.must(err)
	p.Status.Phase = corev1.PodRunning
	_, err = c.core.CoreV1().Pods("shop").UpdateStatus(c.t.Context(), p, metav1.UpdateOptions{})
	c.must(err)
}

// schedule asks kube-scheduler for a place.
func (c *testCluster) schedule(name string, change func(*corev1.Pod)) (node, why string) {
	ctx := c.t.Context()
	_, err := c.core.CoreV1().Pods("shop").Create(ctx, c.podSpec(name, "", change), metav1.CreateOptions{})
	c.must(err)
	c.await("the scheduler looks at "+name, func(ctx context.Context) (bool, error) {
		p, err := c.core.CoreV1().Pods("shop").Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		node = p.Spec.NodeName
		for _, x := range p.Status.Conditions {
			if x.Type == corev1.PodScheduled && x.Status == corev1.ConditionFalse {
				why = x.Message
			}
		}
		return node != "" || why != "", nil
	})
	c.must(c.core.CoreV1().Pods("shop").Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
	return node, why
}
