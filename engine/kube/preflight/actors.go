package preflight

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine/plan"
)

// actorKinds are the kinds of other controllers that change nodes or workloads. They are
// read if the cluster serves them.
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

// actor is the slim copy of an object of actorKinds.
type actor struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              actorSpec   `json:"spec"`
	Status            actorStatus `json:"status"`
}

type actorSpec struct {
	Suspend       bool `json:"suspend"` // of Flux
	Constellation struct {
		Alone bool `json:"alone"`
	} `json:"constellation"` // of a Plan
}

type actorStatus struct {
	Applying       []string         `json:"applying"`       // nodes of a Plan
	Constellation  planStatus       `json:"constellation"`  // of a Plan that our controller carries out
	OperationState operationState   `json:"operationState"` // of an Argo CD application
	Replicas       int64            `json:"replicas"`
	UpToDate       *int64           `json:"upToDateReplicas"` // of Cluster API, since v1beta2
	Updated        *int64           `json:"updatedReplicas"`  // and before
	Conditions     []actorCondition `json:"conditions"`
}

// planStatus is our controller's report on the nodes of a Plan that are upgraded or failed.
type planStatus struct {
	Nodes []struct {
		Name    string `json:"name"`
		Message string `json:"message"`
	} `json:"nodes"`
}

// tell summarizes the progress of the first few nodes; empty without a report.
func (p *planStatus) tell() string {
	var all []string
	for _, n := range p.Nodes[:min(3, len(p.Nodes))] {
		all = append(all, printable(n.Name+": "+n.Message))
	}
	if n := len(p.Nodes) - len(all); n > 0 {
		all = append(all, fmt.Sprintf("%d more", n))
	}
	return strings.Join(all, "; ")
}

type operationState struct {
	Phase string `json:"phase"`
}

