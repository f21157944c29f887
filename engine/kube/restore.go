package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/restmapper"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/operator/api/v1alpha1"
)

var _ engine.Restorer = (*Client)(nil)

// restoreManager owns the fields that a restore sets. It separates objects that an interrupted
// restore made from all others.
const restoreManager = "constellation-restore"

const (
	// kindLimit bounds the wait until a definition is served, or until an old one of its name is
	// deleted.
	kindLimit = time.Minute
	kindPoll  = 50 * time.Millisecond
	// hardTries is the number of attempts of a write that fails with an internal error.
	hardTries = 3
)

// Reasons why an object is not restored or overwritten. A rule does not apply to objects that
// a selector names explicitly.
const (
	ruleIntents = "it records an operation in progress, which the operator would resume; name it with --only to restore it anyway"
	ruleOther   = "it belongs to the cluster of the backup; name it with --only to restore it into this one"
	ruleCareful = "it controls the version of nodes, admission of machines, or Helm's records; name it with --only to overwrite it"
	ruleRecord  = "the cluster has a newer record of this Helm release; name it with --only to restore it anyway"
	ruleTicket  = "it is a bootstrap token; name it with --only to restore it anyway"
	ruleToken   = "it is the token of a deleted ServiceAccount"
	rulePlan    = "a Plan starts Jobs with all rights on nodes; name it with --only to restore it anyway"
	ruleCode    = "a built-in kind can run programs or grant rights; name it with --only to restore it anyway"
	ruleHook    = "the API server would send all its objects to the conversion webhook that it names; name it with --only to restore it anyway"
	ruleHooked  = "its definition was left out; name both with --only to restore them anyway"
	ruleProof   = "nothing proves who made the backup, and the cluster itself depends on it; name it with --only to restore it anyway"
)

// builtInGroups are the API groups that API servers serve without a definition, beside the core group. No backup of ours
// has objects of them: an attacker may have added some.
var builtInGroups = map[string]bool{
	"admissionregistration.k8s.io": true, "apiregistration.k8s.io": true, "apps": true, "authentication.k8s.io": true, "authorization.k8s.io": true,
	"autoscaling": true, "batch": true, "certificates.k8s.io": true, "coordination.k8s.io": true, "discovery.k8s.io": true, "events.k8s.io": true,
	"extensions": true, "flowcontrol.apiserver.k8s.io": true, "internal.apiserver.k8s.io": true, "networking.k8s.io": true, "node.k8s.io": true,
	"policy": true, "rbac.authorization.k8s.io": true, "resource.k8s.io": true, "scheduling.k8s.io": true, "storage.k8s.io": true,
	"storagemigration.k8s.io": true,
}

// codeRule returns why objects of a type are restored only by name; empty if they are restored.
func codeRule(t backup.Type) string {
	switch {
	case t.Group == "upgrade.cattle.io" && t.Resource == "plans":
		return rulePlan
	case t.Group == "" && t.Resource != "configmaps" && t.Resource != "secrets" || builtInGroups[t.Group]:
		return ruleCode
	}
	return ""
}

// restore is one call of Restore.
type restore struct {
	c      *Client
	w      *wire
	b      *backup.Backup
	o      engine.RestoreOptions
	pace   *pace
	report func(engine.RestoreReport) // calls do not overlap
	mapper meta.ResettableRESTMapper

	types   []backup.Type   // types to restore, without definitions
	foreign bool            // the backup is of another cluster
	owned   map[string]bool // files of the backup whose objects have owners
	level   map[string]int  // depth of the owner chain, by UID
	kinds   map[schema.GroupResource]*kind
	records map[string]int // newest revision by namespace and name of a Helm release

	mu sync.Mutex
	// uids maps owners' UIDs in the backup to those in the cluster: to "" before they are
	// restored.
	uids       map[string]owner
	found      map[string]string // UIDs of owners that were looked up by name
	namespaces map[string]*namespace
}

// owner is the result for an object that others name as their owner.
type owner struct {
	uid    string
	would  bool   // it would be created: it has no UID yet
	failed string // its name, if it could not be restored
	left   bool   // a rule left it out
}

// kind is the definition of a type in the cluster.
type kind struct {
	crd    *apiextensionsv1.CustomResourceDefinition
	fresh  bool   // this restore created it
	would  bool   // a dry run would create it
	absent bool   // it does not exist
	left   string // the rule that left it out
	code   bool   // because of its webhook
	err    string // why its objects cannot be restored
}

type namespace struct {
	once  sync.Once
	would bool
	err   error
}

// Restore implements [engine.Restorer].
//
// Definitions come first; it waits until they are served. Then come objects without owners,
// then their dependents, and so on. Objects are sent in the version in which they were read,
// without fields that API servers set; the API server converts them to the storage version.
// Owners get their new UIDs. Existing objects are read in pages in the same order and
// compared, so that resuming an interrupted restore costs little more than reading.
//
// At most mostWriters objects are in flight. In addition, memory holds a small record for each
// owner and each object with owners, and nothing for all others.
func (c *Client) Restore(ctx context.Context, b *backup.Backup, o engine.RestoreOptions, report func(engine.RestoreReport)) error {
	w, err := c.wire()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r := &restore{
		c: c, w: w, b: b, o: o, pace: newPace(), mapper: restmapper.NewDeferredDiscoveryRESTMapper(c.discovery),
		owned: map[string]bool{}, level: map[string]int{}, kinds: map[schema.GroupResource]*kind{}, records: map[string]int{},
		uids: map[string]owner{}, found: map[string]string{}, namespaces: map[string]*namespace{},
	}
	var mu sync.Mutex
	r.report = func(x engine.RestoreReport) {
		mu.Lock()
		defer mu.Unlock()
		report(x)
	}
	if err := chosen(b, o.Only); err != nil {
		return err
	}
	c.discovery.Invalidate()
	if err := r.look(ctx); err != nil {
		return err
	}
	if err := r.restoreKinds(ctx, cancel); err != nil {
		return err
	}
	most := 0
	for _, l := range r.level {
		most = max(most, l)
	}
	for level := range most + 1 {
		if err := r.restoreLevel(ctx, cancel, level); err != nil {
			return err
		}
	}
	return nil
}

