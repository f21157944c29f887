package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/tui"
	"constellation/tui/term"
)

func (v *verbs) sandboxFault() *cobra.Command {
	cmd := tui.Group("fault", "Inject faults into a running sandbox",
		`Inject faults into a running sandbox and remove them: API errors and stale reads in the
cloud, frozen machines, network partitions, lost disks and TPMs. Use it to test how a
cluster or a rollout recovers. docs/faults.md lists all faults.`,
		`  constellation sandbox fault list
  constellation sandbox fault set frozen=worker-0 api-500=0.3
  constellation sandbox fault clear`)
	cmd.AddCommand(v.listFaults(), v.setFaults(), v.clearFaults())
	return cmd
}

func (v *verbs) listFaults() *cobra.Command {
	var (
		name string
		out  tui.Format
	)
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List supported and active faults",
		Long:    "List the faults that this workspace's sandbox supports; without one, those of the sandbox's own cloud.\nActive faults are marked with !.",
		Example: "  constellation sandbox fault list\n  constellation sandbox fault list -o json | jq -r '.active[]'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return v.withNamed(cmd.Context(), name, func(ctx context.Context, box engine.Sandbox, name string) error {
				active, cloud := []string{}, ""
				if st, err := box.Status(ctx, name); err == nil { // no sandbox, no active faults
					active, cloud = append(active, st.Faults...), st.Cloud
				}
				return v.printFaults(out, box.FaultKinds(cloud), active)
			})
		},
	}
	v.nameFlag(cmd, &name)
	v.OutputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// printFaults prints the supported faults and marks the active ones.
func (v *verbs) printFaults(out tui.Format, kinds []engine.FaultKind, active []string) error {
	if out == tui.JSON {
		return v.Document(struct {
			Schema string             `json:"schema"`
			Active []string           `json:"active"`
			Kinds  []engine.FaultKind `json:"kinds"`
		}{plan.Schema, active, kinds})
	}
	for _, k := range kinds {
		fmt.Fprintf(v.Out(), "%s\n    %s\n", k.Form, k.Does)
		for _, a := range active {
			if kindOf(a) == k.Name {
				fmt.Fprintf(v.Out(), "  ! %s\n", term.Clean(a))
			}
		}
	}
	return nil
}

// kindOf returns the kind of a fault: the part before =.
func kindOf(fault string) string {
	kind, _, _ := strings.Cut(fault, "=")
	return kind
}

func (v *verbs) setFaults() *cobra.Command {
	return v.changeFaults("set FAULT...", "Add faults",
		`Add faults to the active ones. A fault of the whole cloud, such as quota, replaces the
active fault of the same kind.`,
		"  constellation sandbox fault set cut-to=worker-0:control-plane-0\n  constellation sandbox fault set power-cut=control-plane-0:upgrade-etcd",
		func(active, args []string) ([]string, error) {
			if len(args) == 0 {
				return nil, errors.New("no fault given; `sandbox fault list` lists them")
			}
			for _, a := range args {
				ofMachine := strings.Contains(a, ":") || strings.Contains(a, "=worker") || strings.Contains(a, "=control-plane") || strings.HasPrefix(a, "component-")
				active = slices.DeleteFunc(active, func(f string) bool { return f == a || !ofMachine && kindOf(f) == kindOf(a) })
				active = append(active, a)
			}
			return active, nil
		})
}

func (v *verbs) clearFaults() *cobra.Command {
	return v.changeFaults("clear [FAULT...]", "Remove faults",
		`Remove faults, given in full or by kind; without an argument, remove all. Machines recover
at once, except that a lost TPM returns with the next boot of the machine.`,
		"  constellation sandbox fault clear\n  constellation sandbox fault clear frozen quota=5",
		func(active, args []string) ([]string, error) {
			if len(args) == 0 {
				return []string{}, nil
			}
			for _, a := range args {
				left := slices.DeleteFunc(slices.Clone(active), func(f string) bool { return f == a || kindOf(f) == a })
				if len(left) == len(active) {
					return nil, fmt.Errorf("fault %q is not active; active: %s", a, cmp.Or(strings.Join(active, ", "), "none"))
				}
				active = left
			}
			return active, nil
		})
}

// changeFaults is a command that computes the new list of faults from the active ones.
func (v *verbs) changeFaults(use, short, long, example string, change func(active, args []string) ([]string, error)) *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use: use, Short: short, Long: long, Example: example,
		ValidArgsFunction: tui.Fixed(v.faults...),
		RunE: func(cmd *cobra.Command, args []string) error {
			return v.withNamed(cmd.Context(), name, func(ctx context.Context, box engine.Sandbox, name string) error {
				st, err := box.Status(ctx, name)
				if err != nil {
					return err
				}
				faults, err := change(slices.Clone(st.Faults), args)
				if err != nil {
					return &plan.Error{Op: "change faults", Err: err, Exit: plan.ExitUsage}
				}
				if err := box.SetFaults(ctx, name, faults); err != nil {
					return err
				}
				fmt.Fprintf(v.Out(), "faults: %s (before: %s)\n", cmp.Or(term.Clean(strings.Join(faults, ", ")), "none"), cmp.Or(term.Clean(strings.Join(st.Faults, ", ")), "none"))
				return nil
			})
		},
	}
	v.nameFlag(cmd, &name)
	return cmd
}
