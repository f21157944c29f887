package gcptest

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	compute "google.golang.org/api/compute/v1"

	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/wire"
)

// handlers serve the methods that the provider uses.
var handlers map[string]func(*Cloud, wire.Call) wire.Reply

func init() {
	handlers = map[string]func(*Cloud, wire.Call) wire.Reply{
		"instanceGroupManagers.list":                 (*Cloud).listGroups,
		"instanceGroupManagers.get":                  (*Cloud).getGroup,
		"instanceGroupManagers.createInstances":      (*Cloud).createInstances,
		"instanceGroupManagers.deleteInstances":      (*Cloud).deleteInstances,
		"instanceGroupManagers.listManagedInstances": (*Cloud).listManaged,
		"instanceGroupManagers.patch":                (*Cloud).patchGroup,
		"instances.list":                             (*Cloud).listInstances,
		"instances.get":                              (*Cloud).getInstance,
		"instanceTemplates.get":                      (*Cloud).getTemplate,
		"instanceTemplates.insert":                   (*Cloud).insertTemplate,
		"images.list":                                (*Cloud).listImages,
		"zoneOperations.list":                        (*Cloud).listOperations,
		"zoneOperations.get":                         (*Cloud).getOperation,
		"zoneOperations.wait":                        (*Cloud).getOperation,
		"globalOperations.get":                       (*Cloud).getOperation,
		"globalOperations.wait":                      (*Cloud).getOperation,
	}
}

// vendor implements wire.Vendor.
type vendor struct{ c *Cloud }

// Request implements wire.Vendor.
func (v vendor) Request(r *http.Request, body []byte) (wire.Call, []string) {
	return v.c.api.request(r, body)
}

// Response implements wire.Vendor.
func (v vendor) Response(call wire.Call, body []byte) []string {
	return v.c.api.response(call.Method, body)
}

// Invalid implements wire.Vendor.
func (v vendor) Invalid(problems []string) wire.Reply {
	return refusal(http.StatusBadRequest, "invalid", strings.Join(problems, "; "))
}

// Throttled implements wire.Vendor.
func (v vendor) Throttled(limit string) wire.Reply {
	return refusal(http.StatusForbidden, "rateLimitExceeded", fmt.Sprintf("Quota exceeded for quota metric 'compute.googleapis.com/%s' and limit 'per minute' of service 'compute.googleapis.com'", limit))
}

// Serve implements wire.Vendor.
func (v vendor) Serve(ctx context.Context, call wire.Call) wire.Reply { return v.c.serve(ctx, call) }

// token is a bearer token.
type token struct {
	Audience string    `json:"audience"`
	Scopes   []string  `json:"scopes"`
	Expires  time.Time `json:"expires"`
}

// audience is that of tokens for Compute Engine, scope that of accounts that may change machines.
const (
	audience = "https://compute.googleapis.com/"
	scope    = "https://www.googleapis.com/auth/compute"
)

// Authorize implements wire.Vendor.
func (v vendor) Authorize(r *http.Request, call wire.Call) *wire.Reply {
	refuse := func(status int, reason, message string) *wire.Reply {
		reply := refusal(status, reason, message)
		reply.Header = http.Header{"Www-Authenticate": {`Bearer realm="https://accounts.google.com/"`}}
		return &reply
	}
	bearer, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok {
		return refuse(http.StatusUnauthorized, "required", "Login Required.")
	}
	v.c.mu.Lock()
	t, ok := v.c.tokens[bearer]
	v.c.mu.Unlock()
	if !ok || t.Audience != audience || time.Now().After(t.Expires) {
		return refuse(http.StatusUnauthorized, "authError", "Invalid Credentials")
	}
	if !slices.ContainsFunc(v.c.api.methods[call.Method].Scopes, func(s string) bool { return slices.Contains(t.Scopes, s) }) {
		return refuse(http.StatusForbidden, "insufficientPermissions", "Request had insufficient authentication scopes.")
	}
	return nil
}

