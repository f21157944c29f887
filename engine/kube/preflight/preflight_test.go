package preflight

import (
	"context"
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
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane"
)

// site is a real API server that looks like one of kubeadm's: what kubeadm and kubelets
// would have put there is put there by hand.
type site struct {
	t      *testing.T
	cp     *controlplane.ControlPlane
	config *rest.Config
	core   kubernetes.Interface
}

func newSite(t *testing.T) *site { return newSiteLike(t, clean(), controlplane.Options{}) }

// newSiteLike is newSite with the objects of a world.
func newSiteLike(t *testing.T, like *world, o controlplane.Options) *site {
	// Pods are created by hand, in namespaces without a ServiceAccount.
	o.APIServerArgs = append(o.APIServerArgs, "--disable-admission-plugins=ServiceAccount", "--runtime-config=api/all=true")
	cp := controlplane.ForTest(t, o)
	s := &site{t: t, cp: cp, config: cp.Config()}
	var err error
	s.core, err = kubernetes.NewForConfig(s.config)
	s.must(err)
	ctx := t.Context()
	for name, data := range like.configs {
		_, err := s.core.CoreV1().ConfigMaps("kube-system").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: data}, metav1.CreateOptions{})
		s.must(err)
	}
	for name, l := range like.leaders {
		l.RenewTime = &metav1.MicroTime{Time: time.Now()}
		_, err := s.core.CoordinationV1().Leases("kube-system").Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: l}, metav1.CreateOptions{})
		s.must(err)
	}
	for i := range like.nodes {
		info := &like.nodes[i].Status.NodeInfo
		s.putNodeWith(like.nodes[i].Name, info.KubeletVersion, info.ContainerRuntimeVersion, 0)
	}
	for i := range like.pods {
		s.putPod(&like.pods[i])
	}
	return s
}

func (s *site) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// putNode makes a node, or changes its kubelet; port is where that listens.
func (s *site) putNode(name, kubelet string, port int32) {
	s.t.Helper()
	s.putNodeWith(name, kubelet, "containerd://1.6.20", port)
}

func (s *site) putNodeWith(name, kubelet, runtime string, port int32) {
	s.t.Helper()
	nodes, ctx := s.core.CoreV1().Nodes(), s.t.Context()
	if _, err := nodes.Get(ctx, name, metav1.GetOptions{}); err != nil {
		_, err := nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		s.must(err)
	}
	b, err := json.Marshal(map[string]any{"status": map[string]any{
		"nodeInfo":        map[string]any{"kubeletVersion": kubelet, "containerRuntimeVersion": runtime},
		"addresses":       []any{map[string]any{"type": "InternalIP", "address": hostAddress(s.t)}},
		"daemonEndpoints": map[string]any{"kubeletEndpoint": map[string]any{"Port": port}},
	}})
	s.must(err)
	_, err = nodes.Patch(ctx, name, types.StrategicMergePatchType, b, metav1.PatchOptions{}, "status")
	s.must(err)
}

// putPod makes a static pod that is ready.
func (s *site) putPod(like *pod) {
	s.t.Helper()
	pods, ctx := s.core.CoreV1().Pods(like.namespace), s.t.Context()
	p, err := pods.Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: like.name, Labels: map[string]string{"component": like.component, "tier": "control-plane"},
			Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "x"},
		},
		Spec: corev1.PodSpec{NodeName: like.node, Containers: []corev1.Container{{Name: "main", Image: like.images[0], Command: like.args}}},
	}, metav1.CreateOptions{})
	s.must(err)
	p.Status = corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
	_, err = pods.UpdateStatus(ctx, p, metav1.UpdateOptions{})
	s.must(err)
}

// look runs the platform's checks as config's user.
func (s *site) look(config *rest.Config, r check.PreflightRequest) []plan.Finding {
	s.t.Helper()
	core, err := kubernetes.NewForConfig(protobuf(config))
	s.must(err)
	w, err := collect(s.t.Context(), config, core, r)
	s.must(err)
	found, err := runChecks(s.t.Context(), platformChecks(), w, probe{config: config, core: core}, func(plan.Event) {})
	s.must(err)
	for i := range found {
		complete(s.t, found[i])
	}
	return found
}

