package preflight

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"

	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/engine/version"
)

const (
	deprecationGuide = "https://kubernetes.io/docs/reference/using-api/deprecation-guide/"
	crdGuide         = "https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definition-versioning/"
	apiServiceGuide  = "https://kubernetes.io/docs/tasks/extend-kubernetes/configure-aggregation-layer/"
)

var apiChecks = []checkItem{
	{
		id: "removed-apis-used", title: "no client uses an API that the hop or the minor after it removes", area: "apis", ref: deprecationGuide, byData: true, derived: derivedRemovals,
		needs: []source{sourceServers, sourceMetrics}, run: removedInUse,
	},
	{
		id: "removed-apis-written", title: "no object was last written through an API that the hop or the minor after it removes", area: "apis", ref: deprecationGuide, byData: true, derived: derivedRemovals,
		needs: []source{sourceWriters}, run: removedAtRest,
	},
	{
		id: "kinds", title: "every CustomResourceDefinition is healthy and serves its storage versions", area: "apis", ref: crdGuide,
		needs: []source{sourceKinds, sourceSlices, sourceServices}, run: kindsHealthy,
	},
	{
		id: "api-services", title: "every aggregated API is available", area: "apis", ref: apiServiceGuide,
		needs: []source{sourceAPIServices}, run: apiServicesAvailable,
	},
}

// removedAPI is a version of an API that a release of Kubernetes no longer serves.
type removedAPI struct {
	resource    schema.GroupVersionResource
	kind        string
	minor       int                     // of 1.x, the first release without it
	replacement schema.GroupVersionKind // zero if the types do not say
	deleted     bool                    // no version of the API reads stored objects afterwards
}

// knownRemovals returns all removals in the data and in the linked k8s.io/api, sorted. The data has
// those whose types the linked k8s.io/api lacks.
var knownRemovals = sync.OnceValue(func() (out []removedAPI) {
	for _, m := range lifecycle.Minors() {
		for _, r := range m.APIs {
			a := removedAPI{resource: schema.GroupVersionResource{Group: r.Group, Version: r.Version, Resource: r.Resource}, kind: r.Kind, minor: m.Number(), deleted: r.Deleted}
			if r.Replacement != "" {
				a.replacement = schema.GroupVersionKind{Group: r.Group, Version: r.Replacement, Kind: r.Kind}
			}
			out = append(out, a)
		}
	}
	for _, a := range linkedRemovals() {
		if !slices.ContainsFunc(out, func(b removedAPI) bool { return a.resource == b.resource }) { // a test compares the two
			out = append(out, a)
		}
	}
	slices.SortFunc(out, func(a, b removedAPI) int {
		return cmp.Or(cmp.Compare(a.minor, b.minor), cmp.Compare(a.resource.String(), b.resource.String()))
	})
	return out
})

// linkedRemovals returns what the lifecycle methods of the linked k8s.io/api say.
func linkedRemovals() (out []removedAPI) {
	for gvk, t := range scheme.Scheme.AllKnownTypes() {
		o, ok := reflect.New(t).Interface().(interface{ APILifecycleRemoved() (major, minor int) })
		if !ok || strings.HasSuffix(gvk.Kind, "List") {
			continue
		}
		a := removedAPI{kind: gvk.Kind}
		_, a.minor = o.APILifecycleRemoved()
		a.resource, _ = meta.UnsafeGuessKindToResource(gvk)
		if r, ok := o.(interface {
			APILifecycleReplacement() schema.GroupVersionKind
		}); ok {
			a.replacement = r.APILifecycleReplacement()
		}
		out = append(out, a)
	}
	return out
}

// removedAPIs returns what is served in from and not in to.
func removedAPIs(from, to version.Version) (out []removedAPI) {
	for _, a := range knownRemovals() {
		if from.Minor() < a.minor && a.minor <= to.Minor() {
			out = append(out, a)
		}
	}
	return out
}

