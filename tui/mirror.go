package tui

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/mirror"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
)

func releaseMirror(s *session) *cobra.Command {
	r := engine.MirrorRequest{}
	var out format
	cmd := &cobra.Command{
		Use:   "mirror --from FOLDER|REGISTRY --to FOLDER|REGISTRY",
		Short: "Copy a whole release to a registry or folder",
		Long: `Copy a release by digest: container images with signatures and SBOMs, charts, files, and the
feed. A registry is written as oci://registry.example.com/path, everything else is a folder. A
mirror can be the source of the next one: copy to a folder, carry it, copy it to a registry.

The signed contents of the release name all that is copied, so a mirror adds no trust. The
command can be repeated: it skips what exists and continues a download that was cut.

With --kubernetes it also copies the images that kubeadm of a version deploys, to kubernetes
below the destination. They come from the source if it is a mirror that has them, else from
their publisher. Clusters pull them there if the configuration names the mirror as registry.

Credentials are those of docker login and helm registry login.`,
		Example: `  constellation release mirror --from bin/release --to oci://registry.example.com/constellation --key release.pub
  constellation release mirror --from oci://registry.example.com/constellation --release v1.1.0 --to carry --key release.pub
  constellation release mirror --from carry --to oci://registry.example.com/constellation --key release.pub --kubernetes v1.36.4,v1.37.2`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			for _, f := range [][2]string{{"--from", r.From}, {"--to", r.To}} {
				if f[1] == "" {
					return &plan.Error{Op: "mirror release", Err: errors.New(f[0] + " is required"), Exit: plan.ExitUsage, Remedy: "name a folder, or a registry such as oci://registry.example.com/constellation"}
				}
			}
			if strings.HasPrefix(r.From, mirror.Scheme) && r.Release == "" {
				r.Release = s.Release
			}
			w, _, err := s.workspace()
			if err != nil {
				return err
			}
			progress := mirrorProgress(s)
			if out == asJSON {
				progress = nil
			}
			m, err := engine.MirrorRelease(ctx, w, r, progress)
			if err != nil {
				return err
			}
			if out == asJSON {
				return document(s.out, m)
			}
			fmt.Fprintf(s.out, "mirrored  release %s in %s: %s, %s transferred\n", term.Clean(m.Release), term.Clean(m.To), words.Count(m.Artifacts+m.Files+m.FeedFiles+len(m.Images), "part"), term.Bytes(m.Bytes))
			if m.Signer != "" {
				fmt.Fprintf(s.out, "signed    by %s\n", term.Clean(m.Signer))
			} else {
				fmt.Fprintf(s.out, "signed    not verified (--unsigned)\n")
			}
			if len(m.Images) > 0 {
				fmt.Fprintf(s.out, "images    %d of Kubernetes\n", len(m.Images))
			}
			fmt.Fprintf(s.out, "feed      %s\n", cmp.Or(term.Clean(m.Feed), "none"))
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&r.From, "from", "", "`folder` or oci:// registry that has the release")
	f.StringVar(&r.To, "to", "", "`folder` or oci:// registry to copy it to")
	f.StringVar(&r.Release, "release", "", "`release` to copy from a registry (default: that of this program)")
	f.StringSliceVar(&r.Kubernetes, "kubernetes", nil, "`versions` of Kubernetes whose images are copied too, separated by commas; may be repeated")
	f.StringVar(&r.KubernetesFrom, "kubernetes-from", "", "`folder` or oci:// registry that has these images (default: that of --from, else their publisher's)")
	f.StringArrayVar(&r.Keys, "key", nil, "public key `file` of the publisher (default: the keys in this program)")
	f.BoolVar(&r.Unsigned, "unsigned", false, "accept a release without a verified signature, such as your own build")
	cmd.MarkFlagsMutuallyExclusive("key", "unsigned")
	feedFlags(cmd, &r.FeedRequest)
	for _, name := range []string{"from", "to", "kubernetes-from"} {
		_ = cmd.MarkFlagDirname(name)
	}
	_ = cmd.MarkFlagFilename("key", "pub", "pem")
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// mirrorPace is the least time between two lines about a transfer under way.
const mirrorPace = 5 * time.Second

// mirrorProgress prints a line for each finished part, and some during long transfers.
func mirrorProgress(s *session) func(mirror.Progress) {
	last := s.Now()
	return func(p mirror.Progress) {
		now := s.Now()
		switch {
		case p.Part != "":
			fmt.Fprintf(s.out, "copied    %d of %d: %s\n", p.Parts, p.Total, term.Clean(p.Part))
		case now.Sub(last) >= mirrorPace:
			fmt.Fprintf(s.out, "copying   %d of %d: %s transferred\n", p.Parts+1, p.Total, term.Bytes(p.Bytes))
		default:
			return
		}
		last = now
	}
}
