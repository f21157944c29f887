package tui

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
)

func (s *session) releaseCommand() *cobra.Command {
	cmd := group("release", "Show and verify releases, and publish your own",
		`Show which releases there are and what is in them, verify a feed of releases, and
publish one.

A feed is a folder, or an address, with signed files about releases. The program brings
with it what it knows; a feed adds newer releases, and what turned out to be faulty.`,
		`  constellation release list
  constellation release show v1.1.0
  constellation release verify https://releases.example.com/v1 --feed-key release.pub`)
	cmd.AddCommand(s.releaseList(), s.releaseShow(), s.releaseVerify(), s.releaseBuild(), s.releaseBundle(), s.releaseKey())
	return cmd
}

// feedFlags are those that say where releases are looked up.
func (s *session) feedFlags(cmd *cobra.Command, r *engine.FeedRequest) {
	cmd.Flags().StringVar(&r.Feed, "feed", "", "folder, https `address` or bundle:FILE of a feed (default: that of the configuration)")
	s.feedKeyFlag(cmd, &r.FeedKeys)
	_ = cmd.MarkFlagDirname("feed")
}

func (s *session) feedKeyFlag(cmd *cobra.Command, keys *[]string) {
	cmd.Flags().StringArrayVar(keys, "feed-key", nil, "`file` with a public key that the feed is signed with; may be repeated")
	_ = cmd.MarkFlagFilename("feed-key", "pub", "pem")
}

func (s *session) releaseList() *cobra.Command {
	var (
		r   engine.FeedRequest
		out format
	)
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the releases that are known",
		Long: `List the releases that are known, from the program and from the feed of the
configuration, if there is one. A feed that cannot be used is said to be so; then the
last good copy of it is used, or what the program brings with it.`,
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
			s.listText(&l)
			return nil
		},
	}
	s.feedFlags(cmd, &r)
	s.outputFlag(cmd, &out, "what to print: text, or json for one document")
	return cmd
}

// table writes rows of cells, cleaned, in columns; indent goes before each row.
func table(w io.Writer, indent string, rows [][]string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		for i, cell := range row {
			row[i] = oneLine(clean(cell))
		}
		fmt.Fprintln(t, indent+strings.TrimRight(strings.Join(row, "\t"), "\t"))
	}
	_ = t.Flush() // the writer below remembers what went wrong
}

func (s *session) listText(l *engine.ReleaseList) {
	rows := [][]string{{"RELEASE", "UPGRADE FROM", "KUBERNETES", "PATCHES", "PUBLISHED", "KNOWN FROM"}}
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
		rows = append(rows, []string{name, orElse(r.UpgradeFrom, "-"), span(r.Kubernetes), strconv.Itoa(len(r.Kubernetes)), day(r.Published), r.Source})
	}
	table(s.out, "", rows)
	for _, f := range faulty {
		fmt.Fprintf(s.out, "faulty  %s\n", oneLine(clean(f)))
	}
	s.feedText(l.Feed)
}

// span writes the first and the last of a list.
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
		return "not said"
	}
	return t.UTC().Format(time.DateOnly)
}

// minute is when a publication begins or ends.
func minute(t time.Time) string {
	if t.IsZero() {
		return "not said"
	}
	return t.UTC().Format("2006-01-02 15:04 UTC")
}

// feedText says where knowledge comes from.
func (s *session) feedText(f engine.FeedState) {
	embedded := f.Source == "embedded"
	switch {
	case embedded && f.Problem == "":
		fmt.Fprintln(s.out, "feed    none is configured: this is what the program brings with it")
	case embedded:
		fmt.Fprintln(s.out, "feed    cannot be used: this is what the program brings with it")
	case f.Stale:
		fmt.Fprintf(s.out, "feed    %s, publication %d, signed by %s: a copy of %s, stale\n", clean(f.Source), f.Sequence, clean(f.Signer), ago(f.Fetched, s.Now()))
	default:
		fmt.Fprintf(s.out, "feed    %s, publication %d, signed by %s\n", clean(f.Source), f.Sequence, clean(f.Signer))
	}
	if f.Problem != "" {
		fmt.Fprintf(s.out, "cause   %s\n", oneLine(clean(f.Problem)))
	}
	if f.Remedy != "" {
		fmt.Fprintf(s.out, "fix     %s\n", s.speller().text(oneLine(clean(f.Remedy))))
	}
}

