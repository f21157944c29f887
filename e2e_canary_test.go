package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"filippo.io/age"

	"constellation/engine/plan"
	"constellation/engine/secretscan"
	"constellation/engine/workspace"
	"constellation/internal/testneeds"
)

// belongs are the places where a secret may be, each with its reason. A place is a kind of place and a path in it.
var belongs = []struct {
	place, kind *regexp.Regexp
	machines    machineKind // empty: all
	reason      string
}{
	{place: regexp.MustCompile(`^workspace/constellation-mastersecret\.json$`), kind: regexp.MustCompile(`^master secret$`), reason: "its file"},
	{place: regexp.MustCompile(`^workspace/constellation-state\.yaml$`), kind: regexp.MustCompile(`^init secret$`), reason: "its file, mode 0600"},
	{place: regexp.MustCompile(`^workspace/constellation-admin\.conf$`), kind: regexp.MustCompile(`^key of the cluster$`), reason: "the administrator's kubeconfig"},
	{place: regexp.MustCompile(`^workspace/identity\.txt$`), kind: regexp.MustCompile(`^identity of age$`), reason: "the user's file"},
	{place: regexp.MustCompile(`^cloud/init-secret$`), kind: regexp.MustCompile(`^init secret$`), reason: "the cloud made it, for the state file"},
	{place: regexp.MustCompile(`^disk/[^/]+/etc/kubernetes/(pki/.*\.key|[a-z-]+\.conf)$`), kind: regexp.MustCompile(`^key of the cluster$`), reason: "the PKI of a node, mode 0600"},
	{place: regexp.MustCompile(`^disk/[^/]+/var/lib/kubelet/pki/`), kind: regexp.MustCompile(`^key of the cluster$`), reason: "keys of a kubelet, mode 0600"},
	{place: regexp.MustCompile(`^cloud/m/[^/]+/pods/[^/]+/(kubeconfig$|volumes/)`), kind: regexp.MustCompile(`^token of a service account$`), machines: simulatedMachines, reason: "the volume of the account's own pod"},
	{place: regexp.MustCompile(`^disk/[^/]+/var/lib/kubelet/pods/[^/]+/volumes/kubernetes\.io~projected/`), kind: regexp.MustCompile(`^token of a service account$`), machines: realMachines, reason: "the volume of the account's own pod, in memory"},
}

// belongsIn returns the row of the table by which a kind of secret may be in a place; -1 if it must not.
func belongsIn(place, kind string) int {
	for i, b := range belongs {
		if b.place.MatchString(place) && b.kind.MatchString(kind) {
			return i
		}
	}
	return -1
}

// life is a cluster whose secrets are searched for where they must not be.
type life struct {
	*cloud
	kind machineKind
	dirs string // of the sandbox
	// output has what the programs of the user printed.
	output bytes.Buffer
	// used are the rows of the table by which a secret was where it belongs.
	used map[int]bool

	mu      sync.Mutex
	secrets []secretscan.Secret
}

// knows adds secrets.
func (l *life) knows(kind string, values ...[]byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, v := range values {
		known := slices.ContainsFunc(l.secrets, func(s secretscan.Secret) bool { return bytes.Equal(s.Value, v) })
		if len(v) >= secretscan.MinLength && !known {
			l.secrets = append(l.secrets, secretscan.Secret{Kind: kind, Value: bytes.Clone(v)})
		}
	}
}

// does runs the program, and keeps its output for the search.
func (l *life) does(limit time.Duration, args ...string) *result {
	l.t.Helper()
	r := l.run(limit, args...)
	fmt.Fprintf(&l.output, "%s\n%s\n%s\n", strings.Join(args, " "), r.stdout, r.stderr)
	return r.want(plan.ExitDone)
}

