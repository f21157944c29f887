package check

import (
	"fmt"
	"strings"
	"testing"

	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/engine/version"
)

func TestMinorsNewerThanTheData(t *testing.T) {
	newest := lifecycle.Newest()
	at := func(minors int) version.Version {
		return version.MustParse(fmt.Sprintf("v1.%d.1", newest.Minor()+minors))
	}
	for _, tt := range []struct {
		name              string
		running, hop, end version.Version
		changes           bool
		want              plan.Severity // empty: no finding
		unknown           string
		several           bool // minors are unknown
	}{
		{name: "known", running: at(-1), hop: at(0), end: at(0), changes: true},
		{name: "a patch of the newest known", running: at(0), hop: at(0), end: at(0), changes: true},
		{name: "the cluster is unreachable", running: version.Version{}, hop: at(0), end: at(1), changes: true},
		{name: "check of a hop", running: at(0), hop: at(1), end: at(1), want: plan.NotChecked, unknown: at(1).MinorString()},
		{name: "apply of the hop", running: at(0), hop: at(1), end: at(1), changes: true, want: plan.Block, unknown: at(1).MinorString()},
		{name: "apply of an earlier hop", running: at(-1), hop: at(0), end: at(2), changes: true, want: plan.NotChecked, unknown: at(1).MinorString() + " and " + at(2).MinorString(), several: true},
		{name: "check of a minor far away", running: at(0), hop: at(12), end: at(12), want: plan.NotChecked, unknown: at(1).MinorString() + " to " + at(12).MinorString(), several: true},
		{name: "apply of a patch of a minor that runs already", running: at(1), hop: at(1), end: at(1), changes: true, want: plan.NotChecked, unknown: at(1).MinorString()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := beyondData(tt.running, tt.hop, tt.end, tt.changes)
			if f == nil {
				if tt.want != "" {
					t.Fatalf("no finding, want %s", tt.want)
				}
				return
			}
			are := " is newer"
			if tt.several {
				are = " are newer"
			}
			if f.Severity != tt.want || !strings.Contains(f.Title, "Kubernetes "+tt.unknown+are) || f.Remedy == "" {
				t.Errorf("the finding is %+v, want %q about %q", f, tt.want, tt.unknown)
			}
		})
	}
}
