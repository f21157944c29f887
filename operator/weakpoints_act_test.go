package operator

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/component"
	"constellation/engine/sandbox/hollow"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

// Weak points of other systems that replace machines, continued: effects that are refused, even if
// they were decided. The tests of decisions are in package decision under the same names.

// cloudOfCalls records requests, and fails if the test requires it.
type cloudOfCalls struct {
	cloudAPI
	mu    sync.Mutex
	calls []string
	err   error
}

func (c *cloudOfCalls) note(what string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, what)
	return c.err
}

func (c *cloudOfCalls) CreateInstances(_ context.Context, group string, tokens []string) ([]cloud.Instance, error) {
	return nil, c.note(fmt.Sprint("create ", tokens, " in ", group))
}

func (c *cloudOfCalls) DeleteInstances(_ context.Context, ids []string) error {
	return c.note(fmt.Sprint("delete ", ids))
}

// hostOfCalls does the same for a host.
type hostOfCalls struct {
	host
	calls []string
	run   decision.UpgradeRun
}

func (h *hostOfCalls) RemoveMember(_ context.Context, node, _ string, voters int) error {
	h.calls = append(h.calls, fmt.Sprintf("remove %s leaving %d", node, voters))
	return nil
}

func (h *hostOfCalls) Run(context.Context) (decision.UpgradeRun, error) { return h.run, nil }

func (h *hostOfCalls) Upgrade(_ context.Context, _, version, reference string, _ component.Signed, keepKubelet bool, _ func(decision.UpgradeRun)) error {
	call := "upgrade to " + version + " with " + reference
	if keepKubelet {
		call += " without the kubelet"
	}
	h.calls = append(h.calls, call)
	return nil
}

// idle are drains that do nothing.
type idle struct{}

func (idle) drain(string)                {}
func (idle) state(string) (bool, string) { return false, "" }
func (idle) keep(map[string]bool)        {}

// componentsServer is an API server that has only components.
type componentsServer struct{ client.Client }

func (componentsServer) Get(_ context.Context, _ client.ObjectKey, o client.Object, _ ...client.GetOption) error {
	if m, ok := o.(*corev1.ConfigMap); ok {
		m.Data = map[string]string{"cluster-version": "v1.36.3", "components": "[]"}
	}
	return nil
}

// actor acts on a cloud and a host; what it begins is done when act returns.
func actor(t *testing.T, c cloudAPI, h host) *nodeVersions {
	t.Helper()
	counters, err := newCounters()
	if err != nil {
		t.Fatal(err)
	}
	r := &nodeVersions{
		fleet: newFleet(c, time.Now), drains: idle{}, counters: counters, log: slog.New(slog.DiscardHandler), events: events.NewFakeRecorder(100),
		client: componentsServer{}, live: componentsServer{}, spawn: func(do func(context.Context)) { do(t.Context()) },
	}
	if h != nil {
		r.host = h
	}
	r.init()
	return r
}

func pendingNode(goal v1alpha1.Goal, token, machine string) *v1alpha1.PendingNode {
	return &v1alpha1.PendingNode{
		ObjectMeta: metav1.ObjectMeta{Name: "replace-0"}, Spec: v1alpha1.PendingNodeSpec{Goal: goal, Token: token, ProviderID: machine, GroupID: workerGroup, Donor: "worker-0"},
	}
}

// The old order: read the size of the group, write it plus one. One of two concurrent writes is lost,
// and a write that is retried after a timeout adds two machines.
func TestWeakPointR4NoSizeIsWritten(t *testing.T) {
	h, wait, err := hollow.Start(t.Context(), hollow.Options{Cluster: &rest.Config{Host: "https://127.0.0.1:1"}, Images: []string{"v1.0.0"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(wait)
	// Half of the requests succeed but return a timeout.
	if err := sandboxapi.NewClient(h.Host, "").SetFaults(t.Context(), []string{"create-timeout=0.5"}); err != nil {
		t.Fatal(err)
	}
	group := sandboxapi.GroupID("hollow", sandboxapi.WorkerGroup)
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			c := sandboxapi.NewInCluster(sandboxapi.NewMetadata(h.Metadata), h.Control)
			tokens := []string{"shared", fmt.Sprint("own-", i)}
			for { // as operators do, until the cloud accepts
				made, err := c.CreateInstances(t.Context(), group, tokens)
				if err == nil && (len(made) != 2 || made[0].Token != "shared" || made[1].Token != tokens[1]) {
					t.Errorf("created %+v", made)
				}
				if err == nil || t.Context().Err() != nil {
					return
				}
			}
		})
	}
	all.Wait()
	count := map[string]int{}
	for _, i := range h.Instances() {
		count[i.Token]++
	}
	if d := cmp.Diff(map[string]int{"shared": 1, "own-0": 1, "own-1": 1, "own-2": 1, "own-3": 1}, count); d != "" {
		t.Errorf("machines by token, want and got:\n%s", d)
	}
}

