// Command joinservice attests machines that want to join the cluster of the control plane that
// it runs on, and issues tickets to them. See package joinservice.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"k8s.io/klog/v2"

	"constellation/engine/cloud/providers"
	"constellation/engine/version"
	"constellation/internal/podmain"
	"constellation/joinservice"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "joinservice:", err)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	f := flag.NewFlagSet("joinservice", flag.ContinueOnError)
	var (
		provider   = f.String("provider", "", "`name` of the cloud, required: "+strings.Join(providers.Names(), " or "))
		metadata   = f.String("metadata", "", "`URL` of the cloud's metadata server; empty: the provider's default")
		listen     = f.String("listen", ":9090", "`address` for joining machines (attested TLS)")
		health     = f.String("health", "127.0.0.1:9091", "`address` for /healthz and /readyz (HTTP)")
		tpm        = f.String("tpm", "", "`address` of this machine's TPM, unix:PATH or a device; empty: the provider's default")
		pki        = f.String("pki", "/etc/kubernetes/pki", "`folder` of the cluster's certificates and keys")
		namespace  = f.String("namespace", "constellation-system", "`namespace` of the lease of joining control planes")
		registry   = f.String("registry-secret", "", "`Secret` of the namespace with the registry of joining machines; empty: they pull from the publishers of images")
		keys       = f.String("kms", "", "`socket` of this machine's key service; empty: API servers do not encrypt")
		certifier  = f.String("certifier", "", "`socket` of this machine's certifier; empty: the cluster has none")
		port       = f.Int("api-server-port", 6443, "`port` of the API server at the load balancer")
		kubeconfig = f.String("kubeconfig", "", "kubeconfig `file`, for development; empty inside a pod")
		level      slog.LevelVar
	)
	f.TextVar(&level, "log-level", &level, "debug, info, warn or error")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	from, err := providers.Find(*provider)
	if err != nil {
		return fmt.Errorf("--provider: %w", err)
	}
	if from, err = from.On(*metadata, *tpm); err != nil {
		return fmt.Errorf("--metadata, --tpm: %w", err)
	}
	log := slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: &level, ReplaceAttr: podmain.Readable}))
	klog.SetSlogLogger(log)

	cluster, err := podmain.Access(*kubeconfig)
	if err != nil {
		return err
	}
	s, err := joinservice.New(joinservice.Config{
		Cluster: cluster, Namespace: *namespace, Metadata: from.Metadata(from.MetadataAddress),
		Issuer: from.Attestation.Issuer(from.TPMAddress), Attestation: from.Attestation, PKI: *pki, APIServerPort: *port, RegistrySecret: *registry, Certifier: *certifier, KMS: *keys, Spares: from.Enrolled, Log: log,
	})
	if err != nil {
		return err
	}
	var lc net.ListenConfig
	join, err := lc.Listen(ctx, "tcp", *listen)
	if err != nil {
		return err
	}
	probes, err := lc.Listen(ctx, "tcp", *health)
	if err != nil {
		join.Close()
		return err
	}
	log.Info("starting", "release", version.Release, "provider", *provider)
	return s.Run(ctx, join, probes)
}
