package tui

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
)

const restoredID = "backup-20261121070501-1a2b3c4d"

func TestDiffOutput(t *testing.T) {
	widget := engine.ObjectName{Group: "example.com", Resource: "widgets", Namespace: "shop", Name: "blue"}
	some := []engine.Difference{
		{Object: widget, Change: engine.ChangeChanged, Fields: []string{"spec.a", `data["\u202ex"]`}, More: 2},
		{Object: engine.ObjectName{Group: "example.com", Resource: "fleets", Name: "one"}, Change: engine.ChangeRemoved},
		{Object: engine.ObjectName{Resource: "secrets", Namespace: "shop", Name: "new"}, Change: engine.ChangeAdded},
	}
	compared := engine.Compared{Types: 3, Objects: 1200}
	for _, tt := range []struct {
		name   string
		e      enginefake.Engine
		text   string
		json   string
		code   int
		stderr string
	}{
		{
			name: "nothing differs",
			e:    enginefake.Engine{Compared: compared},
			text: "nothing differs from backup " + restoredID + " (1200 objects of 3 types)\n",
			json: `{"schema":"1.0","backup":"` + restoredID + `","differences":[],"complete":true,"added":0,"removed":0,"changed":0,"types":3,"objects":1200}`, code: plan.ExitDone,
		},
		{
			name: "some objects differ",
			e:    enginefake.Engine{Compared: compared, Differences: some},
			text: "~ example.com/widgets/shop/blue  spec.a, data[\"\\u202ex\"] and 2 more\n- example.com/fleets/one\n+ core/secrets/shop/new\n1 removed, 1 changed, 1 added since backup " + restoredID + " (1200 objects of 3 types)\n",
			json: `{"schema":"1.0","backup":"` + restoredID + `","differences":[{"object":{"group":"example.com","resource":"widgets","namespace":"shop","name":"blue"},"change":"changed","fields":["spec.a","data[\"\\u202ex\"]"],"more":2},` +
				`{"object":{"group":"example.com","resource":"fleets","name":"one"},"change":"removed"},{"object":{"group":"","resource":"secrets","namespace":"shop","name":"new"},"change":"added"}],"complete":true,"added":1,"removed":1,"changed":1,"types":3,"objects":1200}`,
			code: plan.ExitDiffers,
		},
		{
			name: "a part could not be compared",
			e:    enginefake.Engine{Compared: engine.Compared{Types: 3, Objects: 2, Skipped: []string{"gizmos.example.com: no"}}},
			text: "? gizmos.example.com: no\n0 removed, 0 changed, 0 added since backup " + restoredID + " (2 objects of 3 types)\n",
			json: `{"schema":"1.0","backup":"` + restoredID + `","differences":[],"complete":false,"added":0,"removed":0,"changed":0,"types":3,"objects":2,"skipped":["gizmos.example.com: no"]}`,
			code: plan.ExitFailed, stderr: "1 part could not be compared: gizmos.example.com: no",
		},
		{name: "backup not found", e: enginefake.Engine{PlanErr: &plan.Error{Op: "open backup", Err: errors.New("there is none"), Exit: plan.ExitUsage}}, code: plan.ExitUsage, stderr: "there is none"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := tt.e
			out, errs, code := printedHere(t, &e, "backup", "diff", restoredID, "--only", "example.com/widgets", "--dir", "d")
			if out != tt.text || code != tt.code || !strings.Contains(errs, tt.stderr) {
				t.Errorf("exit %d, stderr %q\n got %q\nwant %q", code, errs, out, tt.text)
			}
			if want := (engine.RestoreRequest{ID: restoredID, Dir: "d", Only: []string{"example.com/widgets"}}); !cmp.Equal(e.RestoredAs, want) {
				t.Errorf("asked for %+v", e.RestoredAs)
			}
			out, _, code = printedHere(t, &e, "backup", "diff", restoredID, "-o", "json")
			if tt.json == "" {
				if out != "" || code != tt.code {
					t.Errorf("exit %d, JSON %s", code, out)
				}
				return
			}
			var got, want any
			if err := json.Unmarshal([]byte(out), &got); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if err := json.Unmarshal([]byte(tt.json), &want); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(want, got); d != "" || code != tt.code {
				t.Errorf("exit %d (-want +got):\n%s", code, d)
			}
		})
	}
}

