package kube

import (
	"strings"
	"testing"
)

func TestSigningDurationIsAddedOnce(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{
			name: "a list of flags",
			in:   "apiServer:\n  extraArgs:\n    - name: profiling\n      value: \"false\"\napiVersion: kubeadm.k8s.io/v1beta4\ncontrollerManager:\n  extraArgs:\n    - name: profiling\n      value: \"false\"\nkind: ClusterConfiguration\n",
			want: "apiServer:\n  extraArgs:\n    - name: profiling\n      value: \"false\"\napiVersion: kubeadm.k8s.io/v1beta4\ncontrollerManager:\n  extraArgs:\n    - name: profiling\n      value: \"false\"\n    - name: cluster-signing-duration\n      value: 336h0m0s\nkind: ClusterConfiguration\n",
		},
		{
			name: "no flags", in: "apiVersion: kubeadm.k8s.io/v1beta4\ncontrollerManager: {}\n",
			want: "apiVersion: kubeadm.k8s.io/v1beta4\ncontrollerManager: {extraArgs: [{name: cluster-signing-duration, value: 336h0m0s}]}\n",
		},
		{
			name: "nothing about the controller manager", in: "apiVersion: kubeadm.k8s.io/v1beta4\n",
			want: "apiVersion: kubeadm.k8s.io/v1beta4\ncontrollerManager:\n  extraArgs:\n    - name: cluster-signing-duration\n      value: 336h0m0s\n",
		},
		{
			name: "a mapping of flags", in: "apiVersion: kubeadm.k8s.io/v1beta3\ncontrollerManager:\n  extraArgs:\n    profiling: \"false\"\n",
			want: "apiVersion: kubeadm.k8s.io/v1beta3\ncontrollerManager:\n  extraArgs:\n    profiling: \"false\"\n    cluster-signing-duration: 336h0m0s\n",
		},
		{name: "a duration of the owner's", in: "apiVersion: kubeadm.k8s.io/v1beta4\ncontrollerManager:\n  extraArgs:\n    - {name: cluster-signing-duration, value: 24h}\n", want: ""},
		{name: "a duration of the owner's in a mapping", in: "apiVersion: kubeadm.k8s.io/v1beta3\ncontrollerManager:\n  extraArgs: {cluster-signing-duration: 24h}\n", want: ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := withSigning(tt.in, "336h0m0s")
			if err != nil || got != tt.want {
				t.Errorf("%v\n%s\nwant\n%s", err, got, tt.want)
			}
			if got == "" {
				return
			}
			if again, err := withSigning(got, "336h0m0s"); err != nil || again != "" {
				t.Errorf("a second time: %v\n%s", err, again)
			}
		})
	}
	for _, bad := range []string{"", "[]", "a: [", "apiVersion: kubeadm.k8s.io/v1beta4\ncontrollerManager: {extraArgs: {a: b}}\n"} {
		if got, err := withSigning(bad, "1h"); err == nil || !strings.Contains(err.Error(), "ClusterConfiguration") {
			t.Errorf("%q: %q, %v", bad, got, err)
		}
	}
}
