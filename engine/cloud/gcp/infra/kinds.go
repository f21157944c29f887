package infra

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	compute "google.golang.org/api/compute/v1"

	"constellation/engine/cloud/gcp"
)

// IDs of kinds.
const (
	network        = "network"
	subnetwork     = "subnetwork"
	firewall       = "firewall"
	address        = "address"
	healthCheck    = "health-check"
	template       = "template"
	group          = "group"
	machine        = "machine"
	backendService = "backend-service"
	targetProxy    = "target-proxy"
	forwardingRule = "forwarding-rule"
)

const pageSize = 500

// scope is where objects of a kind are.
type scope int

const (
	global scope = iota
	regional
	zonal
)

// kind is a kind of objects, with its methods. Methods get the name of a region or zone as place.
type kind struct {
	id, title string
	scope     scope
	list      func(ctx context.Context, i *Infra, place, token string) (items any, next string, err error)
	insert    func(ctx context.Context, i *Infra, place string, object any, request string) (*compute.Operation, error)
	remove    func(ctx context.Context, i *Infra, place, name, request string) (*compute.Operation, error)
	label     func(ctx context.Context, i *Infra, place, name, request string, labels *compute.RegionSetLabelsRequest) (*compute.Operation, error)
}

// kinds are in the order in which objects are made. They are deleted in the opposite order, but machines of no group
// after the groups.
var kinds = []kind{
	{
		id: network, title: "network",
		list: func(ctx context.Context, i *Infra, _, token string) (any, string, error) {
			l, err := i.client.API.Networks.List(i.project).MaxResults(pageSize).PageToken(token).Context(ctx).Do()
			if err != nil {
				return nil, "", err
			}
			return l.Items, l.NextPageToken, nil
		},
		insert: func(ctx context.Context, i *Infra, _ string, object any, request string) (*compute.Operation, error) {
			return i.client.API.Networks.Insert(i.project, object.(*compute.Network)).RequestId(request).Context(ctx).Do()
		},
		remove: func(ctx context.Context, i *Infra, _, name, request string) (*compute.Operation, error) {
			return i.client.API.Networks.Delete(i.project, name).RequestId(request).Context(ctx).Do()
		},
	},
	{
		id: subnetwork, title: "subnetwork", scope: regional,
		list: func(ctx context.Context, i *Infra, place, token string) (any, string, error) {
			l, err := i.client.API.Subnetworks.List(i.project, place).MaxResults(pageSize).PageToken(token).Context(ctx).Do()
			if err != nil {
				return nil, "", err
			}
			return l.Items, l.NextPageToken, nil
		},
		insert: func(ctx context.Context, i *Infra, place string, object any, request string) (*compute.Operation, error) {
			return i.client.API.Subnetworks.Insert(i.project, place, object.(*compute.Subnetwork)).RequestId(request).Context(ctx).Do()
		},
		remove: func(ctx context.Context, i *Infra, place, name, request string) (*compute.Operation, error) {
			return i.client.API.Subnetworks.Delete(i.project, place, name).RequestId(request).Context(ctx).Do()
		},
	},
	{
		id: firewall, title: "firewall rule",
		list: func(ctx context.Context, i *Infra, _, token string) (any, string, error) {
			l, err := i.client.API.Firewalls.List(i.project).MaxResults(pageSize).PageToken(token).Context(ctx).Do()
			if err != nil {
				return nil, "", err
			}
			return l.Items, l.NextPageToken, nil
		},
		insert: func(ctx context.Context, i *Infra, _ string, object any, request string) (*compute.Operation, error) {
			return i.client.API.Firewalls.Insert(i.project, object.(*compute.Firewall)).RequestId(request).Context(ctx).Do()
		},
		remove: func(ctx context.Context, i *Infra, _, name, request string) (*compute.Operation, error) {
			return i.client.API.Firewalls.Delete(i.project, name).RequestId(request).Context(ctx).Do()
		},
	},
	{
		id: address, title: "address", scope: regional,
		list: func(ctx context.Context, i *Infra, place, token string) (any, string, error) {
			l, err := i.client.API.Addresses.List(i.project, place).MaxResults(pageSize).PageToken(token).Context(ctx).Do()
			if err != nil {
				return nil, "", err
			}
			return l.Items, l.NextPageToken, nil
		},
		insert: func(ctx context.Context, i *Infra, place string, object any, request string) (*compute.Operation, error) {
			return i.client.API.Addresses.Insert(i.project, place, object.(*compute.Address)).RequestId(request).Context(ctx).Do()
		},
		remove: func(ctx context.Context, i *Infra, place, name, request string) (*compute.Operation, error) {
			return i.client.API.Addresses.Delete(i.project, place, name).RequestId(request).Context(ctx).Do()
		},
		label: func(ctx context.Context, i *Infra, place, name, request string, labels *compute.RegionSetLabelsRequest) (*compute.Operation, error) {
			return i.client.API.Addresses.SetLabels(i.project, place, name, labels).RequestId(request).Context(ctx).Do()
		},
	},
	{
		id: healthCheck, title: "health check", scope: regional,
		list: func(ctx context.Context, i *Infra, place, token string) (any, string, error) {
			l, err := i.client.API.RegionHealthChecks.List(i.project, place).MaxResults(pageSize).PageToken(token).Context(ctx).Do()
			if err != nil {
				return nil, "", err
			}
			return l.Items, l.NextPageToken, nil
		},
		insert: func(ctx context.Context, i *Infra, place string, object any, request string) (*compute.Operation, error) {
			return i.client.API.RegionHealthChecks.Insert(i.project, place, object.(*compute.HealthCheck)).RequestId(request).Context(ctx).Do()
		},
		remove: func(ctx context.Context, i *Infra, place, name, request string) (*compute.Operation, error) {
			return i.client.API.RegionHealthChecks.Delete(i.project, place, name).RequestId(request).Context(ctx).Do()
		},
	},
	{
		id: template, title: "instance template",
		list: func(ctx context.Context, i *Infra, _, token string) (any, string, error) {
			l, err := i.client.API.InstanceTemplates.List(i.project).MaxResults(pageSize).PageToken(token).Context(ctx).Do()
			if err != nil {
				return nil, "", err
			}
			return l.Items, l.NextPageToken, nil
		},
		insert: func(ctx context.Context, i *Infra, _ string, object any, request string) (*compute.Operation, error) {
			return i.client.API.InstanceTemplates.Insert(i.project, object.(*compute.InstanceTemplate)).RequestId(request).Context(ctx).Do()
		},
		remove: func(ctx context.Context, i *Infra, _, name, request string) (*compute.Operation, error) {
			return i.client.API.InstanceTemplates.Delete(i.project, name).RequestId(request).Context(ctx).Do()
		},
	},
	{
		id: machine, title: "machine", scope: zonal,
		list: func(ctx context.Context, i *Infra, place, token string) (any, string, error) {
			l, err := i.client.API.Instances.List(i.project, place).Filter(fmt.Sprintf("labels.%s = %q", gcp.LabelUID, i.request.UID)).MaxResults(pageSize).PageToken(token).
				Fields("nextPageToken,items(name,zone,labels,metadata)").Context(ctx).Do()
			if err != nil {
				return nil, "", err
			}
			return l.Items, l.NextPageToken, nil
		},
		remove: func(ctx context.Context, i *Infra, place, name, request string) (*compute.Operation, error) {
			return i.client.API.Instances.Delete(i.project, place, name).RequestId(request).Context(ctx).Do()
		},
	},
	{
		id: group, title: "instance group", scope: zonal,
		list: func(ctx context.Context, i *Infra, place, token string) (any, string, error) {
			l, err := i.client.API.InstanceGroupManagers.List(i.project, place).MaxResults(pageSize).PageToken(token).Context(ctx).Do()
			if err != nil {
				return nil, "", err
			}
			return l.Items, l.NextPageToken, nil
		},
		insert: func(ctx context.Context, i *Infra, place string, object any, request string) (*compute.Operation, error) {
			return i.client.API.InstanceGroupManagers.Insert(i.project, place, object.(*compute.InstanceGroupManager)).RequestId(request).Context(ctx).Do()
		},
		remove: func(ctx context.Context, i *Infra, place, name, request string) (*compute.Operation, error) {
			return i.client.API.InstanceGroupManagers.Delete(i.project, place, name).RequestId(request).Context(ctx).Do()
		},
	},
	{
		id: backendService, title: "backend service", scope: regional,
		list: func(ctx context.Context, i *Infra, place, token string) (any, string, error) {
			l, err := i.client.API.RegionBackendServices.List(i.project, place).MaxResults(pageSize).PageToken(token).Context(ctx).Do()
			if err != nil {
				return nil, "", err
			}
			return l.Items, l.NextPageToken, nil
		},
		insert: func(ctx context.Context, i *Infra, place string, object any, request string) (*compute.Operation, error) {
			return i.client.API.RegionBackendServices.Insert(i.project, place, object.(*compute.BackendService)).RequestId(request).Context(ctx).Do()
		},
		remove: func(ctx context.Context, i *Infra, place, name, request string) (*compute.Operation, error) {
			return i.client.API.RegionBackendServices.Delete(i.project, place, name).RequestId(request).Context(ctx).Do()
		},
	},
	{
		id: targetProxy, title: "target TCP proxy", scope: regional,
		list: func(ctx context.Context, i *Infra, place, token string) (any, string, error) {
			l, err := i.client.API.RegionTargetTcpProxies.List(i.project, place).MaxResults(pageSize).PageToken(token).Context(ctx).Do()
			if err != nil {
				return nil, "", err
			}
			return l.Items, l.NextPageToken, nil
		},
		insert: func(ctx context.Context, i *Infra, place string, object any, request string) (*compute.Operation, error) {
			return i.client.API.RegionTargetTcpProxies.Insert(i.project, place, object.(*compute.TargetTcpProxy)).RequestId(request).Context(ctx).Do()
		},
		remove: func(ctx context.Context, i *Infra, place, name, request string) (*compute.Operation, error) {
			return i.client.API.RegionTargetTcpProxies.Delete(i.project, place, name).RequestId(request).Context(ctx).Do()
		},
	},
	{
		id: forwardingRule, title: "forwarding rule", scope: regional,
		list: func(ctx context.Context, i *Infra, place, token string) (any, string, error) {
			l, err := i.client.API.ForwardingRules.List(i.project, place).MaxResults(pageSize).PageToken(token).Context(ctx).Do()
			if err != nil {
				return nil, "", err
			}
			return l.Items, l.NextPageToken, nil
		},
		insert: func(ctx context.Context, i *Infra, place string, object any, request string) (*compute.Operation, error) {
			return i.client.API.ForwardingRules.Insert(i.project, place, object.(*compute.ForwardingRule)).RequestId(request).Context(ctx).Do()
		},
		remove: func(ctx context.Context, i *Infra, place, name, request string) (*compute.Operation, error) {
			return i.client.API.ForwardingRules.Delete(i.project, place, name).RequestId(request).Context(ctx).Do()
		},
		label: func(ctx context.Context, i *Infra, place, name, request string, labels *compute.RegionSetLabelsRequest) (*compute.Operation, error) {
			return i.client.API.ForwardingRules.SetLabels(i.project, place, name, labels).RequestId(request).Context(ctx).Do()
		},
	},
}

