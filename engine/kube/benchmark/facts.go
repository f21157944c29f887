package benchmark

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/pager"

	"constellation/engine/distribution"
	"constellation/engine/kube/preflight"
	"constellation/engine/plan"
	"constellation/engine/version"
)

const systemNamespace = metav1.NamespaceSystem

// source is what checks read.
type source string

const (
	sourceNodes      source = "nodes"
	sourcePods       source = "pods"
	sourceNamespaces source = "namespaces"
	sourceAccounts   source = "accounts"
	sourceRBAC       source = "rbac"
	sourceNetwork    source = "network"
	sourceKubelets   source = "kubelets"
	sourceProxy      source = "proxy"
	sourceAdmission  source = "admission"
	sourceSelf       source = "self"
	sourceAnonymous  source = "anonymous"
)

// names are the kinds of objects of sources.
var names = map[source]string{
	sourceNodes: "Nodes", sourcePods: "Pods", sourceNamespaces: "Namespaces", sourceAccounts: "ServiceAccounts", sourceRBAC: "roles and bindings", sourceNetwork: "NetworkPolicies",
	sourceKubelets: "configurations of kubelets", sourceProxy: "the configuration of kube-proxy", sourceAdmission: "webhooks and policies of admission",
	sourceSelf: "the user of the kubeconfig", sourceAnonymous: "answers to requests without credentials",
}

func lists(group string, resources ...string) (out []preflight.Right) {
	for _, r := range resources {
		out = append(out, preflight.Right{Verb: "list", Group: group, Resource: r})
	}
	return out
}

// rightsOf are the permissions that sources need. Any user may send the requests of the other sources.
var rightsOf = map[source][]preflight.Right{
	sourceNodes:      lists("", "nodes"),
	sourcePods:       lists("", "pods"),
	sourceNamespaces: lists("", "namespaces"),
	sourceAccounts:   lists("", "serviceaccounts"),
	sourceRBAC:       lists(rbacv1.GroupName, "clusterrolebindings", "clusterroles", "rolebindings", "roles"),
	sourceNetwork:    lists("networking.k8s.io", "networkpolicies"),
	sourceKubelets:   append(lists("", "nodes"), preflight.Right{Verb: "get", Resource: "nodes/proxy"}),
	sourceProxy:      {{Verb: "get", Resource: "configmaps", Name: "kube-proxy"}},
	sourceAdmission:  lists(admissionv1.GroupName, "validatingadmissionpolicies", "validatingwebhookconfigurations"),
}

// facts are what was read of a cluster.
type facts struct {
	version      version.Version
	distribution distribution.Distribution
	// unread is why sources were not read.
	unread map[source]string

	nodes     []node
	kubelets  []kubelet
	planes    map[string][]staticPod // by component
	workloads map[string]*workload   // by object
	// namespaces are their labels.
	namespaces map[string]map[string]string
	accounts   []account
	roles      []role
	bindings   []binding
	policies   map[string]isolation // by namespace
	// proxyConfig is that of kube-proxy; nil without its ConfigMap, empty if the ConfigMap has no config.conf.
	proxyConfig *string
	// reviewers are webhooks and policies of admission that look at pods.
	reviewers []string
	user      string
	groups    []string
	// anonymous are HTTP statuses of requests without credentials, by path.
	anonymous map[string]int
}

type node struct {
	name         string
	controlPlane bool
	// tainted: a taint keeps workloads away that is not a condition of the moment, such as a cordon.
	tainted bool
	version string
}

