package enginefake

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/tui/view"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cloud/section"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/workspace"
	"constellation/internal/golden"
)

// HopPlan is a realistic plan of an image and Kubernetes upgrade of a small cluster.
func HopPlan() *plan.Plan {
	const digest = "3f1c9e5b7a2d4c6e8f0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60"
	p := UpgradePlan()
	p.Components = []plan.ComponentCheck{{Name: "Kubernetes", Kind: "kubernetes", Now: "v1.35.4", NextHop: "v1.36.3"}, {Name: "OS image", Kind: "image", Now: "v1.0.0", NextHop: "v1.1.0"}}
	p.To.Kubernetes = "v1.36.3"
	p.Changes = &plan.Changes{
		Nodes: map[string]int{"control-plane": 1, "workers": 2}, KindsChanged: []string{"nodeversions.update.edgeless.systems"},
		Measurements: []plan.MeasurementChange{{PCR: 9, From: digest, To: "8" + digest[1:]}},
		ConfigMaps:   []string{"kube-system/join-config (changed)"}, Charts: []string{"constellation-operators"},
		Least: 3 * time.Minute, Most: 8 * time.Minute, Basis: "three replacements, as long as those before",
	}
	p.Findings = []plan.Finding{
		{
			ID: "local-data", Severity: plan.Warn, Named: true, Title: "1 volume goes with its node", Source: "disruption",
			Detail: "db/pg-0 is on worker-0", Objects: []string{"persistentvolume/pg-0"}, Remedy: "if it is meant as it is, `--ack local-data`",
		},
		{
			ID: "oldest-supports-kubernetes", Severity: plan.Warn, Named: true, Title: "image v1.0.0 does not list Kubernetes v1.36.3", Source: "versions",
			Detail: "control planes of the old image run it until they are replaced",
		},
		{ID: "probes", Severity: plan.Warn, Title: "2 workloads have no readiness probe", Source: "disruption"},
	}
	p.Notes = []string{"Image and Kubernetes go up in one write."}
	p.Steps = []plan.Step{
		{ID: check.StepBackup, Title: "Back up what an upgrade can destroy", Effect: "every definition and custom resource is in /home/ops/demo/constellation-upgrade/upgrade-20261121070501-1a2b3c4d"},
		{ID: engine.StepComponents, Title: "Publish node components", Effect: "ConfigMap k8s-components-sha256-cb7e says what nodes install", Finished: true},
		{ID: engine.StepJoinConfig, Title: "Let in machines of the new image", Effect: "machines of image v1.1.0 are let in, beside those of v1.0.0", Details: []string{"PCR 9: 3f1c9e5b to 8f1c9e5b"}},
		{ID: plan.StepCharts, Title: "Upgrade the services", Effect: "4 kinds and 2 charts with operator v1.1.0, join-service v1.1.0"},
		{ID: check.StepTarget, Title: "Set the target of all nodes", Effect: "NodeVersion constellation-version is set to image v1.1.0 and Kubernetes v1.36.3 in one write; from then on the operator continues even if this program ends", Final: true, Warning: "The disks of replaced nodes are gone for good, and Kubernetes never goes down again."},
		{ID: plan.StepRollout, Title: "Wait until all nodes are new", Effect: "replaces 3 nodes, control planes first, one after the other"},
	}
	return p
}

