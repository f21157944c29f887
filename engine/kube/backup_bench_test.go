package kube

import (
	"compress/gzip"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/client-go/rest"

	"constellation/engine/sandbox/controlplane"
	"constellation/internal/footprint"
)

// benchTypes is the number of kinds of objects in BenchmarkBackup.
const benchTypes = 20

// BenchmarkBackup measures how long the program takes, from exec to exit, to back up custom
// resources of 1.5 kB, half of them random, and one of 64 kB per fifty of them, with the files
// on disk and verified. Two peers run interleaved: a client that lists the same in pages,
// gzipped, and discards it; and `kubectl get` of the same, as JSON and as YAML. Then it
// measures `backup verify` against SHA-256 of the same files. BENCH_BACKUP_OBJECTS sets the
// number of objects of 1.5 kB.
//
// It needs the program that `make build` builds.
func BenchmarkBackup(b *testing.B) {
	program, err := filepath.Abs("../../bin/constellation")
	if err != nil {
		b.Fatal(err)
	}
	if _, err := os.Stat(program); err != nil {
		b.Skip(err)
	}
	most := 10_000
	if s := os.Getenv("BENCH_BACKUP_OBJECTS"); s != "" {
		if most, err = strconv.Atoi(s); err != nil {
			b.Fatal(err)
		}
	}
	for _, n := range []int{1000, most} {
		b.Run(fmt.Sprintf("%d objects", n), func(b *testing.B) { benchBackup(b, program, n) })
	}
}

func benchBackup(b *testing.B, program string, n int) {
	cp := controlplane.ForTest(b, controlplane.Options{APIServerArgs: []string{"--disable-admission-plugins=ServiceAccount"}})
	names := fillEtcd(b, cp, n)
	kubectl, kubeconfig := kubectlOf(b, cp)
	workspace := b.TempDir()
	k, err := cp.Kubeconfig()
	if err == nil {
		err = os.WriteFile(filepath.Join(workspace, "constellation-admin.conf"), k, 0o600)
	}
	if err != nil {
		b.Fatal(err)
	}
	client, err := rest.HTTPClientFor(cp.Config())
	if err != nil {
		b.Fatal(err)
	}
	// run returns how long a program took, and its peak memory in MiB.
	run := func(args ...string) (took time.Duration, all, own float64) {
		cmd := exec.CommandContext(b.Context(), args[0], args[1:]...)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		begun := time.Now()
		if err := cmd.Start(); err != nil {
			b.Fatal(err)
		}
		sampled := footprint.Sample(cmd.Process.Pid)
		if err := cmd.Wait(); err != nil {
			b.Fatalf("%s: %v: %s", strings.Join(args, " "), err, stderr.String())
		}
		took = time.Since(begun)
		m := <-sampled
		return took, m.All / (1 << 20), m.Own / (1 << 20)
	}
	list := func() time.Duration {
		begun := time.Now()
		for i := range benchTypes {
			if err := listAway(b.Context(), client, cp.Config().Host+fmt.Sprintf("/apis/bench.example.com/v1/things%d", i)); err != nil {
				b.Fatal(err)
			}
		}
		return time.Since(begun)
	}
	list() // the API server has everything in its cache afterwards
	var ours, bare, asJSON, asYAML, verify, hash time.Duration
	var highest, own, bytes float64
	rounds := 0
	for b.Loop() {
		rounds++
		runs := filepath.Join(workspace, "constellation-upgrade")
		if err := os.RemoveAll(runs); err != nil {
			b.Fatal(err)
		}
		took, rss, anonymous := run(program, "-C", workspace, "backup", "create", "--etcd=false")
		ours, highest, own = ours+took, max(highest, rss), max(own, anonymous)
		bare += list()
		took, _, _ = run(kubectl, "--kubeconfig", kubeconfig, "get", names, "--all-namespaces", "-o", "json")
		asJSON += took
		took, _, _ = run(kubectl, "--kubeconfig", kubeconfig, "get", names, "--all-namespaces", "-o", "yaml")
		asYAML += took
		ids, err := filepath.Glob(filepath.Join(runs, "backup-*"))
		if err != nil || len(ids) != 1 {
			b.Fatalf("backups %q, %v", ids, err)
		}
		took, _, _ = run(program, "-C", workspace, "backup", "verify", filepath.Base(ids[0]))
		verify += took
		took, size := hashAll(b, ids[0])
		hash, bytes = hash+took, bytes+size
	}
	per := func(d time.Duration) float64 { return d.Seconds() / float64(rounds) }
	for unit, v := range map[string]float64{
		"ours-s": per(ours), "bare-s": per(bare), "json-s": per(asJSON), "yaml-s": per(asYAML), "MB": bytes / float64(rounds) / 1e6, "resident-MiB": highest, "own-MiB": own,
		"verify-MB/s": bytes / 1e6 / verify.Seconds(), "sha256-MB/s": bytes / 1e6 / hash.Seconds(), "ns/op": 0,
	} {
		b.ReportMetric(v, unit)
	}
}

