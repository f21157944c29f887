package preflight

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"maps"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/internal/golden"
)

// noon is when the tests' worlds are looked at.
var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

// workloadChecks are those that these tests are about.
func workloadChecks() []checkItem {
	return slices.Concat(webhookChecks, disruptionChecks, capacityChecks, nodeChecks, actorChecks)
}

func checkOf(id string) checkItem {
	all := workloadChecks()
	return all[slices.IndexFunc(all, func(c checkItem) bool { return c.id == id })]
}

// village is a cluster as the sandbox has it: a control plane, two workers, our parts
// and the system's. Nothing is wrong with it. Everything is replaced, with one machine
// more.
func village() *world {
	w := &world{
		now:         noon,
		request:     check.PreflightRequest{ReplaceControlPlanes: true, ReplaceWorkers: true, Surge: 1, DrainTimeout: 5 * time.Minute},
		unread:      map[source]string{},
		leases:      map[string]time.Time{},
		namespaces:  map[string]metav1.ObjectMeta{},
		replicaSets: map[types.UID]owner{},
		services:    map[types.NamespacedName]corev1.Service{},
		volumes:     map[string]corev1.PersistentVolume{},
		claims:      map[types.NamespacedName]corev1.PersistentVolumeClaim{},
	}
	for _, name := range []string{"cp-0", "worker-0", "worker-1"} {
		w.addNode(name)
	}
	for _, ns := range []string{"constellation-system", "kube-system", "shop"} {
		w.namespaces[ns] = metav1.ObjectMeta{Name: ns, Labels: map[string]string{corev1.LabelMetadataName: ns}}
	}
	for _, component := range []string{"etcd", "kube-apiserver"} {
		w.pods = append(w.pods, pod{
			namespace: "kube-system", name: component + "-cp-0", node: "cp-0", phase: corev1.PodRunning, ready: true, mirror: true,
			controller: owner{"v1", "Node", "cp-0", "node-cp-0"}, labels: map[string]string{"component": component, "tier": "control-plane"},
			hostPath: []string{"data (/var/lib/etcd)"}, grace: 30 * time.Second,
		})
	}
	w.addDaemonSet("kube-system", "kube-proxy", func(p *pod) { p.hostPath = []string{"xtables-lock (/run/xtables.lock)"} }, "cp-0", "worker-0", "worker-1")
	w.addDaemonSet("constellation-system", "joinservice", func(p *pod) { p.hostPath = []string{"tpm (/run/tpm)"} }, "cp-0")
	w.addDeployment("kube-system", "coredns", func(p *pod) {
		p.labels = map[string]string{"k8s-app": "kube-dns"}
		p.tolerations = []corev1.Toleration{{Key: controlPlaneLabel, Effect: corev1.TaintEffectNoSchedule}}
		p.request = resources{cpu: 100, memory: 70 << 20}
	}, "cp-0", "cp-0")
	w.addDeployment("constellation-system", "constellation-operator", func(p *pod) {
		p.nodeSelector = map[string]string{controlPlaneLabel: ""}
		p.tolerations = []corev1.Toleration{{Key: controlPlaneLabel, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}}
		p.hostPorts = []int32{8080, 8081}
	}, "cp-0")
	return w
}

func (w *world) addNode(name string) *corev1.Node {
	n := corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name, corev1.LabelTopologyZone: "a"}},
		Status: corev1.NodeStatus{
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
			Allocatable: corev1.ResourceList{
				corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("8Gi"), corev1.ResourcePods: resource.MustParse("110"),
			},
		},
	}
	if strings.HasPrefix(name, "cp-") {
		n.Labels[controlPlaneLabel] = ""
		n.Spec.Taints = []corev1.Taint{{Key: controlPlaneLabel, Effect: corev1.TaintEffectNoSchedule}}
	}
	w.nodes = append(w.nodes, n)
	w.leases[name] = w.now.Add(-5 * time.Second)
	return &w.nodes[len(w.nodes)-1]
}

// node finds a node that the world has.
func (w *world) node(name string) *corev1.Node {
	return &w.nodes[slices.IndexFunc(w.nodes, func(n corev1.Node) bool { return n.Name == name })]
}

func metaOf(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(namespace + "/" + name), CreationTimestamp: metav1.NewTime(noon.Add(-24 * time.Hour))}
}

// team adds a ready pod per node, "web-0", "web-1", ..., that o controls.
func (w *world) team(namespace, name string, o owner, change func(*pod), nodes []string) {
	for i, node := range nodes {
		p := pod{
			namespace: namespace, name: name + "-" + strconv.Itoa(i), node: node, uid: types.UID(fmt.Sprintf("%s/%s-%d", namespace, name, i)),
			labels: map[string]string{"app": name}, phase: corev1.PodRunning, ready: true, created: noon.Add(-24 * time.Hour), grace: 30 * time.Second, controller: o,
		}
		if change != nil {
			change(&p)
		}
		w.pods = append(w.pods, p)
	}
}

func (w *world) addDeployment(namespace, name string, change func(*pod), nodes ...string) {
	n := int32(len(nodes))
	d := appsv1.Deployment{ObjectMeta: metaOf(namespace, name), Spec: appsv1.DeploymentSpec{Replicas: &n}}
	d.Annotations = map[string]string{"meta.helm.sh/release-name": name + "-release"}
	d.Status = appsv1.DeploymentStatus{Replicas: n, UpdatedReplicas: n, ReadyReplicas: n, AvailableReplicas: n}
	w.deployments = append(w.deployments, d)
	set := types.UID("rs-" + namespace + "/" + name)
	w.replicaSets[set] = owner{"apps/v1", "Deployment", name, d.UID}
	w.team(namespace, name, owner{"apps/v1", "ReplicaSet", name + "-5f", set}, change, nodes)
}

func (w *world) addStatefulSet(namespace, name string, change func(*pod), nodes ...string) {
	n := int32(len(nodes))
	d := appsv1.StatefulSet{ObjectMeta: metaOf(namespace, name), Spec: appsv1.StatefulSetSpec{Replicas: &n}}
	d.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubectl-client-side-apply"}, {Manager: "kube-controller-manager", Subresource: "status"}}
	d.Status = appsv1.StatefulSetStatus{Replicas: n, UpdatedReplicas: n, ReadyReplicas: n, AvailableReplicas: n}
	w.statefulSets = append(w.statefulSets, d)
	w.team(namespace, name, owner{"apps/v1", "StatefulSet", name, d.UID}, change, nodes)
}

func (w *world) addDaemonSet(namespace, name string, change func(*pod), nodes ...string) {
	n := int32(len(nodes))
	d := appsv1.DaemonSet{ObjectMeta: metaOf(namespace, name)}
	d.Status = appsv1.DaemonSetStatus{DesiredNumberScheduled: n, UpdatedNumberScheduled: n, NumberAvailable: n}
	w.daemonSets = append(w.daemonSets, d)
	w.team(namespace, name, owner{"apps/v1", "DaemonSet", name, d.UID}, change, nodes)
}

