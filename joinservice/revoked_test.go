package joinservice

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/revocation"
)

// revoke writes entries into the record, as the console does.
func (s *site) revoke(entries map[string]revocation.Entry) {
	s.t.Helper()
	data := map[string]string{}
	for node, e := range entries {
		value, err := e.Encode()
		if err != nil {
			s.t.Fatal(err)
		}
		data[node] = value
	}
	b, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": revocation.ConfigMap, "namespace": revocation.Namespace}, "data": data,
	})
	if err != nil {
		s.t.Fatal(err)
	}
	if err := s.cp.Apply(s.t.Context(), b); err != nil {
		s.t.Fatal(err)
	}
}

// forgive removes the record.
func (s *site) forgive() {
	s.t.Helper()
	if err := s.admin.CoreV1().ConfigMaps(revocation.Namespace).Delete(s.t.Context(), revocation.ConfigMap, metav1.DeleteOptions{}); err != nil {
		s.t.Fatal(err)
	}
}

func entry(id attestation.Identity) revocation.Entry {
	return revocation.Entry{ProviderID: id.ProviderID, By: "ops@laptop", Since: time.Now(), Until: time.Now().Add(revocation.CertificateLifetime)}
}

func revokedMachines(t *testing.T, s *site, r *replica) {
	captured, issuer := s.machine("revoked-0", cloud.Worker, goodBoot, nil)
	other, otherIssuer := s.machine("revoked-1", cloud.Worker, goodBoot, nil)
	if _, err := s.ask(r.addr, captured, issuer); err != nil {
		t.Fatalf("before it is revoked: %v", err)
	}
	old := s.token("revoked-0")
	if old == nil {
		t.Fatal("it has no token")
	}
	// revoked-1 is a machine that got the ID of another one: it is refused by that.
	moved := entry(other)
	s.revoke(map[string]revocation.Entry{"revoked-0": entry(captured), "somebody-else": moved})
	eventually(t, "the record is observed", func() (string, bool) {
		err := r.kube.allowed(captured)
		return "allowed", err != nil
	})
	before := r.writes.Load()
	_, err := s.ask(r.addr, captured, issuer)
	refused(t, err, codes.PermissionDenied, "revoked")
	_, err = s.ask(r.addr, other, otherIssuer)
	refused(t, err, codes.PermissionDenied, "somebody-else")
	if n := r.writes.Load() - before; n != 0 {
		t.Errorf("%d writes for machines that were revoked", n)
	}
	if log := r.log.String(); !strings.Contains(log, "was revoked") {
		t.Error("the log lacks the request of a revoked machine")
	}
	s.forgive()
	eventually(t, "the entry is removed", func() (string, bool) {
		err := r.kube.allowed(captured)
		return "refused", err == nil
	})
	if _, err := s.ask(r.addr, captured, issuer); err != nil {
		t.Errorf("after the entry was removed: %v", err)
	}
}

// revokedMeanwhile revokes a machine while its ticket is made, when no watch has seen the
// record: the token must not outlive that.
func revokedMeanwhile(t *testing.T, s *site, r *replica) {
	id, _ := s.machine("revoked-2", cloud.Worker, goodBoot, nil)
	defer s.forgive()
	// Nothing runs the watches of this service, so it never sees the record.
	behind, err := newKube(s.access(), namespace)
	if err != nil {
		t.Fatal(err)
	}
	slow := &Server{judge: &judge{log: r.Server.log, kube: behind}}
	if err := slow.kube.allowed(id); err != nil {
		t.Fatal(err)
	}
	if _, err := slow.kube.putToken(t.Context(), id, time.Now().Add(tokenTTL)); err != nil {
		t.Fatal(err)
	}
	s.revoke(map[string]revocation.Entry{"revoked-2": entry(id)})
	var refusal *revokedError
	if err := slow.confirm(t.Context(), slow.log, id); !errors.As(err, &refusal) || refusal.node != "revoked-2" {
		t.Errorf("confirmed with %v", err)
	}
	if s.token("revoked-2") != nil {
		t.Error("its token still exists")
	}
}

