package preflight

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/engine/version"
)

const (
	gitRepoPage    = "https://kubernetes.io/docs/concepts/storage/volumes/#gitrepo"
	externalIPPage = "https://kubernetes.io/docs/concepts/services-networking/service/#external-ips"
	// gitRepoGate is the feature gate of gitRepo volumes.
	gitRepoGate = "GitRepoVolumeDriver"
)

var retiredChecks = []checkItem{
	{
		id: "git-repo-volumes", area: "apis", ref: gitRepoPage, run: gitRepoVolumes,
		title: "no pod has a gitRepo volume", needs: []source{sourcePods, sourceReplicaSets, sourceDeployments, sourceStatefulSets, sourceDaemonSets},
	},
	{
		id: "external-ips", area: "network", ref: externalIPPage, run: externalIPs,
		title: "no Service uses spec.externalIPs", needs: []source{sourceServices},
	},
	{
		id: "add-on-versions", area: "versions", ref: addOnsPage, run: addOnVersions,
		title: "every known add-on lists the Kubernetes version of the hop", needs: []source{sourceDaemonSets, sourceDeployments, sourceStatefulSets},
	},
}

// gitRepoVolumes reports pods with volumes that kubelets do not mount any more.
func gitRepoVolumes(w *world, _ *probe) []plan.Finding {
	var with []*pod
	for i := range w.pods {
		if p := &w.pods[i]; len(p.gitRepo) > 0 && !p.over() {
			with = append(with, p)
		}
	}
	var found []plan.Finding
	for _, t := range w.teams(with) {
		f := plan.Finding{
			Title:  fmt.Sprintf("%s %s has the gitRepo volume %s, which is deprecated", t.kind, printable(t.namespace+"/"+t.name), printable(t.pods[0].gitRepo[0])),
			Detail: "the feature gate " + gitRepoGate + " must be on, and cloning runs as root on the node",
			Remedy: "clone in an init container into an emptyDir volume", Owner: w.keeper(t.pods[0]), Objects: t.objects(t.pods),
		}
		if locked := lifecycle.Locks(gitRepoGate); !locked.IsZero() && !w.request.To.Less(locked) {
			f.Severity = plan.Block
			f.Title = fmt.Sprintf("%s %s has the gitRepo volume %s, which kubelets cannot mount since %s", t.kind, printable(t.namespace+"/"+t.name), printable(t.pods[0].gitRepo[0]), locked.MinorString())
			f.Detail = "its pods do not start again once they are evicted: " + locked.MinorString() + " locks the feature gate " + gitRepoGate + " to off"
		}
		found = append(found, f)
	}
	return fold(found, "workloads with gitRepo volumes")
}

// externalIPs reports Services with addresses that any writer of Services can claim.
func externalIPs(w *world, _ *probe) []plan.Finding {
	var found []plan.Finding
	for _, s := range w.services {
		if len(s.Spec.ExternalIPs) == 0 || s.Spec.ClusterIP == corev1.ClusterIPNone || s.Spec.Type == corev1.ServiceTypeExternalName {
			continue // they are ignored there
		}
		found = append(found, plan.Finding{
			Title:  fmt.Sprintf("Service %s uses spec.externalIPs, which is deprecated and not implemented in every cluster", printable(s.Namespace+"/"+s.Name)),
			Detail: enumerate(s.Spec.ExternalIPs, 5) + "; anybody who can write Services can intercept traffic with them (CVE-2020-8554)",
			Remedy: "use a Service of type LoadBalancer or a Gateway", Owner: keeperOf(&s.ObjectMeta), Objects: []string{object("service", s.Namespace, s.Name)},
		})
	}
	slices.SortFunc(found, func(a, b plan.Finding) int { return cmp.Compare(a.Title, b.Title) })
	return fold(found, "Services with external IPs")
}

// addOnVersions compares the versions of add-ons with the target.
func addOnVersions(w *world, _ *probe) []plan.Finding {
	found := fold(AddOnVersions(w.addOnUses(), w.request.To), "add-ons whose version does not list the target")
	return append(found, w.unknownCharts()...)
}

