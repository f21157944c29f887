package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// AutoscalingStrategy names the Deployment of the cluster autoscaler and whether it
// runs. The operator pauses the autoscaler while nodes are replaced and resumes it
// afterwards. There is one object, autoscalingstrategy.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,path=autoscalingstrategies,shortName=as
// +kubebuilder:validation:XValidation:rule="self.metadata.name == 'autoscalingstrategy'",message="the only AutoscalingStrategy of a cluster is called autoscalingstrategy"
// +kubebuilder:printcolumn:name="Wanted",type=boolean,JSONPath=`.spec.enabled`
// +kubebuilder:printcolumn:name="Running",type=boolean,JSONPath=`.status.enabled`
// +kubebuilder:printcolumn:name="Replicas",type=integer,JSONPath=`.status.replicas`
// +kubebuilder:printcolumn:name="Namespace",type=string,JSONPath=`.spec.deploymentNamespace`
// +kubebuilder:printcolumn:name="Deployment",type=string,JSONPath=`.spec.deploymentName`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type AutoscalingStrategy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec names the autoscaler's Deployment and whether it must run.
	// +required
	Spec AutoscalingStrategySpec `json:"spec"`
	// status is the observed state of the Deployment.
	// +optional
	Status AutoscalingStrategyStatus `json:"status,omitzero"`
}

// AutoscalingStrategySpec names the autoscaler's Deployment and whether it must run.
type AutoscalingStrategySpec struct {
	// enabled is true if the autoscaler must run. The operator sets it to false
	// while nodes are replaced.
	// +optional
	Enabled bool `json:"enabled"`
	// deploymentName is the name of the autoscaler's Deployment.
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$')",message="deploymentName is not the name of a Deployment"
	DeploymentName string `json:"deploymentName"`
	// deploymentNamespace is the namespace of the Deployment.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z0-9]([a-z0-9-]*[a-z0-9])?$')",message="deploymentNamespace is not the name of a namespace"
	DeploymentNamespace string `json:"deploymentNamespace"`
	// autoscalerExtraArgs are passed to the autoscaler as --key=value, in addition to the
	// groups that it may scale.
	// +optional
	// +kubebuilder:validation:MaxProperties=64
	AutoscalerExtraArgs map[string]string `json:"autoscalerExtraArgs,omitempty"`
}

// AutoscalingStrategyStatus is the observed state of the Deployment.
type AutoscalingStrategyStatus struct {
	// observedGeneration is the generation of the spec that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// enabled is true if the Deployment requests at least one replica.
	// +optional
	Enabled bool `json:"enabled"`
	// replicas that the Deployment requests: 0 or 1.
	// +optional
	Replicas int32 `json:"replicas"`
	// conditions: Stalled is True if the Deployment does not exist or cannot be changed;
	// Reconciling is True while its pods are terminating.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// AutoscalingStrategyList is a list of AutoscalingStrategies.
//
// +kubebuilder:object:root=true
type AutoscalingStrategyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []AutoscalingStrategy `json:"items"`
}
