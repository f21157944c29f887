package plans

import (
	"context"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

func TestChannels(t *testing.T) {
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	for _, tt := range []struct {
		name    string
		answer  http.HandlerFunc
		want    string
		refused string
	}{
		{name: "a redirection names the version", answer: func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "https://example.org/tag/v1.2.3+k3s1?x=y", http.StatusFound)
		}, want: "v1.2.3+k3s1"},
		{name: "an escaped redirection names the version", answer: func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/tag/v1.2.3%2Bk3s1", http.StatusFound)
		}, want: "v1.2.3+k3s1"},
		{name: "a success means the last element of the channel's path", answer: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }, want: "latest"},
		{name: "another redirection means the last element of the channel's path", answer: func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/tag/v1", http.StatusMovedPermanently)
		}, want: "latest"},
		{name: "a redirection loop is not followed", answer: func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, r.URL.String(), http.StatusFound) }, want: "latest"},
		{name: "not found", answer: http.NotFound, want: "", refused: "unexpected response: 404 Not Found"},
		{name: "a server error", answer: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }, want: "", refused: "unexpected response: 500"},
		{name: "a redirection without a location", answer: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusFound) }, want: "", refused: "names no version"},
		{name: "a redirection to a host without a path", answer: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "https://example.org/")
			w.WriteHeader(http.StatusFound)
		}, want: "", refused: "names no version"},
		{name: "a version that is too long", answer: func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/"+strings.Repeat("v", 1000), http.StatusFound)
		}, want: "", refused: "names no version"},
		{name: "a long body is not read", answer: func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 1<<20)) }, want: "latest"},
		{name: "nothing", answer: func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, want: "", refused: "EOF"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			asked := 0
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				asked++
				// As sent, not as Go canonicalizes them.
				if r.Header.Get("X-SUC-Cluster-ID") != "uid" || r.Header.Get("X-SUC-Latest-Version") != "v1.0.0" {
					t.Errorf("headers are %v", r.Header)
				}
				tt.answer(w, r)
			}))
			defer srv.Close()
			got, err := askChannel(t.Context(), srv.URL+"/channels/latest", "v1.0.0", "uid", nil)
			if got != tt.want || tt.refused == "" && err != nil || tt.refused != "" && (err == nil || !strings.Contains(err.Error(), tt.refused)) {
				t.Errorf("%q, %v; want %q, %q", got, err, tt.want, tt.refused)
			}
			if asked != 1 {
				t.Errorf("asked %d times", asked)
			}
		})
	}
	t.Run("unknown values are not sent", func(t *testing.T) {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for name := range r.Header {
				if strings.HasPrefix(strings.ToUpper(name), "X-SUC-") {
					t.Errorf("header %s is sent with %q", name, r.Header[name])
				}
			}
			http.Redirect(w, r, "/v1", http.StatusFound)
		}))
		defer srv.Close()
		if v, err := askChannel(t.Context(), srv.URL, "", "", nil); v != "v1" || err != nil {
			t.Errorf("%q, %v", v, err)
		}
	})
	for _, url := range []string{gone.URL, "no url at all\x7f", "ftp://example.org/latest", ""} {
		if v, err := askChannel(t.Context(), url, "", "", nil); err == nil {
			t.Errorf("channel %q returns %q", url, v)
		}
	}
	t.Run("a channel that never responds times out", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
		defer srv.Close()
		if _, err := askChannel(ctx, srv.URL, "", "", nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	})
	t.Run("certificates of the Plan are trusted", func(t *testing.T) {
		srv := httptest.NewUnstartedServer(http.RedirectHandler("/v1", http.StatusFound))
		srv.Config.ErrorLog = log.New(io.Discard, "", 0) // it logs clients that reject its certificate
		srv.StartTLS()
		defer srv.Close()
		if _, err := askChannel(t.Context(), srv.URL, "", "", nil); err == nil || !strings.Contains(err.Error(), "x509") {
			t.Errorf("without it: %v", err)
		}
		ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
		if v, err := askChannel(t.Context(), srv.URL, "", "", ca); v != "v1" || err != nil {
			t.Errorf("%q, %v", v, err)
		}
		if _, err := askChannel(t.Context(), srv.URL, "", "", []byte("none")); err == nil || !strings.Contains(err.Error(), "caBundle has no certificate") {
			t.Error(err)
		}
	})
}

// FuzzAnswers makes a channel redirect to arbitrary locations.
func FuzzAnswers(f *testing.F) {
	for _, s := range []string{"/v1", "", "//", "https://h/%zz", "/..", "?", "/a/../b"} {
		f.Add(s)
	}
	location := ""
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Location", location)
		w.WriteHeader(http.StatusFound)
	}))
	f.Cleanup(srv.Close)
	f.Fuzz(func(t *testing.T, s string) {
		location = s
		v, err := askChannel(t.Context(), srv.URL+"/latest", "", "", nil)
		if err == nil && (v == "" || strings.Contains(v, "/") || len(v) > channelVersion) {
			t.Errorf("%q returns %q", s, v)
		}
	})
}
