package joinservice

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"constellation/assets"
	"constellation/assets/render"
	"constellation/engine/atls"
	"constellation/engine/atls/flood"
	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/attestation/keyprocess"
	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/component"
	"constellation/engine/kms"
	"constellation/engine/kubeadm"
	"constellation/engine/registry"
	"constellation/engine/release/releasetest"
	"constellation/engine/revocation"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/internal/syncbuffer"
	"constellation/internal/testneeds"
	"constellation/joinservice/joinproto"
	"constellation/operator/api/v1alpha1"
)

func TestMain(m *testing.M) {
	flood.Child()
	klog.SetLogger(logr.Discard()) // client-go logs what a test provokes
	os.Exit(controlplanetest.Run(m))
}

const namespace = "constellation-system"

var (
	clusterID = bytes.Repeat([]byte{7}, 32)
	uid       = "0b8e5b1c-uid"

	goodBoot = []attestation.MeasuredEvent{{PCR: 4, Digest: digest("boot loader v1.1.0"), Description: "boot loader"}}
	nextBoot = []attestation.MeasuredEvent{{PCR: 4, Digest: digest("boot loader v1.2.0"), Description: "boot loader"}}

	workerList = component.List{
		{Name: "kubeadm", URL: "http://10.42.0.1:8080/v1.35.4/kubeadm", Digest: "sha256:" + strings.Repeat("a", 64), Path: "/usr/local/bin/kubeadm"},
		{Name: "kubelet", URL: "http://10.42.0.1:8080/v1.35.4/kubelet", Digest: "sha256:" + strings.Repeat("b", 64), Path: "/usr/local/bin/kubelet"},
	}
	controlPlaneList = append(slices.Clone(workerList), component.Component{
		Name: "patch", URL: "data:,x", Digest: "sha256:" + strings.Repeat("c", 64), Path: "/etc/kubernetes/patch",
	})
)

func digest(s string) []byte {
	d := sha256.Sum256([]byte(s))
	return d[:]
}

func reference(l component.List) string {
	return "k8s-components-" + strings.ReplaceAll(l.Digest(), ":", "-")
}

// site is a cluster with its cloud: a real API server with kinds and chart installed, and the
// cloud's instances.
type site struct {
	t     testing.TB
	cp    *controlplane.ControlPlane
	admin kubernetes.Interface
	kinds dynamic.Interface
	ca    *attestationtest.CA
	roots string
	caKey string
	sky   *sky
	// method and list are those of enrolled machines; zero: the machines are those of sky.
	method attestation.Method
	list   metadata
	// registrySecret is that of services that run starts.
	registrySecret string
	// spares says that they know spares.
	spares bool
	// certifier is the socket of their certifier.
	certifier string
	// kms is the socket of their key service.
	kms string
	// rotation is that of the certifier's keys in join-config.
	rotation string
	// generation is that of the key service in join-config.
	generation string
	// fingerprint and mode are those of an encryption that an upgrade brings.
	fingerprint, mode string
}

// sky is the cloud's metadata.
type sky struct {
	mu        sync.Mutex
	instances []cloud.Instance
	err       error
	calls     int
}

func (s *sky) Peers(context.Context) ([]cloud.Instance, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	return slices.Clone(s.instances), s.err
}

func (s *sky) LoadBalancer(context.Context) (string, error) { return "10.42.0.1", nil }

func (s *sky) set(f func(*sky)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s)
}

// machine creates an instance in the cloud, and the issuer of its evidence.
func (s *site) machine(name string, role cloud.Role, boot []attestation.MeasuredEvent, member []byte) (attestation.Identity, attestation.Issuer) {
	s.t.Helper()
	var id attestation.Identity
	s.sky.set(func(k *sky) {
		n := len(k.instances) + 10
		id = attestation.Identity{
			Name: name, ProviderID: "sandbox://test/" + name, UID: uid, Group: "sandboxes/test/groups/workers", Role: role,
			IP: netip.AddrFrom4([4]byte{10, 42, byte(n >> 8), byte(n)}),
		}
		if role == cloud.ControlPlane {
			id.Group = "sandboxes/test/groups/control-plane"
		}
		k.instances = append(k.instances, cloud.Instance{
			Name: name, ProviderID: id.ProviderID, Group: id.Group, Role: role, IP: id.IP, State: cloud.Ready,
		})
	})
	return id, s.issuer(id, boot, member)
}

func (s *site) issuer(id attestation.Identity, boot []attestation.MeasuredEvent, member []byte) attestation.Issuer {
	s.t.Helper()
	i, err := attestationtest.NewSoftwareIssuer(s.ca, id, boot, member)
	if err != nil {
		s.t.Fatal(err)
	}
	return i
}

// withChart installs the CRDs and the chart of the join service.
var withChart = controlplanetest.Setup{Name: "chart", Run: func(ctx context.Context, cp *controlplane.ControlPlane) error {
	crds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		return err
	}
	chart, err := render.Chart("constellation-services", "v1.1.0", namespace, providers.LocalValues(), map[string]any{"release": "v1.1.0", "joinservice": map[string]any{"registrySecret": registry.SecretName, "inventory": "constellation-machines", "kms": kms.KeysSocket}})
	if err != nil {
		return err
	}
	manifests := [][]byte{[]byte("{apiVersion: v1, kind: Namespace, metadata: {name: " + namespace + "}}")}
	for _, f := range crds {
		manifests = append(manifests, f.Data)
	}
	for _, m := range append(manifests, chart) {
		if err := cp.Apply(ctx, m); err != nil {
			return err
		}
	}
	return nil
}}

func newSite(t testing.TB) *site {
	t.Helper()
	cp := controlplanetest.Lend(t.(controlplanetest.T), controlplane.Options{}, withChart)
	s := &site{t: t, cp: cp, sky: &sky{}, admin: kubernetes.NewForConfigOrDie(cp.Config()), kinds: dynamic.NewForConfigOrDie(cp.Config())}
	certPEM, keyPEM, err := attestationtest.CreateCA("test")
	if err != nil {
		t.Fatal(err)
	}
	if s.ca, err = attestationtest.ParseCA(certPEM, keyPEM); err != nil {
		t.Fatal(err)
	}
	s.roots, s.caKey = string(certPEM), string(keyPEM)
	s.publish(workerList)
	s.publish(controlPlaneList)
	if err := cp.Apply(t.Context(), []byte(`{apiVersion: update.edgeless.systems/v1alpha1, kind: NodeVersion, metadata: {name: constellation-version}, spec: {image: i,
		imageVersion: v1.1.0, kubernetesClusterVersion: v1.36.3, kubernetesComponentsReference: k8s-components-sha256-`+strings.Repeat("f", 64)+`}}`)); err != nil {
		t.Fatal(err)
	}
	s.joinComponents(reference(controlPlaneList), reference(workerList))
	s.joinConfig(goodBoot)
	return s
}