// momentary are prefixes of taints that Kubernetes, a cloud or a network plugin sets and removes by itself.
var momentary = []string{"node.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "node.cilium.io/"}

func keepsAway(t corev1.Taint) bool {
	return t.Effect != corev1.TaintEffectPreferNoSchedule && !slices.ContainsFunc(momentary, func(prefix string) bool { return strings.HasPrefix(t.Key, prefix) })
}

type account struct {
	namespace, name string
	automount       string // "true", "false", "not set"
}

type role struct {
	object  string
	builtIn bool
	rules   []rbacv1.PolicyRule
}

// pageSize is the number of objects per page. It bounds the memory of a request in the API server and here.
const pageSize = 500

const (
	// sourceLimit bounds a source without kubelets.
	sourceLimit = 2 * time.Minute
	// anonymousLimit bounds the requests without credentials.
	anonymousLimit = 10 * time.Second
)

// healthPath is what probes without credentials may read.
const healthPath = "/livez"

var anonymousPaths = []string{"/api", healthPath}

// collector reads sources. Each one writes fields of facts that no other writes.
type collector struct {
	config *rest.Config
	core   kubernetes.Interface
	f      *facts
}

// collect reads sources at the same time. The error is the context's.
func collect(ctx context.Context, config *rest.Config, r Request, wanted []source, emit func(plan.Event)) (*facts, error) {
	config = rest.CopyConfig(config)
	// Reading everything is one burst. API priority and fairness protects other clients.
	config.QPS, config.Burst = 500, 1000
	config.WarningHandler = rest.NoWarnings{}
	typed := rest.CopyConfig(config)
	typed.AcceptContentTypes, typed.ContentType = runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON, runtime.ContentTypeProtobuf
	core, err := kubernetes.NewForConfig(typed)
	if err != nil {
		return nil, fmt.Errorf("make Kubernetes client: %w", err)
	}
	f := &facts{version: r.Version, distribution: r.Distribution, unread: map[source]string{}}
	c := &collector{config: config, core: core, f: f}
	sources := map[source]func(context.Context) error{
		sourceNodes: c.readNodes, sourcePods: c.readPods, sourceNamespaces: c.readNamespaces, sourceAccounts: c.readAccounts, sourceRBAC: c.readRBAC, sourceNetwork: c.readNetwork,
		sourceProxy: c.readProxy, sourceAdmission: c.readAdmission, sourceSelf: c.readSelf, sourceAnonymous: c.readAnonymous,
	}
	maps.DeleteFunc(sources, func(s source, _ func(context.Context) error) bool {
		return !slices.Contains(wanted, s) && (s != sourceNodes || !slices.Contains(wanted, sourceKubelets))
	})
	for s := range sources {
		emit(reading(s, plan.StateRunning))
	}
	var mu sync.Mutex // of unread and emit
	var running sync.WaitGroup
	for s, read := range sources {
		running.Go(func() {
			limited, cancel := context.WithTimeout(ctx, sourceLimit)
			defer cancel()
			err := read(limited)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				f.unread[s] = whyUnread(s, err)
			}
			emit(reading(s, string(plan.Info)))
		})
	}
	running.Wait()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return f, nil
}

// whyUnread is why a source was not read.
func whyUnread(s source, err error) string {
	switch {
	case apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err):
		return denied(rightsOf[s])
	case errors.Is(err, context.DeadlineExceeded):
		return names[s] + " could not be read in time"
	}
	return names[s] + " could not be read: " + err.Error()
}

// each calls do for each object of a list, page by page.
func each[L runtime.Object, T any](ctx context.Context, list func(context.Context, metav1.ListOptions) (L, error), do func(T)) error {
	p := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return list(ctx, o) })
	p.PageSize = pageSize
	p.FullListIfExpired = true
	return p.EachListItem(ctx, metav1.ListOptions{}, func(o runtime.Object) error {
		if x, ok := o.(T); ok {
			do(x)
		}
		return nil
	})
}

const roleLabel = "node-role.kubernetes.io/control-plane"

// readNodes also reads the kubelets of the nodes.
func (c *collector) readNodes(ctx context.Context) error {
	var list []corev1.Node
	err := each(ctx, c.core.CoreV1().Nodes().List, func(n *corev1.Node) {
		_, plane := n.Labels[roleLabel]
		c.f.nodes = append(c.f.nodes, node{
			name: n.Name, controlPlane: plane, version: n.Status.NodeInfo.KubeletVersion,
			tainted: slices.ContainsFunc(n.Spec.Taints, keepsAway),
		})
		list = append(list, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}, Status: corev1.NodeStatus{Addresses: n.Status.Addresses, DaemonEndpoints: n.Status.DaemonEndpoints}})
	})
	if err != nil {
		return err
	}
	reports := preflight.Kubelets(ctx, c.config, c.core, list)
	for i := range list {
		k := reports[list[i].Name]
		if k.Denied {
			k.Why = denied(rightsOf[sourceKubelets][1:])
		}
		c.f.kubelets = append(c.f.kubelets, kubelet{node: list[i].Name, config: k.Config, flags: k.Flags, why: k.Why})
	}
	return nil
}

func (c *collector) readPods(ctx context.Context) error {
	c.f.workloads, c.f.planes = map[string]*workload{}, map[string][]staticPod{}
	return each(ctx, c.core.CoreV1().Pods(metav1.NamespaceAll).List, c.f.addPod)
}

func (c *collector) readNamespaces(ctx context.Context) error {
	c.f.namespaces = map[string]map[string]string{}
	return each(ctx, c.core.CoreV1().Namespaces().List, func(n *corev1.Namespace) {
		if n.DeletionTimestamp == nil {
			c.f.namespaces[n.Name] = n.Labels
		}
	})
}

func (c *collector) readAccounts(ctx context.Context) error {
	return each(ctx, c.core.CoreV1().ServiceAccounts(metav1.NamespaceAll).List, func(a *corev1.ServiceAccount) {
		automount := "not set"
		if a.AutomountServiceAccountToken != nil {
			automount = fmt.Sprint(*a.AutomountServiceAccountToken)
		}
		c.f.accounts = append(c.f.accounts, account{a.Namespace, a.Name, automount})
	})
}

