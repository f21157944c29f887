package oddcloud_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/assets"
	"constellation/assets/render"
	"constellation/engine"
	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/attestation/keyprocess"
	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/oddcloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/cluster"
	"constellation/engine/kube"
	"constellation/engine/plan"
	"constellation/engine/release/releasetest"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/hollow"
	"constellation/engine/workspace"
	"constellation/internal/testneeds"
	"constellation/joinservice"
	"constellation/joinservice/joinproto"
	"constellation/operator"
	"constellation/operator/api/v1alpha1"
)

// life is a cluster in the odd cloud. Control plane, join service and operator are real.
type life struct {
	t     *testing.T
	cp    *controlplane.ControlPlane
	cloud *oddcloud.Cloud
	admin client.Client
	ws    *workspace.Workspace
	ca    *attestationtest.CA

	clusterID []byte
	boot      []attestation.MeasuredEvent
}

const (
	lifeNamespace  = "constellation-system"
	lifeKubernetes = build.DefaultVersion
	lifeRelease    = "v1.0.0" // of the services
)

func (l *life) create(o client.Object) {
	l.t.Helper()
	if err := l.admin.Create(l.t.Context(), o); err != nil {
		l.t.Fatal(err)
	}
}

// until fails the test if holds does not become true within four minutes, enough for a busy computer.
func (l *life) until(what string, holds func() (string, bool)) {
	l.t.Helper()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(4 * time.Minute); ; <-tick.C {
		is, ok := holds()
		if ok {
			return
		}
		if time.Now().After(end) {
			l.t.Fatalf("timeout after four minutes waiting until %s: %s", what, is)
		}
	}
}

// identity is what the AK certificate of a machine contains.
func (l *life) identity(name string) attestation.Identity {
	l.t.Helper()
	i, ok := l.cloud.Machines.Instance(name)
	if !ok {
		l.t.Fatalf("the cloud has no machine %s", name)
	}
	_, group, _ := sandboxapi.ParseGroupID(i.Group)
	return attestation.Identity{Name: i.Name, ProviderID: i.ProviderID, UID: oddcloud.UID, Group: oddcloud.Group(group), Role: i.Role, IP: i.IP}
}

func (l *life) issuer(id attestation.Identity, member []byte) attestation.Issuer {
	l.t.Helper()
	i, err := attestationtest.NewSoftwareIssuer(l.ca, id, l.boot, member)
	if err != nil {
		l.t.Fatal(err)
	}
	return i
}

// serve runs the join service of a control plane with the permissions of its chart. It returns the
// address.
func (l *life) serve(ctx context.Context, work *sync.WaitGroup, name string) string {
	l.t.Helper()
	access, err := l.cp.ConfigFor("system:serviceaccount:"+lifeNamespace+":joinservice", "system:serviceaccounts", "system:serviceaccounts:"+lifeNamespace, "system:authenticated")
	if err != nil {
		l.t.Fatal(err)
	}
	both := joinservice.Access{
		Cluster: access, Namespace: lifeNamespace, Metadata: balanced{l.cloud.Provider().Metadata(oddcloud.ID(name))}, Attestation: attestation.TPMMethod(),
	}
	dir, err := os.MkdirTemp("", "signer") // a short path, for the socket
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { os.RemoveAll(dir) })
	socket, err := keyprocess.Listen(ctx, dir+"/signer.sock", nil)
	if err != nil {
		l.t.Fatal(err)
	}
	signer, err := joinservice.NewSigner(joinservice.SignerConfig{Access: both, Issuer: l.issuer(l.identity(name), l.clusterID), PKI: l.cp.PKI(), APIServerPort: 6443})
	if err != nil {
		l.t.Fatal(err)
	}
	work.Go(func() {
		if err := signer.Run(ctx, socket); err != nil {
			l.t.Errorf("run CA signer: %v", err)
		}
	})
	s, err := joinservice.New(joinservice.Config{Access: both, Signer: dir + "/signer.sock", APIServerPort: 6443})
	if err != nil {
		l.t.Fatal(err)
	}
	var ls [2]net.Listener
	for i := range ls {
		var lc net.ListenConfig
		if ls[i], err = lc.Listen(ctx, "tcp", "127.0.0.1:0"); err != nil {
			l.t.Fatal(err)
		}
	}
	work.Go(func() {
		if err := s.Run(ctx, ls[0], ls[1]); err != nil {
			l.t.Errorf("run join service: %v", err)
		}
	})
	return ls[0].Addr().String()
}

