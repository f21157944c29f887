package build

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path"
	"runtime"
	"slices"
	"strings"
	"time"
)

// modules holds one Go module per version of Kubernetes and of CoreDNS, and per version
// of etcd for what Kubernetes' own does not have: go.mod and go.sum under other names, because a directory with a go.mod cannot be embedded.
// They have no code; their tool directives name the commands to build. The cache
// gets them as real modules.
//
//go:embed modules/*.mod modules/*.sum
var modules embed.FS

//go:embed pause/main.go
var pauseSource []byte

// format is part of every key. Raise it when the way things are made changes in a
// way that no other part of a key shows, such as the layout of an image.
const format = 1

// A recipe is everything that determines the artifacts of one version of Kubernetes.
type recipe struct {
	version string
	// date is the date of the release's tag. It is the only time in the
	// artifacts, so that builds are reproducible.
	date time.Time
	// Tags as this version's kubeadm names them, and the agnhost that its tree holds.
	etcd, coredns, pause, agnhost string
	// etcdNext is the tag of a newer etcd of the same minor, which the next minor of Kubernetes
	// demands. New clusters start with it. It is empty if etcd is new enough.
	etcdNext string
	// corednsCommit is shown by coredns -version. It is empty where the module proxy does
	// not report it, as for every Kubernetes and some versions of CoreDNS.
	corednsCommit string
}

// recipes are ordered by version, the newest last.
var recipes = []recipe{
	{
		version: "v1.35.4", date: time.Date(2026, 4, 15, 18, 1, 22, 0, time.UTC),
		etcd: "3.6.6-0", coredns: "v1.13.1", pause: "3.10.1", agnhost: "2.59",
		corednsCommit: "1db4568",
	},
	{
		version: "v1.35.8", date: time.Date(2026, 8, 20, 15, 16, 14, 0, time.UTC),
		etcd: "3.6.6-0", coredns: "v1.13.1", pause: "3.10.1", agnhost: "2.59",
		corednsCommit: "1db4568",
	},
	{
		version: "v1.36.3", date: time.Date(2026, 7, 22, 18, 7, 38, 0, time.UTC),
		etcd: "3.6.8-0", coredns: "v1.14.2", pause: "3.10.2", agnhost: "2.63.0",
		corednsCommit: "dd1df4f", etcdNext: "3.6.11-0",
	},
	{
		version: "v1.36.4", date: time.Date(2026, 8, 20, 11, 51, 43, 0, time.UTC),
		etcd: "3.6.8-0", coredns: "v1.14.2", pause: "3.10.2", agnhost: "2.63.0",
		corednsCommit: "dd1df4f", etcdNext: "3.6.11-0",
	},
	{
		version: "v1.37.2", date: time.Date(2026, 10, 27, 12, 1, 4, 0, time.UTC),
		etcd: "3.7.0-0", coredns: "v1.14.6", pause: "3.10.2", agnhost: "2.66.1",
	},
}

func recipeOf(version string) (recipe, error) {
	for _, r := range recipes {
		if r.version == version {
			return r, nil
		}
	}
	return recipe{}, &Error{
		Op:     "build Kubernetes " + version,
		Err:    errUnknown,
		Remedy: "name one of " + strings.Join(Versions(), ", "),
	}
}

// A program is one binary and how it is compiled.
type program struct {
	name    string // of the file in bin/
	module  string // of the directory in src/
	pkg     string
	ldflags string
	// tag is set if the program comes with Kubernetes' modules and has a version of its own.
	// Patches of a minor with the same tag share the program, as they share upstream's image.
	tag string
	// upstream has the published program; nil if there is none to trust.
	upstream *published
}

