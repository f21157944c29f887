//go:build linux

package operator

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"constellation/agent"
	"constellation/agent/upgradeproto"
	"constellation/engine/component"
	"constellation/engine/kubeadm"
	"constellation/engine/release/releasetest"
	"constellation/engine/sandbox/controlplane"
	"constellation/internal/syncbuffer"
	"constellation/internal/testneeds"
	"constellation/operator/decision"
)

// The agent starts its kubeadm through a gate in its own binary, here that of the test.
func init() {
	if len(os.Args) > 1 && os.Args[1] == kubeadm.GateArgument {
		kubeadm.Gate()
	}
}

// hostRig is a control plane's host with the real agent. kubeadm and kubelet are
// scripts: they print a version, wait as long as the test requires, and write manifests.
type hostRig struct {
	t      *testing.T
	dir    string
	mirror *httptest.Server
	host   agent.Host
	stop   func()
}

const oldKubernetes, newKubernetes = "v1.35.4", "v1.36.3"

func newHostRig(t *testing.T) *hostRig {
	t.Helper()
	dir, err := os.MkdirTemp("", "host") // t.TempDir can be too long for a socket's name
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	health := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(health.Close)
	releasetest.Furnish(t, filepath.Join(dir, "root"))
	r := &hostRig{t: t, dir: dir, host: agent.Host{
		Root: filepath.Join(dir, "root"), Name: "cp-1", KubeletHealth: health.URL, APIHealth: health.URL, APICalm: 20 * time.Millisecond,
		RestartKubelet: func(context.Context) error { return nil },
	}}
	r.mirror = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.Write(r.script(filepath.Base(req.URL.Path)))
	}))
	t.Cleanup(r.mirror.Close)
	r.write("ctl/x", "", 0o600)
	for _, name := range []string{"kubeadm", "kubelet"} {
		r.write("root/usr/local/bin/"+name, string(r.script(oldKubernetes)), 0o755)
	}
	r.write("root/etc/kubernetes/kubelet.conf", "", 0o600)
	for _, v := range []string{oldKubernetes, newKubernetes} {
		for _, pod := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"} {
			m := fmt.Sprintf("spec: {containers: [{name: %s, image: 'registry.example/%s:%s'}]}\n", pod, pod, v)
			r.write("manifests-"+v+"/"+pod+".yaml", m, 0o600)
			if v == oldKubernetes {
				r.write("root/etc/kubernetes/manifests/"+pod+".yaml", m, 0o600)
			}
		}
	}
	t.Cleanup(r.down)
	return r
}

func (r *hostRig) write(name, content string, mode os.FileMode) {
	r.t.Helper()
	p := filepath.Join(r.dir, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, []byte(content), mode)); err != nil {
		r.t.Fatal(err)
	}
}

// script stands in for kubeadm and kubelet of a version.
func (r *hostRig) script(version string) []byte {
	return []byte(strings.NewReplacer("@DIR", r.dir, "@VERSION", version).Replace(`#!/bin/sh
case "$1" in version|--version) echo @VERSION; exit 0;; esac
echo "[upgrade] running $2 of @VERSION"
touch "@DIR/ctl/at-$2"; echo "$2" >>"@DIR/ctl/runs"
while [ -e "@DIR/ctl/hang-$2" ]; do sleep 0.02; done
if [ -e "@DIR/ctl/fail-$2" ]; then rm "@DIR/ctl/fail-$2"; echo "error: the disk is made of cheese" >&2; exit 1; fi
[ "$2" = apply ] && cp "@DIR/manifests-@VERSION/"* "@DIR/root/etc/kubernetes/manifests/"
echo "[upgrade] SUCCESS of $2"
`))
}

func (r *hostRig) components(version string) component.Signed {
	sum := sha256.Sum256(r.script(version))
	var l component.List
	for _, name := range []string{"kubeadm", "kubelet"} {
		l = append(l, component.Component{Name: name, URL: r.mirror.URL + "/" + name + "/" + version, Digest: "sha256:" + hex.EncodeToString(sum[:]), Path: "/usr/local/bin/" + name})
	}
	return component.Signed{List: l, Statement: releasetest.Vouch(r.t, version, l)}
}

func (r *hostRig) socket() string { return filepath.Join(r.dir, "s", "agent.sock") }

