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
		{"the same key", "odd://p/w#1", "odd://p/w#1", true},
		{"another case of the ID", "odd://P/w#1", "odd://p/w#1", true},
		{"another incarnation", "odd://p/w#1", "odd://p/w#2", false},
		{"an ID without incarnation", "odd://p/w", "odd://p/w#2", true},
		{"another ID", "odd://p/w#1", "odd://p/v#1", false},
	} {
		if got := SameMachine(tt.a, tt.b); got != tt.want {
			t.Errorf("%s: %t, want %t", tt.name, got, tt.want)
		}
	}
}
