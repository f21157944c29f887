//go:build unix

package component

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"constellation/internal/testneeds"
)

func digestOf(b []byte) string {
	s := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(s[:])
}

// content returns n bytes that are the same in every run and do not repeat.
func content(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

// fast makes retries a matter of milliseconds.
var fast = limits{pause: time.Millisecond, pauseMax: 4 * time.Millisecond, attempts: 5, progress: 1 << 10, stall: 300 * time.Millisecond}

// hidden lists what lies in dir beside the names given.
func hidden(t *testing.T, dir string, names ...string) (rest []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
next:
	for _, e := range entries {
		for _, n := range names {
			if e.Name() == n {
				continue next
			}
		}
		rest = append(rest, e.Name())
	}
	return rest
}

// request is what a scripted server was asked for.
type request struct{ Range, IfRange string }

// script answers the nth request with the nth handler, and further ones with the
// last, and records what it was asked.
type script struct {
	mu    sync.Mutex
	steps []http.HandlerFunc
	asked []request
}

func (s *script) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	h := s.steps[min(len(s.asked), len(s.steps)-1)]
	s.asked = append(s.asked, request{r.Header.Get("Range"), r.Header.Get("If-Range")})
	s.mu.Unlock()
	h(w, r)
}

// serve answers as a file server does.
func serve(b []byte, etag string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if etag != "" {
			w.Header().Set("ETag", etag)
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b))
	}
}

// cut sends the first n bytes of an answer that announced all of b.
func cut(b []byte, etag string, n int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if etag != "" {
			w.Header().Set("ETag", etag)
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(b)))
		w.Write(b[:n])
	}
}

func status(code int, header ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i+1 < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(code)
	}
}

func raw(code int, b []byte, header ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		status(code, header...)(w, r)
		w.Write(b)
	}
}

