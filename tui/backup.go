package tui

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
)

func (s *session) backupCommand() *cobra.Command {
	cmd := group("backup", "Keep what an upgrade can destroy, and bring it back",
		`Write definitions and custom resources of the cluster to files, verify them, and bring
them back. A backup is a directory of Lists that kubectl create -f takes, too.`,
		"  constellation backup create\n  constellation backup list\n  constellation backup verify backup-20261121070501-1a2b3c4d")
	cmd.AddCommand(s.backupCreate(), s.backupList(), s.backupShow(), s.backupVerify(), s.backupRestoreCommand(), s.backupDiffCommand(), s.backupPrune())
	return cmd
}

// etcdFlag is the value of --etcd: unset, true or false.
type etcdFlag string

func (f *etcdFlag) String() string { return string(*f) }
func (f *etcdFlag) Type() string   { return "bool" }
func (f *etcdFlag) Set(v string) error {
	switch v {
	case "true", "false":
		*f = etcdFlag(v)
		return nil
	}
	return errors.New("want true or false")
}

// backupDirFlag is the flag that says where backups are.
func (s *session) backupDirFlag(cmd *cobra.Command, dir *string, what string) {
	cmd.Flags().Var((*someDir)(dir), "dir", what)
	_ = cmd.MarkFlagDirname("dir")
}

// someDir is a flag's directory. That of a variable that is not set is none.
type someDir string

func (d *someDir) String() string { return string(*d) }
func (d *someDir) Type() string   { return "directory" }
func (d *someDir) Set(s string) error {
	if s == "" {
		return errors.New("it is empty; leave --dir out for the workspace's own")
	}
	*d = someDir(s)
	return nil
}

// oneArg wants one argument, and says what it is.
func oneArg(what, where string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 1 {
			return nil
		}
		return &engine.Error{Op: cmd.CommandPath(), Err: fmt.Errorf("wants %s, and got %d arguments", what, len(args)), Remedy: where, Exit: engine.ExitUsage}
	}
}

// completeBackup completes the ID of a backup as the one argument, the newest first.
func (s *session) completeBackup(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	const done = cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
	if len(args) > 0 {
		return nil, done
	}
	eng, _, _, err := s.engineOf()
	if err != nil {
		return nil, done
	}
	dir, _ := cmd.Flags().GetString("dir")
	all, err := eng.ListBackups(cmd.Context(), dir, false, nil)
	if err != nil {
		return nil, done
	}
	var out []string
	for _, b := range all {
		text := fmt.Sprintf("%s, %s", ago(b.Created, s.Now()), count(int(b.Objects), "object"))
		if !b.Whole {
			text = "not whole"
		}
		out = append(out, b.ID+"\t"+text)
	}
	return out, done
}

