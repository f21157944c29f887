package preflight

import (
	"bytes"
	"cmp"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"slices"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine/plan"
)

const webhookPage = "https://kubernetes.io/docs/concepts/cluster-administration/admission-webhooks-good-practices/"

var webhookSources = []source{sourceValidating, sourceMutating, sourceNamespaces, sourceNodes, sourcePods}

var webhookChecks = []checkItem{
	{
		id: "webhook-endpoints", area: "webhooks", ref: webhookPage, run: webhookEndpoints,
		title: "every webhook that can stop the upgrade has a backend",
		needs: append([]source{sourceServices, sourceSlices}, webhookSources...),
	},
	{
		id: "webhook-one-node", area: "webhooks", ref: webhookPage, run: webhookOneNode,
		title: "no webhook that can stop the upgrade has all backends on one node that is replaced",
		needs: append([]source{sourceServices, sourceSlices, sourceReplicaSets, sourceDeployments, sourceStatefulSets}, webhookSources...),
	},
	{
		id: "webhook-exemption", area: "webhooks", ref: webhookPage, run: webhookExemption,
		title: "webhooks for pods exclude their own namespace and kube-system",
		needs: append([]source{sourceServices, sourceSlices}, webhookSources...),
	},
	{
		id: "webhook-timeout", area: "webhooks", ref: webhookPage, run: webhookTimeout,
		title: "no webhook that can stop the upgrade has a timeout above 10 s",
		needs: webhookSources,
	},
	{
		id: "webhook-ca", area: "webhooks", ref: webhookPage, run: webhookCA,
		title: "the certificates of webhooks that can stop the upgrade are valid for 30 days",
		needs: webhookSources,
	},
	{
		id: "webhook-match-policy", area: "webhooks", ref: webhookPage, run: webhookMatchPolicy,
		title: "webhooks that can stop the upgrade match every API version",
		needs: webhookSources,
	},
}

// hook is one webhook with failurePolicy Fail that reviews requests of an upgrade.
type hook struct {
	kind       string // of the configuration
	config     *metav1.ObjectMeta
	index      int // in the configuration
	name       string
	client     *admissionv1.WebhookClientConfig
	timeout    int32 // seconds
	match      admissionv1.MatchPolicyType
	conditions bool // CEL expressions that exclude objects; not evaluated here
	// namespaces and labels are the selectors of namespaces and of objects.
	namespaces, labels labels.Selector
	namespaceSelector  *metav1.LabelSelector
	// hits are the requests that it reviews: "evictions", "nodes".
	hits []string
	// pods reports whether it reviews new pods.
	pods bool
}

func (h *hook) object() string { return object(h.kind, "", h.config.Name) }

func (h *hook) title() string { return "webhook " + printable(h.name) }

// finding returns the common part of all findings on h.
func (h *hook) finding(s plan.Severity, title string) plan.Finding {
	f := plan.Finding{
		Severity: s, Title: title, Objects: []string{h.object()}, Owner: keeperOf(h.config),
		Detail: fmt.Sprintf("webhook %d of %s %s has failurePolicy Fail, and reviews %s", h.index+1, h.kind, printable(h.config.Name), enumerate(h.hits, maxTold)),
	}
	if h.client.Service != nil {
		f.Objects = append(f.Objects, object("service", h.client.Service.Namespace, h.client.Service.Name))
	}
	if h.conditions {
		f.Detail += "; its matchConditions may exclude some of it, and were not evaluated"
	}
	return f
}

// patch is the command that changes only h: it tests the name first.
func (h *hook) patch(field string, value any) string {
	return h.patchAll(change{field, value})
}

// change is a field of a webhook and its new value.
type change struct {
	field string
	value any
}