func kindOf(id string) kind {
	return kinds[slices.IndexFunc(kinds, func(k kind) bool { return k.id == id })]
}

// places returns where objects of a kind can be.
func (i *Infra) places(k kind) []string {
	switch k.scope {
	case regional:
		return []string{i.region}
	case zonal:
		return i.all
	}
	return []string{""}
}

// found is an object that the cloud listed.
type found struct {
	name, place, description string
	labels                   map[string]string
	fields                   map[string]any
}

// list returns all objects of a kind in a place.
func (i *Infra) list(ctx context.Context, k kind, place string) (out []found, err error) {
	op := "list " + k.title + "s"
	if place != "" {
		op += " of " + place
	}
	err = i.patiently(ctx, nil, func() error {
		out = nil
		return i.client.List(ctx, op, func(token string) (string, error) {
			items, next, err := k.list(ctx, i, place, token)
			if err != nil {
				return "", err
			}
			b, err := json.Marshal(items)
			if err != nil {
				return "", err
			}
			var all []map[string]any
			d := json.NewDecoder(strings.NewReader(string(b)))
			d.UseNumber()
			if err := d.Decode(&all); err != nil {
				return "", err
			}
			for _, fields := range all {
				f := found{place: place, fields: fields, labels: map[string]string{}}
				f.name, _ = fields["name"].(string)
				f.description, _ = fields["description"].(string)
				labels, _ := fields["labels"].(map[string]any)
				if p, ok := fields["properties"].(map[string]any); ok { // those of a template are for its machines
					labels, _ = p["labels"].(map[string]any)
				}
				for name, value := range labels {
					f.labels[name] = fmt.Sprint(value)
				}
				out = append(out, f)
			}
			return next, nil
		})
	})
	return out, err
}
