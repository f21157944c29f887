package plans

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/yaml"

	"constellation/assets"
	"constellation/engine/sandbox/controlplane"
	"constellation/internal/testneeds"
	"constellation/operator/api/upgradev1"
)

const upgradeNamespace = "system-upgrade"

// theirManifest has the objects of system-upgrade-controller v0.16, as far as the migration depends
// on them, and its kind, which lacks the fields of this project.
func theirManifest(t *testing.T) []byte {
	t.Helper()
	kind, err := planKind()
	if err != nil {
		t.Fatal(err)
	}
	kind.APIVersion, kind.Kind = "apiextensions.k8s.io/v1", "CustomResourceDefinition"
	fields := kind.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties
	for _, of := range []string{"spec", "status"} {
		delete(fields[of].Properties, "constellation")
	}
	status := fields["status"]
	delete(status.Properties, "observedGeneration")
	status.Default = nil
	fields["status"] = status
	fromField := func(path string) *corev1.EnvVarSource {
		return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}
	}
	etc := corev1.Volume{Name: "etc-ssl", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/etc/ssl", Type: new(corev1.HostPathDirectory)}}}
	l := map[string]string{upgradev1.LabelController: "system-upgrade-controller"}
	withName := maps.Clone(l)
	withName["app.kubernetes.io/name"] = "system-upgrade-controller"
	all := append([]client.Object{
		kind,
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: upgradeNamespace, Labels: map[string]string{"pod-security.kubernetes.io/enforce": "privileged"}}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: upgradeNamespace, Name: "system-upgrade"}},
	}, theirRights(upgradeNamespace, "system-upgrade", "")...)
	all = append(all,
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: upgradeNamespace, Name: "default-controller-env"}, Data: map[string]string{
			"SYSTEM_UPGRADE_CONTROLLER_LEADER_ELECT": "true", "SYSTEM_UPGRADE_JOB_BACKOFF_LIMIT": "7", "SYSTEM_UPGRADE_JOB_KUBECTL_IMAGE": "rancher/kubectl:v1.30.3",
			"SYSTEM_UPGRADE_JOB_KUBECTL_IMAGE_WINDOWS": "", "SYSTEM_UPGRADE_JOB_PRIVILEGED": "true",
		}},
		&appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: upgradeNamespace, Name: "system-upgrade-controller"}, Spec: appsv1.DeploymentSpec{
			Strategy: appsv1.DeploymentStrategy{Type: appsv1.RecreateDeploymentStrategyType}, Selector: &metav1.LabelSelector{MatchLabels: l},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: withName}, Spec: corev1.PodSpec{
				ServiceAccountName: "system-upgrade", Volumes: []corev1.Volume{etc},
				Containers: []corev1.Container{{
					Name: "system-upgrade-controller", Image: "rancher/system-upgrade-controller:v0.16.1",
					EnvFrom: []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "default-controller-env"}}}},
					Env: []corev1.EnvVar{
						{Name: "SYSTEM_UPGRADE_CONTROLLER_NAME", ValueFrom: fromField("metadata.labels['" + upgradev1.LabelController + "']")},
						{Name: "SYSTEM_UPGRADE_CONTROLLER_NAMESPACE", ValueFrom: fromField("metadata.namespace")},
					},
					VolumeMounts: []corev1.VolumeMount{{Name: etc.Name, MountPath: "/etc/ssl", ReadOnly: true}},
				}},
			}},
		}},
	)
	var out bytes.Buffer
	for _, o := range all {
		if o.GetObjectKind().GroupVersionKind().Empty() {
			gvk, err := apiutil.GVKForObject(o, clientgoscheme.Scheme)
			if err != nil {
				t.Fatal(err)
			}
			o.GetObjectKind().SetGroupVersionKind(gvk)
		}
		fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
		if err != nil {
			t.Fatal(err)
		}
		delete(fields, "status")
		b, err := yaml.Marshal(fields)
		if err != nil {
			t.Fatal(err)
		}
		out.WriteString("---\n")
		out.Write(b)
	}
	return out.Bytes()
}

// shell runs kubectl in a cluster.
type shell struct {
	*testing.T
	bin, kubeconfig string
}

func newShell(t *testing.T, w *world) shell {
	t.Helper()
	dir, err := controlplane.FindBinaries()
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(dir, "kubectl")
	if _, err := os.Stat(bin); err != nil {
		t.Skipf("needs kubectl: %v", err)
	}
	b, err := w.cp.Kubeconfig()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return shell{t, bin, file}
}

