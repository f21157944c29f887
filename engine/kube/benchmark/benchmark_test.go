package benchmark

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/check"
	"constellation/engine/lifecycle"
)

// planeArgs are command lines of a control plane on which each check passes.
var planeArgs = map[string]string{
	apiServer: `--etcd-servers=https://127.0.0.1:2379 --anonymous-auth=false --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction,EventRateLimit,AlwaysPullImages,DenyServiceExternalIPs,ImagePolicyWebhook
 --kubelet-client-certificate=a.crt --kubelet-client-key=a.key --kubelet-certificate-authority=ca.crt --profiling=false --audit-log-path=/var/log/a --audit-log-maxage=30 --audit-log-maxbackup=10 --audit-log-maxsize=100
 --audit-policy-file=/etc/p --service-account-key-file=sa.pub --etcd-certfile=e.crt --etcd-keyfile=e.key --etcd-cafile=etcd/ca.crt --tls-cert-file=s.crt --tls-private-key-file=s.key --client-ca-file=ca.crt
 --encryption-provider-config=/etc/e --tls-min-version=VersionTLS13 --service-account-extend-token-expiration=false`,
	controllerManager: `--kubeconfig=c --terminated-pod-gc-threshold=1000 --profiling=false --use-service-account-credentials=true --service-account-private-key-file=sa.key --root-ca-file=ca.crt --bind-address=127.0.0.1`,
	scheduler:         `--kubeconfig=c --profiling=false --bind-address=127.0.0.1`,
	etcd:              `--data-dir=/var/lib/etcd --cert-file=a --key-file=b --client-cert-auth=true --peer-cert-file=a --peer-key-file=b --peer-client-cert-auth=true --trusted-ca-file=etcd/ca.crt`,
}

// weakArgs are command lines on which each check of a control plane fails.
var weakArgs = map[string]string{
	apiServer: `--etcd-servers=https://127.0.0.1:2379 --token-auth-file=t --authorization-mode=AlwaysAllow --enable-admission-plugins=AlwaysAdmit --disable-admission-plugins=ServiceAccount,NamespaceLifecycle
 --audit-log-maxage=1 --audit-log-maxbackup=1 --audit-log-maxsize=1 --request-timeout=1h --service-account-lookup=false --tls-cipher-suites=TLS_RSA_WITH_AES_128_CBC_SHA`,
	controllerManager: `--kubeconfig=c --terminated-pod-gc-threshold=0 --feature-gates=RotateKubeletServerCertificate=false`,
	scheduler:         `--kubeconfig=c --bind-address=0.0.0.0`,
	etcd:              `--data-dir=/var/lib/etcd --auto-tls=true --peer-auto-tls=true`,
}

func planesOf(args map[string]string) map[string][]staticPod {
	out := map[string][]staticPod{}
	for component, line := range args {
		out[component] = []staticPod{readStaticPod("a", &corev1.Container{Name: component, Command: append([]string{component}, strings.Fields(line)...)})}
	}
	return out
}

var no, yes = new(bool), func() *bool { b := true; return &b }()

func text(s string) *string { return &s }

// podOf returns a pod of the namespace shop.
func podOf(name string, change func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "shop"},
		Spec: corev1.PodSpec{
			ServiceAccountName: "web", SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: yes, SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Containers: []corev1.Container{{
				Name: "web", Image: "registry.example/shop/web:v1",
				SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: no, ReadOnlyRootFilesystem: yes, Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}},
				Resources:       corev1.ResourceRequirements{Limits: corev1.ResourceList{"cpu": resource.MustParse("1"), "memory": resource.MustParse("1Gi")}},
			}},
		},
	}
	if change != nil {
		change(p)
	}
	return p
}

func withToken(p *corev1.Pod) {
	p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "token", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{}}}}}})
}

// cni returns a pod of the DaemonSet of a network plugin, as secure as the others.
func cni(image string) *corev1.Pod {
	return podOf("cni-x", func(p *corev1.Pod) {
		p.Namespace = systemNamespace
		p.Spec.Containers[0].Image = image
		p.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", Name: "cni", Controller: yes}}
	})
}

