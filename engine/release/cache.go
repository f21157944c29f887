package release

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// cache persists replay protection, trusted keys and last good copies of feeds. Directories
// have mode 0700; files are replaced by renaming. A nil *cache stores nothing.
//
// The last good copy has a directory for each location and set of trust anchors. The newest
// publication of a feed is recorded by the identity of the feed, so it holds for every location and
// bundle.
//
//	seen/<identity>.json   the newest publication and root seen; never goes back
//	<location and anchors>/
//	  seen.json            the same for this location, as older programs read it
//	  good.json            the index that was accepted last, with its signature
//	  files/<sha256>       contents of files
//	  statement-*          statements over components, which no index names
type cache struct{ base, dir string }

// seen is the cache's record for the refusal of older publications and revoked keys.
type seen struct {
	Schema   string `json:"schema"`
	Location string `json:"location"` // for users who inspect the cache
	Sequence uint64 `json:"sequence"`
	Index    string `json:"index"` // SHA-256 of the index with that sequence
	// Keys is the newest accepted key set; nil before the first.
	Keys *signedKeySet `json:"keys,omitempty"`
	// Root is the newest version of the root, RootDigest its SHA-256 and Since its field since. The
	// sequence counts from then. They are zero for a feed without root.
	Root       uint64    `json:"root,omitempty"`
	RootDigest string    `json:"rootDigest,omitempty"`
	Since      time.Time `json:"since,omitzero"`
}

// merge returns the newest facts of two records of one feed.
func (s seen) merge(o seen) seen {
	if o.Since.After(s.Since) || o.Since.Equal(s.Since) && o.Sequence > s.Sequence {
		s.Since, s.Sequence, s.Index, s.Location = o.Since, o.Sequence, o.Index, o.Location
	}
	if o.Root > s.Root {
		s.Root, s.RootDigest = o.Root, o.RootDigest
	}
	if o.Keys != nil && (s.Keys == nil || setNumber(o.Keys) > setNumber(s.Keys)) {
		s.Keys = o.Keys
	}
	return s
}

// at is the end of an error about s: the location, if it is to be named.
func (s seen) at() string {
	switch {
	case s.Location == "":
		return ""
	case s.Root > 0:
		return " (at " + shorten(s.Location) + ")"
	}
	return " (at " + shorten(s.Location) + ": without a root, a key signs one feed only)"
}

// setNumber is the sequence of a key set, which was verified before it was stored; zero if it cannot
// be read.
func setNumber(s *signedKeySet) uint64 {
	set, err := parseKeySet([]byte(s.Set))
	if err != nil {
		return 0
	}
	return set.Sequence
}

// good is the last good copy.
type good struct {
	Schema    string    `json:"schema"`
	Index     string    `json:"index"`
	Signature string    `json:"signature"`
	Roots     string    `json:"roots,omitempty"` // root.json; empty for a feed without root
	ETag      string    `json:"etag,omitempty"`
	Confirmed time.Time `json:"confirmed"` // when the source last confirmed it
}

// openCache creates the directory for a location and keys below base; nil if base is empty.
func openCache(base, location string, keys []Key) (*cache, error) {
	if base == "" {
		return nil, nil
	}
	var ids []string
	for _, k := range keys {
		ids = append(ids, k.id)
	}
	slices.Sort(ids)
	name := digest([]byte(location + "\n" + strings.Join(slices.Compact(ids), " ")))[:16]
	c := &cache{base, filepath.Join(base, name)}
	for _, dir := range []string{filepath.Join(c.dir, "files"), filepath.Join(base, "seen")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("create release cache: %w", err)
		}
	}
	return c, nil
}

// seenName is the file, relative to the directory of a location, that records what was seen of the
// feed with an identity.
func seenName(identity string) string { return filepath.Join("..", "seen", identity+".json") }

// seen returns what was seen of the feed with these identities, at any location; the zero value if
// there is no record. An unreadable record is an error: ignoring it would disable the protection
// from replays.
func (c *cache) seen(identities []string) (seen, error) {
	if c == nil {
		return seen{}, nil
	}
	out, err := c.record("seen.json")
	for _, id := range identities {
		if err != nil {
			break
		}
		var s seen
		s, err = c.record(seenName(id))
		out = out.merge(s)
	}
	return out, err
}

