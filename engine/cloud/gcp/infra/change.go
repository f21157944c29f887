package infra

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
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
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/api"
	"constellation/engine/infra"
	"constellation/engine/plan"
	"constellation/engine/words"
)

const (
	// longest is how long an operation is waited for: a group is gone when its machines are.
	longest = 30 * time.Minute
	// inUse is how long a deletion is repeated while the cloud still sees a user of the object.
	inUse = 2 * time.Minute
)

func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

// patiently repeats a request while the cloud throttles or does not answer.
func (i *Infra) patiently(ctx context.Context, wait func(string), send func() error) error {
	begun, pause := time.Now(), time.Second
	for {
		err := send()
		e, known := errors.AsType[*api.Error](err)
		until := cloud.ThrottledUntil(err)
		switch {
		case err == nil || ctx.Err() != nil:
			return err
		case known && e.Ended():
			return err
		case !until.IsZero():
			pause = max(time.Second, time.Until(until))
		case errors.Is(err, cloud.ErrUnavailable) && !errors.Is(err, cloud.ErrCapacity) && !errors.Is(err, cloud.ErrQuota):
			pause = min(2*pause, 30*time.Second)
		default:
			return err
		}
		if time.Since(begun)+pause > infra.Patience(ctx) {
			return err
		}
		if wait != nil {
			wait(fmt.Sprintf("%v; next try in %v", explain(err), pause.Round(time.Second)))
		}
		if err := infra.Pause(ctx, pause); err != nil {
			return err
		}
	}
}

// change sends a request that changes something, and waits until its operation has ended. A repeated request has the
// same ID, so it takes effect once.
func (i *Infra) change(ctx context.Context, op string, wait func(string), send func(request string) (*compute.Operation, error)) error {
	request := uuid.NewString()
	var o *compute.Operation
	if err := i.patiently(ctx, wait, func() (err error) {
		o, err = i.client.Begin(ctx, op, func() (*compute.Operation, error) { return send(request) })
		return err
	}); err != nil {
		return err
	}
	return i.patiently(ctx, wait, func() error { return i.client.Finish(ctx, i.project, op, o, longest) })
}

// object returns the object of an ID.
func (i *Infra) object(id string) (*object, error) {
	for _, o := range i.objects() {
		if o.ID == id {
			return &o, nil
		}
	}
	return nil, fmt.Errorf("find object %s: %w", id, cloud.ErrNotFound)
}

// Observe implements infra.Cloud.
func (i *Infra) Observe(ctx context.Context, id string) (infra.Object, error) {
	if err := i.resolve(ctx, id); err != nil {
		return infra.Object{}, explain(err)
	}
	o, err := i.object(id)
	if err != nil {
		return infra.Object{}, err
	}
	listed, err := i.list(ctx, o.kind, o.place)
	if err != nil {
		return infra.Object{}, explain(err)
	}
	o.judge(i, listed)
	return o.Object, nil
}

// resolve reads what an object contains of others: templates and the forwarding rule have the address.
func (i *Infra) resolve(ctx context.Context, id string) error {
	if !strings.HasPrefix(id, template) && !strings.HasPrefix(id, forwardingRule) {
		return nil
	}
	i.mu.Lock()
	known, image := i.host, i.image
	i.mu.Unlock()
	if known == "" {
		if _, err := i.balancer(ctx); err != nil && !errors.Is(err, cloud.ErrNotFound) {
			return err
		}
	}
	if image == "" {
		l, err := i.images(ctx)
		if err != nil {
			return err
		}
		if len(l) == 1 {
			i.mu.Lock()
			i.image = l[0]
			i.mu.Unlock()
		}
	}
	return nil
}

// balancer returns the address of the load balancer.
func (i *Infra) balancer(ctx context.Context) (string, error) {
	listed, err := i.list(ctx, kindOf(address), i.region)
	if err != nil {
		return "", explain(err)
	}
	if host := i.takeHost(listed); host != "" {
		return host, nil
	}
	return "", fmt.Errorf("find the address of the load balancer: %w", cloud.ErrNotFound)
}

