package kube

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/engine/sandbox/controlplane/kubelettest"
)

// snapshotRig is a real API server, and an operator's pod whose server is a handler of
// the test's.
type snapshotRig struct {
	t       *testing.T
	cp      *controlplane.ControlPlane
	core    kubernetes.Interface
	kubelet *kubelettest.Kubelet
	port    int32
	handler atomic.Pointer[http.HandlerFunc]
	pods    int
	set     *appsv1.ReplicaSet // of the operator's Deployment
}

func newSnapshotRig(t *testing.T, args ...string) *snapshotRig {
	t.Helper()
	args = append([]string{"--disable-admission-plugins=ServiceAccount"}, args...)
	r := &snapshotRig{t: t, cp: controlplanetest.Lend(t, controlplane.Options{EtcdName: "cp-0", APIServerArgs: args}), kubelet: kubelettest.New()}
	t.Cleanup(r.kubelet.Close)
	var err error
	r.core, err = kubernetes.NewForConfig(r.cp.Config())
	r.must(err)
	r.must(r.kubelet.Register(t.Context(), r.core, "cp-0"))
	r.label("cp-0")
	_, err = r.core.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}}, metav1.CreateOptions{})
	r.must(err)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { (*r.handler.Load())(w, req) }))
	t.Cleanup(server.Close)
	r.port = int32(server.Listener.Addr().(*net.TCPAddr).Port)
	return r
}

// label makes a Node a control plane as kubeadm does.
func (r *snapshotRig) label(node string) {
	r.t.Helper()
	_, err := r.core.CoreV1().Nodes().Patch(r.t.Context(), node, types.MergePatchType, []byte(`{"metadata":{"labels":{"`+roleLabel+`":""}},"spec":{"providerID":"sandbox://x/`+node+`"}}`), metav1.PatchOptions{})
	r.must(err)
}

// confirm is a cloud whose control plane is cp-0.
func confirm(_ context.Context, node, providerID string) error {
	if node != "cp-0" || providerID != "sandbox://x/cp-0" {
		return fmt.Errorf("%w: %s is %s", engine.ErrImpostor, node, providerID)
	}
	return nil
}

// deploy makes the operator's Deployment and its ReplicaSet.
func (r *snapshotRig) deploy() {
	r.t.Helper()
	labels := map[string]string{podLabel: operatorName}
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "operator", Image: "operator"}}}}
	d, err := r.core.AppsV1().Deployments(Namespace).Create(r.t.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: operatorName, Labels: labels},
		Spec:       appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: template},
	}, metav1.CreateOptions{})
	r.must(err)
	r.set = r.replicaSet(operatorName+"-1", metav1.NewControllerRef(d, appsv1.SchemeGroupVersion.WithKind("Deployment")))
}

func (r *snapshotRig) replicaSet(name string, owner *metav1.OwnerReference) *appsv1.ReplicaSet {
	r.t.Helper()
	labels := map[string]string{podLabel: operatorName}
	s := &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Spec: appsv1.ReplicaSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "operator", Image: "operator"}}},
		}},
	}
	if owner != nil {
		s.OwnerReferences = []metav1.OwnerReference{*owner}
	}
	s, err := r.core.AppsV1().ReplicaSets(Namespace).Create(r.t.Context(), s, metav1.CreateOptions{})
	r.must(err)
	return s
}

// etcd takes a snapshot of etcd, and says which revision there was before.
func (r *snapshotRig) etcd() (b []byte, revision int64) {
	r.t.Helper()
	c := etcdOf(r.t, r.cp)
	st, err := c.Status(r.t.Context(), r.cp.EtcdEndpoint())
	r.must(err)
	s, err := c.Snapshot(r.t.Context())
	r.must(err)
	defer s.Close()
	b, err = io.ReadAll(s)
	r.must(err)
	return b, st.Header.GetRevision()
}

// live serves a new snapshot for each request.
func (r *snapshotRig) live(w http.ResponseWriter, req *http.Request) {
	b, rev := r.etcd()
	snapshotOf(b, func(h http.Header) { h.Set("Snapshot-Revision", strconv.FormatInt(rev, 10)) })(w, req)
}