// until repeats the checks until all wanted findings are reported: some metrics of the API
// server lag.
func (s *site) until(config *rest.Config, r check.PreflightRequest, want ...string) []plan.Finding {
	s.t.Helper()
	slices.Sort(want)
	for deadline := time.Now().Add(20 * time.Second); ; {
		found := s.look(config, r)
		got := told(found)
		slices.Sort(got)
		d := cmp.Diff(want, got)
		if d == "" {
			return found
		}
		if time.Now().After(deadline) {
			s.t.Errorf("%s", d)
			return found
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// hostAddress is an address of this computer to which an API server forwards requests: one that is
// not on the loopback.
func hostAddress(t *testing.T) string {
	t.Helper()
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && n.IP.IsGlobalUnicast() {
			return n.IP.String()
		}
	}
	t.Skip("needs an address that is not on the loopback")
	return ""
}

// kubelet listens with a certificate that is valid for life, until left
// from now.
func kubelet(t *testing.T, life, left time.Duration) (port int32) {
	t.Helper()
	return serveKubelet(t, life, left, &kubeletReport{config: map[string]any{}, flags: map[string]string{}})
}

// serveKubelet is kubelet with a report in the format of a kubelet.
func serveKubelet(t *testing.T, life, left time.Duration, report *kubeletReport) (port int32) {
	t.Helper()
	mux := http.NewServeMux()
	answer := func(w http.ResponseWriter, v any) {
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(v); err != nil {
			t.Error(err)
		}
	}
	mux.HandleFunc("/configz", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, map[string]any{"kubeletconfig": report.config})
	})
	mux.HandleFunc("/flagz", func(w http.ResponseWriter, r *http.Request) {
		if !strings.Contains(r.Header.Get("Accept"), "application/json;g=config.k8s.io;v=v1beta1;as=Flagz") {
			w.WriteHeader(http.StatusNotAcceptable)
			return
		}
		answer(w, map[string]any{"kind": "Flagz", "apiVersion": "config.k8s.io/v1beta1", "metadata": map[string]any{"name": "kubelet"}, "flags": report.flags})
	})
	l, err := tls.Listen("tcp", net.JoinHostPort("", "0"), &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{selfSigned(t, life, left)}})
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Second, ErrorLog: log.New(io.Discard, "", 0)}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	return int32(l.Addr().(*net.TCPAddr).Port)
}

