package kube

import (
	"context"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"constellation/assets"
	"constellation/engine"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/component"
	"constellation/engine/plan"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// pretendedCloud has every version of Kubernetes and two images.
type pretendedCloud struct{ engine.Cloud }

func (pretendedCloud) Describe(context.Context) (cluster.ProviderInfo, error) {
	return cluster.ProviderInfo{UID: "0123456789abcdef", Name: "demo"}, nil
}

func (pretendedCloud) Images(context.Context) ([]cloud.Image, error) {
	m := map[uint32]string{4: strings.Repeat("0a", 32)}
	return []cloud.Image{{Reference: "sandboxes/demo/images/v1.0.0", Version: "v1.0.0", Measurements: m}, {Reference: "sandboxes/demo/images/v1.1.0", Version: "v1.1.0", Measurements: m}}, nil
}

func (pretendedCloud) Components(context.Context, version.Version) (component.Signed, error) {
	return component.Signed{}, nil
}

// BenchmarkCheckVersions measures the wait until `upgrade check` shows versions and path: with
// a new client and an uncached feed each time, as at the first start of the program, on a
// cluster with few and with many third-party kinds. It reports the largest number of requests
// of one check.
func BenchmarkCheckVersions(b *testing.B) {
	for _, kinds := range []int{0, 2000} {
		b.Run(fmt.Sprintf("%d kinds", kinds), func(b *testing.B) {
			cp := controlplane.ForTest(b, controlplane.Options{APIServerArgs: []string{"--disable-admission-plugins=ServiceAccount"}})
			c, err := ForConfig(cp.Config(), nil)
			if err != nil {
				b.Fatal(err)
			}
			ws := populate(b, cp, c, "v1.0.0")
			putKinds(b, c, kinds)
			settle(b, c)

			cache := filepath.Join(b.TempDir(), "cache")
			b.Setenv("XDG_CACHE_HOME", cache)
			feed, key, asked := serveFeed(b)
			var requests atomic.Int64
			inspect := func(context.Context, []byte) (check.Inspector, error) {
				config := cp.Config()
				config.Wrap(func(rt http.RoundTripper) http.RoundTripper {
					return roundTripper(func(r *http.Request) (*http.Response, error) {
						requests.Add(1)
						return rt.RoundTrip(r)
					})
				})
				return ForConfig(config, nil)
			}
			e := engine.New(ws, engine.Deps{
				Inspect: inspect,
				Provider: func(context.Context, *workspace.Config, *workspace.State) (engine.Cloud, error) {
					return pretendedCloud{}, nil
				},
			})
			var shown time.Duration
			var most, mostAsked int64
			for b.Loop() {
				b.StopTimer()
				if err := os.RemoveAll(cache); err != nil {
					b.Fatal(err)
				}
				requests.Store(0)
				asked.Store(0)
				b.StartTimer()
				start := time.Now()
				found, err := e.Check(b.Context(), check.Request{NoPreflight: true, Feed: feed, FeedKeys: []string{key}}, func(ev plan.Event) {
					if ev.Object == check.CheckVersions {
						shown += time.Since(start)
					}
				})
				if err != nil {
					b.Fatal(err)
				}
				if len(found.Path) != 2 || found.Feed.Sequence == 0 || found.Feed.Problem != "" {
					b.Fatalf("path %+v, feed %+v, findings %+v", found.Path, found.Feed, found.Findings)
				}
				most, mostAsked = max(most, requests.Load()), max(mostAsked, asked.Load())
			}
			b.ReportMetric(float64(most), "requests")
			b.ReportMetric(float64(mostAsked), "feed-requests")
			b.ReportMetric(float64(shown.Microseconds())/float64(b.N)/1000, "shown-ms")
		})
	}
}

// serveFeed publishes the program's own releases, and returns the address, the file of the
// public key and the request counter.
func serveFeed(b *testing.B) (address, key string, requests *atomic.Int64) {
	b.Helper()
	from, dir := b.TempDir(), b.TempDir()
	for _, name := range []string{"v1.0.0.yaml", "v1.1.0.yaml"} {
		text, err := fs.ReadFile(assets.Releases(), "releases/"+name)
		if err != nil {
			b.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(from, name), text, 0o644); err != nil {
			b.Fatal(err)
		}
	}
	k, err := engine.NewFeedKey(filepath.Join(dir, "feed.key"))
	if err != nil {
		b.Fatal(err)
	}
	out := filepath.Join(dir, "feed")
	if _, err := engine.BuildFeed(b.Context(), engine.FeedBuild{From: from, Out: out, KeyFile: k.Private}); err != nil {
		b.Fatal(err)
	}
	requests = &atomic.Int64{}
	files := http.FileServer(http.Dir(out))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		files.ServeHTTP(w, r)
	}))
	b.Cleanup(server.Close)
	return server.URL, k.Public, requests
}