func (s *session) backupCreate() *cobra.Command {
	var (
		r       engine.BackupRequest
		etcd    etcdFlag
		timeout time.Duration
		out     format
	)
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Back up definitions, custom resources and what an upgrade changes",
		Long: `Create writes every CustomResourceDefinition and every custom resource of the cluster to
files, with the records of Helm and the ConfigMaps that an upgrade changes. It changes
nothing in the cluster. At the end the backup is read again and verified.

A snapshot of etcd is taken as well where the cluster's operator can take one; with
--etcd a backup without one is not whole, with --etcd=false none is taken. It holds all
Secrets. So do Helm's records, as far as the values of charts are secret. All other
Secrets are left out unless --secrets is given. Directories are 0700, files 0600.

What cannot be read, such as a kind whose conversion webhook fails, is named; the backup
is kept, is not whole, and the exit code is 1. What is interrupted leaves no backup;
a second signal ends it at once, and what is left then is never taken for whole.`,
		Example: `  constellation backup create
  constellation backup create --etcd
  constellation backup create --dir /mnt/safe --secrets
  constellation backup create -o json | jq -r 'select(.kind == "result").run'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r.Etcd = string(etcd)
			return s.createBackup(cmd.Context(), r, timeout, out)
		},
	}
	fl := cmd.Flags()
	fl.Var(&etcd, "etcd", "take a snapshot of etcd in any case, or with --etcd=false never (default: if one can be had)")
	fl.Lookup("etcd").NoOptDefVal = "true"
	s.backupDirFlag(cmd, &r.Dir, "`directory` to put the backup in (default: constellation-upgrade in the workspace)")
	fl.BoolVar(&r.Secrets, "secrets", false, "back up all Secrets, too")
	fl.DurationVar(&timeout, "timeout", 0, "stop after this long, such as 10m; nothing is left then (0: never)")
	s.outputFlag(cmd, &out, "what to print: text, or json for one event per line")
	_ = cmd.RegisterFlagCompletionFunc("etcd", fixed("true", "false"))
	return cmd
}

func (s *session) createBackup(ctx context.Context, r engine.BackupRequest, timeout time.Duration, f format) error {
	out := s.printer(f, true)
	defer out.close()
	eng, _, _, err := s.engineOf()
	if err != nil {
		return s.unplanned(out, f, err)
	}
	ctx, stop := s.limited(ctx, timeout)
	defer stop()
	plan, err := eng.PlanBackup(ctx, r)
	if err != nil {
		return s.unplanned(out, f, err)
	}
	return eng.Run(ctx, plan, out.event)
}

// backupLine is a backup in the answer of `backup list`.
type backupLine struct {
	ID      string    `json:"id"`
	Created time.Time `json:"created"`
	Objects int64     `json:"objects"`
	Bytes   int64     `json:"bytes"`
	Whole   bool      `json:"whole"`
	// Why says why it is not whole.
	Why  string `json:"why,omitempty"`
	Etcd bool   `json:"etcd"`
}

func (s *session) backupList() *cobra.Command {
	var (
		dir   string
		quick bool
		out   format
	)
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the backups, the newest first",
		Long: `List the backups of this workspace, the newest first, and whether they are whole. For
that they are read; with --quick only names and sizes are compared, which does not find
a byte that changed.`,
		Example: `  constellation backup list
  constellation backup list --dir /mnt/safe
  constellation backup list -o json | jq -r '[.backups[] | select(.whole)][0].id'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			eng, _, _, err := s.engineOf()
			if err != nil {
				return err
			}
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			live := s.reading()
			all, err := eng.ListBackups(ctx, dir, !quick, live.of)
			live.clear()
			if err != nil {
				return err
			}
			if out == asJSON {
				v := struct {
					Schema  string       `json:"schema"`
					Backups []backupLine `json:"backups"`
				}{engine.Schema, []backupLine{}}
				for _, b := range all {
					v.Backups = append(v.Backups, backupLine{b.ID, b.Created, b.Objects, b.Bytes, b.Whole, b.Why, b.Etcd})
				}
				return document(s.out, v)
			}
			if len(all) == 0 {
				fmt.Fprintf(s.out, "no backups\nnext  %s\n", s.command("backup create")+dirFlag(dir))
				return nil
			}
			rows := [][]string{{"BACKUP", "CREATED", "OBJECTS", "SIZE", "ETCD", "WHOLE"}}
			for _, b := range all {
				whole, etcd := "yes", "no"
				if b.Etcd {
					etcd = "yes"
				}
				if quick && b.Whole {
					whole = "by its sizes"
				}
				if !b.Whole {
					whole = "NO: " + b.Why
				}
				rows = append(rows, []string{b.ID, ago(b.Created, s.Now()), fmt.Sprint(b.Objects), bytesOf(b.Bytes), etcd, whole})
			}
			table(s.out, "", rows)
			return nil
		},
	}
	s.backupDirFlag(cmd, &dir, "`directory` that backups were made in with --dir")
	cmd.Flags().BoolVar(&quick, "quick", false, "compare names and sizes only")
	s.outputFlag(cmd, &out, "what to print: text, or json for one document")
	return cmd
}

