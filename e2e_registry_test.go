package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	ociregistry "github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"constellation/engine/mirror"
	"constellation/engine/plan"
	"constellation/engine/registry"
	"constellation/engine/sandbox/build"
	"constellation/engine/version"
	"constellation/internal/ocipack"
	"constellation/internal/testneeds"
)

const (
	registryUser     = "puller"
	registryPassword = "correct-horse-battery"
)

// A cluster of real machines comes up from a mirror alone: `release mirror` fills a registry with TLS and a login, and the
// machines' network reaches no other one. Its upgrade to the next minor replaces all nodes by machines that pull from there, too.
//
// It takes eight minutes, so it is opt-in:
//
//	CONSTELLATION_E2E_REGISTRY=1 go test -run TestClusterFromAMirrorAlone .
func TestClusterFromAMirrorAlone(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_REGISTRY", "eight minutes")
	c := newMirrored(t)
	for _, want := range []string{"/mirror/kubernetes/pause", "/mirror/operator", "/mirror/joinservice"} {
		if !c.pulled(want) {
			t.Errorf("the registry was not asked for %s", want)
		}
	}
	c.wantRegistry(mirroredFrom, "control-plane-0", "worker-0")
	c.run(2*time.Minute, "init", "--non-interactive", "--yes").want(plan.ExitNothing)

	c.upgrade()
	c.wantRegistry(mirroredTo, c.machines()...)
	if is := c.machines(); slices.Contains(is, "control-plane-0") || slices.Contains(is, "worker-0") {
		t.Errorf("nodes were not replaced: %q", is)
	}
}

// A cluster from a mirror alone is upgraded in place: kubeadm on machines that stay pulls from the mirror.
//
//	CONSTELLATION_E2E_REGISTRY=1 go test -run TestUpgradeInPlaceFromAMirrorAlone .
func TestUpgradeInPlaceFromAMirrorAlone(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_REGISTRY", "eight minutes")
	c := newMirrored(t)
	for _, group := range []string{"control-plane", "workers"} {
		c.kubectl("patch", "scalinggroup", group, "--type=merge", "-p", `{"spec":{"strategy":"InPlace"}}`)
	}
	c.upgrade()
	c.wantRegistry(mirroredTo, "control-plane-0", "worker-0")
	if is := c.machines(); !slices.Equal(is, []string{"control-plane-0", "worker-0"}) {
		t.Errorf("nodes were replaced: %q", is)
	}
}

// The mirror has the images of two minors.
const (
	mirroredFrom = build.DefaultVersion
	mirroredTo   = "v1.37.2"
)

// mirrored is a cluster of real machines whose only registry is a mirror.
type mirrored struct {
	*cloud
	host string // host and port of the mirror, for machines
	// pulled reports whether a manifest below a path was requested.
	pulled func(string) bool
}

