package workspace

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/plan"
	"constellation/engine/version"
)

// registerMoon registers a provider with a section of every kind of field, and without images.
func registerMoon(t *testing.T) {
	t.Helper()
	t.Cleanup(providers.Register(providers.Provider{
		Name: "moon", NoImages: true,
		Config: section.Schema{
			{Name: "crater", Required: true, Identity: true, Valid: func(s string) bool { return s != "" && s == strings.ToLower(s) }, Problem: "is no crater", Remedy: "use lower case"},
			{Name: "domes", Kind: section.Int, Lowest: 1, Highest: 9},
			{Name: "dark", Kind: section.Bool},
			{Name: "zones", Kind: section.List},
		},
		State: section.Schema{{Name: "crater", Required: true, Identity: true}, {Name: "relay"}},
		About: "moon needs\na rocket.", Example: func(string) section.Values {
			return section.Values{"crater": "tycho", "domes": 3, "zones": []string{"a", "b"}}
		},
		Advice: providers.Advice{Cloud: "crater {crater}", Create: "launch a rocket to {crater}"},
	}))
}

func TestSectionOfAnotherProvider(t *testing.T) {
	registerMoon(t)
	b, err := GenerateConfig("moon", GenerateOptions{Name: "demo"})
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	const want = "# Where machines come from: exactly one provider. moon needs\n# a rocket.\nprovider:\n  moon:\n    crater: tycho\n    domes: 3\n    zones:\n      - a\n      - b\n"
	if !strings.Contains(text, want) || strings.Contains(text, "sandbox") || strings.Contains(text, "\nimage:") {
		t.Fatalf("generated:\n%s", text)
	}
	text = strings.Replace(strings.ReplaceAll(text, strings.Repeat("1234", 16), strings.Repeat("ab", 32)), `trustRoots: ""`, "trustRoots: |\n"+indent(fixedRoot), 1)
	c, err := ParseConfig([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if s := c.Provider.Section; c.Provider.Name != "moon" || s.Text("crater") != "tycho" || s.Int("domes") != 3 || s.Bool("dark") || len(s.List("zones")) != 2 {
		t.Errorf("read %+v", c.Provider)
	}
	if a := c.Advice(); a.Cloud != "crater tycho" || a.Create != "launch a rocket to tycho" || a.Denied == "" {
		t.Errorf("advice %+v", a)
	}
	if j, err := json.Marshal(c.Provider); err != nil || string(j) != `{"moon":{"crater":"tycho","domes":3,"zones":["a","b"]}}` {
		t.Errorf("JSON %s, %v", j, err)
	}
	if j, err := json.Marshal(c); err != nil || strings.Contains(string(j), `"image"`) {
		t.Errorf("JSON of a configuration without an image: %s, %v", j, err)
	}
	// upgrade check edits a configuration without an image.
	edited, fields, err := EditConfig([]byte(text), HopConfig{Kubernetes: version.MustParse("v1.36.3")})
	if err != nil || len(fields) != 1 || fields[0].Field != "kubernetesVersion" || !strings.Contains(string(edited), "kubernetesVersion: v1.36.3") || strings.Contains(string(edited), "\nimage:") {
		t.Errorf("edited %+v, %v:\n%s", fields, err, edited)
	}
	if _, _, err := EditConfig([]byte(text), HopConfig{Image: version.MustParse("v1.1.0")}); !errors.Is(err, errTied) {
		t.Errorf("an image in a configuration without one: %v", err)
	}
	for _, tt := range []struct{ name, old, new, want string }{
		{name: "a text that is not valid", old: "tycho", new: "Tycho", want: `provider.moon.crater: "Tycho" is no crater (use lower case)`},
		{name: "a number out of bounds", old: "domes: 3", new: "domes: 30", want: "provider.moon.domes: is 30, want 1 to 9"},
		{name: "a field that the provider does not have", old: "domes: 3", new: "dome: 3", want: "did you mean domes?"},
		{name: "a missing field", old: "    crater: tycho\n", want: "provider.moon.crater: is missing"},
		{name: "an image that the cloud does not select", old: "\nname: demo\n", new: "\nname: demo\nimage: v1.1.0\n", want: "image: is not selected by provider moon (remove it)"},
		{name: "two providers", old: "provider:\n", new: "provider:\n  sandbox: {name: demo}\n", want: "is a second provider beside sandbox"},
		{name: "a provider that is not registered", old: "  moon:\n", new: "  mars:\n", want: "provider.mars: is not in this release (use enrolled, gcp, moon or sandbox)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := ParseConfig([]byte(strings.Replace(text, tt.old, tt.new, 1))); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestStateOfAnotherProvider(t *testing.T) {
	registerMoon(t)
	s := &State{Version: StateVersion, Infrastructure: Infrastructure{
		UID: "u", Name: "demo", Provider: "moon", ClusterEndpoint: "127.0.0.1:1", InitEndpoint: "127.0.0.1:2", InClusterEndpoint: "10.0.0.1",
		InitSecret: bytes.Repeat([]byte{1}, 32), NodeCIDR: netip.MustParsePrefix("10.0.0.0/24"), PodCIDR: netip.MustParsePrefix("10.244.0.0/16"),
		Section: section.Values{"crater": "tycho", "relay": ""},
	}}
	b, err := s.marshal()
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(string(b), "  ipCidrPod: 10.244.0.0/16\n  moon:\n    crater: tycho\n") {
		t.Errorf("wrote:\n%s", b)
	}
	read, err := ParseState(b)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := read.marshal(); err != nil || !bytes.Equal(again, b) {
		t.Errorf("read and written: %v\n%s", err, again)
	}
	if read.Simulated() {
		t.Error("a provider without simulated machines has some")
	}
	w := testWorkspace(t)
	if err := w.WriteState(read); err != nil {
		t.Fatal(err)
	}
	if err := w.OnMachines(plan.VerbApply); err != nil {
		t.Error(err)
	}
	c := &Config{Provider: ProviderConfig{Name: "moon", Section: section.Values{"crater": "tycho"}}}
	if err := w.Belong(c, read); err != nil {
		t.Error(err)
	}
	c.Provider.Section = section.Values{"crater": "kepler"}
	if err := w.Belong(c, read); err == nil || !strings.Contains(err.Error(), `it belongs to moon "tycho", and the configuration names "kepler"`) || !strings.Contains(plan.Remedy(err), "launch a rocket to kepler") {
		t.Errorf("got %v (%s)", err, plan.Remedy(err))
	}
	c.Provider = ProviderConfig{Name: "sandbox", Section: section.Values{"name": "tycho"}}
	if err := w.Belong(c, read); err == nil || !strings.Contains(err.Error(), "it is of provider moon, and the configuration names sandbox") {
		t.Errorf("got %v", err)
	}
	for _, tt := range []struct{ name, old, new, want string }{
		{name: "no section", old: "  moon:\n    crater: tycho\n", want: "infrastructure.moon: is missing"},
		{name: "the section of another provider", old: "  moon:\n    crater: tycho\n", new: "  sandbox:\n    name: demo\n    socket: /x\n", want: "infrastructure.moon: is missing"},
		{name: "no provider", old: "  provider: moon\n", want: "infrastructure.provider: is missing"},
		{name: "a provider that is not registered", old: "provider: moon", new: "provider: mars", want: `"mars" is no provider of this release (this release has enrolled, gcp, moon and sandbox)`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := ParseState([]byte(strings.Replace(string(b), tt.old, tt.new, 1)))
			if _, ok := errors.AsType[*ConfigErrors](err); !ok || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func indent(s string) string {
	return "      " + strings.ReplaceAll(strings.TrimSpace(s), "\n", "\n      ") + "\n"
}

// The configuration of a cloud with roots of its own has them from the start. A sandbox that emulates it fills in its own
// as long as the measurements are placeholders.
func TestRootsOfACloudInItsConfiguration(t *testing.T) {
	b, err := GenerateConfig("gcp", GenerateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = ParseConfig(b)
	list, ok := AsConfigErrors(err)
	if !ok {
		t.Fatalf("measurements that are not known: %v", err)
	}
	for _, e := range list.Errors {
		if !strings.HasPrefix(e.Field, fieldMeasurements+".") {
			t.Errorf("%s %s", e.Field, e.Problem)
		}
	}
	known := strings.ReplaceAll(string(b), strings.Repeat("1234", 16), strings.Repeat("ab", 32))
	c, err := ParseConfig([]byte(known))
	if err != nil {
		t.Fatal(err)
	}
	roots := c.Attestation.TPM2.TrustRoots
	if p, _ := providers.Named("gcp"); strings.TrimSpace(roots) != strings.TrimSpace(string(p.Roots())) || strings.Count(roots, "BEGIN CERTIFICATE") != 2 {
		t.Errorf("trust roots\n%s", roots)
	}
	info := *testSandbox(t)
	info.Cloud = "gcp"
	filled, fields, err := fillConfig(b, info)
	if err != nil || !slices.Contains(fields, fieldTrustRoots) || !slices.Contains(fields, fieldMeasurements) {
		t.Fatalf("filled %q, %v", fields, err)
	}
	if c, err = ParseConfig(filled); err != nil || strings.TrimSpace(c.Attestation.TPM2.TrustRoots) != strings.TrimSpace(info.TrustRoots) {
		t.Errorf("%v, trust roots\n%s", err, filled)
	}
	if same, fields, err := fillConfig([]byte(known), info); err != nil || len(fields) > 0 || string(same) != known {
		t.Errorf("a complete configuration: filled %q, %v", fields, err)
	}
}
