package machines

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"constellation/engine/cloud"
)

// A spare is an enrolled machine that belongs to its group only while it is assigned. Assignments are records in
// [SparesConfigMap], one for each machine, which the operator alone writes, each time under the condition that the object
// has not changed. Each assignment has a number, the incarnation of the machine: its cloud.Key is never used again.
//
// A machine that is released stays in the list. It has no Node, its certificates write nothing (admission policy
// constellation-spares), and it gets no ticket. When it has reset itself, it asks the join service for a ticket like any
// unused machine, which is recorded in [SeenConfigMap]. From then on it can be assigned again.

// SparesConfigMap has the assignments, SeenConfigMap which spares asked for a ticket lately. Both are in the namespace of
// the operator.
const (
	SparesConfigMap = "constellation-spares"
	SeenConfigMap   = "constellation-spares-seen"
)

// States of an assignment.
const (
	Assigned = "assigned"
	Released = "released"
)

const (
	// SeenEvery is how often the join service records that a spare asked.
	SeenEvery = 20 * time.Second
	// seenFor is how long a spare is usable after it asked.
	seenFor = 90 * time.Second
	// resetWithin is how long a released machine counts as one that is leaving. After that it is gone until it asks.
	resetWithin = 2 * time.Minute
	// ReplaceAfter is how long the Node of a machine is not Ready until a spare takes its place, unless the list says
	// otherwise.
	ReplaceAfter = 5 * time.Minute
	// conflicts bounds the repetitions of a write that others overtook.
	conflicts = 5
)

// Assignment is the record of a machine.
type Assignment struct {
	State string `json:"state"`
	// Incarnation is the number of the assignment; 0: the machine was never assigned, because its row is no spare.
	Incarnation int `json:"incarnation"`
	// Token is that of the request by which it was assigned, if there was one.
	Token string `json:"token,omitempty"`
	// Lost is whether it was released because its Node was not Ready.
	Lost bool      `json:"lost,omitempty"`
	Time time.Time `json:"time"`
	// Spent are the tokens of earlier assignments. A token never assigns a second machine.
	Spent []Spent `json:"spent,omitempty"`
}

// Spent is the token of an assignment that has ended.
type Spent struct {
	Token       string    `json:"token"`
	Incarnation int       `json:"incarnation"`
	Time        time.Time `json:"time"`
}

// Seen is the record of a spare that asked for a ticket, after it was released from Incarnation.
type Seen struct {
	Incarnation int       `json:"incarnation"`
	Time        time.Time `json:"time"`
}

// ParseAssignments reads the content of SparesConfigMap.
func ParseAssignments(data map[string]string) (map[string]Assignment, error) {
	out := make(map[string]Assignment, len(data))
	for name, text := range data {
		var a Assignment
		if err := json.Unmarshal([]byte(text), &a); err != nil || a.State != Assigned && a.State != Released {
			return nil, fmt.Errorf("read the assignment of %s in ConfigMap %s: it is damaged", name, SparesConfigMap)
		}
		out[name] = a
	}
	return out, nil
}

// incarnation is the incarnation of an assignment in a cloud.Key.
func (a Assignment) incarnation() string {
	if a.Incarnation == 0 {
		return ""
	}
	return strconv.Itoa(a.Incarnation)
}

// KeyOf returns the cloud.Key of a machine with this record. ok is whether it belongs to its group: a machine without a
// record does, unless its row is a spare.
func KeyOf(providerID string, spare bool, a Assignment, recorded bool) (key string, ok bool) {
	return cloud.Key(providerID, a.incarnation()), recorded && a.State == Assigned || !recorded && !spare
}

// Store reads and writes ConfigMaps in the namespace of the operator.
type Store interface {
	// Load returns the data of a ConfigMap and its version. The error wraps cloud.ErrNotFound if there is none.
	Load(ctx context.Context, name string) (data map[string]string, version string, err error)
	// Save writes the data of a ConfigMap whose version is still the given one. Else the error wraps cloud.ErrConflict.
	Save(ctx context.Context, name string, data map[string]string, version string) error
}

// spares is the state of the machines at one moment.
type spares struct {
	Inventory
	records map[string]Assignment
	now     time.Time
	version string
	// usable has the spares that can be assigned, why the reason for which another cannot.
	usable map[string]bool
	why    map[string]string
}

