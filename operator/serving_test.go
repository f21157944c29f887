package operator

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/util/certificate"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"constellation/engine/cloud"
	"constellation/engine/kubeadm"
	"constellation/engine/sandbox/controlplane"
)

var signOnly = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}

// kubeletRequest is the request of Node w's kubelet.
func kubeletRequest() *x509.CertificateRequest {
	return &x509.CertificateRequest{
		Subject:  pkix.Name{CommonName: "system:node:w", Organization: []string{"system:nodes"}},
		DNSNames: []string{"w"}, IPAddresses: []net.IP{net.IPv4(10, 42, 0, 20)},
	}
}

func ecKey(t testing.TB) crypto.Signer {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func rsaKey(t testing.TB, bits int) crypto.Signer {
	t.Helper()
	k, err := rsa.GenerateKey(rand.Reader, bits)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func requestPEM(t testing.TB, r *x509.CertificateRequest, key crypto.Signer) []byte {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, r, key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}

// otherNames are the subject's alternative names with one that is no server's.
func otherNames(t testing.TB) pkix.Extension {
	t.Helper()
	names := []asn1.RawValue{
		{Tag: 2, Class: asn1.ClassContextSpecific, Bytes: []byte("w")},
		{Tag: 8, Class: asn1.ClassContextSpecific, Bytes: []byte{42, 3, 4}}, // a registered ID
	}
	der, err := asn1.Marshal(names)
	if err != nil {
		t.Fatal(err)
	}
	return pkix.Extension{Id: oidSubjectAltName, Value: der}
}

// TestServingRequestsAreJudged changes one property at a time: of a kubelet's request, or of the data
// in the cluster and the cloud.
func TestServingRequestsAreJudged(t *testing.T) {
	const id = "sandbox://t/w"
	type subject struct {
		csr  *certificatesv1.CertificateSigningRequest
		req  *x509.CertificateRequest
		key  crypto.Signer
		node *corev1.Node // nil: there is none
		sky  *sky
	}
	is := func(s *subject, change func(*cloud.Instance)) {
		i := s.sky.instances[id]
		change(&i)
		s.sky.instances[id] = i
	}
	const confirmed = "names and addresses are those of machine sandbox://t/w"
	for _, tt := range []struct {
		name   string
		change func(*testing.T, *subject)
		want   verdict
		why    string
	}{
		{name: "its own name and address", change: func(*testing.T, *subject) {}, want: approved, why: confirmed},
		{name: "its address alone", change: func(_ *testing.T, s *subject) { s.req.DNSNames = nil }, want: approved, why: confirmed},
		{name: "its name alone", change: func(_ *testing.T, s *subject) { s.req.IPAddresses = nil }, want: approved, why: confirmed},
		{name: "an address of sixteen bytes", change: func(_ *testing.T, s *subject) {
			is(s, func(i *cloud.Instance) { i.IP = netip.MustParseAddr("::ffff:10.42.0.20") })
		}, want: approved, why: confirmed},
		{name: "IPv6", change: func(_ *testing.T, s *subject) {
			s.req.IPAddresses = []net.IP{net.ParseIP("fd00::7")}
			is(s, func(i *cloud.Instance) { i.IP = netip.MustParseAddr("fd00::7") })
		}, want: approved, why: confirmed},
		{name: "an RSA key", change: func(t *testing.T, s *subject) {
			s.key = rsaKey(t, 2048)
			s.csr.Spec.Usages = append(s.csr.Spec.Usages, certificatesv1.UsageKeyEncipherment)
		}, want: approved, why: confirmed},
		{name: "a machine that is still being created", change: func(_ *testing.T, s *subject) { is(s, func(i *cloud.Instance) { i.State = cloud.Creating }) }, want: approved, why: confirmed},

		{name: "an administrator", change: func(_ *testing.T, s *subject) { s.csr.Spec.Username = "kubernetes-admin" }, want: foreign, why: "the requester is not a kubelet"},
		{name: "a user with the name of a node outside of the group of nodes", change: func(_ *testing.T, s *subject) { s.csr.Spec.Groups = []string{"system:authenticated"} }, want: foreign, why: "the requester is not a kubelet"},
		{name: "a node without a name", change: func(_ *testing.T, s *subject) { s.csr.Spec.Username = "system:node:" }, want: foreign, why: "the requester is not a kubelet"},
		{name: "a bootstrap token", change: func(_ *testing.T, s *subject) { s.csr.Spec.Username = "system:bootstrap:abcdef" }, want: foreign, why: "the requester is not a kubelet"},

		{name: "another node's name in the subject", change: func(_ *testing.T, s *subject) { s.req.Subject.CommonName = "system:node:v" }, want: denied, why: `its subject is "CN=system:node:v,O=system:nodes", want CN=system:node:w,O=system:nodes`},
		{name: "an additional group", change: func(_ *testing.T, s *subject) {
			s.req.Subject.Organization = []string{"system:nodes", "system:masters"}
		}, want: denied, why: `its subject is "CN=system:node:w,O=system:nodes+O=system:masters", want CN=system:node:w,O=system:nodes`},
		{name: "another group", change: func(_ *testing.T, s *subject) { s.req.Subject.Organization = []string{"system:masters"} }, want: denied, why: `its subject is "CN=system:node:w,O=system:masters", want CN=system:node:w,O=system:nodes`},
		{name: "no group", change: func(_ *testing.T, s *subject) { s.req.Subject.Organization = nil }, want: denied, why: `its subject is "CN=system:node:w", want CN=system:node:w,O=system:nodes`},
		{name: "an organizational unit in addition to the group", change: func(_ *testing.T, s *subject) { s.req.Subject.OrganizationalUnit = []string{"x"} }, want: denied, why: `its subject is "CN=system:node:w,OU=x,O=system:nodes", want CN=system:node:w,O=system:nodes`},
		{name: "no name and no address", change: func(_ *testing.T, s *subject) { s.req.DNSNames, s.req.IPAddresses = nil, nil }, want: denied, why: "it requests other extensions than the names of a server"},
		{name: "an e-mail address", change: func(_ *testing.T, s *subject) { s.req.EmailAddresses = []string{"w@w"} }, want: denied, why: "it asks for e-mail addresses or URIs"},
		{name: "a URI", change: func(_ *testing.T, s *subject) { s.req.URIs = []*url.URL{{Scheme: "spiffe", Host: "w"}} }, want: denied, why: "it asks for e-mail addresses or URIs"},
		{name: "a kind of name that Go's parser drops", change: func(t *testing.T, s *subject) { s.req.ExtraExtensions = []pkix.Extension{otherNames(t)} }, want: denied, why: "it requests other names than those of a server"},
		{name: "a certificate authority", change: func(_ *testing.T, s *subject) {
			s.req.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Critical: true, Value: []byte{0x30, 3, 1, 1, 0xff}}}
		}, want: denied, why: "it requests other extensions than the names of a server"},
		{name: "a client's usages", change: func(_ *testing.T, s *subject) {
			s.csr.Spec.Usages = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}
		}, want: denied, why: `its usages are ["client auth" "digital signature"], not those of a server's certificate`},
		{name: "an additional usage", change: func(_ *testing.T, s *subject) {
			s.csr.Spec.Usages = append(s.csr.Spec.Usages, certificatesv1.UsageClientAuth)
		}, want: denied, why: `its usages are ["client auth" "digital signature" "server auth"], not those of a server's certificate`},
		{name: "a missing usage", change: func(_ *testing.T, s *subject) { s.csr.Spec.Usages = s.csr.Spec.Usages[:1] }, want: denied, why: `its usages are ["digital signature"], not those of a server's certificate`},
		{name: "a weak key", change: func(t *testing.T, s *subject) {
			t.Setenv("GODEBUG", "rsa1024min=0")
			s.key = rsaKey(t, 1024)
		}, want: denied, why: "its RSA key has 1024 bits, want at least 2048"},
		{name: "data that is not PEM", change: func(_ *testing.T, s *subject) { s.csr.Spec.Request = []byte("hello") }, want: denied, why: "it is not one CERTIFICATE REQUEST in PEM"},
		{name: "a second request behind the first", change: func(t *testing.T, s *subject) {
			s.csr.Spec.Request = slices.Concat(requestPEM(t, s.req, s.key), requestPEM(t, s.req, s.key))
		}, want: denied, why: "it is not one CERTIFICATE REQUEST in PEM"},
		{name: "a certificate", change: func(_ *testing.T, s *subject) {
			s.csr.Spec.Request = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte{1}})
		}, want: denied, why: "it is not one CERTIFICATE REQUEST in PEM"},
		{name: "PEM with nothing in it", change: func(_ *testing.T, s *subject) {
			s.csr.Spec.Request = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST"})
		}, want: denied, why: "it is not a PKCS #10 request"},
		{name: "a request that was changed after it was signed", change: func(t *testing.T, s *subject) {
			block, _ := pem.Decode(requestPEM(t, s.req, s.key))
			i := strings.Index(string(block.Bytes), "system:node:w")
			block.Bytes[i+12] = 'v'
			s.csr.Spec.Request = pem.EncodeToMemory(block)
		}, want: denied, why: "its signature is wrong"},

		{name: "another machine's address", change: func(_ *testing.T, s *subject) { s.req.IPAddresses = []net.IP{net.IPv4(10, 42, 0, 10)} }, want: denied, why: "it requests the address 10.42.0.10, the machine's address in the cloud is 10.42.0.20"},
		{name: "another machine's address beside its own", change: func(_ *testing.T, s *subject) {
			s.req.IPAddresses = append(s.req.IPAddresses, net.IPv4(10, 42, 0, 10))
		}, want: denied, why: "it requests the address 10.42.0.10, the machine's address in the cloud is 10.42.0.20"},
		{name: "an address that its Node claims", change: func(_ *testing.T, s *subject) {
			s.req.IPAddresses = []net.IP{net.IPv4(10, 42, 0, 10)}
			s.node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.42.0.10"}}
		}, want: denied, why: "it requests the address 10.42.0.10, the machine's address in the cloud is 10.42.0.20"},
		{name: "the name of a service", change: func(_ *testing.T, s *subject) { s.req.DNSNames = []string{"w", "kubernetes.default.svc"} }, want: denied, why: `it requests the name "kubernetes.default.svc", the machine's name in the cloud is w`},
		{name: "a name with a star", change: func(_ *testing.T, s *subject) { s.req.DNSNames = []string{"*"} }, want: denied, why: `it requests the name "*", the machine's name in the cloud is w`},
		{name: "a Node that claims another machine", change: func(_ *testing.T, s *subject) {
			s.sky.instances["sandbox://t/v"] = cloud.Instance{Name: "v", ProviderID: "sandbox://t/v", IP: netip.MustParseAddr("10.42.0.10"), State: cloud.Ready}
			s.node.Spec.ProviderID = "sandbox://t/v"
			s.req.IPAddresses = []net.IP{net.IPv4(10, 42, 0, 10)}
		}, want: denied, why: "machine sandbox://t/v is called v, so it is not Node w"},

		{name: "no Node yet", change: func(_ *testing.T, s *subject) { s.node = nil }, want: undecided, why: "there is no Node w"},
		{name: "a Node without a machine", change: func(_ *testing.T, s *subject) { s.node.Spec.ProviderID = "" }, want: undecided, why: "Node w has no providerID, so its machine cannot be found"},
		{name: "a machine that the cloud does not find", change: func(_ *testing.T, s *subject) { delete(s.sky.instances, id) }, want: undecided, why: "the cloud does not find machine sandbox://t/w"},
		{name: "a cloud that does not answer", change: func(_ *testing.T, s *subject) { s.sky.err = cloud.ErrUnavailable }, want: undecided, why: "the cloud returns no data about machine sandbox://t/w: cloud unavailable"},
		{name: "a machine that is being deleted", change: func(_ *testing.T, s *subject) { is(s, func(i *cloud.Instance) { i.State = cloud.Terminating }) }, want: undecided, why: "machine sandbox://t/w is being deleted"},
		{name: "a deleted machine", change: func(_ *testing.T, s *subject) { is(s, func(i *cloud.Instance) { i.State = cloud.Terminated }) }, want: undecided, why: "machine sandbox://t/w is being deleted"},
		{name: "a machine whose address is not known yet", change: func(_ *testing.T, s *subject) { is(s, func(i *cloud.Instance) { i.IP = netip.Addr{} }) }, want: undecided, why: "the cloud returns no address of machine sandbox://t/w"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &subject{
				csr: &certificatesv1.CertificateSigningRequest{Spec: certificatesv1.CertificateSigningRequestSpec{
					SignerName: certificatesv1.KubeletServingSignerName, Username: "system:node:w",
					Groups: []string{"system:nodes", "system:authenticated"}, Usages: slices.Clone(signOnly),
				}},
				req: kubeletRequest(), key: ecKey(t),
				node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w"}, Spec: corev1.NodeSpec{ProviderID: id}},
				sky:  &sky{instances: map[string]cloud.Instance{id: {Name: "w", ProviderID: id, IP: netip.MustParseAddr("10.42.0.20"), State: cloud.Ready}}},
			}
			tt.change(t, s)
			if s.csr.Spec.Request == nil {
				s.csr.Spec.Request = requestPEM(t, s.req, s.key)
			}
			scheme := runtime.NewScheme()
			if err := clientgoscheme.AddToScheme(scheme); err != nil {
				t.Fatal(err)
			}
			b := fake.NewClientBuilder().WithScheme(scheme)
			if s.node != nil {
				b = b.WithObjects(s.node)
			}
			r := &servingRequests{client: b.Build(), cloud: s.sky}
			got, why, _ := r.judge(t.Context(), s.csr)
			if got != tt.want || why != tt.why {
				t.Errorf("%s: %s\nwant %s: %s", verdictNames[got], why, verdictNames[tt.want], tt.why)
			}
		})
	}
}

