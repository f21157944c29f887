package sandbox

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/release"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/machine"
	"constellation/engine/sandbox/simulated"
)

// Ports of the cloud in the sandbox's network, see the package comment.
const (
	metadataPort  = 80
	apiServerPort = 6443
	initPort      = 9000
	joinPort      = 30090
	registryPort  = 5000
	mirrorPort    = 8080
	controlPort   = 8090
)

// serveGrace is how long a stopping daemon waits for requests in flight.
const serveGrace = 5 * time.Second

// daemon is the running cloud of one sandbox.
type daemon struct {
	dirs Dirs
	name string
	log  *slog.Logger

	host     host
	ca       *attestationtest.CA
	trust    string // PEM
	fleet    *fleet
	emulator *emulator // nil: the sandbox is a cloud of its own
	mirror   *mirror
	registry *registry

	refreshing sync.Mutex
	simulated  bool
	foreign    bool            // another registry serves all images
	seen       map[string]bool // Kubernetes versions that are served
	pause      string          // image of pod sandboxes

	stop context.CancelFunc
}

// Serve runs the cloud of the sandbox called name until ctx ends or its owner shuts
// it down. Its machines keep running, and the next start adopts them.
//
// Serve requires the files that Up writes. It never runs twice: the error wraps
// machine.ErrBusy. The output of log to standard error is bounded if that is the
// sandbox's log file.
//
// For hollow machines, simulate does all of this instead, and the machines end with it.
func Serve(ctx context.Context, dirs Dirs, name string, log *slog.Logger, simulate func(context.Context, Hollow, *slog.Logger) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	log = slog.New(newBoundedLog(log.Handler(), dirs.of(name, logName), logLimit))
	st, err := readState(dirs.of(name, stateName))
	switch d := (&daemon{dirs: dirs, name: name, log: log, seen: map[string]bool{}, stop: cancel}); {
	case err == nil && st.Hollow != nil:
		err = serveHollow(ctx, dirs, st, log, simulate)
	case err == nil:
		err = d.serve(ctx, st)
	}
	if err != nil {
		return fmt.Errorf("serve sandbox %s: %w", name, err)
	}
	return nil
}

func (d *daemon) serve(ctx context.Context, st *state) (err error) {
	if d.host, err = d.dirs.host(d.name, st, d.log); err != nil {
		return err
	}
	if err := d.host.Network(ctx); err != nil {
		return err
	}
	defer d.host.Close()
	if err := self().write(d.dirs.of(d.name, pidName)); err != nil {
		return err
	}
	defer os.Remove(d.dirs.of(d.name, pidName))
	if err := d.loadCA(); err != nil {
		return err
	}
	if limit := memoryLimit(); limit > 0 {
		d.host.LimitMemory(limit)
	}

	listeners, err := d.listen(ctx, st)
	if err != nil {
		return err
	}
	if err := d.assemble(st); err != nil {
		listeners.close()
		return err
	}
	// Drivers stop after the last request was answered, because a shutdown waits for
	// machines.
	driving, endDriving := context.WithCancel(context.WithoutCancel(ctx))
	defer endDriving()
	if err := d.fleet.start(driving, st); err != nil {
		return err
	}
	d.log.Info("sandbox served", "sandbox", d.name, "machines", len(st.Instances), "pid", os.Getpid())

	err = d.servers(ctx, st, listeners).Wait()
	endDriving()
	done := make(chan struct{})
	go func() { d.fleet.wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(serveGrace):
		d.log.Warn("machine operations abandoned", "after", serveGrace)
	}
	if d.emulator != nil {
		d.log.Info("calls of the emulated cloud counted", "cloud", d.emulator.provider.Name, "calls", d.emulator.calls(), "problems", d.emulator.problems.Load())
	}
	d.log.Info("sandbox no longer served", "sandbox", d.name, "err", err)
	return err
}