func TestDownloadsFromServersThatMisbehave(t *testing.T) {
	b := content(100_000)
	other := content(100_001)[1:]
	const tag = `"v1"`
	for _, tt := range []struct {
		name  string
		steps []http.HandlerFunc
		want  []request // nil: not compared
		err   string    // "" = must succeed
	}{
		{name: "a good server is asked once", steps: []http.HandlerFunc{serve(b, tag)}, want: []request{{}}},
		{
			name:  "a cut is taken up where it was",
			steps: []http.HandlerFunc{cut(b, tag, 60_000), serve(b, tag)},
			want:  []request{{}, {"bytes=60000-", tag}},
			err:   "",
		},
		{name: "two cuts", steps: []http.HandlerFunc{
			cut(b, tag, 60_000),
			func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("ETag", tag)
				w.Header().Set("Content-Range", "bytes 60000-99999/100000")
				w.Header().Set("Content-Length", "40000")
				w.WriteHeader(206)
				w.Write(b[60_000:80_000])
			},
			serve(b, tag),
		}, want: []request{{}, {"bytes=60000-", tag}, {"bytes=80000-", tag}}},
		{
			name:  "changed content is sent in full with status 200",
			steps: []http.HandlerFunc{cut(other, `"v0"`, 60_000), serve(b, tag)},
			want:  []request{{}, {"bytes=60000-", `"v0"`}},
			err:   "",
		},
		{
			name:  "a server without ranges sends everything again",
			steps: []http.HandlerFunc{cut(b, "", 60_000), raw(200, b)},
			want:  []request{{}, {"bytes=60000-", ""}},
			err:   "",
		},
		{name: "206 with another range is not joined", steps: []http.HandlerFunc{
			cut(b, tag, 60_000),
			raw(206, b[50_000:], "Content-Range", "bytes 50000-99999/100000", "ETag", tag),
			serve(b, tag),
		}, want: []request{{}, {"bytes=60000-", tag}, {}}},
		{name: "206 of another length is not joined", steps: []http.HandlerFunc{
			cut(b, tag, 60_000),
			raw(206, b[60_000:90_000], "Content-Range", "bytes 60000-89999/90000", "ETag", tag),
			serve(b, tag),
		}, want: nil},
		{name: "206 with another tag is not joined", steps: []http.HandlerFunc{
			cut(b, tag, 60_000),
			raw(206, other[60_000:], "Content-Range", "bytes 60000-99999/100000", "ETag", `"v2"`),
			serve(b, tag),
		}, want: []request{{}, {"bytes=60000-", tag}, {}}},
		{name: "206 without a range is not joined", steps: []http.HandlerFunc{cut(b, tag, 60_000), raw(206, b[60_000:]), serve(b, tag)}, want: nil},
		{name: "206 to a plain request", steps: []http.HandlerFunc{raw(206, b, "Content-Range", "bytes 0-99999/100000"), serve(b, tag)}, want: nil},
		{name: "a range that cannot be satisfied", steps: []http.HandlerFunc{cut(b, tag, 60_000), status(416), serve(b, tag)}, want: nil},
		{
			name:  "mixed content without ETags is detected by the digest",
			steps: []http.HandlerFunc{cut(other, "", 60_000), serve(b, ""), serve(b, "")},
			want:  []request{{}, {"bytes=60000-", ""}, {}},
			err:   "",
		},
		{
			name:  "a weak tag promises nothing",
			steps: []http.HandlerFunc{cut(b, `W/"v1"`, 60_000), serve(b, `W/"v1"`)},
			want:  []request{{}, {"bytes=60000-", ""}},
			err:   "",
		},
		{name: "an end without a length is tried again", steps: []http.HandlerFunc{
			func(w http.ResponseWriter, _ *http.Request) { // HTTP/1.0: the end is where the connection ends
				conn, buf, err := w.(http.Hijacker).Hijack()
				if err != nil {
					panic(err)
				}
				defer conn.Close()
				buf.WriteString("HTTP/1.0 200 OK\r\n\r\n")
				buf.Write(b[:70_000])
				buf.Flush()
			},
			serve(b, tag),
		}, want: []request{{}, {}}},
		{name: "a chunked answer", steps: []http.HandlerFunc{func(w http.ResponseWriter, _ *http.Request) {
			for i := 0; i < len(b); i += 10_000 {
				w.Write(b[i : i+10_000])
				w.(http.Flusher).Flush()
			}
		}}, want: []request{{}}},
		{name: "an overloaded server", steps: []http.HandlerFunc{status(503), status(500), status(429), serve(b, tag)}, want: nil},
		{name: "altered content is refused at once", steps: []http.HandlerFunc{serve(other, tag)}, want: []request{{}}, err: "digest mismatch"},
		{name: "one flipped bit", steps: []http.HandlerFunc{func() http.HandlerFunc {
			c := bytes.Clone(b)
			c[77_777] ^= 1
			return serve(c, tag)
		}()}, want: []request{{}}, err: "digest mismatch"},
		{name: "altered content behind a cut", steps: []http.HandlerFunc{cut(b, tag, 60_000), serve(other, tag)}, want: nil, err: "digest mismatch"},
		{name: "one byte too many", steps: []http.HandlerFunc{raw(200, append(bytes.Clone(b), 0))}, want: []request{{}}, err: "digest mismatch"},
		{name: "nothing there", steps: []http.HandlerFunc{status(404)}, want: []request{{}}, err: "HTTP 404 not found"},
		{name: "not allowed", steps: []http.HandlerFunc{status(403)}, want: []request{{}}, err: "HTTP 403 forbidden"},
		{name: "a server that always fails is given up", steps: []http.HandlerFunc{status(502)}, want: make([]request, 5), err: "gave up after 5 attempts"},
		{name: "a server that always cuts at once is given up", steps: []http.HandlerFunc{cut(b, tag, 0)}, want: make([]request, 5), err: "gave up after 5 attempts"},
		{
			name:  "a server that always truncates at the same place is distinguished from changed content",
			steps: []http.HandlerFunc{cut(b, "", 60_000)},
			want:  nil, err: "ended after 60000 of 100000 bytes",
		},
		{name: "the same, of an answer whose length is not known", steps: []http.HandlerFunc{func(w http.ResponseWriter, _ *http.Request) {
			w.Write(b[:60_000])
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}}, want: nil, err: "ended after 60000 bytes, before its end"},
		{name: "content that is shorter says how long it is", steps: []http.HandlerFunc{raw(200, b[:60_000])}, want: []request{{}}, err: " delivers 60000 bytes with sha256:"},
		{name: "an answer larger than allowed", steps: []http.HandlerFunc{raw(200, make([]byte, 300_000))}, want: []request{{}}, err: "more than 200000 bytes"},
		{name: "an endless answer", steps: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				w.Write(b)
			}
		}}, want: []request{{}}, err: "more than 200000 bytes"},
		{name: "silence in the middle", steps: []http.HandlerFunc{
			func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("ETag", tag)
				w.Header().Set("Content-Length", "100000")
				w.Write(b[:60_000])
				w.(http.Flusher).Flush()
				<-r.Context().Done()
			},
			serve(b, tag),
		}, want: []request{{}, {"bytes=60000-", tag}}},
		{name: "silence from the start", steps: []http.HandlerFunc{
			func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
			serve(b, tag),
		}, want: nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := &script{steps: tt.steps}
			srv := httptest.NewServer(s)
			defer srv.Close()
			root := t.TempDir()
			bin := filepath.Join(root, "bin")
			os.Mkdir(bin, 0o755)
			os.WriteFile(filepath.Join(bin, "kubelet"), []byte("old"), 0o755)
			l := fast
			l.size = 200_000
			in := &Installer{Root: root, limits: l}
			err := in.Install(t.Context(), List{{Name: "kubelet", URL: srv.URL + "/kubelet?signature=canary", Digest: digestOf(b), Path: "/bin/kubelet"}}, nil)

			got, _ := os.ReadFile(filepath.Join(bin, "kubelet"))
			if tt.err == "" {
				if err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(got, b) {
					t.Error("installed something else")
				}
				if rest := hidden(t, bin, "kubelet"); rest != nil {
					t.Errorf("left behind: %v", rest)
				}
			} else {
				if err == nil || !strings.Contains(err.Error(), tt.err) || !strings.HasPrefix(err.Error(), "install kubelet: ") {
					t.Errorf("got %v, want %q", err, tt.err)
				}
				if strings.Contains(fmt.Sprint(err), "canary") {
					t.Errorf("the error shows the query: %v", err)
				}
				if strings.Contains(err.Error(), "digest mismatch") != errors.Is(err, ErrDigest) {
					t.Errorf("ErrDigest: %v", err)
				}
				if string(got) != "old" {
					t.Error("the target was touched")
				}
				// Only what another attempt can complete may wait for it.
				if rest := hidden(t, bin, "kubelet"); rest != nil && !strings.Contains(err.Error(), "gave up") {
					t.Errorf("left behind: %v", rest)
				}
			}
			if tt.want != nil && fmt.Sprint(s.asked) != fmt.Sprint(tt.want) {
				t.Errorf("asked %v, want %v", s.asked, tt.want)
			}
		})
	}
}

