package kube

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protowire"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	selectors "k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/operator/api/v1alpha1"
)

// A snapshot comes through a node, so the console compares it with what the API server
// returns, which reads etcd with a quorum. A resourceVersion is a revision of etcd.
//
// Before the snapshot each kind is listed, and watched from the revision of its list. When
// the first byte of the snapshot has arrived, its revision is fixed, and each kind is listed
// again: the snapshot's revision lies between the two lists. The state of a kind at that
// revision is its first list and the events up to it, and the snapshot must have exactly
// that. The second list proves that the watch has delivered its events: each difference
// between the two lists must have one.

// witnessedKind is a kind that is compared.
type witnessedKind struct {
	gvr schema.GroupVersionResource
	// dir is the kind's directory in etcd below etcdPrefix; empty if it is the resource.
	dir string
	// kind is set if the whole object is compared. Otherwise only its metadata is: a newer
	// API server adds defaults to the rest when it reads an old object.
	kind string
}

// witnessed are the kinds that are compared: those that confer rights, those that decide
// what runs, and those that configure this program.
var witnessed = []witnessedKind{
	{gvr: core("namespaces"), kind: "Namespace"},
	{gvr: core("serviceaccounts"), kind: "ServiceAccount"},
	{gvr: core("secrets"), kind: "Secret"},
	{gvr: core("configmaps"), kind: "ConfigMap"},
	{gvr: rbacv1.SchemeGroupVersion.WithResource("clusterroles"), kind: "ClusterRole"},
	{gvr: rbacv1.SchemeGroupVersion.WithResource("clusterrolebindings"), kind: "ClusterRoleBinding"},
	{gvr: rbacv1.SchemeGroupVersion.WithResource("roles"), kind: "Role"},
	{gvr: rbacv1.SchemeGroupVersion.WithResource("rolebindings"), kind: "RoleBinding"},
	{gvr: admissionv1.SchemeGroupVersion.WithResource("validatingwebhookconfigurations"), kind: "ValidatingWebhookConfiguration"},
	{gvr: admissionv1.SchemeGroupVersion.WithResource("mutatingwebhookconfigurations"), kind: "MutatingWebhookConfiguration"},
	{gvr: admissionv1.SchemeGroupVersion.WithResource("validatingadmissionpolicies"), kind: "ValidatingAdmissionPolicy"},
	{gvr: admissionv1.SchemeGroupVersion.WithResource("validatingadmissionpolicybindings"), kind: "ValidatingAdmissionPolicyBinding"},
	{gvr: certificatesv1.SchemeGroupVersion.WithResource("certificatesigningrequests"), kind: "CertificateSigningRequest"},

	{gvr: core("nodes"), dir: "minions"},
	{gvr: core("pods")},
	{gvr: core("replicationcontrollers"), dir: "controllers"},
	{gvr: apps("deployments")},
	{gvr: apps("daemonsets")},
	{gvr: apps("statefulsets")},
	{gvr: apps("replicasets")},
	{gvr: batch("jobs")},
	{gvr: batch("cronjobs")},
	inGroup("apiregistration.k8s.io", "v1", "apiservices"),
	inGroup("apiextensions.k8s.io", "v1", "customresourcedefinitions"),
	inGroup(v1alpha1.GroupVersion.Group, v1alpha1.GroupVersion.Version, "nodeversions"),
	inGroup(v1alpha1.GroupVersion.Group, v1alpha1.GroupVersion.Version, "scalinggroups"),
	inGroup(v1alpha1.GroupVersion.Group, v1alpha1.GroupVersion.Version, "autoscalingstrategies"),
	inGroup(v1alpha1.GroupVersion.Group, v1alpha1.GroupVersion.Version, "joiningnodes"),
	inGroup(v1alpha1.GroupVersion.Group, v1alpha1.GroupVersion.Version, "pendingnodes"),
}

func core(resource string) schema.GroupVersionResource {
	return corev1.SchemeGroupVersion.WithResource(resource)
}

func apps(resource string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: resource}
}

func batch(resource string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "batch", Version: "v1", Resource: resource}
}

