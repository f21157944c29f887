// Package gcptest emulates Compute Engine, and the metadata servers of its machines, in front of machines of
// any kind. Tests use it, and sandboxes of package sandbox. No other program contains it.
//
// The table [Semantics] lists the emulated rules with the addresses of Google's documentation. The emulator
// was written from that documentation, and was never compared with Google. Requests pass a gate that is built
// from the document that Google's client is generated from. An emulator of another vendor has a schema and
// semantics of its own, and shares package wire.
package gcptest

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	compute "google.golang.org/api/compute/v1"

	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/wire"
	"constellation/engine/cloud/gcp"
)

// Options describe the cloud. Fleet is required.
type Options struct {
	// Fleet has the machines.
	Fleet wire.Fleet
	// Pending and Running are how long an operation has these states.
	Pending, Running time.Duration
	// Insert is from the scheduling of a machine until it exists. Retry is between two attempts.
	Insert, Retry time.Duration
	// Page is the largest page of a list; zero: 500.
	Page int
	// Project and Zones are those of the cloud; empty: the constants of this package.
	Project string
	Zones   []string
	// Attributes are metadata of all machines, in the templates of AddGroup.
	Attributes map[string]string
	// WorkerAccounts gives workers a service account, as control planes have one.
	WorkerAccounts bool
	// State is what Save was called with last; empty: the cloud is new.
	State []byte
	// Save stores the state of the cloud after each change. It is called with a lock held. Nil: the state ends
	// with the process.
	Save func(state []byte)
	// Faults are those that an earlier process of this cloud had, see SetFaults.
	Faults []string
	// LateConflicts has an operation fail for a name that is taken, and not its request.
	LateConflicts bool
}

// Defaults of Options.Project and Options.Zones, and a UID of clusters.
const (
	Project = "demo-project"
	UID     = "0123456789abcdef"
)

// Zones is the default of Options.Zones.
var Zones = []string{"europe-west3-a", "europe-west3-b", "europe-west3-c"}

// Cloud is an emulated Compute Engine. It is safe for concurrent use.
type Cloud struct {
	*wire.Gate
	o   Options
	api *document

	mu        sync.Mutex
	serial    uint64
	templates map[string]*compute.InstanceTemplate
	images    []*compute.Image
	public    map[string][]*compute.Image // images of other projects, which all may read
	groups    map[string]*group           // by zone/name
	ops       []*operation
	requests  map[string]*operation // by request ID
	stockout  map[string]bool       // zones
	quota     int                   // of machines; zero: none
	revoked   map[string]bool       // permissions
	granted   map[string]bool       // permissions; nil: all
	endless   map[string]int        // of the next operations of a method, so many do not end
	faults    faults
	spec      []string // of faults
	tokens    map[string]token
	// objects are networks, addresses and so on, by path. loose are machines of no group.
	objects     map[string]map[string]any
	loose       []*compute.Instance
	until       func(time.Time) bool // of the next operation
	addresses   int                  // that were assigned
	unavailable map[string]bool      // machine types, as zone/name

	announcements map[uint64]announcement // by number of a machine
	announced     chan struct{}           // closed with the next announcement

	waking  bool // a later call of settle is scheduled for machines that are recreated
	changed bool // since the state was saved last
}

// group is a managed instance group.
type group struct {
	compute.InstanceGroupManager
	zone    string
	managed []*managed
}

// managed is a managed instance.
type managed struct {
	name, template, action string
	vm                     *compute.Instance // nil: there is no machine
	next                   time.Time         // of the next attempt
	failed                 *compute.ManagedInstanceLastAttempt
}

type operation struct {
	compute.Operation
	runs, ends time.Time
	endless    bool
	until      func(now time.Time) bool // it does not end before; nil: only its time counts
	effect     func(now time.Time) (code, message string)
}

// limits are the documented rate limits, for each minute.
var limits = map[string]int{"read_requests": 1500, "list_requests": 1500, "operation_read_requests": 1500, "default": 1500}

