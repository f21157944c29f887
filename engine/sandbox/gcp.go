package sandbox

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	compute "google.golang.org/api/compute/v1"

	"constellation/engine"
	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/attest/attesttest"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/engine/cloud/providers"
)

// computeName is the file with the state of the emulated Compute Engine.
const computeName = "compute.json"

// gcpImage returns the name of the image of a version.
func gcpImage(version string) string {
	return "constellation-" + strings.NewReplacer(".", "-", "+", "-").Replace(version)
}

// emulateGCP opens an emulated Google Cloud. Its groups have the names of the groups of a sandbox.
func emulateGCP(d *daemon, st *state, e *emulator) error {
	_, section := e.provider.Sandbox(providers.SandboxOf{Name: st.Name, UID: st.UID})
	project, zones := section.Text("project"), section.List("zones")
	file := d.dirs.of(st.Name, computeName)
	before, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	versions := map[string]string{}
	for _, img := range st.Catalogue {
		versions[gcpImage(img.Version)] = img.Version
	}
	c, err := gcptest.New(e.problem(d), gcptest.Options{
		Fleet:   placed{d.fleet, func(reference string) string { return versions[path.Base(reference)] }},
		Project: project, Zones: zones, WorkerAccounts: true,
		Pending: 100 * time.Millisecond, Running: 300 * time.Millisecond, Insert: 300 * time.Millisecond, Retry: 10 * time.Second,
		Attributes: map[string]string{gcp.AttributeLoadBalancer: st.gateway().String(), gcp.AttributeInitSecretHash: st.InitSecretSHA256},
		State:      before,
		Faults:     st.CloudFaults,
		Save: func(b []byte) {
			if err := writeFile(file, b, 0o600); err != nil {
				d.log.Warn("state of the emulated cloud not written", "err", err)
			}
		},
	})
	if err != nil {
		return err
	}
	if len(before) == 0 {
		for _, img := range st.Catalogue {
			c.AddImage(gcpImage(img.Version), img.Version)
		}
		for _, g := range st.Groups {
			base := map[cloud.Role]string{cloud.ControlPlane: "control-plane", cloud.Worker: "worker"}[g.Role]
			c.AddGroup(zones[0], g.Name, g.Role, "projects/"+project+"/global/images/"+gcpImage(g.Image), st.UID, func(m *compute.InstanceGroupManager) { m.BaseInstanceName = base })
		}
	}
	e.setFaults = c.SetFaults
	e.unavailable = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Metadata-Flavor", "Google")
		http.Error(w, "Internal error", http.StatusInternalServerError)
	})
	e.api, e.apiPath, e.metadataPath, e.calls = c, gcp.ComputePath, "/computeMetadata/", c.Calls
	e.metadata = func(name string) http.Handler {
		if name == "" {
			return c.Metadata()
		}
		return c.MetadataOf(name)
	}
	e.resize = func(group string, n int) error {
		if err := c.Resize(gcp.GroupID(project, zones[0], group), n); err != nil {
			return fmt.Errorf("%w: %w", ErrConflict, err)
		}
		return nil
	}
	secureBoot := attesttest.SecureBoot(true)
	digest := sha256.Sum256(secureBoot)
	e.boot = []attestation.MeasuredEvent{{PCR: 7, Digest: digest[:], Description: string(secureBoot)}} // the description is the data of the event
	e.provision = func(ctx context.Context, tpm, machine, id string) error {
		n, err := strconv.ParseUint(id, 10, 64)
		if err != nil {
			return fmt.Errorf("number of machine %s: %w", machine, err)
		}
		cert, key, err := d.readCA()
		if err != nil {
			return err
		}
		ca, err := attesttest.Of(cert, key)
		if err != nil {
			return err
		}
		t := attesttest.Template(attesttest.Machine{Project: project, Zone: zones[0], Name: machine, ProjectNumber: projectNumber, Number: n})
		t.IssuingCertificateURL = nil // machines have the authority's certificate
		return ca.ProvisionTemplate(ctx, tpm, t, false)
	}
	return nil
}

// gcpFaults are the faults of the emulated Google Cloud.
func gcpFaults() vendorFaults {
	v := vendorFaults{check: gcptest.CheckFaults}
	effects := gcptest.FaultEffects()
	for i, form := range gcptest.FaultForms() {
		name, _, _ := strings.Cut(form, "=")
		v.kinds = append(v.kinds, engine.FaultKind{Name: name, Form: form, Does: effects[i]})
	}
	return v
}

// projectNumber is that of every emulated project.
const projectNumber = 123456789012
