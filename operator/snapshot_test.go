package operator

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"constellation/agent/upgradeproto"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/operator/api/v1alpha1"
)

func TestSnapshotsRequireTheRight(t *testing.T) {
	cp := controlplanetest.Lend(t, controlplane.Options{})
	c, err := kubernetes.NewForConfig(cp.Config())
	if err != nil {
		t.Fatal(err)
	}
	const namespace = "snapshots"
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	_, err = c.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	must(err)
	for _, name := range []string{SnapshotAccount, "somebody"} {
		_, err = c.CoreV1().ServiceAccounts(namespace).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		must(err)
	}
	_, err = c.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: SnapshotAccount},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{snapshotResource}, Verbs: []string{snapshotVerb}}},
	}, metav1.CreateOptions{})
	must(err)
	_, err = c.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: SnapshotAccount},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: SnapshotAccount},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Name: SnapshotAccount, Namespace: namespace}},
	}, metav1.CreateOptions{})
	must(err)
	token := func(account string, audiences ...string) string {
		t.Helper()
		r, err := c.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), account, &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: audiences}}, metav1.CreateOptions{})
		must(err)
		return r.Status.Token
	}

	body := bytes.Repeat([]byte("snapshot"), 1<<17)
	digest := sha256.Sum256(body)
	var fail error
	after := 0 // bytes that are sent before fail
	s := newSnapshots(c, func(_ context.Context, w io.Writer) (*upgradeproto.SnapshotSummary, error) {
		if fail != nil {
			if after == 0 {
				return nil, fail
			}
			_, err := w.Write(body[:after])
			return nil, errors.Join(fail, err)
		}
		_, err := w.Write(body)
		return &upgradeproto.SnapshotSummary{Size: int64(len(body)), Sha256: digest[:], Revision: 42, EtcdVersion: "3.6.6"}, err
	}, slog.New(slog.DiscardHandler))
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	get := func(token string) (*http.Response, []byte, error) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+SnapshotPath, nil)
		must(err)
		if token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
		resp, err := server.Client().Do(req)
		must(err)
		defer resp.Body.Close()
		got, err := io.ReadAll(resp.Body)
		return resp, got, err
	}
	good := token(SnapshotAccount, SnapshotAudience)

	for name, tt := range map[string]struct {
		token string
		code  int
		says  string
	}{
		"without a token":                              {token: "", code: http.StatusUnauthorized, says: "bearer token"},
		"with a token of no account":                   {token: "nonsense", code: http.StatusUnauthorized, says: "not valid"},
		"with a token of another kind":                 {token: token(SnapshotAccount), code: http.StatusUnauthorized, says: "not valid"},
		"with a token of an account without the right": {token: token("somebody", SnapshotAudience), code: http.StatusForbidden, says: "system:serviceaccount:snapshots:somebody may not create etcdsnapshots.update.edgeless.systems"},
	} {
		t.Run(name, func(t *testing.T) {
			resp, got, err := get(tt.token)
			if err != nil || resp.StatusCode != tt.code || !strings.Contains(string(got), tt.says) || tt.token != "" && strings.Contains(string(got), tt.token) {
				t.Errorf("%v %s %q", err, resp.Status, got)
			}
		})
	}

	resp, got, err := get(good)
	if err != nil || resp.StatusCode != http.StatusOK || !bytes.Equal(got, body) {
		t.Fatalf("%v, %s, %d bytes", err, resp.Status, len(got))
	}
	for k, want := range map[string]string{TrailerSHA256: hex.EncodeToString(digest[:]), TrailerSize: "1048576", TrailerRevision: "42", TrailerVersion: "3.6.6"} {
		if resp.Trailer.Get(k) != want {
			t.Errorf("%s is %q, want %q", k, resp.Trailer.Get(k), want)
		}
	}

	fail = errors.New("etcd has no space")
	if resp, got, err = get(good); err != nil || resp.StatusCode != http.StatusBadGateway || !strings.Contains(string(got), "no space") {
		t.Errorf("%v %s %q", err, resp.Status, got)
	}
	after = 1 << 19
	if _, got, err = get(good); err == nil {
		t.Errorf("a snapshot that broke off after %d bytes was accepted as complete", len(got))
	}
	fail = nil
	<-s.free // somebody else takes one
	if resp, _, err = get(good); err != nil || resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" {
		t.Errorf("%v %s", err, resp.Status)
	}
	s.free <- struct{}{}
	if resp, _, err = get(good); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("%v %s", err, resp.Status)
	}
}
