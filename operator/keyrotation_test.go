//go:build linux

package operator

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/assets"
	"constellation/assets/render"
	"constellation/engine/attestation/keyprocess"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/attest/attesttest/lab"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/engine/cloud/providers"
	"constellation/engine/kms"
	"constellation/engine/kms/plugin"
	"constellation/engine/kubeadm"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/controlplane"
	"constellation/internal/syncbuffer"
	"constellation/internal/testneeds"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
	"constellation/operator/replica"
)

// keyStage is a cluster whose API server encrypts with a real key service. The test acts as the operator's other controllers and as the join
// service.
type keyStage struct {
	*cluster
	keys  kms.Client // the key service; no socket: the API server does not encrypt
	keyID string     // without its generation
	log   *syncbuffer.Buffer
	later atomic.Int64 // nanoseconds by which the clock of the rotation is ahead
}

const controlPlaneNode = "control-plane-0"

// newKeyStage starts a control plane with binaries of a directory; empty: of the default version.
func newKeyStage(t *testing.T, bin string, encrypts bool) *keyStage {
	t.Helper()
	s := &keyStage{log: &syncbuffer.Buffer{}}
	o := controlplane.Options{BinDir: bin, Controllers: true}
	if encrypts {
		o.APIServerArgs = []string{"--encryption-provider-config=" + s.serveKeys(t), "--encryption-provider-config-automatic-reload=true"}
	}
	s.cluster = &cluster{t: t, cp: controlplane.ForTest(t, o), denied: &denials{}}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.admin, err = client.New(s.cp.Config(), client.Options{Scheme: scheme}); err != nil {
		t.Fatal(err)
	}
	crds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	chart, err := render.Chart("constellation-operator", "v1.1.0", namespace, providers.LocalValues(), map[string]any{"release": "v1.1.0", "operator": map[string]any{"rotateKey": true}})
	if err != nil {
		t.Fatal(err)
	}
	manifests := [][]byte{[]byte("{apiVersion: v1, kind: Namespace, metadata: {name: " + namespace + "}}")}
	for _, f := range crds {
		manifests = append(manifests, f.Data)
	}
	for _, m := range append(manifests, chart) {
		if err := s.cp.Apply(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	s.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: controlPlaneNode, Labels: map[string]string{controlPlaneLabel: ""}}})
	s.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: joinConfig, Namespace: mirrorNamespace}, Data: map[string]string{"clusterID": "00"}})
	s.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: kms.UseConfigMap, Namespace: namespace}})
	s.create(&v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName}, Spec: v1alpha1.NodeVersionSpec{
		Image: "first", ImageVersion: "v1.0.0", KubernetesClusterVersion: build.NextVersion, KubernetesComponentsReference: "k8s-components-sha256-" + strings.Repeat("f", 64),
	}})
	return s
}

// serveKeys starts a key service, and returns the configuration of an API server that uses it.
func (s *keyStage) serveKeys(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kms") // a short path, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	clusterID := bytes.Repeat([]byte{7}, 32)
	k, err := kms.First(bytes.Repeat([]byte{0xc4}, kms.SecretSize), 1)
	if err != nil {
		t.Fatal(err)
	}
	s.keyID = k.Fingerprint()
	encoded, err := k.Encode()
	if err != nil {
		t.Fatal(err)
	}
	p := lab.NewProject(t)
	vm := p.Start(p.Group("control-planes", cloud.ControlPlane, gcptest.UID), nil)
	if err := plugin.Store(t.Context(), dir, vm.TPM, clusterID, encoded); err != nil {
		t.Fatal(err)
	}
	vm.Join(clusterID)
	service, err := plugin.Open(t.Context(), plugin.Config{Dir: dir, TPM: vm.TPM, ClusterID: clusterID})
	if err != nil {
		t.Fatal(err)
	}
	var l [2]net.Listener
	for n, name := range []string{"kms.sock", "keys.sock"} {
		if l[n], err = keyprocess.Listen(t.Context(), filepath.Join(dir, name), slog.New(slog.DiscardHandler)); err != nil {
			t.Fatal(err)
		}
	}
	s.keys.Socket = filepath.Join(dir, "keys.sock")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- service.Serve(ctx, l[0], l[1]) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the key service ended: %v", err)
		}
	})
	path := filepath.Join(dir, "encryption.yaml")
	for _, b := range kubeadm.EncryptionFiles(kubeadm.Encrypt) { // it is one
		b = bytes.Replace(b, []byte(kubeadm.KMSSocket), []byte(filepath.Join(dir, "kms.sock")), 1)
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return path
}

