package kube_test

import (
	"errors"
	"testing"

	"constellation/engine/cluster"
	"constellation/engine/kms"
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
	if err != nil || none != (kms.Rotation{}) {
		t.Fatalf("before a rotation: %+v, %v", none, err)
	}
	second := kms.Rotation{Generation: 2, Record: "generation 2 by ops"}
	rewritten := second
	rewritten.Rewritten = 2
	for _, step := range []struct{ old, next kms.Rotation }{{none, second}, {none, second}, {second, rewritten}} { // the second one after a lost answer
		if err := c.PublishKeyRotation(t.Context(), step.old, step.next); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.PublishKeyRotation(t.Context(), second, kms.Rotation{Generation: 3}); !errors.Is(err, cluster.ErrConflict) {
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
	// This control plane is no node.
	if keys, err := c.APIServerKeys(t.Context()); err != nil || len(keys) > 0 {
		t.Errorf("API servers encrypt with %v, %v", keys, err)
	}
}

func TestEncryptionKeyIsTheNewest(t *testing.T) {
	const name = "apiserver_envelope_encryption_key_id_hash_status_last_timestamp_seconds"
	for _, tt := range []struct{ name, metrics, want string }{
		{name: "none", metrics: "apiserver_request_total{code=\"200\"} 7\n"},
		{
			name: "two keys", want: "sha256:b",
			metrics: "# HELP x\n" + name + `{apiserver_id_hash="sha256:s",key_id_hash="sha256:b",provider_name="p"} 1.7e+09` + "\n" +
				name + `{apiserver_id_hash="sha256:s",key_id_hash="sha256:a",provider_name="p"} 1.6e+09` + "\n",
		},
		{name: "no number", metrics: name + `{key_id_hash="sha256:b"} x` + "\n"},
	} {
		if got := kube.EncryptionKey([]byte(tt.metrics)); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}
