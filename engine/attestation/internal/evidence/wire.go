package evidence

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/big"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"
)

// The structures below are untrusted and parsed on the hot path of a join, so they are parsed
// by hand: every length is bounded before use, no data may remain, and there is no reflection.
// A fuzz test compares them with go-tpm's own decoder.

// Bounds in bytes of what a document carries; all of it together is bounded by
// MaxDocument.
const (
	maxCertificate = 4 << 10
	maxPublic      = 1 << 10
	maxQuote       = 1 << 10
	maxSignature   = 1 << 10
	maxLog         = 96 << 10
)

// documentVersion is the only version of the document there is.
const documentVersion = 1

// document is the evidence as it travels, in DER:
//
//	Evidence ::= SEQUENCE {
//	  version      INTEGER (1),
//	  certificate  OCTET STRING, -- X.509 certificate of the attestation key
//	  public       OCTET STRING, -- TPMT_PUBLIC of the attestation key
//	  quote        OCTET STRING, -- TPMS_ATTEST
//	  signature    OCTET STRING, -- TPMT_SIGNATURE over quote
//	  pcrs         SEQUENCE OF SEQUENCE { index INTEGER, value OCTET STRING },
//	  log          OCTET STRING  -- TCG crypto-agile event log, may be empty
//	}
type document struct {
	certificate, public, quote, signature []byte
	// pcrs are in ascending order of their index.
	pcrs []register
	log  []byte
}

type register struct {
	index uint32
	value []byte
}

func (d document) marshal() ([]byte, error) {
	var b cryptobyte.Builder
	b.AddASN1(asn1.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddASN1Int64(documentVersion)
		b.AddASN1OctetString(d.certificate)
		b.AddASN1OctetString(d.public)
		b.AddASN1OctetString(d.quote)
		b.AddASN1OctetString(d.signature)
		b.AddASN1(asn1.SEQUENCE, func(b *cryptobyte.Builder) {
			for _, r := range d.pcrs {
				b.AddASN1(asn1.SEQUENCE, func(b *cryptobyte.Builder) {
					b.AddASN1Uint64(uint64(r.index))
					b.AddASN1OctetString(r.value)
				})
			}
		})
		b.AddASN1OctetString(d.log)
	})
	return finish(&b)
}

// finish returns the bytes of a document that is not too large.
func finish(b *cryptobyte.Builder) ([]byte, error) {
	out, err := b.Bytes()
	if err != nil {
		return nil, err
	}
	if len(out) > MaxDocument {
		return nil, fmt.Errorf("document has %d bytes, at most %d are allowed", len(out), MaxDocument)
	}
	return out, nil
}

// parseDocument reads a document. The result refers to b's memory.
func parseDocument(b []byte) (document, error) {
	if len(b) > MaxDocument {
		return document{}, fmt.Errorf("it has %d bytes, at most %d are allowed", len(b), MaxDocument)
	}
	var (
		d       document
		version int64
		in      = cryptobyte.String(b)
		body    cryptobyte.String
		regs    cryptobyte.String
	)
	if !in.ReadASN1(&body, asn1.SEQUENCE) || !in.Empty() {
		return document{}, errors.New("it is not one DER sequence")
	}
	if !body.ReadASN1Integer(&version) {
		return document{}, errors.New("it has no version")
	}
	if version != documentVersion {
		return document{}, fmt.Errorf("it has version %d, this program reads version %d", version, documentVersion)
	}
	for _, f := range []struct {
		name string
		to   *[]byte
		max  int
	}{
		{"certificate", &d.certificate, maxCertificate},
		{"public key", &d.public, maxPublic},
		{"quote", &d.quote, maxQuote},
		{"signature", &d.signature, maxSignature},
	} {
		if !readOctets(&body, f.to) {
			return document{}, fmt.Errorf("its %s cannot be read", f.name)
		}
		if len(*f.to) > f.max {
			return document{}, fmt.Errorf("its %s has %d bytes, at most %d are allowed", f.name, len(*f.to), f.max)
		}
	}
	if !body.ReadASN1(&regs, asn1.SEQUENCE) {
		return document{}, errors.New("its registers cannot be read")
	}
	for !regs.Empty() {
		var (
			r   cryptobyte.String
			reg register
		)
		if !regs.ReadASN1(&r, asn1.SEQUENCE) || !r.ReadASN1Integer(&reg.index) || !readOctets(&r, &reg.value) || !r.Empty() {
			return document{}, errors.New("its registers cannot be read")
		}
		switch {
		case reg.index > lastPCR:
			return document{}, fmt.Errorf("it carries PCR %d, which does not exist", reg.index)
		case len(reg.value) != pcrSize:
			return document{}, fmt.Errorf("PCR %d in it has %d bytes, want %d", reg.index, len(reg.value), pcrSize)
		case len(d.pcrs) > 0 && d.pcrs[len(d.pcrs)-1].index >= reg.index:
			return document{}, errors.New("its registers are not in ascending order")
		}
		d.pcrs = append(d.pcrs, reg)
	}
	if !readOctets(&body, &d.log) {
		return document{}, errors.New("its event log cannot be read")
	}
	if len(d.log) > maxLog {
		return document{}, fmt.Errorf("its event log has %d bytes, at most %d are allowed", len(d.log), maxLog)
	}
	if !body.Empty() {
		return document{}, errors.New("unexpected data after its last field")
	}
	return d, nil
}

