package plans

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"path"
	"regexp"
	"strconv"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"constellation/operator/api/upgradev1"
	"constellation/operator/nodelock"
)

// Annotations that only this controller uses.
const (
	// annotationTemplate of a Job is the hash of its Plan's pod settings. Another controller created a
	// Job without it.
	annotationTemplate = "constellation.edgeless.systems/template"
	annotationCordoned = nodelock.AnnotationCordonedForPlan
	// annotationKeepCordon of a Job is "true" if its node was cordoned by somebody else before.
	annotationKeepCordon = "constellation.edgeless.systems/keep-cordon"
)

const (
	windows     = "windows"
	hostRoot    = "host-root"
	podInfo     = "pod-info"
	podInfoPath = "/run/system-upgrade/pod"
	secretsPath = "/run/system-upgrade/secrets"
)

// templateHash returns a hash of the Plan's pod settings. A Job is replaced if these settings change.
// A new version of this program that creates other pods replaces no Job.
func templateHash(p *upgradev1.Plan) string {
	s := p.Spec
	b, err := json.Marshal([]any{
		s.ServiceAccountName, s.Secrets, s.Tolerations, s.Exclusive, s.Prepare, s.Cordon, s.Drain, s.Upgrade, s.ImagePullSecrets, s.PriorityClassName,
		ownLabels(p), p.Status.LatestHash,
	})
	if err != nil { // strings, numbers and lists of them
		panic(err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:10])
}

// ownLabels returns the Plan's labels that its Jobs inherit.
func ownLabels(p *upgradev1.Plan) map[string]string {
	out := map[string]string{}
	for k, v := range p.Labels {
		if !strings.Contains(k, "cattle.io/") {
			out[k] = v
		}
	}
	return out
}

// makeJob returns the Job that upgrades a node. The Plan's status must be that of the rollout.
func makeJob(p *upgradev1.Plan, n node, controller string, s Settings, delay time.Duration) *batchv1.Job {
	l := ownLabels(p)
	maps.Copy(l, map[string]string{
		upgradev1.LabelController:     controller,
		upgradev1.LabelExclusive:      strconv.FormatBool(p.Spec.Exclusive),
		upgradev1.LabelNode:           labelValue(n.name),
		upgradev1.LabelPlan:           labelValue(p.Name),
		upgradev1.LabelVersion:        labelValue(p.Status.LatestVersion),
		upgradev1.LabelOfPlan(p.Name): p.Status.LatestHash,
	})
	annotations := map[string]string{}
	for k, v := range p.Annotations {
		if !strings.Contains(k, "cattle.io/") && !strings.Contains(k, "kubectl.kubernetes.io/") {
			annotations[k] = v
		}
	}
	ttl := s.TTLSecondsAfterFinish
	// If a Job is deleted before its node is marked, the upgrade runs again.
	if least := int32(delay/time.Second) + 60; delay > 0 && ttl < least {
		ttl = least
	}
	annotations[upgradev1.AnnotationTTL] = strconv.Itoa(int(ttl))
	onJob := maps.Clone(annotations)
	onJob[annotationTemplate] = templateHash(p)
	if n.foreignCordon() {
		onJob[annotationKeepCordon] = "true"
	}
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: jobName(p.Name, n.name, p.Status.LatestHash), Namespace: p.Namespace, Labels: l, Annotations: onJob},
		Spec: batchv1.JobSpec{
			Completions: new(int32(1)), Parallelism: new(int32(1)), BackoffLimit: &s.BackoffLimit, TTLSecondsAfterFinished: &ttl,
			ActiveDeadlineSeconds: deadline(p, s), PodReplacementPolicy: &s.PodReplacementPolicy,
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: maps.Clone(l), Annotations: annotations},
				Spec:       podSpec(p, n, s),
			},
		},
	}
}

// deadline returns the deadline of the Plan's Jobs; nil: none.
func deadline(p *upgradev1.Plan, s Settings) *int64 {
	d := s.ActiveDeadlineSeconds
	if own := p.Spec.JobActiveDeadlineSecs; own != nil && *own >= 0 {
		d = *own
	}
	if s.ActiveDeadlineSecondsMax > 0 && (d <= 0 || d > s.ActiveDeadlineSecondsMax) {
		d = s.ActiveDeadlineSecondsMax
	}
	if d <= 0 {
		return nil
	}
	return &d
}

