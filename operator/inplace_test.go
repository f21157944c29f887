//go:build linux

package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/agent/upgradeproto"
	"constellation/engine/component"
	"constellation/engine/sandbox/controlplane/kubelettest"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

// relayOf runs the relay of a node to an agent and returns where it listens.
func relayOf(t *testing.T, c *cluster, node, socket string) (port int32) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := c.cp.ConfigFor("system:serviceaccount:"+namespace+":"+RelayName, "system:serviceaccounts", "system:serviceaccounts:"+namespace, "system:authenticated")
	if err != nil {
		t.Fatal(err)
	}
	gate := newGate(kubernetes.NewForConfigOrDie(cfg), namespace, node)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- relayTo(ctx, l, socket, gate, slog.New(slog.DiscardHandler)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("relay ended: %v", err)
		}
	})
	return int32(l.Addr().(*net.TCPAddr).Port)
}

// workerRig is a worker's host with the real agent.
func workerRig(t *testing.T, name string) *hostRig {
	t.Helper()
	rig := newHostRig(t)
	rig.host.Name = name
	if err := os.RemoveAll(filepath.Join(rig.dir, "root/etc/kubernetes/manifests")); err != nil {
		t.Fatal(err)
	}
	return rig
}

// relayPod is a pod of the chart's DaemonSet, as its controller makes it.
func relayPod(t *testing.T, c kubernetes.Interface, namespace, node string, port int32) *corev1.Pod {
	t.Helper()
	d, err := c.AppsV1().DaemonSets(namespace).Get(t.Context(), RelayName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{ObjectMeta: d.Spec.Template.ObjectMeta, Spec: d.Spec.Template.Spec}
	pod.Name, pod.Spec.NodeName = RelayName+"-"+node, node
	pod.Spec.Containers[0].Ports[0].ContainerPort = port
	controller := true
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: appsv1.SchemeGroupVersion.String(), Kind: "DaemonSet", Name: d.Name, UID: d.UID, Controller: &controller}}
	pod, err = c.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod.Status.Phase = corev1.PodRunning
	if _, err := c.CoreV1().Pods(namespace).UpdateStatus(t.Context(), pod, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	return pod
}