// inGroup is a kind whose directory in etcd has its group's name.
func inGroup(group, version, resource string) witnessedKind {
	return witnessedKind{gvr: schema.GroupVersionResource{Group: group, Version: version, Resource: resource}, dir: group + "/" + resource}
}

const (
	// etcdPrefix is where an API server that kubeadm has set up keeps its objects.
	etcdPrefix = "/registry/"
	// witnessPage is how many objects are requested at a time.
	witnessPage = 500
	// witnessParallel is how many kinds are listed at a time.
	witnessParallel = 4
	// witnessLag is how long an event may take to arrive after the change has shown in a
	// list or in the snapshot.
	witnessLag = 30 * time.Second
	// witnessAsk is when the API server is asked for an object whose event has not arrived.
	witnessAsk = time.Second
	// maxLater bounds the entries of a snapshot that are newer than the first lists.
	maxLater = 500_000
)

// witness is what the API server returned around a snapshot.
type witness struct {
	// lists are by their directory in etcd, with the slash at its end.
	lists map[string]*witnessList
	// revision is the latest one of all first lists.
	revision int64
	// unchecked says what could not be listed.
	unchecked []string

	ctx    context.Context // of the watches
	end    context.CancelFunc
	began  sync.Once
	listed chan struct{} // closed when the second lists are there, or failed
	latest int64         // the earliest revision of all second lists, by which the snapshot had begun
	failed error         // to list again
}

// digest is the SHA-256 of what is compared of an object.
type digest [sha256.Size]byte

// witnessList is one kind.
type witnessList struct {
	kind     witnessedKind
	dir      string
	api      witnessAPI
	revision int64
	objects  map[string]*witnessObject // by the rest of the key

	// What the snapshot has.
	later  []laterEntry
	sealed int // objects that are encrypted

	mu      sync.Mutex
	events  map[eventKey]witnessEvent
	gone    map[string]bool  // objects that an event has deleted
	seen    int64            // revision of the last event or bookmark
	again   int64            // revision of the second list; zero before
	changed map[string]int64 // where the second list differs from the first one and no event says so yet: its revision, zero if gone
	broken  error            // why there will be no more events
	news    chan struct{}    // closed and replaced when one of these has changed
}

type witnessObject struct {
	revision int64
	state    digest
	// found is the revision up to that of the list that the snapshot has last, zero if it
	// has none.
	found int64
	gone  bool // by found
}

type eventKey struct {
	revision int64
	name     string
}

type witnessEvent struct {
	deleted bool
	state   digest
}

// laterEntry is an entry of a snapshot that is newer than the first list.
type laterEntry struct {
	eventKey
	witnessEvent
	sealed bool
}

// witnessAPI lists and watches one kind.
type witnessAPI struct {
	list  func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch func(context.Context, metav1.ListOptions) (watch.Interface, error)
	// names lists without what is not metadata.
	names func(context.Context, metav1.ListOptions) (runtime.Object, error)
}

