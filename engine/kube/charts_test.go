package kube

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"constellation/assets"
	"constellation/engine"
	enginechart "constellation/engine/chart"
	"constellation/engine/cloud/providers"
	"constellation/engine/cluster"
	"constellation/engine/kube/kubetest"
	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
)

// shop is a third-party chart that keeps data in every way. Its values omit or change the
// objects with data.
const shop = `{{- if .Values.kind }}
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: orders.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {plural: orders, singular: order, kind: Order, listKind: OrderList}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}]
---
{{- end }}
{{- if .Values.namespace }}
apiVersion: v1
kind: Namespace
metadata: {name: shop-files}
---
{{- end }}
{{- if .Values.claim }}
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: shop{{ if .Values.keep }}, annotations: {helm.sh/resource-policy: keep}{{ end }}}
spec: {accessModes: [{{ .Values.mode }}], resources: {requests: {storage: 1Gi}}}
---
{{- end }}
{{- if .Values.database }}
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  replicas: 0
  serviceName: {{ .Values.service }}
  selector: {matchLabels: {app: db}}
  template:
    metadata: {labels: {app: db}}
    spec: {containers: [{name: db, image: "registry.constellation.example/db:{{ .Values.tag }}"}]}
---
{{- end }}
apiVersion: v1
kind: ConfigMap
metadata: {name: shop}
data: {text: {{ .Values.text }}}
`

// shopChart returns it, packed by helm's packager and fetched as a user's charts are.
func shopChart(t *testing.T, version string, values map[string]any) cluster.Chart {
	t.Helper()
	dir := t.TempDir()
	digest := kubetest.PackChart(t, dir, "shop", map[string]string{
		"Chart.yaml":         "apiVersion: v2\nname: shop\nversion: " + version + "\n",
		"values.yaml":        "text: default\nkind: true\nnamespace: true\nclaim: true\nkeep: false\nmode: ReadWriteOnce\ndatabase: true\nservice: db\ntag: v1\n",
		"templates/all.yaml": shop,
		"crds/coupon.yaml": `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: coupons.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {plural: coupons, singular: coupon, kind: Coupon, listKind: CouponList}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, description: "` + version + `"}}}]
`,
		// It is rendered only if its kind is served, and needs that kind at once.
		"templates/coupon.yaml": "{{ if .Capabilities.APIVersions.Has \"example.com/v1/Coupon\" }}\napiVersion: example.com/v1\nkind: Coupon\nmetadata: {name: welcome}\n{{ end }}\n",
		"templates/hook.yaml":   "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: shop-hook, annotations: {helm.sh/hook: \"pre-install,pre-upgrade\"}}\n",
	})
	got, err := (&enginechart.Store{}).Fetch(t.Context(), enginechart.Ref{Name: "shop", Version: version, Source: "file:" + dir, Digest: digest})
	if err != nil {
		t.Fatal(err)
	}
	c := cluster.Chart{Name: "web-shop", OwnName: "shop", Namespace: "shop", Version: version, Foreign: true, Values: values}
	for _, f := range got.Files {
		c.Files = append(c.Files, assets.File{Name: f.Name, Data: f.Data})
	}
	return c
}

func silent(string, int64, int64) {}

