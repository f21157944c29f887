package engine

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"constellation/engine/backup"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
)

// IDs of the steps of `backup create`.
const (
	StepBackupResources = "backup-resources"
	StepBackupEtcd      = "backup-etcd"
	StepBackupFinish    = "backup-finish"
)

// BackupCluster is what backups need from a cluster.
type BackupCluster interface {
	Backups
	Restorer
}

// Backups reads what a backup holds.
type Backups interface {
	// Version returns the version of the API server. It sends one request and does not retry, unless a
	// credential plugin took the time of the first one.
	Version(ctx context.Context) (string, error)
	// Dump writes every kind, every custom resource and all other objects that an upgrade changes
	// to w, with their origin. Permanently unreadable types are recorded as holes of w; the error
	// is of the writer, of ctx, or wraps ErrUnreachable or ErrDenied. report is not called
	// concurrently, and delays the dump.
	Dump(ctx context.Context, w *backup.Writer, o DumpOptions, report func(BackupProgress)) error
}

// DumpOptions say what of a cluster is wanted.
type DumpOptions struct {
	// Secrets is whether all Secrets are, too.
	Secrets bool
}

// BackupProgress says how far a dump is.
type BackupProgress struct {
	// Type is what is read at the moment: "widgets.example.com".
	Type string
	// Types is how many have been read of how many. More may be found meanwhile.
	Types, AllTypes int64
	// AllObjects is the API server's count; zero if unknown.
	Objects, AllObjects int64
	Bytes               int64
}

// BackupEntry is a backup of a list, for those who import package engine alone.
type BackupEntry = backup.Entry

// BackupManifest says what a backup holds, for the same.
type BackupManifest = backup.Manifest

// When a snapshot of etcd is taken.
const (
	EtcdAuto     = ""      // where there is somebody who takes one
	EtcdRequired = "true"  // in any case: without one the backup has a hole
	EtcdSkip     = "false" // never
)

// BackupRequest says what kind of backup is wanted.
type BackupRequest struct {
	// Dir is the directory that the backup gets its own in; empty means that of the runs.
	Dir string
	// Etcd is one of EtcdAuto, EtcdRequired, EtcdSkip.
	Etcd string
	// Secrets is whether Secrets are backed up, too.
	Secrets bool
	// Cluster is a cluster without a workspace; nil means that of the workspace.
	Cluster *cluster.Selected
}

// BackupDir returns the directory that holds backups: dir, or that of the workspace's runs
// if dir is empty.
func (e *Engine) BackupDir(dir string) (string, error) {
	if dir == "" {
		return e.ws.Path(plan.RunsDir), nil
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", &plan.Error{Op: "find directory " + dir, Err: err, Exit: plan.ExitUsage}
	}
	return abs, nil
}

// backupRun is what the steps of one plan share. Steps run one after the other.
type backupRun struct {
	e       *Engine
	request BackupRequest
	dir     string
	id      string
	name    string // of the cluster
	own     bool   // it is the workspace's cluster
	// clusterID is what the workspace's state says; empty if it says nothing.
	clusterID string
	cluster   BackupCluster
	w         *backup.Writer
	done      backup.Manifest // the committed manifest
}

