package workspace

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/plan"
)

// enrolling is a workspace with a generated configuration of enrolled machines.
func enrolling(t *testing.T) *Workspace {
	t.Helper()
	b, err := GenerateConfig("machines", GenerateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w := &Workspace{t.TempDir()}
	if _, err := w.WriteConfig(b); err != nil {
		t.Fatal(err)
	}
	return w
}

func TestEnrolmentIsMadeOnce(t *testing.T) {
	t.Parallel()
	w := enrolling(t)
	if e, err := w.RehearseEnrolment(); err != nil || e.UID == "" || e.Authority == nil || !slices.Equal(namesIn(t, w.root), []string{ConfigFile}) {
		t.Errorf("a rehearsal: %+v, %v, files %v", e, err, namesIn(t, w.root))
	}
	first, err := w.Enrolment()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{StateFile, AuthorityKeyFile, SigningKeyFile} {
		if info, err := os.Stat(w.Path(name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	again, err := w.Enrolment()
	if err != nil || again.UID != first.UID || !bytes.Equal(again.Roots, first.Roots) || !bytes.Equal(again.SigningKeys, first.SigningKeys) {
		t.Errorf("the second call made something else: %v", err)
	}
	if _, _, err := w.Load(); err != nil {
		t.Errorf("load: %v", err)
	}
	s, err := w.State()
	if err != nil || !s.Enrolled() || s.Adopted() || s.Infrastructure.ClusterEndpoint != "api.example.com:6443" {
		t.Fatalf("state %+v, %v", s, err)
	}

	m := machines.Machine{Name: "cp-0", Address: "10.0.0.11", Group: cloud.ControlPlane}
	if _, err := attestation.ParseRoots(first.Roots); err != nil {
		t.Errorf("roots: %v", err)
	}
	files, err := first.Files(m)
	if err != nil {
		t.Fatal(err)
	}
	var d machines.MachineData
	for _, f := range files {
		if bytes.Contains(f.Data, s.Infrastructure.InitSecret) || bytes.Contains(f.Data, []byte("PRIVATE")) {
			t.Errorf("%s contains a secret", f.Path)
		}
		if f.Path == machines.MachineFile && json.Unmarshal(f.Data, &d) != nil {
			t.Errorf("%s is no JSON", f.Path)
		}
	}
	if sum := sha256.Sum256(s.Infrastructure.InitSecret); d.Self != "cp-0" || d.InitSecretHash != hex.EncodeToString(sum[:]) || d.Endpoint != "api.example.com" || len(d.Machines) != 1 {
		t.Errorf("data of the machine: %+v", d)
	}
	if id, err := first.Identity(m); err != nil || id.ProviderID != "machines://"+first.UID+"/cp-0" || id.Group != machines.GroupID(first.UID, cloud.ControlPlane) || id.UID != first.UID {
		t.Errorf("identity %+v, %v", id, err)
	}

	// The switch of packages is a comment, and goes to the cluster alone.
	b, err := w.ReadConfig()
	if err != nil || !bytes.Contains(b, []byte("\n    # packages: held\n")) || w.ReplaceConfig(bytes.Replace(b, []byte("# packages: held"), []byte("packages: upgrade"), 1)) != nil {
		t.Fatalf("%s: %v", b, err)
	}
	c, err := w.Config()
	if err != nil || EnrolledInventory(c, s).Packages != machines.PackagesUpgrade {
		t.Errorf("the list says %q about packages, %v", EnrolledInventory(c, s).Packages, err)
	}
	if e, err := w.Enrolment(); err != nil || e.Inventory().Packages != "" {
		t.Errorf("machines get %q, %v", e.Inventory().Packages, err)
	}

	// A corrected endpoint counts until init begins.
	b, err = w.ReadConfig()
	if err != nil || w.ReplaceConfig(bytes.Replace(b, []byte("api.example.com"), []byte("10.0.0.11"), 1)) != nil {
		t.Fatal(err)
	}
	if e, err := w.Enrolment(); err != nil || e.Endpoint != "10.0.0.11" {
		t.Errorf("endpoint %q, %v", e.Endpoint, err)
	}
	if err := os.Remove(w.Path(AuthorityKeyFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Enrolment(); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(plan.Remedy(err), "restore") {
		t.Errorf("without the authority's key: %v", err)
	}
}

// An enrolment is of enrolled machines, and of no workspace with the files of a cluster.
func TestEnrolmentIsRefused(t *testing.T) {
	t.Parallel()
	t.Run("another provider", func(t *testing.T) {
		t.Parallel()
		b, err := GenerateConfig("sandbox", GenerateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		w := &Workspace{t.TempDir()}
		if _, err := w.WriteConfig(b); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Enrolment(); plan.ExitCode(err) != plan.ExitUsage {
			t.Errorf("got %v", err)
		}
		if names := namesIn(t, w.root); !slices.Equal(names, []string{ConfigFile}) {
			t.Errorf("wrote %v", names)
		}
	})
	t.Run("the kubeconfig of another cluster", func(t *testing.T) {
		t.Parallel()
		w := enrolling(t)
		if err := w.Write(KubeconfigFile, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Enrolment(); plan.ExitCode(err) != plan.ExitUsage || w.Has(StateFile) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("no configuration", func(t *testing.T) {
		t.Parallel()
		w := &Workspace{t.TempDir()}
		if _, err := w.Enrolment(); plan.ExitCode(err) != plan.ExitUsage || len(namesIn(t, w.root)) > 0 {
			t.Errorf("got %v", err)
		}
	})
}

func TestMachinesAreAddedAndRemoved(t *testing.T) {
	t.Parallel()
	cp := machines.Machine{Name: "cp-0", Address: "10.0.0.11", Group: cloud.ControlPlane}
	w0 := machines.Machine{Name: "w-0", Address: "fd00::12", Group: cloud.Worker}
	const head, tail = "version: v2\nname: demo\nmicroserviceVersion: v1.1.0\nkubernetesVersion: v1.36.4\nprovider:\n", "keepWorkers: true # mine\n"
	layouts := []struct {
		name, section string
		tied          bool
	}{
		{name: "no list", section: "  enrolled:\n    endpoint: api.example.com # the balancer\n"},
		{name: "an empty list", section: "  enrolled:\n    endpoint: api.example.com\n    machines: []\n", tied: true},
		{name: "a list of another machine", section: "  enrolled:\n    machines: # ours\n      - name: old # first\n        address: 10.0.0.9\n        group: worker\n    endpoint: api.example.com\n"},
		{name: "a list in rows", section: "  enrolled:\n    endpoint: api.example.com\n    machines:\n    - {name: old, address: 10.0.0.9, group: worker} # first\n"},
		{name: "a list in line", section: "  enrolled:\n    endpoint: api.example.com\n    machines: [{name: old, address: 10.0.0.9, group: worker}]\n", tied: true},
		{name: "a section in line", section: "  enrolled: {endpoint: api.example.com}\n", tied: true},
	}
	for _, tt := range layouts {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := &Workspace{t.TempDir()}
			before := []byte(head + tt.section + tail)
			if err := w.ReplaceConfig(before); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Enrolment(); err != nil {
				t.Fatal(err)
			}
			err := w.AddMachine(cp)
			if tt.tied {
				if !errors.Is(err, errTied) || !strings.Contains(plan.Remedy(err), `{name: cp-0, address: "10.0.0.11", group: control-plane}`) {
					t.Errorf("got %v (%s)", err, plan.Remedy(err))
				}
				if now, _ := w.ReadConfig(); !bytes.Equal(now, before) {
					t.Errorf("changed all the same:\n%s", now)
				}
				return
			}
			for _, m := range []machines.Machine{cp, w0, w0} {
				if err := w.AddMachine(m); err != nil {
					t.Fatal(err)
				}
			}
			c, err := w.Config()
			if err != nil {
				t.Fatal(err)
			}
			list := machines.List(c.Provider.Section)
			if n := len(list); n < 2 || list[n-2] != cp || list[n-1] != w0 || c.ControlPlanes() != 1 || c.Workers() != len(list)-1 {
				t.Errorf("machines %v", list)
			}
			if s, err := w.State(); err != nil || s.Infrastructure.InitEndpoint != "10.0.0.11:9000" {
				t.Errorf("init endpoint %q, %v", s.Infrastructure.InitEndpoint, err)
			}
			b, _ := w.ReadConfig()
			for _, text := range []string{"# mine", "# the balancer", "# first", "# ours"} {
				if bytes.Contains(before, []byte(text)) && !bytes.Contains(b, []byte(text)) {
					t.Errorf("the comment %q is gone:\n%s", text, b)
				}
			}
			if err := w.AddMachine(machines.Machine{Name: "cp-0", Address: "10.0.0.99", Group: cloud.Worker}); plan.ExitCode(err) != plan.ExitUsage {
				t.Errorf("a name used twice: %v", err)
			}
			if err := w.AddMachine(machines.Machine{Name: "other", Address: "10.0.0.11", Group: cloud.Worker}); plan.ExitCode(err) != plan.ExitUsage {
				t.Errorf("an address used twice: %v", err)
			}
			for _, m := range list {
				if err := w.RemoveMachine(m.Name); err != nil {
					t.Fatal(err)
				}
			}
			c, err = w.Config()
			if err != nil || len(machines.List(c.Provider.Section)) > 0 || !c.KeepWorkers {
				b, _ := w.ReadConfig()
				t.Errorf("after the removal of all: %v\n%s", err, b)
			}
			if err := w.AddMachine(cp); err != nil {
				b, _ := w.ReadConfig()
				t.Errorf("added again: %v\n%s", err, b)
			}
		})
	}
}

func TestEnrolledConfigProblems(t *testing.T) {
	t.Parallel()
	const head = "version: v2\nname: demo\nmicroserviceVersion: v1.1.0\nkubernetesVersion: v1.36.4\nprovider:\n  enrolled:\n"
	for _, tt := range []struct{ name, rest, want string }{
		{name: "no endpoint", rest: "    machines: []\n", want: "endpoint: is missing"},
		{name: "an endpoint with a port", rest: "    endpoint: api.example.com:6443\n", want: "is no host"},
		{name: "groups", rest: "    endpoint: api.example.com\nnodeGroups: {}\n", want: "nodeGroups: does not apply"},
		{name: "an address among the pods", rest: "    endpoint: api.example.com\n    machines:\n    - {name: a, address: 10.244.0.9, group: worker}\n", want: "range of pods"},
		{name: "a hash of another kind", rest: "    endpoint: api.example.com\n    machines:\n    - {name: a, address: 10.0.0.9, group: worker, ek: sha1:00}\n", want: "is no hash of an endorsement key"},
		{name: "a folder of all machines", rest: "    endpoint: api.example.com\n    machines:\n    - {name: a, address: 10.0.0.9, group: worker, tpm: \"unix:/run/containerd/containerd.sock\"}\n", want: "is no TPM"},
		{name: "a label of Kubernetes", rest: "    endpoint: api.example.com\n    machines:\n    - {name: a, address: 10.0.0.9, group: worker, labels: node-role.kubernetes.io/control-plane=}\n", want: "are no labels of a Node"},
		{name: "a taint without an effect", rest: "    endpoint: api.example.com\n    machines:\n    - {name: a, address: 10.0.0.9, group: worker, taints: a=b}\n", want: "are no taints of a Node"},
		{name: "packages", rest: "    endpoint: api.example.com\n    packages: latest\n", want: `"latest" does not say what upgrades do with packages`},
		{name: "a name twice", rest: "    endpoint: api.example.com\n    machines:\n    - {name: a, address: 10.0.0.9, group: worker}\n    - {name: a, address: 10.0.0.8, group: worker}\n", want: "occurs twice"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if _, err := ParseConfig([]byte(head + tt.rest)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

// A machine's row has what its TPM is recognised by, and the state says whether all machines have one.
func TestMachinesWithTPMs(t *testing.T) {
	t.Parallel()
	ek := func(digit string) string { return "sha256:" + strings.Repeat(digit, 64) }
	cp := machines.Machine{Name: "cp-0", Address: "10.0.0.11", Group: cloud.ControlPlane, Attested: true, EK: ek("a"), Key: ek("1")}
	w0 := machines.Machine{Name: "w-0", Address: "10.0.0.12", Group: cloud.Worker, Attested: true, EK: ek("b"), Key: ek("2"), TPM: "unix:/run/tpm/tpm.sock"}
	w := enrolling(t)
	if _, err := w.Enrolment(); err != nil {
		t.Fatal(err)
	}
	attested := func(want bool) {
		t.Helper()
		if s, err := w.State(); err != nil || s.NotAttested() == want {
			t.Errorf("not attested is %t, %v", s.NotAttested(), err)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	attested(false)
	must(w.AddMachine(plain(cp)))
	must(w.AddMachine(plain(w0)))
	attested(false)
	for range 2 {
		must(w.AddMachine(w0))
	}
	attested(false)
	must(w.AddMachine(cp))
	attested(true)
	w0.Key, w0.Vendor = ek("3"), "CN=Root: \"A\"" // another key in the same TPM, whose vendor is verified
	must(w.AddMachine(w0))
	unverified := w0
	unverified.Vendor = ""
	must(w.AddMachine(unverified)) // once is enough
	c, err := w.Config()
	must(err)
	if list := machines.List(c.Provider.Section); !slices.Equal(list, []machines.Machine{cp, w0}) {
		b, _ := w.ReadConfig()
		t.Errorf("the configuration lists %v:\n%s", list, b)
	}
	// The join service compares the keys. Machines do not have them: adding one again changes none of its files.
	s, err := w.State()
	must(err)
	if i := EnrolledInventory(c, s); i.Machines[0].Key != cp.Key || i.Machines[1].Key != w0.Key {
		t.Errorf("the cluster gets %+v", i.Machines)
	}
	e, err := w.Enrolment()
	must(err)
	if files, err := e.Files(w0); err != nil || bytes.Contains(files[0].Data, []byte(`"key"`)) {
		t.Errorf("a machine gets %s, %v", files[0].Data, err)
	}
	before, _ := w.ReadConfig()
	for _, tt := range []struct {
		name, want string
		change     func(m *machines.Machine)
	}{
		{name: "another TPM", want: "it is another computer, or its TPM was replaced", change: func(m *machines.Machine) { m.EK = ek("c") }},
		{name: "a key in a file", want: "the key is in a file now", change: func(m *machines.Machine) { *m = plain(*m) }},
		{name: "another name", want: "its TPM is that of w-0", change: func(m *machines.Machine) { m.Name, m.Address = "w-1", "10.0.0.13" }},
		{name: "a copied key", want: "its key is that of w-0: the identity was copied", change: func(m *machines.Machine) { m.Name, m.Address, m.EK = "w-1", "10.0.0.13", "" }},
	} {
		m := w0
		tt.change(&m)
		e, err := w.Enrolment()
		must(err)
		for _, err := range []error{w.AddMachine(m), e.CheckKey(m.Name, m.Key, m.EK)} {
			if plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(err.Error(), tt.want) || !strings.Contains(plan.Remedy(err), "machine remove w-0") {
				t.Errorf("%s: %v (%s)", tt.name, err, plan.Remedy(err))
			}
		}
	}
	if now, _ := w.ReadConfig(); !bytes.Equal(now, before) {
		t.Errorf("changed all the same:\n%s", now)
	}
	w1 := machines.Machine{Name: "w-1", Address: "10.0.0.13", Group: cloud.Worker, Key: ek("4")}
	must(w.AddMachine(plain(w1))) // by an older program
	must(w.AddMachine(w1))
	attested(false)
	other := w1
	other.Key = ek("5")
	for _, m := range []machines.Machine{other, {Name: "w-1", Address: w1.Address, Group: w1.Group, Attested: true, EK: ek("d"), Key: ek("5")}} {
		if err := w.AddMachine(m); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(err.Error(), "it is another computer, or its disk was replaced") || !strings.Contains(plan.Remedy(err), "--gone") {
			t.Errorf("another key in a file, or the first one in a TPM: %v (%s)", err, plan.Remedy(err))
		}
	}
	must(w.RemoveMachine("w-1"))
	attested(true)
	must(w.RemoveMachine("w-0"))
	must(w.RemoveMachine("cp-0"))
	attested(false)
}

// A row that is written by hand, in any layout, gets the TPM of its machine. Comments stay.
func TestRowsGetTPMs(t *testing.T) {
	t.Parallel()
	m := machines.Machine{Name: "w-0", Address: "10.0.0.9", Group: cloud.Worker, Attested: true, EK: "sha256:" + strings.Repeat("1", 64)}
	for name, row := range map[string]string{
		"a row": "    - {group: worker, name: w-0, address: 10.0.0.9} # mine\n",
		"lines": "    - name: w-0\n      group: worker # mine\n      address: 10.0.0.9\n",
	} {
		w := enrolling(t)
		b, err := w.ReadConfig()
		if err != nil {
			t.Fatal(err)
		}
		b = bytes.Replace(b, []byte("    endpoint: api.example.com\n"), []byte("    endpoint: api.example.com\n    machines:\n"+row+"    - {name: w-1, address: 10.0.0.10, group: worker}\n"), 1)
		if err := w.ReplaceConfig(b); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Enrolment(); err != nil {
			t.Fatal(err)
		}
		if err := w.AddMachine(m); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		c, err := w.Config()
		if err != nil {
			t.Fatal(err)
		}
		now, _ := w.ReadConfig()
		if list := machines.List(c.Provider.Section); len(list) != 2 || list[0] != m || !bytes.Contains(now, []byte("# mine")) {
			t.Errorf("%s: %v\n%s", name, list, now)
		}
	}
}

// A machine that is added again gets the labels and taints that its row lacks. Others are changed in the row alone.
func TestRowsGetSettings(t *testing.T) {
	t.Parallel()
	w := enrolling(t)
	if _, err := w.Enrolment(); err != nil {
		t.Fatal(err)
	}
	m := machines.Machine{Name: "w-0", Address: "10.0.0.9", Group: cloud.Worker, Labels: "disk=ssd,rack=1"}
	m.Taints = "batch=yes:NoSchedule"
	for _, x := range []machines.Machine{plain(m), m, plain(m), {Name: "w-1", Address: "10.0.0.10", Group: cloud.Worker}} {
		if err := w.AddMachine(x); err != nil {
			t.Fatal(err)
		}
	}
	c, err := w.Config()
	if err != nil {
		t.Fatal(err)
	}
	if list := machines.List(c.Provider.Section); len(list) != 2 || list[0] != m {
		b, _ := w.ReadConfig()
		t.Errorf("the configuration lists %+v:\n%s", list, b)
	}
	other := m
	other.Labels = "disk=hdd"
	if err := w.AddMachine(other); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(err.Error(), "disk=ssd") || !strings.Contains(plan.Remedy(err), ConfigFile) {
		t.Errorf("other labels: %v (%s)", err, plan.Remedy(err))
	}
	e, err := w.Enrolment()
	if err != nil {
		t.Fatal(err)
	}
	if i := e.Inventory(); i.Machines[0].Labels != m.Labels || i.Machines[0].Taints != m.Taints {
		t.Errorf("the cluster gets %+v", i.Machines[0])
	}
	files, err := e.Files(e.Machines[1])
	if err != nil || bytes.Contains(files[0].Data, []byte("disk")) {
		t.Errorf("a machine has the labels in %s, %v", files[0].Data, err)
	}
	for flag, want := range map[string]string{"a=1": "", "node-role.kubernetes.io/control-plane=": "reserved"} {
		_, _, err := MachineSettings([]string{flag}, nil)
		if want == "" && err != nil || want != "" && (plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(err.Error(), want)) {
			t.Errorf("--label %s: %v", flag, err)
		}
	}
}

// balanced is a configuration of enrolled machines with a balancer, whose map is given, and an endpoint.
func balanced(t *testing.T, endpoint, balancer string) []byte {
	t.Helper()
	b, err := GenerateConfig("machines", GenerateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Replace(b, []byte("endpoint: api.example.com"), []byte("endpoint: "+endpoint+"\n    balancer: "+balancer+"\n    machines:\n      - {name: cp-0, address: 10.0.0.11, group: control-plane}"), 1)
}

func TestBalancerIsValidated(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, endpoint, balancer, want string }{
		{name: "address alone", endpoint: "10.0.0.10", balancer: "{address: 10.0.0.10}"},
		{name: "all fields", endpoint: "api.example.com", balancer: "{address: 10.0.0.10, interface: eth0, port: 7443, routerID: 255}"},
		{name: "no address", endpoint: "10.0.0.10", balancer: "{port: 7443}", want: "provider.enrolled.balancer.address"},
		{name: "no field", endpoint: "10.0.0.10", balancer: "{}", want: "address"},
		{name: "IPv6", endpoint: "api.example.com", balancer: "{address: \"fd00::1\"}", want: "is no IPv4 address"},
		{name: "a name", endpoint: "api.example.com", balancer: "{address: api.example.com}", want: "is no IPv4 address"},
		{name: "another endpoint", endpoint: "10.0.0.9", balancer: "{address: 10.0.0.10}", want: "10.0.0.10 is not the endpoint 10.0.0.9"},
		{name: "address of a machine", endpoint: "10.0.0.11", balancer: "{address: 10.0.0.11}", want: "10.0.0.11 is that of cp-0"},
		{name: "address of a Service", endpoint: "10.96.0.10", balancer: "{address: 10.96.0.10}", want: "range of pods or services"},
		{name: "port of API servers", endpoint: "10.0.0.10", balancer: "{address: 10.0.0.10, port: 6443}", want: "6443 is the port of the API servers"},
		{name: "port", endpoint: "10.0.0.10", balancer: "{address: 10.0.0.10, port: 70000}", want: "70000"},
		{name: "router ID", endpoint: "10.0.0.10", balancer: "{address: 10.0.0.10, routerID: 256}", want: "256"},
		{name: "interface", endpoint: "10.0.0.10", balancer: "{address: 10.0.0.10, interface: \"eth0 }\"}", want: "cannot name a network interface"},
		{name: "unknown field", endpoint: "10.0.0.10", balancer: "{address: 10.0.0.10, vrid: 3}", want: "vrid"},
	} {
		_, err := ParseConfig(balanced(t, tt.endpoint, tt.balancer))
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
}

func TestEnrolmentWithABalancer(t *testing.T) {
	t.Parallel()
	w := enrolling(t)
	if e, err := w.Enrolment(); err != nil || e.Balancer != nil || e.Port != 6443 {
		t.Fatalf("without a balancer: %+v, %v", e, err)
	}
	m := machines.Machine{Name: "cp-0", Address: "10.0.0.11", Group: cloud.ControlPlane}
	environment := func(e *Enrolment) string {
		files, err := e.Files(m)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if f.Path == "/etc/constellation/environment" {
				return string(f.Data)
			}
		}
		return ""
	}
	if err := w.ReplaceConfig(balanced(t, "api.example.com", "{address: 10.0.0.10}")); err != nil {
		t.Fatal(err)
	}
	e, err := w.Enrolment()
	if err != nil || e.Balancer == nil || e.Port != 8443 || e.Balancer.RouterID != machines.RouterID(e.UID) || e.Balancer.RouterID < 1 || e.Balancer.RouterID > 255 {
		t.Fatalf("with a balancer: %+v, %v", e, err)
	}
	if env := environment(e); !strings.Contains(env, "CONSTELLATION_API_SERVER_PORT=8443\n") {
		t.Errorf("environment:\n%s", env)
	}
	s, err := w.State()
	if err != nil || s.Infrastructure.ClusterEndpoint != "api.example.com:8443" || s.Infrastructure.InClusterEndpoint != "api.example.com" || !slices.Equal(s.Infrastructure.APIServerCertSANs, []string{"api.example.com", "10.0.0.10"}) {
		t.Errorf("state %+v, %v", s.Infrastructure, err)
	}
	if l, err := w.MachineList(); err != nil || l.Balancer == nil || l.Balancer.Address.String() != "10.0.0.10" {
		t.Errorf("list %+v, %v", l, err)
	}
	// The list can be edited, and the balancer stays.
	if err := w.AddMachine(machines.Machine{Name: "cp-1", Address: "10.0.0.12", Group: cloud.ControlPlane}); err != nil {
		t.Error(err)
	}
	// After init the endpoint stays: nodes and certificates have it.
	secret, salt := NewMasterSecret(), bytes.Repeat([]byte{8}, 32)
	s.ClusterValues = ClusterValues{ClusterID: secret.ClusterID(salt), MeasurementSalt: salt}
	if err := errors.Join(w.WriteMasterSecret(secret), w.WriteState(s)); err != nil {
		t.Fatal(err)
	}
	if e, err := w.Enrolment(); err != nil || e.Port != 8443 || len(e.Machines) != 2 {
		t.Errorf("after init: %+v, %v", e, err)
	}
	for _, changed := range [][]byte{balanced(t, "api.example.com", "{address: 10.0.0.10, port: 9443}"), balanced(t, "10.0.0.10", "{address: 10.0.0.10}")} {
		if err := w.ReplaceConfig(changed); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Enrolment(); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(err.Error(), "api.example.com:8443") {
			t.Errorf("another endpoint after init: %v", err)
		}
	}
}
