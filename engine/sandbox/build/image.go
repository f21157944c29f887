package build

import (
	"context"
	"fmt"
	"path"
	"path/filepath"
	"runtime"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"constellation/internal/ocipack"
)

// images writes archives and adopts them.
func (b *builder) images(ctx context.Context, specs []imageSpec) error {
	if len(specs) == 0 {
		return nil
	}
	stage, remove, err := b.stage()
	if err != nil {
		return err
	}
	defer remove()
	for n, spec := range specs {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		out := filepath.Join(stage, spec.name)
		digest, err := b.image(spec, out)
		if err != nil {
			return b.fail("write image "+spec.ref, err)
		}
		r := record{Key: b.imageKey(b.recipe, spec), Image: digest}
		for _, name := range spec.programs() {
			r.From = append(r.From, "bin/"+name)
		}
		if spec.tools {
			r.From = append(r.From, toolsPath)
		}
		if err := b.adopt(out, spec.path(), r); err != nil {
			return b.fail("keep image "+spec.ref, err)
		}
		b.meter.advance(costImage, StageImage, fmt.Sprintf("wrote image %d of %d: %s", n+1, len(specs), spec.ref))
	}
	return nil
}

// image writes the archive of spec to out and returns the image's digest.
func (b *builder) image(spec imageSpec, out string) (string, error) {
	var layers []*ocipack.Layer
	if spec.tools {
		tools, err := ocipack.LayerFromFile(b.path(toolsPath))
		if err != nil {
			return "", err
		}
		layers = append(layers, tools)
	}
	var files []string
	for _, name := range spec.programs() {
		files = append(files, b.path("bin/"+name))
	}
	layer, err := spec.layer(b.recipe.date, files[0], files[1:]...)
	if err != nil {
		return "", err
	}
	img, err := spec.describe(b.recipe.date, append(layers, layer)...)
	if err != nil {
		return "", err
	}
	return ocipack.WriteArchive(out, spec.ref, img)
}

// layer makes the layer that has binary, programs beside it, and little else.
func (spec imageSpec) layer(date time.Time, binary string, beside ...string) (*ocipack.Layer, error) {
	files := append(ocipack.BaseFiles(), ocipack.File{Path: spec.at, From: binary, Mode: 0o755})
	for _, file := range beside {
		files = append(files, ocipack.File{Path: path.Join(path.Dir(spec.at), filepath.Base(file)), From: file, Mode: 0o755})
	}
	for at, target := range spec.links {
		files = append(files, ocipack.File{Path: at, Link: target})
	}
	return ocipack.NewLayer(date, files)
}

// describe describes the image of a spec, for this computer's architecture.
func (spec imageSpec) describe(date time.Time, layers ...*ocipack.Layer) (v1.Image, error) {
	return ocipack.NewImage(ocipack.Config{Architecture: runtime.GOARCH, Created: date, Entrypoint: spec.entrypoint, Cmd: spec.cmd, User: spec.user}, layers...)
}

// LoadImage opens the image in an OCI archive; see [ocipack.LoadArchive].
func LoadImage(path string) (v1.Image, error) {
	img, err := ocipack.LoadArchive(path)
	if err != nil {
		return nil, fmt.Errorf("load image %s: %w", filepath.Base(path), err)
	}
	return img, nil
}
