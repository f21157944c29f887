package tui

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

func releaseRoot(s *session) *cobra.Command {
	cmd := group("root", "Create, sign and change the root of a feed",
		`Create, sign and change the root of a feed: the file root.json, which users trust.

The root lists root keys, which stay offline with several people, how many of them must
sign a change, and the index keys that may sign publications. A stolen index key is revoked
by the root, and it can name no other keys. docs/feed-keys.md describes the ceremonies.`,
		`  constellation release root new root.json --threshold 2 --root-key ada.key.pub --root-key bob.key.pub --index-key feed.key.pub
  constellation release root sign root.json --key ada.key
  constellation release root show root.json`)
	cmd.AddCommand(releaseRootNew(s), releaseRootSign(s), releaseRootChange(s), releaseRootShow(s))
	return cmd
}

const (
	rootFileUse   = "the root file"
	rootFileFix   = "name the file, such as root.json"
	rootValidHelp = "validity of this version, such as 365d"
	indexDaysHelp = "longest validity of a publication, in `days`"
)

func releaseRootNew(s *session) *cobra.Command {
	var n engine.RootNew
	valid := days(engine.DefaultRootExpiry)
	var out format
	cmd := &cobra.Command{
		Use:   "new FILE --threshold N --root-key FILE... --index-key FILE...",
		Short: "Create an unsigned root",
		Long: `Create an unsigned root. An existing file is never replaced.

Name the public key of each person with --root-key, and of each key that may sign
publications with --index-key. A second index key that stays on a stick replaces a stolen
one at once.`,
		Example: `  constellation release root new root.json --threshold 2 --root-key ada.key.pub --root-key bob.key.pub --root-key eve.key.pub --index-key feed.key.pub`,
		Args:    oneArg(rootFileUse, rootFileFix),
		RunE: func(_ *cobra.Command, args []string) error {
			n.Out, n.Valid = args[0], time.Duration(valid)
			return rootResult(s, out, func() (engine.RootReport, error) { return engine.NewRoot(n) })
		},
	}
	f := cmd.Flags()
	f.IntVar(&n.Threshold, "threshold", 2, "`number` of root keys that must sign a change")
	f.StringArrayVar(&n.Keys, "root-key", nil, "public key `file` of a root key; may be repeated")
	f.StringArrayVar(&n.IndexKeys, "index-key", nil, "public key `file` that may sign publications; may be repeated")
	f.IntVar(&n.IndexDays, "index-days", engine.DefaultIndexDays, indexDaysHelp)
	f.Var(&valid, "valid", rootValidHelp)
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

func releaseRootSign(s *session) *cobra.Command {
	var key, begins string
	var out format
	cmd := &cobra.Command{
		Use:   "sign FILE --key FILE",
		Short: "Sign the newest version of a root",
		Long: `Sign the newest version of a root with a root key. The signature is added to the file.

Run it offline. Show the file before, and compare its digest with the other signers. With
--digest the command signs only if the digest begins with that text.`,
		Example: `  constellation release root show root.json
  constellation release root sign root.json --key ada.key --digest 3f1c22d09a5be817`,
		Args: oneArg(rootFileUse, rootFileFix),
		RunE: func(_ *cobra.Command, args []string) error {
			if key == "" {
				return &plan.Error{Op: "sign root " + args[0], Err: errors.New("--key is required"), Exit: plan.ExitUsage, Remedy: "name your private key with --key FILE"}
			}
			return rootResult(s, out, func() (engine.RootReport, error) { return engine.SignRoot(args[0], key, begins) })
		},
	}
	cmd.Flags().StringVar(&key, "key", "", "private key `file` of a root key")
	cmd.Flags().StringVar(&begins, "digest", "", "`text` that the digest must begin with")
	_ = cmd.MarkFlagFilename("key")
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

func releaseRootChange(s *session) *cobra.Command {
	var c engine.RootChange
	valid := days(engine.DefaultRootExpiry)
	var out format
	cmd := &cobra.Command{
		Use:   "change FILE",
		Short: "Add an unsigned version to a root",
		Long: `Add an unsigned version to a root. Without other flags it extends the validity.

Enough root keys of the version before and of the new version must sign it. Revoking an
index key refuses all publications from before, so publish again at once. The count of
publications may then start again.`,
		Example: `  constellation release root change root.json --revoke-index-key feed.key.pub --add-index-key spare.key.pub
  constellation release root change root.json --remove-root-key ada.key.pub --add-root-key dan.key.pub
  constellation release root change root.json --valid 365d`,
		Args: oneArg(rootFileUse, rootFileFix),
		RunE: func(_ *cobra.Command, args []string) error {
			c.File, c.Valid = args[0], time.Duration(valid)
			return rootResult(s, out, func() (engine.RootReport, error) { return engine.ChangeRoot(c) })
		},
	}
	f := cmd.Flags()
	f.StringArrayVar(&c.AddIndexKeys, "add-index-key", nil, "public key `file` that may sign publications from now on; may be repeated")
	f.StringArrayVar(&c.RevokeIndexKeys, "revoke-index-key", nil, "public key `file` or ID that may no longer sign publications; may be repeated")
	f.StringArrayVar(&c.AddKeys, "add-root-key", nil, "public key `file` of a new root key; may be repeated")
	f.StringArrayVar(&c.RemoveKeys, "remove-root-key", nil, "public key `file` or ID of a root key that is removed; may be repeated")
	f.IntVar(&c.Threshold, "threshold", 0, "`number` of root keys that must sign a change (default: unchanged)")
	f.IntVar(&c.IndexDays, "index-days", 0, indexDaysHelp+" (default: unchanged)")
	f.Var(&valid, "valid", rootValidHelp)
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

func releaseRootShow(s *session) *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use:   "show FILE",
		Short: "Show the newest version of a root and who signed it",
		Long: `Show the newest version of a root and who signed it. It also works for the root.json of a
feed. In JSON, missing is absent if the version is valid.`,
		Example: `  constellation release root show root.json
  constellation release root show feed/root.json -o json | jq .version`,
		Args: oneArg(rootFileUse, rootFileFix),
		RunE: func(_ *cobra.Command, args []string) error {
			return rootResult(s, out, func() (engine.RootReport, error) { return engine.ShowRoot(args[0]) })
		},
	}
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// rootResult prints the result of a command about a root.
func rootResult(s *session, out format, run func() (engine.RootReport, error)) error {
	r, err := run()
	if err != nil {
		return err
	}
	if out == asJSON {
		return document(s.out, r)
	}
	writeRoot(s.out, s.page(), &r)
	return nil
}

func writeRoot(out io.Writer, pg view.Page, r *engine.RootReport) {
	file := term.Clean(r.File)
	fmt.Fprintf(out, "root      %s: version %d of feed %s, valid until %s\n", file, r.Version, r.Identity[:16], minute(r.Expires))
	fmt.Fprintf(out, "digest    %s\n", r.Digest)
	fmt.Fprintf(out, "root keys %d of %d must sign a change: %s\n", r.Threshold, len(r.Keys), rootKeys(r.Keys))
	fmt.Fprintf(out, "index     %s, for %s at most\n", rootKeys(r.IndexKeys), words.Count(r.IndexDays, "day"))
	if r.Version > 1 {
		fmt.Fprintf(out, "since     publications from before %s are refused\n", minute(r.Since))
	}
	if r.Threshold == 1 {
		fmt.Fprintln(out, "warning   one stolen root key is enough to take over the feed")
	}
	signers := rootKeys(r.Signers)
	if signers == "" {
		signers = "nobody"
	}
	fmt.Fprintf(out, "signed    by %s\n", signers)
	if r.Missing != "" {
		fmt.Fprintf(out, "missing   %s\n", r.Missing)
		fmt.Fprintf(out, "next      %s\n", pg.Commands.Command("release root sign "+view.QuoteArg(r.File)+" --key FILE"))
		return
	}
	fmt.Fprintf(out, "next      %s\n", pg.Commands.Command("release build --from DIR --out DIR --key FILE --root "+view.QuoteArg(r.File)))
}

func rootKeys(keys []engine.RootKey) string {
	var out []string
	for _, k := range keys {
		out = append(out, fmt.Sprintf("%s (%s)", k.Name, k.ID))
	}
	return term.Clean(strings.Join(out, ", "))
}
