package preflight

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"constellation/engine/plan"
	"constellation/engine/version"
)

const (
	kubeadmGuide = "https://kubernetes.io/docs/tasks/administer-cluster/kubeadm/kubeadm-upgrade/"
	gatesRemoved = "https://kubernetes.io/docs/reference/command-line-tools-reference/feature-gates-removed/"
	cgroupGuide  = "https://kubernetes.io/docs/concepts/architecture/cgroups/"
	proxyModes   = "https://kubernetes.io/docs/reference/networking/virtual-ips/#proxy-modes"
	runtimeGuide = "https://kubernetes.io/docs/setup/production-environment/container-runtimes/"
)

var kubeadmChecks = []checkItem{
	{
		id: "kubeadm-config", title: "kubeadm can read its configuration in the cluster", area: "versions", ref: kubeadmGuide,
		needs: []source{sourceConfigs, sourcePods}, run: kubeadmReadable,
	},
	{
		id: "removed-flags", title: "no component is started with a flag or feature gate that the hop removes", area: "versions", ref: gatesRemoved,
		needs: []source{sourceConfigs, sourcePods}, run: flagsRemoved,
	},
	{
		id: "proxy-mode", title: "kube-proxy runs in a supported mode", area: "nodes", ref: proxyModes,
		needs: []source{sourceConfigs}, run: proxyMode,
	},
	{
		id: "container-runtime", title: "the container runtimes are new enough for the kubelets of the hop", area: "nodes", ref: runtimeGuide,
		needs: []source{sourceNodes}, run: containerRuntimes,
	},
	{
		id: "cgroups", title: "kubelets of the hop support the hosts' cgroup version", area: "nodes", ref: cgroupGuide,
		needs: []source{sourceNodes, sourceConfigs}, run: cgroupVersions,
	},
}

// lifecycle is what a minor version of Kubernetes does to flags and feature gates.
type lifecycle struct {
	// flags that a component refuses from then on.
	flags map[string][]string
	// removed gates: a component that names one does not start.
	gates []string
	// locked gates accept this value only.
	locked map[string]bool
}

// firstKnown is the minor version before the first of lifecycles.
const firstKnown = 34

// lifecycles by minor version. Source: gates, the difference between minor versions of
// test/compatibility_lifecycle/reference/versioned_feature_list.yaml in
// k8s.io/kubernetes v1.34.4, v1.35.4 and v1.36.3; flags, the difference of what the
// option packages of the components register there and in k8s.io/apiserver,
// component-base, controller-manager, cloud-provider, kube-scheduler and kubelet.
var lifecycles = map[int]lifecycle{
	35: {
		flags: map[string][]string{"kubelet": {"pod-infra-container-image"}},
		gates: []string{
			"AllowServiceLBStatusOnNonLB", "ComponentSLIs", "CronJobsScheduledAnnotation", "LoadBalancerIPMode", "PodIndexLabel",
			"ProbeHostPodSecurityStandards", "SizeMemoryBackedVolumes", "StatefulSetAutoDeletePVC", "StrictCostEnforcementForVAP",
			"StrictCostEnforcementForWebhooks", "UserNamespacesPodSecurityStandards",
		},
		locked: map[string]bool{
			"AggregatedDiscoveryRemoveBetaType": true, "AllowOverwriteTerminationGracePeriodSeconds": false, "DisableAllocatorDualWrite": true,
			"DynamicResourceAllocation": true, "ExecProbeTimeout": true, "ImageMaximumGCAge": true, "InPlacePodVerticalScaling": true, "JobManagedBy": true,
			"PodObservedGenerationTracking": true, "PreferSameTrafficDistribution": true, "SupplementalGroupsPolicy": true, "SystemdWatchdog": true,
		},
	},
	36: {
		gates: []string{
			"CPUCFSQuotaPeriod", "CSIMigrationPortworx", "HonorPVReclaimPolicy", "InPlacePodVerticalScalingAllocatedStatus", "InTreePluginPortworxUnregister",
			"MemoryManager", "RuntimeClassInImageCriAPI", "ServiceTrafficDistribution", "StructuredAuthorizationConfiguration", "TopologyAwareHints",
			"WatchFromStorageWithoutResourceVersion",
		},
		locked: map[string]bool{
			"CSIServiceAccountTokenSecrets": true, "DRAAdminAccess": true, "DeclarativeValidation": true, "DisableNodeKubeProxyVersion": true,
			"ExternalServiceAccountTokenSigner": true, "GitRepoVolumeDriver": false, "ImageVolume": true, "KubeletFineGrainedAuthz": true, "KubeletPSI": true,
			"KubeletPodResourcesDynamicResources": true, "KubeletPodResourcesGet": true, "MutableCSINodeAllocatableCount": true, "NodeLogQuery": true,
			"ProcMountType": true, "SELinuxChangePolicy": true, "SELinuxMountReadWriteOncePod": true, "SeparateCacheWatchRPC": false,
			"UserNamespacesSupport": true, "VolumeAttributesClass": true,
		},
	},
}

