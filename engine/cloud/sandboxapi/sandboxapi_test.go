package sandboxapi

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine/cloud"
)

func TestIdentifiersRoundTrip(t *testing.T) {
	if s, m, err := ParseProviderID(ProviderID("demo-1a2b", "worker-3")); err != nil || s != "demo-1a2b" || m != "worker-3" {
		t.Errorf("provider ID: %q %q %v", s, m, err)
	}
	if s, g, err := ParseGroupID(GroupID("demo", WorkerGroup)); err != nil || s != "demo" || g != WorkerGroup {
		t.Errorf("group: %q %q %v", s, g, err)
	}
	if s, v, err := ParseImageReference(ImageReference("demo", "v1.1.0")); err != nil || s != "demo" || v != "v1.1.0" {
		t.Errorf("image: %q %q %v", s, v, err)
	}
}

func TestForeignIdentifiersAreRefused(t *testing.T) {
	for name, err := range map[string]error{
		"another cloud's provider ID":    third(ParseProviderID("gce://project/zone/instance")),
		"provider ID without machine":    third(ParseProviderID("sandbox://demo")),
		"provider ID that climbs":        third(ParseProviderID("sandbox://demo/..")),
		"provider ID with a second path": third(ParseProviderID("sandbox://demo/worker-0/reboot")),
		"sandbox in capitals":            third(ParseProviderID("sandbox://Demo/worker-0")),
		"image as a group":               third(ParseGroupID("sandboxes/demo/images/v1.0.0")),
		"group as an image":              third(ParseImageReference("sandboxes/demo/groups/workers")),
		"group with a query":             third(ParseGroupID("sandboxes/demo/groups/workers?x=y")),
		"empty image":                    third(ParseImageReference("")),
	} {
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func third(_, _ string, err error) error { return err }

func TestAnswersBecomeErrorsOfPackageCloud(t *testing.T) {
	for _, tt := range []struct {
		name   string
		status int
		body   string
		want   error
		text   string
	}{
		{name: "unknown object", status: 404, body: `{"error":"no instance worker-9"}`, want: cloud.ErrNotFound, text: "no instance worker-9"},
		{name: "throttled", status: 429, body: `{"error":"slow down"}`, want: cloud.ErrThrottled, text: "slow down"},
		{name: "no token", status: 401, body: ``, want: cloud.ErrDenied, text: "unauthorized"},
		{name: "worker asks for the token", status: 403, body: `{"error":"workers get no token"}`, want: cloud.ErrDenied, text: "workers get no token"},
		{name: "broken cloud", status: 500, body: `<html>`, want: cloud.ErrUnavailable, text: "internal server error"},
		{name: "gateway", status: 503, body: `{"error":"starting"}`, want: cloud.ErrUnavailable, text: "starting"},
		{name: "redirect", status: 302, body: ``, want: nil, text: "found"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Location", "http://192.0.2.1/")
				w.WriteHeader(tt.status)
				w.Write([]byte(tt.body))
			}))
			defer s.Close()
			_, err := NewClient(s.URL, "secret-token").Instance(t.Context(), "sandbox://demo/worker-9")
			if err == nil {
				t.Fatal("no error")
			}
			for _, kind := range []error{cloud.ErrNotFound, cloud.ErrThrottled, cloud.ErrDenied, cloud.ErrUnavailable} {
				if got := errors.Is(err, kind); got != errors.Is(tt.want, kind) {
					t.Errorf("%q is %q: %t", err, kind, got)
				}
			}
			if !strings.Contains(err.Error(), tt.text) || !strings.HasPrefix(err.Error(), "read instance sandbox://demo/worker-9: ") {
				t.Errorf("error %q, want it to name the instance and %q", err, tt.text)
			}
			if strings.Contains(err.Error(), "secret-token") {
				t.Errorf("error %q shows the token", err)
			}
		})
	}
}

func TestUnreachableCloudIsUnavailable(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	_, err = NewMetadata("http://" + l.Addr().String()).Self(t.Context())
	if !errors.Is(err, cloud.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
	_, err = NewClient("unix:"+filepath.Join(t.TempDir(), "api.sock"), "").Groups(t.Context())
	if !errors.Is(err, cloud.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
}

func TestCancelledCallIsNoFaultOfTheCloud(t *testing.T) {
	block := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-block }))
	defer s.Close()
	defer close(block)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	_, err := NewMetadata(s.URL).Peers(ctx)
	if !errors.Is(err, context.Canceled) || errors.Is(err, cloud.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
}

func TestSilentCloudIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := NewMetadata("http://cloud")
		m.http.Transport.(*http.Transport).DialContext = func(context.Context, string, string) (net.Conn, error) {
			client, server := net.Pipe()
			go func() { // reads, never answers
				b := make([]byte, 1024)
				for {
					if _, err := server.Read(b); err != nil {
						return
					}
				}
			}()
			return client, nil
		}
		start := time.Now()
		_, err := m.Self(t.Context())
		if !errors.Is(err, cloud.ErrUnavailable) || time.Since(start) != requestTimeout {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
		m.http.CloseIdleConnections()
	})
}

