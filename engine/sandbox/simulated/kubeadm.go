package simulated

import (
	"bufio"
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/yaml"

	"constellation/engine/sandbox/build"
)

const (
	pkiDir       = "etc/kubernetes/pki"
	systemSpace  = "kube-system"
	apiPort      = "6443"
	controlLabel = "node-role.kubernetes.io/control-plane"
)

// Timeouts of kubeadm.
const (
	apiTimeout  = 4 * time.Minute
	nodeTimeout = 4 * time.Minute
)

// staticOrder is the order in which an upgrade replaces static pods.
var staticOrder = []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}

// standIn is one run of the stand-in for kubeadm.
type standIn struct {
	record
	dir     string
	version string
	real    string // the real kubeadm
	out     io.Writer
}

func (s *standIn) root(elem ...string) string {
	return filepath.Join(append([]string{s.dir, rootDir}, elem...)...)
}

func (s *standIn) say(format string, args ...any) { fmt.Fprintf(s.out, format+"\n", args...) }

// Kubeadm runs the stand-in for a version of kubeadm, on the calling machine.
// It returns kubeadm's exit code: 1, or 3 for an invalid configuration.
func Kubeadm(ctx context.Context, version string, args []string, out, errs io.Writer) int {
	err := runKubeadm(ctx, version, args, out)
	if err == nil {
		return 0
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() > 0 {
		return exit.ExitCode() // it has printed the reason
	}
	fmt.Fprintln(errs, "error: kubeadm stand-in (simulated):", err)
	return 1
}

func runKubeadm(ctx context.Context, version string, args []string, out io.Writer) error {
	dir, err := here()
	if err != nil {
		return err
	}
	r, err := readRecord(dir)
	if err != nil {
		return err
	}
	a, err := build.Load(r.Cache, version)
	if err != nil {
		return err
	}
	s := &standIn{record: r, dir: dir, version: version, real: a.Binaries["kubeadm"], out: out}
	var words []string
	config := ""
	for _, arg := range args {
		if v, ok := strings.CutPrefix(arg, "--config="); ok {
			config = v
		} else if !strings.HasPrefix(arg, "-") {
			words = append(words, arg)
		}
	}
	switch verb := strings.Join(words, " "); verb {
	case "version", "version short", "config validate":
		return s.run(ctx, args...)
	case "init phase certs ca":
		return s.withConfig(config, (*standIn).initCA)(ctx)
	case "init":
		return s.withConfig(config, (*standIn).init)(ctx)
	case "join":
		return s.withConfig(config, (*standIn).join)(ctx)
	case "reset":
		return s.reset(ctx)
	case "upgrade node phase addon coredns", "upgrade node phase addon kube-proxy":
		return s.upgradeAddon(ctx, words[len(words)-1])
	case "upgrade plan", "upgrade apply", "upgrade node":
		return s.withConfig(config, func(s *standIn, ctx context.Context, d documents) error {
			return s.upgrade(ctx, strings.TrimPrefix(verb, "upgrade "), d)
		})(ctx)
	default:
		return fmt.Errorf("%q is not simulated", verb)
	}
}

// run runs the real kubeadm with this process's output.
func (s *standIn) run(ctx context.Context, args ...string) error {
	return s.runEnv(ctx, nil, args...)
}

func (s *standIn) runEnv(ctx context.Context, env []string, args ...string) error {
	cmd := exec.CommandContext(ctx, s.real, args...)
	cmd.Stdout, cmd.Stderr = s.out, s.out
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = child()
	return cmd.Run()
}

// documents are the parts of a configuration by kind.
type documents map[string]map[string]any

func parseDocuments(b []byte) (documents, error) {
	d := documents{}
	for _, part := range bytes.Split(b, []byte("\n---\n")) {
		if len(bytes.TrimSpace(part)) == 0 {
			continue
		}
		var m map[string]any
		if err := yaml.Unmarshal(part, &m); err != nil {
			return nil, errors.New("read configuration: it is no YAML") // the cause may quote a token
		}
		kind, _ := m["kind"].(string)
		d[kind] = m
	}
	return d, nil
}

func (s *standIn) withConfig(path string, do func(*standIn, context.Context, documents) error) func(context.Context) error {
	return func(ctx context.Context) error {
		b, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("read configuration: %w", err)
		}
		d, err := parseDocuments(b)
		if err != nil {
			return err
		}
		return do(s, ctx, d)
	}
}

// section returns the map at a path and creates missing ones.
func section(m map[string]any, path ...string) map[string]any {
	for _, p := range path {
		next, ok := m[p].(map[string]any)
		if !ok {
			next = map[string]any{}
			m[p] = next
		}
		m = next
	}
	return m
}

