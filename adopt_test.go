package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane"
)

// TestAdopt adopts a real API server whose objects are as kubeadm makes them: as a stranger's cluster,
// half initialised, as a user without rights, and with hostile texts in a Node. Every verb of the
// workspace works, the cluster is unchanged, and the undo removes all files.
func TestAdopt(t *testing.T) {
	cp := controlplane.ForTest(t, controlplane.Options{APIServerArgs: []string{"--disable-admission-plugins=ServiceAccount,TaintNodesByCondition"}})
	core, err := kubernetes.NewForConfig(cp.Config())
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(err)
	ctx := t.Context()
	root, err := os.Getwd()
	must(err)
	home := t.TempDir()
	t.Chdir(home)
	kubeconfig, err := cp.Kubeconfig()
	must(err)
	path := filepath.Join(home, "config")
	must(os.WriteFile(path, kubeconfig, 0o600))
	adopt := func(want int, args ...string) string {
		t.Helper()
		out, errs, code := runHere(append([]string{"-C", "prod", "adopt"}, args...)...)
		if code != want {
			t.Fatalf("adopt %s: exit %d, want %d\n%s%s", strings.Join(args, " "), code, want, out, errs)
		}
		if strings.Contains(out+errs, "\x1b") {
			t.Errorf("adopt %s prints an escape sequence: %q", strings.Join(args, " "), out+errs)
		}
		return out + errs
	}
	contains := func(out string, want ...string) {
		t.Helper()
		for _, w := range want {
			if !strings.Contains(strings.Join(strings.Fields(out), " "), w) {
				t.Errorf("no %q in\n%s", w, out)
			}
		}
	}
	contains(adopt(plan.ExitBlocked, "--kubeconfig", path, "--yes"), "does not look like one of kubeadm", "adopt-distribution", "backup create")
	contains(adopt(plan.ExitBlocked, "--kubeconfig", path, "--as", "stranger", "--yes"), "adopt-unreadable", "could not be read", "--print-rbac")

	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: "cp-0", Labels: map[string]string{"node-role.kubernetes.io/control-plane": ""},
		Annotations: map[string]string{"kubeadm.alpha.kubernetes.io/cri-socket": "\x1b[2J"},
	}}
	n, err = core.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{})
	must(err)
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.11"}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	n.Status.NodeInfo.KubeletVersion, n.Status.NodeInfo.ContainerRuntimeVersion = "v1.34.1", "\x1b]0;owned\x07"
	_, err = core.CoreV1().Nodes().UpdateStatus(ctx, n, metav1.UpdateOptions{})
	must(err)
	contains(adopt(plan.ExitBlocked, "--kubeconfig", path, "--yes"), "kubeadm-config")
	if _, err := os.Stat("prod"); !os.IsNotExist(err) {
		t.Errorf("a refused adoption made a folder: %v", err)
	}

	version, err := core.Discovery().ServerVersion()
	must(err)
	_, err = core.CoreV1().ConfigMaps("kube-system").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "kubeadm-config"}, Data: map[string]string{
		"ClusterConfiguration": "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\nkubernetesVersion: " + version.GitVersion + "\netcd: {external: {endpoints: [https://e-0:2379]}}\n",
	}}, metav1.CreateOptions{})
	must(err)
	_, err = core.CoreV1().ConfigMaps("kube-system").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "kubelet-config"}, Data: map[string]string{
		"kubelet": "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n",
	}}, metav1.CreateOptions{})
	must(err)
	_, err = core.CoreV1().Secrets("kube-system").Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "bootstrap-token-abcdef"}, Type: "bootstrap.kubernetes.io/token",
		StringData: map[string]string{"token-id": "abcdef", "token-secret": "0123456789abcdef", "usage-bootstrap-authentication": "true", "description": "mine\x1b[2J"},
	}, metav1.CreateOptions{})
	must(err)
	before := adoptedObjects(ctx, t, core)
	out := adopt(plan.ExitDone, "--kubeconfig", path, "--dry-run", "-o", "json")
	contains(out, `"mode": "external"`, `"id": "adopt-tokens"`, `"id": "adopt-old-kubelets"`, `"id": "adopt-external-etcd"`)
	if strings.Contains(out, "0123456789abcdef") {
		t.Error("the report has the secret of a token")
	}
	contains(adopt(plan.ExitUnacknowledged, "--kubeconfig", path, "--non-interactive"), "--yes")
	adoptionIsCut(t, home, string(kubeconfig), cp.Config().Host)
	contains(adopt(plan.ExitDone, "--kubeconfig", path, "--yes", "--name", "prod"), "wrote", "kubeadm upgrade plan", "What it never touches")
	contains(adopt(plan.ExitNothing), "adopted in")
	for _, verb := range []string{"status", "check", "watch --once", "backup create"} {
		if out, errs, code := runHere(append([]string{"-C", "prod"}, strings.Fields(verb)...)...); code != 0 || !strings.Contains(strings.Join(strings.Fields(out+errs), " "), "kubeadm upgrade plan") {
			t.Errorf("%s: exit %d\n%s%s", verb, code, out, errs)
		}
	}
	for _, verb := range []string{"init --yes --non-interactive", "upgrade check", "upgrade apply --yes --non-interactive", "upgrade prepare --yes --non-interactive", "upgrade execute --helm --yes --non-interactive", "upgrade pause --non-interactive", "upgrade resume --non-interactive", "upgrade cancel --non-interactive", "upgrade skip cp-0 --non-interactive", "upgrade retry cp-0 --non-interactive", "machine revoke cp-0 --yes --non-interactive"} {
		if out, errs, code := runHere(append([]string{"-C", "prod"}, strings.Fields(verb)...)...); code != plan.ExitUsage || !strings.Contains(out+errs, "adopted") {
			t.Errorf("%s: exit %d\n%s%s", verb, code, out, errs)
		}
	}
	terminal := newScreen(t, home, filepath.Join(root, "bin", "constellation"), "-C", "prod", "init")
	terminal.shows(`its cluster was adopted, and the operator is not installed there`)
	if after := adoptedObjects(ctx, t, core); after != before {
		t.Errorf("the cluster changed from\n%s\nto\n%s", before, after)
	}
	contains(adopt(plan.ExitBlocked, "--operator", "--yes"), "etcd is external", "upgrade this cluster with kubeadm")
	contains(adopt(plan.ExitDone, "--undo"), "removed", "backups and records")
	contains(adopt(plan.ExitNothing, "--undo"), "no cluster was adopted")
	if left, err := os.ReadDir("prod"); err != nil || len(left) != 1 || left[0].Name() != plan.RunsDir {
		t.Errorf("left: %v, %v", left, err)
	}

	gone := httptest.NewServer(nil)
	gone.Close()
	must(os.WriteFile(path, []byte("apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\nclusters: [{name: c, cluster: {server: '"+gone.URL+"'}}]\nusers: [{name: u, user: {token: x}}]\n"), 0o600))
	contains(adopt(plan.ExitFailed, "--kubeconfig", path, "--yes"), "does not answer")
}

