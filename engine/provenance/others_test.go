package provenance

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestOthers(t *testing.T) {
	own := installed(t, newKey(t, "publisher"))
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	links, older, plugin := filepath.Join(root, "links"), filepath.Join(root, "older"), filepath.Join(root, "plugin")
	for _, name := range []string{"constellation", "constellation-sandbox"} {
		put(t, filepath.Join(older, name), "another program")
	}
	for _, link := range []struct{ from, to string }{
		{filepath.Join(links, "constellation"), filepath.Join(own, "constellation")},
		{filepath.Join(links, "constellation-sandbox"), filepath.Join(own, "constellation-sandbox")},
		{filepath.Join(links, "kubectl-constellation"), filepath.Join(root, "nothing")},
		{filepath.Join(plugin, "kubectl-constellation"), filepath.Join(older, "constellation")},
	} {
		if err := os.MkdirAll(filepath.Dir(link.from), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(link.to, link.from); err != nil {
			t.Fatal(err)
		}
	}
	put(t, filepath.Join(root, "folder", "constellation", "file"), "")
	put(t, filepath.Join(root, "data", "constellation"), "")
	if err := os.Chmod(filepath.Join(root, "data", "constellation"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		path []string
		want []string // the path of each, with a mark if it is found first
	}{
		{name: "this one alone", path: []string{links, own, "/no/such/folder", "", "."}, want: nil},
		{name: "not a program", path: []string{filepath.Join(root, "folder"), filepath.Join(root, "data"), links}, want: nil},
		{name: "an older one first", path: []string{older, links}, want: []string{older + "/constellation first", older + "/constellation-sandbox first"}},
		{name: "an older one later, twice", path: []string{links, older, older}, want: []string{older + "/constellation", older + "/constellation-sandbox"}},
		{name: "an older one only as a plugin", path: []string{links, plugin}, want: []string{plugin + "/kubectl-constellation first"}},
		{name: "this one not in PATH", path: []string{older}, want: []string{older + "/constellation first", older + "/constellation-sandbox first"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			for _, o := range Others(own, tt.path) {
				s := o.Path
				if o.First {
					s += " first"
				}
				got = append(got, s)
				if filepath.Dir(o.File) != older {
					t.Errorf("the file of %s is %s, want one in %s", o.Path, o.File, older)
				}
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("others are %q, want %q", got, tt.want)
			}
		})
	}

	// A Go program contains its commit; that of a test binary is not recorded.
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(root, "built", "constellation")
	if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(exe, link); err != nil {
		t.Fatal(err)
	}
	if got := Others(own, []string{filepath.Dir(link)}); len(got) != 1 || got[0].Path != link {
		t.Errorf("others are %+v, want %s", got, link)
	}
}
