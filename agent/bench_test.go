//go:build linux

package agent

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"constellation/agent/upgradeproto"
	"constellation/engine/component"
)

// BenchmarkInstall measures the installation of a component by the agent's own binary: download
// of 192 MiB over loopback, verification, fsync. The component cannot run, so the run fails
// afterwards. Each round also measures the two halves alone: SHA-256 of the bytes, and a write
// with fsync. Figures are
//
//   - install-MB/s, sha256-MB/s and write-MB/s;
//   - ratio is install by the slower of the two;
//   - peak-MB is the agent's memory at its highest, of all rounds.
func BenchmarkInstall(b *testing.B) {
	dir := b.TempDir()
	bin := filepath.Join(dir, "agent")
	build := exec.CommandContext(b.Context(), "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", bin, "./cmd")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("build the agent: %v\n%s", err, out)
	}
	const size = 192 << 20
	content := bytes.Repeat([]byte("0123456789abcdef0123456789abcde\n"), size/32)
	var served atomic.Int64 // when the first byte was requested
	mirror := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		served.Store(time.Now().UnixNano())
		w.Header().Set("Content-Length", strconv.Itoa(len(content)))
		w.Write(content)
	}))
	defer mirror.Close()
	var install, hash, write time.Duration
	var peak float64
	rounds := 0
	for b.Loop() {
		rounds++
		r := newRig(b, true)
		cmd := exec.CommandContext(b.Context(), bin, "-socket", r.settings.Socket, "-root", r.settings.Root)
		cmd.Stderr = b.Output()
		if err := cmd.Start(); err != nil {
			b.Fatal(err)
		}
		// Other bytes in each round, or a file system that shares blocks might help.
		copy(content, fmt.Sprintf("%032d", rounds))
		sum := sha256.Sum256(content)
		req := r.request("t1")
		req.Components = append(req.Components[:0:0], component.ToProto(component.List{
			{Name: "kubeadm", URL: mirror.URL, Digest: "sha256:" + hex.EncodeToString(sum[:]), Path: "/usr/local/bin/kubeadm"},
		})[0], req.Components[0])
		all, err := collect(r.client().Upgrade(b.Context(), r.vouched(req)))
		if err != nil || !strings.Contains(all[len(all)-1].GetFailure().GetMessage(), "exec format error") {
			b.Fatalf("%v, %v", err, all)
		}
		// The final message follows the installation of the component, which cannot run.
		install += time.Duration(all[len(all)-1].GetTime().AsTime().UnixNano() - served.Load())
		peak = max(peak, memory(b, cmd.Process.Pid))
		cmd.Process.Kill()
		cmd.Wait()

		start := time.Now()
		sha256.Sum256(content)
		hash += time.Since(start)
		start = time.Now()
		f, err := os.Create(filepath.Join(r.settings.Root, "peer"))
		if err != nil {
			b.Fatal(err)
		}
		for at := 0; at < size; at += 256 << 10 {
			if _, err := f.Write(content[at : at+256<<10]); err != nil {
				b.Fatal(err)
			}
		}
		if err := f.Sync(); err != nil {
			b.Fatal(err)
		}
		f.Close()
		write += time.Since(start)
		os.RemoveAll(filepath.Dir(r.settings.Root))
	}
	speed := func(d time.Duration) float64 { return float64(rounds) * size / 1e6 / d.Seconds() }
	b.ReportMetric(speed(install), "install-MB/s")
	b.ReportMetric(speed(hash), "sha256-MB/s")
	b.ReportMetric(speed(write), "write-MB/s")
	b.ReportMetric(float64(max(hash, write))/float64(install), "ratio")
	b.ReportMetric(peak, "peak-MB")
}

// memory is the peak memory of a process, in MB.
func memory(b *testing.B, pid int) float64 {
	b.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	kb, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
	if err != nil {
		b.Fatal(err)
	}
	return kb * 1024 / 1e6
}

// BenchmarkMemory is the memory of the agent's own binary at its highest while 32
// connections are open, each with a request, and while a snapshot of 256 MB streams
// from a real etcd.
func BenchmarkMemory(b *testing.B) {
	dir := b.TempDir()
	bin := filepath.Join(dir, "agent")
	build := exec.CommandContext(b.Context(), "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", bin, "./cmd")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("build the agent: %v\n%s", err, out)
	}
	members, pki := startEtcd(b, 1)
	r := newRig(b, true)
	cmd := exec.CommandContext(b.Context(), bin, "-socket", r.settings.Socket, "-root", r.settings.Root, "-etcd", members[0].client, "-etcd-pki", pki)
	cmd.Stderr = b.Output()
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	defer func() {
		cmd.Process.Kill()
		cmd.Wait()
	}()
	client := r.client()
	settled(b, client, 1)
	idle := memory(b, cmd.Process.Pid)
	own, err := newEtcd(Host{Etcd: Etcd{PKI: pki}}).dial(b.Context(), members[0].client)
	if err != nil {
		b.Fatal(err)
	}
	defer own.Close()
	value := strings.Repeat("v", 1<<20)
	for i := range 256 {
		if _, err := own.Put(b.Context(), fmt.Sprintf("k%d", i), value); err != nil {
			b.Fatal(err)
		}
	}
	var took time.Duration
	var size int64
	for b.Loop() {
		for range maxConnections - 1 {
			c, err := net.Dial("unix", r.settings.Socket)
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
		}
		start := time.Now()
		stream, err := client.SnapshotEtcd(b.Context(), &upgradeproto.SnapshotEtcdRequest{})
		for size = 0; err == nil; {
			var m *upgradeproto.SnapshotEtcdResponse
			if m, err = stream.Recv(); err == nil && m.GetSummary() != nil {
				size = m.GetSummary().GetSize()
			}
		}
		if size == 0 {
			b.Fatal(err)
		}
		took += time.Since(start)
	}
	b.ReportMetric(idle, "idle-MB")
	b.ReportMetric(memory(b, cmd.Process.Pid), "peak-MB")
	b.ReportMetric(float64(b.N)*float64(size)/1e6/took.Seconds(), "snapshot-MB/s")
}
