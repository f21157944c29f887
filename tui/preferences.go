package tui

import (
	"encoding/json"
	"fmt"
	"reflect"

	"github.com/spf13/cobra"

	"constellation/engine/plan"
	"constellation/engine/preferences"
	"constellation/tui/term"
)

// preferencesDocument is the JSON output of config preferences.
type preferencesDocument struct {
	Schema      string              `json:"schema"`
	File        string              `json:"file"`
	Preferences []preferences.Field `json:"preferences"`
}

func configPreferences(s *session) *cobra.Command {
	var (
		out      format
		defaults bool
	)
	cmd := &cobra.Command{
		Use:   "preferences",
		Short: "Print your preferences and what each does",
		Long: `Print your preferences, their values and what each does. They are in the file
constellation/preferences.yaml in XDG_CONFIG_HOME, or in ~/.config. Unknown fields are
refused. The program changes only the field recent.`,
		Example: `  constellation config preferences
  constellation config preferences -o json | jq '.preferences[] | select(.name == "guards")'`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			p, err := preferences.Default(), error(nil)
			if !defaults {
				p, err = preferences.Read(s.Env)
			}
			if err != nil {
				return err
			}
			file, err := preferences.Path(s.Env)
			if err != nil {
				return &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "set HOME or XDG_CONFIG_HOME"}
			}
			if out == asJSON {
				return document(s.out, preferencesDocument{plan.Schema, file, p.Fields()})
			}
			lines := []string{"# " + term.Clean(file)}
			for _, f := range p.Fields() {
				lines = append(lines, "")
				for _, l := range term.Wrap(f.About, s.answerWidth()-2) {
					lines = append(lines, "# "+l)
				}
				line := f.Name + ": " + valueText(f.Value)
				if !reflect.DeepEqual(f.Value, f.Default) {
					line += "  (default: " + valueText(f.Default) + ")"
				}
				lines = append(lines, line)
			}
			s.print(lines)
			return nil
		},
	}
	outputFlag(cmd, &out, "output format: text, or json for one document")
	cmd.Flags().BoolVar(&defaults, "defaults", false, "print the values that apply without the file")
	return cmd
}

// valueText is a value in one line.
func valueText(v any) string {
	switch v := v.(type) {
	case string:
		return term.Clean(v)
	case fmt.Stringer:
		return v.String()
	}
	b, err := json.Marshal(v)
	if err != nil {
		return "?"
	}
	return term.Clean(string(b))
}
