// Package build gets Kubernetes: the binaries of a version and the images that its kubeadm asks
// for, into a cache. Binaries come from the archives that the projects publish, if their digests
// are known here or their signer vouches for them, see upstream.yaml. The rest is compiled from
// the sources that the Go module proxy serves: CoreDNS, pause, agnhost, and all that cannot be
// reached.
//
// It implements the details (modules, linker flags, OCI archives, the Debian
// packages that kube-proxy's image needs) and guarantees that cached files are
// complete: a file counts once its record, written after it, matches it. An interrupted
// build continues where it stopped, and concurrent builds are serialized.
//
// Only Kubernetes and Binary download or compile. Callers that must not wait use Cached or
// Load. The package never touches a file of the computer outside the cache directory
// and the caches of the Go toolchain, needs no root, and starts no machine.
//
// Below the cache directory:
//
//	kubernetes/v1.35.4/manifest.json   what was made: size, SHA-256, key of the recipe, origin
//	kubernetes/v1.35.4/bin/kubeadm     static binaries
//	kubernetes/v1.35.4/images/etcd.tar OCI archives, one image each, uncompressed layers
//	kubernetes/v1.35.4/src/            the modules that were compiled
//	kubernetes/v1.35.4/downloads/      archives, while they are fetched
//	kubernetes/v1.35.4/lock            held while something is made
//	services/v1.1.0/operator-<id>.tar  images of our own services, by the binary in them
//
// Published and compiled bytes differ, so a record's key names the origin; either counts.
//
// Patches of a minor share what they have in common: see sharedModule in compile.go. They require
// the same versions of all other modules, those of the newest patch: v1.35.8 after v1.35.4 took
// 24 % of the processor time of v1.35.4. A program
// that another version has with the same key is copied from there, and so are etcd and agnhost
// of the same tag from another patch of the minor.
//
// To add a version: copy the module files of the nearest version as go.mod and go.sum
// into an empty directory, set the versions (etcd and CoreDNS to what
// cmd/kubeadm/app/constants names, every k8s.io replacement to the staging module of
// the same patch, godebug to upstream's), run "go mod tidy", put the two files back
// under modules/, do so for etcd's when its version is new (its tool is etcdutl, and it has
// no replacements), set the other modules of the minor's older patches to the same versions in the
// same way, add a recipe, and run the tests with the version in the cache. If the new etcd
// demands a newer patch than the minor before has, set etcdNext there, with module files for that patch.
package build

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// AgnhostImage returns the reference of the image with test programs that comes with a version;
// empty if there is no such version.
func AgnhostImage(version string) string {
	r, err := recipeOf(version)
	if err != nil {
		return ""
	}
	return r.agnhostImage()
}

// Versions returns the versions that can be built, the newest last.
func Versions() []string {
	versions := make([]string, len(recipes))
	for i, r := range recipes {
		versions[i] = r.version
	}
	return versions
}

// Artifacts is a version of Kubernetes that is whole and in the cache.
type Artifacts struct {
	Version string
	// Dir is the cache of this version; everything below lies in it.
	Dir string
	// Binaries has the path of each static binary by its name: kubeadm, kubelet, kubectl,
	// kube-apiserver, kube-controller-manager, kube-scheduler, kube-proxy, etcd, etcdutl,
	// coredns, pause, agnhost, and 3.6.11/etcd if clusters must run that patch of etcd before.
	Binaries map[string]string
	// Digests has "sha256:<64 hex>" of each binary by its name.
	Digests map[string]string
	// Images are all that "kubeadm config images list" names, then agnhost and the etcd to run before.
	Images []Image
}

// Image is a container image in a file.
type Image struct {
	// Ref is the name and tag that manifests use: "registry.k8s.io/etcd:3.6.6-0".
	Ref string
	// Path is an OCI archive with this image only; see LoadImage.
	Path string
	// Digest is the image's own, "sha256:<64 hex>" of its manifest.
	Digest string
}

// Progress is how far a build is. Text is for people. Current and Total count work,
// weighed by what it usually costs; they never go back within one call. Took is the
// time since the start, Left an estimate of the rest; zero means not known yet.
type Progress struct {
	Stage Stage
	Text  string
	// Notice says that Text is not about progress and must be shown: why programs are compiled.
	Notice         bool
	Current, Total int64
	Took, Left     time.Duration
}

// Stage is a part of a build, in the order of the constants.
type Stage string

// The stages of a build. Those with nothing left to do do not appear.
const (
	StageWait    Stage = "wait"    // another process is building the same version
	StageLoad    Stage = "load"    // sources are fetched
	StageTools   Stage = "tools"   // Debian packages for kube-proxy are fetched
	StageCompile Stage = "compile" // packages are compiled
	StageLink    Stage = "link"    // binaries are linked
	StageImage   Stage = "image"   // images are written
)

// Error is a failure with the way out of it. The remedy is a sentence without a
// capital and a period, as errors are.
type Error struct {
	Op     string
	Err    error
	Remedy string
}

func (e *Error) Error() string { return e.Op + ": " + e.Err.Error() }

