package assets_test

import (
	"bytes"
	gocmp "cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"

	"constellation/agent"
	"constellation/assets"
	"constellation/assets/render"
	"constellation/engine/attestation"
	"constellation/engine/attestation/certifier"
	"constellation/engine/attestation/certifier/signer"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cloud/providers"
	"constellation/engine/kms"
	"constellation/engine/kubeadm"
	"constellation/engine/sandbox/controlplane"
	"constellation/operator/api/v1alpha1"
)

const namespace = "constellation-system"

var charts = []string{"constellation-policies", "constellation-operator", "constellation-services"}

func rendered(t *testing.T, chart, release string, values map[string]any) []byte {
	t.Helper()
	if values == nil {
		values = map[string]any{}
	}
	values["release"] = release
	b, err := render.Chart(chart, release, namespace, providers.LocalValues(), values)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// documents decodes a YAML stream, each document into the object that into returns for its kind.
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

var rightsOfPlans = []string{
	"*: apiextensions.k8s.io/customresourcedefinitions (plans.upgrade.cattle.io): create,get,patch",
	"*: namespaces (kube-system): get",
	"*: nodes: list,patch,watch",
	"kube-system: coordination.k8s.io/leases (constellation-node-upgrades): get,update",
	"kube-system: coordination.k8s.io/leases: create",
	"system-upgrade: batch/jobs: create,delete,list,watch",
	"system-upgrade: coordination.k8s.io/leases (system-upgrade-controller): get,update",
	"system-upgrade: coordination.k8s.io/leases: create",
	"system-upgrade: events.k8s.io/events: create,patch",
	"system-upgrade: events: create,patch",
	"system-upgrade: pods/log: get",
	"system-upgrade: pods: list,watch",
	"system-upgrade: secrets: get,list,watch",
	"system-upgrade: upgrade.cattle.io/plans/status: update",
	"system-upgrade: upgrade.cattle.io/plans: list,watch",
}

// rightsOf lists the permissions of each service in the cluster. A change of a role
// requires a change of this list, with a reason.
var rightsOf = map[string][]string{
	"constellation-operator": {
		"*: apps/daemonsets: get",
		"*: authentication.k8s.io/tokenreviews: create",
		"*: authorization.k8s.io/subjectaccessreviews: create",
		"*: certificates.k8s.io/certificatesigningrequests/approval: update",
		"*: certificates.k8s.io/certificatesigningrequests: list,watch",
		"*: certificates.k8s.io/signers (kubernetes.io/kubelet-serving,kubernetes.io/kube-apiserver-client-kubelet): approve",
		"*: nodes: delete,list,patch,watch",
		"*: pods/eviction: create",
		"*: pods: list,watch",
		"*: policy/poddisruptionbudgets: list",
		"*: rbac.authorization.k8s.io/clusterrolebindings (kubeadm:node-autoapprove-bootstrap): delete,list,watch",
		"*: storagemigration.k8s.io/storageversionmigrations: create,delete,get",
		"*: update.edgeless.systems/autoscalingstrategies (autoscalingstrategy): patch",
		"*: update.edgeless.systems/autoscalingstrategies/status (autoscalingstrategy): patch",
		"*: update.edgeless.systems/autoscalingstrategies: create,list,watch",
		"*: update.edgeless.systems/joiningnodes/status: patch",
		"*: update.edgeless.systems/joiningnodes: delete,list,watch",
		"*: update.edgeless.systems/nodeversions (constellation-version): get,list,watch",
		"*: update.edgeless.systems/nodeversions/status (constellation-version): patch",
		"*: update.edgeless.systems/pendingnodes/status: patch",
		"*: update.edgeless.systems/pendingnodes: create,delete,list,patch,watch",
		"*: update.edgeless.systems/scalinggroups/status: patch",
		"*: update.edgeless.systems/scalinggroups: create,list,patch,watch",
		"constellation-system: coordination.k8s.io/leases (constellation-operator): get,update",
		"constellation-system: coordination.k8s.io/leases: create",
		"constellation-system: events: create,patch",
		"constellation-system: pods/portforward: create",
		"constellation-system: configmaps (constellation-encryption): get",
		"constellation-system: configmaps (constellation-revoked-nodes): get",
		"constellation-system: serviceaccounts/token (constellation-operator): create",
		"default: events.k8s.io/events: create,patch",
		"kube-system: apps/deployments (constellation-cluster-autoscaler): get,patch",
		"kube-system: apps/deployments (coredns): get",
		"kube-system: configmaps (join-config): patch",
		"kube-system: configmaps (k8s-version): create,patch",
		"kube-system: configmaps: get",
		"kube-system: coordination.k8s.io/leases (constellation-node-upgrades): get,update",
		"kube-system: coordination.k8s.io/leases: create",
	},
	// The audience of its callers' tokens.
	"constellation-relay": {"*: authentication.k8s.io/tokenreviews: create"},
	"constellation-services": {
		"*: nodes: get",
		"*: update.edgeless.systems/joiningnodes: create,patch",
		"*: update.edgeless.systems/nodeversions (constellation-version): get,list,watch",
		"*: update.edgeless.systems/pendingnodes: list,watch",
		"constellation-system: configmaps (constellation-encryption): patch",
		"constellation-system: configmaps (constellation-revoked-nodes): get,list,watch",
		"constellation-system: coordination.k8s.io/leases (control-plane-join): get,update",
		"constellation-system: coordination.k8s.io/leases: create",
		"kube-system: configmaps (join-config): get,list,watch",
		"kube-system: configmaps: get",
		"kube-system: secrets: create,delete,patch",
	},
	// The same permissions in the chart and in the manifest for other clusters.
	"constellation-plans":       rightsOfPlans,
	"system-upgrade-controller": rightsOfPlans,
	// Permissions of the pods of Plans: cordon and drain.
	"system-upgrade": {
		"*: apps/daemonsets: get",
		"*: nodes: get,list,patch",
		"*: pods/eviction: create",
		"*: pods: delete,get,list",
		"system-upgrade: upgrade.cattle.io/plans: get,list",
	},
}

// encrypting has the values of charts in a cluster that encrypts Secrets.
var encrypting = map[string]map[string]any{
	"constellation-operator": {"operator": map[string]any{"rotateKey": true}},
	"constellation-services": {"joinservice": map[string]any{"kms": kms.KeysSocket}},
}

// TestRightsAreExactly asks the real authorizer as each service: for its rules, and for
// every verb on every resource of the API server. Both must match the list above
// exactly.
func TestRightsAreExactly(t *testing.T) {
	cp := controlplane.ForTest(t, controlplane.Options{})
	admin := kubernetes.NewForConfigOrDie(unlimited(cp.Config()))
	for _, ns := range []string{namespace, "other"} {
		if _, err := admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	applyKinds(t, cp)
	for _, chart := range charts {
		if err := cp.Apply(t.Context(), rendered(t, chart, "v1.1.0", encrypting[chart])); err != nil {
			t.Fatal(err)
		}
	}
	for _, m := range [][]byte{assets.PlanKind(), assets.PlansManifest()} {
		if err := cp.Apply(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	known := resources(t, admin)
	for of, at := range map[string]struct{ account, namespace string }{
		"constellation-operator":    {"constellation-operator", namespace},
		"constellation-relay":       {"constellation-relay", namespace},
		"constellation-services":    {"joinservice", namespace},
		"constellation-plans":       {"constellation-plans", "system-upgrade"},
		"system-upgrade-controller": {"system-upgrade-controller", "system-upgrade"},
		"system-upgrade":            {"system-upgrade", "system-upgrade"},
	} {
		account := at.account
		want := slices.Sorted(slices.Values(rightsOf[of]))
		for _, r := range want {
			for _, never := range []string{"*:*", ": *", "/*", "escalate", "impersonate", ": bind", ",bind", "nodes/proxy", "pods/exec"} {
				if strings.Contains(r, never) {
					t.Errorf("right %q contains %q", r, never)
				}
			}
		}
		user, groups := "system:serviceaccount:"+at.namespace+":"+account, []string{"system:serviceaccounts", "system:serviceaccounts:" + at.namespace, "system:authenticated"}
		cfg, err := cp.ConfigFor(user, groups...)
		if err != nil {
			t.Fatal(err)
		}
		c := kubernetes.NewForConfigOrDie(cfg)

		t.Run(account+" has these rules", func(t *testing.T) {
			everywhere := rulesIn(t, c, "other")
			got := rights("*", everywhere)
			for _, ns := range []string{namespace, "kube-system", "default", "system-upgrade"} {
				here := slices.DeleteFunc(rulesIn(t, c, ns), func(r rbacv1.PolicyRule) bool {
					return slices.ContainsFunc(everywhere, func(e rbacv1.PolicyRule) bool { return reflect.DeepEqual(r, e) })
				})
				got = append(got, rights(ns, here)...)
			}
			// Permissions of every authenticated user.
			got = slices.DeleteFunc(got, func(r string) bool {
				return slices.Contains([]string{
					"*: authentication.k8s.io/selfsubjectreviews: create",
					"*: authorization.k8s.io/selfsubjectaccessreviews: create", "*: authorization.k8s.io/selfsubjectrulesreviews: create",
				}, r)
			})
			slices.Sort(got)
			if d := cmp.Diff(want, slices.Compact(got)); d != "" {
				t.Errorf("rules (-want +got):\n%s", d)
			}
		})
		if of == "constellation-plans" {
			continue // it has the same rules as the next one, which is tested
		}
		t.Run(account+" has exactly these permissions", func(t *testing.T) {
			var mu sync.Mutex
			asked := 0
			var g errgroup.Group
			g.SetLimit(16)
			for _, a := range questions(known, want) {
				g.Go(func() error {
					r, err := admin.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{
						Spec: authorizationv1.SubjectAccessReviewSpec{User: user, Groups: groups, ResourceAttributes: &a},
					}, metav1.CreateOptions{})
					if err != nil {
						return err
					}
					mu.Lock()
					defer mu.Unlock()
					asked++
					if should := listed(want, a); r.Status.Allowed != should {
						t.Errorf("%s %s/%s/%s %q in %q: allowed %v, want %v (%s)", a.Verb, a.Group, a.Resource, a.Subresource, a.Name, a.Namespace, r.Status.Allowed, should, r.Status.Reason)
					}
					return nil
				})
			}
			if err := g.Wait(); err != nil {
				t.Fatal(err)
			}
			t.Logf("%d questions", asked)
		})
	}
}

func unlimited(c *rest.Config) *rest.Config {
	c = rest.CopyConfig(c)
	c.QPS = -1
	return c
}

func applyKinds(t *testing.T, cp *controlplane.ControlPlane) {
	t.Helper()
	crds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range crds {
		if err := cp.Apply(t.Context(), f.Data); err != nil {
			t.Fatal(err)
		}
	}
}

// resources returns what the API server serves, subresources included, once each.
func resources(t *testing.T, c kubernetes.Interface) []authorizationv1.ResourceAttributes {
	t.Helper()
	var out []authorizationv1.ResourceAttributes
	await(t, func() bool { // new kinds take a moment
		_, lists, err := c.Discovery().ServerGroupsAndResources()
		if err != nil {
			t.Fatal(err)
		}
		out = nil
		for _, l := range lists {
			gv, err := schema.ParseGroupVersion(l.GroupVersion)
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range l.APIResources {
				a := authorizationv1.ResourceAttributes{Group: gv.Group}
				a.Resource, a.Subresource, _ = strings.Cut(r.Name, "/")
				if !slices.Contains(out, a) {
					out = append(out, a)
				}
			}
		}
		return slices.Contains(out, authorizationv1.ResourceAttributes{Group: "update.edgeless.systems", Resource: "pendingnodes", Subresource: "status"})
	})
	return out
}

// rulesIn asks for the rules that the caller has in a namespace.
func rulesIn(t *testing.T, c kubernetes.Interface, ns string) []rbacv1.PolicyRule {
	t.Helper()
	r, err := c.AuthorizationV1().SelfSubjectRulesReviews().Create(t.Context(), &authorizationv1.SelfSubjectRulesReview{
		Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: ns},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var out []rbacv1.PolicyRule
	for _, rule := range r.Status.ResourceRules {
		out = append(out, rbacv1.PolicyRule{Verbs: rule.Verbs, APIGroups: rule.APIGroups, Resources: rule.Resources, ResourceNames: rule.ResourceNames})
	}
	return out
}

// questions asks for every verb on every resource, in namespaces with and without
// rights of their own, by names of the list and another one.
func questions(known []authorizationv1.ResourceAttributes, want []string) []authorizationv1.ResourceAttributes {
	verbs := []string{
		"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection",
		"approve", "sign", "attest", "bind", "escalate", "impersonate", "use", "*",
	}
	names := []string{"", "other"}
	for _, w := range want {
		if _, n, ok := strings.Cut(w, "("); ok {
			n, _, _ = strings.Cut(n, ")")
			names = append(names, strings.Split(n, ",")...)
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
	var out []authorizationv1.ResourceAttributes
	for _, a := range known {
		if a.Group == "authorization.k8s.io" || a.Group == "authentication.k8s.io" {
			continue // permissions of every user; the rules are compared as a whole
		}
		for _, a.Verb = range verbs {
			for _, a.Namespace = range []string{"", namespace, "kube-system", "default", "other", "system-upgrade"} {
				for _, a.Name = range names {
					// Where no permission names an object, all names are equivalent to "other".
					if a.Name == "" || a.Name == "other" || slices.ContainsFunc(want, func(w string) bool { return strings.Contains(w, a.Resource) && strings.Contains(w, a.Name) }) {
						out = append(out, a)
					}
				}
			}
		}
	}
	return out
}

// listed reports whether the list of rights permits the request.
func listed(want []string, a authorizationv1.ResourceAttributes) bool {
	return slices.ContainsFunc(want, func(w string) bool {
		where, rest, _ := strings.Cut(w, ": ")
		what, verbs, _ := strings.Cut(rest, ": ")
		what, names, byName := strings.Cut(strings.TrimSuffix(what, ")"), " (")
		resource := a.Resource
		if a.Group != "" {
			resource = a.Group + "/" + resource
		}
		if a.Subresource != "" {
			resource += "/" + a.Subresource
		}
		return (where == "*" || where == a.Namespace) && what == resource && slices.Contains(strings.Split(verbs, ","), a.Verb) &&
			(!byName || slices.Contains(strings.Split(names, ","), a.Name))
	})
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

// TestPodsAreRestricted lists, for each pod as the API server completes it, every rule
// of the strictest level of the Pod Security standards that it breaks, and why.
func TestPodsAreRestricted(t *testing.T) {
	cp := controlplane.ForTest(t, controlplane.Options{})
	c := kubernetes.NewForConfigOrDie(cp.Config())
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if _, err := c.CoreV1().Namespaces().Create(t.Context(), ns, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	sa := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	if _, err := c.CoreV1().ServiceAccounts(namespace).Create(t.Context(), sa, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
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
	for _, ns := range []string{namespace, "kube-system", "system-upgrade"} {
		deployments, err := c.AppsV1().Deployments(ns).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range deployments.Items {
			pods[d.Name] = d.Spec.Template
		}
	}
	// With the host's network, ports are those of the host, and probes use the loopback address.
	want := map[string]struct{ broken, mounts []string }{
		"constellation-operator": {
			broken: []string{
				"host namespaces (hostNetwork=true)",
				"hostPort (container \"operator\" uses hostPorts 9092, 9093, 9094)",
				"probe or lifecycle host (container \"operator\" uses probe or lifecycle host \"127.0.0.1\")",
				"restricted volume types (volume \"agent\" uses restricted volume type \"hostPath\")",
			},
			mounts: []string{"/run/constellation-agent at /run/constellation-agent (read-only)"},
		},
		"constellation-relay": {
			broken: []string{"restricted volume types (volume \"agent\" uses restricted volume type \"hostPath\")"},
			mounts: []string{"/run/constellation-agent at /run/constellation-agent (read-only)"},
		},
		"constellation-cluster-autoscaler": {}, // the stand-in
		"constellation-plans":              {},
		"joinservice": { // reads root's files
			broken: []string{
				"host namespaces (hostNetwork=true)",
				"hostPort (container \"joinservice\" uses hostPorts 9090, 9091)",
				"probe or lifecycle host (container \"joinservice\" uses probe or lifecycle host \"127.0.0.1\")",
				"restricted volume types (volumes \"tpm\", \"pki\" use restricted volume type \"hostPath\")",
				"runAsNonRoot != true (pod or containers \"joinservice\", \"ca-signer\" must set securityContext.runAsNonRoot=true)",
				"runAsUser=0 (pod must not set runAsUser=0)",
			},
			mounts: []string{"/etc/kubernetes/pki at /pki (read-only)", "/var/lib/constellation-tpm at /run/tpm (read-only)"},
		},
	}
	if got := slices.Sorted(maps.Keys(pods)); !slices.Equal(got, slices.Sorted(maps.Keys(want))) {
		t.Fatalf("workloads %v", got)
	}
	rules, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, template := range pods {
		t.Run(name, func(t *testing.T) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: template.Labels}, Spec: template.Spec}
			in := namespace
			if name == "constellation-plans" {
				in = "system-upgrade" // where its account is
			}
			pod, err := c.CoreV1().Pods(in).Create(t.Context(), pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if err != nil {
				t.Fatal(err)
			}
			var broken []string
			for _, r := range rules.EvaluatePod(api.LevelVersion{Level: api.LevelRestricted, Version: api.LatestVersion()}, &pod.ObjectMeta, &pod.Spec) {
				if !r.Allowed {
					broken = append(broken, fmt.Sprintf("%s (%s)", r.ForbiddenReason, r.ForbiddenDetail))
				}
			}
			slices.Sort(broken)
			if d := cmp.Diff(want[name].broken, broken); d != "" {
				t.Errorf("broken rules (-want +got):\n%s", d)
			}
			if d := cmp.Diff(want[name].mounts, mountsOfHost(t, &template.Spec)); d != "" {
				t.Errorf("mounts of the host (-want +got):\n%s", d)
			}
			for _, ctr := range template.Spec.Containers {
				if s := ctr.SecurityContext; s == nil || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem {
					t.Errorf("container %s can write to its root file system", ctr.Name)
				}
				if ctr.Resources.Limits.Memory().IsZero() || ctr.Resources.Requests.Cpu().IsZero() {
					t.Errorf("container %s has no memory limit or no CPU request", ctr.Name)
				}
			}
		})
	}
}

// mountsOfHost returns the directories of the host that a pod mounts, with their mount points.
// Each must exist before: the kubelet would create it with another mode.
func mountsOfHost(t *testing.T, pod *corev1.PodSpec) []string {
	t.Helper()
	var out []string
	for _, v := range pod.Volumes {
		if v.EmptyDir != nil && v.EmptyDir.Medium == corev1.StorageMediumMemory {
			continue
		}
		if v.HostPath == nil {
			t.Errorf("volume %s is not a directory of the host", v.Name)
			continue
		}
		if v.HostPath.Type == nil || *v.HostPath.Type != corev1.HostPathDirectory {
			t.Errorf("the kubelet may create volume %s", v.Name)
		}
		for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
			for _, m := range c.VolumeMounts {
				if m.Name != v.Name {
					continue
				}
				s := v.HostPath.Path + " at " + m.MountPath
				if m.ReadOnly {
					s += " (read-only)"
				}
				out = append(out, s)
			}
		}
	}
	slices.Sort(out)
	return out
}

// TestRelayMountsOnlyTheSocket: it runs where the operator places it, whatever taints a
// node has, with an account that can review tokens only (see TestRightsAreExactly).
func TestRelayMountsOnlyTheSocket(t *testing.T) {
	var d appsv1.DaemonSet
	relay := func(release string) appsv1.DaemonSet {
		d = appsv1.DaemonSet{}
		documents(t, rendered(t, "constellation-operator", release, nil), func(kind string) any {
			if kind == "DaemonSet" {
				return &d
			}
			return nil
		})
		return d
	}
	if old := relay("v1.0.0"); old.Name != "" {
		t.Errorf("v1.0.0, whose operator supports no relay, has %s", old.Name)
	}
	relay("v1.1.0")
	pod := d.Spec.Template.Spec
	if d.Name != "constellation-relay" || d.Spec.Template.Labels["app.kubernetes.io/name"] != d.Name {
		t.Errorf("DaemonSet %s makes pods with the labels %v", d.Name, d.Spec.Template.Labels)
	}
	if m := pod.AutomountServiceAccountToken; m == nil || !*m || pod.ServiceAccountName != "constellation-relay" || pod.HostNetwork {
		t.Errorf("the relay has no token, another account or the host's network: %+v", pod)
	}
	if want := map[string]string{v1alpha1.LabelInPlace: "true"}; !maps.Equal(pod.NodeSelector, want) {
		t.Errorf("it runs on nodes with %v, want %v", pod.NodeSelector, want)
	}
	if len(pod.Tolerations) != 1 || pod.Tolerations[0] != (corev1.Toleration{Operator: corev1.TolerationOpExists}) {
		t.Errorf("it tolerates %v", pod.Tolerations)
	}
	args, ports := pod.Containers[0].Args, pod.Containers[0].Ports
	if !slices.Contains(args, "--agent="+agent.DefaultSocket) || len(ports) != 1 || !slices.Contains(args, fmt.Sprintf("--relay=127.0.0.1:%d", ports[0].ContainerPort)) {
		t.Errorf("arguments %q, ports %v", args, ports)
	}
	if u := pod.SecurityContext.RunAsUser; u == nil || *u != 65532 {
		t.Errorf("it runs as %v, and the agent accepts 65532", u)
	}
	for _, v := range pod.Volumes {
		if v.Projected != nil || v.Secret != nil {
			t.Errorf("volume %s", v.Name)
		}
	}
}

// deployment returns the one of a name in the operator's chart of a release; the zero value if
// there is none.
func deployment(t *testing.T, release, name string) (out appsv1.Deployment) {
	t.Helper()
	var all []*appsv1.Deployment
	documents(t, rendered(t, "constellation-operator", release, nil), func(kind string) any {
		if kind == "Deployment" {
			all = append(all, &appsv1.Deployment{})
			return all[len(all)-1]
		}
		return nil
	})
	for _, d := range all {
		if d.Name == name {
			out = *d
		}
	}
	return out
}

// TestPoliciesOfAdoptedClusters: an adopted cluster has the policies for our own accounts, and those that its
// owner names.
func TestPoliciesOfAdoptedClusters(t *testing.T) {
	policies := func(values map[string]any) (out []string) {
		var all []*metav1.PartialObjectMetadata
		documents(t, rendered(t, "constellation-policies", "v1.1.0", values), func(kind string) any {
			if kind != "ValidatingAdmissionPolicy" {
				return nil
			}
			all = append(all, &metav1.PartialObjectMetadata{})
			return all[len(all)-1]
		})
		for _, o := range all {
			out = append(out, o.Name)
		}
		return out
	}
	own := policies(map[string]any{"ownAccountsOnly": true})
	all := policies(nil)
	of := map[string]string{"kubelet-pods": "constellation-pods-kubelets", "control-plane-label": "constellation-nodes-control-plane", "machine-configuration": "constellation-machine-configuration"}
	for _, h := range machines.Hardenings() {
		policy := of[h.Name]
		if policy == "" || slices.Contains(own, policy) || !slices.Contains(all, policy) {
			t.Errorf("%s is the policy %q; without it an adopted cluster has %q, one of init %q", h.Name, policy, own, all)
		}
		got := policies(map[string]any{"ownAccountsOnly": true, "hardening": []any{h.Name}})
		if want := append([]string{policy}, own...); !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))) {
			t.Errorf("with %s: %q, want %q", h.Name, got, want)
		}
	}
	if len(of) != len(machines.Hardenings()) {
		t.Errorf("the configuration knows %v", machines.Hardenings())
	}
	if _, err := render.Chart("constellation-policies", "v1.1.0", namespace, providers.LocalValues(), map[string]any{"release": "v1.1.0", "hardening": []any{"all"}}); err == nil {
		t.Error("the chart accepts an unknown name")
	}
}

// TestNetworkPoliciesOfOurNamespaces applies the policies to a real API server, and compares what they allow with the ports of the pods.
func TestNetworkPoliciesOfOurNamespaces(t *testing.T) {
	chart := func(values map[string]any) []byte {
		t.Helper()
		values["release"] = "v1.1.0"
		b, err := render.Chart("constellation-operator", "v1.1.0", namespace, providers.LocalValues(), values)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	if strings.Contains(string(chart(map[string]any{})), "NetworkPolicy\n") {
		t.Error("the chart has NetworkPolicies that nobody switched on")
	}
	if b := chart(map[string]any{"networkPolicies": true, "plans": map[string]any{"enabled": false}}); strings.Contains(string(b), "namespace: system-upgrade") || !strings.Contains(string(b), "NetworkPolicy\n") {
		t.Error("without Plans the policies are not those of one namespace")
	}
	cp := controlplane.ForTest(t, controlplane.Options{})
	if err := cp.Apply(t.Context(), []byte("{apiVersion: v1, kind: Namespace, metadata: {name: "+namespace+"}}")); err != nil {
		t.Fatal(err)
	}
	if err := cp.Apply(t.Context(), chart(map[string]any{"networkPolicies": true})); err != nil {
		t.Fatal(err)
	}
	c, err := kubernetes.NewForConfig(cp.Config())
	if err != nil {
		t.Fatal(err)
	}
	list, err := c.NetworkingV1().NetworkPolicies(metav1.NamespaceAll).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, p := range list.Items {
		rule := fmt.Sprint("selects ", p.Spec.PodSelector.MatchLabels["app.kubernetes.io/name"], " ", p.Spec.PolicyTypes)
		show := func(what string, ports []networkingv1.NetworkPolicyPort, peers int) {
			for _, port := range ports {
				rule += fmt.Sprintf(" %s %s %s", what, *port.Protocol, port.Port.String())
			}
			if len(ports) == 0 || peers > 0 {
				t.Errorf("%s/%s: a rule has %d ports and %d peers", p.Namespace, p.Name, len(ports), peers)
			}
		}
		for _, r := range p.Spec.Ingress {
			show("in", r.Ports, len(r.From))
		}
		for _, r := range p.Spec.Egress {
			show("out", r.Ports, len(r.To))
		}
		got[p.Namespace+"/"+p.Name] = rule
	}
	want := map[string]string{
		namespace + "/constellation-default-deny":   "selects  [Ingress Egress]",
		namespace + "/constellation-relay":          "selects constellation-relay [Egress] out TCP 443 out TCP 6443",
		"system-upgrade/constellation-default-deny": "selects  [Ingress Egress]",
		"system-upgrade/constellation-plans":        "selects constellation-plans [Ingress Egress] in TCP 9096 in TCP 9097 out UDP 53 out TCP 53 out TCP 80 out TCP 443 out TCP 6443",
	}
	if !maps.Equal(got, want) {
		t.Errorf("NetworkPolicies\n%v, want\n%v", got, want)
	}
	// Each pod with a network of its own is selected by a policy of its name. Others are not covered.
	for name, hostNetwork := range map[string]bool{"constellation-plans": false, "constellation-operator": true} {
		if d := deployment(t, "v1.1.0", name); d.Name != name || d.Spec.Template.Spec.HostNetwork != hostNetwork || !hostNetwork && d.Spec.Template.Labels["app.kubernetes.io/name"] != name {
			t.Errorf("pods of %s: hostNetwork %t, labels %v", name, d.Spec.Template.Spec.HostNetwork, d.Spec.Template.Labels)
		}
	}
}

// TestPlansControllerStartsOnACordonedNode: a Plan may have cordoned the only control plane, and nothing
// else would uncordon it.
func TestPlansControllerStartsOnACordonedNode(t *testing.T) {
	d := deployment(t, "v1.1.0", "constellation-plans")
	if !slices.ContainsFunc(d.Spec.Template.Spec.Tolerations, func(x corev1.Toleration) bool {
		return x.Key == corev1.TaintNodeUnschedulable && x.Operator == corev1.TolerationOpExists && x.Effect == corev1.TaintEffectNoSchedule
	}) {
		t.Errorf("the Deployment does not tolerate %s: %v", corev1.TaintNodeUnschedulable, d.Spec.Template.Spec.Tolerations)
	}
}

// TestChartMatchesPlansManifest: the chart and the manifest for other clusters differ only
// in names, labels and settings that one of them does not have.
func TestChartMatchesPlansManifest(t *testing.T) {
	if d := deployment(t, "v1.0.0", "constellation-plans"); d.Name != "" {
		t.Errorf("v1.0.0, whose operator supports no Plans, has %s", d.Name)
	}
	if b, err := render.Chart("constellation-operator", "v1.1.0", namespace, providers.LocalValues(), map[string]any{"release": "v1.1.0", "plans": map[string]any{"enabled": false}}); err != nil || strings.Contains(string(b), "system-upgrade") {
		t.Errorf("switched off (%v) it still exists", err)
	}
	type settings struct {
		Pod  corev1.PodSecurityContext
		Own  corev1.SecurityContext
		Data map[string]string
		Keep map[string]string // Namespaces and accounts, and whether they stay when the chart is uninstalled
	}
	read := func(stream []byte) (out settings) {
		var deployments []*appsv1.Deployment
		var maps []*corev1.ConfigMap
		var others []*metav1.PartialObjectMetadata
		documents(t, stream, func(kind string) any {
			switch kind {
			case "Deployment":
				deployments = append(deployments, &appsv1.Deployment{})
				return deployments[len(deployments)-1]
			case "ConfigMap":
				maps = append(maps, &corev1.ConfigMap{})
				return maps[len(maps)-1]
			case "Namespace", "ServiceAccount":
				others = append(others, &metav1.PartialObjectMetadata{})
				return others[len(others)-1]
			}
			return nil
		})
		for _, d := range deployments {
			if d.Namespace == "system-upgrade" {
				out.Pod, out.Own = *d.Spec.Template.Spec.SecurityContext, *d.Spec.Template.Spec.Containers[0].SecurityContext
			}
		}
		for _, m := range maps {
			if m.Namespace == "system-upgrade" {
				out.Data = m.Data
			}
		}
		out.Keep = map[string]string{}
		for _, o := range others {
			if o.Name == "system-upgrade" {
				out.Keep[o.Kind] = o.Annotations["helm.sh/resource-policy"] + " " + o.Labels["pod-security.kubernetes.io/enforce"]
			}
		}
		return out
	}
	want := read(assets.PlansManifest())
	// Both are arguments and variables of the Deployment in the chart.
	delete(want.Data, "SYSTEM_UPGRADE_CONTROLLER_DEBUG")
	delete(want.Data, "SYSTEM_UPGRADE_CONTROLLER_LEADER_ELECT")
	want.Keep = map[string]string{"Namespace": "keep privileged", "ServiceAccount": "keep "}
	if d := cmp.Diff(want, read(rendered(t, "constellation-operator", "v1.1.0", nil))); d != "" {
		t.Errorf("(-manifest +chart):\n%s", d)
	}
}

// TestOperatorUpdatesOnOneSchedulableControlPlane: its pods use ports of their host. If one old pod
// were kept until a new one is Ready, both would wait for each other.
func TestOperatorUpdatesOnOneSchedulableControlPlane(t *testing.T) {
	for _, replicas := range []int{1, 2, 5} {
		b, err := render.Chart("constellation-operator", "v1.1.0", namespace, providers.LocalValues(), map[string]any{"release": "v1.1.0", "operator": map[string]any{"replicas": replicas}})
		if err != nil {
			t.Fatal(err)
		}
		var all []*appsv1.Deployment
		documents(t, b, func(kind string) any {
			if kind != "Deployment" {
				return nil
			}
			all = append(all, &appsv1.Deployment{})
			return all[len(all)-1]
		})
		k := slices.IndexFunc(all, func(d *appsv1.Deployment) bool { return d.Name == "constellation-operator" })
		if k < 0 || *all[k].Spec.Replicas != int32(replicas) {
			t.Fatalf("%d replicas: the chart has %v", replicas, all)
		}
		rolling := all[k].Spec.Strategy.RollingUpdate
		surge, err1 := intstr.GetScaledValueFromIntOrPercent(rolling.MaxSurge, replicas, true)
		unavailable, err2 := intstr.GetScaledValueFromIntOrPercent(rolling.MaxUnavailable, replicas, false)
		if surge != 0 || unavailable != replicas || err1 != nil || err2 != nil {
			t.Errorf("%d replicas: %d of them end first, and %d start first (%v, %v); want all to end first", replicas, unavailable, surge, err1, err2)
		}
	}
}

// TestOperatorReachesAgent: the pod mounts the agent's socket, and the agent accepts its user.
func TestOperatorReachesAgent(t *testing.T) {
	d := deployment(t, "v1.1.0", "constellation-operator")
	pod := d.Spec.Template.Spec
	if args := pod.Containers[0].Args; !slices.Contains(args, "--agent="+agent.DefaultSocket) {
		t.Errorf("arguments %q do not name the socket %s", args, agent.DefaultSocket)
	}
	if got := mountsOfHost(t, &pod); len(got) != 1 || !strings.HasPrefix(got[0], path.Dir(agent.DefaultSocket)+" at "+path.Dir(agent.DefaultSocket)) {
		t.Errorf("mounts %q, want the folder of %s", got, agent.DefaultSocket)
	}
	// The agent gets the user from the kernel; in its own user namespace the pod would be another
	// user.
	if pod.HostUsers != nil && !*pod.HostUsers {
		t.Error("the pod has a user namespace of its own")
	}
	unit, err := fs.ReadFile(assets.Systemd(), "constellation-agent.service")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		fmt.Sprintf("ExecStart=/usr/lib/constellation/agent -operator %d\n", *pod.SecurityContext.RunAsUser),
		"RuntimeDirectory=" + path.Base(path.Dir(agent.DefaultSocket)) + "\n", "RuntimeDirectoryPreserve=yes\n",
	} {
		if !strings.Contains(string(unit), line) {
			t.Errorf("the agent's unit has no line %q", line)
		}
	}
}

// TestJoinServiceHasNoAccessToOtherSecrets asks the real admission policy.
func TestJoinServiceHasNoAccessToOtherSecrets(t *testing.T) {
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
	token := map[string]string{"token-id": "abcdef", "token-secret": "0123456789abcdef", "expiration": "2036-11-21T08:00:00Z", "usage-bootstrap-authentication": "true", "auth-extra-groups": "system:bootstrappers:constellation:join"}
	kubeadms := maps.Clone(token)
	kubeadms["auth-extra-groups"] = "system:bootstrappers:kubeadm:default-node-token"
	noGroup := maps.Clone(token)
	delete(noGroup, "auth-extra-groups")
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
	no("a token of kubeadm's group", create(secret("bootstrap-token-abcde3", corev1.SecretTypeBootstrapToken, kubeadms)))
	no("a token of no group", create(secret("bootstrap-token-abcde4", corev1.SecretTypeBootstrapToken, noGroup)))
	other := secret("bootstrap-token-abcdef", corev1.SecretTypeBootstrapToken, token)
	other.Namespace = namespace
	no("a Secret of another namespace", create(other))
	no("an empty patch, which would show the Secret", patch("treasure"))
	no("an empty patch of a Secret with the name of a token", patch("bootstrap-token-opaque"))
	no("the deletion of another Secret", c.Secrets("kube-system").Delete(t.Context(), "treasure", metav1.DeleteOptions{}))
	_, err = c.Secrets("kube-system").Get(t.Context(), "bootstrap-token-abcdef", metav1.GetOptions{})
	no("a read of a token", err)
	_, err = c.Secrets("kube-system").List(t.Context(), metav1.ListOptions{})
	no("a list of Secrets", err)
	if err := c.Secrets("kube-system").Delete(t.Context(), "bootstrap-token-abcdef", metav1.DeleteOptions{}); err != nil {
		t.Errorf("the deletion of a token: %v", err)
	}
}

func TestSchemaRefusesUnknownValues(t *testing.T) {
	odd := map[string]any{"provider": "odd", "metadataURL": "odd://demo/control-plane-0", "cloudURL": "unix:/run/odd.sock", "joinservice.tpm": "/dev/tpm0", "joinservice.tpmDevice": "/dev/tpm0"}
	release := func(v string, more map[string]any) map[string]any {
		values := map[string]any{"release": v}
		maps.Copy(values, more)
		return values
	}
	for _, tt := range []struct {
		name, chart, release string
		cloud, values        map[string]any
		want                 string // empty: accepted
	}{
		{name: "defaults", chart: "constellation-services", cloud: providers.LocalValues(), values: release("v1.1.0", nil)},
		{name: "no release", chart: "constellation-services", cloud: providers.LocalValues(), values: map[string]any{}, want: "release"},
		{name: "an unknown key", chart: "constellation-services", cloud: providers.LocalValues(), values: release("v1.1.0", map[string]any{"joinservce": map[string]any{}}), want: "joinservce"},
		{name: "a port out of range", chart: "constellation-services", cloud: providers.LocalValues(), values: release("v1.1.0", map[string]any{"joinservice": map[string]any{"nodePort": 80}}), want: "nodePort"},
		{name: "an image without a tag", chart: "constellation-operator", cloud: providers.LocalValues(), values: release("v1.1.0", map[string]any{"operator": map[string]any{"image": "operator"}}), want: "image"},
		{name: "an operator of no cloud", chart: "constellation-operator", values: release("v1.1.0", nil), want: "provider"},
		{name: "services of no cloud", chart: "constellation-services", values: release("v1.1.0", nil), want: "provider"},
		{name: "services without a TPM", chart: "constellation-services", values: release("v1.1.0", map[string]any{"provider": "odd"}), want: "anyOf"},
		{name: "an operator in a cloud without HTTP addresses", chart: "constellation-operator", cloud: odd, values: release("v1.1.0", nil)},
		{name: "services in a cloud without HTTP addresses", chart: "constellation-services", cloud: odd, values: release("v1.1.0", nil)},
		{name: "services of the older release in a cloud without HTTP addresses", chart: "constellation-services", release: "v1.0.0", cloud: odd, values: release("v1.0.0", nil)},
		{name: "an address with a blank", chart: "constellation-operator", cloud: odd, values: release("v1.1.0", map[string]any{"cloudURL": "odd://demo --role=relay"}), want: "cloudURL"},
		{name: "a value of the newer release", chart: "constellation-operator", release: "v1.0.0", cloud: providers.LocalValues(), values: release("v1.0.0", map[string]any{"operator": map[string]any{"discoveryInterval": "1m"}}), want: "discoveryInterval"},
		{name: "the same in the newer release", chart: "constellation-operator", cloud: providers.LocalValues(), values: release("v1.1.0", map[string]any{"operator": map[string]any{"discoveryInterval": "1m"}})},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := render.Chart(tt.chart, gocmp.Or(tt.release, "v1.1.0"), namespace, tt.cloud, tt.values)
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

// A chart gets all values that depend on the cloud from the engine. A default would be that of one
// cloud.
func TestChartsHaveNoDefaultsOfACloud(t *testing.T) {
	seen := map[string]bool{}
	for _, chart := range charts {
		files, err := assets.ChartFor(chart, "v1.1.0")
		if err != nil {
			t.Fatal(err)
		}
		var defaults map[string]any
		for _, f := range files {
			if f.Name == "values.yaml" {
				if err := yaml.Unmarshal(f.Data, &defaults); err != nil {
					t.Fatal(err)
				}
			}
		}
		for path := range providers.LocalValues() {
			if !assets.HasValue(files, strings.Split(path, ".")...) {
				continue
			}
			seen[path] = true
			var value any = defaults
			for key := range strings.SplitSeq(path, ".") {
				value = value.(map[string]any)[key]
			}
			if list, ok := value.([]any); ok && len(list) == 0 {
				continue
			}
			if value != "" && value != false {
				t.Errorf("chart %s has the default %v for %s", chart, value, path)
			}
		}
	}
	for path := range providers.LocalValues() {
		if !seen[path] {
			t.Errorf("no chart has the value %s", path)
		}
	}
}

// The daemons' flag --provider has no default, so the charts of every release set it. Pods of the
// operator with another role than operator have no cloud.
func TestPodsNameTheirProvider(t *testing.T) {
	releases, err := fs.Glob(assets.Releases(), "releases/*.yaml")
	if err != nil || len(releases) < 2 {
		t.Fatalf("releases: %v, %v", releases, err)
	}
	for _, file := range releases {
		release := strings.TrimSuffix(path.Base(file), ".yaml")
		t.Run(release, func(t *testing.T) {
			var all []*appsv1.DaemonSet // a Deployment has its template at the same place
			for _, chart := range charts {
				documents(t, rendered(t, chart, release, nil), func(kind string) any {
					if kind != "Deployment" && kind != "DaemonSet" {
						return nil
					}
					all = append(all, &appsv1.DaemonSet{})
					return all[len(all)-1]
				})
			}
			var named []string
			for _, d := range all {
				if slices.Contains(d.Spec.Template.Spec.Containers[0].Args, "--provider="+providers.Local) {
					named = append(named, d.Name)
				}
			}
			slices.Sort(named)
			if d := cmp.Diff([]string{"constellation-operator", "joinservice"}, named); d != "" {
				t.Errorf("workloads that name their provider (-want +got):\n%s", d)
			}
		})
	}
}

func TestReleasesDifferInTheirPods(t *testing.T) {
	args := func(release string) string {
		return strings.Join(deployment(t, release, "constellation-operator").Spec.Template.Spec.Containers[0].Args, " ")
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
	for _, release := range []string{"v1.0.0", "v1.1.0", "v1.0.0"} { // upgrade, and downgrade
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

// caSigner returns the container of the CA signer. The other one, which the network reaches, has nothing of the host, and no privileges.
func caSigner(t *testing.T, pod corev1.PodSpec) corev1.Container {
	t.Helper()
	if len(pod.Containers) != 2 || pod.Containers[0].Name != "joinservice" || pod.Containers[1].Name != "ca-signer" {
		t.Fatalf("containers %v", pod.Containers)
	}
	service := pod.Containers[0]
	for _, m := range service.VolumeMounts {
		for _, v := range pod.Volumes {
			if v.Name == m.Name && (v.HostPath != nil || !m.ReadOnly && v.ConfigMap == nil) {
				t.Errorf("the join service has %s at %s, read-only %t", v.Name, m.MountPath, m.ReadOnly)
			}
		}
	}
	if s := service.SecurityContext; s.Privileged != nil || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || !slices.Contains(s.Capabilities.Drop, "ALL") {
		t.Errorf("the join service has privileges: %+v", s)
	}
	if signer := pod.Containers[1]; len(signer.Ports) > 0 || slices.ContainsFunc(signer.Args, func(a string) bool { return strings.HasPrefix(a, "--listen") }) {
		t.Errorf("the CA signer listens: %v, %q", signer.Ports, signer.Args)
	}
	return pod.Containers[1]
}

// A pod reaches a TPM by a socket, unless the provider chooses a device, which a privileged container
// alone can open.
func TestTPMIsTheProvidersChoice(t *testing.T) {
	pod := func(values map[string]any) corev1.PodSpec {
		t.Helper()
		var d appsv1.DaemonSet
		documents(t, rendered(t, "constellation-services", "v1.1.0", values), func(kind string) any {
			if kind == "DaemonSet" {
				return &d
			}
			return nil
		})
		return d.Spec.Template.Spec
	}
	tpm := func(s corev1.PodSpec) (host corev1.HostPathVolumeSource, at string, privileged bool) {
		t.Helper()
		for _, v := range s.Volumes {
			if v.Name == "tpm" {
				host = *v.HostPath
			}
		}
		c := caSigner(t, s)
		for _, m := range c.VolumeMounts {
			if m.Name == "tpm" {
				at = m.MountPath
			}
		}
		return host, at, c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged
	}
	host, at, privileged := tpm(pod(nil))
	if host.Path != "/var/lib/constellation-tpm" || *host.Type != corev1.HostPathDirectory || at != "/run/tpm" || privileged {
		t.Errorf("socket: %s (%s) at %s, privileged %t", host.Path, *host.Type, at, privileged)
	}
	host, at, privileged = tpm(pod(map[string]any{"joinservice": map[string]any{"tpm": "/dev/tpmrm0", "tpmDir": "", "tpmDevice": "/dev/tpmrm0"}}))
	if host.Path != "/dev/tpmrm0" || *host.Type != corev1.HostPathCharDev || at != "/dev/tpmrm0" || !privileged {
		t.Errorf("device: %s (%s) at %s, privileged %t", host.Path, *host.Type, at, privileged)
	}
}

// The pod of the join service has the directories of processes with keys, read-only, if the cluster has them. They can start later than
// the pod.
func TestKeysOfTheMachine(t *testing.T) {
	t.Parallel()
	for name, socket := range map[string]string{"certifier": certifier.Socket, "kms": kms.KeysSocket} {
		for _, socket := range []string{"", socket} {
			values := map[string]any{"release": "v1.1.0", "joinservice": map[string]any{name: socket}}
			b, err := render.Chart("constellation-services", "v1.1.0", namespace, providers.LocalValues(), values)
			if err != nil {
				t.Fatal(err)
			}
			if socket == "" {
				if bytes.Contains(b, []byte(name)) {
					t.Errorf("a cluster without a %s:\n%s", name, b)
				}
				continue
			}
			var d appsv1.DaemonSet
			documents(t, b, func(kind string) any {
				if kind == "DaemonSet" {
					return &d
				}
				return nil
			})
			s := d.Spec.Template.Spec
			dir := path.Dir(socket)
			host := slices.ContainsFunc(s.Volumes, func(v corev1.Volume) bool {
				return v.Name == name && v.HostPath.Path == dir && *v.HostPath.Type == corev1.HostPathDirectoryOrCreate
			})
			c := caSigner(t, s)
			mount := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool {
				return m.Name == name && m.MountPath == dir && m.ReadOnly
			})
			if !host || !mount || !slices.Contains(c.Args, "--"+name+"="+socket) || !slices.Contains(s.Containers[0].Args, "--"+name) {
				t.Errorf("volume %t, mount %t, arguments %q and %q", host, mount, c.Args, s.Containers[0].Args)
			}
		}
	}
}

// TestUnitsOfKeys compares the paths in the units of processes with keys with those of the programs.
func TestUnitsOfKeys(t *testing.T) {
	dir := func(socket string) string { return path.Base(path.Dir(socket)) }
	for name, want := range map[string]string{
		"constellation-certifier.path":    "\nPathExists=/var/lib/constellation/" + signer.SealedFile + "\n",
		"constellation-certifier.service": "\nRuntimeDirectory=" + dir(certifier.Socket) + "\n",
		"constellation-kms.path":          "\nPathExists=/var/lib/constellation/" + kms.SealedFile + "\n",
		"constellation-kms.service":       "\nRuntimeDirectory=" + dir(kubeadm.KMSSocket) + " " + dir(kms.KeysSocket) + "\n",
	} {
		b, err := fs.ReadFile(assets.Systemd(), name)
		if err != nil || !strings.Contains(string(b), want) {
			t.Errorf("%s: %v, without %q\n%s", name, err, want, b)
		}
	}
}

// The pod of the join service has the event log of its machine's TPM where evidence contains it. The charts of other
// providers are the same as without the value.
func TestEventLogOfTheMachine(t *testing.T) {
	t.Parallel()
	for _, p := range providers.Clouds() {
		t.Run(p.Name, func(t *testing.T) {
			values := p.ChartValues(nil)
			b, err := render.Chart("constellation-services", "v1.1.0", namespace, values, map[string]any{"release": "v1.1.0"})
			if err != nil {
				t.Fatal(err)
			}
			if p.EventLogDir == "" {
				delete(values, "joinservice.eventLogDir")
				without, err := render.Chart("constellation-services", "v1.1.0", namespace, values, map[string]any{"release": "v1.1.0"})
				if err != nil || !bytes.Equal(b, without) || bytes.Contains(b, []byte("event-log")) {
					t.Errorf("the chart differs without the value: %v\n%s", err, b)
				}
				return
			}
			var d appsv1.DaemonSet
			documents(t, b, func(kind string) any {
				if kind == "DaemonSet" {
					return &d
				}
				return nil
			})
			var host string
			for _, v := range d.Spec.Template.Spec.Volumes {
				if v.Name == "event-log" {
					host = v.HostPath.Path
				}
			}
			c := caSigner(t, d.Spec.Template.Spec)
			n := slices.IndexFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == "event-log" })
			if n < 0 || host != p.EventLogDir {
				t.Fatalf("no mount, or another directory of the host: %q", host)
			}
			m := c.VolumeMounts[n]
			if m.MountPath != host || !m.ReadOnly || !strings.HasPrefix(attestation.EventLogPath(p.TPMAddress), m.MountPath+"/") {
				t.Errorf("%+v, and the log is %s", m, attestation.EventLogPath(p.TPMAddress))
			}
		})
	}
}

// Pods of enrolled machines have the identity at the path that it has on the host, and the TPMs of control planes
// at the addresses that identities contain. Only a TPM that is a device takes a privileged container, and a
// control plane without one still runs the pod.
func TestTPMsOfEnrolledMachines(t *testing.T) {
	t.Parallel()
	enrolled, ok := providers.Named(machines.Enrolled)
	if !ok {
		t.Fatal("no provider of enrolled machines")
	}
	const socket = "unix:/run/tpm/tpm.sock"
	for _, tt := range []struct {
		name       string
		machines   []machines.Machine
		privileged bool
		sockets    string // directory
	}{
		{name: "no machine"},
		{name: "keys in files, and a worker with a TPM", machines: []machines.Machine{{Group: cloud.ControlPlane}, {Group: cloud.Worker, Attested: true}}},
		{name: "one of two control planes with a device", machines: []machines.Machine{{Group: cloud.ControlPlane}, {Group: cloud.ControlPlane, Attested: true}}, privileged: true},
		{name: "a socket and a key in a file", machines: []machines.Machine{{Group: cloud.ControlPlane, Attested: true, TPM: socket}, {Group: cloud.ControlPlane}}, sockets: "/run/tpm"},
		{name: "two sockets and a device", machines: []machines.Machine{{Group: cloud.ControlPlane, Attested: true, TPM: socket}, {Group: cloud.ControlPlane, Attested: true, TPM: socket}, {Group: cloud.ControlPlane, Attested: true, TPM: "/dev/tpmrm1"}}, sockets: "/run/tpm", privileged: true},
	} {
		b, err := render.Chart("constellation-services", "v1.1.0", namespace, enrolled.ChartValues(machines.Section(tt.machines)), map[string]any{"release": "v1.1.0"})
		if err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		var d appsv1.DaemonSet
		documents(t, b, func(kind string) any {
			if kind == "DaemonSet" {
				return &d
			}
			return nil
		})
		pod := d.Spec.Template.Spec
		c := caSigner(t, pod)
		if !slices.Contains(c.Args, "--tpm=enrolled:"+machines.IdentityDir) {
			t.Errorf("%s: arguments %q", tt.name, c.Args)
		}
		s := c.SecurityContext
		if is := s.Privileged != nil && *s.Privileged; is != tt.privileged || !is && (s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || len(s.Capabilities.Drop) == 0) {
			t.Errorf("%s: privileged %t, %+v", tt.name, is, s)
		}
		mounted := map[string]corev1.HostPathType{}
		for _, m := range c.VolumeMounts {
			for _, v := range pod.Volumes {
				if v.Name != m.Name || v.HostPath == nil || m.Name == "pki" {
					continue
				}
				if mounted[m.MountPath] = *v.HostPath.Type; v.HostPath.Path != m.MountPath || !m.ReadOnly {
					t.Errorf("%s: %s of the host is %s in the pod, read-only %t", tt.name, v.HostPath.Path, m.MountPath, m.ReadOnly)
				}
			}
		}
		want := map[string]corev1.HostPathType{machines.IdentityDir: corev1.HostPathDirectory}
		if tt.sockets != "" {
			want[tt.sockets] = corev1.HostPathDirectoryOrCreate
		}
		if !maps.Equal(mounted, want) {
			t.Errorf("%s: mounts %v, want %v", tt.name, mounted, want)
		}
	}
}
