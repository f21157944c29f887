// Package oddcloud simulates a cloud that differs from the sandbox wherever clouds may
// differ. It exists only for tests, and no machine of it runs anything.
//
// It reuses names and provider IDs of deleted machines: a new machine gets the lowest
// free number. IDs of groups are opaque. Its list lags. It has no images, unless Options name some, whose references then
// contain no version. It throttles every third call, and names the time of the next one. Machines can be made whose creation never ends, and
// deletions that never end.
//
// Provider returns its entry in the registry of providers.
//
// Its machines are those of package hollow, so that they join a real control plane.
package oddcloud

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/component"
	"constellation/engine/sandbox/hollow"
)

const scheme = "odd://"

// Options describe the cloud.
type Options struct {
	// Hollow are the options of its machines. Images, Identify and Describe are set by Start.
	Hollow hollow.Options
	// Lag is the age of lists.
	Lag time.Duration
	// Throttle is how long a throttled caller has to wait; zero: calls are not throttled.
	Throttle time.Duration
	// Now is the clock of Lag and Throttle; nil: the real one.
	Now func() time.Time
	// Images are the catalogue; nil: the cloud selects no image. Groups start with the first.
	Images []cloud.Image
	// Components are what the cloud offers for every version of Kubernetes.
	Components component.Signed
}

// Cloud implements providers.Control. It is safe for concurrent use.
type Cloud struct {
	Machines *hollow.Cloud

	lag, throttle time.Duration
	now           func() time.Time
	components    component.Signed
	images        []cloud.Image

	mu     sync.Mutex
	stuck  int             // so many of the next deletions do not end
	going  map[string]bool // keys of machines whose deletion does not end
	serial int             // of the last incarnation
	calls  int
	open   time.Time // no call before it is answered
	lists  []snapshot
}

// snapshot is the list of machines at a time.
type snapshot struct {
	at  time.Time
	all []cloud.Instance
}

// ID returns the provider ID of the machine called name.
func ID(name string) string { return scheme + "demo/" + name }

const groups = scheme + "demo/groups/"

// Group returns the ID of a group, which shows nothing of its name.
func Group(name string) string { return groups + hex.EncodeToString([]byte(name)) }

// groupName is the inverse of Group.
func groupName(id string) string {
	name, _ := hex.DecodeString(strings.TrimPrefix(id, groups)) // the ID of no group has no name
	return string(name)
}

// Start starts the cloud. It serves until ctx ends. wait returns after its end.
func Start(ctx context.Context, o Options) (c *Cloud, wait func(), err error) {
	c = &Cloud{lag: o.Lag, throttle: o.Throttle, now: o.Now, components: o.Components, images: o.Images, going: map[string]bool{}}
	if c.now == nil {
		c.now = time.Now
	}
	o.Hollow.Images, o.Hollow.Identify, o.Hollow.Describe = nil, c.identify, c.translate
	for _, i := range o.Images {
		o.Hollow.Images = append(o.Hollow.Images, i.Version)
	}
	if len(o.Images) == 0 {
		o.Hollow.Images = []string{"none"}
	}
	if c.Machines, wait, err = hollow.Start(ctx, o.Hollow); err != nil {
		return nil, nil, fmt.Errorf("start odd cloud: %w", err)
	}
	return c, wait, nil
}

// identify gives a new machine the lowest free number of its role.
func (c *Cloud) identify(role cloud.Role, exists func(string) bool) (name, providerID, incarnation string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.serial++
	for n := 0; ; n++ {
		if name = fmt.Sprintf("%s-%d", role, n); !exists(name) {
			return name, ID(name), fmt.Sprint(c.serial)
		}
	}
}

// enter starts a call. It fails if the call is throttled.
func (c *Cloud) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	if c.calls++; c.throttle > 0 && c.calls%3 == 0 {
		c.open = now.Add(c.throttle)
	}
	if now.Before(c.open) {
		return fmt.Errorf("call odd cloud: %w", &cloud.ThrottledError{Until: c.open})
	}
	return nil
}

// StickNext makes the next n deletions endless: their machines stay in the state Terminating until
// EndStuck.
func (c *Cloud) StickNext(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stuck = n
}