// roundTripper lets a test be the server without a network.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// drip delivers rate bytes per second until its context or the content ends.
type drip struct {
	ctx  context.Context
	rate int
	rest *bytes.Reader
}

func (d drip) Read(p []byte) (int, error) {
	select {
	case <-time.After(time.Second):
		return d.rest.Read(p[:min(d.rate, len(p))])
	case <-d.ctx.Done():
		return 0, d.ctx.Err()
	}
}
func (drip) Close() error { return nil }

// A slow mirror must not delay a machine for days: less than a minimum rate is as good as silence.
func TestSlowServerIsGivenUpInBoundedTime(t *testing.T) {
	b := content(3 << 20)
	for _, tt := range []struct {
		name string
		rate int // bytes per second
		err  string
	}{
		{name: "a byte now and then", rate: 1, err: "less than 16384 bytes per second for 30s"},
		{name: "300 bytes per second", rate: 300, err: "less than 16384 bytes per second for 30s"},
		{name: "just too slow", rate: 15 << 10, err: "less than 16384 bytes per second for 30s"},
		{name: "slow", rate: 18 << 10, err: ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				asked := 0
				in := &Installer{Root: t.TempDir(), Client: &http.Client{Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
					asked++
					return &http.Response{
						StatusCode: 200, ContentLength: int64(len(b)), Header: http.Header{}, Body: drip{r.Context(), tt.rate, bytes.NewReader(b)}, Request: r,
					}, nil
				})}}
				start := time.Now()
				err := in.Install(t.Context(), List{{Name: "kubelet", URL: "http://mirror.example/kubelet", Digest: digestOf(b), Path: "/kubelet"}}, nil)
				if tt.err == "" {
					if err != nil || asked != 1 {
						t.Errorf("%d attempts: %v", asked, err)
					}
					return
				}
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("got %v", err)
				}
				// Each attempt sees two windows of 30 s: the answer's own and a slow one.
				if took := time.Since(start); asked != 10 || took > 10*(60*time.Second+15*time.Second) {
					t.Errorf("%d attempts in %s", asked, took)
				}
			})
		})
	}
}

