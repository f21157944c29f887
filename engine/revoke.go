package engine

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/revocation"
	"constellation/engine/rollout"
	"constellation/engine/words"
)

// IDs of the steps of `machine revoke`.
const (
	StepRevoke      = "revoke-credentials"
	StepRemove      = "remove-machine"
	StepRemoved     = "wait-for-removal"
	StepReplacement = "wait-for-replacement"
)

// RevokeRequest says which machine is revoked, and how.
type RevokeRequest struct {
	// Node is the name of the machine, which is also that of its Node.
	Node string
	// Replace has a new machine made in its group afterwards.
	Replace bool
	// Reason is recorded, for an audit; it may be empty.
	Reason string
	// Kubeconfig is the path of the file that leads to the cluster; empty means that of the
	// workspace.
	Kubeconfig string
	// Rehearse makes a plan that has no effect.
	Rehearse bool
}

// maxReason bounds the reason, which is kept in the record and shown in one line.
const maxReason = 200

func (r RevokeRequest) check() error {
	if n := len(r.Reason); n > maxReason {
		return &plan.Error{Err: fmt.Errorf("the reason has %d bytes, at most %d are kept", n, maxReason), Remedy: "give a shorter --reason", Exit: plan.ExitUsage}
	}
	if strings.ContainsFunc(r.Reason, func(c rune) bool { return !unicode.IsPrint(c) }) {
		return &plan.Error{Err: errors.New("the reason contains characters that cannot be printed"), Remedy: "give --reason in one line of plain text", Exit: plan.ExitUsage}
	}
	return nil
}

// flags are the arguments that make the same request, with a leading space each.
func (r RevokeRequest) flags() string {
	s := " " + check.ShellQuote(r.Node)
	if r.Replace {
		s += " --replace"
	}
	if r.Reason != "" {
		s += " --reason " + check.ShellQuote(r.Reason)
	}
	if r.Kubeconfig != "" {
		s += " --kubeconfig " + check.ShellQuote(r.Kubeconfig)
	}
	return s
}

// PlanRevoke returns the plan to revoke a machine: its credentials first, then the machine
// and its Node, and then, if asked for, a new machine in its group. It changes nothing.
//
// Findings that forbid the plan are in it: the machine is the only control plane, or etcd
// would lose its quorum without it. The error has ExitUsage if there is no such machine.
func (e *Engine) PlanRevoke(ctx context.Context, r RevokeRequest) (*plan.Plan, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	if r.Kubeconfig == "" {
		if err := e.ws.OnMachines(plan.VerbRevoke); err != nil {
			return nil, err
		}
	}
	i, err := e.watcher(ctx, "revoke machine "+r.Node, WatchRequest{Kubeconfig: r.Kubeconfig})
	if err != nil {
		return nil, err
	}
	if r.Kubeconfig == "" { // the cloud is that of the workspace's cluster
		if c, s, err := e.ws.Load(); err == nil {
			if p, err := e.provider(ctx, c, s); err == nil {
				i.provider = p
			}
		}
	}
	x := &revoking{clusterRun: i, request: r, by: someone(), listed: r.Kubeconfig == "" && i.state.Enrolled()}
	if x.listed && r.Replace {
		return nil, &plan.Error{
			Op: "replace machine " + r.Node, Err: errors.New("its machines are a list, and no other one can be made"), Exit: plan.ExitUsage,
			Remedy: "leave out --replace; then add another machine with `constellation machine add`, and run `constellation init`",
		}
	}
	limited, cancel := context.WithTimeout(ctx, e.limits.api)
	defer cancel()
	v, err := x.see(limited)
	if err != nil {
		return nil, i.clusterError("look up machine "+r.Node, err)
	}
	if !v.exists() && !v.recorded {
		return nil, &plan.Error{Op: "revoke machine " + r.Node, Err: errors.New("there is no such node and no such machine"), Exit: plan.ExitUsage, Remedy: "`constellation status` lists nodes and machines"}
	}
	now := e.now()
	p := &plan.Plan{
		ID: newRunID(plan.VerbRevoke, now), Verb: plan.VerbRevoke, Cluster: i.state.Infrastructure.Name, Node: r.Node, Simulated: e.simulated(), NotAttested: e.notAttested(), Created: now.UTC(), Rehearsal: r.Rehearse,
	}
	p.End.Command = e.command(string(plan.VerbRevoke)) + r.flags()
	p.End.Next = []string{e.command("status")}
	if x.listed {
		p.End.Next = []string{e.command("machine remove " + check.ShellQuote(r.Node) + " --gone"), e.command("init")}
	}
	p.End.Done = fmt.Sprintf("machine %s is revoked and removed", r.Node)
	p.End.Nothing = p.End.Done + " already: nothing to do"
	x.plan = p
	x.judge(v)
	if len(p.Blocked()) > 0 {
		return p, nil
	}
	if err := addSteps(limited, p, x.steps(v)); err != nil {
		return nil, i.clusterError("look up machine "+r.Node, err)
	}
	return p, nil
}

