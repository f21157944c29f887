package gcp

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	compute "google.golang.org/api/compute/v1"

	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/api"
)

const (
	groupFields    = "nextPageToken,items(name,zone,baseInstanceName,instanceTemplate,versions,targetSize,autoHealingPolicies,listManagedInstancesResults)"
	instanceFields = "id,name,zone,status,statusMessage,creationTimestamp,labels,metadata,networkInterfaces"
	managedFields  = "nextPageToken,managedInstances(id,name,instance,currentAction,lastAttempt,version)"

	// byName is the number of machines whose names one filter has. Many are found by the label of the
	// cluster, a page at a time.
	byName = 60
	// together is how long a read of machines waits for concurrent calls: machines that boot together join together.
	together = 50 * time.Millisecond
	// accepted is how long a machine is reported as terminating after its deletion was accepted, whatever
	// its status is.
	accepted = 2 * time.Minute
	// overlap is how much of the operations that were read already is read again. In that time, fast rollouts have as many
	// as one page has.
	overlap = 30 * time.Second
)

// Groups implements providers.Control.
func (c *Cloud) Groups(ctx context.Context) ([]cloud.Group, error) {
	found, err := eachZone(ctx, c.zones, c.groupsOf)
	if err != nil && !errors.Is(err, cloud.ErrPartial) {
		return nil, err
	}
	var out []cloud.Group
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		clear(c.groups)
	}
	for _, g := range found {
		c.groups[g.ID] = g
		out = append(out, g.Group)
	}
	return out, err
}

// eachZone calls f for all zones, and returns what it returned in their order. If it fails for some of them only, the error
// wraps cloud.ErrPartial.
func eachZone[T any](ctx context.Context, zones []string, f func(ctx context.Context, zone string) ([]T, error)) ([]T, error) {
	found, failed, n := make([][]T, len(zones)), make([]error, len(zones)), 0
	var all sync.WaitGroup
	for n, zone := range zones {
		all.Go(func() { found[n], failed[n] = f(ctx, zone) })
	}
	all.Wait()
	for _, err := range failed {
		if err != nil {
			n++
		}
	}
	err := errors.Join(failed...)
	if n > 0 && n < len(zones) && ctx.Err() == nil && !errors.Is(err, cloud.ErrThrottled) {
		err = fmt.Errorf("%w: %w", cloud.ErrPartial, err)
	}
	return slices.Concat(found...), err
}

// groupsOf lists the groups of the cluster in a zone.
func (c *Cloud) groupsOf(ctx context.Context, zone string) ([]group, error) {
	var listed []*compute.InstanceGroupManager
	if err := c.client.List(ctx, "list groups of zone "+zone, func(token string) (string, error) {
		page, err := c.api.InstanceGroupManagers.List(c.project, zone).MaxResults(pageSize).PageToken(token).Fields(groupFields).Context(ctx).Do()
		if err != nil {
			return "", err
		}
		listed = append(listed, page.Items...)
		return page.NextPageToken, nil
	}); err != nil {
		return nil, err
	}
	var out []group
	for _, m := range listed {
		g, ours, err := c.describeGroup(ctx, zone, m)
		if err != nil {
			return nil, err
		}
		if ours {
			out = append(out, g)
		}
	}
	return out, nil
}

// describeGroup returns a group. ours reports whether it belongs to the cluster.
func (c *Cloud) describeGroup(ctx context.Context, zone string, m *compute.InstanceGroupManager) (g group, ours bool, err error) {
	url := m.InstanceTemplate
	if len(m.Versions) > 0 { // the last one is that of new machines
		url = m.Versions[len(m.Versions)-1].InstanceTemplate
	}
	if url == "" || between(url, "regions") != "" {
		return group{}, false, nil // templates of this package are global
	}
	t, err := c.template(ctx, base(url))
	if errors.Is(err, cloud.ErrNotFound) { // a group of somebody else, whose template was deleted
		return group{}, false, nil
	}
	if err != nil {
		return group{}, false, err
	}
	labels := t.Properties.Labels
	role := cloud.Role(labels[LabelRole])
	if labels[LabelUID] != c.uid || !role.Valid() {
		return group{}, false, nil
	}
	return group{
		Group: cloud.Group{ID: GroupID(c.project, zone, m.Name), Name: GroupName(GroupID(c.project, zone, m.Name)), Role: role, Image: imageOf(t), Count: int(m.TargetSize), AutoscalerName: groupURL(c.project, zone, m.Name)},
		zone:  zone, name: m.Name, base: m.BaseInstanceName, template: t.Name, autoheals: len(m.AutoHealingPolicies) > 0, paginated: m.ListManagedInstancesResults == "PAGINATED",
	}, true, nil
}

