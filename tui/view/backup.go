package view

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
)

// Backups are the backups of a workspace, and the data that none of them contains.
type Backups struct {
	Entries  []engine.BackupEntry // newest first
	ListErr  error
	Listed   bool
	Local    *cluster.LocalData // nil if unknown
	LocalErr error              // why local is unknown
}

// Authentication is a sentence about the tag of a backup, without its subject.
func Authentication(state string) string {
	switch state {
	case engine.BackupAuthenticated:
		return "authenticated by the master secret of this workspace"
	case engine.BackupForeign:
		return "authenticated with another master secret than that of this workspace"
	case engine.BackupUnauthenticated:
		return "not authenticated"
	}
	return ""
}

// newestComplete is the newest complete backup; nil if there is none.
func (b *Backups) newestComplete() *engine.BackupEntry {
	for i := range b.Entries {
		if b.Entries[i].Complete {
			return &b.Entries[i]
		}
	}
	return nil
}

// BackupCoverageRows show for each kind of data whether a backup contains it. hint is added
// if there is no backup.
func BackupCoverageRows(pg Page, w, h int, b *Backups, hint string) []string {
	r := coverage{pg, w, h, b}
	lines := append(r.objectRows(hint), r.volumeRows()...)
	lines = append(lines, r.scratchRows()...)
	lines = append(lines, r.row(term.Faint, pg.Dot, "master secret, kubeconfig", term.Faint, "not included: keep a copy of this folder's files", ""))
	return strings.Split(strings.Join(lines, "\n"), "\n")
}

// coverage is the part of a page that shows what backups contain.
type coverage struct {
	pg   Page
	w, h int
	b    *Backups
}

// row is one kind of data: its state and the age of its backup. It has two lines in a narrow
// window.
func (r *coverage) row(st term.Style, sign, name string, state term.Style, text, age string) string {
	const what = 26
	if r.w < 70 { // two lines instead of a cut one
		first := r.pg.Row(r.w).Add(term.Plain, " ").Add(st, sign).Add(term.Plain, " ").Add(term.Plain, name).Right(term.Faint, age)
		return strings.Join(append([]string{first.String()}, r.pg.Below(r.w, 5, 2, state, text)...), "\n")
	}
	return r.pg.Row(r.w).Add(term.Plain, " ").Add(st, sign).Add(term.Plain, " ").Col(term.Plain, name, what).Add(state, text).Right(term.Faint, age).String()
}

// objectRows are the rows of the objects and of the etcd snapshot.
func (r *coverage) objectRows(hint string) (lines []string) {
	b := r.b
	last := b.newestComplete()
	switch {
	case b.ListErr != nil:
		lines = append(lines, r.row(term.Caution, r.pg.Warn, "definitions and objects", term.Plain, "unknown: the backups cannot be listed", ""))
	case !b.Listed:
		lines = append(lines, r.row(term.Accent, r.pg.Spin(), "definitions and objects", term.Faint, "listing backups", ""))
	case last == nil:
		lines = append(lines, r.row(term.Bad, r.pg.Fail, "definitions and objects", term.Plain, "no complete backup yet"+hint, "-"),
			r.row(term.Bad, r.pg.Fail, "etcd snapshot", term.Plain, "none yet", "-"))
	default:
		old := r.pg.Now.Sub(last.Created) > 24*time.Hour
		st, sign := term.Good, r.pg.OK
		if old {
			st, sign = term.Caution, r.pg.Warn
		}
		lines = append(lines, r.row(st, sign, "definitions and objects", term.Plain, amountOf(last.Objects, "object")+", "+term.Bytes(last.Bytes), term.Ago(last.Created, r.pg.Now)))
		i := slices.IndexFunc(b.Entries, func(e engine.BackupEntry) bool { return e.Complete && e.Etcd })
		switch {
		case i < 0:
			lines = append(lines, r.row(term.Bad, r.pg.Fail, "etcd snapshot", term.Plain, "in no backup", "-"))
		case i > 0 && b.Entries[i].ID != last.ID:
			lines = append(lines, r.row(term.Caution, r.pg.Warn, "etcd snapshot", term.Plain, "not in the last backup", term.Ago(b.Entries[i].Created, r.pg.Now)))
		default:
			lines = append(lines, r.row(st, sign, "etcd snapshot", term.Plain, "in the last backup", term.Ago(b.Entries[i].Created, r.pg.Now)))
		}
	}
	return lines
}

