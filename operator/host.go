package operator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/agent/upgradeproto"
	"constellation/engine/component"
	"constellation/engine/kubeadm"
	"constellation/operator/decision"
)

const (
	// agentTimeout bounds a request that the agent answers at once; the agent's own limit is a
	// minute.
	agentTimeout = 70 * time.Second
	// A broken stream is opened again, with exponential backoff.
	reconnectMin = 200 * time.Millisecond
	reconnectMax = 5 * time.Second
)

// agentHost is the agent of one host, through its socket. It connects at the first call, and
// reconnects after a restart of the agent. It is safe for concurrent use.
type agentHost struct {
	node  string
	conn  *grpc.ClientConn
	agent upgradeproto.AgentClient
	what  upgradeproto.What // that it must upgrade
	// log receives every line of an upgrade; nil: none.
	log *slog.Logger
	// packages is asked whether upgrades in place upgrade packages of the distribution; nil: they do not.
	packages func(context.Context) (bool, error)
}

// newHost returns the agent of node, whose socket is at the absolute path socket. The
// socket may not exist yet. The caller closes it.
func newHost(socket, node string) (*agentHost, error) {
	if !filepath.IsAbs(socket) {
		return nil, fmt.Errorf("connect to the agent: %q is not an absolute path", socket)
	}
	conn, err := grpc.NewClient("unix:"+socket, dialOptions()...)
	if err != nil {
		return nil, fmt.Errorf("connect to the agent: %w", err)
	}
	return &agentHost{node: node, conn: conn, agent: upgradeproto.NewAgentClient(conn), what: upgradeproto.What_APPLY}, nil
}

// Close ends what is in progress with an error.
func (h *agentHost) Close() error { return h.conn.Close() }

// Members lists the members of etcd with a linearizable read. A member that has not started has no
// name yet, and is listed under its peer URL.
func (h *agentHost) Members(ctx context.Context) ([]decision.Member, error) {
	all, err := h.list(ctx)
	if err != nil {
		return nil, err
	}
	members := make([]decision.Member, 0, len(all))
	for _, m := range all {
		members = append(members, decision.Member{Node: nodeOf(m), Voter: started(m), Healthy: m.GetHealthy(), Leader: m.GetLeader(), NotStarted: m.GetName() == "", Address: addressIn(m), Version: m.GetVersion(), Storage: m.GetStorageVersion()})
	}
	return members, nil
}

func (h *agentHost) list(ctx context.Context) ([]*upgradeproto.EtcdMember, error) {
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	r, err := h.agent.EtcdMembers(ctx, &upgradeproto.EtcdMembersRequest{})
	if err != nil {
		return nil, fmt.Errorf("list members of etcd: %w", words(err))
	}
	return r.GetMembers(), nil
}

// nodeOf returns the node of a member: kubeadm gives both the same name. It is never empty, so that
// no member matches a node whose name is unknown.
func nodeOf(m *upgradeproto.EtcdMember) string {
	switch {
	case m.GetName() != "":
		return m.GetName()
	case len(m.GetPeerUrls()) > 0:
		return m.GetPeerUrls()[0]
	}
	return strconv.FormatUint(m.GetId(), 16)
}

// addressIn returns the IP address of the peer URL of a member; empty: it has none.
func addressIn(m *upgradeproto.EtcdMember) string {
	if len(m.GetPeerUrls()) == 0 {
		return ""
	}
	u, err := url.Parse(m.GetPeerUrls()[0])
	if err != nil {
		return ""
	}
	ip, err := netip.ParseAddr(u.Hostname())
	if err != nil {
		return "" // a name, which cannot be compared with the address of a machine
	}
	return addressOf(ip)
}

// started reports whether m is a voter that has started.
func started(m *upgradeproto.EtcdMember) bool { return m.GetName() != "" && !m.GetLearner() }

