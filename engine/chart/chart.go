// Package chart fetches charts that do not come with the program, each by its digest.
//
// A chart is an archive as `helm package` makes it. It lies in a directory, behind an https
// address or in an OCI registry, and its digest says which bytes are meant:
//
//	file:charts/cilium-1.17.4.tgz      the archive's SHA-256
//	file:charts                        the same, of charts/<name>-<version>.tgz
//	https://host/charts                the same; `digest` in the index.yaml of a repository
//	oci://host/path/cilium             the manifest's, as `helm push` and `helm pull` print it
//
// Nothing else is believed: neither a tag nor the index of a repository nor the certificate
// of a server decides what is installed. So a copy is as good as its source. What was
// fetched is kept by digest in a cache, and a bundle that is carried to where no network is
// holds the same files. Every wait and every size has a bound. Credentials are those that
// `docker login` and `helm registry login` have stored; no error tells of them.
//
// The package does not know what a chart does. Package engine/kube installs it.
package chart

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"path"
	"strings"
	"unicode"

	"github.com/google/go-containerregistry/pkg/name"
	"gopkg.in/yaml.v3"

	"constellation/engine/release"
)

// Why a chart is not to be had. Errors wrap one of them.
var (
	ErrAbsent      = errors.New("there is no such chart")
	ErrDigest      = errors.New("it is not the chart that is meant")
	ErrUnreachable = errors.New("it cannot be reached")
	ErrDenied      = errors.New("access is denied")
	ErrArchive     = errors.New("it is no chart that can be used")
)

// Bounds of what strangers may send, in bytes and in number.
const (
	maxArchive  = 32 << 20
	maxManifest = 1 << 20
	maxUnpacked = 64 << 20
	maxFiles    = 10000
)

// Ref says which chart is meant.
type Ref struct {
	// Name and Version are those in its Chart.yaml.
	Name, Version string
	// Source is where it is, Digest is sha256: and 64 hex digits; see the package's comment.
	Source, Digest string
}

// RefOf returns what a release or a configuration means by a chart that does not come with
// the program.
func RefOf(c release.Chart) Ref {
	return Ref{Name: c.ChartName(), Version: c.Version, Source: c.Source, Digest: c.Digest}
}

// String is "cilium 1.17.4".
func (r Ref) String() string { return r.Name + " " + r.Version }

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// repository is what an oci:// source names.
func repository(source string) (name.Repository, error) {
	s := strings.TrimSuffix(strings.TrimPrefix(source, "oci://"), "/")
	return name.NewRepository(s)
}

// file is the path of a chart's archive at a place that is no registry.
func (r Ref) file(place string) string {
	if strings.HasSuffix(place, ".tgz") {
		return place
	}
	return strings.TrimSuffix(place, "/") + "/" + r.Name + "-" + r.Version + ".tgz"
}

// Chart is a chart that was fetched.
type Chart struct {
	Ref
	Files []File
	// Blobs are what it was fetched as, by digest: the archive, and for one from a registry
	// also the manifest.
	Blobs map[string][]byte
}

// File is one file of a chart.
type File struct {
	Name string // the path in the chart, such as templates/rbac.yaml
	Data []byte
}

// digest is how a digest of b is written.
func digest(b []byte) string {
	h := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(h[:])
}

// unpack returns the files of an archive.
func unpack(b []byte, r Ref) ([]File, error) {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrArchive, fmt.Sprintf(format, args...))
	}
	z, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		return nil, bad("it is not packed as `helm package` does")
	}
	var out []File
	var meta struct {
		Name    string `yaml:"name"`
		Version string `yaml:"version"`
		Type    string `yaml:"type"`
	}
	left := int64(maxUnpacked)
	found := map[string]bool{}
	t := tar.NewReader(z)
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, bad("it ends too early or is damaged")
		}
		if h.Typeflag == tar.TypeDir || h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		_, file, below := strings.Cut(h.Name, "/") // the first part is the chart's folder
		switch {
		case h.Typeflag != tar.TypeReg:
			return nil, bad("%s is no regular file", shorten(h.Name))
		case !below || path.IsAbs(h.Name) || path.Clean(h.Name) != h.Name || strings.HasPrefix(h.Name, "..") || strings.ContainsAny(h.Name, "\\\x00"):
			return nil, bad("%q cannot be the name of a file", shorten(h.Name))
		case found[file]:
			return nil, bad("%s occurs twice", shorten(file))
		case h.Size > left || len(out) == maxFiles:
			return nil, bad("it holds more than %d files or %d MiB", maxFiles, maxUnpacked>>20)
		}
		data, err := io.ReadAll(io.LimitReader(t, left))
		if err != nil || int64(len(data)) != h.Size {
			return nil, bad("it ends too early or is damaged")
		}
		left -= h.Size
		found[file] = true
		out = append(out, File{file, data})
		if file == "Chart.yaml" {
			if err := yaml.Unmarshal(data, &meta); err != nil {
				return nil, bad("its Chart.yaml is no YAML")
			}
		}
	}
	switch {
	case !found["Chart.yaml"]:
		return nil, bad("it has no Chart.yaml")
	case meta.Name != r.Name || meta.Version != r.Version:
		return nil, bad("it is %s %s, and %s is wanted", shorten(meta.Name), shorten(meta.Version), r)
	case meta.Type == "library":
		return nil, bad("it is a library for other charts")
	}
	return out, nil
}

// shorten keeps what a stranger wrote from filling the screen, or driving it.
func shorten(s string) string {
	if r := []rune(s); len(r) > 100 {
		s = string(r[:99]) + "…"
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}
