package simulated

import (
	"bytes"
	"crypto"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"

	"github.com/google/go-tpm/tpm2"
	"golang.org/x/crypto/cryptobyte"
)

// tpmSession is a session that authorizes commands by an HMAC, or by a policy.
type tpmSession struct {
	policy bool
	// key follows from the salt; empty without one.
	key []byte
	// nonce is the latest one of the TPM.
	nonce []byte
	// digest is that of the policy so far.
	digest []byte
}

// Attributes of a session in a command.
const (
	sessionContinue = 1 << 0
	sessionDecrypt  = 1 << 5 // the first parameter of the command is encrypted
	sessionEncrypt  = 1 << 6 // the first parameter of the response is
)

// authorization is how a command is authorized: by a password, or by a session.
type authorization struct {
	handle     uint32
	nonce      []byte // of the caller
	attributes uint8
	proof      []byte // the password, or the HMAC

	session *tpmSession // nil: a password
}

// readAuths reads the authorizations of a command. Its parameters remain.
func (c *command) readAuths() error {
	var size uint32
	var area []byte
	if !c.params.ReadUint32(&size) || !c.params.ReadBytes(&area, int(size)) {
		return rcCommandSize
	}
	for in := cryptobyte.String(area); !in.Empty(); {
		a := &authorization{}
		var nonce, proof cryptobyte.String
		if !in.ReadUint32(&a.handle) || !in.ReadUint16LengthPrefixed(&nonce) || !in.ReadUint8(&a.attributes) || !in.ReadUint16LengthPrefixed(&proof) {
			return rcCommandSize
		}
		a.nonce, a.proof = nonce, proof
		c.auths = append(c.auths, a)
	}
	return nil
}

// authorize checks the authorizations of the first handles of a command, and decrypts its first parameter.
func (t *tpm) authorize(c *command, handles int) error {
	digest := sha256.New()
	digest.Write(binary.BigEndian.AppendUint32(nil, c.code))
	for _, h := range c.handles {
		digest.Write(t.name(h))
	}
	digest.Write(c.params)
	sum := digest.Sum(nil)
	for n, a := range c.auths {
		number := rc(0x100 * n) // error codes have the number of the session
		if n >= handles {
			return rcValue // sessions that authorize nothing are not simulated
		}
		object := t.keys[c.handles[n]]
		if a.handle == handlePassword {
			var want []byte
			if c.handles[n] == handlePlatform {
				want = t.platform
			}
			switch {
			case object != nil && object.attributes()&objectUserWithAuth == 0:
				return rcAuthRefused
			case !hmac.Equal(want, a.proof):
				return rcBadAuth + number
			}
			continue
		}
		if a.session = t.sessions[a.handle]; a.session == nil || c.handles[n] == handlePlatform {
			return rcValue
		}
		if !hmac.Equal(a.session.mac(sum, a.nonce, a.session.nonce, a.attributes), a.proof) {
			return rcBadAuth + number
		}
		switch {
		case !a.session.policy && object != nil && object.attributes()&objectUserWithAuth == 0:
			return rcAuthRefused
		case a.session.policy && (object == nil || !bytes.Equal(a.session.digest, object.policy())):
			return rcPolicyFail + number
		}
	}
	for _, a := range c.auths {
		if a.session == nil || a.attributes&sessionDecrypt == 0 {
			continue
		}
		var first cryptobyte.String
		rest := c.params
		if !rest.ReadUint16LengthPrefixed(&first) {
			return rcCommandSize
		}
		a.session.crypt(first, a.nonce, a.session.nonce, false) // in place
	}
	return nil
}

