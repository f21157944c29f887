package engine_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/workspace"
)

// TestComponentsInUseGetTheirStatement prepares an upgrade of a cluster whose ConfigMaps an
// older program published. Until the control planes are upgraded, machines of the new image
// join with these components, so they need a signed statement before the target is set.
func TestComponentsInUseGetTheirStatement(t *testing.T) {
	publish := func(s *checkStage, k string, change func(*cluster.Components)) cluster.Components {
		t.Helper()
		l, err := s.cloud.Components(t.Context(), v(k))
		if err != nil {
			t.Fatal(err)
		}
		c := cluster.Components{Kubernetes: k, List: l.List}
		change(&c)
		c.Name = cluster.ComponentsName(c.List)
		if err := s.cluster.PublishComponents(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	use := func(s *checkStage, c cluster.Components) {
		t.Helper()
		s.inside.running.Target.Components = c.Name
		if err := s.cluster.SetNodeTarget(t.Context(), s.inside.running.Target); err != nil {
			t.Fatal(err)
		}
	}
	as := func(*cluster.Components) {}
	blocks := func(p *plan.Plan) (ids []string) {
		for _, f := range p.Blocked() {
			ids = append(ids, f.ID)
		}
		return ids
	}

	t.Run("what the cloud vouches for", func(t *testing.T) {
		s := newPrepareStage(t)
		old := publish(s, "v1.35.4", as)
		use(s, old)
		older := publish(s, "v1.34.2", as) // of a worker that was left behind
		s.inside.running.Nodes[1].Components = older.Name
		p, err := s.engine().PlanPrepare(t.Context(), both, func(plan.Event) {})
		if err != nil || len(p.Blocked()) > 0 {
			t.Fatalf("%v, %v", err, blocks(p))
		}
		if i := slices.IndexFunc(p.Steps, func(x plan.Step) bool { return x.ID == engine.StepComponents }); i != 0 || p.Steps[i].Finished ||
			!slices.ContainsFunc(p.Steps[i].Details, func(d string) bool {
				return strings.Contains(d, "of Kubernetes v1.35.4, gets the release builder's statement")
			}) {
			t.Errorf("steps %+v", p.Steps)
		}
		if _, _, err := s.prepare(t.Context(), both); err != nil {
			t.Fatal(err)
		}
		for _, k := range []string{"v1.34.2", "v1.35.4", "v1.36.3"} {
			want, err := s.cloud.Components(t.Context(), v(k))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := s.cluster.Components(t.Context(), cluster.ComponentsName(want.List)); err != nil || got.Statement != want.Statement || !slices.Equal(got.List, want.List) {
				t.Errorf("Kubernetes %s: %+v, %v", k, got, err)
			}
		}
		p, err = s.engine().PlanPrepare(t.Context(), both, func(plan.Event) {})
		if err != nil || !p.Steps[0].Finished || len(p.Steps[0].Details) > 0 {
			t.Errorf("planned again: %v, %+v", err, p.Steps[0])
		}
	})
	t.Run("components without a valid statement", func(t *testing.T) {
		s := newPrepareStage(t)
		use(s, publish(s, "v1.35.4", func(c *cluster.Components) { c.List[0].Digest = "sha256:" + strings.Repeat("cd", 32) }))
		p, err := s.engine().PlanPrepare(t.Context(), both, func(plan.Event) {})
		if err != nil || !slices.Equal(blocks(p), []string{"components-statement"}) {
			t.Errorf("%v, blocked by %v", err, blocks(p))
		}
	})
	t.Run("what somebody else vouches for", func(t *testing.T) {
		s := newPrepareStage(t)
		use(s, publish(s, "v1.35.4", func(c *cluster.Components) {
			c.List[0].Digest, c.Statement = "sha256:"+strings.Repeat("cd", 32), "of a release builder"
		}))
		if p, err := s.engine().PlanPrepare(t.Context(), both, func(plan.Event) {}); err != nil || len(p.Blocked()) > 0 {
			t.Errorf("%v, blocked by %v", err, blocks(p))
		}
	})
}

// ownFeed is a feed whose releases a builder publishes by the documented commands: signed by the
// key that machines have, which also lets a key of the builder's own sign from then on.
type ownFeed struct {
	*testing.T
	from, dir     string
	machines, own engine.FeedKey
}

func newOwnFeed(t *testing.T) *ownFeed {
	t.Helper()
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	keys := t.TempDir()
	f := &ownFeed{T: t, from: t.TempDir(), dir: filepath.Join(keys, "feed")}
	for _, name := range []string{"v1.0.0.yaml", "v1.1.0.yaml"} {
		f.put(name, olderRelease(t, name))
	}
	var err error
	if f.machines, err = engine.NewFeedKey(filepath.Join(keys, "machines.key")); err == nil {
		f.own, err = engine.NewFeedKey(filepath.Join(keys, "own.key"))
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *ownFeed) put(name string, b []byte) {
	f.Helper()
	path := filepath.Join(f.from, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		f.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o644); err != nil {
		f.Fatal(err)
	}
}

// sign has the builder vouch for what the cloud offers for a version of Kubernetes.
func (f *ownFeed) sign(from engine.Cloud, kubernetes string) {
	f.Helper()
	l, err := from.Components(f.Context(), v(kubernetes))
	if err != nil {
		f.Fatal(err)
	}
	b, err := json.Marshal(release.MirroredList{Kubernetes: v(kubernetes), Arch: runtime.GOARCH, Components: l.List})
	if err != nil {
		f.Fatal(err)
	}
	f.put("v1.1.0/components/"+kubernetes+".json", b)
}

func (f *ownFeed) build(key engine.FeedKey, trust ...string) {
	f.Helper()
	if _, err := engine.BuildFeed(f.Context(), engine.FeedBuild{From: f.from, Out: f.dir, KeyFile: key.Private, Trust: trust}); err != nil {
		f.Fatal(err)
	}
}

// trust is the trust policy of a machine whose image has the first key.
func (f *ownFeed) trust() release.Trust {
	f.Helper()
	b, err := os.ReadFile(f.machines.Public)
	if err != nil {
		f.Fatal(err)
	}
	keys, err := release.ParseKeys("machines", b)
	if err != nil {
		f.Fatal(err)
	}
	return release.NewTrust(keys...)
}

// TestStatementsOfAFeedReachTheCluster prepares an upgrade in a cloud that has no statements. They
// come from the feed of a builder, signed by a key of its own that the machines' key certifies.
// Machines verify the statements that are in the ConfigMaps afterwards.
func TestStatementsOfAFeedReachTheCluster(t *testing.T) {
	for _, from := range []string{"folder", "address", "bundle"} {
		t.Run(from, func(t *testing.T) {
			s := newPrepareStage(t)
			s.cloud.unsigned = true
			f := newOwnFeed(t)
			f.build(f.machines, f.machines.Public, f.own.Public)
			f.sign(s.cloud, "v1.35.4")
			f.sign(s.cloud, "v1.36.3")
			f.build(f.own)
			at := f.dir
			switch from {
			case "address":
				server := httptest.NewServer(http.FileServer(http.Dir(f.dir)))
				defer server.Close()
				at = server.URL
			case "bundle":
				server := httptest.NewServer(http.FileServer(http.Dir(f.dir)))
				r := engine.BundleRequest{FeedRequest: engine.FeedRequest{Feed: server.URL, FeedKeys: []string{f.machines.Public}}, Out: filepath.Join(t.TempDir(), "bundle.tar")}
				w, err := workspace.OpenWorkspace(s.dir)
				if err == nil {
					_, err = engine.MakeBundle(t.Context(), w, r)
				}
				if err != nil {
					t.Fatal(err)
				}
				server.Close()
				at = "bundle:" + r.Out
			}
			// An older program published the running components.
			old, err := s.cloud.Components(t.Context(), v("v1.35.4"))
			if err != nil {
				t.Fatal(err)
			}
			c := cluster.Components{Name: cluster.ComponentsName(old.List), Kubernetes: "v1.35.4", List: old.List}
			if err := s.cluster.PublishComponents(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			s.inside.running.Target.Components = c.Name
			if err := s.cluster.SetNodeTarget(t.Context(), s.inside.running.Target); err != nil {
				t.Fatal(err)
			}
			r := both
			r.Feed, r.FeedKeys = at, []string{f.machines.Public}
			if _, _, err := s.prepare(t.Context(), r); err != nil {
				t.Fatal(err)
			}
			for _, k := range []string{"v1.35.4", "v1.36.3"} {
				l, err := s.cloud.Components(t.Context(), v(k))
				if err != nil {
					t.Fatal(err)
				}
				got, err := s.cluster.Components(t.Context(), cluster.ComponentsName(l.List))
				if err != nil {
					t.Fatal(err)
				}
				if err := f.trust().Verify(got.Statement, v(k), runtime.GOARCH, got.List); err != nil {
					t.Errorf("a machine installs Kubernetes %s: %v", k, err)
				}
			}
		})
	}
}

// TestForgedStatementOfAFeedBlocks has a feed's server deliver statements that its publisher did
// not sign, or signed with a key that may not sign any more.
func TestForgedStatementOfAFeedBlocks(t *testing.T) {
	for _, tt := range []struct {
		name, want string
		forge      func(f *ownFeed, statement string)
	}{
		{name: "altered", want: "invalid signature", forge: func(f *ownFeed, statement string) {
			b, err := os.ReadFile(statement)
			if err == nil {
				err = os.WriteFile(statement, []byte(strings.Replace(string(b), "v1.36.3", "v1.36.4", 1)), 0o644)
			}
			if err != nil {
				f.Fatal(err)
			}
		}},
		{name: "signed by a stranger", want: "invalid signature", forge: func(f *ownFeed, statement string) {
			stranger := newOwnFeed(f.T)
			stranger.from = f.from
			stranger.build(stranger.own)
			b, err := os.ReadFile(filepath.Join(stranger.dir, strings.TrimPrefix(statement, f.dir)))
			if err == nil {
				err = os.WriteFile(statement, b, 0o644)
			}
			if err != nil {
				f.Fatal(err)
			}
		}},
		{name: "signed by a key that was retired", want: "the key that signed it may no longer sign", forge: func(f *ownFeed, statement string) {
			b, err := os.ReadFile(statement)
			if err != nil {
				f.Fatal(err)
			}
			next, err := engine.NewFeedKey(filepath.Join(f.TempDir(), "next.key"))
			if err != nil {
				f.Fatal(err)
			}
			f.build(f.own, f.own.Public, next.Public)
			f.build(next, next.Public)
			if err := os.WriteFile(statement, b, 0o644); err != nil {
				f.Fatal(err)
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newPrepareStage(t)
			s.cloud.unsigned = true
			f := newOwnFeed(t)
			f.sign(s.cloud, "v1.36.3")
			f.build(f.machines, f.machines.Public, f.own.Public)
			f.build(f.own)
			statements, err := filepath.Glob(filepath.Join(f.dir, "releases/v1.1.0/components", strings.Repeat("[0-9a-f]", 64)+".json"))
			if err != nil || len(statements) != 1 {
				t.Fatalf("%q, %v", statements, err)
			}
			tt.forge(f, statements[0])
			r := both
			r.Feed, r.FeedKeys = f.dir, []string{f.machines.Public}
			p, err := s.engine().PlanPrepare(t.Context(), r, func(plan.Event) {})
			if err != nil {
				t.Fatal(err)
			}
			b := p.Blocked()
			if len(b) != 1 || b[0].ID != "components-statement" || !strings.Contains(b[0].Detail, tt.want) || !strings.Contains(b[0].Remedy, "constellation release verify") {
				t.Errorf("blocked by %+v", b)
			}
		})
	}
}

// TestStatementThatThisComputerCannotRead names the file and does not blame the cloud.
func TestStatementThatThisComputerCannotRead(t *testing.T) {
	s := newPrepareStage(t)
	s.cloud.unsigned = true
	f := newOwnFeed(t)
	f.sign(s.cloud, "v1.36.3")
	f.build(f.machines, f.machines.Public, f.own.Public)
	f.build(f.own)
	statements, err := filepath.Glob(filepath.Join(f.dir, "releases/v1.1.0/components", strings.Repeat("[0-9a-f]", 64)+".json"))
	if err != nil || len(statements) != 1 {
		t.Fatalf("%q, %v", statements, err)
	}
	// A directory in the place of the file is unreadable even for root.
	if err := errors.Join(os.Remove(statements[0]), os.Mkdir(statements[0], 0o755)); err != nil {
		t.Fatal(err)
	}
	r := both
	r.Feed, r.FeedKeys = f.dir, []string{f.machines.Public}
	p, err := s.engine().PlanPrepare(t.Context(), r, func(plan.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	b := p.Blocked()
	if len(b) != 1 || b[0].ID != "components-statement" || !strings.Contains(b[0].Title, "cannot be read") || !strings.Contains(b[0].Detail, filepath.Base(statements[0])) {
		t.Errorf("blocked by %+v", b)
	}
}

// TestComponentsWithoutAStatement warns, where a feed is asked that signs other lists.
func TestComponentsWithoutAStatement(t *testing.T) {
	s := newPrepareStage(t)
	s.cloud.unsigned = true
	f := newOwnFeed(t)
	f.build(f.own)
	r := both
	r.Feed, r.FeedKeys = f.dir, []string{f.own.Public}
	p, err := s.engine().PlanPrepare(t.Context(), r, func(plan.Event) {})
	if err != nil || len(p.Blocked()) > 0 {
		t.Fatalf("%v, blocked by %+v", err, p.Blocked())
	}
	if !slices.ContainsFunc(p.Findings, func(f plan.Finding) bool {
		return f.ID == "components-unsigned" && f.Severity == plan.Warn && strings.Contains(f.Remedy, "releases/v1.1.0/components/")
	}) {
		t.Errorf("findings %+v", p.Findings)
	}
}

// TestInitUsesTheStatementOfTheFeed makes a cluster in a cloud that vouches for nothing, with the
// feed that the configuration names.
func TestInitUsesTheStatementOfTheFeed(t *testing.T) {
	s := newStage(t, 1, 0)
	s.cloud.unsigned = true
	f := newOwnFeed(t)
	f.sign(s.cloud, "v1.35.4")
	f.build(f.own)
	pem, err := os.ReadFile(f.own.Public)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(s.dir, workspace.ConfigFile)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	config := string(b) + "releases:\n  feed: " + f.dir + "\n  keys: |\n    " + strings.ReplaceAll(strings.TrimSpace(string(pem)), "\n", "\n    ") + "\n"
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := s.engine().PlanInit(t.Context())
	if err != nil || len(p.Blocked()) > 0 {
		t.Fatalf("%v, blocked by %+v", err, p.Blocked())
	}
	if err := s.engine().Run(t.Context(), p, func(plan.Event) {}); err != nil {
		t.Fatal(err)
	}
	l, err := s.cloud.Components(t.Context(), v("v1.35.4"))
	if err != nil {
		t.Fatal(err)
	}
	got, err := s.cluster.Components(t.Context(), cluster.ComponentsName(l.List))
	if err != nil {
		t.Fatal(err)
	}
	keys, err := release.ParseKeys("own", pem)
	if err != nil {
		t.Fatal(err)
	}
	if err := release.NewTrust(keys...).Verify(got.Statement, v("v1.35.4"), runtime.GOARCH, got.List); err != nil {
		t.Error(err)
	}

	// A statement that was altered ends in a plan that is blocked.
	statements, err := filepath.Glob(filepath.Join(f.dir, "releases/v1.1.0/components", strings.Repeat("[0-9a-f]", 64)+".json"))
	if err != nil || len(statements) != 1 {
		t.Fatalf("%q, %v", statements, err)
	}
	if b, err = os.ReadFile(statements[0]); err == nil {
		err = os.WriteFile(statements[0], []byte(strings.Replace(string(b), "v1.35.4", "v1.35.5", 1)), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	p, err = s.engine().PlanInit(t.Context())
	if err != nil || len(p.Blocked()) != 1 || !strings.Contains(p.Blocked()[0].Title, "the feed's statement") {
		t.Errorf("%v, %+v", err, p)
	}
}
