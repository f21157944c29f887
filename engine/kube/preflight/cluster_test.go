package preflight

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine/check"
	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/operator/api/v1alpha1"
)

// platformChecks are those that these tests are about.
func platformChecks() []checkItem {
	return slices.Concat(clusterChecks, kubeadmChecks, kubeletChecks, actionChecks, apiChecks, certificateChecks, addonChecks, accessChecks)
}

// hop is a request from one version of Kubernetes to another.
func hop(from, to string) check.PreflightRequest {
	return check.PreflightRequest{From: version.MustParse(from), To: version.MustParse(to)}
}

// clean is what a sandbox of kubeadm v1.35.4 looks like before a hop to v1.36.3.
func clean() *world {
	w := &world{
		now: noon, request: hop("v1.35.4", "v1.36.3"), unread: map[source]string{},
		namespaces: map[string]metav1.ObjectMeta{ownNamespace: {Name: ownNamespace, Labels: map[string]string{psaLabel: "privileged"}}},
		servers:    []apiServer{{address: "10.42.0.10:6443", version: "v1.35.4", metrics: &serverMetrics{started: noon.Add(-time.Hour), requests: 100000, storage: map[string]int64{"https://127.0.0.1:2379": 20 << 20}}}},
		configs: map[string]map[string]string{
			kubeadmConfig: {"ClusterConfiguration": `apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: v1.35.4
apiServer: {extraArgs: [{name: profiling, value: "false"}, {name: authentication-config, value: /etc/kubernetes/authentication.yaml}]}
controllerManager: {extraArgs: [{name: terminated-pod-gc-threshold, value: "1000"}]}
scheduler: {extraArgs: [{name: profiling, value: "false"}]}
`},
			kubeletConfig: {"kubelet": "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nfailCgroupV1: false\n"},
			proxyConfig:   {"config.conf": "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\n"},
		},
		leaders:  map[string]coordinationv1.LeaseSpec{},
		kubelets: &kubelets{of: map[string]kubeletReport{}},
	}
	w.request.Etcd = "3.6.8-0"
	for _, name := range []string{"kube-controller-manager", "kube-scheduler"} {
		w.leaders[name] = coordinationv1.LeaseSpec{HolderIdentity: new("control-plane-0_1"), LeaseDurationSeconds: new(int32(15)), RenewTime: &metav1.MicroTime{Time: noon.Add(-2 * time.Second)}}
	}
	w.addServerNode("control-plane-0", "v1.35.4", "3.6.6-0")
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-0"}}
	n.Status.NodeInfo = corev1.NodeSystemInfo{KubeletVersion: "v1.35.4", ContainerRuntimeVersion: "containerd://1.6.20"}
	w.nodes = append(w.nodes, n)
	w.daemonSets = []appsv1.DaemonSet{{
		ObjectMeta: metav1.ObjectMeta{Name: "kube-proxy", Namespace: "kube-system"},
		Spec:       appsv1.DaemonSetSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Image: "registry.k8s.io/kube-proxy:v1.35.4"}}}}},
	}}
	return w
}

// answer makes the kubelets without a report answer that they have nothing of their own.
func (w *world) answer() {
	w.kubelets.once.Do(func() {})
	for i := range w.nodes {
		if _, ok := w.kubelets.of[w.nodes[i].Name]; !ok {
			w.kubelets.of[w.nodes[i].Name] = kubeletReport{config: map[string]any{}, flags: map[string]string{}}
		}
	}
}

// addServerNode adds a control plane with its pods.
func (w *world) addServerNode(name, kubernetes, etcd string) {
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Status.NodeInfo = corev1.NodeSystemInfo{KubeletVersion: kubernetes, ContainerRuntimeVersion: "containerd://1.6.20"}
	w.nodes = append(w.nodes, n)
	for _, c := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"} {
		tag := kubernetes
		if c == "etcd" {
			tag = etcd
		}
		w.pods = append(w.pods, pod{
			namespace: "kube-system", name: c + "-" + name, node: name, component: c, mirror: true, ready: true,
			images: []string{"registry.k8s.io/" + c + ":" + tag}, args: []string{c, "--profiling=false", "--feature-gates=ContextualLogging=true"},
		})
	}
}

func (w *world) component(name, node string) *pod {
	i := slices.IndexFunc(w.pods, func(p pod) bool { return p.component == name && p.node == node })
	return &w.pods[i]
}

// certificate is one that is valid for life, and for left from noon on.
func certificate(life, left time.Duration) *x509.Certificate {
	return &x509.Certificate{NotBefore: noon.Add(left - life), NotAfter: noon.Add(left), Signature: []byte(left.String())}
}

const day = 24 * time.Hour

// told is a finding in short: what kind, and its title.
func told(found []plan.Finding) (out []string) {
	for _, f := range found {
		if f.Severity != plan.Info {
			out = append(out, fmt.Sprintf("%s %s: %s", f.Severity, f.ID, f.Title))
		}
	}
	return out
}