func addString(m map[string]any, key string, values ...string) {
	list, _ := m[key].([]any)
	for _, v := range values {
		if !slices.Contains(list, any(v)) {
			list = append(list, v)
		}
	}
	m[key] = list
}

// write writes the configuration for the real kubeadm. kubeadm refuses loopback addresses, so it
// gets another one, and certificates contain both. With local, certificates are in the
// machine's directory. Otherwise paths are those that the cluster shares.
func (s *standIn) write(d documents, local bool) (path string, done func(), err error) {
	out := documents{}
	for kind, m := range d {
		b, err := yaml.Marshal(m)
		if err != nil {
			return "", nil, err
		}
		var c map[string]any
		if err := yaml.Unmarshal(b, &c); err != nil {
			return "", nil, err
		}
		out[kind] = c
	}
	delete(out, "JoinConfiguration")
	if out["InitConfiguration"] == nil {
		out["InitConfiguration"] = map[string]any{"apiVersion": "kubeadm.k8s.io/v1beta4", "kind": "InitConfiguration"}
		section(out["InitConfiguration"], "nodeRegistration")["name"] = s.Name
		section(out["InitConfiguration"], "nodeRegistration")["criSocket"] = "unix:///run/containerd/containerd.sock"
	}
	section(out["InitConfiguration"], "localAPIEndpoint")["advertiseAddress"] = alias(s.IP).String()
	if dir := patches(d); dir != "" {
		section(out["InitConfiguration"], "patches")["directory"] = dir
	}
	cluster := out["ClusterConfiguration"]
	cluster["kubernetesVersion"] = s.version
	if local {
		cluster["certificatesDir"] = s.root(pkiDir)
		addString(section(cluster, "apiServer"), "certSANs", s.IP.String())
		addString(section(cluster, "etcd", "local"), "serverCertSANs", s.IP.String())
		addString(section(cluster, "etcd", "local"), "peerCertSANs", s.IP.String())
	} else {
		delete(cluster, "certificatesDir")
	}
	var b bytes.Buffer
	for _, kind := range []string{"InitConfiguration", "ClusterConfiguration", "KubeletConfiguration", "KubeProxyConfiguration"} {
		if out[kind] == nil {
			continue
		}
		doc, err := yaml.Marshal(out[kind])
		if err != nil {
			return "", nil, err
		}
		fmt.Fprintf(&b, "---\n%s", doc)
	}
	dir, err := os.MkdirTemp("", "kubeadm-stand-in-")
	if err != nil {
		return "", nil, err
	}
	path = filepath.Join(dir, "kubeadm.yaml")
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	return path, func() { _ = os.RemoveAll(dir) }, nil
}

// patches returns the directory with patches of static pods that a configuration names; empty: none.
func patches(d documents) string {
	for _, at := range [][]string{{"InitConfiguration"}, {"JoinConfiguration"}, {"UpgradeConfiguration", "apply"}, {"UpgradeConfiguration", "node"}} {
		m := d[at[0]]
		if len(at) > 1 {
			m, _ = m[at[1]].(map[string]any)
		}
		p, _ := m["patches"].(map[string]any)
		if dir, _ := p["directory"].(string); dir != "" {
			return dir
		}
	}
	return ""
}

// phase runs a phase of the real kubeadm init.
func (s *standIn) phase(ctx context.Context, d documents, local bool, args ...string) error {
	path, done, err := s.write(d, local)
	if err != nil {
		return err
	}
	defer done()
	return s.run(ctx, append(append([]string{"init", "phase"}, args...), "--config="+path)...)
}

func (s *standIn) initCA(ctx context.Context, d documents) error {
	return s.phase(ctx, d, true, "certs", "ca")
}

// kubeconfigs writes those of the control plane, with the machine's own API server as
// the server.
func (s *standIn) kubeconfigs(ctx context.Context, d documents, names ...string) error {
	for _, name := range names {
		if err := s.phase(ctx, d, true, "kubeconfig", name, "--kubeconfig-dir="+s.root("etc/kubernetes")); err != nil {
			return err
		}
	}
	files, err := filepath.Glob(s.root("etc/kubernetes/*.conf"))
	if err != nil {
		return err
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		own := bytes.ReplaceAll(b, []byte("https://"+alias(s.IP).String()+":"), []byte("https://"+s.IP.String()+":"))
		if !bytes.Equal(own, b) {
			if err := replaceFile(f, own, 0o600); err != nil {
				return err
			}
		}
	}
	return nil
}