// selfSigned is valid for the addresses of this computer, for life, until left from now.
func selfSigned(t *testing.T, life, left time.Duration) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "system:node:x"}, NotBefore: time.Now().Add(left - life), NotAfter: time.Now().Add(left),
		DNSNames: []string{"kubernetes.default.svc"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.ParseIP(hostAddress(t))}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func TestPlantedTroubleOnARealAPIServer(t *testing.T) {
	s := newSite(t)
	ctx := t.Context()
	request := hop("v1.35.4", "v1.36.9")
	server, err := s.core.Discovery().ServerVersion()
	s.must(err)
	// A kubelet of v1.32 is too old for v1.36: for the API server that runs, or for the next one.
	next := "of the hop with v1.36.9"
	if strings.HasPrefix(server.GitVersion, "v1.36.") {
		next = "with " + server.GitVersion
	}
	request.Etcd = "3.6.8-0"
	port := kubelet(t, 365*day, 300*day)
	s.putNode("control-plane-0", "v1.35.4", port)
	s.putNode("worker-0", "v1.35.4", port)
	s.until(s.config, request) // nothing

	s.config.WarningHandler = rest.NoWarnings{}
	objects, err := dynamic.NewForConfig(s.config)
	s.must(err)
	v1beta1 := func(resource string) dynamic.ResourceInterface {
		return objects.Resource(schema.GroupVersionResource{Group: "networking.k8s.io", Version: "v1beta1", Resource: resource})
	}
	t.Run("a client that writes through an API that goes, and one that reads", func(t *testing.T) {
		s := s.in(t)
		_, err := v1beta1("servicecidrs").Create(ctx, &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "networking.k8s.io/v1beta1", "kind": "ServiceCIDR", "metadata": map[string]any{"name": "extra"}, "spec": map[string]any{"cidrs": []any{"10.200.0.0/24"}},
		}}, metav1.CreateOptions{FieldManager: "argocd-controller"})
		s.must(err)
		_, err = v1beta1("ipaddresses").List(ctx, metav1.ListOptions{})
		s.must(err)
		toward := hop("v1.36.3", "v1.37.0")
		w, err := collect(ctx, s.config, s.core, toward)
		s.must(err)
		i := slices.IndexFunc(apiChecks, func(c checkItem) bool { return c.id == "removed-apis-used" })
		found := apiChecks[i].find(w, nil)
		if d := cmp.Diff([]string{
			"warn removed-apis-used: clients read networking.k8s.io/v1beta1 ipaddresses, which v1.37 no longer serves",
			"block removed-apis-used: clients write networking.k8s.io/v1beta1 servicecidrs, which v1.37 no longer serves",
		}, told(found)); d != "" {
			t.Fatal(d)
		}
		if f := found[1]; f.Owner != "argocd-controller" || !slices.Equal(f.Objects, []string{"servicecidr/extra"}) || !strings.Contains(f.Detail, "last written by argocd-controller on "+time.Now().UTC().Format("2006-01-02")) {
			t.Errorf("finding %+v", f)
		}
		// We have not become users of what goes ourselves.
		again, err := collect(ctx, s.config, s.core, toward)
		s.must(err)
		for _, u := range again.servers[0].metrics.deprecated {
			if u.resource == "servicecidrs" && u.verbs["list"] > 0 {
				t.Errorf("reading has left a trace: %+v", u)
			}
		}
	})
	// A hop that does not remove it is none the worse, but the next one is.
	tellsNext := []string{
		"warn removed-apis-used: clients read networking.k8s.io/v1beta1 ipaddresses, which v1.37, the minor after this hop, no longer serves",
		"warn removed-apis-used: clients write networking.k8s.io/v1beta1 servicecidrs, which v1.37, the minor after this hop, no longer serves",
	}
	s.until(s.config, request, tellsNext...)

	t.Run("trouble of all kinds at once", func(t *testing.T) {
		s := s.in(t)
		s.putNode("worker-0", "v1.32.9", kubelet(t, 365*day, -time.Hour))
		s.must(s.cp.Apply(ctx, []byte(brokenKinds)))
		s.must(s.cp.Apply(ctx, []byte(fmt.Sprintf(restrictedNamespace, helmSecret(t, "w\x1b[2Jeb", "<1.36.0-0"), cutSecret))))
		crds := objects.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
		_, err := crds.Patch(ctx, "things.example.com", types.MergePatchType, []byte(`{"status":{"storedVersions":["v1alpha1","v1"]}}`), metav1.PatchOptions{}, "status")
		s.must(err)
		found := s.until(
			s.config, request, append([]string{
				"block api-services: the API v1.broken.example.com is registered and not available",
				"block kinds: nobody converts gadgets.example.com",
				"block kubelet-certificates: the certificate of the kubelet of 1 node expired 60 minutes ago",
				"block kubelet-versions: the kubelet of 1 node is v1.32.9, too old for the API servers " + next,
				"block pod-security: the namespace constellation-system enforces the pod security level baseline",
				"not-checked helm-charts: not checked whether Helm release constellation-system/cut allows Kubernetes v1.36.9: it cannot be read",
				"warn helm-charts: the chart w\\x1b[2Jeb 1.2.3 of Helm release constellation-system/web does not allow Kubernetes v1.36.9",
				"warn kinds: things.example.com may store objects as v1alpha1, which it does not serve",
			}, tellsNext...)...,
		)
		for _, f := range found {
			if f.ID == "api-services" && f.Command != "kubectl delete apiservice v1.broken.example.com" {
				t.Errorf("finding %+v", f)
			}
		}
	})

	t.Run("a request for a certificate that nobody approves", func(t *testing.T) {
		s := s.in(t)
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		s.must(err)
		der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "somebody"}}, key)
		s.must(err)
		_, err = s.core.CertificatesV1().CertificateSigningRequests().Create(ctx, &certificatesv1.CertificateSigningRequest{
			ObjectMeta: metav1.ObjectMeta{Name: "somebody"},
			Spec: certificatesv1.CertificateSigningRequestSpec{
				SignerName: certificatesv1.KubeAPIServerClientSignerName, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
				Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			},
		}, metav1.CreateOptions{})
		s.must(err)
		w, err := collect(ctx, s.config, s.core, request)
		s.must(err)
		if found := signingRequests(w, nil); len(found) != 0 {
			t.Errorf("a fresh one is reported: %+v", found)
		}
		w.now = w.now.Add(time.Hour)
		if found := signingRequests(w, nil); len(found) != 1 || found[0].Command != "kubectl certificate approve somebody" {
			t.Errorf("an old one: %+v", found)
		}
	})

	t.Run("a user who may do little is never told that all is well", func(t *testing.T) {
		s := s.in(t)
		config := rest.CopyConfig(s.config)
		config.Impersonate.UserName = "nobody"
		var ok []string
		for _, f := range s.look(config, request) {
			if f.Severity == plan.Info {
				ok = append(ok, f.ID)
			}
			if f.ID == "permissions" && (f.Severity != plan.Block || !strings.Contains(f.Detail, "patch nodeversions.update.edgeless.systems")) {
				t.Errorf("permissions: %+v", f)
			}
		}
		if d := cmp.Diff([]string(nil), ok); d != "" {
			t.Error(d)
		}
	})

	t.Run("an API server that answers some questions late and some with an error", func(t *testing.T) {
		s := s.in(t)
		front := newFront(t, s.config)
		front.handle = func(w http.ResponseWriter, r *http.Request) bool {
			switch r.URL.Path {
			case "/api/v1/nodes":
				<-r.Context().Done() // never
			case "/apis/apps/v1/daemonsets": // client-go asks again and again
				conn, _, err := http.NewResponseController(w).Hijack()
				if err == nil {
					conn.Close()
				}
			case "/apis/apiregistration.k8s.io/v1/apiservices":
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprint(w, `{"items":`)
			default:
				return false
			}
			return true
		}
		core, err := kubernetes.NewForConfig(protobuf(front.config))
		s.must(err)
		w, err := collectWithin(ctx, 5*time.Second, front.config, core, request)
		s.must(err)
		if d := cmp.Diff(map[source]string{
			sourceNodes: "the API server did not answer in time", sourceDaemonSets: "the API server did not answer in time",
			sourceAPIServices: "the response cannot be decoded: unexpected end of JSON input",
		}, w.unread); d != "" {
			t.Error(d)
		}
	})

	t.Run("an API server that is down", func(t *testing.T) {
		s := s.in(t)
		s.cp.StopAPIServer()
		if _, err := Run(ctx, s.config, []check.PreflightRequest{request}, func(plan.Event) {}); err == nil || !strings.Contains(err.Error(), "refused") {
			t.Errorf("error %v", err)
		}
		s.must(s.cp.StartAPIServer(ctx))
	})

	t.Run("a user who leaves", func(t *testing.T) {
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		if found, err := Run(ctx, s.config, []check.PreflightRequest{request}, func(plan.Event) {}); err == nil || found != nil {
			t.Errorf("found %v, error %v", found, err)
		}
	})
}

