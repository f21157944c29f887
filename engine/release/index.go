package release

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"constellation/engine/version"
)

// Size limits of a feed's files, in bytes. The largest real files have about 10 kB.
const (
	maxIndex = 1 << 20
	maxFile  = 4 << 20
	// maxSequence keeps numbers exact in JSON readers that use floats.
	maxSequence = 1 << 53
)

// File names of a feed.
const (
	indexName     = "index.json"
	summariesName = "summaries.json"
	signature     = ".sig" // suffix of signature files
)

// index lists every file of a feed. A file is trusted only if an index lists it that a trusted
// key signed.
type index struct {
	Schema string `json:"schema"`
	// Type prevents a signature over another kind of document from being valid for an index.
	Type string `json:"type"`
	// Sequence counts publications; zero in the program, which is not signed.
	Sequence uint64    `json:"sequence"`
	Created  time.Time `json:"created,omitzero"`
	Expires  time.Time `json:"expires,omitzero"`
	// Keys are all key sets, oldest first.
	Keys  []signedKeySet   `json:"keys,omitempty"`
	Files map[string]entry `json:"files"`
}

const indexType = "constellation-release-index"

// entry describes one file in the index.
type entry struct {
	SHA256 string `json:"sha256"` // 64 hex digits
	Length int64  `json:"length"`
}

func entryOf(b []byte) entry { return entry{SHA256: digest(b), Length: int64(len(b))} }

// digest returns the SHA-256 of b as hex digits.
func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// check returns an error if b differs from the file.
func (e entry) check(b []byte) error {
	switch {
	case int64(len(b)) != e.Length:
		return fmt.Errorf("it has %d bytes, want %d as in the index", len(b), e.Length)
	case digest(b) != e.SHA256:
		return fmt.Errorf("its digest differs from the index: it was modified, or belongs to another publication")
	}
	return nil
}

// signedKeySet is a key set as text, to preserve the signed bytes, and its signatures: the
// first by a key of the previous set, the others by its own keys, for clients that trust only
// those.
type signedKeySet struct {
	Set        string   `json:"set"`
	Signatures []string `json:"signatures"`
}

// last returns the newest signature; empty if there is none.
func (s signedKeySet) last() string {
	if len(s.Signatures) == 0 {
		return ""
	}
	return s.Signatures[len(s.Signatures)-1]
}

// signedBy reports whether one of keys signed the set.
func (s signedKeySet) signedBy(keys []Key) bool {
	return slices.ContainsFunc(s.Signatures, func(sig string) bool {
		_, err := verify([]byte(s.Set), []byte(sig), keys)
		return err == nil
	})
}

// keySet lists the keys that may sign a feed from now on.
type keySet struct {
	Schema   string    `json:"schema"`
	Type     string    `json:"type"`
	Sequence uint64    `json:"sequence"`
	Created  time.Time `json:"created"`
	Expires  time.Time `json:"expires"`
	Keys     []setKey  `json:"keys"`

	keys []Key
}

const keySetType = "constellation-release-keys"

type setKey struct {
	Name string `json:"name"`
	PEM  string `json:"pem"`
}

func parseKeySet(b []byte) (*keySet, error) {
	var s keySet
	if err := strictJSON(b, &s); err != nil {
		return nil, fmt.Errorf("read key set: %w", err)
	}
	switch {
	case s.Schema != schema:
		return nil, fmt.Errorf("read key set: its format is %q, want %q", s.Schema, schema)
	case s.Type != keySetType:
		return nil, fmt.Errorf("read key set: its type is %q", s.Type)
	case s.Sequence == 0 || s.Sequence > maxSequence:
		return nil, fmt.Errorf("read key set: sequence %d is out of bounds", s.Sequence)
	case s.Expires.IsZero():
		return nil, errors.New("read key set: expiry is missing")
	}
	var err error
	if s.keys, err = parseSetKeys(s.Keys); err != nil {
		return nil, fmt.Errorf("read key set: %w", err)
	}
	return &s, nil
}

// parseSetKeys returns the keys of a set, which are different.
func parseSetKeys(set []setKey) (out []Key, err error) {
	if len(set) == 0 || len(set) > 32 {
		return nil, fmt.Errorf("it has %d keys", len(set))
	}
	for _, k := range set {
		if k.Name != "" && !nameRE.MatchString(k.Name) {
			return nil, fmt.Errorf("%q is not a name", k.Name)
		}
		keys, err := ParseKeys(k.Name, []byte(k.PEM))
		if err != nil {
			return nil, err
		}
		if len(keys) != 1 || hasKey(out, keys[0].id) {
			return nil, fmt.Errorf("%s is not one key, or occurs twice", keys[0])
		}
		out = append(out, keys[0])
	}
	return out, nil
}

