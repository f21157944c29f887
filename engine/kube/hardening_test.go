package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"constellation/engine/kubeadm"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/version"
	"constellation/internal/testneeds"
)

// hardenedCluster is a control plane of processes, with the flags that init gives those of a cluster.
type hardenedCluster struct {
	*controlplane.ControlPlane
	core  kubernetes.Interface
	audit string // file
	warn  *warnings
}

// warnings are those of an API server.
type warnings struct {
	mu  sync.Mutex
	all []string
}

func (w *warnings) HandleWarningHeader(_ int, _, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, text)
}

func newHardenedCluster(t *testing.T, v, bin string, off ...string) *hardenedCluster {
	t.Helper()
	config, err := kubeadm.NewInit(kubeadm.Cluster{
		Name: "demo", Version: version.MustParse(v), Endpoint: "10.42.0.1:6443", Off: off,
		PodCIDR: netip.MustParsePrefix("10.244.0.0/16"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"),
	}, kubeadm.Node{Name: "cp-0", ProviderID: "sandbox://demo/cp-0", IP: netip.MustParseAddr("10.42.0.10")})
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	for name, b := range kubeadm.ControlPlaneFiles() {
		file := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, b, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	flags := func(all []kubeadm.Arg, leave ...string) (out []string) {
		for _, a := range all {
			if slices.Contains(leave, a.Name) {
				continue
			}
			if strings.HasPrefix(a.Value, "/") {
				a.Value = filepath.Join(root, a.Value)
			}
			out = append(out, "--"+a.Name+"="+a.Value)
		}
		return out
	}
	c := &hardenedCluster{audit: filepath.Join(root, "/var/log/kubernetes/audit/audit.log"), warn: &warnings{}}
	c.ControlPlane = controlplane.ForTest(t, controlplane.Options{
		BinDir: bin, Controllers: true,
		APIServerArgs:         flags(config.Cluster.APIServer.ExtraArgs, "kubelet-certificate-authority"),
		ControllerManagerArgs: flags(config.Cluster.ControllerManager.ExtraArgs, "allocate-node-cidrs"),
		SchedulerArgs:         flags(config.Cluster.Scheduler.ExtraArgs),
	})
	access := c.Config()
	access.WarningHandler = c.warn
	if c.core, err = kubernetes.NewForConfig(access); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *hardenedCluster) pod(ctx context.Context, namespace string, privileged bool) error {
	_, err := c.core.CoreV1().Pods(namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "p-"},
		Spec: corev1.PodSpec{AutomountServiceAccountToken: new(bool), Containers: []corev1.Container{{
			Name: "c", Image: "registry.invalid/c", SecurityContext: &corev1.SecurityContext{Privileged: &privileged},
		}}},
	}, metav1.CreateOptions{})
	return err
}

// Each version that was built starts with the settings of new clusters, and enforces them.
func TestNewClustersAreHardened(t *testing.T) {
	for _, v := range []string{"v1.35.4", "v1.36.4", "v1.37.2"} {
		t.Run(v, func(t *testing.T) {
			c := newHardenedCluster(t, v, testneeds.Kubernetes(t, v))
			ctx := t.Context()
			if err := c.pod(ctx, "default", true); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), `violates PodSecurity "baseline:latest"`) {
				t.Errorf("a privileged pod: %v", err)
			}
			if err := c.pod(ctx, "default", false); err != nil {
				t.Errorf("a pod of level baseline: %v", err)
			}
			if !strings.Contains(strings.Join(c.warn.all, "\n"), `would violate PodSecurity "restricted:latest"`) {
				t.Errorf("warnings: %q", c.warn.all)
			}
			if err := c.pod(ctx, "kube-system", true); err != nil && !strings.Contains(err.Error(), "serviceaccount") {
				t.Errorf("a privileged pod of kube-system: %v", err)
			}
			service := func(ips ...string) error {
				_, err := c.core.CoreV1().Services("default").Create(ctx, &corev1.Service{
					ObjectMeta: metav1.ObjectMeta{GenerateName: "s-"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}, ExternalIPs: ips},
				}, metav1.CreateOptions{})
				return err
			}
			if err := service("192.0.2.7"); !apierrors.IsForbidden(err) {
				t.Errorf("a Service with an external IP: %v", err)
			}
			if err := service(); err != nil {
				t.Errorf("a Service: %v", err)
			}
			c.testAnonymous(t)
			c.testTLS(t)
			c.testAudit(t)
			c.testEvents(t)
		})
	}
}