// newMirrored starts machines, fills a mirror from a registry with the layout of registry.k8s.io, and creates a cluster that
// pulls from it.
func newMirrored(t *testing.T) *mirrored {
	t.Helper()
	c := newReal(t)
	box := t.TempDir()
	srv, ca, pulled := privateRegistry(t)
	_, port, err := net.SplitHostPort(srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}

	c.up(1, 1, "--machines", "real", "--registry-port", port)
	c.run(10*time.Minute, "sandbox", "fetch", mirroredTo).want(plan.ExitDone)
	from := filepath.Join(box, "release")
	releaseOf(t, from)
	caFile := filepath.Join(box, "ca.crt")
	auth := base64.StdEncoding.EncodeToString([]byte(registryUser + ":" + registryPassword))
	login := func(dir, host string) {
		b, err := json.Marshal(map[string]any{"auths": map[string]any{host: map[string]string{"auth": auth}}})
		if err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, "config.json"), b)
	}
	write(t, caFile, ca)
	login(box, "127.0.0.1:"+port)
	c.env = []string{"SSL_CERT_FILE=" + caFile, "DOCKER_CONFIG=" + box}
	c.run(5*time.Minute, "release", "mirror", "--from", from, "--to", "oci://127.0.0.1:"+port+"/mirror", "--unsigned",
		"--kubernetes", mirroredFrom+","+mirroredTo, "--kubernetes-from", "oci://"+publisherOf(t, mirroredFrom, mirroredTo)).want(plan.ExitDone)
	c.env = nil

	host := "10.42.0.1:" + port
	login(c.dir, host)
	config := filepath.Join(c.dir, "constellation-conf.yaml")
	b, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	b = fmt.Appendf(b, "\nregistry:\n  address: %s/mirror\n  pullSecret: config.json\n  caBundle: |\n    %s\n", host, strings.ReplaceAll(strings.TrimSpace(string(ca)), "\n", "\n    "))
	write(t, config, b)
	r := c.run(8*time.Minute, "init", "--non-interactive", "--yes", "-o", "json").want(plan.ExitDone)
	if strings.Contains(r.stdout+r.stderr, registryPassword) || strings.Contains(r.stdout+r.stderr, auth) {
		t.Error("the output of init contains the login")
	}
	c.wantNodes("control-plane-0", "worker-0")
	return &mirrored{c, host, pulled}
}

// upgrade brings the cluster to the next minor.
func (c *mirrored) upgrade() {
	c.t.Helper()
	begun := time.Now()
	c.run(10*time.Minute, "upgrade", "apply", "--non-interactive", "--yes", "--kubernetes", mirroredTo, "-o", "json").want(plan.ExitDone)
	c.t.Logf("%s after %s", mirroredTo, time.Since(begun).Round(time.Second))
	c.run(2*time.Minute, "upgrade", "apply", "--non-interactive", "--yes", "--kubernetes", mirroredTo).want(plan.ExitNothing)
}

// machines returns the names of all nodes, sorted.
func (c *mirrored) machines() []string {
	c.t.Helper()
	names := strings.Fields(c.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}"))
	slices.Sort(names)
	return names
}

// wantRegistry checks that all pods and machines use the mirror, and that the control plane has a version of Kubernetes.
func (c *mirrored) wantRegistry(kubernetes string, machines ...string) {
	t := c.t
	t.Helper()
	images := strings.Fields(c.kubectl("get", "pods", "-A", "-o", `jsonpath={range .items[*]}{range .spec.containers[*]}{.image}{" "}{end}{end}`))
	for _, want := range []string{"operator:", "joinservice:", "kubernetes/kube-proxy:" + kubernetes, "kubernetes/etcd:", "kubernetes/kube-apiserver:" + kubernetes, "kubernetes/coredns:"} {
		if !slices.ContainsFunc(images, func(i string) bool { return strings.HasPrefix(i, c.host+"/mirror/"+want) }) {
			t.Errorf("no pod runs %s/mirror/%s: %q", c.host, want, images)
		}
	}
	for _, i := range images {
		if !strings.HasPrefix(i, c.host+"/mirror/") {
			t.Errorf("a pod runs %s", i)
		}
	}
	for _, m := range machines {
		out := c.run(time.Minute, "sandbox", "shell", m, "--", "stat", "-c", "%a", "/etc/containerd/certs.d/"+c.host+"/hosts.toml", "/etc/containerd/certs.d/registry.k8s.io/hosts.toml").want(0).stdout
		if strings.Join(strings.Fields(out), " ") != "600 600" {
			t.Errorf("files with the login on %s have the modes %q, want 600", m, out)
		}
	}
	if got := c.kubectl("-n", "kube-system", "get", "configmap", "kubeadm-config", "-o", "jsonpath={.data.ClusterConfiguration}"); !strings.Contains(got, "imageRepository: "+c.host+"/mirror/kubernetes") {
		t.Errorf("kubeadm-config lacks the registry:\n%s", got)
	}
}