func TestRequestsNameTheirObject(t *testing.T) {
	var got []string
	sock := filepath.Join(t.TempDir(), "api.sock")
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	s := &httptest.Server{Listener: l, Config: &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		got = append(got, strings.TrimSpace(r.Method+" "+r.URL.RequestURI()+" "+string(body)))
		var in NewInstances
		if strings.HasSuffix(r.URL.Path, "/instances") && json.Unmarshal(body, &in) != nil {
			t.Errorf("body %q", body)
		}
		json.NewEncoder(w).Encode(InstanceList{Instances: make([]cloud.Instance, len(in.Tokens))})
	})}}
	s.Start()
	defer s.Close()
	c, ctx := NewClient("unix:"+sock, ""), t.Context()
	group, id := GroupID("demo", WorkerGroup), ProviderID("demo", "worker-0")
	for _, call := range []func() error{
		func() error { return c.SetGroupImage(ctx, group, ImageReference("demo", "v1.1.0")) },
		func() error { return c.SetGroupCount(ctx, group, 3) },
		func() error { _, err := c.CreateInstance(ctx, group, "heir-of-worker-0"); return err },
		func() error { _, err := c.CreateInstances(ctx, group, []string{"a", "b"}); return err },
		func() error { _, err := c.CreateInstances(ctx, group, nil); return err }, // no request
		func() error { return c.DeleteInstance(ctx, id) },
		func() error { return c.DeleteInstances(ctx, []string{id, ProviderID("demo", "worker-1")}) },
		func() error { return c.DeleteInstances(ctx, nil) }, // no request
		func() error { return c.RebootInstance(ctx, id) },
		func() error { return c.StopInstance(ctx, id) },
		func() error { _, err := c.Components(ctx, "v1.35.4"); return err },
		func() error { return c.SetFaults(ctx, nil) },
		func() error { return c.Shutdown(ctx, true) },
	} {
		if err := call(); err != nil {
			t.Error(err)
		}
	}
	want := []string{
		`PUT /v1/sandboxes/demo/groups/workers/image {"image":"sandboxes/demo/images/v1.1.0"}`,
		`PUT /v1/sandboxes/demo/groups/workers/count {"count":3}`,
		`POST /v1/sandboxes/demo/groups/workers/instances {"tokens":["heir-of-worker-0"]}`,
		`POST /v1/sandboxes/demo/groups/workers/instances {"tokens":["a","b"]}`,
		`POST /v1/instances/delete {"providerIDs":["sandbox://demo/worker-0"]}`,
		`POST /v1/instances/delete {"providerIDs":["sandbox://demo/worker-0","sandbox://demo/worker-1"]}`,
		"POST /v1/sandboxes/demo/instances/worker-0/reboot",
		"POST /v1/sandboxes/demo/instances/worker-0/stop",
		"GET /v1/components?kubernetes=v1.35.4",
		`PUT /v1/faults {"faults":null}`,
		"POST /v1/shutdown?machines=true",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if _, err := c.CreateInstance(ctx, group, "../../shutdown"); err == nil {
		t.Error("a token that is no name was sent")
	}
	if err := c.DeleteInstances(ctx, []string{id, "gce://project/zone/instance"}); err == nil {
		t.Error("another cloud's instance was sent")
	}
}

func TestAnswersThatAreNotWholeAreErrors(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		json.NewEncoder(w).Encode(InstanceList{Instances: []cloud.Instance{{Name: "worker-0"}}, Partial: true})
	}))
	defer s.Close()
	c, ctx := NewClient(s.URL, ""), t.Context()
	if l, err := c.Instances(ctx); !errors.Is(err, cloud.ErrPartial) || len(l) != 1 {
		t.Errorf("partial list: %v, %v", l, err)
	}
	if l, err := c.CreateInstances(ctx, GroupID("demo", WorkerGroup), []string{"a", "b"}); !errors.Is(err, cloud.ErrUnavailable) || l != nil {
		t.Errorf("one instance for two tokens: %v, %v", l, err)
	}
}

func TestMetadataIsChecked(t *testing.T) {
	answers := map[string]string{}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Write([]byte(answers[r.URL.Path]))
	}))
	defer s.Close()
	m, ctx := NewMetadata(s.URL), t.Context()

	answers["/v1/initsecrethash"] = `{"sha256":"` + strings.Repeat("ab", sha256.Size) + `"}`
	if h, err := m.InitSecretHash(ctx); err != nil || len(h) != sha256.Size {
		t.Errorf("hash %x: %v", h, err)
	}
	answers["/v1/podcidr"] = `{"cidr":"10.244.0.0/16"}`
	if p, err := m.PodCIDR(ctx); err != nil || p.String() != "10.244.0.0/16" {
		t.Errorf("pod CIDR %s: %v", p, err)
	}
	for path, bad := range map[string]string{
		"/v1/initsecrethash": `{"sha256":"abcd"}`,
		"/v1/podcidr":        `{}`,
		"/v1/loadbalancer":   `{}`,
		"/v1/token":          `{}`,
		"/v1/self":           `not JSON`,
	} {
		answers[path] = bad
	}
	for name, call := range map[string]func() error{
		"short hash":    func() error { _, err := m.InitSecretHash(ctx); return err },
		"no range":      func() error { _, err := m.PodCIDR(ctx); return err },
		"no host":       func() error { _, err := m.LoadBalancer(ctx); return err },
		"no token":      func() error { _, err := m.Token(ctx); return err },
		"not even JSON": func() error { _, err := m.Self(ctx); return err },
	} {
		if call() == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