func TestRetryAfterIsHonoured(t *testing.T) {
	for _, tt := range []struct {
		name, header string
		least, most  time.Duration
	}{
		{name: "seconds", header: "7", least: 7 * time.Second, most: 7 * time.Second},
		{name: "a date", header: "@20", least: 19 * time.Second, most: 20 * time.Second},
		{name: "nonsense", header: "soon", least: 200 * time.Millisecond, most: time.Second},
		{name: "an hour is too long", header: "3600", least: time.Minute, most: time.Minute},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, asked := []byte("content"), 0
				in := &Installer{Root: t.TempDir(), Client: &http.Client{Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
					asked++
					h := http.Header{}
					if asked == 1 {
						v := tt.header
						if s, ok := strings.CutPrefix(v, "@"); ok {
							n, _ := strconv.Atoi(s)
							v = time.Now().Add(time.Duration(n) * time.Second).UTC().Format(http.TimeFormat)
						}
						h.Set("Retry-After", v)
						return &http.Response{StatusCode: 503, Header: h, Body: http.NoBody, Request: r}, nil
					}
					return &http.Response{StatusCode: 200, ContentLength: int64(len(b)), Header: h, Body: io.NopCloser(bytes.NewReader(b)), Request: r}, nil
				})}}
				start := time.Now()
				if err := in.Install(t.Context(), List{{Name: "x", URL: "http://m.example/x", Digest: digestOf(b), Path: "/x"}}, nil); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(start); took < tt.least || took > tt.most {
					t.Errorf("waited %s, want %s to %s", took, tt.least, tt.most)
				}
			})
		})
	}
}

