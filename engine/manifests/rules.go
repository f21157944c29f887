package manifests

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/util/intstr"

	"constellation/engine/kube/preflight"
	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/engine/version"
)

// IDs of findings. Those that package preflight has too mean the same there.
const (
	idRemoved          = "removed-apis-written"
	idBudgetRoom       = "pdb-room"
	idBudgetOverlap    = "pdb-overlap"
	idSingleReplica    = "single-replica"
	idWebhookExemption = "webhook-exemption"
	idWebhookTimeout   = "webhook-timeout"
	idNodeActors       = "node-actors"
	idGitRepo          = "git-repo-volumes"
	idExternalIPs      = "external-ips"
	idFields           = "deprecated-fields"
	idAddOnVersions    = "add-on-versions"
)

const (
	budgetPage  = "https://kubernetes.io/docs/tasks/run-application/configure-pdb/"
	drainPage   = "https://kubernetes.io/docs/tasks/administer-cluster/safely-drain-node/"
	webhookPage = "https://kubernetes.io/docs/concepts/cluster-administration/admission-webhooks-good-practices/"
	guidePage   = "https://kubernetes.io/docs/reference/using-api/deprecation-guide/"
	gitRepoPage = "https://kubernetes.io/docs/concepts/storage/volumes/#gitrepo"
	servicePage = "https://kubernetes.io/docs/concepts/services-networking/service/#external-ips"
)

// rules are what a check looks for. They are shared by all workers and never change.
type rules struct {
	from, to version.Version
	removed  map[head]preflight.Removal
	fields   map[string][]lifecycle.Field // by place
}

func newRules(r Request) *rules {
	out := &rules{from: r.From, to: r.To, removed: map[head]preflight.Removal{}, fields: map[string][]lifecycle.Field{}}
	for _, a := range preflight.Removals("the manifest") {
		if a.Minor > r.To.Minor()+1 || !r.From.IsZero() && a.Minor <= r.From.Minor() {
			continue
		}
		apiVersion := a.Version
		if a.Group != "" {
			apiVersion = a.Group + "/" + a.Version
		}
		out.removed[head{apiVersion, a.Kind}] = a
	}
	for _, f := range lifecycle.Fields() {
		out.fields[f.At] = append(out.fields[f.At], f)
	}
	return out
}

// kinds are those that are checked for more than their version.
var kinds = map[string]bool{
	"Pod": true, "Deployment": true, "StatefulSet": true, "DaemonSet": true, "ReplicaSet": true, "ReplicationController": true,
	"Job": true, "CronJob": true, "PodTemplate": true,
	"PodDisruptionBudget": true, "HorizontalPodAutoscaler": true, "Service": true, "Ingress": true,
	"PersistentVolume": true, "PersistentVolumeClaim": true,
	"ValidatingWebhookConfiguration": true, "MutatingWebhookConfiguration": true,
	"Kustomization": true, "HelmRelease": true, "Plan": true, "NodePool": true,
}

// wants reports whether an object must be parsed. Secrets never are.
func (r *rules) wants(h head) bool {
	if h.kind == "Secret" {
		return false
	}
	_, removed := r.removed[h]
	return removed || kinds[h.kind] || strings.HasSuffix(h.kind, "List")
}

// object is one object of a file.
type object struct {
	head
	namespace, name string
	file            string
	offset          int // lines of the file before the document
	node            *yaml.Node
}

// at is the location of a value.
func (o *object) at(n *yaml.Node) []plan.Location {
	if n == nil {
		n = o.node
	}
	return location(o.file, o.offset+n.Line)
}

// String is "Deployment shop/web".
func (o *object) String() string {
	return preflight.Printable(o.kind + " " + strings.TrimPrefix(o.namespace+"/"+cmp.Or(o.name, "(no name)"), "/"))
}

func (o *object) objects() []string { return []string{preflight.Object(o.kind, o.namespace, o.name)} }

// workload is an object with pods.
type workload struct {
	kind, namespace, name, file string
	at                          []plan.Location
	replicas                    int // -1 if the file does not say
	dir                         string
	budgeted                    bool // a budget selects its pods
	labels                      map[string]string
}

func (w *workload) title() string {
	return preflight.Printable(w.kind + " " + strings.TrimPrefix(w.namespace+"/"+w.name, "/"))
}

// budget is a PodDisruptionBudget.
type budget struct {
	namespace, name, file        string
	at                           []plan.Location
	maxUnavailable, minAvailable string
	selector                     labels.Selector
}

