package main

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"

	"constellation/assets"
	"constellation/engine/sandbox/controlplane"
	"constellation/internal/testneeds"
)

// helmUser runs helm's own command and kubectl on a real API server. No kubelet runs there, so pods
// stay pending, and nothing is waited for.
type helmUser struct {
	*testing.T
	dir, kubectlBinary string
	server             *controlplane.ControlPlane
}

func newHelmUser(t *testing.T) *helmUser {
	t.Helper()
	testneeds.ControlPlane(t)
	u := &helmUser{T: t, dir: t.TempDir()}
	binaries, err := controlplane.FindBinaries()
	if err != nil {
		t.Fatal(err)
	}
	u.kubectlBinary = filepath.Join(binaries, "kubectl")
	if _, err := os.Stat(u.kubectlBinary); err != nil {
		t.Skipf("needs kubectl: %v", err)
	}
	testneeds.Tree()
	build := exec.CommandContext(t.Context(), "go", "build", "-o", u.dir, "helm.sh/helm/v3/cmd/helm")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build helm: %v\n%s", err, out)
	}
	if u.server, err = controlplane.Start(t.Context(), controlplane.Options{Dir: filepath.Join(u.dir, "cp")}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(u.server.Stop)
	kubeconfig, err := u.server.Kubeconfig()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(u.dir, "kubeconfig"), kubeconfig, 0o600); err != nil {
		t.Fatal(err)
	}
	return u
}

// run runs a command in the user's home, and returns its output.
func (u *helmUser) run(in, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(u.Context(), name, args...)
	cmd.Dir, cmd.Stdin = u.dir, strings.NewReader(in)
	cmd.Env = []string{"HOME=" + u.dir, "KUBECONFIG=" + filepath.Join(u.dir, "kubeconfig"), "PATH=" + os.Getenv("PATH")}
	var out, fails bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &fails
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w: %s", filepath.Base(name), strings.Join(args, " "), err, fails.String())
	}
	return out.String(), nil
}

func (u *helmUser) helm(args ...string) string {
	u.Helper()
	out, err := u.run("", filepath.Join(u.dir, "helm"), args...)
	if err != nil {
		u.Fatal(err)
	}
	return out
}

func (u *helmUser) kubectl(in string, args ...string) string {
	u.Helper()
	out, err := u.run(in, u.kubectlBinary, args...)
	if err != nil {
		u.Fatal(err)
	}
	return out
}

// image checks the image of a Deployment.
func (u *helmUser) image(namespace, deployment, want string) {
	u.Helper()
	if got := u.kubectl("", "-n", namespace, "get", "deployment", deployment, "-o", "jsonpath={.spec.template.spec.containers[*].image}"); got != want {
		u.Errorf("Deployment %s has image %q, want %q", deployment, got, want)
	}
}

// uninstall checks that nothing of a release stays but the objects in kept.
func (u *helmUser) uninstall(namespace, release string, kept ...string) {
	u.Helper()
	objects := u.helm("get", "manifest", release, "--namespace", namespace)
	if got := strings.Count(u.kubectl(objects, "get", "-f", "-", "-o", "name"), "\n"); got < 5 {
		u.Fatalf("the release has %d objects", got)
	}
	u.helm("uninstall", release, "--namespace", namespace)
	if left := strings.Fields(u.kubectl(objects, "get", "-f", "-", "-o", "name", "--ignore-not-found")); !slices.Equal(left, kept) {
		u.Errorf("helm uninstall leaves %q, want %q", left, kept)
	}
}

