// Command pack writes the charts of a release that people install themselves: as an archive for
// helm, as an OCI layout for a registry, and rendered as a base for kustomize. Equal charts make equal bytes.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"helm.sh/helm/v3/pkg/chart/loader"

	"constellation/assets"
	"constellation/internal/ocipack"
)

// Media types of helm's charts in registries.
const (
	configType  types.MediaType = "application/vnd.cncf.helm.config.v1+json"
	contentType types.MediaType = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
)

func main() {
	release, out := flag.String("release", "", "`release` of the charts"), flag.String("out", "", "`folder`")
	flag.Parse()
	for _, name := range flag.Args() {
		if err := pack(name, *release, *out); err != nil {
			fmt.Fprintf(os.Stderr, "pack chart %s: %v\n", name, err)
			os.Exit(1)
		}
	}
}

func pack(name, release, out string) error {
	files, err := assets.ChartFor(name, release)
	if err != nil {
		return err
	}
	if name == operatorChart {
		if files, err = publish(files, release); err != nil {
			return err
		}
	}
	archive, err := archived(name, files)
	if err != nil {
		return err
	}
	c, err := loader.LoadArchive(bytes.NewReader(archive))
	if err != nil {
		return err
	}
	if err := c.Validate(); err != nil {
		return err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	full := name + "-" + c.Metadata.Version
	if err := os.WriteFile(filepath.Join(out, full+".tgz"), archive, 0o644); err != nil {
		return err
	}
	base, err := kustomization(name, release, files)
	if err != nil {
		return err
	}
	if archive, err := archived(name, base); err != nil {
		return err
	} else if err := os.WriteFile(filepath.Join(out, full+"-kustomize.tgz"), archive, 0o644); err != nil {
		return err
	}
	config, err := json.Marshal(c.Metadata)
	if err != nil {
		return err
	}
	return writeLayout(filepath.Join(out, full+".oci"), c.Metadata.Version, config, archive)
}

// archived returns the files as helm's own packager makes an archive, without the time.
func archived(name string, files []assets.File) ([]byte, error) {
	files = slices.Clone(files)
	// Readers of charts, helm among them, expect Chart.yaml first.
	slices.SortFunc(files, func(a, b assets.File) int {
		if first := map[bool]int{true: -1, false: 1}; (a.Name == "Chart.yaml") != (b.Name == "Chart.yaml") {
			return first[a.Name == "Chart.yaml"]
		}
		return strings.Compare(a.Name, b.Name)
	})
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	t := tar.NewWriter(z)
	for _, f := range files {
		h := &tar.Header{Name: name + "/" + f.Name, Mode: 0o644, Size: int64(len(f.Data)), ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
		if err := t.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := t.Write(f.Data); err != nil {
			return nil, err
		}
	}
	if err := t.Close(); err != nil {
		return nil, err
	}
	if err := z.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// writeLayout writes an OCI image layout with the chart as its only artifact.
func writeLayout(dir, tag string, config, archive []byte) error {
	l, err := ocipack.NewLayout(dir)
	if err != nil {
		return err
	}
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1}
	if m.Config, err = l.Blob(configType, config); err != nil {
		return err
	}
	content, err := l.Blob(contentType, archive)
	if err != nil {
		return err
	}
	m.Layers = []v1.Descriptor{content}
	manifest, err := l.JSON(types.OCIManifestSchema1, m)
	if err != nil {
		return err
	}
	l.Add(manifest, tag)
	return l.Close()
}