// readableConfigs are the versions that kubeadm of the supported releases reads.
var readableConfigs = map[string][]string{
	"ClusterConfiguration": {"kubeadm.k8s.io/v1beta4", "kubeadm.k8s.io/v1beta3"},
	"KubeletConfiguration": {"kubelet.config.k8s.io/v1beta1"},
}

// clusterConfiguration is the part of kubeadm's configuration that checks use.
type clusterConfiguration struct {
	APIVersion        string          `json:"apiVersion"`
	Kind              string          `json:"kind"`
	KubernetesVersion string          `json:"kubernetesVersion"`
	FeatureGates      map[string]bool `json:"featureGates"`
	APIServer         extraArgs       `json:"apiServer"`
	ControllerManager extraArgs       `json:"controllerManager"`
	Scheduler         extraArgs       `json:"scheduler"`
}

// extraArgs is a map in v1beta3 and a list in v1beta4.
type extraArgs struct {
	ExtraArgs any `json:"extraArgs"`
}

func (a extraArgs) flags() (out []string) {
	switch x := a.ExtraArgs.(type) {
	case map[string]any:
		for k, v := range x {
			out = append(out, fmt.Sprintf("--%s=%v", k, v))
		}
	case []any:
		for _, e := range x {
			if m, ok := e.(map[string]any); ok {
				out = append(out, fmt.Sprintf("--%v=%v", m["name"], m["value"]))
			}
		}
	}
	slices.Sort(out)
	return out
}

// kubeletConfiguration is the part of the kubelets' configuration that checks use.
type kubeletConfiguration struct {
	APIVersion   string          `json:"apiVersion"`
	Kind         string          `json:"kind"`
	FeatureGates map[string]bool `json:"featureGates"`
	FailCgroupV1 *bool           `json:"failCgroupV1"`
	// ServerTLSBootstrap makes kubelets request and renew their serving certificates.
	ServerTLSBootstrap bool `json:"serverTLSBootstrap"`
}

// madeByKubeadm reports whether kubeadm created the control plane.
func (w *world) madeByKubeadm() bool {
	return w.configs[kubeadmConfig] != nil || slices.ContainsFunc(w.pods, func(p pod) bool { return p.component == "kube-apiserver" && p.mirror })
}