// populate creates a cluster with the services of a release, three nodes of image v1.0.0, and
// a workspace.
func populate(b testing.TB, cp *controlplane.ControlPlane, c *Client, release string) *workspace.Workspace {
	b.Helper()
	ctx := b.Context()
	id := strings.Repeat("c1", 32)
	rootPEM, _, err := attestationtest.CreateCA("bench")
	if err != nil {
		b.Fatal(err)
	}
	dir := b.TempDir()
	w, err := workspace.OpenWorkspace(dir)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := w.AdoptSandbox(workspace.SandboxInfo{
		Name: "demo", UID: "0123456789abcdef", Release: release, Kubernetes: build.DefaultVersion, Image: "v1.0.0", TrustRoots: string(rootPEM),
		Measurements: map[uint32]string{4: strings.Repeat("0a", 32)}, ClusterEndpoint: "127.0.0.1:36443", InitEndpoint: "127.0.0.1:39000",
		InClusterEndpoint: "10.42.0.1", NodeCIDR: "10.42.0.0/24", PodCIDR: "10.244.0.0/16", ServiceCIDR: "10.96.0.0/12",
		ControlPlanes: 1, Workers: 2, Socket: "/nowhere/api.sock", InitSecret: []byte("init-secret-0123456789-abcdefghi"),
	}); err != nil {
		b.Fatal(err)
	}
	state, err := os.OpenFile(filepath.Join(dir, workspace.StateFile), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := fmt.Fprintf(state, "clusterValues:\n  clusterID: %s\n  measurementSalt: %s\n", id, id); err != nil {
		b.Fatal(err)
	}
	if err := state.Close(); err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, workspace.KubeconfigFile), []byte("the client is made from the control plane's"), 0o600); err != nil {
		b.Fatal(err)
	}
	if err := c.ApplyKinds(ctx, ownCRDs(b), func(string) {}); err != nil {
		b.Fatal(err)
	}
	demand := fmt.Sprintf(`{"variant":"tpm2","measurements":{"4":{"expected":"%s","warnOnly":false}}}`, strings.Repeat("0a", 32))
	if err := c.PublishJoinConfig(ctx, cluster.JoinConfig{Attestation: demand, TrustRoots: "pem", ClusterID: id}); err != nil {
		b.Fatal(err)
	}
	target := cluster.NodeTarget{Image: "sandboxes/demo/images/v1.0.0", ImageVersion: "v1.0.0", Components: "k8s-components-sha256-" + strings.Repeat("1", 64), Kubernetes: build.DefaultVersion}
	if err := c.SetNodeTarget(ctx, target); err != nil {
		b.Fatal(err)
	}
	for _, n := range []struct{ name, role string }{{"control-plane-0", "node-role.kubernetes.io/control-plane: ''"}, {"worker-0", "a: b"}, {"worker-1", "a: b"}} {
		if err := cp.Apply(ctx, fmt.Appendf(nil, `apiVersion: v1
kind: Node
metadata: {name: %s, labels: {%s}, annotations: {constellation.edgeless.systems/node-image: %s}}
`, n.name, n.role, target.Image)); err != nil {
			b.Fatal(err)
		}
	}
	if err := cp.Apply(ctx, []byte(workload("Deployment", Namespace, "constellation-operator", "example/operator:"+release, map[string]string{partOfLabel: partOf, versionLabel: release}))); err != nil {
		b.Fatal(err)
	}
	return w
}
