package console

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/charmbracelet/x/ansi"

	"constellation/engine"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/infra"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
	"constellation/tui/view"
)

// written is what the setup screen wrote.
type written struct {
	provider string
	workspace.GenerateOptions
	times int
}

// emptyFolder is a console in a folder without a configuration. Google Cloud has a project and a zone.
func emptyFolder(t *testing.T, eng *enginefake.Engine, w *written, err error) *stage {
	t.Helper()
	eng.HomeData = engine.Home{Dir: "/home/ops/demo", Stage: engine.StageEmpty, Next: []engine.Suggestion{
		{Title: "Write a configuration for gcp", Command: "constellation config generate gcp"},
	}}
	return newStage(t, eng, term.Display{}, 100, 30, func(d *consoleDeps) {
		d.Setup = &Setup{
			Find: func(name string) providers.Found {
				if name != "gcp" {
					t.Errorf("%s was looked up", name)
				}
				return providers.Found{Credentials: "login of gcloud", Config: section.Values{"project": "ours-42", "zones": "europe-west3-b"}}
			},
			Write: func(provider string, o workspace.GenerateOptions) (string, *Machines, error) {
				*w = written{provider, o, w.times + 1}
				if provider == "enrolled" {
					return "constellation-conf.yaml", &Machines{List: func(context.Context) (view.MachineListing, error) { return view.MachineListing{}, nil }}, err
				}
				return "constellation-conf.yaml", nil, err
			},
		}
	}).begin()
}

// frame is the console as a terminal without colors shows it.
func (s *stage) frame() string { return ansi.Strip(s.c.View()) }

func (s *stage) types(text string) *stage {
	for _, r := range text {
		s.press(string(r))
	}
	return s
}

// choose presses a key until the screen has a text.
func (s *stage) choose(key, text string) *stage {
	s.t.Helper()
	for range 9 {
		if strings.Contains(s.frame(), text) {
			return s
		}
		s.press(key)
	}
	s.t.Fatalf("no %q after %s:\n%s", text, key, s.frame())
	return s
}

func TestSetUpWithMachines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w written
		s := emptyFolder(t, &enginefake.Engine{}, &w, nil)
		s.press("i").choose("right", "enrolled.balancer")
		s.press("down", "down", "down", "enter")
		if w.times != 0 || !strings.Contains(s.frame(), "it is required") {
			t.Fatalf("written without an endpoint: %+v\n%s", w, s.frame())
		}
		s.types("10.0.0.10").press("down").types("10.0.0.300").press("enter")
		if w.times != 0 || !strings.Contains(s.frame(), "10.0.0.300 is no IPv4 address") {
			t.Fatalf("written with a wrong address: %+v\n%s", w, s.frame())
		}
		s.press("backspace", "backspace", "backspace").types("10").press("enter")
		if w.times != 1 || w.provider != "enrolled" || w.Name != "demo" || w.Kubernetes != "v1.35.4" || w.Section.Text("endpoint") != "10.0.0.10" || w.Section.Map("balancer").Text("address") != "10.0.0.10" {
			t.Errorf("written: %+v", w)
		}
		if s.c.screen != s.c.machines {
			t.Errorf("the screen is %s, want that of machines", s.c.screen.title())
		}
	})
}

func TestSetUpWithoutABalancer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w written
		s := emptyFolder(t, &enginefake.Engine{}, &w, errors.New("the disk is full"))
		s.press("i").choose("right", "enrolled.balancer")
		s.press("down", "down", "down").types("api.example.com").press("enter")
		if _, has := w.Section["balancer"]; w.times != 1 || has {
			t.Errorf("written: %+v", w)
		}
		if s.c.screen != s.c.setup || !strings.Contains(s.frame(), "the disk is full") {
			t.Errorf("the error is not shown:\n%s", s.frame())
		}
	})
}

