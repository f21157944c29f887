package revocation

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func TestRefuses(t *testing.T) {
	list := List{"worker-1": {ProviderID: "sandbox://demo/worker-1"}, "worker-2": {}, "worker-5": {ProviderID: "odd://demo/worker-5#1"}}
	for _, tt := range []struct {
		name, node, key, want string
		revoked               bool
	}{
		{name: "the machine itself", node: "worker-1", key: "sandbox://demo/worker-1", want: "worker-1", revoked: true},
		{name: "another machine of the same name", node: "worker-1", key: "sandbox://demo/worker-1b", want: "worker-1"},
		{name: "the machine under another name", node: "worker-9", key: "Sandbox://demo/Worker-1", want: "worker-1", revoked: true},
		{name: "a name whose entry is damaged", node: "worker-2", key: "sandbox://demo/worker-2", want: "worker-2", revoked: true},
		{name: "another machine", node: "worker-3", key: "sandbox://demo/worker-3", want: ""},
		{name: "a machine without an ID matches no damaged entry", node: "worker-3", want: ""},
		{name: "the same incarnation", node: "worker-5", key: "odd://demo/worker-5#1", want: "worker-5", revoked: true},
		{name: "a machine that got name and ID later", node: "worker-5", key: "odd://demo/worker-5#2", want: "worker-5"},
		{name: "a machine that got the ID later, under another name", node: "worker-6", key: "odd://demo/worker-5#2", want: ""},
		{name: "a machine of the ID whose incarnation is not known", node: "worker-6", key: "odd://demo/worker-5", want: "worker-5", revoked: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, refused := list.Refuses(tt.node, tt.key)
			if got != tt.want || refused != (tt.want != "") {
				t.Errorf("got %q, %t, want %q", got, refused, tt.want)
			}
			if _, revoked := list.Revoked(tt.node, tt.key); revoked != tt.revoked {
				t.Errorf("revoked: %t, want %t", revoked, tt.revoked)
			}
		})
	}
}

func TestEntriesAreReadBack(t *testing.T) {
	since := time.Date(2026, 11, 21, 7, 5, 1, 999, time.UTC)
	e := Entry{ProviderID: "sandbox://demo/worker-1", Address: "10.42.0.12", By: "ops@laptop", Reason: "captured", Since: since, Until: since.Add(CertificateLifetime)}
	value, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"since":"2026-11-21T07:05:01Z"`, `"until":"2027-11-21T07:05:01Z"`, `"providerID":"sandbox://demo/worker-1"`, `"by":"ops@laptop"`} {
		if !strings.Contains(value, want) {
			t.Errorf("%s has no %s", value, want)
		}
	}
	list, err := Parse(map[string]string{"worker-1": value, "worker-2": "{"})
	if err == nil || !strings.Contains(err.Error(), "worker-2") || strings.Contains(err.Error(), "worker-1") {
		t.Errorf("error %v, want one that names worker-2", err)
	}
	if got := list["worker-1"]; !got.Until.Equal(since.Truncate(time.Second).Add(CertificateLifetime)) || got.Address != e.Address {
		t.Errorf("read back %+v", got)
	}
	if _, refused := list.Refuses("worker-2", ""); !refused {
		t.Error("a damaged entry does not refuse its name")
	}
	if got := list.Expired(since.Add(CertificateLifetime + time.Minute)); !slices.Equal(got, []string{"worker-1"}) {
		t.Errorf("expired %v: an entry without an end must stay", got)
	}
	if got := list.Expired(since.Add(CertificateLifetime - time.Minute)); len(got) != 0 {
		t.Errorf("expired too early: %v", got)
	}
}

// The names are what clusters of release v1.1.0 have.
func TestTokenSecretIsThatOfReleasedClusters(t *testing.T) {
	if got, want := TokenSecret("worker-1"), "bootstrap-token-47jadi"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
