package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"constellation/engine"
	"constellation/engine/backup"
)

// A snapshot comes through a node, so what it holds is compared with what the API server
// says, which asks all of etcd. A resourceVersion is a revision of etcd: an object that was
// listed at revision L and not changed since is in a snapshot of a later revision, under the
// same revision; what a snapshot has under an earlier revision than L was in the list.

// witnessed are the kinds that are compared: who is in the cluster and who may do what.
// The first has no rights to ask for beyond those that make a snapshot.
var witnessed = []struct {
	gvr schema.GroupVersionResource
	// dir is the directory of the kind in etcd; empty if it is the resource.
	dir string
}{
	{gvr: schema.GroupVersionResource{Version: "v1", Resource: "namespaces"}},
	{gvr: schema.GroupVersionResource{Version: "v1", Resource: "nodes"}, dir: "minions"},
	{gvr: schema.GroupVersionResource{Version: "v1", Resource: "serviceaccounts"}},
	{gvr: rbac("clusterroles")},
	{gvr: rbac("clusterrolebindings")},
	{gvr: rbac("roles")},
	{gvr: rbac("rolebindings")},
	{gvr: admission("validatingwebhookconfigurations")},
	{gvr: admission("mutatingwebhookconfigurations")},
	{gvr: admission("validatingadmissionpolicies")},
	{gvr: admission("validatingadmissionpolicybindings")},
}

func rbac(resource string) schema.GroupVersionResource {
	return rbacv1.SchemeGroupVersion.WithResource(resource)
}

func admission(resource string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "admissionregistration.k8s.io", Version: "v1", Resource: resource}
}

// etcdPrefix is where an API server that kubeadm has set up keeps its objects.
const etcdPrefix = "/registry/"

// witness is what the API server said before a snapshot.
type witness struct {
	// lists are by their directory in etcd, with the slash at its end.
	lists map[string]*witnessList
	// revision is the latest one of all lists.
	revision int64
	// unchecked says what could not be listed.
	unchecked []string
}

// witnessList is one kind.
type witnessList struct {
	revision int64
	objects  map[string]*witnessObject // by the rest of the key
}

type witnessObject struct {
	revision int64
	uid      string
	// object is nil unless the whole of it is compared. It has no resourceVersion.
	object runtime.Object
	// found is the revision that the snapshot has last, zero if it has none.
	found int64
	gone  bool // by found
}

// witness lists what the snapshot will be compared with. A kind that the user may not list,
// or that this Kubernetes does not have, is left out.
func (c *Client) witness(ctx context.Context) (*witness, error) {
	config := rest.CopyConfig(c.config)
	meta, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make Kubernetes client: %w", err)
	}
	w := &witness{lists: map[string]*witnessList{}}
	var denied []string
	for _, k := range witnessed {
		l := &witnessList{}
		err := retry(ctx, func(ctx context.Context) (err error) {
			l.objects = map[string]*witnessObject{}
			if k.gvr.Group == rbacv1.GroupName {
				return c.witnessRBAC(ctx, k.gvr.Resource, l)
			}
			all, err := meta.Resource(k.gvr).List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			if l.revision, err = revisionOf(all.ResourceVersion); err != nil {
				return err
			}
			for i := range all.Items {
				if err := l.add(&all.Items[i], nil); err != nil {
					return err
				}
			}
			return nil
		})
		switch {
		case errors.Is(err, engine.ErrAbsent):
			continue
		case errors.Is(err, engine.ErrForbidden):
			denied = append(denied, k.gvr.Resource)
			continue
		case err != nil:
			return nil, fmt.Errorf("list %s to compare the snapshot with: %w", k.gvr.Resource, err)
		}
		dir := k.dir
		if dir == "" {
			dir = k.gvr.Resource
		}
		w.lists[etcdPrefix+dir+"/"] = l
		w.revision = max(w.revision, l.revision)
	}
	if denied != nil {
		w.unchecked = append(w.unchecked, "the kubeconfig's user may not list "+strings.Join(denied, ", "))
	}
	return w, nil
}

