// Command bootstrapper makes the machine that it runs on a node of a cluster, once; see
// package bootstrapper. It reads its environment from:
//
//	CONSTELLATION_PROVIDER   name of the machine's cloud provider
//	CONSTELLATION_METADATA   URL of the cloud's metadata server
//	CONSTELLATION_TPM        address of the TPM, unix:PATH or a device, or enrolled:DIRECTORY
//	CONSTELLATION_KEYS_SOCKET   socket of the key service for join services; kms.KeysSocket if it is not set
//	CONSTELLATION_API_SERVER_PORT   port of API servers at the load balancer; 6443 if it is not set
//
// It exits with 3 if restarting it cannot help.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"

	"constellation/bootstrapper"
	"constellation/engine/attestation"
	"constellation/engine/attestation/certifier"
	"constellation/engine/cloud/providers"
	"constellation/engine/kms"
	"constellation/engine/kubeadm"
	"constellation/engine/version"
)

const (
	rootsFile  = "/etc/constellation/attestation-roots.pem"
	imagesFile = "/usr/lib/constellation/peers.json"
	runDir     = "/run/constellation-bootstrapper"

	exitFailed = 1
	exitUsage  = 2
	exitStuck  = 3
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string) int {
	f := flag.NewFlagSet("bootstrapper", flag.ContinueOnError)
	var m bootstrapper.Machine
	var level slog.LevelVar
	f.StringVar(&m.Listen, "listen", bootstrapper.DefaultListen, "`address` for a console that initializes a cluster")
	f.StringVar(&m.Root, "root", "/", "root `directory` of the machine's file system")
	f.StringVar(&m.StateDir, "state", bootstrapper.DefaultStateDir, "state `folder`, below the root, which survives a reboot")
	socket := f.String("certifier-socket", certifier.Socket, "`path` of the socket of the verb certifier")
	kmsSocket := f.String("kms-socket", kubeadm.KMSSocket, "`path` of the socket of the verb kms for the API server")
	f.TextVar(&level, "log-level", &level, "debug, info, warn or error")
	f.Usage = func() {
		fmt.Fprint(f.Output(), "bootstrapper makes this machine a node of a cluster, once.\n\nUsage:\n"+
			"  bootstrapper [flags]         offer the machine; start the kubelet if it is a node\n"+
			"  bootstrapper [flags] reset   take the node out of its cluster and remove what belongs to it\n"+
			"  bootstrapper identity VERB   enrol this machine: request, answer or store; see below\n"+
			"  bootstrapper [flags] certifier\n"+
			"                               serve the join service of this control plane; see -certifier-socket\n"+
			"  bootstrapper [flags] kms     serve the API server of this control plane; see -kms-socket\n"+
			"  bootstrapper call ADDRESS:PORT DIGEST\n"+
			"                               serve the console that printed this command; its token is on stdin\n"+
			"  bootstrapper version         print the version\n\n"+identityUsage+"\nFlags:\n")
		f.PrintDefaults()
	}
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return exitUsage
	}
	m.StateDir, m.RunDir = filepath.Join(m.Root, m.StateDir), filepath.Join(m.Root, runDir)
	m.Log = slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: &level}))
	m.KeysSocket = cmp.Or(os.Getenv("CONSTELLATION_KEYS_SOCKET"), kms.KeysSocket)
	if m.TPM = os.Getenv("CONSTELLATION_TPM"); m.TPM == "" {
		// The resource manager of the first TPM on every Linux machine. It is no value of a
		// provider: those describe pods, and the verb reset runs without a provider.
		m.TPM = "/dev/tpmrm0"
	}
	if f.Arg(0) == "identity" {
		return identity(ctx, m, f.Args()[1:], os.Stdin, os.Stdout, os.Stderr)
	}
	if f.Arg(0) == "call" {
		return call(ctx, f.Args()[1:], os.Stdin, os.Stdout, os.Stderr)
	}
	switch verb := f.Arg(0); {
	case f.NArg() > 1 || verb != "" && verb != "reset" && verb != "version" && verb != "certifier" && verb != "kms":
		fmt.Fprintf(os.Stderr, "bootstrapper: unexpected arguments %q; see bootstrapper -h\n", f.Args())
		return exitUsage
	case verb == "version":
		fmt.Println(version.Release)
		return 0
	case verb == "reset":
		return reset(ctx, m)
	}
	var err error
	m.Ready = func() { notify(m.Log) }
	switch f.Arg(0) {
	case "certifier":
		err = bootstrapper.RunCertifier(ctx, m, *socket)
	case "kms":
		err = bootstrapper.RunKeyService(ctx, m, *kmsSocket)
	default:
		err = offer(ctx, m)
	}
	switch {
	case err == nil:
		return 0
	case ctx.Err() != nil:
		m.Log.Info("bootstrapper stopped")
		return 0
	}
	m.Log.Error("bootstrapper ended", "err", err)
	if errors.Is(err, bootstrapper.ErrStuck) {
		return exitStuck
	}
	return exitFailed
}

