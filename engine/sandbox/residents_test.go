package sandbox

import (
	"os"
	"slices"
	"testing"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/sandbox/machine"
)

func TestMachinesOfAllSandboxesAreReckonedWith(t *testing.T) {
	d := Dirs{State: t.TempDir()}
	if got := d.residents(); got != nil {
		t.Errorf("without a sandbox: %v", got)
	}
	for name, instances := range map[string][]*instance{
		"one": {
			{Name: "control-plane-0", Role: cloud.ControlPlane, Want: wantRunning, Boot: sandboxapi.BootReady},
			{Name: "worker-0", Role: cloud.Worker, Want: wantRunning, Boot: sandboxapi.BootCreating},
			{Name: "worker-1", Role: cloud.Worker, Want: wantDeleted, Boot: sandboxapi.BootReady},
			{Name: "worker-2", Role: cloud.Worker, Want: wantRunning, Boot: sandboxapi.BootFailed},
		},
		"two": {{Name: "worker-0", Role: cloud.Worker, Want: wantRunning, Boot: sandboxapi.BootBooting}},
	} {
		if err := os.MkdirAll(d.of(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if name == "one" {
			if err := self().write(d.of(name, pidName)); err != nil {
				t.Fatal(err)
			}
		}
		st := newState(name, "/home/me/"+name, time.Now())
		st.Instances = instances
		if err := st.write(d.of(name, stateName)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(d.of("broken"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.of("broken", stateName), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := []machine.Resident{
		{Dir: d.of("one"), Sandbox: "one", Name: "control-plane-0", ControlPlane: true},
		{Dir: d.of("one"), Sandbox: "one", Name: "worker-0"},
		{Dir: d.of("two"), Sandbox: "two", Name: "worker-0", Abandoned: true},
	}
	if got := d.residents(); !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
