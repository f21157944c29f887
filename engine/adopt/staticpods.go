package adopt

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"

	"constellation/engine/plan"
	"constellation/engine/words"
)

// StaticPod is the mirror pod of a component of a control plane.
type StaticPod struct {
	Component, Node, Name string
	// Args are command and arguments of its first container.
	Args []string
	// Images are those of its containers, HostPaths the paths of the machine that it mounts.
	Images, HostPaths []string
}

// Image is the image of the first container.
func (p *StaticPod) Image() string {
	if len(p.Images) == 0 {
		return ""
	}
	return p.Images[0]
}

// tagOf returns the tag of an image.
func tagOf(image string) string {
	image, _, _ = strings.Cut(image, "@")
	i := strings.LastIndexByte(image, ':')
	if i < 0 || strings.Contains(image[i:], "/") {
		return ""
	}
	return image[i+1:]
}

// Change is a difference between a static pod and what kubeadm renders from kubeadm-config.
type Change struct {
	Component string `json:"component"`
	// Nodes are those whose static pod differs this way.
	Nodes []string `json:"nodes"`
	Text  string   `json:"text"`
}

// The minors whose kubeadm renders the flags of this file. A test compares them with real kubeadms.
const firstMinor, lastMinor = 35, 37

// anyValue is the value of a flag that differs between nodes.
const anyValue = "\x00any"

// rendered is what kubeadm renders for a component. A flag may be repeated.
type rendered struct {
	flags map[string][]string
	// optional flags may be absent: kubeadm sets them on some nodes alone.
	optional   map[string]bool
	repository string // with the name of the image; empty if it is not compared
	tag        string // empty if it is not compared
	paths      []string
}

// caPaths are the directories of CA certificates that kubeadm mounts where the machine has them.
var caPaths = []string{"/etc/ssl/certs", "/etc/ca-certificates", "/usr/share/ca-certificates", "/usr/local/share/ca-certificates", "/etc/pki/ca-trust", "/etc/pki/tls/certs", "/etc/pki"}

