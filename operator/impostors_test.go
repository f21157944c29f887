package operator

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

// Impostors are reported once, and again when their claim changes.
func TestImpostorsAreReported(t *testing.T) {
	recorder := events.NewFakeRecorder(10)
	var log strings.Builder
	r := &nodeVersions{events: recorder, log: slog.New(slog.NewTextHandler(&log, nil)), now: time.Now}
	r.init()
	tell := func(machine string) {
		i := decision.Impostor{Node: decision.Node{Name: "worker-9", ProviderID: "sandbox://t/" + machine}, Machine: machine}
		r.reportImpostors(&observed{World: decision.World{Impostors: []decision.Impostor{i}}, nodes: map[string]*corev1.Node{"worker-9": {ObjectMeta: metav1.ObjectMeta{Name: "worker-9"}}}})
	}
	tell("control-plane-0")
	tell("control-plane-0")
	tell("control-plane-1")
	if n := strings.Count(log.String(), `msg="node rejected" node=worker-9 provider_id=sandbox://t/control-plane-`); n != 2 || len(recorder.Events) != 2 {
		t.Errorf("%d events, and the log:\n%s", len(recorder.Events), log.String())
	}
	if e := <-recorder.Events; !strings.Contains(e, "Node worker-9 claims machine sandbox://t/control-plane-0, whose name in the cloud is control-plane-0") {
		t.Errorf("event %q", e)
	}
	r.reportImpostors(&observed{})
	if len(r.reportedImpostors) > 0 {
		t.Errorf("%v is remembered", r.reportedImpostors)
	}
}

// A Node gets the annotations of a ticket only if it is the ticket's machine, by its own claim and by
// the cloud.
func TestNodeCannotTakeAnotherMachinesTicket(t *testing.T) {
	const id = "sandbox://t/worker-0"
	for name, tt := range map[string]struct {
		node, claims, attested string
		is                     cloud.Instance
		want                   string // refusal
	}{
		"without a machine":                             {node: "worker-0", attested: id, is: cloud.Instance{Name: "worker-0", ProviderID: id}, want: "NoProviderID"},
		"of another machine":                            {node: "worker-0", claims: "sandbox://t/worker-1", attested: id, is: cloud.Instance{Name: "worker-1", ProviderID: "sandbox://t/worker-1"}, want: "OtherMachine"},
		"that claims the machine of the ticket":         {node: "worker-9", claims: id, attested: id, is: cloud.Instance{Name: "worker-0", ProviderID: id}, want: "OtherMachine"},
		"with a ticket that names no machine":           {node: "worker-9", claims: id, is: cloud.Instance{Name: "worker-0", ProviderID: id}, want: "OtherMachine"},
		"that neither the cloud nor the operator finds": {node: "worker-9", claims: id, is: cloud.Instance{}, want: "InstanceUnknown"},
		"of the machine, in another case":               {node: "worker-0", claims: strings.ToUpper(id), attested: id, is: cloud.Instance{Name: "worker-0", ProviderID: id, Image: image2, Group: workerGroup}, want: ""},
	} {
		t.Run("a Node "+name, func(t *testing.T) {
			s := &sky{instances: map[string]cloud.Instance{}}
			if tt.is.ProviderID != "" {
				s.instances[tt.claims] = tt.is
			}
			jn := &v1alpha1.JoiningNode{ObjectMeta: metav1.ObjectMeta{Name: tt.node}, Spec: v1alpha1.JoiningNodeSpec{Name: tt.node, ProviderID: tt.attested, ComponentsReference: refA}}
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: tt.node}, Spec: corev1.NodeSpec{ProviderID: tt.claims}}
			if tt.want == "" { // annotated already, so there is nothing to write
				n.Annotations = map[string]string{v1alpha1.AnnotationComponents: refA, v1alpha1.AnnotationImage: image2, v1alpha1.AnnotationGroup: workerGroup}
			}
			r := &joiningNodes{cloud: s, now: time.Now} // a write would fail: there is no client
			got, err := r.annotate(t.Context(), jn, n)
			if err != nil || (got == nil) != (tt.want == "") || got != nil && got.reason != tt.want {
				t.Errorf("refusal %+v, %v; want %q", got, err, tt.want)
			}
		})
	}
}

// The fleet has no name for a machine that the cloud never described. The name in our intent counts.
func TestMachinesThatTheCloudNeverDescribedHaveNoName(t *testing.T) {
	const id = "sandbox://t/ghost"
	f := newFleet(&sky{instances: map[string]cloud.Instance{}}, time.Now)
	if err := f.refresh(t.Context(), map[string]claim{id: {ready: true}}); err != nil {
		t.Fatal(err)
	}
	all, complete, _, _ := f.view()
	if len(all) != 1 || all[0].Name != "" || !complete {
		t.Fatalf("machines %+v, complete %t", all, complete)
	}
}
