package cloud

import "testing"

func TestKeysAreSplit(t *testing.T) {
	for _, tt := range []struct{ id, incarnation, key string }{
		{id: "gce://p/z/worker-0", incarnation: "4711", key: "gce://p/z/worker-0#4711"},
		{id: "aws:///z/i-1", incarnation: "", key: "aws:///z/i-1"},
		{id: "", incarnation: "4711", key: ""},
	} {
		key := Instance{ProviderID: tt.id, Incarnation: tt.incarnation}.Key()
		if key != tt.key {
			t.Errorf("key %q of %q, %q, want %q", key, tt.id, tt.incarnation, tt.key)
		}
		if id, incarnation := SplitKey(key); id != tt.id || tt.id != "" && incarnation != tt.incarnation {
			t.Errorf("%q was split into %q, %q", key, id, incarnation)
		}
	}
}

// A kubelet chooses the provider ID of its Node. With a fragment it could name the machine of another
// key, or one that differs from the cloud's key of the same machine.
func TestKeysHaveNoFragmentOfTheID(t *testing.T) {
	for _, tt := range []struct{ id, incarnation, key string }{
		{id: "odd://p/w#", incarnation: "", key: "odd://p/w"},
		{id: "odd://p/w#2", incarnation: "", key: "odd://p/w"},
		{id: "odd://p/w#2", incarnation: "1", key: "odd://p/w#1"},
		{id: "#", incarnation: "1", key: ""},
	} {
		if key := Key(tt.id, tt.incarnation); key != tt.key {
			t.Errorf("key of %q, %q is %q, want %q", tt.id, tt.incarnation, key, tt.key)
		}
	}
}

func TestSameMachine(t *testing.T) {
	for _, tt := range []struct {
		name, a, b string
		want       bool
	}{
		{name: "the same key", a: "odd://p/w#1", b: "odd://p/w#1", want: true},
		{name: "another case of the ID", a: "odd://P/w#1", b: "odd://p/w#1", want: true},
		{name: "another incarnation", a: "odd://p/w#1", b: "odd://p/w#2", want: false},
		{name: "an ID without incarnation", a: "odd://p/w", b: "odd://p/w#2", want: true},
		{name: "another ID", a: "odd://p/w#1", b: "odd://p/v#1", want: false},
	} {
		if got := SameMachine(tt.a, tt.b); got != tt.want {
			t.Errorf("%s: %t, want %t", tt.name, got, tt.want)
		}
	}
}
