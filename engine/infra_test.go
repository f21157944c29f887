package engine_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	compute "google.golang.org/api/compute/v1"
	"google.golang.org/api/option"

	"constellation/engine"
	"constellation/engine/cloud/cloudtest/wire"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/gcptest"
	gcpinfra "constellation/engine/cloud/gcp/infra"
	"constellation/engine/enrol"
	"constellation/engine/infra"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// infraStage is a workspace with a generated configuration, and an emulated Google Cloud.
type infraStage struct {
	*testing.T
	c   *gcptest.Cloud
	ws  *workspace.Workspace
	eng *engine.Engine
	// wrap changes the transport of the next engine.
	wrap func(http.RoundTripper) http.RoundTripper
	// programs finds the programs of the release.
	programs func(dir, release, arch string) (enrol.Programs, error)
}

func newInfraStage(t *testing.T) *infraStage {
	t.Helper()
	c, err := gcptest.New(func(p string) { t.Error(p) }, gcptest.Options{
		Fleet: &wire.Records{Boot: 10 * time.Second, Off: 10 * time.Second}, Project: "my-project", Pending: 100 * time.Millisecond, Running: time.Second, Insert: time.Second, Retry: 10 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	c.AddImage("one", "v1.1.0")
	dir := t.TempDir()
	b, err := workspace.GenerateConfig(gcp.Name, workspace.GenerateOptions{Image: "v1.1.0", Release: "v1.1.0"})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, workspace.ConfigFile), b, 0o600); err != nil {
		t.Fatal(err)
	}
	s := &infraStage{T: t, c: c}
	if s.ws, err = workspace.OpenWorkspace(dir); err != nil {
		t.Fatal(err)
	}
	s.restart()
	return s
}

// restart starts the program again.
func (s *infraStage) restart() {
	s.eng = engine.New(s.ws, engine.Deps{Programs: s.programs, Infra: map[string]infra.Vendor{gcp.Name: {Roles: gcpinfra.Roles, Stock: gcpinfra.Vendor.Stock, Open: func(ctx context.Context, r infra.Request) (infra.Cloud, error) {
		client := s.c.Client()
		if s.wrap != nil {
			client.Transport = s.wrap(client.Transport)
		}
		return gcpinfra.New(context.WithoutCancel(ctx), r, gcp.Options{HTTP: client})
	}}}})
}

// run plans and runs a verb. It returns the events as text.
func (s *infraStage) run(ctx context.Context, planned func(*engine.Engine, context.Context) (*plan.Plan, error)) (events string, err error) {
	s.Helper()
	p, err := planned(s.eng, ctx)
	if err != nil {
		return "", err
	}
	p.Accept(plan.IDs(p.Findings)...)
	var out bytes.Buffer
	err = s.eng.Run(ctx, p, func(e plan.Event) {
		b, err := json.Marshal(e)
		if err != nil {
			s.Error(err)
		}
		out.Write(append(b, '\n'))
	})
	return out.String(), err
}

func (s *infraStage) create() (string, error) {
	s.Helper()
	return s.run(s.Context(), (*engine.Engine).PlanInfraCreate)
}

func (s *infraStage) terminate() (string, error) {
	s.Helper()
	return s.run(s.Context(), (*engine.Engine).PlanInfraTerminate)
}

func (s *infraStage) must(events string, err error) string {
	s.Helper()
	if err != nil {
		s.Fatalf("%v; %s", err, plan.Remedy(err))
	}
	return events
}

func TestInfraLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newInfraStage(t)
		r, err := s.eng.Infrastructure(t.Context())
		if err != nil || r.UID != "" || len(r.Objects) == 0 || r.Objects[0].State != infra.Absent || len(r.Findings) > 0 {
			t.Fatalf("%+v, %v", r, err)
		}
		if s.ws.Has(workspace.InfraFile) || s.ws.Has(workspace.StateFile) || len(s.c.Objects()) > 0 {
			t.Fatal("plan wrote something")
		}
		p, err := s.eng.PlanInfraCreate(t.Context())
		if err != nil || s.ws.Has(workspace.InfraFile) || len(s.c.Objects()) > 0 {
			t.Fatalf("planning create wrote something, %v", err)
		}
		if c := plan.ConsentTo(p, false, nil); !c.Plan {
			t.Error("create needs no consent")
		}
		events := s.must(s.create())
		st, err := s.ws.State()
		if err != nil {
			t.Fatal(err)
		}
		i := st.Infrastructure
		if i.ClusterEndpoint != "203.0.113.1:6443" || i.InitEndpoint != "203.0.113.1:9000" || i.InClusterEndpoint != "203.0.113.1" || i.Name != "demo" || i.Provider != gcp.Name ||
			len(i.InitSecret) != 32 || i.Section.Text("project") != "my-project" || i.Section.Text("uid") != i.UID || i.NodeCIDR.String() != gcpinfra.DefaultNodeCIDR {
			t.Errorf("state %+v", i)
		}
		if s.ws.Has(workspace.InfraFile) {
			t.Error("the file of the intent is left")
		}
		if strings.Contains(events, hex.EncodeToString(i.InitSecret)) {
			t.Error("events contain the init secret")
		}
		if info, err := os.Stat(s.ws.Path(workspace.StateFile)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("mode of the state: %v, %v", info, err)
		}
		if first := strings.Index(events, "config measure --write"); first < 0 {
			t.Error("the result does not name what comes next")
		}
		s.restart()
		if _, err := s.create(); plan.ExitCode(err) != plan.ExitNothing {
			t.Errorf("second create: %v", err)
		}
		if p, err := s.eng.PlanInfraCreate(t.Context()); err != nil || !p.Finished() {
			t.Errorf("plan of the second create: %v", err)
		}
		events = s.must(s.terminate())
		if left := s.c.Objects(); len(left) > 0 || s.ws.Has(workspace.StateFile) {
			t.Errorf("left %v", left)
		}
		if want := "no object bears the UID " + i.UID; !strings.Contains(events, want) {
			t.Errorf("events lack %q", want)
		}
		if _, err := s.terminate(); plan.ExitCode(err) != plan.ExitNothing {
			t.Errorf("second terminate: %v", err)
		}
		// The next infrastructure has another UID.
		s.must(s.create())
		if next, err := s.ws.State(); err != nil || next.Infrastructure.UID == i.UID {
			t.Errorf("UID again, %v", err)
		}
	})
}

// severed loses the answers from a request on.
type severed struct {
	next http.RoundTripper
	left int
	end  context.CancelFunc
}

// RoundTrip implements http.RoundTripper.
func (c *severed) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := c.next.RoundTrip(r.WithContext(context.WithoutCancel(r.Context())))
	if c.left--; c.left <= 0 {
		c.end()
		if err == nil {
			answer.Body.Close()
		}
		return nil, context.Canceled
	}
	return answer, err
}

// TestInfraResumes interrupts create before the state file exists. The UID stays, and terminate finds everything.
// TestInfraOfAStockImage has machines whose metadata install all that makes them wait for init, by digest, and which have no
// secret: pods can read them.
func TestInfraOfAStockImage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newInfraStage(t)
		s.c.AddPublicImage("debian-cloud", "debian-12-bookworm-v20260114", "")
		s.edit("  gcp:\n", "  gcp:\n    images: [v1.1.0=projects/debian-cloud/global/images/debian-12-bookworm-v20260114]\n    programs: https://storage.googleapis.com/mine/v1.1.0/\n    proxy: http://10.0.0.9:3128\n")
		dir := t.TempDir()
		agent := filepath.Join(dir, "agent")
		if err := os.WriteFile(agent, []byte("the agent"), 0o600); err != nil {
			t.Fatal(err)
		}
		s.programs = func(_, release, arch string) (enrol.Programs, error) {
			if release != "v1.1.0" || arch != "x86_64" {
				return enrol.Programs{}, fmt.Errorf("no programs of %s for %s", release, arch)
			}
			return enrol.Programs{Bootstrapper: agent, Agent: agent}, nil
		}
		s.restart()
		s.must(s.create())
		state, _, err := s.ws.Infra()
		if err != nil {
			t.Fatal(err)
		}
		secret := state.Infrastructure.InitSecret
		api, err := compute.NewService(t.Context(), option.WithHTTPClient(s.c.Client()))
		if err != nil {
			t.Fatal(err)
		}
		templates, err := api.InstanceTemplates.List("my-project").Do()
		if err != nil || len(templates.Items) != 2 {
			t.Fatalf("templates %v, %v", templates, err)
		}
		for _, x := range templates.Items {
			meta := map[string]string{}
			for _, m := range x.Properties.Metadata.Items {
				meta[m.Key] = *m.Value
			}
			for _, key := range []string{"user-data", "startup-script"} {
				text := meta[key]
				for _, want := range []string{
					"CONSTELLATION_PROVIDER=gcp", "-----BEGIN CERTIFICATE-----", "https://storage.googleapis.com/mine/v1.1.0/linux_amd64/bootstrapper", fmt.Sprintf("%x", sha256.Sum256([]byte("the agent"))),
					"ip_aliases = false", "google-guest-agent", "HTTPS_PROXY=http://10.0.0.9:3128", "metadata.google.internal", "10.244.0.0/16", "constellation-bootstrapper.service",
				} {
					if !strings.Contains(text, want) {
						t.Errorf("%s of %s lacks %q", key, x.Name, want)
					}
				}
				for _, never := range []string{string(secret), hex.EncodeToString(secret), base64.StdEncoding.EncodeToString(secret), "PRIVATE KEY"} {
					if strings.Contains(text, never) {
						t.Errorf("%s of %s has a secret", key, x.Name)
					}
				}
			}
		}
		s.programs = func(string, string, string) (enrol.Programs, error) { return enrol.Programs{}, errors.New("none here") }
		s.restart()
		if _, err := s.eng.Infrastructure(t.Context()); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(plan.Remedy(err), "releases/v1.1.0/linux_amd64") {
			t.Errorf("without programs: %v; %s", err, plan.Remedy(err))
		}
		s.must(s.terminate()) // needs none
	})
}

