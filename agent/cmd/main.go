//go:build linux

// The agent of a host: see package agent.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"math"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"syscall"

	"constellation/agent"
	"constellation/engine/cloud/providers/notices"
	"constellation/engine/kubeadm"
	"constellation/engine/version"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == kubeadm.GateArgument {
		kubeadm.Gate()
	}
	if agent.IsEnrolment() {
		os.Exit(agent.Enrol())
	}
	if len(os.Args) > 1 && slices.Contains([]string{verbInstall, verbRemove, verbWait}, os.Args[1]) {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
		err := setup(ctx, os.Args[1], os.Args[2:], os.Stdout)
		stop()
		if err != nil {
			fmt.Fprintln(os.Stderr, "agent:", err)
			os.Exit(1)
		}
		return
	}
	operator := flag.Uint("operator", 0, "`user` ID that may connect besides root; 0 means none")
	socket := flag.String("socket", agent.DefaultSocket, "unix socket to listen on, `path`")
	root := flag.String("root", "/", "root `directory` of the host's file system; kubeadm itself uses /")
	name := flag.String("name", "", "`name` of the host; empty means the kernel's")
	address := flag.String("address", "", "`address` of the host's own kubelet, API server and etcd; empty is 127.0.0.1")
	etcd := flag.String("etcd", "", "`URL` of the host's member of etcd; empty means kubeadm's default")
	pki := flag.String("etcd-pki", "", "`directory` of etcd's client certificate; empty means kubeadm's default")
	provider := flag.String("provider", os.Getenv("CONSTELLATION_PROVIDER"), "`name` of the host's cloud, whose announcements are written to the host's Node; empty means none")
	metadata := flag.String("metadata", os.Getenv("CONSTELLATION_METADATA"), "`URL` of the cloud's metadata server; empty means the cloud's default")
	show := flag.Bool("version", false, "print the version and exit")
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), "agent upgrades Kubernetes on this host and serves its etcd, on a unix socket that only root and the operator can open.\n\nUsage:\n  agent [flags]\n  agent install -root DIR -keys FILE   install it on a host that somebody else made\n  agent remove -root DIR               remove it again\n\nFlags:\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "agent: unexpected argument %q; see agent -h\n", flag.Arg(0))
		os.Exit(2)
	}
	if uint64(*operator) > math.MaxInt32 {
		fmt.Fprintf(os.Stderr, "agent: -operator %d is not a user ID\n", *operator)
		os.Exit(2)
	}
	if *show {
		fmt.Println(version.Release)
		return
	}
	// A machine's memory is for its pods: collect garbage early rather than grow.
	debug.SetGCPercent(50)
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	server := agent.New(agent.Host{Root: *root, Name: *name, Address: *address, Etcd: agent.Etcd{Endpoint: *etcd, PKI: *pki}}, *socket, log)
	server.Operator, server.Notices = uint32(*operator), notices.Of(*provider, *metadata)
	if err := server.Run(ctx); err != nil {
		log.Error("agent ended", "err", err)
		stop()
		os.Exit(1)
	}
}