// assemble makes the parts that answer requests: machines, mirror and registry.
func (d *daemon) assemble(st *state) (err error) {
	d.fleet = &fleet{
		log: d.log, platform: d.host, firmware: d.firmware, spec: d.complete, admit: d.admit,
		save: func(s *state) error { return s.write(d.dirs.of(d.name, stateName)) },
	}
	// The emulator restores its groups. It starts no machine before the fleet is started.
	if d.emulator, err = d.emulate(st); err != nil {
		return err
	}
	d.mirror = &mirror{
		log: d.log, base: "http://" + netip.AddrPortFrom(st.gateway(), mirrorPort).String(), faults: d.fleet.Faults,
		requested: func(remote string) { d.pass(remote, pointComponent) },
	}
	if d.mirror.key, err = d.releaseKey(); err != nil {
		return err
	}
	if d.mirror.agent, err = d.enrolment(st); err != nil {
		return err
	}
	d.registry = &registry{
		log: d.log, faults: d.fleet.Faults,
		pulled: func(remote string) { d.pass(remote, pointImage) },
	}
	for ref, file := range st.Containers {
		if st.Simulated || st.RegistryPort != 0 {
			break // the entries are programs, or another registry serves them
		}
		if err := d.registry.add(ref, file); err != nil {
			return err
		}
	}
	d.simulated, d.foreign = st.Simulated, st.RegistryPort != 0
	d.fetched(st.Kubernetes)
	if !d.seen[st.Kubernetes] {
		return fmt.Errorf("kubernetes %s is not in the cache any more; run `constellation sandbox fetch %s`", st.Kubernetes, st.Kubernetes)
	}
	d.refresh()
	return nil
}

// servers begins to answer requests on all listeners until ctx ends.
func (d *daemon) servers(ctx context.Context, st *state, on listeners) *errgroup.Group {
	var owned Fleet = d.fleet
	if d.emulator != nil {
		owned = emulatedFleet{d.fleet, d.emulator}
	}
	a := &api{
		Control: NewControl(owned, d.log), log: d.log, fleet: d.fleet, mirror: d.mirror, images: d.images, refresh: d.refresh, shutdown: d.shutdown,
		info: func(i *sandboxapi.Info) { i.TrustRoots, i.Emulator = d.trust, d.emulator.about() },
	}
	apiServers := d.balancer("kubernetes", func() []backend { return d.fleet.controlPlanes(apiServerPort) })
	apiServers.probe = readyz(d.host.Dial)
	inits := d.balancer("init", func() []backend { return d.fleet.initBackends() })
	inits.ordered = true
	joins := d.balancer("join", func() []backend { return d.fleet.controlPlanes(joinPort) })

	g, gctx := errgroup.WithContext(ctx)
	control, metadata, host := a.control(), a.metadata(), a.host()
	if e := d.emulator; e != nil {
		control, metadata, host = e.api, a.machineMetadata(e), e.host(host)
	}
	if st.Simulated {
		for _, l := range []*net.Listener{&on.control, &on.registry, &on.mirror} {
			*l = forOwner(*l, d.log)
		}
		control = atItsAddress(control)
		g.Go(func() error { d.metadataOfEach(gctx, metadata); return nil })
	} else {
		g.Go(func() error { return serveHTTP(gctx, on.metadata, metadata, d.log) })
	}
	g.Go(func() error { return serveHTTP(gctx, on.control, control, d.log) })
	g.Go(func() error { return serveHTTP(gctx, on.socket, host, d.log) })
	g.Go(func() error { return serveHTTP(gctx, on.registry, d.registry, d.log) })
	g.Go(func() error { return serveHTTP(gctx, on.mirror, d.mirror, d.log) })
	if on.foreign != nil {
		b := d.balancer("registry", func() []backend {
			return []backend{{name: "registry", addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), st.RegistryPort)}}
		})
		b.dial = (&net.Dialer{}).DialContext // from this computer, not from the network of the machines
		g.Go(func() error { b.run(gctx); return nil })
		g.Go(func() error { return b.serve(gctx, on.foreign) })
	}
	for _, s := range []struct {
		b *balancer
		l []net.Listener
	}{
		{apiServers, []net.Listener{on.apiServer, cuttable{on.hostAPIServer, d.fleet}}},
		{inits, []net.Listener{on.init, cuttable{on.hostInit, d.fleet}}},
		{joins, []net.Listener{on.join}},
	} {
		g.Go(func() error { s.b.run(gctx); return nil })
		for _, l := range s.l {
			g.Go(func() error { return s.b.serve(gctx, l) })
		}
	}
	return g
}

