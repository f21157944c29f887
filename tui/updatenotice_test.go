package tui

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"constellation/engine"
)

// updateFeed serves a feed with a release that is newer than this program. It returns the
// environment of a user and a workspace with that feed.
func updateFeed(t *testing.T) (env []string, workspace string, requests *atomic.Int32) {
	t.Helper()
	dir := t.TempDir()
	from := filepath.Join(dir, "releases")
	if err := os.Mkdir(from, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"v1.0.0.yaml", "v1.1.0.yaml"} {
		b, err := os.ReadFile(filepath.Join("../assets/releases/releases", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(from, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
		if name == "v1.1.0.yaml" {
			b = []byte(strings.NewReplacer("v1.1.0", "v1.2.0", "upgradeFrom: v1.0.0", "upgradeFrom: v1.1.0").Replace(string(b)))
			if err := os.WriteFile(filepath.Join(from, "v1.2.0.yaml"), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	key, err := engine.NewFeedKey(filepath.Join(dir, "feed.key"))
	if err != nil {
		t.Fatal(err)
	}
	feed := filepath.Join(dir, "feed")
	if _, err := engine.BuildFeed(t.Context(), engine.FeedBuild{From: from, Out: feed, KeyFile: key.Private}); err != nil {
		t.Fatal(err)
	}
	requests = &atomic.Int32{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		http.FileServer(http.Dir(feed)).ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	pem, err := os.ReadFile(key.Public)
	if err != nil {
		t.Fatal(err)
	}
	workspace = filepath.Join(dir, "demo")
	if err := os.Mkdir(workspace, 0o755); err != nil {
		t.Fatal(err)
	}
	config := "releases:\n  feed: " + server.URL + "\n  keys: |\n    " + strings.ReplaceAll(strings.TrimSpace(string(pem)), "\n", "\n    ") + "\n"
	if err := os.WriteFile(filepath.Join(workspace, "constellation-conf.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{stream(t, "init"), "FAKE_STAGE=cluster", "XDG_CACHE_HOME=" + filepath.Join(dir, "cache"), "XDG_CONFIG_HOME=" + filepath.Join(dir, "config")}, workspace, requests
}

func TestUpdateNotice(t *testing.T) {
	const notice = "release v1.2.0 is available, this is v1.1.0"
	for _, tt := range []struct {
		name, env, prefs string
		args             []string
	}{
		{name: "CI", env: "CI=true", args: []string{"status"}},
		{name: "a dumb terminal", env: "TERM=dumb", args: []string{"status"}},
		{name: "JSON", args: []string{"status", "-o", "json"}},
		{name: "non-interactive", args: []string{"--non-interactive"}},
		{name: "switched off", prefs: "updateNotice: false\n", args: []string{"status"}},
		{name: "broken preferences", prefs: "updateNotice: [\n", args: []string{"status"}},
		{name: "a verb that is not about a cluster", args: []string{"version"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			env, ws, requests := updateFeed(t)
			if tt.prefs != "" {
				file := filepath.Join(strings.TrimPrefix(env[len(env)-1], "XDG_CONFIG_HOME="), "constellation", "preferences.yaml")
				if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(file, []byte(tt.prefs), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if tt.env != "" {
				env = append(env, tt.env)
			}
			p := startOn(t, 100, 30, env, nil, append([]string{"-C", ws}, tt.args...)...)
			p.ends()
			if n := requests.Load(); n != 0 || strings.Contains(p.output(), notice) {
				t.Errorf("%d requests:\n%s", n, p.output())
			}
		})
	}
	env, ws, requests := updateFeed(t)
	p := startOn(t, 100, 30, env, nil, "-C", ws)
	p.sees("Release v1.2.0 is available: ")
	p.types("q")
	p.ends()
	n := requests.Load()
	p = startOn(t, 100, 30, env, nil, "-C", ws, "status")
	p.ends()
	p.sees(notice)
	if n == 0 || requests.Load() != n {
		t.Errorf("%d requests, then %d", n, requests.Load())
	}
}
