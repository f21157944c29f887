package build

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/x509"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"sigs.k8s.io/yaml"

	"constellation/engine/component"
)

//go:embed upstream.yaml
var upstreamFile []byte

//go:embed fulcio.pem
var fulcioFile []byte

// upstreams are the sets of archives that upstream.yaml lists.
var upstreams = mustUpstreams(upstreamFile)

// upstreamSet has the archives of one project.
type upstreamSet struct {
	URL       string                     `json:"url"`
	Directory string                     `json:"directory"` // of the programs in the archive
	Programs  []string                   `json:"programs"`
	Signer    signer                     `json:"signer"`   // zero: the project signs nothing that can be verified here
	Versions  map[string]upstreamVersion `json:"versions"` // without "v"
}

// upstreamVersion has the digests of a version's archives; empty if none is known.
type upstreamVersion struct {
	Source string `json:"source"`
	AMD64  string `json:"amd64"`
	ARM64  string `json:"arm64"`
}

// digest is that of the archive for an architecture.
func (v upstreamVersion) digest(arch string) string {
	switch arch {
	case "amd64":
		return v.AMD64
	case "arm64":
		return v.ARM64
	}
	return ""
}

func mustUpstreams(b []byte) map[string]upstreamSet {
	var sets map[string]upstreamSet
	if err := yaml.UnmarshalStrict(b, &sets); err != nil {
		panic(fmt.Sprintf("read embedded upstream.yaml: %v", err)) // a test reads it
	}
	return sets
}

// published is an archive with programs that a project publishes.
type published struct {
	url    string // the official address
	dir    string // of the programs in it
	digest string // "sha256:<64 hex>" or "sha512:<128 hex>"; "": its signer decides
	signer signer
}

// upstream returns the archive of a version of project that has the program, or nil.
func upstream(project, version, program string) *published {
	set := upstreams[project]
	v, ok := set.Versions[version]
	if !ok || !slices.Contains(set.Programs, program) {
		return nil
	}
	fill := strings.NewReplacer("{version}", version, "{arch}", runtime.GOARCH).Replace
	a := &published{url: fill(set.URL), dir: fill(set.Directory), digest: v.digest(runtime.GOARCH), signer: set.Signer}
	if a.digest == "" && a.signer == (signer{}) {
		return nil // nothing vouches for it
	}
	return a
}

// member is the path of a program in the archive.
func (a *published) member(p program) string { return path.Join(a.dir, path.Base(p.name)) }

// file is the name of the archive.
func (a *published) file() string { return path.Base(a.url) }

// host has the archive.
func (a *published) host() string {
	u, err := url.Parse(a.url)
	if err != nil {
		return a.url
	}
	return u.Host
}

// Options say where the parts of a version come from.
type Options struct {
	// FromSource compiles all programs and accepts none that was downloaded.
	FromSource bool
	// Mirror is the http or https URL of a server that has copies of the official files, each
	// below the name of its host: MIRROR/dl.k8s.io/v1.36.3/kubernetes-server-linux-amd64.tar.gz.
	// Empty means the official addresses. A mirror is not trusted: only archives with a pinned
	// digest are taken from it.
	Mirror string
}

// Validate returns what is wrong with o, or nil.
func (o Options) Validate() error {
	if o.Mirror == "" {
		return nil
	}
	u, err := url.Parse(o.Mirror)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return errors.New("mirror: want the http or https URL of a folder, without a query")
	}
	return nil
}

// address is where o fetches the file with an official address.
func (o Options) address(official string) string {
	if o.Mirror == "" {
		return official
	}
	_, rest, _ := strings.Cut(official, "://")
	return strings.TrimSuffix(o.Mirror, "/") + "/" + rest
}

const (
	// reachTime bounds the time until somebody knows whether programs are downloaded or compiled.
	reachTime = 5 * time.Second
	// largestProgram bounds a program in an archive, in bytes. The largest known has 130 MB.
	largestProgram = 1 << 30
)

// errNotPublished means that a server answers and does not have the file.
var errNotPublished = errors.New("not published there")