// New returns a cloud without groups. fail is called for each request and answer that the API does not have.
func New(fail func(problem string), o Options) (*Cloud, error) {
	d, err := discovery()
	if err != nil {
		return nil, err
	}
	o.Page, o.Project = cmp.Or(o.Page, 500), cmp.Or(o.Project, Project)
	if len(o.Zones) == 0 {
		o.Zones = Zones
	}
	c := &Cloud{
		o: o, api: d, serial: 1 << 40, templates: map[string]*compute.InstanceTemplate{}, groups: map[string]*group{}, requests: map[string]*operation{},
		stockout: map[string]bool{}, revoked: map[string]bool{}, endless: map[string]int{}, tokens: map[string]token{},
		objects: map[string]map[string]any{}, unavailable: map[string]bool{}, announcements: map[uint64]announcement{}, announced: make(chan struct{}),
	}
	c.Gate = wire.NewGate(vendor{c}, limits, fail)
	if len(o.State) > 0 {
		if err := c.restore(o.State); err != nil {
			return nil, err
		}
	}
	return c, c.restoreFaults(o.Faults)
}

// AddImage adds an image with a version, such as v1.1.0. It returns its reference.
func (c *Cloud) AddImage(name, version string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changed = true
	c.images = append(c.images, &compute.Image{Name: name, Status: "READY", Labels: map[string]string{gcp.LabelVersion: strings.ReplaceAll(version, ".", "-")}})
	return "projects/" + c.o.Project + "/global/images/" + name
}

// AddPublicImage adds an image of another project, such as debian-cloud. It returns its reference.
func (c *Cloud) AddPublicImage(project, name, deprecated string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := &compute.Image{Name: name, Status: "READY"}
	if deprecated != "" {
		i.Deprecated = &compute.DeprecationStatus{State: deprecated}
	}
	if c.public == nil {
		c.public = map[string][]*compute.Image{}
	}
	c.public[project] = append(c.public[project], i)
	return "projects/" + project + "/global/images/" + name
}

// AddGroup adds an empty group of a role, whose template has an image. Change, unless it is nil, edits the
// group before it exists.
func (c *Cloud) AddGroup(zone, name string, role cloud.Role, image, uid string, change func(*compute.InstanceGroupManager)) (id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &compute.InstanceTemplate{Name: name + "-template", Properties: &compute.InstanceProperties{
		MachineType: "n2-standard-4", Labels: map[string]string{gcp.LabelUID: uid, gcp.LabelRole: string(role)},
		Disks:             []*compute.AttachedDisk{{Boot: true, AutoDelete: true, InitializeParams: &compute.AttachedDiskInitializeParams{SourceImage: image, DiskSizeGb: 20}}},
		NetworkInterfaces: []*compute.NetworkInterface{{Network: "global/networks/" + uid, AliasIpRanges: []*compute.AliasIpRange{{IpCidrRange: "/24"}}}},
		Metadata:          &compute.Metadata{},
	}}
	for key, value := range map[string]string{gcp.LabelUID: uid, gcp.LabelRole: string(role), gcp.AttributeZones: strings.Join(c.o.Zones, " ")} {
		t.Properties.Metadata.Items = append(t.Properties.Metadata.Items, &compute.MetadataItems{Key: key, Value: &value})
	}
	slices.SortFunc(t.Properties.Metadata.Items, func(a, b *compute.MetadataItems) int { return strings.Compare(a.Key, b.Key) })
	for _, key := range slices.Sorted(maps.Keys(c.o.Attributes)) {
		value := c.o.Attributes[key]
		t.Properties.Metadata.Items = append(t.Properties.Metadata.Items, &compute.MetadataItems{Key: key, Value: &value})
	}
	if role == cloud.ControlPlane || c.o.WorkerAccounts {
		t.Properties.ServiceAccounts = []*compute.ServiceAccount{{Email: string(role) + "@" + c.o.Project + ".iam.gserviceaccount.com", Scopes: []string{scope}}}
	}
	c.templates[t.Name], c.changed = t, true
	url := "https://www.googleapis.com/compute/v1/projects/" + c.o.Project + "/global/instanceTemplates/" + t.Name
	g := &group{zone: zone, InstanceGroupManager: compute.InstanceGroupManager{
		Name: name, Zone: c.zoneURL(zone), BaseInstanceName: name, InstanceTemplate: url, Versions: []*compute.InstanceGroupManagerVersion{{InstanceTemplate: url}},
		UpdatePolicy: &compute.InstanceGroupManagerUpdatePolicy{Type: "OPPORTUNISTIC"},
	}}
	if change != nil {
		change(&g.InstanceGroupManager)
	}
	c.groups[zone+"/"+name] = g
	return gcp.GroupID(c.o.Project, zone, name)
}

