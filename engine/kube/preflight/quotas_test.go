package preflight

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"constellation/engine/check"
	"constellation/engine/plan"
)

func TestExhaustedQuotas(t *testing.T) {
	quota := func(namespace string, hard, used corev1.ResourceList) corev1.ResourceQuota {
		q := corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "limits"}}
		q.Status.Hard, q.Status.Used = hard, used
		return q
	}
	list := func(name, amount string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceName(name): resource.MustParse(amount)}
	}
	const operator, proxy = "deployment/constellation-system/constellation-operator", "daemonset/kube-system/kube-proxy"
	for _, tt := range []struct {
		name   string
		quota  corev1.ResourceQuota
		change func(*corev1.ResourceQuota)
		want   []string // title: detail: command
	}{
		{name: "no pod more", quota: quota(ownNamespace, list("pods", "1"), list("pods", "1")), want: []string{
			"ResourceQuota constellation-system/limits refuses new pods: 1 of 1 pods are used: no additional pod of " + operator +
				`: kubectl -n constellation-system patch resourcequota limits --type=merge -p '{"spec":{"hard":{"pods":"2"}}}'`,
		}},
		{name: "room for one more", quota: quota(ownNamespace, list("pods", "2"), list("pods", "1"))},
		{name: "CPU is left, but not enough", quota: quota(ownNamespace, list("requests.cpu", "1"), list("requests.cpu", "950m")), want: []string{
			"ResourceQuota constellation-system/limits refuses new pods: 950m of 1 requests.cpu are used: no additional pod of " + operator +
				`: kubectl -n constellation-system patch resourcequota limits --type=merge -p '{"spec":{"hard":{"requests.cpu":"1050m"}}}'`,
		}},
		{name: "memory that the pods do not ask for", quota: quota(ownNamespace, list("limits.memory", "1Gi"), list("limits.memory", "1Gi"))},
		{name: "pods of the system", quota: quota("kube-system", list("count/pods", "7"), list("count/pods", "9")), want: []string{
			"ResourceQuota kube-system/limits refuses new pods: 9 of 7 count/pods are used: no additional pod of " + proxy +
				`: kubectl -n kube-system patch resourcequota limits --type=merge -p '{"spec":{"hard":{"count/pods":"10"}}}'`,
		}},
		{name: "another namespace", quota: quota("shop", list("pods", "1"), list("pods", "1"))},
		{name: "not yet computed", quota: quota(ownNamespace, list("pods", "1"), nil)},
		{name: "pods without requests alone", quota: quota(ownNamespace, list("pods", "1"), list("pods", "1")), change: func(q *corev1.ResourceQuota) {
			q.Spec.Scopes = []corev1.ResourceQuotaScope{corev1.ResourceQuotaScopeBestEffort}
		}},
		{name: "pods of another priority class", quota: quota(ownNamespace, list("pods", "1"), list("pods", "1")), change: func(q *corev1.ResourceQuota) {
			q.Spec.ScopeSelector = &corev1.ScopeSelector{MatchExpressions: []corev1.ScopedResourceSelectorRequirement{
				{ScopeName: corev1.ResourceQuotaScopePriorityClass, Operator: corev1.ScopeSelectorOpIn, Values: []string{"low"}},
			}}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := &world{}
			d := appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: ownNamespace, Name: operatorName}}
			d.Spec.Template.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: list("cpu", "100m")}}}
			w.deployments = []appsv1.Deployment{d}
			w.daemonSets = []appsv1.DaemonSet{{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kube-proxy"}}}
			if tt.change != nil {
				tt.change(&tt.quota)
			}
			w.quotas = []corev1.ResourceQuota{tt.quota}
			var got []string
			for _, f := range podQuota(w, nil) {
				got = append(got, f.Title+": "+f.Detail+": "+f.Command)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("findings (-want +got):\n%s", d)
			}
		})
	}
}

const bouncer = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: no-operators}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}]
  validations: [{expression: "!has(object.metadata.labels) || !('app' in object.metadata.labels) || object.metadata.labels.app != 'operator'", message: "operators are not welcome"}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: no-operators}
