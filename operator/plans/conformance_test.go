package plans

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"constellation/assets"
	"constellation/operator/api/upgradev1"
)

// TestConformance tests the contract of Plans on a real API server with the real Job controller.
func TestConformance(t *testing.T) {
	w := newWorld(t)
	for _, part := range []struct {
		name string
		run  func(*testing.T, *world)
	}{
		{"a Plan upgrades its nodes", carriedOut},
		{"a node is cordoned, and released", cordonedAndGivenBack},
		{"a failed node occupies its slot", failedKeepsPlace},
		{"validation by the API server", admission},
		{"invalid Plans have a reason", cannotBe},
		{"a node is prepared, drained and upgraded", prepareDrainUpgrade},
		{"a budget that blocks fails the Job", budgetBlocks},
		{"a budget that blocks is reported", budgetIsTold},
		{"two Plans on one node", twoPlans},
		{"a channel is polled", channelIsAsked},
		{"a Secret is part of the hash", secretCounts},
		{"Jobs end with their time, version, plan and node", jobsEnd},
		{"a pod that dies is created again", podDies},
		{"a Job that hangs ends with its time", jobHangs},
		{"nodes that another controller labelled", migration},
		{"with the rights of system-upgrade-controller", inItsPlace},
		{"two controllers do not disturb each other", twoControllers},
		{"settings of spec.constellation", options},
		{"examples of the other project", examples},
		{"the API server admits all golden Jobs", goldenJobs},
		{"events have all fields that readers use", eventFields},
		{"a refused Job is an event", refusedJob},
		{"an image that cannot be pulled is in the columns", imageNotPulled},
		{"a Plan created together with its Node", planWithItsNode},
		{"generic tools follow a rollout", genericToolsFollow},
	} {
		t.Run(part.name, func(t *testing.T) {
			t.Parallel()
			part.run(t, w)
		})
	}
}

func carriedOut(t *testing.T, w *world) {
	s := w.site(t, "carried-out", 3)
	var mu sync.Mutex
	at, most := 0, 0
	s.set(func(ctx context.Context, p *corev1.Pod, container string) error {
		mu.Lock()
		at++
		most = max(most, at)
		mu.Unlock()
		listed := slices.Contains(s.get(p.Labels[upgradev1.LabelPlan]).Status.Applying, p.Spec.NodeName)
		mu.Lock()
		defer mu.Unlock()
		at--
		if !listed {
			return fmt.Errorf("%s runs and is not in status.applying", p.Spec.NodeName)
		}
		return nil
	})
	s.start()
	s.plan(`
metadata: {name: all}
spec:
  concurrency: 1
  version: v1.36.3+k3s1
  upgrade: {image: rancher/k3s-upgrade}
  postCompleteLabels: {upgraded-to: $(LATEST_VERSION)}
`)
	p := s.done("all")
	if p.Status.LatestVersion != "v1.36.3-k3s1" || len(p.Status.Applying) > 0 {
		t.Errorf("status: %+v", p.Status)
	}
	if most != 1 {
		t.Errorf("%d nodes were upgraded at a time", most)
	}
	for _, name := range s.nodes {
		n := s.nodeNamed(name)
		got := map[string]string{"hash": n.Labels["plan.upgrade.cattle.io/all"], "label": n.Labels["upgraded-to"]}
		if want := map[string]string{"hash": p.Status.LatestHash, "label": "v1.36.3-k3s1"}; !cmp.Equal(got, want) {
			t.Error(cmp.Diff(want, got))
		}
	}
	if want := (upgradev1.Counts{Total: 3, Done: 3}); p.Status.Constellation.Counts != want {
		t.Errorf("counts are %+v, want %+v", p.Status.Constellation.Counts, want)
	}
	s.event("all", "Resolved", "v1.36.3-k3s1")
	s.event("all", "Validated", "")
	s.event("all", "SyncJob", s.nodes[0])
	s.event("all", "JobComplete", s.nodes[0])
	s.event("all", "Complete", p.Status.LatestHash)
}

func cordonedAndGivenBack(t *testing.T, w *world) {
	s := w.site(t, "cordoned", 3)
	s.patch(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.nodes[2]}}, `{"spec":{"unschedulable":true}}`)
	s.set(func(_ context.Context, p *corev1.Pod, _ string) error {
		if n := s.nodeNamed(p.Spec.NodeName); !n.Spec.Unschedulable {
			return errors.New("it is not cordoned")
		}
		return nil
	})
	s.start()
	s.plan(`
metadata: {name: cordon}
spec: {concurrency: 2, version: v1, cordon: true, upgrade: {image: a}}
`)
	s.done("cordon")
	for i, name := range s.nodes {
		n := s.nodeNamed(name)
		if by, noted := n.Annotations[annotationCordoned]; n.Spec.Unschedulable != (i == 2) || noted {
			t.Errorf("node %d: unschedulable is %t, cordoned for %q", i, n.Spec.Unschedulable, by)
		}
	}
}

func failedKeepsPlace(t *testing.T, w *world) {
	s := w.site(t, "failed", 2)
	s.set(func(context.Context, *corev1.Pod, string) error { return errors.New("no") })
	s.start()
	s.plan(`
metadata: {name: fails}
spec: {concurrency: 1, version: v1, upgrade: {image: a}}
`)
	p := s.is("fails", "Complete=False/JobFailed Job failed/apply-fails-on-")
	if len(p.Status.Applying) != 1 || len(s.jobs()) != 1 {
		t.Errorf("%v have a slot, %d have Jobs; want one", p.Status.Applying, len(s.jobs()))
	}
	s.event("fails", "JobFailed", "failed on Node "+p.Status.Applying[0]+": BackoffLimitExceeded: ")
	want := []string{"Name=fails", "Image=a", "Channel=<nil>", "Version=v1", "Complete=False", "Message=" + cond(p, upgradev1.ConditionComplete).Message, `Applying=["` + p.Status.Applying[0] + `"]`}
	if got := s.columns(); !slices.Equal(got, want) {
		t.Error(cmp.Diff(want, got))
	}
	s.set(func(context.Context, *corev1.Pod, string) error { return nil })
	s.edit("fails", `{"spec":{"upgrade":{"args":["again"]}}}`)
	s.done("fails")
}

