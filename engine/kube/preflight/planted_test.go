package preflight

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"constellation/engine/check"
	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/version"
)

// binariesOf returns a patch of a minor of Kubernetes that was built on this computer, with the
// directory of its binaries.
func binariesOf(t *testing.T, minor version.Version) (patch version.Version, dir string) {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Skip(err)
	}
	dirs, err := filepath.Glob(filepath.Join(cache, "constellation", "kubernetes", minor.MinorString()+".*", "bin"))
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		if _, err := os.Stat(filepath.Join(dir, "kube-apiserver")); err == nil {
			return version.MustParse(filepath.Base(filepath.Dir(dir))), dir
		}
	}
	t.Skipf("needs a patch of Kubernetes %s: run `bin/constellation sandbox fetch`", minor.MinorString())
	return version.Version{}, ""
}

// defaultRE finds a flag in the help text of a component, with its default.
var defaultRE = regexp.MustCompile(`(?m)^ +--([a-z0-9-]+)(?: [^ ]+)? {2,}.*?(?:\(default "?([^")]*)"?\).*)?$`)

// flagDefaults returns the flags of a component with their defaults, as it reports them itself.
func flagDefaults(t *testing.T, program string) map[string]string {
	t.Helper()
	b, err := exec.CommandContext(t.Context(), program, "--help").CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, m := range defaultRE.FindAllStringSubmatch(string(b), -1) {
		out[m[1]] = m[2]
	}
	return out
}

// planted is a finding that a planted row must cause.
type planted struct {
	row      string
	id       string
	severity plan.Severity
	title    string // part of it
}

// planter puts what rows of the data describe into a real cluster.
type planter struct {
	*site
	objects dynamic.Interface
	from    version.Version
	report  *kubeletReport // of the kubelet on worker-0
	// args are appended to the command lines of the control plane's pods, by component; proxy to
	// that of kube-proxy.
	args  map[string][]string
	proxy []string
	// cluster is ClusterConfiguration without its version, gates of kubeadm's configuration.
	configVersion string
	gates         []string
	kubelet       string // appended to the ConfigMap kubelet-config
	runtime       string // container runtime of worker-0
	etcd          string // tag
	want          []planted
}

func (p *planter) expect(row, id string, s plan.Severity, format string, args ...any) {
	p.want = append(p.want, planted{row, id, s, fmt.Sprintf(format, args...)})
}

// plants has the way to plant the rows of each list of a minor.
var plants = map[string]func(p *planter, m *lifecycle.Minor){
	"Flags":   plantFlags,
	"Values":  plantValues,
	"Gates":   plantGates,
	"APIs":    func(p *planter, m *lifecycle.Minor) { plantAPIs(p, m, true) },
	"Kubeadm": plantKubeadm,
	"Kubelet": plantKubelet,
	"Actions": plantActions,
}

func plantFlags(p *planter, m *lifecycle.Minor) {
	for _, r := range m.Flags {
		for _, name := range r.Removed {
			switch r.Component {
			case "kubelet":
				p.report.flags[name] = "planted"
				p.expect(name, "running-kubelets", plan.Block, "the flag --%s is removed (%s)", name, m.Kubernetes)
				continue
			case "kube-proxy":
				p.proxy = append(p.proxy, "--"+name+"=planted")
			default:
				p.args[r.Component] = append(p.args[r.Component], "--"+name+"=planted")
			}
			p.expect(r.Component+" "+name, "removed-flags", plan.Block, "%s would not start after the hop: the flag --%s is removed (%s)", r.Component, name, m.Kubernetes)
		}
	}
}

func plantValues(p *planter, m *lifecycle.Minor) {
	for _, r := range m.Values {
		p.args[r.Component] = append(p.args[r.Component], "--"+r.Flag+"="+strings.Join(r.Refused, ","))
		for _, v := range r.Refused {
			p.expect(r.Flag+" "+v, "removed-flags", plan.Block, "%s would not start after the hop: the value %s of --%s is refused (%s)", r.Component, v, r.Flag, m.Kubernetes)
		}
	}
}

