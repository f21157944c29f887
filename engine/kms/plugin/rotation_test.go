//go:build linux

package plugin

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/kms"
	"constellation/engine/kube"
)

// TestRotationEncryptsSecretsAgain raises the generation of a key service beside a real API server, and has all Secrets written again.
// CONSTELLATION_TEST_SECRETS is their number, to measure it.
func TestRotationEncryptsSecretsAgain(t *testing.T) {
	count := 700 // more than a page
	if n, err := strconv.Atoi(os.Getenv("CONSTELLATION_TEST_SECRETS")); err == nil {
		count = n
	}
	m := newMachine(t)
	m.store(encoded(t, 1, 1))
	m.vm.Join(clusterID)
	m.serve()
	c, _ := m.encrypted(t)
	k, e := clientOf(t, c), etcdOf(t, c)
	var writers sync.WaitGroup
	numbers := make(chan int)
	for range 16 {
		writers.Go(func() {
			for n := range numbers {
				s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("s-%d", n)}, Data: map[string][]byte{"value": []byte(canary)}}
				if n%7 == 0 {
					s.Immutable = new(bool)
					*s.Immutable = true
				}
				if _, err := k.CoreV1().Secrets("default").Create(t.Context(), s, metav1.CreateOptions{}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for n := range count {
		numbers <- n
	}
	close(numbers)
	writers.Wait()
	client, err := kube.ForConfig(c.Config(), nil)
	if err != nil {
		t.Fatal(err)
	}
	id := func(generation uint32) string {
		t.Helper()
		keys, err := kms.First(bytes.Repeat([]byte{1}, kms.SecretSize), generation)
		if err != nil {
			t.Fatal(err)
		}
		return keys.ID()
	}
	inUse := func() (string, error) {
		b, err := k.CoreV1().RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
		return kube.EncryptionKey(b), err
	}
	if key, err := inUse(); err != nil || key != kms.HashedID(id(1)) {
		t.Errorf("the API server encrypts with %s, %v; want %s", key, err, kms.HashedID(id(1)))
	}
	if err := client.SecretsReadable(t.Context()); err != nil {
		t.Error(err)
	}
	rewrite := func() int64 {
		t.Helper()
		begun, last := time.Now(), int64(0)
		n, err := client.RewriteSecrets(t.Context(), func(done, total int64) {
			if done < last || done > total {
				t.Errorf("%d of %d after %d", done, total, last)
			}
			last = done
		})
		if err != nil || n < int64(count) || last != n {
			t.Fatalf("%d Secrets, %d reported, %v", n, last, err)
		}
		t.Logf("%d Secrets were patched in %s", n, time.Since(begun).Round(time.Millisecond))
		return n
	}
	// by returns the revisions of Secrets by the generation of their key.
	by := func() map[string][]int64 {
		t.Helper()
		r, err := e.Get(t.Context(), "/registry/secrets/", clientv3.WithPrefix())
		if err != nil {
			t.Fatal(err)
		}
		out := map[string][]int64{}
		for _, kv := range r.Kvs {
			generation := "none"
			for g := range uint32(3) {
				if g > 0 && bytes.Contains(kv.Value, []byte(id(g))) {
					generation = fmt.Sprint(g)
				}
			}
			out[generation] = append(out[generation], kv.ModRevision)
		}
		return out
	}
	before := by()
	rewrite()
	if now := by(); fmt.Sprint(now) != fmt.Sprint(before) || len(now["1"]) < count {
		t.Error("Secrets that the present key encrypts were written")
	}
	if _, err := (kms.Client{Socket: m.joiner}).Raise(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	eventually(t, "the API server uses the next key", func() error {
		key, err := inUse()
		if err == nil && key != kms.HashedID(id(2)) {
			err = fmt.Errorf("it uses %s", key)
		}
		return err
	})
	t.Logf("the API server used the next key after %s", time.Since(begun).Round(time.Millisecond))
	rewrite()
	now := by()
	if len(now["1"]) > 0 || len(now["none"]) > 0 || len(now["2"]) < count {
		t.Errorf("%d Secrets are encrypted with the former key, %d with the next one, %d with none", len(now["1"]), len(now["2"]), len(now["none"]))
	}
	rewrite()
	if again := by(); fmt.Sprint(again) != fmt.Sprint(now) {
		t.Error("a second run wrote Secrets")
	}
	for _, n := range []int{0, 1, count - 1} {
		if v, err := valueOf(t.Context(), k, fmt.Sprintf("s-%d", n)); err != nil || v != canary {
			t.Errorf("Secret %d has %q, %v", n, v, err)
		}
	}
	if strings.Contains(m.log.String(), "refused") {
		t.Errorf("the key service refused something:\n%s", m.log.String())
	}
}