// volumeRows are the rows of the volumes on disks of nodes.
func (r *coverage) volumeRows() (lines []string) {
	b := r.b
	switch l := b.Local; {
	case l == nil && b.LocalErr != nil:
		lines = append(lines, r.row(term.Caution, r.pg.Warn, "volumes on nodes", term.Plain, "unknown: "+term.Clean(b.LocalErr.Error()), ""))
	case l == nil:
		lines = append(lines, r.row(term.Accent, r.pg.Spin(), "volumes on nodes", term.Faint, "querying the cluster", ""))
	case len(l.Volumes) == 0:
		lines = append(lines, r.row(term.Good, r.pg.OK, "volumes on nodes", term.Plain, "none is bound to a claim", ""))
	default:
		nodes := map[string]bool{}
		for _, v := range l.Volumes {
			for _, n := range v.Nodes {
				nodes[n] = true
			}
		}
		text := fmt.Sprint(len(l.Volumes))
		if len(nodes) > 0 {
			text += " on " + words.Count(len(nodes), "node")
		}
		lines = append(lines, r.row(term.Caution, r.pg.Warn, "volumes on nodes", term.Caution, text+": in no backup, lost with the node", ""))
		most := 2
		if r.h > 24 {
			most = 8
		}
		shown := min(most, len(l.Volumes))
		for i, v := range l.Volumes[:shown] {
			branch := r.pg.Row(r.w).Pad(3).Add(term.Faint, r.pg.Branch+" ").Add(term.Plain, term.Clean(volumeSummary(v)))
			if i == shown-1 && shown < len(l.Volumes) {
				branch.Right(term.Faint, fmt.Sprintf("%d more: Enter", len(l.Volumes)-shown))
			}
			lines = append(lines, branch.String())
		}
	}
	return lines
}

// scratchRows are the row of the pods' scratch space, if there is any.
func (r *coverage) scratchRows() (lines []string) {
	b := r.b
	if l := b.Local; l != nil && l.EmptyDirs+l.HostPaths > 0 {
		var parts []string
		if l.EmptyDirs > 0 {
			parts = append(parts, "emptyDir of "+words.Count(l.EmptyDirs, "pod"))
		}
		if l.HostPaths > 0 {
			parts = append(parts, fmt.Sprintf("hostPath of %d", l.HostPaths))
		}
		lines = append(lines, r.row(term.Faint, r.pg.Dot, "scratch space of pods", term.Faint, strings.Join(parts, ", ")+": in no backup", ""))
	}
	return lines
}

// volumeSummary describe a volume: "db/pg-0  worker-0  statefulset/db/postgres".
func volumeSummary(v cluster.LocalVolume) string {
	s := v.Namespace + "/" + v.Claim
	if len(v.Nodes) > 0 {
		s += "  " + SomeNames(v.Nodes, 2)
	}
	if len(v.Workloads) > 0 {
		return s + "  " + SomeNames(v.Workloads, 2)
	}
	return s + "  (no pod uses it now)"
}

func amountOf(n int64, noun string) string {
	s := Thousands(n) + " " + noun
	if n != 1 {
		s += "s"
	}
	return s
}