// setKeys is the reverse of parseSetKeys.
func setKeys(keys []Key) (out []setKey) {
	for _, k := range keys {
		out = append(out, setKey{k.Name, string(k.PEM())})
	}
	return out
}

// keySetName is the file of a key set, equal to the copy in the index.
func keySetName(sequence uint64) string { return fmt.Sprintf("keys/%d.json", sequence) }

func parseIndex(b []byte) (*index, error) {
	var i index
	if err := strictJSON(b, &i); err != nil {
		return nil, fmt.Errorf("read index: %w", err)
	}
	switch {
	case i.Schema != schema:
		return nil, fmt.Errorf("read index: its format is %q, want %q; a newer program may support it", i.Schema, schema)
	case i.Type != indexType:
		return nil, fmt.Errorf("read index: its type is %q", i.Type)
	case i.Sequence > maxSequence:
		return nil, fmt.Errorf("read index: sequence %d is out of bounds", i.Sequence)
	case len(i.Keys) > 1000:
		return nil, fmt.Errorf("read index: it has %d key sets", len(i.Keys))
	}
	for _, k := range i.Keys {
		if n := len(k.Signatures); n == 0 || n > 32 {
			return nil, fmt.Errorf("read index: a key set has %d signatures", n)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(i.Files)) {
		e := i.Files[name]
		switch {
		case !validName(name):
			return nil, fmt.Errorf("read index: %q is not a file of a feed", shorten(name))
		case !hexRE.MatchString(e.SHA256):
			return nil, fmt.Errorf("read index: invalid digest of %s: %q", name, shorten(e.SHA256))
		case e.Length <= 0 || e.Length > maxFile:
			return nil, fmt.Errorf("read index: invalid size of %s: %d bytes", name, e.Length)
		}
	}
	if _, ok := i.Files[summariesName]; !ok {
		return nil, fmt.Errorf("read index: it does not name %s", summariesName)
	}
	return &i, nil
}

var (
	hexRE      = regexp.MustCompile(`^[0-9a-f]{64}$`)
	providerRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	majorRE    = regexp.MustCompile(`^v(0|[1-9][0-9]{0,8})$`)
	minorRE    = regexp.MustCompile(`^v(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})$`)
)

// validName reports whether a feed may have a file of that name. Names consist of versions,
// numbers and providers, so none leaves the feed's directory.
func validName(name string) bool {
	if name == summariesName {
		return true
	}
	dir, file, _ := strings.Cut(name, "/")
	stem, isJSON := strings.CutSuffix(file, ".json")
	switch dir {
	case "majors":
		return isJSON && majorRE.MatchString(stem)
	case "minors":
		return isJSON && minorRE.MatchString(stem)
	case "keys":
		n, err := strconv.ParseUint(stem, 10, 53)
		return isJSON && err == nil && n > 0 && stem == strconv.FormatUint(n, 10)
	case "releases":
		if v, ok := strings.CutSuffix(file, ".yaml"); ok {
			return validVersion(v)
		}
		v, rest, _ := strings.Cut(file, "/")
		provider, isMeasurements := strings.CutPrefix(strings.TrimSuffix(rest, ".json"), "measurements/")
		return validVersion(v) && isJSON && (rest == "images.json" || isMeasurements && providerRE.MatchString(provider))
	}
	return false
}

// validVersion reports whether s is a version in the form of file names.
func validVersion(s string) bool {
	v, err := version.Parse(s)
	return err == nil && len(s) <= maxVersion && v.String() == s
}

// maxVersion bounds versions in bytes.
const maxVersion = 128

// Names of files about one release.
func releaseName(v version.Version) string { return "releases/" + v.String() + ".yaml" }
func imagesName(v version.Version) string  { return "releases/" + v.String() + "/images.json" }
func measurementsName(v version.Version, provider string) string {
	return "releases/" + v.String() + "/measurements/" + provider + ".json"
}

// statementName is the file with the statement over a release's components. It is not in the index.
func statementName(v version.Version) string { return "releases/" + v.String() + "/components.json" }

// listStatementName is the file with the statement over one list of components for a release,
// such as that of a mirror, by the list's digest. It is not in the index.
func listStatementName(v version.Version, digest string) string {
	return "releases/" + v.String() + "/components/" + strings.TrimPrefix(digest, "sha256:") + ".json"
}

// listsName is the file that names the lists of a release that have statements of their own.
func listsName(v version.Version) string {
	return "releases/" + v.String() + "/components/lists.json"
}

// signedLists is the content of listsName. It is not signed, but each statement is.
type signedLists struct {
	Schema string   `json:"schema"`
	Lists  []string `json:"lists"` // digests
}

func isStatement(name string) bool {
	v, ok := versionOf(name)
	return ok && (name == statementName(v) || name == listsName(v) || listOf(name, v) != "")
}

// listOf returns the digest of the list of the statement called name; empty if the name is
// not that of a list's statement for release v.
func listOf(name string, v version.Version) string {
	rest, inFolder := strings.CutPrefix(name, "releases/"+v.String()+"/components/")
	hex, isJSON := strings.CutSuffix(rest, ".json")
	if !inFolder || !isJSON || !hexRE.MatchString(hex) {
		return ""
	}
	return "sha256:" + hex
}

// versionOf returns the release of a file; false if it belongs to none.
func versionOf(name string) (version.Version, bool) {
	rest, ok := strings.CutPrefix(name, "releases/")
	if !ok {
		return version.Version{}, false
	}
	first, _, _ := strings.Cut(rest, "/")
	v, err := version.Parse(strings.TrimSuffix(first, ".yaml"))
	return v, err == nil
}

// summaries is summaries.json: the facts that version decisions need.
type summaries struct {
	Schema   string    `json:"schema"`
	Releases []Summary `json:"releases"` // oldest first
	// Notices may apply to releases that are not in the feed.
	Notices []Notice `json:"notices,omitempty"`
}

// Notice declares a release, or a patch of Kubernetes, faulty: upgrades to it are refused.
type Notice struct {
	Release    version.Version `json:"release,omitzero"`    // zero: every release that offers Kubernetes
	Kubernetes version.Version `json:"kubernetes,omitzero"` // zero: the release itself
	Reason     string          `json:"reason"`
}

// String is the subject of a notice, such as "v1.0.0" or "Kubernetes v1.35.4 of v1.1.0".
func (n Notice) String() string {
	switch {
	case n.Kubernetes.IsZero():
		return n.Release.String()
	case n.Release.IsZero():
		return "Kubernetes " + n.Kubernetes.String()
	}
	return "Kubernetes " + n.Kubernetes.String() + " of " + n.Release.String()
}

func (n Notice) check() error {
	switch {
	case n.Release.IsZero() && n.Kubernetes.IsZero():
		return errors.New("a notice names neither a release nor a Kubernetes version")
	case n.Reason == "" || badText(n.Reason):
		return errors.New("a notice needs a reason, one line of text")
	}
	return nil
}

// mark applies n to an unshared summary, and reports whether n matches it.
func (n Notice) mark(s *Summary) (meant bool) {
	if !n.Release.IsZero() && !n.Release.Equal(s.Version) {
		return false
	}
	if n.Kubernetes.IsZero() {
		s.Faulty = n.Reason
		return true
	}
	for i := range s.Kubernetes {
		if n.Kubernetes.Equal(s.Kubernetes[i].Version) {
			s.Kubernetes[i].Faulty, meant = n.Reason, true
		}
	}
	return meant
}

func parseSummaries(b []byte) ([]Summary, []Notice, error) {
	var s summaries
	if err := strictJSON(b, &s); err != nil {
		return nil, nil, fmt.Errorf("read %s: %w", summariesName, err)
	}
	if s.Schema != schema {
		return nil, nil, fmt.Errorf("read %s: its format is %q, want %q", summariesName, s.Schema, schema)
	}
	for i, r := range s.Releases {
		if err := r.check(); err != nil {
			return nil, nil, fmt.Errorf("read %s: releases[%d]: %w", summariesName, i, err)
		}
		if i > 0 && !s.Releases[i-1].Version.Less(r.Version) {
			return nil, nil, fmt.Errorf("read %s: releases[%d]: %s is not newer than the previous one", summariesName, i, r.Version)
		}
	}
	if len(s.Releases) == 0 {
		return nil, nil, fmt.Errorf("read %s: it has no releases", summariesName)
	}
	for i, n := range s.Notices {
		if err := n.check(); err != nil {
			return nil, nil, fmt.Errorf("read %s: notices[%d]: %w", summariesName, i, err)
		}
	}
	return s.Releases, s.Notices, nil
}

// check validates an untrusted summary.
func (s *Summary) check() error {
	if !validVersion(s.Version.String()) {
		return errors.New("it has no version")
	}
	if badText(s.Faulty) {
		return fmt.Errorf("%s: faulty is not one line of text", s.Version)
	}
	if len(s.Kubernetes) == 0 {
		return fmt.Errorf("%s offers no Kubernetes", s.Version)
	}
	for i, k := range s.Kubernetes {
		switch {
		case k.Version.IsZero() || i > 0 && !s.Kubernetes[i-1].Version.Less(k.Version):
			return fmt.Errorf("%s: kubernetes[%d]: version is not newer than the previous one", s.Version, i)
		case !tagRE.MatchString(k.Etcd) || !tagRE.MatchString(k.CoreDNS) || k.Autoscaler != "" && !tagRE.MatchString(k.Autoscaler):
			return fmt.Errorf("%s: Kubernetes %s: etcd, coredns or autoscaler is not a tag", s.Version, k.Version)
		case badText(k.Faulty):
			return fmt.Errorf("%s: Kubernetes %s: faulty is not one line of text", s.Version, k.Version)
		}
	}
	if !slices.ContainsFunc(s.Kubernetes, func(k KubernetesSummary) bool { return k.Version.Equal(s.DefaultKubernetes) }) {
		return fmt.Errorf("%s: defaultKubernetes is not among kubernetes", s.Version)
	}
	if errs := checkServices(s.Services, nil); len(errs) > 0 {
		return fmt.Errorf("%s: %w", s.Version, errors.Join(errs...))
	}
	return checkDownloads(s.CLI)
}

// badText reports whether s cannot be shown as one line.
func badText(s string) bool {
	return len(s) > 1000 || !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !strconv.IsPrint(r) })
}