func TestInstalledFilesAreLeftAlone(t *testing.T) {
	b := content(1000)
	s := &script{steps: []http.HandlerFunc{serve(b, "")}}
	srv := httptest.NewServer(s)
	defer srv.Close()
	root := t.TempDir()
	in := &Installer{Root: root, limits: fast}
	l := List{{Name: "kubelet", URL: srv.URL, Digest: digestOf(b), Path: "/usr/local/bin/kubelet"}}
	file := filepath.Join(root, "usr/local/bin/kubelet")
	install := func() {
		t.Helper()
		if err := in.Install(t.Context(), l, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := in.Verify(t.Context(), l); !errors.Is(err, ErrDigest) {
		t.Errorf("absent: %v", err)
	}
	install()
	before, _ := os.Stat(file)
	install()
	after, _ := os.Stat(file)
	if len(s.asked) != 1 || !os.SameFile(before, after) {
		t.Errorf("asked %d times, same file %t", len(s.asked), os.SameFile(before, after))
	}
	if err := in.Verify(t.Context(), l); err != nil {
		t.Error(err)
	}

	os.Chmod(file, 0o600)
	install()
	if i, _ := os.Stat(file); i.Mode() != 0o755 || len(s.asked) != 1 {
		t.Errorf("mode %s after %d requests", i.Mode(), len(s.asked))
	}

	os.WriteFile(file, append(b[:999:999], 0), 0o755)
	if err := in.Verify(t.Context(), l); !errors.Is(err, ErrDigest) || !strings.Contains(err.Error(), "/usr/local/bin/kubelet is absent or altered") {
		t.Errorf("altered: %v", err)
	}
	install()
	if got, _ := os.ReadFile(file); !bytes.Equal(got, b) || len(s.asked) != 2 {
		t.Errorf("altered file was not replaced (%d requests)", len(s.asked))
	}

	// A link in the place of a program is replaced; what it leads to is not touched.
	elsewhere := filepath.Join(root, "precious")
	os.WriteFile(elsewhere, []byte("precious"), 0o644)
	os.Remove(file)
	os.Symlink("../../../precious", file)
	install()
	if got, _ := os.ReadFile(elsewhere); string(got) != "precious" {
		t.Error("wrote through a symbolic link")
	}
	if i, _ := os.Lstat(file); !i.Mode().IsRegular() {
		t.Errorf("is %s", i.Mode())
	}
}

func TestRunningProgramIsReplaced(t *testing.T) {
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Skip("needs a program to run: no sleep")
	}
	old, err := os.ReadFile(sleep)
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	file := filepath.Join(root, "program")
	os.WriteFile(file, old, 0o755)
	cmd := exec.Command(file, "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	if err := os.WriteFile(file, nil, 0o755); !errors.Is(err, syscall.ETXTBSY) {
		t.Fatalf("the program does not run: %v", err)
	}
	b := []byte("#!/bin/sh\necho new\n")
	l := List{{Name: "program", URL: "data:;base64," + base64.StdEncoding.EncodeToString(b), Digest: digestOf(b), Path: "/program"}}
	if err := (&Installer{Root: root}).Install(t.Context(), l, nil); err != nil {
		t.Fatal(err)
	}
	// The new one can be started at once: nothing holds it open for writing.
	if out, err := exec.Command(file).CombinedOutput(); err != nil || string(out) != "new\n" {
		t.Errorf("%q, %v", out, err)
	}
}

func TestDataURLs(t *testing.T) {
	b := []byte("{\"a\": 1}\n")
	for _, tt := range []struct{ name, url, digest, err string }{
		{name: "base64", url: "data:application/json;base64," + base64.StdEncoding.EncodeToString(b), digest: digestOf(b)},
		{name: "percent", url: "data:application/json,%7B%22a%22:%201%7D%0A", digest: digestOf(b)},
		{name: "wrong digest", url: "data:,canary", digest: digestOf(b), err: "digest mismatch"},
		{name: "bad base64", url: "data:;base64,canary!", digest: digestOf(b), err: "malformed"},
		{name: "no comma", url: "data:canary", digest: digestOf(b), err: "malformed"},
		{name: "bad escape", url: "data:,canary%", digest: digestOf(b), err: "malformed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := t.TempDir()
			err := (&Installer{Root: root}).Install(t.Context(), List{{Name: "patch", URL: tt.url, Digest: tt.digest, Path: "/patch.json", Mode: 0o600}}, nil)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) || strings.Contains(err.Error(), "canary") {
					t.Errorf("got %v", err)
				}
				if rest := hidden(t, root); rest != nil {
					t.Errorf("left behind: %v", rest)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			got, _ := os.ReadFile(filepath.Join(root, "patch.json"))
			i, _ := os.Stat(filepath.Join(root, "patch.json"))
			if !bytes.Equal(got, b) || i.Mode() != 0o600 {
				t.Errorf("%q %s", got, i.Mode())
			}
		})
	}
}