func (s *site) publish(l component.List) {
	s.t.Helper()
	b, err := json.Marshal(l)
	if err != nil {
		s.t.Fatal(err)
	}
	yes := true
	_, err = s.admin.CoreV1().ConfigMaps("kube-system").Create(s.t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: reference(l), Annotations: map[string]string{v1alpha1.AnnotationStatement: releasetest.Vouch(s.t, "v1.35.4", l)}}, Immutable: &yes,
		Data: map[string]string{"components": string(b), "cluster-version": "v1.35.4"},
	}, metav1.CreateOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) joinComponents(controlPlane, worker string) {
	s.t.Helper()
	r := s.kinds.Resource(v1alpha1.GroupVersion.WithResource("nodeversions"))
	patch := fmt.Sprintf(`{"status":{"joinComponents":{"controlPlane":%q,"worker":%q}}}`, controlPlane, worker)
	if _, err := r.Patch(s.t.Context(), v1alpha1.NodeVersionName, "application/merge-patch+json", []byte(patch), metav1.PatchOptions{}, "status"); err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) joinConfig(boot []attestation.MeasuredEvent) {
	s.t.Helper()
	s.rawJoinConfig(s.demand(boot), nil)
}

// demand has the attestation requirements of one image.
func (s *site) demand(boot []attestation.MeasuredEvent) string {
	s.t.Helper()
	m, err := json.Marshal(map[string]any{"variant": "tpm2", "measurements": attestation.Enforced(attestation.PredictPCRs(boot))})
	if err != nil {
		s.t.Fatal(err)
	}
	return string(m)
}

// rawJoinConfig publishes the newest requirements and generations by image.
func (s *site) rawJoinConfig(attestationConfig string, generations map[string]string) {
	s.t.Helper()
	data := map[string]string{"attestationConfig": attestationConfig, "clusterID": hex.EncodeToString(clusterID), "trustRoots": s.roots}
	if s.rotation != "" {
		data[keyRotation] = s.rotation
	}
	if s.generation != "" {
		data[kms.GenerationKey] = s.generation
	}
	if s.fingerprint != "" {
		data[kms.FingerprintKey], data[kms.ModeKey] = s.fingerprint, s.mode
	}
	for image, g := range generations {
		data["attestationConfig."+image] = g
	}
	b, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": "join-config", "namespace": "kube-system"},
		"data": data,
	})
	if err != nil {
		s.t.Fatal(err)
	}
	if err := s.cp.Apply(s.t.Context(), b); err != nil {
		s.t.Fatal(err)
	}
}

// replica is one join service that runs with exactly the chart's permissions.
type replica struct {
	*Server
	addr   string
	health string
	log    *syncbuffer.Buffer
	stop   func()
	// writes counts what it changed in the API server.
	writes *atomic.Int64
	// socket is that of its CA signer, which stopSigner ends, and signed is the log of that.
	socket     string
	stopSigner func()
	signed     syncbuffer.Buffer
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (s *site) access() *rest.Config {
	s.t.Helper()
	cfg, err := s.cp.ConfigFor("system:serviceaccount:"+namespace+":joinservice", "system:serviceaccounts", "system:serviceaccounts:"+namespace, "system:authenticated")
	if err != nil {
		s.t.Fatal(err)
	}
	return cfg
}

// start runs a join service on a control plane called name.
func (s *site) start(name string) *replica {
	s.t.Helper()
	_, issuer := s.machine(name, cloud.ControlPlane, goodBoot, clusterID)
	return s.run(issuer, "127.0.0.1:0")
}

// run runs a join service that listens on addr and is ready.
func (s *site) run(issuer attestation.Issuer, addr string) *replica {
	s.t.Helper()
	r := &replica{log: &syncbuffer.Buffer{}, writes: &atomic.Int64{}}
	cfg := s.access()
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(req *http.Request) (*http.Response, error) {
			if req.Method != http.MethodGet {
				r.writes.Add(1)
			}
			return next.RoundTrip(req)
		})
	})
	var err error
	method, list := s.method, s.list
	if list == nil {
		method, list = attestation.TPMMethod(), s.sky
	}
	access := Access{Cluster: cfg, Namespace: namespace, Metadata: list, Attestation: method, Spares: s.spares, Log: slog.New(slog.NewJSONHandler(r.log, nil))}
	beside := access
	beside.Cluster = s.access() // what it writes does not count
	beside.Log = slog.New(slog.NewJSONHandler(&r.signed, nil))
	r.socket, r.stopSigner = runSigner(s.t, SignerConfig{Access: beside, Issuer: issuer, PKI: s.cp.PKI(), APIServerPort: 6443, Certifier: s.certifier, KMS: s.kms})
	r.Server, err = New(Config{
		Access: access, Signer: r.socket, APIServerPort: 6443,
		RegistrySecret: s.registrySecret, Certifier: s.certifier != "", KMS: s.kms != "", certifierPoll: 50 * time.Millisecond, kmsPoll: 50 * time.Millisecond,
	})
	if err != nil {
		s.t.Fatal(err)
	}
	var ls [2]net.Listener
	for i, a := range []string{addr, "127.0.0.1:0"} {
		if ls[i], err = net.Listen("tcp", a); err != nil {
			s.t.Fatal(err)
		}
	}
	r.addr, r.health = ls[0].Addr().String(), "http://"+ls[1].Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx, ls[0], ls[1]) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			s.t.Errorf("join service ended: %v", err)
		}
	})
	s.t.Cleanup(func() {
		r.stop()
		if s.t.Failed() && testing.Verbose() {
			s.t.Logf("log of the join service:\n%s\nlog of its CA signer:\n%s", r.log, &r.signed)
		}
	})
	eventually(s.t, "ready", func() (string, bool) {
		resp, err := http.Get(r.health + "/readyz")
		if err != nil {
			return err.Error(), false
		}
		resp.Body.Close()
		return resp.Status, resp.StatusCode == http.StatusOK
	})
	return r
}

// runSigner runs a CA signer until stop is called, or the test ends.
func runSigner(t testing.TB, c SignerConfig) (socket string, stop func()) {
	t.Helper()
	dir, err := os.MkdirTemp("", "signer") // a short path, for the socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	signer, err := NewSigner(c)
	if err != nil {
		t.Fatal(err)
	}
	socket = dir + "/signer.sock"
	l, err := keyprocess.Listen(t.Context(), socket, c.Log)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- signer.Run(ctx, l) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("CA signer ended: %v", err)
		}
	})
	t.Cleanup(stop)
	return socket, stop
}

func eventually(t testing.TB, what string, holds func() (string, bool)) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		is, ok := holds()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not so after 20 s; it is: %s", what, is)
		}
	}
}

// dial connects as a machine that trusts members of this cluster's control plane.
func (s *site) dial(addr string, issuer attestation.Issuer) joinproto.JoinServiceClient {
	s.t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(s.credentials(issuer)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 15 * time.Second, Timeout: 10 * time.Second}))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { conn.Close() })
	return joinproto.NewJoinServiceClient(conn)
}

