package secretscan

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"net/url"
	"strings"
	"testing"
	"testing/iotest"
)

func privateKey(t *testing.T) []byte {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// encodings are the ways in which programs write bytes.
func encodings(secret []byte) map[string]string {
	out := map[string]string{
		"verbatim": string(secret), "hex": hex.EncodeToString(secret), "upper hex": strings.ToUpper(hex.EncodeToString(secret)),
		"query": url.QueryEscape(string(secret)), "path": url.PathEscape(string(secret)),
		"bytes": fmt.Sprintf("%d", secret), "base64 twice": base64.StdEncoding.EncodeToString([]byte(base64.StdEncoding.EncodeToString(secret))),
	}
	numbers, _ := json.Marshal(func() (n []int) {
		for _, c := range secret {
			n = append(n, int(c))
		}
		return n
	}())
	out["numbers"] = string(numbers)
	for i := range 3 {
		text := append(bytes.Repeat([]byte("x"), i), secret...)
		out[fmt.Sprintf("base64 at %d", i)] = base64.StdEncoding.EncodeToString(append(text, "tail"...))
		out[fmt.Sprintf("url base64 at %d", i)] = base64.RawURLEncoding.EncodeToString(append(text, "tail"...))
	}
	return out
}

// TestKnownSecretsAreFoundInEachEncoding plants each encoding of binary and text secrets.
func TestKnownSecretsAreFoundInEachEncoding(t *testing.T) {
	random := make([]byte, 32)
	rand.Read(random)
	text := []byte(`p"ss/wörd <&+> 0`)
	key := privateKey(t)
	for name, secret := range map[string][]byte{"random bytes": random, "text": text, "private key": key, "short": []byte("s3cr3t-8")} {
		s := New([]Secret{{Kind: "the secret", Value: secret}})
		all := encodings(secret)
		if name != "random bytes" {
			once, _ := json.Marshal(string(secret))
			twice, _ := json.Marshal(string(once))
			all["JSON"], all["JSON in JSON"] = string(once), string(twice)
		}
		for encoding, planted := range all {
			page := []byte("a line before\nkey: " + planted + " and after\n")
			if s.Kinds(page)["the secret"] == 0 && s.Kinds(page)[PrivateKey] == 0 {
				t.Errorf("%s as %s is not found in %s", name, encoding, page)
			}
			if known, err := s.Known(iotest.OneByteReader(bytes.NewReader(page))); err != nil || known["the secret"] == 0 {
				t.Errorf("%s as %s is not found in a stream: %v, %v", name, encoding, known, err)
			}
			clean, counts := s.Redact(page)
			if len(counts) == 0 || bytes.Contains(clean, []byte(planted)) || len(s.Kinds(clean)) > 0 {
				t.Errorf("%s as %s: %v, %s", name, encoding, counts, clean)
			}
			if !bytes.HasPrefix(clean, []byte("a line before\n")) {
				t.Errorf("%s as %s: too much is removed: %s", name, encoding, clean)
			}
		}
		if got := s.Kinds([]byte("nothing of it is here\n")); len(got) > 0 {
			t.Errorf("%s: found %v in a text without it", name, got)
		}
	}
}

// TestKnownSecretAcrossChunks plants a secret at the borders at which a long stream is read.
func TestKnownSecretAcrossChunks(t *testing.T) {
	secret := []byte("a-secret-of-the-stream")
	s := New([]Secret{{Kind: "it", Value: secret}})
	for _, at := range []int{0, chunk - 10, chunk, chunk + s.longest, 2*chunk - 1, 3*chunk - len(secret)} {
		b := bytes.Repeat([]byte("."), 3*chunk)
		copy(b[at:], secret)
		if got, err := s.Known(bytes.NewReader(b)); err != nil || got["it"] == 0 {
			t.Errorf("at %d: %v, %v", at, got, err)
		}
	}
}

func TestSecretsAreFoundByTheirForm(t *testing.T) {
	key := string(privateKey(t))
	lines := strings.Split(strings.TrimSpace(key), "\n")
	const jwt = "eyJhbGciOiJSUzI1NiIsImtpZCI6IngifQ.eyJpc3MiOiJrdWJlcm5ldGVzIn0.c2lnbmF0dXJl-_x"
	inJSON, _ := json.Marshal(key)
	for _, tt := range []struct {
		name, text string
		kind       string // empty: nothing is found
		secret     string
	}{
		{name: "a private key", text: "before\n" + key + "after", kind: PrivateKey, secret: lines[1]},
		{name: "a private key in JSON", text: `{"k":` + string(inJSON) + `,"next":1}`, kind: PrivateKey, secret: lines[1]},
		{name: "a private key as base64", text: "client-key: " + base64.StdEncoding.EncodeToString([]byte(key)), kind: PrivateKey, secret: base64.StdEncoding.EncodeToString([]byte(key))[40:80]},
		{name: "a private key as base64 in other bytes", text: "x " + base64.StdEncoding.EncodeToString([]byte("y"+key)), kind: PrivateKey, secret: base64.StdEncoding.EncodeToString([]byte("y" + key))[40:80]},
		{name: "a private key without an end", text: "before\n" + lines[0] + "\n" + lines[1], kind: PrivateKey, secret: lines[1]},
		{name: "a private key without a beginning", text: lines[1] + "\n" + lines[len(lines)-1] + "\nafter", kind: PrivateKey, secret: lines[1]},
		{name: "a key of ssh", text: strings.ReplaceAll(key, "PRIVATE", "OPENSSH PRIVATE"), kind: PrivateKey, secret: lines[1]},
		{name: "a token of a service account", text: "token " + jwt + " expired", kind: WebToken, secret: jwt},
		{name: "a bootstrap token", text: "join with abcdef.0123456789abcdef now", kind: BootstrapToken, secret: "0123456789abcdef"},
		{name: "a bootstrap token in a flag", text: "--token=abcdef.0123456789abcdef", kind: BootstrapToken, secret: "0123456789abcdef"},
		{name: "a bootstrap token in JSON", text: `{"m":"a\nabcdef.0123456789abcdef"}`, kind: BootstrapToken, secret: "0123456789abcdef"},
		{name: "a bootstrap token at the end", text: "abcdef.0123456789abcdef", kind: BootstrapToken, secret: "0123456789abcdef"},
		{name: "the name of an event", text: `"name":"coredns-5d78c9869d-abcdef.18a2b3c4d5e6f708"`},
		{name: "a name with dots", text: "update.edgeless.systems nodeversions.update.edgeless.systems"},
		{name: "an identity of age", text: "AGE-SECRET-KEY-1QQQQQQQQQQQQQQQQQQQQQQQQQQ", kind: AgeIdentity, secret: "QQQQQQQQQQQQQQQQ"},
		{name: "a header", text: `Authorization: Bearer abcdefghijklmnopqrst`, kind: Authorization, secret: "abcdefghijklmnopqrst"},
		{name: "a header in Go", text: `map[Authorization:[Basic dXNlcjpwYXNz]]`, kind: Authorization, secret: "dXNlcjpwYXNz"},
		{name: "a field of a configuration", text: "authorization:\n  mode: Webhook\n"},
		{name: "a password in an address", text: "proxy http://me:s3cret@proxy:3128/x", kind: URLPassword, secret: "s3cret"},
		{name: "an address with a port", text: "https://10.0.0.1:6443/api?x=a@b"},
		{name: "a password", text: "login failed: password=hunter22, user=me", kind: Password, secret: "hunter22"},
		{name: "a password in JSON", text: `{"registryPassword": "hunter22"}`, kind: Password, secret: "hunter22"},
		{name: "a password in JSON in JSON", text: `{"a":"{\"password\":\"hunter22\"}"}`, kind: Password, secret: "hunter22"},
		{name: "a login of docker", text: `{"auths":{"r":{"auth":"bWU6cGFzcw=="}}}`, kind: Password, secret: "bWU6cGFzcw=="},
		{name: "a token in a query", text: "GET /x?access_token=0a1b2c3d4e5f", kind: Password, secret: "0a1b2c3d4e5f"},
		{name: "a key of a cloud", text: "AKIAIOSFODNN7EXAMPLE used", kind: CloudKey, secret: "IOSFODNN7EXAMPLE"},
		{name: "a path of a key", text: "--tls-private-key-file=/var/lib/kubelet/pki/kubelet.key --service-account-key-file=/etc/kubernetes/pki/sa.pub"},
		{name: "a certificate", text: "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"},
		{name: "a sentence", text: "the bootstrap token of the node has expired, and the password is wrong"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := New(nil)
			found := s.Kinds([]byte(tt.text))
			if tt.kind == "" {
				if len(found) > 0 {
					t.Fatalf("found %v", found)
				}
				return
			}
			if found[tt.kind] == 0 {
				t.Errorf("found %v, want %s", found, tt.kind)
			}
			clean, counts := s.Redact([]byte(tt.text))
			if bytes.Contains(clean, []byte(tt.secret)) || !maps.Equal(s.Kinds(clean), map[string]int{}) || len(counts) == 0 {
				t.Errorf("redacted: %s, %v", clean, counts)
			}
			for _, keep := range []string{"before", "after", `"next":1`} {
				if strings.Contains(tt.text, keep) && !bytes.Contains(clean, []byte(keep)) {
					t.Errorf("too much is removed: %s", clean)
				}
			}
		})
	}
}