func TestRestoreRequiresConsent(t *testing.T) {
	p := func(finished bool) *plan.Plan {
		return &plan.Plan{
			ID: "backup-restore-20261121070501-1a2b3c4d", Verb: plan.VerbRestore, Cluster: "demo", Created: enginefake.Start,
			Findings: []plan.Finding{{ID: "other-cluster", Severity: plan.Warn, Title: "the backup is of another cluster"}},
			Steps:    []plan.Step{{ID: engine.StepRestore, Title: "Restore backup " + restoredID, Effect: "2 created", Finished: finished}},
		}
	}
	foreign := func() *plan.Plan {
		p := p(false)
		p.Findings = append(p.Findings, plan.Finding{ID: engine.FindingForeignBackup, Severity: plan.Warn, Named: true, Title: "the backup was authenticated with another master secret"})
		return p
	}
	for _, tt := range []struct {
		name      string
		e         enginefake.Engine
		args      []string
		ran, code int
		stdout    string
	}{
		{name: "a backup of another master secret", e: enginefake.Engine{Plan: foreign()}, args: []string{"--yes"}, code: plan.ExitUnacknowledged, stdout: "backup-foreign must be acknowledged by ID"},
		{name: "no consent", e: enginefake.Engine{Plan: p(false)}, code: plan.ExitUnacknowledged, stdout: "would     Restore backup " + restoredID + ": 2 created"},
		{name: "accepted", e: enginefake.Engine{Plan: p(false)}, args: []string{"--yes", "--overwrite"}, ran: 1, code: plan.ExitDone},
		{name: "a dry run needs no consent", e: enginefake.Engine{Plan: p(false)}, args: []string{"--dry-run"}, ran: 1, code: plan.ExitDone},
		{name: "nothing to restore", e: enginefake.Engine{Plan: p(true), RunErr: &plan.Error{Err: errors.New("nothing to restore"), Exit: plan.ExitNothing}}, ran: 1, code: plan.ExitNothing},
		{name: "damaged backup", e: enginefake.Engine{PlanErr: &plan.Error{Err: errors.New("not whole"), Remedy: "take another"}}, args: []string{"--yes"}, code: plan.ExitFailed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := tt.e
			out, errs, code := printedHere(t, &e, append([]string{"backup", "restore", restoredID}, tt.args...)...)
			if code != tt.code || e.Ran != tt.ran || !strings.Contains(out, tt.stdout) {
				t.Errorf("exit %d, ran %d times, stderr %q\n%s", code, e.Ran, errs, out)
			}
			overwrite := strings.Contains(strings.Join(tt.args, " "), "overwrite")
			if e.RestoredAs.ID != restoredID || e.RestoredAs.Overwrite != overwrite {
				t.Errorf("asked for %+v", e.RestoredAs)
			}
		})
	}
}

func TestRestorePrintsEachObject(t *testing.T) {
	events := []plan.Event{
		{Kind: plan.KindLog, Source: "restore", Level: "info", Object: "example.com/widgets/shop/web", State: engine.RestoreCreated, Text: "created example.com/widgets/shop/web"},
		{Kind: plan.KindLog, Source: "restore", Level: "info", Object: "example.com/widgets/shop/x", State: engine.RestoreLeft, Text: "left example.com/widgets/shop/x: differs in spec.\x1b[2J"},
		{Kind: plan.KindLog, Source: "restore", Level: "debug", Object: "example.com/widgets/shop/y", State: engine.RestoreSame, Text: "same example.com/widgets/shop/y"},
	}
	for _, tt := range []struct {
		name   string
		dryRun bool
		want   string
	}{
		{name: "restore", dryRun: false, want: `07:05:01Z restore            created   example.com/widgets/shop/web
07:05:01Z restore            left      example.com/widgets/shop/x: differs in spec.\x1b[2J
`},
		{name: "dry run", dryRun: true, want: `07:05:01Z restore            would     created example.com/widgets/shop/web
07:05:01Z restore            would     left example.com/widgets/shop/x: differs in spec.\x1b[2J
`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out strings.Builder
			p := newPlainPrinter(&guarded{w: &out}, nil, func() time.Time { return enginefake.Start })
			defer p.close()
			for _, ev := range events {
				ev.Time = enginefake.Start
				p.printRestored(ev, tt.dryRun)
				p.event(ev)
			}
			if out.String() != tt.want {
				t.Errorf("got\n%swant\n%s", out.String(), tt.want)
			}
		})
	}
}
