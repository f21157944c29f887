package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/internal/testneeds"
)

// callFrom returns a server that sees the address in *from as the source of every request.
func callFrom(t *testing.T, h http.Handler, from *string) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.RemoteAddr = net.JoinHostPort(*from, "40000")
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

func testAPI(t *testing.T) (*api, *fleet, *computer) {
	t.Helper()
	c := newComputer()
	f, _ := testFleet(t, c, nil)
	m, _, _ := testMirror(t)
	a := &api{
		Control: NewControl(f, discard()), log: discard(), fleet: f, mirror: m, refresh: func() {}, info: func(*sandboxapi.Info) {},
		images: func() []cloud.Image {
			return []cloud.Image{{Reference: "sandboxes/demo/images/v1.0.0", Version: "v1.0.0"}}
		},
		shutdown: func(context.Context, bool) error { return nil },
	}
	return a, f, c
}

func TestVersionsThatWereFetchedLaterAreOffered(t *testing.T) {
	a, f, _ := testAPI(t)
	scale(t, f, 1, 0)
	from := f.Instances()[0].IP.String()
	c := sandboxapi.NewClient(callFrom(t, a.control(), &from).URL, "the-token")
	if _, err := c.Components(t.Context(), "v1.36.4"); !errors.Is(err, cloud.ErrNotFound) {
		t.Fatalf("before: %v", err)
	}
	a.refresh = func() { // as the daemon does: it reads the cache
		paths, digests := map[string]string{}, map[string]string{}
		for _, name := range mirrored {
			paths[name], digests[name] = "/cache/"+name, "sha256:00"
		}
		if err := a.mirror.add("v1.36.4", paths, digests); err != nil {
			t.Error(err)
		}
	}
	if i, err := c.Sandbox(t.Context()); err != nil || !slices.Contains(i.KubernetesVersions, "v1.36.4") {
		t.Errorf("the sandbox has %v, %v", i.KubernetesVersions, err)
	}
	if l, err := c.Components(t.Context(), "v1.36.4"); err != nil || len(l.List) != len(mirrored) {
		t.Errorf("components %v, %v", l, err)
	}
}

func TestMetadataKnowsMachinesByTheirAddress(t *testing.T) {
	a, f, _ := testAPI(t)
	scale(t, f, 1, 1)
	cp, worker := f.Instances()[0], f.Instances()[1]
	from := ""
	m, ctx := sandboxapi.NewMetadata(callFrom(t, a.metadata(), &from).URL), t.Context()

	from = worker.IP.String()
	if self, err := m.Self(ctx); err != nil || self != worker {
		t.Errorf("metadata of worker: %+v, %v", self, err)
	}
	if _, err := m.Token(ctx); !errors.Is(err, cloud.ErrDenied) {
		t.Errorf("worker asked for the token: %v", err)
	}
	from = cp.IP.String()
	if self, err := m.Self(ctx); err != nil || self != cp {
		t.Errorf("metadata of control plane: %+v, %v", self, err)
	}
	if tok, err := m.Token(ctx); err != nil || tok != "the-token" {
		t.Errorf("token %q, %v", tok, err)
	}
	if peers, err := m.Peers(ctx); err != nil || len(peers) != 2 {
		t.Errorf("peers %v, %v", peers, err)
	}
	if lb, err := m.LoadBalancer(ctx); err != nil || lb != "10.42.0.1" {
		t.Errorf("load balancer %q, %v", lb, err)
	}
	if h, err := m.InitSecretHash(ctx); err != nil || len(h) != 32 {
		t.Errorf("hash %x, %v", h, err)
	}
	if p, err := m.PodCIDR(ctx); err != nil || p != podCIDR {
		t.Errorf("pods %v, %v", p, err)
	}
	for _, stranger := range []string{"10.244.2.7", "10.42.0.1", "127.0.0.1", "::1"} {
		from = stranger
		if i, err := m.Self(ctx); !errors.Is(err, cloud.ErrDenied) {
			t.Errorf("metadata of %s: %+v, %v", stranger, i, err)
		}
		if _, err := m.Token(ctx); !errors.Is(err, cloud.ErrDenied) {
			t.Errorf("%s gets a token: %v", stranger, err)
		}
	}
}

