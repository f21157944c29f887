package benchmark

import (
	"path"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/check"
	"constellation/engine/words"
)

// trait is something that a pod has or lacks.
type trait uint32

const (
	privileged trait = 1 << iota
	hostPID
	hostIPC
	hostNetwork
	escalates
	mayBeRoot
	keepsRaw
	keepsCapabilities
	addsCapabilities
	hostProcess
	hostPath
	hostPort
	secretInEnvironment
	noSeccomp  // no profile, or unconfined
	unconfined // explicitly: seccompDefault of kubelets changes nothing
	noContext
	writableRoot
	noLimits
	tokenMounted
)

// workload is the owner of pods: a Deployment, a DaemonSet, or a single pod.
type workload struct {
	namespace, account string
	traits             trait
	// images are the names of the images of DaemonSets.
	images []string
}

func (w *workload) has(t trait) bool { return w.traits&t != 0 }

// ofCronJob is the end of the name of a Job that a CronJob made.
var ofCronJob = regexp.MustCompile(`-\d{8,}$`)

// owner returns the object that a pod belongs to.
func owner(p *corev1.Pod) string {
	ref := metav1.GetControllerOf(p)
	in := func(kind, name string) string { return strings.ToLower(kind) + "/" + p.Namespace + "/" + name }
	switch {
	case isMirror(p):
		return in("static-pod", strings.TrimSuffix(p.Name, "-"+p.Spec.NodeName))
	case ref == nil:
		return in("pod", p.Name)
	case ref.Kind == "ReplicaSet" && p.Labels["pod-template-hash"] != "":
		return in("deployment", strings.TrimSuffix(ref.Name, "-"+p.Labels["pod-template-hash"]))
	case ref.Kind == "Job" && ofCronJob.MatchString(ref.Name):
		return in("cronjob", ofCronJob.ReplaceAllString(ref.Name, ""))
	}
	return in(ref.Kind, ref.Name)
}

func isMirror(p *corev1.Pod) bool { return p.Annotations[corev1.MirrorPodAnnotationKey] != "" }

// addPod adds a pod to its workload, and notes what components of control planes it has. Pods that have
// ended are left out.
func (f *facts) addPod(p *corev1.Pod) {
	if p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
		return
	}
	object := owner(p)
	w := f.workloads[object]
	if w == nil {
		w = &workload{namespace: p.Namespace, account: p.Spec.ServiceAccountName}
		f.workloads[object] = w
	}
	w.traits |= podTraits(p)
	if strings.HasPrefix(object, "daemonset/") {
		for i := range p.Spec.Containers {
			c := &p.Spec.Containers[i]
			name := imageName(c.Image)
			off := strings.HasSuffix(name, policyAgent) && !slices.Contains(slices.Concat(c.Command, c.Args), policyAgentFlag)
			if !off && !slices.Contains(w.images, name) {
				w.images = append(w.images, name)
			}
		}
	}
	if p.Namespace != systemNamespace || !isMirror(p) {
		return
	}
	for i := range p.Spec.Containers {
		if c := &p.Spec.Containers[i]; slices.Contains(components, c.Name) {
			f.planes[c.Name] = append(f.planes[c.Name], readStaticPod(p.Spec.NodeName, c))
		}
	}
}

// readStaticPod reads the flags of a component. etcd also takes them from its environment.
func readStaticPod(node string, c *corev1.Container) staticPod {
	out := staticPod{node: node, flags: parseFlags(slices.Concat(c.Command, c.Args))}
	if c.Name == etcd {
		for _, e := range c.Env {
			name, is := strings.CutPrefix(e.Name, "ETCD_")
			name = strings.ReplaceAll(strings.ToLower(name), "_", "-")
			if _, set := out.flags[name]; is && !set && e.Value != "" {
				out.flags[name] = e.Value
			}
		}
	}
	out.readable = slices.ContainsFunc(typicalFlag[c.Name], out.flags.has)
	return out
}

// imageName is the repository of an image without its registry: "flannel/flannel".
func imageName(image string) string {
	image, _, _ = strings.Cut(image, "@")
	if i := strings.LastIndexByte(image, ':'); i > strings.LastIndexByte(image, '/') {
		image = image[:i]
	}
	dir, base := path.Split(image)
	return path.Join(path.Base(dir), base)
}

