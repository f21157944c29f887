package gcptest

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	compute "google.golang.org/api/compute/v1"

	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/wire"
)

// kind is a kind of objects that keep their fields, and do little more.
type kind struct {
	// resource is its name in the schema, collection that in URLs, parameter that of a name in requests.
	resource, collection, parameter string
	regional                        bool
	// refers lists the fields with URLs of other objects. These must exist.
	refers []string
	// valid returns why an object cannot be made; empty: it can.
	valid func(c *Cloud, key string, o map[string]any) string
	// fill sets what the server decides.
	fill func(c *Cloud, o map[string]any)
	// labelled objects get labels by a method of their own.
	labelled bool
}

var kinds = []kind{
	{resource: "networks", collection: "networks", parameter: "network"},
	{resource: "subnetworks", collection: "subnetworks", parameter: "subnetwork", regional: true, refers: []string{"network"}, valid: subnetworkProblem},
	{resource: "firewalls", collection: "firewalls", parameter: "firewall", refers: []string{"network"}},
	{resource: "addresses", collection: "addresses", parameter: "address", regional: true, labelled: true, fill: assign},
	{resource: "regionHealthChecks", collection: "healthChecks", parameter: "healthCheck", regional: true},
	{resource: "regionBackendServices", collection: "backendServices", parameter: "backendService", regional: true, refers: []string{"healthChecks", "backends.group"}},
	{resource: "regionTargetTcpProxies", collection: "targetTcpProxies", parameter: "targetTcpProxy", regional: true, refers: []string{"service"}},
	{resource: "forwardingRules", collection: "forwardingRules", parameter: "forwardingRule", regional: true, refers: []string{"backendService", "target", "network"}, labelled: true, valid: ruleProblem, fill: completeRange},
}

func init() {
	for _, k := range kinds {
		handlers[k.resource+".list"] = func(c *Cloud, call wire.Call) wire.Reply { return c.listObjects(k, call) }
		handlers[k.resource+".insert"] = func(c *Cloud, call wire.Call) wire.Reply { return c.insertObject(k, call) }
		handlers[k.resource+".delete"] = func(c *Cloud, call wire.Call) wire.Reply { return c.deleteObject(k, call) }
		if k.labelled {
			handlers[k.resource+".setLabels"] = func(c *Cloud, call wire.Call) wire.Reply { return c.setLabels(k, call) }
		}
	}
	maps.Copy(handlers, map[string]func(*Cloud, wire.Call) wire.Reply{
		"instanceGroupManagers.insert": (*Cloud).insertGroup,
		"instanceGroupManagers.delete": (*Cloud).deleteGroup,
		"instanceGroups.setNamedPorts": (*Cloud).setNamedPorts,
		"instanceTemplates.list":       (*Cloud).listTemplates,
		"instanceTemplates.delete":     (*Cloud).deleteTemplate,
		"instances.delete":             (*Cloud).deleteInstance,
		"machineTypes.get":             (*Cloud).getMachineType,
		"globalOperations.list":        (*Cloud).listOperations,
		"regionOperations.list":        (*Cloud).listOperations,
		"regionOperations.get":         (*Cloud).getOperation,
		"regionOperations.wait":        (*Cloud).getOperation,
	})
}

// key is the path of an object below its project.
func (k kind) key(call wire.Call, name string) string {
	if k.regional {
		return "regions/" + call.Params["region"] + "/" + k.collection + "/" + name
	}
	return "global/" + k.collection + "/" + name
}

func (c *Cloud) url(key string) string {
	return "https://www.googleapis.com/compute/v1/projects/" + c.o.Project + "/" + key
}

// keyOf returns the path of a URL below the project. That of an instance group is that of its manager.
func (c *Cloud) keyOf(url string) string {
	if _, path, ok := strings.Cut(url, "projects/"+c.o.Project+"/"); ok {
		url = path
	}
	return strings.Replace(url, "/instanceGroups/", "/instanceGroupManagers/", 1)
}

// exists reports whether there is an object at a path.
func (c *Cloud) exists(key string) bool {
	parts := strings.Split(key, "/")
	name := parts[len(parts)-1]
	switch {
	case strings.HasPrefix(key, "global/instanceTemplates/"):
		return c.templates[name] != nil
	case strings.Contains(key, "/instanceGroupManagers/"):
		return c.groups[parts[1]+"/"+name] != nil
	}
	return c.objects[key] != nil
}