// revoking is one request with what it is about. Steps run one after the other.
type revoking struct {
	*clusterRun
	request RevokeRequest
	by      string
	plan    *plan.Plan
	// listed is whether the machine was enrolled: it stays where it is, and in the list, until its owner takes it out.
	listed bool
}

// revokeView is what the cluster, and the cloud if it was asked, report of one machine.
type revokeView struct {
	entry    revocation.Entry
	recorded bool // the entry is of this machine, and not of an earlier one of its name
	node     *cluster.Node
	nodes    []*cluster.Node
	joins    bool          // it was given a ticket and is no Node yet
	removal  *cluster.Move // nil: there is none
	refill   *cluster.Move
	heir     *cluster.Node // has taken its place; nil: none has
	inCloud  bool
	claims   string // another provider ID that the Node claims; empty: it does not
	later    string // key of a machine that got the name after the recorded one; empty: none has
	// groups are the names of groups by ID, as far as a node or a machine of the cloud has one.
	groups map[string]string
	// machine is the provider ID for the operator, which compares it with the cloud. Without
	// the cloud it is what the Node claims, which is not recorded.
	machine string
}

// group returns the name of the machine's group, or the ID of a group of which nothing has the name.
func (v *revokeView) group() string { return cmp.Or(v.groups[v.entry.Group], v.entry.Group) }

func (v *revokeView) exists() bool { return v.node != nil || v.joins || v.inCloud }

// removed reports whether machine and Node are gone.
func (v *revokeView) removed() bool {
	return v.recorded && !v.entry.Removed.IsZero() && v.node == nil && v.removal == nil
}

// replaced reports whether another node has taken the place and is, or was, Ready.
func (v *revokeView) replaced() bool {
	return v.entry.Replacement != "" || v.heir != nil && v.heir.State == plan.NodeReady
}

