package tui

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine/findings"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// pipelineOptions are the flags that decide which findings of a check count, and how it prints
// them.
type pipelineOptions struct {
	format     pipelineFormat
	failOn     failOn
	baseline   string
	ignore     []string
	ignoreFile string
}

// pipelineFormat is the value of -o where SARIF is allowed, too.
type pipelineFormat string

const asSARIF pipelineFormat = "sarif"

var pipelineFormats = []string{"text", "json", "markdown", string(asSARIF)}

func (f *pipelineFormat) String() string { return string(*f) }
func (f *pipelineFormat) Type() string   { return "text|json|markdown|sarif" }
func (f *pipelineFormat) Set(s string) error {
	for _, known := range pipelineFormats {
		if s == known {
			*f = pipelineFormat(s)
			return nil
		}
	}
	return errors.New("want text, json, markdown or sarif")
}

// failOn is the value of --fail-on.
type failOn findings.Threshold

func (f *failOn) String() string { return string(*f) }
func (f *failOn) Type() string   { return "blocking|warning" }
func (f *failOn) Set(s string) error {
	t, err := findings.ParseThreshold(s)
	if err != nil {
		return errors.New("want blocking or warning")
	}
	*f = failOn(t)
	return nil
}

// flags adds the flags to a verb.
func (o *pipelineOptions) flags(cmd *cobra.Command) {
	o.format = pipelineFormat(text)
	fl := cmd.Flags()
	fl.VarP(&o.format, "output", "o", "output format: text, json for one document, markdown or sarif")
	fl.Var(&o.failOn, "fail-on", "exit with 4 if a new finding of this severity or worse is not ignored")
	fl.StringVar(&o.baseline, "baseline", "", "output of an earlier check -o json: its findings do not count (`file`)")
	fl.StringArrayVar(&o.ignore, "ignore", nil, "`rule` ID[/OBJECT],until=DATE,reason=TEXT: such findings do not count; may be repeated")
	fl.StringVar(&o.ignoreFile, "ignore-file", "", "YAML `file` with a list ignore of rules: id, object, reason, until")
	_ = cmd.RegisterFlagCompletionFunc("output", fixed(pipelineFormats...))
	_ = cmd.RegisterFlagCompletionFunc("fail-on", fixed(string(findings.FailBlocking), string(findings.FailWarning)))
	_ = cmd.MarkFlagFilename("baseline", "json")
	_ = cmd.MarkFlagFilename("ignore-file", "yaml", "yml")
}

// rules reads the baseline and the rules to ignore findings.
func (o *pipelineOptions) rules(now time.Time) (*findings.Rules, error) {
	bad := func(err error, remedy string) error {
		return &plan.Error{Op: "check", Err: err, Exit: plan.ExitUsage, Remedy: remedy}
	}
	r := &findings.Rules{Now: now}
	if o.baseline != "" {
		f, err := os.Open(o.baseline)
		if err == nil {
			r.Baseline, err = findings.ReadBaseline(f)
			f.Close()
		}
		if err != nil {
			return nil, bad(err, "write the baseline with `constellation check -o json > FILE`")
		}
	}
	if o.ignoreFile != "" {
		f, err := os.Open(o.ignoreFile)
		if err == nil {
			r.Ignore, err = findings.ReadIgnores(f)
			f.Close()
		}
		if err != nil {
			return nil, bad(err, "correct the file: each rule needs id, reason and until")
		}
	}
	for _, s := range o.ignore {
		i, err := findings.ParseIgnore(s)
		if err != nil {
			return nil, bad(err, "give each rule an end and a reason")
		}
		r.Ignore = append(r.Ignore, i)
	}
	return r, nil
}

// offlineDocument is the JSON output of a check without a cluster.
type offlineDocument struct {
	Schema string `json:"schema"`
	// Source is manifests or backup, Dir its directory.
	Source string    `json:"source"`
	Dir    string    `json:"dir"`
	Time   time.Time `json:"time"`
	CLI    string    `json:"cli"`
	findings.Offline
	// Findings replaces the field of the same name.
	Findings []findings.Judged `json:"findings"`
	Notes    []string          `json:"notes,omitempty"`
	// Failing is the number of findings that --fail-on counts, Exit the exit code.
	Failing int `json:"failing"`
	Exit    int `json:"exit"`
}