func (s *site) credentials(issuer attestation.Issuer) credentials.TransportCredentials {
	v := attestation.NewTPMValidator(s.ca.Roots(), attestation.Enforced(attestation.PredictPCRs(goodBoot)),
		attestation.Options{PCR15: attestation.PCR15Member(), Role: cloud.ControlPlane})
	return atls.NewClient(atls.Config{Purpose: atls.PurposeJoin, Issuer: issuer, Validator: func() attestation.Validator { return v }})
}

// ask requests a ticket for id over a connection of its own.
func (s *site) ask(addr string, id attestation.Identity, issuer attestation.Issuer) (*joinproto.IssueJoinTicketResponse, error) {
	s.t.Helper()
	return request(s.t, s.dial(addr, issuer), id, issuer)
}

// request asks for a ticket as bootstrappers do: the secrets of control planes are encrypted on the way.
func request(t testing.TB, c joinproto.JoinServiceClient, id attestation.Identity, issuer attestation.Issuer) (*joinproto.IssueJoinTicketResponse, error) {
	t.Helper()
	req := &joinproto.IssueJoinTicketRequest{CertificateRequest: csr(t, id, p256(t), nil)}
	if id.Role != cloud.ControlPlane {
		return c.IssueJoinTicket(t.Context(), req)
	}
	key, err := joinproto.NewSealing(t.Context(), issuer.Issue)
	if err != nil {
		return nil, err
	}
	key.Ask(req)
	got, err := c.IssueJoinTicket(t.Context(), req)
	if err != nil {
		return nil, err
	}
	if n := len(got.GetControlPlaneFiles()) + len(got.GetCertifierKeys()) + len(got.GetKmsKeys()); n > 0 {
		t.Errorf("the ticket of %s has %d secrets without encryption", id.Name, n)
	}
	return got, key.Open(got)
}

// refused fails the test unless err has the code and, if it is transient, a retry delay.
func refused(t *testing.T, err error, want codes.Code, text string) {
	t.Helper()
	st := status.Convert(err)
	if st.Code() != want || !strings.Contains(st.Message(), text) {
		t.Errorf("answer %v, want %v with %q", err, want, text)
	}
	if want != codes.Unavailable && want != codes.ResourceExhausted {
		return
	}
	for _, d := range st.Details() {
		if r, ok := d.(*errdetails.RetryInfo); ok && r.GetRetryDelay().AsDuration() > 0 {
			return
		}
	}
	t.Errorf("answer %v has no retry delay", err)
}

// noted returns the JoiningNode of a machine, nil if there is none.
func (s *site) noted(name string) *v1alpha1.JoiningNode {
	s.t.Helper()
	o, err := s.kinds.Resource(v1alpha1.GroupVersion.WithResource("joiningnodes")).Get(s.t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		s.t.Fatal(err)
	}
	b, err := o.MarshalJSON()
	if err != nil {
		s.t.Fatal(err)
	}
	var jn v1alpha1.JoiningNode
	if err := json.Unmarshal(b, &jn); err != nil {
		s.t.Fatal(err)
	}
	return &jn
}

