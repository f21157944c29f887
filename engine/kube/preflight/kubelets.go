package preflight

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/operator/api/v1alpha1"
)

const kubeletFlags = "https://kubernetes.io/docs/reference/command-line-tools-reference/kubelet/"

var kubeletChecks = []checkItem{
	{
		id: "running-kubelets", title: "no running kubelet uses a flag, feature gate or setting that the hop removes or changes", area: "nodes", ref: kubeletFlags, byData: true,
		needs: []source{sourceNodes, sourceConfigs}, run: runningKubelets,
	},
}

// kubeletReport is what a kubelet reports about itself, or why it does not. Its configuration
// includes what its command line and drop-in files change.
type kubeletReport struct {
	config      map[string]any
	configError string
	// flags are all flags, also those that the command line does not have.
	flags      map[string]string
	flagsError string
}

// kubelets are the reports of all kubelets, which are read once for all hops.
type kubelets struct {
	once sync.Once
	of   map[string]kubeletReport // by node
}

// reports returns the report of each node's kubelet.
func (w *world) reports(p *probe) map[string]kubeletReport {
	w.kubelets.once.Do(func() {
		ctx, cancel := context.WithTimeout(p.ctx, kubeletsLimit)
		defer cancel()
		w.kubelets.of = map[string]kubeletReport{}
		sample := w.nodes[:min(len(w.nodes), kubeletSample)]
		readKubelets(ctx, p, sample, w.kubelets.of)
		answered := func(n corev1.Node) bool { return w.kubelets.of[n.Name].config != nil }
		rest := w.nodes[len(sample):]
		if slices.ContainsFunc(sample, answered) {
			readKubelets(ctx, p, rest, w.kubelets.of)
			return
		}
		// If three kubelets are unreachable, all are. Thousands of timeouts add nothing.
		for i := range rest {
			w.kubelets.of[rest[i].Name] = w.kubelets.of[sample[0].Name]
		}
	})
	return w.kubelets.of
}

// readKubelets reads the reports of nodes' kubelets concurrently.
func readKubelets(ctx context.Context, p *probe, nodes []corev1.Node, into map[string]kubeletReport) {
	var mu sync.Mutex // of into
	var reading sync.WaitGroup
	free := make(chan struct{}, kubeletsAtOnce)
	for i := range nodes {
		free <- struct{}{}
		reading.Go(func() {
			defer func() { <-free }()
			ctx, cancel := context.WithTimeout(ctx, serverLimit)
			defer cancel()
			r := readKubelet(ctx, throughAPIServer(p, nodes[i].Name))
			if r.config == nil {
				if get := directly(p, &nodes[i]); get != nil {
					if direct := readKubelet(ctx, get); direct.config != nil {
						r = direct
					}
				}
			}
			mu.Lock()
			defer mu.Unlock()
			into[nodes[i].Name] = r
		})
	}
	reading.Wait()
}

// flagz is the format of flags that is asked for, with the version that older kubelets have.
const flagz = "application/json;g=config.k8s.io;v=v1beta1;as=Flagz,application/json;g=config.k8s.io;v=v1alpha1;as=Flagz"

// getter reads a path of a kubelet.
type getter func(ctx context.Context, path, accept string) ([]byte, error)

// throughAPIServer reads from a kubelet through the API server, which needs the permission
// nodes/proxy.
func throughAPIServer(p *probe, node string) getter {
	return func(ctx context.Context, path, accept string) ([]byte, error) {
		return raw(p.core.CoreV1().RESTClient().Get().Resource("nodes").Name(node).SubResource("proxy").Suffix(path).SetHeader("Accept", accept).Do(ctx))
	}
}

// directly reads from a kubelet with the user's client certificate. The permission nodes/configz
// is enough for that. It is nil without a certificate: a kubelet must not get a token, because its
// machine may be compromised.
func directly(p *probe, n *corev1.Node) getter {
	address := kubeletAddress(n)
	// The kubelet would see the user's own rights, not those of the user that is impersonated.
	if p.config.Impersonate.UserName != "" {
		return nil
	}
	if address == "" || len(p.config.CertData) == 0 && p.config.CertFile == "" || p.config.Transport != nil {
		return nil
	}
	config := &rest.Config{Host: "https://" + address, TLSClientConfig: p.config.TLSClientConfig, Dial: p.config.Dial}
	config.ServerName, config.NextProtos = "", nil
	client, err := rest.UnversionedRESTClientFor(rest.AddUserAgent(withCodec(config), "preflight"))
	if err != nil {
		return nil
	}
	return func(ctx context.Context, path, accept string) ([]byte, error) {
		return raw(client.Get().AbsPath("/", path).SetHeader("Accept", accept).Do(ctx))
	}
}

