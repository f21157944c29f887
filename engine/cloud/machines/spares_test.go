package machines_test

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest"
	"constellation/engine/cloud/machines"
)

// store is the API server of a test: ConfigMaps with versions.
type store struct {
	mu       sync.Mutex
	data     map[string]map[string]string
	version  int
	clock    time.Duration
	overtake func() // is called once before the next write
}

func (s *store) now() time.Time { return time.Unix(1_800_000_000, 0).Add(s.clock) }

func (s *store) Load(ctx context.Context, name string) (map[string]string, string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, "", err
	}
	d, ok := s.data[name]
	if !ok {
		return nil, "", cloud.ErrNotFound
	}
	return maps.Clone(d), strconv.Itoa(s.version), nil
}

func (s *store) Save(_ context.Context, name string, data map[string]string, version string) error {
	if f := s.overtake; f != nil {
		s.overtake = nil
		f()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if version != strconv.Itoa(s.version) {
		return cloud.ErrConflict
	}
	s.version++
	s.data[name] = maps.Clone(data)
	return nil
}

// asks records that a spare asked for a ticket, after it was released from its present assignment.
func (s *store) asks(t *testing.T, names ...string) {
	t.Helper()
	all, err := machines.ParseAssignments(s.data[machines.SparesConfigMap])
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		b, err := json.Marshal(machines.Seen{Incarnation: all[n].Incarnation, Time: s.now()})
		if err != nil {
			t.Fatal(err)
		}
		s.data[machines.SeenConfigMap][n] = string(b)
	}
}

// pool returns a machines.Control of one control plane, the workers and the spares of a list.
func pool(t *testing.T, workers int, spares ...string) (*machines.Control, *store) {
	t.Helper()
	i := machines.Inventory{Schema: "1", Cluster: "c", Endpoint: "api", Sizes: map[cloud.Role]int{cloud.Worker: workers}}
	add := func(name string, r cloud.Role, spare bool) {
		i.Machines = append(i.Machines, machines.Entry{Name: name, Group: r, ProviderID: machines.ProviderID("c", name), Spare: spare})
	}
	add("cp", cloud.ControlPlane, false)
	add("w", cloud.Worker, false)
	for _, name := range spares {
		add(name, cloud.Worker, true)
	}
	b, err := json.Marshal(i)
	if err != nil {
		t.Fatal(err)
	}
	s := &store{data: map[string]map[string]string{machines.InventoryConfigMap: {machines.InventoryKey: string(b)}, machines.SparesConfigMap: {}, machines.SeenConfigMap: {}}}
	c := machines.NewControl("unused")
	c.Use(s, s.now)
	return c, s
}

// resizes changes the size of the group of workers.
func (s *store) resizes(t *testing.T, n int) {
	t.Helper()
	i, err := machines.ParseInventory([]byte(s.data[machines.InventoryConfigMap][machines.InventoryKey]))
	if err != nil {
		t.Fatal(err)
	}
	i.Sizes[cloud.Worker] = n
	b, err := json.Marshal(i)
	if err != nil {
		t.Fatal(err)
	}
	s.data[machines.InventoryConfigMap][machines.InventoryKey] = string(b)
}

// Spares behave as the machines of any cloud. An unknown machine is an assignment that was never made.
func TestSparesConform(t *testing.T) {
	names := []string{"s1", "s2", "s3", "s4", "s5"}
	c, s := pool(t, 1, names...)
	s.asks(t, names...)
	cloudtest.Run(t, cloudtest.Options{Cloud: resetting{c, s, t, names}, Group: machines.GroupID("c", cloud.Worker), Unknown: machines.ProviderID("c", "w") + "#7"})
}

// resetting is a machines.Control whose machines reset themselves as soon as they are released.
type resetting struct {
	*machines.Control
	s     *store
	t     *testing.T
	names []string
}

func (r resetting) DeleteInstances(ctx context.Context, keys []string) error {
	err := r.Control.DeleteInstances(ctx, keys)
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	r.s.asks(r.t, r.names...)
	return err
}

func node(key string) machines.NodeState { return machines.NodeState{Machine: key, Ready: true} }