func TestChartsOfOthersOnARealAPIServer(t *testing.T) {
	c := start(t)
	ctx := t.Context()
	apply := func(t *testing.T, ch cluster.Chart) {
		t.Helper()
		limited, cancel := context.WithTimeout(ctx, 3*time.Minute)
		defer cancel()
		if err := c.ApplyChart(limited, ch, silent); err != nil {
			t.Fatal(err)
		}
	}
	compare := func(t *testing.T, ch cluster.Chart) plan.ChartChange {
		t.Helper()
		got, err := c.CompareChart(ctx, ch)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	// An unbound claim is never ready, which is not tested here.
	bind := func(t *testing.T) {
		t.Helper()
		claims := c.core.CoreV1().PersistentVolumeClaims("shop")
		p, err := claims.Get(ctx, "shop", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v-" + string(p.UID)}, Spec: corev1.PersistentVolumeSpec{
			AccessModes: p.Spec.AccessModes, Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/x"}}, ClaimRef: &corev1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: "shop", Name: "shop", UID: p.UID},
		}}
		if _, err := c.core.CoreV1().PersistentVolumes().Create(ctx, v, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}

	t.Run("the namespace of Plans is adopted unless another controller applies Plans", func(t *testing.T) {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: engine.PlansNamespace, Labels: map[string]string{"theirs": "yes"}}}
		if _, err := c.core.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		labels := map[string]string{"a": "b"}
		d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "system-upgrade-controller"}, Spec: appsv1.DeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{
				Name: "c", Image: "example.com/controller:v1", Env: []corev1.EnvVar{{Name: "SYSTEM_UPGRADE_CONTROLLER_NAME", Value: "system-upgrade-controller"}},
			}}}},
		}}
		all := c.core.AppsV1().Deployments(engine.PlansNamespace)
		d, err := all.Create(ctx, d, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := c.OtherPlans(ctx); got != "system-upgrade-controller" || err != nil {
			t.Errorf("they are carried out by %q, %v", got, err)
		}
		d.Spec.Replicas = new(int32)
		if _, err := all.Update(ctx, d, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		if got, err := c.OtherPlans(ctx); got != "" || err != nil {
			t.Errorf("scaled to zero they are carried out by %q, %v", got, err)
		}
		ours := cluster.Chart{Name: "constellation-operator", Namespace: Namespace, Version: "1.1.0", Values: map[string]any{"release": "v1.1.0"}}
		if ours.Files, err = assets.ChartFor(ours.Name, "v1.1.0"); err != nil {
			t.Fatal(err)
		}
		assets.SetValues(ours.Values, ours.Files, providers.LocalValues())
		bring := func() {
			t.Helper()
			ch, err := load(ours)
			if err != nil {
				t.Fatal(err)
			}
			cfg, err := c.helm(ours.Namespace)
			if err != nil {
				t.Fatal(err)
			}
			if _, _, err := c.bring(ctx, cfg, ch, ours); err != nil {
				t.Fatal(err)
			}
		}
		look := func() (got []string) {
			t.Helper()
			ns, err := c.core.CoreV1().Namespaces().Get(ctx, engine.PlansNamespace, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, ns.Labels["theirs"], ns.Labels["pod-security.kubernetes.io/enforce"])
			for _, name := range []string{plansName, d.Name} {
				if _, err := all.Get(ctx, name, metav1.GetOptions{}); err == nil {
					got = append(got, name)
				}
			}
			return got
		}
		bring()
		if d := cmp.Diff([]string{"yes", "privileged", plansName, d.Name}, look()); d != "" {
			t.Errorf("installed (-want +got):\n%s", d)
		}
		if got, err := c.OtherPlans(ctx); got != "" || err != nil {
			t.Errorf("our controller is reported as another: %q, %v", got, err)
		}
		ours.Values = map[string]any{"release": "v1.1.0", "plans": map[string]any{"enabled": false}}
		assets.SetValues(ours.Values, ours.Files, providers.LocalValues())
		if got := compare(t, ours); len(got.Destroys) > 0 {
			t.Errorf("switching it off destroys %v", got.Destroys)
		}
		bring()
		if d := cmp.Diff([]string{"yes", "privileged", d.Name}, look()); d != "" {
			t.Errorf("switched off (-want +got):\n%s", d)
		}
	})

	first := shopChart(t, "1.0.0", map[string]any{"text": "one", "claim": false})
	t.Run("a new chart with kinds, hooks and custom resources", func(t *testing.T) {
		if d := cmp.Diff(plan.ChartChange{Chart: "web-shop", Namespace: "shop", To: "1.0.0"}, compare(t, first)); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
		apply(t, first)
		if ok, err := c.ChartCurrent(ctx, first); !ok || err != nil {
			t.Errorf("current: %t, %v", ok, err)
		}
		for _, r := range []struct {
			gvr  schema.GroupVersionResource
			name string
		}{{schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "coupons"}, "welcome"}, {schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}, "shop-hook"}} {
			if _, err := c.dynamic.Resource(r.gvr).Namespace("shop").Get(ctx, r.name, metav1.GetOptions{}); err != nil {
				t.Error(err)
			}
		}
		if got := compare(t, first); !got.Same() {
			t.Errorf("it changes %+v", got)
		}
	})
	t.Run("an upgrade includes its kinds", func(t *testing.T) {
		next := shopChart(t, "1.0.1", map[string]any{"text": "one", "claim": false})
		if ok, err := c.ChartCurrent(ctx, next); ok || err != nil {
			t.Errorf("before: %t, %v", ok, err)
		}
		apply(t, next)
		u, err := c.dynamic.Resource(kindsOfKinds).Get(ctx, "coupons.example.com", metav1.GetOptions{})
		if err != nil || !strings.Contains(fmt.Sprint(u.Object["spec"]), "description:1.0.1") {
			t.Errorf("%v", err)
		}
		apply(t, first)
	})
	t.Run("values that the chart rejects", func(t *testing.T) {
		bad := first
		bad.Files = append(slices.Clone(first.Files), assets.File{Name: "templates/bad.yaml", Data: []byte(`{{ fail "give me a name" }}`)})
		if _, err := c.CompareChart(ctx, bad); !errors.Is(err, engine.ErrChart) || !strings.Contains(err.Error(), "give me a name") {
			t.Errorf("%v", err)
		}
	})

	// Objects with data, and the reported loss.
	if _, err := c.core.CoreV1().PersistentVolumeClaims("shop").Create(ctx, &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{"app.kubernetes.io/managed-by": "Helm"}, Annotations: map[string]string{"meta.helm.sh/release-name": "web-shop", "meta.helm.sh/release-namespace": "shop"}},
		Spec:       corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	bind(t)
	full := shopChart(t, "1.0.0", map[string]any{"text": "one"})
	apply(t, full)
	orders := c.dynamic.Resource(schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "orders"}).Namespace("shop")
	order := func(name string) {
		u := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Order", "metadata": map[string]any{"name": name}}}
		if _, err := orders.Create(ctx, u, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name   string
		values map[string]any
		more   string
		want   []string
	}{
		{name: "an object without data", values: map[string]any{"text": "two", "tag": "v2"}, want: nil},
		{name: "a definition without objects", values: map[string]any{"text": "one", "kind": false}, want: nil},
		{name: "a namespace", values: map[string]any{"text": "one", "namespace": false}, want: []string{"Namespace shop-files is deleted with everything in it"}},
		{name: "a claim", values: map[string]any{"text": "one", "claim": false}, want: []string{"PersistentVolumeClaim shop/shop is deleted with its volume's data"}},
		{name: "a database", values: map[string]any{"text": "one", "database": false}, want: []string{"StatefulSet shop/db is deleted with its pods; its volumes stay"}},
		{
			name:   "a database with an immutable change",
			values: map[string]any{"text": "one", "service": "other"},
			more:   "",
			want:   []string{"StatefulSet shop/db is deleted and recreated because it cannot be updated: spec is immutable; its pods stop in the meantime, its volumes stay"},
		},
		{
			name:   "a claim with an immutable change",
			values: map[string]any{"text": "one", "mode": "ReadWriteMany"},
			more:   "",
			want:   []string{"PersistentVolumeClaim shop/shop is deleted and recreated because it cannot be updated: spec is immutable; its data is lost"},
		},
		{name: "the publisher's warning", values: map[string]any{"text": "one"}, more: "orders of the old kind", want: []string{"orders of the old kind"}},
	} {
		t.Run("destroys "+tt.name, func(t *testing.T) {
			next := shopChart(t, "1.1.0", tt.values)
			next.Destructive = tt.more
			got := compare(t, next)
			if d := cmp.Diff(tt.want, got.Destroys); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			if tt.more == "" && len(got.Objects) != len(tt.want) {
				t.Errorf("objects %v", got.Objects)
			}
		})
	}
	t.Run("destroys a definition with its objects", func(t *testing.T) {
		order("one")
		order("two")
		got := compare(t, shopChart(t, "1.1.0", map[string]any{"text": "one", "kind": false}))
		want := []string{"CustomResourceDefinition orders.example.com is deleted together with 2 objects of its kind"}
		if d := cmp.Diff(want, got.Destroys); d != "" || !slices.Equal(got.Objects, []string{"customresourcedefinition/orders.example.com"}) {
			t.Errorf("(-want +got):\n%s%v", d, got.Objects)
		}
	})
	t.Run("objects with the keep policy are not destroyed", func(t *testing.T) {
		apply(t, shopChart(t, "1.0.0", map[string]any{"text": "one", "keep": true}))
		if got := compare(t, shopChart(t, "1.1.0", map[string]any{"text": "one", "claim": false})); len(got.Destroys) > 0 {
			t.Errorf("%v", got.Destroys)
		}
		apply(t, full)
	})
	uid := func() string {
		s, err := c.core.AppsV1().StatefulSets("shop").Get(ctx, "db", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return string(s.UID) + " " + s.Spec.ServiceName
	}
	t.Run("immutable objects are recreated if accepted, and in a rollback", func(t *testing.T) {
		next := shopChart(t, "1.1.0", map[string]any{"text": "one", "service": "other"})
		before := uid()
		err := c.ApplyChart(ctx, next, silent)
		if err == nil || !strings.Contains(err.Error(), "is back") || uid() != before {
			t.Fatalf("not accepted: %v; %s was %s", err, uid(), before)
		}
		next.Recreate = true
		revision, err := c.ChartRevision(ctx, full)
		if err != nil {
			t.Fatal(err)
		}
		apply(t, next)
		recreated := uid()
		if recreated == before || !strings.HasSuffix(recreated, " other") {
			t.Errorf("accepted: %s was %s", recreated, before)
		}
		if err := c.RevertChart(ctx, next, revision); err != nil {
			t.Fatal(err)
		}
		if now := uid(); now == recreated || !strings.HasSuffix(now, " db") {
			t.Errorf("back: %s was %s", now, recreated)
		}
		if got := compare(t, next); got.ByHand != "" {
			t.Errorf("the rollback is reported as a manual change: %s", got.ByHand)
		}
	})
	t.Run("manual changes with helm are reported", func(t *testing.T) {
		byHelm(t, c, func(cfg *action.Configuration, ch *chart.Chart) error {
			u := action.NewUpgrade(cfg)
			u.Namespace, u.SkipCRDs = "shop", true
			_, err := u.RunWithContext(ctx, "web-shop", ch, map[string]any{"text": "by hand", "apiToken": "S3CR3T"})
			return err
		}, full)
		got := compare(t, full)
		want := []plan.ValueChange{{Path: "apiToken", Hidden: true}, {Path: "text", From: `"by hand"`, To: `"one"`}}
		if d := cmp.Diff(want, got.Values); d != "" || !strings.Contains(got.ByHand, `("Upgrade complete")`) || got.Same() {
			t.Errorf("an upgrade: (-want +got):\n%s%+v", d, got)
		}
		apply(t, full)
		if got := compare(t, full); !got.Same() || got.ByHand != "" {
			t.Errorf("afterwards: %+v", got)
		}
		byHelm(t, c, func(cfg *action.Configuration, _ *chart.Chart) error {
			b := action.NewRollback(cfg)
			return b.Run("web-shop")
		}, full)
		if got := compare(t, full); !strings.Contains(got.ByHand, "Rollback to ") || got.Same() {
			t.Errorf("a rollback: %+v", got)
		}
		apply(t, full)
	})
	t.Run("helm can manage installed charts", func(t *testing.T) {
		cfg, err := c.helm("shop")
		if err != nil {
			t.Fatal(err)
		}
		l := action.NewList(cfg)
		all, err := l.Run()
		if err != nil || len(all) != 1 || all[0].Name != "web-shop" || all[0].Chart.Metadata.Name != "shop" {
			t.Errorf("helm list: %v, %v", all, err)
		}
		if _, err := action.NewUninstall(cfg).Run("web-shop"); err != nil {
			t.Error(err)
		}
		if _, err := c.core.CoreV1().ConfigMaps("shop").Get(ctx, "shop", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("helm uninstall: %v", err)
		}
	})
}

// byHelm acts like a user of the helm command: it loads the chart from its archive.
func byHelm(t *testing.T, c *Client, do func(*action.Configuration, *chart.Chart) error, of cluster.Chart) {
	t.Helper()
	var files []*loader.BufferedFile
	for _, f := range of.Files {
		files = append(files, &loader.BufferedFile{Name: f.Name, Data: f.Data})
	}
	ch, err := loader.LoadFiles(files)
	if err != nil {
		t.Fatal(err)
	}
	cfg := &action.Configuration{}
	if err := cfg.Init(getter{c}, of.Namespace, "secret", func(string, ...any) {}); err != nil {
		t.Fatal(err)
	}
	if err := do(cfg, ch); err != nil {
		t.Fatal(err)
	}
}

// killedChart is a chart of the set whose console is killed.
func killedChart(name, text string, replicas int, needs ...string) cluster.Chart {
	return cluster.Chart{
		Name: name, Namespace: Namespace, Version: "1.0.0", Values: map[string]any{"text": text, "replicas": replicas}, Needs: needs,
		Files: []assets.File{
			{Name: "Chart.yaml", Data: []byte("apiVersion: v2\nname: " + name + "\nversion: 1.0.0\n")},
			{Name: "templates/all.yaml", Data: []byte(`apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Chart.Name }}, namespace: constellation-system}
data: {text: {{ .Values.text }}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: {{ .Chart.Name }}, namespace: constellation-system}
spec:
  replicas: {{ .Values.replicas }}
  selector: {matchLabels: {app: {{ .Chart.Name }}}}
  template:
    metadata: {labels: {app: {{ .Chart.Name }}}}
    spec: {containers: [{name: c, image: registry.constellation.example/c:v1}]}
`)},
		},
	}
}

const killAt = "CONSTELLATION_TEST_KILL_AT"

// TestHelperKilledSet is the console that is killed: it applies a set, and sends SIGKILL to
// itself when a chart has reached a state.
func TestHelperKilledSet(t *testing.T) {
	at, file, _ := strings.Cut(os.Getenv(killAt), "@")
	if at == "" {
		t.Skip("it is run by TestKilledChartSetRollsBackToPreviousRevisions")
	}
	kubeconfig, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	c, err := Connect(kubeconfig, nil)
	if err != nil {
		t.Fatal(err)
	}
	set := engine.ChartSet{
		Charts: []cluster.Chart{killedChart("kill-a", "new", 0), killedChart("kill-b", "new", 0, "kill-a"), killedChart("kill-c", "new", 0, "kill-b")},
		Limit:  3 * time.Minute,
		Report: func(chart, state, _ string, _, _ int64) {
			if chart+" "+state == at {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			}
		},
	}
	t.Fatalf("it ended by itself: %v", set.Apply(t.Context(), c))
}

func TestKilledChartSetRollsBackToPreviousRevisions(t *testing.T) {
	kubeconfig, err := controlplanetest.Lend(t, controlplane.Options{Controllers: true}).Kubeconfig()
	if err != nil {
		t.Fatal(err)
	}
	c, err := Connect(kubeconfig, nil)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, kubeconfig, 0o600); err != nil {
		t.Fatal(err)
	}
	apply := func(limit time.Duration, charts ...cluster.Chart) error {
		return engine.ChartSet{Charts: charts, Limit: limit, Report: func(string, string, string, int64, int64) {}}.Apply(t.Context(), c)
	}
	old := []cluster.Chart{killedChart("kill-a", "old", 0), killedChart("kill-b", "old", 0, "kill-a")} // kill-c is new
	if err := apply(3*time.Minute, old...); err != nil {
		t.Fatal(err)
	}
	for _, at := range []string{"kill-a running", "kill-a done", "kill-b running", "kill-b done", "kill-c running", "kill-c done"} {
		t.Run(at, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestHelperKilledSet$")
			cmd.Env = append(os.Environ(), killAt+"="+at+"@"+file)
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("it was not killed: %v\n%s", err, out)
			}
			// The next console gets to a chart that the API server rejects.
			err = apply(3*time.Minute, killedChart("kill-a", "newer", 0), killedChart("kill-b", "newer", 0, "kill-a"), killedChart("kill-c", "newer", -1, "kill-b"))
			if err == nil || !strings.Contains(err.Error(), "install chart kill-c") {
				t.Fatalf("%v", err)
			}
			for _, ch := range old {
				if ok, err := c.ChartCurrent(t.Context(), ch); !ok || err != nil {
					t.Errorf("chart %s is at its previous revision: %t, %v", ch.Name, ok, err)
				}
			}
			if n, err := c.ChartRevision(t.Context(), killedChart("kill-c", "", 0)); n != 0 || err != nil {
				t.Errorf("chart kill-c, which was not there, has revision %d: %v", n, err)
			}
			if before, err := c.ChartSet(t.Context()); before != nil || err != nil {
				t.Errorf("%v is remembered: %v", before, err)
			}
		})
	}
	// A set that completes deletes the record as well.
	if err := apply(3*time.Minute, killedChart("kill-a", "new", 0)); err != nil {
		t.Fatal(err)
	}
	if before, err := c.ChartSet(t.Context()); before != nil || err != nil {
		t.Errorf("%v is remembered: %v", before, err)
	}
}