func (x *revoking) see(ctx context.Context) (*revokeView, error) {
	name, v := x.request.Node, &revokeView{groups: map[string]string{}}
	record, err := x.cluster.Revoked(ctx)
	if err != nil {
		return nil, err
	}
	ro, err := x.cluster.Rollout(ctx)
	if errors.Is(err, cluster.ErrAbsent) {
		return nil, &plan.Error{Op: "revoke machine " + name, Err: errors.New("the cluster has no NodeVersion, so no operator removes machines"), Remedy: "`constellation init` completes the cluster"}
	}
	if err != nil {
		return nil, err
	}
	if v.nodes, err = x.cluster.Nodes(ctx); err != nil {
		return nil, err
	}
	expected, err := x.cluster.Expected(ctx)
	if err != nil && !errors.Is(err, cluster.ErrAbsent) {
		return nil, err
	}
	now := revocation.Entry{By: x.by, Reason: x.request.Reason}
	entry, recorded := record[name]
	for _, e := range expected {
		if e.Name == name {
			v.joins, now.ProviderID, now.Role = true, e.ProviderID, string(cloud.Worker)
			if e.ControlPlane {
				now.Role = string(cloud.ControlPlane)
			}
		}
	}
	for _, n := range v.nodes {
		v.groups[n.GroupID] = n.Group
		if n.Name == name {
			// Its kubelet writes ID and address, and the record refuses what has them: an honest
			// machine's must not get there.
			v.node = n
			now.Group, now.Role, now.UID = n.GroupID, n.Role, n.UID
		}
	}
	x.seeCloud(ctx, v, &now, entry)
	v.seeMoves(name, ro.Moves)
	v.heir = heirOf(name, v.nodes, ro.Moves)
	v.recorded = recorded && (now.ProviderID == "" || v.later != "" || entry.ProviderID == "" && !entry.Since.IsZero() || cloud.SameMachine(entry.ProviderID, now.ProviderID) || v.claims != "" && entry.ProviderID == v.claims)
	if v.entry = entry; !v.recorded {
		v.entry = now
	}
	v.machine = cmp.Or(v.entry.ProviderID, now.ProviderID)
	if v.machine == "" && v.node != nil {
		// Without the incarnation, which is a claim of the Node as well. The operator compares the
		// machine's name in the cloud before it deletes it.
		v.machine, _ = cloud.SplitKey(v.node.ProviderID)
	}
	return v, nil
}

// seeMoves adds the intents of the operator for the machine called name.
func (v *revokeView) seeMoves(name string, moves []cluster.Move) {
	for i := range moves {
		switch m := &moves[i]; m.Name {
		case revocation.RemovalPrefix + name:
			v.removal = m
		case revocation.RefillPrefix + name:
			if v.refill == nil || v.refill.Leaves {
				v.refill = m
			}
		default:
			// Made instead of a machine that got the refused name.
			if m.Donor == name && !m.Leaves && strings.HasPrefix(m.Name, revocation.RefillPrefix) {
				v.refill = m
			}
		}
	}
}

// seeCloud adds what the cloud returns about the machine: it decides which machine has the name. entry
// is that of the record for the name.
//
// In a cloud that reuses names, several machines can have the name: earlier ones that are being
// deleted, and one that got the name later.
func (x *revoking) seeCloud(ctx context.Context, v *revokeView, now *revocation.Entry, entry revocation.Entry) {
	if x.provider == nil {
		return
	}
	machines, err := x.provider.Machines(ctx)
	if err != nil {
		x.e.log.Debug("machines not listed", "err", err)
	}
	if err != nil && !errors.Is(err, cloud.ErrPartial) {
		machines = nil // a part of them is true, the rest of another error is not
	}
	for _, m := range machines {
		v.groups[m.Group] = m.GroupName
	}
	elsewhere := slices.ContainsFunc(machines, func(m cluster.CloudMachine) bool {
		return m.Name != x.request.Node && cloud.SameMachine(m.Key(), entry.ProviderID)
	})
	machines = slices.DeleteFunc(slices.Clone(machines), func(m cluster.CloudMachine) bool { return m.Name != x.request.Node || m.Stage == plan.NodeGone })
	if len(machines) == 0 {
		return
	}
	open := entry.ProviderID != "" && entry.Removed.IsZero() // its removal has not ended
	rank := func(m cluster.CloudMachine) int {
		switch {
		case open && cloud.SameMachine(entry.ProviderID, m.Key()):
			return 3
		case v.node != nil && cloud.SameMachine(v.node.ProviderID, m.Key()):
			return 2
		case m.State != cloud.Terminating:
			return 1
		}
		return 0
	}
	m := slices.MaxFunc(machines, func(a, b cluster.CloudMachine) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), a.Created.Compare(b.Created), cmp.Compare(a.Key(), b.Key()))
	})
	another := entry.ProviderID != "" && !elsewhere && !cloud.SameMachine(entry.ProviderID, m.Key())
	if another && !v.joins && (v.node == nil || cloud.SameMachine(v.node.ProviderID, entry.ProviderID)) && !x.e.now().After(entry.Until) {
		// The join service refuses the name, so this machine has no credentials: nothing of it is
		// to be revoked.
		v.later = m.Key()
		return
	}
	// The cloud decides which machine it is: a Node can claim another one.
	if v.inCloud = true; v.node != nil && !cloud.SameMachine(v.node.ProviderID, m.Key()) {
		v.claims = v.node.ProviderID
	}
	now.ProviderID, now.Group, now.Role = m.Key(), m.Group, string(m.Role)
	if m.IP.IsValid() {
		now.Address = m.IP.String()
	}
}