// Items that are off have no effect.
func TestClustersWithoutHardening(t *testing.T) {
	c := newHardenedCluster(t, "v1.36.4", testneeds.Kubernetes(t, "v1.36.4"), kubeadm.ItemNames()...)
	if err := c.pod(t.Context(), "default", true); err != nil {
		t.Errorf("a privileged pod: %v", err)
	}
	if _, err := os.Stat(c.audit); err == nil {
		t.Error("there is an audit log")
	}
}

// get sends a request without credentials and returns the status.
func (c *hardenedCluster) get(t *testing.T, path string, settings *tls.Config) (int, error) {
	t.Helper()
	settings.InsecureSkipVerify = true
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: settings}}
	defer client.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, c.Config().Host+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}

func (c *hardenedCluster) testAnonymous(t *testing.T) {
	t.Helper()
	for path, want := range map[string]int{
		"/livez": http.StatusOK, "/readyz": http.StatusOK, "/version": http.StatusUnauthorized, "/api/v1/namespaces": http.StatusUnauthorized,
		"/api/v1/namespaces/kube-public/configmaps/cluster-info": http.StatusForbidden, // no kubeadm made its Role here
	} {
		if got, err := c.get(t, path, &tls.Config{}); got != want {
			t.Errorf("%s without credentials: %d, %v, want %d", path, got, err, want)
		}
	}
}

func (c *hardenedCluster) testTLS(t *testing.T) {
	t.Helper()
	if _, err := c.get(t, "/livez", &tls.Config{MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11}); err == nil {
		t.Error("the API server accepts TLS 1.1")
	}
	weak := []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA, tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA}
	if _, err := c.get(t, "/livez", &tls.Config{MaxVersion: tls.VersionTLS12, CipherSuites: weak}); err == nil {
		t.Error("the API server accepts a cipher suite without authenticated encryption")
	}
	if got, err := c.get(t, "/livez", &tls.Config{MaxVersion: tls.VersionTLS12}); got != http.StatusOK {
		t.Errorf("with TLS 1.2: %d, %v", got, err)
	}
}

// The log has who did what to a Secret, and not its content.
func (c *hardenedCluster) testAudit(t *testing.T) {
	t.Helper()
	const canary = "canary-of-a-secret"
	_, err := c.core.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "watched"}, StringData: map[string]string{"k": canary}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.ReadFile(c.audit)
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for line := range bytes.Lines(log) {
		if bytes.Contains(line, []byte(`"resource":"secrets","namespace":"default","name":"watched"`)) && bytes.Contains(line, []byte(`"verb":"create","user":{"username":"kubernetes-admin"`)) {
			found = true
		}
	}
	if !found {
		t.Errorf("the audit log lacks the creation of a Secret:\n%.4000s", log)
	}
	if bytes.Contains(log, []byte(canary)) || bytes.Contains(log, []byte("Y2FuYXJ5")) {
		t.Error("the audit log has the content of a Secret")
	}
}

// One client cannot fill etcd with events. Another one is not affected.
func (c *hardenedCluster) testEvents(t *testing.T) {
	t.Helper()
	send := func(core kubernetes.Interface, namespace string) error {
		_, err := core.CoreV1().Events(namespace).Create(t.Context(), &corev1.Event{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "e-", Namespace: namespace}, InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: namespace, Name: "p"},
		}, metav1.CreateOptions{})
		return err
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	refused := 0
	for range 8 {
		wg.Go(func() {
			for range 400 {
				if err := send(c.core, "default"); apierrors.IsTooManyRequests(err) {
					mu.Lock()
					refused++
					mu.Unlock()
					return
				} else if err != nil {
					t.Errorf("create event: %v", err)
					return
				}
			}
		})
	}
	wg.Wait()
	if refused == 0 {
		t.Error("3,200 events at once were accepted")
	}
	other, err := c.ConfigFor("another administrator", "system:masters")
	if err != nil {
		t.Fatal(err)
	}
	core, err := kubernetes.NewForConfig(rest.CopyConfig(other))
	if err != nil {
		t.Fatal(err)
	}
	if err := send(core, "kube-public"); err != nil {
		t.Errorf("an event of another user: %v", fmt.Errorf("create event: %w", err))
	}
}
