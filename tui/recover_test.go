package tui

import (
	"reflect"
	"strings"
	"testing"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
)

func TestRecoverRequests(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want engine.RecoverRequest
	}{
		{want: engine.RecoverRequest{Nodes: []string{}}},
		{args: []string{"control-plane-1", "control-plane-2", "--dry-run"}, want: engine.RecoverRequest{Nodes: []string{"control-plane-1", "control-plane-2"}, Rehearse: true}},
	} {
		e := &enginefake.Engine{Plan: &plan.Plan{ID: "r", Verb: plan.VerbRecover, Cluster: "demo"}}
		_, errs, code := printed(t, e, "", append([]string{"recover", "--non-interactive", "--yes"}, tt.args...)...)
		if !reflect.DeepEqual(e.RecoveredAs, tt.want) {
			t.Errorf("%v: request %+v, want %+v; exit %d, stderr %q", tt.args, e.RecoveredAs, tt.want, code, errs)
		}
	}
}

func TestEncryptionRotateRequests(t *testing.T) {
	want := engine.RotateKeyRequest{Reason: "yearly", Rehearse: true}
	e := &enginefake.Engine{Plan: &plan.Plan{ID: "r", Verb: plan.VerbEncrypt, Cluster: "demo"}}
	if _, errs, code := printed(t, e, "", "encryption", "rotate", "--non-interactive", "--yes", "--reason", "yearly", "--dry-run"); e.KeyRotatedAs != want {
		t.Errorf("request %+v, want %+v; exit %d, stderr %q", e.KeyRotatedAs, want, code, errs)
	}
}

func TestEncryptionStatusIsPrinted(t *testing.T) {
	for _, tt := range []struct {
		name   string
		status engine.EncryptionStatus
		want   []string
	}{
		{name: "not encrypted", status: engine.EncryptionStatus{Cluster: "demo"}, want: []string{"cluster demo", "not encrypted"}},
		{
			name: "during a rotation",
			status: engine.EncryptionStatus{
				Cluster: "demo", Encrypts: true, Generation: 2, Recorded: 1, Record: "generation 2 by ops",
				APIServers: []engine.APIServerKey{{Node: "control-plane-0", Generation: 1}, {Node: "control-plane-1"}, {Node: "control-plane-2", Problem: "no pod"}},
			},
			want: []string{"2, not all Secrets were written with it", "in your file", "generation 2 by ops", "control-plane-0", "encrypts with generation 1", "no pod", "does not follow from your master secret"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, errs, code := printed(t, &enginefake.Engine{Encrypted: tt.status}, "", "encryption", "status")
			for _, w := range tt.want {
				if !strings.Contains(out, w) {
					t.Errorf("no %q in\n%s%s, exit %d", w, out, errs, code)
				}
			}
			if out, _, _ := printed(t, &enginefake.Engine{Encrypted: tt.status}, "", "encryption", "status", "-o", "json"); !strings.Contains(out, `"cluster": "demo"`) {
				t.Errorf("as JSON:\n%s", out)
			}
		})
	}
}
