package hollow

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path"
	"strings"
	"sync/atomic"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/wire"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/sandboxapi"
)

// Vendor is the cloud that an operator uses: that of hollow machines, or an emulated one in front of them.
type Vendor struct {
	Provider string
	// Metadata and Control are the addresses for the operator.
	Metadata, Control string
	// Image returns the reference of the OS image of a version.
	Image func(version string) string
	// Seed adds machines that joined long ago.
	Seed func(ctx context.Context, role cloud.Role, n int, components string) error
	// SetImage sets the image of future machines of a role.
	SetImage func(ctx context.Context, role cloud.Role, version string) error
	// SetFaults replaces the faults of cloud and machines.
	SetFaults func(spec []string) error
	// Calls counts the calls over the network, by kind.
	Calls func() map[string]int
	// Problems counts the requests and answers that the API of an emulated cloud does not have.
	Problems func() int
}

// Flags are the flags of an operator that uses the cloud.
func (v Vendor) Flags() []string {
	return []string{"--provider", v.Provider, "--metadata", v.Metadata, "--cloud", v.Control}
}

// Vendors are the clouds that can have hollow machines, by the names of their providers.
var Vendors = map[string]func(ctx context.Context, c *Cloud, log *slog.Logger) (Vendor, error){providers.Local: own, gcp.Name: emulateGCP}

var groupNames = map[cloud.Role]string{cloud.ControlPlane: sandboxapi.ControlPlaneGroup, cloud.Worker: sandboxapi.WorkerGroup}

// own is the cloud of hollow machines.
func own(_ context.Context, c *Cloud, _ *slog.Logger) (Vendor, error) {
	return Vendor{
		Provider: providers.Local, Metadata: c.Metadata, Control: c.Control, Calls: c.Calls, SetFaults: c.SetFaults,
		Image:    func(version string) string { return sandboxapi.ImageReference(c.name, version) },
		Problems: func() int { return 0 },
		Seed: func(ctx context.Context, role cloud.Role, n int, components string) error {
			return c.Seed(ctx, groupNames[role], n, components)
		},
		SetImage: func(_ context.Context, role cloud.Role, version string) error {
			return c.SetImage(groupNames[role], version)
		},
	}, nil
}

// emulateGCP is Google Cloud as package gcptest emulates it, with the rate limits that Google documents. Its addresses are on
// loopback, and serve until ctx ends. The operator has the account of the first control plane.
func emulateGCP(ctx context.Context, c *Cloud, log *slog.Logger) (Vendor, error) {
	const zone, project = "europe-west3-a", gcptest.Project
	names := map[cloud.Role]string{cloud.ControlPlane: "control-plane", cloud.Worker: "worker"}
	image := func(version string) string {
		return "projects/" + project + "/global/images/constellation-" + strings.ReplaceAll(version, ".", "-")
	}
	var problems atomic.Int64
	e, err := gcptest.New(func(problem string) {
		log.Warn("call outside the schema of the emulated cloud", "cloud", gcp.Name, "problem", problem, "problems", problems.Add(1))
	}, gcptest.Options{
		Fleet: c.Fleet(func(m wire.Machine) cloud.Instance {
			return cloud.Instance{
				Name: m.Name, ProviderID: gcp.ProviderID(project, zone, m.Name), Incarnation: m.ID, Group: gcp.GroupID(project, zone, m.Group),
				Role: m.Role, Image: m.Image, Token: m.Token,
			}
		}),
		Zones: []string{zone}, Pending: 500 * time.Millisecond, Running: time.Second, Insert: time.Second, Retry: 10 * time.Second,
	})
	if err != nil {
		return Vendor{}, fmt.Errorf("emulate Google Cloud: %w", err)
	}
	for _, version := range c.images {
		e.AddImage(path.Base(image(version)), version)
	}
	for role, name := range names {
		e.AddGroup(zone, name, role, image(c.images[0]), gcptest.UID, nil)
	}
	owner, err := gcp.New(ctx, gcp.Options{Project: project, UID: gcptest.UID, Zones: []string{zone}, HTTP: e.Client()})
	if err != nil {
		return Vendor{}, err
	}
	var account atomic.Value // http.Handler
	account.Store(e.Metadata())
	api, err := loopback(ctx, e)
	if err != nil {
		return Vendor{}, err
	}
	metadata, err := loopback(ctx, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { account.Load().(http.Handler).ServeHTTP(w, r) }))
	if err != nil {
		return Vendor{}, err
	}
	return Vendor{
		Provider: gcp.Name, Metadata: metadata, Control: api + gcp.ComputePath, Image: image, Calls: e.Calls,
		Problems: func() int { return int(problems.Load()) },
		Seed: func(ctx context.Context, role cloud.Role, n int, components string) error {
			var keys []string
			err := c.SeedFleet(ctx, components, func() { keys = e.Seed(gcp.GroupID(project, zone, names[role]), n) })
			if role == cloud.ControlPlane && len(keys) > 0 {
				_, _, name, _ := gcp.ParseProviderID(keys[0])
				account.Store(e.MetadataOf(name))
			}
			return err
		},
		SetImage: func(ctx context.Context, role cloud.Role, version string) error {
			return owner.SetGroupImage(ctx, gcp.GroupID(project, zone, names[role]), image(version))
		},
		SetFaults: func(spec []string) error {
			var ofCloud, ofMachines []string
			for _, s := range spec {
				if gcptest.HasFault(s) {
					ofCloud = append(ofCloud, s)
				} else {
					ofMachines = append(ofMachines, s)
				}
			}
			return errors.Join(e.SetFaults(ofCloud), c.SetFaults(ofMachines))
		},
	}, nil
}

// loopback serves on a free port until ctx ends, and returns its URL.
func loopback(ctx context.Context, h http.Handler) (url string, err error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = srv.Serve(l) }() // until it is closed
	context.AfterFunc(ctx, func() { srv.Close() })
	return "http://" + l.Addr().String(), nil
}
