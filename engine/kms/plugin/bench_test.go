//go:build linux

package plugin

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"constellation/engine/sandbox/controlplane"
)

// writers is the number of clients that write at once. slice is the number of objects that they create at one API server before they
// continue at the other: enough for a stopwatch, and few enough that load of other programs hits both.
const (
	writers = 16
	slice   = 320
	pairs   = 40
)

// BenchmarkWrites measures how many Secrets of 1 kB a second 16 clients create, at an API server that encrypts with the key service and at
// one that does not. Each has its own etcd. The clients write to them in short slices, and each pair of slices gives one ratio. Load of other programs
// spoils single ratios, but hardly their median. The benchmark also measures the processor time of API server and etcd per write.
//
// The same clients create ConfigMaps, which neither API server encrypts. Their ratios show the error of the measurement.
func BenchmarkWrites(b *testing.B) {
	for _, kind := range []string{"secrets", "configmaps"} {
		b.Run(kind, func(b *testing.B) {
			m := newMachine(b)
			m.store(encoded(b, 1, 1))
			m.vm.Join(clusterID)
			m.serve()
			cp, _ := m.encrypted(b)
			ours, peer := newTarget(b, cp, kind), newTarget(b, controlplane.ForTest(b, controlplane.Options{}), kind)
			for range 4 { // warm up: connections, caches, the first growth of the file of etcd
				ours.write(b)
				peer.write(b)
			}
			if ours.encrypts(b) != (kind == "secrets") || peer.encrypts(b) {
				b.Fatal("an API server encrypts what it should not, or the other way round")
			}
			for b.Loop() {
				calls, oursBefore, peerBefore := ours.calls(b), *ours, *peer
				oursCPU, peerCPU := ours.cpu(b), peer.cpu(b)
				var ratios []float64
				for n := range pairs {
					var o, p time.Duration
					if n%2 == 0 {
						o, p = ours.write(b), peer.write(b)
					} else {
						p, o = peer.write(b), ours.write(b)
					}
					ratios = append(ratios, p.Seconds()/o.Seconds())
				}
				slices.Sort(ratios)
				b.ReportMetric((ratios[pairs/2-1]+ratios[pairs/2])/2, "x-rate")
				b.ReportMetric(ratios[pairs/10], "x-rate-p10")
				b.ReportMetric(ratios[pairs-1-pairs/10], "x-rate-p90")
				const total = pairs * slice
				b.ReportMetric(total/(ours.took-oursBefore.took).Seconds(), "writes/s")
				b.ReportMetric(total/(peer.took-peerBefore.took).Seconds(), "peer-writes/s")
				oursCPU, peerCPU = ours.cpu(b)-oursCPU, peer.cpu(b)-peerCPU
				b.ReportMetric(oursCPU.Seconds()*1000/total, "cpu-ms/write")
				b.ReportMetric(peerCPU.Seconds()*1000/total, "peer-cpu-ms/write")
				b.ReportMetric(oursCPU.Seconds()/peerCPU.Seconds(), "x-cpu")
				b.ReportMetric(ours.calls(b)-calls, "calls")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// target is an API server that the clients write to.
type target struct {
	cp    *controlplane.ControlPlane
	kind  string
	k     kubernetes.Interface
	value []byte

	wrote int           // objects
	took  time.Duration // to write them
}

func newTarget(b *testing.B, cp *controlplane.ControlPlane, kind string) *target {
	b.Helper()
	c := cp.Config()
	c.QPS = -1 // no limit
	c.ContentType = "application/vnd.kubernetes.protobuf"
	k, err := kubernetes.NewForConfig(c)
	if err != nil {
		b.Fatal(err)
	}
	x := &target{cp: cp, kind: kind, k: k, value: make([]byte, 1000)}
	rand.Read(x.value)
	return x
}

// write creates the objects of a slice, and returns how long that took.
func (x *target) write(b *testing.B) time.Duration {
	b.Helper()
	var next atomic.Int64
	var wg sync.WaitGroup
	begun := time.Now()
	for range writers {
		wg.Go(func() {
			for n := next.Add(1); n <= slice; n = next.Add(1) {
				meta := metav1.ObjectMeta{Name: fmt.Sprintf("written-%d", x.wrote+int(n))}
				var err error
				if data := map[string][]byte{"value": x.value}; x.kind == "secrets" {
					_, err = x.k.CoreV1().Secrets("default").Create(b.Context(), &corev1.Secret{ObjectMeta: meta, Data: data}, metav1.CreateOptions{})
				} else {
					_, err = x.k.CoreV1().ConfigMaps("default").Create(b.Context(), &corev1.ConfigMap{ObjectMeta: meta, BinaryData: data}, metav1.CreateOptions{})
				}
				if err != nil {
					b.Errorf("create %s: %v", meta.Name, err)
					return
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(begun)
	if b.Failed() {
		b.FailNow()
	}
	x.wrote += slice
	x.took += took
	return took
}

// encrypts returns whether the first object is encrypted in etcd.
func (x *target) encrypts(b *testing.B) bool {
	b.Helper()
	r, err := etcdOf(b, x.cp).Get(b.Context(), "/registry/"+x.kind+"/default/written-1")
	if err != nil || len(r.Kvs) != 1 {
		b.Fatalf("read the first object: %v, %v", r, err)
	}
	return bytes.HasPrefix(r.Kvs[0].Value, []byte("k8s:enc:kms:v2:constellation:")) && !bytes.Contains(r.Kvs[0].Value, x.value)
}

// calls returns how often the API server called the key service to encrypt or decrypt.
func (x *target) calls(b *testing.B) (n float64) {
	b.Helper()
	text, err := x.k.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	count := regexp.MustCompile(`(?m)^apiserver_envelope_encryption_kms_operations_latency_seconds_count\{[^}]*KeyManagementService/(?:En|De)crypt"[^}]*\} (.*)$`)
	for _, match := range count.FindAllSubmatch(text, -1) {
		f, err := strconv.ParseFloat(string(match[1]), 64)
		if err != nil {
			b.Fatal(err)
		}
		n += f
	}
	return n
}

// cpu returns the processor time of API server and etcd.
func (x *target) cpu(b *testing.B) (total time.Duration) {
	b.Helper()
	for _, program := range []string{"kube-apiserver", "etcd"} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", x.cp.PID(program)))
		_, rest, ok := bytes.Cut(text, []byte(") ")) // the name of the program may contain spaces
		fields := bytes.Fields(rest)
		if err != nil || !ok || len(fields) < 13 {
			b.Fatalf("read processor time of %s: %v", program, err)
		}
		for _, f := range fields[11:13] { // user and system time in hundredths of a second
			n, err := strconv.Atoi(string(f))
			if err != nil {
				b.Fatal(err)
			}
			total += time.Duration(n) * 10 * time.Millisecond
		}
	}
	return total
}
