package benchmark

import (
	"context"
	"fmt"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/check"
	"constellation/engine/lifecycle"
	"constellation/engine/version"
)

// isolation is what the NetworkPolicies of a namespace do.
type isolation struct {
	count int
	// ingress and egress are set if all pods are isolated by default.
	ingress, egress bool
}

func (c *collector) readNetwork(ctx context.Context) error {
	c.f.policies = map[string]isolation{}
	return each(ctx, c.core.NetworkingV1().NetworkPolicies(metav1.NamespaceAll).List, func(p *networkingv1.NetworkPolicy) {
		x := c.f.policies[p.Namespace]
		x.count++
		if s := p.Spec.PodSelector; len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
			types := p.Spec.PolicyTypes
			if len(types) == 0 { // as the API server would fill it in
				types = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
			}
			x.ingress = x.ingress || slices.Contains(types, networkingv1.PolicyTypeIngress)
			x.egress = x.egress || slices.Contains(types, networkingv1.PolicyTypeEgress)
		}
		c.f.policies[p.Namespace] = x
	})
}

// policyAgent is in each DaemonSet of the Amazon VPC CNI. It does nothing without [policyAgentFlag].
const (
	policyAgent     = "aws-network-policy-agent"
	policyAgentFlag = "--enable-network-policy=true"
)

// networks are network plugins, recognised by the images of its DaemonSet.
var networks = []struct {
	image, name string
	policies    bool
}{
	{"cilium/cilium", "Cilium", true},
	{"calico/node", "Calico", true},
	{"antrea/antrea", "Antrea", true},
	{"antrea/antrea-agent", "Antrea", true},
	{"antrea/antrea-agent-ubuntu", "Antrea", true},
	{"kube-router", "kube-router", true},
	{"kube-ovn", "Kube-OVN", true},
	{"ovn-kubernetes", "OVN-Kubernetes", true},
	{"weave-npc", "Weave Net", true},
	{policyAgent, "the policy agent of the Amazon VPC CNI", true},
	{"kube-network-policies", "kube-network-policies", true},
	{"flannel/flannel", "flannel", false},
	{"kindest/kindnetd", "kindnet", true},
}

// policyNetwork judges whether the network plugin enforces NetworkPolicies.
func policyNetwork(f *facts) verdict {
	var yes, no tally
	for object, w := range f.workloads {
		for _, image := range w.images {
			for _, n := range networks {
				if image != n.image && !strings.HasSuffix(image, "/"+n.image) {
					continue
				}
				if n.policies {
					yes.add(good, n.name+" enforces NetworkPolicies", object)
				} else {
					no.add(bad, n.name+" does not enforce NetworkPolicies", object)
				}
			}
		}
	}
	switch {
	case yes.seen != nil:
		return yes.verdict("")
	case no.seen != nil:
		return no.verdict("")
	}
	return verdict{status: check.SecurityManual, evidence: []check.Evidence{{Text: "no DaemonSet of a network plugin that this program recognises"}}}
}

// inNamespaces judges namespaces with workloads, without those of Kubernetes itself.
func (f *facts) inNamespaces(t *tally, w func(namespace string) (seen string, s state)) {
	done := map[string]bool{}
	for _, x := range f.workloads {
		if n := x.namespace; !done[n] && !slices.Contains(exempt, n) {
			done[n] = true
			seen, s := w(n)
			t.add(s, seen, "namespace/"+n)
		}
	}
}

func havePolicies(f *facts) verdict {
	var t tally
	f.inNamespaces(&t, func(n string) (string, state) {
		if f.policies[n].count > 0 {
			return "has NetworkPolicies", good
		}
		return "has no NetworkPolicy", bad
	})
	return t.verdict("no namespace of users has workloads")
}

func denyByDefault(f *facts) verdict {
	var t tally
	f.inNamespaces(&t, func(n string) (string, state) {
		switch p := f.policies[n]; {
		case p.ingress && p.egress:
			return "isolates all pods by default", good
		case p.ingress:
			return "isolates no pod's outgoing traffic by default", bad
		case p.egress:
			return "isolates no pod's incoming traffic by default", bad
		}
		return "no NetworkPolicy selects all pods", bad
	})
	return t.verdict("no namespace of users has workloads")
}

