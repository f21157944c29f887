package release

import (
	"errors"
	"net/http"
	"testing"
)

// Weak point R22 of the old design: a channel is a URL, any answer from 200 to 399 is trusted,
// and the last path element after redirects is the latest version. TestWeakPointR22 of package
// operator covers an invalid target version.
func TestWeakPointR22AnswersAreNotBelieved(t *testing.T) {
	key, stranger := newTestKey(t, "tests"), newTestKey(t, "stranger")
	dir := feed(t, key)
	unsigned := func(b []byte) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path != "/"+indexName {
				return false
			}
			_, _ = w.Write(b)
			return true
		}
	}
	for _, tt := range []struct {
		name   string
		answer func(http.ResponseWriter, *http.Request) bool
	}{
		{"it leads to a version", func(w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path == "/releases/tag/v9.9.9" {
				_, _ = w.Write([]byte("v9.9.9"))
				return true
			}
			http.Redirect(w, r, "/releases/tag/v9.9.9", http.StatusFound)
			return true
		}},
		{"a page that greets everybody", func(w http.ResponseWriter, _ *http.Request) bool {
			_, _ = w.Write([]byte("<html>v9.9.9</html>"))
			return true
		}},
		{"nothing, with success", func(w http.ResponseWriter, _ *http.Request) bool {
			w.WriteHeader(http.StatusNoContent)
			return true
		}},
		{"an index that was changed", unsigned(append(read(t, dir, indexName), ' '))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := serve(t, dir)
			s.answer(tt.answer)
			if f, err := Open(t.Context(), s.URL, Options{Keys: []Key{key.Key}, Now: at(today), Cache: t.TempDir()}); err == nil {
				t.Errorf("believed: %+v", f)
			}
		})
	}
	// The same feed, signed by an untrusted and by the trusted key.
	s := serve(t, dir)
	if _, err := Open(t.Context(), s.URL, Options{Keys: []Key{stranger.Key}, Now: at(today), Cache: t.TempDir()}); err == nil || errors.Is(err, ErrUnreachable) {
		t.Errorf("signed by a stranger: %v", err)
	}
	if _, err := Open(t.Context(), s.URL, Options{Keys: []Key{key.Key}, Now: at(today), Cache: t.TempDir()}); err != nil {
		t.Errorf("signed as it should be: %v", err)
	}
}
