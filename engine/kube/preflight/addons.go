package preflight

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chartutil"

	"constellation/engine/plan"
)

const helmConstraint = "https://helm.sh/docs/topics/charts/#the-kubeversion-field"

var addonChecks = []checkItem{
	{
		id: "helm-charts", title: "every Helm release allows the Kubernetes version of the hop", area: "versions", ref: helmConstraint,
		needs: []source{sourceCharts}, run: chartsAllow,
	},
	{
		id: "add-ons", title: "network and storage drivers are listed", area: "versions", ref: "https://kubernetes.io/docs/concepts/cluster-administration/addons/",
		needs: []source{sourceDaemonSets, sourceDeployments}, run: addons,
	},
}

// chartsAllow compares the kubeVersion of charts with the target, as Helm does when
// the release is upgraded next.
func chartsAllow(w *world, _ *probe) (out []plan.Finding) {
	to := w.request.To.String()
	for _, h := range w.charts {
		if w.request.From.Equal(w.request.To) || h.kubeVersion == "" || chartutil.IsCompatibleRange(h.kubeVersion, to) {
			continue
		}
		f := plan.Finding{
			Title:   fmt.Sprintf("the chart %s %s of Helm release %s/%s does not allow Kubernetes %s", printable(h.chart), printable(h.version), printable(h.namespace), printable(h.name), to),
			Detail:  "its kubeVersion is " + printable(h.kubeVersion),
			Remedy:  "upgrade the release to a chart version that allows it before the hop",
			Owner:   fmt.Sprintf("namespace %s, Helm release %s", printable(h.namespace), printable(h.name)),
			Objects: []string{object("HelmRelease", h.namespace, h.name)},
		}
		if !chartutil.IsCompatibleRange(h.kubeVersion, w.request.From.String()) {
			f.Detail += ", which does not allow " + w.request.From.String() + " either"
		}
		out = append(out, f)
	}
	out = fold(out, "Helm releases that do not allow the Kubernetes version")
	if n := len(w.unreadableCharts); n > 0 {
		var objects []string
		for _, name := range w.unreadableCharts {
			objects = append(objects, object("HelmRelease", "", name))
		}
		title := fmt.Sprintf("not checked whether Helm release %s allows Kubernetes %s: it cannot be read", printable(w.unreadableCharts[0]), to)
		if n > 1 {
			title = fmt.Sprintf("not checked whether %d Helm releases allow Kubernetes %s: they cannot be read", n, to)
		}
		out = append(out, plan.Finding{
			Severity: plan.NotChecked, Title: title,
			Detail: "Helm's release secret cannot be decoded: " + enumerate(w.unreadableCharts, 10),
			Remedy: "repair or remove the releases; `helm upgrade` and `helm rollback` cannot read them either", Objects: first(objects),
		})
	}
	return out
}

// drivers are parts of the image names of network and storage drivers.
var drivers = []string{"csi", "cni", "cilium", "calico", "flannel", "weave", "antrea", "kube-router", "multus", "ovn", "snapshot-controller"}

// addons lists the images of drivers. Only their vendors publish which Kubernetes versions
// they support.
func addons(w *world, _ *probe) []plan.Finding {
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
		return []plan.Finding{{Severity: plan.Info, Title: "no third-party network or storage driver is deployed"}}
	}
	slices.Sort(images)
	images = slices.Compact(images)
	return []plan.Finding{{
		Severity: plan.Info, Title: count(len(images), "image") + " of network and storage drivers",
		Detail: enumerate(images, 40), Remedy: "check in their documentation that they support Kubernetes " + cmp.Or(w.request.To.String(), "of the hop"),
	}}
}