func TestInterruptedInstallGoesOn(t *testing.T) {
	b := content(3 << 20)
	const tag = `"v1"`
	var sent atomic.Int64
	root := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	s := &script{steps: []http.HandlerFunc{
		func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("ETag", tag)
			w.Header().Set("Content-Length", strconv.Itoa(len(b)))
			w.Write(b[:2<<20])
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		},
		func(w http.ResponseWriter, r *http.Request) {
			serve(b, tag)(&counting{w, &sent}, r)
		},
	}}
	srv := httptest.NewServer(s)
	defer srv.Close()
	in := &Installer{Root: root}
	l := List{{Name: "kubelet", URL: srv.URL, Digest: digestOf(b), Path: "/kubelet"}}
	var seen int64
	err := in.Install(ctx, l, func(_ Component, done, total int64) {
		if total != int64(len(b)) {
			t.Errorf("total %d", total)
		}
		if seen = done; done > 0 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	if _, err := os.Stat(filepath.Join(root, "kubelet")); err == nil {
		t.Fatal("half a file is visible")
	}
	if err := in.Install(t.Context(), l, nil); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(filepath.Join(root, "kubelet")); !bytes.Equal(got, b) {
		t.Error("installed something else")
	}
	if sent.Load() > int64(len(b))-seen {
		t.Errorf("fetched %d bytes again, %d were there", sent.Load(), seen)
	}
	if rest := hidden(t, root, "kubelet"); rest != nil {
		t.Errorf("left behind: %v", rest)
	}
}

type counting struct {
	http.ResponseWriter
	n *atomic.Int64
}

func (c *counting) Write(b []byte) (int, error) {
	c.n.Add(int64(len(b)))
	return c.ResponseWriter.Write(b)
}

func TestDamagedPartialDownloadsAreFetchedAgain(t *testing.T) {
	b := content(10_000)
	for _, remains := range [][]byte{content(5001)[1:], b, append(bytes.Clone(b), 1), make([]byte, 20_000)} {
		s := &script{steps: []http.HandlerFunc{serve(b, `"x"`)}}
		srv := httptest.NewServer(s)
		root := t.TempDir()
		c := Component{Name: "kubelet", URL: srv.URL, Digest: digestOf(b), Path: "/kubelet"}
		os.WriteFile(filepath.Join(root, ".kubelet."+c.Digest[7:23]+".partial"), remains, 0o600)
		if err := (&Installer{Root: root, limits: fast}).Install(t.Context(), List{c}, nil); err != nil {
			t.Errorf("%d bytes: %v", len(remains), err)
		}
		if bytes.Equal(remains, b) && len(s.asked) != 0 {
			t.Error("a complete file was fetched again")
		}
		srv.Close()
	}
}

func TestAtMostFourAtATimeAndAllOnce(t *testing.T) {
	var now, most, total atomic.Int64
	b := content(1000)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n := now.Add(1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		total.Add(1)
		time.Sleep(20 * time.Millisecond) // long enough for the others to be there
		w.Write(b)
		now.Add(-1)
	}))
	defer srv.Close()
	var l List
	for i := range 12 {
		l = append(l, Component{Name: fmt.Sprint("c", i), URL: srv.URL, Digest: digestOf(b), Path: fmt.Sprint("/bin/c", i)})
	}
	root := t.TempDir()
	ended := map[string]int{}
	inside := false
	err := (&Installer{Root: root}).Install(t.Context(), l, func(c Component, done, total int64) {
		if inside {
			t.Error("called concurrently")
		}
		inside = true
		if done == total && total == 1000 {
			ended[c.Name]++
		}
		inside = false
	})
	if err != nil {
		t.Fatal(err)
	}
	if most.Load() != 4 || total.Load() != 12 || len(ended) != 12 {
		t.Errorf("%d at a time, %d requests, %d ended", most.Load(), total.Load(), len(ended))
	}
}

