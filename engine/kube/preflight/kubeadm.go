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

	"constellation/engine/lifecycle"
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
		id: "kubeadm-config", title: "kubeadm can read its configuration in the cluster", area: "versions", ref: kubeadmGuide, byData: true,
		needs: []source{sourceConfigs, sourcePods}, run: kubeadmReadable,
	},
	{
		id: "removed-flags", title: "no component is started with a flag or feature gate that the hop removes", area: "versions", ref: gatesRemoved, byData: true,
		needs: []source{sourceConfigs, sourcePods, sourceDaemonSets}, run: flagsRemoved,
	},
	{
		id: "changed-settings", title: "no setting of the kubelets changes its meaning with the hop", area: "versions", ref: kubeadmGuide, byData: true,
		needs: []source{sourceConfigs}, run: settingsChanged,
	},
	{
		id: "proxy-mode", title: "kube-proxy runs in a supported mode", area: "nodes", ref: proxyModes,
		needs: []source{sourceConfigs}, run: proxyMode,
	},
	{
		id: "container-runtime", title: "the container runtimes are new enough for the kubelets of the hop", area: "nodes", ref: runtimeGuide, byData: true,
		needs: []source{sourceNodes}, run: containerRuntimes,
	},
	{
		id: "cgroups", title: "kubelets of the hop support the hosts' cgroup version", area: "nodes", ref: cgroupGuide, byData: true,
		needs: []source{sourceNodes, sourceConfigs}, run: cgroupVersions,
	},
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
	Etcd              struct {
		Local struct {
			extraArgs
			ImageTag string `json:"imageTag"`
		} `json:"local"`
		External *struct {
			Endpoints []string `json:"endpoints"`
		} `json:"external"`
	} `json:"etcd"`
}

// clusterConfiguration returns kubeadm's configuration; zero if it cannot be read, which
// kubeadm-config reports.
func (w *world) clusterConfiguration() (c clusterConfiguration) {
	if yaml.Unmarshal([]byte(w.configs[kubeadmConfig]["ClusterConfiguration"]), &c) != nil {
		return clusterConfiguration{}
	}
	return c
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

// kubeadmReadable parses the ConfigMaps like the kubeadm of the hop.
func kubeadmReadable(w *world, _ *probe) (out []plan.Finding) {
	if !w.madeByKubeadm() {
		return nil
	}
	for _, c := range []struct {
		name, key, kind string
		reads           func(of version.Version, config string) lifecycle.Answer
	}{
		{kubeadmConfig, "ClusterConfiguration", "ClusterConfiguration", lifecycle.ReadsKubeadmConfig},
		{kubeletConfig, "kubelet", "KubeletConfiguration", lifecycle.ReadsKubeletConfig},
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
		case have.Kind != c.kind || c.reads(w.request.To, have.APIVersion) == lifecycle.No:
			f.Title = fmt.Sprintf("the ConfigMap %s contains a %s of %s, which kubeadm does not read", c.name, cmp.Or(printable(have.Kind), "document"), cmp.Or(printable(have.APIVersion), "no version"))
			f.Remedy = "convert it with `kubeadm config migrate` and write it back"
		case c.name == kubeadmConfig && !parses(have.KubernetesVersion):
			f.Title, f.Detail = "the ConfigMap kubeadm-config has no valid Kubernetes version", fmt.Sprintf("kubernetesVersion: %q", printable(have.KubernetesVersion))
		default:
			continue
		}
		out = append(out, f)
	}
	return append(out, kubeadmGates(w)...)
}

// kubeadmGates finds feature gates of kubeadm itself that the kubeadm of the hop refuses.
func kubeadmGates(w *world) (out []plan.Finding) {
	gates := w.clusterConfiguration().FeatureGates
	for _, m := range w.minorsOfHop() {
		for _, r := range m.Kubeadm {
			for _, gate := range r.RemovedGates {
				if _, ok := gates[gate]; !ok {
					continue
				}
				out = append(out, plan.Finding{
					Severity: plan.Block, Title: fmt.Sprintf("kubeadm of %s refuses the feature gate %s in its configuration", m.Kubernetes, gate),
					Objects: []string{object("ConfigMap", "kube-system", kubeadmConfig)}, Remedy: "remove it from featureGates of ClusterConfiguration",
					Command: "kubectl -n kube-system edit configmap " + kubeadmConfig, Reference: m.Sources[r.Source],
				})
			}
		}
	}
	return out
}

