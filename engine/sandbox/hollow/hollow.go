// Package hollow simulates machines, like kubemark's hollow nodes: thousands in one process,
// none of which runs anything.
//
// To a cluster each looks like a machine with a kubelet. It boots, records like the join
// service that it is about to join, with the components that NodeVersion.status
// publishes for its role, registers a Node, renews a Lease, reports that it is Ready, reports the pods that are
// bound to it as Running, and ends those that are deleted or evicted. For
// clients it is the cloud of package sandbox, with the same control API and
// faults. Simulated actions take configurable times: boot, join, drain of a pod,
// deletion.
//
// So rollouts of thousands of machines, and thousands of failing rollouts, run
// on a real control plane of plain processes; see package controlplane. It attests and
// installs nothing, and runs no container: it is for tests of the operator, not of
// machines. All state is lost when the process ends.
//
// [Start] starts a cloud for an existing cluster, for tests and benchmarks. [Serve] runs
// the whole sandbox for users: cluster, cloud and operator.
package hollow

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"

	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/wire"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/sandbox"
)

// Times are the simulated durations of the machines of a [Cloud]. They include requests to
// the API server, unless those take longer.
type Times struct {
	// Boot is from the request until the cloud reports the machine as ready, Join from there
	// until its Node is registered.
	Boot, Join time.Duration
	// Settle is from there until its kubelet reports Ready.
	Settle time.Duration
	// Drain is from the deletion of a pod until it is gone, at most its grace
	// period.
	Drain time.Duration
	// Off is from the request to delete a machine until the cloud has deleted it.
	Off time.Duration
	// Heartbeat is the interval between renewals of a machine's Lease; zero means 10 s, as in kubelets.
	Heartbeat time.Duration
}

// Options describe a cloud of hollow machines. Cluster and Images are required.
type Options struct {
	// Cluster is the administrator's access to the cluster that machines join.
	Cluster *rest.Config
	// Name of the sandbox; empty means hollow.
	Name string
	// Token of the control API. If it is empty, a random one is generated.
	Token string
	// Dir is an existing directory for the owner's socket. If it is empty, a temporary one
	// is used.
	Dir string
	// Images are the available versions of the OS. Groups start with the first.
	Images []string
	Times  Times
	// Identify returns the identity of a new machine; exists reports whether a machine
	// has a name. It must not call the cloud. nil: the name and provider ID of the sandbox,
	// which are never reused.
	Identify func(role cloud.Role, exists func(name string) bool) (name, providerID, incarnation string)
	// Describe returns what a machine reports of itself in the annotations of its Node: another
	// cloud names groups and images in another way, or has none. nil: the machine as it is.
	Describe func(cloud.Instance) cloud.Instance
	Log      *slog.Logger // nil: discarded
}

// Cloud is a cloud of hollow machines. It is safe for concurrent use.
type Cloud struct {
	// Control and Metadata are the URLs of the control API, for callers over the network,
	// and of the metadata server, which serves only the token for it. Both are
	// on loopback. Host is the owner's address of the control API: it needs no token, is
	// not subject to faults, and sets them.
	Control, Metadata, Host string

	name    string
	token   string
	images  []string
	log     *slog.Logger
	kubelet *kubelet
	// identify is Options.Identify; nil: names are not reused.
	identify func(role cloud.Role, exists func(name string) bool) (name, providerID, incarnation string)
	// describe is Options.Describe, never nil.
	describe func(cloud.Instance) cloud.Instance
	queue    workqueue.TypedRateLimitingInterface[task]

	mu       sync.Mutex
	times    Times
	groups   []*group
	machines map[string]*machine
	tokens   map[string]cloud.Instance // "<group>/<token>" to the machine as it was made; never deleted
	faults   *sandbox.Faults
	next     int // index in the addresses of machines
	calls    map[string]int
	lives    map[string]*Life
	ids      map[string]*machine // of a Fleet, by incarnation
	seeds    *seeds              // nil: machines of a Fleet boot
}

