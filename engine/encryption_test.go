package engine_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"constellation/engine/kms"
	"constellation/engine/workspace"
)

// TestInitEncryptsSecrets makes clusters with keys for their API servers, and without.
func TestInitEncryptsSecrets(t *testing.T) {
	old := workspace.MasterSecret{Key: bytes.Repeat([]byte{1}, 32), Salt: bytes.Repeat([]byte{2}, 32), KMS: 3}
	for _, tt := range []struct {
		name       string
		config     string                  // is added to the configuration
		secret     *workspace.MasterSecret // that is there
		oldImage   bool                    // the bootstrapper of the image lacks a key service
		generation uint32                  // of the keys; 0: none
		encrypts   bool
		warning    string
	}{
		{name: "a new cluster", generation: 1, encrypts: true},
		{name: "in the place of a lost one", secret: &old, generation: 3, encrypts: true},
		{name: "as the configuration demands", config: "encryptSecrets: true\n", generation: 1, encrypts: true},
		{name: "switched off", config: "encryptSecrets: false\n"},
		{name: "an image without a key service", oldImage: true, generation: 1, warning: "the image of the machine has no key service"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStage(t, 1, 2)
			s.machines[0].old = tt.oldImage
			if tt.config != "" {
				s.edit(workspace.ConfigFile, "\nserviceCIDR:", "\n"+tt.config+"serviceCIDR:")
			}
			w, err := workspace.OpenWorkspace(s.dir)
			if err != nil {
				t.Fatal(err)
			}
			if tt.secret != nil {
				if err := w.WriteMasterSecret(*tt.secret); err != nil {
					t.Fatal(err)
				}
			}
			events, _ := s.mustInit()
			got := s.machines[0].kmsKeys
			if (len(got) > 0) != (tt.generation > 0) || s.state().ClusterValues.EncryptsSecrets != tt.encrypts {
				t.Fatalf("the machine got %d bytes, and the state says %t", len(got), s.state().ClusterValues.EncryptsSecrets)
			}
			text, err := json.Marshal(events)
			if err != nil {
				t.Fatal(err)
			}
			if tt.warning != "" && !strings.Contains(string(text), tt.warning) {
				t.Errorf("no event has %q", tt.warning)
			}
			chart := s.cluster.Values("constellation-system", "constellation-services")
			service, _ := chart["joinservice"].(map[string]any)
			if socket, _ := service["kms"].(string); (socket == kms.KeysSocket) != tt.encrypts {
				t.Errorf("the chart of the services has the socket %q", socket)
			}
			if tt.generation == 0 {
				return
			}
			m, err := w.MasterSecret()
			if err != nil {
				t.Fatal(err)
			}
			want, err := kms.First(m.KMSSecret(), tt.generation)
			if err != nil {
				t.Fatal(err)
			}
			if k, err := kms.Parse(got); err != nil || k.ID() != want.ID() {
				t.Errorf("the keys are %v, %v; want %s", k, err, want.ID())
			}
			// Only the machine got the secret.
			canary := []byte(base64.StdEncoding.EncodeToString(m.KMSSecret()))
			files := [][]byte{text, s.log.Bytes()}
			all, err := filepath.Glob(filepath.Join(s.dir, "*"))
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range all {
				if b, err := os.ReadFile(name); err == nil {
					files = append(files, b)
				}
			}
			for _, f := range files {
				if bytes.Contains(f, canary) {
					t.Error("the secret is in events, in the log or in the workspace")
				}
			}
			if !bytes.Contains(got, canary) {
				t.Error("the search is for something else than the machine gets")
			}
		})
	}
}
