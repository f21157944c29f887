package engine_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"constellation/bootstrapper/initproto"
	"constellation/engine"
	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/component"
	"constellation/engine/kube/kubetest"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// stage is a workspace, a cloud with attested machines and the twin of the cluster
// that they become. Machines speak real attested TLS with software quotes.
type stage struct {
	t          *testing.T
	dir        string
	cloud      *testCloud
	cluster    *kubetest.Cluster
	ca         *attestationtest.CA
	machines   []*testMachine
	balancer   *balancer
	log        *bytes.Buffer
	logMu      sync.Mutex
	secret     []byte
	events     []attestation.MeasuredEvent
	rootsPEM   string
	lifeOnce   sync.Once
	nodesOnly  atomic.Bool // machines never get Ready
	unlabelled atomic.Bool // Nodes of control planes have no role label
	// registered is whether the engine finds its provider in the registry.
	registered bool
}

const bootstrapToken = "abcdef.0123456789abcdef"

// newStage returns a stage with control planes, and workers that join when the target
// is set.
func newStage(t *testing.T, controlPlanes, workers int) *stage {
	t.Helper()
	s := &stage{t: t, dir: t.TempDir(), cluster: kubetest.New(), log: &bytes.Buffer{}, secret: []byte("init-secret-0123456789-abcdefghi"), cloud: &testCloud{uid: "0123456789abcdef"}}
	certPEM, keyPEM, err := attestationtest.CreateCA("test")
	if err != nil {
		t.Fatal(err)
	}
	if s.ca, err = attestationtest.ParseCA(certPEM, keyPEM); err != nil {
		t.Fatal(err)
	}
	s.rootsPEM = string(certPEM)
	for _, pcr := range []uint32{4, 9, 11} {
		s.events = append(s.events, attestation.MeasuredEvent{PCR: pcr, Digest: bytes.Repeat([]byte{byte(pcr)}, 32), Description: fmt.Sprint("event ", pcr)})
	}
	s.balancer = newBalancer(t)
	for i := range controlPlanes {
		s.machines = append(s.machines, s.newMachine(fmt.Sprintf("control-plane-%d", i)))
		s.cloud.add(fmt.Sprintf("control-plane-%d", i), cloud.ControlPlane, i)
	}
	for i := range workers {
		s.cloud.add(fmt.Sprintf("worker-%d", i), cloud.Worker, i)
	}
	s.cloud.measurements = map[uint32]string{}
	for i, v := range attestation.PredictPCRs(s.events) {
		if i < 12 && i != 0 {
			s.cloud.measurements[i] = hex.EncodeToString(v)
		}
	}
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.AdoptSandbox(s.info(controlPlanes, workers)); err != nil {
		t.Fatal(err)
	}
	s.cluster.OnCall(func(call string) error {
		if call == "SetNodeTarget" {
			s.lifeOnce.Do(func() { go s.live() })
		}
		return nil
	})
	return s
}

func (s *stage) info(controlPlanes, workers int) workspace.SandboxInfo {
	m := map[uint32]string{}
	for i, v := range attestation.PredictPCRs(s.events) {
		if slices.Contains([]uint32{4, 9, 11}, i) {
			m[i] = hex.EncodeToString(v)
		}
	}
	return workspace.SandboxInfo{
		Name: "demo", UID: s.cloud.uid, Release: "v1.1.0", Kubernetes: "v1.35.4", Image: "v1.1.0", Measurements: m, TrustRoots: s.rootsPEM,
		ClusterEndpoint: "127.0.0.1:36443", InitEndpoint: s.balancer.addr(), InClusterEndpoint: "10.42.0.1",
		NodeCIDR: "10.42.0.0/24", PodCIDR: "10.244.0.0/16", ServiceCIDR: "10.96.0.0/12",
		ControlPlanes: controlPlanes, Workers: workers, Socket: "/nowhere/api.sock", InitSecret: s.secret,
	}
}