func plantGates(p *planter, m *lifecycle.Minor) {
	var gates []string
	for _, r := range m.Gates {
		for _, g := range r.Removed {
			gates = append(gates, g+"=true")
			p.expect(g, "removed-flags", plan.Block, "the feature gate %s is removed (%s)", g, m.Kubernetes)
		}
		for _, x := range []struct {
			names []string
			on    bool
		}{{r.LockedOn, true}, {r.LockedOff, false}} {
			for _, g := range x.names {
				gates = append(gates, fmt.Sprintf("%s=%t", g, !x.on))
				p.expect(g, "removed-flags", plan.Block, "the feature gate %s can only be %t (%s)", g, x.on, m.Kubernetes)
			}
		}
	}
	p.args["kube-scheduler"] = append(p.args["kube-scheduler"], "--feature-gates="+strings.Join(gates, ","))
}

// plantAPIs lets a client read each removed API, and stores objects of deleted ones.
func plantAPIs(p *planter, m *lifecycle.Minor, hop bool) {
	for _, r := range m.APIs {
		gvr := schema.GroupVersionResource{Group: r.Group, Version: r.Version, Resource: r.Resource}
		title := gvr.GroupVersion().String() + " " + r.Resource
		if r.Deleted {
			o := storedObjects[r.Kind]
			if o == nil {
				p.t.Errorf("no object of kind %s to plant", r.Kind)
				continue
			}
			_, err := p.objects.Resource(gvr).Namespace(metav1.NamespaceDefault).Create(p.t.Context(), &unstructured.Unstructured{Object: map[string]any{
				"apiVersion": gvr.GroupVersion().String(), "kind": r.Kind, "metadata": map[string]any{"name": "planted"}, "spec": o,
			}}, metav1.CreateOptions{})
			p.must(err)
			p.expect(title, "removed-apis-written", plan.Block, "objects of %s are stored", title)
			continue
		}
		_, err := p.objects.Resource(gvr).List(p.t.Context(), metav1.ListOptions{})
		if apierrors.IsNotFound(err) {
			p.t.Errorf("%s cannot be planted: %s does not serve it", title, p.from)
			continue
		}
		p.must(err)
		if hop {
			p.expect(title, "removed-apis-used", plan.Warn, "clients read %s, which %s no longer serves", title, m.Kubernetes)
		} else {
			p.expect(title, "removed-apis-used", plan.Warn, "clients read %s, which %s, the minor after this hop, no longer serves", title, m.Kubernetes)
		}
	}
}

// storedObjects are the specs of objects of deleted APIs.
var storedObjects = map[string]map[string]any{
	"Workload": {"podGroupTemplates": []any{map[string]any{"name": "a", "schedulingPolicy": map[string]any{"gang": map[string]any{"minCount": int64(2)}}}}},
	"PodGroup": {"schedulingPolicy": map[string]any{"gang": map[string]any{"minCount": int64(2)}}},
}

func plantKubeadm(p *planter, m *lifecycle.Minor) {
	for _, r := range m.Kubeadm {
		if len(r.Configs) > 0 {
			for _, earlier := range lifecycle.Minors() {
				for _, e := range earlier.Kubeadm {
					for _, c := range e.Configs {
						if earlier.Number() < m.Number() && !slices.Contains(r.Configs, c) {
							p.configVersion = c
							p.expect(c, "kubeadm-config", plan.Block, "contains a ClusterConfiguration of %s, which kubeadm does not read", c)
						}
					}
				}
			}
		}
		for _, g := range r.RemovedGates {
			p.gates = append(p.gates, g+": true")
			p.expect(g, "kubeadm-config", plan.Block, "kubeadm of %s refuses the feature gate %s", m.Kubernetes, g)
		}
		if to, ok := etcdOf(r.Etcd); ok {
			if step, ok := lifecycle.Etcd(to); ok {
				p.etcd = strings.TrimPrefix(fmt.Sprintf("%s.%d-0", step.From.MinorString(), step.From.Patch()-1), "v")
				p.expect(r.Etcd, "etcd-members", plan.Block, "and only %s can be upgraded to %s", step.From, to)
			}
		}
	}
}

func plantKubelet(p *planter, m *lifecycle.Minor) {
	for _, r := range m.Kubelet {
		if r.Runtime == "" {
			p.t.Errorf("a row of %s about kubelets has no plant: %+v", m.Kubernetes, r)
			continue
		}
		p.runtime = fmt.Sprintf("%s://%d.99.0", r.Runtime, r.OldestRuntime.Major()-1)
		p.expect(r.Runtime, "container-runtime", plan.Warn, "kubelets from %s on need %s %d", m.Kubernetes, r.Runtime, r.OldestRuntime.Major())
	}
}

