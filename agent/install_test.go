//go:build linux

package agent

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"constellation/engine/component"
)

// A server that sends a little at a time cannot keep a machine in an upgrade.
func TestInstallHasADeadline(t *testing.T) {
	mirror := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "1000000")
		_, _ = w.Write([]byte("a little"))
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	defer mirror.Close()
	u := &upgrader{host: Host{Root: t.TempDir(), InstallTimeout: 200 * time.Millisecond}, log: slog.New(slog.DiscardHandler)}
	err := u.install(t.Context(), component.List{{
		Name: "kubeadm", URL: mirror.URL, Digest: "sha256:" + strings.Repeat("0", 64), Path: "/usr/local/bin/kubeadm",
	}})
	if err == nil || !strings.Contains(err.Error(), "not installed within 200ms") {
		t.Errorf("error %v", err)
	}
}