// programs lists the binaries in the order in which they are linked: what a first
// node needs comes first, what people run by hand last.
func (r recipe) programs() []program {
	kubernetes := r.kubernetesModule()
	major, rest, _ := strings.Cut(strings.TrimPrefix(r.version, "v"), ".")
	m, _, _ := strings.Cut(rest, ".")
	stamp := []string{"-s", "-w"}
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		for _, v := range [][2]string{
			{"gitVersion", r.version},
			{"gitMajor", major},
			{"gitMinor", m},
			// Kubernetes' own word for sources that come without their history; the
			// commit is not known then, and clients call themselves "unknown".
			{"gitTreeState", "archive"},
			{"gitCommit", ""},
			{"buildDate", r.date.Format(time.RFC3339)},
		} {
			stamp = append(stamp, "-X", pkg+"."+v[0]+"="+v[1])
		}
	}
	ldflags := strings.Join(stamp, " ")
	kube := func(name string) program {
		return program{name: name, module: kubernetes, pkg: "k8s.io/kubernetes/cmd/" + name, ldflags: ldflags}
	}
	programs := []program{
		kube("kubeadm"),
		kube("kubelet"),
		kube("kube-apiserver"),
		{name: "etcd", module: kubernetes, pkg: "go.etcd.io/etcd/server/v3", ldflags: "-s -w", tag: r.etcd},
		{name: "etcdutl", module: r.etcdModule(), pkg: "go.etcd.io/etcd/etcdutl/v3", ldflags: "-s -w"},
		kube("kube-controller-manager"),
		kube("kube-scheduler"),
		kube("kube-proxy"),
		{name: "coredns", module: r.corednsModule(), pkg: "github.com/coredns/coredns", ldflags: "-s -w -X github.com/coredns/coredns/coremain.GitCommit=" + r.corednsCommit},
		{name: "pause", module: "pause", pkg: ".", ldflags: "-s -w -X main.version=" + r.pause},
		kube("kubectl"),
		{name: "agnhost", module: kubernetes, pkg: "k8s.io/kubernetes/test/images/agnhost", ldflags: ldflags + " -X main.Version=" + r.agnhost, tag: r.agnhost},
	}
	if r.etcdNext != "" {
		v := tagVersion(r.etcdNext)
		programs = append(programs, program{name: v + "/etcd", module: "etcd-" + v, pkg: "go.etcd.io/etcd/server/v3", ldflags: "-s -w", upstream: upstream("etcd", v, "etcd")})
	}
	for i := range programs {
		p := &programs[i]
		switch {
		case p.upstream != nil:
		case p.name == "etcd" || p.name == "etcdutl":
			p.upstream = upstream("etcd", r.etcdVersion(), p.name)
		default:
			p.upstream = upstream("kubernetes", strings.TrimPrefix(r.version, "v"), p.name)
		}
	}
	return programs
}

// kubernetesModule, corednsModule and etcdModule are the names of r's modules.
func (r recipe) kubernetesModule() string {
	return kubernetesPrefix + strings.TrimPrefix(r.version, "v")
}

func (r recipe) corednsModule() string { return "coredns-" + strings.TrimPrefix(r.coredns, "v") }
func (r recipe) etcdModule() string    { return "etcd-" + r.etcdVersion() }

// kubernetesPrefix begins the names of the modules that are compiled without their patch, see
// [toolchain.share].
const kubernetesPrefix = "kubernetes-"

// etcdVersion is that of r's etcd, without a "v".
func (r recipe) etcdVersion() string { return tagVersion(r.etcd) }

// tagVersion returns the part of etcd's tag that its modules have: 3.6.6 of 3.6.6-0.
func tagVersion(tag string) string {
	v, _, _ := strings.Cut(tag, "-")
	return v
}

func (r recipe) program(name string) (program, bool) {
	i := slices.IndexFunc(r.programs(), func(p program) bool { return p.name == name })
	if i < 0 {
		return program{}, false
	}
	return r.programs()[i], true
}

// serves reports whether q, of another version and made with key, can be taken for p, and the key
// that it has as p.
func (p program) serves(q program, key string, sameMinor, fromSource bool) (string, bool) {
	switch {
	case !slices.Contains(q.keys(fromSource), key):
		return "", false
	case slices.Contains(p.keys(fromSource), key):
		return key, true
	case sameMinor && p.tag != "" && p.tag == q.tag:
		return p.key(), true
	}
	return "", false
}

// minor is "v1.36" of v1.36.4.
func (r recipe) minor() string { return r.version[:strings.LastIndex(r.version, ".")] }

// path is where p lies in the cache of its version.
func (p program) path() string { return path.Join("bin", p.name) }

// keys are those of files that are p: compiled, and published unless fromSource is set.
func (p program) keys(fromSource bool) []string {
	if p.upstream == nil || fromSource {
		return []string{p.key()}
	}
	return []string{p.key(), p.upstreamKey()}
}

// upstreamKey is the key of the published p.
func (p program) upstreamKey() string {
	return keyOf("upstream", p.name, p.upstream.url, p.upstream.digest, p.upstream.member(p))
}

// key names everything that decides what a compiled p is, but the version of the Go
// toolchain and the paths of the sources: after an update of Go nobody should have to
// wait for a build again, and no verb but one may build.
func (p program) key() string {
	return keyOf("program", p.name, p.pkg, p.ldflags, buildFlags, buildEnv(), moduleFiles(p.module))
}