// Use makes a Control of enrolled machines assign spares through a store. It is called before any other method.
func (c *Control) Use(s Store, now func() time.Time) {
	c.store, c.now, c.heard, c.leaving = s, now, map[string]heard{}, map[string]time.Time{}
}

// heard is when this process first read what the join service recorded about a spare.
type heard struct {
	text string
	at   time.Time
}

// load reads the list, the assignments, and which spares asked.
func (c *Control) load(ctx context.Context) (*spares, error) {
	i, err := c.read(ctx)
	if err != nil {
		return nil, err
	}
	data, version, err := c.store.Load(ctx, SparesConfigMap)
	if errors.Is(err, cloud.ErrNotFound) {
		err = nil // the list was published by an older console, and init makes it
	}
	if err != nil {
		return nil, fmt.Errorf("read the assignments of spares: %w", err)
	}
	seen, _, err := c.store.Load(ctx, SeenConfigMap)
	if err != nil && !errors.Is(err, cloud.ErrNotFound) {
		return nil, fmt.Errorf("read which spares asked: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s, err := newSpares(i, data, seen, c.heardAt)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", cloud.ErrUnavailable, err)
	}
	s.now, s.version = c.now(), version
	return s, nil
}

// heardAt returns when the record of a spare was first read by this process, by its own clock.
func (c *Control) heardAt(name, text string, recorded time.Time) (age time.Duration) {
	now := c.now()
	h := c.heard[name]
	if h.text != text {
		h = heard{text, now}
		if now.Sub(recorded) > 10*time.Minute { // long before this process began
			h.at = recorded
		}
		c.heard[name] = h
	}
	return now.Sub(h.at)
}

// newSpares reads the state of the machines of a list. age returns how old the record of a spare is.
func newSpares(i Inventory, assignments, seen map[string]string, age func(name, text string, recorded time.Time) time.Duration) (*spares, error) {
	s := &spares{Inventory: i, usable: map[string]bool{}, why: map[string]string{}}
	var err error
	if s.records, err = ParseAssignments(assignments); err != nil {
		return nil, err
	}
	for k := range i.Machines {
		if m := &i.Machines[k]; !s.member(m) {
			s.why[m.Name] = judge(s.records[m.Name], m.Name, seen[m.Name], age)
			s.usable[m.Name] = s.why[m.Name] == ""
		}
	}
	return s, nil
}

// SpareState describes a machine that is a spare, or was released.
type SpareState struct {
	Name  string `json:"name"`
	Group string `json:"group"`
	// State is assigned, idle, or released: it has not reset itself yet, or cannot be reached.
	State string `json:"state"`
	// Why is why it cannot be assigned; empty: it can, or is.
	Why   string    `json:"why,omitempty"`
	Since time.Time `json:"since,omitzero"`
}

// Idle is the state of a spare that can be assigned, or was never assigned.
const Idle = "idle"

// Report describes the spares of a list by the content of the two ConfigMaps, and the groups that are smaller than their
// size, by name, each with a sentence that says why.
func Report(i Inventory, assignments, seen map[string]string, now time.Time) (list []SpareState, short map[string]string, err error) {
	s, err := newSpares(i, assignments, seen, func(_, _ string, recorded time.Time) time.Duration { return now.Sub(recorded) - time.Minute }) // of other clocks
	if err != nil {
		return nil, nil, err
	}
	members := map[cloud.Role]int{}
	for k := range s.Machines {
		m := &s.Machines[k]
		a, recorded := s.records[m.Name]
		x := SpareState{Name: m.Name, Group: string(m.Group), State: Idle, Why: s.why[m.Name], Since: a.Time}
		switch {
		case s.member(m):
			members[m.Group]++
			x.State = Assigned
		case a.State == Released && x.Why != "":
			x.State = Released
		}
		if recorded || m.Spare {
			list = append(list, x)
		}
	}
	short = map[string]string{}
	for _, r := range []cloud.Role{cloud.ControlPlane, cloud.Worker} {
		if n, size := members[r], s.size(r); n < size {
			short[string(r)] = fmt.Sprintf("group %s has %d of %d machines: %s", r, n, size, s.shortage(r))
		}
	}
	return list, short, nil
}

