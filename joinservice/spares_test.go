package joinservice

import (
	"encoding/json"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/joinservice/joinproto"
)

func spareMachines(t *testing.T, s *site, _ *replica) {
	maps := s.admin.CoreV1().ConfigMaps(namespace)
	for _, name := range []string{machines.SparesConfigMap, machines.SeenConfigMap} {
		if _, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	assign := func(text string) {
		t.Helper()
		cm, err := maps.Get(t.Context(), machines.SparesConfigMap, metav1.GetOptions{})
		if err == nil {
			cm.Data = map[string]string{"spare-0": text}
			_, err = maps.Update(t.Context(), cm, metav1.UpdateOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	seen := func(want int) {
		t.Helper()
		cm, err := maps.Get(t.Context(), machines.SeenConfigMap, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var x machines.Seen
		if err := json.Unmarshal([]byte(cm.Data["spare-0"]), &x); err != nil || x.Incarnation != want || x.Time.IsZero() {
			t.Errorf("recorded %q, %v; want incarnation %d", cm.Data["spare-0"], err, want)
		}
	}
	s.spares = true
	r := s.start("control-plane-spares")
	id, issuer := s.machine("spare-0", cloud.Worker, goodBoot, nil)
	s.sky.set(func(k *sky) { k.instances[len(k.instances)-1].Spare = true })

	_, err := s.ask(r.addr, id, issuer)
	refused(t, err, codes.Unavailable, "not assigned")
	seen(0)
	if s.noted("spare-0") != nil || s.token("spare-0") != nil {
		t.Error("a spare that is not assigned got a JoiningNode or a token")
	}
	assign(`{"state":"assigned","incarnation":1}`)
	if _, err := s.ask(r.addr, id, issuer); err != nil {
		t.Fatalf("assigned: %v", err)
	}
	if n := s.noted("spare-0"); n == nil || n.Spec.ProviderID != id.ProviderID+"#1" {
		t.Errorf("noted %+v", n)
	}

	// A member asks whether it was released: without a request for a certificate, and even with one, it gets no ticket.
	member := s.dial(r.addr, s.issuer(id, goodBoot, clusterID))
	standing := func() error {
		t.Helper()
		_, err := member.IssueJoinTicket(t.Context(), &joinproto.IssueJoinTicketRequest{})
		return err
	}
	refused(t, standing(), codes.PermissionDenied, "already belongs to the cluster")
	assign(`{"state":"released","incarnation":1}`)
	err = standing()
	refused(t, err, codes.FailedPrecondition, "must reset itself")
	if d := status.Convert(err).Details(); len(d) != 1 || d[0].(*errdetails.ErrorInfo).GetReason() != joinproto.ReasonReleased {
		t.Errorf("details %v", d)
	}
	if strings.Contains(r.log.String(), "must reset itself") {
		t.Error("every question of a member is in the log")
	}

	// It has reset itself.
	_, err = s.ask(r.addr, id, issuer)
	refused(t, err, codes.Unavailable, "not assigned")
	seen(1)

	// Nobody gets a ticket by a record that cannot be read. A machine without a record is no spare by its row.
	assign(`{"state":"assigned`)
	_, err = s.ask(r.addr, id, issuer)
	if err == nil {
		t.Error("a damaged record gave a ticket")
	}
	assign(`{"state":"released","incarnation":1}`)
	fixed, other := s.machine("fixed-0", cloud.Worker, goodBoot, nil)
	if _, err := s.ask(r.addr, fixed, other); err != nil {
		t.Errorf("a machine that is no spare: %v", err)
	}
}