// prove returns the parameters of a response as they are sent, and the proofs of the sessions of its command.
func (t *tpm) prove(c *command, params []byte) (sent, proofs []byte) {
	for _, a := range c.auths {
		if a.session == nil {
			continue
		}
		next := make([]byte, len(a.nonce))
		rand.Read(next)
		a.session.nonce = next
		if a.attributes&sessionEncrypt != 0 && len(params) >= 2 {
			first := params[2:]
			a.session.crypt(first[:binary.BigEndian.Uint16(params)], a.session.nonce, a.nonce, true)
		}
	}
	digest := sha256.New()
	digest.Write(binary.BigEndian.AppendUint32(make([]byte, 4), c.code))
	digest.Write(params)
	sum := digest.Sum(nil)
	var b cryptobyte.Builder
	for _, a := range c.auths {
		if a.session == nil { // no nonce, it continues, no proof
			addSized(&b, nil)
			b.AddUint8(sessionContinue)
			addSized(&b, nil)
			continue
		}
		addSized(&b, a.session.nonce)
		b.AddUint8(a.attributes)
		addSized(&b, a.session.mac(sum, a.session.nonce, a.nonce, a.attributes))
		if a.attributes&sessionContinue == 0 {
			delete(t.sessions, a.handle)
		}
	}
	return params, b.BytesOrPanic()
}

// mac returns the HMAC of a command or a response. Passwords of all objects are empty.
func (s *tpmSession) mac(digest, newer, older []byte, attributes uint8) []byte {
	mac := hmac.New(sha256.New, s.key)
	mac.Write(digest)
	mac.Write(newer)
	mac.Write(older)
	mac.Write([]byte{attributes})
	return mac.Sum(nil)
}

// crypt encrypts or decrypts a parameter in place.
func (s *tpmSession) crypt(b, newer, older []byte, encrypt bool) {
	k := tpm2.KDFa(crypto.SHA256, s.key, "CFB", newer, older, 8*(16+aes.BlockSize))
	cfb(k[:16], k[16:], b, encrypt)
}

// cfb encrypts or decrypts in place with AES in CFB mode, as the specification demands.
func cfb(key, iv, b []byte, encrypt bool) {
	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err) // the length is constant
	}
	last, stream := bytes.Clone(iv), make([]byte, aes.BlockSize)
	for len(b) > 0 {
		block.Encrypt(stream, last)
		n := min(len(b), aes.BlockSize)
		if !encrypt {
			copy(last, b[:n])
		}
		for i := range n {
			b[i] ^= stream[i]
		}
		if encrypt {
			copy(last, b[:n])
		}
		b = b[n:]
	}
}

// name is the Name of what a handle stands for.
func (t *tpm) name(h uint32) []byte {
	if k := t.keys[h]; k != nil {
		return nameOf(k.public)
	}
	if i := t.kept.NV[nvKey(h)]; i != nil {
		return nameOf(i.public(h))
	}
	return binary.BigEndian.AppendUint32(nil, h)
}

// attributes are those in the public area.
func (k *tpmKey) attributes() uint32 { return binary.BigEndian.Uint32(k.public[4:]) }

// policy is the digest of the policy in the public area.
func (k *tpmKey) policy() []byte {
	var p cryptobyte.String
	in := cryptobyte.String(k.public[8:])
	if !in.ReadUint16LengthPrefixed(&p) || len(p) == 0 {
		return nil
	}
	return p
}

// secret returns the secret that a caller encrypted for the key, which decrypts nothing else.
func (k *tpmKey) secret(sent cryptobyte.String, label string) ([]byte, error) {
	var x, y cryptobyte.String
	if !sent.ReadUint16LengthPrefixed(&x) || !sent.ReadUint16LengthPrefixed(&y) || !sent.Empty() || len(x) != 32 || len(y) != 32 || k.private == nil {
		return nil, rcValue
	}
	if k.attributes()&objectDecrypt == 0 {
		return nil, rcKey
	}
	private, err := k.private.ECDH()
	if err != nil {
		return nil, err
	}
	public, err := ecdh.P256().NewPublicKey(append(append([]byte{4}, x...), y...))
	if err != nil {
		return nil, rcValue
	}
	z, err := private.ECDH(public)
	if err != nil {
		return nil, rcValue
	}
	own := elliptic.P256().Params().BitSize / 8
	return tpm2.KDFe(crypto.SHA256, z, label, x, private.PublicKey().Bytes()[1:1+own], 256), nil
}

