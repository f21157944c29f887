package gcp

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	compute "google.golang.org/api/compute/v1"

	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/api"
)

// CreateInstances implements providers.Control. It is three requests for each group: the operations of
// the zone, the creation, and its operation.
func (c *Cloud) CreateInstances(ctx context.Context, groupID string, tokens []string) ([]cloud.Instance, error) {
	if len(tokens) == 0 {
		return nil, ctx.Err()
	}
	g, err := c.group(ctx, groupID)
	if err != nil {
		return nil, err
	}
	op := "create machines of group " + g.name
	if err := c.creatable(g); err != nil {
		return nil, err
	}
	for _, token := range tokens {
		if !hexToken.MatchString(token) {
			return nil, fmt.Errorf("%s: token %q is not valid: want 24 hexadecimal digits, or these, a hyphen and 16 more", op, token)
		}
	}
	if err := c.look(ctx, g.zone); err != nil {
		return nil, err
	}
	var fresh, used []string // names, and IDs
	for _, token := range tokens {
		name := g.base + "-" + token
		id := ProviderID(c.project, g.zone, name)
		c.mu.Lock()
		_, made := c.made[id]
		c.mu.Unlock()
		switch {
		case made:
			used = append(used, id)
		case !slices.Contains(fresh, name):
			fresh = append(fresh, name)
		}
	}
	if len(fresh) > 0 {
		if err := c.create(ctx, op, g, fresh); err != nil {
			return nil, err
		}
	}
	found := map[string]cloud.Instance{}
	if len(used) > 0 {
		now, err := c.existing(ctx, used)
		if err != nil {
			return nil, err
		}
		for _, i := range now {
			found[i.ProviderID] = i
		}
	}
	out := make([]cloud.Instance, len(tokens))
	for n, token := range tokens {
		out[n] = c.answer(g, token, slices.Contains(fresh, g.base+"-"+token), found)
	}
	return out, nil
}

// answer describes the machine of a token after its creation.
func (c *Cloud) answer(g group, token string, fresh bool, found map[string]cloud.Instance) cloud.Instance {
	name := g.base + "-" + token
	i := cloud.Instance{Name: name, ProviderID: ProviderID(c.project, g.zone, name), Group: g.ID, Role: g.Role, Image: g.Image, State: cloud.Creating, Token: token}
	if fresh {
		return i
	}
	c.mu.Lock()
	first := c.made[i.ProviderID].number
	c.mu.Unlock()
	if first != 0 {
		i.Incarnation = strconv.FormatUint(first, 10)
	}
	if now, ok := found[i.ProviderID]; ok && cloud.SameMachine(now.Key(), i.Key()) {
		return now
	}
	i.State = cloud.Terminated
	return i
}

// creatable returns why machines of a group cannot be created; nil: they can.
func (c *Cloud) creatable(g group) error {
	op := "create machines of group " + g.name
	if most := maxName - tokenSize - 1; len(g.base) > most {
		return &api.Error{
			Op: op, Message: fmt.Sprintf("base instance name %s has %d characters, and names of machines have room for %d", g.base, len(g.base), most),
			Remedy: "make a group with a shorter base instance name",
		}
	}
	if g.autoheals {
		return &api.Error{
			Op: op, Kind: cloud.ErrConflict, Message: "the group has autohealing, which recreates machines that the operator drains",
			Remedy: fmt.Sprintf("run `gcloud compute instance-groups managed update %s --zone=%s --clear-autohealing`", g.name, g.zone),
		}
	}
	return nil
}

// create creates machines by their names. Some of them may exist already.
func (c *Cloud) create(ctx context.Context, op string, g group, names []string) error {
	err := c.request(ctx, op, g, names)
	if !errors.Is(err, cloud.ErrConflict) {
		return err
	}
	managed, listErr := c.managed(ctx, g)
	if listErr != nil {
		return listErr
	}
	rest := slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		return slices.ContainsFunc(managed, func(m *compute.ManagedInstance) bool { return m.Name == name })
	})
	c.accept(g, slices.DeleteFunc(slices.Clone(names), func(name string) bool { return slices.Contains(rest, name) }))
	switch len(rest) {
	case 0:
		return nil
	case len(names):
		return err
	}
	return c.request(ctx, op, g, rest)
}

