package simulated

import (
	"maps"
	"testing"
)

func TestFlagsOfKubeadm(t *testing.T) {
	got := flagsOf("KUBELET_KUBEADM_ARGS=\"--node-ip=10.42.0.2 --provider-id=sandbox://demo/a --fail-swap-on\"\n")
	want := map[string]string{"node-ip": "10.42.0.2", "provider-id": "sandbox://demo/a", "fail-swap-on": ""}
	if !maps.Equal(got, want) {
		t.Errorf("flags %v, want %v", got, want)
	}
}
