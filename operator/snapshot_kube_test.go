//go:build linux

package operator

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"constellation/agent"
	"constellation/assets/render"
	"constellation/engine/kube"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/kubelettest"
)

// TestSnapshotReachesTheConsole takes one as the console does: etcd, agent, operator's
// server, chart, API server and client are the real ones; only the kubelet that
// forwards the port is not.
func TestSnapshotReachesTheConsole(t *testing.T) {
	cp := controlplane.ForTest(t, controlplane.Options{EtcdName: "cp-0"})
	c, err := kubernetes.NewForConfig(cp.Config())
	if err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}

	dir, err := os.MkdirTemp("", "snap") // t.TempDir can be too long for a socket's name
	must(err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	for from, to := range map[string]string{"etcd/ca.crt": "ca.crt", "apiserver-etcd-client.crt": "healthcheck-client.crt", "apiserver-etcd-client.key": "healthcheck-client.key"} {
		b, err := os.ReadFile(filepath.Join(cp.PKI(), from))
		must(err)
		must(os.WriteFile(filepath.Join(dir, to), b, 0o600))
	}
	rig := &hostRig{t: t, dir: dir, host: agent.Host{Root: filepath.Join(dir, "root"), Name: "cp-0", Etcd: agent.Etcd{Endpoint: cp.EtcdEndpoint(), PKI: dir}}}
	rig.up()
	t.Cleanup(rig.down)
	host := rig.client()

	server := httptest.NewServer(newSnapshots(c, host.snapshot, slog.New(slog.DiscardHandler)))
	t.Cleanup(server.Close)
	kubelet := kubelettest.New()
	t.Cleanup(kubelet.Close)
	must(kubelet.Register(t.Context(), c, "cp-0"))
	_, err = c.CoreV1().Nodes().Patch(t.Context(), "cp-0", types.MergePatchType, []byte(`{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`), metav1.PatchOptions{})
	must(err)
	confirm := func(context.Context, string, string) error { return nil }

	chart, err := render.Chart("constellation-operator", "v1.1.0", kube.Namespace, map[string]any{
		"release": "v1.1.0", "operator": map[string]any{"snapshotPort": server.Listener.Addr().(*net.TCPAddr).Port},
	})
	must(err)
	must(cp.Apply(t.Context(), []byte("{apiVersion: v1, kind: Namespace, metadata: {name: "+kube.Namespace+"}}")))
	must(cp.Apply(t.Context(), chart))
	d, err := c.AppsV1().Deployments(kube.Namespace).Get(t.Context(), "constellation-operator", metav1.GetOptions{})
	must(err)
	set, err := c.AppsV1().ReplicaSets(kube.Namespace).Create(t.Context(), &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: "constellation-operator-1", Labels: d.Spec.Template.Labels, OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(d, appsv1.SchemeGroupVersion.WithKind("Deployment"))}},
		Spec:       appsv1.ReplicaSetSpec{Selector: d.Spec.Selector, Template: d.Spec.Template},
	}, metav1.CreateOptions{})
	must(err)
	pod := &corev1.Pod{ObjectMeta: d.Spec.Template.ObjectMeta, Spec: d.Spec.Template.Spec}
	pod.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(set, appsv1.SchemeGroupVersion.WithKind("ReplicaSet"))}
	pod.Name, pod.Spec.NodeName = "constellation-operator-0", "cp-0"
	pod, err = c.CoreV1().Pods(kube.Namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	must(err)
	pod.Status.Phase = corev1.PodRunning
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	_, err = c.CoreV1().Pods(kube.Namespace).UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
	must(err)
	const canary = "a value that a snapshot holds"
	_, err = c.CoreV1().ConfigMaps(kube.Namespace).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "canary"}, Data: map[string]string{"k": canary}}, metav1.CreateOptions{})
	must(err)

	console, err := kube.ForConfig(cp.Config(), nil)
	must(err)
	var b sink
	s, err := console.EtcdSnapshot(t.Context(), &b, confirm)
	must(err)
	sum := sha256.Sum256(b.Bytes())
	if s.Size != int64(b.Len()) || len(s.Unchecked) > 0 || s.SHA256 != hex.EncodeToString(sum[:]) || s.Revision == 0 || !strings.HasPrefix(s.Version, "3.") {
		t.Errorf("%d bytes came, and it is said to be %+v", b.Len(), s)
	}
	if !bytes.Contains(b.Bytes(), []byte(canary)) {
		t.Error("what is in etcd is not in the snapshot")
	}

	t.Run("who leaves half-way ends it for the agent, too", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		if _, err := console.EtcdSnapshot(ctx, &sink{fail: func(p []byte) (int, error) { cancel(); return len(p), nil }}, confirm); ctx.Err() == nil || err == nil {
			t.Errorf("ended with %v", err)
		}
		// One is taken at a time, so the next one shows that the first is over.
		if _, err := console.EtcdSnapshot(t.Context(), &sink{}, confirm); err != nil {
			t.Error(err)
		}
	})
	t.Run("a full disk is told as such", func(t *testing.T) {
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
