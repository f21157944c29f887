package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
)

const dumpID = "backup-20261121070501-1a2b3c4d"

// widgetKind is a definition whose objects may have any content.
func widgetKind(group, plural, kind string) string {
	return fmt.Sprintf(`apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: %[2]s.%[1]s}
spec:
  group: %[1]s
  scope: Namespaced
  names: {plural: %[2]s, singular: %[4]s, kind: %[3]s, listKind: %[3]sList}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}}
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`, group, plural, kind, strings.ToLower(kind))
}

// etcdOf returns a client of a control plane's etcd.
func etcdOf(t testing.TB, cp *controlplane.ControlPlane) *clientv3.Client {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(filepath.Join(cp.PKI(), "apiserver-etcd-client.crt"), filepath.Join(cp.PKI(), "apiserver-etcd-client.key"))
	if err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(filepath.Join(cp.PKI(), "etcd", "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	config := &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots}
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{cp.EtcdEndpoint()}, TLS: config, DialTimeout: 10 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// seed writes objects of a kind directly into etcd, which is ten times as fast as creating
// them.
func seed(t testing.TB, c *clientv3.Client, group, plural, kind, name string, n, size int) {
	t.Helper()
	var ops []clientv3.Op
	for i := range n {
		object := fmt.Sprintf(`{"apiVersion":"%s/v1","kind":"%s","metadata":{"creationTimestamp":"2026-11-21T07:05:01Z","generation":1,"name":"%s-%06d","namespace":"default","uid":"%s-%s-%06[4]d"},"spec":{"payload":"%s"}}`,
			group, kind, name, i, plural, name, strings.Repeat("half random ", size/12))
		ops = append(ops, clientv3.OpPut(fmt.Sprintf("/registry/%s/%s/default/%s-%06d", group, plural, name, i), object))
		if len(ops) == max(1, min(100, 1<<20/size)) || i == n-1 {
			if _, err := c.Txn(t.Context()).Then(ops...).Commit(); err != nil {
				t.Fatal(err)
			}
			ops = nil
		}
	}
}

func TestDumpOfARealCluster(t *testing.T) {
	cp := controlplanetest.Lend(t, controlplane.Options{APIServerArgs: []string{"--disable-admission-plugins=ServiceAccount"}})
	c, err := ForConfig(cp.Config(), nil)
	if err != nil {
		t.Fatal(err)
	}
	apply := func(manifest string) {
		t.Helper()
		if err := cp.Apply(t.Context(), []byte(manifest)); err != nil {
			t.Fatal(err)
		}
	}
	apply(widgetKind("example.com", "widgets", "Widget"))
	apply(widgetKind("example.com", "gadgets", "Gadget"))
	etcd := etcdOf(t, cp)
	seed(t, etcd, "example.com", "widgets", "Widget", "stays", 3000, 1200)
	seed(t, etcd, "example.com", "gadgets", "Gadget", "stays", 20, 64000)
	apply("apiVersion: example.com/v1\nkind: Gadget\nmetadata: {name: owned, namespace: default, ownerReferences: [{apiVersion: example.com/v1, kind: Widget, name: x, uid: u}]}\n")
	const canary = "swordfish-0815"
	apply("apiVersion: v1\nkind: Secret\nmetadata: {name: secret, namespace: default}\nstringData: {password: " + canary + "}\n")
	apply("apiVersion: v1\nkind: Secret\ntype: helm.sh/release.v1\nmetadata: {name: sh.helm.release.v1.x.v1, namespace: default}\nstringData: {release: of-" + canary + "}\n")
	coded := base64.StdEncoding.EncodeToString([]byte(canary))

	for _, tt := range []struct {
		secrets bool
		told    []string // files with the canary
	}{
		{false, []string{"helm/releases.json"}},
		{true, []string{"core/secrets.json", "helm/releases.json"}},
	} {
		dir := t.TempDir()
		w, err := backup.Create(dir, dumpID)
		if err != nil {
			t.Fatal(err)
		}
		churn, stop := context.WithCancel(t.Context())
		var churning sync.WaitGroup
		var compactions int
		widgets := c.dynamic.Resource(schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}).Namespace("default")
		churning.Go(func() { // objects come and go in the meantime
			for i := 0; churn.Err() == nil; i++ {
				name := fmt.Sprintf("comes-%d", i)
				u := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Widget", "metadata": map[string]any{"name": name}}}
				if _, err := widgets.Create(churn, u, metav1.CreateOptions{}); err == nil {
					_ = widgets.Delete(churn, name, metav1.DeleteOptions{})
				}
			}
		})
		next := int64(400)
		err = c.Dump(t.Context(), w, engine.DumpOptions{Secrets: tt.secrets}, func(p engine.BackupProgress) {
			if p.Objects < next || compactions == 3 { // in the middle of a page
				return
			}
			next += 700
			r, err := etcd.Put(t.Context(), "compacted", "") // its own resourceVersion
			if err == nil {
				_, err = etcd.Compact(t.Context(), r.Header.Revision, clientv3.WithCompactPhysical())
			}
			if err != nil {
				t.Errorf("compact: %v", err)
			}
			compactions++
		})
		stop()
		churning.Wait()
		if err != nil {
			t.Fatal(err)
		}
		m, err := w.Commit(backup.Manifest{Secrets: tt.secrets})
		if err != nil {
			t.Fatal(err)
		}
		b, err := backup.Open(dir, dumpID, backup.Keys{})
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		if err := b.Verify(t.Context(), nil); err != nil {
			t.Error(err)
		}
		if compactions == 0 || m.Cluster.UID == "" || m.Cluster.Server == "" {
			t.Errorf("%d compactions, cluster %+v", compactions, m.Cluster)
		}
		stayed, owners := map[string]int{}, 0
		for _, typ := range m.Types {
			for o, err := range b.Objects(typ) {
				if err != nil {
					t.Fatal(err)
				}
				var u unstructured.Unstructured
				if err := json.Unmarshal(o.JSON, &u.Object); err != nil {
					t.Fatal(err)
				}
				if u.GetResourceVersion() != "" || u.GetManagedFields() != nil || u.GetGeneration() != 0 || u.GetOwnerReferences() != nil || u.GetUID() == "" || u.GetAPIVersion() == "" || u.GetKind() != typ.Kind {
					t.Errorf("%s: %.300s", typ, o.JSON)
				}
				if strings.HasPrefix(u.GetName(), "stays-") {
					stayed[u.GetKind()+u.GetName()]++
				}
				if o.Owners != nil {
					owners++
				}
			}
		}
		if len(stayed) != 3020 || owners != 1 {
			t.Errorf("%d objects that were there all the time, %d owned", len(stayed), owners)
		}
		for name, n := range stayed {
			if n != 1 {
				t.Errorf("%s is there %d times", name, n)
			}
		}
		var told []string
		err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			text, err := os.ReadFile(path)
			name, _ := filepath.Rel(w.Path(), path)
			if bytes.Contains(text, []byte(canary)) || bytes.Contains(text, []byte(coded[:12])) || bytes.Contains(text, []byte(base64.StdEncoding.EncodeToString([]byte("of-" + canary))[:12])) {
				told = append(told, name)
			}
			if info, serr := d.Info(); serr != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("%s: %v, %v", name, info.Mode(), serr)
			}
			return err
		})
		if err != nil || !slices.Equal(told, tt.told) {
			t.Errorf("secrets are in %v, %v", told, err)
		}
	}
}