// live is what kubelets and the operator do once there is a target.
func (s *stage) live() {
	for _, i := range s.cloud.list() {
		n := cluster.Node{Name: i.Name, Role: string(i.Role), State: plan.NodeNotReady, ProviderID: i.ProviderID, Kubernetes: "v1.35.4"}
		if s.unlabelled.Load() {
			n.Role = string(cloud.Worker)
		}
		if i.Role == cloud.Worker {
			s.cluster.Expect(context.Background(), cluster.ExpectedNode{Name: i.Name, Components: "c"})
			s.cluster.Say(cluster.LogLine{Time: time.Now().Add(time.Second), Pod: "joinservice-x", Text: `{"time":"2026-11-21T07:00:00Z","level":"INFO","msg":"node reported","node":"` + i.Name + `","step":"kubeadm-join","state":"running","at":"2026-11-21T07:00:00Z","text":"[kubelet-start] Starting the kubelet"}`})
		}
		s.cluster.PutNode(n)
		if s.nodesOnly.Load() {
			continue
		}
		time.Sleep(50 * time.Millisecond) // simulated work of a kubelet
		n.State = plan.NodeReady
		s.cluster.PutNode(n)
		s.cluster.Annotate(i.Name)
	}
}

// engine returns a new engine, as each start of the program makes one.
func (s *stage) engine() *engine.Engine {
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		s.t.Fatal(err)
	}
	d := engine.Deps{
		Connect: func(_ context.Context, kubeconfig []byte) (engine.Cluster, error) {
			if !bytes.Contains(kubeconfig, []byte("https://127.0.0.1:36443")) {
				return nil, errors.New("kubeconfig leads elsewhere")
			}
			return s.cluster, nil
		},
		Provider: func(context.Context, *workspace.Config, *workspace.State) (engine.Cloud, error) {
			return s.cloud, nil
		},
		Log:      slog.New(slog.NewTextHandler(lockedWriter{s}, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Releases: openOlder,
	}
	if s.registered {
		d.Provider = nil
	}
	e := engine.New(w, d)
	e.SetLimits(2*time.Second, 5*time.Second, time.Second, 500*time.Millisecond, time.Second, 1500*time.Millisecond)
	return e
}

type lockedWriter struct{ s *stage }

func (w lockedWriter) Write(b []byte) (int, error) {
	w.s.logMu.Lock()
	defer w.s.logMu.Unlock()
	return w.s.log.Write(b)
}

// init plans and runs once. see is called with every event.
func (s *stage) init(ctx context.Context, see func(plan.Event)) ([]plan.Event, *plan.Plan, error) {
	s.t.Helper()
	e := s.engine()
	p, err := e.PlanInit(ctx)
	if err != nil {
		return nil, nil, err
	}
	var events []plan.Event
	err = e.Run(ctx, p, func(ev plan.Event) {
		events = append(events, ev)
		if see != nil {
			see(ev)
		}
	})
	return events, p, err
}

// mustInit runs init to its end.
func (s *stage) mustInit() ([]plan.Event, *plan.Plan) {
	s.t.Helper()
	events, p, err := s.init(s.t.Context(), nil)
	if err != nil {
		for _, e := range events {
			s.t.Logf("%+v", e)
		}
		s.t.Fatalf("init: %v (remedy %q)", err, plan.Remedy(err))
	}
	return events, p
}

func (s *stage) read(name string) string {
	b, err := os.ReadFile(filepath.Join(s.dir, name))
	if err != nil {
		s.t.Helper()
		s.t.Error(err)
	}
	return string(b)
}

func (s *stage) state() *workspace.State {
	s.t.Helper()
	st, err := workspace.ParseState([]byte(s.read(workspace.StateFile)))
	if err != nil {
		s.t.Fatal(err)
	}
	return st
}

// edit replaces text in a file of the workspace.
func (s *stage) edit(name, old, with string) {
	s.t.Helper()
	text := s.read(name)
	changed := strings.ReplaceAll(text, old, with)
	if changed == text {
		s.t.Fatalf("%s has no %q", name, old)
	}
	if err := os.WriteFile(filepath.Join(s.dir, name), []byte(changed), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

// testCloud is a provider with a list of machines.
type testCloud struct {
	mu           sync.Mutex
	uid          string
	machines     []cluster.CloudMachine
	measurements map[uint32]string
	down         error
	components   error
	unsigned     bool   // it vouches for no components
	mirrored     string // the Kubernetes that it has; empty: v1.35.4
	// clusterEndpoint and initEndpoint are what it says about itself, if anything.
	clusterEndpoint, initEndpoint string
}

func (c *testCloud) add(name string, role cloud.Role, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	group := "workers"
	if role == cloud.ControlPlane {
		group = "control-plane"
	}
	c.machines = append(c.machines, cluster.CloudMachine{Instance: cloud.Instance{
		Name: name, ProviderID: "sandbox://demo/" + name, Group: "sandboxes/demo/groups/" + group, Role: role, State: cloud.Ready, Image: "sandboxes/demo/images/v1.1.0",
		IP: netip.AddrFrom4([4]byte{10, 42, 0, byte(10 + len(c.machines))}), Created: time.Now(),
	}, GroupName: group})
}

func (c *testCloud) list() []cluster.CloudMachine {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.machines)
}

func (c *testCloud) set(name string, f func(*cluster.CloudMachine)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.machines {
		if c.machines[i].Name == name {
			f(&c.machines[i])
		}
	}
}

// end makes the cloud answer with err; nil ends that.
func (c *testCloud) end(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down = err
}

func (c *testCloud) state() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.down
}

func (c *testCloud) Describe(context.Context) (cluster.ProviderInfo, error) {
	return cluster.ProviderInfo{UID: c.uid, Name: "demo", ClusterEndpoint: c.clusterEndpoint, InitEndpoint: c.initEndpoint}, c.state()
}

func (c *testCloud) Machines(context.Context) ([]cluster.CloudMachine, error) {
	return c.list(), c.state()
}

func (c *testCloud) Groups(context.Context) ([]cloud.Group, error) {
	counts := map[cloud.Role]int{}
	for _, m := range c.list() {
		counts[m.Role]++
	}
	image := "sandboxes/demo/images/v1.1.0"
	return []cloud.Group{
		{ID: "sandboxes/demo/groups/control-plane", Name: "control-plane", Role: cloud.ControlPlane, Image: image, Count: counts[cloud.ControlPlane]},
		{ID: "sandboxes/demo/groups/workers", Name: "workers", Role: cloud.Worker, Image: image, Count: counts[cloud.Worker]},
	}, c.state()
}

func (c *testCloud) Images(context.Context) ([]cloud.Image, error) {
	return []cloud.Image{
		{Reference: "sandboxes/demo/images/v1.0.0", Version: "v1.0.0"},
		{Reference: "sandboxes/demo/images/v1.1.0", Version: "v1.1.0", Measurements: c.measurements},
	}, c.state()
}

func (c *testCloud) Components(_ context.Context, v version.Version) (component.Signed, error) {
	if c.components != nil {
		return component.Signed{}, c.components
	}
	if has := cmp.Or(c.mirrored, "v1.35.4"); v.String() != has {
		return component.Signed{}, fmt.Errorf("%w: the mirror has %s", cloud.ErrNotFound, has)
	}
	var l component.List
	for _, name := range []string{"kubeadm", "kubelet", "kubectl"} {
		l = append(l, component.Component{Name: name, URL: "http://10.42.0.1:8080/" + name, Digest: "sha256:" + strings.Repeat("ab", 32), Path: "/usr/local/bin/" + name, Mode: 0o755})
	}
	if c.unsigned {
		return component.Signed{List: l}, nil
	}
	return signed(l), nil
}

// signed is a list with a statement that the engine passes on as it is.
func signed(l component.List) component.Signed {
	return component.Signed{List: l, Statement: "statement over " + l.Digest()}
}

// testMachine is a machine whose bootstrapper does in no time what the real one does
// in ten seconds, and keeps its promises: one node lock, replay, result until Ack.
type testMachine struct {
	certifierKeys []byte // of the request
	kmsKeys       []byte // likewise
	old           bool   // its image has no key service
	// lost is what it waits for, and recoveredKMS and recoveredCertifier what it got.
	lost                             []*initproto.LostKeys
	recoveredKMS, recoveredCertifier []byte
	initproto.UnimplementedBootstrapperServer
	s    *stage
	name string
	addr string

	mu        sync.Mutex
	server    *grpc.Server
	issuer    attestation.Issuer
	clusterID []byte
	runs      int // of kubeadm init
	acks      int
	responses []*initproto.InitResponse
	cut       int // responses after which the next stream is cut; 0: never
	fail      *initproto.Failure
	seenAtAck string
	chatty    int  // how many more lines kubeadm prints
	ignores   bool // it is of an older image, which always has Kubernetes' etcd
}

func (s *stage) newMachine(name string) *testMachine {
	m := &testMachine{s: s, name: name}
	m.start(nil)
	s.t.Cleanup(m.stop)
	return m
}

func (m *testMachine) identity() attestation.Identity {
	return attestation.Identity{Name: m.name, ProviderID: "sandbox://demo/" + m.name, UID: m.s.cloud.uid, Group: "sandboxes/demo/groups/control-plane", Role: cloud.ControlPlane, IP: netip.MustParseAddr("10.42.0.10")}
}

// start makes the machine listen, with register 15 as of clusterID.
func (m *testMachine) start(clusterID []byte) {
	m.boot(m.s.ca, m.identity(), m.s.events, clusterID)
}

func (m *testMachine) boot(ca *attestationtest.CA, id attestation.Identity, events []attestation.MeasuredEvent, clusterID []byte) {
	m.s.t.Helper()
	issuer, err := attestationtest.NewSoftwareIssuer(ca, id, events, clusterID)
	if err != nil {
		m.s.t.Fatal(err)
	}
	m.mu.Lock()
	m.issuer = issuer
	m.mu.Unlock()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		m.s.t.Fatal(err)
	}
	server := grpc.NewServer(grpc.Creds(atls.NewServer(atls.Config{Purpose: atls.PurposeInit, Issuer: current{m}})))
	initproto.RegisterBootstrapperServer(server, m)
	m.mu.Lock()
	m.server = server
	m.mu.Unlock()
	m.s.balancer.remove(m.addr)
	m.addr = l.Addr().String()
	m.s.balancer.add(m.addr)
	go server.Serve(l)
}

