package drill

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"constellation/engine"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/plan"
	"constellation/engine/sandbox"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/machine"
	"constellation/engine/sandbox/recorder"
	"constellation/internal/testneeds"
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
	testneeds.Time(t, "two minutes")
	testneeds.Hollow(t)
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
				if in.Nth < 1 || in.Nth > f.most(kind, in.Point, spec) || (in.LastsMS > 0) != f.lasts || time.Duration(in.LastsMS)*time.Millisecond > longestFault[kind] {
					t.Errorf("seed %d: %+v", seed, in)
				}
			}
		}
	}
	if !different {
		t.Error("all seeds are alike")
	}
	ofGoogle := map[string]bool{}
	for seed := range uint64(100) {
		for _, kind := range []string{hollow, simulated, real} {
			l, err := scenario(kind, engine.DrillSpec{Seed: seed, Count: 6, Cloud: gcp.Name})
			if err != nil {
				t.Fatal(err)
			}
			for _, in := range l {
				ofGoogle[in.Fault] = true
				if f := faultNamed(in.Fault); !slices.Contains(f.machines, kind) || !f.has(gcp.Name) {
					t.Errorf("seed %d of %s machines at Google has %+v", seed, kind, in)
				}
			}
		}
	}
	for _, name := range []string{"stockout", "name-reuse", "power-cut", "lost-writes", "api-server-killed"} {
		if !ofGoogle[name] {
			t.Errorf("no seed at Google has %s", name)
		}
	}
	for _, name := range []string{"lost-delete", "partial-list", "agent-killed"} {
		if ofGoogle[name] {
			t.Errorf("a seed at Google has %s", name)
		}
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
		{what: "hollow machines have no power to lose", kind: hollow, spec: engine.DrillSpec{Faults: []string{"power-cut"}}, want: "say --machines=real, which can"},
		{what: "simulated ones no disk", kind: simulated, spec: engine.DrillSpec{Faults: []string{"lost-writes"}}, want: "say --machines=real, which can"},
		{what: "simulated ones no cable", kind: simulated, spec: engine.DrillSpec{Faults: []string{"frozen", "isolated"}}, want: "say --machines=real, which can"},
		{what: "hollow machines have their own control planes", kind: hollow, spec: engine.DrillSpec{ControlPlanes: 3}, want: "--control-planes"},
		{what: "etcd wants an odd number", kind: simulated, spec: engine.DrillSpec{ControlPlanes: 2}, want: "--control-planes"},
		{what: "an unknown fault", kind: real, spec: engine.DrillSpec{Faults: []string{"flood"}}, want: "--list"},
		{what: "hollow machines have no agents", kind: hollow, spec: engine.DrillSpec{InPlace: true}, want: "--machines=simulated"},
		{what: "no machine is deleted in place", kind: simulated, spec: engine.DrillSpec{InPlace: true, Faults: []string{"lost-delete"}}, want: "leave --in-place out"},
		{what: "patches share etcd", kind: simulated, spec: engine.DrillSpec{InPlace: true, KubernetesFrom: "v1.36.3", Kubernetes: "v1.36.4", Faults: []string{"power-cut-etcd"}}, want: "leave it out"},
		{what: "no agent works for a replacement", kind: simulated, spec: engine.DrillSpec{Faults: []string{"agent-killed"}}, want: "add --in-place"},
		{what: "simulated ones have no disk in place either", kind: simulated, spec: engine.DrillSpec{InPlace: true, Faults: []string{"disk-full"}}, want: "say --machines=real"},
		{what: "the cloud of the sandbox has no zones", kind: hollow, spec: engine.DrillSpec{Faults: []string{"stockout"}}, want: "choose the cloud with --cloud"},
		{what: "lists of Google are whole", kind: hollow, spec: engine.DrillSpec{Cloud: "gcp", Faults: []string{"partial-list"}}, want: "choose the cloud with --cloud"},
		{what: "groups of an emulated cloud are replaced", kind: simulated, spec: engine.DrillSpec{Cloud: "gcp", InPlace: true}, want: "leave out --in-place or --cloud"},
		{what: "the only control plane stays", kind: simulated, spec: engine.DrillSpec{Cloud: "gcp", Faults: []string{"name-reuse"}}, want: "--control-planes=3"},
		{what: "an unknown cloud", kind: hollow, spec: engine.DrillSpec{Cloud: "aws"}, want: "--cloud=gcp"},
		{what: "Kubernetes stays, and with it etcd", kind: real, spec: engine.DrillSpec{Faults: []string{"power-cut-etcd"}, Kubernetes: kubernetesFrom}, want: "leave --kubernetes out"},
	} {
		if _, err := scenario(tt.kind, tt.spec); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(plan.Remedy(err), tt.want) {
			t.Errorf("%s: %v, remedy %q, want one with %q", tt.what, err, plan.Remedy(err), tt.want)
		}
	}
}

