package gcptest_test

import (
	"reflect"
	"slices"
	"testing"
	"time"

	compute "google.golang.org/api/compute/v1"
	"google.golang.org/api/option"

	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/wire"
	"constellation/engine/cloud/gcp/gcptest"
)

// TestStateSurvivesARestart stores the state of a cloud and opens another one with it, with the same machines.
func TestStateSurvivesARestart(t *testing.T) {
	t.Parallel()
	var state []byte
	o := gcptest.Options{Fleet: &wire.Records{}, Save: func(b []byte) { state = b }}
	open := func() (*gcptest.Cloud, *compute.Service) {
		c, err := gcptest.New(func(p string) { t.Error(p) }, o)
		if err != nil {
			t.Fatal(err)
		}
		api, err := compute.NewService(t.Context(), option.WithHTTPClient(c.Client()))
		if err != nil {
			t.Fatal(err)
		}
		return c, api
	}
	c, api := open()
	group := c.AddGroup(zone, "workers", cloud.Worker, c.AddImage("one", "v1.0.0"), gcptest.UID, func(g *compute.InstanceGroupManager) { g.BaseInstanceName = "worker" })
	for _, n := range []int{3, 2} {
		if err := c.Resize(group, n); err != nil {
			t.Fatal(err)
		}
	}
	names := func(api *compute.Service) (names []string) {
		l, err := api.Instances.List(project, zone).Do()
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range l.Items {
			names = append(names, i.Name)
		}
		return names
	}
	before := names(api)
	operations, err := api.ZoneOperations.List(project, zone).Do()
	if err != nil {
		t.Fatal(err)
	}
	bearer := c.NewToken("", time.Hour, "https://www.googleapis.com/auth/compute")
	o.State = slices.Clone(state)
	c, api = open()
	if old, err := compute.NewService(t.Context(), option.WithHTTPClient(c.ClientWith(bearer))); err != nil || len(names(old)) != 2 {
		t.Errorf("a client with an older token does not find the machines, %v", err)
	}
	if after := names(api); len(before) != 2 || !reflect.DeepEqual(before, after) {
		t.Errorf("machines are %q, were %q", after, before)
	}
	if l, err := api.ZoneOperations.List(project, zone).Do(); err != nil || len(l.Items) != len(operations.Items) {
		t.Errorf("%d operations are left of %d, %v", len(l.Items), len(operations.Items), err)
	}
	if l, err := api.Images.List(project).Do(); err != nil || len(l.Items) != 1 {
		t.Errorf("images: %v", err)
	}
	if err := c.Resize(group, 0); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); len(names(api)) > 0; {
		if time.Now().After(deadline) {
			t.Fatal("machines of an empty group are left")
		}
	}
}
