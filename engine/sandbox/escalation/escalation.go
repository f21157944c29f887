// Package escalation tests for privilege escalation: it tries to turn the rights of one identity in
// a cluster into those of another. It verifies the admission policies of chart
// constellation-policies and the roles of our services.
//
// For each subject (our ServiceAccounts, a worker's kubelet, a bootstrap token, holders of the
// built-in roles in our namespaces, our published ClusterRoles) it makes each attempt of a list:
// workloads under another account, shells in running pods, tokens, impersonation, certificates,
// webhooks, roles, Nodes, our kinds, and ConfigMaps that control us. An attempt that the API server
// would carry out is a finding. Attempts are dry runs wherever the API server supports them, so a
// production cluster is not changed, except for a few objects that [Run] removes again.
package escalation

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"
)

// Namespaces of our services. Their contents have rights that their neighbours lack.
const (
	System  = "constellation-system"
	Upgrade = "system-upgrade"
)

// Subject is an identity that an attacker is assumed to have.
type Subject struct {
	Name   string // for people, such as "kubelet of worker-1"
	User   string // name in the API server
	Groups []string
	Extra  map[string][]string
	// Purpose lists the attempts that are part of the subject's purpose and may succeed, each with the
	// reason.
	Purpose map[string]string
}

// Finding is an attempt that the API server would carry out.
type Finding struct {
	Subject, Attempt string
	Status           int // of HTTP
}

// String implements fmt.Stringer.
func (f Finding) String() string {
	return fmt.Sprintf("%s: %s (HTTP %d)", f.Subject, f.Attempt, f.Status)
}

// Cluster is the target of the attempts. All fields are required.
type Cluster struct {
	// Admin is the access of an administrator who may impersonate all others.
	Admin *rest.Config
	// ControlPlane and Worker are names of existing Nodes.
	ControlPlane, Worker string
	// TokenGroup is the group of bootstrap tokens.
	TokenGroup string

	workerUID string // of the Node
}

// attempt is one request.
type attempt struct {
	name   string
	method string
	path   string
	query  string // besides dryRun
	body   any
	patch  string // content type of a patch; empty: JSON
	wet    bool   // without dry run: the API server does not support it here, and the request changes nothing
	// connect marks requests that reach the kubelet when they are admitted: every response except
	// a refusal means success.
	connect bool
	// asked returns whether the response to a review is positive; nil: the status decides.
	asked func([]byte) bool
}

const (
	merge = "application/merge-patch+json"
	// concurrent requests at a time.
	concurrent = 8
	maxAnswer  = 1 << 20
)

// Run makes all attempts and returns those that succeed outside the subject's purpose, in the
// order of subjects and attempts. tried is the number of attempts.
func Run(ctx context.Context, c Cluster) (findings []Finding, tried int, err error) {
	admin, err := transport(c.Admin)
	if err != nil {
		return nil, 0, err
	}
	status, answer, err := admin.do(ctx, http.MethodGet, "/api/v1/nodes/"+c.Worker, "", "", nil)
	var node struct{ Metadata struct{ UID string } }
	if err != nil {
		return nil, 0, fmt.Errorf("%w: read Node %s: %w", errPrepare, c.Worker, err)
	}
	if status != http.StatusOK || json.Unmarshal(answer, &node) != nil {
		return nil, 0, fmt.Errorf("%w: read Node %s: HTTP %d %.300s", errPrepare, c.Worker, status, answer)
	}
	c.workerUID = node.Metadata.UID
	undo, err := prepare(ctx, admin, c)
	defer undo()
	if err != nil {
		return nil, 0, err
	}
	subjects, attempts := Subjects(c), attemptsOn(c)
	results := make([][]Finding, len(subjects))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(concurrent)
	for i, s := range subjects {
		cfg := rest.CopyConfig(c.Admin)
		cfg.Impersonate = rest.ImpersonationConfig{UserName: s.User, Groups: s.Groups, Extra: s.Extra}
		as, err := transport(cfg)
		if err != nil {
			return nil, 0, err
		}
		g.Go(func() error {
			for _, a := range attempts {
				if s.Purpose[a.name] != "" {
					continue
				}
				status, reached, err := as.try(gctx, a)
				if err != nil {
					return fmt.Errorf("try %q as %s: %w", a.name, s.Name, err)
				}
				if reached {
					results[i] = append(results[i], Finding{s.Name, a.name, status})
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, 0, err
	}
	return slices.Concat(results...), len(subjects) * len(attempts), nil
}

// caller makes requests as one subject.
type caller struct {
	client *http.Client
	host   *url.URL
}

func transport(cfg *rest.Config) (*caller, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.QPS, cfg.Burst = -1, -1
	h, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("connect to API server: %w", err)
	}
	u, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("connect to API server: %w", err)
	}
	return &caller{h, u}, nil
}

// do makes a request and returns status and body of the response.
func (c *caller) do(ctx context.Context, method, path, query, contentType string, body any) (int, []byte, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return 0, nil, err
	}
	if body == nil {
		b = nil
	}
	u := *c.host
	u.Path, u.RawQuery = path, query
	req, err := http.NewRequestWithContext(ctx, method, u.String(), bytes.NewReader(b))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Accept", "application/json")
	if contentType == "" {
		contentType = "application/json"
	}
	req.Header.Set("Content-Type", contentType)
	resp, err := c.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	return resp.StatusCode, answer, err
}

func (c *caller) try(ctx context.Context, a attempt) (status int, reached bool, err error) {
	query := a.query
	if !a.wet && a.method != http.MethodGet {
		query = strings.TrimPrefix(query+"&dryRun=All", "&")
	}
	status, answer, err := c.do(ctx, a.method, a.path, query, a.patch, a.body)
	if err != nil {
		return 0, false, err
	}
	switch {
	case a.connect:
		return status, status != http.StatusForbidden && status != http.StatusUnauthorized && !bytes.Contains(answer, []byte("ValidatingAdmissionPolicy")), nil
	case a.asked != nil:
		return status, status/100 == 2 && a.asked(answer), nil
	}
	return status, status/100 == 2, nil
}

// errPrepare is wrapped when the objects for the attempts cannot be created.
var errPrepare = errors.New("prepare attempts")
