package preflight

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"

	"constellation/engine/compat"
	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/engine/version"
)

const (
	skewPolicy   = "https://kubernetes.io/releases/version-skew-policy/"
	etcdUpgrades = "https://etcd.io/docs/latest/upgrades/"
	etcdFAQ      = "https://etcd.io/docs/latest/faq/#why-an-odd-number-of-cluster-members"
	etcdQuota    = "https://etcd.io/docs/latest/op-guide/maintenance/#space-quota"
	healthGuide  = "https://kubernetes.io/docs/reference/using-api/health-checks/"
	fairness     = "https://kubernetes.io/docs/concepts/cluster-administration/flow-control/"
	leaseGuide   = "https://kubernetes.io/docs/concepts/architecture/leases/"
)

var clusterChecks = []checkItem{
	{
		id: "control-plane-versions", title: "the versions of the control plane are compatible", area: "versions", ref: skewPolicy,
		needs: []source{sourceServers, sourcePods}, run: controlPlaneVersions,
	},
	{
		id: "kubelet-versions", title: "every kubelet is within the version skew of the API servers, now and after the hop", area: "versions", ref: skewPolicy,
		needs: []source{sourceNodes, sourceServers, sourcePods}, run: kubeletVersions,
	},
	{
		id: "proxy-version", title: "kube-proxy is within the version skew of the API servers, now and after the hop", area: "versions", ref: skewPolicy,
		needs: []source{sourceDaemonSets, sourceServers, sourcePods}, run: proxyVersion,
	},
	{
		id: "etcd-members", title: "etcd is ready, and its version can be upgraded to the next one", area: "etcd", ref: etcdUpgrades,
		needs: []source{sourcePods, sourceServers}, run: etcdMembers,
	},
	{
		id: "etcd-size", title: "etcd's database is well below its quota", area: "etcd", ref: etcdQuota,
		needs: []source{sourcePods, sourceServers, sourceMetrics}, run: etcdSize,
	},
	{
		id: "api-health", title: "every API server is ready", area: "health", ref: healthGuide,
		needs: []source{sourceServers}, run: apiHealth,
	},
	{
		id: "api-rejections", title: "the API servers reject hardly any request", area: "health", ref: fairness,
		needs: []source{sourceServers, sourceMetrics}, run: apiRejections,
	},
	{
		id: "leaders", title: "controller manager and scheduler have a leader", area: "health", ref: leaseGuide,
		needs: []source{sourceLeaders, sourcePods}, run: leadersFresh,
	},
}

// componentVersions returns the versions of a component of the control plane by node,
// from the tags of its images. Tags that are no version are in odd.
func (w *world) componentVersions(component string) (found map[string]version.Version, odd []string) {
	found = map[string]version.Version{}
	for i := range w.pods {
		p := &w.pods[i]
		if p.component != component || p.terminating.After(time.Time{}) || len(p.images) == 0 {
			continue
		}
		v, err := version.Parse(tagOf(p.images[0]))
		if err != nil {
			odd = append(odd, p.name+": "+p.images[0])
			continue
		}
		found[p.node] = v
	}
	return found, odd
}

// tagOf is the tag of an image, empty if it has none.
func tagOf(image string) string {
	image, _, _ = strings.Cut(image, "@")
	if i := strings.LastIndexByte(image, ':'); i > strings.LastIndexByte(image, '/') {
		return image[i+1:]
	}
	return ""
}

// apiVersions are the versions of all API servers: as they report, or from the image tag if
// one does not respond.
func (w *world) apiVersions() compat.Span {
	var s compat.Span
	for i := range w.servers {
		if v, err := version.Parse(w.servers[i].version); err == nil {
			s = s.Add(v)
		}
	}
	byNode, _ := w.componentVersions("kube-apiserver")
	for _, v := range byNode {
		s = s.Add(v)
	}
	return s
}

