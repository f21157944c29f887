package joinservice

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/bootstrapper"
	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/engine/kubeadm"
	"constellation/engine/release/releasetest"
	"constellation/internal/syncbuffer"
	"constellation/operator/api/v1alpha1"
)

// newcomer is a machine that joins with the real JoinClient: its lock, its TPM and its
// cloud in one.
type newcomer struct {
	cloud.Instance
	lb      string
	unused  attestation.Issuer
	used    attestation.Issuer
	claimed atomic.Bool
}

func (j *newcomer) Self(context.Context) (cloud.Instance, error)    { return j.Instance, nil }
func (j *newcomer) Peers(context.Context) ([]cloud.Instance, error) { return nil, nil }
func (j *newcomer) LoadBalancer(context.Context) (string, error)    { return j.lb, nil }
func (j *newcomer) InitSecretHash(context.Context) ([]byte, error)  { return nil, errors.New("unused") }
func (j *newcomer) Variant() attestation.Variant                    { return attestation.TPM2 }
func (j *newcomer) ClaimJoin(context.Context, []byte) error         { j.claimed.Store(true); return nil }
func (j *newcomer) Joined(context.Context, string) error            { return nil }
func (j *newcomer) Claimed() <-chan struct{}                        { return nil }
func (j *newcomer) Issue(ctx context.Context, data []byte) ([]byte, error) {
	if j.claimed.Load() {
		return j.used.Issue(ctx, data)
	}
	return j.unused.Issue(ctx, data)
}

// watchBehind makes the service's watch of the target stale.
func watchBehind(t *testing.T, _ *site, r *replica) {
	want, err := r.kube.components(t.Context(), cloud.ControlPlane)
	if err != nil {
		t.Fatal(err)
	}
	now, ok, err := r.kube.versions.GetByKey(v1alpha1.NodeVersionName)
	if err != nil || !ok {
		t.Fatal("there is no NodeVersion: ", err)
	}
	before := now.(*v1alpha1.NodeVersion).DeepCopy()
	before.Status.JoinComponents.ControlPlane = reference(workerList)
	if err := r.kube.versions.Update(before); err != nil {
		t.Fatal(err)
	}
	got, err := r.kube.components(t.Context(), cloud.ControlPlane)
	if err != nil || got.name != want.name {
		t.Errorf("%s, %v, want %s", got.name, err, want.name)
	}
	if err := r.kube.versions.Update(now); err != nil {
		t.Fatal(err)
	}
}

// restarts has a control plane join while its join service is restarted, and while it is
// interrupted itself: it keeps the turn without reporting.
func restarts(t *testing.T, s *site, r *replica) {
	dir := t.TempDir()
	releasetest.Furnish(t, dir)
	joining, finish := filepath.Join(dir, "joining"), filepath.Join(dir, "finish")
	script := fmt.Sprintf("#!/bin/sh\ncase $1 in\nversion) echo v1.35.4;;\njoin) touch '%s'; until [ -e '%s' ]; do sleep 0.02; done;;\nesac\n", joining, finish)
	list := component.List{{
		Name: "kubeadm", URL: "data:;base64," + base64.StdEncoding.EncodeToString([]byte(script)), Digest: "sha256:" + hex.EncodeToString(digest(script)), Path: kubeadm.DefaultPath,
	}}
	s.publish(list)
	s.joinComponents(reference(list), reference(workerList))
	defer s.joinComponents(reference(controlPlaneList), reference(workerList))
	_, service := s.machine("control-plane-20", cloud.ControlPlane, goodBoot, clusterID)
	const host = "127.0.20.1"
	start := func() *replica {
		t.Helper()
		return s.run(service, host+":30090")
	}
	r = start()
	eventually(t, "components", func() (string, bool) {
		c, err := r.kube.components(t.Context(), cloud.ControlPlane)
		return fmt.Sprint(c.name, err), c.name == reference(list)
	})

	id, unused := s.machine("control-plane-21", cloud.ControlPlane, goodBoot, nil)
	j := &newcomer{
		Instance: cloud.Instance{Name: id.Name, ProviderID: id.ProviderID, Group: id.Group, Role: id.Role, IP: id.IP, State: cloud.Ready},
		lb:       host, unused: unused, used: s.issuer(id, goodBoot, clusterID),
	}
	state, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer state.Close()
	log := &syncbuffer.Buffer{}
	services := attestation.NewTPMValidator(s.ca.Roots(), attestation.Enforced(attestation.PredictPCRs(goodBoot)),
		attestation.Options{PCR15: attestation.PCR15Member(), Role: cloud.ControlPlane})
	join := func(cluster []byte) (stop context.CancelFunc, done <-chan error) {
		os.Remove(joining)
		c := &bootstrapper.JoinClient{
			Metadata: j, Lock: j, Issuer: j, Validator: func() attestation.Validator { return services },
			Installer: &component.Installer{Root: dir}, Kubeadm: &kubeadm.Runner{Path: filepath.Join(dir, kubeadm.DefaultPath), Dir: dir},
			State: state, Root: dir, Cluster: cluster, Log: slog.New(slog.NewTextHandler(log, nil)),
		}
		ctx, cancel := context.WithCancel(t.Context())
		end := make(chan error, 1)
		go func() { end <- c.Run(ctx) }()
		eventually(t, "kubeadm join runs", func() (string, bool) {
			_, err := os.Stat(joining)
			return log.String(), err == nil
		})
		return cancel, end
	}
	lease := func() coordinationv1.LeaseSpec {
		l, err := s.admin.CoordinationV1().Leases(namespace).Get(t.Context(), turnName, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return l.Spec
	}
	// renewed waits until the turn is renewed, and fails if another node gets it.
	renewed := func(what string) {
		t.Helper()
		now := time.Now()
		eventually(t, what, func() (string, bool) {
			l := lease()
			if l.HolderIdentity == nil || *l.HolderIdentity != id.Name {
				t.Fatalf("%s: it is the turn of %v", what, l.HolderIdentity)
			}
			return fmt.Sprintf("renewed %s\n%s", l.RenewTime, log), l.RenewTime.After(now)
		})
		if took := time.Since(now); took > turnDuration-turnRenewal {
			t.Errorf("%s: after %s, the turn lapses after %s", what, took, turnDuration)
		}
	}
	restart := func() {
		t.Helper()
		r.stop()
		r = start()
	}

	stop, done := join(nil)
	before := *lease().LeaseTransitions
	restart()
	renewed("after a restart of the join service")
	restart()
	renewed("after a second one")

	// The bootstrapper is restarted, and continues with the ticket on its disk.
	stop()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatalf("join ended with %v", err)
	}
	_, done = join(clusterID)
	renewed("with the stored ticket")
	restart()
	renewed("with the stored ticket, after a restart of the join service")
	if s.token(id.Name) == nil {
		t.Error("the token is deleted before the end of the join")
	}
	if err := os.WriteFile(finish, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatalf("join ended with %v", err)
	}
	if l := lease(); holderOf(&coordinationv1.Lease{Spec: l}) != "" || *l.LeaseTransitions != before || s.token(id.Name) != nil {
		t.Errorf("after the join: lease %+v, token %t", l, s.token(id.Name) != nil)
	}
	if n := strings.Count(log.String(), "join report resumed"); n != 3 {
		t.Errorf("%d reports were opened again, want 3:\n%s", n, log)
	}
}