func (s *session) releaseShow() *cobra.Command {
	var (
		r   engine.FeedRequest
		out format
	)
	cmd := &cobra.Command{
		Use:   "show VERSION",
		Short: "Show what is in a release",
		Long: `Show what is in a release: its services, the charts of others that it brings, the
patches of Kubernetes that it offers and what comes with each, where the program is, who
signed it, and for what no digest is known.`,
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
			s.showText(&d)
			return nil
		},
	}
	s.feedFlags(cmd, &r)
	s.outputFlag(cmd, &out, "what to print: text, or json for one document")
	return cmd
}

func (s *session) showText(d *engine.ReleaseDetail) {
	w := s.out
	from := d.Source
	if d.Signer != "" {
		from += ", signed by " + d.Signer
	}
	head := [][]string{
		{"release", d.Version},
		{"upgrade from", orElse(d.UpgradeFrom, "nothing")},
		{"published", day(d.Published)},
		{"known from", from},
		{"charts", strings.Join(d.Charts, ", ")},
		{"kinds", strings.Join(d.CRDs, ", ")},
	}
	if d.Faulty != "" {
		head = append(head, []string{"FAULTY", d.Faulty})
	}
	table(w, "", head)

	var all, known int
	var unknown []string
	digest := func(name, d string) string {
		if all++; d != "" {
			known++
			return d
		}
		unknown = append(unknown, name)
		return "digest not known"
	}
	fmt.Fprintln(w, "\nservices")
	var rows [][]string
	for _, v := range d.Services {
		switch {
		case v.Kind == engine.ServiceOfKubernetes:
			rows = append(rows, []string{v.Name, "-", "follows Kubernetes, see below"})
		case v.Image == "":
			rows = append(rows, []string{v.Name, v.Version.String(), "part of the OS image"})
		default:
			rows = append(rows, []string{v.Name, v.Version.String(), v.Image})
		}
	}
	table(w, "  ", rows)

	if len(d.ForeignCharts) > 0 {
		fmt.Fprintln(w, "\ncharts of others")
		rows = nil
		for _, c := range d.ForeignCharts {
			name := c.Name
			if c.Chart != c.Name {
				name += " (" + c.Chart + ")"
			}
			rows = append(rows, []string{name, c.Version, c.Source, c.Digest})
		}
		table(w, "  ", rows)
	}

	fmt.Fprintf(w, "\nkubernetes (a new cluster gets %s)\n", clean(d.DefaultKubernetes))
	rows = [][]string{{"PATCH", "ETCD", "COREDNS", "AUTOSCALER", "PAUSE", "CRICTL", "CNI PLUGINS"}}
	components := 0
	for _, p := range d.Patches {
		row := []string{p.Version.String(), p.Etcd, p.CoreDNS, orElse(p.Autoscaler, "-"), p.Pause, p.Crictl, p.CNIPlugins}
		if p.Faulty != "" {
			row = append(row, "FAULTY: "+p.Faulty)
		}
		rows = append(rows, row)
		for _, list := range p.Components {
			components += len(list)
		}
	}
	table(w, "  ", rows)

	fmt.Fprintln(w, "\nprogram")
	rows = nil
	for _, c := range d.Downloads {
		rows = append(rows, []string{c.OS + "/" + c.Arch, c.URL, digest(c.URL, c.Digest)})
	}
	if len(rows) == 0 {
		rows = [][]string{{"nobody said where it is"}}
	}
	table(w, "  ", rows)

	fmt.Fprintln(w, "\nOS images")
	rows = nil
	if d.Images != nil {
		for _, o := range d.Images.OS {
			rows = append(rows, []string{o.Provider, o.Reference, digest("OS image for "+o.Provider, o.Digest)})
		}
		for _, c := range d.Images.Containers {
			digest(c.Reference, c.Digest)
		}
	}
	if len(rows) == 0 {
		rows = [][]string{{"none is named"}}
	}
	table(w, "  ", rows)

	fmt.Fprintf(w, "\ndigests  all %d components of nodes have one; %d of %d images and programs have\n", components, known, all)
	for _, u := range byImage(unknown) {
		fmt.Fprintf(w, "  none for %s\n", u)
	}
	s.feedText(d.Feed)
}