// harvest collects the values of all Secrets that exist at some time, until ctx ends. Bootstrap tokens are among them.
func (l *life) harvest(ctx context.Context) {
	for ctx.Err() == nil {
		cmd := exec.CommandContext(ctx, filepath.Join(l.bin, "kubectl"), "--kubeconfig", filepath.Join(l.dir, workspace.KubeconfigFile), "get", "secrets", "-A", "-o", "json", "--watch")
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			return
		}
		for d := json.NewDecoder(out); ; {
			var s struct {
				Type string            `json:"type"`
				Data map[string][]byte `json:"data"`
			}
			if d.Decode(&s) != nil {
				break // the API server ends each watch; some time it is down
			}
			l.harvested(s.Type, s.Data)
		}
		_ = cmd.Wait()
	}
}

func (l *life) harvested(kind string, data map[string][]byte) {
	switch {
	case strings.HasPrefix(kind, "helm.sh/"):
		return // charts without secrets
	case kind == "bootstrap.kubernetes.io/token":
		l.knows("bootstrap token", data["token-secret"], fmt.Appendf(nil, "%s.%s", data["token-id"], data["token-secret"]))
		return
	}
	for name, v := range data {
		if !bytes.Contains(v, []byte("BEGIN CERTIFICATE")) && !strings.HasSuffix(name, ".crt") {
			l.knows("value of a Secret", v)
		}
	}
}

// learns reads the secrets that are files now.
func (l *life) learns() {
	l.t.Helper()
	w, err := workspace.OpenWorkspace(l.dir)
	if err != nil {
		l.t.Fatal(err)
	}
	m, err := w.MasterSecret()
	if err != nil {
		l.t.Fatal(err)
	}
	l.knows("master secret", m.Key, m.Salt)
	l.knows("secret derived from the master secret", m.CertifierSecret(), m.BackupSecret(), m.KMSSecret())
	init, err := hex.DecodeString(strings.TrimSpace(read(l.t, filepath.Join(l.dirs, "init-secret"))))
	if err != nil || len(init) < 16 {
		l.t.Fatalf("the init secret has %d bytes: %v", len(init), err)
	}
	l.knows("init secret", init)
	configs := []string{filepath.Join(l.dir, workspace.KubeconfigFile)}
	var keys, tokens []string
	for _, m := range glob(l.t, l.dirs, "m/*") {
		root := l.root(m)
		configs = append(configs, glob(l.t, root, "etc/kubernetes/*.conf")...)
		for _, pattern := range []string{"etc/kubernetes/pki/*.key", "etc/kubernetes/pki/etcd/*.key", "var/lib/kubelet/pki/*.pem", "var/lib/kubelet/pki/*.key"} {
			keys = append(keys, glob(l.t, root, pattern)...)
		}
		tokens = append(tokens, glob(l.t, m, "pods/*/volumes/*/token")...)
		tokens = append(tokens, glob(l.t, root, "var/lib/kubelet/pods/*/volumes/kubernetes.io~projected/*/token")...)
	}
	// Files of a machine that leaves can disappear.
	key := regexp.MustCompile(`client-key-data: (\S+)`)
	for _, path := range configs {
		b, _ := os.ReadFile(path)
		for _, f := range key.FindAllSubmatch(b, -1) {
			if b, err := base64.StdEncoding.DecodeString(string(f[1])); err == nil {
				l.knows("key of the cluster", privatePart(b))
			}
		}
	}
	for _, path := range keys {
		if b, err := os.ReadFile(path); err == nil {
			l.knows("key of the cluster", privatePart(b))
		}
	}
	for _, path := range tokens {
		if b, err := os.ReadFile(path); err == nil {
			l.knows("token of a service account", b)
		}
	}
}

// privatePart returns the first private key of a PEM file; nil without one.
func privatePart(b []byte) []byte {
	for block, rest := pem.Decode(b); block != nil; block, rest = pem.Decode(rest) {
		if strings.HasSuffix(block.Type, "PRIVATE KEY") {
			return pem.EncodeToMemory(block)
		}
	}
	return nil
}

