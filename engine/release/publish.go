package release

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"constellation/engine/component"
	"constellation/engine/version"
)

// Default lifetimes of a publication and a key set, and the allowed range.
const (
	DefaultExpiry     = 30 * 24 * time.Hour
	DefaultKeysExpiry = 365 * 24 * time.Hour
	MinExpiry         = time.Hour
	MaxExpiry         = 400 * 24 * time.Hour
)

// ErrPublished means that a publication would drop or change published content.
var ErrPublished = errors.New("it was published")

// Reasons for refusing to publish.
var (
	// ErrKeySet means that a key may not sign the next publication.
	ErrKeySet = errors.New("the key sets do not allow it")
	// ErrOut means that the directory of the feed has other files.
	ErrOut = errors.New("the folder is replaced as a whole, use it for the feed only")
)

// BuildOptions configure a publication.
type BuildOptions struct {
	// From is the source directory, see [Build].
	From string
	// Out is the directory of the feed, which is replaced as a whole, or created.
	Out string
	Key *PrivateKey
	// Trust are the keys that may sign from now on; nil keeps them. Key must be one of them, and
	// one of those trusted before. A feed with a root needs none: its index keys may sign.
	Trust []Key
	// Root is the root of the feed from now on; nil keeps it. It must continue that of Out.
	Root *Roots
	// Expires is the lifetime of this publication, KeysExpire that of a new key set; zero means
	// the default, which is at most what the root allows.
	Expires, KeysExpire time.Duration
	// Now defaults to time.Now.
	Now func() time.Time
}

// BuildReport describes a publication.
type BuildReport struct {
	Out      string    `json:"out"`
	Sequence uint64    `json:"sequence"`
	Created  time.Time `json:"created"`
	Expires  time.Time `json:"expires"`
	Signer   string    `json:"signer"`
	// Keys may all sign; KeySet is the number of their set, zero if there is none.
	Keys   []string `json:"keys"`
	KeySet uint64   `json:"keySet,omitempty"`
	// Root is the version of the root; zero if there is none. Warning is then a weakness of the feed.
	Root    uint64 `json:"root,omitempty"`
	Warning string `json:"warning,omitempty"`
	// Releases are all, oldest first; Added and Dropped are the changes.
	Releases []string `json:"releases"`
	Added    []string `json:"added,omitempty"`
	Dropped  []string `json:"dropped,omitempty"`
	Files    int      `json:"files"`
	// Elsewhere are notices about releases that From lacks: they reach programs that have them.
	Elsewhere []Notice `json:"elsewhere,omitempty"`
	// NoDigest are images and downloads without a known digest.
	NoDigest []string `json:"noDigest,omitempty"`
}

