// Constellation takes a Kubernetes cluster of attested machines through its life.
//
// This is the map of the repository. The program has one engine and three faces: a
// console for people, plain lines for logs, JSON Lines for other programs.
//
//	main ──► tui ──► engine ◄── engine/kube ◄── main ──► engine/sandbox
//
// On the user's computer:
//
//   - main (this file) puts the parts together and decides nothing.
//   - tui is everything the user sees: commands, console, printers. It imports engine
//     and nothing else of ours.
//   - engine decides what to do to a cluster and does it: configuration, findings,
//     plans, runs, events, the workspace's files. It knows no Kubernetes client.
//   - engine/kube is the engine's hands inside a cluster: client-go, Helm.
//   - engine/sandbox is a throwaway cloud on this computer, with real machines
//     (engine/sandbox/machine) and Kubernetes built from its own source modules
//     (engine/sandbox/build), and drills on it (engine/sandbox/drill).
//   - assets are embedded files: charts, CRDs, release data, the default
//     configuration, systemd units.
//
// In the cluster, each with its own binary in its cmd directory and its wire contract
// in a package of its own (initproto, joinproto, upgradeproto, operator/api):
//
//   - bootstrapper runs on every new machine. It serves one init or makes one join,
//     whichever claims the machine first, runs kubeadm and stops.
//   - joinservice runs on control planes: it verifies the evidence of a machine and
//     gives it a ticket to join.
//   - operator brings nodes to the version that is wanted.
//   - agent serves a few narrow verbs to the operator on every machine.
//
// Shared by them, below engine: version, release, component (what a node must have
// installed), kubeadm, attestation, atls, cloud. A daemon links no terminal and no
// Helm; a test beside this file and the linter see to that.
//
// ARCHITECTURE.md says why it is so, README.md how it is used.
package main

import (
	"context"
	"log/slog"
	"os"

	"constellation/engine"
	"constellation/engine/kube"
	"constellation/engine/sandbox"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/drill"
	"constellation/engine/sandbox/hollow"
	"constellation/engine/sandbox/machine/disk"
	"constellation/engine/sandbox/simulated"
	"constellation/engine/version"
	"constellation/tui"
)

func main() {
	if args := os.Args[1:]; disk.IsServer(args) {
		os.Exit(disk.Main(args))
	} else if simulated.IsStandIn(args) {
		os.Exit(simulated.Main(args))
	}
	os.Exit(tui.App{
		Release:    version.Release,
		Kubernetes: build.Versions(),
		Images:     []string{version.Release, "v1.0.0"},
		Releases:   []string{version.Release, "v1.0.0"},
		Faults:     sandbox.FaultNames(),
		Engine:     newEngine,
		Sandbox:    newSandbox,
		Drills:     newDrills,
		Daemon:     serveSandbox,
	}.Main())
}

func newEngine(w *engine.Workspace, log *slog.Logger) (tui.Engine, error) {
	box, err := newSandbox(log)
	if err != nil {
		return nil, err
	}
	connect := func(_ context.Context, kubeconfig []byte) (engine.Cluster, error) {
		return kube.Connect(kubeconfig, log)
	}
	inspect := func(_ context.Context, kubeconfig []byte) (engine.Inspector, error) {
		return kube.Connect(kubeconfig, log)
	}
	backups := func(_ context.Context, kubeconfig []byte) (engine.BackupCluster, error) {
		return kube.Connect(kubeconfig, log)
	}
	return engine.New(w, engine.Deps{Connect: connect, Inspect: inspect, Backups: backups, Sandbox: box, Buildable: build.Versions(), Log: log}), nil
}

func newSandbox(log *slog.Logger) (engine.Sandbox, error) {
	dirs, err := sandbox.DefaultDirs()
	if err != nil {
		return nil, err
	}
	return sandbox.New(dirs, "", log), nil
}

func newDrills(log *slog.Logger) (engine.Drills, error) {
	dirs, err := sandbox.DefaultDirs()
	if err != nil {
		return nil, err
	}
	return drill.New(dirs, sandbox.New(dirs, "", log), log), nil
}

func serveSandbox(ctx context.Context, name string, log *slog.Logger) error {
	dirs, err := sandbox.DefaultDirs()
	if err != nil {
		return err
	}
	return sandbox.Serve(ctx, dirs, name, log, hollow.Serve)
}