func TestSeveralInstallersOfOneComponentDoNotDisturbEachOther(t *testing.T) {
	b := content(2 << 20)
	srv := httptest.NewServer(serve(b, `"x"`))
	defer srv.Close()
	root := t.TempDir()
	l := List{{Name: "kubelet", URL: srv.URL, Digest: digestOf(b), Path: "/kubelet"}}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := (&Installer{Root: root}).Install(t.Context(), l, nil); err != nil {
				t.Error(err)
			}
			if got, _ := os.ReadFile(filepath.Join(root, "kubelet")); !bytes.Equal(got, b) {
				t.Error("not complete although Install returned")
			}
		})
	}
	wg.Wait()
	if rest := hidden(t, root, "kubelet"); rest != nil {
		t.Errorf("left behind: %v", rest)
	}
}

func TestOneFailureEndsTheOthers(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/bad" {
			w.WriteHeader(404)
			return
		}
		w.Write([]byte("x"))
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	defer srv.Close()
	l := List{
		{Name: "slow", URL: srv.URL + "/slow", Digest: anyDigest, Path: "/slow"},
		{Name: "bad", URL: srv.URL + "/bad", Digest: anyDigest, Path: "/bad"},
	}
	start := time.Now()
	err := (&Installer{Root: t.TempDir()}).Install(t.Context(), l, nil)
	if err == nil || !strings.HasPrefix(err.Error(), "install bad: ") || strings.Contains(err.Error(), "slow") {
		t.Errorf("got %v", err)
	}
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("took %s", took)
	}
}

func TestFullDisk(t *testing.T) {
	testneeds.Root(t, "to mount a small file system")
	root := t.TempDir()
	if err := syscall.Mount("tmpfs", root, "tmpfs", 0, "size=1m"); err != nil {
		t.Skip("cannot mount a small file system: ", err)
	}
	defer syscall.Unmount(root, 0)
	b := content(4 << 20)
	srv := httptest.NewServer(serve(b, ""))
	defer srv.Close()
	os.WriteFile(filepath.Join(root, "kubelet"), []byte("old"), 0o755)
	check := func(l List, dir string) {
		t.Helper()
		err := (&Installer{Root: root}).Install(t.Context(), l, nil)
		if !errors.Is(err, syscall.ENOSPC) || strings.Contains(err.Error(), ".partial") {
			t.Errorf("got %v", err)
		}
		if got, _ := os.ReadFile(filepath.Join(root, "kubelet")); string(got) != "old" {
			t.Error("the target was touched")
		}
		if rest := hidden(t, dir, "kubelet", "cni"); rest != nil {
			t.Errorf("left behind: %v", rest)
		}
	}
	check(List{{Name: "kubelet", URL: srv.URL, Digest: digestOf(b), Path: "/kubelet"}}, root)

	// An archive that fits, with content that does not.
	a := archive(t, file("zeros", make([]byte, 4<<20)))
	arch := httptest.NewServer(serve(a, ""))
	defer arch.Close()
	check(List{{Name: "cni", URL: arch.URL, Digest: digestOf(a), Path: "/cni", Extract: true}}, filepath.Join(root, "cni"))
}

func TestTargetsThatCannotBeWritten(t *testing.T) {
	b := []byte("x")
	root := t.TempDir()
	os.Mkdir(filepath.Join(root, "dir"), 0o755)
	os.WriteFile(filepath.Join(root, "file"), nil, 0o644)
	os.Symlink(t.TempDir(), filepath.Join(root, "out"))
	for _, tt := range []struct{ name, path string }{
		{"a directory is in the way", "/dir"},
		{"a file is where a directory should be", "/file/kubelet"},
		{"a link leads out of the root", "/out/kubelet"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := (&Installer{Root: root}).Install(t.Context(), List{{Name: "x", URL: "data:,x", Digest: digestOf(b), Path: tt.path}}, nil)
			if err == nil {
				t.Error("no error")
			}
		})
	}
}

