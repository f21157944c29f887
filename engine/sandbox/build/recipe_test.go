package build

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// The module files are edited by hand when a version is added; what they pin must be
// what the tags of the images say.
func TestModulesPinWhatRecipesName(t *testing.T) {
	for _, r := range recipes {
		t.Run(r.version, func(t *testing.T) {
			kubernetes := readModule(t, r.kubernetesModule())
			coredns := readModule(t, r.corednsModule())
			etcd := readModule(t, r.etcdModule())
			for _, tt := range []struct {
				name string
				in   module
				path string
				want string
			}{
				{name: "kubernetes is the version", in: kubernetes, path: "k8s.io/kubernetes", want: r.version},
				{name: "etcd is the version in its tag", in: kubernetes, path: "go.etcd.io/etcd/server/v3", want: "v" + r.etcdVersion()},
				{name: "etcdutl is of the same version", in: etcd, path: "go.etcd.io/etcd/etcdutl/v3", want: "v" + r.etcdVersion()},
				{name: "coredns is the version in its tag", in: coredns, path: "github.com/coredns/coredns", want: r.coredns},
			} {
				if got := tt.in.require[tt.path]; got != tt.want {
					t.Errorf("%s: %s is %q, want %q", tt.name, tt.path, got, tt.want)
				}
			}
			staging := strings.Replace(r.version, "v1.", "v0.", 1)
			for path, version := range kubernetes.replace {
				if !strings.HasPrefix(path, "k8s.io/") || version != staging {
					t.Errorf("%s is replaced by %s, want staging modules at %s and nothing else", path, version, staging)
				}
			}
			if len(kubernetes.replace) < 30 {
				t.Errorf("%d staging modules are replaced, want all", len(kubernetes.replace))
			}

			tools := map[string][]string{r.kubernetesModule(): kubernetes.tool, r.corednsModule(): coredns.tool, r.etcdModule(): etcd.tool}
			if r.etcdNext != "" {
				before := readModule(t, "etcd-"+tagVersion(r.etcdNext))
				if got, want := before.require["go.etcd.io/etcd/server/v3"], "v"+tagVersion(r.etcdNext); got != want {
					t.Errorf("the etcd for the next minor is %q, want %q", got, want)
				}
				tools["etcd-"+tagVersion(r.etcdNext)] = before.tool
			}
			programs := make(map[string][]string)
			for _, p := range r.programs() {
				if p.name != "pause" {
					programs[p.module] = append(programs[p.module], p.pkg)
				}
			}
			for _, pkgs := range programs {
				slices.Sort(pkgs)
			}
			if diff := cmp.Diff(tools, programs); diff != "" {
				t.Errorf("tools of the modules and programs of the recipe differ (-modules +recipe):\n%s", diff)
			}
		})
	}
}

type module struct {
	require, replace map[string]string
	tool             []string
}

var (
	requireLine = regexp.MustCompile(`(?m)^(?:require )?\s*(\S+) (v\S+)(?: // indirect)?$`)
	replaceLine = regexp.MustCompile(`(?m)^(?:replace )?\s*(\S+) => (\S+) (v\S+)$`)
	toolLines   = regexp.MustCompile(`(?m)^tool (?:\(\n([^)]*)\)|(\S+))$`)
)

func readModule(t *testing.T, name string) module {
	t.Helper()
	text := string(moduleFiles(name)["go.mod"])
	m := module{require: make(map[string]string), replace: make(map[string]string)}
	for _, l := range requireLine.FindAllStringSubmatch(text, -1) {
		m.require[l[1]] = l[2]
	}
	for _, l := range replaceLine.FindAllStringSubmatch(text, -1) {
		if l[1] != l[2] {
			t.Errorf("%s: %s is replaced by another module, %s", name, l[1], l[2])
		}
		m.replace[l[1]] = l[3]
	}
	for _, l := range toolLines.FindAllStringSubmatch(text, -1) {
		m.tool = append(m.tool, strings.Fields(l[1]+l[2])...)
	}
	slices.Sort(m.tool)
	return m
}

func TestVersionsAreInOrder(t *testing.T) {
	if !slices.Contains(Versions(), DefaultVersion) {
		t.Errorf("the default %s is not one of %v", DefaultVersion, Versions())
	}
	if !slices.IsSorted(Versions()) { // all are 1.NN.N
		t.Errorf("versions are %v, want the newest last", Versions())
	}
}

