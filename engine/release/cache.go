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

// cache persists one feed's replay protection, trusted keys and last good copy. Each
// location and set of keys has a directory of its own, 0700; files are replaced by
// renaming. A nil *cache stores nothing.
//
//	seen.json      the newest publication seen; never goes back
//	good.json      the index that was accepted last, with its signature
//	files/<sha256> contents of files
//	statement-*    statements over components, which no index names
type cache struct{ dir string }

// seen is the cache's record for the refusal of older publications and revoked keys.
type seen struct {
	Schema   string `json:"schema"`
	Location string `json:"location"` // for users who inspect the cache
	Sequence uint64 `json:"sequence"`
	Index    string `json:"index"` // SHA-256 of the index with that sequence
	// Keys is the newest accepted key set; nil before the first.
	Keys *signedKeySet `json:"keys,omitempty"`
}

// good is the last good copy.
type good struct {
	Schema    string    `json:"schema"`
	Index     string    `json:"index"`
	Signature string    `json:"signature"`
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
	c := &cache{filepath.Join(base, name)}
	if err := os.MkdirAll(filepath.Join(c.dir, "files"), 0o700); err != nil {
		return nil, fmt.Errorf("create release cache: %w", err)
	}
	return c, nil
}

// seen returns the latest record; the zero value if there is none. An unreadable record is an
// error: ignoring it would disable the protection from replays.
func (c *cache) seen() (seen, error) {
	var s seen
	if c == nil {
		return s, nil
	}
	b, err := c.file("seen.json")
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
		return seen{}, fmt.Errorf("read replay protection record %s: %w; remove that file to reset it", filepath.Join(c.dir, "seen.json"), err)
	}
	return s, nil
}

// note replaces the record, unless another process has stored a newer one in the meantime:
// then the error wraps ErrRollback.
func (c *cache) note(s seen) error {
	if c == nil {
		return nil
	}
	now, err := c.seen()
	if err != nil {
		return err
	}
	if now.Sequence > s.Sequence {
		return fmt.Errorf("%w: publication %d, but %d was seen before", ErrRollback, s.Sequence, now.Sequence)
	}
	s.Schema = schema
	b, err := encodeJSON(s)
	if err != nil {
		return err
	}
	return c.replace("seen.json", b, true)
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
