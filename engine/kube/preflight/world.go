// Package preflight checks a live cluster for problems that would make an upgrade fail.
//
// [Run] lists what the checks need in pages, keeps slim copies of it (world), and runs
// all checks on them concurrently. Checks are pure functions of the world, except for a
// few that send requests of their own: dry-run evictions, access reviews and TLS
// handshakes. No check changes the cluster. If a source could not be read, the checks
// that need it report "not checked", never "ok".
//
// Package engine decides whether an upgrade continues.
package preflight

import (
	"context"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"constellation/engine/check"
	"constellation/engine/plan"
)

// world is the observed state of the cluster on which the checks run. Objects of small
// kinds are complete except for managed fields; pods and the metadata of all other kinds
// are slim copies. Checks must not modify it.
type world struct {
	now     time.Time
	request check.PreflightRequest
	// unread maps the ID of a source that could not be read to the reason. Checks that need
	// it are NotChecked.
	unread map[source]string

	nodes  []corev1.Node // sorted by name
	leases map[string]time.Time
	pods   []pod // sorted by namespace and name

	quotas       []corev1.ResourceQuota // of systemNamespaces
	pdbs         []policyv1.PodDisruptionBudget
	namespaces   map[string]metav1.ObjectMeta
	terminating  []string // namespaces being deleted, with the reason; sorted
	deployments  []appsv1.Deployment
	statefulSets []appsv1.StatefulSet
	daemonSets   []appsv1.DaemonSet
	replicaSets  map[types.UID]owner // owner of each ReplicaSet
	services     map[types.NamespacedName]corev1.Service
	slices       []discoveryv1.EndpointSlice
	validating   []admissionv1.ValidatingWebhookConfiguration
	mutating     []admissionv1.MutatingWebhookConfiguration
	volumes      map[string]corev1.PersistentVolume // by name
	claims       map[types.NamespacedName]corev1.PersistentVolumeClaim
	attachments  []storagev1.VolumeAttachment
	csiNodes     []storagev1.CSINode
	jobs         []batchv1.Job
	autoscalers  []autoscalingv2.HorizontalPodAutoscaler
	actors       map[schema.GroupResource][]actor // of actorKinds; a kind that is not served has none
	// kinds are the CustomResourceDefinitions, apiServices the registered APIs; sorted
	// by name.
	kinds       []kind
	apiServices []apiService

	// servers are the API servers that responded. silent are those that were reached neither
	// directly nor through the load balancer.
	servers []apiServer
	silent  []silentServer
	// writers are the clients that wrote through APIs that the hop removes, latest first.
	writers map[schema.GroupVersionResource][]writer
	// configs is the data of kubeadm's ConfigMaps by name, leaders the leases of
	// kube-system, signings the pending certificate signing requests.
	configs  map[string]map[string]string
	leaders  map[string]coordinationv1.LeaseSpec
	signings []certificatesv1.CertificateSigningRequest
	// charts are Helm's releases; unreadableCharts "namespace/name" of those that do not
	// unpack.
	charts           []helmRelease
	unreadableCharts []string

	// served are the versions of APIs that the API servers serve.
	served []schema.GroupVersion
	// grants, actionObjects and labelDrivers are what the actions that the hop requires look for.
	grants        map[string][]grant
	actionObjects map[actionKey][]string
	labelDrivers  map[string]bool
	// kubelets are read by the first check that needs them.
	kubelets *kubelets

	// lookups are indexes for the checks of workloads; see world.made.
	lookups *lookups
}

// source names one source of data: "pods", "nodes", "metrics of 10.42.1.2".
type source string

// Sources that checks need, named like the resources of the API.
const (
	sourceNodes        source = "nodes"
	sourceLeases       source = "leases of nodes"
	sourcePods         source = "pods"
	sourcePDBs         source = "poddisruptionbudgets"
	sourceNamespaces   source = "namespaces"
	sourceQuotas       source = "resourcequotas"
	sourceDeployments  source = "deployments"
	sourceStatefulSets source = "statefulsets"
	sourceDaemonSets   source = "daemonsets"
	sourceReplicaSets  source = "replicasets"
	sourceServices     source = "services"
	sourceSlices       source = "endpointslices"
	sourceValidating   source = "validatingwebhookconfigurations"
	sourceMutating     source = "mutatingwebhookconfigurations"
	sourceVolumes      source = "persistentvolumes"
	sourceClaims       source = "persistentvolumeclaims"
	sourceAttachments  source = "volumeattachments"
	sourceCSINodes     source = "csinodes"
	sourceJobs         source = "jobs"
	sourceAutoscalers  source = "horizontalpodautoscalers"
	sourceActors       source = "controllers that change nodes"
	sourceKinds        source = "customresourcedefinitions"
	sourceAPIServices  source = "apiservices"
	sourceServers      source = "API servers"
	sourceMetrics      source = "metrics of the API servers"
	sourceWriters      source = "objects of removed APIs"
	sourceConfigs      source = "ConfigMaps of kubeadm"
	sourceLeaders      source = "leases of controllers"
	sourceSignings     source = "certificatesigningrequests"
	sourceCharts       source = "Helm's releases"
	sourceActions      source = "what the changelog requires an action for"
)

