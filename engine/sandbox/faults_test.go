package sandbox

import (
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/sandbox/machine"
)

func TestFaultsAreParsed(t *testing.T) {
	f, err := ParseFaults([]string{
		"boot-delay=worker-1:30s", "never-boot=worker-2", "kill=worker-0:component", "api-429=0.2", "api-500=1", "api-latency=250ms",
		"metadata-500=0.5", "partial-list=0.1", "lost-delete=0.3", "component-truncate=kubelet", "component-corrupt=kubeadm",
		"component-cut=kubectl", "registry-empty", "never-join=worker-3", "create-timeout=0.4", "describe-lag=2m", "quota=12",
		"partial-list-told=0.6", "frozen=worker-1", "isolated=worker-2", "cut=worker-0:worker-1", "cut-to=worker-0:cloud", "console-cut",
		"disk-full=worker-0", "disk-read-only=worker-1", "tpm-hangs=worker-2", "tpm-gone=worker-3", "power-cut=control-plane-0:upgrade-etcd",
		"slow-disk=control-plane-0:2s", "lost-writes=0.5", "torn-writes=control-plane-1",
	})
	if err != nil {
		t.Fatal(err)
	}
	if f.BootDelay("worker-1") != 30*time.Second || !f.NeverBoots("worker-2") || !f.NeverJoins("worker-3") || f.BootDelay("worker-2") != 0 ||
		f.NeverBoots("worker-1") || f.NeverJoins("worker-1") || f.createTimeout != 0.4 || f.describeLag != 2*time.Minute || f.quota != 12 || f.toldPartial != 0.6 || f.kill["worker-0"] != pointComponent ||
		f.throttle != 0.2 || f.fail != 1 || f.latency != 250*time.Millisecond || f.metadataFail != 0.5 || f.partialList != 0.1 ||
		f.lostDelete != 0.3 || !f.truncate["kubelet"] || !f.corrupt["kubeadm"] || !f.cut["kubectl"] || !f.registryEmpty {
		t.Errorf("got %+v", f)
	}
	if !f.frozen["worker-1"] || !f.isolated["worker-2"] || !slices.Equal(f.lost["worker-0"], []string{"worker-1", "cloud"}) || !slices.Equal(f.lost["worker-1"], []string{"worker-0"}) ||
		!f.consoleCut || !f.diskFull["worker-0"] || !f.diskReadOnly["worker-1"] || !f.tpmHangs["worker-2"] || !f.tpmGone["worker-3"] || f.powerCut["control-plane-0"] != "upgrade-etcd" ||
		f.slowDisk["control-plane-0"] != 2*time.Second || !f.lostWrites["0.5"] || !f.tornWrites["control-plane-1"] {
		t.Errorf("got %+v", f)
	}
	if len(f.spec) != len(faultKinds) {
		t.Errorf("%d of %d kinds of fault are in this test", len(f.spec), len(faultKinds))
	}
	for _, name := range FaultNames() { // completion offers the prefixes that the parser accepts
		if emulatedFaults["gcp"].has(name) && !slices.Contains(ofOwnCloud, strings.TrimSuffix(name, "=")) {
			continue // package gcptest parses these
		}
		if n := slices.IndexFunc(f.spec, func(s string) bool { return strings.HasPrefix(s, name) }); n < 0 || strings.HasSuffix(name, "=") != strings.Contains(f.spec[n], "=") {
			t.Errorf("%q begins no fault", name)
		}
	}
}

func TestAShareOfMachinesIsAlwaysTheSame(t *testing.T) {
	f, err := ParseFaults([]string{"boot-delay=0.3:1m", "never-boot=1", "never-join=0.2"})
	if err != nil {
		t.Fatal(err)
	}
	slow, never := 0, 0
	for n := range 1000 {
		name := fmt.Sprint("worker-", n)
		d, j := f.BootDelay(name), f.NeverJoins(name)
		if !f.NeverBoots(name) || d != f.BootDelay(name) || j != f.NeverJoins(name) {
			t.Fatalf("%s: %t %s %t, and then otherwise", name, f.NeverBoots(name), d, j)
		}
		if d == time.Minute {
			slow++
		}
		if j {
			never++
		}
	}
	if slow < 250 || slow > 350 || never < 150 || never > 250 {
		t.Errorf("of 1000 machines %d are slow and %d never join, want about 300 and 200", slow, never)
	}
}