// groupURL is what the cluster autoscaler calls a group.
func groupURL(project, zone, name string) string {
	return "https://www.googleapis.com/compute/v1/projects/" + project + "/zones/" + zone + "/instanceGroups/" + name
}

// template returns an instance template. It reads each template once: templates do not change.
func (c *Cloud) template(ctx context.Context, name string) (*compute.InstanceTemplate, error) {
	c.mu.Lock()
	t := c.templates[name]
	c.mu.Unlock()
	if t != nil {
		return t, nil
	}
	if err := c.client.Read(ctx, "read instance template "+name, func() (err error) {
		t, err = c.api.InstanceTemplates.Get(c.project, name).Context(ctx).Do()
		return err
	}); err != nil {
		return nil, err
	}
	if t.Properties == nil {
		t.Properties = &compute.InstanceProperties{}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.templates[name] = t
	return t, nil
}

// group returns a group of the cluster. It lists all groups if it does not know the group.
func (c *Cloud) group(ctx context.Context, id string) (group, error) {
	known := func() (group, bool) {
		c.mu.Lock()
		defer c.mu.Unlock()
		g, ok := c.groups[id]
		return g, ok
	}
	if g, ok := known(); ok {
		return g, nil
	}
	if _, err := c.Groups(ctx); err != nil && !errors.Is(err, cloud.ErrPartial) {
		return group{}, err
	}
	if g, ok := known(); ok {
		return g, nil
	}
	return group{}, &api.Error{
		Op: "find group " + id, Kind: cloud.ErrNotFound,
		Message: fmt.Sprintf("its template needs the labels %s=%s and %s", LabelUID, c.uid, LabelRole), Remedy: "set the labels in a new template of the group",
	}
}

// allGroups returns the groups that are known, in order. It lists them if none is.
func (c *Cloud) allGroups(ctx context.Context) ([]group, error) {
	c.mu.Lock()
	n := len(c.groups)
	c.mu.Unlock()
	if n == 0 {
		if _, err := c.Groups(ctx); err != nil && !errors.Is(err, cloud.ErrPartial) {
			return nil, err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]group, 0, len(c.groups))
	for _, id := range slices.Sorted(maps.Keys(c.groups)) {
		out = append(out, c.groups[id])
	}
	return out, nil
}

// Instances implements providers.Control. Each zone costs a request for every 500 machines, and each
// group that creates machines one more.
func (c *Cloud) Instances(ctx context.Context) ([]cloud.Instance, error) {
	out, err := eachZone(ctx, c.zones, func(ctx context.Context, zone string) ([]cloud.Instance, error) {
		return c.machines(ctx, zone, c.ours())
	})
	if err != nil && !errors.Is(err, cloud.ErrPartial) {
		return nil, err
	}
	has, count := map[string]bool{}, map[string]int{}
	for _, i := range out {
		has[i.ProviderID] = true
		count[i.Group]++
	}
	groups, groupsErr := c.allGroups(ctx)
	if groupsErr != nil {
		return nil, groupsErr
	}
	for _, g := range groups {
		c.mu.Lock()
		waits := len(c.pending[g.ID]) > 0 || count[g.ID] < c.groups[g.ID].Count
		c.mu.Unlock()
		if !waits {
			continue
		}
		managed, listErr := c.managed(ctx, g)
		if listErr != nil {
			return nil, listErr
		}
		for _, m := range managed {
			if has[ProviderID(c.project, g.zone, m.Name)] {
				continue
			}
			i, instErr := c.uncreated(ctx, g, m)
			if instErr != nil {
				return nil, instErr
			}
			out = append(out, i)
		}
	}
	return out, err
}

// ours filters for the machines of the cluster.
func (c *Cloud) ours() string { return "labels." + LabelUID + " = " + strconv.Quote(c.uid) }

// machines lists the machines of the cluster in a zone that match a filter.
func (c *Cloud) machines(ctx context.Context, zone, filter string) ([]cloud.Instance, error) {
	begun := time.Now()
	var listed []*compute.Instance
	if err := c.client.List(ctx, "list machines of zone "+zone, func(token string) (string, error) {
		page, err := c.api.Instances.List(c.project, zone).Filter(filter).MaxResults(pageSize).PageToken(token).
			Fields("nextPageToken,items(" + instanceFields + ")").Context(ctx).Do()
		if err != nil {
			return "", err
		}
		listed = append(listed, page.Items...)
		return page.NextPageToken, nil
	}); err != nil {
		return nil, err
	}
	var out []cloud.Instance
	for _, m := range listed {
		i, ours, err := c.instance(ctx, zone, m)
		if err != nil {
			return nil, err
		}
		if ours {
			out = append(out, c.observe(i, begun))
		}
	}
	return out, nil
}

// instance translates a machine. ours reports whether it belongs to a group of the cluster.
func (c *Cloud) instance(ctx context.Context, zone string, m *compute.Instance) (i cloud.Instance, ours bool, err error) {
	i, template, ours := describe(c.project, c.uid, zone, m)
	if ours {
		i.Image, err = c.imageIn(ctx, template)
	}
	return i, ours && err == nil, err
}

// describe translates a machine, without its image. ours reports whether it belongs to a group of the cluster: the metadata
// of a managed instance have its group and its template.
func describe(project, uid, zone string, m *compute.Instance) (i cloud.Instance, template string, ours bool) {
	meta := map[string]string{}
	if m.Metadata != nil {
		for _, item := range m.Metadata.Items {
			if item.Value != nil {
				meta[item.Key] = *item.Value
			}
		}
	}
	by := meta["created-by"]
	if m.Id == 0 || m.Labels[LabelUID] != uid || !strings.Contains(by, "/instanceGroupManagers/") {
		return cloud.Instance{}, "", false
	}
	i = cloud.Instance{
		Name: m.Name, ProviderID: ProviderID(project, zone, m.Name), Incarnation: strconv.FormatUint(m.Id, 10), Group: GroupID(project, zone, base(by)),
		Role: cloud.Role(m.Labels[LabelRole]), State: state(m.Status), Message: m.StatusMessage, Token: tokenIn(m.Name),
	}
	i.Created, _ = time.Parse(time.RFC3339, m.CreationTimestamp) // zero: the cloud reports none
	if len(m.NetworkInterfaces) > 0 {
		nic := m.NetworkInterfaces[0]
		i.IP, _ = netip.ParseAddr(nic.NetworkIP) // invalid: not assigned yet
		if len(nic.AliasIpRanges) > 0 {
			i.PodCIDR, _ = netip.ParsePrefix(nic.AliasIpRanges[0].IpCidrRange) // invalid: a single address, which is no range of pods
		}
	}
	return i, base(meta["instance-template"]), true
}

// imageIn returns the image of a template; empty: the template was deleted, as those of old images may be.
func (c *Cloud) imageIn(ctx context.Context, template string) (string, error) {
	t, err := c.template(ctx, template)
	if err != nil && !errors.Is(err, cloud.ErrNotFound) {
		return "", err
	}
	return imageOf(t), nil
}

// observe records a machine and returns it. A machine whose deletion was accepted is terminating.
func (c *Cloud) observe(i cloud.Instance, at time.Time) cloud.Instance {
	c.mu.Lock()
	defer c.mu.Unlock()
	if id, err := strconv.ParseUint(i.Incarnation, 10, 64); err == nil {
		c.bear(i.ProviderID, birth{id, i.Created})
		delete(c.pending[i.Group], i.Name)
	}
	if since, ok := c.leaving[i.Key()]; ok && at.Sub(since) < accepted {
		i.State = cloud.Terminating
	}
	c.seen[i.ProviderID] = observation{i, at}
	return i
}

// uncreated describes a managed instance whose machine was not listed.
func (c *Cloud) uncreated(ctx context.Context, g group, m *compute.ManagedInstance) (cloud.Instance, error) {
	name := g.template
	if m.Version != nil && m.Version.InstanceTemplate != "" {
		name = base(m.Version.InstanceTemplate)
	}
	image, err := c.imageIn(ctx, name)
	if err != nil {
		return cloud.Instance{}, err
	}
	i := cloud.Instance{
		Name: m.Name, ProviderID: ProviderID(c.project, g.zone, m.Name), Group: g.ID, Role: g.Role, State: cloud.Creating, Image: image, Token: tokenOf(g.base, m.Name),
	}
	if m.CurrentAction == "DELETING" || m.CurrentAction == "ABANDONING" {
		i.State = cloud.Terminating
	}
	if m.Id != 0 { // it was created after the list of machines
		i.Incarnation = strconv.FormatUint(m.Id, 10)
	}
	if e := api.Attempt(m); e != nil {
		i.Message = e.Error()
	}
	return i, nil
}

// managed lists the managed instances of a group, also those without a machine.
func (c *Cloud) managed(ctx context.Context, g group) ([]*compute.ManagedInstance, error) {
	var out []*compute.ManagedInstance
	err := c.client.List(ctx, "list managed instances of group "+g.name, func(token string) (string, error) {
		call := c.api.InstanceGroupManagers.ListManagedInstances(c.project, g.zone, g.name).Fields(managedFields)
		if g.paginated { // other groups refuse page tokens, and return all
			call = call.MaxResults(pageSize).PageToken(token)
		}
		page, err := call.Context(ctx).Do()
		if err != nil {
			return "", err
		}
		out = append(out, page.ManagedInstances...)
		if !g.paginated {
			return "", nil
		}
		return page.NextPageToken, nil
	})
	return out, err
}

// Instance implements providers.Control.
func (c *Cloud) Instance(ctx context.Context, key string) (cloud.Instance, error) {
	project, zone, name, ok := ParseProviderID(key)
	if !ok || project != c.project || !slices.Contains(c.zones, zone) {
		return cloud.Instance{}, fmt.Errorf("machine %s: %w", key, cloud.ErrNotFound)
	}
	begun := time.Now()
	var m *compute.Instance
	err := c.client.Read(ctx, "read machine "+name, func() (err error) {
		m, err = c.api.Instances.Get(c.project, zone, name).Fields(instanceFields).Context(ctx).Do()
		return err
	})
	if err == nil {
		i, ours, err := c.instance(ctx, zone, m)
		if err != nil {
			return cloud.Instance{}, err
		}
		if ours && cloud.SameMachine(i.Key(), key) {
			return c.observe(i, begun), nil
		}
	} else if !errors.Is(err, cloud.ErrNotFound) {
		return cloud.Instance{}, err
	}
	if l, err := c.uncreatedOf(ctx, []string{key}); err != nil || len(l) > 0 {
		return append(l, cloud.Instance{})[0], err
	}
	return cloud.Instance{}, fmt.Errorf("machine %s: %w", key, cloud.ErrNotFound)
}

// uncreatedOf describes those of the keys that are managed instances and were not listed. Such a key has no
// incarnation. The group may have created the machine meanwhile.
func (c *Cloud) uncreatedOf(ctx context.Context, keys []string) (out []cloud.Instance, err error) {
	want := map[string]bool{}
	for _, key := range keys {
		if _, incarnation := cloud.SplitKey(key); incarnation == "" {
			want[key] = true
		}
	}
	if len(want) == 0 {
		return nil, nil
	}
	groups, err := c.allGroups(ctx)
	if err != nil {
		return nil, err
	}
	for _, g := range groups {
		prefix := ProviderID(c.project, g.zone, g.base+"-")
		if !slices.ContainsFunc(keys, func(k string) bool { return want[k] && strings.HasPrefix(k, prefix) }) {
			continue
		}
		managed, err := c.managed(ctx, g)
		if err != nil {
			return nil, err
		}
		for _, m := range managed {
			if !want[ProviderID(c.project, g.zone, m.Name)] {
				continue
			}
			i, err := c.uncreated(ctx, g, m)
			if err != nil {
				return nil, err
			}
			out = append(out, i)
		}
	}
	return out, nil
}

// Describe returns those of the machines that exist. Answers are at most MaxAge old, or MovingAge. It costs
// one request for each zone and byName machines, and one for each group with machines that are not created yet.
// Concurrent calls share requests.
func (c *Cloud) Describe(ctx context.Context, keys []string) ([]cloud.Instance, error) {
	if out, ok := c.fresh(keys); ok {
		return out, ctx.Err()
	}
	c.asks(keys, 1)
	defer c.asks(keys, -1)
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if out, ok := c.fresh(keys); ok { // in the answer to an earlier call
		return out, ctx.Err()
	}
	select {
	case <-time.After(together):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return c.existing(ctx, keys)
}

// asks counts calls that wait for descriptions of machines.
func (c *Cloud) asks(keys []string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, key := range keys {
		id, _ := cloud.SplitKey(key)
		if c.asked[id] += n; c.asked[id] == 0 {
			delete(c.asked, id)
		}
	}
}

// existing reads the machines of the keys that exist now, also those that are not created yet.
func (c *Cloud) existing(ctx context.Context, keys []string) ([]cloud.Instance, error) {
	found, err := c.current(ctx, keys)
	if err != nil {
		return nil, err
	}
	out, missing := pick(keys, found)
	more, err := c.uncreatedOf(ctx, missing)
	return append(out, more...), err
}

// fresh returns the machines if all of them were observed lately.
func (c *Cloud) fresh(keys []string) ([]cloud.Instance, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]cloud.Instance, 0, len(keys))
	for _, key := range keys {
		id, _ := cloud.SplitKey(key)
		o, ok := c.seen[id]
		if at, leaves := c.leaving[o.Key()]; leaves && time.Since(at) < accepted {
			o.State = cloud.Terminating
		}
		age := MaxAge
		if o.State == cloud.Creating || o.State == cloud.Terminating {
			age = MovingAge
		}
		if !ok || time.Since(o.at) >= age || !cloud.SameMachine(o.Key(), key) {
			return nil, false
		}
		out = append(out, o.Instance)
	}
	return out, true
}

