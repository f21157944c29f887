package hollow

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"constellation/agent/upgradeproto"
	"constellation/engine/cloud"
)

// agent stands in for the agents of all hollow control planes. Its etcd is a list of
// members, one for each joined control plane, and its kubeadm only prints lines and
// waits. It refuses the same requests as a real one. It is safe for concurrent use.
type agent struct {
	upgradeproto.UnimplementedAgentServer
	cloud *Cloud
	// stage is how long each stage of an upgrade takes.
	stage time.Duration

	mu      sync.Mutex
	node    string // the agent's current node
	members []member
	joined  map[string]bool // machines that have been members
	leader  uint64
	last    uint64 // ID of the newest member
	run     *run
}

type member struct {
	id   uint64
	name string
}

// run is an upgrade. The agent's lock guards its mutable fields.
type run struct {
	upgradeproto.Run
	keeps   bool // the kubelet
	lines   []*upgradeproto.UpgradeResponse
	changed chan struct{} // closed with the next line
}

func newAgent(c *Cloud, stage time.Duration) *agent {
	return &agent{cloud: c, stage: stage, joined: map[string]bool{}}
}

// serve answers on a socket until ctx ends.
func (a *agent) serve(ctx context.Context, socket string) error {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("serve hollow agent: %w", err)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", socket)
	if err != nil {
		return fmt.Errorf("serve hollow agent: %w", err)
	}
	if err := os.Chmod(socket, 0o600); err != nil {
		l.Close()
		return fmt.Errorf("serve hollow agent: %w", err)
	}
	g := grpc.NewServer()
	upgradeproto.RegisterAgentServer(g, a)
	defer context.AfterFunc(ctx, g.Stop)()
	if err := g.Serve(l); err != nil {
		return fmt.Errorf("serve hollow agent: %w", err)
	}
	return nil
}

// speakFor makes it the agent of a node.
func (a *agent) speakFor(node string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.node = node
}

// etcd updates the list of members and returns the healthy ones. The caller
// holds mu.
func (a *agent) etcd() map[uint64]bool {
	for _, m := range a.cloud.controlPlanes() {
		if !a.joined[m] {
			a.joined[m] = true
			a.last++
			a.members = append(a.members, member{a.last, m})
		}
	}
	healthy := map[uint64]bool{}
	for _, m := range a.members {
		s := a.cloud.snapshot(m.name)
		healthy[m.id] = s.registered && s.State != cloud.Stopped
	}
	if !healthy[a.leader] || !slices.ContainsFunc(a.members, func(m member) bool { return m.id == a.leader }) {
		a.leader = 0
		for _, m := range a.members {
			if healthy[m.id] {
				a.leader = m.id
				break
			}
		}
	}
	return healthy
}

// EtcdMembers lists the control planes that have joined and were not removed.
func (a *agent) EtcdMembers(context.Context, *upgradeproto.EtcdMembersRequest) (*upgradeproto.EtcdMembersResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	healthy := a.etcd()
	out := &upgradeproto.EtcdMembersResponse{ClusterId: 1}
	for _, m := range a.members {
		address := a.cloud.snapshot(m.name).IP.String()
		em := &upgradeproto.EtcdMember{
			Id: m.id, Name: m.name, PeerUrls: []string{"https://" + address + ":2380"}, ClientUrls: []string{"https://" + address + ":2379"},
			Leader: m.id == a.leader, Healthy: healthy[m.id], Version: "hollow",
		}
		if !em.Healthy {
			em.Trouble = "its machine does not answer"
		}
		out.Members = append(out.Members, em)
	}
	return out, nil
}

// RemoveEtcdMember removes a member that is not the leader, if all others are healthy.
func (a *agent) RemoveEtcdMember(_ context.Context, r *upgradeproto.RemoveEtcdMemberRequest) (*upgradeproto.RemoveEtcdMemberResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	healthy := a.etcd()
	i := slices.IndexFunc(a.members, func(m member) bool { return m.id == r.GetId() && m.name == r.GetName() })
	if i < 0 {
		return &upgradeproto.RemoveEtcdMemberResponse{}, nil
	}
	if r.GetId() == a.leader {
		return nil, status.Errorf(codes.FailedPrecondition, "%s leads etcd", r.GetName())
	}
	for _, m := range a.members {
		if m.id != r.GetId() && !healthy[m.id] {
			return nil, status.Errorf(codes.FailedPrecondition, "member %s is not healthy", m.name)
		}
	}
	a.members = slices.Delete(a.members, i, i+1)
	return &upgradeproto.RemoveEtcdMemberResponse{Removed: true}, nil
}

// MoveEtcdLeader transfers the leadership to another healthy member.
func (a *agent) MoveEtcdLeader(_ context.Context, r *upgradeproto.MoveEtcdLeaderRequest) (*upgradeproto.MoveEtcdLeaderResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	healthy := a.etcd()
	if a.leader != r.GetAwayFrom() {
		return &upgradeproto.MoveEtcdLeaderResponse{Leader: a.leader}, nil
	}
	for _, m := range a.members {
		if m.id != r.GetAwayFrom() && healthy[m.id] && (r.GetTo() == 0 || r.GetTo() == m.id) {
			a.leader = m.id
			return &upgradeproto.MoveEtcdLeaderResponse{Moved: true, Leader: m.id}, nil
		}
	}
	return nil, status.Error(codes.FailedPrecondition, "no other member is healthy")
}