func (s *site) in(t *testing.T) *site {
	c := *s
	c.t = t
	return &c
}

const brokenKinds = `apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1.broken.example.com}
spec:
  group: broken.example.com
  version: v1
  groupPriorityMinimum: 100
  versionPriority: 100
  service: {namespace: nowhere, name: nobody}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.example.com}
spec:
  group: example.com
  scope: Cluster
  names: {kind: Thing, plural: things, singular: thing, listKind: ThingList}
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}
  - {name: v1alpha1, served: false, storage: false, schema: {openAPIV3Schema: {type: object}}}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: gadgets.example.com}
spec:
  group: example.com
  scope: Cluster
  names: {kind: Gadget, plural: gadgets, singular: gadget, listKind: GadgetList}
  conversion:
    strategy: Webhook
    webhook:
      conversionReviewVersions: [v1]
      clientConfig: {service: {namespace: nowhere, name: converter}}
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}
`

const restrictedNamespace = `apiVersion: v1
kind: Namespace
metadata: {name: constellation-system, labels: {pod-security.kubernetes.io/enforce: baseline}}
---
apiVersion: v1
kind: Secret
type: helm.sh/release.v1
metadata: {name: sh.helm.release.v1.web.v1, namespace: constellation-system, labels: {owner: helm, status: deployed, name: web}}
data: {release: %s}
---
apiVersion: v1
kind: Secret
type: helm.sh/release.v1
metadata: {name: sh.helm.release.v1.cut.v1, namespace: constellation-system, labels: {owner: helm, status: deployed, name: cut}}
data: {release: %s}
`

