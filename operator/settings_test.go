package operator

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
)

func TestSettingsFollowTheListAndKeepWhatOthersSet(t *testing.T) {
	t.Parallel()
	foreign := corev1.Taint{Key: "example.com/down", Effect: corev1.TaintEffectNoExecute}
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"team": "a", "same": "1"}},
		Spec:       corev1.NodeSpec{Taints: []corev1.Taint{foreign}},
	}
	apply := func(labels map[string]string, taints ...cloud.Taint) {
		t.Helper()
		want := cloud.NodeSettings{Labels: labels, Taints: taints}
		applySettings(n, want)
		if before := n.DeepCopy(); applySettings(n, want) {
			t.Errorf("a repetition changed the Node: %s", cmp.Diff(before, n))
		}
	}
	check := func(what string, labels map[string]string, taints ...corev1.Taint) {
		t.Helper()
		if d := cmp.Diff(labels, n.Labels); d != "" {
			t.Errorf("%s: labels %s", what, d)
		}
		if d := cmp.Diff(taints, n.Spec.Taints); d != "" {
			t.Errorf("%s: taints %s", what, d)
		}
	}
	apply(map[string]string{"disk": "ssd", "same": "1"}, cloud.Taint{Key: "batch", Value: "yes", Effect: "NoSchedule"})
	check("set", map[string]string{"team": "a", "same": "1", "disk": "ssd"}, foreign, corev1.Taint{Key: "batch", Value: "yes", Effect: "NoSchedule"})

	// The machine takes the label away, and somebody sets another value.
	delete(n.Labels, "disk")
	n.Spec.Taints[1].Value = "no"
	apply(map[string]string{"disk": "ssd", "same": "1"}, cloud.Taint{Key: "batch", Value: "yes", Effect: "NoSchedule"})
	check("restored", map[string]string{"team": "a", "same": "1", "disk": "ssd"}, foreign, corev1.Taint{Key: "batch", Value: "yes", Effect: "NoSchedule"})

	apply(map[string]string{"disk": "hdd"})
	check("changed", map[string]string{"team": "a", "same": "1", "disk": "hdd"}, foreign)
	apply(nil)
	check("removed", map[string]string{"team": "a", "same": "1"}, foreign)
	if _, has := n.Annotations[v1alpha1.AnnotationSettings]; has {
		t.Error("the record of nothing stays")
	}

	// A record that says too much takes nothing away that has another value by now.
	b, err := json.Marshal(settingsRecord{Labels: map[string]string{"team": "b"}, Taints: []cloud.Taint{{Key: foreign.Key, Value: "x", Effect: "NoExecute"}}})
	if err != nil {
		t.Fatal(err)
	}
	metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationSettings, string(b))
	apply(nil)
	check("kept", map[string]string{"team": "a", "same": "1"}, foreign)
}
