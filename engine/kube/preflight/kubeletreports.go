package preflight

import (
	"context"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Kubelet is what a kubelet reports about itself.
type Kubelet struct {
	// Config is its configuration, which includes what its command line and drop-in files change. It is
	// nil if the kubelet could not be read: Why says why, and Denied whether a right is missing.
	Config map[string]any
	Why    string
	Denied bool
	// Flags are all flags; nil if the kubelet does not report them.
	Flags map[string]string
}

// Kubelets reads what the kubelets of nodes report, by node. It reads many at a time, through the API
// server or with the user's client certificate, and takes [kubeletsLimit] at most.
func Kubelets(ctx context.Context, config *rest.Config, core kubernetes.Interface, nodes []corev1.Node) map[string]Kubelet {
	w := &world{nodes: nodes, kubelets: &kubelets{}}
	out := make(map[string]Kubelet, len(nodes))
	for name, r := range w.reports(&probe{ctx: ctx, config: config, core: core}) {
		out[name] = Kubelet{Config: r.config, Why: r.configError, Denied: strings.HasPrefix(r.configError, "forbidden"), Flags: r.flags}
	}
	return out
}