// judge returns why a machine that is not assigned cannot be assigned now; empty: it can.
func judge(a Assignment, name, text string, age func(name, text string, recorded time.Time) time.Duration) string {
	var seen Seen
	asked := text != "" && json.Unmarshal([]byte(text), &seen) == nil
	switch {
	case !asked && a.State != Released:
		return "it has never asked to join"
	case !asked || seen.Incarnation != a.Incarnation:
		return "it has not reset itself since it was released"
	}
	if age(name, text, seen.Time) > seenFor {
		return "it has not asked to join since " + seen.Time.UTC().Format("2006-01-02 15:04:05Z")
	}
	return ""
}

// member reports whether a machine belongs to its group.
func (s *spares) member(m *Entry) bool {
	a, recorded := s.records[m.Name]
	_, ok := KeyOf(m.ProviderID, m.Spare, a, recorded)
	return ok
}

// instance describes a machine that is or was assigned. A spare that never was is not listed.
func (c *Control) instanceOf(s *spares, m *Entry) (out cloud.Instance, listed bool) {
	a, recorded := s.records[m.Name]
	if !recorded && m.Spare {
		return out, false
	}
	out = s.instance(m)
	out.Token, out.Incarnation = a.Token, a.incarnation()
	if a.State != Released {
		return out, true
	}
	key := out.Key()
	c.mu.Lock()
	defer c.mu.Unlock()
	since, known := c.leaving[key]
	if !known {
		since = c.now()
		c.leaving[key] = since
	}
	out.State = cloud.Terminating
	if a.Lost || s.usable[m.Name] || c.now().Sub(since) > resetWithin {
		out.State = cloud.Terminated
	}
	return out, true
}

// change writes the assignments that edit makes of those in the cluster, and repeats that if others overtook it.
func (c *Control) change(ctx context.Context, edit func(*spares) (changed bool, err error)) error {
	for try := 0; ; try++ {
		s, err := c.load(ctx)
		if err != nil {
			return err
		}
		changed, failed := edit(s)
		if !changed {
			return failed
		}
		data := make(map[string]string, len(s.records))
		for name, a := range s.records {
			b, err := json.Marshal(a)
			if err != nil {
				return fmt.Errorf("write the assignments of spares: %w", err)
			}
			data[name] = string(b)
		}
		err = c.store.Save(ctx, SparesConfigMap, data, s.version)
		if err == nil {
			return failed
		}
		if !errors.Is(err, cloud.ErrConflict) || try == conflicts {
			return fmt.Errorf("write the assignments of spares: %w", err)
		}
	}
}

// assign assigns a usable spare of a role. It returns nil if there is none.
func (s *spares) assign(r cloud.Role, token string, now time.Time) *Entry {
	var best *Entry
	for k := range s.Machines {
		m := &s.Machines[k]
		if m.Group != r || s.member(m) || !s.usable[m.Name] {
			continue
		}
		// The one that was released longest ago, so that all are used.
		if best == nil || s.records[m.Name].Time.Before(s.records[best.Name].Time) {
			best = m
		}
	}
	if best == nil {
		return nil
	}
	a := s.records[best.Name]
	s.records[best.Name] = Assignment{State: Assigned, Incarnation: a.Incarnation + 1, Token: token, Time: now.UTC().Truncate(time.Second), Spent: a.Spent}
	delete(s.usable, best.Name)
	return best
}

// release ends the assignment of a machine, or its place by its row.
func (s *spares) release(m *Entry, lost bool, now time.Time) {
	a := s.records[m.Name]
	now = now.UTC().Truncate(time.Second)
	a.Spent = slices.DeleteFunc(slices.Clone(a.Spent), func(x Spent) bool { return now.Sub(x.Time) > 2*cloud.TokenMemory })
	if a.Token != "" {
		a.Spent = append(a.Spent, Spent{a.Token, a.Incarnation, now})
	}
	a.State, a.Token, a.Lost, a.Time = Released, "", lost, now
	s.records[m.Name] = a
}

// madeBy returns the machine that a token assigned; false: it has assigned none.
func (c *Control) madeBy(s *spares, token string) (cloud.Instance, bool) {
	for k := range s.Machines {
		m := &s.Machines[k]
		a := s.records[m.Name]
		if a.Token == token {
			i, _ := c.instanceOf(s, m)
			return i, true
		}
		for _, x := range a.Spent {
			if x.Token == token {
				i := s.instance(m)
				i.Token, i.Incarnation, i.State = token, Assignment{Incarnation: x.Incarnation}.incarnation(), cloud.Terminated
				return i, true
			}
		}
	}
	return cloud.Instance{}, false
}

