package offline

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1beta1 "k8s.io/api/storage/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/scheme"

	"constellation/engine/backup"
	"constellation/engine/findings"
	"constellation/engine/kube/preflight"
	"constellation/engine/manifests"
	"constellation/engine/plan"
	"constellation/engine/version"
)

// entry is one revision of a key; a nil value deletes it.
type entry struct {
	key   string
	value []byte
}

// database is a database of etcd: two metas, a root, and one leaf for each bucket.
func database(entries []entry) []byte {
	const size = 4096
	var pages [][]byte
	add := func(flags uint16, leafFlags uint32, elements [][2][]byte) uint64 {
		id := uint64(len(pages))
		b := make([]byte, 16+len(elements)*16)
		binary.LittleEndian.PutUint64(b, id)
		binary.LittleEndian.PutUint16(b[8:], flags)
		binary.LittleEndian.PutUint16(b[10:], uint16(len(elements)))
		for i, e := range elements {
			at := b[16+i*16:]
			binary.LittleEndian.PutUint32(at, leafFlags)
			binary.LittleEndian.PutUint32(at[4:], uint32(len(b)-16-i*16))
			binary.LittleEndian.PutUint32(at[8:], uint32(len(e[0])))
			binary.LittleEndian.PutUint32(at[12:], uint32(len(e[1])))
			b = append(append(b, e[0]...), e[1]...)
		}
		n := (len(b) + size - 1) / size
		binary.LittleEndian.PutUint32(b[12:], uint32(n-1))
		for b = append(b, make([]byte, n*size-len(b))...); len(b) > 0; b = b[size:] {
			pages = append(pages, b[:size])
		}
		return id
	}
	add(4, 0, nil)
	add(4, 0, nil)
	var all [][2][]byte
	for i, e := range entries {
		revision := uint64(i + 1)
		k := binary.BigEndian.AppendUint64(append(binary.BigEndian.AppendUint64(nil, revision), '_'), 0)
		v := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), []byte(e.key))
		if e.value == nil {
			k = append(k, 't')
		} else {
			v = protowire.AppendVarint(protowire.AppendTag(v, 3, protowire.VarintType), revision)
			v = protowire.AppendBytes(protowire.AppendTag(v, 5, protowire.BytesType), e.value)
		}
		all = append(all, [2][]byte{k, v})
	}
	bucket := func(root uint64) []byte {
		return append(binary.LittleEndian.AppendUint64(nil, root), make([]byte, 8)...)
	}
	keys, members, meta := add(2, 0, all), add(2, 0, nil), add(2, 0, nil)
	root := add(2, 1, [][2][]byte{{[]byte("key"), bucket(keys)}, {[]byte("members"), bucket(members)}, {[]byte("meta"), bucket(meta)}})
	for i := range 2 {
		m := pages[i][16:]
		binary.LittleEndian.PutUint32(m, 0xED0CDAED)
		binary.LittleEndian.PutUint32(m[4:], 2)
		binary.LittleEndian.PutUint32(m[8:], size)
		binary.LittleEndian.PutUint64(m[16:], root)
		binary.LittleEndian.PutUint64(m[40:], uint64(len(pages)))
		binary.LittleEndian.PutUint64(m[48:], uint64(i+7))
		h := fnv.New64a()
		h.Write(m[:56])
		binary.LittleEndian.PutUint64(m[56:], h.Sum64())
	}
	return bytes.Join(pages, nil)
}

