package preflight

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	helpers "k8s.io/component-helpers/resource"

	"constellation/engine/plan"
)

const (
	quotaPage    = "https://kubernetes.io/docs/concepts/policy/resource-quotas/"
	operatorName = "constellation-operator"
)

// systemNamespaces are the namespaces whose pods an upgrade recreates.
var systemNamespaces = []string{ownNamespace, metav1.NamespaceSystem}

var admissionChecks = []checkItem{
	{
		id: "pod-quota", title: "quotas leave room for new pods of the services and the system", area: "access", ref: quotaPage,
		needs: []source{sourceQuotas, sourceDeployments, sourceDaemonSets}, run: podQuota,
	},
	{
		id: "pod-admission", title: "the cluster admits a new pod of the operator", area: "access",
		ref:   "https://kubernetes.io/docs/reference/access-authn-authz/admission-controllers/",
		needs: append([]source{sourceDeployments}, webhookSources...), run: podAdmission,
	},
}

// template is the pod template of a workload.
type template struct {
	object string
	spec   *corev1.PodSpec
}

// templates are those of the namespace's workloads with at least one replica.
func (w *world) templates(namespace string) (out []template) {
	for i := range w.deployments {
		if d := &w.deployments[i]; d.Namespace == namespace && replicas(d.Spec.Replicas) > 0 {
			out = append(out, template{object("deployment", d.Namespace, d.Name), &d.Spec.Template.Spec})
		}
	}
	for i := range w.daemonSets {
		if d := &w.daemonSets[i]; d.Namespace == namespace {
			out = append(out, template{object("daemonset", d.Namespace, d.Name), &d.Spec.Template.Spec})
		}
	}
	return out
}

// needs is the amount of a quota's resource that one pod uses.
func (t template) needs(name corev1.ResourceName) resource.Quantity {
	p := &corev1.Pod{Spec: *t.spec}
	switch name {
	case corev1.ResourcePods, "count/pods":
		return *resource.NewQuantity(1, resource.DecimalSI)
	case corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage:
		return helpers.PodRequests(p, helpers.PodResourcesOptions{})[name]
	}
	if r, ok := strings.CutPrefix(string(name), "requests."); ok {
		return helpers.PodRequests(p, helpers.PodResourcesOptions{})[corev1.ResourceName(r)]
	}
	if r, ok := strings.CutPrefix(string(name), "limits."); ok {
		return helpers.PodLimits(p, helpers.PodResourcesOptions{})[corev1.ResourceName(r)]
	}
	return resource.Quantity{}
}

// counts reports whether q limits pods of t.
func (t template) counts(q *corev1.ResourceQuota) bool {
	var terms []corev1.ScopedResourceSelectorRequirement
	for _, s := range q.Spec.Scopes {
		terms = append(terms, corev1.ScopedResourceSelectorRequirement{ScopeName: s, Operator: corev1.ScopeSelectorOpExists})
	}
	if s := q.Spec.ScopeSelector; s != nil {
		terms = append(terms, s.MatchExpressions...)
	}
	return !slices.ContainsFunc(terms, func(s corev1.ScopedResourceSelectorRequirement) bool { return !t.inScope(s) })
}

func (t template) inScope(s corev1.ScopedResourceSelectorRequirement) bool {
	p := &corev1.Pod{Spec: *t.spec}
	bestEffort := len(helpers.PodRequests(p, helpers.PodResourcesOptions{})) == 0 && len(helpers.PodLimits(p, helpers.PodResourcesOptions{})) == 0
	switch s.ScopeName {
	case corev1.ResourceQuotaScopeBestEffort:
		return bestEffort
	case corev1.ResourceQuotaScopeNotBestEffort:
		return !bestEffort
	case corev1.ResourceQuotaScopeTerminating:
		return t.spec.ActiveDeadlineSeconds != nil
	case corev1.ResourceQuotaScopeNotTerminating:
		return t.spec.ActiveDeadlineSeconds == nil
	case corev1.ResourceQuotaScopePriorityClass:
		class := t.spec.PriorityClassName
		switch s.Operator {
		case corev1.ScopeSelectorOpIn:
			return slices.Contains(s.Values, class)
		case corev1.ScopeSelectorOpNotIn:
			return !slices.Contains(s.Values, class)
		case corev1.ScopeSelectorOpDoesNotExist:
			return class == ""
		}
		return class != ""
	}
	return false // concerns cross-namespace affinity, which none of these pods has
}

// podQuota reports quotas that reject the next pod of a workload.
func podQuota(w *world, _ *probe) (out []plan.Finding) {
	for _, namespace := range systemNamespaces {
		templates := w.templates(namespace)
		for i := range w.quotas {
			if q := &w.quotas[i]; q.Namespace == namespace {
				out = append(out, quotaFindings(q, templates)...)
			}
		}
	}
	return fold(out, "quotas without room")
}

