package console

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/charmbracelet/x/ansi"

	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/distribution"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
)

// kubeconfigFake is a kubeconfig whose clusters have fixed answers. Contexts whose name begins
// with silent never answer.
type kubeconfigFake struct {
	looked, opened []string
	checked        []string // with " dry-run"
	said           string
	checkErr       error
}

func (k *kubeconfigFake) clusters(list ...cluster.Context) *Clusters {
	return &Clusters{
		List: list, Answer: 1500 * time.Millisecond, Parallel: 4,
		Look: func(ctx context.Context, name string) check.Glance {
			if strings.HasPrefix(name, "silent") {
				<-ctx.Done()
				return check.Glance{Context: name, State: check.GlanceUnreachable, Problem: "no answer in time"}
			}
			return check.Glance{
				Context: name, State: check.GlanceReachable, Kubernetes: "v1.35.4", Distribution: distribution.Distribution{Name: "kubeadm", Title: "kubeadm"},
				Nodes: []check.NodeGlance{{Name: "a", Ready: true}, {Name: "b"}}, Findings: []plan.Finding{{ID: "nodes-not-ready", Severity: plan.Warn, Title: "1 node is not Ready\x1b[31m"}},
			}
		},
		Check: func(_ context.Context, name string, dryRun bool, emit func(plan.Event)) (check.ClusterCheck, error) {
			k.checked = append(k.checked, strings.TrimSpace(name+map[bool]string{true: " dry-run"}[dryRun]))
			emit(plan.Event{Kind: plan.KindCheck, Text: "nodes read"})
			var found []plan.Finding
			for i := range 40 {
				found = append(found, plan.Finding{ID: "pdb-room", Severity: plan.Block, Source: "disruption", Title: fmt.Sprintf("budget %d", i)})
			}
			return check.ClusterCheck{Source: check.SourceCluster, Name: name, Kubernetes: "v1.35.4", Target: "v1.36.0", Hops: []check.HopCheck{{From: "v1.35.4", To: "v1.36.0", Findings: found}}}, k.checkErr
		},
		Guarded:    func(name, _ string) bool { return strings.HasPrefix(name, "prod") },
		Opened:     func(name string) error { k.opened = append(k.opened, name); return nil },
		PluginText: func() string { s := k.said; k.said = ""; return s },
	}
}

func contextsFake(names ...string) (out []cluster.Context) {
	for _, n := range names {
		x := cluster.Context{Name: n, Server: "https://" + n + ".example"}
		if strings.HasPrefix(n, "eks") {
			x.Plugin = "aws"
		}
		out = append(out, x)
	}
	return out
}

func clustersStage(t *testing.T, k *Clusters, w, h int) *stage {
	t.Helper()
	return newStage(t, &enginefake.Engine{}, term.Display{}, w, h, func(d *consoleDeps) {
		look := k.Look
		d.Clusters = k
		k.Look = func(ctx context.Context, name string) check.Glance { return look(ctx, name) }
	})
}

func text(s *stage) string { return ansi.Strip(s.c.View()) }

// Clusters that never answer do not delay the others, and end with their deadline.
func TestClustersAnswerWithinTheirDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &kubeconfigFake{}
		s := clustersStage(t, k.clusters(contextsFake("silent-0", "silent-1", "dev", "eks", "prod-eu", "silent-2")...), 80, 24)
		began := time.Now()
		if got := text(s); !strings.Contains(got, "silent-0") { // the terminal draws it before Init
			t.Errorf("the first frame:\n%s", got)
		}
		s.do(s.c.Init())
		s.settle()
		got := text(s)
		if !strings.Contains(got, "2 reachable, 3 waiting, 1 not queried") || !strings.Contains(got, "needs its credential plugin: press Enter") || strings.Contains(got, "\x1b") {
			t.Errorf("before the deadline:\n%s", got)
		}
		time.Sleep(1500*time.Millisecond - time.Since(began))
		s.settle()
		if got := text(s); !strings.Contains(got, "2 reachable, 3 not reachable, 1 not queried") || time.Since(began) > 2*time.Second {
			t.Errorf("after %s:\n%s", time.Since(began), got)
		}
	})
}

