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

// refuse reads the files of the releases that the path leads to, which was found by
// Summaries alone, and that are not in read. A release whose file is not the one that was
// published is marked as faulty, so that it is nobody's goal; refuse reports whether there
// is one: then there is another path. What the program brings with it and what was read
// before needs no request.
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
			f.Remedy = cmp.Or(f.Remedy, "look at the address and the network, and try again")
			c.Find(f)
			continue // its summary is signed
		}
		f.Title = fmt.Sprintf("release %s is not gone to: its file in the feed cannot be used", v)
		if v.Equal(c.Request.Release) {
			f.Severity = plan.Block
		}
		f.Remedy = cmp.Or(f.Remedy, VerifyCommand(c.location, c.keys)+" says more")
		c.Find(f)
		c.Releases = slices.Clone(c.Releases) // they are shared
		for i := range c.Releases {
			if c.Releases[i].Version.Equal(v) {
				c.Releases[i].Faulty = "its file in the feed cannot be used"
			}
		}
		refused = true
	}
	return refused
}
