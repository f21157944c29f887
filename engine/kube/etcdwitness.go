package kube

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/cluster"
	"constellation/operator/api/v1alpha1"
)

// A snapshot comes through a node, so its content is compared with what the API server
// reads from etcd with a quorum. A resourceVersion is a revision of etcd.
//
// Each kind is listed twice. The first list, of revision L, is made before the snapshot. An
// object that has not changed since L must be in the snapshot with its revision, and an entry
// up to L must have been in the list. The second list is made when the snapshot has arrived
// and its revision S is known. The API server reads it at exactly S, so the snapshot must
// have the same objects with the same revisions, whatever was written meanwhile.
//
// If etcd has compacted S by then, the second list is of the present. An object with a
// revision up to S had it at S, too, so the snapshot must have it. Later objects, and
// entries of the snapshot that the API server no longer has, remain unknown.

// witnessedKind is a kind that is compared.
type witnessedKind struct {
	gvr schema.GroupVersionResource
	// dir is the directory of the kind in etcd below etcdPrefix; empty if it is the resource.
	dir string
}

// witnessed are the kinds that are compared: those that confer rights, those that decide
// what runs, and those that configure this program. Of Events, Leases and endpoints nobody
// restores anything. The kinds in [Client.lister] are compared as a whole. Of pods and
// workloads, revision, UID and [podPower] are, and of the others revision and UID: a newer
// API server may add defaults to them when it reads them.
var witnessed = []witnessedKind{
	{gvr: core("namespaces")},
	{gvr: core("nodes"), dir: "minions"},
	{gvr: core("serviceaccounts")},
	{gvr: inGroup(rbacv1.GroupName, "clusterroles")},
	{gvr: inGroup(rbacv1.GroupName, "clusterrolebindings")},
	{gvr: inGroup(rbacv1.GroupName, "roles")},
	{gvr: inGroup(rbacv1.GroupName, "rolebindings")},
	{gvr: inGroup("admissionregistration.k8s.io", "validatingwebhookconfigurations")},
	{gvr: inGroup("admissionregistration.k8s.io", "mutatingwebhookconfigurations")},
	{gvr: inGroup("admissionregistration.k8s.io", "validatingadmissionpolicies")},
	{gvr: inGroup("admissionregistration.k8s.io", "validatingadmissionpolicybindings")},
	{gvr: core("secrets")},
	{gvr: core("configmaps")},
	{gvr: core("pods")},
	{gvr: core("services"), dir: "services/specs"},
	{gvr: core("persistentvolumes")},
	{gvr: core("persistentvolumeclaims")},
	{gvr: core("replicationcontrollers"), dir: "controllers"},
	{gvr: inGroup("apps", "deployments")},
	{gvr: inGroup("apps", "daemonsets")},
	{gvr: inGroup("apps", "statefulsets")},
	{gvr: inGroup("apps", "replicasets")},
	{gvr: inGroup("apps", "controllerrevisions")},
	{gvr: inGroup("batch", "jobs")},
	{gvr: inGroup("batch", "cronjobs")},
	{gvr: inGroup("networking.k8s.io", "networkpolicies")},
	{gvr: inGroup("storage.k8s.io", "storageclasses")},
	{gvr: inGroup("scheduling.k8s.io", "priorityclasses")},
	{gvr: inGroup("certificates.k8s.io", "certificatesigningrequests")},
	{gvr: inGroup("apiregistration.k8s.io", "apiservices"), dir: "apiregistration.k8s.io/apiservices"},
	{gvr: inGroup("apiextensions.k8s.io", "customresourcedefinitions"), dir: "apiextensions.k8s.io/customresourcedefinitions"},
	custom(v1alpha1.GroupVersion, "nodeversions"),
	custom(v1alpha1.GroupVersion, "scalinggroups"),
	custom(v1alpha1.GroupVersion, "autoscalingstrategies"),
	custom(v1alpha1.GroupVersion, "joiningnodes"),
	custom(v1alpha1.GroupVersion, "pendingnodes"),
	custom(schema.GroupVersion{Group: "upgrade.cattle.io", Version: "v1"}, "plans"),
}