// rotates runs the controller with the rights of the operator's chart.
func (s *keyStage) rotates() (stop func()) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	log := slog.New(slog.NewTextHandler(s.log, nil))
	mgr, err := newManager(Config{Namespace: namespace, NoElection: true, Log: log}, replica.Access(s.access(), "constellation-operator"))
	if err != nil {
		s.t.Fatal(err)
	}
	r := &keyRotations{
		client: mgr.GetClient(), fresh: mgr.GetAPIReader(), events: mgr.GetEventRecorder("constellation-operator"), log: log, namespace: namespace,
		now: func() time.Time { return time.Now().Add(time.Duration(s.later.Load())) },
	}
	if err := r.setup(mgr); err != nil {
		s.t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			s.t.Errorf("the manager ended: %v", err)
		}
		s.denied.mu.Lock()
		defer s.denied.mu.Unlock()
		if len(s.denied.all) > 0 {
			s.t.Errorf("the chart's role lacks: %s", strings.Join(s.denied.all, ", "))
		}
	})
	s.t.Cleanup(stop)
	return stop
}

// reaches has all nodes run an image, or not yet.
func (s *keyStage) reaches(image string, all bool) {
	s.t.Helper()
	var nv v1alpha1.NodeVersion
	s.get(v1alpha1.NodeVersionName, &nv)
	if nv.Spec.Image != image {
		nv.Spec.Image = image
		if err := s.admin.Update(s.t.Context(), &nv); err != nil {
			s.t.Fatal(err)
		}
	}
	c := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: decision.ReasonRollout, ObservedGeneration: nv.Generation}
	if all {
		c.Status, c.Reason = metav1.ConditionTrue, decision.ReasonUpToDate
	}
	meta.SetStatusCondition(&nv.Status.Conditions, c)
	if err := s.admin.Status().Update(s.t.Context(), &nv); err != nil {
		s.t.Fatal(err)
	}
}

// reports has the join service report the generation of the API server.
func (s *keyStage) reports(generation uint32) {
	s.t.Helper()
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: kms.UseConfigMap, Namespace: namespace}}
	patch, err := json.Marshal(map[string]any{"data": map[string]string{controlPlaneNode: fmt.Sprint(generation)}})
	if err != nil {
		s.t.Fatal(err)
	}
	if err := s.admin.Patch(s.t.Context(), cm, client.RawPatch(types.MergePatchType, patch)); err != nil {
		s.t.Fatal(err)
	}
}

func (s *keyStage) rotation() kms.Rotation {
	s.t.Helper()
	cm := &corev1.ConfigMap{}
	if err := s.admin.Get(s.t.Context(), client.ObjectKey{Namespace: mirrorNamespace, Name: joinConfig}, cm); err != nil {
		s.t.Fatal(err)
	}
	if cm.Data["clusterID"] != "00" {
		s.t.Errorf("join-config lost its data: %v", cm.Data)
	}
	r, err := kms.RotationOf(cm.Data, cm.Annotations)
	if err != nil {
		s.t.Fatal(err)
	}
	return r
}

// noted waits until the target of all nodes is noted in join-config.
func (s *keyStage) noted() {
	s.t.Helper()
	var nv v1alpha1.NodeVersion
	s.get(v1alpha1.NodeVersionName, &nv)
	s.comes("target "+nv.Spec.Image+" is noted", func(r kms.Rotation) bool { return r.Target == targetOf(&nv) })
}

func (s *keyStage) comes(what string, is func(kms.Rotation) bool) {
	s.t.Helper()
	s.eventually(what, func() (string, bool) {
		r := s.rotation()
		return fmt.Sprintf("%+v\n%s", r, s.log), is(r)
	})
}

