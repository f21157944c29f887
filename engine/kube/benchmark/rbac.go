package benchmark

import (
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"

	"constellation/engine/check"
)

// binding is a RoleBinding or ClusterRoleBinding with the rules of its role.
type binding struct {
	object    string
	namespace string // empty: the whole cluster
	builtIn   bool   // the API server made it
	role      string
	rules     []rbacv1.PolicyRule
	subjects  []string
}

// subject writes a subject: "user jane", "serviceaccount/shop/web".
func subject(s rbacv1.Subject, namespace string) string {
	switch s.Kind {
	case rbacv1.ServiceAccountKind:
		if s.Namespace != "" {
			namespace = s.Namespace
		}
		return "serviceaccount/" + namespace + "/" + s.Name
	case rbacv1.GroupKind:
		return "group " + s.Name
	}
	return "user " + s.Name
}

// administrators are the groups that may do everything in each cluster of kubeadm, and the user that the
// API server itself is for kubelets.
var administrators = []string{"group system:masters", "group kubeadm:cluster-admins", "user kube-apiserver-kubelet-client"}

// ofKubernetes reports whether a subject is a part of Kubernetes itself.
func ofKubernetes(s string) bool {
	for _, prefix := range []string{"user system:", "group system:", "serviceaccount/kube-system/"} {
		if strings.HasPrefix(s, prefix) {
			return !slices.Contains(everybody, s)
		}
	}
	return false
}

// everybody are groups and users that any client is in.
var everybody = []string{"group system:authenticated", "group system:unauthenticated", "user system:anonymous", "group system:serviceaccounts"}

// others returns the subjects of a binding that are neither administrators nor a part of Kubernetes
// that Kubernetes itself has bound.
func (b *binding) others() (out []string) {
	for _, s := range b.subjects {
		if slices.Contains(administrators, s) || b.builtIn && ofKubernetes(s) {
			continue
		}
		out = append(out, s)
	}
	return out
}

// may decides about a rule.
type may func(rbacv1.PolicyRule) bool

// can matches rules that allow one of the verbs for a resource of a group, not for single objects.
func can(group, resource string, verbs ...string) may {
	_, subresource, sub := strings.Cut(resource, "/")
	return func(r rbacv1.PolicyRule) bool {
		if len(r.ResourceNames) > 0 || !hasOr(r.APIGroups, group) {
			return false
		}
		if !hasOr(r.Resources, resource) && (!sub || !slices.Contains(r.Resources, "*/"+subresource)) {
			return false
		}
		return slices.ContainsFunc(verbs, func(v string) bool { return hasOr(r.Verbs, v) })
	}
}

// hasOr reports whether a list has a value or the wildcard.
func hasOr(list []string, value string) bool {
	return slices.Contains(list, value) || slices.Contains(list, "*")
}

// anyOf matches rules that one of the functions matches.
func anyOf(list ...may) may {
	return func(r rbacv1.PolicyRule) bool {
		return slices.ContainsFunc(list, func(m may) bool { return m(r) })
	}
}

// few judges who has a right in the whole cluster or in kube-system, beside administrators and Kubernetes
// itself. Rights in one other namespace do not count.
func few(m may) func(*facts) verdict {
	return func(f *facts) verdict {
		var t tally
		for i := range f.bindings {
			b := &f.bindings[i]
			if b.namespace != "" && b.namespace != systemNamespace || !slices.ContainsFunc(b.rules, m) {
				continue
			}
			for _, s := range b.others() {
				where := "in the whole cluster"
				if b.namespace != "" {
					where = "in " + b.namespace
				}
				t.add(bad, s+", by "+b.role+" "+where, b.object)
			}
		}
		return t.verdict("administrators and parts of Kubernetes alone")
	}
}

