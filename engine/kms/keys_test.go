package kms

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

func keysOf(t testing.TB, seed byte, generation uint32) *Keys {
	t.Helper()
	k, err := First(bytes.Repeat([]byte{seed}, SecretSize), generation)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// TestKeysDecryptWhatTheyEncrypted encrypts with one generation, and decrypts with others, of the same secret and of another one.
func TestKeysDecryptWhatTheyEncrypted(t *testing.T) {
	plain := []byte("a key of an API server, 32 bytes")
	sealed, id, err := keysOf(t, 1, 2).Encrypt(plain)
	if err != nil || bytes.Contains(sealed, plain) {
		t.Fatalf("encrypted %q, %v", sealed, err)
	}
	again, sameID, err := keysOf(t, 1, 2).Encrypt(plain)
	if err != nil || bytes.Equal(sealed, again) || sameID != id {
		t.Errorf("encrypted to the same bytes, or with another key: %s, %s, %v", id, sameID, err)
	}
	for _, generation := range []uint32{1, 2, 3} {
		if got, err := keysOf(t, 1, generation).Decrypt(sealed, id); err != nil || !bytes.Equal(got, plain) {
			t.Errorf("generation %d decrypts to %q, %v", generation, got, err)
		}
	}
	if _, err := keysOf(t, 2, 2).Decrypt(sealed, id); !errors.Is(err, ErrOtherKey) {
		t.Errorf("with another secret: %v", err)
	}
	one, two := keysOf(t, 1, 1).ID(), keysOf(t, 1, 2).ID()
	if one == two || one == keysOf(t, 2, 1).ID() || id != two {
		t.Errorf("IDs %s, %s, of another secret %s", one, two, keysOf(t, 2, 1).ID())
	}
	for _, other := range []string{one, "", "x", id + "x", "-2", strings.TrimSuffix(id, "2") + "0", strings.TrimSuffix(id, "2") + "4294967297"} {
		if got, err := keysOf(t, 1, 2).Decrypt(sealed, other); err == nil {
			t.Errorf("with the ID %q it decrypts to %q", other, got)
		}
	}
	for n := range sealed {
		changed := bytes.Clone(sealed)
		changed[n] ^= 1
		if _, err := keysOf(t, 1, 2).Decrypt(changed, id); err == nil {
			t.Errorf("byte %d was changed, and it is decrypted", n)
		}
		if _, err := keysOf(t, 1, 2).Decrypt(sealed[:n], id); err == nil {
			t.Errorf("%d of %d bytes are decrypted", n, len(sealed))
		}
	}
	for _, size := range []int{0, maxPlain + 1} {
		if _, _, err := keysOf(t, 1, 1).Encrypt(make([]byte, size)); err == nil {
			t.Errorf("%d bytes are encrypted", size)
		}
	}
}

// TestKeysTravel encodes keys and reads them, and refuses everything else.
func TestKeysTravel(t *testing.T) {
	k := keysOf(t, 1, 7)
	b, err := k.Encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse(b)
	if err != nil || got.ID() != k.ID() || got.Generation() != 7 {
		t.Fatalf("read %v, %v", got, err)
	}
	secret := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{1}, SecretSize))
	for name, text := range map[string]string{
		"nothing": "", "no JSON": secret, "another version": strings.Replace(string(b), `"version":1`, `"version":2`, 1),
		"a short secret": strings.Replace(string(b), secret, secret[:8], 1), "generation 0": strings.Replace(string(b), `"generation":7`, `"generation":0`, 1),
		"two documents": string(b) + string(b), "an unknown field": strings.Replace(string(b), "{", `{"x":1,`, 1),
		"a huge generation": strings.Replace(string(b), `"generation":7`, `"generation":4294967295`, 1),
	} {
		if _, err := Parse([]byte(text)); err == nil || strings.Contains(err.Error(), secret[:8]) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestKeysHideTheirSecret prints keys in every way that a careless line could.
func TestKeysHideTheirSecret(t *testing.T) {
	k := keysOf(t, 0xa7, 1)
	var log bytes.Buffer
	slog.New(slog.NewTextHandler(&log, nil)).Info("test", "keys", k)
	marshalled, err := json.Marshal(map[string]any{"keys": k})
	if err != nil {
		t.Fatal(err)
	}
	out := fmt.Sprintf("%v %+v %#v %s %x %d", k, k, k, k, k, k) + log.String() + string(marshalled)
	raw := bytes.Repeat([]byte{0xa7}, 8)
	for _, canary := range []string{string(raw), hex.EncodeToString(raw), base64.StdEncoding.EncodeToString(raw)[:10], "167 167"} {
		if strings.Contains(out, canary) {
			t.Errorf("printed as %s", out)
		}
	}
}
