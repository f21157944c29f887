package preflight

import (
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// After an upgrade of the only control plane, its scheduler takes over its lease half a minute later. That is waited for,
// and a leader that does not come back is reported.
func TestALeaderThatRestartsIsWaitedFor(t *testing.T) {
	const none = 0
	for _, tt := range []struct {
		name     string
		age      time.Duration // of the lease
		released bool          // by a scheduler that was stopped
		back     time.Duration // after which the lease is renewed
		took     time.Duration
		want     string // title of the finding
	}{
		{name: "fresh", age: 2 * time.Second},
		{name: "slow, as the check tolerates", age: time.Minute},
		{name: "lost in an upgrade", age: 2 * time.Minute, back: 30 * time.Second, took: 30 * time.Second},
		{name: "released by a scheduler that was stopped", age: time.Second, released: true, back: 3 * time.Second, took: 3 * time.Second},
		{name: "does not come back", age: 2 * time.Minute, took: leaderWait, want: "kube-scheduler has lost its leader"},
		{name: "released and not taken", age: time.Second, released: true, took: leaderWait, want: "kube-scheduler has no leader"},
		{name: "lost long ago", age: 10 * time.Minute, took: none, want: "kube-scheduler has lost its leader"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				core := answering(t, func(*http.Request) any {
					renewed, holder := began.Add(-tt.age), "control-plane-0_1"
					if tt.released {
						holder = ""
					}
					if tt.back > 0 && time.Since(began) >= tt.back {
						renewed, holder = time.Now(), "control-plane-0_2"
					}
					l := coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "kube-scheduler"}}
					l.Spec = coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: new(int32(15)), RenewTime: &metav1.MicroTime{Time: renewed}}
					return listed([]coordinationv1.Lease{l})
				})
				w := &world{now: began, pods: []pod{{component: "kube-scheduler"}}}
				ctx, cancel := whilePagesArrive(t.Context(), sourceLimit)
				defer cancel()
				if err := (&reader{core: core, w: w}).leaders(ctx); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(began); took != tt.took {
					t.Errorf("took %s, want %s", took, tt.took)
				}
				got := ""
				for _, f := range leadersFresh(w, nil) {
					got += f.Title
				}
				if got != tt.want {
					t.Errorf("found %q, want %q", got, tt.want)
				}
			})
		})
	}
}