// unknownCharts reports what Helm releases could say about add-ons and does not.
func (w *world) unknownCharts() []plan.Finding {
	if why, unread := w.unread[sourceCharts]; unread {
		return []plan.Finding{{
			Severity: plan.NotChecked, Title: "not checked which add-ons Helm installed: add-ons were recognised by image and label alone", Detail: string(sourceCharts) + ": " + why,
			Remedy: "allow the user to list Secrets, which contain Helm's releases",
		}}
	}
	if !w.request.Foreign {
		return nil // our charts are those of a release
	}
	var names, objects []string
	for _, h := range w.charts {
		if lifecycle.ByChart(h.chart) == nil && h.kubeVersion == "" && h.namespace != ownNamespace {
			names = append(names, fmt.Sprintf("%s %s (%s/%s)", h.chart, cmp.Or(h.appVersion, h.version), h.namespace, h.name))
			objects = append(objects, object("HelmRelease", h.namespace, h.name))
		}
	}
	if len(names) == 0 {
		return nil
	}
	return []plan.Finding{{
		Severity: plan.NotChecked, Title: fmt.Sprintf("not checked whether the charts of %s support Kubernetes %s: this program has no data about them", count(len(names), "Helm release"), w.request.To.MinorString()),
		Detail: enumerate(names, 10), Remedy: "look for the supported versions in the documentation of each chart", Objects: first(objects),
	}}
}

// releaseOf is the release of Helm that an object belongs to; empty if it belongs to none.
func releaseOf(m *metav1.ObjectMeta) types.NamespacedName {
	name := m.Annotations["meta.helm.sh/release-name"]
	if name == "" {
		return types.NamespacedName{}
	}
	return types.NamespacedName{Namespace: cmp.Or(m.Annotations["meta.helm.sh/release-namespace"], m.Namespace), Name: name}
}

// releaseUses are the add-ons of Helm releases, without those of the releases in known.
func (w *world) releaseUses(known map[types.NamespacedName]bool) (out []AddOnUse) {
	for _, h := range w.charts {
		a := lifecycle.ByChart(h.chart)
		if a == nil || h.namespace == ownNamespace || known[types.NamespacedName{Namespace: h.namespace, Name: h.name}] {
			continue
		}
		out = append(out, AddOnUse{
			AddOn: a, Version: h.appVersion, Object: object("HelmRelease", h.namespace, h.name), Title: "Helm release " + printable(h.namespace+"/"+h.name),
			Owner: fmt.Sprintf("namespace %s, Helm release %s", printable(h.namespace), printable(h.name)),
		})
	}
	return out
}

// addOnUses are the workloads that run add-ons, recognised by label, image or Helm release. A
// release has the version of an image without a tag. Our autoscaler is upgraded with the hop.
func (w *world) addOnUses() (out []AddOnUse) {
	apps := map[types.NamespacedName]string{} // versions of releases
	for _, h := range w.charts {
		apps[types.NamespacedName{Namespace: h.namespace, Name: h.name}] = h.appVersion
	}
	known := map[types.NamespacedName]bool{}
	add := func(kind string, m *metav1.ObjectMeta, spec *corev1.PodSpec) {
		if m.Name == autoscalerName {
			return
		}
		use := AddOnUse{Object: object(kind, m.Namespace, m.Name), Title: kind + " " + printable(m.Namespace+"/"+m.Name), Owner: keeperOf(m)}
		release := releaseOf(m)
		found := func() {
			use.Version = cmp.Or(use.Version, apps[release])
			known[release] = true
			out = append(out, use)
		}
		if use.AddOn, use.Version = lifecycle.ByLabels(m.Labels); use.AddOn != nil {
			found()
			return
		}
		for _, c := range slices.Concat(spec.Containers, spec.InitContainers) {
			if use.AddOn, use.Version = lifecycle.ByImage(c.Image); use.AddOn != nil {
				found()
			}
		}
	}
	for i := range w.deployments {
		add("Deployment", &w.deployments[i].ObjectMeta, &w.deployments[i].Spec.Template.Spec)
	}
	for i := range w.statefulSets {
		add("StatefulSet", &w.statefulSets[i].ObjectMeta, &w.statefulSets[i].Spec.Template.Spec)
	}
	for i := range w.daemonSets {
		add("DaemonSet", &w.daemonSets[i].ObjectMeta, &w.daemonSets[i].Spec.Template.Spec)
	}
	out = append(out, w.releaseUses(known)...)
	slices.SortFunc(out, func(a, b AddOnUse) int { return cmp.Compare(a.Object, b.Object) })
	return out
}

const addOnsPage = "https://kubernetes.io/docs/concepts/cluster-administration/addons/"