// A drill has a fault of all machines if it names it, and then in any case. Seeds of other drills keep their meaning.
func TestScenarioOfNamedFaults(t *testing.T) {
	for seed := range uint64(50) {
		for _, spec := range []engine.DrillSpec{{}, {InPlace: true, Kubernetes: kubernetesTo}, {Cloud: gcp.Name}, {ControlPlanes: 3}} {
			spec.Seed, spec.Count = seed, 2
			for _, tt := range []struct {
				faults []string
				want   bool
			}{
				{nil, false},
				{[]string{"power-cut", "operator-killed", "frozen"}, false},
				{[]string{"power-cut", "operator-killed", "frozen", powerCutAll}, true},
				{[]string{powerCutAll}, true},
			} {
				spec.Faults = tt.faults
				got, err := scenario(simulated, spec)
				if err != nil {
					t.Fatal(err)
				}
				if has := slices.ContainsFunc(got, func(in engine.DrillInjection) bool { return in.Fault == powerCutAll }); has != tt.want || len(got) != 2 {
					t.Errorf("%+v gives %+v, with %s: %t", spec, got, powerCutAll, tt.want)
				}
			}
		}
	}
	if _, err := scenario(hollow, engine.DrillSpec{Faults: []string{powerCutAll}}); plan.ExitCode(err) != plan.ExitUsage {
		t.Errorf("hollow machines have no power to lose: %v", err)
	}
}

// A console that refuses an upgrade during an outage, or a short time after it, does not end the drill.
func TestOutage(t *testing.T) {
	for name, tt := range map[string]struct {
		fault   string
		at, end time.Duration // before now; below zero: not yet
		want    bool
	}{
		"it lasts":                    {fault: powerCutAll, at: time.Second, end: -1, want: true},
		"it is over a moment ago":     {fault: powerCutAll, at: time.Minute, end: time.Second, want: true},
		"it is over for a long time":  {fault: powerCutAll, at: 2 * time.Minute, end: time.Minute, want: false},
		"it has not begun":            {fault: powerCutAll, at: -1, end: -1, want: false},
		"one machine lost its power":  {fault: "power-cut", at: time.Second, end: -1, want: false},
		"that of one machine is over": {fault: "power-cut", at: time.Minute, end: time.Second, want: false},
	} {
		t.Run(name, func(t *testing.T) {
			const since = time.Hour
			x := &run{begun: time.Now().Add(-since)}
			in := engine.DrillInjection{Fault: tt.fault, AtMS: -1, EndMS: -1}
			if tt.at >= 0 {
				in.AtMS = (since - tt.at).Milliseconds()
			}
			if tt.end >= 0 {
				in.EndMS = (since - tt.end).Milliseconds()
			}
			x.report = []engine.DrillInjection{in}
			if got := x.outage(); got != tt.want {
				t.Errorf("there is an outage: %t, want %t", got, tt.want)
			}
		})
	}
}

// All machines are off before one is switched on again. One that is deleted meanwhile is no error. Machines that exist are
// awaited until their Nodes have reported again.
func TestCutAll(t *testing.T) {
	var mu sync.Mutex
	var heard []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			_ = json.NewEncoder(w).Encode(sandboxapi.InstanceList{Instances: []cloud.Instance{
				{Name: "worker-0", State: cloud.Ready}, {Name: "control-plane-0", State: cloud.Ready}, {Name: "worker-1", State: cloud.Ready}, {Name: "worker-2", State: cloud.Terminating},
			}})
			return
		}
		mu.Lock()
		defer mu.Unlock()
		parts := strings.Split(r.URL.Path, "/")
		heard = append(heard, parts[len(parts)-1])
		if strings.Contains(r.URL.Path, "worker-1") {
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	defer srv.Close()
	box := sandboxapi.NewClient(srv.URL, "token")
	awaited := 0
	x := &run{switched: map[string]int{}, rec: &recorder.Recorder{}, tell: t.Logf, site: &site{
		powerAll: func(ctx context.Context, announce func([]string)) ([]string, error) {
			return powerAll(ctx, box, "sandbox", announce)
		},
		away: func(_ context.Context, names []string, _ time.Time) []string {
			awaited++
			return names[min(awaited, len(names)):]
		},
	}}
	if err := faultNamed(powerCutAll).happen(t.Context(), x, "", nil); err != nil {
		t.Fatal(err)
	}
	if want := []string{"stop", "stop", "stop", "reboot", "reboot", "reboot"}; !slices.Equal(heard, want) {
		t.Errorf("the cloud heard %q, want %q", heard, want)
	}
	if want := map[string]int{"control-plane-0": 1, "worker-0": 1, "worker-1": 1}; !reflect.DeepEqual(x.switched, want) || awaited != 3 {
		t.Errorf("power cycles are %v, want %v; machines were awaited %d times", x.switched, want, awaited)
	}
	j := x.rec.Journal()
	if o := recorder.As[*recorder.Outage](j[len(j)-1].Fact); o == nil || len(o.Machines) != 3 || len(o.Away) > 0 {
		t.Errorf("the journal has %+v", o)
	}
}

