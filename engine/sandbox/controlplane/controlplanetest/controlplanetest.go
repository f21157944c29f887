// Package controlplanetest lends control planes to the tests of a package. Tests that run one after the other use the
// same etcd and API server, whose start takes more processor time than most tests.
//
// A borrower finds what a new API server has. After each test this package puts etcd's content back to that of the
// start, key by key. Then it waits until the API server serves and authorizes as at the start. Controllers and the
// scheduler are started again for each borrower. Tests that run at the same time never share a control plane.
//
// A control plane is ended instead of lent again after a test that failed, that ended a server, or that left objects
// which the API server's admission remembers. Three things of earlier tests stay: the API server's metrics, the
// resourceVersion, and UIDs of the objects of the start. A test that depends on one of them calls
// [controlplane.ForTest].
package controlplanetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/sandbox/controlplane"
	"constellation/internal/testneeds"
)

// T is what [Lend] needs of a *testing.T or *testing.B.
type T interface {
	controlplane.T
	Failed() bool
	Logf(format string, args ...any)
}

// Setup adds objects to a control plane before its first loan. They count as part of its start.
type Setup struct {
	// Name identifies the setup: control planes are lent again to borrowers with the same one.
	Name string
	Run  func(context.Context, *controlplane.ControlPlane) error
}

// resetTimeout bounds how long a control plane may take to forget a test.
const resetTimeout = 30 * time.Second

// pool has the control planes that no test uses.
var pool struct {
	mu      sync.Mutex
	lends   bool   // whether [Run] runs
	dir     string // of all control planes; empty until the first one starts
	idle    map[string][]*plane
	planes  map[*plane]bool // all that run
	started int
}

// Run runs the tests of a package and then ends all control planes. TestMain calls it.
func Run(m interface{ Run() int }) int {
	pool.mu.Lock()
	pool.lends, pool.idle, pool.planes = true, map[string][]*plane{}, map[*plane]bool{}
	pool.mu.Unlock()
	code := m.Run()
	pool.mu.Lock()
	left, dir := pool.planes, pool.dir
	pool.lends, pool.dir, pool.idle, pool.planes = false, "", nil, nil
	pool.mu.Unlock()
	for p := range left {
		p.end()
	}
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, "remove the folder of control planes:", err)
		code = max(code, 1)
	}
	return code
}

// Lend returns a control plane that looks new, for the time of one test. Options.Dir is ignored. Where the binaries are
// missing the test is skipped with the reason.
func Lend(t T, o controlplane.Options, setup ...Setup) *controlplane.ControlPlane {
	t.Helper()
	testneeds.ControlPlane(t)
	kind := kindOf(o, setup)
	p, err := take(kind)
	if err == nil && p == nil {
		p, err = start(t.Context(), o, setup)
	}
	if errors.Is(err, controlplane.ErrNoBinaries) {
		t.Skipf("%v", err)
	}
	if err != nil {
		t.Fatalf("start control plane: %v", err)
	}
	t.Cleanup(func() { p.giveBack(t, kind) })
	if o.Controllers {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := p.cp.StartControllers(ctx, o.ControllerManagerArgs, o.SchedulerArgs); err != nil {
			t.Fatalf("start controllers: %v", err)
		}
	}
	return p.cp
}

// kindOf identifies control planes that can stand for each other.
func kindOf(o controlplane.Options, setup []Setup) string {
	kind := append([]string{o.BinDir, o.EtcdName}, o.APIServerArgs...)
	for _, s := range setup {
		kind = append(kind, "setup "+s.Name)
	}
	return strings.Join(kind, "\x00")
}

// take returns an idle control plane, or nil if there is none.
func take(kind string) (*plane, error) {
	pool.mu.Lock()
	defer pool.mu.Unlock()
	if !pool.lends {
		return nil, errors.New("TestMain of this package does not call controlplanetest.Run")
	}
	idle := pool.idle[kind]
	if len(idle) == 0 {
		return nil, nil
	}
	pool.idle[kind] = idle[:len(idle)-1]
	return idle[len(idle)-1], nil
}

// start starts a control plane without controllers and notes its content.
func start(ctx context.Context, o controlplane.Options, setup []Setup) (*plane, error) {
	pool.mu.Lock()
	var err error
	if pool.dir == "" { // not before: test programs that are killed without a control plane leave nothing
		pool.dir, err = os.MkdirTemp("", "control-planes-")
	}
	pool.started++
	o.Dir = filepath.Join(pool.dir, fmt.Sprint(pool.started))
	pool.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(o.Dir, 0o700); err != nil {
		return nil, err
	}
	o.Controllers = false
	cp, err := controlplane.Start(ctx, o)
	if err != nil {
		return nil, err
	}
	p := &plane{cp: cp}
	ctx, cancel := context.WithTimeout(ctx, resetTimeout)
	defer cancel()
	if err := p.begin(ctx, setup); err != nil {
		p.end()
		return nil, fmt.Errorf("note what a new control plane has: %w", err)
	}
	pool.mu.Lock()
	defer pool.mu.Unlock()
	pool.planes[p] = true
	return p, nil
}

// giveBack makes the control plane ready for the next test, or ends it.
func (p *plane) giveBack(t T, kind string) {
	ctx, cancel := context.WithTimeout(context.Background(), resetTimeout)
	defer cancel()
	why := errors.New("the test failed")
	if !t.Failed() {
		why = p.reset(ctx)
	}
	pool.mu.Lock()
	if why == nil {
		pool.idle[kind] = append(pool.idle[kind], p)
		pool.mu.Unlock()
		return
	}
	delete(pool.planes, p)
	pool.mu.Unlock()
	t.Logf("the control plane is not lent again: %v", why)
	p.end()
}

// remembered are the directories of objects that the API server's admission keeps in memory. Their effect ends some time
// after they are deleted, and no request shows when.
var remembered = []string{
	"/registry/validatingwebhookconfigurations/", "/registry/mutatingwebhookconfigurations/",
	"/registry/validatingadmissionpolicies/", "/registry/validatingadmissionpolicybindings/",
	"/registry/mutatingadmissionpolicies/", "/registry/mutatingadmissionpolicybindings/",
	"/registry/resourcequotas/", "/registry/limitranges/", "/registry/runtimeclasses/", "/registry/storageclasses/",
	"/registry/priorityclasses/", "/registry/flowschemas/", "/registry/prioritylevelconfigurations/",
}

func isRemembered(key string) bool {
	return slices.ContainsFunc(remembered, func(dir string) bool { return strings.HasPrefix(key, dir) })
}