// manifests has the real kubeadm write static pods, and returns them by name. They use
// the machine's own address for listeners.
func (s *standIn) manifests(ctx context.Context, d documents) (map[string][]byte, error) {
	path, done, err := s.write(d, false)
	if err != nil {
		return nil, err
	}
	defer done()
	dir := filepath.Join(filepath.Dir(path), "manifests")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	quiet := *s // a dry run prints everything that it would write
	var said bytes.Buffer
	quiet.out = &said
	for _, phase := range [][]string{{"etcd", "local"}, {"control-plane", "all"}} {
		if err := quiet.runEnv(ctx, []string{"KUBEADM_INIT_DRYRUN_DIR=" + dir}, append(append([]string{"init", "phase"}, phase...), "--dry-run", "--config="+path)...); err != nil {
			_, _ = s.out.Write(said.Bytes())
			return nil, err
		}
	}
	out := map[string][]byte{}
	for _, name := range staticOrder {
		b, err := os.ReadFile(filepath.Join(dir, name+".yaml"))
		if err != nil {
			return nil, err
		}
		lines := strings.Split(string(b), "\n")
		for i, l := range lines {
			if !strings.Contains(l, "--advertise-address=") && !strings.Contains(l, "kube-apiserver.advertise-address.endpoint") {
				lines[i] = strings.ReplaceAll(l, alias(s.IP).String(), s.IP.String())
			}
		}
		out[name] = []byte(strings.Join(lines, "\n"))
	}
	return out, nil
}

func (s *standIn) writeManifest(name string, b []byte) error {
	return writeBelow(s.root(manifestsDir), name+".yaml", b, 0o600)
}

// kubeletFiles writes the kubelet's configuration, and starts the kubelet.
func (s *standIn) startKubelet(ctx context.Context, d documents) error {
	s.say("[kubelet-start] Writing kubelet configuration to file \"/var/lib/kubelet/config.yaml\"")
	b, err := yaml.Marshal(d["KubeletConfiguration"])
	if err != nil {
		return err
	}
	if err := writeBelow(s.root(), "var/lib/kubelet/config.yaml", b, 0o600); err != nil {
		return err
	}
	flags := fmt.Sprintf("KUBELET_KUBEADM_ARGS=\"--node-ip=%s --provider-id=%s\"\n", s.IP, s.providerID(d))
	if err := writeBelow(s.root(), flagsFile, []byte(flags), 0o600); err != nil {
		return err
	}
	s.say("[kubelet-start] Starting the %s", StandIn)
	return ask(ctx, s.dir, "kubelet/restart")
}

// providerID is the provider ID in the kubelet's configuration.
func (s *standIn) providerID(d documents) string {
	for _, kind := range []string{"InitConfiguration", "JoinConfiguration"} {
		registration, _ := d[kind]["nodeRegistration"].(map[string]any)
		args, _ := registration["kubeletExtraArgs"].([]any)
		for _, a := range args {
			if arg, ok := a.(map[string]any); ok && arg["name"] == "provider-id" {
				return fmt.Sprint(arg["value"])
			}
		}
	}
	return s.ProviderID
}

// client uses a kubeconfig of this machine. With own, it connects to the machine's own API server.
func (s *standIn) client(name string, own bool) (*kubernetes.Clientset, error) {
	cfg, err := clientcmd.BuildConfigFromFlags("", s.root("etc/kubernetes", name))
	if err != nil {
		return nil, err
	}
	if own {
		cfg.Host = "https://" + net.JoinHostPort(s.IP.String(), apiPort)
	}
	return s.clientFor(cfg)
}

func (s *standIn) clientFor(cfg *rest.Config) (*kubernetes.Clientset, error) {
	cfg.QPS, cfg.Burst, cfg.UserAgent = 50, 100, "kubeadm-stand-in (simulated)"
	cfg.Timeout = 10 * time.Second
	return kubernetes.NewForConfig(cfg)
}

// awaitAPI waits until the machine's own API server is ready.
func (s *standIn) awaitAPI(ctx context.Context, kubeconfig string) error {
	c, err := s.client(kubeconfig, true)
	if err != nil {
		return err
	}
	limit, cancel := context.WithTimeoutCause(ctx, apiTimeout, fmt.Errorf("the API server was not ready within %s", apiTimeout))
	defer cancel()
	return poll(limit, func() (bool, error) {
		b, err := c.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(limit)
		return err == nil && string(b) == "ok", nil
	})
}

func (s *standIn) awaitNode(ctx context.Context, c kubernetes.Interface) error {
	limit, cancel := context.WithTimeoutCause(ctx, nodeTimeout, fmt.Errorf("the Node was not registered within %s", nodeTimeout))
	defer cancel()
	return poll(limit, func() (bool, error) {
		_, err := c.CoreV1().Nodes().Get(limit, s.Name, metav1.GetOptions{})
		return err == nil, nil
	})
}