// script is an API server with two kinds and scripted answers to lists of widgets.
type script struct {
	mu     sync.Mutex
	asked  []string // of widgets, by query
	widget func(n int, q url.Values) (status int, body string)
	crd    func() bool // whether the definition of widgets exists
}

const (
	scriptCRD = `{"metadata":{"name":"%[1]s.example.com","uid":"uid-%[1]s"},"spec":{"group":"example.com","names":{"plural":"%[1]s","kind":"Widget"},"scope":"Namespaced","versions":[{"name":"v1","served":true,"storage":true}]},"status":{"conditions":[{"type":"Established","status":"True"}],"storedVersions":["v1"]}}`
	scriptObj = `{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"%s","namespace":"default","uid":"uid-%[1]s","resourceVersion":"3"}}`
)

func scriptList(version, next string, names ...string) string {
	var items []string
	for _, n := range names {
		items = append(items, fmt.Sprintf(scriptObj, n))
	}
	return fmt.Sprintf(`{"kind":"WidgetList","apiVersion":"example.com/v1","metadata":{"resourceVersion":%q,"continue":%q},"items":[%s]}`, version, next, strings.Join(items, ","))
}

func scriptStatus(code int, reason, message string) string {
	return fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","code":%d,"reason":%q,"message":%q}`, code, reason, message)
}