// publisherOf serves compiled images of Kubernetes on loopback with the layout of registry.k8s.io.
func publisherOf(t *testing.T, versions ...string) (address string) {
	t.Helper()
	srv := httptest.NewServer(ociregistry.New(ociregistry.Logger(log.New(io.Discard, "", 0)), ociregistry.WithBlobHandler(ociregistry.NewDiskBlobHandler(t.TempDir()))))
	t.Cleanup(srv.Close)
	address = strings.TrimPrefix(srv.URL, "http://")
	for _, v := range versions {
		a, err := build.Load(cacheDir(t), v)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range a.Images {
			img, err := ocipack.LoadArchive(i.Path)
			if err != nil {
				t.Fatal(err)
			}
			ref, err := name.ParseReference(strings.Replace(i.Ref, registry.Upstream, address, 1), name.Insecure)
			if err == nil {
				err = remote.Write(ref, img)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	return address
}

func cacheDir(t *testing.T) string {
	t.Helper()
	home, err := os.UserHomeDir()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(home, ".cache", "constellation")
}

// privateRegistry serves a registry on loopback with TLS, as 10.42.0.1 too, and demands a login. pulled reports whether a
// manifest below a path was asked for.
func privateRegistry(t *testing.T) (srv *httptest.Server, ca []byte, pulled func(string) bool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "registry"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv4(10, 42, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	store := ociregistry.New(ociregistry.Logger(log.New(io.Discard, "", 0)), ociregistry.WithBlobHandler(ociregistry.NewDiskBlobHandler(t.TempDir())))
	var mu sync.Mutex
	var paths []string
	srv = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if u, p, _ := r.BasicAuth(); u != registryUser || p != registryPassword {
			w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if r.Method == http.MethodGet || r.Method == http.MethodHead {
			mu.Lock()
			paths = append(paths, r.URL.Path+"?"+r.RemoteAddr)
			mu.Unlock()
		}
		store.ServeHTTP(w, r)
	}))
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS12}
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	t.Cleanup(srv.Close)
	return srv, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), func(below string) bool {
		mu.Lock()
		defer mu.Unlock()
		for _, p := range paths {
			if strings.HasPrefix(p, "/v2"+below+"/manifests/") {
				return true
			}
		}
		return false
	}
}

// releaseOf writes a release with the images of the services, as the sandbox has just packed them.
func releaseOf(t *testing.T, dir string) {
	t.Helper()
	cache := cacheDir(t)
	files := map[string]string{} // reference to archive
	for _, name := range []string{"operator", "joinservice"} {
		all, err := filepath.Glob(filepath.Join(cache, "services", version.Release, name+"-*.tar"))
		if err != nil || len(all) == 0 {
			t.Fatalf("no image of %s in %s: %v", name, cache, err)
		}
		var newest time.Time // a sandbox that starts touches its images
		for _, file := range all {
			if i, err := os.Stat(file); err == nil && i.ModTime().After(newest) {
				newest, files[name+":"+version.Release] = i.ModTime(), file
			}
		}
	}
	contents := mirror.Contents{Schema: "1", Release: version.Release}
	for ref, file := range files {
		repository, tag, _ := strings.Cut(ref, ":")
		img, err := ocipack.LoadArchive(file)
		if err != nil {
			t.Fatal(err)
		}
		p, err := layout.Write(filepath.Join(dir, "images", repository, tag), empty.Index)
		if err == nil {
			err = p.AppendImage(img)
		}
		if err != nil {
			t.Fatal(err)
		}
		d, err := partial.Descriptor(img)
		if err != nil {
			t.Fatal(err)
		}
		contents.Artifacts = append(contents.Artifacts, mirror.Artifact{
			Repository: repository, Layout: path.Join("images", repository, tag), Tag: tag, MediaType: d.MediaType, Digest: d.Digest, Size: d.Size,
		})
	}
	b, err := json.Marshal(contents)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, mirror.ContentsPrefix+version.Release+mirror.ContentsSuffix), b)
}

func write(t *testing.T, file string, b []byte) {
	t.Helper()
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
}