// controlPlaneVersions checks the skew among API servers, and that of the controller manager
// and the scheduler.
func controlPlaneVersions(w *world, _ *probe) (out []plan.Finding) {
	api := w.apiVersions()
	for i := range w.servers {
		if _, err := version.Parse(w.servers[i].version); err != nil {
			out = append(out, plan.Finding{
				Severity: plan.NotChecked, Title: "the version of an API server is unknown",
				Detail: fmt.Sprintf("%s reports version %q", printable(w.servers[i].address), printable(w.servers[i].version)),
			})
		}
	}
	images, _ := w.componentVersions("kube-apiserver")
	if len(w.silent) > 0 && len(images) < len(w.silent)+len(w.servers) {
		out = append(out, plan.Finding{
			Severity: plan.NotChecked, Title: fmt.Sprintf("the version of %s is unknown", count(len(w.silent), "API server")),
			Detail: w.silence(), Remedy: "run the check from a network that reaches the control plane",
		})
	}
	if d := ahead(api.Newest, api.Oldest); d > 1 {
		out = append(out, plan.Finding{
			Severity: plan.Block, Title: fmt.Sprintf("API servers run %s and %s, which are %d minor versions apart", api.Oldest, api.Newest, d),
			Detail: perNode(images), Remedy: fmt.Sprintf("upgrade those of %s to the others' version first", api.Oldest),
		})
	}
	for _, follower := range []string{"kube-controller-manager", "kube-scheduler"} {
		byNode, odd := w.componentVersions(follower)
		if len(odd) > 0 {
			out = append(out, plan.Finding{
				Severity: plan.NotChecked, Title: "the version of " + follower + " is unknown", Detail: "its image tag is not a version: " + enumerate(odd, 5),
			})
		}
		for _, node := range slices.Sorted(maps.Keys(byNode)) {
			v := byNode[node]
			f := plan.Finding{Severity: plan.Block, Objects: []string{object("node", "", node)}}
			// kubeadm connects it to the API server of its node, other setups to any.
			oldest, newest, which := api.Oldest, api.Newest, "the oldest API server"
			if beside, ok := images[node]; ok {
				oldest, newest, which = beside, beside, "the API server beside it"
			}
			switch {
			case ahead(oldest, v) < 0:
				f.Title = fmt.Sprintf("%s on %s is %s, newer than %s with %s", follower, printable(node), v, which, oldest)
				f.Remedy = "upgrade that API server to the same version first"
			case ahead(newest, v) > 1:
				f.Title = fmt.Sprintf("%s on %s is %s, more than one minor version older than the API server with %s", follower, printable(node), v, newest)
				f.Remedy = "run `kubeadm upgrade node` on that node"
			default:
				continue
			}
			out = append(out, f)
		}
	}
	return out
}

// silence lists the API servers that did not respond, with the reason.
func (w *world) silence() string {
	var parts []string
	for _, s := range w.silent {
		parts = append(parts, s.address+": "+s.why)
	}
	return enumerate(parts, 5)
}

// ahead is the number of minor versions by which a is newer than b.
func ahead(a, b version.Version) int { return b.MinorDistance(a) }

// perNode is "control-1 v1.35.4, control-2 v1.36.3".
func perNode(byNode map[string]version.Version) string {
	var parts []string
	for _, n := range slices.Sorted(maps.Keys(byNode)) {
		parts = append(parts, n+" "+byNode[n].String())
	}
	return enumerate(parts, 10)
}

