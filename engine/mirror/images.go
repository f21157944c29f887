package mirror

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"constellation/engine/chart"
	pulls "constellation/engine/registry"
)

// Image is an image of Kubernetes. No contents of a release name it.
type Image struct {
	// Reference is that of its publisher, such as registry.k8s.io/coredns/coredns:v1.14.6.
	Reference string
	// Digest is the digest that the release data demands; empty if they have none.
	Digest string
}

// Copied is an image of Kubernetes in a mirror.
type Copied struct {
	// Name is its repository and tag below the mirror, such as kubernetes/coredns:v1.14.6.
	Name string `json:"name"`
	// Digest is that of the image at its source.
	Digest string `json:"digest"`
	// From is the reference that it was copied from.
	From string `json:"from"`
}

// ImageError is an error about one image of Kubernetes.
type ImageError struct {
	Reference string
	Err       error
}

func (e *ImageError) Error() string { return fmt.Sprintf("copy %s: %v", e.Reference, e.Err) }

// Unwrap returns the cause.
func (e *ImageError) Unwrap() error { return e.Err }

// absentImage is [chart.ErrAbsent] for an image.
type absentImage struct{ name string }

func (e *absentImage) Error() string { return e.name + " does not exist" }

func (e *absentImage) Unwrap() error { return chart.ErrAbsent }

// candidate is a place that may have an image.
type candidate struct {
	origin
	name string
}

// target returns where a mirror has an image. Folders between the registry and the image are left
// out, as kubeadm does for other registries than the publisher's.
func (i Image) target() (Artifact, error) {
	repository, tag, _ := strings.Cut(path.Base(i.Reference), ":")
	a := Artifact{Repository: path.Join(pulls.Kubernetes, repository), Layout: path.Join("images", pulls.Kubernetes, repository), Tag: tag}
	if !repositoryRE.MatchString(a.Repository) || !tagRE.MatchString(tag) {
		return a, fmt.Errorf("%w: %q is not an image with a tag", ErrContents, i.Reference)
	}
	return a, nil
}

// candidates returns the places of an image, in the order in which they are tried.
func (o *Options) candidates(i Image, a Artifact) ([]candidate, error) {
	host, rest, _ := strings.Cut(i.Reference, "/")
	repository, _, _ := strings.Cut(rest, ":")
	published := func(base string) (candidate, error) {
		from, err := o.sourceAt(Scheme + base)
		return candidate{origin{from, Artifact{Repository: repository, Tag: a.Tag}}, path.Join(base, repository) + ":" + a.Tag}, err
	}
	first := o.ImagesFrom
	if first == "" {
		first = o.From
	}
	from, err := o.sourceAt(first)
	if err != nil {
		return nil, err
	}
	first = strings.TrimSuffix(first, "/")
	at, isRegistry := strings.CutPrefix(first, Scheme)
	at += "/" + a.String()
	if !isRegistry {
		at = first + "/" + a.Layout + ":" + a.Tag
	}
	all := []candidate{{origin{from, a}, at}}
	base, isRegistry := strings.CutPrefix(strings.TrimSuffix(o.ImagesFrom, "/"), Scheme)
	switch {
	case o.ImagesFrom == "":
		base = host
	case !isRegistry:
		return all, nil
	}
	c, err := published(base)
	return append(all, c), err
}

// image copies an image of Kubernetes from the first place that has it.
func (r *run) image(ctx context.Context, i Image) (Copied, error) {
	a, err := i.target()
	if err != nil {
		return Copied{}, err
	}
	all, err := r.candidates(i, a)
	if err != nil {
		return Copied{}, err
	}
	var without []error
	for _, c := range all {
		d, err := c.tagged(ctx, c.Artifact)
		if err != nil {
			if errors.Is(err, chart.ErrAbsent) {
				err = &absentImage{c.name}
			} else {
				err = fmt.Errorf("read %s: %w", c.name, err)
			}
			without = append(without, err)
			// Some registries deny what they lack.
			if errors.Is(err, chart.ErrAbsent) || errors.Is(err, chart.ErrDenied) {
				continue
			}
			return Copied{}, errors.Join(without...)
		}
		if err := checkTagged(c.name, i, d); err != nil {
			return Copied{}, err
		}
		a.MediaType, a.Digest, a.Size = d.MediaType, d.Digest, d.Size
		if err := r.manifest(ctx, c.origin, a, d, a.Tag, 0); err != nil {
			return Copied{}, fmt.Errorf("from %s: %w", c.name, err)
		}
		return Copied{a.String(), d.Digest.String(), c.name}, nil
	}
	return Copied{}, errors.Join(without...)
}

// checkTagged compares what a tag names with what the release data demand.
func checkTagged(name string, i Image, d v1.Descriptor) error {
	switch {
	case !d.MediaType.IsIndex() && !d.MediaType.IsImage():
		return fmt.Errorf("%w: %s has type %q, want an image", ErrContents, name, d.MediaType)
	case !digestOK(d.Digest) || d.Size < 1 || d.Size > maxManifest:
		return fmt.Errorf("%w: manifest of %s has more than %d bytes, or no digest", ErrContents, name, maxManifest)
	case i.Digest != "" && d.Digest.String() != i.Digest:
		return fmt.Errorf("%w: %s is %s, the release data demand %s", chart.ErrDigest, name, d.Digest, i.Digest)
	}
	return nil
}