// look reads the state that is needed before the first write.
func (r *restore) look(ctx context.Context) error {
	here, err := r.c.ClusterUID(ctx)
	if err != nil {
		return err
	}
	r.foreign = here != r.b.Manifest().Cluster.UID
	for o, err := range r.w.list(ctx, "/api/v1/namespaces", nil) {
		if err != nil {
			return fmt.Errorf("list namespaces: %w", err)
		}
		n, err := parseObject(o)
		if err != nil {
			return fmt.Errorf("list namespaces: %w", err)
		}
		there := &namespace{}
		there.once.Do(func() {})
		r.namespaces[n.name] = there
	}
	for _, f := range r.b.Manifest().Files {
		r.owned[f.Name] = f.Owners != nil
	}
	dependants := map[string][]string{}
	for _, t := range r.b.Manifest().Types {
		if isKinds(t) || !r.ofType(t) {
			continue
		}
		r.types = append(r.types, t)
		if isRecords(t) {
			if err := r.readRecords(ctx); err != nil {
				return err
			}
		}
		for x, err := range r.b.Owners(t) {
			if err != nil {
				return err
			}
			list, err := ownersOf(x.References)
			if err != nil {
				return fmt.Errorf("read owners of %s of the backup: %w", t, err)
			}
			for _, owned := range list {
				dependants[x.UID] = append(dependants[x.UID], owned.UID)
				r.uids[owned.UID] = owner{}
			}
		}
	}
	for uid := range dependants {
		r.levelOf(uid, dependants)
	}
	return nil
}

// levelOf is the depth of the owner chain. A cycle of owners counts as one without owner.
func (r *restore) levelOf(uid string, dependants map[string][]string) int {
	if l, ok := r.level[uid]; ok {
		return max(l, 0)
	}
	owners, ok := dependants[uid]
	if !ok {
		return 0
	}
	r.level[uid] = -1 // in progress
	level := 0
	for _, o := range owners {
		level = max(level, r.levelOf(o, dependants))
	}
	r.level[uid] = level + 1
	return level + 1
}

// readRecords reads the newest revisions of Helm releases.
func (r *restore) readRecords(ctx context.Context) error {
	for o, err := range r.w.list(ctx, "/api/v1/secrets", url.Values{"labelSelector": {"owner=helm"}, "fieldSelector": {"type=" + helmType}}) {
		if err != nil {
			return fmt.Errorf("list Helm records: %w", err)
		}
		s, err := parseObject(o)
		if err != nil {
			return fmt.Errorf("list Helm records: %w", err)
		}
		release, revision := recordOf(s)
		r.records[release] = max(r.records[release], revision)
	}
	return nil
}

// recordOf returns the release and the revision of a record.
func recordOf(s *object) (release string, revision int) {
	var labels map[string]string
	_ = json.Unmarshal(s.meta["labels"], &labels) // without labels it is not a record
	revision, _ = strconv.Atoi(labels["version"])
	return s.namespace + "/" + labels["name"], revision
}

func isKinds(t backup.Type) bool {
	return t.Group == kindsOfKinds.Group && t.Resource == kindsOfKinds.Resource
}

func isRecords(t backup.Type) bool {
	return slices.ContainsFunc(t.Files, func(f string) bool { return strings.HasPrefix(f, backup.Releases) })
}

// perFile splits a type into one per file.
func perFile(t backup.Type) (list []backup.Type) {
	for i := range t.Files {
		one := t
		one.Files = t.Files[i : i+1]
		list = append(list, one)
	}
	return list
}

// chosen returns an error unless each selector matches something.
func chosen(b *backup.Backup, only []engine.Selector) error {
	all := b.Manifest().Types
	for _, s := range only {
		of := slices.DeleteFunc(slices.Clone(all), func(t backup.Type) bool { return !s.OfType(t.Group, t.Resource) })
		if len(of) == 0 {
			return &plan.Error{Op: "select " + s.String(), Err: fmt.Errorf("the backup has no %s", backup.Type{Group: s.Group, Resource: s.Resource}), Remedy: near(all, s), Exit: plan.ExitUsage}
		}
		if !of[0].Namespaced && s.Name != "" && s.Namespace != "" {
			return &plan.Error{Op: "select " + s.String(), Err: fmt.Errorf("objects of %s have no namespace", of[0]), Remedy: "write " + engine.Selector{Group: s.Group, Resource: s.Resource, Namespace: s.Name}.String(), Exit: plan.ExitUsage}
		}
		match := s.Namespace == "" && s.Name == "" && slices.ContainsFunc(of, func(t backup.Type) bool { return t.Objects > 0 || !isKinds(t) && t.Group != "" })
		for _, t := range of {
			if match {
				break
			}
			for o, err := range saved(b, t) {
				if err != nil {
					return err
				}
				if match = s.Matches(nameOf(t, o)); match {
					break
				}
			}
		}
		if !match {
			return &plan.Error{Op: "select " + s.String(), Err: errors.New("nothing in the backup matches"), Remedy: fmt.Sprintf("list its content with `constellation backup show %s`", b.Manifest().ID), Exit: plan.ExitUsage}
		}
	}
	return nil
}

// near suggests types with similar names.
func near(all []backup.Type, s engine.Selector) string {
	var close []string
	for _, t := range all {
		if t.Group == s.Group || t.Resource == s.Resource || strings.EqualFold(t.Kind, s.Resource) || t.Resource == s.Resource+"s" {
			close = append(close, engine.Selector{Group: t.Group, Resource: t.Resource}.String())
		}
	}
	if len(close) == 0 || len(close) > 10 {
		return "list its types with `constellation backup show ID`"
	}
	return "it has " + strings.Join(slices.Compact(close), ", ")
}

// saved yields the objects of a type in a backup in the order of their keys.
func saved(b *backup.Backup, t backup.Type) iter.Seq2[*object, error] {
	var streams []iter.Seq2[*object, error]
	for _, one := range perFile(t) {
		if !isKinds(t) {
			streams = append(streams, inOrder(one.Files[0]+" of the backup", file(b, one)))
			continue
		}
		// Definitions that were created during the backup follow the others, again in order.
		runs, last := 1, ""
		for o, err := range file(b, one) {
			if err != nil {
				return func(yield func(*object, error) bool) { yield(nil, err) }
			}
			if o.key() < last {
				runs++
			}
			last = o.key()
		}
		for run := range runs {
			streams = append(streams, inOrder(one.Files[0]+" of the backup", func(yield func(*object, error) bool) {
				now, last := 0, ""
				for o, err := range file(b, one) {
					if err == nil {
						if o.key() < last {
							now++
						}
						last = o.key()
						if now > run {
							return
						}
					}
					if (err != nil || now == run) && (!yield(o, err) || err != nil) {
						return
					}
				}
			}))
		}
	}
	if len(streams) == 0 {
		return func(func(*object, error) bool) {}
	}
	return merged(streams...)
}

// file yields the objects of the only file of a type.
func file(b *backup.Backup, t backup.Type) iter.Seq2[*object, error] {
	return func(yield func(*object, error) bool) {
		for x, err := range b.Objects(t) {
			var o *object
			if err == nil {
				if o, err = parseObject(x.JSON); err == nil {
					o.owners = slices.Clone(x.Owners)
				} else {
					err = fmt.Errorf("read %s of the backup: %w", t.Files[0], err)
				}
			}
			if !yield(o, err) || err != nil {
				return
			}
		}
	}
}