// texts returns the texts at a path of fields, such as backends.group.
func texts(v any, path string) (out []string) {
	first, rest, nested := strings.Cut(path, ".")
	switch x := v.(type) {
	case string:
		return []string{x}
	case []any:
		for _, item := range x {
			out = append(out, texts(item, path)...)
		}
	case map[string]any:
		if !nested {
			return texts(x[first], "")
		}
		return texts(x[first], rest)
	}
	return out
}

// users returns the paths of the objects that use the one at a path, in order.
func (c *Cloud) users(key string) (out []string) {
	address, _ := c.objects[key]["address"].(string)
	for _, k := range kinds {
		for other, o := range c.objects {
			if !strings.Contains("/"+other, "/"+k.collection+"/") {
				continue
			}
			for _, field := range k.refers {
				if slices.ContainsFunc(texts(o, field), func(url string) bool { return c.keyOf(url) == key }) {
					out = append(out, other)
				}
			}
			if ip, _ := o["IPAddress"].(string); ip != "" && ip == address {
				out = append(out, other)
			}
		}
	}
	for _, g := range c.groups {
		if slices.ContainsFunc(g.Versions, func(v *compute.InstanceGroupManagerVersion) bool { return c.keyOf(v.InstanceTemplate) == key }) {
			out = append(out, "zones/"+g.zone+"/instanceGroupManagers/"+g.Name)
		}
	}
	for _, vm := range c.machines() {
		for _, nic := range vm.NetworkInterfaces {
			if c.keyOf(nic.Network) == key || c.keyOf(nic.Subnetwork) == key {
				out = append(out, c.keyOf(vm.Zone)+"/instances/"+vm.Name)
			}
		}
	}
	if s := c.objects[key]; active(s) { // the proxies of a region have their addresses from it
		for other, o := range c.objects {
			if o["loadBalancingScheme"] == managedScheme && strings.Contains(other, "/forwardingRules/") && c.same(o["network"], s["network"]) && c.same(o["region"], s["region"]) {
				out = append(out, other)
			}
		}
	}
	slices.Sort(out)
	return out
}

func (c *Cloud) usedBy(key string) string {
	if users := c.users(key); len(users) > 0 {
		return fmt.Sprintf("The resource 'projects/%s/%s' is already being used by 'projects/%s/%s'", c.o.Project, key, c.o.Project, users[0])
	}
	return ""
}

func (c *Cloud) listObjects(k kind, call wire.Call) wire.Reply {
	var all []map[string]any
	prefix := k.key(call, "")
	for _, key := range slices.Sorted(maps.Keys(c.objects)) {
		if strings.HasPrefix(key, prefix) {
			o := maps.Clone(c.objects[key])
			if k.resource == "addresses" {
				o["status"] = "RESERVED"
				if users := c.users(key); len(users) > 0 {
					var urls []any
					for _, u := range users {
						urls = append(urls, c.url(u))
					}
					o["status"], o["users"] = "IN_USE", urls
				}
			}
			all = append(all, o)
		}
	}
	return page(c, call, all, "items")
}

func (c *Cloud) insertObject(k kind, call wire.Call) wire.Reply {
	o := map[string]any{}
	if err := json.Unmarshal(call.Body, &o); err != nil {
		return refusal(http.StatusBadRequest, "parseError", err.Error())
	}
	name, _ := o["name"].(string)
	if name == "" {
		return refusal(http.StatusBadRequest, "required", "Required field 'resource.name' not specified")
	}
	if o["labels"] != nil { // "These can only be added or modified by the setLabels method."
		return refusal(http.StatusBadRequest, "invalid", "Invalid value for field 'resource.labels': labels are set by setLabels")
	}
	key := k.key(call, name)
	for _, field := range k.refers {
		for _, url := range texts(o, field) {
			if !c.exists(c.keyOf(url)) {
				return refusal(http.StatusBadRequest, "invalid", fmt.Sprintf("Invalid value for field 'resource.%s': '%s'. The referenced resource cannot be found.", field, url))
			}
		}
	}
	if k.valid != nil && c.requests[call.Params["requestId"]] == nil {
		if problem := k.valid(c, key, o); problem != "" {
			return refusal(http.StatusBadRequest, "invalid", problem)
		}
	}
	return c.insert(call, key, func(now time.Time) {
		c.serial++
		o["id"], o["selfLink"], o["creationTimestamp"] = fmt.Sprint(c.serial), c.url(key), now.Format(time.RFC3339Nano)
		if k.regional {
			o["region"] = c.url("regions/" + call.Params["region"])
		}
		for _, field := range k.refers { // answers have whole URLs
			complete(c, o, field)
		}
		if k.labelled {
			o["labelFingerprint"] = fingerprint(nil)
		}
		if k.fill != nil {
			k.fill(c, o)
		}
		c.objects[key] = o
	})
}

