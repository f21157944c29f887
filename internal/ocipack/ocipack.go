// Package ocipack packs files into container images. Equal files make equal images on every
// computer: owners, times and the order of files do not depend on the computer. It runs no program
// and contacts no registry.
package ocipack

import (
	"fmt"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// BaseFiles returns the files of every image: a place for temporary files, and names for the users
// that programs look up.
func BaseFiles() []File {
	return []File{
		{Path: "/etc/passwd", Content: "root:x:0:0:root:/:/sbin/nologin\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n", Mode: 0o644},
		{Path: "/etc/group", Content: "root:x:0:\nnobody:x:65534:\n", Mode: 0o644},
		{Path: "/tmp", Dir: true, Mode: 0o1777},
	}
}

// Config describes an image for Linux.
type Config struct {
	Architecture    string // GOARCH
	Created         time.Time
	Entrypoint, Cmd []string
	User            string
	Labels          map[string]string
}

// NewImage describes an image of layers.
func NewImage[L v1.Layer](c Config, layers ...L) (v1.Image, error) {
	config := &v1.ConfigFile{
		Architecture: c.Architecture,
		OS:           "linux",
		Created:      v1.Time{Time: c.Created},
		Config: v1.Config{
			Entrypoint: c.Entrypoint,
			Cmd:        c.Cmd,
			User:       c.User,
			Labels:     c.Labels,
			WorkingDir: "/",
			Env:        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		},
		RootFS: v1.RootFS{Type: "layers"},
	}
	img, err := mutate.ConfigFile(mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON), config)
	if err != nil {
		return nil, fmt.Errorf("describe image: %w", err)
	}
	for _, l := range layers {
		img, err = mutate.Append(img, mutate.Addendum{
			Layer:   l,
			History: v1.History{Created: v1.Time{Time: c.Created}, CreatedBy: "constellation"},
		})
		if err != nil {
			return nil, fmt.Errorf("describe image: %w", err)
		}
	}
	return img, nil
}