func (h *hook) patchAll(changes ...change) string {
	path := fmt.Sprintf("/webhooks/%d/", h.index)
	operations := []map[string]any{{"op": "test", "path": path + "name", "value": h.name}}
	for _, c := range changes {
		operations = append(operations, map[string]any{"op": "add", "path": path + c.field, "value": c.value})
	}
	b, err := json.Marshal(operations)
	// The patch is in single quotes.
	if err != nil || bytes.ContainsAny(b, "'\\") || printable(h.name) != h.name {
		return ""
	}
	kubectl := command("kubectl patch %s %s --type=json -p", strings.ToLower(h.kind), h.config.Name)
	if kubectl == "" {
		return ""
	}
	return fmt.Sprintf("%s '%s'", kubectl, b)
}

// ignoreSoon is the command that sets the timeout of h to 1 s with failurePolicy Ignore.
func (h *hook) ignoreSoon() string {
	return h.patchAll(change{"failurePolicy", admissionv1.Ignore}, change{"timeoutSeconds", 1})
}

// ignore is the command that sets the failurePolicy of h to Ignore.
func (h *hook) ignore() string { return h.patch("failurePolicy", admissionv1.Ignore) }

// exempt is the command that excludes namespaces from h.
func (h *hook) exempt(namespaces []string) string {
	var selector metav1.LabelSelector
	if h.namespaceSelector != nil {
		selector = *h.namespaceSelector.DeepCopy()
	}
	selector.MatchExpressions = append(selector.MatchExpressions, metav1.LabelSelectorRequirement{
		Key: corev1.LabelMetadataName, Operator: metav1.LabelSelectorOpNotIn, Values: namespaces,
	})
	return h.patch("namespaceSelector", selector)
}

// target is a request of an upgrade that a webhook could deny.
type target struct {
	group, resource string // resource "pods/eviction"
	operations      []admissionv1.OperationType
	text            string
	scope           admissionv1.ScopeType
}

// evictions is the name of drain requests in findings.
const evictions = "evictions"

var targets = []target{
	{"", "pods", []admissionv1.OperationType{admissionv1.Create}, "new pods", admissionv1.NamespacedScope},
	{"", "pods", []admissionv1.OperationType{admissionv1.Delete}, "pod deletions", admissionv1.NamespacedScope},
	{"", "pods/eviction", []admissionv1.OperationType{admissionv1.Create}, evictions, admissionv1.NamespacedScope},
	{"", "pods/binding", []admissionv1.OperationType{admissionv1.Create}, "pod bindings", admissionv1.NamespacedScope},
	{"", "pods/status", []admissionv1.OperationType{admissionv1.Update}, "pod status", admissionv1.NamespacedScope},
	{"", "nodes", []admissionv1.OperationType{admissionv1.Create, admissionv1.Update, admissionv1.Delete}, "nodes", admissionv1.ClusterScope},
	{"", "nodes/status", []admissionv1.OperationType{admissionv1.Update}, "node status", admissionv1.ClusterScope},
	{"coordination.k8s.io", "leases", []admissionv1.OperationType{admissionv1.Create, admissionv1.Update}, "leases", admissionv1.NamespacedScope},
	{"certificates.k8s.io", "certificatesigningrequests", []admissionv1.OperationType{admissionv1.Create}, "certificates of joining nodes", admissionv1.ClusterScope},
	{"update.edgeless.systems", "nodeversions", []admissionv1.OperationType{admissionv1.Create, admissionv1.Update}, "our NodeVersion", admissionv1.ClusterScope},
	{"update.edgeless.systems", "joiningnodes", []admissionv1.OperationType{admissionv1.Create, admissionv1.Update, admissionv1.Delete}, "our JoiningNodes", admissionv1.ClusterScope},
	{"update.edgeless.systems", "pendingnodes", []admissionv1.OperationType{admissionv1.Create, admissionv1.Update, admissionv1.Delete}, "our PendingNodes", admissionv1.ClusterScope},
	{"update.edgeless.systems", "scalinggroups", []admissionv1.OperationType{admissionv1.Create, admissionv1.Update}, "our ScalingGroups", admissionv1.ClusterScope},
}

