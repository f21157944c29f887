package assets_test

import (
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"constellation/internal/golden"
)

// fieldsOf returns the JSON names of the fields of a struct, those that it embeds included.
func fieldsOf(t reflect.Type) (names []string) {
	for i := range t.NumField() {
		name, options, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		if strings.Contains(options, "inline") {
			names = append(names, fieldsOf(t.Field(i).Type)...)
			continue
		}
		names = append(names, name)
	}
	return names
}

// TestAutoscalerPolicyNamesEveryField compares the policy's list of immutable fields with the fields
// of the linked API, so that the policy covers fields of a new version of Kubernetes.
func TestAutoscalerPolicyNamesEveryField(t *testing.T) {
	const file, begin, end = "charts/constellation-policies/templates/autoscaler.yaml", "    # fields: begin\n", "    # fields: end\n"
	equal := func(t reflect.Type, a, b string, but ...string) string {
		var all []string
		for _, f := range fieldsOf(t) {
			if !slices.Contains(but, f) {
				all = append(all, fmt.Sprintf("%s.?%s == %s.?%s", a, f, b, f))
			}
		}
		return strings.Join(all, " &&\n        ")
	}
	var want strings.Builder
	rule := func(expression, message string) {
		fmt.Fprintf(&want, "    - expression: >-\n        %s\n      message: %s\n", expression, message)
	}
	rule(equal(reflect.TypeFor[appsv1.DeploymentSpec](), "object.spec", "oldObject.spec", "replicas", "template")+" &&\n        object.spec.template.?metadata == oldObject.spec.template.?metadata",
		"the operator may change replicas and the arguments of the first container only")
	rule(equal(reflect.TypeFor[corev1.PodSpec](), "object.spec.template.spec", "oldObject.spec.template.spec", "containers"),
		"the operator may not change the pod of the cluster autoscaler")
	rule("size(object.spec.template.spec.containers) == size(oldObject.spec.template.spec.containers) &&\n        "+
		"object.spec.template.spec.containers.all(c, oldObject.spec.template.spec.containers.exists_one(o,\n        "+
		equal(reflect.TypeFor[corev1.Container](), "c", "o", "args")+"))",
		"of the container of the cluster autoscaler the operator may change the arguments only")
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(b), begin)
	have, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no part between %q and %q", file, begin, end)
	}
	if golden.Updating() {
		if err := os.WriteFile(file, []byte(head+begin+want.String()+end+tail), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if have != want.String() {
		t.Errorf("%s lacks fields of the API, or has removed ones (go test ./assets -run %s -update rewrites it)", file, t.Name())
	}
}
