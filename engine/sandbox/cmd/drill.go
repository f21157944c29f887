package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/sandbox/build"
	"constellation/engine/words"
	"constellation/tui"
	"constellation/tui/term"
	"constellation/tui/view"
)

func (v *verbs) sandboxDrill() *cobra.Command {
	var (
		spec    engine.DrillSpec
		list    bool
		results string
		until   int
		out     = tui.Text
	)
	cmd := &cobra.Command{
		Use:   "drill",
		Short: "Upgrade a test cluster under fault injection",
		Long: `Create a test cluster in its own sandbox, upgrade it, by default from release v1.0.0 and
Kubernetes ` + build.DefaultVersion + ` to v1.1.0 and ` + build.NextVersion + `, and inject faults meanwhile: machines lose power,
the cloud API fails or returns stale data, the operator is killed. The seed determines the
faults and the points of injection. Points are steps of the rollout and do not depend on
the clock.
Afterwards the drill verifies the rollout's invariants. Violations that a fault explains,
such as a machine without power that is not Ready, are reported separately.

With --in-place, all nodes keep their machines, and their agents upgrade them. Agents are killed
and machines lose power in the stages of an upgrade; see docs/drills.md.

Simulated machines need no root and support all faults except network and disk faults. With
hollow machines only workers are replaced, and no machine runs anything; see docs/drills.md.

A drill refuses to run in the workspace of a sandbox, and cleans up after itself. The next
drill, or sandbox down, removes the leftovers of a killed drill.

Exit code: 0 all invariants held; 1 an invariant was violated, or the upgrade did not end;
3 no fault was injected; 4 a sandbox is running here; 8 another drill runs here.`,
		Example: `  constellation sandbox drill --machines=simulated
  constellation sandbox drill --machines=real --seed 7 -o markdown
  constellation sandbox drill --machines=real --kubernetes ` + build.DefaultVersion + ` --faults power-cut,frozen
  constellation sandbox drill --machines=simulated --control-planes 3
  constellation sandbox drill --machines=simulated --in-place
  constellation sandbox drill --machines=hollow --kubernetes-from v1.36.4 --kubernetes v1.37.2
  constellation sandbox drill --machines=hollow --faults operator-killed,lost-delete
  constellation sandbox drill --machines=hollow --cloud=gcp
  constellation sandbox drill --machines=hollow --results drills.jsonl --until 40`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			drills, err := v.drills(v.Log())
			if err != nil {
				return err
			}
			if list {
				return v.listDrillFaults(drills.Faults(), out)
			}
			switch {
			case cmd.Flags().Changed("seed"):
			case results != "":
				spec.Seed = 1
			default:
				spec.Seed = uint64(v.Now().UnixNano() / int64(time.Millisecond) % 1_000_000)
			}
			if err := checkDrillFlags(spec, results, until); err != nil {
				return err
			}
			if spec.Workspace, err = v.NewWorkspace(); err != nil {
				return err
			}
			ctx, stop := v.Signals(cmd.Context())
			defer stop()
			if results != "" {
				return v.manyDrills(ctx, drills, spec, results, until)
			}
			return v.oneDrill(ctx, drills, spec, out)
		},
	}
	f := cmd.Flags()
	f.StringVar(&spec.Machines, "machines", "auto", "kind of machines: real (Linux and root), simulated, hollow, or auto")
	f.IntVar(&spec.ControlPlanes, "control-planes", 0, "number of control planes: 1, 3 or 5; not for hollow machines (default 1)")
	f.StringVar(&spec.Cloud, "cloud", "", "cloud that is emulated in front of the machines: gcp (default: the sandbox's own)")
	f.BoolVar(&spec.InPlace, "in-place", false, "upgrade all nodes in place; not for hollow machines (default: replace machines)")
	f.Uint64Var(&spec.Seed, "seed", 0, "seed that determines faults and injection points; with --results the first one (default: random, with --results 1)")
	f.StringSliceVar(&spec.Faults, "faults", nil, "faults that the seed may choose from (default: all that the machines support)")
	f.IntVar(&spec.Count, "count", 0, "number of faults (default 4)")
	f.StringVar(&spec.KubernetesFrom, "kubernetes-from", "", "Kubernetes `version` before the upgrade (default "+build.DefaultVersion+")")
	f.StringVar(&spec.Kubernetes, "kubernetes", "", "target Kubernetes `version`: the current minor or the next (default "+build.NextVersion+", with --kubernetes-from the newest of the next minor); the current version only replaces machines, but not hollow ones")
	f.StringVar(&spec.Journal, "journal", "", "`file` for all observations, as JSON Lines")
	f.BoolVar(&list, "list", false, "list faults and injection points and exit")
	f.StringVar(&results, "results", "", "`file` to append a line per drill to; seeds continue from the file")
	f.IntVar(&until, "until", 0, "with --results: run until the file has this `number` of drills with the same machines, control planes, versions, --faults, --cloud and --in-place")
	v.MarkdownFlag(cmd, &out, "output format: text, json for one document, or markdown")
	_ = cmd.RegisterFlagCompletionFunc("machines", tui.Fixed("auto", "real", "simulated", "hollow"))
	_ = cmd.RegisterFlagCompletionFunc("cloud", tui.Fixed("gcp"))
	_ = cmd.RegisterFlagCompletionFunc("faults", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return v.drillFaultNames()
	})
	return cmd
}

