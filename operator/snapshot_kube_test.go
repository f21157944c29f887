//go:build linux

package operator

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"constellation/agent"
	"constellation/assets/render"
	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/cloud/providers"
	values "constellation/engine/cluster"
	"constellation/engine/kube"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/kubelettest"
)

// snapshotCluster is an API server with control planes. etcd, agent, the operator's server, chart and
// client are real; only the kubelet that forwards the port is fake.
type snapshotCluster struct {
	t       *testing.T
	cp      *controlplane.ControlPlane
	core    kubernetes.Interface
	kubelet *kubelettest.Kubelet
	set     *appsv1.ReplicaSet
	pods    *corev1.PodTemplateSpec
}

func newSnapshotCluster(t *testing.T) *snapshotCluster {
	t.Helper()
	s := &snapshotCluster{t: t, cp: controlplane.ForTest(t, controlplane.Options{EtcdName: "cp-0"}), kubelet: kubelettest.New()}
	t.Cleanup(s.kubelet.Close)
	var err error
	s.core, err = kubernetes.NewForConfig(s.cp.Config())
	s.must(err)
	chart, err := render.Chart("constellation-operator", "v1.1.0", kube.Namespace, providers.LocalValues(), map[string]any{"release": "v1.1.0"})
	s.must(err)
	s.must(s.cp.Apply(t.Context(), []byte("{apiVersion: v1, kind: Namespace, metadata: {name: "+kube.Namespace+"}}")))
	s.must(s.cp.Apply(t.Context(), chart))
	d, err := s.core.AppsV1().Deployments(kube.Namespace).Get(t.Context(), "constellation-operator", metav1.GetOptions{})
	s.must(err)
	s.pods = &d.Spec.Template
	s.set, err = s.core.AppsV1().ReplicaSets(kube.Namespace).Create(t.Context(), &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: "constellation-operator-1", Labels: d.Spec.Template.Labels, OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(d, appsv1.SchemeGroupVersion.WithKind("Deployment"))}},
		Spec:       appsv1.ReplicaSetSpec{Selector: d.Spec.Selector, Template: d.Spec.Template},
	}, metav1.CreateOptions{})
	s.must(err)
	return s
}

func (s *snapshotCluster) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// controlPlane adds a Node whose agent reaches a member of etcd, with the operator's pod.
// What wrap returns serves in place of the operator's server, unless it is nil.
func (s *snapshotCluster) controlPlane(name, etcd string, wrap func(http.Handler) http.Handler) {
	t := s.t
	t.Helper()
	dir, err := os.MkdirTemp("", "snap") // t.TempDir can be too long for a socket's name
	s.must(err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	for from, to := range map[string]string{"etcd/ca.crt": "ca.crt", "apiserver-etcd-client.crt": "healthcheck-client.crt", "apiserver-etcd-client.key": "healthcheck-client.key"} {
		b, err := os.ReadFile(filepath.Join(s.cp.PKI(), from))
		s.must(err)
		s.must(os.WriteFile(filepath.Join(dir, to), b, 0o600))
	}
	rig := &hostRig{t: t, dir: dir, host: agent.Host{Root: filepath.Join(dir, "root"), Name: name, Etcd: agent.Etcd{Endpoint: etcd, PKI: dir}}}
	rig.up()
	t.Cleanup(rig.down)
	host := rig.client()
	served := newSnapshots(s.core, host.snapshot, slog.New(slog.DiscardHandler))
	served.state = host.etcdState
	h := served.handler()
	if wrap != nil {
		h = wrap(h)
	}
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)

	s.must(s.kubelet.Register(t.Context(), s.core, name))
	_, err = s.core.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, []byte(`{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`), metav1.PatchOptions{})
	s.must(err)
	pod := &corev1.Pod{ObjectMeta: *s.pods.ObjectMeta.DeepCopy(), Spec: *s.pods.Spec.DeepCopy()}
	pod.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(s.set, appsv1.SchemeGroupVersion.WithKind("ReplicaSet"))}
	pod.Name, pod.Spec.NodeName = "constellation-operator-"+name, name
	for i := range pod.Spec.Containers[0].Ports {
		p := &pod.Spec.Containers[0].Ports[i]
		p.HostPort = 0
		if p.Name == "snapshots" {
			p.ContainerPort = int32(server.Listener.Addr().(*net.TCPAddr).Port)
		}
	}
	pod, err = s.core.CoreV1().Pods(kube.Namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	s.must(err)
	pod.Status.Phase = corev1.PodRunning
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	_, err = s.core.CoreV1().Pods(kube.Namespace).UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
	s.must(err)
}

