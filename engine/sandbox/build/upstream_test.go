package build

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"constellation/engine/component"
	"constellation/internal/testneeds"
)

func TestUpstreamListsAllVersions(t *testing.T) {
	digest := regexp.MustCompile(`^(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})$`)
	for name, set := range upstreams {
		if !strings.HasPrefix(set.URL, "https://") {
			t.Errorf("%s is fetched from %s, want https", name, set.URL)
		}
		for v, data := range set.Versions {
			pinned := data.AMD64 != "" || data.ARM64 != ""
			if pinned != (data.Source != "") {
				t.Errorf("%s %s: digests and their source must be given together", name, v)
			}
			for _, d := range []string{data.AMD64, data.ARM64} {
				if pinned && !digest.MatchString(d) {
					t.Errorf("%s %s: digest %q", name, v, d)
				}
			}
			if !pinned && set.Signer == (signer{}) {
				t.Errorf("%s %s: neither digest nor signer", name, v)
			}
		}
	}
	for _, r := range recipes {
		for _, name := range []string{"kubeadm", "kubelet", "kubectl", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy"} {
			if p, _ := r.program(name); p.upstream == nil {
				t.Errorf("%s of %s is not taken from upstream", name, r.version)
			}
		}
		for _, name := range []string{"coredns", "pause", "agnhost"} {
			if p, _ := r.program(name); p.upstream != nil {
				t.Errorf("%s of %s is taken from %s", name, r.version, p.upstream.url)
			}
		}
	}
}

// The digests stand in the module of a later patch, which its go.sum authenticates.
func TestPinnedDigestsAreThoseOfTheChangelogs(t *testing.T) {
	out, err := exec.Command("go", "env", "GOMODCACHE").Output()
	if err != nil {
		t.Skip("needs the Go toolchain")
	}
	read := 0
	source := regexp.MustCompile(`^(CHANGELOG/\S+) in the module (k8s.io/kubernetes) (\S+)$`)
	for v, data := range upstreams["kubernetes"].Versions {
		if data.Source == "" {
			continue
		}
		m := source.FindStringSubmatch(data.Source)
		if m == nil {
			t.Errorf("%s: source %q names no changelog", v, data.Source)
			continue
		}
		text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(out)), m[2]+"@"+m[3], m[1]))
		if err != nil {
			continue // somebody who has compiled that patch has it
		}
		read++
		for arch, digest := range map[string]string{"amd64": data.AMD64, "arm64": data.ARM64} {
			want := fmt.Sprintf("/v%s/kubernetes-server-linux-%s.tar.gz) | %s\n", v, arch, strings.TrimPrefix(digest, "sha512:"))
			if !strings.Contains(string(text), want) {
				t.Errorf("%s %s: the changelog has another digest", v, arch)
			}
		}
	}
	if read == 0 {
		t.Skip("needs the sources of a later patch (constellation sandbox fetch --from-source)")
	}
}

func TestEmbeddedRootsCertifyEachOther(t *testing.T) {
	for _, c := range mustCertificates(fulcioFile) {
		_, err := c.Verify(x509.VerifyOptions{
			Roots: trustedRoots.roots, Intermediates: trustedRoots.intermediates,
			CurrentTime: c.NotBefore, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
		})
		if err != nil {
			t.Errorf("%s: %v", c.Subject, err)
		}
	}
}

// site is a server with files in the layout of a mirror.
type site struct {
	*httptest.Server
	mu     sync.Mutex
	files  map[string][]byte
	asked  []string // "path Range" of each request
	handle func(w http.ResponseWriter, r *http.Request) (done bool)
}

func newSite(t *testing.T) *site {
	s := &site{files: make(map[string][]byte)}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

func (s *site) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.asked = append(s.asked, r.URL.Path+" "+r.Header.Get("Range"))
	b, ok := s.files[r.URL.Path]
	s.mu.Unlock()
	if s.handle != nil && s.handle(w, r) {
		return
	}
	if !ok {
		http.NotFound(w, r)
		return
	}
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b))
}

// ranges are the Range headers of requests for a path.
func (s *site) ranges(path string) (out []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.asked {
		if p, r, _ := strings.Cut(a, " "); p == path {
			out = append(out, r)
		}
	}
	return out
}

