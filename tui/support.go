package tui

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/support"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

// supportOptions are the flags of `support-bundle`.
type supportOptions struct {
	cluster.Access
	to               string
	overwrite        bool
	since            days
	nodes            []string
	maxFile, maxSize int64 // in MiB
	printRBAC        bool
	out              format
}

// supportVerb is the name of the verb.
const supportVerb = "support-bundle"

func supportCommand(s *session) *cobra.Command {
	o := supportOptions{maxFile: support.DefaultMaxFile >> 20, maxSize: support.DefaultMaxSize >> 20}
	cmd := &cobra.Command{
		Use:   supportVerb,
		Short: "Collect what a maintainer needs, without secrets",
		Long: `Write one archive with what a maintainer needs to find a fault: versions, files of the workspace,
records of runs, and what the cluster's API shows of nodes, targets, events, pods and logs of
kube-system and constellation-system. INDEX.txt in it lists each file with its source, what was
redacted, and what could not be collected and why.

Secrets of the cluster are never read. Secrets of the workspace, private keys, tokens and
passwords are removed from everything else, and counted. Names and addresses of machines
stay: read the archive before you send it. docs/support-bundle.md lists what is in it.

It needs a kubeconfig or a workspace, and works on any cluster. A cluster that does not answer
gives a bundle of the workspace alone. The command changes nothing in a cluster, never prompts,
and creates the file with mode 0600, whole or not at all.

The exit code is 0 if the archive was written, also if parts could not be collected; in JSON
they are in .index.missing.`,
		Example: `  constellation support-bundle
  constellation support-bundle --context prod-eu --since 6h --node worker-3
  constellation support-bundle --to fault.tar.gz -o json | jq '.index.missing'
  tar -xzOf fault.tar.gz fault/INDEX.txt | less
  constellation support-bundle --print-rbac | kubectl apply -f -`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runSupport(cmd.Context(), s, o) },
	}
	accessFlags(s, cmd, &o.Access)
	fl := cmd.Flags()
	fl.StringVar(&o.to, "to", "", "`file` to write (default: constellation-support-CLUSTER-TIME.tar.gz in the workspace)")
	fl.BoolVar(&o.overwrite, "overwrite", false, "replace an existing file")
	fl.Var(&o.since, "since", "leave out older runs, events and log lines, such as 6h or 2d (0: none)")
	fl.StringArrayVar(&o.nodes, "node", nil, "restrict Nodes and logs to the pods of this `node`; may be repeated")
	fl.Int64Var(&o.maxFile, "max-file", o.maxFile, "largest file in the bundle, in `MiB`; of a log the end is kept")
	fl.Int64Var(&o.maxSize, "max-size", o.maxSize, "all files together before compression, in `MiB`")
	fl.BoolVar(&o.printRBAC, "print-rbac", false, "print the least ClusterRole for a complete bundle and exit")
	fl.Bool("non-interactive", false, "accepted for consistency; this command never prompts")
	outputFlag(cmd, &o.out, "output format: text, or json for one document")
	_ = cmd.MarkFlagFilename("to", "tar.gz", "tgz")
	_ = cmd.RegisterFlagCompletionFunc("node", completeNodes(s, false))
	return cmd
}