// current is an issuer that follows the machine's register 15.
type current struct{ m *testMachine }

func (c current) Variant() attestation.Variant { return attestation.TPM2 }

func (c current) Issue(ctx context.Context, userData []byte) ([]byte, error) {
	c.m.mu.Lock()
	i := c.m.issuer
	c.m.mu.Unlock()
	return i.Issue(ctx, userData)
}

func (m *testMachine) stop() {
	m.mu.Lock()
	s := m.server
	m.mu.Unlock()
	m.s.balancer.remove(m.addr)
	s.Stop()
}

func (m *testMachine) Init(r *initproto.InitRequest, stream grpc.ServerStreamingServer[initproto.InitResponse]) error {
	m.mu.Lock()
	if !bytes.Equal(r.InitSecret, m.s.secret) {
		m.mu.Unlock()
		return status.Error(codes.PermissionDenied, "wrong init secret")
	}
	if m.clusterID != nil && !bytes.Equal(m.clusterID, r.ClusterId) {
		m.mu.Unlock()
		return status.Error(codes.FailedPrecondition, "the machine is taken by another init")
	}
	if m.clusterID == nil {
		m.clusterID = r.ClusterId
		var err error
		if m.issuer, err = attestationtest.NewSoftwareIssuer(m.s.ca, m.identity(), m.s.events, r.ClusterId); err != nil {
			m.mu.Unlock()
			return status.Error(codes.Internal, err.Error())
		}
		m.runs++
		m.certifierKeys, m.kmsKeys = r.GetCertifierKeys(), r.GetKmsKeys()
		m.work(r)
	} else if n := len(m.responses) - 1; n >= 0 && m.responses[n].GetFailure().GetRetry() {
		m.responses = m.responses[:n]
		m.work(r)
	}
	all, cut := m.responses, m.cut
	m.cut = 0
	m.mu.Unlock()
	for i, resp := range all {
		if cut > 0 && i == cut {
			return status.Error(codes.Unavailable, "the connection was cut")
		}
		if err := stream.Send(resp); err != nil {
			return err
		}
	}
	return nil
}