// PlanBackup returns the plan to back up what an upgrade can destroy. It changes nothing
// yet, and does not ask the cluster. The error has ExitUsage if the workspace or the
// request are at fault.
func (e *Engine) PlanBackup(ctx context.Context, r BackupRequest) (*plan.Plan, error) {
	var kubeconfig []byte
	var err error
	own := true // it is the workspace's cluster
	if s := r.Cluster; s != nil {
		own = e.leadsTo(s.Server)
		if !own && r.Dir == "" && e.ws.Has(workspace.ConfigFile) {
			return nil, &plan.Error{
				Op: fmt.Sprintf("back up context %q", s.Context), Exit: plan.ExitUsage,
				Err:    fmt.Errorf("%s is the workspace of a cluster, and no %s there leads to %s", e.ws.Path("."), workspace.KubeconfigFile, s.Server),
				Remedy: "run the command in another folder, or name a folder for the backup with --dir",
			}
		}
		kubeconfig, ctx = s.Kubeconfig, cluster.WithRequestTimeout(ctx, s.RequestTimeout)
	} else {
		kubeconfig, err = e.ws.Kubeconfig()
	}
	if errors.Is(err, workspace.ErrAbsent) {
		return nil, &plan.Error{Op: "back up the cluster", Err: e.ws.Absent(workspace.KubeconfigFile), Exit: plan.ExitUsage, Remedy: "copy the cluster's kubeconfig there under this name, or name another directory with -C"}
	}
	if err != nil {
		return nil, err
	}
	b := &backupRun{e: e, request: r, name: "of " + workspace.KubeconfigFile}
	if b.cluster, err = e.backups(ctx, kubeconfig); err != nil {
		return nil, &plan.Error{Op: "read " + e.ws.Path(workspace.KubeconfigFile), Err: err, Exit: plan.ExitUsage, Remedy: "restore the file from a backup"}
	}
	// A configuration or state that cannot be read must not keep anybody from making a
	// backup.
	if r.Cluster != nil {
		b.name = r.Cluster.Context
	}
	if b.own = own; own {
		if c, err := e.ws.Config(); err == nil {
			b.name = c.Name
		}
		if s, err := e.ws.State(); err == nil {
			b.clusterID = hex.EncodeToString(s.ClusterValues.ClusterID)
		}
	}
	if b.dir, err = e.BackupDir(r.Dir); err != nil {
		return nil, err
	}
	_, takes := b.cluster.(Snapshots)
	if r.Etcd == EtcdRequired && !takes {
		return nil, &plan.Error{Op: "back up the cluster", Err: errors.New("this program takes no snapshots of etcd"), Exit: plan.ExitUsage, Remedy: "leave --etcd out"}
	}
	now := e.now()
	b.id = newRunID("backup", now)
	path := filepath.Join(b.dir, b.id, backup.Dir)
	p := &plan.Plan{ID: b.id, Verb: plan.VerbBackup, Cluster: b.name, Simulated: b.e.simulated(), NotAttested: b.e.notAttested(), Created: now.UTC()}
	p.Files = []plan.File{{Path: filepath.Join(path, backup.ManifestFile), Mode: "0600", Note: "lists the content of the backup"}}
	if c, err := workspace.PartOfConfig(e.ws, "backup"); err == nil && own && len(c.Backup.Recipients) > 0 {
		p.Files[0].Note = "lists the encrypted files"
		p.Files = append(p.Files,
			plan.File{Path: filepath.Join(path, backup.SealedManifest), Mode: "0600", Note: "lists the content of the backup, encrypted to " + words.Count(len(c.Backup.Recipients), "recipient")},
			plan.File{Path: filepath.Join(path, "*.age"), Mode: "0600", Note: "the content, encrypted"})
	} else {
		p.Files = append(p.Files, plainFiles(path)...)
	}
	what := "every definition and custom resource, Helm's records and the ConfigMaps that an upgrade changes"
	if r.Secrets {
		what += ", and all Secrets,"
	}
	p.Steps = []plan.Step{{ID: StepBackupResources, Title: "Back up custom resources", Effect: what + " are in " + path, Run: b.begin}}
	if takes && r.Etcd != EtcdSkip {
		p.Steps = append(p.Steps, plan.Step{ID: StepBackupEtcd, Title: "Take a snapshot of etcd", Effect: "all of etcd is in " + filepath.Join(path, backup.SnapshotFile), Run: b.etcd})
	}
	p.Steps = append(p.Steps, plan.Step{ID: StepBackupFinish, Title: "Complete and verify the backup", Effect: "the backup is synced to disk and its digests are verified", Run: b.finish})
	p.End.Command = e.command(string(plan.VerbBackup)) + r.flags()
	p.End.Done = "backup " + b.id + " of cluster " + b.name + " is whole"
	at := ""
	if r.Dir != "" {
		at = " --dir " + check.ShellQuote(b.dir)
	}
	p.End.Next = []string{e.command("backup verify "+b.id) + at, e.command("backup restore "+b.id) + at}
	p.End.Cleanup = b.abort
	return p, nil
}

// plainFiles are the files of a backup without encryption, besides the manifest, in the directory path.
func plainFiles(path string) []plan.File {
	return []plan.File{
		{Path: filepath.Join(path, backup.Releases+".json"), Mode: "0600", Secret: true, Note: "Helm's records, with the values of charts"},
		{Path: filepath.Join(path, "core", "secrets.json"), Mode: "0600", Secret: true, Note: "the Secrets of the cluster"},
		{Path: filepath.Join(path, backup.SnapshotFile), Mode: "0600", Secret: true, Note: "a snapshot of etcd, Secrets included"},
	}
}