// cutSecret is a release of which gzip's header alone is left, as it is in a secret's data.
var cutSecret = base64.StdEncoding.EncodeToString([]byte("H4sIAAAAAAAA/w=="))

// helmSecret is a release as it is in a secret's data: packed by Helm, then by the API.
func helmSecret(t *testing.T, chart, kubeVersion string) string {
	t.Helper()
	b, err := json.Marshal(map[string]any{"chart": map[string]any{"metadata": map[string]any{"name": chart, "version": "1.2.3", "kubeVersion": kubeVersion}}})
	if err != nil {
		t.Fatal(err)
	}
	return base64.StdEncoding.EncodeToString([]byte(base64.StdEncoding.EncodeToString(b)))
}

// front is a proxy before an API server.
type front struct {
	config *rest.Config
	// handle answers, or returns false.
	handle func(http.ResponseWriter, *http.Request) bool
}

func newFront(t *testing.T, to *rest.Config) *front {
	t.Helper()
	target, err := url.Parse(to.Host)
	if err != nil {
		t.Fatal(err)
	}
	rt, err := rest.TransportFor(to)
	if err != nil {
		t.Fatal(err)
	}
	f := &front{}
	proxy := &httputil.ReverseProxy{Transport: rt, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !f.handle(w, r) {
			proxy.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(server.Close)
	f.config = &rest.Config{Host: server.URL, QPS: -1}
	return f
}

// TestAPIServersBehindABalancerAreAllMet has API servers that are not real: three of
// those in one cluster need three addresses.
func TestAPIServersBehindABalancerAreAllMet(t *testing.T) {
	const servers = 3
	var backends []string
	pool := x509.NewCertPool()
	var ca []byte
	for i := range servers {
		cert := selfSigned(t, 365*day, time.Duration(100+i)*day)
		leaf, err := x509.ParseCertificate(cert.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		pool.AddCert(leaf)
		ca = append(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Certificate[0]})...)
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/version":
				fmt.Fprintf(w, `{"gitVersion":"v1.35.%d"}`, i)
			case "/readyz":
				if i == 1 {
					w.WriteHeader(http.StatusInternalServerError)
				}
				fmt.Fprint(w, "[+]ping ok\n"+map[bool]string{true: "[-]etcd failed: reason withheld\n"}[i == 1]+"readyz check done\n")
			case "/metrics":
				fmt.Fprintf(w, "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds %d\n", 1000+i)
			case "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices":
				w.Header().Set("Content-Type", "application/json")
				// Addresses of a network that leads nowhere from here.
				fmt.Fprint(w, `{"kind":"EndpointSliceList","apiVersion":"discovery.k8s.io/v1","items":[{"ports":[{"port":1}],"endpoints":[{"addresses":["127.0.0.1"]},{"addresses":["127.0.0.2"]},{"addresses":["127.0.0.3"]}]}]}`)
			default:
				http.NotFound(w, r)
			}
		}))
		s.TLS = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{cert}}
		s.StartTLS()
		t.Cleanup(s.Close)
		backends = append(backends, s.Listener.Addr().String())
	}
	balancer := newBalancer(t, backends)
	config := &rest.Config{Host: "https://" + balancer, TLSClientConfig: rest.TLSClientConfig{CAData: ca}}
	core, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{unread: map[source]string{}}
	if err := (&reader{config: config, core: core, w: w}).servers(t.Context()); err != nil {
		t.Fatal(err)
	}
	var got []string
	for i := range w.servers {
		s := &w.servers[i]
		got = append(got, fmt.Sprintf("%s %v %s", s.version, s.failing, s.metrics.started.Format(time.TimeOnly)))
	}
	slices.Sort(got)
	if d := cmp.Diff([]string{"v1.35.0 [] 00:16:40", "v1.35.1 [etcd] 00:16:41", "v1.35.2 [] 00:16:42"}, got); d != "" {
		t.Error(d)
	}
	if len(w.silent) != 0 {
		t.Errorf("silent: %+v", w.silent)
	}
}