// hits reports whether a rule matches t.
func (t *target) hits(r *admissionv1.RuleWithOperations) bool {
	operation := slices.ContainsFunc(r.Operations, func(o admissionv1.OperationType) bool {
		return o == admissionv1.OperationAll || slices.Contains(t.operations, o)
	})
	group := slices.Contains(r.APIGroups, "*") || slices.Contains(r.APIGroups, t.group)
	scope := r.Scope == nil || *r.Scope == admissionv1.AllScopes || *r.Scope == t.scope
	if !operation || !group || !scope {
		return false
	}
	resource, sub, _ := strings.Cut(t.resource, "/")
	return slices.ContainsFunc(r.Resources, func(pattern string) bool {
		res, s, isSub := strings.Cut(pattern, "/")
		if pattern == "*" {
			return sub == ""
		}
		if pattern == "*/*" {
			return true
		}
		return (res == "*" || res == resource) && (s == sub || isSub && s == "*")
	})
}

// hooks are the webhooks that can stop an upgrade, by kind, configuration and index.
func (w *world) hooks() []*hook {
	m := w.made()
	m.hooksOnce.Do(func() { m.hooks, m.lenient = newHooks(w) })
	return m.hooks
}

// lenientHooks are webhooks with failurePolicy Ignore that review requests of an upgrade.
// They can only slow it down.
func (w *world) lenientHooks() []*hook {
	w.hooks()
	return w.made().lenient
}

func newHooks(w *world) (out, lenient []*hook) {
	add := func(h hook, failure *admissionv1.FailurePolicyType, rules []admissionv1.RuleWithOperations, ns, obj *metav1.LabelSelector, timeout *int32, match *admissionv1.MatchPolicyType) {
		h.timeout, h.match = 10, admissionv1.Equivalent
		if timeout != nil {
			h.timeout = *timeout
		}
		if match != nil {
			h.match = *match
		}
		h.namespaceSelector, h.namespaces, h.labels = ns, selectorOf(ns), selectorOf(obj)
		seen := map[string]bool{}
		for i := range targets {
			t := &targets[i]
			if !slices.ContainsFunc(rules, func(r admissionv1.RuleWithOperations) bool { return t.hits(&r) }) {
				continue
			}
			if _, ok := seen[t.resource]; !ok {
				seen[t.resource] = w.sees(&h, t)
			}
			if seen[t.resource] {
				h.hits = append(h.hits, t.text)
				h.pods = h.pods || t.text == targets[0].text
			}
		}
		switch {
		case len(h.hits) == 0:
		case failure != nil && *failure != admissionv1.Fail:
			lenient = append(lenient, &h)
		default:
			out = append(out, &h)
		}
	}
	for i := range w.validating {
		c := &w.validating[i]
		for j := range c.Webhooks {
			x := &c.Webhooks[j]
			add(hook{kind: "ValidatingWebhookConfiguration", config: &c.ObjectMeta, index: j, name: x.Name, client: &x.ClientConfig, conditions: len(x.MatchConditions) > 0},
				x.FailurePolicy, x.Rules, x.NamespaceSelector, x.ObjectSelector, x.TimeoutSeconds, x.MatchPolicy)
		}
	}
	for i := range w.mutating {
		c := &w.mutating[i]
		for j := range c.Webhooks {
			x := &c.Webhooks[j]
			add(hook{kind: "MutatingWebhookConfiguration", config: &c.ObjectMeta, index: j, name: x.Name, client: &x.ClientConfig, conditions: len(x.MatchConditions) > 0},
				x.FailurePolicy, x.Rules, x.NamespaceSelector, x.ObjectSelector, x.TimeoutSeconds, x.MatchPolicy)
		}
	}
	for _, hooks := range [][]*hook{out, lenient} {
		slices.SortStableFunc(hooks, func(a, b *hook) int {
			return cmp.Or(-cmp.Compare(a.kind, b.kind), cmp.Compare(a.config.Name, b.config.Name), cmp.Compare(a.index, b.index))
		})
	}
	return out, lenient
}

