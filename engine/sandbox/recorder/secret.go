package recorder

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"constellation/engine/cloud"
	"constellation/internal/delay"
)

const (
	// secretNamespace has the Secrets that are read.
	secretNamespace = "default"
	// secretKey is the key of their content.
	secretKey = "value"
	// encryptedPrefix begins values that an API server stored with KMS v2.
	encryptedPrefix = "k8s:enc:kms:v2:"
)

// NewSecret returns a Secret that [Recorder.ReadSecret] can read.
func NewSecret(name string, content []byte) *corev1.Secret {
	s := &corev1.Secret{Data: map[string][]byte{secretKey: content}}
	s.Namespace, s.Name = secretNamespace, name
	return s
}

// ReadSecret records how each control plane returns a Secret, and how its etcd stores it. It tries again until all
// control planes have answered or ctx ends.
func (r *Recorder) ReadSecret(ctx context.Context, name string) {
	for {
		s := r.readSecret(ctx, name)
		failed := slices.ContainsFunc(s.On, func(c SecretOn) bool { return c.Err != "" })
		if len(s.On) > 0 && !failed || !delay.For(ctx, Poll) {
			r.add(Entry{Fact: s})
			return
		}
	}
}

func (r *Recorder) readSecret(ctx context.Context, name string) *Secret {
	s := &Secret{Name: name}
	list, err := r.cloud(ctx)
	if err != nil || r.cfg.Host == nil {
		return s
	}
	slices.SortFunc(list, func(a, b cloud.Instance) int { return strings.Compare(a.Name, b.Name) })
	for _, i := range list {
		if i.Role != cloud.ControlPlane || i.State == cloud.Terminating || i.State == cloud.Terminated {
			continue
		}
		on := SecretOn{Node: i.Name}
		if on.Sum, err = r.secretOf(ctx, i.IP, name); err == nil {
			on.Stored, err = r.storedBy(ctx, i, name)
		}
		if err != nil {
			on.Err = err.Error()
		}
		s.On = append(s.On, on)
	}
	return s
}

// secretOf returns the SHA-256 of a Secret's content, as the API server of a control plane returns it.
func (r *Recorder) secretOf(ctx context.Context, ip netip.Addr, name string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	fail := func(err error) (string, error) { return "", fmt.Errorf("read Secret %s: %w", name, err) }
	t, err := rest.TLSConfigFor(r.cfg.Cluster)
	if err != nil {
		return fail(err)
	}
	// The load balancer would select an API server.
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: t, DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return r.cfg.Host.Dial(ctx, network, netip.AddrPortFrom(ip, apiServerPort).String())
	}}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.cfg.Cluster.Host+"/api/v1/namespaces/"+secretNamespace+"/secrets/"+name, nil)
	if err != nil {
		return fail(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		return fail(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fail(errors.New(resp.Status))
	}
	var s corev1.Secret
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&s); err != nil {
		return fail(errors.New("the answer is no Secret")) // the cause would quote it
	}
	sum := sha256.Sum256(s.Data[secretKey])
	return hex.EncodeToString(sum[:]), nil
}

// apiServerPort is the port of the API server of a control plane.
const apiServerPort = 6443

// storedBy returns how the etcd member of a control plane stores a Secret; see [SecretOn].
func (r *Recorder) storedBy(ctx context.Context, i cloud.Instance, name string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	fail := func(err error) (string, error) { return "", fmt.Errorf("read Secret %s in etcd: %w", name, err) }
	identity, err := r.identity(ctx, i.Name)
	if err != nil {
		return fail(err)
	}
	c, err := r.connect(ctx, identity, i.IP)
	if err != nil {
		return fail(err)
	}
	defer c.Close()
	got, err := c.Get(ctx, "/registry/secrets/"+secretNamespace+"/"+name, clientv3.WithSerializable()) // of this member
	if err != nil {
		return fail(err)
	}
	if len(got.Kvs) != 1 {
		return fail(fmt.Errorf("%d values, want 1", len(got.Kvs)))
	}
	return storedAs(got.Kvs[0].Value), nil
}

// storedAs returns the beginning of a value of etcd that names its encryption.
func storedAs(value []byte) string {
	head, ok := bytes.CutPrefix(value, []byte(encryptedPrefix))
	if !ok {
		return "not encrypted"
	}
	provider, _, _ := bytes.Cut(head, []byte(":"))
	return encryptedPrefix + string(provider)
}