// isBuiltIn reports whether the API server made an object of RBAC. The label alone does not count: others
// can set it, too.
func isBuiltIn(m *metav1.ObjectMeta) bool {
	known := strings.HasPrefix(m.Name, "system:") || slices.Contains([]string{"cluster-admin", "admin", "edit", "view"}, m.Name)
	return known && m.Labels["kubernetes.io/bootstrapping"] == "rbac-defaults"
}

func (c *collector) readRBAC(ctx context.Context) error {
	r := c.core.RbacV1()
	rules := map[string][]rbacv1.PolicyRule{}
	if err := each(ctx, r.ClusterRoles().List, func(o *rbacv1.ClusterRole) {
		rules["ClusterRole "+o.Name] = o.Rules
		c.f.roles = append(c.f.roles, role{"clusterrole/" + o.Name, isBuiltIn(&o.ObjectMeta), o.Rules})
	}); err != nil {
		return err
	}
	if err := each(ctx, r.Roles(metav1.NamespaceAll).List, func(o *rbacv1.Role) {
		rules["Role "+o.Namespace+"/"+o.Name] = o.Rules
		c.f.roles = append(c.f.roles, role{"role/" + o.Namespace + "/" + o.Name, isBuiltIn(&o.ObjectMeta), o.Rules})
	}); err != nil {
		return err
	}
	add := func(m *metav1.ObjectMeta, kind string, ref rbacv1.RoleRef, subjects []rbacv1.Subject) {
		b := binding{object: kind + "/" + m.Name, namespace: m.Namespace, builtIn: isBuiltIn(m), role: ref.Kind + " " + ref.Name}
		of := b.role
		if m.Namespace != "" {
			b.object = kind + "/" + m.Namespace + "/" + m.Name
			if ref.Kind == "Role" {
				of = "Role " + m.Namespace + "/" + ref.Name
			}
		}
		b.rules = rules[of]
		for _, s := range subjects {
			b.subjects = append(b.subjects, subject(s, m.Namespace))
		}
		c.f.bindings = append(c.f.bindings, b)
	}
	if err := each(ctx, r.ClusterRoleBindings().List, func(o *rbacv1.ClusterRoleBinding) { add(&o.ObjectMeta, "clusterrolebinding", o.RoleRef, o.Subjects) }); err != nil {
		return err
	}
	return each(ctx, r.RoleBindings(metav1.NamespaceAll).List, func(o *rbacv1.RoleBinding) { add(&o.ObjectMeta, "rolebinding", o.RoleRef, o.Subjects) })
}

func (c *collector) readProxy(ctx context.Context) error {
	m, err := c.core.CoreV1().ConfigMaps(systemNamespace).Get(ctx, "kube-proxy", metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	config := m.Data["config.conf"]
	c.f.proxyConfig = &config
	return nil
}

// ours is the prefix of policies that decide about nodes, not about how secure pods are.
const ours = "constellation-"

func (c *collector) readAdmission(ctx context.Context) error {
	pods := func(r admissionv1.Rule) bool {
		return hasOr(r.APIGroups, "") && (hasOr(r.Resources, "pods") || slices.Contains(r.Resources, "*/*"))
	}
	a := c.core.AdmissionregistrationV1()
	if err := each(ctx, a.ValidatingWebhookConfigurations().List, func(w *admissionv1.ValidatingWebhookConfiguration) {
		for i := range w.Webhooks {
			if slices.ContainsFunc(w.Webhooks[i].Rules, func(r admissionv1.RuleWithOperations) bool { return pods(r.Rule) }) {
				c.f.reviewers = append(c.f.reviewers, "validatingwebhookconfiguration/"+w.Name)
				return
			}
		}
	}); err != nil {
		return err
	}
	err := each(ctx, a.ValidatingAdmissionPolicies().List, func(p *admissionv1.ValidatingAdmissionPolicy) {
		if m := p.Spec.MatchConstraints; m != nil && !strings.HasPrefix(p.Name, ours) && slices.ContainsFunc(m.ResourceRules, func(r admissionv1.NamedRuleWithOperations) bool { return pods(r.Rule) }) {
			c.f.reviewers = append(c.f.reviewers, "validatingadmissionpolicy/"+p.Name)
		}
	})
	if apierrors.IsNotFound(err) {
		return nil // older API servers do not have them
	}
	return err
}

func (c *collector) readSelf(ctx context.Context) error {
	r, err := c.core.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	c.f.user, c.f.groups = r.Status.UserInfo.Username, r.Status.UserInfo.Groups
	return nil
}

// readAnonymous sends requests without credentials.
func (c *collector) readAnonymous(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, anonymousLimit)
	defer cancel()
	config := rest.AnonymousClientConfig(c.config)
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return err
	}
	c.f.anonymous = map[string]int{}
	for _, path := range anonymousPaths {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, base.JoinPath(path).String(), nil)
		if err != nil {
			return err
		}
		answer, err := client.Do(req)
		if err != nil {
			return err
		}
		answer.Body.Close()
		c.f.anonymous[path] = answer.StatusCode
	}
	return nil
}