// TestPlansChartOnARealAPIServer installs the packed chart from a registry, upgrades, rolls back and
// uninstalls it, and installs it over the plain manifest.
func TestPlansChartOnARealAPIServer(t *testing.T) {
	t.Parallel()
	u := newHelmUser(t)
	if err := pack(assets.PlansChart, "v1.1.0", u.dir); err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(u.dir, "constellation-plans-1.1.0.tgz")
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	charts := "oci://" + strings.TrimPrefix(server.URL, "http://") + "/charts"
	const ns, deployment = "system-upgrade", "system-upgrade-controller"
	const first, second = "registry.constellation.example/operator:v1.1.0", "registry.example.com:5000/mirror/operator:v1.1.1"
	image := func(want string) {
		t.Helper()
		u.image(ns, deployment, want)
		if got := u.kubectl("", "-n", ns, "get", "configmap", "constellation-controller-env", "-o", "jsonpath={.data.SYSTEM_UPGRADE_JOB_KUBECTL_IMAGE}"); got != want {
			t.Errorf("the drain has image %s, want %s", got, want)
		}
	}

	u.helm("push", archive, charts, "--plain-http")
	u.helm("install", "plans", charts+"/constellation-plans", "--version", "1.1.0", "--plain-http", "--namespace", ns, "--create-namespace")
	image(first)
	u.kubectl(`{"apiVersion":"upgrade.cattle.io/v1","kind":"Plan","metadata":{"name":"test","namespace":"`+ns+`"},
		"spec":{"version":"v1","serviceAccountName":"system-upgrade","upgrade":{"image":"example.com/upgrade"}}}`, "create", "-f", "-")
	u.helm("upgrade", "plans", archive, "--namespace", ns, "--reuse-values", "--set", "image="+second)
	image(second)
	u.helm("rollback", "plans", "1", "--namespace", ns)
	image(first)
	u.uninstall(ns, "plans")

	// The plain manifest was applied before; helm takes its objects over.
	u.kubectl(string(assets.PlansManifest()), "apply", "-f", "-")
	if _, err := u.run("", filepath.Join(u.dir, "helm"), "install", "plans", archive, "--namespace", ns); err == nil || !strings.Contains(err.Error(), "cannot be imported") {
		t.Errorf("helm replaces objects that it does not own: %v", err)
	}
	u.helm("install", "plans", archive, "--namespace", ns, "--take-ownership")
	image(first)
	u.uninstall(ns, "plans")
	u.kubectl("", "-n", ns, "get", "plans.upgrade.cattle.io", "test") // it and its kind stay
}

// TestOperatorChartOnARealAPIServer installs, upgrades, rolls back and uninstalls the packed chart of
// the operator. Its kinds stay.
func TestOperatorChartOnARealAPIServer(t *testing.T) {
	t.Parallel()
	u := newHelmUser(t)
	if err := pack(operatorChart, "v1.1.0", u.dir); err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(u.dir, "constellation-operator-1.1.0.tgz")
	const ns, release = "constellation-system", "constellation-operator"
	const first, second = "registry.constellation.example/operator:v1.1.0", "registry.example.com:5000/mirror/operator:v1.1.1"
	if _, err := u.run("", filepath.Join(u.dir, "helm"), "install", release, archive, "--namespace", ns, "--create-namespace"); err == nil || !strings.Contains(err.Error(), "provider") {
		t.Errorf("helm installs it without a provider: %v", err)
	}
	u.helm("install", release, archive, "--namespace", ns, "--create-namespace", "--set", "provider=sandbox,cloudURL=unix:/run/cloud")
	u.image(ns, "constellation-operator", first)
	sample, err := fs.ReadFile(assets.Samples(), "nodeversion.yaml")
	if err != nil {
		t.Fatal(err)
	}
	u.kubectl(string(sample), "create", "-f", "-")
	u.helm("upgrade", release, archive, "--namespace", ns, "--reuse-values", "--set", "operator.image="+second)
	u.image(ns, "constellation-operator", second)
	u.helm("rollback", release, "1", "--namespace", ns)
	u.image(ns, "constellation-operator", first)
	// Plans and the account of their Jobs stay, too.
	u.uninstall(ns, release, "namespace/system-upgrade", "serviceaccount/system-upgrade")
	u.kubectl("", "get", "nodeversions.update.edgeless.systems", "constellation-version") // it and its kind stay
	u.helm("install", release, archive, "--namespace", ns, "--set", "provider=sandbox")
}
