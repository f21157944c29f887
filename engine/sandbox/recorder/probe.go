package recorder

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/engine/cloud"
	"constellation/engine/sandbox/machine"
	"constellation/internal/delay"
)

// probeTimeout is the timeout of a request to a service, the API server or a member.
const probeTimeout = 3 * time.Second

// probeFrom starts probes of the service from new machines, and ends those of
// deleted machines.
func (r *Recorder) probeFrom(ctx context.Context, list []cloud.Instance) {
	if r.cfg.Service == "" || r.cfg.Host == nil {
		return
	}
	there := map[string]bool{}
	for _, i := range list {
		if i.State != cloud.Ready {
			continue
		}
		there[i.Name] = true
		if r.probing[i.Name] != nil {
			continue
		}
		own, stop := context.WithCancel(ctx)
		r.probing[i.Name] = stop
		c := &http.Client{Timeout: probeTimeout, Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				// The transport keeps connecting for a canceled request.
				ctx, cancel := context.WithTimeout(ctx, probeTimeout)
				defer cancel()
				return r.cfg.Host.DialFrom(ctx, i.Name, network, address)
			},
		}}
		r.done.Go(func() { r.probe(own, c, i.Name, "http://"+r.cfg.Service+"/") })
	}
	for name, stop := range r.probing {
		if !there[name] {
			stop()
			delete(r.probing, name)
		}
	}
}

// probe requests a URL periodically, through a new connection each time.
func (r *Recorder) probe(ctx context.Context, c *http.Client, from, url string) {
	for ; ctx.Err() == nil; delay.For(ctx, Poll) {
		begun := time.Now()
		err := get(ctx, c, url)
		if ctx.Err() != nil {
			return
		}
		p := &Probe{From: from, TookMS: time.Since(begun).Milliseconds()}
		if err != nil {
			p.Err = err.Error()
		}
		r.add(Entry{Fact: p})
	}
}

func get(ctx context.Context, c *http.Client, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<20)); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// pollAPI polls the readiness of the API server.
func (r *Recorder) pollAPI(ctx context.Context, access *rest.Config) {
	t, err := rest.TLSConfigFor(access)
	if err != nil {
		r.cfg.Log.Warn("API server not probed", "err", err)
		return
	}
	c := &http.Client{Timeout: probeTimeout, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: t}}
	r.probe(ctx, c, "", access.Host+"/readyz")
}

// pollMembers polls the etcd members, at any control plane that answers.
func (r *Recorder) pollMembers(ctx context.Context) {
	var (
		identity *tls.Config // the same for all members
		at       string      // the last one that answered
		c        *clientv3.Client
		last     *Members
	)
	leave := func() {
		if c != nil {
			c.Close()
		}
		c, at = nil, ""
	}
	defer func() { leave() }()
	for ; ctx.Err() == nil; delay.For(ctx, 2*Poll) {
		list, err := r.cloud(ctx)
		if err != nil {
			continue
		}
		list = slices.DeleteFunc(list, func(i cloud.Instance) bool { return i.Role != cloud.ControlPlane || i.State != cloud.Ready })
		if at != "" && !slices.ContainsFunc(list, func(i cloud.Instance) bool { return i.Name == at }) {
			leave()
		}
		for _, i := range list {
			if at != "" && at != i.Name {
				continue
			}
			if identity == nil {
				if identity, err = r.identity(ctx, i.Name); err != nil {
					r.cfg.Log.Debug("certificates of etcd not read", "node", i.Name, "err", err)
					continue
				}
			}
			if c == nil {
				if c, err = r.connect(ctx, identity, i.IP); err != nil {
					r.cfg.Log.Debug("etcd not reached", "node", i.Name, "err", err)
					continue
				}
				at = i.Name
			}
			m, err := members(ctx, c)
			if err != nil {
				r.cfg.Log.Debug("members not listed", "node", i.Name, "err", err)
				leave()
				continue
			}
			if last == nil || !slices.Equal(m.List, last.List) {
				last = m
				r.add(Entry{Fact: m})
			}
			r.seen("members")
			break
		}
	}
}

// identity reads the client certificate of etcd's health check from a control plane.
func (r *Recorder) identity(ctx context.Context, node string) (*tls.Config, error) {
	read := func(name string) ([]byte, error) {
		var out, errs limited
		code, err := r.cfg.Host.Exec(ctx, node, []string{"cat", "etc/kubernetes/pki/etcd/" + name}, machine.Stdio{Out: &out, Err: &errs})
		if err == nil && code != 0 {
			err = fmt.Errorf("read %s: %s", name, errs.b)
		}
		return out.b, err
	}
	ca, err1 := read("ca.crt")
	cert, err2 := read("healthcheck-client.crt")
	key, err3 := read("healthcheck-client.key")
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, errors.New("no certificate in ca.crt")
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool, Certificates: []tls.Certificate{pair}}, nil
}

func (r *Recorder) connect(ctx context.Context, identity *tls.Config, ip netip.Addr) (*clientv3.Client, error) {
	address := netip.AddrPortFrom(ip, 2379).String()
	return clientv3.New(clientv3.Config{
		Endpoints: []string{"https://" + address}, TLS: identity, Context: ctx, DialTimeout: probeTimeout, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return r.cfg.Host.Dial(ctx, "tcp", address)
		})},
	})
}

func members(ctx context.Context, c *clientv3.Client) (*Members, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	l, err := c.MemberList(ctx) // linearizable
	if err != nil {
		return nil, err
	}
	m := &Members{}
	for _, e := range l.Members {
		m.List = append(m.List, member(e))
	}
	slices.SortFunc(m.List, func(a, b Member) int {
		switch {
		case a.Name < b.Name:
			return -1
		case a.Name > b.Name:
			return 1
		}
		return 0
	})
	return m, nil
}

func member(e *etcdserverpb.Member) Member {
	return Member{Name: e.GetName(), Learner: e.GetIsLearner()}
}

// limited keeps the beginning of an output.
type limited struct{ b []byte }

func (l *limited) Write(p []byte) (int, error) {
	if len(l.b) < 64<<10 {
		l.b = append(l.b, p...)
	}
	return len(p), nil
}

// eachItem calls f with every object of a list.
func eachItem(l client.ObjectList, f func(client.Object)) error {
	return meta.EachListItem(l, func(o runtime.Object) error {
		c, ok := o.(client.Object)
		if !ok {
			return fmt.Errorf("%T is no object", o)
		}
		f(c)
		return nil
	})
}
