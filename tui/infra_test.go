package tui

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"constellation/engine"
	"constellation/engine/infra"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/internal/golden"
	"constellation/tui/internal/enginefake"
)

// infraReport has an object of each state.
func infraReport() engine.InfraReport {
	return engine.InfraReport{
		Schema: plan.Schema, Time: enginefake.Start, CLI: "v1.1.0", Cluster: "demo", Provider: "gcp", Cloud: "project my-project", UID: "1a2b3c4d",
		Objects: []infra.Object{
			{ID: "network", Kind: "network", Name: "shared", Purpose: "connects the machines", State: infra.Own},
			{ID: "subnetwork", Kind: "subnetwork", Name: "gone", Place: "europe-west3", State: infra.Wrong},
			{ID: "firewall-internal", Kind: "firewall rule", Name: "constellation-1a2b3c4d-internal", Purpose: "lets machines and pods reach each other", State: infra.Exists},
			{ID: "firewall-health", Kind: "firewall rule", Name: "constellation-1a2b3c4d-health", State: infra.Differs, Differences: []string{`sourceRanges has "0.0.0.0/0"`}},
			{ID: "address", Kind: "address", Name: "constellation-1a2b3c4d", Place: "europe-west3", State: infra.Taken},
			{ID: "health-check", Kind: "health check", Name: "constellation-1a2b3c4d", Place: "europe-west3", Details: []string{"HTTPS /readyz at port 6443"}, State: infra.Absent},
			{ID: "template-workers", Kind: "instance template", Name: "constellation-1a2b3c4d-workers", State: infra.Unknown},
		},
		Findings: append([]plan.Finding{{ID: infra.FindingRight, Severity: plan.Block, Title: "the permission compute.instanceTemplates.list is missing", Remedy: "grant it to your account; `constellation infra plan --print-role` prints the least role"}},
			infra.Findings([]infra.Object{{Kind: "firewall rule", Name: "constellation-1a2b3c4d-health", State: infra.Differs, Differences: []string{`sourceRanges has "0.0.0.0/0"`}}})...),
		Notes: []string{"The cloud charges for machines, disks and the address until `constellation infra terminate` has deleted them."},
	}
}

func TestInfraPlan(t *testing.T) {
	path, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	out, errs, code := printedHere(t, &enginefake.Engine{Infra: infraReport()}, "infra", "plan")
	golden.Equal(t, path+"/testdata/infraplan.txt", out+errs)
	if code != plan.ExitBlocked {
		t.Errorf("exit %d", code)
	}
	fine := infraReport()
	fine.Findings = fine.Findings[1:]
	if _, errs, code := printedHere(t, &enginefake.Engine{Infra: fine}, "infra", "plan"); code != plan.ExitDone || errs != "" {
		t.Errorf("exit %d, %s", code, errs)
	}
	out, _, code = printedHere(t, &enginefake.Engine{Infra: infraReport()}, "infra", "plan", "-o", "json")
	var got engine.InfraReport
	if err := json.Unmarshal([]byte(out), &got); err != nil || code != plan.ExitBlocked || len(got.Objects) != 7 || got.Objects[0].State != infra.Own {
		t.Errorf("exit %d, %v\n%s", code, err, out)
	}
}

func TestInfraRole(t *testing.T) {
	e := func() *enginefake.Engine {
		return &enginefake.Engine{Roles: []infra.Role{{Name: "infra", Text: "title: infra\n", Rights: []infra.Right{{Permission: "p", Methods: []string{"m"}}}}, {Name: "control-plane", Text: "title: control-plane\n"}}}
	}
	for _, tt := range []struct {
		args string
		code int
		want string
	}{
		{args: "--print-role", want: "title: infra\n"},
		{args: "--print-role=infra", want: "title: infra\n"},
		{args: "--print-role=control-plane", want: "title: control-plane\n"},
		{args: "--print-role=infra -o json", want: `"permission": "p"`},
		{args: "--print-role=owner", code: plan.ExitUsage, want: "want infra, control-plane or worker"},
	} {
		t.Run(tt.args, func(t *testing.T) {
			out, errs, code := printedHere(t, e(), append([]string{"infra", "plan"}, strings.Fields(tt.args)...)...)
			if code != tt.code || !strings.Contains(out+errs, tt.want) {
				t.Errorf("exit %d, want %d and %q\n%s%s", code, tt.code, tt.want, out, errs)
			}
		})
	}
}

