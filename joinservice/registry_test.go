package joinservice

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/cloud"
	"constellation/engine/registry"
)

// registries has tickets carry the registry of the Secret as it is, and has machines wait while it is missing or malformed.
func registries(t *testing.T, s *site, r *replica) {
	if got, err := r.kube.registry(t.Context()); err != nil || got != nil {
		t.Errorf("without a Secret to read: %v, %v", got, err)
	}
	s.registrySecret = registry.SecretName
	r = s.start("control-plane-registry")
	id, issuer := s.machine("worker-registry", cloud.Worker, goodBoot, nil)
	secrets := s.admin.CoreV1().Secrets(namespace)
	put := func(address, config string) {
		t.Helper()
		sec := &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: registry.SecretName}, Type: corev1.SecretTypeDockerConfigJson,
			Data: map[string][]byte{corev1.DockerConfigJsonKey: []byte(config), registry.KeyAddress: []byte(address), registry.KeyCA: nil},
		}
		_, err := secrets.Update(t.Context(), sec, metav1.UpdateOptions{})
		if apierrors.IsNotFound(err) {
			_, err = secrets.Create(t.Context(), sec, metav1.CreateOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	// expire makes the registry that was read older than it may be.
	expire := func() {
		if p := r.kube.pulls.Load(); p != nil {
			r.kube.pulls.Store(&pulls{p.from, time.Now().Add(-registryAge)})
		}
	}
	refused := func(why string) {
		t.Helper()
		expire()
		got, err := s.ask(r.addr, id, issuer)
		if err == nil {
			t.Fatalf("%s: ticket with registry %v", why, got.GetRegistry().GetAddress())
		}
		if code := status.Code(err); code == codes.OK || strings.Contains(err.Error(), "secret!") || strings.Contains(r.log.String(), "secret!") {
			t.Errorf("%s: %v", why, err)
		}
	}
	given := func(want registry.Registry) {
		t.Helper()
		got, err := s.ask(r.addr, id, issuer)
		if err != nil {
			t.Fatal(err)
		}
		is, err := registry.FromProto(got.GetRegistry())
		if err != nil || is != want {
			t.Errorf("the ticket has %q for %q, want %q: %v", is.Address, is.Username, want.Address, err)
		}
	}
	one := registry.Registry{Address: "one.example.com/mirror", Username: "robot", Password: "secret!"}
	open := registry.Registry{Address: "two.example.com"}

	refused("no Secret")
	put(one.Address, string(one.DockerConfig()))
	given(one)
	put(open.Address, string(open.DockerConfig()))
	given(one) // it is read again after a while only
	expire()
	given(open)
	put("https://two.example.com", string(open.DockerConfig()))
	refused("an address with a scheme")
	put(one.Address, `{"auths":{"other.example.com":{"auth":"c2VjcmV0ITpzZWNyZXQh"}}}`)
	refused("the login of another registry")
	put(one.Address, `{"auths":{"one.example.com":{"auth":"secret!"}}}`)
	refused("a login that is not in base64")
	if err := secrets.Delete(t.Context(), registry.SecretName, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	refused("a Secret that was removed")
}
