package kube

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/cluster"
)

// Differences implements [engine.Restorer].
//
// It compares what a new backup would contain. Backup and cluster are read side by side in the
// order of the keys in etcd, so that memory stays constant.
func (c *Client) Differences(ctx context.Context, b *backup.Backup, only []engine.Selector, report func(engine.Difference)) (engine.Compared, error) {
	var out engine.Compared
	w, err := c.wire()
	if err != nil {
		return out, err
	}
	if err := chosen(b, only); err != nil {
		return out, err
	}
	c.discovery.Invalidate()
	d := &differing{restore: &restore{c: c, w: w, b: b, o: engine.RestoreOptions{Only: only}, kinds: map[schema.GroupResource]*kind{}}, report: report}
	for _, p := range d.parts() {
		if !isKinds(p.t) && !d.ofType(p.t) {
			continue
		}
		out.Types++
		if err := d.try(ctx, p, &out); err != nil {
			return out, err
		}
	}
	for _, p := range d.since { // of kinds that the backup does not have
		if err := d.try(ctx, p, &out); err != nil {
			return out, err
		}
	}
	return out, nil
}

// differing is one call of Differences.
type differing struct {
	*restore
	report func(engine.Difference)
	since  []part // of kinds defined after the backup
}

// part is the unit of comparison: a type, or a backup's share of one.
type part struct {
	t     backup.Type
	path  string
	query url.Values
	skip  func(name string) bool // may be nil
}

// parts are what a new backup would contain of the types of this backup: definitions, built-in
// types, custom resources.
func (d *differing) parts() (list []part) {
	m := d.b.Manifest()
	for _, t := range m.Types {
		if isKinds(t) {
			list = append(list, part{t: t, path: pathOf(t, "")})
		}
	}
	// For types without objects the manifest does not name the files.
	for _, j := range builtIn(engine.DumpOptions{Secrets: m.Secrets}) {
		p := part{t: j.t, path: j.path, skip: j.skip}
		if j.selector != "" {
			p.query = url.Values{"fieldSelector": {j.selector}}
		}
		for _, f := range m.Files {
			name := strings.TrimSuffix(strings.TrimSuffix(f.Name, ".json"), ".owned")
			if name == cmp.Or(j.file, "core/"+j.t.Resource) {
				p.t.Files = append(p.t.Files, f.Name)
			}
		}
		list = append(list, p)
	}
	for _, t := range m.Types {
		if !isKinds(t) && t.Group != "" {
			list = append(list, part{t: t, path: pathOf(t, "")})
		}
	}
	return list
}

// try compares a part. It notes the parts of the cluster that cannot be read.
func (d *differing) try(ctx context.Context, p part, out *engine.Compared) error {
	err := d.ofOne(ctx, p, out)
	var silent *unreadable
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.As(err, &silent) && (!errors.Is(err, cluster.ErrDenied) || errors.Is(err, cluster.ErrForbidden)):
		out.Skipped = append(out.Skipped, fmt.Sprintf("%s: %s", p.t, brief(silent.err)))
		return nil
	}
	return err
}

func (d *differing) ofOne(ctx context.Context, part part, out *engine.Compared) error {
	t := part.t
	live := d.w.live(ctx, t, part.path, part.query)
	if !isKinds(t) {
		k := d.kindOf(ctx, &t)
		switch {
		case k != nil && k.absent:
			live = func(func(*object, error) bool) {} // all objects of it are unreadable
		case k != nil && k.err != "":
			return &unreadable{t, errors.New(k.err)}
		case k != nil:
			live = d.w.live(ctx, t, pathOf(t, ""), part.query) // in the version that is served now
		}
	}
	for p, err := range pairs(saved(d.b, t), live) {
		if err != nil {
			return err
		}
		if isKinds(t) && p.live != nil {
			if err := d.defined(p.live, out); err != nil {
				return err
			}
		}
		x := engine.Difference{Change: engine.ChangeChanged}
		switch {
		case p.saved == nil:
			x.Object, x.Change = nameOf(t, p.live), engine.ChangeAdded
		case p.live == nil:
			x.Object, x.Change = nameOf(t, p.saved), engine.ChangeRemoved
		default:
			x.Object = nameOf(t, p.saved)
		}
		if !d.compared(t, x.Object) || p.saved == nil && part.skip != nil && part.skip(p.live.name) {
			continue
		}
		if p.saved != nil {
			out.Objects++
		}
		if x.Change == engine.ChangeChanged {
			// The API server sets the status of a definition.
			f := compare(p.saved, p.live, !isKinds(t), p.saved.owners)
			if !f.any() {
				continue
			}
			x.Fields, x.More = f.paths, f.more
		}
		d.report(x)
	}
	return nil
}

