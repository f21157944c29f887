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
	"constellation/operator/readiness"
)

// Of Nodes, Jobs and pods that much is held, by informers and by the book alike: an object
// as it is in the API takes kilobytes, most of it empty fields, and there may be ten
// thousand of each. Informers find names and versions by GetObjectMeta.

// node is what is looked at of a Node.
type node struct {
	name, host, uid, os, kubelet, version string
	// label is the name, or what stands for it as the value of a label.
	label                              string
	labels                             labelSet
	controlPlane, ready, unschedulable bool
	cordonedFor                        string    // namespace/name of a Plan
	readySince                         time.Time // by our own clock; zero: it is not Ready. The book sets it.
}

// GetObjectMeta implements metav1.ObjectMetaAccessor.
func (n *node) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Name: n.name, UID: types.UID(n.uid), ResourceVersion: n.version}
}

// foreignCordon reports whether somebody else keeps pods off the node.
func (n *node) foreignCordon() bool { return n.unschedulable && n.cordonedFor == "" }

func (n *node) available() bool { return n.ready && !n.unschedulable }

// same reports whether nothing changed that a Plan looks at.
func (n *node) same(o *node) bool {
	return n.host == o.host && n.os == o.os && n.kubelet == o.kubelet && n.controlPlane == o.controlPlane && n.ready == o.ready &&
		n.unschedulable == o.unschedulable && n.cordonedFor == o.cordonedFor && slices.Equal(n.labels, o.labels)
}

// trimNode makes a *node of a Node, and leaves anything else as it is.
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
	return n, nil
}

// labelSet is labels in the order of their keys. Nodes share most keys and values, so each
// is there once. It implements labels.Labels.
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

// Lookup returns the value of a label, and whether there is one.
func (l labelSet) Lookup(key string) (string, bool) {
	for _, p := range l {
		if p.key.Value() == key {
			return p.value.Value(), true
		}
	}
	return "", false
}

// Get returns the value of a label; empty: there is none, or it is empty.
func (l labelSet) Get(key string) string {
	v, _ := l.Lookup(key)
	return v
}

// Has reports whether there is a label.
func (l labelSet) Has(key string) bool {
	_, ok := l.Lookup(key)
	return ok
}

// once returns a string equal to s that is shared with others that were asked for about
// the same time.
func once(s string) string { return unique.Make(s).Value() }

// job is what is looked at of a Job. It does not change.
type job struct {
	namespace, name, version string
	uid                      types.UID
	// plan and node are labels: what stands for names where those are too long.
	plan, node string
	// brings is the version that it brings, as a label has it, hash that of its Plan.
	brings, hash string
	// template is the hash of what its Plan said about pods; empty: another controller made it.
	template string
	// keepCordon says that its node was cordoned by somebody else before.
	keepCordon bool
	deleting   bool
	failed     int32 // pods
	// phase says whether it is over, and if so the others when and why.
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

// trimJob makes a *job of a Job, and leaves anything else as it is.
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

// pod is what is looked at of a pod of a Job. It does not change.
type pod struct {
	namespace, name, version string
	uid                      types.UID
	job                      string // its name; empty: it is no Job's
	deleting                 bool
	news                     podNews
}

// GetObjectMeta implements metav1.ObjectMetaAccessor.
func (p *pod) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: p.namespace, Name: p.name, UID: p.uid, ResourceVersion: p.version}
}

// trimPod makes a *pod of a Pod, and leaves anything else as it is.
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
