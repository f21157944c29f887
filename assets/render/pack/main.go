// Command pack writes the charts of a release that people install in any cluster: as an archive for
// helm, and as an OCI layout for a registry. Equal charts make equal bytes.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
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
	config, err := json.Marshal(c.Metadata)
	if err != nil {
		return err
	}
	return writeLayout(filepath.Join(out, full+".oci"), c.Metadata.Version, config, archive)
}

// archived returns the chart as helm's own packager makes it, without the time.
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
	blobs := filepath.Join(dir, "blobs", "sha256")
	if err := os.MkdirAll(blobs, 0o755); err != nil {
		return err
	}
	blob := func(mediaType types.MediaType, b []byte) (v1.Descriptor, error) {
		sum := sha256.Sum256(b)
		digest := v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum[:])}
		return v1.Descriptor{MediaType: mediaType, Size: int64(len(b)), Digest: digest}, os.WriteFile(filepath.Join(blobs, digest.Hex), b, 0o644)
	}
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1}
	var err error
	if m.Config, err = blob(configType, config); err != nil {
		return err
	}
	content, err := blob(contentType, archive)
	if err != nil {
		return err
	}
	m.Layers = []v1.Descriptor{content}
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	manifest, err := blob(types.OCIManifestSchema1, b)
	if err != nil {
		return err
	}
	manifest.Annotations = map[string]string{"org.opencontainers.image.ref.name": tag}
	index, err := json.Marshal(v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{manifest}})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "index.json"), index, 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644)
}
