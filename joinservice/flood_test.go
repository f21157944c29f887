package joinservice

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"constellation/engine/atls/flood"
	"constellation/engine/cloud"
	"constellation/internal/testneeds"
)

// TestMachinesJoinDuringAFlood is 10,000 silent connections and 1,000 half-spoken
// handshakes, all replaced whenever they are closed, and 20 machines that join among
// them: each asks until it has its ticket.
func TestMachinesJoinDuringAFlood(t *testing.T) {
	const limit = 10 * time.Second
	testneeds.Sockets(t)
	if err := flood.Descriptors(12_000); err != nil {
		t.Skip(err)
	}
	s := newSite(t)
	r := s.start("control-plane-0")
	for n, tt := range []struct {
		name             string
		sources, joiners []netip.Addr
	}{
		{name: "from one source", sources: flood.Loopback(1), joiners: flood.Loopback(21)[1:]},
		{name: "from the source that all joiners share", sources: flood.Loopback(1), joiners: flood.Loopback(1)},
		{name: "from 200 sources", sources: flood.Loopback(200), joiners: flood.Loopback(220)[200:]},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inner := *s
			inner.t = t
			machines := make([]*joinerMachine, 20)
			for i := range machines {
				id, issuer := inner.machine(fmt.Sprintf("worker-%d-%d", n, i), cloud.Worker, goodBoot, nil)
				machines[i] = &joinerMachine{id: id, issuer: issuer, key: p256(t), from: tt.joiners[i%len(tt.joiners)]}
			}
			stop, err := flood.Flood{Address: r.addr, Sources: tt.sources, Silent: 10_000, Half: 1_000}.Spawn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			var wg sync.WaitGroup
			for _, m := range machines {
				wg.Go(func() {
					for m.err = m.join(&inner, r.addr); m.err != nil && time.Since(start) < limit; m.err = m.join(&inner, r.addr) {
						m.retries++
						time.Sleep(250 * time.Millisecond)
					}
				})
			}
			wg.Wait()
			took, retries := time.Since(start), 0
			for _, m := range machines {
				if retries += m.retries; m.err != nil {
					t.Errorf("%s does not get through within %s: %v", m.id.Name, limit, m.err)
				}
			}
			if took > limit {
				t.Errorf("20 machines took %s, want at most %s", took, limit)
			}
			opened, failed, err := stop()
			if err != nil || opened < 11_000 {
				t.Errorf("%d connections were opened, %v", opened, err)
			}
			t.Logf("20 machines joined within %s with %d retries, among %d connections (%d could not be opened)", took.Round(time.Millisecond), retries, opened, failed)
		})
	}
}