// TestKeyIsRotatedAfterUpgrades follows a rotation that no console attends, on a real API server with a key service and a controller manager.
func TestKeyIsRotatedAfterUpgrades(t *testing.T) {
	s := newKeyStage(t, testneeds.Kubernetes(t, build.NextVersion), true)
	for n := range 60 {
		s.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("s-%d", n), Namespace: "default"}, Data: map[string][]byte{"v": []byte("canary")}})
	}
	stop := s.rotates()
	s.reports(1)
	s.reaches("first", true)
	s.noted()
	first := s.rotation()
	if first.Generation != 0 || first.Operator != 0 {
		t.Errorf("the key of a new cluster is rotated: %+v", first)
	}

	s.reaches("second", false)
	s.reaches("second", true)
	s.comes("the next generation is published", func(r kms.Rotation) bool { return r.Generation == 2 })
	if r := s.rotation(); r.Operator != 2 || r.Rewritten != 0 || r.Target == first.Target || !strings.Contains(r.Record, "generation 2 by constellation-operator at ") {
		t.Errorf("published %+v", r)
	}
	s.reaches("another", true) // an upgrade that comes meanwhile
	s.noted()
	if r := s.rotation(); r.Generation != 2 || r.Operator != 2 {
		t.Errorf("after another upgrade: %+v", r)
	}
	s.eventually("it waits for the API server", func() (string, bool) {
		return s.log.String(), strings.Contains(s.log.String(), "to encrypt with generation 2")
	})
	stop()
	if _, err := s.keys.Raise(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	// The API server asks for the key once a minute.
	for end := time.Now().Add(3 * time.Minute); ; time.Sleep(time.Second) {
		if used, err := s.keys.Used(t.Context()); err == nil && used == 2 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the API server does not use generation 2")
		}
	}
	s.reports(2)
	if r := s.rotation(); r.Rewritten != 0 {
		t.Errorf("without an operator: %+v", r)
	}
	s.rotates() // another one continues
	s.migrated("all Secrets are written", func() bool { return s.rotation().Rewritten == 2 })
	if former := s.withKey(1); len(former) > 0 {
		t.Errorf("%d Secrets are encrypted with the former key, for instance %s", len(former), former[0])
	}
	if n := len(s.withKey(2)); n < 60 {
		t.Errorf("%d Secrets are encrypted with the new key", n)
	}
	s.eventually("the migration is removed", func() (string, bool) {
		err := s.admin.Get(t.Context(), client.ObjectKey{Name: migrationName + "2"}, &storagemigrationv1.StorageVersionMigration{})
		return fmt.Sprint(err), apierrors.IsNotFound(err)
	})

	// A policy refuses to have a Secret written.
	s.create(&admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: "frozen"}, Spec: admissionv1.ValidatingAdmissionPolicySpec{
		MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
			Operations: []admissionv1.OperationType{admissionv1.Update}, Rule: admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"secrets"}},
		}}}},
		Validations: []admissionv1.Validation{{Expression: "request.name != 's-7'"}},
	}})
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: "frozen"}, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
		PolicyName: "frozen", ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
	}}
	s.create(binding)
	refused := func() bool {
		b := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s-7", Namespace: "default"}}
		return s.admin.Patch(t.Context(), b, client.RawPatch(types.MergePatchType, []byte("{}"))) != nil
	}
	s.eventually("the policy holds", func() (string, bool) { return "", refused() })
	s.reaches("third", true)
	s.comes("the third generation is published", func(r kms.Rotation) bool { return r.Generation == 3 })
	s.reports(3)
	s.migrated("the refusal of a Secret is logged", func() bool { return strings.Contains(s.log.String(), "Secrets not written again") })
	if r := s.rotation(); r.Generation != 3 || r.Rewritten != 2 {
		t.Errorf("after a refusal: %+v", r)
	}
	if err := s.admin.Delete(t.Context(), binding); err != nil {
		t.Fatal(err)
	}
	s.eventually("the policy is gone", func() (string, bool) { return "", !refused() })
	s.later.Store(int64(2 * rotationAgain))
	s.reaches("third", false) // anything that changes the NodeVersion
	s.reaches("third", true)
	s.migrated("it is tried again", func() bool { return s.rotation().Rewritten == 3 })
}

