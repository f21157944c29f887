package component

import (
	"reflect"
	"strings"
	"testing"
)

const anyDigest = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

func TestDigestCoversEverythingThatDecides(t *testing.T) {
	base := List{{Name: "kubelet", URL: "https://a/kubelet", Digest: anyDigest, Path: "/usr/local/bin/kubelet", Mode: 0o755}, {Name: "cni", URL: "data:,", Digest: anyDigest, Path: "/opt/cni"}}
	seen := map[string]string{base.Digest(): "the list itself"}
	// A field that is added later without being covered fails here.
	for i := range reflect.TypeFor[Component]().NumField() {
		l := append(List{}, base...)
		f := reflect.ValueOf(&l[0]).Elem().Field(i)
		switch v := f.Addr().Interface().(type) {
		case *string:
			*v += "x"
		case *uint32:
			*v++
		case *bool:
			*v = !*v
		default:
			t.Fatalf("field %d has a type that this test does not know", i)
		}
		name := reflect.TypeFor[Component]().Field(i).Name
		if other, ok := seen[l.Digest()]; ok {
			t.Errorf("a change of %s gives the digest of %s", name, other)
		}
		seen[l.Digest()] = name
	}
	if d := (List{base[1], base[0]}).Digest(); d == base.Digest() {
		t.Error("order does not count")
	}
}

func TestListsThatMustNotBeInstalledAreNamed(t *testing.T) {
	good := Component{Name: "kubelet", URL: "https://mirror.example/kubelet", Digest: anyDigest, Path: "/usr/local/bin/kubelet"}
	if err := (List{good}).Validate(); err != nil {
		t.Fatal(err)
	}
	change := func(f func(*Component)) List { c := good; f(&c); return List{c} }
	for _, tt := range []struct {
		name string
		l    List
		want string
	}{
		{name: "no name", l: change(func(c *Component) { c.Name = "" }), want: "name"},
		{name: "a name that climbs", l: change(func(c *Component) { c.Name = "../x" }), want: "name"},
		{name: "no digest", l: change(func(c *Component) { c.Digest = "" }), want: "digest"},
		{name: "digest of another kind", l: change(func(c *Component) { c.Digest = "sha512:ab" }), want: "digest"},
		{name: "digest in capitals", l: change(func(c *Component) { c.Digest = strings.ToUpper(anyDigest) }), want: "digest"},
		{name: "relative path", l: change(func(c *Component) { c.Path = "bin/kubelet" }), want: "path"},
		{name: "path that climbs", l: change(func(c *Component) { c.Path = "/usr/../etc/shadow" }), want: "path"},
		{name: "path with a NUL", l: change(func(c *Component) { c.Path = "/usr/x\x00y" }), want: "path"},
		{name: "the root itself", l: change(func(c *Component) { c.Path = "/" }), want: "path"},
		{name: "set-user-ID", l: change(func(c *Component) { c.Mode = 0o4755 }), want: "mode"},
		{name: "writable by all", l: change(func(c *Component) { c.Mode = 0o777 }), want: "mode"},
		{name: "file URL", l: change(func(c *Component) { c.URL = "file:///etc/passwd" }), want: "url"},
		{name: "URL without a host", l: change(func(c *Component) { c.URL = "https:///kubelet" }), want: "url"},
		{name: "no URL", l: change(func(c *Component) { c.URL = "" }), want: "url"},
		{name: "two of a name", l: List{good, func() Component { c := good; c.Path = "/x"; return c }()}, want: "twice"},
		{name: "two at a path", l: List{good, func() Component { c := good; c.Name = "x"; return c }()}, want: "same path"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.l.Validate()
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want it to name the %s", err, tt.want)
			}
			if _, err := FromProto(ToProto(tt.l)); err == nil {
				t.Error("accepted from the network")
			}
		})
	}
}

func TestErrorsDoNotShowSignedURLs(t *testing.T) {
	c := Component{Name: "kubelet", URL: "https://%zz/kubelet?signature=canary", Digest: anyDigest, Path: "/kubelet"}
	if err := c.Validate(); err == nil || strings.Contains(err.Error(), "canary") {
		t.Errorf("got %v", err)
	}
}

func TestListsSurviveTheNetwork(t *testing.T) {
	want := List{
		{Name: "kubelet", URL: "https://a/kubelet", Digest: anyDigest, Path: "/usr/local/bin/kubelet", Mode: 0o755},
		{Name: "cni-plugins", URL: "http://a/cni.tgz", Digest: anyDigest, Path: "/opt/cni/bin", Extract: true},
		{Name: "patch", URL: "data:,x", Digest: anyDigest, Path: "/etc/patch", Mode: 0o600},
	}
	got, err := FromProto(ToProto(want))
	if err != nil || !reflect.DeepEqual(got, want) || got.Digest() != want.Digest() {
		t.Errorf("got %v, %v", got, err)
	}
}