// columns are those of `kubectl get plans -o wide`, of the site's only Plan.
func (s *site) columns() (out []string) {
	s.Helper()
	b, err := s.w.core.CoreV1().RESTClient().Get().AbsPath("/apis/upgrade.cattle.io/v1/namespaces", s.ns, "plans").
		SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").Do(s.Context()).Raw()
	var table metav1.Table
	if err == nil {
		err = json.Unmarshal(b, &table)
	}
	if err != nil || len(table.Rows) != 1 {
		s.Fatalf("%d rows: %v", len(table.Rows), err)
	}
	for i, c := range table.Rows[0].Cells {
		out = append(out, fmt.Sprintf("%s=%v", table.ColumnDefinitions[i].Name, c))
	}
	return out
}

// admission tests which Plans the API server admits.
func admission(t *testing.T, w *world) {
	s := w.site(t, "admission", 0)
	s.start()
	s.plan(`{metadata: {name: first}, spec: {upgrade: {image: a}}}`) // waits for the kind
	for _, tt := range []struct{ name, spec, want string }{
		{name: "neither version nor channel", spec: `{upgrade: {image: a}}`, want: ""},
		{name: "an empty image", spec: `{upgrade: {image: ""}}`, want: ""},
		{name: "no upgrade", spec: `{version: v1}`, want: "spec.upgrade: Required value"},
		{name: "upgrade of null", spec: `{upgrade: null}`, want: "spec.upgrade: "},
		{name: "image not pulled", spec: `{upgrade: {command: [a]}}`, want: "spec.upgrade.image: Required value"},
		{name: "a secret without path", spec: `{upgrade: {image: a}, secrets: [{name: s}]}`, want: "spec.secrets[0].path: Required value"},
		{name: "a secret without name", spec: `{upgrade: {image: a}, secrets: [{path: s}]}`, want: "spec.secrets[0].name: Required value"},
		{name: "a volume without source", spec: `{upgrade: {image: a, volumes: [{name: v, destination: /d}]}}`, want: "spec.upgrade.volumes[0].source: Required value"},
		{name: "a day that is not a weekday", spec: `{upgrade: {image: a}, window: {days: [someday], startTime: "1", endTime: "2"}}`, want: "spec.window.days[0]: Unsupported value"},
		{name: "no days", spec: `{upgrade: {image: a}, window: {days: [], startTime: "1", endTime: "2"}}`, want: "spec.window.days: Invalid value"},
		{name: "days by number and name", spec: `{upgrade: {image: a}, window: {days: ["0", mo, tue, wednesday], startTime: "1", endTime: "2"}}`, want: ""},
		{name: "a negative delay", spec: `{upgrade: {image: a}, postCompleteDelay: "-1h"}`, want: ""},
		{name: "a timeout as a number", spec: `{upgrade: {image: a}, drain: {timeout: 120000000}}`, want: ""},
		{name: "a timeout as a duration", spec: `{upgrade: {image: a}, drain: {timeout: 5m}}`, want: ""},
		{name: "concurrency of zero", spec: `{concurrency: 0, upgrade: {image: a}}`, want: ""},
		{name: "both options of a drain", spec: `{upgrade: {image: a}, drain: {deleteLocalData: true, deleteEmptydirData: true}}`, want: ""},
		{name: "an unknown state", spec: `{upgrade: {image: a}, constellation: {state: Asleep}}`, want: "spec.constellation.state: Unsupported value"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var spec map[string]any
			if err := yaml.Unmarshal([]byte(tt.spec), &spec); err != nil {
				t.Fatal(err)
			}
			o := &unstructured.Unstructured{Object: map[string]any{
				"apiVersion": "upgrade.cattle.io/v1", "kind": "Plan", "metadata": map[string]any{"namespace": s.ns, "generateName": "p-"}, "spec": spec,
			}}
			err := w.admin.Create(t.Context(), o)
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

func cannotBe(t *testing.T, w *world) {
	s := w.site(t, "cannot-be", 1)
	s.start()
	for _, tt := range []struct {
		name, spec string
		want       []string
	}{
		{name: "unresolvable", spec: `{concurrency: 1, upgrade: {image: a}}`, want: []string{"LatestResolved=False/Error cannot resolve plan: missing channel and version", "Complete=False/NotReady"}},
		{name: "nothing", spec: `{concurrency: 1, version: v1, nodeSelector: {matchLabels: {no: such}}, upgrade: {image: a}}`, want: []string{"Complete=True/Complete"}},
		{name: "zero", spec: `{concurrency: 0, version: v1, upgrade: {image: a}}`, want: []string{"Complete=True/Complete spec.concurrency is 0: none of 1 nodes is upgraded"}},
		{name: "drains", spec: `{concurrency: 1, version: v1, upgrade: {image: a}, drain: {deleteLocalData: true, deleteEmptydirData: true}}`, want: []string{"Validated=False/Error spec.drain cannot specify both deleteEmptydirData and deleteLocalData"}},
		{name: "selector", spec: `{concurrency: 1, version: v1, upgrade: {image: a}, drain: {podSelector: {matchExpressions: [{key: a, operator: Is}]}}}`, want: []string{"Validated=False/Error"}},
		{name: "delay", spec: `{concurrency: 1, version: v1, upgrade: {image: a}, postCompleteDelay: -1s}`, want: []string{"Validated=False/Error spec.postCompleteDelay is negative"}},
		{name: "no-delay", spec: `{concurrency: 1, version: v1, upgrade: {image: a}, postCompleteDelay: later}`, want: []string{"Validated=False/Error spec.postCompleteDelay is invalid"}},
		{name: "window", spec: `{concurrency: 1, version: v1, upgrade: {image: a}, window: {days: [mon], startTime: noon, endTime: "1"}}`, want: []string{"Validated=False/Error spec.window is invalid"}},
		{name: "secret", spec: `{concurrency: 1, version: v1, upgrade: {image: a}, secrets: [{name: gone, path: p}]}`, want: []string{`Validated=False/Error secrets "gone" not found`}},
		{name: "closed", spec: `{concurrency: 1, version: v1, upgrade: {image: a}, window: {days: [` + dayFrom(3) + `], startTime: "1", endTime: "2"}}`, want: []string{"Complete=False/Waiting the window opens at"}},
		{name: "label", spec: `{concurrency: 1, version: "v1 is/was: good", upgrade: {image: "a:b"}}`, want: []string{"Complete=True/Complete"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inner := &site{TB: t, w: s.w, ns: s.ns}
			inner.plan("metadata: {name: " + tt.name + "}\nspec: " + tt.spec)
			p := inner.is(tt.name, tt.want...)
			if r := cond(p, upgradev1.ConditionResolved); r.Reason == "Error" && p.Status.LatestHash != "" {
				t.Errorf("there is a hash: %s", p.Status.LatestHash)
			}
			for _, c := range p.Status.Conditions {
				if c.Status == corev1.ConditionUnknown {
					t.Errorf("%s is Unknown", c.Type)
				}
			}
		})
	}
	s.event("drains", "ValidateFailed", "both")
	s.event("unresolvable", "ResolveFailed", "missing channel and version")
	// A corrected Plan is carried out within a second.
	begun := time.Now()
	s.edit("drains", `{"spec":{"drain":{"deleteLocalData":null}}}`)
	s.is("drains", "Validated=True/PlanIsValid")
	t.Logf("an edit is observed after %s", time.Since(begun).Round(time.Millisecond))
	s.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "gone"}})
	s.is("secret", "Validated=True/PlanIsValid")
}

