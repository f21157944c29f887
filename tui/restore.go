package tui

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

func (s *session) backupRestoreCommand() *cobra.Command {
	var (
		r                   engine.RestoreRequest
		yes, nonInteractive bool
		timeout             time.Duration
		out                 format
	)
	cmd := &cobra.Command{
		Use:   "restore ID",
		Short: "Restore objects that the cluster has lost",
		Long: `Verify a backup, compare it with the cluster, and restore missing objects: first
CustomResourceDefinitions, then objects without owners, then owned objects, with labels,
finalizers and status. Missing namespaces are created.

Existing objects are not changed. With --overwrite, objects that differ are reset to the
backup, and an empty status is restored; a status that a controller wrote is kept. Objects
that the cluster depends on are overwritten only if --only names them: ConfigMaps, Helm
records, and the kinds of update.edgeless.systems. Some objects are restored only if --only
names them: records of operations in progress (pendingnodes, joiningnodes), Helm records
older than the cluster's, and bootstrap tokens.

A restore can be interrupted at any time; run it again to resume. A damaged backup is
rejected.

Exit code: 0 done; 1 if an object could not be restored; 3 if there is nothing to
restore; 5 if it was not accepted.`,
		Example: `  constellation backup restore backup-20261121070501-1a2b3c4d --dry-run
  constellation backup restore backup-20261121070501-1a2b3c4d
  constellation backup restore backup-20261121070501-1a2b3c4d --only example.com/widgets/shop --yes
  constellation backup restore backup-20261121070501-1a2b3c4d --only core/configmaps/kube-system/join-config --overwrite
  constellation backup restore backup-20261121070501-1a2b3c4d --yes -o json | jq 'select(.state == "failed")'`,
		Args:              oneArg("the ID of a backup", "run `constellation backup list` to see all IDs"),
		ValidArgsFunction: s.completeBackup,
		RunE: func(cmd *cobra.Command, args []string) error {
			r.ID = args[0]
			ctx := cmd.Context()
			if timeout > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, timeout)
				defer cancel()
			}
			return s.restore(ctx, r, yes, nonInteractive, out)
		},
	}
	fl := cmd.Flags()
	s.restoreFlags(cmd, &r)
	fl.BoolVar(&r.DryRun, "dry-run", false, "send every write as a dry run; change nothing")
	fl.BoolVar(&r.Overwrite, "overwrite", false, "reset existing objects that differ from the backup")
	fl.BoolVarP(&yes, "yes", "y", false, "accept the plan and its warnings")
	fl.BoolVar(&nonInteractive, "non-interactive", false, "never prompt")
	fl.DurationVar(&timeout, "timeout", 0, "stop after this time, such as 10m; run again to resume (0: no limit)")
	s.outputFlag(cmd, &out, "output format: text, or json for one event per line")
	return cmd
}

// restoreFlags adds the flags that select what is restored or compared.
func (s *session) restoreFlags(cmd *cobra.Command, r *engine.RestoreRequest) {
	fl := cmd.Flags()
	s.backupDirFlag(cmd, &r.Dir, "`directory` of the backups (default: constellation-upgrade in the workspace)")
	fl.StringArrayVar(&r.Only, "only", nil, "restrict to `group/resource[/namespace/name]` and its definition; may be repeated")
	_ = cmd.RegisterFlagCompletionFunc("only", s.completeOnly)
}

// completeOnly completes the types of the backup given as argument, or of the newest.
func (s *session) completeOnly(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	const done = cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
	eng, _, _, err := s.engineOf()
	if err != nil {
		return nil, done
	}
	dir, _ := cmd.Flags().GetString("dir")
	if len(args) == 0 {
		all, err := eng.ListBackups(cmd.Context(), dir, false, nil)
		i := slices.IndexFunc(all, func(b engine.BackupEntry) bool { return b.Complete })
		if err != nil || i < 0 {
			return nil, done
		}
		args = []string{all[i].ID}
	}
	m, _, err := eng.ShowBackup(dir, args[0])
	if err != nil {
		return nil, done
	}
	objects := map[engine.Selector]int64{}
	for _, t := range m.Types {
		if t.Objects > 0 {
			objects[engine.Selector{Group: t.Group, Resource: t.Resource}] += t.Objects
		}
	}
	var out []string
	for o, n := range objects {
		out = append(out, o.String()+"\t"+words.Count(int(n), "object"))
	}
	slices.Sort(out)
	return out, done
}

