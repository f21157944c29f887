package tui

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/tui/term"
	"constellation/tui/view"
)

func encryptionCommand(s *session) *cobra.Command {
	cmd := group("encryption", "Show, rotate or disable the encryption of Secrets",
		"API servers of most clusters encrypt Secrets before they store them in etcd. Control planes derive\nthe keys of all generations from one secret, and decrypt what any of them encrypted.",
		"  constellation encryption status\n  constellation encryption rotate")
	cmd.AddCommand(encryptionStatus(s), encryptionRotate(s), encryptionDisable(s))
	return cmd
}

func encryptionRotate(s *session) *cobra.Command {
	var (
		r engine.RotateKeyRequest
		o runOptions
	)
	cmd := &cobra.Command{
		Use:   "rotate",
		Short: "Replace the key by that of the next generation",
		Long: `Rotate replaces the key that encrypts Secrets in etcd by that of the next generation. No secret
travels: control planes have the keys of all generations. It works in this order:

  1. ConfigMap join-config gets the generation, and a record with the user, the time and the
     reason. Join services pass it to the key services of their machines.
  2. The file of the master secret gets the generation. Renew your copy of it.
  3. The command waits until each API server encrypts with the new key. That takes about a
     minute.
  4. Each Secret that a former key encrypted is written again. Its content does not change.

It can be interrupted at any time; run it again to complete the rotation. Secrets of a former
generation stay readable, also those of snapshots. A rotation is no remedy for a stolen master
secret, from which all generations follow.`,
		Example: `  constellation encryption rotate
  constellation encryption rotate --reason "yearly" --non-interactive --yes`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return planAndRun(cmd.Context(), s, o, acceptance{question: fixedQuestion("Rotate the key that encrypts Secrets?")}, func(ctx context.Context, eng Engine) (*plan.Plan, error) {
				return eng.PlanRotateKey(ctx, r)
			})
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&r.Reason, "reason", "", "reason to record: one `line` of at most 200 bytes")
	fl.BoolVar(&r.Rehearse, "dry-run", false, "show the plan and change nothing")
	fl.BoolVarP(&o.yes, "yes", "y", false, "accept the plan and its warnings")
	fl.BoolVar(&o.nonInteractive, "non-interactive", false, "never prompt")
	fl.DurationVar(&o.timeout, "timeout", 0, "stop after this time, such as 10m; run again to resume (0: no limit)")
	outputFlag(cmd, &o.out, "output format: text, or json for one event per line")
	_ = cmd.RegisterFlagCompletionFunc("reason", fixed())
	return cmd
}

func encryptionDisable(s *session) *cobra.Command {
	var (
		r engine.DisableEncryptionRequest
		o runOptions
	)
	cmd := &cobra.Command{
		Use:   "disable",
		Short: "Stop the encryption of Secrets",
		Long: `Disable undoes the encryption of Secrets that an upgrade brought to the cluster: API servers store
Secrets as they are, and each encrypted Secret is written again. Write encryptSecrets: false into
constellation-conf.yaml first; otherwise the next upgrade encrypts them again.

It can be interrupted at any time; run it again to complete it. Clusters that encrypt Secrets since
their init cannot stop.`,
		Example: `  constellation encryption disable --dry-run
  constellation encryption disable --non-interactive --yes`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return planAndRun(cmd.Context(), s, o, acceptance{question: fixedQuestion("Store Secrets without encryption?")}, func(ctx context.Context, eng Engine) (*plan.Plan, error) {
				return eng.PlanDisableEncryption(ctx, r)
			})
		},
	}
	fl := cmd.Flags()
	fl.BoolVar(&r.Rehearse, "dry-run", false, "show the plan and change nothing")
	fl.BoolVarP(&o.yes, "yes", "y", false, "accept the plan and its warnings")
	fl.BoolVar(&o.nonInteractive, "non-interactive", false, "never prompt")
	fl.DurationVar(&o.timeout, "timeout", 0, "stop after this time, such as 10m; run again to resume (0: no limit)")
	outputFlag(cmd, &o.out, "output format: text, or json for one event per line")
	return cmd
}

func encryptionStatus(s *session) *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show which key encrypts Secrets",
		Long: `Status shows the generation of the key that encrypts Secrets in etcd: the published one, the one
in the file of the master secret, and that of the API server of each control plane. It reads metrics
through port-forwards to their pods, and changes nothing.`,
		Example: `  constellation encryption status
  constellation encryption status -o json | jq .apiServers`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return printEncryption(cmd.Context(), s, out) },
	}
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// printEncryption runs `encryption status`.
func printEncryption(ctx context.Context, s *session, f format) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	e, err := eng.Encryption(ctx)
	if err != nil {
		return err
	}
	if f == asJSON {
		return document(s.out, e)
	}
	s.print(encryptionText(s.page(), &e))
	return nil
}

// encryptionText renders the output of `encryption status`.
func encryptionText(pg view.Page, e *engine.EncryptionStatus) []string {
	w := view.PrintedWidth
	row := func(name, value string) string {
		return pg.Row(w).Add(term.Plain, " ").Col(term.Faint, name, 20).Add(term.Plain, term.Clean(value)).String()
	}
	lines := []string{pg.Row(w).Add(term.Plain, "cluster "+term.Clean(e.Cluster)).String()}
	if !e.Encrypts {
		text := "not encrypted"
		if e.Pending {
			text += " yet: run `constellation upgrade apply`"
		}
		return append(lines, row("Secrets in etcd", text))
	}
	rewritten := "all Secrets were written with it"
	if !e.Rewritten {
		rewritten = "not all Secrets were written with it: run `constellation encryption rotate`"
	}
	if e.ByOperator {
		rewritten = "the operator rewrites all Secrets with it; `constellation encryption rotate` completes that, too"
	}
	if e.Pending {
		rewritten = "not all Secrets are encrypted: run `constellation upgrade apply`"
	}
	lines = append(lines, row("generation", fmt.Sprintf("%d, %s", e.Generation, rewritten)),
		row("in your file", fmt.Sprintf("%d", e.Recorded)))
	if e.Record != "" {
		lines = append(lines, row("last rotation", e.Record))
	}
	for _, a := range e.APIServers {
		text := fmt.Sprintf("encrypts with generation %d", a.Generation)
		switch {
		case a.Problem != "":
			text = a.Problem
		case a.Generation == 0:
			text = "encrypts with a key that does not follow from your master secret"
		}
		lines = append(lines, row(a.Node, text))
	}
	return lines
}
