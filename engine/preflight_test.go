package engine

import "testing"

func TestEndpointsOfThisComputerAreTheSameUnderAnyOfItsNames(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		same bool
	}{
		{a: "127.0.0.1:9000", b: "127.0.0.1:9000", same: true},
		{a: "localhost:9000", b: "127.0.0.1:9000", same: true},
		{a: "[::1]:9000", b: "127.0.0.1:9000", same: true},
		{a: "127.0.0.1:9001", b: "127.0.0.1:9000", same: false},
		{a: "10.0.0.1:9000", b: "127.0.0.1:9000", same: false},
		{a: "init.example:9000", b: "init.example:9000", same: true},
		{a: "init.example:9000", b: "127.0.0.1:9000", same: false},
		{a: "nonsense", b: "127.0.0.1:9000", same: false},
	} {
		if got := sameEndpoint(tt.a, tt.b); got != tt.same {
			t.Errorf("%s and %s: %t, want %t", tt.a, tt.b, got, tt.same)
		}
	}
}