// edit replaces a text of the configuration.
func (s *infraStage) edit(old, next string) {
	s.Helper()
	file := s.ws.Path(workspace.ConfigFile)
	b, err := os.ReadFile(file)
	if err != nil || strings.Count(string(b), old) != 1 {
		s.Fatalf("%q is there %d times: %v", old, strings.Count(string(b), old), err)
	}
	if err := os.WriteFile(file, []byte(strings.Replace(string(b), old, next, 1)), 0o600); err != nil {
		s.Fatal(err)
	}
}

func TestInfraResumes(t *testing.T) {
	for n := 13; n < 60; n += 9 {
		t.Run(fmt.Sprintf("after %d requests", n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newInfraStage(t)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				s.wrap = func(next http.RoundTripper) http.RoundTripper { return &severed{next, n, cancel} }
				if _, err := s.run(ctx, (*engine.Engine).PlanInfraCreate); err == nil {
					t.Fatal("create was not interrupted")
				}
				s.wrap = nil
				st, complete, err := s.ws.Infra()
				if err != nil || complete {
					t.Fatalf("complete %t, %v", complete, err)
				}
				s.restart()
				if n%2 == 0 {
					s.must(s.terminate())
				} else {
					s.must(s.create())
					after, err := s.ws.State()
					if err != nil || after.Infrastructure.UID != st.Infrastructure.UID || !bytes.Equal(after.Infrastructure.InitSecret, st.Infrastructure.InitSecret) {
						t.Errorf("another UID or secret, %v", err)
					}
					s.must(s.terminate())
				}
				if left := s.c.Objects(); len(left) > 0 || s.ws.Has(workspace.InfraFile) {
					t.Errorf("left %v", left)
				}
			})
		})
	}
}

