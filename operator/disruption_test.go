//go:build linux

package operator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/agent"
	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/wire"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/engine/cloud/notice"
	"constellation/engine/cloud/providers/notices"
	"constellation/operator/api/v1alpha1"
)

// doomed is a workshop with an operator. The agent of node n1 runs, and reads the metadata server of an emulated machine.
type doomed struct {
	*workshop
	google  *gcptest.Cloud
	machine string // that is node n1
	ns      string

	mu     sync.Mutex
	graces []int64 // seconds that evicted pods got
}

func newDoomed(t *testing.T) *doomed {
	t.Helper()
	w := newWorkshop(t, withChart)
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	var err error
	w.denied, w.cloud = &denials{}, &sky{instances: map[string]cloud.Instance{}}
	if w.admin, err = client.New(w.cp.Config(), client.Options{Scheme: scheme}); err != nil {
		t.Fatal(err)
	}
	d := &doomed{workshop: w}
	if d.google, err = gcptest.New(func(p string) { t.Error(p) }, gcptest.Options{Fleet: &wire.Records{}}); err != nil {
		t.Fatal(err)
	}
	id, _ := cloud.SplitKey(d.google.Seed(d.google.AddGroup(gcptest.Zones[0], "workers", cloud.Worker, d.google.AddImage("one", "v1.0.0"), gcptest.UID, nil), 1)[0])
	_, _, d.machine, _ = gcp.ParseProviderID(id)
	metadata := httptest.NewServer(d.google.MetadataOf(d.machine))
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "etc/kubernetes"), 0o700); err != nil {
		t.Fatal(err)
	}
	access, err := w.cp.ConfigFor("system:node:n1", "system:nodes", "system:authenticated")
	if err != nil {
		t.Fatal(err)
	}
	k := clientcmdapi.NewConfig()
	k.Clusters["c"], k.AuthInfos["u"] = &clientcmdapi.Cluster{Server: access.Host, CertificateAuthorityData: access.CAData}, &clientcmdapi.AuthInfo{ClientCertificateData: access.CertData, ClientKeyData: access.KeyData}
	k.Contexts["x"], k.CurrentContext = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}, "x"
	if err := clientcmd.WriteToFile(*k, filepath.Join(root, "etc/kubernetes/kubelet.conf")); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "agent") // its name is short, as that of a socket must be
	if err != nil {
		t.Fatal(err)
	}
	a := agent.New(agent.Host{Root: root, Name: "n1"}, filepath.Join(dir, "a.sock"), slog.New(slog.DiscardHandler))
	a.Notices = notices.Of(gcp.Name, metadata.URL)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("agent ended with %v", err)
		}
		metadata.CloseClientConnections()
		metadata.Close()
		os.RemoveAll(dir)
	})
	d.start()
	d.ns = must[*corev1.Namespace](t)(w.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "doomed-"}}, metav1.CreateOptions{})).Name
	d.recordGraces()
	return d
}

// recordGraces records how long evicted pods get to end.
func (d *doomed) recordGraces() {
	pods, err := d.client.CoreV1().Pods(d.ns).Watch(d.t.Context(), metav1.ListOptions{})
	if err != nil {
		d.t.Fatal(err)
	}
	go func() {
		for e := range pods.ResultChan() {
			if p, ok := e.Object.(*corev1.Pod); ok && p.DeletionTimestamp != nil && p.DeletionGracePeriodSeconds != nil && *p.DeletionGracePeriodSeconds > 0 {
				d.mu.Lock()
				d.graces = append(d.graces, *p.DeletionGracePeriodSeconds)
				d.mu.Unlock()
			}
		}
	}()
	d.t.Cleanup(pods.Stop)
}

// waits until node n1 announces a reason, is cordoned by the operator or not, and has so many pods.
func (d *doomed) waits(what string, reason notice.Reason, cordoned bool, pods int) {
	d.t.Helper()
	d.eventually(what, func() (string, bool) {
		n := must[*corev1.Node](d.t)(d.client.CoreV1().Nodes().Get(d.t.Context(), "n1", metav1.GetOptions{}))
		is, text := announcedOn(n)
		ours := n.Annotations[v1alpha1.AnnotationDisrupted] != ""
		on := d.on(d.ns, "n1")
		return strings.Join(append(on, string(is), text), " "), is == reason && n.Spec.Unschedulable == cordoned && ours == cordoned && len(on) == pods
	})
}