// witness lists what the snapshot will be compared with, within prepare, and watches it
// until close or the end of ctx. A kind that the user may not list or watch, or that this
// Kubernetes does not have, is left out.
func (c *Client) witness(ctx, prepare context.Context) (*witness, error) {
	w := &witness{lists: map[string]*witnessList{}, listed: make(chan struct{})}
	w.ctx, w.end = context.WithCancel(ctx)
	config := rest.CopyConfig(c.config)
	config.QPS = -1 // the number of requests is bounded, and the API server has its own limit
	lists := make([]*witnessList, len(witnessed))
	denied := make([]bool, len(witnessed))
	g, limited := errgroup.WithContext(prepare)
	g.SetLimit(witnessParallel)
	for i, k := range witnessed {
		g.Go(func() error {
			api, err := apiOf(config, k)
			if err != nil {
				return fmt.Errorf("make Kubernetes client: %w", err)
			}
			l := &witnessList{kind: k, api: api, dir: etcdPrefix + k.gvr.Resource + "/", events: map[eventKey]witnessEvent{}, gone: map[string]bool{}, news: make(chan struct{})}
			if k.dir != "" {
				l.dir = etcdPrefix + k.dir + "/"
			}
			err = l.first(limited)
			var events watch.Interface
			if err == nil {
				// Without the right to watch, nothing could be said of what is newer.
				events, err = l.open(w.ctx, limited)
			}
			switch {
			case errors.Is(err, engine.ErrAbsent):
				return nil
			case errors.Is(err, engine.ErrForbidden):
				denied[i] = true
				return nil
			case err != nil:
				return fmt.Errorf("list %s to compare the snapshot with: %w", k.gvr.Resource, err)
			}
			lists[i] = l
			go l.follow(w.ctx, events)
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		w.end()
		return nil, err
	}
	var names []string
	for i, l := range lists {
		switch {
		case denied[i]:
			names = append(names, witnessed[i].gvr.Resource)
		case l != nil:
			w.lists[l.dir] = l
			w.revision = max(w.revision, l.revision)
		}
	}
	if names != nil {
		w.unchecked = append(w.unchecked, "the kubeconfig's user may not list and watch "+strings.Join(names, ", "))
	}
	return w, nil
}

// apiOf returns how a kind is listed and watched.
func apiOf(config *rest.Config, k witnessedKind) (witnessAPI, error) {
	m, err := metadata.NewForConfig(config)
	if err != nil {
		return witnessAPI{}, err
	}
	names := m.Resource(k.gvr)
	api := witnessAPI{watch: names.Watch, names: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return names.List(ctx, o) }}
	if api.list = api.names; k.kind == "" {
		return api, nil
	}
	config = rest.CopyConfig(config)
	gv := k.gvr.GroupVersion()
	config.GroupVersion, config.APIPath = &gv, "/apis"
	if gv.Group == "" {
		config.APIPath = "/api"
	}
	config.NegotiatedSerializer = scheme.Codecs.WithoutConversion()
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	whole, err := rest.RESTClientFor(config)
	if err != nil {
		return witnessAPI{}, err
	}
	api.list = func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		return whole.Get().Resource(k.gvr.Resource).VersionedParams(&o, scheme.ParameterCodec).Do(ctx).Get()
	}
	api.watch = func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
		o.Watch = true
		return whole.Get().Resource(k.gvr.Resource).VersionedParams(&o, scheme.ParameterCodec).Watch(ctx)
	}
	return api, nil
}

// pages calls do with each object of a list, whose revision it returns.
func pages(ctx context.Context, list func(context.Context, metav1.ListOptions) (runtime.Object, error), do func(runtime.Object, metav1.Object) error, o metav1.ListOptions) (revision int64, err error) {
	o.Limit = witnessPage
	for {
		all, err := list(ctx, o)
		if err != nil {
			return 0, err
		}
		m := all.(metav1.ListInterface)
		if revision, err = revisionOf(m.GetResourceVersion()); err != nil {
			return 0, err
		}
		if err := meta.EachListItem(all, func(item runtime.Object) error {
			a, err := meta.Accessor(item)
			if err != nil {
				return err
			}
			return do(item, a)
		}); err != nil {
			return 0, err
		}
		if o.Continue = m.GetContinue(); o.Continue == "" {
			return revision, nil
		}
		o.ResourceVersion, o.ResourceVersionMatch = "", ""
	}
}

// first takes the first list.
func (l *witnessList) first(ctx context.Context) error {
	return retry(ctx, func(ctx context.Context) (err error) {
		l.objects = map[string]*witnessObject{}
		l.revision, err = pages(ctx, l.api.list, func(item runtime.Object, m metav1.Object) error {
			rev, err := revisionOf(m.GetResourceVersion())
			if err != nil {
				return err
			}
			state, err := l.stateOf(item)
			if err != nil {
				return err
			}
			l.objects[restOfKey(m)] = &witnessObject{revision: rev, state: state}
			return nil
		}, metav1.ListOptions{})
		l.seen = l.revision
		return err
	})
}