func TestControlAPIWantsTheToken(t *testing.T) {
	a, f, _ := testAPI(t)
	from := "10.42.0.2"
	s := callFrom(t, a.control(), &from)
	for _, bad := range []string{"", "wrong", "the-toke", "the-token2"} {
		if _, err := sandboxapi.NewClient(s.URL, bad).Groups(t.Context()); !errors.Is(err, cloud.ErrDenied) {
			t.Errorf("token %q: %v", bad, err)
		}
	}
	if g, err := sandboxapi.NewClient(s.URL, "the-token").Groups(t.Context()); err != nil || len(g) != 2 {
		t.Errorf("%v, %v", g, err)
	}
	// The metadata listener has none of the host's calls.
	c := sandboxapi.NewClient(s.URL, "the-token")
	for name, err := range map[string]error{
		"faults": c.SetFaults(t.Context(), nil), "shutdown": c.Shutdown(t.Context(), true),
	} {
		if !errors.Is(err, cloud.ErrNotFound) {
			t.Errorf("%s over the network: %v", name, err)
		}
	}
	f.mu.Lock()
	f.st = f.st.clone()
	f.st.Token = ""
	f.mu.Unlock()
	if _, err := sandboxapi.NewClient(s.URL, "").Groups(t.Context()); !errors.Is(err, cloud.ErrDenied) {
		t.Errorf("no token set, none given: %v", err)
	}
}

