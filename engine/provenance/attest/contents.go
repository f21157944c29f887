package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"constellation/engine/mirror"
	"constellation/engine/provenance"
	"constellation/internal/ocipack"
)

// internalFiles are files of goreleaser that name the time or the folder of the build.
var internalFiles = []string{"config.yaml", "metadata.json", "artifacts.json"}

// chartRE matches the name of a chart's layout; what is in parentheses is the chart's name.
var chartRE = regexp.MustCompile(`^(.+?)-[0-9]+\.[0-9]+\.[0-9]+[^/]*\.oci$`)

// contents writes the list of all parts of a release, for `constellation release mirror`.
func contents(args []string) error {
	f := flag.NewFlagSet("contents", flag.ContinueOnError)
	dir, out, name, key := f.String("dir", "", "`folder` of the release"), f.String("out", "", "`file` in that folder"), f.String("release", "", "`release`"), f.String("key", "", "private key `file`; none: no signature")
	if err := f.Parse(args); err != nil {
		return err
	}
	c, err := listContents(*dir, *name, filepath.Base(*out))
	if err != nil {
		return err
	}
	b, err := json.MarshalIndent(c, "", " ")
	if err != nil {
		return err
	}
	if _, err := mirror.Parse(b); err != nil {
		return err
	}
	if err := os.WriteFile(*out, append(b, '\n'), 0o644); err != nil || *key == "" {
		return err
	}
	return sign([]string{"-key", *key, *out})
}

// listContents lists the layouts and files of a release, except the file own.
func listContents(dir, name, own string) (*mirror.Contents, error) {
	c := &mirror.Contents{Schema: "1", Release: name, Artifacts: []mirror.Artifact{}, Files: []mirror.File{}}
	layouts, err := filepath.Glob(filepath.Join(dir, "images", "*", "index.json"))
	if err != nil {
		return nil, err
	}
	charts, err := filepath.Glob(filepath.Join(dir, "*.oci", "index.json"))
	if err != nil {
		return nil, err
	}
	for _, index := range append(layouts, charts...) {
		layout, err := filepath.Rel(dir, filepath.Dir(index))
		if err != nil {
			return nil, err
		}
		repository := strings.TrimPrefix(filepath.ToSlash(layout), "images/")
		if strings.HasSuffix(layout, ".oci") {
			m := chartRE.FindStringSubmatch(layout)
			if m == nil {
				return nil, errors.New("layout " + layout + " has no version in its name")
			}
			repository = "charts/" + m[1]
		}
		b, err := os.ReadFile(index)
		if err != nil {
			return nil, err
		}
		i, err := v1.ParseIndexManifest(bytes.NewReader(b))
		if err != nil {
			return nil, err
		}
		for _, d := range i.Manifests {
			c.Artifacts = append(c.Artifacts, mirror.Artifact{Repository: repository, Layout: filepath.ToSlash(layout), Tag: d.Annotations[ocipack.TagAnnotation], MediaType: d.MediaType, Digest: d.Digest, Size: d.Size})
		}
	}
	entries, err := os.ReadDir(dir) // sorted
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() || slices.Contains(internalFiles, e.Name()) || strings.HasPrefix(e.Name(), own) {
			continue
		}
		digest, err := provenance.DigestFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		info, err := e.Info()
		if err != nil {
			return nil, err
		}
		c.Files = append(c.Files, mirror.File{Name: e.Name(), Digest: v1.Hash{Algorithm: "sha256", Hex: digest}, Size: info.Size()})
	}
	return c, nil
}