func podSpec(p *upgradev1.Plan, n node, s Settings) corev1.PodSpec {
	apart := func(key, value string) corev1.PodAffinityTerm {
		return corev1.PodAffinityTerm{
			TopologyKey: corev1.LabelHostname,
			LabelSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
				{Key: key, Operator: metav1.LabelSelectorOpIn, Values: []string{value}},
			}},
		}
	}
	others := []corev1.PodAffinityTerm{apart(upgradev1.LabelPlan, labelValue(p.Name))}
	if p.Spec.Exclusive {
		others = append(others, apart(upgradev1.LabelExclusive, "true"))
	}
	pod := corev1.PodSpec{
		HostIPC: true, HostPID: true, HostNetwork: true, DNSPolicy: corev1.DNSClusterFirstWithHostNet, RestartPolicy: corev1.RestartPolicyNever,
		ServiceAccountName: p.Spec.ServiceAccountName, ImagePullSecrets: p.Spec.ImagePullSecrets, PriorityClassName: p.Spec.PriorityClassName,
		// The scheduler assigns the pod, so that resources of other pods and taints count.
		Affinity: &corev1.Affinity{
			NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{n.host}}},
			}}}},
			PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: others},
		},
		Tolerations: append([]corev1.Toleration{{Key: corev1.TaintNodeUnschedulable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}}, p.Spec.Tolerations...),
		Volumes:     volumes(p),
	}
	if n.os == windows {
		// Of the host's namespaces, Windows supports only the network.
		pod.HostIPC, pod.HostPID = false, false
		// The API server admits HostProcess containers only if all containers of the pod are.
		pod.SecurityContext = &corev1.PodSecurityContext{WindowsOptions: &corev1.WindowsSecurityContextOptions{HostProcess: new(true), RunAsUserName: new(`NT AUTHORITY\SYSTEM`)}}
	}
	add := func(name string, c upgradev1.ContainerSpec, security *corev1.SecurityContext) {
		out := container(p, name, c, s)
		if out.SecurityContext == nil {
			out.SecurityContext = security
		}
		if name == "upgrade" {
			pod.Containers = append(pod.Containers, out)
			return
		}
		pod.InitContainers = append(pod.InitContainers, out)
	}
	tagged := func(c upgradev1.ContainerSpec) upgradev1.ContainerSpec {
		c.Image = withTag(c.Image, p.Status.LatestVersion)
		return c
	}
	if p.Spec.Prepare != nil {
		add("prepare", tagged(*p.Spec.Prepare), nil)
	}
	kubectl := s.KubectlImage
	if n.os == windows {
		kubectl = s.KubectlImageWindows
	}
	switch {
	case p.Spec.Drain != nil:
		add("drain", upgradev1.ContainerSpec{Image: kubectl, Args: drainArgs(n.name, p.Spec.Drain), Volumes: p.Spec.Upgrade.Volumes}, nil)
	case p.Spec.Cordon:
		add("cordon", upgradev1.ContainerSpec{Image: kubectl, Args: []string{"cordon", n.name}, Volumes: p.Spec.Upgrade.Volumes}, nil)
	}
	security := &corev1.SecurityContext{Privileged: &s.Privileged, Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"CAP_SYS_BOOT"}}}
	if n.os == windows {
		security = nil // that of the pod
	}
	add("upgrade", tagged(*p.Spec.Upgrade), security)
	return pod
}

// volumeName returns the name of a Secret's volume: names of Secrets may contain dots.
func volumeName(secret string) string {
	return safeName("secret", strings.ReplaceAll(secret, ".", "-"))
}

func volumes(p *upgradev1.Plan) []corev1.Volume {
	field := func(file, of string) corev1.DownwardAPIVolumeFile {
		return corev1.DownwardAPIVolumeFile{Path: file, FieldRef: &corev1.ObjectFieldSelector{FieldPath: of}}
	}
	out := []corev1.Volume{
		{Name: hostRoot, VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/", Type: new(corev1.HostPathDirectory)}}},
		{Name: podInfo, VolumeSource: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{
			Items: []corev1.DownwardAPIVolumeFile{field("labels", "metadata.labels"), field("annotations", "metadata.annotations")},
		}}},
	}
	for _, s := range p.Spec.Secrets {
		out = append(out, corev1.Volume{Name: volumeName(s.Name), VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{
			SecretName: s.Name, DefaultMode: s.DefaultMode, Optional: &s.IgnoreUpdates,
		}}})
	}
	known := map[string]bool{}
	for _, c := range []*upgradev1.ContainerSpec{p.Spec.Upgrade, p.Spec.Prepare} {
		if c == nil {
			continue
		}
		for _, v := range c.Volumes {
			if !known[v.Name] {
				known[v.Name] = true
				out = append(out, corev1.Volume{Name: v.Name, VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: v.Source}}})
			}
		}
	}
	return out
}

