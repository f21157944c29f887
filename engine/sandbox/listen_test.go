package sandbox

import (
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"constellation/engine/sandbox/simulated"
)

// Addresses of machines come from the name of the sandbox. Two sandboxes of one name can run on one
// computer, as those of two users do, and two names can have the same first choice.
func TestNoTwoSandboxesHaveTheSameAddresses(t *testing.T) {
	start := func(dirs Dirs, st *state) (listeners, error) {
		t.Helper()
		if err := os.MkdirAll(dirs.of(st.Name), privateDirMode); err != nil {
			t.Fatal(err)
		}
		host := simulated.NewHost(dirs.of(st.Name), st.Name, dirs.Cache, slog.New(slog.DiscardHandler))
		l, err := (&daemon{dirs: dirs, name: st.Name, host: host, log: slog.New(slog.DiscardHandler)}).listen(t.Context(), st)
		if err == nil {
			t.Cleanup(l.close)
		}
		return l, err
	}
	fresh := func() *state {
		st := newState("twin", t.TempDir(), time.Now())
		st.Simulated, st.Nodes = true, simulated.Nodes("twin")
		return st
	}
	dirs := func() Dirs { return Dirs{Cache: t.TempDir(), State: t.TempDir()} }

	first, second, at := fresh(), fresh(), dirs()
	l, err := start(dirs(), first)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := start(at, second); err != nil || second.Nodes == first.Nodes || second.Nodes.Masked() != second.Nodes {
		t.Fatalf("beside a sandbox at %s the second one is at %s: %v", first.Nodes, second.Nodes, err)
	}
	if kept, err := readState(at.of("twin", stateName)); err != nil || kept.Nodes != second.Nodes {
		t.Errorf("the state of the second has other addresses than %s: %+v, %v", second.Nodes, kept, err)
	}
	// Machines have their addresses now. The first sandbox can start there again, and nowhere else.
	l.close()
	again := *first
	if l, err = start(dirs(), &again); err != nil || again.Nodes != first.Nodes {
		t.Fatalf("started again at %s, not at %s: %v", again.Nodes, first.Nodes, err)
	}
	if _, err := start(dirs(), first); err == nil || !strings.Contains(err.Error(), "no others will do") {
		t.Errorf("two sandboxes have machines at %s: %v", first.Nodes, err)
	}
	l.close()

	// Nothing listens for a sandbox that is stopped. Its state has its addresses.
	here := dirs()
	stopped := newState("triplet", t.TempDir(), time.Now())
	stopped.Simulated, stopped.Nodes, stopped.KubernetesPort = true, simulated.Nodes("twin"), 20000
	if err := os.MkdirAll(here.of(stopped.Name), privateDirMode); err != nil {
		t.Fatal(err)
	}
	if err := stopped.write(here.of(stopped.Name, stateName)); err != nil {
		t.Fatal(err)
	}
	third := fresh()
	if _, err := start(here, third); err != nil || third.Nodes == stopped.Nodes {
		t.Errorf("beside a stopped sandbox at %s the new one is at %s: %v", stopped.Nodes, third.Nodes, err)
	}
}