// balanced is the metadata of a machine in front of whose cluster the user has put a load balancer.
type balanced struct{ providers.Metadata }

func (balanced) LoadBalancer(context.Context) (string, error) { return "10.0.0.1", nil }

// join requests a ticket for id until the answer is final: a ticket, or a refusal.
func (l *life) join(addr string, id attestation.Identity) error {
	l.t.Helper()
	v := attestation.NewTPMValidator(l.ca.Roots(), attestation.Enforced(attestation.PredictPCRs(l.boot)), attestation.Options{PCR15: attestation.PCR15Member(), Role: cloud.ControlPlane})
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(atls.NewClient(atls.Config{
		Purpose: atls.PurposeJoin, Issuer: l.issuer(id, nil), Validator: func() attestation.Validator { return v },
	})))
	if err != nil {
		l.t.Fatal(err)
	}
	defer conn.Close()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		l.t.Fatal(err)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject:  pkix.Name{CommonName: "system:node:" + id.Name, Organization: []string{"system:nodes"}},
		DNSNames: []string{id.Name}, IPAddresses: []net.IP{id.IP.AsSlice()},
	}, key)
	if err != nil {
		l.t.Fatal(err)
	}
	req := &joinproto.IssueJoinTicketRequest{CertificateRequest: csr}
	sealing, err := joinproto.NewSealing(l.t.Context(), l.issuer(id, nil).Issue)
	if err != nil {
		l.t.Fatal(err)
	}
	sealing.Ask(req)
	l.until("the join service decides about "+id.Name, func() (string, bool) {
		var got *joinproto.IssueJoinTicketResponse
		if got, err = joinproto.NewJoinServiceClient(conn).IssueJoinTicket(l.t.Context(), req); err == nil {
			err = sealing.Open(got)
		}
		return fmt.Sprint(err), status.Code(err) != codes.Unavailable && status.Code(err) != codes.ResourceExhausted
	})
	return err
}

// unnamed fails the test if a document names the sandbox, or an image of a machine.
func (l *life) unnamed(what string, v any) {
	l.t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		l.t.Fatal(err)
	}
	if i := strings.Index(strings.ToLower(string(b)), "sandbox"); i >= 0 {
		l.t.Errorf("%s names the sandbox: …%s…", what, b[max(0, i-200):min(len(b), i+200)])
	}
}

