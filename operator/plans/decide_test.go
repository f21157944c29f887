package plans

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"

	"constellation/operator/api/upgradev1"
)

// desk is a book with a Plan and nodes, to which decisions are applied.
type desk struct {
	t    testing.TB
	book *book
	now  time.Time
	rv   int
	name string
	last map[string]*corev1.Node // as stored last
	// awaited: the operator waits for the lock of the Plan.
	awaited bool
	lock    string // other holder of the node lock; empty: the Plan may lock
}

func newDesk(t testing.TB, p *upgradev1.Plan, nodes int) *desk {
	d := &desk{t: t, now: time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC), name: p.Name, rv: 1, last: map[string]*corev1.Node{}}
	d.book = newBook("system-upgrade-controller", func() time.Time { return d.now }, func(string, time.Duration) {})
	p.ResourceVersion = d.version()
	d.book.setPlan(p, false)
	for i := range nodes {
		d.node(fmt.Sprintf("n%d", i), func(*corev1.Node) {})
	}
	return d
}

func (d *desk) version() string {
	d.rv++
	return fmt.Sprint(d.rv)
}

func (d *desk) node(name string, change func(*corev1.Node)) {
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name), ResourceVersion: d.version(), Labels: map[string]string{corev1.LabelHostname: name, corev1.LabelOSStable: "linux"}},
		Status: corev1.NodeStatus{
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}, NodeInfo: corev1.NodeSystemInfo{KubeletVersion: "v1.35.4+k3s1"},
		},
	}
	change(n)
	d.last[name] = n
	d.book.setNode(record[*node](d.t, trimNode, n), false)
}

// change changes a node and keeps what it has.
func (d *desk) change(name string, change func(*corev1.Node)) {
	n := d.last[name].DeepCopy()
	n.ResourceVersion = d.version()
	change(n)
	d.last[name] = n
	d.book.setNode(record[*node](d.t, trimNode, n), false)
}

// record returns the trimmed form of an object.
func record[T any](t testing.TB, trim func(any) (any, error), of any) T {
	t.Helper()
	o, err := trim(of)
	if err != nil {
		t.Fatal(err)
	}
	return o.(T)
}

func (d *desk) edit(change func(*upgradev1.Plan)) {
	p := d.book.plan(d.name).DeepCopy()
	p.Generation++
	p.ResourceVersion = d.version()
	change(p)
	d.book.setPlan(p, false)
}

func (d *desk) fill() view {
	p := d.book.plan(d.name)
	v := view{plan: p, now: d.now, version: p.Spec.Version, settings: DefaultSettings(), mayLock: d.lock == "", lock: d.lock, awaited: d.awaited}
	if v.rules, v.invalid = validate(p); v.invalid != nil {
		return v
	}
	var err error
	if v.hash, err = latestHash(p, v.version, nil); err != nil {
		d.t.Fatal(err)
	}
	d.book.arrange(p.Name, v.selector, v.hash)
	d.book.fill(&v)
	return v
}

// step runs one round, and returns the decision.
func (d *desk) step() decision {
	v := d.fill()
	out := decide(v)
	for _, m := range out.marks {
		n := m.node
		d.change(n.name, func(o *corev1.Node) {
			maps.Copy(o.Labels, m.labels)
			for k, l := range m.notes() {
				if metav1.SetMetaDataAnnotation(&o.ObjectMeta, k, l); l == "" {
					delete(o.Annotations, k)
				}
			}
			o.Spec.Unschedulable = o.Spec.Unschedulable && !m.uncordon
		})
		if m.labels != nil && n.job != nil {
			d.book.credit(d.name, n.job.uid)
		}
	}
	for _, j := range out.deletes {
		d.book.dropJob(j)
	}
	p := v.plan.DeepCopy()
	p.Status, p.ResourceVersion = out.status, d.version()
	d.book.setPlan(p, true)
	for _, u := range out.creates {
		j := makeJob(p, *u.node, "system-upgrade-controller", v.settings, v.delay)
		j.UID, j.ResourceVersion = types.UID("job-"+d.version()), d.version()
		d.book.setJob(record[*job](d.t, trimJob, j), true)
	}
	return out
}

