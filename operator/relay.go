package operator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"constellation/agent/upgradeproto"
	"constellation/engine/component"
	"constellation/internal/podforward"
	"constellation/operator/decision"
)

// The operator reaches the agents of other machines through a relay: a pod on each node that is
// upgraded in place, which has only the agent's socket. The operator opens a port-forward to the
// relay. So the API server authenticates and authorizes the operator, the kubelet
// authenticates the API server, and no network port is open. The relay forwards only two
// verbs, and requires a token of the operator.

// RelayName is the name of the relay's DaemonSet and the label of its pods.
const RelayName = "constellation-relay"

const (
	relayPort = "agent" // name of the container's port
	// relayDial bounds the setup of one connection to a relay.
	relayDial = 20 * time.Second
	// Idle connections are probed with a keepalive after this time.
	relayAlive = 20 * time.Second
	maxRelayed = 64 << 10 // bytes of a request, the same limit as the agent's
)

// RelayConfig is what a relay needs. All fields are required.
type RelayConfig struct {
	Address   string       // that it listens at
	Socket    string       // of the agent; it may not exist yet
	Cluster   *rest.Config // with the right to create tokenreviews
	Namespace string       // of the operator
	Node      string       // that the relay runs on
	Log       *slog.Logger
}

// Relay forwards calls of the operator from c.Address to the agent until ctx ends: Status, and
// Upgrade of the node. It refuses every other verb, even if the agent supports it, and every
// caller without the operator's token for this node.
func Relay(ctx context.Context, c RelayConfig) error {
	if c.Namespace == "" || c.Node == "" {
		return errors.New("relay to the agent: namespace and node must be set")
	}
	client, err := kubernetes.NewForConfig(c.Cluster)
	if err != nil {
		return fmt.Errorf("relay to the agent: %w", err)
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", c.Address)
	if err != nil {
		return fmt.Errorf("relay to the agent: %w", err)
	}
	return relayTo(ctx, l, c.Socket, newGate(client, c.Namespace, c.Node), c.Log)
}

func relayTo(ctx context.Context, l net.Listener, socket string, gate *gate, log *slog.Logger) error {
	if !filepath.IsAbs(socket) {
		return errors.Join(fmt.Errorf("relay to the agent: %q is not an absolute path", socket), l.Close())
	}
	conn, err := grpc.NewClient("unix:"+socket, dialOptions()...)
	if err != nil {
		return errors.Join(fmt.Errorf("relay to the agent: %w", err), l.Close())
	}
	defer func() { _ = conn.Close() }()
	gate.callers = newCallers(l)
	g := grpc.NewServer(
		grpc.UnaryInterceptor(gate.unary), grpc.StreamInterceptor(gate.stream),
		grpc.MaxRecvMsgSize(maxRelayed), grpc.MaxConcurrentStreams(16), grpc.MaxHeaderListSize(16<<10), grpc.ConnectionTimeout(relayDial),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: relayAlive / 2, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: 5 * time.Minute, Time: time.Minute, Timeout: relayAlive}),
	)
	upgradeproto.RegisterAgentServer(g, relayed{to: upgradeproto.NewAgentClient(conn), log: log})
	stop := context.AfterFunc(ctx, g.Stop)
	defer stop()
	log.Info("relay started", "address", l.Addr().String(), "agent", socket)
	if err := g.Serve(gate.callers); err != nil && ctx.Err() == nil {
		return fmt.Errorf("relay to the agent: %w", err)
	}
	return nil
}

// relayed has the permitted verbs. The embedded server, which has no agent, refuses all others.
type relayed struct {
	upgradeproto.UnimplementedAgentServer

	to  upgradeproto.AgentClient
	log *slog.Logger
}

func (r relayed) Status(ctx context.Context, q *upgradeproto.StatusRequest) (*upgradeproto.StatusResponse, error) {
	return r.to.Status(ctx, q)
}

func (r relayed) Upgrade(q *upgradeproto.UpgradeRequest, back grpc.ServerStreamingServer[upgradeproto.UpgradeResponse]) error {
	if q.GetWhat() != upgradeproto.What_NODE {
		return status.Error(codes.PermissionDenied, "the relay forwards upgrades of its node only, not of the control plane")
	}
	r.log.Info("upgrade forwarded", "kubernetes", q.GetKubernetesVersion(), "token", q.GetToken())
	stream, err := r.to.Upgrade(back.Context(), q)
	if err != nil {
		return err
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := back.Send(m); err != nil {
			return err
		}
	}
}