// Seed adds machines that exist to a group. It returns their keys.
func (c *Cloud) Seed(groupID string, n int) (keys []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	g := c.byID(groupID)
	for range n {
		c.serial++
		m := &managed{name: fmt.Sprintf("%s-%024x", g.BaseInstanceName, c.serial), template: g.Versions[0].InstanceTemplate}
		g.managed = append(g.managed, m)
		g.TargetSize++
		c.make(g, m, time.Now())
		keys = append(keys, cloud.Key(gcp.ProviderID(c.o.Project, g.zone, m.name), strconv.FormatUint(m.vm.Id, 10)))
	}
	return keys
}

// SetStockout sets whether a zone has no machines left.
func (c *Cloud) SetStockout(zone string, is bool) {
	c.locked(func() { c.stockout[zone] = is })
}

// SetQuota sets how many machines the project may have; zero: any number.
func (c *Cloud) SetQuota(n int) {
	c.locked(func() { c.quota = n })
}

// Revoke takes a permission from all accounts.
func (c *Cloud) Revoke(permission string) { c.locked(func() { c.revoked[permission] = true }) }

// GrantOnly takes all permissions from all accounts but these.
func (c *Cloud) GrantOnly(permissions []string) {
	c.locked(func() {
		c.granted = map[string]bool{}
		for _, p := range permissions {
			c.granted[p] = true
		}
	})
}

// Grant returns a permission that was revoked.
func (c *Cloud) Grant(permission string) { c.locked(func() { delete(c.revoked, permission) }) }

// StickNext has the next operation of a method never end.
func (c *Cloud) StickNext(method string) {
	c.locked(func() { c.endless[method]++ })
}

func (c *Cloud) locked(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
}

// Kill deletes a machine behind the back of its group, which recreates it under its name unless its policy
// is to do nothing.
func (c *Cloud) Kill(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.kill(name, time.Now())
	c.settle(time.Now())
}

func (c *Cloud) kill(name string, now time.Time) {
	for _, g := range c.groups {
		for _, m := range g.managed {
			if m.name == name && m.vm != nil {
				if p := g.InstanceLifecyclePolicy; p == nil || p.DefaultActionOnFailure != "DO_NOTHING" {
					m.action = "RECREATING"
				}
				c.end(g, m, now)
				return
			}
		}
	}
}

// end deletes the machine of a managed instance.
func (c *Cloud) end(g *group, m *managed, now time.Time) {
	c.o.Fleet.Stop(strconv.FormatUint(m.vm.Id, 10))
	c.performed("delete", g, m.name, m.vm.Id, now, "", "")
}

func (c *Cloud) zoneURL(zone string) string {
	return "https://www.googleapis.com/compute/v1/projects/" + c.o.Project + "/zones/" + zone
}

// wake settles the cloud after a time.
func (c *Cloud) wake(after time.Duration) {
	time.AfterFunc(after, func() { c.locked(func() { c.settle(time.Now()) }) })
}

// Resize sets the target size of a group, as a person does in Google's console. New machines have names of four
// random characters. The newest machines of a group that shrinks are deleted.
func (c *Cloud) Resize(groupID string, n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	g := c.byID(groupID)
	if g == nil {
		return fmt.Errorf("resize group %s: %w", groupID, cloud.ErrNotFound)
	}
	now := time.Now()
	stay := slices.DeleteFunc(slices.Clone(g.managed), func(m *managed) bool { return m.action == "DELETING" })
	for ; len(stay) > n; stay = stay[:len(stay)-1] {
		c.discard(g, stay[len(stay)-1], now)
	}
	for k := len(stay); k < n; k++ {
		g.managed = append(g.managed, &managed{name: c.randomName(g), action: "CREATING", template: g.Versions[len(g.Versions)-1].InstanceTemplate, next: now})
		g.TargetSize++
	}
	c.changed = true
	c.settle(now)
	return nil
}

// Groups returns the IDs of the groups.
func (c *Cloud) Groups() (ids []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, g := range c.groups {
		ids = append(ids, gcp.GroupID(c.o.Project, g.zone, g.Name))
	}
	slices.Sort(ids)
	return ids
}

func (c *Cloud) byID(groupID string) *group {
	p := strings.Split(groupID, "/")
	if len(p) != 6 {
		return nil
	}
	return c.groups[p[3]+"/"+p[5]]
}

