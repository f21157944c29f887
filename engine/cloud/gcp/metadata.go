package gcp

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"cloud.google.com/go/auth"
	"cloud.google.com/go/auth/httptransport"

	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/api"
	"constellation/engine/cloud/gcp/metadata"
)

// Metadata of machines, which the templates of their groups have beside the labels of the same names.
const (
	// AttributeZones are the zones of the cluster, separated by spaces. Without it, all machines are in one zone.
	AttributeZones = "constellation-zones"
	// AttributeLoadBalancer is the host of the load balancer in front of the control planes.
	AttributeLoadBalancer = "constellation-load-balancer"
	// AttributeInitSecretHash is the SHA-256 of the init secret in hex.
	AttributeInitSecretHash = "constellation-init-secret-hash"
	// AttributeCloudProvider is External if a cloud controller manager initializes the Nodes of the cluster.
	AttributeCloudProvider = "constellation-cloud-provider"
	// External is the value of AttributeCloudProvider, and of the kubelet's flag.
	External = "external"
)

// DefaultMetadata is the address of the metadata server of every machine.
const DefaultMetadata = metadata.Default

// ComputePath is the path of the API of Compute Engine, and DefaultEndpoint its URL.
const (
	ComputePath     = metadata.ComputePath
	DefaultEndpoint = "https://compute.googleapis.com" + ComputePath
)

// server is a metadata server.
type server struct{ metadata.Server }

// EmulatorAddress returns the address of an emulated metadata server, for the views of a machine.
func EmulatorAddress(metadata, compute string) string {
	return metadata + "?compute=" + compute + ComputePath
}

// Token returns a token of the account of the machine. It implements auth.TokenProvider.
func (s server) Token(ctx context.Context) (*auth.Token, error) {
	b, err := s.Get(ctx, "instance/service-accounts/default/token?scopes="+url.QueryEscape(api.Scope))
	if errors.Is(err, cloud.ErrNotFound) {
		return nil, &api.Error{
			Op: "find credentials", Kind: cloud.ErrDenied, Message: "the machine has no service account", Remedy: "add a service account to a new template of the group, and replace the machine",
		}
	}
	if err != nil {
		return nil, err
	}
	var t struct {
		AccessToken string `json:"access_token"`
		ExpiresIn   int    `json:"expires_in"`
		TokenType   string `json:"token_type"`
	}
	if err := json.Unmarshal([]byte(b), &t); err != nil || t.AccessToken == "" || t.ExpiresIn <= 0 {
		return nil, fmt.Errorf("read the token of the machine's account: %w: the metadata server sent none", cloud.ErrUnavailable)
	}
	return &auth.Token{Value: t.AccessToken, Type: t.TokenType, Expiry: time.Now().Add(time.Duration(t.ExpiresIn) * time.Second)}, nil
}

// client returns a client with the account of the machine, or of the user of an emulator.
func (s server) client() (*http.Client, error) {
	c := &http.Client{Transport: s.Transport}
	if s.Compute == "" {
		c.Transport = http.DefaultTransport // it follows the proxy of the environment
	}
	err := httptransport.AddAuthorizationMiddleware(c, auth.NewCredentials(&auth.CredentialsOptions{TokenProvider: auth.NewCachedTokenProvider(s, nil)}))
	return c, err
}

// self is the metadata of a machine.
type self struct {
	ID                json.Number       `json:"id"`
	Name              string            `json:"name"`
	Zone              string            `json:"zone"`
	Image             string            `json:"image"`
	Attributes        map[string]string `json:"attributes"`
	NetworkInterfaces []struct {
		IP        string   `json:"ip"`
		IPAliases []string `json:"ipAliases"`
	} `json:"networkInterfaces"`

	project string
}