// dayFrom is the name of the day in so many days.
func dayFrom(n int) string {
	return strings.ToLower(time.Now().UTC().AddDate(0, 0, n).Weekday().String())
}

// pod is one that a drain has to do with.
func (s *site) pod(name, node string, change ...func(*corev1.Pod)) {
	s.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: name, Labels: map[string]string{"app": name}},
		Spec:       corev1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: new(int64), Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	for _, f := range change {
		f(p)
	}
	s.eventually("the account of pods is there", func() (string, bool) {
		err := s.w.admin.Create(s.Context(), p)
		return fmt.Sprint(err), err == nil
	})
}

func (s *site) podsLeft() (names []string) {
	s.Helper()
	l, err := s.w.core.CoreV1().Pods(s.ns).List(s.Context(), metav1.ListOptions{LabelSelector: "!" + upgradev1.LabelPlan})
	if err != nil {
		s.Fatal(err)
	}
	for _, p := range l.Items {
		names = append(names, p.Name)
	}
	return names
}

func prepareDrainUpgrade(t *testing.T, w *world) {
	s := w.site(t, "drained", 1)
	for _, name := range []string{"goes", "stays"} {
		s.pod(name, s.nodes[0])
	}
	s.start()
	s.plan(`
metadata: {name: drain, labels: {team: a, objectset.cattle.io/hash: b}, annotations: {note: c}}
spec:
  concurrency: 1
  version: v1
  serviceAccountName: system-upgrade
  prepare: {image: a, args: [prepare, k3s-server]}
  drain: {force: true, timeout: 30s, podSelector: {matchLabels: {app: goes}}}
  upgrade: {image: a}
`)
	s.done("drain")
	if got, want := s.log(), []string{s.nodes[0] + " prepare", s.nodes[0] + " drain", s.nodes[0] + " upgrade"}; !slices.Equal(got, want) {
		t.Errorf("ran %q, want %q", got, want)
	}
	if got := s.podsLeft(); !slices.Equal(got, []string{"stays"}) {
		t.Errorf("left are %q", got)
	}
	if n := s.nodeNamed(s.nodes[0]); n.Spec.Unschedulable {
		t.Error("the node is still cordoned")
	}
	j := s.jobs()[s.nodes[0]]
	if j.Labels["team"] != "a" || j.Labels["objectset.cattle.io/hash"] != "" || j.Annotations["note"] != "c" || j.Spec.Template.Labels["team"] != "a" {
		t.Errorf("labels %v, annotations %v", j.Labels, j.Annotations)
	}
}

func budgetBlocks(t *testing.T, w *world) {
	s := w.site(t, "budget", 1)
	s.pod("held", s.nodes[0])
	s.create(&policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "hold"}, Spec: policyv1.PodDisruptionBudgetSpec{
		MinAvailable: new(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "held"}},
	}})
	s.start()
	s.plan(`
metadata: {name: blocked}
spec: {concurrency: 1, version: v1, serviceAccountName: system-upgrade, drain: {force: true, timeout: 2s}, upgrade: {image: a}}
`)
	p := s.is("blocked", "Complete=False/JobFailed failed on Node")
	if m, want := cond(p, upgradev1.ConditionComplete).Message, "; pod budget/held: The disruption budget hold needs 1 healthy pods and has 1 currently"; !strings.HasSuffix(m, want) {
		t.Errorf("%q does not end with %q", m, want)
	}
	if n := s.nodeNamed(s.nodes[0]); !n.Spec.Unschedulable || n.Annotations[annotationCordoned] != s.ns+"/blocked" {
		t.Errorf("the node must stay cordoned for the Plan: %t, %q", n.Spec.Unschedulable, n.Annotations[annotationCordoned])
	}
	if got := s.log(); slices.Contains(got, s.nodes[0]+" upgrade") {
		t.Errorf("ran %q", got)
	}
	// The nodes of a deleted Plan are uncordoned.
	s.delete("blocked")
	s.eventually("the node takes pods again", func() (string, bool) {
		n := s.nodeNamed(s.nodes[0])
		return fmt.Sprint(n.Spec.Unschedulable, n.Annotations), !n.Spec.Unschedulable && n.Annotations[annotationCordoned] == ""
	})
	if j := s.jobs(); len(j) > 0 {
		t.Errorf("%d Jobs are left", len(j))
	}
}

func budgetIsTold(t *testing.T, w *world) {
	s := w.site(t, "budget-told", 1)
	for _, name := range []string{"held", "free"} {
		s.pod(name, s.nodes[0])
	}
	hold := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "hold"}, Spec: policyv1.PodDisruptionBudgetSpec{
		MinAvailable: new(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "held"}},
	}}
	s.create(hold)
	s.start(func(c *Config) { c.drainsAsked = 100 * time.Millisecond })
	s.plan(`
metadata: {name: told}
spec: {concurrency: 1, version: v1, serviceAccountName: system-upgrade, drain: {force: true}, upgrade: {image: a}}
`)
	want := "pod budget-told/held may not be evicted: the disruption budget hold needs 1 healthy pods and has 1 currently"
	s.eventually("the status of the node has the blocker", func() (string, bool) {
		n := s.get("told").Status.Constellation
		return fmt.Sprintf("%+v", n), n != nil && len(n.Nodes) == 1 && n.Nodes[0].State == upgradev1.NodeRunning && n.Nodes[0].Reason == reasonDrainBlocked && n.Nodes[0].Message == want
	})
	s.event("told", reasonDrainBlocked, want)
	if err := w.admin.Delete(t.Context(), hold); err != nil {
		t.Fatal(err)
	}
	s.done("told")
}

func (s *site) delete(plan string) {
	s.Helper()
	if err := s.w.admin.Delete(s.Context(), &upgradev1.Plan{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: plan}}); err != nil {
		s.Fatal(err)
	}
}