// token returns the Secret of a machine's token, nil if there is none.
func (s *site) token(name string) *corev1.Secret {
	s.t.Helper()
	o, err := s.admin.CoreV1().Secrets("kube-system").Get(s.t.Context(), revocation.TokenSecret(name), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return o
}

// authenticates returns the user as which the API server authenticates the token.
func (s *site) authenticates(token string) (authenticationv1.UserInfo, error) {
	s.t.Helper()
	cfg := s.cp.Config()
	cfg.CertData, cfg.KeyData, cfg.BearerToken = nil, nil, token
	r, err := kubernetes.NewForConfigOrDie(cfg).AuthenticationV1().SelfSubjectReviews().Create(s.t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		return authenticationv1.UserInfo{}, err
	}
	return r.Status.UserInfo, nil
}

// TestJoinService runs its parts on one API server.
func TestJoinService(t *testing.T) {
	t.Parallel() // with the test that waits for a silent machine
	s := newSite(t)
	r := s.start("control-plane-0")
	for _, part := range []struct {
		name string
		run  func(*testing.T, *site, *replica)
	}{
		{"concurrent requests give the join turn to one node", turnHasOneWinner},
		{"a worker's ticket has no control plane secrets", workerTicket},
		{"a repeated request is safe", ticketAgain},
		{"a lost reply is repeatable", replyCut},
		{"another machine's token is not replaced", tokenTaken},
		{"a policy that refuses the token is named", tokenRefused},
		{"control planes join one at a time", controlPlanes},
		{"tickets match the cloud's data", impostors},
		{"a machine that is bound to leave gets no ticket", leavers},
		{"a revoked machine gets no ticket, by its name or by its ID", revokedMachines},
		{"a machine that is revoked while its ticket is made keeps no token", revokedMeanwhile},
		{"a revoked machine gets no handshake", revokedAddress},
		{"transient refusals have a retry delay", passing},
		{"measurements change without a restart", measurementsChange},
		{"reports become bounded lines", reports},
		{"a claimed machine may report and nothing else", claimedMachine},
		{"a spare gets a ticket while it is assigned", spareMachines},
		{"a join continues after a restart", restarts},
		{"a statement that is published after its list is served", statements},
		{"tickets have the registry", registries},
		{"published components are not read from a stale watch", watchBehind},
		{"a graceful shutdown finishes requests", politeStop},
	} {
		t.Run(part.name, func(t *testing.T) {
			inner := *s
			inner.t = t
			part.run(t, &inner, r)
		})
	}
}

// tokenRefused has an admission policy refuse a token: the error is that of the policy, and not
// that another machine has the token.
func tokenRefused(t *testing.T, s *site, r *replica) {
	id, _ := s.machine("refused-0", cloud.Worker, goodBoot, nil)
	for _, m := range []string{
		`{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicy, metadata: {name: refuses-one}, spec: {failurePolicy: Fail,
		matchConstraints: {resourceRules: [{apiGroups: [""], apiVersions: [v1], resources: [secrets], operations: [CREATE, UPDATE]}]},
		validations: [{expression: "request.name != '` + revocation.TokenSecret("refused-0") + `'", message: no token for this machine}]}}`,
		`{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicyBinding, metadata: {name: refuses-one}, spec: {policyName: refuses-one, validationActions: [Deny]}}`,
	} {
		if err := s.cp.Apply(t.Context(), []byte(m)); err != nil {
			t.Fatal(err)
		}
	}
	var err error
	eventually(t, "the policy is enforced", func() (string, bool) {
		_, err = r.kube.putToken(t.Context(), id, time.Now().Add(tokenTTL))
		return "accepted", err != nil
	})
	if errors.Is(err, errTokenTaken) || !strings.Contains(err.Error(), "refuses-one") {
		t.Errorf("refused with %v", err)
	}
}

func workerTicket(t *testing.T, s *site, r *replica) {
	id, issuer := s.machine("worker-0", cloud.Worker, goodBoot, nil)
	before := r.writes.Load()
	key := p256(t)
	var p peer.Peer
	got, err := s.dial(r.addr, issuer).IssueJoinTicket(t.Context(), &joinproto.IssueJoinTicketRequest{CertificateRequest: csr(t, id, key, nil)}, grpc.Peer(&p))
	if err != nil {
		t.Fatal(err)
	}
	if n := r.writes.Load() - before; n > 2 {
		t.Errorf("%d writes for a ticket, want at most 2", n)
	}
	// The joiner has verified that it talks to a member of the ticket's cluster.
	st, ok := atls.PeerStatement(peer.NewContext(t.Context(), &p))
	if !ok || !bytes.Equal(st.PCRs[15], attestation.ClusterIDPCR(got.GetClusterId())) || !bytes.Equal(got.GetClusterId(), clusterID) {
		t.Errorf("cluster ID %x is not that of the join service", got.GetClusterId())
	}
	if len(got.GetControlPlaneFiles()) != 0 || got.GetTurnExpires() != nil {
		t.Error("a worker got files of control planes")
	}
	if got.GetApiServerEndpoint() != "10.42.0.1:6443" || got.GetKubernetesVersion() != "v1.35.4" || got.GetComponentsReference() != reference(workerList) {
		t.Errorf("endpoint %s, version %s, components %s", got.GetApiServerEndpoint(), got.GetKubernetesVersion(), got.GetComponentsReference())
	}
	if l, err := component.FromProto(got.GetComponents()); err != nil || l.Digest() != workerList.Digest() {
		t.Errorf("components differ from the published ones: %v, %v", l, err)
	}
	if got.GetComponentsStatement() != releasetest.Vouch(t, "v1.35.4", workerList) {
		t.Errorf("statement %q", got.GetComponentsStatement())
	}
	ca, err := os.ReadFile(s.cp.PKI() + "/ca.crt")
	if err != nil {
		t.Fatal(err)
	}
	cert := certificate(t, got.GetKubeletCertificate())
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	if _, err := cert.Verify(x509.VerifyOptions{Roots: roots, DNSName: "worker-0"}); err != nil || !key.PublicKey.Equal(cert.PublicKey) {
		t.Errorf("kubelet certificate: %v", err)
	}
	pin := sha256.Sum256(certificate(t, ca).RawSubjectPublicKeyInfo)
	if got.GetDiscoveryTokenCaCertHash() != "sha256:"+hex.EncodeToString(pin[:]) {
		t.Errorf("CA pin %s", got.GetDiscoveryTokenCaCertHash())
	}

	var user authenticationv1.UserInfo
	eventually(t, "the API server accepts the token", func() (string, bool) {
		var err error
		user, err = s.authenticates(got.GetToken())
		return fmt.Sprint(err), err == nil
	})
	if !slices.Contains(user.Groups, kubeadm.JoinGroup) {
		t.Errorf("the token's groups are %v", user.Groups)
	}
	secret := s.token("worker-0")
	expires, err := time.Parse(time.RFC3339, string(secret.Data["expiration"]))
	if left := time.Until(expires); err != nil || left > tokenTTL || left < tokenTTL-time.Minute {
		t.Errorf("the token expires in %v (%v), want at most %v", left, err, tokenTTL)
	}
	jn := s.noted("worker-0")
	if jn == nil || jn.Spec.IsControlPlane || jn.Spec.ComponentsReference != reference(workerList) || jn.Spec.ProviderID != id.ProviderID || jn.Spec.Deadline == nil {
		t.Errorf("JoiningNode %+v", jn)
	}
	if l := r.log.String(); strings.Contains(l, got.GetToken()) || strings.Contains(l, strings.Split(got.GetToken(), ".")[1]) {
		t.Error("the token is in the log")
	}

	// When the join is reported done, the token is gone.
	c := s.dial(r.addr, issuer)
	stream, err := c.Report(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&joinproto.ReportRequest{Step: "kubeadm-join", State: "done"}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.CloseAndRecv(); err != nil {
		t.Fatal(err)
	}
	if s.token("worker-0") != nil {
		t.Error("the token outlived the join")
	}
}

func ticketAgain(t *testing.T, s *site, r *replica) {
	id, issuer := s.machine("worker-1", cloud.Worker, goodBoot, nil)
	first, err := s.ask(r.addr, id, issuer)
	if err != nil {
		t.Fatal(err)
	}
	uid := s.noted("worker-1").UID
	// All at once, and through another replica too.
	other := s.start("control-plane-8")
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			if _, err := s.ask([]string{r.addr, other.addr}[i%2], id, issuer); err != nil {
				t.Errorf("again: %v", err)
			}
		})
	}
	wg.Wait()
	last, err := s.ask(r.addr, id, issuer)
	if err != nil {
		t.Fatal(err)
	}
	if s.noted("worker-1").UID != uid {
		t.Error("there was a second JoiningNode")
	}
	// The API server has a cache of tokens.
	eventually(t, "the API server accepts the last token", func() (string, bool) {
		_, err := s.authenticates(last.GetToken())
		return fmt.Sprint(err), err == nil
	})
	if _, err := s.authenticates(first.GetToken()); err == nil {
		t.Error("two tokens of one machine are valid")
	}
	other.stop()
}

// replyCut loses the ticket after the service has issued it, like a broken connection.
func replyCut(t *testing.T, s *site, r *replica) {
	id, issuer := s.machine("worker-2", cloud.Worker, goodBoot, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	notes := s.kinds.Resource(v1alpha1.GroupVersion.WithResource("joiningnodes"))
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", r.addr)
			if err != nil {
				in.Close()
				return
			}
			go func() { _, _ = io.Copy(out, in) }()
			go func() {
				// The handshake passes; the answer, which follows the note, is lost.
				buf := make([]byte, 32<<10)
				for {
					n, err := out.Read(buf)
					_, missing := notes.Get(context.Background(), "worker-2", metav1.GetOptions{})
					if err != nil || missing == nil {
						in.Close()
						out.Close()
						return
					}
					if _, err := in.Write(buf[:n]); err != nil {
						return
					}
				}
			}()
		}
	}()
	if _, err := s.ask(l.Addr().String(), id, issuer); err == nil {
		t.Fatal("the cut reply arrived")
	}
	if s.noted("worker-2") == nil {
		t.Fatal("nothing was cut: the service had issued no ticket")
	}
	got, err := s.ask(r.addr, id, issuer)
	if err != nil {
		t.Fatalf("again after the cut: %v", err)
	}
	eventually(t, "the API server accepts the token", func() (string, bool) {
		_, err := s.authenticates(got.GetToken())
		return fmt.Sprint(err), err == nil
	})
}

