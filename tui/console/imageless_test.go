package console

import (
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
)

// imagelessScenes are the screens of a cluster in a cloud that selects no image.
var imagelessScenes = []scene{
	{"imageless-home", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageCluster), StatusData: enginefake.DemoStatus(), CheckData: enginefake.CheckIn(t, "imageless")}
		return s(e.WithoutImages()).begin()
	}},
	{"imageless-machines", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := enginefake.DemoStatus()
		st.Nodes[1].State, st.Nodes[1].Message = plan.NodeNotReady, "container runtime is down"
		st.Machines = []engine.Machine{{Name: "worker-2", Group: "workers", Role: "worker", State: plan.NodeBooting, IP: "10.42.0.6"}}
		st.Health = []plan.Finding{{ID: "nodes", Severity: plan.Warn, Title: "1 of 3 nodes is not ready", Detail: "worker-0 since 4m"}}
		return s((&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageCluster), StatusData: st}).WithoutImages()).begin()
	}},
	{"imageless-config", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return s((&enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady)}).WithoutImages()).begin()
	}},
	{"imageless-init", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := &enginefake.Engine{HomeData: enginefake.DemoHome(engine.StageReady), Plan: enginefake.PlanIn(t, enginefake.Recorded(t, "init"))}
		e.Plan.Findings = quorumFindings(t)
		st := s(e.WithoutImages()).begin()
		st.do(st.c.wizard.makePlan())
		st.settle()
		return st
	}},
	{"imageless-check", checkShown("imageless")},
	{"imageless-check-path", checkShown("imageless", "tab")},
	{"imageless-check-changes", checkShown("imageless", "tab", "tab")},
	{"imageless-plan", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return upgrades(s(hopEngine(t).WithoutImages()))
	}},
	{"imageless-plan-end", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return upgrades(s(hopEngine(t).WithoutImages())).press("G")
	}},
	{"imageless-question", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return upgrades(s(hopEngine(t).WithoutImages())).press("enter", "local-data", "enter")
	}},
	{"imageless-watch", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := (&enginefake.Engine{Watched: enginefake.Until(enginefake.RolloutOf(t, 5), 70*time.Second)}).WithoutImages()
		return watching(s(e), e.Watched, 70*time.Second)
	}},
	{"imageless-watch-node", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := (&enginefake.Engine{Watched: enginefake.Until(enginefake.RolloutOf(t, 5), 70*time.Second)}).WithoutImages()
		return watching(s(e), e.Watched, 70*time.Second).view([]string{"down", "enter"})
	}},
	{"imageless-trouble", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		e := (&enginefake.Engine{Watched: failing(t)}).WithoutImages()
		return watching(s(e), e.Watched, middle+time.Minute).view([]string{"t", "down"})
	}},
	{"imageless-backup", func(t *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return backupsOf(s, func(e *enginefake.Engine) { e.WithoutImages() }).press("down", "e")
	}},
}

// imageRE is what a screen writes about the image of a target or of a machine.
var imageRE = regexp.MustCompile(`OS image|previous image|\bimage( +-)? *(,|→|->|v[0-9]|  |$)`)

// No screen of a cluster without images has a label or a version of one.
func TestNoScreenNamesAnAbsentImage(t *testing.T) {
	for _, sc := range imagelessScenes {
		t.Run(sc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := sc.show(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 120, 60) })
				for l := range strings.Lines(s.c.View()) {
					if imageRE.MatchString(strings.TrimSpace(l)) {
						t.Errorf("%q", l)
					}
				}
			})
		})
	}
}