// sinkBuffer is a file in memory.
type sinkBuffer struct{ b []byte }

func (s *sinkBuffer) Write(p []byte) (int, error) { s.b = append(s.b, p...); return len(p), nil }

func (s *sinkBuffer) ReadAt(p []byte, at int64) (int, error) {
	return bytes.NewReader(s.b).ReadAt(p, at)
}

func (r *snapshotRig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *snapshotRig) account() {
	r.t.Helper()
	_, err := r.core.CoreV1().ServiceAccounts(Namespace).Create(r.t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: snapshotAccount}}, metav1.CreateOptions{})
	r.must(err)
}

// pod makes a pod of the operator; port zero serves no snapshots.
func (r *snapshotRig) pod(port int32, ready corev1.ConditionStatus) (remove func()) {
	r.t.Helper()
	r.pods++
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: operatorName + "-" + strconv.Itoa(r.pods), Labels: map[string]string{podLabel: operatorName},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(r.set, appsv1.SchemeGroupVersion.WithKind("ReplicaSet"))},
		},
		Spec: corev1.PodSpec{NodeName: "cp-0", ServiceAccountName: operatorAccount, HostNetwork: true, Containers: []corev1.Container{{Name: "operator", Image: "operator"}}},
	}
	if port != 0 {
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{{Name: snapshotPort, ContainerPort: port}}
	}
	pods := r.core.CoreV1().Pods(Namespace)
	p, err := pods.Create(r.t.Context(), p, metav1.CreateOptions{})
	r.must(err)
	p.Status.Phase = corev1.PodRunning
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}
	_, err = pods.UpdateStatus(r.t.Context(), p, metav1.UpdateOptions{})
	r.must(err)
	return func() {
		now := int64(0)
		r.must(pods.Delete(context.Background(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}))
	}
}

func (r *snapshotRig) serve(f http.HandlerFunc) { r.handler.Store(&f) }

func (r *snapshotRig) client(user string, groups ...string) *Client {
	r.t.Helper()
	config, err := r.cp.ConfigFor(user, groups...)
	r.must(err)
	c, err := ForConfig(config, nil)
	r.must(err)
	return c
}

// snapshotOf serves b with trailers, which change may damage.
func snapshotOf(b []byte, change func(http.Header)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != snapshotPath || r.Method != http.MethodGet || !strings.HasPrefix(r.Header.Get("Authorization"), "Bearer ey") {
			http.Error(w, "asked in another way", http.StatusTeapot)
			return
		}
		w.Header().Set("Trailer", "Snapshot-Sha256, Snapshot-Size, Snapshot-Revision, Snapshot-Etcd-Version")
		_, _ = w.Write(b)
		sum := sha256.Sum256(b)
		h := w.Header()
		h.Set("Snapshot-Sha256", hex.EncodeToString(sum[:]))
		h.Set("Snapshot-Size", strconv.Itoa(len(b)))
		h.Set("Snapshot-Revision", "1")
		h.Set("Snapshot-Etcd-Version", "3.6.6")
		if change != nil {
			change(h)
		}
	}
}