// runSupport runs `support-bundle`.
func runSupport(ctx context.Context, s *session, o supportOptions) error {
	if o.printRBAC {
		fmt.Fprint(s.out, s.SupportRole())
		return nil
	}
	for _, limit := range []struct {
		flag  string
		value int64
	}{{"max-file", o.maxFile}, {"max-size", o.maxSize}} {
		if limit.value < 1 || limit.value > 4096 {
			return &plan.Error{Op: "read flags", Err: fmt.Errorf("--%s is %d, want 1 to 4096", limit.flag, limit.value), Exit: plan.ExitUsage, Remedy: "give a number of MiB"}
		}
	}
	r := support.Request{Overwrite: o.overwrite, Nodes: o.nodes, MaxFile: o.maxFile << 20, MaxSize: o.maxSize << 20, Release: s.Release, Now: s.Now()}
	if o.since > 0 {
		r.Since = r.Now.Add(-time.Duration(o.since))
	}
	name, err := selectForSupport(s, o.Access, &r)
	if err != nil {
		return err
	}
	file := fmt.Sprintf("constellation-support-%s-%s.tar.gz", engine.FolderOf(name), r.Now.UTC().Format("20060102T150405Z"))
	r.File = o.to
	if o.to == "" {
		r.File = filepath.Join(s.dir, file)
	} else if info, err := os.Stat(o.to); err == nil && info.IsDir() {
		r.File = filepath.Join(o.to, file)
	}
	if r.File, err = filepath.Abs(r.File); err != nil {
		return &plan.Error{Op: "write " + r.File, Err: err, Exit: plan.ExitUsage}
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	live := s.liveLine()
	r.Progress = func(what string) { live.Set("collecting " + term.Clean(what)) }
	result, err := s.WriteSupportBundle(ctx, r)
	live.Clear()
	if err != nil {
		return err
	}
	s.wrote = result.File
	if o.out == asJSON {
		return document(s.out, result)
	}
	s.print(supportText(s.page(), s.answerWidth(), &result))
	return nil
}

// selectForSupport sets workspace and cluster of a request, and returns the cluster's name. In a workspace, a cluster that cannot be
// selected is noted in the bundle.
func selectForSupport(s *session, a cluster.Access, r *support.Request) (name string, err error) {
	ws, dir, err := s.workspace()
	if err != nil {
		return "", err
	}
	inside := slices.ContainsFunc([]string{workspace.ConfigFile, workspace.StateFile, workspace.KubeconfigFile, plan.RunsDir}, ws.Has)
	given := a.Given() || a.As != "" || a.RequestTimeout != 0
	sel, err := selectCluster(s, "collect from", a, true)
	if err == nil && sel == nil && ws.Has(workspace.KubeconfigFile) {
		var own cluster.Selected
		if own, err = s.Clusters.Select(cluster.Access{Kubeconfig: ws.Path(workspace.KubeconfigFile)}); err == nil {
			sel = &own
		}
	}
	if err != nil && (given || !inside) {
		return "", err
	}
	if inside {
		r.Workspace, name = ws, filepath.Base(dir)
		if c, err := ws.Config(); err == nil {
			name = c.Name
		}
	}
	r.Cluster, r.WhyNoCluster = sel, err
	switch {
	case sel != nil && name == "":
		name = sel.Context
	case sel == nil && !inside:
		return "", &plan.Error{
			Op: "collect a support bundle", Err: errors.New("there is neither a workspace nor a kubeconfig"), Exit: plan.ExitUsage,
			Remedy: "name a workspace with -C, or a cluster with --kubeconfig or --context",
		}
	case sel == nil && err == nil:
		r.WhyNoCluster = &plan.Error{Err: errors.New("this workspace has no " + workspace.KubeconfigFile), Remedy: "name the kubeconfig of the cluster with --kubeconfig"}
	}
	return name, nil
}

// maxMissing is how many missing parts the output lists.
const maxMissing = 8

// supportText renders the output of support-bundle.
func supportText(pg view.Page, width int, r *support.Result) []string {
	row := func(style term.Style, sign, text string) string {
		return pg.Row(width).Add(term.Plain, " ").Add(style, sign).Add(term.Plain, " "+text).String()
	}
	ix := &r.Index
	redacted := 0
	for _, x := range ix.Redacted {
		redacted += x.Count
	}
	lines := []string{
		row(term.Good, pg.OK, fmt.Sprintf("%s written, %s", words.Count(len(ix.Files), "file"), workspace.SizeOf(r.Size))),
		"   " + term.Clean(r.File),
		"   sha256 " + r.SHA256,
	}
	switch {
	case ix.Server == "":
		lines = append(lines, row(term.Caution, pg.Warn, "no cluster was read"))
	case !ix.Reachable:
		lines = append(lines, row(term.Caution, pg.Warn, "the cluster did not answer: the bundle has the workspace alone"))
	}
	text := "nothing had to be redacted"
	if redacted > 0 {
		text = words.Count(redacted, "value") + " redacted"
	}
	lines = append(lines, "   "+text)
	var denied int
	var missing []support.Missing
	for _, m := range ix.Missing {
		if strings.HasPrefix(m.Why, support.RightMissing) {
			denied++
			continue
		}
		missing = append(missing, m)
	}
	if denied > 0 {
		lines = append(lines, row(term.Caution, pg.Warn, words.Count(denied, "part")+" not collected for lack of a right; --print-rbac prints the role"))
	}
	if n := len(missing); n > 0 {
		lines = append(lines, "   not collected:")
		for i, m := range missing {
			if i == maxMissing && n > maxMissing+1 {
				lines = append(lines, fmt.Sprintf("     and %d more, in INDEX.txt", n-i))
				break
			}
			lines = append(lines, "     "+term.CutMiddle(term.Clean(m.What+": "+m.Why), max(width-5, 20), pg.Ellipsis))
		}
	}
	root := strings.TrimSuffix(strings.TrimSuffix(filepath.Base(r.File), ".gz"), ".tar")
	return append(lines, "   It has names and addresses of machines. Read it before you send it:", fmt.Sprintf("     tar -xzOf %s %s/INDEX.txt", view.QuoteArg(term.Clean(r.File)), view.QuoteArg(term.Clean(root))))
}