// defined notes a kind that the backup does not have: all its objects are new.
func (d *differing) defined(o *object, out *engine.Compared) error {
	var k kindInfo
	for field, into := range map[string]any{"spec": &k.Spec, "status": &k.Status} {
		if b := o.fields[field]; len(b) > 0 {
			if err := json.Unmarshal(b, into); err != nil {
				return fmt.Errorf("read kind %s: %w", o.name, err)
			}
		}
	}
	t := backup.Type{Group: k.Spec.Group, Resource: k.Spec.Names.Plural}
	known := func(have backup.Type) bool { return have.Group == t.Group && have.Resource == t.Resource }
	if slices.ContainsFunc(d.b.Manifest().Types, known) || !d.ofType(t) {
		return nil
	}
	j, ok := jobOf(&k)
	switch {
	case ok:
		d.since = append(d.since, part{t: j.t, path: j.path})
	case k.established():
		out.Skipped = append(out.Skipped, fmt.Sprintf("%s: no version of it is served", t))
	}
	return nil
}

// compared reports whether a selector matches an object, or its definition.
func (d *differing) compared(t backup.Type, o engine.ObjectName) bool {
	if d.wants(o) {
		return true
	}
	resource, group, _ := strings.Cut(o.Name, ".")
	return isKinds(t) && slices.ContainsFunc(d.o.Only, func(s engine.Selector) bool { return s.OfType(group, resource) })
}

// object is a JSON object, decoded down to its metadata.
type object struct {
	namespace, name, uid string
	// fields are the object's fields except metadata; meta are those of metadata.
	fields, meta map[string]json.RawMessage
	// owners are the original ownerReferences of an object of a backup.
	owners json.RawMessage
}

func parseObject(b []byte) (*object, error) {
	o := &object{}
	if err := json.Unmarshal(b, &o.fields); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(o.fields["metadata"], &o.meta); err != nil {
		return nil, fmt.Errorf("read metadata: %w", err)
	}
	delete(o.fields, "metadata")
	o.namespace, o.name, o.uid = text(o.meta["namespace"]), text(o.meta["name"]), text(o.meta["uid"])
	if o.name == "" {
		return nil, fmt.Errorf("read metadata: name is missing")
	}
	for _, name := range []string{o.name, o.namespace} {
		if why := content.IsPathSegmentName(name); len(why) > 0 {
			return nil, fmt.Errorf("read metadata: name %q: it %s", name, strings.Join(why, ", "))
		}
	}
	return o, nil
}

// text decodes a JSON string; empty if b is not one.
func text(b json.RawMessage) string {
	var s string
	if json.Unmarshal(b, &s) != nil {
		return ""
	}
	return s
}

// key is the sort key of objects of a type: their key in etcd.
func (o *object) key() string {
	if o.namespace == "" {
		return o.name
	}
	return o.namespace + "/" + o.name
}

// deleting reports whether the object only waits for its finalizers.
func (o *object) deleting() bool { return len(o.meta["deletionTimestamp"]) > 0 }

// serverSet are the metadata fields that an API server sets itself. A new object has other
// values, or may not have them at all.
var serverSet = []string{
	"uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields", "selfLink",
	"ownerReferences", // set again with the UIDs of this cluster
}