// second takes the second list, and notes where it differs from the first one.
func (l *witnessList) second(ctx context.Context) error {
	changed := map[string]int64{}
	var revision int64
	err := retry(ctx, func(ctx context.Context) (err error) {
		clear(changed)
		for name := range l.objects {
			changed[name] = 0
		}
		revision, err = pages(ctx, l.api.names, func(_ runtime.Object, m metav1.Object) error {
			rev, err := revisionOf(m.GetResourceVersion())
			if err != nil {
				return err
			}
			name := restOfKey(m)
			if o := l.objects[name]; o != nil && o.revision == rev {
				delete(changed, name)
			} else {
				changed[name] = rev
			}
			return nil
		}, metav1.ListOptions{})
		return err
	})
	if err != nil {
		return fmt.Errorf("list %s again: %w", l.kind.gvr.Resource, err)
	}
	l.update(func() { l.again, l.changed = revision, maps.Clone(changed) })
	return nil
}

// open begins a watch at the revision that has been seen.
func (l *witnessList) open(ctx, limited context.Context) (events watch.Interface, err error) {
	l.mu.Lock()
	o := metav1.ListOptions{ResourceVersion: strconv.FormatInt(l.seen, 10), AllowWatchBookmarks: true}
	l.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(limited, cancel) // until it stands
	err = retry(limited, func(context.Context) error {
		events, err = l.api.watch(ctx, o)
		return err
	})
	stop()
	return events, err
}

// follow notes all events until ctx ends, or until all up to the second list are there.
func (l *witnessList) follow(ctx context.Context, events watch.Interface) {
	for {
		done, err := l.drain(events)
		events.Stop()
		if ctx.Err() != nil || done {
			return
		}
		if err == nil {
			// The API server has ended it, as it does after a while.
			limited, cancel := context.WithTimeout(ctx, witnessLag)
			events, err = l.open(ctx, limited)
			cancel()
		}
		if err != nil {
			l.update(func() { l.broken = fmt.Errorf("watch %s: %w", l.kind.gvr.Resource, err) })
			return
		}
	}
}

// drain notes the events of one watch until it ends.
func (l *witnessList) drain(events watch.Interface) (done bool, err error) {
	for e := range events.ResultChan() {
		if e.Type == watch.Error {
			return false, apierrors.FromObject(e.Object)
		}
		m, err := meta.Accessor(e.Object)
		if err != nil {
			return false, err
		}
		rev, err := revisionOf(m.GetResourceVersion())
		if err != nil {
			return false, err
		}
		ev := witnessEvent{deleted: e.Type == watch.Deleted}
		if e.Type != watch.Bookmark && !ev.deleted {
			if ev.state, err = l.stateOf(e.Object); err != nil {
				return false, err
			}
		}
		l.update(func() {
			l.seen = max(l.seen, rev)
			if e.Type != watch.Bookmark {
				k := eventKey{rev, restOfKey(m)}
				l.events[k] = ev
				if ev.deleted {
					l.gone[k.name] = true
				}
			}
			done = l.again > 0 && l.seen >= l.again
		})
		if done {
			return true, nil
		}
	}
	return false, nil
}

// update changes the list and wakes await.
func (l *witnessList) update(change func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change()
	close(l.news)
	l.news = make(chan struct{})
}

// await waits until there is nothing that missing returns, with l locked, or until no event
// will come that could help. Then it returns what is missing. After a while it calls never,
// which is whether the API server says that what is missing never was.
func (l *witnessList) await(ctx context.Context, missing func() string, never func(context.Context) bool) (what string, err error) {
	limit, ask := time.NewTimer(witnessLag), time.NewTimer(witnessAsk)
	defer limit.Stop()
	defer ask.Stop()
	for {
		l.mu.Lock()
		what = missing()
		whole, broken, news := l.again > 0 && l.seen >= l.again, l.broken, l.news
		l.mu.Unlock()
		switch {
		case what == "" || whole:
			return what, nil
		case broken != nil:
			return what, fmt.Errorf("%w: %w", engine.ErrUnreachable, broken)
		}
		select {
		case <-ctx.Done():
			return what, ctx.Err()
		case <-limit.C:
			return what, nil
		case <-ask.C:
			if never(ctx) {
				return what, nil
			}
		case <-news:
		}
	}
}

// close ends the watches.
func (w *witness) close() {
	if w != nil {
		w.end()
	}
}