func glob(t *testing.T, dir, pattern string) []string {
	t.Helper()
	out, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// finds are the kinds of secrets that were found, by place.
type finds map[string]map[string]int

// scan searches all places and returns what it found there, without what belongs there. looked counts what was searched, by kind of place.
func (l *life) scan() (found finds, looked map[string]int) {
	l.t.Helper()
	l.learns()
	l.mu.Lock()
	scanner := secretscan.New(l.secrets)
	l.mu.Unlock()
	found, looked = finds{}, map[string]int{}
	note := func(place string, r io.Reader) {
		kind, _, _ := strings.Cut(place, "/")
		looked[kind]++
		counts, err := scanner.Known(unpacked(r))
		if err != nil && counts == nil {
			l.t.Errorf("read %s: %v", place, err)
		}
		for secret, n := range counts {
			if secret == secretscan.PrivateKey || secret == secretscan.AgeIdentity {
				continue // here, keys are searched for by their values, not by their form
			}
			if row := belongsIn(place, secret); row >= 0 {
				l.used[row] = true
				continue
			}
			if found[place] == nil {
				found[place] = map[string]int{}
			}
			found[place][secret] += n
		}
	}
	seen := map[[2]uint64]bool{}
	l.disks(seen, note)
	l.processes(seen, note)
	l.objects(note)
	note("output/of the commands", bytes.NewReader(l.output.Bytes()))
	return found, looked
}

// unpacked returns r, or what is in it if it is compressed.
func unpacked(r io.Reader) io.Reader {
	head := make([]byte, 2)
	n, err := io.ReadFull(r, head)
	all := io.MultiReader(bytes.NewReader(head[:n]), r)
	if err != nil || head[0] != 0x1f || head[1] != 0x8b {
		return all
	}
	gz, err := gzip.NewReader(all)
	if err != nil {
		return all
	}
	return gz
}

// disks searches the workspace with its records, the files of the cloud, and the directories of all machines with their logs.
func (l *life) disks(seen map[[2]uint64]bool, note func(string, io.Reader)) {
	l.walk("workspace", l.dir, seen, note)
	for _, m := range glob(l.t, l.dirs, "m/*") {
		if root := l.root(m); root != "" {
			l.walk("disk/"+filepath.Base(m), root, seen, note)
		}
	}
	l.walk("cloud", l.dirs, seen, note)
	if l.kind == realMachines {
		for _, m := range glob(l.t, l.dirs, "m/*") { // the files of a journal are compressed
			name := filepath.Base(m)
			note("journal/"+name, strings.NewReader(l.run(time.Minute, "sandbox", "shell", name, "--", "journalctl", "--no-pager", "-o", "export").stdout))
		}
	}
}

// root is the root directory of a machine; empty if it does not run.
func (l *life) root(machine string) string {
	if l.kind == simulatedMachines {
		return filepath.Join(machine, "root")
	}
	b, err := os.ReadFile(filepath.Join(machine, "init.pid"))
	if err != nil {
		return ""
	}
	return filepath.Join("/proc", strings.TrimSpace(string(b)), "root")
}

// walk searches the files of a directory.
func (l *life) walk(kind, dir string, seen map[[2]uint64]bool, note func(string, io.Reader)) {
	err := filepath.WalkDir(dir+"/", func(path string, d fs.DirEntry, err error) error {
		rel, relErr := filepath.Rel(dir, path)
		if relErr != nil {
			return relErr
		}
		if err != nil {
			return nil // files of machines come and go
		}
		if d.IsDir() {
			// Changed programs of a machine are in the upper layer of the overlay, below the cloud's directory.
			programs := strings.HasPrefix(kind, "disk/") && slices.Contains([]string{"proc", "sys", "dev", "usr", "opt"}, rel)
			again := kind == "cloud" && againRE.MatchString(rel)
			if l.kind == realMachines && (programs || again) {
				return fs.SkipDir
			}
		}
		if !d.Type().IsRegular() {
			return nil
		}
		f, err := os.Open(path)
		if err != nil {
			return nil
		}
		defer f.Close()
		if first(f, seen) {
			note(kindOfFile(kind, rel), f)
		}
		return nil
	})
	if err != nil {
		l.t.Error(err)
	}
}

// againRE matches directories of a real machine that are searched through the machine.
var againRE = regexp.MustCompile(`^m/[^/]+/(root|work)$`)

// machineFile matches a file of a real machine's disk as the cloud stores it: the upper layer of an overlay.
var machineFile = regexp.MustCompile(`^m/([^/]+)/upper/(.*)$`)

// kindOfFile names logs of a machine for what they are.
func kindOfFile(kind, rel string) string {
	if m := machineFile.FindStringSubmatch(rel); kind == "cloud" && m != nil {
		kind, rel = "disk/"+m[1], m[2]
	}
	place := kind + "/" + rel
	switch {
	case strings.Contains(place, "/var/log/kubernetes/audit/"):
		return "audit/" + place
	case strings.Contains(place, "/var/log/pods/"):
		return "log/" + place
	case strings.HasSuffix(rel, "console.log") || strings.HasSuffix(rel, "daemon.log"):
		return "journal/" + place
	case strings.HasPrefix(rel, plan.RunsDir):
		return "record/" + place
	case strings.Contains(place, "/var/lib/etcd/"):
		return "etcd/" + place
	}
	return place
}

// first reports whether a file was not searched yet under another name.
func first(f *os.File, seen map[[2]uint64]bool) bool {
	info, err := f.Stat()
	if err != nil {
		return false
	}
	s, ok := info.Sys().(*syscall.Stat_t)
	id := [2]uint64{uint64(s.Dev), s.Ino}
	if !ok || seen[id] {
		return false
	}
	seen[id] = true
	return true
}

// processes searches arguments, environment and open files of all processes of the sandbox.
func (l *life) processes(seen map[[2]uint64]bool, note func(string, io.Reader)) {
	for _, p := range l.running() {
		pid, args, _ := strings.Cut(p, " ")
		if len(strings.Fields(args)) == 0 {
			continue // it has ended
		}
		note("argv/"+pid, strings.NewReader(args))
		dir := filepath.Join("/proc", pid)
		if b, err := os.ReadFile(filepath.Join(dir, "environ")); err == nil { // else it has ended
			note("environ/"+pid+" "+filepath.Base(strings.Fields(args)[0]), bytes.NewReader(b))
		}
		for _, fd := range glob(l.t, dir, "fd/*") {
			info, err := os.Stat(fd)
			if err != nil || !info.Mode().IsRegular() {
				continue
			}
			f, err := os.Open(fd)
			if err != nil {
				continue
			}
			if name, err := os.Readlink(fd); err == nil && first(f, seen) {
				note("open/"+name, f)
			}
			f.Close()
		}
	}
}

// running lists the processes of the sandbox with their arguments.
func (l *life) running() []string {
	l.t.Helper()
	if l.kind == simulatedMachines {
		return processesOf(l.t, filepath.Dir(l.dir))
	}
	name := filepath.Base(l.dirs)
	out := processesOf(l.t, name)
	_ = filepath.WalkDir("/sys/fs/cgroup", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "cgroup.procs" || !strings.Contains(p, "/"+name) {
			return nil // cgroups come and go
		}
		b, err := os.ReadFile(p)
		if err != nil {
			return nil
		}
		for _, pid := range strings.Fields(string(b)) {
			args, _ := os.ReadFile(filepath.Join("/proc", pid, "cmdline"))
			if line := pid + " " + strings.ReplaceAll(string(args), "\x00", " "); !slices.Contains(out, line) {
				out = append(out, line)
			}
		}
		return nil
	})
	return out
}

