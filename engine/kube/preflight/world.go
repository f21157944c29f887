// Package preflight looks at a live cluster for what an upgrade would trip over.
//
// It hides how much of a cluster must be read, and how little of it kept: [Run]
// collects what the checks need in pages, keeps slim copies (world), and runs every
// check over them at the same time. Checks are pure functions over the world, but for
// the few that ask the API server a question of their own (dry-run evictions, reviews
// of access, TLS handshakes); nothing is ever changed. What could not be read makes
// the checks that need it say so: never silence, never "ok".
//
// The package does not decide whether an upgrade goes on; package engine does.
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

	"constellation/engine"
)

// world is what the checks look at: one look at the cluster. Small kinds are kept
// whole but for their managed fields, pods and the metadata of everything else as
// slim copies. Checks only read it.
type world struct {
	now     time.Time
	request engine.PreflightRequest
	// unread says why a source could not be read: source ID to reason. Checks that need
	// it are NotChecked.
	unread map[source]string

	nodes  []corev1.Node // sorted by name
	leases map[string]time.Time
	pods   []pod // sorted by namespace and name

	quotas       []corev1.ResourceQuota // of systemNamespaces
	pdbs         []policyv1.PodDisruptionBudget
	namespaces   map[string]metav1.ObjectMeta
	terminating  []string // namespaces that are going, with why; sorted
	deployments  []appsv1.Deployment
	statefulSets []appsv1.StatefulSet
	daemonSets   []appsv1.DaemonSet
	replicaSets  map[types.UID]owner // who owns a ReplicaSet
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

	// servers are the API servers that answered, silent those that cannot be reached and
	// were not met behind the balancer either.
	servers []apiServer
	silent  []silentServer
	// writers are who wrote through APIs that the hop removes, the last first.
	writers map[schema.GroupVersionResource][]writer
	// configs is the data of kubeadm's ConfigMaps by name, leaders the leases of
	// kube-system, signings the requests for certificates that wait.
	configs  map[string]map[string]string
	leaders  map[string]coordinationv1.LeaseSpec
	signings []certificatesv1.CertificateSigningRequest
	// charts are Helm's releases; unreadableCharts "namespace/name" of those that do not
	// unpack.
	charts           []helmRelease
	unreadableCharts []string

	// lookups are what checks of workloads ask for; see world.made.
	lookups *lookups
}

// source is one thing that is read: "pods", "nodes", "metrics of 10.42.1.2".
type source string

// Sources that checks need, named as the API names its resources.
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
	sourceActors       source = "what else changes nodes"
	sourceKinds        source = "customresourcedefinitions"
	sourceAPIServices  source = "apiservices"
	sourceServers      source = "API servers"
	sourceMetrics      source = "metrics of the API servers"
	sourceWriters      source = "objects of removed APIs"
	sourceConfigs      source = "ConfigMaps of kubeadm"
	sourceLeaders      source = "leases of controllers"
	sourceSignings     source = "certificatesigningrequests"
	sourceCharts       source = "Helm's releases"
)

// kind is what matters of a CustomResourceDefinition: everything but its schemas.
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

// apiService is what matters of an APIService.
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

// owner is who an object belongs to.
type owner struct {
	apiVersion, kind, name string
	uid                    types.UID
}

// pod is what matters of a pod.
type pod struct {
	namespace, name, node string
	uid                   types.UID
	labels                map[string]string
	phase                 corev1.PodPhase
	ready                 bool
	terminating           time.Time // when its grace period ends; zero if it is not going
	finalizers            []string
	created               time.Time
	controller            owner // zero if nobody controls it; a ReplicaSet's owner is in world.replicaSets
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
	claims                []string // names of PersistentVolumeClaims, also of those made for an ephemeral volume
	hostPorts             []int32
	notEvict              string // the annotation that forbids eviction; empty if none does
	pending               string // why it is not scheduled
	images                []string
	args                  []string // command and args of the first container; of control plane pods alone
	component             string   // label component, of control plane pods alone
	keeper                string   // keeperOf its metadata; of pods without a controller alone
}

// resources are amounts: milli-CPU, bytes, and others by name.
type resources struct {
	cpu, memory, ephemeral int64
	other                  map[corev1.ResourceName]int64
}

func (p *pod) key() types.NamespacedName {
	return types.NamespacedName{Namespace: p.namespace, Name: p.name}
}

// check is one question. run returns what it found; no finding means that all is
// well, and is told as title. A finding's zero Severity is filled with Warn, its ID,
// Source and Reference with the check's.
type check struct {
	id    string // kebab-case and stable
	title string // what is true if nothing is found: "every API server is one minor apart at most"
	area  string // Finding.Source: versions, apis, webhooks, disruption, capacity, nodes, etcd, certificates, health, access
	ref   string // where the rule comes from
	needs []source
	run   func(*world, *probe) []engine.Finding
}

// probe asks the API server what a copy of its objects cannot tell.
type probe struct {
	ctx    context.Context
	config *rest.Config
	core   kubernetes.Interface
	// limit bounds what one check asks for as a dry run, all together; zero means 12 s.
	limit time.Duration
	// progress tells how far a long check has come.
	progress func(current, total int64)
}
