package v1alpha1_test

import (
	"context"
	"io/fs"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	"constellation/assets"
	"constellation/engine/sandbox/controlplane"
	"constellation/operator/api/v1alpha1"
)

const (
	refA = "k8s-components-sha256-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	refB = "k8s-components-sha256-bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
)

var kinds = map[string]struct{ resource, name, spec string }{
	"NodeVersion": {
		resource: "nodeversions", name: "constellation-version",
		spec: "{image: i, imageVersion: v1.0.0, kubernetesClusterVersion: v1.35.4, kubernetesComponentsReference: " + refA + "}",
	},
	"ScalingGroup":        {resource: "scalinggroups", name: "workers", spec: "{groupId: sandboxes/t/groups/workers, role: Worker}"},
	"AutoscalingStrategy": {resource: "autoscalingstrategies", name: "autoscalingstrategy", spec: "{enabled: true, deploymentName: ca, deploymentNamespace: kube-system}"},
	"PendingNode":         {resource: "pendingnodes", name: "p", spec: "{groupID: g, goal: Join, token: t}"},
	"JoiningNode":         {resource: "joiningnodes", name: "worker-1", spec: "{name: worker-1, componentsreference: " + refA + ", iscontrolplane: false}"},
}

// TestRules holds every validation rule against a real API server: the object that
// breaks it is refused with the rule's words.
func TestRules(t *testing.T) {
	cp := controlplane.ForTest(t, controlplane.Options{})
	crds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range crds {
		if err := cp.Apply(t.Context(), f.Data); err != nil {
			t.Fatal(err)
		}
	}
	c := dynamic.NewForConfigOrDie(cp.Config())

	for _, tt := range []struct {
		name, kind string
		object     string // merged over the sample; what is created
		change     string // merge patch on top; empty: the creation is what counts
		want       string // part of the message; empty: accepted
	}{
		{name: "minimal NodeVersion", kind: "NodeVersion", object: `{}`, want: ""},
		{name: "another name of NodeVersion", kind: "NodeVersion", object: `{metadata: {name: constellation-os}}`, want: "the only NodeVersion of a cluster is called constellation-version"},
		{name: "no image", kind: "NodeVersion", object: `{spec: {image: null}}`, want: "spec.image: Required value"},
		{name: "image version without an image", kind: "NodeVersion", object: `{spec: {image: ""}}`, want: "image and imageVersion belong together"},
		{name: "Kubernetes version without v", kind: "NodeVersion", object: `{spec: {kubernetesClusterVersion: "1.35.4"}}`, want: "kubernetesClusterVersion is not a full version such as v1.35.4"},
		{name: "Kubernetes version without patch", kind: "NodeVersion", object: `{spec: {kubernetesClusterVersion: v1.35}}`, want: "kubernetesClusterVersion is not a full version"},
		{name: "Kubernetes version with leading zero", kind: "NodeVersion", object: `{spec: {kubernetesClusterVersion: v1.035.4}}`, want: "kubernetesClusterVersion is not a full version"},
		{name: "Kubernetes pre-release", kind: "NodeVersion", object: `{spec: {kubernetesClusterVersion: v1.36.0-rc.1}}`, want: ""},
		{name: "image version that is not a version", kind: "NodeVersion", object: `{spec: {imageVersion: latest}}`, want: "imageVersion is not a full version such as v1.1.0"},
		{name: "components with a short digest", kind: "NodeVersion", object: `{spec: {kubernetesComponentsReference: k8s-components-sha256-abc}}`, want: "kubernetesComponentsReference is not of the form"},
		{name: "surge as number", kind: "NodeVersion", object: `{spec: {rollout: {maxSurge: 3}}}`, want: ""},
		{name: "surge as percentage", kind: "NodeVersion", object: `{spec: {rollout: {maxSurge: "100%"}}}`, want: ""},
		{name: "surge of zero", kind: "NodeVersion", object: `{spec: {rollout: {maxSurge: 0}}}`, want: "maxSurge is neither a number of at least 1 nor a percentage"},
		{name: "negative surge", kind: "NodeVersion", object: `{spec: {rollout: {maxSurge: -1}}}`, want: "maxSurge is neither"},
		{name: "surge of zero percent", kind: "NodeVersion", object: `{spec: {rollout: {maxSurge: "0%"}}}`, want: "maxSurge is neither"},
		{name: "surge above everything", kind: "NodeVersion", object: `{spec: {rollout: {maxSurge: "101%"}}}`, want: "maxSurge is neither"},
		{name: "surge as a word", kind: "NodeVersion", object: `{spec: {rollout: {maxSurge: all}}}`, want: "maxSurge is neither"},
		{name: "surge as a number in quotes", kind: "NodeVersion", object: `{spec: {rollout: {maxSurge: "3"}}}`, want: "maxSurge is neither"},
		{name: "whole target in one write", kind: "NodeVersion", object: `{}`, change: `{spec: {image: j, imageVersion: v1.1.0, kubernetesClusterVersion: v1.36.3, kubernetesComponentsReference: ` + refB + `}}`, want: ""},
		{name: "Kubernetes alone", kind: "NodeVersion", object: `{}`, change: `{spec: {kubernetesClusterVersion: v1.36.3}}`, want: "kubernetesClusterVersion changed alone: set kubernetesComponentsReference"},
		{name: "image version alone", kind: "NodeVersion", object: `{}`, change: `{spec: {imageVersion: v1.1.0}}`, want: "imageVersion changed alone: set image"},
		{name: "components alone", kind: "NodeVersion", object: `{}`, change: `{spec: {kubernetesComponentsReference: ` + refB + `}}`, want: ""},

		{name: "minimal group", kind: "ScalingGroup", object: `{}`, want: ""},
		{name: "min above max", kind: "ScalingGroup", object: `{spec: {min: 5, max: 4}}`, want: "min is greater than max"},
		{name: "min equal to max", kind: "ScalingGroup", object: `{spec: {min: 4, max: 4}}`, want: ""},
		{name: "negative min", kind: "ScalingGroup", object: `{spec: {min: -1}}`, want: "spec.min"},
		{name: "unknown role", kind: "ScalingGroup", object: `{spec: {role: Master}}`, want: `supported values: "ControlPlane", "Worker"`},
		{name: "no role", kind: "ScalingGroup", object: `{spec: {role: null}}`, want: "spec.role: Required value"},
		{name: "unknown strategy", kind: "ScalingGroup", object: `{spec: {strategy: Recreate}}`, want: `supported values: "Replace", "InPlace"`},
		{name: "autoscaled control planes", kind: "ScalingGroup", object: `{spec: {role: ControlPlane, autoscaling: true}}`, want: "only groups of workers can be autoscaled"},
		{name: "autoscaled workers", kind: "ScalingGroup", object: `{spec: {autoscaling: true}}`, want: ""},
		{name: "changed group", kind: "ScalingGroup", object: `{}`, change: `{spec: {groupId: other}}`, want: "groupId cannot be changed"},
		{name: "changed role", kind: "ScalingGroup", object: `{}`, change: `{spec: {role: ControlPlane}}`, want: "role cannot be changed"},
		{name: "changed bounds", kind: "ScalingGroup", object: `{}`, change: `{spec: {min: 2, max: 20}}`, want: ""},

		{name: "minimal strategy", kind: "AutoscalingStrategy", object: `{}`, want: ""},
		{name: "another name of AutoscalingStrategy", kind: "AutoscalingStrategy", object: `{metadata: {name: mine}}`, want: "the only AutoscalingStrategy of a cluster is called autoscalingstrategy"},
		{name: "no Deployment", kind: "AutoscalingStrategy", object: `{spec: {deploymentName: ""}}`, want: "deploymentName is not the name of a Deployment"},
		{name: "bad namespace", kind: "AutoscalingStrategy", object: `{spec: {deploymentNamespace: Kube_System}}`, want: "deploymentNamespace is not the name of a namespace"},

		{name: "minimal PendingNode", kind: "PendingNode", object: `{}`, want: ""},
		{name: "unknown goal", kind: "PendingNode", object: `{spec: {goal: Stay}}`, want: `supported values: "Join", "Leave", "Upgrade"`},
		{name: "minimal upgrade", kind: "PendingNode", object: `{spec: {goal: Upgrade, token: null, providerID: x, nodeName: node-1}}`, want: ""},
		{name: "upgrade without a node name", kind: "PendingNode", object: `{spec: {goal: Upgrade, token: null, providerID: x}}`, want: "it needs a providerID and a nodeName, and no token"},
		{name: "upgrade with a token", kind: "PendingNode", object: `{spec: {goal: Upgrade, providerID: x, nodeName: node-1}}`, want: "it needs a providerID and a nodeName, and no token"},
		{name: "goal changed from Upgrade to Leave", kind: "PendingNode", object: `{spec: {goal: Upgrade, token: null, providerID: x, nodeName: node-1}}`, change: `{spec: {goal: Leave}}`, want: "goal can only be changed from Join to Leave"},
		{name: "goal changed from Join to Upgrade", kind: "PendingNode", object: `{spec: {providerID: x, nodeName: node-1, token: null}}`, change: `{spec: {goal: Upgrade}}`, want: "goal can only be changed from Join to Leave"},
		{name: "joining without token or machine", kind: "PendingNode", object: `{spec: {token: null}}`, want: "a machine that joins needs a token until its providerID is known"},
		{name: "leaving without machine", kind: "PendingNode", object: `{spec: {goal: Leave}}`, want: "a machine that leaves needs a providerID"},
		{name: "providerID and node name set later", kind: "PendingNode", object: `{}`, change: `{spec: {providerID: x, nodeName: node-1}}`, want: ""},
		{name: "providerID changed", kind: "PendingNode", object: `{spec: {providerID: x}}`, change: `{spec: {providerID: other}}`, want: "providerID cannot be changed once it is set"},
		{name: "providerID removed", kind: "PendingNode", object: `{spec: {providerID: x}}`, change: `{spec: {providerID: null}}`, want: "providerID cannot be changed once it is set"},
		{name: "node name changed", kind: "PendingNode", object: `{spec: {nodeName: x}}`, change: `{spec: {nodeName: other}}`, want: "nodeName cannot be changed once it is set"},
		{name: "token changed", kind: "PendingNode", object: `{}`, change: `{spec: {token: u}}`, want: "token cannot be changed"},
		{name: "token removed", kind: "PendingNode", object: `{spec: {providerID: x}}`, change: `{spec: {token: null}}`, want: "token cannot be changed"},
		{name: "token added", kind: "PendingNode", object: `{spec: {providerID: x, token: null}}`, change: `{spec: {token: u}}`, want: "token cannot be changed"},
		{name: "group changed", kind: "PendingNode", object: `{}`, change: `{spec: {groupID: h}}`, want: "groupID cannot be changed"},
		{name: "goal changed from Join to Leave", kind: "PendingNode", object: `{spec: {providerID: x}}`, change: `{spec: {goal: Leave}}`, want: ""},
		{name: "goal changed from Leave to Join", kind: "PendingNode", object: `{spec: {providerID: x, goal: Leave}}`, change: `{spec: {goal: Join}}`, want: "goal cannot be changed from Leave"},

		{name: "minimal JoiningNode", kind: "JoiningNode", object: `{}`, want: ""},
		{name: "name other than spec.name", kind: "JoiningNode", object: `{metadata: {name: control-plane}}`, want: "a JoiningNode is called as its spec.name"},
		{name: "invalid node name", kind: "JoiningNode", object: `{metadata: {name: worker-1}, spec: {name: "worker 1"}}`, want: "name is not the name of a Node"},
		{name: "components by tag", kind: "JoiningNode", object: `{spec: {componentsreference: v1.35.4}}`, want: "componentsreference is not of the form"},
		{name: "another ticket", kind: "JoiningNode", object: `{}`, change: `{spec: {componentsreference: ` + refB + `, deadline: "2026-11-21T08:00:00Z"}}`, want: ""},
		{name: "role changed", kind: "JoiningNode", object: `{}`, change: `{spec: {iscontrolplane: true}}`, want: "iscontrolplane cannot be changed"},
		{name: "deadline that is not a time", kind: "JoiningNode", object: `{spec: {deadline: soon}}`, want: "spec.deadline"},
	} {
		t.Run(tt.kind+"/"+tt.name, func(t *testing.T) {
			k := kinds[tt.kind]
			o := object(t, tt.kind, tt.object)
			r := c.Resource(schema.GroupVersionResource{Group: "update.edgeless.systems", Version: "v1alpha1", Resource: k.resource})
			_, err := r.Create(t.Context(), o, metav1.CreateOptions{})
			if err == nil {
				t.Cleanup(func() { _ = r.Delete(context.WithoutCancel(t.Context()), o.GetName(), metav1.DeleteOptions{}) })
			}
			if tt.change != "" {
				if err != nil {
					t.Fatalf("create: %v", err)
				}
				patch, jsonErr := yaml.YAMLToJSON([]byte(tt.change))
				if jsonErr != nil {
					t.Fatal(jsonErr)
				}
				_, err = r.Patch(t.Context(), o.GetName(), types.MergePatchType, patch, metav1.PatchOptions{})
			}
			switch {
			case tt.want == "" && err != nil:
				t.Errorf("refused: %v", err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}

	t.Run("defaults", func(t *testing.T) {
		create := func(kind string) *unstructured.Unstructured {
			r := c.Resource(v1alpha1.GroupVersion.WithResource(kinds[kind].resource))
			o, err := r.Create(t.Context(), object(t, kind, "{}"), metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = r.Delete(context.WithoutCancel(t.Context()), o.GetName(), metav1.DeleteOptions{}) })
			return o
		}
		o := create("NodeVersion")
		if n, ok, _ := unstructured.NestedInt64(o.Object, "spec", "rollout", "maxSurge"); !ok || n != 1 {
			t.Errorf("maxSurge is %d, %v; want 1", n, ok)
		}
		spec, _, _ := unstructured.NestedMap(create("ScalingGroup").Object, "spec")
		if spec["strategy"] != "Replace" || spec["min"] != int64(1) || spec["max"] != int64(10) || spec["nodeImage"] != "constellation-version" {
			t.Errorf("defaults of a group: %v", spec)
		}
	})

	t.Run("samples", func(t *testing.T) {
		n := 0
		err := fs.WalkDir(assets.Samples(), ".", func(p string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			b, err := fs.ReadFile(assets.Samples(), p)
			if err != nil {
				return err
			}
			n++
			if err := cp.Apply(t.Context(), b); err != nil {
				t.Errorf("sample %s: %v", p, err)
			}
			return nil
		})
		if err != nil || n != len(kinds) {
			t.Errorf("%d samples, %v; want one of every kind", n, err)
		}
	})
}

// object returns the sample of a kind with override merged over it; null removes.
func object(t *testing.T, kind, override string) *unstructured.Unstructured {
	t.Helper()
	k := kinds[kind]
	var o, over map[string]any
	for doc, into := range map[string]*map[string]any{
		"{apiVersion: update.edgeless.systems/v1alpha1, kind: " + kind + ", metadata: {name: " + k.name + "}, spec: " + k.spec + "}": &o,
		override: &over,
	} {
		if err := yaml.Unmarshal([]byte(doc), into); err != nil {
			t.Fatal(err)
		}
	}
	merge(o, over)
	u := &unstructured.Unstructured{Object: o}
	if b, err := u.MarshalJSON(); err != nil || u.UnmarshalJSON(b) != nil { // numbers as the API has them
		t.Fatal(err)
	}
	return u
}

func merge(into, over map[string]any) {
	for k, v := range over {
		m, ok := v.(map[string]any)
		old, okOld := into[k].(map[string]any)
		switch {
		case v == nil:
			delete(into, k)
		case ok && okOld:
			merge(old, m)
		default:
			into[k] = v
		}
	}
}
