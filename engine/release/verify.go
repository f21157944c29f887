package release

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"constellation/engine/version"
)

// Report is the result of Verify.
type Report struct {
	Source   string    `json:"source"`
	Sequence uint64    `json:"sequence,omitempty"`
	Created  time.Time `json:"created,omitzero"`
	Expires  time.Time `json:"expires,omitzero"`
	// Signer is the key that signed the index; empty if no trusted key did.
	Signer string `json:"signer,omitempty"`
	// Keys may sign; KeySet is the number of their set, zero if there is none.
	Keys     []string `json:"keys"`
	KeySet   uint64   `json:"keySet,omitempty"`
	Releases []string `json:"releases"`
	// Root is the version of the feed's root that was verified; zero if there is none. Warning is
	// then a weakness of the feed.
	Root    uint64 `json:"root,omitempty"`
	Warning string `json:"warning,omitempty"`
	// Problems are about the feed as a whole, Files about each file.
	Problems []string     `json:"problems"`
	Files    []FileReport `json:"files"`
	// NoDigest are images and downloads without a known digest: downloads by these names cannot
	// be verified.
	NoDigest []string `json:"noDigest"`
	// Err is the first problem as an error, for errors.Is; nil if there is none.
	Err error `json:"-"`
}

// note keeps the first problem as an error.
func (r *Report) note(err error) string {
	if r.Err == nil {
		r.Err = err
	}
	return err.Error()
}

// FileReport is the result of Verify for one file.
type FileReport struct {
	Name   string `json:"name"`
	Length int64  `json:"length"`
	SHA256 string `json:"sha256"`
	// Signer is the key that signed it; empty if no trusted key did.
	Signer string `json:"signer,omitempty"`
	// Problem is empty if there is none.
	Problem string `json:"problem,omitempty"`
}

// OK reports whether there is no problem.
func (r *Report) OK() bool {
	return len(r.Problems) == 0 && !slices.ContainsFunc(r.Files, func(f FileReport) bool { return f.Problem != "" })
}

// Verify reads every file of the feed at a location and verifies its signature, length,
// digest, name and content. It ignores Options.Cache, so it does not detect replays. Problems
// are in the report; the error is set only without a report.
func Verify(ctx context.Context, location string, o Options) (Report, error) {
	now := time.Now
	if o.Now != nil {
		now = o.Now
	}
	s, err := openStore(location, o)
	if err != nil {
		return Report{}, err
	}
	v := &verifier{ctx: ctx, store: s, r: Report{Source: s.location(), Keys: []string{}, Releases: []string{}, Problems: []string{}, NoDigest: []string{}}}
	b, err := s.read(ctx, indexName, maxIndex, "")
	if err != nil {
		return Report{}, fmt.Errorf("read %s of %s: %w", indexName, s.location(), err)
	}
	a, err := v.root(o.Keys, now())
	if err != nil {
		return Report{}, err
	}
	f := FileReport{Name: indexName, Length: int64(len(b.bytes)), SHA256: digest(b.bytes)}
	i, err := parseIndex(b.bytes)
	if err != nil {
		f.Problem = err.Error()
		v.r.note(fmt.Errorf("%w: %w", ErrAltered, err))
		v.r.Files = append(v.r.Files, f)
		return v.r, nil
	}
	v.r.Sequence, v.r.Created, v.r.Expires = i.Sequence, i.Created, i.Expires
	switch sig, err := s.read(ctx, indexName+signature, maxSignature, ""); {
	case errors.Is(err, ErrAbsent):
		f.Problem = "it is not signed"
		v.r.note(fmt.Errorf("%w: %s", ErrUntrusted, f.Problem))
	case err != nil:
		f.Problem = v.r.note(err)
	case a.roots == nil && len(a.keys) == 0:
		f.Problem = v.r.note(ErrNoKeys)
	default:
		t, err := a.trust(b.bytes, sig.bytes, seen{})
		if err != nil {
			f.Problem = v.r.note(err)
			break
		}
		f.Signer, v.keys = t.signer.String(), t.keys
		v.r.Signer = f.Signer
		if t.set != nil {
			v.r.KeySet = t.set.Sequence
		}
		if err := t.fresh(now()); err != nil {
			v.r.Problems = append(v.r.Problems, v.r.note(err))
		}
	}
	for _, k := range v.keys {
		v.r.Keys = append(v.r.Keys, k.String())
	}
	v.r.Files = append(v.r.Files, f)
	v.feed = &Feed{store: s, index: i, state: State{Source: s.location()}}
	if b, err := v.feed.file(ctx, summariesName); err == nil {
		v.feed.summaries, v.feed.notices, _ = parseSummaries(b) // the file's own row has the problem
	}
	for _, name := range slices.Sorted(maps.Keys(i.Files)) {
		if err := ctx.Err(); err != nil {
			return Report{}, err
		}
		v.file(name)
	}
	v.whole(i)
	for _, s := range v.feed.summaries {
		if err := ctx.Err(); err != nil {
			return Report{}, err
		}
		v.statement(s.Version)
		v.lists(s.Version)
	}
	return v.r, nil
}

