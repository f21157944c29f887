package escalation_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"constellation/assets"
	"constellation/assets/render"
	"constellation/engine/cloud/providers"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/escalation"
)

// TestNobodyBecomesSomebodyElse makes all attempts on a real API server with the charts of the
// newest release.
func TestNobodyBecomesSomebodyElse(t *testing.T) {
	cp := controlplane.ForTest(t, controlplane.Options{Controllers: true})
	c := cluster(t, cp, "constellation-operator", "constellation-services", "constellation-policies") // the test waits until the policies, which come last, are enforced
	enforced(t, c)
	found, tried, err := escalation.Run(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range found {
		t.Error(f)
	}
	t.Logf("%d attempts", tried)
	otherControllerLeads(t, cp)
	guardedSecretsAreWrittenAgain(t, cp)
}

// guardedSecretsAreWrittenAgain writes Secrets that policies guard as the controller manager does when the key changes that encrypts them:
// as they are. Changes are refused.
func guardedSecretsAreWrittenAgain(t *testing.T, cp *controlplane.ControlPlane) {
	t.Helper()
	if err := cp.Apply(t.Context(), []byte(`{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: migrator}, `+
		`roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}, subjects: [{kind: User, name: migrator}]}`)); err != nil {
		t.Fatal(err)
	}
	admin := kubernetes.NewForConfigOrDie(cp.Config()).CoreV1().Secrets(escalation.System)
	cfg := rest.CopyConfig(cp.Config())
	cfg.Impersonate = rest.ImpersonationConfig{UserName: "migrator", Groups: []string{"system:authenticated"}}
	secrets := kubernetes.NewForConfigOrDie(cfg).CoreV1().Secrets(escalation.System)
	for _, s := range []corev1.Secret{
		{ObjectMeta: metav1.ObjectMeta{Name: "sh.helm.release.v1.constellation-operator.v1", Labels: map[string]string{"owner": "helm"}}, Type: "helm.sh/release.v1", Data: map[string][]byte{"release": []byte("x")}},
		{ObjectMeta: metav1.ObjectMeta{Name: "long-lived", Annotations: map[string]string{corev1.ServiceAccountNameKey: "joinservice"}}, Type: corev1.SecretTypeServiceAccountToken},
	} {
		if _, err := admin.Create(t.Context(), &s, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		patch := func(body string) error {
			_, err := secrets.Patch(t.Context(), s.Name, types.MergePatchType, []byte(body), metav1.PatchOptions{})
			return err
		}
		var err error
		await(t, func() bool { // the authorizer observes the binding with a delay
			err = patch(`{}`)
			return err == nil || strings.Contains(err.Error(), "ValidatingAdmissionPolicy")
		})
		if err != nil {
			t.Errorf("%s is not written as it is: %v", s.Name, err)
		}
		for _, body := range []string{`{"data":{"release":"eQ=="}}`, `{"metadata":{"labels":{"owner":"me"}}}`, `{"metadata":{"annotations":{"a":"b"}}}`, `{"metadata":{"finalizers":["a.invalid/b"]}}`, `{"immutable":true}`} {
			if err := patch(body); err == nil || !strings.Contains(err.Error(), "ValidatingAdmissionPolicy") {
				t.Errorf("%s of %s: %v", body, s.Name, err)
			}
		}
	}
}

// otherControllerLeads takes Leases as a controller of Plans that has another name than ours.
func otherControllerLeads(t *testing.T, cp *controlplane.ControlPlane) {
	t.Helper()
	if err := cp.Apply(t.Context(), []byte(`{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: other-plans}, rules: [`+
		`{apiGroups: [upgrade.cattle.io], resources: [plans/status], verbs: [update]}, {apiGroups: [coordination.k8s.io], resources: [leases], verbs: [create]}]}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: other-plans}, roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: other-plans}, `+
		`subjects: [{kind: ServiceAccount, name: other-plans, namespace: system-upgrade}]}`)); err != nil {
		t.Fatal(err)
	}
	cfg := rest.CopyConfig(cp.Config())
	cfg.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:system-upgrade:other-plans", Groups: []string{"system:serviceaccounts", "system:authenticated"},
		Extra: map[string][]string{"authentication.kubernetes.io/pod-name": {"other-plans-0"}},
	}
	k := kubernetes.NewForConfigOrDie(cfg)
	for _, l := range []metav1.ObjectMeta{{Namespace: escalation.Upgrade, Name: "other-plans"}, {Namespace: "kube-system", Name: "constellation-node-upgrades"}} {
		var err error
		await(t, func() bool { // the authorizer observes the binding with a delay
			_, err = k.CoordinationV1().Leases(l.Namespace).Create(t.Context(), &coordinationv1.Lease{ObjectMeta: l}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			return err == nil || strings.Contains(err.Error(), "ValidatingAdmissionPolicy")
		})
		if err != nil {
			t.Errorf("Lease %s of another controller of Plans: %v", l.Name, err)
		}
	}
}

// TestWithoutPoliciesManySucceed shows that the attempts can succeed: without admission policies
// each attempt succeeds that only a policy prevents.
func TestWithoutPoliciesManySucceed(t *testing.T) {
	cp := controlplane.ForTest(t, controlplane.Options{Controllers: true})
	found, _, err := escalation.Run(t.Context(), cluster(t, cp, "constellation-operator", "constellation-services"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []escalation.Finding{
		{Subject: "ServiceAccount constellation-system/constellation-operator", Attempt: "make the autoscaler's pod privileged"},
		{Subject: "ServiceAccount constellation-system/constellation-operator", Attempt: "label a worker as control plane"},
		{Subject: "ServiceAccount constellation-system/constellation-operator", Attempt: "change what machines must prove with the generation of the key"},
		{Subject: "ServiceAccount constellation-system/constellation-operator", Attempt: "change another annotation of join-config"},
		{Subject: "ServiceAccount constellation-system/constellation-operator", Attempt: "have join-config deleted as an orphan"},
		{Subject: "ServiceAccount constellation-system/constellation-operator", Attempt: "keep join-config from being changed"},
		{Subject: "ServiceAccount system-upgrade/system-upgrade", Attempt: "label a worker as control plane"},
		{Subject: "kubelet of worker-1", Attempt: "mark a Node as obsolete through its status"},
		{Subject: "kubelet of worker-1", Attempt: "make a mirror pod in our namespace"},
		{Subject: "edit in constellation-system", Attempt: "start a pod as the operator"},
		{Subject: "edit in constellation-system", Attempt: "exec in a pod of ours"},
		{Subject: "edit in constellation-system", Attempt: "get a token for snapshots of etcd"},
		{Subject: "edit in constellation-system", Attempt: "make a Secret that becomes a token of the operator"},
		{Subject: "admin in system-upgrade", Attempt: "change what Jobs of Plans run"},
		{Subject: "edit in constellation-system", Attempt: "make a release of Helm that an administrator reverts to"},
		{Subject: "ServiceAccount constellation-system/constellation-operator without a pod", Attempt: "make a PendingNode"},
		{Subject: "edit in constellation-system", Attempt: "take the operator's leader Lease"},
		{Subject: "ServiceAccount constellation-system/joinservice", Attempt: "take the operator's leader Lease"},
		{Subject: "ServiceAccount constellation-system/constellation-operator", Attempt: "take the Lease of another program"},
		{Subject: "ServiceAccount system-upgrade/system-upgrade-controller", Attempt: "take the operator's leader Lease"},
		{Subject: "ServiceAccount system-upgrade/system-upgrade-controller without a pod", Attempt: "take the Lease of the controller of Plans"},
	} {
		if !slices.ContainsFunc(found, func(f escalation.Finding) bool { return f.Subject == want.Subject && f.Attempt == want.Attempt }) {
			t.Errorf("%s: %s: it did not succeed without policies, so it shows nothing", want.Subject, want.Attempt)
		}
	}
}

// cluster applies charts to a control plane with two Nodes.
func cluster(t testing.TB, cp *controlplane.ControlPlane, charts ...string) escalation.Cluster {
	t.Helper()
	manifests := [][]byte{[]byte("{apiVersion: v1, kind: Namespace, metadata: {name: " + escalation.System + "}}")}
	crds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range crds {
		manifests = append(manifests, f.Data)
	}
	manifests = append(manifests, assets.PlanKind())
	for _, m := range manifests {
		if err := cp.Apply(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	apply(t, cp, charts...)
	admin := kubernetes.NewForConfigOrDie(cp.Config())
	for name, labels := range map[string]map[string]string{"control-plane-0": {"node-role.kubernetes.io/control-plane": ""}, "worker-1": nil} {
		if _, err := admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := cp.Apply(t.Context(), []byte(`{apiVersion: update.edgeless.systems/v1alpha1, kind: NodeVersion, metadata: {name: constellation-version}, spec: {image: i, imageVersion: v1.1.0, `+
		`kubernetesClusterVersion: v1.36.3, kubernetesComponentsReference: k8s-components-sha256-ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff}}`)); err != nil {
		t.Fatal(err)
	}
	if err := cp.Apply(t.Context(), []byte(`{apiVersion: v1, kind: ConfigMap, metadata: {name: join-config, namespace: kube-system}}`)); err != nil {
		t.Fatal(err)
	}
	// The built-in roles are aggregated by a controller.
	await(t, func() bool {
		r, err := admin.RbacV1().ClusterRoles().Get(t.Context(), "admin", metav1.GetOptions{})
		return err == nil && len(r.Rules) > 10
	})
	return escalation.Cluster{Admin: cp.Config(), ControlPlane: "control-plane-0", Worker: "worker-1", TokenGroup: "system:bootstrappers:constellation:join"}
}

// apply applies charts of the newest release, in their order.
func apply(t testing.TB, cp *controlplane.ControlPlane, charts ...string) {
	t.Helper()
	for _, c := range charts {
		values := map[string]any{"release": "v1.1.0"}
		if c == "constellation-operator" {
			values["operator"] = map[string]any{"rotateKey": true}
		}
		b, err := render.Chart(c, "v1.1.0", escalation.System, providers.LocalValues(), values)
		if err != nil {
			t.Fatal(err)
		}
		if err := cp.Apply(t.Context(), b); err != nil {
			t.Fatal(err)
		}
	}
}

// enforced returns when the API server enforces the policies, which takes a moment. It checks the
// last one of the chart.
func enforced(t testing.TB, c escalation.Cluster) {
	t.Helper()
	cfg := rest.CopyConfig(c.Admin)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: "system:node:" + c.Worker, Groups: []string{"system:nodes", "system:authenticated"}}
	k := kubernetes.NewForConfigOrDie(cfg)
	admin := kubernetes.NewForConfigOrDie(c.Admin)
	revoked := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "constellation-revoked-nodes", Namespace: escalation.System}, Data: map[string]string{c.Worker: "{}"}}
	if _, err := admin.CoreV1().ConfigMaps(escalation.System).Create(t.Context(), revoked, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	write := func() error {
		_, err := k.CoreV1().Nodes().Patch(t.Context(), c.Worker, "application/merge-patch+json", []byte(`{"metadata":{"annotations":{"a":"b"}}}`), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	await(t, func() bool { return apierrors.IsInvalid(write()) || apierrors.IsForbidden(write()) })
	if err := admin.CoreV1().ConfigMaps(escalation.System).Delete(t.Context(), revoked.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool { return write() == nil })
}

func await(t testing.TB, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not so within 20s")
		}
	}
}