// Faults of an upgrade in place start at its points, and as often as it certainly comes to them.
func TestScenarioInPlace(t *testing.T) {
	used := map[string]bool{}
	for seed := range uint64(200) {
		for _, planes := range []int{1, 3} {
			spec := engine.DrillSpec{Seed: seed, InPlace: true, ControlPlanes: planes}
			got, err := scenario(simulated, spec)
			if err != nil || len(got) != defaultCount {
				t.Fatal(got, err)
			}
			for _, in := range got {
				f := faultNamed(in.Fault)
				used[in.Fault] = true
				// A lone control plane is not drained, and the last node ends the drill.
				drained := map[int]int{1: workers, 3: workers + 3}[planes]
				most := cmp.Or(map[string]int{pointScheduled: workers + planes, pointUpgraded: workers + planes - 1, pointBegun: 1, pointKubeadm: 1}[in.Point], drained)
				if !slices.Contains(f.placed, in.Point) || in.Nth < 1 || in.Nth > most {
					t.Errorf("seed %d with %d control planes: %+v", seed, planes, in)
				}
			}
		}
	}
	for i := range faults {
		if f := &faults[i]; used[f.name] != (f.placed != nil && slices.Contains(f.machines, simulated) && !f.named) {
			t.Errorf("%s was used: %t", f.name, used[f.name])
		}
	}
}

// A node can be past the stage in which its power was to be cut. Then that was not tried, is no failure, and excuses nothing.
func TestCutInAStageThatIsOver(t *testing.T) {
	c := &aCloud{booted: time.Unix(1000, 0), asked: make(chan struct{}), asks: make(chan struct{}), cut: func([]string) bool { return false }}
	srv := httptest.NewServer(c)
	defer srv.Close()
	x := &run{
		site: &site{cloud: sandboxapi.NewClient(srv.URL, "token"), limit: time.Minute}, switched: map[string]int{}, rec: &recorder.Recorder{}, tell: t.Logf,
		report: []engine.DrillInjection{{Fault: "power-cut-kubelet", Point: pointCordoned, Nth: 1, AtMS: -1, EndMS: -1}},
	}
	ahead, past := context.WithCancelCause(t.Context())
	x.ahead = ahead
	stage := faultNamed("power-cut-kubelet")
	done := make(chan error)
	go func() { done <- stage.happen(t.Context(), x, "control-plane-0", nil) }()
	<-c.asked
	past(errPast)
	x.over(0, stage, window{from: x.begun}, "", <-done)
	if in := x.report[0]; in.AtMS != -1 || in.EndMS != -1 || in.Err != "" || len(x.windows) > 0 {
		t.Errorf("the report has %+v, excuses are %+v", in, x.windows)
	}
	if want := [][]string{{"power-cut=control-plane-0:download-kubelet"}, {}}; !reflect.DeepEqual(c.heard, want) {
		t.Errorf("the cloud heard of %v, want %v", c.heard, want)
	}
}