type actorCondition struct {
	Type    string `json:"type"`
	Status  string `json:"status"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

const (
	rolloutPage    = "https://kubernetes.io/docs/concepts/workloads/controllers/deployment/"
	jobPage        = "https://kubernetes.io/docs/concepts/workloads/controllers/job/"
	autoscalerPage = "https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/"
)

var actorChecks = []checkItem{
	{
		id: "node-actors", area: "actors", ref: "https://kubernetes.io/docs/concepts/cluster-administration/node-autoscaling/", run: nodeActors,
		title: "no other controller replaces or reboots nodes",
		needs: []source{sourceActors, sourceDaemonSets, sourceDeployments},
	},
	{
		id: "gitops-sync", area: "actors", ref: "https://argo-cd.readthedocs.io/en/stable/user-guide/sync-options/", run: syncs,
		title: "no Argo CD application or Flux object is syncing",
		needs: []source{sourceActors},
	},
	{
		id: "rollouts", area: "actors", ref: rolloutPage, run: rollouts,
		title: "no workload is in the middle of a rollout",
		needs: []source{sourceDeployments, sourceStatefulSets, sourceDaemonSets},
	},
	{
		id: "long-jobs", area: "actors", ref: jobPage, run: longJobs,
		title: "no evicted job has been running for long",
		needs: workloadSources,
	},
	{
		id: "autoscaler-limits", area: "actors", ref: autoscalerPage, run: autoscalerLimits,
		title: "every autoscaled workload is below its maximum",
		needs: []source{sourceAutoscalers},
	},
}

// kuredLock is the annotation with which kured serializes reboots.
const kuredLock = "weave.works/kured-node-lock"

// autoscalerName is the Deployment of our autoscaler. The AutoscalingStrategy names it,
// and the operator pauses it.
const autoscalerName = "constellation-cluster-autoscaler"

// failedPlan reports a Plan that failed on a node, by the condition that both controllers
// of Plans set.
func failedPlan(a *actor) (plan.Finding, bool) {
	for _, c := range a.Status.Conditions {
		if c.Type == "Complete" && c.Status == "False" && c.Reason == "JobFailed" {
			detail := ""
			if len(a.Status.Constellation.Nodes) > 1 { // the title names a single one
				detail = a.Status.Constellation.tell()
			}
			return plan.Finding{
				Title: fmt.Sprintf("Plan %s has failed: %s", printable(a.Namespace+"/"+a.Name), printable(c.Message)), Detail: detail,
				Owner: keeperOf(&a.ObjectMeta), Objects: []string{object("plan", a.Namespace, a.Name)},
				Remedy:  "read the logs of its jobs and look for a node that it left cordoned; then correct or delete the Plan",
				Command: command(`kubectl -n %s get jobs,pods -l upgrade.cattle.io/plan=%s`, a.Namespace, a.Name),
			}, true
		}
	}
	return plan.Finding{}, false
}

// nodeActors reports other controllers that drain, reboot or remove nodes.
func nodeActors(w *world, _ *probe) []plan.Finding {
	var found []plan.Finding
	for i := range w.actors[plans] {
		a := &w.actors[plans][i]
		// A failed node stays in the list of nodes that the Plan is applied to.
		if f, ok := failedPlan(a); ok {
			found = append(found, f)
			continue
		}
		// Only our controller lists nodes, and a Plan with alone takes turns with the operator.
		takesTurns := a.Spec.Constellation.Alone && len(a.Status.Constellation.Nodes) > 0
		if len(a.Status.Applying) == 0 || takesTurns {
			continue
		}
		found = append(found, plan.Finding{
			Title:  fmt.Sprintf("Plan %s is being applied to %s", printable(a.Namespace+"/"+a.Name), enumerate(a.Status.Applying, 3)),
			Detail: a.Status.Constellation.tell(),
			Owner:  keeperOf(&a.ObjectMeta), Objects: []string{object("plan", a.Namespace, a.Name)},
			Remedy:  "wait until it completes; the command stops it from starting further nodes",
			Command: command(`kubectl -n %s patch plans.upgrade.cattle.io %s --type=merge -p '{"spec":{"concurrency":0}}'`, a.Namespace, a.Name),
		})
	}
	for i := range w.daemonSets {
		if f, ok := kured(&w.daemonSets[i]); ok {
			found = append(found, f)
		}
	}
	for i := range w.deployments {
		d := &w.deployments[i]
		if d.Name == autoscalerName || replicas(d.Spec.Replicas) == 0 || !runs(d, "cluster-autoscaler") {
			continue
		}
		found = append(found, plan.Finding{
			Title: "a cluster-autoscaler that we do not manage can remove nodes during the rollout: " + printable(d.Namespace+"/"+d.Name),
			Owner: keeperOf(&d.ObjectMeta), Objects: []string{object("deployment", d.Namespace, d.Name)},
			Remedy:  "scale it to zero during the rollout, and restore it afterwards",
			Command: command("kubectl -n %s scale deployment/%s --replicas=0", d.Namespace, d.Name),
		})
	}
	for i := range w.actors[nodePools] {
		a := &w.actors[nodePools][i]
		found = append(found, plan.Finding{
			Title: "Karpenter can remove nodes of NodePool " + printable(a.Name) + " during the rollout",
			Owner: keeperOf(&a.ObjectMeta), Objects: []string{object("nodepool", "", a.Name)},
			Remedy:  "set its disruption budget to 0 nodes, and restore it afterwards",
			Command: command(`kubectl patch nodepools.karpenter.sh %s --type=merge -p '{"spec":{"disruption":{"budgets":[{"nodes":"0"}]}}}'`, a.Name),
		})
	}
	for i := range w.actors[machineDeployments] {
		a := &w.actors[machineDeployments][i]
		updated := cmp.Or(a.Status.UpToDate, a.Status.Updated)
		if updated == nil || *updated >= a.Status.Replicas {
			continue
		}
		found = append(found, plan.Finding{
			Title: fmt.Sprintf("Cluster API is replacing machines of MachineDeployment %s: %d of %d are new", printable(a.Namespace+"/"+a.Name), *updated, a.Status.Replicas),
			Owner: keeperOf(&a.ObjectMeta), Objects: []string{object("machinedeployment", a.Namespace, a.Name)},
			Remedy:  "wait until it completes, or pause it",
			Command: command(`kubectl -n %s patch machinedeployments.cluster.x-k8s.io %s --type=merge -p '{"spec":{"paused":true}}'`, a.Namespace, a.Name),
		})
	}
	for _, f := range NodeActors(w.addOnUses()) {
		known := slices.ContainsFunc(found, func(g plan.Finding) bool {
			return slices.ContainsFunc(f.Objects, func(o string) bool { return slices.Contains(g.Objects, o) })
		})
		if !known && (len(w.actors[nodePools]) == 0 || !strings.HasPrefix(f.Title, "Karpenter ")) {
			found = append(found, f)
		}
	}
	return fold(found, "other controllers that replace or reboot nodes")
}

// kured reports the holder of kured's lock: that node is about to reboot, or has rebooted.
func kured(d *appsv1.DaemonSet) (plan.Finding, bool) {
	value, ok := d.Annotations[kuredLock]
	if !ok {
		return plan.Finding{}, false
	}
	var lock struct {
		Node string `json:"nodeID"`
		// Locks is set if kured allows several nodes to reboot at a time.
		Locks []struct {
			Node string `json:"nodeID"`
		} `json:"locks"`
	}
	detail := "annotation " + kuredLock
	if err := json.Unmarshal([]byte(value), &lock); err != nil {
		detail += ": " + printable(value)
	}
	var nodes []string
	if lock.Node != "" {
		nodes = append(nodes, lock.Node)
	}
	for _, l := range lock.Locks {
		nodes = append(nodes, l.Node)
	}
	who := "somebody"
	if len(nodes) > 0 {
		who = enumerate(nodes, 3)
	}
	f := plan.Finding{
		Title: fmt.Sprintf("%s holds kured's lock: a node may be rebooting", who), Detail: detail,
		Owner: keeperOf(&d.ObjectMeta), Objects: []string{object("daemonset", d.Namespace, d.Name)},
		Remedy:  "wait until the lock is released; the command breaks it",
		Command: command("kubectl -n %s annotate daemonset %s "+kuredLock+"-", d.Namespace, d.Name),
	}
	for _, n := range nodes {
		f.Objects = append(f.Objects, object("node", "", n))
	}
	return f, true
}

// runs reports whether a container of d has an image of that name.
func runs(d *appsv1.Deployment, image string) bool {
	return slices.ContainsFunc(d.Spec.Template.Spec.Containers, func(c corev1.Container) bool {
		name := c.Image[strings.LastIndex(c.Image, "/")+1:]
		return name == image || strings.HasPrefix(name, image+":") || strings.HasPrefix(name, image+"@")
	})
}

// syncs reports the objects that Argo CD and Flux are syncing.
func syncs(w *world, _ *probe) []plan.Finding {
	var found []plan.Finding
	for i := range w.actors[applications] {
		a := &w.actors[applications][i]
		if a.Status.OperationState.Phase != "Running" {
			continue
		}
		found = append(found, plan.Finding{
			Title: "Argo CD is syncing application " + printable(a.Namespace+"/"+a.Name),
			Owner: keeperOf(&a.ObjectMeta), Objects: []string{object("application", a.Namespace, a.Name)}, Remedy: "wait until it completes",
			Command: command("kubectl -n %s wait --for=jsonpath='{.status.operationState.phase}'=Succeeded applications.argoproj.io/%s --timeout=10m", a.Namespace, a.Name),
		})
	}
	for _, k := range []schema.GroupResource{kustomizations, helmReleases} {
		for i := range w.actors[k] {
			a := &w.actors[k][i]
			progressing := slices.ContainsFunc(a.Status.Conditions, func(c actorCondition) bool {
				return c.Type == "Reconciling" && c.Status == "True" || c.Type == "Ready" && c.Status == "Unknown"
			})
			if a.Spec.Suspend || !progressing {
				continue
			}
			found = append(found, plan.Finding{
				Title: fmt.Sprintf("Flux is reconciling %s %s", strings.TrimSuffix(k.Resource, "s"), printable(a.Namespace+"/"+a.Name)),
				Owner: keeperOf(&a.ObjectMeta), Objects: []string{object(strings.TrimSuffix(k.Resource, "s"), a.Namespace, a.Name)}, Remedy: "wait until it completes",
				Command: command("kubectl -n %s wait --for=condition=Ready %s/%s --timeout=10m", a.Namespace, k.String(), a.Name),
			})
		}
	}
	return fold(found, "objects that are syncing")
}

// rollouts reports workloads whose rollout is incomplete. The rules are those of
// `kubectl rollout status`.
func rollouts(w *world, _ *probe) []plan.Finding {
	var found []plan.Finding
	add := func(kind string, m *metav1.ObjectMeta, why string) {
		if why == "" {
			return
		}
		found = append(found, plan.Finding{
			Title: fmt.Sprintf("%s %s is in the middle of a rollout: %s", kind, printable(m.Namespace+"/"+m.Name), why),
			Owner: keeperOf(m), Objects: []string{object(kind, m.Namespace, m.Name)}, Remedy: "wait until it completes, or repair it",
			Command: command("kubectl -n %s rollout status %s/%s --timeout=10m", m.Namespace, strings.ToLower(kind), m.Name),
		})
	}
	for i := range w.deployments {
		add("Deployment", &w.deployments[i].ObjectMeta, deploymentRollout(&w.deployments[i]))
	}
	for i := range w.statefulSets {
		add("StatefulSet", &w.statefulSets[i].ObjectMeta, statefulSetRollout(&w.statefulSets[i]))
	}
	for i := range w.daemonSets {
		add("DaemonSet", &w.daemonSets[i].ObjectMeta, daemonSetRollout(&w.daemonSets[i]))
	}
	return fold(found, "workloads in the middle of a rollout")
}

const unseen = "its controller has not observed the latest generation"

func deploymentRollout(d *appsv1.Deployment) string {
	s, want := &d.Status, replicas(d.Spec.Replicas)
	for _, c := range s.Conditions {
		if c.Type == appsv1.DeploymentProgressing && c.Reason == "ProgressDeadlineExceeded" {
			return "no progress for " + plainDuration(time.Duration(progressDeadline(d))*time.Second)
		}
	}
	switch {
	case s.ObservedGeneration < d.Generation:
		return unseen
	case d.Spec.Paused && s.UpdatedReplicas < want:
		return fmt.Sprintf("paused with %d of %d pods updated", s.UpdatedReplicas, want)
	case s.UpdatedReplicas < want:
		return fmt.Sprintf("%d of %d pods are updated", s.UpdatedReplicas, want)
	case s.Replicas > s.UpdatedReplicas:
		return fmt.Sprintf("%d old pods remain", s.Replicas-s.UpdatedReplicas)
	case s.AvailableReplicas < s.UpdatedReplicas:
		return fmt.Sprintf("%d of %d pods are available", s.AvailableReplicas, s.UpdatedReplicas)
	}
	return ""
}

func progressDeadline(d *appsv1.Deployment) int32 {
	if s := d.Spec.ProgressDeadlineSeconds; s != nil {
		return *s
	}
	return 600
}

func statefulSetRollout(d *appsv1.StatefulSet) string {
	s, want := &d.Status, replicas(d.Spec.Replicas)
	if s.ObservedGeneration < d.Generation {
		return unseen
	}
	if s.ReadyReplicas < want {
		return fmt.Sprintf("%d of %d pods are ready", s.ReadyReplicas, want)
	}
	if d.Spec.UpdateStrategy.Type == appsv1.OnDeleteStatefulSetStrategyType || s.UpdateRevision == s.CurrentRevision {
		return ""
	}
	kept := int32(0)
	if r := d.Spec.UpdateStrategy.RollingUpdate; r != nil && r.Partition != nil {
		kept = *r.Partition
	}
	if s.UpdatedReplicas < want-kept {
		return fmt.Sprintf("%d of %d pods are updated", s.UpdatedReplicas, want-kept)
	}
	return ""
}

func daemonSetRollout(d *appsv1.DaemonSet) string {
	s := &d.Status
	switch {
	case s.ObservedGeneration < d.Generation:
		return unseen
	case d.Spec.UpdateStrategy.Type != appsv1.OnDeleteDaemonSetStrategyType && s.UpdatedNumberScheduled < s.DesiredNumberScheduled:
		return fmt.Sprintf("%d of %d pods are updated", s.UpdatedNumberScheduled, s.DesiredNumberScheduled)
	case s.NumberAvailable < s.DesiredNumberScheduled:
		return fmt.Sprintf("%d of %d pods are available", s.NumberAvailable, s.DesiredNumberScheduled)
	}
	return ""
}

// longTime is the running time from which the restart of a job is reported.
const longTime = 10 * time.Minute

// longJobs reports jobs that lose their progress.
func longJobs(w *world, _ *probe) []plan.Finding {
	running := map[types.UID]*batchv1.Job{}
	for i := range w.jobs {
		j := &w.jobs[i]
		if j.Status.Active > 0 && j.Status.StartTime != nil && w.now.Sub(j.Status.StartTime.Time) > longTime {
			running[j.UID] = j
		}
	}
	var moving []*pod
	for _, p := range w.lookup().moving {
		if running[p.controller.uid] != nil && p.controller.kind == "Job" && p.terminating.IsZero() {
			moving = append(moving, p)
		}
	}
	var found []plan.Finding
	for _, t := range w.teams(moving) {
		j := running[t.uid]
		found = append(found, plan.Finding{
			Title:  fmt.Sprintf("job %s has been running for %s, and its pods will restart on other nodes", printable(t.namespace+"/"+t.name), plainDuration(w.now.Sub(j.Status.StartTime.Time))),
			Detail: placesOf(t.pods), Owner: keeperOf(&j.ObjectMeta), Objects: t.objects(t.pods),
			Remedy:  "wait until it completes, unless it resumes from a checkpoint",
			Command: command("kubectl -n %s wait --for=condition=complete job/%s --timeout=1h", t.namespace, t.name),
		})
	}
	return fold(found, "jobs that will restart")
}

// autoscalerLimits reports workloads whose autoscaler is at its maximum: they cannot
// compensate for an evicted pod.
func autoscalerLimits(w *world, _ *probe) []plan.Finding {
	var found []plan.Finding
	for i := range w.autoscalers {
		a := &w.autoscalers[i]
		s := &a.Status
		if a.Spec.MaxReplicas == replicas(a.Spec.MinReplicas) || s.DesiredReplicas < a.Spec.MaxReplicas || s.CurrentReplicas < a.Spec.MaxReplicas {
			continue
		}
		found = append(found, plan.Finding{
			Title: fmt.Sprintf("%s %s is at the limit of its autoscaler: %s", printable(a.Spec.ScaleTargetRef.Kind), printable(a.Namespace+"/"+a.Spec.ScaleTargetRef.Name), count(int(a.Spec.MaxReplicas), "pod")),
			Owner: keeperOf(&a.ObjectMeta),
			Objects: []string{
				object("horizontalpodautoscaler", a.Namespace, a.Name), object(a.Spec.ScaleTargetRef.Kind, a.Namespace, a.Spec.ScaleTargetRef.Name),
			},
			Remedy:  "raise maxReplicas by one during the rollout",
			Command: command(`kubectl -n %s patch horizontalpodautoscaler %s --type=merge -p '{"spec":{"maxReplicas":%d}}'`, a.Namespace, a.Name, a.Spec.MaxReplicas+1),
		})
	}
	return fold(found, "workloads at the limit of their autoscaler")
}