// leadsTo reports whether the workspace's kubeconfig has this server.
func (e *Engine) leadsTo(server string) bool {
	own, err := e.ws.Kubeconfig()
	if err != nil {
		return false
	}
	_, at, err := workspace.KubeconfigServer(own)
	return err == nil && at.Value == server
}

// accessFlags are the arguments that select a context again, with a leading space each. The path
// of a kubeconfig becomes absolute.
func accessFlags(a cluster.Access, name string) string {
	var b strings.Builder
	add := func(flag, value string) {
		if value != "" {
			b.WriteString(" --" + flag + " " + check.ShellQuote(value))
		}
	}
	if path, err := filepath.Abs(a.Kubeconfig); err == nil && a.Kubeconfig != "" {
		a.Kubeconfig = path
	}
	add("kubeconfig", a.Kubeconfig)
	add("context", name)
	add("cluster", a.ClusterName)
	add("user", a.User)
	add("as", a.As)
	add("as-uid", a.AsUID)
	for _, g := range a.AsGroups {
		add("as-group", g)
	}
	if a.RequestTimeout > 0 {
		add("request-timeout", a.RequestTimeout.String())
	}
	return b.String()
}

// flags are the arguments that make the same request, with a leading space each.
func (r BackupRequest) flags() string {
	var b strings.Builder
	if s := r.Cluster; s != nil {
		b.WriteString(accessFlags(s.Access, s.Context))
	}
	if r.Dir != "" {
		b.WriteString(" --dir " + check.ShellQuote(r.Dir))
	}
	if r.Etcd != EtcdAuto {
		b.WriteString(" --etcd=" + r.Etcd)
	}
	if r.Secrets {
		b.WriteString(" --secrets")
	}
	return b.String()
}

// abort removes a backup that was not committed.
func (b *backupRun) abort() {
	if b.w == nil {
		return
	}
	if err := b.w.Abort(); err != nil {
		b.e.log.Warn("unfinished backup not removed", "id", b.id, "err", err)
	}
	b.w = nil
}

func (b *backupRun) fail(err error) error {
	var have *plan.Error
	if errors.As(err, &have) || errors.Is(err, context.Canceled) {
		return err
	}
	e := &plan.Error{Op: "back up to " + filepath.Join(b.dir, b.id), Err: err}
	switch {
	case errors.Is(err, backup.ErrRefused):
		e.Exit, e.Remedy = plan.ExitUsage, "a backup may hold secrets: restrict the directory to your user (chmod 0700), or use another one with --dir"
	case errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT):
		e.Remedy = "free some space (`constellation backup prune --keep 1" + BackupRequest{Dir: b.request.Dir}.flags() + "` removes old backups), or use another disk with --dir; nothing is left of this one"
	case errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) || errors.Is(err, fs.ErrNotExist):
		e.Exit, e.Remedy = plan.ExitUsage, "make the directory, and writable for this user, or use another one with --dir"
	case errors.Is(err, cluster.ErrUnreachable):
		e.Op, e.Remedy = "read the cluster", "bring its API server up, then run the same command again"
	case errors.Is(err, cluster.ErrDenied):
		e.Op, e.Remedy = "read the cluster", "see that "+workspace.KubeconfigFile+" is of this cluster"
		if s := b.request.Cluster; s != nil {
			e.Remedy = fmt.Sprintf("use a user who may list the objects of the cluster; context %q does not", s.Context)
		}
	}
	return e
}

// begin is the first step of a backup that no other step precedes. It fails at once if the API
// server does not answer; later in a run, resources waits for it.
func (b *backupRun) begin(ctx context.Context, r *plan.Reporter) error {
	_, err := b.cluster.Version(ctx)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, cluster.ErrUnreachable) || errors.Is(err, cluster.ErrDenied):
		return b.fail(err)
	}
	// Another error may concern the path /version alone.
	if s := b.request.Cluster; s != nil {
		if s.Note != "" {
			r.Log("backup", "", "warn", s.Note)
		}
		if err := b.otherCluster(ctx); err != nil {
			return err
		}
	}
	return b.resources(ctx, r)
}