// verified is the answer of release verify.
type verified struct {
	Schema string `json:"schema"`
	OK     bool   `json:"ok"`
	*engine.FeedReport
}

func (s *session) releaseVerify() *cobra.Command {
	var (
		keys []string
		out  format
	)
	cmd := &cobra.Command{
		Use:   "verify DIR-OR-URL",
		Short: "Verify every file of a feed",
		Long: `Verify every file of a feed: its signature, length, digest, name and content, and that
the feed has not expired. What has no digest of its own is named: what is fetched by
that name cannot be compared with anything.

The exit code is 1 if anything is wrong. Each file can be verified without this program
too: cosign verify-blob --key feed.key.pub --signature FILE.sig FILE`,
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
				if err := document(s.out, verified{engine.Schema, r.OK(), &r}); err != nil {
					return err
				}
			} else {
				s.verifyText(&r)
			}
			if !r.OK() {
				return exitStatus(engine.ExitFailed)
			}
			return nil
		},
	}
	s.feedKeyFlag(cmd, &keys)
	s.outputFlag(cmd, &out, "what to print: text, or json for one document")
	return cmd
}

func (s *session) verifyText(r *engine.FeedReport) {
	var rows [][]string
	wrong := len(r.Problems)
	for _, f := range r.Files {
		word, what := "ok", orElse(f.Signer, "-")
		if f.Problem != "" {
			wrong++
			word, what = "WRONG", f.Problem
		}
		rows = append(rows, []string{word, f.Name, strconv.FormatInt(f.Length, 10) + " B", what})
	}
	for _, p := range r.Problems {
		rows = append(rows, []string{"WRONG", "the feed", "", p})
	}
	table(s.out, "", rows)
	for _, n := range byImage(r.NoDigest) {
		fmt.Fprintf(s.out, "no digest  %s\n", n)
	}
	fmt.Fprintf(s.out, "feed    %s, publication %d, from %s to %s\n", clean(r.Source), r.Sequence, minute(r.Created), minute(r.Expires))
	signer := orElse(r.Signer, "nobody who is trusted")
	if r.KeySet > 0 {
		signer += fmt.Sprintf("; key set %d may sign: %s", r.KeySet, strings.Join(r.Keys, ", "))
	}
	fmt.Fprintf(s.out, "signed  by %s\n", clean(signer))
	verdict := count(len(r.Files), "file") + ", all is well"
	if wrong > 0 {
		verdict = count(len(r.Files), "file") + ", " + count(wrong, "problem")
	}
	if n := len(r.NoDigest); n > 0 {
		verdict += fmt.Sprintf("; %s without a digest cannot be compared with anything when fetched", count(n, "image or download"))
	}
	fmt.Fprintf(s.out, "result  %s\n", strings.Replace(verdict, "image or downloads", "images or downloads", 1))
	if r.Remedy != "" {
		fmt.Fprintf(s.out, "fix     %s\n", s.speller().text(oneLine(clean(r.Remedy))))
	}
}

// byImage folds the tags of one image into one line and cleans the rest.
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
			out = append(out, oneLine(clean(s)))
		case i == slices.IndexFunc(all, func(o string) bool { return image(o) == of }):
			out = append(out, fmt.Sprintf("%s, %d tags", oneLine(clean(strings.TrimSuffix(of, ":"))), tags[of]))
		}
	}
	return out
}

// days is a duration such as 30d, 36h or 90m.
type days time.Duration

func (d *days) String() string {
	if t := time.Duration(*d); t > 0 && t%(24*time.Hour) == 0 {
		return strconv.Itoa(int(t/(24*time.Hour))) + "d"
	}
	return time.Duration(*d).String()
}

func (*days) Type() string { return "days" }

func (d *days) Set(v string) error {
	if n, ok := strings.CutSuffix(v, "d"); ok {
		i, err := strconv.ParseUint(n, 10, 16)
		*d = days(time.Duration(i) * 24 * time.Hour)
		if err != nil {
			return errors.New("want a time such as 30d or 36h")
		}
		return nil
	}
	t, err := time.ParseDuration(v)
	if err != nil {
		return errors.New("want a time such as 30d or 36h")
	}
	*d = days(t)
	return nil
}

