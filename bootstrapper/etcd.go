package bootstrapper

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"constellation/engine/cloud"
	"constellation/engine/kubeadm"
)

const (
	etcdPort = "2379"
	// etcdTimeout bounds one attempt to remove a member from etcd.
	etcdTimeout = 10 * time.Second
)

// memberDir is where etcd stores acknowledged data.
const memberDir = "var/lib/etcd/member"

// leaveEtcd removes this machine's member from etcd if an unfinished join left one with data,
// and waits until etcd has none. It runs before the data is deleted: `kubeadm reset` removes
// the member only if the cluster answers, but deletes the data in any case. A voter counts for
// the quorum without its data, so two members would have no quorum; and a member that returns
// empty has lost acknowledged data.
//
// The kubelet is started, since etcd may have no quorum without the member to remove. An error
// leaves the data and the kubelet unchanged.
func (c *JoinClient) leaveEtcd(ctx context.Context, self netip.Addr, say func(text string)) error {
	root, err := os.OpenRoot(cmp.Or(c.Root, "/"))
	if err != nil {
		return fmt.Errorf("open the host's file system: %w", err)
	}
	defer root.Close()
	if _, err := root.Stat(memberDir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	config, err := etcdAccess(root)
	if err != nil {
		return fmt.Errorf("read etcd client credentials: %w", err)
	}
	say("removing this machine's member from etcd")
	if err := c.StartKubelet(ctx); err != nil {
		return err
	}
	var p pause
	for told := ""; ; {
		err := c.removeMember(ctx, self, config)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("remove this machine's member from etcd: %w: %w", context.Cause(ctx), err)
		}
		if why := err.Error(); why != told {
			say("waiting for etcd to remove this machine's member: " + why)
			told = why
		}
		if err := c.pause(ctx, &p, 0, quietPause); err != nil {
			return err
		}
	}
}

// removeMember asks any member of etcd, including this machine's, to remove the one at self.
func (c *JoinClient) removeMember(ctx context.Context, self netip.Addr, config *tls.Config) error {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	endpoints := []string{self.String()}
	peers, err := c.Metadata.Peers(ctx)
	if err != nil {
		return fmt.Errorf("find control planes: %w", err)
	}
	for _, i := range peers {
		if i.Role == cloud.ControlPlane && i.IP.IsValid() && i.IP != self && !gone(i.State) {
			endpoints = append(endpoints, i.IP.String())
		}
	}
	for i := range endpoints {
		endpoints[i] = "https://" + net.JoinHostPort(endpoints[i], etcdPort)
	}
	e, err := clientv3.New(clientv3.Config{Endpoints: endpoints, Context: ctx, TLS: config, DialTimeout: dialTimeout, Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	defer e.Close()
	list, err := e.MemberList(ctx) // linearizable: confirmed by a quorum
	if err != nil {
		return err
	}
	i := slices.IndexFunc(list.Members, func(m *etcdserverpb.Member) bool {
		return slices.ContainsFunc(m.PeerURLs, func(s string) bool {
			u, err := url.Parse(s)
			return err == nil && u.Hostname() == self.String()
		})
	})
	if i < 0 {
		return nil
	}
	if _, err := e.MemberRemove(ctx, list.Members[i].ID); err != nil && !errors.Is(err, rpctypes.ErrMemberNotFound) {
		return err
	}
	return nil
}

// etcdAccess reads kubeadm's client credentials for etcd.
func etcdAccess(root *os.Root) (*tls.Config, error) {
	dir := strings.TrimPrefix(kubeadm.PKIDir, "/") + "/etcd/"
	ca, err := root.ReadFile(dir + "ca.crt")
	if err != nil {
		return nil, err
	}
	cert, err := root.ReadFile(dir + "healthcheck-client.crt")
	if err != nil {
		return nil, err
	}
	key, err := root.ReadFile(dir + "healthcheck-client.key")
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, errors.New("ca.crt holds no certificate")
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool, Certificates: []tls.Certificate{pair}}, nil
}