// end ends the Job of a node.
func (d *desk) end(name string, how batchv1.JobConditionType) {
	d.t.Helper()
	for _, j := range d.book.jobsOfPlan(d.name) {
		if j.node != name {
			continue
		}
		d.over(j, how, "it failed")
		return
	}
	d.t.Fatalf("node %s has no Job", name)
}

// over ends a Job.
func (d *desk) over(j *job, how batchv1.JobConditionType, message string) {
	ended := *j
	ended.version, ended.phase, ended.ended, ended.reason, ended.message = d.version(), jobComplete, d.now, "BackoffLimitExceeded", message
	if how == batchv1.JobFailed {
		ended.phase = jobFailed
	}
	d.book.setJob(&ended, false)
}

func creates(d decision) (out []string) {
	for _, u := range d.creates {
		out = append(out, u.name)
	}
	slices.Sort(out)
	return out
}

// TestNodesAreUpgradedInTheOrderOfTheirHashes: two controllers choose the same nodes.
func TestNodesAreUpgradedInTheOrderOfTheirHashes(t *testing.T) {
	d := newDesk(t, planOf(func(p *upgradev1.Plan) { p.Spec.Concurrency = 2 }), 6)
	var names []string
	for i := range 6 {
		names = append(names, fmt.Sprintf("n%d", i))
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmpString(order("uid-"+a, "plan-uid", known), order("uid-"+b, "plan-uid", known))
	})
	var got []string
	for len(got) < 6 {
		now := creates(d.step())
		if len(now) == 0 || len(now) > 2 {
			t.Fatalf("%v are started at a time", now)
		}
		got = append(got, now...)
		for _, n := range now {
			d.end(n, batchv1.JobComplete)
		}
	}
	for i := 0; i < 6; i += 2 {
		slices.Sort(names[i : i+2])
	}
	if !slices.Equal(got, names) {
		t.Errorf("order is %v, want %v", got, names)
	}
	last := d.step()
	if len(last.status.Applying) > 0 || len(last.creates) > 0 || last.status.Constellation.Counts != (upgradev1.Counts{Total: 6, Done: 6}) {
		t.Errorf("at the end: %+v", last.status)
	}
}