// FuzzServingRequest: an accepted request has the subject of its caller, and only names that are
// compared with the cloud's.
func FuzzServingRequest(f *testing.F) {
	key := ecKey(f)
	good := requestPEM(f, kubeletRequest(), key)
	other := kubeletRequest()
	other.ExtraExtensions = []pkix.Extension{otherNames(f)}
	mail := kubeletRequest()
	mail.EmailAddresses = []string{"w@w"}
	for _, seed := range [][]byte{good, requestPEM(f, other, key), requestPEM(f, mail, key), append([]byte("text\n"), good...), append(slices.Clone(good), good...), nil} {
		f.Add(seed)
		if block, _ := pem.Decode(seed); block != nil {
			f.Add(block.Bytes)
		}
	}
	f.Fuzz(func(t *testing.T, request []byte) {
		for _, request := range [][]byte{request, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: request})} {
			got, err := parseServing(request, signOnly, "system:node:w")
			if err != nil {
				if !cmp.Equal(got, servingRequest{}, cmp.AllowUnexported(servingRequest{})) {
					t.Errorf("refused, and still %+v", got)
				}
				continue
			}
			// A signer parses the request again, and copies its content to the certificate.
			block, _ := pem.Decode(request)
			c, err := x509.ParseCertificateRequest(block.Bytes)
			if err != nil || c.CheckSignature() != nil {
				t.Fatalf("accepted: %v", err)
			}
			der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
				SerialNumber: big.NewInt(1), Subject: c.Subject, DNSNames: c.DNSNames, IPAddresses: c.IPAddresses, EmailAddresses: c.EmailAddresses, URIs: c.URIs,
			}, &x509.Certificate{}, c.PublicKey, key)
			if err != nil {
				t.Fatal(err)
			}
			signed, err := x509.ParseCertificate(der)
			if err != nil {
				t.Fatal(err)
			}
			if s := signed.Subject.String(); s != "CN=system:node:w,O=system:nodes" {
				t.Errorf("subject %s", s)
			}
			if len(signed.DNSNames) != len(got.names) || len(signed.IPAddresses) != len(got.addresses) || len(signed.DNSNames)+len(signed.IPAddresses) == 0 || len(signed.EmailAddresses)+len(signed.URIs) > 0 {
				t.Errorf("names %q %v %q %v, compared were %+v", signed.DNSNames, signed.IPAddresses, signed.EmailAddresses, signed.URIs, got)
			}
		}
	})
}

