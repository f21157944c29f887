package cloud_test

import (
	"errors"
	"strings"
	"testing"

	"constellation/engine/cloud"
)

func TestCatalogueVersions(t *testing.T) {
	t.Parallel()
	reads := 0
	list := func() ([]cloud.Image, error) {
		reads++
		return []cloud.Image{{Reference: "ami-1", Version: "v1.0.0"}, {Reference: "images/v7.0.0", Version: "v1.1.0"}, {Reference: "ami-3", Version: "latest"}}, nil
	}
	failing := func() ([]cloud.Image, error) { return nil, cloud.ErrUnavailable }
	inReference := func(reference string) string { return strings.TrimPrefix(reference, "release-") }
	for _, tt := range []struct {
		name      string
		catalogue *cloud.Catalogue
		reference string
		want      string
		err       string
		is        error
	}{
		{name: "an entry", catalogue: cloud.NewCatalogue(nil, list), reference: "ami-1", want: "v1.0.0"},
		{name: "an entry in another case", catalogue: cloud.NewCatalogue(nil, list), reference: "AMI-1", want: "v1.0.0"},
		{name: "a reference that ends like a version", catalogue: cloud.NewCatalogue(nil, list), reference: "images/v7.0.0", want: "v1.1.0"},
		{name: "no entry", catalogue: cloud.NewCatalogue(nil, list), reference: "images/v1.0.0", err: `the cloud's catalogue has no image "images/v1.0.0"`, is: cloud.ErrNotFound},
		{name: "an entry without a version", catalogue: cloud.NewCatalogue(nil, list), reference: "ami-3", err: `read version of image "ami-3" in the cloud's catalogue`},
		{name: "a catalogue that cannot be read", catalogue: cloud.NewCatalogue(nil, failing), reference: "ami-1", err: `read the cloud's catalogue for image "ami-1"`, is: cloud.ErrUnavailable},
		{name: "a version in the reference needs no catalogue", catalogue: cloud.NewCatalogue(inReference, failing), reference: "release-v1.2.0", want: "v1.2.0"},
		{name: "a reference without a version has an entry", catalogue: cloud.NewCatalogue(inReference, list), reference: "ami-1", want: "v1.0.0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			reads = 0
			v, err := tt.catalogue.Version(tt.reference)
			if v.String() != tt.want || (err != nil) != (tt.err != "") {
				t.Fatalf("version %q, %v", v, err)
			}
			if err != nil && (!strings.Contains(err.Error(), tt.err) || tt.is != nil && !errors.Is(err, tt.is)) {
				t.Errorf("error %q, want %q", err, tt.err)
			}
			if _, _ = tt.catalogue.Version("another"); reads > 1 {
				t.Errorf("the catalogue was read %d times", reads)
			}
		})
	}
}
