package kube

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane/kubelettest"
)

// TestNobodyPosesAsTheOperatorForSnapshots is what root on a worker can do with its
// kubelet's credentials, on a real API server, and what more it could do if one of the
// other locks were open.
func TestNobodyPosesAsTheOperatorForSnapshots(t *testing.T) {
	r := newSnapshotRig(t)
	r.account()
	r.deploy()
	admin := r.client("admin", "system:masters")
	// The worker's own server, which notes what it is sent.
	asked := make(chan string, 100)
	impostor := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) { asked <- req.Header.Get("Authorization") }))
	t.Cleanup(impostor.Close)
	port := int32(impostor.Listener.Addr().(*net.TCPAddr).Port)
	kubelet := kubelettest.New()
	t.Cleanup(kubelet.Close)
	r.must(kubelet.Register(t.Context(), r.core, "worker-1"))
	config, err := r.cp.ConfigFor("system:node:worker-1", "system:nodes")
	r.must(err)
	worker, err := kubernetes.NewForConfig(config)
	r.must(err)
	node, err := r.core.CoreV1().Nodes().Get(t.Context(), "worker-1", metav1.GetOptions{})
	r.must(err)

	yes := true
	mirror := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: "a-worker-1", Labels: map[string]string{podLabel: operatorName},
			Annotations:     map[string]string{corev1.MirrorPodAnnotationKey: "0123", "kubernetes.io/config.hash": "0123", "kubernetes.io/config.source": "file"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID, Controller: &yes}},
		},
		Spec: corev1.PodSpec{NodeName: "worker-1", HostNetwork: true, Containers: []corev1.Container{{
			Name: "operator", Image: "operator", Ports: []corev1.ContainerPort{{Name: snapshotPort, ContainerPort: port}},
		}}},
	}
	ready := func(c kubernetes.Interface, p *corev1.Pod) {
		t.Helper()
		p.Status.Phase = corev1.PodRunning
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		_, err := c.CoreV1().Pods(Namespace).UpdateStatus(t.Context(), p, metav1.UpdateOptions{})
		r.must(err)
	}
	pods := r.core.CoreV1().Pods(Namespace)
	create := func(p *corev1.Pod) (remove func()) {
		t.Helper()
		p, err := pods.Create(t.Context(), p, metav1.CreateOptions{})
		r.must(err)
		ready(r.core, p)
		now := int64(0)
		return func() {
			r.must(pods.Delete(context.Background(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}))
		}
	}
	// refused takes a snapshot that must fail, before the impostor is sent a word.
	refused := func(t *testing.T, confirm engine.ConfirmControlPlane, kind error, words string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		_, err := admin.EtcdSnapshot(ctx, &sinkBuffer{}, confirm)
		if !errors.Is(err, kind) || !strings.Contains(err.Error(), words) {
			t.Errorf("got %v, want %v with %q", err, kind, words)
		}
		select {
		case token := <-asked:
			t.Errorf("the impostor was sent %.20q...", token)
		default:
		}
	}

	p, err := worker.CoreV1().Pods(Namespace).Create(t.Context(), mirror, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("the kubelet of a worker may not make a mirror pod, so this shows nothing: %v", err)
	}
	ready(worker, p)
	t.Run("a worker's mirror pod", func(t *testing.T) { refused(t, confirm, cluster.ErrAbsent, "the operator has no pod") })
	t.Run("a worker's mirror pod beside the operator's", func(t *testing.T) {
		defer r.pod(r.port, corev1.ConditionTrue)()
		r.serve(r.live)
		if s, err := admin.EtcdSnapshot(t.Context(), &sinkBuffer{}, confirm); err != nil || s.Member != "cp-0" {
			t.Errorf("got %+v, %v", s, err)
		}
		if len(asked) > 0 {
			t.Error("the impostor was asked")
		}
	})

	// Pods that only an administrator can create, each with one defect.
	good := func() *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Name: operatorName + "-x", Labels: map[string]string{podLabel: operatorName},
				OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(r.set, appsv1.SchemeGroupVersion.WithKind("ReplicaSet"))},
			},
			Spec: corev1.PodSpec{NodeName: "cp-0", ServiceAccountName: operatorAccount, HostNetwork: true, Containers: mirror.Spec.Containers},
		}
	}
	foreign := r.replicaSet("foreign", nil)
	for name, change := range map[string]func(*corev1.Pod){
		"a pod that nobody controls":          func(p *corev1.Pod) { p.OwnerReferences = nil },
		"a pod of another ReplicaSet":         func(p *corev1.Pod) { p.OwnerReferences[0].Name, p.OwnerReferences[0].UID = foreign.Name, foreign.UID },
		"a pod that is owned, not controlled": func(p *corev1.Pod) { p.OwnerReferences[0].Controller = nil },
		"a pod of another ServiceAccount":     func(p *corev1.Pod) { p.Spec.ServiceAccountName = "default" },
		"a mirror pod of our ReplicaSet":      func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "1"} },
	} {
		t.Run(name, func(t *testing.T) {
			p := good()
			change(p)
			defer create(p)()
			refused(t, confirm, cluster.ErrAbsent, "has no pod")
		})
	}
	t.Run("the operator's own pod on a worker", func(t *testing.T) {
		p := good()
		p.Spec.NodeName = "worker-1"
		defer create(p)()
		refused(t, confirm, engine.ErrImpostor, "which is no control plane")
	})
	r.label("worker-1")
	t.Run("on a worker with the label of control planes", func(t *testing.T) {
		p := good()
		p.Spec.NodeName = "worker-1"
		defer create(p)()
		refused(t, confirm, engine.ErrImpostor, "worker-1 is sandbox://x/worker-1")
	})
	t.Run("a cloud that does not answer", func(t *testing.T) {
		defer create(good())()
		silent := func(context.Context, string, string) error {
			return fmt.Errorf("%w: no answer", cluster.ErrUnreachable)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		if _, err := admin.EtcdSnapshot(ctx, &sinkBuffer{}, silent); err == nil || len(asked) > 0 {
			t.Errorf("got %v, and %d requests", err, len(asked))
		}
	})
	t.Run("without a cloud", func(t *testing.T) {
		slices := r.core.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault)
		_, err := slices.Create(t.Context(), &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.1"}}},
		}, metav1.CreateOptions{})
		r.must(err)
		p := good()
		p.Spec.NodeName = "worker-1"
		defer create(p)()
		refused(t, nil, engine.ErrImpostor, "no API server announces itself at 127.0.0.1, the address of Node worker-1")
	})
	t.Run("without a cloud, where an API server is", func(t *testing.T) {
		// Loopback, where everything is in this test, is no address to the API server.
		_, err := etcdOf(t, r.cp).Put(t.Context(), "/registry/endpointslices/default/kubernetes", `{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"kubernetes","namespace":"default","uid":"0"},"addressType":"IPv4","endpoints":[{"addresses":["127.0.0.1"]}]}`)
		r.must(err)
		defer r.pod(r.port, corev1.ConditionTrue)()
		r.serve(r.live)
		if s, err := admin.EtcdSnapshot(t.Context(), &sinkBuffer{}, nil); err != nil || s.Member != "cp-0" {
			t.Errorf("got %+v, %v", s, err)
		}
	})
}