// randomName returns a name for a machine of a group that grows by its target size.
func (c *Cloud) randomName(g *group) string {
	const letters = "bcdfghjklmnpqrstvwxz0123456789"
	for {
		name := []byte(g.BaseInstanceName + "-")
		for range 4 {
			name = append(name, letters[rand.IntN(len(letters))])
		}
		if !slices.ContainsFunc(g.managed, func(m *managed) bool { return m.name == string(name) }) {
			return string(name)
		}
	}
}

// discard deletes a managed instance and its machine.
func (c *Cloud) discard(g *group, m *managed, now time.Time) {
	m.action = "DELETING"
	g.TargetSize--
	if m.vm != nil {
		c.end(g, m, now)
	}
}

// settle ends operations, creates machines and forgets deleted ones whose time has come.
func (c *Cloud) settle(now time.Time) {
	defer c.save()
	again := c.endOperations(now)
	for _, g := range c.groups {
		for _, m := range g.managed {
			if m.vm != nil && c.state(m.vm) == cloud.Terminated {
				m.vm, c.changed = nil, true
				if m.action == "RECREATING" {
					m.next = now
				}
			}
			if m.vm == nil && (m.action == "CREATING" || m.action == "RECREATING") && !now.Before(m.next) {
				c.attempt(g, m, now)
			}
			if m.vm != nil && m.action != "DELETING" && c.state(m.vm) == cloud.Ready {
				m.action = "NONE"
			}
		}
		again = again || slices.ContainsFunc(g.managed, func(m *managed) bool { return m.vm != nil && m.action == "RECREATING" })
		g.managed = slices.DeleteFunc(g.managed, func(m *managed) bool { return m.vm == nil && (m.action == "DELETING" || m.action == "NONE") })
	}
	c.loose = slices.DeleteFunc(c.loose, func(vm *compute.Instance) bool { return c.state(vm) == cloud.Terminated })
	if again {
		c.repair()
	}
}

// endOperations ends operations whose time has come. again reports whether one waits for something else than its time.
func (c *Cloud) endOperations(now time.Time) (again bool) {
	for _, o := range c.ops {
		if o.Status == "DONE" || o.endless {
			continue
		}
		if !now.Before(o.runs) {
			o.Status = "RUNNING"
		}
		c.changed = true
		if now.Before(o.ends) || o.until != nil && !o.until(now) {
			again = again || !now.Before(o.ends)
			continue
		}
		o.Status, o.Progress, o.EndTime = "DONE", 100, now.Format(time.RFC3339Nano)
		if code, message := o.effect(now); code != "" {
			o.HttpErrorStatusCode, o.HttpErrorMessage = http.StatusConflict, "CONFLICT"
			o.Error = &compute.OperationError{Errors: []*compute.OperationErrorErrors{{Code: code, Message: message}}}
		}
	}
	return again
}

// repair settles the cloud in a second, for what waits for the end of a machine.
func (c *Cloud) repair() {
	if c.waking {
		return
	}
	c.waking = true
	time.AfterFunc(time.Second, func() {
		c.locked(func() {
			c.waking = false
			c.settle(time.Now())
		})
	})
}

func (c *Cloud) state(vm *compute.Instance) cloud.State {
	return c.o.Fleet.State(strconv.FormatUint(vm.Id, 10))
}

// attempt tries to create the machine of a managed instance.
func (c *Cloud) attempt(g *group, m *managed, now time.Time) {
	var code, message string
	existing := 0
	for _, other := range c.groups {
		for _, x := range other.managed {
			if x.vm != nil {
				existing++
			}
		}
	}
	quota := cmp.Or(c.faults.quota, c.quota)
	switch {
	case c.stockout[g.zone], c.faults.stockout:
		code, message = "ZONE_RESOURCE_POOL_EXHAUSTED", fmt.Sprintf("The zone 'projects/%s/zones/%s' does not have enough resources available to fulfill the request.", c.o.Project, g.zone)
	case quota > 0 && existing >= quota:
		code, message = "QUOTA_EXCEEDED", fmt.Sprintf("Quota 'INSTANCES' exceeded. Limit: %d.0 in region europe-west3.", quota)
	default:
		m.failed, c.changed = nil, true
		c.make(g, m, now)
		return
	}
	c.failed(g, m, now, code, message)
}

// failed records that an attempt to create a machine failed.
func (c *Cloud) failed(g *group, m *managed, now time.Time, code, message string) {
	m.next = now.Add(c.o.Retry)
	c.wake(c.o.Retry)
	c.changed = true
	m.failed = &compute.ManagedInstanceLastAttempt{Errors: &compute.ManagedInstanceLastAttemptErrors{Errors: []*compute.ManagedInstanceLastAttemptErrorsErrors{{Code: code, Message: message}}}}
	c.performed("insert", g, m.name, 0, now, code, message)
}

