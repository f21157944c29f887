package gcptest_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	compute "google.golang.org/api/compute/v1"
	"google.golang.org/api/googleapi"
	"google.golang.org/api/option"

	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/wire"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/internal/testneeds"
)

const (
	zone    = "europe-west3-a"
	image   = "projects/demo-project/global/images/one"
	project = gcptest.Project
)

// lab is a cloud with a group and Google's client of it.
type lab struct {
	*testing.T
	c   *gcptest.Cloud
	api *compute.Service
	// failed has the problems that the gate reported.
	failed *[]string
	fleet  wire.Fleet
}

func newLab(t *testing.T, o gcptest.Options) *lab {
	t.Helper()
	if o.Fleet == nil {
		o.Fleet = &wire.Records{Boot: 10 * time.Second, Off: 10 * time.Second}
	}
	failed := &[]string{}
	c, err := gcptest.New(func(p string) { *failed = append(*failed, p) }, o)
	if err != nil {
		t.Fatal(err)
	}
	c.AddGroup(zone, "workers", cloud.Worker, image, gcptest.UID, nil)
	l := &lab{T: t, c: c, fleet: o.Fleet, failed: failed}
	l.api = l.client(c.Client())
	return l
}

func (l *lab) client(h *http.Client) *compute.Service {
	l.Helper()
	api, err := compute.NewService(l.Context(), option.WithHTTPClient(h), option.WithEndpoint("https://compute.googleapis.com/compute/v1/"))
	if err != nil {
		l.Fatal(err)
	}
	return api
}

func name(n int) string { return fmt.Sprintf("workers-%024x", n) }

func (l *lab) create(requestID string, names ...string) (*compute.Operation, error) {
	body := &compute.InstanceGroupManagersCreateInstancesRequest{}
	for _, n := range names {
		body.Instances = append(body.Instances, &compute.PerInstanceConfig{Name: n})
	}
	call := l.api.InstanceGroupManagers.CreateInstances(project, zone, "workers", body)
	if requestID != "" {
		call = call.RequestId(requestID)
	}
	return call.Do()
}

func (l *lab) delete(skip bool, names ...string) *compute.Operation {
	l.Helper()
	body := &compute.InstanceGroupManagersDeleteInstancesRequest{SkipInstancesOnValidationError: skip}
	for _, n := range names {
		body.Instances = append(body.Instances, "zones/"+zone+"/instances/"+n)
	}
	o, err := l.api.InstanceGroupManagers.DeleteInstances(project, zone, "workers", body).Do()
	l.ok(err)
	return l.wait(o)
}

// entry reads an entry of the metadata server of a machine.
func (l *lab) entry(machine, path string, header func(http.Header)) string {
	l.Helper()
	r, err := http.NewRequestWithContext(l.Context(), http.MethodGet, "http://metadata.google.internal/computeMetadata/v1/"+path, nil)
	l.ok(err)
	r.Header.Set("Metadata-Flavor", "Google")
	answer, err := wire.Transport(l.c.MetadataOf(machine)).RoundTrip(r)
	l.ok(err)
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	l.ok(err)
	if header != nil {
		header(answer.Header)
	}
	return string(b)
}

func (l *lab) wait(o *compute.Operation) *compute.Operation {
	l.Helper()
	o, err := l.api.ZoneOperations.Wait(project, zone, o.Name).Do()
	l.ok(err)
	return o
}

const region = "europe-west3"

// newGroup starts to make a group with machines.
func (l *lab) newGroup(n int64) *compute.Operation {
	l.Helper()
	o, err := l.api.InstanceGroupManagers.Insert(project, zone, &compute.InstanceGroupManager{Name: "fresh", BaseInstanceName: "fresh", TargetSize: n, InstanceTemplate: "global/instanceTemplates/workers-template"}).Do()
	l.ok(err)
	return o
}