// Build publishes the content of From:
//
//	<version>.yaml                            a release; never changes afterwards
//	<version>/images.yaml                     optional: os images, digests of containers
//	<version>/downloads.yaml                  optional: download addresses of the program
//	<version>/components/<name>.json          optional: another list to sign, see [MirroredList]
//	<version>/measurements/<provider>.json    optional
//	notices.yaml                              optional: releases declared faulty
//
// Everything is validated before anything is written, and Out changes atomically: readers
// see the old feed or the new one. Its sequence continues that of Out. A release of Out may
// be dropped only if it is faulty, and never changed; otherwise the error wraps
// ErrPublished.
func Build(ctx context.Context, o BuildOptions) (BuildReport, error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	now := o.Now().UTC().Truncate(time.Second)
	asked := o.Expires
	for what, d := range map[string]*time.Duration{"feed": &o.Expires, "key set": &o.KeysExpire} {
		if *d == 0 {
			*d = map[string]time.Duration{"feed": DefaultExpiry, "key set": DefaultKeysExpiry}[what]
		}
		if *d < MinExpiry || *d > MaxExpiry {
			return BuildReport{}, fmt.Errorf("a %s must be valid for 1 hour to 400 days, not for %s", what, *d)
		}
	}
	out, err := filepath.Abs(o.Out)
	if err != nil {
		return BuildReport{}, err
	}
	if real, err := filepath.EvalSymlinks(out); err == nil {
		out = real // a symbolic link stays, its target is replaced
	}
	p, err := compile(o.From)
	if err != nil {
		return BuildReport{}, err
	}
	old, err := published(ctx, out, o.Key)
	if err != nil {
		return BuildReport{}, err
	}
	roots, err := nextRoots(old.roots, &o, asked, now)
	if err != nil {
		return BuildReport{}, err
	}
	r := BuildReport{Out: out, Created: now, Expires: now.Add(o.Expires), Signer: o.Key.String(), Elsewhere: p.elsewhere, NoDigest: p.noDigest()}
	i := index{Schema: schema, Type: indexType, Sequence: old.index.Sequence + 1, Created: now, Expires: r.Expires}
	if err := i.authorize(&r, roots, old, o, now); err != nil {
		return BuildReport{}, err
	}
	if err := p.keeps(old, &r); err != nil {
		return BuildReport{}, err
	}
	sigs := map[string][]byte{}
	for _, k := range i.Keys {
		set, err := parseKeySet([]byte(k.Set))
		if err != nil {
			return BuildReport{}, err
		}
		name := keySetName(set.Sequence)
		p.files[name], sigs[name] = []byte(k.Set), []byte(k.last())
		r.KeySet, r.Keys = set.Sequence, nil
		for _, k := range set.keys {
			r.Keys = append(r.Keys, k.String())
		}
	}
	if r.KeySet == 0 {
		r.Keys = []string{o.Key.String()}
	}
	if p.files[indexName], err = p.index(i); err != nil {
		return BuildReport{}, err
	}
	r.Sequence, r.Files = i.Sequence, len(p.files)
	statements, err := p.statements(o.Key, i.Keys)
	if err != nil {
		return BuildReport{}, err
	}
	// The index does not name them, because older programs reject an index with a name that they
	// do not support.
	maps.Copy(p.files, statements)
	for _, s := range p.summaries {
		r.Releases = append(r.Releases, s.Version.String())
	}
	for name, b := range maps.Clone(p.files) {
		if sigs[name] == nil {
			if sigs[name], err = o.Key.sign(b); err != nil {
				return BuildReport{}, err
			}
		}
		p.files[name+signature] = sigs[name]
	}
	anchor := o.Key.Key
	if roots != nil {
		p.files[rootName], anchor = roots.Bytes(), roots.Anchor()
	}
	return r, p.replace(ctx, out, Options{Keys: []Key{anchor}, Now: o.Now})
}

// authorize adds the key sets to an index, and to r what its keys are worth.
func (i *index) authorize(r *BuildReport, roots *Roots, old *existing, o BuildOptions, now time.Time) (err error) {
	if roots == nil {
		r.Warning = legacyWarning()
		i.Keys, err = nextKeys(old.index.Keys, o, now)
		return err
	}
	r.Root = roots.newest().Version
	if old.index.Created.Before(roots.newest().Since) && old.index.Sequence > maxSequence/2 {
		i.Sequence = 1 // somebody else counted up to there
	}
	i.Keys, err = keysBelow(roots, old.index.Keys, o, now)
	return err
}

// nextRoots returns the root of the next publication, nil if there is none, and bounds o.Expires by it.
func nextRoots(old *Roots, o *BuildOptions, asked time.Duration, now time.Time) (*Roots, error) {
	roots := old
	if o.Root != nil {
		roots = o.Root
		if err := roots.Missing(); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrKeySet, err)
		}
		if old != nil {
			if err := roots.continues(old); err != nil {
				return nil, fmt.Errorf("%w: %w", ErrKeySet, err)
			}
		}
	}
	if roots == nil {
		return nil, nil
	}
	r := roots.newest()
	limit := time.Duration(r.IndexDays) * 24 * time.Hour
	switch {
	case o.Trust != nil:
		return nil, fmt.Errorf("%w: the root of the feed decides which keys may sign", ErrKeySet)
	case !hasKey(r.indexKeys, o.Key.id):
		return nil, fmt.Errorf("%w: %s is not an index key of version %d of the root", ErrKeySet, o.Key.Key, r.Version)
	case now.Before(r.Since):
		return nil, fmt.Errorf("%w: version %d of the root was made on %s, and this computer's clock says %s", ErrKeySet, r.Version, minute(r.Created), minute(now))
	case asked > limit:
		return nil, fmt.Errorf("%w: the root allows publications that are valid for %d days at most", ErrKeySet, r.IndexDays)
	}
	o.Expires = min(o.Expires, limit)
	return roots, nil
}

