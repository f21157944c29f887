// Package lab emulates a project of Google Cloud whose machines have emulated TPMs, for tests of the programs that make and
// judge evidence. The keys of the TPMs are certified by an authority that imitates Google's.
package lab

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/wire"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/attest"
	"constellation/engine/cloud/gcp/attest/attesttest"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/internal/swtpm"
)

// LoadBalancer is the host of the load balancer of a Project.
const LoadBalancer = "127.0.0.1"

// projectNumber is that of a Project.
const projectNumber = 123456789012

// Project is an emulated project.
type Project struct {
	*gcptest.Cloud
	Authority *attesttest.Authority

	t     testing.TB
	image string
}

// NewProject returns a project without machines. All of them will have a service account.
func NewProject(t testing.TB) *Project {
	t.Helper()
	a, err := attesttest.New()
	if err != nil {
		t.Fatal(err)
	}
	c, err := gcptest.New(func(p string) { t.Error(p) }, gcptest.Options{
		Fleet: &wire.Records{}, WorkerAccounts: true, Attributes: map[string]string{gcp.AttributeLoadBalancer: LoadBalancer},
	})
	if err != nil {
		t.Fatal(err)
	}
	return &Project{Cloud: c, Authority: a, t: t, image: c.AddImage("one", "v1.1.0")}
}

// certificates serve the certificate of an authority at attesttest.Address, and nothing else.
type certificates struct{ a *attesttest.Authority }

// RoundTrip implements http.RoundTripper.
func (c certificates) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.String() != attesttest.Address {
		return nil, fmt.Errorf("no server at %s", r.URL)
	}
	return &http.Response{StatusCode: http.StatusOK, Status: "200 OK", Body: io.NopCloser(bytes.NewReader(c.a.Intermediate.Raw)), Request: r}, nil
}

// Roots are the trust roots of the project.
func (p *Project) Roots() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(p.Authority.Root)
	return pool
}

// Boot is what machines of a Project measure.
func Boot() []attestation.MeasuredEvent {
	event := func(pcr uint32, data string) attestation.MeasuredEvent {
		h := sha256.Sum256([]byte(data))
		return attestation.MeasuredEvent{PCR: pcr, Digest: h[:], Description: data}
	}
	return []attestation.MeasuredEvent{
		event(0, "GCE Virtual Firmware v1"), event(7, string(attesttest.SecureBoot(true))), event(7, "db"), event(4, "shim"),
		event(8, "grub_cmd: linux /vmlinuz"), event(9, "vmlinuz"), event(14, "MokList"),
	}
}

// Measurements are those of Boot.
func Measurements() attestation.Measurements {
	all := attestation.PredictPCRs(Boot())
	return attestation.Enforced(map[uint32][]byte{4: all[4], 8: all[8], 9: all[9]})
}

// Group adds a group without machines to the cluster with a UID. It returns its ID.
func (p *Project) Group(name string, role cloud.Role, uid string) string {
	return p.AddGroup(gcptest.Zones[0], name, role, p.image, uid, nil)
}

// VM is a machine of a Project.
type VM struct {
	// Certified is what the certificate of its TPM says.
	Certified attesttest.Machine
	Key       string // cloud.Key
	TPM       string // address
	View      *gcp.Machine

	p *Project
}

