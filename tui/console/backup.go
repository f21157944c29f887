package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/tui/term"
	"constellation/tui/view"
)

// backupScreen shows what backups contain, lists them, and creates one. Its text comes
// unfiltered from outside; rendering cleans it.
type backupScreen struct {
	defaults
	c    *console
	from screen // where Esc leads

	view.Backups
	gen int // generation of the last request

	sel  int
	open bool // the volume list fills the screen
	at   int  // first volume shown
	etcd string

	// t is the run of the current or last backup, which started at began.
	t        view.Timeline
	running  bool
	stopping bool
	began    time.Time
	ended    bool
	err      error

	// verifying is the ID of the backup being verified; verified are the results by ID.
	verifying   string
	done, total int64
	verified    map[string]verifiedBackup
}

func (scr *backupScreen) title() string  { return "backup" }
func (scr *backupScreen) mode() string   { return view.BackupMode(scr.c.page()) }
func (scr *backupScreen) safety() string { return "scripted  " + scr.command() }

// Messages of the backup screen.
type (
	backupsListed struct {
		gen     int
		entries []engine.BackupEntry
		err     error
	}
	localDataRead struct {
		gen   int
		local cluster.LocalData
		err   error
	}
	backupPlanned struct {
		plan *plan.Plan
		err  error
	}
	backupEnded    struct{ err error }
	verifyAdvanced struct {
		id          string
		done, total int64
	}
	verifyEnded struct {
		id string
		verifiedBackup
	}
)

// verifiedBackup is the result of a verification.
type verifiedBackup struct {
	found engine.BackupVerification
	err   error
}

// busyReason disables a key while a task runs.
func (scr *backupScreen) busyReason() string {
	switch {
	case scr.running:
		return "a backup is running"
	case scr.verifying != "":
		return "a backup is being verified"
	case scr.c.task.busy != "":
		return "the console is " + scr.c.task.busy
	}
	return ""
}

func (scr *backupScreen) keys() []binding {
	return []binding{
		on("b", "b", "create a backup now", "do", scr.start).footed("back up now").effects().unless(scr.busyReason),
		on("e", "e", "etcd snapshot: if available, required, never", "do", act(scr.nextEtcd)).footed("etcd").unless(scr.busyReason),
		on("v", "v", "verify the selected backup", "do", scr.verify).footed("verify").unless(func() string {
			if len(scr.Entries) == 0 {
				return "there is no backup yet"
			}
			return scr.busyReason()
		}),
		on("enter", "Enter", "list the volumes that are in no backup", "view", act(func() { scr.open, scr.at = true, 0 })).footed("volumes").unless(func() string {
			if scr.Local == nil || len(scr.Local.Volumes) == 0 {
				return "there are no local volumes to list"
			}
			return ""
		}),
		on("up k", "↑ k", "up", "move", act(func() { scr.move(-1) })),
		on("down j", "↓ j", "down", "move", act(func() { scr.move(1) })),
		on("r", "r", "refresh", "do", scr.read).unless(scr.busyReason),
		on("esc", "Esc", "back; stops a running backup and deletes its files", "leave", scr.leave).footed("back"),
		on("y", "y", "copy the restore command of the selected backup", "copy", act(func() {
			scr.c.copyText(scr.c.deps.Commands.Command("backup restore "+view.QuoteArg(scr.chosen().ID)), "the restore command")
		})).footed("copy restore").unless(scr.restoreOff),
	}
}

// restoreOff returns why the selected backup cannot be restored.
func (scr *backupScreen) restoreOff() string {
	b := scr.chosen()
	switch {
	case b == nil:
		return "there is no backup yet"
	case !b.Complete:
		return "this backup is incomplete: " + cmp.Or(term.Clean(b.Why), "something is missing")
	case scr.verified[b.ID].err != nil:
		return "this backup failed its verification"
	}
	return ""
}

// read queries workspace and cluster. Until they answer, the old data stays on screen.
func (scr *backupScreen) read() tea.Cmd {
	scr.gen++
	gen, eng := scr.gen, scr.c.deps.Engine
	return tea.Batch(
		func() tea.Msg {
			l, err := eng.ListBackups(scr.c.ctx, "", false, nil)
			return backupsListed{gen, l, err}
		},
		func() tea.Msg {
			ctx, cancel := context.WithTimeout(scr.c.ctx, staleAfter)
			defer cancel()
			d, err := eng.LocalData(ctx)
			return localDataRead{gen, d, err}
		},
	)
}