// survivors returns the remaining APIs through which objects of removed resources can be
// read: the replacement, and every other version, stable ones first.
func survivors(gone []removedAPI, to version.Version) (out []schema.GroupVersionResource) {
	for _, a := range gone {
		if a.replacement.Version != "" {
			r, _ := meta.UnsafeGuessKindToResource(a.replacement)
			out = append(out, r)
		}
	}
	group, name := gone[0].resource.Group, gone[0].kind
	leaves := func(v string) bool {
		return slices.ContainsFunc(knownRemovals(), func(a removedAPI) bool {
			return a.resource.Group == group && a.resource.Version == v && a.kind == name && a.minor <= to.Minor()
		})
	}
	// Versions by priority of the scheme: stable before beta before alpha.
	for _, gv := range scheme.Scheme.PrioritizedVersionsForGroup(group) {
		if scheme.Scheme.Recognizes(gv.WithKind(name)) && !leaves(gv.Version) {
			out = append(out, gv.WithResource(gone[0].resource.Resource))
		}
	}
	return slices.Compact(out)
}

// title is "networking.k8s.io/v1beta1 ipaddresses".
func (a removedAPI) title() string {
	return printable(a.resource.GroupVersion().String() + " " + a.resource.Resource)
}

// remedy says what to use instead.
func (a removedAPI) remedy(who string) string {
	instead := "another API: this one has no successor"
	switch {
	case a.replacement.Version != "":
		instead = a.replacement.GroupVersion().String()
	default:
		if s := survivors([]removedAPI{a}, version.MustParse(fmt.Sprintf("v1.%d.0", a.minor))); len(s) > 0 {
			instead = s[0].GroupVersion().String()
		}
	}
	return fmt.Sprintf("change %s to %s, then run the check again; `kubectl convert` converts manifests", who, instead)
}

// minorAfter is the minor version after the hop. Its removals do not affect this hop, but
// reporting them now leaves time to change clients.
func minorAfter(to version.Version) version.Version {
	return version.MustParse(fmt.Sprintf("v%d.%d.0", to.Major(), to.Minor()+1))
}

// removals are those of the hop and the minor after it. They come from the linked types and
// from the API servers' metrics on requested APIs, which may be newer than the types.
func (w *world) removals() []removedAPI {
	next := minorAfter(w.request.To)
	out := removedAPIs(w.request.From, next)
	for i := range w.servers {
		for _, u := range w.servers[i].metrics.deprecated {
			r := schema.GroupVersionResource{Group: u.group, Version: u.version, Resource: u.resource}
			removed, err := version.Parse("v" + u.removed + ".0")
			if err != nil || slices.ContainsFunc(out, func(a removedAPI) bool { return a.resource == r }) {
				continue
			}
			if w.request.From.Minor() < removed.Minor() && removed.Minor() <= next.Minor() {
				out = append(out, removedAPI{resource: r, minor: removed.Minor()})
			}
		}
	}
	return out
}

// goneIn names the release that removes an API.
func (w *world) goneIn(a removedAPI) string {
	if a.minor > w.request.To.Minor() {
		return fmt.Sprintf("which v1.%d, the minor after this hop, no longer serves", a.minor)
	}
	return fmt.Sprintf("which v1.%d no longer serves", a.minor)
}

// removedInUse joins the APIs that clients requested with their writers.
func removedInUse(w *world, _ *probe) (out []plan.Finding) {
	for _, a := range w.removals() {
		var since time.Time // the latest start of all servers
		verbs := map[string]float64{}
		used := false
		for i := range w.servers {
			m := w.servers[i].metrics
			if since.Before(m.started) {
				since = m.started
			}
			for _, u := range m.deprecated {
				if u.group != a.resource.Group || u.version != a.resource.Version || u.resource != a.resource.Resource {
					continue
				}
				used = true
				for verb, n := range u.verbs {
					verbs[verb] += n
				}
			}
		}
		if !used || a.deleted {
			continue // the stored objects of a deleted API are reported by removed-apis-written
		}
		gone := w.goneIn(a)
		f := plan.Finding{Severity: plan.Warn, Title: "clients read " + a.title() + ", " + gone}
		var counts []string
		for _, verb := range slices.Sorted(maps.Keys(verbs)) {
			counts = append(counts, fmt.Sprintf("%s %.0f", printable(verb), verbs[verb]))
			if !slices.Contains([]string{"get", "list", "watch"}, verb) {
				f.Title = "clients write " + a.title() + ", " + gone
				if a.minor <= w.request.To.Minor() {
					f.Severity = plan.Block
				}
			}
		}
		f.Detail = fmt.Sprintf("requests since %s, when the newest API server process started: %s", stamp(since), cmp.Or(strings.Join(counts, ", "), "some"))
		who := "the client"
		if by := w.writers[a.resource]; len(by) > 0 {
			f.Detail += "; " + wroteLast(by)
			f.Owner, f.Objects = asked(by[0].manager), writtenObjects(a, by)
			who = lastWriter(by)
		} else if why, ok := w.unread[sourceWriters]; ok {
			f.Detail += "; the writers could not be read: " + why
		} else {
			f.Detail += "; no object identifies the client; search the API server's audit log for the annotation k8s.io/deprecated"
		}
		f.Remedy = a.remedy(who)
		out = append(out, f)
	}
	return out
}

