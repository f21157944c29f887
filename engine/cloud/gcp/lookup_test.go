package gcp_test

import (
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/gcptest"
)

func TestLookup(t *testing.T) {
	t.Parallel()
	m := newMachine(t, cloud.ControlPlane)
	foreign := m.Seed(m.AddGroup(zone, "foreign", cloud.Worker, "one", "another-cluster", nil), 1)[0]
	l, err := m.view.Lookup(t.Context())
	if err != nil || l.Project != gcptest.Project || l.UID != gcptest.UID {
		t.Fatalf("%+v, %v", l, err)
	}
	before := m.Calls()
	got, err := l.Instance(t.Context(), m.key)
	if err != nil {
		t.Fatal(err)
	}
	calls := m.Calls()
	if calls["compute.instances.get"]--; calls["compute.instances.get"] == 0 {
		delete(calls, "compute.instances.get")
	}
	if !maps.Equal(calls, before) {
		t.Errorf("a look-up makes other calls than one of compute.instances.get: %v, before %v", m.Calls(), before)
	}
	want, err := m.view.Instance(t.Context(), m.key)
	if err != nil {
		t.Fatal(err)
	}
	want.Created, want.Image = time.Time{}, "" // a look-up does not read them
	if got != want {
		t.Errorf("a look-up has  %+v\nthe operator has %+v", got, want)
	}
	id, number := cloud.SplitKey(m.key)
	for name, key := range map[string]string{
		"another number": cloud.Key(id, number+"0"), "another project": strings.Replace(m.key, gcptest.Project, "another-project", 1), "another cluster": foreign,
		"no machine": gcp.ProviderID(gcptest.Project, zone, "nobody"), "no key of this cloud": "sandbox://x/y",
	} {
		if i, err := l.Instance(t.Context(), key); !errors.Is(err, cloud.ErrNotFound) {
			t.Errorf("%s: %+v, %v", name, i, err)
		}
	}
	m.Revoke("compute.instances.get")
	if _, err := l.Instance(t.Context(), m.key); !errors.Is(err, cloud.ErrDenied) || !strings.Contains(err.Error(), "compute.instances.get") {
		t.Errorf("without the permission: %v", err)
	}
	m.Grant("compute.instances.get")
	m.Refuse("compute.instances.get", 1, gcptest.Refusal(503, "backendError", "busy"))
	if _, err := l.Instance(t.Context(), m.key); !errors.Is(err, cloud.ErrUnavailable) {
		t.Errorf("while Google fails: %v", err)
	}
	_, _, name, _ := gcp.ParseProviderID(m.key)
	m.Kill(name)
	deadline := time.Now().Add(20 * time.Second)
	for {
		_, err := l.Instance(t.Context(), m.key)
		if errors.Is(err, cloud.ErrNotFound) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the deleted machine: %v", err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func TestLookupWithoutAnAccount(t *testing.T) {
	t.Parallel()
	m := newMachine(t, cloud.Worker)
	l, err := m.view.Lookup(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Instance(t.Context(), m.key); !errors.Is(err, cloud.ErrDenied) || !strings.Contains(err.Error(), "add a service account") {
		t.Errorf("got %v", err)
	}
}

func TestMachinePage(t *testing.T) {
	t.Parallel()
	for id, want := range map[string]string{
		"gce://my-project/europe-west3-a/worker-x7":        "https://console.cloud.google.com/compute/instancesDetail/zones/europe-west3-a/instances/worker-x7?project=my-project",
		"gce://example.com:p/europe-west3-a/worker-x7#123": "https://console.cloud.google.com/compute/instancesDetail/zones/europe-west3-a/instances/worker-x7?project=example.com%3Ap",
		"gce://my-project/europe-west3-a/a?b":              "",
		"aws:///eu-central-1a/i-0123":                      "",
		"":                                                 "",
	} {
		if got := gcp.MachinePage(id); got != want {
			t.Errorf("page of %q is %q, want %q", id, got, want)
		}
	}
}