// HopEvents are the events of a run of a plan; middle is an index in its rollout.
func HopEvents(t *testing.T, p *plan.Plan) (events []plan.Event, middle int) {
	t.Helper()
	data, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	at := Start
	add := func(after time.Duration, ev plan.Event) {
		at = at.Add(after)
		ev.Seq, ev.Time, ev.Run = uint64(len(events)+1), at, p.ID
		events = append(events, ev)
	}
	add(0, plan.Event{Kind: plan.KindHello, Schema: plan.Schema, Tool: "constellation v1.1.0", Object: p.Cluster})
	add(0, plan.Event{Kind: plan.KindPlan, Data: data})
	for i, s := range p.Steps {
		switch {
		case s.Finished:
			add(time.Second, plan.Event{Kind: plan.KindStep, Step: s.ID, State: plan.StateSkipped, Text: s.Title})
			continue
		default:
			add(time.Second, plan.Event{Kind: plan.KindStep, Step: s.ID, State: plan.StateRunning, Text: s.Title})
		}
		if i == len(p.Steps)-1 {
			add(time.Second, plan.Event{Kind: plan.KindProgress, Step: s.ID, Current: 1, Total: 3, Counts: map[string]int64{plan.NodeReady: 1, plan.NodeOutdated: 1, plan.NodeDraining: 1}})
			for _, n := range [][3]string{{"control-plane-1", "control-plane", plan.NodeReady}, {"worker-0", "workers", plan.NodeDraining}, {"worker-1", "workers", plan.NodeOutdated}, {"worker-2", "workers", plan.NodeReady}} {
				add(0, plan.Event{Kind: plan.KindNode, Step: s.ID, Node: n[0], Group: n[1], To: n[2]})
			}
			add(time.Second, plan.Event{Kind: plan.KindLog, Step: s.ID, Source: "operator", Level: "info", Text: "worker-0 is drained: 3 of 7 pods"})
			add(time.Second, plan.Event{
				Kind: plan.KindWait, Step: s.ID, Object: "rollout", State: "DrainBlocked", Node: "worker-0", Text: "the budget shop/cart allows no eviction of shop/cart-0",
				Remedy: "make room for the named pod; `constellation upgrade check` has the command that clears it",
			})
			middle = len(events)
			add(40*time.Second, plan.Event{Kind: plan.KindWait, Step: s.ID})
			add(0, plan.Event{Kind: plan.KindProgress, Step: s.ID, Current: 3, Total: 3, Counts: map[string]int64{plan.NodeReady: 3}})
		}
		add(5*time.Second, plan.Event{Kind: plan.KindStep, Step: s.ID, State: plan.StateDone, Text: s.Title, TookMS: 5000})
	}
	exit := 0
	res, err := json.Marshal(plan.Result{Status: plan.StateDone, Nodes: 3, Next: []string{"export KUBECONFIG=/home/ops/demo/constellation-admin.conf", "constellation status -C /home/ops/demo"}})
	if err != nil {
		t.Fatal(err)
	}
	add(0, plan.Event{Kind: plan.KindResult, State: plan.StateDone, Text: "cluster demo runs release v1.1.0 with image v1.1.0 and Kubernetes v1.36.3", Exit: &exit, Data: res})
	return events, middle
}

// UpgradePlan is a plan with one finding that must be acknowledged by ID.
func UpgradePlan() *plan.Plan {
	return &plan.Plan{
		ID: "upgrade-20261121070501-1a2b3c4d", Verb: plan.VerbApply, Cluster: "demo", Nodes: map[string]int{"workers": 2},
		From:       plan.Target{Release: "v1.1.0", Image: "v1.0.0", Kubernetes: "v1.35.4"},
		To:         plan.Target{Release: "v1.1.0", Image: "v1.1.0", Kubernetes: "v1.35.4"},
		Components: []plan.ComponentCheck{{Name: "OS image", Kind: "image", Now: "v1.0.0", NextHop: "v1.1.0"}},
		Changes:    &plan.Changes{Nodes: map[string]int{"workers": 2}},
		Findings: []plan.Finding{
			{ID: "local-data", Severity: plan.Warn, Named: true, Title: "data of db/pg will be lost", Source: "disruption"},
			{ID: "probes", Severity: plan.Warn, Title: "some pods have no probes", Source: "disruption"},
		},
		Steps: []plan.Step{
			{ID: check.StepBackup, Title: "Back up", Effect: "all is kept", Finished: true},
			{ID: check.StepTarget, Title: "Set the target", Effect: "nodes are replaced", Warning: "their disks are gone", Final: true},
			{ID: plan.StepRollout, Title: "Wait", Effect: "all nodes are new"},
		},
	}
}