func (m *testMachine) work(r *initproto.InitRequest) {
	say := func(resp *initproto.InitResponse) {
		resp.Seq, resp.Time = uint64(len(m.responses)+1), timestamppb.Now()
		m.responses = append(m.responses, resp)
	}
	progress := func(step, state string) {
		say(&initproto.InitResponse{Kind: &initproto.InitResponse_Progress{Progress: &initproto.Progress{Step: step, State: state}}})
	}
	progress("claim-node", "done")
	progress("install-components", "running")
	progress("install-components", "done")
	for _, line := range []string{
		"[certs] Generating \"ca\" certificate and key",
		"kubeadm join 10.42.0.1:6443 --token " + bootstrapToken, // the real bootstrapper hides it
		"secret seen by mistake: " + hex.EncodeToString(r.InitSecret) + " " + base64.StdEncoding.EncodeToString(r.InitSecret),
	} {
		say(&initproto.InitResponse{Kind: &initproto.InitResponse_Log{Log: &initproto.Log{Source: "kubeadm", Level: "info", Line: line}}})
	}
	for i := range m.chatty {
		say(&initproto.InitResponse{Kind: &initproto.InitResponse_Log{Log: &initproto.Log{Source: "kubeadm", Level: "debug", Line: fmt.Sprintf("line %d of many", i)}}})
	}
	if m.fail != nil {
		say(&initproto.InitResponse{Kind: &initproto.InitResponse_Failure{Failure: m.fail}})
		return
	}
	if tag := r.GetEtcdImageTag(); tag != "" && !m.ignores {
		if err := m.s.cluster.SetEtcdTag(context.Background(), "", tag); err != nil {
			m.s.t.Error(err)
		}
	}
	progress("kubeadm-init", "done")
	say(&initproto.InitResponse{Kind: &initproto.InitResponse_Success{Success: &initproto.Success{Kubeconfig: []byte(testKubeconfig), ClusterId: r.ClusterId, NodeName: m.name, EncryptsSecrets: len(m.kmsKeys) > 0 && !m.old}}})
}