// TestLifeInTheOddCloud takes a cluster through configuration, preflight of init, charts, joins, a
// rollout in which a deletion does not end, status and upgrade check.
func TestLifeInTheOddCloud(t *testing.T) {
	testneeds.Time(t, "half a minute")
	t.Parallel()
	const controlPlanes, workers = 3, 2
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	l := &life{
		t: t, cp: controlplane.ForTest(t, controlplane.Options{Controllers: true}), clusterID: bytes.Repeat([]byte{7}, 32),
		boot: []attestation.MeasuredEvent{{PCR: 4, Digest: bytes.Repeat([]byte{4}, 32), Description: "boot loader"}},
	}
	t.Cleanup(func() { cancel(); work.Wait() })
	root, rootKey, err := attestationtest.CreateCA("odd")
	if err != nil {
		t.Fatal(err)
	}
	if l.ca, err = attestationtest.ParseCA(root, rootKey); err != nil {
		t.Fatal(err)
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	if l.admin, err = client.New(l.cp.Config(), client.Options{Scheme: scheme}); err != nil {
		t.Fatal(err)
	}
	crds, err := assets.CRDsFor(lifeRelease)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range crds {
		if err := l.cp.Apply(ctx, f.Data); err != nil {
			t.Fatal(err)
		}
	}
	components := offered()
	old, target := "k8s-components-sha256-"+strings.Repeat("a", 64), cluster.ComponentsName(components.List)
	c, wait, err := oddcloud.Start(ctx, oddcloud.Options{
		Lag: 2 * time.Second, Throttle: 50 * time.Millisecond, Components: components,
		Hollow: hollow.Options{Cluster: l.cp.Config(), Times: hollow.Times{Boot: 200 * time.Millisecond, Join: 200 * time.Millisecond, Off: 500 * time.Millisecond}},
	})
	if err != nil {
		t.Fatal(err)
	}
	work.Go(wait)
	l.cloud = c
	t.Cleanup(providers.Register(c.Provider()))

	// The charts get all values of the cloud from its entry.
	l.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: lifeNamespace}})
	var charts []byte
	for _, name := range []string{"constellation-operator", "constellation-services"} {
		b, err := render.Chart(name, lifeRelease, lifeNamespace, c.Provider().ChartValues(nil), map[string]any{"release": lifeRelease})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.cp.Apply(ctx, b); err != nil {
			t.Fatal(err)
		}
		charts = append(charts, b...)
	}
	for _, want := range []string{"--provider=odd\n", "--metadata=odd://demo/control-plane-0\n", "--cloud=odd://demo\n", "--tpm=/dev/tpmrm0\n", "path: /dev/tpmrm0, type: CharDevice"} {
		if !bytes.Contains(charts, []byte(want)) {
			t.Errorf("the charts do not contain %q", want)
		}
	}
	for _, trace := range []string{"sandbox", "169.254.169.254", "10.42.0.1", "constellation-tpm", "cluster-autoscaler-stand-in"} {
		if bytes.Contains(charts, []byte(trace)) {
			t.Errorf("the charts contain %q of the sandbox", trace)
		}
	}

	nv := &v1alpha1.NodeVersion{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName},
		Spec:       v1alpha1.NodeVersionSpec{KubernetesComponentsReference: target, KubernetesClusterVersion: lifeKubernetes},
	}
	list, err := json.Marshal(components.List)
	if err != nil {
		t.Fatal(err)
	}
	demand, err := json.Marshal(map[string]any{"variant": "tpm2", "measurements": attestation.Enforced(attestation.PredictPCRs(l.boot))})
	if err != nil {
		t.Fatal(err)
	}
	inSystem := func(name string, data map[string]string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: name}, Data: data}
	}
	published := inSystem(target, map[string]string{"cluster-version": lifeKubernetes, "components": string(list)})
	published.Annotations = map[string]string{v1alpha1.AnnotationStatement: releasetest.Vouch(t, lifeKubernetes, components.List)}
	for _, o := range []client.Object{
		nv, published, inSystem(old, map[string]string{"cluster-version": lifeKubernetes, "components": "[]"}),
		inSystem("join-config", map[string]string{"attestationConfig": string(demand), "clusterID": hex.EncodeToString(l.clusterID), "trustRoots": string(root)}),
	} {
		l.create(o)
	}
	nv.Status.JoinComponents = v1alpha1.JoinComponents{ControlPlane: target, Worker: target}
	if err := l.admin.Status().Update(ctx, nv); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(
		c.Machines.Seed(ctx, sandboxapi.ControlPlaneGroup, controlPlanes, target), c.Machines.Seed(ctx, sandboxapi.WorkerGroup, workers, old),
	); err != nil {
		t.Fatal(err)
	}

	// Configuration and preflight.
	l.ws = configureRoot(t, root, controlPlanes, workers)
	connect := func(_ context.Context, kubeconfig []byte) (*kube.Client, error) { return kube.Connect(kubeconfig, nil) }
	e := engine.New(l.ws, engine.Deps{
		Connect: func(ctx context.Context, b []byte) (engine.Cluster, error) { return connect(ctx, b) },
		Inspect: func(ctx context.Context, b []byte) (check.Inspector, error) { return connect(ctx, b) },
	})
	l.until("the lists have the machines", func() (string, bool) {
		all, err := c.Instances(ctx)
		return fmt.Sprintf("%d machines, %v", len(all), err), err == nil && len(all) == controlPlanes+workers
	})
	findings, err := e.Preflight(ctx, func(plan.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range findings {
		if f.Severity == plan.Block {
			t.Errorf("%s blocks init: %s: %s", f.ID, f.Title, f.Detail)
		}
	}
	l.unnamed("preflight", findings)

	// Joins. The identity of worker-1 is kept: another machine gets its name and ID later.
	addr := l.serve(ctx, &work, "control-plane-0")
	first, gone := l.identity("worker-0"), l.identity("worker-1")
	forged, impostor := first, first
	forged.Role, forged.Group = cloud.ControlPlane, oddcloud.Group(sandboxapi.ControlPlaneGroup)
	impostor.IP = impostor.IP.Next().Next().Next().Next().Next().Next().Next()
	for _, tt := range []struct {
		name string
		id   attestation.Identity
	}{{name: "a worker as a control plane", id: forged}, {name: "another address", id: impostor}} {
		if err := l.join(addr, tt.id); status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s: %v, want it refused", tt.name, err)
		}
	}

	// The rollout replaces the workers. The deletion of the first one does not end.
	c.StickNext(1)
	work.Go(func() {
		if err := operator.Run(ctx, operator.Config{Cluster: l.cp.Config(), Namespace: lifeNamespace, Cloud: c, NoElection: true}); err != nil && ctx.Err() == nil {
			t.Errorf("run operator: %v", err)
		}
	})
	rollout := func(what string, holds func(v1alpha1.NodeVersionStatus) bool) {
		t.Helper()
		l.until(what, func() (string, bool) {
			var v v1alpha1.NodeVersion
			if err := l.admin.Get(ctx, client.ObjectKey{Name: v1alpha1.NodeVersionName}, &v); err != nil {
				t.Fatal(err)
			}
			s := v.Status
			return fmt.Sprintf("%+v, waiting %+v, conditions %+v", s.Nodes, s.Waiting, s.Conditions), holds(s)
		})
	}
	rollout("the rollout waits for the deletion", func(s v1alpha1.NodeVersionStatus) bool {
		return s.Nodes.UpToDate == controlPlanes+1 && s.Waiting != nil && s.Waiting.Reason == "MachineLeaves" && strings.Contains(s.Waiting.Message, first.ProviderID)
	})

	kubeconfig, err := l.cp.Kubeconfig()
	if err != nil {
		t.Fatal(err)
	}
	_, state, err := l.ws.Load()
	if err != nil {
		t.Fatal(err)
	}
	state.ClusterValues.ClusterID, state.ClusterValues.MeasurementSalt = l.clusterID, l.clusterID
	if err := l.ws.WriteState(state); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(l.ws.Path(workspace.KubeconfigFile), kubeconfig, 0o600); err != nil {
		t.Fatal(err)
	}
	st, err := e.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	l.unnamed("status", st)
	if !st.Reachable || st.Provider != oddcloud.Name || st.Target.Image != "" || st.Target.Release != lifeRelease || st.Counts["nodes"] < controlPlanes+workers {
		t.Errorf("status while a deletion does not end: %+v", st)
	}
	for _, n := range st.Nodes {
		// IDs of groups are opaque in this cloud. The names are those of the configuration.
		if want := map[string]string{"control-plane": sandboxapi.ControlPlaneGroup, "worker": sandboxapi.WorkerGroup}[n.Role]; n.Group != want {
			t.Errorf("node %s is in group %q, want %q", n.Name, n.Group, want)
		}
	}
	c.EndStuck()
	rollout("all nodes are at the target", func(s v1alpha1.NodeVersionStatus) bool {
		return s.Nodes.UpToDate == controlPlanes+workers && len(c.Machines.Instances()) == controlPlanes+workers && meta.IsStatusConditionTrue(s.Conditions, v1alpha1.ConditionReady)
	})

	// A new machine joins. A certificate of a machine that is gone does not let
	// another one join, although the cloud gives its name and ID again.
	// It does not boot. The join service refuses every request in the name of a Node.
	if err := c.Machines.SetFaults([]string{"never-boot=" + gone.Name}); err != nil {
		t.Fatal(err)
	}
	again, err := c.Machines.Create(ctx, sandboxapi.WorkerGroup, []string{"reuse"})
	if err != nil {
		t.Fatal(err)
	}
	if again[0].Name != gone.Name || again[0].ProviderID != gone.ProviderID {
		t.Fatalf("the new machine is %+v, want the name and ID of %+v", again[0], gone)
	}
	if err := l.join(addr, gone); status.Code(err) != codes.PermissionDenied {
		t.Errorf("the machine that had the name before: %v, want it refused", err)
	}
	if err := l.join(addr, l.identity(gone.Name)); err != nil {
		t.Errorf("the machine that has the name now: %v", err)
	}

	out, err := e.Check(ctx, check.Request{}, func(plan.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	l.unnamed("upgrade check", out)
	if out.Provider != oddcloud.Name || out.Current.Image != "" || out.Current.Release != lifeRelease || len(out.Path) == 0 || out.Path[0].To.Release == lifeRelease {
		t.Errorf("upgrade check: from %+v to %+v by %v, blocked %v", out.Current, out.Goal, out.Path, out.Blocked)
	}
	for _, hop := range out.Path {
		if hop.To.Image != "" {
			t.Errorf("upgrade check: hop %d selects the image %q", hop.Number, hop.To.Image)
		}
	}
	// The engine has rendered the charts of the hop with the values of this cloud.
	if out.Changes == nil || len(out.Changes.Charts) != 3 {
		t.Errorf("upgrade check: changes %+v", out.Changes)
	}
	for _, f := range out.Findings {
		if slices.Contains([]string{"cli-image", "image-services", "offered-image"}, f.ID) {
			t.Errorf("%s is about images, and the cloud has none: %+v", f.ID, f)
		}
	}
}
