// Package provenance states and verifies the origin of the program's binaries.
//
// `make release` writes one statement per binary: an in-toto statement v1 with a SLSA provenance
// v1 predicate. It has the digest of the binary, the commit, the Go version, the build settings
// and all modules with their checksums. It has no time and no folder, so that two builds of one
// commit have equal statements. The statements are in the folder provenance beside the binaries;
// the key of the publisher signs each in a file of its own, NAME.intoto.json.sig.
package provenance

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
)

const (
	// Dir is the folder of the statements, beside the binaries.
	Dir = "provenance"
	// Suffix is that of a statement's file.
	Suffix = ".intoto.json"
	// SignatureSuffix is that of a signature's file.
	SignatureSuffix = ".sig"

	statementType = "https://in-toto.io/Statement/v1"
	predicateType = "https://slsa.dev/provenance/v1"
	buildType     = "https://constellation.example/build/make-release/v1"
)

// maxStatement bounds the file of a statement in bytes; one of the console has about 60 KiB.
const maxStatement = 4 << 20

// maxSignature bounds the file of a signature in bytes; a real one has about 96.
const maxSignature = 1 << 10

// Build describes how a binary was compiled.
type Build struct {
	// Package is the path of the main package.
	Package string `json:"package"`
	// Go is the version of the Go toolchain, Target the operating system and architecture.
	Go     string `json:"go"`
	Target string `json:"target"`
	// Commit is empty if the build recorded none. Modified is true if files of the source tree
	// differed from it.
	Commit     string `json:"commit,omitempty"`
	CommitTime string `json:"commitTime,omitempty"`
	Modified   bool   `json:"modified,omitempty"`
	// Settings are the other build settings.
	Settings map[string]string `json:"settings"`
	Modules  []Module          `json:"modules"`
}

// Module is a module that a binary contains.
type Module struct {
	Path    string `json:"path"`
	Version string `json:"version"`
	// Sum is the checksum of the Go checksum database, with its prefix "h1:"; empty for a module
	// that was replaced by a folder.
	Sum string `json:"sum,omitempty"`
}

// BuildOf converts the build information that Go embeds.
func BuildOf(info *debug.BuildInfo) Build {
	b := Build{Package: info.Path, Go: info.GoVersion, Settings: map[string]string{}, Modules: []Module{}}
	var goos, goarch string
	for _, s := range info.Settings {
		switch s.Key {
		case "GOOS":
			goos = s.Value
		case "GOARCH":
			goarch = s.Value
		case "vcs.revision":
			b.Commit = s.Value
		case "vcs.time":
			b.CommitTime = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		case "vcs":
		default:
			b.Settings[s.Key] = s.Value
		}
	}
	b.Target = goos + "/" + goarch
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		b.Modules = append(b.Modules, Module{Path: m.Path, Version: m.Version, Sum: m.Sum})
	}
	return b
}

// Statement is an in-toto statement v1 with the predicate of SLSA provenance v1.
type Statement struct {
	Type          string     `json:"_type"`
	Subject       []Resource `json:"subject"`
	PredicateType string     `json:"predicateType"`
	Predicate     Predicate  `json:"predicate"`
}

// Resource is a ResourceDescriptor of in-toto.
type Resource struct {
	Name   string            `json:"name,omitempty"`
	URI    string            `json:"uri,omitempty"`
	Digest map[string]string `json:"digest,omitempty"`
}

// Predicate is the provenance.
type Predicate struct {
	BuildDefinition BuildDefinition `json:"buildDefinition"`
	RunDetails      RunDetails      `json:"runDetails"`
}

// BuildDefinition has the inputs of a build.
type BuildDefinition struct {
	BuildType            string             `json:"buildType"`
	ExternalParameters   ExternalParameters `json:"externalParameters"`
	InternalParameters   map[string]string  `json:"internalParameters,omitempty"`
	ResolvedDependencies []Resource         `json:"resolvedDependencies"`
}

