package engine

import "testing"

func TestEndpointsOfThisComputerAreTheSameUnderAnyOfItsNames(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		same bool
	}{
		{"127.0.0.1:9000", "127.0.0.1:9000", true},
		{"localhost:9000", "127.0.0.1:9000", true},
		{"[::1]:9000", "127.0.0.1:9000", true},
		{"127.0.0.1:9001", "127.0.0.1:9000", false},
		{"10.0.0.1:9000", "127.0.0.1:9000", false},
		{"init.example:9000", "init.example:9000", true},
		{"init.example:9000", "127.0.0.1:9000", false},
		{"nonsense", "127.0.0.1:9000", false},
	} {
		if got := sameEndpoint(tt.a, tt.b); got != tt.same {
			t.Errorf("%s and %s: %t, want %t", tt.a, tt.b, got, tt.same)
		}
	}
}