func core(resource string) schema.GroupVersionResource { return inGroup("", resource) }

func inGroup(group, resource string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: group, Version: "v1", Resource: resource}
}

// custom is a kind of a CustomResourceDefinition.
func custom(gv schema.GroupVersion, resource string) witnessedKind {
	return witnessedKind{gvr: gv.WithResource(resource), dir: gv.Group + "/" + resource}
}

const (
	// etcdPrefix is where an API server that kubeadm has set up keeps its objects.
	etcdPrefix = "/registry/"
	// witnessPage is how many objects are requested at a time.
	witnessPage = 500
)

// errCompacted means that etcd no longer has a revision.
var errCompacted = errors.New("compacted")

// witness is what the API server returned at one time.
type witness struct {
	// lists are by their directory in etcd, with the slash at its end.
	lists map[string]*witnessList
	// revision is the latest one of all lists.
	revision int64
	// unchecked says what could not be listed.
	unchecked []string
	// latest is the revision of etcd when the first byte of the snapshot had arrived, unless
	// failed is set. The snapshot shows no later one.
	latest int64
	failed error
	// members are those that were asked when the snapshot had begun; nil if none was.
	members *memberAnswers
	// sealed counts the objects of the snapshot that only the API server can read.
	sealed int
}

// witnessList is one kind.
type witnessList struct {
	// revision is that of the list. Later entries of a snapshot are not compared with it.
	revision int64
	objects  map[string]*witnessObject // by the rest of the key
	// partial is set if entries up to revision may be missing in the list.
	partial bool
}

type witnessObject struct {
	revision int64
	uid      string
	// digest is of the whole object, or of its podPower; nil if only revision and UID are
	// compared.
	digest []byte
	power  bool
	// found is the revision that the snapshot has last, zero if it has none.
	found int64
	gone  bool // by found
}

// witness lists what a snapshot is compared with, at a revision, or at present if that is
// zero. The specs of pods and workloads are listed if that is wanted. A kind that the user
// may not list, or that this Kubernetes does not have, is left out. The error wraps
// errCompacted if etcd no longer has the revision.
func (c *Client) witness(ctx context.Context, revision int64, specs bool) (*witness, error) {
	config := rest.CopyConfig(c.config)
	config.QPS = -1 // one request at a time, and the API server has a limit of its own
	meta, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make Kubernetes client: %w", err)
	}
	w := &witness{lists: map[string]*witnessList{}}
	var denied []string
	for _, k := range witnessed {
		list := c.lister(k.gvr)
		if list == nil && specs {
			list = c.specLister(k.gvr)
		}
		if list == nil {
			list = lists(meta.Resource(k.gvr).List)
		}
		l, err := witnessKind(ctx, list, revision)
		switch {
		case errors.Is(err, cluster.ErrAbsent):
			continue
		case errors.Is(err, cluster.ErrForbidden):
			denied = append(denied, k.gvr.Resource)
			continue
		case err != nil:
			return nil, fmt.Errorf("list %s to compare the snapshot with: %w", k.gvr.Resource, err)
		}
		w.lists[etcdPrefix+cmp.Or(k.dir, k.gvr.Resource)+"/"] = l
		w.revision = max(w.revision, l.revision)
	}
	if denied != nil {
		w.unchecked = append(w.unchecked, "the kubeconfig's user may not list "+strings.Join(denied, ", "))
	}
	return w, nil
}

// specLister returns what lists a kind of pods or workloads; nil for other kinds.
func (c *Client) specLister(gvr schema.GroupVersionResource) lister {
	switch api := c.core; gvr {
	case core("pods"):
		return lists(api.CoreV1().Pods("").List)
	case core("replicationcontrollers"):
		return lists(api.CoreV1().ReplicationControllers("").List)
	case inGroup("apps", "deployments"):
		return lists(api.AppsV1().Deployments("").List)
	case inGroup("apps", "daemonsets"):
		return lists(api.AppsV1().DaemonSets("").List)
	case inGroup("apps", "statefulsets"):
		return lists(api.AppsV1().StatefulSets("").List)
	case inGroup("apps", "replicasets"):
		return lists(api.AppsV1().ReplicaSets("").List)
	case inGroup("batch", "jobs"):
		return lists(api.BatchV1().Jobs("").List)
	case inGroup("batch", "cronjobs"):
		return lists(api.BatchV1().CronJobs("").List)
	}
	return nil
}

