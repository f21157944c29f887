package build

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"constellation/internal/ocipack"
)

// services are the parts of ours that run as pods.
var services = []string{"agent", "joinservice", "operator"}

// servicesDate is the time of our images and of all in them: the binary decides what
// they are, not the day on which somebody packed it.
var servicesDate = time.Unix(0, 0).UTC()

// ServiceReference is what manifests call the image of a service of ours.
func ServiceReference(name, release string) string {
	return "registry.constellation.example/" + name + ":" + release
}

// Services returns the images of our own services for a release of this product. It
// packs binaries that "make build" has made (see ReleaseBinary) and compiles nothing;
// with the images in the cache it takes as long as to read the binaries. progress may
// be nil.
func Services(ctx context.Context, cacheDir, release string, progress func(Progress)) ([]Image, error) {
	start := time.Now()
	var images []Image
	for n, name := range services {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		binary, err := ReleaseBinary(release, name)
		if err != nil {
			return nil, err
		}
		spec := imageSpec{
			name: name, ref: ServiceReference(name, release), binary: name,
			at: "/usr/local/bin/" + name, entrypoint: []string{"/usr/local/bin/" + name},
		}
		img, err := packService(filepath.Join(cacheDir, "services", release), spec, binary)
		if err != nil {
			return nil, withRemedy("write image "+spec.ref, err, "")
		}
		images = append(images, img)
		if progress != nil {
			progress(Progress{
				Stage: StageImage, Text: fmt.Sprintf("packed image %d of %d: %s", n+1, len(services), spec.ref),
				Current: int64(n + 1), Total: int64(len(services)), Took: time.Since(start),
			})
		}
	}
	return images, nil
}

// PruneServices removes images of our own services that [Services] has not returned
// for the time unused, and that are not in keep, from the cache. It returns the
// paths of those. Versions of Kubernetes, which take minutes to make, stay.
func PruneServices(cacheDir string, keep []string, unused time.Duration) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(cacheDir, "services", "*", "*.tar"))
	if err != nil {
		return nil, fmt.Errorf("prune services: %w", err)
	}
	since := time.Now().Add(-unused)
	var removed []string
	var errs []error
	for _, f := range files {
		info, err := os.Lstat(f)
		if err != nil || !info.ModTime().Before(since) || slices.Contains(keep, f) {
			continue
		}
		if err := os.Remove(f); err != nil {
			errs = append(errs, err)
			continue
		}
		removed = append(removed, f)
		_ = os.Remove(filepath.Dir(f)) // the release's directory, if nothing else is in it
	}
	if err := errors.Join(errs...); err != nil {
		return removed, fmt.Errorf("prune services: %w", err)
	}
	return removed, nil
}

// packService returns the image of binary, from dir if it is there already. Its file
// is named after the binary's content, so that processes with different binaries of
// one release, as in development, do not disturb each other.
func packService(dir string, spec imageSpec, binary string) (Image, error) {
	digest, _, err := digestFile(binary)
	if err != nil {
		return Image{}, err
	}
	id := spec.key(servicesDate, digest)[:16]
	path := filepath.Join(dir, spec.name+"-"+id+".tar")
	// The name is given to finished files only; a foreign or broken one does not load.
	if img, err := LoadImage(path); err == nil {
		if hash, err := img.Digest(); err == nil {
			// For PruneServices. Whether it succeeds decides nothing.
			now := time.Now()
			_ = os.Chtimes(path, now, now)
			return Image{Ref: spec.ref, Path: path, Digest: hash.String()}, nil
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return Image{}, err
	}
	temp, err := os.CreateTemp(dir, "."+spec.name+"-")
	if err != nil {
		return Image{}, err
	}
	defer os.Remove(temp.Name()) // gone by then, if all went well
	if err := errors.Join(temp.Chmod(0o644), temp.Close()); err != nil {
		return Image{}, err
	}
	layer, err := spec.layer(servicesDate, binary)
	if err != nil {
		return Image{}, err
	}
	img, err := spec.describe(servicesDate, layer)
	if err != nil {
		return Image{}, err
	}
	hash, err := ocipack.WriteArchive(temp.Name(), spec.ref, img)
	if err != nil {
		return Image{}, err
	}
	if err := syncFile(temp.Name()); err != nil {
		return Image{}, err
	}
	if err := os.Rename(temp.Name(), path); err != nil {
		return Image{}, err
	}
	return Image{Ref: spec.ref, Path: path, Digest: hash}, nil
}

// ReleaseBinary returns the path of one of our own binaries (joinservice, operator,
// bootstrapper, agent) as it is in a release. Packages, archives and "make build" put them
// beside the constellation binary; a test, which runs from elsewhere, finds them in the tree
// that it is part of.
func ReleaseBinary(release, name string) (string, error) {
	e := &Error{Op: "find " + name + " of release " + release, Remedy: "install this release again; in a source tree run `make build` and use its bin/constellation"}
	if !filepath.IsLocal(release) || strings.ContainsAny(release, `/\`) {
		e.Err, e.Remedy = errors.New("that is not the name of a release"), "name a release such as v1.1.0"
		return "", e
	}
	var dirs []string
	if exe, err := os.Executable(); err == nil {
		if exe, err = filepath.EvalSymlinks(exe); err == nil {
			dirs = append(dirs, filepath.Dir(exe))
		}
	}
	if root := sourceTree(); root != "" {
		dirs = append(dirs, filepath.Join(root, "bin"))
	}
	for _, dir := range dirs {
		path := filepath.Join(dir, "releases", release, name)
		info, err := os.Stat(path)
		if err == nil && info.Mode().IsRegular() {
			return path, nil
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			e.Err = err
			return "", e
		}
	}
	e.Err = fmt.Errorf("%s: %w", filepath.Join("releases", release, name), fs.ErrNotExist)
	return "", e
}

// sourceTree returns the directory of this program's own module around the working
// directory, or nothing.
func sourceTree() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Path == "" {
		return ""
	}
	dir, err := os.Getwd()
	if err != nil {
		return ""
	}
	for {
		b, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(b), "module "+info.Main.Path+"\n") {
			return dir
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return ""
		}
		dir = parent
	}
}