// autoscaler is a HorizontalPodAutoscaler, which decides the replicas.
type autoscaler struct {
	namespace, kind, name string
	least                 int
}

// addOnUse is an image or a workload that belongs to an add-on.
type addOnUse struct {
	addOn   *lifecycle.AddOn
	version string
	unknown string // why the version is unknown; see preflight.AddOnUse
	object  string
	title   string
	at      plan.Location
}

// chartUse is a HelmRelease with a chart about which there is no data.
type chartUse struct {
	chart, object string
	at            plan.Location
}

// facts are what one worker found.
type facts struct {
	files, objects int
	bytes          int64
	skipped        []Skipped
	findings       []plan.Finding
	workloads      []workload
	budgets        []budget
	autoscalers    []autoscaler
	addOns         []addOnUse
	charts         []chartUse
	kustomizations []plan.Location
	// webhooks are findings that a patch of a kustomization can resolve; patched are the webhooks
	// with such a patch.
	webhooks []webhookFinding
	patched  []webhookKey
}

// webhookKey names a webhook of a configuration in a directory.
type webhookKey struct{ dir, kind, configuration, webhook string }

// webhookFinding is a finding about a webhook.
type webhookFinding struct {
	key   webhookKey
	found plan.Finding
}

func newFacts() *facts { return &facts{} }

func (f *facts) add(g *facts) {
	f.files += g.files
	f.objects += g.objects
	f.bytes += g.bytes
	f.skipped = append(f.skipped, g.skipped...)
	f.findings = append(f.findings, g.findings...)
	f.workloads = append(f.workloads, g.workloads...)
	f.budgets = append(f.budgets, g.budgets...)
	f.autoscalers = append(f.autoscalers, g.autoscalers...)
	f.addOns = append(f.addOns, g.addOns...)
	f.charts = append(f.charts, g.charts...)
	f.kustomizations = append(f.kustomizations, g.kustomizations...)
	f.webhooks = append(f.webhooks, g.webhooks...)
	f.patched = append(f.patched, g.patched...)
}

func (f *facts) skip(file string, line int, reason string) {
	f.skipped = append(f.skipped, Skipped{Location: plan.Location{File: preflight.Printable(file), Line: line}, Reason: reason})
}

func (f *facts) find(o *object, n *yaml.Node, found plan.Finding) {
	found.Locations = o.at(n)
	found.Objects = o.objects()
	found.Source = cmp.Or(found.Source, "files")
	f.findings = append(f.findings, found)
}

// object checks one object, or the items of a list.
func (p *parser) object(file string, offset int, n *yaml.Node, depth int) {
	n = resolved(n)
	o := object{head: head{str(get(n, "apiVersion")), str(get(n, "kind"))}, file: preflight.Printable(file), offset: offset, node: n}
	if o.apiVersion == "" || o.kind == "" || depth > 2 {
		return
	}
	if strings.HasSuffix(o.kind, "List") {
		if list := items(get(n, "items")); list != nil || o.kind == "List" {
			for _, item := range list {
				p.object(file, offset, item, depth+1)
			}
			return
		}
	}
	p.facts.objects++
	if !p.rules.wants(o.head) {
		return
	}
	o.namespace, o.name = str(get(n, "metadata", "namespace")), str(get(n, "metadata", "name"))
	if o.name == "" {
		o.name = str(get(n, "metadata", "generateName"))
	}
	p.removedAPI(&o)
	switch group, _, _ := strings.Cut(o.apiVersion, "/"); o.kind {
	case "PodDisruptionBudget":
		p.budget(&o)
	case "HorizontalPodAutoscaler":
		p.autoscaler(&o)
	case "Service":
		p.service(&o)
	case "Ingress":
		p.annotations(&o, lifecycle.AtIngressAnnotation, get(n, "metadata", "annotations"))
	case "PersistentVolume":
		p.annotations(&o, lifecycle.AtVolumeAnnotation, get(n, "metadata", "annotations"))
	case "PersistentVolumeClaim":
		p.annotations(&o, lifecycle.AtClaimAnnotation, get(n, "metadata", "annotations"))
	case "ValidatingWebhookConfiguration", "MutatingWebhookConfiguration":
		p.webhooks(&o)
	case "Kustomization":
		if strings.HasPrefix(group, "kustomize.config") {
			p.facts.kustomizations = append(p.facts.kustomizations, plan.Location{File: o.file})
			p.patches(&o)
		}
	case "HelmRelease":
		if group == "helm.toolkit.fluxcd.io" {
			p.helmRelease(&o)
		}
	case "Plan", "NodePool":
		p.nodeObject(&o, group)
	default:
		p.workload(&o)
	}
}

