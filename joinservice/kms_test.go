package joinservice

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	kmsapi "k8s.io/kms/apis/v2"

	"constellation/engine/attestation/keyprocess"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/attest/attesttest/lab"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/engine/kms"
	"constellation/engine/kms/plugin"
	"constellation/internal/syncbuffer"
)

// TestTicketHasTheKeysOfTheAPIServer gives tickets to a control plane and a worker, with a key service and after its end.
func TestTicketHasTheKeysOfTheAPIServer(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "kms") // a short path, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	k, err := kms.First(bytes.Repeat([]byte{0xc4}, kms.SecretSize), 1)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := k.Encode()
	if err != nil {
		t.Fatal(err)
	}
	p := lab.NewProject(t)
	host := p.Start(p.Group("control-planes", cloud.ControlPlane, gcptest.UID), nil)
	if err := plugin.Store(t.Context(), dir, host.TPM, clusterID, keys); err != nil {
		t.Fatal(err)
	}
	host.Join(clusterID)
	log := &syncbuffer.Buffer{}
	var modes atomic.Value
	set := func(mode string) (bool, error) { return modes.Swap(mode) != mode, nil }
	service, err := plugin.Open(t.Context(), plugin.Config{Dir: dir, TPM: host.TPM, ClusterID: clusterID, SetEncryption: set, Log: slog.New(slog.NewJSONHandler(log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	var l [2]net.Listener
	for n, name := range []string{"kms.sock", "keys.sock"} {
		if l[n], err = keyprocess.Listen(t.Context(), filepath.Join(dir, name), nil); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- service.Serve(ctx, l[0], l[1]) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)

	s := newSite(t)
	gone := []byte(`{"data":{"control-plane-9":"1"}}`)
	if _, err := s.admin.CoreV1().ConfigMaps(namespace).Patch(t.Context(), kms.UseConfigMap, types.MergePatchType, gone, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	s.kms = filepath.Join(dir, "keys.sock")
	r := s.start("control-plane-0")
	worker, workerIssuer := s.machine("worker-1", cloud.Worker, goodBoot, nil)
	if got, err := s.ask(r.addr, worker, workerIssuer); err != nil || len(got.GetKmsKeys()) > 0 {
		t.Errorf("a worker gets %d bytes, %v", len(got.GetKmsKeys()), err)
	}
	id, issuer := s.machine("control-plane-1", cloud.ControlPlane, goodBoot, nil)
	if got, err := s.ask(r.addr, id, issuer); err != nil || !bytes.Equal(got.GetKmsKeys(), keys) || !strings.Contains(log.String(), "keys of the key service handed over") {
		t.Errorf("a control plane gets %d bytes, %v\n%s", len(got.GetKmsKeys()), err, log)
	}
	c := kms.Client{Socket: s.kms}
	for _, tt := range []struct {
		name, text, logged string
		want               uint32
	}{
		{name: "no number", text: "two", logged: `generation not passed to the key service`, want: 1},
		{name: "the present one", text: "1", want: 1},
		{name: "a forged one", text: "1000000", logged: `"msg":"generation passed to the key service","from":1,"generation":17,"wanted":1000000`, want: 1 + kms.MaxRaise},
		{name: "a forged one, again", text: "1000000", logged: "less than 30s ago", want: 1 + kms.MaxRaise},
		{name: "a smaller one", text: "2", want: 1 + kms.MaxRaise},
	} {
		s.generation = tt.text
		s.rawJoinConfig(s.demand(goodBoot), nil)
		eventually(t, tt.name, func() (string, bool) {
			now, err := c.Ready(t.Context())
			return r.log.String(), err == nil && now == tt.want && strings.Contains(r.log.String(), tt.logged)
		})
	}
	// What the API server uses is reported, without Nodes that are gone.
	if _, err := service.Encrypt(t.Context(), &kmsapi.EncryptRequest{Plaintext: []byte("seed"), Uid: "1"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the generation is reported", func() (string, bool) {
		cm, err := s.admin.CoreV1().ConfigMaps(namespace).Get(t.Context(), kms.UseConfigMap, metav1.GetOptions{})
		return fmt.Sprint(cm, err, r.log), err == nil && maps.Equal(cm.Data, map[string]string{"control-plane-0": fmt.Sprint(1 + kms.MaxRaise)})
	})
	if k, err = kms.First(bytes.Repeat([]byte{0xc4}, kms.SecretSize), 1+kms.MaxRaise); err != nil {
		t.Fatal(err)
	}
	if keys, err = k.Encode(); err != nil {
		t.Fatal(err)
	}
	if got, err := s.ask(r.addr, id, issuer); err != nil || !bytes.Equal(got.GetKmsKeys(), keys) {
		t.Errorf("after a rotation, a control plane gets %d bytes, %v", len(got.GetKmsKeys()), err)
	}
	// An upgrade brings the encryption to the cluster.
	s.fingerprint, s.mode = k.Fingerprint(), "read"
	s.rawJoinConfig(s.demand(goodBoot), nil)
	eventually(t, "the ticket has a mode", func() (string, bool) {
		got, err := s.ask(r.addr, id, issuer)
		return fmt.Sprint(err), err == nil && got.GetKmsFingerprint() == k.Fingerprint() && got.GetKmsMode() == "read" && bytes.Equal(got.GetKmsKeys(), keys)
	})
	eventually(t, "the mode is passed on", func() (string, bool) { return r.log.String(), modes.Load() == "read" })
	if got, err := s.ask(r.addr, worker, workerIssuer); err != nil || got.GetKmsFingerprint() != "" || got.GetKmsMode() != "" {
		t.Errorf("a worker gets fingerprint %q and mode %q, %v", got.GetKmsFingerprint(), got.GetKmsMode(), err)
	}
	stop()
	got, err := s.ask(r.addr, id, issuer)
	if err != nil || len(got.GetKmsKeys()) > 0 || got.GetKmsFingerprint() != k.Fingerprint() {
		t.Errorf("without a key service, a control plane that may wait gets fingerprint %q, %v", got.GetKmsFingerprint(), err)
	}
	// A machine without keys could not read Secrets any more.
	s.mode = "encrypt"
	s.rawJoinConfig(s.demand(goodBoot), nil)
	eventually(t, "the join service reads the mode", func() (string, bool) {
		_, err := s.ask(r.addr, id, issuer)
		return fmt.Sprint(err), status.Code(err) == codes.Unavailable
	})
	_, err = s.ask(r.addr, id, issuer)
	refused(t, err, codes.Unavailable, errSigner.Error())
	if !strings.Contains(r.log.String(), errKeyService.Error()) {
		t.Errorf("the log of the join service lacks the reason:\n%s", r.log)
	}
	for name, text := range map[string]string{"key service": log.String(), "join service": r.log.String()} {
		if strings.Contains(text, "xMTExMTE") || strings.Contains(text, string(keys)) {
			t.Errorf("the log of the %s has the secret", name)
		}
	}
}
