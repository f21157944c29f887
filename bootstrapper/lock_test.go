package bootstrapper

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/internal/swtpm"
)

func openState(t testing.TB, dir string) *os.Root {
	t.Helper()
	r, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func TestLockAndTPMMustAgree(t *testing.T) {
	file := func(state, by string, id []byte) string {
		return fmt.Sprintf(`{"state":%q,"by":%q,"clusterID":%q,"time":"2026-11-21T10:00:00Z"}`, state, by, hex.EncodeToString(id))
	}
	for _, tt := range []struct {
		name, file string
		register   []byte // cluster that register 15 names
		state      string // of the holder; "" = free
		stuck      string // part of the error
	}{
		{name: "a new machine is free"},
		{name: "a claimed machine", file: file(claimed, byInit, clusterA), register: clusterA, state: claimed},
		{name: "a claimed machine after a reboot", file: file(claimed, byJoin, clusterA), state: claimed},
		{name: "a member", file: file(member, byJoin, clusterA), register: clusterA, state: member},
		{name: "a member after a reboot", file: file(member, byInit, clusterA), state: member},
		{name: "a used machine with an empty disk", register: clusterA, stuck: "the disk has no claim"},
		{name: "a disk of another machine", file: file(member, byJoin, clusterA), register: clusterB, stuck: "different clusters"},
		{name: "a file that is cut", file: file(member, byJoin, clusterA)[:40], register: clusterA, stuck: "damaged"},
		{name: "a file with a state that does not exist", file: file("free", byJoin, clusterA), stuck: "damaged"},
		{name: "a file without a cluster", file: file(claimed, byJoin, nil), stuck: "damaged"},
		{name: "a file with more in it", file: `{"x":1}`, stuck: "damaged"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			if tt.file != "" {
				os.WriteFile(filepath.Join(dir, holderFile), []byte(tt.file), 0o600)
			}
			l, err := openLock(t.Context(), openState(t, dir), &softTPM{t: t, cluster: tt.register})
			if tt.stuck != "" {
				if !errors.Is(err, ErrStuck) || !strings.Contains(err.Error(), tt.stuck) || !strings.Contains(err.Error(), "re") {
					t.Errorf("got %v, want ErrStuck with %q", err, tt.stuck)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			h, held := l.holder()
			if h.State != tt.state || held != (tt.state != "") {
				t.Errorf("holder %+v", h)
			}
		})
	}
}

func TestClaimIsExclusiveAndPermanent(t *testing.T) {
	tpm := &softTPM{t: t}
	dir := t.TempDir()
	l, err := openLock(t.Context(), openState(t, dir), tpm)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.seal(t.Context()); err == nil {
		t.Error("register 15 of a free node was extended")
	}
	if err := l.take(byInit, clusterA); err != nil {
		t.Fatal(err)
	}
	if i, err := os.Stat(filepath.Join(dir, holderFile)); err != nil || i.Mode() != 0o600 {
		t.Errorf("file: %v %v", i, err)
	}
	for _, tt := range []struct {
		name string
		err  error
		want error
	}{
		{name: "the same claim again", err: l.take(byInit, clusterA), want: nil},
		{name: "an init for another cluster", err: l.take(byInit, clusterB), want: errOtherHolder},
		{name: "a join for the same cluster", err: l.ClaimJoin(t.Context(), clusterA), want: errClaimed},
	} {
		if !errors.Is(tt.err, tt.want) || tt.want == nil && tt.err != nil {
			t.Errorf("%s: %v, want %v", tt.name, tt.err, tt.want)
		}
	}
	if tpm.sealed() != nil {
		t.Error("a claim that was refused extended register 15")
	}
	select {
	case <-l.Claimed():
	default:
		t.Error("the join was not notified")
	}
	for range 3 { // a restart, and another
		if err := l.seal(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if tpm.extends != 1 || !bytes.Equal(tpm.sealed(), clusterA) {
		t.Errorf("extended %d times, with %x", tpm.extends, tpm.sealed())
	}
	if err := l.fail("broken", true); err != nil {
		t.Fatal(err)
	}
	if h, _ := l.holder(); h.Failure != "broken" || !h.Retry || h.State != claimed {
		t.Errorf("after a failure: %+v", h)
	}
	if err := l.retry(); err != nil {
		t.Fatal(err)
	}
	if h, _ := l.holder(); h.Failure != "" || h.Retry || h.State != claimed {
		t.Errorf("after the failure was cleared: %+v", h)
	}
	if err := l.fail("broken for good", false); err != nil {
		t.Fatal(err)
	}
	if err := l.retry(); err != nil {
		t.Fatal(err)
	}
	if h, _ := l.holder(); h.Failure != "broken for good" {
		t.Errorf("a final failure was cleared: %+v", h)
	}
	if err := l.finish("n"); err != nil {
		t.Fatal(err)
	}
	if err := l.fail("too late", false); err != nil {
		t.Fatal(err)
	}
	again, err := openLock(t.Context(), openState(t, dir), tpm)
	if err != nil {
		t.Fatal(err)
	}
	if h, _ := again.holder(); h.State != member || h.By != byInit || h.Node != "n" || h.Failure != "" || !bytes.Equal(h.clusterID(), clusterA) {
		t.Errorf("after a restart: %+v", h)
	}
	if err := again.take(byInit, clusterA); !errors.Is(err, errMember) {
		t.Errorf("claim of a member: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, holderFile+".*")); left != nil {
		t.Errorf("left behind: %v", left)
	}
}

// TestInitAndJoinRace runs an init and a join that claim the node concurrently, in one process
// and in two processes with the same disk.
func TestInitAndJoinRace(t *testing.T) {
	rounds := 1000
	if testing.Short() {
		rounds = 200
	}
	dir := t.TempDir()
	wins := map[string]int{}
	for round := range rounds {
		d := filepath.Join(dir, fmt.Sprint(round))
		os.Mkdir(d, 0o700)
		root, err := os.OpenRoot(d)
		if err != nil {
			t.Fatal(err)
		}
		tpm := &softTPM{t: t}
		one, err := openLock(context.Background(), root, tpm)
		if err != nil {
			t.Fatal(err)
		}
		other := one
		if round%2 == 1 {
			if other, err = openLock(context.Background(), root, tpm); err != nil {
				t.Fatal(err)
			}
		}
		var initErr, joinErr error
		var wg sync.WaitGroup
		start := make(chan struct{})
		wg.Go(func() {
			<-start
			if initErr = one.take(byInit, clusterA); initErr == nil {
				initErr = one.seal(context.Background())
			}
		})
		wg.Go(func() { <-start; joinErr = other.ClaimJoin(context.Background(), clusterB) })
		close(start)
		wg.Wait()
		h, err := readHolder(root)
		if err != nil || h == nil {
			t.Fatalf("round %d: %v %v", round, h, err)
		}
		wins[h.By]++
		want := clusterA
		if h.By == byJoin {
			want = clusterB
		}
		if (initErr == nil) == (joinErr == nil) || (initErr == nil) != (h.By == byInit) || !bytes.Equal(tpm.sealed(), want) || tpm.extends != 1 {
			t.Fatalf("round %d: init %v, join %v, file says %s, register %x", round, initErr, joinErr, h.By, tpm.sealed())
		}
		root.Close()
	}
	if !testing.Short() && (wins[byInit] == 0 || wins[byJoin] == 0) {
		t.Errorf("one of them always wins, so this is no race: %v", wins)
	}
}

func TestLockOnARealTPM(t *testing.T) {
	t.Run("of a cloud", func(t *testing.T) {
		address, reset := swtpm.Start(t)
		testLockOnATPM(t, address, reset)
	})
	t.Run("of an enrolled machine", func(t *testing.T) {
		address, reset := swtpm.Start(t)
		r := newRig(t, cloud.Worker)
		r.enrol(address)
		testLockOnATPM(t, r.m.TPM, reset)
	})
}

func testLockOnATPM(t *testing.T, address string, reset func()) {
	t.Helper()
	dir := t.TempDir()
	state := openState(t, dir)
	l, err := openLock(t.Context(), state, tpm(address))
	if err != nil {
		t.Fatal(err)
	}
	if zero, err := l.unsealed(t.Context()); !zero || err != nil {
		t.Fatalf("a new TPM: %t %v", zero, err)
	}
	if err := l.ClaimJoin(t.Context(), clusterA); err != nil {
		t.Fatal(err)
	}
	check := func(want []byte) {
		t.Helper()
		got, err := attestation.ReadPCRs(t.Context(), address, clusterRegister)
		if err != nil || !bytes.Equal(got[clusterRegister], want) {
			t.Errorf("register 15 is %x, want %x (%v)", got[clusterRegister], want, err)
		}
	}
	check(attestation.ClusterIDPCR(clusterA))
	if err := l.ClaimJoin(t.Context(), clusterA); err != nil {
		t.Errorf("again: %v", err)
	}
	check(attestation.ClusterIDPCR(clusterA))

	reset()
	check(make([]byte, 32))
	if l, err = openLock(t.Context(), state, tpm(address)); err != nil {
		t.Fatal(err)
	}
	if err := l.seal(t.Context()); err != nil {
		t.Fatal(err)
	}
	check(attestation.ClusterIDPCR(clusterA))

	os.Remove(filepath.Join(dir, holderFile))
	if _, err := openLock(t.Context(), state, tpm(address)); !errors.Is(err, ErrStuck) {
		t.Errorf("a used machine whose disk was wiped: %v", err)
	}
	if _, err := openLock(t.Context(), state, tpm("unix:"+dir+"/absent")); !errors.Is(err, attestation.ErrTPM) {
		t.Errorf("no TPM: %v", err)
	}
}