// create assigns a spare for each token.
func (c *Control) create(ctx context.Context, groupID string, tokens []string) (out []cloud.Instance, err error) {
	role := cloud.Role(GroupName(groupID))
	if !role.Valid() {
		return nil, fmt.Errorf("create a machine of %s: %w", groupID, cloud.ErrNotFound)
	}
	err = c.change(ctx, func(s *spares) (changed bool, err error) {
		out = make([]cloud.Instance, 0, len(tokens))
		for _, token := range tokens {
			if i, ok := c.madeBy(s, token); ok {
				out = append(out, i)
				continue
			}
			m := s.assign(role, token, s.now)
			if m == nil {
				return changed, fmt.Errorf("create a machine of group %s: %w: %s", role, cloud.ErrCapacity, s.shortage(role))
			}
			i, _ := c.instanceOf(s, m)
			out, changed = append(out, i), true
		}
		return changed, nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// delete releases machines.
func (c *Control) delete(ctx context.Context, keys []string) error {
	return c.change(ctx, func(s *spares) (changed bool, _ error) {
		for _, key := range keys {
			for k := range s.Machines {
				m := &s.Machines[k]
				is := cloud.Key(m.ProviderID, s.records[m.Name].incarnation())
				// A key without an incarnation is that of a machine that was never released, or names the present one.
				if cloud.SameMachine(is, key) && s.member(m) {
					s.release(m, false, s.now)
					changed = true
				}
			}
		}
		return changed, nil
	})
}

// find returns the machine of a key.
func (c *Control) find(s *spares, key string) (cloud.Instance, error) {
	id, incarnation := cloud.SplitKey(key)
	for k := range s.Machines {
		m := &s.Machines[k]
		if !strings.EqualFold(m.ProviderID, id) {
			continue
		}
		i, listed := c.instanceOf(s, m)
		switch {
		case listed && (incarnation == "" || incarnation == i.Incarnation):
			return i, nil
		case listed:
			return cloud.Instance{}, fmt.Errorf("machine %s: %w: the machine has another assignment", key, cloud.ErrNotFound)
		}
		return cloud.Instance{}, fmt.Errorf("machine %s: %w: it is a spare that was never assigned", key, cloud.ErrUnavailable)
	}
	return cloud.Instance{}, fmt.Errorf("machine %s: %w: the list does not have it; `constellation machine add` and `constellation init` add it", key, cloud.ErrUnavailable)
}

// shortage describes why there is no spare for a role.
func (s *spares) shortage(r cloud.Role) string {
	var reasons []string
	for k := range s.Machines {
		if m := &s.Machines[k]; m.Group == r && !s.member(m) && s.why[m.Name] != "" {
			reasons = append(reasons, m.Name+": "+s.why[m.Name])
		}
	}
	slices.Sort(reasons)
	if len(reasons) == 0 {
		return "there is no spare left; add one with `constellation machine add --spare` and `constellation init`"
	}
	return "no spare is usable (" + strings.Join(reasons, "; ") + ")"
}

// NodeState is the Node of a machine as the operator observes it.
type NodeState struct {
	// Machine is the cloud.Key of its machine, as the operator has recorded it.
	Machine string
	Ready   bool
	// Since is how long it has not been Ready.
	Since time.Duration
	// Kept is whether it must not be replaced now: somebody cordoned it, or the operator works on it.
	Kept bool
	// Leaves is whether it is bound to leave, or will be.
	Leaves bool
}

// Balance is what the sizes of groups need.
type Balance struct {
	// Leave are names of Nodes that must leave: their group is larger than its size.
	Leave []string
	// Assigned and Lost are the machines that were assigned, and given up because their Nodes were not Ready.
	Assigned, Lost []string
	// Waits are sentences about groups that cannot get their size, by the name of the group.
	Waits map[string]string
}

// Balance assigns spares to groups that are smaller than their size, gives up machines whose Nodes have not been Ready for
// [ReplaceAfter] if a spare can take their place, and names the Nodes of groups that are larger. nodes are those of the
// cluster by name.
func (c *Control) Balance(ctx context.Context, nodes map[string]NodeState) (b Balance, err error) {
	if c.store == nil {
		return b, nil
	}
	err = c.change(ctx, func(s *spares) (changed bool, _ error) {
		b = Balance{Waits: map[string]string{}}
		for _, r := range []cloud.Role{cloud.ControlPlane, cloud.Worker} {
			changed = s.balance(r, nodes, &b) || changed
		}
		return changed, nil
	})
	if err != nil {
		return Balance{}, err
	}
	return b, nil
}

// replaceAfter is how long a Node is not Ready until its machine is given up.
func (s *spares) replaceAfter() time.Duration {
	if d, err := time.ParseDuration(s.ReplaceAfter); err == nil {
		return d
	}
	return ReplaceAfter
}

// nodeOf returns the Node of a machine's present assignment.
func (s *spares) nodeOf(m *Entry, nodes map[string]NodeState) (NodeState, bool) {
	n, ok := nodes[m.Name]
	return n, ok && cloud.SameMachine(n.Machine, cloud.Key(m.ProviderID, s.records[m.Name].incarnation()))
}

// balance is Balance of one group.
func (s *spares) balance(r cloud.Role, nodes map[string]NodeState, b *Balance) (changed bool) {
	now := s.now
	var members, dead []*Entry
	joining, leaving := 0, 0
	for k := range s.Machines {
		m := &s.Machines[k]
		if m.Group != r || !s.member(m) {
			continue
		}
		members = append(members, m)
		switch n, ok := s.nodeOf(m, nodes); {
		case !ok:
			joining++
		case n.Leaves:
			leaving++
		case !n.Ready && !n.Kept && n.Since > s.replaceAfter():
			dead = append(dead, m)
		}
	}
	size := s.size(r)
	switch {
	case len(members) < size:
		for range size - len(members) {
			if r == cloud.ControlPlane && joining+leaving > 0 {
				break // one joins at a time
			}
			m := s.assign(r, "", now)
			if m == nil {
				b.Waits[string(r)] = fmt.Sprintf("group %s has %d of %d machines: %s", r, len(members), size, s.shortage(r))
				break
			}
			b.Assigned = append(b.Assigned, m.Name)
			changed, joining = true, joining+1
		}
	case len(members)-leaving > size:
		if m := s.surplus(members, dead, nodes); m != nil {
			if _, ok := s.nodeOf(m, nodes); ok && !slices.Contains(dead, m) {
				b.Leave = append(b.Leave, m.Name)
				break
			}
			s.release(m, slices.Contains(dead, m), now)
			changed = true
		}
	case len(dead) > 0 && len(members) == size:
		return s.replace(r, dead[0], nodes, b)
	}
	return changed
}

// replace gives up a machine whose Node is not Ready, if a spare can take its place.
func (s *spares) replace(r cloud.Role, m *Entry, nodes map[string]NodeState, b *Balance) bool {
	n := nodes[m.Name]
	text := fmt.Sprintf("%s has not been Ready for %s", m.Name, n.Since.Round(time.Minute))
	down := 0
	for _, x := range nodes {
		if !x.Ready {
			down++
		}
	}
	if down > 1 && 2*down > len(nodes) {
		b.Waits[string(r)] = fmt.Sprintf("%s, and %d of %d Nodes are not Ready: no machine is given up while most are", text, down, len(nodes))
		return false
	}
	before := maps.Clone(s.records)
	spare := s.assign(r, "", s.now)
	if spare == nil {
		b.Waits[string(r)] = fmt.Sprintf("%s, and cannot be replaced: %s", text, s.shortage(r))
		return false
	}
	if r == cloud.ControlPlane { // its member leaves etcd first
		s.records = before
	} else {
		b.Assigned = append(b.Assigned, spare.Name)
	}
	s.release(m, true, s.now)
	b.Lost = append(b.Lost, m.Name)
	return true
}

// surplus returns the machine that leaves a group that is too large: one that is dead, then one without a Node, then a
// spare, the last assigned first, then the last row. Nodes that somebody works on stay.
func (s *spares) surplus(members, dead []*Entry, nodes map[string]NodeState) *Entry {
	rank := func(m *Entry) int {
		n, ok := s.nodeOf(m, nodes)
		switch {
		case slices.Contains(dead, m):
			return 0
		case !ok:
			return 1
		case n.Leaves || n.Kept:
			return 9
		case m.Spare:
			return 2
		}
		return 3
	}
	var best *Entry
	for _, m := range slices.Backward(members) {
		if rank(m) == 9 {
			continue
		}
		if best == nil || cmp.Or(cmp.Compare(rank(m), rank(best)), s.records[best.Name].Time.Compare(s.records[m.Name].Time)) < 0 {
			best = m
		}
	}
	return best
}