func TestControlAPIServesItsClient(t *testing.T) {
	a, f, comp := testAPI(t)
	s := httptest.NewServer(a.host())
	defer s.Close()
	c, ctx := sandboxapi.NewClient(s.URL, ""), t.Context()
	workers := sandboxapi.GroupID("demo", sandboxapi.WorkerGroup)

	if err := c.SetGroupCount(ctx, workers, 1); err != nil {
		t.Fatal(err)
	}
	if err := c.SetGroupImage(ctx, workers, sandboxapi.ImageReference("demo", "v1.1.0")); err != nil {
		t.Fatal(err)
	}
	heir, err := c.CreateInstance(ctx, workers, "heir-of-worker-0")
	if err != nil || heir.Name != "worker-1" || heir.ProviderID != "sandbox://demo/worker-1" || heir.Image != "sandboxes/demo/images/v1.1.0" {
		t.Fatalf("%+v, %v", heir, err)
	}
	groups, err := c.Groups(ctx)
	if err != nil || groups[1].ID != workers || groups[1].Count != 2 || groups[1].Role != cloud.Worker || groups[1].Image != "sandboxes/demo/images/v1.1.0" {
		t.Errorf("groups %+v, %v", groups, err)
	}
	eventually(t, "both machines are ready", func() bool {
		l, err := c.Instances(ctx)
		return err == nil && len(l) == 2 && l[0].State == cloud.Ready && l[1].State == cloud.Ready
	})
	if info, err := c.Sandbox(ctx); err != nil || len(info.Machines) != 2 || info.Machines[0].Boot != sandboxapi.BootReady ||
		info.Machines[0].Console != "/state/worker-0/console.log" || info.KubernetesVersions[0] != "v1.35.4" || info.Machines[0].Started.IsZero() {
		t.Errorf("%+v, %v", info, err)
	}
	if err := c.RebootInstance(ctx, heir.ProviderID); err != nil {
		t.Error(err)
	}
	if err := c.StopInstance(ctx, heir.ProviderID); err != nil {
		t.Error(err)
	}
	if i, err := c.Instance(ctx, heir.ProviderID); err != nil || i.State != cloud.Stopped {
		t.Errorf("%+v, %v", i, err)
	}
	for range 2 { // the second finds nothing, which is no error
		if err := c.DeleteInstance(ctx, heir.ProviderID); err != nil {
			t.Error(err)
		}
		eventually(t, "the machine is gone", func() bool { return len(comp.names()) == 1 })
	}
	if _, err := c.Instance(ctx, heir.ProviderID); !errors.Is(err, cloud.ErrNotFound) {
		t.Errorf("deleted instance: %v", err)
	}
	if l, err := c.Components(ctx, "v1.35.4"); err != nil || len(l.List) != 3 {
		t.Errorf("%v, %v", l, err)
	}
	if img, err := c.Images(ctx); err != nil || len(img) != 1 {
		t.Errorf("%v, %v", img, err)
	}
	if got := f.Faults().spec; len(got) != 0 {
		t.Errorf("faults %v", got)
	}

	for name, tt := range map[string]struct {
		err  error
		kind error
		text string
	}{
		"unknown Kubernetes":              {err: err2(c.Components(ctx, "v1.99.0")), kind: cloud.ErrNotFound, text: "has v1.35.4"},
		"unknown group":                   {err: c.SetGroupCount(ctx, sandboxapi.GroupID("demo", "gpu"), 1), kind: cloud.ErrNotFound, text: "gpu"},
		"another sandbox":                 {err: c.SetGroupCount(ctx, sandboxapi.GroupID("other", sandboxapi.WorkerGroup), 1), kind: cloud.ErrNotFound, text: "sandbox other"},
		"another's image":                 {err: c.SetGroupImage(ctx, workers, sandboxapi.ImageReference("other", "v1.1.0")), kind: cloud.ErrNotFound, text: "other"},
		"unknown image":                   {err: c.SetGroupImage(ctx, workers, sandboxapi.ImageReference("demo", "v9.0.0")), kind: cloud.ErrNotFound, text: "v9.0.0"},
		"no image":                        {err: c.SetGroupImage(ctx, workers, "latest"), text: "want sandboxes/"},
		"negative count":                  {err: c.SetGroupCount(ctx, workers, -1), text: "0 to 253"},
		"too many":                        {err: c.SetGroupCount(ctx, workers, 500), text: "0 to 253"},
		"unknown fault":                   {err: c.SetFaults(ctx, []string{"meteor"}), text: "the faults are boot-delay"},
		"reboot of nobody":                {err: c.RebootInstance(ctx, "sandbox://demo/worker-9"), kind: cloud.ErrNotFound, text: "worker-9"},
		"replacement in an unknown group": {err: err2(c.CreateInstance(ctx, sandboxapi.GroupID("demo", "gpu"), "x")), kind: cloud.ErrNotFound, text: "gpu"},
	} {
		if tt.err == nil || tt.kind != nil && !errors.Is(tt.err, tt.kind) || !strings.Contains(tt.err.Error(), tt.text) {
			t.Errorf("%s: %v", name, tt.err)
		}
	}
}

func err2[T any](_ T, err error) error { return err }

func TestControlAPIRefusesWhatItDoesNotKnow(t *testing.T) {
	a, _, _ := testAPI(t)
	s := httptest.NewServer(a.host())
	defer s.Close()
	for body, want := range map[string]int{
		`{"count":1,"colour":"blue"}`: http.StatusBadRequest,
		`{}`:                          http.StatusConflict,
		`[`:                           http.StatusBadRequest,
	} {
		req, _ := http.NewRequest(http.MethodPut, s.URL+"/v1/sandboxes/demo/groups/workers/count", strings.NewReader(body))
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != want || !strings.Contains(string(b), `"error"`) {
			t.Errorf("%s: %d %s", body, resp.StatusCode, b)
		}
	}
}

