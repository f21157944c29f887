package engine_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/lifecycle"
	"constellation/engine/plan"
)

// A minor that is newer than the data of this program, and that no release has yet.
func TestMinorThatIsNewerThanTheData(t *testing.T) {
	newest := lifecycle.Newest()
	unknown := v(fmt.Sprintf("v1.%d.0", newest.Minor()+2))
	title := fmt.Sprintf("Kubernetes v1.%d and %s are newer than the data of this program, which ends at %s", newest.Minor()+1, unknown.MinorString(), newest.MinorString())

	t.Run("check reports the minor first and runs the preflight checks", func(t *testing.T) {
		s := newCheckStage(t)
		s.inside.findings = []plan.Finding{{ID: "removed-apis-used", Severity: plan.Warn, Title: "clients read things"}, {ID: "pods", Severity: plan.Info, Title: "fine"}}
		c := s.mustCheck(check.Request{Kubernetes: unknown})
		if f := c.Findings[0]; f.ID != check.FindingData || f.Severity != plan.NotChecked || f.Title != title || f.Remedy == "" {
			t.Errorf("the first finding is %+v, want %s", f, title)
		}
		if !slices.ContainsFunc(c.Findings, func(f plan.Finding) bool { return f.Title == "clients read things" }) {
			t.Errorf("the finding of a preflight check is missing: %v", found(c))
		}
		if d := cmp.Diff([]check.PreflightRequest{{From: v("v1.35.4"), To: unknown, Release: v("v1.0.0")}}, s.inside.asked); d != "" {
			t.Error(d)
		}
		for _, f := range c.Findings {
			if f.Severity == plan.Block && !strings.Contains(f.ID, "offered") {
				t.Errorf("%s blocks: %s", f.ID, f.Title)
			}
		}
	})
	t.Run("check without preflight reports it, too", func(t *testing.T) {
		s := newCheckStage(t)
		c := s.mustCheck(check.Request{Kubernetes: unknown, NoPreflight: true})
		if c.Findings[0].Title != title || len(s.inside.asked) > 0 {
			t.Errorf("findings %v, checked %v", found(c), s.inside.asked)
		}
	})
	t.Run("a version that is far away is not checked", func(t *testing.T) {
		s := newCheckStage(t)
		c := s.mustCheck(check.Request{Kubernetes: v("v1.2000000000.0")})
		if c.Findings[0].ID != check.FindingData || len(s.inside.asked) > 0 {
			t.Errorf("findings %v, checked %v", found(c), s.inside.asked)
		}
	})
	t.Run("a patch of a known minor that no release has is not checked", func(t *testing.T) {
		s := newCheckStage(t)
		c := s.mustCheck(check.Request{Kubernetes: v("v1.35.99")})
		if c.Findings[0].ID == check.FindingData || len(s.inside.asked) > 0 {
			t.Errorf("findings %v, checked %v", found(c), s.inside.asked)
		}
	})
	t.Run("apply and prepare refuse it with a remedy", func(t *testing.T) {
		request := engine.PrepareRequest{Request: check.Request{Kubernetes: unknown}}
		nothing := func(plan.Event) {}
		for verb, propose := range map[string]func(*engine.Engine) (*plan.Plan, error){
			"apply": func(e *engine.Engine) (*plan.Plan, error) {
				return e.PlanApply(t.Context(), engine.ApplyRequest{PrepareRequest: request}, nothing)
			},
			"prepare": func(e *engine.Engine) (*plan.Plan, error) { return e.PlanPrepare(t.Context(), request, nothing) },
		} {
			s := newCheckStage(t)
			p, err := propose(s.engine())
			if err != nil {
				t.Fatalf("%s: %v", verb, err)
			}
			findings := p.Findings
			if f := findings[0]; f.ID != check.FindingData || f.Severity != plan.Block || !strings.Contains(f.Remedy, "install a release of constellation") {
				t.Errorf("%s: the first finding is %+v, want a refusal with a remedy", verb, f)
			}
			if len(s.inside.asked) > 0 {
				t.Errorf("%s: the preflight checks ran: %v", verb, s.inside.asked)
			}
		}
	})
}