func TestEtcdSnapshot(t *testing.T) {
	r := newSnapshotRig(t)
	admin := r.client("admin", "system:masters")
	body := bytes.Repeat([]byte("0123456789abcdef"), 1<<18) // 4 MiB
	whole := func(t *testing.T, c *Client) {
		t.Helper()
		var b sinkBuffer
		got, err := c.EtcdSnapshot(t.Context(), &b, confirm)
		sum := sha256.Sum256(b.b)
		want := backup.Snapshot{Member: "cp-0", Size: int64(len(b.b)), SHA256: hex.EncodeToString(sum[:]), Revision: got.Revision, Version: "3.6.6"}
		got.Unchecked = nil
		if err != nil || !reflect.DeepEqual(got, want) || got.Revision == 0 || !bytes.Contains(b.b, []byte("/registry/namespaces/"+Namespace)) {
			t.Errorf("got %+v of %d bytes, %v, want %+v", got, len(b.b), err, want)
		}
	}
	// fails takes a snapshot that must fail in some kind with some words and a remedy. None of
	// them may be whole.
	failsInto := func(t *testing.T, c *Client, w backup.Sink, kind error, words, remedy string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		s, err := c.EtcdSnapshot(ctx, w, confirm)
		if errors.Is(kind, context.DeadlineExceeded) {
			if !errors.Is(err, kind) {
				t.Errorf("got %+v, %v", s, err)
			}
			return
		}
		if !errors.Is(err, kind) || !strings.Contains(err.Error(), words) || !strings.Contains(plan.Remedy(err), remedy) || strings.Contains(err.Error(), "Bearer") {
			t.Errorf("got %+v, error %v, remedy %q; want %v with %q, remedy %q", s, err, plan.Remedy(err), kind, words, remedy)
		}
	}

	fails := func(t *testing.T, c *Client, kind error, words, remedy string) {
		t.Helper()
		failsInto(t, c, &sinkBuffer{}, kind, words, remedy)
	}

	t.Run("a cluster without the operator has none", func(t *testing.T) {
		fails(t, admin, cluster.ErrAbsent, "not installed", "--etcd=false")
	})
	r.account()
	r.deploy()
	t.Run("an operator without a pod", func(t *testing.T) { fails(t, admin, cluster.ErrAbsent, "has no pod", "status") })
	t.Run("an operator that is not ready", func(t *testing.T) {
		defer r.pod(r.port, corev1.ConditionFalse)()
		fails(t, admin, cluster.ErrAbsent, "on cp-0 is not ready", "status")
	})
	t.Run("an operator of a release before snapshots", func(t *testing.T) {
		defer r.pod(0, corev1.ConditionTrue)()
		fails(t, admin, cluster.ErrAbsent, "serves no snapshots", "--etcd=false")
	})

	remove := r.pod(r.port, corev1.ConditionTrue)
	t.Run("a whole one is taken", func(t *testing.T) {
		r.serve(r.live)
		whole(t, admin)
	})
	for name, tt := range map[string]struct {
		change func(http.Header)
		words  string
	}{
		"one without an end":            {func(h http.Header) { h.Del("Snapshot-Sha256") }, "its end is missing"},
		"one that is shorter than told": {func(h http.Header) { h.Set("Snapshot-Size", "4194305") }, "4194304 bytes came, and it has 4194305"},
		"one with another digest":       {func(h http.Header) { h.Set("Snapshot-Sha256", strings.Repeat("0", 64)) }, "SHA-256"},
		"one without a revision":        {func(h http.Header) { h.Del("Snapshot-Revision") }, "not readable"},
	} {
		t.Run(name+" is not whole", func(t *testing.T) {
			r.serve(snapshotOf(body, tt.change))
			fails(t, admin, errNotWhole, tt.words, "take it again")
		})
	}
	t.Run("one that breaks off is not whole", func(t *testing.T) {
		r.serve(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(body[:1<<20])
			panic(http.ErrAbortHandler)
		})
		fails(t, admin, cluster.ErrUnreachable, "broke off after ", "same command again")
	})
	t.Run("one whose machine dies is not whole", func(t *testing.T) {
		arrived := &arrival{some: make(chan struct{})}
		r.serve(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(body[:1<<20])
			w.(http.Flusher).Flush()
			select { // data in flight is lost with the connection
			case <-arrived.some:
			case <-t.Context().Done():
			}
			r.kubelet.Cut()
			panic(http.ErrAbortHandler)
		})
		failsInto(t, admin, arrived, cluster.ErrUnreachable, "broke off after ", "same command again")
	})
	t.Run("a refusal of the operator is reported with its text", func(t *testing.T) {
		r.serve(func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "system:serviceaccount:x may not create etcdsnapshots", http.StatusForbidden)
		})
		fails(t, admin, cluster.ErrForbidden, "may not create etcdsnapshots", "kubeconfig")
	})
	t.Run("an operator that takes one for somebody else is waited for", func(t *testing.T) {
		var asked atomic.Int32
		r.serve(func(w http.ResponseWriter, req *http.Request) {
			if asked.Add(1) == 1 {
				w.Header().Set("Retry-After", "10")
				http.Error(w, "another snapshot is being taken", http.StatusServiceUnavailable)
				return
			}
			r.live(w, req)
		})
		whole(t, admin)
		if asked.Load() != 2 {
			t.Errorf("%d requests", asked.Load())
		}
	})
	t.Run("an operator that does not listen makes room for another one", func(t *testing.T) {
		remove()
		l, err := net.Listen("tcp", "127.0.0.1:0")
		r.must(err)
		l.Close()
		defer r.pod(int32(l.Addr().(*net.TCPAddr).Port), corev1.ConditionTrue)()
		r.serve(r.live)
		fails(t, admin, context.DeadlineExceeded, "", "")
		remove = r.pod(r.port, corev1.ConditionTrue)
		whole(t, admin)
	})

	// Rights, one after the other. The first error that is met says what is missing.
	r.serve(r.live)
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "backup"}}
	_, err := r.core.RbacV1().ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{})
	r.must(err)
	_, err = r.core.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "backup"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "backup"},
		Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: "ops"}},
	}, metav1.CreateOptions{})
	r.must(err)
	ops := r.client("ops")
	for _, step := range []struct{ words, group, resource, verb string }{
		{words: "serviceaccounts/token", resource: "serviceaccounts/token", verb: "create"},
		{words: `cannot get resource "deployments"`, group: "apps", resource: "deployments", verb: "get"},
		{words: `cannot list resource "replicasets"`, group: "apps", resource: "replicasets", verb: "list"},
		{words: `cannot list resource "pods"`, resource: "pods", verb: "list"},
		{words: `cannot get resource "nodes"`, resource: "nodes", verb: "get"},
		{words: "may not create pods/portforward", resource: "pods/portforward", verb: "create"},
	} {
		t.Run("a user without rights on "+step.resource+" is denied", func(t *testing.T) { fails(t, ops, cluster.ErrForbidden, step.words, "serviceaccounts/token") })
		role.Rules = append(role.Rules, rbacv1.PolicyRule{APIGroups: []string{step.group}, Resources: []string{step.resource}, Verbs: []string{step.verb}})
		_, err := r.core.RbacV1().ClusterRoles().Update(t.Context(), role, metav1.UpdateOptions{})
		r.must(err)
		// The authorizer learns of rights a moment later.
		resource, sub, _ := strings.Cut(step.resource, "/")
		asked := authorizationv1.ResourceAttributes{Namespace: "constellation-system", Verb: step.verb, Group: step.group, Resource: resource, Subresource: sub}
		for allowed, end := false, time.Now().Add(30*time.Second); !allowed; time.Sleep(20 * time.Millisecond) {
			a, err := r.core.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{
				Spec: authorizationv1.SubjectAccessReviewSpec{User: "ops", ResourceAttributes: &asked},
			}, metav1.CreateOptions{})
			if r.must(err); time.Now().After(end) {
				t.Fatalf("ops has not got the right to %s %s", step.verb, step.resource)
			}
			allowed = a.Status.Allowed
		}
	}
	t.Run("these rights are enough", func(t *testing.T) {
		for ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second); ; {
			got, err := ops.EtcdSnapshot(ctx, &sinkBuffer{}, confirm)
			if errors.Is(err, cluster.ErrForbidden) && ctx.Err() == nil {
				continue
			}
			cancel()
			if err != nil || len(got.Unchecked) != 1 || !strings.Contains(got.Unchecked[0], "may not list namespaces, nodes, serviceaccounts, clusterroles, ") {
				t.Errorf("got %+v, %v", got, err)
			}
			return
		}
	})
}

// arrival is a writer that signals the first write.
type arrival struct {
	sinkBuffer
	some chan struct{}
	once sync.Once
}

func (a *arrival) Write(b []byte) (int, error) {
	a.once.Do(func() { close(a.some) })
	return len(b), nil
}