// otherCluster returns an error if the folder of a context has backups of another cluster. Contexts
// of two kubeconfigs can have one name.
func (b *backupRun) otherCluster(ctx context.Context) error {
	all, err := b.e.ListBackups(ctx, b.request.Dir, false, nil)
	if err != nil || len(all) == 0 {
		return nil //nolint:nilerr // a folder that cannot be read fails when the backup is written
	}
	limited, cancel := context.WithTimeout(ctx, b.e.limits.glance)
	defer cancel()
	uid, err := b.cluster.ClusterUID(limited)
	if err != nil || uid == "" {
		return nil //nolint:nilerr // a user may not be allowed to read it
	}
	for _, x := range all {
		m, path, err := b.e.ShowBackup(b.request.Dir, x.ID)
		if err != nil || m.Cluster.UID == "" || m.Cluster.UID == uid {
			continue
		}
		return &plan.Error{
			Op: "back up context " + strconv.Quote(b.name), Exit: plan.ExitUsage, Err: fmt.Errorf("%s is a backup of another cluster", path),
			Remedy: "name another folder with --dir",
		}
	}
	return nil
}

func (b *backupRun) resources(ctx context.Context, r *plan.Reporter) (err error) {
	if b.w, err = backup.Create(b.dir, b.id); err != nil {
		return b.fail(err)
	}
	if err := b.encrypt(r); err != nil {
		return err
	}
	b.authenticate(r)
	m := newMeter(b.e.now)
	err = b.cluster.Dump(ctx, b.w, DumpOptions{Secrets: b.request.Secrets}, func(p BackupProgress) {
		if ev, ok := m.event(p, false); ok {
			r.Send(ev)
		}
	})
	if err != nil {
		return b.fail(err)
	}
	if ev, ok := m.event(m.last, true); ok {
		r.Send(ev)
	}
	for _, h := range b.w.Holes() {
		r.Log("backup", "", "error", "missing: "+h.String())
	}
	return nil
}

// authenticate has the backup authenticated, if the workspace has the cluster's master secret. A file that cannot be
// read must not keep anybody from making a backup.
func (b *backupRun) authenticate(r *plan.Reporter) {
	if !b.own {
		if b.e.ws.Has(workspace.MasterSecretFile) {
			r.Log("backup", "", "warn", "the backup is neither authenticated nor encrypted: "+b.name+" is not the cluster of this workspace")
		}
		return
	}
	switch m, err := b.e.ws.MasterSecret(); {
	case errors.Is(err, fs.ErrNotExist):
		r.Log("backup", "", "info", "the backup is not authenticated: the workspace has no "+workspace.MasterSecretFile)
	case err != nil:
		r.Log("backup", "", "warn", "the backup is not authenticated: "+err.Error())
	default:
		b.w.Authenticate(m.BackupSecret())
	}
}

// recipientsRE matches a configuration that names recipients anywhere outside of comments.
var recipientsRE = regexp.MustCompile(`(?m)^[^#\n]*\brecipients\b`)

// encrypt has the backup encrypted to the recipients of the configuration. An invalid configuration must not prevent a
// backup, unless it mentions recipients: their key may be misspelled or in a wrong place.
func (b *backupRun) encrypt(r *plan.Reporter) error {
	if !b.own {
		return nil
	}
	c, err := workspace.PartOfConfig(b.e.ws, "backup")
	if err != nil || len(c.Backup.Recipients) == 0 {
		raw, rerr := b.e.ws.ReadConfig()
		switch {
		case errors.Is(rerr, fs.ErrNotExist):
			return nil
		case rerr == nil && !recipientsRE.Match(raw):
			if err != nil {
				r.Log("backup", "", "warn", "the backup is not encrypted: "+workspace.ConfigFile+" cannot be read, and names no recipients")
			}
			return nil
		case err == nil: // an empty list is valid
			_, err = b.e.ws.Config()
		}
		if err == nil {
			return nil
		}
		return &plan.Error{Op: "encrypt the backup", Err: err, Exit: plan.ExitUsage, Remedy: "mend backup.recipients of " + workspace.ConfigFile}
	}
	if err := b.w.Encrypt(c.Backup.Recipients); err != nil {
		return &plan.Error{Op: "encrypt the backup", Err: err, Exit: plan.ExitUsage, Remedy: "mend backup.recipients of " + workspace.ConfigFile}
	}
	return nil
}