// kubeletVersions checks each kubelet against the current API servers and those of the hop.
// Both versions run while the control plane is replaced.
func kubeletVersions(w *world, _ *probe) (out []plan.Finding) {
	api := w.apiVersions()
	if api.IsZero() {
		return nil // reported by control-plane-versions
	}
	after := api.Add(w.request.To)
	var odd []string
	// kubeadm connects the kubelet of a control plane to the API server of its node, so a
	// replaced control plane's kubelet is not ahead of its API server.
	beside, _ := w.componentVersions("kube-apiserver")
	newer, tooOld, tooOldAfter := map[string][]string{}, map[string][]string{}, map[string][]string{}
	for i := range w.nodes {
		n := &w.nodes[i]
		v, err := version.Parse(n.Status.NodeInfo.KubeletVersion)
		if err != nil {
			odd = append(odd, fmt.Sprintf("%s reports %q", n.Name, printable(n.Status.NodeInfo.KubeletVersion)))
			continue
		}
		oldest, ok := beside[n.Name]
		if !ok {
			oldest = api.Oldest
		}
		switch key := v.String(); {
		case ahead(oldest, v) < 0:
			newer[key] = append(newer[key], n.Name)
		case ahead(api.Newest, v) > lifecycle.KubeletSkew(v):
			tooOld[key] = append(tooOld[key], n.Name)
		case ahead(after.Newest, v) > lifecycle.KubeletSkew(v):
			tooOldAfter[key] = append(tooOldAfter[key], n.Name)
		}
	}
	told := func(by map[string][]string, f func(v string, names []string) plan.Finding) {
		for _, v := range slices.Sorted(maps.Keys(by)) {
			names := by[v]
			x := f(v, names)
			x.Severity, x.Detail = plan.Block, "nodes: "+enumerate(names, 20)
			for _, n := range names {
				x.Objects = append(x.Objects, object("node", "", n))
			}
			x.Objects = first(x.Objects)
			out = append(out, x)
		}
	}
	told(newer, func(v string, names []string) plan.Finding {
		return plan.Finding{
			Title:  fmt.Sprintf("the kubelet of %s is %s, newer than the oldest API server with %s", count(len(names), "node"), v, api.Oldest),
			Remedy: "upgrade every API server to that version first, or replace the nodes",
		}
	})
	told(tooOld, func(v string, names []string) plan.Finding {
		return plan.Finding{
			Title:  fmt.Sprintf("the kubelet of %s is %s, too old for the API servers with %s", count(len(names), "node"), v, api.Newest),
			Remedy: fmt.Sprintf("replace these nodes first: the skew may be at most %d minor versions", lifecycle.KubeletSkew(version.MustParse(v))),
		}
	})
	told(tooOldAfter, func(v string, names []string) plan.Finding {
		return plan.Finding{
			Title:  fmt.Sprintf("the kubelet of %s is %s, too old for the API servers of the hop with %s", count(len(names), "node"), v, after.Newest),
			Remedy: fmt.Sprintf("replace these nodes first: during the hop kubelets talk to API servers of both versions, and the skew may be at most %d minor versions", lifecycle.KubeletSkew(version.MustParse(v))),
		}
	})
	if len(odd) > 0 {
		out = append(out, plan.Finding{
			Severity: plan.NotChecked, Title: fmt.Sprintf("the version of the kubelet of %s is unknown", count(len(odd), "node")), Detail: enumerate(odd, 10),
			Remedy: "check that the kubelet runs: it reports no valid version",
		})
	}
	return out
}

