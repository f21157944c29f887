package kube

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	appsv1 "k8s.io/api/apps/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"constellation/engine"
)

// takenRig serves snapshots of an API server whose operator is there.
func takenRig(t *testing.T, args ...string) (*snapshotRig, *Client) {
	t.Helper()
	r := newSnapshotRig(t, args...)
	r.account()
	r.deploy()
	r.pod(r.port, corev1.ConditionTrue)
	r.serve(r.live)
	return r, r.client("admin", "system:masters")
}

// around calls f before and after each snapshot of etcd that is served.
func (r *snapshotRig) around(f func()) {
	r.serve(func(w http.ResponseWriter, req *http.Request) {
		f()
		b, rev := r.etcd()
		f()
		snapshotOf(b, func(h http.Header) { h.Set("Snapshot-Revision", strconv.FormatInt(rev, 10)) })(w, req)
	})
}

// richPod uses the fields that are compared of pods, and many that get defaults.
const richPod = `
serviceAccountName: default
hostNetwork: true
hostPID: true
runtimeClassName: special
securityContext: {runAsUser: 7}
volumes:
- {name: a, hostPath: {path: /x}}
- {name: b, secret: {secretName: s}}
- {name: c, configMap: {name: m}}
- {name: d, emptyDir: {}}
- {name: e, projected: {sources: [{serviceAccountToken: {path: t}}]}}
- {name: f, persistentVolumeClaim: {claimName: p}}
- {name: g, downwardAPI: {items: [{path: l, fieldRef: {fieldPath: metadata.labels}}]}}
initContainers:
- {name: i, image: "i:latest", restartPolicy: Always, args: []}
containers:
- name: c
  image: registry.example.com/honest
  command: [a, ""]
  args: ["b", "$(E)"]
  env: [{name: E, value: ""}, {name: F, value: x}, {name: G, valueFrom: {fieldRef: {fieldPath: status.podIP}}}, {name: H, valueFrom: {secretKeyRef: {name: s, key: k}}}]
  ports: [{containerPort: 80}]
  resources: {requests: {cpu: "0.5", memory: 1000Mi}, limits: {cpu: 1000m}}
  livenessProbe: {httpGet: {port: 80}}
  volumeMounts: [{name: a, mountPath: /x}, {name: b, mountPath: /y, subPath: z, readOnly: true}]
  securityContext: {privileged: true, runAsUser: 0, capabilities: {add: [NET_ADMIN], drop: [ALL]}}
- {name: d, image: "i@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", securityContext: {allowPrivilegeEscalation: false, privileged: false}}
`

// richWorkloads are a pod and a workload of each kind with the spec of richPod.
func richWorkloads() []byte {
	indent := func(by int) string { return strings.ReplaceAll(richPod, "\n", "\n"+strings.Repeat(" ", by)) }
	metadata := "metadata: {name: rich, namespace: default}\n"
	template := "  template:\n    metadata: {labels: {a: b}}\n    spec:" + indent(6) + "\n"
	selector := "  selector: {matchLabels: {a: b}}\n"
	job := strings.Replace(template, "serviceAccountName:", "restartPolicy: Never\n      serviceAccountName:", 1)
	out := "apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: special}\nhandler: x\n---\n" +
		"apiVersion: v1\nkind: Pod\n" + metadata + "spec:" + indent(2) + "\n---\n" +
		"apiVersion: v1\nkind: ReplicationController\n" + metadata + "spec:\n  selector: {a: b}\n" + template + "---\n" +
		"apiVersion: batch/v1\nkind: Job\n" + metadata + "spec:\n" + job + "---\n" +
		"apiVersion: batch/v1\nkind: CronJob\n" + metadata + "spec:\n  schedule: \"0 0 * * *\"\n  jobTemplate:\n    spec:\n    " + strings.ReplaceAll(job, "\n", "\n    ") + "\n"
	for _, kind := range []string{"Deployment", "DaemonSet", "StatefulSet", "ReplicaSet"} {
		out += "---\napiVersion: apps/v1\nkind: " + kind + "\n" + metadata + "spec:\n" + selector + template
	}
	return []byte(out)
}