// withCodec returns config with what a client needs that reads raw bytes.
func withCodec(config *rest.Config) *rest.Config {
	config.NegotiatedSerializer = scheme.Codecs.WithoutConversion()
	config.GroupVersion = &schema.GroupVersion{}
	return config
}

// raw is the body of a response, or the error with the reason that the server gives.
func raw(r rest.Result) ([]byte, error) {
	if err := r.Error(); err != nil {
		return nil, err
	}
	return r.Raw()
}

// readKubelet reads the configuration and the flags of a kubelet.
func readKubelet(ctx context.Context, get getter) (out kubeletReport) {
	var configz struct {
		Config map[string]any `json:"kubeletconfig"`
	}
	b, err := get(ctx, "configz", "application/json")
	switch {
	case err != nil:
		out.configError = reason(ctx, err)
		return out
	case json.Unmarshal(b, &configz) != nil || configz.Config == nil:
		out.configError = "the kubelet does not report its configuration"
		return out
	}
	out.config = configz.Config
	var z struct {
		Flags map[string]string `json:"flags"`
	}
	b, err = get(ctx, "flagz", flagz)
	switch {
	case apierrors.IsNotFound(err) || err == nil && (json.Unmarshal(b, &z) != nil || z.Flags == nil):
		out.flagsError = "the kubelet does not report its flags: the feature gate ComponentFlagz is off"
	case err != nil:
		out.flagsError = reason(ctx, err)
	}
	out.flags = z.Flags
	return out
}

// kubeletProblem is a setting that only some kubelets have.
type kubeletProblem struct {
	what, minor, remedy string
	starts              bool // a kubelet with it starts after the hop
}

// runningKubelets compares what kubelets report with the data of the hop. What the ConfigMap
// kubelet-config has too is reported by other checks.
func runningKubelets(w *world, p *probe) []plan.Finding {
	var flags, others bool
	for _, m := range w.minorsOfHop() {
		flags = flags || slices.ContainsFunc(m.Flags, func(r lifecycle.Flags) bool { return r.Component == "kubelet" })
		others = others || len(m.Gates) > 0 || slices.ContainsFunc(m.Actions, func(a lifecycle.Action) bool { return a.KubeletField != "" })
	}
	if !flags && !others {
		return nil
	}
	if w.request.Quiet && len(w.nodes) > 0 {
		return []plan.Finding{{
			Severity: plan.NotChecked, Title: "not checked which flags, feature gates and settings kubelets run with", Detail: silentKubelets,
			Remedy: "allow such requests with --dry-run-requests",
		}}
	}
	var shared map[string]any
	if yaml.Unmarshal([]byte(w.configs[kubeletConfig]["kubelet"]), &shared) != nil {
		shared = nil // reported by kubeadm-config
	}
	reports := w.reports(p)
	found := map[kubeletProblem][]*corev1.Node{}
	var silent, flagless []string
	var silence, noFlags string
	for i := range w.nodes {
		n := &w.nodes[i]
		r, ok := reports[n.Name]
		if !ok || r.config == nil {
			silent, silence = append(silent, n.Name), r.configError
			continue
		}
		if flags && r.flags == nil {
			flagless, noFlags = append(flagless, n.Name), r.flagsError
		}
		for _, m := range w.minorsOfHop() {
			for _, x := range kubeletProblems(m, r, shared) {
				found[x] = append(found[x], n)
			}
		}
	}
	var out []plan.Finding
	for x, nodes := range found {
		out = append(out, w.kubeletFinding(x, nodes))
	}
	slices.SortFunc(out, func(a, b plan.Finding) int { return strings.Compare(a.Title, b.Title) })
	if len(silent) > 0 {
		out = append(out, plan.Finding{
			Severity: plan.NotChecked, Title: fmt.Sprintf("not checked what flags, feature gates and settings the kubelet of %s runs with", count(len(silent), "node")),
			Detail: silence + "; nodes: " + enumerate(silent, maxTold), Remedy: "allow nodes/proxy, or compare the kubelets' command lines with docs/compatibility.md",
		})
	}
	if len(flagless) > 0 {
		out = append(out, plan.Finding{
			Severity: plan.NotChecked, Title: fmt.Sprintf("not checked whether the kubelet of %s has a flag that the hop removes", count(len(flagless), "node")),
			Detail: noFlags + "; nodes: " + enumerate(flagless, maxTold), Remedy: "compare /var/lib/kubelet/kubeadm-flags.env and the unit of the kubelet with docs/compatibility.md",
		})
	}
	return out
}