// proxyVersion checks the image of kube-proxy's DaemonSet. The version in the Node status is
// deprecated and often wrong.
func proxyVersion(w *world, _ *probe) []plan.Finding {
	api := w.apiVersions()
	for i := range w.daemonSets {
		d := &w.daemonSets[i]
		if d.Namespace != "kube-system" || d.Name != "kube-proxy" || len(d.Spec.Template.Spec.Containers) == 0 || api.IsZero() {
			continue
		}
		image := d.Spec.Template.Spec.Containers[0].Image
		f := plan.Finding{Severity: plan.Block, Detail: "image " + printable(image), Owner: keeperOf(&d.ObjectMeta), Objects: []string{object("DaemonSet", d.Namespace, d.Name)}}
		v, err := version.Parse(tagOf(image))
		switch after := api.Add(w.request.To).Newest; {
		case err != nil:
			f.Severity, f.Title = plan.NotChecked, "the version of kube-proxy is unknown"
		case ahead(api.Oldest, v) < 0:
			f.Title = fmt.Sprintf("kube-proxy is %s, newer than the oldest API server with %s", v, api.Oldest)
			f.Remedy = "upgrade every API server to that version first"
		case ahead(after, v) > lifecycle.KubeletSkew(v):
			f.Title = fmt.Sprintf("kube-proxy is %s, too old for API servers with %s", v, after)
			f.Remedy = "run `kubeadm upgrade apply` with the current version, which also upgrades kube-proxy"
		default:
			return nil
		}
		return []plan.Finding{f}
	}
	return nil // replaced by another component, such as Cilium
}

// etcdVersions are those of the members, by node, as the tags of their images say.
func (w *world) etcdVersions() map[string]version.Version {
	versions := map[string]version.Version{}
	for i := range w.pods {
		p := &w.pods[i]
		if p.component != "etcd" || len(p.images) == 0 {
			continue
		}
		// The pod of a deleted node is removed up to a minute later.
		if len(w.nodes) > 0 && !slices.ContainsFunc(w.nodes, func(n corev1.Node) bool { return n.Name == p.node }) {
			continue
		}
		if v, ok := etcdOf(tagOf(p.images[0])); ok {
			versions[p.node] = v
		}
	}
	return versions
}

// etcdOf returns the version in a tag, which counts builds of an image after it: 3.6.6-0.
func etcdOf(tag string) (version.Version, bool) {
	base, _, _ := strings.Cut(tag, "-")
	v, err := version.Parse(base)
	return v, err == nil
}

// etcdTarget returns the etcd of the hop: that of the release, or the one that kubeadm of the minor
// deploys. ok is false if it is unknown.
func (w *world) etcdTarget() (v version.Version, ok bool) {
	tag := w.request.Etcd
	if tag == "" && w.request.From.MinorDistance(w.request.To) > 0 {
		tag = lifecycle.DeployedEtcd(w.request.To)
	}
	return etcdOf(tag)
}

// etcdStep returns the oldest etcd of the cluster and that of the hop. ok is false if one of
// them is unknown.
func (w *world) etcdStep() (from, to version.Version, ok bool) {
	to, ok = w.etcdTarget()
	for _, v := range w.etcdVersions() {
		if from.IsZero() || v.Less(from) {
			from = v
		}
	}
	return from, to, ok && !from.IsZero()
}

// etcdMembers checks etcd as far as the API shows it.
func etcdMembers(w *world, _ *probe) (out []plan.Finding) {
	members, notReady := etcdPods(w)
	if failing := failingEtcdChecks(w); len(failing) > 0 {
		out = append(out, plan.Finding{
			Severity: plan.Block, Title: "an API server cannot reach etcd", Detail: "failing readiness checks: " + enumerate(failing, 5),
			Remedy: "repair etcd first: an upgrade removes one member at a time", Reference: healthGuide,
		})
	}
	if len(notReady) > 0 {
		out = append(out, plan.Finding{
			Severity: plan.Block, Title: plural(len(notReady), "1 member of etcd is not ready", "%d members of etcd are not ready"), Detail: enumerate(notReady, 5), Objects: first(notReady),
			Remedy: "repair it, or remove it from etcd: an upgrade removes one member at a time", Reference: etcdFAQ,
		})
	}
	if n := len(members); n > 0 && n%2 == 0 {
		out = append(out, plan.Finding{
			Title: fmt.Sprintf("etcd has %d members, which tolerate no more failures than %d", n, n-1), Detail: "on " + enumerate(members, 9),
			Remedy: "run an odd number of control planes", Reference: etcdFAQ,
		})
	}
	out = append(out, etcdConfiguration(w)...)
	to, ok := w.etcdTarget()
	versions := w.etcdVersions()
	if !ok {
		if w.request.From.MinorDistance(w.request.To) > 0 && len(versions) > 0 {
			out = append(out, plan.Finding{
				Severity: plan.NotChecked, Title: "not checked whether etcd can be upgraded with the hop", Detail: fmt.Sprintf("the etcd of Kubernetes %s is unknown", w.request.To),
				Remedy: "choose a patch that a release contains, or read which etcd its kubeadm deploys",
			})
		}
		return out
	}
	for _, node := range slices.Sorted(maps.Keys(versions)) {
		v := versions[node]
		if before, ok := etcdOf(w.request.EtcdBefore); ok && v.Less(before) {
			v = before
		}
		if f, bad := etcdHop(node, v, to); bad {
			out = append(out, f)
		}
	}
	return out
}

