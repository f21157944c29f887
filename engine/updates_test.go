package engine_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/workspace"
)

// configureFeed writes a configuration that names a feed and its key.
func configureFeed(t *testing.T, feed, key string) *workspace.Workspace {
	t.Helper()
	pem, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	config := "releases:\n  feed: " + feed + "\n  keys: |\n    " + strings.ReplaceAll(strings.TrimSpace(string(pem)), "\n", "\n    ") + "\n"
	if err := os.WriteFile(filepath.Join(dir, workspace.ConfigFile), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	w, err := workspace.OpenWorkspace(dir)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestNewerReleaseReadsTheFeedOnceADay(t *testing.T) {
	feed, key := publish(t)
	var (
		mu       sync.Mutex
		requests []*http.Request
		down     bool
	)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		requests = append(requests, r.Clone(context.Background()))
		if down {
			http.Error(w, "no", http.StatusInternalServerError)
			return
		}
		w.Header().Set("ETag", `"user-4711"`)
		http.FileServer(http.Dir(feed)).ServeHTTP(w, r)
	}))
	defer server.Close()
	w := configureFeed(t, server.URL, key)
	now := time.Now()
	look := func(current string, at time.Time) (string, int) {
		t.Helper()
		mu.Lock()
		requests = nil
		mu.Unlock()
		got, err := engine.NewerRelease(t.Context(), w, current, at)
		if err != nil && !down {
			t.Fatal(err)
		}
		mu.Lock()
		defer mu.Unlock()
		for _, r := range requests {
			if r.Method != http.MethodGet || r.URL.RawQuery != "" || r.ContentLength != 0 || r.Header.Get("User-Agent") != "constellation" {
				t.Errorf("request %s %s %v", r.Method, r.URL, r.Header)
			}
			for name := range r.Header {
				if name != "User-Agent" && name != "Accept-Encoding" {
					t.Errorf("the request for %s has the header %s", r.URL, name)
				}
			}
		}
		return got, len(requests)
	}
	if got, n := look("v1.1.0", now); got != "v1.2.0" || n == 0 {
		t.Fatalf("first: %q after %d requests, want v1.2.0", got, n)
	}
	for _, at := range []time.Time{now.Add(time.Minute), now.Add(23 * time.Hour), now.Add(-time.Hour)} {
		if got, n := look("v1.1.0", at); got != "v1.2.0" || n != 0 {
			t.Errorf("at %s: %q after %d requests, want v1.2.0 without a request", at.Sub(now), got, n)
		}
	}
	if got, n := look("v1.2.0", now.Add(time.Hour)); got != "" || n != 0 {
		t.Errorf("the newest release: %q after %d requests", got, n)
	}
	// A failed request counts, too, and what was found before stays.
	down = true
	if got, n := look("v1.1.0", now.Add(25*time.Hour)); got != "v1.2.0" || n == 0 {
		t.Errorf("feed down: %q after %d requests", got, n)
	}
	if got, n := look("v1.1.0", now.Add(26*time.Hour)); got != "v1.2.0" || n != 0 {
		t.Errorf("an hour after the failure: %q after %d requests", got, n)
	}
	// The computer's clock was wrong.
	down = false
	if got, n := look("v1.1.0", now.Add(-72*time.Hour)); got != "v1.2.0" || n == 0 {
		t.Errorf("three days before: %q after %d requests", got, n)
	}
}

// Without a feed, a key or a cache no request is sent.
func TestNewerReleaseSendsNothingWithoutAKey(t *testing.T) {
	requests := make(chan string, 10)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { requests <- r.URL.Path }))
	defer server.Close()
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	for name, config := range map[string]string{"no feed": "charts: []\n", "no key": "releases:\n  feed: " + server.URL + "\n"} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, workspace.ConfigFile), []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		w, err := workspace.OpenWorkspace(dir)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := engine.NewerRelease(t.Context(), w, "v1.1.0", time.Now()); got != "" || err != nil {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	feed, key := publish(t)
	t.Setenv("XDG_CACHE_HOME", key) // a file: the time of the request could not be recorded
	if got, err := engine.NewerRelease(t.Context(), configureFeed(t, feed, key), "v1.1.0", time.Now()); got != "" || err == nil {
		t.Errorf("no cache: %q, %v", got, err)
	}
	select {
	case path := <-requests:
		t.Errorf("a request for %s", path)
	default:
	}
}