// up starts an agent, down ends it; what kubeadm does continues.
func (r *hostRig) up() {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	s := agent.New(r.host, r.socket(), slog.New(slog.DiscardHandler))
	s.Operator = uint32(os.Getuid())
	go func() { done <- s.Run(ctx) }()
	r.stop = func() {
		cancel()
		if err := <-done; err != nil {
			r.t.Errorf("agent ended: %v", err)
		}
	}
}

func (r *hostRig) down() {
	if r.stop != nil {
		found, _ := filepath.Glob(filepath.Join(r.dir, "ctl/hang-*"))
		if r.t.Failed() {
			for _, f := range found {
				os.Remove(f)
			}
		}
		r.stop()
		r.stop = nil
	}
}

func (r *hostRig) client() *agentHost {
	r.t.Helper()
	h, err := newHost(r.socket(), "cp-1")
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { h.Close() })
	return h
}

func (r *hostRig) until(what string, holds func() bool) {
	r.t.Helper()
	(&cluster{t: r.t}).eventually(what, func() (string, bool) { return "not so", holds() })
}

func (r *hostRig) at(verb string) bool {
	_, err := os.Stat(filepath.Join(r.dir, "ctl/at-"+verb))
	return err == nil
}

func (r *hostRig) release(what string) {
	r.t.Helper()
	if err := os.Remove(filepath.Join(r.dir, "ctl", what)); err != nil {
		r.t.Fatal(err)
	}
}

// progressLog collects the reports of Upgrade.
type progressLog struct {
	mu  sync.Mutex
	all []decision.UpgradeRun
}

func (t *progressLog) record(r decision.UpgradeRun) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all = append(t.all, r)
}

func (t *progressLog) phases() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []string
	for _, r := range t.all {
		out = append(out, r.Phase)
	}
	return slices.Compact(out)
}

func TestHostUpgrades(t *testing.T) {
	const reference = "k8s-components-sha256-abc"
	r := newHostRig(t)
	h := r.client()
	var log syncbuffer.Buffer
	h.log = slog.New(slog.NewTextHandler(&log, nil))
	if _, err := h.Run(t.Context()); status.Code(err) != codes.Unavailable {
		t.Errorf("an unreachable agent returns %v", err)
	}
	r.up()
	r.until("the agent answers", func() bool { run, err := h.Run(t.Context()); return err == nil && run == decision.UpgradeRun{} })

	// The agent restarts during the upgrade: the upgrade continues, and so do its reports.
	r.write("ctl/hang-apply", "", 0o600)
	token := upgradeToken(newKubernetes, reference, decision.UpgradeRun{})
	var progress progressLog
	done := make(chan error, 1)
	go func() {
		done <- h.Upgrade(t.Context(), token, newKubernetes, reference, r.components(newKubernetes), false, progress.record)
	}()
	r.until("kubeadm applies", func() bool { return r.at("apply") && slices.Contains(progress.phases(), "apply") })
	run, err := h.Run(t.Context())
	if want := (decision.UpgradeRun{Version: newKubernetes, Components: reference, Node: "cp-1", Phase: "apply", Line: run.Line, Started: run.Started}); err != nil || run != want || run.Started.IsZero() {
		t.Errorf("run is %+v, %v; want %+v", run, err, want)
	}
	if got := upgradeToken(newKubernetes, reference, run); got != token {
		t.Errorf("the token is %s, and after its loss %s", token, got)
	}
	err = r.client().Upgrade(t.Context(), "another/0/one", "v1.35.5", "one", r.components("v1.35.5"), false, func(decision.UpgradeRun) {})
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "upgrade of the control plane to "+newKubernetes+" ("+token+") is in progress") {
		t.Errorf("another upgrade returns: %v", err)
	}
	r.down()
	r.until("the cut is logged", func() bool { return strings.Contains(log.String(), "agent not reachable") })
	r.up()
	r.release("hang-apply")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if got := progress.phases(); !slices.Equal(got, []string{"download", "plan", "apply", "done"}) {
		t.Errorf("phases %v", got)
	}
	last := progress.all[len(progress.all)-1]
	if last.Ended.Before(last.Started) || last.Started.IsZero() || last.Version != newKubernetes || last.Components != reference || last.Node != "cp-1" {
		t.Errorf("in the end %+v", last)
	}
	// The second agent starts with the first stage again. No line is reported twice.
	for line, want := range map[string]int{
		`msg="upgrade progressed" node=cp-1 stage=verify source=agent line=running`:                                                    2,
		`msg="upgrade progressed" node=cp-1 stage=plan source=kubeadm line="[upgrade] SUCCESS of plan"`:                                2,
		`msg="upgrade progressed" node=cp-1 stage=apply source=agent line="the agent was restarted; kubeadm upgrade apply still runs"`: 1,
		`msg="upgrade progressed" node=cp-1 stage=apply source=kubeadm line="[upgrade] running apply of v1.36.3"`:                      2,
		`msg="upgrade progressed" node=cp-1 stage=wait-for-api source=agent line=done`:                                                 1,
	} {
		if n := strings.Count(log.String(), line); n != want {
			t.Errorf("%d times in the log, want %d: %s\n%s", n, want, line, log.String())
		}
	}
	run, err = h.Run(t.Context())
	if err != nil || run.Phase != "done" || run.Ended.IsZero() || run.Components != reference {
		t.Errorf("afterwards run is %+v, %v", run, err)
	}

	// A repeated request reports the same and changes nothing.
	deeds := log.String()
	if err := r.client().Upgrade(t.Context(), token, newKubernetes, reference, r.components(newKubernetes), false, func(decision.UpgradeRun) {}); err != nil {
		t.Errorf("the repeated request: %v", err)
	}
	if log.String() != deeds {
		t.Error("the repeated request changed the host")
	}
}