// etcdPods returns the nodes of all members of etcd, and the pods that are not ready.
func etcdPods(w *world) (members, notReady []string) {
	for i := range w.pods {
		p := &w.pods[i]
		if p.component != "etcd" {
			continue
		}
		// The pod of a deleted node is removed up to a minute later.
		if len(w.nodes) > 0 && !slices.ContainsFunc(w.nodes, func(n corev1.Node) bool { return n.Name == p.node }) {
			continue
		}
		members = append(members, p.node)
		if !p.ready {
			notReady = append(notReady, p.object())
		}
	}
	return members, notReady
}

// failingEtcdChecks returns the readiness checks of API servers that fail because of etcd.
func failingEtcdChecks(w *world) (failing []string) {
	for i := range w.servers {
		for _, c := range w.servers[i].failing {
			if strings.HasPrefix(c, "etcd") {
				failing = append(failing, fmt.Sprintf("%s of API server %s", c, w.servers[i].address))
			}
		}
	}
	return failing
}

// etcdConfiguration finds an external etcd, and a tag that keeps etcd from its next minor.
func etcdConfiguration(w *world) (out []plan.Finding) {
	c := w.clusterConfiguration()
	if c.Etcd.External != nil {
		f := plan.Finding{
			Severity: plan.NotChecked, Title: "etcd is external: its version is not checked", Detail: "endpoints: " + enumerate(c.Etcd.External.Endpoints, 5),
			Remedy: "read the version of each member with `etcdctl endpoint status`",
		}
		if oldest := lifecycle.ExternalEtcd(w.request.To); !oldest.IsZero() {
			f.Remedy += fmt.Sprintf(": kubeadm %s needs %s or newer", w.request.To.MinorString(), oldest)
		}
		if to, ok := w.etcdTarget(); ok {
			if s, ok := lifecycle.Etcd(to); ok {
				f.Remedy, f.Reference = f.Remedy+fmt.Sprintf("; %s starts on data of %s or newer only", s.Version, s.From), s.Source
			}
		}
		out = append(out, f)
	}
	to, known := w.etcdTarget()
	has := c.Etcd.Local.ImageTag
	if to := w.request.EtcdHop; to != "" && has != "" && has != to && has != w.request.EtcdTag {
		out = append(out, plan.Finding{
			Severity: plan.Block, Title: fmt.Sprintf("etcd.local.imageTag is %s, and the hop sets %s", printable(has), to), Detail: "this program has not set it, and overwrites no tag of others",
			Objects: []string{object("ConfigMap", "kube-system", kubeadmConfig)}, Remedy: "set it to " + to + ", or remove it", Command: "kubectl -n kube-system edit configmap " + kubeadmConfig,
		})
	}
	if tag, ok := etcdOf(has); known && ok && ahead(to, tag) > 0 && has != w.request.EtcdTag { // else the hop removes it
		out = append(out, plan.Finding{
			Title: fmt.Sprintf("etcd.local.imageTag keeps etcd at %s: the hop does not bring %s", tag, to), Objects: []string{object("ConfigMap", "kube-system", kubeadmConfig)},
			Remedy: "remove imageTag from ClusterConfiguration when all members run it", Command: "kubectl -n kube-system edit configmap " + kubeadmConfig,
		})
	}
	return out
}

