package gcptest_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/gcptest"
)

// inBubble runs a test with a clock of its own.
func inBubble(t *testing.T, test func(l *lab)) {
	t.Helper()
	newLab(t, gcptest.Options{}) // reads the discovery document, which runs a program
	synctest.Test(t, func(t *testing.T) {
		test(newLab(t, gcptest.Options{Zones: []string{zone}, Pending: time.Second, Running: time.Second, Insert: time.Second, Retry: 10 * time.Second}))
	})
}

var group = gcp.GroupID(project, zone, "workers")

// provider is our client, without any memory.
func (l *lab) provider() *gcp.Cloud {
	l.Helper()
	p, err := gcp.New(l.Context(), gcp.Options{Project: project, UID: gcptest.UID, Zones: []string{zone}, HTTP: l.c.Client()})
	if err != nil {
		l.Fatal(err)
	}
	return p
}

// ready counts the machines that are ready.
func (l *lab) ready() (n int) {
	l.Helper()
	all, err := l.provider().Instances(l.Context())
	if err != nil {
		l.Fatal(err)
	}
	for _, i := range all {
		if i.State == cloud.Ready {
			n++
		}
	}
	return n
}

// TestFaults sets each fault of the cloud, and then none. Calls fail while it lasts, and succeed afterwards.
func TestFaults(t *testing.T) {
	for _, tt := range []struct {
		fault string
		kind  error // of a list of groups, or else of a creation
		reads bool
	}{
		{fault: "api-500=1", kind: cloud.ErrUnavailable, reads: true},
		{fault: "api-429=1", kind: cloud.ErrThrottled, reads: true},
		{fault: "role-revoked=compute.instanceGroupManagers.update", kind: cloud.ErrDenied},
		{fault: "role-revoked=compute.instanceGroupManagers.list", kind: cloud.ErrDenied, reads: true},
	} {
		t.Run(tt.fault, func(t *testing.T) {
			inBubble(t, func(l *lab) {
				if err := l.c.SetFaults([]string{tt.fault}); err != nil {
					t.Fatal(err)
				}
				try := func() (err error) {
					if tt.reads {
						_, err = l.provider().Groups(l.Context())
						return err
					}
					_, err = l.provider().CreateInstances(l.Context(), group, []string{strings.Repeat("a", 24)})
					return err
				}
				if err := try(); !errors.Is(err, tt.kind) {
					l.Errorf("error %v, want %v", err, tt.kind)
				}
				if got := l.c.Faults(); len(got) != 1 || got[0] != tt.fault {
					l.Errorf("faults %q", got)
				}
				if err := l.c.SetFaults(nil); err != nil {
					l.Fatal(err)
				}
				time.Sleep(2 * time.Minute) // nothing is sent while Google refuses
				if err := try(); err != nil {
					l.Errorf("after the fault: %v", err)
				}
			})
		})
	}
}

// TestFaultsOfMachines has machines that cannot be created, or are created again.
func TestFaultsOfMachines(t *testing.T) {
	for _, fault := range []string{"stockout", "quota=1", "operation-lost"} {
		t.Run(fault, func(t *testing.T) {
			inBubble(t, func(l *lab) {
				l.c.Seed(group, 1)
				p := l.provider()
				if err := l.c.SetFaults([]string{fault}); err != nil {
					t.Fatal(err)
				}
				// A lost operation is an error, or the creation is accepted and nothing comes of it.
				_, _ = p.CreateInstances(l.Context(), group, []string{strings.Repeat("a", 24)})
				time.Sleep(time.Minute)
				if n := l.ready(); n != 1 {
					l.Errorf("%d machines are ready during the fault, want 1", n)
				}
				if err := l.c.SetFaults(nil); err != nil {
					l.Fatal(err)
				}
				if _, err := l.provider().CreateInstances(l.Context(), group, []string{strings.Repeat("b", 24)}); err != nil {
					l.Fatal(err)
				}
				time.Sleep(2 * time.Minute)
				want := 3
				if fault == "operation-lost" { // for good
					want = 2
				}
				if n := l.ready(); n != want {
					l.Errorf("%d machines are ready after the fault, want %d", n, want)
				}
			})
		})
	}
}

func TestFaultsThatAreNotValid(t *testing.T) {
	c, err := gcptest.New(func(p string) { t.Error(p) }, gcptest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetFaults([]string{"stockout"}); err != nil {
		t.Fatal(err)
	}
	for fault, want := range map[string]string{
		"flood": "unknown", "api-429=2": "at most 1", "api-500=x": "invalid syntax", "quota=0": "1 or more", "role-revoked": "name a permission", "name-reuse": "name a machine", "api-latency=-1s": "positive",
	} {
		if err := c.SetFaults([]string{fault}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("fault %s: %v, want %q", fault, err, want)
		}
	}
	if got := c.Faults(); len(got) != 1 {
		t.Errorf("a refusal changed the faults to %q", got)
	}
}
