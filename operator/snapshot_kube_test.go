//go:build linux

package operator

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	cp := controlplane.ForTest(t, controlplane.Options{})
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

	chart, err := render.Chart("constellation-operator", "v1.1.0", kube.Namespace, map[string]any{
		"release": "v1.1.0", "operator": map[string]any{"snapshotPort": server.Listener.Addr().(*net.TCPAddr).Port},
	})
	must(err)
	must(cp.Apply(t.Context(), []byte("{apiVersion: v1, kind: Namespace, metadata: {name: "+kube.Namespace+"}}")))
	must(cp.Apply(t.Context(), chart))
	d, err := c.AppsV1().Deployments(kube.Namespace).Get(t.Context(), "constellation-operator", metav1.GetOptions{})
	must(err)
	pod := &corev1.Pod{ObjectMeta: d.Spec.Template.ObjectMeta, Spec: d.Spec.Template.Spec}
	pod.Name, pod.Spec.NodeName = "constellation-operator-0", "cp-0"
	pod, err = c.CoreV1().Pods(kube.Namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	must(err)
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	_, err = c.CoreV1().Pods(kube.Namespace).UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
	must(err)
	const canary = "a value that a snapshot holds"
	_, err = c.CoreV1().ConfigMaps(kube.Namespace).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "canary"}, Data: map[string]string{"k": canary}}, metav1.CreateOptions{})
	must(err)

	console, err := kube.ForConfig(cp.Config(), nil)
	must(err)
	var b bytes.Buffer
	s, err := console.EtcdSnapshot(t.Context(), &b)
	must(err)
	sum := sha256.Sum256(b.Bytes())
	if s.Size != int64(b.Len()) || s.SHA256 != hex.EncodeToString(sum[:]) || s.Revision == 0 || !strings.HasPrefix(s.Version, "3.") {
		t.Errorf("%d bytes came, and it is said to be %+v", b.Len(), s)
	}
	if !bytes.Contains(b.Bytes(), []byte(canary)) {
		t.Error("what is in etcd is not in the snapshot")
	}

	t.Run("who leaves half-way ends it for the agent, too", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		if _, err := console.EtcdSnapshot(ctx, writerFunc(func(p []byte) (int, error) { cancel(); return len(p), nil })); ctx.Err() == nil || err == nil {
			t.Errorf("ended with %v", err)
		}
		// One is taken at a time, so the next one shows that the first is over.
		if _, err := console.EtcdSnapshot(t.Context(), io.Discard); err != nil {
			t.Error(err)
		}
	})
	t.Run("a full disk is told as such", func(t *testing.T) {
		if _, err := console.EtcdSnapshot(t.Context(), writerFunc(func([]byte) (int, error) { return 0, fmt.Errorf("no space left") })); err == nil || !strings.Contains(err.Error(), "no space left") {
			t.Errorf("ended with %v", err)
		}
	})
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