// network makes a network.
func (l *lab) network() {
	l.Helper()
	o, err := l.api.Networks.Insert(project, &compute.Network{Name: "net", ForceSendFields: []string{"AutoCreateSubnetworks"}}).Do()
	l.ok(err)
	_, err = l.api.GlobalOperations.Wait(project, o.Name).Do()
	l.ok(err)
}

func subnet(name, prefix string) *compute.Subnetwork {
	return &compute.Subnetwork{Name: name, Network: "projects/" + project + "/global/networks/net", IpCidrRange: prefix}
}

func (l *lab) waitRegion(o *compute.Operation) {
	l.Helper()
	o, err := l.api.RegionOperations.Wait(project, region, o.Name).Do()
	l.ok(err)
	if o.Error != nil {
		l.Errorf("operation %s of %s: %+v", o.OperationType, o.TargetLink, o.Error.Errors[0])
	}
}

func (l *lab) managed() []*compute.ManagedInstance {
	l.Helper()
	out, err := l.api.InstanceGroupManagers.ListManagedInstances(project, zone, "workers").Do()
	l.ok(err)
	return out.ManagedInstances
}

func (l *lab) group() *compute.InstanceGroupManager {
	l.Helper()
	g, err := l.api.InstanceGroupManagers.Get(project, zone, "workers").Do()
	l.ok(err)
	return g
}

func (l *lab) ok(err error) {
	l.Helper()
	if err != nil {
		l.Fatal(err)
	}
}

func (l *lab) want(what string, is, want any) {
	l.Helper()
	if fmt.Sprint(is) != fmt.Sprint(want) {
		l.Errorf("%s is %v, want %v", what, is, want)
	}
}

// refused checks the status and the reason of an error.
func (l *lab) refused(err error, status int, reason string) {
	l.Helper()
	var e *googleapi.Error
	if !errors.As(err, &e) || e.Code != status || len(e.Errors) == 0 || e.Errors[0].Reason != reason {
		l.Errorf("error %v, want %d %s", err, status, reason)
	}
}

// lastCode returns the code of the last attempt of the only managed instance.
func (l *lab) lastCode() string {
	l.Helper()
	m := l.managed()
	if len(m) != 1 || m[0].LastAttempt == nil {
		return ""
	}
	return m[0].LastAttempt.Errors.Errors[0].Code
}

