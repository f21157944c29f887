package preflight

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chartutil"

	"constellation/engine"
)

const helmConstraint = "https://helm.sh/docs/topics/charts/#the-kubeversion-field"

var addonChecks = []check{
	{
		id: "helm-charts", title: "every Helm release allows the Kubernetes version of the hop", area: "versions", ref: helmConstraint,
		needs: []source{sourceCharts}, run: chartsAllow,
	},
	{
		id: "add-ons", title: "network and storage drivers are told", area: "versions", ref: "https://kubernetes.io/docs/concepts/cluster-administration/addons/",
		needs: []source{sourceDaemonSets, sourceDeployments}, run: addons,
	},
}

// chartsAllow compares the kubeVersion of charts with the target, as Helm does when
// the release is upgraded next.
func chartsAllow(w *world, _ *probe) (out []engine.Finding) {
	if w.request.From.Equal(w.request.To) {
		return nil
	}
	to := w.request.To.String()
	for _, h := range w.charts {
		if h.kubeVersion == "" || chartutil.IsCompatibleRange(h.kubeVersion, to) {
			continue
		}
		f := engine.Finding{
			Title:   fmt.Sprintf("the chart %s %s of Helm release %s/%s does not allow Kubernetes %s", printable(h.chart), printable(h.version), printable(h.namespace), printable(h.name), to),
			Detail:  "its kubeVersion is " + printable(h.kubeVersion),
			Remedy:  "upgrade the release to a version of the chart that allows it, before the hop",
			Owner:   fmt.Sprintf("namespace %s, Helm release %s", printable(h.namespace), printable(h.name)),
			Objects: []string{object("HelmRelease", h.namespace, h.name)},
		}
		if !chartutil.IsCompatibleRange(h.kubeVersion, w.request.From.String()) {
			f.Detail += ", which does not allow " + w.request.From.String() + " either"
		}
		out = append(out, f)
	}
	if len(w.unreadableCharts) > 0 {
		out = append(out, engine.Finding{
			Severity: engine.NotChecked, Title: fmt.Sprintf("%s cannot be read", count(len(w.unreadableCharts), "Helm release")), Detail: enumerate(w.unreadableCharts, 10),
			Remedy: "look at them with `helm list -A`; their secrets are damaged",
		})
	}
	return fold(out, "Helm releases that do not allow the Kubernetes version")
}

// drivers are words in images of what connects pods and volumes.
var drivers = []string{"csi", "cni", "cilium", "calico", "flannel", "weave", "antrea", "kube-router", "multus", "ovn", "snapshot-controller"}

// addons lists the images of drivers: which Kubernetes they support only their makers
// know.
func addons(w *world, _ *probe) []engine.Finding {
	var images []string
	add := func(namespace, name, image string) {
		repository, _, _ := strings.Cut(image, "@")
		path := repository[strings.IndexByte(repository, '/')+1:]
		if slices.ContainsFunc(drivers, func(d string) bool { return strings.Contains(path, d) }) {
			images = append(images, fmt.Sprintf("%s/%s %s", namespace, name, repository))
		}
	}
	for i := range w.daemonSets {
		d := &w.daemonSets[i]
		for _, c := range d.Spec.Template.Spec.Containers {
			add(d.Namespace, d.Name, c.Image)
		}
	}
	for i := range w.deployments {
		d := &w.deployments[i]
		for _, c := range d.Spec.Template.Spec.Containers {
			add(d.Namespace, d.Name, c.Image)
		}
	}
	if len(images) == 0 {
		return []engine.Finding{{Severity: engine.Info, Title: "no network or storage driver of others is deployed"}}
	}
	slices.Sort(images)
	images = slices.Compact(images)
	return []engine.Finding{{
		Severity: engine.Info, Title: count(len(images), "image") + " of network and storage drivers",
		Detail: enumerate(images, 40), Remedy: "see in their documentation that they support Kubernetes " + cmp.Or(w.request.To.String(), "of the hop"),
	}}
}