// objects searches all objects of the API but Secrets.
func (l *life) objects(note func(string, io.Reader)) {
	l.t.Helper()
	for _, kind := range strings.Fields(l.kubectl("api-resources", "--verbs=list", "-o", "name")) {
		if kind == "secrets" {
			continue
		}
		out, err := l.tryKubectl("get", kind, "-A", "-o", "json")
		if err != nil {
			l.t.Errorf("list %s: %v: %s", kind, err, tail(out))
		}
		place := "object/" + kind
		if strings.HasPrefix(kind, "events") {
			place = "event/" + kind
		}
		note(place, strings.NewReader(out))
	}
}

// bundle searches a support bundle.
func (l *life) bundle(file string, scanner *secretscan.Scanner) finds {
	l.t.Helper()
	f, err := os.Open(file)
	if err != nil {
		l.t.Fatal(err)
	}
	defer f.Close()
	gz, err := gzip.NewReader(f)
	if err != nil {
		l.t.Fatal(err)
	}
	found := finds{}
	for r := tar.NewReader(gz); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			l.t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			l.t.Fatal(err)
		}
		if counts := scanner.Kinds(b); len(counts) > 0 {
			found["bundle/"+h.Name] = counts
		}
	}
}

// nothing fails the test if a secret was found, or if a kind of place was not searched.
func (l *life) nothing(when string, places ...string) {
	l.t.Helper()
	found, looked := l.scan()
	for _, place := range slices.Sorted(maps.Keys(found)) {
		l.t.Errorf("%s: %s has %v", when, place, found[place])
	}
	for _, kind := range places {
		if looked[kind] == 0 {
			l.t.Errorf("%s: nothing of kind %s was searched: %v", when, kind, looked)
		}
	}
	kinds := map[string]int{}
	for _, s := range l.secrets {
		kinds[s.Kind]++
	}
	l.t.Logf("%s: searched %v for %v", when, looked, kinds)
	for _, kind := range []string{"master secret", "init secret", "secret derived from the master secret", "key of the cluster", "token of a service account", "value of a Secret", "bootstrap token", "identity of age"} {
		if kinds[kind] == 0 {
			l.t.Errorf("%s: no %s is searched for", when, kind)
		}
	}
}