// heirOf returns the node that has taken the place of another one and stays; nil if there
// is none. A rollout may have made one that it gives up now.
func heirOf(name string, nodes []*cluster.Node, moves []cluster.Move) *cluster.Node {
	leaves := map[string]bool{}
	for _, m := range moves {
		if m.Leaves {
			leaves[m.Node] = true
		}
		if m.Donor == name && !m.Leaves && !strings.HasPrefix(m.Name, revocation.RefillPrefix) && m.Machine != "" {
			return nil // not settled yet
		}
	}
	for _, n := range nodes {
		if n.Donor == name && n.Name != name && !leaves[n.Name] {
			return n
		}
	}
	return nil
}

// StepRevocations is the ID of the step that removes expired entries of the record of revoked
// machines. Only plans have it where an entry has expired.
const StepRevocations = "revocations"

// expired returns the sorted names of the nodes whose revocation has expired.
//
// The console removes their entries, and nothing in the cluster may: an admission policy cannot
// compare an entry with the time, so a program that may remove one may remove all.
func (i *clusterRun) expired(ctx context.Context) (names []string, err error) {
	_, err = i.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
		list, err := k.Revoked(ctx)
		names = list.Expired(i.e.now())
		return true, err
	})
	return names, err
}

func (i *clusterRun) revocationsStep(nodes []string) plan.Step {
	return plan.Step{
		ID: StepRevocations, Title: "Remove expired revocations",
		Effect: fmt.Sprintf("ConfigMap %s/%s refuses %s no longer: no certificate of the revoked machines is valid any more", revocation.Namespace, revocation.ConfigMap, words.And(nodes)),
		Done: func(ctx context.Context) (bool, error) {
			left, err := i.expired(ctx)
			return err == nil && len(left) == 0, err
		},
		Run: func(ctx context.Context, r *plan.Reporter) error {
			return i.inCluster(ctx, r, "remove expired revocations", func(ctx context.Context, k Cluster) error { return k.ExpireRevocations(ctx, i.e.now()) })
		},
	}
}

// judge finds what forbids the removal, and what must be known before it is accepted.
func (x *revoking) judge(v *revokeView) {
	name, p := x.request.Node, x.plan
	find := func(f plan.Finding) { p.Findings = append(p.Findings, f) }
	if v.machine == "" && v.exists() {
		find(plan.Finding{
			ID: "machine-unknown", Severity: plan.Block, Source: "cloud", Title: fmt.Sprintf("the cloud machine of %s is unknown", name),
			Detail: "its Node has no providerID, and the cloud was not asked or does not list it", Remedy: "run the command in the workspace of the cluster, which has access to the cloud",
		})
	}
	if v.claims != "" {
		find(plan.Finding{
			ID: "node-claims-other-machine", Severity: plan.Warn, Source: "cluster", Title: fmt.Sprintf("Node %s claims machine %s, and according to the cloud it is %s", name, v.claims, v.machine),
			Detail: "the machine with the name that the cloud reports is removed; the other one is not changed",
		})
	}
	if v.entry.Role == string(cloud.ControlPlane) && !v.removed() {
		x.judgeEtcd(v)
	}
	if x.request.Replace && v.entry.Group == "" && !v.replaced() {
		find(plan.Finding{
			ID: "group-unknown", Severity: plan.Block, Source: "cloud", Title: "the scaling group of " + name + " is not known, so no machine can be made in it",
			Remedy: "run the command in the workspace of the cluster, or leave `--replace` out",
		})
	}
	if v.removed() {
		return
	}
	until := v.entry.Until
	if until.IsZero() {
		until = x.e.now().Add(revocation.CertificateLifetime)
	}
	p.Notes = append(p.Notes,
		"The machine gets no shutdown, and its pods are deleted regardless of PodDisruptionBudgets. Data on its disks is lost.",
		fmt.Sprintf("Its client certificate may be valid until %s. Until then every write with it is refused; a node without pods keeps its read permissions.", until.UTC().Format("2006-01-02")),
		"Rotate the secrets of its pods: the attacker who controls the machine has them.",
	)
	if x.request.Replace {
		p.Notes = append(p.Notes, fmt.Sprintf("The new machine gets another name, and neither labels nor taints of %s: the machine could have written them itself.", name))
	}
}

