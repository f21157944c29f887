package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"
)

// Apply creates or updates the objects of a YAML stream as the cluster's
// administrator, in their order, by server-side apply. It returns when kinds that
// were among them can be used.
func (c *ControlPlane) Apply(ctx context.Context, manifests []byte) error {
	d, err := discovery.NewDiscoveryClientForConfig(c.admin)
	if err != nil {
		return err
	}
	objects, err := dynamic.NewForConfig(c.admin)
	if err != nil {
		return err
	}
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(d))
	docs := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(manifests), 4096)
	for {
		var o unstructured.Unstructured
		err := docs.Decode(&o)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read manifest: %w", err)
		}
		if len(o.Object) == 0 {
			continue // nothing but a comment
		}
		what := fmt.Sprintf("%s %s", o.GetKind(), o.GetName())
		m, err := mapper.RESTMapping(o.GroupVersionKind().GroupKind(), o.GroupVersionKind().Version)
		if meta.IsNoMatchError(err) { // perhaps a kind that we have just made
			mapper.Reset()
			m, err = mapper.RESTMapping(o.GroupVersionKind().GroupKind(), o.GroupVersionKind().Version)
		}
		if err != nil {
			return fmt.Errorf("apply %s: %w", what, err)
		}
		r := objects.Resource(m.Resource).Namespace(o.GetNamespace())
		if _, err := r.Apply(ctx, o.GetName(), &o, metav1.ApplyOptions{FieldManager: "controlplane", Force: true}); err != nil {
			return fmt.Errorf("apply %s: %w", what, err)
		}
		if o.GetKind() != "CustomResourceDefinition" {
			continue
		}
		if err := poll(ctx, func() (bool, error) { return established(ctx, r, o.GetName()) }); err != nil {
			return fmt.Errorf("await %s: %w", what, err)
		}
	}
}

func established(ctx context.Context, r dynamic.ResourceInterface, name string) (bool, error) {
	o, err := r.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return false, err
	}
	status, _, err := unstructured.NestedMap(o.Object, "status")
	conditions, _ := status["conditions"].([]any) // null at first
	for _, c := range conditions {
		if m, ok := c.(map[string]any); ok && m["type"] == "Established" && m["status"] == "True" {
			return true, nil
		}
	}
	return false, err
}
