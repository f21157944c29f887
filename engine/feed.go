package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"constellation/assets"
	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/words"
	"constellation/engine/workspace"
)

// FeedReport is what was found in a feed.
type FeedReport struct {
	release.Report
	// Remedy says what to do about the first problem; empty if there is none.
	Remedy string `json:"remedy,omitempty"`
}

// FeedPublication is what was published.
type FeedPublication = release.BuildReport

// FeedRequest says where releases are looked up: in what the program brings with it and
// in a feed. Empty fields are those of the workspace's configuration.
type FeedRequest struct {
	// Feed is a directory or an address.
	Feed string
	// FeedKeys are files with roots of feeds or public keys; one of them must lead to the signature.
	FeedKeys []string
}

// ReleaseList is the answer of `release list`.
type ReleaseList struct {
	Schema   string          `json:"schema"`
	Releases []ReleaseRow    `json:"releases"` // oldest first
	Feed     check.FeedState `json:"feed"`
}

// ReleaseRow is one release of a list.
type ReleaseRow struct {
	Version     string    `json:"version"`
	UpgradeFrom string    `json:"upgradeFrom,omitempty"`
	Published   time.Time `json:"published,omitzero"`
	// Faulty is the reason why upgrades to it are refused; empty if it is fine.
	Faulty string `json:"faulty,omitempty"`
	// Kubernetes are the patches that it offers, oldest first; FaultyKubernetes the faulty ones,
	// with the reason.
	Kubernetes       []string          `json:"kubernetes"`
	FaultyKubernetes map[string]string `json:"faultyKubernetes,omitempty"`
	// Source is "program", "feed" or "program and feed".
	Source string `json:"source"`
}

// ReleaseDetail is the answer of `release show`.
type ReleaseDetail struct {
	Schema string `json:"schema"`
	ReleaseRow
	// Signer is the key that the feed is signed with; empty if the release came with the
	// program alone.
	Signer            string            `json:"signer,omitempty"`
	DefaultKubernetes string            `json:"defaultKubernetes"`
	Services          []release.Service `json:"services"`
	Charts            []string          `json:"charts"`
	// ForeignCharts are those of Charts that do not come with the program.
	ForeignCharts []ForeignChart     `json:"foreignCharts,omitempty"`
	CRDs          []string           `json:"crds"`
	Patches       []KubernetesPatch  `json:"patches"`
	Downloads     []release.Download `json:"downloads"`
	Images        *release.Images    `json:"images"`
	Feed          check.FeedState    `json:"feed"`
}

// ForeignChart is a chart of others that a release brings: what Helm calls the installation,
// the chart's own name, and which one is meant.
type ForeignChart struct {
	Name      string `json:"name"`
	Chart     string `json:"chart"`
	Namespace string `json:"namespace"`
	Version   string `json:"version"`
	Source    string `json:"source"`
	Digest    string `json:"digest"`
}

// KubernetesPatch is a patch release of Kubernetes, and what comes with it.
type KubernetesPatch struct {
	release.KubernetesSummary
	Pause      string `json:"pause"`
	Crictl     string `json:"crictl"`
	CNIPlugins string `json:"cniPlugins"`
	// Components are what nodes install, by architecture.
	Components map[string][]ReleaseComponent `json:"components"`
}

// ReleaseComponent is what a node installs.
type ReleaseComponent struct {
	Name   string `json:"name"`
	URL    string `json:"url"`
	Digest string `json:"digest"`
}

// knownReleases opens the release data.
func knownReleases(ctx context.Context, w *workspace.Workspace, r FeedRequest) (*knowledge, error) {
	c := &workspace.Config{}
	if r.Feed == "" {
		var err error
		if c, err = workspace.PartOfConfig(w, "releases"); err != nil {
			return nil, err
		}
	}
	e := New(w, Deps{})
	location, keys, err := e.feedOf(c, check.Request{Feed: r.Feed, FeedKeys: r.FeedKeys})
	if err != nil {
		return nil, err
	}
	return e.learnReleases(ctx, location, keys)
}