// removedAtRest finds objects that were written through a removed API. They stay readable,
// but their writer will fail at its next write.
func removedAtRest(w *world, _ *probe) (out []plan.Finding) {
	used := map[schema.GroupVersionResource]bool{}
	for i := range w.servers {
		if m := w.servers[i].metrics; m != nil {
			for _, u := range m.deprecated {
				used[schema.GroupVersionResource{Group: u.group, Version: u.version, Resource: u.resource}] = true
			}
		}
	}
	for _, a := range removedAPIs(w.request.From, minorAfter(w.request.To)) {
		by := w.writers[a.resource]
		if a.deleted && len(by) > 0 {
			out = append(out, w.storedOfDeleted(a, by))
			continue
		}
		if len(by) == 0 || used[a.resource] && len(w.unread[sourceMetrics]) == 0 {
			continue // or reported together with its current clients
		}
		out = append(out, plan.Finding{
			Title:   "objects were written through " + a.title() + ", " + w.goneIn(a),
			Detail:  wroteLast(by),
			Owner:   asked(by[0].manager),
			Objects: writtenObjects(a, by),
			Remedy:  a.remedy(lastWriter(by)),
		})
	}
	return out
}

// storedOfDeleted reports objects that no API server of the release reads any more.
func (w *world) storedOfDeleted(a removedAPI, by []writer) plan.Finding {
	f := plan.Finding{
		Title: fmt.Sprintf("objects of %s are stored, and v1.%d does not read them", a.title(), a.minor), Detail: wroteLast(by), Owner: asked(by[0].manager), Objects: writtenObjects(a, by),
		Remedy:  "export what you need and delete the objects before the hop: afterwards they can be neither read nor deleted",
		Command: "kubectl delete " + strings.Join([]string{a.resource.Resource, a.resource.Version, a.resource.Group}, ".") + " --all --all-namespaces",
	}
	if a.minor <= w.request.To.Minor() {
		f.Severity = plan.Block
	}
	return f
}

// lastWriter is the client that must change: the first of writers, latest first.
func lastWriter(by []writer) string {
	return cmp.Or(asked(by[0].manager), "manifests applied with kubectl")
}

// wroteLast is "last written by argocd-controller on 2026-11-20 07:05 UTC (3 objects), before by kubectl".
func wroteLast(by []writer) string {
	at := ""
	if !by[0].at.IsZero() {
		at = " on " + stamp(by[0].at)
	}
	s := fmt.Sprintf("last written by %s%s: %s, of %s", printable(by[0].manager), at, by[0].object, count(by[0].objects, "object"))
	var others []string
	for _, b := range by[1:] {
		others = append(others, b.manager)
	}
	if len(others) > 0 {
		s += "; before by " + enumerate(others, 5)
	}
	return s
}