func TestWrongFaultsAreNamedAllAtOnce(t *testing.T) {
	for _, tt := range []struct{ name, fault, want string }{
		{name: "unknown fault", fault: "meteor=now", want: `fault "meteor=now" is unknown`},
		{name: "delay without duration", fault: "boot-delay=worker-1", want: `want boot-delay=MACHINE|SHARE:DURATION`},
		{name: "negative delay", fault: "boot-delay=worker-1:-1s", want: `must be positive`},
		{name: "delay without machine", fault: "boot-delay=:1s", want: `"" is not a name`},
		{name: "share above one", fault: "api-429=2", want: `not above 0 and at most 1`},
		{name: "share of nothing", fault: "api-500=0", want: `not above 0 and at most 1`},
		{name: "share that is no number", fault: "lost-delete=NaN", want: `not above 0`},
		{name: "share of all machines above one", fault: "never-join=1.5", want: `not a name`},
		{name: "quota of nothing", fault: "quota=0", want: `want quota=MACHINES`},
		{name: "a lag of zero", fault: "describe-lag=0s", want: `must be positive`},
		{name: "unknown point", fault: "kill=worker-0:lunch", want: `no point "lunch"`},
		{name: "value where none belongs", fault: "registry-empty=yes", want: `takes no value`},
		{name: "an invalid machine name", fault: "never-boot=../etc", want: `not a name`},
		{name: "one end of a cut", fault: "cut=worker-0", want: `does not name two ends`},
		{name: "a cut from the cloud", fault: "cut-to=worker-0:worker-0", want: `does not name two ends`},
		{name: "unknown point of a power cut", fault: "power-cut=worker-0:lunch", want: `no point "lunch"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := ParseFaults([]string{tt.fault, "second=wrong"})
			if err == nil {
				t.Fatal("accepted")
			}
			for _, want := range []string{tt.want, `fault "second=wrong" is unknown`, "the faults are boot-delay=", "registry-empty"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
		})
	}
}

func TestFaultsOfNamesThatThereWillNeverBeAreRefused(t *testing.T) {
	for _, tt := range []struct{ name, fault, want string }{
		{name: "a machine that is there", fault: "never-boot=worker-1", want: ""},
		{name: "a machine that an upgrade will make", fault: "kill=control-plane-12:image", want: ""},
		{name: "a share of machines", fault: "never-join=0.5", want: ""},
		{name: "a component", fault: "component-cut=kubectl", want: ""},
		{name: "a machine of no group", fault: "never-boot=nope", want: "fault never-boot=nope: there is no such machine; the machines are control-plane-0, worker-0, worker-1, and later ones are numbered on"},
		{name: "a delay of a group", fault: "boot-delay=worker:1s", want: "fault boot-delay=worker: there is no such machine; the machines are control-plane-0, worker-0, worker-1, and later ones are numbered on"},
		{name: "an unknown machine number", fault: "kill=worker-01:image", want: "fault kill=worker-01: there is no such machine; the machines are control-plane-0, worker-0, worker-1, and later ones are numbered on"},
		{name: "an unknown peer", fault: "cut=worker-0:moon", want: "fault cut=moon: there is no such machine; the machines are control-plane-0, worker-0, worker-1, and later ones are numbered on"},
		{name: "the cloud as the other end", fault: "cut=worker-0:cloud", want: ""},
		{name: "an unknown component", fault: "component-truncate=bogus", want: "fault component-truncate=bogus: there is no such component; the components are kubeadm, kubelet, kubectl"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f, err := ParseFaults([]string{tt.fault})
			if err != nil {
				t.Fatal(err)
			}
			got := ""
			if err := f.unknownNames(machineNames(nil, engine.SandboxSpec{})); err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("got  %q\nwant %q", got, tt.want)
			}
		})
	}
}

// A fault that simulated machines do not support is refused, not ignored.
func TestFaultsOfMachinesThatAreNotReal(t *testing.T) {
	for spec, want := range map[string][2]string{
		"never-join=worker-1 quota=3 lost-delete=1": {},
		"kill=worker-1:image quota=3":               {"", "not possible: only machines in which something runs can have kill=worker-1:image"},
		"frozen=worker-1 quota=3 registry-empty": {
			"not possible: only real machines can have registry-empty",
			"not possible: only machines in which something runs can have frozen=worker-1, registry-empty",
		},
	} {
		f, err := ParseFaults(strings.Fields(spec))
		if err != nil {
			t.Fatal(err)
		}
		var got [2]string
		for i, refuse := range []func() error{f.Simulated, f.Hollow} {
			if err := refuse(); err != nil {
				got[i] = err.Error()
			}
		}
		if got != want {
			t.Errorf("%s: %q, want %q", spec, got, want)
		}
	}
}

// The documentation of faults lists all faults of the program.
func TestDocsOfFaults(t *testing.T) {
	b, err := os.ReadFile("../../docs/faults.md")
	if err != nil {
		t.Fatal(err)
	}
	kinds := (&Sandboxes{}).FaultKinds("")
	for _, cloud := range emulatedFaults {
		kinds = append(kinds, cloud.kinds...)
	}
	for _, k := range kinds {
		if k.Does == "" {
			t.Errorf("fault %s has no description", k.Name)
		}
		if row := fmt.Sprintf("| `%s` | %s |\n", strings.ReplaceAll(k.Form, "|", `\|`), k.Does); !strings.Contains(string(b), row) {
			t.Errorf("docs/faults.md lacks %s", row)
		}
	}
}

// A machine has exactly the faults that name it.
func TestFaultsOfOneMachine(t *testing.T) {
	st := newState("demo", "/work", time.Now())
	for n, name := range []string{"worker-0", "worker-1"} {
		st.Instances = append(st.Instances, &instance{Name: name, Group: "workers", Index: firstIndex + n})
	}
	f, err := ParseFaults([]string{"slow-disk=worker-0:2s", "lost-writes=worker-0", "torn-writes=worker-1", "frozen=worker-0", "cut=worker-0:worker-1", "cut-to=worker-1:cloud", "cut-to=worker-1:worker-9"})
	if err != nil {
		t.Fatal(err)
	}
	slow, err := ParseFaults([]string{"slow-disk=1:1ns", "slow-disk=worker-0:2s"})
	if err != nil {
		t.Fatal(err)
	}
	if a, b := slow.machineFaults(st, "worker-0").SlowDisk, slow.machineFaults(st, "worker-1").SlowDisk; a != 2*time.Second || b != 1 {
		t.Errorf("one that is named and one of a share: their syncs take %s and %s longer", a, b)
	}
	peer := func(n int) machine.Peer {
		return machine.Peer{IP: st.Instances[n].ip(), PodCIDR: st.Instances[n].podCIDR()}
	}
	for name, want := range map[string]machine.Faults{
		"worker-0": {SlowDisk: 2 * time.Second, LostWrites: true, Frozen: true, Lost: []machine.Peer{peer(1)}},
		"worker-1": {TornWrites: true, Lost: []machine.Peer{peer(0), {IP: machine.Gateway}}}, // worker-9 does not exist yet
		"worker-2": {},
	} {
		if got := f.machineFaults(st, name); !reflect.DeepEqual(got, want) || got.Any() != (name != "worker-2") {
			t.Errorf("%s suffers from %+v, want %+v", name, got, want)
		}
	}
}