// SnapshotEtcd fails: there is no database.
func (a *agent) SnapshotEtcd(*upgradeproto.SnapshotEtcdRequest, grpc.ServerStreamingServer[upgradeproto.SnapshotEtcdResponse]) error {
	return status.Error(codes.Unimplemented, "hollow control planes have no etcd to take a snapshot of")
}

// Status reports the latest run.
func (a *agent) Status(context.Context, *upgradeproto.StatusRequest) (*upgradeproto.StatusResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := &upgradeproto.StatusResponse{AgentVersion: "hollow", NodeName: a.node, Role: string(cloud.ControlPlane)}
	if r := a.run; r != nil {
		out.Run = &upgradeproto.Run{
			Token: r.Token, KubernetesVersion: r.KubernetesVersion, What: r.What, State: r.State, Stage: r.Stage,
			Started: r.Started, Updated: r.Updated, Seq: r.Seq, LastLine: r.LastLine, Message: r.Message,
		}
	}
	return out, nil
}

// Upgrade starts a run, or attaches to it, and streams its progress.
func (a *agent) Upgrade(req *upgradeproto.UpgradeRequest, stream grpc.ServerStreamingServer[upgradeproto.UpgradeResponse]) error {
	a.mu.Lock()
	r := a.run
	running := r != nil && r.State == upgradeproto.Run_RUNNING
	switch {
	case running && (r.KubernetesVersion != req.GetKubernetesVersion() || r.What != req.GetWhat()):
		a.mu.Unlock()
		return status.Errorf(codes.FailedPrecondition, "an upgrade to %s is under way", r.KubernetesVersion)
	case r == nil || !running && r.Token != req.GetToken():
		r = &run{changed: make(chan struct{}), keeps: req.GetKeepKubelet()}
		r.Token, r.KubernetesVersion, r.What = req.GetToken(), req.GetKubernetesVersion(), req.GetWhat()
		r.State, r.Started, r.Updated = upgradeproto.Run_RUNNING, timestamppb.Now(), timestamppb.Now()
		a.run = r
		go a.upgrade(r, a.node)
	}
	a.mu.Unlock()
	for sent := req.GetAfter(); ; {
		a.mu.Lock()
		lines, changed, over := r.lines, r.changed, r.State != upgradeproto.Run_RUNNING
		a.mu.Unlock()
		for _, l := range lines {
			if l.GetSeq() > sent {
				if err := stream.Send(l); err != nil {
					return err
				}
				sent = l.GetSeq()
			}
		}
		if over {
			return nil
		}
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-changed:
		}
	}
}

// upgrade simulates a run: it takes the configured time, and finally sets the new version of
// its node's kubelet, unless that is kept.
func (a *agent) upgrade(r *run, node string) {
	for _, stage := range []string{"verify", "plan", "apply", "install-kubelet", "wait-for-api"} {
		if r.keeps && stage == "install-kubelet" {
			continue
		}
		a.tell(r, stage, &upgradeproto.UpgradeResponse{Kind: &upgradeproto.UpgradeResponse_Progress{Progress: &upgradeproto.Progress{Stage: stage, State: "running"}}})
		line := fmt.Sprintf("[hollow] %s of Kubernetes %s on %s is simulated: nothing is installed", stage, r.KubernetesVersion, node)
		a.tell(r, stage, &upgradeproto.UpgradeResponse{Kind: &upgradeproto.UpgradeResponse_Log{Log: &upgradeproto.Log{Source: "agent", Level: "info", Line: line}}})
		time.Sleep(a.stage)
		a.tell(r, stage, &upgradeproto.UpgradeResponse{Kind: &upgradeproto.UpgradeResponse_Progress{Progress: &upgradeproto.Progress{Stage: stage, State: "done"}}})
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if !r.keeps {
		if err := a.cloud.kubelet.setVersion(ctx, node, r.KubernetesVersion); err != nil {
			a.tell(r, r.Stage, &upgradeproto.UpgradeResponse{Kind: &upgradeproto.UpgradeResponse_Failure{Failure: &upgradeproto.Failure{Stage: r.Stage, Message: err.Error()}}})
			return
		}
	}
	a.tell(r, r.Stage, &upgradeproto.UpgradeResponse{Kind: &upgradeproto.UpgradeResponse_Success{Success: &upgradeproto.Success{KubernetesVersion: r.KubernetesVersion}}})
}

// tell adds a line to a run. The last line ends it.
func (a *agent) tell(r *run, stage string, l *upgradeproto.UpgradeResponse) {
	a.mu.Lock()
	defer a.mu.Unlock()
	r.Seq++
	l.Seq, l.Time = r.Seq, timestamppb.Now()
	r.Stage, r.Updated = stage, l.GetTime()
	switch k := l.GetKind().(type) {
	case *upgradeproto.UpgradeResponse_Log:
		r.LastLine = k.Log.GetLine()
	case *upgradeproto.UpgradeResponse_Success:
		r.State = upgradeproto.Run_SUCCEEDED
	case *upgradeproto.UpgradeResponse_Failure:
		r.State, r.Message = upgradeproto.Run_FAILED, k.Failure.GetMessage()
	}
	r.lines = append(r.lines, l)
	close(r.changed)
	r.changed = make(chan struct{})
}