// keysBelow returns key sets with the index keys of a root, for machines and for programs that
// know no root. If the signing key is in no earlier set, they start from scratch.
func keysBelow(roots *Roots, chain []signedKeySet, o BuildOptions, now time.Time) ([]signedKeySet, error) {
	o.Trust = roots.newest().indexKeys
	next, err := nextKeys(chain, o, now)
	if errors.Is(err, ErrKeySet) && len(chain) > 0 {
		return nextKeys(nil, o, now)
	}
	return next, err
}

// Generate writes the lists and the index of the releases in the program, in place:
// dir/releases is From of Build. Nothing is signed.
func Generate(dir string) error {
	p, err := compile(filepath.Join(dir, "releases"))
	if err != nil {
		return err
	}
	if p.files[indexName], err = p.index(index{Schema: schema, Type: indexType}); err != nil {
		return err
	}
	err = filepath.WalkDir(dir, func(at string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, at)
		if err != nil {
			return err
		}
		if name = filepath.ToSlash(name); validName(name) && p.files[name] == nil {
			return os.Remove(at) // generated from a release that was removed
		}
		return nil
	})
	if err != nil {
		return err
	}
	return p.write(dir)
}

// publication is the content of a feed before signing.
type publication struct {
	files     map[string][]byte
	summaries []Summary
	images    map[string]*Images
	// lists are further lists of components that the publisher signs, by release.
	lists  map[string][]MirroredList
	faulty []faulty
	// elsewhere are the notices that match no release here.
	elsewhere []Notice
}

// notices are facts learned after the publication of releases.
type notices struct {
	Schema string   `yaml:"schema"` // empty: the current format
	Faulty []faulty `yaml:"faulty"`
}

// faulty is a notice in notices.yaml.
type faulty struct {
	Notice
	line int
}

// UnmarshalYAML decodes a notice by hand, since the decoder's errors about versions lack the
// line.
func (f *faulty) UnmarshalYAML(n *yaml.Node) error {
	f.line = n.Line
	if n.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: a notice is {release, kubernetes, reason}", n.Line)
	}
	seen := map[string]bool{}
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if seen[key.Value] {
			return fmt.Errorf("line %d: %q occurs twice", key.Line, shorten(key.Value))
		}
		seen[key.Value] = true
		if value.Kind != yaml.ScalarNode {
			return fmt.Errorf("line %d: %q is not text", value.Line, shorten(key.Value))
		}
		var err error
		switch key.Value {
		case "release":
			f.Release, err = noticed(value.Value)
		case "kubernetes":
			f.Kubernetes, err = noticed(value.Value)
		case "reason":
			f.Reason = value.Value
		default:
			err = fmt.Errorf("field %s not found in a notice, which has release, kubernetes and reason", shorten(key.Value))
		}
		if err != nil {
			return fmt.Errorf("line %d: %w", key.Line, err)
		}
	}
	if err := f.check(); err != nil {
		return fmt.Errorf("line %d: %w", n.Line, err)
	}
	return nil
}

func noticed(s string) (version.Version, error) {
	v, err := version.Parse(s)
	if err == nil && len(s) > maxVersion {
		err = errors.New("parse version: it is too long")
	}
	return v, err
}

// imageNotes is images.yaml.
type imageNotes struct {
	OS []OSImage `yaml:"os"`
	// Containers are digests by reference.
	Containers map[string]string `yaml:"containers"`
}

// compile reads and checks the source directory.
func compile(from string) (*publication, error) {
	root, err := os.OpenRoot(from)
	if err != nil {
		return nil, fmt.Errorf("read releases: %w", err)
	}
	defer root.Close()
	dir := root.FS()
	p := &publication{files: map[string][]byte{}, images: map[string]*Images{}, lists: map[string][]MirroredList{}}
	folders, err := p.readSources(dir, from)
	if err != nil {
		return nil, err
	}
	if len(p.summaries) == 0 {
		return nil, fmt.Errorf("read releases: %s has no release, such as v1.1.0.yaml", shorten(from))
	}
	slices.SortFunc(p.summaries, func(a, b Summary) int { return a.Version.Compare(b.Version) })
	for i := range p.summaries[1:] {
		if a, b := p.summaries[i].Version, p.summaries[i+1].Version; !a.Less(b) {
			return nil, fmt.Errorf("read releases: %s and %s are the same version", a, b)
		}
	}
	for _, name := range folders {
		if err := p.readFolder(dir, name); err != nil {
			return nil, err
		}
	}
	if err := p.encode(); err != nil {
		return nil, err
	}
	return p, nil
}