// Thousands writes 12345 as 12,345.
func Thousands(n int64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// BackupProgress renders the running backup: its steps and the progress of the current one.
func BackupProgress(pg Page, w int, t *Timeline, began time.Time) []string {
	lines := []string{pg.Rule(w, "Backup in progress", term.Clock(pg.Now.Sub(began)))}
	if len(t.Steps) == 0 {
		return append(lines, pg.Row(w).Add(term.Accent, " "+pg.Spin()+" ").Add(term.Plain, "planning").String())
	}
	for i := range t.Steps {
		s := &t.Steps[i]
		sign, st := pg.Dot, term.Faint
		switch s.State {
		case plan.StateRunning:
			sign, st = pg.Spin(), term.Accent
		case plan.StateDone, plan.StateSkipped:
			sign, st = pg.OK, term.Good
		case plan.StateFailed:
			sign, st = pg.Fail, term.Bad
		case plan.StateStopped:
			sign, st = pg.Stopped, term.Caution
		}
		r := pg.Row(w).Add(term.Plain, " ").Add(st, sign).Add(term.Plain, " ").Add(term.Plain, s.Title)
		if s.Took > 0 {
			r.Right(term.Faint, term.Duration(s.Took))
		}
		lines = append(lines, r.String())
		if s.State == plan.StateRunning {
			lines = append(lines, stepProgress(pg, w, t, s)...)
		}
	}
	return lines
}

// stepProgress renders types, objects, bytes, rate and remaining time of the current step.
func stepProgress(pg Page, w int, t *Timeline, s *Step) []string {
	n := t.counts
	switch {
	case s.ID == engine.StepBackupResources && n["all_types"] > 0:
		left := ""
		if v, ok := n["seconds_left"]; ok {
			left = ", " + term.Duration(time.Duration(v)*time.Second) + " left"
		}
		doing := ""
		for _, p := range s.parts {
			doing = p.name
		}
		return []string{
			pg.Row(w).Pad(3).Add(term.Accent, pg.Meter(n["types"], n["all_types"], min(24, w/4))).Add(term.Plain, fmt.Sprintf(" %d of %d types  ", n["types"], n["all_types"])).Add(term.Faint, doing).String(),
			pg.Row(w).Pad(3).Add(term.Plain, amountOf(n["objects"], "object")+", "+term.Bytes(n["bytes"])).Add(term.Faint, ", "+term.Bytes(n["bytes_per_second"])+"/s"+left).String(),
		}
	case s.Total > 0:
		return []string{pg.Row(w).Pad(3).Add(term.Accent, pg.Meter(s.Progress, s.Total, min(24, w/4))).Add(term.Plain, " "+term.Bytes(s.Progress)+" of "+term.Bytes(s.Total)).String()}
	case s.Progress > 0:
		text := term.Bytes(s.Progress)
		if d := pg.Now.Sub(s.Began); d >= time.Second {
			text += ", " + term.Bytes(int64(float64(s.Progress)/d.Seconds())) + "/s"
		}
		return []string{pg.Row(w).Pad(3).Add(term.Plain, text).String()}
	}
	return nil
}

// VolumesView lists the volumes that are in no backup.
func VolumesView(pg Page, w, h int, all []cluster.LocalVolume, first int) []string {
	lines := []string{
		pg.Rule(w, fmt.Sprintf("Volumes on nodes %d", len(all)), "in no backup, lost with the disk of the node"),
		pg.Row(w).Pad(1).Col(term.Faint, "claim", 28).Col(term.Faint, "node", 18).Col(term.Faint, "size", 9).Add(term.Faint, "used by").String(),
	}
	from := min(first, max(0, len(all)-(h-3)))
	for _, v := range all[from:min(len(all), from+max(1, h-3))] {
		size, nodes, users := "-", "-", "no pod now"
		if v.Bytes > 0 {
			size = term.Bytes(v.Bytes)
		}
		if len(v.Nodes) > 0 {
			nodes = SomeNames(v.Nodes, 1)
		}
		if len(v.Workloads) > 0 {
			users = SomeNames(v.Workloads, 2)
		}
		lines = append(lines, pg.Row(w).Pad(1).Col(term.Plain, term.Clean(v.Namespace+"/"+v.Claim), 28).Col(term.Plain, term.Clean(nodes), 18).Col(term.Faint, size, 9).Add(term.Plain, term.Clean(users)).String())
	}
	if rest := len(all) - (len(lines) - 2); rest > 0 {
		lines = append(lines, pg.Row(w).Pad(3).Add(term.Faint, fmt.Sprintf("%s %d more: ↑↓ moves", pg.Ellipsis, rest)).String())
	}
	return lines
}

// BackupMode is the right end of the first line.
func BackupMode(pg Page) string { return "backup  " + pg.Now.UTC().Format("15:04:05 UTC") }