func deploymentOf(name string) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: appsv1.DeploymentSpec{
		Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}},
	}}
}

// TestDaemonSetThatChangesMeanwhile takes a snapshot right after a chart was installed:
// between the first list and the snapshot, and between the snapshot and the second list, the
// status, the template and the labels of its DaemonSet change. API servers store an
// annotation of DaemonSets that their lists of metadata do not show.
func TestDaemonSetThatChangesMeanwhile(t *testing.T) {
	r, admin := takenRig(t)
	sets, labels := r.core.AppsV1().DaemonSets(Namespace), map[string]string{"app": "constellation-relay"}
	_, err := sets.Create(t.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "constellation-relay", Labels: labels},
		Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "relay", Image: "relay:0"}}},
		}},
	}, metav1.CreateOptions{})
	r.must(err)
	n := 0
	change := func() {
		n++
		for _, p := range []struct{ patch, subresource string }{
			{fmt.Sprintf(`{"status":{"currentNumberScheduled":%d,"numberMisscheduled":0,"desiredNumberScheduled":%d,"numberReady":0,"observedGeneration":%d}}`, n, n, n), "status"},
			{fmt.Sprintf(`{"metadata":{"labels":{"n":"%d"},"annotations":{"n":"%d"}},"spec":{"template":{"metadata":{"annotations":{"n":"%d"}}}}}`, n, n, n), ""},
		} {
			var sub []string
			if p.subresource != "" {
				sub = []string{p.subresource}
			}
			_, err := sets.Patch(t.Context(), "constellation-relay", types.MergePatchType, []byte(p.patch), metav1.PatchOptions{}, sub...)
			if err != nil {
				t.Error(err)
			}
		}
	}
	r.around(change)
	for range 3 {
		if s, err := admin.EtcdSnapshot(t.Context(), &sinkBuffer{}, confirm); err != nil || len(s.Unchecked) > 0 {
			t.Fatalf("got %+v, %v", s, err)
		}
	}
	if n != 6 {
		t.Errorf("it changed %d times", n)
	}
}

