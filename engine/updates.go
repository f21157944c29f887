package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"constellation/assets"
	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// updateInterval is the least time between two requests to a feed for the update notice.
const updateInterval = 24 * time.Hour

// updateRecord is the content of a file in constellation/updates of the user's cache directory:
// one for each feed and set of keys.
type updateRecord struct {
	Schema string `json:"schema"`
	// Asked is the time of the last request, also of one that failed.
	Asked time.Time `json:"asked"`
	// Newest is the newest release of the feed that is not faulty; empty if none is known.
	Newest string `json:"newest,omitempty"`
}

// NewerRelease returns the newest release that is newer than current, in the feed that the
// workspace's configuration names. It is empty without such a release, without a feed or without
// a key that verifies it: then no request is sent. After an error it is the release that was found
// last. It requests the feed at most once in
// [updateInterval], also after errors, and otherwise returns what it found last. The request has
// no ETag, because a server could recognise a user by that.
func NewerRelease(ctx context.Context, w *workspace.Workspace, current string, now time.Time) (string, error) {
	own, err := version.Parse(current)
	if err != nil {
		return "", err
	}
	c, err := workspace.PartOfConfig(w, "releases")
	if err != nil || c.Releases.Feed == "" {
		return "", err
	}
	location, keys, err := New(w, Deps{}).feedOf(c, check.Request{})
	if err != nil {
		return "", err
	}
	if len(keys) == 0 {
		if keys, err = release.EmbeddedKeys(assets.Releases()); err != nil || len(keys) == 0 {
			return "", err
		}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	newest, err := newestKnown(ctx, filepath.Join(cache, "constellation", "updates"), location, keys, now)
	if v, perr := version.Parse(newest); perr != nil || !own.Less(v) {
		return "", err
	}
	return newest, err
}

// newestKnown returns the newest release of a feed: the recorded one, or after updateInterval that of
// the feed itself.
func newestKnown(ctx context.Context, dir, location string, keys []release.Key, now time.Time) (string, error) {
	parts := []string{location}
	for _, k := range keys {
		parts = append(parts, k.ID())
	}
	slices.Sort(parts[1:])
	sum := sha256.Sum256([]byte(strings.Join(parts, "\n")))
	file := filepath.Join(dir, hex.EncodeToString(sum[:8])+".json")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	// Of two processes, one sends the request. The lock is released when the file is closed.
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return "", nil //nolint:nilerr // the other process shows the notice
	}
	var r updateRecord
	if b, err := os.ReadFile(file); err == nil && (json.Unmarshal(b, &r) != nil || r.Schema != plan.Schema) {
		r = updateRecord{}
	}
	if now.Sub(r.Asked).Abs() < updateInterval {
		return r.Newest, nil
	}
	// The time is recorded before the request: without a record there is no request.
	r.Schema, r.Asked = plan.Schema, now.UTC().Truncate(time.Second)
	if err := r.write(f); err != nil {
		return "", err
	}
	feed, err := openFeed(ctx, location, keys, true)
	if err != nil {
		return r.Newest, err
	}
	if s := feed.State(); s.Stale {
		return r.Newest, s.Err
	}
	all, err := feed.Summaries(ctx)
	if err != nil {
		return r.Newest, err
	}
	var newest version.Version
	r.Newest = ""
	for _, s := range all {
		if s.Faulty == "" && (r.Newest == "" || newest.Less(s.Version)) {
			newest, r.Newest = s.Version, s.Version.String()
		}
	}
	return r.Newest, r.write(f)
}

// write replaces the content of f, which the caller has locked.
func (r updateRecord) write(f *os.File) error {
	b, err := json.Marshal(r)
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteAt(append(b, '\n'), 0)
	}
	return err
}
