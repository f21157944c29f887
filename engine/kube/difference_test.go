package kube

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/engine"
	"constellation/engine/backup"
)

func TestServerSetFieldsDoNotDiffer(t *testing.T) {
	for _, tt := range []struct {
		name, saved, live string
		owners            string // of saved
		status            bool
		want              []string
	}{
		{
			name:  "fields that an API server sets differ between clusters",
			saved: `{"apiVersion":"a/v1","kind":"K","metadata":{"name":"x","uid":"1"},"spec":{"a":1}}`,
			live:  `{"apiVersion":"a/v2","kind":"K","metadata":{"name":"x","uid":"2","resourceVersion":"7","generation":3,"creationTimestamp":"2026-01-01T00:00:00Z","managedFields":[{}],"selfLink":"/x"},"spec":{"a":1}}`, status: true,
		},
		{name: "values at any depth", saved: `{"metadata":{"name":"x"},"spec":{"a":{"b":[{"c":1},{"d":"e"}]}}}`, live: `{"metadata":{"name":"x"},"spec":{"a":{"b":[{"c":2},{"d":"f"}]}}}`, status: true, want: []string{"spec.a.b[0].c", "spec.a.b[1].d"}},
		{name: "keys that are new or gone", saved: `{"metadata":{"name":"x"},"data":{"a":"1","b":"2"}}`, live: `{"metadata":{"name":"x"},"data":{"b":"2","c.d/e":"3"}}`, status: true, want: []string{"data.a", `data["c.d/e"]`}},
		{name: "lists of other lengths are one difference", saved: `{"metadata":{"name":"x"},"spec":[1,2,3]}`, live: `{"metadata":{"name":"x"},"spec":[1,2]}`, status: true, want: []string{"spec"}},
		{name: "another type", saved: `{"metadata":{"name":"x"},"spec":{"a":1}}`, live: `{"metadata":{"name":"x"},"spec":{"a":"1"}}`, status: true, want: []string{"spec.a"}},
		{name: "null is not false", saved: `{"metadata":{"name":"x"},"spec":{"a":null,"b":false}}`, live: `{"metadata":{"name":"x"},"spec":{"a":false,"b":false}}`, status: true, want: []string{"spec.a"}},
		{name: "the order of keys and spaces is ignored", saved: `{"metadata":{"name":"x"},"spec":{"a":1,"b":2}}`, live: `{"metadata":{"name":"x"},"spec":{"b": 2,"a": 1}}`, status: true},
		{name: "numbers beyond 2^53", saved: `{"metadata":{"name":"x"},"spec":{"a":9007199254740993}}`, live: `{"metadata":{"name":"x"},"spec":{"a":9007199254740992}}`, status: true, want: []string{"spec.a"}},
		{name: "one number written in two ways", saved: `{"metadata":{"name":"x"},"spec":{"a":1.0}}`, live: `{"metadata":{"name":"x"},"spec":{"a":1}}`, status: true},
		{name: "no labels are no labels", saved: `{"metadata":{"name":"x","labels":{}},"status":{}}`, live: `{"metadata":{"name":"x","finalizers":[]}}`, status: true},
		{name: "labels, annotations and finalizers", saved: `{"metadata":{"name":"x","labels":{"a":"b"},"finalizers":["f"]}}`, live: `{"metadata":{"name":"x","annotations":{"c":"d"}}}`, status: true, want: []string{"metadata.annotations", "metadata.finalizers", "metadata.labels"}},
		{name: "a status, if it counts", saved: `{"metadata":{"name":"x"},"status":{"a":1}}`, live: `{"metadata":{"name":"x"},"status":{"a":2}}`, status: true, want: []string{"status.a"}},
		{name: "a status, if it does not", saved: `{"metadata":{"name":"x"},"status":{"a":1}}`, live: `{"metadata":{"name":"x"},"status":{"a":2}}`},
		{name: "an object that is being deleted", saved: `{"metadata":{"name":"x"}}`, live: `{"metadata":{"name":"x","deletionTimestamp":"2026-01-01T00:00:00Z","deletionGracePeriodSeconds":0}}`, status: true, want: []string{"metadata.deletionTimestamp"}},
		{
			name: "owners are the same by name", saved: `{"metadata":{"name":"x"}}`,
			live:   `{"metadata":{"name":"x","ownerReferences":[{"apiVersion":"g/v2","kind":"B","name":"b","uid":"9"},{"apiVersion":"v1","kind":"A","name":"a","uid":"8","controller":true}]}}`,
			owners: `[{"apiVersion":"v1","kind":"A","name":"a","uid":"1","controller":true},{"apiVersion":"g/v1","kind":"B","name":"b","uid":"2"}]`, status: true,
		},
		{name: "an owner that is gone", saved: `{"metadata":{"name":"x"}}`, live: `{"metadata":{"name":"x"}}`, owners: `[{"apiVersion":"v1","kind":"A","name":"a","uid":"1"}]`, status: true, want: []string{"metadata.ownerReferences"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			saved, err := parseObject([]byte(tt.saved))
			if err != nil {
				t.Fatal(err)
			}
			live, err := parseObject([]byte(tt.live))
			if err != nil {
				t.Fatal(err)
			}
			if f := compare(saved, live, tt.status, json.RawMessage(tt.owners)); !slices.Equal(f.paths, tt.want) || f.more != 0 {
				t.Errorf("differs in %q and %d more, want %q", f.paths, f.more, tt.want)
			}
		})
	}
}

