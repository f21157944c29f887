package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha1" //nolint:gosec // SPDX 2.3 demands a SHA-1 of each file beside others
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"constellation/engine/provenance"
)

// document is an SPDX 2.3 document. Only what the files themselves contain is in it.
type document struct {
	Version       string         `json:"spdxVersion"`
	License       string         `json:"dataLicense"`
	ID            string         `json:"SPDXID"`
	Name          string         `json:"name"`
	Namespace     string         `json:"documentNamespace"`
	Creation      creation       `json:"creationInfo"`
	Packages      []spdxPackage  `json:"packages"`
	Files         []spdxFile     `json:"files"`
	Relationships []relationship `json:"relationships"`
}

type creation struct {
	Created  string   `json:"created"`
	Creators []string `json:"creators"`
}

type spdxPackage struct {
	Name          string      `json:"name"`
	ID            string      `json:"SPDXID"`
	Version       string      `json:"versionInfo,omitempty"`
	File          string      `json:"packageFileName,omitempty"`
	Download      string      `json:"downloadLocation"`
	FilesAnalyzed bool        `json:"filesAnalyzed"`
	Checksums     []checksum  `json:"checksums,omitempty"`
	Concluded     string      `json:"licenseConcluded"`
	Declared      string      `json:"licenseDeclared"`
	Copyright     string      `json:"copyrightText"`
	References    []reference `json:"externalRefs,omitempty"`
}

type spdxFile struct {
	Name      string     `json:"fileName"`
	ID        string     `json:"SPDXID"`
	Types     []string   `json:"fileTypes"`
	Checksums []checksum `json:"checksums"`
	Concluded string     `json:"licenseConcluded"`
	Copyright string     `json:"copyrightText"`
}

type checksum struct {
	Algorithm string `json:"algorithm"`
	Value     string `json:"checksumValue"`
}

type reference struct {
	Category string `json:"referenceCategory"`
	Type     string `json:"referenceType"`
	Locator  string `json:"referenceLocator"`
}

type relationship struct {
	Element string `json:"spdxElementId"`
	Type    string `json:"relationshipType"`
	Related string `json:"relatedSpdxElement"`
}

const noAssertion = "NOASSERTION"

// sbom writes the SPDX document of an archive: its Go binaries, and their modules.
func sbom(args []string) error {
	f := flag.NewFlagSet("sbom", flag.ContinueOnError)
	archive, out := f.String("archive", "", "`file`.tar.gz"), f.String("out", "", "`file` of the document")
	if err := f.Parse(args); err != nil {
		return err
	}
	d, err := describe(*archive)
	if err != nil {
		return err
	}
	b, err := json.MarshalIndent(d, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(*out, append(b, '\n'), 0o644)
}

func describe(archive string) (*document, error) {
	content, err := os.ReadFile(archive)
	if err != nil {
		return nil, err
	}
	whole := sha256.Sum256(content)
	digest := hex.EncodeToString(whole[:])
	name := filepath.Base(archive)
	d := newDocument(name, digest, time.Time{})
	d.Packages[0].File = name
	z, err := gzip.NewReader(bytes.NewReader(content))
	if err != nil {
		return nil, err
	}
	var newest time.Time
	modules := map[string]bool{}
	for t := tar.NewReader(z); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		b, err := io.ReadAll(t)
		if err != nil {
			return nil, err
		}
		if h.ModTime.After(newest) {
			newest = h.ModTime
		}
		d.add(h.Name, b, modules)
	}
	if len(modules) == 0 {
		return nil, errors.New("no Go binary in " + name)
	}
	// That of the commit: goreleaser gives it to all files.
	d.Creation = creation{newest.UTC().Format(time.RFC3339), []string{"Tool: constellation-attest"}}
	d.sort()
	return d, nil
}

// newDocument describes an archive or an image with a digest, without its files.
func newDocument(name, digest string, created time.Time) *document {
	d := &document{
		Version: "SPDX-2.3", License: "CC0-1.0", ID: "SPDXRef-DOCUMENT", Name: name,
		Namespace: "https://constellation.example/spdx/" + name + "-" + digest,
		Creation:  creation{created.UTC().Format(time.RFC3339), []string{"Tool: constellation-attest"}},
		Packages:  []spdxPackage{{Name: name, ID: "SPDXRef-archive", Download: noAssertion, Checksums: []checksum{{"SHA256", digest}}, Concluded: "Apache-2.0", Declared: "Apache-2.0", Copyright: noAssertion}},
	}
	d.Relationships = []relationship{{d.ID, "DESCRIBES", "SPDXRef-archive"}}
	return d
}

// sort gives the packages an order that does not depend on that of the files.
func (d *document) sort() {
	slices.SortFunc(d.Packages[1:], func(a, b spdxPackage) int { return strings.Compare(a.ID, b.ID) })
}

// add adds a file of the archive, and its modules if it is a Go binary. modules are the IDs of
// those that the document has.
func (d *document) add(name string, b []byte, modules map[string]bool) {
	info, err := buildinfo.Read(bytes.NewReader(b))
	executable := err == nil
	sum, old := sha256.Sum256(b), sha1.Sum(b) //nolint:gosec // see the import
	file := spdxFile{
		Name: "./" + name, ID: identifier("File", name), Types: []string{"TEXT"}, Concluded: noAssertion, Copyright: noAssertion,
		Checksums: []checksum{{"SHA1", hex.EncodeToString(old[:])}, {"SHA256", hex.EncodeToString(sum[:])}},
	}
	if executable {
		file.Types = []string{"BINARY", "APPLICATION"}
	}
	d.Files = append(d.Files, file)
	d.Relationships = append(d.Relationships, relationship{"SPDXRef-archive", "CONTAINS", file.ID})
	if !executable {
		return
	}
	build := provenance.BuildOf(info)
	for _, m := range append(build.Modules, provenance.Module{Path: "stdlib", Version: strings.TrimPrefix(build.Go, "go")}) {
		id := identifier("Module", m.Path+"-"+m.Version)
		d.Relationships = append(d.Relationships, relationship{file.ID, "DEPENDS_ON", id})
		if modules[id] {
			continue
		}
		modules[id] = true
		p := spdxPackage{
			Name: m.Path, ID: id, Version: m.Version, Download: "https://" + m.Path, Concluded: noAssertion, Declared: noAssertion, Copyright: noAssertion,
			References: []reference{{"PACKAGE-MANAGER", "purl", "pkg:golang/" + m.Path + "@" + m.Version}},
		}
		if !strings.Contains(m.Path, ".") {
			p.Download = noAssertion
		}
		if sum, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(m.Sum, "h1:")); err == nil && len(sum) > 0 {
			p.Checksums = []checksum{{"SHA256", hex.EncodeToString(sum)}}
		}
		d.Packages = append(d.Packages, p)
	}
}

// identifier returns a unique SPDX identifier, which has letters, digits, dots and dashes only.
func identifier(kind, name string) string {
	sum := sha256.Sum256([]byte(name))
	clean := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '-' {
			return r
		}
		return '-'
	}, name)
	return "SPDXRef-" + kind + "-" + clean + "-" + hex.EncodeToString(sum[:4])
}