// complete replaces the partial URLs of a field by whole ones.
func complete(c *Cloud, v any, path string) {
	first, rest, _ := strings.Cut(path, ".")
	switch x := v.(type) {
	case []any:
		for n, item := range x {
			if text, ok := item.(string); ok {
				x[n] = c.whole(text)
			}
			complete(c, item, path)
		}
	case map[string]any:
		if text, ok := x[first].(string); ok {
			x[first] = c.whole(text)
		}
		complete(c, x[first], rest)
	}
}

func (c *Cloud) whole(url string) string {
	if strings.HasPrefix(url, "https://") {
		return url
	}
	if _, path, ok := strings.Cut(url, "projects/"+c.o.Project+"/"); ok {
		url = path
	}
	return c.url(url)
}

// insert starts the operation that makes an object. A name that is taken fails the request, or the operation.
func (c *Cloud) insert(call wire.Call, key string, effect func(now time.Time)) wire.Reply {
	taken := fmt.Sprintf("The resource 'projects/%s/%s' already exists", c.o.Project, key)
	if c.exists(key) && !c.o.LateConflicts && c.requests[call.Params["requestId"]] == nil {
		return refusal(http.StatusConflict, "alreadyExists", taken)
	}
	return c.mutate(call, "insert", c.url(key), func(now time.Time) (string, string) {
		if c.exists(key) {
			return "RESOURCE_ALREADY_EXISTS", taken
		}
		effect(now)
		return "", ""
	})
}

func (c *Cloud) deleteObject(k kind, call wire.Call) wire.Reply {
	key := k.key(call, call.Params[k.parameter])
	return c.remove(call, key, func() { delete(c.objects, key) })
}

// remove starts the operation that deletes an object, unless another one uses it.
func (c *Cloud) remove(call wire.Call, key string, effect func()) wire.Reply {
	if c.requests[call.Params["requestId"]] == nil {
		if !c.exists(key) {
			return c.missing(key)
		}
		if used := c.usedBy(key); used != "" {
			return refusal(http.StatusBadRequest, "resourceInUseByAnotherResource", used)
		}
	}
	return c.mutate(call, "delete", c.url(key), func(time.Time) (string, string) {
		if used := c.usedBy(key); used != "" {
			return "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", used
		}
		effect()
		return "", ""
	})
}

func (c *Cloud) setLabels(k kind, call wire.Call) wire.Reply {
	var body compute.RegionSetLabelsRequest
	if err := json.Unmarshal(call.Body, &body); err != nil {
		return refusal(http.StatusBadRequest, "parseError", err.Error())
	}
	key := k.key(call, call.Params["resource"])
	o := c.objects[key]
	if o == nil {
		return c.missing(key)
	}
	if body.LabelFingerprint != o["labelFingerprint"] && c.requests[call.Params["requestId"]] == nil {
		return refusal(http.StatusPreconditionFailed, "conditionNotMet", "Labels fingerprint either invalid or resource labels have changed")
	}
	return c.mutate(call, "setLabels", c.url(key), func(time.Time) (string, string) {
		o := c.objects[key]
		if o == nil {
			return "RESOURCE_NOT_FOUND", "The resource '" + key + "' was not found"
		}
		labels := map[string]any{}
		for name, value := range body.Labels {
			labels[name] = value
		}
		o["labels"], o["labelFingerprint"] = labels, fingerprint(body.Labels)
		return "", ""
	})
}

// fingerprint is the fingerprint of labels.
func fingerprint(labels map[string]string) string {
	b, _ := json.Marshal(labels) // sorted
	sum := sha256.Sum256(b)
	return base64.StdEncoding.EncodeToString(sum[:8])
}

// assign gives an address its value.
func assign(c *Cloud, o map[string]any) {
	c.addresses++
	o["address"] = netip.AddrFrom4([4]byte{203, 0, 113, byte(c.addresses)}).String()
	if o["addressType"] == nil {
		o["addressType"] = "EXTERNAL"
	}
	if o["networkTier"] == nil {
		o["networkTier"] = "PREMIUM"
	}
}

