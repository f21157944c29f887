package drill

import (
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/sandbox"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/recorder"
)

// newDrills keeps the sandboxes of a test apart from those of the user.
func newDrills(t *testing.T) *Drills {
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	dirs := sandbox.Dirs{Cache: t.TempDir(), State: t.TempDir()}
	return New(dirs, sandbox.New(dirs, "", log), log)
}

// TestDrillsOfHollowMachines upgrades hollow machines with three seeds. The invariants
// hold, and nothing is left.
func TestDrillsOfHollowMachines(t *testing.T) {
	if testing.Short() {
		t.Skip("three rollouts take two minutes")
	}
	if _, err := controlplane.FindBinaries(); err != nil {
		t.Skip(err)
	}
	for _, seed := range []uint64{1, 2, 3} {
		t.Run("seed "+string(rune('0'+seed)), func(t *testing.T) {
			dir := t.TempDir()
			journal := filepath.Join(t.ArtifactDir(), "journal.jsonl")
			r, err := newDrills(t).Drill(t.Context(), engine.DrillSpec{Workspace: dir, Machines: hollow, Seed: seed, Journal: journal}, func(text string) { t.Log(text) })
			if err != nil {
				t.Fatal(err)
			}
			if r.Outcome != engine.DrillPassed {
				t.Errorf("%s: %s; its journal: %s\n%+v", r.Outcome, r.Why, journal, r.Rules)
			}
			t.Logf("%+v\n%s", r.Injected, strings.Join(r.Summary, "\n"))
			if l, err := os.ReadDir(dir); err != nil || len(l) > 0 {
				t.Errorf("%v are left, %v", l, err)
			}
		})
	}
}

func TestScenarioFollowsFromTheSeed(t *testing.T) {
	different := false
	for seed := range uint64(50) {
		for _, kind := range []string{hollow, simulated, real} {
			spec := engine.DrillSpec{Seed: seed, Count: 6}
			a, err := scenario(kind, spec)
			if err != nil {
				t.Fatal(err)
			}
			b, _ := scenario(kind, spec)
			if len(a) != 6 || !reflect.DeepEqual(a, b) {
				t.Fatalf("seed %d gives %+v and %+v", seed, a, b)
			}
			spec.Seed++
			next, _ := scenario(kind, spec)
			different = different || !reflect.DeepEqual(a, next)
			for _, in := range a {
				f := faultNamed(in.Fault)
				if in.Nth < 1 || in.Nth > most(kind, in.Point) || (in.LastsMS > 0) != f.lasts || time.Duration(in.LastsMS)*time.Millisecond > longestFault[kind] {
					t.Errorf("seed %d: %+v", seed, in)
				}
			}
		}
	}
	if !different {
		t.Error("all seeds are alike")
	}
	for seed := range uint64(50) {
		same, err := scenario(real, engine.DrillSpec{Seed: seed, Count: 8, Kubernetes: kubernetesFrom})
		if err != nil {
			t.Fatal(err)
		}
		for _, in := range same {
			if in.Point == pointKubeadm {
				t.Errorf("seed %d waits for kubeadm, which has nothing to do: %+v", seed, in)
			}
		}
	}
	for _, tt := range []struct {
		what, kind string
		spec       engine.DrillSpec
		want       string
	}{
		{"hollow machines have no power to lose", hollow, engine.DrillSpec{Faults: []string{"power-cut"}}, "say --machines=real, which can"},
		{"simulated ones no cable", simulated, engine.DrillSpec{Faults: []string{"frozen", "isolated"}}, "say --machines=real, which can"},
		{"nobody knows the fault", real, engine.DrillSpec{Faults: []string{"flood"}}, "--list"},
		{"Kubernetes stays, and with it etcd", real, engine.DrillSpec{Faults: []string{"power-cut-etcd"}, Kubernetes: kubernetesFrom}, "leave --kubernetes out"},
	} {
		if _, err := scenario(tt.kind, tt.spec); engine.ExitCode(err) != engine.ExitUsage || !strings.Contains(engine.Remedy(err), tt.want) {
			t.Errorf("%s: %v, remedy %q, want one with %q", tt.what, err, engine.Remedy(err), tt.want)
		}
	}
}

// Each fault is well-formed: somebody looks it up by name and machines.
func TestFaults(t *testing.T) {
	for _, f := range newDrills(t).Faults() {
		if f.Does == "" || len(f.Machines) == 0 || len(f.Points) == 0 {
			t.Errorf("%+v", f)
		}
	}
}