// Start starts a machine of a group, which boots. Unless change is nil, it edits the certificate of its TPM before it is signed,
// and what that says about the machine.
func (p *Project) Start(group string, change func(*attesttest.Machine, *x509.Certificate)) *VM {
	p.t.Helper()
	v := &VM{p: p, Key: p.Seed(group, 1)[0]}
	id, number := cloud.SplitKey(v.Key)
	project, zone, name, _ := gcp.ParseProviderID(id)
	v.Certified = attesttest.Machine{Project: project, Zone: zone, Name: name, ProjectNumber: projectNumber}
	var err error
	if v.Certified.Number, err = strconv.ParseUint(number, 10, 64); err != nil {
		p.t.Fatal(err)
	}
	template := attesttest.Template(v.Certified)
	if change != nil {
		edited := v.Certified
		change(&edited, template)
		if edited != v.Certified {
			v.Certified, template = edited, attesttest.Template(edited)
		}
	}
	v.TPM, _ = swtpm.Start(p.t)
	if err := errors.Join(
		p.Authority.ProvisionTemplate(p.t.Context(), v.TPM, template, false),
		attestationtest.Measure(p.t.Context(), v.TPM, attestation.EventLogPath(v.TPM), Boot()),
		attestationtest.HandOver(p.t.Context(), v.TPM),
	); err != nil {
		p.t.Fatal(err)
	}
	v.View = p.ViewOf(p.MetadataOf(name))
	return v
}

// ViewOf returns the view of a machine that has a metadata server. The API is that of the project.
func (p *Project) ViewOf(metadata http.Handler) *gcp.Machine {
	mux := http.NewServeMux()
	mux.Handle(gcp.ComputePath, p.Cloud)
	mux.Handle("/", metadata)
	s := httptest.NewServer(mux)
	p.t.Cleanup(s.Close)
	return gcp.NewMachine(gcp.EmulatorAddress(s.URL, s.URL), "")
}

// Method is that of programs on the machine.
func (v *VM) Method() attestation.Method { return v.p.MethodOf(v.View) }

// MethodOf is that of programs on a machine with a view of its cluster.
func (p *Project) MethodOf(view *gcp.Machine) attestation.Method {
	return attest.Method(attest.Config{HTTP: &http.Client{Transport: certificates{p.Authority}}, Cluster: func(ctx context.Context) (attest.Cluster, error) {
		l, err := view.Lookup(ctx)
		if err != nil {
			return attest.Cluster{}, err
		}
		return attest.Cluster{Project: l.Project, UID: l.UID, Instances: l}, nil
	}})
}

// Issuer makes the evidence of the machine.
func (v *VM) Issuer() attestation.Issuer { return v.Method().Issuer(v.TPM) }

// Instance is the machine as its metadata describe it.
func (v *VM) Instance() cloud.Instance {
	v.p.t.Helper()
	i, err := v.View.Self(v.p.t.Context())
	if err != nil {
		v.p.t.Fatal(err)
	}
	return i
}

// Identity is the machine as evidence states it.
func (v *VM) Identity() attestation.Identity {
	v.p.t.Helper()
	i := v.Instance()
	return attestation.Identity{Name: i.Name, ProviderID: i.ProviderID, Incarnation: i.Incarnation, UID: gcptest.UID, Group: i.Group, Role: i.Role, IP: i.IP}
}

// Join makes the machine a member of a cluster.
func (v *VM) Join(clusterID []byte) {
	v.p.t.Helper()
	if err := attestation.ExtendClusterID(v.p.t.Context(), v.TPM, clusterID); err != nil {
		v.p.t.Fatal(err)
	}
}

// Measure extends a register of the machine's TPM.
func (v *VM) Measure(register uint32, data string) {
	v.p.t.Helper()
	h := sha256.Sum256([]byte(data))
	err := attestationtest.Measure(v.p.t.Context(), v.TPM, attestation.EventLogPath(v.TPM), []attestation.MeasuredEvent{{PCR: register, Digest: h[:], Description: data}})
	if err != nil {
		v.p.t.Fatal(err)
	}
}

// Rewrite serves the answers of a server with a text in the place of another one, as a metadata server that lies does.
func Rewrite(server http.Handler, from, to string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer := httptest.NewRecorder()
		server.ServeHTTP(answer, r)
		for key, values := range answer.Header() {
			w.Header()[key] = values
		}
		w.Header().Del("Content-Length")
		w.WriteHeader(answer.Code)
		_, _ = w.Write(bytes.ReplaceAll(answer.Body.Bytes(), []byte(from), []byte(to))) // the client may be gone
	})
}