// judgeEtcd finds whether the other control planes can go on without this one. Whether
// their members of etcd are healthy the operator and the agent look at again.
func (x *revoking) judgeEtcd(v *revokeView) {
	name := x.request.Node
	var others, sick, closed []string
	for _, n := range v.nodes {
		if n.Role != string(cloud.ControlPlane) || n.Name == name {
			continue
		}
		others = append(others, n.Name)
		if n.State != plan.NodeReady {
			sick = append(sick, n.Name)
		}
		if n.State != plan.NodeReady || n.Cordoned {
			closed = append(closed, n.Name)
		}
	}
	find := func(f plan.Finding) {
		f.Source = "cluster"
		x.plan.Findings = append(x.plan.Findings, f)
	}
	healthy, quorum := len(others)-len(sick), len(others)/2+1
	switch {
	case len(others) == 0:
		find(plan.Finding{
			ID: "last-control-plane", Severity: plan.Block, Title: name + " is the only control plane: without it there is no cluster",
			Remedy: "create a new cluster and restore a backup into it: `constellation backup restore`",
		})
		return
	case healthy < quorum:
		find(plan.Finding{
			ID: "etcd-quorum", Severity: plan.Block, Title: fmt.Sprintf("without %s etcd has %d healthy of %s, and needs %d", name, healthy, words.Count(len(others), "member"), quorum),
			Detail: "not Ready: " + strings.Join(sick, ", "), Remedy: fmt.Sprintf("repair %s first; `constellation status` shows its problem", sick[0]),
		})
		return
	case len(closed) == len(others) && v.removal == nil:
		// The removal evicts the operator from this machine, and it must run on another one to go on.
		find(plan.Finding{
			ID: "control-planes-cordoned", Severity: plan.Block, Title: "no other control plane takes the pods of the operator, which removes the machine",
			Detail: "cordoned: " + strings.Join(closed, ", "), Remedy: fmt.Sprintf("wait until its upgrade or removal has ended, or `kubectl uncordon %s`", closed[0]),
		})
		return
	case len(sick) > 0:
		find(plan.Finding{
			ID: "control-plane-not-ready", Severity: plan.Warn, Title: fmt.Sprintf("%s is not Ready: the machine is removed when every other member of etcd is healthy", strings.Join(sick, ", ")),
			Remedy: fmt.Sprintf("bring %s back, so that the removal does not wait", sick[0]),
		})
	}
	find(plan.Finding{
		ID: "control-plane-keys", Severity: plan.Warn, Title: name + " is a control plane and has the keys of the cluster's certificate authorities",
		Detail: "with these keys an attacker can issue certificates for any identity; a revocation does not invalidate them",
		Remedy: "if root on it was lost, create a new cluster and restore a backup into it",
	})
}