// addBudget adds a budget over the pods of an app, with a status as its controller has it.
func (w *world) addBudget(namespace, name, app string, change func(*policyv1.PodDisruptionBudget)) {
	b := policyv1.PodDisruptionBudget{
		ObjectMeta: metaOf(namespace, name),
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}},
	}
	for i := range w.pods {
		if p := &w.pods[i]; p.namespace == namespace && p.labels["app"] == app {
			b.Status.ExpectedPods++
			if p.ready {
				b.Status.CurrentHealthy++
			}
		}
	}
	change(&b)
	n := int(b.Status.ExpectedPods)
	if v := b.Spec.MinAvailable; v != nil {
		least, _ := intstr.GetScaledValueFromIntOrPercent(v, n, true)
		b.Status.DesiredHealthy = int32(least)
	}
	if v := b.Spec.MaxUnavailable; v != nil {
		most, _ := intstr.GetScaledValueFromIntOrPercent(v, n, true)
		b.Status.DesiredHealthy = int32(max(n-most, 0))
	}
	b.Status.DisruptionsAllowed = max(b.Status.CurrentHealthy-b.Status.DesiredHealthy, 0)
	w.pdbs = append(w.pdbs, b)
}

func maxUnavailable(n int) func(*policyv1.PodDisruptionBudget) {
	return func(b *policyv1.PodDisruptionBudget) { b.Spec.MaxUnavailable = ptr.To(intstr.FromInt32(int32(n))) }
}

func minAvailable(v string) func(*policyv1.PodDisruptionBudget) {
	return func(b *policyv1.PodDisruptionBudget) { b.Spec.MinAvailable = ptr.To(intstr.Parse(v)) }
}

// addVolume adds a claim and its volume; node, if any, is where alone it can be used.
func (w *world) addVolume(namespace, claim, node string, change func(*corev1.PersistentVolume)) {
	pv := corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv-" + claim}, Spec: corev1.PersistentVolumeSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}}}
	if node != "" {
		pv.Spec.Local = &corev1.LocalVolumeSource{Path: "/mnt/disk"}
		pv.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
		}}}}
	}
	if change != nil {
		change(&pv)
	}
	w.volumes[pv.Name] = pv
	w.claims[types.NamespacedName{Namespace: namespace, Name: claim}] = corev1.PersistentVolumeClaim{Spec: corev1.PersistentVolumeClaimSpec{VolumeName: pv.Name}}
}

// addWebhook adds a webhook for new pods such as those of shop/web, that pods of "hook" in its own namespace answer.
func (w *world) addWebhook(nodes []string, change func(*admissionv1.ValidatingWebhook)) {
	w.namespaces["policy"] = metav1.ObjectMeta{Name: "policy", Labels: map[string]string{corev1.LabelMetadataName: "policy"}}
	w.addDeployment("policy", "hook", nil, nodes...)
	w.addDeployment("shop", "web", nil, "worker-0", "worker-1")
	slice := discoveryv1.EndpointSlice{ObjectMeta: metaOf("policy", "hook-1")}
	slice.Labels = map[string]string{discoveryv1.LabelServiceName: "hook"}
	for i, node := range nodes {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			NodeName: ptr.To(node), TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "policy", Name: "hook-" + strconv.Itoa(i)},
		})
	}
	w.slices = append(w.slices, slice)
	w.services[types.NamespacedName{Namespace: "policy", Name: "hook"}] = corev1.Service{ObjectMeta: metaOf("policy", "hook"), Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 443}}}}
	hook := admissionv1.ValidatingWebhook{
		Name: "pods.policy.example", FailurePolicy: ptr.To(admissionv1.Fail), TimeoutSeconds: ptr.To[int32](10), MatchPolicy: ptr.To(admissionv1.Equivalent),
		ClientConfig: admissionv1.WebhookClientConfig{Service: &admissionv1.ServiceReference{Namespace: "policy", Name: "hook"}, CABundle: caUntil(noon.Add(365 * 24 * time.Hour))},
		Rules: []admissionv1.RuleWithOperations{{
			Operations: []admissionv1.OperationType{admissionv1.Create},
			Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
		}},
		NamespaceSelector: exempt("policy", "kube-system", "constellation-system"),
	}
	change(&hook)
	c := admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metaOf("", "policy"), Webhooks: []admissionv1.ValidatingWebhook{hook}}
	c.Labels = map[string]string{"app.kubernetes.io/managed-by": "policy-operator"}
	w.validating = append(w.validating, c)
}

func exempt(namespaces ...string) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: corev1.LabelMetadataName, Operator: metav1.LabelSelectorOpNotIn, Values: namespaces}}}
}

