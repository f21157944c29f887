package kube

import (
	"strings"
	"testing"
)

func TestImageRepositoryAloneIsReplaced(t *testing.T) {
	const before = "apiVersion: kubeadm.k8s.io/v1beta4\ndns: {imageRepository: other.example.com}\nimageRepository: registry.k8s.io\nkind: ClusterConfiguration\n"
	got, err := withImageRepository(before, "registry.example.com:5000/mirror/kubernetes")
	if want := strings.Replace(before, ": registry.k8s.io", ": registry.example.com:5000/mirror/kubernetes", 1); err != nil || got != want {
		t.Errorf("%v\n%s\nwant\n%s", err, got, want)
	}
	got, err = withImageRepository("kind: ClusterConfiguration", "registry.example.com/kubernetes")
	if want := "kind: ClusterConfiguration\nimageRepository: registry.example.com/kubernetes\n"; err != nil || got != want {
		t.Errorf("without the field: %v\n%s\nwant\n%s", err, got, want)
	}
	for _, bad := range []string{"{a: b}", "a: ["} {
		if got, err := withImageRepository(bad, "registry.example.com/kubernetes"); err == nil {
			t.Errorf("%q became %q", bad, got)
		}
	}
}