// init makes the machine the first node of a cluster.
func (s *standIn) init(ctx context.Context, d documents) error {
	s.say("[init] Using Kubernetes version: %s, with the kubeadm stand-in (simulated)", s.version)
	s.say("[preflight] the kubeadm stand-in (simulated) looks at nothing of this computer")
	if err := s.phase(ctx, d, true, "certs", "all"); err != nil {
		return err
	}
	if err := s.kubeconfigs(ctx, d, "all"); err != nil {
		return err
	}
	pods, err := s.manifests(ctx, d)
	if err != nil {
		return err
	}
	s.say("[etcd] Creating static Pod manifest for local etcd in \"/etc/kubernetes/manifests\"")
	for _, name := range staticOrder {
		if name != "etcd" {
			s.say("[control-plane] Creating static Pod manifest for %q", name)
		}
		if err := s.writeManifest(name, pods[name]); err != nil {
			return err
		}
	}
	if err := s.startKubelet(ctx, d); err != nil {
		return err
	}
	s.say("[wait-control-plane] Waiting for the %s to start the control plane as processes", StandIn)
	const super, admin = "super-admin.conf", "admin.conf"
	if err := s.awaitAPI(ctx, super); err != nil {
		return err
	}
	c, err := s.client(super, true)
	if err != nil {
		return err
	}
	// The permissions that kubeadm grants to its administrators, once.
	if _, err := c.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "kubeadm:cluster-admins"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "Group", Name: "kubeadm:cluster-admins"}},
	}, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	s.say("[control-plane-check] kube-apiserver is healthy")
	if err := s.awaitNode(ctx, c); err != nil {
		return err
	}
	kubeconfig := "--kubeconfig=" + s.root("etc/kubernetes", admin)
	if err := s.phase(ctx, d, false, "upload-config", "all", kubeconfig); err != nil {
		return err
	}
	if err := s.mark(ctx, c); err != nil {
		return err
	}
	if err := s.phase(ctx, d, false, "bootstrap-token", "--skip-token-print", kubeconfig); err != nil {
		return err
	}
	s.say("[kubelet-finalize] the %s goes on with its first certificate", StandIn)
	return s.phase(ctx, d, false, "addon", "all", kubeconfig)
}

// mark labels and taints the Node as a control plane.
func (s *standIn) mark(ctx context.Context, c kubernetes.Interface) error {
	s.say("[mark-control-plane] Marking the node %s as control-plane", s.Name)
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		n, err := c.CoreV1().Nodes().Get(ctx, s.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		n.Labels[controlLabel] = ""
		n.Labels["node.kubernetes.io/exclude-from-external-load-balancers"] = ""
		taint := corev1.Taint{Key: controlLabel, Effect: corev1.TaintEffectNoSchedule}
		if !slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.MatchTaint(&taint) }) {
			n.Spec.Taints = append(n.Spec.Taints, taint)
		}
		_, err = c.CoreV1().Nodes().Update(ctx, n, metav1.UpdateOptions{})
		return err
	})
}