// kubeletCertificates is the part of a kubelet that renews the certificate that it serves
// with: the same code, on a directory laid out as a new machine's.
type kubeletCertificates struct {
	certificate.Manager
	first *x509.Certificate
	dir   string
}

// startKubelet starts with a certificate that is close to its expiry.
func startKubelet(t *testing.T, c *cluster, name string, asks *x509.CertificateRequest) *kubeletCertificates {
	t.Helper()
	k := &kubeletCertificates{dir: t.TempDir()}
	ca, err := tls.LoadX509KeyPair(filepath.Join(c.cp.PKI(), "ca.crt"), filepath.Join(c.cp.PKI(), "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	key := ecKey(t)
	now := time.Now()
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(7), Subject: asks.Subject, DNSNames: asks.DNSNames, IPAddresses: asks.IPAddresses,
		NotBefore: now.Add(-10 * time.Hour), NotAfter: now.Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, BasicConstraintsValid: true,
	}, ca.Leaf, key.Public(), ca.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	if k.first, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	// As package bootstrapper lays them out.
	for path, block := range map[string]*pem.Block{
		kubeadm.KubeletCertFile: {Type: "CERTIFICATE", Bytes: der}, kubeadm.KubeletKeyFile: {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		if err := os.WriteFile(filepath.Join(k.dir, filepath.Base(path)), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	access, err := c.cp.ConfigFor("system:node:"+name, "system:nodes", "system:authenticated")
	if err != nil {
		t.Fatal(err)
	}
	core := kubernetes.NewForConfigOrDie(access)
	store, err := certificate.NewFileStore("kubelet-server", k.dir, k.dir, "", "")
	if err != nil {
		t.Fatal(err)
	}
	k.Manager, err = certificate.NewManager(&certificate.Config{
		ClientsetFn: func(*tls.Certificate) (kubernetes.Interface, error) { return core, nil },
		GetTemplate: func() *x509.CertificateRequest { return asks },
		SignerName:  certificatesv1.KubeletServingSignerName, GetUsages: certificate.DefaultKubeletServingGetUsages, CertificateStore: store,
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := k.Current(); got == nil || !got.Leaf.Equal(k.first) {
		t.Fatal("the kubelet does not find its first certificate")
	}
	k.Start()
	t.Cleanup(k.Stop)
	return k
}

// TestKubeletsRenewTheirCertificates runs the kubelet's own code against a real API server
// and the real signer, with an operator that has the rights of its chart.
func TestKubeletsRenewTheirCertificates(t *testing.T) {
	c := newClusterWith(t, controlplane.Options{Controllers: true})
	for name, ip := range map[string]string{"good": "10.42.0.20", "liar": "10.42.0.21", "early": "10.42.0.22"} {
		c.node(name, false)
		c.cloud.set(func(s *sky) {
			s.instances["sandbox://t/"+name] = cloud.Instance{
				Name: name, ProviderID: "sandbox://t/" + name, Group: workerGroup, Image: image2, State: cloud.Ready, IP: netip.MustParseAddr(ip),
			}
		})
	}
	c.start()
	asks := func(name, ip string) *x509.CertificateRequest {
		return &x509.CertificateRequest{
			Subject:  pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}},
			DNSNames: []string{name}, IPAddresses: []net.IP{net.ParseIP(ip)},
		}
	}
	requestsOf := func(user string) (all []certificatesv1.CertificateSigningRequest) {
		t.Helper()
		var list certificatesv1.CertificateSigningRequestList
		if err := c.admin.List(t.Context(), &list); err != nil {
			t.Fatal(err)
		}
		for _, r := range list.Items {
			if r.Spec.Username == user {
				all = append(all, r)
			}
		}
		return all
	}
	conditionOf := func(r certificatesv1.CertificateSigningRequest) string {
		var all []string
		for _, c := range r.Status.Conditions {
			all = append(all, fmt.Sprintf("%s %s: %s", c.Type, c.Reason, c.Message))
		}
		return strings.Join(all, "; ")
	}

	t.Run("a certificate is renewed before it ends", func(t *testing.T) {
		k := startKubelet(t, c, "good", asks("good", "10.42.0.20"))
		c.eventually("the kubelet serves with another certificate", func() (string, bool) {
			now := k.Current()
			if now == nil {
				t.Fatal("the kubelet has no serving certificate")
			}
			return "still the first", !now.Leaf.Equal(k.first)
		})
		pool := x509.NewCertPool()
		pool.AddCert(c.authority())
		for _, name := range []string{"good", "10.42.0.20"} {
			if _, err := k.Current().Leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: name, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}); err != nil {
				t.Error(err)
			}
		}
		if !k.Current().Leaf.NotAfter.After(k.first.NotAfter) {
			t.Errorf("it ends at %s, the first at %s", k.Current().Leaf.NotAfter, k.first.NotAfter)
		}
		// State that a restarted kubelet finds.
		again, err := certificate.NewFileStore("kubelet-server", k.dir, k.dir, "", "")
		if err != nil {
			t.Fatal(err)
		}
		if found, err := again.Current(); err != nil || !found.Leaf.Equal(k.Current().Leaf) {
			t.Errorf("after a restart the kubelet finds another certificate: %v", err)
		}
	})

	t.Run("a node that requests another machine's address is denied with the reason", func(t *testing.T) {
		k := startKubelet(t, c, "liar", asks("liar", "10.42.0.20"))
		c.eventually("its request is denied", func() (string, bool) {
			all := requestsOf("system:node:liar")
			if len(all) == 0 {
				return "no request yet", false
			}
			is := conditionOf(all[0])
			return is, is == "Denied NotThisMachine: it requests the address 10.42.0.20, the machine's address in the cloud is 10.42.0.21"
		})
		c.eventually("its Node has an event", func() (string, bool) {
			var list eventsv1.EventList
			if err := c.admin.List(t.Context(), &list, client.InNamespace("default")); err != nil {
				t.Fatal(err)
			}
			var seen []string
			for _, e := range list.Items {
				if e.Regarding.Name == "liar" {
					seen = append(seen, e.Reason)
				}
			}
			return fmt.Sprint(seen), slices.Contains(seen, "ServingCertificateDenied")
		})
		if got := k.Current(); got == nil || !got.Leaf.Equal(k.first) {
			t.Error("it serves with another certificate")
		}
	})

	t.Run("a request waits for the cloud and is then approved", func(t *testing.T) {
		c.cloud.set(func(s *sky) { s.err = cloud.ErrUnavailable })
		before := c.servingCount("waiting")
		k := startKubelet(t, c, "early", asks("early", "10.42.0.22"))
		c.eventually("the request waits", func() (string, bool) {
			return "not judged", c.servingCount("waiting") > before
		})
		if all := requestsOf("system:node:early"); len(all) != 1 || len(all[0].Status.Conditions) > 0 {
			t.Errorf("requests %v", all)
		}
		c.cloud.set(func(s *sky) { s.err = nil })
		c.eventually("the kubelet serves with another certificate", func() (string, bool) {
			return "still the first", !k.Current().Leaf.Equal(k.first)
		})
	})

	t.Run("requests to people and to other signers are not answered", func(t *testing.T) {
		before := c.servingCount("left")
		own := c.create
		other := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: "other-signer"}, Spec: certificatesv1.CertificateSigningRequestSpec{
			SignerName: certificatesv1.KubeAPIServerClientSignerName, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
			Request: requestPEM(t, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "somebody"}}, ecKey(t)),
		}}
		own(other)
		own(&certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: "by-hand"}, Spec: certificatesv1.CertificateSigningRequestSpec{
			SignerName: certificatesv1.KubeletServingSignerName, Usages: signOnly, Request: requestPEM(t, asks("good", "10.42.0.20"), ecKey(t)),
		}})
		c.eventually("the request to the kubelet's signer was judged", func() (string, bool) {
			return "not judged", c.servingCount("left") > before
		})
		for _, name := range []string{"other-signer", "by-hand"} {
			var r certificatesv1.CertificateSigningRequest
			if !c.get(name, &r) || len(r.Status.Conditions) > 0 {
				t.Errorf("%s: %s", name, conditionOf(r))
			}
		}
	})
}

// authority is the cluster's.
func (c *cluster) authority() *x509.Certificate {
	c.t.Helper()
	b, err := os.ReadFile(filepath.Join(c.cp.PKI(), "ca.crt"))
	if err != nil {
		c.t.Fatal(err)
	}
	block, _ := pem.Decode(b)
	ca, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		c.t.Fatal(err)
	}
	return ca
}

// servingCount is the process's metric.
func (c *cluster) servingCount(result string) float64 {
	c.t.Helper()
	counters, err := newCounters()
	if err != nil {
		c.t.Fatal(err)
	}
	return figures(c.t, counters.serving)["constellation_serving_requests_total{result="+result+"}"]
}