// Life has the times of events of a machine; zero: not yet.
type Life struct {
	Requested time.Time
	Ready     time.Time // the cloud calls it ready
	Joined    time.Time // its Node is Ready
	Emptying  time.Time // the first deletion of one of its pods
	Emptied   time.Time // its last pod so far ended
	Deleted   time.Time // its deletion was requested
	Gone      time.Time
}

type group struct {
	name  string
	role  cloud.Role
	image string
	count int
	next  int
}

// machine is a simulated machine.
type machine struct {
	cloud.Instance
	number     int
	registered bool      // it has a Node
	uid        types.UID // of its Node
	renew      time.Time // when its Lease is due
	components string    // assigned to it
}

// task is an action for a machine or a pod, immediate or delayed.
type task struct {
	what string // one of the constants below
	name string // of the machine, or namespace/name of the pod
	life int    // number of the machine plus 1; 0: of whatever machine has the name
}

const (
	taskBoot     = "boot"
	taskJoin     = "join"
	taskRegister = "register"
	taskReady    = "ready"
	taskRenew    = "renew"
	taskGone     = "gone"
	taskPod      = "pod"
)

const (
	// workers is the number of concurrent tasks: enough to saturate an API server.
	workers = 48
	// again is the retry interval of a machine that may not boot or join yet.
	again = time.Second

	defaultHeartbeat = 10 * time.Second
)