// twoPlans tests exclusive Plans that cordon the same node one after the other.
func twoPlans(t *testing.T, w *world) {
	s := w.site(t, "two-plans", 1)
	var mu sync.Mutex
	at, most := 0, 0
	s.set(func(_ context.Context, p *corev1.Pod, _ string) error {
		mu.Lock()
		at++
		most = max(most, at)
		mu.Unlock()
		n := s.nodeNamed(p.Spec.NodeName)
		mu.Lock()
		defer mu.Unlock()
		at--
		if !n.Spec.Unschedulable {
			return errors.New("the other Plan has removed the cordon")
		}
		return nil
	})
	s.start(func(c *Config) { c.Settings.BackoffLimit = 5 })
	for _, name := range []string{"os", "k3s"} {
		s.plan("metadata: {name: " + name + "}\nspec: {concurrency: 1, version: v1, exclusive: true, serviceAccountName: system-upgrade, cordon: true, upgrade: {image: a}}")
	}
	s.done("os")
	s.done("k3s")
	if most != 1 {
		t.Errorf("%d ran at a time", most)
	}
	if n := s.nodeNamed(s.nodes[0]); n.Spec.Unschedulable || n.Annotations[annotationCordoned] != "" {
		t.Errorf("the node is not released: %t, %v", n.Spec.Unschedulable, n.Annotations)
	}
}

func channelIsAsked(t *testing.T, w *world) {
	s := w.site(t, "channel", 1)
	var mu sync.Mutex
	asked := []http.Header{}
	latest := "v1.0.0+k3s1"
	srv := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, r.Header.Clone())
		http.Redirect(out, r, "/releases/tag/"+latest, http.StatusFound)
	}))
	defer srv.Close()
	var clock atomic.Int64
	s.start(func(c *Config) { c.now = func() time.Time { return time.Now().Add(time.Duration(clock.Load())) } })
	s.plan("metadata: {name: channel}\nspec: {concurrency: 1, channel: " + srv.URL + "/latest, upgrade: {image: a}}")
	p := s.done("channel")
	if p.Status.LatestVersion != "v1.0.0-k3s1" || p.Status.Constellation.LastPolled == nil {
		t.Errorf("status: %+v", p.Status)
	}
	var ns corev1.Namespace
	if err := w.admin.Get(t.Context(), client.ObjectKey{Name: "kube-system"}, &ns); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	if len(asked) != 1 || asked[0].Get("X-SUC-Cluster-ID") != string(ns.UID) || asked[0].Values("X-SUC-Latest-Version") != nil {
		t.Errorf("requests %v", asked)
	}
	latest = "v1.1.0+k3s1"
	mu.Unlock()
	// Changes of nodes cause no poll of the channel; only its interval does.
	s.patch(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.nodes[0]}}, `{"metadata":{"labels":{"other":"label"}}}`)
	clock.Store(int64(16 * time.Minute))
	s.edit("channel", `{"spec":{"constellation":{"retry":"look"}}}`)
	s.eventually("the new version is installed", func() (string, bool) {
		p := s.get("channel")
		return fmt.Sprintf("%+v", p.Status), p.Status.LatestVersion == "v1.1.0-k3s1"
	})
	s.done("channel")
	mu.Lock()
	defer mu.Unlock()
	if len(asked) != 2 || asked[1].Get("X-SUC-Latest-Version") != "v1.0.0-k3s1" {
		t.Errorf("requests %v", asked)
	}
}

func secretCounts(t *testing.T, w *world) {
	s := w.site(t, "secret", 1)
	told := make(chan notification, 10)
	hook := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var n notification
		if err := json.NewDecoder(r.Body).Decode(&n); err != nil || r.URL.Path != "/token" {
			t.Errorf("webhook called with %s: %v", r.URL, err)
		}
		told <- n
	}))
	defer hook.Close()
	s.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "hook"}, StringData: map[string]string{"url": hook.URL + "/token\n"}})
	for _, name := range []string{"counts", "ignored"} {
		s.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: name}, Data: map[string][]byte{"k": []byte("1")}})
	}
	s.start()
	s.plan(`
metadata: {name: secret}
spec: {concurrency: 1, version: v1, secrets: [{name: counts, path: p}, {name: ignored, path: /q, ignoreUpdates: true}], upgrade: {image: a}, constellation: {notify: {secretName: hook}}}
`)
	first := s.done("secret").Status.LatestHash
	s.patch(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "ignored"}}, `{"data":{"k":"Mg=="}}`)
	s.patch(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "counts"}}, `{"data":{"k":"Mg=="}}`)
	s.eventually("the node is upgraded again", func() (string, bool) {
		p, n := s.get("secret"), s.nodeNamed(s.nodes[0])
		return p.Status.LatestHash, p.Status.LatestHash != first && n.Labels["plan.upgrade.cattle.io/secret"] == p.Status.LatestHash
	})
	if got := s.log(); len(got) != 2 {
		t.Errorf("ran %q", got)
	}
	reasons := map[string]int{}
	for range 4 {
		reasons[(<-told).Reason]++
	}
	if want := map[string]int{"SyncJob": 2, "Complete": 2}; !cmp.Equal(reasons, want) {
		t.Errorf("webhook calls %v, want %v", reasons, want)
	}
}

func jobsEnd(t *testing.T, w *world) {
	s := w.site(t, "jobs-end", 2)
	hold := make(chan struct{})
	release := sync.OnceFunc(func() { close(hold) })
	defer release()
	s.set(func(ctx context.Context, _ *corev1.Pod, _ string) error {
		select {
		case <-hold:
		case <-ctx.Done():
		}
		return ctx.Err()
	})
	s.start(func(c *Config) { c.Settings.TTLSecondsAfterFinish = 1 })
	s.plan(`{metadata: {name: ends}, spec: {concurrency: 2, version: v1, upgrade: {image: a}}}`)
	running := func(version string, n int) {
		t.Helper()
		s.eventually(fmt.Sprintf("%d Jobs of %s run", n, version), func() (string, bool) {
			var names []string
			for _, j := range s.jobs() {
				if j.Labels[upgradev1.LabelVersion] == version {
					names = append(names, j.Name)
				}
			}
			return fmt.Sprint(names), len(names) == n && len(s.jobs()) == n
		})
	}
	running("v1", 2)
	s.edit("ends", `{"spec":{"version":"v2"}}`)
	running("v2", 2)
	if err := w.admin.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.nodes[0]}}); err != nil {
		t.Fatal(err)
	}
	running("v2", 1)
	p := s.is("ends", "Complete=False/SyncJob")
	if !slices.Equal(p.Status.Applying, s.nodes[1:]) {
		t.Errorf("applying: %v", p.Status.Applying)
	}
	release()
	s.done("ends")
	running("v2", 0)
	if n := s.nodeNamed(s.nodes[1]); n.Labels["plan.upgrade.cattle.io/ends"] == "" {
		t.Error("the node is not marked")
	}
	// A disabled node is not upgraded, not even to a new version.
	s.patch(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.nodes[1]}}, `{"metadata":{"labels":{"plan.upgrade.cattle.io/ends":"disabled"}}}`)
	before := len(s.log())
	s.edit("ends", `{"spec":{"version":"v3"}}`)
	if p := s.done("ends"); p.Status.LatestVersion != "v3" || len(s.log()) != before {
		t.Errorf("a node that is disabled was upgraded to %s", p.Status.LatestVersion)
	}
}

