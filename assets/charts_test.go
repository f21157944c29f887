package assets_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"

	"constellation/assets"
	"constellation/assets/render"
	"constellation/engine/sandbox/controlplane"
)

const namespace = "constellation-system"

var charts = []string{"constellation-operator", "constellation-services"}

func rendered(t *testing.T, chart, release string, values map[string]any) []byte {
	t.Helper()
	if values == nil {
		values = map[string]any{}
	}
	values["release"] = release
	b, err := render.Chart(chart, release, namespace, values)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// documents decodes a YAML stream, each document into what into makes for its kind.
func documents(t *testing.T, stream []byte, into func(kind string) any) {
	t.Helper()
	d := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(stream), 4096)
	for {
		var raw map[string]any
		err := d.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		kind, _ := raw["kind"].(string)
		if o := into(kind); o != nil {
			b := encode(t, raw)
			if err := yaml.Unmarshal(b, o); err != nil {
				t.Fatalf("%s: %v", kind, err)
			}
		}
	}
}

// TestRightsAreExactly is the list of what each service may do in the cluster. Who
// changes a role changes this list, and has to say why.
func TestRightsAreExactly(t *testing.T) {
	want := map[string][]string{
		"constellation-operator": {
			"*: nodes: list,patch,watch",
			"*: update.edgeless.systems/autoscalingstrategies: create",
			"*: update.edgeless.systems/joiningnodes/status: patch",
			"*: update.edgeless.systems/joiningnodes: delete,list,watch",
			"*: update.edgeless.systems/nodeversions/status (constellation-version): patch",
			"*: update.edgeless.systems/nodeversions (constellation-version): list,watch",
			"*: update.edgeless.systems/pendingnodes: list,watch",
			"*: update.edgeless.systems/scalinggroups/status: patch",
			"*: update.edgeless.systems/scalinggroups: create,list,patch,watch",
			"constellation-system: coordination.k8s.io/leases (constellation-operator): get,update",
			"constellation-system: coordination.k8s.io/leases: create",
			"constellation-system: events: create,patch",
			"default: events.k8s.io/events: create,patch",
		},
		"constellation-services": {
			"*: update.edgeless.systems/joiningnodes: create,patch",
			"*: update.edgeless.systems/nodeversions (constellation-version): get,list,watch",
			"constellation-system: coordination.k8s.io/leases (control-plane-join): get,update",
			"constellation-system: coordination.k8s.io/leases: create",
			"kube-system: configmaps (join-config): get,list,watch",
			"kube-system: configmaps: get",
			"kube-system: secrets: create,delete,patch",
		},
	}
	for _, chart := range charts {
		t.Run(chart, func(t *testing.T) {
			var roles []*rbacv1.Role
			var clusterRoles []*rbacv1.ClusterRole
			documents(t, rendered(t, chart, "v1.1.0", nil), func(kind string) any {
				switch kind {
				case "Role":
					roles = append(roles, &rbacv1.Role{})
					return roles[len(roles)-1]
				case "ClusterRole":
					clusterRoles = append(clusterRoles, &rbacv1.ClusterRole{})
					return clusterRoles[len(clusterRoles)-1]
				}
				return nil
			})
			var got []string
			for _, r := range roles {
				got = append(got, rights(r.Namespace, r.Rules)...)
			}
			for _, r := range clusterRoles {
				got = append(got, rights("*", r.Rules)...)
			}
			slices.Sort(got)
			slices.Sort(want[chart])
			if d := cmp.Diff(want[chart], got); d != "" {
				t.Errorf("rights (-want +got):\n%s", d)
			}
			for _, r := range got {
				for _, never := range []string{"*:*", ": *", "escalate", "impersonate", "bind", "nodes/proxy", "pods/exec"} {
					if strings.Contains(r, never) {
						t.Errorf("right %q holds %q", r, never)
					}
				}
			}
		})
	}
}

func rights(where string, rules []rbacv1.PolicyRule) []string {
	var out []string
	for _, r := range rules {
		for _, g := range r.APIGroups {
			for _, res := range r.Resources {
				if g != "" {
					res = g + "/" + res
				}
				if len(r.ResourceNames) > 0 {
					res += " (" + strings.Join(r.ResourceNames, ",") + ")"
				}
				out = append(out, fmt.Sprintf("%s: %s: %s", where, res, strings.Join(slices.Sorted(slices.Values(r.Verbs)), ",")))
			}
		}
	}
	return out
}

