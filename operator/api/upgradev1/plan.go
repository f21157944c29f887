package upgradev1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Plan runs a privileged Job once on every node that its selector matches, a few nodes at a
// time, whenever the version changes.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Namespaced,path=plans,singular=plan
// +kubebuilder:printcolumn:name="Image",type=string,JSONPath=`.spec.upgrade.image`
// +kubebuilder:printcolumn:name="Channel",type=string,JSONPath=`.spec.channel`
// +kubebuilder:printcolumn:name="Version",type=string,JSONPath=`.spec.version`
// +kubebuilder:printcolumn:name="Complete",type=string,JSONPath=`.status.conditions[?(@.type=='Complete')].status`
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.conditions[?(@.message!="")].message`
// +kubebuilder:printcolumn:name="Applying",type=string,priority=10,JSONPath=`.status.applying`
type Plan struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec selects the nodes and defines the Job.
	// +required
	Spec PlanSpec `json:"spec"`
	// status is the progress of the Plan.
	// +optional
	// +kubebuilder:default={"observedGeneration":-1}
	Status PlanStatus `json:"status,omitempty"`
}

// PlanSpec selects the nodes and defines the Job. Only the field upgrade is required.
type PlanSpec struct {
	// concurrency is how many nodes are upgraded at a time. With 0 no node is upgraded.
	// +optional
	Concurrency int64 `json:"concurrency,omitempty"`
	// jobActiveDeadlineSecs limits the time of each Job: missing or negative means the
	// controller's default, 0 no limit. The controller may have a maximum.
	// +optional
	JobActiveDeadlineSecs *int64 `json:"jobActiveDeadlineSecs,omitempty"`
	// nodeSelector selects the nodes to upgrade. A missing selector matches no node, an empty
	// one matches all.
	// +optional
	NodeSelector *metav1.LabelSelector `json:"nodeSelector,omitempty"`
	// serviceAccountName is the service account of the Jobs' pods. It is part of status.latestHash.
	// +optional
	ServiceAccountName string `json:"serviceAccountName,omitempty"`
	// channel is a URL that redirects to the latest version: the version is the last element
	// of the redirect's path. It is not polled if version is set.
	// +optional
	Channel string `json:"channel,omitempty"`
	// version is the target version of the nodes.
	// +optional
	Version string `json:"version,omitempty"`
	// secrets are mounted into the Jobs' pods, and are part of status.latestHash.
	// +optional
	Secrets []SecretSpec `json:"secrets,omitempty"`
	// tolerations of the Jobs' pods, besides that of cordoned nodes.
	// +optional
	Tolerations []corev1.Toleration `json:"tolerations,omitempty"`
	// exclusive keeps Jobs of this Plan off nodes on which a Job of another exclusive Plan runs.
	// +optional
	Exclusive bool `json:"exclusive,omitempty"`
	// window is when the upgrade of a node may start.
	// +optional
	Window *TimeWindowSpec `json:"window,omitempty"`
	// prepare runs before the node is cordoned or drained.
	// +optional
	Prepare *ContainerSpec `json:"prepare,omitempty"`
	// cordon keeps new pods off the node while it is upgraded. It is ignored if drain is set.
	// +optional
	Cordon bool `json:"cordon,omitempty"`
	// drain removes the pods of the node before it is upgraded.
	// +optional
	Drain *DrainSpec `json:"drain,omitempty"`
	// upgrade is the container that runs on each node.
	// +required
	Upgrade *ContainerSpec `json:"upgrade"`
	// imagePullSecrets of the Jobs' pods.
	// +optional
	ImagePullSecrets []corev1.LocalObjectReference `json:"imagePullSecrets,omitempty"`
	// postCompleteDelay is how long a node occupies its slot of concurrency after its Job has
	// completed.
	// +optional
	PostCompleteDelay *Duration `json:"postCompleteDelay,omitempty"`
	// priorityClassName of the Jobs' pods.
	// +optional
	PriorityClassName string `json:"priorityClassName,omitempty"`
	// postCompleteLabels are added to upgraded nodes. In values, $(LATEST_VERSION) and
	// $(LATEST_HASH) are replaced by status.latestVersion and status.latestHash.
	// +optional
	PostCompleteLabels map[string]string `json:"postCompleteLabels,omitempty"`
	// constellation has options that only the controller of this project implements. Without
	// it the Plan is a plain one of system-upgrade-controller.
	// +optional
	Constellation *Rollout `json:"constellation,omitempty"`
}

// Duration is a duration in Go's format, such as 1m30s. It is a string, parsed when the Plan is
// validated: one malformed Plan must not make the list of all Plans fail.
type Duration string

// ContainerSpec is a container of a Job's pod.
type ContainerSpec struct {
	// image to run. If it has neither tag nor digest, the version becomes its tag.
	Image string `json:"image"`
	// command replaces the image's entrypoint.
	// +optional
	Command []string `json:"command,omitempty"`
	// args of the command.
	// +optional
	Args []string `json:"args,omitempty"`
	// envs are environment variables.
	// +optional
	Env []corev1.EnvVar `json:"envs,omitempty"`
	// envFrom are sources of environment variables.
	// +optional
	EnvFrom []corev1.EnvFromSource `json:"envFrom,omitempty"`
	// volumes are directories of the node.
	// +optional
	Volumes []HostPathVolume `json:"volumes,omitempty"`
	// securityContext of the container. Without one, the container upgrade has CAP_SYS_BOOT and
	// is privileged if the controller is configured so.
	// +optional
	SecurityContext *corev1.SecurityContext `json:"securityContext,omitempty"`
}

// HostPathVolume is a directory of the node in a container.
type HostPathVolume struct {
	// name of the volume.
	Name string `json:"name"`
	// source is the path on the node.
	Source string `json:"source"`
	// destination is the path in the container.
	Destination string `json:"destination"`
}

// DrainSpec is how a node is drained.
type DrainSpec struct {
	// timeout after which a drain has failed: a duration such as 5m, or a number of
	// nanoseconds. Without one only the Job's deadline applies.
	// +optional
	Timeout *intstr.IntOrString `json:"timeout,omitempty"`
	// gracePeriod of the pods, in seconds; negative means that of each pod.
	// +optional
	GracePeriod *int32 `json:"gracePeriod,omitempty"`
	// deleteLocalData is the older name of deleteEmptydirData. Only one may be set.
	// +optional
	DeleteLocalData *bool `json:"deleteLocalData,omitempty"`
	// deleteEmptydirData evicts pods that use emptyDir volumes; their data is lost.
	// +optional
	DeleteEmptydirData *bool `json:"deleteEmptydirData,omitempty"`
	// ignoreDaemonSets leaves pods of DaemonSets where they are. Missing means true.
	// +optional
	IgnoreDaemonSets *bool `json:"ignoreDaemonSets,omitempty"`
	// force evicts pods without a controller; they are not created again.
	// +optional
	Force bool `json:"force,omitempty"`
	// disableEviction deletes pods instead of evicting them, and so ignores disruption budgets.
	// +optional
	DisableEviction bool `json:"disableEviction,omitempty"`
	// skipWaitForDeleteTimeout stops waiting for pods whose deletion began this many seconds ago.
	// +optional
	SkipWaitForDeleteTimeout int `json:"skipWaitForDeleteTimeout,omitempty"`
	// podSelector selects the pods to drain; missing means all.
	// +optional
	PodSelector *metav1.LabelSelector `json:"podSelector,omitempty"`
}

// SecretSpec is a Secret of the Plan's namespace in the Jobs' pods.
type SecretSpec struct {
	// name of the Secret.
	Name string `json:"name"`
	// path where it is mounted; a relative one is below /run/system-upgrade/secrets.
	Path string `json:"path"`
	// ignoreUpdates keeps the Secret out of status.latestHash: it may change, or be missing,
	// without a new upgrade.
	// +optional
	IgnoreUpdates bool `json:"ignoreUpdates,omitempty"`
	// defaultMode of the files.
	// +optional
	DefaultMode *int32 `json:"defaultMode,omitempty"`
}

// Day is a day of the week.
//
// +kubebuilder:validation:Enum={"0","su","sun","sunday","1","mo","mon","monday","2","tu","tue","tuesday","3","we","wed","wednesday","4","th","thu","thursday","5","fr","fri","friday","6","sa","sat","saturday"}
type Day string

// TimeWindowSpec is a period of time that repeats on some days of the week.
type TimeWindowSpec struct {
	// days on which the window opens.
	// +optional
	// +kubebuilder:validation:MinItems=1
	Days []Day `json:"days,omitempty"`
	// startTime such as 22:00 or 10pm.
	// +optional
	StartTime string `json:"startTime,omitempty"`
	// endTime such as 02:00 or 2am, itself included. If it is before startTime the window
	// ends on the next day.
	// +optional
	EndTime string `json:"endTime,omitempty"`
	// timeZone such as Europe/Berlin; empty means UTC.
	// +optional
	TimeZone string `json:"timeZone,omitempty"`
}

// PlanStatus is the progress of a Plan.
type PlanStatus struct {
	// observedGeneration is the generation of the Plan that this status describes; -1 before the
	// controller has written any. system-upgrade-controller drops the field.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// conditions are LatestResolved, Validated and Complete, and for generic tools Ready,
	// Reconciling and Stalled.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []Condition `json:"conditions,omitempty"`
	// latestVersion is the target version, in a form that is valid as the tag of an image.
	// +optional
	LatestVersion string `json:"latestVersion,omitempty"`
	// latestHash is the value of the Plan's label on upgraded nodes.
	// +optional
	LatestHash string `json:"latestHash,omitempty"`
	// applying lists the nodes being upgraded, by their label kubernetes.io/hostname.
	// +optional
	Applying []string `json:"applying,omitempty"`
	// constellation is the status that only the controller of this project writes.
	// +optional
	Constellation *RolloutStatus `json:"constellation,omitempty"`
}

// Condition is a condition of a Plan. Its times are RFC 3339.
type Condition struct {
	// type of the condition.
	Type string `json:"type"`
	// status is True, False or Unknown.
	Status corev1.ConditionStatus `json:"status"`
	// lastUpdateTime is when the condition last changed.
	// +optional
	LastUpdateTime string `json:"lastUpdateTime,omitempty"`
	// lastTransitionTime is when the condition's status last changed.
	// +optional
	LastTransitionTime string `json:"lastTransitionTime,omitempty"`
	// reason is one word in CamelCase.
	// +optional
	Reason string `json:"reason,omitempty"`
	// message is a sentence.
	// +optional
	Message string `json:"message,omitempty"`
}

// PlanList is a list of Plans.
//
// +kubebuilder:object:root=true
type PlanList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Plan `json:"items"`
}