// infraOf is the infrastructure of a cluster of which one object lacks.
func infraOf(state infra.State, findings ...plan.Finding) engine.InfraReport {
	return engine.InfraReport{Cluster: "demo", Cloud: "project ours-42", Objects: []infra.Object{{Kind: "network", Name: "constellation-1a2b3c4d", Purpose: "connects the machines", State: state}}, Findings: findings}
}

func TestSetUpAtGoogle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w written
		p := &plan.Plan{Verb: plan.VerbInfraCreate, Cluster: "demo", Steps: []plan.Step{{ID: "network", Title: "Create network constellation-1a2b3c4d"}}}
		eng := &enginefake.Engine{Infra: infraOf(infra.Absent), Plan: p}
		s := emptyFolder(t, eng, &w, nil)
		s.press("enter") // the suggestion
		for _, want := range []string{"Google Cloud", "login of gcloud", "ours-42", "europe-west3-b"} {
			if !strings.Contains(s.frame(), want) {
				t.Errorf("no %q:\n%s", want, s.frame())
			}
		}
		s.press("enter")
		if w.times != 1 || w.provider != "gcp" || w.Section.Text("project") != "ours-42" || !slices.Equal(w.Section.List("zones"), []string{"europe-west3-b"}) || w.ControlPlanes != 3 || w.Workers != 2 {
			t.Errorf("written: %+v", w)
		}
		if s.c.screen != s.c.infra || !strings.Contains(s.frame(), "constellation-1a2b3c4d") {
			t.Fatalf("the infrastructure is not shown:\n%s", s.frame())
		}
		s.at(time.Minute).press("enter") // the cursor is on Back
		if s.c.screen != s.c.overview || eng.Ran != 0 {
			t.Fatalf("Enter without a choice made something, on screen %s", s.c.screen.title())
		}
		s.do(s.c.infra.show())
		s.at(2*time.Minute).press("right", "enter")
		if eng.Ran != 1 || s.c.plan != p {
			t.Errorf("ran %d times, want the plan of the infrastructure once", eng.Ran)
		}
	})
}

// The home is read again while the cloud is, and ends earlier.
func TestInfrastructureSaysThatItReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := emptyFolder(t, &enginefake.Engine{Infra: infraOf(infra.Exists)}, &written{}, nil)
		read := s.c.infra.show()
		s.tell(homeRead{home: s.eng.HomeData})
		if !strings.Contains(s.frame(), "reading the cloud") || !s.c.hasSpinner() {
			t.Errorf("nothing says that the cloud is read:\n%s", s.frame())
		}
		s.do(read)
		if strings.Contains(s.frame(), "reading the cloud") || !strings.Contains(s.frame(), "all objects exist") {
			t.Errorf("the report is not shown:\n%s", s.frame())
		}
	})
}

func TestInfrastructureThatIsBlocked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eng := &enginefake.Engine{Infra: infraOf(infra.Absent, plan.Finding{ID: "image", Severity: plan.Block, Title: "the project has no image"})}
		s := emptyFolder(t, eng, &written{}, nil)
		s.do(s.c.infra.show())
		s.at(time.Minute)
		s.press("right", "enter")
		if eng.Ran != 0 || !strings.Contains(s.frame(), "1 finding in the way") {
			t.Errorf("ran %d times:\n%s", eng.Ran, s.frame())
		}
		eng.Infra = infraOf(infra.Exists)
		s.press("r")
		s.at(2 * time.Minute)
		s.press("right", "enter")
		if eng.Ran != 0 || !strings.Contains(s.frame(), "all objects exist") {
			t.Errorf("ran %d times:\n%s", eng.Ran, s.frame())
		}
	})
}

func TestSetUpInATestCloud(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w written
		s := emptyFolder(t, &enginefake.Engine{}, &w, nil)
		s.press("i").choose("right", "sandbox up")
		s.press("enter")
		if w.times != 0 || len(s.copied) != 1 || !strings.Contains(s.copied[0], "sandbox up") {
			t.Errorf("wrote %d times, copied %q", w.times, s.copied)
		}
	})
}
