package preflight

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/plan"
)

const (
	rbacGuide = "https://kubernetes.io/docs/reference/access-authn-authz/rbac/"
	psaGuide  = "https://kubernetes.io/docs/concepts/security/pod-security-admission/"
	psaLabel  = "pod-security.kubernetes.io/enforce"
)

var accessChecks = []checkItem{
	{
		id: "permissions", title: "the kubeconfig's user has the permissions that the hop needs", area: "access", ref: rbacGuide,
		run: permissions,
	},
	{
		id: "pod-security", title: "the services' namespace admits their pods", area: "access", ref: psaGuide,
		needs: []source{sourceNamespaces}, run: podSecurity,
	},
	{
		id: "pod-security-default", title: "the level of Pod Security that new clusters enforce refuses no pod", area: "access", ref: psaGuide,
		needs: []source{sourceConfigs, sourceNamespaces, sourcePods}, run: podLevelRefuses,
	},
}

// needed are the permissions that applying an upgrade requires.
var needed = []authorizationv1.ResourceAttributes{
	{Verb: "list", Resource: "nodes"},
	{Verb: "patch", Resource: "nodes"},
	{Verb: "create", Resource: "pods", Subresource: "eviction"},
	{Verb: "list", Resource: "pods"},
	{Verb: "get", Resource: "pods", Subresource: "log", Namespace: ownNamespace},
	{Verb: "patch", Group: "apiextensions.k8s.io", Resource: "customresourcedefinitions"},
	{Verb: "patch", Group: "update.edgeless.systems", Resource: "nodeversions"},
	{Verb: "patch", Group: "update.edgeless.systems", Resource: "joiningnodes"},
	{Verb: "patch", Resource: "configmaps", Namespace: "kube-system"},
	{Verb: "create", Resource: "configmaps", Namespace: "kube-system"},
	{Verb: "create", Resource: "secrets", Namespace: ownNamespace},
	{Verb: "update", Resource: "secrets", Namespace: ownNamespace},
	{Verb: "delete", Resource: "secrets", Namespace: ownNamespace},
	{Verb: "patch", Group: "apps", Resource: "deployments", Namespace: ownNamespace},
	{Verb: "patch", Group: "apps", Resource: "daemonsets", Namespace: ownNamespace},
	{Verb: "patch", Resource: "services", Namespace: ownNamespace},
	{Verb: "patch", Resource: "serviceaccounts", Namespace: ownNamespace},
	{Verb: "patch", Group: "rbac.authorization.k8s.io", Resource: "clusterroles"},
	{Verb: "patch", Group: "rbac.authorization.k8s.io", Resource: "clusterrolebindings"},
	{Verb: "escalate", Group: "rbac.authorization.k8s.io", Resource: "clusterroles"},
	{Verb: "bind", Group: "rbac.authorization.k8s.io", Resource: "clusterroles"},
}

// accessLimit bounds one review.
const accessLimit = 10 * time.Second

// permissions reviews the user's access to everything in needed.
func permissions(_ *world, p *probe) []plan.Finding {
	if ok, err := allowed(p, authorizationv1.ResourceAttributes{Verb: "*", Group: "*", Resource: "*"}); err == nil && ok {
		return nil
	}
	denied := make([]string, len(needed))
	failed := make([]error, len(needed))
	var asking sync.WaitGroup
	for i, a := range needed {
		asking.Go(func() {
			ok, err := allowed(p, a)
			if failed[i] = err; err == nil && !ok {
				denied[i] = permission(a)
			}
		})
	}
	asking.Wait()
	var out []plan.Finding
	denied = slices.DeleteFunc(denied, func(s string) bool { return s == "" })
	if len(denied) > 0 {
		out = append(out, plan.Finding{
			Severity: plan.Block, Title: fmt.Sprintf("the kubeconfig's user lacks %s that the hop needs", count(len(denied), "thing")),
			Detail: "not allowed: " + enumerate(denied, len(denied)), Remedy: "use an administrator's kubeconfig, or grant these verbs; list its permissions with `kubectl auth can-i --list`",
		})
	}
	if i := slices.IndexFunc(failed, func(err error) bool { return err != nil }); i >= 0 {
		out = append(out, plan.Finding{
			Severity: plan.NotChecked, Title: "not checked whether the kubeconfig's user has the permissions that the hop needs", Detail: reason(p.ctx, failed[i]),
		})
	}
	return out
}

func allowed(p *probe, a authorizationv1.ResourceAttributes) (bool, error) {
	ctx, cancel := context.WithTimeout(p.ctx, accessLimit)
	defer cancel()
	r, err := p.core.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &a},
	}, metav1.CreateOptions{})
	if err != nil {
		return false, err
	}
	return r.Status.Allowed, nil
}

// permission is "patch configmaps in kube-system".
func permission(a authorizationv1.ResourceAttributes) string {
	s := a.Resource
	if a.Group != "" {
		s += "." + a.Group
	}
	if a.Subresource != "" {
		s = strings.Replace(s, a.Resource, a.Resource+"/"+a.Subresource, 1)
	}
	s = a.Verb + " " + s
	if a.Namespace != "" {
		s += " in " + a.Namespace
	}
	return s
}

// podSecurity checks the pod security level of the services' namespace. The join service
// and the operator's agent use the host network.
func podSecurity(w *world, _ *probe) []plan.Finding {
	m, ok := w.namespaces[ownNamespace]
	level := m.Labels[psaLabel]
	if !ok || level == "" || level == "privileged" {
		return nil
	}
	return []plan.Finding{{
		Severity: plan.Block, Title: fmt.Sprintf("the namespace %s enforces the pod security level %s", ownNamespace, printable(level)),
		Detail: "the services use the host network, which requires the level privileged", Owner: keeperOf(&m), Objects: []string{object("Namespace", "", ownNamespace)},
		Remedy: "restore the level", Command: "kubectl label namespace " + ownNamespace + " " + psaLabel + "=privileged --overwrite",
	}}
}
