package tui

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

func verifyCommand(s *session) *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Verify fresh attestation evidence of the cluster",
		Long: `Have the join service of each control plane make fresh attestation evidence, and judge it by
the files of the workspace: trust roots and measurements of the configuration, cluster ID and
infrastructure of the state. Evidence comes through the API server, which need not be trusted.

Workers make no evidence after they joined, so they are not verified. Each join service logs
one refused connection, because this program shows no evidence of its own.

The exit code is 0 if all control planes were verified, 4 if the evidence of one was refused, and
1 if that of one could not be had.`,
		Example: `  constellation verify
  constellation verify -o json | jq '.machines[] | {node, result, reason}'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return printVerification(cmd.Context(), s, out) },
	}
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// printVerification runs `verify`.
func printVerification(ctx context.Context, s *session, f format) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	v, err := eng.Verify(ctx)
	if err != nil {
		return err
	}
	if f == asJSON {
		if err := document(s.out, v); err != nil {
			return err
		}
	} else {
		s.print(verificationText(s.page(), &v))
	}
	return notVerified(&v)
}

// notVerified is the error of a verification that not all control planes passed.
func notVerified(v *engine.Verification) error {
	var refused, missing []string
	for _, m := range v.Machines {
		switch m.Result {
		case engine.Refused:
			refused = append(refused, m.Node)
		case engine.NotVerified:
			missing = append(missing, m.Node)
		}
	}
	e := &plan.Error{Op: "verify cluster " + v.Cluster}
	switch {
	case len(refused) > 0:
		e.Err, e.Exit = errors.New("the evidence of "+words.And(refused)+" was refused"), plan.ExitBlocked
		e.Remedy = "the output has a remedy for each machine"
	case len(missing) > 0:
		e.Err, e.Remedy = errors.New("there is no evidence of "+words.And(missing)), "the output has a remedy for each machine"
	default:
		return nil
	}
	return e
}

// verificationText renders the output of verify.
func verificationText(pg view.Page, v *engine.Verification) []string {
	w := view.PrintedWidth
	lines := []string{pg.Row(w).Add(term.Plain, "cluster "+term.Clean(v.Cluster)+"   evidence "+v.Variant+view.Marked(v.Simulated, v.NotAttested, "   ")).String()}
	var problems []plan.Finding
	for _, m := range v.Machines {
		sign, style := pg.OK, term.Good
		if m.Result != engine.Verified {
			sign, style = pg.Warn, term.Caution
		}
		lines = append(lines, pg.Row(w).Add(term.Plain, " ").Add(style, sign).Add(term.Plain, " ").Col(term.Plain, term.Clean(m.Node), 30).
			Col(term.Plain, m.Result, 14).Add(term.Faint, evidenceText(v, m)).String())
		switch m.Result {
		case engine.Refused:
			problems = append(problems, plan.Finding{Severity: plan.Block, Title: m.Node + ": evidence refused", Detail: m.Reason, Remedy: m.Remedy})
		case engine.NotVerified:
			problems = append(problems, plan.Finding{Severity: plan.NotChecked, Title: m.Node + ": no evidence", Detail: m.Reason, Remedy: m.Remedy})
		}
		for _, text := range m.Warnings {
			problems = append(problems, plan.Finding{Severity: plan.Warn, Title: m.Node + ": " + text})
		}
	}
	lines = append(lines, view.Findings(pg, w, problems, len(problems))...)
	return append(lines, pg.Row(w).Add(term.Faint, "Workers make no evidence after they joined: they were not verified.").String())
}

// evidenceText says what the evidence of a machine proves.
func evidenceText(v *engine.Verification, m engine.VerifiedMachine) string {
	if m.Result != engine.Verified {
		return ""
	}
	if !m.Attested {
		return "a key in a file: no hardware vouches for it"
	}
	text := "a TPM"
	if v.Measured {
		text += " and the measurements of the configuration"
	}
	if m.SecureBoot != "" {
		text += ", Secure Boot " + m.SecureBoot
	}
	if m.Certifier != nil {
		text += fmt.Sprintf(", certified by generation %d", m.Certifier.Generation)
	}
	if m.WithoutAPI {
		text += " in the place of the cloud's API"
	}
	return text
}