// ListReleases returns all releases that are known. A feed that cannot be used is in the
// answer, not an error.
func ListReleases(ctx context.Context, w *workspace.Workspace, r FeedRequest) (ReleaseList, error) {
	out := ReleaseList{Schema: plan.Schema, Releases: []ReleaseRow{}}
	k, err := knownReleases(ctx, w, r)
	if err != nil {
		return out, err
	}
	out.Feed = k.state
	all, err := k.Summaries(ctx)
	if err != nil {
		return out, &plan.Error{Op: "read releases", Err: err}
	}
	for _, s := range all {
		out.Releases = append(out.Releases, k.row(ctx, s))
	}
	return out, nil
}

func (k *knowledge) row(ctx context.Context, s release.Summary) ReleaseRow {
	row := ReleaseRow{Version: s.Version.String(), UpgradeFrom: s.UpgradeFrom.String(), Published: s.Published, Faulty: s.Faulty}
	for _, p := range s.Kubernetes {
		row.Kubernetes = append(row.Kubernetes, p.Version.String())
		if p.Faulty != "" {
			if row.FaultyKubernetes == nil {
				row.FaultyKubernetes = map[string]string{}
			}
			row.FaultyKubernetes[p.Version.String()] = p.Faulty
		}
	}
	has := func(from release.Source) bool {
		if from == nil {
			return false
		}
		all, err := from.Summaries(ctx)
		return err == nil && slices.ContainsFunc(all, func(o release.Summary) bool { return o.Version.Equal(s.Version) })
	}
	own, theirs := has(k.embedded), has(k.feed)
	if f, ok := k.feed.(interface{ InFeed(version.Version) bool }); ok { // it is joined with the program's own
		theirs = f.InFeed(s.Version)
	}
	switch {
	case own && theirs:
		row.Source = "program and feed"
	case theirs:
		row.Source = "feed"
	default:
		row.Source = "program"
	}
	return row
}

// ShowRelease returns what is in one release, such as v1.1.0.
func ShowRelease(ctx context.Context, w *workspace.Workspace, name string, r FeedRequest) (ReleaseDetail, error) {
	v, err := version.Parse(name)
	if err != nil {
		return ReleaseDetail{}, &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "`constellation release list` lists the known releases"}
	}
	k, err := knownReleases(ctx, w, r)
	if err != nil {
		return ReleaseDetail{}, err
	}
	rel, err := k.Release(ctx, v)
	if errors.Is(err, release.ErrNotOffered) {
		return ReleaseDetail{}, &plan.Error{Op: "show release " + v.String(), Err: err, Exit: plan.ExitUsage, Remedy: "`constellation release list` lists the known releases"}
	}
	if err != nil {
		return ReleaseDetail{}, &plan.Error{Op: "show release " + v.String(), Err: err, Remedy: check.FeedRemedy(err)}
	}
	out := ReleaseDetail{
		Schema: plan.Schema, ReleaseRow: k.row(ctx, rel.Summary()), DefaultKubernetes: rel.DefaultKubernetes.String(), Services: rel.Services,
		Charts: []string{}, CRDs: rel.CRDs, Downloads: append([]release.Download{}, rel.CLI...), Feed: k.state,
	}
	if out.Source != "program" {
		out.Signer = k.state.Signer
	}
	for _, c := range rel.Charts {
		out.Charts = append(out.Charts, c.Name)
		if c.Source != "" {
			out.ForeignCharts = append(out.ForeignCharts, ForeignChart{c.Name, c.ChartName(), c.Namespace, c.Version, c.Source, c.Digest})
		}
	}
	for i, s := range rel.Summary().Kubernetes {
		p := rel.Kubernetes[i]
		patch := KubernetesPatch{KubernetesSummary: s, Pause: p.Pause, Crictl: p.Crictl, CNIPlugins: p.CNIPlugins, Components: map[string][]ReleaseComponent{}}
		for arch := range p.Digests {
			list, err := rel.Components(p.Version, arch)
			if err != nil {
				return ReleaseDetail{}, &plan.Error{Op: "show release " + v.String(), Err: err}
			}
			for _, c := range list {
				patch.Components[arch] = append(patch.Components[arch], ReleaseComponent{c.Name, c.URL, c.Digest})
			}
		}
		out.Patches = append(out.Patches, patch)
	}
	if out.Images, err = k.images(ctx, rel.Version); err != nil && !errors.Is(err, release.ErrNotOffered) {
		return ReleaseDetail{}, &plan.Error{Op: "show release " + v.String(), Err: err, Remedy: check.FeedRemedy(err)}
	}
	return out, nil
}

