package tui

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"constellation/tui/term"
)

// maxTypos is the edit distance up to which a verb or flag is suggested.
const maxTypos = 2

// noVerb refuses arguments of a command that only has subcommands, and suggests a similar one.
func noVerb(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	cmd.SuggestionsMinimumDistance = maxTypos
	return fmt.Errorf("unknown command %q for %q%s", term.Clean(args[0]), cmd.CommandPath(), suggestion(cmd.SuggestionsFor(args[0])))
}

// suggestFlag is the error of a flag that does not exist. It suggests the most similar one.
func suggestFlag(cmd *cobra.Command, err *pflag.NotExistError) error {
	name := err.GetSpecifiedName()
	best, found := maxTypos+1, ""
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if d := distance(name, f.Name); !f.Hidden && d < best && d < len(name) {
			best, found = d, f.Name
		}
	})
	if found == "" || err.GetSpecifiedShortnames() != "" {
		return err
	}
	return fmt.Errorf("%s%s", term.Clean(err.Error()), suggestion([]string{"--" + found}))
}

func suggestion(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return "; did you mean " + strings.Join(names, " or ") + "?"
}

// distance is the edit distance of a and b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0] // of the previous row, one column to the left
		row[0] = i + 1
		for j := range len(b) {
			cost := before
			if a[i] != b[j] {
				cost++
			}
			before = row[j+1]
			row[j+1] = min(cost, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}
