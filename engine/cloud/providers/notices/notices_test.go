package notices_test

import (
	"testing"

	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/providers/notices"
)

// TestOf checks which providers announce something.
func TestOf(t *testing.T) {
	for _, name := range append(providers.Names(), "", "unknown") {
		if source := notices.Of(name, ""); (source != nil) != (name == gcp.Name) {
			t.Errorf("provider %q announces something: %t", name, source != nil)
		}
	}
}