// join makes the machine a further node.
func (s *standIn) join(ctx context.Context, d documents) error {
	j := d["JoinConfiguration"]
	if j == nil {
		return errors.New("no JoinConfiguration")
	}
	token := section(j, "discovery", "bootstrapToken")
	endpoint, _ := token["apiServerEndpoint"].(string)
	secret, _ := token["token"].(string)
	hashes, _ := token["caCertHashes"].([]any)
	_, controlPlane := j["controlPlane"].(map[string]any)

	s.say("[preflight] the kubeadm stand-in (simulated) looks at nothing of this computer")
	ca, err := discover(ctx, endpoint, secret, hashes)
	if err != nil {
		return fmt.Errorf("couldn't validate the identity of the API Server: %w", err)
	}
	if err := writeBelow(s.root(pkiDir), "ca.crt", ca, 0o644); err != nil {
		return err
	}
	cluster := &clientcmdapi.Cluster{Server: "https://" + endpoint, CertificateAuthorityData: ca}
	if err := writeKubeconfig(s.root(bootstrapConf), "tls-bootstrap-token-user", cluster, &clientcmdapi.AuthInfo{Token: secret}); err != nil {
		return err
	}
	c, err := s.client(filepath.Base(bootstrapConf), false)
	if err != nil {
		return err
	}
	if n, err := c.CoreV1().Nodes().Get(ctx, s.Name, metav1.GetOptions{}); err == nil {
		for _, cond := range n.Status.Conditions {
			if cond.Type == corev1.NodeReady && cond.Status == corev1.ConditionTrue {
				return fmt.Errorf("a Node with name %q and status \"Ready\" already exists in the cluster. You must delete the existing Node or change the name of this new joining Node", s.Name)
			}
		}
	} else if !apierrors.IsNotFound(err) {
		return err
	}
	s.say("[preflight] Reading configuration from the \"kubeadm-config\" ConfigMap in namespace \"kube-system\"...")
	if err := readKubeletConfig(ctx, c, d); err != nil {
		return err
	}
	if controlPlane {
		if err := s.clusterConfig(ctx, c, d); err != nil {
			return err
		}
		if err := s.phase(ctx, d, true, "certs", "all"); err != nil {
			return err
		}
		if err := s.kubeconfigs(ctx, d, "admin", "controller-manager", "scheduler"); err != nil {
			return err
		}
	}
	if err := s.startKubelet(ctx, d); err != nil {
		return err
	}
	s.say("[kubelet-start] Waiting for the %s to perform the TLS Bootstrap", StandIn)
	limit, cancel := context.WithTimeoutCause(ctx, nodeTimeout, fmt.Errorf("the kubelet had no certificate within %s", nodeTimeout))
	defer cancel()
	if err := poll(limit, func() (bool, error) {
		_, err := os.Stat(s.root(kubeletConf))
		return err == nil, nil
	}); err != nil {
		return err
	}
	if c, err = s.client(filepath.Base(kubeletConf), false); err != nil {
		return err
	}
	if err := s.awaitNode(ctx, c); err != nil {
		return err
	}
	if err := os.Remove(s.root(bootstrapConf)); err != nil {
		return err
	}
	if controlPlane {
		if err := s.joinControlPlane(ctx, d); err != nil {
			return err
		}
	}
	s.say("This node has joined the cluster")
	return nil
}

// readKubeletConfig adds the configuration of kubelets that the cluster stores.
func readKubeletConfig(ctx context.Context, c kubernetes.Interface, d documents) error {
	cm, err := c.CoreV1().ConfigMaps(systemSpace).Get(ctx, "kubelet-config", metav1.GetOptions{})
	if err != nil {
		return err
	}
	kubelet, err := parseDocuments([]byte(cm.Data["kubelet"]))
	if err != nil {
		return err
	}
	d["KubeletConfiguration"] = kubelet["KubeletConfiguration"]
	return nil
}

// clusterConfig reads the configuration that the cluster shares.
func (s *standIn) clusterConfig(ctx context.Context, c kubernetes.Interface, d documents) error {
	cm, err := c.CoreV1().ConfigMaps(systemSpace).Get(ctx, "kubeadm-config", metav1.GetOptions{})
	if err != nil {
		return err
	}
	shared, err := parseDocuments([]byte(cm.Data["ClusterConfiguration"]))
	if err != nil {
		return err
	}
	if d["ClusterConfiguration"] = shared["ClusterConfiguration"]; d["ClusterConfiguration"] == nil {
		return errors.New("the ConfigMap kubeadm-config has no ClusterConfiguration")
	}
	return nil
}

// joinControlPlane adds an etcd member and an API server on this machine.
func (s *standIn) joinControlPlane(ctx context.Context, d documents) error {
	admin, err := s.client("admin.conf", false)
	if err != nil {
		return err
	}
	pods, err := s.manifests(ctx, d)
	if err != nil {
		return err
	}
	s.say("[etcd] Announced new etcd member joining to the existing etcd cluster")
	peer := "https://" + net.JoinHostPort(s.IP.String(), "2380")
	e, err := s.etcd(ctx, admin)
	if err != nil {
		return err
	}
	defer e.Close()
	members, id, err := s.addMember(ctx, e, peer)
	if err != nil {
		return fmt.Errorf("error creating local etcd static pod manifest file: %w", err)
	}
	lines := strings.Split(string(pods["etcd"]), "\n")
	var out []string
	for _, l := range lines {
		if i := strings.Index(l, "--initial-cluster="); i >= 0 {
			out = append(out, l[:i]+"--initial-cluster="+members, l[:i]+"--initial-cluster-state=existing")
			continue
		}
		out = append(out, l)
	}
	if err := s.writeManifest("etcd", []byte(strings.Join(out, "\n"))); err != nil {
		return err
	}
	s.say("[etcd] Waiting for the new etcd member to join the cluster. This can take up to 40s")
	limit, cancel := context.WithTimeoutCause(ctx, apiTimeout, errors.New("the new member of etcd could not be promoted"))
	defer cancel()
	if err := poll(limit, func() (bool, error) {
		actx, done := context.WithTimeout(limit, 5*time.Second)
		defer done()
		_, err := e.MemberPromote(actx, id)
		return err == nil || errors.Is(err, rpctypes.ErrMemberNotLearner), nil
	}); err != nil {
		return err
	}
	for _, name := range staticOrder[1:] {
		s.say("[control-plane] Creating static Pod manifest for %q", name)
		if err := s.writeManifest(name, pods[name]); err != nil {
			return err
		}
	}
	if err := s.awaitAPI(ctx, "admin.conf"); err != nil {
		return err
	}
	return s.mark(ctx, admin)
}

