// Command operator brings a cluster's nodes to their target; see package operator. It
// runs as a Deployment on control planes and, with --kubeconfig, outside the cluster
// for development. With --role=plans it carries out Plans instead, see package plans, and
// its commands cordon, drain and uncordon replace kubectl in the Jobs of Plans.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"constellation/engine/cloud/providers"
	"constellation/engine/version"
	"constellation/internal/podmain"
	"constellation/operator"
	"constellation/operator/liblog"
	"constellation/operator/plans"
)

func main() {
	// Control planes are small, so the garbage collector runs at half of the usual heap growth.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "operator:", err)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) > 0 && args[0] == roleStandIn {
		standIn(ctx, args[1:], slog.New(slog.NewJSONHandler(os.Stderr, nil)))
		return nil
	}
	if plans.IsKubectl(args) {
		return kubectl(ctx, args)
	}
	if rest, ok := withoutRole(args); ok {
		return carryOut(ctx, rest, os.LookupEnv)
	}
	f := flag.NewFlagSet("operator", flag.ContinueOnError)
	var (
		role       = f.String("role", "operator", "role of this process: operator; relay, which forwards the operator's requests to this machine's agent; plans; or, as the first argument, autoscaler-stand-in")
		provider   = f.String("provider", "", "`name` of the cloud, required: "+strings.Join(providers.Names(), " or "))
		metadata   = f.String("metadata", "", "`URL` of the cloud's metadata server; empty: the provider's default")
		address    = f.String("cloud", "", "`URL` of the cloud's control API, or unix:PATH; empty: the provider's default")
		namespace  = f.String("namespace", "constellation-system", "`namespace` of the operator and of the leader's lease")
		metrics    = f.String("metrics", "127.0.0.1:9092", "`address` for /metrics; empty serves none")
		health     = f.String("health", "127.0.0.1:9093", "`address` for /healthz and /readyz; empty serves none")
		snapshots  = f.String("snapshots", "", "`address` that serves snapshots of etcd through a port-forward, such as 127.0.0.1:9094; empty serves none")
		relay      = f.String("relay", "127.0.0.1:9095", "`address` where the role relay listens")
		interval   = f.Duration("discovery-interval", 15*time.Minute, "interval of lists of the cloud's scaling groups")
		election   = f.Bool("leader-elect", true, "act only when elected")
		agent      = f.String("agent", "", "`socket` of this machine's agent; empty: no control plane is replaced")
		node       = f.String("node", os.Getenv("NODE_NAME"), "`name` of this machine's Node; empty outside of the cluster")
		pod        = f.String("pod", os.Getenv("POD_NAME"), "`name` of the operator's pod; empty outside of the cluster")
		kubeconfig = f.String("kubeconfig", "", "kubeconfig `file`, for development; empty inside a pod")
		rotate     = f.Bool("rotate-key", false, "rotate the key that encrypts Secrets after each upgrade of all nodes")
		level      slog.LevelVar
	)
	f.TextVar(&level, "log-level", &level, "debug, info, warn or error")
	if err := f.Parse(args); err != nil {
		return err
	}
	switch {
	case f.NArg() > 0:
		return fmt.Errorf("unexpected argument %q", f.Arg(0))
	case *role == "relay" && *agent == "":
		return errors.New("--role=relay needs --agent: set the socket of this machine's agent")
	case *role == "relay" && *node == "":
		return errors.New("--role=relay needs --node: set the name of this machine's Node")
	case *role == "relay":
		cluster, err := podmain.Access(*kubeconfig)
		if err != nil {
			return err
		}
		return operator.Relay(ctx, operator.RelayConfig{
			Address: *relay, Socket: *agent, Cluster: cluster, Namespace: *namespace, Node: *node,
			Log: slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: &level})),
		})
	case *agent != "" && *node == "":
		return errors.New("--agent needs --node: set the name of this machine's Node")
	case *role != "operator":
		return fmt.Errorf("unknown role %q: use operator, relay or plans", *role)
	}
	from, err := providers.Known(*provider)
	if err != nil {
		return fmt.Errorf("--provider: %w", err)
	}
	log := slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: &level, ReplaceAttr: podmain.Readable}))
	klog.SetSlogLogger(slog.New(liblog.Handler(log.Handler())))

	cluster, err := podmain.Access(*kubeconfig)
	if err != nil {
		return err
	}
	log.Info("starting", "release", version.Release, "provider", *provider, "role", *role)
	return operator.Run(ctx, operator.Config{
		Cluster: cluster, Namespace: *namespace,
		Cloud:         from.Control(cmp.Or(*metadata, from.MetadataAddress), cmp.Or(*address, from.ControlAddress)),
		KeepApprovals: from.NoJoin, Spares: from.Enrolled, RotateKey: *rotate, Agent: *agent, Relay: true, Node: *node, Pod: *pod,
		MetricsAddress: *metrics, HealthAddress: *health, SnapshotAddress: *snapshots,
		DiscoveryInterval: *interval, NoElection: !*election, Log: log,
	})
}
