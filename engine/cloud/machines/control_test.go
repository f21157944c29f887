package machines

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"constellation/engine/cloud"
	"constellation/engine/cloud/section"
	"constellation/engine/version"
)

func inventory() Inventory {
	return Inventory{Schema: "1", Cluster: "c", Machines: []Entry{
		{Name: "w", Address: "10.0.0.2", Group: cloud.Worker, ProviderID: ProviderID("c", "w")},
		{Name: "cp", Address: "10.0.0.1", Group: cloud.ControlPlane, ProviderID: "other://cp"},
	}}
}

func write(t *testing.T, path string, i Inventory) {
	t.Helper()
	b, err := json.Marshal(i)
	if err == nil {
		err = os.WriteFile(path, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestControl(t *testing.T) {
	ctx, path := t.Context(), filepath.Join(t.TempDir(), InventoryKey)
	c := NewControl(path)
	if _, err := c.Instances(ctx); !errors.Is(err, cloud.ErrUnavailable) {
		t.Errorf("without a file: %v", err)
	}
	write(t, path, inventory())
	groups, err := c.Groups(ctx)
	if err != nil || len(groups) != 2 || groups[0].Role != cloud.ControlPlane || groups[0].Count != 1 || groups[0].Name != "control-plane" || groups[0].ID == groups[1].ID {
		t.Errorf("groups are %+v, %v", groups, err)
	}
	for id, want := range map[string]string{groups[1].ID: "worker", "sandboxes/c/groups/worker": "", Name + "/c": ""} {
		if got := GroupName(id); got != want {
			t.Errorf("group %s is called %q, want %q", id, got, want)
		}
	}
	all, err := c.Instances(ctx)
	if err != nil || len(all) != 2 || all[0].Name != "cp" || all[0].State != cloud.Ready || all[0].IP.String() != "10.0.0.1" || all[0].Group != groups[0].ID {
		t.Errorf("machines are %+v, %v", all, err)
	}
	if m, err := c.Instance(ctx, "OTHER://cp"); err != nil || m.Name != "cp" || m.Role != cloud.ControlPlane {
		t.Errorf("machine of another provider ID: %+v, %v", m, err)
	}
	// The operator deletes the Node of a machine that is not found.
	if _, err := c.Instance(ctx, ProviderID("c", "new")); err == nil || errors.Is(err, cloud.ErrNotFound) || !errors.Is(err, cloud.ErrUnavailable) {
		t.Errorf("a machine that joined by kubeadm: %v, want that it is not known", err)
	}
	if _, err := c.CreateInstances(ctx, groups[1].ID, []string{"000000000000000000000001"}); !errors.Is(err, cloud.ErrCapacity) {
		t.Errorf("create a machine: %v", err)
	}
	if err := c.SetGroupImage(ctx, groups[1].ID, "image"); !errors.Is(err, cloud.ErrDenied) {
		t.Errorf("set an image: %v", err)
	}
	if err := c.DeleteInstances(ctx, []string{ProviderID("c", "w")}); err != nil {
		t.Errorf("delete a machine: %v", err)
	}
	if m, err := c.Instance(ctx, ProviderID("c", "w")); err != nil || m.State != cloud.Terminated {
		t.Errorf("a deleted machine: %+v, %v", m, err)
	}
	if m, err := c.Instance(ctx, "other://cp"); err != nil || m.State != cloud.Ready {
		t.Errorf("the other machine: %+v, %v", m, err)
	}
	// The kubelet replaces the file when the ConfigMap changes.
	i := inventory()
	i.Machines = append(i.Machines, Entry{Name: "new", Group: cloud.Worker, ProviderID: ProviderID("c", "new")})
	write(t, path, i)
	if m, err := c.Instance(ctx, ProviderID("c", "new")); err != nil || m.Name != "new" {
		t.Errorf("a machine that was added: %+v, %v", m, err)
	}
}

func TestParseInventoryRefuses(t *testing.T) {
	for _, tt := range []struct {
		name, want string
		change     func(*Inventory)
	}{
		{name: "another schema", want: "another schema", change: func(i *Inventory) { i.Schema = "2" }},
		{name: "no cluster", want: "names no cluster", change: func(i *Inventory) { i.Cluster = "" }},
		{name: "a name twice", want: "twice", change: func(i *Inventory) { i.Machines[1].Name = "w" }},
		{name: "an ID twice", want: "twice", change: func(i *Inventory) { i.Machines[1].ProviderID = strings.ToUpper(i.Machines[0].ProviderID) }},
		{name: "no ID", want: "lacks", change: func(i *Inventory) { i.Machines[1].ProviderID = "" }},
		{name: "no group", want: "lacks", change: func(i *Inventory) { i.Machines[1].Group = "" }},
		{name: "a bad address", want: "no IP address", change: func(i *Inventory) { i.Machines[1].Address = "cp.example.com" }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			i := inventory()
			tt.change(&i)
			b, err := json.Marshal(i)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := ParseInventory(b); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}

func TestComponentsOfTheConfiguration(t *testing.T) {
	digest := "sha256:" + strings.Repeat("a", 64)
	row := func(v, name string) section.Values {
		return section.Values{"kubernetes": v, "name": name, "url": "https://example.com/" + name, "digest": digest}
	}
	c := NewConsole(section.Values{ComponentsTable: []section.Values{
		row("v1.37.2", "kubelet"), row("v1.37.2", "kubeadm"), row("v1.37.2", "kubectl"), row("v1.37.3", "kubeadm"),
	}})
	l, err := c.Components(t.Context(), version.MustParse("v1.37.2"))
	if err != nil || len(l.List) != 3 || l.List[0].Name != "kubeadm" || l.List[1].Path != "/usr/local/bin/kubelet" || l.List[1].Digest != digest {
		t.Errorf("components are %+v, %v", l, err)
	}
	if _, err := c.Components(t.Context(), version.MustParse("v1.36.4")); !errors.Is(err, cloud.ErrNotFound) {
		t.Errorf("a version without rows: %v", err)
	}
	if _, err := c.Components(t.Context(), version.MustParse("v1.37.3")); err == nil || errors.Is(err, cloud.ErrNotFound) {
		t.Errorf("a version without a kubelet: %v, want that it needs all", err)
	}
	if about, err := c.Describe(t.Context()); err != nil || len(about.Kubernetes) != 2 {
		t.Errorf("versions are %v, %v", about.Kubernetes, err)
	}
}

// The operator follows the list that the console published; one of an older console has no packages upgraded.
func TestPackagesOfTheList(t *testing.T) {
	for _, tt := range []struct {
		name string
		of   section.Values
		want bool
	}{
		{name: "absent", of: section.Values{}},
		{name: "held", of: section.Values{PackagesField: PackagesHeld}},
		{name: "upgrade", of: section.Values{PackagesField: PackagesUpgrade}, want: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path, i := filepath.Join(t.TempDir(), InventoryKey), inventory()
			i.SetPackages(tt.of)
			write(t, path, i)
			if is, err := NewControl(path).UpgradesPackages(t.Context()); err != nil || is != tt.want {
				t.Errorf("packages are upgraded: %t, %v", is, err)
			}
			if b, err := os.ReadFile(path); err != nil || strings.Contains(string(b), "packages") != tt.want {
				t.Errorf("the list is %s, %v", b, err)
			}
		})
	}
	if _, err := NewControl("/nonexistent").UpgradesPackages(t.Context()); !errors.Is(err, cloud.ErrUnavailable) {
		t.Errorf("a list that cannot be read: %v", err)
	}
}