// etcdHop returns a finding if etcd on a node cannot be upgraded from v to the version of the hop.
func etcdHop(node string, v, to version.Version) (f plan.Finding, bad bool) {
	f = plan.Finding{Severity: plan.Block, Objects: []string{object("node", "", node)}}
	step, below := lifecycle.BelowFloor(v, to)
	switch {
	case to.Major() == v.Major() && to.Minor() < v.Minor():
		f.Title = fmt.Sprintf("etcd on %s is %s, newer than %s of the hop", printable(node), v, to)
		f.Remedy = "choose a Kubernetes version with that etcd: etcd's data cannot be downgraded"
	case ahead(to, v) > 1:
		f.Title = fmt.Sprintf("etcd on %s is %s, more than one minor version older than %s of the hop", printable(node), v, to)
		f.Remedy = "upgrade through the minor version between"
	case below:
		f.Title = fmt.Sprintf("etcd on %s is %s, and only %s can be upgraded to %s", printable(node), v, step.From, to)
		f.Remedy, f.Reference = "upgrade to the newest patch of the current Kubernetes minor version, which has a newer etcd", step.Source
		if step.Tag != "" {
			f.Remedy = fmt.Sprintf("set etcd.local.imageTag: %s in the ConfigMap kubeadm-config, then run `kubeadm upgrade apply` with the current version and `kubeadm upgrade node` on the other control planes", step.Tag)
		}
	default:
		return plan.Finding{}, false
	}
	return f, true
}

// plural is one if n is 1, or else many with n in it.
func plural(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return fmt.Sprintf(many, n)
}

const (
	// defaultQuota is etcd's if no flag says otherwise.
	defaultQuota = 2 << 30
	// Above the share fullWarn of its quota a database is reported. Above fullBlock the events
	// and leases of the rollout might fill it, and all writes would fail.
	fullWarn, fullBlock = 0.80, 0.95
)

// etcdSize compares etcd's database with its quota.
func etcdSize(w *world, _ *probe) []plan.Finding {
	quota := int64(defaultQuota)
	for i := range w.pods {
		if p := &w.pods[i]; p.component == "etcd" {
			if q, ok := flagNumber(p.args, "--quota-backend-bytes"); ok && q > 0 {
				quota = q
			}
		}
	}
	var largest int64
	var where string
	for i := range w.servers {
		for _, endpoint := range slices.Sorted(maps.Keys(w.servers[i].metrics.storage)) {
			if n := w.servers[i].metrics.storage[endpoint]; n > largest {
				largest, where = n, endpoint
			}
		}
	}
	if largest == 0 {
		return []plan.Finding{{
			Severity: plan.NotChecked, Title: "not checked whether etcd's database is well below its quota", Detail: "the API servers report no size of a database",
			Remedy: "read the size of the database from etcd, for example with `etcdctl endpoint status`",
		}}
	}
	share := float64(largest) / float64(quota)
	if share < fullWarn {
		return nil
	}
	f := plan.Finding{
		Title:  fmt.Sprintf("etcd's database has %.1f of %.1f GiB, %.0f %%", gib(largest), gib(quota), share*100),
		Detail: "member " + printable(where) + "; when it is full, all writes fail",
		Remedy: "delete unneeded objects (events, old ReplicaSets, custom resources), then defragment the members one by one, or raise --quota-backend-bytes",
	}
	if share >= fullBlock {
		f.Severity = plan.Block
	}
	return []plan.Finding{f}
}

func gib(n int64) float64 { return float64(n) / (1 << 30) }

