package tui

import (
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
)

func TestApplyRequiresConsent(t *testing.T) {
	for _, tt := range []struct {
		name string
		args string
		exit int
		says string // on stderr
	}{
		{name: "no flag", exit: plan.ExitUnacknowledged, says: "local-data must be acknowledged by ID"},
		{name: "--yes does not acknowledge", args: "--yes", exit: plan.ExitUnacknowledged, says: "--ack local-data"},
		{name: "--ack does not accept the plan", args: "--ack local-data", exit: plan.ExitUnacknowledged, says: "run the same command with --yes"},
		{name: "--yes and --ack", args: "--yes --ack local-data", exit: plan.ExitDone},
		{name: "every warning acknowledged", args: "--ack local-data --ack probes", exit: plan.ExitDone},
		{name: "a rehearsal needs no consent", args: "--dry-run", exit: plan.ExitDone},
		{name: "unknown output format", args: "-o xml", exit: plan.ExitUsage, says: "want text, json or markdown"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := &enginefake.Engine{Plan: enginefake.UpgradePlan()}
			args := append([]string{"upgrade", "apply", "--non-interactive"}, strings.Fields(tt.args)...)
			if slices.Contains(args, "--dry-run") {
				f.Plan.Rehearsal = true
			}
			if i := slices.Index(args, "--ack"); i >= 0 {
				f.Plan.Acknowledged = []string{"local-data"}
			}
			_, errs, code := printed(t, f, "", args...)
			if code != tt.exit || !strings.Contains(errs, tt.says) {
				t.Errorf("exit %d, want %d; stderr %q, want %q", code, tt.exit, errs, tt.says)
			}
			if ran := f.Ran > 0; ran != (tt.exit == plan.ExitDone) {
				t.Errorf("ran: %t", ran)
			}
		})
	}
}

// The remedy of a finding names --ack, so `upgrade prepare` takes it, too.
func TestPrepareTakesTheFlagOfTheRemedy(t *testing.T) {
	for _, flag := range []string{"--ack", "--acknowledge"} {
		f := &enginefake.Engine{Plan: enginefake.UpgradePlan()}
		f.Plan.Acknowledged = []string{"local-data"}
		if _, errs, code := printed(t, f, "", "upgrade", "prepare", "--non-interactive", "--yes", flag, "local-data"); code != plan.ExitDone {
			t.Errorf("%s: exit %d, stderr %q", flag, code, errs)
		}
	}
}

