package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
)

// api serves the requests of machines and of the host. Each listener has its own handler.
type api struct {
	*Control
	log    *slog.Logger
	fleet  *fleet
	mirror *mirror
	images func() []cloud.Image
	// refresh offers the Kubernetes versions that were fetched since the start.
	refresh func()
	// info adds the data that neither the fleet nor the mirror has.
	info func(*sandboxapi.Info)
	// shutdown ends the daemon after the response is sent. It deletes all machines first if requested.
	shutdown func(ctx context.Context, machines bool) error
}

// metadata serves each machine its own metadata. The source address identifies the machine.
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
			// A machine without metadata never joins. It polls until it gets them.
			if flt := a.fleet.Faults(); strikes(flt.metadataFail) || flt.NeverJoins(self.Name) {
				a.refuse(w, errInjected)
				return
			}
			v, err := answer(self)
			a.reply(w, v, err)
		})
	}
	about("/v1/self", func(self cloud.Instance) (any, error) { return self, nil })
	about("/v1/peers", func(self cloud.Instance) (any, error) {
		return sandboxapi.Peers{Instances: a.fleet.Faults().partial(a.fleet.Instances(), self.Name)}, nil
	})
	about("/v1/loadbalancer", func(cloud.Instance) (any, error) {
		s, _ := a.fleet.snapshot()
		return sandboxapi.LoadBalancer{Host: s.gateway().String()}, nil
	})
	about("/v1/initsecrethash", func(cloud.Instance) (any, error) {
		s, _ := a.fleet.snapshot()
		return sandboxapi.InitSecretHash{SHA256: s.InitSecretSHA256}, nil
	})
	about("/v1/podcidr", func(cloud.Instance) (any, error) { return sandboxapi.PodCIDR{CIDR: podCIDR}, nil })
	about("/v1/token", func(self cloud.Instance) (any, error) {
		if self.Role != cloud.ControlPlane {
			return nil, fmt.Errorf("%w: only control planes get the token of the control API", cloud.ErrDenied)
		}
		s, _ := a.fleet.snapshot()
		return sandboxapi.Token{Token: s.Token}, nil
	})
	return mux
}

// caller identifies a machine by its source address. Pods have addresses of their own, so a pod
// is not identified unless it uses the host network. All processes of simulated machines
// have the same source address, so each machine has its own destination address.
func (a *api) caller(r *http.Request) (cloud.Instance, error) {
	address := r.RemoteAddr
	if s, _ := a.fleet.snapshot(); s.Simulated {
		if l, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
			address = l.String()
		}
	}
	ap, err := netip.ParseAddrPort(address)
	if err == nil {
		if i, ok := a.fleet.byIP(ap.Addr()); ok && i.State != cloud.Terminated {
			return i, nil
		}
	}
	return cloud.Instance{}, fmt.Errorf("%w: %s is no machine of this sandbox", cloud.ErrDenied, r.RemoteAddr)
}

// control is the API for control planes, which authenticate with the token.
func (a *api) control() http.Handler { return a.Network(a.more) }

// host is the API on the owner's socket: the control API without token and faults, and the
// calls that concern the whole sandbox.
func (a *api) host() http.Handler {
	return a.Host(func(mux *http.ServeMux) {
		a.more(mux)
		mux.HandleFunc("POST /v1/shutdown", func(w http.ResponseWriter, r *http.Request) {
			a.reply(w, nil, a.shutdown(r.Context(), r.URL.Query().Get("machines") == "true"))
		})
	})
}

// more adds the calls that only sandboxes of real machines have.
func (a *api) more(mux *http.ServeMux) {
	mux.HandleFunc("GET /v1/sandbox", func(w http.ResponseWriter, _ *http.Request) {
		a.refresh()
		a.reply(w, a.describe(), nil)
	})
	mux.HandleFunc("GET /v1/images", func(w http.ResponseWriter, _ *http.Request) {
		a.reply(w, sandboxapi.ImageList{Images: a.images()}, nil)
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
		statement, unsigned := a.mirror.vouch(version, l)
		a.reply(w, sandboxapi.ComponentList{Components: l, Statement: statement, Agent: a.mirror.enrolment()}, errors.Join(err, unsigned))
	})
	a.object(mux, "POST "+machinePath+"/reboot", func(r *http.Request) (any, error) {
		return nil, a.fleet.reboot(r.Context(), r.PathValue("machine"))
	})
	a.object(mux, "POST "+machinePath+"/stop", func(r *http.Request) (any, error) {
		return nil, a.fleet.stop(r.Context(), r.PathValue("machine"), "its plug was pulled")
	})
}

// describe returns all data of the sandbox, for its owner.
func (a *api) describe() sandboxapi.Info {
	s, _ := a.fleet.snapshot()
	info := sandboxapi.Info{
		Name: s.Name, UID: s.UID, Release: s.Release, Kubernetes: s.Kubernetes, KubernetesVersions: a.mirror.list(),
		KubernetesEndpoint: loopback(s.KubernetesPort), InitEndpoint: loopback(s.InitPort), LoadBalancer: s.gateway(),
		Workspace: s.Workspace, Groups: s.groups(), Faults: slices.Concat(s.CloudFaults, s.Faults), Created: s.Created, Machines: []sandboxapi.Machine{},
	}
	for _, i := range s.ordered() {
		info.Machines = append(info.Machines, sandboxapi.Machine{
			Instance: s.describe(i), Boot: i.Boot, Started: i.Started, Console: a.fleet.platform.Console(i.Name),
		})
	}
	a.info(&info)
	return info
}

func loopback(port uint16) string {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port).String()
}

// serveHTTP serves h on l until ctx ends, then waits for requests in flight.
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
