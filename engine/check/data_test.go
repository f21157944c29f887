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
	}{
		{"known", at(-1), at(0), at(0), true, "", ""},
		{"a patch of the newest known", at(0), at(0), at(0), true, "", ""},
		{"the cluster is unreachable", version.Version{}, at(0), at(1), true, "", ""},
		{"check of a hop", at(0), at(1), at(1), false, plan.NotChecked, at(1).MinorString()},
		{"apply of the hop", at(0), at(1), at(1), true, plan.Block, at(1).MinorString()},
		{"apply of an earlier hop", at(-1), at(0), at(2), true, plan.NotChecked, at(1).MinorString() + " and " + at(2).MinorString()},
		{"check of a minor far away", at(0), at(12), at(12), false, plan.NotChecked, at(1).MinorString() + " to " + at(12).MinorString()},
		{"apply of a patch of a minor that runs already", at(1), at(1), at(1), true, plan.NotChecked, at(1).MinorString()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := beyondData(tt.running, tt.hop, tt.end, tt.changes)
			if f == nil {
				if tt.want != "" {
					t.Fatalf("no finding, want %s", tt.want)
				}
				return
			}
			if f.Severity != tt.want || !strings.Contains(f.Title, "Kubernetes "+tt.unknown+" is newer") || f.Remedy == "" {
				t.Errorf("the finding is %+v, want %q about %q", f, tt.want, tt.unknown)
			}
		})
	}
}
