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
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/local"
)

// api answers machines and the host. Each of its handlers is one listener's.
type api struct {
	log    *slog.Logger
	fleet  *fleet
	mirror *mirror
	images func() []cloud.Image
	// refresh looks for Kubernetes versions that were fetched since the start.
	refresh func()
	// info completes what the fleet and the mirror know.
	info func(*local.Info)
	// shutdown ends the daemon after the answer, first with all machines if asked to.
	shutdown func(ctx context.Context, machines bool) error
}

// metadata answers machines, each about itself, by their address.
func (a *api) metadata() http.Handler {
	mux := http.NewServeMux()
	about := func(path string, answer func(cloud.Instance) (any, error)) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
			self, err := a.caller(r)
			if err != nil {
				a.refuse(w, err)
				return
			}
			a.fleet.pass(self.IP, pointMetadata)
			if strikes(a.fleet.active().metadataFail) {
				a.refuse(w, errInjected)
				return
			}
			v, err := answer(self)
			a.reply(w, v, err)
		})
	}
	about("/v1/self", func(self cloud.Instance) (any, error) { return self, nil })
	about("/v1/peers", func(self cloud.Instance) (any, error) {
		return local.Peers{Instances: a.fleet.partial(a.fleet.instances(), self.Name)}, nil
	})
	about("/v1/loadbalancer", func(cloud.Instance) (any, error) {
		return local.LoadBalancer{Host: gateway.String()}, nil
	})
	about("/v1/initsecrethash", func(cloud.Instance) (any, error) {
		s, _ := a.fleet.snapshot()
		return local.InitSecretHash{SHA256: s.InitSecretSHA256}, nil
	})
	about("/v1/podcidr", func(cloud.Instance) (any, error) { return local.PodCIDR{CIDR: podCIDR}, nil })
	about("/v1/token", func(self cloud.Instance) (any, error) {
		if self.Role != cloud.ControlPlane {
			return nil, fmt.Errorf("%w: only control planes get the token of the control API", cloud.ErrDenied)
		}
		s, _ := a.fleet.snapshot()
		return local.Token{Token: s.Token}, nil
	})
	return mux
}

// caller identifies a machine by its address. Pods have addresses of their own, so
// a pod is nobody unless it lives in its machine's network.
func (a *api) caller(r *http.Request) (cloud.Instance, error) {
	ap, err := netip.ParseAddrPort(r.RemoteAddr)
	if err == nil {
		if i, ok := a.fleet.byIP(ap.Addr()); ok && i.State != cloud.Terminated {
			return i, nil
		}
	}
	return cloud.Instance{}, fmt.Errorf("%w: %s is no machine of this sandbox", cloud.ErrDenied, r.RemoteAddr)
}

// control is the API for control planes, who prove themselves by the token.
func (a *api) control() http.Handler {
	mux := http.NewServeMux()
	a.instances(mux)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !a.authorized(r.Header.Get("Authorization")) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			a.refuse(w, errNoToken)
			return
		}
		flt := a.fleet.active()
		if flt.latency > 0 {
			select {
			case <-time.After(flt.latency):
			case <-r.Context().Done():
				return
			}
		}
		switch {
		case strikes(flt.throttle):
			a.refuse(w, cloud.ErrThrottled)
		case strikes(flt.fail):
			a.refuse(w, errInjected)
		default:
			mux.ServeHTTP(w, r)
		}
	})
}

// authorized compares digests, in constant time and so also regardless of length.
func (a *api) authorized(header string) bool {
	s, _ := a.fleet.snapshot()
	token, ok := strings.CutPrefix(header, "Bearer ")
	got, want := sha256.Sum256([]byte(token)), sha256.Sum256([]byte(s.Token))
	return subtle.ConstantTimeCompare(got[:], want[:]) == 1 && ok && s.Token != ""
}

