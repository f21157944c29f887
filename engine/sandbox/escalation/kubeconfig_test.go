package escalation_test

import (
	"os"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"constellation/engine/kubeadm"
	"constellation/engine/sandbox/escalation"
)

// TestClusterOfKubeconfig makes all attempts on the cluster of an administrator's kubeconfig.
// CONSTELLATION_ESCALATION_KUBECONFIG is its path.
func TestClusterOfKubeconfig(t *testing.T) {
	path := os.Getenv("CONSTELLATION_ESCALATION_KUBECONFIG")
	if path == "" {
		t.Skip("CONSTELLATION_ESCALATION_KUBECONFIG names no kubeconfig")
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		t.Fatal(err)
	}
	c := escalation.Cluster{Admin: cfg, TokenGroup: kubeadm.JoinGroup}
	nodes, err := kubernetes.NewForConfigOrDie(cfg).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.Items {
		if _, ok := n.Labels["node-role.kubernetes.io/control-plane"]; ok {
			c.ControlPlane = n.Name
		} else {
			c.Worker = n.Name
		}
	}
	found, tried, err := escalation.Run(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range found {
		t.Error(f)
	}
	t.Logf("%d attempts", tried)
}
