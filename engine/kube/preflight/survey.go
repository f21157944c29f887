package preflight

import (
	"cmp"
	"context"
	"crypto/x509"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"constellation/engine/adopt"
	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/plan"
)

// Survey is Run. It also returns the facts that an adoption needs, from the same reading of the
// cluster. It adds one request, for the bootstrap tokens.
func Survey(ctx context.Context, config *rest.Config, hops []check.PreflightRequest, emit func(plan.Event)) (found [][]plan.Finding, facts adopt.Facts, err error) {
	found, err = run(ctx, config, hops, emit, func(core kubernetes.Interface, w *world) {
		facts = w.adoptionFacts()
		var failed error
		if facts.Tokens, failed = bootstrapTokens(ctx, core); failed != nil {
			facts.Unread[adopt.PartTokens] = reason(ctx, failed)
		}
	})
	return found, facts, err
}

// adoptionFacts returns what an adoption needs of a world.
func (w *world) adoptionFacts() adopt.Facts {
	out := adopt.Facts{
		UID: string(w.namespaces[metav1.NamespaceSystem].UID), Unread: map[adopt.Part]string{}, Config: w.configs[kubeadmConfig]["ClusterConfiguration"],
	}
	for part, sources := range map[adopt.Part][]source{
		adopt.PartIdentity: {sourceNamespaces}, adopt.PartNodes: {sourceNodes}, adopt.PartConfig: {sourceConfigs}, adopt.PartPods: {sourcePods},
		adopt.PartAddOns: {sourceDaemonSets, sourceDeployments, sourceStatefulSets}, adopt.PartServers: {sourceServers},
	} {
		for _, s := range sources {
			if why, unread := w.unread[s]; unread {
				out.Unread[part] = why
			}
		}
	}
	if out.UID == "" && out.Unread[adopt.PartIdentity] == "" {
		out.Unread[adopt.PartIdentity] = "the cluster has none"
	}
	for i := range w.nodes {
		out.Nodes = append(out.Nodes, surveyedNode(&w.nodes[i]))
	}
	for i := range w.pods {
		if p := &w.pods[i]; p.component != "" && p.mirror {
			out.StaticPods = append(out.StaticPods, adopt.StaticPod{Component: p.component, Node: p.node, Name: p.name, Args: p.args, Images: p.images, HostPaths: p.hostPaths})
		}
	}
	w.surveyAddOns(&out)
	told := map[string]bool{}
	add := func(of string, c *x509.Certificate) {
		if c == nil || told[string(c.Signature)] {
			return
		}
		told[string(c.Signature)] = true
		out.Certificates = append(out.Certificates, adopt.Certificate{Of: of, NotBefore: c.NotBefore.UTC(), NotAfter: c.NotAfter.UTC()})
	}
	// Behind a load balancer all API servers have one address. kubeadm writes the node into their certificates.
	server := func(address string, c *x509.Certificate) {
		of := "API server " + printable(address)
		for i := range w.nodes {
			if name := w.nodes[i].Name; c != nil && slices.Contains(c.DNSNames, name) {
				of = "API server of " + printable(name)
			}
		}
		add(of, c)
	}
	for i := range w.servers {
		server(w.servers[i].address, w.servers[i].cert)
	}
	for _, s := range w.silent {
		server(s.address, s.expired)
	}
	slices.SortStableFunc(out.Certificates, func(a, b adopt.Certificate) int { return cmp.Compare(a.Of, b.Of) })
	for i := range w.servers {
		add("CA of the cluster", w.servers[i].ca)
	}
	if len(out.Certificates) == 0 && out.Unread[adopt.PartServers] == "" {
		out.Unread[adopt.PartServers] = "no API server showed a certificate that was verified"
	}
	return out
}

// surveyedNode returns what an adoption needs of a node.
func surveyedNode(n *corev1.Node) adopt.Node {
	out := adopt.Node{
		Name: printable(n.Name), Role: cloud.Worker, Kubernetes: printable(n.Status.NodeInfo.KubeletVersion), Runtime: printable(n.Status.NodeInfo.ContainerRuntimeVersion),
		OS: printable(n.Status.NodeInfo.OSImage), Unscheduled: n.Spec.Unschedulable, ProviderID: printable(n.Spec.ProviderID),
	}
	if _, ok := n.Labels["node-role.kubernetes.io/control-plane"]; ok {
		out.Role = cloud.ControlPlane
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			out.Ready = c.Status == corev1.ConditionTrue
		}
	}
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP && out.Address == "" {
			out.Address = printable(a.Address)
		}
	}
	return out
}