// TestSnapshotReachesTheConsole takes a snapshot as the console does.
func TestSnapshotReachesTheConsole(t *testing.T) {
	cluster := newSnapshotCluster(t)
	cp, c, must := cluster.cp, cluster.core, cluster.must
	cluster.controlPlane("cp-0", cp.EtcdEndpoint(), nil)
	confirm := func(context.Context, string, string) error { return nil }
	const canary = "a value in the snapshot"
	_, err := c.CoreV1().ConfigMaps(kube.Namespace).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "canary"}, Data: map[string]string{"k": canary}}, metav1.CreateOptions{})
	must(err)

	console, err := kube.ForConfig(cp.Config(), nil)
	must(err)
	var b sink
	s, err := console.EtcdSnapshot(t.Context(), &b, confirm)
	must(err)
	sum := sha256.Sum256(b.Bytes())
	if s.ClusterID == "" || s.MemberID == "" || len(s.Witnesses) > 0 {
		t.Errorf("snapshot %+v", s)
	}
	if s.Size != int64(b.Len()) || len(s.Unchecked) > 0 || s.SHA256 != hex.EncodeToString(sum[:]) || s.Revision == 0 || !strings.HasPrefix(s.Version, "3.") {
		t.Errorf("received %d bytes, snapshot %+v", b.Len(), s)
	}
	if !bytes.Contains(b.Bytes(), []byte(canary)) {
		t.Error("the snapshot lacks a value that etcd has")
	}

	t.Run("a caller that disconnects ends the agent's stream", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		if _, err := console.EtcdSnapshot(ctx, &sink{fail: func(p []byte) (int, error) { cancel(); return len(p), nil }}, confirm); ctx.Err() == nil || err == nil {
			t.Errorf("ended with %v", err)
		}
		// One is taken at a time, so the next one shows that the first is over.
		if _, err := console.EtcdSnapshot(t.Context(), &sink{}, confirm); err != nil {
			t.Error(err)
		}
	})
	t.Run("a full disk is reported as such", func(t *testing.T) {
		if _, err := console.EtcdSnapshot(t.Context(), &sink{fail: func([]byte) (int, error) { return 0, fmt.Errorf("no space left") }}, confirm); err == nil || !strings.Contains(err.Error(), "no space left") {
			t.Errorf("ended with %v", err)
		}
	})
}

// sink is a file in memory, or one whose writes do something else.
type sink struct {
	bytes.Buffer
	fail func([]byte) (int, error)
}

func (s *sink) Write(p []byte) (int, error) {
	if s.fail != nil {
		return s.fail(p)
	}
	return s.Buffer.Write(p)
}

func (s *sink) ReadAt(p []byte, at int64) (int, error) {
	return bytes.NewReader(s.Bytes()).ReadAt(p, at)
}

