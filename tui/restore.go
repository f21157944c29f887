package tui

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

func backupRestore(s *session) *cobra.Command {
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

Objects that can run code are restored only if --only names them, too: Plans, definitions
with a conversion webhook and their objects, and built-in kinds other than ConfigMaps and
Secrets, such as Jobs, webhook configurations and bindings of ServiceAccounts, which no
backup of this program contains. The plan lists them with the command that restores them.
Objects of other operators' kinds are restored: read them first if their operators run code.

A restore can be interrupted at any time; run it again to resume. A damaged backup is
rejected, and so is one with a wrong authentication tag. A backup that the master secret of
this workspace does not authenticate is restored only if you acknowledge that: with --ack
backup-unauthenticated or --ack backup-foreign, or at the prompt.

Exit code: 0 done; 1 if an object could not be restored; 3 if there is nothing to
restore; 5 if it was not accepted.`,
		Example: `  constellation backup restore backup-20261121070501-1a2b3c4d --dry-run
  constellation backup restore backup-20261121070501-1a2b3c4d
  constellation backup restore backup-20261121070501-1a2b3c4d --only example.com/widgets/shop --yes
  constellation backup restore backup-20261121070501-1a2b3c4d --yes --ack backup-unauthenticated
  constellation backup restore backup-20261121070501-1a2b3c4d --only core/configmaps/kube-system/join-config --overwrite
  constellation backup restore backup-20261121070501-1a2b3c4d --yes -o json | jq 'select(.state == "failed")'`,
		Args:              oneArg("the ID of a backup", "run `constellation backup list` to see all IDs"),
		ValidArgsFunction: completeBackup(s),
		RunE: func(cmd *cobra.Command, args []string) error {
			r.ID = args[0]
			ctx := cmd.Context()
			if timeout > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, timeout)
				defer cancel()
			}
			return runRestore(ctx, s, r, yes, nonInteractive, out)
		},
	}
	fl := cmd.Flags()
	restoreFlags(s, cmd, &r)
	fl.BoolVar(&r.DryRun, "dry-run", false, "send every write as a dry run; change nothing")
	fl.BoolVar(&r.Overwrite, "overwrite", false, "reset existing objects that differ from the backup")
	fl.BoolVarP(&yes, "yes", "y", false, "accept the plan and its ordinary warnings")
	fl.StringArrayVar(&r.Acknowledge, "ack", nil, "`ID` of a finding to acknowledge; may be repeated")
	_ = cmd.RegisterFlagCompletionFunc("ack", fixed(engine.RestoreAcks...))
	fl.BoolVar(&nonInteractive, "non-interactive", false, "never prompt")
	fl.DurationVar(&timeout, "timeout", 0, "stop after this time, such as 10m; run again to resume (0: no limit)")
	outputFlag(cmd, &out, "output format: text, or json for one event per line")
	return cmd
}

// runRestore runs `backup restore`. On a terminal it prompts once, after it printed the plan.
func runRestore(ctx context.Context, s *session, r engine.RestoreRequest, yes, nonInteractive bool, f format) error {
	out := s.printer(f, true)
	defer func() { out.close() }()
	eng, _, _, err := s.engineOf()
	if err != nil {
		return unplanned(s, out, f, err)
	}
	if err := unlock(s, cluster.Access{}, f, nonInteractive); err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	progress := newRestoreProgress(s)
	pl, err := eng.PlanRestore(ctx, r, progress.event)
	progress.live.Clear()
	if err != nil {
		return unplanned(s, out, f, err)
	}
	defer pl.Close()
	a := acceptance{
		yes: yes || r.DryRun, acknowledged: r.Acknowledge, asks: f == text && !nonInteractive && s.asks(), question: fixedQuestion("Restore this?"),
	}
	out, err = a.accept(s, pl, out, f)
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

func backupDiff(s *session) *cobra.Command {
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
		ValidArgsFunction: completeBackup(s),
		RunE: func(cmd *cobra.Command, args []string) error {
			r.ID = args[0]
			return runDiff(cmd.Context(), s, r, out)
		},
	}
	restoreFlags(s, cmd, &r)
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// runDiff runs `backup diff`. It writes differences as they are found.
func runDiff(ctx context.Context, s *session, r engine.RestoreRequest, f format) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	progress := newRestoreProgress(s)
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

func newRestoreProgress(s *session) *restoreProgress {
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
