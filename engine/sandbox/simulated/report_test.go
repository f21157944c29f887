package simulated

import (
	"crypto/x509/pkix"
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

func TestCallersOfKubelets(t *testing.T) {
	for _, tt := range []struct {
		who  pkix.Name
		path string
		want bool
	}{
		{who: pkix.Name{CommonName: "kube-apiserver-kubelet-client"}, path: "/containerLogs/a/b/c", want: true},
		{who: pkix.Name{CommonName: "kubernetes-admin", Organization: []string{"kubeadm:cluster-admins"}}, path: "/configz", want: true},
		{who: pkix.Name{CommonName: "kubernetes-super-admin", Organization: []string{"system:masters"}}, path: "/flagz", want: true},
		{who: pkix.Name{CommonName: "kubernetes-admin", Organization: []string{"kubeadm:cluster-admins"}}, path: "/containerLogs/a/b/c", want: false},
		{who: pkix.Name{CommonName: "system:node:worker-0", Organization: []string{"system:nodes"}}, path: "/configz", want: false},
	} {
		if got := mayCall(tt.who, tt.path); got != tt.want {
			t.Errorf("%s may call %s: %t, want %t", tt.who, tt.path, got, tt.want)
		}
	}
}

func TestConfigurationIsFilledIn(t *testing.T) {
	config := map[string]any{
		"authentication": map[string]any{"anonymous": map[string]any{"enabled": true}}, "streamingConnectionIdleTimeout": "0s", "podPidsLimit": 100,
	}
	fillIn(config, filledIn())
	authentication, _ := config["authentication"].(map[string]any)
	anonymous, _ := authentication["anonymous"].(map[string]any)
	if anonymous["enabled"] != true || authentication["x509"] == nil || config["streamingConnectionIdleTimeout"] != "4h0m0s" || config["podPidsLimit"] != 100 || config["seccompDefault"] != false {
		t.Errorf("filled in: %v", config)
	}
}
