package check

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/distribution"
)

// slowServer answers after a second.
type slowServer struct{ err error }

func (s slowServer) Version(context.Context) (string, error) {
	time.Sleep(time.Second)
	return "v1.35.4", s.err
}

func (slowServer) Observe(context.Context) (distribution.Facts, NodeList, error) {
	return distribution.Facts{}, NodeList{}, nil
}

func TestLookMeasuresItself(t *testing.T) {
	for _, err := range []error{nil, cluster.ErrForbidden} {
		synctest.Test(t, func(t *testing.T) {
			if g := Look(t.Context(), slowServer{err}, cluster.Selected{}, time.Now()); g.TookMS != 1000 {
				t.Errorf("%s: took %d ms, want 1000", g.State, g.TookMS)
			}
		})
	}
}
