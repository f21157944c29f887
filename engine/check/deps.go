package check

import (
	"context"
	"log/slog"
	"time"

	"constellation/assets"
	"constellation/engine/chart"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/component"
	"constellation/engine/plan"
	"constellation/engine/registry"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// Deps are the dependencies of a check.
type Deps struct {
	Ws    *workspace.Workspace
	Log   *slog.Logger
	Clock func() time.Time
	// buildable are the Kubernetes versions that this computer can build; empty if unknown.
	Buildable []string

	Inspect  func(ctx context.Context, kubeconfig []byte) (Inspector, error)
	Connect  func(ctx context.Context, kubeconfig []byte) (Published, error)
	Provider func(ctx context.Context, c *workspace.Config, s *workspace.State) (Cloud, error)
	// feed returns the location of the feed of a request, and its keys. know records the feed's
	// contents.
	Feed func(c *workspace.Config, r Request) (location string, keys []release.Key, err error)
	Know func(ctx context.Context, location string, keys []release.Key) (Known, error)
	// charts returns the fetcher for the charts of a release, for a cluster with so many control
	// planes.
	Charts func(c *workspace.Config, s *workspace.State, rel *release.Release, location string, controlPlanes int) Charts
	// BringsEncryption reports whether the hop to a release has the cluster encrypt Secrets. It comes after the hop was chosen.
	BringsEncryption func(*Run, *release.Release) bool
	// runs are the recorded runs without unreadable ones.
	Runs func() []plan.RunSummary
	// lastBackup returns the finding on the age of the last backup.
	LastBackup func(s *workspace.State) plan.Finding
	// command is the command line of a verb for this workspace.
	Command func(verb string) string
}

// Known is the release data that a check needs.
type Known interface {
	State() FeedState
	Summaries(ctx context.Context) ([]release.Summary, error)
	Release(ctx context.Context, v version.Version) (*release.Release, error)
	// Vouch returns the release builder's statement on a list of components; empty if there is
	// none.
	Vouch(ctx context.Context, v, kubernetes version.Version, arch string, list component.List) (string, error)
	// Measurements are the expected registers of an image, in hex.
	Measurements(ctx context.Context, v version.Version, provider string) (map[uint32]string, error)
}

// Published is what a check needs of the objects that the engine has published.
type Published interface {
	Components(ctx context.Context, name string) (cluster.Components, error)
	OutdatedKinds(ctx context.Context, kinds []assets.File) ([]string, error)
	Registry(ctx context.Context) (registry.Registry, error)
	HasRegistry(ctx context.Context, want registry.Registry, plans bool) (bool, error)
}

// Cloud is what a check needs of the cloud.
type Cloud interface {
	Describe(ctx context.Context) (cluster.ProviderInfo, error)
	Groups(ctx context.Context) ([]cloud.Group, error)
	Machines(ctx context.Context) ([]cluster.CloudMachine, error)
	Images(ctx context.Context) ([]cloud.Image, error)
	Components(ctx context.Context, v version.Version) (component.Signed, error)
}

// Charts compares the charts of a release with those of the cluster.
type Charts interface {
	// Fetch downloads charts that the program does not contain. The findings list failed
	// downloads.
	Fetch(ctx context.Context) []plan.Finding
	// Fetched returns the downloaded charts by name.
	Fetched() map[string]*chart.Chart
	Compare(ctx context.Context) ([]plan.ChartChange, []plan.Finding, error)
}
