package preflight

import (
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// actorKinds are what others who change nodes or workloads are told by. They are read
// where the cluster serves them.
var actorKinds = []schema.GroupResource{
	{Group: "upgrade.cattle.io", Resource: "plans"},
	{Group: "argoproj.io", Resource: "applications"},
	{Group: "kustomize.toolkit.fluxcd.io", Resource: "kustomizations"},
	{Group: "helm.toolkit.fluxcd.io", Resource: "helmreleases"},
	{Group: "cluster.x-k8s.io", Resource: "machinedeployments"},
	{Group: "cluster.x-k8s.io", Resource: "machines"},
	{Group: "karpenter.sh", Resource: "nodepools"},
	{Group: "karpenter.sh", Resource: "nodeclaims"},
}