// oneOfEach are objects of the kinds that no API server has by itself.
const oneOfEach = `
{apiVersion: v1, kind: Pod, metadata: {name: one, namespace: default, annotations: {a: b}}, spec: {containers: [{name: c, image: i}]}}
---
{apiVersion: v1, kind: ReplicationController, metadata: {name: one, namespace: default}, spec: {replicas: 1, selector: {a: b}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}
---
{apiVersion: apps/v1, kind: Deployment, metadata: {name: one, namespace: default, annotations: {a: b}}, spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}
---
{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: one, namespace: default}, spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}
---
{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: two, namespace: default, annotations: {a: b}}, spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}
---
{apiVersion: apps/v1, kind: StatefulSet, metadata: {name: one, namespace: default}, spec: {serviceName: s, selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}
---
{apiVersion: apps/v1, kind: ReplicaSet, metadata: {name: one, namespace: default}, spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}
---
{apiVersion: batch/v1, kind: Job, metadata: {name: one, namespace: default}, spec: {template: {spec: {restartPolicy: Never, containers: [{name: c, image: i}]}}}}
---
{apiVersion: batch/v1, kind: CronJob, metadata: {name: one, namespace: default}, spec: {schedule: "0 0 * * *", jobTemplate: {spec: {template: {spec: {restartPolicy: Never, containers: [{name: c, image: i}]}}}}}}
---
{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingWebhookConfiguration, metadata: {name: one}, webhooks: [{name: a.example.com, sideEffects: None, admissionReviewVersions: [v1], clientConfig: {url: "https://a.example.com"}, rules: [{apiGroups: [example.com], apiVersions: [v1], operations: [CREATE], resources: [x]}]}]}
---
{apiVersion: admissionregistration.k8s.io/v1, kind: MutatingWebhookConfiguration, metadata: {name: one}, webhooks: [{name: a.example.com, sideEffects: None, admissionReviewVersions: [v1], clientConfig: {url: "https://a.example.com"}, rules: [{apiGroups: [example.com], apiVersions: [v1], operations: [CREATE], resources: [x]}]}]}
---
{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicy, metadata: {name: one}, spec: {matchConstraints: {resourceRules: [{apiGroups: [example.com], apiVersions: [v1], operations: [CREATE], resources: [x]}]}, validations: [{expression: "true"}]}}
---
{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicyBinding, metadata: {name: one}, spec: {policyName: one, validationActions: [Deny]}}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: RoleBinding, metadata: {name: one, namespace: default}, roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: view}, subjects: [{kind: ServiceAccount, name: default, namespace: default}, {kind: User, name: somebody}]}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: one}, aggregationRule: {clusterRoleSelectors: [{matchLabels: {a: b}}]}, rules: []}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: one, namespace: default}, automountServiceAccountToken: false}
---
{apiVersion: v1, kind: Secret, metadata: {name: one, namespace: default}, stringData: {a: b}}
---
{apiVersion: v1, kind: ConfigMap, metadata: {name: one, namespace: default, finalizers: [example.com/f]}, binaryData: {a: "/w=="}, immutable: true}
---
{apiVersion: apiregistration.k8s.io/v1, kind: APIService, metadata: {name: v1.one.example.com}, spec: {group: one.example.com, version: v1, groupPriorityMinimum: 10, versionPriority: 10, service: {name: s, namespace: default}}}
---
{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: xs.example.com, annotations: {a: b}}, spec: {group: example.com, scope: Cluster, names: {plural: xs, singular: x, kind: X, listKind: XList}, versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: one, namespace: default}, spec: {ports: [{port: 80}], selector: {a: b}}}
---
{apiVersion: v1, kind: PersistentVolume, metadata: {name: one}, spec: {capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce], hostPath: {path: /x}}}
---
{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: one, namespace: default}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}
---
{apiVersion: apps/v1, kind: ControllerRevision, metadata: {name: one, namespace: default}, revision: 1, data: {a: b}}
---
{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: one, namespace: default}, spec: {podSelector: {}, ingress: [{ports: [{port: 80}]}]}}
---
{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: one}, provisioner: example.com/p}
---
{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: one}, value: 1}
`

// onePlan needs its definition first.
const onePlan = `{apiVersion: upgrade.cattle.io/v1, kind: Plan, metadata: {name: one, namespace: default}, spec: {upgrade: {image: i}}}`

// TestEveryComparedKindIsInTheSnapshot takes a snapshot with an object of each kind, and
// finds each kind in its directory.
func TestEveryComparedKindIsInTheSnapshot(t *testing.T) {
	r, admin := takenRig(t)
	r.must(r.cp.Apply(t.Context(), []byte(oneOfEach)))
	r.must(r.cp.Apply(t.Context(), richWorkloads()))
	for _, pattern := range []string{"../../assets/crds/*.yaml", "../../assets/samples/*.yaml"} {
		files, err := filepath.Glob(pattern)
		r.must(err)
		for _, f := range files {
			b, err := os.ReadFile(f)
			r.must(err)
			r.must(r.cp.Apply(t.Context(), b))
		}
	}
	r.must(r.cp.Apply(t.Context(), []byte(onePlan)))
	_, key, err := ed25519.GenerateKey(rand.Reader)
	r.must(err)
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "somebody"}}, key)
	r.must(err)
	_, err = r.core.CertificatesV1().CertificateSigningRequests().Create(t.Context(), &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: "one"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), SignerName: certificatesv1.KubeAPIServerClientSignerName, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
		},
	}, metav1.CreateOptions{})
	r.must(err)
	var file sinkBuffer
	s, err := admin.EtcdSnapshot(t.Context(), &file, confirm)
	if err != nil || len(s.Unchecked) > 0 {
		t.Fatalf("got %+v, %v", s, err)
	}
	w, err := admin.witness(t.Context(), 0, true)
	r.must(err)
	if len(w.lists) != len(witnessed) {
		t.Errorf("%d of %d kinds are listed", len(w.lists), len(witnessed))
	}
	rich := 0
	for dir, l := range w.lists {
		if o := l.objects["default/rich"]; o != nil && o.power {
			rich++
		}
		if len(l.objects) == 0 || !bytes.Contains(file.b, []byte(dir)) {
			t.Errorf("%s: %d objects", dir, len(l.objects))
		}
	}
	if rich != 8 {
		t.Errorf("the specs of %d kinds are compared", rich)
	}
}