// tokenTaken is two machines whose names give the same six characters.
func tokenTaken(t *testing.T, s *site, r *replica) {
	for i, annotations := range []map[string]string{{tokenNode: "worker-77"}, nil} {
		id, issuer := s.machine(fmt.Sprintf("worker-2%d", i), cloud.Worker, goodBoot, nil)
		theirs := &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: revocation.TokenSecret(id.Name), Annotations: annotations},
			Type:       corev1.SecretTypeBootstrapToken,
			StringData: map[string]string{"token-id": kubeadm.TokenID(id.Name), "token-secret": "0123456789abcdef", "expiration": "2036-11-21T08:00:00Z"},
		}
		if _, err := s.admin.CoreV1().Secrets("kube-system").Create(t.Context(), theirs, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		_, err := s.ask(r.addr, id, issuer)
		refused(t, err, codes.Unavailable, "used by another machine")
		if got := s.token(id.Name); string(got.Data["token-secret"]) != "0123456789abcdef" {
			t.Error("the other machine's token was changed")
		}
		if err := s.admin.CoreV1().Secrets("kube-system").Delete(t.Context(), theirs.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := s.ask(r.addr, id, issuer); err != nil {
			t.Errorf("after its deletion: %v", err)
		}
	}
}

func controlPlanes(t *testing.T, s *site, r *replica) {
	id1, issuer1 := s.machine("control-plane-1", cloud.ControlPlane, goodBoot, nil)
	id2, issuer2 := s.machine("control-plane-2", cloud.ControlPlane, goodBoot, nil)
	c1 := s.dial(r.addr, issuer1)
	got, err := request(t, c1, id1, issuer1)
	if err != nil {
		t.Fatal(err)
	}
	if got.GetComponentsReference() != reference(controlPlaneList) {
		t.Errorf("components %s are not those of control planes", got.GetComponentsReference())
	}
	if left := time.Until(got.GetTurnExpires().AsTime()); left <= 0 || left > turnDuration {
		t.Errorf("the turn ends in %v", left)
	}
	var names []string
	for _, f := range got.GetControlPlaneFiles() {
		names = append(names, f.GetName())
		if want, err := os.ReadFile(s.cp.PKI() + "/" + f.GetName()); err != nil || !bytes.Equal(want, f.GetData()) {
			t.Errorf("%s differs from the cluster's (%v)", f.GetName(), err)
		}
	}
	if !slices.Equal(names, controlPlaneFiles) {
		t.Errorf("files %v", names)
	}
	// A refused control plane gets no token, note or key.
	_, err = s.ask(r.addr, id2, issuer2)
	refused(t, err, codes.Unavailable, "control plane control-plane-1 is joining")
	if s.token("control-plane-2") != nil || s.noted("control-plane-2") != nil {
		t.Error("a control plane got a ticket without the turn")
	}
	if _, err := request(t, c1, id1, issuer1); err != nil {
		t.Errorf("the holder asks again: %v", err)
	}
	stream, err := c1.Report(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&joinproto.ReportRequest{Step: "kubeadm-join", State: "running"}); err != nil {
		t.Fatal(err)
	}
	_, err = s.ask(r.addr, id2, issuer2)
	refused(t, err, codes.Unavailable, "control-plane-1 is joining")
	if err := stream.Send(&joinproto.ReportRequest{Step: "kubeadm-join", State: "done"}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.CloseAndRecv(); err != nil {
		t.Fatal(err)
	}
	c2 := s.dial(r.addr, issuer2)
	if _, err := request(t, c2, id2, issuer2); err != nil {
		t.Errorf("after the first has joined: %v", err)
	}
	// A failed join releases the turn as well.
	stream, err = c2.Report(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&joinproto.ReportRequest{Step: "install-components", State: "failed", Level: "error", Text: "no space left on device"}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.CloseAndRecv(); err != nil {
		t.Fatal(err)
	}
	if s.token("control-plane-2") == nil {
		t.Error("a failed join cannot be retried with its token")
	}
	id3, issuer3 := s.machine("control-plane-3", cloud.ControlPlane, goodBoot, nil)
	if _, err := s.ask(r.addr, id3, issuer3); err != nil {
		t.Errorf("after the second has failed: %v", err)
	}
	if err := r.turn.release(t.Context(), id3.Name); err != nil {
		t.Fatal(err)
	}
}

func impostors(t *testing.T, s *site, r *replica) {
	honest, _ := s.machine("worker-3", cloud.Worker, goodBoot, nil)
	certified := func(edit func(*attestation.Identity)) attestation.Issuer {
		id := honest
		edit(&id)
		return s.issuer(id, goodBoot, nil)
	}
	otherPEM, otherKey, err := attestationtest.CreateCA("other")
	if err != nil {
		t.Fatal(err)
	}
	other, err := attestationtest.ParseCA(otherPEM, otherKey)
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := attestationtest.NewSoftwareIssuer(other, honest, goodBoot, nil)
	if err != nil {
		t.Fatal(err)
	}
	own := s.issuer(honest, goodBoot, nil)
	request := func(edit func(*x509.CertificateRequest)) []byte { return csr(t, honest, p256(t), edit) }
	for _, tt := range []struct {
		name   string
		issuer attestation.Issuer
		csr    []byte
		code   codes.Code
		text   string
	}{
		// Evidence: refused in the handshake, before any request is read.
		{name: "no evidence at all", csr: request(nil), code: codes.Unavailable},
		{name: "another boot loader", issuer: s.issuer(honest, nextBoot, nil), csr: request(nil), code: codes.Unavailable, text: "measurements"},
		{name: "a boot that measured more", issuer: s.issuer(honest, append(slices.Clone(goodBoot), attestation.MeasuredEvent{PCR: 4, Digest: digest("x")}), nil), csr: request(nil), code: codes.Unavailable, text: "measurements"},
		{name: "a key certified by another cloud", issuer: foreign, csr: request(nil), code: codes.Unavailable},
		{name: "a member of another cluster", issuer: s.issuer(honest, goodBoot, bytes.Repeat([]byte{8}, 32)), csr: request(nil), code: codes.Unavailable},
		{name: "a machine of another project of the same cloud", issuer: certified(func(i *attestation.Identity) { i.UID = "other" }), csr: request(nil), code: codes.Unavailable},
		// The instance: the certified identity and the cloud's data must agree.
		{name: "a worker certified as control plane", issuer: certified(func(i *attestation.Identity) { i.Role = cloud.ControlPlane }), csr: request(nil), code: codes.PermissionDenied, text: "role of worker-3"},
		{name: "an address that is not its own", issuer: certified(func(i *attestation.Identity) { i.IP = netip.MustParseAddr("10.42.0.99") }), csr: request(nil), code: codes.PermissionDenied, text: "address of worker-3"},
		{name: "another instance under the name", issuer: certified(func(i *attestation.Identity) { i.ProviderID = "sandbox://test/worker-99" }), csr: request(nil), code: codes.PermissionDenied, text: "provider ID of worker-3"},
		{name: "another group", issuer: certified(func(i *attestation.Identity) { i.Group = "sandboxes/test/groups/gpu" }), csr: request(nil), code: codes.PermissionDenied, text: "group of worker-3"},
		{name: "an instance that the cloud does not list", issuer: certified(func(i *attestation.Identity) { i.Name = "worker-98" }), csr: request(nil), code: codes.Unavailable, text: "does not list this instance"},
		// The request: the caller can choose only the key.
		{name: "another node's certificate", issuer: own, csr: request(func(r *x509.CertificateRequest) { r.Subject.CommonName = "system:node:control-plane-0" }), code: codes.InvalidArgument, text: "subject"},
		{name: "the administrators' group", issuer: own, csr: request(func(r *x509.CertificateRequest) { r.Subject.Organization = []string{"system:masters"} }), code: codes.InvalidArgument, text: "subject"},
		{name: "the API server's address", issuer: own, csr: request(func(r *x509.CertificateRequest) { r.IPAddresses = []net.IP{{10, 96, 0, 1}} }), code: codes.InvalidArgument, text: "addresses"},
		{name: "another node's DNS name", issuer: own, csr: request(func(r *x509.CertificateRequest) { r.DNSNames = []string{"control-plane-0"} }), code: codes.InvalidArgument, text: "DNS names"},
		{name: "no request", issuer: own, code: codes.InvalidArgument, text: "PKCS"},
		{name: "a request as large as allowed", issuer: own, csr: make([]byte, maxMessage-100), code: codes.InvalidArgument, text: "PKCS"},
		{name: "a request larger than allowed", issuer: own, csr: make([]byte, maxMessage+1), code: codes.ResourceExhausted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := s.dial(r.addr, tt.issuer).IssueJoinTicket(t.Context(), &joinproto.IssueJoinTicketRequest{CertificateRequest: tt.csr})
			if st := status.Convert(err); st.Code() != tt.code || !strings.Contains(st.Message(), tt.text) {
				t.Errorf("answer %v, want %v with %q", err, tt.code, tt.text)
			}
		})
	}
	for _, name := range []string{"worker-3", "worker-98", "control-plane-0"} {
		if s.noted(name) != nil || s.token(name) != nil {
			t.Errorf("an impostor left a JoiningNode or a token of %s", name)
		}
	}
	// The honest machine is not blocked by requests in its name.
	if _, err := s.ask(r.addr, honest, own); err != nil {
		t.Errorf("the honest machine: %v", err)
	}
}

// bind creates an intent of the operator; goal Leave schedules its machine for removal.
func (s *site) bind(name string, goal v1alpha1.Goal, providerID string) (undo func()) {
	s.t.Helper()
	pn := fmt.Sprintf(`{apiVersion: update.edgeless.systems/v1alpha1, kind: PendingNode, metadata: {name: %s},
		spec: {groupID: sandboxes/test/groups/x, goal: %s, providerID: %q, token: t}}`, name, goal, providerID)
	if err := s.cp.Apply(s.t.Context(), []byte(pn)); err != nil {
		s.t.Fatal(err)
	}
	return func() {
		s.t.Helper()
		if err := s.kinds.Resource(v1alpha1.GroupVersion.WithResource("pendingnodes")).Delete(s.t.Context(), name, metav1.DeleteOptions{}); err != nil {
			s.t.Fatal(err)
		}
	}
}

func leavers(t *testing.T, s *site, r *replica) {
	worker, workerIssuer := s.machine("worker-l", cloud.Worker, goodBoot, nil)
	cp, cpIssuer := s.machine("control-plane-l", cloud.ControlPlane, goodBoot, nil)
	other, otherIssuer := s.machine("control-plane-m", cloud.ControlPlane, goodBoot, nil)

	// Its intent has the goal Join.
	free := s.bind("replace-1", v1alpha1.JoinGoal, worker.ProviderID)
	if _, err := s.ask(r.addr, worker, workerIssuer); err != nil {
		t.Errorf("a machine that is to join: %v", err)
	}
	free()
	// A control plane is refused at once, however far the watch lags.
	told := r.kube.pending
	staleIntents(r)
	free = s.bind("replace-2", v1alpha1.LeaveGoal, cp.ProviderID)
	_, err := s.ask(r.addr, cp, cpIssuer)
	refused(t, err, codes.FailedPrecondition, "this machine is scheduled for removal by PendingNode replace-2")
	if s.token(cp.Name) != nil || s.noted(cp.Name) != nil {
		t.Error("a machine that is bound to leave got a ticket")
	}
	r.kube.pending = told
	// It keeps asking, and blocks no other control plane.
	eventually(t, "another control plane's turn", func() (string, bool) {
		_, err := s.ask(r.addr, cp, cpIssuer)
		refused(t, err, codes.FailedPrecondition, "this machine is scheduled for removal")
		_, err = s.ask(r.addr, other, otherIssuer)
		return fmt.Sprint(err), err == nil
	})
	if err := r.turn.release(t.Context(), other.Name); err != nil {
		t.Error(err)
	}
	free()
	eventually(t, "the previous state", func() (string, bool) {
		_, err := s.ask(r.addr, cp, cpIssuer)
		return fmt.Sprint(err), err == nil
	})
	if err := r.turn.release(t.Context(), cp.Name); err != nil {
		t.Error(err)
	}
	// A worker is refused when the watch has caught up; some clouds vary the case of IDs.
	free = s.bind("replace-3", v1alpha1.LeaveGoal, strings.ToUpper(worker.ProviderID))
	defer free()
	eventually(t, "no ticket for the worker", func() (string, bool) {
		_, err = s.ask(r.addr, worker, workerIssuer)
		return fmt.Sprint(err), err != nil
	})
	refused(t, err, codes.FailedPrecondition, "this machine is scheduled for removal by PendingNode replace-3")
}

// staleIntents is a watch that never delivered an event.
func staleIntents(r *replica) {
	r.kube.pending = cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{byLeaver: func(any) ([]string, error) { return nil, nil }})
}