// podTraits are those of a pod with all of its containers.
func podTraits(p *corev1.Pod) (out trait) {
	s, sc := &p.Spec, p.Spec.SecurityContext
	if sc == nil {
		sc = &corev1.PodSecurityContext{}
	}
	set := func(t trait, is bool) {
		if is {
			out |= t
		}
	}
	set(hostPID, s.HostPID)
	set(hostIPC, s.HostIPC)
	set(hostNetwork, s.HostNetwork)
	set(hostProcess, isHostProcess(sc.WindowsOptions))
	for i := range s.Volumes {
		v := &s.Volumes[i]
		set(hostPath, v.HostPath != nil)
		if v.Projected != nil {
			set(tokenMounted, slices.ContainsFunc(v.Projected.Sources, func(p corev1.VolumeProjection) bool {
				return p.ServiceAccountToken != nil && p.ServiceAccountToken.Audience == ""
			}))
		}
	}
	windows := s.OS != nil && s.OS.Name == corev1.Windows
	for _, list := range [][]corev1.Container{s.InitContainers, s.Containers} {
		for i := range list {
			out |= containerTraits(&list[i], sc, windows)
			set(noLimits, !limited(&list[i].Resources) && !limited(s.Resources))
		}
	}
	for i := range s.EphemeralContainers { // they cannot have limits
		c := corev1.Container(s.EphemeralContainers[i].EphemeralContainerCommon)
		out |= containerTraits(&c, sc, windows)
	}
	return out
}

func isHostProcess(w *corev1.WindowsSecurityContextOptions) bool {
	return w != nil && w.HostProcess != nil && *w.HostProcess
}

// containerTraits are those of a container. sc is the context of its pod.
func containerTraits(c *corev1.Container, sc *corev1.PodSecurityContext, windows bool) (out trait) {
	x := c.SecurityContext
	if x == nil {
		x = &corev1.SecurityContext{}
	}
	set := func(t trait, is bool) {
		if is {
			out |= t
		}
	}
	is := func(b *bool) bool { return b != nil && *b }
	set(privileged, is(x.Privileged))
	set(hostProcess, isHostProcess(x.WindowsOptions))
	set(noContext, c.SecurityContext == nil)
	if !windows { // Windows has none of these
		set(escalates, x.AllowPrivilegeEscalation == nil || *x.AllowPrivilegeEscalation)
		set(mayBeRoot, runsAsRoot(x, sc))
		var dropped, added []corev1.Capability
		if x.Capabilities != nil {
			dropped, added = x.Capabilities.Drop, x.Capabilities.Add
		}
		all := slices.Contains(dropped, "ALL")
		// Runtimes add capabilities whose names are in lower case, too.
		raw := slices.ContainsFunc(added, func(c corev1.Capability) bool { return isOneFold(c, "NET_RAW", "ALL") })
		more := slices.ContainsFunc(added, func(c corev1.Capability) bool { return !isOneFold(c, "NET_BIND_SERVICE") })
		set(keepsRaw, is(x.Privileged) || raw || !all && !slices.Contains(dropped, "NET_RAW"))
		set(keepsCapabilities, is(x.Privileged) || !all || more)
		set(addsCapabilities, more)
		profile := x.SeccompProfile
		if profile == nil {
			profile = sc.SeccompProfile
		}
		open := is(x.Privileged) || profile != nil && profile.Type == corev1.SeccompProfileTypeUnconfined
		set(unconfined, open)
		set(noSeccomp, open || profile == nil)
		set(writableRoot, !is(x.ReadOnlyRootFilesystem))
	}
	set(hostPort, slices.ContainsFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.HostPort != 0 }))
	set(secretInEnvironment, slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return e.ValueFrom != nil && e.ValueFrom.SecretKeyRef != nil }) ||
		slices.ContainsFunc(c.EnvFrom, func(e corev1.EnvFromSource) bool { return e.SecretRef != nil }))
	return out
}

// limited reports whether there are limits of CPU and memory.
func limited(r *corev1.ResourceRequirements) bool {
	return r != nil && !r.Limits.Cpu().IsZero() && !r.Limits.Memory().IsZero()
}

// runsAsRoot reports whether nothing keeps a container from running as root.
func runsAsRoot(x *corev1.SecurityContext, sc *corev1.PodSecurityContext) bool {
	nonRoot, user := sc.RunAsNonRoot, sc.RunAsUser
	if x.RunAsNonRoot != nil {
		nonRoot = x.RunAsNonRoot
	}
	if x.RunAsUser != nil {
		user = x.RunAsUser
	}
	refused := nonRoot != nil && *nonRoot
	return !refused && (user == nil || *user == 0)
}

