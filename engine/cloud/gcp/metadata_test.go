package gcp_test

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/wire"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/gcptest"
)

const initSecret = "0123456789abcdef0123456789abcdef"

// machine is an emulated machine with its metadata server.
type emulatedMachine struct {
	*gcptest.Cloud
	key    string
	server *httptest.Server
	view   *gcp.Machine
}

// newMachine returns a machine of a group of a role, beside a worker in another zone.
func newMachine(t *testing.T, role cloud.Role) emulatedMachine {
	t.Helper()
	sum := sha256.Sum256([]byte(initSecret))
	c, err := gcptest.New(func(p string) { t.Error(p) }, gcptest.Options{Fleet: &wire.Records{}, Attributes: map[string]string{
		gcp.AttributeLoadBalancer: "lb.example.com", gcp.AttributeInitSecretHash: hex.EncodeToString(sum[:]),
	}})
	if err != nil {
		t.Fatal(err)
	}
	image := c.AddImage("one", "v1.0.0")
	c.Seed(c.AddGroup(gcptest.Zones[1], "workers", cloud.Worker, image, gcptest.UID, nil), 1)
	m := emulatedMachine{Cloud: c, key: c.Seed(c.AddGroup(zone, "first", role, image, gcptest.UID, nil), 1)[0]}
	id, _ := cloud.SplitKey(m.key)
	_, _, name, _ := gcp.ParseProviderID(id)
	mux := http.NewServeMux()
	mux.Handle("/compute/v1/", c)
	mux.Handle("/", c.MetadataOf(name))
	m.server = httptest.NewServer(mux)
	t.Cleanup(m.server.Close)
	m.view = gcp.NewMachine(gcp.EmulatorAddress(m.server.URL, m.server.URL), "")
	return m
}

func TestMachineReadsItsMetadata(t *testing.T) {
	t.Parallel()
	m := newMachine(t, cloud.ControlPlane)
	self, err := m.view.Self(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want, err := m.view.Instance(t.Context(), m.key)
	if err != nil {
		t.Fatal(err)
	}
	want.Created = time.Time{} // the metadata server does not have it
	if self != want {
		t.Errorf("the metadata have %+v\nCompute Engine has %+v", self, want)
	}
	peers, err := m.view.Peers(t.Context())
	if err != nil || len(peers) != 2 || !slices.ContainsFunc(peers, func(i cloud.Instance) bool { return i.Role == cloud.Worker }) {
		t.Errorf("peers %+v, %v", peers, err)
	}
	if host, err := m.view.LoadBalancer(t.Context()); err != nil || host != "lb.example.com" {
		t.Errorf("load balancer %q, %v", host, err)
	}
	sum := sha256.Sum256([]byte(initSecret))
	if b, err := m.view.InitSecretHash(t.Context()); err != nil || !slices.Equal(b, sum[:]) {
		t.Errorf("init secret hash %x, %v", b, err)
	}
}

// Templates of workers have no service account: workers need no rights in the cloud.
func TestWorkerHasNoRights(t *testing.T) {
	t.Parallel()
	m := newMachine(t, cloud.Worker)
	if self, err := m.view.Self(t.Context()); err != nil || self.Role != cloud.Worker {
		t.Errorf("self %+v, %v", self, err)
	}
	if _, err := m.view.Peers(t.Context()); !errors.Is(err, cloud.ErrDenied) || !strings.Contains(err.Error(), "add a service account") {
		t.Errorf("peers: %v", err)
	}
}

func TestMetadataDemandACloudProvider(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Metadata-Flavor", "Google")
		if strings.Contains(r.URL.Path, "project-id") {
			fmt.Fprint(w, "demo-project")
			return
		}
		fmt.Fprint(w, `{"id": 7, "name": "worker-1", "zone": "projects/1/zones/europe-west3-a", "networkInterfaces": [{"ip": "10.0.0.2"}],
			"attributes": {"created-by": "x/workers", "constellation-uid": "u", "constellation-role": "worker", "constellation-cloud-provider": "external"}}`)
	}))
	defer server.Close()
	if self, err := gcp.NewMachine(server.URL, "").Self(t.Context()); err != nil || self.CloudProvider != "external" {
		t.Errorf("self %+v, %v", self, err)
	}
}

func TestMetadataServersThatFail(t *testing.T) {
	t.Parallel()
	google := func(status int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Metadata-Flavor", "Google")
			w.WriteHeader(status)
			fmt.Fprint(w, body)
		}
	}
	machine := func(attributes string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Metadata-Flavor", "Google")
			if strings.Contains(r.URL.Path, "project-id") {
				fmt.Fprint(w, "demo-project")
				return
			}
			fmt.Fprintf(w, `{"id": 7, "name": "worker-1", "zone": "projects/1/zones/europe-west3-a", "attributes": {%s}, "networkInterfaces": [{"ip": "10.0.0.2"}]}`, attributes)
		}
	}
	for name, tt := range map[string]struct {
		serve http.HandlerFunc
		want  string
		is    error
	}{
		"never answers":              {serve: func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, want: "within 5s", is: cloud.ErrUnavailable},
		"is another server":          {serve: func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "{}") }, want: "no metadata server of Google", is: cloud.ErrUnavailable},
		"refuses":                    {serve: google(http.StatusForbidden, "Forbidden"), want: "Forbidden", is: cloud.ErrDenied},
		"fails":                      {serve: google(http.StatusInternalServerError, "boom"), want: "metadata instance/", is: cloud.ErrUnavailable},
		"has no machine":             {serve: google(http.StatusNotFound, ""), want: "metadata instance/", is: cloud.ErrNotFound},
		"sends no JSON":              {serve: google(http.StatusOK, "<html>"), want: "read metadata of the machine", is: nil},
		"has no cluster":             {serve: machine(`"created-by": "projects/1/zones/europe-west3-a/instanceGroupManagers/workers"`), want: "attribute constellation-uid is missing", is: cloud.ErrNotFound},
		"has an unknown role":        {serve: machine(`"created-by": "x/workers", "constellation-uid": "u", "constellation-role": "admin"`), want: `constellation-role is "admin", want control-plane or worker`, is: nil},
		"has another cloud provider": {serve: machine(`"created-by": "x/workers", "constellation-uid": "u", "constellation-role": "worker", "constellation-cloud-provider": "gce"`), want: `constellation-cloud-provider is "gce", want external or none`, is: nil},
		"has a machine of no group":  {serve: machine(`"constellation-uid": "u", "constellation-role": "worker"`), want: "attribute created-by is missing", is: cloud.ErrNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewServer(tt.serve)
			defer server.Close()
			_, err := gcp.NewMachine(server.URL, "").Self(t.Context())
			if err == nil || !strings.Contains(err.Error(), tt.want) || tt.is != nil && !errors.Is(err, tt.is) {
				t.Errorf("error is %v, want %q", err, tt.want)
			}
		})
	}
	t.Run("has a short hash", func(t *testing.T) {
		t.Parallel()
		server := httptest.NewServer(google(http.StatusOK, "abcd"))
		defer server.Close()
		if _, err := gcp.NewMachine(server.URL, "").InitSecretHash(t.Context()); err == nil || !strings.Contains(err.Error(), "has 4 characters, want 32 bytes in hex") {
			t.Errorf("error is %v", err)
		}
	})
}