var strongKubelet = map[string]any{
	"authentication": map[string]any{"anonymous": map[string]any{"enabled": false}, "x509": map[string]any{"clientCAFile": "/etc/kubernetes/pki/ca.crt"}},
	"authorization":  map[string]any{"mode": "Webhook"}, "streamingConnectionIdleTimeout": "4h0m0s", "makeIPTablesUtilChains": true, "eventRecordQPS": float64(50),
	"serverTLSBootstrap": true, "rotateCertificates": true, "tlsMinVersion": "VersionTLS12", "tlsCipherSuites": []any{"TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"}, "podPidsLimit": float64(4096), "seccompDefault": true,
}

var weakKubelet = map[string]any{
	"authentication": map[string]any{"anonymous": map[string]any{"enabled": true}}, "authorization": map[string]any{"mode": "AlwaysAllow"}, "readOnlyPort": float64(10255),
	"streamingConnectionIdleTimeout": "0s", "makeIPTablesUtilChains": false, "featureGates": map[string]any{"RotateKubeletServerCertificate": false}, "podPidsLimit": float64(-1),
}

// strong are facts of a cluster that passes each check.
func strong() *facts {
	f := &facts{
		version: lifecycle.Newest(), unread: map[source]string{}, planes: planesOf(planeArgs), workloads: map[string]*workload{},
		nodes: []node{{name: "a", controlPlane: true, tainted: true, version: lifecycle.Newest().String()}}, kubelets: []kubelet{{node: "a", config: strongKubelet, flags: map[string]string{"v": "2"}}},
		namespaces: map[string]map[string]string{"shop": {enforceLabel: restricted}, systemNamespace: {}}, accounts: []account{{"shop", "default", "false"}, {"shop", "web", "not set"}},
		bindings: []binding{
			{object: "clusterrolebinding/cluster-admin", builtIn: true, role: "ClusterRole cluster-admin", rules: all, subjects: []string{"group system:masters"}},
			{object: "rolebinding/shop/web", namespace: "shop", role: "Role shop/web", rules: all, subjects: []string{"serviceaccount/shop/web"}},
			{object: "clusterrolebinding/system:controller:x", builtIn: true, role: "ClusterRole system:controller:x", rules: all, subjects: []string{"serviceaccount/kube-system/x"}},
		},
		roles: []role{{"clusterrole/cluster-admin", true, all}}, policies: map[string]isolation{"shop": {1, true, true}},
		user: "jane", groups: []string{"system:authenticated"}, anonymous: map[string]int{"/api": 401, "/livez": 200},
		proxyConfig: text("metricsBindAddress: 127.0.0.1:10249\n"),
	}
	f.addPod(podOf("web", withToken))
	f.addPod(cni("quay.io/cilium/cilium:v1"))
	return f
}

var all = []rbacv1.PolicyRule{{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"*"}}}