// searched are the kinds of places of a scan.
var searched = []string{"workspace", "cloud", "disk", "audit", "log", "journal", "record", "etcd", "argv", "environ", "open", "object", "event", "output"}

// TestNoSecretLeaksInALife takes a cluster of simulated machines through init, joins, an upgrade, backup and restore, a crash of all
// machines and a support bundle. No secret is found outside of where it belongs. Then a value is planted in each kind of place, and all
// are found.
func TestNoSecretLeaksInALife(t *testing.T) {
	t.Parallel()
	l := &life{cloud: newSimulated(t), kind: simulatedMachines, used: map[int]bool{}}
	l.does(time.Minute, "sandbox", "up", "--machines", "simulated", "--control-planes", "1", "--workers", "1", "--image", "v1.0.0")
	l.dirs = l.sandboxDir()
	l.lives()
}

// TestNoSecretLeaksOnRealMachines does the same where units, containers and journals are real.
func TestNoSecretLeaksOnRealMachines(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_CANARY", "ten minutes on four real machines")
	l := &life{cloud: newReal(t), kind: realMachines, used: map[int]bool{}}
	l.up(1, 1, "--image", "v1.0.0")
	state := os.Getenv("XDG_STATE_HOME")
	if state == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			t.Fatal(err)
		}
		state = filepath.Join(home, ".local", "state")
	}
	l.dirs = filepath.Join(state, "constellation", "sandbox", l.name())
	l.lives()
}