// runOfflineCheck runs `check` without a cluster.
func runOfflineCheck(ctx context.Context, s *session, r findings.OfflineRequest, o pipelineOptions) error {
	rules, err := o.rules(s.Now())
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	result, err := s.CheckOffline(ctx, r)
	if errors.Is(err, fs.ErrNotExist) && r.Manifests != "" {
		return &plan.Error{Err: err, Exit: plan.ExitFailed, Remedy: "name an existing folder with --manifests"}
	}
	if err != nil {
		return err
	}
	d := offlineDocument{Schema: plan.Schema, Source: "manifests", Dir: r.Manifests, Time: s.Now().UTC(), CLI: s.Release, Offline: *result}
	if r.Backup != "" {
		d.Source, d.Dir = "backup", r.Backup
	}
	d.Findings, d.Notes = rules.Judge(result.Findings)
	d.Failing = len(findings.Threshold(o.failOn).Failing(d.Findings))
	if d.Failing > 0 {
		d.Exit = plan.ExitBlocked
	}
	if err := writeOffline(s, &d, o, rules.Baseline != nil); err != nil {
		return err
	}
	if d.Exit != plan.ExitDone {
		return exitStatus(d.Exit)
	}
	return nil
}

func writeOffline(s *session, d *offlineDocument, o pipelineOptions, compared bool) error {
	switch o.format {
	case pipelineFormat(asJSON):
		return document(s.out, d)
	case asSARIF:
		dir := ""
		if d.Source == "manifests" && filepath.IsLocal(d.Dir) {
			dir = filepath.ToSlash(d.Dir)
		}
		return findings.WriteSARIF(s.out, findings.Report{Tool: d.CLI, Dir: dir, Compared: compared, Findings: d.Findings})
	case pipelineFormat(asMarkdown):
		_, err := io.WriteString(s.out, offlineMarkdown(s.formatter(), d))
		return err
	}
	s.print(offlineText(s.page(), s.answerWidth(), d))
	return nil
}

// shown are the findings that are printed one by one, with their files as the user named
// them; needCluster are the IDs of checks that need a live cluster.
func (d *offlineDocument) shown() (list []findings.Judged, needCluster []string) {
	for _, j := range d.Findings {
		switch {
		case j.Severity == plan.Info:
			continue
		case j.Severity == plan.NotChecked && len(j.Locations)+len(j.Objects) == 0:
			needCluster = append(needCluster, j.ID)
			continue
		}
		j.Locations = append([]plan.Location(nil), j.Locations...)
		for i := range j.Locations {
			j.Locations[i].File = path.Join(filepath.ToSlash(d.Dir), j.Locations[i].File)
		}
		list = append(list, j)
	}
	return list, needCluster
}

// status is why a finding does not count: " (in the baseline)".
func status(j *findings.Judged) string {
	switch {
	case j.Ignored != nil:
		return fmt.Sprintf(" (ignored until %s: %s)", j.Ignored.Until, j.Ignored.Reason)
	case j.Known:
		return " (in the baseline)"
	}
	return ""
}

// verdict is the result in one sentence.
func (d *offlineDocument) verdict() (plan.Severity, string) {
	n := map[plan.Severity]int{}
	away := 0
	for _, j := range d.Findings {
		if j.Counts() {
			n[j.Severity]++
		} else if j.Severity == plan.Block || j.Severity == plan.Warn {
			away++
		}
	}
	what := fmt.Sprintf("%s, %s for Kubernetes %s: ", words.Count(d.Files, "file"), words.Count(d.Objects, "object"), d.Kubernetes.MinorString())
	severity, text := plan.Info, "no obstacle found"
	switch {
	case n[plan.Block] > 0:
		severity, text = plan.Block, fmt.Sprintf("%d blocking, %s", n[plan.Block], words.Count(n[plan.Warn], "warning"))
	case n[plan.Warn] > 0:
		severity, text = plan.Warn, words.Count(n[plan.Warn], "warning")
	}
	if away > 0 {
		text += fmt.Sprintf("; %d in the baseline or ignored", away)
	}
	if len(d.Skipped) > 0 {
		text += fmt.Sprintf("; %d skipped", len(d.Skipped))
	}
	return severity, what + text + "."
}