func plantActions(p *planter, m *lifecycle.Minor) {
	for _, a := range m.Actions {
		switch {
		case a.KubeletField != "":
			p.kubelet += a.KubeletField + ": " + a.KubeletValue + "\n"
			p.expect(a.Title, "changed-settings", plan.Warn, "%s", a.Title)
			continue
		case a.Permission != "":
			p.must(p.cp.Apply(p.t.Context(), fmt.Appendf(nil, logReader, a.Permission)))
		case a.SharedSELinux:
			p.must(p.cp.Apply(p.t.Context(), []byte(sharedVolume)))
		default:
			p.t.Errorf("an action of %s has no plant: %s", m.Kubernetes, a.Title)
			continue
		}
		p.expect(a.Title, "required-actions", plan.Warn, "%s requires an action: %s", m.Kubernetes, a.Title)
	}
}

// plantEtcd gives etcd every flag that its next minor refuses.
func plantEtcd(p *planter, from, to version.Version) {
	for _, name := range lifecycle.EtcdFlagsRemoved(from, to) {
		p.args["etcd"] = append(p.args["etcd"], "--"+name+"=planted")
		p.expect("etcd "+name, "removed-flags", plan.Block, "etcd would not start after the hop: the flag --%s is removed (etcd %s)", name, to.MinorString())
	}
}