// takeHost takes over the address of the load balancer from a list of addresses; empty: there is none yet.
func (i *Infra) takeHost(listed []found) string {
	own := i.request.Config.Text(Address)
	for _, f := range listed {
		if ip, _ := f.fields["address"].(string); ip != "" && (f.name == own || own == "" && f.name == i.prefix() && i.bears(f)) {
			i.mu.Lock()
			defer i.mu.Unlock()
			i.host = ip
			return ip
		}
	}
	return ""
}

// Make implements infra.Cloud.
func (i *Infra) Make(ctx context.Context, id string, wait func(string)) error {
	for try := 0; ; try++ {
		err := i.makeOnce(ctx, id, wait)
		// An earlier request still makes it, or the cloud does not show a part of it yet.
		if !errors.Is(err, cloud.ErrConflict) || try == 5 {
			return explain(err)
		}
		wait(fmt.Sprintf("%v", explain(err)))
		if err := infra.Pause(ctx, 2*time.Second); err != nil {
			return err
		}
	}
}

func (i *Infra) makeOnce(ctx context.Context, id string, wait func(string)) error {
	now, err := i.Observe(ctx, id)
	if err != nil {
		return err
	}
	o, err := i.object(id)
	if err != nil {
		return err
	}
	op := "create " + now.String()
	switch {
	case now.There():
		return nil
	case now.State == infra.Taken:
		return &plan.Error{Op: op, Err: errors.New("an object without the UID of this cluster has the name"), Remedy: "delete or rename it, if it is yours", Exit: plan.ExitBlocked}
	case o.want == nil:
		return &plan.Error{Op: op, Err: errors.New("the configuration names it, and it does not exist"), Remedy: "correct its name in the configuration", Exit: plan.ExitBlocked}
	}
	i.mu.Lock()
	host, image := i.host, i.image
	i.mu.Unlock()
	switch {
	case (o.kind.id == template || o.kind.id == forwardingRule) && host == "":
		return &plan.Error{Op: op, Err: errors.New("the address of the load balancer is not known"), Remedy: "run `constellation infra create`"}
	case o.kind.id == template && image == "":
		return &plan.Error{Op: op, Err: fmt.Errorf("project %s has no single image %s", i.project, i.request.Image), Remedy: "run `constellation infra plan`", Exit: plan.ExitBlocked}
	}
	if len(now.Differences) == 0 {
		if err := i.change(ctx, op, wait, func(request string) (*compute.Operation, error) {
			return o.kind.insert(ctx, i, o.place, o.want(), request)
		}); err != nil {
			return err
		}
	}
	if o.kind.label == nil && !o.named {
		return nil
	}
	listed, err := i.list(ctx, o.kind, o.place)
	if err != nil {
		return err
	}
	n := slices.IndexFunc(listed, func(f found) bool { return f.name == o.Name && i.bears(f) })
	if n < 0 {
		return &plan.Error{Op: op, Err: fmt.Errorf("%w: the cloud does not list it", cloud.ErrConflict), Remedy: "run the same command again"}
	}
	if o.named {
		return i.namePorts(ctx, o, listed[n], wait)
	}
	labels := maps.Clone(listed[n].labels)
	labels[gcp.LabelUID] = i.request.UID
	print, _ := listed[n].fields["labelFingerprint"].(string)
	return i.change(ctx, "label "+now.String(), wait, func(request string) (*compute.Operation, error) {
		return o.kind.label(ctx, i, o.place, o.Name, request, &compute.RegionSetLabelsRequest{LabelFingerprint: print, Labels: labels})
	})
}