// networks are parts of the image names of network plugins, and their names.
var networks = map[string]string{
	"cilium": "Cilium", "calico": "Calico", "flannel": "Flannel", "weave": "Weave Net", "antrea": "Antrea", "kube-router": "kube-router", "kube-ovn": "Kube-OVN", "ovn-kubernetes": "OVN-Kubernetes",
	"multus": "Multus", "canal": "Canal", "kindnet": "kindnet",
}

// surveyAddOns fills in network plugins and other add-ons.
func (w *world) surveyAddOns(out *adopt.Facts) {
	for i := range w.daemonSets {
		d := &w.daemonSets[i]
		for _, c := range d.Spec.Template.Spec.Containers {
			repository, version := imageParts(c.Image)
			for _, part := range slices.Sorted(maps.Keys(networks)) {
				x := adopt.AddOn{Name: networks[part], Version: printable(version), Where: "DaemonSet " + printable(d.Namespace+"/"+d.Name)}
				if strings.Contains(repository, part) && !slices.Contains(out.Network, x) {
					out.Network = append(out.Network, x)
				}
			}
		}
		if d.Namespace == metav1.NamespaceSystem && d.Name == proxyConfig && len(d.Spec.Template.Spec.Containers) > 0 {
			_, version := imageParts(d.Spec.Template.Spec.Containers[0].Image)
			out.AddOns = append(out.AddOns, adopt.AddOn{Name: proxyConfig, Version: printable(version), Where: "DaemonSet kube-system/kube-proxy"})
		}
	}
	for i := range w.deployments {
		d := &w.deployments[i]
		if d.Namespace == metav1.NamespaceSystem && d.Labels["k8s-app"] == "kube-dns" && len(d.Spec.Template.Spec.Containers) > 0 {
			_, version := imageParts(d.Spec.Template.Spec.Containers[0].Image)
			out.AddOns = append(out.AddOns, adopt.AddOn{Name: "CoreDNS", Version: printable(version), Where: "Deployment kube-system/" + printable(d.Name)})
		}
	}
	for _, u := range w.addOnUses() {
		x := adopt.AddOn{Name: u.AddOn.Name, Version: printable(u.Version), Where: u.Title}
		if !slices.ContainsFunc(slices.Concat(out.Network, out.AddOns), func(o adopt.AddOn) bool { return o.Where == x.Where }) {
			out.AddOns = append(out.AddOns, x)
		}
	}
	slices.SortStableFunc(out.AddOns, func(a, b adopt.AddOn) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Where, b.Where)) })
}

// imageParts splits an image into repository and tag.
func imageParts(image string) (repository, tag string) {
	image, _, _ = strings.Cut(image, "@")
	if i := strings.LastIndexByte(image, ':'); i >= 0 && !strings.Contains(image[i:], "/") {
		return image[:i], image[i+1:]
	}
	return image, ""
}

// bootstrapTokens lists the bootstrap tokens of the cluster, without their secrets.
func bootstrapTokens(ctx context.Context, core kubernetes.Interface) (out []adopt.Token, err error) {
	ctx, cancel := context.WithTimeout(ctx, sourceLimit)
	defer cancel()
	l, err := core.CoreV1().Secrets(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{FieldSelector: "type=bootstrap.kubernetes.io/token", Limit: pageSize})
	if err != nil {
		return nil, err
	}
	for i := range l.Items {
		data := l.Items[i].Data
		t := adopt.Token{ID: printable(string(data["token-id"])), Description: printable(string(data["description"])), Joins: string(data["usage-bootstrap-authentication"]) == "true"}
		if text := string(data["expiration"]); text != "" {
			// The API server treats an end that it cannot parse as one that has passed.
			t.Expires, err = time.Parse(time.RFC3339, text)
			if err != nil {
				t.Joins = false
			}
		}
		out = append(out, t)
	}
	slices.SortFunc(out, func(a, b adopt.Token) int { return cmp.Compare(a.ID, b.ID) })
	return out, nil
}
