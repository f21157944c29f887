package kube

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/sandbox/controlplane"
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
}

func newSnapshotRig(t *testing.T) *snapshotRig {
	t.Helper()
	r := &snapshotRig{t: t, cp: controlplane.ForTest(t, controlplane.Options{APIServerArgs: []string{"--disable-admission-plugins=ServiceAccount"}}), kubelet: kubelettest.New()}
	t.Cleanup(r.kubelet.Close)
	var err error
	r.core, err = kubernetes.NewForConfig(r.cp.Config())
	r.must(err)
	r.must(r.kubelet.Register(t.Context(), r.core, "cp-0"))
	_, err = r.core.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}}, metav1.CreateOptions{})
	r.must(err)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { (*r.handler.Load())(w, req) }))
	t.Cleanup(server.Close)
	r.port = int32(server.Listener.Addr().(*net.TCPAddr).Port)
	return r
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
		ObjectMeta: metav1.ObjectMeta{Name: operatorName + "-" + strconv.Itoa(r.pods), Labels: map[string]string{podLabel: operatorName}},
		Spec:       corev1.PodSpec{NodeName: "cp-0", HostNetwork: true, Containers: []corev1.Container{{Name: "operator", Image: "operator"}}},
	}
	if port != 0 {
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{{Name: snapshotPort, ContainerPort: port}}
	}
	pods := r.core.CoreV1().Pods(Namespace)
	p, err := pods.Create(r.t.Context(), p, metav1.CreateOptions{})
	r.must(err)
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
		h.Set("Snapshot-Revision", "42")
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
	sum := sha256.Sum256(body)
	want := backup.Snapshot{Member: "cp-0", Size: int64(len(body)), SHA256: hex.EncodeToString(sum[:]), Revision: 42, Version: "3.6.6"}
	// fails takes a snapshot that must fail in some kind with some words and a remedy. None of
	// them may be whole.
	failsInto := func(t *testing.T, c *Client, w io.Writer, kind error, words, remedy string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		s, err := c.EtcdSnapshot(ctx, w)
		if errors.Is(kind, context.DeadlineExceeded) {
			if !errors.Is(err, kind) {
				t.Errorf("got %+v, %v", s, err)
			}
			return
		}
		if !errors.Is(err, kind) || !strings.Contains(err.Error(), words) || !strings.Contains(engine.Remedy(err), remedy) || strings.Contains(err.Error(), "Bearer") {
			t.Errorf("got %+v, error %v, remedy %q; want %v with %q, remedy %q", s, err, engine.Remedy(err), kind, words, remedy)
		}
	}

	fails := func(t *testing.T, c *Client, kind error, words, remedy string) {
		t.Helper()
		failsInto(t, c, io.Discard, kind, words, remedy)
	}

	t.Run("a cluster without the operator has none", func(t *testing.T) {
		fails(t, admin, engine.ErrAbsent, "not installed", "--etcd=false")
	})
	r.account()
	t.Run("an operator without a pod", func(t *testing.T) { fails(t, admin, engine.ErrAbsent, "has no pod", "status") })
	t.Run("an operator that is not ready", func(t *testing.T) {
		defer r.pod(r.port, corev1.ConditionFalse)()
		fails(t, admin, engine.ErrAbsent, "on cp-0 is not ready", "status")
	})
	t.Run("an operator of a release before snapshots", func(t *testing.T) {
		defer r.pod(0, corev1.ConditionTrue)()
		fails(t, admin, engine.ErrAbsent, "serves no snapshots", "--etcd=false")
	})

	remove := r.pod(r.port, corev1.ConditionTrue)
	t.Run("a whole one is taken", func(t *testing.T) {
		r.serve(snapshotOf(body, nil))
		var b bytes.Buffer
		got, err := admin.EtcdSnapshot(t.Context(), &b)
		if err != nil || got != want || !bytes.Equal(b.Bytes(), body) {
			t.Errorf("got %+v of %d bytes, %v, want %+v", got, b.Len(), err, want)
		}
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
		fails(t, admin, engine.ErrUnreachable, "broke off after ", "same command again")
	})
	t.Run("one whose machine dies is not whole", func(t *testing.T) {
		arrived := &arrival{some: make(chan struct{})}
		r.serve(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(body[:1<<20])
			w.(http.Flusher).Flush()
			select { // what is on its way is lost with the connection
			case <-arrived.some:
			case <-t.Context().Done():
			}
			r.kubelet.Cut()
			panic(http.ErrAbortHandler)
		})
		failsInto(t, admin, arrived, engine.ErrUnreachable, "broke off after ", "same command again")
	})
	t.Run("what the operator refuses is told in its words", func(t *testing.T) {
		r.serve(func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "system:serviceaccount:x may not create etcdsnapshots", http.StatusForbidden)
		})
		fails(t, admin, engine.ErrForbidden, "may not create etcdsnapshots", "kubeconfig")
	})
	t.Run("an operator that takes one for somebody else is waited for", func(t *testing.T) {
		var asked atomic.Int32
		whole := snapshotOf(body, nil)
		r.serve(func(w http.ResponseWriter, req *http.Request) {
			if asked.Add(1) == 1 {
				w.Header().Set("Retry-After", "10")
				http.Error(w, "another snapshot is being taken", http.StatusServiceUnavailable)
				return
			}
			whole(w, req)
		})
		if got, err := admin.EtcdSnapshot(t.Context(), io.Discard); err != nil || got != want || asked.Load() != 2 {
			t.Errorf("got %+v, %v after %d requests", got, err, asked.Load())
		}
	})
	t.Run("an operator that does not listen makes room for another one", func(t *testing.T) {
		remove()
		l, err := net.Listen("tcp", "127.0.0.1:0")
		r.must(err)
		l.Close()
		defer r.pod(int32(l.Addr().(*net.TCPAddr).Port), corev1.ConditionTrue)()
		r.serve(snapshotOf(body, nil))
		fails(t, admin, context.DeadlineExceeded, "", "")
		remove = r.pod(r.port, corev1.ConditionTrue)
		if got, err := admin.EtcdSnapshot(t.Context(), io.Discard); err != nil || got != want {
			t.Errorf("got %+v, %v", got, err)
		}
	})

	// Rights, one after the other. The first error that is met says what is missing.
	r.serve(snapshotOf(body, nil))
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "backup"}}
	_, err := r.core.RbacV1().Roles(Namespace).Create(t.Context(), role, metav1.CreateOptions{})
	r.must(err)
	_, err = r.core.RbacV1().RoleBindings(Namespace).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "backup"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "backup"},
		Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: "ops"}},
	}, metav1.CreateOptions{})
	r.must(err)
	ops := r.client("ops")
	for _, step := range []struct{ words, resource, verb string }{
		{"serviceaccounts/token", "serviceaccounts/token", "create"},
		{`cannot list resource "pods"`, "pods", "list"},
		{"may not create pods/portforward", "pods/portforward", "create"},
	} {
		t.Run("who lacks "+step.resource+" is told", func(t *testing.T) { fails(t, ops, engine.ErrForbidden, step.words, "serviceaccounts/token") })
		role.Rules = append(role.Rules, rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{step.resource}, Verbs: []string{step.verb}})
		_, err := r.core.RbacV1().Roles(Namespace).Update(t.Context(), role, metav1.UpdateOptions{})
		r.must(err)
	}
	t.Run("these rights are enough", func(t *testing.T) {
		// The authorizer learns of rights a moment later.
		for ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second); ; {
			got, err := ops.EtcdSnapshot(ctx, io.Discard)
			if errors.Is(err, engine.ErrForbidden) && ctx.Err() == nil {
				continue
			}
			cancel()
			if err != nil || got != want {
				t.Errorf("got %+v, %v", got, err)
			}
			return
		}
	})
}

// arrival tells that something was written to it.
type arrival struct {
	some chan struct{}
	once sync.Once
}

func (a *arrival) Write(b []byte) (int, error) {
	a.once.Do(func() { close(a.some) })
	return len(b), nil
}
