package preflight

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

// served returns a client whose API server has these objects and answers lists alone; it works in a bubble of synctest. The
// clientset of client-go's package fake would compile for half a minute.
func served(t *testing.T, objects ...runtime.Object) kubernetes.Interface {
	t.Helper()
	lists := map[string][]runtime.Object{}
	for _, o := range objects {
		kinds, _, err := scheme.Scheme.ObjectKinds(o)
		if err != nil {
			t.Fatal(err)
		}
		o.GetObjectKind().SetGroupVersionKind(kinds[0])
		r, _ := meta.UnsafeGuessKindToResource(kinds[0])
		path := "/apis/" + r.GroupVersion().String()
		if r.Group == "" {
			path = "/api/" + r.Version
		}
		all := path + "/" + r.Resource
		lists[all] = append(lists[all], o)
		if m, err := meta.Accessor(o); err == nil && m.GetNamespace() != "" {
			own := path + "/namespaces/" + m.GetNamespace() + "/" + r.Resource
			lists[own] = append(lists[own], o)
		}
	}
	return answering(t, func(r *http.Request) any { return listed(lists[r.URL.Path]) })
}

// listed is a list as a server encodes it. Its kind is left out: the client expects one.
func listed[O any](items []O) any { return map[string]any{"items": items} }

// answering returns a client whose server answers each request with a value, as JSON.
func answering(t *testing.T, answer func(*http.Request) any) kubernetes.Interface {
	t.Helper()
	config := &rest.Config{Host: "https://api.test", QPS: -1, Transport: transport(func(r *http.Request) (*http.Response, error) {
		raw, err := json.Marshal(answer(r))
		if err != nil {
			return nil, err
		}
		header := http.Header{"Content-Type": {"application/json"}}
		return &http.Response{StatusCode: http.StatusOK, Header: header, Body: io.NopCloser(bytes.NewReader(raw)), Request: r}, nil
	})}
	c, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return c
}