// listAway lists a type like a backup and discards it.
func listAway(ctx context.Context, client *http.Client, address string) error {
	next := ""
	for {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, address+"?limit=2000&continue="+url.QueryEscape(next), nil)
		if err != nil {
			return err
		}
		r.Header.Set("Accept", "application/json")
		r.Header.Set("Accept-Encoding", "gzip")
		resp, err := client.Do(r)
		if err != nil {
			return err
		}
		var body io.Reader = resp.Body
		if resp.Header.Get("Content-Encoding") == "gzip" {
			if body, err = gzip.NewReader(resp.Body); err != nil {
				return err
			}
		}
		// The continue token comes before the objects.
		head := make([]byte, 4096)
		n, err := io.ReadFull(body, head)
		if err != nil && n == 0 || resp.StatusCode != http.StatusOK {
			return fmt.Errorf("list %s: %s: %w", address, resp.Status, err)
		}
		if _, err := io.Copy(io.Discard, body); err != nil {
			return err
		}
		resp.Body.Close()
		_, rest, ok := strings.Cut(string(head[:n]), `"continue":`)
		if !ok {
			return nil
		}
		if next = ""; json.NewDecoder(strings.NewReader(rest)).Decode(&next) != nil || next == "" {
			return nil
		}
	}
}

// hashAll returns how long SHA-256 takes of all files below dir, and their bytes.
func hashAll(b *testing.B, dir string) (time.Duration, float64) {
	b.Helper()
	begun := time.Now()
	var size float64
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		n, err := io.CopyBuffer(struct{ io.Writer }{sha256.New()}, f, make([]byte, 256<<10))
		size += float64(n)
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	return time.Since(begun), size
}

// fillEtcd writes n objects of 1.5 kB and n/50 of 64 kB directly into etcd, in the API
// server's format, and returns their types for kubectl.
func fillEtcd(b *testing.B, cp *controlplane.ControlPlane, n int) (names string) {
	b.Helper()
	pair, err := tls.LoadX509KeyPair(filepath.Join(cp.PKI(), "apiserver-etcd-client.crt"), filepath.Join(cp.PKI(), "apiserver-etcd-client.key"))
	if err != nil {
		b.Fatal(err)
	}
	ca, err := os.ReadFile(filepath.Join(cp.PKI(), "etcd/ca.crt"))
	if err != nil {
		b.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	etcd, err := clientv3.New(clientv3.Config{Endpoints: []string{cp.EtcdEndpoint()}, TLS: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}})
	if err != nil {
		b.Fatal(err)
	}
	defer etcd.Close()
	var all []string
	for i := range benchTypes {
		all = append(all, fmt.Sprintf("things%d.bench.example.com", i))
		if err := cp.Apply(b.Context(), fmt.Appendf(nil, `{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: things%[1]d.bench.example.com}, spec: {group: bench.example.com, scope: Namespaced,
  names: {plural: things%[1]d, singular: thing%[1]d, kind: Thing%[1]d, listKind: Thing%[1]dList},
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]}}`, i)); err != nil {
			b.Fatal(err)
		}
	}
	random := rand.New(rand.NewPCG(1, 2))
	var ops []clientv3.Op
	put := func(i, size int) {
		noise := make([]byte, size/4)
		for j := range noise {
			noise[j] = byte(random.Uint32())
		}
		t := i % benchTypes
		name := fmt.Sprintf("o-%06d-%d", i, size)
		ops = append(ops, clientv3.OpPut(fmt.Sprintf("/registry/bench.example.com/things%d/default/%s", t, name), fmt.Sprintf(
			`{"apiVersion":"bench.example.com/v1","kind":"Thing%d","metadata":{"creationTimestamp":"2026-11-21T07:05:01Z","generation":1,"name":%q,"namespace":"default","uid":"%08x-0000-4000-8000-%012x"},"spec":{"random":%q,"text":%q}}`,
			t, name, size, i, hex.EncodeToString(noise), strings.Repeat("constellation ", size/28))))
		if len(ops) >= 100 || size > 10_000 && len(ops) >= 10 {
			if _, err := etcd.Txn(b.Context()).Then(ops...).Commit(); err != nil {
				b.Fatal(err)
			}
			ops = ops[:0]
		}
	}
	for i := range n {
		put(i, 1300)
	}
	for i := range n / 50 {
		put(i, 64_000)
	}
	if len(ops) > 0 {
		if _, err := etcd.Txn(b.Context()).Then(ops...).Commit(); err != nil {
			b.Fatal(err)
		}
	}
	return strings.Join(all, ",")
}
