package machines

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/section"
)

// InventoryFile is where the operator's pods have the inventory: a ConfigMap that the console writes.
const InventoryFile = "/etc/constellation/machines/" + InventoryKey

// InventoryConfigMap is the name of that ConfigMap, in the namespace of the operator.
const InventoryConfigMap = "constellation-machines"

// InventoryKey is the key of the inventory in its ConfigMap.
const InventoryKey = "machines.json"

// Inventory is the list of machines as the operator reads it, in JSON.
type Inventory struct {
	Schema string `json:"schema"` // "1"
	// Cluster is the UID of the namespace kube-system. Of enrolled machines it is the UID of the state.
	Cluster  string  `json:"cluster"`
	Machines []Entry `json:"machines"`
	// Endpoint is the host in front of the API servers. Only inventories of enrolled machines have it.
	Endpoint string `json:"endpoint,omitempty"`
	// Sizes are the wanted numbers of machines of groups; absent: that of the machines that are no spares.
	Sizes map[cloud.Role]int `json:"sizes,omitempty"`
	// ReplaceAfter is how long a Node is not Ready until a spare takes its place, such as 5m; empty: [ReplaceAfter].
	ReplaceAfter string `json:"replaceAfter,omitempty"`
	// Packages is [PackagesUpgrade] if upgrades in place upgrade packages of the distribution; empty: they do not.
	Packages string `json:"packages,omitempty"`
}

// SetPackages takes over what a section says about packages.
func (i *Inventory) SetPackages(v section.Values) {
	if i.Packages = ""; UpgradesPackages(v) {
		i.Packages = PackagesUpgrade
	}
}

// Entry is one machine of an Inventory.
type Entry struct {
	Name string `json:"name"`
	// Address is an IP address; empty if it is not known.
	Address string     `json:"address,omitempty"`
	Group   cloud.Role `json:"group"`
	// ProviderID is that of the machine's Node.
	ProviderID string `json:"providerID"`
	// Key identifies the certified key of an enrolled machine.
	Key string `json:"key,omitempty"`
	// Labels and Taints are those of [Machine].
	Labels string `json:"labels,omitempty"`
	Taints string `json:"taints,omitempty"`
	// Spare is whether the machine belongs to its group only while it is assigned.
	Spare bool `json:"spare,omitempty"`
}

// Entry returns the machine as the cluster has it.
func (m Machine) Entry() Entry {
	return Entry{Name: m.Name, Address: m.Address, Group: m.Group, ProviderID: m.ProviderID, Key: m.Key, Labels: m.Labels, Taints: m.Taints, Spare: m.Spare}
}

// ProviderID is the ID of a machine whose Node had none: machines://<cluster>/<name>.
func ProviderID(cluster, name string) string { return Name + "://" + cluster + "/" + name }

// GroupID is the ID of the group of a role: machines/<cluster>/groups/<role>.
func GroupID(cluster string, r cloud.Role) string {
	return Name + "/" + cluster + "/groups/" + string(r)
}

// GroupName returns the name that the ID of a group has: that of its role. It is empty for other IDs.
func GroupName(id string) string {
	rest, ours := strings.CutPrefix(id, Name+"/")
	_, role, _ := strings.Cut(rest, "/groups/")
	if !ours || !cloud.Role(role).Valid() {
		return ""
	}
	return role
}

// ParseInventory reads an inventory. Names and provider IDs are unique.
func ParseInventory(b []byte) (Inventory, error) {
	var i Inventory
	if err := json.Unmarshal(b, &i); err != nil {
		return Inventory{}, fmt.Errorf("read the inventory of machines: %w", err)
	}
	names, ids := map[string]bool{}, map[string]bool{}
	for _, m := range i.Machines {
		switch {
		case !nameRE.MatchString(m.Name) || !m.Group.Valid() || m.ProviderID == "":
			return Inventory{}, fmt.Errorf("read the inventory of machines: %q lacks a name, a group or a providerID", m.Name)
		case names[m.Name] || ids[strings.ToLower(m.ProviderID)]:
			return Inventory{}, fmt.Errorf("read the inventory of machines: %s is there twice", m.Name)
		case m.Address != "":
			if _, err := netip.ParseAddr(m.Address); err != nil {
				return Inventory{}, fmt.Errorf("read the inventory of machines: the address of %s is no IP address", m.Name)
			}
		}
		names[m.Name], ids[strings.ToLower(m.ProviderID)] = true, true
	}
	if i.Schema != "1" || i.Cluster == "" {
		return Inventory{}, errors.New("read the inventory of machines: it has another schema, or names no cluster")
	}
	return i, nil
}