func (t *tpm) startAuthSession(c *command, out *response) error {
	var nonce, salt cryptobyte.String
	var kind uint8
	var symmetric, bits, mode, hash uint16
	if !c.params.ReadUint16LengthPrefixed(&nonce) || !c.params.ReadUint16LengthPrefixed(&salt) || !c.params.ReadUint8(&kind) || !c.params.ReadUint16(&symmetric) ||
		symmetric != algNull && (!c.params.ReadUint16(&bits) || !c.params.ReadUint16(&mode)) || !c.params.ReadUint16(&hash) {
		return rcCommandSize
	}
	if c.handles[1] != handleNull || kind > 1 || hash != algSHA256 || symmetric != algNull && (symmetric != algAES || bits != 128) || len(nonce) < 16 {
		return rcValue // bound and trial sessions, and other algorithms, are not simulated
	}
	s := &tpmSession{policy: kind == 1, nonce: make([]byte, len(nonce)), digest: make([]byte, sha256.Size)}
	rand.Read(s.nonce)
	if c.handles[0] != handleNull {
		k := t.keys[c.handles[0]]
		if k == nil {
			return rcHandle
		}
		secret, err := k.secret(salt, "SECRET")
		if err != nil {
			return err
		}
		s.key = tpm2.KDFa(crypto.SHA256, secret, "ATH", s.nonce, nonce, 256)
	}
	first := uint32(hmacSession)
	if s.policy {
		first = policySession
	}
	for n := range uint32(maxSessions) {
		if t.sessions[hmacSession+n] == nil && t.sessions[policySession+n] == nil {
			h := first + n
			t.sessions[h], out.handle = s, &h
			addSized(&out.params, s.nonce)
			return nil
		}
	}
	return rcNoSessions
}

// policyOf returns the policy session of a handle.
func (t *tpm) policyOf(h uint32) (*tpmSession, error) {
	if s := t.sessions[h]; s != nil && s.policy {
		return s, nil
	}
	return nil, rcHandle
}

// policySecret demands that the caller is authorized for an entity, which was just checked.
func (t *tpm) policySecret(c *command, out *response) error {
	s, err := t.policyOf(c.handles[1])
	if err != nil {
		return err
	}
	var nonce, command, reference cryptobyte.String
	var expiration uint32
	if !c.params.ReadUint16LengthPrefixed(&nonce) || !c.params.ReadUint16LengthPrefixed(&command) || !c.params.ReadUint16LengthPrefixed(&reference) || !c.params.ReadUint32(&expiration) {
		return rcCommandSize
	}
	if len(nonce) > 0 && !bytes.Equal(nonce, s.nonce) || len(command) > 0 || expiration != 0 {
		return rcValue
	}
	s.extend(ccPolicySecret, t.name(c.handles[0]))
	sum := sha256.Sum256(append(s.digest, reference...))
	s.digest = sum[:]
	addSized(&out.params, nil) // no timeout
	out.params.AddUint16(secretTag)
	out.params.AddUint32(handleNull)
	addSized(&out.params, nil)
	return nil
}

// policyPCR demands the present values of registers.
func (t *tpm) policyPCR(c *command, _ *response) error {
	s, err := t.policyOf(c.handles[0])
	if err != nil {
		return err
	}
	var want cryptobyte.String
	if !c.params.ReadUint16LengthPrefixed(&want) {
		return rcCommandSize
	}
	selected := bytes.Clone(c.params)
	indices, err := readSelection(&c.params)
	if err != nil {
		return err
	}
	now := t.registers(indices)
	if len(want) > 0 && !bytes.Equal(want, now) {
		return rcValue
	}
	s.extend(ccPolicyPCR, append(selected, now...))
	return nil
}

func (s *tpmSession) extend(code uint32, demand []byte) {
	sum := sha256.Sum256(append(binary.BigEndian.AppendUint32(bytes.Clone(s.digest), code), demand...))
	s.digest = sum[:]
}