// reading tells on stderr how much of a backup was read, if that is a terminal.
type reading struct {
	liveLine
	now   func() time.Time
	shown time.Time
}

func (s *session) reading() *reading {
	r := &reading{now: s.Now}
	r.liveLine = s.liveLine()
	return r
}

func (r *reading) of(id string, done, total int64) {
	if now := r.now(); r.out != nil && now.Sub(r.shown) > 100*time.Millisecond {
		r.shown = now
		r.set(fmt.Sprintf("read %s, %s of %s", id, bytesOf(done), bytesOf(total)))
	}
}

func (s *session) backupShow() *cobra.Command {
	var (
		dir string
		out format
	)
	cmd := &cobra.Command{
		Use:   "show ID",
		Short: "Show what a backup holds",
		Long: `Show what a backup holds, as its manifest says: types, objects, what is missing, and
where its files are. Whether they still are what was written, backup verify finds out.`,
		Example: `  constellation backup show backup-20261121070501-1a2b3c4d
  constellation backup show backup-20261121070501-1a2b3c4d -o json | jq '.types[] | select(.objects > 0).resource'`,
		Args:              oneArg("the ID of a backup", "`constellation backup list` shows them"),
		ValidArgsFunction: s.completeBackup,
		RunE: func(_ *cobra.Command, args []string) error {
			eng, _, _, err := s.engineOf()
			if err != nil {
				return err
			}
			m, path, err := eng.ShowBackup(dir, args[0])
			if err != nil {
				return err
			}
			if out == asJSON {
				return document(s.out, m)
			}
			s.showBackup(&m, path)
			return nil
		},
	}
	s.backupDirFlag(cmd, &dir, "`directory` that the backup was made in with --dir")
	s.outputFlag(cmd, &out, "what to print: text, or json for the manifest")
	return cmd
}

func (s *session) showBackup(m *engine.BackupManifest, path string) {
	holds := fmt.Sprintf("%s of %s, %s", count(int(m.Objects), "object"), count(len(m.Types), "type"), bytesOf(m.Bytes))
	secrets := "those of Helm's records only"
	if m.Secrets {
		secrets = "all"
	}
	etcd := "no snapshot"
	if m.Etcd != nil {
		etcd = bytesOf(m.Etcd.Size)
		if m.Etcd.Revision > 0 {
			etcd += fmt.Sprintf(", revision %d", m.Etcd.Revision)
		}
	}
	cluster := strings.TrimSpace(m.Cluster.Name + " " + m.Cluster.Server)
	rows := [][]string{
		{"backup", m.ID},
		{"cluster", orElse(cluster, "-")},
		{"created", m.Created.Local().Format("2006-01-02 15:04:05") + ", " + ago(m.Created, s.Now()) + ", in " + m.Ended.Sub(m.Created).Round(time.Millisecond).String()},
		{"holds", holds},
		{"secrets", secrets},
		{"etcd", etcd},
		{"files", path},
	}
	table(s.out, "", rows)
	for _, h := range m.Holes {
		fmt.Fprintf(s.out, "missing  %s\n", oneLine(clean(h.String())))
	}
	for _, n := range m.Notes {
		fmt.Fprintf(s.out, "note     %s\n", oneLine(clean(n)))
	}
	size := map[string]int64{}
	for _, f := range m.Files {
		size[f.Name] = f.Size
	}
	empty := 0
	list := [][]string{{"TYPE", "VERSION", "OBJECTS", "SIZE", "FILES"}}
	for _, t := range m.Types {
		if t.Objects == 0 {
			empty++
			continue
		}
		var n int64
		for _, f := range t.Files {
			n += size[f]
		}
		list = append(list, []string{t.String(), t.Version, fmt.Sprint(t.Objects), bytesOf(n), strings.Join(t.Files, " ")})
	}
	fmt.Fprintln(s.out)
	table(s.out, "", list)
	if empty > 0 {
		fmt.Fprintf(s.out, "and %s without objects\n", count(empty, "type"))
	}
}