// ExternalParameters are what the publisher chose.
type ExternalParameters struct {
	Release string `json:"release"`
	// Package and Target are empty in a statement over all files of a release.
	Package string `json:"package,omitempty"`
	Target  string `json:"target,omitempty"`
}

// RunDetails name the builder.
type RunDetails struct {
	Builder Builder `json:"builder"`
}

// Builder is where a build ran, and with which toolchain.
type Builder struct {
	ID      string            `json:"id"`
	Version map[string]string `json:"version,omitempty"`
}

// Options are what a binary does not contain.
type Options struct {
	// Release is the release that the binary belongs to.
	Release string
	// Builder is the URI of the builder, Source that of the source repository.
	Builder, Source string
}

// New returns the statement of one binary. name is its path in the installed folder, with slashes.
func New(name, digest string, b Build, o Options) Statement {
	s := Release([]Resource{{Name: name, Digest: map[string]string{"sha256": digest}}}, b.Commit, b.Go, o)
	d := &s.Predicate.BuildDefinition
	d.ExternalParameters.Package, d.ExternalParameters.Target = b.Package, b.Target
	d.InternalParameters = maps.Clone(b.Settings)
	if b.Modified {
		d.InternalParameters["vcs.modified"] = "true"
	}
	for _, m := range b.Modules {
		r := Resource{URI: "pkg:golang/" + m.Path + "@" + m.Version}
		if sum, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(m.Sum, "h1:")); err == nil && len(sum) > 0 {
			r.Digest = map[string]string{"goModuleH1": hex.EncodeToString(sum)}
		}
		d.ResolvedDependencies = append(d.ResolvedDependencies, r)
	}
	return s
}

// Release returns the statement over the files of a release.
func Release(files []Resource, commit, goVersion string, o Options) Statement {
	d := BuildDefinition{BuildType: buildType, ExternalParameters: ExternalParameters{Release: o.Release}, ResolvedDependencies: []Resource{}}
	if commit != "" {
		d.ResolvedDependencies = append(d.ResolvedDependencies, Resource{URI: "git+" + o.Source, Digest: map[string]string{"gitCommit": commit}})
	}
	return Statement{
		Type: statementType, PredicateType: predicateType, Subject: files,
		Predicate: Predicate{d, RunDetails{Builder{ID: o.Builder, Version: map[string]string{"go": goVersion}}}},
	}
}

// Encode returns the content of a statement's file.
func (s Statement) Encode() ([]byte, error) {
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode statement: %w", err)
	}
	return append(b, '\n'), nil
}

// Commit returns the commit that the statement names; empty if it names none.
func (s Statement) Commit() string {
	for _, r := range s.Predicate.BuildDefinition.ResolvedDependencies {
		if c := r.Digest["gitCommit"]; c != "" {
			return c
		}
	}
	return ""
}

// Parse reads a statement. It refuses other types and statements without a SHA-256.
func Parse(b []byte) (Statement, error) {
	var s Statement
	if err := json.Unmarshal(b, &s); err != nil {
		return Statement{}, fmt.Errorf("decode statement: %w", err)
	}
	switch {
	case s.Type != statementType:
		return Statement{}, fmt.Errorf("decode statement: its type is %.80q, want %q", s.Type, statementType)
	case s.PredicateType != predicateType:
		return Statement{}, fmt.Errorf("decode statement: its predicate is %.80q, want %q", s.PredicateType, predicateType)
	case len(s.Subject) == 0:
		return Statement{}, errors.New("decode statement: it has no subject")
	}
	if i := slices.IndexFunc(s.Subject, func(r Resource) bool { return len(r.Digest["sha256"]) != 2*sha256.Size || !filepath.IsLocal(r.Name) }); i >= 0 {
		return Statement{}, fmt.Errorf("decode statement: subject %.80q has no SHA-256 or no relative name", s.Subject[i].Name)
	}
	return s, nil
}

// DigestFile returns the SHA-256 of a file in hex.
func DigestFile(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close() // it was only read
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// readBounded reads a file of at most limit bytes.
func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() // it was only read
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("it has more than %d bytes", limit)
	}
	return b, err
}