// lister lists a page of a kind.
type lister func(context.Context, metav1.ListOptions) (runtime.Object, error)

// lister returns what lists a kind that is compared as a whole; nil for other kinds.
func (c *Client) lister(gvr schema.GroupVersionResource) lister {
	switch api := c.core; gvr {
	case core("serviceaccounts"):
		return lists(api.CoreV1().ServiceAccounts("").List)
	case core("secrets"):
		return lists(api.CoreV1().Secrets("").List)
	case core("configmaps"):
		return lists(api.CoreV1().ConfigMaps("").List)
	case inGroup(rbacv1.GroupName, "clusterroles"):
		return lists(api.RbacV1().ClusterRoles().List)
	case inGroup(rbacv1.GroupName, "clusterrolebindings"):
		return lists(api.RbacV1().ClusterRoleBindings().List)
	case inGroup(rbacv1.GroupName, "roles"):
		return lists(api.RbacV1().Roles("").List)
	case inGroup(rbacv1.GroupName, "rolebindings"):
		return lists(api.RbacV1().RoleBindings("").List)
	}
	return nil
}

// lists hides the type of a list.
func lists[L runtime.Object](list func(context.Context, metav1.ListOptions) (L, error)) lister {
	return func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return list(ctx, o) }
}

// witnessKind lists one kind, page by page.
func witnessKind(ctx context.Context, list lister, revision int64) (*witnessList, error) {
	l := &witnessList{objects: map[string]*witnessObject{}}
	o := metav1.ListOptions{Limit: witnessPage}
	if revision > 0 {
		o.ResourceVersion, o.ResourceVersionMatch = strconv.FormatInt(revision, 10), metav1.ResourceVersionMatchExact
	}
	for {
		var page runtime.Object
		err := retry(ctx, func(ctx context.Context) (err error) {
			page, err = list(ctx, o)
			if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
				return fmt.Errorf("%w: %w", errCompacted, err)
			}
			return err
		})
		if errors.Is(err, errCompacted) && revision == 0 && o.Continue != "" {
			// The list took longer than etcd keeps its revision.
			l.objects, o.Continue = map[string]*witnessObject{}, ""
			continue
		}
		if err != nil {
			return nil, err
		}
		m, err := apimeta.ListAccessor(page)
		if err != nil {
			return nil, err
		}
		if l.revision, err = revisionOf(m.GetResourceVersion()); err != nil {
			return nil, err
		}
		if revision > 0 && l.revision != revision {
			return nil, fmt.Errorf("%w: the API server listed revision %d instead of %d", errCompacted, l.revision, revision)
		}
		if err := apimeta.EachListItem(page, l.add); err != nil {
			return nil, err
		}
		if o.Continue = m.GetContinue(); o.Continue == "" {
			return l, nil
		}
		o.ResourceVersion, o.ResourceVersionMatch = "", "" // the token has them
	}
}

func (l *witnessList) add(item runtime.Object) error {
	m, err := apimeta.Accessor(item)
	if err != nil {
		return err
	}
	o := &witnessObject{uid: string(m.GetUID())}
	if o.revision, err = revisionOf(m.GetResourceVersion()); err != nil {
		return err
	}
	name := m.GetName()
	if ns := m.GetNamespace(); ns != "" {
		name = ns + "/" + name
	}
	if spec := podSpecOf(item); spec != nil {
		o.power = true
		o.digest, err = powerDigest(spec)
	} else if _, ok := item.(*metav1.PartialObjectMetadata); !ok {
		o.digest, err = digestOf(item)
	}
	if err != nil {
		return err
	}
	l.objects[name] = o
	return nil
}