func infraPlanOf(verb plan.Verb) *plan.Plan {
	return &plan.Plan{
		ID: "infra-20261121070501-1a2b3c4d", Verb: verb, Cluster: "demo", Created: enginefake.Start, Notes: []string{"Nothing restores them."},
		Steps: []plan.Step{{ID: "network", Title: "Create network constellation-1a2b3c4d", Effect: "connects the machines"}},
	}
}

func TestInfraCreateRequiresConsent(t *testing.T) {
	for _, tt := range []struct {
		name string
		e    enginefake.Engine
		args []string
		ran  int
		code int
		want string
	}{
		{name: "no consent", e: enginefake.Engine{Plan: infraPlanOf(plan.VerbInfraCreate)}, code: plan.ExitUnacknowledged, want: "would     Create network constellation-1a2b3c4d: connects the machines"},
		{name: "it is accepted", e: enginefake.Engine{Plan: infraPlanOf(plan.VerbInfraCreate)}, args: []string{"--yes", "--non-interactive"}, ran: 1},
		{name: "events", e: enginefake.Engine{Plan: infraPlanOf(plan.VerbInfraCreate)}, args: []string{"--yes", "-o", "json"}, ran: 1},
		{name: "no configuration", e: enginefake.Engine{PlanErr: &plan.Error{Err: errors.New("there is no configuration"), Exit: plan.ExitUsage}}, args: []string{"--yes"}, code: plan.ExitUsage, want: "there is no configuration"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := tt.e
			out, errs, code := printedHere(t, &e, append([]string{"infra", "create"}, tt.args...)...)
			if code != tt.code || e.Ran != tt.ran || !strings.Contains(out+errs, tt.want) {
				t.Errorf("exit %d, ran %d times, want %d, %d and %q\n%s%s", code, e.Ran, tt.code, tt.ran, tt.want, out, errs)
			}
		})
	}
}

// infraFile is the beginning of a state.
const infraFile = `version: v1
infrastructure:
  uid: 1a2b3c4d
  name: demo
  provider: gcp
  initSecret: 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f
  gcp:
    project: my-project
    zones:
      - europe-west3-a
    uid: 1a2b3c4d
`

func TestInfraTerminateWantsTheName(t *testing.T) {
	for _, tt := range []struct {
		name string
		args []string
		ran  int
		code int
		want string
	}{
		{name: "no name", code: plan.ExitUnacknowledged, want: "--confirm demo"},
		{name: "the name", args: []string{"--confirm", "demo"}, ran: 1},
		{name: "another name", args: []string{"--confirm", "prod"}, code: plan.ExitUsage, want: `--confirm names "prod"; nothing was deleted`},
		{name: "an empty name", args: []string{"--confirm", ""}, code: plan.ExitUnacknowledged, want: "--confirm demo"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(dir+"/"+workspace.InfraFile, []byte(infraFile), 0o600); err != nil {
				t.Fatal(err)
			}
			e := enginefake.Engine{Plan: infraPlanOf(plan.VerbInfraTerminate)}
			out, errs, code := printedHere(t, &e, append([]string{"-C", dir, "infra", "terminate"}, tt.args...)...)
			if code != tt.code || e.Ran != tt.ran || !strings.Contains(out+errs, tt.want) {
				t.Errorf("exit %d, ran %d times, want %d, %d and %q\n%s%s", code, e.Ran, tt.code, tt.ran, tt.want, out, errs)
			}
		})
	}
}