// witnessRBAC lists a kind of rights with all that it says.
func (c *Client) witnessRBAC(ctx context.Context, resource string, l *witnessList) error {
	var o metav1.ListOptions
	var list runtime.Object
	var err error
	switch api := c.core.RbacV1(); resource {
	case "clusterroles":
		list, err = api.ClusterRoles().List(ctx, o)
	case "clusterrolebindings":
		list, err = api.ClusterRoleBindings().List(ctx, o)
	case "roles":
		list, err = api.Roles("").List(ctx, o)
	case "rolebindings":
		list, err = api.RoleBindings("").List(ctx, o)
	}
	if err != nil {
		return err
	}
	if l.revision, err = revisionOf(list.(metav1.ListInterface).GetResourceVersion()); err != nil {
		return err
	}
	switch list := list.(type) {
	case *rbacv1.ClusterRoleList:
		for i := range list.Items {
			err = errors.Join(err, l.add(&list.Items[i], &list.Items[i]))
		}
	case *rbacv1.ClusterRoleBindingList:
		for i := range list.Items {
			err = errors.Join(err, l.add(&list.Items[i], &list.Items[i]))
		}
	case *rbacv1.RoleList:
		for i := range list.Items {
			err = errors.Join(err, l.add(&list.Items[i], &list.Items[i]))
		}
	case *rbacv1.RoleBindingList:
		for i := range list.Items {
			err = errors.Join(err, l.add(&list.Items[i], &list.Items[i]))
		}
	}
	return err
}

func (l *witnessList) add(m metav1.Object, whole runtime.Object) error {
	rev, err := revisionOf(m.GetResourceVersion())
	if err != nil {
		return err
	}
	name := m.GetName()
	if ns := m.GetNamespace(); ns != "" {
		name = ns + "/" + name
	}
	m.SetResourceVersion("")
	if whole != nil {
		whole.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	}
	l.objects[name] = &witnessObject{revision: rev, uid: string(m.GetUID()), object: whole}
	return nil
}

func revisionOf(resourceVersion string) (int64, error) {
	rev, err := strconv.ParseInt(resourceVersion, 10, 64)
	if err != nil || rev <= 0 {
		return 0, fmt.Errorf("resourceVersion %q is no revision of etcd", resourceVersion)
	}
	return rev, nil
}

// compare returns nil if the snapshot in r is what the API server's etcd had between the
// time of before and now, as far as before goes. The error wraps engine.ErrUnreachable if
// the member was only behind.
func (c *Client) compare(ctx context.Context, r io.ReaderAt, s backup.Snapshot, before *witness) error {
	err := c.compareWith(ctx, r, s, before)
	if err != nil {
		return fmt.Errorf("snapshot through the operator on %s: %w", s.Member, err)
	}
	return nil
}

func (c *Client) compareWith(ctx context.Context, r io.ReaderAt, s backup.Snapshot, before *witness) error {
	db, err := backup.OpenEtcd(r, s.Size)
	if err != nil {
		return fmt.Errorf("%w: %w", engine.ErrImpostor, err)
	}
	members, err := db.Members()
	if err != nil {
		return fmt.Errorf("%w: %w", engine.ErrImpostor, err)
	}
	if !slices.ContainsFunc(members, func(m backup.EtcdMember) bool { return m.Name == s.Member }) {
		return fmt.Errorf("%w: it is of an etcd that has no member %s", engine.ErrImpostor, s.Member)
	}
	revision, err := before.read(ctx, db)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return fmt.Errorf("%w: %w", engine.ErrImpostor, err)
	case revision < s.Revision:
		return fmt.Errorf("%w: it ends with revision %d, and was said to show %d", engine.ErrImpostor, revision, s.Revision)
	case revision < before.revision:
		return fmt.Errorf("%w: it ends with revision %d, and the API server was at %d before: the member is behind, or the snapshot is an old one", engine.ErrUnreachable, revision, before.revision)
	}
	if text := before.differs(); text != "" {
		return fmt.Errorf("%w: %s", engine.ErrImpostor, text)
	}
	after, err := c.revision(ctx)
	switch {
	case errors.Is(err, engine.ErrForbidden):
		return nil // it is among what was not compared
	case err != nil:
		return fmt.Errorf("read the revision of etcd: %w", err)
	case revision > after:
		return fmt.Errorf("%w: it ends with revision %d, and the API server is at %d", engine.ErrImpostor, revision, after)
	}
	return nil
}