// TestPodsAreRestricted asks the real admission plugin: apart from what each pod must
// have of its host, it meets the strictest level of the Pod Security standards.
func TestPodsAreRestricted(t *testing.T) {
	cp := controlplane.ForTest(t, controlplane.Options{})
	c := kubernetes.NewForConfigOrDie(cp.Config())
	for name, level := range map[string]string{namespace: "privileged", "strict": "restricted"} {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			"pod-security.kubernetes.io/enforce": level, "pod-security.kubernetes.io/enforce-version": "latest",
		}}}
		if _, err := c.CoreV1().Namespaces().Create(t.Context(), ns, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	// The controller that makes it does not run here.
	if _, err := c.CoreV1().ServiceAccounts("strict").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	host := map[string][]string{
		"joinservice":            {"/var/lib/constellation-tpm", "/etc/kubernetes/pki (read-only)"},
		"constellation-operator": nil,
	}
	root := []string{"joinservice"} // reads root's files
	pods := map[string]corev1.PodTemplateSpec{}
	for _, chart := range charts {
		if err := cp.Apply(t.Context(), rendered(t, chart, "v1.1.0", nil)); err != nil {
			t.Fatalf("chart %s is refused: %v", chart, err)
		}
	}
	ds, err := c.AppsV1().DaemonSets(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range ds.Items {
		pods[d.Name] = d.Spec.Template
	}
	deployments, err := c.AppsV1().Deployments(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range deployments.Items {
		pods[d.Name] = d.Spec.Template
	}
	if got := slices.Sorted(maps.Keys(pods)); !slices.Equal(got, slices.Sorted(maps.Keys(host))) {
		t.Fatalf("workloads %v", got)
	}
	for name, template := range pods {
		spec := template.Spec.DeepCopy()
		var paths []string
		for _, v := range spec.Volumes {
			if v.HostPath == nil {
				continue
			}
			p := v.HostPath.Path
			for _, m := range spec.Containers[0].VolumeMounts {
				if m.Name == v.Name && m.ReadOnly {
					p += " (read-only)"
				}
			}
			paths = append(paths, p)
		}
		if !slices.Equal(paths, host[name]) {
			t.Errorf("%s mounts %v of its host, want %v", name, paths, host[name])
		}
		// Take away what is known and reasoned; nothing else may be in the way.
		if !spec.HostNetwork {
			t.Errorf("%s is not in its host's network, where the cloud would know it", name)
		}
		spec.HostNetwork, spec.Volumes, spec.ServiceAccountName, spec.DeprecatedServiceAccount = false, nil, "default", ""
		no := false
		spec.AutomountServiceAccountToken = &no
		for i := range spec.Containers {
			ctr := &spec.Containers[i]
			ctr.VolumeMounts = nil
			for j := range ctr.Ports {
				ctr.Ports[j].HostPort = 0
			}
			// kubelet's probes of a pod in its host's network must name loopback.
			for _, p := range []*corev1.Probe{ctr.StartupProbe, ctr.LivenessProbe, ctr.ReadinessProbe} {
				if p != nil {
					p.HTTPGet.Host = ""
				}
			}
			if s := ctr.SecurityContext; s == nil || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem {
				t.Errorf("%s can write to its root file system", name)
			}
			if ctr.Resources.Limits.Memory().IsZero() || ctr.Resources.Requests.Cpu().IsZero() {
				t.Errorf("%s has no limit of memory or asks for no processor", name)
			}
		}
		if slices.Contains(root, name) {
			user, yes := int64(1), true
			spec.SecurityContext.RunAsUser, spec.SecurityContext.RunAsNonRoot = &user, &yes
		}
		_, err := c.CoreV1().Pods("strict").Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: *spec},
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestJoinServiceTouchesNoOtherSecret asks the real admission policy.
func TestJoinServiceTouchesNoOtherSecret(t *testing.T) {
	cp := controlplane.ForTest(t, controlplane.Options{})
	admin := kubernetes.NewForConfigOrDie(cp.Config())
	if _, err := admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := cp.Apply(t.Context(), rendered(t, "constellation-services", "v1.1.0", nil)); err != nil {
		t.Fatal(err)
	}
	cfg, err := cp.ConfigFor("system:serviceaccount:"+namespace+":joinservice", "system:serviceaccounts", "system:serviceaccounts:"+namespace, "system:authenticated")
	if err != nil {
		t.Fatal(err)
	}
	c := kubernetes.NewForConfigOrDie(cfg).CoreV1()
	secret := func(name string, kind corev1.SecretType, data map[string]string) *corev1.Secret {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "kube-system"}, Type: kind, StringData: data}
	}
	token := map[string]string{"token-id": "abcdef", "token-secret": "0123456789abcdef", "expiration": "2036-11-21T08:00:00Z", "usage-bootstrap-authentication": "true"}
	forEver := maps.Clone(token)
	delete(forEver, "expiration")
	for _, s := range []*corev1.Secret{
		secret("treasure", corev1.SecretTypeOpaque, map[string]string{"k": "hidden"}),
		secret("bootstrap-token-opaque", corev1.SecretTypeOpaque, map[string]string{"k": "hidden"}),
	} {
		if _, err := admin.CoreV1().Secrets("kube-system").Create(t.Context(), s, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	// A new policy takes the API server a moment to enforce.
	probe := secret("probe", corev1.SecretTypeOpaque, nil)
	await(t, func() bool {
		_, err := c.Secrets("kube-system").Create(t.Context(), probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err != nil
	})
	no := func(what string, err error) {
		t.Helper()
		if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
			t.Errorf("%s: %v, want it denied", what, err)
		}
		if err != nil && strings.Contains(err.Error(), "hidden") {
			t.Errorf("%s: the denial shows the content", what)
		}
	}
	create := func(s *corev1.Secret) error {
		_, err := c.Secrets(s.Namespace).Create(t.Context(), s, metav1.CreateOptions{})
		return err
	}
	patch := func(name string) error {
		_, err := c.Secrets("kube-system").Patch(t.Context(), name, types.MergePatchType, []byte(`{}`), metav1.PatchOptions{})
		return err
	}
	if err := create(secret("bootstrap-token-abcdef", corev1.SecretTypeBootstrapToken, token)); err != nil {
		t.Errorf("a bootstrap token: %v", err)
	}
	no("a Secret of another type", create(secret("bootstrap-token-opaqu2", corev1.SecretTypeOpaque, nil)))
	no("a Secret of another name", create(secret("treasure2", corev1.SecretTypeBootstrapToken, token)))
	no("a token that never expires", create(secret("bootstrap-token-abcde2", corev1.SecretTypeBootstrapToken, forEver)))
	other := secret("bootstrap-token-abcdef", corev1.SecretTypeBootstrapToken, token)
	other.Namespace = namespace
	no("a Secret of another namespace", create(other))
	no("an empty patch, which would show the Secret", patch("treasure"))
	no("an empty patch of one that is named as a token", patch("bootstrap-token-opaque"))
	no("the end of another Secret", c.Secrets("kube-system").Delete(t.Context(), "treasure", metav1.DeleteOptions{}))
	_, err = c.Secrets("kube-system").Get(t.Context(), "bootstrap-token-abcdef", metav1.GetOptions{})
	no("a look at a token", err)
	_, err = c.Secrets("kube-system").List(t.Context(), metav1.ListOptions{})
	no("a list of Secrets", err)
	if err := c.Secrets("kube-system").Delete(t.Context(), "bootstrap-token-abcdef", metav1.DeleteOptions{}); err != nil {
		t.Errorf("the end of a token: %v", err)
	}
}

func TestSchemaRefusesWhatItDoesNotKnow(t *testing.T) {
	for _, tt := range []struct {
		name, chart, release string
		values               map[string]any
		want                 string // empty: accepted
	}{
		{"defaults", "constellation-services", "v1.1.0", map[string]any{"release": "v1.1.0"}, ""},
		{"no release", "constellation-services", "v1.1.0", map[string]any{}, "release"},
		{"a key that is not known", "constellation-services", "v1.1.0", map[string]any{"release": "v1.1.0", "joinservce": map[string]any{}}, "joinservce"},
		{"a port out of range", "constellation-services", "v1.1.0", map[string]any{"release": "v1.1.0", "joinservice": map[string]any{"nodePort": 80}}, "nodePort"},
		{"an image without a tag", "constellation-operator", "v1.1.0", map[string]any{"release": "v1.1.0", "operator": map[string]any{"image": "operator"}}, "image"},
		{"an unknown provider", "constellation-operator", "v1.1.0", map[string]any{"release": "v1.1.0", "provider": "gcp"}, "provider"},
		{"a value of the newer release", "constellation-operator", "v1.0.0", map[string]any{"release": "v1.0.0", "operator": map[string]any{"discoveryInterval": "1m"}}, "discoveryInterval"},
		{"the same in the newer release", "constellation-operator", "v1.1.0", map[string]any{"release": "v1.1.0", "operator": map[string]any{"discoveryInterval": "1m"}}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := render.Chart(tt.chart, tt.release, namespace, tt.values)
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

func TestReleasesDifferInTheirPods(t *testing.T) {
	args := func(release string) string {
		var d appsv1.Deployment
		documents(t, rendered(t, "constellation-operator", release, nil), func(kind string) any {
			if kind == "Deployment" {
				return &d
			}
			return nil
		})
		return strings.Join(d.Spec.Template.Spec.Containers[0].Args, " ")
	}
	if a := args("v1.0.0"); strings.Contains(a, "discovery-interval") {
		t.Errorf("the operator of v1.0.0 gets a flag that came later: %s", a)
	}
	if a := args("v1.1.0"); !strings.Contains(a, "--discovery-interval=15m") {
		t.Errorf("the operator of v1.1.0: %s", a)
	}
}

func TestOlderKindsAreAccepted(t *testing.T) {
	cp := controlplane.ForTest(t, controlplane.Options{})
	for _, release := range []string{"v1.0.0", "v1.1.0", "v1.0.0"} { // up, and back
		crds, err := assets.CRDsFor(release)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range crds {
			if err := cp.Apply(t.Context(), f.Data); err != nil {
				t.Errorf("%s of %s: %v", f.Name, release, err)
			}
		}
	}
}

func await(t *testing.T, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !holds(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not so after 20 s")
		}
	}
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