// download adopts those programs that published archives have, and returns the rest, which must
// be compiled: it says which and why.
func (b *builder) download(ctx context.Context, programs []program) (rest []program, err error) {
	wanted := make(map[published][]program)
	var order []published
	for _, p := range programs {
		if p.upstream == nil || b.options.FromSource {
			rest = append(rest, p)
			continue
		}
		if wanted[*p.upstream] == nil {
			order = append(order, *p.upstream)
		}
		wanted[*p.upstream] = append(wanted[*p.upstream], p)
	}
	if len(order) == 0 {
		return rest, nil
	}
	b.meter.say(StageLoad, "asking "+b.hosts(order)+" for published programs")
	answers := b.reach(ctx, order)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	for i, a := range order {
		if answers[i].err != nil {
			b.meter.notice(fmt.Sprintf("compiling %s from source: %v", names(wanted[a]), answers[i].err))
			rest = append(rest, wanted[a]...)
			continue
		}
		if err := b.take(ctx, a, answers[i].digest, wanted[a]); err != nil {
			return nil, b.failDownload(a, err)
		}
	}
	return rest, nil
}

func (b *builder) hosts(archives []published) string {
	if b.options.Mirror != "" {
		return "the mirror"
	}
	var hosts []string
	for _, a := range archives {
		if !slices.Contains(hosts, a.host()) {
			hosts = append(hosts, a.host())
		}
	}
	return strings.Join(hosts, " and ")
}

func names(programs []program) string {
	if len(programs) > 3 {
		return fmt.Sprintf("%s, %s and %d more", programs[0].name, programs[1].name, len(programs)-2)
	}
	var all []string
	for _, p := range programs {
		all = append(all, p.name)
	}
	return strings.Join(all, ", ")
}

// answer is the knowledge about an archive before it is fetched.
type answer struct {
	digest string // that somebody vouches for
	err    error  // why the archive is not to be had
}

// reach asks for all archives side by side, within reachTime.
func (b *builder) reach(ctx context.Context, archives []published) []answer {
	ctx, cancel := context.WithTimeout(ctx, reachTime)
	defer cancel()
	client := component.NewClient()
	defer client.CloseIdleConnections()
	answers := make([]answer, len(archives))
	var wg sync.WaitGroup
	for i, a := range archives {
		wg.Go(func() {
			if _, err := get(ctx, client, b.options.address(a.url), 1); err != nil {
				answers[i].err = err
				return
			}
			answers[i].digest, answers[i].err = a.vouched(ctx, client, b.options)
		})
	}
	wg.Wait()
	return answers
}

// vouched returns the digest of a that is pinned, or that its signer vouches for.
func (a published) vouched(ctx context.Context, client *http.Client, o Options) (string, error) {
	if a.digest != "" {
		return a.digest, nil
	}
	if o.Mirror != "" {
		// The signature does not say of which version the file is.
		return "", fmt.Errorf("the digest of %s is not part of this program, and a mirror could have another version under its name", a.file())
	}
	parts := make(map[string][]byte)
	for _, suffix := range []string{".sha256", ".sig", ".cert"} {
		b, err := get(ctx, client, o.address(a.url)+suffix, 64<<10)
		if err != nil {
			return "", err
		}
		parts[suffix] = b
	}
	// The file has the digest alone, or the name of the file behind it.
	text, _, _ := strings.Cut(strings.TrimSpace(string(parts[".sha256"])), " ")
	sum, err := hex.DecodeString(text)
	if err != nil || len(sum) != 32 {
		return "", fmt.Errorf("%s.sha256 has no SHA-256 digest", a.file())
	}
	if err := a.signer.verify(trustedRoots, sum, parts[".sig"], parts[".cert"]); err != nil {
		return "", fmt.Errorf("%s is not signed by %s: %w", a.file(), a.signer.Identity, err)
	}
	return "sha256:" + hex.EncodeToString(sum), nil
}

// get reads at most limit bytes of a file; more is an error unless only its existence is asked
// for, with a limit of 1. Errors name the host, not the whole address, which may have a password.
func get(ctx context.Context, client *http.Client, address string, limit int64) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, errors.New("the address is malformed")
	}
	if limit == 1 {
		req.Header.Set("Range", "bytes=0-0")
	}
	file := path.Base(req.URL.Path)
	resp, err := client.Do(req)
	if err != nil {
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err
		}
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("no answer within %v", reachTime)
		}
		return nil, fmt.Errorf("%s cannot be reached: %w", req.URL.Host, err)
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK, http.StatusPartialContent:
	case http.StatusNotFound, http.StatusGone, http.StatusForbidden: // object stores say 403 for a missing file
		return nil, fmt.Errorf("%s on %s: %w", file, req.URL.Host, errNotPublished)
	default:
		return nil, fmt.Errorf("%s on %s: HTTP %d", file, req.URL.Host, resp.StatusCode)
	}
	if limit == 1 {
		return nil, nil
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return nil, fmt.Errorf("read %s from %s: %w", file, req.URL.Host, err)
	}
	if int64(len(body)) > limit {
		return nil, fmt.Errorf("%s on %s has more than %d bytes", file, req.URL.Host, limit)
	}
	return body, nil
}