// TestForgedSnapshotsAreRefused serves, from the right pod, snapshots of another etcd or of another
// time.
func TestForgedSnapshotsAreRefused(t *testing.T) {
	r := newSnapshotRig(t)
	r.account()
	r.deploy()
	r.pod(r.port, corev1.ConditionTrue)
	admin := r.client("admin", "system:masters")
	bindings := r.core.RbacV1().ClusterRoleBindings()
	bind := func(name, user string) {
		t.Helper()
		_, err := bindings.Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "view"},
			Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: user}},
		}, metav1.CreateOptions{})
		r.must(err)
	}
	bind("auditors", "somebody-honest")
	take := func(t *testing.T) error {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		_, err := admin.EtcdSnapshot(ctx, &sinkBuffer{}, confirm)
		return err
	}
	refused := func(t *testing.T, kind error, words string) {
		t.Helper()
		if err := take(t); !errors.Is(err, kind) || !strings.Contains(err.Error(), words) || plan.Remedy(err) == "" {
			t.Errorf("got %v, want %v with %q", err, kind, words)
		}
	}
	r.serve(r.live)
	if err := take(t); err != nil {
		t.Fatal(err)
	}
	// sealed serves a database with the hash that belongs to it.
	sealed := func(b []byte, rev int64) {
		body := b[:len(b)-sha256.Size]
		sum := sha256.Sum256(body)
		b = append(bytes.Clone(body), sum[:]...)
		r.serve(snapshotOf(b, func(h http.Header) { h.Set("Snapshot-Revision", strconv.FormatInt(rev, 10)) }))
	}
	t.Run("an old one", func(t *testing.T) {
		b, rev := r.etcd()
		bind("later", "somebody")
		sealed(b, rev)
		refused(t, cluster.ErrUnreachable, "an old one")
	})
	t.Run("one that says to be newer than it is", func(t *testing.T) {
		b, rev := r.etcd()
		sealed(b, rev+1000)
		refused(t, engine.ErrImpostor, "was said to show")
	})
	t.Run("one with rights for somebody else", func(t *testing.T) {
		b, rev := r.etcd()
		sealed(bytes.ReplaceAll(b, []byte("somebody-honest"), []byte("system:mallory!")), rev)
		refused(t, engine.ErrImpostor, "clusterrolebindings/auditors says something else")
	})
	t.Run("one of another cluster", func(t *testing.T) {
		b, rev := r.etcd()
		ns, err := r.core.CoreV1().Namespaces().Get(t.Context(), "kube-system", metav1.GetOptions{})
		r.must(err)
		sealed(bytes.ReplaceAll(b, []byte(ns.UID), []byte(strings.Repeat("0", len(ns.UID)))), rev)
		refused(t, engine.ErrImpostor, "namespaces/kube-system is another object")
	})
	t.Run("one without the member", func(t *testing.T) {
		b, rev := r.etcd()
		sealed(bytes.ReplaceAll(b, []byte(`"name":"cp-0"`), []byte(`"name":"cp-1"`)), rev)
		refused(t, engine.ErrImpostor, "has no member cp-0")
	})
	t.Run("no database", func(t *testing.T) {
		sealed(make([]byte, 1<<16+sha256.Size), 1)
		refused(t, engine.ErrImpostor, "not a database of etcd")
	})
	t.Run("one with a binding that the API server does not have", func(t *testing.T) {
		// The forged database is that of an etcd which has one binding more. The API server
		// is asked of the true one: here, its list is taken with the binding gone.
		before, err := admin.witness(t.Context(), 0, false)
		r.must(err)
		b, rev := r.etcd()
		before.begun(t.Context(), admin)
		l := before.lists["/registry/clusterrolebindings/"]
		delete(l.objects, "auditors")
		s := backup.Snapshot{Member: "cp-0", Size: int64(len(b)), Revision: rev}
		if err := admin.compare(t.Context(), bytes.NewReader(b), &s, before); !errors.Is(err, engine.ErrImpostor) || !strings.Contains(err.Error(), "it has /registry/clusterrolebindings/auditors since revision") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("one without a binding that the API server has", func(t *testing.T) {
		b, rev := r.etcd()
		sealed(bytes.ReplaceAll(b, []byte("/registry/clusterrolebindings/auditors"), []byte("/registry/clusterrolebindings/aaditors")), rev)
		refused(t, engine.ErrImpostor, "it has /registry/clusterrolebindings/aaditors")
	})
	t.Run("one from the future", func(t *testing.T) {
		// The last revision, a deletion, is written with a larger number, in the bytes of its
		// key. A value would have its revision, too.
		bind("brief", "somebody")
		r.must(bindings.Delete(t.Context(), "brief", metav1.DeleteOptions{}))
		b, rev := r.etcd()
		last := make([]byte, 8)
		last[6], last[7] = byte(rev>>8), byte(rev)
		i := bytes.LastIndex(b, append(bytes.Clone(last), '_'))
		if i < 0 {
			t.Fatalf("revision %d is not in the snapshot", rev)
		}
		b = bytes.ReplaceAll(b, append(bytes.Clone(last), '_'), append([]byte{0, 0, 0, 1, 0, 0, 0, 0}, '_'))
		sealed(b, rev)
		refused(t, engine.ErrImpostor, "and the API server was at")
	})
}