// make creates the machine of a managed instance.
func (c *Cloud) make(g *group, m *managed, now time.Time) {
	c.serial += 7
	t := c.templates[m.template[strings.LastIndexByte(m.template, '/')+1:]]
	by, with := "projects/123456789012/zones/"+g.zone+"/instanceGroupManagers/"+g.Name, "projects/123456789012/global/instanceTemplates/"+t.Name
	place, err := c.o.Fleet.Start(wire.Machine{
		ID: strconv.FormatUint(c.serial, 10), Name: m.name, Group: g.Name, Role: cloud.Role(t.Properties.Labels[gcp.LabelRole]),
		Image: t.Properties.Disks[0].InitializeParams.SourceImage, Token: strings.TrimPrefix(m.name, g.BaseInstanceName+"-"),
	})
	if err != nil { // the computer that runs the machines has no room for one more
		c.failed(g, m, now, "ZONE_RESOURCE_POOL_EXHAUSTED", err.Error())
		return
	}
	c.changed = true
	nic := &compute.NetworkInterface{NetworkIP: place.IP.String()}
	if nics := t.Properties.NetworkInterfaces; len(nics) > 0 {
		nic.Network, nic.Subnetwork = nics[0].Network, nics[0].Subnetwork
	}
	if place.Pods.IsValid() {
		nic.AliasIpRanges = []*compute.AliasIpRange{{IpCidrRange: place.Pods.String()}}
	}
	m.vm = &compute.Instance{
		Id: c.serial, Name: m.name, Zone: c.zoneURL(g.zone), CreationTimestamp: now.Format(time.RFC3339Nano), Labels: t.Properties.Labels, Tags: t.Properties.Tags,
		Metadata:          &compute.Metadata{Items: append(slices.Clone(t.Properties.Metadata.Items), &compute.MetadataItems{Key: "instance-template", Value: &with}, &compute.MetadataItems{Key: "created-by", Value: &by})},
		NetworkInterfaces: []*compute.NetworkInterface{nic}, ServiceAccounts: t.Properties.ServiceAccounts,
	}
	m.action = cmp.Or(m.action, "CREATING")
	c.broadcast()
	c.performed("insert", g, m.name, m.vm.Id, now, "", "")
}

// performed records an operation of a group that inserts or deletes a machine. It has ended.
func (c *Cloud) performed(kind string, g *group, name string, id uint64, now time.Time, code, message string) {
	o := c.operation(kind, g.zone, c.zoneURL(g.zone)+"/instances/"+name, id, now)
	o.Status, o.Progress, o.EndTime = "DONE", 100, o.InsertTime
	if code != "" {
		o.Error = &compute.OperationError{Errors: []*compute.OperationErrorErrors{{Code: code, Message: message}}}
	}
}

// operation records an operation.
func (c *Cloud) operation(kind, zone, target string, id uint64, now time.Time) *operation {
	c.serial++
	o := &operation{runs: now.Add(c.o.Pending), ends: now.Add(c.o.Pending + c.o.Running), effect: func(time.Time) (string, string) { return "", "" }}
	o.Operation = compute.Operation{
		Id: c.serial, Name: fmt.Sprintf("operation-%d", c.serial), OperationType: kind, Status: "PENDING", TargetLink: target, TargetId: id,
		InsertTime: now.Format(time.RFC3339Nano),
	}
	if zone != "" {
		o.Zone = c.zoneURL(zone)
	}
	c.ops, c.changed = append(c.ops, o), true
	if id == 0 {
		c.wake(c.o.Pending + c.o.Running)
	}
	return o
}

// mutate starts the operation of a call, or returns that of an earlier request with its ID.
func (c *Cloud) mutate(call wire.Call, kind, target string, effect func(now time.Time) (code, message string)) wire.Reply {
	request := call.Params["requestId"]
	if o := c.requests[request]; request != "" && o != nil {
		return c.reply(call, o.Operation)
	}
	o := c.operation(kind, call.Params["zone"], target, 0, time.Now())
	if region := call.Params["region"]; region != "" {
		o.Region = c.url("regions/" + region)
	}
	o.effect, o.ClientOperationId = effect, request
	o.until, c.until = c.until, nil
	if c.endless[call.Method] > 0 {
		c.endless[call.Method]--
		o.endless = true
	}
	o.endless = o.endless || c.faults.lost
	if request != "" {
		c.requests[request] = o
	}
	c.settle(time.Now())
	return c.reply(call, o.Operation)
}