// render returns what kubeadm renders from a configuration.
func (c *clusterConfiguration) render(component string) rendered {
	pki := cmp.Or(c.CertificatesDir, "/etc/kubernetes/pki")
	in := func(name string) string { return path.Join(pki, name) }
	repository := cmp.Or(c.ImageRepository, "registry.k8s.io")
	services := cmp.Or(c.Networking.ServiceSubnet, "10.96.0.0/12")
	out := rendered{repository: repository + "/" + component, tag: c.KubernetesVersion, optional: map[string]bool{}}
	set := func(pairs ...string) {
		if out.flags == nil {
			out.flags = map[string][]string{}
		}
		for i := 0; i < len(pairs); i += 2 {
			out.flags[pairs[i]] = []string{pairs[i+1]}
		}
	}
	switch component {
	case "kube-apiserver":
		set("advertise-address", anyValue, "allow-privileged", "true", "authorization-mode", "Node,RBAC", "client-ca-file", in("ca.crt"),
			"enable-admission-plugins", "NodeRestriction", "enable-bootstrap-token-auth", "true",
			"kubelet-client-certificate", in("apiserver-kubelet-client.crt"), "kubelet-client-key", in("apiserver-kubelet-client.key"),
			"kubelet-preferred-address-types", "InternalIP,ExternalIP,Hostname",
			"proxy-client-cert-file", in("front-proxy-client.crt"), "proxy-client-key-file", in("front-proxy-client.key"),
			"requestheader-allowed-names", "front-proxy-client", "requestheader-client-ca-file", in("front-proxy-ca.crt"),
			"requestheader-extra-headers-prefix", "X-Remote-Extra-", "requestheader-group-headers", "X-Remote-Group", "requestheader-username-headers", "X-Remote-User",
			"secure-port", anyValue, "service-account-issuer", "https://kubernetes.default.svc."+cmp.Or(c.Networking.DNSDomain, "cluster.local"),
			"service-account-key-file", in("sa.pub"), "service-account-signing-key-file", in("sa.key"), "service-cluster-ip-range", services,
			"tls-cert-file", in("apiserver.crt"), "tls-private-key-file", in("apiserver.key"))
		if x := c.Etcd.External; x != nil {
			set("etcd-servers", strings.Join(x.Endpoints, ","))
			if x.CAFile != "" {
				set("etcd-cafile", x.CAFile)
			}
			if x.CertFile != "" && x.KeyFile != "" {
				set("etcd-certfile", x.CertFile, "etcd-keyfile", x.KeyFile)
			}
			for _, f := range []string{x.CAFile, x.CertFile, x.KeyFile} {
				if f != "" {
					out.paths = append(out.paths, path.Dir(f))
				}
			}
		} else {
			set("etcd-cafile", in("etcd/ca.crt"), "etcd-certfile", in("apiserver-etcd-client.crt"), "etcd-keyfile", in("apiserver-etcd-client.key"), "etcd-servers", "https://127.0.0.1:2379")
		}
		out.paths = append(out.paths, append(slices.Clone(caPaths), pki)...)
		out.with(c.APIServer)
	case "kube-controller-manager":
		const config = "/etc/kubernetes/controller-manager.conf"
		set("authentication-kubeconfig", config, "authorization-kubeconfig", config, "bind-address", "127.0.0.1", "client-ca-file", in("ca.crt"),
			"cluster-name", cmp.Or(c.ClusterName, "kubernetes"), "cluster-signing-cert-file", in("ca.crt"), "cluster-signing-key-file", in("ca.key"),
			"controllers", "*,bootstrapsigner,tokencleaner", "kubeconfig", config, "leader-elect", "true", "requestheader-client-ca-file", in("front-proxy-ca.crt"),
			"root-ca-file", in("ca.crt"), "service-account-private-key-file", in("sa.key"), "use-service-account-credentials", "true")
		if c.Networking.PodSubnet != "" {
			set("allocate-node-cidrs", "true", "cluster-cidr", c.Networking.PodSubnet, "service-cluster-ip-range", services)
		}
		// Without the CA's key the controller manager signs nothing.
		for _, name := range []string{"cluster-signing-cert-file", "cluster-signing-key-file"} {
			out.optional[name] = true
		}
		out.paths = append(slices.Clone(caPaths), pki, config, "/usr/libexec/kubernetes/kubelet-plugins/volume/exec")
		out.with(c.ControllerManager)
	case "kube-scheduler":
		const config = "/etc/kubernetes/scheduler.conf"
		set("authentication-kubeconfig", config, "authorization-kubeconfig", config, "bind-address", "127.0.0.1", "kubeconfig", config, "leader-elect", "true")
		out.paths = []string{config}
		out.with(c.Scheduler)
	case "etcd":
		set("advertise-client-urls", anyValue, "cert-file", in("etcd/server.crt"), "client-cert-auth", "true", "data-dir", "/var/lib/etcd", "feature-gates", "InitialCorruptCheck=true",
			"initial-advertise-peer-urls", anyValue, "initial-cluster", anyValue, "initial-cluster-state", "existing", "key-file", in("etcd/server.key"),
			"listen-client-urls", anyValue, "listen-metrics-urls", "http://127.0.0.1:2381", "listen-peer-urls", anyValue, "name", anyValue,
			"peer-cert-file", in("etcd/peer.crt"), "peer-client-cert-auth", "true", "peer-key-file", in("etcd/peer.key"), "peer-trusted-ca-file", in("etcd/ca.crt"),
			"snapshot-count", "10000", "trusted-ca-file", in("etcd/ca.crt"), "watch-progress-notify-interval", "5s")
		out.optional["initial-cluster-state"] = true // the first member has none
		out.tag = ""
		out.paths = []string{in("etcd"), "/var/lib/etcd"}
		if x := c.Etcd.Local; x != nil {
			out.tag = x.ImageTag
			if x.ImageRepository != "" {
				out.repository = x.ImageRepository + "/etcd"
			}
			if x.DataDir != "" {
				set("data-dir", x.DataDir)
				out.paths = append(out.paths, x.DataDir)
			}
			out.with(x.component)
		}
	}
	return out
}

// with adds what the configuration sets of a component.
func (r *rendered) with(c component) {
	extra := map[string][]string{}
	switch c.ExtraArgs.Kind {
	case yaml.MappingNode:
		var m map[string]string
		if c.ExtraArgs.Decode(&m) == nil {
			for name, value := range m {
				extra[name] = []string{value}
			}
		}
	case yaml.SequenceNode:
		var l []struct{ Name, Value string }
		if c.ExtraArgs.Decode(&l) == nil {
			for _, a := range l {
				extra[a.Name] = append(extra[a.Name], a.Value)
			}
		}
	}
	maps.Copy(r.flags, extra)
	for name := range extra {
		delete(r.optional, name)
	}
	for _, v := range c.ExtraVolumes {
		r.paths = append(r.paths, v.HostPath)
	}
}