func policySections() []section {
	return []section{
		{"5.1 Roles and accounts", rbacItems()},
		{"5.2 Pods", podItems()},
		{"5.3 Networks", []item{
			{
				number: "5.3.1", nsa: guideNetwork, level: 1, title: "The network plugin enforces NetworkPolicies", looks: "images of DaemonSets", remedy: "use a network plugin that does, or add one that only does this",
				needs: []source{sourcePods}, judge: policyNetwork,
			},
			{
				number: "5.3.2", nsa: guideNetwork, level: 2, title: "Each namespace has NetworkPolicies", looks: "NetworkPolicies of namespaces with workloads, without those of Kubernetes itself", remedy: "begin with a policy that selects all pods and allows nothing, then allow what is needed",
				needs: []source{sourcePods, sourceNetwork}, judge: havePolicies,
			},
		}},
		{"5.4 Secrets", []item{
			{
				number: "5.4.1", nsa: guideAccess, level: 2, title: "Pods read Secrets from files, not from their environment", looks: "env and envFrom of containers", remedy: "mount the Secret as a volume",
				needs: []source{sourcePods}, judge: with(secretInEnvironment, "a variable of the environment comes from a Secret"),
			},
			{number: "5.4.2", level: 2, manual: true, title: "Secrets are kept outside of the cluster", looks: "nothing: it depends on what you store", remedy: "consider a store such as that of your cloud, with the Secrets Store CSI driver"},
		}},
		{"5.5 Images", []item{{
			number: "5.5.1", nsa: guidePods, level: 2, manual: true, title: "Images are admitted only from trusted sources", looks: "--enable-admission-plugins for ImagePolicyWebhook; webhooks that verify signatures are not recognised", remedy: "verify signatures of images with ImagePolicyWebhook or a webhook of admission",
			needs: ofPlanes, judge: on(apiServer, contains("enable-admission-plugins", "ImagePolicyWebhook")),
		}}},
		{"5.6 Namespaces and contexts", []item{
			{number: "5.6.1", nsa: guideNetwork, level: 1, manual: true, title: "Namespaces separate teams and applications", looks: "namespaces with workloads", remedy: "give each team or application a namespace", needs: []source{sourcePods}, judge: boundaries},
			{
				number: "5.6.2", nsa: guidePods, level: 2, title: "Each pod has a seccomp profile", looks: "securityContext.seccompProfile of pods, and seccompDefault of kubelets", remedy: "set seccompProfile.type: RuntimeDefault in the pods, or seccompDefault: true in kubelets",
				needs: []source{sourcePods, sourceNodes, sourceKubelets}, judge: seccomp,
			},
			{number: "5.6.3", nsa: guidePods, level: 2, title: "Each container has a securityContext", looks: "securityContext of containers", remedy: "set securityContext in each container", needs: []source{sourcePods}, judge: with(noContext, "a container has no securityContext")},
			{number: "5.6.4", level: 2, title: "The namespace default is not used", looks: "pods in the namespace default", remedy: "move them to a namespace of their own", needs: []source{sourcePods}, judge: inDefault},
		}},
	}
}

// guideSections are checks that the NSA/CISA guide has and CIS does not.
func guideSections() []section {
	return []section{{"NSA/CISA: what CIS does not have", []item{
		{
			id: "read-only-root", nsa: guidePods, title: "Containers cannot change their own files", looks: "securityContext.readOnlyRootFilesystem of containers", remedy: "set readOnlyRootFilesystem: true, and mount an emptyDir where the program writes",
			needs: []source{sourcePods}, judge: with(writableRoot, "a container may write to its root filesystem"),
		},
		{
			id: "added-capabilities", nsa: guidePods, title: "No container gets further capabilities", looks: "securityContext.capabilities.add of containers; NET_BIND_SERVICE is allowed", remedy: "remove the capabilities", needs: []source{sourcePods},
			judge: with(addsCapabilities, "a container adds capabilities"),
		},
		{
			id: "resource-limits", nsa: guideNetwork, title: "Containers have limits of CPU and memory", looks: "resources.limits of containers, and of pods as a whole", remedy: "set limits; a LimitRange in the namespace gives them to pods that are created after it",
			needs: []source{sourcePods}, judge: with(noLimits, "a container has no limit of CPU or memory"),
		},
		{
			id: "default-deny", nsa: guideNetwork, title: "Namespaces deny traffic that no policy allows", looks: "NetworkPolicies that select all pods, of namespaces with workloads", remedy: "create a NetworkPolicy with podSelector: {} and policyTypes: [Ingress, Egress]",
			needs: []source{sourcePods, sourceNetwork}, judge: denyByDefault,
		},
		{
			id: "control-planes-apart", nsa: guideNetwork, title: "Workloads do not run on control planes", looks: "taints of nodes with the label " + roleLabel, remedy: "kubectl taint node NODE " + roleLabel + ":NoSchedule",
			needs: []source{sourceNodes}, judge: tainted,
		},
		{
			id: "anonymous-roles", nsa: guideAccess, title: "Requests without credentials have no rights", looks: "bindings of system:anonymous and system:unauthenticated, and whether such requests are answered", remedy: "delete the bindings, or refuse such requests: see cis-1.2.1",
			needs: []source{sourceRBAC, sourceAnonymous}, judge: anonymousRights,
		},
		{
			id: "supported-version", nsa: guideUpgrade, title: "The minor of Kubernetes is supported", looks: "versions of the API server and of kubelets, and the newest minor in the data of this program", remedy: "upgrade: `constellation check` lists what stands against it",
			needs: []source{sourceNodes}, judge: supported,
		},
		{id: "metadata-service", nsa: guideNetwork, manual: true, title: "Pods cannot reach the metadata service of the cloud", looks: "nothing: firewalls are not visible", remedy: "deny the link-local address of the metadata service to pods, by a NetworkPolicy or a firewall"},
		{id: "logs-elsewhere", nsa: guideAudit, manual: true, title: "Logs are sent out of the cluster, and raise alerts", looks: "nothing: where logs go is not visible", remedy: "send audit logs and logs of pods to another system"},
		{id: "scanned-images", nsa: guideUpgrade, manual: true, title: "Images are scanned for vulnerabilities", looks: "nothing: scanners are not visible", remedy: "scan images when they are built and while they run"},
	}}}
}

