package controlplanetest

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"constellation/engine/sandbox/controlplane"
)

// plane is a control plane with the content that it had at its start.
type plane struct {
	cp   *controlplane.ControlPlane
	core kubernetes.Interface
	etcd *clientv3.Client

	base   map[string]entry // etcd's keys
	served []string         // resources of all API groups
}

type entry struct {
	revision int64 // of the last change
	value    []byte
}

// late are the keys that an API server writes after it is ready.
var late = []string{
	"/registry/configmaps/kube-system/extension-apiserver-authentication",
	"/registry/configmaps/kube-system/kube-apiserver-legacy-service-account-token-tracking",
	"/registry/namespaces/default", "/registry/namespaces/kube-system", "/registry/namespaces/kube-public", "/registry/namespaces/kube-node-lease",
	"/registry/services/specs/default/kubernetes", "/registry/ipaddresses/10.96.0.1",
}

// isOwn reports whether the API server changes the key all the time: the leases of its identity.
func isOwn(key string) bool {
	return strings.HasPrefix(key, "/registry/leases/kube-system/apiserver-") || strings.HasPrefix(key, "/registry/peerserverleases/") || key == "compact_rev_key"
}

// begin connects, runs the setup and notes the content.
func (p *plane) begin(ctx context.Context, setup []Setup) error {
	var err error
	if p.core, err = kubernetes.NewForConfig(p.cp.Config()); err != nil {
		return err
	}
	if p.etcd, err = dial(p.cp); err != nil {
		return err
	}
	if err := poll(ctx, func() (bool, error) {
		now, err := p.keys(ctx)
		missing := slices.ContainsFunc(late, func(key string) bool { return now[key] == 0 })
		return !missing, err
	}); err != nil {
		return fmt.Errorf("await the API server's own objects: %w", err)
	}
	for _, s := range setup {
		if err := s.Run(ctx, p.cp); err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
	}
	// Controllers of the API server complete what was created.
	if err := poll(ctx, func() (bool, error) {
		if p.served, err = p.resources(ctx); err != nil {
			return false, err
		}
		all, err := p.etcd.Get(ctx, "", clientv3.WithPrefix())
		if err != nil {
			return false, err
		}
		p.base = make(map[string]entry, len(all.Kvs))
		for _, kv := range all.Kvs {
			p.base[string(kv.Key)] = entry{kv.ModRevision, kv.Value}
		}
		return p.complete(), nil
	}); err != nil {
		return fmt.Errorf("await completion of what was created: %w", err)
	}
	return nil
}

// complete reports whether the API server serves all definitions and has written the status of its own objects.
func (p *plane) complete() bool {
	for key, e := range p.base {
		dir, name := path.Split(strings.TrimPrefix(key, "/registry/"))
		switch dir {
		case "apiextensions.k8s.io/customresourcedefinitions/":
			plural, group, _ := strings.Cut(name, ".")
			if !slices.ContainsFunc(p.served, func(r string) bool { return strings.HasPrefix(r, group+"/") && strings.HasSuffix(r, "/"+plural) }) {
				return false
			}
		case "apiregistration.k8s.io/apiservices/":
			if !bytes.Contains(e.value, []byte(`"Available"`)) {
				return false
			}
		case "servicecidrs/":
			if !bytes.Contains(e.value, []byte("Ready")) {
				return false
			}
		case "flowschemas/":
			if !bytes.Contains(e.value, []byte("Dangling")) {
				return false
			}
		}
	}
	return true
}

func (p *plane) end() {
	if p.etcd != nil {
		p.etcd.Close()
	}
	p.cp.Stop()
}

// reset puts everything back to the start. The error is the reason why the control plane cannot be lent again.
func (p *plane) reset(ctx context.Context) error {
	p.cp.StopControllers()
	for _, name := range []string{"etcd", "kube-apiserver"} {
		if p.cp.PID(name) == 0 {
			return errors.New("the test ended " + name)
		}
	}
	rights, changed := false, false
	if err := poll(ctx, func() (bool, error) {
		differ, err := p.differences(ctx)
		if err != nil {
			return false, err
		}
		if len(differ) == 0 {
			served, err := p.resources(ctx)
			return slices.Equal(served, p.served), err
		}
		changed = true
		for _, key := range differ {
			if isRemembered(key) {
				return false, fmt.Errorf("the API server remembers %s", key)
			}
			for _, dir := range []string{"/registry/roles/", "/registry/rolebindings/", "/registry/clusterroles/", "/registry/clusterrolebindings/"} {
				rights = rights || strings.HasPrefix(key, dir)
			}
		}
		return false, p.undo(ctx, differ)
	}); err != nil {
		return err
	}
	if rights {
		if err := p.awaitRights(ctx); err != nil {
			return fmt.Errorf("await the end of rights: %w", err)
		}
		differ, err := p.differences(ctx)
		if err == nil {
			err = p.undo(ctx, differ)
		}
		if err != nil {
			return err
		}
	}
	if !changed {
		return nil
	}
	return p.shrink(ctx)
}

// keys returns the revision of the last change of each key.
func (p *plane) keys(ctx context.Context) (map[string]int64, error) {
	all, err := p.etcd.Get(ctx, "", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return nil, err
	}
	out := make(map[string]int64, len(all.Kvs))
	for _, kv := range all.Kvs {
		out[string(kv.Key)] = kv.ModRevision
	}
	return out, nil
}