func (e *Error) Unwrap() error { return e.Err }

// ErrNotCached means that a version can be built but has not been, or not wholly.
var ErrNotCached = errors.New("not in the cache")

var errUnknown = errors.New("no such version here")

// Cached reports whether all of version is in the cache, so that Kubernetes returns
// at once. It reads no file but the manifest, unless one was touched since it was made.
func Cached(cacheDir, version string) bool {
	_, err := Load(cacheDir, version)
	return err == nil
}

// Load returns version from the cache and builds nothing. The error wraps
// ErrNotCached, and its remedy is the command that builds, if anything is missing.
func Load(cacheDir, version string) (*Artifacts, error) {
	r, err := recipeOf(version)
	if err != nil {
		return nil, err
	}
	s, err := openStore(cacheDir, version)
	if err != nil {
		return nil, err
	}
	if lacks := s.missing(r, false); !lacks.none() {
		return nil, &Error{
			Op:     "use Kubernetes " + version,
			Err:    fmt.Errorf("%w: %s", ErrNotCached, lacks),
			Remedy: "run `constellation sandbox fetch " + version + "`",
		}
	}
	return s.artifacts(r), nil
}

// Kubernetes gets what the cache lacks of version and returns all of it; with a
// whole cache that takes milliseconds. Within seconds a notice names the published programs that are
// compiled, and the reason. progress may be nil; it is not called twice
// at the same time, nor after the return.
//
// Of several callers, in any number of processes, one builds and the others wait for
// it. When ctx ends, or on any error, what is finished stays, and the next call goes
// on from there.
func Kubernetes(ctx context.Context, cacheDir, version string, o Options, progress func(Progress)) (*Artifacts, error) {
	if err := o.Validate(); err != nil {
		return nil, &Error{Op: "fetch Kubernetes " + version, Err: err, Remedy: "correct the address of the mirror, or leave it out"}
	}
	a, err := Load(cacheDir, version)
	if !errors.Is(err, ErrNotCached) && (err != nil || !o.FromSource) {
		return a, err
	}
	r, err := recipeOf(version)
	if err != nil {
		return nil, err
	}
	err = locked(ctx, cacheDir, r, progress, func(b *builder) error {
		b.options = o
		return b.build(ctx)
	})
	if err != nil {
		return nil, err
	}
	return Load(cacheDir, version)
}

// Binary compiles one binary of version, if the cache lacks it, and returns its path. A
// later Kubernetes finds it there.
func Binary(ctx context.Context, cacheDir, version, name string, progress func(Progress)) (string, error) {
	r, err := recipeOf(version)
	if err != nil {
		return "", err
	}
	p, ok := r.program(name)
	if !ok {
		return "", fmt.Errorf("find binary %s of Kubernetes %s: %w", name, version, fs.ErrNotExist)
	}
	s, err := openStore(cacheDir, version)
	if err != nil {
		return "", err
	}
	if !s.hasProgram(p, false) {
		err := locked(ctx, cacheDir, r, progress, func(b *builder) error {
			if b.hasProgram(p, false) {
				return nil // another process made it while we waited
			}
			rest, err := b.reuse(ctx, []program{p})
			if err != nil {
				return err
			}
			return b.programs(ctx, rest)
		})
		if err != nil {
			return "", err
		}
	}
	return filepath.Join(s.dir, filepath.FromSlash(p.path())), nil
}

// locked runs f alone of all processes that build r's version, with the cache as it
// is once the others are done.
func locked(ctx context.Context, cacheDir string, r recipe, progress func(Progress), f func(*builder) error) (err error) {
	start := time.Now()
	dir := versionDir(cacheDir, r.version)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return withRemedy("make the cache of Kubernetes "+r.version, err, "")
	}
	unlock, err := lock(ctx, filepath.Join(dir, "lock"), func(holder string) {
		if progress != nil {
			progress(Progress{Stage: StageWait, Text: "waiting for " + holder + ", which is building " + r.version, Took: time.Since(start)})
		}
	})
	if err != nil {
		return err
	}
	defer unlock()
	s, err := openStore(cacheDir, r.version)
	if err != nil {
		return err
	}
	if err := s.sweep(); err != nil {
		return err
	}
	m := newMeter(start, progress)
	defer m.stop()
	if err := f(&builder{store: s, recipe: r, meter: m}); err != nil {
		return err
	}
	return s.save() // times of files that had been touched, after their digest was found right
}

// missing is what a version still needs.
type missing struct {
	programs []program
	tools    bool
	images   []imageSpec
}

func (m missing) none() bool {
	return len(m.programs) == 0 && !m.tools && len(m.images) == 0
}

func (m missing) String() string {
	var names []string
	for _, p := range m.programs {
		names = append(names, p.name)
	}
	if m.tools {
		names = append(names, "kube-proxy's tools")
	}
	for _, i := range m.images {
		names = append(names, "image "+i.name)
	}
	if len(names) > 3 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:2], ", "), len(names)-2)
	}
	return strings.Join(names, ", ")
}
