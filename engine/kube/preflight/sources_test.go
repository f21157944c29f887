package preflight

import (
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Each source that keeps whole objects reads its own kind, without the fields that no check uses.
func TestSourcesKeepSlimObjects(t *testing.T) {
	m := metav1.ObjectMeta{
		Name: "one", Namespace: metav1.NamespaceSystem,
		Annotations:   map[string]string{corev1.LastAppliedConfigAnnotation: "{}", "kept": "yes"},
		ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl", FieldsV1: metav1.NewFieldsV1("{}")}},
	}
	global := *m.DeepCopy()
	global.Namespace = ""
	core := served(t,
		&policyv1.PodDisruptionBudget{ObjectMeta: m}, &corev1.ResourceQuota{ObjectMeta: m}, &appsv1.Deployment{ObjectMeta: m},
		&appsv1.StatefulSet{ObjectMeta: m}, &appsv1.DaemonSet{ObjectMeta: m}, &corev1.Service{ObjectMeta: m},
		&discoveryv1.EndpointSlice{ObjectMeta: m}, &admissionv1.ValidatingWebhookConfiguration{ObjectMeta: global},
		&admissionv1.MutatingWebhookConfiguration{ObjectMeta: global}, &corev1.PersistentVolume{ObjectMeta: global},
		&corev1.PersistentVolumeClaim{ObjectMeta: m}, &storagev1.VolumeAttachment{ObjectMeta: global}, &storagev1.CSINode{ObjectMeta: global},
		&batchv1.Job{ObjectMeta: m, Spec: batchv1.JobSpec{Template: corev1.PodTemplateSpec{ObjectMeta: m}}},
		&autoscalingv2.HorizontalPodAutoscaler{ObjectMeta: m},
	)
	r := &reader{core: core, w: &world{}}
	w, all := r.w, r.sources()
	key := types.NamespacedName{Namespace: m.Namespace, Name: m.Name}
	for id, read := range map[source]func() []metav1.ObjectMeta{
		sourcePDBs:         func() []metav1.ObjectMeta { return metas(w.pdbs) },
		sourceQuotas:       func() []metav1.ObjectMeta { return metas(w.quotas) },
		sourceDeployments:  func() []metav1.ObjectMeta { return metas(w.deployments) },
		sourceStatefulSets: func() []metav1.ObjectMeta { return metas(w.statefulSets) },
		sourceDaemonSets:   func() []metav1.ObjectMeta { return metas(w.daemonSets) },
		sourceServices:     func() []metav1.ObjectMeta { return []metav1.ObjectMeta{w.services[key].ObjectMeta} },
		sourceSlices:       func() []metav1.ObjectMeta { return metas(w.slices) },
		sourceValidating:   func() []metav1.ObjectMeta { return metas(w.validating) },
		sourceMutating:     func() []metav1.ObjectMeta { return metas(w.mutating) },
		sourceVolumes:      func() []metav1.ObjectMeta { return []metav1.ObjectMeta{w.volumes["one"].ObjectMeta} },
		sourceClaims:       func() []metav1.ObjectMeta { return []metav1.ObjectMeta{w.claims[key].ObjectMeta} },
		sourceAttachments:  func() []metav1.ObjectMeta { return metas(w.attachments) },
		sourceCSINodes:     func() []metav1.ObjectMeta { return metas(w.csiNodes) },
		sourceJobs:         func() []metav1.ObjectMeta { return metas(w.jobs) },
		sourceAutoscalers:  func() []metav1.ObjectMeta { return metas(w.autoscalers) },
	} {
		t.Run(string(id), func(t *testing.T) {
			if err := all[id](t.Context()); err != nil {
				t.Fatal(err)
			}
			got := read()
			if len(got) != 1 || got[0].Name != "one" {
				t.Fatalf("read %+v, want one object", got)
			}
			if a := got[0].Annotations; len(a) != 1 || a["kept"] != "yes" {
				t.Errorf("annotations %v, want those without the last applied configuration", a)
			}
			if f := got[0].ManagedFields; len(f) != 1 || f[0].Manager != "kubectl" || f[0].FieldsV1 != nil {
				t.Errorf("managed fields %+v, want the manager alone", f)
			}
		})
	}
	if len(w.jobs) == 1 && w.jobs[0].Spec.Template.Name != "" {
		t.Error("the template of a Job is kept")
	}
}

func metas[T any, O pointer[T]](all []T) []metav1.ObjectMeta {
	var out []metav1.ObjectMeta
	for i := range all {
		var o O = &all[i]
		out = append(out, metav1.ObjectMeta{Name: o.GetName(), Annotations: o.GetAnnotations(), ManagedFields: o.GetManagedFields()})
	}
	return out
}
