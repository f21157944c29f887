//go:build unix

package component

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// item is an entry of an archive that a test makes.
type item struct {
	tar.Header
	data []byte
}

func file(name string, data []byte) item {
	return item{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755, Size: int64(len(data))}, data}
}

func dir(name string) item {
	return item{tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755}, nil}
}

func link(kind byte, name, target string) item {
	return item{tar.Header{Typeflag: kind, Name: name, Linkname: target, Mode: 0o777}, nil}
}
func symlink(name, target string) item  { return link(tar.TypeSymlink, name, target) }
func hardlink(name, target string) item { return link(tar.TypeLink, name, target) }

func archive(t testing.TB, items ...item) []byte {
	t.Helper()
	var b bytes.Buffer
	gz := gzip.NewWriter(&b)
	w := tar.NewWriter(gz)
	for _, i := range items {
		if err := w.WriteHeader(&i.Header); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(i.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := gz.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// tree describes everything below dir.
func tree(t testing.TB, dir string) string {
	t.Helper()
	var s strings.Builder
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		i, err := d.Info()
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		fmt.Fprintf(&s, "%s %s", i.Mode(), rel)
		switch {
		case i.Mode().IsRegular():
			b, _ := os.ReadFile(p)
			fmt.Fprintf(&s, " %q", b)
		case i.Mode()&fs.ModeSymlink != 0:
			l, _ := os.Readlink(p)
			fmt.Fprintf(&s, " -> %s", l)
		}
		s.WriteByte('\n')
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return s.String()
}

// unpack installs an archive into <root>/in/target beside a canary.
func unpack(t testing.TB, b []byte, l limits) (root string, err error) {
	t.Helper()
	root = t.TempDir()
	os.MkdirAll(filepath.Join(root, "in", "target"), 0o755)
	os.WriteFile(filepath.Join(root, "in", "canary"), []byte("canary"), 0o600)
	os.WriteFile(filepath.Join(root, "in", "target", "own"), []byte("own"), 0o644)
	d, err := os.OpenRoot(filepath.Join(root, "in", "target"))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	f.Write(b)
	in := &Installer{limits: l}
	return root, in.extract(t.Context(), d, f, Component{Name: "cni", Digest: anyDigest, Path: "/in/target", Extract: true})
}

func TestArchivesThatAreRefused(t *testing.T) {
	ok := file("bin/bridge", []byte("bridge"))
	mode := func(i item, m int64) item { i.Mode = m; return i }
	many := make([]item, 60)
	for i := range many {
		many[i] = file(fmt.Sprint("f", i), nil)
	}
	for _, tt := range []struct {
		name  string
		items []item
		want  string
	}{
		{name: "absolute name", items: []item{ok, file("/etc/passwd", []byte("x"))}, want: "leaves the directory"},
		{name: "name that climbs", items: []item{ok, file("../canary", []byte("x"))}, want: "leaves the directory"},
		{name: "name that climbs in the middle", items: []item{ok, file("bin/../../canary", []byte("x"))}, want: "leaves the directory"},
		{name: "name that climbs but stays", items: []item{ok, file("bin/../x", []byte("x"))}, want: "leaves the directory"},
		{name: "the directory itself as a file", items: []item{ok, file(".", []byte("x"))}, want: "is the directory itself"},
		{name: "absolute symbolic link", items: []item{ok, symlink("l", "/etc/passwd")}, want: "links to outside"},
		{name: "symbolic link that climbs", items: []item{ok, symlink("l", "../canary")}, want: "links to outside"},
		{name: "symbolic link that climbs from below", items: []item{ok, symlink("bin/l", "../../canary")}, want: "links to outside"},
		{name: "symbolic link that climbs behind another", items: []item{ok, symlink("bin/up", ".."), symlink("l", "bin/up/../canary")}, want: "links to outside"},
		{name: "empty symbolic link", items: []item{ok, symlink("l", "")}, want: ""},
		{name: "file behind a symbolic link", items: []item{ok, symlink("l", "bin"), file("l/x", []byte("x"))}, want: "is not a directory"},
		{name: "file below a file", items: []item{ok, file("bin/bridge/x", []byte("x"))}, want: "is not a directory"},
		{name: "hard link that climbs", items: []item{ok, hardlink("l", "../canary")}, want: "links to outside"},
		{name: "absolute hard link", items: []item{ok, hardlink("l", "/etc/passwd")}, want: "links to outside"},
		{name: "hard link to an existing file", items: []item{ok, hardlink("l", "own")}, want: "is not in the archive"},
		{name: "hard link to a symbolic link", items: []item{ok, symlink("s", "bin"), hardlink("l", "s")}, want: "is not in the archive"},
		{name: "character device", items: []item{ok, {tar.Header{Typeflag: tar.TypeChar, Name: "null", Devmajor: 1, Devminor: 3}, nil}}, want: "neither file, directory nor link"},
		{name: "block device", items: []item{ok, {tar.Header{Typeflag: tar.TypeBlock, Name: "sda"}, nil}}, want: "neither file, directory nor link"},
		{name: "fifo", items: []item{ok, {tar.Header{Typeflag: tar.TypeFifo, Name: "pipe"}, nil}}, want: "neither file, directory nor link"},
		{name: "set-user-ID", items: []item{ok, mode(file("su", []byte("x")), 0o4755)}, want: "set-user-ID"},
		{name: "set-group-ID", items: []item{ok, mode(file("sg", []byte("x")), 0o2755)}, want: "set-user-ID"},
		{name: "sticky directory", items: []item{ok, mode(dir("tmp"), 0o1777)}, want: "set-user-ID"},
		{name: "a name twice", items: []item{ok, file("bin/bridge", []byte("other"))}, want: "is there twice"},
		{name: "a name twice in two spellings", items: []item{ok, file("./bin//bridge", []byte("other"))}, want: "is there twice"},
		{name: "a directory twice", items: []item{dir("a"), dir("a/")}, want: "is there twice"},
		{name: "a file that becomes a link", items: []item{ok, symlink("bin/bridge", "x")}, want: "is there twice"},
		{name: "a directory that becomes a file", items: []item{dir("a"), file("a", nil)}, want: "is there twice"},
		{name: "too many entries", items: many, want: "too many entries"},
		{name: "too much content", items: []item{ok, file("big", make([]byte, 90_000)), file("big2", make([]byte, 90_000))}, want: "more than 100000 bytes"},
		{name: "endlessly deep", items: []item{ok, file(strings.Repeat("d/", 40)+"x", nil)}, want: "too long or too deep"},
		{name: "a long name", items: []item{ok, file(strings.Repeat("n", 2000), nil)}, want: "too long or too deep"},
		{name: "a name that is no text", items: []item{ok, {tar.Header{Typeflag: tar.TypeReg, Name: "\xff\xfe", Mode: 0o644, Format: tar.FormatGNU}, nil}}, want: "malformed name"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root, err := unpack(t, archive(t, tt.items...), limits{entries: 50, extracted: 100_000})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
			if got := tree(t, filepath.Join(root, "in")); got != "drwxr-xr-x .\n-rw------- canary \"canary\"\ndrwxr-xr-x target\n-rw-r--r-- target/own \"own\"\n" {
				t.Errorf("something became visible:\n%s", got)
			}
		})
	}
}

// sparseOf makes a sparse file of an archive's only entry: in the format of GNU, or of PAX.
func sparseOf(t testing.TB, pax bool) []byte {
	t.Helper()
	var b bytes.Buffer
	gz := gzip.NewWriter(&b)
	header := func(name string, kind byte, size int, magic string) {
		block := make([]byte, 512)
		copy(block, name)
		copy(block[100:], "0000644\x000000000\x000000000\x00")
		copy(block[124:], fmt.Sprintf("%011o\x0000000000000\x00", size))
		block[156] = kind
		copy(block[257:], magic)
		if kind == tar.TypeGNUSparse { // one byte at the end of 1 MiB
			copy(block[386:], fmt.Sprintf("%011o\x00%011o\x00", 1<<20-1, 1))
			copy(block[483:], fmt.Sprintf("%011o\x00", 1<<20))
		}
		copy(block[148:156], "        ")
		sum := 0
		for _, c := range block {
			sum += int(c)
		}
		copy(block[148:], fmt.Sprintf("%06o\x00 ", sum))
		gz.Write(block)
	}
	pad := func(s string) { gz.Write([]byte(s + strings.Repeat("\x00", 512-len(s)))) }
	if pax {
		records := ""
		for _, r := range []string{"GNU.sparse.major=1\n", "GNU.sparse.minor=0\n", "GNU.sparse.name=huge\n", "GNU.sparse.realsize=1048576\n"} {
			records += fmt.Sprintf("%d %s", len(r)+3, r)
		}
		header("PaxHeaders/huge", tar.TypeXHeader, len(records), "ustar\x0000")
		pad(records)
		header("huge", tar.TypeReg, 513, "ustar\x0000")
		pad("1\n1048575\n1\n")
	} else {
		header("huge", tar.TypeGNUSparse, 1, "ustar  \x00")
	}
	pad("x")
	gz.Write(make([]byte, 1024))
	gz.Close()
	return b.Bytes()
}

// Archives that two programs read in two ways are refused.
func TestAmbiguousArchivesAreRefused(t *testing.T) {
	one, two := archive(t, file("a", []byte("one"))), archive(t, file("b", []byte("two")))
	for name, tt := range map[string]struct {
		b    []byte
		want string
	}{
		"a sparse file of GNU":           {sparseOf(t, false), "is a sparse file"},
		"a sparse file of PAX":           {sparseOf(t, true), "is a sparse file"},
		"names that differ in case":      {archive(t, file("bin/Bridge", nil), file("bin/bridge", nil)), "in case only"},
		"folders that differ in case":    {archive(t, dir("bin"), dir("BIN")), "in case only"},
		"a link that differs in case":    {archive(t, file("bridge", nil), symlink("Bridge", "x")), "in case only"},
		"two archives one after another": {append(bytes.Clone(one), two...), "data after its end"},
		"data after the archive":         {append(bytes.Clone(one), strings.Repeat("more", 10)...), "gzip"},
	} {
		t.Run(name, func(t *testing.T) {
			root, err := unpack(t, tt.b, limits{entries: 50, extracted: 4 << 20})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
			if got := hidden(t, filepath.Join(root, "in", "target"), "own"); got != nil {
				t.Errorf("left behind: %v", got)
			}
		})
	}
	if _, err := unpack(t, one, limits{entries: 50, extracted: 4 << 20}); err != nil {
		t.Errorf("one archive: %v", err)
	}
}

func TestBombsAreRefused(t *testing.T) {
	// What the tar reader skips by itself: a long run of extended headers that
	// never lead to an entry.
	var headers bytes.Buffer
	gz := gzip.NewWriter(&headers)
	block := make([]byte, 512)
	copy(block, "PaxHeaders/x")
	copy(block[100:], "0000644\x000000000\x000000000\x0000000000000\x0000000000000\x00")
	block[156] = 'x'
	copy(block[257:], "ustar\x0000")
	copy(block[148:156], "        ")
	sum := 0
	for _, c := range block {
		sum += int(c)
	}
	copy(block[148:], fmt.Sprintf("%06o\x00 ", sum))
	for range 100_000 {
		gz.Write(block)
	}
	gz.Close()

	// A file that says it is small, and one that says it is sparse and huge.
	sparse := archive(t, item{tar.Header{
		Typeflag: tar.TypeReg, Name: "sparse", Mode: 0o644, Format: tar.FormatPAX,
		PAXRecords: map[string]string{"comment": strings.Repeat("long ", 10_000)},
	}, nil})

	for name, b := range map[string][]byte{
		"headers without end": headers.Bytes(),
		"zeros":               archive(t, file("zeros", make([]byte, 8<<20))),
		"no archive":          []byte("not an archive"),
		"nothing":             nil,
		"half an archive":     archive(t, file("a", content(50_000)))[:20_000],
	} {
		t.Run(name, func(t *testing.T) {
			root, err := unpack(t, b, limits{entries: 50, extracted: 100_000})
			if err == nil {
				t.Error("no error")
			}
			if got := hidden(t, filepath.Join(root, "in", "target"), "own"); got != nil {
				t.Errorf("left behind: %v", got)
			}
		})
	}
	if _, err := unpack(t, sparse, limits{entries: 50, extracted: 100_000}); err != nil {
		t.Errorf("a long remark is harmless: %v", err)
	}
}

func TestArchivesDoNotReplaceOtherKinds(t *testing.T) {
	for name, items := range map[string][]item{
		"a directory where a file exists":         {dir("own")},
		"a file below a file, after another file": {file("first", nil), file("own/x", nil)},
	} {
		root, err := unpack(t, archive(t, items...), limits{})
		if err == nil || !strings.Contains(err.Error(), "exists as something else") {
			t.Errorf("%s: got %v", name, err)
		}
		if got := hidden(t, filepath.Join(root, "in", "target"), "own"); got != nil {
			t.Errorf("%s: left behind: %v", name, got)
		}
	}
}

func TestArchivesAreInstalledAndVerified(t *testing.T) {
	a := archive(t,
		dir("./"),
		file("bin/bridge", []byte("bridge")),
		item{tar.Header{Typeflag: tar.TypeReg, Name: "etc/plain", Mode: 0o666, Size: 5}, []byte("plain")},
		dir("bin"),
		hardlink("bin/host-local", "bin/bridge"),
		symlink("bin/portmap", "../bin/bridge"),
		symlink("current", "bin"),
	)
	s := &script{steps: []http.HandlerFunc{serve(a, `"x"`)}}
	srv := httptest.NewServer(s)
	defer srv.Close()
	root := t.TempDir()
	os.MkdirAll(filepath.Join(root, "opt/cni/bin"), 0o755)
	os.WriteFile(filepath.Join(root, "opt/cni/bin/bridge"), []byte("a much longer old one"), 0o755)
	os.WriteFile(filepath.Join(root, "opt/cni/bin/other"), []byte("other"), 0o755)
	in := &Installer{Root: root, limits: fast}
	l := List{{Name: "cni-plugins", URL: srv.URL, Digest: digestOf(a), Path: "/opt/cni", Extract: true}}
	if err := in.Install(t.Context(), l, nil); err != nil {
		t.Fatal(err)
	}
	got := tree(t, filepath.Join(root, "opt/cni"))
	lines := strings.Split(got, "\n")
	var shown []string
	for _, line := range lines {
		if !strings.Contains(line, "manifest.json") {
			shown = append(shown, line)
		}
	}
	want := `drwxr-xr-x .
drwxr-xr-x bin
-rwxr-xr-x bin/bridge "bridge"
-rwxr-xr-x bin/host-local "bridge"
-rwxr-xr-x bin/other "other"
Lrwxrwxrwx bin/portmap -> ../bin/bridge
Lrwxrwxrwx current -> bin
drwxr-xr-x etc
-rw-r--r-- etc/plain "plain"
`
	if g := strings.Join(shown, "\n"); g != want {
		t.Errorf("got\n%s\nwant\n%s", g, want)
	}
	if err := in.Verify(t.Context(), l); err != nil {
		t.Error(err)
	}
	if err := in.Install(t.Context(), l, nil); err != nil || len(s.asked) != 1 {
		t.Errorf("fetched again: %d requests, %v", len(s.asked), err)
	}
	for name, damage := range map[string]func(){
		"a file altered": func() { os.WriteFile(filepath.Join(root, "opt/cni/etc/plain"), []byte("plaim"), 0o644) },
		"a file removed": func() { os.Remove(filepath.Join(root, "opt/cni/bin/host-local")) },
		"a link bent": func() {
			os.Remove(filepath.Join(root, "opt/cni/current"))
			os.Symlink("etc", filepath.Join(root, "opt/cni/current"))
		},
		"mode changed": func() { os.Chmod(filepath.Join(root, "opt/cni/etc/plain"), 0o644|fs.ModeSetuid) },
	} {
		damage()
		if err := in.Verify(t.Context(), l); err == nil {
			t.Errorf("%s: not noticed", name)
		}
		if err := in.Install(t.Context(), l, nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := in.Verify(t.Context(), l); err != nil {
			t.Errorf("%s: not mended: %v", name, err)
		}
	}
}

func FuzzExtract(f *testing.F) {
	f.Add(archive(f, dir("bin"), file("bin/bridge", []byte("x")), symlink("l", "bin/bridge"), hardlink("h", "bin/bridge")))
	f.Add(archive(f, symlink("up", ".."), file("up/canary", []byte("x"))))
	f.Add(archive(f, dir("a"), symlink("a/l", ".."), symlink("m", "a/l/.."), file("m/canary", []byte("x"))))
	f.Add(archive(f, file("../canary", []byte("x"))))
	// The fuzzer works on the tar, not on its compressed form, where a changed bit
	// is only a checksum error.
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 2 && b[0] == 0x1f && b[1] == 0x8b {
			if r, err := gzip.NewReader(bytes.NewReader(b)); err == nil {
				var plain bytes.Buffer
				plain.ReadFrom(io.LimitReader(r, 1<<20))
				b = plain.Bytes()
			}
		}
		var z bytes.Buffer
		gz, _ := gzip.NewWriterLevel(&z, gzip.NoCompression)
		gz.Write(b)
		gz.Close()
		root, err := unpack(t, z.Bytes(), limits{entries: 50, extracted: 100_000})
		in := filepath.Join(root, "in")
		if got := hidden(t, root, "in"); got != nil {
			t.Fatalf("outside: %v", got)
		}
		if got := hidden(t, in, "canary", "target"); got != nil {
			t.Fatalf("outside: %v", got)
		}
		if c, _ := os.ReadFile(filepath.Join(in, "canary")); string(c) != "canary" {
			t.Fatal("wrote outside")
		}
		if err != nil {
			if got := hidden(t, filepath.Join(in, "target"), "own"); got != nil {
				t.Fatalf("%v, but visible: %v", err, got)
			}
			return
		}
		// No name of what was unpacked leads out, and nothing has powers.
		filepath.WalkDir(in, func(p string, d fs.DirEntry, _ error) error {
			i, err := d.Info()
			if err != nil {
				return nil
			}
			if i.Mode()&(fs.ModeSetuid|fs.ModeSetgid|fs.ModeSticky|fs.ModeDevice|fs.ModeNamedPipe) != 0 {
				t.Errorf("%s is %s", p, i.Mode())
			}
			if to, err := filepath.EvalSymlinks(p); err == nil && !strings.HasPrefix(to+"/", in+"/") {
				t.Errorf("%s leads to %s", p, to)
			}
			if to, err := filepath.EvalSymlinks(p); err == nil && p != in && !strings.HasPrefix(to+"/", filepath.Join(in, "target")+"/") && to != filepath.Join(in, "canary") {
				t.Errorf("%s leads out to %s", p, to)
			}
			return nil
		})
	})
}
