//go:build linux

package operator

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"

	"constellation/engine/component"
	"constellation/operator/decision"
)

var bothAddons = []string{"coredns", "kube-proxy"}

// A real agent upgrades the add-ons. Its run is neither one of the cluster's Kubernetes nor one of a
// node.
func TestAddonsThroughARealAgent(t *testing.T) {
	rig := newHostRig(t)
	for _, pod := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"} {
		b, err := os.ReadFile(filepath.Join(rig.dir, "manifests-"+newKubernetes, pod+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		rig.write("root/etc/kubernetes/manifests/"+pod+".yaml", string(b), 0o600)
	}
	rig.up()
	h := rig.client()
	var progress progressLog
	token := addonsToken(newKubernetes, refB, bothAddons, decision.UpgradeRun{})
	if err := h.UpgradeAddons(t.Context(), token, newKubernetes, refB, rig.components(newKubernetes), bothAddons, progress.record); err != nil {
		t.Fatal(err)
	}
	if p := progress.phases(); len(p) == 0 || p[len(p)-1] != "done" {
		t.Errorf("reported %v", p)
	}
	run, err := h.Run(t.Context())
	if err != nil || !run.Addons || run.Phase != "done" || run.Components != refB || run.OfCluster() != (decision.UpgradeRun{}) || run.OfAddons() != run {
		t.Errorf("run %+v, %v", run, err)
	}
	h.what = 2 // a node that is upgraded in place
	if run, err := h.Run(t.Context()); err != nil || run != (decision.UpgradeRun{}) {
		t.Errorf("run of the node %+v, %v", run, err)
	}
	if b, err := os.ReadFile(filepath.Join(rig.dir, "ctl/runs")); err != nil || string(b) != "node\nnode\n" {
		t.Errorf("kubeadm ran %q, %v", b, err)
	}
	if other := addonsToken(newKubernetes, refB, bothAddons[:1], decision.UpgradeRun{}); other == token || len(token) > 128 {
		t.Errorf("tokens %s and %s", token, other)
	}
}

// addonsHost is the agent of a control plane that upgrades add-ons with an outcome.
type addonsHost struct {
	host
	mu      sync.Mutex
	run     decision.UpgradeRun
	outcome error
	tokens  []string
}

func (h *addonsHost) Run(context.Context) (decision.UpgradeRun, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.run, nil
}

func (h *addonsHost) UpgradeAddons(_ context.Context, token, version, reference string, _ component.Signed, _ []string, tell func(decision.UpgradeRun)) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tokens = append(h.tokens, token)
	if h.outcome == nil {
		h.run = decision.UpgradeRun{Addons: true, Version: version, Components: reference, Node: "cp-1", Phase: "done", Ended: time.Now()}
		tell(h.run)
	}
	return h.outcome
}

// The images decide, and they are read past the cache. An agent without the request fails with a
// message that names the remedy, and is asked again after a pause.
func TestAddonsOfACluster(t *testing.T) {
	c := newCluster(t)
	labels := map[string]string{"k8s-app": "x"}
	pod := func(name, image string) corev1.PodTemplateSpec {
		return corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: name, Image: image}}}}
	}
	old := &agentHost{node: "cp-1"}
	refusal := status.Error(codes.InvalidArgument, "what: want APPLY or NODE")
	h := &addonsHost{}
	r := &nodeVersions{client: c.admin, live: c.admin, host: h, log: slog.New(slog.DiscardHandler), nodeName: "cp-1", events: events.NewFakeRecorder(100), spawn: func(do func(context.Context)) { do(t.Context()) }}
	counters, err := newCounters()
	if err != nil {
		t.Fatal(err)
	}
	r.counters = counters
	r.init()
	read := func(want decision.Addons) {
		t.Helper()
		r.hostView.setAddons(decision.Addons{}, time.Time{})
		r.retries.hurry(addonsReading)
		r.renewAddons()
		if got, _ := r.hostView.addons(r.now()); got != want {
			t.Errorf("read %+v, want %+v", got, want)
		}
	}
	read(decision.Addons{Read: true})
	c.create(&appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "kube-proxy"},
		Spec:       appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: pod("kube-proxy", "k/kube-proxy:v1.35.4")},
	})
	c.create(&appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "coredns"},
		Spec:       appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: pod("coredns", "k/coredns:v1.13.1")},
	})
	read(decision.Addons{Read: true, KubeProxy: "k/kube-proxy:v1.35.4", CoreDNS: "k/coredns:v1.13.1"})
	if stale, _ := r.hostView.addons(r.now().Add(2 * staleMembers)); stale.Read {
		t.Error("an old observation counts")
	}

	c.create(&corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: refB},
		Data:       map[string]string{"cluster-version": newKubernetes, "components": "[]"},
	})
	a := decision.Action{Kind: decision.UpgradeAddons, Node: "cp-1", Version: newKubernetes, Components: refB, Addons: "coredns,kube-proxy"}
	h.outcome = old.addonsError(refused{refusal})
	r.upgradeAddons(a)
	_, run := r.hostView.addons(r.now())
	if run.Phase != "failed" || run.Components != refB || run.RetryMark() == "" || !strings.Contains(run.Line, "comes from an old image") || !strings.Contains(run.Line, "kubeadm upgrade node phase addon all") {
		t.Errorf("an old agent: %+v", run)
	}
	if err := old.addonsError(errors.New("other")); err.Error() != "other" {
		t.Errorf("another error: %v", err)
	}
	h.outcome = nil
	r.retries.hurry(addonsKey)
	r.upgradeAddons(a)
	if _, run := r.hostView.addons(r.now()); run.Phase != "done" {
		t.Errorf("a new agent: %+v", run)
	}
	// A failure that another operator has seen is not repeated before Decide wants it.
	h.run.Phase, h.run.Line = "failed", "no space"
	r.retries.hurry(addonsKey)
	r.upgradeAddons(a)
	if _, run := r.hostView.addons(r.now()); run.Phase != "failed" || len(h.tokens) != 2 {
		t.Errorf("run %+v after %d requests", run, len(h.tokens))
	}
	a.Ended = h.run.Ended
	r.retries.hurry(addonsKey)
	r.upgradeAddons(a)
	if len(h.tokens) != 3 || slices.Contains(h.tokens[:2], h.tokens[2]) {
		t.Errorf("tokens %v: a retry needs its own", h.tokens)
	}
}