// kind is the slim copy of a CustomResourceDefinition, without its schemas.
type kind struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Group    string                                        `json:"group"`
		Names    apiextensionsv1.CustomResourceDefinitionNames `json:"names"`
		Scope    apiextensionsv1.ResourceScope                 `json:"scope"`
		Versions []kindVersion                                 `json:"versions"`
		Convert  *apiextensionsv1.CustomResourceConversion     `json:"conversion"`
	} `json:"spec"`
	Status apiextensionsv1.CustomResourceDefinitionStatus `json:"status"`
}

// kindVersion is one version of a kind.
type kindVersion struct {
	Name       string `json:"name"`
	Served     bool   `json:"served"`
	Storage    bool   `json:"storage"`
	Deprecated bool   `json:"deprecated"`
}

// apiService is the slim copy of an APIService.
type apiService struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		// Service is nil if the API server itself serves the API.
		Service *struct {
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
			Port      *int32 `json:"port"`
		} `json:"service"`
		Group    string `json:"group"`
		Version  string `json:"version"`
		CABundle []byte `json:"caBundle"`
	} `json:"spec"`
	Status struct {
		Conditions []metav1.Condition `json:"conditions"`
	} `json:"status"`
}

// owner is the controller of an object.
type owner struct {
	apiVersion, kind, name string
	uid                    types.UID
}

// pod is the slim copy of a pod.
type pod struct {
	namespace, name, node string
	uid                   types.UID
	labels                map[string]string
	phase                 corev1.PodPhase
	ready                 bool
	terminating           time.Time // when its grace period ends; zero if it is not being deleted
	finalizers            []string
	created               time.Time
	controller            owner // zero without a controller; a ReplicaSet's owner is in world.replicaSets
	mirror                bool  // a static pod
	priority              int32
	grace                 time.Duration
	preStop               bool
	request               resources
	nodeSelector          map[string]string
	affinity              *corev1.Affinity
	tolerations           []corev1.Toleration
	spread                []corev1.TopologySpreadConstraint
	emptyDir, hostPath    []string // volumes with local data: "cache", "cache (Memory, 1Gi)"; "data (/var/lib/data)", those that are writable
	gitRepo               []string // volumes that are Git repositories
	claims                []string // names of PersistentVolumeClaims, also of those made for an ephemeral volume
	hostPorts             []int32
	notEvict              string // the annotation that forbids eviction; empty if none does
	pending               string // reason why it is not scheduled
	images                []string
	hostPaths             []string // paths of the machine; of control plane pods alone
	args                  []string // command and args of the first container; of control plane pods alone
	seLinux               string   // seLinuxLabel
	component             string   // label component, of control plane pods alone
	keeper                string   // keeperOf its metadata; of pods without a controller alone
}

// resources are quantities: milli-CPU, bytes, and extended resources by name.
type resources struct {
	cpu, memory, ephemeral int64
	other                  map[corev1.ResourceName]int64
}

func (p *pod) key() types.NamespacedName {
	return types.NamespacedName{Namespace: p.namespace, Name: p.name}
}

// check is one preflight check. run returns its findings. A check without findings passed
// and is reported with its title. A finding's zero Severity means Warn; its zero ID, Source
// and Reference are set to those of the check.
type checkItem struct {
	id    string // kebab-case and stable
	title string // true statement if the check passes: "every API server is one minor apart at most"
	area  string // Finding.Source: versions, apis, webhooks, disruption, capacity, nodes, etcd, certificates, health, access
	ref   string // source of the rule
	needs []source
	run   func(*world, *probe) []plan.Finding
	// byData is whether the check compares the cluster with the data of minors. Its result is
	// then not complete for minors without data. derived describes what it finds nevertheless.
	byData  bool
	derived func(*world) string
}

// probe sends requests whose answers are not in the objects of the cluster.
type probe struct {
	ctx    context.Context
	config *rest.Config
	core   kubernetes.Interface
	// limit bounds the total time of one check's dry runs; zero means 12 s.
	limit time.Duration
	// progress reports how far a long check is.
	progress func(current, total int64)
}