// Images are the images of a release.
type Images struct {
	Schema  string          `json:"schema"`
	Version version.Version `json:"version"`
	// OS are the images that machines boot, by provider.
	OS []OSImage `json:"os"`
	// Containers run on every cluster of the release.
	Containers []ContainerImage `json:"containers"`
}

// OSImage is the image that the machines of one provider boot.
type OSImage struct {
	Provider string `json:"provider" yaml:"provider"`
	// Reference is the provider's name for it.
	Reference string `json:"reference" yaml:"reference"`
	// Digest is sha256: and 64 hex digits; empty if unknown.
	Digest string `json:"digest,omitempty" yaml:"digest"`
}

// ContainerImage is an image with its tag.
type ContainerImage struct {
	Reference string `json:"reference"`
	// Digest is sha256: and 64 hex digits; empty if unknown.
	Digest string `json:"digest,omitempty"`
}

func parseImages(b []byte, v version.Version) (*Images, error) {
	var i Images
	if err := strictJSON(b, &i); err != nil {
		return nil, fmt.Errorf("read images of %s: %w", v, err)
	}
	if i.Schema != schema || i.Version.String() != v.String() {
		return nil, fmt.Errorf("read images of %s: content is of release %q in format %q", v, i.Version, i.Schema)
	}
	for _, o := range i.OS {
		if err := o.check(); err != nil {
			return nil, fmt.Errorf("read images of %s: %w", v, err)
		}
	}
	for _, c := range i.Containers {
		if !imageRE.MatchString(c.Reference) || c.Digest != "" && !digestRE.MatchString(c.Digest) {
			return nil, fmt.Errorf("read images of %s: invalid image %q or digest %q", v, shorten(c.Reference), shorten(c.Digest))
		}
	}
	return &i, nil
}

