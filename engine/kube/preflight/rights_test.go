package preflight

import (
	"net/http"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/engine/version"
)

// TestRoleSufficesOnARealAPIServer runs the checks with the printed role alone, and compares the
// role with the requests that were sent.
func TestRoleSufficesOnARealAPIServer(t *testing.T) {
	cp := controlplanetest.Lend(t, controlplane.Options{})
	admin, err := kubernetes.NewForConfig(cp.Config())
	if err != nil {
		t.Fatal(err)
	}
	running, err := admin.Discovery().ServerVersion()
	if err != nil {
		t.Fatal(err)
	}
	from := version.MustParse(running.GitVersion)
	to := version.MustParse(from.MinorString()[:3] + "99.0") // all removals that the data has
	not := map[string]string{"permissions": "x", "pod-security": "x", "pod-admission": "x"}
	run := func(user string) ([]plan.Finding, *Recorder) {
		t.Helper()
		config, err := cp.ConfigFor(user)
		if err != nil {
			t.Fatal(err)
		}
		wrap, requests := Record()
		config.Wrap(wrap)
		found, err := Run(t.Context(), config, []check.PreflightRequest{{From: from, To: to, ReplaceControlPlanes: true, ReplaceWorkers: true, Quiet: true, NotApplicable: not}}, func(plan.Event) {})
		if err != nil {
			t.Fatal(err)
		}
		return found[0], requests
	}

	if _, err := admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-0"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	found, requests := run("nobody")
	f, ok := NotAllowed(requests.Denied())
	if !ok || f.Severity != plan.NotChecked {
		t.Fatalf("a user without rights gets no finding about them: %+v", f)
	}
	if !slices.ContainsFunc(found, func(f plan.Finding) bool { return f.ID == "pdb-room" && f.Severity == plan.NotChecked }) {
		t.Error("without the right to list pods, pdb-room is not listed as not checked")
	}
	for _, f := range found {
		if not[f.ID] != "" {
			t.Errorf("check %s ran although it is not applicable", f.ID)
		}
	}

	var role rbacv1.ClusterRole
	if err := yaml.UnmarshalStrict([]byte(ClusterRole("constellation-check", Rights(false))), &role); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.RbacV1().ClusterRoles().Create(t.Context(), &role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "reader"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "reader"}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(20 * time.Second)
	for {
		_, requests = run("reader")
		denied := requests.Denied()
		if len(denied) == 0 {
			break
		}
		if time.Now().After(deadline) { // the authorizer observes the binding with a delay
			t.Fatalf("the role does not suffice; denied: %v", denied)
		}
		time.Sleep(200 * time.Millisecond)
	}

	rights, sent := Rights(false), requests.Sent()
	for _, r := range sent {
		if !slices.Contains(rights, r) {
			t.Errorf("request without a right in the role: %+v", r)
		}
		if r.Verb != "get" && r.Verb != "list" {
			t.Errorf("a check that must not be noticed sent %+v", r)
		}
	}
	for _, r := range rights {
		conditional := slices.Contains(actionRights(), r) // depends on the hop, and on what exists
		for _, k := range actorKinds {                    // read if they are served
			conditional = conditional || k.Group == r.Group && k.Resource == r.Resource
		}
		if !conditional && !slices.Contains(sent, r) && !removedResource(r) {
			t.Errorf("the role has a right that no check used: %+v", r)
		}
	}
}

// removedResource reports whether objects of removed APIs are read with r, which depends on the
// hop.
func removedResource(r Right) bool {
	return slices.ContainsFunc(knownRemovals(), func(a removedAPI) bool { return a.resource.Resource == r.Resource })
}

func TestRightOfARequest(t *testing.T) {
	for _, tt := range []struct {
		method, path string
		want         Right
	}{
		{method: "GET", path: "/api/v1/pods", want: Right{Verb: "list", Resource: "pods"}},
		{method: "GET", path: "/api/v1/namespaces", want: Right{Verb: "list", Resource: "namespaces"}},
		{method: "GET", path: "/api/v1/namespaces/kube-system/configmaps/kubeadm-config", want: Right{Verb: "get", Resource: "configmaps", Name: "kubeadm-config"}},
		{method: "POST", path: "/api/v1/namespaces/a/pods/p/eviction", want: Right{Verb: "create", Resource: "pods/eviction"}},
		{method: "GET", path: "/api/v1/nodes/n/proxy/metrics", want: Right{Verb: "get", Resource: "nodes/proxy"}},
		{method: "GET", path: "/apis/apps/v1/deployments", want: Right{Verb: "list", Group: "apps", Resource: "deployments"}},
		{method: "GET", path: "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases", want: Right{Verb: "list", Group: "coordination.k8s.io", Resource: "leases"}},
		{method: "GET", path: "/apis", want: Right{Verb: "get", URL: "/apis"}},
		{method: "GET", path: "/readyz", want: Right{Verb: "get", URL: "/readyz"}},
	} {
		req, err := http.NewRequest(tt.method, "https://h"+tt.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := rightOf(req); got != tt.want {
			t.Errorf("%s %s: %+v, want %+v", tt.method, tt.path, got, tt.want)
		}
	}
}
