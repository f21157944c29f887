package tui

import (
	"maps"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

func configMeasure(s *session) *cobra.Command {
	var (
		out   format
		write bool
	)
	cmd := &cobra.Command{
		Use:   "measure",
		Short: "Read the measurements of the first machine",
		Long: `Read the registers (PCRs) of an unused control plane at the init endpoint, before init. Its
evidence is judged by everything else: trust roots, infrastructure, role. So the command shows
what this machine booted, and not whether that is the intended image: compare the values with
another source, or trust the first machine.

--write puts the values in the place of those that config generate wrote for want of better ones.
Values of yours are not changed. From then on, machines must have booted the same.

The exit code is 3 with --write if the configuration has all values already.`,
		Example: `  constellation config measure
  constellation config measure --write
  constellation config measure -o json | jq -r '.registers["4"]'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			eng, _, _, err := s.engineOf()
			if err != nil {
				return err
			}
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			m, err := eng.Measure(ctx, write)
			if err != nil {
				return err
			}
			if out == asJSON {
				return document(s.out, m)
			}
			s.print(measuredText(s.page(), &m, s.command))
			return nil
		},
	}
	cmd.Flags().BoolVar(&write, "write", false, "write the values that are not known to the configuration")
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// measuredText renders the output of config measure.
func measuredText(pg view.Page, m *engine.MeasuredMachine, command func(string) string) []string {
	w := view.PrintedWidth
	head := "machine " + term.Clean(m.Name) + "   " + term.Clean(m.ProviderID)
	if m.SecureBoot != "" {
		head += "   Secure Boot " + m.SecureBoot
	}
	lines := []string{pg.Row(w).Add(term.Plain, head).String()}
	for _, i := range slices.Sorted(maps.Keys(m.Registers)) {
		r := pg.Row(w).Add(term.Plain, "  PCR ").Col(term.Plain, strconv.FormatUint(uint64(i), 10), 4).Add(term.Plain, m.Registers[i])
		if slices.Contains(m.Unknown, i) && !m.Written {
			r.Add(term.Caution, "  not in the configuration")
		}
		lines = append(lines, r.String())
	}
	var list []string
	for _, i := range m.Unknown {
		list = append(list, strconv.FormatUint(uint64(i), 10))
	}
	switch {
	case m.Written:
		lines = append(lines, "wrote PCR "+words.And(list)+" to "+view.ConfigFile, "next  "+command("init"))
	case len(list) > 0:
		lines = append(lines, "next  compare PCR "+words.And(list)+" with another source, or trust this machine: "+command("config measure --write"))
	}
	return lines
}
