package build

import (
	"archive/tar"
	"debug/elf"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"constellation/internal/testneeds"
)

func TestDependencies(t *testing.T) {
	for _, tt := range []struct {
		name, field string
		want        []string
	}{
		{name: "none", field: ", ", want: nil},
		{name: "with versions", field: "libc6 (>= 2.34), libmnl0 (>= 1.0.3-4~), ", want: []string{"libc6", "libmnl0"}},
		{name: "of alternatives the first", field: "debconf (>= 0.5) | debconf-2.0, libbpf1:any", want: []string{"debconf", "libbpf1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, dependencies(tt.field)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestClosureFollowsLibraries(t *testing.T) {
	// A real program of this computer stands for every tool.
	const program = "/bin/ls"
	libraries, loader, err := needs(program)
	if err != nil || len(libraries) == 0 || loader == "" {
		t.Skipf("needs a dynamically linked %s: %v, %v, %v", program, libraries, loader, err)
	}
	tree := t.TempDir()
	for _, name := range []string{"usr/sbin/nft", "usr/sbin/xtables-nft-multi", "usr/sbin/conntrack", "bin/ip", "usr/lib/x86_64-linux-gnu/xtables/libxt_a.so"} {
		copyFile(t, program, filepath.Join(tree, name))
	}
	files, lacking, err := closure(tree)
	if err != nil {
		t.Fatal(err)
	}
	want := slices.Sorted(slices.Values(append(slices.Clone(libraries), filepath.Base(loader))))
	if diff := cmp.Diff(slices.Compact(want), lacking); diff != "" {
		t.Errorf("without any library, these are lacking (-want +got):\n%s", diff)
	}
	if files["/usr/bin/ip"] != filepath.Join(tree, "bin/ip") {
		t.Errorf("bin/ip is not below /usr: %v", files)
	}

	// Now libraries that need no others, by links as packages have them.
	for _, name := range want {
		file := filepath.Join(tree, "lib/x86_64-linux-gnu", name+".1.2.3")
		copyFile(t, leaf(t), file)
		if err := os.Symlink(filepath.Base(file), filepath.Join(filepath.Dir(file), name)); err != nil && !errors.Is(err, fs.ErrExist) {
			t.Fatal(err)
		}
	}
	files, lacking, err = closure(tree)
	if err != nil || len(lacking) > 0 {
		t.Fatalf("with all libraries, %v are lacking, %v", lacking, err)
	}
	for _, name := range libraries {
		if files["/usr/lib/x86_64-linux-gnu/"+name] == "" {
			t.Errorf("%s is not in the image: %v", name, files)
		}
	}
	if files[loader] == "" {
		t.Errorf("the loader is not at %s, where programs look for it: %v", loader, files)
	}
}

// leaf returns a file of this computer that is ELF and needs no library.
func leaf(t *testing.T) string {
	t.Helper()
	for _, pattern := range []string{"/lib*/*/ld-linux*.so*", "/lib*/ld-linux*.so*"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if f, err := elf.Open(file); err == nil {
				defer f.Close()
				if libs, err := f.ImportedLibraries(); err == nil && len(libs) == 0 {
					return file
				}
			}
		}
	}
	t.Skip("needs a loader among the libraries of this computer")
	return ""
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, b, 0o755); err != nil {
		t.Fatal(err)
	}
}

// The lists of apt may be missing, as in container images, or stale. The package then
// makes its own and leaves those of the computer alone.
func TestPackagesComeWithoutTheListsOfTheComputer(t *testing.T) {
	testneeds.Network(t, "fetches 20 MB from Debian's archive")
	dir := t.TempDir()
	d := &debs{dir: filepath.Join(dir, "debs"), tree: filepath.Join(dir, "tree"), private: filepath.Join(dir, "apt"), versions: make(map[string]string)}
	if err := errors.Join(os.Mkdir(d.dir, 0o755), os.Mkdir(d.tree, 0o755)); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "none", "partial"), 0o755); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(dir, "apt.conf") // lists that are not there
	if err := os.WriteFile(config, []byte(`Dir::State::lists "`+dir+`/none";`), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("APT_CONFIG", config)
	files, err := d.collect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if d.apt == nil || files["/usr/sbin/nft"] == "" || d.versions["nftables"] == "" {
		t.Errorf("own lists were made: %v; versions %v; files %v", d.apt != nil, d.versions, files)
	}
}

func TestToolsRunOnTheirOwn(t *testing.T) {
	testneeds.Root(t, "to change the root directory")
	a := cached(t, DefaultVersion)
	root := t.TempDir()
	f, err := os.Open(filepath.Join(a.Dir, filepath.FromSlash(toolsPath)))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	unpack(t, f, root)
	for _, tt := range []struct{ command, want string }{
		{"nft --version", "nftables v"},
		{"iptables --version", "(nf_tables)"},
		{"ip6tables-restore --version", "(nf_tables)"},
		{"iptables -m comment --help", "comment match options"}, // a module loaded by name
		{"iptables -t nat -j MASQUERADE --help", "MASQUERADE target options"},
		{"conntrack --version", "conntrack v"},
		{"ip -V", "iproute2"},
	} {
		args := strings.Fields(tt.command)
		cmd := exec.Command("chroot", append([]string{root}, args...)...)
		cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), tt.want) {
			t.Errorf("%s: %v, %q, want %q in it", tt.command, err, out, tt.want)
		}
	}
}

func unpack(t *testing.T, r io.Reader, dir string) {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		switch h.Typeflag {
		case tar.TypeDir:
			err = root.MkdirAll(h.Name, 0o755)
		case tar.TypeSymlink:
			err = root.Symlink(h.Linkname, h.Name)
		default:
			var f *os.File
			if f, err = root.OpenFile(h.Name, os.O_CREATE|os.O_WRONLY|os.O_EXCL, h.FileInfo().Mode()); err == nil {
				_, err = io.Copy(f, tr)
				err = errors.Join(err, f.Close())
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}
