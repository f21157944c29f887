package console

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/charmbracelet/x/ansi"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
)

func guarded(d *consoleDeps) {
	d.Cluster, d.Guarded = "demo", func(name string) bool { return name == "demo" }
}

// TestLockedConsoleHasNoEffects presses all keys of all scenes of a guarded cluster.
func TestLockedConsoleHasNoEffects(t *testing.T) {
	for _, sc := range slices.Concat(scenes, checkScenes, backupScenes, upgradeScenes, watchScenes, recordedScenes) {
		t.Run(sc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := sc.show(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
				if s.c.deps.Clusters != nil {
					return // its clusters have guards of their own
				}
				s.c.deps.Cluster, s.c.deps.Guarded = "demo", func(string) bool { return true }
				s.eng.Ran, s.eng.Changed = 0, cluster.RolloutChange{}
				if s.eng.Plan == nil {
					s.eng.Plan = enginefake.HopPlan()
				}
				s.at(time.Hour) // later than the delays of confirmations
				for _, b := range s.c.bindings() {
					for _, k := range b.keys {
						if slices.Contains([]string{"q", "esc", "ctrl+c", "U"}, k) {
							continue
						}
						s.eng.CheckedAs.NoDryRun, s.eng.CheckedAs.NoPreflight, s.eng.AppliedAs.NoDryRun = true, true, true
						s.view([]string{k, "enter", "y"})
						s.settle()
						if r := s.eng; r.Ran != 0 || r.Changed != (cluster.RolloutChange{}) || !r.CheckedAs.NoDryRun && !r.CheckedAs.NoPreflight || !r.AppliedAs.NoDryRun {
							t.Fatalf("after %s: %d runs, change %+v, check %+v, plan %+v", k, r.Ran, r.Changed, r.CheckedAs, r.AppliedAs)
						}
					}
				}
			})
		})
	}
}

// TestGuardedFramesFit draws the frame of a guarded cluster around all scenes.
func TestGuardedFramesFit(t *testing.T) {
	for _, sc := range slices.Concat(scenes, checkScenes, backupScenes, upgradeScenes, watchScenes) {
		t.Run(sc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := sc.show(t, func(e *enginefake.Engine) *stage {
					return newStage(t, e, term.Display{Colours: term.Colours256}, 80, 24)
				})
				if s.c.deps.Clusters != nil {
					return
				}
				s.c.deps.Cluster, s.c.deps.Guarded = "demo", func(string) bool { return true }
				for _, size := range [][2]int{{60, 16}, {80, 24}, {120, 40}, {200, 50}} {
					w, h := size[0], size[1]
					s.c.w, s.c.h = w, h
					frame := s.c.View()
					lines := strings.Split(frame, "\n")
					if len(lines) != h || !strings.Contains(frame, "guarded: read-only") {
						t.Errorf("%dx%d: %d lines:\n%s", w, h, len(lines), ansi.Strip(frame))
					}
					for _, l := range lines {
						plain := ansi.Strip(l)
						if got := ansi.StringWidth(l); got > w || strings.HasPrefix(plain, "┃") && !strings.HasSuffix(plain, "┃") {
							t.Errorf("%dx%d: %d columns: %q", w, h, got, plain)
						}
					}
				}
			})
		})
	}
}

// TestUnlock types the name of a guarded cluster.
func TestUnlock(t *testing.T) {
	typed := func(s *stage, name string) {
		s.press("U")
		for _, r := range name {
			s.press(string(r))
		}
		s.press("enter")
		s.settle()
	}
	t.Run("an upgrade", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newStage(t, hopEngine(t), term.Display{}, 80, 24, guarded)
			upgrades(s)
			if !s.eng.AppliedAs.NoDryRun {
				t.Error("a locked cluster got dry-run requests")
			}
			typed(s, "dem")
			if !s.c.guard.locked() || !strings.Contains(s.c.View(), "that is not the name") {
				t.Errorf("a part of the name unlocks:\n%s", s.c.View())
			}
			typed(s, "demo")
			if s.c.guard.locked() || s.eng.AppliedAs.NoDryRun || !strings.Contains(s.c.View(), "guarded: unlocked") {
				t.Errorf("locked %t, plan %+v:\n%s", s.c.guard.locked(), s.eng.AppliedAs, s.c.View())
			}
		})
	})
	t.Run("an upgrade with --yes", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			e := hopEngine(t)
			s := newStage(t, e, term.Display{}, 80, 24, guarded)
			upgrades(s, func(u *Upgrade) {
				u.yes, u.Request.Acknowledge = true, plan.IDs(plan.ConsentTo(e.Plan, true, nil).Findings)
			})
			if e.Ran != 0 || s.c.screen != s.c.upgradePlan {
				t.Fatalf("ran %d times, shows %s", e.Ran, s.c.screen.title())
			}
			typed(s, "demo")
			if e.Ran != 1 {
				t.Errorf("ran %d times after the name, shows %s", e.Ran, s.c.screen.title())
			}
		})
	})
	t.Run("a partial init", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			events := enginefake.Recorded(t, "taken-up")
			e := &enginefake.Engine{HomeData: enginefake.DemoHome("partial"), Plan: enginefake.PlanIn(t, events), Events: events}
			s := newStage(t, e, term.Display{}, 80, 24, guarded).begin()
			s.settle()
			if e.Ran != 0 || s.c.screen != s.c.initConfirm {
				t.Fatalf("ran %d times, shows %s", e.Ran, s.c.screen.title())
			}
			typed(s, "demo")
			s.c.initConfirm.yes = true
			s.at(time.Minute).press("enter")
			s.settle()
			if e.Ran != 1 {
				t.Errorf("ran %d times", e.Ran)
			}
		})
	})
	t.Run("a rollout", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := rolling(t, 80, 24)
			guarded(&s.c.deps)
			s.press("P", "enter")
			s.settle()
			if s.eng.Changed.Paused != nil || !strings.Contains(s.c.View(), "guarded") {
				t.Errorf("changed %+v:\n%s", s.eng.Changed, s.c.View())
			}
			typed(s, "demo")
			s.press("P", "enter")
			s.settle()
			if s.eng.Changed.Paused == nil {
				t.Errorf("not paused after the name was typed:\n%s", s.c.View())
			}
		})
	})
}
