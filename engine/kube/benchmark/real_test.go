package benchmark

import (
	"os"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"constellation/engine/check"
	"constellation/engine/kube/preflight"
	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/engine/version"
)

func TestMain(m *testing.M) { os.Exit(controlplanetest.Run(m)) }

// TestRoleSufficesOnARealAPIServer runs all checks without rights, and with the printed role alone. It
// compares the role with the requests that were sent.
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
	for _, name := range []string{"a", "b"} {
		if _, err := admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	run := func(config *rest.Config) (map[string]check.SecurityResult, *preflight.Recorder) {
		t.Helper()
		wrap, requests := preflight.Record()
		config.Wrap(wrap)
		s, err := Run(t.Context(), config, Request{Version: version.MustParse(running.GitVersion)}, func(plan.Event) {})
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]check.SecurityResult{}
		for _, r := range s.Results {
			out[r.ID] = r
		}
		if len(out) != len(Checks()) {
			t.Fatalf("%d results of %d checks", len(out), len(Checks()))
		}
		return out, requests
	}
	as := func(user string) *rest.Config {
		config, err := cp.ConfigFor(user)
		if err != nil {
			t.Fatal(err)
		}
		return config
	}

	found, refused := run(as("nobody"))
	missing := Missing(refused.Sent(), refused.Denied())
	for _, r := range Rights() {
		if !slices.Contains(missing, r) {
			t.Errorf("without rights, %+v is not among the missing ones", r)
		}
	}
	for id, r := range found {
		visible := slices.Contains([]string{"cis-1.2.1"}, id) // any user may see it
		if (r.Status == check.SecurityPassed || r.Status == check.SecurityFailed) != visible {
			t.Errorf("without rights %s is %s: %+v", id, r.Status, r.Evidence)
		}
	}
	if r := found["cis-5.2.2"]; r.Reason != "it needs the right to list pods, which the user lacks" {
		t.Errorf("the missing right is not named: %q", r.Reason)
	}

	var role rbacv1.ClusterRole
	if err := yaml.UnmarshalStrict([]byte(preflight.ClusterRole("constellation-check-security", Rights())), &role); err != nil {
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
	var requests *preflight.Recorder
	deadline := time.Now().Add(20 * time.Second)
	for {
		if found, requests = run(as("reader")); len(requests.Denied()) == 0 {
			break
		}
		if time.Now().After(deadline) { // the authorizer observes the binding with a delay
			t.Fatalf("the role does not suffice; denied: %v", requests.Denied())
		}
		time.Sleep(200 * time.Millisecond)
	}
	// The reader itself may now reach kubelets, which is one of the things that are looked for.
	if r := found["cis-5.1.10"]; r.Status != check.SecurityFailed || len(r.Evidence) != 1 || !slices.Equal(r.Evidence[0].Objects, []string{"clusterrolebinding/reader"}) {
		t.Errorf("subjects that may reach kubelets: %s %+v", r.Status, r.Evidence)
	}
	for id, want := range map[string]check.SecurityStatus{"cis-5.1.1": check.SecurityPassed, "cis-5.1.2": check.SecurityPassed, "cis-5.1.3": check.SecurityPassed, "cis-4.2.1": check.SecurityNotVisible, "cis-4.3.1": check.SecurityNotApplicable, "cis-1.2.15": check.SecurityNotVisible} {
		if r := found[id]; r.Status != want {
			t.Errorf("%s is %s (%s), want %s: %+v", id, r.Status, r.Reason, want, r.Evidence)
		}
	}
	rights := Rights()
	for _, r := range requests.Sent() {
		mayAll := r.Resource == "selfsubjectreviews"
		if !mayAll && !slices.Contains(rights, r) {
			t.Errorf("request without a right in the role: %+v", r)
		}
		if r.Verb != "get" && r.Verb != "list" && !mayAll {
			t.Errorf("a check that changes nothing sent %+v", r)
		}
	}
	for _, r := range rights {
		if !slices.Contains(requests.Sent(), r) {
			t.Errorf("the role has a right that no check used: %+v", r)
		}
	}
}