// AddOnUse is an object that runs an add-on.
type AddOnUse struct {
	AddOn *lifecycle.AddOn
	// Version is the version of the add-on; empty if unknown. Unknown is the reason then; empty if
	// the image has no tag.
	Version, Unknown string
	// Object is "kind/namespace/name", Title "Deployment shop/web".
	Object, Title string
	// Owner is who can change it; empty if unknown.
	Owner string
	// Location is where its image stands; zero for objects of a cluster.
	Location plan.Location
}

// AddOnVersions compares the versions of add-ons with a minor of Kubernetes. There is one
// finding for each version of an add-on that does not list the minor, or of which it is
// unknown.
func AddOnVersions(uses []AddOnUse, to version.Version) (out []plan.Finding) {
	type key struct{ name, version, unknown string }
	seen := map[key]int{} // in out
	for _, u := range uses {
		if len(u.AddOn.Versions) == 0 && !u.AddOn.Follows && u.AddOn.Nodes != "" {
			continue // the data has it for what it does to nodes alone
		}
		support, row := u.AddOn.On(u.Version, to)
		if support == lifecycle.Supported {
			continue
		}
		k := key{u.AddOn.Name, u.Version, u.Unknown}
		i, ok := seen[k]
		if !ok {
			i = len(out)
			seen[k] = i
			out = append(out, addOnFinding(u, support, row, to))
		}
		f := &out[i]
		if !slices.Contains(f.Objects, u.Object) && len(f.Objects) < maxObjects {
			f.Objects = append(f.Objects, u.Object)
		}
		if u.Location.File != "" && len(f.Locations) < 100 {
			f.Locations = append(f.Locations, u.Location)
		}
	}
	return out
}

func addOnFinding(u AddOnUse, support lifecycle.Support, row lifecycle.AddOnVersion, to version.Version) plan.Finding {
	name := strings.TrimSpace(u.AddOn.Name + " " + printable(u.Version))
	f := plan.Finding{ID: "add-on-versions", Source: "versions", Reference: cmp.Or(row.Source, addOnsPage), Owner: u.Owner}
	newest, known := u.AddOn.Newest(to)
	if known {
		f.Remedy = fmt.Sprintf("upgrade %s to %s or newer before the hop: it lists %s", u.AddOn.Name, newest.Version, newest.Range())
		f.Reference = cmp.Or(row.Source, newest.Source)
	} else {
		f.Remedy = fmt.Sprintf("the data of this program has no version of %s that lists %s: look for one in its documentation", u.AddOn.Name, to.MinorString())
	}
	switch support {
	case lifecycle.NotListed:
		f.Severity = plan.Warn
		f.Title = fmt.Sprintf("%s does not list Kubernetes %s", name, to.MinorString())
		f.Detail = fmt.Sprintf("version %s lists %s; first found in %s", row.Version, row.Range(), u.Title)
	default:
		f.Severity = plan.NotChecked
		f.Title = fmt.Sprintf("not checked whether %s supports Kubernetes %s", name, to.MinorString())
		f.Detail = "the data of this program has no row for this version; first found in " + u.Title
		if u.Version == "" {
			f.Detail = fmt.Sprintf("its version is unknown: %s; first found in %s", cmp.Or(u.Unknown, "the image has no tag"), u.Title)
		}
	}
	return f
}

// NodeActors reports add-ons that drain, reboot or remove nodes. There is one finding for each
// add-on.
func NodeActors(uses []AddOnUse) (out []plan.Finding) {
	seen := map[string]int{} // in out
	for _, u := range uses {
		if u.AddOn.Nodes == "" {
			continue
		}
		i, ok := seen[u.AddOn.Name]
		if !ok {
			i = len(out)
			seen[u.AddOn.Name] = i
			out = append(out, plan.Finding{
				ID: "node-actors", Severity: plan.Warn, Source: "actors", Reference: u.AddOn.Source, Owner: u.Owner,
				Title:  fmt.Sprintf("%s %s too: %s", u.AddOn.Name, u.AddOn.Nodes, u.Title),
				Remedy: "agree on one controller that drains nodes: pause it during the upgrade",
			})
		}
		f := &out[i]
		if !slices.Contains(f.Objects, u.Object) && len(f.Objects) < maxObjects {
			f.Objects = append(f.Objects, u.Object)
		}
		if u.Location.File != "" && len(f.Locations) < 100 {
			f.Locations = append(f.Locations, u.Location)
		}
	}
	return out
}