func TestHostUpgradeFails(t *testing.T) {
	r := newHostRig(t)
	r.up()
	h := r.client()
	r.until("the agent answers", func() bool { _, err := h.Run(t.Context()); return err == nil })
	r.write("ctl/fail-apply", "", 0o600)
	var progress progressLog
	first := upgradeToken(newKubernetes, "ref", decision.UpgradeRun{})
	err := h.Upgrade(t.Context(), first, newKubernetes, "ref", r.components(newKubernetes), false, progress.record)
	if err == nil || !strings.Contains(err.Error(), "apply: ") || !strings.Contains(err.Error(), "cheese") {
		t.Fatalf("failed with %v", err)
	}
	run, err := h.Run(t.Context())
	if err != nil || run.Phase != "failed" || !strings.Contains(run.Line, "cheese") || run.Ended.IsZero() || progress.all[len(progress.all)-1].Phase != "failed" {
		t.Errorf("run is %+v, %v; told %v", run, err, progress.phases())
	}
	second := upgradeToken(newKubernetes, "ref", run)
	if second == first {
		t.Fatal("a retry would return the same failure")
	}
	if err := h.Upgrade(t.Context(), second, newKubernetes, "ref", r.components(newKubernetes), false, progress.record); err != nil {
		t.Errorf("the second try: %v", err)
	}
	if run, err := h.Run(t.Context()); err != nil || run.Phase != "done" {
		t.Errorf("run is %+v, %v", run, err)
	}
	// A caller that gives up gets its own reason.
	ctx, cancel := context.WithCancelCause(t.Context())
	r.down()
	cancel(errors.New("the target changed"))
	if err := h.Upgrade(ctx, second, newKubernetes, "ref", r.components(newKubernetes), false, progress.record); err == nil || !strings.Contains(err.Error(), "the target changed") {
		t.Errorf("cancelled with %v", err)
	}
}

// realEtcd runs a cluster of n members called m0, m1, ... and returns the URL of each.
func realEtcd(t *testing.T, n int) (urls []string) {
	t.Helper()
	testneeds.ControlPlane(t)
	bin, err := controlplane.FindBinaries()
	if errors.Is(err, controlplane.ErrNoBinaries) {
		t.Skip(err)
	}
	var peers, initial []string
	for i := range n {
		for _, l := range []*[]string{&urls, &peers} {
			address, err := freeAddress()
			if err != nil {
				t.Fatal(err)
			}
			*l = append(*l, "http://"+address)
		}
		initial = append(initial, fmt.Sprintf("m%d=%s", i, peers[i]))
	}
	for i := range n {
		cmd := exec.Command(filepath.Join(bin, "etcd"), "--name", fmt.Sprintf("m%d", i), "--data-dir", t.TempDir(), "--log-level", "error",
			"--listen-client-urls", urls[i], "--advertise-client-urls", urls[i], "--listen-peer-urls", peers[i], "--initial-advertise-peer-urls", peers[i],
			"--initial-cluster", strings.Join(initial, ","), "--heartbeat-interval", "200", "--election-timeout", "2000", "--unsafe-no-fsync")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	}
	return urls
}