func container(p *upgradev1.Plan, name string, c upgradev1.ContainerSpec, s Settings) corev1.Container {
	from := func(name, field string) corev1.EnvVar {
		return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: field}}}
	}
	out := corev1.Container{
		Name: name, Image: c.Image, Command: c.Command, Args: c.Args, EnvFrom: c.EnvFrom, ImagePullPolicy: s.ImagePullPolicy, SecurityContext: c.SecurityContext,
		Env: []corev1.EnvVar{
			from("SYSTEM_UPGRADE_NODE_NAME", "spec.nodeName"), from("SYSTEM_UPGRADE_POD_NAME", "metadata.name"), from("SYSTEM_UPGRADE_POD_UID", "metadata.uid"),
		},
		// The end of its log can then be reported without the right to read logs.
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		VolumeMounts:             []corev1.VolumeMount{{Name: hostRoot, MountPath: "/host"}, {Name: podInfo, MountPath: podInfoPath, ReadOnly: true}},
	}
	out.Env = append(append(out.Env, c.Env...),
		corev1.EnvVar{Name: "SYSTEM_UPGRADE_PLAN_NAME", Value: p.Name},
		corev1.EnvVar{Name: "SYSTEM_UPGRADE_PLAN_LATEST_HASH", Value: p.Status.LatestHash},
		corev1.EnvVar{Name: "SYSTEM_UPGRADE_PLAN_LATEST_VERSION", Value: p.Status.LatestVersion},
	)
	for _, v := range c.Volumes {
		out.VolumeMounts = append(out.VolumeMounts, corev1.VolumeMount{Name: v.Name, MountPath: v.Destination})
	}
	for _, s := range p.Spec.Secrets {
		at := s.Path
		switch {
		case at == "":
			at = path.Join(secretsPath, s.Name)
		case !path.IsAbs(at):
			at = path.Join(secretsPath, at)
		}
		out.VolumeMounts = append(out.VolumeMounts, corev1.VolumeMount{Name: volumeName(s.Name), MountPath: at, ReadOnly: true})
	}
	return out
}

// withTag adds the version as tag to an image without tag or digest. It formats images of Docker
// Hub in the short form.
func withTag(image, version string) string {
	if strings.Contains(image, "@") || strings.Contains(path.Base(image), ":") || !tagPattern.MatchString(version) || image == "" {
		return image
	}
	for _, registry := range []string{"index.docker.io/", "docker.io/"} {
		if short, ok := strings.CutPrefix(image, registry); ok {
			image = strings.TrimPrefix(short, "library/")
		}
	}
	return image + ":" + version
}

var tagPattern = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$`)

// drainArgs returns the arguments of `kubectl drain`. Pods of upgrade controllers stay, because the
// pod that drains is one of them.
func drainArgs(name string, d *upgradev1.DrainSpec) []string {
	which := "!" + upgradev1.LabelController
	if s, err := metav1.LabelSelectorAsSelector(d.PodSelector); d.PodSelector != nil && err == nil && !s.Empty() {
		which += "," + s.String()
	}
	args := []string{"drain", name, "--pod-selector", which}
	if d.IgnoreDaemonSets == nil || *d.IgnoreDaemonSets {
		args = append(args, "--ignore-daemonsets")
	}
	if (d.DeleteLocalData == nil || *d.DeleteLocalData) && (d.DeleteEmptydirData == nil || *d.DeleteEmptydirData) {
		args = append(args, "--delete-emptydir-data")
	}
	if d.Force {
		args = append(args, "--force")
	}
	if t := d.Timeout; t != nil {
		text := t.StrVal
		if t.Type == intstr.Int {
			text = time.Duration(t.IntVal).String()
		}
		args = append(args, "--timeout", text)
	}
	if d.GracePeriod != nil {
		args = append(args, "--grace-period", strconv.Itoa(int(*d.GracePeriod)))
	}
	if d.DisableEviction {
		args = append(args, "--disable-eviction=true")
	}
	if d.SkipWaitForDeleteTimeout > 0 {
		args = append(args, "--skip-wait-for-delete-timeout", strconv.Itoa(d.SkipWaitForDeleteTimeout))
	}
	return args
}
