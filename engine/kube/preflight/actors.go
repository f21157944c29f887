package preflight

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// actorKinds are what others who change nodes or workloads are told by. They are read
// where the cluster serves them.
var actorKinds = []schema.GroupResource{
	plans, applications, kustomizations, helmReleases, machineDeployments, nodePools,
}

var (
	plans              = schema.GroupResource{Group: "upgrade.cattle.io", Resource: "plans"}
	applications       = schema.GroupResource{Group: "argoproj.io", Resource: "applications"}
	kustomizations     = schema.GroupResource{Group: "kustomize.toolkit.fluxcd.io", Resource: "kustomizations"}
	helmReleases       = schema.GroupResource{Group: "helm.toolkit.fluxcd.io", Resource: "helmreleases"}
	machineDeployments = schema.GroupResource{Group: "cluster.x-k8s.io", Resource: "machinedeployments"}
	nodePools          = schema.GroupResource{Group: "karpenter.sh", Resource: "nodepools"}
)

// actor is what matters of an object of actorKinds.
type actor struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Suspend bool `json:"suspend"` // Flux
	} `json:"spec"`
	Status struct {
		Applying       []string                                         `json:"applying"`       // nodes of a Plan
		OperationState struct{ Phase string }                           `json:"operationState"` // Argo CD
		Replicas       int64                                            `json:"replicas"`
		UpToDate       *int64                                           `json:"upToDateReplicas"` // Cluster API, v1beta2
		Updated        *int64                                           `json:"updatedReplicas"`
		Conditions     []struct{ Type, Status, Reason, Message string } `json:"conditions"`
	} `json:"status"`
}
