// Package render shows what Helm would install of the charts in package assets,
// without a cluster. Values are checked against the chart's schema.
package render

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"

	"constellation/assets"
)

// Chart returns the manifests of a chart of a release, as one YAML stream. values
// are merged over the chart's.
//
// Charts of the services have no default for values that depend on the cloud. cloud has those, by
// path, as providers.Provider.ChartValues returns them. They are added to values, which have priority.
func Chart(name, release, namespace string, cloud, values map[string]any) ([]byte, error) {
	files, err := assets.ChartFor(name, release)
	if err != nil {
		return nil, err
	}
	ofCloud := map[string]any{}
	assets.SetValues(ofCloud, files, cloud)
	return Files(files, name, namespace, chartutil.CoalesceTables(values, ofCloud))
}

// Files returns the manifests of a chart with these files, as one YAML stream. values are merged over the chart's.
func Files(files []assets.File, name, namespace string, values map[string]any) ([]byte, error) {
	var buffered []*loader.BufferedFile
	for _, f := range files {
		buffered = append(buffered, &loader.BufferedFile{Name: f.Name, Data: f.Data})
	}
	c, err := loader.LoadFiles(buffered)
	if err != nil {
		return nil, fmt.Errorf("load chart %s: %w", name, err)
	}
	all, err := chartutil.ToRenderValues(c, values, chartutil.ReleaseOptions{Name: name, Namespace: namespace, IsInstall: true}, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, fmt.Errorf("check values of chart %s: %w", name, err)
	}
	out, err := engine.Render(c, all)
	if err != nil {
		return nil, fmt.Errorf("render chart %s: %w", name, err)
	}
	var b strings.Builder
	for _, f := range slices.Sorted(maps.Keys(out)) {
		if path.Ext(f) == ".yaml" {
			fmt.Fprintf(&b, "---\n# Source: %s\n%s\n", f, out[f])
		}
	}
	return []byte(b.String()), nil
}
