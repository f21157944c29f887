package bootstrapper

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/bootstrapper/initproto"
	"constellation/engine/atls/flood"
	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/internal/swtpm"
	"constellation/internal/testneeds"
)

// floodRig is a rig whose evidence is that of a TPM emulator.
func floodRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t, cloud.ControlPlane)
	address, _ := swtpm.Start(t)
	if err := attestationtest.Provision(t.Context(), address, r.ca, identity("control-plane-0", cloud.ControlPlane)); err != nil {
		t.Fatal(err)
	}
	if err := attestationtest.Measure(t.Context(), address, attestation.EventLogPath(address), image("v1.1.0")); err != nil {
		t.Fatal(err)
	}
	r.m.Issuer = attestation.NewTPMIssuer(address)
	return r
}

// heard retries Ack with the right secret until it gets an answer, as a console does, and
// returns the duration. The answer is that there is nothing to acknowledge; only callers with
// the right secret get it.
func (r *rig) heard(addr string, limit time.Duration) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(r.t.Context(), limit)
	defer cancel()
	start := time.Now()
	for {
		try, cancel := context.WithTimeout(ctx, 2*time.Second) // a console dials again, too
		_, err := r.console(addr).Ack(try, &initproto.AckRequest{InitSecret: initSecret})
		cancel()
		if status.Code(err) == codes.FailedPrecondition {
			return time.Since(start), nil
		}
		select {
		case <-ctx.Done():
			return time.Since(start), err
		case <-time.After(250 * time.Millisecond):
		}
	}
}

// TestSilentConnectionsDoNotBlockInit opens 64 silent connections from one source, and starts 20
// consoles that try once each.
func TestSilentConnectionsDoNotBlockInit(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	x := r.start()
	for range 64 {
		c, err := net.Dial("tcp", x.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	refused := 0
	for range 20 {
		_, err := r.console(x.addr).Ack(t.Context(), &initproto.AckRequest{InitSecret: initSecret})
		if status.Code(err) != codes.FailedPrecondition {
			refused++
			t.Log(err)
		}
	}
	if refused > 0 {
		t.Errorf("%d of 20 consoles are refused", refused)
	}
	x.stop(t)
}

// TestInitSucceedsDuringAFlood is 10,000 silent connections and 1,000 half-spoken
// handshakes, all replaced whenever they are closed, and consoles among them.
func TestInitSucceedsDuringAFlood(t *testing.T) {
	const limit = 10 * time.Second
	testneeds.Sockets(t)
	if err := flood.Descriptors(12_000); err != nil {
		t.Skip(err)
	}
	for _, tt := range []struct {
		name    string
		sources []netip.Addr
	}{
		{"from one source", flood.Loopback(1)},
		{"from the console's own source", []netip.Addr{netip.MustParseAddr("127.0.0.1")}},
		{"from 200 sources", flood.Loopback(200)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := floodRig(t)
			x := r.start()
			stop, err := flood.Flood{Address: x.addr, Sources: tt.sources, Silent: 10_000, Half: 1_000}.Spawn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			var worst time.Duration
			for range 5 {
				took, err := r.heard(x.addr, limit)
				if err != nil {
					t.Fatalf("a console got no answer within %s: %v", limit, err)
				}
				worst = max(worst, took)
			}
			// The init also completes, with a TPM from which other callers request quotes.
			start := time.Now()
			if _, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA))); err != nil {
				t.Errorf("init during the flood: %v", err)
			}
			if took := time.Since(start); took > limit {
				t.Errorf("init took %s, want at most %s", took, limit)
			}
			opened, failed, err := stop()
			if err != nil || opened < 11_000 {
				t.Errorf("%d connections were opened, %v", opened, err)
			}
			t.Logf("console answered within %s, among %d connections (%d could not be opened)", worst.Round(time.Millisecond), opened, failed)
			x.stop(t)
		})
	}
}

// TestGuessesDoNotLockOutConsole guesses the secret beyond every limit, from the console's source
// and from others.
func TestGuessesDoNotLockOutConsole(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	x := r.start()
	client := r.console(x.addr)
	limited := 0
	for range 4 * globalBurst {
		_, err := client.Ack(t.Context(), &initproto.AckRequest{InitSecret: []byte("a guess")})
		switch status.Code(err) {
		case codes.ResourceExhausted:
			limited++
		case codes.Unauthenticated:
		default:
			t.Fatal(err)
		}
	}
	if limited < 3*globalBurst {
		t.Errorf("%d of %d guesses were limited", limited, 4*globalBurst)
	}
	if _, err := client.Ack(t.Context(), &initproto.AckRequest{InitSecret: initSecret}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("the right secret on the guesser's connection: %v", err)
	}
	if _, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA))); err != nil {
		t.Errorf("the right secret after too many guesses: %v", err)
	}
	x.stop(t)
}