// weak are facts of a cluster that fails each check.
func weak() *facts {
	f := &facts{
		version: lifecycle.Newest(), unread: map[source]string{}, planes: planesOf(weakArgs), workloads: map[string]*workload{}, nodes: []node{{name: "a", controlPlane: true, version: lifecycle.Minors()[0].Kubernetes + ".0"}},
		kubelets:   []kubelet{{node: "a", config: weakKubelet, flags: map[string]string{"hostname-override": "x"}}},
		namespaces: map[string]map[string]string{"default": {}, "shop": {enforceLabel: "privileged"}}, accounts: []account{{"shop", "default", "not set"}},
		bindings: []binding{
			{object: "clusterrolebinding/x", role: "ClusterRole cluster-admin", rules: all, subjects: []string{"user mallory", "serviceaccount/shop/default", "group system:unauthenticated"}},
		},
		roles: []role{{"clusterrole/x", false, all}}, policies: map[string]isolation{}, user: "admin", groups: []string{"system:masters"}, anonymous: map[string]int{"/api": 403, "/livez": 200},
		proxyConfig: text("metricsBindAddress: 0.0.0.0:10249\n"),
	}
	f.addPod(podOf("web", func(p *corev1.Pod) {
		withToken(p)
		p.Namespace, p.Spec.ServiceAccountName, p.Spec.HostPID, p.Spec.HostIPC, p.Spec.HostNetwork, p.Spec.SecurityContext = "default", "default", true, true, true, nil
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{}}})
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{
			Ports: []corev1.ContainerPort{{HostPort: 80}}, EnvFrom: []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{}}},
		}, corev1.Container{SecurityContext: &corev1.SecurityContext{
			Privileged: yes, Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"SYS_ADMIN"}}, WindowsOptions: &corev1.WindowsSecurityContextOptions{HostProcess: yes},
		}})
	}))
	f.addPod(podOf("other", func(p *corev1.Pod) { withToken(p); p.Spec.ServiceAccountName = "idle" }))
	f.addPod(cni("ghcr.io/flannel-io/flannel/flannel:v1"))
	return f
}

// results returns the results of all checks by ID.
func results(f *facts) map[string]check.SecurityResult {
	out := map[string]check.SecurityResult{}
	for _, s := range sections() {
		for i := range s.items {
			r := s.items[i].run(s.title, f)
			out[r.ID] = r
		}
	}
	return out
}

// TestEachCheckPassesAndFails runs each check on a cluster that has all that the guides want, and on one
// that has nothing of it.
func TestEachCheckPassesAndFails(t *testing.T) {
	good, wrong := results(strong()), results(weak())
	for _, c := range Checks() {
		t.Run(c.ID, func(t *testing.T) {
			g, w := good[c.ID], wrong[c.ID]
			switch {
			case strings.HasPrefix(c.LooksAt, "mode and owner of "):
				if g.Status != check.SecurityNotVisible || w.Status != check.SecurityNotVisible || c.Command == "" || c.Remedy == "" {
					t.Errorf("a check of a file is %s and %s, command %q", g.Status, w.Status, c.Command)
				}
			case !c.Automated:
				if g.Status != check.SecurityManual {
					t.Errorf("a check for people is %s", g.Status)
				}
			case c.ID == "cis-5.1.7": // other certificates are not visible
				if g.Status != check.SecurityManual || w.Status != check.SecurityFailed {
					t.Errorf("%s and %s", g.Status, w.Status)
				}
			default:
				if g.Status != check.SecurityPassed || len(g.Evidence) == 0 {
					t.Errorf("on a strong cluster it is %s (%s): %+v", g.Status, g.Reason, g.Evidence)
				}
				if w.Status != check.SecurityFailed || len(w.Evidence) == 0 || !w.Evidence[0].Wrong {
					t.Errorf("on a weak cluster it is %s (%s): %+v", w.Status, w.Reason, w.Evidence)
				}
			}
		})
	}
}