// digestOf returns the SHA-256 of an object without what the API server sets when it reads
// it, and without managedFields, which confer nothing. It is of the protocol buffer, which
// is the same for an empty and a missing list.
func digestOf(o runtime.Object) ([]byte, error) {
	m, err := apimeta.Accessor(o)
	if err != nil {
		return nil, err
	}
	m.SetResourceVersion("")
	m.SetSelfLink("")
	m.SetManagedFields(nil)
	p, ok := o.(interface{ Marshal() ([]byte, error) })
	if !ok {
		return nil, fmt.Errorf("%T has no protocol buffer", o)
	}
	b, err := p.Marshal()
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(b)
	return sum[:], nil
}

func revisionOf(resourceVersion string) (int64, error) {
	rev, err := strconv.ParseInt(resourceVersion, 10, 64)
	if err != nil || rev <= 0 {
		return 0, fmt.Errorf("resourceVersion %q is no revision of etcd", resourceVersion)
	}
	return rev, nil
}

// compare returns nil if the snapshot in r is what the API server's etcd had between the
// time of before and now, as far as before goes. The error wraps cluster.ErrUnreachable if
// the member was only behind.
func (c *Client) compare(ctx context.Context, r io.ReaderAt, s *backup.Snapshot, before *witness) error {
	err := c.compareWith(ctx, r, s, before)
	if err != nil {
		return fmt.Errorf("snapshot through the operator on %s: %w", s.Member, err)
	}
	return nil
}

func (c *Client) compareWith(ctx context.Context, r io.ReaderAt, s *backup.Snapshot, before *witness) error {
	db, err := backup.OpenEtcd(r, s.Size)
	if err != nil {
		return fmt.Errorf("%w: %w", engine.ErrImpostor, err)
	}
	members, err := db.Members()
	if err != nil {
		return fmt.Errorf("%w: %w", engine.ErrImpostor, err)
	}
	if !slices.ContainsFunc(members, func(m backup.EtcdMember) bool {
		return m.Name == s.Member && (s.MemberID == "" || etcdID(m.ID) == s.MemberID)
	}) {
		return fmt.Errorf("%w: it is of an etcd that has no member %s %s", engine.ErrImpostor, s.Member, clean(s.MemberID))
	}
	revision, err := before.read(ctx, db)
	switch {
	case err != nil:
		return err
	case revision < s.Revision:
		return fmt.Errorf("%w: it ends with revision %d, want %d", engine.ErrImpostor, revision, s.Revision)
	case revision < before.revision:
		return fmt.Errorf("%w: it ends with revision %d, and the API server was at %d before: the member is behind, or the snapshot is an old one", cluster.ErrUnreachable, revision, before.revision)
	}
	if text := before.differs(); text != "" {
		return fmt.Errorf("%w: %s", engine.ErrImpostor, text)
	}
	switch latest, err := before.latest, before.failed; {
	case errors.Is(err, cluster.ErrForbidden): // reported as not compared
	case err != nil:
		return fmt.Errorf("read the revision of etcd: %w", err)
	case revision > latest:
		return fmt.Errorf("%w: it ends with revision %d, and the API server was at %d when it had begun", engine.ErrImpostor, revision, latest)
	}
	if err := c.compareAt(ctx, db, s, revision); err != nil || before.members == nil {
		return err
	}
	return before.members.compare(ctx, s, db, members)
}

// compareAt compares a snapshot with what the API server has at the snapshot's revision.
func (c *Client) compareAt(ctx context.Context, db *backup.EtcdFile, s *backup.Snapshot, revision int64) error {
	limited, cancel := context.WithTimeout(ctx, 2*snapshotPrepare)
	defer cancel()
	at, err := c.witness(limited, revision, true)
	if errors.Is(err, errCompacted) {
		if at, err = c.witness(limited, 0, true); err == nil {
			at.until(revision)
			s.Unchecked = append(s.Unchecked, fmt.Sprintf("objects that were written while it was taken and again since, because etcd has compacted its revision %d", revision))
		}
	}
	if err != nil {
		return err
	}
	if _, err := at.read(ctx, db); err != nil {
		return err
	}
	if text := at.differs(); text != "" {
		return fmt.Errorf("%w: %s", engine.ErrImpostor, text)
	}
	if at.sealed > 0 {
		s.Unchecked = append(s.Unchecked, fmt.Sprintf("the contents of %d objects that the API server has encrypted", at.sealed))
	}
	return nil
}