func (m *testMachine) Ack(_ context.Context, r *initproto.AckRequest) (*initproto.AckResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !bytes.Equal(r.InitSecret, m.s.secret) {
		return nil, status.Error(codes.PermissionDenied, "wrong init secret")
	}
	m.acks++
	if b, err := os.ReadFile(filepath.Join(m.s.dir, engine.PendingFile)); err == nil {
		m.seenAtAck = string(b)
	}
	go func() { // as the real one
		m.s.balancer.remove(m.addr)
		m.server.GracefulStop()
	}()
	return &initproto.AckResponse{}, nil
}

func (m *testMachine) counts() (runs, acks int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.runs, m.acks
}

const testKubeconfig = `apiVersion: v1
kind: Config
current-context: admin
clusters:
- name: kubernetes
  cluster:
    certificate-authority-data: Q0E=
    server: https://10.42.0.1:6443
users:
- name: admin
  user:
    client-key-data: U0VDUkVULUtFWS1PRi1BRE1JTg==
contexts:
- name: admin
  context: {cluster: kubernetes, user: admin}
`

// balancer forwards to its members in turn, as the cloud's does.
type balancer struct {
	l       net.Listener
	mu      sync.Mutex
	members []string
	next    int
}

func newBalancer(t *testing.T) *balancer {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &balancer{l: l}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go b.forward(c)
		}
	}()
	return b
}