// WordyStatus is a status with messages that are too long for a line.
func WordyStatus() engine.Status {
	st := DemoStatus()
	st.Nodes[1].State = plan.NodeNotReady
	st.Nodes[1].Message = "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady message:Network plugin returns error: cni plugin not initialized"
	st.Services[1].Message = "pod join-service-7d4b9c6f5-x2x8p: image registry.k8s.io/constellation/join-service:v1.1.0 cannot be pulled: connection refused"
	st.Health = []plan.Finding{{
		ID: "service-join-service", Severity: plan.Warn, Title: "join-service is not ready: 0 of 1 pods", Detail: st.Services[1].Message,
		Remedy: "`constellation sandbox shell control-plane-0` opens a shell on the machine; `crictl ps -a` and `crictl logs` show more there",
	}}
	return st
}

// DemoStatus is the status of a small cluster in which one service is not ready.
func DemoStatus() engine.Status {
	node := func(name, group, role string) cluster.Node {
		return cluster.Node{Name: name, Group: group, Role: role, State: plan.NodeReady, Kubernetes: "v1.35.4", Image: "sandboxes/demo/images/v1.1.0", ImageVersion: "v1.1.0", IP: "10.42.0.2", Current: true}
	}
	return engine.Status{
		Schema: "1.0", Cluster: "demo", Provider: "sandbox", Time: Start, Stage: engine.StageCluster, Reachable: true, APIServer: "v1.35.4",
		Target:   plan.Target{Release: "v1.1.0", Image: "v1.1.0", Kubernetes: "v1.35.4"},
		Nodes:    []cluster.Node{node("control-plane-0", "control-plane", "control-plane"), node("worker-0", "workers", "worker"), node("worker-1", "workers", "worker")},
		Machines: []engine.Machine{}, Health: []plan.Finding{},
		Services: []cluster.Service{{Name: "constellation-operator", Version: "v1.1.0", Kind: "release", Ready: 1, Wanted: 1}, {Name: "join-service", Version: "v1.1.0", Kind: "release", Ready: 0, Wanted: 1, Message: "image is being pulled"}},
	}
}

// Checks are the checks with goldens. Their values are from real checks; imageless is patch without
// an image.
var Checks = []string{
	"two-hops", "newest", "patch", "blocked", "blocked-goal", "old-kubelet", "trouble", "api-down", "stale-feed", "mixed", "hostile", "many", "written", "imageless",
}

// CheckIn reads a check from testdata.
func CheckIn(t testing.TB, name string) check.Check {
	t.Helper()
	b, err := Data.ReadFile("testdata/checks/" + name + ".json")
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	var k check.Check
	if err := d.Decode(&k); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return k
}

// UpgradeHome is a workspace whose cluster can be upgraded.
func UpgradeHome() engine.Home {
	h := DemoHome(engine.StageCluster)
	h.Next = []engine.Suggestion{{Title: "Show the status", Command: "constellation -C .demo status"}, {Title: "Check for upgrades", Command: "constellation -C .demo upgrade check", Why: "release v1.1.0 and Kubernetes v1.36.4 are known"}}
	return h
}

// CheckGolden compares got with a file in testdata of the tested package, or writes it with -update.
func CheckGolden(t *testing.T, name, got string) {
	t.Helper()
	golden.Equal(t, filepath.Join("testdata", filepath.FromSlash(name)), got)
}

// Recorded returns the events of a recorded run.
func Recorded(t testing.TB, name string) []plan.Event {
	t.Helper()
	b, err := Data.ReadFile("testdata/streams/" + name + ".jsonl")
	if err != nil {
		t.Fatal(err)
	}
	var list []plan.Event
	for sc := bufio.NewScanner(bytes.NewReader(b)); sc.Scan(); {
		var ev plan.Event
		if err := json.Unmarshal(sc.Bytes(), &ev); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		list = append(list, ev)
	}
	if len(list) == 0 {
		t.Fatalf("%s holds no events", name)
	}
	return list
}

// PlanIn returns the plan that a recorded run began with.
func PlanIn(t testing.TB, events []plan.Event) *plan.Plan {
	t.Helper()
	for _, ev := range events {
		if ev.Kind == plan.KindPlan {
			var p plan.Plan
			if err := json.Unmarshal(ev.Data, &p); err != nil {
				t.Fatal(err)
			}
			return &p
		}
	}
	t.Fatal("no plan in the stream")
	return nil
}