// tainted judges the taints of control planes.
func tainted(f *facts) verdict {
	var t tally
	for _, n := range f.nodes {
		if n.controlPlane {
			seen := "is tainted"
			if !n.tainted { // a cordon ends, and does not count
				seen = "has no taint: workloads may run there"
			}
			t.add(goodIf(n.tainted), seen, "node/"+n.name)
		}
	}
	if t.seen == nil {
		return notVisible("no node has the label " + roleLabel)
	}
	return t.verdict("")
}

// isPublic reports whether a binding of Kubernetes gives its version and health alone, as system:public-info-viewer does
// unless its role was changed.
func (b *binding) isPublic() bool {
	return b.builtIn && !slices.ContainsFunc(b.rules, func(r rbacv1.PolicyRule) bool {
		return len(r.Resources) > 0 || slices.ContainsFunc(r.NonResourceURLs, func(path string) bool { return !slices.Contains(publicPaths, path) })
	})
}

var publicPaths = []string{"/healthz", "/livez", "/readyz", "/version", "/version/"}

// anonymousRights judges what requests without credentials may do.
func anonymousRights(f *facts) verdict {
	var t tally
	if f.anonymous[anonymousPaths[0]] == 401 {
		t.add(good, "requests without credentials are refused", "")
		return t.verdict("")
	}
	for i := range f.bindings {
		b := &f.bindings[i]
		for _, s := range []string{"user system:anonymous", "group system:unauthenticated"} {
			if slices.Contains(b.subjects, s) && !b.isPublic() {
				t.add(bad, s+", by "+b.role, b.object)
			}
		}
	}
	// Roles are not the only authorizer: with AlwaysAllow, no binding shows the rights.
	if code := f.anonymous[anonymousPaths[0]]; code == 200 {
		t.add(bad, fmt.Sprintf("%s without credentials: answered (%d)", anonymousPaths[0], code), "")
	}
	return t.verdict("version and health alone")
}

// supportedMinors is the number of minors that Kubernetes supports at a time.
const supportedMinors = 3

// supported judges the versions of API server and kubelets.
func supported(f *facts) verdict {
	newest := lifecycle.Newest()
	judge := func(v version.Version) (string, state) {
		behind := newest.Minor() - v.Minor()
		seen := v.MinorString()
		if behind >= supportedMinors {
			return fmt.Sprintf("%s: %d minors behind %s", seen, behind, newest.MinorString()), bad
		}
		return seen, good
	}
	var t tally
	seen, s := judge(f.version)
	t.add(s, "API server "+seen, "")
	for _, n := range f.nodes {
		v, err := version.Parse(n.version)
		if err != nil {
			t.add(hidden, "the version of the kubelet cannot be read", "node/"+n.name)
			continue
		}
		seen, s := judge(v)
		t.add(s, "kubelet "+seen, "node/"+n.name)
	}
	return t.verdict("")
}
