package kube

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/engine/workspace"
)

// lone starts a control plane without controllers.
func lone(t testing.TB) (*controlplane.ControlPlane, *Client) {
	t.Helper()
	cp := controlplanetest.Lend(t.(controlplanetest.T), controlplane.Options{APIServerArgs: []string{"--disable-admission-plugins=ServiceAccount"}})
	c, err := ForConfig(cp.Config(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return cp, c
}

// definition is a CustomResourceDefinition for tests.
type definition struct {
	plural, kind string
	cluster      bool // cluster-scoped
	status       bool // has the status subresource
	versions     []string
	unserved     []string
	spec         string // the schema of spec; any if empty
}

func (d definition) name() string { return d.plural + ".shop.example.com" }

func (d definition) json() []byte {
	spec := d.spec
	if spec == "" {
		spec = `{"type":"object","x-kubernetes-preserve-unknown-fields":true}`
	}
	scope := "Namespaced"
	if d.cluster {
		scope = "Cluster"
	}
	var versions []string
	for i, v := range d.versions {
		sub := ""
		if d.status {
			sub = `"subresources":{"status":{}},`
		}
		versions = append(versions, fmt.Sprintf(`{"name":%q,"served":%t,"storage":%t,%s"schema":{"openAPIV3Schema":{"type":"object","properties":{"spec":%s,"status":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}}}`,
			v, !slices.Contains(d.unserved, v), i == len(d.versions)-1, sub, spec))
	}
	return fmt.Appendf(nil, `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":%q},"spec":{"group":"shop.example.com","scope":%q,"names":{"plural":%q,"singular":%q,"kind":%q,"listKind":"%sList"},"versions":[%s]}}`,
		d.name(), scope, d.plural, strings.ToLower(d.kind), d.kind, d.kind, strings.Join(versions, ","))
}

// hand stands in for users and controllers of a cluster.
type hand struct {
	t testing.TB
	c *Client
	w *wire
}

func newHand(t testing.TB, c *Client) hand {
	t.Helper()
	w, err := c.wire()
	if err != nil {
		t.Fatal(err)
	}
	return hand{t, c, w}
}

const kindsPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

func (h hand) do(method, path, body string) []byte {
	h.t.Helper()
	var in []byte
	if body != "" {
		in = []byte(body)
	}
	b, err := h.w.do(h.t.Context(), method, path, nil, "application/json", in)
	if err != nil {
		h.t.Fatalf("%s %s: %v", method, path, err)
	}
	return b
}

// define creates or replaces a definition and waits until it is served.
func (h hand) define(list ...definition) {
	h.t.Helper()
	for _, d := range list {
		var have struct {
			Metadata struct {
				ResourceVersion string `json:"resourceVersion"`
			} `json:"metadata"`
		}
		b, err := h.w.do(h.t.Context(), http.MethodGet, kindsPath+"/"+d.name(), nil, "application/json", nil)
		switch {
		case apierrors.IsNotFound(err):
			h.do(http.MethodPost, kindsPath, string(d.json()))
		case err != nil:
			h.t.Fatal(err)
		default:
			if err := json.Unmarshal(b, &have); err != nil {
				h.t.Fatal(err)
			}
			body := bytes.Replace(d.json(), []byte(`"metadata":{`), fmt.Appendf(nil, `"metadata":{"resourceVersion":%q,`, have.Metadata.ResourceVersion), 1)
			h.do(http.MethodPut, kindsPath+"/"+d.name(), string(body))
		}
	}
	for _, d := range list {
		for _, v := range d.versions {
			for !slices.Contains(d.unserved, v) {
				_, err := h.w.do(h.t.Context(), http.MethodGet, "/apis/shop.example.com/"+v+"/"+d.plural, nil, "application/json", nil)
				if err == nil {
					break
				}
				if h.t.Context().Err() != nil {
					h.t.Fatal(err)
				}
				time.Sleep(20 * time.Millisecond) // poll interval
			}
		}
	}
}

// path is the API path of objects of a definition.
func (d definition) path(namespace string) string {
	t := backup.Type{Group: "shop.example.com", Version: d.versions[len(d.versions)-1], Resource: d.plural}
	return pathOf(t, namespace)
}

// put creates an object with a status, and returns its UID.
func (h hand) put(d definition, namespace, name, meta, spec, status string) string {
	h.t.Helper()
	uid, err := h.tryPut(h.t.Context(), d, namespace, name, meta, spec, status)
	if err != nil {
		h.t.Fatalf("make %s %s/%s: %v", d.plural, namespace, name, err)
	}
	return uid
}

func (h hand) tryPut(ctx context.Context, d definition, namespace, name, meta, spec, status string) (string, error) {
	if meta != "" {
		meta = "," + meta
	}
	version := d.versions[len(d.versions)-1]
	b, err := h.w.do(ctx, http.MethodPost, d.path(namespace), nil, "application/json", fmt.Appendf(nil, `{"apiVersion":"shop.example.com/%s","kind":%q,"metadata":{"name":%q%s},"spec":%s}`, version, d.kind, name, meta, spec))
	if err != nil {
		return "", err
	}
	o, err := parseObject(b)
	if err != nil || status == "" {
		return o.uid, err
	}
	_, err = h.w.do(ctx, http.MethodPut, d.path(namespace)+"/"+name+"/status", nil, "application/json",
		fmt.Appendf(nil, `{"apiVersion":"shop.example.com/%s","kind":%q,"metadata":{"name":%q,"resourceVersion":%s},"status":%s}`, version, d.kind, name, o.meta["resourceVersion"], status))
	return o.uid, err
}

// destroy deletes definitions with all of their objects, with or without finalizers.
func (h hand) destroy(list ...definition) {
	h.t.Helper()
	for _, d := range list {
		for b, err := range h.w.list(h.t.Context(), d.path(""), nil) {
			if err != nil {
				h.t.Fatal(err)
			}
			o, err := parseObject(b)
			if err != nil {
				h.t.Fatal(err)
			}
			if len(o.meta["finalizers"]) > 0 {
				var m map[string]any
				if err := json.Unmarshal(b, &m); err != nil {
					h.t.Fatal(err)
				}
				delete(m["metadata"].(map[string]any), "finalizers")
				b, err := json.Marshal(m)
				if err != nil {
					h.t.Fatal(err)
				}
				h.do(http.MethodPut, d.path(o.namespace)+"/"+o.name, string(b))
			}
		}
		h.do(http.MethodDelete, kindsPath+"/"+d.name(), "")
	}
	for _, d := range list {
		for {
			_, err := h.w.do(h.t.Context(), http.MethodGet, kindsPath+"/"+d.name(), nil, "application/json", nil)
			if apierrors.IsNotFound(err) {
				break
			}
			if err != nil {
				h.t.Fatal(err)
			}
			time.Sleep(20 * time.Millisecond) // poll interval
		}
	}
}

// all returns the objects of a definition by key.
func (h hand) all(path string) map[string]*object {
	h.t.Helper()
	out := map[string]*object{}
	for b, err := range h.w.list(h.t.Context(), path, nil) {
		if err != nil {
			h.t.Fatal(err)
		}
		o, err := parseObject(b)
		if err != nil {
			h.t.Fatal(err)
		}
		out[o.key()] = o
	}
	return out
}

// each runs f n times, 16 at once.
func each16(t testing.TB, n int, f func(ctx context.Context, i int) error) {
	t.Helper()
	var next atomic.Int64
	var wg sync.WaitGroup
	var failed atomic.Pointer[error]
	for range 16 {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				if err := f(t.Context(), int(i)); err != nil {
					failed.CompareAndSwap(nil, &err)
					return
				}
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		t.Fatal(*err)
	}
}

// testBackup is the ID of backups of tests.
const testBackup = "backup-20261121070501-1a2b3c4d"

// backUp makes a backup of the cluster.
func (h hand) backUp(secrets bool) *backup.Backup {
	h.t.Helper()
	dir := h.t.TempDir()
	w, err := backup.Create(dir, testBackup)
	if err != nil {
		h.t.Fatal(err)
	}
	if err := h.c.Dump(h.t.Context(), w, engine.DumpOptions{Secrets: secrets}, func(engine.BackupProgress) {}); err != nil {
		h.t.Fatal(err)
	}
	if _, err := w.Commit(backup.Manifest{Secrets: secrets}); err != nil {
		h.t.Fatal(err)
	}
	b, err := backup.Open(dir, testBackup, backup.Keys{})
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(b.Close)
	if err := b.Verify(h.t.Context(), nil); err != nil {
		h.t.Fatal(err)
	}
	return b
}

// outcome counts reports by state, and keeps those that are neither created nor unchanged.
type outcome struct {
	states map[string]int
	told   []engine.RestoreReport
	all    []engine.RestoreReport
}

func (h hand) restore(b *backup.Backup, o engine.RestoreOptions) outcome {
	h.t.Helper()
	out, err := h.tryRestore(h.t.Context(), b, o)
	if err != nil {
		h.t.Fatal(err)
	}
	return out
}

func (h hand) tryRestore(ctx context.Context, b *backup.Backup, o engine.RestoreOptions) (outcome, error) {
	out := outcome{states: map[string]int{}}
	err := h.c.Restore(ctx, b, o, func(x engine.RestoreReport) {
		if x.State == engine.RestoreWaits {
			return
		}
		out.states[x.State]++
		out.all = append(out.all, x)
		if x.State != engine.RestoreCreated && x.State != engine.RestoreSame || x.Text != "" {
			out.told = append(out.told, x)
		}
	})
	return out, err
}

// lines formats reports for comparison.
func lines(list []engine.RestoreReport) (out []string) {
	for _, x := range list {
		s := x.State + " " + x.Object.String()
		if x.Text != "" {
			s += ": " + x.Text
		}
		out = append(out, s)
	}
	slices.Sort(out)
	return out
}

func (h hand) diff(b *backup.Backup, only ...engine.Selector) (out []string) {
	h.t.Helper()
	c, err := h.c.Differences(h.t.Context(), b, only, func(d engine.Difference) {
		s := d.Change + " " + d.Object.String()
		if len(d.Fields) > 0 {
			s += ": " + strings.Join(d.Fields, " ")
		}
		out = append(out, s)
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return append(out, c.Skipped...)
}

var (
	fleets  = definition{plural: "fleets", kind: "Fleet", cluster: true, versions: []string{"v1"}}
	widgets = definition{plural: "widgets", kind: "Widget", status: true, versions: []string{"v1"}}
	parts   = definition{plural: "parts", kind: "Part", status: true, versions: []string{"v1"}}
)

// shop creates n objects of three kinds: fleets own some of the widgets, widgets own parts.
func (h hand) shop(n int) {
	h.t.Helper()
	h.define(fleets, widgets, parts)
	for _, ns := range []string{"shop", "shop-2"} {
		h.do(http.MethodPost, "/api/v1/namespaces", `{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"`+ns+`"}}`)
	}
	const many = 10
	var uids [many]string
	for i := range many {
		uids[i] = h.put(fleets, "", fmt.Sprintf("fleet-%d", i), `"labels":{"a":"b"}`, fmt.Sprintf(`{"n":%d}`, i), "")
	}
	each16(h.t, (n-many)/2, func(ctx context.Context, i int) error {
		ns := []string{"shop", "shop-2"}[i%2]
		name, meta := fmt.Sprintf("w-%05d", i), `"annotations":{"example.com/note":"kept"}`
		if i%3 == 0 {
			meta += fmt.Sprintf(`,"ownerReferences":[{"apiVersion":"shop.example.com/v1","kind":"Fleet","name":"fleet-%d","uid":%q,"controller":true}]`, i%many, uids[i%many])
		}
		if i%7 == 0 {
			meta += `,"finalizers":["example.com/hold"]`
		}
		uid, err := h.tryPut(ctx, widgets, ns, name, meta, fmt.Sprintf(`{"size":%d,"float":1.5,"text":"ü \u2028 <x>"}`, i), fmt.Sprintf(`{"phase":"Ready","n":%d,"nothing":null}`, i))
		if err != nil {
			return err
		}
		_, err = h.tryPut(ctx, parts, ns, "p-"+name, fmt.Sprintf(`"ownerReferences":[{"apiVersion":"shop.example.com/v1","kind":"Widget","name":%q,"uid":%q,"blockOwnerDeletion":true}]`, name, uid), `{"a":{"b":[1,2,3]}}`, "")
		return err
	})
}

func TestRestoreOfDestroyedObjects(t *testing.T) {
	n := proof(1000, 10_000)
	_, c := lone(t)
	h := newHand(t, c)
	h.shop(n)
	before := map[string]map[string]*object{}
	for _, d := range []definition{fleets, widgets, parts} {
		before[d.plural] = h.all(d.path(""))
	}
	b := h.backUp(false)
	if d := h.diff(b); len(d) > 0 {
		t.Fatalf("differs at once: %q", d[:min(9, len(d))])
	}
	h.destroy(fleets, widgets, parts)
	if d := h.diff(b, engine.Selector{Group: "shop.example.com", Resource: "widgets"}); len(d) != (n-10)/2+1 {
		t.Errorf("%d differences of widgets after they were destroyed: %q", len(d), d[:min(9, len(d))])
	}
	looked := h.restore(b, engine.RestoreOptions{Look: true})
	if looked.states[engine.RestoreCreated] != n+3 {
		t.Errorf("would: %v", looked.states)
	}
	did := h.restore(b, engine.RestoreOptions{})
	if did.states[engine.RestoreCreated] != n+3 || len(did.told) > 0 {
		t.Errorf("did: %v, %q", did.states, lines(did.told)[:min(9, len(did.told))])
	}
	if d := h.diff(b); len(d) > 0 {
		t.Errorf("differs after it was restored: %q", d[:min(9, len(d))])
	}
	// Compare by a plain list, independently of Differences.
	after := map[string]map[string]*object{}
	for _, d := range []definition{fleets, widgets, parts} {
		after[d.plural] = h.all(d.path(""))
	}
	uids := map[string]string{}
	for kind, list := range after {
		for key, o := range list {
			uids[kind+"/"+o.name] = o.uid
			if was := before[kind][key]; was == nil || was.uid == o.uid {
				t.Fatalf("%s %s was there before: %t", kind, key, was != nil)
			}
		}
		if len(list) != len(before[kind]) {
			t.Errorf("%d %s, had %d", len(list), kind, len(before[kind]))
		}
	}
	owned := 0
	for kind, list := range before {
		for key, was := range list {
			o := after[kind][key]
			for _, f := range []string{"spec", "status"} {
				if !bytes.Equal(was.fields[f], o.fields[f]) {
					t.Fatalf("%s %s: %s is %s, was %s", kind, key, f, o.fields[f], was.fields[f])
				}
			}
			for _, f := range []string{"labels", "annotations", "finalizers"} {
				if !bytes.Equal(was.meta[f], o.meta[f]) {
					t.Fatalf("%s %s: %s are %s, were %s", kind, key, f, o.meta[f], was.meta[f])
				}
			}
			wasOf, err := ownersOf(was.meta["ownerReferences"])
			if err != nil {
				t.Fatal(err)
			}
			isOf, err := ownersOf(o.meta["ownerReferences"])
			if err != nil {
				t.Fatal(err)
			}
			for i := range wasOf {
				owned++
				wasOf[i].UID = uids[map[string]string{"Fleet": "fleets/", "Widget": "widgets/"}[wasOf[i].Kind]+wasOf[i].Name]
			}
			if d := cmp.Diff(wasOf, isOf); d != "" {
				t.Fatalf("%s %s: owners (-want +got):\n%s", kind, key, d)
			}
		}
	}
	if want := (n-10)/2 + (n-10)/2/3; owned != want {
		t.Errorf("%d owners, want %d", owned, want)
	}
	again := h.restore(b, engine.RestoreOptions{})
	if want := map[string]int{engine.RestoreSame: int(b.Manifest().Objects)}; !maps.Equal(again.states, want) {
		t.Errorf("again: %v, want %v; %q", again.states, want, lines(again.told)[:min(9, len(again.told))])
	}
}

// A restore is killed repeatedly, a little later each time. Objects created without their
// status are completed, and in the end everything is restored.
func TestKilledRestoreResumes(t *testing.T) {
	if dir := os.Getenv("TEST_RESTORE_DIR"); dir != "" {
		restoreUntilKilled(t, dir)
		return
	}
	const n = 610
	cp, c := lone(t)
	h := newHand(t, c)
	h.shop(n)
	b := h.backUp(false)
	h.destroy(fleets, widgets, parts)
	kubeconfig, err := cp.Kubeconfig()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, kubeconfig, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, created := range []int{1, 3, 40, 150, 300} {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilledRestoreResumes$")
		cmd.Env = append(os.Environ(), "TEST_RESTORE_DIR="+filepath.Dir(filepath.Dir(b.Path())), "TEST_RESTORE_KUBECONFIG="+file)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		seen := 0
		for l := bufio.NewScanner(out); seen < created && l.Scan(); {
			if strings.HasPrefix(l.Text(), engine.RestoreCreated) || strings.HasPrefix(l.Text(), engine.RestoreCompleted) {
				seen++
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err == nil || seen < created {
			t.Fatalf("it ended by itself, with %d objects: %v", seen, err)
		}
	}
	last := h.restore(b, engine.RestoreOptions{})
	if last.states[engine.RestoreSame] < 300 || last.states[engine.RestoreCreated] == 0 || last.states[engine.RestoreFailed]+last.states[engine.RestoreLeft]+last.states[engine.RestoreLeftOut] > 0 {
		t.Errorf("after it was killed: %v, %q", last.states, lines(last.told)[:min(9, len(last.told))])
	}
	if d := h.diff(b); len(d) > 0 {
		t.Errorf("differs: %q", d[:min(9, len(d))])
	}
	if again := h.restore(b, engine.RestoreOptions{}); !maps.Equal(again.states, map[string]int{engine.RestoreSame: int(b.Manifest().Objects)}) {
		t.Errorf("again: %v, %q", again.states, lines(again.told)[:min(9, len(again.told))])
	}
}

func restoreUntilKilled(t *testing.T, dir string) {
	kubeconfig, err := os.ReadFile(os.Getenv("TEST_RESTORE_KUBECONFIG"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := Connect(kubeconfig, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := backup.Open(dir, testBackup, backup.Keys{})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Restore(t.Context(), b, engine.RestoreOptions{}, func(x engine.RestoreReport) { fmt.Println(x.State, x.Object) }); err != nil {
		t.Fatal(err)
	}
}

func TestObjectWithoutStatusIsCompleted(t *testing.T) {
	_, c := lone(t)
	h := newHand(t, c)
	h.define(widgets)
	for _, name := range []string{"cut", "theirs", "touched"} {
		h.put(widgets, "default", name, "", `{"a":1}`, `{"phase":"Ready"}`)
	}
	b := h.backUp(false)
	for name, manager := range map[string]string{"cut": restoreManager, "theirs": "kubectl", "touched": restoreManager} {
		h.do(http.MethodDelete, widgets.path("default")+"/"+name, "")
		if _, err := h.w.do(t.Context(), http.MethodPost, widgets.path("default"), url.Values{"fieldManager": {manager}}, "application/json",
			fmt.Appendf(nil, `{"apiVersion":"shop.example.com/v1","kind":"Widget","metadata":{"name":%q},"spec":{"a":1}}`, name)); err != nil {
			t.Fatal(err)
		}
	}
	o := h.all(widgets.path("default"))["default/touched"]
	h.do(http.MethodPut, widgets.path("default")+"/touched/status", fmt.Sprintf(`{"apiVersion":"shop.example.com/v1","kind":"Widget","metadata":{"name":"touched","resourceVersion":%s},"status":{"phase":"New"}}`, o.meta["resourceVersion"]))
	only := []engine.Selector{{Group: "shop.example.com", Resource: "widgets"}}
	did := h.restore(b, engine.RestoreOptions{Only: only})
	if want := []string{"completed shop.example.com/widgets/default/cut", "left shop.example.com/widgets/default/theirs: has no status"}; !slices.Equal(lines(did.told), want) {
		t.Errorf("told %q, want %q", lines(did.told), want)
	}
	if d, want := h.diff(b, engine.Selector{Group: "shop.example.com", Resource: "widgets"}), []string{"changed shop.example.com/widgets/default/theirs: status", "changed shop.example.com/widgets/default/touched: status.phase"}; !slices.Equal(d, want) {
		t.Errorf("differs %q, want %q", d, want)
	}
	did = h.restore(b, engine.RestoreOptions{Only: only, Overwrite: true})
	if want := []string{"completed shop.example.com/widgets/default/theirs"}; !slices.Equal(lines(did.told), want) {
		t.Errorf("to be overwritten: told %q, want %q", lines(did.told), want)
	}
	if d, want := h.diff(b, only...), []string{"changed shop.example.com/widgets/default/touched: status.phase"}; !slices.Equal(d, want) {
		t.Errorf("overwritten: differs %q, want %q", d, want)
	}
}

// An API server that throttles is left alone for the time that it names.
func TestRestoreHonorsThrottling(t *testing.T) {
	const n = 210
	cp, direct := lone(t)
	h := newHand(t, direct)
	h.shop(n)
	b := h.backUp(false)
	h.destroy(fleets, widgets, parts)

	upstream, err := url.Parse(cp.Config().Host)
	if err != nil {
		t.Fatal(err)
	}
	transport, err := rest.TransportFor(cp.Config())
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(upstream)
	proxy.Transport = transport
	var mu sync.Mutex
	var writes, refused, lost, early, most, now int
	var until time.Time
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet || !strings.Contains(r.URL.Path, "shop.example.com") {
			proxy.ServeHTTP(w, r)
			return
		}
		mu.Lock()
		writes++
		now++
		most = max(most, now)
		// Requests in flight when the first one was rejected may still arrive.
		if time.Until(until) > 0 && time.Until(until) < 700*time.Millisecond {
			early++
		}
		refuse := writes%60 == 0
		lose := writes%45 == 0 && !refuse
		if refuse {
			refused++
			until = time.Now().Add(time.Second)
		}
		mu.Unlock()
		defer func() { mu.Lock(); now--; mu.Unlock() }()
		switch {
		case refuse:
			w.Header().Set("Retry-After", "1")
			http.Error(w, "too many requests, please try again later", http.StatusTooManyRequests)
		case lose: // done, but the answer is lost
			mu.Lock()
			lost++
			mu.Unlock()
			proxy.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler)
		default:
			proxy.ServeHTTP(w, r)
		}
	}))
	defer s.Close()
	c, err := ForConfig(&rest.Config{Host: s.URL}, nil)
	if err != nil {
		t.Fatal(err)
	}
	did := newHand(t, c).restore(b, engine.RestoreOptions{})
	if want := map[string]int{engine.RestoreCreated: n + 3, engine.RestoreSame: int(b.Manifest().Objects) - n - 3}; !maps.Equal(did.states, want) {
		t.Errorf("did %v, want %v; %q", did.states, want, lines(did.told)[:min(9, len(did.told))])
	}
	if d := h.diff(b); len(d) > 0 {
		t.Errorf("differs: %q", d[:min(9, len(d))])
	}
	if refused == 0 || lost == 0 || early > 0 || most > mostWriters {
		t.Errorf("%d of %d writes refused, %d answers lost, %d came too early, %d at once", refused, writes, lost, early, most)
	}
}

// Existing objects are compared, and kept or overwritten.
func TestExistingObjectsAreKeptUnlessOverwritten(t *testing.T) {
	_, c := lone(t)
	h := newHand(t, c)
	h.define(widgets, fleets)
	for _, name := range []string{"same", "changed", "status", "ends"} {
		h.put(widgets, "default", name, `"labels":{"a":"b"},"finalizers":["example.com/hold"]`, `{"a":1}`, `{"phase":"Ready"}`)
	}
	h.put(fleets, "", "changed", "", `{"a":1}`, "")
	b := h.backUp(false)
	h.change(widgets.path("default")+"/changed", `"spec":{"a":1}`, `"spec":{"a":2,"b":3}`)
	h.change(widgets.path("default")+"/changed", `"labels":{"a":"b"}`, `"labels":{"c":"d"}`)
	h.change(widgets.path("default")+"/status/status", `"phase":"Ready"`, `"phase":"Bad"`)
	h.change(fleets.path("")+"/changed", `"a":1`, `"a":2`)
	h.do(http.MethodDelete, widgets.path("default")+"/ends", "")
	only := []engine.Selector{{Group: "shop.example.com", Resource: "widgets"}, {Group: "shop.example.com", Resource: "fleets", Namespace: "changed"}}
	check := func(name string, o engine.RestoreOptions, want, differs []string) {
		t.Helper()
		o.Only = only
		did := h.restore(b, o)
		if got := lines(did.told); !slices.Equal(got, want) {
			t.Errorf("%s: told %q, want %q", name, got, want)
		}
		if d := h.diff(b, only...); !slices.Equal(d, differs) {
			t.Errorf("%s: differs %q, want %q", name, d, differs)
		}
	}
	ends := "failed shop.example.com/widgets/default/ends: it exists, but is being deleted"
	all := []string{
		"changed shop.example.com/fleets/changed: spec.a",
		"changed shop.example.com/widgets/default/changed: metadata.labels.a metadata.labels.c spec.a spec.b",
		"changed shop.example.com/widgets/default/ends: metadata.deletionTimestamp", "changed shop.example.com/widgets/default/status: status.phase",
	}
	left := []string{ends, "left shop.example.com/fleets/changed: differs in spec.a", "left shop.example.com/widgets/default/changed: differs in metadata.labels.a, metadata.labels.c, spec.a, spec.b"}
	check("without --overwrite", engine.RestoreOptions{}, left, all)
	would := []string{ends, "overwritten shop.example.com/fleets/changed: differs in spec.a", "overwritten shop.example.com/widgets/default/changed: differs in metadata.labels.a, metadata.labels.c, spec.a, spec.b"}
	check("a comparison", engine.RestoreOptions{Look: true, Overwrite: true}, would, all)
	check("a dry run", engine.RestoreOptions{DryRun: true, Overwrite: true}, would, all)
	check("with --overwrite", engine.RestoreOptions{Overwrite: true}, would, all[2:])
	check("again", engine.RestoreOptions{Overwrite: true}, []string{ends}, all[2:])
}

// change replaces a part of the JSON of an object of the cluster.
func (h hand) change(path, old, new string) {
	h.t.Helper()
	was := string(h.do(http.MethodGet, path, ""))
	if !strings.Contains(was, old) {
		h.t.Fatalf("%s: no %s in %s", path, old, was)
	}
	h.do(http.MethodPut, path, strings.Replace(was, old, new, 1))
}

// core makes an object of the core group.
func (h hand) core(kind, namespace, meta, rest string) {
	h.t.Helper()
	h.do(http.MethodPost, "/api/v1/namespaces/"+namespace+"/"+strings.ToLower(kind)+"s", `{"apiVersion":"v1","kind":"`+kind+`","metadata":{`+meta+`},`+rest+`}`)
}

// Objects that the cluster itself depends on are restored by rules.
func TestRestoreRulesOfClusterObjects(t *testing.T) {
	_, c := lone(t)
	h := newHand(t, c)
	pending := definition{plural: "pendingnodes", kind: "PendingNode", cluster: true, versions: []string{"v1alpha1"}}
	nodeVersion := definition{plural: "nodeversions", kind: "NodeVersion", cluster: true, versions: []string{"v1alpha1"}}
	own := func(d definition) string {
		return strings.ReplaceAll(strings.ReplaceAll(string(d.json()), "shop.example.com", "update.edgeless.systems"), "\n", "")
	}
	for _, d := range []definition{pending, nodeVersion} {
		h.do(http.MethodPost, kindsPath, own(d))
	}
	ownPath := "/apis/update.edgeless.systems/v1alpha1/"
	for _, d := range []definition{pending, nodeVersion} {
		body := fmt.Sprintf(`{"apiVersion":"update.edgeless.systems/v1alpha1","kind":%q,"metadata":{"name":"x"},"spec":{"a":1}}`, d.kind)
		for {
			if _, err := h.w.do(t.Context(), http.MethodPost, ownPath+d.plural, nil, "application/json", []byte(body)); err == nil {
				break
			} else if !unserved(err) {
				t.Fatal(err)
			}
			time.Sleep(20 * time.Millisecond) // poll interval
		}
	}
	h.core("ConfigMap", "kube-system", `"name":"join-config"`, `"data":{"a":"old"}`)
	h.core("ConfigMap", "kube-system", `"name":"k8s-components-1"`, `"immutable":true,"data":{"a":"old"}`)
	h.core("ConfigMap", "kube-system", `"name":"gone"`, `"data":{"a":"old"}`)
	record := func(release string, revision int) {
		t.Helper()
		h.core("Secret", "default", fmt.Sprintf(`"name":"sh.helm.release.v1.%s.v%d","labels":{"owner":"helm","name":%q,"version":"%d"}`, release, revision, release, revision), `"type":"helm.sh/release.v1","data":{"release":"eHg="}`)
	}
	record("moved", 1)
	record("moved", 2)
	record("lost", 1)
	b := h.backUp(false)

	secret := "/api/v1/namespaces/default/secrets/sh.helm.release.v1."
	for _, p := range []string{secret + "moved.v1", secret + "moved.v2", secret + "lost.v1", "/api/v1/namespaces/kube-system/configmaps/gone", ownPath + "pendingnodes/x"} {
		h.do(http.MethodDelete, p, "")
	}
	record("moved", 3)
	maps := "/api/v1/namespaces/kube-system/configmaps/"
	h.change(maps+"join-config", `"old"`, `"new"`)
	h.do(http.MethodDelete, maps+"k8s-components-1", "")
	h.core("ConfigMap", "kube-system", `"name":"k8s-components-1"`, `"immutable":true,"data":{"a":"new"}`)
	h.change(ownPath+"nodeversions/x", `"a":1`, `"a":2`)

	told := func(list []engine.RestoreReport) (out []string) {
		for _, x := range list {
			if x.State == engine.RestoreSame || x.Object.Resource == "customresourcedefinitions" {
				continue
			}
			out = append(out, lines([]engine.RestoreReport{x})...)
		}
		slices.Sort(out)
		return out
	}
	did := h.restore(b, engine.RestoreOptions{Overwrite: true})
	want := []string{
		"created core/configmaps/kube-system/gone", "created core/secrets/default/sh.helm.release.v1.lost.v1",
		"left core/configmaps/kube-system/join-config: differs in data.a; " + ruleCareful, "left core/configmaps/kube-system/k8s-components-1: differs in data.a; " + ruleCareful,
		"left update.edgeless.systems/nodeversions/x: differs in spec.a; " + ruleCareful,
		"left-out core/secrets/default/sh.helm.release.v1.moved.v1: " + ruleRecord, "left-out core/secrets/default/sh.helm.release.v1.moved.v2: " + ruleRecord,
		"left-out update.edgeless.systems/pendingnodes/x: " + ruleIntents,
	}
	if d := cmp.Diff(want, told(did.all)); d != "" {
		t.Errorf("everything (-want +got):\n%s", d)
	}
	var only []engine.Selector
	for _, s := range []string{
		"core/configmaps/kube-system/join-config", "core/configmaps/kube-system/k8s-components-1", "update.edgeless.systems/nodeversions/x", "update.edgeless.systems/pendingnodes",
		"core/secrets/default/sh.helm.release.v1.moved.v2",
	} {
		o, err := engine.ParseSelector(s)
		if err != nil {
			t.Fatal(err)
		}
		only = append(only, o)
	}
	did = h.restore(b, engine.RestoreOptions{Overwrite: true, Only: only})
	want = []string{
		"created core/secrets/default/sh.helm.release.v1.moved.v2", "created update.edgeless.systems/pendingnodes/x",
		"overwritten core/configmaps/kube-system/join-config: differs in data.a", "overwritten core/configmaps/kube-system/k8s-components-1: differs in data.a",
		"overwritten update.edgeless.systems/nodeversions/x: differs in spec.a",
	}
	if d := cmp.Diff(want, told(did.all)); d != "" {
		t.Errorf("named objects (-want +got):\n%s", d)
	}
	if d := h.diff(b, only...); len(d) > 0 {
		t.Errorf("differs: %q", d)
	}

	other, _ := lone(t)
	there, err := ForConfig(other.Config(), nil)
	if err != nil {
		t.Fatal(err)
	}
	did = newHand(t, there).restore(b, engine.RestoreOptions{})
	ofKinds := 0
	for _, x := range did.all {
		rule := ruleOther
		if x.Object.Group == "update.edgeless.systems" {
			rule = ruleHooked
			ofKinds++
		}
		if x.State != engine.RestoreLeftOut || x.Text != rule {
			t.Errorf("into another cluster: %s", lines([]engine.RestoreReport{x}))
		}
	}
	if len(did.all) != 11 || ofKinds != 2 {
		t.Errorf("into another cluster: %v, %q", did.states, told(did.all))
	}
}

func TestSecretsThatTheClusterWouldRemoveAreSkipped(t *testing.T) {
	_, c := lone(t)
	h := newHand(t, c)
	h.core("ServiceAccount", "default", `"name":"here"`, `"secrets":[]`)
	uid := h.all("/api/v1/serviceaccounts")["default/here"].uid
	for name, uid := range map[string]string{"here": uid, "gone": "2b4c7bd1-0000-4000-8000-000000000000"} {
		h.core("Secret", "default", fmt.Sprintf(`"name":"token-%s","annotations":{"kubernetes.io/service-account.name":%q,"kubernetes.io/service-account.uid":%q}`, name, name, uid), `"type":"kubernetes.io/service-account-token","data":{"token":"eHg="}`)
	}
	h.core("Secret", "kube-system", `"name":"bootstrap-token-abcdef"`, `"type":"bootstrap.kubernetes.io/token","data":{"token-id":"YWJjZGVm"}`)
	h.core("Secret", "default", `"name":"password"`, `"immutable":true,"data":{"p":"c3dvcmRmaXNo"}`)
	b := h.backUp(true)
	for _, p := range []string{"default/secrets/token-here", "default/secrets/token-gone", "kube-system/secrets/bootstrap-token-abcdef", "default/secrets/password"} {
		h.do(http.MethodDelete, "/api/v1/namespaces/"+p, "")
	}
	did := h.restore(b, engine.RestoreOptions{})
	want := []string{
		"created core/secrets/default/password", "created core/secrets/default/token-here", "left-out core/secrets/default/token-gone: " + ruleToken,
		"left-out core/secrets/kube-system/bootstrap-token-abcdef: " + ruleTicket,
	}
	got := slices.DeleteFunc(lines(did.all), func(s string) bool { return strings.HasPrefix(s, engine.RestoreSame) })
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	h.do(http.MethodDelete, "/api/v1/namespaces/default/secrets/password", "")
	h.core("Secret", "default", `"name":"password"`, `"immutable":true,"data":{"p":"b3RoZXJmaXNo"}`)
	all, err := json.Marshal(h.diff(b))
	if err != nil || !bytes.Contains(all, []byte("changed core/secrets/default/password: data.p")) || bytes.Contains(all, []byte("fish")) || bytes.Contains(all, []byte("c3dv")) {
		t.Errorf("difference of a Secret: %s, %v", all, err)
	}
}

// Messages of an API server are reported without values of objects.
func TestRejectionsHideValues(t *testing.T) {
	o := func(fields string) *object {
		t.Helper()
		o, err := parseObject([]byte(`{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"swordfish","annotations":{"note":"a long annotation"}},` + fields + `}`))
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	for _, tt := range []struct {
		name        string
		saved, live *object
		text, want  string
	}{
		{name: "a rejected value", saved: o(`"spec":{"a":"trout-0815","b":["x"]}`), text: `spec.a: Invalid value: "trout-0815": spec.a in body should match '^x$'`, want: `spec.a: Invalid value: "…": spec.a in body should match '^x$'`},
		{name: "twice, and in a sentence", saved: o(`"spec":{"a":"trout-0815"}`), text: `must be of type date: "trout-0815"; it is trout-0815!`, want: `must be of type date: "…"; it is …!`},
		{name: "with characters that need escaping", saved: o(`"spec":{"a":"a\"<b\u00fc>"}`), text: `Invalid value: "a\"<bü>" and {"a":"a\"\u003cbü\u003e"}`, want: `Invalid value: "…" and {"a":"…"}`},
		{name: "short ones where they are quoted", saved: o(`"spec":{"a":"in"}`), text: `Invalid value: "in": spec.a in body is wrong`, want: `Invalid value: "…": spec.a in body is wrong`},
		{name: "one that is part of another", saved: o(`"spec":{"a":"trout-0815","b":"trout-0815-16"}`), text: `it is trout-0815-16`, want: `it is …`},
		{name: "numbers", saved: o(`"spec":{"pin":4711}`), text: `spec.pin: Invalid value: 4711: must be less than or equal to 9`, want: `spec.pin: Invalid value: …: must be less than or equal to 9`},
		{name: "a value of the live object", saved: o(`"spec":{}`), live: o(`"data":{"p":"trout-0815"}`), text: `data: Forbidden: was trout-0815`, want: `data: Forbidden: was …`},
		{name: "annotations", saved: o(`"spec":{}`), text: `it has a long annotation`, want: `it has …`},
		{name: "names stay", saved: o(`"spec":{"a":"swordfish"}`), text: `Widget.example.com "swordfish" is invalid`, want: `Widget.example.com "swordfish" is invalid`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := without(tt.text, tt.saved, tt.live); got != tt.want {
				t.Errorf("%s\nwant %s", got, tt.want)
			}
		})
	}
}

// Objects in the version in which they were read are restored into the versions of the
// cluster.
func TestAnOlderVersionIsRestoredThroughConversion(t *testing.T) {
	_, c := lone(t)
	h := newHand(t, c)
	schema := func(fields string) string { return `{"type":"object","properties":{` + fields + `}}` }
	old := definition{plural: "gizmos", kind: "Gizmo", status: true, versions: []string{"v1alpha1"}, spec: schema(`"a":{"type":"integer"}`)}
	h.define(old)
	for i := range 5 {
		h.put(old, "default", fmt.Sprintf("g-%d", i), "", `{"a":1}`, `{"phase":"Ready"}`)
	}
	b := h.backUp(false)
	only := []engine.Selector{{Group: "shop.example.com", Resource: "gizmos"}}
	for _, tt := range []struct {
		name string
		now  definition
		want map[string]int
		text string // of what failed
	}{
		{name: "a newer version is stored", now: definition{versions: []string{"v1alpha1", "v1"}}, want: map[string]int{engine.RestoreCreated: 5, engine.RestoreLeft: 1}},
		{name: "the older version is no longer served", now: definition{versions: []string{"v1alpha1", "v1"}, unserved: []string{"v1alpha1"}}, want: map[string]int{engine.RestoreCreated: 5, engine.RestoreLeft: 1}},
		{name: "a field was removed", now: definition{versions: []string{"v1alpha1", "v1"}, spec: schema(`"b":{"type":"integer"}`)}, want: map[string]int{engine.RestoreFailed: 5, engine.RestoreLeft: 1}, text: `unknown field "spec.a"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := newHand(t, c)
			now := tt.now
			now.plural, now.kind, now.status = old.plural, old.kind, true
			if now.spec == "" {
				now.spec = old.spec
			}
			h.destroy(old)
			h.define(now)
			did := h.restore(b, engine.RestoreOptions{Only: only})
			if !maps.Equal(did.states, tt.want) {
				t.Errorf("%v, want %v: %q", did.states, tt.want, lines(did.told))
			}
			if l := lines(did.told); tt.text != "" && !strings.Contains(l[0], tt.text) {
				t.Errorf("%q does not say %s", l[0], tt.text)
			}
			if tt.text != "" {
				return
			}
			for key, o := range h.all(now.path("")) {
				if text(o.fields["apiVersion"]) != "shop.example.com/v1" || string(o.fields["spec"]) != `{"a":1}` || string(o.fields["status"]) != `{"phase":"Ready"}` {
					t.Errorf("%s: %s %s %s", key, o.fields["apiVersion"], o.fields["spec"], o.fields["status"])
				}
			}
			if again := h.restore(b, engine.RestoreOptions{Only: only}); again.states[engine.RestoreSame] != 5 {
				t.Errorf("again: %v", again.states)
			}
		})
	}
}

// Owners that the restore does not create are found by name, and omitted if they were deleted.
func TestOwnersAreFoundByName(t *testing.T) {
	_, c := lone(t)
	h := newHand(t, c)
	h.define(widgets, fleets)
	apps := "/apis/apps/v1/namespaces/default/deployments"
	deploy := func(name string) string {
		t.Helper()
		o, err := parseObject(h.do(http.MethodPost, apps, `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"`+name+`"},"spec":{"selector":{"matchLabels":{"a":"b"}},"template":{"metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"i"}]}}}}`))
		if err != nil {
			t.Fatal(err)
		}
		return o.uid
	}
	ref := func(apiVersion, kind, name, uid string) string {
		return fmt.Sprintf(`{"apiVersion":%q,"kind":%q,"name":%q,"uid":%q}`, apiVersion, kind, name, uid)
	}
	refs := func(list ...string) string { return `"ownerReferences":[` + strings.Join(list, ",") + `]` }
	lives, recreated, gone := deploy("lives"), deploy("recreated"), deploy("gone")
	fleet := h.put(fleets, "", "fleet", "", "{}", "")
	h.put(widgets, "default", "a", refs(ref("apps/v1", "Deployment", "lives", lives)), "{}", "")
	h.put(widgets, "default", "b", refs(ref("apps/v1", "Deployment", "recreated", recreated), ref("shop.example.com/v1", "Fleet", "fleet", fleet)), "{}", "")
	h.put(widgets, "default", "c", refs(ref("apps/v1", "Deployment", "gone", gone), ref("example.com/v1", "Nothing", "nowhere", "1")), "{}", "")
	// One of a cycle has to be the first.
	x := h.put(widgets, "default", "x", "", "{}", "")
	y := h.put(widgets, "default", "y", refs(ref("shop.example.com/v1", "Widget", "x", x)), "{}", "")
	h.change(widgets.path("default")+"/x", `"metadata":{`, `"metadata":{`+refs(ref("shop.example.com/v1", "Widget", "y", y))+`,`)
	b := h.backUp(false)
	h.destroy(widgets)
	h.do(http.MethodDelete, apps+"/gone", "")
	h.do(http.MethodDelete, apps+"/recreated", "")
	recreated = deploy("recreated")
	did := h.restore(b, engine.RestoreOptions{Only: []engine.Selector{{Group: "shop.example.com", Resource: "widgets"}}})
	now := h.all(widgets.path(""))
	got := map[string][]string{}
	for _, o := range now {
		list, err := ownersOf(o.meta["ownerReferences"])
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range list {
			got[o.name] = append(got[o.name], r.Name+" "+r.UID)
		}
	}
	circle := "x"
	if len(got["x"]) > 0 {
		circle = "y"
	}
	want := map[string][]string{"a": {"lives " + lives}, "b": {"recreated " + recreated, "fleet " + fleet}}
	for _, name := range []string{"x", "y"} {
		if name != circle {
			want[name] = []string{circle + " " + now["default/"+circle].uid}
		}
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("owners (-want +got):\n%s", d)
	}
	wantTold := []string{
		"created shop.example.com/widgets/default/c: without its owner Deployment gone, which was deleted; without its owner Nothing nowhere, which was deleted",
		fmt.Sprintf("created shop.example.com/widgets/default/%s: without its owner Widget %s, which was deleted", circle, map[string]string{"x": "y", "y": "x"}[circle]),
	}
	if d := cmp.Diff(wantTold, lines(did.told)); d != "" {
		t.Errorf("told (-want +got):\n%s", d)
	}
}

// The API server validates a dry run, and nothing changes.
func TestADryRunChangesNothing(t *testing.T) {
	_, c := lone(t)
	h := newHand(t, c)
	h.define(widgets, fleets)
	h.do(http.MethodPost, "/api/v1/namespaces", `{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"shop"}}`)
	fleet := h.put(fleets, "", "fleet", "", "{}", "")
	owner := fmt.Sprintf(`"ownerReferences":[{"apiVersion":"shop.example.com/v1","kind":"Fleet","name":"fleet","uid":%q}]`, fleet)
	h.put(widgets, "default", "good", owner, `{"a":1}`, `{"phase":"Ready"}`)
	h.put(widgets, "default", "bad", "", `{"a":"b"}`, "")
	h.put(widgets, "shop", "elsewhere", "", `{"a":1}`, "")
	b := h.backUp(false)
	h.do(http.MethodDelete, widgets.path("shop")+"/elsewhere", "")
	h.do(http.MethodDelete, widgets.path("default")+"/good", "")
	h.do(http.MethodDelete, widgets.path("default")+"/bad", "")
	h.destroy(fleets)
	// Without controllers no namespace is finalized, so this one must be deleted directly.
	h.do(http.MethodDelete, "/api/v1/namespaces/shop", "")
	h.do(http.MethodPut, "/api/v1/namespaces/shop/finalize", `{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"shop"},"spec":{"finalizers":[]}}`)
	strict := widgets
	strict.spec = `{"type":"object","properties":{"a":{"type":"integer"}}}`
	h.define(strict)
	for { // until the API server validates with the new schema
		_, err := h.w.do(t.Context(), http.MethodPost, widgets.path("default"), url.Values{"dryRun": {"All"}}, "application/json", []byte(`{"apiVersion":"shop.example.com/v1","kind":"Widget","metadata":{"name":"try"},"spec":{"a":"b"}}`))
		if apierrors.IsInvalid(err) {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	before := h.diff(b)
	did := h.restore(b, engine.RestoreOptions{DryRun: true})
	notAsked := ": not checked by the API server: the restore would first create its definition or namespace"
	want := []string{
		"created apiextensions.k8s.io/customresourcedefinitions/fleets.shop.example.com",
		"created core/namespaces/shop: created for objects of the backup; its original labels and annotations are not in the backup",
		"created shop.example.com/fleets/fleet" + notAsked,
		"created shop.example.com/widgets/default/good",
		"created shop.example.com/widgets/shop/elsewhere" + notAsked,
		`failed shop.example.com/widgets/default/bad: Widget.shop.example.com "bad" is invalid: spec.a: Invalid value: "string": spec.a in body must be of type integer: "string"`,
	}
	got := slices.DeleteFunc(lines(did.all), func(s string) bool {
		return strings.HasPrefix(s, engine.RestoreSame) || strings.HasPrefix(s, engine.RestoreLeft)
	})
	for i := range got { // how API servers write it changes
		if strings.HasPrefix(got[i], "failed") && strings.Contains(got[i], "spec.a: Invalid value") {
			got[i] = want[len(want)-1]
		}
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if d := cmp.Diff(before, h.diff(b)); d != "" {
		t.Errorf("it changed something (-before +after):\n%s", d)
	}
	did = h.restore(b, engine.RestoreOptions{})
	if did.states[engine.RestoreCreated] != 5 || did.states[engine.RestoreFailed] != 1 {
		t.Errorf("not dry: %v, %q", did.states, lines(did.told))
	}
}

func TestSelectorsWithoutMatchFail(t *testing.T) {
	_, c := lone(t)
	h := newHand(t, c)
	h.define(widgets, fleets)
	h.put(widgets, "default", "w", "", "{}", "")
	h.put(fleets, "", "f", "", "{}", "")
	b := h.backUp(false)
	for _, tt := range []struct{ selector, want, remedy string }{
		{selector: "shop.example.com/widgets", want: "", remedy: ""},
		{selector: "widgets.shop.example.com", want: "", remedy: ""},
		{selector: "shop.example.com/widgets/default", want: "", remedy: ""},
		{selector: "shop.example.com/widgets/default/w", want: "", remedy: ""},
		{selector: "shop.example.com/fleets/f", want: "", remedy: ""},
		{selector: "apiextensions.k8s.io/customresourcedefinitions/fleets.shop.example.com", want: "", remedy: ""},
		{selector: "shop.example.com/widget", want: "select shop.example.com/widget: the backup has no widget.shop.example.com", remedy: "it has shop.example.com/fleets, shop.example.com/widgets"},
		{selector: "example.com/widgets", want: "select example.com/widgets: the backup has no widgets.example.com", remedy: "it has shop.example.com/widgets"},
		{selector: "core/nothing", want: "select core/nothing: the backup has no nothing", remedy: "it has core/configmaps, core/secrets"},
		{selector: "shop.example.com/widgets/w", want: "select shop.example.com/widgets/w: nothing in the backup matches", remedy: "list its content with `constellation backup show " + testBackup + "`"},
		{selector: "shop.example.com/widgets/default/v", want: "select shop.example.com/widgets/default/v: nothing in the backup matches", remedy: "list its content with `constellation backup show " + testBackup + "`"},
		{selector: "shop.example.com/fleets/default/f", want: "select shop.example.com/fleets/default/f: objects of fleets.shop.example.com have no namespace", remedy: "write shop.example.com/fleets/f"},
	} {
		t.Run(tt.selector, func(t *testing.T) {
			s, err := engine.ParseSelector(tt.selector)
			if err != nil {
				t.Fatal(err)
			}
			_, err = h.tryRestore(t.Context(), b, engine.RestoreOptions{Only: []engine.Selector{s}, Look: true})
			switch {
			case tt.want == "" && err != nil:
				t.Error(err)
			case tt.want != "" && (err == nil || err.Error() != tt.want || plan.Remedy(err) != tt.remedy || plan.ExitCode(err) != plan.ExitUsage):
				t.Errorf("%v; remedy %q; exit %d", err, plan.Remedy(err), plan.ExitCode(err))
			}
		})
	}
}

// The restore waits for a definition that waits for the finalizers of its objects.
func TestRestoreWaitsForDeletionOfDefinition(t *testing.T) {
	_, c := lone(t)
	h := newHand(t, c)
	h.define(widgets)
	h.put(widgets, "default", "held", `"finalizers":["example.com/hold"]`, `{"a":1}`, `{"b":2}`)
	b := h.backUp(false)
	h.do(http.MethodDelete, kindsPath+"/"+widgets.name(), "")
	did, released := h.outcomeWith(b, func(x engine.RestoreReport) bool {
		if x.State != engine.RestoreWaits || x.Object.Name != widgets.name() {
			return false
		}
		for { // the deleting controller writes to it at the same time
			was := string(h.do(http.MethodGet, widgets.path("default")+"/held", ""))
			_, err := h.w.do(t.Context(), http.MethodPut, widgets.path("default")+"/held", nil, "application/json", []byte(strings.Replace(was, `"example.com/hold"`, "", 1)))
			if !apierrors.IsConflict(err) {
				return err == nil
			}
		}
	})
	if did[engine.RestoreCreated] != 2 || !released {
		t.Errorf("%v, released %t", did, released)
	}
	if d := h.diff(b); len(d) > 0 {
		t.Errorf("differs: %q", d)
	}
}

// outcomeWith restores everything and calls see with every report until it returns true.
func (h hand) outcomeWith(b *backup.Backup, see func(engine.RestoreReport) bool) (states map[string]int, seen bool) {
	h.t.Helper()
	states = map[string]int{}
	err := h.c.Restore(h.t.Context(), b, engine.RestoreOptions{}, func(x engine.RestoreReport) {
		states[x.State]++
		seen = seen || see(x)
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return states, seen
}

// A user backs up, loses, compares and restores objects: output and exit codes of the engine.
func TestRestoreForUsers(t *testing.T) {
	cp, c := lone(t)
	h := newHand(t, c)
	h.define(widgets)
	for i := range 30 {
		h.put(widgets, "default", fmt.Sprintf("w-%02d", i), "", `{"a":1}`, `{"b":2}`)
	}
	dir := t.TempDir()
	kubeconfig, err := cp.Kubeconfig()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, workspace.KubeconfigFile), kubeconfig, 0o600); err != nil {
		t.Fatal(err)
	}
	ws, err := workspace.OpenWorkspace(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := ws.WriteMasterSecret(workspace.NewMasterSecret()); err != nil {
		t.Fatal(err)
	}
	e := engine.New(ws, engine.Deps{Backups: func(_ context.Context, kubeconfig []byte) (engine.BackupCluster, error) {
		return Connect(kubeconfig, nil)
	}})
	var events []plan.Event
	run := func(p *plan.Plan) error {
		t.Helper()
		events = nil
		return e.Run(t.Context(), p, func(ev plan.Event) { events = append(events, ev) })
	}
	p, err := e.PlanBackup(t.Context(), engine.BackupRequest{Etcd: engine.EtcdSkip})
	if err != nil {
		t.Fatal(err)
	}
	if err := run(p); err != nil {
		t.Fatal(err)
	}
	restore := func(r engine.RestoreRequest) error {
		t.Helper()
		p, err := e.PlanRestore(t.Context(), r, func(plan.Event) {})
		if err != nil {
			return err
		}
		defer p.Close()
		return run(p)
	}
	request := engine.RestoreRequest{ID: p.ID}
	if err := restore(request); plan.ExitCode(err) != plan.ExitNothing || !strings.HasPrefix(err.Error(), "nothing to restore: ") {
		t.Errorf("with nothing gone: %v", err)
	}
	for i := range 20 {
		h.do(http.MethodDelete, widgets.path("default")+fmt.Sprintf("/w-%02d", i), "")
	}
	var differ []string
	compare := func() {
		t.Helper()
		differ = nil
		if _, err := e.Differ(t.Context(), request, func(plan.Event) {}, func(d engine.Difference) { differ = append(differ, d.Change+" "+d.Object.String()) }); err != nil {
			t.Fatal(err)
		}
	}
	if compare(); len(differ) != 20 || differ[0] != "removed shop.example.com/widgets/default/w-00" {
		t.Errorf("differ: %q", differ)
	}
	if err := restore(engine.RestoreRequest{ID: p.ID, DryRun: true}); err != nil || !strings.HasPrefix(events[len(events)-1].Text, "nothing was changed; backup "+p.ID) {
		t.Errorf("dry run: %v, %q", err, events[len(events)-1].Text)
	}
	if compare(); len(differ) != 20 {
		t.Errorf("after a dry run: %q", differ)
	}
	if err := restore(request); err != nil {
		t.Fatal(err)
	}
	created := 0
	for _, ev := range events {
		if ev.Kind == plan.KindLog && ev.State == engine.RestoreCreated && strings.HasPrefix(ev.Object, "shop.example.com/widgets/default/w-") {
			created++
		}
	}
	if compare(); created != 20 || len(differ) > 0 {
		t.Errorf("%d events of objects, differ %q", created, differ)
	}
	if err := restore(request); plan.ExitCode(err) != plan.ExitNothing {
		t.Errorf("again: %v", err)
	}

	h.do(http.MethodDelete, widgets.path("default")+"/w-07", "")
	b, err := e.OpenBackup("", p.ID)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(b.Path(), "shop.example.com", "widgets.json")
	b.Close()
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, bytes.Replace(good, []byte(`"a":1`), []byte(`"a":2`), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := restore(request); err == nil || !strings.Contains(err.Error(), "its SHA-256 differs") || plan.Remedy(err) == "" {
		t.Errorf("damaged: %v", err)
	}
	if err := os.WriteFile(file, good, 0o600); err != nil {
		t.Fatal(err)
	}
	// Nothing vouches for a backup of another master secret, or of a workspace without one.
	for _, state := range []struct {
		name, finding, authentication string
		change                        func() error
	}{
		{name: "another master secret", finding: engine.FindingForeignBackup, authentication: engine.BackupForeign, change: func() error {
			if err := os.Remove(filepath.Join(dir, workspace.MasterSecretFile)); err != nil {
				return err
			}
			return ws.WriteMasterSecret(workspace.NewMasterSecret())
		}},
		{name: "no master secret", finding: engine.FindingForeignBackup, authentication: engine.BackupForeign, change: func() error { return os.Remove(filepath.Join(dir, workspace.MasterSecretFile)) }},
		{name: "a backup without a tag", finding: engine.FindingUnprovenBackup, authentication: engine.BackupUnauthenticated, change: func() error {
			p, err := e.PlanBackup(t.Context(), engine.BackupRequest{Etcd: engine.EtcdSkip})
			if err != nil {
				return err
			}
			request.ID = p.ID
			return run(p)
		}},
	} {
		if err := state.change(); err != nil {
			t.Fatal(err)
		}
		if v, err := e.VerifyBackup(t.Context(), "", request.ID, nil); err != nil || v.Authentication != state.authentication {
			t.Errorf("%s: verify: %+v, %v", state.name, v, err)
		}
		h.do(http.MethodDelete, widgets.path("default")+"/w-06", "")
		if err := restore(request); plan.ExitCode(err) != plan.ExitUnacknowledged {
			t.Errorf("%s: restored without an acknowledgement: %v", state.name, err)
		}
		accepted := request
		accepted.Acknowledge = []string{engine.FindingForeignBackup}
		if state.finding == engine.FindingForeignBackup {
			accepted.Acknowledge = []string{engine.FindingUnprovenBackup}
		}
		if err := restore(accepted); plan.ExitCode(err) != plan.ExitUnacknowledged {
			t.Errorf("%s: restored with the wrong acknowledgement: %v", state.name, err)
		}
		accepted.Acknowledge = []string{state.finding}
		if err := restore(accepted); err != nil {
			t.Errorf("%s: %v", state.name, err)
		}
		if _, ok := h.all(widgets.path(""))["default/w-06"]; !ok {
			t.Errorf("%s: w-06 did not come back", state.name)
		}
		dry := request
		dry.DryRun = true
		h.do(http.MethodDelete, widgets.path("default")+"/w-06", "")
		if err := restore(dry); err != nil {
			t.Errorf("%s: a dry run has no effect to acknowledge: %v", state.name, err)
		}
		h.put(widgets, "default", "w-06", "", `{"a":1}`, `{"b":2}`)
	}
	if err := restore(engine.RestoreRequest{ID: request.ID, Acknowledge: []string{"all"}}); plan.ExitCode(err) != plan.ExitUsage {
		t.Errorf("an unknown finding: %v", err)
	}
	request.Acknowledge = []string{engine.FindingUnprovenBackup}
	// A failed object fails the run, but the rest is restored.
	h.do(http.MethodDelete, widgets.path("default")+"/w-08", "")
	h.put(widgets, "default", "w-08", `"finalizers":["example.com/hold"]`, "{}", "")
	h.do(http.MethodDelete, widgets.path("default")+"/w-08", "")
	if err := restore(request); plan.ExitCode(err) != plan.ExitFailed || !strings.Contains(err.Error(), "shop.example.com/widgets/default/w-08: it exists, but is being deleted") {
		t.Errorf("with an object that cannot be: %v", err)
	}
	if _, ok := h.all(widgets.path(""))["default/w-07"]; !ok {
		t.Error("w-07 did not come back")
	}
	for _, tt := range []struct {
		name string
		r    engine.RestoreRequest
		want string
	}{
		{name: "no such backup", r: engine.RestoreRequest{ID: "backup-20200101000000-00000000"}, want: "there is none in"},
		{name: "no ID", r: engine.RestoreRequest{ID: "x"}, want: "invalid ID of a backup"},
		{name: "an incomplete selector", r: engine.RestoreRequest{ID: p.ID, Only: []string{"widgets"}}, want: "want group/resource"},
		{name: "a selector that matches nothing", r: engine.RestoreRequest{ID: p.ID, Only: []string{"shop.example.com/fleets"}}, want: "the backup has no fleets.shop.example.com"},
	} {
		if err := restore(tt.r); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(err.Error(), tt.want) || plan.Remedy(err) == "" {
			t.Errorf("%s: %v; exit %d, remedy %q", tt.name, err, plan.ExitCode(err), plan.Remedy(err))
		}
	}
}
