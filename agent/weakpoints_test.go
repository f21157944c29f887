//go:build linux

package agent

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/agent/upgradeproto"
	"constellation/internal/testneeds"
)

// Weak points of another agent, each as a test that fails on the way it does things.
// Package operator has the operator's.

// The old way: kubeadm is a child of the request, and killed when the connection is
// cut, which the restart of the API server that kubeadm itself brings about can cause.
// TestKilledAgentGoesOn and TestStoppedAgentLeavesKubeadmAlone say the same of the agent.
func TestWeakPointR8CutConnectionEndsNothing(t *testing.T) {
	r := newRig(t, true)
	r.script("hang-apply", "")
	c := r.inside()
	ctx, cut := context.WithCancel(t.Context())
	s, err := c.Upgrade(ctx, r.request("t1"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); err != nil {
		t.Fatal(err)
	}
	r.hangs("apply")
	cut()
	if _, err := collect(s, nil); status.Code(err) != codes.Canceled {
		t.Errorf("the stream ended with %v", err)
	}
	r.release()
	// Nobody follows it, and it goes on to its end.
	until(t, "the run has succeeded", func() bool {
		s, err := c.Status(t.Context(), &upgradeproto.StatusRequest{})
		if err == nil && s.Run.State == upgradeproto.Run_FAILED {
			t.Fatalf("run: %v", s.Run)
		}
		return err == nil && s.Run.State == upgradeproto.Run_SUCCEEDED
	})
	all, err := collect(c.Upgrade(t.Context(), r.request("t1")))
	if err != nil || outline(all) != straight {
		t.Errorf("%v\n%s", err, outline(all))
	}
	if d := r.deeds(); d != "plan apply restart-kubelet" {
		t.Errorf("deeds: %s", d)
	}
}

// The old way: everything at the socket's path is removed, the socket is open to whoever
// comes, and URL, digest, path and version are the caller's, who may leave the digest out
// and go down. TestRequestsAreRefused has more of what is refused.
func TestWeakPointR9CallersAreNotTrusted(t *testing.T) {
	t.Run("what is at the socket's path stays", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "a.sock")
		write(t, path, "precious", "mine", 0o600)
		if _, err := listen(t.Context(), path, 0); err == nil || !strings.Contains(err.Error(), "no socket") {
			t.Errorf("listen: %v, want a refusal", err)
		}
		if b, err := os.ReadFile(filepath.Join(path, "precious")); err != nil || string(b) != "mine" {
			t.Errorf("the directory's file: %q, %v", b, err)
		}
	})
	t.Run("the socket is its owner's, and others are hung up on", func(t *testing.T) {
		socket := filepath.Join(t.TempDir(), "s", "a.sock")
		l, err := listen(t.Context(), socket, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		i, err := os.Lstat(socket)
		if err != nil || i.Mode().Perm() != 0o600 {
			t.Errorf("socket %v, %v", i.Mode(), err)
		}
		if d, err := os.Stat(filepath.Dir(socket)); err != nil || d.Mode().Perm() != 0o700 {
			t.Errorf("its directory %v, %v", d.Mode(), err)
		}
		testneeds.Root(t, "to connect as another user")
		_, open := start(t, Host{Root: t.TempDir()})
		wait(t, open)
		for _, p := range []string{open, filepath.Dir(open), filepath.Dir(filepath.Dir(open))} {
			if err := os.Chmod(p, 0o777); err != nil {
				t.Fatal(err)
			}
		}
		if out := connectAs(t, open, 65534); !strings.Contains(out, "hung up") {
			t.Errorf("another user: %s", out)
		}
	})
	t.Run("requests name what is known, by its digest, and never go down", func(t *testing.T) {
		r := newRig(t, true)
		c := r.inside()
		for what, change := range map[string]func(*upgradeproto.UpgradeRequest){
			"digest":           func(r *upgradeproto.UpgradeRequest) { r.Components[0].Digest = "" },
			"not its place":    func(r *upgradeproto.UpgradeRequest) { r.Components[0].Path = "/etc/cron.d/kubeadm" },
			"not one that":     func(r *upgradeproto.UpgradeRequest) { r.Components[0].Name = "bash" },
			"do not go down":   func(r *upgradeproto.UpgradeRequest) { r.KubernetesVersion = "v1.35.3" },
			"not written as v": func(r *upgradeproto.UpgradeRequest) { r.KubernetesVersion = "1.36.3" },
		} {
			req := r.request("t1")
			change(req)
			if what == "do not go down" {
				r.vouched(req)
			}
			if _, err := collect(c.Upgrade(t.Context(), req)); err == nil || !strings.Contains(err.Error(), what) {
				t.Errorf("got %v, want %q", err, what)
			}
		}
		if s, err := c.Status(t.Context(), &upgradeproto.StatusRequest{}); err != nil || s.Run != nil || r.deeds() != "" || s.KubeadmVersion != from {
			t.Errorf("%v, %v, %s; want nothing done", s, err, r.deeds())
		}
	})
}