// A check never passes if its source was not read, or if another process or file decides.
func TestUnseenSettingsNeverPass(t *testing.T) {
	everything := strong()
	for s := range names {
		everything.unread[s] = "not read: " + string(s)
	}
	for id, r := range results(everything) {
		if r.Status == check.SecurityPassed || r.Status == check.SecurityFailed {
			t.Errorf("nothing was read, and %s is %s: %+v", id, r.Status, r.Evidence)
		}
	}
	for _, c := range []struct {
		name   string
		change func(*facts)
		hidden []string
	}{
		{name: "another way to run the control plane", change: func(f *facts) { f.planes = nil }, hidden: []string{"cis-1.2.2", "cis-1.3.2", "cis-1.4.1", "cis-2.1", "cis-2.7", "cis-3.2.1"}},
		{name: "a managed control plane", change: func(f *facts) {
			f.planes = nil
			f.distribution.Managed = true
			f.namespaces["other"] = nil
		}, hidden: []string{"cis-1.2.2", "cis-5.2.1"}},
		{name: "a command line in a shell", change: func(f *facts) {
			f.planes[apiServer] = []staticPod{readStaticPod("a", &corev1.Container{Name: apiServer, Command: []string{"/bin/sh", "-c", "exec kube-apiserver --profiling=false"}})}
		}, hidden: []string{"cis-1.2.2", "cis-1.2.10", "cis-2.7"}},
		{name: "one of two control planes that cannot be read", change: func(f *facts) { f.planes[apiServer] = append(f.planes[apiServer], staticPod{node: "b"}) }, hidden: []string{"cis-1.2.2"}},
		{name: "files of configuration", change: func(f *facts) {
			f.planes = planesOf(map[string]string{
				apiServer: planeArgs[apiServer] + " --authorization-config=/a --admission-control-config-file=/b", scheduler: "--config=/etc/s.yaml", etcd: "--config-file=/etc/e.yaml", controllerManager: planeArgs[controllerManager],
			})
			f.namespaces["other"] = nil
		}, hidden: []string{"cis-1.2.6", "cis-1.2.7", "cis-1.2.8", "cis-1.4.1", "cis-2.1", "cis-2.3", "cis-2.7", "cis-5.2.1", "cis-5.2.3"}},
		{name: "a webhook that reviews pods", change: func(f *facts) {
			f.namespaces["other"] = nil
			f.reviewers = []string{"validatingwebhookconfiguration/kyverno"}
		}, hidden: []string{"cis-5.2.1", "cis-5.2.2"}},
		{name: "a control plane without a mirror pod of its API server", change: func(f *facts) {
			f.nodes = append(f.nodes, node{name: "b", controlPlane: true, tainted: true, version: f.nodes[0].version})
			f.namespaces["other"] = nil
		}, hidden: []string{"cis-1.2.2", "cis-1.3.2", "cis-1.4.1", "cis-3.2.1", "cis-5.2.1"}},
		{name: "a ConfigMap of kube-proxy without its configuration", change: func(f *facts) { f.proxyConfig = text("") }, hidden: []string{"cis-4.3.1"}},
		{name: "a webhook that reviews pods while Pod Security is off", change: func(f *facts) {
			f.planes[apiServer] = withFlags("--disable-admission-plugins=PodSecurity")
			f.reviewers = []string{"validatingwebhookconfiguration/kyverno"}
		}, hidden: []string{"cis-5.2.1", "cis-5.2.2"}},
		{name: "a pod without a profile, and a kubelet that does not answer", change: func(f *facts) {
			f.kubelets = append(f.kubelets, kubelet{node: "b", why: "no answer"})
			f.addPod(podOf("plain", func(p *corev1.Pod) { p.Spec.SecurityContext.SeccompProfile = nil }))
		}, hidden: []string{"cis-5.6.2"}},
		{name: "bindings that cannot be read", change: func(f *facts) {
			f.anonymous = map[string]int{"/api": 403, "/livez": 200}
			f.unread[sourceRBAC] = "denied"
			f.bindings = nil
		}, hidden: []string{"nsa-anonymous-roles", "cis-5.1.1", "cis-5.1.3"}},
		{name: "a kubelet that does not answer", change: func(f *facts) { f.kubelets = append(f.kubelets, kubelet{node: "b", why: "no answer"}) }, hidden: []string{"cis-4.2.1", "cis-4.2.14"}},
		{name: "a kubelet that reports no flags", change: func(f *facts) { f.kubelets[0].flags = nil }, hidden: []string{"cis-4.2.7"}},
		{name: "no answer to a request without credentials", change: func(f *facts) { f.anonymous = map[string]int{} }, hidden: []string{"cis-1.2.1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := strong()
			c.change(f)
			found := results(f)
			for _, id := range c.hidden {
				if r := found[id]; r.Status != check.SecurityNotVisible || r.Reason == "" {
					t.Errorf("%s is %s (%q): %+v", id, r.Status, r.Reason, r.Evidence)
				}
			}
		})
	}
}

