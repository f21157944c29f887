package release

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// bundled is a bundle of a feed of two files and of one chart.
func bundled(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	feed := map[string][]byte{"index.json": []byte("{}\n"), "index.json.sig": []byte("sig\n"), "releases/v1.1.0.yaml": bytes.Repeat([]byte("x"), 3000)}
	chart := []byte("chart")
	err := WriteBundle(&b, BundleContents{Charts: []BundleChart{{"cni", "1.0.0", "file:charts", "sha256:" + digest(chart)}}}, feed, map[string][]byte{"sha256:" + digest(chart): chart})
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func opened(t *testing.T, b []byte) (*Bundle, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "b.tar")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return OpenBundle(path)
}

func TestBundleRoundTrip(t *testing.T) {
	whole := bundled(t)
	if !bytes.Equal(whole, bundled(t)) {
		t.Error("the same contents made other bytes")
	}
	b, err := opened(t, whole)
	if err != nil {
		t.Fatal(err)
	}
	got, ok, err := b.Blob("sha256:" + digest([]byte("chart")))
	if string(got) != "chart" || !ok || err != nil || !b.HasFeed() {
		t.Errorf("%q %t %v, feed %t", got, ok, err, b.HasFeed())
	}
	if _, ok, err := b.Blob("sha256:" + strings.Repeat("0", 64)); ok || err != nil {
		t.Errorf("missing blob: %t, %v", ok, err)
	}
	s := bundleStore{b}
	if a, err := s.read(t.Context(), "releases/v1.1.0.yaml", 4000, ""); err != nil || len(a.bytes) != 3000 {
		t.Errorf("%d bytes: %v", len(a.bytes), err)
	}
	if _, err := s.read(t.Context(), "summaries.json", 4000, ""); !errors.Is(err, ErrAbsent) {
		t.Errorf("a missing file: %v", err)
	}
}

// A truncated or modified bundle is refused as a whole.
func TestDamagedBundlesAreRefused(t *testing.T) {
	whole := bundled(t)
	last := len(bytes.TrimRight(whole, "\x00"))
	for n := 0; n < last; n += 97 {
		if _, err := opened(t, whole[:n]); !errors.Is(err, ErrBundle) {
			t.Fatalf("cut after %d bytes: %v", n, err)
		}
	}
	for n := 0; n < last; n += 31 {
		changed := bytes.Clone(whole)
		changed[n] ^= 1
		if b, err := opened(t, changed); err == nil && (len(b.Files) != 4 || !bytes.Equal(contents(t, b), contents(t, must(opened(t, whole))))) {
			t.Fatalf("changed at byte %d: it is taken", n)
		}
	}
	if _, err := opened(t, append(bytes.Clone(whole[:last+512-last%512]), whole...)); !errors.Is(err, ErrBundle) || !strings.Contains(err.Error(), "unexpected data after its last file") {
		t.Errorf("with something behind it: %v", err)
	}
	for name, changed := range map[string][]byte{
		"another archive after its end": append(bytes.Clone(whole), whole...),
		"a byte after its end":          append(bytes.Clone(whole), 0),
	} {
		if _, err := opened(t, changed); !errors.Is(err, ErrBundle) || !strings.Contains(err.Error(), "unexpected data after its end") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, h := range map[string]*tar.Header{
		"extended headers":      {Name: bundleManifest, Typeflag: tar.TypeReg, Format: tar.FormatPAX, PAXRecords: map[string]string{"comment": "x"}},
		"another format of tar": {Name: bundleManifest, Typeflag: tar.TypeReg, Format: tar.FormatGNU},
		"a link":                {Name: bundleManifest, Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd", Format: tar.FormatUSTAR},
		"a device":              {Name: bundleManifest, Typeflag: tar.TypeChar, Format: tar.FormatUSTAR},
		"other case":            {Name: "Bundle.json", Typeflag: tar.TypeReg, Format: tar.FormatUSTAR},
	} {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := opened(t, b.Bytes()); !errors.Is(err, ErrBundle) || !strings.Contains(err.Error(), "another format of tar") && !strings.Contains(err.Error(), "instead of bundle.json") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := opened(t, nil); !errors.Is(err, ErrBundle) || !strings.Contains(err.Error(), "it ends before bundle.json") {
		t.Errorf("an empty file: %v", err)
	}
	b, err := opened(t, whole)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(b.path, bytes.Repeat([]byte{1}, len(whole)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := b.Blob("sha256:" + digest([]byte("chart"))); !errors.Is(err, ErrBundle) {
		t.Errorf("changed after it was opened: %v", err)
	}
}

func must(b *Bundle, err error) *Bundle {
	if err != nil {
		panic(err)
	}
	return b
}

// contents are all files of a bundle, one after the other.
func contents(t *testing.T, b *Bundle) (out []byte) {
	t.Helper()
	for _, f := range b.Files {
		data, ok, err := b.file(f.Name)
		if !ok || err != nil {
			t.Fatal(err)
		}
		out = append(out, data...)
	}
	return out
}