// pair is an object in the backup and in the cluster; one of them may be nil.
type pair struct{ saved, live *object }

// pairs merges two streams in the order of keys.
func pairs(saved, live iter.Seq2[*object, error]) iter.Seq2[pair, error] {
	return func(yield func(pair, error) bool) {
		nextSaved, stop := iter.Pull2(saved)
		defer stop()
		nextLive, stop := iter.Pull2(live)
		defer stop()
		a, errA, okA := nextSaved()
		b, errB, okB := nextLive()
		for okA || okB {
			if errA != nil || errB != nil {
				yield(pair{}, cmp.Or(errA, errB))
				return
			}
			var p pair
			order := -1
			switch {
			case okA && okB:
				order = strings.Compare(a.key(), b.key())
			case okB:
				order = 1
			}
			if order <= 0 {
				p.saved = a
			}
			if order >= 0 {
				p.live = b
			}
			if !yield(p, nil) {
				return
			}
			if order <= 0 {
				a, errA, okA = nextSaved()
			}
			if order >= 0 {
				b, errB, okB = nextLive()
			}
		}
	}
}

// merged merges streams that are each in the order of keys.
func merged(streams ...iter.Seq2[*object, error]) iter.Seq2[*object, error] {
	if len(streams) == 1 {
		return streams[0]
	}
	return func(yield func(*object, error) bool) {
		type head struct {
			next func() (*object, error, bool)
			o    *object
		}
		var heads []*head
		for _, s := range streams {
			next, stop := iter.Pull2(s)
			defer stop()
			o, err, ok := next()
			if err != nil {
				yield(nil, err)
				return
			}
			if ok {
				heads = append(heads, &head{next, o})
			}
		}
		for len(heads) > 0 {
			first := slices.MinFunc(heads, func(a, b *head) int { return strings.Compare(a.o.key(), b.o.key()) })
			if !yield(first.o, nil) {
				return
			}
			o, err, ok := first.next()
			if err != nil {
				yield(nil, err)
				return
			}
			if first.o = o; !ok {
				heads = slices.DeleteFunc(heads, func(h *head) bool { return h == first })
			}
		}
	}
}

// inOrder passes a stream on and verifies the order of its keys, on which pairs depends.
func inOrder(what string, s iter.Seq2[*object, error]) iter.Seq2[*object, error] {
	return func(yield func(*object, error) bool) {
		last := ""
		for o, err := range s {
			if err != nil {
				yield(nil, err)
				return
			}
			if k := o.key(); k <= last {
				yield(nil, fmt.Errorf("%s: keys out of order: %s comes after %s", what, k, last))
				return
			}
			last = o.key()
			if !yield(o, nil) {
				return
			}
		}
	}
}

// maxFields bounds the listed differences of one object.
const maxFields = 20

// fields collects the paths of differences.
type fields struct {
	paths []string
	more  int
}

func (f *fields) add(path string) {
	if len(f.paths) == maxFields {
		f.more++
		return
	}
	f.paths = append(f.paths, path)
}

func (f *fields) any() bool { return len(f.paths) > 0 }

// compare returns the sorted paths in which two objects differ, ignoring fields that API
// servers set. It returns no values, since they may be secret. The status of saved counts if
// withStatus is set; its owners are compared by name with owners.
func compare(saved, live *object, withStatus bool, owners json.RawMessage) fields {
	var f fields
	for _, k := range keysOf(saved.meta, live.meta) {
		switch {
		case slices.Contains(serverSet, k) || k == "name" || k == "namespace":
		case bytes.Equal(saved.meta[k], live.meta[k]):
		default:
			f.walk("metadata."+k, value(saved.meta[k]), value(live.meta[k]), true)
		}
	}
	if live.deleting() {
		f.add("metadata.deletionTimestamp")
	}
	if !slices.Equal(ownerNames(owners), ownerNames(live.meta["ownerReferences"])) {
		f.add("metadata.ownerReferences")
	}
	for _, k := range keysOf(saved.fields, live.fields) {
		switch {
		case k == "apiVersion" || k == "kind" || k == "status" && !withStatus:
		case bytes.Equal(saved.fields[k], live.fields[k]):
		default:
			f.walk(k, value(saved.fields[k]), value(live.fields[k]), k == "status")
		}
	}
	slices.Sort(f.paths)
	return f
}