// Control serves an inventory as a cloud whose machines are given: none can be made, and none deleted.
type Control struct {
	path string

	mu sync.Mutex
	// left are the machines that the operator has deleted. They are known for as long as the process
	// lives; the next adoption takes them out of the inventory.
	left map[string]bool

	// Of enrolled machines, see Use. heard is by name, leaving by key.
	store   Store
	now     func() time.Time
	heard   map[string]heard
	leaving map[string]time.Time
}

// NewControl returns the view of the operator of the inventory in the file at path, which is read again
// for each call. It is safe for concurrent use.
func NewControl(path string) *Control { return &Control{path: path, left: map[string]bool{}} }

func (c *Control) read(ctx context.Context) (Inventory, error) {
	if err := ctx.Err(); err != nil {
		return Inventory{}, err
	}
	b, err := c.content(ctx)
	if err != nil {
		return Inventory{}, fmt.Errorf("read the inventory of machines: %w: %w", cloud.ErrUnavailable, err)
	}
	i, err := ParseInventory(b)
	if err != nil {
		return Inventory{}, fmt.Errorf("%w: %w", cloud.ErrUnavailable, err)
	}
	return i, nil
}

// content is the list as the cluster has it. The file of a pod follows the ConfigMap a minute later.
func (c *Control) content(ctx context.Context) ([]byte, error) {
	if c.store == nil {
		return os.ReadFile(c.path)
	}
	data, _, err := c.store.Load(ctx, InventoryConfigMap)
	return []byte(data[InventoryKey]), err
}

// Groups returns a group for each role that a machine has.
func (c *Control) Groups(ctx context.Context) ([]cloud.Group, error) {
	i, err := c.read(ctx)
	if err != nil {
		return nil, err
	}
	return i.Groups(), nil
}

// Groups returns a group for each role that a machine has, control planes first.
func (i *Inventory) Groups() (out []cloud.Group) {
	for _, r := range []cloud.Role{cloud.ControlPlane, cloud.Worker} {
		if slices.ContainsFunc(i.Machines, func(m Entry) bool { return m.Group == r }) {
			out = append(out, cloud.Group{ID: GroupID(i.Cluster, r), Name: string(r), Role: r, Count: i.size(r)})
		}
	}
	return out
}

// size is the wanted number of machines of a group: that of the configuration, else that of its rows without spares.
func (i *Inventory) size(r cloud.Role) (n int) {
	if n = i.Sizes[r]; n > 0 {
		return n
	}
	for _, m := range i.Machines {
		if m.Group == r && !m.Spare {
			n++
		}
	}
	return n
}

// instance describes a machine.
func (i *Inventory) instance(m *Entry) cloud.Instance {
	out := cloud.Instance{Name: m.Name, ProviderID: m.ProviderID, Group: GroupID(i.Cluster, m.Group), Role: m.Group, State: cloud.Ready, EvidenceKey: m.Key, Spare: m.Spare}
	out.IP, _ = netip.ParseAddr(m.Address) // empty is no address
	return out
}

func (c *Control) instance(i *Inventory, m *Entry) cloud.Instance {
	out := i.instance(m)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left[strings.ToLower(m.ProviderID)] {
		out.State = cloud.Terminated
	}
	return out
}

