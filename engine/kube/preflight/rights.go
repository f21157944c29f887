package preflight

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"

	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/engine/version"
)

// silentKubelets is why a check that sends requests to kubelets did not run.
const silentKubelets = "it sends requests to kubelets, which their logs show"

// Right is the permission for one kind of request.
type Right struct {
	Verb            string
	Group, Resource string // Resource includes the subresource: "pods/eviction"
	Name            string // empty: all objects
	URL             string // of a request without a resource: "/metrics"
}

// anyMinor is newer than all minors.
var anyMinor = version.MustParse("v1.999.0")

// Title returns the title of the check with this ID; empty if there is none.
func Title(id string) string {
	for _, c := range checks() {
		if c.id == id {
			return c.title
		}
	}
	return ""
}

// Rights returns the permissions that checks use on a cluster that others upgrade, except checks
// that are not applicable to any such cluster.
func Rights(dryRun bool) []Right {
	lists := map[string][]string{
		"":                             {"namespaces", "nodes", "persistentvolumeclaims", "persistentvolumes", "pods", "resourcequotas", "secrets", "services"},
		"admissionregistration.k8s.io": {"mutatingwebhookconfigurations", "validatingwebhookconfigurations"},
		"apiextensions.k8s.io":         {"customresourcedefinitions"},
		"apiregistration.k8s.io":       {"apiservices"},
		"apps":                         {"daemonsets", "deployments", "replicasets", "statefulsets"},
		"autoscaling":                  {"horizontalpodautoscalers"},
		"batch":                        {"jobs"},
		"certificates.k8s.io":          {"certificatesigningrequests"},
		"coordination.k8s.io":          {"leases"},
		"discovery.k8s.io":             {"endpointslices"},
		"policy":                       {"poddisruptionbudgets"},
		"storage.k8s.io":               {"csinodes", "volumeattachments"},
	}
	var out []Right
	add := func(r Right) {
		if !slices.Contains(out, r) {
			out = append(out, r)
		}
	}
	for group, resources := range lists {
		for _, r := range resources {
			add(Right{Verb: "list", Group: group, Resource: r})
		}
	}
	for _, k := range actorKinds {
		add(Right{Verb: "list", Group: k.Group, Resource: k.Resource})
	}
	// Objects of removed APIs, for any hop.
	oldest := lifecycle.Minors()[0].Kubernetes
	byResource := map[Right][]removedAPI{}
	for _, a := range removedAPIs(version.MustParse(oldest+".0"), anyMinor) {
		r := Right{Verb: "list", Group: a.resource.Group, Resource: a.resource.Resource}
		byResource[r] = append(byResource[r], a)
	}
	for r, gone := range byResource {
		add(r)
		for _, through := range survivors(gone, anyMinor) {
			add(Right{Verb: "list", Group: through.Group, Resource: through.Resource})
		}
	}
	for _, r := range actionRights() {
		add(r)
	}
	for _, name := range []string{kubeadmConfig, kubeletConfig, proxyConfig} {
		add(Right{Verb: "get", Resource: "configmaps", Name: name})
	}
	for _, url := range []string{"/apis", "/metrics", "/readyz", "/version"} {
		add(Right{Verb: "get", URL: url})
	}
	if dryRun {
		add(Right{Verb: "create", Resource: "pods/eviction"})
		add(Right{Verb: "create", Resource: "pods/portforward"})
		add(Right{Verb: "get", Resource: "nodes/proxy"})
	}
	slices.SortFunc(out, Right.compare)
	return out
}

// actionRights are the permissions to find what the changelogs of all minors require an action for.
func actionRights() (out []Right) {
	for _, m := range lifecycle.Minors() {
		for _, a := range m.Actions {
			switch {
			case a.Permission != "":
				out = append(out, Right{Verb: "list", Group: rbacv1.GroupName, Resource: "clusterroles"}, Right{Verb: "list", Group: rbacv1.GroupName, Resource: "clusterrolebindings"})
			case a.SharedSELinux:
				out = append(out, Right{Verb: "list", Group: storagev1.GroupName, Resource: "csidrivers"})
			case a.Objects != "":
				of := schema.ParseGroupResource(a.Objects)
				out = append(out, Right{Verb: "get", URL: "/apis/" + of.Group}, Right{Verb: "list", Group: of.Group, Resource: of.Resource})
			}
		}
	}
	return out
}

func (r Right) compare(o Right) int {
	return cmp.Or(cmp.Compare(r.URL, o.URL), cmp.Compare(r.Group, o.Group), cmp.Compare(r.Verb, o.Verb), cmp.Compare(r.Resource, o.Resource), cmp.Compare(r.Name, o.Name))
}