func TestHostChangesEtcd(t *testing.T) {
	r := newHostRig(t)
	r.host.Etcd.Endpoint = realEtcd(t, 3)[0]
	r.up()
	h := r.client()
	var members []decision.Member
	leader := func() (name string) {
		t.Helper()
		r.until("all members are healthy", func() bool {
			var err error
			members, err = h.Members(t.Context())
			i := slices.IndexFunc(members, func(m decision.Member) bool { return m.Leader })
			if i >= 0 {
				name = members[i].Node
			}
			return err == nil && i >= 0 && !slices.ContainsFunc(members, func(m decision.Member) bool { return !m.Healthy })
		})
		return name
	}
	// etcd sets its storage version some seconds after its first election.
	r.until("all members have a storage version", func() bool {
		leader()
		return !slices.ContainsFunc(members, func(m decision.Member) bool { return m.Storage == "" })
	})
	first := leader()
	var want []decision.Member
	for _, name := range []string{"m0", "m1", "m2"} {
		want = append(want, decision.Member{Node: name, Voter: true, Healthy: true, Leader: name == first, Address: "127.0.0.1"})
	}
	slices.SortFunc(members, func(a, b decision.Member) int { return cmp.Compare(a.Node, b.Node) })
	for i := range members {
		m := &members[i]
		if !strings.HasPrefix(m.Version, "3.") || !strings.HasPrefix(m.Storage, "3.") {
			t.Errorf("member %s has version %q and storage version %q", m.Node, m.Version, m.Storage)
		}
		m.Version, m.Storage = "", "" // those of the etcd that the tests found
	}
	if !reflect.DeepEqual(members, want) {
		t.Fatalf("members %+v, want %+v", members, want)
	}
	others := slices.DeleteFunc([]string{"m0", "m1", "m2"}, func(s string) bool { return s == first })

	if err := h.RemoveMember(t.Context(), first, "", 2); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "leads") {
		t.Errorf("the leader was removed: %v", err)
	}
	if err := h.MoveLeader(t.Context(), first, "nobody"); err == nil {
		t.Error("the leader moved to an empty name")
	}
	for range 2 { // the second call changes nothing
		if err := h.MoveLeader(t.Context(), first, others[1]); err != nil {
			t.Fatal(err)
		}
		r.until("the leader moved", func() bool { return leader() == others[1] })
	}
	if err := h.MoveLeader(t.Context(), "nobody", ""); err != nil {
		t.Errorf("a node without a member: %v", err)
	}
	if err := h.MoveLeader(t.Context(), others[1], ""); err != nil {
		t.Fatal(err)
	}
	r.until("the leader moved on", func() bool { return leader() != others[1] })

	if err := h.RemoveMember(t.Context(), others[1], "", 3); err == nil || !strings.Contains(err.Error(), "2 voters would remain, want at least 3") {
		t.Errorf("removed with too few left: %v", err)
	}
	if n := len(members); n != 3 {
		t.Fatalf("%d members", n)
	}
	for range 2 { // a deleted member is a success
		// etcd itself refuses until its members have been connected for some seconds.
		(&cluster{t: t}).eventually("the member is removed", func() (string, bool) {
			err := h.RemoveMember(t.Context(), others[1], "", 2)
			return fmt.Sprint(err), err == nil
		})
	}
	leader()
	if len(members) != 2 || slices.ContainsFunc(members, func(m decision.Member) bool { return m.Node == others[1] }) {
		t.Errorf("members %+v", members)
	}
	if err := h.RemoveMember(t.Context(), "", "", 0); err == nil {
		t.Error("the member of no node was removed")
	}
}

