//go:build linux

package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/agent/upgradeproto"
	"constellation/engine/component"
	"constellation/engine/release"
	"constellation/engine/release/releasetest"
)

// TestOnlyVouchedComponentsRun requests programs without a statement of this machine's release
// builder, as an attacker with write access to NodeVersion and a ConfigMap could through the
// operator. Nothing is fetched and nothing runs.
func TestOnlyVouchedComponentsRun(t *testing.T) {
	r := newRig(t, true)
	var fetched atomic.Int64
	evil := []byte("#!/bin/sh\ntouch " + filepath.Join(r.settings.Ctl, "owned") + "\necho v1.36.3\n")
	attacker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fetched.Add(1)
		w.Write(evil)
	}))
	t.Cleanup(attacker.Close)
	sum := sha256.Sum256(evil)
	theirs := func(req *upgradeproto.UpgradeRequest) {
		for _, c := range req.Components {
			c.Url, c.Digest = attacker.URL+"/"+c.Name, "sha256:"+hex.EncodeToString(sum[:])
		}
	}
	list := func(req *upgradeproto.UpgradeRequest) component.List {
		l, err := component.FromProto(req.Components)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	stranger, err := release.NewPrivateKey("stranger")
	if err != nil {
		t.Fatal(err)
	}
	by := func(k *release.PrivateKey, v release.Vouched) string {
		s, err := k.Vouch(v)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	c := r.inside()
	for _, tt := range []struct {
		name, want string
		change     func(*upgradeproto.UpgradeRequest)
	}{
		{name: "a caller's own programs without a statement", want: "no statement of a release builder", change: func(req *upgradeproto.UpgradeRequest) {
			theirs(req)
			req.ComponentsStatement = ""
		}},
		{name: "a caller's own programs with the statement over others", want: "does not cover these components", change: theirs},
		{name: "a caller's own programs and statement", want: "an untrusted key signed it", change: func(req *upgradeproto.UpgradeRequest) {
			theirs(req)
			req.ComponentsStatement = by(stranger, release.Vouched{to: {runtime.GOARCH: list(req).Digest()}})
		}},
		{name: "the right programs without a statement", want: "no statement of a release builder", change: func(req *upgradeproto.UpgradeRequest) { req.ComponentsStatement = "" }},
		{name: "a statement for another version", want: "does not name Kubernetes " + to, change: func(req *upgradeproto.UpgradeRequest) {
			req.ComponentsStatement = releasetest.Vouch(t, "v1.36.2", list(req))
		}},
		{name: "a statement for another architecture", want: "does not name Kubernetes " + to, change: func(req *upgradeproto.UpgradeRequest) {
			req.ComponentsStatement = by(releasetest.Key(t), release.Vouched{to: {"other": list(req).Digest()}})
		}},
		{name: "another address", want: "does not cover these components", change: func(req *upgradeproto.UpgradeRequest) { req.Components[0].Url = attacker.URL + "/kubeadm" }},
		{name: "another order", want: "does not cover these components", change: func(req *upgradeproto.UpgradeRequest) {
			req.Components[0], req.Components[1] = req.Components[1], req.Components[0]
		}},
		{name: "a digest that was changed", want: "does not cover these components", change: func(req *upgradeproto.UpgradeRequest) {
			req.Components[1].Digest = "sha256:" + hex.EncodeToString(sum[:])
		}},
		{name: "a statement that was changed", want: "an untrusted key signed it", change: func(req *upgradeproto.UpgradeRequest) {
			req.ComponentsStatement = strings.Replace(req.ComponentsStatement, to, "v1.36.4", 1)
		}},
		{name: "no JSON", want: "read statement", change: func(req *upgradeproto.UpgradeRequest) { req.ComponentsStatement = "yes" }},
		{name: "a statement that is too long", want: "bytes", change: func(req *upgradeproto.UpgradeRequest) {
			req.ComponentsStatement += strings.Repeat(" ", release.MaxStatement)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			req := r.request("t1")
			tt.change(req)
			_, err := collect(c.Upgrade(t.Context(), req))
			if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
	keys := filepath.Join(r.settings.Root, release.MachineKeys)
	if err := os.Chmod(keys, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := collect(c.Upgrade(t.Context(), r.request("t1"))); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "writable by others") {
		t.Errorf("keys that others can write: %v", err)
	}
	if err := os.Remove(keys); err != nil {
		t.Fatal(err)
	}
	if _, err := collect(c.Upgrade(t.Context(), r.request("t1"))); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "no release keys; replace it") {
		t.Errorf("a machine without keys: %v", err)
	}
	if s, err := c.Status(t.Context(), &upgradeproto.StatusRequest{}); err != nil || s.Run != nil || s.KubeadmVersion != from || fetched.Load() != 0 || exists(filepath.Join(r.settings.Ctl, "owned")) || r.deeds() != "" {
		t.Errorf("%v, %v, %d fetched, %s; want no effect", s, err, fetched.Load(), r.deeds())
	}
	releasetest.Furnish(t, r.settings.Root)
	if all, err := collect(c.Upgrade(t.Context(), r.request("t1"))); err != nil || outline(all) != straight {
		t.Errorf("components with the release builder's statement: %v\n%s", err, outline(all))
	}
}