func (d *daemon) balancer(name string, backends func() []backend) *balancer {
	return &balancer{name: name, log: d.log, backends: backends, dial: d.host.Dial}
}

// readCA reads the authority that certifies attestation keys.
func (d *daemon) readCA() (cert, key []byte, err error) {
	if cert, err = os.ReadFile(d.dirs.of(d.name, caName)); err == nil {
		key, err = os.ReadFile(d.dirs.of(d.name, caKeyName))
	}
	if err != nil {
		return nil, nil, fmt.Errorf("read attestation CA: %w", err)
	}
	return cert, key, nil
}

func (d *daemon) loadCA() error {
	cert, key, err := d.readCA()
	if err != nil {
		return err
	}
	d.trust = string(cert)
	d.ca, err = attestationtest.ParseCA(cert, key)
	return err
}

// releaseKey returns the key that signs what machines install. It is nil if an older program
// made the sandbox, because its images hold no release keys.
func (d *daemon) releaseKey() (*release.PrivateKey, error) {
	b, err := os.ReadFile(d.dirs.of(d.name, releaseKeyName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read release key: %w", err)
	}
	return release.ParsePrivateKey(releaseKeyName, b)
}

// enrolment writes the enrolment program: the agent and the release keys of the newest image.
// It is empty if that image has none, as in a sandbox that an older program made.
func (d *daemon) enrolment(st *state) (binary, error) {
	fail := func(err error) (binary, error) { return binary{}, fmt.Errorf("make enrolment program: %w", err) }
	if len(st.Catalogue) == 0 {
		return binary{}, nil
	}
	var dir string
	img := st.Catalogue[len(st.Catalogue)-1] // the oldest comes first
	if dir = machine.ProgramsOf(img); st.Simulated {
		dir = img.Dir
	}
	keys, err := os.ReadFile(filepath.Join(dir, path.Base(release.MachineKeys)))
	if errors.Is(err, fs.ErrNotExist) {
		return binary{}, nil
	}
	if err != nil {
		return fail(err)
	}
	agent, err := os.ReadFile(filepath.Join(dir, "agent"))
	if err != nil {
		return fail(err)
	}
	program, err := release.Enrolment(agent, keys)
	if err != nil {
		return fail(err)
	}
	b := binary{d.dirs.of(d.name, enrolmentName), "sha256:" + digest(program)}
	if err := writeFile(b.path, program, 0o600); err != nil {
		return fail(err)
	}
	return b, nil
}

// listeners has all listeners of a daemon.
type listeners struct {
	metadata, control, registry, mirror, apiServer, init, join net.Listener // in the sandbox's network
	hostAPIServer, hostInit                                    net.Listener // on the host's loopback
	socket                                                     net.Listener // for the owner
	foreign                                                    net.Listener // in the sandbox's network, for another registry; or nil
	all                                                        []net.Listener
}

func (l listeners) close() {
	for _, x := range l.all {
		x.Close()
	}
}

func (d *daemon) listen(ctx context.Context, st *state) (l listeners, err error) {
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	if l.control, err = d.reserve(ctx, st); err != nil {
		return l, err
	}
	l.all = append(l.all, l.control)
	gateway := st.gateway()
	for _, in := range []struct {
		to   *net.Listener
		addr netip.Addr
		port uint16
	}{
		{&l.metadata, machine.MetadataAddr, metadataPort},
		{&l.registry, gateway, registryPort},
		{&l.mirror, gateway, mirrorPort},
		{&l.apiServer, gateway, apiServerPort},
		{&l.init, gateway, initPort},
		{&l.join, gateway, joinPort},
		{&l.foreign, gateway, st.RegistryPort},
	} {
		if in.port == 0 {
			continue
		}
		if st.Simulated && in.to == &l.metadata {
			continue // each machine has its own
		}
		if *in.to, err = d.host.Listen(ctx, "tcp", netip.AddrPortFrom(in.addr, in.port).String()); err != nil {
			return l, err
		}
		l.all = append(l.all, *in.to)
	}
	before := *st
	for _, out := range []struct {
		to   *net.Listener
		port *uint16
		what string
	}{
		{&l.hostAPIServer, &st.KubernetesPort, "the API server"},
		{&l.hostInit, &st.InitPort, "init"},
	} {
		if *out.to, err = hostListener(ctx, d.name, out.port, out.what); err != nil {
			return l, err
		}
		l.all = append(l.all, *out.to)
	}
	if st.KubernetesPort != before.KubernetesPort || st.InitPort != before.InitPort {
		if err := st.write(d.dirs.of(d.name, stateName)); err != nil {
			return l, err
		}
	}
	socket := d.dirs.of(d.name, socketName)
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return l, fmt.Errorf("listen on %s: %w", socket, err)
	}
	var lc net.ListenConfig
	if l.socket, err = lc.Listen(ctx, "unix", socket); err != nil {
		return l, err
	}
	l.all = append(l.all, l.socket)
	// The directory belongs to the owner alone, so no other user could connect before this.
	if err := os.Chmod(socket, 0o600); err != nil {
		return l, fmt.Errorf("listen on %s: %w", socket, err)
	}
	return l, nil
}

