package operator

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/operator/decision"
)

// silent is an API server that never answers.
type silent struct{ client.Reader }

func (silent) Get(ctx context.Context, _ client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
	<-ctx.Done()
	return ctx.Err()
}

func TestRevokedMachinesHoldNoRound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var (
			r   revokedNames
			out bytes.Buffer
		)
		log := slog.New(slog.NewTextHandler(&out, nil))
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour) // longer than a round may take
		defer cancel()
		for range 3 {
			began := time.Now()
			w := &decision.World{Now: began, Instances: []decision.Instance{{ID: "a", Name: "worker-9", State: "Ready"}}}
			r.read(ctx, silent{}, w, &decision.Lookup{}, log)
			if took := time.Since(began); took != revokedWithin {
				t.Errorf("a round waited for %s, want %s", took, revokedWithin)
			}
			time.Sleep(revokedEvery)
		}
		if n := strings.Count(out.String(), "record of revoked machines not read"); n != 1 {
			t.Errorf("the error was logged %d times, want once: %s", n, &out)
		}
	})
}