// selectorOf is s; none selects everything, as webhooks have it.
func selectorOf(s *metav1.LabelSelector) labels.Selector {
	if s == nil {
		return labels.Everything()
	}
	selector, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		return labels.Nothing() // the API server rejects such a webhook
	}
	return selector
}

// namespaceLabels are those of a namespace; the API server gives each its name as label.
func (w *world) namespaceLabels(name string) labels.Set {
	if m, ok := w.namespaces[name]; ok && m.Labels[corev1.LabelMetadataName] != "" {
		return m.Labels
	}
	return labels.Set{corev1.LabelMetadataName: name}
}

// sees reports whether the selectors of h match an existing object of t.
func (w *world) sees(h *hook, t *target) bool {
	switch {
	case t.resource == "pods" || t.resource == "pods/status":
		return w.anyPod(func(p *pod) bool { return w.judges(h, p) })
	case strings.HasPrefix(t.resource, "pods/"):
		// The reviewed object is the Eviction or Binding, which has no labels.
		return h.labels.Matches(labels.Set{}) && w.anyPod(func(p *pod) bool {
			return !p.mirror && h.namespaces.Matches(w.namespaceLabels(p.namespace))
		})
	case strings.HasPrefix(t.resource, "nodes"):
		return slices.ContainsFunc(w.nodes, func(n corev1.Node) bool { return h.labels.Matches(labels.Set(n.Labels)) })
	case t.resource == "leases":
		return h.labels.Matches(labels.Set{}) && h.namespaces.Matches(w.namespaceLabels(corev1.NamespaceNodeLease))
	}
	return h.labels.Matches(labels.Set{})
}

// judges reports whether the selectors of h match p.
func (w *world) judges(h *hook, p *pod) bool {
	return h.namespaces.Matches(w.namespaceLabels(p.namespace)) && h.labels.Matches(labels.Set(p.labels))
}

// backends are the endpoints of a webhook's service.
type backends struct {
	ready int
	// nodes are those of ready endpoints; unknown if one has none.
	nodes   []string
	unknown bool
	pods    []*pod // ready or not
}

func (w *world) backends(service types.NamespacedName) backends {
	var out backends
	l := w.lookup()
	for _, s := range l.slices[service] {
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			var p *pod
			if r := e.TargetRef; r != nil && r.Kind == "Pod" {
				if p = l.byName[types.NamespacedName{Namespace: r.Namespace, Name: r.Name}]; p != nil && !slices.Contains(out.pods, p) {
					out.pods = append(out.pods, p)
				}
			}
			if e.Conditions.Ready != nil && !*e.Conditions.Ready {
				continue
			}
			out.ready++
			switch {
			case e.NodeName != nil:
				out.nodes = append(out.nodes, *e.NodeName)
			case p != nil:
				out.nodes = append(out.nodes, p.node)
			default:
				out.unknown = true
			}
		}
	}
	slices.Sort(out.nodes)
	out.nodes = slices.Compact(out.nodes)
	return out
}

func (h *hook) service() (types.NamespacedName, bool) {
	s := h.client.Service
	if s == nil {
		return types.NamespacedName{}, false
	}
	return types.NamespacedName{Namespace: s.Namespace, Name: s.Name}, true
}