// withFlags returns the API server of node a with further flags.
func withFlags(flags string) []staticPod {
	return planesOf(map[string]string{apiServer: planeArgs[apiServer] + " " + flags})[apiServer]
}

// TestOneWeaknessFails changes one thing of a strong cluster. Each row names the check that finds it.
func TestOneWeaknessFails(t *testing.T) {
	pod := func(change func(*corev1.Pod)) func(*facts) {
		return func(f *facts) { f.addPod(podOf("odd", change)) }
	}
	container := func(change func(*corev1.Container)) func(*facts) {
		return pod(func(p *corev1.Pod) { change(&p.Spec.Containers[0]) })
	}
	debug := func(x *corev1.SecurityContext) func(*facts) {
		return pod(func(p *corev1.Pod) {
			p.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "debug", SecurityContext: x}}}
		})
	}
	public := func(rules ...rbacv1.PolicyRule) func(*facts) {
		return func(f *facts) {
			f.anonymous = map[string]int{"/api": 403, "/livez": 200}
			f.bindings = append(f.bindings, binding{object: "clusterrolebinding/system:public-info-viewer", builtIn: true, role: "ClusterRole system:public-info-viewer", rules: rules, subjects: []string{"group system:unauthenticated"}})
		}
	}
	for _, tt := range []struct {
		name, id string
		change   func(*facts)
		passes   bool
	}{
		{name: "labels without the plugin that enforces them", id: "cis-5.2.1", change: func(f *facts) { f.planes[apiServer] = withFlags("--disable-admission-plugins=PodSecurity") }},
		{name: "no label against privileged pods has an effect", id: "cis-5.2.2", change: func(f *facts) { f.planes[apiServer] = withFlags("--disable-admission-plugins=PodSecurity") }},
		{name: "a pod without limits", id: "nsa-resource-limits", change: container(func(c *corev1.Container) { c.Resources.Limits = nil })},
		{name: "a limit of memory alone", id: "nsa-resource-limits", change: container(func(c *corev1.Container) { delete(c.Resources.Limits, "cpu") })},
		{name: "limits of the pod as a whole", id: "nsa-resource-limits", passes: true, change: pod(func(p *corev1.Pod) {
			whole := p.Spec.Containers[0].Resources
			p.Spec.Resources, p.Spec.Containers[0].Resources = &whole, corev1.ResourceRequirements{}
		})},
		{name: "an ephemeral container, which cannot have limits", id: "nsa-resource-limits", passes: true, change: debug(&corev1.SecurityContext{})},
		{name: "a privileged ephemeral container", id: "cis-5.2.2", change: debug(&corev1.SecurityContext{Privileged: yes})},
		{name: "an ephemeral container that gains rights", id: "cis-5.2.6", change: debug(&corev1.SecurityContext{})},
		{name: "an ephemeral container without a context", id: "nsa-read-only-root", change: debug(nil)},
		{name: "a capability added after all were dropped", id: "cis-5.2.9", change: container(func(c *corev1.Container) { c.SecurityContext.Capabilities.Add = []corev1.Capability{"SYS_ADMIN"} })},
		{name: "NET_RAW in lower case", id: "cis-5.2.8", change: container(func(c *corev1.Container) { c.SecurityContext.Capabilities.Add = []corev1.Capability{"net_raw"} })},
		{name: "NET_BIND_SERVICE", id: "cis-5.2.9", passes: true, change: container(func(c *corev1.Container) {
			c.SecurityContext.Capabilities.Add = []corev1.Capability{"NET_BIND_SERVICE"}
		})},
		{name: "Unconfined although kubelets give a profile", id: "cis-5.6.2", change: container(func(c *corev1.Container) {
			c.SecurityContext.SeccompProfile = &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeUnconfined}
		})},
		{name: "no profile, and kubelets give one", id: "cis-5.6.2", passes: true, change: pod(func(p *corev1.Pod) { p.Spec.SecurityContext.SeccompProfile = nil })},
		{name: "no profile, and one kubelet gives none", id: "cis-5.6.2", change: func(f *facts) {
			f.kubelets = append(f.kubelets, kubelet{node: "b", config: weakKubelet}, kubelet{node: "c", why: "no answer"})
			f.addPod(podOf("odd", func(p *corev1.Pod) { p.Spec.SecurityContext.SeccompProfile = nil }))
		}},
		{name: "anybody is answered", id: "nsa-anonymous-roles", change: func(f *facts) { f.anonymous = map[string]int{"/api": 200, "/livez": 200} }},
		{name: "version and health", id: "nsa-anonymous-roles", passes: true, change: public(rbacv1.PolicyRule{NonResourceURLs: []string{"/livez", "/version"}, Verbs: []string{"get"}})},
		{name: "a changed role of version and health", id: "nsa-anonymous-roles", change: public(rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"list"}})},
		{name: "all paths instead of version and health", id: "nsa-anonymous-roles", change: public(rbacv1.PolicyRule{NonResourceURLs: []string{"*"}, Verbs: []string{"get"}})},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := strong()
			tt.change(f)
			want := check.SecurityFailed
			if tt.passes {
				want = check.SecurityPassed
			}
			if r := results(f)[tt.id]; r.Status != want || len(r.Evidence) == 0 {
				t.Errorf("%s is %s (%s), want %s: %+v", tt.id, r.Status, r.Reason, want, r.Evidence)
			}
		})
	}
}