func passing(t *testing.T, s *site, r *replica) {
	id, issuer := s.machine("worker-4", cloud.Worker, goodBoot, nil)

	t.Run("nothing is published for the role", func(t *testing.T) {
		s.joinComponents(reference(controlPlaneList), "")
		eventually(t, "the change is observed", func() (string, bool) {
			_, err := s.ask(r.addr, id, issuer)
			return fmt.Sprint(err), status.Code(err) == codes.Unavailable
		})
		_, err := s.ask(r.addr, id, issuer)
		refused(t, err, codes.Unavailable, "no components are published yet for joining machines")
	})
	t.Run("published components do not match their name", func(t *testing.T) {
		forged := slices.Clone(workerList)
		forged[0].URL = "http://elsewhere/kubeadm"
		b, err := json.Marshal(workerList)
		if err != nil {
			t.Fatal(err)
		}
		_, err = s.admin.CoreV1().ConfigMaps("kube-system").Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: reference(forged)},
			Data:       map[string]string{"components": string(b), "cluster-version": "v1.35.4"},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		s.joinComponents(reference(controlPlaneList), reference(forged))
		eventually(t, "refused", func() (string, bool) {
			_, err := s.ask(r.addr, id, issuer)
			return fmt.Sprint(err), status.Code(err) == codes.FailedPrecondition
		})
		if s.token("worker-4") != nil {
			t.Error("a token was created without a ticket")
		}
		s.joinComponents(reference(controlPlaneList), reference(workerList))
		eventually(t, "accepted again", func() (string, bool) {
			_, err := s.ask(r.addr, id, issuer)
			return fmt.Sprint(err), err == nil
		})
	})
	t.Run("the cloud is unavailable", func(t *testing.T) {
		// A new one, so that no cache helps.
		id, issuer := s.machine("worker-10", cloud.Worker, goodBoot, nil)
		s.sky.set(func(k *sky) { k.err = fmt.Errorf("list: %w", cloud.ErrUnavailable) })
		_, err := s.ask(r.addr, id, issuer)
		refused(t, err, codes.Unavailable, "does not answer")
		s.sky.set(func(k *sky) { k.err = nil })
		if _, err := s.ask(r.addr, id, issuer); err != nil {
			t.Errorf("after the outage: %v", err)
		}
	})
	t.Run("the API server is unavailable", func(t *testing.T) {
		s.cp.StopAPIServer()
		_, err := s.ask(r.addr, id, issuer)
		refused(t, err, codes.Unavailable, "")
		if err := s.cp.StartAPIServer(t.Context()); err != nil {
			t.Fatal(err)
		}
		eventually(t, "tickets again", func() (string, bool) {
			_, err := s.ask(r.addr, id, issuer)
			return fmt.Sprint(err), err == nil
		})
	})
	t.Run("too many concurrent requests", func(t *testing.T) {
		for range concurrent {
			r.slots <- struct{}{}
		}
		_, err := s.ask(r.addr, id, issuer)
		for range concurrent {
			<-r.slots
		}
		refused(t, err, codes.ResourceExhausted, "too many machines")
	})
}