func TestTroubleOfThePlatformIsFoundAndNothingElse(t *testing.T) {
	for _, tt := range []struct {
		name  string
		plant func(w *world)
		want  []string
	}{
		{name: "a clean sandbox", plant: func(*world) {}, want: nil},
		{name: "API servers two minors apart", plant: func(w *world) {
			w.addServerNode("control-plane-1", "v1.33.1", "3.6.6-0")
			w.addServerNode("control-plane-2", "v1.35.4", "3.6.6-0")
		}, want: []string{
			"block control-plane-versions: API servers run v1.33.1 and v1.35.4, which are 2 minor versions apart",
			"block kubelet-versions: the kubelet of 1 node is v1.35.4, newer than the oldest API server with v1.33.1",
			"block proxy-version: kube-proxy is v1.35.4, newer than the oldest API server with v1.33.1",
		}},
		{name: "a scheduler that runs ahead", plant: func(w *world) {
			w.component("kube-scheduler", "control-plane-0").images = []string{"registry.k8s.io/kube-scheduler:v1.36.3"}
		}, want: []string{"block control-plane-versions: kube-scheduler on control-plane-0 is v1.36.3, newer than the API server beside it with v1.35.4"}},
		{name: "a controller manager that lags behind", plant: func(w *world) {
			w.component("kube-controller-manager", "control-plane-0").images = []string{"registry.k8s.io/kube-controller-manager:v1.33.0"}
		}, want: []string{"block control-plane-versions: kube-controller-manager on control-plane-0 is v1.33.0, more than one minor version older than the API server with v1.35.4"}},
		{name: "a rollout of which a third is done", plant: func(w *world) {
			w.addServerNode("control-plane-1", "v1.36.3", "3.6.6-0")
			w.addServerNode("control-plane-2", "v1.35.4", "3.6.6-0")
		}, want: nil},
		{name: "an image by digest alone", plant: func(w *world) {
			w.component("kube-scheduler", "control-plane-0").images = []string{"registry.example:5000/kube-scheduler@sha256:00"}
		}, want: []string{"not-checked control-plane-versions: the version of kube-scheduler is unknown"}},
		{name: "a kubelet that the hop leaves behind", plant: func(w *world) { w.nodes[1].Status.NodeInfo.KubeletVersion = "v1.32.9" }, want: []string{
			"block kubelet-versions: the kubelet of 1 node is v1.32.9, too old for the API servers of the hop with v1.36.3",
		}},
		{name: "a kubelet that is too old already", plant: func(w *world) { w.nodes[1].Status.NodeInfo.KubeletVersion = "v1.31.0" }, want: []string{
			"block kubelet-versions: the kubelet of 1 node is v1.31.0, too old for the API servers with v1.35.4",
		}},
		{name: "a kubelet of before v1.25 may be two behind", plant: func(w *world) {
			w.request = hop("v1.26.1", "v1.27.1")
			*w = *atVersion(w, "v1.26.1")
			w.nodes[1].Status.NodeInfo.KubeletVersion = "v1.24.3"
		}, want: []string{
			"block kubelet-versions: the kubelet of 1 node is v1.24.3, too old for the API servers of the hop with v1.27.1",
			"not-checked etcd-members: not checked whether etcd can be upgraded with the hop",
		}},
		{name: "a kubelet three behind may stay", plant: func(w *world) { w.nodes[1].Status.NodeInfo.KubeletVersion = "v1.33.0" }, want: nil},
		{name: "a kubelet newer than its API server", plant: func(w *world) { w.nodes[1].Status.NodeInfo.KubeletVersion = "v1.36.0" }, want: []string{
			"block kubelet-versions: the kubelet of 1 node is v1.36.0, newer than the oldest API server with v1.35.4",
		}},
		{name: "a node with a hostile version", plant: func(w *world) { w.nodes[1].Status.NodeInfo.KubeletVersion = "\x1b[2Jv1.35.4" }, want: []string{
			"not-checked kubelet-versions: the version of the kubelet of 1 node is unknown",
		}},
		{name: "kube-proxy that nobody upgraded", plant: func(w *world) {
			w.daemonSets[0].Spec.Template.Spec.Containers[0].Image = "registry.k8s.io/kube-proxy:v1.32.0"
		}, want: []string{"block proxy-version: kube-proxy is v1.32.0, too old for API servers with v1.36.3"}},
		{name: "an API server that nobody reaches", plant: func(w *world) {
			w.silent = []silentServer{{address: "10.42.0.11:6443", why: "no answer"}}
		}, want: []string{
			"not-checked control-plane-versions: the version of 1 API server is unknown",
			"not-checked api-health: 1 API server could not be reached from here",
		}},
		{name: "the pod of a member whose node is gone", plant: func(w *world) {
			w.addServerNode("control-plane-1", "v1.35.4", "3.6.6-0")
			w.nodes = slices.DeleteFunc(w.nodes, func(n corev1.Node) bool { return n.Name == "control-plane-1" })
		}, want: nil},
		{name: "etcd with two members", plant: func(w *world) { w.addServerNode("control-plane-1", "v1.35.4", "3.6.6-0") }, want: []string{
			"warn etcd-members: etcd has 2 members, which tolerate no more failures than 1",
		}},
		{name: "an etcd member that is not ready", plant: func(w *world) { w.component("etcd", "control-plane-0").ready = false }, want: []string{
			"block etcd-members: 1 member of etcd is not ready",
		}},
		{name: "an etcd too old to become 3.6", plant: func(w *world) {
			w.component("etcd", "control-plane-0").images = []string{"registry.k8s.io/etcd:3.5.24-0"}
		}, want: []string{"block etcd-members: etcd on control-plane-0 is v3.5.24, and only v3.5.26 can be upgraded to v3.6.8"}},
		{name: "an etcd new enough to become 3.6", plant: func(w *world) {
			w.component("etcd", "control-plane-0").images = []string{"registry.k8s.io/etcd:3.5.26-0"}
		}, want: nil},
		{name: "an etcd that would go back", plant: func(w *world) { w.request.Etcd = "3.5.26-0" }, want: []string{
			"block etcd-members: etcd on control-plane-0 is v3.6.6, newer than v3.5.26 of the hop",
		}},
		{name: "etcd that does not answer an API server", plant: func(w *world) { w.servers[0].failing = []string{"etcd", "etcd-readiness"} }, want: []string{
			"block etcd-members: an API server cannot reach etcd",
		}},
		{name: "etcd nearly full", plant: func(w *world) { w.servers[0].metrics.storage["https://127.0.0.1:2379"] = 1750 << 20 }, want: []string{
			"warn etcd-size: etcd's database has 1.7 of 2.0 GiB, 85 %",
		}},
		{name: "etcd full", plant: func(w *world) { w.servers[0].metrics.storage["https://127.0.0.1:2379"] = 2030 << 20 }, want: []string{
			"block etcd-size: etcd's database has 2.0 of 2.0 GiB, 99 %",
		}},
		{name: "etcd with a larger quota", plant: func(w *world) {
			w.servers[0].metrics.storage["https://127.0.0.1:2379"] = 2030 << 20
			e := w.component("etcd", "control-plane-0")
			e.args = append(e.args, "--quota-backend-bytes=8589934592")
		}, want: nil},
		{name: "an API server with a failing check", plant: func(w *world) { w.servers[0].failing = []string{"informer-sync"} }, want: []string{
			"block api-health: API server 10.42.0.10:6443 is not ready",
		}},
		{name: "an API server that turns clients away", plant: func(w *world) { w.servers[0].metrics.rejected = 400 }, want: []string{
			"warn api-rejections: API server 10.42.0.10:6443 rejected 400 requests of 100000",
		}},
		{name: "a scheduler without a leader", plant: func(w *world) { delete(w.leaders, "kube-scheduler") }, want: []string{
			"block leaders: kube-scheduler has no leader",
		}},
		{name: "a controller manager that stopped", plant: func(w *world) {
			l := w.leaders["kube-controller-manager"]
			l.RenewTime = &metav1.MicroTime{Time: noon.Add(-5 * time.Minute)}
			w.leaders["kube-controller-manager"] = l
		}, want: []string{"block leaders: kube-controller-manager has lost its leader"}},
		{name: "kubeadm's ConfigMap is gone", plant: func(w *world) { delete(w.configs, kubeadmConfig) }, want: []string{
			"block kubeadm-config: the ConfigMap kubeadm-config is missing, and `kubeadm upgrade` needs it",
		}},
		{name: "kubeadm's ConfigMap is of an age that kubeadm does not read", plant: func(w *world) {
			w.configs[kubeadmConfig]["ClusterConfiguration"] = "apiVersion: kubeadm.k8s.io/v1beta2\nkind: ClusterConfiguration\nkubernetesVersion: v1.35.4\n"
		}, want: []string{"block kubeadm-config: the ConfigMap kubeadm-config contains a ClusterConfiguration of kubeadm.k8s.io/v1beta2, which kubeadm does not read"}},
		{name: "the kubelets' ConfigMap is broken", plant: func(w *world) { w.configs[kubeletConfig]["kubelet"] = "{{{" }, want: []string{
			"block kubeadm-config: the ConfigMap kubelet-config cannot be read",
		}},
		{name: "flags and gates that the hop removes", plant: func(w *world) {
			a := w.component("kube-apiserver", "control-plane-0")
			a.args = append(a.args, "--feature-gates=ContextualLogging=true,StructuredAuthorizationConfiguration=true,ImageVolume=false")
			w.configs[kubeletConfig]["kubelet"] += "featureGates: {MemoryManager: true, KubeletPSI: true}\n"
			w.configs[kubeadmConfig]["ClusterConfiguration"] = strings.Replace(w.configs[kubeadmConfig]["ClusterConfiguration"], `scheduler: {extraArgs: [`, `scheduler: {extraArgs: [{name: feature-gates, value: "kube:TopologyAwareHints=true"}, `, 1)
		}, want: []string{
			"block removed-flags: kube-apiserver would not start after the hop: the feature gate ImageVolume can only be true (v1.36)",
			"block removed-flags: kube-apiserver would not start after the hop: the feature gate StructuredAuthorizationConfiguration is removed (v1.36)",
			"block removed-flags: kube-scheduler would not start after the hop: the feature gate TopologyAwareHints is removed (v1.36)",
			"block removed-flags: kubelet would not start after the hop: the feature gate MemoryManager is removed (v1.36)",
		}},
		{name: "a version whose flags are not known", plant: func(w *world) {
			w.request.From, w.request.To = version.MustParse("v1.37.2"), version.MustParse("v1.38.0")
			*w = *atVersion(w, "v1.37.2")
		}, want: []string{
			"warn container-runtime: containerd 1.x runs on 2 nodes, and kubelets from v1.38 on need containerd 2",
		}},
		{name: "nothing of v1.36 that v1.37 breaks", plant: toward137, want: nil},
		{name: "an old runtime, reported one hop early", plant: func(w *world) {
			toward137(w)
			w.nodes[0].Status.NodeInfo.ContainerRuntimeVersion = "containerd://1.7.27"
		}, want: []string{"warn container-runtime: containerd 1.x runs on 1 node, and kubelets from v1.38 on need containerd 2"}},
		{name: "flags, values and gates that v1.37 refuses", plant: func(w *world) {
			toward137(w)
			a := w.component("kube-apiserver", "control-plane-0")
			a.args = append(a.args, "--enable-admission-plugins=NodeRestriction,JobValidation", "--runtime-config=api/all=true,scheduling.k8s.io/v1alpha2=true", "--feature-gates=DRAPrioritizedList=false")
			c := w.component("kube-controller-manager", "control-plane-0")
			c.args = append(c.args, "--concurrent-service-syncs=2")
			w.configs[kubeletConfig]["kubelet"] += "featureGates: {SidecarContainers: true}\neventRecordQPS: 0\n"
		}, want: []string{
			"block removed-flags: kube-apiserver would not start after the hop: the feature gate DRAPrioritizedList can only be true (v1.37)",
			"block removed-flags: kube-apiserver would not start after the hop: the value JobValidation of --enable-admission-plugins is refused (v1.37)",
			"block removed-flags: kube-apiserver would not start after the hop: the value scheduling.k8s.io/v1alpha2 of --runtime-config is refused (v1.37)",
			"block removed-flags: kube-controller-manager would not start after the hop: the flag --concurrent-service-syncs is removed (v1.37)",
			"block removed-flags: kubelet would not start after the hop: the feature gate SidecarContainers is removed (v1.37)",
			"warn changed-settings: from v1.37 on, eventRecordQPS: 0 of a kubelet means no limit; before, it meant the default, 50 per second",
		}},
		{name: "flags and gates of kube-proxy that v1.37 refuses", plant: func(w *world) {
			toward137(w)
			c := &w.daemonSets[0].Spec.Template.Spec.Containers[0]
			c.Command = []string{"/usr/local/bin/kube-proxy", "--machine-id-file=/etc/machine-id"}
			w.configs[proxyConfig]["config.conf"] += "featureGates: {SidecarContainers: true}\n"
		}, want: []string{
			"block removed-flags: kube-proxy would not start after the hop: the feature gate SidecarContainers is removed (v1.37)",
			"block removed-flags: kube-proxy would not start after the hop: the flag --machine-id-file is removed (v1.37)",
		}},
		{name: "flags, gates and settings of one kubelet, on a machine that stays", plant: func(w *world) {
			toward137(w)
			w.kubelets.of["worker-0"] = ownSettings()
		}, want: []string{
			"block running-kubelets: the kubelet of 1 node has settings of its own: the feature gate DRAPrioritizedList can only be true (v1.37)",
			"block running-kubelets: the kubelet of 1 node has settings of its own: the feature gate SidecarContainers is removed (v1.37)",
			"block running-kubelets: the kubelet of 1 node has settings of its own: the flag --storage-driver-password is removed (v1.37)",
			"warn running-kubelets: the kubelet of 1 node has settings of its own: the meaning of eventRecordQPS: 0 changes (v1.37)",
		}},
		{name: "flags, gates and settings of one kubelet, on a machine that is replaced", plant: func(w *world) {
			toward137(w)
			w.request.ReplaceControlPlanes, w.request.ReplaceWorkers = true, true
			w.kubelets.of["worker-0"] = ownSettings()
		}, want: []string{
			"warn running-kubelets: the kubelet of 1 node has settings of its own: the feature gate DRAPrioritizedList can only be true (v1.37)",
			"warn running-kubelets: the kubelet of 1 node has settings of its own: the feature gate SidecarContainers is removed (v1.37)",
			"warn running-kubelets: the kubelet of 1 node has settings of its own: the flag --storage-driver-password is removed (v1.37)",
			"warn running-kubelets: the kubelet of 1 node has settings of its own: the meaning of eventRecordQPS: 0 changes (v1.37)",
		}},
		{name: "a removed flag of one kubelet, on a machine that is upgraded in place", plant: func(w *world) {
			toward137(w)
			w.request.ReplaceControlPlanes, w.request.ReplaceWorkers = true, true
			w.kubelets.of["worker-0"] = kubeletReport{config: map[string]any{}, flags: map[string]string{"container-hints": "/etc/hints"}}
			i := slices.IndexFunc(w.nodes, func(n corev1.Node) bool { return n.Name == "worker-0" })
			w.nodes[i].Labels = map[string]string{v1alpha1.LabelInPlace: "true"}
		}, want: []string{"block running-kubelets: the kubelet of 1 node has settings of its own: the flag --container-hints is removed (v1.37)"}},
		{name: "the shared configuration of kubelets is reported once", plant: func(w *world) {
			toward137(w)
			w.configs[kubeletConfig]["kubelet"] += "eventRecordQPS: 0\nfeatureGates: {DRAPrioritizedList: false, SidecarContainers: true}\n"
			r := ownSettings()
			delete(r.flags, "storage-driver-password")
			w.kubelets.of["worker-0"] = r
		}, want: []string{
			"block removed-flags: kubelet would not start after the hop: the feature gate DRAPrioritizedList can only be true (v1.37)",
			"block removed-flags: kubelet would not start after the hop: the feature gate SidecarContainers is removed (v1.37)",
			"warn changed-settings: from v1.37 on, eventRecordQPS: 0 of a kubelet means no limit; before, it meant the default, 50 per second",
		}},
		{name: "a kubelet that does not report its flags, and one that does not answer", plant: func(w *world) {
			toward137(w)
			w.kubelets.of["worker-0"] = kubeletReport{config: map[string]any{}, flagsError: "the feature gate ComponentFlagz is off"}
			w.kubelets.of["control-plane-0"] = kubeletReport{configError: "the API server did not answer in time"}
		}, want: []string{
			"not-checked running-kubelets: not checked what flags, feature gates and settings the kubelet of 1 node runs with",
			"not-checked running-kubelets: not checked whether the kubelet of 1 node has a flag that the hop removes",
		}},
		{name: "a hop that removes no flag of kubelets needs no report of flags", plant: func(w *world) {
			w.kubelets.of["worker-0"] = kubeletReport{config: map[string]any{}, flagsError: "the feature gate ComponentFlagz is off"}
		}, want: nil},
		{name: "the actions that v1.36 requires", plant: func(w *world) {
			c := w.component("kube-controller-manager", "control-plane-0")
			c.args = append(c.args, "--flex-volume-plugin-dir=/opt/flex")
			w.actionObjects = map[actionKey][]string{
				{"resourceslices.resource.k8s.io", ""}:                                     {"resourceslice/worker-0-gpu"},
				{"prometheusrules.monitoring.coreos.com", "volume_operation_total_errors"}: {"prometheusrule/monitoring/volumes"},
			}
		}, want: []string{
			"warn required-actions: v1.36 requires an action: kubeadm no longer mounts the directory of flex-volumes into kube-controller-manager",
			"warn required-actions: v1.36 requires an action: drivers of Dynamic Resource Allocation need more permissions to update the status of ResourceClaims",
			"warn required-actions: v1.36 requires an action: the metric volume_operation_total_errors is renamed to volume_operation_errors_total",
		}},
		{name: "a user who reads the logs of kubelets", plant: func(w *world) {
			toward137(w)
			w.grants = map[string][]grant{"nodes/log": {{"log-reader", []string{"user/eve\x1b[2J"}}}}
		}, want: []string{"warn required-actions: v1.37 requires an action: kubelets log their effective configuration when they start"}},
		{name: "pods with different SELinux labels on one volume", plant: func(w *world) {
			toward137(w)
			w.shareVolume("s0:c1,c2", "s0:c3,c4")
		}, want: []string{"warn required-actions: v1.37 requires an action: SELinuxMount is on: pods with different SELinux labels can no longer share some volumes; hosts without SELinux are not affected"}},
		{name: "a pod with an SELinux label and one without on one volume", plant: func(w *world) {
			toward137(w)
			w.shareVolume("s0:c1,c2", "")
		}, want: []string{"warn required-actions: v1.37 requires an action: SELinuxMount is on: pods with different SELinux labels can no longer share some volumes; hosts without SELinux are not affected"}},
		{name: "pods with one SELinux label on one volume", plant: func(w *world) {
			toward137(w)
			w.shareVolume("s0:c1,c2", "s0:c1,c2")
		}, want: nil},
		{name: "pods with different SELinux labels on a volume whose driver does not mount with labels", plant: func(w *world) {
			toward137(w)
			w.shareVolume("s0:c1,c2", "s0:c3,c4")
			w.labelDrivers = nil
		}, want: nil},
		{name: "flags of etcd that v3.7 refuses, in its pod and in kubeadm's configuration", plant: func(w *world) {
			toward137(w)
			e := w.component("etcd", "control-plane-0")
			e.args = append(e.args, "--experimental-initial-corrupt-check=true")
			w.configs[kubeadmConfig]["ClusterConfiguration"] += "etcd: {local: {extraArgs: [{name: experimental-compaction-batch-limit, value: \"100\"}]}}\n"
		}, want: []string{
			"block removed-flags: etcd would not start after the hop: the flag --experimental-compaction-batch-limit is removed (etcd v3.7)",
			"block removed-flags: etcd would not start after the hop: the flag --experimental-initial-corrupt-check is removed (etcd v3.7)",
		}},
		{name: "the flags of etcd stay while its minor stays", plant: func(w *world) {
			toward137(w)
			w.request.Etcd = "3.6.14-0"
			e := w.component("etcd", "control-plane-0")
			e.args = append(e.args, "--experimental-initial-corrupt-check=true")
		}, want: nil},
		{name: "members of etcd at mixed patches, one of them below the floor", plant: func(w *world) {
			w.addServerNode("control-plane-1", "v1.36.4", "3.6.8-0")
			w.addServerNode("control-plane-2", "v1.36.4", "3.6.14-0")
			toward137(w)
		}, want: []string{"block etcd-members: etcd on control-plane-1 is v3.6.8, and only v3.6.11 can be upgraded to v3.7.0"}},
		{name: "a tag that keeps etcd from its next minor", plant: func(w *world) {
			toward137(w)
			w.configs[kubeadmConfig]["ClusterConfiguration"] += "etcd: {local: {imageTag: 3.6.11-0}}\n"
		}, want: []string{"warn etcd-members: etcd.local.imageTag keeps etcd at v3.6.11: the hop does not bring v3.7.0"}},
		{name: "an etcd outside the cluster", plant: func(w *world) {
			toward137(w)
			w.pods = slices.DeleteFunc(w.pods, func(p pod) bool { return p.component == "etcd" })
			w.configs[kubeadmConfig]["ClusterConfiguration"] += "etcd: {external: {endpoints: [https://10.0.0.9:2379]}}\n"
		}, want: []string{"not-checked etcd-members: etcd is external: its version is not checked"}},
		{name: "a configuration and a gate that kubeadm of v1.37 does not read", plant: func(w *world) {
			toward137(w)
			w.configs[kubeadmConfig]["ClusterConfiguration"] = "apiVersion: kubeadm.k8s.io/v1beta3\nkind: ClusterConfiguration\nkubernetesVersion: v1.36.4\nfeatureGates: {PublicKeysECDSA: true}\n"
		}, want: []string{
			"block kubeadm-config: the ConfigMap kubeadm-config contains a ClusterConfiguration of kubeadm.k8s.io/v1beta3, which kubeadm does not read",
			"block kubeadm-config: kubeadm of v1.37 refuses the feature gate PublicKeysECDSA in its configuration",
		}},
		{name: "stored objects of an API that v1.37 deletes", plant: func(w *world) {
			toward137(w)
			w.writers = map[schema.GroupVersionResource][]writer{
				{Group: "scheduling.k8s.io", Version: "v1alpha2", Resource: "workloads"}: {{manager: "kubectl", at: noon.Add(-day), object: "shop/batch", objects: 3}},
			}
		}, want: []string{"block removed-apis-written: objects of scheduling.k8s.io/v1alpha2 workloads are stored, and v1.37 does not read them"}},
		{name: "kube-proxy in mode ipvs", plant: func(w *world) { w.configs[proxyConfig]["config.conf"] = "mode: ipvs" }, want: []string{
			"warn proxy-mode: kube-proxy runs in mode ipvs, which is deprecated",
		}},
		{name: "an expired API server", plant: func(w *world) { w.servers[0].cert = certificate(365*day, -3*time.Hour) }, want: []string{
			"block api-certificates: the certificate of API server 10.42.0.10:6443 expired 3 hours ago",
		}},
		{name: "an API server that is near its end, and one further", plant: func(w *world) {
			w.servers[0].cert, w.servers[0].ca = certificate(365*day, 6*day), certificate(3650*day, 20*day)
		}, want: []string{
			"block api-certificates: the certificate of API server 10.42.0.10:6443 expires in 6 days",
			"warn api-certificates: the certificate of the cluster's CA expires in 20 days",
		}},
		{name: "a certificate that is renewed every day", plant: func(w *world) { w.servers[0].cert = certificate(day, 10*time.Hour) }, want: nil},
		{name: "a request that nobody approves", plant: func(w *world) {
			w.signings = []certificatesv1.CertificateSigningRequest{
				{ObjectMeta: metav1.ObjectMeta{Name: "csr-1", CreationTimestamp: metav1.Time{Time: noon.Add(-time.Hour)}}},
				{ObjectMeta: metav1.ObjectMeta{Name: "csr-2", CreationTimestamp: metav1.Time{Time: noon.Add(-time.Second)}}},
			}
		}, want: []string{"warn signing-requests: 1 certificate signing request is pending"}},
		{name: "a chart that does not allow the version", plant: func(w *world) {
			w.charts = []helmRelease{{"shop", "web", "web", "1.2.3", ">=1.25.0-0 <1.36.0-0", ""}, {"shop", "db", "db", "2.0.0", ">= 1.20", ""}, {"shop", "x", "x", "1.0.0", "", ""}}
		}, want: []string{"warn helm-charts: the chart web 1.2.3 of Helm release shop/web does not allow Kubernetes v1.36.3"}},
		{name: "a Helm release that does not unpack", plant: func(w *world) { w.unreadableCharts = []string{"shop/web"} }, want: []string{
			"not-checked helm-charts: not checked whether Helm release shop/web allows Kubernetes v1.36.3: it cannot be read",
		}},
		{name: "Helm releases that do not unpack, and Kubernetes stays", plant: func(w *world) {
			w.request.To = w.request.From
			w.unreadableCharts = []string{"shop/web", "shop/x\x1b[2J"}
		}, want: []string{"not-checked helm-charts: not checked whether 2 Helm releases allow Kubernetes v1.35.4: they cannot be read"}},
		{name: "a chart that never allowed it, and Kubernetes stays", plant: func(w *world) {
			w.request.To = w.request.From
			w.charts = []helmRelease{{"shop", "web", "web", "1.2.3", "<1.30.0-0", ""}}
		}, want: nil},
		{name: "a removed API that only the API server's metrics report", plant: func(w *world) {
			w.servers[0].metrics.deprecated = []deprecatedUse{
				{group: "new.k8s.io", version: "v1beta1", resource: "things", removed: "1.36", verbs: map[string]float64{"list": 1}},
				{group: "new.k8s.io", version: "v1beta1", resource: "others", removed: "1.37"},
				{group: "x", removed: "sometime"},
			}
		}, want: []string{
			"warn removed-apis-used: clients read new.k8s.io/v1beta1 things, which v1.36 no longer serves",
			"warn removed-apis-used: clients read new.k8s.io/v1beta1 others, which v1.37, the minor after this hop, no longer serves",
		}},
		{name: "a namespace that admits none of our pods", plant: func(w *world) {
			w.namespaces[ownNamespace] = metav1.ObjectMeta{Name: ownNamespace, Labels: map[string]string{psaLabel: "baseline"}}
		}, want: []string{"block pod-security: the namespace constellation-system enforces the pod security level baseline"}},
		{name: "an aggregated API that is down", plant: func(w *world) {
			a := apiService{ObjectMeta: metav1.ObjectMeta{Name: "v1beta1.metrics.k8s.io"}}
			a.Spec.Service = &struct {
				Namespace string `json:"namespace"`
				Name      string `json:"name"`
				Port      *int32 `json:"port"`
			}{Namespace: "kube-system", Name: "metrics-server"}
			a.Status.Conditions = []metav1.Condition{{Type: "Available", Status: metav1.ConditionFalse, Reason: "MissingEndpoints", Message: "endpoints \x1b[31m are missing"}}
			w.apiServices = []apiService{{ObjectMeta: metav1.ObjectMeta{Name: "v1.apps"}}, a}
		}, want: []string{"block api-services: the API v1beta1.metrics.k8s.io is registered and not available"}},
		{name: "definitions with trouble", plant: func(w *world) {
			broken := kind{ObjectMeta: metav1.ObjectMeta{Name: "things.example.com"}}
			broken.Spec.Versions = []kindVersion{{Name: "v1", Served: true, Storage: true}, {Name: "v1alpha1"}}
			broken.Status.StoredVersions = []string{"v1alpha1", "v1beta1", "v1"}
			broken.Status.Conditions = []apiextensionsv1.CustomResourceDefinitionCondition{
				{Type: apiextensionsv1.NonStructuralSchema, Status: apiextensionsv1.ConditionTrue},
				{Type: apiextensionsv1.Terminating, Status: apiextensionsv1.ConditionTrue},
				{Type: apiextensionsv1.NamesAccepted, Status: apiextensionsv1.ConditionFalse},
				{Type: apiextensionsv1.Established, Status: apiextensionsv1.ConditionFalse},
			}
			w.kinds = []kind{broken}
		}, want: []string{
			"block kinds: the schema of things.example.com is not structural",
			"block kinds: things.example.com is being deleted",
			"block kinds: the names of things.example.com are taken",
			"warn kinds: things.example.com is not served",
			"warn kinds: things.example.com may store objects as v1alpha1, which it does not serve",
			"block kinds: things.example.com may store objects as v1beta1, which it does not have",
		}},
		{name: "a definition whose converter is away", plant: func(w *world) { w.converter(false) }, want: []string{"block kinds: nobody converts things.example.com"}},
		{name: "a definition whose converter is there", plant: func(w *world) { w.converter(true) }, want: nil},
		{name: "a client that reads what goes, and one that writes it", plant: func(w *world) {
			w.request = hop("v1.31.2", "v1.32.0")
			*w = *atVersion(w, "v1.31.2")
			w.configs[kubeletConfig]["kubelet"] += "failCgroupV1: false\n"
			use := func(resource string, verbs map[string]float64) deprecatedUse {
				return deprecatedUse{group: "flowcontrol.apiserver.k8s.io", version: "v1beta3", resource: resource, removed: "1.32", verbs: verbs}
			}
			w.servers[0].metrics.deprecated = []deprecatedUse{use("flowschemas", map[string]float64{"list": 3, "put": 1}), use("prioritylevelconfigurations", map[string]float64{"watch": 2})}
			w.writers = map[schema.GroupVersionResource][]writer{
				{Group: "flowcontrol.apiserver.k8s.io", Version: "v1beta3", Resource: "flowschemas"}: {{manager: "argocd\x07-controller", at: noon.Add(-3 * day), object: "/mine", objects: 2}},
			}
		}, want: []string{
			"not-checked etcd-members: not checked whether etcd can be upgraded with the hop",
			"block removed-apis-used: clients write flowcontrol.apiserver.k8s.io/v1beta3 flowschemas, which v1.32 no longer serves",
			"warn removed-apis-used: clients read flowcontrol.apiserver.k8s.io/v1beta3 prioritylevelconfigurations, which v1.32 no longer serves",
		}},
		{name: "objects written long ago through what goes", plant: func(w *world) {
			w.request = hop("v1.31.2", "v1.32.0")
			*w = *atVersion(w, "v1.31.2")
			w.writers = map[schema.GroupVersionResource][]writer{
				{Group: "flowcontrol.apiserver.k8s.io", Version: "v1beta3", Resource: "flowschemas"}: {{manager: "kubectl", at: noon.Add(-300 * day), object: "/mine", objects: 1}},
			}
		}, want: []string{
			"not-checked etcd-members: not checked whether etcd can be upgraded with the hop",
			"warn removed-apis-written: objects were written through flowcontrol.apiserver.k8s.io/v1beta3 flowschemas, which v1.32 no longer serves",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := clean()
			tt.plant(w)
			w.answer()
			var got []string
			for _, c := range platformChecks() {
				if slices.Contains([]string{"permissions", "kubelet-certificates"}, c.id) {
					continue // they ask the cluster
				}
				found := c.find(w, nil)
				for _, f := range found {
					complete(t, f)
				}
				// Each check that reads the data of minors reports that a minor has none.
				data := slices.IndexFunc(found, func(f plan.Finding) bool {
					return f.Severity == plan.NotChecked && strings.HasPrefix(f.Title, "not checked for v") && strings.Contains(f.Detail, "no complete data on")
				})
				if want := c.byData && w.unknownMinors() != ""; want != (data >= 0) {
					t.Errorf("%s: reports that a minor has no data: %t, want %t", c.id, data >= 0, want)
				}
				if data >= 0 {
					found = slices.Delete(found, data, data+1)
				}
				got = append(got, told(found)...)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

// complete fails if a finding lacks what a reader needs, or could do something to a
// terminal.
func complete(t *testing.T, f plan.Finding) {
	t.Helper()
	all := strings.Join(append([]string{f.ID, f.Title, f.Detail, f.Remedy, f.Owner, f.Command}, f.Objects...), "")
	if all != strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return -1
		}
		return r
	}, all) {
		t.Errorf("%s holds control characters: %q", f.ID, all)
	}
	if f.Source == "" || f.Reference == "" || f.Severity == "" {
		t.Errorf("%s lacks where it belongs: %+v", f.ID, f)
	}
	if (f.Severity == plan.Block || f.Severity == plan.Warn) && f.Remedy == "" {
		t.Errorf("%s has no remedy: %+v", f.ID, f)
	}
	if f.Severity == plan.NotChecked && f.Detail == "" {
		t.Errorf("%s does not say why it was not checked: %+v", f.ID, f)
	}
}

// atVersion returns w with everything at v.
func atVersion(w *world, v string) *world {
	w.servers[0].version = v
	w.daemonSets[0].Spec.Template.Spec.Containers[0].Image = "registry.k8s.io/kube-proxy:" + v
	for i := range w.nodes {
		w.nodes[i].Status.NodeInfo.KubeletVersion = v
	}
	for i := range w.pods {
		if p := &w.pods[i]; p.component != "etcd" {
			p.images = []string{"registry.k8s.io/" + p.component + ":" + v}
		}
	}
	return w
}

// toward137 makes w a cluster of v1.36.4 that nothing keeps from v1.37.2.
func toward137(w *world) {
	w.request = hop("v1.36.4", "v1.37.2")
	w.request.Etcd = "3.7.0-0"
	*w = *atVersion(w, "v1.36.4")
	for i := range w.nodes {
		w.nodes[i].Status.NodeInfo.ContainerRuntimeVersion = "containerd://2.1.4"
	}
	w.component("etcd", "control-plane-0").images = []string{"registry.k8s.io/etcd:3.6.11-0"}
}

// ownSettings are of a kubelet that has more than the shared configuration.
func ownSettings() kubeletReport {
	return kubeletReport{
		config: map[string]any{"eventRecordQPS": float64(0), "featureGates": map[string]any{"SidecarContainers": true, "DRAPrioritizedList": false, "ContextualLogging": true}},
		flags: map[string]string{
			"storage-driver-password": "secret", // the others have the values of a kubelet without these flags
			"storage-driver-user":     "root", "machine-id-file": "/etc/machine-id,/var/lib/dbus/machine-id", "enable-load-reader": "false", "node-ip": "10.42.0.10",
		},
	}
}

// shareVolume adds two pods with these SELinux labels and a volume that both use.
func (w *world) shareVolume(labels ...string) {
	w.labelDrivers = map[string]bool{"csi.example.com": true}
	claim := corev1.PersistentVolumeClaim{}
	claim.Spec.VolumeName = "pv-1"
	w.claims = map[types.NamespacedName]corev1.PersistentVolumeClaim{{Namespace: "shop", Name: "data"}: claim}
	pv := corev1.PersistentVolume{}
	pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: "csi.example.com"}
	w.volumes = map[string]corev1.PersistentVolume{"pv-1": pv}
	for i, label := range labels {
		w.pods = append(w.pods, pod{namespace: "shop", name: fmt.Sprintf("web-%d", i), node: "worker-0", ready: true, claims: []string{"data"}, seLinux: label})
	}
}

func TestValuesOfFlagsAreNotReported(t *testing.T) {
	w := clean()
	toward137(w)
	w.kubelets.of["worker-0"] = ownSettings()
	w.answer()
	for _, f := range runningKubelets(w, nil) {
		if strings.Contains(fmt.Sprintf("%+v", f), "secret") {
			t.Errorf("a finding has a password: %+v", f)
		}
	}
}

func TestSELinuxLabelsOfPods(t *testing.T) {
	level := func(l string) *corev1.SELinuxOptions { return &corev1.SELinuxOptions{Level: l} }
	for _, tt := range []struct {
		name string
		spec corev1.PodSpec
		want string
	}{
		{name: "none", spec: corev1.PodSpec{Containers: []corev1.Container{{}}}, want: ""},
		{name: "the pod's", spec: corev1.PodSpec{SecurityContext: &corev1.PodSecurityContext{SELinuxOptions: level("s0:c1")}}, want: ":::s0:c1"},
		{name: "a container's", spec: corev1.PodSpec{
			SecurityContext: &corev1.PodSecurityContext{SELinuxOptions: level("s0:c1")},
			Containers:      []corev1.Container{{SecurityContext: &corev1.SecurityContext{SELinuxOptions: level("s0:c2")}}},
		}, want: ":::s0:c2"},
		{name: "opted out", spec: corev1.PodSpec{SecurityContext: &corev1.PodSecurityContext{SELinuxOptions: level("s0:c1"), SELinuxChangePolicy: new(corev1.SELinuxChangePolicyRecursive)}}, want: ""},
	} {
		if got := seLinuxLabel(&corev1.Pod{Spec: tt.spec}); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// A hop to minors that are newer than the data blocks nothing for being unknown. What the linked
// types and the API servers announce is found, everything else is not checked.
func TestMinorsNewerThanTheData(t *testing.T) {
	w := clean()
	toward137(w)
	*w = *atVersion(w, "v1.38.1")
	w.request = hop("v1.38.1", "v1.39.0")
	w.servers[0].metrics.deprecated = []deprecatedUse{{group: "new.k8s.io", version: "v1beta1", resource: "things", removed: "1.39", verbs: map[string]float64{"list": 1}}}
	w.served = []schema.GroupVersion{
		{Group: "apps", Version: "v1"},
		{Group: "resource.k8s.io", Version: "v1beta2"},
		{Group: "new.k8s.io", Version: "v1beta1"},
		{Group: "metrics.k8s.io", Version: "v1beta1"},
		{Group: "things.example.com", Version: "v1alpha1"},
		{Group: "new.k8s.io", Version: "v1alpha1"},
	}
	s := apiService{}
	s.Spec.Service = &struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
		Port      *int32 `json:"port"`
	}{}
	s.Spec.Group, s.Spec.Version = "metrics.k8s.io", "v1beta1"
	s.Status.Conditions = []metav1.Condition{{Type: "Available", Status: metav1.ConditionTrue}}
	w.apiServices = []apiService{s}
	w.answer()
	var found []plan.Finding
	unchecked := map[string]bool{}
	for _, c := range platformChecks() {
		if slices.Contains([]string{"permissions", "kubelet-certificates"}, c.id) {
			continue
		}
		for _, f := range c.find(w, nil) {
			switch {
			case f.Severity == plan.Block:
				t.Errorf("%s blocks: %s", f.ID, f.Title)
			case f.Severity == plan.NotChecked:
				unchecked[f.ID] = true
			case f.Severity == plan.Info && c.byData:
				t.Errorf("%s is ok, although nothing is known about v1.39", f.ID)
			}
			found = append(found, f)
		}
	}
	for _, id := range []string{
		"kubeadm-config", "removed-flags", "changed-settings", "container-runtime", "cgroups", "running-kubelets", "required-actions", "removed-apis-used", "removed-apis-written", "etcd-members",
	} {
		if !unchecked[id] {
			t.Errorf("%s does not report that it was not checked", id)
		}
	}
	if got := told(found); !slices.Contains(got, "warn removed-apis-used: clients read new.k8s.io/v1beta1 things, which v1.39 no longer serves") {
		t.Errorf("what the API server announces is not found: %v", got)
	}
	i := slices.IndexFunc(found, func(f plan.Finding) bool { return f.ID == "removed-apis-used" && f.Severity == plan.NotChecked })
	if want := "served, and newer than the types: new.k8s.io/v1beta1, new.k8s.io/v1alpha1"; i < 0 || !strings.HasSuffix(found[i].Detail, want) {
		t.Errorf("the finding is %+v, want %q", found[max(i, 0)], want)
	}
}

// converter adds a definition with a conversion webhook whose service has an endpoint.
func (w *world) converter(ready bool) {
	k := kind{ObjectMeta: metav1.ObjectMeta{Name: "things.example.com"}}
	k.Spec.Convert = &apiextensionsv1.CustomResourceConversion{Webhook: &apiextensionsv1.WebhookConversion{
		ClientConfig: &apiextensionsv1.WebhookClientConfig{Service: &apiextensionsv1.ServiceReference{Namespace: "shop", Name: "convert"}},
	}}
	w.kinds = []kind{k}
	w.services = map[types.NamespacedName]corev1.Service{{Namespace: "shop", Name: "convert"}: {}}
	w.slices = []discoveryv1.EndpointSlice{{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Labels: map[string]string{discoveryv1.LabelServiceName: "convert"}},
		Endpoints:  []discoveryv1.Endpoint{{Conditions: discoveryv1.EndpointConditions{Ready: new(ready)}}},
	}}
}

func TestAFindingAboutARemovedAPINamesWhoWroteAndWhen(t *testing.T) {
	w := atVersion(clean(), "v1.31.2")
	w.request = hop("v1.31.2", "v1.32.0")
	w.servers[0].metrics.deprecated = []deprecatedUse{{group: "flowcontrol.apiserver.k8s.io", version: "v1beta3", resource: "flowschemas", verbs: map[string]float64{"put": 1, "get": 4}}}
	w.writers = map[schema.GroupVersionResource][]writer{
		{Group: "flowcontrol.apiserver.k8s.io", Version: "v1beta3", Resource: "flowschemas"}: {
			{manager: "argocd-controller", at: noon.Add(-3 * day), object: "/mine", objects: 2}, {manager: "kubectl", at: noon.Add(-90 * day), object: "/mine", objects: 1},
		},
	}
	want := []plan.Finding{{
		ID: "removed-apis-used", Severity: plan.Block, Source: "apis", Reference: deprecationGuide,
		Title:  "clients write flowcontrol.apiserver.k8s.io/v1beta3 flowschemas, which v1.32 no longer serves",
		Detail: "requests since 2026-11-21 11:00 UTC, when the newest API server process started: get 4, put 1; last written by argocd-controller on 2026-11-18 12:00 UTC: /mine, of 2 objects; before by kubectl",
		Owner:  "argocd-controller", Objects: []string{"flowschema/mine"},
		Remedy: "change argocd-controller to flowcontrol.apiserver.k8s.io/v1, then run the check again; `kubectl convert` converts manifests",
	}}
	i := slices.IndexFunc(apiChecks, func(c checkItem) bool { return c.id == "removed-apis-used" })
	if d := cmp.Diff(want, apiChecks[i].find(w, nil)[:1]); d != "" {
		t.Error(d)
	}
}

func TestRemovedAPIsAreThoseOfTheHop(t *testing.T) {
	for _, tt := range []struct {
		from, to string
		want     []string
	}{
		{from: "v1.35.4", to: "v1.36.3", want: []string{"scheduling.k8s.io/v1alpha1 workloads"}},
		{from: "v1.35.1", to: "v1.35.4", want: nil},
		{from: "v1.34.4", to: "v1.35.4", want: []string{
			"certificates.k8s.io/v1alpha1 podcertificaterequests", "storage.k8s.io/v1alpha1 volumeattributesclasses", "storagemigration.k8s.io/v1alpha1 storageversionmigrations",
		}},
		{from: "v1.36.3", to: "v1.37.0", want: []string{
			"certificates.k8s.io/v1alpha1 clustertrustbundles", "networking.k8s.io/v1beta1 ipaddresses", "networking.k8s.io/v1beta1 servicecidrs",
			"scheduling.k8s.io/v1alpha2 podgroups", "scheduling.k8s.io/v1alpha2 workloads", "storage.k8s.io/v1beta1 volumeattributesclasses",
		}},
		{from: "v1.24.0", to: "v1.26.0", want: nil}, // see below: too many to list, but these must be there
	} {
		var got []string
		for _, a := range removedAPIs(version.MustParse(tt.from), version.MustParse(tt.to)) {
			got = append(got, a.title())
		}
		if tt.from == "v1.24.0" {
			for _, want := range []string{"policy/v1beta1 podsecuritypolicies", "autoscaling/v2beta1 horizontalpodautoscalers", "autoscaling/v2beta2 horizontalpodautoscalers", "batch/v1beta1 cronjobs", "policy/v1beta1 poddisruptionbudgets"} {
				if !slices.Contains(got, want) {
					t.Errorf("%s to %s lacks %s", tt.from, tt.to, want)
				}
			}
			continue
		}
		slices.Sort(got)
		if d := cmp.Diff(tt.want, got); d != "" {
			t.Errorf("%s to %s: %s", tt.from, tt.to, d)
		}
	}
}

// The data of the minors that are known lists what the linked types say about them.
func TestDataHasTheRemovalsOfTheLinkedTypes(t *testing.T) {
	listed := map[schema.GroupVersionResource]int{}
	for _, m := range lifecycle.Minors() {
		for _, a := range m.APIs {
			listed[schema.GroupVersionResource{Group: a.Group, Version: a.Version, Resource: a.Resource}] = m.Number()
		}
	}
	for _, a := range linkedRemovals() {
		n, ok := listed[a.resource]
		if m, known := lifecycle.Of(minorNumber(a.minor)); known && !m.Partial && !ok {
			t.Errorf("the data of %s lacks %s", m.Kubernetes, a.title())
		}
		if ok && n != a.minor {
			t.Errorf("the data says that v1.%d removes %s, and its type says v1.%d", n, a.title(), a.minor)
		}
	}
}

func TestObjectsAreReadThroughAVersionThatStays(t *testing.T) {
	for _, a := range knownRemovals() {
		to := version.MustParse(fmt.Sprintf("v1.%d.0", a.minor))
		for _, s := range survivors([]removedAPI{a}, to) {
			if s == a.resource || slices.ContainsFunc(knownRemovals(), func(b removedAPI) bool { return b.resource == s && b.minor <= a.minor }) {
				t.Errorf("%s is read through %s, which goes", a.title(), s)
			}
		}
	}
}

func TestWritersAreReadFromMetadata(t *testing.T) {
	at := metav1.NewTime(noon)
	object := func(name string, fields ...metav1.ManagedFieldsEntry) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "shop", ManagedFields: fields}}
	}
	applied := object("c")
	applied.Annotations = map[string]string{corev1.LastAppliedConfigAnnotation: `{"apiVersion":"batch/v1beta1","kind":"CronJob"}`}
	other := object("d")
	other.Annotations = map[string]string{corev1.LastAppliedConfigAnnotation: `{"apiVersion":"batch/v1"`}
	got := map[string]*writer{}
	for _, o := range []*metav1.PartialObjectMetadata{
		object("a", metav1.ManagedFieldsEntry{Manager: "argocd", Operation: "Apply", APIVersion: "batch/v1beta1", Time: &at}, metav1.ManagedFieldsEntry{Manager: "kcm", APIVersion: "batch/v1beta1", Subresource: "status", Time: &at}),
		object("b", metav1.ManagedFieldsEntry{Manager: "argocd", APIVersion: "batch/v1beta1", Time: &metav1.Time{Time: noon.Add(-day)}}, metav1.ManagedFieldsEntry{Manager: "helm", APIVersion: "batch/v1", Time: &at}),
		applied, other,
	} {
		note(got, o, "batch/v1beta1")
	}
	want := map[string]writer{
		"argocd":        {manager: "argocd", operation: "Apply", at: noon, object: "/shop/a", objects: 2},
		"kubectl apply": {manager: "kubectl apply", operation: "Apply", object: "/shop/c", objects: 1},
	}
	flat := map[string]writer{}
	for k, v := range got {
		flat[k] = *v
	}
	if d := cmp.Diff(want, flat, cmp.AllowUnexported(writer{})); d != "" {
		t.Error(d)
	}
}

