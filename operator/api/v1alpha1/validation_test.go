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
		"nodeversions", "constellation-version",
		"{image: i, imageVersion: v1.0.0, kubernetesClusterVersion: v1.35.4, kubernetesComponentsReference: " + refA + "}",
	},
	"ScalingGroup":        {"scalinggroups", "workers", "{groupId: sandboxes/t/groups/workers, role: Worker}"},
	"AutoscalingStrategy": {"autoscalingstrategies", "autoscalingstrategy", "{enabled: true, deploymentName: ca, deploymentNamespace: kube-system}"},
	"PendingNode":         {"pendingnodes", "p", "{groupID: g, goal: Join, token: t}"},
	"JoiningNode":         {"joiningnodes", "worker-1", "{name: worker-1, componentsreference: " + refA + ", iscontrolplane: false}"},
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
		{"minimal NodeVersion", "NodeVersion", `{}`, "", ""},
		{"another name", "NodeVersion", `{metadata: {name: constellation-os}}`, "", "the only NodeVersion of a cluster is called constellation-version"},
		{"no image", "NodeVersion", `{spec: {image: null}}`, "", "spec.image: Required value"},
		{"empty image", "NodeVersion", `{spec: {image: ""}}`, "", "spec.image"},
		{"Kubernetes version without v", "NodeVersion", `{spec: {kubernetesClusterVersion: "1.35.4"}}`, "", "kubernetesClusterVersion is not a full version such as v1.35.4"},
		{"Kubernetes version without patch", "NodeVersion", `{spec: {kubernetesClusterVersion: v1.35}}`, "", "kubernetesClusterVersion is not a full version"},
		{"Kubernetes version with leading zero", "NodeVersion", `{spec: {kubernetesClusterVersion: v1.035.4}}`, "", "kubernetesClusterVersion is not a full version"},
		{"Kubernetes pre-release", "NodeVersion", `{spec: {kubernetesClusterVersion: v1.36.0-rc.1}}`, "", ""},
		{"image version that is not a version", "NodeVersion", `{spec: {imageVersion: latest}}`, "", "imageVersion is not a full version such as v1.1.0"},
		{"components with a short digest", "NodeVersion", `{spec: {kubernetesComponentsReference: k8s-components-sha256-abc}}`, "", "kubernetesComponentsReference is not of the form"},
		{"surge as number", "NodeVersion", `{spec: {rollout: {maxSurge: 3}}}`, "", ""},
		{"surge as percentage", "NodeVersion", `{spec: {rollout: {maxSurge: "100%"}}}`, "", ""},
		{"surge of zero", "NodeVersion", `{spec: {rollout: {maxSurge: 0}}}`, "", "maxSurge is neither a number of at least 1 nor a percentage"},
		{"negative surge", "NodeVersion", `{spec: {rollout: {maxSurge: -1}}}`, "", "maxSurge is neither"},
		{"surge of zero percent", "NodeVersion", `{spec: {rollout: {maxSurge: "0%"}}}`, "", "maxSurge is neither"},
		{"surge above everything", "NodeVersion", `{spec: {rollout: {maxSurge: "101%"}}}`, "", "maxSurge is neither"},
		{"surge as a word", "NodeVersion", `{spec: {rollout: {maxSurge: all}}}`, "", "maxSurge is neither"},
		{"surge as a number in quotes", "NodeVersion", `{spec: {rollout: {maxSurge: "3"}}}`, "", "maxSurge is neither"},
		{"whole target in one write", "NodeVersion", `{}`, `{spec: {image: j, imageVersion: v1.1.0, kubernetesClusterVersion: v1.36.3, kubernetesComponentsReference: ` + refB + `}}`, ""},
		{"Kubernetes alone", "NodeVersion", `{}`, `{spec: {kubernetesClusterVersion: v1.36.3}}`, "kubernetesClusterVersion changed alone: set kubernetesComponentsReference"},
		{"image version alone", "NodeVersion", `{}`, `{spec: {imageVersion: v1.1.0}}`, "imageVersion changed alone: set image"},
		{"components alone", "NodeVersion", `{}`, `{spec: {kubernetesComponentsReference: ` + refB + `}}`, ""},

		{"minimal group", "ScalingGroup", `{}`, "", ""},
		{"min above max", "ScalingGroup", `{spec: {min: 5, max: 4}}`, "", "min is greater than max"},
		{"min equal to max", "ScalingGroup", `{spec: {min: 4, max: 4}}`, "", ""},
		{"negative min", "ScalingGroup", `{spec: {min: -1}}`, "", "spec.min"},
		{"unknown role", "ScalingGroup", `{spec: {role: Master}}`, "", `supported values: "ControlPlane", "Worker"`},
		{"no role", "ScalingGroup", `{spec: {role: null}}`, "", "spec.role: Required value"},
		{"unknown strategy", "ScalingGroup", `{spec: {strategy: Recreate}}`, "", `supported values: "Replace", "InPlace"`},
		{"autoscaled control planes", "ScalingGroup", `{spec: {role: ControlPlane, autoscaling: true}}`, "", "only groups of workers can be autoscaled"},
		{"autoscaled workers", "ScalingGroup", `{spec: {autoscaling: true}}`, "", ""},
		{"changed group", "ScalingGroup", `{}`, `{spec: {groupId: other}}`, "groupId cannot be changed"},
		{"changed role", "ScalingGroup", `{}`, `{spec: {role: ControlPlane}}`, "role cannot be changed"},
		{"changed bounds", "ScalingGroup", `{}`, `{spec: {min: 2, max: 20}}`, ""},

		{"minimal strategy", "AutoscalingStrategy", `{}`, "", ""},
		{"another name", "AutoscalingStrategy", `{metadata: {name: mine}}`, "", "the only AutoscalingStrategy of a cluster is called autoscalingstrategy"},
		{"no Deployment", "AutoscalingStrategy", `{spec: {deploymentName: ""}}`, "", "deploymentName is not the name of a Deployment"},
		{"bad namespace", "AutoscalingStrategy", `{spec: {deploymentNamespace: Kube_System}}`, "", "deploymentNamespace is not the name of a namespace"},

		{"minimal PendingNode", "PendingNode", `{}`, "", ""},
		{"unknown goal", "PendingNode", `{spec: {goal: Stay}}`, "", `supported values: "Join", "Leave", "Upgrade"`},
		{"minimal upgrade", "PendingNode", `{spec: {goal: Upgrade, token: null, providerID: x, nodeName: node-1}}`, "", ""},
		{"upgrade without a node name", "PendingNode", `{spec: {goal: Upgrade, token: null, providerID: x}}`, "", "it needs a providerID and a nodeName, and no token"},
		{"upgrade with a token", "PendingNode", `{spec: {goal: Upgrade, providerID: x, nodeName: node-1}}`, "", "it needs a providerID and a nodeName, and no token"},
		{"goal changed from Upgrade to Leave", "PendingNode", `{spec: {goal: Upgrade, token: null, providerID: x, nodeName: node-1}}`, `{spec: {goal: Leave}}`, "goal can only be changed from Join to Leave"},
		{"goal changed from Join to Upgrade", "PendingNode", `{spec: {providerID: x, nodeName: node-1, token: null}}`, `{spec: {goal: Upgrade}}`, "goal can only be changed from Join to Leave"},
		{"joining without token or machine", "PendingNode", `{spec: {token: null}}`, "", "a machine that joins needs a token until its providerID is known"},
		{"leaving without machine", "PendingNode", `{spec: {goal: Leave}}`, "", "a machine that leaves needs a providerID"},
		{"providerID and node name set later", "PendingNode", `{}`, `{spec: {providerID: x, nodeName: node-1}}`, ""},
		{"providerID changed", "PendingNode", `{spec: {providerID: x}}`, `{spec: {providerID: other}}`, "providerID cannot be changed once it is set"},
		{"providerID removed", "PendingNode", `{spec: {providerID: x}}`, `{spec: {providerID: null}}`, "providerID cannot be changed once it is set"},
		{"node name changed", "PendingNode", `{spec: {nodeName: x}}`, `{spec: {nodeName: other}}`, "nodeName cannot be changed once it is set"},
		{"token changed", "PendingNode", `{}`, `{spec: {token: u}}`, "token cannot be changed"},
		{"token removed", "PendingNode", `{spec: {providerID: x}}`, `{spec: {token: null}}`, "token cannot be changed"},
		{"token added", "PendingNode", `{spec: {providerID: x, token: null}}`, `{spec: {token: u}}`, "token cannot be changed"},
		{"group changed", "PendingNode", `{}`, `{spec: {groupID: h}}`, "groupID cannot be changed"},
		{"goal changed from Join to Leave", "PendingNode", `{spec: {providerID: x}}`, `{spec: {goal: Leave}}`, ""},
		{"goal changed from Leave to Join", "PendingNode", `{spec: {providerID: x, goal: Leave}}`, `{spec: {goal: Join}}`, "goal cannot be changed from Leave"},

		{"minimal JoiningNode", "JoiningNode", `{}`, "", ""},
		{"name other than spec.name", "JoiningNode", `{metadata: {name: control-plane}}`, "", "a JoiningNode is called as its spec.name"},
		{"invalid node name", "JoiningNode", `{metadata: {name: worker-1}, spec: {name: "worker 1"}}`, "", "name is not the name of a Node"},
		{"components by tag", "JoiningNode", `{spec: {componentsreference: v1.35.4}}`, "", "componentsreference is not of the form"},
		{"another ticket", "JoiningNode", `{}`, `{spec: {componentsreference: ` + refB + `, deadline: "2026-11-21T08:00:00Z"}}`, ""},
		{"role changed", "JoiningNode", `{}`, `{spec: {iscontrolplane: true}}`, "iscontrolplane cannot be changed"},
		{"deadline that is not a time", "JoiningNode", `{spec: {deadline: soon}}`, "", "spec.deadline"},
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