// host is the API on the socket that only the sandbox's owner can open: control
// without a token and without faults, and what concerns the sandbox as a whole.
func (a *api) host() http.Handler {
	mux := http.NewServeMux()
	a.instances(mux)
	mux.HandleFunc("GET /v1/faults", func(w http.ResponseWriter, _ *http.Request) {
		a.reply(w, local.FaultList{Faults: a.fleet.active().spec}, nil)
	})
	mux.HandleFunc("PUT /v1/faults", func(w http.ResponseWriter, r *http.Request) {
		var l local.FaultList
		err := decode(r, &l)
		if err == nil {
			err = a.fleet.setFaults(l.Faults)
		}
		a.reply(w, nil, err)
	})
	mux.HandleFunc("POST /v1/shutdown", func(w http.ResponseWriter, r *http.Request) {
		a.reply(w, nil, a.shutdown(r.Context(), r.URL.Query().Get("machines") == "true"))
	})
	return mux
}

// instances adds what both control APIs have.
func (a *api) instances(mux *http.ServeMux) {
	mux.HandleFunc("GET /v1/sandbox", func(w http.ResponseWriter, _ *http.Request) {
		a.refresh()
		a.reply(w, a.describe(), nil)
	})
	mux.HandleFunc("GET /v1/groups", func(w http.ResponseWriter, _ *http.Request) {
		s, _ := a.fleet.snapshot()
		a.reply(w, local.GroupList{Groups: s.groups()}, nil)
	})
	mux.HandleFunc("GET /v1/instances", func(w http.ResponseWriter, _ *http.Request) {
		a.reply(w, local.InstanceList{Instances: a.fleet.partial(a.fleet.instances(), "")}, nil)
	})
	mux.HandleFunc("GET /v1/images", func(w http.ResponseWriter, _ *http.Request) {
		a.reply(w, local.ImageList{Images: a.images()}, nil)
	})
	mux.HandleFunc("GET /v1/components", func(w http.ResponseWriter, r *http.Request) {
		version := r.URL.Query().Get("kubernetes")
		l, ok := a.mirror.components(version)
		if !ok {
			a.refresh()
			l, ok = a.mirror.components(version)
		}
		var err error
		if !ok {
			err = fmt.Errorf("%w: Kubernetes %q; this sandbox has %s, and `constellation sandbox fetch VERSION` adds one",
				errNoSuch, version, strings.Join(a.mirror.list(), ", "))
		}
		a.reply(w, local.ComponentList{Components: l}, err)
	})

	const group = "/v1/sandboxes/{sandbox}/groups/{group}"
	object := func(pattern string, do func(r *http.Request) (any, error)) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			s, _ := a.fleet.snapshot()
			if name := r.PathValue("sandbox"); name != s.Name {
				a.refuse(w, fmt.Errorf("sandbox %s: %w, which is %s", name, errNoSuch, s.Name))
				return
			}
			v, err := do(r)
			a.reply(w, v, err)
		})
	}
	object("PUT "+group+"/image", func(r *http.Request) (any, error) {
		var in local.GroupImage
		if err := decode(r, &in); err != nil {
			return nil, err
		}
		sandbox, version, err := local.ParseImageReference(in.Image)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errConflict, err)
		}
		if s, _ := a.fleet.snapshot(); sandbox != s.Name {
			return nil, fmt.Errorf("image %s: %w", in.Image, errNoSuch)
		}
		return nil, a.fleet.setImage(r.PathValue("group"), version)
	})
	object("PUT "+group+"/count", func(r *http.Request) (any, error) {
		var in struct {
			Count *int `json:"count"`
		}
		if err := decode(r, &in); err != nil {
			return nil, err
		}
		if in.Count == nil {
			return nil, fmt.Errorf("%w: no count given", errConflict)
		}
		return nil, a.fleet.setCount(r.Context(), r.PathValue("group"), *in.Count)
	})
	object("POST "+group+"/instances", func(r *http.Request) (any, error) {
		var in local.NewInstances
		if err := decode(r, &in); err != nil {
			return nil, err
		}
		for _, t := range in.Tokens {
			if !local.ValidToken(t) {
				return nil, fmt.Errorf("%w: %q is not a token", errRequest, t)
			}
		}
		l, err := a.fleet.create(r.Context(), r.PathValue("group"), in.Tokens)
		return local.InstanceList{Instances: l}, err
	})
	mux.HandleFunc("POST /v1/instances/delete", func(w http.ResponseWriter, r *http.Request) {
		var in local.OldInstances
		err := decode(r, &in)
		if err == nil {
			err = a.delete(r, in.ProviderIDs)
		}
		a.reply(w, nil, err)
	})

	const machine = "/v1/sandboxes/{sandbox}/instances/{machine}"
	object("GET "+machine, func(r *http.Request) (any, error) {
		s, _ := a.fleet.snapshot()
		i := s.instance(r.PathValue("machine"))
		if i == nil {
			return nil, fmt.Errorf("instance %s: %w", r.PathValue("machine"), errNoSuch)
		}
		return s.describe(i), nil
	})
	object("POST "+machine+"/reboot", func(r *http.Request) (any, error) {
		return nil, a.fleet.reboot(r.Context(), r.PathValue("machine"))
	})
	object("POST "+machine+"/stop", func(r *http.Request) (any, error) {
		return nil, a.fleet.stop(r.Context(), r.PathValue("machine"), "its plug was pulled")
	})
}

