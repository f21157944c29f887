package kubetest

import (
	"errors"
	"testing"

	"constellation/engine/cluster"
)

func TestTwinKeepsTheContract(t *testing.T) {
	c := New()
	c.NeverReady(func(ch cluster.Chart) bool { return ch.Values["replicas"] == 1 })
	Contract(t, c, c)
}

func TestTwinThatIsDownAnswersNothing(t *testing.T) {
	c := New()
	c.SetDown(true)
	if _, err := c.Version(t.Context()); !errors.Is(err, cluster.ErrUnreachable) {
		t.Errorf("got %v", err)
	}
	c.SetDown(false)
	if _, err := c.Version(t.Context()); err != nil {
		t.Error(err)
	}
}