// reserve listens for the control API. The listener reserves the addresses of simulated machines: no
// other sandbox of this computer can listen there, also of another user. At the first start of a
// sandbox, reserve chooses them.
func (d *daemon) reserve(ctx context.Context, st *state) (net.Listener, error) {
	at := func() (net.Listener, error) {
		return d.host.Listen(ctx, "tcp", netip.AddrPortFrom(st.gateway(), controlPort).String())
	}
	if !st.Simulated || st.KubernetesPort != 0 {
		l, err := at()
		if err != nil && st.Simulated {
			err = fmt.Errorf("listen for the control API: %w; machines have addresses of %s already, so no others will do: "+
				"end the program that uses this one, or take the sandbox down", err, st.Nodes)
		}
		return l, err
	}
	taken, before := d.dirs.nodes(), st.Nodes
	for nodes := range simulated.Ranges(d.name) {
		if taken[nodes] {
			continue
		}
		st.Nodes = nodes
		l, err := at()
		switch {
		case errors.Is(err, unix.EADDRINUSE):
			continue
		case err != nil:
			return nil, cmp.Or(simulated.Check(nodes), err) // has the remedy for missing addresses
		case err == nil && nodes != before:
			err = st.write(d.dirs.of(d.name, stateName))
		}
		return l, err
	}
	return nil, fmt.Errorf("listen for the control API: port %d is in use at the addresses of all sandboxes", controlPort)
}

// Ports on the host's loopback are chosen below the kernel's ephemeral port range, so that
// they are still free after a restart.
const firstHostPort, lastHostPort = 20000, 32700