// begun is called when a byte of the snapshot has arrived, and takes the second lists
// meanwhile.
func (w *witness) begun() {
	w.began.Do(func() {
		go func() {
			defer close(w.listed)
			g, ctx := errgroup.WithContext(w.ctx)
			g.SetLimit(witnessParallel)
			for _, l := range w.lists {
				g.Go(func() error { return l.second(ctx) })
			}
			if w.failed = g.Wait(); w.failed != nil {
				return
			}
			for _, l := range w.lists {
				if w.latest == 0 || l.again < w.latest {
					w.latest = l.again
				}
			}
		}()
	})
}

// settle waits for the second lists and for the events that lead to them.
func (w *witness) settle(ctx context.Context) error {
	select {
	case <-w.listed:
	case <-ctx.Done():
		return ctx.Err()
	}
	if w.failed != nil {
		return fmt.Errorf("compare the snapshot: %w", w.failed)
	}
	for _, l := range w.lists {
		what, err := l.await(ctx, func() string {
			for name, rev := range l.changed {
				if _, ok := l.events[eventKey{rev, name}]; !ok && (rev > 0 || !l.gone[name]) {
					return name
				}
				delete(l.changed, name)
			}
			return ""
		}, func(context.Context) bool { return false })
		if err != nil {
			return fmt.Errorf("compare the snapshot: %w", err)
		}
		if what != "" {
			return fmt.Errorf("%w: compare the snapshot: %s %s has changed, and the API server sends no event of it", engine.ErrUnreachable, l.kind.gvr.Resource, what)
		}
	}
	return nil
}

// restOfKey returns what comes after its kind's directory in the key of an object.
func restOfKey(m metav1.Object) string {
	if ns := m.GetNamespace(); ns != "" {
		return ns + "/" + m.GetName()
	}
	return m.GetName()
}

func revisionOf(resourceVersion string) (int64, error) {
	rev, err := strconv.ParseInt(resourceVersion, 10, 64)
	if err != nil || rev <= 0 {
		return 0, fmt.Errorf("resourceVersion %q is no revision of etcd", resourceVersion)
	}
	return rev, nil
}

// stateOf returns the digest of what is compared of an object, which it changes. What the
// API server does not store is left out, and the record of who set which field, which
// confers nothing.
func (l *witnessList) stateOf(o runtime.Object) (digest, error) {
	m, err := meta.Accessor(o)
	if err != nil {
		return digest{}, err
	}
	m.SetResourceVersion("")
	m.SetSelfLink("")
	m.SetManagedFields(nil)
	var b []byte
	switch o := o.(type) {
	case *metav1.PartialObjectMetadata:
		b, err = o.ObjectMeta.Marshal()
	case interface{ Marshal() ([]byte, error) }:
		if ns, ok := o.(*corev1.Namespace); ok {
			// API servers add it when they read what one before v1.21 has stored.
			metav1.SetMetaDataLabel(&ns.ObjectMeta, corev1.LabelMetadataName, ns.Name)
		}
		b, err = o.Marshal()
	default:
		err = fmt.Errorf("%T cannot be compared", o)
	}
	if err != nil {
		return digest{}, err
	}
	return sha256.Sum256(b), nil
}

// stored returns the digest of what is compared of an entry. An entry that the API server
// has encrypted is sealed.
func (l *witnessList) stored(e backup.EtcdEntry) (state digest, sealed bool, err error) {
	if bytes.HasPrefix(e.Value, []byte("k8s:enc:")) {
		return state, true, nil
	}
	var o runtime.Object
	if l.kind.kind == "" {
		o, err = metadataOf(e.Value)
	} else {
		o, err = decodeAs(e.Value, l.kind.gvr.GroupVersion().WithKind(l.kind.kind))
	}
	if err == nil {
		state, err = l.stateOf(o)
	}
	if err != nil {
		return state, false, fmt.Errorf("its %s is not readable", clean(string(e.Key)))
	}
	return state, false, nil
}

// decodeAs reads a stored object as a version of its kind. The fields of kinds that are
// compared as a whole are the same in all versions.
func decodeAs(value []byte, want schema.GroupVersionKind) (runtime.Object, error) {
	o, got, err := scheme.Codecs.UniversalDeserializer().Decode(value, nil, nil)
	switch {
	case err != nil:
		return nil, err
	case *got == want:
		return o, nil
	case got.GroupKind() != want.GroupKind():
		return nil, fmt.Errorf("it is a %s", got)
	}
	b, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	out, err := scheme.Scheme.New(want)
	if err != nil {
		return nil, err
	}
	return out, json.Unmarshal(b, out)
}