// etcd connects to the etcd members of the other control planes.
func (s *standIn) etcd(ctx context.Context, c kubernetes.Interface) (*clientv3.Client, error) {
	nodes, err := c.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: controlLabel})
	if err != nil {
		return nil, err
	}
	var endpoints []string
	for _, n := range nodes.Items {
		for _, a := range n.Status.Addresses {
			if a.Type == corev1.NodeInternalIP && a.Address != s.IP.String() {
				endpoints = append(endpoints, "https://"+net.JoinHostPort(a.Address, "2379"))
			}
		}
	}
	if len(endpoints) == 0 {
		return nil, errors.New("no other control plane is known")
	}
	ca, err := os.ReadFile(s.root(pkiDir, "etcd/ca.crt"))
	if err != nil {
		return nil, err
	}
	pair, err := tls.LoadX509KeyPair(s.root(pkiDir, "etcd/healthcheck-client.crt"), s.root(pkiDir, "etcd/healthcheck-client.key"))
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	return clientv3.New(clientv3.Config{
		Endpoints: endpoints, Context: ctx, DialTimeout: 5 * time.Second, Logger: zap.NewNop(),
		TLS: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool, Certificates: []tls.Certificate{pair}},
	})
}

// addMember adds this machine to etcd as a learner, once, and returns the value of etcd's flag
// for the initial cluster.
func (s *standIn) addMember(ctx context.Context, e *clientv3.Client, peer string) (initial string, id uint64, err error) {
	limit, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	l, err := e.MemberList(limit)
	if err != nil {
		return "", 0, err
	}
	members := l.Members
	for _, m := range members {
		if slices.Contains(m.PeerURLs, peer) {
			id = m.ID
		}
	}
	if id == 0 {
		var last error
		if err := poll(limit, func() (bool, error) {
			r, err := e.MemberAddAsLearner(limit, []string{peer})
			if err != nil {
				last = err
				return false, nil // another member is new, or not healthy yet
			}
			id, members = r.Member.ID, r.Members
			return true, nil
		}); err != nil {
			return "", 0, errors.Join(err, last)
		}
	}
	var parts []string
	for _, m := range members {
		name := m.Name
		if m.ID == id {
			name = s.Name
		}
		for _, u := range m.PeerURLs {
			parts = append(parts, name+"="+u)
		}
	}
	return strings.Join(parts, ","), id, nil
}

// discover reads the cluster's public information, and trusts it if the token has
// signed it and its CA matches one of the hashes.
func discover(ctx context.Context, endpoint, token string, hashes []any) (ca []byte, err error) {
	read := func(config *tls.Config) (map[string]string, error) {
		client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: config}}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+endpoint+"/api/v1/namespaces/kube-public/configmaps/cluster-info", nil)
		if err != nil {
			return nil, err
		}
		resp, err := client.Do(req)
		if err != nil {
			return nil, err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
		if err != nil {
			return nil, err
		}
		if resp.StatusCode != http.StatusOK {
			return nil, fmt.Errorf("the cluster's information cannot be read: %s", resp.Status)
		}
		var cm struct {
			Data map[string]string `json:"data"`
		}
		return cm.Data, yaml.Unmarshal(b, &cm)
	}
	id, secret, _ := strings.Cut(token, ".")
	limit, cancel := context.WithTimeoutCause(ctx, time.Minute, errors.New("the cluster does not know the token yet"))
	defer cancel()
	var data map[string]string
	var last error
	// The signing controller needs a moment for a new token.
	if err := poll(limit, func() (bool, error) {
		data, last = read(&tls.Config{InsecureSkipVerify: true}) //nolint:gosec // judged below, by token and hash
		return last == nil && data["jws-kubeconfig-"+id] != "", nil
	}); err != nil {
		return nil, errors.Join(err, last)
	}
	info := data["kubeconfig"]
	head, signature, ok := strings.Cut(data["jws-kubeconfig-"+id], "..")
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write([]byte(head + "." + base64.RawURLEncoding.EncodeToString([]byte(info))))
	got, err := base64.RawURLEncoding.DecodeString(signature)
	if !ok || err != nil || !hmac.Equal(mac.Sum(nil), got) {
		return nil, errors.New("its information is not signed by the token")
	}
	cfg, err := clientcmd.Load([]byte(info))
	if err != nil {
		return nil, err
	}
	for _, c := range cfg.Clusters {
		ca = c.CertificateAuthorityData
	}
	block, _ := pem.Decode(ca)
	if block == nil {
		return nil, errors.New("its information names no authority")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	if !slices.Contains(hashes, any("sha256:"+hex.EncodeToString(sum[:]))) {
		return nil, errors.New("its authority is not the one that was named")
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	again, err := read(&tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool})
	if err != nil {
		return nil, err
	}
	if again["kubeconfig"] != info {
		return nil, errors.New("its information is another one to whom it proves itself")
	}
	return ca, nil
}

