package main

import (
	"os/exec"
	"strings"
	"testing"
)

// TestBinariesLinkOnlyWhatTheyMay keeps each role small: what runs as root on a
// node, or inside a cluster, links no terminal and no chart engine.
func TestBinariesLinkOnlyWhatTheyMay(t *testing.T) {
	for _, tt := range []struct {
		pkg    string
		never  []string
		reason string
	}{
		{"./bootstrapper/cmd", []string{"k8s.io/", "sigs.k8s.io/controller-runtime", "helm.sh/", "github.com/charmbracelet/", "constellation/engine/kube", "constellation/joinservice/cmd", "constellation/operator"}, "a root daemon of a node stays small"},
		{"./agent/cmd", []string{"k8s.io/", "sigs.k8s.io/controller-runtime", "helm.sh/", "github.com/charmbracelet/", "constellation/bootstrapper", "constellation/joinservice", "constellation/operator"}, "a root daemon of a node stays small"},
		{"./joinservice/cmd", []string{"helm.sh/", "github.com/charmbracelet/", "constellation/tui", "constellation/engine/kube", "constellation/engine/sandbox"}, "what runs in the cluster installs no charts and has no terminal"},
		{"./operator/cmd", []string{"helm.sh/", "github.com/charmbracelet/", "constellation/tui", "constellation/engine/kube", "constellation/engine/sandbox"}, "what runs in the cluster installs no charts and has no terminal"},
		{"./tui", []string{"k8s.io/", "helm.sh/", "constellation/engine/kube", "constellation/engine/sandbox", "constellation/operator"}, "the console shows what the engine says"},
		{"./engine", []string{"k8s.io/", "sigs.k8s.io/controller-runtime", "helm.sh/", "github.com/charmbracelet/", "constellation/engine/kube", "constellation/engine/sandbox"}, "the engine decides; its hands are elsewhere"},
		{"./assets", []string{"constellation/engine", "constellation/tui"}, "assets hold no logic"},
	} {
		t.Run(tt.pkg, func(t *testing.T) {
			out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", tt.pkg).CombinedOutput()
			if err != nil {
				t.Fatalf("go list: %v\n%s", err, out)
			}
			for dep := range strings.Lines(string(out)) {
				dep = strings.TrimSpace(dep)
				for _, n := range tt.never {
					if dep == strings.TrimSuffix(n, "/") || strings.HasPrefix(dep, n) {
						t.Errorf("%s links %s: %s", tt.pkg, dep, tt.reason)
					}
				}
			}
		})
	}
}