// images returns the images of a release. The error wraps release.ErrNotOffered if they are
// unknown.
func (k *knowledge) images(ctx context.Context, v version.Version) (*release.Images, error) {
	if k.feed != nil {
		return k.feed.Images(ctx, v)
	}
	return k.embedded.Images(ctx, v)
}

// VerifyFeed verifies every file of the feed at a directory or an address. Problems are in the
// report. keyFiles contain public keys; without any, the program's keys are used.
func VerifyFeed(ctx context.Context, location string, keyFiles []string) (FeedReport, error) {
	keys, err := readFeedKeys(keyFiles)
	if err == nil && len(keyFiles) == 0 {
		keys, err = release.EmbeddedKeys(assets.Releases())
	}
	if err != nil {
		return FeedReport{}, err
	}
	r, err := release.Verify(ctx, location, release.Options{Keys: keys})
	if err != nil {
		e := &plan.Error{Op: "verify feed " + location, Err: err, Remedy: check.FeedRemedy(err)}
		e.Remedy = cmp.Or(e.Remedy, "check the folder, or contact its publisher")
		return FeedReport{Report: r}, e
	}
	return FeedReport{r, check.FeedRemedy(r.Err)}, nil
}

// readFeedKeys reads files with public keys.
func readFeedKeys(files []string) ([]release.Key, error) {
	var keys []release.Key
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			return nil, &plan.Error{
				Op: "read key " + name, Err: workspace.WithoutPath(err), Exit: plan.ExitUsage,
				Remedy: "pass a file with a public key; `constellation release key new` creates a pair",
			}
		}
		k, err := release.ParseAnchors(keyName(name), b)
		if err != nil {
			return nil, &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "pass the root.json of a feed, or a file with a public key of ECDSA P-256 in PEM, such as feed.key.pub"}
		}
		for i := range k {
			k[i].File = name
		}
		keys = append(keys, k...)
	}
	return keys, nil
}

// keyName is what people call the key in a file: "feed" for keys/feed.key.pub.
func keyName(path string) string {
	name := strings.TrimSuffix(strings.TrimSuffix(filepath.Base(path), ".pub"), ".key")
	name = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-' {
			return r
		}
		if r >= 'A' && r <= 'Z' {
			return r - 'A' + 'a'
		}
		return '-'
	}, name)
	if name = strings.Trim(name, "-"); len(name) > 63 {
		name = strings.Trim(name[:63], "-")
	}
	return cmp.Or(name, "key")
}

// FeedBuild says what to publish.
type FeedBuild struct {
	// From holds releases, Out is the feed, KeyFile the private key.
	From, Out, KeyFile string
	// Trust are files with public keys that may sign from now on; empty: as it was.
	Trust []string
	// Root is the file of the feed's root; empty: as it was.
	Root string
	// Expires is how long the publication is good for; zero means 30 days.
	Expires time.Duration
}