// take handles the messages of the screen; it reports whether msg is one.
func (scr *backupScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	b := scr
	switch msg := msg.(type) {
	case backupsListed:
		if msg.gen == b.gen {
			b.Listed, b.Entries, b.ListErr = true, msg.entries, msg.err
			b.sel = max(0, min(b.sel, len(b.Entries)-1))
		}
	case localDataRead:
		if msg.gen != b.gen {
			break
		}
		if b.LocalErr = msg.err; msg.err == nil {
			b.Local = &msg.local
		}
	case backupPlanned:
		if msg.err != nil {
			b.running, b.ended, b.err = false, true, msg.err
			break
		}
		b.t.SetPlan(msg.plan)
		b.t.Run = term.Clean(msg.plan.ID)
		p := msg.plan
		return scr.c.task.launch("creating a backup", scr.takeEvents, func(ctx context.Context, emit func(plan.Event)) tea.Msg {
			return backupEnded{scr.c.deps.Engine.Run(ctx, p, emit)}
		}), true
	case backupEnded:
		return scr.tookBackupEnd(msg.err), true
	case verifyAdvanced:
		if msg.id == b.verifying {
			b.done, b.total = msg.done, msg.total
		}
	case verifyEnded:
		if b.verified == nil {
			b.verified = map[string]verifiedBackup{}
		}
		b.verifying = ""
		if !errors.Is(msg.err, context.Canceled) { // a cancelled verification has no result
			b.verified[msg.id] = msg.verifiedBackup
		}
		return scr.read(), true
	default:
		return nil, false
	}
	return nil, true
}

// takeEvents takes events of the backup.
func (scr *backupScreen) takeEvents(events []plan.Event) tea.Cmd {
	for _, ev := range events {
		scr.t.Apply(ev)
	}
	return nil
}

// start plans and runs a backup.
func (scr *backupScreen) start() tea.Cmd {
	b := scr
	if scr.c.guard.stops() {
		return nil
	}
	b.t, b.began, b.err = view.Timeline{}, scr.c.now, nil
	b.running, b.ended, b.stopping, b.open = true, false, false, false
	scr.c.running = true
	scr.c.check.busy = false // launch cancels a running check
	r := engine.BackupRequest{Etcd: b.etcd}
	return scr.c.task.launch("planning the backup", nil, func(ctx context.Context, _ func(plan.Event)) tea.Msg {
		p, err := scr.c.deps.Engine.PlanBackup(ctx, r)
		if err == nil {
			err = ctx.Err()
		}
		return backupPlanned{p, err}
	})
}

func (scr *backupScreen) tookBackupEnd(err error) tea.Cmd {
	b := scr
	scr.c.running, scr.c.quit.asking = false, false
	b.running, b.ended, b.err = false, true, err
	if scr.c.quit.pending {
		if !scr.c.quit.exitSet {
			scr.c.quit.exit = plan.ExitCode(err)
		}
		return tea.Quit
	}
	b.sel = 0
	// The home screen shows its age.
	return tea.Batch(scr.read(), scr.c.overview.read())
}

// leave stops a running backup or verification, or goes back.
func (scr *backupScreen) leave() tea.Cmd {
	b := scr
	switch {
	case b.running:
		b.stopping = true
		scr.c.task.stop()
		return nil
	case b.verifying != "":
		scr.c.task.stop()
		return nil
	case b.open:
		b.open = false
		return nil
	case b.from == scr.c.check:
		return scr.c.check.show()
	}
	return scr.c.overview.show()
}

// verify verifies the selected backup.
func (scr *backupScreen) verify() tea.Cmd {
	e := scr.chosen()
	if e == nil {
		return nil
	}
	id, send := e.ID, scr.c.deps.send
	scr.verifying, scr.done, scr.total, scr.ended = id, 0, 0, false
	var last time.Time
	return scr.c.task.launch("verifying a backup", nil, func(ctx context.Context, _ func(plan.Event)) tea.Msg {
		found, err := scr.c.deps.Engine.VerifyBackup(ctx, "", id, func(done, total int64) {
			if now := time.Now(); now.Sub(last) >= spinGap {
				last = now
				send(verifyAdvanced{id, done, total})
			}
		})
		return verifyEnded{id, verifiedBackup{found, err}}
	})
}

