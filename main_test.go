package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"constellation/engine/cloud/gcp"
	gcpinfra "constellation/engine/cloud/gcp/infra"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/plan"
	"constellation/internal/testneeds"
)

// TestDocumentedEventsAreEvents checks docs/events.md: each example is a valid event without
// unknown fields, and every kind has an example.
func TestDocumentedEventsAreEvents(t *testing.T) {
	doc, err := os.ReadFile("docs/events.md")
	if err != nil {
		t.Fatal(err)
	}
	_, examples, ok := strings.Cut(string(doc), "```json\n")
	examples, _, ok2 := strings.Cut(examples, "```")
	if !ok || !ok2 {
		t.Fatal("docs/events.md has no examples")
	}
	seen := map[plan.Kind]bool{}
	for line := range strings.Lines(examples) {
		d := json.NewDecoder(strings.NewReader(line))
		d.DisallowUnknownFields()
		var e plan.Event
		if err := d.Decode(&e); err != nil {
			t.Errorf("%v: %s", err, line)
		}
		seen[e.Kind] = true
	}
	for _, k := range []plan.Kind{
		plan.KindHello, plan.KindPlan, plan.KindCheck, plan.KindStep, plan.KindNode, plan.KindLog, plan.KindProgress, plan.KindWait, plan.KindResult,
	} {
		if !seen[k] {
			t.Errorf("no example of a %s event", k)
		}
		if !strings.Contains(string(doc), "| `"+string(k)+"` |") {
			t.Errorf("%s events are not described", k)
		}
	}
}

// TestProductionLinksNoSandbox checks that the console and the daemons link no part of the test
// cloud, and nothing that can forge attestation evidence.
func TestProductionLinksNoSandbox(t *testing.T) {
	never := []string{
		"constellation/engine/sandbox", "constellation/engine/attestation/attestationtest", "constellation/engine/cloud/gcp/attest/attesttest", "github.com/hanwen/go-fuse",
	}
	for _, pkg := range []string{".", "./bootstrapper/cmd", "./agent/cmd", "./joinservice/cmd", "./operator/cmd"} {
		t.Run(pkg, func(t *testing.T) {
			for _, dep := range dependencies(t, pkg) {
				if (dep == "constellation/engine/infra" || dep == "constellation/engine/cloud/gcp/infra") && pkg != "." {
					t.Errorf("%s links %s: only the console makes infrastructure", pkg, dep)
				}
				if dep == "constellation/engine/attestation/authority" && pkg != "." && pkg != "./bootstrapper/cmd" {
					t.Errorf("%s links %s: only the console and the certifier, a process of the bootstrapper's program, certify machines", pkg, dep)
				}
				for _, n := range never {
					if dep == n || strings.HasPrefix(dep, n+"/") {
						t.Errorf("%s links %s", pkg, dep)
					}
				}
			}
		})
	}
	deps := dependencies(t, "./engine/sandbox/cmd")
	for _, n := range never { // else the names above are out of date
		if !slices.ContainsFunc(deps, func(dep string) bool { return dep == n || strings.HasPrefix(dep, n+"/") }) {
			t.Errorf("constellation-sandbox does not link %s", n)
		}
	}
}

// TestVendorsAreRegistered compares the clouds whose infrastructure this program makes with their entries, and the fields
// that it reads with those of the configuration.
func TestVendorsAreRegistered(t *testing.T) {
	for _, p := range providers.All() {
		if _, made := vendors[p.Name]; made != p.Infra {
			t.Errorf("provider %s has Infra %t, and vendors has it: %t", p.Name, p.Infra, made)
		}
	}
	google, _ := providers.Named(gcp.Name)
	reads := []string{
		gcpinfra.Project, gcpinfra.Zones, gcpinfra.Network, gcpinfra.Subnetwork, gcpinfra.Address, gcpinfra.ControlPlaneMachine, gcpinfra.WorkerMachine, gcpinfra.DiskSize,
		gcpinfra.ServiceAccount, gcpinfra.WorkerAccount, gcpinfra.SSHFrom, gcpinfra.NodeCIDR, gcpinfra.ProxyCIDR, gcpinfra.Controller,
		gcpinfra.Images, gcpinfra.Programs, gcpinfra.Proxy,
	}
	installs := []string{"cloudControllerManagerChart", "cloudControllerManagerImage", "persistentDisksChart", "networkPlugin"} // as charts
	reads = append(reads, installs...)
	for _, name := range reads {
		if !slices.ContainsFunc(google.Config, func(f section.Field) bool { return f.Name == name }) {
			t.Errorf("the section has no field %s", name)
		}
	}
	if len(google.Config) != len(reads) {
		t.Errorf("the section has %d fields, and infrastructure and charts read %d", len(google.Config), len(reads))
	}
}