func TestMetricsAreRead(t *testing.T) {
	got, err := parseMetrics([]byte(`# HELP process_start_time_seconds Start time.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7952408e+09
# TYPE apiserver_requested_deprecated_apis gauge
apiserver_requested_deprecated_apis{group="batch",removed_release="1.25",resource="cronjobs",subresource="",version="v1beta1"} 1
# TYPE apiserver_request_total counter
apiserver_request_total{code="200",group="batch",resource="cronjobs",verb="LIST",version="v1beta1"} 3
apiserver_request_total{code="201",group="batch",resource="cronjobs",verb="POST",version="v1beta1"} 2
apiserver_request_total{code="409",group="batch",resource="cronjobs",verb="POST",version="v1beta1"} 1
apiserver_request_total{code="200",group="batch",resource="cronjobs",verb="LIST",version="v1"} 90
# TYPE apiserver_request_duration_seconds histogram
apiserver_request_duration_seconds_bucket{le="1"} 9
# TYPE apiserver_storage_size_bytes gauge
apiserver_storage_size_bytes{storage_cluster_id="etcd-0"} 2.097152e+07
# TYPE apiserver_flowcontrol_rejected_requests_total counter
apiserver_flowcontrol_rejected_requests_total{flow_schema="a",priority_level="workload-low",reason="queue-full"} 7
apiserver_flowcontrol_rejected_requests_total{flow_schema="b",priority_level="catch-all",reason="queue-full"} 1
`))
	if err != nil {
		t.Fatal(err)
	}
	want := &serverMetrics{
		started: time.Unix(1795240800, 0).UTC(), storage: map[string]int64{"etcd-0": 20 << 20}, requests: 96, rejected: 8, rejectedLevel: "workload-low",
		deprecated: []deprecatedUse{{"batch", "v1beta1", "cronjobs", "1.25", map[string]float64{"list": 3, "post": 3}}},
	}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(serverMetrics{}, deprecatedUse{})); d != "" {
		t.Error(d)
	}
	for _, bad := range []string{"", "<html>", "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds{ 1\n"} {
		if _, err := parseMetrics([]byte(bad)); err == nil {
			t.Errorf("%q passes for metrics", bad)
		}
	}
}