// podDies kills the pod of the upgrade by a reboot of the node.
func podDies(t *testing.T, w *world) {
	s := w.site(t, "pod-dies", 1)
	var once sync.Once
	s.set(func(ctx context.Context, p *corev1.Pod, _ string) (err error) {
		once.Do(func() { err = errors.New("rebooted") })
		return err
	})
	s.start(func(c *Config) { c.Settings.BackoffLimit = 99 })
	s.plan(`{metadata: {name: reboots}, spec: {concurrency: 1, version: v1, upgrade: {image: a}}}`)
	s.done("reboots")
	if got := s.log(); len(got) != 2 {
		t.Errorf("ran %q", got)
	}
}

func jobHangs(t *testing.T, w *world) {
	s := w.site(t, "hangs", 2)
	s.set(func(ctx context.Context, _ *corev1.Pod, _ string) error {
		<-ctx.Done()
		return ctx.Err()
	})
	s.start()
	s.plan(`{metadata: {name: hangs}, spec: {concurrency: 1, version: v1, jobActiveDeadlineSecs: 1, upgrade: {image: a}}}`)
	p := s.is("hangs", "Complete=False/JobFailed failed on Node")
	if len(p.Status.Applying) != 1 || len(s.jobs()) != 1 {
		t.Fatalf("%v have a slot, %d have Jobs; want one", p.Status.Applying, len(s.jobs()))
	}
	s.event("hangs", "JobFailed", "failed on Node "+p.Status.Applying[0]+": DeadlineExceeded: ")
	s.set(func(context.Context, *corev1.Pod, string) error { return nil })
	s.edit("hangs", `{"spec":{"jobActiveDeadlineSecs":600,"upgrade":{"args":["again"]}}}`)
	s.done("hangs")
}

func migration(t *testing.T, w *world) {
	s := w.site(t, "migration", 0)
	// As the other controller left them: one is done, one is in progress and cordoned, one is to come.
	s.node("migration-done", map[string]string{"plan.upgrade.cattle.io/k3s-server": known})
	s.node("migration-applying", nil)
	s.patch(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "migration-applying"}}, `{"spec":{"unschedulable":true}}`)
	s.node("migration-other", map[string]string{"plan.upgrade.cattle.io/k3s-server": "disabled"})
	if err := w.cp.Apply(t.Context(), assets.PlanKind()); err != nil {
		t.Fatal(err)
	}
	p := s.plan(`
metadata: {name: k3s-server}
spec: {concurrency: 1, version: v1.36.3, serviceAccountName: system-upgrade, cordon: true, upgrade: {image: rancher/k3s-upgrade}}
`)
	p.Status = upgradev1.PlanStatus{LatestVersion: "v1.36.3", LatestHash: known, Applying: []string{"migration-applying"}}
	if err := w.admin.Status().Update(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	theirs := makeJob(p, node{name: "migration-applying", host: "migration-applying"}, "system-upgrade-controller", DefaultSettings(), 0)
	delete(theirs.Annotations, annotationTemplate)
	s.create(theirs)
	s.start()
	done := s.done("k3s-server")
	if done.Status.LatestHash != known {
		t.Errorf("hash is %s", done.Status.LatestHash)
	}
	if got := s.log(); !slices.Equal(got, []string{"migration-applying cordon", "migration-applying upgrade"}) {
		t.Errorf("ran %q", got)
	}
	if n := s.nodeNamed("migration-applying"); n.Spec.Unschedulable || n.Labels["plan.upgrade.cattle.io/k3s-server"] != known {
		t.Errorf("the node whose upgrade was in progress: unschedulable %t, labels %v", n.Spec.Unschedulable, n.Labels)
	}
	s.edit("k3s-server", `{"spec":{"version":"v1.36.4"}}`)
	s.eventually("a new version is for both", func() (string, bool) { return fmt.Sprint(s.log()), len(s.log()) == 6 })
}

// theirRights are the rights of the account of system-upgrade-controller v0.16: to list pods and not
// to watch them, no patches of Nodes by the controller, and events of the core group alone.
func theirRights(ns, account, suffix string) []client.Object {
	rule := func(groups, resources, verbs string, names ...string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: strings.Split(groups, ","), Resources: strings.Split(resources, ","), Verbs: strings.Split(verbs, ","), ResourceNames: names}
	}
	who := []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: ns, Name: account}}
	ref := func(kind, name string) rbacv1.RoleRef {
		return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: kind, Name: name}
	}
	controller, drainer := "system-upgrade-controller"+suffix, "system-upgrade-controller-drainer"+suffix
	return []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: controller}, Rules: []rbacv1.PolicyRule{
			rule("batch", "jobs", "get,list,watch"),
			rule("apiextensions.k8s.io", "customresourcedefinitions", "get,list,watch,create,patch,update"),
			rule("", "namespaces,nodes", "get,list,watch"),
			rule("", "nodes", "update"),
			rule("", "events", "get,create,patch,update"),
			rule("coordination.k8s.io", "leases", "create"),
			rule("coordination.k8s.io", "leases", "get,update", "system-upgrade-controller"),
			rule("upgrade.cattle.io", "plans,plans/status", "get,list,watch,create,patch,update,delete"),
		}},
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: drainer}, Rules: []rbacv1.PolicyRule{
			rule("", "pods/eviction", "create"),
			rule("", "pods", "get,list,delete"),
			rule("", "nodes", "get,patch"),
			rule("apps", "statefulsets,daemonsets,replicasets", "get,list"),
		}},
		&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "system-upgrade-controller"}, Rules: []rbacv1.PolicyRule{
			rule("batch", "jobs", "create,delete,deletecollection,patch,update,get,list,watch"),
			rule("", "secrets", "get,list,watch"),
		}},
		&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "system-upgrade" + suffix}, RoleRef: ref("ClusterRole", controller), Subjects: who},
		&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "system-upgrade-drainer" + suffix}, RoleRef: ref("ClusterRole", drainer), Subjects: who},
		&rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "system-upgrade"}, RoleRef: ref("Role", "system-upgrade-controller"), Subjects: who},
	}
}