// reset undoes what init and join did on this machine.
func (s *standIn) reset(ctx context.Context) error {
	s.say("[reset] the kubeadm stand-in (simulated) stops the %s and all processes of pods", StandIn)
	if c, err := s.client("admin.conf", false); err == nil {
		if err := s.leave(ctx, c); err != nil {
			s.say("[reset] the member of etcd stays: %v", err)
		}
	}
	if err := ask(ctx, s.dir, "kubelet/reset"); err != nil {
		return err
	}
	root, err := os.OpenRoot(s.root())
	if err != nil {
		return err
	}
	defer root.Close()
	for _, name := range []string{
		manifestsDir, pkiDir, "etc/kubernetes/tmp", "var/lib/etcd", "var/lib/kubelet", kubeletConf, bootstrapConf,
		"etc/kubernetes/admin.conf", "etc/kubernetes/super-admin.conf", "etc/kubernetes/controller-manager.conf", "etc/kubernetes/scheduler.conf",
	} {
		if err := root.RemoveAll(name); err != nil {
			return err
		}
	}
	s.say("[reset] Deleted contents of directories: [/etc/kubernetes/manifests /etc/kubernetes/pki /var/lib/kubelet /var/lib/etcd]")
	return nil
}

// leave removes the machine's member from etcd, unless it is the only one.
func (s *standIn) leave(ctx context.Context, c kubernetes.Interface) error {
	limit, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	e, err := s.etcd(limit, c)
	if err != nil {
		return err
	}
	defer e.Close()
	l, err := e.MemberList(limit)
	if err != nil {
		return err
	}
	for _, m := range l.Members {
		for _, u := range m.PeerURLs {
			if p, err := url.Parse(u); err == nil && p.Hostname() == s.IP.String() {
				_, err := e.MemberRemove(limit, m.ID)
				return err
			}
		}
	}
	return nil
}

// upgrade replaces the control plane's processes by those of another version, one after
// the other, with an outage of each.
func (s *standIn) upgrade(ctx context.Context, verb string, given documents) error {
	name := "admin.conf"
	if _, err := os.Stat(s.root("etc/kubernetes", name)); errors.Is(err, fs.ErrNotExist) {
		name = filepath.Base(kubeletConf) // a worker
	}
	c, err := s.client(name, false)
	if err != nil {
		return err
	}
	s.say("[upgrade] the kubeadm stand-in (simulated) brings this machine to %s", s.version)
	d := documents{"UpgradeConfiguration": given["UpgradeConfiguration"]}
	if err := s.clusterConfig(ctx, c, d); err != nil {
		return fmt.Errorf("failed to get config map: %w", err)
	}
	if err := readKubeletConfig(ctx, c, d); err != nil {
		return err
	}
	was, _ := d["ClusterConfiguration"]["kubernetesVersion"].(string)
	s.say("[upgrade/versions] Cluster version: %s, target version: %s", was, s.version)
	if verb == "plan" {
		return nil
	}
	if name == "admin.conf" {
		if err := s.upgradeStatic(ctx, d); err != nil {
			return err
		}
	}
	s.say("[upgrade/kubelet-config] Writing the kubelet's configuration")
	b, err := yaml.Marshal(d["KubeletConfiguration"])
	if err != nil {
		return err
	}
	if err := writeBelow(s.root(), "var/lib/kubelet/config.yaml", b, 0o600); err != nil {
		return err
	}
	if name != "admin.conf" {
		return nil
	}
	if verb == "apply" {
		// The API server may be unavailable for a moment.
		if err := s.patiently(ctx, func() error { return s.phase(ctx, d, false, "upload-config", "all", s.admin()) }); err != nil {
			return err
		}
	}
	if err := s.patiently(ctx, func() error { return s.addon(ctx, c, d, "all") }); err != nil || verb == "node" {
		return err
	}
	s.say("[upgrade] SUCCESS! A control plane node of your cluster was upgraded to %q", s.version)
	return nil
}