// publication is the answer of release build.
type publication struct {
	Schema string `json:"schema"`
	*engine.FeedPublication
}

func (s *session) releaseBuild() *cobra.Command {
	b := engine.FeedBuild{}
	expires := days(30 * 24 * time.Hour)
	var out format
	cmd := &cobra.Command{
		Use:   "build --from DIR --out DIR --key FILE",
		Short: "Publish releases as a signed feed",
		Long: `Publish the releases of a folder as a signed feed, another folder that any web server
can serve as it is. The folder to publish from holds:

  v1.1.0.yaml                          a release; it never changes once it is published
  v1.1.0/images.yaml                   os: [{provider, reference, digest}], and
                                       containers: {reference: digest} (optional)
  v1.1.0/downloads.yaml                [{os, arch, url, digest}] of the program (optional)
  v1.1.0/measurements/PROVIDER.json    what machines measure that boot the OS image (optional)
  v1.1.0/components/NAME.json          {kubernetes, arch, components}: a further list to sign,
                                       such as that of a mirror (optional)
  notices.yaml                         what turned out to be faulty (optional):

    schema: "1"
    faulty:
    - {release: v1.1.0, reason: forgets its keys}
    - {kubernetes: v1.35.4, reason: loses volumes}

A notice about what the folder does not hold is published too: a program that knows it
from elsewhere hears of it.

Everything is checked before anything is written, and the feed changes at once. Its
number goes on from the feed that is there. A release that was published cannot be
changed, and dropped only if notices.yaml says that it is faulty: the exit code is 4.

A feed ends by itself, so publish again before that, with or without changes. To change
keys, name all that may sign from now on with --trust, publish, and sign with the new
one the next time; who trusts the old one follows.`,
		Example: `  constellation release key new feed.key
  constellation release build --from releases --out feed --key feed.key
  constellation release build --from releases --out feed --key feed.key --trust feed.key.pub --trust next.key.pub`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			if b.From == "" || b.Out == "" || b.KeyFile == "" {
				return &engine.Error{Op: "publish releases", Err: errors.New("--from, --out and --key are needed"), Exit: engine.ExitUsage, Remedy: "see " + cmd.CommandPath() + " --help"}
			}
			b.Expires = time.Duration(expires)
			r, err := engine.BuildFeed(ctx, b)
			if err != nil {
				return err
			}
			if out == asJSON {
				return document(s.out, publication{engine.Schema, &r})
			}
			s.buildText(&r, b.KeyFile+".pub")
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&b.From, "from", "", "folder with releases, such as v1.1.0.yaml")
	f.StringVar(&b.Out, "out", "", "folder of the feed, which is replaced as a whole")
	f.StringVar(&b.KeyFile, "key", "", "`file` with the private key")
	f.StringArrayVar(&b.Trust, "trust", nil, "`file` with a public key that may sign from now on; may be repeated (default: as it was)")
	f.Var(&expires, "expires", "how long the publication is good for, such as 30d or 36h")
	_ = cmd.MarkFlagDirname("from")
	_ = cmd.MarkFlagDirname("out")
	_ = cmd.MarkFlagFilename("key")
	_ = cmd.MarkFlagFilename("trust", "pub", "pem")
	_ = cmd.RegisterFlagCompletionFunc("expires", fixed("7d", "30d", "90d"))
	s.outputFlag(cmd, &out, "what to print: text, or json for one document")
	return cmd
}

