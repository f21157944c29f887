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

// Weak points of another agent, each as a test that fails on its design. Package operator has
// the operator's.

// Old design: kubeadm is a child of the request, and is killed when the connection breaks,
// which the restart of the API server by kubeadm itself can cause. TestKilledAgentContinues and
// TestStoppedAgentDoesNotStopKubeadm cover the same.
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
	// Without a follower, it completes.
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

// Old design: everything at the socket's path is removed, the socket is open to all users, and
// URL, digest, path and version are the caller's, who may omit the digest and downgrade.
// TestRequestsAreRefused covers further refusals.
func TestWeakPointR9CallersAreNotTrusted(t *testing.T) {
	t.Run("a file at the socket's path is kept", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "a.sock")
		write(t, path, "precious", "mine", 0o600)
		if _, err := listen(t.Context(), path, 0); err == nil || !strings.Contains(err.Error(), "not a socket") {
			t.Errorf("listen: %v, want a refusal", err)
		}
		if b, err := os.ReadFile(filepath.Join(path, "precious")); err != nil || string(b) != "mine" {
			t.Errorf("the directory's file: %q, %v", b, err)
		}
	})
	t.Run("other users of the socket are disconnected", func(t *testing.T) {
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
	t.Run("components are fixed and identified by digest, and downgrades are refused", func(t *testing.T) {
		r := newRig(t, true)
		c := r.inside()
		for what, change := range map[string]func(*upgradeproto.UpgradeRequest){
			"digest":                  func(r *upgradeproto.UpgradeRequest) { r.Components[0].Digest = "" },
			"path is":                 func(r *upgradeproto.UpgradeRequest) { r.Components[0].Path = "/etc/cron.d/kubeadm" },
			"not one that":            func(r *upgradeproto.UpgradeRequest) { r.Components[0].Name = "bash" },
			"downgrade to":            func(r *upgradeproto.UpgradeRequest) { r.KubernetesVersion = "v1.35.3" },
			"not in canonical form v": func(r *upgradeproto.UpgradeRequest) { r.KubernetesVersion = "1.36.3" },
		} {
			req := r.request("t1")
			change(req)
			if what == "downgrade to" {
				r.vouched(req)
			}
			if _, err := collect(c.Upgrade(t.Context(), req)); err == nil || !strings.Contains(err.Error(), what) {
				t.Errorf("got %v, want %q", err, what)
			}
		}
		if s, err := c.Status(t.Context(), &upgradeproto.StatusRequest{}); err != nil || s.Run != nil || r.deeds() != "" || s.KubeadmVersion != from {
			t.Errorf("%v, %v, %s; want no effect", s, err, r.deeds())
		}
	})
}