// kubeadmReadable parses the ConfigMaps like kubeadm.
func kubeadmReadable(w *world, _ *probe) (out []plan.Finding) {
	if !w.madeByKubeadm() {
		return nil
	}
	for _, c := range []struct{ name, key, kind string }{
		{kubeadmConfig, "ClusterConfiguration", "ClusterConfiguration"},
		{kubeletConfig, "kubelet", "KubeletConfiguration"},
	} {
		f := plan.Finding{
			Severity: plan.Block, Objects: []string{object("ConfigMap", "kube-system", c.name)},
			Remedy: "recreate it: run `kubeadm init phase upload-config all --config FILE` on a control plane",
		}
		var have struct {
			APIVersion        string `json:"apiVersion"`
			Kind              string `json:"kind"`
			KubernetesVersion string `json:"kubernetesVersion"`
		}
		data, ok := w.configs[c.name]
		err := yaml.Unmarshal([]byte(data[c.key]), &have)
		switch {
		case !ok:
			f.Title = fmt.Sprintf("the ConfigMap %s is missing, and `kubeadm upgrade` needs it", c.name)
		case data[c.key] == "":
			f.Title = fmt.Sprintf("the ConfigMap %s has no key %s, and `kubeadm upgrade` needs it", c.name, c.key)
		case err != nil:
			f.Title, f.Detail = fmt.Sprintf("the ConfigMap %s cannot be read", c.name), printable(err.Error())
		case have.Kind != c.kind || !slices.Contains(readableConfigs[c.kind], have.APIVersion):
			f.Title = fmt.Sprintf("the ConfigMap %s contains a %s of %s, which kubeadm does not read", c.name, cmp.Or(printable(have.Kind), "document"), cmp.Or(printable(have.APIVersion), "no version"))
			f.Remedy = "convert it with `kubeadm config migrate` and write it back"
		case c.name == kubeadmConfig && !parses(have.KubernetesVersion):
			f.Title, f.Detail = "the ConfigMap kubeadm-config has no valid Kubernetes version", fmt.Sprintf("kubernetesVersion: %q", printable(have.KubernetesVersion))
		default:
			continue
		}
		out = append(out, f)
	}
	return out
}

func parses(v string) bool {
	_, err := version.Parse(v)
	return err == nil
}

// flagSource is where flags of a component were found.
type flagSource struct {
	component, where, object string
	flags                    []string
}