// EndStuck ends the deletions that do not end.
func (c *Cloud) EndStuck() {
	c.mu.Lock()
	ends := slices.Collect(maps.Keys(c.going))
	clear(c.going)
	c.mu.Unlock()
	for _, key := range ends {
		if i, ok := c.find(key); ok {
			_ = c.Machines.Remove(i.Name) // never fails
		}
	}
}

// odd describes a machine as this cloud does.
func (c *Cloud) odd(i cloud.Instance) cloud.Instance {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.going[i.Key()] {
		i.State = cloud.Terminating
	}
	return c.translate(i)
}

// translate returns a hollow machine with the group and the image of this cloud.
func (c *Cloud) translate(i cloud.Instance) cloud.Instance {
	_, group, _ := sandboxapi.ParseGroupID(i.Group)
	i.Group, i.Image = Group(group), c.image(i.Image)
	return i
}

// image returns the reference of a hollow machine's image; empty without a catalogue.
func (c *Cloud) image(hollow string) string {
	_, version, _ := sandboxapi.ParseImageReference(hollow)
	for _, i := range c.images {
		if i.Version == version {
			return i.Reference
		}
	}
	return ""
}

// Groups implements providers.Control.
func (c *Cloud) Groups(ctx context.Context) ([]cloud.Group, error) {
	if err := c.enter(ctx); err != nil {
		return nil, err
	}
	all := c.Machines.Groups()
	for n := range all {
		all[n].ID, all[n].Image, all[n].AutoscalerName = Group(all[n].Name), c.image(all[n].Image), all[n].Name
	}
	return all, nil
}

// Instances implements providers.Control. The list is as old as the lag.
func (c *Cloud) Instances(ctx context.Context) ([]cloud.Instance, error) {
	if err := c.enter(ctx); err != nil {
		return nil, err
	}
	now := c.now()
	var all []cloud.Instance
	for _, i := range c.Machines.Instances() {
		all = append(all, c.odd(i))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lists = append(c.lists, snapshot{now, all})
	for len(c.lists) > 1 && now.Sub(c.lists[1].at) >= c.lag {
		c.lists = c.lists[1:]
	}
	return c.lists[0].all, nil
}

// Instance implements providers.Control.
func (c *Cloud) Instance(ctx context.Context, key string) (cloud.Instance, error) {
	if err := c.enter(ctx); err != nil {
		return cloud.Instance{}, err
	}
	if i, ok := c.find(key); ok {
		return c.odd(i), nil
	}
	return cloud.Instance{}, fmt.Errorf("machine %s: %w", key, cloud.ErrNotFound)
}

// find returns the machine of a key.
func (c *Cloud) find(key string) (cloud.Instance, bool) {
	id, _ := cloud.SplitKey(key)
	i, ok := c.Machines.Instance(strings.TrimPrefix(id, ID("")))
	return i, ok && cloud.SameMachine(i.Key(), key)
}

// SetGroupImage implements providers.Control.
func (c *Cloud) SetGroupImage(ctx context.Context, groupID, image string) error {
	if err := c.enter(ctx); err != nil {
		return err
	}
	for _, i := range c.images {
		if i.Reference == image {
			return c.Machines.SetImage(groupName(groupID), i.Version)
		}
	}
	return fmt.Errorf("set image %q: %w", image, errors.ErrUnsupported)
}

// CreateInstances implements providers.Control.
func (c *Cloud) CreateInstances(ctx context.Context, groupID string, tokens []string) ([]cloud.Instance, error) {
	if err := c.enter(ctx); err != nil {
		return nil, err
	}
	made, err := c.Machines.Create(ctx, groupName(groupID), tokens)
	if err != nil {
		return nil, err
	}
	for n := range made {
		made[n] = c.odd(made[n])
	}
	return made, nil
}

// stick reports whether the deletion of a machine does not end.
func (c *Cloud) stick(key string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stuck > 0 && !c.going[key] {
		c.stuck--
		c.going[key] = true
	}
	return c.going[key]
}

// DeleteInstances implements providers.Control.
func (c *Cloud) DeleteInstances(ctx context.Context, keys []string) error {
	if err := c.enter(ctx); err != nil {
		return err
	}
	for _, key := range keys {
		if i, ok := c.find(key); ok && !c.stick(i.Key()) {
			if err := c.Machines.Remove(i.Name); err != nil {
				return err
			}
		}
	}
	return nil
}