// TestLiesAboutWhatChangedMeanwhile serves snapshots that are forged in what is newer than
// the API server's list before them.
func TestLiesAboutWhatChangedMeanwhile(t *testing.T) {
	r, admin := takenRig(t)
	etcd := etcdOf(t, r.cp)
	bindings, secrets := r.core.RbacV1().ClusterRoleBindings(), r.core.CoreV1().Secrets(Namespace)
	binding := func(name string) *rbacv1.ClusterRoleBinding {
		return &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "view"},
			Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: "somebody-honest"}},
		}
	}
	bind := func(name string) {
		_, err := bindings.Create(t.Context(), binding(name), metav1.CreateOptions{})
		r.must(err)
	}
	secret := func(name string) *corev1.Secret {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string][]byte{"password": []byte("honest-password")}}
	}
	keep := func(name string) {
		_, err := secrets.Create(t.Context(), secret(name), metav1.CreateOptions{})
		r.must(err)
	}
	// put writes past the API server what it has under another key, in a directory that
	// is not compared and whose name is as long.
	put := func(from, to string) {
		got, err := etcd.Get(t.Context(), from)
		r.must(err)
		_, err = etcd.Put(t.Context(), to, string(got.Kvs[0].Value))
		r.must(err)
	}
	const dir, hidden = "/registry/clusterrolebindings/", "/registry/clusterrolebindingz/"
	replace := func(from, to string) func([]byte) []byte {
		return func(b []byte) []byte {
			if len(from) != len(to) || !bytes.Contains(b, []byte(from)) {
				t.Fatalf("the snapshot does not contain %q", from)
			}
			return bytes.ReplaceAll(b, []byte(from), []byte(to))
		}
	}
	for _, tt := range []struct {
		name string
		// before and during happen before the API server is asked, and when it was asked
		// before the snapshot; after happens when the snapshot was taken.
		before, during, after func()
		forge                 func([]byte) []byte
		words                 string // of the error; empty if it is taken
	}{
		{
			name:   "nothing forged, with what was added, changed and deleted meanwhile",
			before: func() { bind("changed-0"); bind("deleted-0"); keep("changed-0") },
			during: func() {
				bind("added-0")
				bind("brief-0")
				r.must(bindings.Delete(t.Context(), "brief-0", metav1.DeleteOptions{}))
				r.must(bindings.Delete(t.Context(), "deleted-0", metav1.DeleteOptions{}))
				b := binding("changed-0")
				b.Labels = map[string]string{"a": "b"}
				_, err := bindings.Update(t.Context(), b, metav1.UpdateOptions{})
				r.must(err)
				s := secret("changed-0")
				s.Data["password"] = []byte("another-password")
				_, err = secrets.Update(t.Context(), s, metav1.UpdateOptions{})
				r.must(err)
				bind("later-0")
			},
			after: func() { r.must(bindings.Delete(t.Context(), "later-0", metav1.DeleteOptions{})) },
		},
		{
			name:   "a binding that the API server never had, at a new revision",
			before: func() { bind("source-1") },
			during: func() { put(dir+"source-1", hidden+"source-1"); put(dir+"source-1", "/registry/x") },
			forge:  replace(hidden+"source-1", dir+"source-1"),
			words:  "it has /registry/clusterrolebindings/source-1 of revision",
		},
		{
			name:   "one that is gone in the API server by then",
			before: func() { bind("source-2"); bind("forgery2") },
			during: func() {
				r.must(bindings.Delete(t.Context(), "forgery2", metav1.DeleteOptions{}))
				put(dir+"source-2", hidden+"forgery2")
			},
			forge: replace(hidden+"forgery2", dir+"forgery2"),
			words: "it has /registry/clusterrolebindings/forgery2 since revision",
		},
		{
			name:   "a new binding for somebody else",
			during: func() { bind("newcomer") },
			forge:  replace("somebody-honest", "system:mallory!"),
			words:  "differs from the API server's",
		},
		{
			name:   "a new binding that is left out",
			during: func() { bind("left-out-4") },
			forge:  replace(dir+"left-out-4", hidden+"left-out-4"),
			words:  "it lacks /registry/clusterrolebindings/left-out-4, which the API server has since revision",
		},
		{
			name:   "a deletion that is left out",
			before: func() { bind("deleted-5") },
			during: func() { r.must(bindings.Delete(t.Context(), "deleted-5", metav1.DeleteOptions{})) },
			forge: func(b []byte) []byte {
				// The tombstone is an entry whose value has a key alone, behind the key in the page.
				b = bytes.Clone(b)
				tomb, n := append([]byte{'t', '\n', byte(len(dir + "deleted-5"))}, dir+"deleted-5"...), 0
				for at := 0; ; n++ {
					i := bytes.Index(b[at:], tomb)
					if i < 0 {
						break
					}
					copy(b[at+i+3:], hidden)
					at += i + len(tomb)
				}
				if n == 0 {
					t.Fatal("the snapshot has no tombstone")
				}
				return b
			},
			words: "it has /registry/clusterrolebindings/deleted-5 since revision",
		},
		{
			name:   "a Secret that has changed since long",
			before: func() { keep("changed-6") },
			forge:  replace("honest-password", "forged-password"),
			words:  "its /registry/secrets/" + Namespace + "/changed-6 differs from the API server's",
		},
		{
			name: "a Secret that was changed meanwhile",
			during: func() {
				s := secret("changed-6")
				s.Data["password"] = []byte("another-word-77")
				_, err := secrets.Update(t.Context(), s, metav1.UpdateOptions{})
				r.must(err)
			},
			forge: replace("another-word-77", "forged-password"),
			words: "its /registry/secrets/" + Namespace + "/changed-6 differs from the API server's",
		},
		{
			name:   "another image in every workload",
			before: func() { r.must(r.cp.Apply(t.Context(), richWorkloads())) },
			forge:  replace("registry.example.com/honest", "registry.example.com/forged"),
			words:  "/default/rich differs from the API server's",
		},
		{
			name:  "another path of the node in every workload",
			forge: replace("\x02/x", "\x02/y"),
			words: "/default/rich differs from the API server's",
		},
		{
			name:   "an older value of a Secret",
			before: func() { keep("changed-8") },
			during: func() {
				s := secret("changed-8")
				s.Data["password"] = []byte("another-word-88")
				_, err := secrets.Update(t.Context(), s, metav1.UpdateOptions{})
				r.must(err)
			},
			forge: func(b []byte) []byte {
				// The key of the last entry becomes another one, so the one before is the last.
				key := []byte("/registry/secrets/" + Namespace + "/changed-8")
				from := bytes.Index(b, []byte("another-word-88"))
				if from < 0 {
					t.Fatal("the snapshot does not hold the new value")
				}
				b = bytes.Clone(b)
				for from >= 0 {
					at := bytes.LastIndex(b[:from], key)
					if at < 0 {
						t.Fatal("the snapshot does not hold the key")
					}
					copy(b[at:], "/registry/secretz/")
					next := bytes.Index(b[from+1:], []byte("another-word-88"))
					if next < 0 {
						break
					}
					from += 1 + next
				}
				return b
			},
			words: "it has /registry/secrets/" + Namespace + "/changed-8 of revision",
		},
		{
			name: "a Deployment that somebody deleted",
			before: func() {
				_, err := r.core.AppsV1().Deployments(Namespace).Create(t.Context(), deploymentOf("guardian"), metav1.CreateOptions{})
				r.must(err)
			},
			forge: replace("/registry/deployments/"+Namespace+"/guardian", "/registry/deploymentz/"+Namespace+"/guardian"),
			words: "it lacks /registry/deployments/" + Namespace + "/guardian, which the API server has since revision",
		},
		{
			name:  "nothing forged, and then changed",
			after: func() { bind("after-9"); r.must(secrets.Delete(t.Context(), "changed-6", metav1.DeleteOptions{})) },
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.before != nil {
				tt.before()
			}
			r.serve(func(w http.ResponseWriter, req *http.Request) {
				if tt.during != nil {
					tt.during()
				}
				b, rev := r.etcd()
				if tt.after != nil {
					tt.after()
				}
				if tt.forge != nil {
					b = tt.forge(b)
				}
				sum := sha256.Sum256(b[:len(b)-sha256.Size])
				b = append(b[:len(b)-sha256.Size:len(b)-sha256.Size], sum[:]...)
				snapshotOf(b, func(h http.Header) { h.Set("Snapshot-Revision", strconv.FormatInt(rev, 10)) })(w, req)
			})
			s, err := admin.EtcdSnapshot(t.Context(), &sinkBuffer{}, confirm)
			switch {
			case tt.words == "":
				if err != nil || len(s.Unchecked) > 0 {
					t.Errorf("got %+v, %v", s, err)
				}
			case !errors.Is(err, engine.ErrImpostor) || !strings.Contains(err.Error(), tt.words):
				t.Errorf("got %v, want %q", err, tt.words)
			}
		})
	}
}