func measurementsChange(t *testing.T, s *site, r *replica) {
	oldID, oldIssuer := s.machine("worker-5", cloud.Worker, goodBoot, nil)
	newID, newIssuer := s.machine("worker-6", cloud.Worker, nextBoot, nil)
	if _, err := s.ask(r.addr, newID, newIssuer); err == nil {
		t.Fatal("the next image joined before its measurements were published")
	}
	s.joinConfig(nextBoot)
	eventually(t, "the next image joins", func() (string, bool) {
		_, err := s.ask(r.addr, newID, newIssuer)
		return fmt.Sprint(err), err == nil
	})
	if _, err := s.ask(r.addr, oldID, oldIssuer); err == nil {
		t.Error("the former image still joins")
	}
	// During an upgrade machines of either image join, and no others.
	otherID, otherIssuer := s.machine("worker-6b", cloud.Worker, []attestation.MeasuredEvent{{PCR: 4, Digest: digest("boot loader v1.3.0"), Description: "boot loader"}}, nil)
	s.rawJoinConfig(s.demand(nextBoot), map[string]string{"v1.1.0": s.demand(goodBoot), "v1.2.0": s.demand(nextBoot)})
	eventually(t, "the former image joins, too", func() (string, bool) {
		_, err := s.ask(r.addr, oldID, oldIssuer)
		return fmt.Sprint(err), err == nil
	})
	if _, err := s.ask(r.addr, newID, newIssuer); err != nil {
		t.Errorf("the next image beside the former one: %v", err)
	}
	if _, err := s.ask(r.addr, otherID, otherIssuer); err == nil {
		t.Error("an image of no generation joins")
	}
	// Each generation must be satisfied on its own.
	mixed := append(slices.Clone(nextBoot), attestation.MeasuredEvent{PCR: 9, Digest: digest("root of v1.2.0"), Description: "root"})
	former := append(slices.Clone(goodBoot), attestation.MeasuredEvent{PCR: 9, Digest: digest("root of v1.1.0"), Description: "root"})
	s.rawJoinConfig(s.demand(mixed), map[string]string{"v1.1.0": s.demand(former), "v1.2.0": s.demand(mixed)})
	crossID, crossIssuer := s.machine("worker-6c", cloud.Worker, append(slices.Clone(nextBoot), former[len(former)-1]), nil)
	eventually(t, "a mixture of two images is refused", func() (string, bool) {
		_, err := s.ask(r.addr, newID, newIssuer) // its PCR 9 is nothing by now
		return fmt.Sprint(err), err != nil
	})
	if _, err := s.ask(r.addr, crossID, crossIssuer); err == nil {
		t.Error("a mixture of two images joins")
	}
	s.joinConfig(nextBoot)
	eventually(t, "the former image is pruned", func() (string, bool) {
		_, err := s.ask(r.addr, newID, newIssuer)
		return fmt.Sprint(err), err == nil
	})
	if _, err := s.ask(r.addr, oldID, oldIssuer); err == nil {
		t.Error("the former image joins although it was pruned")
	}
	// An unusable join-config, or one that would accept every machine, leaves the last good
	// snapshot in place; also if only one of the generations is unusable.
	warns := fmt.Sprintf(`{"variant":"tpm2","measurements":{"4":{"expected":%q,"warnOnly":true},"9":{"expected":%[1]q,"warnOnly":true}}}`, strings.Repeat("ab", 32))
	for _, bad := range []string{"", "{", warns, `{"variant":"tpm2","measurements":{}}`, `{"variant":"dummy","measurements":{}}`, `{"variant":"tpm2","measurements":{"4":{"expected":"zz"}}}`} {
		for _, publish := range []func(){
			func() { s.rawJoinConfig(bad, nil) },
			func() { s.rawJoinConfig(s.demand(goodBoot), map[string]string{"v1.1.0": bad}) },
		} {
			before := strings.Count(r.log.String(), "join-config not usable")
			publish()
			eventually(t, "the unusable join-config is logged", func() (string, bool) {
				return bad, strings.Count(r.log.String(), "join-config not usable") > before
			})
			if _, err := s.ask(r.addr, newID, newIssuer); err != nil {
				t.Errorf("with join-config %q: %v", bad, err)
			}
			for id, issuer := range map[attestation.Identity]attestation.Issuer{oldID: oldIssuer, otherID: otherIssuer} {
				if _, err := s.ask(r.addr, id, issuer); err == nil {
					t.Errorf("join-config %q accepts %s", bad, id.Name)
				}
			}
		}
	}
	s.joinConfig(goodBoot)
	eventually(t, "the previous state", func() (string, bool) {
		_, err := s.ask(r.addr, oldID, oldIssuer)
		return fmt.Sprint(err), err == nil
	})
}