// kubectl runs a command, which must succeed, and returns its output.
func (s shell) kubectl(in []byte, args ...string) string {
	s.Helper()
	cmd := exec.CommandContext(s.Context(), s.bin, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+s.kubeconfig, "HOME="+filepath.Dir(s.kubeconfig))
	cmd.Stdin = bytes.NewReader(in)
	out, err := cmd.CombinedOutput()
	if err != nil {
		s.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	s.Logf("$ kubectl %s\n%s", strings.Join(args, " "), out)
	return string(out)
}

// environment returns the environment of the controller's container, as its kubelet would set it.
func (s *site) environment() map[string]string {
	s.Helper()
	var d appsv1.Deployment
	if err := s.w.admin.Get(s.Context(), client.ObjectKey{Namespace: s.ns, Name: "system-upgrade-controller"}, &d); err != nil {
		s.Fatal(err)
	}
	c := d.Spec.Template.Spec.Containers[0]
	env := map[string]string{}
	for _, from := range c.EnvFrom {
		var m corev1.ConfigMap
		err := s.w.admin.Get(s.Context(), client.ObjectKey{Namespace: s.ns, Name: from.ConfigMapRef.Name}, &m)
		if apierrors.IsNotFound(err) && from.ConfigMapRef.Optional != nil && *from.ConfigMapRef.Optional {
			continue
		}
		if err != nil {
			s.Fatal(err)
		}
		maps.Copy(env, m.Data)
	}
	for _, e := range c.Env {
		if e.ValueFrom == nil {
			env[e.Name] = e.Value
		}
	}
	return env
}

// TestMigration takes the steps of docs/plans.md with kubectl: from system-upgrade-controller to this
// project while a Plan is under way, back while it is under way again, and finally away from the other
// project's objects.
func TestMigration(t *testing.T) {
	testneeds.ControlPlane(t)
	w := newWorld(t)
	sh := newShell(t, w)
	s := &site{TB: t, w: w, ns: upgradeNamespace, logs: map[string]*lines{}}
	w.mu.Lock()
	w.sites[s.ns] = s
	w.mu.Unlock()
	release := make(chan struct{}, 10)
	s.does = func(ctx context.Context, _ *corev1.Pod, _ string) error {
		select {
		case <-release:
		case <-ctx.Done():
		}
		return ctx.Err()
	}
	theirs := theirManifest(t)

	// Their installation, with an adjusted setting, and a Plan: a is done, b is under way, c is left.
	sh.kubectl(theirs, "apply", "-f", "-")
	s.node("control-plane", map[string]string{"node-role.kubernetes.io/control-plane": "", "site": "none"})
	s.node("a", map[string]string{upgradev1.LabelOfPlan("k3s-server"): known})
	s.node("b", nil)
	p := s.plan(`
metadata: {name: k3s-server}
spec: {concurrency: 1, version: v1.36.3, serviceAccountName: system-upgrade, drain: {force: true}, upgrade: {image: rancher/k3s-upgrade}}
`)
	p.Status = upgradev1.PlanStatus{LatestVersion: "v1.36.3", LatestHash: known, Applying: []string{"b"}}
	if err := w.admin.Status().Update(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	s.pods = s.access("system-upgrade") // their rights are enough for a drain
	started := makeJob(p, node{name: "b", host: "b"}, "system-upgrade-controller", DefaultSettings(), 0)
	delete(started.Annotations, annotationTemplate)
	s.create(started)
	s.eventually("their Job upgrades b", func() (string, bool) { l := s.log(); return fmt.Sprint(l), slices.Contains(l, "b upgrade") })
	s.node("c", nil)
	sh.kubectl(nil, "-n", s.ns, "rollout", "status", "deployment/system-upgrade-controller", "--timeout=20s")
	rights := s.theirObjects()

	// Forth.
	sh.kubectl(nil, "-n", s.ns, "scale", "deployment/system-upgrade-controller", "--replicas=0")
	sh.kubectl(assets.PlansManifest(), "apply", "-f", "-")
	sh.kubectl(nil, "-n", s.ns, "rollout", "status", "deployment/system-upgrade-controller", "--timeout=20s")
	if d := cmp.Diff(rights, s.theirObjects()); d != "" {
		t.Errorf("our manifest changes their objects (-before +after):\n%s", d)
	}
	s.deployed("system-upgrade-controller", 0, []string{"constellation-controller-env", "default-controller-env"})
	env := s.environment()
	if env["SYSTEM_UPGRADE_JOB_BACKOFF_LIMIT"] != "7" || env["SYSTEM_UPGRADE_JOB_ACTIVE_DEADLINE_SECONDS"] != "900" {
		t.Errorf("environment: %v", env)
	}
	ours := func() (stop func()) {
		s.controller, s.pods = s.access("system-upgrade-controller"), s.access("system-upgrade")
		return s.start(func(c *Config) {
			var err error
			env := s.environment()
			if c.Settings, err = SettingsFrom(func(k string) (string, bool) { v, ok := env[k]; return v, ok }); err != nil {
				t.Error(err)
			}
			c.Election = env["SYSTEM_UPGRADE_CONTROLLER_LEADER_ELECT"] == "true"
		})
	}
	stop := ours()
	s.is("k3s-server", "Complete=False/SyncJob version v1.36.3 is applied to Nodes b")
	release <- struct{}{}
	s.eventually("c follows b", func() (string, bool) { l := s.log(); return fmt.Sprint(l), slices.Contains(l, "c upgrade") })
	if j := s.jobs()["c"]; *j.Spec.BackoffLimit != 7 {
		t.Errorf("the Job of c has not the adjusted backoff limit: %d", *j.Spec.BackoffLimit)
	}

	// Back, while c is under way.
	sh.kubectl(nil, "-n", s.ns, "scale", "deployment/system-upgrade-controller", "--replicas=0")
	stop()
	sh.kubectl(nil, "-n", s.ns, "patch", strings.TrimSpace(sh.kubectl(nil, "-n", s.ns, "get", "plans", "-o", "name")), "--subresource=status", "--type=merge", "-p", `{"status":{"conditions":null}}`)
	sh.kubectl(theirs, "apply", "-f", "-")
	sh.kubectl(nil, "-n", s.ns, "rollout", "status", "deployment/system-upgrade-controller", "--timeout=20s")
	sh.kubectl(nil, "annotate", "nodes", "--all", annotationCordoned+"-")
	s.deployed("system-upgrade", 1, []string{"default-controller-env"})
	if d := cmp.Diff(rights, s.theirObjects()); d != "" {
		t.Errorf("their objects after the way back (-before +after):\n%s", d)
	}
	var at upgradev1.Plan
	s.eventually("their kind is served", func() (string, bool) {
		at = s.get("k3s-server")
		return fmt.Sprintf("%+v", at.Status), at.Status.Constellation == nil
	})
	if !slices.Equal(at.Status.Applying, []string{"c"}) || at.Status.LatestHash != known || len(at.Status.Conditions) > 0 || at.Status.ObservedGeneration != 0 {
		t.Errorf("status for their controller: %+v", at.Status)
	}
	want := map[string]string{
		upgradev1.LabelController: "system-upgrade-controller", upgradev1.LabelNode: "c", upgradev1.LabelPlan: "k3s-server", upgradev1.LabelVersion: "v1.36.3",
		upgradev1.LabelOfPlan("k3s-server"): known, upgradev1.LabelExclusive: "false",
	}
	if j := s.jobs()["c"]; !cmp.Equal(j.Labels, want) {
		t.Errorf("labels of the Job that they follow:\n%s", cmp.Diff(want, j.Labels))
	}
	release <- struct{}{}
	s.eventually("the Job of c continues without a controller", func() (string, bool) {
		j := s.jobs()["c"]
		return fmt.Sprintf("%+v", j.Status), slices.ContainsFunc(j.Status.Conditions, func(c batchv1.JobCondition) bool {
			return c.Type == batchv1.JobComplete && c.Status == corev1.ConditionTrue
		})
	})
	// What their controller does then.
	s.patch(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c"}}, `{"metadata":{"labels":{"`+upgradev1.LabelOfPlan("k3s-server")+`":"`+known+`"}},"spec":{"unschedulable":false}}`)
	// Somebody cordons a node that a Plan of ours had cordoned.
	sh.kubectl(nil, "cordon", "c")

	// Forth again: nothing is upgraded twice, and the foreign cordon stays.
	ran := len(s.log())
	sh.kubectl(nil, "-n", s.ns, "scale", "deployment/system-upgrade-controller", "--replicas=0")
	sh.kubectl(assets.PlansManifest(), "apply", "-f", "-")
	stop = ours()
	s.done("k3s-server")
	if l := s.log(); len(l) != ran {
		t.Errorf("ran again: %q", l[ran:])
	}
	if n := s.nodeNamed("c"); !n.Spec.Unschedulable {
		t.Error("a cordon of somebody else was removed")
	}
	for _, name := range []string{"a", "b"} {
		if n := s.nodeNamed(name); n.Spec.Unschedulable || n.Labels[upgradev1.LabelOfPlan("k3s-server")] != known {
			t.Errorf("node %s: unschedulable %t, labels %v", name, n.Spec.Unschedulable, n.Labels)
		}
	}

	// Without their rights the next version is installed with ours.
	sh.kubectl(nil, "delete", "clusterrolebinding/system-upgrade", "clusterrolebinding/system-upgrade-drainer", "clusterrole/system-upgrade-controller", "clusterrole/system-upgrade-controller-drainer")
	sh.kubectl(nil, "-n", s.ns, "delete", "rolebinding/system-upgrade", "role/system-upgrade-controller")
	for range 3 {
		release <- struct{}{}
	}
	s.edit("k3s-server", `{"spec":{"version":"v1.36.4"}}`)
	s.eventually("a new version is installed", func() (string, bool) {
		p := s.get("k3s-server")
		return fmt.Sprintf("%+v", p.Status), p.Status.LatestVersion == "v1.36.4" && cond(p, upgradev1.ConditionComplete).Status == corev1.ConditionTrue
	})
	if len(s.denied) > 0 {
		t.Errorf("the manifest's rights lack: %q", s.denied)
	}

	// Back for good: their manifest, and none of our objects but the account that both have.
	stop()
	sh.kubectl(theirs, "apply", "-f", "-")
	sh.kubectl(nil, "delete", "-A", "-l", "app.kubernetes.io/part-of=constellation-plans", "role,rolebinding,clusterrole,clusterrolebinding,serviceaccount,configmap")
	for _, o := range s.manifest() {
		err := w.admin.Get(t.Context(), client.ObjectKeyFromObject(&o), &o)
		kept := slices.Contains([]string{"Namespace/system-upgrade", "ServiceAccount/system-upgrade", "Deployment/system-upgrade-controller"}, o.GetKind()+"/"+o.GetName())
		if kept && err != nil || !kept && !apierrors.IsNotFound(err) {
			t.Errorf("%s %s: %v, kept is %t", o.GetKind(), o.GetName(), err, kept)
		}
	}
	s.get("k3s-server")
}

// manifest returns the objects of our manifest.
func (s *site) manifest() (all []unstructured.Unstructured) {
	s.Helper()
	d := yamlutil.NewYAMLOrJSONDecoder(bytes.NewReader(assets.PlansManifest()), 4096)
	for {
		var o unstructured.Unstructured
		err := d.Decode(&o)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			s.Fatal(err)
		}
		all = append(all, o)
	}
}

// deployed checks the controller's Deployment.
func (s *site) deployed(account string, volumes int, env []string) {
	s.Helper()
	var d appsv1.Deployment
	if err := s.w.admin.Get(s.Context(), client.ObjectKey{Namespace: s.ns, Name: "system-upgrade-controller"}, &d); err != nil {
		s.Fatal(err)
	}
	pod := d.Spec.Template.Spec
	var from []string
	for _, e := range pod.Containers[0].EnvFrom {
		from = append(from, e.ConfigMapRef.Name)
	}
	ours := account != "system-upgrade"
	if *d.Spec.Replicas != 1 || pod.ServiceAccountName != account || len(pod.Volumes) != volumes || len(pod.Containers) != 1 || len(pod.Containers[0].Args) > 0 != ours ||
		(pod.Containers[0].LivenessProbe != nil) != ours || !slices.Equal(from, env) {
		s.Errorf("Deployment of account %s: %d replicas, %+v", account, *d.Spec.Replicas, pod)
	}
}

// theirObjects returns their objects beside the Deployment, as JSON by kind and name.
func (s *site) theirObjects() map[string]string {
	s.Helper()
	out := map[string]string{}
	for _, o := range append(theirRights(s.ns, "system-upgrade", ""), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "default-controller-env"}}) {
		if err := s.w.admin.Get(s.Context(), client.ObjectKeyFromObject(o), o); err != nil {
			s.Fatal(err)
		}
		var of any
		switch o := o.(type) {
		case *corev1.ConfigMap:
			of = o.Data
		case *rbacv1.Role:
			of = o.Rules
		case *rbacv1.ClusterRole:
			of = o.Rules
		case *rbacv1.RoleBinding:
			of = []any{o.RoleRef, o.Subjects}
		case *rbacv1.ClusterRoleBinding:
			of = []any{o.RoleRef, o.Subjects}
		}
		b, err := json.Marshal(of)
		if err != nil {
			s.Fatal(err)
		}
		out[fmt.Sprintf("%T %s", o, o.GetName())] = string(b)
	}
	return out
}