// A machine that died while it joined leaves a member that never starts. etcd permits no other
// change of members until it is removed.
func TestHostRemovesAMemberThatNeverStarted(t *testing.T) {
	for _, learner := range []bool{true, false} {
		t.Run(fmt.Sprintf("learner %v", learner), func(t *testing.T) {
			r := newHostRig(t)
			url := realEtcd(t, 3)[0]
			r.host.Etcd.Endpoint = url
			r.up()
			h := r.client()
			dead := decision.Member{Node: "https://10.42.0.99:2380", Voter: false, NotStarted: true, Address: "10.42.0.99"}
			add := func(peer string) (string, error) {
				resp, err := http.Post(url+"/v3/cluster/member/add", "application/json", strings.NewReader(fmt.Sprintf(`{"peerURLs":[%q],"isLearner":%v}`, peer, learner)))
				if err != nil {
					return "", err
				}
				defer resp.Body.Close()
				b, err := io.ReadAll(resp.Body)
				return string(b), err
			}
			// etcd itself refuses until its members have been connected for some seconds.
			r.until("it is added", func() bool {
				answer, err := add(dead.Node)
				return err == nil && strings.Contains(answer, `"member":`)
			})
			if answer, err := add("https://10.42.0.98:2380"); err != nil || strings.Contains(answer, `"member":`) {
				t.Errorf("another one joined: %s, %v", answer, err)
			}
			members, err := h.Members(t.Context())
			if err != nil || !slices.Contains(members, dead) || len(members) != 4 {
				t.Fatalf("members %+v, %v", members, err)
			}
			led := members[slices.IndexFunc(members, func(m decision.Member) bool { return m.Leader })].Node
			other := slices.DeleteFunc([]string{"m0", "m1", "m2"}, func(s string) bool { return s == led })[0]
			if err := h.RemoveMember(t.Context(), other, "", 2); err == nil || !strings.Contains(err.Error(), "has not started") {
				t.Errorf("a member left beside it: %v", err)
			}
			if err := h.RemoveMember(t.Context(), dead.Node, dead.Address, 4); err == nil || !strings.Contains(err.Error(), "3 voters would remain") {
				t.Errorf("it left although more voters were required: %v", err)
			}
			if err := h.RemoveMember(t.Context(), dead.Node, dead.Address, 3); err != nil {
				t.Fatal(err)
			}
			if members, err = h.Members(t.Context()); err != nil || slices.ContainsFunc(members, func(m decision.Member) bool { return m.NotStarted }) || len(members) != 3 {
				t.Errorf("members %+v, %v", members, err)
			}
		})
	}
}

// standInAgent is a fake agent, for states that are hard to reproduce.
type standInAgent struct {
	upgradeproto.UnimplementedAgentServer
	run     *upgradeproto.Run
	members []*upgradeproto.EtcdMember
	removed []uint64
	left    uint64 // by the leader
}

func (s *standInAgent) RemoveEtcdMember(_ context.Context, r *upgradeproto.RemoveEtcdMemberRequest) (*upgradeproto.RemoveEtcdMemberResponse, error) {
	s.removed = append(s.removed, r.GetId())
	return &upgradeproto.RemoveEtcdMemberResponse{}, nil
}

func (s *standInAgent) MoveEtcdLeader(_ context.Context, r *upgradeproto.MoveEtcdLeaderRequest) (*upgradeproto.MoveEtcdLeaderResponse, error) {
	s.left = r.GetAwayFrom()
	return &upgradeproto.MoveEtcdLeaderResponse{}, nil
}

func (s *standInAgent) Status(context.Context, *upgradeproto.StatusRequest) (*upgradeproto.StatusResponse, error) {
	return &upgradeproto.StatusResponse{Run: s.run}, nil
}

func (s *standInAgent) EtcdMembers(context.Context, *upgradeproto.EtcdMembersRequest) (*upgradeproto.EtcdMembersResponse, error) {
	return &upgradeproto.EtcdMembersResponse{Members: s.members}, nil
}

func (s *standInAgent) serve(t *testing.T) *agentHost {
	t.Helper()
	dir, err := os.MkdirTemp("", "host")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	l, err := net.Listen("unix", filepath.Join(dir, "a.sock"))
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer()
	upgradeproto.RegisterAgentServer(g, s)
	go g.Serve(l)
	t.Cleanup(g.Stop)
	h, err := newHost(l.Addr().String(), "cp-1")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	return h
}

