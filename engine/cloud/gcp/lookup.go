package gcp

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	compute "google.golang.org/api/compute/v1"
	"google.golang.org/api/googleapi"

	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/api"
	"constellation/engine/cloud/gcp/metadata"
)

// Emulated reports whether the address of a metadata server is that of an emulator, which also names the endpoint of
// Compute Engine.
func Emulated(address string) bool { return metadata.Open(address).Compute != "" }

const (
	lookupTimeout = 10 * time.Second
	lookupFields  = "id,name,status,labels,metadata,networkInterfaces"
	maxMachine    = 1 << 20 // of a description, in bytes
)

// Lookup reads single machines of a cluster from Compute Engine, with the account of the machine that it runs on. It needs
// the permission compute.instances.get alone, so that workers need no other one. It is safe for concurrent use.
type Lookup struct {
	// Project and UID are those of the cluster.
	Project, UID string

	endpoint string
	http     *http.Client
	client   *api.Client
}

// Lookup returns a Lookup of the machine's cluster. Project and UID come from the metadata server: the caller must
// compare the project with what the evidence of this machine proves.
func (m *Machine) Lookup(ctx context.Context) (*Lookup, error) {
	me, err := m.server.self(ctx)
	if err != nil {
		return nil, err
	}
	client, err := m.server.client()
	if err != nil {
		return nil, fmt.Errorf("open Google Cloud: %w", err)
	}
	return &Lookup{Project: me.project, UID: me.Attributes[LabelUID], endpoint: cmp.Or(m.server.Compute, DefaultEndpoint), http: client, client: api.NewReader()}, nil
}

// Instance returns a machine of the cluster as it is now, without its image. The error wraps cloud.ErrNotFound if the cluster
// has none of this key.
func (l *Lookup) Instance(ctx context.Context, key string) (cloud.Instance, error) {
	project, zone, name, ok := ParseProviderID(key)
	if !ok || project != l.Project {
		return cloud.Instance{}, fmt.Errorf("machine %s: %w", key, cloud.ErrNotFound)
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	var m compute.Instance
	err := l.client.Read(ctx, "read machine "+name, func() error { return l.get(ctx, "projects/"+project+"/zones/"+zone+"/instances/"+name, &m) })
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("%w: %w", cloud.ErrUnavailable, err)
		}
		return cloud.Instance{}, err
	}
	if i, _, ours := describe(l.Project, l.UID, zone, &m); ours && m.Name == name && cloud.SameMachine(i.Key(), key) {
		return i, nil
	}
	return cloud.Instance{}, fmt.Errorf("machine %s: %w", key, cloud.ErrNotFound)
}

// get reads a resource into out. Its errors are those of Google's client.
func (l *Lookup) get(ctx context.Context, path string, out any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, l.endpoint+path+"?fields="+url.QueryEscape(lookupFields)+"&alt=json&prettyPrint=false", nil)
	if err != nil {
		return err
	}
	res, err := l.http.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if err := googleapi.CheckResponse(res); err != nil {
		return err
	}
	if err := json.NewDecoder(io.LimitReader(res.Body, maxMachine)).Decode(out); err != nil {
		return fmt.Errorf("read the answer of %s: %w", req.URL.Host, err)
	}
	return nil
}
