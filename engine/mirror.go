package engine

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"constellation/assets"
	"constellation/engine/chart"
	"constellation/engine/check"
	"constellation/engine/mirror"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/workspace"
)

// MirrorRequest selects what to copy where.
type MirrorRequest struct {
	FeedRequest
	// From and To are folders, or registries with the prefix oci://.
	From, To string
	// Release is the release to copy; a folder with one release needs none.
	Release string
	// Keys are files with public keys of the publisher.
	Keys []string
	// Unsigned accepts contents without a verified signature.
	Unsigned bool
}

// MirrorReport is what a mirror has.
type MirrorReport struct {
	Schema string `json:"schema"`
	From   string `json:"from"`
	To     string `json:"to"`
	// Feed is where the feed was copied from; empty if none was.
	Feed string `json:"feed,omitempty"`
	mirror.Report
}

// MirrorRelease copies a release to another registry or folder.
func MirrorRelease(ctx context.Context, w *workspace.Workspace, r MirrorRequest, progress func(mirror.Progress)) (MirrorReport, error) {
	out := MirrorReport{Schema: plan.Schema, From: r.From, To: r.To}
	o := mirror.Options{From: r.From, To: r.To, Release: r.Release, Progress: progress}
	if !r.Unsigned {
		keys, err := readFeedKeys(r.Keys)
		if err == nil && len(r.Keys) == 0 {
			keys, err = release.EmbeddedKeys(assets.Releases())
		}
		if err != nil {
			return out, err
		}
		if len(keys) == 0 {
			return out, &plan.Error{Op: "mirror " + r.From, Err: release.ErrNoKeys, Exit: plan.ExitUsage, Remedy: "pass the publisher's key with --key FILE"}
		}
		o.Keys = keys
	}
	c := &workspace.Config{}
	var err error
	if r.Feed == "" {
		if c, err = workspace.PartOfConfig(w, "releases"); err != nil {
			return out, err
		}
	}
	location, keys, err := New(w, Deps{}).feedOf(c, check.Request{Feed: r.Feed, FeedKeys: r.FeedKeys})
	if err != nil {
		return out, err
	}
	if location != "" {
		if len(keys) == 0 {
			if keys, err = release.EmbeddedKeys(assets.Releases()); err != nil {
				return out, err
			}
		}
		files, from, err := release.CopyFeed(ctx, location, release.Options{Keys: keys})
		if err != nil {
			return out, &plan.Error{Op: "copy feed " + location, Err: err, Remedy: cmp.Or(check.FeedRemedy(err), "inspect the feed with "+check.VerifyCommand(location, keys))}
		}
		o.Feed, out.Feed = files, from.State().Source
	}
	if strings.HasPrefix(r.To, mirror.Scheme) {
		cache, err := os.UserCacheDir()
		if err != nil {
			return out, &plan.Error{Op: "find cache directory", Err: err, Exit: plan.ExitUsage, Remedy: "set HOME or XDG_CACHE_HOME"}
		}
		o.Stage = filepath.Join(cache, "constellation", "mirror")
	}
	out.Report, err = mirror.Copy(ctx, o)
	if err != nil {
		return out, &plan.Error{Op: "mirror " + r.From, Err: err, Remedy: mirrorRemedy(err, r)}
	}
	return out, nil
}

// mirrorRemedy returns what to do about an error of a mirror.
func mirrorRemedy(err error, r MirrorRequest) string {
	switch {
	case errors.Is(err, chart.ErrDenied):
		return "log in with `docker login` or `helm registry login`, then run the command again: it continues"
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EFBIG), errors.Is(err, syscall.EDQUOT):
		return "free disk space, then run the command again: it continues"
	case errors.Is(err, chart.ErrUnreachable):
		return "run the command again: it continues"
	case errors.Is(err, release.ErrUntrusted):
		return "mirror a signed release, or accept an unsigned one of your own with --unsigned"
	case errors.Is(err, release.ErrSigner):
		return "check that --key is the publisher's key, then get the release again"
	case errors.Is(err, chart.ErrDigest):
		return "get the release again: a file of " + r.From + " was altered"
	case errors.Is(err, chart.ErrAbsent):
		return "name the folder that `make release` wrote, or a registry and a release with --release"
	}
	return "check " + r.From + " and " + r.To + ", then run the command again: it continues"
}
