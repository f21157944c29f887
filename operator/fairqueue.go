package operator

import (
	"context"
	"sync"
	"time"

	"golang.org/x/time/rate"
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// A captured kubelet may create any number of certificate requests. Three rules keep them from
// delaying those of others: users are served round-robin, independent of their requests; one request
// of a user is judged at a time, so one user never occupies all workers; and each user has a
// token bucket of judgments. Requests beyond it are delayed and none is dropped.

// certificateRequest is an item of the queue: the name of a request and the user who made it.
type certificateRequest struct{ user, name string }

// open reports whether a request is neither approved nor denied yet.
func open(csr *certificatesv1.CertificateSigningRequest) bool {
	return len(csr.Status.Conditions) == 0 && len(csr.Status.Certificate) == 0 && csr.DeletionTimestamp == nil
}

// openRequests maps a request that is open to an item, and every other one to none.
func openRequests(signer string) func(context.Context, client.Object) []certificateRequest {
	return func(_ context.Context, o client.Object) []certificateRequest {
		csr, ok := o.(*certificatesv1.CertificateSigningRequest)
		if !ok || csr.Spec.SignerName != signer || !open(csr) {
			return nil
		}
		return []certificateRequest{{csr.Spec.Username, csr.Name}}
	}
}

// fairQueue serves users round-robin. It implements workqueue.Queue, whose caller holds a lock.
type fairQueue struct {
	users   []string // that have requests, in round-robin order
	waiting map[string][]certificateRequest
	n       int
}

func newFairQueue(name string, limiter workqueue.TypedRateLimiter[certificateRequest]) workqueue.TypedRateLimitingInterface[certificateRequest] {
	fair := workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[certificateRequest]{Name: name, Queue: &fairQueue{waiting: map[string][]certificateRequest{}}})
	return workqueue.NewTypedRateLimitingQueueWithConfig(limiter, workqueue.TypedRateLimitingQueueConfig[certificateRequest]{
		Name: name, DelayingQueue: workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[certificateRequest]{Name: name, Queue: fair}),
	})
}

// Touch implements workqueue.Queue.
func (q *fairQueue) Touch(certificateRequest) {}

// Len implements workqueue.Queue.
func (q *fairQueue) Len() int { return q.n }

// Push implements workqueue.Queue.
func (q *fairQueue) Push(r certificateRequest) {
	if len(q.waiting[r.user]) == 0 {
		q.users = append(q.users, r.user)
	}
	q.waiting[r.user] = append(q.waiting[r.user], r)
	q.n++
}

// Pop implements workqueue.Queue.
func (q *fairQueue) Pop() certificateRequest {
	user := q.users[0]
	q.users = q.users[1:]
	r, left := q.waiting[user][0], q.waiting[user][1:]
	q.n--
	if len(left) == 0 {
		delete(q.waiting, user)
		return r
	}
	q.waiting[user] = left
	q.users = append(q.users, user)
	return r
}

// userLimits has a token bucket for each user. It is safe for concurrent use.
type userLimits struct {
	burst  int
	refill time.Duration
	now    func() time.Time

	mu    sync.Mutex
	users map[string]*userLimit
	swept time.Time
}

type userLimit struct {
	bucket   *rate.Limiter
	running  bool                 // one of its requests is being judged
	slots    map[string]time.Time // when a delayed request may be judged, by its name
	reported time.Time            // when a delay was reported last
}

const (
	// busyPause is how long a request waits while another one of its user is being judged.
	busyPause = 50 * time.Millisecond
	// sweepEvery is how often users without requests are forgotten, and how often the delay of
	// one user is logged at most.
	sweepEvery = time.Minute
)

func newUserLimits(burst int, refill time.Duration, now func() time.Time) *userLimits {
	return &userLimits{burst: burst, refill: refill, now: now, users: map[string]*userLimit{}}
}

// begin returns zero if the request may be judged now; end must follow. Else it returns how long
// the request has to wait, and whether that should be logged.
func (l *userLimits) begin(r certificateRequest) (pause time.Duration, report bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	l.sweep(now)
	u := l.users[r.user]
	if u == nil {
		u = &userLimit{bucket: rate.NewLimiter(rate.Every(l.refill), l.burst), slots: map[string]time.Time{}}
		l.users[r.user] = u
	}
	slot, ok := u.slots[r.name]
	if !ok {
		slot = now.Add(u.bucket.ReserveN(now, 1).DelayFrom(now))
		u.slots[r.name] = slot
	}
	if pause = slot.Sub(now); pause > 0 {
		if report = now.Sub(u.reported) >= sweepEvery; report {
			u.reported = now
		}
		return pause, report
	}
	if u.running {
		return busyPause, false
	}
	u.running = true
	delete(u.slots, r.name)
	return 0, false
}

// end ends a judgment.
func (l *userLimits) end(r certificateRequest) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.users[r.user].running = false
}

// forget drops a request that needs no judgment any more.
func (l *userLimits) forget(r certificateRequest) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if u := l.users[r.user]; u != nil {
		delete(u.slots, r.name)
	}
}

// sweep forgets users whose bucket is full again.
func (l *userLimits) sweep(now time.Time) {
	if now.Sub(l.swept) < sweepEvery {
		return
	}
	l.swept = now
	for name, u := range l.users {
		if !u.running && len(u.slots) == 0 && u.bucket.TokensAt(now) >= float64(l.burst) {
			delete(l.users, name)
		}
	}
}