// TestSnapshotWhoseRevisionIsCompacted takes snapshots at a revision that etcd compacts
// before they have arrived. Objects that have not changed since are compared.
func TestSnapshotWhoseRevisionIsCompacted(t *testing.T) {
	// With this feature the API server itself keeps compacted revisions for a while.
	r, admin := takenRig(t, "--feature-gates=ListFromCacheSnapshot=false")
	etcd, maps := etcdOf(t, r.cp), r.core.CoreV1().ConfigMaps(Namespace)
	put := func(name, value string) {
		t.Helper()
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"k": value}}
		_, err := maps.Update(t.Context(), m, metav1.UpdateOptions{})
		if apierrors.IsNotFound(err) {
			_, err = maps.Create(t.Context(), m, metav1.CreateOptions{})
		}
		r.must(err)
	}
	for _, tt := range []struct {
		name     string
		from, to string // forged
		words    string // of the error; empty if it is taken
	}{
		{name: "nothing forged"},
		{name: "an object that changed meanwhile, with another value", from: "value-during", to: "value-forged", words: "/kept differs from the API server's"},
		{name: "an object that changed meanwhile, left out", from: "/registry/configmaps/" + Namespace + "/kept", to: "/registry/configmapz/" + Namespace + "/kept", words: "it lacks /registry/configmaps/" + Namespace + "/kept"},
		{name: "an older object, with another value", from: "value-before", to: "value-forged", words: "/old differs from the API server's"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := maps.Delete(t.Context(), "kept", metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
				t.Fatal(err)
			}
			put("old", "value-before")
			put("again", "1")
			put("gone", "1")
			r.serve(func(w http.ResponseWriter, req *http.Request) {
				put("kept", "value-during")
				put("again", "2")
				put("brief", "1")
				b, rev := r.etcd()
				put("again", "3")
				put("new", "1")
				r.must(maps.Delete(t.Context(), "brief", metav1.DeleteOptions{}))
				r.must(maps.Delete(t.Context(), "gone", metav1.DeleteOptions{}))
				r.must(maps.Delete(t.Context(), "new", metav1.DeleteOptions{}))
				now, err := etcd.Get(t.Context(), "/registry/health")
				r.must(err)
				_, err = etcd.Compact(t.Context(), now.Header.GetRevision(), clientv3.WithCompactPhysical())
				r.must(err)
				if tt.from != "" {
					if !bytes.Contains(b, []byte(tt.from)) {
						t.Errorf("the snapshot does not contain %q", tt.from)
					}
					b = bytes.ReplaceAll(b, []byte(tt.from), []byte(tt.to))
				}
				sum := sha256.Sum256(b[:len(b)-sha256.Size])
				b = append(b[:len(b)-sha256.Size:len(b)-sha256.Size], sum[:]...)
				snapshotOf(b, func(h http.Header) { h.Set("Snapshot-Revision", strconv.FormatInt(rev, 10)) })(w, req)
			})
			s, err := admin.EtcdSnapshot(t.Context(), &sinkBuffer{}, confirm)
			switch {
			case tt.words == "":
				if err != nil || len(s.Unchecked) != 1 || !strings.Contains(s.Unchecked[0], "etcd has compacted its revision") {
					t.Errorf("got %+v, %v", s, err)
				}
			case !errors.Is(err, engine.ErrImpostor) || !strings.Contains(err.Error(), tt.words):
				t.Errorf("got %+v, %v", s, err)
			}
		})
	}
}