// drillFaultNames completes the names of faults.
func (v *verbs) drillFaultNames() ([]string, cobra.ShellCompDirective) {
	drills, err := v.drills(v.Log())
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var names []string
	for _, f := range drills.Faults() {
		names = append(names, f.Name)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// checkDrillFlags returns a usage error if flags contradict each other.
func checkDrillFlags(spec engine.DrillSpec, results string, until int) error {
	if results != "" && (spec.Machines == "" || spec.Machines == "auto") {
		return &plan.Error{
			Op: "drill", Err: errors.New("--results needs a kind of machines"), Exit: plan.ExitUsage,
			Remedy: "pass --machines=real, --machines=simulated or --machines=hollow",
		}
	}
	if spec.Count < 0 || (until > 0) != (results != "") {
		return &plan.Error{
			Op: "drill", Err: errors.New("--count is below 0, or only one of --results and --until is given"), Exit: plan.ExitUsage,
			Remedy: "pass --results FILE with --until N, and --count of 0 or more",
		}
	}
	return nil
}

// oneDrill runs a drill and prints its report. The outcome is the exit code.
func (v *verbs) oneDrill(ctx context.Context, drills engine.Drills, spec engine.DrillSpec, out tui.Format) error {
	r, err := v.drill(ctx, drills, spec)
	if err != nil {
		return err
	}
	switch out {
	case tui.JSON:
		err = v.Document(struct {
			Schema string `json:"schema"`
			engine.DrillReport
		}{plan.Schema, r})
	case tui.Markdown:
		fmt.Fprint(v.Out(), drillMarkdown(&r))
	default:
		v.Print(v.drillText(&r))
	}
	if code := drillExit(r.Outcome); err == nil && code != plan.ExitDone {
		return tui.ExitStatus(code)
	}
	return err
}

func drillExit(outcome string) int {
	return map[string]int{engine.DrillPassed: plan.ExitDone, engine.DrillVoid: plan.ExitNothing}[outcome] + map[bool]int{true: plan.ExitFailed}[outcome == engine.DrillFailed]
}

// drill runs one drill and writes its progress to stderr.
func (v *verbs) drill(ctx context.Context, drills engine.Drills, spec engine.DrillSpec) (engine.DrillReport, error) {
	begun := v.Now()
	// Errors in spec must precede all output, so the seed is printed with the first line.
	seed := sync.OnceFunc(func() { fmt.Fprintf(v.Stderr(), "%s  seed %d\n", begun.UTC().Format("15:04:05Z"), spec.Seed) })
	return drills.Drill(ctx, spec, func(text string) {
		seed()
		now := v.Now()
		fmt.Fprintf(v.Stderr(), "%s %+6.1fs  %s\n", now.UTC().Format("15:04:05Z"), now.Sub(begun).Seconds(), term.Clean(text))
	})
}

// manyDrills runs drills with new seeds, the first of which is spec's, until the file has want of them. It stops at the
// first error that is not an outcome of a drill.
func (v *verbs) manyDrills(ctx context.Context, drills engine.Drills, spec engine.DrillSpec, file string, want int) error {
	spec, err := drills.Versions(spec)
	if err != nil {
		return err
	}
	// A drill takes minutes, so a file that cannot be written is an error before it.
	out, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return &plan.Error{Op: "write drill results", Err: err, Exit: plan.ExitUsage, Remedy: "pass --results with a file in a writable folder that exists"}
	}
	out.Close()
	bad, first := 0, spec.Seed
	for {
		done, err := readDrills(file)
		if err != nil {
			return &plan.Error{Op: "read drill results", Err: err, Exit: plan.ExitUsage}
		}
		have := slices.DeleteFunc(done, func(r engine.DrillReport) bool {
			return r.Machines != spec.Machines || r.InPlace != spec.InPlace || r.Cloud != spec.Cloud || max(r.ControlPlanes, 1) != max(spec.ControlPlanes, 1) ||
				r.KubernetesFrom != spec.KubernetesFrom || r.KubernetesTo != spec.Kubernetes || faultsOf(r) != strings.Join(spec.Faults, ",")
		})
		if len(have) >= want {
			fmt.Fprintf(v.Stderr(), "%s has %s of %s machines\n", file, words.Count(len(have), "drill"), spec.Machines)
			if bad > 0 {
				return tui.ExitStatus(plan.ExitFailed)
			}
			return nil
		}
		spec.Seed = first
		for _, r := range have {
			spec.Seed = max(spec.Seed, r.Seed+1)
		}
		r, err := v.drill(ctx, drills, spec)
		if err != nil {
			return err
		}
		if r.Outcome != engine.DrillPassed {
			bad++
		}
		if err := appendDrill(file, r); err != nil {
			return &plan.Error{Op: "write drill results", Err: err}
		}
		fmt.Fprintf(v.Out(), "seed %d %s, %s\n", r.Seed, r.Outcome, cmp.Or(term.Clean(r.Why), "all invariants held"))
	}
}

// faultsOf returns the value of --faults of a recorded drill.
func faultsOf(r engine.DrillReport) string {
	for _, arg := range r.Repeat {
		if list, ok := strings.CutPrefix(arg, "--faults="); ok {
			return list
		}
	}
	return ""
}

// readDrills reads a file of results. It fills in the versions of reports of older programs.
func readDrills(file string) (all []engine.DrillReport, err error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 1<<20)
	for n := 1; sc.Scan(); n++ {
		var r engine.DrillReport
		if err := json.Unmarshal(sc.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", file, n, err)
		}
		if r.KubernetesTo == "" {
			// The default versions of the programs whose reports have none.
			r.KubernetesFrom, r.KubernetesTo = "v1.35.4", "v1.36.3"
			for _, arg := range r.Repeat {
				if to, ok := strings.CutPrefix(arg, "--kubernetes="); ok {
					r.KubernetesTo = to
				}
			}
		}
		all = append(all, r)
	}
	return all, sc.Err()
}

