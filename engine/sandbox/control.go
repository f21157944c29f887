package sandbox

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
)

// Fleet is what a [Control] manages: the machines of one sandbox. The fleet of [Serve]
// runs on this computer, the fleet of package hollow is a simulation. Methods may be
// called concurrently and never wait for machines. Groups and machines are identified by
// name, images by version. Errors wrap those of package cloud, or [ErrConflict].
type Fleet interface {
	// Sandbox returns the name that is part of every ID.
	Sandbox() string
	// Token returns the bearer token for callers over the network. If it is empty, all are refused.
	Token() string

	Groups() []cloud.Group
	// Instances returns all instances that are not gone, always in the same order.
	Instances() []cloud.Instance
	Instance(name string) (cloud.Instance, bool)

	SetImage(group, version string) error
	SetCount(ctx context.Context, group string, count int) error
	// Create makes one instance per token: all of the new ones or none. Instances of known tokens
	// are returned again. The order is that of tokens. A deleted instance is Terminated.
	Create(ctx context.Context, group string, tokens []string) ([]cloud.Instance, error)
	// Remove deletes the named instances and ignores unknown names.
	Remove(names ...string) error

	// Faults returns the active faults; never nil.
	Faults() *Faults
	SetFaults(spec []string) error
}

// Reasons to refuse a request.
var (
	// ErrConflict means that the request conflicts with the current state.
	ErrConflict = errors.New("not possible")

	errNoSuch   = fmt.Errorf("%w in this sandbox", cloud.ErrNotFound)
	errCapacity = errors.New("this computer can run no more machines")
	errInjected = fmt.Errorf("%w: a fault was asked for", cloud.ErrUnavailable)
	errTimeout  = fmt.Errorf("%w: no answer in time, a fault was asked for", cloud.ErrUnavailable)
	errNoToken  = errors.New("a bearer token is needed")
	errRequest  = errors.New("bad request")
)

// Control is the control API of a [Fleet], subject to the active faults.
type Control struct {
	log   *slog.Logger
	fleet Fleet

	// The delayed view that callers get while descriptions lag.
	mu    sync.Mutex
	view  []cloud.Instance
	taken time.Time
}

// NewControl returns the control API of a fleet.
func NewControl(fleet Fleet, log *slog.Logger) *Control { return &Control{fleet: fleet, log: log} }

// Network returns the API for control planes, which authenticate with the token.
// It is subject to faults. more, unless nil, adds routes.
func (c *Control) Network(more func(*http.ServeMux)) http.Handler {
	mux := http.NewServeMux()
	c.routes(mux, true)
	if more != nil {
		more(mux)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !c.authorized(r.Header.Get("Authorization")) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			c.refuse(w, errNoToken)
			return
		}
		flt := c.fleet.Faults()
		if flt.latency > 0 {
			select {
			case <-time.After(flt.latency):
			case <-r.Context().Done():
				return
			}
		}
		switch {
		case strikes(flt.throttle):
			c.refuse(w, cloud.ErrThrottled)
		case strikes(flt.fail):
			c.refuse(w, errInjected)
		default:
			mux.ServeHTTP(w, r)
		}
	})
}

// Host returns the API for the owner. It needs no token, is not subject to faults, and
// sets them. more, unless nil, adds routes.
func (c *Control) Host(more func(*http.ServeMux)) http.Handler {
	mux := http.NewServeMux()
	c.routes(mux, false)
	mux.HandleFunc("GET /v1/faults", func(w http.ResponseWriter, _ *http.Request) {
		c.reply(w, sandboxapi.FaultList{Faults: c.fleet.Faults().Spec()}, nil)
	})
	mux.HandleFunc("PUT /v1/faults", func(w http.ResponseWriter, r *http.Request) {
		var l sandboxapi.FaultList
		err := decode(r, &l)
		if err == nil {
			err = c.fleet.SetFaults(l.Faults)
		}
		c.reply(w, nil, err)
	})
	if more != nil {
		more(mux)
	}
	return mux
}

// authorized compares digests in constant time, which also hides the length.
func (c *Control) authorized(header string) bool {
	secret := c.fleet.Token()
	token, ok := strings.CutPrefix(header, "Bearer ")
	got, want := sha256.Sum256([]byte(token)), sha256.Sum256([]byte(secret))
	return subtle.ConstantTimeCompare(got[:], want[:]) == 1 && ok && secret != ""
}

// Paths of a group and of a machine.
const (
	groupPath   = "/v1/sandboxes/{sandbox}/groups/{group}"
	machinePath = "/v1/sandboxes/{sandbox}/instances/{machine}"
)