func rbacItems() []item {
	right := func(number, title, looks, command string, m may) item {
		return item{
			number: number, nsa: guideAccess, level: 1, title: title, remedy: "give these subjects a role without this right, or ignore the finding with a reason", command: command, needs: []source{sourceRBAC}, judge: few(m),
			looks: "ClusterRoles, Roles and their bindings: " + looks + ", in the whole cluster or in kube-system, beside administrators and parts of Kubernetes",
		}
	}
	return []item{
		{
			number: "5.1.1", nsa: guideAccess, level: 1, title: "Only administrators have the role cluster-admin", looks: "ClusterRoleBindings of cluster-admin, beside those of the groups system:masters and kubeadm:cluster-admins",
			remedy: "bind a smaller role, and delete the binding", command: "kubectl get clusterrolebindings -o wide", needs: []source{sourceRBAC}, judge: clusterAdmins,
		},
		right("5.1.2", "Few may read Secrets", "subjects that may get, list or watch Secrets", "kubectl auth can-i list secrets --as SUBJECT", can("", "secrets", "get", "list", "watch")),
		{
			number: "5.1.3", nsa: guideAccess, level: 1, title: "No role has a wildcard", looks: "rules of ClusterRoles and Roles with * as verb, resource or group, beside those that the API server made",
			remedy: "list verbs, resources and groups that are needed", command: "kubectl get clusterroles,roles --all-namespaces -o yaml", needs: []source{sourceRBAC}, judge: wildcards,
		},
		right("5.1.4", "Few may create pods", "subjects that may create pods", "kubectl auth can-i create pods --as SUBJECT", can("", "pods", "create")),
		{
			number: "5.1.5", nsa: guidePods, level: 1, title: "The accounts named default are not used", looks: "ServiceAccounts named default: automountServiceAccountToken, bindings, and pods that have their tokens",
			remedy: "set automountServiceAccountToken: false on them, and give pods that need the API an account of their own", command: "kubectl -n NAMESPACE patch serviceaccount default -p '{\"automountServiceAccountToken\":false}'",
			needs: []source{sourceAccounts, sourceRBAC, sourcePods}, judge: defaultAccounts,
		},
		{
			number: "5.1.6", nsa: guidePods, level: 1, title: "Pods have tokens only where they need the API", looks: "pods with a mounted token whose ServiceAccount no binding names",
			remedy: "set automountServiceAccountToken: false in these pods or their ServiceAccounts", needs: []source{sourceRBAC, sourcePods}, judge: uselessTokens,
		},
		{
			number: "5.1.7", nsa: guideAccess, level: 1, title: "No user is in the group system:masters", looks: "bindings that name the group, and the groups of the user of this kubeconfig; other certificates are not visible",
			remedy: "give administrators another group, such as kubeadm:cluster-admins: rights of system:masters cannot be taken away", command: "kubectl auth whoami", needs: []source{sourceRBAC, sourceSelf}, judge: masters,
		},
		right("5.1.8", "Few may bind, escalate or impersonate", "subjects that may bind or escalate roles, or impersonate users, groups or accounts", "kubectl auth can-i impersonate users --as SUBJECT", anyOf(
			can(rbacv1.GroupName, "clusterroles", "bind", "escalate"), can(rbacv1.GroupName, "roles", "bind", "escalate"),
			can("", "users", "impersonate"), can("", "groups", "impersonate"), can("", "serviceaccounts", "impersonate"))),
		right("5.1.9", "Few may create PersistentVolumes", "subjects that may create PersistentVolumes, which can be paths of machines", "kubectl auth can-i create persistentvolumes --as SUBJECT", can("", "persistentvolumes", "create")),
		right("5.1.10", "Few may reach kubelets through the API server", "subjects that may use nodes/proxy, which runs commands in each pod", "kubectl auth can-i get nodes/proxy --as SUBJECT", can("", "nodes/proxy", "get", "create", "update", "patch", "delete")),
		right("5.1.11", "Few may approve certificate requests", "subjects that may approve CertificateSigningRequests", "kubectl auth can-i update certificatesigningrequests/approval --as SUBJECT", can("certificates.k8s.io", "certificatesigningrequests/approval", "update", "patch")),
		right("5.1.12", "Few may change webhooks of admission", "subjects that may create or change ValidatingWebhookConfigurations and MutatingWebhookConfigurations", "kubectl auth can-i update mutatingwebhookconfigurations --as SUBJECT", anyOf(
			can("admissionregistration.k8s.io", "validatingwebhookconfigurations", "create", "update", "patch", "delete"), can("admissionregistration.k8s.io", "mutatingwebhookconfigurations", "create", "update", "patch", "delete"))),
		right("5.1.13", "Few may create tokens of accounts", "subjects that may create serviceaccounts/token", "kubectl auth can-i create serviceaccounts/token --as SUBJECT", can("", "serviceaccounts/token", "create")),
	}
}