// newBalancer leads every connection to the backend that has the fewest.
func newBalancer(t *testing.T, backends []string) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	var mu sync.Mutex
	load := make([]int, len(backends))
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer in.Close()
				mu.Lock()
				i := slices.Index(load, slices.Min(load))
				load[i]++
				mu.Unlock()
				defer func() {
					mu.Lock()
					defer mu.Unlock()
					load[i]--
				}()
				out, err := net.Dial("tcp", backends[i])
				if err != nil {
					return
				}
				defer out.Close()
				go func() {
					_, _ = io.Copy(out, in)
					out.Close()
				}()
				_, _ = io.Copy(in, out)
			}()
		}
	}()
	return l.Addr().String()
}

// TestKubeletsThatCannotBeReachedAreMetThroughTheAPIServer serves a port-forward as an
// API server does: a real one would need a real kubelet.
func TestKubeletsThatCannotBeReachedAreMetThroughTheAPIServer(t *testing.T) {
	port := kubelet(t, 365*day, 3*day)
	api := newForwarder(t)
	w := &world{now: time.Now(), nodes: []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, {ObjectMeta: metav1.ObjectMeta{Name: "b"}}}}
	for i := range w.nodes {
		w.nodes[i].Status.DaemonEndpoints.KubeletEndpoint.Port = port
		w.nodes[i].Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalDNS, Address: "kubernetes.default.svc"}} // as in its certificate
	}
	w.pods = []pod{{namespace: "kube-system", name: "kube-proxy-1", node: "a", ready: true, labels: map[string]string{"k8s-app": "kube-proxy"}}}
	core, err := kubernetes.NewForConfig(&rest.Config{Host: api})
	if err != nil {
		t.Fatal(err)
	}
	p := &probe{ctx: t.Context(), config: &rest.Config{Host: api}, core: core, progress: func(int64, int64) {}}
	found := kubeletCertificates(w, p)
	if d := cmp.Diff([]string{
		"block : the certificate of the kubelet of 1 node expires in 2 days",
		"not-checked : not checked how long the certificate of the kubelet of 1 node is valid",
	}, told(found)); d != "" {
		t.Error(d)
	}
	if len(found) == 2 && !strings.Contains(found[1].Detail, "b: it runs no pod on the host network") {
		t.Errorf("detail %q", found[1].Detail)
	}
}

// What answers at the address of a node may be a proxy, or a machine of another network.
func TestCertificatesOfOthersAreNoKubelets(t *testing.T) {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-0"}}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.42.0.5"}, {Type: corev1.NodeHostName, Address: ""}}
	for _, tt := range []struct {
		name string
		cert x509.Certificate
		want bool
	}{
		{name: "a certificate with the name of the kubelet", cert: x509.Certificate{Subject: pkix.Name{CommonName: "system:node:worker-0"}}, want: true},
		{name: "a self-signed certificate with the name of the node", cert: x509.Certificate{Subject: pkix.Name{CommonName: "worker-0@1700000000"}, DNSNames: []string{"worker-0"}}, want: true},
		{name: "a certificate with the address of the node", cert: x509.Certificate{IPAddresses: []net.IP{net.IPv4(10, 42, 0, 5)}}, want: true},
		{name: "a certificate of another node", cert: x509.Certificate{Subject: pkix.Name{CommonName: "system:node:worker-1"}, DNSNames: []string{"worker-1"}, IPAddresses: []net.IP{net.IPv4(10, 42, 0, 6)}}, want: false},
		{name: "a certificate of a proxy", cert: x509.Certificate{Subject: pkix.Name{CommonName: "proxy.example.com"}, DNSNames: []string{"proxy.example.com"}}, want: false},
	} {
		if got := isOf(&tt.cert, n); got != tt.want {
			t.Errorf("%s: %t", tt.name, got)
		}
	}
	other := fmt.Sprint("127.0.0.1:", kubelet(t, 365*day, 3*day))
	_, failed := askKubelets(t.Context(), &probe{ctx: t.Context(), progress: func(int64, int64) {}}, []corev1.Node{*n}, func(ctx context.Context, _ *corev1.Node) (*x509.Certificate, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", other)
		if err != nil {
			return nil, err
		}
		return peerCertificate(ctx, conn)
	})
	if failed[0] == nil || !strings.Contains(failed[0].Error(), "another host answers: CN=system:node:x") {
		t.Errorf("another node's kubelet: %v", failed[0])
	}
}