// A member of etcd need not run on each control plane.
func TestEtcdOnSomeControlPlanesIsVisible(t *testing.T) {
	f := strong()
	f.nodes = append(f.nodes, node{name: "b", controlPlane: true})
	if r := results(f)["cis-2.1"]; r.Status != check.SecurityPassed {
		t.Errorf("%s (%s)", r.Status, r.Reason)
	}
}

func TestTaintsThatKeepWorkloadsAway(t *testing.T) {
	for _, tt := range []struct {
		name  string
		taint corev1.Taint
		want  bool
	}{
		{name: "kubeadm's taint of control planes", taint: corev1.Taint{Key: roleLabel, Effect: corev1.TaintEffectNoSchedule}, want: true},
		{name: "a taint of the owner", taint: corev1.Taint{Key: "CriticalAddonsOnly", Effect: corev1.TaintEffectNoExecute}, want: true},
		{name: "a cordon", taint: corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}},
		{name: "a node that is not ready", taint: corev1.Taint{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoExecute}},
		{name: "a preference", taint: corev1.Taint{Key: roleLabel, Effect: corev1.TaintEffectPreferNoSchedule}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := keepsAway(tt.taint); got != tt.want {
				t.Errorf("keeps workloads away: %v, want %v", got, tt.want)
			}
		})
	}
}

func TestNetworkPluginsAreRecognised(t *testing.T) {
	const agent = "602401143452.dkr.ecr.us-west-2.amazonaws.com/amazon/aws-network-policy-agent:v1"
	for _, tt := range []struct {
		name, image string
		args        []string
		want        check.SecurityStatus
	}{
		{name: "Cilium", image: "quay.io/cilium/cilium:v1", want: check.SecurityPassed},
		{name: "flannel", image: "ghcr.io/flannel-io/flannel/flannel:v1", want: check.SecurityFailed},
		{name: "the agent of the Amazon VPC CNI", image: agent, args: []string{"--enable-network-policy=true"}, want: check.SecurityPassed},
		{name: "the agent without its flag", image: agent, args: []string{"--enable-network-policy=false"}, want: check.SecurityManual},
		{name: "another program", image: "registry.example/shop/network-policy-agent-x:v1", want: check.SecurityManual},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := &facts{workloads: map[string]*workload{}}
			p := cni(tt.image)
			p.Spec.Containers[0].Args = tt.args
			f.addPod(p)
			if v := policyNetwork(f); v.status != tt.want {
				t.Errorf("%s, want %s: %+v", v.status, tt.want, v.evidence)
			}
		})
	}
}