func TestAPIFaultsHitMachinesAndSpareTheHost(t *testing.T) {
	a, f, comp := testAPI(t)
	scale(t, f, 1, 1)
	from := f.Instances()[0].IP.String()
	remote := sandboxapi.NewClient(callFrom(t, a.control(), &from).URL, "the-token")
	meta := sandboxapi.NewMetadata(callFrom(t, a.metadata(), &from).URL)
	hs := httptest.NewServer(a.host())
	defer hs.Close()
	host, ctx := sandboxapi.NewClient(hs.URL, ""), t.Context()

	for fault, wantErr := range map[string]error{"api-429=1": cloud.ErrThrottled, "api-500=1": cloud.ErrUnavailable} {
		if err := host.SetFaults(ctx, []string{fault}); err != nil {
			t.Fatal(err)
		}
		if _, err := remote.Groups(ctx); !errors.Is(err, wantErr) {
			t.Errorf("%s: %v", fault, err)
		}
		if _, err := host.Groups(ctx); err != nil {
			t.Errorf("%s hits the host: %v", fault, err)
		}
	}
	host.SetFaults(ctx, []string{"metadata-500=1"})
	if _, err := meta.Self(ctx); !errors.Is(err, cloud.ErrUnavailable) {
		t.Errorf("metadata-500: %v", err)
	}
	host.SetFaults(ctx, []string{"api-latency=200ms"})
	start := time.Now()
	if _, err := remote.Groups(ctx); err != nil || time.Since(start) < 200*time.Millisecond {
		t.Errorf("api-latency: %s, %v", time.Since(start), err)
	}
	host.SetFaults(ctx, []string{"partial-list=1"})
	if l, err := remote.Instances(ctx); err != nil || len(l) != 1 {
		t.Errorf("partial-list: %v, %v", l, err)
	}
	for range 20 {
		peers, err := meta.Peers(ctx)
		if err != nil || len(peers) == 0 || peers[0].IP.String() != from {
			t.Fatalf("partial-list hides a machine from itself: %v, %v", peers, err)
		}
	}
	eventually(t, "machines are there", func() bool { return len(comp.names()) == 2 })
	host.SetFaults(ctx, []string{"lost-delete=1"})
	if err := remote.DeleteInstance(ctx, "sandbox://demo/worker-0"); err != nil {
		t.Error(err)
	}
	if i, err := remote.Instance(ctx, "sandbox://demo/worker-0"); err != nil || i.State == cloud.Terminating {
		t.Errorf("lost-delete: %+v, %v", i, err)
	}
	if err := host.DeleteInstance(ctx, "sandbox://demo/worker-0"); err != nil {
		t.Error(err)
	}
	eventually(t, "the host's delete counts", func() bool { return len(comp.names()) == 1 })
	host.SetFaults(ctx, nil)
	if _, err := remote.Groups(ctx); err != nil {
		t.Errorf("after the faults: %v", err)
	}
}

