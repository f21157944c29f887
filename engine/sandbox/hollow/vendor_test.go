package hollow_test

import (
	"context"
	"errors"
	"net/http/httptest"
	"strings"
	"sync"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/wire"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/hollow"
)

// vendor is the cloud that an operator uses: that of hollow machines, or an emulated one in front of them.
type vendor struct {
	machines *hollow.Cloud
	provider string
	// metadata and control are the addresses for the operator.
	metadata, control string
	// image returns the reference of the OS image of a version.
	image func(version string) string
	// seed adds machines that joined long ago.
	seed func(ctx context.Context, role cloud.Role, n int, components string) error
	// setImage sets the image of future machines of a role.
	setImage func(ctx context.Context, role cloud.Role, version string) error
	// calls counts the calls over the network, by kind.
	calls func() map[string]int
}

// operatorFlags are the flags of an operator that uses the cloud.
func (v vendor) operatorFlags() []string {
	return []string{"--provider", v.provider, "--metadata", v.metadata, "--cloud", v.control}
}

// newVendor is a function that starts a vendor with machines of a cluster.
type newVendor func(t controlplane.T, c *cluster, times hollow.Times) vendor

// ownCloud is the cloud of hollow machines.
func ownCloud(t controlplane.T, c *cluster, times hollow.Times) vendor {
	t.Helper()
	h := start(t, c, times)
	owner := sandboxapi.NewClient(h.Host, "")
	names := map[cloud.Role]string{cloud.ControlPlane: sandboxapi.ControlPlaneGroup, cloud.Worker: sandboxapi.WorkerGroup}
	image := func(version string) string { return sandboxapi.ImageReference("hollow", version) }
	return vendor{
		machines: h, provider: providers.Local, metadata: h.Metadata, control: h.Control, image: image, calls: h.Calls,
		seed: func(ctx context.Context, role cloud.Role, n int, components string) error {
			return h.Seed(ctx, names[role], n, components)
		},
		setImage: func(ctx context.Context, role cloud.Role, version string) error {
			return owner.SetGroupImage(ctx, sandboxapi.GroupID("hollow", names[role]), image(version))
		},
	}
}

// emulatedGoogleCloud is Google Cloud as package gcptest emulates it, with the rate limits that Google documents. Its
// operations take as long as those of Google usually do.
func emulatedGoogleCloud(t controlplane.T, c *cluster, times hollow.Times) vendor {
	t.Helper()
	const zone, project = "europe-west3-a", gcptest.Project
	h := start(t, c, times)
	names := map[cloud.Role]string{cloud.ControlPlane: "control-plane", cloud.Worker: "worker"}
	image := func(version string) string {
		return "projects/" + project + "/global/images/constellation-" + strings.ReplaceAll(version, ".", "-")
	}
	var mu sync.Mutex
	var problems []error
	e, err := gcptest.New(func(problem string) {
		mu.Lock()
		defer mu.Unlock()
		problems = append(problems, errors.New(problem))
	}, gcptest.Options{
		Fleet: h.Fleet(func(m wire.Machine) cloud.Instance {
			return cloud.Instance{
				Name: m.Name, ProviderID: gcp.ProviderID(project, zone, m.Name), Incarnation: m.ID, Group: gcp.GroupID(project, zone, m.Group),
				Role: m.Role, Image: m.Image, Token: m.Token,
			}
		}),
		Zones: []string{zone}, Pending: 500 * time.Millisecond, Running: time.Second, Insert: time.Second, Retry: 10 * time.Second,
	})
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() {
		mu.Lock()
		defer mu.Unlock()
		if err := errors.Join(problems...); err != nil {
			t.Fatalf("the operator's calls are not those of Google's API: %v", err)
		}
	})
	for _, version := range []string{"v1.0.0", "v1.1.0"} {
		e.AddImage(strings.TrimPrefix(image(version), "projects/"+project+"/global/images/"), version)
	}
	for role, name := range names {
		e.AddGroup(zone, name, role, image("v1.0.0"), gcptest.UID, nil)
	}
	owner, err := gcp.New(t.Context(), gcp.Options{Project: project, UID: gcptest.UID, Zones: []string{zone}, HTTP: e.Client()})
	if err != nil {
		t.Fatalf("%v", err)
	}
	api := httptest.NewServer(e)
	t.Cleanup(api.Close)
	// The operator has the account of a control plane.
	metadata := httptest.NewServer(e.Metadata())
	t.Cleanup(metadata.Close)
	v := vendor{
		machines: h, provider: gcp.Name, metadata: metadata.URL, control: api.URL + gcp.ComputePath, image: image, calls: e.Calls,
		seed: func(ctx context.Context, role cloud.Role, n int, components string) error {
			var keys []string
			err := h.SeedFleet(ctx, components, func() { keys = e.Seed(gcp.GroupID(project, zone, names[role]), n) })
			if role == cloud.ControlPlane && len(keys) > 0 {
				_, _, name, _ := gcp.ParseProviderID(keys[0])
				metadata.Config.Handler = e.MetadataOf(name)
			}
			return err
		},
		setImage: func(ctx context.Context, role cloud.Role, version string) error {
			return owner.SetGroupImage(ctx, gcp.GroupID(project, zone, names[role]), image(version))
		},
	}
	return v
}
