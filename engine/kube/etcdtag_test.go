package kube

import (
	"errors"
	"strings"
	"testing"

	"constellation/engine/kubeadm"
)

// The tag is one line. All others stay as they were written, comments and order included.
func TestEtcdTagChangesOneLine(t *testing.T) {
	const before = "# ours\napiServer: {}\nkind: ClusterConfiguration\netcd:\n  # on a disk of its own\n  local:\n    dataDir: /var/lib/etcd # fast\n    extraArgs:\n    - {name: quota-backend-bytes, value: \"8589934592\"}\nproxy: {}\n"
	with, err := withEtcdTag(before, "3.6.11-0")
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Replace(before, "    dataDir", "    imageTag: 3.6.11-0\n    dataDir", 1); with != want {
		t.Errorf("set:\n%s\nwant\n%s", with, want)
	}
	if tag, err := kubeadm.EtcdTag(with); err != nil || tag != "3.6.11-0" {
		t.Errorf("read back %q, %v", tag, err)
	}
	other, err := withEtcdTag(with, "3.6.12-0")
	if want := strings.Replace(with, "3.6.11-0", "3.6.12-0", 1); err != nil || other != want {
		t.Errorf("replaced: %v\n%s", err, other)
	}
	if without, err := withEtcdTag(with, ""); err != nil || without != before {
		t.Errorf("removed: %v\n%s", err, without)
	}
}

func TestEtcdTagNeedsALocalEtcd(t *testing.T) {
	if _, err := kubeadm.EtcdTag("etcd:\n  external:\n    endpoints: [https://10.0.0.1:2379]\n"); !errors.Is(err, kubeadm.ErrExternalEtcd) {
		t.Errorf("an external etcd: %v", err)
	}
	for _, bad := range []string{"", "etcd: {}\n", "etcd: {local: {dataDir: /var/lib/etcd}}\n", "etcd:\n  local: {}\n", "a: ["} {
		if got, err := withEtcdTag(bad, "3.6.11-0"); err == nil {
			t.Errorf("%q becomes %q", bad, got)
		}
	}
}