// request sends a creation and waits until it is scheduled. The ID of the request follows from the names:
// a repeated request is the same one, unless it has failed or its operation is lost. Two requests of the same names make no
// second machine, because the names are taken.
func (c *Cloud) request(ctx context.Context, op string, g group, names []string) error {
	names = slices.Sorted(slices.Values(names))
	key := g.ID + " " + strings.Join(names, " ")
	c.mu.Lock()
	id := requestID(key, c.failures[key])
	c.mu.Unlock()
	body := &compute.InstanceGroupManagersCreateInstancesRequest{}
	for _, name := range names {
		body.Instances = append(body.Instances, &compute.PerInstanceConfig{Name: name})
	}
	err := c.client.Change(ctx, c.project, op, lost, func() (*compute.Operation, error) {
		return c.api.InstanceGroupManagers.CreateInstances(c.project, g.zone, g.name, body).RequestId(id).Context(ctx).Do()
	})
	if err == nil {
		c.accept(g, names)
		return nil
	}
	if e, ok := errors.AsType[*api.Error](err); ok && (e.Ended() || e.Lost()) {
		c.mu.Lock()
		c.failures[key]++
		c.mu.Unlock()
	}
	return err
}

// accept records that a group creates machines.
func (c *Cloud) accept(g group, names []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pending[g.ID] == nil {
		c.pending[g.ID] = map[string]bool{}
	}
	for _, name := range names {
		c.pending[g.ID][name] = true
		if id := ProviderID(c.project, g.zone, name); c.made[id].number == 0 {
			c.made[id] = birth{}
		}
	}
	now := c.groups[g.ID]
	now.Count += len(names)
	c.groups[g.ID] = now
}

// requestID returns a UUID of version 5.
func requestID(key string, attempt int) string {
	return uuid.NewSHA1(uuid.NameSpaceURL, fmt.Appendf(nil, "constellation %d %s", attempt, key)).String()
}

