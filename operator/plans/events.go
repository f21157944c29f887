package plans

import (
	"context"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record/util"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/operator/api/upgradev1"
	"constellation/operator/replica"
)

// eventWriter writes events in the background. client-go's recorder keeps each event for up to twelve
// minutes, to count repetitions. For ten thousand nodes that takes more memory than the nodes
// themselves, and events about changes do not repeat.
type eventWriter struct {
	client     client.Client
	name, host string
	log        *slog.Logger
	queue      chan *corev1.Event
	coreDenied atomic.Bool // RBAC permits events of events.k8s.io only
}

const (
	eventQueue   = 2048
	eventWriters = 8
	eventTries   = 5
	// noteLimit is the API's limit of a message.
	noteLimit = 1024
)

func newEventWriter(c client.Client, name string, log *slog.Logger) *eventWriter {
	host, _ := os.Hostname()
	return &eventWriter{client: c, name: name, host: host, log: log, queue: make(chan *corev1.Event, eventQueue)}
}

// note queues an event of a Plan. It does not block: events are dropped when the queue is full.
func (t *eventWriter) note(p *upgradev1.Plan, e event) {
	now := time.Now()
	out := &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: util.GenerateEventName(p.Name, now.UnixNano())},
		EventTime:  metav1.NewMicroTime(now), FirstTimestamp: metav1.NewTime(now), LastTimestamp: metav1.NewTime(now), Count: 1,
		ReportingController: t.name, ReportingInstance: t.name + "-" + t.host, Source: corev1.EventSource{Component: t.name, Host: t.host},
		Type: corev1.EventTypeNormal, Action: "CarryOut", Reason: e.reason, Message: e.note,
		InvolvedObject: corev1.ObjectReference{
			APIVersion: upgradev1.GroupVersion.String(), Kind: "Plan", Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion,
		},
	}
	if e.warning {
		out.Type = corev1.EventTypeWarning
	}
	if e.node != "" {
		out.Related = &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: e.node}
	}
	if len(out.Message) > noteLimit {
		out.Message = cut(out.Message, noteLimit-len("…")) + "…"
	}
	select {
	case t.queue <- out:
	default:
		t.log.Warn("event dropped, queue is full", "plan", p.Name, "reason", e.reason)
	}
}

// run writes events until ctx ends, and then the queued ones.
func (t *eventWriter) run(ctx context.Context) {
	for {
		select {
		case e := <-t.queue:
			t.write(ctx, e)
			continue
		case <-ctx.Done():
		}
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), replica.RetryPeriod)
		defer cancel()
		for {
			select {
			case e := <-t.queue:
				t.write(last, e)
			default:
				return
			}
		}
	}
}

// create creates an event of the core group. Only that group's API accepts the times, count and
// source that most readers of events use; both APIs have the same objects. The manifests of earlier
// versions permit events.k8s.io alone.
func (t *eventWriter) create(ctx context.Context, e *corev1.Event) error {
	if !t.coreDenied.Load() {
		if err := t.client.Create(ctx, e); !apierrors.IsForbidden(err) {
			return err
		}
	}
	err := t.client.Create(ctx, &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: e.Namespace, Name: e.Name}, Regarding: e.InvolvedObject, Related: e.Related, Type: e.Type, Reason: e.Reason, Action: e.Action, Note: e.Message,
		EventTime: e.EventTime, ReportingController: e.ReportingController, ReportingInstance: e.ReportingInstance,
	})
	if err == nil {
		t.coreDenied.Store(true)
	}
	return err
}

// write creates an event, and retries while the API server does not answer.
func (t *eventWriter) write(ctx context.Context, e *corev1.Event) {
	var err error
	for range eventTries {
		if err = t.create(ctx, e); err == nil || apierrors.ReasonForError(err) != metav1.StatusReasonUnknown {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(replica.RetryPeriod):
		}
	}
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.log.Warn("event not written", "plan", e.InvolvedObject.Name, "reason", e.Reason, "err", err)
	}
}