// readSources reads the releases and notices of dir, and returns its folders, which have more about
// releases.
func (p *publication) readSources(dir fs.FS, from string) (folders []string, err error) {
	entries, err := fs.ReadDir(dir, ".")
	if err != nil {
		return nil, fmt.Errorf("read releases: %w", err)
	}
	for _, e := range entries {
		name := e.Name()
		v, isYAML := strings.CutSuffix(name, ".yaml")
		switch {
		case e.IsDir() && validVersion(name):
			folders = append(folders, name)
		case name == "notices.yaml":
			if err := p.readNotices(dir, name); err != nil {
				return nil, err
			}
		case isYAML && validVersion(v) && !e.IsDir():
			if err := p.readRelease(dir, name); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
		case name == "README.md":
		default:
			return nil, fmt.Errorf("read releases: %s has %q, which is neither a release (such as v1.1.0.yaml), nor a folder of one, nor notices.yaml", shorten(from), shorten(name))
		}
	}
	return folders, nil
}

// encode adds the files that list releases, images and channels.
func (p *publication) encode() error {
	var err error
	for v, i := range p.images {
		if p.files["releases/"+v+"/images.json"], err = encodeJSON(i); err != nil {
			return err
		}
	}
	told, err := p.markFaulty()
	if err != nil {
		return err
	}
	if p.files[summariesName], err = encodeJSON(summaries{schema, p.summaries, told}); err != nil {
		return err
	}
	if _, _, err := parseSummaries(p.files[summariesName]); err != nil {
		return err
	}
	for name, l := range lists(p.summaries) {
		if p.files[name], err = encodeJSON(l); err != nil {
			return err
		}
	}
	return nil
}

func readSource(dir fs.FS, name string) ([]byte, error) {
	f, err := dir.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.New("it is not a regular file")
	}
	return readAtMost(f, maxFile)
}

// readYAML decodes the files beside releases strictly.
func readYAML(dir fs.FS, name string, to any) error {
	b, err := readSource(dir, name)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(to); err != nil {
		return fmt.Errorf("%s: %s", name, strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if err := d.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: unexpected data after the document", name)
	}
	return nil
}

func (p *publication) readNotices(dir fs.FS, name string) error {
	var n notices
	if err := readYAML(dir, name, &n); err != nil {
		return err
	}
	if n.Schema != "" && n.Schema != schema {
		return fmt.Errorf("%s: its format is %q, want %q", name, shorten(n.Schema), schema)
	}
	p.faulty = n.Faulty
	return nil
}

func (p *publication) readRelease(dir fs.FS, name string) error {
	b, err := readSource(dir, name)
	if err != nil {
		return err
	}
	r, err := Parse(b)
	if err != nil {
		return err
	}
	if r.Version.String()+".yaml" != name {
		return fmt.Errorf("contains release %s", r.Version)
	}
	p.files[releaseName(r.Version)] = b
	p.summaries = append(p.summaries, r.Summary())
	i := &Images{Schema: schema, Version: r.Version, OS: []OSImage{}}
	for _, ref := range r.containers() {
		_, d, _ := strings.Cut(ref, "@")
		i.Containers = append(i.Containers, ContainerImage{ref, d})
	}
	p.images[r.Version.String()] = i
	return nil
}

// containers returns every image that a cluster of the release can run, sorted.
func (r *Release) containers() []string {
	all := map[string]bool{}
	for _, s := range r.Services {
		if s.Image != "" {
			all[s.Image] = true
		}
	}
	if image := r.AgentImage(); image != "" {
		all[image] = true
	}
	for _, k := range r.Kubernetes {
		images, _ := r.ImagesToMirror(k.Version) // it offers its own versions
		for _, image := range images {
			all[image] = true
		}
	}
	return slices.Sorted(maps.Keys(all))
}

func (p *publication) readFolder(dir fs.FS, v string) error {
	s := slices.IndexFunc(p.summaries, func(s Summary) bool { return s.Version.String() == v })
	if s < 0 {
		return fmt.Errorf("read releases: there is a folder %s but no %s.yaml", v, v)
	}
	return fs.WalkDir(dir, v, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rest := strings.TrimPrefix(strings.TrimPrefix(name, v), "/")
		provider, isJSON := strings.CutSuffix(strings.TrimPrefix(rest, "measurements/"), ".json")
		switch {
		case d.IsDir() && (rest == "" || rest == "measurements" || rest == "components"):
			return nil
		case isListFile(rest):
			return p.readList(dir, name, v)
		case rest == "images.yaml":
			return p.readImages(dir, name, v)
		case rest == "downloads.yaml":
			if err := readYAML(dir, name, &p.summaries[s].CLI); err != nil {
				return err
			}
			if err := checkDownloads(p.summaries[s].CLI); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			return nil
		case rest == "images.json":
			return p.madeHere(dir, name, v)
		case path.Dir(rest) == "measurements" && isJSON && providerRE.MatchString(provider):
			b, err := readSource(dir, name)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			if _, err := parseMeasurements(b, p.summaries[s].Version, provider); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			p.files["releases/"+name] = b
			return nil
		}
		return fmt.Errorf("read releases: %q is not images.yaml, downloads.yaml, measurements/<provider>.json or components/<name>.json", shorten(name))
	})
}