// flagsRemoved compares flags and feature gates with those of the hop's versions.
func flagsRemoved(w *world, _ *probe) (out []plan.Finding) {
	if w.request.From.MinorDistance(w.request.To) <= 0 {
		return nil
	}
	var sources []flagSource
	for i := range w.pods {
		if p := &w.pods[i]; len(p.args) > 0 && p.component != "etcd" {
			sources = append(sources, flagSource{p.component, "pod " + p.name, p.object(), p.args})
		}
	}
	if data := w.configs[kubeadmConfig]["ClusterConfiguration"]; data != "" {
		var c clusterConfiguration
		if yaml.Unmarshal([]byte(data), &c) == nil { // kubeadm-config reports it if it cannot be read
			cm := object("ConfigMap", "kube-system", kubeadmConfig)
			for component, flags := range map[string][]string{"kube-apiserver": c.APIServer.flags(), "kube-controller-manager": c.ControllerManager.flags(), "kube-scheduler": c.Scheduler.flags()} {
				sources = append(sources, flagSource{component, "ConfigMap kubeadm-config", cm, flags})
			}
		}
	}
	if data := w.configs[kubeletConfig]["kubelet"]; data != "" {
		var c kubeletConfiguration
		if yaml.Unmarshal([]byte(data), &c) == nil {
			var gates []string
			for g, on := range c.FeatureGates {
				gates = append(gates, fmt.Sprintf("%s=%t", g, on))
			}
			slices.Sort(gates)
			sources = append(sources, flagSource{"kubelet", "ConfigMap kubelet-config", object("ConfigMap", "kube-system", kubeletConfig), []string{"--feature-gates=" + strings.Join(gates, ",")}})
		}
	}
	// Problem to locations: all pods of a component have the same flags.
	where, objects := map[[2]string][]string{}, map[[2]string][]string{}
	for minor := w.request.From.Minor() + 1; minor <= w.request.To.Minor(); minor++ {
		l, ok := lifecycles[minor]
		if !ok {
			if minor > firstKnown {
				out = append(out, plan.Finding{
					Severity: plan.NotChecked, Title: fmt.Sprintf("not checked whether v1.%d removes a flag or feature gate that is used", minor),
					Detail: "this program has no data on that version", Remedy: "read its changelog",
				})
			}
			continue
		}
		for _, s := range sources {
			for _, problem := range l.problems(s.component, s.flags) {
				key := [2]string{s.component, fmt.Sprintf("%s (v1.%d)", problem, minor)}
				where[key], objects[key] = append(where[key], s.where), append(objects[key], s.object)
			}
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(where), func(a, b [2]string) int { return cmp.Or(cmp.Compare(a[0], b[0]), cmp.Compare(a[1], b[1])) }) {
		out = append(out, plan.Finding{
			Severity: plan.Block, Title: fmt.Sprintf("%s would not start after the hop: %s", key[0], key[1]),
			Detail: "in " + enumerate(first(where[key]), 10), Objects: first(objects[key]),
			Remedy: "remove it from the ConfigMap, then run `kubeadm upgrade apply` or `kubeadm upgrade node`, which rewrites the manifests",
		})
	}
	return out
}

// problems returns the component's flags and gates that the version of l rejects, sorted.
func (l lifecycle) problems(component string, flags []string) (out []string) {
	for _, f := range flags {
		name, value, _ := strings.Cut(strings.TrimLeft(f, "-"), "=")
		if slices.Contains(l.flags[component], name) {
			out = append(out, "the flag --"+name+" is removed")
		}
		if name != "feature-gates" {
			continue
		}
		for gate := range strings.SplitSeq(value, ",") {
			// With emulated versions a gate is written with the component: "kube:Name=true".
			gate, setting, _ := strings.Cut(strings.TrimSpace(gate), "=")
			gate = gate[strings.LastIndexByte(gate, ':')+1:]
			on, err := strconv.ParseBool(setting)
			fixed, locked := l.locked[gate]
			switch {
			case slices.Contains(l.gates, gate):
				out = append(out, "the feature gate "+gate+" is removed")
			case locked && err == nil && on != fixed:
				out = append(out, fmt.Sprintf("the feature gate %s can only be %t", gate, fixed))
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// flagNumber returns the numeric value of a flag.
func flagNumber(args []string, flag string) (n int64, ok bool) {
	for _, a := range args {
		if v, found := strings.CutPrefix(a, flag+"="); found {
			n, err := strconv.ParseInt(v, 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

// proxyMode warns of a deprecated mode.
func proxyMode(w *world, _ *probe) []plan.Finding {
	var c struct {
		Mode string `json:"mode"`
	}
	data := w.configs[proxyConfig]["config.conf"]
	if err := yaml.Unmarshal([]byte(data), &c); err != nil {
		return []plan.Finding{{
			Title: "the configuration of kube-proxy cannot be read", Detail: printable(err.Error()), Objects: []string{object("ConfigMap", "kube-system", proxyConfig)},
			Remedy: "correct the ConfigMap: a restarted kube-proxy would fail to start",
		}}
	}
	if c.Mode != "ipvs" {
		return nil
	}
	return []plan.Finding{{
		Title: "kube-proxy runs in mode ipvs, which is deprecated", Objects: []string{object("ConfigMap", "kube-system", proxyConfig)},
		Remedy: "set mode: nftables in the ConfigMap and restart kube-proxy before a release removes ipvs",
	}}
}

// firstWithoutOldCRI is the first minor version whose kubelet requires a runtime that reports
// its configuration (containerd 2, CRI-O 1.28).
const firstWithoutOldCRI = 37

// containerRuntimes warns of nodes whose runtime the next kubelet does not support.
func containerRuntimes(w *world, _ *probe) []plan.Finding {
	if w.request.From.Minor() >= firstWithoutOldCRI || w.request.To.Minor() < firstWithoutOldCRI {
		return nil
	}
	old := oldRuntimes(w.nodes)
	if len(old) == 0 {
		return nil
	}
	f := plan.Finding{
		Title:  fmt.Sprintf("containerd 1.x runs on %s, and kubelets from v1.%d on need containerd 2", count(len(old), "node"), firstWithoutOldCRI),
		Detail: "nodes: " + enumerate(old, 20), Remedy: "check that the OS image of the hop contains containerd 2",
	}
	for _, n := range old {
		f.Objects = append(f.Objects, object("node", "", n))
	}
	f.Objects = first(f.Objects)
	return []plan.Finding{f}
}

// oldRuntimes are the nodes with containerd 1.x.
func oldRuntimes(nodes []corev1.Node) (out []string) {
	for i := range nodes {
		if v, ok := strings.CutPrefix(nodes[i].Status.NodeInfo.ContainerRuntimeVersion, "containerd://"); ok && strings.HasPrefix(strings.TrimPrefix(v, "v"), "1.") {
			out = append(out, nodes[i].Name)
		}
	}
	return out
}

// firstFailingCgroupV1 is the first minor version whose kubelet does not start on a host with
// cgroup v1 unless its configuration permits it.
const firstFailingCgroupV1 = 35

// cgroupVersions reads the cgroup version from one kubelet of each kind of machine.
func cgroupVersions(w *world, p *probe) []plan.Finding {
	if w.request.From.Minor() >= firstFailingCgroupV1 || w.request.To.Minor() < firstFailingCgroupV1 {
		return nil
	}
	var c kubeletConfiguration
	if data := w.configs[kubeletConfig]["kubelet"]; yaml.Unmarshal([]byte(data), &c) == nil && c.FailCgroupV1 != nil && !*c.FailCgroupV1 {
		return nil
	}
	asked := map[[2]string]bool{}
	var old, silent []string
	for i := range w.nodes {
		n := &w.nodes[i]
		machine := [2]string{n.Status.NodeInfo.OSImage, n.Status.NodeInfo.KernelVersion}
		if asked[machine] {
			continue
		}
		asked[machine] = true
		switch v, err := kubeletCgroup(p, n.Name); {
		case err != nil:
			silent = append(silent, n.Name+": "+reason(p.ctx, err))
		case v == "1":
			old = append(old, n.Name)
		}
		if len(asked) == maxTold {
			break
		}
	}
	var out []plan.Finding
	if len(old) > 0 {
		out = append(out, plan.Finding{
			Severity: plan.Block, Title: fmt.Sprintf("hosts with cgroup v1: kubelets from v1.%d on do not start there", firstFailingCgroupV1), Detail: "for example " + enumerate(old, maxTold),
			Remedy: "use an OS image with cgroup v2, or set failCgroupV1: false in the ConfigMap kubelet-config", Objects: []string{object("ConfigMap", "kube-system", kubeletConfig)},
		})
	}
	if len(silent) > 0 {
		out = append(out, plan.Finding{Severity: plan.NotChecked, Title: "not checked whether hosts have cgroup v2", Detail: enumerate(silent, 5), Remedy: "allow nodes/proxy, or set failCgroupV1: false in the ConfigMap kubelet-config"})
	}
	return out
}

// kubeletCgroup reads the version of cgroups from the metrics of a kubelet.
func kubeletCgroup(p *probe, node string) (string, error) {
	ctx, cancel := context.WithTimeout(p.ctx, serverLimit)
	defer cancel()
	b, err := p.core.CoreV1().RESTClient().Get().Resource("nodes").Name(node).SubResource("proxy").Suffix("metrics").SetHeader("Accept", "text/plain").DoRaw(ctx)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "kubelet_cgroup_version "); ok {
			return strings.TrimSpace(v), nil
		}
	}
	return "", errors.New("the kubelet does not report it")
}
