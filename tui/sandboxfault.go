package tui

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/tui/term"
)

func (s *session) sandboxFault() *cobra.Command {
	cmd := group("fault", "Inject faults into a running sandbox",
		`Inject faults into a running sandbox and remove them: API errors and stale reads in the
cloud, frozen machines, network partitions, lost disks and TPMs. Use it to test how a
cluster or a rollout recovers. docs/faults.md lists all faults.`,
		`  constellation sandbox fault list
  constellation sandbox fault set frozen=worker-0 api-500=0.3
  constellation sandbox fault clear`)
	cmd.AddCommand(s.listFaults(), s.setFaults(), s.clearFaults())
	return cmd
}

func (s *session) listFaults() *cobra.Command {
	var (
		name string
		out  format
	)
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List supported and active faults",
		Long:    "List the faults that a sandbox supports. The active faults of this workspace's sandbox are marked with !.",
		Example: "  constellation sandbox fault list\n  constellation sandbox fault list -o json | jq -r '.active[]'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			boxName, err := s.sandboxName(name)
			if err != nil {
				return err
			}
			box, err := s.Sandbox(s.log)
			if err != nil {
				return err
			}
			active := []string{}
			if st, err := box.Status(cmd.Context(), boxName); err == nil { // no sandbox, no active faults
				active = append(active, st.Faults...)
			}
			kinds := box.FaultKinds()
			if out == asJSON {
				return document(s.out, struct {
					Schema string             `json:"schema"`
					Active []string           `json:"active"`
					Kinds  []engine.FaultKind `json:"kinds"`
				}{engine.Schema, active, kinds})
			}
			for _, k := range kinds {
				fmt.Fprintf(s.out, "%s\n    %s\n", k.Form, k.Does)
				for _, a := range active {
					if kindOf(a) == k.Name {
						fmt.Fprintf(s.out, "  ! %s\n", term.Clean(a))
					}
				}
			}
			return nil
		},
	}
	s.nameFlag(cmd, &name)
	s.outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// kindOf returns the kind of a fault: the part before =.
func kindOf(fault string) string {
	kind, _, _ := strings.Cut(fault, "=")
	return kind
}

func (s *session) setFaults() *cobra.Command {
	return s.changeFaults("set FAULT...", "Add faults",
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

func (s *session) clearFaults() *cobra.Command {
	return s.changeFaults("clear [FAULT...]", "Remove faults",
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
func (s *session) changeFaults(use, short, long, example string, change func(active, args []string) ([]string, error)) *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use: use, Short: short, Long: long, Example: example,
		ValidArgsFunction: fixed(s.Faults...),
		RunE: func(cmd *cobra.Command, args []string) error {
			boxName, err := s.sandboxName(name)
			if err != nil {
				return err
			}
			box, err := s.Sandbox(s.log)
			if err != nil {
				return err
			}
			st, err := box.Status(cmd.Context(), boxName)
			if err != nil {
				return err
			}
			faults, err := change(slices.Clone(st.Faults), args)
			if err != nil {
				return &engine.Error{Op: "change faults", Err: err, Exit: engine.ExitUsage}
			}
			if err := box.SetFaults(cmd.Context(), boxName, faults); err != nil {
				return err
			}
			fmt.Fprintf(s.out, "faults: %s (before: %s)\n", cmp.Or(term.Clean(strings.Join(faults, ", ")), "none"), cmp.Or(term.Clean(strings.Join(st.Faults, ", ")), "none"))
			return nil
		},
	}
	s.nameFlag(cmd, &name)
	return cmd
}