var checks = map[string]func(*lab){
	"an operation is PENDING, then RUNNING, then DONE": func(l *lab) {
		o, err := l.create("", name(1))
		l.ok(err)
		for _, want := range []string{"PENDING", "RUNNING", "DONE"} {
			now, err := l.api.ZoneOperations.Get(project, zone, o.Name).Do()
			l.ok(err)
			l.want("status", now.Status, want)
			time.Sleep(time.Second)
		}
	},
	"the operation of a creation is DONE when the machines are scheduled": func(l *lab) {
		o, err := l.create("", name(1))
		l.ok(err)
		l.want("status", l.wait(o).Status, "DONE")
		l.want("managed instances", len(l.managed()), 1)
		l.want("number of the machine", l.managed()[0].Id, 0)
	},
	"the operation of a deletion is DONE when the deletion is scheduled, and the target size is smaller": func(l *lab) {
		l.c.Seed(gcp.GroupID(project, zone, "workers"), 1)
		l.want("status", l.delete(false, l.managed()[0].Name).Status, "DONE")
		l.want("action", l.managed()[0].CurrentAction, "DELETING")
		l.want("target size", l.group().TargetSize, 0)
	},
	"a wait ends with the operation, or after two minutes": func(l *lab) {
		begun := time.Now()
		o, err := l.create("", name(1))
		l.ok(err)
		l.want("status", l.wait(o).Status, "DONE")
		l.want("time", time.Since(begun), 2*time.Second)
		l.c.StickNext("compute.instanceGroupManagers.createInstances")
		o, err = l.create("", name(2))
		l.ok(err)
		begun = time.Now()
		l.want("status", l.wait(o).Status == "DONE", false)
		l.want("time", time.Since(begun), 2*time.Minute)
	},
	"a repeated request ID returns the first operation": func(l *lab) {
		const id = "11111111-2222-5333-8444-555555555555"
		a, err := l.create(id, name(1))
		l.ok(err)
		l.wait(a)
		b, err := l.create(id, name(1))
		l.ok(err)
		l.want("operation", b.Name, a.Name)
		l.want("managed instances", len(l.managed()), 1)
	},
	"a request ID is a UUID other than zero": func(l *lab) {
		for _, id := range []string{"x", "00000000-0000-0000-0000-000000000000"} {
			_, err := l.create(id, name(1))
			l.refused(err, http.StatusBadRequest, "invalid")
		}
	},
	"a machine is STAGING until it boots, and RUNNING from then on": func(l *lab) {
		o, err := l.create("", name(1))
		l.ok(err)
		l.wait(o)
		is := ""
		for range 16 {
			time.Sleep(500 * time.Millisecond)
			list, err := l.api.Instances.List(project, zone).Do()
			l.ok(err)
			if len(list.Items) > 0 && !strings.HasSuffix(is, list.Items[0].Status) {
				is += " " + list.Items[0].Status
			}
		}
		l.want("status", is, " STAGING RUNNING")
		l.want("it still boots", l.fleet.State(strconv.FormatUint(l.managed()[0].Id, 10)), cloud.Creating)
	},
	"a group repeats a failed creation without end, with the errors of the last attempt": func(l *lab) {
		l.c.SetStockout(zone, true)
		o, err := l.create("", name(1))
		l.ok(err)
		l.wait(o)
		for range 5 {
			time.Sleep(time.Hour)
			l.want("action", l.managed()[0].CurrentAction, "CREATING")
			l.want("code", l.lastCode(), "ZONE_RESOURCE_POOL_EXHAUSTED")
		}
		l.c.SetStockout(zone, false)
		time.Sleep(time.Hour)
		l.want("there is a machine", l.managed()[0].Id != 0, true)
	},
	"a zone without machines fails attempts with ZONE_RESOURCE_POOL_EXHAUSTED": func(l *lab) {
		l.c.SetStockout(zone, true)
		o, err := l.create("", name(1))
		l.ok(err)
		l.want("error of the operation", l.wait(o).Error == nil, true)
		time.Sleep(time.Minute)
		l.want("code", l.lastCode(), "ZONE_RESOURCE_POOL_EXHAUSTED")
	},
	"a quota of machines fails attempts with QUOTA_EXCEEDED": func(l *lab) {
		l.c.SetQuota(1)
		l.c.Seed(gcp.GroupID(project, zone, "workers"), 1)
		o, err := l.create("", name(1))
		l.ok(err)
		l.wait(o)
		time.Sleep(time.Minute)
		l.want("code", l.managed()[1].LastAttempt.Errors.Errors[0].Code, "QUOTA_EXCEEDED")
	},
	"above a rate limit requests fail with 403 rateLimitExceeded until the next minute": func(l *lab) {
		time.Sleep(time.Until(time.Now().Truncate(time.Minute).Add(time.Minute)))
		for range 1500 {
			_, err := l.api.Instances.Get(project, zone, "none").Do()
			l.refused(err, http.StatusNotFound, "notFound")
		}
		_, err := l.api.Instances.Get(project, zone, "none").Do()
		l.refused(err, http.StatusForbidden, "rateLimitExceeded")
		time.Sleep(time.Minute)
		_, err = l.api.Instances.Get(project, zone, "none").Do()
		l.refused(err, http.StatusNotFound, "notFound")
	},
	"a name that is taken is 409 alreadyExists": func(l *lab) {
		o, err := l.create("", name(1))
		l.ok(err)
		l.wait(o)
		_, err = l.create("", name(1))
		l.refused(err, http.StatusConflict, "alreadyExists")
	},
	"a list has 500 items in a page at most, and a token of the next page": func(l *lab) {
		l.c.Seed(gcp.GroupID(project, zone, "workers"), 501)
		first, err := l.api.Instances.List(project, zone).Do()
		l.ok(err)
		l.want("items", len(first.Items), 500)
		second, err := l.api.Instances.List(project, zone).PageToken(first.NextPageToken).Do()
		l.ok(err)
		l.want("items", len(second.Items), 1)
		l.want("next page", second.NextPageToken, "")
	},
	"managed instances have pages only in groups that are PAGINATED": func(l *lab) {
		l.c.Seed(gcp.GroupID(project, zone, "workers"), 501)
		l.want("managed instances", len(l.managed()), 501)
		_, err := l.api.InstanceGroupManagers.ListManagedInstances(project, zone, "workers").PageToken("page-1").Do()
		l.refused(err, http.StatusBadRequest, "invalid")
		l.c.AddGroup(zone, "pages", cloud.Worker, image, gcptest.UID, func(g *compute.InstanceGroupManager) { g.ListManagedInstancesResults = "PAGINATED" })
		l.c.Seed(gcp.GroupID(project, zone, "pages"), 501)
		out, err := l.api.InstanceGroupManagers.ListManagedInstances(project, zone, "pages").Do()
		l.ok(err)
		l.want("managed instances of a page", len(out.ManagedInstances), 500)
	},
	"operations are listed with the newest first on request": func(l *lab) {
		for n := range 3 {
			o, err := l.create("", name(n))
			l.ok(err)
			l.wait(o)
		}
		out, err := l.api.ZoneOperations.List(project, zone).OrderBy("creationTimestamp desc").Do()
		l.ok(err)
		for n := range len(out.Items) - 1 {
			l.want("the order of times", out.Items[n].InsertTime >= out.Items[n+1].InsertTime, true)
		}
	},
	"a deletion of machines that are not members fails, unless they are to be skipped": func(l *lab) {
		l.want("error", l.delete(false, name(9)).Error != nil, true)
		l.want("error", l.delete(true, name(9)).Error != nil, false)
	},
	"a machine that is deleted behind its group is recreated under its name with another number": func(l *lab) {
		l.c.Seed(gcp.GroupID(project, zone, "workers"), 1)
		before := l.managed()[0]
		l.c.Kill(before.Name)
		time.Sleep(time.Minute)
		l.managed()
		after := l.managed()[0]
		l.want("name", after.Name, before.Name)
		l.want("the number is another one", after.Id != before.Id && after.Id != 0, true)
	},
	"a group that is to do nothing does not recreate a machine": func(l *lab) {
		l.c.AddGroup(zone, "workers", cloud.Worker, image, gcptest.UID, func(g *compute.InstanceGroupManager) {
			g.InstanceLifecyclePolicy = &compute.InstanceGroupManagerInstanceLifecyclePolicy{DefaultActionOnFailure: "DO_NOTHING"}
		})
		l.c.Seed(gcp.GroupID(project, zone, "workers"), 1)
		l.managed()
		time.Sleep(time.Minute)
		l.c.Kill(l.managed()[0].Name)
		time.Sleep(time.Minute)
		l.want("managed instances", len(l.managed()), 0)
	},
	"the metadata server announces a preemption, and the machine is gone after 30 seconds": func(l *lab) {
		l.c.Seed(gcp.GroupID(project, zone, "workers"), 1)
		before := l.managed()[0]
		l.want("preempted", l.entry(before.Name, "instance/preempted", nil), "FALSE")
		l.ok(l.c.Preempt(before.Name))
		l.want("preempted", l.entry(before.Name, "instance/preempted", nil), "TRUE")
		time.Sleep(gcptest.PreemptedAfter - time.Second)
		l.want("number", l.managed()[0].Id, before.Id)
		time.Sleep(time.Minute)
		l.managed()
		after := l.managed()[0]
		l.want("the number is another one", after.Id != before.Id && after.Id != 0, true)
		l.want("preempted", l.entry(after.Name, "instance/preempted", nil), "FALSE")
	},
	"the metadata server announces that maintenance terminates or migrates a machine": func(l *lab) {
		l.c.Seed(gcp.GroupID(project, zone, "workers"), 1)
		machine := l.managed()[0].Name
		for _, event := range []string{"TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE", "NONE"} {
			l.ok(l.c.Maintain(machine, event))
			l.want("event", l.entry(machine, "instance/maintenance-event", nil), event)
		}
	},
	"a request with wait_for_change is answered when the entry has another version, or after timeout_sec": func(l *lab) {
		l.c.Seed(gcp.GroupID(project, zone, "workers"), 1)
		machine := l.managed()[0].Name
		var version string
		l.entry(machine, "instance/preempted", func(h http.Header) { version = h.Get("ETag") })
		begun := time.Now()
		l.want("unchanged", l.entry(machine, "instance/preempted?wait_for_change=true&timeout_sec=7&last_etag="+version, nil), "FALSE")
		l.want("time", time.Since(begun), 7*time.Second)
		time.AfterFunc(3*time.Second, func() { l.ok(l.c.Preempt(machine)) })
		begun = time.Now()
		l.want("changed", l.entry(machine, "instance/preempted?wait_for_change=true&timeout_sec=60&last_etag="+version, nil), "TRUE")
		l.want("time", time.Since(begun), 3*time.Second)
		begun = time.Now()
		l.want("an old version", l.entry(machine, "instance/preempted?wait_for_change=true&timeout_sec=60&last_etag="+version, nil), "TRUE")
		l.want("time", time.Since(begun), time.Duration(0))
	},
	"a new template applies to new machines only, if updates are OPPORTUNISTIC": func(l *lab) {
		l.c.Seed(gcp.GroupID(project, zone, "workers"), 1)
		before := l.managed()[0]
		l.c.AddGroup(zone, "other", cloud.Worker, image, gcptest.UID, nil)
		url := "projects/" + project + "/global/instanceTemplates/other-template"
		o, err := l.api.InstanceGroupManagers.Patch(project, zone, "workers", &compute.InstanceGroupManager{Versions: []*compute.InstanceGroupManagerVersion{{InstanceTemplate: url}}}).Do()
		l.ok(err)
		l.wait(o)
		o, err = l.create("", name(1))
		l.ok(err)
		l.wait(o)
		after := l.managed()
		l.want("template of the old machine", after[0].Version.InstanceTemplate, before.Version.InstanceTemplate)
		l.want("template of the new machine", after[1].Version.InstanceTemplate, url)
	},
	"a new group makes as many machines as its target size": func(l *lab) {
		l.wait(l.newGroup(3))
		time.Sleep(time.Minute)
		out, err := l.api.InstanceGroupManagers.ListManagedInstances(project, zone, "fresh").Do()
		l.ok(err)
		l.want("machines", len(out.ManagedInstances), 3)
		for _, m := range out.ManagedInstances {
			l.want("the name has the base name", strings.HasPrefix(m.Name, "fresh-"), true)
		}
		_, err = l.api.InstanceGroupManagers.Insert(project, zone, &compute.InstanceGroupManager{Name: "fresh", BaseInstanceName: "fresh", TargetSize: 1, InstanceTemplate: "global/instanceTemplates/workers-template"}).Do()
		l.refused(err, http.StatusConflict, "alreadyExists")
	},
	"the operation that deletes a group is DONE when its machines are gone": func(l *lab) {
		l.wait(l.newGroup(2))
		time.Sleep(time.Minute)
		o, err := l.api.InstanceGroupManagers.Delete(project, zone, "fresh").Do()
		l.ok(err)
		begun := time.Now()
		l.want("status", l.wait(o).Status, "DONE")
		l.want("it took the time of the machines", time.Since(begun) >= 10*time.Second, true)
		_, err = l.api.InstanceGroupManagers.Get(project, zone, "fresh").Do()
		l.refused(err, http.StatusNotFound, "notFound")
		list, err := l.api.Instances.List(project, zone).Do()
		l.ok(err)
		l.want("machines", len(list.Items), 0)
	},
	"an object that another one uses is not deleted: 400 resourceInUseByAnotherResource": func(l *lab) {
		l.network()
		o, err := l.api.Subnetworks.Insert(project, region, subnet("one", "10.0.0.0/20")).Do()
		l.ok(err)
		l.waitRegion(o)
		_, err = l.api.Networks.Delete(project, "net").Do()
		l.refused(err, http.StatusBadRequest, "resourceInUseByAnotherResource")
		_, err = l.api.InstanceTemplates.Delete(project, "workers-template").Do()
		l.refused(err, http.StatusBadRequest, "resourceInUseByAnotherResource")
		o, err = l.api.Subnetworks.Delete(project, region, "one").Do()
		l.ok(err)
		l.waitRegion(o)
		o, err = l.api.Networks.Delete(project, "net").Do()
		l.ok(err)
		o, err = l.api.GlobalOperations.Wait(project, o.Name).Do()
		l.ok(err)
		l.want("error", o.Error == nil, true)
		_, err = l.api.Networks.Delete(project, "net").Do()
		l.refused(err, http.StatusNotFound, "notFound")
	},
	"a reference to an object that does not exist is 400 invalid": func(l *lab) {
		_, err := l.api.Subnetworks.Insert(project, region, subnet("one", "10.0.0.0/20")).Do()
		l.refused(err, http.StatusBadRequest, "invalid")
		_, err = l.api.InstanceGroupManagers.Insert(project, zone, &compute.InstanceGroupManager{Name: "fresh", BaseInstanceName: "fresh", TargetSize: 1, InstanceTemplate: "global/instanceTemplates/none"}).Do()
		l.refused(err, http.StatusBadRequest, "invalid")
	},
	"ranges of the subnetworks of a network do not overlap": func(l *lab) {
		l.network()
		o, err := l.api.Subnetworks.Insert(project, region, subnet("one", "10.0.0.0/20")).Do()
		l.ok(err)
		l.waitRegion(o)
		_, err = l.api.Subnetworks.Insert(project, region, subnet("two", "10.0.8.0/24")).Do()
		l.refused(err, http.StatusBadRequest, "invalid")
	},
	"labels of an address are set by setLabels alone, with the fingerprint of the present ones": func(l *lab) {
		_, err := l.api.Addresses.Insert(project, region, &compute.Address{Name: "one", Labels: map[string]string{"a": "b"}}).Do()
		l.refused(err, http.StatusBadRequest, "invalid")
		o, err := l.api.Addresses.Insert(project, region, &compute.Address{Name: "one"}).Do()
		l.ok(err)
		l.waitRegion(o)
		list, err := l.api.Addresses.List(project, region).Do()
		l.ok(err)
		first := list.Items[0].LabelFingerprint
		for n, want := range []bool{true, false} { // the second one has an old fingerprint
			o, err := l.api.Addresses.SetLabels(project, region, "one", &compute.RegionSetLabelsRequest{LabelFingerprint: first, Labels: map[string]string{"a": fmt.Sprint(n)}}).Do()
			if !want {
				l.refused(err, http.StatusPreconditionFailed, "conditionNotMet")
				continue
			}
			l.ok(err)
			l.waitRegion(o)
		}
		list, err = l.api.Addresses.List(project, region).Do()
		l.ok(err)
		l.want("labels", list.Items[0].Labels, map[string]string{"a": "0"})
	},
	"a machine that left its group stays when the group is deleted": func(l *lab) {
		l.wait(l.newGroup(2))
		time.Sleep(time.Minute)
		list, err := l.api.Instances.List(project, zone).Do()
		l.ok(err)
		l.c.Abandon(list.Items[0].Name)
		o, err := l.api.InstanceGroupManagers.Delete(project, zone, "fresh").Do()
		l.ok(err)
		l.wait(o)
		after, err := l.api.Instances.List(project, zone).Do()
		l.ok(err)
		l.want("machines", len(after.Items) == 1 && after.Items[0].Name == list.Items[0].Name, true)
		o, err = l.api.Instances.Delete(project, zone, list.Items[0].Name).Do()
		l.ok(err)
		l.wait(o)
		time.Sleep(time.Minute)
		after, err = l.api.Instances.List(project, zone).Do()
		l.ok(err)
		l.want("machines", len(after.Items), 0)
	},
	"a request without a token for Compute Engine is 401": func(l *lab) {
		const scope = "https://www.googleapis.com/auth/compute"
		for bearer, want := range map[string]int{
			"": http.StatusUnauthorized, "forged": http.StatusUnauthorized, l.c.NewToken("https://storage.googleapis.com/", time.Hour, scope): http.StatusUnauthorized,
			l.c.NewToken("", -time.Second, scope): http.StatusUnauthorized, l.c.NewToken("", time.Hour, "https://www.googleapis.com/auth/devstorage.read_only"): http.StatusForbidden,
		} {
			_, err := l.client(l.c.ClientWith(bearer)).Instances.List(project, zone).Do()
			if e := (*googleapi.Error)(nil); !errors.As(err, &e) || e.Code != want {
				l.Errorf("token %q: %v, want %d", bearer, err, want)
			}
		}
	},
	"a missing permission is 403 forbidden with its name": func(l *lab) {
		l.c.Revoke("compute.instances.list")
		_, err := l.api.Instances.List(project, zone).Do()
		l.refused(err, http.StatusForbidden, "forbidden")
		l.want("the message has the name", strings.Contains(fmt.Sprint(err), "Required 'compute.instances.list' permission"), true)
	},
	"the answer has the selected fields only, and an unknown field is 400": func(l *lab) {
		l.c.Seed(gcp.GroupID(project, zone, "workers"), 1)
		out, err := l.api.Instances.List(project, zone).Fields("items(name,networkInterfaces(networkIP))").Do()
		l.ok(err)
		i := out.Items[0]
		l.want("selected", i.Name != "" && i.NetworkInterfaces[0].NetworkIP != "" && i.Id == 0 && i.Metadata == nil, true)
		_, err = l.api.Instances.List(project, zone).Fields("items(name,ip)").Do()
		l.refused(err, http.StatusBadRequest, "invalidParameter")
	},
}