// Each check of a file of the control planes also sees the folder of etcd's certificates.
func TestCommandsOfCertificatesSeeThoseOfEtcd(t *testing.T) {
	pki := t.TempDir()
	for _, name := range []string{"ca.crt", "ca.key", "etcd/ca.crt", "etcd/ca.key"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(pki, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(pki, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := map[string][]string{"cis-1.1.19": {"", "ca.crt", "ca.key", "etcd", "etcd/ca.crt", "etcd/ca.key"}, "cis-1.1.20": {"ca.crt", "etcd/ca.crt"}, "cis-1.1.21": {"ca.key", "etcd/ca.key"}}
	for _, c := range Checks() {
		files, ok := want[c.ID]
		if !ok {
			continue
		}
		out, err := exec.CommandContext(t.Context(), "sh", "-c", strings.ReplaceAll(c.Command, "/etc/kubernetes/pki", pki)).Output()
		if err != nil {
			t.Fatalf("%s: %s: %v", c.ID, c.Command, err)
		}
		var got []string
		for line := range strings.Lines(string(out)) {
			got = append(got, strings.TrimPrefix(strings.TrimPrefix(strings.Fields(line)[2], pki), "/"))
		}
		if slices.Sort(got); !slices.Equal(got, files) {
			t.Errorf("%s shows %q, want %q", c.ID, got, files)
		}
	}
}

// A wrong node counts although another cannot be read.
func TestOneWrongNodeFails(t *testing.T) {
	f := strong()
	f.kubelets = append(f.kubelets, kubelet{node: "b", why: "no answer"}, kubelet{node: "c", config: weakKubelet}, kubelet{node: "d", config: weakKubelet})
	r := results(f)["cis-4.2.1"]
	want := []string{"authentication.anonymous.enabled: true: c, d", "authentication.anonymous.enabled: false: a", "not visible: no answer: b"}
	var got []string
	for _, e := range r.Evidence {
		got = append(got, e.String())
	}
	if r.Status != check.SecurityFailed || !slices.Equal(got, want) {
		t.Errorf("%s: %q", r.Status, got)
	}
}

func TestEvidenceIsBounded(t *testing.T) {
	var objects []string
	for i := range maxObjects + 10 {
		objects = append(objects, fmt.Sprintf("node/%04d", i))
	}
	e := evidenceOf("seen", true, objects)
	if len(e.Objects) != maxObjects || e.More != 10 || e.String() != "seen: 0000, 0001, 0002, 0003 and 306 more" {
		t.Errorf("%d objects and %d more: %s", len(e.Objects), e.More, e)
	}
}

func TestFlagsAreRead(t *testing.T) {
	for _, tt := range []struct {
		name, line string
		want       flags
	}{
		{name: "with an equals sign", line: "kube-apiserver --a=1 --b=", want: flags{"a": "1", "b": ""}},
		{name: "with a space", line: "kube-apiserver --a 1 --b", want: flags{"a": "1", "b": "true"}},
		{name: "the last one counts", line: "--a=1 --a=2", want: flags{"a": "2"}},
		{name: "behind another program", line: "/go-runner --log=x /usr/bin/kube-apiserver -v=2", want: flags{"log": "x", "v": "2"}},
		{name: "a value with an equals sign", line: "--feature-gates=A=true,B=false", want: flags{"feature-gates": "A=true,B=false"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := parseFlags(strings.Fields(tt.line)); !maps.Equal(got, tt.want) {
				t.Errorf("%v, want %v", got, tt.want)
			}
		})
	}
	p := readStaticPod("a", &corev1.Container{Name: etcd, Command: []string{"etcd", "--cert-file=flag"}, Env: []corev1.EnvVar{{Name: "ETCD_CERT_FILE", Value: "env"}, {Name: "ETCD_DATA_DIR", Value: "/d"}}})
	if p.flags["cert-file"] != "flag" || p.flags["data-dir"] != "/d" || !p.readable {
		t.Errorf("etcd with an environment: %v", p)
	}
}

func TestRightsOfSubjects(t *testing.T) {
	secrets := rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}}
	one := secrets
	one.ResourceNames = []string{"a"}
	for _, tt := range []struct {
		name  string
		b     binding
		wrong bool
	}{
		{name: "a user in the whole cluster", b: binding{rules: []rbacv1.PolicyRule{secrets}, subjects: []string{"user jane"}}, wrong: true},
		{name: "a user in kube-system", b: binding{namespace: systemNamespace, rules: []rbacv1.PolicyRule{secrets}, subjects: []string{"user jane"}}, wrong: true},
		{name: "a user in one namespace", b: binding{namespace: "shop", rules: []rbacv1.PolicyRule{secrets}, subjects: []string{"user jane"}}, wrong: false},
		{name: "one object", b: binding{rules: []rbacv1.PolicyRule{one}, subjects: []string{"user jane"}}, wrong: false},
		{name: "a wildcard", b: binding{rules: all, subjects: []string{"user jane"}}, wrong: true},
		{name: "administrators", b: binding{rules: all, subjects: administrators}, wrong: false},
		{name: "a controller of Kubernetes", b: binding{builtIn: true, rules: all, subjects: []string{"serviceaccount/kube-system/x", "user system:kube-scheduler"}}, wrong: false},
		{name: "a user added to a binding of Kubernetes", b: binding{builtIn: true, rules: all, subjects: []string{"user mallory"}}, wrong: true},
		{name: "everybody, in a binding of Kubernetes", b: binding{builtIn: true, rules: all, subjects: []string{"group system:authenticated"}}, wrong: true},
		{name: "a controller of somebody else in kube-system", b: binding{rules: all, subjects: []string{"serviceaccount/kube-system/x"}}, wrong: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.b.object = "clusterrolebinding/x"
			v := few(can("", "secrets", "get", "list", "watch"))(&facts{bindings: []binding{tt.b}})
			if got := v.status == check.SecurityFailed; got != tt.wrong {
				t.Errorf("%s: %+v", v.status, v.evidence)
			}
		})
	}
	if sub := can("", "nodes/proxy", "get"); !sub(rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"*/proxy"}, Verbs: []string{"*"}}) || sub(rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"*"}}) {
		t.Error("subresources are not recognised")
	}
}

