package engine

import (
	"fmt"
	"testing"

	"constellation/engine/release"
	"constellation/engine/version"
)

// aFeed is a feed as it is after some years: minors of the product, each with
// patches, each patch with three minors of Kubernetes.
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

// BenchmarkMatrix applies all rules to pairs of versions: each version of Kubernetes of
// a feed to each other one, most of which are forbidden, by sentences with versions
// and remedies in them. "allowed" are pairs that no rule forbids.
func BenchmarkMatrix(b *testing.B) {
	m := NewMatrix(aFeed(4, 5))
	var all []version.Version
	seen := map[string]bool{}
	for i := range m.releases {
		for _, p := range m.releases[i].patches {
			if !seen[p.version.String()] {
				seen[p.version.String()] = true
				all = append(all, p.version)
			}
		}
	}
	rate := func(b *testing.B) { b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pairs/s") }
	v := m.releases[len(m.releases)-1].Version
	now := At(v)
	pairs := func(b *testing.B, check func(r Running, to Planned) []RuleResult) {
		n := 0
		for i := 0; b.Loop(); i++ {
			from, to := At(all[i%len(all)]), all[i/len(all)%len(all)]
			r := Running{Services: now, ControlPlaneImage: now, WorkerImage: now, Kubernetes: from, ControlPlaneKubelet: from, WorkerKubelet: from}
			for _, res := range check(r, Planned{Kubernetes: to}) {
				if res.Severity == Block {
					n++
				}
			}
		}
		rate(b)
		b.ReportMetric(float64(n)/float64(b.N), "blocks/pair")
	}
	b.Run("all", func(b *testing.B) {
		pairs(b, func(r Running, to Planned) []RuleResult { return m.Check(v, r, to, Offer{}) })
	})
	b.Run("all-into-one-slice", func(b *testing.B) {
		var dst []RuleResult
		pairs(b, func(r Running, to Planned) []RuleResult {
			dst = m.AppendCheck(dst[:0], v, r, to, Offer{})
			return dst
		})
	})
	b.Run("allowed", func(b *testing.B) {
		r := at(v.String(), v.String(), "v1.38.1")
		p := to("", "", "v1.39.1")
		var dst []RuleResult
		for b.Loop() {
			dst = m.AppendCheck(dst[:0], v, r, p, Offer{})
			for _, res := range dst {
				if res.Severity == Block {
					b.Fatal(res)
				}
			}
		}
		rate(b)
	})
}

// BenchmarkPath plans over a feed: from the oldest release and Kubernetes to the
// newest, one minor of both apart for each pair of hops.
func BenchmarkPath(b *testing.B) {
	for _, size := range [][2]int{{2, 1}, {5, 5}, {12, 8}} {
		b.Run(fmt.Sprintf("%d-minors-of-%d", size[0], size[1]), func(b *testing.B) {
			m := NewMatrix(aFeed(size[0], size[1]))
			now := at("v1.0.0", "v1.0.0", "v1.34.0")
			var hops int
			for b.Loop() {
				way, why := m.Path(now, m.Goal(now, Offer{}), Offer{})
				if len(way) == 0 {
					b.Fatal(why)
				}
				hops = len(way)
			}
			b.ReportMetric(float64(hops), "hops")
		})
	}
}