// dependencies lists the packages that pkg links.
func dependencies(t *testing.T, pkg string) []string {
	t.Helper()
	testneeds.Tree()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", pkg).CombinedOutput()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, out)
	}
	return strings.Fields(string(out))
}

// TestDaemonsLinkNoConsole checks that programs that run as root on a node or inside a cluster
// link no terminal library and no Helm.
func TestDaemonsLinkNoConsole(t *testing.T) {
	for _, tt := range []struct {
		pkg    string
		never  []string
		reason string
	}{
		{pkg: "./bootstrapper/cmd", never: []string{"k8s.io/", "sigs.k8s.io/controller-runtime", "helm.sh/", "github.com/charmbracelet/", "constellation/engine/kube", "constellation/joinservice/cmd", "constellation/operator"}, reason: "daemons that run as root on nodes must stay small"},
		{pkg: "./agent/cmd", never: []string{"k8s.io/", "sigs.k8s.io/controller-runtime", "helm.sh/", "github.com/charmbracelet/", "constellation/bootstrapper", "constellation/joinservice", "constellation/operator"}, reason: "daemons that run as root on nodes must stay small"},
		{pkg: "./joinservice/cmd", never: []string{"helm.sh/", "github.com/charmbracelet/", "constellation/tui", "constellation/engine/kube", "constellation/engine/sandbox"}, reason: "programs in the cluster install no charts and have no terminal"},
		{pkg: "./operator/cmd", never: []string{"helm.sh/", "github.com/charmbracelet/", "constellation/tui", "constellation/engine/kube", "constellation/engine/sandbox"}, reason: "programs in the cluster install no charts and have no terminal"},
		{pkg: "./tui", never: []string{"k8s.io/", "helm.sh/", "constellation/engine/kube", "constellation/engine/sandbox", "constellation/operator"}, reason: "the console uses the engine for all access to clusters"},
		{pkg: "./tui/term", never: []string{"constellation/assets", "constellation/engine/version", "constellation/engine/kube", "github.com/spf13/"}, reason: "the terminal package depends on no cluster and no command"},
		{pkg: "./engine", never: []string{"k8s.io/", "sigs.k8s.io/controller-runtime", "helm.sh/", "github.com/charmbracelet/", "constellation/engine/kube", "constellation/engine/sandbox"}, reason: "the engine uses clients through its interfaces only"},
		{pkg: "./engine/backup", never: []string{"k8s.io/", "sigs.k8s.io/", "helm.sh/", "github.com/charmbracelet/", "constellation/engine/kube", "constellation/engine/version", "constellation/assets", "constellation/tui", "constellation/operator"}, reason: "package backup reads and writes files, and uses no cluster"},
		{pkg: "./assets", never: []string{"constellation/engine", "constellation/tui"}, reason: "assets have no logic"},
	} {
		t.Run(tt.pkg, func(t *testing.T) {
			for _, dep := range dependencies(t, tt.pkg) {
				if dep == "k8s.io/kms/apis/v2" && tt.pkg == "./bootstrapper/cmd" {
					continue // the messages between an API server and the key service; they need no client
				}
				for _, n := range tt.never {
					if n = strings.TrimSuffix(n, "/"); dep == n || strings.HasPrefix(dep, n+"/") {
						t.Errorf("%s links %s: %s", tt.pkg, dep, tt.reason)
					}
				}
			}
		})
	}
}
