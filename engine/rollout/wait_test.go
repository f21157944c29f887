package rollout

import (
	"strings"
	"testing"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cluster"
	"constellation/engine/plan"
)

func TestMachinesThatAreWaitedForSayHowFarTheyAre(t *testing.T) {
	at := time.Date(2026, 11, 21, 8, 0, 0, 0, time.UTC)
	machine := func(stage, message string, since time.Duration) []cluster.CloudMachine {
		return []cluster.CloudMachine{{
			Instance: cloud.Instance{Name: "worker-1", Group: "sandboxes/demo/groups/workers", Message: message}, GroupName: "workers",
			Stage: stage, Since: at.Add(-since), Console: "/var/demo/worker-1.log",
		}}
	}
	for _, tt := range []struct {
		name     string
		machines []cluster.CloudMachine
		nodes    []*cluster.Node
		expected []cluster.ExpectedNode
		want     string
	}{
		{name: "a machine that was just switched on", machines: machine(plan.NodeBooting, "", time.Second), want: "worker-1 is still booting"},
		{name: "a machine that boots for long", machines: machine(plan.NodeBooting, "", time.Minute), want: "worker-1 is still booting (its console: /var/demo/worker-1.log)"},
		{name: "a machine that has failed", machines: machine(plan.NodeFailed, "no space", time.Second), want: "worker-1 has failed (no space; its console: /var/demo/worker-1.log)"},
		{name: "a machine that is up", machines: machine("", "", time.Hour), want: "worker-1 has not joined yet"},
		{name: "a machine that has its ticket", machines: machine("", "", time.Hour), expected: []cluster.ExpectedNode{{Name: "worker-1"}}, want: "worker-1 is joining"},
		{name: "a node that is not ready", machines: machine("", "", time.Hour), nodes: []*cluster.Node{{Name: "worker-1", State: plan.NodeNotReady, Message: "no network"}}, want: "worker-1 is not ready (no network)"},
		{name: "a machine that does not exist", want: "1 machine of group workers missing yet"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := Join(tt.machines, tt.nodes, tt.expected, map[string]int{"workers": 1})
			if got := r.Pending(at); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

func TestMachinesWithoutHopeNameTheirConsole(t *testing.T) {
	r := Join([]cluster.CloudMachine{{Instance: cloud.Instance{Name: "worker-1", Message: "it did not come up"}, Stage: plan.NodeFailed, Console: "/var/demo/worker-1.log"}}, nil, nil, nil)
	err := r.Hopeless(providers.AdviceFor("sandbox", nil))
	if err == nil || !strings.Contains(err.Error(), "worker-1: it did not come up (its console: /var/demo/worker-1.log)") {
		t.Errorf("got %v", err)
	}
}

func TestControlPlanesCountOnceTheyHaveTheirRole(t *testing.T) {
	control := cluster.CloudMachine{Instance: cloud.Instance{Name: "control-plane-1", Group: "groups/control-plane", Role: cloud.ControlPlane}, GroupName: "control-plane"}
	worker := cluster.CloudMachine{Instance: cloud.Instance{Name: "worker-0", Group: "groups/workers", Role: cloud.Worker}, GroupName: "workers"}
	wanted := map[string]int{"control-plane": 1, "workers": 1}
	for _, tt := range []struct {
		name, role string
		ready      int64
		complete   bool
		pending    string
	}{
		{name: "a Ready node without the role label is pending", role: "worker", ready: 1, pending: "control-plane-1 is not ready (kubeadm has not labelled it as a control plane yet)"},
		{name: "a Ready node with the role label is complete", role: "control-plane", ready: 2, complete: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := Join([]cluster.CloudMachine{control, worker}, []*cluster.Node{
				{Name: "control-plane-1", Role: tt.role, State: plan.NodeReady}, {Name: "worker-0", Role: "worker", State: plan.NodeReady},
			}, nil, wanted)
			_, ready, _ := r.Counts()
			if got := r.Complete(); got != tt.complete || ready != tt.ready {
				t.Errorf("complete %t with %d ready, want %t with %d", got, ready, tt.complete, tt.ready)
			}
			if got := r.Pending(time.Now()); got != tt.pending {
				t.Errorf("got  %s\nwant %s", got, tt.pending)
			}
		})
	}
}