// routes adds the routes of both APIs. faulty marks the one that is subject to faults.
func (c *Control) routes(mux *http.ServeMux, faulty bool) {
	active := func() *Faults {
		if !faulty {
			return &Faults{}
		}
		return c.fleet.Faults()
	}
	mux.HandleFunc("GET /v1/groups", func(w http.ResponseWriter, _ *http.Request) {
		c.reply(w, sandboxapi.GroupList{Groups: c.fleet.Groups()}, nil)
	})
	mux.HandleFunc("GET /v1/instances", func(w http.ResponseWriter, _ *http.Request) {
		flt := active()
		l := flt.partial(c.seen(flt), "")
		out := sandboxapi.InstanceList{Instances: l}
		if n := len(l); n > 0 && strikes(flt.toldPartial) {
			out.Instances, out.Partial = slices.Clone(l[:rand.IntN(n)]), true
		}
		c.reply(w, out, nil)
	})
	mux.HandleFunc("POST /v1/instances/describe", func(w http.ResponseWriter, r *http.Request) {
		var in sandboxapi.SomeInstances
		var names []string
		err := decode(r, &in)
		if err == nil {
			names, err = c.names(in.ProviderIDs)
		}
		c.reply(w, sandboxapi.InstanceList{Instances: c.describe(names, active())}, err)
	})
	mux.HandleFunc("POST /v1/instances/delete", func(w http.ResponseWriter, r *http.Request) {
		var in sandboxapi.OldInstances
		err := decode(r, &in)
		if err == nil {
			err = c.delete(in.ProviderIDs, active())
		}
		c.reply(w, nil, err)
	})
	c.object(mux, "PUT "+groupPath+"/image", func(r *http.Request) (any, error) {
		var in sandboxapi.GroupImage
		if err := decode(r, &in); err != nil {
			return nil, err
		}
		sandbox, version, err := sandboxapi.ParseImageReference(in.Image)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrConflict, err)
		}
		if sandbox != c.fleet.Sandbox() {
			return nil, fmt.Errorf("image %s: %w", in.Image, errNoSuch)
		}
		return nil, c.fleet.SetImage(r.PathValue("group"), version)
	})
	c.object(mux, "PUT "+groupPath+"/count", func(r *http.Request) (any, error) {
		var in struct {
			Count *int `json:"count"`
		}
		if err := decode(r, &in); err != nil {
			return nil, err
		}
		if in.Count == nil {
			return nil, fmt.Errorf("%w: no count given", ErrConflict)
		}
		flt := active()
		c.seen(flt)
		return nil, c.fleet.SetCount(r.Context(), r.PathValue("group"), *in.Count)
	})
	c.object(mux, "POST "+groupPath+"/instances", func(r *http.Request) (any, error) {
		var in sandboxapi.NewInstances
		if err := decode(r, &in); err != nil {
			return nil, err
		}
		for _, t := range in.Tokens {
			if !sandboxapi.ValidToken(t) {
				return nil, fmt.Errorf("%w: %q is not a token", errRequest, t)
			}
		}
		l, err := c.create(r.Context(), r.PathValue("group"), in.Tokens, active())
		return sandboxapi.InstanceList{Instances: l}, err
	})
	c.object(mux, "GET "+machinePath, func(r *http.Request) (any, error) {
		name := r.PathValue("machine")
		l := c.describe([]string{name}, active())
		if len(l) == 0 {
			return nil, fmt.Errorf("instance %s: %w", name, errNoSuch)
		}
		return l[0], nil
	})
}

// object adds a handler for objects of this sandbox.
func (c *Control) object(mux *http.ServeMux, pattern string, do func(r *http.Request) (any, error)) {
	mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		if name := r.PathValue("sandbox"); name != c.fleet.Sandbox() {
			c.refuse(w, fmt.Errorf("sandbox %s: %w, which is %s", name, errNoSuch, c.fleet.Sandbox()))
			return
		}
		v, err := do(r)
		c.reply(w, v, err)
	})
}