// until leaves of present lists what they say of an earlier revision.
func (w *witness) until(revision int64) {
	for _, l := range w.lists {
		l.partial, l.revision = true, revision
		maps.DeleteFunc(l.objects, func(_ string, o *witnessObject) bool { return o.revision > revision })
	}
}

// begun notes the revision of etcd when a snapshot has begun.
func (w *witness) begun(ctx context.Context, c *Client) { w.latest, w.failed = c.revision(ctx) }

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
// wraps [engine.ErrImpostor] if it has what it should not.
func (w *witness) read(ctx context.Context, db *backup.EtcdFile) (revision int64, err error) {
	// Objects that are not in the lists, by key, with the revision of their last change: one
	// that is older than its list must have been deleted by then.
	others := map[string]int64{}
	revision, err = db.Read(ctx, func(e backup.EtcdEntry) error {
		l, name := w.listOf(e.Key)
		if l == nil {
			return nil
		}
		o := l.objects[string(name)]
		switch {
		case o != nil:
			o.found, o.gone = e.Revision, e.Deleted
			if e.Revision == o.revision && !e.Deleted {
				return w.same(o, e)
			}
		case l.partial:
		case e.Deleted || e.Revision > l.revision:
			delete(others, string(e.Key))
		default:
			others[string(e.Key)] = e.Revision
		}
		return nil
	})
	switch {
	case ctx.Err() != nil:
		return 0, ctx.Err()
	case err != nil:
		return 0, fmt.Errorf("%w: %w", engine.ErrImpostor, err)
	}
	for key, rev := range others {
		return revision, fmt.Errorf("%w: it has %s since revision %d, and the API server does not", engine.ErrImpostor, clean(key), rev)
	}
	return revision, nil
}

// listOf returns the list that a key belongs to, and the rest of the key; nil if its kind is
// not compared. "/registry/roles/kube-system/x" has the directory "/registry/roles/", and
// "/registry/services/specs/default/x" has "/registry/services/specs/".
func (w *witness) listOf(key []byte) (l *witnessList, name []byte) {
	if !bytes.HasPrefix(key, []byte(etcdPrefix)) {
		return nil, nil
	}
	at := len(etcdPrefix)
	for range 2 {
		i := bytes.IndexByte(key[at:], '/')
		if i < 0 {
			break
		}
		at += i + 1
		if l := w.lists[string(key[:at])]; l != nil {
			return l, key[at:]
		}
	}
	return nil, nil
}

// same returns an error if an entry of the same revision is another object.
func (w *witness) same(o *witnessObject, e backup.EtcdEntry) error {
	if bytes.HasPrefix(e.Value, []byte("k8s:enc:")) {
		w.sealed++
		return nil // only the API server can read it
	}
	if !bytes.Contains(e.Value, []byte(o.uid)) {
		return fmt.Errorf("its %s is another object than the API server's", clean(string(e.Key)))
	}
	if o.digest == nil {
		return nil
	}
	stored, _, err := scheme.Codecs.UniversalDeserializer().Decode(e.Value, nil, nil)
	if err != nil {
		return fmt.Errorf("its %s is not readable", clean(string(e.Key)))
	}
	var digest []byte
	if o.power {
		spec := podSpecOf(stored)
		if spec == nil {
			return nil // it is stored in a version that the API server converts
		}
		digest, err = powerDigest(spec)
	} else {
		digest, err = digestOf(stored)
	}
	if err != nil {
		return fmt.Errorf("its %s is not readable", clean(string(e.Key)))
	}
	if !bytes.Equal(digest, o.digest) {
		return fmt.Errorf("its %s differs from the API server's", clean(string(e.Key)))
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
			case o.gone:
				return fmt.Sprintf("it has %s%s deleted at revision %d, and the API server has it since revision %d", dir, name, o.found, o.revision)
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
