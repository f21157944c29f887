package decision

import (
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/version"
	"constellation/operator/api/v1alpha1"
)

// kubeadm upgrades its add-ons, CoreDNS and kube-proxy, when it upgrades the last control plane. It does
// not when the last control plane is replaced, because a join changes no add-on. Then the agent of a
// control plane runs the phases of the add-ons. No node waits for that: a kube-proxy may be older than
// its API server.
//
// kubeadm would create an add-on that a user has removed. So only existing ones are upgraded.

// Names of the add-ons, as in kube-system and in requests to the agent.
const (
	CoreDNS   = "coredns"
	KubeProxy = "kube-proxy"
)

// Addons are the images of kubeadm's add-ons, as last read.
type Addons struct {
	Read               bool
	CoreDNS, KubeProxy string // empty: the cluster does not have it
}

// Phases of the add-ons in the status.
const (
	addonsUpgrading = "upgrading"
	addonsDone      = "done"
	addonsFailed    = "failed"
)

// addonsRetry is the longest pause before a retry, and the longest time that Ready waits.
const addonsRetry = time.Hour

// addonsGate reports whether Ready waits for the add-ons: until the first attempt has failed, or takes too
// long.
func (x *observed) addonsGate(a *v1alpha1.AddonsProgress) bool {
	return x.addonsAre(a, addonsUpgrading) && !x.stopped() && a.NextTry.IsZero() && x.w.Now.Before(a.Since.Add(addonsRetry))
}

// upgradeAddons brings the add-ons to the target after the last control plane, once per target.
func (d *Decision) upgradeAddons() {
	want, run := d.spec.KubernetesComponentsReference, d.w.AddonRun.OfAddons()
	d.addons = d.w.Before.Addons
	if d.addonsAre(d.addons, addonsDone) || !d.published(v1alpha1.ControlPlaneRole) || !d.must(ruleAddonsLast, d.controlPlanesDone) || d.stopped() {
		return
	}
	next := v1alpha1.AddonsProgress{Components: want, Phase: addonsUpgrading, Since: metav1.NewTime(d.w.Now.Truncate(time.Second))}
	if b := d.w.Before.Addons; b != nil && b.Components == want {
		next.Since, next.NextTry = b.Since, b.NextTry
	}
	if !d.aimsAt(run) {
		run = UpgradeRun{}
	}
	if run.Phase == addonsDone {
		next.Phase, d.addons = addonsDone, &next
		return
	}
	if d.addonsPause(run, &next) {
		d.addons = &next
		return
	}
	d.addonsWanted = true
	if !d.w.Addons.Read {
		return
	}
	names := d.outdatedAddons()
	if len(names) == 0 {
		next.Phase, d.addons = addonsDone, &next
		return
	}
	n := d.Nodes[d.w.LeaderNode] // the operator has the socket of its own machine
	if n == nil || !n.Ready || n.Role != v1alpha1.ControlPlaneRole || d.leaves(n) {
		return // another replica is about to lead
	}
	if run.Active() {
		next.Message = Truncate(run.Line, 100)
	}
	d.addons = &next
	if d.when(ruleAddons, true) {
		d.do(Action{Kind: UpgradeAddons, Node: n.Name, Version: d.spec.KubernetesClusterVersion, Components: want, Addons: strings.Join(names, ","), Ended: run.Ended})
	}
}

// addonsPause reports whether a failed attempt is not retried yet, and sets next to what the status
// reports. The pause is as long as the attempts have taken so far, within limits. An agent that does not
// know the request is asked again after each pause, because another image may have replaced it.
func (x *observed) addonsPause(run UpgradeRun, next *v1alpha1.AddonsProgress) bool {
	switch b := x.w.Before.Addons; {
	case run.Phase == addonsFailed && run.Ended.IsZero():
		return false // it was interrupted
	case run.Phase == addonsFailed:
		pause := min(max(run.Ended.Sub(next.Since.Time), UpgradeRetry), addonsRetry)
		next.Message, next.NextTry = Truncate(run.Line, 200), metav1.NewTime(run.Ended.Add(pause).Truncate(time.Second))
	case run.Phase == "" && x.addonsAre(b, addonsFailed): // another leader has seen it fail
		next.Message, next.NextTry = b.Message, b.NextTry
	default:
		return false
	}
	next.Phase = addonsFailed
	return x.w.Now.Before(next.NextTry.Time) && !retryRequested(x.Nodes[run.Node], run)
}

// addonsAre reports whether a has the phase for the target.
func (x *observed) addonsAre(a *v1alpha1.AddonsProgress, phase string) bool {
	return a != nil && a.Components == x.spec.KubernetesComponentsReference && a.Phase == phase
}

// WantsAddons reports whether the images of the add-ons decide what happens next.
func (d *Decision) WantsAddons() bool { return d.addonsWanted }

// outdatedAddons returns the add-ons that kubeadm must upgrade. kubeadm upgrades CoreDNS before
// kube-proxy, so a kube-proxy of the target's version shows that it has upgraded both. Without a
// kube-proxy of kubeadm, CoreDNS is outdated if the status records that the add-ons followed another
// target. Without such a record it is not: an update of the operator alone changes no add-on.
func (x *observed) outdatedAddons() (names []string) {
	outdated := x.w.Before.Addons != nil
	if is, ok := kubeProxyVersion(x.w.Addons.KubeProxy); ok {
		want, err := version.Parse(x.spec.KubernetesClusterVersion)
		if outdated = err == nil && is.Less(want); outdated {
			names = append(names, KubeProxy)
		}
	}
	if outdated && imageName(x.w.Addons.CoreDNS) == CoreDNS {
		names = append(names, CoreDNS)
	}
	slices.Sort(names)
	return names
}

// kubeProxyVersion returns the version of kube-proxy's image. ok is false if it is not an image of
// kubeadm: the user deploys kube-proxy, and kubeadm does not change it.
func kubeProxyVersion(image string) (is version.Version, ok bool) {
	if imageName(image) != KubeProxy {
		return is, false
	}
	image, _, _ = strings.Cut(image, "@")
	_, tag, _ := strings.Cut(image[strings.LastIndexByte(image, '/')+1:], ":")
	is, err := version.Parse(tag)
	return is, err == nil
}

// imageName returns the last part of the name of an image, without its tag and digest.
func imageName(image string) string {
	image, _, _ = strings.Cut(image, "@")
	name, _, _ := strings.Cut(image[strings.LastIndexByte(image, '/')+1:], ":")
	return name
}