// Start is the start time of all recorded runs.
var Start = time.Date(2026, 11, 21, 7, 5, 1, 0, time.UTC)

// DemoHome is a workspace at a stage.
func DemoHome(stage engine.Stage) engine.Home {
	c := &workspace.Config{Name: "demo", Provider: workspace.ProviderConfig{Name: "sandbox", Section: section.Values{"name": "demo"}}, NodeGroups: map[string]workspace.NodeGroup{
		"control-plane": {Role: "control-plane", Count: 1}, "workers": {Role: "worker", Count: 2},
	}}
	for text, v := range map[string]interface{ UnmarshalText([]byte) error }{
		"v1.35.4": &c.Kubernetes, "v1.1.0": &c.Image, "1.1.0": &c.Services, "10.96.0.0/12": &c.ServiceCIDR, "10.244.0.0/16": &c.PodCIDR,
	} {
		if err := v.UnmarshalText([]byte(text)); err != nil {
			panic(err)
		}
	}
	next := []engine.Suggestion{{Title: "Create the cluster", Command: "constellation -C .demo init", Why: "machines exist and belong to no cluster yet"}}
	if stage == engine.StageCluster {
		next = []engine.Suggestion{{Title: "Show the status", Command: "constellation -C .demo status"}, {Title: "Check for upgrades", Command: "constellation -C .demo upgrade check"}}
	}
	return engine.Home{Dir: "/home/ops/demo", Stage: stage, Cluster: "demo", Config: c, Next: next}
}

// BackupPlan is the plan of a backup with its three steps.
func BackupPlan() *plan.Plan {
	return &plan.Plan{
		ID: "backup-20261121070501-1a2b3c4d", Verb: plan.VerbBackup, Cluster: "demo", Created: Start,
		Steps: []plan.Step{
			{ID: engine.StepBackupResources, Title: "Back up custom resources"},
			{ID: engine.StepBackupEtcd, Title: "Take a snapshot of etcd"},
			{ID: engine.StepBackupFinish, Title: "Complete and verify the backup"},
		},
	}
}

// BackupEvents are those of a run that makes a backup.
func BackupEvents() []plan.Event {
	at := func(ms int, e plan.Event) plan.Event {
		e.Time, e.Run = Start.Add(time.Duration(ms)*time.Millisecond), "backup-20261121070501-1a2b3c4d"
		return e
	}
	step := func(ms int, id, state, title string, took int64) plan.Event {
		return at(ms, plan.Event{Kind: plan.KindStep, Step: id, State: state, Text: title, TookMS: took})
	}
	p, err := json.Marshal(BackupPlan())
	if err != nil {
		panic(err)
	}
	res, err := json.Marshal(plan.Result{Status: plan.StateDone, TookMS: 7900})
	if err != nil {
		panic(err)
	}
	exit := 0
	return []plan.Event{
		at(0, plan.Event{Kind: plan.KindHello, Schema: "1.0", Object: "demo"}),
		at(1, plan.Event{Kind: plan.KindPlan, Data: p}),
		step(2, engine.StepBackupResources, plan.StateRunning, "Back up custom resources", 0),
		at(2000, plan.Event{
			Kind: plan.KindProgress, Step: engine.StepBackupResources, Object: "certificates.cert-manager.io", Current: 41000, Total: 102000,
			Counts: map[string]int64{"types": 9, "all_types": 22, "objects": 41000, "bytes": 64 << 20, "bytes_per_second": 32 << 20, "seconds_left": 3},
			Text:   "9 of 22 types, 41000 of 102000 objects, 64 MiB, 32 MiB/s, 3s left",
		}),
		step(5000, engine.StepBackupResources, plan.StateDone, "Back up custom resources", 5000),
		step(5001, engine.StepBackupEtcd, plan.StateRunning, "Take a snapshot of etcd", 0),
		at(6500, plan.Event{Kind: plan.KindProgress, Step: engine.StepBackupEtcd, Current: 90 << 20, Text: "bytes"}),
		at(6600, plan.Event{Kind: plan.KindLog, Source: "backup", Level: "warn", Text: "once more: take a snapshot of etcd: through the operator on cp-0: the API server does not answer: it broke off"}),
		step(7000, engine.StepBackupEtcd, plan.StateDone, "Take a snapshot of etcd", 1999),
		step(7001, engine.StepBackupFinish, plan.StateRunning, "Complete and verify the backup", 0),
		at(7500, plan.Event{Kind: plan.KindProgress, Step: engine.StepBackupFinish, Current: 128 << 20, Total: 264 << 20, Text: "bytes verified"}),
		step(7800, engine.StepBackupFinish, plan.StateDone, "Complete and verify the backup", 799),
		at(7900, plan.Event{Kind: plan.KindResult, State: plan.StateDone, Text: "backup backup-20261121070501-1a2b3c4d of cluster demo is whole", Data: res, Exit: &exit}),
	}
}