// The journal of an agent shows whether its latest run ended with a success.
func TestUnfinished(t *testing.T) {
	const (
		head    = `{"head":{"request":{},"started":"2026-01-01T00:00:00Z"}}` + "\n"
		verify  = `{"said":{"seq":"1","progress":{"stage":"verify","state":"running"}}}` + "\n"
		kubelet = `{"said":{"seq":"2","progress":{"stage":"install-kubelet","state":"interrupted"}}}` + "\n"
		line    = `{"said":{"seq":"3","log":{"line":"success"}},"next":12}` + "\n"
		success = `{"said":{"seq":"4","success":{}}}` + "\n"
		failure = `{"said":{"seq":"4","failure":{"stage":"verify"}}}` + "\n"
	)
	for name, tt := range map[string]struct{ journal, want string }{
		"a success":                       {head + verify + kubelet + line + success, ""},
		"an interrupted stage":            {head + verify + kubelet + line, "install-kubelet"},
		"a failure":                       {head + verify + failure, "verify"},
		"a second run after the first":    {head + verify + success + head + verify, "verify"},
		"a run that was resumed":          {head + verify + failure + kubelet + success, ""},
		"a run that has not begun":        {head, "none"},
		"a success before a partial line": {head + verify + success + `{"said":{"se`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got := unfinished([]byte(tt.journal)); got != tt.want {
				t.Errorf("it is in stage %q, want %q", got, tt.want)
			}
		})
	}
}

// disks are machines whose agents have succeeded.
type disks struct {
	sandbox.Machines
	code int   // of the search for copies
	err  error // likewise
}

func (d disks) Exec(_ context.Context, _ string, command []string, out machine.Stdio) (int, error) {
	if command[0] == "cat" {
		_, err := io.WriteString(out.Out, `{"head":{}}`+"\n"+`{"said":{"success":{}}}`+"\n")
		return 0, err
	}
	return d.code, d.err
}

// A disk that cannot be searched for copies is not one without copies.
func TestLastRuns(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(sandboxapi.InstanceList{Instances: []cloud.Instance{{Name: "worker-0"}}})
	}))
	defer srv.Close()
	for name, tt := range map[string]struct {
		host disks
		want recorder.Run
	}{
		"nothing is left":             {disks{code: 1}, recorder.Run{Node: "worker-0"}},
		"copies are left":             {disks{}, recorder.Run{Node: "worker-0", Left: []string{agentCopies}}},
		"the disk cannot be searched": {disks{err: errors.New("it is off")}, recorder.Run{Node: "worker-0", Err: "it is off"}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := lastRuns(t.Context(), sandboxapi.NewClient(srv.URL, "token"), tt.host); !reflect.DeepEqual(got, []recorder.Run{tt.want}) {
				t.Errorf("runs are %+v, want %+v", got, tt.want)
			}
		})
	}
}