// kubeletProblems returns what a minor removes or changes of the settings of a kubelet that are not
// shared.
func kubeletProblems(m *lifecycle.Minor, r kubeletReport, shared map[string]any) (out []kubeletProblem) {
	for _, what := range refusedFlags(m, r.flags) {
		out = append(out, kubeletProblem{what, m.Kubernetes, "remove it from KUBELET_KUBEADM_ARGS in /var/lib/kubelet/kubeadm-flags.env on these nodes, or from the unit of the kubelet", false})
	}
	for _, what := range gatesOf(m, r.config, shared) {
		out = append(out, kubeletProblem{what, m.Kubernetes, "remove it from /var/lib/kubelet/config.yaml, from its drop-in files and from --feature-gates on these nodes", false})
	}
	for _, a := range m.Actions {
		if a.KubeletField != "" && has(r.config, a) && !has(shared, a) {
			what := fmt.Sprintf("the meaning of %s: %s changes", a.KubeletField, a.KubeletValue)
			out = append(out, kubeletProblem{what, m.Kubernetes, "change it in /var/lib/kubelet/config.yaml on these nodes: " + a.Title, true})
		}
	}
	return out
}

// kubeletFinding is the finding about a problem of some nodes' kubelets. It blocks if a kubelet
// would not start on a machine that stays.
func (w *world) kubeletFinding(x kubeletProblem, nodes []*corev1.Node) plan.Finding {
	var names []string
	f := plan.Finding{Title: fmt.Sprintf("the kubelet of %s has settings of its own: %s (%s)", count(len(nodes), "node"), x.what, x.minor), Remedy: x.remedy}
	for _, n := range nodes {
		names = append(names, n.Name)
		f.Objects = append(f.Objects, object("node", "", n.Name))
		if !x.starts && !w.replaces(n) {
			f.Severity = plan.Block
		}
	}
	f.Detail, f.Objects = "nodes: "+enumerate(names, 20), first(f.Objects)
	switch {
	case f.Severity == plan.Block:
		f.Detail = "it would not start after the hop; " + f.Detail
	case !x.starts:
		f.Detail = "a kubelet that keeps it does not start after the hop; new machines do not get it; " + f.Detail
	}
	return f
}

// replaces reports whether the hop replaces the machine of a node. The new machine does not get what
// only the kubelet of the old one has.
func (w *world) replaces(n *corev1.Node) bool {
	return (w.request.ReplaceControlPlanes || w.request.ReplaceWorkers) && n.Labels[v1alpha1.LabelInPlace] != "true"
}

// refusedFlags returns the removed flags that have another value than without the flag. Values
// can be passwords, so they are left out.
func refusedFlags(m *lifecycle.Minor, flags map[string]string) (out []string) {
	for _, r := range m.Flags {
		for _, name := range r.Removed {
			if v, ok := flags[name]; ok && r.Component == "kubelet" && !r.IsDefault(name, v) {
				out = append(out, "the flag --"+name+" is removed")
			}
		}
	}
	return out
}

// gatesOf returns the problems of the feature gates of a kubelet that the shared configuration
// does not have.
func gatesOf(m *lifecycle.Minor, config, shared map[string]any) (out []string) {
	gates, _ := config["featureGates"].(map[string]any)
	known, _ := shared["featureGates"].(map[string]any)
	for _, gate := range slices.Sorted(maps.Keys(gates)) {
		if v, ok := known[gate]; !ok || v != gates[gate] {
			out = append(out, gateProblems(m, fmt.Sprintf("%s=%v", gate, gates[gate]))...)
		}
	}
	return out
}

// has reports whether a KubeletConfiguration has the setting of an action.
func has(config map[string]any, a lifecycle.Action) bool {
	v, ok := config[a.KubeletField]
	return ok && fmt.Sprint(v) == a.KubeletValue
}