func TestDifferencesAreLimited(t *testing.T) {
	list := func(x string) *object {
		o, err := parseObject([]byte(`{"metadata":{"name":"x"},"spec":[` + strings.Repeat(x+",", 30) + `0]}`))
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	if f := compare(list("1"), list("2"), true, nil); len(f.paths) != maxFields || f.more != 30-maxFields || f.String() != "spec[0], spec[10], spec[11], spec[12], spec[13] and 25 more" {
		t.Errorf("%d paths, %d more: %s", len(f.paths), f.more, f)
	}
}

// Additions and removals are those of a new backup compared with the old one, also of types
// that had no objects.
func TestDifferencesOfClusterAndBackup(t *testing.T) {
	for _, secrets := range []bool{false, true} {
		t.Run(fmt.Sprintf("with secrets %t", secrets), func(t *testing.T) {
			_, c := lone(t)
			h := newHand(t, c)
			h.do(http.MethodPost, "/api/v1/namespaces", `{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"constellation-system"}}`)
			// The API server creates this one itself, shortly after its start.
			for h.all("/api/v1/namespaces/kube-system/configmaps")["kube-system/kube-apiserver-legacy-service-account-token-tracking"] == nil {
				time.Sleep(20 * time.Millisecond) // poll interval
			}
			h.define(widgets)
			h.put(widgets, "default", "goes", "", "{}", "")
			before := h.backUp(secrets)
			if d := h.diff(before); len(d) > 0 {
				t.Errorf("differs at once: %q", d)
			}
			h.do(http.MethodDelete, widgets.path("default")+"/goes", "")
			h.put(widgets, "default", "comes", "", "{}", "")
			h.define(parts)
			h.put(parts, "default", "of-a-new-kind", "", "{}", "")
			for _, ns := range []string{"default", systemNamespace, Namespace} {
				for _, name := range []string{"new", "kube-root-ca.crt"} {
					h.core("ConfigMap", ns, `"name":"`+name+`"`, `"data":{"a":"b"}`)
				}
				h.core("Secret", ns, `"name":"sh.helm.release.v1.new.v1","labels":{"owner":"helm","name":"new","version":"1"}`, `"type":"helm.sh/release.v1","data":{"release":"eHg="}`)
				h.core("Secret", ns, `"name":"new"`, `"data":{"a":"eHg="}`)
			}
			now := map[string]bool{}
			h.eachOf(h.backUp(secrets), func(name string) { now[name] = true })
			var want []string
			h.eachOf(before, func(name string) {
				if !now[name] {
					want = append(want, "removed "+name)
				}
				delete(now, name)
			})
			for name := range now {
				want = append(want, "added "+name)
			}
			slices.Sort(want)
			got := h.diff(before)
			slices.Sort(got)
			if d := cmp.Diff(want, got); d != "" || len(want) < 8 {
				t.Errorf("%d differences (-want +got):\n%s", len(want), d)
			}
			if d := h.diff(before, engine.Selector{Group: "shop.example.com", Resource: "widgets"}); !slices.Equal(d, []string{"added shop.example.com/widgets/default/comes", "removed shop.example.com/widgets/default/goes"}) {
				t.Errorf("of widgets alone: %q", d)
			}
		})
	}
}

// eachOf calls f with the name of each object of a backup.
func (h hand) eachOf(b *backup.Backup, f func(name string)) {
	h.t.Helper()
	for _, typ := range b.Manifest().Types {
		for o, err := range saved(b, typ) {
			if err != nil {
				h.t.Fatal(err)
			}
			f(nameOf(typ, o).String())
		}
	}
}

func TestPairsMergesStreamsByKey(t *testing.T) {
	stream := func(keys ...string) func(func(*object, error) bool) {
		return func(yield func(*object, error) bool) {
			for _, k := range keys {
				ns, name, _ := strings.Cut(k, "/")
				if !yield(&object{namespace: ns, name: name}, nil) {
					return
				}
			}
		}
	}
	// As in etcd: a-b comes before a/x, since - sorts before /.
	a := merged(inOrder("a", stream("a-b/x", "a/x", "a/z")), inOrder("a", stream("a/b", "b/a")))
	b := inOrder("b", stream("a/b", "a/c", "a/z", "c/c"))
	var got []string
	for p, err := range pairs(a, b) {
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case p.live == nil:
			got = append(got, "-"+p.saved.key())
		case p.saved == nil:
			got = append(got, "+"+p.live.key())
		default:
			got = append(got, p.live.key())
		}
	}
	if want := []string{"-a-b/x", "a/b", "+a/c", "-a/x", "a/z", "-b/a", "+c/c"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	var failed error
	for _, err := range pairs(inOrder("the backup", stream("b/a", "a/b")), stream()) {
		failed = err
	}
	if failed == nil || !strings.Contains(failed.Error(), "the backup: keys out of order: a/b comes after b/a") {
		t.Errorf("out of order: %v", failed)
	}
}