// overlaps refuses a subnetwork whose range another one of the network has.
func overlaps(c *Cloud, key string, o map[string]any) string {
	ranges := func(o map[string]any) (out []netip.Prefix) {
		for _, text := range append(texts(o, "ipCidrRange"), texts(o, "secondaryIpRanges.ipCidrRange")...) {
			if p, err := netip.ParsePrefix(text); err == nil {
				out = append(out, p)
			}
		}
		return out
	}
	network, _ := o["network"].(string)
	for other, x := range c.objects {
		its, _ := x["network"].(string)
		if other == key || !strings.Contains(other, "/subnetworks/") || c.keyOf(its) != c.keyOf(network) {
			continue
		}
		for _, a := range ranges(o) {
			for _, b := range ranges(x) {
				if a.Overlaps(b) {
					return fmt.Sprintf("Invalid IPCidrRange: %s conflicts with existing subnetwork '%s'", a, other)
				}
			}
		}
	}
	return ""
}

func (c *Cloud) insertGroup(call wire.Call) wire.Reply {
	var body compute.InstanceGroupManager
	if err := json.Unmarshal(call.Body, &body); err != nil {
		return refusal(http.StatusBadRequest, "parseError", err.Error())
	}
	zone := call.Params["zone"]
	key := "zones/" + zone + "/instanceGroupManagers/" + body.Name
	if !nameRule.MatchString(body.Name) || body.TargetSize < 0 {
		return refusal(http.StatusBadRequest, "invalid", "Invalid value for field 'resource.name' or 'resource.targetSize'")
	}
	if !c.exists(c.keyOf(body.InstanceTemplate)) {
		return refusal(http.StatusBadRequest, "invalid", fmt.Sprintf("Invalid value for field 'resource.instanceTemplate': '%s'. The referenced resource cannot be found.", body.InstanceTemplate))
	}
	return c.insert(call, key, func(now time.Time) {
		c.serial++
		g := &group{InstanceGroupManager: body, zone: zone}
		g.Id, g.Zone, g.SelfLink, g.CreationTimestamp = c.serial, c.zoneURL(zone), c.url(key), now.Format(time.RFC3339Nano)
		g.InstanceGroup = c.url(strings.Replace(key, "/instanceGroupManagers/", "/instanceGroups/", 1))
		g.InstanceTemplate, g.NamedPorts = c.whole(body.InstanceTemplate), nil // these are output only
		g.Versions = []*compute.InstanceGroupManagerVersion{{InstanceTemplate: g.InstanceTemplate}}
		n := int(g.TargetSize)
		g.TargetSize = 0
		c.groups[zone+"/"+g.Name] = g
		for range n {
			g.managed = append(g.managed, &managed{name: c.randomName(g), action: "CREATING", template: g.InstanceTemplate, next: now.Add(c.o.Insert)})
			g.TargetSize++
		}
		c.wake(c.o.Insert)
	})
}

func (c *Cloud) deleteGroup(call wire.Call) wire.Reply {
	id := call.Params["zone"] + "/" + call.Params["instanceGroupManager"]
	g := c.groups[id]
	begun := false
	c.until = func(now time.Time) bool {
		if g == nil {
			return true
		}
		for _, m := range g.managed {
			if !begun && m.action != "DELETING" {
				c.discard(g, m, now)
			}
		}
		begun = true
		return !slices.ContainsFunc(g.managed, func(m *managed) bool { return m.vm != nil && c.state(m.vm) != cloud.Terminated })
	}
	defer func() { c.until = nil }()
	return c.remove(call, "zones/"+call.Params["zone"]+"/instanceGroupManagers/"+call.Params["instanceGroupManager"], func() { delete(c.groups, id) })
}

func (c *Cloud) listTemplates(call wire.Call) wire.Reply {
	var all []*compute.InstanceTemplate
	for _, name := range slices.Sorted(maps.Keys(c.templates)) {
		all = append(all, c.templates[name])
	}
	return page(c, call, all, "items")
}

func (c *Cloud) deleteTemplate(call wire.Call) wire.Reply {
	name := call.Params["instanceTemplate"]
	return c.remove(call, "global/instanceTemplates/"+name, func() { delete(c.templates, name) })
}

// machines returns all machines, also those of no group.
func (c *Cloud) machines() []*compute.Instance {
	out := slices.Clone(c.loose)
	for _, g := range c.groups {
		for _, m := range g.managed {
			if m.vm != nil {
				out = append(out, m.vm)
			}
		}
	}
	return slices.DeleteFunc(out, func(vm *compute.Instance) bool { return c.state(vm) == cloud.Terminated })
}

