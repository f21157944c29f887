package sandbox

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"constellation/engine/cloud/sandboxapi"
)

func TestStateIsKeptAndPrivate(t *testing.T) {
	file := filepath.Join(t.TempDir(), "state.json")
	s := newState("demo", "/work", time.Now().Round(0))
	s.Token, s.KubernetesPort = "t", 6443
	if _, err := s.add(s.group(sandboxapi.WorkerGroup)); err != nil {
		t.Fatal(err)
	}
	if err := s.write(file); err != nil {
		t.Fatal(err)
	}
	got, err := readState(file)
	if err != nil || !reflect.DeepEqual(got, s.clone()) {
		t.Errorf("got %+v, %v", got, err)
	}
	if info, _ := os.Stat(file); info.Mode().Perm() != 0o600 {
		t.Errorf("mode %s", info.Mode())
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(file), ".*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestForeignStateIsRefused(t *testing.T) {
	dir := t.TempDir()
	for name, tt := range map[string]struct {
		content string
		want    error
		text    string
	}{
		"absent.json": {content: "", want: fs.ErrNotExist, text: "absent.json"},
		"newer.json":  {content: `{"schema":99}`, want: errForeignState, text: "schema 99"},
		"cut.json":    {content: `{"schema":1,"na`, want: nil, text: "unexpected end"},
	} {
		file := filepath.Join(dir, name)
		if tt.content != "" {
			os.WriteFile(file, []byte(tt.content), 0o600)
		}
		_, err := readState(file)
		if err == nil || tt.want != nil && !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAddressesAreUniqueUntilTheyRunOut(t *testing.T) {
	s := newState("demo", "/work", time.Now())
	g := s.group(sandboxapi.WorkerGroup)
	seen := map[string]bool{}
	for n := range lastIndex - firstIndex + 1 {
		i, err := s.add(g)
		if err != nil {
			t.Fatalf("machine %d: %v", n, err)
		}
		if seen[i.ip().String()] || seen[i.podCIDR().String()] || i.ip() == s.gateway() {
			t.Fatalf("%s has %s and %s", i.Name, i.ip(), i.podCIDR())
		}
		seen[i.ip().String()], seen[i.podCIDR().String()] = true, true
	}
	if _, err := s.add(g); !errors.Is(err, ErrConflict) {
		t.Errorf("one too many: %v", err)
	}
	freed := s.Instances[7].Index
	s.Instances = append(s.Instances[:7], s.Instances[8:]...)
	if i, err := s.add(g); err != nil || i.Index != freed {
		t.Errorf("after one left: %+v, %v", i, err)
	}
}