func cmpString(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func TestDecide(t *testing.T) {
	ours := func(f func(*upgradev1.Rollout)) func(*upgradev1.Plan) {
		return func(p *upgradev1.Plan) {
			p.Spec.Constellation = &upgradev1.Rollout{}
			f(p.Spec.Constellation)
		}
	}
	complete := func(d decision) string {
		for _, c := range d.status.Conditions {
			if c.Type == upgradev1.ConditionComplete {
				return string(c.Status) + " " + c.Reason
			}
		}
		return ""
	}
	t.Run("a failed node occupies its slot until the Plan changes", func(t *testing.T) {
		d := newDesk(t, planOf(), 2)
		first := creates(d.step())
		d.end(first[0], batchv1.JobFailed)
		for range 3 {
			if out := d.step(); complete(out) != "False JobFailed" || len(out.creates) > 0 || len(out.deletes) > 0 || !slices.Equal(out.status.Applying, first) {
				t.Fatalf("%s, %v started, %d deleted, %v applying", complete(out), creates(out), len(out.deletes), out.status.Applying)
			}
		}
		for _, j := range d.book.jobsOfPlan(d.name) { // its time is over
			d.book.dropJob(j)
		}
		if out := d.step(); len(out.creates) > 0 {
			t.Fatalf("%v are retried although nothing changed", creates(out))
		}
		d.edit(func(p *upgradev1.Plan) { p.Spec.Upgrade.Args = []string{"other"} })
		if out := d.step(); !slices.Equal(creates(out), first) {
			t.Errorf("started %v, want %v", creates(out), first)
		}
	})
	t.Run("a change that does not affect pods replaces no Job", func(t *testing.T) {
		d := newDesk(t, planOf(), 1)
		d.step()
		d.edit(func(p *upgradev1.Plan) { p.Spec.JobActiveDeadlineSecs, p.Spec.Concurrency = new(int64(5)), 3 })
		if out := d.step(); len(out.deletes) > 0 {
			t.Error("the Job is deleted")
		}
		d.edit(func(p *upgradev1.Plan) { p.Spec.Upgrade.Image = "other" })
		if out := d.step(); len(out.deletes) != 1 {
			t.Errorf("%d Jobs are deleted", len(out.deletes))
		}
	})
	t.Run("nodes start until failureBudget is used up", func(t *testing.T) {
		d := newDesk(t, planOf(ours(func(r *upgradev1.Rollout) { r.FailureBudget = new(intstr.FromString("20%")) })), 10)
		failed := 0
		for range 20 {
			for _, n := range creates(d.step()) {
				d.end(n, batchv1.JobFailed)
				failed++
			}
		}
		out := d.step()
		if failed != 3 || complete(out) != "False JobFailed" || out.status.Constellation.Waiting == nil || out.status.Constellation.Waiting.Reason != "FailureBudget" || out.status.Constellation.Counts.Failed != 3 {
			t.Errorf("%d nodes failed: %s, %+v", failed, complete(out), out.status.Constellation)
		}
	})
	t.Run("nodes start while fewer than maxUnavailable are unavailable", func(t *testing.T) {
		d := newDesk(t, planOf(func(p *upgradev1.Plan) { p.Spec.Concurrency = 5 }, ours(func(r *upgradev1.Rollout) {
			r.Health = &upgradev1.Health{MaxUnavailable: new(intstr.FromInt32(3))}
		})), 6)
		d.node("elsewhere", func(n *corev1.Node) { n.Spec.Unschedulable, n.Labels = true, nil })
		if out := d.step(); len(out.creates) != 2 {
			t.Errorf("%v are started", creates(out))
		}
		d.node("else", func(n *corev1.Node) { n.Status.Conditions, n.Labels = nil, nil })
		if out := d.step(); len(out.creates) != 0 || out.status.Constellation.Waiting == nil || out.status.Constellation.Waiting.Reason != "Unavailable" {
			t.Errorf("%v are started, waiting %+v", creates(out), out.status.Constellation.Waiting)
		}
	})
	t.Run("no node starts after the window has closed", func(t *testing.T) {
		d := newDesk(t, planOf(func(p *upgradev1.Plan) {
			p.Spec.Window = &upgradev1.TimeWindowSpec{Days: []upgradev1.Day{"monday"}, StartTime: "11:00", EndTime: "12:00"}
		}), 3)
		first := creates(d.step())
		if len(first) != 1 {
			t.Fatalf("%v are started in the last second of the window", first)
		}
		d.now = d.now.Add(time.Second)
		d.end(first[0], batchv1.JobComplete)
		out := d.step()
		if len(out.creates) > 0 || complete(out) != "False Waiting" || !out.again.Equal(time.Date(2026, 11, 30, 11, 0, 0, 0, time.UTC)) {
			t.Errorf("%v are started; %s; again at %s", creates(out), complete(out), out.again)
		}
	})
	t.Run("a node whose label was removed is upgraded again", func(t *testing.T) {
		d := newDesk(t, planOf(), 1)
		d.step()
		d.end("n0", batchv1.JobComplete)
		d.step()
		d.node("n0", func(*corev1.Node) {})
		if out := d.step(); len(out.deletes) != 1 || len(out.marks) > 0 {
			t.Errorf("%d Jobs deleted, %d marks", len(out.deletes), len(out.marks))
		}
		if out := d.step(); len(out.creates) != 1 {
			t.Errorf("%v are started", creates(out))
		}
	})
	t.Run("nodes are found by name and by host name", func(t *testing.T) {
		d := newDesk(t, planOf(func(p *upgradev1.Plan) { p.Spec.Concurrency = 2 }), 0)
		d.node("b.example.org", func(n *corev1.Node) { n.Labels[corev1.LabelHostname] = "a" })
		d.node("a", func(n *corev1.Node) { n.Labels[corev1.LabelHostname] = "b" })
		out := d.step()
		if !slices.Equal(out.status.Applying, []string{"b", "a"}) { // in the order of names
			t.Errorf("applying: %v", out.status.Applying)
		}
		if out := d.step(); len(out.creates) > 0 || len(out.deletes) > 0 || len(out.status.Applying) != 2 {
			t.Errorf("second round: %v started, %d deleted", creates(out), len(out.deletes))
		}
	})
	t.Run("a node without a host name is ignored", func(t *testing.T) {
		d := newDesk(t, planOf(), 0)
		d.node("n", func(n *corev1.Node) { n.Labels = nil })
		if out := d.step(); len(out.creates) > 0 || complete(out) != "True Complete" {
			t.Errorf("%v, %s", creates(out), complete(out))
		}
	})
	t.Run("a node with Windows needs a kubectl image", func(t *testing.T) {
		d := newDesk(t, planOf(func(p *upgradev1.Plan) { p.Spec.Cordon = true }), 0)
		d.node("w", func(n *corev1.Node) { n.Labels[corev1.LabelOSStable] = windows })
		if out := d.step(); complete(out) != "False ValidationFailed" || len(out.creates) > 0 {
			t.Error(complete(out))
		}
	})
	t.Run("the same status is not written twice", func(t *testing.T) {
		d := newDesk(t, planOf(func(p *upgradev1.Plan) { p.Spec.Concurrency = 3 }), 5)
		d.step()
		first := d.step()
		d.now = d.now.Add(time.Hour)
		if second := d.step(); !cmp.Equal(first.status, second.status) || len(second.events) > 0 {
			t.Errorf("%s; events %v", cmp.Diff(first.status, second.status), second.events)
		}
	})
}

var update = os.Getenv("UPDATE_GOLDEN") != ""

// TestJobs compares whole Jobs with files; UPDATE_GOLDEN=1 writes them.
func TestJobs(t *testing.T) {
	full := func(p *upgradev1.Plan) {
		p.Labels = map[string]string{"team": "a", "objectset.rio.cattle.io/hash": "no"}
		p.Annotations = map[string]string{"note": "b", "kubectl.kubernetes.io/last-applied-configuration": "no", upgradev1.AnnotationDigest: "no"}
		s := &p.Spec
		s.Exclusive, s.PriorityClassName, s.ImagePullSecrets = true, "high", []corev1.LocalObjectReference{{Name: "pull"}}
		s.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
		s.Secrets = []upgradev1.SecretSpec{{Name: "one", Path: "/host/one"}, {Name: "two.x", Path: "rel", IgnoreUpdates: true, DefaultMode: new(int32(0o400))}, {Name: "three"}}
		s.Prepare = &upgradev1.ContainerSpec{Image: "docker.io/library/busybox", Command: []string{"sh"}, Args: []string{"-c", "true"}}
		s.Drain = &upgradev1.DrainSpec{
			Timeout: new(intstr.FromInt32(1500000000)), GracePeriod: new(int32(-1)), Force: true, DisableEviction: true, SkipWaitForDeleteTimeout: 60,
			PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "x"}},
		}
		s.Upgrade.Env = []corev1.EnvVar{{Name: "A", Value: "b"}}
		s.Upgrade.Volumes = []upgradev1.HostPathVolume{{Name: "etc", Source: "/etc", Destination: "/d"}}
		s.JobActiveDeadlineSecs, s.PostCompleteDelay = new(int64(0)), new(upgradev1.Duration("20m"))
		s.Cordon = true
	}
	for _, tt := range []struct {
		name   string
		change func(*upgradev1.Plan)
		node   node
	}{
		{name: "least", change: func(*upgradev1.Plan) {}, node: node{name: "node1", host: "node1", os: "linux"}},
		{name: "full", change: full, node: node{name: "node1.example.org", host: "node1", os: "linux", unschedulable: true}},
		{name: "windows", change: func(p *upgradev1.Plan) { p.Spec.Cordon = true }, node: node{name: "win", host: "win", os: windows}},
		{name: "windows-full", change: func(p *upgradev1.Plan) {
			full(p)
			p.Spec.Prepare.SecurityContext = &corev1.SecurityContext{RunAsNonRoot: new(false)}
			p.Spec.Upgrade.SecurityContext = &corev1.SecurityContext{WindowsOptions: &corev1.WindowsSecurityContextOptions{RunAsUserName: new("Administrator")}}
		}, node: node{name: "win", host: "win", os: windows}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := planOf(tt.change)
			p.Status = upgradev1.PlanStatus{LatestVersion: "v1.36.3", LatestHash: known}
			r, err := validate(p)
			if err != nil {
				t.Fatal(err)
			}
			s := DefaultSettings()
			s.KubectlImageWindows = "kubectl:windows"
			got, err := yaml.Marshal(makeJob(p, tt.node, "system-upgrade-controller", s, r.delay))
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join("testdata", "job-"+tt.name+".yaml")
			if update {
				if err := os.WriteFile(file, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(string(want), string(got)); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

func TestSettingsMatchSystemUpgradeController(t *testing.T) {
	env := map[string]string{
		"SYSTEM_UPGRADE_JOB_ACTIVE_DEADLINE_SECONDS": "900", "SYSTEM_UPGRADE_JOB_ACTIVE_DEADLINE_SECONDS_MAX": "1000", "SYSTEM_UPGRADE_JOB_BACKOFF_LIMIT": "99",
		"SYSTEM_UPGRADE_JOB_KUBECTL_IMAGE": "k", "SYSTEM_UPGRADE_JOB_KUBECTL_IMAGE_WINDOWS": "w", "SYSTEM_UPGRADE_JOB_PRIVILEGED": "false", "SYSTEM_UPGRADE_JOB_IMAGE_PULL_POLICY": "Always",
		"SYSTEM_UPGRADE_JOB_TTL_SECONDS_AFTER_FINISH": "1", "SYSTEM_UPGRADE_JOB_POD_REPLACEMENT_POLICY": "Failed", "SYSTEM_UPGRADE_PLAN_POLLING_INTERVAL": "5m",
	}
	lookup := func(m map[string]string) func(string) (string, bool) {
		return func(k string) (string, bool) { v, ok := m[k]; return v, ok }
	}
	got, err := SettingsFrom(lookup(env))
	want := Settings{900, 1000, 99, "k", "w", false, corev1.PullAlways, 1, batchv1.Failed, 5 * time.Minute}
	if err != nil || got != want {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	for k := range env {
		env[k] = "what?"
	}
	delete(env, "SYSTEM_UPGRADE_JOB_KUBECTL_IMAGE")
	delete(env, "SYSTEM_UPGRADE_JOB_KUBECTL_IMAGE_WINDOWS")
	if got, err := SettingsFrom(lookup(env)); err == nil || got != DefaultSettings() {
		t.Errorf("invalid settings do not get their default: %+v, %v", got, err)
	}
	if got, err := SettingsFrom(lookup(map[string]string{"SYSTEM_UPGRADE_PLAN_POLLING_INTERVAL": "1m"})); err == nil || got != DefaultSettings() {
		t.Errorf("a polling interval of a minute is accepted: %v", err)
	}
	for _, tt := range []struct {
		plan          *int64
		usual, atMost int64
		want          string
	}{
		{plan: nil, usual: 600, want: "600"}, {plan: new(int64(-1)), usual: 600, want: "600"}, {plan: new(int64(0)), usual: 600, want: "null"}, {plan: new(int64(0)), usual: 600, atMost: 700, want: "700"}, {plan: new(int64(50)), usual: 600, atMost: 40, want: "40"}, {plan: nil, want: "null"},
	} {
		d, _ := json.Marshal(deadline(planOf(func(p *upgradev1.Plan) { p.Spec.JobActiveDeadlineSecs = tt.plan }), Settings{ActiveDeadlineSeconds: tt.usual, ActiveDeadlineSecondsMax: tt.atMost}))
		if string(d) != tt.want {
			t.Errorf("%v of %d and at most %d: %s, want %s", tt.plan, tt.usual, tt.atMost, d, tt.want)
		}
	}
}

// BenchmarkHeartbeats measures the cost of a Node's heartbeat.
func BenchmarkHeartbeats(b *testing.B) {
	d := newDesk(b, planOf(), 10_000)
	d.step()
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n7", UID: "uid-n7", Labels: map[string]string{corev1.LabelHostname: "n7", corev1.LabelOSStable: "linux"}},
		Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}, NodeInfo: corev1.NodeSystemInfo{KubeletVersion: "v1.35.4+k3s1"}},
	}
	d.book.wake = func(string, time.Duration) { b.Fatal("a heartbeat wakes a Plan") }
	for b.Loop() {
		n.ResourceVersion = d.version()
		d.book.setNode(record[*node](b, trimNode, n), false)
	}
}

// The status of a node reports the state of its Job's pod, with a reason if it makes no progress.
func TestStatusReportsStateOfPods(t *testing.T) {
	waiting := func(reason string) corev1.ContainerState {
		return corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: "now and then other words"}}
	}
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	done := corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}
	d := newDesk(t, &upgradev1.Plan{
		ObjectMeta: metav1.ObjectMeta{Name: "k3s", Namespace: "system-upgrade", UID: "plan"},
		Spec:       upgradev1.PlanSpec{Concurrency: 1, Version: "v1", NodeSelector: &metav1.LabelSelector{}, Upgrade: &upgradev1.ContainerSpec{Image: "k3s"}},
	}, 1)
	d.step()
	job := d.book.jobsOfPlan("k3s")[0]
	for i, tt := range []struct {
		name            string
		pod             string
		init, main      corev1.ContainerState
		conditions      []corev1.PodCondition
		reason, message string
		events          []string
	}{
		{name: "no pod yet", pod: "p1", init: waiting("PodInitializing"), main: waiting("PodInitializing"), reason: "JobRunning", message: "Job " + job.name + " runs"},
		{
			name: "not scheduled", pod: "p1", reason: "PodUnschedulable", message: "pod p1 is not scheduled: 0/1 nodes are available", events: []string{"PodUnschedulable"},
			conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/1 nodes are available"}},
		},
		{name: "image not pulled", pod: "p1", init: waiting("ErrImagePull"), main: waiting("PodInitializing"), reason: "ImagePullError", message: "image kubectl of container drain cannot be pulled", events: []string{"ImagePullError"}},
		{name: "image still not pulled", pod: "p1", init: waiting("ImagePullBackOff"), main: waiting("PodInitializing"), reason: "ImagePullError", message: "image kubectl of container drain cannot be pulled"},
		{name: "drains", pod: "p1", init: running, main: waiting("PodInitializing"), reason: "Draining", message: "container drain of pod p1 runs"},
		{name: "upgrades", pod: "p1", init: done, main: running, reason: "Upgrading", message: "container upgrade of pod p1 runs"},
		{
			name: "failed", pod: "p1", init: done, reason: "PodFailed", message: "container upgrade of pod p1 ended with exit code 3: no space left on device", events: []string{"PodFailed"},
			main: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 3, Reason: "Error", Message: "copying\nno space left on device\n"}},
		},
		{name: "a new pod", pod: "p2", init: done, main: running, reason: "Upgrading", message: "container upgrade of pod p2 runs"},
		{name: "an event of the old pod", pod: "p1", init: done, main: running, reason: "Upgrading", message: "container upgrade of pod p2 runs"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: tt.pod, CreationTimestamp: metav1.NewTime(d.now), Labels: map[string]string{batchv1.JobNameLabel: job.name}}}
			if tt.pod == "p2" {
				p.CreationTimestamp = metav1.NewTime(d.now.Add(time.Minute))
			}
			p.Status = corev1.PodStatus{
				Conditions: tt.conditions, InitContainerStatuses: []corev1.ContainerStatus{{Name: "drain", Image: "kubectl", State: tt.init}},
				ContainerStatuses: []corev1.ContainerStatus{{Name: "upgrade", Image: "k3s:v1", State: tt.main}},
			}
			d.book.setPod(record[*pod](t, trimPod, p))
			out := d.step()
			var events []string
			for _, e := range out.events {
				events = append(events, e.reason)
			}
			n := out.status.Constellation.Nodes[0]
			if n.Reason != tt.reason || n.Message != tt.message || i > 0 && !slices.Equal(events, tt.events) {
				t.Errorf("%s: %s, events %q; want %s: %s, %q", n.Reason, n.Message, events, tt.reason, tt.message, tt.events)
			}
			if out.again != (time.Time{}) || len(out.creates)+len(out.deletes) > 0 {
				t.Errorf("unexpected actions: %+v", out)
			}
		})
	}
	d.over(job, batchv1.JobFailed, "Job has reached the specified backoff limit")
	d.book.setPod(record[*pod](t, trimPod, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p2", CreationTimestamp: metav1.NewTime(d.now.Add(time.Minute)), Labels: map[string]string{batchv1.JobNameLabel: job.name}},
		Status:     corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: "upgrade", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137, Reason: "OOMKilled"}}}}},
	}))
	want := "Job system-upgrade/" + job.name + " failed on Node n0: BackoffLimitExceeded: Job has reached the specified backoff limit; container upgrade of pod p2 ended with exit code 137 (OOMKilled)"
	if got := d.step().status.Constellation.Nodes[0]; got.State != upgradev1.NodeFailed || got.Message != want {
		t.Errorf("%s: %s\nwant %s", got.State, got.Message, want)
	}
}