func offlineText(pg view.Page, w int, d *offlineDocument) []string {
	severity, text := d.verdict()
	sign, st := view.SeveritySignOf(pg, severity)
	lines := []string{"check of " + term.Clean(d.Dir)}
	for _, p := range term.Wrap(text, w-2) {
		lines = append(lines, pg.Row(w).Add(st, sign+" ").Add(term.Strong, p).String())
		sign = " "
	}
	list, needCluster := d.shown()
	if len(list) > 0 {
		lines = append(lines, "", pg.Rule(w, "Findings", ""))
	}
	for i := range list {
		f := &list[i]
		sign, st := view.SeveritySignOf(pg, f.Severity)
		for k, p := range term.Wrap(term.Clean(f.Title+" ["+f.ID+"]"+status(f)), max(20, w-view.AreaWidth-5)) {
			row := pg.Row(w).Pad(view.AreaWidth + 5)
			if k == 0 {
				row = pg.Row(w).Pad(2).Add(st, sign+" ").Col(term.Faint, term.Clean(f.Source), view.AreaWidth)
			}
			lines = append(lines, row.Add(term.Plain, p).String())
		}
		lines = append(lines, view.FindingDetail(pg, w, view.AreaWidth+5, f.Finding)...)
	}
	if len(d.Skipped) > 0 {
		lines = append(lines, "", pg.Rule(w, "Skipped", fmt.Sprint(len(d.Skipped))))
		for i, x := range d.Skipped {
			if i == maxSkipped {
				lines = append(lines, fmt.Sprintf("  and %d more: -o json lists all", len(d.Skipped)-i))
				break
			}
			for k, p := range term.Wrap(term.Clean(skippedText(d, x)), max(20, w-4)) {
				lines = append(lines, strings.Repeat(" ", 2+2*min(k, 1))+p)
			}
		}
	}
	if len(needCluster) > 0 {
		lines = append(lines, "")
		lines = append(lines, term.Wrap(needClusterText(needCluster), w)...)
	}
	for _, n := range d.Notes {
		lines = append(lines, term.Wrap(term.Clean(n), w)...)
	}
	return lines
}

// maxSkipped is the number of skipped files in text.
const maxSkipped = 20

func skippedText(d *offlineDocument, x findings.Skipped) string {
	x.File = path.Join(filepath.ToSlash(d.Dir), x.File)
	return view.LocationsText([]plan.Location{x.Location}) + ": " + x.Reason
}

func needClusterText(ids []string) string {
	return fmt.Sprintf("Not checked, because only a live cluster shows it: %s.", strings.Join(ids, ", "))
}

func offlineMarkdown(sp view.CommandFormatter, d *offlineDocument) string {
	var b strings.Builder
	_, text := d.verdict()
	fmt.Fprintf(&b, "## Check of %s\n\n%s\n", view.CodeOf(d.Dir), view.CellOf(text))
	list, needCluster := d.shown()
	for i := range list {
		f := list[i].Finding
		f.Title += status(&list[i])
		b.WriteString(view.FindingItem(sp, &f))
	}
	if len(d.Skipped) > 0 {
		b.WriteString("\n### Skipped\n\n")
		for i, x := range d.Skipped {
			if i == maxSkipped {
				fmt.Fprintf(&b, "- %d more\n", len(d.Skipped)-i)
				break
			}
			fmt.Fprintf(&b, "- %s\n", view.CellOf(skippedText(d, x)))
		}
	}
	if len(needCluster) > 0 {
		fmt.Fprintf(&b, "\n%s\n", view.CellOf(needClusterText(needCluster)))
	}
	for _, n := range d.Notes {
		fmt.Fprintf(&b, "\n%s\n", view.CellOf(n))
	}
	return b.String()
}