func (scr *backupScreen) nextEtcd() {
	all := []string{engine.EtcdAuto, engine.EtcdRequired, engine.EtcdSkip}
	scr.etcd = all[(slices.Index(all, scr.etcd)+1)%len(all)]
}

func (scr *backupScreen) chosen() *engine.BackupEntry {
	if scr.sel >= len(scr.Entries) {
		return nil
	}
	return &scr.Entries[scr.sel]
}

func (scr *backupScreen) move(by int) {
	if scr.open {
		scr.at = max(0, min(scr.at+by, len(scr.Local.Volumes)-1))
		return
	}
	scr.sel = max(0, min(scr.sel+by, len(scr.Entries)-1))
}

// view renders the screen in h lines.
func (scr *backupScreen) view(w, h int) []string {
	b := scr
	if b.open && b.Local != nil {
		return view.VolumesView(scr.c.page(), w, h, b.Local.Volumes, b.at)
	}
	title := scr.c.th.Rule(w, "Contents of a backup", "")
	lines := []string{title}
	loses := "Upgrades can delete custom resources, CRDs, and the disks of replaced nodes."
	if scr.c.deps.Machines != nil {
		loses = "Upgrades can delete custom resources and CRDs. Nodes are upgraded in place: their disks stay."
	}
	for _, l := range term.Wrap(loses, w-2) {
		lines = append(lines, scr.c.th.Row(w).Add(term.Plain, " ").Add(term.Plain, l).String())
	}
	kept := view.BackupCoverageRows(scr.c.page(), w, h, &b.Backups, ": press b")
	lines = append(lines, kept...)
	var below []string
	switch {
	case b.running:
		below = view.BackupProgress(scr.c.page(), w, &b.t, b.began)
	case b.verifying != "":
		below = []string{
			scr.c.th.Rule(w, "Verify", term.Clean(b.verifying)),
			scr.c.th.Row(w).Add(term.Plain, " ").Add(term.Accent, scr.c.th.Spin(scr.c.frame)+" ").Add(term.Accent, scr.c.th.Meter(b.done, b.total, min(30, w/3))).
				Add(term.Plain, " "+term.Bytes(b.done)+" of "+term.Bytes(b.total)).String(),
		}
	case b.ended:
		below = scr.backupOutcome(w)
	}
	// In a small window the list of backups, which has the cursor, comes first.
	if list := min(1+max(1, len(b.Entries)), 5); !b.running && len(below) <= h/3 && len(lines)+list+len(below) > h {
		lines = append([]string{title}, kept...)
		lines = lines[:min(len(lines), max(1, h-list-len(below)))]
	}
	room := h - len(lines) - len(below)
	lines = append(lines, scr.backupRows(w, room)...)
	for len(lines)+len(below) < h {
		lines = append(lines, "")
	}
	if over := len(lines) + len(below) - h; over > 0 {
		lines = lines[:max(0, len(lines)-over)]
	}
	return append(lines, below...)
}

