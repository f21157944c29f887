package preflight

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"constellation/engine/check"
	"constellation/engine/cluster"
)

// LocalData lists data on the disks of nodes that no backup contains. Unlike Run, it reads
// only the needed sources and includes every node.
func LocalData(ctx context.Context, config *rest.Config) (cluster.LocalData, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = 500, 1000
	config.WarningHandler = rest.NoWarnings{}
	core, err := kubernetes.NewForConfig(protobuf(config))
	if err != nil {
		return cluster.LocalData{}, fmt.Errorf("make Kubernetes client: %w", err)
	}
	meta, err := metadata.NewForConfig(config)
	if err != nil {
		return cluster.LocalData{}, fmt.Errorf("make Kubernetes client: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, sourceLimit)
	defer cancel()
	w := &world{request: check.PreflightRequest{ReplaceControlPlanes: true, ReplaceWorkers: true}}
	r := &reader{config: config, core: core, meta: meta, w: w}
	var mu sync.Mutex // of failed
	var failed error
	var reading sync.WaitGroup
	sources := r.sources()
	for _, what := range []source{sourceNodes, sourcePods, sourceReplicaSets, sourceVolumes, sourceClaims} {
		read := sources[what]
		reading.Go(func() {
			if err := read(ctx); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed = cmp.Or(failed, fmt.Errorf("read %s: %w", what, err))
			}
		})
	}
	reading.Wait()
	if failed != nil {
		return cluster.LocalData{}, failed
	}
	return w.localData(), nil
}

// localData finds volumes bound to a claim, whether or not a pod uses it.
func (w *world) localData() cluster.LocalData {
	var out cluster.LocalData
	users := map[types.NamespacedName][]*pod{}
	for i := range w.pods {
		p := &w.pods[i]
		if p.over() || p.ours() || p.mirror {
			continue
		}
		for _, c := range p.claims {
			key := types.NamespacedName{Namespace: p.namespace, Name: c}
			users[key] = append(users[key], p)
		}
		if p.namespace == metav1.NamespaceSystem {
			continue
		}
		if len(p.emptyDir) > 0 {
			out.EmptyDirs++
		}
		if len(p.hostPath) > 0 {
			out.HostPaths++
		}
	}
	for key, claim := range w.claims {
		pv, ok := w.volumes[claim.Spec.VolumeName]
		if !ok {
			continue
		}
		v := cluster.LocalVolume{Namespace: printable(key.Namespace), Claim: printable(key.Name), Volume: printable(pv.Name)}
		for i := range w.nodes {
			if pinned(&pv, &w.nodes[i]) {
				v.Nodes = append(v.Nodes, w.nodes[i].Name)
			}
		}
		switch {
		case pv.Spec.Local != nil:
			v.Path = printable(pv.Spec.Local.Path)
		case pv.Spec.HostPath != nil:
			v.Path = printable(pv.Spec.HostPath.Path)
		case len(v.Nodes) == 0:
			continue
		}
		for _, p := range users[key] {
			o := w.workload(p)
			v.Workloads = append(v.Workloads, object(o.kind, key.Namespace, o.name))
			// Without node affinity the data is on the pod's node.
			if pv.Spec.NodeAffinity == nil && p.node != "" {
				v.Nodes = append(v.Nodes, p.node)
			}
		}
		slices.Sort(v.Workloads)
		slices.Sort(v.Nodes)
		v.Workloads, v.Nodes = slices.Compact(v.Workloads), slices.Compact(v.Nodes)
		if size, ok := pv.Spec.Capacity[corev1.ResourceStorage]; ok {
			v.Bytes = size.Value()
		}
		out.Volumes = append(out.Volumes, v)
	}
	slices.SortFunc(out.Volumes, func(a, b cluster.LocalVolume) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Claim, b.Claim))
	})
	return out
}