// revokedAddress closes connections from the address of a revoked machine until the cloud
// does not list it any more.
func revokedAddress(t *testing.T, s *site, r *replica) {
	id, _ := s.machine("revoked-3", cloud.Worker, goodBoot, nil)
	defer s.forgive()
	e := entry(id)
	e.Address = "127.0.0.78" // the record may repeat what a Node claimed: this is an honest machine's
	s.sky.set(func(k *sky) {
		for i := range k.instances {
			if k.instances[i].Name == "revoked-3" {
				k.instances[i].IP = netip.MustParseAddr("127.0.0.77")
			}
		}
	})
	s.revoke(map[string]revocation.Entry{"revoked-3": e})
	eventually(t, "the address is refused", func() (string, bool) {
		_, refused := r.revokedSource(&net.TCPAddr{IP: net.ParseIP("127.0.0.77")})
		return "not refused", refused
	})
	// answers reports whether the service begins a handshake with a source.
	answers := func(source string) bool {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}, Timeout: 5 * time.Second}
		conn, err := d.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetReadDeadline(time.Now().Add(300 * time.Millisecond)) // an open connection stays silent until we speak
		var b [1]byte
		_, err = conn.Read(b[:])
		var timeout net.Error
		return errors.As(err, &timeout) && timeout.Timeout()
	}
	if answers("127.0.0.77") {
		t.Error("a connection from the revoked machine stays open")
	}
	if !answers("127.0.0.78") {
		t.Error("a connection from another machine is closed")
	}
	gone := map[string]bool{}
	list := revocation.List{"revoked-3": e}
	s.sky.set(func(k *sky) { k.err = cloud.ErrUnavailable })
	if got := r.sourcesOf(t.Context(), list, gone); len(got) != 1 {
		t.Errorf("while the cloud does not answer %v are refused", got)
	}
	// The record of a console without the cloud has no address. The cloud's last answer counts
	// then, also if the record claims another one.
	for _, address := range []string{"", "127.0.0.78"} {
		recorded := e
		recorded.Address = address
		got := r.sourcesOf(t.Context(), revocation.List{"revoked-3": recorded}, gone)
		if len(got) != 1 || got[netip.MustParseAddr("127.0.0.77")] != "revoked-3" {
			t.Errorf("with the recorded address %q and no answer of the cloud %v are refused", address, got)
		}
	}
	s.sky.set(func(k *sky) {
		k.err = nil
		for i := range k.instances {
			if k.instances[i].Name == "revoked-3" {
				k.instances[i].State = cloud.Terminating
			}
		}
	})
	if got := r.sourcesOf(t.Context(), list, gone); len(got) != 1 {
		t.Errorf("while the machine is being deleted %v are refused", got)
	}
	s.sky.set(func(k *sky) {
		for i := range k.instances {
			if k.instances[i].Name == "revoked-3" {
				k.instances[i].State = cloud.Terminated
			}
		}
	})
	if got := r.sourcesOf(t.Context(), list, gone); len(got) != 0 {
		t.Errorf("after the deletion of the machine %v are refused: addresses are reused", got)
	}
	s.sky.set(func(k *sky) { k.err = cloud.ErrUnavailable })
	defer s.sky.set(func(k *sky) { k.err = nil })
	if got := r.sourcesOf(t.Context(), list, gone); len(got) != 0 {
		t.Errorf("a deleted machine is refused again: %v", got)
	}
	if _, refused := r.revokedSource(&net.TCPAddr{IP: netip.MustParseAddr("::ffff:127.0.0.77").AsSlice()}); !refused {
		t.Error("the mapped form of the address is accepted")
	}
}

func TestReadsAreSharedAndNeverStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r reads
		var sent, value atomic.Int64
		get := func(context.Context) (revocation.List, error) {
			sent.Add(1)
			l := revocation.List{}
			if value.Load() > 0 {
				l["worker-1"] = revocation.Entry{}
			}
			time.Sleep(time.Second)
			return l, nil
		}
		var wg sync.WaitGroup
		read := func(want bool) {
			wg.Go(func() {
				l, err := r.read(t.Context(), get)
				if _, is := l["worker-1"]; err != nil || is != want {
					t.Errorf("got %v, %v, want an entry: %t", l, err, want)
				}
			})
		}
		read(false)
		synctest.Wait()
		value.Store(1) // the first request has read the previous state
		for range 50 {
			read(true)
		}
		wg.Wait()
		if n := sent.Load(); n != 2 {
			t.Errorf("%d requests for 51 callers, want 2", n)
		}
	})
}