func nameOf(t backup.Type, o *object) engine.ObjectName {
	return engine.ObjectName{Group: t.Group, Resource: t.Resource, Namespace: o.namespace, Name: o.name}
}

// pathOf is the path of a type, in a namespace if one is given.
func pathOf(t backup.Type, namespace string) string {
	p := "/apis/" + t.Group + "/" + t.Version
	if t.Group == "" {
		p = "/api/" + t.Version
	}
	if namespace != "" {
		p += "/namespaces/" + url.PathEscape(namespace)
	}
	return p + "/" + t.Resource
}

// pathOfObject is the URL path of an object of a backup. A backup can have any name, and parseObject refuses those that
// change the path even when they are escaped.
func pathOfObject(t backup.Type, o *object) string {
	return pathOf(t, o.namespace) + "/" + url.PathEscape(o.name)
}

// ofType reports whether any objects of t are restored.
func (r *restore) ofType(t backup.Type) bool {
	return len(r.o.Only) == 0 || slices.ContainsFunc(r.o.Only, func(s engine.Selector) bool { return s.OfType(t.Group, t.Resource) })
}

func (r *restore) wants(o engine.ObjectName) bool {
	return len(r.o.Only) == 0 || r.named(o)
}

// named reports whether a selector matches an object.
func (r *restore) named(o engine.ObjectName) bool {
	return slices.ContainsFunc(r.o.Only, func(s engine.Selector) bool { return s.Matches(o) })
}

// live yields the cluster's objects of a type at a path, in the order of keys.
func (w *wire) live(ctx context.Context, t backup.Type, path string, q url.Values) iter.Seq2[*object, error] {
	return inOrder(t.String()+" of the cluster", func(yield func(*object, error) bool) {
		for b, err := range w.list(ctx, path, q) {
			var o *object
			if err == nil {
				o, err = parseObject(b)
			}
			if err != nil {
				err = &unreadable{t, err}
			}
			if !yield(o, err) || err != nil {
				return
			}
		}
	})
}

// unreadable is the error of a type that the cluster cannot list.
type unreadable struct {
	t   backup.Type
	err error
}

func (e *unreadable) Error() string { return fmt.Sprintf("list %s: %v", e.t, e.err) }

func (e *unreadable) Unwrap() error { return e.err }

// task is an object to restore.
type task struct {
	t           backup.Type
	k           *kind   // nil of built-in types
	saved, live *object // live may be nil
}

// writers carries out tasks, at most mostWriters at a time.
type writers struct {
	jobs chan task
	wg   sync.WaitGroup
}

func (r *restore) startWriters(ctx context.Context, give func(error)) *writers {
	c := &writers{jobs: make(chan task)}
	for range mostWriters {
		c.wg.Go(func() {
			for j := range c.jobs {
				if ctx.Err() != nil {
					continue
				}
				x, err := r.one(ctx, j)
				switch {
				case ctx.Err() != nil: // its result is unknown
				case errors.Is(err, cluster.ErrDenied) && !errors.Is(err, cluster.ErrForbidden):
					give(err)
				case err != nil:
					r.fail(j, err)
				default:
					r.report(x)
				}
			}
		})
	}
	return c
}

// end returns when all tasks are done.
func (c *writers) end() {
	close(c.jobs)
	c.wg.Wait()
}

// fail reports that an object could not be restored.
func (r *restore) fail(j task, err error) {
	x := engine.RestoreReport{Object: nameOf(j.t, j.saved), State: engine.RestoreFailed, Text: without(brief(err), j.saved, j.live), Remedy: plan.Remedy(err)}
	r.mu.Lock()
	if _, ok := r.uids[j.saved.uid]; ok {
		r.uids[j.saved.uid] = owner{failed: x.Object.String()}
	}
	r.mu.Unlock()
	r.report(x)
}

// brief strips the engine's error class from an error.
func brief(err error) string {
	s := err.Error()
	for _, e := range []error{cluster.ErrAbsent, cluster.ErrForbidden, cluster.ErrDenied, cluster.ErrUnreachable} {
		s = strings.TrimPrefix(s, e.Error()+": ")
	}
	return s
}

// hidden replaces a value of an object.
const hidden = "…"

// numberRE matches the numbers that an API server quotes from an object.
var numberRE = regexp.MustCompile(`\b(value: )-?[0-9][0-9.eE+-]*`)

// without removes values of objects from an API server's message, which quotes rejected values
// that may be secret. A short value is removed only where it is quoted, to keep the sentence
// readable. Objects may be nil.
func without(text string, objects ...*object) string {
	const short = 8
	var values []string
	var collect func(v any)
	collect = func(v any) {
		switch v := v.(type) {
		case string:
			values = append(values, v)
		case []any:
			for _, x := range v {
				collect(x)
			}
		case map[string]any:
			for _, x := range v {
				collect(x)
			}
		}
	}
	names := map[string]bool{} // names are not secret
	for _, o := range objects {
		if o == nil {
			continue
		}
		names[o.name], names[o.namespace] = true, true
		for k, b := range o.fields {
			if k != "apiVersion" && k != "kind" {
				collect(value(b))
			}
		}
		for _, k := range []string{"annotations", "labels"} {
			collect(value(o.meta[k]))
		}
	}
	slices.SortFunc(values, func(a, b string) int { return len(b) - len(a) }) // longest first, so that a substring of another value follows it
	for _, v := range slices.Compact(values) {
		coded, err := json.Marshal(v) // another quoted form
		if err != nil || v == "" || names[v] {
			continue
		}
		text = strings.ReplaceAll(text, strconv.Quote(v), strconv.Quote(hidden))
		text = strings.ReplaceAll(text, string(coded), strconv.Quote(hidden))
		if len(v) >= short {
			text = strings.ReplaceAll(text, v, hidden)
		}
	}
	return numberRE.ReplaceAllString(text, "${1}"+hidden)
}

