package gcptest

import (
	"encoding/json"
	"fmt"
	"maps"
	"time"

	compute "google.golang.org/api/compute/v1"
)

// saved is the state of a cloud as JSON.
type saved struct {
	Serial    uint64                               `json:"serial"`
	Templates map[string]*compute.InstanceTemplate `json:"templates"`
	Images    []*compute.Image                     `json:"images"`
	Groups    map[string]savedGroup                `json:"groups"`
	Ops       []*compute.Operation                 `json:"operations"`
	Requests  map[string]string                    `json:"requests"` // names of operations
	Tokens    map[string]token                     `json:"tokens"`
	Objects   map[string]map[string]any            `json:"objects,omitempty"`
	Loose     []*compute.Instance                  `json:"loose,omitempty"`
	Addresses int                                  `json:"addresses,omitempty"`
}

type savedGroup struct {
	Zone    string                        `json:"zone"`
	Group   *compute.InstanceGroupManager `json:"group"`
	Managed []savedManaged                `json:"managed"`
}

type savedManaged struct {
	Name     string                              `json:"name"`
	Template string                              `json:"template"`
	Action   string                              `json:"action"`
	VM       *compute.Instance                   `json:"vm,omitempty"`
	Failed   *compute.ManagedInstanceLastAttempt `json:"failed,omitempty"`
}

// remembered is how long operations that have ended are kept. Compute Engine keeps them for 14 days.
const remembered = 14 * 24 * time.Hour

// save calls Options.Save if something has changed.
func (c *Cloud) save() {
	if !c.changed || c.o.Save == nil {
		return
	}
	c.changed = false
	out := saved{Serial: c.serial, Templates: c.templates, Images: c.images, Groups: map[string]savedGroup{}, Requests: map[string]string{}, Tokens: c.tokens, Objects: c.objects, Loose: c.loose, Addresses: c.addresses}
	for key, g := range c.groups {
		s := savedGroup{Zone: g.zone, Group: &g.InstanceGroupManager}
		for _, m := range g.managed {
			s.Managed = append(s.Managed, savedManaged{m.name, m.template, m.action, m.vm, m.failed})
		}
		out.Groups[key] = s
	}
	for _, o := range c.ops {
		if at, err := time.Parse(time.RFC3339Nano, o.InsertTime); err != nil || time.Since(at) < remembered {
			out.Ops = append(out.Ops, &o.Operation)
		}
	}
	for id, o := range c.requests {
		out.Requests[id] = o.Name
	}
	if b, err := json.Marshal(out); err == nil { // never fails
		c.o.Save(b)
	}
}

// restore continues from a saved state. An operation that had not ended fails, and its client repeats the request.
func (c *Cloud) restore(b []byte) error {
	var in saved
	if err := json.Unmarshal(b, &in); err != nil {
		return fmt.Errorf("read the state of the emulator: %w", err)
	}
	c.serial, c.images, c.loose, c.addresses = in.Serial, in.Images, in.Loose, in.Addresses
	maps.Copy(c.objects, in.Objects)
	for name, t := range in.Templates {
		c.templates[name] = t
	}
	for bearer, t := range in.Tokens { // clients keep them
		c.tokens[bearer] = t
	}
	for key, s := range in.Groups {
		g := &group{InstanceGroupManager: *s.Group, zone: s.Zone}
		for _, m := range s.Managed {
			g.managed = append(g.managed, &managed{name: m.Name, template: m.Template, action: m.Action, vm: m.VM, failed: m.Failed})
		}
		c.groups[key] = g
	}
	byName := map[string]*operation{}
	for _, o := range in.Ops {
		if o.Status != "DONE" {
			o.Status, o.Progress, o.EndTime = "DONE", 100, o.InsertTime
			o.Error = &compute.OperationError{Errors: []*compute.OperationErrorErrors{{Code: "INTERNAL_ERROR", Message: "the emulator was restarted"}}}
		}
		next := &operation{Operation: *o}
		c.ops, byName[o.Name] = append(c.ops, next), next
	}
	for id, name := range in.Requests {
		if o := byName[name]; o != nil {
			c.requests[id] = o
		}
	}
	return nil
}