// removedAPI reports an object in a version that the target no longer serves.
func (p *parser) removedAPI(o *object) {
	a, ok := p.rules.removed[o.head]
	if !ok {
		return
	}
	f := plan.Finding{
		ID: idRemoved, Field: preflight.Printable(o.apiVersion), Severity: plan.Block, Source: "apis", Reference: guidePage,
		Title:  fmt.Sprintf("%s uses %s, which v1.%d no longer serves", o, preflight.Printable(o.apiVersion), a.Minor),
		Detail: fmt.Sprintf("an API server of v1.%d and newer rejects the manifest", a.Minor), Remedy: a.Remedy,
	}
	if a.Minor > p.rules.to.Minor() {
		f.Severity = plan.Warn
		f.Detail += fmt.Sprintf("; v1.%d, the target, still serves it", p.rules.to.Minor())
	}
	p.facts.find(o, get(o.node, "apiVersion"), f)
}

// podOf returns the pod template of a workload: its metadata and its spec.
func podOf(o *object) (meta, spec *yaml.Node) {
	switch o.kind {
	case "Pod":
		return get(o.node, "metadata"), get(o.node, "spec")
	case "CronJob":
		t := get(o.node, "spec", "jobTemplate", "spec", "template")
		return get(t, "metadata"), get(t, "spec")
	case "PodTemplate":
		t := get(o.node, "template")
		return get(t, "metadata"), get(t, "spec")
	}
	t := get(o.node, "spec", "template")
	return get(t, "metadata"), get(t, "spec")
}

func (p *parser) workload(o *object) {
	meta, spec := podOf(o)
	if spec == nil {
		return
	}
	p.annotations(o, lifecycle.AtPodAnnotation, get(meta, "annotations"))
	p.volumes(o, spec)
	p.nodeLabels(o, spec)
	p.images(o, spec)
	if o.kind != "Deployment" && o.kind != "StatefulSet" {
		return
	}
	if o.apiVersion == "apps/v1" && get(o.node, "spec", "selector") == nil {
		return // a patch: the API server requires a selector, and the replicas are those of another file
	}
	w := workload{kind: o.kind, namespace: o.namespace, name: o.name, file: o.file, replicas: 1, labels: stringMap(get(meta, "labels")), at: o.at(nil)}
	if n := get(o.node, "spec", "replicas"); n != nil && n.Tag != "!!null" {
		w.at = o.at(n)
		var ok bool
		if w.replicas, ok = num(n); !ok {
			w.replicas = -1 // a placeholder
		}
	}
	p.facts.workloads = append(p.facts.workloads, w)
}

// annotations reports deprecated annotations. Those of pods may be prefixes.
func (p *parser) annotations(o *object, at string, n *yaml.Node) {
	for _, e := range entries(n) {
		for _, f := range p.rules.fields[at] {
			if e.key.Value == f.Name {
				p.deprecated(o, e.key, "annotation "+f.Name, &f)
			}
		}
		if at != lifecycle.AtPodAnnotation {
			continue
		}
		for _, f := range p.rules.fields[lifecycle.AtPodAnnotationPrefix] {
			if strings.HasPrefix(e.key.Value, f.Name) {
				p.deprecated(o, e.key, "annotation "+e.key.Value, &f)
			}
		}
	}
}

func (p *parser) deprecated(o *object, n *yaml.Node, what string, f *lifecycle.Field) {
	found := plan.Finding{
		ID: idFields, Field: preflight.Printable(what), Severity: plan.Warn, Source: "apis", Reference: f.Source,
		Title:  fmt.Sprintf("%s uses the deprecated %s", o, preflight.Printable(what)),
		Remedy: "use " + f.Instead + " instead",
	}
	switch {
	case f.GoneIn(p.rules.to):
		found.Title = fmt.Sprintf("%s uses the %s, which has no effect since %s", o, preflight.Printable(what), f.Gone)
	case f.Deprecated != "":
		found.Detail = "deprecated since " + f.Deprecated + "; it still has an effect in " + p.rules.to.MinorString()
	default:
		found.Detail = "it still has an effect in " + p.rules.to.MinorString()
	}
	if f.At == lifecycle.AtVolume && f.GoneIn(p.rules.to) {
		found.Severity = plan.Block
		found.Title = fmt.Sprintf("%s uses the %s, which kubelets cannot mount since %s", o, preflight.Printable(what), f.Gone)
		found.Detail = "its pods do not start"
	}
	p.facts.find(o, n, found)
}