// put writes what the planters collected.
func (p *planter) put() {
	p.t.Helper()
	ctx := p.t.Context()
	pods := p.core.CoreV1().Pods(metav1.NamespaceSystem)
	l, err := pods.List(ctx, metav1.ListOptions{LabelSelector: "tier=control-plane"})
	p.must(err)
	for i := range l.Items {
		old := &l.Items[i]
		like := slimPod(old)
		like.args = append(like.args, p.args[like.component]...)
		if like.component == "etcd" && p.etcd != "" {
			like.images = []string{"registry.k8s.io/etcd:" + p.etcd}
		}
		p.must(pods.Delete(ctx, old.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
		p.putPod(&like)
	}
	p.change(kubeadmConfig, func(data map[string]string) {
		data["ClusterConfiguration"] = fmt.Sprintf("apiVersion: %s\nkind: ClusterConfiguration\nkubernetesVersion: %s\nfeatureGates: {%s}\n", p.configVersion, p.from, strings.Join(p.gates, ", "))
	})
	p.change(kubeletConfig, func(data map[string]string) { data["kubelet"] += p.kubelet })
	d, err := p.core.AppsV1().DaemonSets(metav1.NamespaceSystem).Get(ctx, proxyConfig, metav1.GetOptions{})
	p.must(err)
	d.Spec.Template.Spec.Containers[0].Command = append(d.Spec.Template.Spec.Containers[0].Command, p.proxy...)
	_, err = p.core.AppsV1().DaemonSets(metav1.NamespaceSystem).Update(ctx, d, metav1.UpdateOptions{})
	p.must(err)
}

// change changes a ConfigMap of kubeadm.
func (s *site) change(name string, f func(map[string]string)) {
	s.t.Helper()
	maps := s.core.CoreV1().ConfigMaps(metav1.NamespaceSystem)
	m, err := maps.Get(s.t.Context(), name, metav1.GetOptions{})
	s.must(err)
	f(m.Data)
	_, err = maps.Update(s.t.Context(), m, metav1.UpdateOptions{})
	s.must(err)
}

// A clean cluster of the minor before the newest in the data gets no finding. The same cluster with
// each row of the data planted gets the finding of each row. A new row without a plant fails.
func TestEveryRowOfTheDataIsFoundInARealCluster(t *testing.T) {
	to := lifecycle.Newest()
	next, ok := lifecycle.Of(to)
	if !ok {
		t.Fatal("the newest minor has no data")
	}
	from, bin := binariesOf(t, minorNumber(to.Minor()-1))
	deployed, ok := etcdOf(lifecycle.DeployedEtcd(to))
	if !ok {
		t.Fatalf("the etcd of %s is unknown", to)
	}
	like := clean()
	like.request = hop(from.String(), to.String())
	*like = *atVersion(like, from.String())
	floor, hasFloor := lifecycle.Etcd(deployed)
	for i := range like.nodes {
		like.nodes[i].Status.NodeInfo.ContainerRuntimeVersion = "containerd://2.1.4"
	}
	if hasFloor {
		like.component("etcd", "control-plane-0").images = []string{"registry.k8s.io/etcd:" + strings.TrimPrefix(floor.From.String(), "v") + "-0"}
	}
	s := newSiteLike(t, like, controlplane.Options{BinDir: bin, APIServerArgs: []string{
		"--feature-gates=ClusterTrustBundle=true,MutatingAdmissionPolicy=true,CoordinatedLeaderElection=true,GenericWorkload=true,GangScheduling=true",
	}})
	s.config.WarningHandler = rest.NoWarnings{}
	// Both kubelets report the defaults of a real kubelet.
	defaults := flagDefaults(t, filepath.Join(bin, "kubelet"))
	own := &kubeletReport{config: map[string]any{}, flags: map[string]string{}}
	for _, r := range next.Flags {
		for _, name := range r.Removed {
			v, ok := defaults[name]
			if r.Component != "kubelet" {
				continue
			}
			if !ok {
				t.Errorf("the kubelet of %s has no flag --%s", from, name)
			}
			own.flags[name] = v
		}
	}
	port := serveKubelet(t, 365*day, 300*day, own)
	s.putNodeWith("control-plane-0", from.String(), "containerd://2.1.4", port)
	s.putNodeWith("worker-0", from.String(), "containerd://2.1.4", port)
	_, err := s.core.AppsV1().DaemonSets(metav1.NamespaceSystem).Create(t.Context(), withSelector(like.daemonSets[0]), metav1.CreateOptions{})
	s.must(err)
	request := hop(from.String(), to.String())
	s.until(s.config, request) // the clean cluster gets no finding

	objects, err := dynamic.NewForConfig(s.config)
	s.must(err)
	ownOfWorker := &kubeletReport{config: map[string]any{}, flags: map[string]string{}}
	p := &planter{site: s, objects: objects, from: from, report: ownOfWorker, args: map[string][]string{}, configVersion: "kubeadm.k8s.io/v1beta4", runtime: "containerd://2.1.4"}
	row := reflect.ValueOf(*next)
	for i := range row.NumField() {
		list := row.Type().Field(i)
		if list.Type.Kind() != reflect.Slice || row.Field(i).Len() == 0 {
			continue
		}
		if plants[list.Name] == nil {
			t.Errorf("the data of %s has rows of %s, which this test does not plant", next.Kubernetes, list.Name)
			continue
		}
		plants[list.Name](p, next)
	}
	plantEtcd(p, floor.From, deployed)
	if after, ok := lifecycle.Of(minorAfter(to)); ok { // some rows are reported one hop early
		plantAPIs(p, after, false)
		plantKubelet(p, after)
	}
	p.put()
	s.putNodeWith("worker-0", from.String(), p.runtime, serveKubelet(t, 365*day, 300*day, ownOfWorker))

	// The metrics of the API server lag.
	var missing []string
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(200 * time.Millisecond) {
		found := s.look(s.config, request)
		missing = nil
		for _, w := range p.want {
			if !slices.ContainsFunc(found, func(f plan.Finding) bool {
				return f.ID == w.id && f.Severity == w.severity && strings.Contains(f.Title, w.title)
			}) {
				missing = append(missing, fmt.Sprintf("%s: want %s %s: ...%s", w.row, w.severity, w.id, w.title))
			}
		}
		if len(missing) == 0 || time.Now().After(deadline) {
			// Nothing else is found: each finding belongs to a row.
			for _, f := range found {
				if f.Severity != plan.Info && !slices.ContainsFunc(p.want, func(w planted) bool { return f.ID == w.id && strings.Contains(f.Title, w.title) }) {
					t.Errorf("a finding that belongs to no row: %s %s: %s (%s)", f.Severity, f.ID, f.Title, f.Detail)
				}
			}
			break
		}
	}
	for _, m := range missing {
		t.Error(m)
	}
	if len(p.want) < 90 {
		t.Errorf("%d rows are planted, want all of %s", len(p.want), next.Kubernetes)
	}
	t.Logf("%d rows of %s and of the minor after it are planted and found", len(p.want), next.Kubernetes)

	t.Run("an external etcd", func(t *testing.T) {
		s := s.in(t)
		s.change(kubeadmConfig, func(data map[string]string) {
			data["ClusterConfiguration"] = "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\nkubernetesVersion: " + from.String() + "\netcd: {external: {endpoints: [https://10.0.0.9:2379]}}\n"
		})
		found := s.look(s.config, request)
		oldest := lifecycle.ExternalEtcd(to).String()
		if !slices.ContainsFunc(found, func(f plan.Finding) bool {
			return f.ID == "etcd-members" && f.Severity == plan.NotChecked && strings.Contains(f.Remedy, oldest+" or newer")
		}) {
			t.Errorf("no finding names %s: %v", oldest, told(found))
		}
	})
	t.Run("actions that objects show", func(t *testing.T) {
		s := s.in(t)
		earlier := hop("v1.35.4", "v1.36.3")
		actions := func() (out []string) {
			for _, line := range told(s.look(s.config, earlier)) {
				if strings.Contains(line, " required-actions: ") {
					out = append(out, line)
				}
			}
			return out
		}
		if got := actions(); len(got) > 0 {
			t.Fatalf("before anything is planted: %v", got)
		}
		s.must(s.cp.Apply(t.Context(), []byte(affectedObjects)))
		if got, want := actions(), []string{
			"warn required-actions: v1.36 requires an action: drivers of Dynamic Resource Allocation need more permissions to update the status of ResourceClaims",
			"warn required-actions: v1.36 requires an action: the metric volume_operation_total_errors is renamed to volume_operation_errors_total",
		}; !slices.Equal(got, want) {
			t.Errorf("found %q, want %q", got, want)
		}
	})
	t.Run("a minor that is newer than the data", func(t *testing.T) {
		s := s.in(t)
		for _, f := range s.look(s.config, check.PreflightRequest{From: to, To: version.MustParse(fmt.Sprintf("v1.%d.0", to.Minor()+2))}) {
			if c := slices.IndexFunc(checks(), func(c checkItem) bool { return c.id == f.ID }); checks()[c].byData && f.Severity == plan.Info {
				t.Errorf("%s is ok, although the data does not know the minor", f.ID)
			}
		}
	})
}

// withSelector makes the API server accept a DaemonSet.
func withSelector(d appsv1.DaemonSet) *appsv1.DaemonSet {
	labels := map[string]string{"k8s-app": d.Name}
	d.Spec.Selector = &metav1.LabelSelector{MatchLabels: labels}
	d.Spec.Template.Labels = labels
	d.Spec.Template.Spec.Containers[0].Name = d.Name
	return &d
}

const logReader = `apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: log-reader}
rules: [{apiGroups: [""], resources: [%s], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: log-reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: log-reader}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: eve}]
`

const sharedVolume = `apiVersion: storage.k8s.io/v1
kind: CSIDriver
metadata: {name: csi.example.com}
spec: {seLinuxMount: true}
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: shared}
spec:
  accessModes: [ReadWriteMany]
  capacity: {storage: 1Gi}
  csi: {driver: csi.example.com, volumeHandle: shared}
  claimRef: {namespace: default, name: shared}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: shared, namespace: default}
spec: {accessModes: [ReadWriteMany], resources: {requests: {storage: 1Gi}}, storageClassName: "", volumeName: shared}
---
apiVersion: v1
kind: Pod
metadata: {name: web-0, namespace: default}
spec: {securityContext: {seLinuxOptions: {level: "s0:c1,c2"}}, containers: [{name: c, image: example.com/c:1}], volumes: [{name: v, persistentVolumeClaim: {claimName: shared}}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web-1, namespace: default}
spec: {securityContext: {seLinuxOptions: {level: "s0:c3,c4"}}, containers: [{name: c, image: example.com/c:1}], volumes: [{name: v, persistentVolumeClaim: {claimName: shared}}]}
`

const affectedObjects = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: prometheusrules.monitoring.coreos.com}
spec:
  group: monitoring.coreos.com
  scope: Namespaced
  names: {kind: PrometheusRule, plural: prometheusrules, singular: prometheusrule, listKind: PrometheusRuleList}
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata: {name: volumes, namespace: default}
spec: {groups: [{name: a, rules: [{alert: A, expr: "rate(volume_operation_total_errors[5m]) > 0"}]}]}
---
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: gpu}
spec: {driver: gpu.example.com, pool: {name: worker-0, generation: 1, resourceSliceCount: 1}, nodeName: worker-0, devices: [{name: gpu-0}]}
`
