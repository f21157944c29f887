package operator

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/operator/decision"
)

// addonsTimeout bounds one attempt to upgrade add-ons, with all retries of the agent. After that other
// attempts follow, with growing pauses.
const addonsTimeout = 30 * time.Minute

// addons returns the images of the add-ons, unless they were read long ago, and the latest run.
func (h *hostView) addons(now time.Time) (decision.Addons, decision.UpgradeRun) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if now.Sub(h.imagesAt) >= staleMembers {
		return decision.Addons{}, h.addonRun
	}
	return h.images, h.addonRun
}

func (h *hostView) setAddons(a decision.Addons, read time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.images, h.imagesAt = a, read
}

func (h *hostView) setAddonRun(r decision.UpgradeRun) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.addonRun = r
}

// addonsAge returns how long ago the images of the add-ons were read.
func (h *hostView) addonsAge(now time.Time) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return now.Sub(h.imagesAt)
}

// renewAddons reads the images of the add-ons.
func (r *nodeVersions) renewAddons() {
	if r.hostView.addonsAge(r.now()) < freshTag {
		return
	}
	r.try(addonsReading, func(ctx context.Context) error {
		asked := r.now()
		var (
			proxy appsv1.DaemonSet
			dns   appsv1.Deployment
		)
		if err := client.IgnoreNotFound(r.live.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: decision.KubeProxy}, &proxy)); err != nil {
			return fmt.Errorf("read DaemonSet %s: %w", decision.KubeProxy, err)
		}
		if err := client.IgnoreNotFound(r.live.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: decision.CoreDNS}, &dns)); err != nil {
			return fmt.Errorf("read Deployment %s: %w", decision.CoreDNS, err)
		}
		r.hostView.setAddons(decision.Addons{
			Read: true, KubeProxy: imageOf(proxy.Spec.Template.Spec, decision.KubeProxy), CoreDNS: imageOf(dns.Spec.Template.Spec, decision.CoreDNS),
		}, asked)
		return nil
	})
}

// imageOf returns the image of a container; empty: there is none of this name.
func imageOf(pod corev1.PodSpec, container string) string {
	for i := range pod.Containers {
		if pod.Containers[i].Name == container {
			return pod.Containers[i].Image
		}
	}
	return ""
}

// upgradeAddons starts an upgrade of add-ons by the host's agent or attaches to it, and follows it to
// its end. Every failure becomes a failed run, also one without a run of the agent: the decision
// chooses the time of the next attempt.
func (r *nodeVersions) upgradeAddons(a decision.Action) {
	r.try(addonsKey, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeoutCause(ctx, addonsTimeout, fmt.Errorf("the agent has not upgraded the add-ons within %s", addonsTimeout))
		defer cancel()
		last, err := r.host.Run(ctx)
		if err != nil {
			return err
		}
		if last = last.OfAddons(); last.RetryMark() != "" && last.Version == a.Version && last.Components == a.Components && !last.Ended.Equal(a.Ended) {
			r.hostView.setAddonRun(last) // it has failed since; Decide chooses the time of the retry
			return nil
		}
		c, err := r.readComponents(ctx, a.Components)
		if err != nil {
			return err
		}
		r.point("before", decision.UpgradeAddons)
		r.log.Info("upgrade of add-ons followed", "node", r.nodeName, "version", a.Version, "addons", a.Addons)
		if !last.Active() { // else the operator that started it has recorded it
			r.recordVersion(ctx, corev1.EventTypeNormal, "AddonsUpgradeStarted", fmt.Sprintf("the agent of %s upgrades %s to those of Kubernetes %s", r.nodeName, a.Addons, a.Version))
		}
		run, names := decision.UpgradeRun{}, strings.Split(a.Addons, ",")
		failed := r.host.UpgradeAddons(ctx, addonsToken(a.Version, a.Components, names, last), a.Version, a.Components, c.Signed, names, func(is decision.UpgradeRun) {
			run = is
			r.hostView.setAddonRun(is)
			r.wake()
		})
		r.counters.action(decision.UpgradeAddons, failed)
		if failed == nil {
			r.point("after", decision.UpgradeAddons)
			r.log.Info("add-ons upgraded", "node", r.nodeName, "version", a.Version, "addons", a.Addons)
			r.recordVersion(ctx, corev1.EventTypeNormal, "AddonsUpgraded", fmt.Sprintf("%s are those of Kubernetes %s", a.Addons, a.Version))
			return nil
		}
		if ctx.Err() != nil && errors.Is(context.Cause(ctx), ctx.Err()) { // the operator ends
			return ctx.Err()
		}
		if run.RetryMark() == "" {
			r.hostView.setAddonRun(decision.UpgradeRun{Addons: true, Version: a.Version, Components: a.Components, Node: r.nodeName, Phase: "failed", Line: failed.Error(), Ended: r.now()})
		}
		r.recordVersion(context.WithoutCancel(ctx), corev1.EventTypeWarning, "AddonsUpgradeFailed", decision.Truncate(failed.Error(), 500))
		return failed
	})
}
