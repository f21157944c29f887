package kubeadm

import (
	"errors"
	"testing"
)

func TestEtcdTag(t *testing.T) {
	for config, want := range map[string]string{
		"etcd:\n  local:\n    dataDir: /var/lib/etcd\n":                "",
		"etcd:\n  local:\n    imageTag: 3.6.11-0\n":                    "3.6.11-0",
		"kind: ClusterConfiguration\n":                                 "",
		"etcd:\n  local:\n    imageTag: \"3.6.11-0\" # before v1.37\n": "3.6.11-0",
	} {
		if got, err := EtcdTag(config); err != nil || got != want {
			t.Errorf("%q: %q, %v, want %q", config, got, err, want)
		}
	}
	if _, err := EtcdTag("etcd:\n  external:\n    endpoints: [https://10.0.0.1:2379]\n"); !errors.Is(err, ErrExternalEtcd) {
		t.Errorf("an external etcd: %v", err)
	}
	if _, err := EtcdTag("etcd: ["); err == nil {
		t.Error("a broken configuration was read")
	}
}