// IdentityVariable names the environment variable with the path of the identity.
const IdentityVariable = "CONSTELLATION_BACKUP_IDENTITY"

// UseIdentity has later calls decrypt backups with the secret keys in a file of age-keygen. If path is empty, it is that
// of the environment, if that names one.
func (e *Engine) UseIdentity(path string) error {
	if path == "" {
		path = os.Getenv(IdentityVariable)
	}
	if path == "" {
		return nil
	}
	b, err := os.ReadFile(path)
	if err == nil {
		var list []backup.Identity
		if list, err = backup.ParseIdentities(b); err == nil {
			e.identities.Store(&list)
		}
	}
	if err != nil {
		return &plan.Error{Op: "read identity " + path, Err: workspace.WithoutPath(err), Exit: plan.ExitUsage, Remedy: "name a file with a secret key of age with --identity or " + IdentityVariable}
	}
	return nil
}

// locked returns an error if a backup is encrypted and no identity opens it.
func locked(b *backup.Backup) error {
	if err := b.Locked(); err != nil {
		return &plan.Error{Op: "read backup " + b.ID(), Err: err, Exit: plan.ExitUsage, Remedy: "name the file with the secret key of a recipient with --identity or " + IdentityVariable}
	}
	return nil
}

// DecryptBackup writes a backup without encryption to a folder of its ID in dir to, and returns the path of its files.
// progress may be nil.
func (e *Engine) DecryptBackup(ctx context.Context, dir, id, to string, progress func(done, total int64)) (path string, err error) {
	b, err := e.OpenBackup(dir, id)
	if err != nil {
		return "", err
	}
	defer b.Close()
	if err := locked(b); err != nil {
		return "", err
	}
	if b.Manifest().Encrypted == nil {
		return "", &plan.Error{Op: "decrypt backup " + id, Err: errors.New("it is not encrypted"), Exit: plan.ExitUsage, Remedy: "its files are in " + b.Path()}
	}
	var broken *backup.NotWhole
	if err := b.Verify(ctx, nil); err != nil && (!errors.As(err, &broken) || len(broken.Damage) > 0) {
		return "", backupError("verify backup "+id, err)
	}
	path, err = b.Decrypt(ctx, to, progress)
	if errors.Is(err, fs.ErrExist) {
		return "", &plan.Error{
			Op: "decrypt backup " + id, Err: fmt.Errorf("%s exists", filepath.Join(to, id, backup.Dir)), Exit: plan.ExitUsage,
			Remedy: "name another directory with --to, or delete this one if it is an earlier copy",
		}
	}
	if err != nil {
		return "", (&backupRun{e: e, dir: to, id: id, request: BackupRequest{Dir: to}}).fail(err)
	}
	return path, nil
}

// backupKeys are the keys that the workspace has for reading backups. Without a readable master secret no backup
// is authenticated.
func (e *Engine) backupKeys() (k backup.Keys) {
	if m, err := e.ws.MasterSecret(); err == nil {
		k.Secret = m.BackupSecret()
	}
	if list := e.identities.Load(); list != nil {
		k.Identities = *list
	}
	return k
}

func (b *backupRun) finish(ctx context.Context, r *plan.Reporter) error {
	m, err := b.w.Commit(backup.Manifest{Secrets: b.request.Secrets, Cluster: backup.Cluster{Name: b.name, ID: b.clusterID}})
	if err != nil {
		return b.fail(err)
	}
	b.done, b.w = m, nil
	said := b.e.now()
	_, err = b.e.verify(ctx, b.dir, b.id, func(done, total int64) {
		if now := b.e.now(); now.Sub(said) >= progressEvery {
			said = now
			r.Progress(done, total, "bytes verified")
		}
	})
	r.Counts(m.Objects, m.Objects, map[string]int64{"objects": m.Objects, "bytes": m.Bytes, "types": int64(len(m.Types)), "files": int64(len(m.Files)), "holes": int64(len(m.Holes))})
	return err
}

// progressEvery is the interval of progress events, which are recorded, too.
const progressEvery = 500 * time.Millisecond

// meter makes events of progress, with rate and time left.
type meter struct {
	now   func() time.Time
	begun time.Time
	said  time.Time
	past  []sample // the last few seconds
	last  BackupProgress
	total int64
}

type sample struct {
	at             time.Time
	objects, bytes int64
}