// differences returns how a static pod differs from what kubeadm renders.
func (r *rendered) differences(p *StaticPod) (out []string) {
	have := map[string][]string{}
	for _, a := range p.Args {
		name, value, _ := strings.Cut(strings.TrimLeft(a, "-"), "=")
		if strings.HasPrefix(a, "-") {
			have[name] = append(have[name], value)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(have)) {
		want, ours := r.flags[name]
		switch got := have[name]; {
		case !ours:
			out = append(out, fmt.Sprintf("--%s=%s is neither kubeadm's nor in kubeadm-config", name, strings.Join(got, ",")))
		case !slices.Contains(want, anyValue) && !sameSet(want, got):
			out = append(out, fmt.Sprintf("--%s is %s, and kubeadm renders %s", name, strings.Join(got, " "), strings.Join(want, " ")))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.flags)) {
		if have[name] == nil && !r.optional[name] {
			out = append(out, "--"+name+" is missing, which kubeadm renders")
		}
	}
	repository, _, _ := strings.Cut(p.Image(), "@")
	if tag := tagOf(repository); tag != "" {
		repository = strings.TrimSuffix(repository, ":"+tag)
	}
	switch {
	case repository != r.repository:
		out = append(out, fmt.Sprintf("its image is %s, and kubeadm renders %s", p.Image(), r.repository))
	case r.tag != "" && tagOf(p.Image()) != r.tag:
		out = append(out, fmt.Sprintf("its image is %s, and kubeadm renders the tag %s", p.Image(), r.tag))
	}
	if n := len(p.Images); n > 1 {
		out = append(out, fmt.Sprintf("it has %d containers, and kubeadm renders 1", n))
	}
	for _, host := range p.HostPaths {
		if !slices.Contains(r.paths, path.Clean(host)) {
			out = append(out, "it mounts "+host+" of the machine, which kubeadm-config does not name")
		}
	}
	return out
}

func sameSet(a, b []string) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(a, b)
}

// examinePods compares static pods with what kubeadm renders.
func (r *Report) examinePods(pods []StaticPod, c *clusterConfiguration) {
	if m := minorOf(c.KubernetesVersion); m < firstMinor || m > lastMinor {
		r.add(plan.Finding{
			ID: "adopt-manifests", Severity: plan.NotChecked, Title: "not checked whether static pods were changed by hand: this program has no data about kubeadm of " + c.KubernetesVersion,
			Detail: fmt.Sprintf("it has data about v1.%d to v1.%d", firstMinor, lastMinor), Remedy: "compare the manifests on a control plane with a rendering of kubeadm", Command: "kubeadm upgrade diff",
		})
		return
	}
	type key struct{ component, text string }
	found := map[key][]string{}
	for i := range pods {
		p := &pods[i]
		expected := c.render(p.Component)
		if expected.flags == nil {
			continue // no component of kubeadm
		}
		for _, text := range expected.differences(p) {
			k := key{p.Component, text}
			found[k] = append(found[k], p.Node)
		}
	}
	for k, nodes := range found {
		slices.Sort(nodes)
		r.Changes = append(r.Changes, Change{k.component, nodes, k.text})
	}
	slices.SortFunc(r.Changes, func(a, b Change) int {
		return cmp.Or(cmp.Compare(a.Component, b.Component), cmp.Compare(a.Text, b.Text))
	})
	if n := len(r.Changes); n > 0 {
		var texts []string
		for _, x := range r.Changes {
			texts = append(texts, fmt.Sprintf("%s: %s (%s)", x.Component, x.Text, some(x.Nodes)))
		}
		r.add(plan.Finding{
			ID: "adopt-manifests", Severity: plan.Warn, Title: words.Count(n, "difference") + " between static pods and what kubeadm renders: the next `kubeadm upgrade` removes changes made by hand",
			Detail: strings.Join(texts, "; "), Remedy: "write the settings that you need into ClusterConfiguration, as extraArgs or extraVolumes", Command: "kubectl -n kube-system edit configmap kubeadm-config",
		})
	}
}