// isOneFold compares the name of a capability without case.
func isOneFold(c corev1.Capability, names ...string) bool {
	return slices.ContainsFunc(names, func(n string) bool { return strings.EqualFold(string(c), n) })
}

// with judges which workloads have a trait.
func with(t trait, text string) func(*facts) verdict {
	return func(f *facts) verdict {
		var seen tally
		for object, w := range f.workloads {
			if w.has(t) {
				seen.add(bad, text, object)
			}
		}
		return seen.verdict("no pod of " + workloadCount(len(f.workloads)))
	}
}

func workloadCount(n int) string { return words.Count(n, "workload") }

// Levels of Pod Security.
const (
	baseline   = "baseline"
	restricted = "restricted"
)

const enforceLabel = "pod-security.kubernetes.io/enforce"

// exempt are the namespaces of Kubernetes itself, which have no workloads of users.
var exempt = []string{systemNamespace, "kube-public", "kube-node-lease"}

// admitting adds the namespaces that admit pods below a level of Pod Security.
func (f *facts) admitting(t *tally, level string) {
	why, off := f.otherAdmission(), f.withoutPodSecurity()
	for name, labels := range f.namespaces {
		has := labels[enforceLabel]
		switch {
		case slices.Contains(exempt, name):
		case off && len(f.reviewers) > 0:
			t.add(hidden, why, "namespace/"+name)
		case off:
			t.add(bad, "the admission plugin PodSecurity is off, so labels have no effect: such pods are admitted", "namespace/"+name)
		case has == restricted || has == level:
			t.add(good, "refused by the label "+enforceLabel+"="+has, "namespace/"+name)
		case has == "" && why != "":
			t.add(hidden, why, "namespace/"+name)
		case has == "":
			t.add(bad, "no label "+enforceLabel+": such pods are admitted", "namespace/"+name)
		default:
			t.add(bad, enforceLabel+"="+has+": such pods are admitted", "namespace/"+name)
		}
	}
}

// withoutPodSecurity reports whether an API server ignores the labels of Pod Security.
func (f *facts) withoutPodSecurity() bool {
	return slices.ContainsFunc(f.planes[apiServer], func(p staticPod) bool {
		return slices.Contains(p.flags.list("disable-admission-plugins"), "PodSecurity")
	})
}

// otherAdmission is what else may refuse pods; empty if nothing is known.
func (f *facts) otherAdmission() string {
	if len(f.reviewers) > 0 {
		return f.reviewers[0] + " reviews pods, and the API does not show what it refuses"
	}
	planes := f.planes[apiServer]
	if len(planes) == 0 {
		return "the default of Pod Security is in a file of the API server, which is not visible"
	}
	for _, p := range planes {
		if !p.readable || p.flags.has("admission-control-config-file") {
			return "the file of --admission-control-config-file decides, which the API does not show"
		}
	}
	if hidden := f.withoutPod(apiServer); len(hidden) > 0 {
		return "the default of Pod Security of the API server on node " + hidden[0] + " is not visible: it has no mirror pod"
	}
	return ""
}

// refused judges pods that exist with a trait, and whether namespaces admit new ones.
func refused(t trait, level, text string) func(*facts) verdict {
	return func(f *facts) verdict {
		var seen, admitting tally
		for object, w := range f.workloads {
			if w.has(t) {
				seen.add(bad, text, object)
			}
		}
		f.admitting(&admitting, level)
		var open []string
		for _, g := range admitting.seen {
			if g.wrong {
				open = append(open, g.objects...)
			}
		}
		// One piece of evidence without objects: it is the same for each of these checks.
		if len(open) > 0 {
			e := evidenceOf("", true, open)
			seen.add(bad, words.Count(len(open), "namespace")+" "+words.Verb(len(open), "admit")+" such pods: "+e.Names(shownNamespaces), "")
		}
		for why, objects := range admitting.hidden {
			seen.add(hidden, words.Count(len(objects), "namespace")+" may admit such pods: "+why, "")
		}
		return seen.verdict("no pod of " + workloadCount(len(f.workloads)) + ", and each namespace refuses such pods")
	}
}

// shownNamespaces is the number of namespaces in evidence that has no objects.
const shownNamespaces = 6