// NewToken returns a token for an audience, empty: Compute Engine.
func (c *Cloud) NewToken(aud string, lifetime time.Duration, scopes ...string) string {
	if aud == "" {
		aud = audience
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	bearer := rand.Text()
	maps.DeleteFunc(c.tokens, func(_ string, t token) bool { return time.Since(t.Expires) > time.Minute })
	c.tokens[bearer], c.changed = token{aud, scopes, time.Now().Add(lifetime)}, true
	c.save()
	return bearer
}

// Client returns a client with a token for Compute Engine. It needs no network.
func (c *Cloud) Client() *http.Client {
	return c.ClientWith(c.NewToken("", 24*time.Hour, scope))
}

// ClientWith returns a client with a token; empty: with none.
func (c *Cloud) ClientWith(token string) *http.Client {
	return &http.Client{Transport: bearer{token, wire.Transport(c)}}
}

type bearer struct {
	token string
	next  http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	if b.token != "" {
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", "Bearer "+b.token)
	}
	return b.next.RoundTrip(r)
}

var uuid = regexp.MustCompile(`^[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$`)

func validUUID(s string) bool {
	return uuid.MatchString(s) && strings.Trim(s, "0-") != ""
}

// permissionOf returns the permission that a method needs, as the reference pages of the methods list it.
func permissionOf(method string) string {
	resource, verb, _ := strings.Cut(strings.TrimPrefix(method, "compute."), ".")
	switch {
	case resource == "instanceGroupManagers" && slices.Contains([]string{"createInstances", "deleteInstances", "patch"}, verb):
		verb = "update"
	case verb == "setNamedPorts":
		verb = "update"
	case verb == "listManagedInstances", verb == "wait":
		verb = "get"
	case verb == "insert":
		verb = "create"
	}
	return "compute." + resource + "." + verb
}

// page answers a list: items that match the filter, a page at a time.
func page[T any](c *Cloud, call wire.Call, all []T, key string) wire.Reply {
	match, err := parseFilter(call.Params["filter"])
	if err != nil {
		return refusal(http.StatusBadRequest, "invalid", "Invalid value for field 'filter': "+err.Error())
	}
	var items []any
	for _, x := range all {
		b, err := json.Marshal(x)
		v, decodeErr := decode(b)
		if err != nil || decodeErr != nil {
			return refusal(http.StatusInternalServerError, "internalError", "marshal an item")
		}
		if match(v) {
			items = append(items, v)
		}
	}
	from := 0
	if t := call.Params["pageToken"]; t != "" {
		if from, err = strconv.Atoi(strings.TrimPrefix(t, "page-")); err != nil || from > len(items) {
			return refusal(http.StatusBadRequest, "invalid", "Invalid value for field 'pageToken': "+t)
		}
	}
	most := c.o.Page
	if n, err := strconv.Atoi(call.Params["maxResults"]); err == nil && n > 0 {
		if n > 500 {
			return refusal(http.StatusBadRequest, "invalid", "Invalid value for field 'maxResults': values must be within the range: [0, 500]")
		}
		most = min(most, n)
	}
	to := min(len(items), from+most)
	out := map[string]any{key: append([]any{}, items[from:to]...)}
	if to < len(items) {
		out["nextPageToken"] = fmt.Sprintf("page-%d", to)
	}
	return c.reply(call, out)
}

func (c *Cloud) listGroups(call wire.Call) wire.Reply {
	var all []*compute.InstanceGroupManager
	for _, g := range c.groups {
		if g.zone == call.Params["zone"] {
			all = append(all, &g.InstanceGroupManager)
		}
	}
	slices.SortFunc(all, func(a, b *compute.InstanceGroupManager) int { return strings.Compare(a.Name, b.Name) })
	return page(c, call, all, "items")
}

func (c *Cloud) find(call wire.Call) *group {
	return c.groups[call.Params["zone"]+"/"+call.Params["instanceGroupManager"]]
}

func (c *Cloud) noGroup(call wire.Call) wire.Reply {
	return c.missing("zones/" + call.Params["zone"] + "/instanceGroupManagers/" + call.Params["instanceGroupManager"])
}

func (c *Cloud) getGroup(call wire.Call) wire.Reply {
	if g := c.find(call); g != nil {
		return c.reply(call, &g.InstanceGroupManager)
	}
	return c.noGroup(call)
}

func (c *Cloud) createInstances(call wire.Call) wire.Reply {
	g := c.find(call)
	if g == nil {
		return c.noGroup(call)
	}
	var body compute.InstanceGroupManagersCreateInstancesRequest
	if err := json.Unmarshal(call.Body, &body); err != nil || len(body.Instances) == 0 {
		return refusal(http.StatusBadRequest, "required", "Required field 'instances' not specified")
	}
	for _, i := range body.Instances {
		if !nameRule.MatchString(i.Name) {
			return refusal(http.StatusBadRequest, "invalid", fmt.Sprintf("Invalid value for field 'instances[].name': '%s'", i.Name))
		}
	}
	taken := func() string {
		for _, i := range body.Instances {
			for _, m := range g.managed {
				if m.name == i.Name {
					return fmt.Sprintf("The instance 'projects/%s/zones/%s/instances/%s' already exists", c.o.Project, g.zone, i.Name)
				}
			}
		}
		return ""
	}
	if m := taken(); m != "" && !c.o.LateConflicts && c.requests[call.Params["requestId"]] == nil {
		return refusal(http.StatusConflict, "alreadyExists", m)
	}
	return c.mutate(call, "compute.instanceGroupManagers.createInstances", c.zoneURL(g.zone)+"/instanceGroupManagers/"+g.Name, func(now time.Time) (string, string) {
		if m := taken(); m != "" {
			return "RESOURCE_ALREADY_EXISTS", m
		}
		for _, i := range body.Instances {
			g.managed = append(g.managed, &managed{name: i.Name, action: "CREATING", template: g.Versions[len(g.Versions)-1].InstanceTemplate, next: now.Add(c.o.Insert)})
			g.TargetSize++
		}
		c.wake(c.o.Insert)
		return "", ""
	})
}

var nameRule = regexp.MustCompile(`^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$`)

func (c *Cloud) deleteInstances(call wire.Call) wire.Reply {
	g := c.find(call)
	if g == nil {
		return c.noGroup(call)
	}
	var body compute.InstanceGroupManagersDeleteInstancesRequest
	if err := json.Unmarshal(call.Body, &body); err != nil || len(body.Instances) == 0 || len(body.Instances) > 1000 {
		return refusal(http.StatusBadRequest, "invalid", "Invalid value for field 'instances': 1 to 1000 are allowed")
	}
	return c.mutate(call, "compute.instanceGroupManagers.deleteInstances", c.zoneURL(g.zone)+"/instanceGroupManagers/"+g.Name, func(now time.Time) (string, string) {
		var leave []*managed
		for _, url := range body.Instances {
			if !strings.Contains(url, "zones/"+g.zone+"/instances/") {
				return "INVALID_FIELD_VALUE", "The resource '" + url + "' is malformed, or in another zone"
			}
			name := url[strings.LastIndexByte(url, '/')+1:]
			n := slices.IndexFunc(g.managed, func(m *managed) bool { return m.name == name && m.action != "DELETING" })
			switch {
			case n >= 0:
				leave = append(leave, g.managed[n])
			case !body.SkipInstancesOnValidationError:
				return "INVALID_USAGE", "Instance " + name + " is not a member of group " + g.Name + ", or is being deleted"
			}
		}
		for _, m := range leave {
			c.discard(g, m, now)
		}
		return "", ""
	})
}

func (c *Cloud) listManaged(call wire.Call) wire.Reply {
	g := c.find(call)
	if g == nil {
		return c.noGroup(call)
	}
	all := make([]*compute.ManagedInstance, 0, len(g.managed))
	for _, m := range g.managed {
		x := &compute.ManagedInstance{
			Name: m.name, Instance: c.zoneURL(g.zone) + "/instances/" + m.name, CurrentAction: m.action, LastAttempt: m.failed,
			Version: &compute.ManagedInstanceVersion{InstanceTemplate: m.template},
		}
		if m.vm != nil {
			x.Id, x.InstanceStatus = m.vm.Id, status[c.state(m.vm)]
		}
		all = append(all, x)
	}
	if g.ListManagedInstancesResults != "PAGINATED" {
		if call.Params["pageToken"] != "" {
			return refusal(http.StatusBadRequest, "invalid", "Invalid value for field 'pageToken': the group is not PAGINATED")
		}
		return c.reply(call, map[string]any{"managedInstances": all})
	}
	return page(c, call, all, "managedInstances")
}

func (c *Cloud) patchGroup(call wire.Call) wire.Reply {
	g := c.find(call)
	if g == nil {
		return c.noGroup(call)
	}
	var body compute.InstanceGroupManager
	if err := json.Unmarshal(call.Body, &body); err != nil {
		return refusal(http.StatusBadRequest, "parseError", err.Error())
	}
	for _, v := range body.Versions {
		if c.templates[v.InstanceTemplate[strings.LastIndexByte(v.InstanceTemplate, '/')+1:]] == nil {
			return c.missing(v.InstanceTemplate)
		}
	}
	return c.mutate(call, "patch", c.zoneURL(g.zone)+"/instanceGroupManagers/"+g.Name, func(time.Time) (string, string) {
		if len(body.Versions) > 0 {
			g.Versions = body.Versions
			g.InstanceTemplate = body.Versions[0].InstanceTemplate
		}
		if body.UpdatePolicy != nil {
			g.UpdatePolicy = body.UpdatePolicy
		}
		return "", ""
	})
}

// status has the words of Compute Engine for the states of machines.
var status = map[cloud.State]string{
	cloud.Creating: "STAGING", cloud.Ready: "RUNNING", cloud.Stopped: "TERMINATED", cloud.Failed: "RUNNING", cloud.Terminating: "STOPPING",
}

// staging is how long a machine is prepared. Compute Engine documents no duration.
const staging = time.Second

// statusOf returns the status of a machine. One that boots is RUNNING already, long before it is a node.
func (c *Cloud) statusOf(vm *compute.Instance) string {
	s := c.state(vm)
	if created, err := time.Parse(time.RFC3339Nano, vm.CreationTimestamp); s == cloud.Creating && err == nil && time.Since(created) >= staging {
		s = cloud.Ready
	}
	return status[s]
}

// instances returns the machines of a zone.
func (c *Cloud) instances(zone string) (all []*compute.Instance) {
	for _, g := range c.groups {
		for _, m := range g.managed {
			if g.zone == zone && m.vm != nil {
				vm := *m.vm
				vm.Status = c.statusOf(m.vm)
				all = append(all, &vm)
			}
		}
	}
	for _, vm := range c.loose {
		if vm.Zone == c.zoneURL(zone) && c.state(vm) != cloud.Terminated {
			vm := *vm
			vm.Status = c.statusOf(&vm)
			all = append(all, &vm)
		}
	}
	slices.SortFunc(all, func(a, b *compute.Instance) int { return strings.Compare(a.Name, b.Name) })
	return all
}

func (c *Cloud) listInstances(call wire.Call) wire.Reply {
	return page(c, call, c.instances(call.Params["zone"]), "items")
}

func (c *Cloud) getInstance(call wire.Call) wire.Reply {
	for _, i := range c.instances(call.Params["zone"]) {
		if i.Name == call.Params["instance"] {
			return c.reply(call, i)
		}
	}
	return c.missing("zones/" + call.Params["zone"] + "/instances/" + call.Params["instance"])
}

func (c *Cloud) getTemplate(call wire.Call) wire.Reply {
	if t := c.templates[call.Params["instanceTemplate"]]; t != nil {
		return c.reply(call, t)
	}
	return c.missing("global/instanceTemplates/" + call.Params["instanceTemplate"])
}

func (c *Cloud) insertTemplate(call wire.Call) wire.Reply {
	var t compute.InstanceTemplate
	if err := json.Unmarshal(call.Body, &t); err != nil {
		return refusal(http.StatusBadRequest, "parseError", err.Error())
	}
	return c.insert(call, "global/instanceTemplates/"+t.Name, func(time.Time) { c.templates[t.Name] = &t })
}

func (c *Cloud) listImages(call wire.Call) wire.Reply { return page(c, call, c.images, "items") }

func (c *Cloud) listOperations(call wire.Call) wire.Reply {
	var all []*compute.Operation
	zone, region := "", ""
	if z := call.Params["zone"]; z != "" {
		zone = c.zoneURL(z)
	}
	if r := call.Params["region"]; r != "" {
		region = c.url("regions/" + r)
	}
	for _, o := range c.ops {
		if o.Zone == zone && o.Region == region {
			all = append(all, &o.Operation)
		}
	}
	switch call.Params["orderBy"] {
	case "":
	case "creationTimestamp desc":
		slices.Reverse(all)
	default:
		return refusal(http.StatusBadRequest, "invalid", "Invalid value for field 'orderBy'")
	}
	return page(c, call, all, "items")
}

func (c *Cloud) getOperation(call wire.Call) wire.Reply {
	for _, o := range c.ops {
		if o.Name == call.Params["operation"] {
			return c.reply(call, &o.Operation)
		}
	}
	return c.missing("operations/" + call.Params["operation"])
}
