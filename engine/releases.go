package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"constellation/assets"
	"constellation/engine/check"
	"constellation/engine/component"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// OpenReleases opens the release data: the program's own releases, or a feed at a directory or
// an address, signed by one of keys; without keys, by one of the program's. The program's
// releases are merged with a feed: a release in both must have the same content, and the feed
// lists faulty versions. Copies of feeds are kept below the user's cache directory.
func OpenReleases(ctx context.Context, location string, keys []release.Key) (release.Source, error) {
	return openReleases(ctx, assets.Releases(), location, keys)
}

// openReleases is OpenReleases with the program's own releases.
func openReleases(ctx context.Context, program fs.FS, location string, keys []release.Key) (release.Source, error) {
	if location == "" {
		return release.Embedded(program)
	}
	if len(keys) == 0 {
		var err error
		if keys, err = release.EmbeddedKeys(program); err != nil {
			return nil, err
		}
	}
	feed, err := openFeed(ctx, location, keys, false)
	if err != nil {
		return nil, err
	}
	own, err := release.Embedded(program)
	if err != nil {
		return nil, err
	}
	return release.Join(own, feed)
}

// openFeed opens a feed. Copies are kept below the user's cache directory.
func openFeed(ctx context.Context, location string, keys []release.Key, unconditional bool) (*release.Feed, error) {
	return release.Open(ctx, location, release.Options{Keys: keys, Unconditional: unconditional, Cache: feedCache()})
}

// feedCache is the directory with what was seen of feeds, and copies of them; empty if the user has no
// cache directory.
func feedCache() string {
	dir, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	return filepath.Join(dir, "constellation", "releases")
}

// knowledge is the program's release data.
type knowledge struct {
	// feed is a feed joined with what the program brings with it; nil if there is none, or
	// it cannot be used.
	feed     release.Source
	embedded release.Source
	state    check.FeedState
}

// State says where the knowledge comes from, and how fresh it is.
func (k *knowledge) State() check.FeedState { return k.state }

// feedOf returns the location of the feed for a check, and its keys. The error has ExitUsage.
func (e *Engine) feedOf(c *workspace.Config, r check.Request) (location string, keys []release.Key, err error) {
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
		if keys, err = release.ParseAnchors(workspace.ConfigFile, []byte(c.Releases.Keys)); err != nil {
			return "", nil, &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "correct releases.keys in " + workspace.ConfigFile + c.At("releases")}
		}
	}
	return location, keys, nil
}

// learnReleases asks the feed, and falls back to what the program brings with it.
func (e *Engine) learnReleases(ctx context.Context, location string, keys []release.Key) (*knowledge, error) {
	embedded, err := e.releases(ctx, "", nil)
	if err != nil {
		return nil, &plan.Error{Op: "read release data", Err: err, Remedy: "reinstall the program"}
	}
	k := &knowledge{embedded: embedded, state: feedState(embedded.State())}
	if location == "" {
		return k, nil
	}
	// A bundle that is not whole is not fallen back from: who carried it wants to know.
	if b, err := openBundle(location); err != nil || b != nil && !b.HasFeed() {
		return k, err
	}
	limited, cancel := context.WithTimeout(ctx, check.FeedLimit)
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
		k.state.Remedy = check.FeedRemedy(err)
		if errors.Is(err, context.DeadlineExceeded) {
			k.state.Problem = fmt.Sprintf("the feed %s did not answer within %s", location, check.FeedLimit)
		}
		k.state.Remedy = cmp.Or(k.state.Remedy, check.VerifyCommand(location, keys)+" shows details; until then the release data of this program is used")
	default:
		k.feed, k.state = feed, feedState(feed.State())
		if k.state.Problem != "" {
			k.state.Remedy = check.FeedRemedy(feed.State().Err)
			k.state.Remedy = cmp.Or(k.state.Remedy, check.VerifyCommand(location, keys)+" says more")
		}
	}
	return k, nil
}

func feedState(s release.State) check.FeedState {
	return check.FeedState{Source: s.Source, Fetched: s.Fetched, Stale: s.Stale, Problem: s.Problem, Signer: s.Signer, Sequence: s.Sequence, Root: s.Root, Warning: s.Warning}
}

// source is the best that there is.
func (k *knowledge) source() release.Source {
	if k.feed != nil {
		return k.feed
	}
	return k.embedded
}

// Summaries returns all releases, oldest first.
func (k *knowledge) Summaries(ctx context.Context) ([]release.Summary, error) {
	return k.source().Summaries(ctx)
}

// Release returns one release. The error wraps release.ErrNotOffered if it is in no source.
func (k *knowledge) Release(ctx context.Context, v version.Version) (*release.Release, error) {
	return k.source().Release(ctx, v)
}

// Vouch returns the feed's statement over what machines of arch install for Kubernetes k in
// Release v; empty if there is no feed, or it vouches for other lists.
func (k *knowledge) Vouch(ctx context.Context, v, kubernetes version.Version, arch string, list component.List) (string, error) {
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

// Measurements returns the measurements that machines of an image must have. The error wraps
// release.ErrNotOffered if no source has them.
func (k *knowledge) Measurements(ctx context.Context, v version.Version, provider string) (map[uint32]string, error) {
	return k.source().Measurements(ctx, v, provider)
}