// Recorded drills can be repeated: their seeds still have the same meaning.
func TestRecordedSeedsMeanTheSame(t *testing.T) {
	f, err := os.Open("testdata/drills.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n := 0
	for d := json.NewDecoder(f); d.More(); n++ {
		var r engine.DrillReport
		if err := d.Decode(&r); err != nil {
			t.Fatal(err)
		}
		var spec engine.DrillSpec // reports of older programs have no versions
		flags := pflag.NewFlagSet("drill", pflag.ContinueOnError)
		kind := flags.String("machines", "", "")
		flags.StringVar(&spec.KubernetesFrom, "kubernetes-from", cmp.Or(r.KubernetesFrom, "v1.35.4"), "")
		flags.Uint64Var(&spec.Seed, "seed", 0, "")
		flags.IntVar(&spec.ControlPlanes, "control-planes", 0, "")
		flags.IntVar(&spec.Count, "count", 0, "")
		flags.BoolVar(&spec.InPlace, "in-place", false, "")
		flags.StringVar(&spec.Cloud, "cloud", "", "")
		flags.StringVar(&spec.Kubernetes, "kubernetes", cmp.Or(r.KubernetesTo, "v1.36.3"), "")
		flags.StringSliceVar(&spec.Faults, "faults", nil, "")
		if err := flags.Parse(r.Repeat[2:]); err != nil {
			t.Fatal(err)
		}
		got, err := scenario(*kind, spec)
		if err != nil {
			t.Fatal(err)
		}
		want := slices.Clone(r.Injected)
		for i := range want {
			want[i] = engine.DrillInjection{Fault: want[i].Fault, Point: want[i].Point, Nth: want[i].Nth, LastsMS: want[i].LastsMS, AtMS: -1, EndMS: -1}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("seed %d of %s machines means\n%+v, it meant\n%+v", r.Seed, r.Machines, got, want)
		}
	}
	if n == 0 {
		t.Error("nothing is recorded")
	}
}

// The versions of a drill are those that can be compiled and that a release offers.
func TestVersionsOfADrill(t *testing.T) {
	d := newDrills(t)
	for _, tt := range []struct {
		what, kind, from, to string
		want                 string // of releases and versions; empty: refused
	}{
		{what: "none named", kind: hollow, want: "from release v1.0.0 and Kubernetes v1.36.4 to v1.1.0 and v1.37.2"},
		{what: "only machines are replaced", kind: real, to: "v1.36.4", want: "from release v1.0.0 and Kubernetes v1.36.4 to v1.1.0 and v1.36.4"},
		{what: "a patch", kind: simulated, from: "v1.36.3", to: "v1.36.4", want: "from release v1.1.0 and Kubernetes v1.36.3 to v1.1.0 and v1.36.4"},
		{what: "another patch of the default minor", kind: hollow, from: "v1.36.3", want: "from release v1.1.0 and Kubernetes v1.36.3 to v1.1.0 and v1.37.2"},
		{what: "hollow machines would stay", kind: hollow, from: "v1.36.3", to: "v1.36.3", want: ""},
		{what: "backwards", kind: real, from: "v1.36.3", to: "v1.35.4", want: ""},
		{what: "a patch backwards", kind: real, from: "v1.36.4", to: "v1.36.3", want: ""},
		{what: "a minor left out", kind: real, from: "v1.35.4", to: "v1.37.2", want: ""},
		{what: "no version", kind: real, from: "1.36", to: "v1.36.3", want: ""},
		{what: "a patch that no release offers", kind: real, from: "v1.36.3", to: "v1.36.99", want: ""},
		{what: "no next minor", kind: real, from: "v1.37.2", want: ""},
	} {
		t.Run(tt.what, func(t *testing.T) {
			spec, err := d.Versions(engine.DrillSpec{KubernetesFrom: tt.from, Kubernetes: tt.to})
			var v versions
			if err == nil {
				v, err = versionsOf(tt.kind, spec)
			}
			switch {
			case tt.want == "" && (plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(plan.Remedy(err), "--kubernetes-from")):
				t.Errorf("%v, %v, remedy %q", v, err, plan.Remedy(err))
			case tt.want != "" && (err != nil || v.String() != tt.want):
				t.Errorf("%v, %v, want %s", v, err, tt.want)
			}
		})
	}
	spec, err := d.Versions(engine.DrillSpec{Seed: 3, KubernetesFrom: "v1.36.3"})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(repeat(hollow, spec), " "), "sandbox drill --machines=hollow --seed=3 --kubernetes-from=v1.36.3 --kubernetes=v1.37.2"; got != want {
		t.Errorf("repeat is %q, want %q", got, want)
	}
	inPlace := engine.DrillSpec{Seed: 3, InPlace: true, KubernetesFrom: "v1.36.3", Kubernetes: "v1.36.3"}
	if v, err := versionsOf(simulated, inPlace); plan.ExitCode(err) != plan.ExitUsage {
		t.Errorf("in place to the same version: %v, %v", v, err)
	}
	inPlace.KubernetesFrom, inPlace.Kubernetes = kubernetesFrom, kubernetesTo
	if v, err := versionsOf(simulated, inPlace); err != nil || v.String() != "from release v1.1.0 and Kubernetes v1.36.4 to v1.1.0 and v1.37.2" {
		t.Errorf("in place: %v, %v", v, err)
	}
	inPlace.KubernetesFrom, inPlace.Kubernetes = "v1.36.3", "v1.36.4"
	if got, want := strings.Join(repeat(simulated, inPlace), " "), "sandbox drill --machines=simulated --seed=3 --in-place --kubernetes-from=v1.36.3 --kubernetes=v1.36.4"; got != want {
		t.Errorf("repeat is %q, want %q", got, want)
	}
	spec, err = d.Versions(engine.DrillSpec{Seed: 3})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(repeat(hollow, spec), " "), "sandbox drill --machines=hollow --seed=3"; got != want {
		t.Errorf("repeat is %q, want %q", got, want)
	}
}

// aCloud is a fake cloud with boot times of control planes and a log of faults. The first may reboot.
type aCloud struct {
	mu     sync.Mutex
	booted time.Time
	heard  [][]string
	// cut is called for each list of faults; true: the machine reboots.
	cut func(faults []string) bool
	// asked is closed with the first list. asks gets a value when machines were described, if there is a receiver.
	asked, asks chan struct{}
}

func (c *aCloud) boot() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.booted = c.booted.Add(time.Minute)
}

