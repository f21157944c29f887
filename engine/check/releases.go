package check

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"constellation/engine/plan"
	"constellation/engine/release"
)

// refuse reads the files of the releases on the path that are not in read. The path itself comes
// from Summaries alone. A release whose file differs from the published one is marked as faulty
// and is no upgrade target any more. refuse reports whether it marked one, because then the path
// changes. Releases embedded in the program, or read before, need no request.
func (c *Run) refuse(ctx context.Context, read map[string]bool) (refused bool) {
	ctx, cancel := context.WithTimeout(ctx, FeedLimit)
	defer cancel()
	for _, h := range c.Path {
		v := h.Planned().Services
		if read[v.String()] {
			continue
		}
		read[v.String()] = true
		_, err := c.Known.Release(ctx, v)
		if err == nil || errors.Is(err, release.ErrNotOffered) {
			continue
		}
		f := plan.Finding{
			ID: "feed-release", Severity: plan.NotChecked, Title: fmt.Sprintf("not checked whether the file of release %s is genuine", v), Detail: err.Error(),
			Remedy: FeedRemedy(err), Source: "release",
		}
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, release.ErrUnreachable) {
			f.Remedy = cmp.Or(f.Remedy, "check the address and the network, and try again")
			c.Find(f)
			continue // its summary is signed
		}
		f.Title = fmt.Sprintf("release %s is not offered: its file in the feed is unusable", v)
		if v.Equal(c.Request.Release) {
			f.Severity = plan.Block
		}
		f.Remedy = cmp.Or(f.Remedy, VerifyCommand(c.location, c.keys)+" says more")
		c.Find(f)
		c.Releases = slices.Clone(c.Releases) // shared slice
		for i := range c.Releases {
			if c.Releases[i].Version.Equal(v) {
				c.Releases[i].Faulty = "its file in the feed cannot be used"
			}
		}
		refused = true
	}
	return refused
}