// admin is the flag of the kubeconfig of the control plane's administrator.
func (s *standIn) admin() string { return "--kubeconfig=" + s.root("etc/kubernetes/admin.conf") }

// upgradeAddon upgrades one add-on on a control plane.
func (s *standIn) upgradeAddon(ctx context.Context, name string) error {
	c, err := s.client("admin.conf", false)
	if err != nil {
		return err
	}
	d := documents{}
	if err := s.clusterConfig(ctx, c, d); err != nil {
		return fmt.Errorf("failed to get config map: %w", err)
	}
	return s.addon(ctx, c, d, name)
}

// addon applies add-ons, unless another control plane runs another version. A kubelet is upgraded after
// the control plane's processes, so its version shows theirs.
func (s *standIn) addon(ctx context.Context, c kubernetes.Interface, d documents, name string) error {
	nodes, err := c.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: controlLabel})
	if err != nil {
		return err
	}
	var old []string
	for _, n := range nodes.Items {
		if n.Name != s.Name && n.Status.NodeInfo.KubeletVersion != s.version {
			old = append(old, n.Name)
		}
	}
	if len(old) > 0 {
		s.say("[upgrade/addon] Skipping upgrade of addons because control plane instances %v have not been upgraded", old)
		return nil
	}
	return s.phase(ctx, d, false, "addon", name, s.admin())
}

func (s *standIn) patiently(ctx context.Context, do func() error) error {
	var last error
	limit, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := poll(limit, func() (bool, error) {
		last = do()
		return last == nil, nil
	}); err != nil {
		return errors.Join(last, err)
	}
	return nil
}

// upgradeStatic replaces static pods, and waits for each.
func (s *standIn) upgradeStatic(ctx context.Context, d documents) error {
	pods, err := s.manifests(ctx, d)
	if err != nil {
		return err
	}
	backup := s.root("etc/kubernetes/tmp", "kubeadm-backup-manifests-"+time.Now().UTC().Format("2006-01-02-15-04-05"))
	if err := os.MkdirAll(backup, 0o700); err != nil {
		return err
	}
	for _, name := range staticOrder {
		path := s.root(manifestsDir, name+".yaml")
		old, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		next := pods[name]
		if name == "etcd" { // it stays a member of its cluster
			next = keepCluster(old, next)
		}
		if bytes.Equal(old, next) {
			s.say("[upgrade/staticpods] Current and new manifests of %s are equal, skipping upgrade", name)
			continue
		}
		s.say("[upgrade/staticpods] Preparing for %q upgrade", name)
		if err := replaceFile(filepath.Join(backup, name+".yaml"), old, 0o600); err != nil {
			return err
		}
		s.say("[upgrade/staticpods] Moving new manifest to \"/etc/kubernetes/manifests/%s.yaml\"", name)
		before := s.startedAt(name)
		if err := replaceFile(path, next, 0o600); err != nil {
			return err
		}
		s.say("[upgrade/staticpods] Waiting for the %s to restart the component", StandIn)
		limit, cancel := context.WithTimeoutCause(ctx, apiTimeout, fmt.Errorf("%s did not restart within %s", name, apiTimeout))
		err = poll(limit, func() (bool, error) { return s.startedAt(name) != before && s.startedAt(name) != "", nil })
		cancel()
		if err != nil {
			return err
		}
		if err := s.awaitAPI(ctx, "admin.conf"); err != nil {
			return err
		}
		s.say("[upgrade/staticpods] Component %q upgraded successfully!", name)
	}
	return nil
}

// startedAt changes with each start of a static pod with a changed manifest.
func (s *standIn) startedAt(name string) string {
	b, _ := os.ReadFile(s.root("run", "static-"+name))
	return string(b)
}

// keepCluster copies etcd's flags for the initial cluster from the old manifest.
func keepCluster(old, next []byte) []byte {
	var cluster, state string
	for sc := bufio.NewScanner(bytes.NewReader(old)); sc.Scan(); {
		if strings.Contains(sc.Text(), "--initial-cluster=") {
			cluster = sc.Text()
		}
		if strings.Contains(sc.Text(), "--initial-cluster-state=") {
			state = sc.Text()
		}
	}
	var out []string
	for l := range strings.SplitSeq(string(next), "\n") {
		if strings.Contains(l, "--initial-cluster=") && cluster != "" {
			out = append(out, cluster)
			if state != "" {
				out = append(out, state)
			}
			continue
		}
		out = append(out, l)
	}
	return []byte(strings.Join(out, "\n"))
}
