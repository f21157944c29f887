package cloud

import "testing"

func TestKeysAreSplit(t *testing.T) {
	for _, tt := range []struct{ id, incarnation, key string }{
		{"gce://p/z/worker-0", "4711", "gce://p/z/worker-0#4711"},
		{"aws:///z/i-1", "", "aws:///z/i-1"},
		{"", "4711", ""},
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
		{"odd://p/w#", "", "odd://p/w"},
		{"odd://p/w#2", "", "odd://p/w"},
		{"odd://p/w#2", "1", "odd://p/w#1"},
		{"#", "1", ""},
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
