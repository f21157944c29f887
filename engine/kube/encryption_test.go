package kube_test

import (
	"errors"
	"testing"

	"constellation/engine/cluster"
	"constellation/engine/kube"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
)

// TestKeyRotationIsPublished writes generations beside the requirements of join-config, each of which keeps the other one.
func TestKeyRotationIsPublished(t *testing.T) {
	kubeconfig, err := controlplanetest.Lend(t, controlplane.Options{}).Kubeconfig()
	if err != nil {
		t.Fatal(err)
	}
	c, err := kube.Connect(kubeconfig, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.PublishJoinConfig(t.Context(), cluster.JoinConfig{Attestation: "{}", TrustRoots: "roots", ClusterID: "ab"}); err != nil {
		t.Fatal(err)
	}
	none, err := c.KeyRotation(t.Context())
	if err != nil || none != (cluster.KeyRotation{}) {
		t.Fatalf("before a rotation: %+v, %v", none, err)
	}
	second := cluster.KeyRotation{Generation: 2, Record: "generation 2 by ops"}
	rewritten := second
	rewritten.Rewritten = 2
	for _, step := range []struct{ old, next cluster.KeyRotation }{{none, second}, {none, second}, {second, rewritten}} { // the second one after a lost answer
		if err := c.PublishKeyRotation(t.Context(), step.old, step.next); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.PublishKeyRotation(t.Context(), second, cluster.KeyRotation{Generation: 3}); !errors.Is(err, cluster.ErrConflict) {
		t.Errorf("in the place of another one: %v", err)
	}
	have, err := c.JoinConfig(t.Context())
	if err != nil || have.Attestation != "{}" || have.ClusterID != "ab" {
		t.Fatalf("join configuration %+v, %v", have, err)
	}
	have.Attestation = `{"x":1}`
	if err := c.PublishJoinConfig(t.Context(), have); err != nil {
		t.Fatal(err)
	}
	if got, err := c.KeyRotation(t.Context()); err != nil || got != rewritten {
		t.Errorf("after a write of the requirements: %+v, %v; want %+v", got, err, rewritten)
	}
	if err := c.SecretsReadable(t.Context()); err != nil {
		t.Error(err)
	}
	// This control plane has no key service.
	if _, key, err := c.APIServerKey(t.Context()); err == nil {
		t.Errorf("its API server encrypts with %s", key)
	}
}
