// Package wire has the parts that emulators of vendors' clouds share. Emulators run in tests and in sandboxes.
//
// An emulator is a [Vendor] behind a [Gate]. The gate refuses each request that the vendor's own schema
// does not have, and reports it: a test fails, a sandbox logs it. Then it checks credentials and rate limits,
// counts the call, and passes it to the vendor. Answers are checked with the schema, too.
//
// The vendor's machines are those of a [Fleet]: [Records] has machines that exist in memory only.
package wire

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"constellation/engine/cloud"
)

// Call is a request that satisfies the schema of the vendor.
type Call struct {
	// Method is the ID of the method in the vendor's schema, such as compute.instances.list.
	Method string
	// Params are the parameters of path and query.
	Params map[string]string
	// Body is the body as it was sent; empty: none.
	Body []byte
	// Limit is the rate limit that the call counts for.
	Limit string
}

// Reply is an answer.
type Reply struct {
	Status int
	Header http.Header
	Body   []byte
}

// Vendor is a cloud with its schema and its semantics. It is safe for concurrent use.
type Vendor interface {
	// Request returns the call of a request. The problems name each parameter and field that the schema
	// does not have, or whose value it does not allow.
	Request(r *http.Request, body []byte) (Call, []string)
	// Response returns the problems of a successful answer.
	Response(call Call, body []byte) []string
	// Authorize returns the refusal of a request without the right credentials; nil: it has them.
	Authorize(r *http.Request, call Call) *Reply
	// Invalid is the answer to a request with problems, Throttled that above a rate limit.
	Invalid(problems []string) Reply
	Throttled(limit string) Reply
	// Serve answers a call.
	Serve(ctx context.Context, call Call) Reply
}

// Gate is an emulated cloud as clients see it. It is safe for concurrent use.
type Gate struct {
	vendor Vendor
	limits map[string]int
	fail   func(problem string)

	mu      sync.Mutex
	calls   map[string]int
	window  time.Time // start of the minute that is counted
	used    map[string]int
	refused []refusal
}

// refusal is a scripted answer.
type refusal struct {
	method string
	times  int
	reply  Reply
}

// NewGate returns the gate of a vendor. Each of the limits has so many calls in a minute of the clock;
// others are not limited. fail is called for each problem.
func NewGate(v Vendor, limits map[string]int, fail func(problem string)) *Gate {
	return &Gate{vendor: v, limits: limits, fail: fail, calls: map[string]int{}, used: map[string]int{}}
}

// Calls counts the calls by method, with those that were refused after the schema was checked.
func (g *Gate) Calls() map[string]int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return maps.Clone(g.calls)
}

// Total is the number of calls.
func (g *Gate) Total() int {
	n := 0
	for _, calls := range g.Calls() {
		n += calls
	}
	return n
}

// Refuse answers the next calls of a method with a reply instead of the vendor's.
func (g *Gate) Refuse(method string, times int, reply Reply) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.refused = append(g.refused, refusal{method, times, reply})
}

// enter counts a call. It returns the answer to a call that is refused.
func (g *Gate) enter(call Call) *Reply {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.calls[call.Method]++
	if minute := time.Now().Truncate(time.Minute); !minute.Equal(g.window) {
		g.window = minute
		clear(g.used)
	}
	g.used[call.Limit]++
	if most, ok := g.limits[call.Limit]; ok && g.used[call.Limit] > most {
		r := g.vendor.Throttled(call.Limit)
		return &r
	}
	for n := range g.refused {
		if r := &g.refused[n]; r.method == call.Method && r.times > 0 {
			r.times--
			return &r.reply
		}
	}
	return nil
}

// ServeHTTP implements http.Handler.
func (g *Gate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 16<<20))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	reply := g.serve(r, body)
	maps.Copy(w.Header(), reply.Header)
	w.Header().Set("Content-Type", "application/json; charset=UTF-8")
	w.WriteHeader(reply.Status)
	_, _ = w.Write(reply.Body) // the client may be gone
}