// TestSemantics checks each row of the table with Google's client, and nothing that the gate refuses.
func TestSemantics(t *testing.T) {
	if len(checks) != len(gcptest.Semantics) {
		t.Errorf("%d checks of %d rows", len(checks), len(gcptest.Semantics))
	}
	newLab(t, gcptest.Options{}) // reads the discovery document, which runs a program
	for _, row := range gcptest.Semantics {
		t.Run(row.Rule, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLab(t, gcptest.Options{Pending: time.Second, Running: time.Second, Insert: 3 * time.Second, Retry: 30 * time.Second})
				checks[row.Rule](l)
				if len(*l.failed) > 0 {
					t.Errorf("the gate reported %v", *l.failed)
				}
			})
		})
	}
}

// TestGateReportsByName sends requests that the API does not have.
func TestGateReportsByName(t *testing.T) {
	for _, tt := range []struct {
		name, method, url, body, want string
	}{
		{name: "an unknown path", method: "GET", url: "projects/demo-project/zones/z/machines", want: "the API has no such path and method"},
		{name: "a wrong verb", method: "PUT", url: "projects/demo-project/zones/z/instances", want: "the API has no such path and method"},
		{name: "an unknown parameter", method: "GET", url: "projects/demo-project/zones/z/instances?limit=3", want: "unknown parameter limit"},
		{name: "a number out of range", method: "GET", url: "projects/demo-project/zones/z/instances?maxResults=-1", want: `parameter maxResults is "-1", want a number up to 0`},
		{name: "a text for a boolean", method: "GET", url: "projects/demo-project/zones/z/instances?returnPartialSuccess=yes", want: `parameter returnPartialSuccess is "yes", want true or false`},
		{name: "a project that the pattern excludes", method: "GET", url: "projects/Demo_Project/zones/z/instances", want: `parameter project is "Demo_Project"`},
		{name: "an unknown field", method: "POST", url: "projects/demo-project/zones/z/instanceGroupManagers/g/createInstances", body: `{"instances":[{"name":"a","image":"b"}]}`, want: "unknown field body.instances[0].image"},
		{name: "a field of a wrong type", method: "POST", url: "projects/demo-project/zones/z/instanceGroupManagers/g/deleteInstances", body: `{"instances":"a"}`, want: "body.instances is string, want array"},
		{name: "a value outside of the enum", method: "PATCH", url: "projects/demo-project/zones/z/instanceGroupManagers/g", body: `{"updatePolicy":{"type":"NEVER"}}`, want: `body.updatePolicy.type is "NEVER", want one of OPPORTUNISTIC, PROACTIVE`},
		{name: "a name that the pattern excludes", method: "POST", url: "projects/demo-project/global/instanceTemplates", body: `{"name":"Big"}`, want: `body.name is "Big"`},
		{name: "a required field that is missing", method: "POST", url: "projects/demo-project/global/instanceTemplates", body: `{}`, want: "field body.name is missing"},
		{name: "a 64-bit number that is no number", method: "POST", url: "projects/demo-project/global/instanceTemplates", body: `{"name":"a","properties":{"disks":[{"diskSizeGb":"big"}]}}`, want: `body.properties.disks[0].diskSizeGb is "big", want a number of format int64`},
		{name: "a body that is no JSON", method: "POST", url: "projects/demo-project/global/instanceTemplates", body: `{`, want: "body: unexpected EOF"},
		{name: "a body where there is none", method: "POST", url: "projects/demo-project/zones/z/operations/o/wait", body: `{}`, want: "the method has no body"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := newLab(t, gcptest.Options{})
			r, err := http.NewRequestWithContext(t.Context(), tt.method, "https://compute.googleapis.com/compute/v1/"+tt.url, strings.NewReader(tt.body))
			l.ok(err)
			resp, err := l.c.Client().Do(r)
			l.ok(err)
			defer resp.Body.Close()
			if problems := strings.Join(*l.failed, "\n"); resp.StatusCode != http.StatusBadRequest || !strings.Contains(problems, tt.want) {
				t.Errorf("status %d, problems %q, want %q", resp.StatusCode, problems, tt.want)
			}
		})
	}
}

// TestDocumentedSemantics checks that docs/clouds/gcp.md has the table.
func TestDocumentedSemantics(t *testing.T) {
	b, err := os.ReadFile("../../../../docs/clouds/gcp.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range gcptest.Semantics {
		if line := fmt.Sprintf("| %s | [%s](%s) |", row.Rule, strings.TrimPrefix(row.Documentation, "https://cloud.google.com/"), row.Documentation); !strings.Contains(string(b), line) {
			t.Errorf("docs/clouds/gcp.md lacks the row\n%s", line)
		}
	}
}

// TestNoProgramContainsTheEmulator leaves out constellation-sandbox, which runs the emulator.
func TestNoProgramContainsTheEmulator(t *testing.T) {
	testneeds.Tree()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "constellation", "constellation/bootstrapper/cmd", "constellation/agent/cmd",
		"constellation/operator/cmd", "constellation/joinservice/cmd").CombinedOutput()
	if err != nil {
		t.Fatalf("list imports: %v\n%s", err, out)
	}
	for _, pkg := range []string{"constellation/engine/cloud/gcp/gcptest", "constellation/engine/cloud/cloudtest"} {
		if strings.Contains(string(out), pkg) {
			t.Errorf("a program links %s", pkg)
		}
	}
}