// migrated waits for the controller manager. It begins when its cache has all Secrets of the time of the request, which can take more than a
// minute while nothing changes.
func (s *keyStage) migrated(what string, is func() bool) {
	s.t.Helper()
	for end := time.Now().Add(4 * time.Minute); !is(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			s.t.Fatalf("%s: not so: %+v\n%s", what, s.rotation(), s.log)
		}
	}
}

// withKey returns the keys in etcd of Secrets that a generation encrypted.
func (s *keyStage) withKey(generation uint32) (out []string) {
	s.t.Helper()
	pki := s.cp.PKI()
	tls, err := transport.TLSInfo{CertFile: pki + "/apiserver-etcd-client.crt", KeyFile: pki + "/apiserver-etcd-client.key", TrustedCAFile: pki + "/etcd/ca.crt"}.ClientConfig()
	if err != nil {
		s.t.Fatal(err)
	}
	e, err := clientv3.New(clientv3.Config{Endpoints: []string{s.cp.EtcdEndpoint()}, TLS: tls, DialTimeout: 5 * time.Second})
	if err != nil {
		s.t.Fatal(err)
	}
	defer e.Close()
	all, err := e.Get(s.t.Context(), "/registry/secrets/", clientv3.WithPrefix())
	if err != nil {
		s.t.Fatal(err)
	}
	for _, kv := range all.Kvs {
		if bytes.Contains(kv.Value, fmt.Appendf(nil, "%s-%d", s.keyID, generation)) {
			out = append(out, string(kv.Key))
		}
	}
	return out
}

// TestKeyIsNotRotated has upgrades after which the key stays.
func TestKeyIsNotRotated(t *testing.T) {
	s := newKeyStage(t, "", false) // its Kubernetes has no StorageVersionMigration
	s.rotates()
	s.reaches("first", true)
	ctx := t.Context()
	for _, tt := range []struct {
		name, why string
		data      string // of join-config
	}{
		{name: "of an API server that cannot write Secrets again", why: "storagemigration.k8s.io/v1"},
		{name: "of a cluster that begins to encrypt", why: "an upgrade has not encrypted all Secrets yet", data: `{"kmsFingerprint":"5f0c3a9be1d27a46","kmsMode":"read"}`},
		{name: "while a console rotates it", why: "the rotation to generation 5 is under way", data: `{"kmsFingerprint":null,"kmsMode":null,"kmsGeneration":"5"}`},
	} {
		s.reports(1)
		s.reaches(tt.name+" before", true)
		s.noted()
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: joinConfig, Namespace: mirrorNamespace}}
		if err := s.admin.Patch(ctx, cm, client.RawPatch(types.MergePatchType, []byte(`{"data":`+cmp.Or(tt.data, "{}")+`}`))); err != nil {
			t.Fatal(err)
		}
		before := s.rotation()
		s.reaches(tt.name, true)
		s.noted()
		if after := s.rotation(); after.Generation != before.Generation || after.Operator != 0 || !strings.Contains(s.log.String(), tt.why) {
			t.Errorf("%s: %+v, %+v\n%s", tt.name, before, after, s.log)
		}
	}
	var nv v1alpha1.NodeVersion
	s.get(v1alpha1.NodeVersionName, &nv)
	r := &keyRotations{client: s.admin, fresh: s.admin, log: slog.New(slog.DiscardHandler), now: time.Now, namespace: "other"}
	if again, err := r.Reconcile(ctx, ctrl.Request{NamespacedName: client.ObjectKeyFromObject(&nv)}); err != nil || again.RequeueAfter != 0 {
		t.Errorf("another round: %v, %v", again, err)
	}
	s.reaches("last", true)
	if again, err := r.begin(ctx, &nv, &corev1.ConfigMap{}, kms.Rotation{}); err != nil || again.RequeueAfter != reportsPoll {
		t.Errorf("without reports: %v, %v", again, err)
	}
}
