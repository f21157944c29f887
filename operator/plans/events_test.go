package plans

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/operator/replica"
)

// creating is a client that only creates.
type creating struct {
	client.Client
	create func(*corev1.Event) error
}

// Create records events of events.k8s.io as events of the core group, with a mark.
func (c creating) Create(_ context.Context, o client.Object, _ ...client.CreateOption) error {
	if e, ok := o.(*eventsv1.Event); ok {
		return c.create(&corev1.Event{Type: e.Type, Reason: "new:" + e.Reason, Message: e.Note, Related: e.Related})
	}
	return c.create(o.(*corev1.Event))
}

func TestEventsAreWritten(t *testing.T) {
	down := errors.New("connection refused")
	denied := apierrors.NewForbidden(schema.GroupResource{Resource: "events"}, "", nil)
	for _, tt := range []struct {
		name    string
		answers []error // the last one is that of all others
		ends    bool    // the controller does, before anything is written
		events  []event
		want    []string
		tries   int
	}{
		{name: "with the related node", answers: []error{nil}, events: []event{{reason: "JobComplete", note: "done", node: "n1"}}, want: []string{"Normal JobComplete done Node/n1"}, tries: 1},
		{name: "retried while the API server is down", answers: []error{down, down, nil}, events: []event{{warning: true, reason: "JobFailed", note: "no"}}, want: []string{"Warning JobFailed no"}, tries: 3},
		{name: "not retried indefinitely", answers: []error{down}, events: []event{{reason: "Complete"}}, tries: eventTries},
		{name: "by events.k8s.io if the core group is forbidden", answers: []error{denied, nil}, events: []event{{reason: "A", note: "a"}, {reason: "B", note: "b"}}, want: []string{"Normal new:A a", "Normal new:B b"}, tries: 3},
		{name: "not retried if both APIs are forbidden", answers: []error{denied}, events: []event{{reason: "Complete"}}, tries: 2},
		{name: "truncated to the API's limit", answers: []error{nil}, events: []event{{reason: "Waiting", note: strings.Repeat("ä", 600)}}, want: []string{"Normal Waiting " + strings.Repeat("ä", 510) + "…"}, tries: 1},
		{name: "queued events at the end", answers: []error{nil}, ends: true, events: []event{{reason: "A", note: "a"}, {reason: "B", note: "b"}}, want: []string{"Normal A a", "Normal B b"}, tries: 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var got []string
				tries := 0
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				k := newEventWriter(creating{create: func(e *corev1.Event) error {
					err := tt.answers[min(tries, len(tt.answers)-1)]
					if tries++; err != nil {
						return err
					}
					said := fmt.Sprintf("%s %s %s", e.Type, e.Reason, e.Message)
					if e.Related != nil {
						said += " " + e.Related.Kind + "/" + e.Related.Name
					}
					got = append(got, said)
					return nil
				}}, "system-upgrade-controller", slog.New(slog.DiscardHandler))
				if tt.ends {
					cancel()
				}
				for _, e := range tt.events {
					k.note(planOf(), e)
				}
				done := make(chan struct{})
				go func() { defer close(done); k.run(ctx) }()
				if !tt.ends {
					// As long as it tries.
					for range eventTries {
						synctest.Wait()
						time.Sleep(replica.RetryPeriod)
					}
					cancel()
				}
				<-done
				if !slices.Equal(got, tt.want) || tries != tt.tries {
					t.Errorf("%d tries, written: %q; want %d, %q", tries, got, tt.tries, tt.want)
				}
			})
		})
	}
}