func (l *life) lives() {
	t := l.t
	t.Helper()
	identity, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	l.knows("identity of age", []byte(identity.String()))
	owned := func(name, content string, mode os.FileMode) {
		t.Helper()
		path := filepath.Join(l.dir, name)
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		if l.as != nil {
			if err := os.Chown(path, ordinaryUser, ordinaryUser); err != nil {
				t.Fatal(err)
			}
		}
	}
	owned("identity.txt", identity.String()+"\n", 0o600)
	owned(workspace.ConfigFile, read(t, filepath.Join(l.dir, workspace.ConfigFile))+"\nbackup:\n  recipients:\n  - "+identity.Recipient().String()+"\n", 0o644)
	l.env = append(l.env, "CONSTELLATION_BACKUP_IDENTITY="+filepath.Join(l.dir, "identity.txt"))

	l.does(8*time.Minute, "init", "--non-interactive", "--yes", "-o", "json")
	ctx, stop := context.WithCancel(t.Context())
	var harvesting sync.WaitGroup
	harvesting.Go(func() { l.harvest(ctx) })
	defer harvesting.Wait()
	defer stop()
	const value, login = "canary-of-a-secret-5d1c7e90ab", "canary-of-a-registry-77aa01"
	l.knows("value of a Secret", []byte(value))
	l.knows("password of a registry", []byte(login))
	l.apply("kubectl", fmt.Sprintf(`{"apiVersion":"v1","kind":"List","items":[
		{"apiVersion":"v1","kind":"Secret","metadata":{"name":"planted","namespace":"default"},"stringData":{"v":%q}},
		{"apiVersion":"v1","kind":"Secret","metadata":{"name":"login","namespace":"default"},"type":"kubernetes.io/dockerconfigjson","stringData":{".dockerconfigjson":"{\"auths\":{\"r.example\":{\"username\":\"me\",\"password\":\"%s\"}}}"}}]}`, value, login))
	begun := time.Now()
	l.does(time.Minute, "sandbox", "up", "--workers", "2")
	l.wantReady(begun, []string{"control-plane-0", "worker-0", "worker-1"})
	l.nothing("after init and joins", searched...)

	l.does(10*time.Minute, "upgrade", "apply", "--non-interactive", "--yes", "--to", "v1.1.0", "--kubernetes", current, "-o", "json")
	for _, n := range l.status().Nodes {
		if n.State != plan.NodeReady || !strings.HasSuffix(n.Image, "v1.1.0") {
			t.Errorf("after the upgrade %s is %s with image %s", n.Name, n.State, n.Image)
		}
	}
	l.nothing("after the upgrade", searched...)

	l.does(2*time.Minute, "backup", "create", "--secrets", "-o", "json")
	var list struct {
		Backups []struct {
			ID        string
			Encrypted bool
		}
	}
	out := l.does(time.Minute, "backup", "list", "-o", "json").stdout
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list.Backups) == 0 || !list.Backups[0].Encrypted {
		t.Fatalf("no encrypted backup: %v\n%s", err, out)
	}
	l.kubectl("delete", "secret", "planted")
	l.does(2*time.Minute, "backup", "restore", list.Backups[0].ID, "--non-interactive", "--yes", "--only", "core/secrets/default/planted", "-o", "json")
	if v := l.kubectl("get", "secret", "planted", "-o", "jsonpath={.data.v}"); v != base64.StdEncoding.EncodeToString([]byte(value)) {
		t.Errorf("the restored Secret has the value %q", v)
	}
	var all []string
	for _, n := range l.status().Nodes {
		all = append(all, n.Name)
	}
	begun = time.Now()
	l.does(2*time.Minute, "sandbox", "machine", "power-cut", "--all")
	l.wantReady(begun, all)
	l.does(2*time.Minute, "support-bundle", "--to", filepath.Join(l.dir, "bundle.tar.gz"), "-o", "json")
	l.nothing("after backup, restore, crash and support bundle", searched...)
	l.mu.Lock()
	scanner := secretscan.New(l.secrets)
	l.mu.Unlock()
	for place, kinds := range l.bundle(filepath.Join(l.dir, "bundle.tar.gz"), scanner) {
		t.Errorf("%s has %v", place, kinds)
	}
	for i, b := range belongs {
		if !l.used[i] && (b.machines == "" || b.machines == l.kind) {
			t.Errorf("no secret was found at %s, where it belongs: is it searched for?", b.place)
		}
	}
	l.findsCanaries()
}