// downloadDir has unfinished and finished archives below a version's directory.
const downloadDir = "downloads"

// take fetches an archive and adopts programs from it. What arrived of an unfinished archive
// stays for the next call.
func (b *builder) take(ctx context.Context, a published, digest string, programs []program) error {
	dir := filepath.Join(b.dir, downloadDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	b.meter.plan(costDownload)
	var spent int64
	in := &component.Installer{Root: dir, Log: slog.New(slog.DiscardHandler)}
	c := component.Component{Name: "archive", URL: b.options.address(a.url), Digest: digest, Path: "/" + a.file(), Mode: 0o644}
	err := in.Install(ctx, component.List{c}, func(_ component.Component, done, total int64) {
		text := fmt.Sprintf("fetching %s of %s: %d MB", a.file(), b.recipe.version, done>>20)
		if total > 0 {
			text += fmt.Sprintf(" of %d", total>>20)
		}
		var step int64
		if total > 0 {
			step = max(costDownload*done/total-spent, 0)
		}
		spent += step
		b.meter.advance(step, StageLoad, text)
	})
	if err != nil {
		return err
	}
	b.meter.advance(costDownload-spent, StageLoad, "fetched "+a.file())
	stage, remove, err := b.stage()
	if err != nil {
		return err
	}
	defer remove()
	archive := filepath.Join(dir, a.file())
	if err := unpackPrograms(ctx, archive, stage, a, programs); err != nil {
		return err
	}
	for _, p := range programs {
		from := []string{a.url, digest}
		if err := b.adopt(filepath.Join(stage, filepath.FromSlash(p.name)), p.path(), record{Key: p.upstreamKey(), From: from}); err != nil {
			return err
		}
	}
	return os.RemoveAll(dir)
}

// unpackPrograms writes programs from an archive below dir.
func unpackPrograms(ctx context.Context, file, dir string, a published, programs []program) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return fmt.Errorf("read %s: %w", a.file(), err)
	}
	wanted := make(map[string]program)
	for _, p := range programs {
		wanted[a.member(p)] = p
	}
	for r := tar.NewReader(z); len(wanted) > 0; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", a.file(), err)
		}
		p, ok := wanted[path.Clean(h.Name)]
		if !ok {
			continue
		}
		if h.Typeflag != tar.TypeReg || h.Size > largestProgram {
			return fmt.Errorf("%s in %s is not a file of at most %d bytes", h.Name, a.file(), int64(largestProgram))
		}
		if err := writeProgram(filepath.Join(dir, filepath.FromSlash(p.name)), r); err != nil {
			return fmt.Errorf("unpack %s: %w", p.name, err)
		}
		delete(wanted, a.member(p))
	}
	for _, p := range wanted {
		return fmt.Errorf("%s lacks %s", a.file(), a.member(p))
	}
	return nil
}

// failDownload adds the remedy for a failed download.
func (b *builder) failDownload(a published, err error) error {
	again := "constellation sandbox fetch " + b.recipe.version
	op := "fetch " + a.file()
	switch {
	case errors.Is(err, component.ErrDigest):
		return &Error{Op: op, Err: err, Remedy: "the file is not the one that was published: name another --mirror, or compile with `" + again + " --from-source`"}
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, fs.ErrPermission):
		return b.fail(op, err)
	}
	known := b.fail(op, err)
	var e *Error
	if errors.As(known, &e) && strings.Contains(e.Remedy, "free some space") {
		return known
	}
	return &Error{Op: op, Err: err, Remedy: "run `" + again + "` again, which goes on where it stopped, or compile with `" + again + " --from-source`"}
}

// trustedRoots certify signers.
var trustedRoots = mustRoots(fulcioFile)

// roots are certificates to verify signers with.
type roots struct{ roots, intermediates *x509.CertPool }

func mustRoots(b []byte) roots {
	r := roots{roots: x509.NewCertPool(), intermediates: x509.NewCertPool()}
	for _, c := range mustCertificates(b) {
		if bytes.Equal(c.RawIssuer, c.RawSubject) {
			r.roots.AddCert(c)
		} else {
			r.intermediates.AddCert(c)
		}
	}
	return r
}
