package manifests

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"gopkg.in/yaml.v3"
)

// repository is a Git repository as they are: of each application its workload, Service,
// ConfigMap, Secret, account and budget, and a definition of a kind for every tenth.
func repository(b *testing.B, applications int) (dir string, size int64) {
	dir = b.TempDir()
	for i := range applications {
		var s strings.Builder
		fmt.Fprintf(&s, "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: web-%d\n  namespace: shop\n  labels:\n    app: web-%d\nspec:\n  replicas: 3\n  selector:\n    matchLabels:\n      app: web-%d\n  template:\n    metadata:\n      labels:\n        app: web-%d\n    spec:\n      containers:\n", i, i, i, i)
		for c := range 2 {
			fmt.Fprintf(&s, "      - name: c%d\n        image: registry.example/shop/web-%d:1.2.%d\n        ports:\n        - containerPort: 8080\n        env:\n", c, i, c)
			for e := range 8 {
				fmt.Fprintf(&s, "        - name: VARIABLE_%d\n          value: \"value of %d\"\n", e, e)
			}
			s.WriteString("        resources:\n          requests:\n            cpu: 100m\n            memory: 128Mi\n        readinessProbe:\n          httpGet:\n            path: /ready\n            port: 8080\n")
		}
		fmt.Fprintf(&s, "---\napiVersion: v1\nkind: Service\nmetadata:\n  name: web-%d\n  namespace: shop\nspec:\n  selector:\n    app: web-%d\n  ports:\n  - port: 80\n    targetPort: 8080\n", i, i)
		fmt.Fprintf(&s, "---\napiVersion: policy/v1\nkind: PodDisruptionBudget\nmetadata:\n  name: web-%d\n  namespace: shop\nspec:\n  maxUnavailable: 1\n  selector:\n    matchLabels:\n      app: web-%d\n", i, i)
		fmt.Fprintf(&s, "---\napiVersion: v1\nkind: ServiceAccount\nmetadata:\n  name: web-%d\n  namespace: shop\n---\napiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: web-%d\n  namespace: shop\ndata:\n", i, i)
		for e := range 20 {
			fmt.Fprintf(&s, "  key-%d: value of key %d\n", e, e)
		}
		if i%10 == 0 {
			s.WriteString("---\napiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata:\n  name: widgets.example.com\nspec:\n  versions:\n  - name: v1\n    schema:\n      openAPIV3Schema:\n        properties:\n")
			for e := range 150 {
				fmt.Fprintf(&s, "          field%d:\n            description: the field %d of a widget, in a sentence of some words\n            type: string\n", e, e)
			}
		}
		size += int64(s.Len())
		name := filepath.Join(dir, fmt.Sprintf("team-%d", i%20), fmt.Sprintf("web-%d.yaml", i))
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			b.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(s.String()), 0o644); err != nil {
			b.Fatal(err)
		}
	}
	return dir, size
}

// library parses all files with the YAML library alone, on one core.
func library(b *testing.B, dir string) time.Duration {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	start := time.Now()
	files, err := filepath.Glob(filepath.Join(dir, "*", "*.yaml"))
	if err != nil || len(files) == 0 {
		b.Fatal("no files", err)
	}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			b.Fatal(err)
		}
		for dec := yaml.NewDecoder(bytes.NewReader(text)); ; {
			var n yaml.Node
			if err := dec.Decode(&n); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				b.Fatal(err)
			}
		}
	}
	return time.Since(start)
}

// BenchmarkCheck compares a check with the YAML library alone on one core, which parses the
// same files right before it. Less than 1.6 times its speed is an error. If KUBE_SCORE names the
// program kube-score, it scores the same files once.
func BenchmarkCheck(b *testing.B) {
	dir, size := repository(b, 1500)
	b.SetBytes(size)
	library(b, dir) // warm the page cache
	// The fastest run of each: others share the machine.
	alone, ours := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
	cpuAlone, cpuOurs := alone, ours
	for b.Loop() {
		b.StopTimer()
		cpu := cpuTime(b)
		alone = min(alone, library(b, dir))
		cpuAlone = min(cpuAlone, cpuTime(b)-cpu)
		cpu = cpuTime(b)
		b.StartTimer()
		start := time.Now()
		r, err := Check(b.Context(), dir, Request{})
		if err != nil {
			b.Fatal(err)
		}
		ours = min(ours, time.Since(start))
		cpuOurs = min(cpuOurs, cpuTime(b)-cpu)
		if r.Files != 1500 || len(r.Skipped) > 0 {
			b.Fatalf("%d files, %d skipped", r.Files, len(r.Skipped))
		}
	}
	times := float64(alone) / float64(ours)
	b.ReportMetric(times, "times-the-yaml-library")
	b.ReportMetric(float64(cpuOurs)/float64(cpuAlone), "of-its-CPU-time")
	b.ReportMetric(alone.Seconds(), "s-alone")
	b.ReportMetric(ours.Seconds(), "s-ours")
	b.ReportMetric(float64(size)/1e6, "MB-files")
	if score := os.Getenv("KUBE_SCORE"); score != "" {
		b.ReportMetric(scored(b, score, dir).Seconds(), "s-kube-score")
	}
	if times < 1.6 {
		b.Errorf("%.2f times the speed of the YAML library on one core with %.2f of its CPU time, want 1.6 times", times, float64(cpuOurs)/float64(cpuAlone))
	}
}

// scored returns the time that kube-score takes for the files.
func scored(b *testing.B, program, dir string) time.Duration {
	b.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*", "*.yaml"))
	if err != nil {
		b.Fatal(err)
	}
	start := time.Now()
	cmd := exec.CommandContext(b.Context(), program, append([]string{"score", "--output-format", "ci"}, files...)...)
	var exit *exec.ExitError
	if out, err := cmd.Output(); err != nil && !errors.As(err, &exit) || len(out) == 0 { // it exits with 1 if it finds something
		b.Fatalf("run kube-score: %v", err)
	}
	return time.Since(start)
}

// cpuTime is what this process has used.
func cpuTime(b *testing.B) time.Duration {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		b.Fatal(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// BenchmarkManyFiles checks 100,000 small files.
func BenchmarkManyFiles(b *testing.B) {
	dir := b.TempDir()
	for i := range 100_000 {
		sub := filepath.Join(dir, fmt.Sprint(i%100))
		if i < 100 {
			if err := os.Mkdir(sub, 0o755); err != nil {
				b.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(sub, fmt.Sprintf("%d.yaml", i)), []byte(budgetOf("maxUnavailable: 1")), 0o644); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		r, err := Check(b.Context(), dir, Request{})
		if err != nil || r.Files != 100_000 || r.Objects != 100_000 {
			b.Fatal(r, err)
		}
	}
}