// apiHealth checks the readiness of every API server.
func apiHealth(w *world, _ *probe) (out []plan.Finding) {
	for i := range w.servers {
		s := &w.servers[i]
		// reported by etcd-members
		failing := slices.DeleteFunc(slices.Clone(s.failing), func(c string) bool { return strings.HasPrefix(c, "etcd") })
		switch {
		case s.notReady != "":
			out = append(out, plan.Finding{Severity: plan.NotChecked, Title: fmt.Sprintf("not checked whether API server %s is ready", printable(s.address)), Detail: s.notReady})
		case len(failing) > 0:
			out = append(out, plan.Finding{
				Severity: plan.Block, Title: fmt.Sprintf("API server %s is not ready", printable(s.address)), Detail: "failing checks: " + enumerate(failing, 20),
				Remedy: "search its log for the names of the failing checks; list them with `kubectl get --raw '/readyz?verbose'`",
			})
		}
	}
	if len(w.silent) > 0 {
		f := plan.Finding{
			Severity: plan.NotChecked, Title: fmt.Sprintf("%s could not be reached from here", count(len(w.silent), "API server")),
			Detail: w.silence(), Remedy: "run the check from a network that reaches the control plane",
		}
		out = append(out, f)
	}
	return out
}

const (
	// maxRejected is the share of requests that may have been rejected.
	maxRejected = 0.001
	// manyRejected is the number of rejected requests from which the share is meaningful.
	manyRejected = 50
)

// apiRejections reports requests that priority and fairness rejected. An upgrade adds load.
func apiRejections(w *world, _ *probe) (out []plan.Finding) {
	for i := range w.servers {
		m := w.servers[i].metrics
		if m.rejected < manyRejected || m.rejected < maxRejected*m.requests {
			continue
		}
		out = append(out, plan.Finding{
			Title:  fmt.Sprintf("API server %s rejected %.0f requests of %.0f", printable(w.servers[i].address), m.rejected, m.requests),
			Detail: fmt.Sprintf("since %s, most at the priority level %s", stamp(m.started), printable(m.rejectedLevel)),
			Remedy: "find the client that floods it, or give its priority level more shares; inspect `kubectl get --raw /debug/api_priority_and_fairness/dump_priority_levels`",
		})
	}
	return out
}

// leaseSlack is how long after its expiry a lease counts as slow rather than lost.
const leaseSlack = 45 * time.Second

// electedComponents are the components of the control plane that elect a leader by a lease of their name.
var electedComponents = []string{"kube-controller-manager", "kube-scheduler"}

// lostLeader reports whether a lease has no leader, or one that does not renew it.
func lostLeader(l *coordinationv1.LeaseSpec, now time.Time) bool {
	return l.RenewTime == nil || deref(l.HolderIdentity) == "" || now.Sub(l.RenewTime.Time) > time.Duration(deref(l.LeaseDurationSeconds))*time.Second+leaseSlack
}

// leadersFresh checks the leader election leases of controller manager and scheduler.
func leadersFresh(w *world, _ *probe) (out []plan.Finding) {
	for _, name := range electedComponents {
		l, ok := w.leaders[name]
		runs := slices.ContainsFunc(w.pods, func(p pod) bool { return p.component == name })
		f := plan.Finding{
			Severity: plan.Block, Remedy: "read the log of its pods: without a leader no pod is created or scheduled",
			Command: "kubectl -n kube-system logs -l component=" + name + " --tail=20",
		}
		switch {
		case !ok && !runs:
			continue // not visible: a managed control plane
		case !ok || l.RenewTime == nil || deref(l.HolderIdentity) == "":
			f.Title = name + " has no leader"
		case lostLeader(&l, w.now):
			f.Title = name + " has lost its leader"
			f.Detail = fmt.Sprintf("%s renewed its lease last on %s", printable(deref(l.HolderIdentity)), stamp(l.RenewTime.Time))
		default:
			continue
		}
		out = append(out, f)
	}
	return out
}

func deref[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}