// BuildFeed publishes releases as a signed feed.
func BuildFeed(ctx context.Context, b FeedBuild) (FeedPublication, error) {
	key, err := readPrivateKey(b.KeyFile)
	if err != nil {
		return FeedPublication{}, err
	}
	if info, err := os.Stat(b.From); err != nil || !info.IsDir() {
		return FeedPublication{}, &plan.Error{Op: "read releases", Err: fmt.Errorf("%s is no folder", b.From), Exit: plan.ExitUsage, Remedy: "name the folder that holds v1.1.0.yaml and the like with --from"}
	}
	if b.Expires != 0 && (b.Expires < release.MinExpiry || b.Expires > release.MaxExpiry) {
		return FeedPublication{}, &plan.Error{Op: "publish to " + b.Out, Err: errors.New("a publication must be valid for 1 hour to 400 days"), Exit: plan.ExitUsage, Remedy: "say how long with --expires, such as 30d"}
	}
	trust, err := readPublicKeys(b.Trust)
	if err != nil {
		return FeedPublication{}, err
	}
	var root *release.Roots
	if b.Root != "" {
		if root, err = readRoot(b.Root); err != nil {
			return FeedPublication{}, err
		}
	}
	r, err := release.Build(ctx, release.BuildOptions{From: b.From, Out: b.Out, Key: key, Trust: trust, Root: root, Expires: b.Expires})
	if err == nil || ctx.Err() != nil {
		return r, err
	}
	e := &plan.Error{Op: "publish to " + b.Out, Err: err, Remedy: "correct the named file and publish again: nothing was changed; `constellation release build --help` lists the files of the folder"}
	switch {
	case errors.Is(err, release.ErrPublished):
		e.Exit = plan.ExitBlocked
		e.Remedy = "restore the published files, then publish again: nothing was changed"
	case errors.Is(err, release.ErrSigner):
		e.Remedy = "sign with the key that " + b.Out + " was signed with, or name another folder with --out; if it is that key, restore " + b.Out + " from a copy"
	case errors.Is(err, release.ErrUnsigned):
		e.Remedy = "have more root keys sign with `constellation release root sign " + b.Root + " --key FILE`"
	case errors.Is(err, release.ErrRoot) || errors.Is(err, release.ErrRollback):
		e.Remedy = "pass a root that continues the root.json of " + b.Out + " with --root"
	case errors.Is(err, release.ErrKeySet):
		e.Remedy = "name the private key of one that may sign with --key: with a root, an index key of `constellation release root show`; without one, name all that may sign from now on with --trust"
	case errors.Is(err, release.ErrOut):
		e.Remedy = "name a folder that holds the feed and nothing else with --out"
	case errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist):
		e.Remedy = "check that you may read " + b.From + " and write " + b.Out + ", and that its parent folder exists"
	}
	return r, e
}

// FeedKey is a new pair of keys.
type FeedKey struct {
	Schema  string `json:"schema"`
	ID      string `json:"id"`
	Private string `json:"private"` // path, 0600
	Public  string `json:"public"`  // path
}

const otherKeyFile = "pass another file: an existing key is never overwritten"

// NewFeedKey makes a pair of keys that a feed is signed with: the private one in file,
// the public one in file.pub. A file that is there is never replaced.
func NewFeedKey(file string) (FeedKey, error) {
	out := FeedKey{Schema: plan.Schema, Private: file, Public: file + ".pub"}
	key, err := release.NewPrivateKey(keyName(file))
	if err != nil {
		return out, &plan.Error{Op: "make a key", Err: err}
	}
	private, err := key.PrivatePEM()
	if err != nil {
		return out, &plan.Error{Op: "make a key", Err: err}
	}
	out.ID = key.ID()
	op := "make the keys " + out.Private + " and " + out.Public
	var there []string
	for _, path := range []string{out.Private, out.Public} {
		if _, err := os.Lstat(path); err == nil {
			there = append(there, path)
		}
	}
	if len(there) > 0 {
		verb := " is"
		if len(there) > 1 {
			verb = " are"
		}
		return out, &plan.Error{Op: op, Err: errors.New(words.And(there) + verb + " there already"), Exit: plan.ExitUsage, Remedy: otherKeyFile}
	}
	for _, f := range []struct {
		path    string
		content []byte
		mode    os.FileMode
	}{{out.Public, key.PEM(), 0o644}, {out.Private, private, 0o600}} {
		if err = writeNew(f.path, f.content, f.mode); err != nil {
			e := &plan.Error{Op: op, Err: fmt.Errorf("write %s: %w", f.path, workspace.WithoutPath(err)), Exit: plan.ExitUsage, Remedy: "pass a file in an existing, writable folder"}
			if errors.Is(err, fs.ErrExist) { // somebody else made it just now
				e.Remedy = otherKeyFile
			}
			if f.path == out.Private {
				_ = os.Remove(out.Public) // it was written just now, and is of no use alone
			}
			return out, e
		}
	}
	return out, nil
}

// writeNew writes a file that is not there yet.
func writeNew(path string, content []byte, mode os.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err != nil {
		_ = os.Remove(path)
	}
	return err
}