func newMeter(now func() time.Time) *meter { t := now(); return &meter{now: now, begun: t, said: t} }

// event returns the event of p, if it is time for one.
func (m *meter) event(p BackupProgress, last bool) (plan.Event, bool) {
	m.last = p
	now := m.now()
	if !last && now.Sub(m.said) < progressEvery {
		return plan.Event{}, false
	}
	m.said = now
	if len(m.past) == 0 {
		m.past = append(m.past, sample{at: m.begun})
	}
	m.past = append(m.past, sample{now, p.Objects, p.Bytes})
	for len(m.past) > 2 && now.Sub(m.past[0].at) > 5*time.Second {
		m.past = m.past[1:]
	}
	m.total = max(m.total, p.AllObjects, p.Objects)
	if last {
		m.total, m.past = p.Objects, []sample{{at: m.begun}, {now, p.Objects, p.Bytes}}
	}
	old := m.past[0]
	seconds := max(now.Sub(old.at).Seconds(), 1e-3)
	rate, objects := float64(p.Bytes-old.bytes)/seconds, float64(p.Objects-old.objects)/seconds
	counts := map[string]int64{
		"types": p.Types, "all_types": p.AllTypes, "objects": p.Objects, "bytes": p.Bytes, "bytes_per_second": max(0, int64(rate)),
	}
	text := fmt.Sprintf("%d of %d types, %d", p.Types, p.AllTypes, p.Objects)
	if p.AllObjects > 0 && !last {
		text += fmt.Sprintf(" of %d", m.total)
	}
	text += fmt.Sprintf(" objects, %s, %s/s", workspace.SizeOf(p.Bytes), workspace.SizeOf(max(0, int64(rate))))
	if left := m.total - p.Objects; !last && p.AllObjects > 0 && left >= 0 && objects > 0 {
		s := int64(float64(left)/objects + 0.5)
		counts["seconds_left"] = s
		text += fmt.Sprintf(", %s left", time.Duration(s)*time.Second)
	}
	total := m.total
	if p.AllObjects == 0 && !last {
		total = 0
	}
	return plan.Event{Kind: plan.KindProgress, Current: p.Objects, Total: total, Counts: counts, Text: text}, true
}

// ListBackups returns the backups in dir, newest first; an empty dir means that of the
// workspace's runs. With verify each is read completely, else judged by names and sizes.
// progress, which may be nil, receives the backup being read and its progress.
func (e *Engine) ListBackups(ctx context.Context, dir string, verify bool, progress func(id string, done, total int64)) ([]BackupEntry, error) {
	path, err := e.BackupDir(dir)
	if err != nil {
		return nil, err
	}
	if _, err := os.Lstat(path); dir != "" && err != nil {
		return nil, &plan.Error{Op: "list backups in " + path, Err: workspace.WithoutPath(err), Exit: plan.ExitUsage, Remedy: "name the directory that `backup create --dir` was given"}
	}
	var out []BackupEntry
	if verify {
		out, err = backup.ListVerified(ctx, path, e.backupKeys(), progress)
	} else {
		out, err = backup.List(path, e.backupKeys())
	}
	if err != nil {
		return nil, backupError("list backups in "+path, err)
	}
	return out, nil
}

// OpenBackup opens a backup in dir; an empty dir means that of the workspace's runs. The
// caller closes it. The error has ExitUsage if there is none of this ID.
func (e *Engine) OpenBackup(dir, id string) (*backup.Backup, error) {
	path, err := e.BackupDir(dir)
	if err != nil {
		return nil, err
	}
	return e.openBackup(path, id)
}

func (e *Engine) openBackup(dir, id string) (*backup.Backup, error) {
	if !backup.ValidID(id) {
		return nil, &plan.Error{Op: "open backup " + id, Err: errors.New("invalid ID of a backup"), Exit: plan.ExitUsage, Remedy: "`constellation backup list` lists the existing backups"}
	}
	b, err := backup.Open(dir, id, e.backupKeys())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &plan.Error{Op: "open backup " + id, Err: fmt.Errorf("there is none in %s", dir), Exit: plan.ExitUsage, Remedy: "`constellation backup list` lists the existing backups; --dir selects another directory"}
	}
	if err != nil {
		return nil, backupError("open backup "+id, err)
	}
	return b, nil
}