// memberOf returns the member of node; nil: it has none. If machines had the name one after the
// other, and both have a member, memberOf prefers the one for which wanted returns true.
func memberOf(all []*upgradeproto.EtcdMember, node string, wanted func(*upgradeproto.EtcdMember) bool) (found *upgradeproto.EtcdMember) {
	for _, m := range all {
		if nodeOf(m) == node && (found == nil || !wanted(found) && wanted(m)) {
			found = m
		}
	}
	return found
}

// MoveLeader moves etcd leadership from the member of from to that of to. If to is empty, the agent
// chooses. If from does not lead, or has no member, nothing happens.
func (h *agentHost) MoveLeader(ctx context.Context, from, to string) error {
	all, err := h.list(ctx)
	if err != nil {
		return err
	}
	req := &upgradeproto.MoveEtcdLeaderRequest{}
	m := memberOf(all, from, (*upgradeproto.EtcdMember).GetLeader)
	if m == nil {
		return nil
	}
	req.AwayFrom = m.GetId()
	if to != "" {
		newNode := memberOf(all, to, (*upgradeproto.EtcdMember).GetHealthy)
		if newNode == nil {
			return fmt.Errorf("move the leader of etcd from %s to %s: %s has no member", from, to, to)
		}
		req.To = newNode.GetId()
	}
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	if _, err := h.agent.MoveEtcdLeader(ctx, req); err != nil {
		return fmt.Errorf("move the leader of etcd away from %s: %w", from, words(err))
	}
	return nil
}

// RemoveMember removes the member of node from etcd, if at least voters started voters remain. A
// node without a member is a success.
//
// If two members have the name, RemoveMember removes the one at address. If no address is known, it
// removes the unhealthy one, which is that of the earlier machine.
func (h *agentHost) RemoveMember(ctx context.Context, node, address string, voters int) error {
	if node == "" {
		return errors.New("remove member of etcd: node name is empty")
	}
	all, err := h.list(ctx)
	if err != nil {
		return err
	}
	named := func(m *upgradeproto.EtcdMember) bool {
		at := addressIn(m)
		return nodeOf(m) == node && (address == "" || at == "" || at == address)
	}
	leaving := memberOf(slices.DeleteFunc(slices.Clone(all), func(m *upgradeproto.EtcdMember) bool { return !named(m) }), node, func(m *upgradeproto.EtcdMember) bool {
		return address == "" && !m.GetHealthy() || address != "" && addressIn(m) == address
	})
	if leaving == nil {
		return nil
	}
	stay := 0
	for _, m := range all {
		if m != leaving && started(m) {
			stay++
		}
	}
	if stay < voters {
		return fmt.Errorf("remove member %s of etcd: %d voters would remain, want at least %d", node, stay, voters)
	}
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	if _, err := h.agent.RemoveEtcdMember(ctx, &upgradeproto.RemoveEtcdMemberRequest{Id: leaving.GetId(), Name: leaving.GetName()}); err != nil {
		return fmt.Errorf("remove member %s of etcd: %w", node, words(err))
	}
	return nil
}

// upgradeToken names one attempt at a target: the first, or the one after a failed run. The same run
// yields the same token, so a restarted operator attaches to the attempt in progress. The agent
// stores the token, and Run reads the run's target from it.
func upgradeToken(version, reference string, last decision.UpgradeRun) string {
	try := int64(0)
	if last.Phase == "failed" && !last.Ended.IsZero() && last.Version == version {
		try = last.Ended.UnixMilli()
	}
	return fmt.Sprintf("%s/%d/%s", version, try, reference)
}

// nodeToken is upgradeToken of an in-place upgrade, with the mark of the etcd that the target names.
// It differs from that of the control plane's upgrade: the agent refuses a token for another verb.
func nodeToken(version, reference, etcd string, last decision.UpgradeRun) string {
	parts := strings.SplitN(upgradeToken(version, reference, last), "/", 3)
	parts[1] = nodeAttempt + parts[1]
	if etcd != "" {
		parts[1] += etcdSeparator + etcd
	}
	return strings.Join(parts, "/")
}

// Parts of the tokens of an in-place upgrade and of add-ons, in the field between version and components. Earlier
// operators skip that field.
const (
	nodeAttempt   = "n"
	addonsAttempt = "a"
	etcdSeparator = "+"
)

