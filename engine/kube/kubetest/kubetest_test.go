package kubetest

import (
	"errors"
	"testing"

	"constellation/engine"
)

func TestTwinKeepsTheContract(t *testing.T) {
	c := New()
	c.NeverReady(func(ch engine.Chart) bool { return ch.Values["replicas"] == 1 })
	Contract(t, c, c)
}

func TestTwinThatIsDownAnswersNothing(t *testing.T) {
	c := New()
	c.SetDown(true)
	if _, err := c.Version(t.Context()); !errors.Is(err, engine.ErrUnreachable) {
		t.Errorf("got %v", err)
	}
	c.SetDown(false)
	if _, err := c.Version(t.Context()); err != nil {
		t.Error(err)
	}
}