func TestApplyPrintsWholePlan(t *testing.T) {
	s := newSession(App{Env: func(string) string { return "" }, Now: func() time.Time { return enginefake.Start }})
	p := enginefake.UpgradePlan()
	p.LastBackup = &plan.LastBackup{Created: enginefake.Start.Add(-26 * time.Hour), Objects: 214, Bytes: 3 << 20, Etcd: true}
	text := strings.Join(planText(s.page(), s.answerWidth(), p), "\n")
	for _, want := range []string{"last backup    26h ago, 214 objects, 3 MiB, with an etcd snapshot", "OS image", "v1.0.0", "v1.1.0", "replaces 2 of workers", "backup            done before", "(point of no return)", "data of db/pg will be lost", "Warning: their disks are gone"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func TestPauseResumeCancel(t *testing.T) {
	yes, no := true, false
	for verb, want := range map[string]cluster.RolloutChange{
		"pause": {Paused: &yes}, "resume": {Paused: &no, Cancelled: &no}, "cancel": {Cancelled: &yes},
	} {
		f := &enginefake.Engine{Rollout: cluster.Rollout{Target: cluster.NodeTarget{ImageVersion: "v1.1.0", Kubernetes: "v1.35.4"}}}
		out, _, code := printed(t, f, "", "upgrade", verb)
		if d := cmp.Diff(want, f.Changed); code != 0 || d != "" || !strings.Contains(out, "the rollout to image v1.1.0 and Kubernetes v1.35.4 ") {
			t.Errorf("%s: exit %d, %q (-want +got):\n%s", verb, code, out, d)
		}
		if out, _, code := printed(t, f, "", "upgrade", verb, "-o", "json"); code != 0 || !strings.Contains(out, `"changed": true`) {
			t.Errorf("%s: exit %d, %s", verb, code, out)
		}
	}
}

func TestSkipAndRetry(t *testing.T) {
	for _, tt := range []struct {
		name, verb string
		was        cluster.SkipState
		err        error
		code       int
		text, json string
	}{
		{
			name: "a node", verb: "skip",
			was: cluster.SkipState{Name: "worker-3", Kind: cluster.SkipNode}, code: plan.ExitDone,
			text: "node worker-3 is skipped; `constellation upgrade retry worker-3` resumes it\n", json: `"name":"worker-3","kind":"node","skipped":true,"changed":true`,
		},
		{
			name: "retry of a postponed node", verb: "retry",
			was: cluster.SkipState{Name: "worker-3", Kind: cluster.SkipNode, Postponed: enginefake.Start}, code: plan.ExitDone,
			text: "node worker-3 is resumed: the rollout replaces it in turn\n", json: `"name":"worker-3","kind":"node","skipped":false,"changed":true`,
		},
		{
			name: "retry of a node whose upgrade failed", verb: "retry",
			was: cluster.SkipState{Name: "worker-3", Kind: cluster.SkipNode, Failed: true}, code: plan.ExitDone,
			text: "node worker-3 is retried now\n", json: `"name":"worker-3","kind":"node","skipped":false,"changed":true`,
		},
		{
			name: "node that is skipped already", verb: "skip",
			was: cluster.SkipState{Name: "worker-3", Kind: cluster.SkipNode, Held: true},
			err: &plan.Error{Err: errors.New("node worker-3 is skipped already: nothing to do"), Exit: plan.ExitNothing}, code: plan.ExitNothing, json: `"name":"worker-3","kind":"node","skipped":true,"changed":false`,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := &enginefake.Engine{Holding: tt.was, PlanErr: tt.err}
			out, _, code := printed(t, f, "", "upgrade", tt.verb, "worker-3")
			if out = regexp.MustCompile(" -C [^ ]+").ReplaceAllString(out, ""); code != tt.code || out != tt.text || f.Skipped != "worker-3" || f.Skips != (tt.verb == "skip") {
				t.Errorf("exit %d, %q; Skip called with %q %t", code, out, f.Skipped, f.Skips)
			}
			out, _, code = printed(t, f, "", "upgrade", tt.verb, "worker-3", "-o", "json")
			if out = strings.NewReplacer("\n", "", "  ", "", ": ", ":").Replace(out); code != tt.code || !strings.Contains(out, tt.json) {
				t.Errorf("exit %d, %s", code, out)
			}
		})
	}
	if _, errs, code := printed(t, &enginefake.Engine{}, "", "upgrade", "skip"); code != plan.ExitUsage {
		t.Errorf("without a name: exit %d, %q", code, errs)
	}
}

// The Markdown summary covers the whole run and escapes markup from the cluster.
func TestApplyWritesASummary(t *testing.T) {
	p := enginefake.HopPlan()
	p.Acknowledged = []string{"local-data", "oldest-supports-kubernetes"}
	p.Findings[2].Title = "a workload called <b>`x`</b> | has no probe"
	events, _ := enginefake.HopEvents(t, p)
	out, errs, code := printed(t, &enginefake.Engine{Plan: p, Events: events}, "", "upgrade", "apply", "--yes", "-o", "markdown")
	if code != 0 || !strings.Contains(errs, "wait-for-rollout   ok") {
		t.Fatalf("exit %d, stderr %q", code, errs)
	}
	enginefake.CheckGolden(t, "plain/apply.md", out)
}

func TestApplyWritesASummaryOfARefusal(t *testing.T) {
	out, _, code := printed(t, &enginefake.Engine{Plan: enginefake.HopPlan()}, "", "upgrade", "apply", "--yes", "-o", "markdown")
	if code != plan.ExitUnacknowledged || !strings.Contains(out, "## Upgrade apply of cluster `demo`: failed") || !strings.Contains(out, "local-data, oldest-supports-kubernetes must be acknowledged by ID (exit 5") {
		t.Errorf("exit %d\n%s", code, out)
	}
}