// addonsToken is upgradeToken of an upgrade of add-ons, with their initials: the agent refuses a token
// for other add-ons.
func addonsToken(version, reference string, addons []string, last decision.UpgradeRun) string {
	parts := strings.SplitN(upgradeToken(version, reference, last), "/", 3)
	attempt := addonsAttempt
	for _, a := range addons {
		attempt += a[:1]
	}
	parts[1] = attempt + parts[1]
	return strings.Join(parts, "/")
}

// etcdOf returns the mark of etcd in a token.
func etcdOf(token string) string {
	parts := strings.SplitN(token, "/", 3)
	if len(parts) != 3 {
		return ""
	}
	_, mark, _ := strings.Cut(parts[1], etcdSeparator)
	return mark
}

// Run returns the latest run in the host's journal; the zero value if there is none. An interrupted
// run must be repeated. If it had not changed the host yet, Run returns none. Afterwards Run returns
// it as a failed run without a pause (ended is zero).
func (h *agentHost) Run(ctx context.Context) (decision.UpgradeRun, error) {
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	s, err := h.agent.Status(ctx, &upgradeproto.StatusRequest{})
	if err != nil {
		return decision.UpgradeRun{}, fmt.Errorf("read the run of the agent of %s: %w", h.node, words(err))
	}
	r := s.GetRun()
	if r == nil {
		return decision.UpgradeRun{}, nil
	}
	run := decision.UpgradeRun{Version: r.GetKubernetesVersion(), Node: h.node, InPlace: r.GetWhat() == upgradeproto.What_NODE, Addons: r.GetWhat() == upgradeproto.What_ADDONS, Phase: phaseOf(r.GetStage()), Line: r.GetLastLine(), Started: r.GetStarted().AsTime()}
	if parts := strings.SplitN(r.GetToken(), "/", 3); len(parts) == 3 && parts[0] == run.Version {
		run.Components, run.Etcd = parts[2], etcdOf(r.GetToken())
	}
	switch r.GetState() {
	case upgradeproto.Run_SUCCEEDED:
		run.Phase, run.Ended = "done", r.GetUpdated().AsTime()
	case upgradeproto.Run_FAILED:
		run.Phase, run.Line, run.Ended = "failed", r.GetMessage(), r.GetUpdated().AsTime()
	case upgradeproto.Run_INTERRUPTED:
		if run.Phase != "apply" {
			return decision.UpgradeRun{}, nil
		}
		run.Phase, run.Line = "failed", "interrupted: "+r.GetMessage()
	case upgradeproto.Run_RUNNING:
		run.BootID = s.GetBootId()
	case upgradeproto.Run_STATE_UNSPECIFIED:
	}
	if run.Addons && h.what == upgradeproto.What_NODE && !run.Active() {
		return decision.UpgradeRun{}, nil // it did not upgrade the node
	}
	return run, nil
}

// bootID returns the host's boot; empty if the agent does not report it.
func (h *agentHost) bootID(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	s, err := h.agent.Status(ctx, &upgradeproto.StatusRequest{})
	if err != nil {
		return ""
	}
	return s.GetBootId()
}

// phaseOf returns the phase of a stage, as the status reports it. Only in the last of the three does
// the host run anything of the new version besides kubeadm.
func phaseOf(stage string) string {
	switch stage {
	case "", "verify", "install-kubeadm":
		return "download"
	case "plan":
		return "plan"
	}
	return "apply"
}

// Upgrade requests a run, or attaches to it, and follows it to its end. With keepKubelet, a run that
// upgrades the cluster's Kubernetes does not replace the host's kubelet. Upgrade calls tell with every
// change of phase and every line, from one goroutine. It also logs all lines. It returns nil when the
// host runs the version.
//
// If the connection breaks, for example because the agent restarts, Upgrade reconnects until ctx
// ends, and continues with the next line. It returns the agent's message if the agent refuses, for
// example because another run is in progress.
func (h *agentHost) Upgrade(ctx context.Context, token, version, reference string, components component.Signed, keepKubelet bool, tell func(decision.UpgradeRun)) error {
	return h.upgrade(ctx, &upgradeproto.UpgradeRequest{What: h.what, KeepKubelet: keepKubelet}, token, version, reference, components, tell)
}

