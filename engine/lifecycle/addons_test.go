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
		{"sound", sound, fields, ""},
		{"unknown field", strings.Replace(sound, "from:", "since:", 1), fields, "field since not found"},
		{"no source", strings.Replace(sound, ", source: s", "", 1), fields, `row 1 of versions of a: source "" is not listed`},
		{"unused source", strings.Replace(sound, "{s: a page}", "{s: a page, u: another}", 1), fields, `source "u" has no row`},
		{"no version", strings.Replace(sound, `"1.2"`, "latest", 1), fields, "row 1 of versions of a: fields are missing"},
		{"no minor", strings.Replace(sound, "v1.30", "1.30.1", 1), fields, "row 1 of versions of a: fields are missing"},
		{"unrecognisable", strings.Replace(sound, "images: [x/a], ", "", 1), fields, "row 1 of addOns: fields are missing"},
		{"what it does to nodes without a source", strings.Replace(sound, "name: a", "name: a, nodes: drains", 1), fields, "row 1 of addOns: fields are missing"},
		{"a chart's version without a chart", strings.Replace(sound, "name: a", "name: a, chartSource: s", 1), fields, "row 1 of chart sources of a: fields are missing"},
		{"a chart's version without a source", strings.Replace(sound, "name: a", "name: a, charts: [a], chartSource: x", 1), fields, `row 1 of chart sources of a: source "x" is not listed`},
		{"twice", sound + "- {name: a, charts: [a]}\n", fields, "a name is listed twice"},
		{"a version twice", strings.Replace(sound, "versions: [", `versions: [{version: "1.2", from: v1.29, source: s}, `, 1), fields, "a version is listed twice"},
		{"unknown place", sound, strings.Replace(fields, "volume", "moon", 1), "row 1 of fields: fields are missing"},
		{"field without a source", sound, strings.Replace(fields, ", source: s", "", 1), `row 1 of fields: source "" is not listed`},
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
		{"quay.io/jetstack/cert-manager-controller:v1.19.2", "v1.35.1", "cert-manager", Supported, "v1.31 to v1.35"},
		{"mirror:5000/quay.io/jetstack/cert-manager-controller:v1.19.2@sha256:00", "v1.36.0", "cert-manager", NotListed, "v1.31 to v1.35"},
		{"mirror:5000/cert-manager-controller", "v1.36.0", "cert-manager", SupportUnknown, ""},
		{"jetstack/cert-manager-controller:main", "v1.36.0", "cert-manager", SupportUnknown, ""},
		{"k8s.gcr.io/autoscaling/cluster-autoscaler:v1.36.3", "v1.36.0", "cluster-autoscaler", Supported, "v1.36"},
		{"k8s.gcr.io/autoscaling/cluster-autoscaler:v1.36.3", "v1.37.0", "cluster-autoscaler", NotListed, "v1.36"},
		{"registry.k8s.io/ingress-nginx/controller:v1.10.0", "v1.30.0", "ingress-nginx", NotListed, "v1.26 to v1.29"},
		{"registry.k8s.io/ingress-nginx/controller:v1.10.2", "v1.30.0", "ingress-nginx", Supported, "v1.26 to v1.30"},
		{"registry.k8s.io/metrics-server/metrics-server:v0.8.0", "v1.37.0", "metrics-server", Supported, "v1.31 and newer"},
		{"registry.k8s.io/metrics-server/metrics-server:v0.8.0", "v1.30.0", "metrics-server", NotListed, "v1.31 and newer"},
		{"example.com/shop/web:1.2.3", "v1.37.0", "", SupportUnknown, ""},
		{"example.com/notcalico/node:v3.29.1", "v1.37.0", "", SupportUnknown, ""},
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
