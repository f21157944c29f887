package preflight

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine/kubeadm"
	"constellation/engine/plan"
)

// podLevel is the level of Pod Security that new clusters enforce.
const podLevel = "baseline"

// refusals are the pods of a namespace that a level would refuse, as the API server lists them.
type refusals struct {
	namespace string
	pods      []string // "web-0: host namespaces"
	err       error
}

// podLevelRefuses returns the pods that the level of new clusters would refuse, in a cluster of ours that does
// not enforce it. The API server evaluates the pods of a namespace when a label of it is changed, also in a
// dry run.
func podLevelRefuses(w *world, p *probe) []plan.Finding {
	if !w.request.DryRun || !w.withoutPodLevel() {
		return nil
	}
	var asked []*refusals
	for _, pod := range w.pods {
		n := pod.namespace
		if slices.Contains(kubeadm.ExemptNamespaces(), n) || w.namespaces[n].Labels[psaLabel] != "" || slices.ContainsFunc(asked, func(r *refusals) bool { return r.namespace == n }) {
			continue
		}
		asked = append(asked, &refusals{namespace: n})
	}
	askLevels(p, asked)
	var pods, namespaces []string
	for _, r := range asked {
		if r.err != nil {
			return []plan.Finding{{
				Severity: plan.NotChecked, Title: "not checked which pods the level " + podLevel + " of Pod Security would refuse", Detail: object("Namespace", "", r.namespace) + ": " + reason(p.ctx, r.err),
				Remedy: "use a kubeconfig that may patch namespaces",
			}}
		}
		for _, text := range r.pods {
			pods = append(pods, r.namespace+"/"+text)
		}
		if len(r.pods) > 0 {
			namespaces = append(namespaces, object("Namespace", "", r.namespace))
		}
	}
	if len(pods) == 0 {
		return nil
	}
	return []plan.Finding{{
		Severity: plan.Info, Title: fmt.Sprintf("the level %s of Pod Security, which new clusters enforce, would refuse pods of %s", podLevel, count(len(namespaces), "namespace")),
		Detail: "this upgrade does not enforce it: " + enumerate(pods, 5), Objects: first(namespaces),
		Remedy: "give these namespaces the level privileged before you enforce " + podLevel + " in others: docs/security.md, \"Existing clusters\"", Command: "kubectl label namespace NAME " + psaLabel + "=privileged",
	}}
}

// withoutPodLevel reports whether init made the cluster, and its API servers have no default level.
func (w *world) withoutPodLevel() bool {
	flags := strings.Join(w.clusterConfiguration().APIServer.flags(), "\n")
	return strings.Contains(flags, "="+kubeadm.HardeningDir+"/") && !strings.Contains(flags, "="+kubeadm.AdmissionFile)
}

// askLevels fills in the pods of each namespace, a few at a time.
func askLevels(p *probe, asked []*refusals) {
	ctx, cancel := context.WithTimeout(p.ctx, accessLimit)
	defer cancel()
	turn := make(chan struct{}, 8)
	var asking sync.WaitGroup
	for _, r := range asked {
		asking.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			answer := p.core.CoreV1().RESTClient().Patch(types.MergePatchType).Resource("namespaces").Name(r.namespace).
				Param("dryRun", metav1.DryRunAll).Body([]byte(`{"metadata":{"labels":{"` + psaLabel + `":"` + podLevel + `"}}}`)).Do(ctx)
			if r.err = answer.Error(); r.err != nil {
				return
			}
			for _, text := range answer.Warnings() {
				if !strings.HasPrefix(text.Text, "existing pods in namespace") {
					r.pods = append(r.pods, text.Text)
				}
			}
		})
	}
	asking.Wait()
}
