// Command joinservice attests machines that want to join the cluster of the control plane that
// it runs on, and issues tickets to them. With the verb signer it is the CA signer beside such a
// process, which has the keys of the cluster. See package joinservice.
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

	"constellation/engine/attestation/keyprocess"
	"constellation/engine/cloud/providers"
	"constellation/engine/version"
	"constellation/internal/podmain"
	"constellation/joinservice"
)

// socket is where the CA signer of a pod serves its join service.
const socket = "/run/constellation-ca-signer/ca.sock"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	args := os.Args[1:]
	program := serve
	if len(args) > 0 && args[0] == "signer" {
		program, args = sign, args[1:]
	}
	if err := program(ctx, args); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "joinservice:", err)
		}
		os.Exit(1)
	}
}

// common are the flags of both processes.
type common struct {
	*flag.FlagSet
	provider, metadata, tpm, namespace, socket, kubeconfig *string
	port                                                   *int
	level                                                  slog.LevelVar
}

func newCommon(name string) *common {
	f := &common{FlagSet: flag.NewFlagSet(name, flag.ContinueOnError)}
	f.provider = f.String("provider", "", "`name` of the cloud, required: "+strings.Join(providers.Names(), " or "))
	f.metadata = f.String("metadata", "", "`URL` of the cloud's metadata server; empty: the provider's default")
	f.tpm = f.String("tpm", "", "`address` of this machine's TPM, unix:PATH or a device, which the CA signer alone opens; empty: the provider's default")
	f.namespace = f.String("namespace", "constellation-system", "`namespace` of the lease of joining control planes")
	f.socket = f.String("signer", socket, "`socket` of the CA signer")
	f.port = f.Int("api-server-port", 6443, "`port` of the API server at the load balancer")
	f.kubeconfig = f.String("kubeconfig", "", "kubeconfig `file`, for development; empty inside a pod")
	f.TextVar(&f.level, "log-level", &f.level, "debug, info, warn or error")
	return f
}

// access parses the arguments.
func (f *common) access(args []string) (joinservice.Access, providers.Provider, error) {
	var a joinservice.Access
	var from providers.Provider
	if err := f.Parse(args); err != nil {
		return a, from, err
	}
	if f.NArg() > 0 {
		return a, from, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	from, err := providers.Find(*f.provider)
	if err != nil {
		return a, from, fmt.Errorf("--provider: %w", err)
	}
	if from, err = from.On(*f.metadata, *f.tpm); err != nil {
		return a, from, fmt.Errorf("--metadata, --tpm: %w", err)
	}
	log := slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: &f.level, ReplaceAttr: podmain.Readable}))
	klog.SetSlogLogger(log)
	cluster, err := podmain.Access(*f.kubeconfig)
	return joinservice.Access{
		Cluster: cluster, Namespace: *f.namespace, Metadata: from.Metadata(from.MetadataAddress),
		Attestation: from.Attestation, Spares: from.Enrolled, Log: log,
	}, from, err
}

// serve is the process that joining machines reach.
func serve(ctx context.Context, args []string) error {
	f := newCommon("joinservice")
	var (
		listen    = f.String("listen", ":9090", "`address` for joining machines (attested TLS)")
		health    = f.String("health", "127.0.0.1:9091", "`address` for /healthz and /readyz (HTTP)")
		registry  = f.String("registry-secret", "", "`Secret` of the namespace with the registry of joining machines; empty: they pull from the publishers of images")
		keys      = f.Bool("kms", false, "whether API servers encrypt Secrets, with the key service of their machine")
		certifier = f.Bool("certifier", false, "whether machines of this cluster have a certifier")
	)
	access, _, err := f.access(args)
	if err != nil {
		return err
	}
	s, err := joinservice.New(joinservice.Config{
		Access: access, Signer: *f.socket, APIServerPort: *f.port, RegistrySecret: *registry, Certifier: *certifier, KMS: *keys,
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
	access.Log.Info("starting", "release", version.Release, "provider", *f.provider)
	return s.Run(ctx, join, probes)
}

// sign is the CA signer.
func sign(ctx context.Context, args []string) error {
	f := newCommon("joinservice signer")
	var (
		pki       = f.String("pki", "/etc/kubernetes/pki", "`folder` of the cluster's certificates and keys")
		keys      = f.String("kms", "", "`socket` of this machine's key service; empty: API servers do not encrypt")
		certifier = f.String("certifier", "", "`socket` of this machine's certifier; empty: the cluster has none")
	)
	access, from, err := f.access(args)
	if err != nil {
		return err
	}
	if err := keyprocess.Protect(); err != nil {
		return err
	}
	s, err := joinservice.NewSigner(joinservice.SignerConfig{
		Access: access, Issuer: from.Attestation.Issuer(from.TPMAddress), PKI: *pki, APIServerPort: *f.port, Certifier: *certifier, KMS: *keys,
	})
	if err != nil {
		return err
	}
	l, err := keyprocess.Listen(ctx, *f.socket, access.Log)
	if err != nil {
		return err
	}
	access.Log.Info("starting", "release", version.Release, "provider", *f.provider, "process", keyprocess.CASigner)
	return s.Run(ctx, l)
}