func (p *publication) readImages(dir fs.FS, name, v string) error {
	var notes imageNotes
	if err := readYAML(dir, name, &notes); err != nil {
		return err
	}
	i := p.images[v]
	seen := map[string]bool{}
	for _, o := range notes.OS {
		if err := o.check(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if seen[o.Provider] {
			return fmt.Errorf("%s: %s occurs twice", name, o.Provider)
		}
		seen[o.Provider] = true
	}
	i.OS = append(i.OS, notes.OS...)
	for _, ref := range slices.Sorted(maps.Keys(notes.Containers)) {
		at := slices.IndexFunc(i.Containers, func(c ContainerImage) bool { return c.Reference == ref })
		d := notes.Containers[ref]
		switch {
		case at < 0:
			return fmt.Errorf("%s: release %s has no image %q", name, v, shorten(ref))
		case !digestRE.MatchString(d):
			return fmt.Errorf("%s: invalid digest of %s: %q", name, ref, shorten(d))
		case i.Containers[at].Digest != "" && i.Containers[at].Digest != d:
			return fmt.Errorf("%s: %s has another digest in the release", name, ref)
		}
		i.Containers[at].Digest = d
	}
	return nil
}

// madeHere allows the images.json that Generate wrote, and nothing that would be lost.
func (p *publication) madeHere(dir fs.FS, name, v string) error {
	b, err := readSource(dir, name)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	var i Images
	if err := json.Unmarshal(b, &i); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if _, err := fs.Stat(dir, v+"/images.yaml"); errors.Is(err, fs.ErrNotExist) && len(i.OS) > 0 {
		return fmt.Errorf("%s: this file is generated from images.yaml, which is missing", name)
	}
	return nil
}

// markFaulty applies notices to summaries. It returns those that match none, but may match
// releases of other programs.
func (p *publication) markFaulty() (told []Notice, err error) {
	for _, f := range p.faulty {
		here, meant := false, false
		for i := range p.summaries {
			here = here || f.Release.Equal(p.summaries[i].Version)
			meant = f.mark(&p.summaries[i]) || meant
		}
		if here && !meant {
			return nil, fmt.Errorf("notices.yaml: line %d: release %s does not offer Kubernetes %s", f.line, f.Release, f.Kubernetes)
		}
		if !here {
			told = append(told, f.Notice)
		}
		if !meant {
			p.elsewhere = append(p.elsewhere, f.Notice)
		}
	}
	return told, nil
}

// noDigest lists everything without a digest.
func (p *publication) noDigest() []string {
	var out []string
	for _, s := range p.summaries {
		out = append(out, withoutDigest(s, p.images[s.Version.String()])...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// withoutDigest lists the images and downloads of a release without a digest.
func withoutDigest(s Summary, i *Images) []string {
	var out []string
	for _, c := range i.Containers {
		if c.Digest == "" {
			out = append(out, c.Reference)
		}
	}
	for _, o := range i.OS {
		if o.Digest == "" {
			out = append(out, fmt.Sprintf("OS image of %s for %s: %s", s.Version, o.Provider, o.Reference))
		}
	}
	for _, d := range s.CLI {
		if d.Digest == "" {
			out = append(out, d.URL)
		}
	}
	return out
}

// MirroredList is a list of components that differs from the one of the release: a mirror has
// other URLs, and a custom build has other digests. Machines install it only with a statement
// of its own.
type MirroredList struct {
	Kubernetes version.Version `json:"kubernetes"`
	Arch       string          `json:"arch"`
	Components component.List  `json:"components"`
}

// isListFile reports whether a file in the folder of a release is a list of components.
func isListFile(rest string) bool {
	name, ok := strings.CutPrefix(rest, "components/")
	return ok && strings.HasSuffix(name, ".json") && !strings.Contains(name, "/")
}

func (p *publication) readList(dir fs.FS, name, v string) error {
	b, err := readSource(dir, name)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	var l MirroredList
	if err := strictJSON(b, &l); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if !slices.Contains(architectures, l.Arch) {
		return fmt.Errorf("%s: arch is %q, want one of %s", name, shorten(l.Arch), strings.Join(architectures, ", "))
	}
	r, err := Parse(p.files["releases/"+v+".yaml"])
	if err == nil {
		_, err = r.ForKubernetes(l.Kubernetes)
	}
	if err == nil {
		err = l.Components.Validate()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	for _, want := range binaries {
		if _, ok := l.Components.ByName(want); !ok {
			return fmt.Errorf("%s: components: %s is missing", name, want)
		}
	}
	p.lists[v] = append(p.lists[v], l)
	return nil
}

// statements returns the publisher's statements, by file.
func (p *publication) statements(key *PrivateKey, chain []signedKeySet) (map[string][]byte, error) {
	out := map[string][]byte{}
	sign := func(name string, lists Vouched) error {
		document, err := encodeStatement(lists)
		if err != nil {
			return err
		}
		sig, err := key.signAgain(document)
		if err != nil {
			return err
		}
		text, err := joinStatement(document, sig, chain)
		if err != nil {
			return fmt.Errorf("sign %s: %w", name, err)
		}
		out[name] = []byte(text)
		return nil
	}
	for _, s := range p.summaries {
		r, err := Parse(p.files[releaseName(s.Version)])
		if err != nil {
			return nil, err
		}
		lists, err := r.vouched()
		if err != nil {
			return nil, err
		}
		if err := sign(statementName(s.Version), lists); err != nil {
			return nil, err
		}
		further := signedLists{Schema: schema}
		for _, l := range p.lists[s.Version.String()] {
			d := l.Components.Digest()
			if slices.Contains(further.Lists, d) {
				return nil, fmt.Errorf("release %s: two files in components/ have the same list %s: keep one of them", s.Version, d)
			}
			further.Lists = append(further.Lists, d)
			if err := sign(listStatementName(s.Version, d), Vouched{l.Kubernetes.String(): {l.Arch: d}}); err != nil {
				return nil, err
			}
		}
		if len(further.Lists) == 0 {
			continue
		}
		if out[listsName(s.Version)], err = encodeJSON(further); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// vouched returns the lists of components of a release for its statement.
func (r *Release) vouched() (Vouched, error) {
	out := Vouched{}
	for _, k := range r.Kubernetes {
		if k.Unpinned != "" {
			continue // there is nothing to vouch for
		}
		out[k.Version.String()] = map[string]string{}
		for _, arch := range architectures {
			l, err := r.Components(k.Version, arch)
			if err != nil {
				return nil, err
			}
			out[k.Version.String()][arch] = l.Digest()
		}
	}
	return out, nil
}

// index returns index.json over the files.
func (p *publication) index(i index) ([]byte, error) {
	i.Files = map[string]entry{}
	for name, b := range p.files {
		if name == indexName {
			continue
		}
		if !validName(name) || len(b) > maxFile {
			return nil, fmt.Errorf("%q is not allowed in a feed", shorten(name))
		}
		i.Files[name] = entryOf(b)
	}
	b, err := encodeJSON(i)
	if err == nil && len(b) > maxIndex {
		err = fmt.Errorf("the index would have %d bytes, more than %d", len(b), maxIndex)
	}
	return b, err
}

// existing is the present publication of a directory; empty if there is none.
type existing struct {
	index     *index
	roots     *Roots // nil if there is none
	summaries []Summary
	store     store
}

// published reads the feed in out, which key must be able to continue.
func published(ctx context.Context, out string, key *PrivateKey) (*existing, error) {
	e := &existing{index: &index{}}
	entries, err := os.ReadDir(out)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(entries) == 0 {
		return e, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", out, err)
	}
	err = filepath.WalkDir(out, func(at string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(out, at)
		if err != nil {
			return err
		}
		if n := strings.TrimSuffix(filepath.ToSlash(name), signature); n != indexName && n != rootName && !validName(n) && !isStatement(n) {
			return fmt.Errorf("%s has %q, which is not a file of a feed: %w", out, shorten(name), ErrOut)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if e.store, err = openDir(out); err != nil {
		return nil, err
	}
	b, err := e.store.read(ctx, indexName, maxIndex, "")
	if err != nil {
		return nil, fmt.Errorf("read %s of %s: %w", indexName, out, err)
	}
	sig, err := e.store.read(ctx, indexName+signature, maxSignature, "")
	if err != nil {
		return nil, fmt.Errorf("read %s%s of %s: %w", indexName, signature, out, err)
	}
	if e.index, err = parseIndex(b.bytes); err != nil {
		return nil, fmt.Errorf("%s: %w", out, err)
	}
	keys := []Key{key.Key}
	if n := len(e.index.Keys); n > 0 {
		set, err := parseKeySet([]byte(e.index.Keys[n-1].Set))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", out, err)
		}
		keys = set.keys
	}
	switch a, err := e.store.read(ctx, rootName, maxRoots, ""); {
	case err == nil:
		if e.roots, err = ParseRoots(a.bytes); err != nil {
			return nil, fmt.Errorf("%s: %w", out, err)
		}
		keys = e.roots.everyIndexKey() // the last publication may be of a key that was revoked since
	case !errors.Is(err, ErrAbsent):
		return nil, fmt.Errorf("read %s of %s: %w", rootName, out, err)
	}
	if _, err := verify(b.bytes, sig.bytes, keys); err != nil {
		return nil, fmt.Errorf("%s has a feed that this key cannot continue: %w", out, err)
	}
	summed, err := e.read(ctx, summariesName)
	if err != nil {
		return nil, err
	}
	e.summaries, _, err = parseSummaries(summed)
	return e, err
}

func (e *existing) read(ctx context.Context, name string) ([]byte, error) {
	entry := e.index.Files[name]
	a, err := e.store.read(ctx, name, maxFile, "")
	if err == nil {
		err = entry.check(a.bytes)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s of %s: %w", name, e.store.location(), err)
	}
	return a.bytes, nil
}

// nextKeys returns the key sets of the next publication.
func nextKeys(chain []signedKeySet, o BuildOptions, now time.Time) ([]signedKeySet, error) {
	chain = slices.Clone(chain)
	var current *keySet
	if n := len(chain); n > 0 {
		var err error
		if current, err = parseKeySet([]byte(chain[n-1].Set)); err != nil {
			return nil, err
		}
		if !hasKey(current.keys, o.Key.id) {
			return nil, fmt.Errorf("%w: %s is not in key set %d", ErrKeySet, o.Key.Key, current.Sequence)
		}
		if !chain[n-1].signedBy([]Key{o.Key.Key}) {
			// Clients that trust only this key must be able to verify the set.
			sig, err := o.Key.sign([]byte(chain[n-1].Set))
			if err != nil {
				return nil, err
			}
			chain[n-1].Signatures = append(slices.Clone(chain[n-1].Signatures), string(sig))
		}
	}
	next := keySet{Schema: schema, Type: keySetType, Sequence: 1, Created: now, Expires: now.Add(o.KeysExpire)}
	keys := o.Trust
	if current != nil {
		next.Sequence = current.Sequence + 1
		if keys == nil || sameKeys(keys, current.keys) {
			if current.Expires.Sub(now) > o.KeysExpire/2 {
				return chain, nil
			}
			keys = current.keys // the same keys for longer
		}
	}
	if keys == nil {
		return chain, nil
	}
	if !hasKey(keys, o.Key.id) {
		return nil, fmt.Errorf("%w: %s signs but would not be trusted: to retire it, add its successor to the trusted keys, publish, and then sign with the successor", ErrKeySet, o.Key.Key)
	}
	for _, k := range keys {
		next.Keys = append(next.Keys, setKey{k.Name, string(k.PEM())})
	}
	b, err := encodeJSON(next)
	if err != nil {
		return nil, err
	}
	if _, err := parseKeySet(b); err != nil {
		return nil, err
	}
	sig, err := o.Key.sign(b)
	if err != nil {
		return nil, err
	}
	return append(chain, signedKeySet{Set: string(b), Signatures: []string{string(sig)}}), nil
}

func sameKeys(a, b []Key) bool {
	ids := func(keys []Key) (out []string) {
		for _, k := range keys {
			out = append(out, k.id)
		}
		slices.Sort(out)
		return slices.Compact(out)
	}
	return slices.Equal(ids(a), ids(b))
}

// keeps compares with the previous publication, and returns an error for forbidden changes.
func (p *publication) keeps(old *existing, r *BuildReport) error {
	have := map[string]bool{}
	for _, s := range p.summaries {
		have[s.Version.String()] = true
	}
	was := map[string]bool{}
	for _, s := range old.summaries {
		v := s.Version.String()
		was[v] = true
		if have[v] {
			continue
		}
		bad := s.Faulty != ""
		for _, f := range p.faulty {
			bad = bad || f.Release.Equal(s.Version) && f.Kubernetes.IsZero()
		}
		if !bad {
			return fmt.Errorf("drop release %s: %w, and clusters may run it; first declare it faulty in notices.yaml with a reason", v, ErrPublished)
		}
		r.Dropped = append(r.Dropped, v)
	}
	for v := range have {
		if !was[v] {
			r.Added = append(r.Added, v)
		}
	}
	slices.Sort(r.Added)
	for _, name := range slices.Sorted(maps.Keys(old.index.Files)) {
		v, ok := versionOf(name)
		if !ok || !have[v.String()] {
			continue
		}
		b, kept := p.files[name]
		if path.Base(name) == "images.json" {
			if err := p.keepsImages(old, v, name); err != nil {
				return err
			}
			continue
		}
		switch {
		case !kept:
			return fmt.Errorf("drop %s: %w, and machines are verified with it", name, ErrPublished)
		case digest(b) != old.index.Files[name].SHA256:
			return fmt.Errorf("change %s: %w; publish the change as a new version", name, ErrPublished)
		}
	}
	return nil
}

// keepsImages allows new digests of images, and images of new providers.
func (p *publication) keepsImages(old *existing, v version.Version, name string) error {
	b, err := old.read(context.Background(), name)
	if err != nil {
		return err
	}
	before, err := parseImages(b, v)
	if err != nil {
		return err
	}
	now := p.images[v.String()]
	for _, o := range before.OS {
		n := slices.IndexFunc(now.OS, func(i OSImage) bool { return i.Provider == o.Provider })
		if n < 0 || now.OS[n].Reference != o.Reference || o.Digest != "" && now.OS[n].Digest != o.Digest {
			return fmt.Errorf("change the OS image of %s for %s: %w; publish the change as a new version", v, o.Provider, ErrPublished)
		}
	}
	for _, c := range before.Containers { // references are those of the release, which did not change
		if c.Digest != "" && !slices.Contains(now.Containers, c) {
			return fmt.Errorf("change the digest of %s: %w", c.Reference, ErrPublished)
		}
	}
	return nil
}

// write writes the files below dir.
func (p *publication) write(dir string) error {
	for _, name := range slices.Sorted(maps.Keys(p.files)) {
		at := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(at, p.files[name], 0o644); err != nil {
			return err
		}
	}
	return nil
}

// replace makes the files the whole content of out, atomically.
func (p *publication) replace(ctx context.Context, out string, o Options) error {
	next, err := os.MkdirTemp(filepath.Dir(out), ".release-build-*")
	if err != nil {
		return fmt.Errorf("write feed: %w", err)
	}
	defer os.RemoveAll(next)
	if err := os.Chmod(next, 0o755); err != nil { // feeds are read by web servers
		return err
	}
	if err := p.write(next); err != nil {
		return fmt.Errorf("write feed: %w", err)
	}
	// Validate with the reader's code before publishing.
	if _, err := Open(ctx, next, o); err != nil {
		return fmt.Errorf("write feed: %w", err)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if _, statErr := os.Lstat(out); statErr == nil {
		err = exchange(next, out) // the deferred removal removes the old content
	} else {
		err = os.Rename(next, out)
	}
	if err != nil {
		return fmt.Errorf("write feed: %w", err)
	}
	return nil
}