func readOctets(s *cryptobyte.String, out *[]byte) bool {
	return s.ReadASN1((*cryptobyte.String)(out), asn1.OCTET_STRING)
}

// Numbers of the TPM 2.0 Library, part 2.
const (
	tpmGenerated   = 0xff544347
	tpmAttestQuote = 0x8018

	algRSA    = 0x0001
	algSHA256 = 0x000b
	algNull   = 0x0010
	algRSASSA = 0x0014
	algRSAPSS = 0x0016
	algECDSA  = 0x0018
	algECC    = 0x0023

	curveP256 = 0x0003

	handleEndorsement = 0x4000000b

	attrFixedTPM            = 1 << 1
	attrFixedParent         = 1 << 4
	attrSensitiveDataOrigin = 1 << 5
	attrUserWithAuth        = 1 << 6
	attrNoDA                = 1 << 10
	attrRestricted          = 1 << 16
	attrDecrypt             = 1 << 17
	attrSign                = 1 << 18

	// akAttributes make a key that its TPM made, that never leaves it, and that
	// signs nothing but what the TPM itself states.
	akAttributes = attrFixedTPM | attrFixedParent | attrSensitiveDataOrigin | attrRestricted | attrSign
)

// quote is a TPMS_ATTEST of type quote.
type quote struct {
	signer    []byte // qualified name of the key
	extraData []byte
	clock     uint64
	resets    uint32
	restarts  uint32
	safe      uint8
	firmware  uint64
	selected  uint32 // bit i is set if PCR i of the SHA-256 bank is part
	digest    []byte
}

func (q quote) marshal() ([]byte, error) {
	var b cryptobyte.Builder
	b.AddUint32(tpmGenerated)
	b.AddUint16(tpmAttestQuote)
	addSized(&b, q.signer)
	addSized(&b, q.extraData)
	b.AddUint64(q.clock)
	b.AddUint32(q.resets)
	b.AddUint32(q.restarts)
	b.AddUint8(q.safe)
	b.AddUint64(q.firmware)
	b.AddUint32(1)
	b.AddUint16(algSHA256)
	b.AddUint8(3)
	b.AddBytes([]byte{byte(q.selected), byte(q.selected >> 8), byte(q.selected >> 16)})
	addSized(&b, q.digest)
	return b.Bytes()
}

func parseQuote(b []byte) (quote, error) {
	var (
		q     quote
		s     = cryptobyte.String(b)
		magic uint32
		kind  uint16
		banks uint32
		bank  uint16
		mask  cryptobyte.String
	)
	if !s.ReadUint32(&magic) || !s.ReadUint16(&kind) {
		return quote{}, errors.New("it is cut off")
	}
	if magic != tpmGenerated {
		return quote{}, errors.New("it was not generated by a TPM")
	}
	if kind != tpmAttestQuote {
		return quote{}, fmt.Errorf("it is a statement of type %#04x, not a quote", kind)
	}
	if !readSized(&s, &q.signer) || !readSized(&s, &q.extraData) ||
		!s.ReadUint64(&q.clock) || !s.ReadUint32(&q.resets) || !s.ReadUint32(&q.restarts) || !s.ReadUint8(&q.safe) ||
		!s.ReadUint64(&q.firmware) || !s.ReadUint32(&banks) {
		return quote{}, errors.New("it is cut off")
	}
	if q.safe > 1 {
		return quote{}, errors.New("its clock is neither safe nor unsafe")
	}
	if banks != 1 {
		return quote{}, fmt.Errorf("it covers %d banks of registers, want the one of SHA-256", banks)
	}
	if !s.ReadUint16(&bank) || !s.ReadUint8LengthPrefixed(&mask) {
		return quote{}, errors.New("it is cut off")
	}
	if bank != algSHA256 {
		return quote{}, fmt.Errorf("it covers the registers of algorithm %#04x, want SHA-256", bank)
	}
	if len(mask) != 3 {
		return quote{}, fmt.Errorf("it selects registers with %d bytes, want 3", len(mask))
	}
	q.selected = uint32(mask[0]) | uint32(mask[1])<<8 | uint32(mask[2])<<16
	if !readSized(&s, &q.digest) || !s.Empty() {
		return quote{}, errors.New("its digest cannot be read")
	}
	return q, nil
}