// minorsOfHop returns the data of the minors that the hop goes to; those without data are
// left out.
func (w *world) minorsOfHop() (out []*lifecycle.Minor) {
	for n := w.request.From.Minor() + 1; n <= w.request.To.Minor(); n++ {
		if m, ok := lifecycle.Of(minorNumber(n)); ok {
			out = append(out, m)
		}
	}
	return out
}

// minorNumber is the first patch of a minor of v1.
func minorNumber(n int) version.Version { return version.MustParse(fmt.Sprintf("v1.%d.0", n)) }

func parses(v string) bool {
	_, err := version.Parse(v)
	return err == nil
}

// flagSource is where flags of a component were found.
type flagSource struct {
	component, where, object string
	flags                    []string
}

// flagSources returns the flags that the API shows: of static pods, of kubeadm's configuration, of
// the shared configuration of kubelets and of kube-proxy.
func (w *world) flagSources() (sources []flagSource) {
	for i := range w.pods {
		if p := &w.pods[i]; len(p.args) > 0 {
			sources = append(sources, flagSource{p.component, "pod " + p.name, p.object(), p.args})
		}
	}
	c, cm := w.clusterConfiguration(), object("ConfigMap", "kube-system", kubeadmConfig)
	for component, flags := range map[string][]string{
		"kube-apiserver": c.APIServer.flags(), "kube-controller-manager": c.ControllerManager.flags(), "kube-scheduler": c.Scheduler.flags(), "etcd": c.Etcd.Local.flags(),
	} {
		sources = append(sources, flagSource{component, "ConfigMap kubeadm-config", cm, flags})
	}
	if data := w.configs[kubeletConfig]["kubelet"]; data != "" {
		sources = append(sources, flagSource{"kubelet", "ConfigMap kubelet-config", object("ConfigMap", "kube-system", kubeletConfig), gatesFlag(data)})
	}
	if data := w.configs[proxyConfig]["config.conf"]; data != "" {
		sources = append(sources, flagSource{proxyConfig, "ConfigMap kube-proxy", object("ConfigMap", "kube-system", proxyConfig), gatesFlag(data)})
	}
	for i := range w.daemonSets {
		d := &w.daemonSets[i]
		if d.Namespace != "kube-system" || d.Name != proxyConfig || len(d.Spec.Template.Spec.Containers) == 0 {
			continue
		}
		x := &d.Spec.Template.Spec.Containers[0]
		sources = append(sources, flagSource{proxyConfig, "DaemonSet kube-proxy", object("DaemonSet", d.Namespace, d.Name), slices.Concat(x.Command, x.Args)})
	}
	return sources
}

// gatesFlag returns the feature gates of a component's configuration as a flag.
func gatesFlag(config string) []string {
	var c struct {
		FeatureGates map[string]bool `json:"featureGates"`
	}
	if yaml.Unmarshal([]byte(config), &c) != nil {
		return nil // reported by the checks of the configuration
	}
	var gates []string
	for g, on := range c.FeatureGates {
		gates = append(gates, fmt.Sprintf("%s=%t", g, on))
	}
	slices.Sort(gates)
	return []string{"--feature-gates=" + strings.Join(gates, ",")}
}

