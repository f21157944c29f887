package main

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"constellation/tui"
)

func TestHelp(t *testing.T) {
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if n := len(c.Short); n == 0 || n > 60 && !c.Hidden || strings.HasSuffix(c.Short, ".") {
			t.Errorf("%s: short help %q has %d characters, want 1 to 60 without a period", c.CommandPath(), c.Short, n)
		}
		if !c.Hidden && (c.Long == "" || c.Example == "") {
			t.Errorf("%s has no long help or no example", c.CommandPath())
		}
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Usage == "" {
				t.Errorf("%s --%s has no usage", c.CommandPath(), f.Name)
			}
		})
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	app, verbs := fakeParts().app(), 0
	define := app.Verbs
	app.Verbs = func(i *tui.Invocation) []*cobra.Command {
		list := define(i)
		for _, c := range list {
			verbs++
			walk(c)
		}
		return list
	}
	if code := app.Run([]string{"--version"}); code != 0 || verbs == 0 {
		t.Errorf("exit code %d, %d verbs", code, verbs)
	}
}