func appendDrill(file string, r engine.DrillReport) (err error) {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Clean(file), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(b, '\n'))
	return errors.Join(err, f.Close())
}

func ofMS(ms int64) string {
	return (time.Duration(ms) * time.Millisecond).Round(100 * time.Millisecond).String()
}

// when describes when a fault was active.
func when(i *engine.DrillInjection) string {
	switch {
	case i.AtMS < 0:
		return "never: injection point not reached"
	case i.EndMS < 0:
		return "from " + ofMS(i.AtMS) + ", still active"
	}
	return "from " + ofMS(i.AtMS) + " to " + ofMS(i.EndMS)
}

// drillText renders a report.
func (v *verbs) drillText(r *engine.DrillReport) []string {
	t := v.Theme()
	sty := map[string]term.Style{engine.DrillPassed: term.Good, engine.DrillFailed: term.Bad, engine.DrillVoid: term.Caution}[r.Outcome]
	lines := []string{
		t.Row(view.PrintedWidth).Add(term.Plain, "drill   seed "+fmt.Sprint(r.Seed)+"   ").Add(sty, r.Outcome).String(),
		"  " + term.Clean(r.Cluster),
		"  upgrade " + ofMS(r.RolledMS) + ", whole drill " + ofMS(r.TookMS),
	}
	if r.Why != "" {
		lines = append(lines, "  "+term.Clean(r.Why))
	}
	lines = append(lines, t.Rule(view.PrintedWidth, fmt.Sprintf("Injected faults %d", len(r.Injected)), ""))
	for i := range r.Injected {
		in := &r.Injected[i]
		lines = append(lines, t.Row(view.PrintedWidth).Add(term.Plain, "  ").Col(term.Plain, term.Clean(in.Fault), 18).Col(term.Faint, fmt.Sprint(in.Point, " ", in.Nth), 14).Col(term.Plain, term.Clean(in.On), 17).Add(term.Faint, when(in)).String())
		if in.Err != "" {
			lines = append(lines, "    "+term.Clean(in.Err))
		}
	}
	lines = append(lines, t.Rule(view.PrintedWidth, fmt.Sprintf("Invariants %s", held(r)), ""))
	for _, rule := range r.Rules {
		sign, sty := t.OK, term.Good
		switch {
		case len(rule.Breaches) > 0:
			sign, sty = t.Fail, term.Bad
		case rule.NotAsked:
			sign, sty = t.Pending, term.Faint
		}
		row := t.Row(view.PrintedWidth).Add(term.Plain, " ").Add(sty, sign).Add(term.Plain, " ").Col(term.Plain, rule.Rule, 20)
		if rule.NotAsked {
			row = row.Add(term.Faint, "not checked: nothing in this drill can violate it")
		} else if n := len(rule.Excused); n > 0 {
			row = row.Add(term.Faint, fmt.Sprint(n, " excused by faults"))
		}
		lines = append(lines, row.String())
		for _, b := range append(slices.Clone(rule.Breaches), rule.Excused...) {
			lines = append(lines, "     "+term.Clean(b))
		}
	}
	lines = append(lines, t.Rule(view.PrintedWidth, "Figures", ""))
	for _, l := range r.Summary {
		lines = append(lines, "  "+term.Clean(l))
	}
	return append(lines, "", "repeat: "+v.Program()+" "+strings.Join(r.Repeat, " "))
}