// verification is the answer of `backup verify`.
type verification struct {
	Schema   string   `json:"schema"`
	ID       string   `json:"id"`
	Whole    bool     `json:"whole"`
	Problems []string `json:"problems"`
}

func (s *session) backupVerify() *cobra.Command {
	var (
		dir string
		out format
	)
	cmd := &cobra.Command{
		Use:   "verify ID",
		Short: "Read a backup and say whether it is whole",
		Long: `Read all of a backup and say whether it is whole: no file is missing or too much, every
byte is as it was written, and nothing was missing when it was made. The exit code is 1
if it is not.`,
		Example: `  constellation backup verify backup-20261121070501-1a2b3c4d
  constellation backup verify backup-20261121070501-1a2b3c4d -o json | jq -r '.problems[]'`,
		Args:              oneArg("the ID of a backup", "`constellation backup list` shows them"),
		ValidArgsFunction: s.completeBackup,
		RunE: func(cmd *cobra.Command, args []string) error {
			eng, _, _, err := s.engineOf()
			if err != nil {
				return err
			}
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			live := s.reading()
			err = eng.VerifyBackup(ctx, dir, args[0], func(done, total int64) { live.of(args[0], done, total) })
			live.clear()
			problems := engine.BackupProblems(err)
			if err != nil && len(problems) == 0 {
				return err
			}
			if out == asJSON {
				if derr := document(s.out, verification{engine.Schema, args[0], err == nil, append([]string{}, problems...)}); derr != nil {
					return derr
				}
				if err != nil {
					return exitStatus(engine.ExitCode(err))
				}
				return nil
			}
			if err == nil {
				fmt.Fprintf(s.out, "%s is whole\n", args[0])
				return nil
			}
			for _, p := range problems {
				fmt.Fprintf(s.out, "%s\n", oneLine(clean(p)))
			}
			return err
		},
	}
	s.backupDirFlag(cmd, &dir, "`directory` that the backup was made in with --dir")
	s.outputFlag(cmd, &out, "what to print: text, or json for one document")
	return cmd
}

func (s *session) backupPrune() *cobra.Command {
	var (
		dir  string
		keep int
		out  format
	)
	cmd := &cobra.Command{
		Use:   "prune --keep N",
		Short: "Remove old backups but for the newest whole ones",
		Long: `Remove backups but for the newest N that are whole, and say which. All are verified
before. The newest whole one is never removed. One that is not whole goes if a whole one
is newer. The exit code is 3 if there is nothing to remove.`,
		Example: `  constellation backup prune --keep 3
  constellation backup prune --keep 1 --dir /mnt/safe -o json | jq -r '.removed[]'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("keep") {
				return &engine.Error{Op: "prune backups", Err: errors.New("--keep is missing"), Remedy: "say how many whole backups stay, such as --keep 3", Exit: engine.ExitUsage}
			}
			eng, _, _, err := s.engineOf()
			if err != nil {
				return err
			}
			removed, err := eng.PruneBackups(cmd.Context(), dir, keep)
			if out == asJSON {
				v := struct {
					Schema  string   `json:"schema"`
					Removed []string `json:"removed"`
				}{engine.Schema, append([]string{}, removed...)}
				if derr := document(s.out, v); derr != nil {
					return derr
				}
				return err
			}
			for _, id := range removed {
				fmt.Fprintf(s.out, "removed %s\n", id)
			}
			return err
		},
	}
	cmd.Flags().IntVar(&keep, "keep", 0, "how `many` whole backups stay, at least 1")
	_ = cmd.RegisterFlagCompletionFunc("keep", fixed("1", "3", "10"))
	s.backupDirFlag(cmd, &dir, "`directory` that backups were made in with --dir")
	s.outputFlag(cmd, &out, "what to print: text, or json for one document")
	return cmd
}

// dirFlag is the flag that names the directory of backups, with a leading space; empty if
// it is that of the workspace.
func dirFlag(dir string) string {
	if dir == "" {
		return ""
	}
	return " --dir " + quoteArg(dir)
}