// A kubelet that renews its certificate does so when 70 to 90 % of its life are over.
func TestCertificatesOfKubeletsAreDueByWhoRenewsThem(t *testing.T) {
	const renews, keeps = "serverTLSBootstrap: true", "serverTLSBootstrap: false"
	for _, tt := range []struct {
		name, config string
		life, left   time.Duration
		want         []string
	}{
		{name: "a third is left of one that is renewed", config: renews, life: 90 * day, left: 30*day - time.Hour},
		{name: "a tenth is left of one that is renewed", config: renews, life: 90 * day, left: 9*day + time.Hour},
		{name: "less than a tenth is left of one that is renewed", config: renews, life: 90 * day, left: 9*day - time.Hour, want: []string{"warn : the certificate of the kubelet of 1 node expires in 8 days"}},
		{name: "little is left of one that is renewed", config: renews, life: 90 * day, left: 4 * day, want: []string{"block : the certificate of the kubelet of 1 node expires in 3 days"}},
		{name: "one that is renewed has expired", config: renews, life: 90 * day, left: -3 * day, want: []string{"block : the certificate of the kubelet of 1 node expired 3 days ago"}},
		{name: "a third is left of one that nobody renews", config: keeps, life: 90 * day, left: 30*day - time.Hour, want: []string{"warn : the certificate of the kubelet of 1 node expires in 29 days"}},
		{name: "less than a week is left of one that nobody renews", life: 90 * day, left: 7*day - time.Hour, want: []string{"block : the certificate of the kubelet of 1 node expires in 6 days"}},
		{name: "a configuration that cannot be read", config: "{", life: 90 * day, left: 20 * day, want: []string{"warn : the certificate of the kubelet of 1 node expires in 19 days"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := selfSigned(t, tt.life, tt.left)
			leaf, err := x509.ParseCertificate(c.Certificate[0])
			if err != nil {
				t.Fatal(err)
			}
			w := &world{
				now: time.Now(), nodes: []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "a"}}},
				configs: map[string]map[string]string{kubeletConfig: {"kubelet": tt.config}},
			}
			if d := cmp.Diff(tt.want, told(tellKubelets(w, []*x509.Certificate{leaf}, nil))); d != "" {
				t.Error(d)
			}
		})
	}
}

// newForwarder returns the address of a server that forwards to any port of loopback.
func newForwarder(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/v1/namespaces/kube-system/pods/kube-proxy-1/portforward" {
			http.NotFound(w, r)
			return
		}
		if _, err := httpstream.Handshake(r, w, []string{portforward.PortForwardProtocolV1Name}); err != nil {
			t.Errorf("handshake: %v", err)
			return
		}
		streams := make(chan httpstream.Stream, 2)
		conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, _ <-chan struct{}) error {
			streams <- s
			return nil
		})
		if conn == nil {
			return
		}
		defer conn.Close()
		for {
			select {
			case <-conn.CloseChan():
				return
			case s := <-streams:
				if s.Headers().Get(corev1.StreamType) == corev1.StreamTypeError {
					continue
				}
				to, err := net.Dial("tcp", "127.0.0.1:"+s.Headers().Get(corev1.PortHeader))
				if err != nil {
					t.Errorf("dial: %v", err)
					return
				}
				defer to.Close()
				go func() { _, _ = io.Copy(to, s) }()
				go func() { _, _ = io.Copy(s, to) }()
			}
		}
	}))
	t.Cleanup(server.Close)
	return server.URL
}