func reports(t *testing.T, s *site, r *replica) {
	_, issuer := s.machine("worker-7", cloud.Worker, goodBoot, nil)
	c := s.dial(r.addr, issuer)
	stream, err := c.Report(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	const flood = 3 * lineBurst
	for i := range flood {
		err := stream.Send(&joinproto.ReportRequest{
			Step: "kubeadm-join\x1b[2J", State: "running", Level: "warn",
			Text: "line " + strconv.Itoa(i) + "\n{\"level\":\"ERROR\",\"msg\":\"forged\"}\u202e" + strings.Repeat("x", 2*maxText),
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := stream.CloseAndRecv(); err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(r.log.String()) {
		var l struct{ Level, Msg, Node, Step, State, Text string }
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatalf("line %q is not JSON: %v", line, err)
		}
		if l.Node != "worker-7" || l.Msg != "node reported" {
			continue
		}
		n++
		if l.Level != "WARN" || l.State != "running" || strings.ContainsAny(l.Text+l.Step, "\n\x1b\u202e") || len(line) > 2*maxText {
			t.Fatalf("line of %d bytes: %q", len(line), line)
		}
	}
	if n < lineBurst || n > lineBurst+linesPerSecond*10 {
		t.Errorf("%d lines of %d were logged, want about %d", n, flood, lineBurst)
	}
}

func claimedMachine(t *testing.T, s *site, r *replica) {
	id, _ := s.machine("worker-8", cloud.Worker, goodBoot, nil)
	claimed := s.issuer(id, goodBoot, clusterID) // as after bootstrapper's claim
	c := s.dial(r.addr, claimed)
	_, err := c.IssueJoinTicket(t.Context(), &joinproto.IssueJoinTicketRequest{CertificateRequest: csr(t, id, p256(t), nil)})
	refused(t, err, codes.PermissionDenied, "already belongs to the cluster")
	if s.noted("worker-8") != nil || s.token("worker-8") != nil {
		t.Error("a used machine got a JoiningNode or a token")
	}
	stream, err := c.Report(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&joinproto.ReportRequest{Step: "kubeadm-join", State: "running", Text: "back again"}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.CloseAndRecv(); err != nil {
		t.Errorf("report of a claimed machine: %v", err)
	}
	if !strings.Contains(r.log.String(), "back again") {
		t.Error("its report is not in the log")
	}
}

func politeStop(t *testing.T, s *site, r *replica) {
	_, issuer := s.machine("worker-9", cloud.Worker, goodBoot, nil)
	stream, err := s.dial(r.addr, issuer).Report(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&joinproto.ReportRequest{Step: "kubeadm-join", State: "running", Text: "in the middle"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the line arrives", func() (string, bool) { return "absent", strings.Contains(r.log.String(), "in the middle") })
	start := time.Now()
	r.stop()
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("the stop took %v", took)
	}
	err = stream.RecvMsg(&joinproto.ReportResponse{})
	refused(t, err, codes.Unavailable, "stopping")
}

// TestDeadControlPlaneReleasesTurn needs real time: a machine that
// disappears is detected by the timeout.
func TestDeadControlPlaneReleasesTurn(t *testing.T) {
	testneeds.Time(t, "30 s, to detect a machine that stops reporting")
	t.Parallel()
	s := newSite(t)
	a, b := s.start("control-plane-0"), s.start("control-plane-1")
	id1, issuer1 := s.machine("control-plane-2", cloud.ControlPlane, goodBoot, nil)
	id2, issuer2 := s.machine("control-plane-3", cloud.ControlPlane, goodBoot, nil)
	wire := newWire(t, a.addr)
	c := s.dial(wire.addr, issuer1)
	if _, err := request(t, c, id1, issuer1); err != nil {
		t.Fatal(err)
	}
	stream, err := c.Report(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&joinproto.ReportRequest{Step: "kubeadm-join", State: "running"}); err != nil {
		t.Fatal(err)
	}
	// Alive, it keeps the turn.
	for start := time.Now(); time.Since(start) < 2*turnRenewal; time.Sleep(time.Second) {
		_, err := s.ask(b.addr, id2, issuer2)
		refused(t, err, codes.Unavailable, "control-plane-2 is joining")
	}
	wire.freeze()
	died := time.Now()
	for {
		_, err := s.ask(b.addr, id2, issuer2)
		if err == nil {
			break
		}
		if time.Since(died) > 30*time.Second {
			t.Fatalf("after 30 s: %v", err)
		}
		time.Sleep(turnRetry * 3 / 2)
	}
	t.Logf("taken over %v after the machine stopped reporting", time.Since(died).Round(time.Second))
}

// wire is a connection that can stall without being closed, as when the machine at its other
// end loses power.
type wire struct {
	addr   string
	frozen atomic.Bool
}

func newWire(t *testing.T, to string) *wire {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	w := &wire{addr: l.Addr().String()}
	carry := func(to, from net.Conn) {
		buf := make([]byte, 32<<10)
		for {
			n, err := from.Read(buf)
			if w.frozen.Load() {
				continue // read and lost; the end of either side is not passed on
			}
			if err != nil {
				return
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
	}
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				return
			}
			t.Cleanup(func() {
				w.frozen.Store(false)
				in.Close()
				out.Close()
			})
			go carry(out, in)
			go carry(in, out)
		}
	}()
	return w
}

func (w *wire) freeze() { w.frozen.Store(true) }

// turnHasOneWinner runs the code of TestTurn, which uses virtual time, against a real API
// server with the chart's permissions.
func turnHasOneWinner(t *testing.T, s *site, _ *replica) {
	k, err := newKube(s.access(), namespace)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	won := make(chan string, 20)
	for i := range 20 {
		wg.Go(func() {
			node := "control-plane-" + strconv.Itoa(i)
			_, err := newTurn(k).take(t.Context(), node)
			var held *turnHeldError
			switch {
			case err == nil:
				won <- node
			case !errors.As(err, &held):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(won) != 1 {
		t.Fatalf("%d control planes took the turn at once", len(won))
	}
	winner := <-won
	if err := newTurn(k).renew(t.Context(), winner); err != nil {
		t.Error(err)
	}
	if err := newTurn(k).release(t.Context(), winner); err != nil {
		t.Error(err)
	}
	if _, err := newTurn(k).take(t.Context(), "control-plane-99"); err != nil {
		t.Errorf("after the release: %v", err)
	}
	l, err := s.admin.CoordinationV1().Leases(namespace).Get(t.Context(), turnName, metav1.GetOptions{})
	if err != nil || *l.Spec.LeaseTransitions != 2 {
		t.Errorf("lease %+v, %v", l, err)
	}
	if err := newTurn(k).release(t.Context(), "control-plane-99"); err != nil {
		t.Error(err)
	}
}

func certificate(t testing.TB, data []byte) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode(data)
	if block == nil {
		t.Fatal("no PEM")
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return c
}