// TestHonestSnapshotsOfABusyClusterAreTaken takes snapshots while others write: the
// revision of each lies between two lists, among creations, changes and deletions.
// CONSTELLATION_SNAPSHOTS=200 takes more of them.
func TestHonestSnapshotsOfABusyClusterAreTaken(t *testing.T) {
	r, admin := takenRig(t)
	ctx, stop := context.WithCancel(t.Context())
	var writers sync.WaitGroup
	defer writers.Wait()
	defer stop()
	rounds := 40
	if n, err := strconv.Atoi(os.Getenv("CONSTELLATION_SNAPSHOTS")); err == nil {
		rounds = n
	}
	var writes atomic.Int64
	for n := range 4 {
		writers.Go(func() {
			config := r.cp.Config()
			core, err := kubernetes.NewForConfig(config)
			if err != nil {
				t.Error(err)
				return
			}
			bindings, secrets, maps, deployments := core.RbacV1().ClusterRoleBindings(), core.CoreV1().Secrets(Namespace), core.CoreV1().ConfigMaps(Namespace), core.AppsV1().Deployments(Namespace)
			for i := 0; ctx.Err() == nil; i++ {
				name := fmt.Sprintf("busy-%d-%d", n, i%7)
				b := &rbacv1.ClusterRoleBinding{
					ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"i": strconv.Itoa(i)}}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "view"},
				}
				s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string][]byte{"i": []byte(strconv.Itoa(i))}}
				m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"i": strconv.Itoa(i)}}
				var errs []error
				note := func(err error) {
					errs = append(errs, err)
					writes.Add(1)
				}
				_, err := bindings.Create(ctx, b, metav1.CreateOptions{})
				note(err)
				_, err = secrets.Create(ctx, s, metav1.CreateOptions{})
				note(err)
				_, err = maps.Create(ctx, m, metav1.CreateOptions{})
				note(err)
				d, err := deployments.Create(ctx, deploymentOf(name), metav1.CreateOptions{})
				note(err)
				d.Status.ObservedGeneration = int64(i)
				_, err = deployments.UpdateStatus(ctx, d, metav1.UpdateOptions{})
				note(err)
				s.Data["more"] = []byte("x")
				_, err = secrets.Update(ctx, s, metav1.UpdateOptions{})
				note(err)
				b.Annotations["more"] = "x"
				_, err = bindings.Update(ctx, b, metav1.UpdateOptions{})
				note(err)
				note(deployments.Delete(ctx, name, metav1.DeleteOptions{}))
				note(bindings.Delete(ctx, name, metav1.DeleteOptions{}))
				note(secrets.Delete(ctx, name, metav1.DeleteOptions{}))
				note(maps.Delete(ctx, name, metav1.DeleteOptions{}))
				if err := errors.Join(errs...); err != nil && ctx.Err() == nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for i := range rounds {
		at := writes.Load()
		if i%10 == 9 { // as the API server does every five minutes
			got, err := etcdOf(t, r.cp).Get(ctx, "/registry/health")
			r.must(err)
			_, err = etcdOf(t, r.cp).Compact(ctx, got.Header.GetRevision())
			r.must(err)
		}
		var b sinkBuffer
		s, err := admin.EtcdSnapshot(ctx, &b, confirm)
		if err != nil || len(s.Unchecked) > 0 {
			t.Fatalf("snapshot %d: got %+v, %v", i, s, err)
		}
		if writes.Load() == at {
			t.Errorf("snapshot %d: nothing was written meanwhile", i)
		}
	}
	t.Logf("%d writes", writes.Load())
}