// metadataOf reads the metadata of a stored object of any kind, which is the first field of
// each in a protocol buffer.
func metadataOf(value []byte) (*metav1.PartialObjectMetadata, error) {
	out := &metav1.PartialObjectMetadata{}
	b, ok := bytes.CutPrefix(value, []byte("k8s\x00"))
	if !ok {
		return out, utiljson.Unmarshal(value, out)
	}
	var u runtime.Unknown
	if err := u.Unmarshal(b); err != nil {
		return nil, err
	}
	for b = u.Raw; len(b) > 0; {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		size := protowire.ConsumeFieldValue(num, typ, b[n:])
		if size < 0 {
			return nil, protowire.ParseError(size)
		}
		if num == 1 {
			part, k := protowire.ConsumeBytes(b[n:])
			if typ != protowire.BytesType || k < 0 {
				return nil, errors.New("it has no metadata")
			}
			if err := out.ObjectMeta.Unmarshal(part); err != nil {
				return nil, err
			}
		}
		b = b[n+size:]
	}
	return out, nil
}

// compare returns nil if the snapshot in r is what the API server's etcd had between the
// two lists of before, as far as before goes. The error wraps engine.ErrUnreachable if the
// member was only behind, or if the API server did not answer. What could not be compared
// is added to s.
func (c *Client) compare(ctx context.Context, r io.ReaderAt, s *backup.Snapshot, before *witness) error {
	err := compareWith(ctx, r, s, before)
	if err != nil {
		return fmt.Errorf("snapshot through the operator on %s: %w", s.Member, err)
	}
	return nil
}

func compareWith(ctx context.Context, r io.ReaderAt, s *backup.Snapshot, before *witness) error {
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
	if err := before.settle(ctx); err != nil {
		return err
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
	case len(before.lists) > 0 && revision > before.latest:
		return fmt.Errorf("%w: it ends with revision %d, and the API server was at %d after it had begun", engine.ErrImpostor, revision, before.latest)
	}
	sealed := 0
	for _, l := range before.lists {
		text, err := l.differs(ctx, revision)
		if err != nil {
			return err
		}
		if text != "" {
			return fmt.Errorf("%w: %s", engine.ErrImpostor, text)
		}
		sealed += l.sealed
	}
	if sealed > 0 {
		s.Unchecked = append(s.Unchecked, fmt.Sprintf("the contents of %d objects, which the API server has encrypted", sealed))
	}
	return nil
}