// current reads the machines that have the IDs of the keys now, by ID.
func (c *Cloud) current(ctx context.Context, keys []string) (map[string]cloud.Instance, error) {
	names := map[string][]string{}
	for _, key := range keys {
		if project, zone, name, ok := ParseProviderID(key); ok && project == c.project && slices.Contains(c.zones, zone) && !slices.Contains(names[zone], name) {
			names[zone] = append(names[zone], name)
		}
	}
	found := map[string]cloud.Instance{}
	for _, zone := range slices.Sorted(maps.Keys(names)) {
		names[zone] = c.withMoving(zone, names[zone])
		for _, filter := range c.filters(names[zone]) {
			l, err := c.machines(ctx, zone, filter)
			if err != nil {
				return nil, err
			}
			for _, i := range l {
				found[i.ProviderID] = i
			}
		}
		c.mu.Lock()
		for _, name := range names[zone] {
			if id := ProviderID(c.project, zone, name); found[id].Name == "" {
				delete(c.seen, id)
			}
		}
		c.mu.Unlock()
	}
	return found, nil
}

// withMoving adds machines of a zone for which other calls wait, and those that are being created and were not seen lately, as far
// as one filter has room: callers ask for these next.
func (c *Cloud) withMoving(zone string, names []string) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	add := func(name string) {
		if len(names) < byName && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for id := range c.asked {
		if project, in, name, ok := ParseProviderID(id); ok && project == c.project && in == zone {
			add(name)
		}
	}
	for id, pending := range c.pending {
		if in, _ := parseGroupID(id); in == zone {
			for name := range pending {
				add(name)
			}
		}
	}
	for id, o := range c.seen {
		if o.State == cloud.Creating && time.Since(o.at) >= MovingAge {
			if _, in, name, _ := ParseProviderID(id); in == zone {
				add(name)
			}
		}
	}
	return names
}

// filters returns the filters that list machines of a zone by name, or the one for all machines of the cluster if
// that is fewer requests.
func (c *Cloud) filters(names []string) (out []string) {
	c.mu.Lock()
	pages := len(c.seen)/len(c.zones)/pageSize + 1
	c.mu.Unlock()
	if len(names) > pages*byName {
		return []string{c.ours()}
	}
	for part := range slices.Chunk(names, byName) {
		terms := make([]string, len(part))
		for n, name := range part {
			terms[n] = "(name = " + strconv.Quote(name) + ")"
		}
		out = append(out, strings.Join(terms, " OR "))
	}
	return out
}

// pick returns the machines of the keys, and the keys that have none.
func pick(keys []string, found map[string]cloud.Instance) (out []cloud.Instance, missing []string) {
	for _, key := range keys {
		id, _ := cloud.SplitKey(key)
		if i, ok := found[id]; ok && cloud.SameMachine(i.Key(), key) {
			out = append(out, i)
		} else {
			missing = append(missing, key)
		}
	}
	return out, missing
}