// caUntil is a CA in PEM.
func caUntil(until time.Time) []byte {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "hook-ca"}, NotBefore: noon.AddDate(-1, 0, 0), NotAfter: until, IsCA: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		panic(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// look runs one check, or all if id is empty, and returns the findings other than ok.
func look(w *world, id string) []plan.Finding {
	var out []plan.Finding
	for _, c := range workloadChecks() {
		if id != "" && c.id != id {
			continue
		}
		for _, f := range c.find(w, &probe{ctx: context.Background(), progress: func(int64, int64) {}}) {
			if f.Severity != plan.Info {
				out = append(out, f)
			}
		}
	}
	return out
}

// verdicts are severities and check IDs: "block pdb-room".
func verdicts(found []plan.Finding) []string {
	var out []string
	for _, f := range found {
		out = append(out, string(f.Severity)+" "+f.ID)
	}
	return out
}

// checkFindings compares whole findings with a file that people have read.
func checkFindings(t *testing.T, file string, name string, found []plan.Finding) {
	t.Helper()
	path := filepath.Join("testdata", file)
	b, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	all := map[string][]plan.Finding{}
	if err := yaml.Unmarshal(b, &all); err != nil {
		t.Fatal(err)
	}
	if golden.Updating() {
		all[name] = found
		var out bytes.Buffer
		for _, k := range slices.Sorted(maps.Keys(all)) {
			b, err := yaml.Marshal(map[string]any{k: all[k]})
			if err != nil {
				t.Fatal(err)
			}
			out.Write(b)
		}
		if err := os.WriteFile(path, out.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if d := cmp.Diff(all[name], found); d != "" {
		t.Errorf("findings (-%s +got; -update rewrites):\n%s", path, d)
	}
}

func TestCleanClusterIsFine(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*world)
	}{
		{"a control plane and two workers", func(*world) {}},
		{"one node alone", func(w *world) {
			w.nodes = w.nodes[:1]
			w.pods = slices.DeleteFunc(w.pods, func(p pod) bool { return p.node != "cp-0" })
		}},
		{"no node at all", func(w *world) { *w = world{now: noon, request: w.request, unread: map[source]string{}} }},
		{"without machines beyond the wanted number, pods go to other nodes", func(w *world) {
			w.request.Surge = 0
			w.addNode("cp-1")
			w.addDeployment("shop", "web", nil, "worker-0", "worker-1")
		}},
		{"nothing is replaced", func(w *world) { w.request.ReplaceControlPlanes, w.request.ReplaceWorkers = false, false }},
		{"a budget with room", func(w *world) {
			w.addDeployment("shop", "web", nil, "worker-0", "worker-1", "worker-1")
			w.addBudget("shop", "web", "web", maxUnavailable(1))
		}},
		{"a webhook on two nodes that leaves the system out", func(w *world) {
			w.addWebhook([]string{"worker-0", "worker-1"}, func(*admissionv1.ValidatingWebhook) {})
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := village()
			tt.change(w)
			if d := cmp.Diff([]plan.Finding(nil), look(w, "")); d != "" {
				t.Errorf("findings (-want +got):\n%s", d)
			}
		})
	}
}

func TestKeptWorkersAreNotLookedAt(t *testing.T) {
	trouble := func(keep bool) []string {
		w := village()
		w.request.ReplaceWorkers = !keep
		w.addDeployment("shop", "web", func(p *pod) {
			p.emptyDir, p.notEvict, p.grace = []string{"tmp"}, "karpenter.sh/do-not-disrupt=true", time.Hour
		}, "worker-0")
		w.addDeployment("shop", "db", nil, "worker-0")
		w.addBudget("shop", "db", "db", maxUnavailable(0))
		w.team("shop", "alone", owner{}, nil, []string{"worker-1"})
		return verdicts(look(w, ""))
	}
	want := []string{
		"block pdb-room", "block drain-rehearsal", "warn unmanaged-pods", "warn local-data", "warn single-replica", "warn termination", "warn do-not-evict",
	}
	if d := cmp.Diff(want, trouble(false)); d != "" {
		t.Errorf("workers are replaced: findings (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]string(nil), trouble(true)); d != "" {
		t.Errorf("workers are kept: findings (-want +got):\n%s", d)
	}
}

// TestChecksMayRunSideBySide is worth most under the race detector.
func TestChecksMayRunSideBySide(t *testing.T) {
	var want []plan.Finding
	alone := city(20, 600)
	for _, c := range workloadChecks() {
		want = append(want, c.find(alone, &probe{ctx: t.Context()})...)
	}
	slices.SortStableFunc(want, func(a, b plan.Finding) int { return rank(a.Severity) - rank(b.Severity) })
	got, err := runChecks(t.Context(), workloadChecks(), city(20, 600), probe{}, func(plan.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	for i := range got {
		got[i].Took = 0
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("findings (-one by one +side by side):\n%s", d)
	}
}

func TestUnreadSourcesAreNotChecked(t *testing.T) {
	w := village()
	for _, c := range workloadChecks() {
		for _, s := range c.needs {
			w.unread[s] = "forbidden"
		}
	}
	for _, f := range look(w, "") {
		if f.Severity != plan.NotChecked || !strings.Contains(f.Detail, "forbidden") {
			t.Errorf("%s is %s (%s), want not-checked with the reason", f.ID, f.Severity, f.Detail)
		}
	}
	if n := len(look(w, "")); n != len(workloadChecks()) {
		t.Errorf("%d findings for %d checks", n, len(workloadChecks()))
	}
}

func TestHostileNamesDoNoHarm(t *testing.T) {
	const evil = "x'; rm -rf ~ #\x1b[2J\u202e\n"
	w := village()
	w.addNode(evil)
	w.node(evil).Spec.Unschedulable = true
	w.addDeployment(evil, evil, func(p *pod) {
		p.emptyDir, p.hostPath, p.notEvict, p.grace, p.nodeSelector = []string{evil}, []string{evil}, evil+"=false", time.Hour, map[string]string{corev1.LabelHostname: evil}
	}, evil)
	w.team(evil, evil+"2", owner{}, func(p *pod) {
		p.keeper = keeperOf(&metav1.ObjectMeta{Namespace: evil, Labels: map[string]string{"app.kubernetes.io/managed-by": evil}})
	}, []string{evil})
	w.team(evil, evil+"3", owner{evil + "/v1", evil, evil, "1"}, func(p *pod) { p.terminating, p.finalizers = noon.Add(-time.Hour), []string{evil} }, []string{evil})
	w.addBudget(evil, evil, evil, maxUnavailable(0))
	w.addBudget(evil, evil+"b", evil, maxUnavailable(0))
	w.validating = append(w.validating, admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metaOf("", evil), Webhooks: []admissionv1.ValidatingWebhook{{
		Name: evil, ClientConfig: admissionv1.WebhookClientConfig{Service: &admissionv1.ServiceReference{Namespace: evil, Name: evil}, CABundle: []byte(evil)},
		Rules:          []admissionv1.RuleWithOperations{{Operations: []admissionv1.OperationType{"*"}, Rule: admissionv1.Rule{APIGroups: []string{"*"}, APIVersions: []string{"*"}, Resources: []string{"*/*"}}}},
		TimeoutSeconds: ptr.To[int32](30), MatchPolicy: ptr.To(admissionv1.Exact),
	}}})
	w.autoscalers = append(w.autoscalers, autoscalingv2.HorizontalPodAutoscaler{
		ObjectMeta: metaOf(evil, evil), Spec: autoscalingv2.HorizontalPodAutoscalerSpec{MaxReplicas: 3},
		Status: autoscalingv2.HorizontalPodAutoscalerStatus{CurrentReplicas: 3, DesiredReplicas: 3},
	})
	found := look(w, "")
	if len(found) < 15 {
		t.Errorf("%d findings, want many: %v", len(found), verdicts(found))
	}
	for _, f := range found {
		for _, s := range append([]string{f.Title, f.Detail, f.Remedy, f.Owner}, f.Objects...) {
			if strings.ContainsAny(s, "\x1b\n\u202e") {
				t.Errorf("%s tells %q raw", f.ID, s)
			}
		}
		if f.Command != "" {
			t.Errorf("%s offers a command made of hostile names: %q", f.ID, f.Command)
		}
	}
}

func TestWorkloadFindings(t *testing.T) {
	for _, tt := range []struct {
		name   string
		check  string
		change func(*world)
		want   []string
	}{
		// Budgets.
		{name: "a budget of maxUnavailable 0", check: "pdb-room", change: func(w *world) {
			w.addDeployment("shop", "web", nil, "worker-0", "worker-1")
			w.addBudget("shop", "web", "web", maxUnavailable(0))
		}, want: []string{"block"}},
		{name: "a budget whose minAvailable is all replicas", check: "pdb-room", change: func(w *world) {
			w.addDeployment("shop", "web", nil, "worker-0", "worker-1", "worker-1")
			w.addBudget("shop", "web", "web", minAvailable("90%"))
		}, want: []string{"block"}},
		{name: "a budget whose pods are on kept nodes alone", check: "pdb-room", change: func(w *world) {
			w.request.ReplaceWorkers = false
			w.addDeployment("shop", "web", nil, "worker-0", "worker-1")
			w.addBudget("shop", "web", "web", maxUnavailable(0))
		}},
		{name: "a budget of pods that a drain leaves alone", check: "pdb-room", change: func(w *world) {
			w.addBudget("kube-system", "proxy", "kube-proxy", maxUnavailable(0))
		}},
		{name: "a budget that is short because a pod on another node is not ready", check: "pdb-room", change: func(w *world) {
			w.request.ReplaceControlPlanes = false
			w.addDeployment("shop", "web", func(p *pod) { p.ready = p.node != "cp-0" }, "cp-0", "worker-0", "worker-1")
			w.addBudget("shop", "web", "web", minAvailable("2"))
		}, want: []string{"warn"}},
		{name: "a budget that holds pods which are not ready", check: "pdb-room", change: func(w *world) {
			w.addDeployment("shop", "web", func(p *pod) { p.ready = p.node != "worker-0" }, "worker-0", "worker-0", "worker-1")
			w.addBudget("shop", "web", "web", minAvailable("2"))
		}, want: []string{"block"}},
		{name: "a budget without any healthy pod", check: "pdb-room", change: func(w *world) {
			w.addDeployment("shop", "web", func(p *pod) { p.ready = false }, "worker-0")
			w.addBudget("shop", "web", "web", minAvailable("1"))
		}, want: []string{"block"}},
		{name: "a budget that never lets a pod go, and one of them is not ready", check: "pdb-room", change: func(w *world) {
			w.addDeployment("shop", "web", func(p *pod) { p.ready = p.node != "worker-0" }, "worker-0", "worker-1")
			w.addBudget("shop", "web", "web", minAvailable("2"))
		}, want: []string{"block"}},
		{name: "a budget whose healthy pods have another one is reported as two budgets", change: func(w *world) {
			w.addDeployment("shop", "web", nil, "worker-0", "worker-1")
			w.addBudget("shop", "all", "web", maxUnavailable(1))
			w.addBudget("shop", "web", "web", maxUnavailable(1))
			for i := range w.pdbs {
				w.pdbs[i].Status.DisruptionsAllowed = 0
			}
		}, want: []string{"block", "block"}},
		{name: "a budget whose controller has not counted yet", check: "pdb-room", change: func(w *world) {
			w.addDeployment("shop", "web", nil, "worker-0", "worker-1")
			w.addBudget("shop", "web", "web", maxUnavailable(1))
			w.pdbs[0].Status.DisruptionsAllowed = 0
		}, want: []string{"warn"}},
		{name: "pods of a namespace that is being deleted", check: "drain-rehearsal", change: func(w *world) {
			w.addDeployment("shop", "web", nil, "worker-0", "worker-1")
			m := w.namespaces["shop"]
			m.DeletionTimestamp = ptr.To(metav1.NewTime(noon.Add(-time.Second)))
			w.namespaces["shop"] = m
		}, want: []string{"warn"}},
		{name: "a drain waits for a budget that its controller has not seen", check: "drain-rehearsal", change: func(w *world) {
			w.addDeployment("shop", "web", nil, "worker-0", "worker-1")
			w.addBudget("shop", "web", "web", func(b *policyv1.PodDisruptionBudget) {
				maxUnavailable(1)(b)
				b.Generation, b.Status.ObservedGeneration = 3, 2
			})
		}, want: []string{"warn"}},
		{name: "a budget that lets pods go which are not ready", check: "pdb-room", change: func(w *world) {
			w.addDeployment("shop", "web", func(p *pod) { p.ready = false }, "worker-0")
			w.addBudget("shop", "web", "web", func(b *policyv1.PodDisruptionBudget) {
				minAvailable("1")(b)
				b.Spec.UnhealthyPodEvictionPolicy = ptr.To(policyv1.AlwaysAllow)
			})
		}},
		{name: "a budget that its controller has not seen", check: "pdb-room", change: func(w *world) {
			w.addDeployment("shop", "web", nil, "worker-0", "worker-1")
			w.addBudget("shop", "web", "web", func(b *policyv1.PodDisruptionBudget) {
				maxUnavailable(1)(b)
				b.Generation, b.Status.ObservedGeneration = 3, 2
			})
		}, want: []string{"warn"}},
		{name: "a budget that cannot be computed", check: "pdb-room", change: func(w *world) {
			w.team("shop", "web", owner{}, nil, []string{"worker-0", "worker-1"})
			w.addBudget("shop", "web", "web", func(b *policyv1.PodDisruptionBudget) {
				maxUnavailable(1)(b)
				b.Status = policyv1.PodDisruptionBudgetStatus{Conditions: []metav1.Condition{{
					Type: policyv1.DisruptionAllowedCondition, Status: metav1.ConditionFalse, Reason: policyv1.SyncFailedReason, Message: "found no controllers for pod web-0",
				}}}
			})
		}, want: []string{"block"}},
		{name: "a namespace full of exhausted budgets fits on one screen", check: "pdb-room", change: func(w *world) {
			for i := range 15 {
				name := fmt.Sprintf("web%02d", i)
				w.addDeployment("shop", name, nil, "worker-0", "worker-1")
				w.addBudget("shop", name, name, maxUnavailable(0))
			}
		}, want: slices.Repeat([]string{"block"}, 11)},
		{name: "pods with two budgets", check: "pdb-overlap", change: func(w *world) {
			w.addDeployment("shop", "web", nil, "worker-0", "worker-1")
			w.addBudget("shop", "all", "web", maxUnavailable(1))
			w.addBudget("shop", "web", "web", func(b *policyv1.PodDisruptionBudget) {
				maxUnavailable(1)(b)
				b.CreationTimestamp = metav1.NewTime(noon)
			})
		}, want: []string{"block"}},
		// Drains, computed.
		{name: "the first drain that hangs is named, and why", check: "drain-rehearsal", change: func(w *world) {
			w.addDeployment("shop", "web", nil, "worker-1", "worker-1")
			w.addBudget("shop", "web", "web", maxUnavailable(0))
		}, want: []string{"block"}},
		{name: "a budget is used up by pods that do not come back", check: "drain-rehearsal", change: func(w *world) {
			w.addStatefulSet("shop", "db", func(p *pod) { p.claims = []string{"data-" + p.name} }, "worker-0", "worker-1", "worker-1")
			w.addVolume("shop", "data-db-0", "worker-0", nil)
			w.addVolume("shop", "data-db-1", "worker-1", nil)
			w.addVolume("shop", "data-db-2", "worker-1", nil)
			w.addBudget("shop", "db", "db", maxUnavailable(1))
		}, want: []string{"block"}},
		{name: "a drain waits for a pod elsewhere to get ready", check: "drain-rehearsal", change: func(w *world) {
			w.request.ReplaceControlPlanes = false
			w.addDeployment("shop", "web", func(p *pod) { p.ready = p.node != "cp-0" }, "cp-0", "worker-0", "worker-1")
			w.addBudget("shop", "web", "web", minAvailable("2"))
		}, want: []string{"warn"}},
		// Data loss.
		{name: "pods without a controller", check: "unmanaged-pods", change: func(w *world) {
			w.team("shop", "debug", owner{}, func(p *pod) {
				p.keeper = keeperOf(&metav1.ObjectMeta{Namespace: "shop", ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl-run"}}})
			}, []string{"worker-0", "worker-1"})
		}, want: []string{"warn"}},
		{name: "pods whose controller's kind is gone", check: "unmanaged-pods", change: func(w *world) {
			w.team("shop", "old", owner{"apps.example/v1", "Fleet", "old", "1"}, nil, []string{"worker-0"})
		}, want: []string{"warn"}},
		{name: "pods of a kind that the cluster serves", check: "unmanaged-pods", change: func(w *world) {
			var k kind
			k.Spec.Group, k.Spec.Names.Kind, k.Spec.Versions = "apps.example", "Fleet", []kindVersion{{Name: "v1", Served: true}}
			w.kinds = append(w.kinds, k)
			w.team("shop", "new", owner{"apps.example/v1", "Fleet", "new", "1"}, nil, []string{"worker-0"})
		}},
		{name: "pods that have ended", check: "unmanaged-pods", change: func(w *world) {
			w.team("shop", "done", owner{}, func(p *pod) { p.phase = corev1.PodSucceeded }, []string{"worker-0"})
		}},
		{name: "scratch data, files of the node and volumes of one node", check: "local-data", change: func(w *world) {
			w.addDeployment("shop", "web", func(p *pod) { p.emptyDir = []string{"cache (Memory, 1Gi)", "tmp"} }, "worker-0", "worker-1")
			w.addDeployment("shop", "logs", func(p *pod) { p.hostPath = []string{"out (/var/log/shop)"} }, "worker-0")
			w.addStatefulSet("shop", "db", func(p *pod) { p.claims = []string{"data-" + p.name} }, "worker-0", "worker-1")
			w.addVolume("shop", "data-db-0", "worker-0", nil)
			w.addVolume("shop", "data-db-1", "worker-1", nil)
		}, want: []string{"warn", "warn", "warn"}},
		{name: "volumes that move within their zone", check: "local-data", change: func(w *world) {
			w.addStatefulSet("shop", "db", func(p *pod) { p.claims = []string{"data-" + p.name} }, "worker-0")
			w.addVolume("shop", "data-db-0", "", func(pv *corev1.PersistentVolume) {
				pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: "pd.csi"}
				pv.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
					MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelTopologyZone, Operator: corev1.NodeSelectorOpIn, Values: []string{"a"}}},
				}}}}
			})
		}},
		{name: "workloads with a single pod", check: "single-replica", change: func(w *world) {
			w.addDeployment("shop", "web", nil, "worker-0")
			w.addDeployment("shop", "mail", nil, "worker-1")
			w.addStatefulSet("shop", "db", nil, "worker-1")
		}, want: []string{"warn"}},
		{name: "the autoscaler is stopped meanwhile", check: "single-replica", change: func(w *world) {
			w.addDeployment("kube-system", "constellation-cluster-autoscaler", nil, "worker-0")
		}},
		{name: "our own controller of Plans starts again elsewhere", check: "single-replica", change: func(w *world) {
			w.addDeployment("system-upgrade", "constellation-plans", func(p *pod) { p.labels = map[string]string{"app.kubernetes.io/name": "constellation-plans"} }, "worker-0")
		}},
		{name: "a single pod with a budget is the budget's matter", check: "single-replica", change: func(w *world) {
			w.addDeployment("shop", "web", nil, "worker-0")
			w.addBudget("shop", "web", "web", minAvailable("1"))
		}},
		{name: "volumes that one node alone can have", check: "volume-attachments", change: func(w *world) {
			w.addDeployment("shop", "web", func(p *pod) { p.claims = []string{"files"} }, "worker-0")
			w.addVolume("shop", "files", "", func(pv *corev1.PersistentVolume) { pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: "pd.csi"} })
		}, want: []string{"warn"}},
		{name: "volumes that are stuck", check: "volume-attachments", change: func(w *world) {
			for i, node := range []string{"worker-9", "worker-0", "worker-1"} {
				a := storagev1.VolumeAttachment{ObjectMeta: metaOf("", "csi-"+strconv.Itoa(i)), Spec: storagev1.VolumeAttachmentSpec{
					Attacher: "pd.csi", NodeName: node, Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To("pv-" + strconv.Itoa(i))},
				}}
				w.attachments = append(w.attachments, a)
			}
			w.attachments[1].DeletionTimestamp = ptr.To(metav1.NewTime(noon.Add(-time.Hour)))
			w.attachments[1].Status = storagev1.VolumeAttachmentStatus{Attached: true, DetachError: &storagev1.VolumeError{Message: "disk is busy"}}
			w.attachments[2].Status.AttachError = &storagev1.VolumeError{Message: "no such disk"}
		}, want: []string{"warn", "warn", "warn"}},
		{name: "pods that end late, and pods that do not end", check: "termination", change: func(w *world) {
			w.addStatefulSet("shop", "db", func(p *pod) { p.grace = time.Hour }, "worker-0")
			w.addDeployment("shop", "web", func(p *pod) { p.terminating = noon.Add(-10 * time.Minute) }, "worker-0")
			w.addDeployment("shop", "api", func(p *pod) { p.terminating, p.finalizers = noon.Add(-2*time.Hour), []string{"shop.example/billing"} }, "worker-1")
			w.addDeployment("shop", "going", func(p *pod) { p.terminating = noon.Add(10 * time.Second) }, "worker-1")
		}, want: []string{"warn", "warn", "warn"}},
		{name: "pods that ask not to be evicted", check: "do-not-evict", change: func(w *world) {
			w.addDeployment("shop", "web", func(p *pod) { p.notEvict = "cluster-autoscaler.kubernetes.io/safe-to-evict=false" }, "worker-0")
			w.addDeployment("shop", "api", func(p *pod) { p.notEvict = "karpenter.sh/do-not-disrupt=true" }, "worker-0")
		}, want: []string{"warn"}},
		// Capacity.
		{name: "without another machine, full nodes have no place", check: "capacity", change: func(w *world) {
			w.request.Surge, w.request.ReplaceControlPlanes = 0, false
			w.addDeployment("shop", "web", func(p *pod) { p.request = resources{cpu: 3000, memory: 1 << 30} }, "worker-0", "worker-1")
		}, want: []string{"block"}},
		{name: "with another machine, full nodes have", check: "capacity", change: func(w *world) {
			w.addDeployment("shop", "web", func(p *pod) { p.request = resources{cpu: 3000, memory: 1 << 30} }, "worker-0", "worker-1")
		}},
		{name: "a pod that names its node", check: "capacity", change: func(w *world) {
			w.addDeployment("shop", "web", func(p *pod) { p.nodeSelector = map[string]string{corev1.LabelHostname: "worker-0"} }, "worker-0")
		}, want: []string{"block"}},
		{name: "a pod that wants a device", check: "capacity", change: func(w *world) {
			w.request.Surge, w.request.ReplaceControlPlanes = 0, false
			w.node("worker-0").Status.Allocatable["example.com/gpu"] = resource.MustParse("1")
			w.addDeployment("shop", "train", func(p *pod) { p.request.other = map[corev1.ResourceName]int64{"example.com/gpu": 1} }, "worker-0")
		}, want: []string{"block"}},
		{name: "pods that keep each other away", check: "capacity", change: func(w *world) {
			w.request.Surge, w.request.ReplaceControlPlanes = 0, false
			w.addDeployment("shop", "web", func(p *pod) {
				p.affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
					TopologyKey: corev1.LabelHostname, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
				}}}}
			}, "worker-0", "worker-1")
		}, want: []string{"block"}},
		{name: "a host port of the host that is in use", check: "capacity", change: func(w *world) {
			w.request.Surge, w.request.ReplaceControlPlanes = 0, false
			w.addDeployment("shop", "web", func(p *pod) { p.hostPorts = []int32{80} }, "worker-0", "worker-1")
		}, want: []string{"block"}},
		{name: "more volumes than a node can have", check: "capacity", change: func(w *world) {
			w.request.Surge, w.request.ReplaceControlPlanes = 0, false
			w.addStatefulSet("shop", "db", func(p *pod) { p.claims = []string{"data-" + p.name} }, "worker-0", "worker-1")
			for _, claim := range []string{"data-db-0", "data-db-1"} {
				w.addVolume("shop", claim, "", func(pv *corev1.PersistentVolume) { pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: "pd.csi"} })
			}
			for _, node := range []string{"worker-0", "worker-1"} {
				w.csiNodes = append(w.csiNodes, storagev1.CSINode{ObjectMeta: metaOf("", node), Spec: storagev1.CSINodeSpec{
					Drivers: []storagev1.CSINodeDriver{{Name: "pd.csi", Allocatable: &storagev1.VolumeNodeResources{Count: ptr.To[int32](1)}}},
				}})
			}
		}, want: []string{"block"}},
		{name: "a volume of another zone, and spread that is approximated", check: "capacity", change: func(w *world) {
			w.request.Surge, w.request.ReplaceControlPlanes = 0, false
			w.node("worker-1").Labels[corev1.LabelTopologyZone] = "b"
			w.addDeployment("shop", "web", func(p *pod) {
				p.claims = []string{"files"}
				p.spread = []corev1.TopologySpreadConstraint{{TopologyKey: corev1.LabelTopologyZone, MaxSkew: 1, WhenUnsatisfiable: corev1.DoNotSchedule}}
			}, "worker-0")
			w.addVolume("shop", "files", "", func(pv *corev1.PersistentVolume) {
				pv.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
					MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelTopologyZone, Operator: corev1.NodeSelectorOpIn, Values: []string{"a"}}},
				}}}}
			})
		}, want: []string{"block"}},
		{name: "a group of pods moves together to the new machine", check: "capacity", change: func(w *world) {
			w.addDeployment("shop", "cache", nil, "worker-0")
			w.addDeployment("shop", "web", func(p *pod) {
				p.priority = 10
				p.affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
					TopologyKey: corev1.LabelHostname, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "cache"}},
				}}}}
			}, "worker-0")
		}},
		{name: "a pod of its own that is unschedulable", check: "pending-pods", change: func(w *world) {
			w.team("shop", "pending", owner{}, func(p *pod) { p.phase, p.ready = corev1.PodPending, false }, []string{""})
		}, want: []string{"warn"}},
		{name: "pods that wait for a place already", check: "pending-pods", change: func(w *world) {
			w.addDeployment("shop", "big", func(p *pod) {
				p.phase, p.ready, p.pending = corev1.PodPending, false, "Unschedulable: 0/3 nodes are available: 3 Insufficient cpu."
			}, "", "")
		}, want: []string{"warn"}},
		// Nodes.
		{name: "a control plane that is not ready", check: "node-conditions", change: func(w *world) {
			w.node("cp-0").Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, Message: "Kubelet stopped posting node status.", LastTransitionTime: metav1.NewTime(noon.Add(-time.Hour))}}
			w.node("cp-0").Spec.Taints = append(w.node("cp-0").Spec.Taints, corev1.Taint{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoExecute})
		}, want: []string{"block"}},
		{name: "one worker of two without a network", check: "node-conditions", change: func(w *world) {
			w.node("worker-0").Status.Conditions = append(w.node("worker-0").Status.Conditions, corev1.NodeCondition{Type: corev1.NodeNetworkUnavailable, Status: corev1.ConditionTrue, Message: "no route"})
		}, want: []string{"warn"}},
		{name: "no worker is ready", check: "node-conditions", change: func(w *world) {
			for _, name := range []string{"worker-0", "worker-1"} {
				w.node(name).Status.Conditions[0] = corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionFalse, Message: "container runtime is down", LastTransitionTime: metav1.NewTime(noon.Add(-time.Minute))}
			}
		}, want: []string{"block", "block"}},
		{name: "a node under pressure", check: "node-conditions", change: func(w *world) {
			w.node("worker-1").Status.Conditions = append(w.node("worker-1").Status.Conditions, corev1.NodeCondition{
				Type: corev1.NodeDiskPressure, Status: corev1.ConditionTrue, Message: "kubelet has disk pressure", LastTransitionTime: metav1.NewTime(noon.Add(-3 * time.Minute)),
			})
		}, want: []string{"warn"}},
		{name: "nodes that are silent, ahead, or have never reported", check: "node-leases", change: func(w *world) {
			for _, name := range []string{"worker-2", "worker-3", "worker-4"} {
				w.addNode(name)
			}
			w.leases["worker-1"] = noon.Add(-3 * time.Minute)
			w.leases["worker-2"] = noon.Add(time.Minute)
			delete(w.leases, "worker-3")
		}, want: []string{"warn", "warn", "warn"}},
		{name: "a node that has just come has no lease yet", check: "node-leases", change: func(w *world) {
			delete(w.leases, "worker-3")
			for i := range w.nodes {
				if w.nodes[i].Name == "worker-3" {
					w.nodes[i].CreationTimestamp = metav1.NewTime(noon.Add(-20 * time.Second))
				}
			}
		}},
		{name: "one node of two is silent", check: "node-leases", change: func(w *world) {
			w.nodes = w.nodes[:2]
			w.leases["worker-0"] = noon.Add(-3 * time.Minute)
		}, want: []string{"warn"}},
		{name: "this computer's clock is wrong, not the nodes'", check: "node-leases", change: func(w *world) {
			for name := range w.leases {
				w.leases[name] = noon.Add(-time.Hour)
			}
		}, want: []string{"warn"}},
		{name: "a node that somebody cordoned", check: "cordoned-nodes", change: func(w *world) {
			n := w.node("worker-0")
			n.Spec.Unschedulable = true
			n.ManagedFields = []metav1.ManagedFieldsEntry{
				{Manager: "kubelet", FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{}}`)},
				{Manager: "kubectl-cordon", Time: ptr.To(metav1.NewTime(noon.Add(-2 * time.Hour))), FieldsV1: metav1.NewFieldsV1(`{"f:spec":{"f:unschedulable":{}}}`)},
			}
		}, want: []string{"warn"}},
		// Others.
		{name: "others who change nodes", check: "node-actors", change: func(w *world) {
			w.actors = map[schema.GroupResource][]actor{
				plans: {{ObjectMeta: metaOf("system-upgrade", "k3s"), Status: actorStatus{Applying: []string{"worker-0"}}}, {ObjectMeta: metaOf("system-upgrade", "idle")}, {
					ObjectMeta: metaOf("system-upgrade", "os"),
					Status:     actorStatus{Conditions: []actorCondition{{Type: "LatestResolved", Status: "True"}, {Type: "Complete", Status: "False", Reason: "JobFailed", Message: "Job apply-os-on-worker-1 has failed"}}},
				}},
				nodePools:          {{ObjectMeta: metaOf("", "spot")}},
				machineDeployments: {{ObjectMeta: metaOf("fleet", "md-0"), Status: actorStatus{Replicas: 3, Updated: ptr.To[int64](1)}}, {ObjectMeta: metaOf("fleet", "md-1"), Status: actorStatus{Replicas: 3, UpToDate: ptr.To[int64](3)}}},
			}
			w.addDaemonSet("kube-system", "kured", nil, "worker-0", "worker-1")
			w.daemonSets[len(w.daemonSets)-1].Annotations = map[string]string{kuredLock: `{"nodeID":"worker-1","metadata":{}}`}
			w.addDeployment("kube-system", "ca", nil, "cp-0")
			w.deployments[len(w.deployments)-1].Spec.Template.Spec.Containers = []corev1.Container{{Image: "registry.k8s.io/autoscaling/cluster-autoscaler:v1.35.0"}}
		}, want: []string{"warn", "warn", "warn", "warn", "warn", "warn"}},
		{name: "objects that are syncing", check: "gitops-sync", change: func(w *world) {
			w.actors = map[schema.GroupResource][]actor{
				applications:   {{ObjectMeta: metaOf("argocd", "shop"), Status: actorStatus{OperationState: operationState{"Running"}}}, {ObjectMeta: metaOf("argocd", "idle"), Status: actorStatus{OperationState: operationState{"Succeeded"}}}},
				kustomizations: {{ObjectMeta: metaOf("flux-system", "apps"), Status: actorStatus{Conditions: []actorCondition{{Type: "Reconciling", Status: "True"}}}}},
				helmReleases:   {{ObjectMeta: metaOf("flux-system", "db"), Spec: actorSpec{Suspend: true}, Status: actorStatus{Conditions: []actorCondition{{Type: "Ready", Status: "Unknown"}}}}},
			}
		}, want: []string{"warn", "warn"}},
		{name: "workloads in the middle of a rollout", check: "rollouts", change: func(w *world) {
			w.addDeployment("shop", "web", nil, "worker-0", "worker-1")
			w.deployments[len(w.deployments)-1].Status.UpdatedReplicas = 1
			w.addDeployment("shop", "api", nil, "worker-0")
			w.deployments[len(w.deployments)-1].Status.Conditions = []appsv1.DeploymentCondition{{Type: appsv1.DeploymentProgressing, Reason: "ProgressDeadlineExceeded"}}
			w.addStatefulSet("shop", "db", nil, "worker-0", "worker-1")
			w.statefulSets[0].Status.UpdateRevision, w.statefulSets[0].Status.CurrentRevision, w.statefulSets[0].Status.UpdatedReplicas = "b", "a", 1
			w.addStatefulSet("shop", "canary", nil, "worker-0", "worker-1")
			w.statefulSets[1].Status.UpdateRevision, w.statefulSets[1].Status.UpdatedReplicas = "b", 1
			w.statefulSets[1].Spec.UpdateStrategy.RollingUpdate = &appsv1.RollingUpdateStatefulSetStrategy{Partition: ptr.To[int32](1)}
			w.addDaemonSet("shop", "logs", nil, "worker-0", "worker-1")
			w.daemonSets[len(w.daemonSets)-1].Generation = 2
		}, want: []string{"warn", "warn", "warn", "warn"}},
		{name: "a job that has run for long", check: "long-jobs", change: func(w *world) {
			for name, since := range map[string]time.Duration{"export": 2 * time.Hour, "short": time.Minute} {
				j := batchv1.Job{ObjectMeta: metaOf("shop", name), Status: batchv1.JobStatus{Active: 1, StartTime: ptr.To(metav1.NewTime(noon.Add(-since)))}}
				w.jobs = append(w.jobs, j)
				w.team("shop", name, owner{"batch/v1", "Job", name, j.UID}, nil, []string{"worker-0"})
			}
		}, want: []string{"warn"}},
		{name: "an autoscaled workload at its limit", check: "autoscaler-limits", change: func(w *world) {
			for name, least := range map[string]int32{"web": 2, "fixed": 3} {
				w.autoscalers = append(w.autoscalers, autoscalingv2.HorizontalPodAutoscaler{
					ObjectMeta: metaOf("shop", name),
					Spec:       autoscalingv2.HorizontalPodAutoscalerSpec{MinReplicas: &least, MaxReplicas: 3, ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{Kind: "Deployment", Name: name}},
					Status:     autoscalingv2.HorizontalPodAutoscalerStatus{CurrentReplicas: 3, DesiredReplicas: 3},
				})
			}
		}, want: []string{"warn"}},
		// Webhooks.
		{name: "a webhook without backend", check: "webhook-endpoints", change: func(w *world) {
			w.addWebhook([]string{"worker-0"}, func(h *admissionv1.ValidatingWebhook) {})
			w.slices[0].Endpoints[0].Conditions.Ready = ptr.To(false)
		}, want: []string{"block"}},
		{name: "a webhook without its service", check: "webhook-endpoints", change: func(w *world) {
			w.addWebhook([]string{"worker-0"}, func(h *admissionv1.ValidatingWebhook) { h.ClientConfig.Service.Name = "gone" })
		}, want: []string{"block"}},
		{name: "a webhook on a port that its service has not", check: "webhook-endpoints", change: func(w *world) {
			w.addWebhook([]string{"worker-0"}, func(h *admissionv1.ValidatingWebhook) { h.ClientConfig.Service.Port = ptr.To[int32](8443) })
		}, want: []string{"block"}},
		{name: "a webhook whose conditions may leave the upgrade alone", check: "webhook-endpoints", change: func(w *world) {
			w.addWebhook(nil, func(h *admissionv1.ValidatingWebhook) {
				h.MatchConditions = []admissionv1.MatchCondition{{Name: "x", Expression: "false"}}
			})
		}, want: []string{"warn"}},
		{name: "a webhook that lets pass what it cannot judge", check: "webhook-endpoints", change: func(w *world) {
			w.addWebhook(nil, func(h *admissionv1.ValidatingWebhook) { h.FailurePolicy = ptr.To(admissionv1.Ignore) })
		}},
		{name: "a webhook for what an upgrade does not touch", check: "webhook-endpoints", change: func(w *world) {
			w.addWebhook(nil, func(h *admissionv1.ValidatingWebhook) {
				h.Rules[0].APIGroups, h.Rules[0].Resources = []string{"shop.example"}, []string{"*"}
			})
		}},
		{name: "a webhook for namespaces that do not exist", check: "webhook-endpoints", change: func(w *world) {
			w.addWebhook(nil, func(h *admissionv1.ValidatingWebhook) {
				h.NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"guarded": "yes"}}
			})
		}},
		{name: "a webhook at an address of the outside", check: "webhook-endpoints", change: func(w *world) {
			w.addWebhook(nil, func(h *admissionv1.ValidatingWebhook) {
				h.ClientConfig = admissionv1.WebhookClientConfig{URL: ptr.To("https://hook.example")}
			})
		}},
		{name: "a webhook for everything", check: "webhook-endpoints", change: func(w *world) {
			w.addWebhook(nil, func(h *admissionv1.ValidatingWebhook) {
				h.NamespaceSelector = nil
				h.Rules[0] = admissionv1.RuleWithOperations{Operations: []admissionv1.OperationType{"*"}, Rule: admissionv1.Rule{APIGroups: []string{"*"}, APIVersions: []string{"*"}, Resources: []string{"*/*"}}}
			})
		}, want: []string{"block"}},
		{name: "a webhook on one node that leaves itself out", check: "webhook-one-node", change: func(w *world) {
			w.addWebhook([]string{"worker-1"}, func(h *admissionv1.ValidatingWebhook) {})
		}, want: []string{"warn"}},
		{name: "a webhook on one node that would refuse its own pods", check: "webhook-one-node", change: func(w *world) {
			w.addWebhook([]string{"worker-1", "worker-1"}, func(h *admissionv1.ValidatingWebhook) { h.NamespaceSelector = nil })
		}, want: []string{"block"}},
		{name: "a webhook on one node that is kept", check: "webhook-one-node", change: func(w *world) {
			w.request.ReplaceWorkers = false
			w.addWebhook([]string{"worker-1"}, func(h *admissionv1.ValidatingWebhook) {})
		}},
		{name: "a webhook that judges its own pods and the system's", check: "webhook-exemption", change: func(w *world) {
			w.addWebhook([]string{"worker-0", "worker-1"}, func(h *admissionv1.ValidatingWebhook) { h.NamespaceSelector = nil })
		}, want: []string{"warn"}},
		{name: "a webhook that leaves the system's pods out by their labels", check: "webhook-exemption", change: func(w *world) {
			w.addWebhook([]string{"worker-0", "worker-1"}, func(h *admissionv1.ValidatingWebhook) {
				h.NamespaceSelector, h.ObjectSelector = nil, &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
			})
		}},
		{name: "a webhook that may take long", check: "webhook-timeout", change: func(w *world) {
			w.addWebhook([]string{"worker-0", "worker-1"}, func(h *admissionv1.ValidatingWebhook) { h.TimeoutSeconds = ptr.To[int32](30) })
		}, want: []string{"warn"}},
		{name: "a CA that has expired", check: "webhook-ca", change: func(w *world) {
			w.addWebhook([]string{"worker-0", "worker-1"}, func(h *admissionv1.ValidatingWebhook) { h.ClientConfig.CABundle = caUntil(noon.Add(-24 * time.Hour)) })
		}, want: []string{"block"}},
		{name: "a CA that expires in six days", check: "webhook-ca", change: func(w *world) {
			w.addWebhook([]string{"worker-0", "worker-1"}, func(h *admissionv1.ValidatingWebhook) {
				h.ClientConfig.CABundle = caUntil(noon.Add(6 * 24 * time.Hour))
			})
		}, want: []string{"block"}},
		{name: "a CA that expires in three weeks", check: "webhook-ca", change: func(w *world) {
			w.addWebhook([]string{"worker-0", "worker-1"}, func(h *admissionv1.ValidatingWebhook) {
				h.ClientConfig.CABundle = caUntil(noon.Add(21 * 24 * time.Hour))
			})
		}, want: []string{"warn"}},
		{name: "an old CA next to a new one", check: "webhook-ca", change: func(w *world) {
			w.addWebhook([]string{"worker-0", "worker-1"}, func(h *admissionv1.ValidatingWebhook) {
				h.ClientConfig.CABundle = append(caUntil(noon.Add(-24*time.Hour)), h.ClientConfig.CABundle...)
			})
		}},
		{name: "a CA that is no PEM", check: "webhook-ca", change: func(w *world) {
			w.addWebhook([]string{"worker-0", "worker-1"}, func(h *admissionv1.ValidatingWebhook) { h.ClientConfig.CABundle = []byte("Cg==") })
		}, want: []string{"block"}},
		{name: "a service without a CA", check: "webhook-ca", change: func(w *world) {
			w.addWebhook([]string{"worker-0", "worker-1"}, func(h *admissionv1.ValidatingWebhook) { h.ClientConfig.CABundle = nil })
		}, want: []string{"warn"}},
		{name: "a webhook that misses newer versions", check: "webhook-match-policy", change: func(w *world) {
			w.addWebhook([]string{"worker-0", "worker-1"}, func(h *admissionv1.ValidatingWebhook) { h.MatchPolicy = ptr.To(admissionv1.Exact) })
		}, want: []string{"warn"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := village()
			tt.change(w)
			found := look(w, tt.check)
			var got []string
			for _, f := range found {
				got = append(got, string(f.Severity))
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("severities %v, want %v", got, tt.want)
			}
			if len(tt.want) > 0 {
				checkFindings(t, "workloads.yaml", tt.name, found)
			}
		})
	}
}