func (s *script) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	status, body := 200, `{"metadata":{"resourceVersion":"1"},"items":[]}`
	there := s.crd == nil || s.crd()
	switch p := r.URL.Path; {
	case p == "/version":
		body = `{"gitVersion":"v1.35.4"}`
	case strings.HasSuffix(p, "/namespaces/kube-system"):
		body = `{"metadata":{"name":"kube-system","uid":"uid-cluster"}}`
	case strings.HasSuffix(p, "/customresourcedefinitions"):
		list := []string{fmt.Sprintf(scriptCRD, "gadgets")}
		if there {
			list = append(list, fmt.Sprintf(scriptCRD, "widgets"))
		}
		body = `{"metadata":{"resourceVersion":"2"},"items":[` + strings.Join(list, ",") + `]}`
	case strings.HasSuffix(p, "/customresourcedefinitions/widgets.example.com"):
		body = fmt.Sprintf(scriptCRD, "widgets")
		if !there {
			status, body = 404, scriptStatus(404, "NotFound", "gone")
		}
	case strings.HasSuffix(p, "/gadgets"):
		body = scriptList("9", "", "g")
	case strings.HasSuffix(p, "/widgets"):
		s.asked = append(s.asked, r.URL.Query().Get("continue"))
		status, body = s.widget(len(s.asked), r.URL.Query())
	case p == "/metrics":
		status, body = 403, scriptStatus(403, "Forbidden", "no")
	}
	w.Header().Set("Content-Type", "application/json")
	cut := status < 0 // a truncated answer
	if cut {
		status = -status
		w.Header().Set("Content-Length", fmt.Sprint(len(body)+10))
	}
	w.WriteHeader(status)
	io.WriteString(w, body)
	if cut {
		panic(http.ErrAbortHandler)
	}
}

func TestDumpRetriesAndReportsGaps(t *testing.T) {
	const webhook = `conversion webhook for example.com/v1, Kind=Widget failed: Post "https://webhook.default.svc:443/convert": connection refused`
	for _, tt := range []struct {
		name    string
		script  *script
		objects string // names of the widgets
		version string
		asked   string // tokens
		hole    string
		note    string
	}{
		{name: "two pages", script: &script{widget: func(_ int, q url.Values) (int, string) {
			if q.Get("continue") == "" {
				return 200, scriptList("7", "t", "a", "b")
			}
			return 200, scriptList("7", "", "c")
		}}, objects: "a b c", version: "7", asked: " t"},
		{name: "an expired continue token restarts the type", script: &script{widget: func(n int, q url.Values) (int, string) {
			switch {
			case n == 1:
				return 200, scriptList("7", "t", "a", "b")
			case n == 2:
				return 410, scriptStatus(410, "Expired", "The provided continue parameter is too old")
			case q.Get("continue") == "":
				return 200, scriptList("8", "u", "a")
			}
			return 200, scriptList("8", "", "c")
		}}, objects: "a c", version: "8", asked: " t  u"},
		{name: "a truncated answer is requested again", script: &script{widget: func(n int, q url.Values) (int, string) {
			switch n {
			case 1:
				return 200, scriptList("7", "t", "a", "b")
			case 2:
				list := scriptList("7", "", "c", "d")
				return -200, list[:len(list)-20]
			}
			return 200, scriptList("7", "", "c", "d")
		}}, objects: "a b c d", version: "7", asked: " t t"},
		{name: "an API server that throttles, lags and disconnects", script: &script{widget: func(n int, _ url.Values) (int, string) {
			switch n {
			case 1:
				return 429, scriptStatus(429, "TooManyRequests", "slow down")
			case 2:
				return 504, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":504,"reason":"Timeout","message":"Too large resource version: 9, current: 7","details":{"causes":[{"reason":"ResourceVersionTooLarge"}],"retryAfterSeconds":0}}`
			case 3:
				return 503, scriptStatus(503, "ServiceUnavailable", "away")
			}
			return 200, scriptList("7", "", "a")
		}}, objects: "a", version: "7", asked: "   "},
		{name: "a deleted kind", script: &script{widget: func(int, url.Values) (int, string) { return 404, scriptStatus(404, "NotFound", "gone") }}, note: "widgets.example.com was deleted during the backup; its objects are not in the backup"},
		{name: "a kind that is not served any more", script: &script{widget: func(int, url.Values) (int, string) { return 404, scriptStatus(404, "NotFound", "gone") }}, asked: "*", hole: "widgets.example.com: the API server does not serve this kind"},
		{name: "a conversion webhook that fails", script: &script{widget: func(int, url.Values) (int, string) { return 500, scriptStatus(500, "InternalError", webhook) }}, asked: "*", hole: "widgets.example.com: " + webhook},
		{name: "a conversion webhook that fails half-way", script: &script{widget: func(_ int, q url.Values) (int, string) {
			if q.Get("continue") == "" {
				return 200, scriptList("7", "t", "a", "b")
			}
			return 500, scriptStatus(500, "InternalError", webhook)
		}}, objects: "a b", version: "7", asked: "*", hole: "widgets.example.com: only 2 objects could be read: " + webhook},
		{name: "a user without access", script: &script{widget: func(int, url.Values) (int, string) {
			return 403, scriptStatus(403, "Forbidden", `widgets.example.com is forbidden: User "eve" cannot list`)
		}}, hole: `widgets.example.com: access denied: widgets.example.com is forbidden: User "eve" cannot list`},
		{name: "an answer that is not a list", script: &script{widget: func(int, url.Values) (int, string) { return 200, `{"items":[1]}` }}, asked: "*", hole: "widgets.example.com: the API server's answer cannot be decoded"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.note != "" {
				tt.script.crd = func() bool { return len(tt.script.asked) == 0 }
			}
			server := httptest.NewServer(tt.script)
			defer server.Close()
			c, err := ForConfig(&rest.Config{Host: server.URL}, nil)
			if err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			w, err := backup.Create(dir, dumpID)
			if err != nil {
				t.Fatal(err)
			}
			var so engine.BackupProgress
			if err := c.dump(t.Context(), w, engine.DumpOptions{}, func(p engine.BackupProgress) { so = p }, patience{away: 5 * time.Second, wrong: 300 * time.Millisecond, silent: 5 * time.Second, appear: 300 * time.Millisecond}); err != nil {
				t.Fatal(err)
			}
			m, err := w.Commit(backup.Manifest{})
			if err != nil {
				t.Fatal(err)
			}
			b, err := backup.Open(dir, dumpID, backup.Keys{})
			if err != nil {
				t.Fatal(err)
			}
			defer b.Close()
			var names []string
			version := ""
			for _, typ := range m.Types {
				if typ.Resource != "widgets" {
					continue
				}
				version = typ.ResourceVersion
				for o, err := range b.Objects(typ) {
					if err != nil {
						t.Fatal(err)
					}
					var u struct{ Metadata struct{ Name string } }
					if err := json.Unmarshal(o.JSON, &u); err != nil {
						t.Fatal(err)
					}
					names = append(names, u.Metadata.Name)
				}
			}
			if got := strings.Join(names, " "); got != tt.objects || version != tt.version {
				t.Errorf("objects %q at %q", got, version)
			}
			if got := strings.Join(tt.script.asked, " "); tt.asked != "*" && got != tt.asked {
				t.Errorf("asked for %q", got)
			}
			var holes []string
			for _, h := range m.Holes {
				holes = append(holes, h.String())
			}
			if got := strings.Join(holes, "\n"); got != tt.hole {
				t.Errorf("holes %q", got)
			}
			if got := strings.Join(m.Notes, "\n"); got != tt.note {
				t.Errorf("notes %q", got)
			}
			if err := b.Verify(t.Context(), nil); (err == nil) != (tt.hole == "") {
				t.Errorf("verify: %v", err)
			}
			if so.Objects != m.Objects || so.Types != so.AllTypes || so.Types != 6 && tt.hole == "" && tt.note == "" {
				t.Errorf("progress %+v of %d objects", so, m.Objects)
			}
		})
	}
}

