//go:build linux

package agent

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"sync"
	"time"

	"gopkg.in/yaml.v3"

	"constellation/engine/cloud/notice"
)

const (
	// noteTimeout bounds one request to the API server. A preempted machine has 30 s.
	noteTimeout = 5 * time.Second
	// noteAgainMin and noteAgainMax bound the pause after a failed request.
	noteAgainMin = 500 * time.Millisecond
	noteAgainMax = 30 * time.Second
	// maxNode bounds the description of a Node, in bytes.
	maxNode = 4 << 20
)

// announce writes what the cloud announces as a condition of the host's Node, until ctx ends.
func (s *Server) announce(ctx context.Context) {
	latest := make(chan notice.Notice, 1)
	var source sync.WaitGroup
	source.Go(func() {
		s.Notices(ctx, func(n notice.Notice) {
			select {
			case <-latest: // an older one, which was not written yet
			default:
			}
			latest <- n
		}, func(err error) { s.log.Warn("announcements of the cloud not read, will retry", "err", err) })
	})
	defer source.Wait()
	var (
		now   notice.Notice
		pause time.Duration
		again = time.NewTimer(0)
	)
	again.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now = <-latest:
			pause = noteAgainMin
			if now.Reason != "" {
				s.log.Warn("cloud announced a disruption", "reason", now.Reason, "within", now.Within)
			}
		case <-again.C:
			pause = min(2*pause, noteAgainMax)
		}
		switch changed, err := s.host.note(ctx, now); {
		case err != nil && ctx.Err() == nil:
			s.log.Warn("announcement of the cloud not written to the node, will retry", "reason", now.Reason, "err", err)
			again.Reset(pause)
		case changed:
			s.log.Info("announcement of the cloud written to the node", "reason", now.Reason)
		}
	}
}

// errNoCluster means that the host belongs to no cluster yet.
var errNoCluster = errors.New("the host belongs to no cluster")

// condition is a condition of a Node.
type condition struct {
	Type               string    `json:"type"`
	Status             string    `json:"status"`
	Reason             string    `json:"reason"`
	Message            string    `json:"message"`
	LastHeartbeatTime  time.Time `json:"lastHeartbeatTime"`
	LastTransitionTime time.Time `json:"lastTransitionTime"`
}

// note sets the condition of the host's Node. It reads the Node first, and writes nothing if the condition is set already, or
// if there is none and nothing is announced.
func (h Host) note(ctx context.Context, n notice.Notice) (changed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, noteTimeout)
	defer cancel()
	client, server, err := h.kubelet()
	if errors.Is(err, errNoCluster) && n.Reason == "" {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer client.CloseIdleConnections()
	name, err := h.nodeName()
	if err != nil {
		return false, err
	}
	at := server + "/api/v1/nodes/" + url.PathEscape(name)
	var node struct {
		Status struct {
			Conditions []condition `json:"conditions"`
		} `json:"status"`
	}
	b, err := ask(ctx, client, http.MethodGet, at, nil)
	if err != nil {
		return false, fmt.Errorf("read node %s: %w", name, err)
	}
	if err := json.Unmarshal(b, &node); err != nil {
		return false, fmt.Errorf("read node %s: %w", name, err)
	}
	now := time.Now().UTC().Truncate(time.Second)
	want := condition{Type: notice.Condition, Status: "True", Reason: string(n.Reason), Message: n.Text(), LastHeartbeatTime: now, LastTransitionTime: now}
	if n.Reason == "" {
		want.Status, want.Reason = "False", string(notice.Ended)
	}
	had := condition{Status: "False", Reason: string(notice.Ended)} // of a Node without the condition
	for _, c := range node.Status.Conditions {
		if c.Type == notice.Condition {
			had = c
		}
	}
	if had.Status == want.Status && had.Reason == want.Reason {
		return false, nil
	}
	b, err = json.Marshal(map[string]any{"status": map[string]any{"conditions": []condition{want}}})
	if err == nil {
		_, err = ask(ctx, client, http.MethodPatch, at+"/status", b)
	}
	if err != nil {
		return false, fmt.Errorf("set condition %s of node %s: %w", notice.Condition, name, err)
	}
	return true, nil
}

// ask sends one request to the API server and returns its answer.
func ask(ctx context.Context, client *http.Client, method, at string, patch []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, at, bytes.NewReader(patch))
	if err != nil {
		return nil, err
	}
	if patch != nil {
		req.Header.Set("Content-Type", "application/strategic-merge-patch+json")
	}
	res, err := client.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err // it repeats method and URL
		}
		return nil, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxNode))
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("the API server answered %s: %.200s", res.Status, b)
	}
	return b, err
}

// kubelet returns a client with the kubelet's identity, and the URL of the API server. The kubelet's certificate is read each
// time, because the kubelet renews it.
func (h Host) kubelet() (*http.Client, string, error) {
	const file = "etc/kubernetes/kubelet.conf"
	b, err := os.ReadFile(h.path(file))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "", errNoCluster
	}
	if err != nil {
		return nil, "", fmt.Errorf("read the kubelet's credentials: %w", err)
	}
	var conf struct {
		Clusters []struct {
			Cluster struct {
				Server      string `yaml:"server"`
				Authority   string `yaml:"certificate-authority-data"`
				AuthorityIn string `yaml:"certificate-authority"`
			} `yaml:"cluster"`
		} `yaml:"clusters"`
		Users []struct {
			User struct {
				Certificate   string `yaml:"client-certificate-data"`
				CertificateIn string `yaml:"client-certificate"`
				Key           string `yaml:"client-key-data"`
				KeyIn         string `yaml:"client-key"`
			} `yaml:"user"`
		} `yaml:"users"`
	}
	if yaml.Unmarshal(b, &conf) != nil || len(conf.Clusters) != 1 || len(conf.Users) != 1 { // its text may have a key
		return nil, "", fmt.Errorf("read the kubelet's credentials: %s is no kubeconfig of one cluster and one user", file)
	}
	cluster, user := conf.Clusters[0].Cluster, conf.Users[0].User
	authority, err1 := h.inline(cluster.Authority, cluster.AuthorityIn)
	certificate, err2 := h.inline(user.Certificate, user.CertificateIn)
	key, err3 := h.inline(user.Key, user.KeyIn)
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, "", fmt.Errorf("read the kubelet's credentials: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(authority) {
		return nil, "", fmt.Errorf("read the kubelet's credentials: %s has no certificate authority", file)
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil, "", fmt.Errorf("read the kubelet's credentials: %w", err)
	}
	return &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, Certificates: []tls.Certificate{pair}}, ForceAttemptHTTP2: true,
	}}, cluster.Server, nil
}

// inline returns data in base64, or the content of a file of the host.
func (h Host) inline(data, file string) ([]byte, error) {
	if data != "" {
		return base64.StdEncoding.DecodeString(data)
	}
	b, err := os.ReadFile(h.path(file))
	if errors.Is(err, fs.ErrNotExist) {
		return os.ReadFile(file) // machines of tests have no root of their own
	}
	return b, err
}
