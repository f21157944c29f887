package bootstrapper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"constellation/bootstrapper/initproto"
)

func newRecord(t testing.TB, dir string) *record {
	t.Helper()
	r, err := openRecord(openState(t, dir), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	return r
}

// all is the complete stream of messages to a console.
func all(t testing.TB, r *record) []*initproto.InitResponse {
	t.Helper()
	var got []*initproto.InitResponse
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := r.follow(ctx, nil, func(m *initproto.InitResponse) error { got = append(got, m); return nil }); err != nil {
		t.Fatal(err)
	}
	return got
}

func TestFollowersReceiveSameMessages(t *testing.T) {
	r := newRecord(t, t.TempDir())
	var wg sync.WaitGroup
	outlines := make([]string, 20)
	lines := make([]int, 20)
	for i := range outlines {
		wg.Go(func() {
			var got []*initproto.InitResponse
			if err := r.follow(t.Context(), nil, func(m *initproto.InitResponse) error {
				if i%5 == 0 {
					time.Sleep(100 * time.Microsecond) // a slow one
				}
				got = append(got, m)
				return nil
			}); err != nil {
				t.Error(err)
			}
			outlines[i], lines[i] = outline(got), len(got)
		})
	}
	for i := range 300 {
		r.line("kubeadm", "info", fmt.Sprint("line ", i))
		if i%100 == 0 {
			r.progress(&initproto.Progress{Step: fmt.Sprint("s", i), State: stateRunning})
		}
	}
	r.add(failure("s", "m", false))
	r.line("kubeadm", "info", "after the end")
	wg.Wait()
	for i := range outlines {
		if outlines[i] != "s0:running s100:running s200:running failure s" || lines[i] != 304 {
			t.Errorf("follower %d received %q in %d messages", i, outlines[i], lines[i])
		}
	}
}

func TestRecordOutlivesItsProcess(t *testing.T) {
	dir := t.TempDir()
	r := newRecord(t, dir)
	r.progress(&initproto.Progress{Step: stepClaim, State: stateDone})
	r.line("kubeadm", "warn", "a \"quoted\" line\nwith a break")
	r.close()
	file := filepath.Join(dir, recordFile)
	if i, _ := os.Stat(file); i.Mode() != 0o600 {
		t.Errorf("mode %s", i.Mode())
	}
	f, _ := os.OpenFile(file, os.O_APPEND|os.O_WRONLY, 0)
	f.WriteString(`{"progress":{"step":"cut`)
	f.Close()

	r = newRecord(t, dir)
	if r.ended() || r.empty() {
		t.Error("state was lost")
	}
	r.progress(&initproto.Progress{Step: stepInstall, State: stateDone})
	r.add(failure(stepInstall, "m", false))
	r.close()

	got := all(t, newRecord(t, dir))
	if outline(got) != "claim-node:done install-components:done failure install-components" || got[1].GetLog().GetLine() != "a \"quoted\" line\nwith a break" {
		t.Errorf("got %q, %v", outline(got), got)
	}
	if got[0].GetTime().AsTime().IsZero() {
		t.Error("no time")
	}
}

func TestRecordIsBounded(t *testing.T) {
	r := newRecord(t, t.TempDir())
	for range maxLines + 500 {
		r.line("kubeadm", "info", "x")
	}
	r.add(failure("s", "m", false))
	got := all(t, r)
	if len(got) != maxLines+2 || got[maxLines].GetLog().GetLine() != "500 further lines are not kept" {
		t.Errorf("%d messages, the last but one is %v", len(got), got[len(got)-2])
	}
}

func TestFollowingEnds(t *testing.T) {
	r := newRecord(t, t.TempDir())
	r.line("kubeadm", "info", "x")
	nop := func(*initproto.InitResponse) error { return nil }
	stop := make(chan struct{})
	close(stop)
	if err := r.follow(t.Context(), stop, nop); !errors.Is(err, errStopping) {
		t.Errorf("stopped: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.follow(ctx, nil, nop); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	gone := errors.New("gone")
	if err := r.follow(t.Context(), nil, func(*initproto.InitResponse) error { return gone }); !errors.Is(err, gone) {
		t.Errorf("send fails: %v", err)
	}
}

func TestFullDiskCostsTheReplayNotTheInit(t *testing.T) {
	r := newRecord(t, t.TempDir())
	r.file.Close()
	r.progress(&initproto.Progress{Step: stepClaim, State: stateDone})
	r.add(failure("s", "m", false))
	if got := outline(all(t, r)); got != "claim-node:done failure s" {
		t.Errorf("got %q", got)
	}
}

func TestRequestIsKeptWithoutItsSecret(t *testing.T) {
	dir := t.TempDir()
	state := openState(t, dir)
	if r, err := keptRequest(state); r != nil || err != nil {
		t.Errorf("nothing kept: %v %v", r, err)
	}
	req := &initproto.InitRequest{InitSecret: initSecret, ClusterName: "demo", ClusterId: clusterA}
	if err := keepRequest(state, req); err != nil {
		t.Fatal(err)
	}
	b, _ := os.ReadFile(filepath.Join(dir, requestFile))
	if strings.Contains(string(b), "ecret") || string(req.InitSecret) != string(initSecret) {
		t.Errorf("kept %s", b)
	}
	got, err := keptRequest(state)
	if err != nil || got.ClusterName != "demo" || string(got.ClusterId) != string(clusterA) {
		t.Errorf("got %v, %v", got, err)
	}
	os.WriteFile(filepath.Join(dir, requestFile), b[:20], 0o600)
	if _, err := keptRequest(state); !errors.Is(err, ErrStuck) {
		t.Errorf("damaged: %v", err)
	}
}

// TestRecordOfRelease110 reads a record that the bootstrapper of release v1.1.0 wrote until a power cut,
// and continues it.
func TestRecordOfRelease110(t *testing.T) {
	old, err := os.ReadFile("testdata/init-record-v1.1.0.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, recordFile)
	if err := os.WriteFile(file, old, 0o600); err != nil {
		t.Fatal(err)
	}
	r := newRecord(t, dir)
	got := all(t, r)
	if outline(got) != "claim-node:running claim-node:done install-components:running failure install-components" || got[2].GetLog().GetLine() != "a \"quoted\" line\nwith a break" {
		t.Errorf("got %q, %v", outline(got), got)
	}
	r.reopen() // a retry removes the failure
	r.progress(&initproto.Progress{Step: stepInstall, State: stateDone})
	r.close()

	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	kept := bytes.Join(bytes.SplitAfter(old, []byte("\n"))[:4], nil)
	if !bytes.HasPrefix(b, kept) || bytes.Count(b, []byte("\n")) != 5 {
		t.Errorf("the record is now\n%s\nwant one line after\n%s", b, kept)
	}
	if r := newRecord(t, dir); r.ended() || len(r.said) != 5 {
		t.Errorf("the record has %d messages, ended %v; want 5, false", len(r.said), r.ended())
	}
}