// held formats how many of the checked invariants held.
func held(r *engine.DrillReport) string {
	yes, asked := 0, 0
	for _, rule := range r.Rules {
		if rule.NotAsked {
			continue
		}
		asked++
		if len(rule.Breaches) == 0 {
			yes++
		}
	}
	return fmt.Sprintf("%d of %d", yes, asked)
}

// drillMarkdown renders a report for the summary page of a CI pipeline.
func drillMarkdown(r *engine.DrillReport) string {
	var b strings.Builder
	fmt.Fprintf(&b, "## Drill with seed %d: %s\n\n%s. The upgrade took %s, the whole drill %s.\n", r.Seed, r.Outcome, view.CellOf(r.Cluster), ofMS(r.RolledMS), ofMS(r.TookMS))
	if r.Why != "" {
		fmt.Fprintf(&b, "\n**%s**\n", view.CellOf(r.Why))
	}
	b.WriteString("\n| fault | point | on | when |\n|---|---|---|---|\n")
	for i := range r.Injected {
		in := &r.Injected[i]
		fmt.Fprintf(&b, "| %s | %s %d | %s | %s |\n", view.CellOf(in.Fault), view.CellOf(in.Point), in.Nth, view.CellOf(in.On), view.CellOf(strings.TrimSpace(when(in)+" "+in.Err)))
	}
	b.WriteString("\n| invariant | held | violations, excused ones included |\n|---|---|---|\n")
	for _, rule := range r.Rules {
		yes := "yes"
		switch {
		case len(rule.Breaches) > 0:
			yes = "**no**"
		case rule.NotAsked:
			yes = "not checked"
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", view.CellOf(rule.Rule), yes, view.CellOf(strings.Join(append(slices.Clone(rule.Breaches), rule.Excused...), "; ")))
	}
	fmt.Fprintf(&b, "\n```\n%s\n```\n\nRepeat: %s\n", term.Clean(strings.Join(r.Summary, "; ")), view.CodeOf("constellation "+strings.Join(r.Repeat, " ")))
	return b.String()
}

// listDrillFaults prints all faults with their injection points.
func (v *verbs) listDrillFaults(faults []engine.DrillFault, out tui.Format) error {
	if out == tui.JSON {
		return v.Document(struct {
			Schema string              `json:"schema"`
			Faults []engine.DrillFault `json:"faults"`
		}{plan.Schema, faults})
	}
	for _, f := range faults {
		fmt.Fprintf(v.Out(), "%-18s %s\n%-18s   on %s machines", f.Name, f.Does, "", strings.Join(f.Machines, " and "))
		if len(f.Clouds) > 0 {
			also := "also"
			if !f.OwnCloud {
				also = "only"
			}
			fmt.Fprintf(v.Out(), ", %s with --cloud=%s", also, strings.Join(f.Clouds, " or "))
		}
		if len(f.Points) > 0 {
			fmt.Fprintf(v.Out(), ", at: %s", strings.Join(f.Points, ", "))
		}
		if len(f.InPlacePoints) > 0 {
			fmt.Fprintf(v.Out(), "; in place, at: %s", strings.Join(f.InPlacePoints, ", "))
		}
		fmt.Fprintln(v.Out())
	}
	return nil
}