// tgz packs files by their name.
func tgz(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for name, content := range files {
		h := &tar.Header{Name: name, Mode: 0o755, Size: int64(len(content))}
		if to, ok := strings.CutPrefix(content, "-> "); ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeSymlink, to, 0
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := w.Write([]byte(content)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := errors.Join(w.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// testVersion is what the tests publish programs of.
const testVersion = "v1.36.3"

// serverFiles are what a server archive has, small.
func serverFiles() map[string]string {
	files := map[string]string{"kubernetes/server/bin/kube-apiserver.tar": "an image", "kubernetes/LICENSES": "text"}
	for _, name := range upstreams["kubernetes"].Programs {
		files["kubernetes/server/bin/"+name] = strings.Repeat("program "+name+"\n", 20_000)
	}
	return files
}

const (
	testURL     = "https://dl.test/v{version}/server-{arch}.tar.gz"
	testArchive = "/dl.test/v1.36.3/server-" + runtime.GOARCH + ".tar.gz"
)

// publish makes content the published server archive of testVersion, pinned or signed by s.
func publish(t *testing.T, s *site, content []byte, pinned bool, by signer) {
	t.Helper()
	before := upstreams
	t.Cleanup(func() { upstreams = before })
	set := upstreamSet{URL: testURL, Directory: "kubernetes/server/bin", Programs: before["kubernetes"].Programs, Signer: by, Versions: map[string]upstreamVersion{"1.36.3": {}}}
	if !pinned {
		set.URL = s.URL + strings.TrimPrefix(testURL, "https:/")
	} else {
		sum := sha512.Sum512(content)
		d := "sha512:" + hex.EncodeToString(sum[:])
		set.Versions["1.36.3"] = upstreamVersion{AMD64: d, ARM64: d, Source: "a test"}
	}
	upstreams = map[string]upstreamSet{"kubernetes": set}
	s.files[testArchive] = content
}

// result is what a download has done.
type result struct {
	rest    []string // programs to compile
	notices []string
	err     error
	store   *store
}

// download downloads the programs of testVersion into cache.
func download(ctx context.Context, t *testing.T, cache string, o Options) (out result) {
	t.Helper()
	r, err := recipeOf(testVersion)
	if err != nil {
		t.Fatal(err)
	}
	var last Progress
	out.err = locked(ctx, cache, r, func(p Progress) {
		if p.Notice {
			out.notices = append(out.notices, p.Text)
		}
		if p.Current < last.Current || p.Current > p.Total {
			t.Errorf("progress goes from %d to %d of %d", last.Current, p.Current, p.Total)
		}
		last = p
	}, func(b *builder) error {
		b.options = o
		rest, err := b.download(ctx, r.programs())
		for _, p := range rest {
			out.rest = append(out.rest, p.name)
		}
		return err
	})
	if out.store, err = openStore(cache, testVersion); err != nil {
		t.Fatal(err)
	}
	return out
}

// adopted are the programs in the cache with the content that serverFiles has.
func (r result) adopted(t *testing.T) (names []string) {
	t.Helper()
	rec, _ := recipeOf(testVersion)
	for _, p := range rec.programs() {
		if p.upstream == nil || !r.store.has(p.path(), p.upstreamKey()) {
			continue
		}
		b, err := os.ReadFile(r.store.path(p.path()))
		if err != nil || string(b) != serverFiles()[p.upstream.member(p)] {
			t.Errorf("%s has other content: %v", p.name, err)
		}
		if i, err := os.Stat(r.store.path(p.path())); err != nil || i.Mode().Perm() != 0o755 {
			t.Errorf("%s: %v %v", p.name, i.Mode(), err)
		}
		names = append(names, p.name)
	}
	slices.Sort(names)
	return names
}

// leftovers are the files below a version's directory beside finished programs.
func leftovers(t *testing.T, s *store) (out []string) {
	t.Helper()
	err := filepath.WalkDir(s.dir, func(p string, d os.DirEntry, err error) error {
		rel, _ := filepath.Rel(s.dir, p)
		if err == nil && !d.IsDir() && !strings.HasPrefix(rel, "bin/") && rel != "lock" && rel != manifestFile {
			out = append(out, rel)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestProgramsAreTakenFromAMirror(t *testing.T) {
	s := newSite(t)
	publish(t, s, tgz(t, serverFiles()), true, signer{})
	cache := t.TempDir()
	got := download(t.Context(), t, cache, Options{Mirror: s.URL + "/"})
	if got.err != nil {
		t.Fatal(got.err)
	}
	want := slices.Sorted(slices.Values(upstreams["kubernetes"].Programs))
	if names := got.adopted(t); !slices.Equal(names, want) {
		t.Errorf("taken: %q, want %q", names, want)
	}
	if want := []string{"etcd", "etcdutl", "coredns", "pause", "agnhost", "3.6.11/etcd"}; !slices.Equal(got.rest, want) || got.notices != nil {
		t.Errorf("compiled: %q with notices %q, want %q", got.rest, got.notices, want)
	}
	if rest := leftovers(t, got.store); rest != nil {
		t.Errorf("left: %q", rest)
	}
	from := got.store.files["bin/kubelet"].From
	if len(from) != 2 || from[0] != "https://dl.test/v1.36.3/server-"+runtime.GOARCH+".tar.gz" || !strings.HasPrefix(from[1], "sha512:") {
		t.Errorf("the record says the program is from %q", from)
	}
	// A published program counts, unless all must be compiled.
	r, _ := recipeOf(testVersion)
	for fromSource, want := range map[bool]int{false: 6, true: 13} {
		if lacks := got.store.missing(r, fromSource); len(lacks.programs) != want {
			t.Errorf("from source %t: %d programs are missing, want %d", fromSource, len(lacks.programs), want)
		}
	}
}

func TestDownloadsThatFail(t *testing.T) {
	dead := httptest.NewServer(nil)
	dead.Close()
	good := tgz(t, serverFiles())
	without := serverFiles()
	delete(without, "kubernetes/server/bin/kube-proxy")
	link := serverFiles()
	link["kubernetes/server/bin/kubelet"] = "-> /bin/sh"
	altered := bytes.Clone(good)
	altered[len(altered)/2] ^= 1
	for _, tt := range []struct {
		name    string
		content []byte // published
		served  []byte // instead of it
		mirror  string
		status  int
		source  bool
		notice  string // then all is compiled
		err     string
		remedy  string
	}{
		{name: "the server cannot be reached", mirror: dead.URL, notice: "cannot be reached: "},
		{name: "the file is not there", status: 404, notice: "not published there"},
		{name: "the server refuses", status: 500, notice: "HTTP 500"},
		{name: "all is compiled by request", source: true},
		{name: "the file is altered", served: altered, err: "digest mismatch", remedy: "--from-source"},
		{name: "the file is shorter", served: good[:len(good)/2], err: "digest mismatch", remedy: "--from-source"},
		{name: "a program is missing", content: tgz(t, without), err: "lacks kubernetes/server/bin/kube-proxy", remedy: "--from-source"},
		{name: "a program is a link", content: tgz(t, link), err: "is not a file", remedy: "--from-source"},
		{name: "the file is no archive", content: []byte("<html>"), err: "read server-", remedy: "--from-source"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSite(t)
			if tt.content == nil {
				tt.content = good
			}
			publish(t, s, tt.content, true, signer{})
			if tt.served != nil {
				s.files[testArchive] = tt.served
			}
			if tt.status != 0 {
				s.handle = func(w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(tt.status); return true }
			}
			if tt.mirror == "" {
				tt.mirror = s.URL
			}
			got := download(t.Context(), t, t.TempDir(), Options{Mirror: tt.mirror, FromSource: tt.source})
			if tt.err == "" {
				if got.err != nil || len(got.rest) != 13 {
					t.Errorf("compiled: %q, error %v", got.rest, got.err)
				}
				if text := strings.Join(got.notices, "\n"); (text == "") != (tt.notice == "") || !strings.Contains(text, tt.notice) {
					t.Errorf("notice %q, want %q", text, tt.notice)
				}
				return
			}
			var known *Error
			if !errors.As(got.err, &known) || !strings.Contains(known.Error(), tt.err) || !strings.Contains(known.Remedy, tt.remedy) {
				t.Errorf("error %v (%+v), want %q with the remedy %q", got.err, known, tt.err, tt.remedy)
			}
			if names := got.adopted(t); names != nil {
				t.Errorf("taken: %q", names)
			}
		})
	}
}

func TestSilentServerIsGivenUpWithinSeconds(t *testing.T) {
	testneeds.Time(t, "5 s: it waits for a server that is silent")
	s := newSite(t)
	publish(t, s, tgz(t, serverFiles()), true, signer{})
	s.handle = func(_ http.ResponseWriter, r *http.Request) bool { <-r.Context().Done(); return true }
	got := download(t.Context(), t, t.TempDir(), Options{Mirror: s.URL})
	if got.err != nil || len(got.notices) != 1 || !strings.Contains(got.notices[0], "no answer within 5s") {
		t.Errorf("notices %q, error %v", got.notices, got.err)
	}
}

func TestCutDownloadGoesOn(t *testing.T) {
	s := newSite(t)
	content := tgz(t, serverFiles())
	publish(t, s, content, true, signer{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	half := len(content) / 2
	var cut atomic.Bool
	s.handle = func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Range") != "" || cut.Swap(true) {
			return false
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(content)))
		_, _ = w.Write(content[:half])
		w.(http.Flusher).Flush()
		for !arrived(t, cache(t), half) { // until the bytes are on disk
			if r.Context().Err() != nil {
				return true
			}
		}
		cancel()
		<-r.Context().Done()
		return true
	}
	dir := cache(t)
	first := download(ctx, t, dir, Options{Mirror: s.URL})
	if !errors.Is(first.err, context.Canceled) {
		t.Fatalf("the first download ended with %v", first.err)
	}
	second := download(t.Context(), t, dir, Options{Mirror: s.URL})
	if second.err != nil || len(second.adopted(t)) != 7 {
		t.Fatalf("the second download ended with %v", second.err)
	}
	if r := s.ranges(testArchive); r[len(r)-1] != fmt.Sprintf("bytes=%d-", half) {
		t.Errorf("the second download asked for %q, want the rest from %d", r[len(r)-1], half)
	}
	if rest := leftovers(t, second.store); rest != nil {
		t.Errorf("left: %q", rest)
	}
}

// cache is one directory per test.
func cache(t *testing.T) string {
	dir, _ := caches.LoadOrStore(t.Name(), "")
	if dir == "" {
		dir = t.TempDir()
		caches.Store(t.Name(), dir)
	}
	return dir.(string)
}

var caches sync.Map

// arrived reports whether an unfinished download has n bytes.
func arrived(t *testing.T, cache string, n int) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(versionDir(cache, testVersion), downloadDir, ".*.partial"))
	if err != nil || len(files) != 1 {
		return false
	}
	i, err := os.Stat(files[0])
	return err == nil && i.Size() >= int64(n)
}

func TestRedirectsAndProxiesAreFollowed(t *testing.T) {
	t.Run("redirect", func(t *testing.T) {
		store, front := newSite(t), newSite(t)
		publish(t, store, tgz(t, serverFiles()), true, signer{})
		front.handle = func(w http.ResponseWriter, r *http.Request) bool {
			http.Redirect(w, r, store.URL+r.URL.Path, http.StatusFound)
			return true
		}
		if got := download(t.Context(), t, t.TempDir(), Options{Mirror: front.URL}); got.err != nil || len(got.adopted(t)) != 7 {
			t.Errorf("error %v", got.err)
		}
	})
	t.Run("proxy", func(t *testing.T) {
		s := newSite(t) // answers for every host
		if os.Getenv("CONSTELLATION_TEST_PROXIED") == "" {
			// Go reads the variables of proxies once per process.
			cmd := exec.Command(os.Args[0], "-test.run", "^TestRedirectsAndProxiesAreFollowed$/^proxy$")
			cmd.Env = append(os.Environ(), "CONSTELLATION_TEST_PROXIED="+s.URL, "HTTP_PROXY="+s.URL, "http_proxy="+s.URL, "NO_PROXY=", "no_proxy=")
			content := tgz(t, serverFiles())
			s.files[testArchive], s.files["/archive"] = content, content
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
			if len(s.ranges(testArchive)) == 0 {
				t.Errorf("the proxy was asked for %q", s.asked)
			}
			return
		}
		resp, err := http.Get(os.Getenv("CONSTELLATION_TEST_PROXIED") + "/archive")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var content bytes.Buffer
		if _, err := content.ReadFrom(resp.Body); err != nil {
			t.Fatal(err)
		}
		publish(t, s, content.Bytes(), true, signer{})
		if got := download(t.Context(), t, t.TempDir(), Options{Mirror: "http://mirror.test"}); got.err != nil || len(got.adopted(t)) != 7 {
			t.Errorf("error %v, notices %q", got.err, got.notices)
		}
	})
}

func TestMirrorsAreChecked(t *testing.T) {
	for _, tt := range []struct {
		name, mirror string
		ok           bool
	}{
		{name: "none", ok: true},
		{name: "a server", mirror: "http://10.0.0.1:8080", ok: true},
		{name: "a folder of a server", mirror: "https://mirror.example/k8s/", ok: true},
		{name: "no scheme", mirror: "mirror.example"},
		{name: "a file", mirror: "file:///srv/mirror"},
		{name: "a query", mirror: "https://mirror.example/?token=x"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Kubernetes(t.Context(), t.TempDir(), "v0.0.0", Options{Mirror: tt.mirror}, nil)
			var known *Error
			if !errors.As(err, &known) || errors.Is(known.Err, errUnknown) != tt.ok {
				t.Errorf("error %v", err)
			}
			if err != nil && strings.Contains(err.Error(), "token=x") {
				t.Errorf("the error has the query: %v", err)
			}
		})
	}
}

// authority certifies signers, as Fulcio does.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "an authority for tests"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-48 * time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	if c, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	return authority{c, key}
}

func (a authority) roots() roots {
	r := roots{roots: x509.NewCertPool(), intermediates: x509.NewCertPool()}
	r.roots.AddCert(a.cert)
	return r
}

// sign signs content as s with a certificate that has ended, as Fulcio's have when somebody
// downloads a release.
func (a authority) sign(t *testing.T, s signer, usage x509.ExtKeyUsage, content []byte) (sig, cert []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	issuer, err := asn1.Marshal(s.Issuer)
	if err != nil {
		t.Fatal(err)
	}
	issuer[0] = asn1.TagUTF8String
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), EmailAddresses: []string{s.Identity}, ExtKeyUsage: []x509.ExtKeyUsage{usage},
		NotBefore: time.Now().Add(-24 * time.Hour), NotAfter: time.Now().Add(-24*time.Hour + 10*time.Minute),
		ExtraExtensions: []pkix.Extension{{Id: issuerV2, Value: issuer}},
	}, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(content)
	raw, err := ecdsa.SignASN1(rand.Reader, key, sum[:])
	if err != nil {
		t.Fatal(err)
	}
	cert = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return []byte(base64.StdEncoding.EncodeToString(raw)), []byte(base64.StdEncoding.EncodeToString(cert))
}

