package check

import (
	"errors"
	"strings"
	"testing"

	"constellation/engine/cluster"
	"constellation/engine/plan"
)

func TestPackagesFinding(t *testing.T) {
	nodes := []cluster.Node{{Name: "worker-0", Group: "worker"}, {Name: "worker-1", Group: "worker"}}
	for _, tt := range []struct {
		name                       string
		wanted, upgraded, enrolled bool
		err                        error
		severity                   plan.Severity
		title, detail, remedy      string
	}{
		{name: "held", severity: plan.Info, title: "the hop leaves packages of containerd, runc and network plugins on 2 machines as they are", detail: "`packages: upgrade` in the configuration"},
		{name: "upgraded", wanted: true, upgraded: true, severity: plan.Info, title: "the hop upgrades packages of containerd, runc and network plugins on 2 machines", detail: "2 of worker (worker-0, worker-1): with apt"},
		{name: "not published, enrolled", wanted: true, enrolled: true, severity: plan.Warn, title: "the hop leaves", detail: "`packages: upgrade`, and the list of machines in the cluster has held", remedy: "`constellation init`"},
		{name: "not published, adopted", upgraded: true, severity: plan.Warn, title: "the hop upgrades", detail: "`packages: held`, and the list of machines in the cluster has upgrade", remedy: "`constellation adopt --operator`"},
		{name: "not read", err: errors.New("no answer"), severity: plan.NotChecked, title: "not checked", detail: "no answer", remedy: "try again"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := packagesFinding(nodes, tt.wanted, tt.upgraded, tt.enrolled, tt.err)
			if f.ID != "packages" || f.Severity != tt.severity || !strings.Contains(f.Title, tt.title) || !strings.Contains(f.Detail, tt.detail) || !strings.Contains(f.Remedy, tt.remedy) || tt.remedy == "" && f.Remedy != "" {
				t.Errorf("%+v", f)
			}
		})
	}
}