func (s *session) releaseBundle() *cobra.Command {
	r := engine.BundleRequest{}
	var out format
	cmd := &cobra.Command{
		Use:   "bundle --out FILE",
		Short: "Pack what an upgrade needs from outside into one file",
		Long: `Pack what an upgrade reads from outside into one file, where there is a network, and
carry it to where there is none. There, name it as feed: --feed bundle:FILE, or
releases.feed: bundle:FILE in the configuration.

It holds the whole feed, as its publisher signed it, and the charts that releases up to
--to and the configuration name, by digest. It does not hold the program, OS images,
container images, nor what nodes install: release show names them all, with digests.

The same contents make the same bytes. A bundle that was cut short or changed is refused.`,
		Example: `  constellation release bundle --out bundle.tar --to v1.1.0
  constellation upgrade check --feed bundle:bundle.tar --feed-key feed.key.pub`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			if r.Out == "" {
				return &engine.Error{Op: "pack a bundle", Err: errors.New("--out is needed"), Exit: engine.ExitUsage, Remedy: "name the file to write: --out bundle.tar"}
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
			fmt.Fprintf(s.out, "packed    %s: %s, sha256:%s\n", clean(b.File), bytesOf(b.Bytes), b.SHA256)
			fmt.Fprintf(s.out, "feed      %s\n", orElse(clean(b.Feed), "none: releases are those that come with the program"))
			var charts []string
			for _, c := range b.Charts {
				charts = append(charts, c.Name+" "+c.Version)
			}
			fmt.Fprintf(s.out, "charts    %s\n", orElse(clean(strings.Join(charts, ", ")), "none but those that come with the program"))
			fmt.Fprintf(s.out, "not in it the program, OS images, container images, and what nodes install\n")
			next := "upgrade check --feed " + quoteArg("bundle:"+b.File)
			for _, k := range r.FeedKeys {
				next += " --feed-key " + quoteArg(k)
			}
			fmt.Fprintf(s.out, "next      carry it over; there: %s\n", s.command(next))
			return nil
		},
	}
	cmd.Flags().StringVar(&r.Out, "out", "", "`file` to write")
	cmd.Flags().TextVar(&r.To, "to", r.To, "newest `release` that is wanted (default: all that are known)")
	s.feedFlags(cmd, &r.FeedRequest)
	_ = cmd.MarkFlagFilename("out", "tar")
	s.outputFlag(cmd, &out, "what to print: text, or json for one document")
	return cmd
}

func (s *session) buildText(r *engine.FeedPublication, public string) {
	fmt.Fprintf(s.out, "published %s in %s: publication %d, good until %s\n", count(len(r.Releases), "release"), clean(r.Out), r.Sequence, minute(r.Expires))
	fmt.Fprintf(s.out, "signed    by %s\n", clean(r.Signer))
	if r.KeySet > 0 {
		fmt.Fprintf(s.out, "keys      set %d: %s\n", r.KeySet, clean(strings.Join(r.Keys, ", ")))
	}
	if len(r.Added) > 0 {
		fmt.Fprintf(s.out, "added     %s\n", clean(strings.Join(r.Added, ", ")))
	}
	if len(r.Dropped) > 0 {
		fmt.Fprintf(s.out, "dropped   %s\n", clean(strings.Join(r.Dropped, ", ")))
	}
	for _, n := range r.Elsewhere {
		what := "which is not in this folder"
		if n.Release.IsZero() {
			what = "which no release in this folder offers"
		}
		fmt.Fprintf(s.out, "notice    about %s, %s: published for programs that know it\n", clean(n.String()), what)
	}
	if n := len(r.NoDigest); n > 0 {
		fmt.Fprintf(s.out, "no digest of %d images and downloads is known; verify names them\n", n)
	}
	fmt.Fprintf(s.out, "next      %s\n", s.command("release verify "+quoteArg(r.Out)+" --feed-key "+quoteArg(public)))
}

func (s *session) releaseKey() *cobra.Command {
	cmd := group("key", "Make keys for a feed", "Make keys that a feed is signed with.", "  constellation release key new feed.key")
	cmd.AddCommand(s.releaseKeyNew())
	return cmd
}

func (s *session) releaseKeyNew() *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use:   "new FILE",
		Short: "Make a pair of keys",
		Long: `Make a pair of keys (ECDSA P-256): the private one in FILE, readable by its owner alone
and not encrypted, the public one in FILE.pub. A file that is there is never replaced.`,
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
			fmt.Fprintf(s.out, "wrote %s, which signs: keep it to yourself, and a copy in a safe place\n", clean(k.Private))
			fmt.Fprintf(s.out, "wrote %s, key %s, which users of the feed need\n", clean(k.Public), k.ID)
			fmt.Fprintf(s.out, "next  %s\n", s.command("release build --from DIR --out DIR --key "+quoteArg(k.Private)))
			return nil
		},
	}
	s.outputFlag(cmd, &out, "what to print: text, or json for one document")
	return cmd
}
