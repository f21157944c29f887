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
	"syscall"

	"constellation/agent"
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
	operator := flag.Uint("operator", 0, "`user` ID that may ask besides root; 0 means nobody")
	socket := flag.String("socket", agent.DefaultSocket, "unix socket to listen on, `path`")
	root := flag.String("root", "/", "`directory` where the host's file system begins; kubeadm itself works on /")
	name := flag.String("name", "", "`name` of the host; empty is what the kernel says")
	address := flag.String("address", "", "`address` of the host's own kubelet, API server and etcd; empty is 127.0.0.1")
	etcd := flag.String("etcd", "", "`URL` of the host's member of etcd; empty is what kubeadm sets up")
	pki := flag.String("etcd-pki", "", "`directory` of etcd's client certificate; empty is what kubeadm sets up")
	show := flag.Bool("version", false, "print the version and exit")
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), "agent does for the operator what needs this host's rights: it upgrades Kubernetes and serves etcd, on a unix socket that only root and the operator can open.\n\nUsage:\n  agent [flags]\n\nFlags:\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "agent: unexpected argument %q; see agent -h\n", flag.Arg(0))
		os.Exit(2)
	}
	if uint64(*operator) > math.MaxInt32 {
		fmt.Fprintf(os.Stderr, "agent: -operator %d is no user ID\n", *operator)
		os.Exit(2)
	}
	if *show {
		fmt.Println(version.Release)
		return
	}
	// A machine's memory is for its pods: collect early rather than grow.
	debug.SetGCPercent(50)
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	server := agent.New(agent.Host{Root: *root, Name: *name, Address: *address, Etcd: agent.Etcd{Endpoint: *etcd, PKI: *pki}}, *socket, log)
	server.Operator = uint32(*operator)
	if err := server.Run(ctx); err != nil {
		log.Error("agent ended", "err", err)
		stop()
		os.Exit(1)
	}
}
