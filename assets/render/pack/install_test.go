package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/cli"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"constellation/assets"
	"constellation/engine/sandbox/controlplane"
	"constellation/internal/testneeds"
)

// helmUser acts like a user of the helm command in the namespace system-upgrade.
type helmUser struct {
	*testing.T
	cfg     *action.Configuration
	objects *dynamic.DynamicClient
	archive string
}

// TestPlansChartOnARealAPIServer installs, upgrades, rolls back and uninstalls the packed chart, and
// installs it over the plain manifest.
func TestPlansChartOnARealAPIServer(t *testing.T) {
	testneeds.ControlPlane(t)
	ctx, dir := t.Context(), t.TempDir()
	cp, err := controlplane.Start(ctx, controlplane.Options{Dir: filepath.Join(dir, "cp")})
	if err != nil {
		t.Fatal(err)
	}
	defer cp.Stop()
	kubeconfig, err := cp.Kubeconfig()
	if err != nil {
		t.Fatal(err)
	}
	env := cli.New()
	env.KubeConfig = filepath.Join(dir, "kubeconfig")
	env.SetNamespace("system-upgrade")
	if err := os.WriteFile(env.KubeConfig, kubeconfig, 0o600); err != nil {
		t.Fatal(err)
	}
	u := &helmUser{T: t, cfg: &action.Configuration{}, archive: filepath.Join(dir, "constellation-plans-1.1.0.tgz")}
	if err := u.cfg.Init(env.RESTClientGetter(), "system-upgrade", "secret", func(string, ...any) {}); err != nil {
		t.Fatal(err)
	}
	if u.objects, err = dynamic.NewForConfig(cp.Config()); err != nil {
		t.Fatal(err)
	}
	if err := pack(assets.PlansChart, "v1.1.0", dir); err != nil {
		t.Fatal(err)
	}
	const first, second = "registry.constellation.example/operator:v1.1.0", "registry.example.com:5000/mirror/operator:v1.1.1"

	u.install(ctx, false)
	u.image(ctx, first)
	plan := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "upgrade.cattle.io/v1", "kind": "Plan", "metadata": map[string]any{"name": "test", "namespace": "system-upgrade"},
		"spec": map[string]any{"version": "v1", "serviceAccountName": "system-upgrade", "upgrade": map[string]any{"image": "example.com/upgrade"}},
	}}
	if _, err := u.objects.Resource(plans).Namespace("system-upgrade").Create(ctx, plan, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}

	up := action.NewUpgrade(u.cfg)
	up.Namespace, up.ReuseValues = "system-upgrade", true
	if r, err := up.RunWithContext(ctx, "plans", u.load(), map[string]any{"image": second}); err != nil || r.Version != 2 {
		t.Fatalf("upgrade: %+v, %v", r, err)
	}
	u.image(ctx, second)
	back := action.NewRollback(u.cfg)
	back.Version = 1
	if err := back.Run("plans"); err != nil {
		t.Fatal(err)
	}
	u.image(ctx, first)

	u.uninstall(ctx)
	// The plain manifest was applied before; helm takes its objects over.
	if err := cp.Apply(ctx, assets.PlansManifest()); err != nil {
		t.Fatal(err)
	}
	install := action.NewInstall(u.cfg)
	install.ReleaseName, install.Namespace = "plans", "system-upgrade"
	if _, err := install.RunWithContext(ctx, u.load(), map[string]any{"image": second}); err == nil {
		t.Fatal("helm replaced objects that it does not own")
	}
	u.install(ctx, true)
	u.image(ctx, first)
	u.uninstall(ctx)
	if _, err := u.objects.Resource(plans).Namespace("system-upgrade").Get(ctx, "test", metav1.GetOptions{}); err != nil {
		t.Errorf("a Plan did not survive helm uninstall: %v", err)
	}
}

var (
	plans       = schema.GroupVersionResource{Group: "upgrade.cattle.io", Version: "v1", Resource: "plans"}
	deployments = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}
	rbac        = schema.GroupVersion{Group: "rbac.authorization.k8s.io", Version: "v1"}
)

func (u *helmUser) load() *chart.Chart {
	u.Helper()
	c, err := loader.Load(u.archive)
	if err != nil {
		u.Fatal(err)
	}
	return c
}

func (u *helmUser) install(ctx context.Context, takeOwnership bool) {
	u.Helper()
	i := action.NewInstall(u.cfg)
	i.ReleaseName, i.Namespace, i.CreateNamespace, i.TakeOwnership = "plans", "system-upgrade", true, takeOwnership
	if _, err := i.RunWithContext(ctx, u.load(), nil); err != nil {
		u.Fatal(err)
	}
}

// image checks the image of the controller, and that the drain of Jobs has the same.
func (u *helmUser) image(ctx context.Context, want string) {
	u.Helper()
	d, err := u.objects.Resource(deployments).Namespace("system-upgrade").Get(ctx, "system-upgrade-controller", metav1.GetOptions{})
	if err != nil {
		u.Fatal(err)
	}
	containers, _, _ := unstructured.NestedSlice(d.Object, "spec", "template", "spec", "containers")
	if len(containers) != 1 || containers[0].(map[string]any)["image"] != want {
		u.Errorf("the Deployment has %v, want image %s", containers, want)
	}
	m, err := u.objects.Resource(schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}).Namespace("system-upgrade").Get(ctx, "constellation-controller-env", metav1.GetOptions{})
	if err != nil {
		u.Fatal(err)
	}
	if got, _, _ := unstructured.NestedString(m.Object, "data", "SYSTEM_UPGRADE_JOB_KUBECTL_IMAGE"); got != want {
		u.Errorf("the drain has image %s, want %s", got, want)
	}
}

// uninstall checks that nothing of the chart stays but the kind.
func (u *helmUser) uninstall(ctx context.Context) {
	u.Helper()
	if _, err := action.NewUninstall(u.cfg).Run("plans"); err != nil {
		u.Fatal(err)
	}
	if _, err := u.objects.Resource(deployments).Namespace("system-upgrade").Get(ctx, "system-upgrade-controller", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		u.Errorf("the Deployment stays: %v", err)
	}
	for _, resource := range []string{"clusterroles", "clusterrolebindings", "roles", "rolebindings"} {
		list, err := u.objects.Resource(rbac.WithResource(resource)).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/part-of=constellation-plans"})
		if err != nil {
			u.Fatal(err)
		}
		for _, o := range list.Items {
			u.Errorf("%s %s stays", resource, o.GetName())
		}
	}
	kinds := schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	if _, err := u.objects.Resource(kinds).Get(ctx, "plans.upgrade.cattle.io", metav1.GetOptions{}); err != nil {
		u.Errorf("the kind does not stay: %v", err)
	}
}
