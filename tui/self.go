package tui

import (
	"cmp"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/provenance"
	"constellation/engine/words"
	"constellation/tui/term"
)

func selfCommand(s *session) *cobra.Command {
	cmd := group("self", "Verify this program", "Show who built this program, and verify its files.", "  constellation self verify --key constellation.pub")
	cmd.AddCommand(selfVerify(s))
	return cmd
}

// selfAnswer is the JSON output of self verify.
type selfAnswer struct {
	Schema   string `json:"schema"`
	Release  string `json:"release"`
	Verified bool   `json:"verified"`
	engine.SelfReport
}

func selfVerify(s *session) *cobra.Command {
	var (
		keys    []string
		modules bool
		out     format
	)
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Verify the origin of this program",
		Long: `Show the commit, the toolchain and the builder of this program, and verify its files: each
must have the digest of its provenance statement, and a key of the publisher must have
signed the statement. A release installs the statements beside the program; a program
that you built with "make build" has none.

Programs of other installations in PATH are listed, with the commits that they contain.
They are not verified and do not change the exit code.

The exit code is 1 if a file is not verified. An attacker who can replace the program can
also replace this check: verify the downloaded archive or package with other tools first.`,
		Example: `  constellation self verify --key constellation.pub
  constellation self verify --key constellation.pub -o json | jq -r '.build.modules[].path'`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			r, err := engine.VerifySelf(keys)
			if err != nil {
				return err
			}
			if out == asJSON {
				err = document(s.out, selfAnswer{plan.Schema, s.Release, r.OK(), r})
			} else {
				writeSelf(s.out, s.Release, r, modules)
			}
			if err == nil && !r.OK() {
				return exitStatus(plan.ExitFailed)
			}
			return err
		},
	}
	cmd.Flags().StringArrayVar(&keys, "key", nil, "public key `file` of the publisher (default: the keys in this program)")
	_ = cmd.MarkFlagFilename("key", "pub", "pem")
	cmd.Flags().BoolVar(&modules, "modules", false, "list all modules")
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// problemRemedies are what a user can do about a problem of an installation.
var problemRemedies = map[string]string{
	provenance.NoStatement:  "install a release; programs of `make build` have no statements",
	provenance.BadStatement: "install the release again",
	provenance.NoSignature:  "install a signed release, or compare the digest with one that you built yourself",
	provenance.BadSignature: "check that --key is the publisher's key, then install the release again",
	provenance.NoKey:        "pass the publisher's key with --key FILE",
	provenance.Altered:      "install the release again",
	provenance.Missing:      "install the release again",
}

func writeSelf(out io.Writer, release string, r engine.SelfReport, modules bool) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(key, format string, args ...any) {
		fmt.Fprintf(w, "%s\t%s\n", key, term.Clean(fmt.Sprintf(format, args...)))
	}
	row("program", "%s", r.Executable)
	row("release", "%s", release)
	row("SHA-256", "%s", r.SHA256)
	commit := cmp.Or(r.Build.Commit, "not recorded")
	if r.Build.CommitTime != "" {
		commit += " of " + r.Build.CommitTime
	}
	if r.Build.Modified {
		commit += ", with changes that are not committed"
	}
	row("commit", "%s", commit)
	row("built with", "%s for %s, %d modules", r.Build.Go, r.Build.Target, len(r.Build.Modules))
	if p := r.Self(); p != nil {
		row("builder", "%s", p.Builder)
		row("signed by", "%s", cmp.Or(p.Signer, "no trusted key"))
	}
	row("files", "%d match their statements", len(r.Programs))
	_ = w.Flush() // out keeps its error
	if modules {
		for _, m := range r.Build.Modules {
			fmt.Fprintf(out, "module  %s %s %s\n", term.Clean(m.Path), term.Clean(m.Version), term.Clean(m.Sum))
		}
	}
	told := map[string]bool{}
	for _, p := range r.Problems {
		fmt.Fprintf(out, "problem  %s: %s\n", term.Clean(p.File), term.Clean(p.Text))
	}
	for _, p := range r.Problems {
		if remedy := problemRemedies[p.ID]; !told[remedy] {
			told[remedy] = true
			fmt.Fprintf(out, "remedy   %s\n", remedy)
		}
	}
	for _, o := range r.Others {
		text := "is another installation in PATH"
		if o.First {
			text += ", found before this one"
		}
		commit := ""
		if o.Commit != "" {
			commit = fmt.Sprintf(" (commit %s of %s)", o.Commit, o.CommitTime)
		}
		fmt.Fprintf(out, "other    %s\n", term.Clean(o.File+commit+" "+text))
	}
	if len(r.Others) > 0 {
		fmt.Fprintln(out, "remedy   remove the installation that you do not use, or put the folder of the one that you use first in PATH")
	}
	verdict := "verified"
	if !r.OK() {
		verdict = "not verified: " + words.Count(len(r.Problems), "problem")
	}
	fmt.Fprintln(out, verdict)
}
