package engine

import (
	"strings"
	"testing"

	"constellation/engine/cluster"
	"constellation/engine/version"
)

func TestMembersLack(t *testing.T) {
	nodes := []*cluster.Node{{Name: "a", Role: cluster.ControlPlaneRole}, {Name: "b", Role: cluster.ControlPlaneRole}, {Name: "w", Role: "worker"}}
	for name, tt := range map[string]struct {
		members []cluster.EtcdMember
		want    string
	}{
		"nothing":               {[]cluster.EtcdMember{{Node: "a", Version: "3.7.0", Storage: "3.7.0"}, {Node: "b", Version: "3.7.1", Storage: "3.7.0"}}, ""},
		"an unknown format":     {[]cluster.EtcdMember{{Node: "a", Version: "3.7.0"}, {Node: "b", Version: "3.7.0"}}, ""},
		"a member that is old":  {[]cluster.EtcdMember{{Node: "a", Version: "3.7.0"}, {Node: "b", Version: "3.6.11"}}, "b runs etcd 3.6.11, want v3.7.0"},
		"a format that is old":  {[]cluster.EtcdMember{{Node: "a", Version: "3.7.0", Storage: "3.6.0"}, {Node: "b", Version: "3.7.0"}}, "the data of a has the format of etcd 3.6.0, want v3.7"},
		"a member not reported": {[]cluster.EtcdMember{{Node: "a", Version: "3.7.0"}}, "the member of b is not reported"},
		"a member without node": {[]cluster.EtcdMember{{Node: "a", Version: "3.7.0"}, {Node: "b", Version: "3.7.0"}, {Node: "c", Version: "3.7.0"}}, "c is a member without a node"},
	} {
		if got := missing(tt.members, nodes, version.MustParse("v3.7.0")); got != tt.want || strings.Contains(got, "w ") && name == "nothing" {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}
