package assets_test

import (
	"io/fs"
	"math"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"testing"
)

// The page has the exposure of each of our units, as systemd rates it. Versions of systemd differ a little.
func TestUnitsAreAsRestrictedAsThePageSays(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("needs systemd-analyze of systemd 250 or later")
	}
	page, err := os.ReadFile("../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := regexp.MustCompile("(?m)^\\| `(constellation-[a-z]+\\.service)` \\| [0-9.]+ \\| ([0-9.]+) \\|").FindAllSubmatch(page, -1)
	units, err := fs.Glob(os.DirFS("."), "systemd/constellation-*.service")
	if err != nil || len(units) == 0 {
		t.Fatalf("the folder has the units %q, %v", units, err)
	}
	var listed []string
	for _, row := range rows {
		listed = append(listed, "systemd/"+string(row[1]))
	}
	if slices.Sort(listed); !slices.Equal(listed, units) {
		t.Errorf("the page has the units %q, and the folder %q", listed, units)
	}
	overall := regexp.MustCompile(`Overall exposure level for [^:]+: ([0-9.]+)`)
	for _, row := range rows {
		unit := string(row[1])
		out, err := exec.CommandContext(t.Context(), analyze, "security", "--offline=true", "--no-pager", "systemd/"+unit).CombinedOutput() //nolint:gosec // one of our units
		m := overall.FindSubmatch(out)
		if m == nil {
			t.Skipf("needs systemd-analyze with --offline: %v\n%.400s", err, out)
		}
		got, err1 := strconv.ParseFloat(string(m[1]), 64)
		want, err2 := strconv.ParseFloat(string(row[2]), 64)
		if err1 != nil || err2 != nil || math.Abs(got-want) > 0.3 {
			t.Errorf("%s has the exposure %s, the page says %s", unit, m[1], row[2])
		}
	}
}
