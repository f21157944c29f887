package tui

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/preferences"
	"constellation/tui/term"
)

const (
	// updateLimit bounds the request for the update notice.
	updateLimit = 10 * time.Second
	// updateGrace is how long the end of a command waits for the answer.
	updateGrace = 500 * time.Millisecond
)

// updateNotice looks for a newer release while a command runs.
type updateNotice struct {
	cancel context.CancelFunc
	// found gets the newer release, or is closed without one.
	found chan string
}

// noticesUpdates reports whether a command may look for a newer release: only those about a
// cluster, for a person at a terminal.
func noticesUpdates(cmd *cobra.Command, s *session) bool {
	top := cmd
	for top.HasParent() && top.Parent().HasParent() {
		top = top.Parent()
	}
	if top.HasParent() && top.GroupID != "cluster" || !term.IsTerminal(s.Stderr) || term.NotInteractive(s.Stdin, s.Stdout, s.Env) != "" {
		return false
	}
	if f := cmd.Flag("non-interactive"); f != nil && f.Value.String() == "true" {
		return false
	}
	if f := cmd.Flag("output"); f != nil && f.Value.String() != string(text) {
		return false
	}
	p, err := preferences.Read(s.Env)
	return err == nil && p.UpdateNotice
}

// startUpdateNotice looks for a newer release in the background; nil if the command must not.
func startUpdateNotice(cmd *cobra.Command, s *session) *updateNotice {
	if !noticesUpdates(cmd, s) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(cmd.Context()), updateLimit)
	n := &updateNotice{cancel, make(chan string, 1)}
	go func() {
		defer close(n.found)
		ws, _, err := s.workspace()
		if err != nil {
			return
		}
		newer, err := engine.NewerRelease(ctx, ws, s.Release, s.Now())
		if err != nil {
			s.log.Debug("update notice failed", "err", err)
		}
		if newer != "" {
			n.found <- newer
		}
	}()
	return n
}

// newer waits for the newer release until ctx ends; empty if there is none.
func (n *updateNotice) newer(ctx context.Context) string {
	if n == nil {
		return ""
	}
	select {
	case v := <-n.found:
		return v
	case <-ctx.Done():
		return ""
	}
}

// endUpdateNotice prints the newer release in one line.
func endUpdateNotice(s *session) {
	if s.update == nil {
		return
	}
	defer s.update.cancel()
	ctx, cancel := context.WithTimeout(context.Background(), updateGrace)
	defer cancel()
	if v := s.update.newer(ctx); v != "" {
		s.remark("release %s is available, this is %s; see %s", v, s.Release, s.command("release show "+v))
	}
}
