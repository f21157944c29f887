package release

import (
	"context"
	"fmt"
	"io/fs"

	"constellation/engine/version"
)

// Feed is a set of releases from one source. *Feed implements [Source].
type Feed struct {
	catalogue *Catalogue
	state     State
}

// Embedded returns the releases that come with the program; dir is assets.Releases().
func Embedded(dir fs.FS) (*Feed, error) {
	c, err := Load(dir)
	if err != nil {
		return nil, err
	}
	return &Feed{catalogue: c, state: State{Source: "embedded"}}, nil
}

// Summaries returns all releases, oldest first.
func (f *Feed) Summaries(context.Context) ([]Summary, error) {
	var out []Summary
	for _, r := range f.catalogue.Releases() {
		out = append(out, r.Summary())
	}
	return out, nil
}

// Release returns one release. The error wraps ErrNotOffered if there is none.
func (f *Feed) Release(_ context.Context, v version.Version) (*Release, error) {
	return f.catalogue.Release(v)
}

// Measurements returns what a machine of a provider must have measured that booted
// the image of a release. The error wraps ErrNotOffered if they are not known.
func (f *Feed) Measurements(_ context.Context, v version.Version, provider string) (map[uint32]string, error) {
	return nil, fmt.Errorf("measurements of image %s for %s are %w by %s", v, provider, ErrNotOffered, f.state.Source)
}

// State says where the knowledge comes from.
func (f *Feed) State() State { return f.state }