// namePorts has a group name the ports of the load balancer. Other named ports that it has stay. A group cannot be made
// with them: the description of the API calls the field of a managed group output only.
func (i *Infra) namePorts(ctx context.Context, o *object, f found, wait func(string)) error {
	body := &compute.InstanceGroupsSetNamedPortsRequest{}
	for _, p := range ports {
		body.NamedPorts = append(body.NamedPorts, &compute.NamedPort{Name: p.name, Port: int64(p.number)})
	}
	listed, _ := f.fields["namedPorts"].([]any)
	for _, x := range listed {
		have, _ := x.(map[string]any)
		name := fmt.Sprint(have["name"])
		number, err := strconv.ParseInt(fmt.Sprint(have["port"]), 10, 32)
		if err == nil && !slices.ContainsFunc(ports, func(p port) bool { return p.name == name }) {
			body.NamedPorts = append(body.NamedPorts, &compute.NamedPort{Name: name, Port: number})
		}
	}
	return i.change(ctx, "name the ports of "+o.String(), wait, func(request string) (*compute.Operation, error) {
		return i.client.API.InstanceGroups.SetNamedPorts(i.project, o.place, o.Name, body).RequestId(request).Context(ctx).Do()
	})
}

// purposes describe objects that are deleted.
var purposes = map[string]string{machine: "it is in no group"}

// Remains implements infra.Cloud.
func (i *Infra) Remains(ctx context.Context) (out []infra.Object, err error) {
	if i.request.UID == "" {
		return nil, nil
	}
	machines := map[string][]found{} // by path of their group
	var loose []found
	for _, place := range i.places(kindOf(machine)) {
		l, err := i.list(ctx, kindOf(machine), place)
		if err != nil {
			return nil, explain(err)
		}
		for _, m := range l {
			if i.bears(m) {
				by := place + "/" + last(attribute(m, "created-by"))
				machines[by] = append(machines[by], m)
			}
		}
	}
	for _, k := range slices.Backward(kinds) {
		if k.id == machine {
			loose = append(loose, slices.Concat(slices.Collect(maps.Values(machines))...)...)
			slices.SortFunc(loose, func(a, b found) int { return strings.Compare(a.place+a.name, b.place+b.name) })
			for _, m := range loose {
				out = append(out, i.remaining(k, m, ""))
			}
			continue
		}
		for _, place := range i.places(k) {
			l, err := i.list(ctx, k, place)
			if err != nil {
				return nil, explain(err)
			}
			for _, f := range l {
				if !i.bears(f) {
					continue
				}
				about := ""
				if k.id == group {
					members, others, err := i.members(ctx, f, machines[place+"/"+f.name])
					if err != nil {
						return nil, explain(err)
					}
					delete(machines, place+"/"+f.name)
					loose = append(loose, others...)
					about = "its " + words.Count(members, "machine") + " " + words.Verb(members, "are") + " deleted with it"
				}
				out = append(out, i.remaining(k, f, about))
			}
		}
	}
	return out, nil
}

// remaining describes an object that is deleted.
func (i *Infra) remaining(k kind, f found, purpose string) infra.Object {
	if purpose == "" {
		purpose = purposes[k.id]
	}
	id := k.id
	if rest := strings.Trim(strings.TrimPrefix(f.name, i.prefix()), "-"); rest != "" {
		id += "-" + rest
	}
	return infra.Object{ID: id, Kind: k.title, Name: f.name, Place: f.place, Purpose: purpose, State: infra.Exists}
}

// attribute returns an entry of the metadata of a machine.
func attribute(m found, name string) string {
	meta, _ := m.fields["metadata"].(map[string]any)
	items, _ := meta["items"].([]any)
	for _, item := range items {
		if f, ok := item.(map[string]any); ok && f["key"] == name {
			s, _ := f["value"].(string)
			return s
		}
	}
	return ""
}

// members returns how many machines a group has, and those that were taken out of it.
func (i *Infra) members(ctx context.Context, g found, machines []found) (n int, others []found, err error) {
	if len(machines) == 0 {
		return 0, nil, nil
	}
	in := map[string]bool{}
	paginated := g.fields["listManagedInstancesResults"] == "PAGINATED"
	if err = i.patiently(ctx, nil, func() error {
		return i.client.List(ctx, "list managed instances of group "+g.name, func(token string) (string, error) {
			call := i.client.API.InstanceGroupManagers.ListManagedInstances(i.project, g.place, g.name).Fields("nextPageToken,managedInstances(name,instance)")
			if paginated { // other groups refuse page tokens, and return all
				call = call.MaxResults(pageSize).PageToken(token)
			}
			page, err := call.Context(ctx).Do()
			if err != nil {
				return "", err
			}
			for _, m := range page.ManagedInstances {
				in[m.Name], in[last(m.Instance)] = true, true
			}
			if !paginated {
				return "", nil
			}
			return page.NextPageToken, nil
		})
	}); errors.Is(err, cloud.ErrNotFound) { // it was deleted meanwhile
		err = nil
	}
	for _, m := range machines {
		if in[m.name] {
			n++
		} else {
			others = append(others, m)
		}
	}
	return n, others, err
}

