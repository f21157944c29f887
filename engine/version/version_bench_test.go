package version

import (
	"slices"
	"testing"
)

// BenchmarkCompare compares versions of a typical feed: several minors and patches, and a
// pre-release.
func BenchmarkCompare(b *testing.B) {
	var list []Version
	for _, s := range []string{"v1.34.0", "v1.34.11", "v1.35.4", "v1.36.0-rc.1", "v1.36.0", "v1.36.3+build5", "v2.0.0"} {
		list = append(list, MustParse(s))
	}
	n := 0
	for i := 0; b.Loop(); i++ {
		n += list[i%len(list)].Compare(list[i/len(list)%len(list)])
	}
	_ = n
}

// BenchmarkString formats a version.
func BenchmarkString(b *testing.B) {
	v := MustParse("v1.36.3")
	for b.Loop() {
		if v.String() == "" {
			b.Fatal("empty")
		}
	}
}

// BenchmarkSort sorts 200 patches.
func BenchmarkSort(b *testing.B) {
	var list []Version
	for i := range 200 {
		list = append(list, MustParse("v1."+string(rune('0'+i*7%10))+"."+string(rune('0'+i*3%10))))
	}
	for b.Loop() {
		slices.SortFunc(slices.Clone(list), Version.Compare)
	}
}
