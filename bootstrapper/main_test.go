package bootstrapper

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"constellation/bootstrapper/initproto"
	"constellation/engine/atls"
	"constellation/engine/atls/flood"
	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/engine/release/releasetest"
)

// The test binary plays two more parts: kubeadm, and a bootstrapper that is killed.
const (
	kubeadmEnv = "TEST_KUBEADM"
	processEnv = "TEST_BOOTSTRAPPER"
)

func TestMain(m *testing.M) {
	flood.Child()
	switch {
	case os.Getenv(kubeadmEnv) != "":
		os.Exit(scriptedKubeadm(os.Getenv(kubeadmEnv), os.Args[1:]))
	case os.Getenv(processEnv) != "":
		os.Exit(process(os.Getenv(processEnv)))
	case os.Getenv(certifierEnv) != "":
		os.Exit(certifierProcess(os.Getenv(certifierEnv)))
	}
	os.Exit(m.Run())
}

// scriptedKubeadm changes the file system below ctl/root as kubeadm changes a host, as far as
// these tests need. Files in ctl control it:
//
//	hang-<call>   it creates hanging-<call> and waits to be killed
//	fail-<call>   it fails with the exit code and the message of a line, once per line
//	preflight     its init fails with these errors, one per line
//
// Calls are recorded in ctl/calls, the directory of patches of a call in ctl/patches-<call>, and its
// tag of etcd's image in ctl/etcd-<call>.
func scriptedKubeadm(ctl string, args []string) int {
	root := filepath.Join(ctl, "root")
	at := func(name string) string { return filepath.Join(root, name) }
	put := func(name string, data []byte) {
		os.MkdirAll(filepath.Dir(at(name)), 0o755)
		if err := os.WriteFile(at(name), data, 0o600); err != nil {
			fmt.Println("error:", err)
		}
	}
	putKubelet := func() { // as kubeadm does: for everybody
		for _, name := range kubeletFiles {
			put(name, nil)
			if err := os.Chmod(at(name), 0o644); err != nil {
				fmt.Println("error:", err)
			}
		}
	}
	there := func(name string) bool { _, err := os.Stat(at(name)); return err == nil }

	var config string
	var words []string
	for _, a := range args {
		if f, ok := strings.CutPrefix(a, "--config="); ok {
			b, err := os.ReadFile(f)
			if err != nil {
				fmt.Println("error:", err)
				return 9
			}
			config = string(b)
		} else if !strings.HasPrefix(a, "-") {
			words = append(words, a)
		}
	}
	call := strings.Join(words, "-")
	if call == "version" {
		b, err := os.ReadFile(filepath.Join(ctl, "version"))
		if err != nil {
			b = []byte("v1.35.4")
		}
		fmt.Println(string(b))
		return 0
	}
	f, err := os.OpenFile(filepath.Join(ctl, "calls"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return 9
	}
	fmt.Fprintln(f, call)
	f.Close()
	if _, rest, ok := strings.Cut(config, "\npatches:\n  directory: "); ok {
		dir, _, _ := strings.Cut(rest, "\n")
		os.WriteFile(filepath.Join(ctl, "patches-"+call), []byte(dir), 0o600)
	}
	if _, rest, ok := strings.Cut(config, "- name: cloud-provider\n"); ok {
		value, _, _ := strings.Cut(strings.TrimSpace(rest), "\n")
		os.WriteFile(filepath.Join(ctl, "cloud-"+call), []byte(value), 0o600)
	}

	if _, rest, ok := strings.Cut(config, "\ncontrolPlaneEndpoint: "); ok {
		endpoint, _, _ := strings.Cut(rest, "\n")
		os.WriteFile(filepath.Join(ctl, "endpoint-"+call), []byte(endpoint), 0o600)
	}
	if _, rest, ok := strings.Cut(config, "\netcd:\n  local:\n    imageTag: "); ok {
		tag, _, _ := strings.Cut(rest, "\n")
		os.WriteFile(filepath.Join(ctl, "etcd-"+call), []byte(tag), 0o600)
	}

	// A second try without a reset fails because of these.
	if (call == "init" || call == "join") && there("etc/kubernetes/kubelet.conf") {
		fmt.Println("error execution phase preflight: [ERROR FileAvailable--etc-kubernetes-kubelet.conf]: it exists")
		return 2
	}
	serving := there("var/lib/kubelet/pki/kubelet-server.crt") && there("var/lib/kubelet/pki/kubelet-server.key")
	switch call {
	case "init-phase-certs-ca":
		if !there("etc/kubernetes/pki/ca.crt") {
			ca := newAuthority()
			put("etc/kubernetes/pki/ca.crt", ca.pem)
			put("etc/kubernetes/pki/ca.key", ca.keyPEM())
		}
	case "init":
		if !serving || !there("etc/kubernetes/constellation/audit.yaml") {
			fmt.Println("error: files are missing")
			return 9
		}
		fmt.Println("[preflight] Running pre-flight checks")
		fmt.Fprintln(os.Stderr, "\t[WARNING Service-Kubelet]: kubelet service is not enabled")
		if b, err := os.ReadFile(filepath.Join(ctl, "preflight")); err == nil {
			fmt.Fprintln(os.Stderr, "[preflight] Some fatal errors occurred:")
			for l := range strings.Lines(string(b)) {
				fmt.Fprintln(os.Stderr, "\t[ERROR ImagePull]: "+strings.TrimSpace(l))
			}
			fmt.Fprintln(os.Stderr, "[preflight] If you know what you are doing, you can make a check non-fatal with `--ignore-preflight-errors=...`")
			fmt.Fprintln(os.Stderr, "error: error execution phase preflight: preflight checks failed")
			return 1
		}
		fmt.Println("[certs] Using certificateDir folder")
		put("etc/kubernetes/kubelet.conf", nil)
		putKubelet()
		fmt.Println("[kubelet-start] Starting the kubelet")
	case "join":
		if !serving || strings.Contains(config, "controlPlane:") != there("etc/kubernetes/pki/ca.key") {
			fmt.Println("error: files are missing, or too many")
			return 9
		}
		fmt.Println("[preflight] Running pre-flight checks")
		put("etc/kubernetes/kubelet.conf", nil)
		putKubelet()
	case "reset":
		for _, name := range []string{"etc/kubernetes/pki", "etc/kubernetes/manifests", "etc/kubernetes/kubelet.conf", "etc/kubernetes/admin.conf", "var/lib/kubelet"} {
			os.RemoveAll(at(name))
		}
		fmt.Println("[reset] Stopping the kubelet service")
	}
	if _, err := os.Stat(filepath.Join(ctl, "hang-"+call)); err == nil {
		os.WriteFile(filepath.Join(ctl, "hanging-"+call), nil, 0o600)
		time.Sleep(time.Minute)
		return 9
	}
	if b, err := os.ReadFile(filepath.Join(ctl, "fail-"+call)); err == nil && len(b) > 0 {
		line, rest, _ := strings.Cut(string(b), "\n")
		code, words, _ := strings.Cut(line, " ")
		os.WriteFile(filepath.Join(ctl, "fail-"+call), []byte(rest), 0o600)
		fmt.Println("error execution phase " + call + ": scripted; the token was zyxwvu.9876543210zyxwvu " + words)
		fmt.Println(config)
		n := 0
		fmt.Sscan(code, &n)
		return n
	}
	if call == "init" {
		fmt.Println("[addons] Applied essential addon: kube-proxy")
		put("etc/kubernetes/admin.conf", []byte("kubeconfig with canary-admin-key"))
	}
	return 0
}

// kubeletFiles are what kubeadm writes for the kubelet.
var kubeletFiles = []string{"var/lib/kubelet/config.yaml", "var/lib/kubelet/kubeadm-flags.env"}

// hidden fails the test if others can read the kubelet's configuration.
func (r *rig) hidden() {
	r.t.Helper()
	for _, name := range kubeletFiles {
		if i, err := os.Stat(filepath.Join(r.m.Root, name)); err != nil || i.Mode() != 0o600 {
			r.t.Errorf("%s: %v, %v, want mode 0600", name, i, err)
		}
	}
}

// authority is a CA of a cluster.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority() authority {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	t := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		panic(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		panic(err)
	}
	return authority{cert, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

func (a authority) keyPEM() []byte {
	der, err := x509.MarshalECPrivateKey(a.key)
	if err != nil {
		panic(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
}

func (a authority) hash() string {
	s := sha256.Sum256(a.cert.RawSubjectPublicKeyInfo)
	return "sha256:" + hex.EncodeToString(s[:])
}

// sign signs a kubelet's serving certificate as the join service does.
func (a authority) sign(t testing.TB, csr []byte, change func(*x509.Certificate)) []byte {
	t.Helper()
	r, err := x509.ParseCertificateRequest(csr)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: r.Subject, DNSNames: r.DNSNames, IPAddresses: r.IPAddresses,
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
	}
	if change != nil {
		change(c)
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, r.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// softTPM is the part of a TPM that these tests use, with registers and matching evidence. The
// evidence has the real format and is judged by the real validator.
type softTPM struct {
	t      testing.TB
	ca     *attestationtest.CA
	id     attestation.Identity
	events []attestation.MeasuredEvent

	mu      sync.Mutex
	cluster []byte // value with which register 15 was extended; nil: zero
	broken  error  // result of extend
	extends int
}

func (s *softTPM) read(_ context.Context, indices ...uint32) (map[uint32][]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := attestation.PredictPCRs(s.events)
	out := map[uint32][]byte{}
	for _, i := range indices {
		out[i] = make([]byte, 32)
		if v, ok := all[i]; ok {
			out[i] = v
		}
		if i == clusterRegister && s.cluster != nil {
			out[i] = attestation.ClusterIDPCR(s.cluster)
		}
	}
	return out, nil
}

func (*softTPM) survives() bool { return false }
func (*softTPM) clear() error   { return nil }

func (s *softTPM) extend(_ context.Context, id []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.broken != nil:
		return s.broken
	case s.cluster == nil:
		s.cluster = bytes.Clone(id)
		s.extends++
	case !bytes.Equal(s.cluster, id):
		return attestation.ErrMember
	}
	return nil
}

// reboot is what a restart of the machine does to a TPM.
func (s *softTPM) reboot() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cluster = nil
}

func (s *softTPM) sealed() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cluster
}

func (*softTPM) Variant() attestation.Variant { return attestation.TPM2 }

func (s *softTPM) Issue(ctx context.Context, userData []byte) ([]byte, error) {
	i, err := attestationtest.NewSoftwareIssuer(s.ca, s.id, s.events, s.sealed())
	if err != nil {
		return nil, err
	}
	return i.Issue(ctx, userData)
}

// fakeCloud is a metadata service in memory. Its load balancer is the loopback address.
type fakeCloud struct {
	mu       sync.Mutex
	instance cloud.Instance
	peers    []cloud.Instance
	lb       string
	secret   []byte
	err      error
	lbErrs   []error // of the next requests for the load balancer
}

func (f *fakeCloud) Self(context.Context) (cloud.Instance, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.instance, f.err
}

func (f *fakeCloud) Peers(context.Context) ([]cloud.Instance, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]cloud.Instance(nil), f.peers...), f.err
}