// Start starts a cloud without machines. It serves until ctx ends. wait returns
// after its end, when only Nodes are left.
func Start(ctx context.Context, o Options) (c *Cloud, wait func(), err error) {
	if len(o.Images) == 0 {
		return nil, nil, errors.New("start hollow machines: no images")
	}
	c = &Cloud{
		name: cmp.Or(o.Name, "hollow"), token: cmp.Or(o.Token, rand.Text()), images: o.Images, log: o.Log, times: o.Times, identify: o.Identify, describe: o.Describe,
		machines: map[string]*machine{}, tokens: map[string]cloud.Instance{}, faults: &sandbox.Faults{}, calls: map[string]int{}, lives: map[string]*Life{}, ids: map[string]*machine{},
		groups: []*group{
			{name: sandboxapi.ControlPlaneGroup, role: cloud.ControlPlane, image: o.Images[0]},
			{name: sandboxapi.WorkerGroup, role: cloud.Worker, image: o.Images[0]},
		},
		queue: workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[task](50*time.Millisecond, 5*time.Second)),
	}
	if c.describe == nil {
		c.describe = func(i cloud.Instance) cloud.Instance { return i }
	}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	if c.kubelet, err = newKubelet(o.Cluster, c); err != nil {
		return nil, nil, fmt.Errorf("start hollow machines: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	stop, err := c.listen(ctx, &wg, o.Dir)
	if err != nil {
		cancel()
		return nil, nil, fmt.Errorf("start hollow machines: %w", err)
	}
	wg.Go(func() { c.kubelet.watch(ctx) })
	wg.Go(func() { c.heartbeat(ctx) })
	for range workers {
		wg.Go(func() {
			for {
				t, end := c.queue.Get()
				if end {
					return
				}
				c.do(ctx, t)
				c.queue.Done(t)
			}
		})
	}
	context.AfterFunc(ctx, c.queue.ShutDown)
	return c, func() {
		<-ctx.Done()
		wg.Wait()
		cancel()
		stop()
	}, nil
}

// listen opens the three APIs.
func (c *Cloud) listen(ctx context.Context, wg *sync.WaitGroup, dir string) (stop func(), err error) {
	ours := dir == ""
	if ours {
		if dir, err = os.MkdirTemp("", "hollow-*"); err != nil { // short, for the name of the socket
			return nil, err
		}
	}
	socket := filepath.Join(dir, "cloud.sock")
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) { // of one that was killed
		return nil, err
	}
	var open []net.Listener
	stop = func() {
		for _, l := range open {
			l.Close()
		}
		if ours {
			os.RemoveAll(dir)
		}
	}
	control := sandbox.NewControl(c, c.log)
	metadata := http.NewServeMux()
	metadata.HandleFunc("GET /v1/token", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"token":%q}`, c.token)
	})
	var lc net.ListenConfig
	for _, s := range []struct {
		network, address string
		url              *string
		handler          http.Handler
	}{
		{"tcp", "127.0.0.1:0", &c.Control, c.counted(control.Network(nil))},
		{"tcp", "127.0.0.1:0", &c.Metadata, metadata},
		{"unix", socket, &c.Host, control.Host(nil)},
	} {
		l, err := lc.Listen(ctx, s.network, s.address)
		if err != nil {
			stop()
			return nil, err
		}
		open = append(open, l)
		*s.url = "unix:" + l.Addr().String()
		if s.network == "tcp" {
			*s.url = "http://" + l.Addr().String()
		}
		srv := &http.Server{Handler: s.handler, ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(c.log.Handler(), slog.LevelDebug)}
		wg.Go(func() {
			if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				c.log.Warn("hollow cloud not served", "err", err)
			}
		})
		context.AfterFunc(ctx, func() { srv.Close() })
	}
	return stop, nil
}

// Owner returns the control API for the owner, to be served elsewhere. more adds routes.
func (c *Cloud) Owner(more func(*http.ServeMux)) http.Handler {
	return sandbox.NewControl(c, c.log).Host(more)
}

// counted counts requests to the control API.
func (c *Cloud) counted(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		what := r.Method + " one"
		switch path := r.URL.Path; {
		case r.Method == http.MethodGet && (strings.HasSuffix(path, "/instances") || strings.HasSuffix(path, "/groups")):
			what = "list " + filepath.Base(path)
		case strings.HasSuffix(path, "/instances"):
			what = "create"
		case strings.HasSuffix(path, "/describe"):
			what = "describe"
		case strings.HasSuffix(path, "/delete"):
			what = "delete"
		case strings.HasSuffix(path, "/image"):
			what = "set image"
		}
		c.mu.Lock()
		c.calls[what]++
		c.mu.Unlock()
		next.ServeHTTP(w, r)
	})
}

// Calls counts the calls of the control API over the network, by kind.
func (c *Cloud) Calls() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.calls)
}

// Lives returns the lives of all machines that have ever existed, by name.
func (c *Cloud) Lives() map[string]Life {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make(map[string]Life, len(c.lives))
	for name, l := range c.lives {
		out[name] = *l
	}
	return out
}

// happened records an event of a machine.
func (c *Cloud) happened(name string, what func(l *Life, now time.Time)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l := c.lives[name]; l != nil {
		what(l, time.Now())
	}
}

// SetTimes changes the durations of actions that start from now on.
func (c *Cloud) SetTimes(t Times) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.times = t
}

// Times returns the current durations.
func (c *Cloud) Times() Times {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.times
}

// PowerOff switches a machine off: its state is Stopped, it renews no Lease and ends no
// pod. It stays off.
func (c *Cloud) PowerOff(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.machines[name]; m != nil && m.State != cloud.Terminating {
		m.State, m.Message = cloud.Stopped, "its plug was pulled"
	}
}

// Sandbox returns the cloud's name.
func (c *Cloud) Sandbox() string { return c.name }

// Token returns the token of the control API.
func (c *Cloud) Token() string { return c.token }

// Groups returns the two groups.
func (c *Cloud) Groups() []cloud.Group {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []cloud.Group
	for _, g := range c.groups {
		id := sandboxapi.GroupID(c.name, g.name)
		out = append(out, cloud.Group{ID: id, Name: g.name, Role: g.role, Image: sandboxapi.ImageReference(c.name, g.image), Count: g.count, AutoscalerName: id})
	}
	return out
}

// Instances returns the machines in order of creation.
func (c *Cloud) Instances() []cloud.Instance {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := c.ordered()
	out := make([]cloud.Instance, len(all))
	for n, m := range all {
		out[n] = m.Instance
	}
	return out
}

// ordered returns the machines by number. The caller holds mu.
func (c *Cloud) ordered() []*machine {
	return slices.SortedFunc(maps.Values(c.machines), func(a, b *machine) int { return cmp.Compare(a.number, b.number) })
}

// Instance returns one machine.
func (c *Cloud) Instance(name string) (cloud.Instance, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.machines[name]; m != nil {
		return m.Instance, true
	}
	return cloud.Instance{}, false
}

// group finds a group. The caller holds mu.
func (c *Cloud) group(name string) (*group, error) {
	for _, g := range c.groups {
		if g.name == name {
			return g, nil
		}
	}
	return nil, fmt.Errorf("group %s: %w", name, cloud.ErrNotFound)
}

// SetImage sets the image of future machines of a group.
func (c *Cloud) SetImage(name, version string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	g, err := c.group(name)
	if err != nil {
		return err
	}
	if !slices.Contains(c.images, version) {
		return fmt.Errorf("image %s: %w", version, cloud.ErrNotFound)
	}
	g.image = version
	return nil
}

// SetCount adds machines to a group or deletes the newest.
func (c *Cloud) SetCount(_ context.Context, name string, count int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	g, err := c.group(name)
	if err != nil {
		return err
	}
	if count < 0 {
		return fmt.Errorf("%w: a group has no fewer than 0 machines", sandbox.ErrConflict)
	}
	var members []*machine
	for _, m := range c.ordered() {
		if m.Group == sandboxapi.GroupID(c.name, name) && m.State != cloud.Terminating {
			members = append(members, m)
		}
	}
	for len(members) > count {
		c.remove(members[len(members)-1])
		members = members[:len(members)-1]
	}
	for n := len(members); n < count; n++ {
		c.add(g, "")
	}
	return nil
}

// Create makes a machine for each token, once per token.
func (c *Cloud) Create(_ context.Context, name string, tokens []string) ([]cloud.Instance, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	g, err := c.group(name)
	if err != nil {
		return nil, err
	}
	out := make([]cloud.Instance, 0, len(tokens))
	for _, token := range tokens {
		key := name + "/" + token
		made, spent := c.tokens[key]
		if !spent {
			made = c.add(g, token).Instance
			c.tokens[key] = made
		}
		i := cloud.Instance{
			Name: made.Name, ProviderID: made.ProviderID, Incarnation: made.Incarnation, Group: made.Group,
			Role: g.role, State: cloud.Terminated, Token: token,
		}
		if m := c.machines[i.Name]; m != nil && m.Key() == made.Key() {
			i = m.Instance
		}
		out = append(out, i)
	}
	return out, nil
}

// add creates a machine, which starts to boot. The caller holds mu.
func (c *Cloud) add(g *group, token string) *machine {
	m := c.draft(g)
	m.Token, m.State = token, cloud.Creating
	c.queue.AddAfter(task{taskBoot, m.Name, m.number + 1}, c.times.Boot+c.faults.BootDelay(m.Name))
	return m
}

// draft returns a new machine without events. The caller holds mu.
func (c *Cloud) draft(g *group) *machine {
	prefix := "worker-"
	if g.role == cloud.ControlPlane {
		prefix = "control-plane-"
	}
	m := &machine{number: c.next, Instance: c.addressed(cloud.Instance{
		Name: fmt.Sprint(prefix, g.next), Group: sandboxapi.GroupID(c.name, g.name), Role: g.role,
		Image: sandboxapi.ImageReference(c.name, g.image),
	})}
	m.ProviderID = sandboxapi.ProviderID(c.name, m.Name)
	if c.identify != nil {
		m.Name, m.ProviderID, m.Incarnation = c.identify(g.role, func(name string) bool { return c.machines[name] != nil })
	}
	c.enter(g, m)
	return m
}

// enter adds a machine to the cloud. The caller holds mu.
func (c *Cloud) enter(g *group, m *machine) {
	c.machines[m.Name], c.lives[m.Name] = m, &Life{Requested: time.Now()}
	c.next++
	g.next++
	g.count++
}

// addressed returns a new machine with its addresses, which repeat after 16384 machines. No packet is ever sent to them.
// The caller holds mu.
func (c *Cloud) addressed(i cloud.Instance) cloud.Instance {
	n := c.next % (1 << 14)
	i.Created = time.Now().UTC()
	i.IP = netip.AddrFrom4([4]byte{10, 42 + byte(n/62500), byte(n / 250), byte(n%250) + 2})
	i.PodCIDR = netip.PrefixFrom(netip.AddrFrom4([4]byte{100, 64 + byte(n>>8), byte(n), 0}), 24)
	return i
}

// Fleet returns the machines for the emulator of another cloud, whose groups make and delete them. describe returns a new
// machine as that cloud does, without addresses. Its Incarnation is the machine's ID. The control API of this cloud may not
// change machines then.
func (c *Cloud) Fleet(describe func(wire.Machine) cloud.Instance) wire.Fleet {
	return fleet{c, describe}
}

// fleet implements wire.Fleet.
type fleet struct {
	c        *Cloud
	describe func(wire.Machine) cloud.Instance
}

// Start implements wire.Fleet.
func (f fleet) Start(w wire.Machine) (wire.Place, error) {
	c := f.c
	c.mu.Lock()
	defer c.mu.Unlock()
	n := slices.IndexFunc(c.groups, func(g *group) bool { return g.role == w.Role })
	if n < 0 || c.machines[w.Name] != nil {
		return wire.Place{}, fmt.Errorf("%w: role %q is not known, or there is a machine %s", sandbox.ErrConflict, w.Role, w.Name)
	}
	m := &machine{number: c.next, Instance: c.addressed(f.describe(w))}
	m.State = cloud.Creating
	c.enter(c.groups[n], m)
	c.ids[w.ID] = m
	if c.seeds != nil {
		m.State, m.components = cloud.Ready, c.seeds.components
		c.seeds.all = append(c.seeds.all, m)
	} else {
		c.queue.AddAfter(task{taskBoot, m.Name, m.number + 1}, c.times.Boot+c.faults.BootDelay(m.Name))
	}
	return wire.Place{IP: m.IP, Pods: m.PodCIDR}, nil
}

// Stop implements wire.Fleet.
func (f fleet) Stop(id string) {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	if m := f.c.ids[id]; m != nil {
		f.c.remove(m)
	}
}

// State implements wire.Fleet.
func (f fleet) State(id string) cloud.State {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	if m := f.c.ids[id]; m != nil {
		return m.State
	}
	return cloud.Terminated
}

// seeds are machines that joined long ago.
type seeds struct {
	components string
	all        []*machine
}

// SeedFleet is Seed for the machines that an emulator starts while start runs.
func (c *Cloud) SeedFleet(ctx context.Context, components string, start func()) error {
	these := &seeds{components: components}
	c.mu.Lock()
	c.seeds = these
	c.mu.Unlock()
	start()
	c.mu.Lock()
	c.seeds = nil
	c.mu.Unlock()
	return c.joined(ctx, these.all)
}

// Remove deletes machines and ignores unknown names.
func (c *Cloud) Remove(names ...string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range names {
		if m := c.machines[name]; m != nil {
			c.remove(m)
		}
	}
	return nil
}

// remove starts the deletion of a machine. The caller holds mu.
func (c *Cloud) remove(m *machine) {
	if m.State == cloud.Terminating {
		return
	}
	m.State, c.lives[m.Name].Deleted = cloud.Terminating, time.Now()
	for _, g := range c.groups {
		if g.role == m.Role && g.count > 0 {
			g.count--
		}
	}
	if c.times.Off == 0 {
		c.gone(m.Name)
		return
	}
	c.queue.AddAfter(task{taskGone, m.Name, m.number + 1}, c.times.Off)
}

// gone removes a machine that is being deleted. The caller holds mu.
func (c *Cloud) gone(name string) {
	delete(c.ids, c.machines[name].Incarnation)
	delete(c.machines, name)
	c.lives[name].Gone = time.Now()
	c.kubelet.leases.Delete(name)
}

// Faults returns the active faults.
func (c *Cloud) Faults() *sandbox.Faults {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.faults
}

// SetFaults replaces the faults; see [sandbox.ParseFaults]. Faults of metadata,
// components and images have no effect: hollow machines do not use these.
func (c *Cloud) SetFaults(spec []string) error {
	f, err := sandbox.ParseFaults(spec)
	if err != nil {
		return fmt.Errorf("%w: %w", sandbox.ErrConflict, err)
	}
	if err := f.Hollow(); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.faults = f
	return nil
}

// Seed adds machines that joined long ago, and returns when their Nodes are
// Ready: they carry the operator's annotations. components is the
// name of the components that they were joined with.
func (c *Cloud) Seed(ctx context.Context, groupName string, count int, components string) error {
	c.mu.Lock()
	g, err := c.group(groupName)
	if err != nil {
		c.mu.Unlock()
		return err
	}
	var all []*machine
	for range count {
		m := c.draft(g)
		m.State, m.components = cloud.Ready, components
		all = append(all, m)
	}
	c.mu.Unlock()
	return c.joined(ctx, all)
}

// joined registers machines that joined long ago.
func (c *Cloud) joined(ctx context.Context, list []*machine) error {
	all := make(chan *machine, len(list))
	for _, m := range list {
		all <- m
	}
	close(all)
	errs := make(chan error, workers)
	for range workers {
		go func() {
			for m := range all {
				uid, err := c.kubelet.register(ctx, c.snapshot(m.Name), true)
				if err != nil {
					errs <- err
					return
				}
				c.registered(m.Name, uid)
				c.happened(m.Name, func(l *Life, now time.Time) { l.Joined = now })
			}
			errs <- nil
		}()
	}
	var err error
	for range workers {
		err = errors.Join(err, <-errs)
	}
	if err != nil {
		return fmt.Errorf("seed hollow machines: %w", err)
	}
	return nil
}

// snapshot returns a copy of a machine; the zero value if it is gone.
func (c *Cloud) snapshot(name string) machine {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.machines[name]; m != nil {
		return *m
	}
	return machine{}
}

// controlPlanes returns the names of the control planes that have joined, in order
// of creation.
func (c *Cloud) controlPlanes() (names []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range c.ordered() {
		if m.Role == cloud.ControlPlane && m.registered && m.State != cloud.Terminating {
			names = append(names, m.Name)
		}
	}
	return names
}

// registered records that a machine has its Node and a Lease to renew.
func (c *Cloud) registered(name string, uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.machines[name]; m != nil {
		// Spread the renewals of machines that registered together.
		period := c.period()
		m.registered, m.uid, m.renew = true, uid, time.Now().Add(period/2+period*time.Duration(m.number%64)/128)
	}
}

// period is the interval between renewals of Leases. The caller holds mu.
func (c *Cloud) period() time.Duration { return cmp.Or(c.times.Heartbeat, defaultHeartbeat) }

// heartbeat renews the Leases that are due, for all machines with one timer.
func (c *Cloud) heartbeat(ctx context.Context) {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			c.mu.Lock()
			for name, m := range c.machines {
				if m.registered && m.State == cloud.Ready && now.After(m.renew) {
					m.renew = now.Add(c.period())
					c.queue.Add(task{taskRenew, name, m.number + 1})
				}
			}
			c.mu.Unlock()
		}
	}
}

// do runs a task and schedules a retry if the task is not possible yet.
func (c *Cloud) do(ctx context.Context, t task) {
	wait, err := c.try(ctx, t)
	switch {
	case err != nil:
		if ctx.Err() == nil {
			c.log.Debug("hollow machine tries again", "what", t.what, "name", t.name, "err", err)
		}
		c.queue.AddRateLimited(t)
		return
	case wait > 0:
		c.queue.AddAfter(t, wait)
	}
	c.queue.Forget(t)
}

// try runs a task. Unless wait is zero, the task must be repeated after it.
func (c *Cloud) try(ctx context.Context, t task) (wait time.Duration, err error) {
	if t.what == taskPod {
		return c.kubelet.pod(ctx, t.name)
	}
	m := c.snapshot(t.name)
	switch {
	case m.Name == "", t.life != 0 && t.life != m.number+1: // it is gone
		return 0, nil
	case t.what == taskGone:
		c.mu.Lock()
		c.gone(t.name)
		c.mu.Unlock()
		return 0, nil
	case m.State == cloud.Terminating || m.State == cloud.Stopped:
		return 0, nil
	}
	switch t.what {
	case taskBoot:
		return c.boot(m), nil
	case taskJoin:
		return c.join(ctx, m)
	case taskRegister:
		return 0, c.register(ctx, m)
	case taskReady:
		return 0, c.ready(ctx, m)
	case taskRenew:
		c.renew(ctx, m)
	}
	return 0, nil
}

// boot makes a machine ready, unless a fault prevents it, and lets it join.
func (c *Cloud) boot(m machine) (wait time.Duration) {
	if c.Faults().NeverBoots(m.Name) {
		return again
	}
	c.mu.Lock()
	if m := c.machines[m.Name]; m != nil && m.State == cloud.Creating {
		m.State, c.lives[m.Name].Ready = cloud.Ready, time.Now()
	}
	c.mu.Unlock()
	c.queue.Add(task{taskJoin, m.Name, m.number + 1})
	return 0
}

// join announces a machine's node to the operator, and schedules its registration.
func (c *Cloud) join(ctx context.Context, m machine) (wait time.Duration, err error) {
	if c.Faults().NeverJoins(m.Name) {
		return again, nil
	}
	begun, components := time.Now(), c.kubelet.joinComponents(m.Role)
	if components == "" {
		return again, nil
	}
	if err := c.kubelet.expect(ctx, m, components); err != nil {
		return 0, err
	}
	c.mu.Lock()
	if m := c.machines[m.Name]; m != nil {
		m.components = components
	}
	join := c.times.Join
	c.mu.Unlock()
	c.queue.AddAfter(task{taskRegister, m.Name, m.number + 1}, join-time.Since(begun))
	return 0, nil
}

// register creates a machine's Node, and schedules its readiness.
func (c *Cloud) register(ctx context.Context, m machine) error {
	begun := time.Now()
	uid, err := c.kubelet.register(ctx, m, false)
	if err != nil {
		return err
	}
	c.registered(m.Name, uid)
	c.mu.Lock()
	settle := c.times.Settle
	c.mu.Unlock()
	c.queue.AddAfter(task{taskReady, m.Name, m.number + 1}, settle-time.Since(begun))
	return nil
}

// ready makes a machine's Node Ready.
func (c *Cloud) ready(ctx context.Context, m machine) error {
	err := c.kubelet.ready(ctx, m)
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) { // its Node was deleted meanwhile
		c.queue.Add(task{taskRegister, m.Name, m.number + 1})
		return nil
	}
	if err != nil {
		return err
	}
	c.happened(m.Name, func(l *Life, now time.Time) { l.Joined = now })
	return nil
}

// renew renews the Lease of a machine's Node. It then reports Ready again if the Node is not Ready in the API: the node lifecycle
// controller sets it to Unknown when the Lease expires, for example while the API server is down. The report also repeats a removal
// of the taint not-ready that failed, because that controller retries only when the Node changes. Kubelets report every five
// minutes at least. A failure is retried when the Lease is due again.
func (c *Cloud) renew(ctx context.Context, m machine) {
	there, err := c.kubelet.renew(ctx, m.Name)
	if err != nil {
		c.log.Debug("lease not renewed", "node", m.Name, "err", err)
		return
	}
	c.mu.Lock()
	life := c.lives[m.Name]
	joined := life != nil && !life.Joined.IsZero()
	if m := c.machines[m.Name]; m != nil && !there { // its Node was deleted, and the Lease with it
		m.registered = false
	}
	c.mu.Unlock()
	if there && joined && c.kubelet.notReady(m) {
		if err := c.kubelet.ready(ctx, m); err != nil {
			c.log.Debug("readiness not reported", "node", m.Name, "err", err)
		}
	}
}

// Tokens returns the machines that tokens have made, as they were made, by "<group>/<token>".
func (c *Cloud) Tokens() map[string]cloud.Instance {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.tokens)
}