// inItsPlace runs this controller with the rights of system-upgrade-controller.
func inItsPlace(t *testing.T, w *world) {
	s := w.site(t, "in-its-place", 2)
	for _, o := range theirRights(s.ns, "theirs", ":in-its-place") {
		s.create(o)
	}
	var log lines
	s.start(func(c *Config) {
		c.Cluster, c.Election = s.access("theirs"), true
		c.Log = slog.New(slog.NewTextHandler(&log, nil))
	})
	s.plan(`{metadata: {name: same}, spec: {concurrency: 1, version: v1, serviceAccountName: system-upgrade, cordon: true, upgrade: {image: a}}}`)
	s.done("same")
	for _, name := range s.nodes {
		if n := s.nodeNamed(name); n.Spec.Unschedulable || n.Annotations[annotationCordoned] != "" {
			t.Errorf("%s: unschedulable %t, annotations %v", name, n.Spec.Unschedulable, n.Annotations)
		}
	}
	s.event("same", "Complete", "")
	s.delete("same")
	s.mu.Lock()
	defer s.mu.Unlock()
	may, watches := []string{"GET /api/v1/namespaces/in-its-place/pods", "PATCH /api/v1/nodes/"}, 0
	for _, d := range s.denied {
		if !slices.ContainsFunc(may, func(m string) bool { return strings.HasPrefix(d, "theirs: "+m) }) {
			t.Errorf("denied without an alternative: %s", d)
		}
		if strings.HasPrefix(d, "theirs: "+may[0]) {
			watches++
		}
	}
	s.denied = nil
	if n := strings.Count(log.tail(), "pods not watched"); n != 1 || watches != 1 {
		t.Errorf("%d lines about pods after %d denied requests, want one of both:\n%s", n, watches, log.tail())
	}
}

// goldenJobs validates all Jobs of TestJobs.
func goldenJobs(t *testing.T, w *world) {
	s := w.site(t, "golden-jobs", 0)
	all, err := filepath.Glob("testdata/job-*.yaml")
	if err != nil || len(all) < 4 {
		t.Fatal(all, err)
	}
	for _, file := range all {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var j batchv1.Job
		if err := yaml.UnmarshalStrict(b, &j); err != nil {
			t.Fatal(err)
		}
		j.Namespace = s.ns
		if err := w.admin.Create(t.Context(), &j, client.DryRunAll); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}

func eventFields(t *testing.T, w *world) {
	for _, tt := range []struct {
		name string
		deny string // resource of the core group that the controller may not create
		want int32
	}{
		{name: "event-fields", deny: "", want: 1},
		{name: "event-fields-older", deny: "events", want: 0}, // a manifest of an earlier version
	} {
		s := w.site(t, tt.name, 1)
		s.start(func(c *Config) {
			if tt.deny == "" {
				return
			}
			c.Cluster = rest.CopyConfig(c.Cluster)
			c.Cluster.Wrap(func(next http.RoundTripper) http.RoundTripper {
				return roundTripper(func(r *http.Request) (*http.Response, error) {
					if r.Method == http.MethodPost && strings.HasPrefix(r.URL.Path, "/api/v1/") && strings.HasSuffix(r.URL.Path, "/"+tt.deny) {
						body := `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`
						return &http.Response{StatusCode: http.StatusForbidden, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(body)), Request: r}, nil
					}
					return next.RoundTrip(r)
				})
			})
		})
		s.plan(`{metadata: {name: p}, spec: {concurrency: 1, version: v1, upgrade: {image: a}}}`)
		s.done("p")
		s.event("p", "Complete", "")
		var l corev1.EventList
		if err := w.admin.List(t.Context(), &l, client.InNamespace(s.ns)); err != nil {
			t.Fatal(err)
		}
		for _, e := range l.Items {
			if e.InvolvedObject.Kind != "Plan" {
				continue
			}
			has := !e.LastTimestamp.IsZero() && !e.FirstTimestamp.IsZero() && e.Source.Component == "system-upgrade-controller"
			if e.Count != tt.want || has != (tt.want > 0) || e.EventTime.IsZero() || e.ReportingController != "system-upgrade-controller" {
				t.Errorf("%s: count %d, first %s, last %s, source %+v, time %s", e.Reason, e.Count, e.FirstTimestamp, e.LastTimestamp, e.Source, e.EventTime)
			}
		}
	}
}

// refusedJob is about a Job that the API server refuses for one of two nodes, until the Plan changes.
func refusedJob(t *testing.T, w *world) {
	s := w.site(t, "refused", 1)
	told := make(chan notification, 10)
	hook := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var n notification
		if err := json.NewDecoder(r.Body).Decode(&n); err != nil {
			t.Error(err)
		}
		told <- n
	}))
	defer hook.Close()
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "none"}, Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"count/jobs.batch": resource.MustParse("0")}}}
	s.create(quota)
	s.eventually("the quota counts", func() (string, bool) {
		err := w.admin.Get(t.Context(), client.ObjectKeyFromObject(quota), quota)
		return fmt.Sprint(err, quota.Status), err == nil && len(quota.Status.Hard) > 0
	})
	s.start()
	s.plan("metadata: {name: refused}\nspec: {concurrency: 1, version: v1, upgrade: {image: a}, constellation: {notify: {url: '" + hook.URL + "'}}}")
	p := s.is("refused", "Complete=False/SyncJob cannot be created: jobs.batch ")
	s.event("refused", "JobRefused", "exceeded quota: none")
	s.event("refused", "Resolved", "v1")
	var l corev1.EventList
	if err := w.admin.List(t.Context(), &l, client.InNamespace(s.ns)); err != nil {
		t.Fatal(err)
	}
	for _, e := range l.Items {
		if e.Reason == "SyncJob" || e.Reason == "JobRefused" && (e.Type != corev1.EventTypeWarning || e.Related == nil || e.Related.Name != s.nodes[0]) {
			t.Errorf("event %s %s about %v: %s", e.Type, e.Reason, e.Related, e.Message)
		}
	}
	if n := p.Status.Constellation.Nodes; len(n) != 1 || n[0].Reason != "JobRefused" {
		t.Errorf("nodes: %+v", n)
	}
	if err := w.admin.Delete(t.Context(), quota); err != nil {
		t.Fatal(err)
	}
	s.done("refused")
	s.event("refused", "SyncJob", s.nodes[0])
	s.mu.Lock()
	s.denied = slices.DeleteFunc(s.denied, func(d string) bool { return strings.HasSuffix(d, "/jobs") }) // by the quota
	s.mu.Unlock()
	for _, want := range []string{"SyncJob", "Complete"} {
		if n := <-told; n.Reason != want {
			t.Errorf("webhook called with %s, want %s", n.Reason, want)
		}
	}
}