// serve answers a call, as wire.Vendor.Serve does.
func (c *Cloud) serve(ctx context.Context, call wire.Call) wire.Reply {
	if strings.HasSuffix(call.Method, "Operations.wait") {
		c.wait(ctx, call.Params["operation"])
	}
	if failed := c.disturb(); failed != nil {
		return *failed
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.settle(time.Now())
	if images, ok := c.public[call.Params["project"]]; ok && call.Method == "compute.images.list" {
		return page(c, call, images, "items")
	}
	if zone, ok := call.Params["zone"]; call.Params["project"] != c.o.Project || ok && !slices.Contains(c.o.Zones, zone) {
		return refusal(http.StatusNotFound, "notFound", fmt.Sprintf("The resource 'projects/%s/zones/%s' was not found", call.Params["project"], zone))
	}
	if region, ok := call.Params["region"]; ok && !slices.ContainsFunc(c.o.Zones, func(zone string) bool { return zone[:max(0, strings.LastIndexByte(zone, '-'))] == region }) {
		return refusal(http.StatusNotFound, "notFound", fmt.Sprintf("The resource 'projects/%s/regions/%s' was not found", call.Params["project"], region))
	}
	for _, right := range rightsOf(call.Method) {
		if c.revoked[right] || c.faults.revoked[right] || c.granted != nil && !c.granted[right] {
			return refusal(http.StatusForbidden, "forbidden", fmt.Sprintf("Required '%s' permission for 'projects/%s'", right, c.o.Project))
		}
	}
	if id, ok := call.Params["requestId"]; ok && !validUUID(id) {
		return refusal(http.StatusBadRequest, "invalid", "Invalid value for field 'requestId': "+id)
	}
	h := handlers[strings.TrimPrefix(call.Method, "compute.")]
	if h == nil {
		return refusal(http.StatusNotImplemented, "notImplemented", "the emulator has no method "+call.Method)
	}
	return h(c, call)
}

// wait waits until an operation has ended, for two minutes at most.
func (c *Cloud) wait(ctx context.Context, name string) {
	for end := time.Now().Add(2 * time.Minute); ; {
		most := time.Until(end)
		c.mu.Lock()
		c.settle(time.Now())
		for _, o := range c.ops {
			switch {
			case o.Name != name || o.endless:
			case o.Status == "DONE":
				most = 0
			case o.until != nil:
				most = min(most, max(100*time.Millisecond, time.Until(o.ends)))
			default:
				most = min(most, time.Until(o.ends))
			}
		}
		c.mu.Unlock()
		if most <= 0 {
			return
		}
		t := time.NewTimer(most)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

// reply marshals an answer and applies the parameter fields.
func (c *Cloud) reply(call wire.Call, v any) wire.Reply {
	b, err := json.Marshal(v)
	if err != nil {
		return refusal(http.StatusInternalServerError, "internalError", err.Error())
	}
	if fields := call.Params["fields"]; fields != "" {
		if b, err = c.api.mask(call.Method, fields, b); err != nil {
			return refusal(http.StatusBadRequest, "invalidParameter", err.Error())
		}
	}
	return wire.Reply{Status: http.StatusOK, Body: b}
}

// refusal is an answer in Google's format of errors.
func refusal(status int, reason, message string) wire.Reply {
	type item struct {
		Message string `json:"message"`
		Domain  string `json:"domain"`
		Reason  string `json:"reason"`
	}
	var out struct {
		Error struct {
			Code    int    `json:"code"`
			Message string `json:"message"`
			Errors  []item `json:"errors"`
		} `json:"error"`
	}
	out.Error.Code, out.Error.Message, out.Error.Errors = status, message, []item{{message, "usageLimits", reason}}
	b, _ := json.Marshal(out) // never fails
	return wire.Reply{Status: status, Body: b}
}

// Refusal is an answer of Compute Engine with a reason, for Gate.Refuse.
func Refusal(status int, reason, message string) wire.Reply { return refusal(status, reason, message) }

func (c *Cloud) missing(what string) wire.Reply {
	return refusal(http.StatusNotFound, "notFound", fmt.Sprintf("The resource 'projects/%s/%s' was not found", c.o.Project, what))
}
