// Command attest writes what `make release` attests: a statement of provenance per binary and per
// release, a list of modules per archive (SBOM), container images, the list of
// all parts, and signatures.
//
//	attest statement -binary FILE -name NAME -out FILE [flags]
//	attest release -checksums FILE -out FILE [flags]
//	attest sbom -archive FILE -out FILE
//	attest images -binaries FOLDER -out FOLDER -release VERSION [flags]
//	attest contents -dir FOLDER -out FILE -release VERSION [flags]
//	attest sign -key FILE FILE...
//
// It embeds no time and no folder: equal input gives equal output.
package main

import (
	"bufio"
	"bytes"
	"debug/buildinfo"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"constellation/engine/provenance"
	"constellation/engine/release"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "attest:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	verbs := map[string]func([]string) error{"statement": statement, "release": overRelease, "sbom": sbom, "images": images, "contents": contents, "sign": sign}
	if len(args) == 0 || verbs[args[0]] == nil {
		return errors.New("want a verb: statement, release, sbom, images, contents or sign")
	}
	if err := verbs[args[0]](args[1:]); err != nil {
		return fmt.Errorf("%s: %w", args[0], err)
	}
	return nil
}

// flags returns a flag set with the flags of provenance.Options.
func flags(verb string, o *provenance.Options) *flag.FlagSet {
	f := flag.NewFlagSet(verb, flag.ContinueOnError)
	f.StringVar(&o.Release, "release", "", "`release` that is built")
	f.StringVar(&o.Builder, "builder", "urn:constellation:builder:local", "`URI` of the builder")
	f.StringVar(&o.Source, "source", "https://constellation.example/constellation", "`URI` of the source repository")
	return f
}

func statement(args []string) error {
	var o provenance.Options
	f := flags("statement", &o)
	binary, name, out, key := f.String("binary", "", "`file`"), f.String("name", "", "its path in the installed folder"), f.String("out", "", "`file` of the statement"), f.String("key", "", "private key `file`; none: no signature")
	if err := f.Parse(args); err != nil {
		return err
	}
	info, err := buildinfo.ReadFile(*binary)
	if err != nil {
		return err
	}
	digest, err := provenance.DigestFile(*binary)
	if err != nil {
		return err
	}
	return write(provenance.New(*name, digest, provenance.BuildOf(info), o), *out, *key)
}

func overRelease(args []string) error {
	var o provenance.Options
	f := flags("release", &o)
	checksums, out, key := f.String("checksums", "", "`file` with lines of sha256sum"), f.String("out", "", "`file` of the statement"), f.String("key", "", "private key `file`; none: no signature")
	commit, goVersion := f.String("commit", "", "commit"), f.String("go", "", "version of Go")
	if err := f.Parse(args); err != nil {
		return err
	}
	b, err := os.ReadFile(*checksums)
	if err != nil {
		return err
	}
	var files []provenance.Resource
	for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
		sum, name, ok := strings.Cut(s.Text(), "  ")
		if !ok {
			return fmt.Errorf("read %s: line %q has no digest and name", *checksums, s.Text())
		}
		files = append(files, provenance.Resource{Name: name, Digest: map[string]string{"sha256": sum}})
	}
	slices.SortFunc(files, func(a, b provenance.Resource) int { return strings.Compare(a.Name, b.Name) })
	return write(provenance.Release(files, *commit, *goVersion, o), *out, *key)
}

func write(s provenance.Statement, out, key string) error {
	b, err := s.Encode()
	if err != nil {
		return err
	}
	if _, err := provenance.Parse(b); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(out, b, 0o644); err != nil {
		return err
	}
	if key == "" {
		return nil
	}
	return sign([]string{"-key", key, out})
}

func sign(args []string) error {
	f := flag.NewFlagSet("sign", flag.ContinueOnError)
	key := f.String("key", "", "private key `file`")
	if err := f.Parse(args); err != nil {
		return err
	}
	b, err := os.ReadFile(*key)
	if err != nil {
		return err
	}
	k, err := release.ParsePrivateKey(filepath.Base(*key), b)
	if err != nil {
		return err
	}
	for _, name := range f.Args() {
		content, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		sig, err := k.SignFile(content)
		if err != nil {
			return err
		}
		if err := os.WriteFile(name+provenance.SignatureSuffix, sig, 0o644); err != nil {
			return err
		}
	}
	return nil
}