func imageNotPulled(t *testing.T, w *world) {
	s := w.site(t, "not-pulled", 1)
	s.set(func(ctx context.Context, p *corev1.Pod, container string) error {
		s.patch(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: p.Name}}, `{"status":{"phase":"Pending","containerStatuses":[
			{"name":"upgrade","image":"a:v1","imageID":"","ready":false,"restartCount":0,"state":{"waiting":{"reason":"ImagePullBackOff","message":"Back-off pulling image"}}}]}}`, "status")
		<-ctx.Done()
		return ctx.Err()
	})
	s.start()
	s.plan(`{metadata: {name: image}, spec: {concurrency: 1, version: v1, upgrade: {image: a}}}`)
	want := "Message=version v1 is applied to Nodes not-pulled-0; Node not-pulled-0: image a:v1 of container upgrade cannot be pulled"
	s.eventually("the columns have the image", func() (string, bool) { c := s.columns(); return fmt.Sprintf("%q", c), slices.Contains(c, want) })
	s.event("image", "ImagePullError", "image a:v1 of container upgrade cannot be pulled")
}

// planWithItsNode delays the watch of Nodes, so that a Plan is delivered before the Node that was
// created first.
func planWithItsNode(t *testing.T, w *world) {
	s := w.site(t, "with-its-node", 0)
	open, asked := make(chan struct{}), make(chan struct{}, 1)
	var delays atomic.Bool
	s.start(func(c *Config) {
		c.Cluster = rest.CopyConfig(c.Cluster)
		c.Cluster.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				resp, err := next.RoundTrip(r)
				if err != nil || r.URL.Path != "/api/v1/nodes" || r.Method != http.MethodGet {
					return resp, err
				}
				if r.URL.Query().Has("watch") {
					resp.Body = &gated{ReadCloser: resp.Body, open: open, delays: &delays}
				} else if delays.Load() {
					select {
					case asked <- struct{}{}:
					default:
					}
				}
				return resp, err
			})
		})
	})
	s.plan(`{metadata: {name: before}, spec: {concurrency: 1, version: v1, upgrade: {image: a}}}`)
	s.done("before") // its informers run
	delays.Store(true)
	s.node("with-its-node-0", nil)
	s.plan(`{metadata: {name: same-time}, spec: {concurrency: 1, version: v1, upgrade: {image: a}}}`)
	select {
	case <-asked:
	case <-time.After(5 * time.Second):
		t.Error("the controller does not list Nodes before it reports that the Plan is complete")
	}
	close(open)
	s.done("same-time")
	s.event("same-time", "Complete", "")
	s.eventually("the node is upgraded by both", func() (string, bool) { l := s.log(); return fmt.Sprint(l), len(l) == 2 })
	var l corev1.EventList
	if err := w.admin.List(t.Context(), &l, client.InNamespace(s.ns)); err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range l.Items {
		if e.InvolvedObject.Name == "same-time" && e.Reason == "Complete" {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d events Complete, want 1", n)
	}
}

// gated is a body of a response whose reads wait, while delays is true, until the gate is open.
type gated struct {
	io.ReadCloser
	open   chan struct{}
	delays *atomic.Bool
}

func (g *gated) Read(b []byte) (int, error) {
	n, err := g.ReadCloser.Read(b)
	if g.delays.Load() {
		<-g.open
	}
	return n, err
}

func twoControllers(t *testing.T, w *world) {
	a, b := w.site(t, "one-of-two", 2), w.site(t, "two-of-two", 2)
	for _, s := range []*site{a, b} {
		s.start(func(c *Config) { c.Election = true })
		s.plan(`{metadata: {name: same}, spec: {concurrency: 1, version: v1, serviceAccountName: system-upgrade, cordon: true, upgrade: {image: a}}}`)
	}
	for _, s := range []*site{a, b} {
		s.done("same")
		if got := s.log(); len(got) != 4 || slices.ContainsFunc(got, func(l string) bool { return !strings.HasPrefix(l, s.ns) }) {
			t.Errorf("%s ran %q", s.ns, got)
		}
	}
}