// read reads the whole of a snapshot and notes what it has of what was listed. The error
// says what it has and should not.
func (w *witness) read(ctx context.Context, db *backup.EtcdFile) (revision int64, err error) {
	// Objects that were not in the first lists, by key, with the revision of their last
	// change: one that is older than its list must have been deleted by then.
	others := map[string]int64{}
	later := 0
	revision, err = db.Read(ctx, func(e backup.EtcdEntry) error {
		l, name := w.listOf(e.Key)
		if l == nil {
			return nil
		}
		if e.Revision > l.revision {
			if later++; later > maxLater {
				return fmt.Errorf("it has more than %d entries that are newer than the API server's list", maxLater)
			}
			n := laterEntry{eventKey: eventKey{e.Revision, name}, witnessEvent: witnessEvent{deleted: e.Deleted}}
			if !e.Deleted {
				if n.state, n.sealed, err = l.stored(e); err != nil {
					return err
				}
			}
			l.later = append(l.later, n)
			return nil
		}
		o := l.objects[name]
		switch {
		case o != nil:
			o.found, o.gone = e.Revision, e.Deleted
			if e.Revision != o.revision || e.Deleted {
				return nil
			}
			state, sealed, err := l.stored(e)
			switch {
			case err != nil:
				return err
			case sealed:
				l.sealed++
			case state != o.state:
				return fmt.Errorf("its %s says something else than the API server's", clean(string(e.Key)))
			}
		case e.Deleted:
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

// listOf returns the list that a key belongs to, and the rest of the key.
// "/registry/roles/kube-system/x" is of "/registry/roles/", and the directories of some
// kinds begin with their group.
func (w *witness) listOf(key []byte) (*witnessList, string) {
	if !bytes.HasPrefix(key, []byte(etcdPrefix)) {
		return nil, ""
	}
	at := len(etcdPrefix)
	for range 2 {
		i := bytes.IndexByte(key[at:], '/')
		if i < 0 {
			return nil, ""
		}
		at += i + 1
		if l := w.lists[string(key[:at])]; l != nil {
			return l, string(key[at:])
		}
	}
	return nil, ""
}

// never is whether the API server says that there was no such object at the revision of
// an entry. It knows for some minutes.
func (l *witnessList) never(ctx context.Context, n laterEntry) bool {
	if n.deleted {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	o := metav1.ListOptions{ResourceVersion: strconv.FormatInt(n.revision, 10), ResourceVersionMatch: metav1.ResourceVersionMatchExact}
	namespace, name, ok := strings.Cut(n.name, "/")
	if o.FieldSelector = selectors.OneTermEqualSelector("metadata.name", name).String(); !ok {
		o.FieldSelector = selectors.OneTermEqualSelector("metadata.name", namespace).String()
	}
	found := false
	_, err := pages(ctx, l.api.names, func(_ runtime.Object, m metav1.Object) error {
		found = found || restOfKey(m) == n.name && m.GetResourceVersion() == o.ResourceVersion
		return nil
	}, o)
	return err == nil && !found
}

// differs says where a snapshot of a revision that was read differs from the API server's
// state at that revision; empty if nowhere.
func (l *witnessList) differs(ctx context.Context, revision int64) (text string, err error) {
	// Each entry that is newer than the first list must have its event.
	i := 0
	if text, err = l.await(ctx, func() string {
		for ; i < len(l.later); i++ {
			n := l.later[i]
			if _, ok := l.events[n.eventKey]; !ok {
				return fmt.Sprintf("it has %s%s of revision %d, and the API server never had", l.dir, clean(n.name), n.revision)
			}
		}
		return ""
	}, func(ctx context.Context) bool { return l.never(ctx, l.later[i]) }); text != "" || err != nil {
		return text, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	found := map[string]laterEntry{}
	for _, n := range l.later {
		e := l.events[n.eventKey]
		switch {
		case e.deleted != n.deleted || !n.sealed && e.state != n.state:
			return fmt.Sprintf("its %s%s of revision %d says something else than the API server's", l.dir, clean(n.name), n.revision), nil
		case n.sealed:
			l.sealed++
		}
		found[n.name] = n // they are in the order of their revisions
	}
	// The last event of each object up to the revision is its state.
	last := map[string]eventKey{}
	for k := range l.events {
		if k.revision <= revision && k.revision > last[k.name].revision {
			last[k.name] = k
		}
	}
	for name, k := range last {
		n, ok := found[name]
		o := l.objects[name]
		live := ok && !n.deleted || !ok && o != nil && o.found > 0 && !o.gone
		switch {
		case l.events[k].deleted && live:
			return fmt.Sprintf("it has %s%s, which was deleted at revision %d", l.dir, name, k.revision), nil
		case !l.events[k].deleted && n.revision != k.revision:
			return fmt.Sprintf("it lacks %s%s of revision %d", l.dir, name, k.revision), nil
		}
	}
	for name, o := range l.objects {
		if _, ok := last[name]; ok || o.found == o.revision && !o.gone {
			continue
		}
		if o.found == 0 {
			return fmt.Sprintf("it lacks %s%s, which the API server has since revision %d", l.dir, name, o.revision), nil
		}
		return fmt.Sprintf("it has %s%s of revision %d, and the API server that of %d", l.dir, name, o.found, o.revision), nil
	}
	return "", nil
}

// clean makes a key of a snapshot fit for an error: it may be hostile.
func clean(key string) string {
	const most = 200
	return strings.Trim(strconv.QuoteToASCII(key[:min(len(key), most)]), `"`)
}