// webhookEndpoints reports webhooks without a backend: their requests are rejected now.
func webhookEndpoints(w *world, _ *probe) []plan.Finding {
	var found []plan.Finding
	for _, h := range w.hooks() {
		key, ok := h.service()
		if !ok {
			continue
		}
		name := printable(key.String())
		why := ""
		service, ok := w.services[key]
		port := int32(443)
		if h.client.Service.Port != nil {
			port = *h.client.Service.Port
		}
		switch {
		case !ok:
			why = "there is no service " + name
		case service.Spec.Type == corev1.ServiceTypeExternalName:
			continue // an external URL
		case !slices.ContainsFunc(service.Spec.Ports, func(p corev1.ServicePort) bool { return p.Port == port }):
			why = fmt.Sprintf("service %s has no port %d", name, port)
		case w.backends(key).ready == 0:
			why = fmt.Sprintf("service %s has no ready endpoint", name)
		}
		if why == "" {
			continue
		}
		severity := plan.Block
		if h.conditions {
			severity = plan.Warn
		}
		f := h.finding(severity, fmt.Sprintf("%s has no backend: %s", h.title(), why))
		f.Remedy = "restore its pods; or set failurePolicy to Ignore, which its owner may revert"
		f.Command = h.ignore()
		if ok {
			for _, p := range w.backends(key).pods {
				f.Objects = append(f.Objects, p.object())
			}
		}
		found = append(found, f)
	}
	return fold(found, "webhooks without a backend")
}

// webhookOneNode reports webhooks without a backend while one node is drained.
func webhookOneNode(w *world, _ *probe) []plan.Finding {
	l := w.lookup()
	var found []plan.Finding
	for _, h := range w.hooks() {
		key, ok := h.service()
		if !ok {
			continue
		}
		b := w.backends(key)
		if b.ready == 0 || b.unknown || len(b.nodes) != 1 || l.place[b.nodes[0]] == 0 || len(b.pods) == 0 {
			continue
		}
		// DaemonSet pods and static pods stay until the machine is deleted. By then the new
		// machine runs its own.
		stays := slices.ContainsFunc(b.pods, func(p *pod) bool { return p.mirror || p.controller.kind == "DaemonSet" })
		if stays {
			continue
		}
		node := b.nodes[0]
		own := h.pods && slices.ContainsFunc(b.pods, func(p *pod) bool { return w.judges(h, p) })
		severity, consequence := plan.Warn, "it has no backend while its pods are evicted"
		if own {
			severity, consequence = plan.Block, "it would reject its own new pods"
			if h.conditions {
				severity = plan.Warn
			}
		}
		f := h.finding(severity, fmt.Sprintf("%s has backends on %s alone, which is %s (%s): %s", h.title(), printable(node), w.taken(), l.position(node), consequence))
		f.Objects = append(f.Objects, object("node", "", node))
		f.Objects = append(f.Objects, objects(b.pods)...)
		f.Remedy = "run its pods on two nodes"
		if o, ok := scalable(w.workload(b.pods[0])); ok && len(b.pods) == 1 {
			f.Command = command("kubectl -n %s scale %s --replicas=2", b.pods[0].namespace, o)
		} else {
			f.Remedy += "; or set failurePolicy to Ignore, which its owner may revert"
			f.Command = h.ignore()
		}
		found = append(found, f)
	}
	return fold(found, "webhooks with backends on one node")
}

// webhookExemption reports webhooks that review their own pods or system pods.
func webhookExemption(w *world, _ *probe) []plan.Finding {
	var found []plan.Finding
	for _, h := range w.hooks() {
		if !h.pods {
			continue
		}
		var caught []string
		if key, ok := h.service(); ok && slices.ContainsFunc(w.backends(key).pods, func(p *pod) bool { return w.judges(h, p) }) {
			caught = append(caught, key.Namespace)
		}
		for _, ns := range []string{metav1.NamespaceSystem, ownNamespace} {
			if w.anyPod(func(p *pod) bool { return p.namespace == ns && w.judges(h, p) }) {
				caught = append(caught, ns)
			}
		}
		slices.Sort(caught)
		if caught = slices.Compact(caught); len(caught) == 0 {
			continue
		}
		f := h.finding(plan.Warn, fmt.Sprintf("%s reviews new pods of %s: if it fails, they cannot be recreated", h.title(), enumerate(caught, 3)))
		f.Remedy = "exclude these namespaces with its namespaceSelector"
		f.Command = h.exempt(caught)
		found = append(found, f)
	}
	return fold(found, "webhooks that review their own pods or those of the system")
}