// root verifies the feed's root, if one of anchors is a root, and returns who may sign.
func (v *verifier) root(anchors []Key, now time.Time) (authority, error) {
	pinned, keys := split(anchors)
	if len(pinned) == 0 {
		v.keys = keys
		if len(keys) > 0 {
			v.r.Warning = legacyWarning()
		}
		return authority{keys: keys}, nil
	}
	f := FileReport{Name: rootName}
	a, err := v.store.read(v.ctx, rootName, maxRoots, "")
	if err != nil && !errors.Is(err, ErrAbsent) {
		return authority{}, in(v.store, rootName, err)
	}
	f.Length, f.SHA256 = int64(len(a.bytes)), digest(a.bytes)
	roots, err := currentRoots(v.ctx, v.store, nil, pinned, now)
	if err != nil {
		f.Problem = v.r.note(err)
		v.r.Files = append(v.r.Files, f)
		return authority{}, nil
	}
	r := roots.newest()
	v.r.Root, v.keys, v.everySigner = r.Version, r.indexKeys, roots.everyIndexKey()
	f.Signer = fmt.Sprintf("version %d, %d of %d root keys", r.Version, r.Threshold, len(r.keys))
	v.r.Files = append(v.r.Files, f)
	return authority{roots: roots}, nil
}

type verifier struct {
	ctx   context.Context
	store store
	keys  []Key // that may sign now
	// everySigner are the index keys of all versions of the root.
	everySigner []Key
	feed        *Feed
	r           Report
}

func (v *verifier) file(name string) {
	e := v.feed.index.Files[name]
	f := FileReport{Name: name, Length: e.Length, SHA256: e.SHA256}
	var problems []string
	note := func(err error) {
		switch {
		case err == nil:
			return
		case !errors.Is(err, ErrUnreachable) && !errors.Is(err, ErrSigner) && !errors.Is(err, ErrNoKeys):
			v.r.note(fmt.Errorf("%w: %w", ErrAltered, err))
		default:
			v.r.note(err)
		}
		problems = append(problems, err.Error())
	}
	a, err := v.store.read(v.ctx, name, e.Length, "")
	if err == nil {
		err = e.check(a.bytes)
	}
	note(err)
	if err == nil {
		keys := v.keys
		if path.Dir(name) == "keys" {
			keys = append(slices.Clone(keys), v.everyKey()...) // signed when other keys were trusted
		}
		sig, err := v.store.read(v.ctx, name+signature, maxSignature, "")
		var k Key
		switch {
		case errors.Is(err, ErrAbsent):
			err = errors.New("it is not signed")
		case err == nil && len(keys) == 0:
			err = ErrNoKeys
		case err == nil:
			k, err = verify(a.bytes, sig.bytes, keys)
		}
		note(err)
		if err == nil {
			f.Signer = k.String()
		}
		note(v.content(name, a.bytes))
	}
	f.Problem = strings.Join(problems, "; ")
	v.r.Files = append(v.r.Files, f)
}

// statement verifies the publisher's statement. A feed of an older publisher has none.
func (v *verifier) statement(of version.Version) {
	text, err := v.feed.Statement(v.ctx, of)
	if errors.Is(err, ErrNotOffered) {
		return
	}
	f := FileReport{Name: statementName(of), Length: int64(len(text)), SHA256: digest([]byte(text))}
	if err == nil {
		err = v.vouches(of, text)
	}
	if err != nil {
		f.Problem = v.r.note(err)
	} else {
		f.Signer = v.r.Signer
	}
	v.r.Files = append(v.r.Files, f)
}

// lists verifies the statements over further lists of components of a release.
func (v *verifier) lists(of version.Version) {
	names, err := v.feed.statementsOf(v.ctx, of)
	if err != nil {
		v.r.Files = append(v.r.Files, FileReport{Name: listsName(of), Problem: v.r.note(err)})
		return
	}
	for _, name := range names {
		list := listOf(name, of)
		if list == "" {
			continue
		}
		a, err := v.feed.store.read(v.ctx, name, MaxStatement, "")
		f := FileReport{Name: name, Length: int64(len(a.bytes)), SHA256: digest(a.bytes)}
		if err == nil {
			err = Trust{v.keys}.over(string(a.bytes), list)
		}
		if err != nil {
			f.Problem = v.r.note(err)
		} else {
			f.Signer = v.r.Signer
		}
		v.r.Files = append(v.r.Files, f)
	}
}

