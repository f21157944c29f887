package cloud

import (
	"fmt"
	"strings"
	"sync"

	"constellation/engine/version"
)

// Catalogue answers which version an OS image has. It is safe for concurrent use.
type Catalogue struct {
	inReference func(reference string) string
	list        func() ([]Image, error)
}

// NewCatalogue returns the catalogue of a cloud. inReference returns the version that a reference
// itself contains, and is nil if references of the cloud contain none. list returns the entries; it
// is called at most once, for the first image that needs it.
func NewCatalogue(inReference func(reference string) string, list func() ([]Image, error)) *Catalogue {
	return &Catalogue{inReference: inReference, list: sync.OnceValues(list)}
}

// Version returns the version of an image. The error states why it is unknown.
func (c *Catalogue) Version(reference string) (version.Version, error) {
	if c.inReference != nil {
		if v, err := version.Parse(c.inReference(reference)); err == nil {
			return v, nil
		}
	}
	images, err := c.list()
	if err != nil {
		return version.Version{}, fmt.Errorf("read the cloud's catalogue for image %q: %w", reference, err)
	}
	for _, i := range images {
		if !strings.EqualFold(i.Reference, reference) { // some clouds change the case between calls
			continue
		}
		v, err := version.Parse(i.Version)
		if err != nil {
			return version.Version{}, fmt.Errorf("read version of image %q in the cloud's catalogue: %w", reference, err)
		}
		return v, nil
	}
	return version.Version{}, fmt.Errorf("the cloud's catalogue has no image %q: %w", reference, ErrNotFound)
}
