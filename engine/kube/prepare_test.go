package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/component"
	"constellation/engine/plan"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/engine/version"
	"constellation/engine/workspace"
	"constellation/operator/api/v1alpha1"
)

// preparedCloud has two images that differ, and components of every Kubernetes version.
type preparedCloud struct{ pretendedCloud }

func (preparedCloud) Images(context.Context) ([]cloud.Image, error) {
	image := func(v, pcr string) cloud.Image {
		return cloud.Image{Reference: "sandboxes/demo/images/" + v, Version: v, Measurements: map[uint32]string{4: strings.Repeat(pcr, 32)}}
	}
	return []cloud.Image{image("v1.0.0", "0a"), image("v1.1.0", "0b")}, nil
}

func (preparedCloud) Components(_ context.Context, v version.Version) (component.Signed, error) {
	var l component.List
	for _, name := range []string{"kubeadm", "kubelet", "kubectl"} {
		l = append(l, component.Component{Name: name, URL: "http://10.42.0.1:8080/" + v.String() + "/" + name, Digest: "sha256:" + strings.Repeat("ab", 32), Path: "/usr/local/bin/" + name, Mode: 0o755})
	}
	return component.Signed{List: l, Statement: "statement over " + l.Digest()}, nil
}

func (preparedCloud) Groups(context.Context) ([]cloud.Group, error) {
	return []cloud.Group{{ID: "sandboxes/demo/groups/workers", Image: "sandboxes/demo/images/v1.0.0"}}, nil
}

func (preparedCloud) Machines(context.Context) ([]cluster.CloudMachine, error) { return nil, nil }

