package tui

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

func releaseCommand(s *session) *cobra.Command {
	cmd := group("release", "List, show, verify and publish releases",
		`List releases, show their contents, verify a release feed, and publish one.

A feed is a folder or an https address with signed release files. The program embeds the
releases that were known when it was built. A feed adds newer releases and notices about
faulty ones.`,
		`  constellation release list
  constellation release show v1.1.0
  constellation release verify https://releases.example.com/v1 --feed-key release.pub`)
	cmd.AddCommand(releaseList(s), releaseShow(s), releaseVerify(s), releaseBuild(s), releaseBundle(s), releaseMirror(s), releaseKey(s), releaseRoot(s))
	return cmd
}

func releaseList(s *session) *cobra.Command {
	var (
		r   engine.FeedRequest
		out format
	)
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List known releases",
		Long: `List the releases that are embedded in the program or published by the configured feed.
If the feed cannot be used, the command reports why and falls back to the last verified
copy of the feed, or to the embedded releases.`,
		Example: `  constellation release list
  constellation release list --feed ./feed --feed-key feed.key.pub
  constellation release list -o json | jq -r '.releases[].version'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ws, _, err := s.workspace()
			if err != nil {
				return err
			}
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			l, err := engine.ListReleases(ctx, ws, r)
			if err != nil {
				return usage(err)
			}
			if out == asJSON {
				return document(s.out, l)
			}
			writeReleases(s.out, s.page(), &l)
			return nil
		},
	}
	feedFlags(cmd, &r)
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// table writes rows in aligned columns. It cleans every cell and puts indent before each
// row.
func table(w io.Writer, indent string, rows [][]string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		for i, cell := range row {
			row[i] = term.OneLine(term.Clean(cell))
		}
		fmt.Fprintln(t, indent+strings.TrimRight(strings.Join(row, "\t"), "\t"))
	}
	_ = t.Flush() // w, a guarded, keeps the error
}

func writeReleases(out io.Writer, pg view.Page, l *engine.ReleaseList) {
	rows := [][]string{{"RELEASE", "UPGRADE FROM", "KUBERNETES", "PATCHES", "PUBLISHED", "SOURCE"}}
	var faulty []string
	for _, r := range l.Releases {
		name := r.Version
		if r.Faulty != "" {
			name += " (faulty)"
			faulty = append(faulty, r.Version+": "+r.Faulty)
		}
		for _, v := range slices.Sorted(maps.Keys(r.FaultyKubernetes)) {
			faulty = append(faulty, fmt.Sprintf("Kubernetes %s in %s: %s", v, r.Version, r.FaultyKubernetes[v]))
		}
		rows = append(rows, []string{name, cmp.Or(r.UpgradeFrom, "-"), span(r.Kubernetes), strconv.Itoa(len(r.Kubernetes)), day(r.Published), r.Source})
	}
	table(out, "", rows)
	for _, f := range faulty {
		fmt.Fprintf(out, "faulty  %s\n", term.OneLine(term.Clean(f)))
	}
	writeFeed(out, pg, l.Feed)
}

// span returns the first and the last entry of a list.
func span(list []string) string {
	switch len(list) {
	case 0:
		return "-"
	case 1:
		return list[0]
	}
	return list[0] + " to " + list[len(list)-1]
}

func day(t time.Time) string {
	if t.IsZero() {
		return "unknown"
	}
	return t.UTC().Format(time.DateOnly)
}

// minute formats a time to the minute.
func minute(t time.Time) string {
	if t.IsZero() {
		return "unknown"
	}
	return t.UTC().Format("2006-01-02 15:04 UTC")
}

// writeFeed prints the source of the release data.
func writeFeed(out io.Writer, pg view.Page, f check.FeedState) {
	embedded := f.Source == "embedded"
	switch {
	case embedded && f.Problem == "":
		fmt.Fprintln(out, "feed    none configured: showing embedded releases")
	case embedded:
		fmt.Fprintln(out, "feed    unusable: showing embedded releases")
	case f.Stale:
		fmt.Fprintf(out, "feed    %s, publication %d, signed by %s: stale copy, fetched %s\n", term.Clean(f.Source), f.Sequence, term.Clean(f.Signer), term.Ago(f.Fetched, pg.Now))
	default:
		fmt.Fprintf(out, "feed    %s, publication %d, signed by %s\n", term.Clean(f.Source), f.Sequence, term.Clean(f.Signer))
	}
	writeWarning(out, "warning ", f.Warning)
	if f.Problem != "" {
		fmt.Fprintf(out, "cause   %s\n", term.OneLine(term.Clean(f.Problem)))
	}
	if f.Remedy != "" {
		fmt.Fprintf(out, "fix     %s\n", pg.Commands.Text(term.OneLine(term.Clean(f.Remedy))))
	}
}

// writeWarning prints a weakness of a feed after a label, if there is one.
func writeWarning(out io.Writer, label, warning string) {
	if warning != "" {
		fmt.Fprintf(out, "%s%s\n", label, term.OneLine(term.Clean(warning)))
	}
}

func releaseShow(s *session) *cobra.Command {
	var (
		r   engine.FeedRequest
		out format
	)
	cmd := &cobra.Command{
		Use:   "show VERSION",
		Short: "Show the contents of a release",
		Long: `Show the contents of a release: services, third-party charts, supported Kubernetes patch
versions with their components, download addresses, the signer, and all artifacts without
a known digest.`,
		Example: `  constellation release show v1.1.0
  constellation release show v1.1.0 -o json | jq '.patches[].version'`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: fixed(s.Releases...),
		RunE: func(cmd *cobra.Command, args []string) error {
			ws, _, err := s.workspace()
			if err != nil {
				return err
			}
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			d, err := engine.ShowRelease(ctx, ws, args[0], r)
			if err != nil {
				return usage(err)
			}
			if out == asJSON {
				return document(s.out, d)
			}
			writeRelease(s.out, s.page(), &d)
			return nil
		},
	}
	feedFlags(cmd, &r)
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

func writeRelease(out io.Writer, pg view.Page, d *engine.ReleaseDetail) {
	from := d.Source
	if d.Signer != "" {
		from += ", signed by " + d.Signer
	}
	head := [][]string{
		{"release", d.Version},
		{"upgrade from", cmp.Or(d.UpgradeFrom, "none")},
		{"published", day(d.Published)},
		{"source", from},
		{"charts", strings.Join(d.Charts, ", ")},
		{"CRDs", strings.Join(d.CRDs, ", ")},
	}
	if d.Faulty != "" {
		head = append(head, []string{"FAULTY", d.Faulty})
	}
	table(out, "", head)

	var digests digestCount
	fmt.Fprintln(out, "\nservices")
	table(out, "  ", serviceRows(d))

	if len(d.ForeignCharts) > 0 {
		fmt.Fprintln(out, "\nthird-party charts")
		var rows [][]string
		for _, c := range d.ForeignCharts {
			name := c.Name
			if c.Chart != c.Name {
				name += " (" + c.Chart + ")"
			}
			rows = append(rows, []string{name, c.Version, c.Source, c.Digest})
		}
		table(out, "  ", rows)
	}

	fmt.Fprintf(out, "\nkubernetes (default for new clusters: %s)\n", term.Clean(d.DefaultKubernetes))
	patches, components := patchRows(d)
	table(out, "  ", patches)

	fmt.Fprintln(out, "\nprogram")
	var rows [][]string
	for _, c := range d.Downloads {
		rows = append(rows, []string{c.OS + "/" + c.Arch, c.URL, digests.of(c.URL, c.Digest)})
	}
	if len(rows) == 0 {
		rows = [][]string{{"no download address"}}
	}
	table(out, "  ", rows)

	fmt.Fprintln(out, "\nOS images")
	rows = nil
	if d.Images != nil {
		for _, o := range d.Images.OS {
			rows = append(rows, []string{o.Provider, o.Reference, digests.of("OS image for "+o.Provider, o.Digest)})
		}
		for _, c := range d.Images.Containers {
			digests.of(c.Reference, c.Digest)
		}
	}
	if len(rows) == 0 {
		rows = [][]string{{"none listed"}}
	}
	table(out, "  ", rows)

	fmt.Fprintf(out, "\ndigests  known for all %d node components and for %d of %d images and downloads\n", components, digests.known, digests.all)
	for _, u := range byImage(digests.unknown) {
		fmt.Fprintf(out, "  missing for %s\n", u)
	}
	writeFeed(out, pg, d.Feed)
}

// digestCount counts the images and downloads whose digest is known.
type digestCount struct {
	all, known int
	unknown    []string // names
}

// of counts digest, which is empty if it is unknown, and returns it for the page.
func (c *digestCount) of(name, digest string) string {
	if c.all++; digest != "" {
		c.known++
		return digest
	}
	c.unknown = append(c.unknown, name)
	return "no known digest"
}

func serviceRows(d *engine.ReleaseDetail) (rows [][]string) {
	for _, v := range d.Services {
		switch {
		case v.Kind == cluster.ServiceOfKubernetes:
			rows = append(rows, []string{v.Name, "-", "same version as Kubernetes, see below"})
		case v.Image == "":
			rows = append(rows, []string{v.Name, v.Version.String(), "part of the OS image"})
		default:
			rows = append(rows, []string{v.Name, v.Version.String(), v.Image})
		}
	}
	return rows
}

// patchRows are the patches of Kubernetes, and the number of their components.
func patchRows(d *engine.ReleaseDetail) (rows [][]string, components int) {
	rows = [][]string{{"PATCH", "ETCD", "COREDNS", "AUTOSCALER", "PAUSE", "CRICTL", "CNI PLUGINS"}}
	for _, p := range d.Patches {
		row := []string{p.Version.String(), p.Etcd, p.CoreDNS, cmp.Or(p.Autoscaler, "-"), p.Pause, p.Crictl, p.CNIPlugins}
		if p.Faulty != "" {
			row = append(row, "FAULTY: "+p.Faulty)
		} else if p.Unpinned != "" {
			row[len(row)-2], row[len(row)-1] = "-", "-"
			row = append(row, "no components: "+term.Clean(p.Unpinned))
		}
		rows = append(rows, row)
		for _, list := range p.Components {
			components += len(list)
		}
	}
	return rows, components
}

// verified is the JSON output of release verify.
type verified struct {
	Schema string `json:"schema"`
	OK     bool   `json:"ok"`
	*engine.FeedReport
}

func releaseVerify(s *session) *cobra.Command {
	var (
		keys []string
		out  format
	)
	cmd := &cobra.Command{
		Use:   "verify DIR-OR-URL",
		Short: "Verify every file of a release feed",
		Long: `Verify every file of a release feed: signature, length, digest, name and content, and that
the feed has not expired. The command lists images and downloads without a digest, because
they cannot be verified when they are fetched.

The exit code is 1 if a file is invalid. You can also verify each file without this
program: cosign verify-blob --key feed.key.pub --signature FILE.sig FILE`,
		Example: `  constellation release verify ./feed --feed-key feed.key.pub
  constellation release verify https://releases.example.com/v1 --feed-key feed.key.pub -o json | jq .ok`,
		Args: cobra.ExactArgs(1),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveFilterDirs
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			r, err := engine.VerifyFeed(ctx, args[0], keys)
			if err != nil {
				return err
			}
			if out == asJSON {
				if err := document(s.out, verified{plan.Schema, r.OK(), &r}); err != nil {
					return err
				}
			} else {
				writeVerified(s.out, s.page(), &r)
			}
			if !r.OK() {
				return exitStatus(plan.ExitFailed)
			}
			return nil
		},
	}
	feedKeyFlag(cmd, &keys)
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