func TestHelmReleasesAreUnpacked(t *testing.T) {
	pack := func(text string, zip bool) []byte {
		var b bytes.Buffer
		if zip {
			z := gzip.NewWriter(&b)
			if _, err := z.Write([]byte(text)); err != nil {
				t.Fatal(err)
			}
			if err := z.Close(); err != nil {
				t.Fatal(err)
			}
		} else {
			b.WriteString(text)
		}
		return []byte(base64.StdEncoding.EncodeToString(b.Bytes()))
	}
	const text = `{"name":"web","manifest":"---","chart":{"metadata":{"name":"web","version":"1.2.3","kubeVersion":"<1.36.0-0","appVersion":"v9"},"templates":[]}}`
	for _, zip := range []bool{true, false} {
		got, err := readChart(pack(text, zip))
		if want := (helmRelease{chart: "web", version: "1.2.3", kubeVersion: "<1.36.0-0", appVersion: "v9"}); err != nil || got != want {
			t.Errorf("packed %t: %+v %v", zip, got, err)
		}
	}
	cut := func(n int) []byte {
		b, err := base64.StdEncoding.DecodeString(string(pack(text, true)))
		if err != nil {
			t.Fatal(err)
		}
		return []byte(base64.StdEncoding.EncodeToString(b[:len(b)-n]))
	}
	for _, bad := range [][]byte{nil, []byte("!"), pack("{", true), cut(1), cut(8), cut(60), []byte(base64.StdEncoding.EncodeToString([]byte{0x1f, 0x8b, 1}))} {
		if _, err := readChart(bad); err == nil {
			t.Errorf("%q is taken for a release", bad)
		}
	}
}