// stored is an object as an API server stores it.
func stored(t *testing.T, obj runtime.Object) []byte {
	t.Helper()
	gvks, _, err := scheme.Scheme.ObjectKinds(obj)
	if err != nil {
		t.Fatal(err)
	}
	b, err := runtime.Encode(scheme.Codecs.EncoderForVersion(protobuf.NewSerializer(scheme.Scheme, scheme.Scheme), gvks[0].GroupVersion()), obj)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

const crd = `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"widgets.example.com"},` +
	`"spec":{"group":"example.com","names":{"kind":"Widget","plural":"widgets"},"versions":[{"name":"v1","served":true,"storage":true}]},"status":{"storedVersions":["v1alpha1","v1"]}}`

// troubled is a cluster with one of each trouble that the test expects.
func troubled(t *testing.T) []entry {
	yes, fail := true, admissionv1.Fail
	labels := map[string]string{"app": "web"}
	web := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "shop", UID: "d"}, Spec: appsv1.DeploymentSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{
		Containers: []corev1.Container{{Name: "web", Image: "quay.io/jetstack/cert-manager-controller:v1.19.0"}},
	}}}}
	web.Status = appsv1.DeploymentStatus{Replicas: 1, UpdatedReplicas: 1, AvailableReplicas: 1, ReadyReplicas: 1}
	rs := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Name: "web-1", Namespace: "shop", UID: "r", OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "Deployment", Name: "web", UID: "d", Controller: &yes}}}}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "web-1-a", Namespace: "shop", UID: "p", Labels: labels, OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web-1", UID: "r", Controller: &yes}}},
		Spec:       corev1.PodSpec{NodeName: "worker-0", Volumes: []corev1.Volume{{Name: "src", VolumeSource: corev1.VolumeSource{GitRepo: &corev1.GitRepoVolumeSource{Repository: "https://example.com"}}}}},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
	budget := func(least int) *policyv1.PodDisruptionBudget {
		n := intstr.FromInt(least)
		return &policyv1.PodDisruptionBudget{
			ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "shop"}, Spec: policyv1.PodDisruptionBudgetSpec{MinAvailable: &n, Selector: &metav1.LabelSelector{MatchLabels: labels}},
			Status: policyv1.PodDisruptionBudgetStatus{ExpectedPods: 1, CurrentHealthy: 1, DesiredHealthy: int32(least)},
		}
	}
	hook := &admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "policy"}, Webhooks: []admissionv1.ValidatingWebhook{{
		Name: "policy.example.com", FailurePolicy: &fail, ClientConfig: admissionv1.WebhookClientConfig{Service: &admissionv1.ServiceReference{Namespace: "policy", Name: "gone"}},
		Rules: []admissionv1.RuleWithOperations{{Operations: []admissionv1.OperationType{"*"}, Rule: admissionv1.Rule{APIGroups: []string{"*"}, APIVersions: []string{"*"}, Resources: []string{"*"}}}},
	}}}
	class := &storagev1beta1.VolumeAttributesClass{ObjectMeta: metav1.ObjectMeta{Name: "gold"}, DriverName: "d"}
	return []entry{
		{"/registry/poddisruptionbudgets/shop/web", stored(t, budget(0))}, // an older revision
		{"/registry/minions/worker-0", stored(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-0"}, Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{KubeletVersion: "v1.36.4"}}})},
		{"/registry/deployments/shop/web", stored(t, web)},
		{"/registry/replicasets/shop/web-1", stored(t, rs)},
		{"/registry/pods/shop/web-1-a", stored(t, pod)},
		{"/registry/poddisruptionbudgets/shop/web", stored(t, budget(1))},
		{"/registry/validatingwebhookconfigurations/policy", stored(t, hook)},
		{"/registry/volumeattributesclasses/gold", stored(t, class)},
		{"/registry/services/specs/shop/gone", stored(t, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "gone", Namespace: "policy"}})},
		{"/registry/services/specs/shop/gone", nil},
		{"/registry/apiextensions.k8s.io/customresourcedefinitions/widgets.example.com", []byte(crd)},
		{"/registry/secrets/shop/a", []byte("k8s:enc:aescbc:v1:key:xxxx")},
		{"/registry/pods/shop/broken", []byte("k8s\x00\x0a\xff\xff")},
		{"/registry/ranges/serviceips", []byte("\x00")},
	}
}

const id = "backup-20261121070501-1a2b3c4d"

