package tui

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/tui/term"
	"constellation/tui/view"
)

// backupScreen shows what backups contain, lists them, and creates one. Its text comes
// unfiltered from outside; rendering cleans it.
type backupScreen struct {
	c *console
	from screenID // where Esc leads

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
	verified    map[string]error
}

// Messages of the backup screen.
type (
	backupsListed struct {
		gen     int
		entries []engine.BackupEntry
		err     error
	}
	localDataRead struct {
		gen   int
		local engine.LocalData
		err   error
	}
	backupPlanned struct {
		plan *engine.Plan
		err  error
	}
	backupEnded    struct{ err error }
	verifyAdvanced struct {
		id          string
		done, total int64
	}
	verifyEnded struct {
		id  string
		err error
	}
)

// busyReason disables a key while a task runs.
func (c *console) busyReason() string {
	switch {
	case c.bak.running:
		return "a backup is running"
	case c.bak.verifying != "":
		return "a backup is being verified"
	case c.busy != "":
		return "the console is " + c.busy
	}
	return ""
}

var backupKeys = []binding{
	on("b", "b", "create a backup now", "do", (*console).startBackup).footed("back up now").unless((*console).busyReason),
	on("e", "e", "etcd snapshot: if available, required, never", "do", act((*console).nextEtcd)).footed("etcd").unless((*console).busyReason),
	on("v", "v", "verify the selected backup", "do", (*console).verifyBackup).footed("verify").unless(func(c *console) string {
		if len(c.bak.Entries) == 0 {
			return "there is no backup yet"
		}
		return c.busyReason()
	}),
	on("enter", "Enter", "list the volumes that are in no backup", "view", act(func(c *console) { c.bak.open, c.bak.at = true, 0 })).footed("volumes").unless(func(c *console) string {
		if c.bak.Local == nil || len(c.bak.Local.Volumes) == 0 {
			return "there are no local volumes to list"
		}
		return ""
	}),
	on("up k", "↑ k", "up", "move", act(func(c *console) { c.moveBackup(-1) })),
	on("down j", "↓ j", "down", "move", act(func(c *console) { c.moveBackup(1) })),
	on("r", "r", "refresh", "do", (*console).readBackups).unless((*console).busyReason),
	on("esc", "Esc", "back; stops a running backup and deletes its files", "leave", (*console).leaveBackup).footed("back"),
	on("y", "y", "copy the restore command of the selected backup", "copy", act(func(c *console) {
		c.copyText(c.deps.commands.Command("backup restore "+view.QuoteArg(c.chosenBackup().ID)), "the restore command")
	})).footed("copy restore").unless((*console).restoreOff),
}

// restoreOff returns why the selected backup cannot be restored.
func (c *console) restoreOff() string {
	b := c.chosenBackup()
	switch {
	case b == nil:
		return "there is no backup yet"
	case !b.Whole:
		return "this backup is incomplete: " + cmp.Or(term.Clean(b.Why), "something is missing")
	case c.bak.verified[b.ID] != nil:
		return "this backup failed its verification"
	}
	return ""
}

// openBackup shows the screen and lists backups and volumes.
func (c *console) openBackup() tea.Cmd {
	from := c.screen
	if from != screenCheck {
		from = screenHome
	}
	c.screen = screenBackup
	c.bak.from, c.bak.open = from, false
	if c.bak.running {
		return nil
	}
	c.bak.ended = false
	return c.readBackups()
}

// readBackups queries workspace and cluster. Until they answer, the old data stays on screen.
func (c *console) readBackups() tea.Cmd {
	c.bak.gen++
	gen, eng := c.bak.gen, c.deps.engine
	return tea.Batch(
		func() tea.Msg {
			l, err := eng.ListBackups(c.ctx, "", false, nil)
			return backupsListed{gen, l, err}
		},
		func() tea.Msg {
			ctx, cancel := context.WithTimeout(c.ctx, staleAfter)
			defer cancel()
			d, err := eng.LocalData(ctx)
			return localDataRead{gen, d, err}
		},
	)
}

// takeBackup handles the messages of the screen; it reports whether msg is one.
func (c *console) takeBackup(msg tea.Msg) (tea.Cmd, bool) {
	b := c.bak
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
		plan := msg.plan
		return c.launch("creating a backup", func(ctx context.Context, emit func(engine.Event)) tea.Msg {
			return backupEnded{c.deps.engine.Run(ctx, plan, emit)}
		}), true
	case backupEnded:
		return c.tookBackupEnd(msg.err), true
	case verifyAdvanced:
		if msg.id == b.verifying {
			b.done, b.total = msg.done, msg.total
		}
	case verifyEnded:
		if b.verified == nil {
			b.verified = map[string]error{}
		}
		b.verifying = ""
		if !errors.Is(msg.err, context.Canceled) { // a cancelled verification has no result
			b.verified[msg.id] = msg.err
		}
		return c.readBackups(), true
	default:
		return nil, false
	}
	return nil, true
}