// Settle implements infra.Cloud. Names of objects contain the UID, and so do their URLs.
func (i *Infra) Settle(ctx context.Context, wait func(string)) error {
	service, unfinished := i.client.API, []*compute.Operation(nil)
	collect := func(op string, send func(token string) (*compute.OperationList, error)) error {
		return i.patiently(ctx, wait, func() error {
			return i.client.List(ctx, op, func(token string) (string, error) {
				l, err := send(token)
				if err != nil {
					return "", err
				}
				for _, o := range l.Items {
					if o.Status != "DONE" && strings.Contains(o.TargetLink, "/"+i.prefix()) {
						unfinished = append(unfinished, o)
					}
				}
				return l.NextPageToken, nil
			})
		})
	}
	const filter = `status != "DONE"`
	if err := collect("list operations", func(token string) (*compute.OperationList, error) {
		return service.GlobalOperations.List(i.project).Filter(filter).MaxResults(pageSize).PageToken(token).Context(ctx).Do()
	}); err != nil {
		return explain(err)
	}
	if err := collect("list operations of "+i.region, func(token string) (*compute.OperationList, error) {
		return service.RegionOperations.List(i.project, i.region).Filter(filter).MaxResults(pageSize).PageToken(token).Context(ctx).Do()
	}); err != nil {
		return explain(err)
	}
	for _, zone := range i.all {
		if err := collect("list operations of "+zone, func(token string) (*compute.OperationList, error) {
			return service.ZoneOperations.List(i.project, zone).Filter(filter).MaxResults(pageSize).PageToken(token).Context(ctx).Do()
		}); err != nil {
			return explain(err)
		}
	}
	for _, o := range unfinished {
		what := o.OperationType + " of " + last(o.TargetLink)
		wait("an earlier request is unfinished: " + what)
		err := i.patiently(ctx, wait, func() error { return i.client.Finish(ctx, i.project, what, o, longest) })
		if e, ok := errors.AsType[*api.Error](err); ok && e.Ended() {
			err = nil // it failed: it makes nothing
		}
		if err != nil {
			return explain(err)
		}
	}
	return nil
}

// Delete implements infra.Cloud.
func (i *Infra) Delete(ctx context.Context, o infra.Object, wait func(string)) error {
	n := slices.IndexFunc(kinds, func(k kind) bool { return k.title == o.Kind })
	if n < 0 {
		return fmt.Errorf("delete %s: %w", o, cloud.ErrNotFound)
	}
	k, op := kinds[n], "delete "+o.String()
	for begun := time.Now(); ; {
		listed, err := i.list(ctx, k, o.Place)
		if err != nil {
			return explain(err)
		}
		n := slices.IndexFunc(listed, func(f found) bool { return f.name == o.Name })
		if n < 0 {
			return nil
		}
		if !i.bears(listed[n]) {
			return &plan.Error{Op: op, Err: errors.New("it does not bear the UID of this cluster any more"), Remedy: "run the same command again: objects of others stay"}
		}
		err = i.change(ctx, op, wait, func(request string) (*compute.Operation, error) { return k.remove(ctx, i, o.Place, o.Name, request) })
		switch {
		case errors.Is(err, cloud.ErrNotFound):
			return nil
		case !errors.Is(err, cloud.ErrConflict) || time.Since(begun) > inUse:
			return explain(err)
		}
		wait(fmt.Sprintf("%v", explain(err)))
		if err := infra.Pause(ctx, 3*time.Second); err != nil {
			return err
		}
	}
}
