package simulated

import (
	"errors"
	"log/slog"
	"os"
	"testing"

	"constellation/engine/sandbox/machine"
)

// A machine is gone after its removal, also if its directory has another name than it. Files of a removed machine would be booted as if it were whole.
func TestRemove(t *testing.T) {
	for what, name := range map[string]string{
		"a short name":                "worker-0",
		"a name of an emulated cloud": "worker-0a3407b3fdb0704e07584c3f-fddf6556299c736b",
	} {
		t.Run(what, func(t *testing.T) {
			h := NewHost(t.TempDir(), "sandbox", "", slog.New(slog.DiscardHandler))
			if err := os.MkdirAll(h.path(name, rootDir), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := (record{Machine: machine.Machine{Name: name}, Made: true}).write(h.path(name)); err != nil {
				t.Fatal(err)
			}
			if err := h.Remove(t.Context(), name); err != nil {
				t.Fatal(err)
			}
			if m, err := h.Machine(name); !errors.Is(err, machine.ErrNotFound) {
				t.Errorf("after its removal, the machine is %+v, %v", m, err)
			}
			if l, err := os.ReadDir(h.path()); err != nil || len(l) > 0 {
				t.Errorf("%v are left, %v", l, err)
			}
		})
	}
}