// flagsRemoved compares flags and feature gates with those of the hop's versions.
func flagsRemoved(w *world, _ *probe) (out []plan.Finding) {
	if w.request.From.MinorDistance(w.request.To) <= 0 {
		return nil
	}
	sources := w.flagSources()
	// Problem to locations: all pods of a component have the same flags.
	where, objects := map[[2]string][]string{}, map[[2]string][]string{}
	note := func(s flagSource, problem, minor string) {
		key := [2]string{s.component, fmt.Sprintf("%s (%s)", problem, minor)}
		where[key], objects[key] = append(where[key], s.where), append(objects[key], s.object)
	}
	for _, m := range w.minorsOfHop() {
		for _, s := range sources {
			for _, problem := range problems(m, s.component, s.flags) {
				note(s, problem, m.Kubernetes)
			}
		}
	}
	if from, to, ok := w.etcdStep(); ok {
		removed := lifecycle.EtcdFlagsRemoved(from, to)
		for _, s := range sources {
			for _, f := range s.flags {
				if name, _, _ := splitFlag(f); s.component == "etcd" && slices.Contains(removed, name) {
					note(s, "the flag --"+name+" is removed", "etcd "+to.MinorString())
				}
			}
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(where), func(a, b [2]string) int { return cmp.Or(cmp.Compare(a[0], b[0]), cmp.Compare(a[1], b[1])) }) {
		f := plan.Finding{
			Severity: plan.Block, Title: fmt.Sprintf("%s would not start after the hop: %s", key[0], key[1]),
			Detail: "in " + enumerate(first(where[key]), 10), Objects: first(objects[key]),
		}
		f.Remedy, f.Command = withoutFlag(key[0], objects[key])
		out = append(out, f)
	}
	return out
}

// withoutFlag returns how to remove a flag or gate of a component from the objects that have it, and
// the command for it.
func withoutFlag(component string, objects []string) (remedy, command string) {
	const edit = "kubectl -n kube-system edit configmap "
	kubeadm, kubelet := object("ConfigMap", "kube-system", kubeadmConfig), object("ConfigMap", "kube-system", kubeletConfig)
	switch others := func(o string) bool { return o != kubeadm && o != kubelet }; {
	case component == proxyConfig:
		return "remove it from the ConfigMap or DaemonSet kube-proxy of kube-system and wait until its pods are ready", ""
	case slices.Contains(objects, kubelet) && !slices.ContainsFunc(objects, others):
		return "remove it from the ConfigMap: the upgrade writes it to every node", edit + kubeletConfig
	case slices.Contains(objects, kubeadm) && !slices.ContainsFunc(objects, others):
		return "remove it from ClusterConfiguration: running pods do not have it, but the upgrade would set it", edit + kubeadmConfig
	case slices.Contains(objects, kubeadm):
		command = edit + kubeadmConfig
	}
	return "remove it from the ConfigMap, then run `kubeadm upgrade apply` or `kubeadm upgrade node`, which rewrites the manifests", command
}

// splitFlag splits --name=value.
func splitFlag(f string) (name, value string, ok bool) {
	return strings.Cut(strings.TrimLeft(f, "-"), "=")
}

// problems returns the component's flags, values and gates that a minor rejects, sorted.
func problems(m *lifecycle.Minor, component string, flags []string) (out []string) {
	for _, f := range flags {
		name, value, _ := splitFlag(f)
		for _, r := range m.Flags {
			if r.Component == component && slices.Contains(r.Removed, name) {
				out = append(out, "the flag --"+name+" is removed")
			}
		}
		for _, r := range m.Values {
			if r.Component != component || r.Flag != name {
				continue
			}
			for v := range strings.SplitSeq(value, ",") {
				// In runtime-config a value is written as an assignment: "group/version=true".
				v, _, _ = strings.Cut(strings.TrimSpace(v), "=")
				if slices.ContainsFunc(r.Refused, func(refused string) bool { return v == refused || strings.HasPrefix(v, refused+"/") }) {
					out = append(out, fmt.Sprintf("the value %s of --%s is refused", printable(v), name))
				}
			}
		}
		if name == "feature-gates" {
			out = append(out, gateProblems(m, value)...)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// gateProblems returns the problems of a value of --feature-gates.
func gateProblems(m *lifecycle.Minor, value string) (out []string) {
	for gate := range strings.SplitSeq(value, ",") {
		// With emulated versions a gate is written with the component: "kube:Name=true".
		gate, setting, _ := strings.Cut(strings.TrimSpace(gate), "=")
		gate = gate[strings.LastIndexByte(gate, ':')+1:]
		on, err := strconv.ParseBool(setting)
		for _, r := range m.Gates {
			switch {
			case slices.Contains(r.Removed, gate):
				out = append(out, "the feature gate "+gate+" is removed")
			case err == nil && !on && slices.Contains(r.LockedOn, gate), err == nil && on && slices.Contains(r.LockedOff, gate):
				out = append(out, fmt.Sprintf("the feature gate %s can only be %t", gate, !on))
			}
		}
	}
	return out
}

// settingsChanged finds kubelet settings that the changelog of a minor asks users to change.
func settingsChanged(w *world, _ *probe) (out []plan.Finding) {
	var c map[string]any
	if yaml.Unmarshal([]byte(w.configs[kubeletConfig]["kubelet"]), &c) != nil {
		return nil // reported by kubeadm-config
	}
	for _, m := range w.minorsOfHop() {
		for _, a := range m.Actions {
			if a.KubeletField == "" || !has(c, a) {
				continue
			}
			out = append(out, plan.Finding{
				Title: fmt.Sprintf("from %s on, %s", m.Kubernetes, a.Title), Remedy: a.Remedy, Reference: m.Sources[a.Source],
				Objects: []string{object("ConfigMap", "kube-system", kubeletConfig)}, Command: "kubectl -n kube-system edit configmap " + kubeletConfig,
			})
		}
	}
	return out
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

// containerRuntimes warns of nodes whose runtime the kubelets of the hop, or of the minor after
// it, do not support. Told one hop early, users can choose an OS image in time.
func containerRuntimes(w *world, _ *probe) (out []plan.Finding) {
	for n := w.request.From.Minor() + 1; n <= w.request.To.Minor()+1; n++ {
		m, ok := lifecycle.Of(minorNumber(n))
		if !ok {
			continue
		}
		for _, r := range m.Kubelet {
			old := oldRuntimes(w.nodes, r)
			if len(old) == 0 {
				continue
			}
			f := plan.Finding{
				Title:  fmt.Sprintf("%s %d.x runs on %s, and kubelets from %s on need %s %d", r.Runtime, r.OldestRuntime.Major()-1, count(len(old), "node"), m.Kubernetes, r.Runtime, r.OldestRuntime.Major()),
				Detail: "nodes: " + enumerate(old, 20), Reference: m.Sources[r.Source],
				Remedy: fmt.Sprintf("check that %s contains %s %d", w.hosts("the OS image of the hop"), r.Runtime, r.OldestRuntime.Major()),
			}
			if n > w.request.To.Minor() {
				f.Remedy = fmt.Sprintf("use an OS image with %s %d before the hop to %s", r.Runtime, r.OldestRuntime.Major(), m.Kubernetes)
				if w.request.Foreign || w.request.NoImages {
					f.Remedy = fmt.Sprintf("upgrade %s on the nodes to %d, or use nodes that have it, before the hop to %s", r.Runtime, r.OldestRuntime.Major(), m.Kubernetes)
				}
			}
			for _, name := range old {
				f.Objects = append(f.Objects, object("node", "", name))
			}
			f.Objects = first(f.Objects)
			out = append(out, f)
		}
	}
	return out
}

// oldRuntimes are the nodes whose runtime is older than a kubelet demands.
func oldRuntimes(nodes []corev1.Node, demand lifecycle.Kubelet) (out []string) {
	if demand.Runtime == "" {
		return nil
	}
	for i := range nodes {
		runtime, ok := strings.CutPrefix(nodes[i].Status.NodeInfo.ContainerRuntimeVersion, demand.Runtime+"://")
		if !ok {
			continue
		}
		if v, err := version.Parse(runtime); err == nil && v.Less(demand.OldestRuntime) {
			out = append(out, nodes[i].Name)
		}
	}
	return out
}

// cgroupVersions reads the cgroup version from one kubelet of each kind of machine.
func cgroupVersions(w *world, p *probe) []plan.Finding {
	var refusing *lifecycle.Minor
	for _, m := range w.minorsOfHop() {
		if slices.ContainsFunc(m.Kubelet, func(r lifecycle.Kubelet) bool { return r.RefusesCgroupV1 }) {
			refusing = m
		}
	}
	if refusing == nil {
		return nil
	}
	var c kubeletConfiguration
	if data := w.configs[kubeletConfig]["kubelet"]; yaml.Unmarshal([]byte(data), &c) == nil && c.FailCgroupV1 != nil && !*c.FailCgroupV1 {
		return nil
	}
	if w.request.Quiet {
		return []plan.Finding{{
			Severity: plan.NotChecked, Title: "not checked whether hosts have cgroup v2", Detail: silentKubelets, Remedy: "allow such requests with --dry-run-requests",
		}}
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
			Severity: plan.Block, Title: fmt.Sprintf("hosts with cgroup v1: kubelets from %s on do not start there", refusing.Kubernetes), Detail: "for example " + enumerate(old, maxTold),
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

// hosts is what the software of nodes comes from: an image, or whatever others use.
func (w *world) hosts(image string) string {
	if w.request.Foreign || w.request.NoImages {
		return "the software of the nodes"
	}
	return image
}
