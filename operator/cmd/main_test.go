//go:build linux

package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"constellation/agent/upgradeproto"
	"constellation/assets/render"
	"constellation/engine/cloud/providers"
	"constellation/engine/sandbox/controlplane"
)

const namespace = "constellation-system"

// countingAgent counts the requests that reach it.
type countingAgent struct {
	upgradeproto.UnimplementedAgentServer
	calls atomic.Int64
}

func (a *countingAgent) Status(context.Context, *upgradeproto.StatusRequest) (*upgradeproto.StatusResponse, error) {
	a.calls.Add(1)
	return &upgradeproto.StatusResponse{}, nil
}

func (a *countingAgent) Upgrade(_ *upgradeproto.UpgradeRequest, s grpc.ServerStreamingServer[upgradeproto.UpgradeResponse]) error {
	a.calls.Add(1)
	return s.Send(&upgradeproto.UpgradeResponse{Kind: &upgradeproto.UpgradeResponse_Success{Success: &upgradeproto.Success{}}})
}

// TestRelayServesOnlyTheOperator starts the relay as its pod does, with a real API server and the
// chart's rights. It calls the relay as callers with a port-forward can.
func TestRelayServesOnlyTheOperator(t *testing.T) {
	cp := controlplane.ForTest(t, controlplane.Options{})
	chart, err := render.Chart("constellation-operator", "v1.1.0", namespace, providers.LocalValues(), map[string]any{"release": "v1.1.0"})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range [][]byte{[]byte("{apiVersion: v1, kind: Namespace, metadata: {name: " + namespace + "}}"), chart} {
		if err := cp.Apply(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	core := kubernetes.NewForConfigOrDie(cp.Config())
	for _, name := range []string{"stranger", "constellation-relay"} { // the chart may have created the second
		sa := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if _, err := core.CoreV1().ServiceAccounts(namespace).Create(t.Context(), sa, metav1.CreateOptions{}); err != nil && name == "stranger" {
			t.Fatal(err)
		}
	}
	if _, err := core.CoreV1().ServiceAccounts("default").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "constellation-operator"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	token := func(ns, account string, audiences ...string) string {
		t.Helper()
		r, err := core.CoreV1().ServiceAccounts(ns).CreateToken(t.Context(), account, &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: audiences}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return r.Status.Token
	}

	dir, err := os.MkdirTemp("", "relay") // t.TempDir can be too long for a socket's name
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	cfg, err := cp.ConfigFor("system:serviceaccount:"+namespace+":constellation-relay", "system:serviceaccounts", "system:serviceaccounts:"+namespace, "system:authenticated")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "kubeconfig")
	if err := clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: cfg.Host, CertificateAuthorityData: cfg.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": {ClientCertificateData: cfg.CertData, ClientKeyData: cfg.KeyData}},
		Contexts:       map[string]*clientcmdapi.Context{"x": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "x",
	}, file); err != nil {
		t.Fatal(err)
	}

	agent := &countingAgent{}
	l, err := net.Listen("unix", filepath.Join(dir, "agent.sock"))
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer()
	upgradeproto.RegisterAgentServer(g, agent)
	go func() { _ = g.Serve(l) }()
	t.Cleanup(g.Stop)

	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	free.Close()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- run(ctx, []string{
			"--role=relay", "--relay=" + address, "--agent=" + filepath.Join(dir, "agent.sock"),
			"--kubeconfig=" + file, "--namespace=" + namespace, "--node=worker-1", "--log-level=error",
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("relay ended: %v", err)
		}
	})
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	client := upgradeproto.NewAgentClient(conn)

	const audience = "constellation-relay:worker-1"
	good := token(namespace, "constellation-operator", audience)
	for _, tc := range []struct {
		name   string
		values []string
		want   codes.Code
		text   string
	}{
		{name: "no token", want: codes.Unauthenticated, text: audience},
		{name: "an empty token", values: []string{"Bearer "}, want: codes.Unauthenticated, text: audience},
		{name: "a token without a scheme", values: []string{good}, want: codes.Unauthenticated, text: audience},
		{name: "two tokens", values: []string{"Bearer " + good, "Bearer " + good}, want: codes.Unauthenticated, text: audience},
		{name: "a token of another cluster", values: []string{"Bearer abc.def.ghi"}, want: codes.Unauthenticated, text: audience},
		{name: "the operator's token for the API server", values: []string{"Bearer " + token(namespace, "constellation-operator")}, want: codes.Unauthenticated, text: audience},
		{name: "the operator's token for another node", values: []string{"Bearer " + token(namespace, "constellation-operator", "constellation-relay:worker-10")}, want: codes.Unauthenticated, text: audience},
		{name: "the operator's token for all nodes", values: []string{"Bearer " + token(namespace, "constellation-operator", "constellation-relay:")}, want: codes.Unauthenticated, text: audience},
		{name: "another account's token", values: []string{"Bearer " + token(namespace, "stranger", audience)}, want: codes.PermissionDenied, text: "system:serviceaccount:constellation-system:stranger"},
		{name: "the relay's own token", values: []string{"Bearer " + token(namespace, "constellation-relay", audience)}, want: codes.PermissionDenied, text: "constellation-relay"},
		{name: "the token of a namesake", values: []string{"Bearer " + token("default", "constellation-operator", audience)}, want: codes.PermissionDenied, text: "system:serviceaccount:default:constellation-operator"},
		{name: "the operator's token for this node", values: []string{"Bearer " + good}, want: codes.OK},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			md := metadata.MD{}
			md.Append("authorization", tc.values...)
			ctx = metadata.NewOutgoingContext(ctx, md)
			before := agent.calls.Load()
			_, asked := client.Status(ctx, &upgradeproto.StatusRequest{}, grpc.WaitForReady(true))
			s, err := client.Upgrade(ctx, &upgradeproto.UpgradeRequest{Token: "t", KubernetesVersion: "v1.36.3", What: upgradeproto.What_NODE})
			if err == nil {
				_, err = s.Recv()
			}
			for verb, err := range map[string]error{"Status": asked, "Upgrade": err} {
				if status.Code(err) != tc.want || tc.text != "" && !strings.Contains(fmt.Sprint(err), tc.text) {
					t.Errorf("%s: %v, want %s with %q", verb, err, tc.want, tc.text)
				}
				for _, v := range tc.values {
					if v := strings.TrimPrefix(v, "Bearer "); len(v) > 20 && strings.Contains(fmt.Sprint(err), v) {
						t.Errorf("%s: the answer contains the token", verb)
					}
				}
			}
			reached := agent.calls.Load() - before
			if tc.want == codes.OK && reached != 2 || tc.want != codes.OK && reached != 0 {
				t.Errorf("%d calls reached the agent", reached)
			}
		})
	}
}

// An operator without a cloud ends before it asks for access to a cluster.
func TestNoProviderIsAssumed(t *testing.T) {
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{name: "no provider", want: "--provider: no provider is named: use enrolled or gcp or sandbox"},
		{name: "an empty provider", args: []string{"--provider="}, want: "--provider: no provider is named: use enrolled or gcp or sandbox"},
		{name: "another provider", args: []string{"--provider=moon"}, want: `--provider: provider "moon" is not known: use enrolled or gcp or sandbox`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := run(t.Context(), tt.args); err == nil || err.Error() != tt.want {
				t.Errorf("got error %v, want %q", err, tt.want)
			}
		})
	}
}