// adoptionIsCut loses the API server after so many bytes of its answers. Either the adoption is refused and writes nothing,
// or it is complete and what it could not read is not checked.
func adoptionIsCut(t *testing.T, home, kubeconfig, server string) {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	refused := 0
	for _, after := range []int64{100, 8 << 10, 60 << 10} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		var left atomic.Int64
		left.Store(after)
		go func() {
			for {
				down, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer down.Close()
					up, err := net.Dial("tcp", u.Host)
					if err != nil || left.Load() <= 0 {
						return
					}
					defer up.Close()
					go func() { _, _ = io.Copy(up, down) }()
					for buf := make([]byte, 1<<10); ; {
						n, err := up.Read(buf)
						if err != nil || left.Add(-int64(n)) <= 0 {
							return
						}
						if _, err := down.Write(buf[:n]); err != nil {
							return
						}
					}
				}()
			}
		}()
		path, dir := filepath.Join(home, "cut"), filepath.Join(home, fmt.Sprint("cut-", after))
		if err := os.WriteFile(path, []byte(strings.ReplaceAll(kubeconfig, u.Host, l.Addr().String())), 0o600); err != nil {
			t.Fatal(err)
		}
		out, errs, code := runHere("-C", dir, "adopt", "--kubeconfig", path, "--yes", "--name", "prod")
		_ = l.Close()
		if code == plan.ExitDone {
			if _, errs, code := runHere("-C", dir, "adopt", "--undo"); code != plan.ExitDone || !strings.Contains(out, "not checked") {
				t.Errorf("cut after %d bytes: adopted, and its undo ends with %d\n%s%s", after, code, out, errs)
			}
		} else {
			refused++
			if _, err := os.Stat(dir); !os.IsNotExist(err) || code != plan.ExitFailed && code != plan.ExitBlocked || !strings.Contains(out+errs, "fix ") {
				t.Errorf("cut after %d bytes: exit %d, folder %v\n%s%s", after, code, err, out, errs)
			}
		}
	}
	if refused == 0 {
		t.Error("no adoption was cut")
	}
}

// adoptedObjects lists the objects that an adoption could change, with their versions.
func adoptedObjects(ctx context.Context, t *testing.T, core kubernetes.Interface) string {
	t.Helper()
	var b strings.Builder
	nodes, err := core.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.Items {
		b.WriteString(n.Name + " " + n.ResourceVersion + "\n")
	}
	secrets, err := core.CoreV1().Secrets("").List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range secrets.Items {
		b.WriteString(s.Namespace + "/" + s.Name + " " + s.ResourceVersion + "\n")
	}
	configs, err := core.CoreV1().ConfigMaps("kube-system").List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=kubeadm-config"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range configs.Items {
		b.WriteString(c.Name + " " + c.ResourceVersion + "\n")
	}
	return b.String()
}
