package support_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/secretscan"
	"constellation/engine/support"
	"constellation/engine/workspace"
)

var now = time.Date(2026, 11, 21, 7, 0, 0, 0, time.UTC)

// extract returns the files of a bundle by their names below its folder.
func extract(t *testing.T, file string) map[string]string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	gz, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for r := tar.NewReader(gz); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		_, name, ok := strings.Cut(h.Name, "/")
		if !ok || h.Typeflag != tar.TypeReg || h.Mode != 0o600 {
			t.Errorf("entry %s has type %c and mode %o", h.Name, h.Typeflag, h.Mode)
		}
		out[name] = string(b)
	}
}

// planted is a workspace with a secret of each kind, which are repeated where they must not be.
type planted struct {
	*workspace.Workspace
	secrets []secretscan.Secret
}

const state = `version: v1
infrastructure:
  uid: abcd
  name: demo
  initSecret: %s # a note: hunter22hunter22
  clusterEndpoint: 10.0.0.1:6443
clusterValues:
  clusterID: 0000000000000000000000000000000000000000000000000000000000000000
  measurementSalt: %s
`

func plant(t *testing.T) planted {
	t.Helper()
	dir := t.TempDir()
	w, err := workspace.OpenWorkspace(dir)
	if err != nil {
		t.Fatal(err)
	}
	p := planted{Workspace: w}
	random := func(kind string) []byte {
		b := make([]byte, 32)
		rand.Read(b)
		p.secrets = append(p.secrets, secretscan.Secret{Kind: kind, Value: b})
		return b
	}
	write := func(name, content string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m := workspace.MasterSecret{Key: random("key"), Salt: random("salt")}
	if err := w.WriteMasterSecret(m); err != nil {
		t.Fatal(err)
	}
	for _, b := range [][]byte{m.CertifierSecret(), m.BackupSecret(), m.KMSSecret()} {
		p.secrets = append(p.secrets, secretscan.Secret{Kind: "derived", Value: b})
	}
	write(workspace.StateFile, fmt.Sprintf(state, hex.EncodeToString(random("init secret")), hex.EncodeToString(random("measurement salt"))))
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	key := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	p.secrets = append(p.secrets, secretscan.Secret{Kind: "signing key", Value: key})
	write(workspace.SigningKeyFile, string(key))
	write(workspace.AuthorityKeyFile, string(key))
	identity := "AGE-SECRET-KEY-1" + rand.Text() + rand.Text()
	p.secrets = append(p.secrets, secretscan.Secret{Kind: "age", Value: []byte(identity)})
	write("key.txt", identity+"\n")
	t.Setenv("CONSTELLATION_BACKUP_IDENTITY", filepath.Join(dir, "key.txt"))
	write(workspace.KubeconfigFile, "users:\n- user:\n    client-key-data: "+base64.StdEncoding.EncodeToString(key)+"\n")
	write(workspace.ConfigFile, "version: v1\nname: demo # hunter22hunter22\nregistryPassword: hunter22hunter22\nregistry:\n  pullSecret: registry.json\n")
	const login = "s3cret-of-the-registry"
	p.secrets = append(p.secrets, secretscan.Secret{Kind: "login", Value: []byte(login)})
	write("registry.json", `{"auths":{"r.example":{"auth":"`+base64.StdEncoding.EncodeToString([]byte("me:"+login))+`"}}}`)
	p.secrets = append(p.secrets, secretscan.Secret{Kind: "password", Value: []byte("hunter22hunter22")})

	// A log that repeats each secret in several encodings.
	var log strings.Builder
	for i, s := range p.secrets {
		if s.Kind == "password" || s.Kind == "measurement salt" {
			continue // nothing marks them in a log, and they are of no use without other files
		}
		quoted, _ := json.Marshal(string(s.Value))
		fmt.Fprintf(&log, "line %d: %s\n%x\n%s\n%v\n%s\n%s\n", i, s.Value, s.Value, quoted, s.Value, base64.StdEncoding.EncodeToString(s.Value), base64.StdEncoding.EncodeToString(append([]byte("x"), s.Value...)))
	}
	log.WriteString("password=hunter22hunter22\n")
	write("constellation-debug.log", log.String())
	write("constellation-upgrade/init-20261121070501-1a2b3c4d/"+plan.EventsFile, `{"kind":"hello"}`+"\n"+log.String())
	write("constellation-upgrade/init-20261121070501-1a2b3c4d/"+workspace.PlanFile, `{"id":"init"}`)
	write("constellation-upgrade/init-20261121070501-1a2b3c4d/backup/secrets.json", log.String())
	write("notes.txt", log.String())
	write("constellation-notes.txt", log.String())
	return p
}

func request(p planted, file string) support.Request {
	return support.Request{Workspace: p.Workspace, File: file, Release: "v1.1.0", Now: now}
}

// TestWorkspaceBundleHasNoSecret repeats each secret of a workspace in logs and records, in several encodings.
func TestWorkspaceBundleHasNoSecret(t *testing.T) {
	p := plant(t)
	file := filepath.Join(t.TempDir(), "bundle.tar.gz")
	r, err := support.Write(t.Context(), request(p, file), nil)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 || info.Size() != r.Size {
		t.Fatalf("%v, %v; the result has %d bytes", info, err, r.Size)
	}
	raw, err := os.ReadFile(file)
	if err != nil || fmt.Sprintf("%x", sha256.Sum256(raw)) != r.SHA256 {
		t.Errorf("the digest is another one: %v", err)
	}
	files := extract(t, file)
	var names []string
	scan := secretscan.New(p.secrets)
	for name, content := range files {
		names = append(names, name)
		if found := scan.Kinds([]byte(content)); len(found) > 0 {
			t.Errorf("%s has %v", name, found)
		}
	}
	slices.Sort(names)
	want := []string{
		"INDEX.json", "INDEX.txt", "console/version.json", "runs/init-20261121070501-1a2b3c4d/events.jsonl", "runs/init-20261121070501-1a2b3c4d/plan.json",
		"workspace/constellation-conf.yaml", "workspace/constellation-debug.log", "workspace/constellation-state.yaml", "workspace/files.txt",
	}
	if !slices.Equal(names, want) {
		t.Errorf("the bundle has %q, want %q", names, want)
	}
	for name, parts := range map[string][]string{
		"workspace/constellation-state.yaml": {"uid: abcd", "clusterEndpoint: 10.0.0.1:6443", "initSecret: (left out)", "clusterID: 0000"},
		"workspace/constellation-conf.yaml":  {"name: demo", "registryPassword: (left out)"},
		"workspace/files.txt":                {"-rw------- ", "constellation-mastersecret.json"},
		"workspace/constellation-debug.log":  {"line 0: (redacted: master secret)", "password=(redacted: password or token)"},
		"INDEX.txt":                          {"Never included", "secret derived from the master secret", "journalctl", "workspace/constellation-debug.log"},
	} {
		for _, part := range parts {
			if !strings.Contains(files[name], part) {
				t.Errorf("%s lacks %q:\n%s", name, part, files[name])
			}
		}
	}
	if strings.Contains(files["workspace/files.txt"], " notes.txt") {
		t.Error("files of others are listed")
	}
	var index support.Index
	if err := json.Unmarshal([]byte(files["INDEX.json"]), &index); err != nil || index.Schema != plan.Schema || len(index.Files) != len(want)-2 {
		t.Errorf("the index: %v, %+v", err, index)
	}
	for _, kind := range []string{"master secret", "init secret", "secret derived from the master secret", "private key of the workspace", "login of the registry", secretscan.AgeIdentity, secretscan.Password} {
		if !slices.ContainsFunc(index.Redacted, func(x support.Redaction) bool { return x.Kind == kind && x.Count > 0 }) {
			t.Errorf("no %s is counted: %v", kind, index.Redacted)
		}
	}
	// The search is for what the workspace has.
	if b, err := os.ReadFile(p.Path("constellation-debug.log")); err != nil || len(scan.Kinds(b)) < 6 {
		t.Errorf("the log has %v, %v", scan.Kinds(b), err)
	}
}

// TestDamagedWorkspaceStillGivesABundle has files that cannot be parsed or read.
func TestDamagedWorkspaceStillGivesABundle(t *testing.T) {
	p := plant(t)
	const secret = "0123456789abcdef0123456789abcdef"
	if err := os.WriteFile(p.Path(workspace.StateFile), []byte("a: [\ninitSecret: "+secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p.Path("constellation-debug.log"), []byte("got "+secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(p.Path(workspace.ConfigFile)); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(p.Path(workspace.ConfigFile), 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	r, err := support.Write(t.Context(), request(p, file), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{workspace.StateFile, workspace.ConfigFile} {
		if !slices.ContainsFunc(r.Index.Missing, func(m support.Missing) bool { return m.What == "workspace/"+name && m.Why != "" }) {
			t.Errorf("%s is not missing: %+v", name, r.Index.Missing)
		}
	}
	for name, content := range extract(t, file) {
		if strings.Contains(content, secret) {
			t.Errorf("%s has the init secret of a damaged file", name)
		}
	}
}

func TestBundleIsWholeOrNotThere(t *testing.T) {
	p := plant(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "bundle.tar.gz")
	if err := os.WriteFile(file, []byte("of somebody"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := support.Write(t.Context(), request(p, file), nil); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(plan.Remedy(err), "--overwrite") {
		t.Errorf("an existing file: %v", err)
	}
	// It appears while the bundle is collected.
	late := filepath.Join(dir, "late.tar.gz")
	r := request(p, late)
	r.Progress = func(string) { _ = os.WriteFile(late, []byte("of somebody"), 0o600) }
	if _, err := support.Write(t.Context(), r, nil); plan.ExitCode(err) != plan.ExitUsage {
		t.Errorf("a file that appeared: %v", err)
	}
	for _, name := range []string{file, late} {
		if b, err := os.ReadFile(name); err != nil || string(b) != "of somebody" {
			t.Errorf("%s is %q, %v", name, b, err)
		}
	}
	stopped, stop := context.WithCancelCause(t.Context())
	why := errors.New("interrupted")
	r = request(p, filepath.Join(dir, "stopped.tar.gz"))
	r.Progress = func(string) { stop(why) }
	if _, err := support.Write(stopped, r, nil); !errors.Is(err, why) {
		t.Errorf("interrupted: %v", err)
	}
	if _, err := support.Write(t.Context(), request(p, filepath.Join(dir, "none", "b.tar.gz")), nil); plan.ExitCode(err) != plan.ExitUsage {
		t.Errorf("a folder that does not exist: %v", err)
	}
	r = request(p, file)
	r.Overwrite = true
	if _, err := support.Write(t.Context(), r, nil); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 || len(extract(t, file)) == 0 {
		t.Errorf("overwritten: %v, %v", info, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("left %v, %v", entries, err)
	}
}

// TestLimitsAreNamed cuts a log inside of a private key, and leaves out runs.
func TestLimitsAreNamed(t *testing.T) {
	p := plant(t)
	key := string(p.secrets[slices.IndexFunc(p.secrets, func(s secretscan.Secret) bool { return s.Kind == "signing key" })].Value)
	if err := os.Remove(p.Path(workspace.SigningKeyFile)); err != nil { // found by its form alone
		t.Fatal(err)
	}
	if err := os.Remove(p.Path(workspace.AuthorityKeyFile)); err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(key, "\n")
	const limit = 64 << 10
	rest := strings.Join(lines[2:], "") + strings.Repeat("a line of the log\n", 2000)
	rest += strings.Repeat("x", limit-len(rest)-len(lines[1])/2-1) + "\n" // the limit is in the first line of the key
	if err := os.WriteFile(p.Path("constellation-debug.log"), []byte(strings.Repeat("an old line\n", 20_000)+lines[0]+lines[1]+rest), 0o600); err != nil {
		t.Fatal(err)
	}
	old := now.Add(-48 * time.Hour)
	if err := os.Chtimes(p.Path("constellation-upgrade/init-20261121070501-1a2b3c4d/"+plan.EventsFile), old, old); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	r := request(p, file)
	r.MaxFile, r.Since = limit, now.Add(-24*time.Hour)
	result, err := support.Write(t.Context(), r, nil)
	if err != nil {
		t.Fatal(err)
	}
	files := extract(t, file)
	log := files["workspace/constellation-debug.log"]
	if len(log) > limit || !strings.Contains(log, "a line of the log") {
		t.Errorf("the log has %d bytes: %.200s", len(log), log)
	}
	for _, line := range lines[1 : len(lines)-2] {
		for _, part := range []string{strings.TrimSpace(line), strings.TrimSpace(line)[len(line)/2:]} {
			if len(part) > 8 && strings.Contains(log, part) {
				t.Errorf("the log has %q of the key", part)
			}
		}
	}
	if !slices.ContainsFunc(result.Index.Files, func(f support.File) bool {
		return f.Path == "workspace/constellation-debug.log" && strings.Contains(f.Cut, "are left out")
	}) || !strings.Contains(files["INDEX.txt"], "cut off: the first ") {
		t.Errorf("the cut is not named: %+v", result.Index.Files)
	}
	if !slices.ContainsFunc(result.Index.Missing, func(m support.Missing) bool {
		return m.What == "1 older runs" && strings.Contains(m.Why, "--since")
	}) {
		t.Errorf("the old run is not missing: %+v", result.Index.Missing)
	}
	r.MaxSize, r.Overwrite = limit, true
	if result, err = support.Write(t.Context(), r, nil); err != nil {
		t.Fatal(err)
	}
	total := 0
	for _, f := range result.Index.Files {
		total += f.Bytes
	}
	if total > limit || !slices.ContainsFunc(result.Index.Missing, func(m support.Missing) bool { return strings.Contains(m.Why, "--max-size") }) {
		t.Errorf("%d bytes; missing %+v", total, result.Index.Missing)
	}
	if !bytes.Contains([]byte(extract(t, file)["INDEX.txt"]), []byte("--max-size")) {
		t.Error("the index does not name the limit")
	}
}