func TestUnpinnedArchivesNeedTheirSigner(t *testing.T) {
	good := signer{Identity: "releases@project.test", Issuer: "https://accounts.test"}
	content := tgz(t, serverFiles())
	ours, theirs := newAuthority(t), newAuthority(t)
	before := trustedRoots
	trustedRoots = ours.roots()
	t.Cleanup(func() { trustedRoots = before })
	for _, tt := range []struct {
		name    string
		by      signer
		from    authority
		usage   x509.ExtKeyUsage
		signed  []byte // nil: content
		without string // suffix of a file that is missing
		plain   bool   // the certificate is PEM, not base64 of it
		mirror  string
		notice  string // "": accepted
	}{
		{name: "signed by the project", by: good, from: ours},
		{name: "with a certificate in PEM", by: good, from: ours, plain: true},
		{name: "signed by somebody else", by: signer{Identity: "mallory@project.test", Issuer: good.Issuer}, from: ours, notice: "mallory@project.test"},
		{name: "an identity of another issuer", by: signer{Identity: good.Identity, Issuer: "https://issuer.test"}, from: ours, notice: "https://issuer.test"},
		{name: "a certificate of another authority", by: good, from: theirs, notice: "verify the certificate"},
		{name: "a certificate for servers", by: good, from: ours, usage: x509.ExtKeyUsageServerAuth, notice: "verify the certificate"},
		{name: "a signature of another file", by: good, from: ours, signed: []byte("another file"), notice: "the signature is wrong"},
		{name: "no signature", by: good, from: ours, without: ".sig", notice: ".sig on 127.0.0.1"},
		{name: "no certificate", by: good, from: ours, without: ".cert", notice: ".cert on 127.0.0.1"},
		{name: "from a mirror", by: good, from: ours, mirror: "{site}", notice: "a mirror could have another version"},
		{name: "no checksum", by: good, from: ours, without: ".sha256", notice: ".sha256 on 127.0.0.1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSite(t)
			publish(t, s, content, false, good)
			if tt.mirror != "" {
				tt.mirror = s.URL
				host := strings.TrimPrefix(s.URL, "http:/")
				s.files[host+testArchive] = content
			}
			if tt.usage == 0 {
				tt.usage = x509.ExtKeyUsageCodeSigning
			}
			if tt.signed == nil {
				tt.signed = content
			}
			sig, cert := tt.from.sign(t, tt.by, tt.usage, tt.signed)
			if tt.plain {
				cert, _ = base64.StdEncoding.DecodeString(string(cert))
			}
			sum := sha256.Sum256(content)
			for suffix, b := range map[string][]byte{".sig": sig, ".cert": cert, ".sha256": []byte(hex.EncodeToString(sum[:]) + "  " + path.Base(testArchive) + "\n")} {
				if suffix != tt.without {
					s.files[testArchive+suffix] = b
				}
			}
			got := download(t.Context(), t, t.TempDir(), Options{Mirror: tt.mirror})
			if got.err != nil {
				t.Fatal(got.err)
			}
			if want := map[bool]int{true: 7, false: 0}[tt.notice == ""]; len(got.adopted(t)) != want {
				t.Errorf("taken: %q", got.adopted(t))
			}
			if text := strings.Join(got.notices, "\n"); (text == "") != (tt.notice == "") || !strings.Contains(text, tt.notice) {
				t.Errorf("notice %q, want %q", text, tt.notice)
			}
		})
	}
	t.Run("the archive is not the one that was signed", func(t *testing.T) {
		s := newSite(t)
		publish(t, s, content, false, good)
		sig, cert := ours.sign(t, good, x509.ExtKeyUsageCodeSigning, content)
		sum := sha256.Sum256(content)
		s.files[testArchive+".sig"], s.files[testArchive+".cert"], s.files[testArchive+".sha256"] = sig, cert, []byte(hex.EncodeToString(sum[:]))
		s.files[testArchive] = tgz(t, map[string]string{"kubernetes/server/bin/kubelet": "another"})
		if got := download(t.Context(), t, t.TempDir(), Options{}); !errors.Is(got.err, component.ErrDigest) || got.adopted(t) != nil {
			t.Errorf("error %v", got.err)
		}
	})
}

