// Package chart fetches third-party Helm charts by digest.
//
// A chart is an archive as `helm package` creates it. It is in a directory, at an https
// address or in an OCI registry. Its digest pins the content:
//
//	file:charts/cilium-1.17.4.tgz      the archive's SHA-256
//	file:charts                        the same, of charts/<name>-<version>.tgz
//	https://host/charts                the same; `digest` in the index.yaml of a repository
//	oci://host/path/cilium             the manifest's, as `helm push` and `helm pull` print it
//
// Only the digest is trusted: no tag, no repository index and no server certificate decides
// what is installed, so any copy with the digest is valid. Fetched files are cached by
// digest, and a bundle for air-gapped use holds the same files. Every wait and every size has
// a limit. Credentials are those that `docker login` and `helm registry login` stored; errors
// never contain them.
//
// The package does not interpret charts. Package engine/kube installs them.
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
	"constellation/internal/tarcheck"
)

// Errors of Fetch wrap one of these causes.
var (
	ErrAbsent      = errors.New("chart not found")
	ErrDigest      = errors.New("digest mismatch")
	ErrUnreachable = errors.New("source unreachable")
	ErrDenied      = errors.New("access denied")
	ErrArchive     = errors.New("invalid chart archive")
)

// Limits for untrusted input, in bytes and in number of files.
const (
	maxArchive  = 32 << 20
	maxManifest = 1 << 20
	maxUnpacked = 64 << 20
	maxFiles    = 10000
)

// Ref identifies a chart.
type Ref struct {
	// Name and Version are those in its Chart.yaml.
	Name, Version string
	// Source is its location, Digest is sha256: and 64 hex digits; see the package comment.
	Source, Digest string
}

// RefOf returns the reference of a third-party chart of a release or a configuration.
func RefOf(c release.Chart) Ref {
	return Ref{Name: c.ChartName(), Version: c.Version, Source: c.Source, Digest: c.Digest}
}

// String is "cilium 1.17.4".
func (r Ref) String() string { return r.Name + " " + r.Version }

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// repository parses an oci:// source.
func repository(source string) (name.Repository, error) {
	s := strings.TrimSuffix(strings.TrimPrefix(source, "oci://"), "/")
	return name.NewRepository(s)
}

// file returns the path of a chart's archive in a directory or at an address; location may
// also be the archive itself.
func (r Ref) file(location string) string {
	if strings.HasSuffix(location, ".tgz") {
		return location
	}
	return strings.TrimSuffix(location, "/") + "/" + r.Name + "-" + r.Version + ".tgz"
}

// Chart is a fetched chart.
type Chart struct {
	Ref
	Files []File
	// Blobs are the fetched files by digest: the archive, and for a registry also the
	// manifest.
	Blobs map[string][]byte
}

// File is one file of a chart.
type File struct {
	Name string // the path in the chart, such as templates/rbac.yaml
	Data []byte
}

// digest formats the SHA-256 of b.
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
		return nil, bad("not a gzipped tar file as `helm package` creates it")
	}
	var out []File
	var meta struct {
		Name    string `yaml:"name"`
		Version string `yaml:"version"`
		Type    string `yaml:"type"`
	}
	left := int64(maxUnpacked)
	found := map[string]bool{}
	names := tarcheck.Names{}
	// Headers that the tar reader skips by itself are bounded, too.
	bounded := &io.LimitedReader{R: z, N: maxUnpacked + maxFiles*1536 + (1 << 20)}
	t := tar.NewReader(bounded)
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			if err := tarcheck.End(bounded); err != nil {
				return nil, bad("%v", err)
			}
			if bounded.N == 0 {
				return nil, bad("more than %d files or %d MiB", maxFiles, maxUnpacked>>20)
			}
			break
		}
		if err != nil {
			return nil, bad("truncated or damaged")
		}
		if h.Typeflag == tar.TypeDir || h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		_, file, below := strings.Cut(h.Name, "/") // the first part is the chart's folder
		if err := checkEntry(h, below); err != nil {
			return nil, bad("%v", err)
		}
		switch err := names.Entry(h, file); {
		case err != nil:
			return nil, bad("%s %s", shorten(file), shorten(err.Error()))
		case found[file]:
			return nil, bad("%s occurs twice", shorten(file))
		case h.Size > left || len(out) == maxFiles:
			return nil, bad("more than %d files or %d MiB", maxFiles, maxUnpacked>>20)
		}
		data, err := io.ReadAll(io.LimitReader(t, left))
		if err != nil || int64(len(data)) != h.Size {
			return nil, bad("truncated or damaged")
		}
		left -= h.Size
		found[file] = true
		out = append(out, File{file, data})
		if file == "Chart.yaml" {
			if err := yaml.Unmarshal(data, &meta); err != nil {
				return nil, bad("Chart.yaml is not valid YAML")
			}
		}
	}
	switch {
	case !found["Chart.yaml"]:
		return nil, bad("Chart.yaml is missing")
	case meta.Name != r.Name || meta.Version != r.Version:
		return nil, bad("chart is %s %s, want %s", shorten(meta.Name), shorten(meta.Version), r)
	case meta.Type == "library":
		return nil, bad("it is a library chart")
	}
	return out, nil
}

// checkEntry returns an error unless h is a regular file below the chart's folder.
func checkEntry(h *tar.Header, below bool) error {
	switch {
	case h.Typeflag != tar.TypeReg:
		return fmt.Errorf("%s is not a regular file", shorten(h.Name))
	case !below || path.IsAbs(h.Name) || path.Clean(h.Name) != h.Name || strings.HasPrefix(h.Name, "..") || strings.ContainsAny(h.Name, "\\\x00"):
		return fmt.Errorf("invalid file name %q", shorten(h.Name))
	}
	return nil
}

// shorten truncates untrusted text and replaces control characters.
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