func (f *fakeCloud) LoadBalancer(context.Context) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.lbErrs) > 0 {
		err := f.lbErrs[0]
		f.lbErrs = f.lbErrs[1:]
		return "", err
	}
	return f.lb, f.err
}

func (f *fakeCloud) InitSecretHash(context.Context) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := sha256.Sum256(f.secret)
	return h[:], f.err
}

func (f *fakeCloud) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

var (
	initSecret = []byte("canary-init-secret-of-32-bytes!!")
	clusterA   = bytes.Repeat([]byte{0xa}, 32)
	clusterB   = bytes.Repeat([]byte{0xb}, 32)
)

// image returns the measurements of an OS image of this name.
func image(name string) []attestation.MeasuredEvent {
	var e []attestation.MeasuredEvent
	for _, pcr := range imageRegisters {
		d := sha256.Sum256(fmt.Append(nil, name, pcr))
		e = append(e, attestation.MeasuredEvent{PCR: pcr, Digest: d[:], Description: name})
	}
	return e
}

func measured(name string) attestation.Measurements {
	return attestation.Enforced(attestation.PredictPCRs(image(name)))
}

func identity(name string, role cloud.Role) attestation.Identity {
	return attestation.Identity{
		Name: name, ProviderID: "sandbox://test/" + name, UID: "test-1", Group: "sandboxes/test/groups/" + string(role),
		Role: role, IP: netip.MustParseAddr("10.42.0.10"),
	}
}