// backupRows lists the backups in at most h lines.
func (scr *backupScreen) backupRows(w, h int) []string {
	b := scr
	if h < 2 {
		return nil
	}
	remark := map[string]string{
		engine.EtcdAuto: "next backup: etcd if available", engine.EtcdRequired: "next backup: etcd required", engine.EtcdSkip: "next backup: without etcd",
	}[b.etcd]
	lines := []string{scr.c.th.Rule(w, fmt.Sprintf("Backups %d", len(b.Entries)), remark)}
	switch {
	case b.ListErr != nil:
		x := view.Explain(b.ListErr, scr.c.deps.Commands)
		lines = append(lines, scr.c.th.Row(w).Add(term.Plain, " ").Add(term.Bad, scr.c.th.Fail+" ").Add(term.Plain, x.What).String())
		lines = append(lines, scr.c.th.Below(w, 3, 2, term.Faint, x.Why)...)
		lines = append(lines, scr.c.th.Below(w, 3, 3, term.Accent, x.Remedy)...)
		return lines[:min(len(lines), h)]
	case !b.Listed:
		return lines
	case len(b.Entries) == 0:
		return append(lines, scr.c.th.Row(w).Add(term.Faint, "   none yet: b creates one in "+plan.RunsDir).String())
	}
	from, to := view.Window(len(b.Entries), b.sel, h-1)
	for i, e := range b.Entries[from:to] {
		sign, st, text := scr.c.th.OK, term.Good, ""
		if !e.Complete {
			sign, st, text = scr.c.th.Fail, term.Bad, term.Clean(e.Why)
		}
		switch v, ok := b.verified[e.ID]; {
		case ok && v.err == nil && v.found.Authentication == engine.BackupAuthenticated:
			text = "verified, authenticated"
		case ok && v.err == nil:
			sign, st, text = scr.c.th.Warn, term.Caution, "verified; "+view.Authentication(v.found.Authentication)
		case ok:
			sign, st, text = scr.c.th.Fail, term.Bad, term.Clean(v.err.Error())
			if p := engine.BackupProblems(v.err); len(p) > 0 {
				text = term.Clean(p[0])
			}
		}
		name := term.Plain
		if from+i == b.sel {
			name = term.Strong
		}
		etcd := ""
		if e.Etcd {
			etcd = "etcd"
		}
		r := scr.c.th.Row(w).Add(term.Accent, view.Marker(scr.c.page(), from+i == b.sel)).Add(st, sign).Add(term.Plain, " ").Col(name, term.Clean(e.ID), 31)
		r.Num(term.Faint, term.Ago(e.Created, scr.c.now), 8).Num(term.Plain, view.Thousands(e.Objects), 10)
		if w >= 70 { // a cut number would be wrong
			r.Num(term.Plain, term.Bytes(e.Bytes), 9).Pad(1).Col(term.Faint, etcd, 4)
		}
		var below []string // the text, if it is too long for the row
		if r.Fits(text) {
			r.Add(term.Faint, text)
		} else if from+i == b.sel {
			below = scr.c.th.Below(w, 4, 2, term.Faint, text)
		}
		lines = append(append(lines, r.String()), below...)
	}
	return lines[:min(len(lines), h)]
}

// backupOutcome renders the result of the last backup.
func (scr *backupScreen) backupOutcome(w int) []string {
	b := scr
	if b.err == nil {
		lines := []string{scr.c.th.Rule(w, "Done", term.Clock(b.t.Last.Sub(b.t.Started)))}
		text := "the backup is complete"
		if b.t.Result != nil && b.t.Result.Text != "" {
			text = b.t.Result.Text
		}
		lines = append(lines, scr.c.th.Row(w).Add(term.Plain, " ").Add(term.Good, scr.c.th.OK+" ").Add(term.Plain, text).String())
		for i := range b.t.Log.Len() {
			if l := b.t.Log.At(i); l.Level == "warn" || l.Level == "error" {
				lines = append(lines, scr.c.th.Below(w, 3, 2, term.Caution, l.Text)...)
			}
		}
		return lines
	}
	if plan.ExitCode(b.err) == plan.ExitStopped {
		return []string{scr.c.th.Rule(w, "Stopped", ""), scr.c.th.Row(w).Add(term.Plain, " ").Add(term.Caution, scr.c.th.Stopped+" ").Add(term.Plain, "the backup was stopped; its files were deleted").String()}
	}
	return view.ProblemWithin(scr.c.page(), w, 3, "`"+scr.command()+"` shows them", b.err)
}

// why is the line above the keys.
func (scr *backupScreen) why() []string {
	b := scr
	text := ""
	switch {
	case b.stopping && b.running, scr.c.quit.pending:
		text = "Stopping; the partial backup is deleted."
	case b.running && b.t.Why.Text != "":
		text = "Why waiting (" + term.Duration(scr.c.now.Sub(b.t.Why.Since)) + "): " + b.t.Why.Text
	}
	if text == "" {
		return nil
	}
	return scr.c.th.Below(scr.c.w, 1, 2, term.Strong, text)
}

// command is the command line that creates the same backup as the key b.
func (scr *backupScreen) command() string {
	verb := "backup create"
	if scr.etcd != engine.EtcdAuto {
		verb += " --etcd=" + scr.etcd
	}
	return scr.c.deps.Commands.Command(verb)
}

// show shows the screen and lists backups and volumes.
func (scr *backupScreen) show() tea.Cmd {
	from := scr.c.screen
	if from != scr.c.check {
		from = scr.c.overview
	}
	scr.c.screen = scr.c.backup
	scr.from, scr.open = from, false
	if scr.running {
		return nil
	}
	scr.ended = false
	return scr.read()
}
