package engine

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"constellation/assets"
	"constellation/engine/chart"
	"constellation/engine/check"
	"constellation/engine/mirror"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
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
	// Kubernetes are the versions of Kubernetes whose images are copied too.
	Kubernetes []string
	// KubernetesFrom is a mirror, or a registry with the layout of registry.k8s.io, that has these
	// images; empty: From if it has them, else the addresses of the release data.
	KubernetesFrom string
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
	var err error
	if o.Images, err = imagesToMirror(ctx, w, r); err != nil {
		return out, err
	}
	o.ImagesFrom = r.KubernetesFrom
	c := &workspace.Config{}
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
		files, from, err := release.CopyFeed(ctx, location, release.Options{Keys: keys, Cache: feedCache()})
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

// imagesToMirror returns the images of the requested versions of Kubernetes, by the data of the
// release that is copied, or else by those of this program's release.
func imagesToMirror(ctx context.Context, w *workspace.Workspace, r MirrorRequest) ([]mirror.Image, error) {
	if len(r.Kubernetes) == 0 {
		if r.KubernetesFrom != "" {
			return nil, &plan.Error{Op: "mirror release", Err: errors.New("--kubernetes-from has no effect without --kubernetes"), Exit: plan.ExitUsage, Remedy: "name versions with --kubernetes, such as v1.36.4"}
		}
		return nil, nil
	}
	k, err := knownReleases(ctx, w, r.FeedRequest)
	if err != nil {
		return nil, err
	}
	rel, err := k.mirrored(ctx, r.Release)
	if err != nil {
		return nil, &plan.Error{Op: "read release data", Err: err, Remedy: check.FeedRemedy(err)}
	}
	digests := map[string]string{}
	switch all, err := k.images(ctx, rel.Version); {
	case err == nil:
		for _, c := range all.Containers {
			digests[c.Reference] = c.Digest
		}
	case !errors.Is(err, release.ErrNotOffered):
		return nil, &plan.Error{Op: "read release data", Err: err, Remedy: check.FeedRemedy(err)}
	}
	var out []mirror.Image
	for _, text := range r.Kubernetes {
		v, err := version.Parse(text)
		var images []string
		if err == nil {
			images, err = rel.ImagesToMirror(v)
		}
		if err != nil {
			return nil, &plan.Error{Op: "mirror images of Kubernetes", Err: err, Exit: plan.ExitUsage, Remedy: "`constellation release show " + rel.Version.String() + "` lists the versions; those of a newer release are in its --feed"}
		}
		for _, i := range images {
			image := mirror.Image{Reference: i, Digest: digests[i]}
			if !slices.Contains(out, image) { // versions have images in common
				out = append(out, image)
			}
		}
	}
	return out, nil
}

// mirrored returns a release by its name, or that of this program if it is unknown.
func (k *knowledge) mirrored(ctx context.Context, name string) (*release.Release, error) {
	if v, err := version.Parse(name); err == nil {
		if r, err := k.Release(ctx, v); !errors.Is(err, release.ErrNotOffered) {
			return r, err
		}
	}
	own, err := version.Parse(version.Release)
	if err != nil {
		return nil, err
	}
	return k.Release(ctx, own)
}

// mirrorRemedy returns what to do about an error of a mirror.
func mirrorRemedy(err error, r MirrorRequest) string {
	var image *mirror.ImageError
	isImage := errors.As(err, &image)
	switch {
	case isImage && errors.Is(err, chart.ErrUnreachable):
		return "run the command again: it continues; if no network leads there, name a registry that has the image with --kubernetes-from"
	case isImage && errors.Is(err, chart.ErrDigest):
		return "copy the image from another registry with --kubernetes-from: the content of this one was altered"
	case isImage && errors.Is(err, chart.ErrAbsent) && !errors.Is(err, chart.ErrDenied):
		return "name a registry or mirror that has the image with --kubernetes-from"
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