func TestTwoHundredContextsScroll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var names []string
		for i := range 200 {
			names = append(names, fmt.Sprintf("dev-%03d", i))
		}
		k := &kubeconfigFake{}
		for _, size := range [][2]int{{80, 24}, {60, 16}, {120, 40}} {
			s := clustersStage(t, k.clusters(contextsFake(names...)...), size[0], size[1])
			s.do(s.c.Init())
			s.c.View()
			s.settle()
			s.c.View()
			s.settle()
			s.view([]string{"G"})
			if got := text(s); !strings.Contains(got, "dev-199") || strings.Contains(got, "dev-000") || !strings.Contains(got, "of 200") {
				t.Errorf("the end of the list:\n%s", got)
			}
			s.view([]string{"/", "1", "5", "0", "enter"})
			if x := s.c.clusters.selected(); x == nil || x.Name != "dev-150" {
				t.Errorf("filter selects %+v", x)
			}
			for _, l := range strings.Split(text(s), "\n") {
				if term.Width(l) > size[0] {
					t.Errorf("%d columns in a window of %d: %q", term.Width(l), size[0], l)
				}
			}
			s.press("esc", "g")
			if x := s.c.clusters.selected(); x == nil || x.Name != "dev-000" {
				t.Errorf("without the filter: %+v", x)
			}
		}
	})
}

// The plugin of a context runs only when the user opens the context. Its messages are shown
// without control characters.
func TestPluginRunsForTheOpenedContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &kubeconfigFake{said: "log in at \x1b[31mhttps://login", checkErr: &plan.Error{Op: "read the cluster", Err: errors.New("no credentials"), Remedy: "log in"}}
		all := k.clusters(contextsFake("dev", "eks")...)
		look := all.Look
		all.Look = func(ctx context.Context, name string) check.Glance {
			k.looked = append(k.looked, name)
			return look(ctx, name)
		}
		s := clustersStage(t, all, 80, 24)
		s.do(s.c.Init())
		s.c.View()
		s.settle()
		s.view([]string{"r", "j"})
		if slices.Contains(k.looked, "eks") || len(k.checked) > 0 {
			t.Fatalf("the list queried %q, checked %q", k.looked, k.checked)
		}
		s.view([]string{"enter"})
		s.settle()
		if got := text(s); !strings.Contains(got, "no credentials") || !strings.Contains(got, "log in at") || strings.Contains(got, "\x1b") {
			t.Errorf("the failed check:\n%s", got)
		}
		k.checkErr = nil
		s.view([]string{"r"})
		s.settle()
		s.press("esc")
		if got := text(s); !strings.Contains(got, "40 blocking, 0 warn") || !slices.Equal(k.opened, []string{"eks"}) {
			t.Errorf("opened %q:\n%s", k.opened, got)
		}
	})
}

// A guarded cluster has a frame, and takes no request that others can notice until its name is
// typed. Leaving the screen guards it again.
func TestGuardedClusterIsReadOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, size := range [][2]int{{80, 24}, {60, 16}} {
			k := &kubeconfigFake{}
			s := clustersStage(t, k.clusters(contextsFake("prod-eu")...), size[0], size[1])
			s.do(s.c.Init())
			s.c.View()
			s.settle()
			s.c.View()
			s.settle()
			if got := text(s); !strings.Contains(got, "GUARDED") {
				t.Errorf("the list does not mark it:\n%s", got)
			}
			s.view([]string{"enter"})
			s.settle()
			got := text(s)
			if !strings.Contains(got, "GUARDED: READ-ONLY") || !strings.Contains(got, "guarded: read-only until its name is typed") {
				t.Errorf("no frame:\n%s", got)
			}
			for _, l := range strings.Split(got, "\n") {
				if term.Width(l) > size[0] {
					t.Errorf("%d columns in a window of %d: %q", term.Width(l), size[0], l)
				}
			}
			s.view([]string{"d"})
			if !strings.Contains(s.c.note, "guarded") {
				t.Errorf("note %q", s.c.note)
			}
			s.view([]string{"U", "p", "r", "o", "d", "enter", "d"})
			if want := []string{"prod-eu"}; !slices.Equal(k.checked, want) {
				t.Fatalf("with a part of the name: checks %q", k.checked)
			}
			s.view([]string{"U", "p", "r", "o", "d", "-", "e", "u", "enter", "d"})
			s.settle()
			if want := []string{"prod-eu", "prod-eu dry-run"}; !slices.Equal(k.checked, want) || !strings.Contains(text(s), "GUARDED: UNLOCKED") {
				t.Errorf("checks %q, want %q:\n%s", k.checked, want, text(s))
			}
			s.view([]string{"esc", "enter"})
			if got := text(s); !strings.Contains(got, "GUARDED: READ-ONLY") {
				t.Errorf("opened again:\n%s", got)
			}
		}
	})
}
