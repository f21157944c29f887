package decision

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"constellation/operator/api/v1alpha1"
)

// A dead member of an earlier machine may stand beside the living one of the same name. The status
// names the living one, in whatever order etcd lists them.
func TestStatusHasOneMemberPerName(t *testing.T) {
	dead := Member{Node: "control-plane-0", Version: "3.6.8", Storage: "3.6.0"}
	alive := Member{Node: "control-plane-0", Version: "3.7.0", Storage: "3.7.0", Healthy: true}
	other := Member{Node: "a", Version: "3.7.0", Healthy: true}
	starts := Member{Node: "https://10.0.0.9:2380", NotStarted: true}
	want := []v1alpha1.EtcdMember{{Node: "a", Version: "3.7.0"}, {Node: "control-plane-0", Version: "3.7.0", StorageVersion: "3.7.0"}}
	for name, members := range map[string][]Member{
		"the dead one first":   {dead, alive, other, starts},
		"the living one first": {starts, alive, dead, other},
	} {
		if d := cmp.Diff(want, etcdMembers(members)); d != "" {
			t.Errorf("%s: members, want and got:\n%s", name, d)
		}
	}
	if got := etcdMembers([]Member{dead}); len(got) != 1 || got[0].Version != "3.6.8" {
		t.Errorf("an unhealthy member alone: %+v", got)
	}
}

// While versions or formats differ, members are listed again soon: the console waits for them.
func TestEtcdMoves(t *testing.T) {
	m := func(version, storage string) Member { return Member{Version: version, Storage: storage} }
	for _, tt := range []struct {
		name    string
		members []Member
		want    bool
	}{
		{name: "no member", want: false},
		{name: "one version", members: []Member{m("3.7.0", "3.7.0"), m("3.7.0", "3.7.0")}, want: false},
		{name: "a format that is not reported", members: []Member{m("3.6.11", ""), m("3.6.11", "")}, want: false},
		{name: "the format of the minor before", members: []Member{m("3.7.0", "3.6.0"), m("3.7.0", "3.7.0")}, want: true},
		{name: "the format of a later patch", members: []Member{m("3.6.11", "3.6.0")}, want: false},
		{name: "two versions", members: []Member{m("3.6.11", "3.6.0"), m("3.7.0", "3.7.0")}, want: true},
		{name: "a member that has not answered yet", members: []Member{m("", ""), m("3.7.0", "3.7.0")}, want: false},
	} {
		if got := EtcdMoves(tt.members); got != tt.want {
			t.Errorf("%s: %t, want %t", tt.name, got, tt.want)
		}
	}
}