// look reads the operations of a zone that inserted or deleted machines since the last call, and records
// these machines. The newest come first, so it mostly reads one page. Operations that are older than
// cloud.TokenMemory and an hour are not read.
func (c *Cloud) look(ctx context.Context, zone string) error {
	c.mu.Lock()
	newest := c.looked[zone]
	c.mu.Unlock()
	since := time.Now().Add(-cloud.TokenMemory - time.Hour)
	if from := newest.Add(-overlap); from.After(since) {
		since = from
	}
	var runs time.Time // of the oldest insert operation that has not ended: it is read again
	if err := c.client.List(ctx, "list operations of zone "+zone, func(token string) (string, error) {
		page, err := c.api.ZoneOperations.List(c.project, zone).Filter(`(operationType = "insert") OR (operationType = "delete")`).OrderBy("creationTimestamp desc").
			MaxResults(pageSize).PageToken(token).Fields("nextPageToken,items(name,operationType,insertTime,targetLink,targetId,status,error)").Context(ctx).Do()
		if err != nil {
			return "", err
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, o := range page.Items {
			at, err := time.Parse(time.RFC3339, o.InsertTime)
			if err != nil {
				return "", fmt.Errorf("read the time of operation %s: %w", o.Name, err)
			}
			if at.Before(since) {
				return "", nil
			}
			if at.After(newest) {
				newest = at
			}
			inserts := o.OperationType == "insert"
			if inserts && o.Status != "DONE" {
				runs = at
				continue
			}
			// An insert operation that failed has a number, too, but no machine ever had that.
			if name := between(o.TargetLink, "instances"); name != "" && o.TargetId != 0 && (!inserts || o.Error == nil) {
				c.bear(ProviderID(c.project, zone, name), birth{o.TargetId, at})
			}
		}
		return page.NextPageToken, nil
	}); err != nil {
		return err
	}
	if !runs.IsZero() && runs.Before(newest) {
		newest = runs
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if newest.After(c.looked[zone]) {
		c.looked[zone] = newest
	}
	return nil
}

// DeleteInstances implements providers.Control. It is three requests for each group: the machines of the
// keys, the deletion, and its operation. If the group recreates a machine under its name between the first
// two, the new machine is deleted in its place.
func (c *Cloud) DeleteInstances(ctx context.Context, keys []string) error {
	if len(keys) == 0 {
		return ctx.Err()
	}
	found, err := c.existing(ctx, keys)
	if err != nil {
		return err
	}
	byGroup := map[string][]cloud.Instance{}
	for _, i := range found {
		byGroup[i.Group] = append(byGroup[i.Group], i)
	}
	for _, id := range slices.Sorted(maps.Keys(byGroup)) {
		for leave := range slices.Chunk(byGroup[id], 1000) { // the most of one request
			if err := c.remove(ctx, id, leave); err != nil {
				return err
			}
		}
	}
	return nil
}

// remove deletes machines of a group.
func (c *Cloud) remove(ctx context.Context, groupID string, leave []cloud.Instance) error {
	zone, name := parseGroupID(groupID)
	body := &compute.InstanceGroupManagersDeleteInstancesRequest{SkipInstancesOnValidationError: true}
	for _, i := range leave {
		body.Instances = append(body.Instances, "zones/"+zone+"/instances/"+i.Name)
	}
	if err := c.client.Change(ctx, c.project, "delete machines of group "+name, lost, func() (*compute.Operation, error) {
		return c.api.InstanceGroupManagers.DeleteInstances(c.project, zone, name, body).Context(ctx).Do()
	}); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	at := time.Now()
	maps.DeleteFunc(c.leaving, func(_ string, since time.Time) bool { return at.Sub(since) >= accepted })
	for _, i := range leave {
		if i.Incarnation != "" {
			c.leaving[i.Key()] = at
		}
		delete(c.pending[groupID], i.Name)
	}
	if g, ok := c.groups[groupID]; ok {
		g.Count = max(0, g.Count-len(leave))
		c.groups[groupID] = g
	}
	return nil
}

// SetGroupImage implements providers.Control. It makes a template like that of the group with the image,
// whose name follows from its properties, and has the group use it for new machines only.
func (c *Cloud) SetGroupImage(ctx context.Context, groupID, image string) error {
	g, err := c.group(ctx, groupID)
	if err != nil {
		return err
	}
	op := "set the image of group " + g.name
	before, err := c.template(ctx, g.template)
	if err != nil {
		return err
	}
	if imageOf(before) == path(image) {
		return ctx.Err()
	}
	next, err := withImage(before, image)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	err = c.client.Change(ctx, c.project, op, lost, func() (*compute.Operation, error) {
		return c.api.InstanceTemplates.Insert(c.project, next).Context(ctx).Do()
	})
	if err != nil && !errors.Is(err, cloud.ErrConflict) { // its name is taken: it exists
		return err
	}
	taken := err
	if next, err = c.template(ctx, next.Name); errors.Is(err, cloud.ErrNotFound) && taken != nil {
		return taken // an earlier request still makes it
	}
	if err != nil {
		return err
	}
	if imageOf(next) != path(image) {
		return &api.Error{Op: op, Kind: cloud.ErrConflict, Message: fmt.Sprintf("template %s has image %s", next.Name, imageOf(next)), Remedy: "delete the template"}
	}
	url := "projects/" + c.project + "/global/instanceTemplates/" + next.Name
	if err := c.client.Change(ctx, c.project, op, lost, func() (*compute.Operation, error) {
		return c.api.InstanceGroupManagers.Patch(c.project, g.zone, g.name, &compute.InstanceGroupManager{
			Versions:     []*compute.InstanceGroupManagerVersion{{InstanceTemplate: url}},
			UpdatePolicy: &compute.InstanceGroupManagerUpdatePolicy{Type: "OPPORTUNISTIC"},
		}).Context(ctx).Do()
	}); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if now, ok := c.groups[groupID]; ok {
		now.template, now.Image = next.Name, path(image)
		c.groups[groupID] = now
	}
	return nil
}

// withImage returns a template like t with another image of the boot disk.
func withImage(t *compute.InstanceTemplate, image string) (*compute.InstanceTemplate, error) {
	b, err := json.Marshal(t.Properties)
	if err != nil {
		return nil, fmt.Errorf("copy template %s: %w", t.Name, err)
	}
	properties := &compute.InstanceProperties{}
	if err := json.Unmarshal(b, properties); err != nil {
		return nil, fmt.Errorf("copy template %s: %w", t.Name, err)
	}
	changed := false
	for _, d := range properties.Disks {
		if d.Boot && d.InitializeParams != nil {
			d.InitializeParams.SourceImage, changed = image, true
		}
	}
	if !changed {
		return nil, fmt.Errorf("template %s has no boot disk with an image", t.Name)
	}
	if b, err = json.Marshal(properties); err != nil {
		return nil, fmt.Errorf("copy template %s: %w", t.Name, err)
	}
	sum := sha256.Sum256(b)
	stem := t.Name
	if n := strings.LastIndex(stem, "-i"); n > 0 && len(stem)-n == 14 { // of an image before
		stem = stem[:n]
	}
	stem = strings.TrimRight(stem[:min(len(stem), maxName-14)], "-")
	return &compute.InstanceTemplate{Name: stem + "-i" + hex.EncodeToString(sum[:6]), Description: t.Description, Properties: properties}, nil
}