// hostListener listens on the host's loopback, on *port if a port was chosen earlier.
func hostListener(ctx context.Context, name string, port *uint16, what string) (net.Listener, error) {
	var lc net.ListenConfig
	if *port != 0 {
		l, err := lc.Listen(ctx, "tcp", loopback(*port))
		if err != nil {
			return nil, fmt.Errorf("listen for %s: %w; the files of the workspace name this port, so no other will do: "+
				"end the program that uses it, or take the sandbox down", what, err)
		}
		return l, nil
	}
	// Each sandbox starts its search at a different port, so that concurrent starts rarely collide.
	start := firstHostPort
	for _, b := range []byte(name) {
		start = firstHostPort + (start*31+int(b))%(lastHostPort-firstHostPort)
	}
	for n := range lastHostPort - firstHostPort {
		p := uint16(firstHostPort + (start-firstHostPort+n)%(lastHostPort-firstHostPort))
		l, err := lc.Listen(ctx, "tcp", loopback(p))
		if err == nil {
			*port = p
			return l, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	return nil, fmt.Errorf("listen for %s: no port from %d to %d of 127.0.0.1 is free", what, firstHostPort, lastHostPort)
}

// firmware measures the boot and, once, has the cloud certify the machine's
// attestation key. Finally it closes the TPM's platform hierarchy, so that the
// machine cannot change its identity.
func (d *daemon) firmware(i cloud.Instance) machine.Firmware {
	s, _ := d.fleet.snapshot()
	return func(ctx context.Context, p machine.PowerOn) error {
		var events []attestation.MeasuredEvent
		if d.emulator != nil {
			events = slices.Clone(d.emulator.boot)
		}
		for _, e := range p.Events {
			events = append(events, attestation.MeasuredEvent(e))
		}
		if err := attestationtest.Measure(ctx, p.TPM, p.EventLog, events); err != nil {
			return err
		}
		if p.First {
			if err := d.provision(ctx, s, i, p.TPM); err != nil {
				return err
			}
		}
		return attestationtest.HandOver(ctx, p.TPM)
	}
}

// provision certifies the attestation key of a machine, as the sandbox's own cloud or the emulated one does.
func (d *daemon) provision(ctx context.Context, s *state, i cloud.Instance, tpm string) error {
	if d.emulator == nil {
		return attestationtest.Provision(ctx, tpm, d.ca, attestation.Identity{Name: i.Name, ProviderID: i.ProviderID, UID: s.UID, Group: i.Group, Role: i.Role, IP: i.IP})
	}
	record := s.instance(i.Name)
	if record == nil {
		return fmt.Errorf("machine %s has no record", i.Name)
	}
	return d.emulator.provision(ctx, tpm, i.Name, record.ID)
}

// complete adds the cloud's data that a machine needs.
func (d *daemon) complete(_ cloud.Instance, spec *machine.Spec) {
	provider, metadata := "sandbox", sandboxapi.DefaultMetadata
	if d.emulator != nil {
		provider, metadata = d.emulator.provider.Name, d.emulator.provider.MetadataAddress
	}
	spec.Files = map[string]machine.File{
		"/" + machine.EnvironmentFile: {Data: fmt.Appendf(nil,
			"CONSTELLATION_PROVIDER=%s\nCONSTELLATION_METADATA=%s\nCONSTELLATION_TPM=%s\n", provider, metadata, machine.TPMAddress)},
		"/etc/constellation/attestation-roots.pem": {Data: []byte(d.trust)},
	}
	if !d.simulated {
		spec.PauseImage = d.pause
	}
}

// admit checks whether this computer has the resources for more machines.
func (d *daemon) admit(ctx context.Context, more machine.Demand) error {
	if d.simulated {
		return nil // they need no more than their processes
	}
	more.There = d.dirs.residents()
	var all []string
	for _, p := range machine.Check(ctx, d.dirs.Cache, d.dirs.of(d.name), more) {
		all = append(all, p.String())
	}
	if len(all) > 0 {
		return errors.New(strings.Join(all, "; "))
	}
	return nil
}

// pass reports to the fleet that the machine at remote reached a point.
func (d *daemon) pass(remote, point string) {
	if ap, err := netip.ParseAddrPort(remote); err == nil {
		d.fleet.pass(ap.Addr(), point)
	}
}

// refresh offers the Kubernetes versions that are in the cache.
func (d *daemon) refresh() {
	for _, v := range build.Versions() {
		d.fetched(v)
	}
}

// fetched offers a Kubernetes version if it is in the cache.
func (d *daemon) fetched(version string) {
	d.refreshing.Lock()
	defer d.refreshing.Unlock()
	if d.seen[version] {
		return
	}
	a, err := build.Load(d.dirs.Cache, version)
	if err != nil {
		if !errors.Is(err, build.ErrNotCached) {
			d.log.Warn("Kubernetes not offered", "version", version, "err", err)
		}
		return
	}
	binaries, digests := a.Binaries, a.Digests
	if d.simulated {
		if binaries, digests, err = d.standIns(a); err != nil {
			d.log.Warn("Kubernetes not offered", "version", version, "err", err)
			return
		}
	}
	for _, i := range a.Images {
		if d.simulated {
			break
		}
		if !d.foreign {
			if err := d.registry.add(i.Ref, i.Path); err != nil {
				d.log.Warn("Kubernetes not offered", "version", version, "err", err)
				return
			}
		}
		if d.pause == "" && strings.HasPrefix(i.Ref, "registry.k8s.io/pause:") {
			d.pause = i.Ref
		}
	}
	if err := d.mirror.add(version, binaries, digests); err != nil {
		d.log.Warn("Kubernetes not offered", "version", version, "err", err)
		return
	}
	d.seen[version] = true
	d.log.Info("Kubernetes offered", "version", version, "images", len(a.Images))
}

// standIns returns what simulated machines install for a Kubernetes version: the stand-ins for
// kubeadm and the kubelet, and the real kubectl.
func (d *daemon) standIns(a *build.Artifacts) (paths, digests map[string]string, err error) {
	if paths, err = simulated.StandIns(d.dirs.of(d.name), a.Version); err != nil {
		return nil, nil, err
	}
	digests = map[string]string{}
	for name, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, nil, err
		}
		digests[name] = "sha256:" + digest(b)
	}
	for name, path := range a.Binaries {
		if paths[name] == "" {
			paths[name], digests[name] = path, a.Digests[name]
		}
	}
	return paths, digests, nil
}

