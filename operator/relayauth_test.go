//go:build linux

package operator

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// TestRelayToken requests tokens with the rights of the chart: for one audience, for ten
// minutes, bound to the operator's pod, and a new one before the last expires.
func TestRelayToken(t *testing.T) {
	c := newCluster(t)
	admin := kubernetes.NewForConfigOrDie(c.cp.Config())
	no := false
	pod, err := admin.CoreV1().Pods(namespace).Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "operator-1"},
		Spec:       corev1.PodSpec{ServiceAccountName: OperatorAccount, AutomountServiceAccountToken: &no, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	core := kubernetes.NewForConfigOrDie(c.access())
	token := &relayToken{accounts: core.CoreV1().ServiceAccounts(namespace), pod: pod.Name, audience: RelayAudienceOf("worker-1"), now: func() time.Time { return now }}
	get := func() string {
		t.Helper()
		md, err := token.GetRequestMetadata(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		v, ok := strings.CutPrefix(md["authorization"], "Bearer ")
		if !ok {
			t.Fatalf("metadata has the keys %d", len(md))
		}
		return v
	}
	first := get()
	payload, err := base64.RawURLEncoding.DecodeString(strings.Split(first, ".")[1])
	if err != nil {
		t.Fatal(err)
	}
	var claims struct {
		Aud        []string
		Exp, Iat   int64
		Kubernetes struct {
			Pod            struct{ Name, UID string }
			ServiceAccount struct{ Name string }
		} `json:"kubernetes.io"`
	}
	if err := json.Unmarshal(payload, &claims); err != nil {
		t.Fatal(err)
	}
	k := claims.Kubernetes
	if fmt.Sprint(claims.Aud) != "[constellation-relay:worker-1]" || claims.Exp-claims.Iat != 600 || k.Pod.Name != pod.Name || k.Pod.UID != string(pod.UID) || k.ServiceAccount.Name != OperatorAccount {
		t.Errorf("claims %+v", claims)
	}
	now = now.Add(relayTokenLife - relayTokenSpare - time.Second)
	if get() != first {
		t.Error("the token was renewed early")
	}
	now = now.Add(2 * time.Second)
	second := get()
	if second == first {
		t.Error("the token was not renewed before its end")
	}

	g := newGate(admin, namespace, "worker-1")
	admit := func() error {
		return g.admit(metadata.NewIncomingContext(t.Context(), metadata.Pairs("authorization", "Bearer "+second)))
	}
	if err := admit(); err != nil {
		t.Errorf("a renewed token is refused: %v", err)
	}
	// It ends with the pod, besides what the API server remembers for ten seconds.
	if err := admin.CoreV1().Pods(namespace).Delete(t.Context(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); status.Code(admit()) != codes.Unauthenticated; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the token of a deleted pod is accepted for a minute")
		}
	}
	// A request that fails is one that is retried.
	now = now.Add(relayTokenLife)
	if _, err := token.GetRequestMetadata(t.Context()); status.Code(err) != codes.Unavailable || !wasCut(err) {
		t.Errorf("the pod is gone: %v", err)
	}
	c.cp.StopAPIServer()
	if err := g.admit(metadata.NewIncomingContext(context.Background(), metadata.Pairs("authorization", "Bearer "+second))); status.Code(err) != codes.Unavailable {
		t.Errorf("without an API server: %v", err)
	}
}

// TestRelayIsGenuine: the operator sends its token only to pods of the DaemonSet. Root on any node
// can create a mirror pod with the relay's label.
func TestRelayIsGenuine(t *testing.T) {
	yes := true
	real := func() *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "p", OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: RelayName, Controller: &yes}}},
			Spec:       corev1.PodSpec{ServiceAccountName: RelayName},
		}
	}
	if err := genuine(real()); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*corev1.Pod){
		"a mirror pod":                func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"} },
		"another account":             func(p *corev1.Pod) { p.Spec.ServiceAccountName = "default" },
		"no account":                  func(p *corev1.Pod) { p.Spec.ServiceAccountName = "" },
		"no controller":               func(p *corev1.Pod) { p.OwnerReferences[0].Controller = nil },
		"a Node as its owner":         func(p *corev1.Pod) { p.OwnerReferences[0].Kind = "Node" },
		"a DaemonSet of another name": func(p *corev1.Pod) { p.OwnerReferences[0].Name = "x" },
	} {
		p := real()
		change(p)
		if genuine(p) == nil {
			t.Errorf("%s is taken for the relay", name)
		}
	}
}
