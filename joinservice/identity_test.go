package joinservice

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/revocation"
)

// listed is a cloud with a fixed list of machines.
type listed []cloud.Instance

func (l listed) Peers(context.Context) ([]cloud.Instance, error) { return l, nil }
func (l listed) LoadBalancer(context.Context) (string, error)    { return "", nil }
func at(minute int) time.Time                                    { return time.Date(2030, 1, 1, 12, minute, 0, 0, time.UTC) }

func odd(incarnation string, s cloud.State, minute int) cloud.Instance {
	return cloud.Instance{
		Name: "worker-0", ProviderID: "odd://p/worker-0", Incarnation: incarnation, Role: cloud.Worker, Group: "odd://p/workers",
		State: s, IP: netip.MustParseAddr("10.0.0.7"), Created: at(minute),
	}
}

var oddIdentity = attestation.Identity{Name: "worker-0", ProviderID: "odd://p/worker-0", Role: cloud.Worker, Group: "odd://p/workers", IP: netip.MustParseAddr("10.0.0.7")}

func TestNamesThatAreReusedLeadToTheNewMachine(t *testing.T) {
	for _, tt := range []struct {
		name string
		list listed
		key  string
		err  error
	}{
		{name: "the old one is being deleted", list: listed{odd("2", cloud.Ready, 5), odd("1", cloud.Terminating, 0)}, key: "odd://p/worker-0#2"},
		{name: "the old one is listed last", list: listed{odd("1", cloud.Terminated, 0), odd("2", cloud.Creating, 5)}, key: "odd://p/worker-0#2"},
		{name: "an old list has both as they were", list: listed{odd("2", cloud.Creating, 5), odd("1", cloud.Ready, 0)}, key: "odd://p/worker-0#2"},
		{name: "only the old one is listed", list: listed{odd("1", cloud.Terminating, 0)}, err: errUnknownInstance},
	} {
		t.Run(tt.name, func(t *testing.T) {
			key, err := newDirectory(tt.list).verify(t.Context(), attestation.Statement{Identity: oddIdentity}, oddIdentity.IP)
			if key != tt.key || !errors.Is(err, tt.err) {
				t.Errorf("got %q, %v, want %q, %v", key, err, tt.key, tt.err)
			}
		})
	}
}

// Evidence that proves the incarnation is of one machine, also if another one has its name and address.
func TestAttestedIncarnationNamesOneMachine(t *testing.T) {
	for attested, want := range map[string]error{"": nil, "2": nil, "1": errUnknownInstance} {
		id := oddIdentity
		id.Incarnation = attested
		key, err := newDirectory(listed{odd("2", cloud.Ready, 5)}).verify(t.Context(), attestation.Statement{Identity: id}, id.IP)
		if !errors.Is(err, want) || err == nil && key != "odd://p/worker-0#2" {
			t.Errorf("incarnation %q: got %q, %v, want %v", attested, key, err, want)
		}
	}
}

// A copied key that is used from another machine's address changes no record of the machine it belongs to.
func TestEvidenceFromAnotherMachineIsNoSignOfASpare(t *testing.T) {
	other := odd("9", cloud.Ready, 5)
	other.Name, other.IP = "worker-1", netip.MustParseAddr("10.0.0.8")
	d := newDirectory(listed{odd("2", cloud.Ready, 5), other})
	d.listed = true
	asked := 0
	d.key = func(context.Context, cloud.Instance) (string, error) { asked++; return "", errUnassigned }
	if _, err := d.verify(t.Context(), attestation.Statement{Identity: oddIdentity}, other.IP); !errors.Is(err, errOtherAddress) || asked != 0 {
		t.Errorf("from the address of worker-1: %v, the spare was recorded %d times", err, asked)
	}
	if _, err := d.verify(t.Context(), attestation.Statement{Identity: oddIdentity}, oddIdentity.IP); !errors.Is(err, errUnassigned) || asked != 1 {
		t.Errorf("from its own: %v, recorded %d times", err, asked)
	}
}

func TestRevocationDoesNotCondemnALaterMachineOfTheName(t *testing.T) {
	list := revocation.List{"worker-0": {ProviderID: "odd://p/worker-0#1", Until: at(30)}}
	old, heir := oddIdentity, oddIdentity
	old.ProviderID, heir.ProviderID = "odd://p/worker-0#1", "odd://p/worker-0#2"
	if err := refusal(list, old); !errors.As(err, new(*revokedError)) {
		t.Errorf("the revoked machine: %v", err)
	}
	var name *revokedNameError
	if err := refusal(list, heir); !errors.As(err, &name) || !name.until.Equal(at(30)) {
		t.Errorf("a later machine of the name: %v", err)
	}
	s := &Server{metadata: listed{odd("2", cloud.Ready, 5)}}
	gone := map[string]bool{}
	if got := s.sourcesOf(t.Context(), list, gone); len(got) != 0 || len(gone) != 1 {
		t.Errorf("the address of a later machine is refused: %v, gone %v", got, gone)
	}
	s.metadata = listed{odd("1", cloud.Ready, 5)}
	if got := s.sourcesOf(t.Context(), list, map[string]bool{}); len(got) != 1 {
		t.Errorf("the address of the revoked machine is not refused: %v", got)
	}
}