func quotaFindings(q *corev1.ResourceQuota, templates []template) (out []plan.Finding) {
	for _, name := range sortedKeys(q.Status.Hard) {
		hard := q.Status.Hard[name]
		used, known := q.Status.Used[name]
		if !known {
			continue // its controller has not computed it
		}
		var refused []string
		enough := used.DeepCopy() // for one more pod of each
		for _, t := range templates {
			if !t.counts(q) {
				continue
			}
			need := t.needs(name)
			enough.Add(need)
			then := used.DeepCopy()
			if then.Add(need); !need.IsZero() && then.Cmp(hard) > 0 {
				refused = append(refused, t.object)
			}
		}
		if len(refused) == 0 {
			continue
		}
		out = append(out, plan.Finding{
			Severity: plan.Block,
			Title:    fmt.Sprintf("ResourceQuota %s refuses new pods: %s of %s %s are used", printable(q.Namespace+"/"+q.Name), used.String(), hard.String(), printable(string(name))),
			Detail:   "no additional pod of " + enumerate(refused, maxTold), Owner: keeperOf(&q.ObjectMeta),
			Objects: append([]string{object("resourcequota", q.Namespace, q.Name)}, first(refused)...),
			Remedy:  "raise the quota: new nodes and new service versions need one additional pod of each",
			Command: command(`kubectl -n %s patch resourcequota %s --type=merge -p '{"spec":{"hard":{"%s":"%s"}}}'`, q.Namespace, q.Name, string(name), enough.String()),
		})
	}
	return out
}

// podAdmission creates a pod like the operator's as a dry run.
func podAdmission(w *world, p *probe) []plan.Finding {
	i := slices.IndexFunc(w.deployments, func(d appsv1.Deployment) bool { return d.Namespace == ownNamespace && d.Name == operatorName })
	if i < 0 {
		return []plan.Finding{{Severity: plan.Info, Title: "pod admission was not tested: the cluster has no operator"}}
	}
	if !w.request.DryRun {
		return []plan.Finding{{Severity: plan.Info, Title: "pod admission was not tested: dry-run requests are disabled"}}
	}
	d := &w.deployments[i]
	ctx, cancel := context.WithTimeout(p.ctx, p.within())
	defer cancel()
	_, err := p.core.CoreV1().Pods(ownNamespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: operatorName + "-", Labels: d.Spec.Template.Labels, Annotations: d.Spec.Template.Annotations},
		Spec:       *d.Spec.Template.Spec.DeepCopy(),
	}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err == nil {
		return nil
	}
	a := classify(err)
	f := plan.Finding{
		Severity: plan.Block, Detail: a.text, Objects: []string{object("deployment", ownNamespace, operatorName)},
		Remedy: "follow the message, or exempt namespace " + ownNamespace,
	}
	switch {
	case a.verdict == noDryRun, a.verdict == notAsked, errors.Is(ctx.Err(), context.DeadlineExceeded):
		f.Severity, f.Title, f.Remedy = plan.NotChecked, "not checked whether the cluster admits a new pod of the operator", ""
		if ctx.Err() != nil {
			f.Detail = "no answer came within " + plainDuration(p.within())
		}
	case apierrors.IsForbidden(err) && strings.Contains(a.text, "cannot create resource"), apierrors.IsUnauthorized(err):
		f.Severity, f.Title = plan.NotChecked, "not checked whether the cluster admits a new pod of the operator: the kubeconfig's user may not create pods"
		f.Remedy = "use a kubeconfig that may create pods in " + ownNamespace
	default:
		kind, name := refuser(a)
		f.Title = fmt.Sprintf("%s refuses new pods of the operator in namespace %s", strings.TrimSpace(kind+" "+name), ownNamespace)
		if kind == "pod security level" {
			f.Detail += follows(podSecurity(w, nil), "pod-security", object("Namespace", "", ownNamespace))
		}
		if kind == "ResourceQuota" {
			f.Detail += follows(podQuota(w, nil), "pod-quota", object(kind, ownNamespace, name))
			f.Objects = append([]string{object(kind, ownNamespace, name)}, f.Objects...)
		}
		for _, h := range w.hooks() {
			if a.by != h.title() {
				continue
			}
			f.Owner = keeperOf(h.config)
			f.Objects = append([]string{h.object()}, f.Objects...)
			if f.Command = h.exempt([]string{ownNamespace}); a.uncalled() {
				f.Remedy = "restore the webhook's backend; or exempt the namespace, which its owner may revert"
			}
		}
	}
	return []plan.Finding{f}
}

var (
	quotaDenier    = regexp.MustCompile(`(?:exceeded|failed) quota: ([^,: ]+)`)
	securityDenier = regexp.MustCompile(`violates PodSecurity "([^"]*)"`)
)

// refuser returns kind and name of what rejects a pod.
func refuser(a answer) (kind, name string) {
	if m := quotaDenier.FindStringSubmatch(a.text); m != nil {
		return "ResourceQuota", m[1]
	}
	if m := securityDenier.FindStringSubmatch(a.text); m != nil {
		return "pod security level", m[1]
	}
	return cmp.Or(a.by, "the API server"), ""
}
