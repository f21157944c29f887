package lifecycle

import (
	"strings"
	"testing"
	"testing/fstest"

	"constellation/engine/version"
)

// Each defect of the data on add-ons and fields is an error.
func TestDefectsOfAddOnsAreErrors(t *testing.T) {
	sound := "sources: {s: a page}\naddOns:\n- {name: a, images: [x/a], versions: [{version: \"1.2\", from: v1.30, to: v1.31, source: s}]}\n"
	fields := "sources: {s: a page}\nfields:\n- {at: volume, name: a, gone: v1.20, instead: b, source: s}\n"
	for _, tt := range []struct{ name, addOns, fields, want string }{
		{name: "sound", addOns: sound, fields: fields, want: ""},
		{name: "unknown field", addOns: strings.Replace(sound, "from:", "since:", 1), fields: fields, want: "field since not found"},
		{name: "no source", addOns: strings.Replace(sound, ", source: s", "", 1), fields: fields, want: `row 1 of versions of a: source "" is not listed`},
		{name: "unused source", addOns: strings.Replace(sound, "{s: a page}", "{s: a page, u: another}", 1), fields: fields, want: `source "u" has no row`},
		{name: "no version", addOns: strings.Replace(sound, `"1.2"`, "latest", 1), fields: fields, want: "row 1 of versions of a: fields are missing"},
		{name: "no minor", addOns: strings.Replace(sound, "v1.30", "1.30.1", 1), fields: fields, want: "row 1 of versions of a: fields are missing"},
		{name: "unrecognisable", addOns: strings.Replace(sound, "images: [x/a], ", "", 1), fields: fields, want: "row 1 of addOns: fields are missing"},
		{name: "what it does to nodes without a source", addOns: strings.Replace(sound, "name: a", "name: a, nodes: drains", 1), fields: fields, want: "row 1 of addOns: fields are missing"},
		{name: "a chart's version without a chart", addOns: strings.Replace(sound, "name: a", "name: a, chartSource: s", 1), fields: fields, want: "row 1 of chart sources of a: fields are missing"},
		{name: "a chart's version without a source", addOns: strings.Replace(sound, "name: a", "name: a, charts: [a], chartSource: x", 1), fields: fields, want: `row 1 of chart sources of a: source "x" is not listed`},
		{name: "twice", addOns: sound + "- {name: a, charts: [a]}\n", fields: fields, want: "a name is listed twice"},
		{name: "a version twice", addOns: strings.Replace(sound, "versions: [", `versions: [{version: "1.2", from: v1.29, source: s}, `, 1), fields: fields, want: "a version is listed twice"},
		{name: "unknown place", addOns: sound, fields: strings.Replace(fields, "volume", "moon", 1), want: "row 1 of fields: fields are missing"},
		{name: "field without a source", addOns: sound, fields: strings.Replace(fields, ", source: s", "", 1), want: `row 1 of fields: source "" is not listed`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := parse(fstest.MapFS{"data/addons.yaml": {Data: []byte(tt.addOns)}, "data/fields.yaml": {Data: []byte(tt.fields)}})
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("the error is %v, want %q", err, tt.want)
			}
		})
	}
}

func TestAddOns(t *testing.T) {
	for _, tt := range []struct {
		image, kubernetes, name string
		want                    Support
		lists                   string
	}{
		{image: "quay.io/jetstack/cert-manager-controller:v1.19.2", kubernetes: "v1.35.1", name: "cert-manager", want: Supported, lists: "v1.31 to v1.35"},
		{image: "mirror:5000/quay.io/jetstack/cert-manager-controller:v1.19.2@sha256:00", kubernetes: "v1.36.0", name: "cert-manager", want: NotListed, lists: "v1.31 to v1.35"},
		{image: "mirror:5000/cert-manager-controller", kubernetes: "v1.36.0", name: "cert-manager", want: SupportUnknown},
		{image: "jetstack/cert-manager-controller:main", kubernetes: "v1.36.0", name: "cert-manager", want: SupportUnknown},
		{image: "k8s.gcr.io/autoscaling/cluster-autoscaler:v1.36.3", kubernetes: "v1.36.0", name: "cluster-autoscaler", want: Supported, lists: "v1.36"},
		{image: "k8s.gcr.io/autoscaling/cluster-autoscaler:v1.36.3", kubernetes: "v1.37.0", name: "cluster-autoscaler", want: NotListed, lists: "v1.36"},
		{image: "registry.k8s.io/ingress-nginx/controller:v1.10.0", kubernetes: "v1.30.0", name: "ingress-nginx", want: NotListed, lists: "v1.26 to v1.29"},
		{image: "registry.k8s.io/ingress-nginx/controller:v1.10.2", kubernetes: "v1.30.0", name: "ingress-nginx", want: Supported, lists: "v1.26 to v1.30"},
		{image: "registry.k8s.io/metrics-server/metrics-server:v0.8.0", kubernetes: "v1.37.0", name: "metrics-server", want: Supported, lists: "v1.31 and newer"},
		{image: "registry.k8s.io/metrics-server/metrics-server:v0.8.0", kubernetes: "v1.30.0", name: "metrics-server", want: NotListed, lists: "v1.31 and newer"},
		{image: "example.com/shop/web:1.2.3", kubernetes: "v1.37.0", want: SupportUnknown},
		{image: "example.com/notcalico/node:v3.29.1", kubernetes: "v1.37.0", want: SupportUnknown},
	} {
		a, v := ByImage(tt.image)
		if a == nil {
			if tt.name != "" {
				t.Errorf("%s is not recognised", tt.image)
			}
			continue
		}
		support, row := a.On(v, version.MustParse(tt.kubernetes))
		lists := ""
		if support != SupportUnknown {
			lists = row.Range()
		}
		if a.Name != tt.name || support != tt.want || lists != tt.lists {
			t.Errorf("%s on %s: %s, %d, lists %q; want %s, %d, %q", tt.image, tt.kubernetes, a.Name, support, lists, tt.name, tt.want, tt.lists)
		}
	}
	keda := ByChart("keda")
	if row, ok := keda.Newest(version.MustParse("v1.33.0")); !ok || row.Version != "2.20" {
		t.Errorf("the newest KEDA for v1.33 is %+v", row)
	}
	if _, ok := keda.Newest(version.MustParse("v1.99.0")); ok {
		t.Error("a version of KEDA lists v1.99")
	}
	if a, v := ByLabels(map[string]string{"app.kubernetes.io/part-of": "flux", "app.kubernetes.io/version": "v2.8.1"}); a == nil || a.Name != "Flux" || v != "v2.8.1" {
		t.Errorf("labels of Flux: %+v %s", a, v)
	}
	if got := Locks("GitRepoVolumeDriver").String(); got != "v1.36.0" {
		t.Errorf("GitRepoVolumeDriver is locked by %s", got)
	}
}