// moduleFiles returns the files of a module by the name that they have in it.
func moduleFiles(name string) map[string][]byte {
	if name == "pause" {
		return map[string][]byte{
			"go.mod":  []byte("module pause\n\ngo 1.26.0\n"),
			"main.go": pauseSource,
		}
	}
	files := make(map[string][]byte)
	for from, to := range map[string]string{".mod": "go.mod", ".sum": "go.sum"} {
		b, err := modules.ReadFile("modules/" + name + from)
		if err != nil {
			panic(fmt.Sprintf("read embedded module: %v", err)) // a test reads them all
		}
		files[to] = b
	}
	return files
}

// An imageSpec says what one image is made of.
type imageSpec struct {
	name       string
	ref        string
	binary     string            // program that it carries
	at         string            // absolute path of the binary in the image
	beside     []string          // programs that lie beside it
	links      map[string]string // symbolic links, absolute path to target
	entrypoint []string
	cmd        []string
	user       string
	tools      bool // the packet filter tools come first, as a layer of their own
}

// images lists the images in the order of "kubeadm config images list", then ours.
// Paths, entry points and users are those that kubeadm's manifests count on.
func (r recipe) images() []imageSpec {
	kube := func(name string) imageSpec {
		return imageSpec{name: name, ref: "registry.k8s.io/" + name + ":" + r.version, binary: name, at: "/usr/local/bin/" + name}
	}
	proxy := kube("kube-proxy")
	proxy.tools = true
	images := []imageSpec{
		kube("kube-apiserver"),
		kube("kube-controller-manager"),
		kube("kube-scheduler"),
		proxy,
		{name: "coredns", ref: "registry.k8s.io/coredns/coredns:" + r.coredns, binary: "coredns", at: "/coredns", entrypoint: []string{"/coredns"}},
		{name: "pause", ref: "registry.k8s.io/pause:" + r.pause, binary: "pause", at: "/pause", entrypoint: []string{"/pause"}, user: "65535:65535"},
		// etcdutl is what takes a cluster back from a snapshot, as in the upstream image.
		{name: "etcd", ref: "registry.k8s.io/etcd:" + r.etcd, binary: "etcd", at: "/usr/local/bin/etcd", beside: []string{"etcdutl"}},
		// What people and tests deploy by hand. It has the program of the upstream image,
		// not the shell and the network tools that lie beside it there.
		{
			name: "agnhost", ref: r.agnhostImage(), binary: "agnhost", at: "/agnhost",
			links: map[string]string{"/agnhost-2": "agnhost"}, entrypoint: []string{"/agnhost"}, cmd: []string{"pause"},
		},
	}
	if r.etcdNext != "" {
		v := tagVersion(r.etcdNext)
		// etcdutl is that of r.etcd, which reads the same data: the module proxy lacks that of most patches.
		images = append(images, imageSpec{name: "etcd-" + v, ref: "registry.k8s.io/etcd:" + r.etcdNext, binary: v + "/etcd", at: "/usr/local/bin/etcd", beside: []string{"etcdutl"}})
	}
	return images
}

func (r recipe) agnhostImage() string { return "registry.k8s.io/e2e-test-images/agnhost:" + r.agnhost }

// path is where the archive lies in the cache of its version.
func (i imageSpec) path() string { return path.Join("images", i.name+".tar") }

// programs are those that the image carries.
func (i imageSpec) programs() []string { return append([]string{i.binary}, i.beside...) }

// key names everything that decides what the image is; contents are the digests of
// the files that go into it.
func (i imageSpec) key(date time.Time, contents ...string) string {
	return keyOf("image", i.ref, i.at, i.links, i.entrypoint, i.cmd, i.user, date, contents)
}

// toolsPath is where the layer with kube-proxy's tools lies in the cache of a version.
const toolsPath = "images/kube-proxy-tools.layer.tar"

func toolsKey(date time.Time) string {
	return keyOf("tools", toolPackages, toolFiles, toolLinks, toolContents, runtime.GOARCH, date)
}

// keyOf hashes parts. They are marshalled, so that no two lists of parts look alike.
func keyOf(parts ...any) string {
	b, err := json.Marshal(append([]any{format}, parts...))
	if err != nil {
		panic(fmt.Sprintf("marshal key: %v", err)) // strings, slices and maps of them
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