func writeVerified(out io.Writer, pg view.Page, r *engine.FeedReport) {
	var rows [][]string
	wrong := len(r.Problems)
	for _, f := range r.Files {
		state, detail := "ok", cmp.Or(f.Signer, "-")
		if f.Problem != "" {
			wrong++
			state, detail = "INVALID", f.Problem
		}
		rows = append(rows, []string{state, f.Name, strconv.FormatInt(f.Length, 10) + " B", detail})
	}
	for _, p := range r.Problems {
		rows = append(rows, []string{"INVALID", "the feed", "", p})
	}
	table(out, "", rows)
	for _, n := range byImage(r.NoDigest) {
		fmt.Fprintf(out, "no digest  %s\n", n)
	}
	fmt.Fprintf(out, "feed    %s, publication %d, from %s to %s\n", term.Clean(r.Source), r.Sequence, minute(r.Created), minute(r.Expires))
	signer := cmp.Or(r.Signer, "no trusted key")
	if r.KeySet > 0 {
		signer += fmt.Sprintf("; key set %d is trusted: %s", r.KeySet, strings.Join(r.Keys, ", "))
	}
	if r.Root > 0 {
		signer += fmt.Sprintf("; version %d of the root allows: %s", r.Root, strings.Join(r.Keys, ", "))
	}
	fmt.Fprintf(out, "signed  by %s\n", term.Clean(signer))
	writeWarning(out, "warning ", r.Warning)
	verdict := words.Count(len(r.Files), "file") + ", all valid"
	if wrong > 0 {
		verdict = words.Count(len(r.Files), "file") + ", " + words.Count(wrong, "problem")
	}
	if n := len(r.NoDigest); n > 0 {
		verdict += fmt.Sprintf("; %s without a digest cannot be verified when fetched", words.Count(n, "image or download"))
	}
	fmt.Fprintf(out, "result  %s\n", strings.Replace(verdict, "image or downloads", "images or downloads", 1))
	if r.Remedy != "" {
		fmt.Fprintf(out, "fix     %s\n", pg.Commands.Text(term.OneLine(term.Clean(r.Remedy))))
	}
}

