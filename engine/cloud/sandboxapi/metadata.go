package sandboxapi

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/netip"

	"constellation/engine/cloud"
)

// DefaultMetadata is where a machine finds its cloud.
const DefaultMetadata = "http://169.254.169.254"

// Answers of the metadata server, by path.
type (
	// Peers answers /v1/peers. /v1/self is a cloud.Instance.
	Peers struct {
		Instances []cloud.Instance `json:"instances"`
	}
	// LoadBalancer answers /v1/loadbalancer.
	LoadBalancer struct {
		Host string `json:"host"`
	}
	// InitSecretHash answers /v1/initsecrethash.
	InitSecretHash struct {
		SHA256 string `json:"sha256"` // hex
	}
	// PodCIDR answers /v1/podcidr.
	PodCIDR struct {
		CIDR netip.Prefix `json:"cidr"`
	}
	// Token answers /v1/token.
	Token struct {
		Token string `json:"token"`
	}
)

// Metadata asks the cloud about the machine that it runs on. It is safe for
// concurrent use.
type Metadata struct{ endpoint }

// NewMetadata returns a client of the metadata server at baseURL; "" means
// [DefaultMetadata].
func NewMetadata(baseURL string) *Metadata {
	if baseURL == "" {
		baseURL = DefaultMetadata
	}
	return &Metadata{newEndpoint(baseURL, "")}
}

func (m *Metadata) get(ctx context.Context, path string, out any) error {
	if err := m.call(ctx, http.MethodGet, path, nil, nil, out); err != nil {
		return fmt.Errorf("read metadata %s: %w", path, err)
	}
	return nil
}

// Self returns the instance that asks.
func (m *Metadata) Self(ctx context.Context) (cloud.Instance, error) {
	var i cloud.Instance
	err := m.get(ctx, "/v1/self", &i)
	return i, err
}

// Peers returns all instances of the sandbox, the asking one included. The list
// may be behind by a machine that has just come or gone.
func (m *Metadata) Peers(ctx context.Context) ([]cloud.Instance, error) {
	var p Peers
	err := m.get(ctx, "/v1/peers", &p)
	return p.Instances, err
}

// LoadBalancer returns the host, without a port, of the load balancer in front of
// the control planes. It listens on 6443, 9000 and 30090.
func (m *Metadata) LoadBalancer(ctx context.Context) (string, error) {
	var lb LoadBalancer
	if err := m.get(ctx, "/v1/loadbalancer", &lb); err != nil {
		return "", err
	}
	if lb.Host == "" {
		return "", errors.New("read metadata /v1/loadbalancer: empty host")
	}
	return lb.Host, nil
}

// InitSecretHash returns the SHA-256 of the 32 raw bytes of the init secret. The
// secret itself is known to the owner of the sandbox alone.
func (m *Metadata) InitSecretHash(ctx context.Context) ([]byte, error) {
	var h InitSecretHash
	if err := m.get(ctx, "/v1/initsecrethash", &h); err != nil {
		return nil, err
	}
	b, err := hex.DecodeString(h.SHA256)
	if err != nil || len(b) != sha256.Size {
		return nil, fmt.Errorf("read metadata /v1/initsecrethash: want %d bytes in hex", sha256.Size)
	}
	return b, nil
}

// PodCIDR returns the range of all pods of the cluster. The part that the cloud
// routes to this machine is in [Metadata.Self].
func (m *Metadata) PodCIDR(ctx context.Context) (netip.Prefix, error) {
	var p PodCIDR
	if err := m.get(ctx, "/v1/podcidr", &p); err != nil {
		return netip.Prefix{}, err
	}
	if !p.CIDR.IsValid() {
		return netip.Prefix{}, errors.New("read metadata /v1/podcidr: no range")
	}
	return p.CIDR, nil
}

// Token returns the bearer token of the control API. Only control planes get one;
// for a worker the error wraps cloud.ErrDenied.
func (m *Metadata) Token(ctx context.Context) (string, error) {
	var t Token
	if err := m.get(ctx, "/v1/token", &t); err != nil {
		return "", err
	}
	if t.Token == "" {
		return "", errors.New("read metadata /v1/token: empty token")
	}
	return t.Token, nil
}