// A machine is created only while the intent of its token exists and is not bound.
func TestWeakPointR1MachineNeedsIntent(t *testing.T) {
	create := decision.Action{Kind: decision.CreateInstance, Intent: decision.Intent{Name: "replace-0", Goal: v1alpha1.JoinGoal, Token: "t", OldNode: "worker-0", Group: workerGroup}}
	for _, tt := range []struct {
		name string
		is   *v1alpha1.PendingNode
		want []string
	}{
		{name: "no intent", want: nil},
		{name: "an intent of another request", is: pendingNode(v1alpha1.JoinGoal, "other", ""), want: nil},
		{name: "the intent is bound to the machine's removal", is: pendingNode(v1alpha1.LeaveGoal, "t", "sandbox://t/worker-0"), want: nil},
		{name: "an unbound intent", is: pendingNode(v1alpha1.JoinGoal, "t", ""), want: []string{"create [t] in " + workerGroup}},
	} {
		c := &cloudOfCalls{}
		o := &observed{pending: map[string]*v1alpha1.PendingNode{}}
		if tt.is != nil {
			o.pending["replace-0"] = tt.is
		}
		actor(t, c, nil).act(o, []decision.Action{create})
		if d := cmp.Diff(tt.want, c.calls); d != "" {
			t.Errorf("%s: calls, want and got:\n%s", tt.name, d)
		}
	}
}

// A deletion that the cloud refuses is requested again, and only for a machine that is
// bound to leave.
func TestWeakPointR2DeletionIsRetried(t *testing.T) {
	c := &cloudOfCalls{err: cloud.ErrUnavailable}
	r := actor(t, c, nil)
	now := time.Now()
	r.now, r.retries.now = func() time.Time { return now }, func() time.Time { return now }
	o := &observed{pending: map[string]*v1alpha1.PendingNode{"replace-0": pendingNode(v1alpha1.LeaveGoal, "t", "sandbox://t/worker-0")}}
	for range 2 {
		r.act(o, []decision.Action{
			{Kind: decision.DeleteInstance, Machine: "sandbox://t/worker-0", Node: "worker-0"}, {Kind: decision.DeleteInstance, Machine: "sandbox://t/worker-1", Node: "worker-1"},
		})
		now = now.Add(time.Minute)
	}
	if d := cmp.Diff([]string{"delete [sandbox://t/worker-0]", "delete [sandbox://t/worker-0]"}, c.calls); d != "" {
		t.Errorf("calls, want and got:\n%s", d)
	}
}

// No etcd member is removed from a stale list of members.
func TestWeakPointR5StaleMembersAreKept(t *testing.T) {
	h, now := &hostOfCalls{}, time.Now()
	r := actor(t, &cloudOfCalls{}, h)
	r.now = func() time.Time { return now }
	r.hostView.setMembers([]decision.Member{{Node: "a"}}, now.Add(-actMembers-time.Second))
	a := []decision.Action{{Kind: decision.RemoveMember, Node: "control-plane-0", MinVoters: 3}}
	o := &observed{}
	r.act(o, a)
	if len(h.calls) > 0 {
		t.Errorf("from a stale observation: %v", h.calls)
	}
	// An agent that finds a member dead was asked some seconds ago.
	r.hostView.setMembers([]decision.Member{{Node: "a"}}, now.Add(-6*time.Second))
	r.act(o, a)
	r.act(o, a) // our change makes the observed members stale
	if d := cmp.Diff([]string{"remove control-plane-0 leaving 3"}, h.calls); d != "" {
		t.Errorf("calls, want and got:\n%s", d)
	}
}

// A new process follows the run that it finds in the agent's journal.
func TestWeakPointR7NewProcessFollowsTheRun(t *testing.T) {
	run := decision.UpgradeRun{Version: "v1.36.3", Components: refB, Node: "control-plane-0", Phase: "apply", Started: testNow}
	h := &hostOfCalls{run: run}
	r := actor(t, &cloudOfCalls{}, h)
	r.nodeName = "control-plane-0"
	r.hostView.setRun(run)
	r.act(&observed{}, nil)
	if d := cmp.Diff([]string{"upgrade to v1.36.3 with " + refB}, h.calls); d != "" {
		t.Errorf("calls, want and got:\n%s", d)
	}
	// The agent may have ended the run since, so that this request starts another one.
	h.calls = nil
	r.retries.hurry(upgradeHere)
	r.act(&observed{World: decision.World{
		Nodes:  []decision.Node{{Name: "control-plane-0", Group: "cp", Role: v1alpha1.ControlPlaneRole}},
		Groups: []decision.Group{{ID: "cp", Role: v1alpha1.ControlPlaneRole, Strategy: v1alpha1.InPlaceStrategy}},
		Etcd:   []decision.Member{{Node: "control-plane-0"}, {Node: "control-plane-1"}},
	}}, nil)
	if d := cmp.Diff([]string{"upgrade to v1.36.3 with " + refB + " without the kubelet"}, h.calls); d != "" {
		t.Errorf("calls of a node that is upgraded in place, want and got:\n%s", d)
	}
}