func writtenObjects(a removedAPI, by []writer) (out []string) {
	for _, b := range by {
		out = append(out, printable(strings.ToLower(a.kind))+"/"+strings.TrimPrefix(b.object, "/"))
	}
	return first(out)
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04 UTC") }

// kindsHealthy checks the conditions of CustomResourceDefinitions.
func kindsHealthy(w *world, _ *probe) (out []plan.Finding) {
	for i := range w.kinds {
		k := &w.kinds[i]
		name := printable(k.Name)
		add := func(s plan.Severity, title, detail, remedy string) {
			out = append(out, plan.Finding{
				Severity: s, Title: title, Detail: printable(detail), Remedy: remedy,
				Owner: keeperOf(&k.ObjectMeta), Objects: []string{object("CustomResourceDefinition", "", k.Name)},
			})
		}
		for _, c := range k.Status.Conditions {
			isTrue := c.Status == apiextensionsv1.ConditionTrue
			switch {
			case c.Type == apiextensionsv1.NonStructuralSchema && isTrue:
				add(plan.Block, "the schema of "+name+" is not structural", c.Message, "install a version of its operator with apiextensions.k8s.io/v1 schemas")
			case c.Type == apiextensionsv1.Terminating && isTrue:
				add(plan.Block, name+" is being deleted", c.Message, "wait until its objects are deleted; an object with a finalizer needs its controller"+lookAt("kubectl get %s -A", k.Name))
			case c.Type == apiextensionsv1.NamesAccepted && c.Status == apiextensionsv1.ConditionFalse:
				add(plan.Block, "the names of "+name+" are taken", c.Message, "delete one of the two definitions")
			case c.Type == apiextensionsv1.Established && c.Status == apiextensionsv1.ConditionFalse:
				add(plan.Warn, name+" is not served", c.Message, "see why its names or its schema are not accepted, or delete it")
			}
		}
		for _, stored := range k.Status.StoredVersions {
			j := slices.IndexFunc(k.Spec.Versions, func(v kindVersion) bool { return v.Name == stored })
			switch {
			case j < 0:
				add(plan.Block, fmt.Sprintf("%s may store objects as %s, which it does not have", name, printable(stored)),
					"status.storedVersions names it, spec.versions does not: its objects cannot be read",
					"bring the version back into the definition, rewrite every object, then take it out of status.storedVersions")
			case !k.Spec.Versions[j].Served && !k.Spec.Versions[j].Storage:
				add(plan.Warn, fmt.Sprintf("%s may store objects as %s, which it does not serve", name, printable(stored)),
					"they can be read only as long as the definition keeps that version",
					"rewrite every object in the version that is stored now, then take this one out of status.storedVersions")
			}
		}
		if c := k.Spec.Convert; c != nil && c.Webhook != nil && c.Webhook.ClientConfig != nil && c.Webhook.ClientConfig.Service != nil {
			s := c.Webhook.ClientConfig.Service
			if why := w.notServed(types.NamespacedName{Namespace: s.Namespace, Name: s.Name}); why != "" {
				add(plan.Block, "nobody converts "+name, fmt.Sprintf("its conversion webhook is service %s/%s: %s", s.Namespace, s.Name, why),
					"start what serves the webhook: without it the objects can be neither read nor written"+lookAt("kubectl -n %s get endpointslices,pods", s.Namespace))
			}
		}
	}
	return fold(out, "definitions with trouble")
}

// notServed says why a service has nobody who answers; empty if it has.
func (w *world) notServed(service types.NamespacedName) string {
	s, ok := w.services[service]
	if !ok {
		return "it does not exist"
	}
	if s.Spec.ExternalName != "" {
		return "" // the cluster has no record of the client
	}
	for i := range w.slices {
		e := &w.slices[i]
		if e.Namespace != service.Namespace || e.Labels["kubernetes.io/service-name"] != service.Name {
			continue
		}
		for _, p := range e.Endpoints {
			if p.Conditions.Ready == nil || *p.Conditions.Ready {
				return ""
			}
		}
	}
	return "it has no ready endpoint"
}

// apiServicesAvailable finds registered APIs that do not answer. Discovery, garbage
// collection and the deletion of namespaces stall on a single one.
func apiServicesAvailable(w *world, _ *probe) (out []plan.Finding) {
	for i := range w.apiServices {
		s := &w.apiServices[i]
		if s.Spec.Service == nil {
			continue // the API server itself
		}
		j := slices.IndexFunc(s.Status.Conditions, func(c metav1.Condition) bool { return c.Type == "Available" })
		if j >= 0 && s.Status.Conditions[j].Status == metav1.ConditionTrue {
			continue
		}
		f := plan.Finding{
			Severity: plan.Block, Title: fmt.Sprintf("the API %s is registered and not available", printable(s.Name)),
			Detail: "nothing has been said about it yet",
			Remedy: fmt.Sprintf("start its backend (service %s/%s), or delete the registration if it is unused: until then discovery, garbage collection and the deletion of namespaces stall",
				printable(s.Spec.Service.Namespace), printable(s.Spec.Service.Name)),
			Owner: keeperOf(&s.ObjectMeta), Objects: []string{object("APIService", "", s.Name)},
		}
		if j >= 0 {
			c := s.Status.Conditions[j]
			f.Detail = printable(strings.TrimPrefix(c.Reason+": "+c.Message, ": "))
			if c.Reason == "ServiceNotFound" {
				f.Command = command("kubectl delete apiservice %s", s.Name)
			}
		}
		out = append(out, f)
	}
	return fold(out, "aggregated APIs that are not available")
}