// self reads the metadata of the machine.
func (s server) self(ctx context.Context) (self, error) {
	var out self
	b, err := s.Get(ctx, "instance/?recursive=true")
	if err != nil {
		return out, err
	}
	if err := json.Unmarshal([]byte(b), &out); err != nil {
		return out, fmt.Errorf("read metadata of the machine: %w", err)
	}
	project, err := s.Get(ctx, "project/project-id")
	if err != nil {
		return out, err
	}
	out.project = project
	if !segment.MatchString(out.project) || !segment.MatchString(out.Name) || !segment.MatchString(base(out.Zone)) || out.ID == "" {
		return out, fmt.Errorf("read metadata of the machine: project %q, zone %q, name %q or ID %q is not valid", out.project, base(out.Zone), out.Name, out.ID)
	}
	for _, name := range []string{LabelUID, LabelRole, "created-by"} {
		if out.Attributes[name] == "" {
			return out, fmt.Errorf("read metadata of the machine: attribute %s is missing, which the template of its group needs: %w", name, cloud.ErrNotFound)
		}
	}
	return out, nil
}

// zones returns the zones of the cluster.
func (m self) zones() []string {
	if zones := strings.Fields(m.Attributes[AttributeZones]); len(zones) > 0 {
		return zones
	}
	return []string{base(m.Zone)}
}

// instance returns the machine.
func (m self) instance() (cloud.Instance, error) {
	by := m.Attributes["created-by"]
	i := cloud.Instance{
		Name: m.Name, ProviderID: ProviderID(m.project, base(m.Zone), m.Name), Incarnation: m.ID.String(), Group: GroupID(m.project, base(m.Zone), base(by)),
		Role: cloud.Role(m.Attributes[LabelRole]), State: cloud.Ready, Image: path(m.Image),
	}
	if !i.Role.Valid() {
		return i, fmt.Errorf("read metadata of the machine: attribute %s is %q, want %s or %s", LabelRole, i.Role, cloud.ControlPlane, cloud.Worker)
	}
	if i.CloudProvider = m.Attributes[AttributeCloudProvider]; i.CloudProvider != "" && i.CloudProvider != External {
		return i, fmt.Errorf("read metadata of the machine: attribute %s is %q, want %s or none", AttributeCloudProvider, i.CloudProvider, External)
	}
	i.Token = tokenIn(m.Name)
	if len(m.NetworkInterfaces) == 0 {
		return i, errors.New("read metadata of the machine: it has no network interface")
	}
	nic := m.NetworkInterfaces[0]
	var err error
	if i.IP, err = netip.ParseAddr(nic.IP); err != nil {
		return i, fmt.Errorf("read metadata of the machine: %w", err)
	}
	if len(nic.IPAliases) > 0 {
		i.PodCIDR, _ = netip.ParsePrefix(nic.IPAliases[0]) // invalid: a single address, which is no range of pods
	}
	return i, nil
}

// Machine is the view that a machine has of itself and of its cluster. It implements providers.Metadata and
// providers.Control, and is safe for concurrent use. Peers, and the methods of Control, need the account of the machine.
type Machine struct {
	server server

	mu    sync.Mutex
	cloud *Cloud
}

// NewMachine returns the view of the machine whose metadata server has an address; empty: DefaultMetadata. It sends
// nothing yet. compute is the endpoint of Compute Engine; empty: that of the address.
func NewMachine(address, compute string) *Machine {
	s := server{metadata.Open(address)}
	s.Compute = cmp.Or(compute, s.Compute)
	return &Machine{server: s}
}

// Self implements providers.Metadata.
func (m *Machine) Self(ctx context.Context) (cloud.Instance, error) {
	me, err := m.server.self(ctx)
	if err != nil {
		return cloud.Instance{}, err
	}
	return me.instance()
}

// LoadBalancer implements providers.Metadata.
func (m *Machine) LoadBalancer(ctx context.Context) (string, error) {
	return m.server.Get(ctx, "instance/attributes/"+AttributeLoadBalancer)
}