func TestInfraRefusals(t *testing.T) {
	edit := func(s *infraStage, old, now string) {
		b, err := os.ReadFile(s.ws.Path(workspace.ConfigFile))
		if err != nil || !bytes.Contains(b, []byte(old)) {
			s.Fatalf("configuration lacks %q, %v", old, err)
		}
		if err := os.WriteFile(s.ws.Path(workspace.ConfigFile), bytes.ReplaceAll(b, []byte(old), []byte(now)), 0o600); err != nil {
			s.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name string
		do   func(s *infraStage) error
		exit int
		want string
	}{
		{name: "no configuration", exit: plan.ExitUsage, want: "there is no constellation-conf.yaml", do: func(s *infraStage) error {
			if err := os.Remove(s.ws.Path(workspace.ConfigFile)); err != nil {
				return err
			}
			_, err := s.create()
			return err
		}},
		{name: "files of another cluster", exit: plan.ExitUsage, want: "of another cluster would get mixed up", do: func(s *infraStage) error {
			if err := os.WriteFile(s.ws.Path(workspace.MasterSecretFile), []byte("{}"), 0o600); err != nil {
				return err
			}
			_, err := s.create()
			return err
		}},
		{name: "a finding blocks", exit: plan.ExitBlocked, want: "has no image", do: func(s *infraStage) error {
			edit(s, "image: v1.1.0", "image: v1.2.0")
			_, err := s.create()
			return err
		}},
		{name: "the configuration names another project than the state", exit: plan.ExitUsage, want: `it belongs to gcp "my-project"`, do: func(s *infraStage) error {
			s.must(s.create())
			edit(s, "project: my-project", "project: other-project")
			_, err := s.terminate()
			return err
		}},
		{name: "machines of an emulator", exit: plan.ExitUsage, want: "are those of an emulator", do: func(s *infraStage) error {
			s.must(s.create())
			b, err := os.ReadFile(s.ws.Path(workspace.StateFile))
			if err != nil {
				return err
			}
			b = bytes.ReplaceAll(b, []byte("    project: my-project"), []byte("    socket: /run/x.sock\n    project: my-project"))
			if err := os.WriteFile(s.ws.Path(workspace.StateFile), b, 0o600); err != nil {
				return err
			}
			_, err = s.terminate()
			return err
		}},
		{name: "a provider without infrastructure", exit: plan.ExitUsage, want: "this program makes none of it", do: func(s *infraStage) error {
			s.eng = engine.New(s.ws, engine.Deps{})
			_, err := s.create()
			return err
		}},
		{name: "a permission is lost in the middle", exit: plan.ExitFailed, want: "compute.addresses.create", do: func(s *infraStage) error {
			s.c.Revoke("compute.addresses.create")
			_, err := s.create()
			if err != nil {
				return fmt.Errorf("%w: %s", err, plan.Remedy(err))
			}
			return nil
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				err := tt.do(newInfraStage(t))
				if plan.ExitCode(err) != tt.exit || !strings.Contains(fmt.Sprint(err), tt.want) {
					t.Errorf("exit %d, %v, want %d and %q", plan.ExitCode(err), err, tt.exit, tt.want)
				}
			})
		})
	}
}

// TestInfraTerminateNeedsNoConfiguration deletes all that the state file names.
func TestInfraTerminateNeedsNoConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newInfraStage(t)
		s.must(s.create())
		if err := os.Remove(s.ws.Path(workspace.ConfigFile)); err != nil {
			t.Fatal(err)
		}
		s.must(s.terminate())
		if left := s.c.Objects(); len(left) > 0 {
			t.Errorf("left %v", left)
		}
	})
}

// TestGroupsInSeveralZones makes groups in three zones. They count as the groups of the configuration.
func TestGroupsInSeveralZones(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newInfraStage(t)
		b, err := os.ReadFile(s.ws.Path(workspace.ConfigFile))
		if err != nil {
			t.Fatal(err)
		}
		b = bytes.Replace(b, []byte("- europe-west3-a"), []byte("- europe-west3-a\n      - europe-west3-b\n      - europe-west3-c"), 1)
		if err := os.WriteFile(s.ws.Path(workspace.ConfigFile), b, 0o600); err != nil {
			t.Fatal(err)
		}
		s.must(s.create())
		st, err := s.ws.State()
		if err != nil {
			t.Fatal(err)
		}
		c, err := gcp.New(t.Context(), gcp.Options{Project: "my-project", UID: st.Infrastructure.UID, Zones: st.Infrastructure.Section.List("zones"), HTTP: s.c.Client()})
		if err != nil {
			t.Fatal(err)
		}
		groups, err := c.Groups(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		sizes := map[string]int{}
		for _, g := range groups {
			sizes[g.Name] += g.Count
		}
		machines, err := gcp.NewConsole(c).Machines(t.Context())
		if err != nil || len(groups) != 6 || sizes["control-plane"] != 1 || sizes["workers"] != 2 || len(machines) != 3 {
			t.Errorf("%d groups, sizes %v, %d machines, %v", len(groups), sizes, len(machines), err)
		}
		for _, m := range machines {
			if !slices.Contains([]string{"control-plane", "workers"}, m.GroupName) {
				t.Errorf("machine %s has group %s", m.Name, m.GroupName)
			}
		}
	})
}