// ClusterRole returns the manifest of a ClusterRole with rights.
func ClusterRole(name string, rights []Right) string {
	var b strings.Builder
	fmt.Fprintf(&b, "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata:\n  name: %s\nrules:\n", name)
	rights = slices.Clone(rights)
	slices.SortFunc(rights, Right.compare)
	for i := 0; i < len(rights); {
		r := rights[i]
		var resources, names, urls []string
		for ; i < len(rights); i++ {
			o := rights[i]
			if o.Group != r.Group || o.Verb != r.Verb || (o.URL == "") != (r.URL == "") || (o.Name == "") != (r.Name == "") || r.Name != "" && o.Resource != r.Resource {
				break
			}
			if o.URL != "" {
				urls = append(urls, o.URL)
				continue
			}
			if !slices.Contains(resources, o.Resource) {
				resources = append(resources, o.Resource)
			}
			if o.Name != "" {
				names = append(names, o.Name)
			}
		}
		if slices.Contains(resources, "secrets") {
			b.WriteString("# secrets are Helm's releases; without this resource, charts are not checked\n")
		}
		if slices.Contains(resources, "nodes/proxy") {
			b.WriteString("# nodes/proxy can also run commands in pods; without this resource, kubelets are not read\n")
		}
		if len(urls) > 0 {
			fmt.Fprintf(&b, "- nonResourceURLs: [%s]\n", quoted(urls))
		} else {
			fmt.Fprintf(&b, "- apiGroups: [%q]\n  resources: [%s]\n", r.Group, quoted(resources))
		}
		if len(names) > 0 {
			fmt.Fprintf(&b, "  resourceNames: [%s]\n", quoted(names))
		}
		fmt.Fprintf(&b, "  verbs: [%q]\n", r.Verb)
	}
	return b.String()
}

func quoted(list []string) string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = fmt.Sprintf("%q", s)
	}
	return strings.Join(out, ", ")
}

// Recorder is a transport that records requests with their permissions, and which of them the
// API server denied. It is safe for concurrent use.
type Recorder struct {
	mu           sync.Mutex
	sent, denied []Right
}

// Record returns a function that wraps a transport, such as rest.Config.Wrap takes, and the
// recorder that all wrapped transports share.
func Record() (wrap func(http.RoundTripper) http.RoundTripper, r *Recorder) {
	r = &Recorder{}
	return func(next http.RoundTripper) http.RoundTripper { return recording{r, next} }, r
}

type recording struct {
	to   *Recorder
	next http.RoundTripper
}

func (x recording) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := x.next.RoundTrip(req)
	right := rightOf(req)
	x.to.mu.Lock()
	defer x.to.mu.Unlock()
	if !slices.Contains(x.to.sent, right) {
		x.to.sent = append(x.to.sent, right)
	}
	if err == nil && resp.StatusCode == http.StatusForbidden && !slices.Contains(x.to.denied, right) {
		x.to.denied = append(x.to.denied, right)
	}
	return resp, err
}

// Missing returns the rights that a user lacks whose requests were denied: the denied ones, and
// those of later requests for the same resources.
func Missing(denied []Right) []Right {
	out := slices.Clone(denied)
	for _, r := range Rights(false) {
		same := func(d Right) bool {
			return d.Verb == r.Verb && d.Group == r.Group && d.Resource == r.Resource && r.URL == ""
		}
		if slices.ContainsFunc(denied, same) && !slices.Contains(out, r) {
			out = append(out, r)
		}
	}
	return out
}

// Denied returns the rights whose requests the API server denied, and Sent those of all requests.
func (r *Recorder) Denied() []Right { return r.sorted(&r.denied) }

// Sent returns the rights of all requests.
func (r *Recorder) Sent() []Right { return r.sorted(&r.sent) }

func (r *Recorder) sorted(list *[]Right) []Right {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := slices.Clone(*list)
	slices.SortFunc(out, Right.compare)
	return out
}

// rightOf returns the permission that a request needs.
func rightOf(req *http.Request) Right {
	parts := strings.Split(strings.Trim(req.URL.Path, "/"), "/")
	r := Right{Verb: "get"}
	switch {
	case len(parts) >= 3 && parts[0] == "api":
		parts = parts[2:]
	case len(parts) >= 4 && parts[0] == "apis":
		r.Group, parts = parts[1], parts[3:]
	default:
		r.URL = "/" + strings.Join(parts, "/")
		return r
	}
	if len(parts) >= 3 && parts[0] == "namespaces" {
		parts = parts[2:]
	}
	r.Resource = parts[0]
	named := len(parts) > 1
	if len(parts) > 2 {
		r.Resource += "/" + parts[2]
	}
	switch {
	case req.Method == http.MethodPost:
		r.Verb = "create"
	case req.Method == http.MethodGet && !named:
		r.Verb = "list"
	}
	if r.Resource == "configmaps" && named {
		r.Name = parts[1]
	}
	return r
}

// NotAllowed returns the finding about denied requests; ok is false without any.
func NotAllowed(denied []Right) (f plan.Finding, ok bool) {
	if len(denied) == 0 {
		return f, false
	}
	var what []string
	for _, r := range denied {
		name := r.Resource
		if r.Group != "" {
			name += "." + r.Group
		}
		what = append(what, r.Verb+" "+cmp.Or(name, r.URL))
	}
	return plan.Finding{
		ID: "missing-rights", Severity: plan.NotChecked, Source: "access", Reference: rbacGuide,
		Title:  "the kubeconfig's user lacks " + plural(len(denied), "1 right of a complete check", "%d rights of a complete check"),
		Detail: "denied: " + enumerate(slices.Compact(what), maxTold),
		Remedy: "let an administrator grant the rules below; `constellation check --print-rbac` prints the role of a complete check",
	}, true
}