// TestPublicKeysAreNoSecrets has keys whose encoding contains the public key.
func TestPublicKeysAreNoSecrets(t *testing.T) {
	elliptic, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	modular, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	sec1, err := x509.MarshalECPrivateKey(elliptic)
	if err != nil {
		t.Fatal(err)
	}
	for name, k := range map[string]struct {
		private pem.Block
		public  any
	}{
		"an elliptic curve": {private: pem.Block{Type: "EC PRIVATE KEY", Bytes: sec1}, public: elliptic.Public()},
		"RSA":               {private: pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(modular)}, public: modular.Public()},
	} {
		private := pem.EncodeToMemory(&k.private)
		s := New([]Secret{{Kind: "it", Value: private}})
		der, err := x509.MarshalPKIXPublicKey(k.public)
		if err != nil {
			t.Fatal(err)
		}
		public := pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
		for _, b := range [][]byte{public, der} {
			if found := s.Kinds(b); len(found) > 0 {
				t.Errorf("%s: found %v in the public key", name, found)
			}
		}
		if line := bytes.Split(private, []byte("\n"))[1]; k.private.Type == "EC PRIVATE KEY" && s.Kinds(line)["it"] == 0 {
			t.Errorf("%s: a line of the private key is not found", name)
		}
	}
}

