package kube

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/operator/api/v1alpha1"
)

// A restore leaves out objects that can run code or grant rights unless they are named, even if somebody added them to the backup.
func TestCodeIsRestoredOnlyByName(t *testing.T) {
	_, c := lone(t)
	h := newHand(t, c)
	hook := newConverter(t)
	gizmos := definition{plural: "gizmos", kind: "Gizmo", versions: []string{"v1alpha1", "v1"}}
	h.do(http.MethodPost, kindsPath, convertedBy(hook, gizmos))
	h.await(gizmos)
	h.define(widgets)
	uid := h.put(gizmos, "default", "g", "", `{"b":1}`, "")
	h.put(widgets, "default", "of-g", fmt.Sprintf(`"ownerReferences":[{"apiVersion":"shop.example.com/v1","kind":"Gizmo","name":"g","uid":%q}]`, uid), "{}", "")
	plans := definition{plural: "plans", kind: "Plan", versions: []string{"v1"}}
	h.do(http.MethodPost, kindsPath, strings.ReplaceAll(string(plans.json()), "shop.example.com", "upgrade.cattle.io"))
	const plansPath = "/apis/upgrade.cattle.io/v1/namespaces/default/plans"
	for {
		_, err := h.w.do(t.Context(), http.MethodPost, plansPath, nil, "application/json", []byte(`{"apiVersion":"upgrade.cattle.io/v1","kind":"Plan","metadata":{"name":"p"},"spec":{"a":1}}`))
		if err == nil {
			break
		}
		if !unserved(err) {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond) // poll interval
	}

	dir := t.TempDir()
	w, err := backup.Create(dir, testBackup)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Dump(t.Context(), w, engine.DumpOptions{}, func(engine.BackupProgress) {}); err != nil {
		t.Fatal(err)
	}
	const pod = `{"restartPolicy":"Never","containers":[{"name":"c","image":"x"}]}`
	for _, x := range []struct {
		t    backup.Type
		item string
	}{
		{backup.Type{Version: "v1", Resource: "pods", Kind: "Pod", Namespaced: true}, `"metadata":{"name":"x","namespace":"default","uid":"1"},"spec":` + pod},
		{backup.Type{Version: "v1", Resource: "serviceaccounts", Kind: "ServiceAccount", Namespaced: true}, `"metadata":{"name":"x","namespace":"default","uid":"2"}`},
		{backup.Type{Group: "batch", Version: "v1", Resource: "jobs", Kind: "Job", Namespaced: true}, `"metadata":{"name":"x","namespace":"default","uid":"3"},"spec":{"template":{"spec":` + pod + `}}`},
		{backup.Type{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterrolebindings", Kind: "ClusterRoleBinding"}, `"metadata":{"name":"x","uid":"4"},"roleRef":{"apiGroup":"rbac.authorization.k8s.io","kind":"ClusterRole","name":"cluster-admin"},"subjects":[{"kind":"ServiceAccount","name":"x","namespace":"default"}]`},
		{backup.Type{Group: "admissionregistration.k8s.io", Version: "v1", Resource: "mutatingwebhookconfigurations", Kind: "MutatingWebhookConfiguration"}, `"metadata":{"name":"x","uid":"5"},"webhooks":[]`},
	} {
		addObject(t, w, x.t, x.item)
	}
	if _, err := w.Commit(backup.Manifest{}); err != nil {
		t.Fatal(err)
	}
	b, err := backup.Open(dir, testBackup, backup.Keys{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()

	h.do(http.MethodDelete, widgets.path("default")+"/of-g", "")
	h.do(http.MethodDelete, kindsPath+"/gizmos.shop.example.com", "")
	h.do(http.MethodDelete, plansPath+"/p", "")
	did := h.restore(b, engine.RestoreOptions{Overwrite: true})
	want := []string{
		"created shop.example.com/widgets/default/of-g: without its owner Gizmo g, which was left out",
		"left-out admissionregistration.k8s.io/mutatingwebhookconfigurations/x: " + ruleCode,
		"left-out apiextensions.k8s.io/customresourcedefinitions/gizmos.shop.example.com: " + ruleHook,
		"left-out batch/jobs/default/x: " + ruleCode,
		"left-out core/pods/default/x: " + ruleCode,
		"left-out core/serviceaccounts/default/x: " + ruleCode,
		"left-out rbac.authorization.k8s.io/clusterrolebindings/x: " + ruleCode,
		"left-out shop.example.com/gizmos/default/g: " + ruleHooked,
		"left-out upgrade.cattle.io/plans/default/p: " + rulePlan,
	}
	if d := cmp.Diff(want, lines(did.told)); d != "" {
		t.Errorf("everything (-want +got):\n%s", d)
	}
	if again := lines(h.restore(b, engine.RestoreOptions{}).told); !cmp.Equal(again, want[1:]) {
		t.Errorf("again: %q", again)
	}

	// Each is restored by the selector of its report.
	var only []engine.Selector
	for _, x := range did.all {
		if x.State != engine.RestoreLeftOut {
			continue
		}
		s, err := engine.ParseSelector(x.Only)
		if err != nil || !x.Code {
			t.Fatalf("%s has the selector %q: %v", x.Object, x.Only, err)
		}
		if !slices.Contains(only, s) {
			only = append(only, s)
		}
	}
	did = h.restore(b, engine.RestoreOptions{Only: only})
	if n := len(want) - 1; did.states[engine.RestoreCreated] != n || did.states[engine.RestoreFailed]+did.states[engine.RestoreLeftOut] != 0 {
		t.Errorf("by name: %v, want %d created: %q", did.states, n, lines(did.all))
	}
	h.do(http.MethodGet, "/apis/batch/v1/namespaces/default/jobs/x", "")
	h.do(http.MethodGet, plansPath+"/p", "")
	h.do(http.MethodGet, gizmos.path("default")+"/g", "")

	// An existing definition gets no webhook that it does not have.
	h.do(http.MethodDelete, kindsPath+"/gizmos.shop.example.com", "")
	for {
		if _, err := h.w.do(t.Context(), http.MethodGet, kindsPath+"/gizmos.shop.example.com", nil, "application/json", nil); apierrors.IsNotFound(err) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond) // poll interval
	}
	h.define(gizmos)
	did = h.restore(b, engine.RestoreOptions{Overwrite: true})
	if all := strings.Join(lines(did.told), "\n"); !strings.Contains(all, "left apiextensions.k8s.io/customresourcedefinitions/gizmos.shop.example.com: differs in spec.conversion") || !strings.Contains(all, ruleHook) {
		t.Errorf("an existing definition: %s", all)
	}
	did = h.restore(b, engine.RestoreOptions{Overwrite: true, Only: []engine.Selector{{Group: "shop.example.com", Resource: "gizmos"}}})
	if did.states[engine.RestoreOverwritten] == 0 {
		t.Errorf("an existing definition by name: %q", lines(did.all))
	}
}

// addObject adds an object to a backup, without its apiVersion and kind.
func addObject(t *testing.T, w *backup.Writer, of backup.Type, item string) {
	t.Helper()
	tw, err := w.Type(of, "")
	if err != nil {
		t.Fatal(err)
	}
	s := backup.NewScanner(strings.NewReader(fmt.Sprintf(`{"metadata":{"resourceVersion":"7"},"items":[{"apiVersion":%q,"kind":%q,%s}]}`, of.APIVersion(), of.Kind, item)))
	for s.Next() {
		if err := tw.Add(s.Item()); err != nil {
			t.Fatal(err)
		}
	}
	if s.Err() != nil {
		t.Fatal(s.Err())
	}
	if err := tw.Close("7"); err != nil {
		t.Fatal(err)
	}
}

// A record of Helm is one in any file of a backup, and our definitions are the cluster's, too.
func TestUnprovenRecordsAndDefinitionsAreRestoredByName(t *testing.T) {
	_, c := lone(t)
	h := newHand(t, c)
	dir := t.TempDir()
	w, err := backup.Create(dir, testBackup)
	if err != nil {
		t.Fatal(err)
	}
	secrets := backup.Type{Version: "v1", Resource: "secrets", Kind: "Secret", Namespaced: true}
	addObject(t, w, secrets, `"metadata":{"name":"sh.helm.release.v1.x.v99","namespace":"default","uid":"1","labels":{"owner":"helm","name":"x","version":"99"}},"type":"Opaque"`)
	ours := definition{plural: "things", kind: "Thing", versions: []string{"v1"}}
	kinds := backup.Type{Group: kindsOfKinds.Group, Version: kindsOfKinds.Version, Resource: kindsOfKinds.Resource, Kind: "CustomResourceDefinition"}
	var item map[string]json.RawMessage
	if err := json.Unmarshal([]byte(strings.ReplaceAll(string(ours.json()), "shop.example.com", v1alpha1.GroupVersion.Group)), &item); err != nil {
		t.Fatal(err)
	}
	addObject(t, w, kinds, `"metadata":{"name":"things.`+v1alpha1.GroupVersion.Group+`","uid":"2"},"spec":`+string(item["spec"]))
	uid, err := c.ClusterUID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.From(backup.Cluster{UID: uid})
	if _, err := w.Commit(backup.Manifest{}); err != nil {
		t.Fatal(err)
	}
	b, err := backup.Open(dir, testBackup, backup.Keys{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	did := h.restore(b, engine.RestoreOptions{Unproven: true})
	want := []string{
		"left-out apiextensions.k8s.io/customresourcedefinitions/things." + v1alpha1.GroupVersion.Group + ": " + ruleProof,
		"left-out core/secrets/default/sh.helm.release.v1.x.v99: " + ruleProof,
	}
	if d := cmp.Diff(want, lines(did.told)); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	for _, x := range did.told {
		if x.Code {
			t.Errorf("%s is reported as code", x.Object)
		}
	}
}

// Without a proof of who made a backup, what the cluster itself depends on is restored only by name.
func TestUnprovenBackupRestoresClusterObjectsByName(t *testing.T) {
	_, c := lone(t)
	h := newHand(t, c)
	h.define(widgets)
	h.put(widgets, "default", "w", "", "{}", "")
	h.core("ConfigMap", "kube-system", `"name":"join-config"`, `"data":{"a":"old"}`)
	h.core("ConfigMap", "kube-system", `"name":"stays"`, `"data":{"a":"old"}`)
	b := h.backUp(false)
	const configmap = "/api/v1/namespaces/kube-system/configmaps/join-config"
	h.do(http.MethodDelete, configmap, "")
	h.do(http.MethodDelete, widgets.path("default")+"/w", "")
	did := h.restore(b, engine.RestoreOptions{Unproven: true})
	if got, want := lines(did.told), []string{"left-out core/configmaps/kube-system/join-config: " + ruleProof}; !cmp.Equal(got, want) || did.states[engine.RestoreCreated] != 1 {
		t.Errorf("%v: %q, want %q", did.states, got, want)
	}
	only, err := engine.ParseSelector(did.told[0].Only)
	if err != nil {
		t.Fatal(err)
	}
	if did := h.restore(b, engine.RestoreOptions{Unproven: true, Only: []engine.Selector{only}}); did.states[engine.RestoreCreated] != 1 {
		t.Errorf("by name: %v, %q", did.states, lines(did.all))
	}
	h.do(http.MethodGet, configmap, "")
}