// gitRepoGate is the feature gate of gitRepo volumes.
const gitRepoGate = "GitRepoVolumeDriver"

func (p *parser) volumes(o *object, spec *yaml.Node) {
	for _, v := range items(get(spec, "volumes")) {
		for _, e := range entries(v) {
			if e.key.Value == "gitRepo" {
				p.gitRepo(o, e.key, str(get(v, "name")))
			}
			for _, f := range p.rules.fields[lifecycle.AtVolume] {
				if e.key.Value == f.Name {
					p.deprecated(o, e.key, f.Name+" volume "+str(get(v, "name")), &f)
				}
			}
		}
	}
}

func (p *parser) gitRepo(o *object, n *yaml.Node, volume string) {
	f := plan.Finding{
		ID: idGitRepo, Severity: plan.Warn, Source: "files", Reference: gitRepoPage,
		Title:  fmt.Sprintf("%s has the gitRepo volume %s, which is deprecated", o, preflight.Printable(volume)),
		Detail: "the feature gate " + gitRepoGate + " must be on, and cloning runs as root on the node",
		Remedy: "clone in an init container into an emptyDir volume",
	}
	if locked := lifecycle.Locks(gitRepoGate); !locked.IsZero() && !p.rules.to.Less(locked) {
		f.Severity = plan.Block
		f.Title = fmt.Sprintf("%s has the gitRepo volume %s, which kubelets cannot mount since %s", o, preflight.Printable(volume), locked.MinorString())
		f.Detail = "its pods do not start: " + locked.MinorString() + " locks the feature gate " + gitRepoGate + " to off"
	}
	p.facts.find(o, n, f)
}

// nodeLabels reports deprecated labels of nodes in selectors.
func (p *parser) nodeLabels(o *object, spec *yaml.Node) {
	check := func(n *yaml.Node, key string) {
		for _, f := range p.rules.fields[lifecycle.AtNodeLabel] {
			if key == f.Name {
				p.deprecated(o, n, "node label "+f.Name, &f)
			}
		}
	}
	for _, e := range entries(get(spec, "nodeSelector")) {
		check(e.key, e.key.Value)
	}
	affinity := get(spec, "affinity", "nodeAffinity")
	terms := items(get(affinity, "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"))
	for _, t := range items(get(affinity, "preferredDuringSchedulingIgnoredDuringExecution")) {
		terms = append(terms, get(t, "preference"))
	}
	for _, t := range terms {
		for _, e := range items(get(t, "matchExpressions")) {
			key := get(e, "key")
			check(key, str(key))
		}
	}
}

// images notes add-ons.
func (p *parser) images(o *object, spec *yaml.Node) {
	note := func(a *lifecycle.AddOn, v string, n *yaml.Node) {
		p.facts.addOns = append(p.facts.addOns, addOnUse{addOn: a, version: v, object: o.objects()[0], title: o.String(), at: o.at(n)[0]})
	}
	if a, v := lifecycle.ByLabels(stringMap(get(o.node, "metadata", "labels"))); a != nil && o.kind != "Pod" {
		note(a, v, nil)
		return
	}
	for _, list := range []string{"containers", "initContainers"} {
		for _, c := range items(get(spec, list)) {
			if image := get(c, "image"); image != nil {
				if a, v := lifecycle.ByImage(str(image)); a != nil {
					note(a, v, image)
				}
			}
		}
	}
}

// pinned is one version of a chart; all else is a range, or a placeholder.
var pinned = regexp.MustCompile(`^v?\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?$`)