// signature is a TPMT_SIGNATURE by one of the three schemes that are accepted.
type signature struct {
	scheme uint16
	r, s   []byte // ECDSA
	rsa    []byte
}

func (sig signature) marshal() ([]byte, error) {
	var b cryptobyte.Builder
	b.AddUint16(sig.scheme)
	b.AddUint16(algSHA256)
	if sig.scheme == algECDSA {
		addSized(&b, sig.r)
		addSized(&b, sig.s)
	} else {
		addSized(&b, sig.rsa)
	}
	return b.Bytes()
}

func parseSignature(b []byte) (signature, error) {
	var (
		sig  signature
		hash uint16
		s    = cryptobyte.String(b)
	)
	if !s.ReadUint16(&sig.scheme) || !s.ReadUint16(&hash) {
		return signature{}, errors.New("it is cut off")
	}
	if hash != algSHA256 {
		return signature{}, fmt.Errorf("it is made with the hash algorithm %#04x, want SHA-256", hash)
	}
	ok := false
	switch sig.scheme {
	case algECDSA:
		ok = readSized(&s, &sig.r) && readSized(&s, &sig.s) && len(sig.r) <= 32 && len(sig.s) <= 32
	case algRSASSA, algRSAPSS:
		ok = readSized(&s, &sig.rsa) && len(sig.rsa) == 256
	default:
		return signature{}, fmt.Errorf("its scheme %#04x is not accepted", sig.scheme)
	}
	if !ok || !s.Empty() {
		return signature{}, errors.New("it cannot be read")
	}
	return sig, nil
}

// verify reports whether sig is key's signature over message.
func (sig signature) verify(key crypto.PublicKey, message []byte) bool {
	h := sha256.Sum256(message)
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		if sig.scheme != algECDSA {
			return false
		}
		var b cryptobyte.Builder
		b.AddASN1(asn1.SEQUENCE, func(b *cryptobyte.Builder) {
			b.AddASN1BigInt(new(big.Int).SetBytes(sig.r))
			b.AddASN1BigInt(new(big.Int).SetBytes(sig.s))
		})
		der, err := b.Bytes()
		return err == nil && ecdsa.VerifyASN1(k, h[:], der)
	case *rsa.PublicKey:
		switch sig.scheme {
		case algRSASSA:
			return rsa.VerifyPKCS1v15(k, crypto.SHA256, h[:], sig.rsa) == nil
		case algRSAPSS:
			return rsa.VerifyPSS(k, crypto.SHA256, h[:], sig.rsa, nil) == nil
		}
	}
	return false
}

// publicArea is a TPMT_PUBLIC of a signing key.
type publicArea struct {
	attributes uint32
	scheme     uint16 // algNull: the caller of the key chooses
	x, y       []byte // P-256, up to 32 bytes each
	modulus    []byte // RSA-2048
	exponent   uint32 // RSA; zero stands for 65537
	raw        []byte
}

// akPublic returns the TPMT_PUBLIC of an attestation key on P-256 with the given
// point. With 32 zero bytes twice it is the template that the key is made from.
func akPublic(x, y []byte) []byte {
	var b cryptobyte.Builder
	b.AddUint16(algECC)
	b.AddUint16(algSHA256) // of its name
	// Without noDA a TPM takes each loss of power after the key was used for a wrong
	// guess at its authorisation, and refuses to quote after a few.
	b.AddUint32(akAttributes | attrUserWithAuth | attrNoDA)
	addSized(&b, nil) // no policy
	b.AddUint16(algNull)
	b.AddUint16(algECDSA)
	b.AddUint16(algSHA256)
	b.AddUint16(curveP256)
	b.AddUint16(algNull)
	addSized(&b, x)
	addSized(&b, y)
	return b.BytesOrPanic() // only lengths above 64 KiB could fail
}

