package engine_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// feedError returns the cause and the remedy of an error.
func feedError(t *testing.T, err error) (cause, remedy string) {
	t.Helper()
	var e *plan.Error
	if !errors.As(err, &e) {
		t.Fatalf("%T %v has no remedy", err, err)
	}
	return e.Error(), e.Remedy
}

func TestWhatSaysMoreOfAFeedIsACommandThatWorks(t *testing.T) {
	feed, key := publish(t)
	pem, err := os.ReadFile(key)
	if err != nil {
		t.Fatal(err)
	}
	odd := filepath.Join(t.TempDir(), "my key.pub")
	if err := os.WriteFile(odd, pem, 0o600); err != nil {
		t.Fatal(err)
	}
	// Nothing can be remembered in a cache that is a file.
	t.Setenv("XDG_CACHE_HOME", odd)
	dir := t.TempDir()
	w, err := workspace.OpenWorkspace(dir)
	if err != nil {
		t.Fatal(err)
	}
	l, err := engine.ListReleases(t.Context(), w, engine.FeedRequest{Feed: feed, FeedKeys: []string{key, odd}})
	if err != nil {
		t.Fatal(err)
	}
	if want := "`constellation release verify " + feed + " --feed-key " + key + " --feed-key '" + odd + "'` shows details; "; !strings.HasPrefix(l.Feed.Remedy, want) {
		t.Errorf("remedy %q, want %q", l.Feed.Remedy, want)
	}
	config := "releases:\n  feed: " + feed + "\n  keys: |\n    " + strings.ReplaceAll(strings.TrimSpace(string(pem)), "\n", "\n    ") + "\n"
	if err := os.WriteFile(filepath.Join(dir, workspace.ConfigFile), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	if l, err = engine.ListReleases(t.Context(), w, engine.FeedRequest{}); err != nil {
		t.Fatal(err)
	}
	if want := "copy releases.keys of constellation-conf.yaml into a file feed.pub: then `constellation release verify " + feed + " --feed-key feed.pub` shows details; "; !strings.HasPrefix(l.Feed.Remedy, want) {
		t.Errorf("remedy %q, want %q", l.Feed.Remedy, want)
	}
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	for _, address := range []string{"ftp://releases.example", "http://releases.example", filepath.Join(dir, "nowhere")} {
		l, err := engine.ListReleases(t.Context(), w, engine.FeedRequest{Feed: address, FeedKeys: []string{key}})
		if want := "a feed is at an https address, at an http address of this computer, or in a folder"; err != nil || l.Feed.Problem == "" || !strings.Contains(l.Feed.Remedy, want) {
			t.Errorf("%s: %+v, %v", address, l.Feed, err)
		}
	}
}

func TestKeysThatAreThereStay(t *testing.T) {
	for _, tt := range []struct {
		name  string
		there []string
		want  string
	}{
		{name: "both", there: []string{"feed.key", "feed.key.pub"}, want: "DIR/feed.key and DIR/feed.key.pub are there already"},
		{name: "the private one", there: []string{"feed.key"}, want: "DIR/feed.key is there already"},
		{name: "the public one", there: []string{"feed.key.pub"}, want: "DIR/feed.key.pub is there already"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			for _, name := range tt.there {
				if err := os.WriteFile(filepath.Join(dir, name), []byte("kept"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			_, err := engine.NewFeedKey(filepath.Join(dir, "feed.key"))
			cause, remedy := feedError(t, err)
			want := "make the keys DIR/feed.key and DIR/feed.key.pub: " + tt.want
			if cause = strings.ReplaceAll(cause, dir, "DIR"); cause != want || !strings.HasPrefix(remedy, "pass another file") {
				t.Errorf("got %q, want %q; remedy %q", cause, want, remedy)
			}
			left, err := os.ReadDir(dir)
			if err != nil || len(left) != len(tt.there) {
				t.Errorf("left %v, %v", left, err)
			}
		})
	}
	_, err := engine.NewFeedKey(filepath.Join(t.TempDir(), "nowhere", "feed.key"))
	if cause, remedy := feedError(t, err); !strings.Contains(cause, "no such file or directory") || !strings.Contains(remedy, "in an existing, writable folder") {
		t.Errorf("%q, %q", cause, remedy)
	}
}

func TestUnpublishedReleasesHaveARemedy(t *testing.T) {
	publish(t) // the cache is its own
	dir := t.TempDir()
	k, err := engine.NewFeedKey(filepath.Join(dir, "feed.key"))
	if err != nil {
		t.Fatal(err)
	}
	other, err := engine.NewFeedKey(filepath.Join(dir, "other.key"))
	if err != nil {
		t.Fatal(err)
	}
	put := func(name, content string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return filepath.Dir(path)
	}
	b, err := os.ReadFile("../assets/releases/releases/v1.1.0.yaml")
	if err != nil {
		t.Fatal(err)
	}
	from := put("releases/v1.1.0.yaml", string(b))
	bad := put("bad/v1.1.0.yaml", "version: v1.1.0\n")
	home := put("home/thesis.txt", "the only copy")
	feed := filepath.Join(dir, "feed")
	if _, err := engine.BuildFeed(t.Context(), engine.FeedBuild{From: from, Out: feed, KeyFile: k.Private}); err != nil {
		t.Fatal(err)
	}
	changed := put("changed/v1.1.0.yaml", string(b)+"# more\n")
	for _, tt := range []struct {
		name   string
		build  engine.FeedBuild
		remedy string
	}{
		{name: "an invalid release", build: engine.FeedBuild{From: bad, Out: feed, KeyFile: k.Private}, remedy: "correct the named file and publish again"},
		{name: "an empty folder", build: engine.FeedBuild{From: t.TempDir(), Out: feed, KeyFile: k.Private}, remedy: "`constellation release build --help` lists the files of the folder"},
		{name: "another key", build: engine.FeedBuild{From: from, Out: feed, KeyFile: other.Private}, remedy: "sign with the key that " + feed + " was signed with"},
		{name: "a signer who is not trusted", build: engine.FeedBuild{From: from, Out: feed, KeyFile: k.Private, Trust: []string{other.Public}}, remedy: "name the private key of one that may sign"},
		{name: "a folder of something else", build: engine.FeedBuild{From: from, Out: home, KeyFile: k.Private}, remedy: "name a folder that holds the feed and nothing else"},
		{name: "a folder in no folder", build: engine.FeedBuild{From: from, Out: filepath.Join(dir, "a", "b"), KeyFile: k.Private}, remedy: "that its parent folder exists"},
		{name: "a release that was changed", build: engine.FeedBuild{From: changed, Out: feed, KeyFile: k.Private}, remedy: "restore the published files"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := engine.BuildFeed(t.Context(), tt.build)
			if cause, remedy := feedError(t, err); !strings.Contains(remedy, tt.remedy) {
				t.Errorf("%s: remedy %q, want %q", cause, remedy, tt.remedy)
			}
		})
	}
}

func TestAReleaseWhoseFileIsNotTheOneThatWasPublishedIsNoGoal(t *testing.T) {
	const file = "releases/v1.2.0.yaml"
	remove := func(t *testing.T, path string) {
		t.Helper()
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name    string
		change  func(t *testing.T, path string)
		request check.Request
		path    int    // how many hops
		found   string // the finding about it
		faulty  bool   // a rule of the matrix blocks it
	}{
		{name: "it is as published", change: func(*testing.T, string) {}, request: check.Request{}, path: 2},
		{name: "altered", change: func(t *testing.T, path string) {
			t.Helper()
			b, err := os.ReadFile(path)
			if err == nil {
				b[len(b)/2] ^= 1
				err = os.WriteFile(path, b, 0o644)
			}
			if err != nil {
				t.Fatal(err)
			}
		}, request: check.Request{}, path: 2, found: "not-checked release v1.2.0 is not offered: its file in the feed is unusable: it was altered: its digest differs from the index"},
		{name: "deleted", change: remove, request: check.Request{}, path: 2, found: "not-checked release v1.2.0 is not offered: its file in the feed is unusable: it was altered: it is missing"},
		{name: "deleted, and asked for", change: remove, request: check.Request{Release: v("v1.2.0")}, found: "block release v1.2.0 is not offered: its file in the feed is unusable: it was altered: it is missing", faulty: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			feed, key := publish(t)
			tt.change(t, filepath.Join(feed, file))
			s := newCheckStage(t)
			s.cloud.extra = "v1.2.0"
			tt.request.Feed, tt.request.FeedKeys, tt.request.NoPreflight = feed, []string{key}, true
			c := s.mustCheck(tt.request)
			found, faulty, there := "", false, false
			for _, f := range c.Findings {
				if f.ID == "feed-release" {
					_, why, _ := strings.Cut(f.Detail, file+" of "+feed+": ")
					found += string(f.Severity) + " " + f.Title + ": " + why
					if want := "try again in a minute, in case it was being published; then ask the publisher"; f.Remedy != want {
						t.Errorf("remedy %q, want %q", f.Remedy, want)
					}
				}
				faulty = faulty || f.ID == "faulty" && f.Severity == plan.Block
			}
			for _, h := range c.Path {
				there = there || h.To.Release == "v1.2.0"
			}
			if !strings.HasPrefix(found, tt.found) || (found == "") != (tt.found == "") || there != (tt.found == "") || faulty != tt.faulty || len(c.Path) != tt.path {
				t.Errorf("path of %d that leads there: %t, faulty: %t, finding %q; want a path of %d, finding %q", len(c.Path), there, faulty, found, tt.path, tt.found)
			}
		})
	}
}

func TestAReleaseWhoseFileCannotBeReachedIsNotChecked(t *testing.T) {
	feed, key := publish(t)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/releases/v1.2.0.yaml") {
			http.Error(w, "out of order", http.StatusServiceUnavailable)
			return
		}
		http.FileServer(http.Dir(feed)).ServeHTTP(w, r)
	}))
	defer server.Close()
	s := newCheckStage(t)
	s.cloud.extra = "v1.2.0"
	c := s.mustCheck(check.Request{Feed: server.URL, FeedKeys: []string{key}, NoPreflight: true})
	i := slices.IndexFunc(c.Findings, func(f plan.Finding) bool { return f.ID == "feed-release" })
	if i < 0 || c.Findings[i].Severity != plan.NotChecked || !strings.Contains(c.Findings[i].Detail, "the server answers 503") || c.Findings[i].Remedy == "" {
		t.Fatalf("findings %+v", c.Findings)
	}
	if last := c.Path[len(c.Path)-1]; last.To.Release != "v1.2.0" { // its summary is signed
		t.Errorf("the path ends at %s", last.To)
	}
}