func keysOf(a, b map[string]json.RawMessage) []string {
	keys := slices.Collect(maps.Keys(a))
	for k := range b {
		if _, ok := a[k]; !ok {
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	return keys
}

// value decodes JSON that was decoded before; nil for empty input.
func value(b json.RawMessage) (v any) {
	if len(b) == 0 {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if d.Decode(&v) != nil {
		return nil
	}
	return v
}

// walk adds the paths below path in which a and b differ. If lax, an empty value equals an
// absent one.
func (f *fields) walk(path string, a, b any, lax bool) {
	if lax && empty(a) && empty(b) {
		return
	}
	switch a := a.(type) {
	case map[string]any:
		b, ok := b.(map[string]any)
		if !ok {
			break
		}
		for _, k := range slices.Sorted(maps.Keys(a)) {
			f.walk(path+step(k), a[k], b[k], false)
		}
		for _, k := range slices.Sorted(maps.Keys(b)) {
			if _, ok := a[k]; !ok {
				f.walk(path+step(k), nil, b[k], false)
			}
		}
		return
	case []any:
		b, ok := b.([]any)
		if !ok || len(a) != len(b) {
			break
		}
		for i := range a {
			f.walk(path+"["+strconv.Itoa(i)+"]", a[i], b[i], false)
		}
		return
	case json.Number:
		b, ok := b.(json.Number)
		if !ok {
			break
		}
		x, errX := a.Float64()
		y, errY := b.Float64()
		if a == b || errX == nil && errY == nil && x == y && strings.ContainsAny(string(a+b), ".eE") {
			return
		}
	default:
		switch b.(type) {
		case map[string]any, []any: // not comparable
		default:
			if a == b {
				return
			}
		}
	}
	f.add(path)
}

func empty(v any) bool {
	switch v := v.(type) {
	case nil:
		return true
	case map[string]any:
		return len(v) == 0
	case []any:
		return len(v) == 0
	}
	return false
}

var plainKey = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_-]*$`)

// step formats a key as a path element.
func step(k string) string {
	if plainKey.MatchString(k) {
		return "." + k
	}
	return "[" + strconv.Quote(k) + "]"
}

// ownerReference is an owner as its dependent names it.
type ownerReference struct {
	APIVersion         string `json:"apiVersion"`
	Kind               string `json:"kind"`
	Name               string `json:"name"`
	UID                string `json:"uid"`
	Controller         *bool  `json:"controller,omitempty"`
	BlockOwnerDeletion *bool  `json:"blockOwnerDeletion,omitempty"`
}

func (r ownerReference) groupKind() schema.GroupKind {
	gv, _ := schema.ParseGroupVersion(r.APIVersion)
	return schema.GroupKind{Group: gv.Group, Kind: r.Kind}
}

func ownersOf(b json.RawMessage) (list []ownerReference, err error) {
	if len(b) > 0 {
		err = json.Unmarshal(b, &list)
	}
	return list, err
}

// ownerNames are the owners without their UIDs, which differ between clusters, sorted.
func ownerNames(b json.RawMessage) (names []string) {
	list, _ := ownersOf(b) // it was parsed before
	for _, r := range list {
		yes := func(p *bool) bool { return p != nil && *p }
		names = append(names, fmt.Sprint(r.groupKind(), "/", r.Name, yes(r.Controller), yes(r.BlockOwnerDeletion)))
	}
	slices.Sort(names)
	return names
}
