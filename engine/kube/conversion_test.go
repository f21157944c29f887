package kube

import (
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/backup"
)

// converter is a conversion webhook: spec.a of v1alpha1 is spec.b of v1.
type converter struct {
	*httptest.Server
	broken atomic.Bool
	asked  atomic.Int64
}

func newConverter(t *testing.T) *converter {
	c := &converter{}
	c.Server = httptest.NewTLSServer(c)
	t.Cleanup(c.Close)
	return c
}

// ServeHTTP implements [http.Handler].
func (c *converter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.asked.Add(1)
	if c.broken.Load() {
		http.Error(w, "out of order", http.StatusServiceUnavailable)
		return
	}
	var review struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Request    struct {
			UID               string            `json:"uid"`
			DesiredAPIVersion string            `json:"desiredAPIVersion"`
			Objects           []json.RawMessage `json:"objects"`
		} `json:"request"`
	}
	b, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(b, &review)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	from, to := `"spec":{"a":`, `"spec":{"b":`
	if strings.HasSuffix(review.Request.DesiredAPIVersion, "v1alpha1") {
		from, to = to, from
	}
	var objects []string
	for _, o := range review.Request.Objects {
		s := strings.ReplaceAll(string(o), from, to)
		for _, v := range []string{"v1alpha1", "v1"} {
			s = strings.ReplaceAll(s, `"apiVersion":"shop.example.com/`+v+`"`, `"apiVersion":"`+review.Request.DesiredAPIVersion+`"`)
		}
		objects = append(objects, s)
	}
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"apiVersion":%q,"kind":%q,"response":{"uid":%q,"result":{"status":"Success"},"convertedObjects":[%s]}}`, review.APIVersion, review.Kind, review.Request.UID, strings.Join(objects, ","))
}

// convertedBy makes a definition whose versions are converted by a webhook.
func convertedBy(c *converter, d definition) string {
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Certificate().Raw})
	conversion, _ := json.Marshal(map[string]any{ // strings and maps
		"strategy": "Webhook",
		"webhook":  map[string]any{"conversionReviewVersions": []string{"v1"}, "clientConfig": map[string]any{"url": c.URL, "caBundle": ca}},
	})
	return strings.Replace(string(d.json()), `"scope":`, `"conversion":`+string(conversion)+`,"scope":`, 1)
}

// Objects in an older version of a backup are restored through the cluster's conversion
// webhook. While it is down, the objects that need it are missing and reported.
func TestRestoreThroughConversionWebhook(t *testing.T) {
	_, c := lone(t)
	h := newHand(t, c)
	old := definition{plural: "gizmos", kind: "Gizmo", status: true, versions: []string{"v1alpha1"}}
	h.define(old, widgets)
	const n = 5
	for i := range n {
		h.put(old, "default", fmt.Sprintf("g-%d", i), "", fmt.Sprintf(`{"a":%d}`, i), `{"phase":"Ready"}`)
	}
	h.put(widgets, "default", "w", "", "{}", "")
	b := h.backUp(false)
	only := []engine.Selector{{Group: "shop.example.com", Resource: "gizmos"}}

	// The chart's next release stores v1 only.
	h.destroy(old)
	hook := newConverter(t)
	now := definition{plural: "gizmos", kind: "Gizmo", status: true, versions: []string{"v1alpha1", "v1"}}
	h.do(http.MethodPost, kindsPath, convertedBy(hook, now))
	h.await(now)
	did := h.restore(b, engine.RestoreOptions{Only: only})
	if want := map[string]int{engine.RestoreCreated: n, engine.RestoreLeft: 1}; !maps.Equal(did.states, want) {
		t.Errorf("%v, want %v: %q", did.states, want, lines(did.told))
	}
	for key, o := range h.all(now.path("")) {
		if want := fmt.Sprintf(`{"b":%s}`, key[len(key)-1:]); string(o.fields["spec"]) != want || string(o.fields["status"]) != `{"phase":"Ready"}` {
			t.Errorf("%s: %s %s, want %s", key, o.fields["spec"], o.fields["status"], want)
		}
	}
	if again := h.restore(b, engine.RestoreOptions{Only: only}); again.states[engine.RestoreSame] != n || hook.asked.Load() == 0 {
		t.Errorf("again: %v, the webhook was asked %d times", again.states, hook.asked.Load())
	}
	if d := h.diff(b, only...); len(d) != 1 || !strings.HasPrefix(d[0], "changed apiextensions.k8s.io/customresourcedefinitions/gizmos.shop.example.com: ") {
		t.Errorf("differs: %q", d)
	}

	// A backup reads the stored version and needs no conversion, so it is complete while the
	// webhook is down.
	hook.broken.Store(true)
	h.backUp(false)

	// Objects stored in another version than the one that is read need the webhook.
	older := definition{plural: "gizmos", kind: "Gizmo", status: true, versions: []string{"v1", "v1alpha1"}}
	have := h.do(http.MethodGet, kindsPath+"/"+now.name(), "")
	o, err := parseObject(have)
	if err != nil {
		t.Fatal(err)
	}
	stored := strings.Replace(convertedBy(hook, older), `"metadata":{`, fmt.Sprintf(`"metadata":{"resourceVersion":%s,`, o.meta["resourceVersion"]), 1)
	h.do(http.MethodPut, kindsPath+"/"+now.name(), stored)
	for { // until the API server applies the new definition
		if _, err := h.w.do(t.Context(), http.MethodGet, older.path("default")+"/g-0", nil, "application/json", nil); err != nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	dir := t.TempDir()
	w, err := backup.Create(dir, testBackup)
	if err != nil {
		t.Fatal(err)
	}
	short := patient
	short.wrong = time.Second
	if err := c.dump(t.Context(), w, engine.DumpOptions{}, nil, short); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Commit(backup.Manifest{}); err != nil {
		t.Fatal(err)
	}
	torn, err := backup.Open(dir, testBackup, backup.Keys{})
	if err != nil {
		t.Fatal(err)
	}
	defer torn.Close()
	var not *backup.NotWhole
	if err := torn.Verify(t.Context(), nil); !errors.As(err, &not) || len(not.Damage) > 0 || len(not.Holes) != 1 || not.Holes[0].Resource != "gizmos" || !strings.Contains(not.Holes[0].Reason, "conversion webhook") {
		t.Errorf("verify: %v", err)
	}
	kept := 0
	for _, typ := range torn.Manifest().Types {
		if typ.Resource == "widgets" {
			kept = int(typ.Objects)
		}
	}
	if kept != 1 {
		t.Errorf("%d widgets are in it", kept)
	}
	// Restore and diff have to read them, too; other types are not affected.
	all := h.restore(b, engine.RestoreOptions{})
	if l := lines(all.told); all.states[engine.RestoreFailed] != 1 || !strings.Contains(strings.Join(l, "\n"), "failed shop.example.com/gizmos: the cluster's objects could not be read") || all.states[engine.RestoreSame] < 2 {
		t.Errorf("restore: %v, %q", all.states, l)
	}
	if d := h.diff(b, only...); !strings.Contains(d[len(d)-1], "gizmos.shop.example.com: ") || !strings.Contains(d[len(d)-1], "conversion webhook") {
		t.Errorf("diff: %q", d)
	}
	// Once the webhook answers again, everything succeeds.
	hook.broken.Store(false)
	if last := h.restore(b, engine.RestoreOptions{Only: only}); last.states[engine.RestoreSame] != n {
		t.Errorf("in the end: %v, %q", last.states, lines(last.told))
	}
}

// await returns when all versions of a definition are served.
func (h hand) await(d definition) {
	h.t.Helper()
	for _, v := range d.versions {
		for {
			if _, err := h.w.do(h.t.Context(), http.MethodGet, "/apis/shop.example.com/"+v+"/"+d.plural, nil, "application/json", nil); err == nil {
				break
			}
			time.Sleep(20 * time.Millisecond) // poll interval
		}
	}
}
