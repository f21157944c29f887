// Constellation creates, upgrades and operates Kubernetes clusters on attested machines.
//
// This comment is the map of the repository. The program has one engine and three outputs:
// a console for people, plain lines for logs, JSON Lines for other programs.
//
//	main ──► tui ──► engine ◄── engine/kube ◄── main ··exec··► engine/sandbox/cmd
//
// On the user's computer:
//
//   - main (this file) connects the parts and has no logic.
//   - tui is the user interface: commands and printers; tui/console has the console's screens,
//     tui/view draws pages, tui/term controls the terminal. They import engine and its value
//     packages only.
//   - engine plans and runs all operations on a cluster: configuration, findings, plans,
//     runs, events, the workspace's files. It imports no Kubernetes client.
//   - engine/kube implements the engine's access to a cluster: client-go, Helm.
//   - engine/sandbox is a local test cloud, with real machines (engine/sandbox/machine),
//     Kubernetes built from source modules (engine/sandbox/build), and upgrades under fault
//     injection (engine/sandbox/drill). It is a program of its own, constellation-sandbox
//     (engine/sandbox/cmd), which main executes for the verb sandbox. main links none of it.
//   - assets are embedded files: charts, CRDs, release data, the default
//     configuration, systemd units.
//
// In the cluster, each with its own binary in its cmd directory and its wire protocol in a
// separate package (initproto, joinproto, upgradeproto, operator/api):
//
//   - bootstrapper runs on every new machine. It serves one init or performs one join,
//     whichever claims the machine first, runs kubeadm and exits.
//   - joinservice runs on control planes. It verifies the attestation evidence of a machine
//     and issues a join ticket.
//   - operator upgrades nodes to the target version.
//   - agent runs on every machine and executes a few narrow RPCs for the operator.
//
// They share packages below engine: version, release, component (what a node installs),
// kubeadm, attestation, atls, cloud. A daemon links no terminal library and no Helm; a test
// beside this file and the linter enforce that.
//
// ARCHITECTURE.md explains the design, README.md the usage.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cloud/gcp"
	gcpinfra "constellation/engine/cloud/gcp/infra"
	"constellation/engine/cloud/sandboxapi/sandboxexec"
	"constellation/engine/conformance"
	"constellation/engine/enrol"
	"constellation/engine/infra"
	"constellation/engine/kube"
	"constellation/engine/lifecycle"
	"constellation/engine/machinecheck"
	"constellation/engine/offline"
	"constellation/engine/version"
	"constellation/engine/workspace"
	"constellation/tui"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == kube.CredentialVerb {
		os.Exit(kube.RunCredentialPlugin(os.Args[2:], os.Getenv(kube.CredentialTimeout), os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(tui.App{
		Release:       version.Release,
		Kubernetes:    sandboxexec.KubernetesVersions(),
		Minors:        minors(),
		Releases:      []string{version.Release, "v1.0.0"},
		Engine:        newEngine,
		Clusters:      kube.NewClusters(),
		CheckOffline:  offline.Check,
		CheckMachines: machinecheck.Check, FixMachines: machinecheck.Fix,
		Enrol:    tui.Enrol{Programs: enrol.FindPrograms, Check: machinecheck.CheckConnected, Install: enrol.InstallAll, Remove: enrol.RemoveOne, Logs: enrol.Follow},
		ServeMCP: serveMCP, WriteSupportBundle: kube.SupportBundle, SupportRole: kube.SupportRole,
		FindSandbox: sandboxexec.Find,
		RunSandbox:  sandboxexec.Run,
		Conform:     conformance.Run,
	}.Main())
}

// minors are the newest minors of Kubernetes that checks have data about, as many as are supported
// at a time and one more.
func minors() (out []string) {
	newest := lifecycle.Newest()
	for i := range 4 {
		out = append(out, fmt.Sprintf("v%d.%d", newest.Major(), newest.Minor()-i))
	}
	return out
}

func newEngine(w *workspace.Workspace, log *slog.Logger) (tui.Engine, error) {
	connect := func(ctx context.Context, kubeconfig []byte) (engine.Cluster, error) {
		return kube.ConnectIn(ctx, kubeconfig, log)
	}
	inspect := func(_ context.Context, kubeconfig []byte) (check.Inspector, error) {
		return kube.Connect(kubeconfig, log)
	}
	backups := func(ctx context.Context, kubeconfig []byte) (engine.BackupCluster, error) {
		return kube.ConnectIn(ctx, kubeconfig, log)
	}
	return engine.New(w, engine.Deps{
		Connect: connect, Inspect: inspect, Backups: backups, WhySilent: sandboxexec.WhySilent, Buildable: sandboxexec.KubernetesVersions(), Infra: vendors, Log: log,
	}), nil
}

// vendors make the infrastructure of clouds.
var vendors = map[string]infra.Vendor{gcp.Name: gcpinfra.Vendor}