// TestRelayForwardsTwoVerbs calls a real agent through a relay, as an attacker with the operator's
// token could.
func TestRelayForwardsTwoVerbs(t *testing.T) {
	c := newCluster(t)
	rig := workerRig(t, "worker-1")
	rig.up()
	port := relayOf(t, c, "worker-1", rig.socket())
	h := &agentHost{node: "worker-1", what: upgradeproto.What_NODE}
	core := kubernetes.NewForConfigOrDie(c.access())
	conn, err := grpc.NewClient(fmt.Sprintf("127.0.0.1:%d", port), append(dialOptions(), grpc.WithPerRPCCredentials(&relayToken{
		accounts: core.CoreV1().ServiceAccounts(namespace), audience: RelayAudienceOf("worker-1"), now: time.Now,
	}))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	h.agent = upgradeproto.NewAgentClient(conn)

	if run, err := h.Run(t.Context()); err != nil || run != (decision.UpgradeRun{}) {
		t.Errorf("the run of an agent that had none: %+v, %v", run, err)
	}
	recv := func(stream interface {
		Recv() (*upgradeproto.UpgradeResponse, error)
	}, err error,
	) error {
		if err == nil {
			_, err = stream.Recv()
		}
		return err
	}
	a := h.agent
	ctx := t.Context()
	_, members := a.EtcdMembers(ctx, &upgradeproto.EtcdMembersRequest{})
	_, removed := a.RemoveEtcdMember(ctx, &upgradeproto.RemoveEtcdMemberRequest{Id: 1, Name: "x"})
	_, moved := a.MoveEtcdLeader(ctx, &upgradeproto.MoveEtcdLeaderRequest{})
	_, state := a.EtcdState(ctx, &upgradeproto.EtcdStateRequest{Revision: 1})
	snapshot, err := a.SnapshotEtcd(ctx, &upgradeproto.SnapshotEtcdRequest{})
	if err == nil {
		_, err = snapshot.Recv()
	}
	got := map[string]codes.Code{
		"EtcdMembers": status.Code(members), "RemoveEtcdMember": status.Code(removed), "MoveEtcdLeader": status.Code(moved), "SnapshotEtcd": status.Code(err), "EtcdState": status.Code(state),
		"Upgrade of the control plane": status.Code(recv(a.Upgrade(ctx, &upgradeproto.UpgradeRequest{Token: "t", KubernetesVersion: newKubernetes, What: upgradeproto.What_APPLY}))),
		"Upgrade of add-ons":           status.Code(recv(a.Upgrade(ctx, &upgradeproto.UpgradeRequest{Token: "t", KubernetesVersion: newKubernetes, What: upgradeproto.What_ADDONS, Addons: []string{"coredns"}}))),
		"Upgrade of nothing":           status.Code(recv(a.Upgrade(ctx, &upgradeproto.UpgradeRequest{Token: "t", KubernetesVersion: newKubernetes}))),
	}
	for verb, code := range got {
		want := codes.Unimplemented
		if strings.HasPrefix(verb, "Upgrade") {
			want = codes.PermissionDenied
		}
		if code != want {
			t.Errorf("%s: %s, want %s", verb, code, want)
		}
	}
	for _, m := range upgradeproto.Agent_ServiceDesc.Methods {
		if _, refused := got[m.MethodName]; !refused && m.MethodName != "Status" {
			t.Errorf("the test does not state whether the relay forwards %s", m.MethodName)
		}
	}
	var progress progressLog
	if err := h.Upgrade(ctx, "v1.36.3/0/c", newKubernetes, "c", rig.components(newKubernetes), false, progress.record); err != nil {
		t.Errorf("upgrade of the node: %v", err)
	}
	if d := slices.Index(progress.phases(), "done"); d < 0 {
		t.Errorf("reported %v", progress.phases())
	}
	run, err := h.Run(ctx)
	if err != nil || !run.InPlace || run.Phase != "done" || run.Components != "c" || run.Version != newKubernetes {
		t.Errorf("the run: %+v, %v", run, err)
	}
}

// TestInPlaceThroughARelay upgrades a worker in place. API server, RBAC, operator, relay, chart and
// agent are real; kubeadm and the kubelet are fake.
func TestInPlaceThroughARelay(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.create(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: "default"}})
	r := c.newRollout(t, 1, 1, 1)
	core, err := kubernetes.NewForConfig(c.cp.Config())
	if err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var before corev1.Node
	var nodes corev1.NodeList
	must(r.admin.List(t.Context(), &nodes))
	for _, n := range nodes.Items {
		if roleOf(&n) == v1alpha1.WorkerRole {
			before = n
		}
	}
	kubelet := kubelettest.New()
	t.Cleanup(kubelet.Close)
	must(kubelet.Serve(t.Context(), core, before.Name))

	rig := workerRig(t, before.Name)
	rig.host.RestartKubelet = func(ctx context.Context) error { // it reports its version
		kubelet.Cut() // what it forwarded ends with it
		var n corev1.Node
		if err := r.admin.Get(ctx, client.ObjectKey{Name: before.Name}, &n); err != nil {
			return err
		}
		n.Status.NodeInfo.KubeletVersion = newKubernetes
		return r.admin.Status().Update(ctx, &n)
	}
	rig.write("ctl/fail-node", "", 0o600)
	rig.write("ctl/hang-node", "", 0o600)
	rig.up()
	parts := rig.components(newKubernetes)
	list, err := json.Marshal(parts.List)
	must(err)
	var m corev1.ConfigMap
	must(r.admin.Get(t.Context(), client.ObjectKey{Namespace: "kube-system", Name: refB}, &m))
	m.Data["components"] = string(list)
	metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.AnnotationStatement, parts.Statement)
	must(r.admin.Update(t.Context(), &m))

	r.relay = true
	r.operate()
	var g v1alpha1.ScalingGroup
	r.eventually("the group is found", func() (string, bool) {
		var all v1alpha1.ScalingGroupList
		must(r.admin.List(t.Context(), &all))
		for i := range all.Items {
			if all.Items[i].Spec.GroupID == rolloutGroupW {
				g = all.Items[i]
				return "", true
			}
		}
		return fmt.Sprint(len(all.Items)), false
	})
	r.eventually("the strategy of the group is set", func() (string, bool) {
		r.get(g.Name, &g)
		g.Spec.Strategy = v1alpha1.InPlaceStrategy
		err := r.admin.Update(t.Context(), &g)
		return fmt.Sprint(err), err == nil
	})
	node := func() *corev1.Node {
		var n corev1.Node
		r.get(before.Name, &n)
		return &n
	}
	r.eventually("its node is labelled for the relay", func() (string, bool) {
		return fmt.Sprint(node().Labels), node().Labels[v1alpha1.LabelInPlace] == "true"
	})
	relayPod(t, core, namespace, before.Name, relayOf(t, c, before.Name, rig.socket()))
	r.pod("work", before.Name)
	r.edit(toNew)
	// progress returns the reported progress of its agent's run.
	progress := func() v1alpha1.UpgradeProgress {
		var all v1alpha1.PendingNodeList
		must(r.admin.List(t.Context(), &all))
		for i := range all.Items {
			if p := &all.Items[i]; p.Spec.NodeName == before.Name && p.Status.Upgrade != nil {
				return *p.Status.Upgrade
			}
		}
		return v1alpha1.UpgradeProgress{}
	}
	r.within(time.Minute, "the agent has started, and the PendingNode has its run", func() (string, bool) {
		var nv v1alpha1.NodeVersion
		r.get(v1alpha1.NodeVersionName, &nv)
		p := progress()
		return fmt.Sprintf("%+v %+v", nv.Status.Waiting, p), rig.at("node") && p.Node == before.Name && p.Version == newKubernetes && p.Phase == "apply" && p.Line != ""
	})
	if n := node(); !n.Spec.Unschedulable || n.Annotations[v1alpha1.AnnotationComponents] != refA {
		t.Errorf("while its agent works the node is %+v, with the recorded components %s", n.Spec, n.Annotations[v1alpha1.AnnotationComponents])
	}
	if err := r.admin.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "work"}, &corev1.Pod{}); err == nil {
		t.Error("the agent has started before the node was drained")
	}
	kubelet.Cut() // as an API server that restarts does
	rig.release("hang-node")
	r.within(time.Minute, "the failure is reported", func() (string, bool) {
		var nv v1alpha1.NodeVersion
		r.get(v1alpha1.NodeVersionName, &nv)
		w := nv.Status.Waiting
		return fmt.Sprintf("%+v", w), w != nil && w.Reason == "UpgradeFailed" && w.Object != nil && w.Object.Name == before.Name && strings.Contains(w.Message, "cheese") && w.NextTry != nil
	})
	r.within(time.Minute, "the PendingNode reports the failure, too", func() (string, bool) {
		p := progress()
		return fmt.Sprintf("%+v", p), p.Phase == "failed" && strings.Contains(p.Line, "cheese")
	})
	if n := node(); !n.Spec.Unschedulable {
		t.Error("a node whose upgrade has failed is uncordoned")
	}
	r.eventually("a person requests a retry", func() (string, bool) { // and no time passes
		n := node()
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationRetry, "now")
		err := r.admin.Update(t.Context(), n)
		return fmt.Sprint(err), err == nil
	})
	r.within(time.Minute, "the worker is at the target, and no work is left", func() (string, bool) {
		var nv v1alpha1.NodeVersion
		var pending v1alpha1.PendingNodeList
		r.get(v1alpha1.NodeVersionName, &nv)
		must(r.admin.List(t.Context(), &pending))
		n := node()
		return fmt.Sprintf("%s %+v", conditionText(nv.Status, v1alpha1.ConditionReady), nv.Status.Waiting),
			conditionText(nv.Status, v1alpha1.ConditionReady) == "True UpToDate" && !n.Spec.Unschedulable && n.Annotations[v1alpha1.AnnotationComponents] == refB && n.Annotations[v1alpha1.AnnotationRetry] == "" && len(pending.Items) == 0
	})
	after := node()
	if after.UID != before.UID || after.Spec.ProviderID != before.Spec.ProviderID || after.Annotations[v1alpha1.AnnotationImage] != image1 {
		t.Errorf("it is another node: %+v", after.ObjectMeta)
	}
	if b, err := os.ReadFile(filepath.Join(rig.dir, "root/usr/local/bin/kubelet")); err != nil || string(b) != string(rig.script(newKubernetes)) {
		t.Errorf("its kubelet is not the new one: %v", err)
	}
	if n := len(r.cloud.instances); n != 3 { // the control plane was replaced
		t.Errorf("%d machines existed in all", n)
	}
}

