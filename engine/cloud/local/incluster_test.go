package local

import (
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync/atomic"
	"testing"

	"constellation/engine/cloud"
)

func TestInClusterRenewsItsToken(t *testing.T) {
	var valid atomic.Value
	valid.Store("first")
	var asked atomic.Int32
	metadata := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		_ = json.NewEncoder(w).Encode(Token{Token: valid.Load().(string)})
	}))
	defer metadata.Close()
	control := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+valid.Load().(string) {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		_ = json.NewEncoder(w).Encode(GroupList{Groups: []cloud.Group{{ID: GroupID("t", WorkerGroup)}}})
	}))
	defer control.Close()

	c := NewInCluster(NewMetadata(metadata.URL), control.URL)
	for _, token := range []string{"first", "first", "second", "second"} {
		valid.Store(token)
		if g, err := c.Groups(t.Context()); err != nil || len(g) != 1 {
			t.Fatalf("with token %s: %v, %v", token, g, err)
		}
	}
	if n := asked.Load(); n != 2 {
		t.Errorf("asked for a token %d times, want once for each", n)
	}
}

func TestInClusterNeedsNoTokenOnTheHost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "api.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(cloud.Instance{Name: "worker-0", ProviderID: "sandbox://t/worker-0"})
	})}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	c := NewInCluster(NewMetadata("http://127.0.0.1:1"), "unix:"+path)
	if i, err := c.Instance(t.Context(), "sandbox://t/worker-0"); err != nil || i.Name != "worker-0" {
		t.Errorf("%+v, %v", i, err)
	}
}
