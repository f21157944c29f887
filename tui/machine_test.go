package tui

import (
	"errors"
	"strings"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
)

func TestRevokeRequiresConsent(t *testing.T) {
	pl := func(edit func(*plan.Plan)) *plan.Plan {
		p := &plan.Plan{
			ID: "machine-revoke-20261121070501-1a2b3c4d", Verb: plan.VerbRevoke, Cluster: "demo", Node: "worker-1", Created: enginefake.Start,
			Notes: []string{"Data on its disks is lost."},
			Steps: []plan.Step{{ID: engine.StepRemove, Title: "Have the machine removed", Effect: "machine and Node are deleted", Warning: "It can never join again."}},
		}
		if edit != nil {
			edit(p)
		}
		return p
	}
	blocked := func(p *plan.Plan) {
		p.Findings = []plan.Finding{{ID: "last-control-plane", Severity: plan.Block, Title: "it is the only control plane", Remedy: "create a new cluster"}}
	}
	for _, tt := range []struct {
		name    string
		e       enginefake.Engine
		args    []string
		ran     int
		code    int
		want    string // on stdout or stderr
		request engine.RevokeRequest
	}{
		{name: "no consent", e: enginefake.Engine{Plan: pl(nil)}, code: plan.ExitUnacknowledged, want: "--yes", request: engine.RevokeRequest{Node: "worker-1"}},
		{name: "the plan warns of data loss", e: enginefake.Engine{Plan: pl(nil)}, code: plan.ExitUnacknowledged, want: "Data on its disks is lost.", request: engine.RevokeRequest{Node: "worker-1"}},
		{name: "the plan lists its steps", e: enginefake.Engine{Plan: pl(nil)}, code: plan.ExitUnacknowledged, want: "would     Have the machine removed: machine and Node are deleted", request: engine.RevokeRequest{Node: "worker-1"}},
		{
			name: "it is accepted",
			e:    enginefake.Engine{Plan: pl(nil)},
			args: []string{"--replace", "--reason", "captured", "--kubeconfig", "k", "--non-interactive", "--yes"},
			ran:  1, code: plan.ExitDone,
			request: engine.RevokeRequest{Node: "worker-1", Replace: true, Reason: "captured", Kubeconfig: "k"},
		},
		{name: "a dry run needs no consent", e: enginefake.Engine{Plan: pl(func(p *plan.Plan) { p.Rehearsal = true })}, args: []string{"--dry-run"}, ran: 1, code: plan.ExitDone, request: engine.RevokeRequest{Node: "worker-1", Rehearse: true}},
		{name: "the last control plane", e: enginefake.Engine{Plan: pl(blocked)}, args: []string{"--yes"}, code: plan.ExitBlocked, want: "create a new cluster", request: engine.RevokeRequest{Node: "worker-1"}},
		{
			name: "there is no such machine",
			e:    enginefake.Engine{PlanErr: &plan.Error{Err: errors.New("there is no such node"), Exit: plan.ExitUsage, Remedy: "look at status"}},
			args: []string{"--yes"}, code: plan.ExitUsage, want: "there is no such node",
			request: engine.RevokeRequest{Node: "worker-1"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := tt.e
			out, errs, code := printedHere(t, &e, append([]string{"machine", "revoke", "worker-1"}, tt.args...)...)
			if code != tt.code || e.Ran != tt.ran || !strings.Contains(out+errs, tt.want) {
				t.Errorf("exit %d, ran %d times, want %d and %d with %q\nstderr %s\n%s", code, e.Ran, tt.code, tt.ran, tt.want, errs, out)
			}
			if e.RevokedAs != tt.request {
				t.Errorf("PlanRevoke called with %+v, want %+v", e.RevokedAs, tt.request)
			}
		})
	}
}

func TestRevokePromptWantsTheName(t *testing.T) {
	for _, tt := range []struct {
		name, answer string
		accepted     bool
	}{
		{name: "the name", answer: "worker-1\n", accepted: true},
		{name: "the name with spaces around it", answer: "  worker-1 \n", accepted: true},
		{name: "another name", answer: "worker-2\n", accepted: false},
		{name: "a yes", answer: "y\n", accepted: false},
		{name: "nothing", answer: "", accepted: false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var errs strings.Builder
			s := newSession(App{Env: func(string) string { return "" }, Now: func() time.Time { return enginefake.Start }, Stdin: strings.NewReader(tt.answer), Stdout: &strings.Builder{}, Stderr: &errs})
			p := &plan.Plan{Verb: plan.VerbRevoke, Cluster: "demo", Steps: []plan.Step{{ID: engine.StepRemove}}}
			a := acceptance{asks: true, question: fixedQuestion("Type worker-1 to revoke this machine: "), name: "worker-1", show: func(*plan.Plan, sink) {}}
			_, err := a.accept(s, p, s.printer(text, false), text)
			if (err == nil) != tt.accepted || !tt.accepted && plan.ExitCode(err) != plan.ExitUnacknowledged {
				t.Errorf("accepted with %v, want %t", err, tt.accepted)
			}
			if !strings.Contains(errs.String(), "Type worker-1") {
				t.Errorf("prompt %q", errs.String())
			}
		})
	}
}