func (v *verifier) vouches(of version.Version, text string) error {
	b, err := v.feed.file(v.ctx, releaseName(of))
	if err != nil {
		return err
	}
	r, err := Parse(b)
	if err != nil {
		return err
	}
	for _, k := range r.Kubernetes {
		if k.Unpinned != "" {
			continue
		}
		for _, arch := range architectures {
			l, err := r.Components(k.Version, arch)
			if err == nil {
				err = Trust{v.keys}.Verify(text, k.Version, arch, l)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// everyKey returns the keys of all sets of the index, and of all versions of the root.
func (v *verifier) everyKey() []Key {
	out := slices.Clone(v.everySigner)
	for _, k := range v.feed.index.Keys {
		if s, err := parseKeySet([]byte(k.Set)); err == nil {
			out = append(out, s.keys...)
		}
	}
	return out
}

// content verifies that a file's content matches its name.
func (v *verifier) content(name string, b []byte) error {
	switch dir := path.Dir(name); {
	case name == summariesName:
		_, _, err := parseSummaries(b)
		return err
	case dir == "keys":
		if !slices.ContainsFunc(v.feed.index.Keys, func(k signedKeySet) bool { return k.Set == string(b) }) {
			return errors.New("the index has another key set")
		}
		s, err := parseKeySet(b)
		if err == nil && keySetName(s.Sequence) != name {
			err = fmt.Errorf("it is key set %d", s.Sequence)
		}
		return err
	case isList(name):
		var l list
		if err := strictJSON(b, &l); err != nil {
			return err
		}
		if want := lists(v.feed.summaries)[name]; v.feed.summaries != nil && !reflect.DeepEqual(l, want) {
			return errors.New("it contradicts " + summariesName)
		}
		return nil
	}
	ver, ok := versionOf(name)
	if !ok {
		return errors.New("unknown kind of file")
	}
	s, err := v.feed.summary(ver)
	if err != nil && v.feed.summaries != nil {
		return fmt.Errorf("%s does not name release %s", summariesName, ver)
	}
	switch {
	case name == releaseName(ver):
		r, err := Parse(b)
		if err != nil {
			return err
		}
		if r.Version.String() != ver.String() {
			return fmt.Errorf("it contains release %s", r.Version)
		}
		r.apply(s)
		if v.feed.summaries != nil && canonical(r.Summary()) != canonical(s) {
			return errors.New("it contradicts " + summariesName)
		}
		return nil
	case name == imagesName(ver):
		i, err := parseImages(b, ver)
		if err != nil {
			return err
		}
		v.r.NoDigest = append(v.r.NoDigest, withoutDigest(s, i)...)
		return nil
	}
	_, err = parseMeasurements(b, ver, strings.TrimSuffix(path.Base(name), ".json"))
	return err
}

// canonical is s after encoding and decoding.
func canonical(s Summary) string {
	b, err := encodeJSON(s)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// whole verifies properties of several files.
func (v *verifier) whole(i *index) {
	note := func(format string, args ...any) {
		text := fmt.Sprintf(format, args...)
		v.r.note(fmt.Errorf("%w: %s", ErrAltered, text))
		v.r.Problems = append(v.r.Problems, text)
	}
	if v.feed.summaries == nil { // its row has the problem
		note("missing files cannot be determined without %s", summariesName)
	} else if err := v.feed.complete(); err != nil {
		note("%v", err)
	}
	for _, s := range v.feed.summaries {
		v.r.Releases = append(v.r.Releases, s.Version.String())
		if _, ok := i.Files[imagesName(s.Version)]; !ok {
			note("the index does not name %s", imagesName(s.Version))
		}
	}
	for name := range maps.Keys(lists(v.feed.summaries)) {
		if _, ok := i.Files[name]; !ok {
			note("the index does not name %s", name)
		}
	}
	for _, k := range i.Keys {
		if s, err := parseKeySet([]byte(k.Set)); err == nil {
			if _, ok := i.Files[keySetName(s.Sequence)]; !ok {
				note("the index does not name %s", keySetName(s.Sequence))
			}
		}
	}
	if d, ok := v.store.(dirStore); ok {
		for _, name := range extra(d.dir, i) {
			note("%q exists, but the index does not name it", shorten(name))
		}
	}
	slices.Sort(v.r.Problems)
	slices.Sort(v.r.NoDigest)
	v.r.NoDigest = slices.Compact(v.r.NoDigest)
}

// extra returns the files of a directory that an index does not name.
func extra(dir string, i *index) (out []string) {
	_ = filepath.WalkDir(dir, func(at string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil //nolint:nilerr // what cannot be listed was read, or reported, by name
		}
		name, err := filepath.Rel(dir, at)
		if err != nil {
			return err
		}
		name = filepath.ToSlash(name)
		n := strings.TrimSuffix(name, signature)
		if _, ok := i.Files[n]; !ok && n != indexName && name != rootName && !isStatement(n) {
			out = append(out, name)
		}
		return nil
	})
	return out
}
