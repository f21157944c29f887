package sandbox

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/sandboxapi"
)

// emulatedDemo returns the daemon of a sandbox that emulates Google Cloud, with its emulator and a server of both its APIs
// for a control plane.
func emulatedDemo(t *testing.T) (*daemon, *httptest.Server) {
	t.Helper()
	f, _ := testFleet(t, newComputer(), nil)
	d := &daemon{dirs: Dirs{State: t.TempDir()}, name: "demo", log: discard(), fleet: f}
	if err := os.MkdirAll(d.dirs.of("demo"), 0o700); err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	if err := f.update(func(s *state) error { s.Cloud, s.UID = gcp.Name, "0123456789abcdef"; return nil }); err != nil {
		t.Fatal(err)
	}
	f.mu.Unlock()
	openDemo(t, d)
	if err := (emulatedFleet{f, d.emulator}).SetCount(t.Context(), sandboxapi.ControlPlaneGroup, 1); err != nil {
		t.Fatal(err)
	}
	first := f.Instances()[0].Name
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, gcp.ComputePath) {
			d.emulator.api.ServeHTTP(w, r)
			return
		}
		d.emulator.metadata(first).ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return d, server
}

// openDemo opens the emulator, again if the daemon had one.
func openDemo(t *testing.T, d *daemon) {
	t.Helper()
	st, _ := d.fleet.snapshot()
	var err error
	if d.emulator, err = d.emulate(st); err != nil {
		t.Fatal(err)
	}
}

func TestEmulatedGoogleCloudConforms(t *testing.T) {
	t.Parallel()
	d, server := emulatedDemo(t)
	m := gcp.NewMachine(gcp.EmulatorAddress(server.URL, server.URL), "")
	const project, zone = "sandbox-demo", "europe-west3-a"
	cloudtest.Run(t, cloudtest.Options{
		Cloud: m, Group: gcp.GroupID(project, zone, sandboxapi.WorkerGroup), Unknown: gcp.ProviderID(project, zone, "worker-none"),
		Images: []string{"projects/" + project + "/global/images/constellation-v1-0-0", "projects/" + project + "/global/images/constellation-v1-1-0"}, Within: time.Minute,
	})
	if n := d.emulator.problems.Load(); n != 0 {
		t.Errorf("%d calls are outside of the schema", n)
	}
}