// A control plane whose upgrade of the cluster was given up is upgraded by its own agent later, which
// accepts one token for one request only.
func TestNodeTokenIsNotThatOfTheControlPlane(t *testing.T) {
	const reference = "k8s-components-sha256-0123456789012345678901234567890123456789012345678901234567890123"
	last := decision.UpgradeRun{Version: newKubernetes, Phase: "failed", Ended: time.UnixMilli(1763945678123)}
	all := map[string]bool{}
	for _, etcd := range []string{"", "3.6.11-0", "0123456789abcdef"} {
		for _, run := range []decision.UpgradeRun{{}, last} {
			token := nodeToken(newKubernetes, reference, etcd, run)
			if all[token] || token == upgradeToken(newKubernetes, reference, run) || len(token) > 128 || etcdOf(token) != etcd {
				t.Errorf("token %q of %d bytes with etcd %q", token, len(token), etcdOf(token))
			}
			all[token] = true
			if token != nodeToken(newKubernetes, reference, etcd, run) {
				t.Errorf("token %q changes", token)
			}
		}
	}
}

func TestHostReturnsTheLatestRun(t *testing.T) {
	begun, heard := time.Unix(1000, 0).UTC(), time.Unix(2000, 0).UTC()
	run := func(state upgradeproto.Run_State, stage, token string) *upgradeproto.Run {
		return &upgradeproto.Run{
			Token: token, KubernetesVersion: newKubernetes, State: state, Stage: stage, LastLine: "a line", Message: "why",
			Started: timestamppb.New(begun), Updated: timestamppb.New(heard),
		}
	}
	token := upgradeToken(newKubernetes, "a/ref", decision.UpgradeRun{})
	base := decision.UpgradeRun{Version: newKubernetes, Components: "a/ref", Node: "cp-1", Line: "a line", Started: begun}
	with := func(change func(*decision.UpgradeRun)) decision.UpgradeRun { r := base; change(&r); return r }
	for _, tt := range []struct {
		name string
		run  *upgradeproto.Run
		want decision.UpgradeRun
	}{
		{name: "no run", want: decision.UpgradeRun{}},
		{name: "components are downloaded", run: run(upgradeproto.Run_RUNNING, "install-kubeadm", token), want: with(func(r *decision.UpgradeRun) { r.Phase = "download" })},
		{name: "kubeadm plans", run: run(upgradeproto.Run_RUNNING, "plan", token), want: with(func(r *decision.UpgradeRun) { r.Phase = "plan" })},
		{name: "the kubelet is upgraded", run: run(upgradeproto.Run_RUNNING, "restart-kubelet", token), want: with(func(r *decision.UpgradeRun) { r.Phase = "apply" })},
		{name: "a run succeeded", run: run(upgradeproto.Run_SUCCEEDED, "wait-for-api", token), want: with(func(r *decision.UpgradeRun) { r.Phase, r.Ended = "done", heard })},
		{name: "a run failed", run: run(upgradeproto.Run_FAILED, "plan", token), want: with(func(r *decision.UpgradeRun) { r.Phase, r.Line, r.Ended = "failed", "why", heard })},
		{name: "a run was interrupted before it changed the host", run: run(upgradeproto.Run_INTERRUPTED, "plan", token), want: decision.UpgradeRun{}},
		{name: "a run was interrupted later, and needs no pause", run: run(upgradeproto.Run_INTERRUPTED, "apply", token), want: with(func(r *decision.UpgradeRun) { r.Phase, r.Line = "failed", "interrupted: why" })},
		{name: "a run brought the etcd of the target", run: run(upgradeproto.Run_SUCCEEDED, "wait-for-api", nodeToken(newKubernetes, "a/ref", "3.6.11-0", decision.UpgradeRun{})), want: with(func(r *decision.UpgradeRun) { r.Phase, r.Ended, r.Etcd = "done", heard, "3.6.11-0" })},
		{name: "another caller requested the run", run: run(upgradeproto.Run_SUCCEEDED, "wait-for-api", "mine"), want: with(func(r *decision.UpgradeRun) { r.Phase, r.Ended, r.Components = "done", heard, "" })},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := (&standInAgent{run: tt.run}).serve(t).Run(t.Context())
			if err != nil || got != tt.want {
				t.Errorf("run is %+v, %v; want %+v", got, err, tt.want)
			}
		})
	}
}

