package engine_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"constellation/engine/attestation/certifier/signer"
	"constellation/engine/workspace"
)

// TestInitGivesKeysOfTheCertifier makes a cluster, one with the master secret of a lost one, and one of a cloud without certifiers.
func TestInitGivesKeysOfTheCertifier(t *testing.T) {
	old := workspace.MasterSecret{Key: bytes.Repeat([]byte{1}, 32), Salt: bytes.Repeat([]byte{2}, 32), Certifier: 3}
	for _, tt := range []struct {
		name       string
		has        bool
		secret     *workspace.MasterSecret // that is there
		generation uint32                  // 0: no keys
	}{
		{name: "a new cluster", has: true, generation: 1},
		{name: "in the place of a lost one", has: true, secret: &old, generation: 3},
		{name: "a cloud without certifiers"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, _ := moonWith(t, tt.has)
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
			got := s.machines[0].certifierKeys
			if s.state().ClusterValues.Certifier != tt.has || (len(got) > 0) != tt.has {
				t.Fatalf("the state says %v, and the machine got %d bytes", s.state().ClusterValues.Certifier, len(got))
			}
			if !tt.has {
				return
			}
			m, err := w.MasterSecret()
			if err != nil {
				t.Fatal(err)
			}
			owner, err := signer.NewOwner(m.CertifierSecret())
			if err != nil {
				t.Fatal(err)
			}
			want, err := owner.Keys(tt.generation)
			if err != nil {
				t.Fatal(err)
			}
			// Certificates of authorities are signed at random: the keys alone are the same.
			key := func(b []byte) (out struct {
				Generation uint32
				Key        []byte
			},
			) {
				if err := json.Unmarshal(b, &out); err != nil {
					t.Fatal(err)
				}
				return out
			}
			b, err := want.Encode()
			if err != nil {
				t.Fatal(err)
			}
			if a, b := key(got), key(b); a.Generation != tt.generation || !bytes.Equal(a.Key, b.Key) || len(a.Key) != 32 {
				t.Errorf("generation %d, want %d; the same key: %t", a.Generation, b.Generation, bytes.Equal(a.Key, b.Key))
			}
			// Only the machine got the key.
			text, err := json.Marshal(events)
			if err != nil {
				t.Fatal(err)
			}
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
				if bytes.Contains(f, []byte(base64.StdEncoding.EncodeToString(key(got).Key))) {
					t.Error("the key is in events, in the log or in the workspace")
				}
			}
		})
	}
}