func (g *Gate) serve(r *http.Request, body []byte) Reply {
	call, problems := g.vendor.Request(r, body)
	if len(problems) > 0 {
		for _, p := range problems {
			g.fail(fmt.Sprintf("request %s %s: %s", r.Method, r.URL.Path, p))
		}
		return g.vendor.Invalid(problems)
	}
	if refused := g.vendor.Authorize(r, call); refused != nil {
		return *refused
	}
	if refused := g.enter(call); refused != nil {
		return *refused
	}
	reply := g.vendor.Serve(r.Context(), call)
	if reply.Status < http.StatusMultipleChoices {
		for _, p := range g.vendor.Response(call, reply.Body) {
			g.fail("answer to " + call.Method + ": " + p)
		}
	}
	return reply
}

// Transport returns a transport that calls a handler without a network. It works in a bubble of package
// testing/synctest.
func Transport(h http.Handler) http.RoundTripper { return transport{h} }

type transport struct{ http.Handler }

// RoundTrip implements http.RoundTripper.
func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	r = r.Clone(r.Context())
	if r.Body == nil {
		r.Body = http.NoBody
	}
	rec := &recorder{header: http.Header{}, status: http.StatusOK}
	t.ServeHTTP(rec, r)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	return &http.Response{
		Status: http.StatusText(rec.status), StatusCode: rec.status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: rec.header,
		Body: io.NopCloser(&rec.body), ContentLength: int64(rec.body.Len()), Request: r,
	}, nil
}

// recorder implements http.ResponseWriter.
type recorder struct {
	header http.Header
	status int
	body   bytes.Buffer
}

// Header implements http.ResponseWriter.
func (r *recorder) Header() http.Header { return r.header }

// WriteHeader implements http.ResponseWriter.
func (r *recorder) WriteHeader(status int) { r.status = status }

// Write implements http.ResponseWriter.
func (r *recorder) Write(b []byte) (int, error) { return r.body.Write(b) }

// Machine describes a machine that a cloud creates.
type Machine struct {
	// ID is never used again. Name may be.
	ID, Name string
	Group    string
	Role     cloud.Role
	Image    string
	Token    string
}

// Place is where a machine is in the network.
type Place struct {
	IP netip.Addr
	// Pods is the range that the cloud routes to the machine; invalid: none.
	Pods netip.Prefix
}

// Fleet has the machines of an emulated cloud. It is safe for concurrent use.
type Fleet interface {
	// Start starts a machine and returns its addresses, before it has booted.
	Start(m Machine) (Place, error)
	// Stop ends the machine of an ID for good. It returns before the machine is gone.
	Stop(id string)
	// State returns how far a machine is: cloud.Creating, Ready, Failed, Stopped, Terminating, or
	// Terminated if there is none.
	State(id string) cloud.State
}

// Records is a Fleet of machines that run nothing: a clock alone decides how far they are.
type Records struct {
	// Boot is from the start of a machine until it is ready. Off is from its end until it is gone.
	Boot, Off time.Duration

	mu   sync.Mutex
	next uint32
	all  map[string]*record
}

type record struct {
	started, stopped time.Time
}

// Start implements Fleet.
func (f *Records) Start(m Machine) (Place, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.all == nil {
		f.all = map[string]*record{}
	}
	f.all[m.ID] = &record{started: time.Now()}
	f.next++
	return Place{IP: netip.AddrFrom4([4]byte{10, byte(f.next >> 16), byte(f.next >> 8), byte(f.next)})}, nil
}

// Stop implements Fleet.
func (f *Records) Stop(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r := f.all[id]; r != nil && r.stopped.IsZero() {
		r.stopped = time.Now()
	}
}

// State implements Fleet.
func (f *Records) State(id string) cloud.State {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.all[id]
	switch {
	case r == nil:
		return cloud.Terminated
	case !r.stopped.IsZero() && time.Since(r.stopped) >= f.Off:
		delete(f.all, id)
		return cloud.Terminated
	case !r.stopped.IsZero():
		return cloud.Terminating
	case time.Since(r.started) < f.Boot:
		return cloud.Creating
	}
	return cloud.Ready
}
