package engine_test

import (
	"go/build"
	"slices"
	"strings"
	"testing"
)

// imports is what each package below engine may import of this module. Arrows go one way: a
// package of a later row imports packages of earlier rows, and none imports engine.
var imports = []struct {
	room    string
	allowed []string
}{
	{"words", nil},
	{"plan", []string{"plain", "version", "words"}},
	{"distribution", nil},
	{"backup", nil},
	{"sshhost", []string{"plain", "plan"}},
	{"callhome", []string{"callhome/caller", "plan", "provenance", "sshhost"}},
	{"callhome/caller", []string{"internal/delay"}},
	{"machinecheck", []string{"cloud", "cloud/machines", "plan", "sshhost", "words"}},
	{"enrol", []string{"assets", "attestation", "attestation/authority", "plan", "sshhost", "words"}},
	{"adopt", []string{"cloud", "cloud/machines", "distribution", "plan", "version", "words"}},
	{"preferences", []string{"plan", "words"}},
	{"cluster", []string{"assets", "attestation", "cloud", "component", "plan", "version"}},
	{"lifecycle", []string{"version"}},
	{"compat", []string{"cluster", "lifecycle", "plan", "release", "version", "words"}},
	{"registry", []string{"component/componentproto"}},
	{"infra", []string{"cloud", "cloud/section", "plan", "version", "words"}},
	{"mirror", []string{"chart", "registry", "release", "internal/ocipack"}},
	{"workspace", []string{"assets", "attestation", "attestation/authority", "backup", "cloud", "cloud/machines", "cloud/providers", "cloud/section", "kubeadm", "plan", "registry", "release", "version", "words"}},
	{"conformance", []string{"plan"}},
	{"secretscan", nil},
	{"support", []string{"cluster", "plan", "secretscan", "words", "workspace"}},
	{"rollout", []string{"cloud", "cloud/providers", "cluster", "plan", "version", "words"}},
	{"check", []string{"assets", "attestation", "chart", "cloud", "cloud/machines", "cloud/providers", "cluster", "compat", "component", "distribution", "lifecycle", "plan", "registry", "release", "rollout", "version", "words", "workspace"}},
}

func TestRoomsImportOneWay(t *testing.T) {
	for _, tt := range imports {
		t.Run(tt.room, func(t *testing.T) {
			p, err := build.ImportDir(tt.room, 0)
			if err != nil {
				t.Fatal(err)
			}
			for _, path := range p.Imports {
				ours, is := strings.CutPrefix(path, "constellation/")
				if !is {
					continue
				}
				if name := strings.TrimPrefix(ours, "engine/"); !slices.Contains(tt.allowed, name) {
					t.Errorf("package engine/%s imports %s, which the table does not allow", tt.room, path)
				}
			}
		})
	}
}

// TestPureRooms keeps files, network and processes out of packages that only compute.
func TestPureRooms(t *testing.T) {
	for _, room := range []string{"words", "plan", "lifecycle", "compat"} {
		t.Run(room, func(t *testing.T) {
			p, err := build.ImportDir(room, 0)
			if err != nil {
				t.Fatal(err)
			}
			for _, path := range p.Imports {
				if path == "os" || path == "os/exec" || path == "io" || path == "net" || strings.HasPrefix(path, "net/http") || path == "log/slog" {
					t.Errorf("package engine/%s imports %s", room, path)
				}
			}
		})
	}
}