// byImage merges all tags of one image into one line and cleans every line.
func byImage(all []string) []string {
	tags := map[string]int{}
	image := func(s string) string {
		if strings.ContainsAny(s, " @") || strings.Contains(s, "://") {
			return s // an OS image or a download
		}
		return s[:strings.LastIndexByte(s, ':')+1]
	}
	for _, s := range all {
		tags[image(s)]++
	}
	var out []string
	for i, s := range all {
		switch of := image(s); {
		case tags[of] == 1:
			out = append(out, term.OneLine(term.Clean(s)))
		case i == slices.IndexFunc(all, func(o string) bool { return image(o) == of }):
			out = append(out, fmt.Sprintf("%s, %d tags", term.OneLine(term.Clean(strings.TrimSuffix(of, ":"))), tags[of]))
		}
	}
	return out
}

// publication is the JSON output of release build.
type publication struct {
	Schema string `json:"schema"`
	*engine.FeedPublication
}

func releaseBuild(s *session) *cobra.Command {
	b := engine.FeedBuild{}
	expires := days(30 * 24 * time.Hour)
	var out format
	cmd := &cobra.Command{
		Use:   "build --from DIR --out DIR --key FILE",
		Short: "Publish releases as a signed feed",
		Long: `Publish the releases of a folder as a signed feed. The feed is a folder of static files
that any web server can serve. The source folder holds:

  v1.1.0.yaml                          a release; it must not change once published
  v1.1.0/images.yaml                   os: [{provider, reference, digest}], and
                                       containers: {reference: digest} (optional)
  v1.1.0/downloads.yaml                [{os, arch, url, digest}] of the program (optional)
  v1.1.0/measurements/PROVIDER.json    reference measurements of the OS image (optional)
  v1.1.0/components/NAME.json          {kubernetes, arch, components}: a further list to sign,
                                       such as that of a mirror (optional)
  notices.yaml                         faulty releases and Kubernetes versions (optional):

    schema: "1"
    faulty:
    - {release: v1.1.0, reason: forgets its keys}
    - {kubernetes: v1.35.4, reason: loses volumes}

A notice may name a release that the folder does not hold, for programs that know the
release from another source.

The command validates everything before it writes, and replaces the feed atomically. The
publication number continues from the existing feed. A published release must not change,
and may be removed only if notices.yaml declares it faulty; otherwise the exit code is 4.

A feed expires, so publish again before that, even without changes.

With --root the feed has a root: several people sign with keys that stay offline which key
may sign publications (see release root). The root stays part of the feed. Without a root,
pass every key that may sign from now on with --trust to rotate keys, publish, and sign the
next publication with the new key. Clients refuse feeds without a root from 2027-12-01.`,
		Example: `  constellation release key new feed.key
  constellation release build --from releases --out feed --key feed.key --root root.json
  constellation release build --from releases --out feed --key feed.key
  constellation release build --from releases --out feed --key feed.key --trust feed.key.pub --trust next.key.pub`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			if b.From == "" || b.Out == "" || b.KeyFile == "" {
				return &plan.Error{Op: "publish releases", Err: errors.New("--from, --out and --key are required"), Exit: plan.ExitUsage, Remedy: "see " + cmd.CommandPath() + " --help"}
			}
			if cmd.Flags().Changed("expires") { // the root may allow less than the default
				b.Expires = time.Duration(expires)
			}
			r, err := engine.BuildFeed(ctx, b)
			if err != nil {
				return err
			}
			if out == asJSON {
				return document(s.out, publication{plan.Schema, &r})
			}
			public := b.KeyFile + ".pub"
			if r.Root > 0 {
				public = filepath.Join(r.Out, "root.json")
			}
			writePublication(s.out, s.page(), &r, public)
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&b.From, "from", "", "source `folder` with releases such as v1.1.0.yaml")
	f.StringVar(&b.Out, "out", "", "`folder` of the feed; replaced as a whole")
	f.StringVar(&b.KeyFile, "key", "", "private key `file`")
	f.StringArrayVar(&b.Trust, "trust", nil, "public key `file` that may sign from now on; may be repeated (default: unchanged)")
	f.StringVar(&b.Root, "root", "", "root `file` of the feed from now on (default: unchanged)")
	f.Var(&expires, "expires", "validity of the publication, such as 30d or 36h")
	_ = cmd.MarkFlagFilename("root", "json")
	_ = cmd.MarkFlagDirname("from")
	_ = cmd.MarkFlagDirname("out")
	_ = cmd.MarkFlagFilename("key")
	_ = cmd.MarkFlagFilename("trust", "pub", "pem")
	_ = cmd.RegisterFlagCompletionFunc("expires", fixed("7d", "30d", "90d"))
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

func releaseBundle(s *session) *cobra.Command {
	r := engine.BundleRequest{}
	var out format
	cmd := &cobra.Command{
		Use:   "bundle --out FILE",
		Short: "Bundle feed and charts for an air-gapped upgrade",
		Long: `Pack the release feed and charts into one file for an air-gapped (offline) upgrade. Copy
the file to the offline side and pass it with --feed bundle:FILE, or set releases.feed to
bundle:FILE in the configuration.

The bundle holds the whole signed feed, and the charts of the configuration and of all
releases up to --to, pinned by digest. It does not hold the program, OS images, container
images or node components; release show lists them with their digests.

Bundles are reproducible: the same contents give the same bytes. A truncated or modified
bundle is rejected.`,
		Example: `  constellation release bundle --out bundle.tar --to v1.1.0
  constellation upgrade check --feed bundle:bundle.tar --feed-key feed.key.pub`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			if r.Out == "" {
				return &plan.Error{Op: "create bundle", Err: errors.New("--out is required"), Exit: plan.ExitUsage, Remedy: "name the file to write: --out bundle.tar"}
			}
			w, _, err := s.workspace()
			if err != nil {
				return err
			}
			b, err := engine.MakeBundle(ctx, w, r)
			if err != nil {
				return err
			}
			if out == asJSON {
				return document(s.out, b)
			}
			fmt.Fprintf(s.out, "packed    %s: %s, sha256:%s\n", term.Clean(b.File), term.Bytes(b.Bytes), b.SHA256)
			fmt.Fprintf(s.out, "feed      %s\n", cmp.Or(term.Clean(b.Feed), "none: embedded releases only"))
			var charts []string
			for _, c := range b.Charts {
				charts = append(charts, c.Name+" "+c.Version)
			}
			fmt.Fprintf(s.out, "charts    %s\n", cmp.Or(term.Clean(strings.Join(charts, ", ")), "embedded charts only"))
			fmt.Fprintf(s.out, "excluded  the program, OS images, container images, node components\n")
			next := "upgrade check --feed " + view.QuoteArg("bundle:"+b.File)
			for _, k := range r.FeedKeys {
				next += " --feed-key " + view.QuoteArg(k)
			}
			fmt.Fprintf(s.out, "next      copy the file to the offline side and run: %s\n", s.command(next))
			return nil
		},
	}
	cmd.Flags().StringVar(&r.Out, "out", "", "`file` to write")
	cmd.Flags().TextVar(&r.To, "to", r.To, "newest `release` to include (default: all)")
	feedFlags(cmd, &r.FeedRequest)
	_ = cmd.MarkFlagFilename("out", "tar")
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

func writePublication(out io.Writer, pg view.Page, r *engine.FeedPublication, public string) {
	fmt.Fprintf(out, "published %s in %s: publication %d, valid until %s\n", words.Count(len(r.Releases), "release"), term.Clean(r.Out), r.Sequence, minute(r.Expires))
	fmt.Fprintf(out, "signed    by %s\n", term.Clean(r.Signer))
	switch {
	case r.Root > 0:
		fmt.Fprintf(out, "keys      version %d of the root: %s\n", r.Root, term.Clean(strings.Join(r.Keys, ", ")))
	case r.KeySet > 0:
		fmt.Fprintf(out, "keys      set %d: %s\n", r.KeySet, term.Clean(strings.Join(r.Keys, ", ")))
	}
	writeWarning(out, "warning   ", r.Warning)
	if len(r.Added) > 0 {
		fmt.Fprintf(out, "added     %s\n", term.Clean(strings.Join(r.Added, ", ")))
	}
	if len(r.Dropped) > 0 {
		fmt.Fprintf(out, "dropped   %s\n", term.Clean(strings.Join(r.Dropped, ", ")))
	}
	for _, n := range r.Elsewhere {
		absent := "not in this folder"
		if n.Release.IsZero() {
			absent = "not offered by a release in this folder"
		}
		fmt.Fprintf(out, "notice    %s: %s, published for programs that know it\n", term.Clean(n.String()), absent)
	}
	if n := len(r.NoDigest); n > 0 {
		fmt.Fprintf(out, "no digest known for %d images and downloads; release verify lists them\n", n)
	}
	fmt.Fprintf(out, "next      %s\n", pg.Commands.Command("release verify "+view.QuoteArg(r.Out)+" --feed-key "+view.QuoteArg(public)))
}

func releaseKey(s *session) *cobra.Command {
	cmd := group("key", "Create signing keys for a feed", "Create the key pairs that sign a release feed.", "  constellation release key new feed.key")
	cmd.AddCommand(releaseKeyNew(s))
	return cmd
}

func releaseKeyNew(s *session) *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use:   "new FILE",
		Short: "Create a key pair",
		Long: `Create an ECDSA P-256 key pair: the private key in FILE, with mode 0600 and not encrypted,
and the public key in FILE.pub. Existing files are never replaced.`,
		Example: `  constellation release key new feed.key`,
		Args:    cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			k, err := engine.NewFeedKey(args[0])
			if err != nil {
				return err
			}
			if out == asJSON {
				return document(s.out, k)
			}
			fmt.Fprintf(s.out, "wrote %s, the private key: keep it secret, and store a copy in a safe place\n", term.Clean(k.Private))
			fmt.Fprintf(s.out, "wrote %s, the public key %s for users of the feed\n", term.Clean(k.Public), k.ID)
			fmt.Fprintf(s.out, "next  %s\n", s.command("release build --from DIR --out DIR --key "+view.QuoteArg(k.Private)))
			return nil
		},
	}
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}
