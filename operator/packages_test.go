package operator

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"

	"constellation/agent/upgradeproto"
	"constellation/engine/cloud/machines"
	"constellation/engine/component"
	"constellation/operator/decision"
)

// packagesAgent is an agent that records requests and refuses them.
type packagesAgent struct {
	upgradeproto.AgentClient
	knows    bool
	requests []*upgradeproto.UpgradeRequest
}

func (a *packagesAgent) Status(context.Context, *upgradeproto.StatusRequest, ...grpc.CallOption) (*upgradeproto.StatusResponse, error) {
	return &upgradeproto.StatusResponse{AgentVersion: "v1.1.0", UpgradesPackages: a.knows, VerifiesComponents: true}, nil
}

func (a *packagesAgent) Upgrade(_ context.Context, req *upgradeproto.UpgradeRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[upgradeproto.UpgradeResponse], error) {
	a.requests = append(a.requests, req)
	return nil, status.Error(codes.FailedPrecondition, "not now")
}

func TestPackagesAreRequested(t *testing.T) {
	for _, tt := range []struct {
		name      string
		list      func(context.Context) (bool, error)
		old, kept bool // the agent does not know packages, the kubelet is kept
		want      bool
		told      string
		err       string
	}{
		{name: "machines with images"},
		{name: "held", list: func(context.Context) (bool, error) { return false, nil }},
		{name: "upgrade", list: func(context.Context) (bool, error) { return true, nil }, want: true},
		{name: "a control plane that takes pods", list: func(context.Context) (bool, error) { return true, nil }, kept: true},
		{name: "an agent of an older release", list: func(context.Context) (bool, error) { return true, nil }, old: true, told: "the agent of node-1 is of release v1.1.0 and does not upgrade packages"},
		{name: "a list that cannot be read", list: func(context.Context) (bool, error) { return false, errors.New("no answer") }, err: "read whether the packages of node-1 are upgraded: no answer"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := &packagesAgent{knows: !tt.old}
			h := &agentHost{node: "node-1", agent: a, what: upgradeproto.What_NODE, packages: tt.list}
			if tt.kept {
				h.what = upgradeproto.What_APPLY
			}
			var told []string
			err := h.Upgrade(t.Context(), "t1", newKubernetes, refB, component.Signed{}, tt.kept, func(run decision.UpgradeRun) {
				if run.PackagesKept != "" {
					told = append(told, run.PackagesKept)
				}
			})
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) || len(a.requests) > 0 {
					t.Errorf("%v, %d requests, want %q and none", err, len(a.requests), tt.err)
				}
				return
			}
			if len(a.requests) != 1 || a.requests[0].UpgradePackages != tt.want || a.requests[0].KeepKubelet != tt.kept {
				t.Errorf("requests %v, %v", a.requests, err)
			}
			if is := strings.Join(told, "\n"); (is == "") != (tt.told == "") || !strings.HasPrefix(is, tt.told) || len(told) > 1 {
				t.Errorf("told %q, want %q", told, tt.told)
			}
		})
	}
}

// The operator takes the switch from the list of machines of the cluster, and other clouds have none.
func TestPackagesFollowTheListOfMachines(t *testing.T) {
	if ask := upgradesPackages(&cloudInTest{}); ask != nil {
		t.Error("machines with images have packages upgraded")
	}
	if ask := upgradesPackages(machines.NewControl("/nonexistent")); ask == nil {
		t.Error("the list of machines is not asked")
	}
}

// keepingAgents are agents that leave packages as they are.
type keepingAgents struct{ tokenAgents }

func (a *keepingAgents) Upgrade(_ context.Context, node, _, _, _ string, _ component.Signed, tell func(decision.UpgradeRun)) error {
	tell(decision.UpgradeRun{Node: node, PackagesKept: "the agent is old"})
	return nil
}

func TestNodeReportsThatItsPackagesWereKept(t *testing.T) {
	c := newCluster(t)
	c.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: refB}, Data: map[string]string{"cluster-version": newKubernetes, "components": "[]"}})
	counters, err := newCounters()
	if err != nil {
		t.Fatal(err)
	}
	recorder := events.NewFakeRecorder(10)
	r := &nodeVersions{client: c.admin, live: c.admin, agents: &keepingAgents{}, counters: counters, events: recorder, log: slog.New(slog.DiscardHandler), spawn: func(do func(context.Context)) { do(t.Context()) }}
	r.init()
	r.runs.keep(map[string]bool{"id": true})
	o := &observed{nodes: map[string]*corev1.Node{"node-1": {ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}}}
	r.upgradeNode(o, decision.Action{Kind: decision.UpgradeNode, Node: "node-1", Machine: "id", Version: newKubernetes, Components: refB})
	var all []string
	for len(recorder.Events) > 0 {
		all = append(all, <-recorder.Events)
	}
	if is := strings.Join(all, "\n"); !strings.Contains(is, "Warning PackagesKept the agent is old") {
		t.Errorf("events\n%s", is)
	}
}