// TestAnnouncedDisruptions announces preemption and maintenance by an emulated metadata server. A real agent writes it to a
// real API server with the rights of a kubelet, and a real operator drains the node with the rights of its chart.
func TestAnnouncedDisruptions(t *testing.T) {
	d := newDoomed(t)
	d.cordon("n2", true)
	d.deployment(d.ns, "web", 3, func(s *corev1.PodSpec) { s.TerminationGracePeriodSeconds = ptr(int64(300)) })
	d.runs(d.ns, "n1", 3)
	d.budget(d.ns, "web", "web")
	d.cordon("n2", false)

	if err := d.google.Maintain(d.machine, gcptest.Migrate); err != nil {
		t.Fatal(err)
	}
	d.waits("a machine that is migrated keeps its pods", notice.HostMigrates, false, 3)

	begun := time.Now()
	if err := d.google.Preempt(d.machine); err != nil {
		t.Fatal(err)
	}
	d.waits("a machine that is preempted is drained", notice.Preempted, true, 0)
	if took := time.Since(begun); took > gcptest.PreemptedAfter {
		t.Errorf("drained %v after the announcement, want %v at most", took, gcptest.PreemptedAfter)
	} else {
		t.Logf("drained %v after the announcement", took.Round(time.Millisecond))
	}
	d.eventually("three pods are evicted with the time that a preemption leaves", func() (string, bool) {
		d.mu.Lock()
		defer d.mu.Unlock()
		return fmt.Sprint(d.graces), len(d.graces) >= 3 && slices.Max(d.graces) == graceOf[notice.Preempted]
	})
	d.runs(d.ns, "n2", 3)
	d.eventually("an event is recorded", func() (string, bool) {
		l := must[*corev1.EventList](t)(d.client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{}))
		return "none", slices.ContainsFunc(l.Items, func(e corev1.Event) bool {
			return e.Reason == "CloudDisruption" && strings.Contains(e.Message, "preempts")
		})
	})
	d.waits("the next machine of the name takes pods", "", false, 0)

	// Somebody's own cordon stays.
	d.cordon("n1", true)
	if err := d.google.Maintain(d.machine, gcptest.Terminate); err != nil {
		t.Fatal(err)
	}
	is := func() (notice.Reason, *corev1.Node) {
		n := must[*corev1.Node](t)(d.client.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{}))
		r, _ := announcedOn(n)
		return r, n
	}
	d.eventually("the maintenance is announced", func() (string, bool) { r, _ := is(); return string(r), r == notice.HostTerminates })
	if err := d.google.Maintain(d.machine, gcptest.NoMaintenance); err != nil {
		t.Fatal(err)
	}
	d.eventually("the maintenance is over", func() (string, bool) { r, _ := is(); return string(r), r == "" })
	if _, n := is(); !n.Spec.Unschedulable || n.Annotations[v1alpha1.AnnotationDisrupted] != "" {
		t.Errorf("the cordon of a person is gone: %v %v", n.Spec.Unschedulable, n.Annotations)
	}
	d.cordon("n1", false)

	// A node that is not cordoned is, and is given back.
	if err := d.google.Maintain(d.machine, gcptest.Terminate); err != nil {
		t.Fatal(err)
	}
	d.waits("a machine whose host stops it is drained", notice.HostTerminates, true, 0)
	if err := d.google.Maintain(d.machine, gcptest.NoMaintenance); err != nil {
		t.Fatal(err)
	}
	d.waits("the node is given back", "", false, 0)
	if err := d.client.AppsV1().Deployments(d.ns).Delete(t.Context(), "web", metav1.DeleteOptions{PropagationPolicy: ptr(metav1.DeletePropagationForeground)}); err != nil {
		t.Fatal(err)
	}
}