// helmRelease notes the add-on that a HelmRelease of Flux installs. A chart in a Git repository or a
// bucket is a path.
func (p *parser) helmRelease(o *object) {
	spec := get(o.node, "spec", "chart", "spec")
	chart, n := str(get(spec, "chart")), get(spec, "version")
	if chart == "" {
		if ref := get(o.node, "spec", "chartRef"); ref != nil {
			name := "of " + strings.TrimSpace(str(get(ref, "kind"))+" "+str(get(ref, "name")))
			p.facts.charts = append(p.facts.charts, chartUse{chart: preflight.Printable(name), object: o.objects()[0], at: o.at(ref)[0]})
		}
		return // else it is a patch
	}
	at, v := o.at(cmp.Or(n, get(spec, "chart")))[0], str(n)
	a := lifecycle.ByChart(path.Base(chart))
	if a == nil {
		p.facts.charts = append(p.facts.charts, chartUse{chart: preflight.Printable(strings.TrimSpace(path.Base(chart) + " " + v)), object: o.objects()[0], at: at})
		return
	}
	use := addOnUse{addOn: a, object: o.objects()[0], title: o.String(), at: at}
	switch {
	case v == "":
		use.unknown = "the HelmRelease does not name the version of the chart"
	case !pinned.MatchString(v):
		use.unknown = fmt.Sprintf("%q is not one version of the chart", preflight.Printable(v))
	case a.ChartSource == "":
		use.unknown = fmt.Sprintf("the data of this program does not have the version that chart %s %s installs", preflight.Printable(path.Base(chart)), preflight.Printable(v))
	default:
		use.version = v
	}
	p.facts.addOns = append(p.facts.addOns, use)
}

// chartFindings names the charts about which there is no data.
func (f *facts) chartFindings(r *rules) {
	if len(f.charts) == 0 {
		return
	}
	slices.SortFunc(f.charts, func(a, b chartUse) int { return cmp.Or(byLocation(a.at, b.at), strings.Compare(a.object, b.object)) })
	found := plan.Finding{
		ID: idAddOnVersions, Severity: plan.NotChecked, Source: "versions",
		Title:  fmt.Sprintf("not checked whether the charts of %s support Kubernetes %s: this program has no data about them", countOf(len(f.charts), "HelmRelease", "HelmReleases"), r.to.MinorString()),
		Remedy: "look for the supported versions in the documentation of each chart",
	}
	var names []string
	for _, c := range f.charts {
		if !slices.Contains(names, c.chart) {
			names = append(names, c.chart)
		}
		found.Locations, found.Objects = append(found.Locations, c.at), append(found.Objects, c.object)
	}
	const shown = 10
	found.Detail = strings.Join(names[:min(len(names), shown)], ", ")
	if more := len(names) - shown; more > 0 {
		found.Detail += fmt.Sprintf(" and %d more", more)
	}
	found.Locations, found.Objects = limited(found.Locations), found.Objects[:min(len(found.Objects), 100)]
	f.findings = append(f.findings, found)
}

func (p *parser) service(o *object) {
	p.annotations(o, lifecycle.AtServiceAnnotation, get(o.node, "metadata", "annotations"))
	ips := get(o.node, "spec", "externalIPs")
	if len(items(ips)) == 0 || str(get(o.node, "spec", "clusterIP")) == "None" || str(get(o.node, "spec", "type")) == "ExternalName" {
		return // they are ignored there
	}
	p.facts.find(o, ips, plan.Finding{
		ID: idExternalIPs, Severity: plan.Warn, Source: "network", Reference: servicePage,
		Title:  fmt.Sprintf("%s uses spec.externalIPs, which is deprecated and not implemented in every cluster", o),
		Detail: countOf(len(items(ips)), "address", "addresses") + "; anybody who can write Services can intercept traffic with them (CVE-2020-8554)",
		Remedy: "use a Service of type LoadBalancer or a Gateway",
	})
}

func (p *parser) autoscaler(o *object) {
	target := get(o.node, "spec", "scaleTargetRef")
	least := 1
	if n, ok := num(get(o.node, "spec", "minReplicas")); ok {
		least = n
	}
	p.facts.autoscalers = append(p.facts.autoscalers, autoscaler{o.namespace, str(get(target, "kind")), str(get(target, "name")), least})
}

func (p *parser) budget(o *object) {
	b := budget{namespace: o.namespace, name: o.name, file: o.file, at: o.at(nil)}
	if n := get(o.node, "spec", "maxUnavailable"); str(n) != "" {
		b.maxUnavailable, b.at = str(n), o.at(n)
	}
	if n := get(o.node, "spec", "minAvailable"); str(n) != "" {
		b.minAvailable, b.at = str(n), o.at(n)
	}
	var s metav1.LabelSelector
	if n := get(o.node, "spec", "selector"); n != nil && decode(n, &s) == nil {
		if selector, err := metav1.LabelSelectorAsSelector(&s); err == nil {
			b.selector = selector
		}
	}
	p.facts.budgets = append(p.facts.budgets, b)
}

// decode decodes a small value into a type of the API.
func decode(n *yaml.Node, into any) error {
	var v any
	if err := n.Decode(&v); err != nil {
		return err
	}
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, into)
}