func parsePublic(b []byte) (publicArea, error) {
	var (
		p                  = publicArea{raw: b}
		s                  = cryptobyte.String(b)
		kind, nameAlg, sym uint16
		policy             []byte
	)
	if !s.ReadUint16(&kind) || !s.ReadUint16(&nameAlg) || !s.ReadUint32(&p.attributes) || !readSized(&s, &policy) ||
		!s.ReadUint16(&sym) || !s.ReadUint16(&p.scheme) {
		return publicArea{}, errors.New("it is cut off")
	}
	if nameAlg != algSHA256 {
		return publicArea{}, fmt.Errorf("it is named by the hash algorithm %#04x, want SHA-256", nameAlg)
	}
	if sym != algNull {
		return publicArea{}, errors.New("it is not a signing key")
	}
	if p.scheme != algNull {
		var hash uint16
		if !s.ReadUint16(&hash) || hash != algSHA256 {
			return publicArea{}, errors.New("its scheme does not hash with SHA-256")
		}
	}
	err := fmt.Errorf("its type %#04x is neither RSA nor ECC", kind)
	switch kind {
	case algECC:
		err = p.readECC(s)
	case algRSA:
		err = p.readRSA(s)
	}
	if err != nil {
		return publicArea{}, err
	}
	return p, nil
}

// readECC reads the end of the public area of a P-256 key.
func (p *publicArea) readECC(s cryptobyte.String) error {
	var curve, kdf uint16
	if !s.ReadUint16(&curve) || !s.ReadUint16(&kdf) || !readSized(&s, &p.x) || !readSized(&s, &p.y) || !s.Empty() {
		return errors.New("its point cannot be read")
	}
	if curve != curveP256 || kdf != algNull || len(p.x) > 32 || len(p.y) > 32 {
		return errors.New("its curve is not P-256")
	}
	return nil
}

// readRSA reads the end of the public area of an RSA-2048 key.
func (p *publicArea) readRSA(s cryptobyte.String) error {
	var bits uint16
	if !s.ReadUint16(&bits) || !s.ReadUint32(&p.exponent) || !readSized(&s, &p.modulus) || !s.Empty() {
		return errors.New("its modulus cannot be read")
	}
	if bits != 2048 || len(p.modulus) != 256 {
		return errors.New("its size is not 2048 bits")
	}
	return nil
}

// is reports whether p is the public half that key, from a certificate, names.
func (p publicArea) is(key crypto.PublicKey) bool {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		if p.modulus != nil || k.Curve != elliptic.P256() {
			return false
		}
		point, err := k.Bytes() // 4, x, y
		return err == nil && len(point) == 65 && sameNumber(point[1:33], p.x) && sameNumber(point[33:], p.y)
	case *rsa.PublicKey:
		exponent := int(p.exponent)
		if exponent == 0 {
			exponent = 65537
		}
		return p.modulus != nil && k.E == exponent && k.N.Cmp(new(big.Int).SetBytes(p.modulus)) == 0
	}
	return false
}

// ecdsa returns the public key of a P-256 key.
func (p publicArea) ecdsa() (*ecdsa.PublicKey, error) {
	if p.modulus != nil {
		return nil, errors.New("it is not on P-256")
	}
	point := make([]byte, 65)
	point[0] = 4 // uncompressed
	copy(point[33-len(p.x):], p.x)
	copy(point[65-len(p.y):], p.y)
	return ecdsa.ParseUncompressedPublicKey(elliptic.P256(), point)
}

// restricted returns an error unless its TPM made the key, never exports it, and signs with it
// nothing but what the TPM itself states.
func (p publicArea) restricted() error {
	if p.attributes&akAttributes != akAttributes || p.attributes&attrDecrypt != 0 {
		return fmt.Errorf("the key may sign things that its TPM did not state (attributes %#x)", p.attributes)
	}
	return nil
}

// sameNumber compares big-endian numbers; TPMs may drop leading zeros.
func sameNumber(a, b []byte) bool {
	return bytes.Equal(bytes.TrimLeft(a, "\x00"), bytes.TrimLeft(b, "\x00"))
}

// name returns what a TPM calls the key. It covers every field of the public area.
func (p publicArea) name() []byte { return tpmName(p.raw) }

// qualifiedName returns what a TPM calls the key when it is a primary key of the
// endorsement hierarchy.
func (p publicArea) qualifiedName() []byte {
	return tpmName(append(binary.BigEndian.AppendUint32(nil, handleEndorsement), p.name()...))
}

func tpmName(b []byte) []byte {
	h := sha256.Sum256(b)
	return append(binary.BigEndian.AppendUint16(nil, algSHA256), h[:]...)
}

func addSized(b *cryptobyte.Builder, v []byte) {
	b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes(v) })
}

func readSized(s *cryptobyte.String, out *[]byte) bool {
	return s.ReadUint16LengthPrefixed((*cryptobyte.String)(out))
}
