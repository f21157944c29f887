package bootstrapper

import (
	"bytes"
	"context"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/joinservice/joinproto"
)

// releasedAnswer is that of a join service to a machine that was released.
func releasedAnswer(t *testing.T) error {
	t.Helper()
	st, err := status.New(codes.FailedPrecondition, "released").WithDetails(&errdetails.ErrorInfo{Reason: joinproto.ReasonReleased, Domain: joinproto.ErrorDomain})
	if err != nil {
		t.Fatal(err)
	}
	return st.Err()
}

// enrolledService serves joins of enrolled machines on a member of a cluster.
func (r *rig) enrolledService(another func(attestation.Identity) string, cluster []byte) *service {
	r.t.Helper()
	return r.serveJoins(func(s *service) {
		address := another(s.member.id)
		if err := attestation.ExtendClusterID(r.t.Context(), address, cluster); err != nil {
			r.t.Fatal(err)
		}
		s.issuer = attestation.NewEnrolledIssuer(address)
	})
}

// A member that was released resets itself, and asks for a ticket like an unused machine.
func TestReleasedMachineResetsItselfAndJoinsAgain(t *testing.T) {
	r := newRig(t, cloud.Worker)
	s := r.enrolledService(r.enrol(attestation.NoTPM), clusterB)
	r.m.Releases = true
	x := r.start()
	wait(t, "the machine is a member", func() bool { h, _ := r.holder(); return h.State == member })
	s.mu.Lock()
	s.standing = releasedAnswer(t)
	s.answers = []error{later(codes.Unavailable, "not assigned", time.Second)}
	s.mu.Unlock()
	wait(t, "the reset machine joins again", func() bool { h, held := r.holder(); return s.asked() == 3 && held && h.State == member })
	s.mu.Lock()
	s.standing = nil
	s.mu.Unlock()
	x.stop(t)
	if !bytes.Equal(r.register(), attestation.ClusterIDPCR(clusterB)) {
		t.Errorf("register 15 is %x", r.register())
	}
}

// A machine whose register 15 is in a TPM restarts after the reset.
func TestReleasedMachineWithATPMRestarts(t *testing.T) {
	r := newRig(t, cloud.Worker)
	s := r.serveJoins(nil)
	r.m.Releases = true
	restarts := make(chan struct{})
	r.m.Restart = func(ctx context.Context) error {
		close(restarts)
		<-ctx.Done()
		return context.Cause(ctx)
	}
	x := r.start()
	wait(t, "the machine is a member", func() bool { h, _ := r.holder(); return h.State == member })
	s.mu.Lock()
	s.standing = releasedAnswer(t)
	s.mu.Unlock()
	select {
	case <-restarts:
	case <-time.After(20 * time.Second):
		t.Fatal("the machine does not restart")
	}
	if _, held := r.holder(); held {
		t.Error("the claim is left after a reset")
	}
	x.stop(t)
}

// A control plane of another cluster cannot have a machine reset.
func TestOnlyMembersOfTheClusterReleaseAMachine(t *testing.T) {
	r := newRig(t, cloud.Worker)
	another := r.enrol(attestation.NoTPM)
	s := r.enrolledService(another, clusterB)
	if err := r.start().end(t); err != nil {
		t.Fatal(err)
	}
	s.stop()
	foreign := r.enrolledService(another, clusterA)
	foreign.standing = releasedAnswer(t)
	b, err := open(r.m)
	if err != nil {
		t.Fatal(err)
	}
	defer b.close()
	if b.lock, err = openLock(t.Context(), b.state, b.m.registers); err != nil {
		t.Fatal(err)
	}
	v, err := b.serviceValidator(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c := &JoinClient{Metadata: b.m.Metadata, Issuer: b.m.Issuer, Log: b.m.Log, port: b.m.joinPort}
	if released, _ := c.released(t.Context(), memberValidator{v, clusterB}); released {
		t.Error("the join service of another cluster released the machine")
	}
	if released, _ := c.released(t.Context(), memberValidator{v, clusterA}); !released {
		t.Error("that of its own cluster would not be believed either")
	}
}