func (b *balancer) addr() string { return b.l.Addr().String() }

func (b *balancer) add(member string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.members = append(b.members, member)
}

func (b *balancer) remove(member string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.members = slices.DeleteFunc(b.members, func(m string) bool { return m == member })
}

func (b *balancer) forward(c net.Conn) {
	defer c.Close()
	b.mu.Lock()
	if len(b.members) == 0 {
		b.mu.Unlock()
		return
	}
	to := b.members[b.next%len(b.members)]
	b.next++
	b.mu.Unlock()
	d, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	defer d.Close()
	done := make(chan struct{}, 2)
	pipe := func(dst, src net.Conn) {
		buf := make([]byte, 32<<10)
		for {
			n, err := src.Read(buf)
			if n > 0 {
				if _, err := dst.Write(buf[:n]); err != nil {
					break
				}
			}
			if err != nil {
				break
			}
		}
		done <- struct{}{}
	}
	go pipe(d, c)
	go pipe(c, d)
	<-done
}

// checkStream checks what holds for the events of every run.
func checkStream(t *testing.T, events []plan.Event, err error) {
	t.Helper()
	if len(events) == 0 {
		t.Fatal("no events")
	}
	for i, e := range events {
		if e.Seq != uint64(i+1) {
			t.Errorf("event %d has number %d", i+1, e.Seq)
		}
		if (e.Kind == plan.KindHello) != (i == 0) || (e.Kind == plan.KindResult) != (i == len(events)-1) {
			t.Errorf("event %d of %d is %s", i+1, len(events), e.Kind)
		}
		if e.Time.IsZero() || e.Run == "" {
			t.Errorf("event %+v has no time or run", e)
		}
		if _, err := json.Marshal(e); err != nil {
			t.Error(err)
		}
	}
	last := events[len(events)-1]
	if last.Exit == nil || *last.Exit != plan.ExitCode(err) {
		t.Errorf("result %+v, and the error %v has exit code %d", last, err, plan.ExitCode(err))
	}
	if err != nil && last.Text == "" {
		t.Errorf("the result does not say why: %+v", last)
	}
}

// Recovery implements the contract of package initproto for a member that lost keys.
func (m *testMachine) Recovery(_ context.Context, r *initproto.RecoveryRequest) (*initproto.RecoveryResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !bytes.Equal(r.InitSecret, m.s.secret) {
		return nil, status.Error(codes.Unauthenticated, "wrong init secret")
	}
	return &initproto.RecoveryResponse{NodeName: m.name, Lost: m.lost}, nil
}

// Recover implements the contract of package initproto: it stops listening afterwards, as the real one.
func (m *testMachine) Recover(_ context.Context, r *initproto.RecoverRequest) (*initproto.RecoverResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !bytes.Equal(r.InitSecret, m.s.secret) || !bytes.Equal(r.ClusterId, m.clusterID) {
		return nil, status.Error(codes.FailedPrecondition, "not of this cluster")
	}
	m.recoveredKMS, m.recoveredCertifier, m.lost = r.GetKmsKeys(), r.GetCertifierKeys(), nil
	go func() {
		m.s.balancer.remove(m.addr)
		m.server.GracefulStop()
	}()
	return &initproto.RecoverResponse{}, nil
}

// lose restarts the machine without keys of a process. It waits for them, and had keys with a fingerprint.
func (m *testMachine) lose(process, fingerprint string) {
	m.stop()
	m.mu.Lock()
	id := []byte(m.s.state().ClusterValues.ClusterID)
	m.clusterID = id
	m.lost = append(m.lost, &initproto.LostKeys{Process: process, Reason: "its file is missing", Fingerprint: fingerprint})
	m.mu.Unlock()
	m.start(id)
}

// got returns the keys of a recovery.
func (m *testMachine) got() (kms, certifier []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.recoveredKMS, m.recoveredCertifier
}
