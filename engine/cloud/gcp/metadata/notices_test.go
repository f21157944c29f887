package metadata_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/wire"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/engine/cloud/gcp/metadata"
	"constellation/engine/cloud/notice"
)

// TestNotices reads what an emulated metadata server announces.
func TestNotices(t *testing.T) {
	t.Parallel()
	c, err := gcptest.New(func(p string) { t.Error(p) }, gcptest.Options{Fleet: &wire.Records{}})
	if err != nil {
		t.Fatal(err)
	}
	key := c.Seed(c.AddGroup(gcptest.Zones[0], "workers", cloud.Worker, c.AddImage("one", "v1.0.0"), gcptest.UID, nil), 1)[0]
	id, _ := cloud.SplitKey(key)
	machine := id[strings.LastIndexByte(id, '/')+1:]
	server := httptest.NewServer(c.MetadataOf(machine))
	defer server.Close()
	defer server.CloseClientConnections()
	ctx, cancel := context.WithCancel(t.Context())
	told, ended := make(chan notice.Notice), make(chan struct{})
	go func() {
		defer close(ended)
		metadata.Open(server.URL).Notices(ctx, func(n notice.Notice) { told <- n }, func(err error) {
			if ctx.Err() == nil {
				t.Error(err)
			}
		})
	}()
	want := func(reason notice.Reason, act func() error) {
		t.Helper()
		if act != nil {
			if err := act(); err != nil {
				t.Fatal(err)
			}
		}
		select {
		case n := <-told:
			if n.Reason != reason || n.Reason != "" && n.Within < 30*time.Second {
				t.Errorf("announced %+v, want %q", n, reason)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("%q was not announced", reason)
		}
	}
	maintain := func(event string) func() error { return func() error { return c.Maintain(machine, event) } }
	want("", nil)
	want(notice.HostMigrates, maintain(gcptest.Migrate))
	want(notice.HostTerminates, maintain(gcptest.Terminate))
	want(notice.Preempted, func() error { return c.Preempt(machine) }) // it counts more
	if err := c.Maintain(machine, gcptest.NoMaintenance); err != nil {
		t.Fatal(err)
	}
	select {
	case n := <-told:
		t.Errorf("announced %+v again", n)
	case <-time.After(100 * time.Millisecond):
	}
	cancel()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("it does not end with its context")
	}
}

// TestNoticesOfBadServers has servers that fail or lie. Nothing is announced until they answer rightly.
func TestNoticesOfBadServers(t *testing.T) {
	t.Parallel()
	for name, serve := range map[string]http.HandlerFunc{
		"fails": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Metadata-Flavor", "Google")
			w.WriteHeader(503)
		},
		"has no entry": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Metadata-Flavor", "Google")
			http.NotFound(w, r)
		},
		"is not Google's": func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("TRUE")) },
		"has no versions": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Metadata-Flavor", "Google")
			_, _ = w.Write([]byte("TRUE"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var (
				mu     sync.Mutex
				good   bool
				failed []string
			)
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				mu.Lock()
				now := good
				mu.Unlock()
				if !now {
					serve(w, r)
					return
				}
				w.Header().Set("Metadata-Flavor", "Google")
				w.Header().Set("ETag", "1")
				_, _ = w.Write([]byte("TRUE"))
			}))
			defer server.Close()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			told, wrong := make(chan notice.Notice, 1), make(chan struct{}, 16)
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				metadata.Open(server.URL).Notices(ctx, func(n notice.Notice) { told <- n }, func(err error) {
					mu.Lock()
					failed = append(failed, err.Error())
					mu.Unlock()
					wrong <- struct{}{}
				})
			}()
			for range 2 { // both entries
				<-wrong
			}
			select {
			case n := <-told:
				t.Errorf("announced %+v", n)
			default:
			}
			mu.Lock()
			good = true
			mu.Unlock()
			if n := <-told; n.Reason != notice.Preempted {
				t.Errorf("announced %+v", n)
			}
			cancel()
			<-ended
			mu.Lock()
			defer mu.Unlock()
			if len(failed) > 3 || slices.Contains(failed, "") {
				t.Errorf("reported %q, want one error for each entry", failed)
			}
		})
	}
}