// activateCredential returns the secret in a credential for the first key, which was encrypted for the second one.
func (t *tpm) activateCredential(c *command, out *response) error {
	var blob, secret, integrity cryptobyte.String
	if !c.params.ReadUint16LengthPrefixed(&blob) || !c.params.ReadUint16LengthPrefixed(&secret) || !blob.ReadUint16LengthPrefixed(&integrity) {
		return rcCommandSize
	}
	key, by := t.keys[c.handles[0]], t.keys[c.handles[1]]
	if key == nil || by == nil {
		return rcHandle
	}
	seed, err := by.secret(secret, "IDENTITY")
	if err != nil {
		return err
	}
	name := nameOf(key.public)
	mac := hmac.New(sha256.New, tpm2.KDFa(crypto.SHA256, seed, "INTEGRITY", nil, nil, 256))
	mac.Write(blob)
	mac.Write(name)
	if !hmac.Equal(mac.Sum(nil), integrity) {
		return rcIntegrity
	}
	plain := bytes.Clone(blob)
	cfb(tpm2.KDFa(crypto.SHA256, seed, "STORAGE", name, nil, 128), make([]byte, aes.BlockSize), plain, false)
	var credential cryptobyte.String
	if in := cryptobyte.String(plain); !in.ReadUint16LengthPrefixed(&credential) || !in.Empty() {
		return rcValue
	}
	addSized(&out.params, credential)
	return nil
}

// storageKey is what encrypts objects outside of the TPM. Each TPM has another one.
func (t *tpm) storageKey() cipher.AEAD {
	mac := hmac.New(sha256.New, t.kept.Seed)
	mac.Write([]byte("storage"))
	block, err := aes.NewCipher(mac.Sum(nil))
	if err != nil {
		panic(err) // the length is constant
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		panic(err)
	}
	return aead
}

// create seals a secret. Other objects are not simulated.
func (t *tpm) create(c *command, out *response) error {
	var sensitive, public, outside, auth, secret cryptobyte.String
	if !c.params.ReadUint16LengthPrefixed(&sensitive) || !c.params.ReadUint16LengthPrefixed(&public) || !c.params.ReadUint16LengthPrefixed(&outside) ||
		!sensitive.ReadUint16LengthPrefixed(&auth) || !sensitive.ReadUint16LengthPrefixed(&secret) {
		return rcCommandSize
	}
	parent := t.keys[c.handles[0]]
	switch n := len(public); {
	case parent == nil:
		return rcHandle
	case n < 12 || binary.BigEndian.Uint16(public) != algKeyedHash || binary.BigEndian.Uint16(public[n-2:]) != 0 || len(auth) > 0 || len(secret) == 0:
		return rcValue
	}
	unique := make([]byte, sha256.Size)
	rand.Read(unique)
	var b cryptobyte.Builder
	b.AddBytes(public[:len(public)-2])
	addSized(&b, unique)
	area := b.BytesOrPanic()
	addSized(&out.params, t.storageKey().Seal(nil, nil, secret, area))
	addSized(&out.params, area)
	addCreation(&out.params, handleOwner, nameOf(parent.public), outside)
	return nil
}

// load loads what create returned.
func (t *tpm) load(c *command, out *response) error {
	var private, public cryptobyte.String
	if !c.params.ReadUint16LengthPrefixed(&private) || !c.params.ReadUint16LengthPrefixed(&public) {
		return rcCommandSize
	}
	if t.keys[c.handles[0]] == nil {
		return rcHandle
	}
	if len(public) < 12 {
		return rcValue
	}
	secret, err := t.storageKey().Open(nil, nil, private, public)
	if err != nil {
		return rcIntegrity
	}
	o := &tpmKey{public: bytes.Clone(public), sealed: secret}
	handle, err := t.loaded(o)
	if err != nil {
		return err
	}
	out.handle = &handle
	addSized(&out.params, nameOf(o.public))
	return nil
}

// unseal returns a secret. Its policy was just checked.
func (t *tpm) unseal(c *command, out *response) error {
	o := t.keys[c.handles[0]]
	if o == nil || o.sealed == nil {
		return rcHandle
	}
	addSized(&out.params, o.sealed)
	return nil
}