// described waits for the given number of further list requests.
func (c *aCloud) described(times int) {
	for range times {
		<-c.asks
	}
}

func (c *aCloud) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch r.Method + " " + r.URL.Path {
	case "GET /v1/sandbox":
		_ = json.NewEncoder(w).Encode(sandboxapi.Info{Machines: []sandboxapi.Machine{
			{Instance: cloud.Instance{Name: "control-plane-0"}, Started: c.booted},
			{Instance: cloud.Instance{Name: "control-plane-1"}, Started: time.Unix(2000, 0)},
			{Instance: cloud.Instance{Name: "control-plane-2"}, Started: time.Unix(3000, 0)},
		}})
		select {
		case c.asks <- struct{}{}:
		default:
		}
	case "PUT /v1/faults":
		var l sandboxapi.FaultList
		if err := json.NewDecoder(r.Body).Decode(&l); err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		if c.heard == nil {
			close(c.asked)
		}
		c.heard = append(c.heard, l.Faults)
		if c.cut(l.Faults) {
			c.booted = c.booted.Add(time.Minute)
		}
		w.WriteHeader(http.StatusNoContent)
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

// Power cuts in kubeadm are set before it starts, one after the other, and no longer
// than the upgrade lasts.
func TestCutAhead(t *testing.T) {
	const etcd, apiServer = "power-cut=control-plane-0:upgrade-etcd", "power-cut=control-plane-0:upgrade-api-server"
	plan := []engine.DrillInjection{{Fault: "power-cut-api-server"}, {Fault: "frozen"}, {Fault: "power-cut-etcd"}}
	for _, tt := range []struct {
		what  string
		cut   func(faults []string) bool
		other bool // another fault cuts the power after the request
		heard [][]string
		errs  map[string]error
	}{
		{
			what: "kubeadm comes to both points", cut: func(faults []string) bool { return len(faults) == 2 },
			heard: [][]string{{"quota=9", etcd}, {"quota=9"}, {"quota=9", apiServer}, {"quota=9"}},
			errs:  map[string]error{"power-cut-etcd": nil, "power-cut-api-server": nil},
		},
		{
			what: "kubeadm comes to none, and the power is cut by another fault", cut: func([]string) bool { return false }, other: true,
			heard: [][]string{{"quota=9", etcd}, {"quota=9"}},
			errs:  map[string]error{"power-cut-etcd": errPast, "power-cut-api-server": errPast},
		},
		{
			what: "kubeadm comes to none", cut: func([]string) bool { return false },
			heard: [][]string{{"quota=9", etcd}, {"quota=9"}},
			errs:  map[string]error{"power-cut-etcd": errPast, "power-cut-api-server": errPast},
		},
	} {
		t.Run(tt.what, func(t *testing.T) {
			c := &aCloud{booted: time.Unix(1000, 0), cut: tt.cut, asked: make(chan struct{}), asks: make(chan struct{})}
			srv := httptest.NewServer(c)
			defer srv.Close()
			x := &run{site: &site{cloud: sandboxapi.NewClient(srv.URL, "token"), limit: time.Minute, controlPlanes: []string{"control-plane-0"}}, active: []string{"quota=9"}, switched: map[string]int{}}
			ctx, past := context.WithCancelCause(t.Context())
			defer past(nil)
			begun := time.Now()
			x.cutAhead(ctx, plan)
			<-c.asked
			if tt.other {
				x.site.power = func(context.Context, string) error { c.boot(); return nil }
				if err := x.power(ctx, "control-plane-0"); err != nil {
					t.Fatal(err)
				}
				c.described(2) // the caller has seen it after two requests
			}
			for name, want := range tt.errs {
				if want != nil {
					past(want)
				}
				if err := faultNamed(name).happen(t.Context(), x, "control-plane-0", nil); !errors.Is(err, want) {
					t.Errorf("%s: %v, want %v", name, err, want)
				}
				if from := x.cuts[name].from; want == nil && (from.Before(begun) || from.After(time.Now())) {
					t.Errorf("%s was asked for from %s on, the upgrade began at %s", name, from, begun)
				}
			}
			x.wg.Wait()
			if !reflect.DeepEqual(c.heard, tt.heard) {
				t.Errorf("the cloud heard of %v, want %v", c.heard, tt.heard)
			}
		})
	}
}

// Kubeadm upgrades one control plane, which is not known in advance. The others are not
// affected after its power was cut.
func TestCutAnyControlPlane(t *testing.T) {
	const wanted = "power-cut=control-plane-0:upgrade-etcd"
	struck := false
	c := &aCloud{booted: time.Unix(1000, 0), asked: make(chan struct{}), asks: make(chan struct{}), cut: func(faults []string) bool {
		if struck || len(faults) < 3 {
			return false
		}
		struck = true
		return slices.Contains(faults, wanted)
	}}
	srv := httptest.NewServer(c)
	defer srv.Close()
	x := &run{site: &site{cloud: sandboxapi.NewClient(srv.URL, "token"), limit: time.Minute, controlPlanes: []string{"control-plane-1", "control-plane-0", "control-plane-2"}}, switched: map[string]int{}}
	begun := time.Now()
	x.cutAhead(t.Context(), []engine.DrillInjection{{Fault: "power-cut-etcd"}})
	if err := faultNamed("power-cut-etcd").happen(t.Context(), x, "control-plane-0", nil); err != nil {
		t.Error(err)
	}
	x.wg.Wait()
	if last := c.heard[len(c.heard)-1]; !struck || len(last) > 0 || len(x.active) > 0 {
		t.Errorf("the cloud heard of %v, and at last of faults that are over", c.heard)
	}
	if from := x.cuts["power-cut-etcd"].from; from.Before(begun) || from.After(time.Now()) {
		t.Errorf("it was asked for from %s on, the upgrade began at %s", from, begun)
	}
}

// An earlier hop of the path replaces the control plane before kubeadm upgrades it. The cut is
// requested on the replacement, too.
func TestCutALaterControlPlane(t *testing.T) {
	const wanted = "power-cut=control-plane-0:upgrade-etcd"
	c := &aCloud{booted: time.Unix(1000, 0), asked: make(chan struct{}), asks: make(chan struct{}), cut: func(faults []string) bool {
		return slices.Contains(faults, wanted)
	}}
	srv := httptest.NewServer(c)
	defer srv.Close()
	x := &run{
		site: &site{
			cloud: sandboxapi.NewClient(srv.URL, "token"), limit: time.Minute, controlPlanes: []string{"control-plane-1"},
			laterPlanes: func(context.Context) []string { return []string{"control-plane-1", "control-plane-0"} },
		},
		switched: map[string]int{},
	}
	x.cutAhead(t.Context(), []engine.DrillInjection{{Fault: "power-cut-etcd"}})
	if err := faultNamed("power-cut-etcd").happen(t.Context(), x, "control-plane-0", nil); err != nil {
		t.Error(err)
	}
	x.wg.Wait()
	if last := c.heard[len(c.heard)-1]; len(last) > 0 || len(x.active) > 0 {
		t.Errorf("the cloud heard of %v, and at last of faults that are over", c.heard)
	}
}

// Each fault is well-formed: somebody looks it up by name and machines.
func TestFaults(t *testing.T) {
	for _, f := range newDrills(t).Faults() {
		if f.Does == "" || len(f.Machines) == 0 || len(f.Points)+len(f.InPlacePoints) == 0 {
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
	rules := judge(breaches, []window{{fault: "power-cut", from: at(10), to: at(20).Add(recovery), rules: []recorder.Rule{recorder.ReadyFloor}}}, []recorder.Rule{recorder.EtcdVoters})
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

// Points are counted from the start, each thing once.
func TestPoints(t *testing.T) {
	s := newSeen()
	var got []at
	for _, e := range []recorder.Entry{
		{Fact: &recorder.Node{Name: "old", UID: "0", CordonedByUs: true}},
		{Fact: &recorder.Target{Ready: true}},
		{Fact: recorder.Begin},
		{Fact: &recorder.Target{}},
		{Fact: &recorder.Target{Phase: "apply", Node: "cp"}},
		{Fact: &recorder.Target{Phase: "apply", Node: "cp", Line: "another"}},
		{Fact: &recorder.Pending{Token: "t", Donor: "old"}},
		{Fact: &recorder.Machines{List: []recorder.Machine{{ID: "i", Name: "new", Token: "t", State: "Creating"}}}},
		{Fact: &recorder.Node{Name: "new", UID: "1", Donor: "old"}},
		{Fact: &recorder.Node{Name: "new", UID: "1", Donor: "old", Ready: true}},
		{Fact: &recorder.Node{Name: "old", UID: "0", CordonedByUs: true}},
		{Fact: &recorder.Node{Name: "older", UID: "2", CordonedByUs: true}},
		{Fact: &recorder.Pending{Token: "t", Donor: "old", Goal: "Leave", Node: "old"}},
		{Fact: &recorder.Machines{List: []recorder.Machine{{ID: "o", Name: "old", State: "Terminating"}}}},
		{Fact: &recorder.Node{Name: "older", UID: "2", CordonedByUs: true, Gone: true}},
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

// Points of upgrades in place are counted by node. A run that was not seen in a phase has passed it at the end.
func TestPointsInPlace(t *testing.T) {
	s := newSeen()
	var got []at
	upgrade := func(node, phase string) recorder.Entry {
		return recorder.Entry{Fact: &recorder.Pending{Name: "replace-0", Goal: "Upgrade", Node: node, Phase: phase}}
	}
	for _, e := range []recorder.Entry{
		{Fact: &recorder.Node{Name: "cp", UID: "0", InPlace: true, Components: "old"}},
		{Fact: &recorder.Node{Name: "a", UID: "1", InPlace: true, Components: "old"}},
		{Fact: &recorder.Node{Name: "other", UID: "2", Components: "old"}},
		{Fact: recorder.Begin},
		upgrade("cp", ""),
		{Fact: &recorder.Node{Name: "cp", UID: "0", InPlace: true, Components: "new"}},
		upgrade("a", ""),
		{Fact: &recorder.Node{Name: "a", UID: "1", InPlace: true, Components: "old", CordonedByUs: true}},
		upgrade("a", "download"),
		upgrade("a", "done"),
		upgrade("a", "done"),
		{Fact: &recorder.Node{Name: "a", UID: "1", InPlace: true, Components: "new"}},
		{Fact: &recorder.Node{Name: "other", UID: "2", Components: "new"}},
		{Fact: &recorder.Pending{Name: "replace-0", Goal: "Upgrade", Node: "b", Phase: "apply", Gone: true}},
	} {
		got = append(got, s.points(&e)...)
	}
	want := []at{
		{pointScheduled, 1, "cp"},
		{pointUpgraded, 1, "cp"},
		{pointScheduled, 2, "a"},
		{pointCordoned, 1, "a"},
		{pointUpgrading, 1, "a"},
		{pointApplying, 1, "a"},
		{pointUpgraded, 2, "a"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("points are %v, want %v", got, want)
	}
}

// A drill has its own directory, and no other.
func TestEnter(t *testing.T) {
	d, dir := newDrills(t), t.TempDir()
	quiet := func(string, ...any) {}
	place, leave, err := d.enter(t.Context(), dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := d.enter(t.Context(), dir, quiet); plan.ExitCode(err) != plan.ExitHeld {
		t.Errorf("a second drill in the same place: %v", err)
	}
	if _, err := d.Drill(t.Context(), engine.DrillSpec{Workspace: dir, Machines: hollow, Kubernetes: "v1.34.0"}, nil); plan.ExitCode(err) != plan.ExitUsage {
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

func TestItIsSettledWhenServicesHaveAnsweredSinceTheLastNodeWent(t *testing.T) {
	ready := func(names ...string) recorder.Entry {
		m := &recorder.Machines{}
		for _, n := range names {
			m.List = append(m.List, recorder.Machine{Name: n, State: string(cloud.Ready)})
		}
		return recorder.Entry{Fact: m}
	}
	node := func(name string, gone bool) recorder.Entry {
		return recorder.Entry{Fact: &recorder.Node{Name: name, Ready: !gone, Gone: gone}}
	}
	answer := func(from, err string) recorder.Entry {
		return recorder.Entry{Fact: &recorder.Probe{From: from, Err: err}}
	}
	replaced := []recorder.Entry{ready("a", "b"), node("a", false), node("b", false), {Fact: recorder.Begin}, node("c", false), ready("a", "c"), node("b", true)}
	for name, tt := range map[string]struct {
		then []recorder.Entry
		want bool
	}{
		"no service is asked":               {nil, true},
		"one has answered before":           {[]recorder.Entry{answer("a", ""), answer("c", ""), node("b", true)}, false},
		"one has answered one node":         {[]recorder.Entry{answer("a", ""), answer("c", "no route")}, false},
		"one has answered all that stay":    {[]recorder.Entry{answer("a", ""), answer("c", "no route"), answer("c", "")}, true},
		"the API server alone has answered": {[]recorder.Entry{answer("", "")}, true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := settled(slices.Concat(replaced, tt.then)); got != tt.want {
				t.Errorf("settled: %t, want %t", got, tt.want)
			}
		})
	}
}