// made is a backup with the database in it; nil for none.
func made(t *testing.T, db []byte, releases ...string) (dir string) {
	t.Helper()
	parent := filepath.Join(t.TempDir(), "runs")
	w, err := backup.Create(parent, id)
	if err != nil {
		t.Fatal(err)
	}
	list := func(typ backup.Type, file, items string) {
		t.Helper()
		tw, err := w.Type(typ, file)
		if err != nil {
			t.Fatal(err)
		}
		s := backup.NewScanner(strings.NewReader(`{"metadata":{"resourceVersion":"7"},"items":[` + items + `]}`))
		for s.Next() {
			if err := tw.Add(s.Item()); err != nil {
				t.Fatal(err)
			}
		}
		if err := cmpErr(s.Err(), tw.Close("7")); err != nil {
			t.Fatal(err)
		}
	}
	list(backup.Type{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions", Kind: "CustomResourceDefinition", Status: true}, backup.CRDs, crd)
	if len(releases) > 0 {
		list(backup.Type{Version: "v1", Resource: "secrets", Kind: "Secret", Namespaced: true}, backup.Releases, strings.Join(releases, ","))
	}
	if db != nil {
		if err := w.Snapshot(func(to backup.Sink) (backup.Snapshot, error) {
			sum := sha256.Sum256(db)
			_, err := to.Write(append(slices.Clone(db), sum[:]...))
			return backup.Snapshot{Revision: 14, Version: "3.6.8"}, err
		}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Commit(backup.Manifest{Cluster: backup.Cluster{UID: "u", Server: "v1.36.4"}}); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(parent, id)
}

func cmpErr(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func ids(list []plan.Finding, s plan.Severity) (out []string) {
	for _, f := range list {
		if f.Severity == s {
			out = append(out, f.ID)
		}
	}
	return slices.Compact(slices.Sorted(slices.Values(out)))
}

func TestBackupWithSnapshot(t *testing.T) {
	dir := made(t, database(troubled(t)))
	for _, d := range []string{dir, filepath.Join(dir, backup.Dir), dir + "/"} {
		r, err := Check(t.Context(), findings.OfflineRequest{Backup: d, To: version.MustParse("v1.37.0")})
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"pdb-room", "webhook-endpoints", "kinds"} {
			if got := ids(r.Findings, plan.Block); !slices.Contains(got, want) {
				t.Errorf("blocking findings %v lack %s", got, want)
			}
		}
		if got := ids(r.Findings, plan.Warn); !slices.Contains(got, "stored-versions") || !slices.Contains(got, "etcd-snapshot") {
			t.Errorf("warnings %v lack stored-versions or etcd-snapshot", got)
		}
		if got := ids(r.Findings, plan.NotChecked); !slices.Contains(got, "etcd-snapshot") || !slices.Contains(got, "api-health") || slices.Contains(got, "pdb-overlap") {
			t.Errorf("not checked are %v", got)
		}
		if r.From.String() != "v1.36.4" || r.Kubernetes.String() != "v1.37.0" || r.Objects != 8 {
			t.Errorf("from %s to %s, %d objects", r.From, r.Kubernetes, r.Objects)
		}
	}
}

func TestBackupWithoutSnapshot(t *testing.T) {
	r, err := Check(t.Context(), findings.OfflineRequest{Backup: made(t, nil)})
	if err != nil {
		t.Fatal(err)
	}
	if got := ids(r.Findings, plan.NotChecked); !slices.Contains(got, "etcd-snapshot") || !slices.Contains(got, "pdb-room") {
		t.Errorf("not checked are %v", got)
	}
	if got, want := ids(r.Findings, plan.Block), []string{"kinds"}; !slices.Equal(got, want) {
		t.Errorf("blocking findings %v, want %v", got, want)
	}
	if r.Kubernetes.MinorString() != "v1.37" {
		t.Errorf("the target is %s", r.Kubernetes)
	}
}

// A damaged backup ends in an error: missing objects would give no finding.
func TestDamagedBackups(t *testing.T) {
	snapshot := func(dir string) string { return filepath.Join(dir, backup.Dir, backup.SnapshotFile) }
	for name, tt := range map[string]struct {
		damage func(t *testing.T, dir string) string
		want   string
	}{
		"truncated snapshot": {func(t *testing.T, dir string) string {
			if err := os.Truncate(snapshot(dir), 5000); err != nil {
				t.Fatal(err)
			}
			return dir
		}, "etcd.snapshot has 5000 bytes, want"},
		"changed snapshot": {func(t *testing.T, dir string) string {
			b, err := os.ReadFile(snapshot(dir))
			if err != nil {
				t.Fatal(err)
			}
			b[len(b)/2] ^= 1
			if err := os.WriteFile(snapshot(dir), b, 0o600); err != nil {
				t.Fatal(err)
			}
			return dir
		}, "etcd.snapshot was modified"},
		"no manifest": {func(t *testing.T, dir string) string {
			if err := os.Remove(filepath.Join(dir, backup.Dir, backup.ManifestFile)); err != nil {
				t.Fatal(err)
			}
			return dir
		}, "manifest.json is missing: the backup was not completed"},
		"another folder": {func(_ *testing.T, dir string) string { return filepath.Dir(dir) }, "is not the folder of a backup"},
		"no folder": {func(_ *testing.T, dir string) string {
			return filepath.Join(filepath.Dir(dir), "backup-20261121070501-00000000")
		}, "no such file"},
		"hostile database": {func(t *testing.T, _ string) string {
			return made(t, bytes.Repeat([]byte{0xff}, 8192))
		}, "not a database of etcd"},
		"hostile pages": {func(t *testing.T, _ string) string {
			db := database(troubled(t))
			for i := 2 * 4096; i < len(db); i += 7 {
				db[i] = 0xff
			}
			return made(t, db)
		}, "not a database of etcd"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := tt.damage(t, made(t, database(troubled(t))))
			if _, err := Check(t.Context(), findings.OfflineRequest{Backup: dir}); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("the error is %v, want %q", err, tt.want)
			}
		})
	}
	if _, err := Check(t.Context(), findings.OfflineRequest{Backup: made(t, nil), To: version.MustParse("v1.35.0")}); err == nil || !strings.Contains(err.Error(), "newer than v1.35.0") {
		t.Errorf("an older target: the error is %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Check(ctx, findings.OfflineRequest{Backup: made(t, nil)}); err == nil {
		t.Error("a cancelled check succeeds")
	}
}

// A database of a hostile machine never makes the program panic.
func TestMutatedDatabases(t *testing.T) {
	db := database(troubled(t))
	random := rand.New(rand.NewPCG(1, 2))
	read := 0
	for range 3000 {
		b := slices.Clone(db)
		for range 1 + random.IntN(4) {
			b[2*4096+random.IntN(len(b)-2*4096)] = byte(random.Uint32())
		}
		o := preflight.NewObjects(time.Unix(0, 0))
		if c, err := readSnapshot(t.Context(), bytes.NewReader(b), int64(len(b)), manifests.Request{}, o); err == nil && c.objects > 0 {
			read++
		}
	}
	if read == 0 || read == 3000 {
		t.Errorf("%d of 3000 databases were read", read)
	}
}

// The record of a Helm release has manifests in a removed version.
func TestHelmReleases(t *testing.T) {
	release, err := json.Marshal(map[string]any{
		"chart": map[string]any{"metadata": map[string]string{"name": "web", "version": "1.0.0"}}, "manifest": "---\n# Source: web/ingress.yaml\napiVersion: networking.k8s.io/v1beta1\nkind: IPAddress\nmetadata: {name: web}\n",
	})
	if err != nil {
		t.Fatal(err)
	}
	record := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "sh.helm.release.v1.web.v1", Namespace: "shop", Labels: map[string]string{"owner": "helm", "name": "web", "status": "deployed"}}, Type: "helm.sh/release.v1",
		Data: map[string][]byte{"release": []byte(base64.StdEncoding.EncodeToString(release))},
	}
	r, err := Check(t.Context(), findings.OfflineRequest{Backup: made(t, database([]entry{{"/registry/secrets/shop/r", stored(t, record)}})), To: version.MustParse("v1.37.0")})
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(r.Findings, func(f plan.Finding) bool { return f.ID == "removed-apis-written" && f.Severity == plan.Warn })
	if i < 0 || r.Findings[i].Title != "Helm release shop/web: IPAddress web uses networking.k8s.io/v1beta1, which v1.37 no longer serves" || !slices.Contains(r.Findings[i].Objects, "helmrelease/shop/web") {
		t.Errorf("findings %+v", r.Findings)
	}
}

// TestAddOnsOfHelmReleases recognises an add-on by its release in a backup without workloads.
func TestAddOnsOfHelmReleases(t *testing.T) {
	release := base64.StdEncoding.EncodeToString([]byte(`{"chart":{"metadata":{"name":"cert-manager","version":"v1.18.2","appVersion":"v1.18.2"}},"config":{"password":"hunter2"}}`))
	secret, err := json.Marshal(&corev1.Secret{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: metav1.ObjectMeta{Name: "sh.helm.release.v1.certs.v1", Namespace: "shop", UID: "s", Labels: map[string]string{"owner": "helm", "name": "certs", "status": "deployed"}},
		Type:       "helm.sh/release.v1", Data: map[string][]byte{"release": []byte(release)},
	})
	if err != nil {
		t.Fatal(err)
	}
	r, err := Check(t.Context(), findings.OfflineRequest{Backup: made(t, nil, string(secret)), To: version.MustParse("v1.37.0")})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(r.Findings, func(f plan.Finding) bool {
		return f.ID == "add-on-versions" && f.Severity == plan.Warn && f.Title == "cert-manager v1.18.2 does not list Kubernetes v1.37" && slices.Equal(f.Objects, []string{"helmrelease/shop/certs"})
	}) {
		t.Errorf("findings %+v", r.Findings)
	}
	if b, err := json.Marshal(r); err != nil || bytes.Contains(b, []byte("hunter2")) {
		t.Errorf("%v: the result has a value of the release: %s", err, b)
	}
}

// Secrets of a backup never get into a result.
func TestSecretsStayInBackups(t *testing.T) {
	entries := append(troubled(t), entry{"/registry/secrets/shop/b", stored(t, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "b", Namespace: "shop"}, StringData: nil, Data: map[string][]byte{"password": []byte("hunter2")}})})
	r, err := Check(t.Context(), findings.OfflineRequest{Backup: made(t, database(entries))})
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"hunter2", "aHVudGVy", "password"} {
		if bytes.Contains(b, []byte(secret)) {
			t.Errorf("the result has %q", secret)
		}
	}
	if s, err := secretOf([]byte(`{"data":{"a":"!hunter2"}}`)); err == nil || strings.Contains(fmt.Sprint(err), "hunter") {
		t.Errorf("the error is %v of %v", err, s)
	}
}