// `upgrade prepare` runs against a real API server: interrupted after its first step, then
// twice concurrently from two workspaces, then once more. The API server accepts the printed
// patches.
func TestPrepareOnARealAPIServer(t *testing.T) {
	cp := controlplanetest.Lend(t, controlplane.Options{APIServerArgs: []string{"--disable-admission-plugins=ServiceAccount"}})
	c, err := ForConfig(cp.Config(), nil)
	if err != nil {
		t.Fatal(err)
	}
	first := populate(t, cp, c, "v1.1.0")
	w := world{t, c}
	for name, role := range map[string]string{"control-plane-0": "control-plane", "worker-0": "worker", "worker-1": "worker"} {
		w.PutNode(cluster.Node{Name: name, Role: role, State: plan.NodeReady, Kubernetes: build.DefaultVersion, IP: "10.0.0.1"})
	}
	second := t.TempDir()
	for _, name := range []string{workspace.ConfigFile, workspace.StateFile, workspace.KubeconfigFile} {
		b, err := os.ReadFile(first.Path(name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(second, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	request := engine.PrepareRequest{
		Request:     check.Request{Release: version.MustParse("v1.1.0"), Kubernetes: version.MustParse(build.DefaultVersion), NoPreflight: true},
		Acknowledge: []string{"oldest-supports-kubernetes"},
	}
	// prepare runs once and calls see with every event. It returns the result.
	prepare := func(ctx context.Context, dir string, see func(plan.Event)) (plan.Result, error) {
		ws, err := workspace.OpenWorkspace(dir)
		if err != nil {
			return plan.Result{}, err
		}
		e := engine.New(ws, engine.Deps{
			Connect: func(context.Context, []byte) (engine.Cluster, error) { return c, nil },
			Inspect: func(context.Context, []byte) (check.Inspector, error) { return c, nil },
			Provider: func(context.Context, *workspace.Config, *workspace.State) (engine.Cloud, error) {
				return preparedCloud{}, nil
			},
		})
		p, err := e.PlanPrepare(ctx, request, func(plan.Event) {})
		if err != nil {
			return plan.Result{}, err
		}
		var r plan.Result
		err = e.Run(ctx, p, func(ev plan.Event) {
			see(ev)
			if ev.Kind == plan.KindResult {
				if err := json.Unmarshal(ev.Data, &r); err != nil {
					t.Error(err)
				}
			}
		})
		return r, err
	}
	read := func() cluster.JoinConfig {
		t.Helper()
		j, err := c.JoinConfig(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return j
	}
	before := read()
	if before.Generations != nil {
		t.Fatalf("before: %+v", before)
	}

	ctx, cancel := context.WithCancel(t.Context())
	r, err := prepare(ctx, first.Dir(), func(ev plan.Event) {
		if ev.Kind == plan.KindStep && ev.Step == engine.StepComponents && ev.State == plan.StateDone {
			cancel()
		}
	})
	if plan.ExitCode(err) != plan.ExitStopped || r.Patch != nil {
		t.Fatalf("interrupted: %v, patch %s", err, r.Patch)
	}
	if d := cmp.Diff(before, read()); d != "" {
		t.Errorf("interrupted: join-config (-want +got):\n%s", d)
	}

	list, err := preparedCloud{}.Components(t.Context(), version.MustParse(build.DefaultVersion))
	if err != nil {
		t.Fatal(err)
	}
	name := cluster.ComponentsName(list.List)
	m, err := c.core.CoreV1().ConfigMaps(systemNamespace).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	m.Data[keyVersion] = build.NextVersion
	if _, err := c.core.CoreV1().ConfigMaps(systemNamespace).Update(t.Context(), m, metav1.UpdateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("the components could be changed: %v", err)
	}

	results, errs := make([]plan.Result, 2), make([]error, 2)
	done := make(chan int)
	for i, dir := range []string{first.Dir(), second} {
		go func() {
			results[i], errs[i] = prepare(t.Context(), dir, func(plan.Event) {})
			done <- i
		}()
	}
	<-done
	<-done
	for i, err := range errs {
		// The second console may find everything done except its own file.
		if err != nil {
			t.Errorf("console %d: %v (remedy %q)", i, err, plan.Remedy(err))
		}
	}
	if d := cmp.Diff(results[0].Patch, results[1].Patch); d != "" || results[0].Patch == nil {
		t.Errorf("patches (-first +second):\n%s", d)
	}
	demand := func(pcr string) string {
		return fmt.Sprintf(`{"variant":"tpm2","measurements":{"4":{"expected":"%s","warnOnly":false}}}`, strings.Repeat(pcr, 32))
	}
	want := before
	want.Attestation, want.Generations = demand("0b"), map[string]string{"v1.0.0": demand("0a"), "v1.1.0": demand("0b")}
	got := read()
	want.Revision = got.Revision
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("join-config (-want +got):\n%s", d)
	}

	if _, err := prepare(t.Context(), first.Dir(), func(plan.Event) {}); plan.ExitCode(err) != plan.ExitNothing {
		t.Errorf("once more: %v", err)
	}
	if d := cmp.Diff(got, read()); d != "" {
		t.Errorf("once more: join-config (-want +got):\n%s", d)
	}

	if _, err := c.dynamic.Resource(nodeVersions).Patch(t.Context(), v1alpha1.NodeVersionName, types.MergePatchType, results[0].Patch, metav1.PatchOptions{FieldManager: "kubectl-patch"}); err != nil {
		t.Fatalf("patch %s: %v", results[0].Patch, err)
	}
	target, err := c.NodeTarget(t.Context())
	if d := cmp.Diff(cluster.NodeTarget{Image: "sandboxes/demo/images/v1.1.0", ImageVersion: "v1.1.0", Components: name, Kubernetes: build.DefaultVersion, MaxSurge: "1"}, target); d != "" || err != nil {
		t.Errorf("target (-want +got):\n%s%v", d, err)
	}
	if _, err := prepare(t.Context(), first.Dir(), func(plan.Event) {}); plan.ExitCode(err) != plan.ExitNothing || !strings.Contains(err.Error(), "the target of all nodes is") {
		t.Errorf("after the target was set: %v", err)
	}
}