// startBackup plans and runs a backup.
func (c *console) startBackup() tea.Cmd {
	b := c.bak
	b.t, b.began, b.err = view.Timeline{}, c.now, nil
	b.running, b.ended, b.stopping, b.open = true, false, false, false
	c.running = true
	c.chk.busy = false // launch cancels a running check
	r := engine.BackupRequest{Etcd: b.etcd}
	return c.launch("planning the backup", func(ctx context.Context, _ func(engine.Event)) tea.Msg {
		p, err := c.deps.engine.PlanBackup(ctx, r)
		if err == nil {
			err = ctx.Err()
		}
		return backupPlanned{p, err}
	})
}

func (c *console) tookBackupEnd(err error) tea.Cmd {
	b := c.bak
	c.running, c.confirmLeave = false, false
	b.running, b.ended, b.err = false, true, err
	if c.leaving {
		if !c.hasExit {
			c.exit = engine.ExitCode(err)
		}
		return tea.Quit
	}
	b.sel = 0
	// The home screen shows its age.
	return tea.Batch(c.readBackups(), c.readHome())
}

// leaveBackup stops a running backup or verification, or goes back.
func (c *console) leaveBackup() tea.Cmd {
	b := c.bak
	switch {
	case b.running:
		b.stopping = true
		if c.cancel != nil {
			c.cancel()
		}
		return nil
	case b.verifying != "":
		if c.cancel != nil {
			c.cancel()
		}
		return nil
	case b.open:
		b.open = false
		return nil
	case b.from == screenCheck:
		return c.openCheck()
	}
	return c.goHome()
}

// verifyBackup verifies the selected backup.
func (c *console) verifyBackup() tea.Cmd {
	e := c.chosenBackup()
	if e == nil {
		return nil
	}
	id, send := e.ID, c.deps.send
	c.bak.verifying, c.bak.done, c.bak.total, c.bak.ended = id, 0, 0, false
	var last time.Time
	return c.launch("verifying a backup", func(ctx context.Context, _ func(engine.Event)) tea.Msg {
		err := c.deps.engine.VerifyBackup(ctx, "", id, func(done, total int64) {
			if now := time.Now(); now.Sub(last) >= spinGap {
				last = now
				send(verifyAdvanced{id, done, total})
			}
		})
		return verifyEnded{id, err}
	})
}

func (c *console) nextEtcd() {
	all := []string{engine.EtcdAuto, engine.EtcdTake, engine.EtcdLeave}
	c.bak.etcd = all[(slices.Index(all, c.bak.etcd)+1)%len(all)]
}

func (c *console) chosenBackup() *engine.BackupEntry {
	if c.bak.sel >= len(c.bak.Entries) {
		return nil
	}
	return &c.bak.Entries[c.bak.sel]
}

func (c *console) moveBackup(by int) {
	if c.bak.open {
		c.bak.at = max(0, min(c.bak.at+by, len(c.bak.Local.Volumes)-1))
		return
	}
	c.bak.sel = max(0, min(c.bak.sel+by, len(c.bak.Entries)-1))
}

// backupView renders the screen in h lines.
func (c *console) backupView(w, h int) []string {
	b := c.bak
	if b.open && b.Local != nil {
		return view.VolumesView(c.page(), w, h, b.Local.Volumes, b.at)
	}
	title := c.th.Rule(w, "What a backup contains", "")
	lines := []string{title}
	for _, l := range term.Wrap("Upgrades can delete custom resources, CRDs, and the disks of replaced nodes.", w-2) {
		lines = append(lines, c.th.Row(w).Add(term.Plain, " ").Add(term.Plain, l).String())
	}
	kept := view.BackupCoverageRows(c.page(), w, h, &b.Backups, ": press b")
	lines = append(lines, kept...)
	var below []string
	switch {
	case b.running:
		below = view.BackupProgress(c.page(), w, &b.t, b.began)
	case b.verifying != "":
		below = []string{
			c.th.Rule(w, "Verify", term.Clean(b.verifying)),
			c.th.Row(w).Add(term.Plain, " ").Add(term.Accent, c.th.Spin(c.frame)+" ").Add(term.Accent, c.th.Meter(b.done, b.total, min(30, w/3))).
				Add(term.Plain, " "+term.Bytes(b.done)+" of "+term.Bytes(b.total)).String(),
		}
	case b.ended:
		below = c.backupOutcome(w)
	}
	// In a small window the list of backups, which has the cursor, comes first.
	if list := min(1+max(1, len(b.Entries)), 5); !b.running && len(below) <= h/3 && len(lines)+list+len(below) > h {
		lines = append([]string{title}, kept...)
		lines = lines[:min(len(lines), max(1, h-list-len(below)))]
	}
	room := h - len(lines) - len(below)
	lines = append(lines, c.backupRows(w, room)...)
	for len(lines)+len(below) < h {
		lines = append(lines, "")
	}
	if over := len(lines) + len(below) - h; over > 0 {
		lines = lines[:max(0, len(lines)-over)]
	}
	return append(lines, below...)
}

