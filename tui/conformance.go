package tui

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"constellation/engine/cloud/providers"
	"constellation/engine/conformance"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui/term"
)

// billed are the names of providers whose machines cost money, and are made by this program.
func billed() (names []string) {
	for _, p := range providers.All() {
		if p.Infra {
			names = append(names, p.Name)
		}
	}
	return names
}

func conformanceCommand(s *session) *cobra.Command {
	var (
		spec conformance.Spec
		out  format
	)
	cmd := &cobra.Command{
		Use:   "conformance",
		Short: "Run the conformance suite at a cloud, within a budget",
		Long: `Run the conformance suite at a cloud with an account of yours, and write a report to publish:
make network, load balancer and machines, init, verify, upgrade, verify, revoke and replace a
worker, and delete everything. Each step is a verb of this program, as you would run it.

The suite costs money. Without --i-pay it makes nothing, and states what it would make and its
largest cost. This program has no prices: look them up, and pass them with their source. One
price is that of a machine for an hour, with disk and address. The other is that of the rest, such
as the load balancer, for an hour. Traffic is not estimated. The estimate counts two machines for
each one, because machines are replaced.

The suite stops 20 minutes before the budget, or --limit, is used up, and then deletes everything,
as after a failure. Ctrl-C stops it and deletes nothing: run the same command again to continue.
Machines cost meanwhile, and nothing guards the budget. --terminate deletes everything instead.

Start with constellation-conf.yaml of ` + "`config generate`" + ` in a folder of its own. One control plane and
one worker are enough. In the folder of a sandbox that emulates the cloud, the suite uses its
machines, costs nothing, and takes the sandbox down; the report states that it was emulated.

constellation-conformance.md and .json are the report, without the ID of the project. The folder
constellation-conformance has the output of each step: read it before you publish that, too.

Exit codes: 0 all steps passed; 1 a step failed, or something is left; 2 bad usage; 4 the budget is
too small; 5 --i-pay is missing; 7 interrupted, run again.`,
		Example: `  constellation -C suite config generate gcp
  constellation -C suite conformance --provider gcp --budget 5 --price-per-hour 0.08 --other-per-hour 0.05
  constellation -C suite conformance --provider gcp --budget 5 --price-per-hour 0.08 --other-per-hour 0.05 --i-pay
  constellation -C suite conformance --provider gcp --terminate
  constellation -C demo sandbox up --cloud gcp --machines simulated
  constellation -C demo conformance --provider gcp`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runConformance(cmd.Context(), s, spec, out) },
	}
	f := cmd.Flags()
	f.StringVar(&spec.Provider, "provider", "", "`name` of the cloud, required: "+words.Or(billed()))
	f.Float64Var(&spec.Cost.Budget, "budget", 0, "largest `amount` to spend, in the currency of the prices")
	f.Float64Var(&spec.Cost.Machine, "price-per-hour", 0, "`price` of one machine for an hour, with disk and address")
	f.Float64Var(&spec.Cost.Other, "other-per-hour", 0, "`price` of everything else for an hour")
	f.StringVar(&spec.Cost.Source, "price-source", "", "where the prices come from, and their date: a `text` for the report")
	f.DurationVar(&spec.Limit, "limit", 0, fmt.Sprintf("longest time from the first machine to the end (default %v)", conformance.DefaultLimit))
	f.BoolVar(&spec.Pay, "i-pay", false, "make machines that cost money")
	f.BoolVar(&spec.Terminate, "terminate", false, "delete everything that an interrupted suite has made")
	out = text
	f.VarP((*checkFormat)(&out), "output", "o", "output format: text, json for one document, or markdown")
	_ = cmd.RegisterFlagCompletionFunc("output", fixed("text", "json", "markdown"))
	_ = cmd.RegisterFlagCompletionFunc("provider", fixed(billed()...))
	for _, name := range []string{"budget", "price-per-hour", "other-per-hour", "price-source", "limit"} {
		_ = cmd.RegisterFlagCompletionFunc(name, fixed())
	}
	return cmd
}

// runConformance runs `conformance`.
func runConformance(ctx context.Context, s *session, spec conformance.Spec, f format) error {
	if !slices.Contains(billed(), spec.Provider) {
		return badFlag(fmt.Errorf("--provider is %q", term.Clean(spec.Provider)), "want "+words.Or(billed()))
	}
	if err := conformanceSpec(s, &spec); err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	spec.Now = s.Now
	spec.Tell = func(text string) { fmt.Fprintln(s.Stderr, s.Now().UTC().Format("15:04:05Z"), term.Clean(text)) }
	r, err := s.Conform(ctx, s.Release, spec)
	if r != nil && !r.Ended.IsZero() {
		switch f {
		case asJSON:
			err = errors.Join(err, document(s.out, r))
		case asMarkdown:
			fmt.Fprint(s.out, r.Markdown())
		default:
			s.print(conformanceText(r))
		}
	}
	if err == nil && !r.Passed {
		err = &plan.Error{Op: "conformance of provider " + r.Provider, Err: errors.New("not all steps passed"), Remedy: conformance.LogDir + " has the output of each step; everything is deleted"}
	}
	return err
}

// conformanceSpec adds what the workspace has.
func conformanceSpec(s *session, spec *conformance.Spec) error {
	ws, dir, err := s.workspace()
	if err != nil {
		return err
	}
	spec.Dir = dir
	state, _, err := ws.Infra()
	if err != nil && !errors.Is(err, workspace.ErrAbsent) {
		return err
	}
	name := ""
	if state != nil && err == nil {
		spec.Emulated, spec.Cluster, name = state.Emulated(), state.Infrastructure.Name, state.Infrastructure.Provider
		spec.Hide = append(spec.Hide, state.Infrastructure.Section.Text("project"))
	}
	c, err := ws.UnfilledConfig()
	switch {
	case errors.Is(err, workspace.ErrAbsent) && !spec.Terminate:
		return &plan.Error{Op: "run the suite", Err: err, Exit: plan.ExitUsage, Remedy: "run `constellation config generate " + spec.Provider + "`, and set project, service accounts and image there"}
	case err != nil && !spec.Terminate:
		return err
	case err == nil:
		spec.Cluster, name = c.Name, c.Provider.Name
		for _, n := range c.Counts() {
			spec.Machines += n
		}
		spec.Hide = append(spec.Hide, c.Provider.Section.Text("project"))
	}
	if name != "" && name != spec.Provider {
		return &plan.Error{Op: "run the suite", Err: fmt.Errorf("the workspace is for provider %s", name), Exit: plan.ExitUsage, Remedy: "use another folder with -C"}
	}
	return nil
}

// conformanceText renders the output of conformance.
func conformanceText(r *conformance.Report) []string {
	var lines []string
	for _, st := range r.Steps {
		line := fmt.Sprintf("%-8s %s", st.Verdict, term.Clean(st.Title))
		if st.Why != "" {
			line += ": " + term.Clean(st.Why)
		}
		lines = append(lines, line)
	}
	result := "passed"
	if !r.Passed {
		result = "failed"
	}
	if r.Emulated {
		result += ", emulated: no request reached a vendor"
	}
	return append(lines, "", result, "report  "+conformance.PageFile+" and "+conformance.RecordFile)
}
