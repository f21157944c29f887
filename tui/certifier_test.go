package tui

import (
	"testing"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
)

func TestCertifierRotateRequests(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want engine.RotateRequest
	}{
		{want: engine.RotateRequest{}},
		{args: []string{"--revoke", "--reason", "stolen", "--dry-run"}, want: engine.RotateRequest{Revoke: true, Reason: "stolen", Rehearse: true}},
	} {
		e := &enginefake.Engine{Plan: &plan.Plan{ID: "r", Verb: plan.VerbRotate, Cluster: "demo"}}
		_, errs, code := printed(t, e, "", append([]string{"certifier", "rotate", "--non-interactive", "--yes"}, tt.args...)...)
		if e.RotatedAs != tt.want {
			t.Errorf("%v: request %+v, want %+v; exit %d, stderr %q", tt.args, e.RotatedAs, tt.want, code, errs)
		}
	}
}