// webhooks reports webhooks that stop everything while their backend is down.
func (p *parser) webhooks(o *object) {
	for i, n := range items(get(o.node, "webhooks")) {
		var w admissionv1.ValidatingWebhook // its fields are those of a mutating one, as far as they matter here
		if decode(n, &w) != nil || w.FailurePolicy != nil && *w.FailurePolicy != admissionv1.Fail {
			continue
		}
		if w.FailurePolicy == nil && strings.HasSuffix(o.apiVersion, "/v1beta1") {
			continue // its default is Ignore
		}
		if len(w.Rules) == 0 { // a patch: without rules a webhook reviews nothing
			if w.NamespaceSelector != nil && !sees(&w, metav1.NamespaceSystem) {
				p.facts.patched = append(p.facts.patched, webhookKey{path.Dir(o.file), o.kind, o.name, w.Name})
			}
			continue
		}
		requests, pods := preflight.Reviews(w.Rules)
		if len(requests) == 0 {
			continue
		}
		name := preflight.Printable(w.Name)
		detail := fmt.Sprintf("webhook %d of %s has failurePolicy Fail, and reviews %s", i+1, o, strings.Join(requests, ", "))
		if len(w.MatchConditions) > 0 {
			detail += "; its matchConditions may exclude some of it, and were not evaluated"
		}
		if w.TimeoutSeconds != nil && *w.TimeoutSeconds > 10 {
			p.facts.find(o, get(n, "timeoutSeconds"), plan.Finding{
				ID: idWebhookTimeout, Severity: plan.Warn, Source: "webhooks", Reference: webhookPage, Detail: detail,
				Title:  fmt.Sprintf("webhook %s has a timeout of %d s", name, *w.TimeoutSeconds),
				Remedy: "lower timeoutSeconds to 10 or less: while the backend is down, every request that it reviews takes that long",
			})
		}
		if !pods || len(w.MatchConditions) > 0 {
			continue
		}
		var reached []string
		for _, namespace := range namespacesOf(&w) {
			if sees(&w, namespace) {
				reached = append(reached, preflight.Printable(namespace))
			}
		}
		if len(reached) == 0 {
			continue
		}
		p.facts.webhooks = append(p.facts.webhooks, webhookFinding{webhookKey{path.Dir(o.file), o.kind, o.name, w.Name}, plan.Finding{
			ID: idWebhookExemption, Severity: plan.Warn, Source: "webhooks", Reference: webhookPage, Detail: detail,
			Title:     fmt.Sprintf("webhook %s reviews new pods of namespace %s", name, strings.Join(reached, " and ")),
			Remedy:    "exclude these namespaces with namespaceSelector: while the backend is down, its own pods and those of the control plane cannot be created",
			Locations: o.at(cmp.Or(get(n, "failurePolicy"), n)), Objects: o.objects(),
		}})
	}
}

// patches reads the patches in a kustomization. Those in files are read as objects.
func (p *parser) patches(o *object) {
	for _, list := range []string{"patches", "patchesStrategicMerge"} {
		for _, n := range items(get(o.node, list)) {
			text := cmp.Or(str(get(n, "patch")), str(n))
			var doc yaml.Node
			if !strings.Contains(text, "WebhookConfiguration") || yaml.Unmarshal([]byte(text), &doc) != nil || len(doc.Content) == 0 {
				continue
			}
			patch := object{head: head{str(get(doc.Content[0], "apiVersion")), str(get(doc.Content[0], "kind"))}, file: o.file, node: doc.Content[0]}
			patch.name = str(get(patch.node, "metadata", "name"))
			if strings.HasSuffix(patch.kind, "WebhookConfiguration") {
				p.webhooks(&patch)
			}
		}
	}
}

// webhookFindings reports webhooks, except those that a patch of their directory tree keeps away
// from kube-system. The other namespaces are those of `kustomize build`, which may rename them.
func (f *facts) webhookFindings() {
	for i := range f.webhooks {
		w := &f.webhooks[i]
		if !slices.ContainsFunc(f.patched, func(k webhookKey) bool {
			return same(k.dir, w.key.dir) && k.kind == w.key.kind && k.configuration == w.key.configuration && k.webhook == w.key.webhook
		}) {
			f.findings = append(f.findings, w.found)
		}
	}
}

