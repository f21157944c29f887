package release

import (
	"errors"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"gopkg.in/yaml.v3"

	"constellation/engine/version"
)

func embedded(t testing.TB) *Catalogue {
	t.Helper()
	c, err := Load(os.DirFS("../../assets/releases"))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// A new cluster starts with the etcd that the next minor of the release needs.
func TestEtcdOfTheNextMinor(t *testing.T) {
	c := embedded(t)
	for _, tt := range []struct{ release, kubernetes, want string }{
		{release: "v1.1.0", kubernetes: "v1.35.4", want: ""},         // v1.36 takes every patch of v3.6
		{release: "v1.1.0", kubernetes: "v1.36.4", want: "3.6.11-0"}, // it has v3.6.8, and v1.37 has v3.7
		{release: "v1.1.0", kubernetes: "v1.37.2", want: ""},         // there is no next minor
		{release: "v1.0.0", kubernetes: "v1.36.4", want: ""},         // it does not offer v1.37, and its NodeVersion has no field for the tag
		{release: "v1.1.0", kubernetes: "v1.36.99", want: ""},        // it is not offered
	} {
		r, err := c.Release(version.MustParse(tt.release))
		if err != nil {
			t.Fatal(err)
		}
		if got := r.NextEtcd(version.MustParse(tt.kubernetes)); got != tt.want {
			t.Errorf("release %s: Kubernetes %s starts with etcd %q, want %q", tt.release, tt.kubernetes, got, tt.want)
		}
	}
	r, err := c.Release(version.MustParse("v1.1.0"))
	if err != nil {
		t.Fatal(err)
	}
	if image := "registry.k8s.io/etcd:3.6.11-0"; !slices.Contains(r.containers(), image) {
		t.Errorf("the list of images for a mirror lacks %s", image)
	}
}

func TestReleasesAreComplete(t *testing.T) {
	c := embedded(t)
	want := map[string][]string{"v1.0.0": {"v1.34", "v1.35", "v1.36"}, "v1.1.0": {"v1.35", "v1.36", "v1.37"}}
	if len(c.Releases()) != len(want) {
		t.Errorf("%d releases, want %d", len(c.Releases()), len(want))
	}
	for _, r := range c.Releases() {
		if got := r.Minors(); !slices.Equal(got, want[r.Version.String()]) {
			t.Errorf("%s offers %v, want %v", r.Version, got, want[r.Version.String()])
		}
		for _, k := range r.Kubernetes {
			images, err := r.Images(k.Version)
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "etcd", "coredns", "pause"} {
				if !strings.HasPrefix(images[name], "registry.k8s.io/") || strings.ContainsAny(images[name], "{}") {
					t.Errorf("%s, Kubernetes %s: image of %s is %q", r.Version, k.Version, name, images[name])
				}
			}
			for _, arch := range []string{"amd64", "arm64"} {
				l, err := r.Components(k.Version, arch)
				if k.Unpinned != "" {
					if len(l) > 0 || !errors.Is(err, ErrUnpinned) || !strings.Contains(err.Error(), k.Unpinned) {
						t.Errorf("%s, Kubernetes %s without digests: %v, %v", r.Version, k.Version, l, err)
					}
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				var names []string
				for _, c := range l {
					names = append(names, c.Name)
					if !strings.HasPrefix(c.URL, "https://") || !strings.Contains(c.URL, arch) || strings.ContainsAny(c.URL, "{}") || c.Path == "" {
						t.Errorf("%s, Kubernetes %s: %+v", r.Version, k.Version, c)
					}
					if (c.Name[:4] == "kube") != strings.HasPrefix(c.URL, "https://dl.k8s.io/"+k.Version.String()+"/") {
						t.Errorf("%s, Kubernetes %s: %s is fetched from %s", r.Version, k.Version, c.Name, c.URL)
					}
				}
				if want := []string{"kubeadm", "kubelet", "kubectl", "crictl", "cni-plugins"}; !slices.Equal(names, want) {
					t.Errorf("%s, Kubernetes %s, %s: components %v, want %v", r.Version, k.Version, arch, names, want)
				}
			}
		}
		for _, name := range []string{"join-service", "operator", "agent"} {
			if s, ok := r.Service(name); !ok || !s.Version.Equal(r.Version) {
				t.Errorf("%s: service %s is %+v", r.Version, name, s)
			}
		}
	}
}

// A digest used for two components was copied into the wrong line; two digests of one
// component mean that one of them is wrong.
func TestDigestsAreUnique(t *testing.T) {
	byDigest, byURL := map[string]string{}, map[string]string{}
	for _, r := range embedded(t).Releases() {
		for _, k := range r.Kubernetes {
			for _, arch := range architectures {
				l, err := r.Components(k.Version, arch)
				if errors.Is(err, ErrUnpinned) {
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				for _, c := range l {
					if other := byDigest[c.Digest]; other != "" && other != c.URL {
						t.Errorf("%s is the digest of %s and of %s", c.Digest, other, c.URL)
					}
					if other := byURL[c.URL]; other != "" && other != c.Digest {
						t.Errorf("%s has digests %s and %s", c.URL, other, c.Digest)
					}
					byDigest[c.Digest], byURL[c.URL] = c.URL, c.Digest
				}
			}
		}
	}
	if len(byURL) != len(byDigest) || len(byURL) < 100 {
		t.Errorf("%d addresses and %d digests", len(byURL), len(byDigest))
	}
}

// The two that the sandbox builds, as published upstream.
func TestKnownDigests(t *testing.T) {
	c := embedded(t)
	for _, tt := range []struct{ release, kubernetes, arch, name, url, digest string }{
		{release: "v1.0.0", kubernetes: "v1.35.4", arch: "amd64", name: "kubeadm", url: "https://dl.k8s.io/v1.35.4/bin/linux/amd64/kubeadm", digest: "sha256:0c0497da793f8897c14e45340da919534b615294a1aab69dc1998896c0f11145"},
		{release: "v1.1.0", kubernetes: "v1.36.3", arch: "arm64", name: "kubelet", url: "https://dl.k8s.io/v1.36.3/bin/linux/arm64/kubelet", digest: "sha256:57205a5daf5883873d87b4914e1e00bdd7707acd075714788cfb0fc1f60bc414"},
		{release: "v1.1.0", kubernetes: "v1.36.3", arch: "amd64", name: "crictl", url: "https://github.com/kubernetes-sigs/cri-tools/releases/download/v1.36.0/crictl-v1.36.0-linux-amd64.tar.gz", digest: "sha256:83855e114566a8a8c44c548d515670f51de3a5e1da8b2effb59870e2f10c25a3"},
		{release: "v1.1.0", kubernetes: "v1.35.4", arch: "arm64", name: "cni-plugins", url: "https://github.com/containernetworking/plugins/releases/download/v1.8.0/cni-plugins-linux-arm64-v1.8.0.tgz", digest: "sha256:57ce466fc3b79db1f19b8f4c63e07a1112306efa53c94fe810a2150dd9e07ddb"},
	} {
		r, err := c.Release(version.MustParse(tt.release))
		if err != nil {
			t.Fatal(err)
		}
		l, err := r.Components(version.MustParse(tt.kubernetes), tt.arch)
		if err != nil {
			t.Fatal(err)
		}
		if got, _ := l.ByName(tt.name); got.URL != tt.url || got.Digest != tt.digest {
			t.Errorf("%s of %s: %s %s", tt.name, tt.kubernetes, got.URL, got.Digest)
		}
	}
}

// All published upstream patches are offered for both architectures, with the published
// digests only.
func TestEveryPublishedPatchIsOffered(t *testing.T) {
	b, err := os.ReadFile("testdata/upstream-digests.yaml")
	if err != nil {
		t.Fatal(err)
	}
	type byArch map[string]map[string]string
	var upstream struct {
		Kubernetes struct{ Versions map[string]byArch }
		Crictl     struct{ Versions map[string]map[string]string }
		CNI        struct{ Versions map[string]map[string]string } `yaml:"cni-plugins"`
	}
	if err := yaml.Unmarshal(b, &upstream); err != nil {
		t.Fatal(err)
	}
	if len(upstream.Kubernetes.Versions) != 26 {
		t.Fatalf("upstream has %d versions", len(upstream.Kubernetes.Versions))
	}
	offered := map[string]bool{}
	for _, r := range embedded(t).Releases() {
		for _, k := range r.Kubernetes {
			v := strings.TrimPrefix(k.Version.String(), "v")
			offered[v] = true
			if k.Unpinned != "" && upstream.Kubernetes.Versions[v] == nil {
				continue
			}
			if want := upstream.Kubernetes.Versions[v]; !reflect.DeepEqual(k.Digests, map[string]map[string]string(want)) {
				t.Errorf("%s, Kubernetes %s: digests %v, want %v", r.Version, v, k.Digests, want)
			}
		}
		for name, published := range map[string]map[string]map[string]string{"crictl": upstream.Crictl.Versions, "cni-plugins": upstream.CNI.Versions} {
			for v, digests := range r.archives[name] {
				if !maps.Equal(digests, published[strings.TrimPrefix(v, "v")]) {
					t.Errorf("%s: %s %s is not as published", r.Version, name, v)
				}
			}
		}
	}
	for v := range upstream.Kubernetes.Versions {
		if !offered[v] {
			t.Errorf("no release offers Kubernetes %s", v)
		}
	}
}

func TestBoundsAreSane(t *testing.T) {
	c := embedded(t)
	for i, r := range c.Releases() {
		minors := r.Minors()
		if len(minors) < 2 {
			t.Errorf("%s offers only %v: no upgrade from one minor to the next is possible", r.Version, minors)
		}
		for j := 1; j < len(r.Kubernetes); j++ {
			if d := r.Kubernetes[j-1].Version.MinorDistance(r.Kubernetes[j].Version); d > 1 {
				t.Errorf("%s: there is a hole before Kubernetes %s", r.Version, r.Kubernetes[j].Version)
			}
		}
		for _, k := range r.Kubernetes {
			for name, v := range map[string]string{"crictl": k.Crictl, "cluster-autoscaler": k.Autoscaler} {
				if v == "" && k.Unpinned != "" {
					continue
				}
				if p, err := version.Parse(v); err != nil || !p.SameMinor(k.Version) {
					t.Errorf("%s, Kubernetes %s: %s is %s", r.Version, k.Version, name, v)
				}
			}
			if s := (KubernetesSummary{Version: k.Version, CoreDNS: k.CoreDNS, Autoscaler: k.Autoscaler}); s.Service("kube-proxy") != k.Version.String() || s.Service("coredns") != k.CoreDNS || s.Service("cluster-autoscaler") != k.Autoscaler || s.Service("operator") != "" {
				t.Errorf("%s: services bound to Kubernetes %s", r.Version, k.Version)
			}
		}
		for _, name := range bound {
			if s, ok := r.Service(name); !ok || s.Kind != OfKubernetes || !s.Version.IsZero() {
				t.Errorf("%s: service %s is %+v", r.Version, name, s)
			}
		}
		if i == 0 {
			continue
		}
		before := c.Releases()[i-1]
		if !r.UpgradeFrom.Equal(before.Version) {
			t.Errorf("%s can be upgraded to from %s, want %s", r.Version, r.UpgradeFrom, before.Version)
		}
		if !slices.Contains(before.Minors(), minors[0]) {
			t.Errorf("%s and %s have no Kubernetes minor in common", before.Version, r.Version)
		}
	}
}

// The output of `kubeadm config images list`, from the sources of these versions.
func TestImagesAreNamedAsKubeadmNamesThem(t *testing.T) {
	c := embedded(t)
	for _, tt := range []struct{ release, kubernetes, etcd, coredns, pause string }{
		{release: "v1.0.0", kubernetes: "v1.34.0", etcd: "3.6.4-0", coredns: "v1.12.1", pause: "3.10.1"},
		{release: "v1.0.0", kubernetes: "v1.34.4", etcd: "3.6.5-0", coredns: "v1.12.1", pause: "3.10.1"},
		{release: "v1.0.0", kubernetes: "v1.34.10", etcd: "3.6.5-0", coredns: "v1.12.1", pause: "3.10.1"},
		{release: "v1.0.0", kubernetes: "v1.35.4", etcd: "3.6.6-0", coredns: "v1.13.1", pause: "3.10.1"},
		{release: "v1.1.0", kubernetes: "v1.35.4", etcd: "3.6.6-0", coredns: "v1.13.1", pause: "3.10.1"},
		{release: "v1.1.0", kubernetes: "v1.35.8", etcd: "3.6.6-0", coredns: "v1.13.1", pause: "3.10.1"},
		{release: "v1.1.0", kubernetes: "v1.36.4", etcd: "3.6.8-0", coredns: "v1.14.2", pause: "3.10.2"},
	} {
		r, err := c.Release(version.MustParse(tt.release))
		if err != nil {
			t.Fatal(err)
		}
		got, err := r.Images(version.MustParse(tt.kubernetes))
		want := map[string]string{
			"kube-apiserver":          "registry.k8s.io/kube-apiserver:" + tt.kubernetes,
			"kube-controller-manager": "registry.k8s.io/kube-controller-manager:" + tt.kubernetes,
			"kube-scheduler":          "registry.k8s.io/kube-scheduler:" + tt.kubernetes,
			"kube-proxy":              "registry.k8s.io/kube-proxy:" + tt.kubernetes,
			"coredns":                 "registry.k8s.io/coredns/coredns:" + tt.coredns,
			"pause":                   "registry.k8s.io/pause:" + tt.pause,
			"etcd":                    "registry.k8s.io/etcd:" + tt.etcd,
		}
		if err != nil || !maps.Equal(got, want) {
			t.Errorf("%s, Kubernetes %s: %v, %v", tt.release, tt.kubernetes, got, err)
		}
	}
}

// The images of a mirror have the etcd of new clusters beside that of kubeadm.
func TestImagesToMirror(t *testing.T) {
	r, err := embedded(t).Release(version.MustParse("v1.1.0"))
	if err != nil {
		t.Fatal(err)
	}
	for v, want := range map[string][]string{
		"v1.36.4": {"registry.k8s.io/etcd:3.6.11-0", "registry.k8s.io/etcd:3.6.8-0"},
		"v1.37.2": {"registry.k8s.io/etcd:3.7.0-0"},
	} {
		got, err := r.ImagesToMirror(version.MustParse(v))
		if err != nil || len(got) != 6+len(want) {
			t.Errorf("%s: %q, %v", v, got, err)
		}
		etcd := slices.DeleteFunc(slices.Clone(got), func(i string) bool { return !strings.Contains(i, "/etcd:") })
		if !slices.Equal(etcd, want) {
			t.Errorf("%s: etcd is %q, want %q", v, etcd, want)
		}
	}
	if _, err := r.ImagesToMirror(version.MustParse("v1.99.0")); !errors.Is(err, ErrNotOffered) {
		t.Errorf("unknown version: %v", err)
	}
}

func TestNotOfferedErrorsListAlternatives(t *testing.T) {
	c := embedded(t)
	_, err := c.Release(version.MustParse("v9.0.0"))
	if !errors.Is(err, ErrNotOffered) || !strings.Contains(err.Error(), "v1.0.0, v1.1.0") {
		t.Errorf("unknown release: %v", err)
	}
	r, err := c.Release(version.MustParse("v1.1.0"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err = r.Components(version.MustParse("v1.34.2"), "amd64"); !errors.Is(err, ErrNotOffered) || !strings.Contains(err.Error(), "v1.36.4") {
		t.Errorf("unknown Kubernetes: %v", err)
	}
	if _, err = r.Components(version.MustParse("v1.36.3"), "riscv64"); !errors.Is(err, ErrNotOffered) {
		t.Errorf("unknown architecture: %v", err)
	}
}

func TestUnusableFilesAreRefused(t *testing.T) {
	good, err := os.ReadFile("../../assets/releases/releases/v1.1.0.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, old, new, want string }{
		{name: "unknown key", old: "defaultKubernetes:", new: "defaultKubernete:", want: "defaultKubernete"},
		{name: "another format", old: `schema: "1"`, new: `schema: "2"`, want: `its format is "2"`},
		{name: "a digest cut short", old: "sha256:ebbd080e7c2e275093b55915722043257eb24004363e20acb3c4d71919f88336", new: "sha256:ebbd", want: "digest of kubectl"},
		{name: "a digest of another kind", old: "sha256:ebbd080e7c2e275093b55915722043257eb24004363e20acb3c4d71919f88336", new: "sha512:ebbd080e7c2e275093b55915722043257eb24004363e20acb3c4d71919f88336", want: "digest of kubectl"},
		{name: "digests left out", old: "    unpinned: digests of the published binaries are not verified\n", want: "digest of kubectl"},
		{name: "digests of a version without digests", old: "    unpinned:", new: "    crictl: v1.36.0\n    unpinned:", want: "unpinned excludes"},
		{name: "plain http", old: "https://dl.k8s.io/{version}/bin/linux/{arch}/kubeadm", new: "http://dl.k8s.io/{version}/bin/linux/{arch}/kubeadm", want: "artifacts.kubeadm"},
		{name: "an address without a version", old: "https://dl.k8s.io/{version}/bin/linux/{arch}/kubeadm", new: "https://dl.k8s.io/latest/bin/linux/{arch}/kubeadm", want: "artifacts.kubeadm"},
		{name: "a path that climbs", old: "path: /usr/local/bin/kubelet", new: "path: /usr/local/../../etc/kubelet", want: "artifacts.kubelet"},
		{name: "an archive that does not exist", old: "crictl: v1.35.0", new: "crictl: v1.35.9", want: `archives.crictl has no "v1.35.9"`},
		{name: "a service of no chart", old: "chart: constellation-operator", new: "chart: constellation-operators", want: "there is no chart constellation-operators"},
		{name: "an image without a tag", old: "image: registry.constellation.example/operator:v1.1.0", new: "image: registry.constellation.example/operator", want: "is not an image with a tag"},
		{name: "a default that is not offered", old: "defaultKubernetes: v1.36.4", new: "defaultKubernetes: v1.30.0", want: "defaultKubernetes"},
		{name: "an upgrade from the future", old: "upgradeFrom: v1.0.0", new: "upgradeFrom: v1.2.0", want: "upgradeFrom"},
		{name: "an invalid version", old: "version: v1.36.4", new: "version: v1.36", want: "MAJOR.MINOR.PATCH"},
		{name: "a service bound to nothing", old: "  - name: coredns\n    kind: kubernetes", new: "  - name: corefile\n    kind: kubernetes", want: "corefile is not bound to Kubernetes; only kube-proxy, coredns, cluster-autoscaler are"},
		{name: "a bound service with a version", old: "  - name: coredns\n    kind: kubernetes", new: "  - name: coredns\n    version: v1.0.0\n    kind: kubernetes", want: "is bound to Kubernetes and must not have version, image or chart"},
		{name: "a service of another kind", old: "kind: kubernetes", new: "kind: cloud", want: `kind "cloud" is neither`},
		{name: "an autoscaler that is no tag", old: "autoscaler: v1.36.0", new: `autoscaler: "a b"`, want: "autoscaler is not a tag"},
		{name: "a second document", old: "\ndefaultKubernetes: v1.36.4", new: "\ndefaultKubernetes: v1.36.4\n---\na: b", want: "unexpected data after the document"},
		{name: "versions out of order", old: "  - version: v1.36.4", new: "  - version: v1.35.1", want: "is not newer"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := strings.ReplaceAll(string(good), tt.old, tt.new)
			if b == string(good) {
				t.Fatalf("the file has no %q", tt.old)
			}
			if _, err := Parse([]byte(b)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
			if _, err := Load(fstest.MapFS{"releases/v1.1.0.yaml": {Data: []byte(b)}}); err == nil {
				t.Error("the catalogue accepts it")
			}
		})
	}
	if _, err := Load(fstest.MapFS{"releases/v1.2.0.yaml": {Data: good}}); err == nil || !strings.Contains(err.Error(), "contains release v1.1.0") {
		t.Errorf("a file under another name: %v", err)
	}
	if _, err := Load(fstest.MapFS{}); err == nil {
		t.Error("an empty catalogue is accepted")
	}
}

func BenchmarkLoad(b *testing.B) {
	dir := os.DirFS("../../assets/releases")
	for b.Loop() {
		if _, err := Load(dir); err != nil {
			b.Fatal(err)
		}
	}
}
