package oddcloud_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/assets"
	"constellation/assets/render"
	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/oddcloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/kube"
	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/hollow"
	"constellation/engine/workspace"
	"constellation/operator/api/v1alpha1"
)

// catalogue has images whose references do not contain their versions. The first one ends like
// another version.
func catalogue() []cloud.Image {
	return []cloud.Image{{Reference: "ami-1", Version: "v1.0.0"}, {Reference: "ami-2", Version: "v1.1.0"}}
}

// TestImageVersionsComeFromTheCatalogue checks a cluster during a rollout in a cloud whose image
// references do not contain versions.
func TestImageVersionsComeFromTheCatalogue(t *testing.T) {
	t.Parallel()
	ctx, cp := t.Context(), controlplane.ForTest(t, controlplane.Options{})
	images := []cloud.Image{{Reference: "odd://demo/images/v7.0.0", Version: "v1.0.0"}, {Reference: "ami-2", Version: "v1.1.0"}}
	c, wait, err := oddcloud.Start(ctx, oddcloud.Options{Images: images, Components: offered(), Hollow: hollow.Options{Cluster: cp.Config(), Times: hollow.Times{Heartbeat: time.Hour}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(wait)
	t.Cleanup(providers.Register(c.Provider()))
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	admin, err := client.New(cp.Config(), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	crds, err := assets.CRDsFor(lifeRelease)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range crds {
		if err := cp.Apply(ctx, f.Data); err != nil {
			t.Fatal(err)
		}
	}
	components, clusterID := "k8s-components-sha256-"+strings.Repeat("a", 64), bytes.Repeat([]byte{7}, 32)
	config := func(name string, data map[string]string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: name}, Data: data}
	}
	for _, o := range []client.Object{
		&v1alpha1.NodeVersion{
			ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName},
			Spec:       v1alpha1.NodeVersionSpec{Image: "ami-2", ImageVersion: "v1.1.0", KubernetesComponentsReference: components, KubernetesClusterVersion: lifeKubernetes},
		},
		config(components, map[string]string{"cluster-version": lifeKubernetes, "components": "[]"}),
		config("join-config", map[string]string{"attestationConfig": `{"variant":"tpm2","measurements":{}}`, "clusterID": hex.EncodeToString(clusterID)}),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: lifeNamespace}},
	} {
		if err := admin.Create(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	services, err := render.Chart("constellation-services", lifeRelease, lifeNamespace, c.Provider().ChartValues(nil), map[string]any{"release": lifeRelease})
	if err != nil {
		t.Fatal(err)
	}
	if err := cp.Apply(ctx, services); err != nil {
		t.Fatal(err)
	}

	// One control plane and worker-0 have the old image, worker-1 the new one.
	if err := errors.Join(
		c.Machines.Seed(ctx, sandboxapi.ControlPlaneGroup, 1, components), c.Machines.Seed(ctx, sandboxapi.WorkerGroup, 1, components),
		c.SetGroupImage(ctx, oddcloud.Group(sandboxapi.WorkerGroup), "ami-2"), c.Machines.Seed(ctx, sandboxapi.WorkerGroup, 2, components),
	); err != nil {
		t.Fatal(err)
	}
	var nodes corev1.NodeList
	if err := admin.List(ctx, &nodes); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.Items {
		n.Labels[v1alpha1.LabelInPlace] = "true"
		if err := admin.Update(ctx, &n); err != nil {
			t.Fatal(err)
		}
	}
	stranger := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-9", Annotations: map[string]string{v1alpha1.AnnotationImage: "odd://demo/images/v1.0.0"}}}
	if err := admin.Create(ctx, stranger); err != nil {
		t.Fatal(err)
	}

	ws := configure(t, 1, 2)
	_, state, err := ws.Load()
	if err != nil {
		t.Fatal(err)
	}
	state.ClusterValues.ClusterID, state.ClusterValues.MeasurementSalt = clusterID, clusterID
	kubeconfig, err := cp.Kubeconfig()
	if err := errors.Join(err, ws.WriteState(state), os.WriteFile(ws.Path(workspace.KubeconfigFile), kubeconfig, 0o600)); err != nil {
		t.Fatal(err)
	}
	connect := func(_ context.Context, kubeconfig []byte) (*kube.Client, error) { return kube.Connect(kubeconfig, nil) }
	e := engine.New(ws, engine.Deps{
		Connect: func(ctx context.Context, b []byte) (engine.Cluster, error) { return connect(ctx, b) },
		Inspect: func(ctx context.Context, b []byte) (check.Inspector, error) { return connect(ctx, b) },
	})
	st, err := e.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	versions := map[string]string{}
	for _, n := range st.Nodes {
		versions[n.Name] = n.ImageVersion
	}
	for name, want := range map[string]string{"control-plane-0": "v1.0.0", "worker-0": "v1.0.0", "worker-1": "v1.1.0", "worker-9": ""} {
		if versions[name] != want {
			t.Errorf("status: image version of %s is %q, want %q", name, versions[name], want)
		}
	}
	agents := slices.IndexFunc(st.Health, func(f plan.Finding) bool { return f.ID == "agents-unverified" })
	if agents < 0 || !slices.Equal(st.Health[agents].Objects, []string{"control-plane-0", "worker-0"}) {
		t.Errorf("status: %+v", st.Health)
	}
	out, err := e.Check(ctx, check.Request{}, func(plan.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	if out.Current.Image != "v1.0.0-v1.1.0" {
		t.Errorf("upgrade check: the cluster runs %+v", out.Current)
	}
	i := slices.IndexFunc(out.Findings, func(f plan.Finding) bool { return f.Title == "not known: image of worker-9" })
	if i < 0 || !strings.Contains(out.Findings[i].Detail, `the cloud's catalogue has no image "odd://demo/images/v1.0.0"`) {
		t.Errorf("upgrade check: %+v", out.Findings)
	}
}