// namespacesOf are the namespaces that a webhook must not review: kube-system and that of its
// backend.
func namespacesOf(w *admissionv1.ValidatingWebhook) []string {
	out := []string{metav1.NamespaceSystem}
	if s := w.ClientConfig.Service; s != nil && s.Namespace != "" && s.Namespace != metav1.NamespaceSystem {
		out = append(out, s.Namespace)
	}
	return out
}

// sees reports whether the selectors of w match every pod of a namespace. Only the name of the
// namespace is known, and no label of its pods.
func sees(w *admissionv1.ValidatingWebhook, namespace string) bool {
	byNamespace, err := metav1.LabelSelectorAsSelector(w.NamespaceSelector)
	if err != nil {
		return false
	}
	if w.NamespaceSelector == nil {
		byNamespace = labels.Everything()
	}
	byObject, err := metav1.LabelSelectorAsSelector(w.ObjectSelector)
	if err != nil {
		return false
	}
	return byNamespace.Matches(labels.Set{"kubernetes.io/metadata.name": namespace}) && (w.ObjectSelector == nil || byObject.Empty())
}

// nodeObject reports objects by which another controller replaces nodes.
func (p *parser) nodeObject(o *object, group string) {
	f := plan.Finding{ID: idNodeActors, Severity: plan.Warn, Source: "actors"}
	switch {
	case o.kind == "Plan" && group == "upgrade.cattle.io":
		f.Title = o.String() + " of the system-upgrade-controller upgrades and drains nodes"
		f.Remedy = "agree on one controller that drains nodes: set spec.concurrency to 0 during the upgrade"
	case o.kind == "NodePool" && group == "karpenter.sh":
		f.Title = o.String() + " of Karpenter can remove nodes during the upgrade"
		f.Remedy = `set its disruption budget to 0 nodes during the upgrade`
	default:
		return
	}
	p.facts.find(o, nil, f)
}

// same reports whether two directories may belong to the same deployment: one has the other.
func same(a, b string) bool {
	within := func(dir, of string) bool {
		return of == "." || dir == of || strings.HasPrefix(dir, of) && dir[len(of)] == '/'
	}
	return within(a, b) || within(b, a)
}

// index finds workloads by namespace and one label, so that large repositories need no
// comparison of every budget with every workload.
type index map[[3]string][]*workload

func indexOf(all []workload) index {
	out := index{}
	for i := range all {
		w := &all[i]
		w.dir = path.Dir(w.file)
		out[[3]string{w.namespace}] = append(out[[3]string{w.namespace}], w)
		for k, v := range w.labels {
			key := [3]string{w.namespace, k, v}
			out[key] = append(out[key], w)
		}
	}
	return out
}

// covered are the workloads of the directory tree whose pods b selects.
func (x index) covered(b *budget) (out []*workload) {
	if b.selector == nil {
		return nil
	}
	candidates := x[[3]string{b.namespace}]
	if requirements, selectable := b.selector.Requirements(); selectable {
		for _, r := range requirements {
			if values := r.Values(); (r.Operator() == selection.In || r.Operator() == selection.Equals) && values.Len() == 1 {
				candidates = x[[3]string{b.namespace, r.Key(), values.UnsortedList()[0]}]
				break
			}
		}
	}
	dir := path.Dir(b.file)
	for _, w := range candidates {
		if same(dir, w.dir) && b.selector.Matches(labels.Set(w.labels)) {
			out = append(out, w)
		}
	}
	return out
}

