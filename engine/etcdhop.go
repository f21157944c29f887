package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/words"
	"constellation/internal/delay"
)

// IDs of the steps about etcd.
const (
	StepEtcdTag     = "etcd-tag"
	StepEtcdMembers = "etcd-members"
)

// etcdSteps returns the step that writes the tag of etcd's image into kubeadm's configuration, or
// removes the one that an earlier hop wrote. kubeadm reads it where it makes the manifests of a
// control plane. Other targets need no step.
//
// The target names the tag that this program set. Another tag in the configuration is a user's: it
// is never removed, and a hop that needs another one fails.
func (p *prepareRun) etcdSteps() []plan.Step {
	from, to := p.now.Target.Etcd, p.target.Etcd
	if from == to {
		return nil
	}
	s := plan.Step{
		ID: StepEtcdTag, Title: "Set the tag of etcd's image",
		Effect: "etcd.local.imageTag of ConfigMap kubeadm-config is " + to + "; control planes get it when they are replaced or upgraded",
		Done: func(ctx context.Context) (bool, error) {
			return p.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
				is, err := k.EtcdTag(ctx)
				return is == to || to == "" && is != from, err
			})
		},
		Run: func(ctx context.Context, r *plan.Reporter) error {
			return p.inCluster(ctx, r, "set the tag of etcd's image", func(ctx context.Context, k Cluster) error {
				err := k.SetEtcdTag(ctx, from, to)
				if errors.Is(err, cluster.ErrConflict) {
					return &plan.Error{
						Op: "set the tag of etcd's image", Err: err, Exit: plan.ExitBlocked,
						Remedy: "remove etcd.local.imageTag with `kubectl -n kube-system edit configmap kubeadm-config`, or set it to " + to + ", then run the same command again",
					}
				}
				return err
			})
		},
	}
	if to == "" {
		s.Title = "Remove the tag of etcd's image"
		s.Effect = "etcd.local.imageTag of ConfigMap kubeadm-config is no longer " + from + ": etcd is that of Kubernetes " + p.target.Kubernetes
	}
	return []plan.Step{s}
}

// removesEtcdTag reports whether the target ends a hop of etcd. The tag may be removed only together
// with setting the target: a control plane that joined in between would get an older etcd than the
// old target names, and the etcd of the next Kubernetes may not start beside it.
func (p *prepareRun) removesEtcdTag() bool {
	return p.now.Target.Etcd != "" && p.target.Etcd == ""
}

// membersSteps returns the step that verifies the version of each member of etcd after the rollout.
func (a *applyRun) membersSteps() []plan.Step {
	if a.etcd.IsZero() {
		return nil
	}
	return []plan.Step{{
		ID: StepEtcdMembers, Title: "Verify the members of etcd", Effect: "every member runs etcd " + a.etcd.String(),
		Done: func(ctx context.Context) (bool, error) {
			if a.waited {
				return false, nil // a rollout is reported as verified, not as skipped
			}
			return a.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
				m, err := a.lookAtMembers(ctx, k)
				if err == nil && m.wait == "" {
					a.plan.End.Etcd = m.lines()
				}
				return err == nil && m.wait == "", err
			})
		},
		Run: a.verifyMembers,
	}}
}

// members is one observation of the members of etcd.
type members struct {
	each    []cluster.EtcdMember
	wait    string // description of missing members or versions; empty: the check passed
	unknown bool   // the operator reports no member
}

// lookAtMembers compares the members, as the operator reports them, with the control planes and with
// the version of the hop, or with the tag that a user has set.
func (a *applyRun) lookAtMembers(ctx context.Context, k Cluster) (m members, err error) {
	t, err := k.NodeTarget(ctx)
	if err != nil {
		return m, err
	}
	nodes, err := k.Nodes(ctx)
	if err != nil {
		return m, err
	}
	want := a.etcd
	if tag, err := k.EtcdTag(ctx); err != nil {
		return m, err
	} else if tag != "" {
		want = cluster.EtcdVersion(tag)
	}
	m.each, m.unknown = t.Members, len(t.Members) == 0
	m.wait = missing(t.Members, nodes, want)
	return m, nil
}

// missing returns what the members lack to be those of the control planes with a version of etcd, and
// with data in its format; empty if nothing.
func missing(members []cluster.EtcdMember, nodes []*cluster.Node, want version.Version) string {
	var lacks []string
	for _, n := range nodes {
		if n.Role != cluster.ControlPlaneRole {
			continue
		}
		at := slices.IndexFunc(members, func(m cluster.EtcdMember) bool { return m.Node == n.Name })
		switch {
		case at < 0:
			lacks = append(lacks, "the member of "+n.Name+" is not reported")
		case cluster.EtcdVersion(members[at].Version).Less(want):
			lacks = append(lacks, fmt.Sprintf("%s runs etcd %s, want %s", n.Name, members[at].Version, want))
		case members[at].Storage != "" && !cluster.EtcdVersion(members[at].Storage).SameMinor(want):
			lacks = append(lacks, fmt.Sprintf("the data of %s has the format of etcd %s, want %s", n.Name, members[at].Storage, want.MinorString()))
		}
	}
	for _, m := range members {
		if !slices.ContainsFunc(nodes, func(n *cluster.Node) bool { return n.Name == m.Node }) {
			lacks = append(lacks, m.Node+" is a member without a node")
		}
	}
	return strings.Join(lacks, "; ")
}

// verifyMembers waits until all members of etcd have the version of the hop. It changes nothing.
func (a *applyRun) verifyMembers(ctx context.Context, r *plan.Reporter) error {
	k, err := a.connect(ctx)
	if err != nil {
		return err
	}
	end := a.e.now().Add(a.e.limits.members)
	for {
		limited, stop := context.WithTimeout(ctx, a.e.limits.glance)
		m, err := a.lookAtMembers(limited, k)
		stop()
		late := a.e.now().After(end)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && late:
			return a.clusterError("verify the members of etcd", err)
		case err != nil:
			a.e.log.Debug("members of etcd not read", "err", err)
		case m.wait == "":
			r.Wait("", "", "")
			a.plan.End.Etcd = m.lines()
			r.Conclude("Verified " + words.Count(len(m.each), "member") + " of etcd " + a.etcd.String())
			return nil
		case late && m.unknown:
			r.Conclude("Members of etcd: not checked, because the operator reports none")
			return nil
		case late:
			return &plan.Error{
				Op: "verify the members of etcd", Err: errors.New(m.wait),
				Remedy: "read the log of the member with `kubectl -n kube-system logs etcd-NODE`, then run the same command again",
			}
		default:
			r.Wait("etcd", "", m.wait)
		}
		if !delay.For(ctx, a.e.limits.poll) {
			return ctx.Err()
		}
	}
}

// lines describes each member.
func (m *members) lines() (out []string) {
	for _, x := range m.each {
		s := x.Node + ": etcd " + x.Version
		if x.Storage != "" {
			s += ", storage version " + x.Storage
		}
		out = append(out, s)
	}
	return out
}