// steps are all steps; each observes whether its effect is there.
func (x *revoking) steps(v *revokeView) []plan.Step {
	name, e := x.request.Node, v.entry
	first := ""
	if e.Role == string(cloud.ControlPlane) {
		first = "its member of etcd is removed, then "
	}
	gone, warning, confirmed := "machine and Node are deleted", "The machine and its disks are deleted, and it can never join again.", "the cloud has confirmed that it is gone, and the Node is deleted"
	if x.listed {
		gone, confirmed = "its Node is deleted", "the Node is deleted"
		warning = "The machine stays as it is: take it from the network, and reinstall it. It can never join again."
	}
	steps := []plan.Step{
		{
			ID: StepRevoke, Title: "Revoke the credentials of " + name,
			Effect: fmt.Sprintf("ConfigMap %s/%s names %s, its machine %s and its address %s; its bootstrap token and its JoiningNode are deleted; the join service refuses it", revocation.Namespace, revocation.ConfigMap, name, cmp.Or(v.machine, "(unknown)"), cmp.Or(e.Address, "(the cloud's)")),
			Done:   x.done(func(v *revokeView) bool { return v.recorded && (v.removal != nil || v.removed()) }),
			Run:    x.revoke,
		},
		{
			ID: StepRemove, Title: "Have the machine removed",
			Effect:  fmt.Sprintf("Node %s is tainted, and its pods are deleted; %s%s, without a drain", name, first, gone),
			Warning: warning,
			Final:   true,
			Done: x.done(func(v *revokeView) bool {
				return v.recorded && (v.removal != nil || v.removed()) && (!x.request.Replace || v.refill != nil || v.heir != nil || v.replaced())
			}),
			Run: x.remove,
		},
		{
			ID: StepRemoved, Title: "Wait until the machine is gone", Effect: confirmed,
			Done: x.done((*revokeView).removed), Run: x.waitRemoved,
		},
	}
	if x.request.Replace {
		steps = append(steps, plan.Step{
			ID: StepReplacement, Title: "Wait until its replacement is Ready",
			Effect: fmt.Sprintf("a new machine in group %s has joined and is Ready, so the group has as many as before", v.group()),
			Done:   x.done(func(v *revokeView) bool { return v.recorded && v.entry.Replacement != "" }),
			Run:    x.waitReplaced,
		})
	}
	return steps
}

func (x *revoking) done(is func(*revokeView) bool) func(context.Context) (bool, error) {
	return func(ctx context.Context) (bool, error) {
		return x.glance(ctx, func(ctx context.Context, _ Cluster) (bool, error) {
			v, err := x.see(ctx)
			return err == nil && is(v), err
		})
	}
}

func (x *revoking) revoke(ctx context.Context, r *plan.Reporter) error {
	return x.inCluster(ctx, r, "revoke the credentials of "+x.request.Node, func(ctx context.Context, k Cluster) error {
		v, err := x.see(ctx)
		if err != nil {
			return err
		}
		if !v.recorded {
			v.entry.Since = x.e.now()
			v.entry.Until = v.entry.Since.Add(revocation.CertificateLifetime)
		}
		if err := k.Revoke(ctx, x.request.Node, v.entry); err != nil {
			return err
		}
		r.Send(plan.Event{Kind: plan.KindLog, Source: "revocation", Level: "info", Node: x.request.Node, Text: fmt.Sprintf("%s was revoked by %s at %s", x.request.Node, said(v.entry), v.entry.Since.UTC().Format(time.RFC3339))})
		return nil
	})
}

// said is who has revoked a machine, and why.
func said(e revocation.Entry) string {
	if e.Reason == "" {
		return e.By
	}
	return e.By + ": " + e.Reason
}

// refillWithin bounds how long after the command a new machine may be created.
const refillWithin = 30 * time.Minute

func (x *revoking) remove(ctx context.Context, r *plan.Reporter) error {
	name := x.request.Node
	return x.inCluster(ctx, r, "have machine "+name+" removed", func(ctx context.Context, k Cluster) error {
		v, err := x.see(ctx)
		if err != nil {
			return err
		}
		// The new machine is recorded first: the operator makes it after the removal, whatever
		// becomes of this program in between.
		if x.request.Replace && v.refill == nil && v.heir == nil && !v.replaced() {
			b := make([]byte, 12)
			rand.Read(b)
			if err := k.RefillMachine(ctx, name, v.entry, hex.EncodeToString(b), x.e.now().Add(refillWithin)); err != nil {
				return err
			}
		}
		if v.removal != nil || v.removed() {
			return nil
		}
		e := v.entry
		e.ProviderID = v.machine
		return k.RemoveMachine(ctx, name, e)
	})
}