func (o OSImage) check() error {
	switch {
	case !providerRE.MatchString(o.Provider):
		return fmt.Errorf("%q is not a provider", shorten(o.Provider))
	case o.Reference == "" || badText(o.Reference):
		return fmt.Errorf("the image of %s has no printable reference", o.Provider)
	case o.Digest != "" && !digestRE.MatchString(o.Digest):
		return fmt.Errorf("invalid digest of the image of %s: %q", o.Provider, shorten(o.Digest))
	}
	return nil
}

// measurements are the expected measurements of one provider's machines with one image.
type measurements struct {
	Schema       string            `json:"schema"`
	Version      version.Version   `json:"version"`
	Provider     string            `json:"provider"`
	Measurements map[uint32]string `json:"measurements"` // PCR index to 64 hex digits
}

func parseMeasurements(b []byte, v version.Version, provider string) (map[uint32]string, error) {
	var m measurements
	if err := strictJSON(b, &m); err != nil {
		return nil, fmt.Errorf("read measurements: %w", err)
	}
	if m.Schema != schema || m.Version.String() != v.String() || m.Provider != provider {
		return nil, fmt.Errorf("read measurements of image %s for %s: content is of image %q for %q in format %q", v, provider, m.Version, shorten(m.Provider), m.Schema)
	}
	for i, s := range m.Measurements {
		if i > 23 || !hexRE.MatchString(s) {
			return nil, fmt.Errorf("read measurements of image %s for %s: invalid PCR %d: %q", v, provider, i, shorten(s))
		}
	}
	if len(m.Measurements) == 0 {
		return nil, fmt.Errorf("read measurements of image %s for %s: none found", v, provider)
	}
	return m.Measurements, nil
}

