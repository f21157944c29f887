package chart

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	"helm.sh/helm/v3/pkg/action"
	helmregistry "helm.sh/helm/v3/pkg/registry"
)

// packaged returns the archive of a small chart, created by helm's packager.
func packaged(t *testing.T, name, version string) []byte {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	for file, content := range map[string]string{
		"Chart.yaml":            "apiVersion: v2\nname: " + name + "\nversion: " + version + "\n",
		"values.yaml":           "text: hello\n",
		"templates/config.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ .Release.Name }}}\ndata: {text: {{ .Values.text }}}\n",
		"crds/thing.yaml":       "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata: {name: things.example.com}\n",
	} {
		path := filepath.Join(dir, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	p := action.NewPackage()
	p.Destination = t.TempDir()
	out, err := p.Run(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// file is a file of a chart as its name and content.
func names(c *Chart) (out []string) {
	for _, f := range c.Files {
		out = append(out, f.Name)
	}
	slices.Sort(out)
	return out
}

var wanted = []string{"Chart.yaml", "crds/thing.yaml", "templates/config.yaml", "values.yaml"}

// site serves charts over HTTP and as a registry, which requires a password if one is set.
type site struct {
	*httptest.Server
	archive  []byte
	manifest string // the digest that helm push printed
	password string
	requests []string
	cut      int // this many bytes of the archive are sent, then the connection breaks, once
}

func serve(t *testing.T, encrypted bool) *site {
	t.Helper()
	s := &site{archive: packaged(t, "cilium", "1.17.4")}
	reg := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/v2/") {
			if _, given, _ := r.BasicAuth(); given != s.password {
				w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
				http.Error(w, `{"errors":[{"code":"UNAUTHORIZED","message":"`+given+`"}]}`, http.StatusUnauthorized)
				return
			}
			reg.ServeHTTP(w, r)
			return
		}
		s.requests = append(s.requests, r.URL.Path+" "+r.Header.Get("Range"))
		switch r.URL.Path {
		case "/charts/cilium-1.17.4.tgz", "/stored":
			if s.cut > 0 {
				n := s.cut
				s.cut = 0
				w.Header().Set("Content-Length", fmt.Sprint(len(s.archive)))
				_, _ = w.Write(s.archive[:n])
				_ = http.NewResponseController(w).Flush()
				panic(http.ErrAbortHandler)
			}
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(s.archive))
		case "/moved/cilium-1.17.4.tgz":
			http.Redirect(w, r, "/stored?signature=S3CR3T", http.StatusFound)
		case "/gone/cilium-1.17.4.tgz":
			http.Redirect(w, r, "/nowhere?signature=S3CR3T", http.StatusFound)
		case "/private/cilium-1.17.4.tgz":
			http.Error(w, "", http.StatusForbidden)
		case "/busy/cilium-1.17.4.tgz":
			http.Error(w, "", http.StatusServiceUnavailable)
		case "/huge/cilium-1.17.4.tgz":
			_, _ = io.CopyN(w, zeros{}, maxArchive+10)
		default:
			http.NotFound(w, r)
		}
	})
	if encrypted {
		s.Server = httptest.NewTLSServer(h)
	} else {
		s.Server = httptest.NewServer(h)
	}
	t.Cleanup(s.Close)
	s.push(t, s.archive, "charts/cilium:1.17.4")
	return s
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

func (s *site) host() string { return s.Listener.Addr().String() }

// push uploads a chart as `helm push` does.
func (s *site) push(t *testing.T, archive []byte, ref string) {
	t.Helper()
	o := []helmregistry.ClientOption{helmregistry.ClientOptHTTPClient(s.Client()), helmregistry.ClientOptWriter(io.Discard), helmregistry.ClientOptCredentialsFile(filepath.Join(t.TempDir(), "none.json"))}
	if s.TLS == nil {
		o = append(o, helmregistry.ClientOptPlainHTTP())
	}
	c, err := helmregistry.NewClient(o...)
	if err != nil {
		t.Fatal(err)
	}
	res, err := c.Push(archive, s.host()+"/"+ref)
	if err != nil {
		t.Fatal(err)
	}
	s.manifest = res.Manifest.Digest
}

func TestFetchFromEverySource(t *testing.T) {
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	for _, encrypted := range []bool{true, false} {
		s := serve(t, encrypted)
		scheme := map[bool]string{true: "https", false: "http"}[encrypted]
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "cilium-1.17.4.tgz"), s.archive, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, tt := range []struct{ name, source, digest string }{
			{name: "a directory", source: "file:" + dir, digest: digest(s.archive)},
			{name: "a relative directory", source: "file:.", digest: digest(s.archive)},
			{name: "a file", source: "file:" + dir + "/cilium-1.17.4.tgz", digest: digest(s.archive)},
			{name: "a server", source: scheme + "://" + s.host() + "/charts", digest: digest(s.archive)},
			{name: "a file of a server", source: scheme + "://" + s.host() + "/charts/cilium-1.17.4.tgz", digest: digest(s.archive)},
			{name: "a server that redirects", source: scheme + "://" + s.host() + "/moved", digest: digest(s.archive)},
			{name: "a registry", source: "oci://" + s.host() + "/charts/cilium", digest: s.manifest},
		} {
			t.Run(fmt.Sprintf("%s, encrypted %t", tt.name, encrypted), func(t *testing.T) {
				cache := t.TempDir()
				st := &Store{Cache: cache, Base: dir, Transport: s.Client().Transport}
				r := Ref{"cilium", "1.17.4", tt.source, tt.digest}
				c, err := st.Fetch(t.Context(), r)
				if err != nil || !slices.Equal(names(c), wanted) {
					t.Fatalf("%v: %v", c, err)
				}
				// A cached chart needs no source.
				r.Source = strings.Replace(tt.source, s.host(), "127.0.0.1:1", 1)
				st = &Store{Cache: cache, Base: t.TempDir()}
				if again, err := st.Fetch(t.Context(), r); !strings.HasPrefix(tt.source, "file:/") && (err != nil || !slices.Equal(names(again), wanted)) {
					t.Errorf("from the cache: %v", err)
				}
				// The bundle has precedence over the cache.
				st = &Store{Bundle: func(d string) ([]byte, error) {
					if b, ok := c.Blobs[d]; ok {
						return b, nil
					}
					return nil, ErrAbsent
				}}
				if again, err := st.Fetch(t.Context(), r); err != nil || !slices.Equal(names(again), wanted) {
					t.Errorf("from a bundle: %v", err)
				}
				// A damaged cache entry is fetched again.
				for d := range c.Blobs {
					if err := os.WriteFile((&Store{Cache: cache}).path(d), []byte("x"), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				r.Source = tt.source
				if again, err := (&Store{Cache: cache, Base: dir, Transport: s.Client().Transport}).Fetch(t.Context(), r); err != nil || !slices.Equal(names(again), wanted) {
					t.Errorf("with a damaged cache: %v", err)
				}
			})
		}
	}
}

func TestInvalidChartsAreRejected(t *testing.T) {
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	s := serve(t, true)
	base, right := "https://"+s.host(), digest(s.archive)
	other := "sha256:" + strings.Repeat("0", 64)
	dir := t.TempDir()
	write := func(name string, b []byte) (file, dgst string) {
		file = filepath.Join(dir, name)
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return "file:" + file, digest(b)
	}
	half, halfDigest := write("half.tgz", s.archive[:len(s.archive)/2])
	text, textDigest := write("text.tgz", []byte("hello"))
	out, outDigest := write("out.tgz", tarred(tar.Header{Name: "cilium/../../etc/passwd", Typeflag: tar.TypeReg}))
	link, linkDigest := write("link.tgz", tarred(tar.Header{Name: "cilium/values.yaml", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"}))
	bomb, bombDigest := write("bomb.tgz", tarred(tar.Header{Name: "cilium/values.yaml", Typeflag: tar.TypeReg, Size: maxUnpacked + 1}))
	twins, twinsDigest := write("twins.tgz", tarred(tar.Header{Name: "cilium/values.yaml", Typeflag: tar.TypeReg}, tar.Header{Name: "cilium/Values.yaml", Typeflag: tar.TypeReg}))
	device, deviceDigest := write("device.tgz", tarred(tar.Header{Name: "cilium/null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}))
	hard, hardDigest := write("hard.tgz", tarred(tar.Header{Name: "cilium/values.yaml", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"}))
	two, twoDigest := write("two.tgz", append(bytes.Clone(s.archive), s.archive...))
	headers, headersDigest := write("headers.tgz", manyFolders())
	fullOCI := s.manifest
	s.push(t, packaged(t, "other", "1.17.4"), "charts/other:1.17.4")
	for _, tt := range []struct {
		name, source, digest string
		want                 error
		text                 string
	}{
		{name: "no digest", source: "file:" + dir, want: nil, text: "is not a digest"},
		{name: "no source", source: "charts", digest: right, want: nil, text: "is not a source"},
		{name: "credentials", source: "https://me:pa55@" + s.host(), digest: right, want: nil, text: "contains credentials"},
		{name: "another digest of a file", source: half, digest: right, want: ErrDigest, text: "want " + right},
		{name: "another digest of a server", source: base + "/charts", digest: other, want: ErrDigest, text: "want " + other},
		{name: "truncated archive", source: half, digest: halfDigest, want: ErrArchive, text: "truncated"},
		{name: "not an archive", source: text, digest: textDigest, want: ErrArchive, text: "not a gzipped tar"},
		{name: "a file outside of the chart", source: out, digest: outDigest, want: ErrArchive, text: "invalid file name"},
		{name: "a symlink", source: link, digest: linkDigest, want: ErrArchive, text: "not a regular file"},
		{name: "names that differ in case", source: twins, digest: twinsDigest, want: ErrArchive, text: "in case only"},
		{name: "a device", source: device, digest: deviceDigest, want: ErrArchive, text: "not a regular file"},
		{name: "a hard link", source: hard, digest: hardDigest, want: ErrArchive, text: "not a regular file"},
		{name: "two archives one after another", source: two, digest: twoDigest, want: ErrArchive, text: "data after its end"},
		{name: "folders without end", source: headers, digest: headersDigest, want: ErrArchive, text: "more than"},
		{name: "decompression bomb", source: bomb, digest: bombDigest, want: ErrArchive, text: "more than"},
		{name: "a missing file", source: "file:" + dir + "/none.tgz", digest: right, want: ErrAbsent, text: "is missing"},
		{name: "a directory for a file", source: "file:" + dir + "/../x.tgz", digest: right, want: ErrAbsent, text: "is missing"},
		{name: "not on the server", source: base + "/none", digest: right, want: ErrAbsent, text: "404 Not Found"},
		{name: "redirect to a missing file", source: base + "/gone", digest: right, want: ErrAbsent, text: "404"},
		{name: "access denied", source: base + "/private", digest: right, want: ErrDenied, text: "403"},
		{name: "a busy server", source: base + "/busy", digest: right, want: ErrUnreachable, text: "503"},
		{name: "response above the size limit", source: base + "/huge", digest: right, want: ErrArchive, text: "limit is"},
		{name: "connection refused", source: "https://127.0.0.1:1/charts", digest: right, want: ErrUnreachable, text: "refused"},
		{name: "not in the registry", source: "oci://" + s.host() + "/charts/cilium", digest: other, want: ErrAbsent, text: "404"},
		{name: "another chart", source: "oci://" + s.host() + "/charts/other", digest: s.manifest, want: ErrArchive, text: "chart is other 1.17.4"},
		{name: "digest of the archive instead of the manifest", source: "oci://" + s.host() + "/charts/cilium", digest: right, want: ErrAbsent, text: "404"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := (&Store{Cache: t.TempDir(), Transport: s.Client().Transport}).Fetch(t.Context(), Ref{"cilium", "1.17.4", tt.source, tt.digest})
			if err == nil {
				t.Fatalf("chart accepted: %v", names(c))
			}
			if tt.want != nil && !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("%v", err)
			}
			for _, secret := range []string{"S3CR3T"} {
				if strings.Contains(err.Error(), secret) {
					t.Errorf("error contains a secret: %v", err)
				}
			}
		})
	}
	if _, err := (&Store{Transport: s.Client().Transport}).Fetch(t.Context(), Ref{"cilium", "1.17.4", "oci://" + s.host() + "/charts/cilium", fullOCI}); err != nil {
		t.Errorf("valid chart: %v", err)
	}
}

// manyFolders is an archive of folders that is too long when it is unpacked.
func manyFolders() []byte {
	var one, b bytes.Buffer
	_ = tar.NewWriter(&one).WriteHeader(&tar.Header{Name: "cilium/", Typeflag: tar.TypeDir})
	z, _ := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	thousand := bytes.Repeat(one.Bytes(), 1000)
	for n := 0; n < maxUnpacked+maxFiles*1536+(1<<20); n += len(thousand) {
		_, _ = z.Write(thousand)
	}
	_ = z.Close()
	return b.Bytes()
}

// tarred packs files with arbitrary headers.
func tarred(all ...tar.Header) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for _, h := range all {
		_ = w.WriteHeader(&h)
		_, _ = io.CopyN(w, zeros{}, h.Size)
	}
	_ = w.Close()
	_ = z.Close()
	return b.Bytes()
}

func TestFetchResumesAPartialDownload(t *testing.T) {
	s := serve(t, true)
	s.cut = 200
	c, err := (&Store{Transport: s.Client().Transport}).Fetch(t.Context(), Ref{"cilium", "1.17.4", "https://" + s.host() + "/charts", digest(s.archive)})
	if err != nil || !slices.Equal(names(c), wanted) {
		t.Fatal(err)
	}
	if want := []string{"/charts/cilium-1.17.4.tgz ", "/charts/cilium-1.17.4.tgz bytes=200-"}; !slices.Equal(s.requests, want) {
		t.Errorf("requests %q, want %q", s.requests, want)
	}
}

func TestRegistryCredentials(t *testing.T) {
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	t.Setenv("HOME", t.TempDir())
	s := serve(t, true)
	s.password = "S3CR3T"
	r := Ref{"cilium", "1.17.4", "oci://" + s.host() + "/charts/cilium", s.manifest}
	st := &Store{Transport: s.Client().Transport}
	login := func(password string) {
		file := filepath.Join(t.TempDir(), "config.json")
		auth := base64.StdEncoding.EncodeToString([]byte("me:" + password))
		if err := os.WriteFile(file, fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, s.host(), auth), 0o600); err != nil {
			t.Fatal(err)
		}
		t.Setenv("HELM_REGISTRY_CONFIG", file)
	}
	t.Setenv("HELM_REGISTRY_CONFIG", "/none")
	if _, err := st.Fetch(t.Context(), r); !errors.Is(err, ErrDenied) {
		t.Errorf("without credentials: %v", err)
	}
	login("WR0NG")
	if _, err := st.Fetch(t.Context(), r); !errors.Is(err, ErrDenied) || strings.Contains(err.Error(), "WR0NG") {
		t.Errorf("with other credentials: %v", err)
	}
	login(s.password)
	if c, err := st.Fetch(t.Context(), r); err != nil || !slices.Equal(names(c), wanted) {
		t.Errorf("with credentials of helm registry login: %v", err)
	}
}

// The default client rejects an untrusted server certificate.
func TestUntrustedServersAreRejected(t *testing.T) {
	s := serve(t, true)
	for _, r := range []Ref{
		{"cilium", "1.17.4", "https://" + s.host() + "/charts", digest(s.archive)},
		{"cilium", "1.17.4", "oci://" + s.host() + "/charts/cilium", s.manifest},
	} {
		if _, err := (&Store{}).Fetch(t.Context(), r); !errors.Is(err, ErrUnreachable) || !strings.Contains(err.Error(), "certificate") {
			t.Errorf("%s: %v", r.Source, err)
		}
	}
	if len(s.requests) > 0 {
		t.Errorf("requests sent: %q", s.requests)
	}
}

func TestFetchStopsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	stuck := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		cancel()
		<-r.Context().Done()
	}))
	defer stuck.Close()
	if _, err := (&Store{}).Fetch(ctx, Ref{"cilium", "1.17.4", stuck.URL, "sha256:" + strings.Repeat("0", 64)}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