func TestHostMatchesMembersExactly(t *testing.T) {
	s := &standInAgent{members: []*upgradeproto.EtcdMember{
		{Id: 1, Name: "cp-1", Healthy: true, Leader: true},
		{Id: 2, Name: "cp-2", Learner: true, Healthy: true},
		{Id: 3, PeerUrls: []string{"https://10.42.0.7:2380"}},
		{Id: 255},
	}}
	h := s.serve(t)
	got, err := h.Members(t.Context())
	want := []decision.Member{{Node: "cp-1", Voter: true, Healthy: true, Leader: true}, {Node: "cp-2", Healthy: true}, {Node: "https://10.42.0.7:2380", NotStarted: true, Address: "10.42.0.7"}, {Node: "ff", NotStarted: true}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("members %+v, %v; want %+v", got, err, want)
	}
	// A learner and a member that has not started do not count as remaining voters.
	if err := h.RemoveMember(t.Context(), "cp-1", "", 1); err == nil || !strings.Contains(err.Error(), "0 voters would remain, want at least 1") {
		t.Errorf("the only voter: %v", err)
	}
}

// In a cloud that reuses names, a new control plane can be a member while the member of the earlier
// machine of its name is still in etcd. Each of them can be unhealthy.
func TestHostRemovesTheMemberAtTheAddress(t *testing.T) {
	member := func(id uint64, name, ip string, healthy, leader bool) *upgradeproto.EtcdMember {
		return &upgradeproto.EtcdMember{Id: id, Name: name, Healthy: healthy, Leader: leader, PeerUrls: []string{"https://" + ip + ":2380"}}
	}
	for _, tt := range []struct {
		name                   string
		address                string
		oldHealthy, newHealthy bool
		want                   []uint64
	}{
		{name: "the earlier machine is off", address: "10.42.0.1", newHealthy: true, want: []uint64{1}},
		{name: "the later machine is off", address: "10.42.0.1", oldHealthy: true, want: []uint64{1}},
		{name: "both are off, the earlier one leaves", address: "10.42.0.1", want: []uint64{1}},
		{name: "both are off, the later one leaves", address: "10.42.0.2", want: []uint64{2}},
		{name: "both are on, the later one leaves", address: "10.42.0.2", oldHealthy: true, newHealthy: true, want: []uint64{2}},
		{name: "the member at the address has left", address: "10.42.0.8", newHealthy: true, want: nil},
		{name: "the address is unknown", oldHealthy: true, want: []uint64{2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &standInAgent{members: []*upgradeproto.EtcdMember{
				member(1, "cp-1", "10.42.0.1", tt.oldHealthy, false), member(2, "cp-1", "10.42.0.2", tt.newHealthy, false), member(3, "cp-2", "10.42.0.3", true, true),
			}}
			if err := s.serve(t).RemoveMember(t.Context(), "cp-1", tt.address, 2); err != nil || !slices.Equal(s.removed, tt.want) {
				t.Errorf("removed %d, %v; want %d", s.removed, err, tt.want)
			}
		})
	}
	s := &standInAgent{members: []*upgradeproto.EtcdMember{member(1, "cp-1", "10.42.0.1", false, false), member(2, "cp-1", "10.42.0.2", true, true)}}
	if err := s.serve(t).MoveLeader(t.Context(), "cp-1", ""); err != nil || s.left != 2 {
		t.Errorf("the leader moved away from member %d, %v; want 2", s.left, err)
	}
}

// The addresses of members are compared with those of machines: an unhealthy member is removed if
// no machine has its address. An address in another notation is the same one.
func TestAddressesOfMembersAreThoseOfMachines(t *testing.T) {
	for peer, want := range map[string]string{
		"https://10.42.0.7:2380":                "10.42.0.7",
		"https://[fd00:0:0::7]:2380":            addressOf(netip.MustParseAddr("fd00::7")),
		"https://[::ffff:10.42.0.7]:2380":       "10.42.0.7",
		"https://control-plane-0.internal:2380": "",
		"":                                      "",
	} {
		m := &upgradeproto.EtcdMember{Id: 3}
		if peer != "" {
			m.PeerUrls = []string{peer}
		}
		if got := addressIn(m); got != want {
			t.Errorf("address of member %q is %q, want %q", peer, got, want)
		}
	}
	if got := addressOf(netip.MustParseAddr("::ffff:10.42.0.7")); got != "10.42.0.7" {
		t.Errorf("address of a machine is %q, want 10.42.0.7", got)
	}
}
