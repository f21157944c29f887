package assets_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"constellation/engine/sandbox/controlplane"
	"constellation/internal/testneeds"
)

const (
	// flanneldEnv is the path of a flanneld of the version in clouds/images.yaml, as `go build` of its module makes it.
	flanneldEnv = "CONSTELLATION_TEST_FLANNELD"
	// ownNetworkEnv marks the process of a test in a network namespace of its own.
	ownNetworkEnv = "CONSTELLATION_OWN_NETWORK"
)

// inOwnNetwork reports whether the test runs in a network namespace of its own. Otherwise it runs the test there.
func inOwnNetwork(t *testing.T) bool {
	t.Helper()
	if os.Getenv(ownNetworkEnv) != "" {
		return true
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), ownNetworkEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
		t.Errorf("%v\n%s", err, out)
	}
	return false
}

// TestFlannelWorksAsItsChartSays runs a real flanneld with the configuration, the arguments and the rights of its chart. Its
// Node has a range of pods, as the cloud controller manager gives it.
func TestFlannelWorksAsItsChartSays(t *testing.T) {
	testneeds.OptIn(t, flanneldEnv, "a minute, and a flanneld in the place of 1")
	testneeds.Root(t, "to make a network namespace")
	testneeds.Program(t, "nft", "nftables")
	testneeds.Program(t, "iptables", "iptables") // with which flanneld removes rules of earlier versions
	if !inOwnNetwork(t) {
		return
	}
	for _, args := range []string{"link set lo up", "link add uplink type veth peer name cloud", "addr add 10.128.0.2/20 dev uplink", "link set uplink up", "link set cloud up", "route add default via 10.128.0.1 dev uplink"} {
		if out, err := exec.CommandContext(t.Context(), "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v %s", args, err, out)
		}
	}
	cp := controlplane.ForTest(t, controlplane.Options{})
	stream := cloudCharts(t)["flannel"]
	if err := cp.Apply(t.Context(), stream); err != nil {
		t.Fatal(err)
	}
	core, err := kubernetes.NewForConfig(cp.Config())
	if err != nil {
		t.Fatal(err)
	}
	nodes, pods := core.CoreV1().Nodes(), core.CoreV1().Pods("kube-system")
	if _, err := nodes.Create(t.Context(), &corev1.Node{
		// flanneld panics without annotations, and every kubelet makes this one.
		ObjectMeta: metav1.ObjectMeta{Name: "machine-1", Annotations: map[string]string{"volumes.kubernetes.io/controller-managed-attach-detach": "true"}},
		Spec:       corev1.NodeSpec{PodCIDR: "10.244.3.0/24", PodCIDRs: []string{"10.244.3.0/24"}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	set, err := core.AppsV1().DaemonSets("kube-system").Get(t.Context(), "flannel", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	spec := set.Spec.Template.Spec
	spec.NodeName = "machine-1"
	if _, err := pods.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "flannel-1"}, Spec: spec}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}

	dir := t.TempDir()
	config, err := core.CoreV1().ConfigMaps("kube-system").Get(t.Context(), "flannel", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	conf := filepath.Join(dir, "net-conf.json")
	if err := os.WriteFile(conf, []byte(config.Data["net-conf.json"]), 0o600); err != nil {
		t.Fatal(err)
	}
	if !json.Valid([]byte(config.Data["cni-conf.json"])) {
		t.Errorf("cni-conf.json is %s", config.Data["cni-conf.json"])
	}
	token, err := core.CoreV1().ServiceAccounts("kube-system").CreateToken(t.Context(), "flannel", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	admin := cp.Config()
	file := filepath.Join(dir, "kubeconfig")
	if err := clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:  map[string]*clientcmdapi.Cluster{"c": {Server: admin.Host, CertificateAuthorityData: admin.CAData, CertificateAuthority: admin.CAFile}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{"u": {Token: token.Status.Token}}, Contexts: map[string]*clientcmdapi.Context{"x": {Cluster: "c", AuthInfo: "u"}}, CurrentContext: "x",
	}, file); err != nil {
		t.Fatal(err)
	}

	ctx, stop := context.WithCancel(t.Context())
	subnet := filepath.Join(dir, "subnet.env")
	args := append([]string{}, spec.Containers[0].Args...)
	cmd := exec.CommandContext(ctx, os.Getenv(flanneldEnv), append(args, "--kubeconfig-file="+file, "--net-config-path="+conf, "--subnet-file="+subnet)...)
	cmd.Env = append(os.Environ(), "POD_NAME=flannel-1", "POD_NAMESPACE=kube-system", "EVENT_QUEUE_DEPTH=5000")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		stop()
		<-ended
		if t.Failed() {
			t.Logf("flanneld:\n%s", log.String())
		}
	})

	why := ""
	for begin := time.Now(); time.Since(begin) < 40*time.Second; time.Sleep(100 * time.Millisecond) {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("flanneld ended: %v", err)
		default:
		}
		if why = flannelWorks(ctx, subnet, core); why == "" {
			return
		}
	}
	t.Errorf("flanneld has not worked: %s", why)
}

// flannelWorks returns what flanneld has not done yet: the range of the machine, the condition of the Node, and the rules
// that hide addresses of pods from the internet.
func flannelWorks(ctx context.Context, subnet string, core kubernetes.Interface) string {
	b, err := os.ReadFile(subnet)
	if err != nil {
		return err.Error()
	}
	for _, want := range []string{"FLANNEL_NETWORK=10.244.0.0/16", "FLANNEL_SUBNET=10.244.3.1/24", "FLANNEL_IPMASQ=true", "FLANNEL_MTU=1500"} {
		if !strings.Contains(string(b), want) {
			return fmt.Sprintf("%s lacks %s: %s", subnet, want, b)
		}
	}
	rules, err := exec.CommandContext(ctx, "nft", "list", "ruleset").CombinedOutput()
	if err != nil || !strings.Contains(string(rules), "masquerade") || !strings.Contains(string(rules), "10.244.0.0/16") {
		return fmt.Sprintf("rules are %v %s", err, rules)
	}
	n, err := core.CoreV1().Nodes().Get(ctx, "machine-1", metav1.GetOptions{})
	if err != nil {
		return err.Error()
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeNetworkUnavailable && c.Status == corev1.ConditionFalse {
			return ""
		}
	}
	return fmt.Sprintf("conditions are %v", n.Status.Conditions)
}
