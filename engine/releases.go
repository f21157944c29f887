package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"constellation/assets"
	"constellation/engine/component"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// OpenReleases opens what is known about releases: what the program brings with it, or
// a feed at a directory or an address, signed by one of keys; without keys, by one that
// the program brings with it. What the program brings is joined with a feed: a release that
// both have must have the same content, and the feed says what turned out to be faulty.
// Copies of feeds are kept below the user's cache directory.
func OpenReleases(ctx context.Context, location string, keys []release.Key) (release.Source, error) {
	if location == "" {
		return release.Embedded(assets.Releases())
	}
	if len(keys) == 0 {
		var err error
		if keys, err = release.EmbeddedKeys(assets.Releases()); err != nil {
			return nil, err
		}
	}
	o := release.Options{Keys: keys}
	if dir, err := os.UserCacheDir(); err == nil {
		o.Cache = filepath.Join(dir, "constellation", "releases")
	}
	feed, err := release.Open(ctx, location, o)
	if err != nil {
		return nil, err
	}
	own, err := release.Embedded(assets.Releases())
	if err != nil {
		return nil, err
	}
	return release.Join(own, feed)
}

// knowledge is what the program knows about releases.
type knowledge struct {
	// feed is a feed joined with what the program brings with it; nil if there is none, or
	// it cannot be used.
	feed     release.Source
	embedded release.Source
	state    FeedState
}

// feedLimit bounds how long a feed is asked.
const feedLimit = 10 * time.Second

// feedOf returns where the feed is that a check shall use, and the keys for it. The
// error has ExitUsage.
func (e *Engine) feedOf(c *workspace.Config, r CheckRequest) (location string, keys []release.Key, err error) {
	location = r.Feed
	if location == "" {
		location = c.Releases.Feed
	}
	scheme := ""
	if path, ok := strings.CutPrefix(location, release.BundleScheme); ok {
		scheme, location = release.BundleScheme, path
	}
	if location != "" && !strings.Contains(location, "://") && !filepath.IsAbs(location) && r.Feed == "" {
		location = e.ws.Path(location)
	}
	location = scheme + location
	if keys, err = readFeedKeys(r.FeedKeys); err != nil {
		return "", nil, err
	}
	if len(r.FeedKeys) == 0 && c.Releases.Keys != "" && r.Feed == "" {
		if keys, err = release.ParseKeys(workspace.ConfigFile, []byte(c.Releases.Keys)); err != nil {
			return "", nil, &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "correct releases.keys in " + workspace.ConfigFile + c.At("releases")}
		}
	}
	return location, keys, nil
}

// learnReleases asks the feed, and falls back to what the program brings with it.
func (e *Engine) learnReleases(ctx context.Context, location string, keys []release.Key) (*knowledge, error) {
	embedded, err := e.releases(ctx, "", nil)
	if err != nil {
		return nil, &plan.Error{Op: "read release data", Err: err, Remedy: "install the program anew"}
	}
	k := &knowledge{embedded: embedded, state: feedState(embedded.State())}
	if location == "" {
		return k, nil
	}
	// A bundle that is not whole is not fallen back from: who carried it wants to know.
	if b, err := openBundle(location); err != nil || b != nil && !b.HasFeed() {
		return k, err
	}
	limited, cancel := context.WithTimeout(ctx, feedLimit)
	defer cancel()
	feed, err := e.releases(limited, location, keys)
	if err == nil {
		_, err = feed.Summaries(limited)
	}
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		k.state.Problem = fmt.Sprintf("the feed %s cannot be used: %v", location, err)
		k.state.Remedy = feedRemedy(err)
		if errors.Is(err, context.DeadlineExceeded) {
			k.state.Problem = fmt.Sprintf("the feed %s did not answer within %s", location, feedLimit)
		}
		k.state.Remedy = cmp.Or(k.state.Remedy, verifyCommand(location, keys)+" says more; until then what this program brings with it is used")
	default:
		k.feed, k.state = feed, feedState(feed.State())
		if k.state.Problem != "" {
			k.state.Remedy = feedRemedy(feed.State().Err)
			k.state.Remedy = cmp.Or(k.state.Remedy, verifyCommand(location, keys)+" says more")
		}
	}
	return k, nil
}

func feedState(s release.State) FeedState {
	return FeedState{Source: s.Source, Fetched: s.Fetched, Stale: s.Stale, Problem: s.Problem, Signer: s.Signer, Sequence: s.Sequence}
}

// source is the best that there is.
func (k *knowledge) source() release.Source {
	if k.feed != nil {
		return k.feed
	}
	return k.embedded
}

// summaries returns all releases, oldest first.
func (k *knowledge) summaries(ctx context.Context) ([]release.Summary, error) {
	return k.source().Summaries(ctx)
}

// release returns one release. The error wraps release.ErrNotOffered if nobody knows it.
func (k *knowledge) release(ctx context.Context, v version.Version) (*release.Release, error) {
	return k.source().Release(ctx, v)
}

// vouch returns the feed's statement over what machines of arch install for Kubernetes k in
// release v; empty if there is no feed, or it vouches for other lists.
func (k *knowledge) vouch(ctx context.Context, v, kubernetes version.Version, arch string, list component.List) (string, error) {
	f, ok := k.feed.(interface {
		Vouch(ctx context.Context, v, k version.Version, arch string, list component.List) (string, error)
	})
	if !ok {
		return "", nil
	}
	text, err := f.Vouch(ctx, v, kubernetes, arch, list)
	if errors.Is(err, release.ErrNotOffered) {
		return "", nil
	}
	return text, err
}

// refuse reads the files of the releases that the path leads to, which was found by
// summaries alone, and that are not in read. A release whose file is not the one that was
// published is marked as faulty, so that it is nobody's goal; refuse reports whether there
// is one: then there is another path. What the program brings with it and what was read
// before needs no request.
func (c *checkRun) refuse(ctx context.Context, read map[string]bool) (refused bool) {
	ctx, cancel := context.WithTimeout(ctx, feedLimit)
	defer cancel()
	for _, h := range c.path {
		v := h.Planned().Services
		if read[v.String()] {
			continue
		}
		read[v.String()] = true
		_, err := c.known.release(ctx, v)
		if err == nil || errors.Is(err, release.ErrNotOffered) {
			continue
		}
		f := plan.Finding{
			ID: "feed-release", Severity: plan.NotChecked, Title: fmt.Sprintf("not checked whether the file of release %s is genuine", v), Detail: err.Error(),
			Remedy: feedRemedy(err), Source: "release",
		}
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, release.ErrUnreachable) {
			f.Remedy = cmp.Or(f.Remedy, "look at the address and the network, and try again")
			c.find(f)
			continue // its summary is signed
		}
		f.Title = fmt.Sprintf("release %s is not gone to: its file in the feed cannot be used", v)
		if v.Equal(c.request.Release) {
			f.Severity = plan.Block
		}
		f.Remedy = cmp.Or(f.Remedy, verifyCommand(c.location, c.keys)+" says more")
		c.find(f)
		c.releases = slices.Clone(c.releases) // they are shared
		for i := range c.releases {
			if c.releases[i].Version.Equal(v) {
				c.releases[i].Faulty = "its file in the feed cannot be used"
			}
		}
		refused = true
	}
	return refused
}

// measurements returns what machines of an image must have measured. The error wraps
// release.ErrNotOffered if nobody knows.
func (k *knowledge) measurements(ctx context.Context, v version.Version, provider string) (map[uint32]string, error) {
	return k.source().Measurements(ctx, v, provider)
}