// NodeSettings returns the labels and taints that the list gives to Nodes, by the provider ID. The error names a machine
// whose settings are not valid; those of the others are returned.
func (c *Control) NodeSettings(ctx context.Context) (map[string]cloud.NodeSettings, error) {
	i, err := c.read(ctx)
	if err != nil {
		return nil, err
	}
	out := make(map[string]cloud.NodeSettings, len(i.Machines))
	for _, m := range i.Machines {
		labels, e1 := ParseLabels(m.Labels)
		taints, e2 := ParseTaints(m.Taints)
		if e := errors.Join(e1, e2); e != nil {
			err = errors.Join(err, fmt.Errorf("read the settings of machine %s: %w", m.Name, e))
			continue
		}
		out[m.ProviderID] = cloud.NodeSettings{Name: m.Name, Labels: labels, Taints: taints}
	}
	return out, err
}

// UpgradesPackages reports whether upgrades in place upgrade packages of the distribution. The console has published
// that with the list.
func (c *Control) UpgradesPackages(ctx context.Context) (bool, error) {
	i, err := c.read(ctx)
	return i.Packages == PackagesUpgrade, err
}

// Instances returns the machines of the inventory.
func (c *Control) Instances(ctx context.Context) ([]cloud.Instance, error) {
	if c.store != nil {
		s, err := c.load(ctx)
		if err != nil {
			return nil, err
		}
		var out []cloud.Instance
		for k := range s.Machines {
			if i, listed := c.instanceOf(s, &s.Machines[k]); listed {
				out = append(out, i)
			}
		}
		slices.SortFunc(out, func(a, b cloud.Instance) int { return cmp.Compare(a.Name, b.Name) })
		return out, nil
	}
	i, err := c.read(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]cloud.Instance, 0, len(i.Machines))
	for k := range i.Machines {
		out = append(out, c.instance(&i, &i.Machines[k]))
	}
	slices.SortFunc(out, func(a, b cloud.Instance) int { return cmp.Compare(a.Name, b.Name) })
	return out, nil
}

// Instance returns one machine. A machine that the inventory lacks is not known, and not gone: somebody
// may have joined it with kubeadm since. So the error does not wrap cloud.ErrNotFound.
func (c *Control) Instance(ctx context.Context, key string) (cloud.Instance, error) {
	if c.store != nil {
		s, err := c.load(ctx)
		if err != nil {
			return cloud.Instance{}, err
		}
		return c.find(s, key)
	}
	i, err := c.read(ctx)
	if err != nil {
		return cloud.Instance{}, err
	}
	for k := range i.Machines {
		if cloud.SameMachine(i.Machines[k].ProviderID, key) {
			return c.instance(&i, &i.Machines[k]), nil
		}
	}
	how := "`constellation adopt --operator` adds it"
	if i.Endpoint != "" {
		how = "`constellation machine add` and `constellation init` add it"
	}
	return cloud.Instance{}, fmt.Errorf("machine %s: %w: the inventory does not have it; %s", key, cloud.ErrUnavailable, how)
}

// SetGroupImage accepts no image: the machines keep their operating system.
func (c *Control) SetGroupImage(_ context.Context, _, image string) error {
	if image == "" {
		return nil
	}
	return fmt.Errorf("set image %s: %w: machines of an inventory have no image", image, cloud.ErrDenied)
}

// CreateInstances assigns spares. It returns cloud.ErrCapacity if there is none; an inventory makes no machines.
func (c *Control) CreateInstances(ctx context.Context, groupID string, tokens []string) ([]cloud.Instance, error) {
	if c.store != nil {
		return c.create(ctx, groupID, tokens)
	}
	return nil, fmt.Errorf("create a machine of %s: %w: an inventory has existing machines only; set the strategy of the group to InPlace", groupID, cloud.ErrCapacity)
}

// DeleteInstances releases machines: a spare, or another enrolled machine, resets itself and can be assigned again. Machines
// of an adopted cluster are marked: they count as terminated from then on, and nothing happens to them.
func (c *Control) DeleteInstances(ctx context.Context, keys []string) error {
	if c.store != nil {
		return c.delete(ctx, keys)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range keys {
		id, _ := cloud.SplitKey(k)
		c.left[strings.ToLower(id)] = true
	}
	return nil
}
