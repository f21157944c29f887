package plans

import (
	"cmp"
	"slices"
	"time"
	"unique"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"constellation/operator/api/upgradev1"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/nodelock"
	"constellation/operator/readiness"
)

// Trimmed Nodes, Jobs and pods. Informers and the book keep only these fields: a full API object
// takes kilobytes, most of it empty fields, and there may be ten thousand of each. Informers read
// names and versions with GetObjectMeta.

// node has the fields of a Node that the controller uses.
type node struct {
	name, host, uid, os, kubelet, version string
	// label is the name, shortened if necessary to a label value.
	label                              string
	labels                             labelSet
	controlPlane, ready, unschedulable bool
	cordonedFor                        string    // namespace/name of a Plan
	inPlace                            bool      // the operator has it cordoned for its upgrade in place
	waits                              string    // namespace/name of the Plan that upgrades it while the operator has it drained; empty: none
	waitsSince                         time.Time // when that was last written
	lent                               string    // namespace/name of the Plan that may upgrade it now; empty: none
	readySince                         time.Time // by our own clock; zero: not Ready. The book sets it.
}

// GetObjectMeta implements metav1.ObjectMetaAccessor.
func (n *node) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Name: n.name, UID: types.UID(n.uid), ResourceVersion: n.version}
}

// foreignCordon reports whether somebody else cordoned the node.
func (n *node) foreignCordon() bool { return n.unschedulable && n.cordonedFor == "" }

func (n *node) available() bool { return n.ready && !n.unschedulable }

// same reports whether all fields that Plans use are equal.
func (n *node) same(o *node) bool {
	return n.host == o.host && n.os == o.os && n.kubelet == o.kubelet && n.controlPlane == o.controlPlane && n.ready == o.ready &&
		n.unschedulable == o.unschedulable && n.cordonedFor == o.cordonedFor &&
		n.inPlace == o.inPlace && n.waits == o.waits && n.lent == o.lent && slices.Equal(n.labels, o.labels)
}

// trimNode converts a Node to a *node, and returns anything else unchanged.
func trimNode(obj any) (any, error) {
	in, ok := obj.(*corev1.Node)
	if !ok {
		return obj, nil
	}
	n := &node{
		name: in.Name, label: labelValue(in.Name), host: in.Labels[corev1.LabelHostname], uid: string(in.UID), os: once(in.Labels[corev1.LabelOSStable]),
		version: in.ResourceVersion, kubelet: once(in.Status.NodeInfo.KubeletVersion), labels: labelsOf(in.Labels), unschedulable: in.Spec.Unschedulable,
		cordonedFor: once(in.Annotations[annotationCordoned]),
	}
	if n.host == n.name {
		n.host = n.name // one string for both
	}
	for _, role := range []string{"node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master", "node-role.kubernetes.io/etcd"} {
		n.controlPlane = n.controlPlane || n.labels.Has(role)
	}
	n.ready = readiness.Node(in)
	n.inPlace = n.unschedulable && in.Labels[v1alpha1.LabelInPlace] == "true" && in.Annotations[v1alpha1.AnnotationCordoned] != ""
	n.waits, n.waitsSince = nodelock.ParseNote(in.Annotations[nodelock.AnnotationWaits])
	n.lent, _ = nodelock.ParseNote(in.Annotations[nodelock.AnnotationLent])
	n.waits, n.lent = once(n.waits), once(n.lent)
	return n, nil
}

// labelSet has labels sorted by key. Nodes share most keys and values, so each string is stored
// once. It implements labels.Labels.
type labelSet []labelPair

type labelPair struct{ key, value unique.Handle[string] }

func labelsOf(m map[string]string) labelSet {
	out := make(labelSet, 0, len(m))
	for k, v := range m {
		out = append(out, labelPair{unique.Make(k), unique.Make(v)})
	}
	slices.SortFunc(out, func(a, b labelPair) int { return cmp.Compare(a.key.Value(), b.key.Value()) })
	return out
}

// Lookup returns the value of a label, and whether it exists.
func (l labelSet) Lookup(key string) (string, bool) {
	for _, p := range l {
		if p.key.Value() == key {
			return p.value.Value(), true
		}
	}
	return "", false
}

// Get returns the value of a label; empty: missing or empty.
func (l labelSet) Get(key string) string {
	v, _ := l.Lookup(key)
	return v
}

// Has reports whether a label exists.
func (l labelSet) Has(key string) bool {
	_, ok := l.Lookup(key)
	return ok
}

// once interns s: it returns an equal string that recent callers share.
func once(s string) string { return unique.Make(s).Value() }

// job has the fields of a Job that the controller uses. It is immutable.
type job struct {
	namespace, name, version string
	uid                      types.UID
	// plan and node are label values: names, shortened if necessary.
	plan, node string
	// brings is the version that it installs, as a label value, hash the hash of its Plan.
	brings, hash string
	// template is the hash of its Plan's pod settings; empty: another controller created it.
	template string
	// keepCordon is true if somebody else had cordoned its node before.
	keepCordon bool
	deleting   bool
	failed     int32 // pods
	// phase is whether it has finished. The other fields are when and why.
	phase           jobPhase
	ended           time.Time
	reason, message string
}

type jobPhase int

const (
	jobActive jobPhase = iota
	jobComplete
	jobFailed
)

// GetObjectMeta implements metav1.ObjectMetaAccessor.
func (j *job) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: j.namespace, Name: j.name, UID: j.uid, ResourceVersion: j.version}
}

// trimJob converts a Job to a *job, and returns anything else unchanged.
func trimJob(obj any) (any, error) {
	in, ok := obj.(*batchv1.Job)
	if !ok {
		return obj, nil
	}
	plan := in.Labels[upgradev1.LabelPlan]
	j := &job{
		namespace: once(in.Namespace), name: in.Name, version: in.ResourceVersion, uid: in.UID,
		plan: once(plan), node: in.Labels[upgradev1.LabelNode], brings: once(in.Labels[upgradev1.LabelVersion]), hash: once(in.Labels[upgradev1.LabelOfPlan(plan)]),
		template: once(in.Annotations[annotationTemplate]), keepCordon: in.Annotations[annotationKeepCordon] != "", deleting: in.DeletionTimestamp != nil, failed: in.Status.Failed,
	}
	for _, c := range in.Status.Conditions {
		if c.Status != corev1.ConditionTrue || c.Type != batchv1.JobComplete && c.Type != batchv1.JobFailed {
			continue
		}
		j.phase = jobComplete
		if c.Type == batchv1.JobFailed {
			j.phase = jobFailed
		}
		j.ended, j.reason, j.message = c.LastTransitionTime.Time, once(c.Reason), once(c.Message)
		break
	}
	return j, nil
}

// pod has the fields of a Job's pod that the controller uses. It is immutable.
type pod struct {
	namespace, name, version string
	uid                      types.UID
	job                      string // name of its Job; empty: none
	deleting                 bool
	news                     podNews
}

// GetObjectMeta implements metav1.ObjectMetaAccessor.
func (p *pod) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: p.namespace, Name: p.name, UID: p.uid, ResourceVersion: p.version}
}

// trimPod converts a Pod to a *pod, and returns anything else unchanged.
func trimPod(obj any) (any, error) {
	in, ok := obj.(*corev1.Pod)
	if !ok {
		return obj, nil
	}
	return &pod{
		namespace: once(in.Namespace), name: in.Name, version: in.ResourceVersion, uid: in.UID, job: in.Labels[batchv1.JobNameLabel],
		deleting: in.DeletionTimestamp != nil, news: newsOf(in),
	}, nil
}