// follow reports what happens in the cluster until over does not return false.
func (x *revoking) follow(ctx context.Context, r *plan.Reporter, op string, over func(*revokeView) (bool, error)) error {
	return x.followRollout(ctx, r, x.cluster, func(*rollout.View) (bool, error) {
		limited, cancel := context.WithTimeout(ctx, x.e.limits.glance)
		defer cancel()
		v, err := x.see(limited)
		switch {
		case ctx.Err() != nil:
			return false, ctx.Err()
		case errors.Is(err, cluster.ErrDenied):
			return false, x.clusterError(op, err)
		case err != nil:
			x.e.log.Debug("machine not seen", "node", x.request.Node, "err", err)
			return false, nil
		}
		return over(v)
	})
}

func (x *revoking) waitRemoved(ctx context.Context, r *plan.Reporter) error {
	name := x.request.Node
	err := x.follow(ctx, r, "wait until machine "+name+" is gone", func(v *revokeView) (bool, error) {
		return v.node == nil && v.removal == nil && (x.listed || !v.inCloud), nil
	})
	if err != nil {
		return err
	}
	// A ticket issued while the record was written could have left a token. By now the join
	// service has read the record, and the machine is gone.
	return x.note(ctx, r, func(e *revocation.Entry) { e.Removed = x.e.now() })
}

// note changes the entry of the machine.
func (x *revoking) note(ctx context.Context, r *plan.Reporter, change func(*revocation.Entry)) error {
	return x.inCluster(ctx, r, "record the removal of machine "+x.request.Node, func(ctx context.Context, k Cluster) error {
		all, err := k.Revoked(ctx)
		if err != nil {
			return err
		}
		e, ok := all[x.request.Node]
		if !ok {
			return &plan.Error{Op: "record the removal of machine " + x.request.Node, Err: errors.New("its entry was removed meanwhile"), Remedy: "run the same command again"}
		}
		change(&e)
		return k.Revoke(ctx, x.request.Node, e)
	})
}

func (x *revoking) waitReplaced(ctx context.Context, r *plan.Reporter) error {
	name, heir := x.request.Node, ""
	op := "wait for the replacement of " + name
	err := x.follow(ctx, r, op, func(v *revokeView) (bool, error) {
		switch {
		case v.heir != nil && v.heir.State == plan.NodeReady:
			heir = v.heir.Name
			return true, nil
		case v.heir == nil && v.later != "" && (v.refill == nil || v.refill.Leaves):
			// Otherwise the operator creates another machine while this one has the name. The intent
			// in the cluster shows that, whichever process requested the machine.
			return false, &plan.Error{
				Op:     op,
				Err:    fmt.Errorf("the cloud gave the name %s to the new machine %s, and the record refuses this name until %s", name, v.later, v.entry.Until.UTC().Format("2006-01-02")),
				Remedy: fmt.Sprintf("create one more machine in group %s while %s exists, so that it gets another name; the operator deletes %s 30 minutes after its creation", v.group(), v.later, v.later),
			}
		case v.heir == nil && (v.refill == nil || v.refill.Leaves):
			return false, &plan.Error{Op: op, Err: errors.New("no machine was created in time, or it did not join in time"), Remedy: "read `kubectl -n constellation-system logs deploy/constellation-operator`; run the same command again for another machine"}
		}
		return false, nil
	})
	if err != nil {
		return err
	}
	x.plan.End.Done = fmt.Sprintf("machine %s is revoked and removed; %s has taken its place and is Ready", name, heir)
	r.Conclude(heir + " has taken its place and is Ready")
	return x.note(ctx, r, func(e *revocation.Entry) { e.Replacement = heir })
}