// metadataOfEach serves the metadata of simulated machines, each at its machine's address, until
// ctx ends.
func (d *daemon) metadataOfEach(ctx context.Context, h http.Handler) {
	var wg sync.WaitGroup
	defer wg.Wait()
	served := map[netip.Addr]context.CancelFunc{}
	for {
		s, changed := d.fleet.snapshot()
		there := map[netip.Addr]bool{}
		for _, i := range s.Instances {
			ip := i.ip()
			there[ip] = true
			if served[ip] != nil {
				continue
			}
			l, err := d.host.Listen(ctx, "tcp", netip.AddrPortFrom(ip, simulated.MetadataPort).String())
			if err != nil {
				d.log.Warn("metadata not served", "node", i.Name, "err", err)
				continue
			}
			mctx, stop := context.WithCancel(ctx)
			served[ip] = stop
			wg.Go(func() {
				if err := serveHTTP(mctx, forOwner(l, d.log), atItsAddress(h), d.log); err != nil {
					d.log.Warn("metadata no longer served", "node", i.Name, "err", err)
				}
			})
		}
		for ip, stop := range served {
			if !there[ip] {
				stop()
				delete(served, ip)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// images is the catalogue in the API's format.
func (d *daemon) images() []cloud.Image {
	s, _ := d.fleet.snapshot()
	out := make([]cloud.Image, 0, len(s.Catalogue))
	for _, img := range s.Catalogue {
		out = append(out, cloud.Image{
			Reference: sandboxapi.ImageReference(s.Name, img.Version), Version: img.Version, Measurements: measurements(img),
		})
	}
	return out
}

// predict returns the expected registers of machines that boot from img.
func predict(img machine.Image) map[uint32][]byte {
	events := make([]attestation.MeasuredEvent, len(img.Events))
	for n, e := range img.Events {
		events[n] = attestation.MeasuredEvent(e)
	}
	return attestation.PredictPCRs(events)
}

// measurements returns the result of predict in hex.
func measurements(img machine.Image) map[uint32]string {
	out := map[uint32]string{}
	for pcr, value := range predict(img) {
		out[pcr] = hex.EncodeToString(value)
	}
	return out
}

// shutdown ends the daemon after its caller was answered. It deletes all machines first
// if requested.
func (d *daemon) shutdown(ctx context.Context, machines bool) error {
	if machines {
		d.fleet.mu.Lock()
		d.fleet.ending = true
		d.fleet.mu.Unlock()
		if err := d.fleet.clear(ctx); err != nil {
			return err
		}
	}
	d.log.Info("shutdown asked for", "machines", machines)
	d.stop()
	return nil
}

// clear deletes all machines and waits until they are gone.
func (f *fleet) clear(ctx context.Context) error {
	for {
		s, changed := f.snapshot()
		for _, i := range s.Instances {
			if err := f.Remove(i.Name); err != nil {
				return err
			}
		}
		if len(s.Instances) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			names := make([]string, 0, len(s.Instances))
			for _, i := range s.Instances {
				names = append(names, i.Name)
			}
			slices.Sort(names)
			return fmt.Errorf("remove %s: %w", strings.Join(names, ", "), ctx.Err())
		case <-changed:
		}
	}
}

// memoryLimit reserves a fifth of the computer's memory for the computer. It is 0 if the
// size is unknown.
func memoryLimit() int64 {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	var kib int64
	for line := range strings.Lines(string(b)) {
		if _, err := fmt.Sscanf(line, "MemTotal: %d kB", &kib); err == nil {
			return kib * 1024 / 5 * 4
		}
	}
	return 0
}