func TestJudge(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(1000+int64(s), 0) }
	breaches := []recorder.Breach{
		{Time: at(5), Rule: recorder.ReadyFloor, What: "before the fault"},
		{Time: at(12), Rule: recorder.ReadyFloor, What: "in it"},
		{Time: at(12), Rule: recorder.Pairs, What: "of a rule that it does not excuse"},
		{Time: at(49), Rule: recorder.ReadyFloor, What: "of it still"},
		{Time: at(51), Rule: recorder.ReadyFloor, What: "long after it"},
	}
	rules := judge(breaches, []window{{fault: "power-cut", from: at(10), to: at(20), rules: []recorder.Rule{recorder.ReadyFloor}}}, []recorder.Rule{recorder.EtcdVoters})
	got := map[string][]string{}
	for _, r := range rules {
		for _, b := range r.Breaches {
			got[r.Rule] = append(got[r.Rule], b[strings.Index(b, ": ")+2:])
		}
		for _, b := range r.Excused {
			got[r.Rule+" excused"] = append(got[r.Rule+" excused"], b[strings.Index(b, ": ")+2:])
		}
		if r.NotAsked {
			got["not asked"] = append(got["not asked"], r.Rule)
		}
	}
	want := map[string][]string{
		"ready-floor":         {"before the fault", "long after it"},
		"ready-floor excused": {"in it (power-cut)", "of it still (power-cut)"},
		"pairs":               {"of a rule that it does not excuse"},
		"not asked":           {"etcd-voters"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("judged %v, want %v", got, want)
	}
	if len(rules) != len(recorder.Rules) {
		t.Errorf("%d rules are in the report, there are %d", len(rules), len(recorder.Rules))
	}
}

// Points are counted from the begin on, each thing once.
func TestPoints(t *testing.T) {
	s := newSeen()
	var got []at
	for _, e := range []recorder.Entry{
		{Node: &recorder.Node{Name: "old", UID: "0", CordonedByUs: true}},
		{Target: &recorder.Target{Ready: true}},
		{Mark: recorder.Begin},
		{Target: &recorder.Target{}},
		{Target: &recorder.Target{Phase: "apply", Node: "cp"}},
		{Target: &recorder.Target{Phase: "apply", Node: "cp", Line: "another"}},
		{Pending: &recorder.Pending{Token: "t", Donor: "old"}},
		{Machines: &recorder.Machines{List: []recorder.Machine{{ID: "i", Name: "new", Token: "t", State: "Creating"}}}},
		{Node: &recorder.Node{Name: "new", UID: "1", Donor: "old"}},
		{Node: &recorder.Node{Name: "new", UID: "1", Donor: "old", Ready: true}},
		{Node: &recorder.Node{Name: "old", UID: "0", CordonedByUs: true}},
		{Node: &recorder.Node{Name: "older", UID: "2", CordonedByUs: true}},
		{Pending: &recorder.Pending{Token: "t", Donor: "old", Goal: "Leave", Node: "old"}},
		{Machines: &recorder.Machines{List: []recorder.Machine{{ID: "o", Name: "old", State: "Terminating"}}}},
		{Node: &recorder.Node{Name: "older", UID: "2", CordonedByUs: true, Gone: true}},
	} {
		got = append(got, s.points(&e)...)
	}
	want := []at{
		{pointBegun, 1, ""},
		{pointKubeadm, 1, "cp"},
		{pointIntent, 1, "old"},
		{pointRequested, 1, "new"},
		{pointAdopted, 1, "new"},
		{pointReady, 1, "new"},
		{pointCordoned, 1, "older"},
		{pointBound, 1, "old"},
		{pointGoing, 1, "old"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("points are %v, want %v", got, want)
	}
}

// A drill has a place of its own, and no other.
func TestEnter(t *testing.T) {
	d, dir := newDrills(t), t.TempDir()
	quiet := func(string, ...any) {}
	place, leave, err := d.enter(t.Context(), dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := d.enter(t.Context(), dir, quiet); engine.ExitCode(err) != engine.ExitHeld {
		t.Errorf("a second drill in the same place: %v", err)
	}
	if _, err := d.Drill(t.Context(), engine.DrillSpec{Workspace: dir, Machines: hollow, Kubernetes: "v1.34.0"}, nil); engine.ExitCode(err) != engine.ExitUsage {
		t.Errorf("an upgrade that nobody makes: %v", err)
	}
	if err := os.WriteFile(filepath.Join(place, "left"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	leave()
	if l, err := os.ReadDir(dir); err != nil || len(l) > 0 {
		t.Errorf("%v are left, %v", l, err)
	}
	if err := os.Mkdir(place, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(place, "mine"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := d.enter(t.Context(), dir, quiet); err == nil {
		t.Error("a directory that no drill has made was taken")
	}
	if _, err := os.Stat(filepath.Join(place, "mine")); err != nil {
		t.Error(err)
	}
}