func TestGroupsGetTheirSize(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c, s := pool(t, 1, "s1", "s2")
	id := func(name string) string { return machines.ProviderID("c", name) }
	nodes := map[string]machines.NodeState{"cp": node(id("cp")), "w": node(id("w"))}
	balance := func() machines.Balance {
		t.Helper()
		b, err := c.Balance(ctx, nodes)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	none := func(when string) {
		t.Helper()
		before := s.version
		if b := balance(); len(b.Assigned)+len(b.Lost)+len(b.Leave)+len(b.Waits) > 0 || s.version != before {
			t.Errorf("%s: %+v", when, b)
		}
	}
	none("a group of its size")

	// No spare has asked: the group waits and says why.
	s.resizes(t, 2)
	if b := balance(); len(b.Assigned) > 0 || !strings.Contains(b.Waits["worker"], "worker has 1 of 2 machines: no spare is usable (s1: it has never asked to join; s2") {
		t.Errorf("without a usable spare: %+v", b)
	}
	s.asks(t, "s1", "s2")
	s.overtake = func() { s.mu.Lock(); s.version++; s.mu.Unlock() } // another leader writes first
	if b := balance(); !slices.Equal(b.Assigned, []string{"s1"}) || len(b.Waits) > 0 {
		t.Errorf("scaled up: %+v", b)
	}
	none("while it joins")
	if i, err := c.Instance(ctx, id("s1")); err != nil || i.Key() != id("s1")+"#1" || i.State != cloud.Ready {
		t.Errorf("the assigned spare is %+v, %v", i, err)
	}
	nodes["s1"] = node(id("s1") + "#1")
	none("joined")

	// A worker is not Ready. It is given up when a spare can take its place, and not while somebody works on it.
	for _, tt := range []struct {
		name string
		is   machines.NodeState
	}{
		{name: "for a moment", is: machines.NodeState{Machine: id("w"), Since: machines.ReplaceAfter - time.Second}},
		{name: "cordoned by somebody", is: machines.NodeState{Machine: id("w"), Since: time.Hour, Kept: true}},
	} {
		nodes["w"] = tt.is
		none(tt.name)
	}
	nodes["w"] = machines.NodeState{Machine: id("w"), Since: machines.ReplaceAfter + time.Second}
	s.clock += machines.SeenFor + time.Second
	if b := balance(); len(b.Lost) > 0 || !strings.Contains(b.Waits["worker"], "w has not been Ready for 5m0s, and cannot be replaced: no spare is usable (s2: it has not asked to join since") {
		t.Errorf("the spare is silent: %+v", b)
	}
	s.asks(t, "s2")
	nodes["s1"] = machines.NodeState{Machine: id("s1") + "#1"}
	if b := balance(); len(b.Lost) > 0 || !strings.Contains(b.Waits["worker"], "2 of 3 Nodes are not Ready") {
		t.Errorf("most are not Ready: %+v", b)
	}
	nodes["s1"] = node(id("s1") + "#1")
	if b := balance(); !slices.Equal(b.Lost, []string{"w"}) || !slices.Equal(b.Assigned, []string{"s2"}) {
		t.Errorf("replaced: %+v", b)
	}
	if i, err := c.Instance(ctx, id("w")); err != nil || i.State != cloud.Terminated {
		t.Errorf("the dead machine is %+v, %v", i, err)
	}
	delete(nodes, "w")
	nodes["s2"] = node(id("s2") + "#1")
	none("replaced")

	// The dead machine is no spare before it has reset itself.
	if _, err := c.CreateInstances(ctx, machines.GroupID("c", cloud.Worker), []string{"t"}); err == nil || !strings.Contains(err.Error(), "w: it has not reset itself since it was released") {
		t.Errorf("a spare for another request: %v", err)
	}
	s.asks(t, "w")
	s.resizes(t, 3)
	if b := balance(); !slices.Equal(b.Assigned, []string{"w"}) {
		t.Errorf("scaled up again: %+v", b)
	}
	if _, err := c.Instance(ctx, id("w")+"#0"); !errors.Is(err, cloud.ErrNotFound) {
		t.Errorf("an earlier assignment: %v", err)
	}
	nodes["w"] = node(id("w") + "#1")

	// Scaled down: the last that was assigned leaves by its Node. It is usable when it has reset itself.
	s.resizes(t, 2)
	b := balance()
	if len(b.Leave) != 1 {
		t.Fatalf("scaled down: %+v", b)
	}
	leaves := b.Leave[0]
	marked := nodes[leaves]
	marked.Leaves = true
	nodes[leaves] = marked
	none("while it leaves")
	if err := c.DeleteInstances(ctx, []string{nodes[leaves].Machine}); err != nil {
		t.Fatal(err)
	}
	state := func() cloud.State {
		t.Helper()
		i, err := c.Instance(ctx, id(leaves))
		if err != nil {
			t.Fatal(err)
		}
		return i.State
	}
	if got := state(); got != cloud.Terminating {
		t.Errorf("a released machine is %s before its reset", got)
	}
	delete(nodes, leaves)
	none("released")
	s.asks(t, leaves)
	if got := state(); got != cloud.Terminated {
		t.Errorf("a released machine is %s after its reset", got)
	}
}

// A released machine that never resets is gone after a while, and is no spare.
func TestUnreachableMachinesAreNoSpares(t *testing.T) {
	t.Parallel()
	c, s := pool(t, 1, "s1")
	s.asks(t, "s1")
	group := machines.GroupID("c", cloud.Worker)
	made, err := c.CreateInstances(t.Context(), group, []string{"a"})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.DeleteInstances(t.Context(), []string{made[0].Key()}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []cloud.State{cloud.Terminating, cloud.Terminated} {
		if i, err := c.Instance(t.Context(), made[0].Key()); err != nil || i.State != want {
			t.Errorf("it is %s, %v; want %s", i.State, err, want)
		}
		s.clock += machines.ResetWithin + time.Second
	}
	if _, err := c.CreateInstances(t.Context(), group, []string{"b"}); !errors.Is(err, cloud.ErrCapacity) || !strings.Contains(err.Error(), "s1: it has not reset itself since it was released") {
		t.Errorf("created: %v", err)
	}
	// A key of an earlier assignment releases nothing.
	s.asks(t, "s1")
	if _, err := c.CreateInstances(t.Context(), group, []string{"b"}); err != nil {
		t.Fatal(err)
	}
	if err := c.DeleteInstances(t.Context(), []string{made[0].Key()}); err != nil {
		t.Fatal(err)
	}
	if i, err := c.Instance(t.Context(), machines.ProviderID("c", "s1")); err != nil || i.State != cloud.Ready || i.Token != "b" {
		t.Errorf("the second assignment is %+v, %v", i, err)
	}
}