// Kubernetes' own bytes in upstream's layout, taken from a local server as a user would.
func TestVersionFromMirrorIsWhole(t *testing.T) {
	have := cached(t, testVersion)
	testneeds.Time(t, "20 s: it packs and unpacks all of Kubernetes")
	s := newSite(t)
	file := filepath.Join(t.TempDir(), "server.tar.gz")
	sum := packServer(t, file, have)
	before := upstreams
	t.Cleanup(func() { upstreams = before })
	upstreams = map[string]upstreamSet{"kubernetes": {
		URL: testURL, Directory: "kubernetes/server/bin", Programs: before["kubernetes"].Programs,
		Versions: map[string]upstreamVersion{"1.36.3": {Source: "a test", AMD64: sum, ARM64: sum}},
	}}
	s.handle = func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path == testArchive {
			http.ServeFile(w, r, file)
		}
		return r.URL.Path == testArchive
	}
	// Programs without an archive are copied, because a test does not compile them.
	dir := t.TempDir()
	r, _ := recipeOf(testVersion)
	from, err := openStore(filepath.Join(have.Dir, "..", ".."), testVersion)
	if err != nil {
		t.Fatal(err)
	}
	to, err := openStore(dir, testVersion)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{toolsPath}
	for _, p := range r.programs() {
		if p.upstream == nil {
			names = append(names, p.path())
		}
	}
	for _, name := range names {
		temp := filepath.Join(dir, "copy")
		if err := copyProgram(from.path(name), temp); err != nil {
			t.Fatal(err)
		}
		if err := to.adopt(temp, name, from.files[name]); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Kubernetes(t.Context(), dir, testVersion, Options{Mirror: s.URL}, func(p Progress) {
		if p.Notice || p.Stage == StageCompile {
			t.Errorf("notice or compilation: %s", p.Text)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Images) != len(have.Images) {
		t.Errorf("%d images, want %d", len(got.Images), len(have.Images))
	}
	for i := range got.Images {
		if got.Images[i].Digest != have.Images[i].Digest {
			t.Errorf("image %s differs from the one of the same bytes", got.Images[i].Ref)
		}
	}
	out, err := exec.Command(got.Binaries["kubeadm"], "version", "-o", "short").Output()
	if err != nil || strings.TrimSpace(string(out)) != testVersion {
		t.Errorf("kubeadm says %q, %v", out, err)
	}
}

// packServer writes the programs of a in upstream's layout, and returns their archive's digest.
func packServer(t *testing.T, file string, a *Artifacts) string {
	t.Helper()
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewWriterLevel(f, gzip.HuffmanOnly)
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(z)
	for _, name := range upstreams["kubernetes"].Programs {
		b, err := os.ReadFile(a.Binaries[name])
		if err != nil {
			t.Fatal(err)
		}
		if err := w.WriteHeader(&tar.Header{Name: "kubernetes/server/bin/" + name, Mode: 0o755, Size: int64(len(b))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	digest, _, err := digestFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return digest
}