func (c *Cloud) deleteInstance(call wire.Call) wire.Reply {
	zone, name := call.Params["zone"], call.Params["instance"]
	key := "zones/" + zone + "/instances/" + name
	if !slices.ContainsFunc(c.machines(), func(vm *compute.Instance) bool { return vm.Name == name && vm.Zone == c.zoneURL(zone) }) {
		return c.missing(key)
	}
	return c.mutate(call, "delete", c.url(key), func(now time.Time) (string, string) {
		c.kill(name, now)
		for _, vm := range c.loose {
			if vm.Name == name {
				c.o.Fleet.Stop(fmt.Sprint(vm.Id))
			}
		}
		return "", ""
	})
}

// Abandon takes a machine out of its group, which it survives.
func (c *Cloud) Abandon(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, g := range c.groups {
		g.managed = slices.DeleteFunc(g.managed, func(m *managed) bool {
			if m.name != name || m.vm == nil {
				return false
			}
			c.loose = append(c.loose, m.vm)
			g.TargetSize--
			return true
		})
	}
	c.changed = true
	c.save()
}

// sizes are the machine types of every zone: processors and MiB.
var sizes = map[string][2]int64{"e2-medium": {2, 4096}, "e2-standard-2": {2, 8192}, "e2-standard-4": {4, 16384}, "n2-standard-4": {4, 16384}}

func (c *Cloud) getMachineType(call wire.Call) wire.Reply {
	zone, name := call.Params["zone"], call.Params["machineType"]
	size, ok := sizes[name]
	if !ok || c.unavailable[zone+"/"+name] {
		return c.missing("zones/" + zone + "/machineTypes/" + name)
	}
	return c.reply(call, &compute.MachineType{Name: name, Zone: zone, GuestCpus: size[0], MemoryMb: size[1]})
}

// Withhold has a zone lack a machine type.
func (c *Cloud) Withhold(zone, machineType string) {
	c.locked(func() { c.unavailable[zone+"/"+machineType] = true })
}

// Put adds an object, as another program would, or replaces it: at regions/REGION/addresses/NAME, for example.
func (c *Cloud) Put(key string, object any) error {
	b, err := json.Marshal(object)
	if err != nil {
		return fmt.Errorf("put %s: %w", key, err)
	}
	o := map[string]any{}
	if err := json.Unmarshal(b, &o); err != nil {
		return fmt.Errorf("put %s: %w", key, err)
	}
	c.locked(func() {
		c.serial++
		o["id"], o["selfLink"], o["name"] = fmt.Sprint(c.serial), c.url(key), key[strings.LastIndexByte(key, '/')+1:]
		for _, k := range kinds {
			if strings.Contains("/"+key, "/"+k.collection+"/") {
				for _, field := range k.refers {
					complete(c, o, field)
				}
			}
		}
		c.objects[key], c.changed = o, true
		c.save()
	})
	return nil
}

// Objects returns the paths of all objects except images: networks, templates, groups, machines and so on.
func (c *Cloud) Objects() (out []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	out = slices.Collect(maps.Keys(c.objects))
	for name := range c.templates {
		out = append(out, "global/instanceTemplates/"+name)
	}
	for _, g := range c.groups {
		out = append(out, "zones/"+g.zone+"/instanceGroupManagers/"+g.Name)
	}
	for _, vm := range c.machines() {
		out = append(out, c.keyOf(vm.Zone)+"/instances/"+vm.Name)
	}
	slices.Sort(out)
	return out
}

// rightsOf returns the permissions that a method needs, as far as Google's pages list them.
func rightsOf(method string) []string {
	method = strings.TrimPrefix(method, "compute.")
	resource, verb, _ := strings.Cut(method, ".")
	out := []string{permissionOf(method)}
	add := func(names ...string) {
		for _, n := range names {
			if !strings.Contains(n, "iam.") {
				n = "compute." + n
			}
			out = append(out, n)
		}
	}
	switch {
	case resource == "subnetworks" && verb != "list", resource == "firewalls" && verb != "list":
		add("networks.updatePolicy")
	case method == "regionBackendServices.insert":
		add("regionHealthChecks.useReadOnly", "instanceGroups.use")
	case method == "regionTargetTcpProxies.insert":
		add("regionBackendServices.use")
	case method == "forwardingRules.insert":
		add("regionTargetTcpProxies.use", "addresses.use", "networks.use")
	case method == "instanceGroupManagers.insert":
		add("instanceTemplates.useReadOnly", "instances.create", "disks.create", "images.useReadOnly", "subnetworks.use", "subnetworks.useExternalIp",
			"instances.setMetadata", "instances.setTags", "instances.setLabels", "instances.setServiceAccount", "iam.serviceAccounts.actAs")
	case method == "instanceGroupManagers.delete":
		add("instances.delete")
	}
	return out
}