// backupRows lists the backups in at most h lines.
func (c *console) backupRows(w, h int) []string {
	b := c.bak
	if h < 2 {
		return nil
	}
	remark := map[string]string{
		engine.EtcdAuto: "next backup: etcd if available", engine.EtcdTake: "next backup: etcd required", engine.EtcdLeave: "next backup: without etcd",
	}[b.etcd]
	lines := []string{c.th.Rule(w, fmt.Sprintf("Backups %d", len(b.Entries)), remark)}
	switch {
	case b.ListErr != nil:
		x := view.Explain(b.ListErr, c.deps.commands)
		lines = append(lines, c.th.Row(w).Add(term.Plain, " ").Add(term.Bad, c.th.Fail+" ").Add(term.Plain, x.What).String())
		lines = append(lines, c.th.Below(w, 3, 2, term.Faint, x.Why)...)
		lines = append(lines, c.th.Below(w, 3, 3, term.Accent, x.Remedy)...)
		return lines[:min(len(lines), h)]
	case !b.Listed:
		return lines
	case len(b.Entries) == 0:
		return append(lines, c.th.Row(w).Add(term.Faint, "   none yet: b creates one in "+engine.RunsDir).String())
	}
	from, to := view.Window(len(b.Entries), b.sel, h-1)
	for i, e := range b.Entries[from:to] {
		sign, st, text := c.th.OK, term.Good, ""
		if !e.Whole {
			sign, st, text = c.th.Fail, term.Bad, term.Clean(e.Why)
		}
		switch err, ok := b.verified[e.ID]; {
		case ok && err == nil:
			text = "verified"
		case ok:
			sign, st, text = c.th.Fail, term.Bad, term.Clean(err.Error())
			if p := engine.BackupProblems(err); len(p) > 0 {
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
		r := c.th.Row(w).Add(term.Accent, view.Marker(c.page(), from+i == b.sel)).Add(st, sign).Add(term.Plain, " ").Col(name, term.Clean(e.ID), 31)
		r.Num(term.Faint, term.Ago(e.Created, c.now), 8).Num(term.Plain, view.Thousands(e.Objects), 10)
		if w >= 70 { // a cut number would be wrong
			r.Num(term.Plain, term.Bytes(e.Bytes), 9).Pad(1).Col(term.Faint, etcd, 4)
		}
		var below []string // the text, if it is too long for the row
		if r.Fits(text) {
			r.Add(term.Faint, text)
		} else if from+i == b.sel {
			below = c.th.Below(w, 4, 2, term.Faint, text)
		}
		lines = append(append(lines, r.String()), below...)
	}
	return lines[:min(len(lines), h)]
}

// backupOutcome renders the result of the last backup.
func (c *console) backupOutcome(w int) []string {
	b := c.bak
	if b.err == nil {
		lines := []string{c.th.Rule(w, "Done", term.Clock(b.t.Last.Sub(b.t.Started)))}
		text := "the backup is complete"
		if b.t.Result != nil && b.t.Result.Text != "" {
			text = b.t.Result.Text
		}
		lines = append(lines, c.th.Row(w).Add(term.Plain, " ").Add(term.Good, c.th.OK+" ").Add(term.Plain, text).String())
		for i := range b.t.Log.Len() {
			if l := b.t.Log.At(i); l.Level == "warn" || l.Level == "error" {
				lines = append(lines, c.th.Below(w, 3, 2, term.Caution, l.Text)...)
			}
		}
		return lines
	}
	if engine.ExitCode(b.err) == engine.ExitStopped {
		return []string{c.th.Rule(w, "Stopped", ""), c.th.Row(w).Add(term.Plain, " ").Add(term.Caution, c.th.Stopped+" ").Add(term.Plain, "the backup was stopped; its files were deleted").String()}
	}
	return view.ProblemWithin(c.page(), w, 3, "`"+c.command()+"` shows them", b.err)
}

// backupWhy is the line above the keys.
func (c *console) backupWhy() []string {
	b := c.bak
	text := ""
	switch {
	case b.stopping && b.running, c.leaving:
		text = "Stopping; the partial backup is deleted."
	case b.running && b.t.Why.Text != "":
		text = "Why waiting (" + term.Duration(c.now.Sub(b.t.Why.Since)) + "): " + b.t.Why.Text
	}
	if text == "" {
		return nil
	}
	return c.th.Below(c.w, 1, 2, term.Strong, text)
}

// backupCommand is the command line that creates the same backup as the key b.
func (c *console) backupCommand() string {
	verb := "backup create"
	if c.bak.etcd != engine.EtcdAuto {
		verb += " --etcd=" + c.bak.etcd
	}
	return c.deps.commands.Command(verb)
}
