package podmain

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestReadable(t *testing.T) {
	var b bytes.Buffer
	log := slog.New(slog.NewJSONHandler(&b, &slog.HandlerOptions{ReplaceAttr: Readable}))
	log.Info("node drained", "took", 90*time.Second, "pods", 3)
	if got := b.String(); !strings.Contains(got, `"took":"1m30s","pods":3`) {
		t.Errorf("logged %s", got)
	}
}

func TestAccess(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, []byte(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://api.example.com:6443"}}]
contexts: [{name: x, context: {cluster: c}}]
current-context: x
`), 0o600); err != nil {
		t.Fatal(err)
	}
	if c, err := Access(file); err != nil || c.Host != "https://api.example.com:6443" {
		t.Errorf("Access returned %v, %v", c, err)
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := Access(""); err == nil {
		t.Error("Access outside of a pod returned no error")
	}
}