func TestKeyChangesWithInputs(t *testing.T) {
	p, _ := recipes[0].program("kubeadm")
	image := recipes[0].images()[0]
	date := recipes[0].date
	seen := make(map[string]string)
	for _, tt := range []struct{ name, key string }{
		{"a program", p.key()},
		{"another linker flag", program{name: p.name, module: p.module, pkg: p.pkg, ldflags: p.ldflags + " -X a=b"}.key()},
		{"another package", program{name: p.name, module: p.module, pkg: p.pkg + "x", ldflags: p.ldflags}.key()},
		{"another module", program{name: p.name, module: recipes[1].programs()[0].module, pkg: p.pkg, ldflags: p.ldflags}.key()},
		{"an image", image.key(date, "sha256:1")},
		{"another binary in it", image.key(date, "sha256:2")},
		{"two files in it", image.key(date, "sha256:1", "sha256:2")},
		{"another date", image.key(date.Add(time.Second), "sha256:1")},
		{"another path in it", func() string { i := image; i.at = "/x"; return i.key(date, "sha256:1") }()},
		{"another user", func() string { i := image; i.user = "1"; return i.key(date, "sha256:1") }()},
	} {
		if other, ok := seen[tt.key]; ok {
			t.Errorf("%s and %s have the same key", tt.name, other)
		}
		seen[tt.key] = tt.name
	}
	if again, _ := recipes[0].program("kubeadm"); again.key() != p.key() {
		t.Error("the same program has two keys")
	}
}

func TestProgramNamesAreUnique(t *testing.T) {
	for _, r := range recipes {
		names := make(map[string]bool)
		for _, p := range r.programs() {
			names[p.name] = true
		}
		if len(names) != len(r.programs()) {
			t.Errorf("%s: two programs of %v have one name", r.version, slices.Sorted(maps.Keys(names)))
		}
		for _, i := range r.images() {
			for _, name := range i.programs() {
				if !names[name] {
					t.Errorf("%s: image %s is made of %q, which is not built", r.version, i.ref, name)
				}
			}
		}
	}
}

// A patch shares programs of equal tags with the other patches of its minor. It compiles the rest.
func TestPatchesShareProgramsOfEqualTags(t *testing.T) {
	of := func(version string) recipe {
		r, err := recipeOf(version)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	for _, tt := range []struct {
		version, other string
		want           []string
	}{
		{version: "v1.36.4", other: "v1.36.3", want: []string{"etcd", "etcdutl", "coredns", "pause", "agnhost", "3.6.11/etcd"}},
		{version: "v1.35.8", other: "v1.35.4", want: []string{"etcd", "etcdutl", "coredns", "pause", "agnhost"}},
		{version: "v1.37.2", other: "v1.36.4", want: []string{"pause"}},
		{version: "v1.36.4", other: "v1.35.8", want: nil},
	} {
		r, other := of(tt.version), of(tt.other)
		var got []string
		for _, p := range r.programs() {
			q, ok := other.program(p.name)
			if !ok {
				continue
			}
			if _, ok := p.serves(q, q.key(), r.minor() == other.minor(), false); ok {
				got = append(got, p.name)
			}
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s takes %q from %s, want %q", tt.version, got, tt.other, tt.want)
		}
	}
}

func TestPatchesShareTheirModules(t *testing.T) {
	for _, r := range recipes {
		name := r.kubernetesModule()
		pinned := readModule(t, name)
		for path, v := range modulesOfPatch(string(moduleFiles(name)["go.mod"]), strings.TrimPrefix(r.version, "v")) {
			if path != "k8s.io/kubernetes" && pinned.replace[path] == "" {
				t.Errorf("%s: %s is compiled without its version, and go.mod does not replace it", name, path)
			}
			if strings.Contains(v, strings.TrimPrefix(r.version, "v1.")) || !strings.HasSuffix(v, "."+anyPatch) {
				t.Errorf("%s: %s is compiled as %s, which names the patch", name, path, v)
			}
		}
	}
}

// Go's build cache identifies a package by what it imports: one patch with another version of
// golang.org/x/sys would compile nearly everything again.
func TestPatchesRequireTheSameModules(t *testing.T) {
	newest := make(map[string]recipe) // by minor
	for _, r := range recipes {
		newest[r.minor()] = r
	}
	others := func(r recipe) map[string]string {
		m := readModule(t, r.kubernetesModule())
		maps.DeleteFunc(m.require, func(path, _ string) bool {
			return path == "k8s.io/kubernetes" || m.replace[path] != ""
		})
		return m.require
	}
	for _, r := range recipes {
		if d := cmp.Diff(others(newest[r.minor()]), others(r)); d != "" {
			t.Errorf("%s requires other modules than %s (-newest +this):\n%s", r.version, newest[r.minor()].version, d)
		}
	}
}
