package release

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"constellation/engine/component"
	"constellation/engine/version"
)

var (
	k136  = version.MustParse("v1.36.3")
	parts = component.List{
		{Name: "kubeadm", URL: "https://example/kubeadm", Digest: "sha256:" + strings.Repeat("ab", 32), Path: "/usr/local/bin/kubeadm", Mode: 0o755},
		{Name: "kubelet", URL: "https://example/kubelet", Digest: "sha256:" + strings.Repeat("cd", 32), Path: "/usr/local/bin/kubelet", Mode: 0o755},
	}
)

func vouch(t testing.TB, k *PrivateKey) string {
	t.Helper()
	s, err := k.Vouch(Vouched{"v1.36.3": {"amd64": parts.Digest()}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestStatementCoversOneListOfOneVersion(t *testing.T) {
	key, stranger := newTestKey(t, "builder"), newTestKey(t, "stranger")
	trust := NewTrust(stranger.Key, key.Key)
	good := vouch(t, key)
	if err := trust.Verify(good, k136, "amd64", parts); err != nil {
		t.Fatal(err)
	}
	if again := vouch(t, key); again != good {
		t.Error("the same statement has two texts")
	}
	changed := func(f func(*component.Component)) component.List {
		l := append(component.List{}, parts...)
		f(&l[1])
		return l
	}
	bent := func(f func(*signedStatement)) string {
		var s signedStatement
		if err := json.Unmarshal([]byte(good), &s); err != nil {
			t.Fatal(err)
		}
		f(&s)
		b, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	// A signature of the same key over another kind of document is not valid for a statement.
	signed := func(document string) string {
		sig, err := key.sign([]byte(document))
		if err != nil {
			t.Fatal(err)
		}
		s, err := joinStatement([]byte(document), sig, nil)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	for _, tt := range []struct {
		name  string
		trust Trust
		text  string
		v     version.Version
		arch  string
		list  component.List
		want  error
	}{
		{name: "no statement", text: "", want: ErrNoStatement},
		{name: "no keys", trust: NewTrust(), want: ErrNoMachineKeys},
		{name: "the zero value trusts nobody", trust: Trust{keys: []Key{}}, want: ErrNoMachineKeys},
		{name: "another key", trust: NewTrust(stranger.Key), want: ErrSigner},
		{name: "another version", v: version.MustParse("v1.36.2"), want: ErrNotVouched},
		{name: "another architecture", arch: "arm64", want: ErrNotVouched},
		{name: "another digest", list: changed(func(c *component.Component) { c.Digest = parts[0].Digest }), want: ErrNotVouched},
		{name: "another address", list: changed(func(c *component.Component) { c.URL += "?" }), want: ErrNotVouched},
		{name: "another path", list: changed(func(c *component.Component) { c.Path = "/etc/cron.d/x" }), want: ErrNotVouched},
		{name: "another mode", list: changed(func(c *component.Component) { c.Mode = 0o700 }), want: ErrNotVouched},
		{name: "an archive", list: changed(func(c *component.Component) { c.Extract = true }), want: ErrNotVouched},
		{name: "another order", list: component.List{parts[1], parts[0]}, want: ErrNotVouched},
		{name: "less", list: parts[:1], want: ErrNotVouched},
		{name: "nothing", list: component.List{}, want: ErrNotVouched},
		{name: "an altered statement", text: bent(func(s *signedStatement) { s.Statement = strings.Replace(s.Statement, "1.36.3", "1.36.4", 1) }), v: version.MustParse("v1.36.4"), want: ErrSigner},
		{name: "no signature", text: bent(func(s *signedStatement) { s.Signature = "" }), want: ErrSigner},
		{name: "a signature that is no base64", text: bent(func(s *signedStatement) { s.Signature = "!" }), want: ErrUntrusted},
		{name: "keys of the caller's own", text: bent(func(s *signedStatement) {
			s.Keys = []signedKeySet{signSet(t, stranger, keySet{Schema: schema, Type: keySetType, Sequence: 1, Created: today, Expires: today, Keys: []setKey{{"stranger", string(stranger.PEM())}}})}
		}), trust: NewTrust(key.Key), want: ErrUntrusted},
		{name: "a key set without signatures", text: bent(func(s *signedStatement) { s.Keys = []signedKeySet{{Set: "{}"}} }), want: ErrUntrusted},
		{name: "an unknown field", text: strings.Replace(good, "{", `{"x":1,`, 1), want: ErrUntrusted},
		{name: "a field twice", text: strings.Replace(good, "{", `{"signature":"",`, 1), want: ErrUntrusted},
		{name: "another type", text: signed(`{"schema":"1","type":"` + indexType + `","kubernetes":{"v1.36.3":{"amd64":"` + parts.Digest() + `"}}}`), want: ErrUntrusted},
		{name: "another format", text: signed(`{"schema":"2","type":"` + statementType + `","kubernetes":{"v1.36.3":{"amd64":"` + parts.Digest() + `"}}}`), want: ErrUntrusted},
		{name: "a version twice", text: signed(`{"schema":"1","type":"` + statementType + `","kubernetes":{"v1.36.3":{},"v1.36.3":{"amd64":"` + parts.Digest() + `"}}}`), want: ErrUntrusted},
		{name: "no JSON", text: "yes", want: ErrUntrusted},
		{name: "too long", text: good + strings.Repeat(" ", MaxStatement), want: ErrUntrusted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.text == "" && tt.name != "no statement" {
				tt.text = good
			}
			if tt.trust.keys == nil && !errors.Is(tt.want, ErrNoMachineKeys) {
				tt.trust = trust
			}
			if tt.v.IsZero() {
				tt.v = k136
			}
			if tt.arch == "" {
				tt.arch = "amd64"
			}
			if tt.list == nil {
				tt.list = parts
			}
			if err := tt.trust.Verify(tt.text, tt.v, tt.arch, tt.list); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
}

// TestStatementsSurviveKeyRotation publishes a feed with rotated keys, and verifies its
// statements with the keys of older and newer images.
func TestStatementsSurviveKeyRotation(t *testing.T) {
	first, second, third := newTestKey(t, "first"), newTestKey(t, "second"), newTestKey(t, "third")
	from, dir := sources(t), filepath.Join(t.TempDir(), "feed")
	statement := func(o Options) (string, *Release) {
		t.Helper()
		f, err := Open(t.Context(), dir, o)
		if err != nil {
			t.Fatal(err)
		}
		s, err := f.Statement(t.Context(), version.MustParse("v1.1.0"))
		if err != nil {
			t.Fatal(err)
		}
		r, err := f.Release(t.Context(), version.MustParse("v1.1.0"))
		if err != nil {
			t.Fatal(err)
		}
		return s, r
	}
	believed := func(text string, r *Release, by Key) error {
		t.Helper()
		var errs []error
		for _, k := range r.Kubernetes {
			for _, arch := range architectures {
				l, err := r.Components(k.Version, arch)
				if errors.Is(err, ErrUnpinned) {
					continue
				}
				errs = append(errs, err, NewTrust(by).Verify(text, k.Version, arch, l))
			}
		}
		return errors.Join(errs...)
	}
	publish(t, BuildOptions{From: from, Out: dir, Key: first})
	s, r := statement(Options{Keys: []Key{first.Key}, Now: at(today)})
	if err := believed(s, r, first.Key); err != nil {
		t.Error(err)
	}
	if err := believed(s, r, second.Key); !errors.Is(err, ErrSigner) {
		t.Errorf("a key that is not there yet: %v", err)
	}
	publish(t, BuildOptions{From: from, Out: dir, Key: first, Trust: []Key{first.Key, second.Key}})
	publish(t, BuildOptions{From: from, Out: dir, Key: second, Trust: []Key{second.Key, third.Key}})
	publish(t, BuildOptions{From: from, Out: dir, Key: third})
	s, r = statement(Options{Keys: []Key{first.Key}, Now: at(today)})
	for _, k := range []*PrivateKey{first, second, third} {
		if err := believed(s, r, k.Key); err != nil {
			t.Errorf("a machine with %s: %v", k, err)
		}
	}
	if err := believed(s, r, newTestKey(t, "x").Key); !errors.Is(err, ErrUntrusted) {
		t.Errorf("a stranger's key: %v", err)
	}
	// A machine with only the newest key rejects statements of retired keys.
	if err := NewTrust(third.Key).Verify(vouch(t, first), k136, "amd64", parts); !errors.Is(err, ErrSigner) {
		t.Errorf("a retired key: %v", err)
	}

	verified := func() Report {
		t.Helper()
		report, err := Verify(t.Context(), dir, Options{Keys: []Key{first.Key}, Now: at(today)})
		if err != nil {
			t.Fatal(err)
		}
		return report
	}
	if report := verified(); !report.OK() {
		t.Errorf("%+v", report)
	}
	name := filepath.Join(dir, filepath.FromSlash(statementName(r.Version)))
	if err := os.WriteFile(name, []byte(vouch(t, third)), 0o600); err != nil {
		t.Fatal(err)
	}
	if report := verified(); report.OK() {
		t.Error("a statement over other components is not noticed")
	}
	// A feed of an older publisher has none.
	if err := os.Remove(name); err != nil {
		t.Fatal(err)
	}
	if report := verified(); !report.OK() {
		t.Errorf("%+v", report)
	}
	f, err := Open(t.Context(), dir, Options{Keys: []Key{first.Key}, Now: at(today)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Statement(t.Context(), r.Version); !errors.Is(err, ErrNotOffered) {
		t.Errorf("got %v", err)
	}
	embedded, err := Embedded(os.DirFS("../../assets/releases"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := embedded.Statement(t.Context(), r.Version); !errors.Is(err, ErrNotOffered) {
		t.Errorf("the program's own: %v", err)
	}
}

func FuzzStatement(f *testing.F) {
	key := newTestKey(f, "builder")
	f.Add(vouch(f, key))
	f.Add("{}")
	f.Fuzz(func(t *testing.T, text string) {
		if NewTrust(key.Key).Verify(text, k136, "amd64", parts[:1]) == nil {
			t.Errorf("believed %q", text)
		}
	})
}

// TestStatementsOverMirroredLists publishes a mirror's list beside the release's own, and
// requests its statement online and offline.
func TestStatementsOverMirroredLists(t *testing.T) {
	key := newTestKey(t, "builder")
	mirrored := append(component.List{}, parts...)
	mirrored = append(mirrored, component.Component{Name: "kubectl", URL: "https://example/kubectl", Digest: parts[0].Digest, Path: "/usr/local/bin/kubectl", Mode: 0o755})
	text := func(l MirroredList) string {
		b, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	good := MirroredList{Kubernetes: k136, Arch: "amd64", Components: mirrored}
	for _, tt := range []struct{ name, text, want string }{
		{name: "an architecture that no release has", text: text(MirroredList{k136, "riscv64", mirrored}), want: "arch"},
		{name: "a version that the release does not offer", text: text(MirroredList{version.MustParse("v1.20.0"), "amd64", mirrored}), want: "v1.20.0"},
		{name: "a list without kubectl", text: text(MirroredList{k136, "amd64", parts}), want: "kubectl is missing"},
		{name: "an unknown field", text: strings.Replace(text(good), "{", `{"x":1,`, 1), want: "x"},
	} {
		from := sources(t)
		write(t, from, "v1.1.0/components/mirror.json", tt.text)
		if _, err := Build(t.Context(), BuildOptions{From: from, Out: filepath.Join(t.TempDir(), "feed"), Key: key, Now: at(today)}); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}

	from, dir := sources(t), filepath.Join(t.TempDir(), "feed")
	write(t, from, "v1.1.0/components/mirror.json", text(good))
	publish(t, BuildOptions{From: from, Out: dir, Key: key})
	o := Options{Keys: []Key{key.Key}, Now: at(today), Cache: t.TempDir()}
	ask := func(l component.List, arch string) (string, error) {
		t.Helper()
		f, err := Open(t.Context(), dir, o)
		if err != nil {
			t.Fatal(err)
		}
		return f.Vouch(t.Context(), version.MustParse("v1.1.0"), k136, arch, l)
	}
	s, err := ask(mirrored, "amd64")
	if err != nil {
		t.Fatal(err)
	}
	if err := NewTrust(key.Key).Verify(s, k136, "amd64", mirrored); err != nil {
		t.Error(err)
	}
	for name, err := range map[string]error{
		"another list":         func() error { _, err := ask(parts, "amd64"); return err }(),
		"another architecture": func() error { _, err := ask(mirrored, "arm64"); return err }(),
	} {
		if !errors.Is(err, ErrNotOffered) {
			t.Errorf("%s: %v", name, err)
		}
	}
	report, err := Verify(t.Context(), dir, o)
	if err != nil || !report.OK() {
		t.Fatalf("%v, %+v", err, report)
	}
	statement := listStatementName(version.MustParse("v1.1.0"), mirrored.Digest())
	if !slices.ContainsFunc(report.Files, func(f FileReport) bool { return f.Name == statement }) {
		t.Errorf("the report lacks %s", statement)
	}
	// A server that swaps statements of one publisher is detected.
	path := filepath.Join(dir, filepath.FromSlash(statement))
	if err := os.WriteFile(path, []byte(vouch(t, key)), 0o600); err != nil {
		t.Fatal(err)
	}
	if report, err := Verify(t.Context(), dir, o); err != nil || report.OK() {
		t.Errorf("a statement over another list is not noticed: %v", err)
	}
	if _, err := ask(mirrored, "amd64"); !errors.Is(err, ErrNotOffered) {
		t.Errorf("a statement over another list: %v", err)
	}
	if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ask(mirrored, "amd64"); err != nil {
		t.Fatal(err)
	}
	// Without the feed the last good copy has it.
	if err := os.Rename(dir, dir+".away"); err != nil {
		t.Fatal(err)
	}
	if again, err := ask(mirrored, "amd64"); err != nil || again != s {
		t.Errorf("without the feed: %v", err)
	}
}