// backupError gives an error of package backup what the user can do.
func backupError(op string, err error) error {
	var n *backup.NotWhole
	switch {
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.As(err, &n):
		remedy := "use another backup: `constellation backup list` shows which are complete"
		if len(n.Damage) == 0 {
			remedy = "the named types were not readable when the backup was made; repair them, then run `constellation backup create` again"
		}
		return &plan.Error{Err: err, Remedy: remedy}
	case errors.Is(err, backup.ErrRefused):
		return &plan.Error{Op: op, Err: err, Exit: plan.ExitUsage, Remedy: "other users could have changed it: if you trust its content, take ownership and remove write access of others (chown, chmod go-w)"}
	}
	return &plan.Error{Op: op, Err: err}
}

// ShowBackup returns what a backup holds, as its manifest says, and the directory that it
// is in. Nothing else of it is read.
func (e *Engine) ShowBackup(dir, id string) (m BackupManifest, path string, err error) {
	b, err := e.OpenBackup(dir, id)
	if err != nil {
		return BackupManifest{}, "", err
	}
	defer b.Close()
	return b.Manifest(), b.Path(), nil
}

// What the tag of a backup proves.
const (
	BackupAuthenticated   = backup.Authenticated   // made with the master secret of the workspace
	BackupForeign         = backup.Foreign         // made with another one
	BackupUnauthenticated = backup.Unauthenticated // it has no tag
)

// BackupVerification is what the verification of a backup found beside its completeness.
type BackupVerification struct {
	// Authentication is one of the constants above; empty if the backup is damaged.
	Authentication string
	// Recipients are those to whom it is encrypted; empty if it is not.
	Recipients []string
	// Locked is whether only the encrypted bytes were verified, for want of an identity.
	Locked bool
}

// VerifyBackup reads all of a backup and returns nil if it is whole. The error says
// everything that is wrong; a *backup.NotWhole is inside it. progress may be nil.
func (e *Engine) VerifyBackup(ctx context.Context, dir, id string, progress func(done, total int64)) (BackupVerification, error) {
	path, err := e.BackupDir(dir)
	if err != nil {
		return BackupVerification{}, err
	}
	return e.verify(ctx, path, id, progress)
}

func (e *Engine) verify(ctx context.Context, dir, id string, progress func(done, total int64)) (v BackupVerification, err error) {
	b, err := e.openBackup(dir, id)
	if err != nil {
		return v, err
	}
	defer b.Close()
	err = b.Verify(ctx, progress)
	var broken *backup.NotWhole
	if err == nil || errors.As(err, &broken) && len(broken.Damage) == 0 {
		v.Authentication, v.Locked = b.Authentication(), b.Locked() != nil
		if x := b.Manifest().Encrypted; x != nil {
			v.Recipients = x.Recipients
		}
	}
	if err != nil {
		return v, backupError("verify backup "+id, err)
	}
	return v, nil
}

// BackupProblems returns what is wrong with a backup, as sentences, if err says that it is
// not whole.
func BackupProblems(err error) []string {
	var n *backup.NotWhole
	if !errors.As(err, &n) {
		return nil
	}
	out := append([]string(nil), n.Damage...)
	for _, h := range n.Holes {
		out = append(out, "missing: "+h.String())
	}
	return out
}

// PruneBackups removes backups but for the newest keep whole ones, and returns the IDs of
// those that it removed. The error has ExitNothing if there is nothing to remove, and
// ExitHeld while a run holds the workspace.
func (e *Engine) PruneBackups(_ context.Context, dir string, keep int) (removed []string, err error) {
	if keep < 1 {
		return nil, &plan.Error{Op: "prune backups", Err: fmt.Errorf("--keep is %d, want at least 1: the newest complete backup always stays", keep), Exit: plan.ExitUsage, Remedy: "keep at least one"}
	}
	path, err := e.BackupDir(dir)
	if err != nil {
		return nil, err
	}
	unlock, err := e.ws.Lock("backup prune", e.now())
	if err != nil {
		return nil, err
	}
	defer unlock()
	removed, err = backup.Prune(path, keep, e.backupKeys())
	if err != nil {
		return removed, backupError("prune backups in "+path, err)
	}
	if len(removed) == 0 {
		return nil, &plan.Error{Err: fmt.Errorf("nothing to prune: at most %d complete backups exist, and no unfinished one is older", keep), Exit: plan.ExitNothing}
	}
	return removed, nil
}