// dialOptions are the options of every connection to an agent.
func dialOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the kernel, or the API server, authenticates the caller
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: reconnectMin, Multiplier: 1.6, Jitter: 0.2, MaxDelay: reconnectMax},
			MinConnectTimeout: relayDial,
		}),
	}
}

// relays are the agents of other machines. They are safe for concurrent use.
type relays struct {
	access    *rest.Config
	client    kubernetes.Interface
	namespace string
	pod       string // the operator's; empty outside of the cluster
	log       *slog.Logger
	packages  func(context.Context) (bool, error) // as in agentHost

	mu    sync.Mutex
	hosts map[string]*agentHost // by node
}

func newRelays(access *rest.Config, c kubernetes.Interface, namespace, pod string, log *slog.Logger) *relays {
	return &relays{access: access, client: c, namespace: namespace, pod: pod, log: log, hosts: map[string]*agentHost{}}
}

// host returns the agent of a node, which may not be reachable yet.
func (r *relays) host(node string) (*agentHost, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if h := r.hosts[node]; h != nil {
		return h, nil
	}
	conn, err := grpc.NewClient("passthrough:///"+node, append(dialOptions(),
		grpc.WithContextDialer(r.dial), grpc.WithNoProxy(), grpc.WithPerRPCCredentials(&relayToken{
			accounts: r.client.CoreV1().ServiceAccounts(r.namespace), pod: r.pod, audience: RelayAudienceOf(node), now: time.Now,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: relayAlive, Timeout: relayAlive}))...)
	if err != nil {
		return nil, fmt.Errorf("connect to the agent of %s: %w", node, err)
	}
	h := &agentHost{node: node, conn: conn, agent: upgradeproto.NewAgentClient(conn), what: upgradeproto.What_NODE, log: r.log, packages: r.packages}
	r.hosts[node] = h
	return h, nil
}

// Run implements agents.
func (r *relays) Run(ctx context.Context, node string) (decision.UpgradeRun, error) {
	h, err := r.host(node)
	if err != nil {
		return decision.UpgradeRun{}, err
	}
	return h.Run(ctx)
}

// Upgrade implements agents.
func (r *relays) Upgrade(ctx context.Context, node, token, version, reference string, components component.Signed, tell func(decision.UpgradeRun)) error {
	h, err := r.host(node)
	if err != nil {
		return err
	}
	return h.Upgrade(ctx, token, version, reference, components, false, tell)
}

// keep implements agents.
func (r *relays) keep(nodes map[string]bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for node, h := range r.hosts {
		if !nodes[node] {
			_ = h.Close()
			delete(r.hosts, node)
		}
	}
}

// dial connects to the relay on a node through the API server.
func (r *relays) dial(ctx context.Context, node string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, relayDial)
	defer cancel()
	pods, err := r.client.CoreV1().Pods(r.namespace).List(ctx, metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/name=" + RelayName, FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String(),
	})
	if err != nil {
		return nil, fmt.Errorf("find the relay on %s: %w", node, err)
	}
	var others []error
	for i := range pods.Items {
		p := &pods.Items[i]
		port := relayPortOf(p)
		if p.DeletionTimestamp != nil || port == 0 {
			continue
		}
		if err := genuine(p); err != nil {
			others = append(others, err)
			continue
		}
		return r.forward(ctx, p, port)
	}
	if len(others) > 0 {
		return nil, fmt.Errorf("no relay runs on %s yet: %w", node, errors.Join(others...))
	}
	return nil, fmt.Errorf("no relay runs on %s yet", node)
}

// relayPortOf returns the port of a relay; zero if its pod does not run.
func relayPortOf(p *corev1.Pod) int32 {
	if p.Status.Phase != corev1.PodRunning {
		return 0
	}
	for i := range p.Spec.Containers {
		for _, port := range p.Spec.Containers[i].Ports {
			if port.Name == relayPort {
				return port.ContainerPort
			}
		}
	}
	return 0
}

// forward opens a port-forward and one connection in it. It uses SPDY, which requires only the verb
// create.
func (r *relays) forward(ctx context.Context, p *corev1.Pod, port int32) (net.Conn, error) {
	dialer, _, err := podforward.SPDY(r.client, r.access, p)
	if err != nil {
		return nil, fmt.Errorf("forward a port: %w", err)
	}
	c, err := podforward.Dial(ctx, dialer, port, "operator", p.Spec.NodeName)
	if err != nil {
		return nil, fmt.Errorf("forward a port of %s on %s: %w", p.Name, p.Spec.NodeName, err)
	}
	c.CloseOnRefusal()
	return c, nil
}
