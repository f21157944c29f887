package kube

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/sandbox/controlplane"
)

// benchObjects is the number of objects that BenchmarkRestore restores; BENCH_RESTORE_OBJECTS
// overrides it.
const benchObjects = 4000

// payload is 1.4 kB, half of them random.
func payload(r *rand.Rand) string {
	b := make([]byte, 525)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return fmt.Sprintf(`{"random":%q,"text":%q}`, base64.StdEncoding.EncodeToString(b), bytes.Repeat([]byte("constellation "), 50))
}

// BenchmarkRestore measures how many objects of 1.5 kB a second are restored into one API
// server. The peers are 16 writers that send objects of the same size, and kubectl with the
// backup's files. The three run one after the other on equal shares of each run; kubectl gets
// the objects of one of 20 types. It also measures the processor time per restored object of
// the API server and etcd, and ours.
func BenchmarkRestore(b *testing.B) {
	n := benchObjects
	if s := os.Getenv("BENCH_RESTORE_OBJECTS"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil {
			b.Fatal(err)
		}
	}
	cp, c := lone(b)
	h := newHand(b, c)
	const types = 20
	var kinds []definition
	for i := range types {
		kinds = append(kinds, definition{plural: fmt.Sprintf("bench%ds", i), kind: fmt.Sprintf("Bench%d", i), versions: []string{"v1"}})
	}
	h.define(kinds...)
	bodies := make([][]byte, n)
	random := rand.New(rand.NewPCG(1, 2))
	for i := range bodies {
		d := kinds[i%types]
		bodies[i] = fmt.Appendf(nil, `{"apiVersion":"shop.example.com/v1","kind":%q,"metadata":{"name":"o-%06d"},"spec":%s}`, d.kind, i, payload(random))
	}
	raw := func() time.Duration {
		begun := time.Now()
		each16(b, n, func(ctx context.Context, i int) error {
			_, err := h.w.do(ctx, http.MethodPost, kinds[i%types].path("default"), nil, "application/json", bodies[i])
			return err
		})
		return time.Since(begun)
	}
	empty := func() {
		for _, d := range kinds {
			h.do(http.MethodDelete, d.path("default"), "")
		}
	}
	raw()
	saved := h.backUp(false)
	var files []string
	for _, t := range saved.Manifest().Types {
		if t.Group == "shop.example.com" {
			files = append(files, filepath.Join(saved.Path(), t.Files[0]))
		}
	}
	kubectl, kubeconfig := kubectlOf(b, cp)
	only := []engine.Selector{}
	for _, d := range kinds {
		only = append(only, engine.Selector{Group: "shop.example.com", Resource: d.plural})
	}
	servers := func() time.Duration { return cpuOf(cp.PID("kube-apiserver")) + cpuOf(cp.PID("etcd")) }
	var ofRaw, ofRestore, ofKubectl, ofServers, ofOurs time.Duration
	rounds := 0
	for b.Loop() {
		rounds++
		empty()
		ofRaw += raw()
		empty()
		began, ours, begun := servers(), cpuOf(os.Getpid()), time.Now()
		did := h.restore(saved, engine.RestoreOptions{Only: only})
		ofRestore += time.Since(begun)
		ofServers, ofOurs = ofServers+servers()-began, ofOurs+cpuOf(os.Getpid())-ours
		if did.states[engine.RestoreCreated] != n {
			b.Fatalf("%v: %q", did.states, lines(did.told)[:min(3, len(did.told))])
		}
		empty()
		begun = time.Now()
		if out, err := exec.CommandContext(b.Context(), kubectl, "--kubeconfig", kubeconfig, "create", "-f", files[rounds%len(files)]).CombinedOutput(); err != nil {
			b.Fatalf("kubectl: %v: %s", err, out[:min(300, len(out))])
		}
		ofKubectl += time.Since(begun)
	}
	rate := func(n int, d time.Duration) float64 { return float64(n*rounds) / d.Seconds() }
	restored, wrote, created := rate(n, ofRestore), rate(n, ofRaw), rate(n/types, ofKubectl)
	b.ReportMetric(restored, "objects/s")
	b.ReportMetric(wrote, "raw-objects/s")
	b.ReportMetric(created, "kubectl-objects/s")
	b.ReportMetric(restored/wrote, "of-raw")
	b.ReportMetric(restored/created, "x-kubectl")
	each := func(d time.Duration) float64 { return d.Seconds() * 1000 / float64(n*rounds) }
	b.ReportMetric(each(ofServers), "server-cpu-ms/object")
	b.ReportMetric(each(ofOurs), "cpu-ms/object")
	b.ReportMetric(0, "ns/op")
}

// kubectlOf returns the kubectl of the control plane and a kubeconfig for it.
func kubectlOf(b *testing.B, cp *controlplane.ControlPlane) (program, kubeconfig string) {
	b.Helper()
	dir, err := controlplane.FindBinaries()
	if err != nil {
		b.Skip(err)
	}
	k, err := cp.Kubeconfig()
	if err != nil {
		b.Fatal(err)
	}
	kubeconfig = filepath.Join(b.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, k, 0o600); err != nil {
		b.Fatal(err)
	}
	return filepath.Join(dir, "kubectl"), kubeconfig
}

// cpuOf returns the processor time of a process; zero if the system does not report it.
func cpuOf(pid int) time.Duration {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, ok := bytes.Cut(b, []byte(") ")) // the command's name may contain spaces
	fields := bytes.Fields(rest)
	if err != nil || !ok || len(fields) < 13 {
		return 0
	}
	var ticks time.Duration
	for _, f := range fields[11:13] { // user and system time in hundredths of a second
		n, err := strconv.Atoi(string(f))
		if err != nil {
			return 0
		}
		ticks += time.Duration(n)
	}
	return ticks * 10 * time.Millisecond
}
