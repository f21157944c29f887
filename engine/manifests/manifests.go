// Package manifests checks the files of a directory, such as a Git repository, for what would
// make an upgrade of Kubernetes fail.
//
// [Check] reads YAML and JSON files with objects of Kubernetes and yields the findings of
// package preflight that files can show, with the same IDs, and with file and line. Checks that
// need a live cluster are "not checked".
//
// The files are untrusted. Symbolic links are not followed, other files than regular ones are not opened,
// and files, documents and values are limited. Unreadable files are in [Result.Skipped] with
// the reason. Content of a file that is not an object's name, label, image or chart never gets into a
// result: Secrets are not even parsed.
package manifests

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"

	"constellation/engine/findings"
	"constellation/engine/kube/preflight"
	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/engine/version"
)

// Limits of a directory and its files.
const (
	maxFiles = 1_000_000
	// maxFile bounds one file, in bytes.
	maxFile = 16 << 20
	// maxDocument bounds one document, in bytes: an API server accepts 3 MiB.
	maxDocument = 4 << 20
	// maxValues bounds the values of one document; each takes a few hundred bytes of memory.
	maxValues = 400_000
	// maxFindings bounds the findings and the skipped files of a result.
	maxFindings = 10_000
)

// Request configures a check.
type Request struct {
	// To is the target. Zero means the newest minor whose changes are known.
	To version.Version
	// From is what runs now. Zero means unknown: then all APIs count that To no longer serves.
	From version.Version
	// Workers is the number of files that are read at a time; zero means one for each CPU.
	Workers int
}

// Result is what a directory has. Checks that need a live cluster come last in it, not checked.
type Result = findings.Offline

// Skipped is a file, directory or document that was not checked.
type Skipped = findings.Skipped

// Check checks the files in dir and its subdirectories. The error is that of ctx, or dir
// cannot be read.
func Check(ctx context.Context, dir string, r Request) (*Result, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("read manifests: %w", err)
	}
	defer root.Close()
	if r.To.IsZero() {
		r.To = lifecycle.Newest()
	}
	rules := newRules(r)
	workers := r.Workers
	if workers <= 0 {
		workers = runtime.GOMAXPROCS(0)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	paths := make(chan string, 64)
	walked := newFacts()
	var walking sync.WaitGroup
	var walkErr error
	walking.Go(func() {
		defer close(paths)
		walkErr = walk(ctx, root, paths, walked)
	})
	all := make([]*facts, workers)
	var reading sync.WaitGroup
	for i := range all {
		all[i] = newFacts()
		reading.Go(func() {
			p := parser{rules: rules, facts: all[i]}
			for path := range paths {
				if ctx.Err() != nil {
					continue // the channel is drained, so that walk ends
				}
				p.file(root, path)
			}
		})
	}
	reading.Wait()
	walking.Wait()
	if walkErr != nil {
		return nil, walkErr
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f := walked
	for _, more := range all {
		f.add(more)
	}
	return f.result(rules), nil
}

// Text checks manifests in memory, such as those of a Helm release. name replaces the name of the
// file.
func Text(name string, text []byte, r Request) *Result {
	if r.To.IsZero() {
		r.To = lifecycle.Newest()
	}
	p := parser{rules: newRules(r), facts: newFacts()}
	p.text(name, text)
	return p.facts.result(p.rules)
}

// result adds the findings that need several objects, and sorts all.
func (f *facts) result(r *rules) *Result {
	f.budgetFindings()
	f.singleReplicas()
	f.addOnFindings(r)
	f.chartFindings(r)
	f.webhookFindings()
	if len(f.kustomizations) > 0 {
		slices.SortFunc(f.kustomizations, byLocation)
		f.findings = append(f.findings, plan.Finding{
			ID: "kustomize", Severity: plan.NotChecked, Source: "files", Title: fmt.Sprintf("not checked: what %s", countOf(len(f.kustomizations), "kustomization changes", "kustomizations change")),
			Detail: "the files were checked as they are, without patches, replicas and images of kustomizations", Locations: limited(f.kustomizations),
			Remedy: "check the output of `kustomize build` too: write it into a directory, and pass that to --manifests",
		})
	}
	slices.SortFunc(f.findings, func(a, b plan.Finding) int {
		return cmp.Or(cmp.Compare(rank(a.Severity), rank(b.Severity)), slices.CompareFunc(a.Locations, b.Locations, byLocation), cmp.Compare(a.ID, b.ID), cmp.Compare(a.Title, b.Title))
	})
	slices.SortFunc(f.skipped, func(a, b Skipped) int { return byLocation(a.Location, b.Location) })
	if n := len(f.findings) - maxFindings; n > 0 {
		worst := f.findings[maxFindings].Severity
		f.findings = append(f.findings[:maxFindings:maxFindings], plan.Finding{
			ID: "more-findings", Severity: worst, Source: "files", Title: fmt.Sprintf("%d more findings", n),
			Remedy: "check subdirectories one by one, or resolve those above first",
		})
	}
	if n := len(f.skipped); n > maxFindings {
		f.skipped = append(f.skipped[:maxFindings:maxFindings], Skipped{Location: f.skipped[maxFindings].Location, Reason: fmt.Sprintf("%d more are not listed", n-maxFindings)})
	}
	f.findings = append(f.findings, notChecked()...)
	return &Result{Kubernetes: r.to, Files: f.files, Objects: f.objects, Bytes: f.bytes, Skipped: f.skipped, Findings: f.findings}
}

// fromFiles are the checks of a cluster that files can show, at least in part.
var fromFiles = []string{idRemoved, idBudgetRoom, idBudgetOverlap, idSingleReplica, idWebhookExemption, idWebhookTimeout, idGitRepo, idExternalIPs, idFields, idAddOnVersions, idNodeActors}

// notChecked lists the checks that need a live cluster.
func notChecked() (out []plan.Finding) {
	for _, c := range preflight.Checks() {
		if !slices.Contains(fromFiles, c.ID) {
			out = append(out, plan.Finding{
				ID: c.ID, Severity: plan.NotChecked, Source: c.Area, Title: "not checked whether " + c.Title,
				Detail: "only a live cluster shows it", Remedy: "run `constellation check --kubeconfig FILE` on the cluster", Reference: c.Reference,
			})
		}
	}
	return out
}

func rank(s plan.Severity) int {
	return slices.Index([]plan.Severity{plan.Block, plan.Warn, plan.NotChecked, plan.Info}, s)
}

func byLocation(a, b plan.Location) int {
	return cmp.Or(strings.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line))
}

// limited bounds the locations of one finding.
func limited(l []plan.Location) []plan.Location { return l[:min(len(l), 100)] }

func countOf(n int, one, several string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, several)
}
