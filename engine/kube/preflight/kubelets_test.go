package preflight

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
)

// An API server forwards nothing to the loopback, where simulated machines are. Their kubelets are
// read directly with the user's client certificate, if the cluster's CA signed theirs.
func TestKubeletsAreReadDirectly(t *testing.T) {
	cp := controlplanetest.Lend(t, controlplane.Options{})
	ca, err := tls.LoadX509KeyPair(filepath.Join(cp.PKI(), "ca.crt"), filepath.Join(cp.PKI(), "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	serve := func(signed bool) int32 {
		cert := selfSigned(t, day, day/2)
		if signed {
			cert = signedBy(t, ca)
		}
		pool := x509.NewCertPool()
		pool.AddCert(ca.Leaf)
		l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{cert}, ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: pool})
		if err != nil {
			t.Fatal(err)
		}
		server := &http.Server{ReadHeaderTimeout: time.Second, ErrorLog: log.New(io.Discard, "", 0), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if len(r.TLS.PeerCertificates) == 0 || r.Header.Get("Authorization") != "" {
				http.Error(w, "Unauthorized", http.StatusUnauthorized)
				return
			}
			switch r.URL.Path {
			case "/configz":
				fmt.Fprint(w, `{"kubeletconfig":{"eventRecordQPS":0}}`)
			case "/flagz":
				fmt.Fprint(w, `{"kind":"Flagz","flags":{"node-ip":"127.0.0.1"}}`)
			default:
				http.NotFound(w, r)
			}
		})}
		go func() { _ = server.Serve(l) }()
		t.Cleanup(func() { _ = server.Close() })
		return int32(l.Addr().(*net.TCPAddr).Port)
	}
	s := &site{t: t, cp: cp, config: cp.Config()}
	p := &probe{ctx: t.Context(), config: cp.Config()}
	core, err := kubernetes.NewForConfig(s.config)
	s.must(err)
	s.core, p.core = core, core
	read := func(name string, port int32, p *probe) kubeletReport {
		n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "127.0.0.1"}}
		n.Status.DaemonEndpoints.KubeletEndpoint.Port = port
		created, err := core.CoreV1().Nodes().Create(t.Context(), &n, metav1.CreateOptions{})
		s.must(err)
		created.Status = n.Status
		_, err = core.CoreV1().Nodes().UpdateStatus(t.Context(), created, metav1.UpdateOptions{})
		s.must(err)
		into := map[string]kubeletReport{}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		readKubelets(ctx, p, []corev1.Node{n}, into)
		return into[name]
	}
	if r := read("ours", serve(true), p); r.config["eventRecordQPS"] != float64(0) || r.flags["node-ip"] != "127.0.0.1" {
		t.Errorf("the report is %+v, want configuration and flags", r)
	}
	if r := read("foreign", serve(false), p); r.config != nil || !strings.Contains(r.configError, "address not allowed") {
		t.Errorf("the report of a host whose certificate another CA signed is %+v, want the API server's error", r)
	}
	token := &probe{ctx: t.Context(), config: &rest.Config{Host: s.config.Host, BearerToken: "secret", TLSClientConfig: rest.TLSClientConfig{CAData: s.config.CAData}}, core: core}
	if r := read("token", serve(true), token); r.config != nil {
		t.Errorf("a user with a token alone got the report %+v, want that no kubelet gets a token", r)
	}
}

// signedBy is a certificate of a kubelet on the loopback.
func signedBy(t *testing.T, ca tls.Certificate) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(7), Subject: pkix.Name{CommonName: "system:node:ours"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, ca.Leaf, &key.PublicKey, ca.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}