// offer runs the bootstrapper with the data of this machine.
func offer(ctx context.Context, m bootstrapper.Machine) error {
	from, err := providers.Find(os.Getenv("CONSTELLATION_PROVIDER"))
	if err != nil {
		return fmt.Errorf("%w: read CONSTELLATION_PROVIDER: %w", bootstrapper.ErrStuck, err)
	}
	if from, err = from.On(os.Getenv("CONSTELLATION_METADATA"), m.TPM); err != nil {
		return fmt.Errorf("%w: read CONSTELLATION_METADATA and CONSTELLATION_TPM: %w", bootstrapper.ErrStuck, err)
	}
	m.Metadata = from.Metadata(from.MetadataAddress)
	m.Validator, m.KubeletCloudProvider, m.DividePods = from.Attestation.Validator, from.KubeletCloudProvider, from.DividePods
	m.Releases = from.Enrolled
	m.Issuer = from.Attestation.Issuer(m.TPM)
	if p := os.Getenv("CONSTELLATION_API_SERVER_PORT"); p != "" {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil || n == 0 {
			return fmt.Errorf("%w: CONSTELLATION_API_SERVER_PORT is %q, want a port", bootstrapper.ErrStuck, p)
		}
		m.APIServerPort = int(n)
	}
	pem, err := os.ReadFile(filepath.Join(m.Root, rootsFile))
	if err != nil {
		return fmt.Errorf("read trust roots: %w", err)
	}
	if m.Roots, err = attestation.ParseRoots(pem); err != nil {
		return fmt.Errorf("read %s: %w", rootsFile, err)
	}
	images, err := os.ReadFile(filepath.Join(m.Root, imagesFile))
	if err != nil {
		return fmt.Errorf("read measurements of other images: %w", err)
	}
	if err := json.Unmarshal(images, &m.Images); err != nil {
		return fmt.Errorf("read %s: %w", imagesFile, err)
	}
	m.Log.Info("bootstrapper started", "release", version.Release)
	return bootstrapper.Run(ctx, m)
}

func reset(ctx context.Context, m bootstrapper.Machine) int {
	unused, err := bootstrapper.Reset(ctx, m, func(line string) { fmt.Println(line) })
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "bootstrapper: reset:", err)
		return exitFailed
	case unused:
		fmt.Println("This machine is unused again. `systemctl start constellation-bootstrapper` offers it.")
	default:
		fmt.Println("The disk is clean. Register 15 of the TPM still says that this machine belongs to a cluster, and only a restart clears it: restart the machine, or replace it.")
	}
	return 0
}

// notify reports readiness to systemd, if the unit is of Type=notify.
func notify(log *slog.Logger) {
	addr := os.Getenv("NOTIFY_SOCKET")
	if addr == "" {
		return
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: addr, Net: "unixgram"})
	if err == nil {
		_, err = c.Write([]byte("READY=1"))
		c.Close()
	}
	if err != nil {
		log.Warn("systemd not notified", "err", err)
	}
}