func TestTheCloudIsVagueAboutItsMachines(t *testing.T) {
	testneeds.Time(t, "6 s")
	a, f, comp := testAPI(t)
	scale(t, f, 1, 1)
	eventually(t, "machines are ready", func() bool {
		return !slices.ContainsFunc(f.Instances(), func(i cloud.Instance) bool { return i.State != cloud.Ready })
	})
	from := f.Instances()[0].IP.String()
	remote := sandboxapi.NewClient(callFrom(t, a.control(), &from).URL, "the-token")
	hs := httptest.NewServer(a.host())
	defer hs.Close()
	host, ctx := sandboxapi.NewClient(hs.URL, ""), t.Context()
	workers := sandboxapi.GroupID("demo", sandboxapi.WorkerGroup)
	names := func(l []cloud.Instance, err error) string {
		var out []string
		for _, i := range l {
			out = append(out, i.Name)
		}
		return fmt.Sprint(out, " ", err)
	}
	with := func(faults ...string) {
		t.Helper()
		if err := host.SetFaults(ctx, faults); err != nil {
			t.Fatal(err)
		}
	}

	with("partial-list-told=1")
	if l, err := remote.Instances(ctx); !errors.Is(err, cloud.ErrPartial) || len(l) > 1 {
		t.Errorf("partial-list-told: %s", names(l, err))
	}
	if l, err := host.Instances(ctx); err != nil || len(l) != 2 {
		t.Errorf("the host gets %s", names(l, err))
	}

	// A create that timed out still took effect. A retry with the same token finds the instance.
	with("create-timeout=1")
	if _, err := remote.CreateInstances(ctx, workers, []string{"a"}); !errors.Is(err, cloud.ErrUnavailable) {
		t.Errorf("create-timeout: %v", err)
	}
	with()
	if l, err := remote.CreateInstances(ctx, workers, []string{"a"}); names(l, err) != "[worker-1] <nil>" {
		t.Errorf("asked again: %s", names(l, err))
	}

	// A quota permits some instances. The error does not name them.
	with("quota=4")
	if l, err := remote.CreateInstances(ctx, workers, []string{"b", "a", "c"}); !errors.Is(err, cloud.ErrUnavailable) || !strings.Contains(err.Error(), "quota is 4 machines, 1 more") {
		t.Errorf("quota: %s", names(l, err))
	}
	if l, err := remote.Instances(ctx); names(l, err) != "[control-plane-0 worker-0 worker-1 worker-2] <nil>" || l[3].Token != "b" {
		t.Errorf("within the quota: %s", names(l, err))
	}

	// While descriptions lag, neither new nor deleted instances show.
	eventually(t, "the newest is ready", func() bool { i, _ := f.Instance("worker-2"); return i.State == cloud.Ready })
	with("describe-lag=1h")
	if l, err := remote.CreateInstances(ctx, workers, []string{"c"}); names(l, err) != "[worker-3] <nil>" {
		t.Errorf("created with a lag: %s", names(l, err))
	}
	if err := remote.DeleteInstances(ctx, []string{"sandbox://demo/worker-0", "sandbox://demo/worker-9"}); err != nil {
		t.Error(err)
	}
	eventually(t, "the deleted machine is gone", func() bool { return !slices.Contains(comp.names(), "worker-0") })
	if l, err := remote.Instances(ctx); names(l, err) != "[control-plane-0 worker-0 worker-1 worker-2] <nil>" {
		t.Errorf("lagging list: %s", names(l, err))
	}
	eventually(t, "the new machine is ready", func() bool { i, _ := f.Instance("worker-3"); return i.State == cloud.Ready })
	for name, want := range map[string]cloud.State{"worker-0": cloud.Ready, "worker-3": cloud.Creating} {
		if i, err := remote.Instance(ctx, sandboxapi.ProviderID("demo", name)); err != nil || i.State != want {
			t.Errorf("lagging description of %s: %s, %v; want %s", name, i.State, err, want)
		}
	}
	if _, err := remote.Instance(ctx, "sandbox://demo/worker-9"); !errors.Is(err, cloud.ErrNotFound) {
		t.Errorf("an instance that never was: %v", err)
	}
	some := []string{"sandbox://demo/worker-3", "sandbox://demo/worker-9", "sandbox://demo/worker-0"}
	if l, err := remote.Describe(ctx, some); names(l, err) != "[worker-3 worker-0] <nil>" || l[0].State != cloud.Creating || l[1].State != cloud.Ready {
		t.Errorf("lagging descriptions: %s, %+v", names(l, err), l)
	}
	if l, err := host.Describe(ctx, some); names(l, err) != "[worker-3] <nil>" || l[0].State != cloud.Ready || l[0].Token != "c" {
		t.Errorf("the host gets %s, %+v", names(l, err), l)
	}
	if l, err := remote.Describe(ctx, []string{"sandbox://other/worker-3"}); !errors.Is(err, cloud.ErrNotFound) {
		t.Errorf("another sandbox's instance: %s", names(l, err))
	}
	with()
	if l, err := remote.Instances(ctx); names(l, err) != "[control-plane-0 worker-1 worker-2 worker-3] <nil>" {
		t.Errorf("without faults: %s", names(l, err))
	}

	// A machine under the fault never-join gets no metadata.
	i, _ := f.Instance("worker-1")
	from = i.IP.String()
	meta := sandboxapi.NewMetadata(callFrom(t, a.metadata(), &from).URL)
	with("never-join=worker-1")
	if _, err := meta.Self(ctx); !errors.Is(err, cloud.ErrUnavailable) {
		t.Errorf("never-join: %v", err)
	}
	with("never-join=worker-2")
	if self, err := meta.Self(ctx); err != nil || self.Name != "worker-1" {
		t.Errorf("never-join of another: %+v, %v", self, err)
	}
}