// options tests settings that only this controller supports.
func options(t *testing.T, w *world) {
	t.Run("a failed node is retried, and then frees its slot", func(t *testing.T) {
		s := w.site(t, "retries", 3)
		s.set(func(_ context.Context, p *corev1.Pod, _ string) error {
			if p.Spec.NodeName == "retries-1" {
				return errors.New("no")
			}
			return nil
		})
		s.start()
		s.plan(`
metadata: {name: retries}
spec: {concurrency: 1, version: v1, upgrade: {image: a}, constellation: {retries: 1, retryDelay: 100ms, failureBudget: 1}}
`)
		p := s.is("retries", "Complete=False/JobFailed failed on Node retries-1")
		s.eventually("the others are done", func() (string, bool) {
			p = s.get("retries")
			return fmt.Sprintf("%+v", p.Status.Constellation), p.Status.Constellation.Counts == upgradev1.Counts{Total: 3, Done: 2, Failed: 1}
		})
		if n := p.Status.Constellation.Nodes; len(n) != 1 || n[0].Attempts != 2 || n[0].State != upgradev1.NodeFailed {
			t.Errorf("nodes: %+v", n)
		}
		s.set(func(context.Context, *corev1.Pod, string) error { return nil })
		s.edit("retries", `{"spec":{"constellation":{"retry":"now"}}}`)
		s.done("retries")
	})
	t.Run("paused, resumed, cancelled and run again", func(t *testing.T) {
		s := w.site(t, "paused", 2)
		s.start()
		s.plan(`
metadata: {name: paused}
spec: {concurrency: 1, version: v1, serviceAccountName: system-upgrade, cordon: true, upgrade: {image: a}, constellation: {state: Paused}}
`)
		s.is("paused", "Complete=False/Waiting the Plan is paused")
		if got := s.log(); len(got) > 0 {
			t.Errorf("ran %q", got)
		}
		hold := make(chan struct{})
		s.set(func(ctx context.Context, _ *corev1.Pod, _ string) error {
			select {
			case <-hold:
			case <-ctx.Done():
			}
			return ctx.Err()
		})
		s.edit("paused", `{"spec":{"constellation":{"state":"Running"}}}`)
		s.eventually("a node is cordoned", func() (string, bool) { l := s.log(); return fmt.Sprint(l), len(l) == 2 })
		s.edit("paused", `{"spec":{"constellation":{"state":"Cancelled"}}}`)
		s.eventually("no effect of the Plan is left", func() (string, bool) {
			p, at := s.get("paused"), ""
			for _, name := range s.nodes {
				if n := s.nodeNamed(name); n.Spec.Unschedulable || n.Annotations[annotationCordoned] != "" {
					at = name
				}
			}
			return fmt.Sprintf("%v, cordoned %s, %d Jobs", p.Status.Applying, at, len(s.jobs())), len(p.Status.Applying) == 0 && at == "" && len(s.jobs()) == 0
		})
		close(hold)
		s.edit("paused", `{"spec":{"constellation":{"state":"Running"}}}`)
		s.done("paused")
		before := len(s.log())
		s.edit("paused", `{"spec":{"constellation":{"rerun":"1"}}}`)
		s.eventually("both are upgraded again", func() (string, bool) { l := s.log(); return fmt.Sprint(l), len(l) == before+4 })
		s.done("paused")
	})
	t.Run("control planes come first, and Plans after their dependencies", func(t *testing.T) {
		s := w.site(t, "order", 3)
		s.node("order-cp", map[string]string{"node-role.kubernetes.io/control-plane": "", "role": "cp"})
		s.start()
		s.plan(`
metadata: {name: second}
spec: {concurrency: 4, version: v1, upgrade: {image: b}, constellation: {dependsOn: [first]}}
`)
		s.is("second", "Complete=False/Waiting Plan first, on which this one depends, does not exist")
		s.plan(`
metadata: {name: first}
spec: {concurrency: 4, version: v1, upgrade: {image: a}, constellation: {controlPlanesFirst: true}}
`)
		s.done("second")
		if got := s.log(); len(got) != 8 || got[0] != "order-cp upgrade" {
			t.Errorf("ran %q", got)
		}
	})
	t.Run("the next node waits until the last one is healthy", func(t *testing.T) {
		s := w.site(t, "health", 2)
		s.set(func(_ context.Context, p *corev1.Pod, _ string) error {
			s.ready(p.Spec.NodeName, false)
			return nil
		})
		s.start()
		s.plan(`
metadata: {name: health}
spec: {concurrency: 1, version: v1, upgrade: {image: a}, constellation: {health: {soak: 200ms}}}
`)
		p := s.is("health", "Complete=False/SyncJob")
		s.eventually("the Plan waits until the node is Ready", func() (string, bool) {
			p = s.get("health")
			n := p.Status.Constellation.Nodes
			return fmt.Sprintf("%+v", n), len(n) == 1 && n[0].State == upgradev1.NodeSettling && n[0].Reason == "NotReady"
		})
		s.set(func(context.Context, *corev1.Pod, string) error { return nil })
		s.ready(p.Status.Applying[0], true)
		s.done("health")
	})
	t.Run("versions of Kubernetes are not skipped", func(t *testing.T) {
		s := w.site(t, "skew", 1)
		s.start()
		for version, want := range map[string]string{"v1.34.9+k3s1": "is older", "v1.37.0": "skips a minor version", "v1.35.5+k3s1": ""} {
			name := strings.ReplaceAll(strings.ReplaceAll(version, "+", "-"), ".", "-")
			s.plan("metadata: {name: " + name + "}\nspec: {concurrency: 1, version: " + version + ", upgrade: {image: a}, constellation: {kubernetesVersions: true}}")
			if want == "" {
				s.done(name)
			} else {
				s.is(name, "Complete=False/Waiting "+want)
			}
		}
	})
	t.Run("Plans with alone exclude each other", func(t *testing.T) {
		a, b := w.site(t, "alone-a", 2), w.site(t, "alone-b", 2)
		var mu sync.Mutex
		at, most := 0, 0
		for _, s := range []*site{a, b} {
			s.set(func(context.Context, *corev1.Pod, string) error {
				mu.Lock()
				at++
				most = max(most, at)
				mu.Unlock()
				_ = s.nodeNamed(s.nodes[0])
				mu.Lock()
				defer mu.Unlock()
				at--
				return nil
			})
			s.start()
			s.plan(`{metadata: {name: alone}, spec: {concurrency: 1, version: v1, upgrade: {image: a}, constellation: {alone: true}}}`)
		}
		a.done("alone")
		b.done("alone")
		if most != 1 {
			t.Errorf("%d nodes were upgraded at a time", most)
		}
	})
}

// examples are Plans as the other project's users have them, with other images.
func examples(t *testing.T, w *world) {
	s := w.site(t, "examples", 0)
	s.node("examples-server", map[string]string{"node-role.kubernetes.io/control-plane": "true", "plan.upgrade.cattle.io/bionic": "bionic", "plan.upgrade.cattle.io/sles": "x"})
	s.node("examples-agent", nil)
	for name, data := range map[string]string{"bionic": "#!/bin/sh", "sles": "#!/bin/sh"} {
		s.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: name}, StringData: map[string]string{"upgrade.sh": data}})
	}
	s.start()
	all, err := fs.Glob(assets.PlanExamples(), "*.yaml")
	if err != nil || len(all) < 3 {
		t.Fatal(all, err)
	}
	var names []string
	for _, file := range all {
		b, err := fs.ReadFile(assets.PlanExamples(), file)
		if err != nil {
			t.Fatal(err)
		}
		for doc := range strings.SplitSeq(string(b), "\n---\n") {
			var p upgradev1.Plan
			if !strings.Contains(doc, "kind: Plan") {
				continue
			}
			if err := yaml.UnmarshalStrict([]byte(doc), &p); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if p.Spec.NodeSelector.MatchLabels == nil {
				p.Spec.NodeSelector.MatchLabels = map[string]string{}
			}
			p.Spec.NodeSelector.MatchLabels["site"] = s.ns
			b, err := yaml.Marshal(p)
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, s.plan(string(b)).Name)
		}
	}
	for _, name := range names {
		s.done(name)
	}
	t.Logf("plans %q ran %q", names, s.log())
}
