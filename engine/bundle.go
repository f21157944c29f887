package engine

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"constellation/assets"
	"constellation/engine/chart"
	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// BundleRequest selects the content of a bundle for an air-gapped site.
type BundleRequest struct {
	FeedRequest
	// To is the newest release that is wanted; zero means all that are known.
	To version.Version
	// Out is the file to write.
	Out string
}

// BundleReport says what a bundle holds.
type BundleReport struct {
	Schema string `json:"schema"`
	File   string `json:"file"`
	SHA256 string `json:"sha256"`
	Bytes  int64  `json:"bytes"`
	// Feed is where releases were copied from; empty if there was none.
	Feed     string                `json:"feed,omitempty"`
	Releases []string              `json:"releases"`
	Charts   []release.BundleChart `json:"charts"`
}

const bundleRemedy = "copy it again, or rebuild it with `constellation release bundle`"

// openBundle opens the bundle at a location; nil if that is another place.
func openBundle(location string) (*release.Bundle, error) {
	path, ok := strings.CutPrefix(location, release.BundleScheme)
	if !ok {
		return nil, nil
	}
	b, err := release.OpenBundle(path)
	if err != nil {
		return nil, &plan.Error{Op: "open bundle " + path, Err: err, Remedy: bundleRemedy, Exit: plan.ExitUsage}
	}
	return b, nil
}

// MakeBundle writes a file with all external data of an upgrade: the whole feed of releases,
// and the charts of releases up to r.To and of the workspace's configuration. The output is
// reproducible, and replaces r.Out atomically.
func MakeBundle(ctx context.Context, w *workspace.Workspace, r BundleRequest) (BundleReport, error) {
	out := BundleReport{Schema: plan.Schema, File: r.Out, Releases: []string{}, Charts: []release.BundleChart{}}
	e := New(w, Deps{})
	c, err := workspace.PartOfConfig(w, "releases", "charts") // a feed can be carried without a workspace
	if err != nil {
		return out, err
	}
	location, keys, err := e.feedOf(c, check.Request{Feed: r.Feed, FeedKeys: r.FeedKeys})
	if err != nil {
		return out, err
	}
	var feed map[string][]byte
	bundle, err := openBundle(location)
	if err != nil {
		return out, err
	}
	if location != "" && (bundle == nil || bundle.HasFeed()) {
		if len(keys) == 0 {
			if keys, err = release.EmbeddedKeys(assets.Releases()); err != nil {
				return out, err
			}
		}
		var from *release.Feed
		if feed, from, err = release.CopyFeed(ctx, location, release.Options{Keys: keys, Cache: feedCache()}); err != nil {
			return out, &plan.Error{Op: "copy feed " + location, Err: err, Remedy: cmp.Or(check.FeedRemedy(err), "inspect the feed with "+check.VerifyCommand(location, keys))}
		}
		out.Feed = from.State().Source
	}
	known, err := e.learnReleases(ctx, location, keys)
	if err != nil {
		return out, err
	}
	all, err := known.Summaries(ctx)
	if err != nil {
		return out, &plan.Error{Op: "read releases", Err: err}
	}
	if !r.To.IsZero() && !slices.ContainsFunc(all, func(s release.Summary) bool { return s.Version.Equal(r.To) }) {
		return out, &plan.Error{Op: "bundle release " + r.To.String(), Err: errors.New("unknown release"), Exit: plan.ExitUsage, Remedy: "`constellation release list` lists the known releases"}
	}
	wanted := c.Charts
	for _, s := range all {
		if !r.To.IsZero() && r.To.Less(s.Version) {
			continue
		}
		rel, err := known.Release(ctx, s.Version)
		if err != nil {
			return out, &plan.Error{Op: "read release " + s.Version.String(), Err: err, Remedy: check.FeedRemedy(err)}
		}
		out.Releases = append(out.Releases, s.Version.String())
		for _, x := range rel.Charts {
			if x.Source != "" {
				wanted = append(wanted, x)
			}
		}
	}
	blobs, err := e.bundleCharts(ctx, location, wanted, &out)
	if err != nil {
		return out, err
	}
	if len(feed) == 0 && len(out.Charts) == 0 {
		return out, &plan.Error{
			Op: "bundle", Err: errors.New("there is nothing to carry: neither a feed nor charts of others are named"), Exit: plan.ExitNothing,
			Remedy: "all else comes with the program; `--feed` names a feed, and charts stand in " + workspace.ConfigFile,
		}
	}
	if err := out.write(feed, blobs); err != nil {
		return out, &plan.Error{Op: "write " + r.Out, Err: workspace.WithoutPath(err), Remedy: "look at whether you may write there, and whether there is room"}
	}
	return out, nil
}

// write writes the bundle, reads it again, and adds its size and digest to the report.
func (out *BundleReport) write(feed, blobs map[string][]byte) error {
	err := writeWhole(out.File, func(f io.Writer) error {
		h := sha256.New()
		err := release.WriteBundle(io.MultiWriter(f, h), release.BundleContents{Charts: out.Charts}, feed, blobs)
		out.SHA256 = hex.EncodeToString(h.Sum(nil))
		return err
	})
	if err == nil {
		var info os.FileInfo
		if info, err = os.Stat(out.File); err == nil {
			out.Bytes = info.Size()
			_, err = release.OpenBundle(out.File)
		}
	}
	return err
}

// bundleCharts fetches charts, lists each once in out, and returns their blobs by digest.
func (e *Engine) bundleCharts(ctx context.Context, location string, wanted []release.Chart, out *BundleReport) (blobs map[string][]byte, err error) {
	store, err := e.chartStore(location)
	if err != nil {
		return nil, err
	}
	blobs = map[string][]byte{}
	for _, x := range wanted {
		entry := release.BundleChart{Name: x.ChartName(), Version: x.Version, Source: x.Source, Digest: x.Digest}
		if slices.Contains(out.Charts, entry) {
			continue
		}
		got, err := store.Fetch(ctx, chart.RefOf(x))
		if err != nil {
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			return nil, &plan.Error{Op: "bundle chart " + x.Name, Err: err, Remedy: check.ChartRemedy(err)}
		}
		for dgst, b := range got.Blobs {
			blobs[dgst] = b
		}
		out.Charts = append(out.Charts, entry)
	}
	slices.SortFunc(out.Charts, func(a, b release.BundleChart) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Version, b.Version), strings.Compare(a.Source, b.Source), strings.Compare(a.Digest, b.Digest))
	})
	return blobs, nil
}

// writeWhole writes a file that is there only when all of it is.
func writeWhole(path string, write func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".constellation-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // it has another name if all went well
	err = write(f)
	if err == nil {
		err = f.Chmod(0o644)
	}
	if err == nil {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