func (c *cache) record(name string) (seen, error) {
	var s seen
	b, err := c.file(name)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err == nil {
		err = strictJSON(b, &s)
	}
	if err == nil && s.Schema != schema {
		err = fmt.Errorf("its format is %q", shorten(s.Schema))
	}
	if err != nil {
		return seen{}, fmt.Errorf("read replay protection record %s: %w; remove that file to reset it", filepath.Join(c.dir, name), err)
	}
	return s, nil
}

// note replaces the records, unless another process has stored a newer one in the meantime:
// then the error wraps ErrRollback.
func (c *cache) note(s seen, identities []string) error {
	if c == nil {
		return nil
	}
	now, err := c.seen(identities)
	if err != nil {
		return err
	}
	if now.Since.After(s.Since) || now.Since.Equal(s.Since) && now.Sequence > s.Sequence || now.Root > s.Root {
		return fmt.Errorf("%w: publication %d, but %d was seen before", ErrRollback, s.Sequence, now.Sequence)
	}
	s.Schema = schema
	b, err := encodeJSON(s)
	if err != nil {
		return err
	}
	names := []string{"seen.json"}
	for _, id := range identities {
		names = append(names, seenName(id))
	}
	for _, name := range names {
		was, err := c.record(name)
		if err != nil {
			return err
		}
		if was.Schema != "" && was.same(s) {
			continue
		}
		if err := c.replace(name, b, true); err != nil {
			return err
		}
	}
	return nil
}

// same reports whether two records have the same facts.
func (s seen) same(o seen) bool {
	return s.Sequence == o.Sequence && s.Index == o.Index && s.Root == o.Root && s.RootDigest == o.RootDigest && s.Since.Equal(o.Since) &&
		(s.Keys == nil) == (o.Keys == nil) && (s.Keys == nil || s.Keys.Set == o.Keys.Set)
}

// good returns the last good copy; false if there is none.
func (c *cache) good() (good, bool) {
	var g good
	if c == nil {
		return g, false
	}
	b, err := c.file("good.json")
	if err != nil || strictJSON(b, &g) != nil || g.Schema != schema {
		return good{}, false
	}
	return g, true
}

// keep stores g as the last good copy and removes files of older ones.
func (c *cache) keep(g good, files map[string]entry) error {
	if c == nil {
		return nil
	}
	g.Schema = schema
	b, err := encodeJSON(g)
	if err != nil {
		return err
	}
	if err := c.replace("good.json", b, false); err != nil {
		return err
	}
	wanted := map[string]bool{}
	for _, e := range files {
		wanted[e.SHA256] = true
	}
	entries, err := os.ReadDir(filepath.Join(c.dir, "files"))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !wanted[e.Name()] && hexRE.MatchString(e.Name()) {
			_ = os.Remove(filepath.Join(c.dir, "files", e.Name())) // another process may have removed it
		}
	}
	return nil
}

// content returns a file that matches its entry in the index; false if there is none.
func (c *cache) content(e entry) ([]byte, bool) {
	if c == nil {
		return nil, false
	}
	b, err := c.file(filepath.Join("files", e.SHA256))
	if err != nil || e.check(b) != nil {
		return nil, false
	}
	return b, true
}

// add stores the content of a verified file.
func (c *cache) add(e entry, b []byte) error {
	if c == nil {
		return nil
	}
	return c.replace(filepath.Join("files", e.SHA256), b, false)
}

// replaceIfAny stores a file, if there is a cache.
func (c *cache) replaceIfAny(name string, b []byte) error {
	if c == nil {
		return nil
	}
	return c.replace(name, b, false)
}

func (c *cache) file(name string) ([]byte, error) {
	f, err := os.Open(filepath.Join(c.dir, name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAtMost(f, 2*maxFile)
}

// replace replaces a file. Only the replay protection must survive a power failure: all else
// is verified when it is read, and fetched again.
func (c *cache) replace(name string, b []byte, durable bool) error {
	path := filepath.Join(c.dir, name)
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*") // 0600
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil && durable {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}
