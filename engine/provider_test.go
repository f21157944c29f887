package engine_test

import (
	"context"
	"crypto/x509"
	"slices"
	"strings"
	"testing"

	"constellation/engine"
	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// moon is a cloud that selects no image, reached by what its section of the state says.
type moon struct {
	*testCloud
	relay string
}

func (m moon) Groups(ctx context.Context) ([]cloud.Group, error) {
	groups, err := m.testCloud.Groups(ctx)
	for i := range groups {
		groups[i].Image = ""
	}
	return groups, err
}

func (m moon) Images(context.Context) ([]cloud.Image, error) { return nil, nil }

// validated is what newMoon records when a validator of its machines is made.
const validated = "validator"

// newMoon returns a stage of a registered provider that is not the sandbox.
func newMoon(t *testing.T) (*stage, *[]string) {
	t.Helper()
	return moonWith(t, false)
}

// moonWith returns the stage of newMoon, whose clusters can have a certifier.
func moonWith(t *testing.T, certifier bool) (*stage, *[]string) {
	t.Helper()
	s := newStage(t, 1, 2)
	for _, m := range s.cloud.list() {
		s.cloud.set(m.Name, func(m *cluster.CloudMachine) { m.Image = "" })
	}
	var relays []string
	t.Cleanup(providers.Register(providers.Provider{
		Name: "moon", NoImages: true, Certifier: certifier,
		Config: section.Schema{{Name: "crater", Required: true, Identity: true}},
		State:  section.Schema{{Name: "crater", Required: true, Identity: true}, {Name: "relay", Required: true}},
		Advice: providers.Advice{Cloud: "crater {crater}", Unreachable: "point the antenna at {crater}", Failed: "the rover has pictures"},
		Console: func(config, state section.Values) (providers.Console, error) {
			relays = append(relays, config.Text("crater")+" by "+state.Text("relay"))
			return moon{s.cloud, state.Text("relay")}, nil
		},
		MetadataAddress: "http://10.0.0.1", ControlAddress: "https://moon.test", TPMAddress: "/dev/tpmrm0", TPMDir: "/dev",
		Attestation: attestation.Method{Validator: func(roots *x509.CertPool, m attestation.Measurements, o attestation.Options) attestation.Validator {
			relays = append(relays, validated)
			return attestation.TPMMethod().Validator(roots, m, o)
		}},
	}))
	s.registered = true
	s.edit(workspace.ConfigFile, "  sandbox:\n    name: demo", "  moon:\n    crater: tycho")
	s.edit(workspace.ConfigFile, "\nimage: v1.1.0\n", "\n")
	s.edit(workspace.StateFile, "provider: sandbox", "provider: moon")
	s.edit(workspace.StateFile, "  sandbox:\n    name: demo\n    socket: /nowhere/api.sock", "  moon:\n    crater: tycho\n    relay: luna")
	return s, &relays
}

// TestInitInARegisteredCloudWithoutImages takes a registered cloud through
// configuration, preflight, init and status.
func TestInitInARegisteredCloudWithoutImages(t *testing.T) {
	s, relays := newMoon(t)
	_, p := s.mustInit()
	if len(*relays) == 0 || (*relays)[0] != "tycho by luna" {
		t.Errorf("opened %v", *relays)
	}
	if !slices.Contains(*relays, validated) {
		t.Errorf("init has not used the validator of the provider: %v", *relays)
	}
	if p.To.Image != "" || strings.Contains(strings.Join(texts(p), "\n"), "image ") {
		t.Errorf("the plan names an image: %+v\n%s", p.To, strings.Join(texts(p), "\n"))
	}
	target, err := s.cluster.NodeTarget(t.Context())
	if err != nil || target.Image != "" || target.ImageVersion != "" || target.Kubernetes != "v1.35.4" || target.Components == "" {
		t.Errorf("target %+v, %v", target, err)
	}
	j, err := s.cluster.JoinConfig(t.Context())
	if err != nil || j.Attestation == "" || len(j.Generations) > 0 {
		t.Errorf("join configuration %+v, %v", j, err)
	}
	st, err := s.engine().Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if st.Provider != "moon" || st.Simulated || st.Target.Image != "" || len(st.Nodes) != 3 {
		t.Errorf("status %+v", st)
	}
	h, err := s.engine().Home(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range h.Next {
		if strings.Contains(n.Why, "release v1.1.0") {
			t.Errorf("release v1.1.0 runs, and the suggestion is %+v", n)
		}
	}
	for _, n := range st.Nodes {
		if n.Current != (n.Components == target.Components) {
			t.Errorf("node %s: %+v, and the target %+v", n.Name, n, target)
		}
	}
}

func TestAdviceIsTheProviders(t *testing.T) {
	s, _ := newMoon(t)
	s.cloud.end(cloud.ErrUnavailable)
	findings, err := s.engine().Preflight(t.Context(), func(plan.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range findings {
		if strings.Contains(f.Title+f.Detail+f.Remedy, "sandbox") {
			t.Errorf("%s speaks of the sandbox: %+v", f.ID, f)
		}
		if f.ID == "cloud" && (f.Severity != plan.Block || f.Title != "crater tycho does not answer" || f.Remedy != "point the antenna at tycho") {
			t.Errorf("%+v", f)
		}
	}
}

func TestNextStepsNameRegisteredProviders(t *testing.T) {
	newMoon(t)
	var verbs []string
	for _, x := range engine.NextSteps(engine.Home{Stage: engine.StageEmpty}) {
		verbs = append(verbs, x.Verb)
	}
	if got, want := strings.Join(verbs, ", "), "sandbox up, config generate enrolled, config generate gcp, config generate moon, config generate sandbox"; got != want {
		t.Errorf("next steps %s, want %s", got, want)
	}
	if got := engine.NextSteps(engine.Home{Stage: engine.StageConfigured, Config: &workspace.Config{Provider: workspace.ProviderConfig{Name: "moon"}}}); len(got) > 0 {
		t.Errorf("next steps of a provider without a verb: %v", got)
	}
}

// texts returns the sentences of a plan.
func texts(p *plan.Plan) (out []string) {
	for _, s := range p.Steps {
		out = append(out, s.Title, s.Effect)
		out = append(out, s.Details...)
	}
	return out
}