// UpgradeAddons requests the upgrade of add-ons, by their names, as Upgrade does for Kubernetes.
func (h *agentHost) UpgradeAddons(ctx context.Context, token, version, reference string, components component.Signed, addons []string, tell func(decision.UpgradeRun)) error {
	return h.addonsError(h.upgrade(ctx, &upgradeproto.UpgradeRequest{What: upgradeproto.What_ADDONS, Addons: addons}, token, version, reference, components, tell))
}

// addonsError adds the remedy to the refusal of an agent that does not know add-ons.
func (h *agentHost) addonsError(err error) error {
	if s, ok := status.FromError(err); ok && s.Code() == codes.InvalidArgument && strings.Contains(s.Message(), "want APPLY or NODE") {
		return fmt.Errorf("the agent of %s comes from an old image and cannot upgrade add-ons: upgrade the image, or run `kubeadm upgrade node phase addon all` on a control plane: %w", h.node, err)
	}
	return err
}

// upgrade is Upgrade of what req names.
func (h *agentHost) upgrade(ctx context.Context, req *upgradeproto.UpgradeRequest, token, version, reference string, components component.Signed, tell func(decision.UpgradeRun)) error {
	req = &upgradeproto.UpgradeRequest{
		Token: token, KubernetesVersion: version, What: req.GetWhat(), Addons: req.GetAddons(), KeepKubelet: req.GetKeepKubelet(), Components: component.ToProto(components.List), ComponentsStatement: components.Statement,
		Configuration: &upgradeproto.Configuration{IgnorePreflightErrors: kubeadm.IgnoredChecks()}, // same as for the join of the machine
	}
	f := &following{host: h, tell: tell, run: decision.UpgradeRun{Version: version, Components: reference, Node: h.node, Phase: "download", InPlace: req.GetWhat() == upgradeproto.What_NODE, Addons: req.GetWhat() == upgradeproto.What_ADDONS, Etcd: etcdOf(token)}}
	cut, enrolled, ready := false, false, false
	for pause := reconnectMin; ; pause = min(2*pause, reconnectMax) {
		before := f.after
		req.After = f.after
		var err error
		if !enrolled {
			err = h.enrol(ctx, version, components)
			if enrolled = err == nil; !enrolled && !wasCut(err) && ctx.Err() == nil {
				return fmt.Errorf("install the release keys and the verifying agent on %s: %w", h.node, words(err))
			}
		}
		if enrolled && !ready {
			err = h.addPackages(ctx, req, f)
			ready = err == nil
		}
		if ready {
			err = f.follow(ctx, req)
		}
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("follow the upgrade of %s: %w", h.node, context.Cause(ctx))
		case !wasCut(err):
			return fmt.Errorf("upgrade %s to Kubernetes %s: %w", h.node, version, words(err))
		}
		if f.after > before {
			pause, cut = reconnectMin, false
		}
		if !cut && h.log != nil {
			h.log.Warn("agent not reachable, will follow the upgrade again", "node", h.node, "err", words(err))
		}
		cut = true
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("follow the upgrade of %s: %w", h.node, context.Cause(ctx))
		case <-t.C:
		}
	}
}

// addPackages has a request upgrade packages of the host, if upgrades in place do that. The agent must report that it
// knows how: one of an older release would take the same request for another one after its restart.
func (h *agentHost) addPackages(ctx context.Context, req *upgradeproto.UpgradeRequest, f *following) error {
	if h.packages == nil || req.GetWhat() == upgradeproto.What_ADDONS || req.GetKeepKubelet() {
		return nil
	}
	wanted, err := h.packages(ctx)
	if err != nil {
		return fmt.Errorf("read whether the packages of %s are upgraded: %w", h.node, err)
	}
	if !wanted {
		return nil
	}
	limited, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	s, err := h.agent.Status(limited, &upgradeproto.StatusRequest{})
	if err != nil {
		return fmt.Errorf("read what the agent of %s can do: %w", h.node, words(err))
	}
	if req.UpgradePackages = s.GetUpgradesPackages(); !req.UpgradePackages {
		f.run.PackagesKept = fmt.Sprintf("the agent of %s is of release %s and does not upgrade packages; `constellation machine add` or `constellation adopt --operator` installs the agent of this release", h.node, s.GetAgentVersion())
		if h.log != nil {
			h.log.Warn("packages not upgraded", "node", h.node, "agent", s.GetAgentVersion())
		}
		f.tell(f.run)
		f.run.PackagesKept = ""
	}
	return nil
}