// revision returns the revision of etcd, through a quorum.
func (c *Client) revision(ctx context.Context) (rev int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	err = retry(ctx, func(ctx context.Context) error {
		l, err := c.core.CoreV1().Namespaces().List(ctx, metav1.ListOptions{Limit: 1})
		if err == nil {
			rev, err = revisionOf(l.ResourceVersion)
		}
		return err
	})
	return rev, err
}

// read reads the whole of a snapshot and notes what it has of what was listed. The error
// says what it has and should not.
func (w *witness) read(ctx context.Context, db *backup.EtcdFile) (revision int64, err error) {
	// Objects that were not in the lists, by key, with the revision of their last change:
	// one that is older than its list must have been deleted by then.
	others := map[string]int64{}
	revision, err = db.Read(ctx, func(e backup.EtcdEntry) error {
		// "/registry/roles/kube-system/x": what is up to the second slash after the prefix.
		if !bytes.HasPrefix(e.Key, []byte(etcdPrefix)) {
			return nil
		}
		i := bytes.IndexByte(e.Key[len(etcdPrefix):], '/')
		if i < 0 {
			return nil
		}
		dir := e.Key[:len(etcdPrefix)+i+1]
		l := w.lists[string(dir)]
		if l == nil {
			return nil
		}
		o := l.objects[string(e.Key[len(dir):])]
		switch {
		case o != nil:
			o.found, o.gone = e.Revision, e.Deleted
			if e.Revision == o.revision && !e.Deleted {
				return o.same(e)
			}
		case e.Deleted || e.Revision > l.revision:
			delete(others, string(e.Key))
		default:
			others[string(e.Key)] = e.Revision
		}
		return nil
	})
	if err != nil {
		return revision, err
	}
	for key, rev := range others {
		return revision, fmt.Errorf("it has %s since revision %d, and the API server does not", clean(key), rev)
	}
	return revision, nil
}

// same returns an error if an entry of the same revision is another object.
func (o *witnessObject) same(e backup.EtcdEntry) error {
	if bytes.HasPrefix(e.Value, []byte("k8s:enc:")) {
		return nil // only the API server can read it
	}
	if o.object == nil {
		if !bytes.Contains(e.Value, []byte(o.uid)) {
			return fmt.Errorf("its %s is another object than the API server's", clean(string(e.Key)))
		}
		return nil
	}
	stored, _, err := scheme.Codecs.UniversalDeserializer().Decode(e.Value, nil, nil)
	if err != nil {
		return fmt.Errorf("its %s is not readable", clean(string(e.Key)))
	}
	stored.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	if !equality.Semantic.DeepEqual(stored, o.object) {
		return fmt.Errorf("its %s says something else than the API server's", clean(string(e.Key)))
	}
	return nil
}

// differs says what a snapshot lacks that was read; empty if it has all.
func (w *witness) differs() string {
	for dir, l := range w.lists {
		for name, o := range l.objects {
			switch {
			case o.found == o.revision && !o.gone || o.found > l.revision:
			case o.found == 0:
				return fmt.Sprintf("it lacks %s%s, which the API server has since revision %d", dir, name, o.revision)
			default:
				return fmt.Sprintf("it has %s%s of revision %d, and the API server that of %d", dir, name, o.found, o.revision)
			}
		}
	}
	return ""
}

// clean makes a key of a snapshot fit for an error: it may be hostile.
func clean(key string) string {
	const most = 200
	return strings.Trim(strconv.QuoteToASCII(key[:min(len(key), most)]), `"`)
}