// create creates as many instances as the quota permits.
func (c *Control) create(ctx context.Context, group string, tokens []string, flt *Faults) ([]cloud.Instance, error) {
	c.seen(flt)
	allowed := tokens
	if flt.quota > 0 {
		there := c.fleet.Instances()
		room := flt.quota - len(there)
		allowed = nil
		for _, t := range tokens {
			if !slices.ContainsFunc(there, func(i cloud.Instance) bool { return i.Token == t }) {
				if room <= 0 {
					continue
				}
				room--
			}
			allowed = append(allowed, t)
		}
	}
	l, err := c.fleet.Create(ctx, group, allowed)
	if err != nil {
		return nil, err
	}
	if over := len(tokens) - len(allowed); over > 0 {
		c.log.Warn("fault injected", "fault", "quota", "group", group, "refused", over)
		return nil, fmt.Errorf("%w: %w: the quota is %d machines, %d more were asked for", errCapacity, cloud.ErrQuota, flt.quota, over)
	}
	if strikes(flt.createTimeout) {
		c.log.Warn("fault injected", "fault", "create-timeout", "group", group, "created", len(l))
		return nil, errTimeout
	}
	return l, nil
}

// delete deletes instances by their provider IDs.
func (c *Control) delete(ids []string, flt *Faults) error {
	c.seen(flt)
	all, err := c.names(ids)
	if err != nil {
		return err
	}
	var names []string
	for _, name := range all {
		if strikes(flt.lostDelete) {
			c.log.Warn("fault injected", "fault", "lost-delete", "node", name)
			continue
		}
		names = append(names, name)
	}
	return c.fleet.Remove(names...)
}

// names returns the names of instances of this sandbox.
func (c *Control) names(ids []string) ([]string, error) {
	names := make([]string, 0, len(ids))
	for _, id := range ids {
		sandbox, name, err := sandboxapi.ParseProviderID(id)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errRequest, err)
		}
		if sandbox != c.fleet.Sandbox() {
			return nil, fmt.Errorf("sandbox %s: %w, which is %s", sandbox, errNoSuch, c.fleet.Sandbox())
		}
		names = append(names, name)
	}
	return names, nil
}

// seen returns the instances that callers see: the current ones or, while descriptions lag,
// those of an earlier moment, at most the lag ago.
// It is also called before changes, so that these do not show at once.
func (c *Control) seen(flt *Faults) []cloud.Instance {
	if flt.describeLag <= 0 {
		return c.fleet.Instances()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := time.Now(); now.Sub(c.taken) > flt.describeLag {
		c.view, c.taken = c.fleet.Instances(), now
	}
	return c.view
}

// describe returns the existing ones of the named instances, in the order of names.
// Existence is reported without lag, except that a deleted instance stays while the lagging
// view has it. Its description may lag.
func (c *Control) describe(names []string, flt *Faults) []cloud.Instance {
	old := map[string]cloud.Instance{}
	if flt.describeLag > 0 {
		for _, i := range c.seen(flt) {
			old[i.Name] = i
		}
	}
	out := []cloud.Instance{}
	for _, name := range names {
		i, ok := old[name]
		if !ok {
			if i, ok = c.fleet.Instance(name); !ok {
				continue
			}
			if flt.describeLag > 0 {
				i.State = cloud.Creating
			}
		}
		out = append(out, i)
	}
	return out
}

func decode(r *http.Request, v any) error {
	d := json.NewDecoder(io.LimitReader(r.Body, 1<<20))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("%w: %w", errRequest, err)
	}
	return nil
}

func (c *Control) reply(w http.ResponseWriter, v any, err error) {
	if err != nil {
		c.refuse(w, err)
		return
	}
	if v == nil {
		v = struct{}{}
	}
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(v); err != nil {
		c.log.Debug("answer not sent", "err", err)
	}
}

// refuse maps errors to status codes.
func (c *Control) refuse(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError
	for _, k := range []struct {
		err    error
		status int
	}{
		{errNoToken, http.StatusUnauthorized},
		{cloud.ErrDenied, http.StatusForbidden},
		{cloud.ErrNotFound, http.StatusNotFound},
		{errRequest, http.StatusBadRequest},
		{ErrConflict, http.StatusConflict},
		{cloud.ErrThrottled, http.StatusTooManyRequests},
		{errCapacity, http.StatusServiceUnavailable},
		{errTimeout, http.StatusGatewayTimeout},
	} {
		if errors.Is(err, k.err) {
			status = k.status
			break
		}
	}
	if status >= 500 && !errors.Is(err, errInjected) && !errors.Is(err, errTimeout) {
		c.log.Warn("request failed", "err", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	problem := sandboxapi.Problem{Message: err.Error()}
	switch {
	case errors.Is(err, cloud.ErrQuota):
		problem.Reason = sandboxapi.ReasonQuota
	case errors.Is(err, errCapacity):
		problem.Reason = sandboxapi.ReasonCapacity
	}
	if err := json.NewEncoder(w).Encode(problem); err != nil {
		c.log.Debug("answer not sent", "err", err)
	}
}