// clusterAdmins judges who has the role cluster-admin.
func clusterAdmins(f *facts) verdict {
	var t tally
	for i := range f.bindings {
		b := &f.bindings[i]
		if b.namespace != "" || b.role != "ClusterRole cluster-admin" {
			continue
		}
		for _, s := range b.others() {
			t.add(bad, s, b.object)
		}
	}
	return t.verdict("the groups of administrators alone")
}

// wildcards judges the rules of roles.
func wildcards(f *facts) verdict {
	var t tally
	for _, r := range f.roles {
		if r.builtIn {
			continue
		}
		var what []string
		for _, rule := range r.rules {
			for name, list := range map[string][]string{"verbs": rule.Verbs, "resources": rule.Resources, "apiGroups": rule.APIGroups, "nonResourceURLs": rule.NonResourceURLs} {
				if slices.Contains(list, "*") {
					what = append(what, name)
				}
			}
		}
		if len(what) > 0 {
			slices.Sort(what)
			t.add(bad, "* as "+strings.Join(slices.Compact(what), ", "), r.object)
		}
	}
	return t.verdict("roles that the API server made alone")
}

// defaultAccounts judges the accounts named default.
func defaultAccounts(f *facts) verdict {
	var t tally
	for _, a := range f.accounts {
		if a.name == "default" {
			t.add(goodIf(a.automount == "false"), "automountServiceAccountToken is "+a.automount, "serviceaccount/"+a.namespace+"/default")
		}
	}
	for i := range f.bindings {
		for _, s := range f.bindings[i].subjects {
			if parts := strings.Split(s, "/"); len(parts) == 3 && parts[2] == "default" {
				t.add(bad, "a binding names "+s, f.bindings[i].object)
			}
		}
	}
	for object, w := range f.workloads {
		if w.account == "default" && w.has(tokenMounted) {
			t.add(bad, "its pods have a token of the account default", object)
		}
	}
	return t.verdict("")
}

// uselessTokens judges which pods have a token without a use.
func uselessTokens(f *facts) verdict {
	bound := map[string]bool{}
	for i := range f.bindings {
		for _, s := range f.bindings[i].subjects {
			bound[s] = true
			if n, ok := strings.CutPrefix(s, "group system:serviceaccounts:"); ok {
				bound["serviceaccount/"+n] = true
			}
		}
	}
	var t tally
	for object, w := range f.workloads {
		if w.has(tokenMounted) && !bound["serviceaccount/"+w.namespace+"/"+w.account] && !bound["serviceaccount/"+w.namespace] {
			t.add(bad, "a token is mounted, and no binding names its ServiceAccount", object)
		}
	}
	return t.verdict("every account with a mounted token has a binding")
}

// masters shows what is visible of the group system:masters.
func masters(f *facts) verdict {
	var t tally
	for i := range f.bindings {
		b := &f.bindings[i]
		if slices.Contains(b.subjects, "group system:masters") {
			t.add(goodIf(b.builtIn), "binds the group system:masters", b.object)
		}
	}
	in := slices.Contains(f.groups, "system:masters")
	if in {
		t.add(bad, "you are in the group system:masters: "+f.user, "")
	} else {
		t.add(good, "you are not in the group: "+f.user, "")
	}
	v := t.verdict("")
	if v.status == check.SecurityFailed {
		return v
	}
	v.status = check.SecurityManual
	return v
}