func TestRedirectsKeepToHTTPS(t *testing.T) {
	plain := httptest.NewServer(serve([]byte("x"), ""))
	defer plain.Close()
	secure := httptest.NewTLSServer(http.RedirectHandler(plain.URL, http.StatusFound))
	defer secure.Close()
	c := NewClient()
	c.Transport.(*http.Transport).TLSClientConfig = secure.Client().Transport.(*http.Transport).TLSClientConfig
	in := &Installer{Root: t.TempDir(), Client: c, limits: fast}
	err := in.Install(t.Context(), List{{Name: "x", URL: secure.URL, Digest: digestOf([]byte("x")), Path: "/x"}}, nil)
	if err == nil || !strings.Contains(err.Error(), "redirected from https to http") {
		t.Errorf("got %v", err)
	}
}

// BenchmarkInstall fetches 256 MiB over loopback, against the loop that writes,
// reads again for the digest and copies.
func BenchmarkInstall(b *testing.B) {
	data := content(256 << 20)
	srv := httptest.NewServer(serve(data, `"x"`))
	defer srv.Close()
	l := List{{Name: "x", URL: srv.URL, Digest: digestOf(data), Path: "/x"}}
	b.Run("one-pass", func(b *testing.B) {
		b.SetBytes(int64(len(data)))
		for b.Loop() {
			dir := b.TempDir()
			if err := (&Installer{Root: dir}).Install(b.Context(), l, nil); err != nil {
				b.Fatal(err)
			}
			os.RemoveAll(dir)
		}
	})
	b.Run("three-pass", func(b *testing.B) {
		b.SetBytes(int64(len(data)))
		for b.Loop() {
			dir := b.TempDir()
			resp, err := http.Get(srv.URL)
			if err != nil {
				b.Fatal(err)
			}
			f, _ := os.Create(filepath.Join(dir, "temp"))
			io.Copy(f, resp.Body)
			resp.Body.Close()
			f.Seek(0, io.SeekStart)
			h := sha256.New()
			io.Copy(h, f)
			f.Seek(0, io.SeekStart)
			g, _ := os.Create(filepath.Join(dir, "x"))
			io.Copy(g, f)
			f.Sync()
			g.Sync()
			f.Close()
			g.Close()
			os.RemoveAll(dir)
		}
	})
}

func TestSHA512Digests(t *testing.T) {
	b := content(100_000)
	sum := sha512.Sum512(b)
	c := Component{Name: "server", Digest: "sha512:" + hex.EncodeToString(sum[:]), Path: "/server.tar.gz"}
	for _, tt := range []struct {
		name string
		sent []byte
		want error
	}{
		{name: "the named content is installed", sent: b},
		{name: "other content is refused", sent: content(99_999), want: ErrDigest},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &script{steps: []http.HandlerFunc{serve(tt.sent, "")}}
			srv := httptest.NewServer(s)
			defer srv.Close()
			root := t.TempDir()
			in := &Installer{Root: root, limits: fast}
			c := c
			c.URL = srv.URL
			if err := in.Install(t.Context(), List{c}, nil); !errors.Is(err, tt.want) {
				t.Fatalf("error is %v, want %v", err, tt.want)
			}
			_, err := os.Stat(filepath.Join(root, c.Path))
			if (err == nil) != (tt.want == nil) {
				t.Errorf("stat: %v", err)
			}
			if tt.want != nil {
				return
			}
			if err := in.Install(t.Context(), List{c}, nil); err != nil || len(s.asked) != 1 {
				t.Errorf("the second installation asked %d times: %v", len(s.asked)-1, err)
			}
		})
	}
	c.URL, c.Digest = "http://127.0.0.1", c.Digest[:len(c.Digest)-1]
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), "sha512: and 128") {
		t.Errorf("a digest with a digit less: %v", err)
	}
}
