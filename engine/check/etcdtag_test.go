package check

import (
	"testing"

	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
)

// The tag that a hop of etcd has set stays until Kubernetes itself brings that etcd or a newer one.
func TestEtcdTagStaysUntilKubernetesBringsIt(t *testing.T) {
	known := release.Summary{Version: version.MustParse("v1.1.0")}
	for v, etcd := range map[string]string{"v1.36.4": "3.6.8-0", "v1.36.5": "3.6.12-0", "v1.37.2": "3.7.0-0"} {
		known.Kubernetes = append(known.Kubernetes, release.KubernetesSummary{Version: version.MustParse(v), Etcd: etcd})
	}
	for _, tt := range []struct{ name, kubernetes, want string }{
		{name: "an older etcd", kubernetes: "v1.36.4", want: "3.6.11-0"},
		{name: "a patch that the release does not list", kubernetes: "v1.36.3", want: "3.6.11-0"},
		{name: "a newer patch of etcd", kubernetes: "v1.36.5", want: ""},
		{name: "a newer minor of etcd", kubernetes: "v1.37.2", want: ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &Run{
				Now:      compat.Running{Target: cluster.NodeTarget{Etcd: "3.6.11-0"}},
				Hop:      &compat.Hop{To: plan.Target{Release: "v1.1.0", Image: "v1.1.0", Kubernetes: tt.kubernetes}},
				Releases: []release.Summary{known},
			}
			if got := c.EtcdTag(); got != tt.want {
				t.Errorf("tag %q, want %q", got, tt.want)
			}
		})
	}
}
