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
		{"its own name and address", func(*testing.T, *subject) {}, approved, confirmed},
		{"its address alone", func(_ *testing.T, s *subject) { s.req.DNSNames = nil }, approved, confirmed},
		{"its name alone", func(_ *testing.T, s *subject) { s.req.IPAddresses = nil }, approved, confirmed},
		{"an address of sixteen bytes", func(_ *testing.T, s *subject) {
			is(s, func(i *cloud.Instance) { i.IP = netip.MustParseAddr("::ffff:10.42.0.20") })
		}, approved, confirmed},
		{"IPv6", func(_ *testing.T, s *subject) {
			s.req.IPAddresses = []net.IP{net.ParseIP("fd00::7")}
			is(s, func(i *cloud.Instance) { i.IP = netip.MustParseAddr("fd00::7") })
		}, approved, confirmed},
		{"an RSA key", func(t *testing.T, s *subject) {
			s.key = rsaKey(t, 2048)
			s.csr.Spec.Usages = append(s.csr.Spec.Usages, certificatesv1.UsageKeyEncipherment)
		}, approved, confirmed},
		{"a machine that is still being created", func(_ *testing.T, s *subject) { is(s, func(i *cloud.Instance) { i.State = cloud.Creating }) }, approved, confirmed},

		{"an administrator", func(_ *testing.T, s *subject) { s.csr.Spec.Username = "kubernetes-admin" }, foreign, "the requester is not a kubelet"},
		{"a user with the name of a node outside of the group of nodes", func(_ *testing.T, s *subject) { s.csr.Spec.Groups = []string{"system:authenticated"} }, foreign, "the requester is not a kubelet"},
		{"a node without a name", func(_ *testing.T, s *subject) { s.csr.Spec.Username = "system:node:" }, foreign, "the requester is not a kubelet"},
		{"a bootstrap token", func(_ *testing.T, s *subject) { s.csr.Spec.Username = "system:bootstrap:abcdef" }, foreign, "the requester is not a kubelet"},

		{"another node's name in the subject", func(_ *testing.T, s *subject) { s.req.Subject.CommonName = "system:node:v" }, denied, `its subject is "CN=system:node:v,O=system:nodes", want CN=system:node:w,O=system:nodes`},
		{"an additional group", func(_ *testing.T, s *subject) {
			s.req.Subject.Organization = []string{"system:nodes", "system:masters"}
		}, denied, `its subject is "CN=system:node:w,O=system:nodes+O=system:masters", want CN=system:node:w,O=system:nodes`},
		{"another group", func(_ *testing.T, s *subject) { s.req.Subject.Organization = []string{"system:masters"} }, denied, `its subject is "CN=system:node:w,O=system:masters", want CN=system:node:w,O=system:nodes`},
		{"no group", func(_ *testing.T, s *subject) { s.req.Subject.Organization = nil }, denied, `its subject is "CN=system:node:w", want CN=system:node:w,O=system:nodes`},
		{"an organizational unit in addition to the group", func(_ *testing.T, s *subject) { s.req.Subject.OrganizationalUnit = []string{"x"} }, denied, `its subject is "CN=system:node:w,OU=x,O=system:nodes", want CN=system:node:w,O=system:nodes`},
		{"no name and no address", func(_ *testing.T, s *subject) { s.req.DNSNames, s.req.IPAddresses = nil, nil }, denied, "it requests other extensions than the names of a server"},
		{"an e-mail address", func(_ *testing.T, s *subject) { s.req.EmailAddresses = []string{"w@w"} }, denied, "it asks for e-mail addresses or URIs"},
		{"a URI", func(_ *testing.T, s *subject) { s.req.URIs = []*url.URL{{Scheme: "spiffe", Host: "w"}} }, denied, "it asks for e-mail addresses or URIs"},
		{"a kind of name that Go's parser drops", func(t *testing.T, s *subject) { s.req.ExtraExtensions = []pkix.Extension{otherNames(t)} }, denied, "it requests other names than those of a server"},
		{"a certificate authority", func(_ *testing.T, s *subject) {
			s.req.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Critical: true, Value: []byte{0x30, 3, 1, 1, 0xff}}}
		}, denied, "it requests other extensions than the names of a server"},
		{"a client's usages", func(_ *testing.T, s *subject) {
			s.csr.Spec.Usages = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}
		}, denied, `its usages are ["client auth" "digital signature"], not those of a server's certificate`},
		{"an additional usage", func(_ *testing.T, s *subject) {
			s.csr.Spec.Usages = append(s.csr.Spec.Usages, certificatesv1.UsageClientAuth)
		}, denied, `its usages are ["client auth" "digital signature" "server auth"], not those of a server's certificate`},
		{"a missing usage", func(_ *testing.T, s *subject) { s.csr.Spec.Usages = s.csr.Spec.Usages[:1] }, denied, `its usages are ["digital signature"], not those of a server's certificate`},
		{"a weak key", func(t *testing.T, s *subject) {
			t.Setenv("GODEBUG", "rsa1024min=0")
			s.key = rsaKey(t, 1024)
		}, denied, "its RSA key has 1024 bits, want at least 2048"},
		{"data that is not PEM", func(_ *testing.T, s *subject) { s.csr.Spec.Request = []byte("hello") }, denied, "it is not one CERTIFICATE REQUEST in PEM"},
		{"a second request behind the first", func(t *testing.T, s *subject) {
			s.csr.Spec.Request = slices.Concat(requestPEM(t, s.req, s.key), requestPEM(t, s.req, s.key))
		}, denied, "it is not one CERTIFICATE REQUEST in PEM"},
		{"a certificate", func(_ *testing.T, s *subject) {
			s.csr.Spec.Request = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte{1}})
		}, denied, "it is not one CERTIFICATE REQUEST in PEM"},
		{"PEM with nothing in it", func(_ *testing.T, s *subject) {
			s.csr.Spec.Request = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST"})
		}, denied, "it is not a PKCS #10 request"},
		{"a request that was changed after it was signed", func(t *testing.T, s *subject) {
			block, _ := pem.Decode(requestPEM(t, s.req, s.key))
			i := strings.Index(string(block.Bytes), "system:node:w")
			block.Bytes[i+12] = 'v'
			s.csr.Spec.Request = pem.EncodeToMemory(block)
		}, denied, "its signature is wrong"},

		{"another machine's address", func(_ *testing.T, s *subject) { s.req.IPAddresses = []net.IP{net.IPv4(10, 42, 0, 10)} }, denied, "it requests the address 10.42.0.10, the machine's address in the cloud is 10.42.0.20"},
		{"another machine's address beside its own", func(_ *testing.T, s *subject) {
			s.req.IPAddresses = append(s.req.IPAddresses, net.IPv4(10, 42, 0, 10))
		}, denied, "it requests the address 10.42.0.10, the machine's address in the cloud is 10.42.0.20"},
		{"an address that its Node claims", func(_ *testing.T, s *subject) {
			s.req.IPAddresses = []net.IP{net.IPv4(10, 42, 0, 10)}
			s.node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.42.0.10"}}
		}, denied, "it requests the address 10.42.0.10, the machine's address in the cloud is 10.42.0.20"},
		{"the name of a service", func(_ *testing.T, s *subject) { s.req.DNSNames = []string{"w", "kubernetes.default.svc"} }, denied, `it requests the name "kubernetes.default.svc", the machine's name in the cloud is w`},
		{"a name with a star", func(_ *testing.T, s *subject) { s.req.DNSNames = []string{"*"} }, denied, `it requests the name "*", the machine's name in the cloud is w`},
		{"a Node that claims another machine", func(_ *testing.T, s *subject) {
			s.sky.instances["sandbox://t/v"] = cloud.Instance{Name: "v", ProviderID: "sandbox://t/v", IP: netip.MustParseAddr("10.42.0.10"), State: cloud.Ready}
			s.node.Spec.ProviderID = "sandbox://t/v"
			s.req.IPAddresses = []net.IP{net.IPv4(10, 42, 0, 10)}
		}, denied, "machine sandbox://t/v is called v, so it is not Node w"},

		{"no Node yet", func(_ *testing.T, s *subject) { s.node = nil }, undecided, "there is no Node w"},
		{"a Node without a machine", func(_ *testing.T, s *subject) { s.node.Spec.ProviderID = "" }, undecided, "Node w has no providerID, so its machine cannot be found"},
		{"a machine that the cloud does not find", func(_ *testing.T, s *subject) { delete(s.sky.instances, id) }, undecided, "the cloud does not find machine sandbox://t/w"},
		{"a cloud that does not answer", func(_ *testing.T, s *subject) { s.sky.err = cloud.ErrUnavailable }, undecided, "the cloud returns no data about machine sandbox://t/w: cloud unavailable"},
		{"a machine that is being deleted", func(_ *testing.T, s *subject) { is(s, func(i *cloud.Instance) { i.State = cloud.Terminating }) }, undecided, "machine sandbox://t/w is being deleted"},
		{"a deleted machine", func(_ *testing.T, s *subject) { is(s, func(i *cloud.Instance) { i.State = cloud.Terminated }) }, undecided, "machine sandbox://t/w is being deleted"},
		{"a machine whose address is not known yet", func(_ *testing.T, s *subject) { is(s, func(i *cloud.Instance) { i.IP = netip.Addr{} }) }, undecided, "the cloud returns no address of machine sandbox://t/w"},
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
