package main

import (
	"strings"

	"constellation/assets"
	"constellation/assets/render"
)

// plansHeader is the head of the plain manifest.
const plansHeader = `# Carries out Plans of upgrade.cattle.io/v1 in namespace system-upgrade, in any cluster:
#
#   kubectl apply -f system-upgrade.yaml
#
# The controller installs the kind Plan itself. The manifest replaces the Deployment of
# system-upgrade-controller, so that the two never run together, and takes over Plans, Jobs and
# labels of nodes. It leaves the roles, bindings and ConfigMap of system-upgrade-controller as
# they are; docs/plans.md describes the migration, and the way back.
#
# Generated from the chart constellation-plans. DO NOT EDIT: go test ./assets/render/pack -update
`

// plainPlans renders the chart constellation-plans for kubectl.
func plainPlans(release string) ([]byte, error) {
	b, err := render.Chart(assets.PlansChart, release, "system-upgrade", nil, map[string]any{"namespace": map[string]any{"create": true}})
	if err != nil {
		return nil, err
	}
	_, body, _ := strings.Cut(string(b), "/templates/plans.yaml\n")
	return []byte(plansHeader + strings.TrimSpace(body) + "\n"), nil
}