func newCA(t testing.TB) *attestationtest.CA {
	t.Helper()
	cert, key, err := attestationtest.CreateCA("cloud")
	if err != nil {
		t.Fatal(err)
	}
	ca, err := attestationtest.ParseCA(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// rig is a machine under test: a directory as its disk, a TPM, and a cloud.
type rig struct {
	t     *testing.T
	ctl   string
	ca    *attestationtest.CA
	tpm   *softTPM
	cloud *fakeCloud
	m     Machine
	judge func(attestation.PCR15) attestation.Validator // of the console and of join services

	mu       sync.Mutex
	kubelets []string // value of register 15 at each start of the kubelet
	log      bytes.Buffer
}

func newRig(t *testing.T, role cloud.Role) *rig {
	t.Helper()
	name := "worker-0"
	if role == cloud.ControlPlane {
		name = "control-plane-0"
	}
	r := &rig{t: t, ctl: t.TempDir(), ca: newCA(t)}
	id := identity(name, role)
	r.tpm = &softTPM{t: t, ca: r.ca, id: id, events: image("v1.1.0")}
	self := cloud.Instance{Name: name, ProviderID: id.ProviderID, Role: role, IP: id.IP, State: cloud.Ready}
	r.cloud = &fakeCloud{instance: self, peers: []cloud.Instance{self}, lb: "127.0.0.1", secret: initSecret}
	r.m = Machine{
		StateDir: filepath.Join(r.ctl, "state"), RunDir: filepath.Join(r.ctl, "run"), Root: filepath.Join(r.ctl, "root"),
		Listen: "127.0.0.1:0", Metadata: r.cloud, Issuer: r.tpm, Validator: attestation.TPMMethod().Validator, Roots: r.ca.Roots(), registers: r.tpm,
		KeysSocket:    filepath.Join(r.ctl, "kk", "keys.sock"),
		APIServerPort: closedPort(t), joinPort: closedPort(t), hurry: 20 * time.Millisecond,
		StartKubelet: func(context.Context) error {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.kubelets = append(r.kubelets, hex.EncodeToString(r.tpm.sealed()))
			return nil
		},
		Log: slog.New(slog.NewTextHandler(syncWriter{&r.mu, &r.log}, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	r.judge = func(rule attestation.PCR15) attestation.Validator {
		return attestation.NewTPMValidator(r.ca.Roots(), measured("v1.1.0"), attestation.Options{PCR15: rule, UID: id.UID})
	}
	releasetest.Furnish(t, r.m.Root)
	return r
}

type syncWriter struct {
	mu *sync.Mutex
	b  *bytes.Buffer
}

func (w syncWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(p)
}

func (r *rig) logged() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.log.String()
}

// closedPort is a port without listener.
func closedPort(t testing.TB) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// script configures the scripted kubeadm.
func (r *rig) script(file, content string) {
	r.t.Helper()
	if err := os.WriteFile(filepath.Join(r.ctl, file), []byte(content), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) unscript(file string) { os.Remove(filepath.Join(r.ctl, file)) }

// calls are the calls of kubeadm.
func (r *rig) calls() string {
	b, err := os.ReadFile(filepath.Join(r.ctl, "calls"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.t.Fatal(err)
	}
	return strings.Join(strings.Fields(string(b)), " ")
}

func (r *rig) file(name string) string {
	r.t.Helper()
	b, err := os.ReadFile(filepath.Join(r.m.Root, name))
	if err != nil {
		r.t.Error(err)
	}
	return string(b)
}

// run is a Run in progress.
type run struct {
	addr   string
	cancel context.CancelFunc
	done   chan error
}

// start starts a Run. Its address is that of the InitServer, if that listens.
func (r *rig) start() *run {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	x := &run{cancel: cancel, done: make(chan error, 1)}
	addr := make(chan string, 8) // a machine that waits for its first keys listens twice
	m := r.m
	m.listening = func(a net.Addr) { addr <- a.String() }
	m.Ready = func() {
		select {
		case addr <- "":
		default:
		}
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		x.done <- Run(ctx, m)
	}()
	r.t.Cleanup(func() { cancel(); <-ended })
	select {
	case x.addr = <-addr:
	case <-ended:
	case <-time.After(10 * time.Second):
		r.t.Fatal("Run made no progress")
	}
	return x
}

// end waits for a Run.
func (x *run) end(t testing.TB) error {
	t.Helper()
	select {
	case err := <-x.done:
		return err
	case <-time.After(30 * time.Second):
		t.Fatal("the bootstrapper does not end")
		return nil
	}
}

// stop ends a Run as systemd does.
func (x *run) stop(t testing.TB) {
	t.Helper()
	x.cancel()
	if err := x.end(t); !errors.Is(err, context.Canceled) {
		t.Errorf("stopped with %v", err)
	}
}

// console connects as a console does: it verifies the machine, and sends no evidence.
func (r *rig) console(addr string) initproto.BootstrapperClient {
	r.t.Helper()
	rules := []attestation.PCR15{attestation.PCR15Zero(), attestation.PCR15Member()}
	var vs []attestation.Validator
	for _, rule := range rules {
		vs = append(vs, r.judge(rule))
	}
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(atls.NewClient(atls.Config{
		Purpose: atls.PurposeInit, Validator: func() attestation.Validator { return either(vs) },
	})))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	return initproto.NewBootstrapperClient(conn)
}

// either accepts evidence that one of its validators accepts.
type either []attestation.Validator

func (e either) Variant() attestation.Variant { return e[0].Variant() }
func (e either) Validate(ctx context.Context, doc, data []byte) (st attestation.Statement, err error) {
	for _, v := range e {
		if st, err = v.Validate(ctx, doc, data); err == nil {
			return st, nil
		}
	}
	return st, err
}

// components are a kubeadm that runs this test binary, and a kubelet.
func (r *rig) components() component.List {
	exe, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	inline := func(name, content string) component.Component {
		s := sha256.Sum256([]byte(content))
		return component.Component{
			Name: name, URL: "data:;base64," + base64.StdEncoding.EncodeToString([]byte(content)),
			Digest: "sha256:" + hex.EncodeToString(s[:]), Path: "/usr/local/bin/" + name,
		}
	}
	return component.List{
		inline("kubeadm", fmt.Sprintf("#!/bin/sh\n%s='%s' exec '%s' \"$@\"\n", kubeadmEnv, r.ctl, exe)),
		inline("kubelet", "#!/bin/sh\n"),
	}
}

func (r *rig) request(cluster []byte) *initproto.InitRequest {
	return &initproto.InitRequest{
		InitSecret: initSecret, ClusterName: "demo", ClusterId: cluster, KubernetesVersion: "v1.35.4",
		Components: component.ToProto(r.components()), ApiServerCertSans: []string{"demo.example"},
		ServiceCidr: "10.96.0.0/12", PodCidr: "10.244.0.0/16",
		ComponentsStatement: releasetest.Vouch(r.t, "v1.35.4", r.components()),
	}
}

// vouched signs a request again whose components were changed, as the release builder
// would have.
func (r *rig) vouched(req *initproto.InitRequest) *initproto.InitRequest {
	r.t.Helper()
	l, err := component.FromProto(req.GetComponents())
	if err != nil {
		r.t.Fatal(err)
	}
	req.ComponentsStatement = releasetest.Vouch(r.t, req.GetKubernetesVersion(), l)
	return req
}

// collect reads a stream to its end.
func collect(stream grpc.ServerStreamingClient[initproto.InitResponse], err error) ([]*initproto.InitResponse, error) {
	var all []*initproto.InitResponse
	for err == nil {
		var m *initproto.InitResponse
		if m, err = stream.Recv(); err == nil {
			all = append(all, m)
		}
	}
	if err.Error() == "EOF" {
		err = nil
	}
	return all, err
}

// outline summarizes a stream.
func outline(all []*initproto.InitResponse) string {
	var s []string
	for i, m := range all {
		if m.Seq != uint64(i)+1 {
			s = append(s, fmt.Sprintf("SEQ %d AT %d", m.Seq, i+1))
		}
		switch k := m.Kind.(type) {
		case *initproto.InitResponse_Progress:
			p := k.Progress.Step + ":" + k.Progress.State
			if len(s) == 0 || s[len(s)-1] != p {
				s = append(s, p)
			}
		case *initproto.InitResponse_Success:
			s = append(s, "success "+k.Success.NodeName)
		case *initproto.InitResponse_Failure:
			s = append(s, "failure "+k.Failure.Step)
		}
	}
	return strings.Join(s, " ")
}

// wait polls until another goroutine or process has met the condition.
func wait(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("timed out: %s", what)
		}
	}
}

func exists(name string) bool { _, err := os.Lstat(name); return err == nil }