// BenchmarkDump reads custom resources of 20 types from a real API server; a fiftieth of
// them has 64 kB.
func BenchmarkDump(b *testing.B) {
	for _, n := range []int{1000, 10000, 100000} {
		b.Run(fmt.Sprintf("%d objects", n), func(b *testing.B) {
			cp := controlplane.ForTest(b, controlplane.Options{APIServerArgs: []string{"--disable-admission-plugins=ServiceAccount"}})
			c, err := ForConfig(cp.Config(), nil)
			if err != nil {
				b.Fatal(err)
			}
			etcd := etcdOf(b, cp)
			for i := range 20 {
				plural, kind := fmt.Sprintf("thing%ds", i), fmt.Sprintf("Thing%d", i)
				if err := cp.Apply(b.Context(), []byte(widgetKind("example.com", plural, kind))); err != nil {
					b.Fatal(err)
				}
				seed(b, etcd, "example.com", plural, kind, "small", n/20, 1500)
				seed(b, etcd, "example.com", plural, kind, "large", max(1, n/1000), 64000)
			}
			var bytes, objects int64
			for b.Loop() {
				w, err := backup.Create(b.TempDir(), dumpID)
				if err != nil {
					b.Fatal(err)
				}
				if err := c.Dump(b.Context(), w, engine.DumpOptions{}, nil); err != nil {
					b.Fatal(err)
				}
				m, err := w.Commit(backup.Manifest{})
				if err != nil {
					b.Fatal(err)
				}
				if want := int64(n + 20*max(1, n/1000) + 20); m.Objects < want {
					b.Fatalf("%d objects, want %d", m.Objects, want)
				}
				bytes, objects = m.Bytes, m.Objects
			}
			b.SetBytes(bytes)
			b.ReportMetric(float64(objects)*float64(b.N)/b.Elapsed().Seconds(), "objects/s")
		})
	}
}
