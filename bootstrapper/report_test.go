package bootstrapper

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
)

// reporting returns a report of a claimed machine, to any join service in its cloud.
func (r *rig) reporting(cluster []byte) *report {
	r.t.Helper()
	if err := r.tpm.extend(r.t.Context(), cluster); err != nil {
		r.t.Fatal(err)
	}
	v := attestation.NewTPMValidator(r.ca.Roots(), measured("v1.1.0"), attestation.Options{PCR15: attestation.PCR15Member(), Role: cloud.ControlPlane})
	c := &JoinClient{
		Metadata: r.cloud, Issuer: r.tpm, Validator: func() attestation.Validator { return v }, Log: r.m.Log, port: r.m.joinPort, hurry: r.m.hurry,
	}
	return c.newReport(r.t.Context(), r.cloud.instance, &ticket{cluster: cluster}, nil)
}

func (s *service) reportsWere(opened, ended int) func() bool {
	return func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.opened == opened && s.ended == ended
	}
}

func TestIdleReportIsReopened(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	s := r.serveJoins(nil)
	x := r.reporting(clusterB)
	for n := range 3 {
		wait(t, fmt.Sprint("report ", n+1), s.reportsWere(n+1, 0))
		s.stop()
		s.serve()
	}
	wait(t, "the last report", s.reportsWere(4, 0))
	x.say(stepJoin, stateRunning, slog.LevelInfo, "one line")
	x.close()
	if !s.reportsWere(4, 1)() || s.said() != "kubeadm-join:running info one line" {
		t.Errorf("%d reports, %d ended, said\n%s", s.opened, s.ended, s.said())
	}
}

func TestFinalMessageIsRepeatedUntilConfirmed(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	s := r.serveJoins(nil)
	x := r.reporting(clusterB)
	wait(t, "the report", s.reportsWere(1, 0))
	s.stop()
	x.say(stepJoin, stateDone, slog.LevelInfo, "this machine is a node")
	wait(t, "no listener", func() bool { return strings.Contains(r.logged(), "connection refused") })
	s.serve()
	x.close()
	if !s.reportsWere(2, 1)() || s.said() != "kubeadm-join:done info this machine is a node" {
		t.Errorf("%d reports, %d ended, said\n%s", s.opened, s.ended, s.said())
	}
}

func TestReportIsForItsOwnClusterOnly(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	s := r.serveJoins(nil)
	x := r.reporting(clusterA)
	x.say(stepJoin, stateRunning, slog.LevelInfo, "one line")
	wait(t, "it is refused", func() bool { return strings.Contains(r.logged(), "belongs to another cluster") })
	if !s.reportsWere(0, 0)() {
		t.Error("another cluster's join service received a report")
	}
	x.stop()
	x.close()
}