// restoreKinds restores the chosen definitions and those that chosen types need.
func (r *restore) restoreKinds(ctx context.Context, give func(error)) error {
	all := slices.IndexFunc(r.b.Manifest().Types, isKinds)
	if all < 0 {
		return nil
	}
	t := r.b.Manifest().Types[all]
	t.Status = false // messages about definitions quote no secrets
	wanted := func(o *object) bool {
		if r.wants(nameOf(t, o)) {
			return true
		}
		resource, group, _ := strings.Cut(o.name, ".")
		return slices.ContainsFunc(r.o.Only, func(s engine.Selector) bool { return s.OfType(group, resource) })
	}
	w := r.startWriters(ctx, give)
	err := func() error {
		defer w.end()
		for p, err := range pairs(saved(r.b, t), r.w.live(ctx, t, pathOf(t, ""), nil)) {
			if err != nil {
				return err
			}
			if p.saved == nil || !wanted(p.saved) {
				continue
			}
			select {
			case w.jobs <- task{t, nil, p.saved, p.live}:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		return nil
	}()
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	r.c.discovery.Invalidate()
	r.mapper.Reset()
	return r.awaitKinds(ctx)
}

// awaitKinds returns when all new definitions are served or have failed.
func (r *restore) awaitKinds(ctx context.Context) error {
	var wait []schema.GroupResource
	fresh := false
	for gr, k := range r.kinds {
		if k.err == "" && !k.would && k.left == "" {
			wait = append(wait, gr)
			fresh = fresh || k.fresh
		}
	}
	if fresh {
		r.report(engine.RestoreReport{State: engine.RestoreWaits, Text: "for the API server to serve new definitions"})
	}
	limited, cancel := context.WithTimeout(ctx, kindLimit)
	defer cancel()
	var group errgroup.Group
	group.SetLimit(firstWriters)
	for _, gr := range wait {
		k := r.kinds[gr]
		group.Go(func() error {
			if err := r.awaitKind(limited, gr, k); err != nil {
				k.err = "its definition is not served: " + brief(err)
			}
			return nil
		})
	}
	_ = group.Wait() // no task fails
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

func (r *restore) awaitKind(ctx context.Context, gr schema.GroupResource, k *kind) error {
	crd := kindsOfKinds.GroupVersion().String()
	why := errors.New("the condition Established is not true")
	for {
		err := retry(ctx, func(ctx context.Context) error {
			b, err := r.w.do(ctx, http.MethodGet, "/apis/"+crd+"/customresourcedefinitions/"+url.PathEscape(gr.String()), nil, "application/json", nil)
			if err != nil {
				return err
			}
			k.crd = &apiextensionsv1.CustomResourceDefinition{}
			return unmarshal(b, k.crd)
		})
		if err != nil {
			return err
		}
		established := false
		for _, c := range k.crd.Status.Conditions {
			switch {
			case c.Type == apiextensionsv1.NamesAccepted && c.Status == apiextensionsv1.ConditionFalse:
				return fmt.Errorf("its names were rejected: %s", c.Message)
			case c.Type == apiextensionsv1.Established && c.Status == apiextensionsv1.ConditionTrue:
				established = true
			}
		}
		if established {
			served, err := r.inDiscovery(ctx, k.crd)
			if err != nil || served {
				return err
			}
			why = errors.New("discovery does not list it")
		}
		select { // there is no event for this; the gap is a fraction of a second
		case <-ctx.Done():
			return why
		case <-time.After(kindPoll):
		}
	}
}

// inDiscovery reports whether discovery lists each served version of a kind.
func (r *restore) inDiscovery(ctx context.Context, crd *apiextensionsv1.CustomResourceDefinition) (bool, error) {
	for _, v := range crd.Spec.Versions {
		if !v.Served {
			continue
		}
		var list metav1.APIResourceList
		err := retry(ctx, func(ctx context.Context) error {
			b, err := r.w.do(ctx, http.MethodGet, "/apis/"+crd.Spec.Group+"/"+v.Name, nil, "application/json", nil)
			if err != nil {
				return err
			}
			return unmarshal(b, &list)
		})
		if errors.Is(err, cluster.ErrAbsent) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		if !slices.ContainsFunc(list.APIResources, func(x metav1.APIResource) bool { return x.Name == crd.Spec.Names.Plural }) {
			return false, nil
		}
	}
	return true, nil
}

// restoreLevel restores the objects whose owner chain has the depth level.
func (r *restore) restoreLevel(ctx context.Context, give func(error), level int) error {
	w := r.startWriters(ctx, give)
	err := func() error {
		defer w.end()
		for _, t := range r.types {
			if err := r.restoreType(ctx, w, t, level); err != nil {
				return err
			}
		}
		return nil
	}()
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return err
}

func (r *restore) restoreType(ctx context.Context, w *writers, t backup.Type, level int) error {
	t.Files = slices.DeleteFunc(slices.Clone(t.Files), func(f string) bool { return r.owned[f] != (level > 0) })
	if len(t.Files) == 0 {
		return nil
	}
	mine := func(o *object) bool { return r.wants(nameOf(t, o)) && r.level[o.uid] == level }
	if level > 0 { // skip reading the cluster if the backup has none
		if some, err := anySaved(r.b, t, mine); err != nil || !some {
			return err
		}
	}
	k := r.kindOf(ctx, &t)
	live := func(func(*object, error) bool) {} // empty
	if k == nil || k.err == "" && !k.fresh && !k.would && k.left == "" {
		live = r.w.live(ctx, t, pathOf(t, within(t)), selection(t))
	}
	for p, err := range pairs(saved(r.b, t), live) {
		var silent *unreadable
		if errors.As(err, &silent) && ctx.Err() == nil && (!errors.Is(err, cluster.ErrDenied) || errors.Is(err, cluster.ErrForbidden)) {
			r.report(engine.RestoreReport{
				Object: engine.ObjectName{Group: t.Group, Resource: t.Resource}, State: engine.RestoreFailed,
				Text: "the cluster's objects could not be read, so restoring this type stopped: " + brief(silent.err), Remedy: "fix the cause, then run the same command again",
			})
			return nil
		}
		if err != nil {
			return err
		}
		if p.saved == nil || !mine(p.saved) {
			continue
		}
		if k != nil && k.left != "" {
			r.leave(p.saved.uid)
			r.report(engine.RestoreReport{
				Object: nameOf(t, p.saved), State: engine.RestoreLeftOut, Text: ruleHooked, Code: k.code,
				Only: engine.Selector{Group: t.Group, Resource: t.Resource}.String(),
			})
			continue
		}
		if k != nil && k.err != "" {
			r.fail(task{t: t, saved: p.saved}, errors.New(k.err))
			continue
		}
		select {
		case w.jobs <- task{t, k, p.saved, p.live}:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// anySaved reports whether the backup has an object of a type that is meant.
func anySaved(b *backup.Backup, t backup.Type, meant func(*object) bool) (bool, error) {
	for o, err := range saved(b, t) {
		if err != nil || meant(o) {
			return err == nil, err
		}
	}
	return false, nil
}

// selection selects the objects of a type that a backup contains, as far as the API server can
// filter.
func selection(t backup.Type) url.Values {
	switch {
	case isRecords(t):
		return url.Values{"fieldSelector": {"type=" + helmType}}
	case t.Group == "" && t.Resource == "secrets":
		return url.Values{"fieldSelector": {"type!=" + helmType}}
	}
	return nil
}

// within is the namespace that a backup contains of a type; empty for all. Each namespace of
// ConfigMaps is a type of its own, in a folder of that name.
func within(t backup.Type) string {
	if t.Group != "" || t.Resource != "configmaps" || len(t.Files) == 0 {
		return ""
	}
	dir, _, _ := strings.Cut(t.Files[0], "/")
	if dir == "core" {
		return ""
	}
	return dir
}

// kindOf returns the definition of t, and sets in t the version in which its objects are
// written. Built-in types have no definition.
func (r *restore) kindOf(ctx context.Context, t *backup.Type) *kind {
	if t.Group == "" || builtInGroups[t.Group] {
		return nil
	}
	gr := schema.GroupResource{Group: t.Group, Resource: t.Resource}
	k := r.kinds[gr]
	if k == nil {
		k = &kind{}
		r.kinds[gr] = k
		limited, cancel := context.WithTimeout(ctx, requestLimit)
		defer cancel()
		if err := r.awaitKind(limited, gr, k); err != nil {
			k.absent = errors.Is(err, cluster.ErrAbsent)
			k.err = "it has no CustomResourceDefinition: " + brief(err)
		}
	}
	if k.err != "" || k.would || k.left != "" {
		return k
	}
	var stored apiextensionsv1.CustomResourceDefinitionVersion
	for _, v := range k.crd.Spec.Versions {
		if v.Name == t.Version && v.Served {
			t.Status = v.Subresources != nil && v.Subresources.Status != nil
			return k
		}
		if v.Storage {
			stored = v
		}
	}
	// Without conversion, versions differ by name only. The API server rejects unknown fields.
	if c := k.crd.Spec.Conversion; stored.Served && (c == nil || c.Strategy == apiextensionsv1.NoneConverter) {
		t.Version = stored.Name
		t.Status = stored.Subresources != nil && stored.Subresources.Status != nil
		return k
	}
	return &kind{err: fmt.Sprintf("its version %s is no longer served; restore its definition with --overwrite, or serve that version again", t.Version)}
}

// one restores an object.
func (r *restore) one(ctx context.Context, j task) (engine.RestoreReport, error) {
	x := engine.RestoreReport{Object: nameOf(j.t, j.saved)}
	if isKinds(j.t) {
		return r.oneKind(ctx, j)
	}
	why, err := r.rule(ctx, j)
	if err != nil {
		return x, err
	}
	if why != "" {
		return r.leftOut(j, why), nil
	}
	refs, note, err := r.owners(ctx, j)
	if err != nil {
		return x, err
	}
	if j.live != nil {
		return r.existing(ctx, j, refs)
	}
	x.State, x.Text = engine.RestoreCreated, note
	made, err := r.namespace(ctx, j.saved.namespace)
	if err != nil {
		return x, err
	}
	would := j.k != nil && j.k.would || made
	if r.o.Look || r.o.DryRun && would {
		r.made(j.saved.uid, "")
		if r.o.DryRun && would {
			x.Text = join(note, "not checked by the API server: the restore would first create its definition or namespace")
		}
		return x, nil
	}
	got, again, err := r.create(ctx, j, refs)
	if apierrors.IsAlreadyExists(err) {
		if j.live, err = r.get(ctx, j); err != nil {
			return x, err
		}
		there, err := r.existing(ctx, j, refs)
		if again && err == nil && (there.State == engine.RestoreSame || there.State == engine.RestoreCompleted) {
			there.State = engine.RestoreCreated // by the request whose answer was lost
		}
		return there, err
	}
	if err != nil {
		return x, err
	}
	r.made(j.saved.uid, string(got.UID))
	if kept, err := r.writeStatus(ctx, j, got); err != nil {
		return x, err
	} else if kept {
		x.Text = join(note, "its controller wrote the status first; that one was kept")
	}
	return x, nil
}

// leftOut reports an object that a rule leaves out.
func (r *restore) leftOut(j task, why string) engine.RestoreReport {
	x := engine.RestoreReport{Object: nameOf(j.t, j.saved), State: engine.RestoreLeftOut, Text: why, Code: why == rulePlan || why == ruleCode}
	if why != ruleToken {
		x.Only = x.Object.String()
	}
	if x.Code {
		r.leave(j.saved.uid)
	}
	return x
}

func join(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
}

// made records a created owner; in a dry run it has no UID.
func (r *restore) made(old, uid string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.uids[old]; ok {
		r.uids[old] = owner{uid: uid, would: uid == ""}
	}
}

// leave records that an owner was left out.
func (r *restore) leave(old string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.uids[old]; ok {
		r.uids[old] = owner{left: true}
	}
}

// rule returns why an object is not restored; empty if it is.
func (r *restore) rule(ctx context.Context, j task) (string, error) {
	o := nameOf(j.t, j.saved)
	if o.Resource == "secrets" && o.Group == "" && text(j.saved.fields["type"]) == string(corev1.SecretTypeServiceAccountToken) {
		return r.tokenRule(ctx, j)
	}
	if r.named(o) {
		return "", nil
	}
	switch {
	case o.Group == v1alpha1.GroupVersion.Group && (o.Resource == "pendingnodes" || o.Resource == "joiningnodes"):
		return ruleIntents, nil
	case codeRule(j.t) != "" && j.live == nil:
		return codeRule(j.t), nil
	case r.foreign && careful(j.t, j.saved):
		return ruleOther, nil
	case r.o.Unproven && careful(j.t, j.saved) && j.live == nil:
		return ruleProof, nil
	case isRecord(j.t, j.saved) && j.live == nil:
		release, revision := recordOf(j.saved)
		if newest := r.records[release]; newest > revision {
			return ruleRecord, nil
		}
	case o.Resource == "secrets" && o.Group == "" && text(j.saved.fields["type"]) == string(corev1.SecretTypeBootstrapToken):
		return ruleTicket, nil
	}
	return "", nil
}

// careful reports whether the cluster itself depends on an object.
func careful(t backup.Type, o *object) bool {
	return t.Group == v1alpha1.GroupVersion.Group || t.Group == "" && t.Resource == "configmaps" || isRecord(t, o) ||
		isKinds(t) && strings.HasSuffix(o.name, "."+v1alpha1.GroupVersion.Group)
}

// isRecord reports whether an object is a record of Helm, which finds them by their label. In which file of the backup it is
// proves nothing.
func isRecord(t backup.Type, o *object) bool {
	if t.Group != "" || t.Resource != "secrets" {
		return false
	}
	var labels map[string]string
	_ = json.Unmarshal(o.meta["labels"], &labels) // it may have none
	return labels["owner"] == "helm" || text(o.fields["type"]) == helmType
}

// tokenRule skips tokens that the cluster would remove at once.
func (r *restore) tokenRule(ctx context.Context, j task) (string, error) {
	var notes map[string]string
	_ = json.Unmarshal(j.saved.meta["annotations"], &notes) // without them it belongs to no ServiceAccount
	var m metav1.PartialObjectMetadata
	err := retry(ctx, func(ctx context.Context) error {
		b, err := r.w.do(ctx, http.MethodGet, "/api/v1/namespaces/"+url.PathEscape(j.saved.namespace)+"/serviceaccounts/"+url.PathEscape(notes[corev1.ServiceAccountNameKey]), nil, onlyMetadata, nil)
		if err != nil {
			return err
		}
		return unmarshal(b, &m)
	})
	switch {
	case errors.Is(err, cluster.ErrAbsent):
		return ruleToken, nil
	case err != nil:
		return "", err
	case string(m.UID) != notes[corev1.ServiceAccountUIDKey]:
		return ruleToken, nil
	}
	return "", nil
}

// owners returns the ownerReferences of an object with UIDs of this cluster; nil without. An
// owner that was deleted and is not in the backup is omitted, with a note: otherwise the
// garbage collector would delete the object.
func (r *restore) owners(ctx context.Context, j task) (refs json.RawMessage, note string, err error) {
	list, err := ownersOf(j.saved.owners)
	if err != nil || len(list) == 0 {
		return nil, "", err
	}
	var out []ownerReference
	for _, o := range list {
		r.mu.Lock()
		known := r.uids[o.UID]
		r.mu.Unlock()
		switch {
		case known.failed != "":
			return nil, "", &plan.Error{Err: fmt.Errorf("its owner %s could not be restored", known.failed), Remedy: "restore its owner first, then run the same command again"}
		case known.would:
			out = append(out, o) // for comparison only
			continue
		case known.uid == "":
			if known.uid, err = r.find(ctx, o, j.saved.namespace); err != nil {
				return nil, "", err
			}
		}
		if known.uid == "" && known.left {
			note = join(note, fmt.Sprintf("without its owner %s %s, which was left out", o.Kind, o.Name))
			continue
		}
		if known.uid == "" {
			note = join(note, fmt.Sprintf("without its owner %s %s, which was deleted", o.Kind, o.Name))
			continue
		}
		o.UID = known.uid
		out = append(out, o)
	}
	if len(out) == 0 {
		return nil, note, nil
	}
	refs, err = json.Marshal(out)
	return refs, note, err
}

// find returns the UID of an owner that this restore does not create; empty if there is none.
func (r *restore) find(ctx context.Context, o ownerReference, namespace string) (string, error) {
	gv, err := schema.ParseGroupVersion(o.APIVersion)
	if err != nil {
		return "", fmt.Errorf("read owner %s: %w", o.Name, err)
	}
	m, err := r.mapper.RESTMapping(o.groupKind(), gv.Version)
	if meta.IsNoMatchError(err) {
		m, err = r.mapper.RESTMapping(o.groupKind())
	}
	if meta.IsNoMatchError(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("find owner %s %s: %w", o.Kind, o.Name, classify(err))
	}
	t := backup.Type{Group: m.Resource.Group, Version: m.Resource.Version, Resource: m.Resource.Resource}
	if m.Scope.Name() == meta.RESTScopeNameRoot {
		namespace = ""
	}
	path := pathOf(t, namespace) + "/" + url.PathEscape(o.Name)
	r.mu.Lock()
	uid, ok := r.found[path]
	r.mu.Unlock()
	if ok {
		return uid, nil
	}
	var there metav1.PartialObjectMetadata
	err = retry(ctx, func(ctx context.Context) error {
		b, err := r.w.do(ctx, http.MethodGet, path, nil, onlyMetadata, nil)
		if err != nil {
			return err
		}
		return unmarshal(b, &there)
	})
	if err != nil && !errors.Is(err, cluster.ErrAbsent) {
		return "", fmt.Errorf("find owner %s %s: %w", o.Kind, o.Name, err)
	}
	if there.DeletionTimestamp == nil { // otherwise it is about to be deleted
		uid = string(there.UID)
	}
	r.mu.Lock()
	r.found[path] = uid
	r.mu.Unlock()
	return uid, nil
}

// namespace creates a missing namespace. Backups do not contain namespaces, so it has neither
// labels nor annotations. In a dry run it reports that it would create it.
func (r *restore) namespace(ctx context.Context, name string) (would bool, err error) {
	if name == "" {
		return false, nil
	}
	r.mu.Lock()
	n := r.namespaces[name]
	if n == nil {
		n = &namespace{}
		r.namespaces[name] = n
	}
	r.mu.Unlock()
	n.once.Do(func() {
		x := engine.RestoreReport{
			Object: engine.ObjectName{Resource: "namespaces", Name: name}, State: engine.RestoreCreated,
			Text: "created for objects of the backup; its original labels and annotations are not in the backup",
		}
		if r.o.Look || r.o.DryRun {
			n.would = true
			r.report(x)
			return
		}
		b := []byte(`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":` + strconv.Quote(name) + `}}`)
		_, _, n.err = r.send(ctx, http.MethodPost, "/api/v1/namespaces", nil, b, nil)
		switch {
		case apierrors.IsAlreadyExists(n.err):
			n.err = nil
		case n.err != nil:
			n.err = fmt.Errorf("create namespace %s: %w", name, n.err)
		default:
			r.report(x)
		}
	})
	return n.would, n.err
}

// body is the object to send: without fields that API servers set, with owners of this
// cluster, and with meta merged in.
func (r *restore) body(j task, refs json.RawMessage, more map[string]string) ([]byte, error) {
	m := maps.Clone(j.saved.meta)
	for _, k := range serverSet {
		delete(m, k)
	}
	if len(refs) > 0 && !r.o.DryRun { // in a dry run new owners have no UID
		m["ownerReferences"] = refs
	}
	for k, v := range more {
		m[k] = json.RawMessage(strconv.Quote(v))
	}
	mb, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	f := maps.Clone(j.saved.fields)
	f["apiVersion"] = json.RawMessage(strconv.Quote(j.t.APIVersion()))
	f["kind"] = json.RawMessage(strconv.Quote(j.t.Kind))
	f["metadata"] = mb
	if j.t.Status || isKinds(j.t) {
		delete(f, "status")
	}
	return json.Marshal(f)
}

// parameters are the parameters of writes. The API server would otherwise drop unknown fields
// silently.
func (r *restore) parameters() url.Values {
	q := url.Values{"fieldManager": {restoreManager}, "fieldValidation": {"Strict"}}
	if r.o.DryRun {
		q.Set("dryRun", metav1.DryRunAll)
	}
	return q
}

// create creates an object, and reports whether an earlier attempt may have created it.
func (r *restore) create(ctx context.Context, j task, refs json.RawMessage) (got metav1.ObjectMeta, again bool, err error) {
	b, err := r.body(j, refs, nil)
	if err != nil {
		return got, false, err
	}
	return r.send(ctx, http.MethodPost, pathOf(j.t, j.saved.namespace), r.parameters(), b, j.k)
}

// get reads an object of the cluster.
func (r *restore) get(ctx context.Context, j task) (o *object, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		b, err := r.w.do(ctx, http.MethodGet, pathOfObject(j.t, j.saved), nil, "application/json", nil)
		if err != nil {
			return err
		}
		o, err = parseObject(b)
		return err
	})
	return o, err
}

// existing compares an object with that of the cluster, and overwrites it if requested.
func (r *restore) existing(ctx context.Context, j task, refs json.RawMessage) (engine.RestoreReport, error) {
	x := engine.RestoreReport{Object: nameOf(j.t, j.saved), State: engine.RestoreSame}
	for try := 0; ; try++ {
		if j.live.deleting() {
			return x, &plan.Error{Err: errors.New("it exists, but is being deleted"), Remedy: "wait until its finalizers are gone, then run the same command again"}
		}
		r.made(j.saved.uid, j.live.uid)
		// The status of a live object belongs to its controller.
		f := compare(j.saved, j.live, !j.t.Status && !isKinds(j.t), refs)
		if !f.any() {
			if !j.t.Status || none(j.saved.fields["status"]) {
				return x, nil
			}
			switch interrupted, without := r.interrupted(j.live), none(j.live.fields["status"]); {
			case interrupted || without && r.o.Overwrite && (!careful(j.t, j.saved) || r.named(x.Object)):
			case without: // its controller has not set a status, and still may
				x.State, x.Text = engine.RestoreLeft, "has no status"
				return x, nil
			default:
				return x, nil
			}
			x.State = engine.RestoreCompleted
			if r.o.Look || r.o.DryRun {
				return x, nil
			}
			_, err := r.writeStatus(ctx, j, metaOf(j.live))
			return x, err
		}
		x.State, x.Text = engine.RestoreLeft, "differs in "+f.String()
		if !r.o.Overwrite {
			return x, nil
		}
		if why := r.carefulRule(j); why != "" {
			x.Text += "; " + why
			return x, nil
		}
		x.State = engine.RestoreOverwritten
		if r.o.Look {
			return x, nil
		}
		err := r.overwrite(ctx, j, refs)
		if (apierrors.IsConflict(err) || apierrors.IsNotFound(err)) && try < hardTries {
			if j.live, err = r.get(ctx, j); err != nil {
				return x, err
			}
			continue
		}
		return x, err
	}
}

// carefulRule returns why an existing object is not overwritten; empty if it is.
func (r *restore) carefulRule(j task) string {
	switch {
	case r.named(nameOf(j.t, j.saved)):
		return ""
	case careful(j.t, j.saved):
		return ruleCareful
	case codeRule(j.t) != "":
		return codeRule(j.t)
	case isKinds(j.t) && r.hooked(j.saved) && !slices.Equal(conversion(j.saved), conversion(j.live)):
		return ruleHook
	}
	return ""
}

// hooked reports whether a definition has a conversion webhook that no selector names.
func (r *restore) hooked(o *object) bool {
	resource, group, _ := strings.Cut(o.name, ".")
	return slices.Contains(conversion(o), string(apiextensionsv1.WebhookConverter)) &&
		!slices.ContainsFunc(r.o.Only, func(s engine.Selector) bool { return s.OfType(group, resource) })
}

// conversion is the strategy of a definition's conversion and where its webhook is.
func conversion(o *object) []string {
	var spec struct {
		Conversion *struct {
			Strategy string `json:"strategy"`
			Webhook  *struct {
				ClientConfig json.RawMessage `json:"clientConfig"`
			} `json:"webhook"`
		} `json:"conversion"`
	}
	if json.Unmarshal(o.fields["spec"], &spec) != nil || spec.Conversion == nil {
		return nil
	}
	list := []string{spec.Conversion.Strategy}
	if w := spec.Conversion.Webhook; w != nil {
		var config apiextensionsv1.WebhookClientConfig
		if json.Unmarshal(w.ClientConfig, &config) != nil {
			return append(list, string(w.ClientConfig))
		}
		// Not the authority of the webhook: the webhook stays the same, and authorities are renewed.
		if config.URL != nil {
			list = append(list, *config.URL)
		}
		if s := config.Service; s != nil {
			list = append(list, s.Namespace, s.Name)
			if s.Path != nil {
				list = append(list, *s.Path)
			}
			if s.Port != nil && *s.Port != 443 { // the default
				list = append(list, strconv.Itoa(int(*s.Port)))
			}
		}
	}
	return list
}

// String is "spec.a, spec.b and 3 more".
func (f fields) String() string {
	const most = 5
	shown := f.paths[:min(most, len(f.paths))]
	s := strings.Join(shown, ", ")
	if n := len(f.paths) - len(shown) + f.more; n > 0 {
		s += fmt.Sprintf(" and %d more", n)
	}
	return s
}

// none reports whether a field is absent or holds nothing.
func none(field json.RawMessage) bool {
	switch string(field) {
	case "", "null", "{}":
		return true
	}
	return false
}

// interrupted reports whether a restore created an object and ended before it wrote the
// status, and no status was written since.
func (r *restore) interrupted(o *object) bool {
	var list []metav1.ManagedFieldsEntry
	if json.Unmarshal(o.meta["managedFields"], &list) != nil {
		return false
	}
	ours := false
	for _, m := range list {
		if m.Subresource == "status" {
			return false
		}
		ours = ours || m.Manager == restoreManager
	}
	return ours
}

func metaOf(o *object) metav1.ObjectMeta {
	return metav1.ObjectMeta{ResourceVersion: text(o.meta["resourceVersion"]), UID: types.UID(o.uid)}
}

// overwrite resets an object of the cluster to the backup. An immutable object is deleted and
// created again.
func (r *restore) overwrite(ctx context.Context, j task, refs json.RawMessage) error {
	path := pathOfObject(j.t, j.saved)
	now := metaOf(j.live)
	if string(j.live.fields["immutable"]) == "true" {
		b, err := json.Marshal(metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &now.UID, ResourceVersion: &now.ResourceVersion}, DryRun: r.parameters()["dryRun"]})
		if err != nil {
			return err
		}
		if _, _, err := r.send(ctx, http.MethodDelete, path, nil, b, nil); err != nil || r.o.DryRun {
			return err
		}
		got, _, err := r.create(ctx, j, refs)
		r.made(j.saved.uid, string(got.UID))
		return err
	}
	b, err := r.body(j, refs, map[string]string{"resourceVersion": now.ResourceVersion, "uid": string(now.UID)})
	if err != nil {
		return err
	}
	got, _, err := r.send(ctx, http.MethodPut, path, r.parameters(), b, nil)
	if err != nil || r.o.DryRun {
		return err
	}
	_, err = r.writeStatus(ctx, j, got)
	return err
}

// writeStatus writes the status of an object that was just written, if it has one. It reports
// in kept whether another writer was faster.
func (r *restore) writeStatus(ctx context.Context, j task, got metav1.ObjectMeta) (kept bool, err error) {
	status := j.saved.fields["status"]
	if !j.t.Status || len(status) == 0 || string(status) == "null" || r.o.DryRun {
		return false, nil
	}
	b, err := json.Marshal(map[string]any{
		"apiVersion": j.t.APIVersion(), "kind": j.t.Kind, "status": status,
		"metadata": map[string]string{"name": j.saved.name, "namespace": j.saved.namespace, "resourceVersion": got.ResourceVersion, "uid": string(got.UID)},
	})
	if err != nil {
		return false, err
	}
	_, again, err := r.send(ctx, http.MethodPut, pathOfObject(j.t, j.saved)+"/status", r.parameters(), b, nil)
	if apierrors.IsConflict(err) {
		return !again, nil // after a retry the first attempt may have been ours
	}
	if err != nil {
		return false, fmt.Errorf("write its status: %w", err)
	}
	return false, nil
}

// send makes a write at the pace of the API server until it is done or rejected. It reports in
// again whether it sent more than one request.
func (r *restore) send(ctx context.Context, method, path string, q url.Values, b []byte, k *kind) (got metav1.ObjectMeta, again bool, err error) {
	since := time.Now()
	hard := 0
	for {
		began, err := r.pace.begin(ctx)
		if err != nil {
			return got, again, err
		}
		limited, cancel := context.WithTimeout(ctx, requestLimit)
		answer, err := r.w.do(limited, method, path, q, onlyMetadata, b)
		cancel()
		if err == nil {
			r.pace.end(began, false, 0)
			var m metav1.PartialObjectMetadata
			return m.ObjectMeta, again, decodeMeta(answer, &m, &got)
		}
		soon, _ := apierrors.SuggestsClientDelay(err)
		wait := max(time.Duration(soon)*time.Second, 100*time.Millisecond)
		switch {
		case ctx.Err() != nil:
			r.pace.end(began, false, 0)
			return got, again, ctx.Err()
		case unserved(err) && k != nil && k.fresh && time.Since(since) < kindLimit:
			// Another API server than the one that rejected it, or the same one a moment later.
			r.pace.end(began, false, 0)
			select {
			case <-ctx.Done():
				return got, again, ctx.Err()
			case <-time.After(kindPoll):
			}
		case apierrors.IsInternalError(err) && hard == hardTries-1:
			r.pace.end(began, false, 0)
			return got, again, err
		case errors.Is(classify(err), cluster.ErrUnreachable):
			if apierrors.IsInternalError(err) {
				hard++ // a failing webhook does not recover soon
			}
			r.pace.end(began, true, wait)
			again = again || !apierrors.IsTooManyRequests(err)
		default:
			r.pace.end(began, false, 0)
			return got, again, classify(err)
		}
	}
}

func decodeMeta(b []byte, m *metav1.PartialObjectMetadata, into *metav1.ObjectMeta) error {
	if err := unmarshal(b, m); err != nil {
		return err
	}
	*into = m.ObjectMeta
	return nil
}

// unserved reports whether the API server does not serve the type at all.
func unserved(err error) bool {
	var s apierrors.APIStatus
	return apierrors.IsNotFound(err) && asStatus(err, &s) && (s.Status().Details == nil || s.Status().Details.Name == "")
}

func asStatus(err error, s *apierrors.APIStatus) bool { return errors.As(err, s) }

// oneKind restores a definition.
func (r *restore) oneKind(ctx context.Context, j task) (engine.RestoreReport, error) {
	x := engine.RestoreReport{Object: nameOf(j.t, j.saved), State: engine.RestoreCreated}
	resource, group, _ := strings.Cut(j.saved.name, ".")
	k := &kind{}
	defer func() {
		r.mu.Lock()
		r.kinds[schema.GroupResource{Group: group, Resource: resource}] = k
		r.mu.Unlock()
	}()
	broken := func(err error) (engine.RestoreReport, error) {
		k.err = "its definition could not be restored: " + brief(err)
		return x, err
	}
	if j.live != nil && j.live.deleting() {
		if r.o.Look || r.o.DryRun {
			k.would = true
			x.Text = "when the existing one has been deleted"
			return x, nil
		}
		if err := r.awaitGone(ctx, j); err != nil {
			return broken(err)
		}
		j.live = nil
	}
	if j.live == nil && !r.named(x.Object) {
		switch {
		case r.hooked(j.saved):
			k.left, k.code = ruleHook, true
		case r.foreign && careful(j.t, j.saved):
			k.left = ruleOther
		case r.o.Unproven && careful(j.t, j.saved):
			k.left = ruleProof
		}
		if k.left != "" {
			x.State, x.Text, x.Code = engine.RestoreLeftOut, k.left, k.code
			x.Only = engine.Selector{Group: group, Resource: resource}.String()
			return x, nil
		}
	}
	if j.live == nil {
		if r.o.Look {
			k.would = true
			r.made(j.saved.uid, "")
			return x, nil
		}
		got, _, err := r.create(ctx, j, nil)
		if err == nil {
			k.fresh, k.would = !r.o.DryRun, r.o.DryRun
			r.made(j.saved.uid, string(got.UID))
			return x, nil
		}
		if !apierrors.IsAlreadyExists(err) {
			return broken(err)
		}
		if j.live, err = r.get(ctx, j); err != nil {
			return broken(err)
		}
	}
	x, err := r.existing(ctx, j, nil)
	if err != nil {
		// The existing definition stays.
		return x, &plan.Error{Err: err, Remedy: cmp.Or(plan.Remedy(err), "its objects are restored into the existing definition; to replace it, delete it and run the same command again")}
	}
	return x, nil
}

// awaitGone waits until a definition is deleted.
func (r *restore) awaitGone(ctx context.Context, j task) error {
	r.report(engine.RestoreReport{Object: nameOf(j.t, j.saved), State: engine.RestoreWaits, Text: "for the deletion of " + j.saved.name})
	limited, cancel := context.WithTimeout(ctx, kindLimit)
	defer cancel()
	for {
		o, err := r.get(limited, j)
		if errors.Is(err, cluster.ErrAbsent) || err == nil && !o.deleting() {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil && limited.Err() == nil {
			return err
		}
		select { // its objects are deleted one by one
		case <-limited.Done():
			return &plan.Error{
				Err:    errors.New("it is being deleted and waits for finalizers of its objects"),
				Remedy: fmt.Sprintf("remove the finalizers of the remaining objects (`kubectl get %s -A`), then run the same command again", j.saved.name),
			}
		case <-time.After(kindPoll):
		}
	}
}

// ClusterUID implements [engine.Restorer].
func (c *Client) ClusterUID(ctx context.Context) (uid string, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		n, err := c.core.CoreV1().Namespaces().Get(ctx, systemNamespace, metav1.GetOptions{})
		if err == nil {
			uid = string(n.UID)
		}
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read namespace %s: %w", systemNamespace, err)
	}
	return uid, nil
}