// CountsOf formats the counts of a timeline, to compare two of them.
func CountsOf(t *view.Timeline) string {
	return fmt.Sprint(t.Groups(), t.Finished(), t.Why.Text)
}

// WithoutImages changes what the engine returns to that of a cluster in a cloud that selects no image.
func (f *Engine) WithoutImages() *Engine {
	if c := f.HomeData.Config; c != nil {
		x := *c
		x.Image, x.Provider = version.Version{}, workspace.ProviderConfig{Name: "moon", Section: section.Values{"crater": "tycho"}}
		f.HomeData.Config = &x
	}
	st := &f.StatusData
	st.Provider, st.Target.Image = "moon", ""
	for i := range st.Nodes {
		st.Nodes[i].Image, st.Nodes[i].ImageVersion = "", ""
	}
	for i := range st.Machines {
		st.Machines[i].Image, st.Machines[i].ImageVersion = "", ""
	}
	f.Rollout.Target = cluster.NodeTarget{Kubernetes: st.Target.Kubernetes}
	if f.Plan != nil {
		f.Plan = planWithoutImage(f.Plan)
	}
	f.Events, f.Watched = eventsWithoutImage(f.Events), eventsWithoutImage(f.Watched)
	return f
}

// planWithoutImage returns a plan that changes no image. The sentences of its steps are those of the
// engine.
func planWithoutImage(p *plan.Plan) *plan.Plan {
	x := *p
	x.From.Image, x.To.Image = "", ""
	x.Components = slices.DeleteFunc(slices.Clone(p.Components), func(c plan.ComponentCheck) bool { return c.Kind == "image" })
	x.Findings = slices.DeleteFunc(slices.Clone(p.Findings), func(f plan.Finding) bool { return f.ID == "oldest-supports-kubernetes" })
	x.Notes = nil
	if p.Changes != nil {
		c := *p.Changes
		c.Measurements, c.ConfigMaps = nil, nil
		x.Changes = &c
	}
	x.Steps = slices.Clone(p.Steps)
	for i := range x.Steps {
		s := &x.Steps[i]
		switch {
		case s.ID == engine.StepJoinConfig && p.Verb == plan.VerbApply:
			s.Title, s.Effect, s.Details, s.Finished = "Publish attestation requirements", "ConfigMap join-config keeps its requirements for machines", nil, true
		default:
			for _, from := range []string{"image " + p.To.Image + " and ", " of image " + p.To.Image} {
				s.Effect = strings.ReplaceAll(s.Effect, from, "")
			}
		}
	}
	return &x
}

// eventsWithoutImage returns the events of a run whose plan changes no image.
func eventsWithoutImage(events []plan.Event) []plan.Event {
	out := slices.Clone(events)
	for i := range out {
		e := &out[i]
		if e.Kind != plan.KindPlan {
			continue
		}
		var p plan.Plan
		if json.Unmarshal(e.Data, &p) != nil {
			continue
		}
		x := planWithoutImage(&p)
		e.From, e.To = x.From.String(), x.To.String()
		e.Data, _ = json.Marshal(x) // it was JSON
	}
	return out
}
