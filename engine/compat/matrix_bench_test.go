package compat

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	goversion "github.com/hashicorp/go-version"

	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
)

// aFeed returns a large feed: minors of the product, each with patches, each patch with three
// minors of Kubernetes.
func aFeed(minors, patches int) []release.Summary {
	var out []release.Summary
	for minor := range minors {
		for p := range patches {
			s := release.Summary{Version: ver(fmt.Sprintf("v1.%d.%d", minor, p))}
			if minor > 0 {
				s.UpgradeFrom = ver(fmt.Sprintf("v1.%d.0", minor-1))
			}
			for k := range 3 {
				for q := range 3 + p {
					s.Kubernetes = append(s.Kubernetes, release.KubernetesSummary{Version: ver(fmt.Sprintf("v1.%d.%d", 34+minor+k, q)), Etcd: fmt.Sprintf("3.6.%d-0", minor)})
				}
			}
			out = append(out, s)
		}
	}
	return out
}

// BenchmarkMatrix applies all rules to all pairs of Kubernetes versions of a feed. Most pairs
// are forbidden, with texts that name versions and remedies. "allowed" is a pair that no rule
// forbids. "bare" only compares the same pairs with go-version. cpu-ns/op is CPU time, which
// does not depend on the load of the machine.
func BenchmarkMatrix(b *testing.B) {
	m := NewMatrix(aFeed(4, 5))
	var all []version.Version
	var bare []*goversion.Version
	seen := map[string]bool{}
	for i := range m.releases {
		for _, p := range m.releases[i].patches {
			if !seen[p.version.String()] {
				seen[p.version.String()] = true
				all = append(all, p.version)
				bare = append(bare, goversion.Must(goversion.NewSemver(p.version.String())))
			}
		}
	}
	v := m.releases[len(m.releases)-1].Version
	now := At(v)
	measured := func(b *testing.B, pair func(i int)) {
		b.ReportAllocs()
		start := cpuTime(b)
		for i := 0; b.Loop(); i++ {
			pair(i)
		}
		b.ReportMetric(float64((cpuTime(b)-start).Nanoseconds())/float64(b.N), "cpu-ns/op")
	}
	b.Run("all", func(b *testing.B) {
		n := 0
		measured(b, func(i int) {
			from, to := At(all[i%len(all)]), all[i/len(all)%len(all)]
			r := Running{Services: now, ControlPlaneImage: now, WorkerImage: now, Kubernetes: from, ControlPlaneKubelet: from, WorkerKubelet: from}
			for _, res := range m.Check(v, r, Planned{Kubernetes: to}, Offer{}) {
				if res.Severity == plan.Block {
					n++
				}
			}
		})
		b.ReportMetric(float64(n)/float64(b.N), "blocks/op")
	})
	b.Run("allowed", func(b *testing.B) {
		r := at(v.String(), v.String(), "v1.38.1")
		p := to("", "", "v1.39.1")
		measured(b, func(int) {
			for _, res := range m.Check(v, r, p, Offer{}) {
				if res.Severity == plan.Block {
					b.Fatalf("%+v", *res)
				}
			}
		})
	})
	b.Run("bare", func(b *testing.B) {
		n := 0
		measured(b, func(i int) { n += bare[i%len(bare)].Compare(bare[i/len(bare)%len(bare)]) })
		if b.N > len(bare) && n == 0 {
			b.Fatal("every version is like every other one")
		}
	})
}

// cpuTime returns the CPU time of this process.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkPath plans from the oldest release and Kubernetes of a feed to the newest.
func BenchmarkPath(b *testing.B) {
	for _, size := range [][2]int{{2, 1}, {5, 5}, {12, 8}} {
		b.Run(fmt.Sprintf("%d-minors-of-%d", size[0], size[1]), func(b *testing.B) {
			m := NewMatrix(aFeed(size[0], size[1]))
			now := at("v1.0.0", "v1.0.0", "v1.34.0")
			var hops int
			for b.Loop() {
				way, why := m.Path(now, m.Goal(now, Planned{}, Offer{}), Offer{})
				if len(way) == 0 {
					b.Fatal(why)
				}
				hops = len(way)
			}
			b.ReportMetric(float64(hops), "hops")
		})
	}
}
