package controlplane_test

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"constellation/engine/sandbox/controlplane"
)

func TestAPIServerAnswersAndAuthorizes(t *testing.T) {
	start := time.Now()
	cp := controlplane.ForTest(t, controlplane.Options{})
	t.Logf("ready after %v", time.Since(start).Round(time.Millisecond))

	admin := kubernetes.NewForConfigOrDie(cp.Config())
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "constellation-system"}}
	if _, err := admin.CoreV1().Namespaces().Create(t.Context(), ns, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b, err := cp.Kubeconfig()
	if err != nil {
		t.Fatal(err)
	}
	fromFile, err := clientcmd.RESTConfigFromKubeConfig(b)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kubernetes.NewForConfigOrDie(fromFile).CoreV1().Namespaces().Get(t.Context(), ns.Name, metav1.GetOptions{}); err != nil {
		t.Errorf("with the kubeconfig: %v", err)
	}
	nobody, err := cp.ConfigFor("system:serviceaccount:default:nobody", "system:serviceaccounts")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kubernetes.NewForConfigOrDie(nobody).CoreV1().Secrets("kube-system").List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a user without rights listed secrets: %v", err)
	}

	cp.StopAPIServer()
	if _, err := admin.CoreV1().Namespaces().Get(t.Context(), ns.Name, metav1.GetOptions{}); err == nil {
		t.Error("the stopped API server answered")
	}
	if err := cp.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.CoreV1().Namespaces().Get(t.Context(), ns.Name, metav1.GetOptions{}); err != nil {
		t.Errorf("after the API server's restart: %v", err)
	}

	pid := cp.PID("etcd")
	cp.Stop()
	if pid == 0 || alive(pid) {
		t.Errorf("etcd (process %d) outlived Stop", pid)
	}
}

func TestControllersMakePodsPossible(t *testing.T) {
	cp := controlplane.ForTest(t, controlplane.Options{Controllers: true})
	c := kubernetes.NewForConfigOrDie(cp.Config())
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	if _, err := c.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Errorf("create pod: %v", err)
	}
}

func TestStartSaysWhatIsMissing(t *testing.T) {
	t.Setenv("CONSTELLATION_KUBERNETES_BIN", t.TempDir())
	if _, err := controlplane.Start(t.Context(), controlplane.Options{Dir: t.TempDir()}); !errors.Is(err, controlplane.ErrNoBinaries) {
		t.Errorf("error %v, want ErrNoBinaries", err)
	}
	bin := t.TempDir()
	for _, name := range []string{"etcd", "kube-apiserver"} {
		script := "#!/bin/sh\necho " + name + " cannot start here >&2\nexit 3\n"
		if err := os.WriteFile(filepath.Join(bin, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	_, err := controlplane.Start(t.Context(), controlplane.Options{Dir: t.TempDir(), BinDir: bin})
	// Both begin at once, so either may be the first that ends.
	if err == nil || !strings.Contains(err.Error(), " cannot start here") {
		t.Errorf("error %v, want the words of the server that ended", err)
	}
}

func alive(pid int) bool {
	_, err := os.Stat(filepath.Join("/proc", strconv.Itoa(pid)))
	return err == nil
}