func podItems() []item {
	of := func(number string, level int, title, looks, psa, text string, t trait) item {
		return item{
			number: number, nsa: guidePods, level: level, title: title, looks: looks + " of all pods, and the label " + enforceLabel + " of namespaces",
			remedy: "change the pods, and label their namespaces " + enforceLabel + "=" + psa, command: "kubectl label --dry-run=server --overwrite namespace NAMESPACE " + enforceLabel + "=" + psa,
			needs: []source{sourcePods, sourceNamespaces, sourceAdmission}, judge: refused(t, psa, text),
		}
	}
	return []item{
		{
			number: "5.2.1", nsa: guidePods, level: 1, title: "Each namespace refuses pods that are too powerful", looks: "the label " + enforceLabel + " of namespaces without those of Kubernetes itself, and what else reviews pods",
			remedy: "label namespaces " + enforceLabel + "=baseline or restricted", command: "kubectl label --dry-run=server --overwrite namespace NAMESPACE " + enforceLabel + "=baseline",
			needs: []source{sourcePods, sourceNamespaces, sourceAdmission}, judge: func(f *facts) verdict {
				var t tally
				f.admitting(&t, baseline)
				return t.verdict("")
			},
		},
		of("5.2.2", 1, "No container is privileged", "securityContext.privileged", baseline, "a container is privileged", privileged),
		of("5.2.3", 1, "No pod shares process IDs with its machine", "hostPID", baseline, "hostPID", hostPID),
		of("5.2.4", 1, "No pod shares memory with its machine", "hostIPC", baseline, "hostIPC", hostIPC),
		of("5.2.5", 1, "No pod uses the network of its machine", "hostNetwork", baseline, "hostNetwork", hostNetwork),
		of("5.2.6", 1, "No process of a pod gains rights", "securityContext.allowPrivilegeEscalation", restricted, "allowPrivilegeEscalation is not false", escalates),
		of("5.2.7", 2, "No container can run as root", "securityContext.runAsNonRoot and runAsUser", restricted, "a container may run as root", mayBeRoot),
		of("5.2.8", 1, "No container can forge packets", "securityContext.capabilities: NET_RAW", restricted, "a container keeps the capability NET_RAW", keepsRaw),
		of("5.2.9", 2, "No container keeps capabilities", "drop and add of securityContext.capabilities", restricted, "a container does not drop all capabilities, or adds some", keepsCapabilities),
		of("5.2.10", 1, "No container is a process of a Windows host", "securityContext.windowsOptions.hostProcess", baseline, "a container is a HostProcess", hostProcess),
		of("5.2.11", 1, "No pod mounts paths of its machine", "volumes of type hostPath", baseline, "a volume is a path of the machine", hostPath),
		of("5.2.12", 1, "No container takes a port of its machine", "ports with hostPort", baseline, "a container has a hostPort", hostPort),
	}
}

// seccomp judges pods without a profile. Kubelets may give them one.
func seccomp(f *facts) verdict {
	byDefault, why := good, ""
	for _, k := range f.kubelets {
		if k.config == nil {
			why = k.why
		} else if _, s := fieldIs("seccompDefault", "true")(k); s != good {
			byDefault = bad
		}
	}
	switch {
	case byDefault == bad:
	case why != "":
		byDefault = hidden
	case len(f.kubelets) == 0:
		byDefault = bad
	}
	var t tally
	for object, w := range f.workloads {
		switch {
		case !w.has(noSeccomp):
		case w.has(unconfined):
			t.add(bad, "a container is privileged or has the seccomp profile Unconfined", object)
		case byDefault == good:
			t.add(good, "no profile: kubelets give it that of the runtime (seccompDefault)", object)
		case byDefault == hidden:
			t.add(hidden, "no profile, and whether kubelets give it one (seccompDefault) is not visible: "+why, object)
		default:
			t.add(bad, "a container has no seccomp profile", object)
		}
	}
	return t.verdict("no pod of " + workloadCount(len(f.workloads)))
}

// inDefault judges the namespace default.
func inDefault(f *facts) verdict {
	var t tally
	for object, w := range f.workloads {
		if w.namespace == "default" {
			t.add(bad, "runs in the namespace default", object)
		}
	}
	return t.verdict("no pod runs in it")
}

// boundaries shows the namespaces with workloads.
func boundaries(f *facts) verdict {
	count := map[string]bool{}
	for _, w := range f.workloads {
		count[w.namespace] = true
	}
	var objects []string
	for n := range count {
		objects = append(objects, "namespace/"+n)
	}
	return verdict{status: check.SecurityManual, evidence: []check.Evidence{evidenceOf(words.Count(len(count), "namespace")+" with workloads", false, objects)}}
}
