package tui

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/adopt"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

func backupCommand(s *session) *cobra.Command {
	cmd := group("backup", "Back up, verify and restore custom resources and etcd",
		`Back up CustomResourceDefinitions and custom resources of the cluster to files, verify the
backup, compare it with the cluster, and restore it. A backup is a directory of Lists that
kubectl create -f accepts, too.`,
		"  constellation backup create\n  constellation backup list\n  constellation backup verify backup-20261121070501-1a2b3c4d")
	cmd.AddCommand(backupCreate(s), backupList(s), backupShow(s), backupVerify(s), backupDecrypt(s), backupRestore(s), backupDiff(s), backupPrune(s))
	return cmd
}

func backupCreate(s *session) *cobra.Command {
	var (
		r       engine.BackupRequest
		etcd    etcdFlag
		timeout time.Duration
		out     format
		access  cluster.Access
	)
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Back up custom resources, Helm releases and etcd",
		Long: `Write every CustomResourceDefinition and custom resource of the cluster to files, with the
Helm release records and the ConfigMaps that an upgrade changes. Create changes nothing in
the cluster. At the end it reads the backup again and verifies it.

If the cluster's operator supports it, the backup includes an etcd snapshot. With --etcd a
backup without a snapshot counts as incomplete; --etcd=false takes none. The snapshot
contains all Secrets, and Helm records contain the chart values. Other Secrets are excluded
unless --secrets is given. Directories have mode 0700, files 0600.

If something cannot be read, such as a kind whose conversion webhook fails, the command
names it and keeps the backup, marked as incomplete; the exit code is 1. An interrupted
command leaves no backup. A second signal ends it at once and may leave files, which never
count as a complete backup.

If the configuration has backup.recipients, public keys of age, the backup is encrypted to
them, and only their secret keys can read it. Its content is not read back for verification,
only its encrypted files are.

With --kubeconfig or --context, it backs up any cluster. Without a workspace, the backup is in
a folder with the name of the context, or in --dir. An etcd snapshot needs our operator.`,
		Example: `  constellation backup create
  constellation backup create --context prod-eu
  constellation backup create --etcd
  constellation backup create --dir /mnt/safe --secrets
  constellation backup create -o json | jq -r 'select(.kind == "result").run'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r.Etcd = string(etcd)
			var err error
			if r.Cluster, err = selectCluster(s, backUp, access, false); err != nil {
				return err
			}
			return runBackup(cmd.Context(), s, r, timeout, out)
		},
	}
	fl := cmd.Flags()
	fl.Var(&etcd, "etcd", "require an etcd snapshot; --etcd=false takes none (default: if supported)")
	fl.Lookup("etcd").NoOptDefVal = "true"
	backupDirFlag(cmd, &r.Dir, "`directory` for the backup (default: constellation-upgrade in the workspace)")
	fl.BoolVar(&r.Secrets, "secrets", false, "include all Secrets")
	fl.DurationVar(&timeout, "timeout", 0, "stop after this time, such as 10m, and leave no backup (0: no limit)")
	outputFlag(cmd, &out, "output format: text, or json for one event per line")
	_ = cmd.RegisterFlagCompletionFunc("etcd", fixed("true", "false"))
	accessFlags(s, cmd, &access)
	return cmd
}

func runBackup(ctx context.Context, s *session, r engine.BackupRequest, timeout time.Duration, f format) error {
	out := s.printer(f, true)
	defer out.close()
	ctx, stop := s.limited(ctx, timeout)
	defer stop()
	if r.Cluster != nil {
		if err := s.Clusters.Reach(ctx, *r.Cluster); err != nil {
			return unplanned(s, out, f, err)
		}
		if ws, _, err := s.workspace(); err == nil && !ws.Has(workspace.ConfigFile) {
			if err := backupFolder(s, r.Cluster, r.Dir); err != nil {
				return unplanned(s, out, f, err)
			}
		}
	}
	eng, _, _, err := s.engineOf()
	if err != nil {
		return unplanned(s, out, f, err)
	}
	if ws, _, err := s.workspace(); err == nil && r.Cluster == nil && ws.Unmanaged() {
		s.remark("%s", adopt.Upgrade)
	}
	plan, err := eng.PlanBackup(ctx, r)
	if err != nil {
		return unplanned(s, out, f, err)
	}
	return eng.Run(ctx, plan, out.event)
}

// backupLine is a backup in the JSON output of `backup list`.
type backupLine struct {
	ID      string    `json:"id"`
	Created time.Time `json:"created"`
	Objects int64     `json:"objects"`
	Bytes   int64     `json:"bytes"`
	Whole   bool      `json:"whole"`
	// Why is the reason if Whole is false.
	Why  string `json:"why,omitempty"`
	Etcd bool   `json:"etcd"`
	// Authentication is "authenticated", "foreign" or "unauthenticated"; absent if unknown.
	Authentication string `json:"authentication,omitempty"`
	Encrypted      bool   `json:"encrypted,omitempty"`
}

func backupList(s *session) *cobra.Command {
	var (
		dir   string
		quick bool
		out   format
	)
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List backups, newest first",
		Long: `List the backups of this workspace, newest first, and whether each is complete. The command
reads every file and verifies its digest. With --quick it compares only names and sizes,
which does not detect changed contents. Column TAG shows whether the master secret of this
workspace authenticates the backup (ours), another one (foreign), or nothing (none).`,
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
			live := newReading(s)
			all, err := eng.ListBackups(ctx, dir, !quick, live.of)
			live.Clear()
			if err != nil {
				return err
			}
			if out == asJSON {
				v := struct {
					Schema  string       `json:"schema"`
					Backups []backupLine `json:"backups"`
				}{plan.Schema, []backupLine{}}
				for _, b := range all {
					v.Backups = append(v.Backups, backupLine{b.ID, b.Created, b.Objects, b.Bytes, b.Complete, b.Why, b.Etcd, b.Authentication, b.Encrypted})
				}
				return document(s.out, v)
			}
			if len(all) == 0 {
				fmt.Fprintf(s.out, "no backups\nnext  %s\n", s.command("backup create")+dirFlag(dir))
				return nil
			}
			rows := [][]string{{"BACKUP", "CREATED", "OBJECTS", "SIZE", "ETCD", "TAG", "COMPLETE"}}
			for _, b := range all {
				whole, etcd := "yes", "no"
				if b.Etcd {
					etcd = "yes"
				}
				tag := map[string]string{engine.BackupAuthenticated: "ours", engine.BackupForeign: "foreign"}[b.Authentication]
				if b.Encrypted && b.Complete {
					whole = "yes, encrypted"
				}
				if quick && b.Complete {
					whole = "sizes match"
				}
				if !b.Complete {
					whole = "NO: " + b.Why
				}
				rows = append(rows, []string{b.ID, term.Ago(b.Created, s.Now()), fmt.Sprint(b.Objects), term.Bytes(b.Bytes), etcd, cmp.Or(tag, "none"), whole})
			}
			table(s.out, "", rows)
			return nil
		},
	}
	backupDirFlag(cmd, &dir, "`directory` of the backups (default: constellation-upgrade in the workspace)")
	cmd.Flags().BoolVar(&quick, "quick", false, "compare names and sizes only")
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// reading shows on stderr how much of a backup was read, if stderr is a terminal.
type reading struct {
	term.LiveLine
	now   func() time.Time
	shown time.Time
}

func newReading(s *session) *reading {
	r := &reading{now: s.Now}
	r.LiveLine = s.liveLine()
	return r
}

func (r *reading) of(id string, done, total int64) {
	if now := r.now(); r.Out != nil && now.Sub(r.shown) > 100*time.Millisecond {
		r.shown = now
		r.Set(fmt.Sprintf("read %s, %s of %s", id, term.Bytes(done), term.Bytes(total)))
	}
}

func backupShow(s *session) *cobra.Command {
	var (
		dir, identity string
		out           format
	)
	cmd := &cobra.Command{
		Use:   "show ID",
		Short: "Show the contents of a backup",
		Long: `Show the manifest of a backup: types, objects, missing parts, and the path of its files.
This does not read the files; backup verify does. Without --identity, of an encrypted backup
it shows date, cluster and size.`,
		Example: `  constellation backup show backup-20261121070501-1a2b3c4d
  constellation backup show backup-20261121070501-1a2b3c4d -o json | jq '.types[] | select(.objects > 0).resource'`,
		Args:              oneArg("the ID of a backup", "run `constellation backup list` to see all IDs"),
		ValidArgsFunction: completeBackup(s),
		RunE: func(_ *cobra.Command, args []string) error {
			eng, _, _, err := s.engineOf()
			if err != nil {
				return err
			}
			if err := eng.UseIdentity(identity); err != nil {
				return err
			}
			m, path, err := eng.ShowBackup(dir, args[0])
			if err != nil {
				return err
			}
			if out == asJSON {
				return document(s.out, m)
			}
			writeBackup(s.out, s.Now(), &m, path)
			return nil
		},
	}
	backupDirFlag(cmd, &dir, "`directory` of the backups (default: constellation-upgrade in the workspace)")
	identityFlag(cmd, &identity)
	outputFlag(cmd, &out, "output format: text, or json for the manifest")
	return cmd
}

func writeBackup(out io.Writer, now time.Time, m *engine.BackupManifest, path string) {
	contents := fmt.Sprintf("%s of %s, %s", words.Count(int(m.Objects), "object"), words.Count(len(m.Types), "type"), term.Bytes(m.Bytes))
	secrets := "only in Helm records"
	if m.Secrets {
		secrets = "all"
	}
	tag := "none: nothing proves who made it"
	if m.AuthenticatedBy != "" {
		tag = "of key " + term.Clean(m.AuthenticatedBy) + ": backup verify checks it"
	}
	etcd := "no snapshot"
	if m.Etcd != nil {
		etcd = term.Bytes(m.Etcd.Size)
		if m.Etcd.Revision > 0 {
			etcd += fmt.Sprintf(", revision %d", m.Etcd.Revision)
		}
	}
	cluster := strings.TrimSpace(m.Cluster.Name + " " + m.Cluster.Server)
	rows := [][]string{
		{"backup", m.ID},
		{"cluster", cmp.Or(cluster, "-")},
		{"created", m.Created.Local().Format("2006-01-02 15:04:05") + ", " + term.Ago(m.Created, now) + ", in " + m.Ended.Sub(m.Created).Round(time.Millisecond).String()},
		{"contents", contents},
		{"secrets", secrets},
		{"etcd", etcd},
		{"tag", tag},
		{"files", path},
	}
	if x := m.Encrypted; x != nil && len(m.Types) == 0 {
		rows[3][1] = fmt.Sprintf("%s, %s encrypted; --identity shows more", words.Count(int(x.Objects), "object"), term.Bytes(m.Bytes))
		rows = slices.Delete(rows, 4, 6)
	}
	if m.Encrypted != nil {
		to := "to " + term.OneLine(term.Clean(strings.Join(m.Encrypted.Recipients, ", ")))
		rows = slices.Insert(rows, len(rows)-1, []string{"encrypted", to})
	}
	table(out, "", rows)
	if x := m.Encrypted; x != nil && len(m.Types) == 0 {
		return
	}
	for _, h := range m.Holes {
		fmt.Fprintf(out, "missing  %s\n", term.OneLine(term.Clean(h.String())))
	}
	for _, n := range m.Notes {
		fmt.Fprintf(out, "note     %s\n", term.OneLine(term.Clean(n)))
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
		list = append(list, []string{t.String(), t.Version, fmt.Sprint(t.Objects), term.Bytes(n), strings.Join(t.Files, " ")})
	}
	fmt.Fprintln(out)
	table(out, "", list)
	if empty > 0 {
		fmt.Fprintf(out, "and %s without objects\n", words.Count(empty, "type"))
	}
}

// verification is the JSON output of `backup verify`.
type verification struct {
	Schema   string   `json:"schema"`
	ID       string   `json:"id"`
	Whole    bool     `json:"whole"`
	Problems []string `json:"problems"`
	// Authentication is "authenticated", "foreign" or "unauthenticated"; absent if the backup is damaged.
	Authentication string `json:"authentication,omitempty"`
	// Recipients are public keys of age to which it is encrypted; absent if it is not.
	Recipients []string `json:"recipients,omitempty"`
	// Locked is whether only the encrypted bytes were verified, without an identity.
	Locked bool `json:"locked,omitempty"`
}

func backupVerify(s *session) *cobra.Command {
	var (
		dir, identity string
		out           format
	)
	cmd := &cobra.Command{
		Use:   "verify ID",
		Short: "Verify that a backup is complete and unchanged",
		Long: `Read all files of a backup and verify that it is complete: no file is missing or extra, all
digests match, and nothing was missing when the backup was made. The exit code is 1 if the
backup is incomplete or damaged.

It also shows whether the backup is authenticated: by the master secret of this workspace,
by another one, or not at all, as backups of older programs and of workspaces without a
master secret are. A wrong tag counts as damage: somebody changed the backup.

Of an encrypted backup it shows the recipients. Without --identity it verifies the encrypted
files, and with it their content, too.`,
		Example: `  constellation backup verify backup-20261121070501-1a2b3c4d
  constellation backup verify backup-20261121070501-1a2b3c4d -o json | jq -r '.problems[]'
  constellation backup verify backup-20261121070501-1a2b3c4d -o json | jq -r .authentication`,
		Args:              oneArg("the ID of a backup", "run `constellation backup list` to see all IDs"),
		ValidArgsFunction: completeBackup(s),
		RunE: func(cmd *cobra.Command, args []string) error {
			eng, _, _, err := s.engineOf()
			if err != nil {
				return err
			}
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			live := newReading(s)
			if err := eng.UseIdentity(identity); err != nil {
				return err
			}
			v, err := eng.VerifyBackup(ctx, dir, args[0], func(done, total int64) { live.of(args[0], done, total) })
			live.Clear()
			problems := engine.BackupProblems(err)
			if err != nil && len(problems) == 0 {
				return err
			}
			if out == asJSON {
				if derr := document(s.out, verification{plan.Schema, args[0], err == nil, append([]string{}, problems...), v.Authentication, v.Recipients, v.Locked}); derr != nil {
					return derr
				}
				if err != nil {
					return exitStatus(plan.ExitCode(err))
				}
				return nil
			}
			if err == nil {
				fmt.Fprintf(s.out, "%s is complete\n", args[0])
			}
			if text := view.Authentication(v.Authentication); text != "" {
				fmt.Fprintln(s.out, text)
			}
			if len(v.Recipients) > 0 {
				fmt.Fprintln(s.out, "encrypted to "+term.OneLine(term.Clean(strings.Join(v.Recipients, ", "))))
			}
			if v.Locked {
				fmt.Fprintln(s.out, "only the encrypted files were verified: --identity verifies their content, too")
			}
			if err == nil {
				return nil
			}
			for _, p := range problems {
				fmt.Fprintf(s.out, "%s\n", term.OneLine(term.Clean(p)))
			}
			return err
		},
	}
	backupDirFlag(cmd, &dir, "`directory` of the backups (default: constellation-upgrade in the workspace)")
	identityFlag(cmd, &identity)
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

func backupDecrypt(s *session) *cobra.Command {
	var dir, identity, to string
	cmd := &cobra.Command{
		Use:   "decrypt ID --to DIR",
		Short: "Write an encrypted backup without encryption",
		Long: `Verify an encrypted backup and write it without encryption to DIR/ID/backups, for kubectl or
to restore its etcd.snapshot. It stays authenticated. Delete it when it is no longer needed:
it has all secrets of the original.

Exit code: 0 written; 1 if the backup is damaged; 2 without the right identity.`,
		Example: `  constellation backup decrypt backup-20261121070501-1a2b3c4d --to /mnt/safe --identity key.txt
  CONSTELLATION_BACKUP_IDENTITY=key.txt constellation backup decrypt backup-20261121070501-1a2b3c4d --to /mnt/safe`,
		Args:              oneArg("the ID of a backup", "run `constellation backup list` to see all IDs"),
		ValidArgsFunction: completeBackup(s),
		RunE: func(cmd *cobra.Command, args []string) error {
			if to == "" {
				return &plan.Error{Op: "decrypt backup " + args[0], Err: errors.New("--to is missing"), Remedy: "name a directory for the decrypted backup", Exit: plan.ExitUsage}
			}
			eng, _, _, err := s.engineOf()
			if err != nil {
				return err
			}
			if err := eng.UseIdentity(identity); err != nil {
				return err
			}
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			live := newReading(s)
			path, err := eng.DecryptBackup(ctx, dir, args[0], to, func(done, total int64) { live.of(args[0], done, total) })
			live.Clear()
			if err != nil {
				return err
			}
			fmt.Fprintln(s.out, path)
			return nil
		},
	}
	backupDirFlag(cmd, &dir, "`directory` of the backups (default: constellation-upgrade in the workspace)")
	backupDirFlagNamed(cmd, "to", &to, "`directory` for the decrypted backup")
	identityFlag(cmd, &identity)
	return cmd
}

func backupPrune(s *session) *cobra.Command {
	var (
		dir  string
		keep int
		out  format
	)
	cmd := &cobra.Command{
		Use:   "prune --keep N",
		Short: "Delete old backups and keep the newest complete ones",
		Long: `Delete all backups except the newest N complete ones, and list the deleted ones. The command
verifies all backups first. It never deletes the newest complete backup. It deletes an
incomplete backup if a complete one is newer. The exit code is 3 if there is nothing to
delete.`,
		Example: `  constellation backup prune --keep 3
  constellation backup prune --keep 1 --dir /mnt/safe -o json | jq -r '.removed[]'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("keep") {
				return &plan.Error{Op: "prune backups", Err: errors.New("--keep is missing"), Remedy: "pass the number of complete backups to keep, such as --keep 3", Exit: plan.ExitUsage}
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
				}{plan.Schema, append([]string{}, removed...)}
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
	cmd.Flags().IntVar(&keep, "keep", 0, "`number` of complete backups to keep, at least 1")
	_ = cmd.RegisterFlagCompletionFunc("keep", fixed("1", "3", "10"))
	backupDirFlag(cmd, &dir, "`directory` of the backups (default: constellation-upgrade in the workspace)")
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// dirFlag returns --dir with a leading space; empty for the workspace's directory.
func dirFlag(dir string) string {
	if dir == "" {
		return ""
	}
	return " --dir " + view.QuoteArg(dir)
}