// InitSecretHash implements providers.Metadata.
func (m *Machine) InitSecretHash(ctx context.Context) ([]byte, error) {
	b, err := m.server.Get(ctx, "instance/attributes/"+AttributeInitSecretHash)
	if err != nil {
		return nil, err
	}
	sum, err := hex.DecodeString(b)
	if err != nil || len(sum) != sha256.Size {
		return nil, fmt.Errorf("read metadata %s: it has %d characters, want %d bytes in hex", AttributeInitSecretHash, len(b), sha256.Size)
	}
	return sum, nil
}

// Peers implements providers.Metadata.
func (m *Machine) Peers(ctx context.Context) ([]cloud.Instance, error) { return m.Instances(ctx) }

// open returns Compute Engine for the cluster of the machine.
func (m *Machine) open(ctx context.Context) (*Cloud, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.cloud != nil {
		return m.cloud, nil
	}
	me, err := m.server.self(ctx)
	if err != nil {
		return nil, err
	}
	client, err := m.server.client()
	if err != nil {
		return nil, fmt.Errorf("open Google Cloud: %w", err)
	}
	// The client outlives this call.
	c, err := New(context.WithoutCancel(ctx), Options{Project: me.project, UID: me.Attributes[LabelUID], Zones: me.zones(), Endpoint: m.server.Compute, HTTP: client})
	if err == nil {
		m.cloud = c
	}
	return c, err
}

// with calls f with Compute Engine.
func with[T any](ctx context.Context, m *Machine, f func(*Cloud) (T, error)) (T, error) {
	c, err := m.open(ctx)
	if err != nil {
		var none T
		return none, err
	}
	return f(c)
}

// Groups implements providers.Control.
func (m *Machine) Groups(ctx context.Context) ([]cloud.Group, error) {
	return with(ctx, m, func(c *Cloud) ([]cloud.Group, error) { return c.Groups(ctx) })
}

// Instances implements providers.Control.
func (m *Machine) Instances(ctx context.Context) ([]cloud.Instance, error) {
	return with(ctx, m, func(c *Cloud) ([]cloud.Instance, error) { return c.Instances(ctx) })
}

// Instance implements providers.Control.
func (m *Machine) Instance(ctx context.Context, key string) (cloud.Instance, error) {
	return with(ctx, m, func(c *Cloud) (cloud.Instance, error) { return c.Instance(ctx, key) })
}

// Describe returns those of the machines that exist, as [Cloud.Describe] does.
func (m *Machine) Describe(ctx context.Context, keys []string) ([]cloud.Instance, error) {
	return with(ctx, m, func(c *Cloud) ([]cloud.Instance, error) { return c.Describe(ctx, keys) })
}

// SetGroupImage implements providers.Control.
func (m *Machine) SetGroupImage(ctx context.Context, groupID, image string) error {
	_, err := with(ctx, m, func(c *Cloud) (struct{}, error) { return struct{}{}, c.SetGroupImage(ctx, groupID, image) })
	return err
}

// CreateInstances implements providers.Control.
func (m *Machine) CreateInstances(ctx context.Context, groupID string, tokens []string) ([]cloud.Instance, error) {
	return with(ctx, m, func(c *Cloud) ([]cloud.Instance, error) { return c.CreateInstances(ctx, groupID, slices.Clone(tokens)) })
}

// DeleteInstances implements providers.Control.
func (m *Machine) DeleteInstances(ctx context.Context, keys []string) error {
	_, err := with(ctx, m, func(c *Cloud) (struct{}, error) { return struct{}{}, c.DeleteInstances(ctx, keys) })
	return err
}

// NewEmulator returns a client of an emulator, whose socket has a path. The metadata server at that socket has the credentials.
func NewEmulator(ctx context.Context, socket string, o Options) (*Cloud, error) {
	s := server{metadata.Open("unix:" + socket)}
	client, err := s.client()
	if err != nil {
		return nil, fmt.Errorf("open the emulator of Google Cloud: %w", err)
	}
	o.Endpoint, o.HTTP = s.Compute, client
	return New(ctx, o)
}
