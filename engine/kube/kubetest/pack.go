package kubetest

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"testing"

	"helm.sh/helm/v3/pkg/action"
)

// PackChart writes a chart as an archive to dir, as `helm package` does, and returns its
// digest. files are by their path in the chart; Chart.yaml must be among them.
func PackChart(t *testing.T, dir, name string, files map[string]string) (digest string) {
	t.Helper()
	from := filepath.Join(t.TempDir(), name)
	for file, content := range files {
		path := filepath.Join(from, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	p := action.NewPackage()
	p.Destination = dir
	out, err := p.Run(from, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	h := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(h[:])
}
