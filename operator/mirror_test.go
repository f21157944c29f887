package operator

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"constellation/operator/api/v1alpha1"
)

// TestMirror runs the mirror with the rights of the chart and nothing more.
func TestMirror(t *testing.T) {
	c := newCluster(t)
	direct, err := client.NewWithWatch(c.access(), client.Options{Scheme: c.admin.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	nv := &v1alpha1.NodeVersion{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName},
		Spec:       v1alpha1.NodeVersionSpec{Image: "i", ImageVersion: "v1.0.0", KubernetesClusterVersion: "v1.35.4", KubernetesComponentsReference: refA},
	}
	c.create(nv)
	yesterday := nv.DeepCopy()

	m := &mirror{client: direct, fresh: direct, log: slog.New(slog.DiscardHandler)}
	pass := func(t *testing.T, m *mirror) ctrl.Result {
		t.Helper()
		r, err := m.Reconcile(t.Context(), named(v1alpha1.NodeVersionName))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	read := func(t *testing.T) *corev1.ConfigMap {
		t.Helper()
		var cm corev1.ConfigMap
		if err := c.admin.Get(t.Context(), client.ObjectKey{Namespace: "kube-system", Name: "k8s-version"}, &cm); err != nil {
			t.Fatal(err)
		}
		return &cm
	}
	holds := func(t *testing.T, want map[string]string) {
		t.Helper()
		if d := cmp.Diff(want, read(t).Data); d != "" {
			t.Errorf("k8s-version (-want +got):\n%s", d)
		}
	}
	first := map[string]string{"k8s-version": "v1.35.4", "components": refA}
	second := map[string]string{"k8s-version": "v1.36.3", "components": refB, "note": "mine"}

	t.Run("the ConfigMap of a new cluster is created", func(t *testing.T) {
		pass(t, m)
		holds(t, first)
	})
	t.Run("without a change nothing is written", func(t *testing.T) {
		before := read(t).ResourceVersion
		if r := pass(t, m); r.RequeueAfter != mirrorCheck {
			t.Errorf("checked again after %v", r.RequeueAfter)
		}
		if after := read(t).ResourceVersion; after != before {
			t.Error("it was written")
		}
	})
	t.Run("the ConfigMap follows the target, and its other keys stay", func(t *testing.T) {
		cm := read(t)
		cm.Data["note"] = "mine"
		if err := c.admin.Update(t.Context(), cm); err != nil {
			t.Fatal(err)
		}
		nv.Spec.KubernetesClusterVersion, nv.Spec.KubernetesComponentsReference = "v1.36.3", refB
		if err := c.admin.Update(t.Context(), nv); err != nil {
			t.Fatal(err)
		}
		pass(t, m)
		holds(t, second)
	})
	t.Run("a write of somebody else is overwritten", func(t *testing.T) {
		cm := read(t)
		cm.Data["k8s-version"] = "v1.99.0"
		if err := c.admin.Update(t.Context(), cm); err != nil {
			t.Fatal(err)
		}
		pass(t, m)
		holds(t, second)
	})
	t.Run("a former leader does not overwrite a new target with an old one", func(t *testing.T) {
		stale := interceptor.NewClient(direct, interceptor.Funcs{
			Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
				if v, ok := o.(*v1alpha1.NodeVersion); ok {
					yesterday.DeepCopyInto(v)
					return nil
				}
				return c.Get(ctx, key, o, opts...)
			},
		})
		pass(t, &mirror{client: stale, fresh: direct, log: m.log})
		holds(t, second)
		// Even if the target changes just after it was read.
		late := interceptor.NewClient(stale, interceptor.Funcs{
			Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
				if _, ok := o.(*v1alpha1.NodeVersion); ok {
					cm := read(t)
					cm.Data["note"] = "the other leader was here"
					if err := direct.Patch(ctx, cm, client.RawPatch("application/merge-patch+json", []byte(`{"data":{"note":"the other leader was here"}}`))); err != nil {
						return err
					}
				}
				return c.Get(ctx, key, o, opts...)
			},
		})
		if r := pass(t, &mirror{client: stale, fresh: late, log: m.log}); r.RequeueAfter != staleView {
			t.Errorf("checked again after %v", r.RequeueAfter)
		}
		second["note"] = "the other leader was here"
		holds(t, second)
	})
	t.Run("a running operator creates the ConfigMap again", func(t *testing.T) {
		if err := c.admin.Delete(t.Context(), read(t)); err != nil {
			t.Fatal(err)
		}
		inner := *c
		inner.t = t
		defer inner.start()()
		inner.eventually("the mirror exists", func() (string, bool) {
			var cm corev1.ConfigMap
			err := c.admin.Get(t.Context(), client.ObjectKey{Namespace: "kube-system", Name: "k8s-version"}, &cm)
			return fmt.Sprint(cm.Data, err), cmp.Equal(cm.Data, map[string]string{"k8s-version": "v1.36.3", "components": refB})
		})
	})
}
