// Package controlplane runs a Kubernetes control plane as plain processes: etcd and
// kube-apiserver and, on request, kube-controller-manager and kube-scheduler.
//
// It is what fast tests and simulated machines stand on: the real binaries, real
// TLS, real authorization (Node and RBAC) and bootstrap tokens, ready in about four
// seconds, without root and without a network. Certificates are made here; the
// folder that holds them has the layout of /etc/kubernetes/pki. Everything listens
// on loopback only and dies with the process that started it.
//
// etcd runs without fsync: a power cut loses the cluster, which is why nothing but
// a throwaway cluster may live here.
package controlplane

import (
	"cmp"
	"context"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"constellation/engine/sandbox/build"
	"constellation/internal/testneeds"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Options describe a control plane. Dir is required.
type Options struct {
	// Dir is an existing, empty folder for certificates, data and logs. It is left
	// behind.
	Dir string
	// BinDir holds kube-apiserver, etcd and, with Controllers, kube-controller-manager
	// and kube-scheduler. Empty means [FindBinaries].
	BinDir string
	// Controllers also starts kube-controller-manager and kube-scheduler.
	Controllers bool
	// APIServerArgs are added to the API server's command line; of two equal flags the
	// last counts. So are ControllerManagerArgs and SchedulerArgs.
	APIServerArgs, ControllerManagerArgs, SchedulerArgs []string
	// EtcdName is the name of etcd's member; empty means "test".
	EtcdName string
}

// ControlPlane is a running control plane.
type ControlPlane struct {
	dir      string
	bin      string
	port     int
	etcdPort int
	etcdName string
	args     map[string][]string // added to the command line of each part
	pki      pki
	admin    *rest.Config

	mu    sync.Mutex
	procs map[string]*process
}

const (
	startTimeout = 60 * time.Second
	// portAttempts bounds how often a start is repeated because somebody else took a
	// port between our looking for it and the server's listening on it.
	portAttempts = 3
)

// Start starts a control plane and returns when its API server is ready and, with
// Controllers, the default ServiceAccount exists.
func Start(ctx context.Context, o Options) (*ControlPlane, error) {
	if o.BinDir == "" {
		dir, err := FindBinaries()
		if err != nil {
			return nil, err
		}
		o.BinDir = dir
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	c := &ControlPlane{dir: o.Dir, bin: o.BinDir, etcdName: cmp.Or(o.EtcdName, "test"), procs: map[string]*process{}, args: map[string][]string{
		"kube-apiserver": o.APIServerArgs, "kube-controller-manager": o.ControllerManagerArgs, "kube-scheduler": o.SchedulerArgs,
	}}
	var err error
	if c.pki, err = newPKI(filepath.Join(o.Dir, "pki")); err != nil {
		return nil, fmt.Errorf("make certificates: %w", err)
	}
	for attempt := 1; ; attempt++ {
		err = c.start(ctx, o.Controllers)
		if err == nil {
			return c, nil
		}
		c.Stop()
		if !errors.Is(err, errPortTaken) || attempt == portAttempts {
			return nil, err
		}
	}
}

func (c *ControlPlane) start(ctx context.Context, controllers bool) error {
	ports, err := freePorts(ctx, 3)
	if err != nil {
		return fmt.Errorf("find free ports: %w", err)
	}
	c.etcdPort, c.port = ports[0], ports[2]
	if c.admin, err = c.ConfigFor("kubernetes-admin", "system:masters"); err != nil {
		return err
	}
	if err := c.run(ctx, "etcd", c.etcdArgs(ports[1]), nil); err != nil {
		return err
	}
	if err := c.StartAPIServer(ctx); err != nil {
		return err
	}
	if !controllers {
		return nil
	}
	return c.StartControllers(ctx, c.args["kube-controller-manager"], c.args["kube-scheduler"])
}

// StartControllers starts kube-controller-manager and kube-scheduler with arguments, and returns when the default
// ServiceAccount exists. Neither may run.
func (c *ControlPlane) StartControllers(ctx context.Context, controllerManagerArgs, schedulerArgs []string) error {
	for _, p := range []struct {
		name string
		args []string
	}{
		{"kube-controller-manager", append(c.controllerManagerArgs(), controllerManagerArgs...)},
		{"kube-scheduler", schedulerArgs},
	} {
		kubeconfig := filepath.Join(c.dir, p.name+".conf")
		cfg, err := c.ConfigFor("system:" + p.name)
		if err != nil {
			return err
		}
		if err := clientcmd.WriteToFile(*kubeconfigOf(cfg, "system:"+p.name), kubeconfig); err != nil {
			return fmt.Errorf("write kubeconfig of %s: %w", p.name, err)
		}
		args := append([]string{"--kubeconfig=" + kubeconfig, "--leader-elect=false", "--secure-port=0"}, p.args...)
		if err := c.run(ctx, p.name, args, nil); err != nil {
			return err
		}
	}
	return c.awaitServiceAccount(ctx)
}

// StopControllers kills kube-controller-manager and kube-scheduler and waits for their end.
func (c *ControlPlane) StopControllers() {
	c.stop("kube-scheduler")
	c.stop("kube-controller-manager")
}

func (c *ControlPlane) etcdArgs(peerPort int) []string {
	client := "https://127.0.0.1:" + strconv.Itoa(c.etcdPort)
	peer := "https://127.0.0.1:" + strconv.Itoa(peerPort)
	p := c.pki.path
	return []string{
		"--name=" + c.etcdName, "--data-dir=" + filepath.Join(c.dir, "etcd-"+strconv.Itoa(c.etcdPort)), "--unsafe-no-fsync",
		"--listen-client-urls=" + client, "--advertise-client-urls=" + client,
		"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer,
		"--initial-cluster=" + c.etcdName + "=" + peer,
		"--client-cert-auth", "--trusted-ca-file=" + p("etcd/ca.crt"),
		"--cert-file=" + p("etcd/server.crt"), "--key-file=" + p("etcd/server.key"),
		"--peer-client-cert-auth", "--peer-trusted-ca-file=" + p("etcd/ca.crt"),
		"--peer-cert-file=" + p("etcd/server.crt"), "--peer-key-file=" + p("etcd/server.key"),
		"--log-level=warn",
	}
}

func (c *ControlPlane) apiServerArgs() []string {
	p := c.pki.path
	return append([]string{
		"--bind-address=127.0.0.1", "--secure-port=" + strconv.Itoa(c.port),
		// Loopback cannot be advertised; nothing here asks for the endpoints.
		"--advertise-address=192.0.2.1", "--endpoint-reconciler-type=none",
		"--etcd-servers=https://127.0.0.1:" + strconv.Itoa(c.etcdPort),
		"--etcd-cafile=" + p("etcd/ca.crt"), "--etcd-certfile=" + p("apiserver-etcd-client.crt"), "--etcd-keyfile=" + p("apiserver-etcd-client.key"),
		"--tls-cert-file=" + p("apiserver.crt"), "--tls-private-key-file=" + p("apiserver.key"),
		"--client-ca-file=" + p("ca.crt"),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--enable-bootstrap-token-auth",
		"--allow-privileged", // as kubeadm has it
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + p("sa.pub"), "--service-account-signing-key-file=" + p("sa.key"),
		"--service-cluster-ip-range=10.96.0.0/12",
		"--requestheader-client-ca-file=" + p("front-proxy-ca.crt"), "--requestheader-allowed-names=front-proxy-client",
		"--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
	}, c.args["kube-apiserver"]...)
}

func (c *ControlPlane) controllerManagerArgs() []string {
	p := c.pki.path
	return []string{
		"--use-service-account-credentials", "--controllers=*,bootstrapsigner,tokencleaner",
		"--service-account-private-key-file=" + p("sa.key"), "--root-ca-file=" + p("ca.crt"),
		"--cluster-signing-cert-file=" + p("ca.crt"), "--cluster-signing-key-file=" + p("ca.key"),
	}
}

// StartAPIServer starts the API server again after [ControlPlane.StopAPIServer], at
// the same address, and returns when it is ready.
func (c *ControlPlane) StartAPIServer(ctx context.Context) error {
	client, err := rest.HTTPClientFor(c.admin)
	if err != nil {
		return err
	}
	client.Timeout = 5 * time.Second
	defer client.CloseIdleConnections()
	return c.run(ctx, "kube-apiserver", c.apiServerArgs(), func(ctx context.Context) bool {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.admin.Host+"/readyz", nil)
		if err != nil {
			return false
		}
		resp, err := client.Do(req)
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
}

// StopAPIServer kills the API server, as a crash does; etcd and the others run on.
func (c *ControlPlane) StopAPIServer() { c.stop("kube-apiserver") }

// awaitServiceAccount waits for what a pod needs to be admitted.
func (c *ControlPlane) awaitServiceAccount(ctx context.Context) error {
	client, err := rest.HTTPClientFor(c.admin)
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	return poll(ctx, func() (bool, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.admin.Host+"/api/v1/namespaces/default/serviceaccounts/default", nil)
		if err != nil {
			return false, err
		}
		resp, err := client.Do(req)
		if err != nil {
			return false, fmt.Errorf("await default ServiceAccount: %w", err)
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK, c.exited("kube-controller-manager")
	})
}

// Stop kills all processes and waits for their end. It may be called again.
func (c *ControlPlane) Stop() {
	for _, name := range []string{"kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"} {
		c.stop(name)
	}
}

// Config returns the cluster administrator's access. It is a copy.
func (c *ControlPlane) Config() *rest.Config { return rest.CopyConfig(c.admin) }

// ConfigFor returns the access of a user in groups: a client certificate signed by
// the cluster's CA and valid for 90 days. A ServiceAccount's name is
// system:serviceaccount:<namespace>:<name>, its groups are system:serviceaccounts
// and system:serviceaccounts:<namespace>.
func (c *ControlPlane) ConfigFor(user string, groups ...string) (*rest.Config, error) {
	cert, key, err := c.pki.cluster.issue(pkix.Name{CommonName: user, Organization: groups}, clientAuth)
	if err != nil {
		return nil, fmt.Errorf("issue certificate for %s: %w", user, err)
	}
	return &rest.Config{
		Host:            "https://127.0.0.1:" + strconv.Itoa(c.port),
		TLSClientConfig: rest.TLSClientConfig{CAData: c.pki.cluster.certPEM, CertData: cert, KeyData: key},
		// client-go's default of 5 requests a second would be what tests measure.
		QPS: 1000, Burst: 2000,
	}, nil
}

// Kubeconfig returns the cluster administrator's kubeconfig with its keys inside.
func (c *ControlPlane) Kubeconfig() ([]byte, error) {
	return clientcmd.Write(*kubeconfigOf(c.admin, "kubernetes-admin"))
}

// EtcdEndpoint is the URL of etcd, which takes certificates of its own authority alone:
// apiserver-etcd-client in [ControlPlane.PKI] is one.
func (c *ControlPlane) EtcdEndpoint() string { return "https://127.0.0.1:" + strconv.Itoa(c.etcdPort) }

// PKI returns the folder of certificates and keys, laid out as /etc/kubernetes/pki.
func (c *ControlPlane) PKI() string { return c.pki.dir }

// PID returns the process ID of "etcd", "kube-apiserver", "kube-controller-manager"
// or "kube-scheduler", and zero if it does not run.
func (c *ControlPlane) PID(name string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.procs[name]; p != nil {
		return p.pid()
	}
	return 0
}

func kubeconfigOf(r *rest.Config, user string) *clientcmdapi.Config {
	k := clientcmdapi.NewConfig()
	k.Clusters["kubernetes"] = &clientcmdapi.Cluster{Server: r.Host, CertificateAuthorityData: r.CAData}
	k.AuthInfos[user] = &clientcmdapi.AuthInfo{ClientCertificateData: r.CertData, ClientKeyData: r.KeyData}
	k.Contexts[user+"@kubernetes"] = &clientcmdapi.Context{Cluster: "kubernetes", AuthInfo: user}
	k.CurrentContext = user + "@kubernetes"
	return k
}

// T is what [ForTest] needs of a *testing.T or *testing.B.
type T interface {
	Helper()
	Attr(key, value string)
	Context() context.Context
	Cleanup(func())
	TempDir() string
	Skipf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// ForTest starts a control plane that ends with the test, in a folder of the test.
// Where the binaries are missing the test is skipped with the reason.
func ForTest(t T, o Options) *ControlPlane {
	t.Helper()
	testneeds.ControlPlane(t)
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	c, err := Start(t.Context(), o)
	if errors.Is(err, ErrNoBinaries) {
		t.Skipf("%v", err)
	}
	if err != nil {
		t.Fatalf("start control plane: %v", err)
	}
	t.Cleanup(c.Stop)
	return c
}

// ErrNoBinaries means that Kubernetes' binaries are not in the cache.
var ErrNoBinaries = errors.New("no Kubernetes binaries in the cache: run `constellation sandbox fetch`")

// binDirEnv names a folder to use instead of the cache, for development.
const binDirEnv = "CONSTELLATION_KUBERNETES_BIN"

// FindBinaries returns the folder of the binaries of [build.DefaultVersion] in the cache,
// where `constellation sandbox fetch` puts them, or else those of the oldest version there.
// The environment variable CONSTELLATION_KUBERNETES_BIN names another folder. The error
// wraps [ErrNoBinaries].
func FindBinaries() (string, error) {
	dirs := []string{os.Getenv(binDirEnv)}
	if dirs[0] == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("%w (%w)", ErrNoBinaries, err)
		}
		versions := filepath.Join(cache, "constellation", "kubernetes")
		others, err := filepath.Glob(filepath.Join(versions, "v*", "bin"))
		if err != nil {
			return "", err
		}
		slices.Sort(others)
		// Tests expect one version, whatever else the cache holds.
		dirs = append([]string{filepath.Join(versions, build.DefaultVersion, "bin")}, others...)
	}
	for _, dir := range dirs {
		if executable(filepath.Join(dir, "kube-apiserver")) && executable(filepath.Join(dir, "etcd")) {
			return dir, nil
		}
	}
	return "", ErrNoBinaries
}

func executable(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.Mode().IsRegular() && fi.Mode()&0o100 != 0
}

// freePorts returns n different ports of the loopback that are free at the moment.
func freePorts(ctx context.Context, n int) ([]int, error) {
	var lc net.ListenConfig
	var ports []int
	for range n {
		l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}