func TestOwnersOfPods(t *testing.T) {
	for _, tt := range []struct {
		name string
		pod  corev1.Pod
		want string
	}{
		{name: "a single pod", pod: corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "n"}}, want: "pod/n/a"},
		{name: "a static pod", pod: corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "etcd-cp-0", Namespace: "n", Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "x"}}, Spec: corev1.PodSpec{NodeName: "cp-0"}}, want: "static-pod/n/etcd"},
		{name: "a Deployment", pod: corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a-1-2", Namespace: "n", Labels: map[string]string{"pod-template-hash": "1"}, OwnerReferences: []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "a-1", Controller: yes}}}}, want: "deployment/n/a"},
		{name: "a CronJob", pod: corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "n", OwnerReferences: []metav1.OwnerReference{{Kind: "Job", Name: "a-29012345", Controller: yes}}}}, want: "cronjob/n/a"},
		{name: "a DaemonSet", pod: corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a-x", Namespace: "n", OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: "a", Controller: yes}}}}, want: "daemonset/n/a"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := owner(&tt.pod); got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
		})
	}
	for image, want := range map[string]string{"quay.io/cilium/cilium:v1@sha256:a": "cilium/cilium", "localhost:5000/kube-router": "localhost:5000/kube-router", "docker.io/flannel/flannel:v1": "flannel/flannel"} {
		if got := imageName(image); got != want {
			t.Errorf("image %s: %s, want %s", image, got, want)
		}
	}
}