// agentsInTest are fake agents that upgrade a node at once.
type agentsInTest struct {
	*cloudInTest

	lock   sync.Mutex
	runs   map[string]decision.UpgradeRun
	fails  map[string]int // so often
	active map[string]int // that work, by node
	most   int            // at a time
}

func (a *agentsInTest) keep(map[string]bool) {}

func (a *agentsInTest) Run(_ context.Context, node string) (decision.UpgradeRun, error) {
	a.lock.Lock()
	defer a.lock.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, upgraded := a.runs[node]; !upgraded && a.run.Node == node {
		return a.run, nil
	}
	return a.runs[node], nil
}

// Upgrade continues without a client that follows it, as a real agent does.
func (a *agentsInTest) Upgrade(ctx context.Context, node, token, version, reference string, list component.Signed, tell func(decision.UpgradeRun)) error {
	if len(list.List) == 0 || !strings.HasSuffix(token, "/"+reference) {
		return errors.New("no components")
	}
	a.lock.Lock()
	if run := a.runs[node]; !run.Active() && (run.Phase != "done" || run.Components != reference) {
		a.begin(node, version, reference)
	}
	a.lock.Unlock()
	for {
		a.lock.Lock()
		run := a.runs[node]
		a.lock.Unlock()
		tell(run)
		switch {
		case run.Phase == "done":
			return nil
		case run.Phase == "failed":
			return errors.New(run.Line)
		case ctx.Err() != nil:
			return ctx.Err()
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (a *agentsInTest) begin(node, version, reference string) {
	a.runs[node] = decision.UpgradeRun{Version: version, Components: reference, Node: node, Phase: "apply", InPlace: true, Started: time.Now()}
	a.active[node]++
	a.most = max(a.most, len(a.active))
	ctx := context.Background()
	var n corev1.Node
	var pods corev1.PodList
	if err := errors.Join(a.admin.Get(ctx, client.ObjectKey{Name: node}, &n), a.admin.List(ctx, &pods, client.InNamespace("default"))); err != nil {
		a.breach("%v", err)
	}
	if !n.Spec.Unschedulable {
		a.breach("the agent of %s starts before the node is cordoned", node)
	}
	for _, p := range pods.Items {
		if p.Spec.NodeName == node {
			a.breach("the agent of %s starts while pod %s is on the node", node, p.Name)
		}
	}
	a.work.Go(func() {
		time.Sleep(50 * time.Millisecond)
		a.lock.Lock()
		run := a.runs[node]
		run.Phase, run.Ended = "done", time.Now()
		if a.fails[node] > 0 {
			a.fails[node]--
			run.Phase, run.Line, run.Ended = "failed", "kubeadm has failed", time.Now().Add(-decision.UpgradeRetry)
		}
		delete(a.active, node)
		a.lock.Unlock()
		if run.Phase == "done" {
			a.persist("the kubelet of "+node+" reports its version", func(ctx context.Context) error {
				var n corev1.Node
				if err := a.admin.Get(ctx, client.ObjectKey{Name: node}, &n); err != nil {
					return err
				}
				n.Status.NodeInfo.KubeletVersion = version
				return a.admin.Status().Update(ctx, &n)
			})
		}
		a.lock.Lock()
		a.runs[node] = run
		a.lock.Unlock()
	})
}

// inPlace configures all groups for in-place upgrades.
func (r *rolling) inPlace(which ...string) {
	r.t.Helper()
	for _, id := range which {
		r.eventually("group "+id+" is upgraded in place", func() (string, bool) {
			var all v1alpha1.ScalingGroupList
			if err := r.admin.List(r.t.Context(), &all); err != nil {
				return err.Error(), false
			}
			for i := range all.Items {
				if g := &all.Items[i]; g.Spec.GroupID == id {
					g.Spec.Strategy = v1alpha1.InPlaceStrategy
					err := r.admin.Update(r.t.Context(), g)
					return fmt.Sprint(err), err == nil
				}
			}
			return "it does not exist", false
		})
	}
}

// inPlaceKilled upgrades a whole cluster in place, and kills the operator before and after each
// effect.
func inPlaceKilled(t *testing.T, r *rolling) {
	a := &agentsInTest{cloudInTest: r.cloud, runs: map[string]decision.UpgradeRun{}, fails: map[string]int{}, active: map[string]int{}}
	r.agents = a
	var nodes corev1.NodeList
	if err := r.admin.List(t.Context(), &nodes); err != nil {
		t.Fatal(err)
	}
	machines := map[string]string{}
	for i, n := range nodes.Items {
		machines[n.Name] = n.Spec.ProviderID
		r.pod(fmt.Sprintf("pod-%d", i), n.Name)
		if roleOf(&n) == v1alpha1.WorkerRole && len(a.fails) == 0 {
			a.fails[n.Name] = 1
		}
	}
	r.crashes = true
	r.operate()
	r.inPlace(rolloutGroupCP, rolloutGroupW)
	r.edit(toNew)
	r.finished(image1)
	if err := r.admin.List(t.Context(), &nodes); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.Items {
		if machines[n.Name] != n.Spec.ProviderID || n.Annotations[v1alpha1.AnnotationComponents] != refB || n.Status.NodeInfo.KubeletVersion != "v1.36.3" && a.runs[n.Name].Phase != "" {
			t.Errorf("%s was not kept and upgraded: %+v %s", n.Name, n.ObjectMeta, n.Status.NodeInfo.KubeletVersion)
		}
	}
	if a.most > 2 {
		t.Errorf("%d agents worked at a time", a.most)
	}
	for _, point := range []string{"before:upgrade node", "after:upgrade node", "before:note components", "after:note components", "before:mark in-place", "after:clear intent"} {
		if !r.crashed[point] {
			t.Errorf("no operator was killed %s", point)
		}
	}
	if n := len(r.cloud.instances); n != len(machines) {
		t.Errorf("%d machines existed in all, want %d", n, len(machines))
	}
}

// nextLeaderAsks ends the operator while the agent of its host upgrades Kubernetes. That keeps the
// kubelet, so the next operator, on another host, cannot see the end of the run at the Node.
func nextLeaderAsks(t *testing.T, r *rolling) {
	a := &agentsInTest{cloudInTest: r.cloud, runs: map[string]decision.UpgradeRun{}, fails: map[string]int{}, active: map[string]int{}}
	r.agents, r.cloud.applying = a, make(chan struct{})
	var nodes corev1.NodeList
	if err := r.admin.List(t.Context(), &nodes); err != nil {
		t.Fatal(err)
	}
	var hosts []string
	for i, n := range nodes.Items {
		r.pod(fmt.Sprintf("pod-%d", i), n.Name)
		if roleOf(&n) == v1alpha1.ControlPlaneRole {
			hosts = append(hosts, n.Name)
		}
	}
	r.onHost(hosts[0])
	stop := r.operate()
	r.inPlace(rolloutGroupCP, rolloutGroupW)
	r.edit(toNew)
	reported := func(phase string) {
		t.Helper()
		r.eventually("the status has the run of "+hosts[0]+" as "+phase, func() (string, bool) {
			var nv v1alpha1.NodeVersion
			r.get(v1alpha1.NodeVersionName, &nv)
			u := nv.Status.Upgrade
			return fmt.Sprintf("%+v", u), u != nil && u.Phase == phase && u.Node == hosts[0]
		})
	}
	reported("apply")
	close(r.cloud.applying)
	stop()
	r.cloud.mu.Lock()
	r.cloud.run.Phase, r.cloud.run.Ended = "done", time.Now()
	r.cloud.mu.Unlock()
	r.onHost(hosts[1])
	r.operate()
	reported("done")
	r.onHost("") // each host is drained, and the operator leaves it
	r.finished(image1)
	if err := r.admin.List(t.Context(), &nodes); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.Items {
		if n.Status.NodeInfo.KubeletVersion != "v1.36.3" || a.runs[n.Name].Phase != "done" {
			t.Errorf("%s has kubelet %s after the run %+v, want its own run", n.Name, n.Status.NodeInfo.KubeletVersion, a.runs[n.Name])
		}
	}
	if n := r.cloud.calls["upgrade"]; n != 1 {
		t.Errorf("Kubernetes was upgraded %d times, want once", n)
	}
}

// tokenAgents are agents whose runs are done. They record the tokens of requests.
type tokenAgents struct {
	agents
	run    decision.UpgradeRun
	tokens []string
}

func (a *tokenAgents) Run(context.Context, string) (decision.UpgradeRun, error) { return a.run, nil }

func (a *tokenAgents) Upgrade(_ context.Context, _, token, _, _ string, _ component.Signed, _ func(decision.UpgradeRun)) error {
	a.tokens = append(a.tokens, token)
	return nil
}

// A finished run is repeated with a token of its own: the agent answers a used token with the outcome of
// its run. A run that has been repeated since is not repeated again.
func TestFinishedRunIsRepeatedOnce(t *testing.T) {
	c := newCluster(t)
	c.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: refB}, Data: map[string]string{"cluster-version": newKubernetes, "components": "[]"}})
	counters, err := newCounters()
	if err != nil {
		t.Fatal(err)
	}
	ended := time.Now().Add(-time.Hour)
	a := &tokenAgents{run: decision.UpgradeRun{Version: newKubernetes, Components: refB, Etcd: "3.6.11-0", Node: "cp-1", InPlace: true, Phase: "done", Ended: ended}}
	r := &nodeVersions{client: c.admin, live: c.admin, agents: a, counters: counters, log: slog.New(slog.DiscardHandler), spawn: func(do func(context.Context)) { do(t.Context()) }}
	r.init()
	r.runs.keep(map[string]bool{"id": true})
	upgrade := func(retried time.Time) {
		t.Helper()
		r.retries.hurry(upgradeOn + "cp-1")
		r.upgradeNode(&observed{}, decision.Action{Kind: decision.UpgradeNode, Node: "cp-1", Machine: "id", Version: newKubernetes, Components: refB, Etcd: "3.6.11-0", Ended: retried})
	}
	upgrade(time.Time{}) // attaches to the finished run
	upgrade(ended)
	upgrade(ended.Add(-time.Minute)) // decided from an earlier run
	if len(a.tokens) != 2 || a.tokens[0] == a.tokens[1] {
		t.Errorf("tokens %v, want two that differ", a.tokens)
	}
	// A failed upgrade of the cluster's Kubernetes by the same agent is not a failed upgrade of the node.
	a.run.InPlace, a.run.Phase = false, "failed"
	if upgrade(time.Time{}); len(a.tokens) != 3 {
		t.Errorf("tokens %v, want a third after a failed upgrade of Kubernetes", a.tokens)
	}
}