// budgetFindings reports budgets that allow no disruption, and pods with two of them.
func (f *facts) budgetFindings() {
	scaled := map[[3]string]bool{}
	for _, a := range f.autoscalers {
		scaled[[3]string{a.namespace, a.kind, a.name}] = true
	}
	workloads := indexOf(f.workloads)
	covering := map[*workload][]*budget{}
	for i := range f.budgets {
		b := &f.budgets[i]
		covered := workloads.covered(b)
		for _, w := range covered {
			covering[w] = append(covering[w], b)
		}
		if why := b.never(covered, scaled); why != "" {
			f.findings = append(f.findings, plan.Finding{
				ID: idBudgetRoom, Severity: plan.Block, Source: "disruption", Reference: budgetPage,
				Title:  fmt.Sprintf("PodDisruptionBudget %s never allows a disruption: %s", b.title(), why),
				Detail: "the drain of a node with one of its pods does not end", Locations: b.at,
				Remedy:  "allow one disruption at a time; one more replica keeps as many available as now",
				Objects: []string{preflight.Object("poddisruptionbudget", b.namespace, b.name)},
			})
		}
	}
	for i := range f.workloads {
		w := &f.workloads[i]
		w.budgeted = len(covering[w]) > 0
		if len(covering[w]) < 2 {
			continue
		}
		// One budget in several overlays is one object.
		names := map[string]*budget{}
		for _, b := range covering[w] {
			if path.Dir(b.file) == w.dir {
				names[b.name] = b
			}
		}
		if len(names) < 2 {
			continue
		}
		found := plan.Finding{
			ID: idBudgetOverlap, Severity: plan.Block, Source: "disruption", Reference: budgetPage,
			Title:  fmt.Sprintf("pods of %s have %d PodDisruptionBudgets: %s", w.title(), len(names), preflight.Printable(strings.Join(slices.Sorted(maps.Keys(names)), ", "))),
			Detail: "the API server responds with 500 to the eviction of a pod with more than one budget", Remedy: "keep one of them",
			Objects: []string{preflight.Object(w.kind, w.namespace, w.name)}, Locations: slices.Clone(w.at),
		}
		for _, name := range slices.Sorted(maps.Keys(names)) {
			found.Locations = append(found.Locations, names[name].at...)
			found.Objects = append(found.Objects, preflight.Object("poddisruptionbudget", names[name].namespace, name))
		}
		f.findings = append(f.findings, found)
	}
}

func (b *budget) title() string {
	return preflight.Printable(strings.TrimPrefix(b.namespace+"/"+b.name, "/"))
}

// never returns why b allows no disruption even if all its pods are healthy; empty if it may.
// scaled are the workloads with an autoscaler.
func (b *budget) never(covered []*workload, scaled map[[3]string]bool) string {
	if v := b.maxUnavailable; v != "" {
		if v == "0" || v == "0%" {
			return "maxUnavailable is " + v
		}
		return ""
	}
	if b.minAvailable == "100%" {
		return "minAvailable is 100%"
	}
	if b.minAvailable == "" {
		return ""
	}
	// One workload in several overlays is one object: the largest counts.
	pods := map[string]int{}
	for _, w := range covered {
		if w.replicas < 0 || scaled[[3]string{w.namespace, w.kind, w.name}] {
			return "" // it may have more at any time
		}
		key := w.kind + "/" + w.name
		pods[key] = max(pods[key], w.replicas)
	}
	total := 0
	for _, n := range pods {
		total += n
	}
	if total == 0 {
		return ""
	}
	v := intstr.Parse(b.minAvailable)
	if least, err := intstr.GetScaledValueFromIntOrPercent(&v, total, true); err == nil && least >= total {
		return fmt.Sprintf("minAvailable is %s, and it has %s", preflight.Printable(b.minAvailable), countOf(total, "pod", "pods"))
	}
	return ""
}

// singleReplicas reports workloads that are unavailable while their only pod is evicted. A
// workload with a budget is reported with it.
func (f *facts) singleReplicas() {
	scaled := map[[3]string]bool{}
	for _, a := range f.autoscalers {
		if a.least > 1 {
			scaled[[3]string{a.namespace, a.kind, a.name}] = true
		}
	}
	for i := range f.workloads {
		w := &f.workloads[i]
		if w.replicas != 1 || w.budgeted || scaled[[3]string{w.namespace, w.kind, w.name}] {
			continue
		}
		f.findings = append(f.findings, plan.Finding{
			ID: idSingleReplica, Severity: plan.Warn, Source: "disruption", Reference: drainPage,
			Title:  w.title() + " has a single replica: unavailable during its eviction",
			Remedy: "run two replicas if the application supports it; a PodDisruptionBudget then keeps one available", Locations: w.at,
			Objects: []string{preflight.Object(w.kind, w.namespace, w.name)},
		})
	}
}

// addOnFindings reports add-ons whose version does not list the target, or of which that is
// unknown, and those that drain nodes. Each version of an add-on is reported once.
func (f *facts) addOnFindings(r *rules) {
	slices.SortFunc(f.addOns, func(a, b addOnUse) int { return cmp.Or(byLocation(a.at, b.at), strings.Compare(a.object, b.object)) })
	var uses []preflight.AddOnUse
	for _, u := range f.addOns {
		uses = append(uses, preflight.AddOnUse{AddOn: u.addOn, Version: u.version, Unknown: u.unknown, Object: u.object, Title: u.title, Location: u.at})
	}
	f.findings = append(f.findings, preflight.AddOnVersions(uses, r.to)...)
	f.findings = append(f.findings, preflight.NodeActors(uses)...)
}