// restore runs `backup restore`. On a terminal it prompts once, after it printed the plan.
func (s *session) restore(ctx context.Context, r engine.RestoreRequest, yes, nonInteractive bool, f format) error {
	out := s.printer(f, true)
	defer func() { out.close() }()
	eng, _, _, err := s.engineOf()
	if err != nil {
		return s.unplanned(out, f, err)
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	progress := s.restoreProgress()
	pl, err := eng.PlanRestore(ctx, r, progress.event)
	progress.live.Clear()
	if err != nil {
		return s.unplanned(out, f, err)
	}
	defer pl.Close()
	out, err = s.accept(pl, out, f, acceptance{
		yes: yes || r.DryRun, asks: f == text && !nonInteractive && s.asks(), question: fixedQuestion("Restore this?"), show: s.printPreview,
	})
	if err != nil {
		return err
	}
	emit := out.event
	if p, ok := out.(*plainPrinter); ok {
		emit = func(ev plan.Event) {
			p.printRestored(ev, r.DryRun)
			p.event(ev)
		}
	}
	return eng.Run(ctx, pl, emit)
}

// printRestored writes the result for one object, or in a dry run what would happen.
// Failures are errors, which the printer writes already; unchanged objects are omitted.
func (p *plainPrinter) printRestored(ev plan.Event, dryRun bool) {
	if ev.Kind != plan.KindLog || ev.Object == "" || ev.Level != "info" {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if dryRun {
		p.line(ev.Time, ev.Source, "would", term.Clean(ev.Text))
		return
	}
	p.line(ev.Time, ev.Source, ev.State, term.Clean(strings.TrimPrefix(ev.Text, ev.State+" ")))
}

func (s *session) backupDiffCommand() *cobra.Command {
	var (
		r   engine.RestoreRequest
		out format
	)
	cmd := &cobra.Command{
		Use:   "diff ID",
		Short: "Show how the cluster differs from a backup",
		Long: `Verify a backup and compare the cluster with it: added, removed and changed objects, and
the changed fields. Values are not shown, because they may be secret. Fields that API
servers set, such as UIDs and timestamps, are ignored; status fields are compared. The
comparison covers everything that a new backup would contain.

It changes nothing.

Exit code: 0 if nothing differs, 9 if something does; 1 if something could not be
compared.`,
		Example: `  constellation backup diff backup-20261121070501-1a2b3c4d
  constellation backup diff backup-20261121070501-1a2b3c4d --only example.com/widgets
  constellation backup diff backup-20261121070501-1a2b3c4d -o json | jq '.differences[] | select(.change == "removed")'`,
		Args:              oneArg("the ID of a backup", "run `constellation backup list` to see all IDs"),
		ValidArgsFunction: s.completeBackup,
		RunE: func(cmd *cobra.Command, args []string) error {
			r.ID = args[0]
			return s.differ(cmd.Context(), r, out)
		},
	}
	s.restoreFlags(cmd, &r)
	s.outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// differ runs `backup diff`. It writes differences as they are found.
func (s *session) differ(ctx context.Context, r engine.RestoreRequest, f format) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	progress := s.restoreProgress()
	var d differences = &differenceLines{out: s.out}
	if f == asJSON {
		d = &differenceDocument{out: s.out, id: r.ID}
	}
	counts := map[string]int64{}
	c, err := eng.Differ(ctx, r, progress.event, func(x engine.Difference) {
		progress.live.Clear()
		counts[x.Change]++
		d.write(x)
	})
	progress.live.Clear()
	if err != nil && c.Types == 0 && len(counts) == 0 {
		return err
	}
	d.end(r.ID, c, counts, err)
	switch {
	case err != nil:
		return err
	case len(c.Skipped) > 0:
		return &plan.Error{Op: "compare with backup " + r.ID, Err: fmt.Errorf("%s: %s", words.Count(len(c.Skipped), "part")+" could not be compared", term.Clean(c.Skipped[0])), Remedy: "see above for the compared parts"}
	case len(counts) > 0:
		return exitStatus(plan.ExitDiffers)
	}
	return nil
}

// differences writes the output of `backup diff`.
type differences interface {
	write(engine.Difference)
	end(id string, c engine.Compared, counts map[string]int64, err error)
}

// differenceLines writes a line for each object.
type differenceLines struct{ out io.Writer }

func (d *differenceLines) write(x engine.Difference) {
	sign := map[string]string{engine.ChangeAdded: "+", engine.ChangeRemoved: "-", engine.ChangeChanged: "~"}[x.Change]
	line := sign + " " + term.Clean(x.Object.String())
	if len(x.Fields) > 0 {
		line += "  " + term.Clean(strings.Join(x.Fields, ", "))
	}
	if x.More > 0 {
		line += fmt.Sprintf(" and %d more", x.More)
	}
	fmt.Fprintln(d.out, line)
}

func (d *differenceLines) end(id string, c engine.Compared, counts map[string]int64, err error) {
	for _, s := range c.Skipped {
		fmt.Fprintln(d.out, "? "+term.Clean(s))
	}
	text := fmt.Sprintf("%d removed, %d changed, %d added since backup %s", counts[engine.ChangeRemoved], counts[engine.ChangeChanged], counts[engine.ChangeAdded], id)
	switch {
	case err != nil && c.Objects == 0 && len(counts) == 0:
		text = "nothing was compared with backup " + id
	case err != nil:
		text += ", comparison incomplete"
	case len(counts) == 0 && len(c.Skipped) == 0:
		text = "nothing differs from backup " + id
	}
	fmt.Fprintf(d.out, "%s (%s of %s)\n", text, words.Count(int(c.Objects), "object"), words.Count(int(c.Types), "type"))
}

// differenceDocument streams one JSON document and buffers nothing.
type differenceDocument struct {
	out   io.Writer
	id    string
	wrote bool
}

func (d *differenceDocument) begin() string {
	if d.wrote {
		return ",\n    "
	}
	d.wrote = true
	return fmt.Sprintf("{\n  \"schema\": %q,\n  \"backup\": %q,\n  \"differences\": [\n    ", plan.Schema, d.id)
}

func (d *differenceDocument) write(x engine.Difference) {
	b, err := encode(x, "")
	if err != nil { // cannot happen: x holds strings and numbers only
		return
	}
	fmt.Fprint(d.out, d.begin()+strings.TrimSuffix(string(b), "\n"))
}

func (d *differenceDocument) end(id string, c engine.Compared, counts map[string]int64, err error) {
	if !d.wrote {
		fmt.Fprint(d.out, strings.TrimSuffix(d.begin(), "\n    "))
	} else {
		fmt.Fprint(d.out, "\n  ")
	}
	tail := struct {
		Complete bool  `json:"complete"`
		Added    int64 `json:"added"`
		Removed  int64 `json:"removed"`
		Changed  int64 `json:"changed"`
		engine.Compared
	}{err == nil && len(c.Skipped) == 0, counts[engine.ChangeAdded], counts[engine.ChangeRemoved], counts[engine.ChangeChanged], c}
	b, err := encode(tail, "  ")
	if err != nil {
		return
	}
	fmt.Fprint(d.out, "],"+strings.TrimPrefix(string(b), "{"))
}

// restoreProgress shows the progress of reading on stderr, if stderr is a terminal.
type restoreProgress struct {
	live  term.LiveLine
	now   func() time.Time
	shown time.Time
}

func (s *session) restoreProgress() *restoreProgress {
	p := &restoreProgress{now: s.Now}
	p.live = s.liveLine()
	return p
}

func (p *restoreProgress) event(ev plan.Event) {
	if now := p.now(); now.Sub(p.shown) > 100*time.Millisecond {
		p.shown = now
		p.live.Set(term.Clean(ev.Object + " " + ev.Text + ": " + view.Amount(ev.Current, ev.Total)))
	}
}
