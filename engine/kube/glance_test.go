package kube

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
)

// TestLook observes a real API server, servers that do not answer as one, and a context with a
// credential plugin, which never runs for the list.
func TestLook(t *testing.T) {
	cp := controlplanetest.Lend(t, controlplane.Options{APIServerArgs: []string{"--disable-admission-plugins=ServiceAccount"}})
	admin, err := kubernetes.NewForConfig(cp.Config())
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []corev1.Node{
		{ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: map[string]string{"kubeadm.alpha.kubernetes.io/cri-socket": "x"}}},
		{ObjectMeta: metav1.ObjectMeta{Name: "b"}, Spec: corev1.NodeSpec{Unschedulable: true}},
	} {
		if _, err := admin.CoreV1().Nodes().Create(t.Context(), &n, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	silent, err := net.Listen("tcp", "127.0.0.1:0") // the kernel accepts connections, and no program reads
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()

	ran := filepath.Join(t.TempDir(), "ran")
	k := clientcmdapi.NewConfig()
	c := cp.Config()
	k.AuthInfos["admin"] = &clientcmdapi.AuthInfo{ClientCertificateData: c.CertData, ClientKeyData: c.KeyData}
	k.AuthInfos["token"] = &clientcmdapi.AuthInfo{Token: "not-valid"}
	k.AuthInfos["plugin"] = &clientcmdapi.AuthInfo{Exec: &clientcmdapi.ExecConfig{
		APIVersion: "client.authentication.k8s.io/v1", Command: "/usr/bin/touch", Args: []string{ran}, InteractiveMode: clientcmdapi.IfAvailableExecInteractiveMode,
	}}
	add := func(name, server, user string) {
		k.Clusters[name] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: c.CAData}
		k.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: user}
	}
	add("real", c.Host, "admin")
	add("denied", c.Host, "token")
	add("plugin", c.Host, "plugin")
	add("silent", "https://"+silent.Addr().String(), "admin")
	add("closed", "https://"+closed.Addr().String(), "admin")
	path := filepath.Join(t.TempDir(), "config")
	if err := clientcmd.WriteToFile(*k, path); err != nil {
		t.Fatal(err)
	}

	all, err := NewClusters().List(cluster.Access{Kubeconfig: path})
	if err != nil || len(all.List) != 5 {
		t.Fatalf("%+v, %v", all.List, err)
	}
	const limit = time.Second
	for _, x := range all.List {
		if (x.Plugin != "") != (x.Name == "plugin") {
			t.Errorf("context %s has plugin %q", x.Name, x.Plugin)
		}
		if x.Plugin != "" {
			continue
		}
		sel, err := all.Select(x.Name)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*limit)
		if x.Name == "silent" {
			cancel()
			ctx, cancel = context.WithTimeout(t.Context(), limit)
		}
		began := time.Now()
		g := Clusters{}.Look(ctx, sel)
		cancel()
		want := map[string]check.GlanceState{
			"real": check.GlanceReachable, "denied": check.GlanceDenied, "silent": check.GlanceUnreachable, "closed": check.GlanceUnreachable,
		}[x.Name]
		if g.State != want || x.Name == "silent" && time.Since(began) > 2*limit {
			t.Errorf("%s: %s (%s) after %s, want %s", x.Name, g.State, g.Problem, time.Since(began), want)
		}
		if x.Name == "real" {
			var ids []string
			for _, f := range g.Findings {
				ids = append(ids, f.ID)
			}
			if g.Distribution.Name != "kubeadm" || len(g.Nodes) != 2 || fmt.Sprint(ids) != "[nodes-not-ready nodes-cordoned]" {
				t.Errorf("distribution %q, %d nodes, findings %v", g.Distribution.Name, len(g.Nodes), ids)
			}
		}
	}
	if _, err := os.Stat(ran); err == nil {
		t.Error("the credential plugin ran for the list")
	}
	sel, err := all.Select("plugin") // the user opens it
	if err != nil {
		t.Fatal(err)
	}
	sel.Kubeconfig, err = directly(sel.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	Clusters{}.Look(t.Context(), sel)
	if _, err := os.Stat(ran); err != nil {
		t.Errorf("the credential plugin of the opened context did not run: %v", err)
	}
}

// directly removes the parent of a credential plugin, which in tests is the test's program.
func directly(kubeconfig []byte) ([]byte, error) {
	c, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil, err
	}
	for _, u := range c.AuthInfos {
		if e := u.Exec; e != nil {
			e.Command, e.Args = e.Args[2], e.Args[3:]
		}
	}
	return clientcmd.Write(*c)
}