func TestWhatIsPrintedDoesNothingToATerminal(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"kube-proxy v1.35.4", "kube-proxy v1.35.4"},
		{"größer ✓", "größer ✓"},
		{"a\x1b[31mb\nc\td", `a\x1b[31mb\nc\td`},
		{"\u202egnp.exe", `\u202egnp.exe`},
		{"\xff\xfe", `\xff\xfe`},
		{strings.Repeat("x", 400), strings.Repeat("x", 300) + "..."},
	} {
		if got := printable(tt.in); got != tt.want {
			t.Errorf("%q is printed as %q, want %q", tt.in, got, tt.want)
		}
	}
}

func TestFindingsAreSortedByHowBadTheyAre(t *testing.T) {
	give := func(s ...plan.Severity) func(*world, *probe) []plan.Finding {
		return func(*world, *probe) (out []plan.Finding) {
			for _, s := range s {
				out = append(out, plan.Finding{Severity: s, Title: string(s)})
			}
			return out
		}
	}
	all := []checkItem{
		{id: "a", title: "a is well", run: give()},
		{id: "b", title: "b is well", run: give("", plan.Block)},
		{id: "c", title: "c is well", needs: []source{sourcePods, sourceNodes}, run: give(plan.Block)},
		{id: "d", title: "d is well", run: give(plan.Block)},
	}
	w := &world{unread: map[source]string{sourceNodes: "forbidden"}}
	var events []string
	found, err := runChecks(t.Context(), all, w, probe{}, func(e plan.Event) {
		events = append(events, e.Object+" "+e.State)
	})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range found {
		got = append(got, fmt.Sprintf("%s %s %s %s", f.Severity, f.ID, f.Title, f.Detail))
	}
	want := []string{
		"block b block ", "block d block ", "warn b  ",
		"not-checked c not checked whether c is well nodes: forbidden", "ok a a is well ",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	slices.Sort(events)
	wantEvents := []string{"a ok", "b block", "b warn", "c not-checked", "d block"}
	if d := cmp.Diff(wantEvents, events); d != "" {
		t.Error(d)
	}
}

func TestEveryCheckIsNamedOnceAndSaysWhereItComesFrom(t *testing.T) {
	ids := map[string]bool{}
	provided := (&reader{core: served(t), w: &world{}}).sources()
	for _, c := range checks() {
		if ids[c.id] || c.id == "" || strings.ToLower(c.id) != c.id || strings.ContainsAny(c.id, " _") {
			t.Errorf("check %q: its ID is not its own, or not kebab-case", c.id)
		}
		ids[c.id] = true
		if c.title == "" || c.area == "" || !strings.HasPrefix(c.ref, "https://") {
			t.Errorf("check %s: title %q, area %q, reference %q", c.id, c.title, c.area, c.ref)
		}
		for _, s := range c.needs {
			if _, ok := provided[s]; !ok && s != sourceMetrics {
				t.Errorf("check %s needs %q, which no reader provides", c.id, s)
			}
		}
	}
	if len(ids) < 40 {
		t.Errorf("%d checks: %v", len(ids), slices.Sorted(maps.Keys(ids)))
	}
}

func TestReasonsAreWords(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want string
	}{
		{&url.Error{Op: "Get", URL: "https://10.0.0.1:6443/api/v1/pods", Err: errors.New("connection refused")}, "the API server does not answer: connection refused"},
		{fmt.Errorf("read pods: %w", errors.New("a\x1bb")), `the API server does not answer: read pods: a\x1bb`},
		{apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", nil), "forbidden: the kubeconfig's user may not read it"},
		{apierrors.NewTooManyRequests("slow down", 1), "the API server is overloaded"},
		{apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, ""), "the API server does not serve it"},
		{apierrors.NewInternalError(errors.New("no\nleader")), `Internal error occurred: no\nleader`},
		{context.DeadlineExceeded, "the API server did not answer in time"},
	} {
		if got := reason(t.Context(), tt.err); got != tt.want {
			t.Errorf("%v: %q, want %q", tt.err, got, tt.want)
		}
	}
}