spec: {policyName: no-operators, validationActions: [Deny]}
`

// TestAPodLikeTheOperatorsIsAskedFor asks a real API server, which makes none.
func TestAPodLikeTheOperatorsIsAskedFor(t *testing.T) {
	c := startCluster(t)
	c.namespace(ownNamespace)
	labels := map[string]string{"app": "operator"}
	_, err := c.core.AppsV1().Deployments(ownNamespace).Create(t.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: operatorName},
		Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels},
			Spec:       corev1.PodSpec{HostNetwork: true, Containers: []corev1.Container{{Name: "main", Image: "example.com/operator:1"}}},
		}},
	}, metav1.CreateOptions{})
	c.must(err)
	request := check.PreflightRequest{DryRun: true}
	look := func(core kubernetes.Interface) []plan.Finding {
		t.Helper()
		w, err := collect(t.Context(), c.cp.Config(), c.core, request)
		c.must(err)
		i := slices.IndexFunc(admissionChecks, func(c checkItem) bool { return c.id == "pod-admission" })
		return admissionChecks[i].find(w, &probe{ctx: t.Context(), core: core})
	}
	// until waits for one finding: the API server learns of rules a moment later.
	until := func(severity plan.Severity, title, detail string) plan.Finding {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); ; {
			found := look(c.core)
			if len(found) == 1 && found[0].Severity == severity && found[0].Title == title && strings.Contains(found[0].Detail, detail) {
				return found[0]
			}
			if time.Now().After(deadline) {
				t.Fatalf("findings %+v, want %s %s: %s", found, severity, title, detail)
			}
		}
	}
	fine := func() { t.Helper(); until(plan.Info, "the cluster admits a new pod of the operator", "") }
	fine()

	nobody, err := c.cp.ConfigFor("nobody")
	c.must(err)
	asNobody, err := kubernetes.NewForConfig(nobody)
	c.must(err)
	if found := look(asNobody); len(found) != 1 || found[0].Severity != plan.NotChecked || !strings.HasSuffix(found[0].Title, "the kubeconfig's user may not create pods") {
		t.Errorf("a user who may not make pods: %+v", found)
	}

	c.must(c.cp.Apply(t.Context(), []byte(bouncer)))
	until(plan.Block, "ValidatingAdmissionPolicy 'no-operators' refuses new pods of the operator in namespace constellation-system", "operators are not welcome")
	c.must(c.core.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Delete(t.Context(), "no-operators", metav1.DeleteOptions{}))
	fine()

	label := func(value string) {
		_, err := c.core.CoreV1().Namespaces().Patch(t.Context(), ownNamespace, types.MergePatchType, []byte(`{"metadata":{"labels":{"`+psaLabel+`":`+value+`}}}`), metav1.PatchOptions{})
		c.must(err)
	}
	label(`"baseline"`)
	until(plan.Block, "pod security level baseline:latest refuses new pods of the operator in namespace constellation-system", "hostNetwork=true")
	label("null")
	fine()

	q, err := c.core.CoreV1().ResourceQuotas(ownNamespace).Create(t.Context(), &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Name: "none"}, Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"pods": resource.MustParse("0")}},
	}, metav1.CreateOptions{})
	c.must(err)
	q.Status.Hard, q.Status.Used = q.Spec.Hard, corev1.ResourceList{"pods": resource.MustParse("0")}
	_, err = c.core.CoreV1().ResourceQuotas(ownNamespace).UpdateStatus(t.Context(), q, metav1.UpdateOptions{})
	c.must(err)
	f := until(plan.Block, "ResourceQuota none refuses new pods of the operator in namespace constellation-system", "exceeded quota: none, requested: pods=1, used: pods=0, limited: pods=0; caused by pod-quota")
	if want := []string{"resourcequota/constellation-system/none", "deployment/constellation-system/constellation-operator"}; !slices.Equal(f.Objects, want) {
		t.Errorf("objects %q, want %q", f.Objects, want)
	}
	request.DryRun = false
	if found := look(c.core); len(found) != 1 || found[0].Severity != plan.Info {
		t.Errorf("dry runs are switched off: %+v", found)
	}
	pods, err := c.core.CoreV1().Pods(ownNamespace).List(t.Context(), metav1.ListOptions{})
	c.must(err)
	if len(pods.Items) != 0 {
		t.Errorf("%d pods were made", len(pods.Items))
	}
}