// differences returns, in order, the keys that were added, changed or removed since the start.
func (p *plane) differences(ctx context.Context) (out []string, err error) {
	now, err := p.keys(ctx)
	if err != nil {
		return nil, err
	}
	for key, revision := range now {
		if !isOwn(key) && p.base[key].revision != revision {
			out = append(out, key)
		}
	}
	for key := range p.base {
		if !isOwn(key) && now[key] == 0 {
			out = append(out, key)
		}
	}
	slices.Sort(out)
	return out, nil
}

// undo writes the keys as they were, and deletes those that were not there. It writes to etcd directly: no finalizer and
// no admission can refuse, and the API server observes the changes as those of another API server.
func (p *plane) undo(ctx context.Context, differ []string) error {
	const most = 100 // of one transaction; etcd allows 128
	for part := range slices.Chunk(differ, most) {
		var ops []clientv3.Op
		for _, key := range part {
			if was, ok := p.base[key]; ok {
				ops = append(ops, clientv3.OpPut(key, string(was.value)))
			} else {
				ops = append(ops, clientv3.OpDelete(key))
			}
		}
		done, err := p.etcd.Txn(ctx).Then(ops...).Commit()
		if err != nil {
			return err
		}
		for _, key := range part {
			if was, ok := p.base[key]; ok {
				p.base[key] = entry{done.Header.Revision, was.value}
			}
		}
	}
	return nil
}

// shrink removes deleted objects from etcd's database: a snapshot contains nothing of earlier tests.
func (p *plane) shrink(ctx context.Context) error {
	now, err := p.etcd.Get(ctx, late[0], clientv3.WithKeysOnly())
	if err != nil {
		return err
	}
	if _, err := p.etcd.Compact(ctx, now.Header.Revision, clientv3.WithCompactPhysical()); err != nil {
		return fmt.Errorf("compact etcd: %w", err)
	}
	if _, err := p.etcd.Defragment(ctx, p.cp.EtcdEndpoint()); err != nil {
		return fmt.Errorf("defragment etcd: %w", err)
	}
	return nil
}

// resources returns all resources that the API server lists: definitions of tests end later than their objects.
func (p *plane) resources(ctx context.Context) (out []string, err error) {
	b, err := p.core.Discovery().RESTClient().Get().AbsPath("/apis").
		SetHeader("Accept", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList").DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("list APIs: %w", err)
	}
	var list struct {
		Items []struct {
			Metadata metav1.ObjectMeta `json:"metadata"`
			Versions []struct {
				Version   string `json:"version"`
				Resources []struct {
					Resource string `json:"resource"`
				} `json:"resources"`
			} `json:"versions"`
		} `json:"items"`
	}
	if err := json.Unmarshal(b, &list); err != nil {
		return nil, fmt.Errorf("list APIs: %w", err)
	}
	for _, g := range list.Items {
		for _, v := range g.Versions {
			out = append(out, g.Metadata.Name+"/"+v.Version)
			for _, r := range v.Resources {
				out = append(out, g.Metadata.Name+"/"+v.Version+"/"+r.Resource)
			}
		}
	}
	slices.Sort(out)
	return out, nil
}

// awaitRights returns when the API server's authorizer has observed all changes of roles and bindings so far. It grants
// two rights and waits until they are effective: the changes of one kind are observed in their order.
func (p *plane) awaitRights(ctx context.Context) error {
	const name, user, ns = "controlplanetest", "controlplanetest", metav1.NamespaceSystem
	rbac := p.core.RbacV1()
	subjects := []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: user}}
	meta := metav1.ObjectMeta{Name: name}
	ref := func(kind string) rbacv1.RoleRef {
		return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: kind, Name: name}
	}
	create := metav1.CreateOptions{}
	rule := func(resource string) []rbacv1.PolicyRule {
		return []rbacv1.PolicyRule{{Verbs: []string{"get"}, APIGroups: []string{""}, Resources: []string{resource}}}
	}
	_, e1 := rbac.ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: rule("nodes")}, create)
	_, e2 := rbac.ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: meta, RoleRef: ref("ClusterRole"), Subjects: subjects}, create)
	_, e3 := rbac.Roles(ns).Create(ctx, &rbacv1.Role{ObjectMeta: meta, Rules: rule("pods")}, create)
	_, e4 := rbac.RoleBindings(ns).Create(ctx, &rbacv1.RoleBinding{ObjectMeta: meta, RoleRef: ref("Role"), Subjects: subjects}, create)
	if err := errors.Join(e1, e2, e3, e4); err != nil {
		return err
	}
	for _, a := range []authorizationv1.ResourceAttributes{{Verb: "get", Resource: "nodes"}, {Verb: "get", Resource: "pods", Namespace: ns}} {
		if err := poll(ctx, func() (bool, error) {
			review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: user, ResourceAttributes: &a}}
			got, err := p.core.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, create)
			return err == nil && got.Status.Allowed, err
		}); err != nil {
			return err
		}
	}
	return nil
}

// dial connects to the control plane's etcd.
func dial(cp *controlplane.ControlPlane) (*clientv3.Client, error) {
	pair, err := tls.LoadX509KeyPair(filepath.Join(cp.PKI(), "apiserver-etcd-client.crt"), filepath.Join(cp.PKI(), "apiserver-etcd-client.key"))
	if err != nil {
		return nil, err
	}
	ca, err := os.ReadFile(filepath.Join(cp.PKI(), "etcd", "ca.crt"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	return clientv3.New(clientv3.Config{
		Endpoints: []string{cp.EtcdEndpoint()}, DialTimeout: 10 * time.Second, Logger: zap.NewNop(),
		TLS: &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots, MinVersion: tls.VersionTLS12},
	})
}

// poll calls done every 10 ms until it says true or fails, or ctx ends.
func poll(ctx context.Context, done func() (bool, error)) error {
	for {
		ok, err := done()
		if err != nil || ok {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}