// following is one call of Upgrade.
type following struct {
	host  *agentHost
	tell  func(decision.UpgradeRun)
	run   decision.UpgradeRun
	stage string
	after uint64 // number of the last line
}

// errFailed is the result of a failed run, which is not retried.
type errFailed struct{ *upgradeproto.Failure }

func (e errFailed) Error() string {
	s := e.GetStage() + ": " + e.GetMessage()
	if r := e.GetRemedy(); r != "" {
		s += " (" + r + ")"
	}
	return s
}

// follow sends one request, and reports progress until the run or the stream ends.
func (f *following) follow(ctx context.Context, req *upgradeproto.UpgradeRequest) error {
	ctx, cancel := context.WithCancel(ctx) // ends the stream
	defer cancel()
	stream, err := f.host.agent.Upgrade(ctx, req)
	if err != nil {
		return err
	}
	for first := true; ; first = false {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return io.ErrUnexpectedEOF // the stream ended without a result
		}
		if err != nil {
			return err
		}
		if first { // a restart of the host would have ended the stream
			f.run.BootID = f.host.bootID(ctx)
		}
		f.after = m.GetSeq()
		if f.run.Started.IsZero() {
			f.run.Started = m.GetTime().AsTime()
		}
		switch k := m.GetKind().(type) {
		case *upgradeproto.UpgradeResponse_Progress:
			f.stage = k.Progress.GetStage()
			// A resumed run starts with the first stage, although it has already changed the host.
			if f.run.Phase != "apply" {
				f.run.Phase = phaseOf(f.stage)
			}
			text := k.Progress.GetState()
			if t := k.Progress.GetText(); t != "" {
				text += ": " + t
			}
			if k.Progress.GetState() == "running" {
				f.run.Line = f.stage
			}
			f.note("agent", text)
		case *upgradeproto.UpgradeResponse_Log:
			f.run.Line = k.Log.GetLine()
			f.note(k.Log.GetSource(), k.Log.GetLine())
		case *upgradeproto.UpgradeResponse_Success:
			f.run.Phase, f.run.Ended = "done", m.GetTime().AsTime()
			f.tell(f.run)
			return nil
		case *upgradeproto.UpgradeResponse_Failure:
			f.run.Phase, f.run.Line, f.run.Ended = "failed", k.Failure.GetMessage(), m.GetTime().AsTime()
			f.tell(f.run)
			return errFailed{k.Failure}
		}
		f.tell(f.run)
	}
}

func (f *following) note(source, line string) {
	if f.host.log != nil {
		f.host.log.Info("upgrade progressed", "node", f.host.node, "stage", f.stage, "source", source, "line", line)
	}
}

// wasCut reports whether a repetition of the same request may succeed.
func wasCut(err error) bool {
	if errors.As(err, new(errFailed)) {
		return false
	}
	switch status.Code(err) {
	case codes.Unavailable, codes.Canceled, codes.DeadlineExceeded, codes.ResourceExhausted, codes.Aborted:
		return true
	}
	return errors.Is(err, io.ErrUnexpectedEOF)
}

// refused is an error of the agent with its message and code.
type refused struct{ error }

func (r refused) Error() string {
	if s, ok := status.FromError(r.error); ok {
		return s.Message()
	}
	return r.error.Error()
}

func (r refused) Unwrap() error { return r.error }

// words returns an error with the agent's own message.
func words(err error) error { return refused{err} }