// FuzzRedact checks that what was redacted has no secret any more.
func FuzzRedact(f *testing.F) {
	s := New([]Secret{{Kind: "it", Value: []byte("a-known-secret")}})
	for _, seed := range []string{"a-known-secret", "YS1rbm93bi1zZWNyZXQ=", "abcdef.0123456789abcdef", "-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----", "a-known-a-known-secretsecret", "Authorization: Bearer a-known-secret-0123456789"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		before := bytes.Clone(b)
		clean, _ := s.Redact(b)
		if !bytes.Equal(b, before) {
			t.Fatal("the input is changed")
		}
		if left := s.Kinds(clean); left["it"] > 0 {
			t.Errorf("%q has %v", clean, left)
		}
	})
}

func BenchmarkRedact(b *testing.B) {
	line := `2026-11-21T07:00:00.123456789Z {"time":"2026-11-21T07:00:00Z","level":"INFO","msg":"node reported","node":"worker-0","step":"kubeadm-join"}` + "\n"
	page := []byte(strings.Repeat(line, 10_000))
	s := New([]Secret{{Kind: "it", Value: bytes.Repeat([]byte{1, 2, 3, 4}, 8)}})
	b.SetBytes(int64(len(page)))
	for b.Loop() {
		s.Redact(page)
	}
}