func TestEmulatorOwnsTheMachines(t *testing.T) {
	t.Parallel()
	d, server := emulatedDemo(t)
	m := gcp.NewMachine(gcp.EmulatorAddress(server.URL, server.URL), "")
	self, err := m.Self(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	own := d.fleet.Instances()[0]
	id, group := gcp.ProviderID("sandbox-demo", "europe-west3-a", own.Name), gcp.GroupID("sandbox-demo", "europe-west3-a", sandboxapi.ControlPlaneGroup)
	if self.ProviderID != id || self.Group != group || self.IP != own.IP || self.PodCIDR != own.PodCIDR || self.Role != cloud.ControlPlane {
		t.Errorf("the machine is %+v in Google Cloud, and %+v in the sandbox with ID %s in group %s", self, own, id, group)
	}
	f := emulatedFleet{d.fleet, d.emulator}
	_, createErr := f.Create(t.Context(), sandboxapi.WorkerGroup, []string{"heir-1"})
	for what, err := range map[string]error{
		"create": createErr, "remove": f.Remove(own.Name), "set image": f.SetImage(sandboxapi.WorkerGroup, "v1.1.0"), "set faults of the sandbox's own cloud": f.SetFaults([]string{"lost-delete=0.5"}),
	} {
		if !errors.Is(err, ErrConflict) {
			t.Errorf("%s: error is %v, want a conflict", what, err)
		}
	}

	// A new daemon finds the machines and their groups again.
	if err := f.SetCount(t.Context(), sandboxapi.WorkerGroup, 2); err != nil {
		t.Fatal(err)
	}
	names := func() (names []string) {
		all, err := m.Instances(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range all {
			names = append(names, i.Name)
		}
		slices.Sort(names)
		return names
	}
	before := names()
	openDemo(t, d)
	if after := names(); len(before) != 3 || !slices.Equal(before, after) {
		t.Errorf("machines are %q, were %q", after, before)
	}

	// The machines end with the sandbox. No group makes them again.
	d.stop = func() {}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := d.shutdown(ctx, true); err != nil {
		t.Fatal(err)
	}
	names() // the emulator observes that its machines are gone
	if left := d.fleet.Instances(); len(left) != 0 {
		t.Errorf("machines %+v are left", left)
	}
}

// Faults of an emulated cloud disturb its API, those of machines the machines. Both survive a restart of the daemon.
func TestFaultsOfAnEmulatedCloud(t *testing.T) {
	t.Parallel()
	d, server := emulatedDemo(t)
	m := gcp.NewMachine(gcp.EmulatorAddress(server.URL, server.URL), "")
	f := emulatedFleet{d.fleet, d.emulator}
	if err := f.SetCount(t.Context(), sandboxapi.WorkerGroup, 1); err != nil {
		t.Fatal(err)
	}
	group := gcp.GroupID("sandbox-demo", "europe-west3-a", sandboxapi.WorkerGroup)
	for _, wrong := range [][]string{{"meteor"}, {"lost-delete=1"}, {"quota=0"}, {"stockout", "frozen="}} {
		if err := f.SetFaults(wrong); !errors.Is(err, ErrConflict) {
			t.Errorf("faults %q: %v, want a conflict", wrong, err)
		}
		if s, _ := d.fleet.snapshot(); len(s.CloudFaults)+len(s.Faults) > 0 {
			t.Errorf("faults %q left %q and %q", wrong, s.CloudFaults, s.Faults)
		}
	}

	if err := f.SetFaults([]string{"role-revoked=compute.instances.list", "tpm-gone=worker-7", "never-join=" + d.fleet.Instances()[0].Name}); err != nil {
		t.Fatal(err)
	}
	denied := func() {
		t.Helper()
		if _, err := m.Instances(t.Context()); !errors.Is(err, cloud.ErrDenied) {
			t.Errorf("list without its permission: %v, want %v", err, cloud.ErrDenied)
		}
	}
	denied()
	openDemo(t, d)
	f.emulator = d.emulator
	denied()
	if s, _ := d.fleet.snapshot(); !slices.Equal(s.CloudFaults, []string{"role-revoked=compute.instances.list"}) || len(s.Faults) != 2 {
		t.Errorf("faults are %q and %q", s.CloudFaults, s.Faults)
	}

	// The machine of a fault gets no metadata, and others do.
	a := &api{fleet: d.fleet, Control: NewControl(f, d.log), log: d.log}
	for _, x := range []struct {
		machine cloud.Instance
		status  int
	}{{d.fleet.Instances()[0], http.StatusInternalServerError}, {d.fleet.Instances()[1], http.StatusOK}} {
		r := httptest.NewRequest(http.MethodGet, "http://metadata.google.internal/computeMetadata/v1/instance/id", nil)
		r.Header.Set("Metadata-Flavor", "Google")
		r.RemoteAddr = netip.AddrPortFrom(x.machine.IP, 40000).String()
		w := httptest.NewRecorder()
		a.machineMetadata(d.emulator).ServeHTTP(w, r)
		if w.Code != x.status || w.Header().Get("Metadata-Flavor") != "Google" {
			t.Errorf("metadata of %s: status %d, want %d; headers %v", x.machine.Name, w.Code, x.status, w.Header())
		}
	}

	if err := f.SetFaults(nil); err != nil {
		t.Fatal(err)
	}
	before, err := m.Instances(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// A machine that is preempted in the moment is replaced under its name.
	i := slices.IndexFunc(before, func(i cloud.Instance) bool { return i.Group == group })
	if err := f.SetFaults([]string{"name-reuse=" + before[i].Name}); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(20 * time.Second)
	for {
		now, err := m.Instances(t.Context())
		if slices.ContainsFunc(now, func(x cloud.Instance) bool {
			return x.Name == before[i].Name && x.Incarnation != before[i].Incarnation
		}) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s is %+v (%v), was %+v", before[i].Name, now, err, before[i])
		}
		time.Sleep(50 * time.Millisecond) // poll interval
	}
}

func TestCloudOfASandbox(t *testing.T) {
	t.Parallel()
	s := New(Dirs{Cache: t.TempDir(), State: t.TempDir()}, "", discard())
	w := t.TempDir()
	for _, tt := range []struct {
		name, want string
		spec       engine.SandboxSpec
	}{
		{name: "an unknown one", want: `there is no sandbox of cloud "moon"`, spec: engine.SandboxSpec{Cloud: "moon"}},
		{name: "with hollow machines", want: "hollow machines are in the sandbox's own cloud only", spec: engine.SandboxSpec{Cloud: gcp.Name, Machines: hollowKind}},
		{name: "with a fault of another cloud", want: "cloud gcp cannot have lost-delete=0.5", spec: engine.SandboxSpec{Cloud: gcp.Name, Faults: []string{"lost-delete=0.5"}}},
		{name: "with an invalid fault", want: "want api-429=SHARE", spec: engine.SandboxSpec{Cloud: gcp.Name, Faults: []string{"api-429=2"}}},
		{name: "with a fault of no machine", want: "fault preempt=worker-none: there is no such machine", spec: engine.SandboxSpec{Cloud: gcp.Name, Faults: []string{"preempt=worker-none"}}},
		{name: "with a fault of an emulated cloud in its own one", want: `fault "stockout" is unknown`, spec: engine.SandboxSpec{Faults: []string{"stockout"}}},
	} {
		tt.spec.Workspace = w
		if _, err := s.Up(t.Context(), tt.spec, nil); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error is %v, want %q", tt.name, err, tt.want)
		}
	}
}