// secondMember starts another member of the control plane's etcd and returns its URL.
func (s *snapshotCluster) secondMember(name string) string {
	t := s.t
	t.Helper()
	bin, err := controlplane.FindBinaries()
	s.must(err)
	var urls [2]string
	for i := range urls {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		s.must(err)
		urls[i] = "https://" + l.Addr().String()
		s.must(l.Close())
	}
	pki := func(name string) string { return filepath.Join(s.cp.PKI(), name) }
	pair, err := tls.LoadX509KeyPair(pki("apiserver-etcd-client.crt"), pki("apiserver-etcd-client.key"))
	s.must(err)
	ca, err := os.ReadFile(pki("etcd/ca.crt"))
	s.must(err)
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	etcd, err := clientv3.New(clientv3.Config{Endpoints: []string{s.cp.EtcdEndpoint()}, Logger: zap.NewNop(), TLS: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}})
	s.must(err)
	t.Cleanup(func() { etcd.Close() })
	added, err := etcd.MemberAddAsLearner(t.Context(), []string{urls[1]})
	s.must(err)
	var initial []string
	for _, m := range added.Members {
		initial = append(initial, cmp.Or(m.GetName(), name)+"="+m.GetPeerURLs()[0])
	}
	cmd := exec.Command(filepath.Join(bin, "etcd"), "--name="+name, "--data-dir="+t.TempDir(), "--unsafe-no-fsync", "--log-level=error",
		"--listen-client-urls="+urls[0], "--advertise-client-urls="+urls[0], "--listen-peer-urls="+urls[1], "--initial-advertise-peer-urls="+urls[1],
		"--initial-cluster="+strings.Join(initial, ","), "--initial-cluster-state=existing",
		"--client-cert-auth", "--trusted-ca-file="+pki("etcd/ca.crt"), "--cert-file="+pki("etcd/server.crt"), "--key-file="+pki("etcd/server.key"),
		"--peer-client-cert-auth", "--peer-trusted-ca-file="+pki("etcd/ca.crt"), "--peer-cert-file="+pki("etcd/server.crt"), "--peer-key-file="+pki("etcd/server.key"))
	cmd.Stderr = os.Stderr
	s.must(cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	for { // until it has caught up
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		_, err := etcd.MemberPromote(ctx, added.Member.GetID())
		cancel()
		if err == nil {
			return urls[0]
		}
		select {
		case <-t.Context().Done():
			t.Fatal(err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// TestSnapshotsAreComparedWithOtherMembers takes snapshots where etcd has two members, one of
// which lies.
func TestSnapshotsAreComparedWithOtherMembers(t *testing.T) {
	kc := newSnapshotCluster(t)
	var lie atomic.Pointer[func([]byte) []byte] // of what is passed on in snapshots
	var answer atomic.Pointer[func(*EtcdState)] // of the other member
	kc.controlPlane("cp-0", kc.cp.EtcdEndpoint(), func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			got := httptest.NewRecorder()
			h.ServeHTTP(got, r)
			b := got.Body.Bytes()
			if f := lie.Load(); f != nil {
				b = (*f)(b)
			}
			w.Header().Set("Trailer", got.Result().Header.Get("Trailer"))
			w.WriteHeader(got.Code)
			_, _ = w.Write(b)
			for k, v := range got.Result().Trailer {
				w.Header()[k] = v
			}
			sum := sha256.Sum256(b)
			w.Header().Set(TrailerSHA256, hex.EncodeToString(sum[:]))
		})
	})
	kc.controlPlane("cp-1", kc.secondMember("cp-1"), func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			f := answer.Load()
			if f == nil || r.URL.Path != EtcdStatePath {
				h.ServeHTTP(w, r)
				return
			}
			got := httptest.NewRecorder()
			h.ServeHTTP(got, r)
			var s EtcdState
			if err := json.Unmarshal(got.Body.Bytes(), &s); err != nil {
				t.Error(err)
			}
			(*f)(&s)
			_ = json.NewEncoder(w).Encode(s)
		})
	})
	d, err := kc.core.AppsV1().Deployments(kube.Namespace).Get(t.Context(), "constellation-operator", metav1.GetOptions{})
	kc.must(err)
	d.Spec.Template.Annotations = map[string]string{"words": "what-is-not-compared"}
	_, err = kc.core.AppsV1().Deployments(kube.Namespace).Update(t.Context(), d, metav1.UpdateOptions{})
	kc.must(err)
	console, err := kube.ForConfig(kc.cp.Config(), nil)
	kc.must(err)
	// The pod on cp-0 is the older one.
	take := func() (backup.Snapshot, error) {
		return console.EtcdSnapshot(t.Context(), &sink{}, func(context.Context, string, string) error { return nil })
	}
	s, err := take()
	if err != nil || s.Member != "cp-0" || !slices.Equal(s.Witnesses, []string{"cp-1"}) || len(s.Unchecked) > 0 {
		t.Fatalf("got %+v, %v", s, err)
	}
	for _, tt := range []struct {
		name   string
		lie    func([]byte) []byte
		answer func(*EtcdState)
		kind   error
		words  string
	}{
		{
			name: "another image in what the API server's metadata does not show",
			lie: func(b []byte) []byte {
				from, to := []byte("what-is-not-compared"), []byte("what-somebody-forged")
				if !bytes.Contains(b, from) {
					t.Error("the snapshot does not hold it")
				}
				b = bytes.ReplaceAll(b, from, to)
				sum := sha256.Sum256(b[:len(b)-sha256.Size])
				return append(b[:len(b)-sha256.Size], sum[:]...)
			},
			kind: engine.ErrImpostor, words: "it differs from what etcd on cp-1 has at revision",
		},
		{name: "another cluster", answer: func(s *EtcdState) { s.ClusterID = "1" }, kind: engine.ErrImpostor, words: "and etcd on cp-1 has 1"},
		{name: "another member", answer: func(s *EtcdState) { s.MemberID = "2" }, kind: engine.ErrImpostor, words: "no member cp-1 with the ID 2"},
		{name: "other members", answer: func(s *EtcdState) { s.Members = append(s.Members, "3") }, kind: values.ErrUnreachable, words: "it lacks the member 3 of etcd that cp-1 has"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.lie != nil {
				lie.Store(&tt.lie)
				defer lie.Store(nil)
			}
			if tt.answer != nil {
				answer.Store(&tt.answer)
				defer answer.Store(nil)
			}
			if s, err := take(); !errors.Is(err, tt.kind) || !strings.Contains(err.Error(), tt.words) {
				t.Errorf("got %+v, %v", s, err)
			}
		})
	}
}