// findsCanaries plants a value in each kind of place and searches for it.
func (l *life) findsCanaries() {
	t := l.t
	t.Helper()
	canary := "planted-canary-0e4c1b7f"
	l.secrets = []secretscan.Secret{{Kind: "canary", Value: []byte(canary)}}
	var machine, root string
	for _, m := range glob(t, l.dirs, "m/*") {
		if _, err := os.Stat(filepath.Join(l.root(m), "etc/kubernetes/pki/ca.key")); err == nil {
			machine, root = m, l.root(m)
		}
	}
	write := func(path, content string) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(content); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	write(filepath.Join(l.dir, "note.txt"), fmt.Sprintf("%x", canary))
	write(filepath.Join(root, "var/lib/left-behind"), canary)
	write(filepath.Join(root, "var/log/pods/planted.log"), base64.StdEncoding.EncodeToString([]byte("xx"+canary)))
	write(filepath.Join(l.dirs, "planted"), canary)
	if l.kind == simulatedMachines {
		write(filepath.Join(machine, "console.log"), canary)
	} else {
		l.shell(time.Minute, filepath.Base(machine), nil, "systemd-cat echo "+canary+"; journalctl --sync")
	}
	write(filepath.Join(l.dir, plan.RunsDir, "planted.jsonl"), `{"text":"`+canary+`"}`)
	fmt.Fprintln(&l.output, canary)
	_, _ = l.tryKubectl("get", "configmap", canary) // the request is in the audit log
	l.kubectl("create", "configmap", "planted", "--from-literal=v="+base64.StdEncoding.EncodeToString([]byte(canary)))
	l.apply("kubectl", `{"apiVersion":"v1","kind":"Event","metadata":{"name":"planted","namespace":"kube-system"},"involvedObject":{"kind":"Pod","namespace":"kube-system","name":"p"},"message":"`+canary+`"}`)
	// A process with the value as an argument, in its environment, and in an open file without a name.
	gone := filepath.Join(t.TempDir(), "gone")
	cmd := exec.CommandContext(t.Context(), "bash", "-c", `exec 9<>"$2"; echo "$1" >&9; rm "$2"; echo ready; read -r`, filepath.Dir(l.dir)+" "+filepath.Base(l.dirs), canary, gone)
	cmd.Env = append(os.Environ(), "PLANTED="+canary)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		in.Close()
		_ = cmd.Wait()
	}()
	if _, err := io.ReadFull(out, make([]byte, len("ready"))); err != nil {
		t.Fatal(err)
	}
	found, _ := l.scan()
	kinds := map[string]bool{}
	for place := range found {
		kind, _, _ := strings.Cut(place, "/")
		kinds[kind] = true
	}
	for _, kind := range searched {
		if !kinds[kind] {
			t.Errorf("the search does not find the value that was planted in %s: %v", kind, found)
		}
	}
	l.does(2*time.Minute, "support-bundle", "--to", filepath.Join(l.dir, "planted.tar.gz"))
	if len(l.bundle(filepath.Join(l.dir, "planted.tar.gz"), secretscan.New(l.secrets))) == 0 {
		t.Error("the search does not find the event in a support bundle")
	}
}

// TestPlacesOfSecrets checks the table of places against names that must not match it.
func TestPlacesOfSecrets(t *testing.T) {
	for _, tt := range []struct {
		place, kind string
		want        bool
	}{
		{place: "workspace/constellation-mastersecret.json", kind: "master secret", want: true},
		{place: "workspace/constellation-mastersecret.json", kind: "init secret"},
		{place: "record/constellation-upgrade/init-1/events.jsonl", kind: "master secret"},
		{place: "disk/worker-0/etc/kubernetes/kubelet.conf", kind: "key of the cluster", want: true},
		{place: "disk/worker-0/etc/kubernetes/manifests/kube-apiserver.yaml", kind: "key of the cluster"},
		{place: "log/disk/worker-0/var/log/pods/x.log", kind: "token of a service account"},
	} {
		if got := belongsIn(tt.place, tt.kind) >= 0; got != tt.want {
			t.Errorf("%s in %s: %v, want %v", tt.kind, tt.place, got, tt.want)
		}
	}
	for _, b := range belongs {
		if b.reason == "" {
			t.Errorf("%s has no reason", b.place)
		}
	}
}
