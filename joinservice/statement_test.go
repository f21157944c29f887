package joinservice

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/operator/api/v1alpha1"
)

// statements has the service pass on a statement that was published after the list, as an
// upgrade of a cluster does whose ConfigMap has none, and go on without the API server.
func statements(t *testing.T, s *site, r *replica) {
	list := component.List{{Name: "kubeadm", URL: "http://mirror/late", Digest: workerList[0].Digest, Path: workerList[0].Path}}
	s.publish(list)
	maps := s.admin.CoreV1().ConfigMaps("kube-system")
	annotate := func(patch string) {
		t.Helper()
		if _, err := maps.Patch(t.Context(), reference(list), types.MergePatchType, []byte(`{"metadata":{"annotations":`+patch+`}}`), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	annotate("null")
	s.joinComponents(reference(controlPlaneList), reference(list))
	defer s.joinComponents(reference(controlPlaneList), reference(workerList))
	expect := func(statement string) {
		t.Helper()
		eventually(t, "the statement "+statement, func() (string, bool) {
			c, err := r.kube.components(t.Context(), cloud.Worker)
			return c.name + " " + c.statement, err == nil && c.name == reference(list) && c.statement == statement
		})
	}
	expect("")
	annotate(`{"` + v1alpha1.AnnotationStatement + `":"late"}`)
	c, err := r.kube.components(t.Context(), cloud.Worker)
	if err != nil || c.statement != "" {
		t.Errorf("read again within a minute: %+v, %v", c, err)
	}
	c.read = time.Now().Add(-componentsAge)
	r.kube.known.Store(c.name, c)
	expect("late")
}
