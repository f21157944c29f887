package preflight

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/kubeadm"
	"constellation/engine/plan"
)

// The check names the pods that the level of new clusters would refuse, and changes nothing. Only clusters that
// init made without that level are examined.
func TestPodsThatTheLevelOfNewClustersRefuses(t *testing.T) {
	s := newSite(t)
	ctx, yes := t.Context(), true
	for name, label := range map[string]string{"legacy": "", "labelled": "privileged", "fine": ""} {
		n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if label != "" {
			n.Labels = map[string]string{psaLabel: label}
		}
		_, err := s.core.CoreV1().Namespaces().Create(ctx, n, metav1.CreateOptions{})
		s.must(err)
		_, err = s.core.CoreV1().Pods(name).Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.PodSpec{
			HostNetwork: name != "fine", Containers: []corev1.Container{{Name: "c", Image: "c", SecurityContext: &corev1.SecurityContext{ReadOnlyRootFilesystem: &yes}}},
		}}, metav1.CreateOptions{})
		s.must(err)
	}
	r := hop("v1.35.4", "v1.36.3")
	r.DryRun = true
	found := func() plan.Finding {
		t.Helper()
		for _, f := range s.look(s.config, r) {
			if f.ID == "pod-security-default" {
				return f
			}
		}
		t.Fatal("the check has no finding")
		return plan.Finding{}
	}
	const quiet = "the level of Pod Security that new clusters enforce refuses no pod"
	if f := found(); f.Title != quiet {
		t.Errorf("of a cluster of somebody else: %+v", f)
	}
	config := func(flag, file string) {
		s.change(kubeadmConfig, func(data map[string]string) {
			data["ClusterConfiguration"] = "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\nkubernetesVersion: v1.35.4\napiServer: {extraArgs: [{name: " + flag + ", value: " + file + "}]}\n"
		})
	}
	config("authentication-config", kubeadm.HardeningDir+"/authentication.yaml")
	f := found()
	if f.Severity != plan.Info || !strings.HasSuffix(f.Title, "would refuse pods of 1 namespace") || !strings.Contains(f.Detail, "legacy/web: host namespaces") || len(f.Objects) != 1 || f.Objects[0] != "namespace/legacy" {
		t.Errorf("of a cluster that an earlier release made: %+v", f)
	}
	n, err := s.core.CoreV1().Namespaces().Get(ctx, "legacy", metav1.GetOptions{})
	s.must(err)
	if n.Labels[psaLabel] != "" {
		t.Error("the check labelled a namespace")
	}
	r.DryRun = false
	if f := found(); f.Title != quiet {
		t.Errorf("without dry runs: %+v", f)
	}
	r.DryRun = true
	config("admission-control-config-file", kubeadm.AdmissionFile)
	if f := found(); f.Title != quiet {
		t.Errorf("of a new cluster: %+v", f)
	}
}
