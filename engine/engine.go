// Package engine decides what to do to a cluster and does it.
//
// It reads the workspace (configuration, state), observes the cloud and the cluster, makes
// a [Plan] of the result, runs the plan and reports progress as a stream of [Event]
// values. Everything a user sees comes from here; console, plain printer and JSON Lines
// only render it.
//
// The cluster is the only source of truth: the engine keeps no journal that decides anything. A
// run that ended half-way is resumed by planning again, and each step observes
// whether its effect is there already.
//
// The package knows neither a Kubernetes client nor Helm nor a terminal. What it
// needs from a cluster is [Cluster], implemented by engine/kube; what it needs from
// a cloud is [Provider]. It never writes a secret into an event, an error or a log.
package engine

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"constellation/engine/backup"
	"constellation/engine/check"
	"constellation/engine/enrol"
	"constellation/engine/infra"
	"constellation/engine/release"
	"constellation/engine/workspace"
)

// Silence is why a cloud does not answer.
type Silence string

// Reasons of a Silence; empty: not known.
const (
	CloudGone    Silence = "gone"    // it does not exist
	CloudStopped Silence = "stopped" // its service has ended, and its machines are kept
)

// Deps are what an engine works with. Zero fields get defaults, except Connect and Inspect:
// without them, everything that needs a cluster is an error.
type Deps struct {
	// Connect returns the cluster that a kubeconfig leads to. It need not reach it.
	Connect func(ctx context.Context, kubeconfig []byte) (Cluster, error)
	// WhySilent returns why the cloud of a configuration does not answer. It may be nil.
	WhySilent func(ctx context.Context, c *workspace.Config) Silence
	// Inspect returns what looks at the cluster that a kubeconfig leads to without changing
	// it. It need not reach it.
	Inspect func(ctx context.Context, kubeconfig []byte) (check.Inspector, error)
	// Backups returns what reads and restores backups of the cluster that a kubeconfig leads
	// to. It need not reach it.
	Backups func(ctx context.Context, kubeconfig []byte) (BackupCluster, error)
	// Releases opens the release data at a directory or an address, signed by one of keys, merged
	// with the program's own releases; without a location only the latter. The default is
	// OpenReleases.
	Releases func(ctx context.Context, location string, keys []release.Key) (release.Source, error)
	// Provider returns the cloud that the machines are in; the default is NewCloud.
	Provider func(ctx context.Context, c *workspace.Config, s *workspace.State) (Cloud, error)
	// Infra makes and deletes the infrastructure of clouds, by the names of their providers; nil: of none.
	Infra map[string]infra.Vendor
	// Programs finds the programs of a release for an architecture; the default is enrol.FindPrograms.
	Programs func(dir, release, arch string) (enrol.Programs, error)
	// Buildable are the versions of Kubernetes whose components can be built for a cloud that
	// lists its versions; empty if that is not known.
	Buildable []string
	// Log is for those who debug the program; the default discards everything.
	Log *slog.Logger
	Now func() time.Time
}

// Engine works on the cluster of one workspace. Its methods may be called
// concurrently.
type Engine struct {
	ws        *workspace.Workspace
	connect   func(context.Context, []byte) (Cluster, error)
	inspect   func(context.Context, []byte) (check.Inspector, error)
	backups   func(context.Context, []byte) (BackupCluster, error)
	releases  func(context.Context, string, []release.Key) (release.Source, error)
	provider  func(context.Context, *workspace.Config, *workspace.State) (Cloud, error)
	log       *slog.Logger
	now       func() time.Time
	limits    limits
	responses responseTimes
	// identities decrypt backups, see UseIdentity.
	identities atomic.Pointer[[]backup.Identity]

	infra     map[string]infra.Vendor
	programs  func(dir, release, arch string) (enrol.Programs, error)
	whySilent func(context.Context, *workspace.Config) Silence
	buildable []string
}

// New returns an engine for a workspace.
func New(w *workspace.Workspace, d Deps) *Engine {
	e := &Engine{
		ws: w, connect: d.Connect, inspect: d.Inspect, backups: d.Backups, releases: d.Releases, whySilent: d.WhySilent, provider: d.Provider,
		log: d.Log, now: d.Now, limits: defaultLimits, buildable: d.Buildable, infra: d.Infra, programs: d.Programs,
	}
	if e.programs == nil {
		e.programs = enrol.FindPrograms
	}
	if e.connect == nil {
		e.connect = func(context.Context, []byte) (Cluster, error) {
			return nil, errors.New("connect to cluster: this program has no Kubernetes client")
		}
	}
	if e.inspect == nil {
		e.inspect = func(context.Context, []byte) (check.Inspector, error) {
			return nil, errors.New("look at the cluster: this program has no Kubernetes client")
		}
	}
	if e.backups == nil {
		e.backups = func(context.Context, []byte) (BackupCluster, error) {
			return nil, errors.New("back up the cluster: this program has no Kubernetes client")
		}
	}
	if e.releases == nil {
		e.releases = OpenReleases
	}
	if e.provider == nil {
		e.provider = NewCloud
	}
	e.provider = vouched(patiently(e.provider), e)
	if e.log == nil {
		e.log = slog.New(slog.DiscardHandler)
	}
	if e.now == nil {
		e.now = time.Now
	}
	return e
}