// maxWebhookSeconds is the longest accepted timeout: 10 s is the default.
const maxWebhookSeconds = 10

func webhookTimeout(w *world, _ *probe) []plan.Finding {
	var found []plan.Finding
	for _, h := range w.hooks() {
		if h.timeout <= maxWebhookSeconds {
			continue
		}
		f := h.finding(plan.Warn, fmt.Sprintf("%s has a timeout of %d s", h.title(), h.timeout))
		f.Remedy = "lower timeoutSeconds: requests of nodes and controllers time out after 10 s to 30 s"
		f.Command = h.patch("timeoutSeconds", maxWebhookSeconds)
		found = append(found, f)
	}
	return fold(found, "webhooks with long timeouts")
}

const (
	certificateWarning = 30 * 24 * time.Hour
	certificateLimit   = 7 * 24 * time.Hour
)

// webhookCA reports webhooks whose certificate cannot be verified, or soon cannot.
func webhookCA(w *world, _ *probe) []plan.Finding {
	var found []plan.Finding
	for _, h := range w.hooks() {
		bundle := h.client.CABundle
		if len(bundle) == 0 {
			if h.client.Service == nil {
				continue // the API server's system roots verify external URLs
			}
			f := h.finding(plan.Warn, h.title()+" has no CA bundle, and service certificates are signed by no public CA")
			f.Remedy = "set its caBundle, or have cert-manager inject it"
			f.Command = h.ignore()
			found = append(found, f)
			continue
		}
		until, subject, problem := validUntil(bundle)
		left := until.Sub(w.now)
		var f plan.Finding
		switch {
		case problem != "":
			f = h.finding(plan.Block, fmt.Sprintf("the CA of %s cannot be read: %s", h.title(), problem))
		case left <= 0:
			f = h.finding(plan.Block, fmt.Sprintf("the CA of %s expired on %s", h.title(), until.UTC().Format(time.DateOnly)))
		case left < certificateLimit:
			f = h.finding(plan.Block, fmt.Sprintf("the CA of %s expires on %s", h.title(), until.UTC().Format(time.DateOnly)))
		case left < certificateWarning:
			f = h.finding(plan.Warn, fmt.Sprintf("the CA of %s expires on %s", h.title(), until.UTC().Format(time.DateOnly)))
		default:
			continue
		}
		if subject != "" {
			f.Detail = "CA " + printable(subject) + "; " + f.Detail
		}
		f.Remedy = "renew it; or set failurePolicy to Ignore, which its owner may revert"
		f.Command = h.ignore()
		found = append(found, f)
	}
	return fold(found, "webhooks with a bad CA")
}

// validUntil is the latest expiry of the certificates in bundle.
func validUntil(bundle []byte) (until time.Time, subject, problem string) {
	n := 0
	for rest := bundle; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return time.Time{}, "", printable(err.Error())
		}
		if n++; cert.NotAfter.After(until) {
			until, subject = cert.NotAfter, cert.Subject.String()
		}
	}
	if n == 0 {
		return time.Time{}, "", "it contains no PEM certificate"
	}
	return until, subject, ""
}

func webhookMatchPolicy(w *world, _ *probe) []plan.Finding {
	var found []plan.Finding
	for _, h := range w.hooks() {
		if h.match != admissionv1.Exact {
			continue
		}
		f := h.finding(plan.Warn, h.title()+" matches only the API versions in its rules")
		f.Remedy = "set matchPolicy to Equivalent to match requests of all versions"
		f.Command = h.patch("matchPolicy", admissionv1.Equivalent)
		found = append(found, f)
	}
	return fold(found, "webhooks with matchPolicy Exact")
}