// delete deletes instances by their provider IDs.
func (a *api) delete(r *http.Request, ids []string) error {
	s, _ := a.fleet.snapshot()
	var names []string
	for _, id := range ids {
		sandbox, name, err := local.ParseProviderID(id)
		if err != nil {
			return fmt.Errorf("%w: %w", errRequest, err)
		}
		if sandbox != s.Name {
			return fmt.Errorf("sandbox %s: %w, which is %s", sandbox, errNoSuch, s.Name)
		}
		// The host's own deletes come without a token and are never lost.
		if r.Header.Get("Authorization") != "" && strikes(a.fleet.active().lostDelete) {
			a.log.Warn("fault injected", "fault", "lost-delete", "node", name)
			continue
		}
		names = append(names, name)
	}
	return a.fleet.remove(names...)
}

// describe tells the owner everything.
func (a *api) describe() local.Info {
	s, _ := a.fleet.snapshot()
	info := local.Info{
		Name: s.Name, UID: s.UID, Release: s.Release, Kubernetes: s.Kubernetes, KubernetesVersions: a.mirror.list(),
		KubernetesEndpoint: loopback(s.KubernetesPort), InitEndpoint: loopback(s.InitPort), LoadBalancer: gateway,
		Workspace: s.Workspace, Groups: s.groups(), Faults: s.Faults, Created: s.Created, Machines: []local.Machine{},
	}
	for _, i := range s.ordered() {
		info.Machines = append(info.Machines, local.Machine{
			Instance: s.describe(i), Boot: i.Boot, Started: i.Started, Console: a.fleet.platform.Console(i.Name),
		})
	}
	a.info(&info)
	return info
}

func loopback(port uint16) string {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port).String()
}

var (
	errInjected = fmt.Errorf("%w: a fault was asked for", cloud.ErrUnavailable)
	errNoToken  = errors.New("a bearer token is needed")
	errRequest  = errors.New("bad request")
)

func decode(r *http.Request, v any) error {
	d := json.NewDecoder(io.LimitReader(r.Body, 1<<20))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("%w: %w", errRequest, err)
	}
	return nil
}

func (a *api) reply(w http.ResponseWriter, v any, err error) {
	if err != nil {
		a.refuse(w, err)
		return
	}
	if v == nil {
		v = struct{}{}
	}
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(v); err != nil {
		a.log.Debug("answer not sent", "err", err)
	}
}

// refuse is where errors become status codes.
func (a *api) refuse(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError
	for _, c := range []struct {
		err    error
		status int
	}{
		{errNoToken, http.StatusUnauthorized},
		{cloud.ErrDenied, http.StatusForbidden},
		{errNoSuch, http.StatusNotFound},
		{errRequest, http.StatusBadRequest},
		{errConflict, http.StatusConflict},
		{cloud.ErrThrottled, http.StatusTooManyRequests},
		{errCapacity, http.StatusServiceUnavailable},
	} {
		if errors.Is(err, c.err) {
			status = c.status
			break
		}
	}
	if status >= 500 && !errors.Is(err, errInjected) {
		a.log.Warn("request failed", "err", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(local.Problem{Message: err.Error()}); err != nil {
		a.log.Debug("answer not sent", "err", err)
	}
}

// serveHTTP serves h on l until ctx ends, then lets running requests finish.
func serveHTTP(ctx context.Context, l net.Listener, h http.Handler, log *slog.Logger) error {
	s := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(done)
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
		defer cancel()
		if s.Shutdown(grace) != nil {
			s.Close()
		}
	})
	err := s.Serve(l)
	if !stop() {
		<-done
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