func TestWhatOnlyLooksIsNoCommand(t *testing.T) {
	w := clean()
	w.converter(false)
	found := kindsHealthy(w, nil)
	if len(found) != 1 || found[0].Command != "" || !strings.Contains(found[0].Remedy, "inspect with `kubectl -n ") {
		t.Errorf("findings %+v, want one with a look as remedy", found)
	}
}

func TestKubectlIsNobodyToAsk(t *testing.T) {
	at := func(hour int) *metav1.Time { return new(metav1.NewTime(noon.Add(time.Duration(hour) * time.Hour))) }
	for _, tt := range []struct {
		name   string
		fields []metav1.ManagedFieldsEntry
		want   string
	}{
		{name: "nobody", want: "namespace shop"},
		{name: "an operator", fields: []metav1.ManagedFieldsEntry{{Manager: "rancher", Time: at(1)}}, want: "namespace shop, rancher"},
		{name: "kubectl alone", fields: []metav1.ManagedFieldsEntry{{Manager: "kubectl-client-side-apply", Time: at(1)}, {Manager: "kubectl", Time: at(2)}}, want: "namespace shop"},
		{name: "kubectl after an operator", fields: []metav1.ManagedFieldsEntry{{Manager: "rancher", Time: at(1)}, {Manager: "kubectl-edit", Time: at(2)}, {Manager: "kubectl-patch", Time: at(3)}}, want: "namespace shop, rancher"},
	} {
		if got := keeperOf(&metav1.ObjectMeta{Namespace: "shop", ManagedFields: tt.fields}); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// The remedy of a removed flag names the object that has it, and a command that edits that object.
func TestRemovedFlagsAreMendedWhereTheyAre(t *testing.T) {
	w := clean()
	toward137(w)
	w.configs[kubeletConfig]["kubelet"] += "featureGates: {SidecarContainers: true}\n"
	w.configs[kubeadmConfig]["ClusterConfiguration"] = strings.Replace(w.configs[kubeadmConfig]["ClusterConfiguration"], `scheduler: {extraArgs: [`, `scheduler: {extraArgs: [{name: feature-gates, value: "kube:RetryGenerateName=true"}, `, 1)
	c := w.component("kube-controller-manager", "control-plane-0")
	c.args = append(c.args, "--concurrent-service-syncs=2")
	got := map[string]string{}
	for _, f := range flagsRemoved(w, nil) {
		component, _, _ := strings.Cut(f.Title, " ")
		got[component] = f.Command + " | " + f.Remedy
	}
	want := map[string]string{
		"kubelet":                 "kubectl -n kube-system edit configmap kubelet-config | remove it from the ConfigMap: the upgrade writes it to every node",
		"kube-scheduler":          "kubectl -n kube-system edit configmap kubeadm-config | remove it from ClusterConfiguration: running pods do not have it, but the upgrade would set it",
		"kube-controller-manager": " | remove it from the ConfigMap, then run `kubeadm upgrade apply` or `kubeadm upgrade node`, which rewrites the manifests",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("want and got:\n%s", d)
	}
}