// Lines that kubectl drain writes while it waits, and other lines of its log.
func TestBlockedPodsInDrainLog(t *testing.T) {
	line := func(namespace, pod, why string) string {
		return fmt.Sprintf("evicting pod %s/%s\nerror when evicting pods/%q -n %q (will retry after 5s): %s\n", namespace, pod, pod, namespace, why)
	}
	const plain, full = "Cannot evict pod as it would violate the pod's disruption budget.", "Cannot evict pod as it would violate the pod's disruption budget. The disruption budget web needs 2 healthy pods and has 2 currently"
	for _, tt := range []struct{ name, log, want string }{
		{name: "nothing", log: "node/n1 cordoned\nWarning: ignoring DaemonSet-managed Pods: kube-system/proxy\nevicting pod a/b\npod/b evicted\nnode/n1 drained\n", want: ""},
		{name: "kubectl", log: line("shop", "web-0", plain), want: "pod shop/web-0 may not be evicted: " + plain},
		{name: "our own drain", log: "node/n1 cordoned\n" + line("shop", "web-0", full), want: "pod shop/web-0 may not be evicted: the disruption budget web needs 2 healthy pods and has 2 currently"},
		{name: "the same one again", log: line("shop", "web-0", plain) + line("shop", "web-0", full), want: "pod shop/web-0 may not be evicted: the disruption budget web needs 2 healthy pods and has 2 currently"},
		{name: "two", log: line("shop", "web-1", plain) + line("bank", "db", full), want: "pod bank/db may not be evicted: the disruption budget web needs 2 healthy pods and has 2 currently; nor may shop/web-1"},
		{name: "four", log: line("d", "d", plain) + line("c", "c", plain) + line("b", "b", plain) + line("a", "a", full), want: "pod a/a may not be evicted: the disruption budget web needs 2 healthy pods and has 2 currently; nor may b/b and 2 more"},
		{
			name: "a terminating namespace", log: "error when evicting pod \"a\" from terminating namespace \"b\" (will retry after 5s): pods \"a\" is forbidden\n",
			want: "pod b/a may not be evicted: pods \"a\" is forbidden",
		},
		{name: "a final error", log: "error when evicting pods/\"a\" -n \"b\": global timeout reached: 2s\n", want: ""},
		{name: "invalid quotes", log: "error when evicting pods/\"a\\q\" -n \"b\" (will retry after 5s): no\n", want: ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := blockedPods(tt.log); got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
}

// FuzzDrainLog parses arbitrary logs of a drain.
func FuzzDrainLog(f *testing.F) {
	f.Add("error when evicting pods/\"a\" -n \"b\" (will retry after 5s): Cannot evict pod as it would violate the pod's disruption budget.\n")
	f.Add("error when evicting pod \"a\" from terminating namespace \"b\" (will retry after 5s): no")
	f.Fuzz(func(t *testing.T, log string) {
		got := blockedPods(log)
		if strings.ContainsFunc(got, unicode.IsControl) || !utf8.ValidString(got) || len(got) > 2*(63+253)+lastWords+200 {
			t.Errorf("%q", got)
		}
		if got != blockedPods(log+"\nnode/n1 drained\n") {
			t.Errorf("%q lacks the number of the other pods", got)
		}
	})
}

// The blocker of a drain stays in the status until the log changes or the pod continues.
func TestBlockedDrainIsReported(t *testing.T) {
	d := newDesk(t, planOf(), 1)
	d.step()
	job := d.book.jobsOfPlan("k3s-server")[0]
	setState := func(init, main corev1.ContainerState) {
		d.book.setPod(record[*pod](t, trimPod, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "p", CreationTimestamp: metav1.NewTime(d.now), Labels: map[string]string{batchv1.JobNameLabel: job.name}},
			Status: corev1.PodStatus{
				InitContainerStatuses: []corev1.ContainerStatus{{Name: "drain", State: init}}, ContainerStatuses: []corev1.ContainerStatus{{Name: "upgrade", State: main}},
			},
		}))
	}
	is := func(reason, message string, events ...string) {
		t.Helper()
		out := d.step()
		var got []string
		for _, e := range out.events {
			got = append(got, e.reason)
		}
		if n := out.status.Constellation.Nodes[0]; n.Reason != reason || n.Message != message || !slices.Equal(got, events) {
			t.Errorf("%s: %s, events %q; want %s: %s, %q", n.Reason, n.Message, got, reason, message, events)
		}
	}
	runs, waits := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}, corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "PodInitializing"}}
	drain := drainAsked{job.name, "p"}
	setState(runs, waits)
	is("Draining", "container drain of pod p runs")
	d.book.setDrain(drain, "")
	is("Draining", "container drain of pod p runs")
	d.book.setDrain(drain, "held")
	is("DrainBlocked", "held", "DrainBlocked")
	setState(runs, waits)
	is("DrainBlocked", "held")
	if got := d.book.draining(); !slices.Equal(got, []drainAsked{drain}) {
		t.Errorf("drains %v are read", got)
	}
	d.book.setDrain(drain, "")
	is("Draining", "container drain of pod p runs")
	setState(corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}, runs)
	d.book.setDrain(drain, "held")
	is("Upgrading", "container upgrade of pod p runs")
}

// TestNodeThatArrivesAfterTheDecision: a Node that the informer delivers after the decision, and before the API server lists it, was not
// in the decision.
func TestNodeThatArrivesAfterTheDecision(t *testing.T) {
	d := newDesk(t, planOf(), 1)
	v := d.fill()
	n := d.last["n0"]
	if !d.book.hadNode(&v, n.Name, n.ResourceVersion) {
		t.Error("a Node that was there is unknown")
	}
	d.node("n1", func(*corev1.Node) {})
	if n := d.last["n1"]; d.book.hadNode(&v, n.Name, n.ResourceVersion) {
		t.Error("a later Node counts as one that was there")
	}
	if v := d.fill(); !d.book.hadNode(&v, n.Name, n.ResourceVersion) {
		t.Error("the next view does not have the Node")
	}
}