// list is majors/v1.json, which names minors, or minors/v1.1.json, which names releases.
type list struct {
	Schema   string   `json:"schema"`
	Major    string   `json:"major,omitempty"`
	Minor    string   `json:"minor,omitempty"`
	Minors   []string `json:"minors,omitempty"`
	Releases []string `json:"releases,omitempty"`
}

// lists returns the lists over some releases by file name.
func lists(all []Summary) map[string]list {
	out := map[string]list{}
	for _, s := range all {
		major, minor := fmt.Sprintf("v%d", s.Version.Major()), s.Version.MinorString()
		m := out["majors/"+major+".json"]
		m.Schema, m.Major = schema, major
		if !slices.Contains(m.Minors, minor) {
			m.Minors = append(m.Minors, minor)
		}
		out["majors/"+major+".json"] = m
		n := out["minors/"+minor+".json"]
		n.Schema, n.Minor, n.Releases = schema, minor, append(n.Releases, s.Version.String())
		out["minors/"+minor+".json"] = n
	}
	return out
}

// encodeJSON encodes the publisher's JSON files.
func encodeJSON(v any) ([]byte, error) {
	b, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		return nil, err
	}
	return append(b, '\n'), nil
}

// strictJSON decodes one JSON document. Unknown and duplicate keys, invalid UTF-8, deep
// nesting and trailing data are errors: two readers must not interpret a signed file in
// two ways.
func strictJSON(b []byte, v any) error {
	if !utf8.Valid(b) {
		return errors.New("it is not UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(b))
	if err := noDuplicates(d, 0); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("unexpected data after the document")
	}
	d = json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("%s", shorten(err.Error())) // it quotes untrusted text
	}
	return nil
}

// maxDepth is how deep documents nest; real ones have five levels.
const maxDepth = 16

// noDuplicates reads one value and compares the keys of every object case-insensitively,
// like encoding/json.
func noDuplicates(d *json.Decoder, depth int) error {
	if depth > maxDepth {
		return errors.New("it is nested too deeply")
	}
	t, err := d.Token()
	if err != nil {
		return fmt.Errorf("it is not JSON: %s", shorten(err.Error()))
	}
	delim, ok := t.(json.Delim)
	if !ok {
		return nil
	}
	seen := map[string]bool{}
	for d.More() {
		if delim == '{' {
			t, err := d.Token()
			if err != nil {
				return fmt.Errorf("it is not JSON: %s", shorten(err.Error()))
			}
			key, _ := t.(string) // the decoder accepts nothing else here
			folded := strings.ToLower(strings.ToUpper(key))
			if seen[folded] {
				return fmt.Errorf("the key %q occurs twice", shorten(key))
			}
			seen[folded] = true
		}
		if err := noDuplicates(d, depth+1); err != nil {
			return err
		}
	}
	if _, err := d.Token(); err != nil { // the closing delimiter
		return fmt.Errorf("it is not JSON: %s", shorten(err.Error()))
	}
	return nil
}

// shorten limits untrusted text and escapes control characters.
func shorten(s string) string {
	if r := []rune(s); len(r) > 100 {
		s = string(r[:99]) + "…"
	}
	return strings.Map(func(r rune) rune {
		if strconv.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}

// isList reports whether a file is a list of minors or releases.
func isList(name string) bool {
	dir := path.Dir(name)
	return dir == "majors" || dir == "minors"
}
