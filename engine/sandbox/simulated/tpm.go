package simulated

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/crypto/cryptobyte"
)

// tpm is a simulated TPM 2.0: the commands that package attestation uses, in the
// wire format of the specification, over one SHA-256 bank of 24 registers. Its seed and
// its NV data are in a file that its machine can read, so it protects
// nothing. It exists so that everything above it is the same as on real machines.
// It is not safe for concurrent use. Sessions, and what they authorize, are in tpmsession.go.
type tpm struct {
	file     string
	kept     tpmKept
	tpmState *tpmState

	// State that a reset clears.
	started  bool
	pcrs     [24][sha256.Size]byte
	platform []byte // authorisation of the platform hierarchy
	keys     map[uint32]*tpmKey
	sessions map[uint32]*tpmSession
	on       time.Time
}

// tpmKept is the state that survives a reset.
type tpmKept struct {
	Simulated string               `json:"simulated"` // explains the purpose of this file
	Seed      []byte               `json:"seed"`      // of the endorsement hierarchy
	Resets    uint32               `json:"resets"`
	NV        map[string]*tpmIndex `json:"nv"` // by handle in hex
}

type tpmIndex struct {
	Attributes uint32 `json:"attributes"`
	Policy     []byte `json:"policy"`
	Data       []byte `json:"data"`
}

// tpmKey is a loaded object: a key, or a sealed secret.
type tpmKey struct {
	private *ecdsa.PrivateKey
	public  []byte // TPMT_PUBLIC
	sealed  []byte // the secret
}

// Numbers of the specification, part 2.
const (
	tagNoSessions = 0x8001
	tagSessions   = 0x8002

	ccNVUndefineSpace     = 0x122
	ccHierarchyChangeAuth = 0x129
	ccNVDefineSpace       = 0x12a
	ccCreatePrimary       = 0x131
	ccNVWrite             = 0x137
	ccStartup             = 0x144
	ccActivateCredential  = 0x147
	ccNVRead              = 0x14e
	ccPolicySecret        = 0x151
	ccCreate              = 0x153
	ccLoad                = 0x157
	ccQuote               = 0x158
	ccUnseal              = 0x15e
	ccFlushContext        = 0x165
	ccNVReadPublic        = 0x169
	ccStartAuthSession    = 0x176
	ccGetCapability       = 0x17a
	ccPCRRead             = 0x17e
	ccPolicyPCR           = 0x17f
	ccPCRExtend           = 0x182

	handleOwner       = 0x40000001
	handleNull        = 0x40000007
	handleEndorsement = 0x4000000b
	handlePlatform    = 0x4000000c
	handlePassword    = 0x40000009
	hmacSession       = 0x02000000
	policySession     = 0x03000000
	firstTransient    = 0x80000000
	maxTransient      = 3
	maxSessions       = 3

	algAES       = 0x0006
	algKeyedHash = 0x0008
	algSHA256    = 0x000b
	algNull      = 0x0010
	algECDSA     = 0x0018
	algECC       = 0x0023

	// Attributes of objects.
	objectUserWithAuth = 1 << 6
	objectDecrypt      = 1 << 17
	objectSign         = 1 << 18

	nvWritten   = 1 << 29
	nvAuthRead  = 1 << 18
	nvPPWrite   = 1 << 0
	maxNV       = 2048
	quoteMagic  = 0xff544347
	quoteType   = 0x8018
	creationTag = 0x8021
	secretTag   = 0x8023
)

// rc is a response code.
type rc uint32

func (r rc) Error() string { return fmt.Sprintf("TPM response %#x", uint32(r)) }

const (
	rcInitialize   rc = 0x100
	rcFailure      rc = 0x101
	rcCommandCode  rc = 0x143
	rcCommandSize  rc = 0x142
	rcNVRange      rc = 0x146
	rcNVAuth       rc = 0x149
	rcNVDefined    rc = 0x14c
	rcAuthMissing  rc = 0x125
	rcAuthRefused  rc = 0x12f // the object is not used by passwords
	rcObjectMemory rc = 0x902
	rcNoSessions   rc = 0x903
	rcKey          rc = 0x19c // of the first handle
	rcHandle       rc = 0x18b // of the first handle
	rcValue        rc = 0x1c4 // of the first parameter
	rcIntegrity    rc = 0x1df // of the first parameter
	rcPolicyFail   rc = 0x99d // of the first session; sessions are 0x100 apart
	rcBadAuth      rc = 0x9a2 // of the first session
)

// openTPM switches on the TPM that is stored in file, and manufactures it if it does not
// exist.
func openTPM(file string) (*tpm, error) {
	t := &tpm{file: file, keys: map[uint32]*tpmKey{}, sessions: map[uint32]*tpmSession{}, on: time.Now(), tpmState: newTPMState()}
	b, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		t.kept = tpmKept{Simulated: "a simulated TPM: its seed protects nothing", Seed: make([]byte, 32), NV: map[string]*tpmIndex{}}
		if _, err := rand.Read(t.kept.Seed); err != nil {
			return nil, fmt.Errorf("make simulated TPM: %w", err)
		}
	case err != nil:
		return nil, fmt.Errorf("open simulated TPM: %w", err)
	default:
		if err := json.Unmarshal(b, &t.kept); err != nil {
			return nil, fmt.Errorf("open simulated TPM: %w", err)
		}
		if t.kept.NV == nil {
			t.kept.NV = map[string]*tpmIndex{}
		}
	}
	t.kept.Resets++
	if err := t.keep(); err != nil {
		return nil, fmt.Errorf("open simulated TPM: %w", err)
	}
	return t, nil
}

func (t *tpm) keep() error {
	b, err := json.Marshal(t.kept)
	if err != nil {
		return err
	}
	return replaceFile(t.file, b, 0o600)
}

// serve serves clients, one after the other, until l is closed.
func (t *tpm) serve(l net.Listener) error {
	for {
		c, err := l.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		for t.exchange(c) == nil {
		}
		c.Close()
	}
}

// exchange answers one command.
func (t *tpm) exchange(c net.Conn) error {
	header := make([]byte, 10)
	if _, err := io.ReadFull(c, header); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(header[2:])
	if size < 10 || size > 8192 {
		return fmt.Errorf("command announces %d bytes", size)
	}
	body := make([]byte, size-10)
	if _, err := io.ReadFull(c, body); err != nil {
		return err
	}
	if err := t.tpmState.wait(); err != nil {
		return err
	}
	_, err := c.Write(t.respond(binary.BigEndian.Uint16(header), binary.BigEndian.Uint32(header[6:]), body))
	return err
}

// command is a command, parsed up to its specific parameters.
type command struct {
	code    uint32
	handles []uint32
	auths   []*authorization
	params  cryptobyte.String
}

// response is the result of a successful command.
type response struct {
	handle *uint32
	params cryptobyte.Builder
}

// respond runs a command and returns the whole response.
func (t *tpm) respond(tag uint16, code uint32, body []byte) []byte {
	var out response
	c := &command{code: code, params: body}
	err := t.run(tag, c, &out)
	params, perr := out.params.Bytes()
	if err == nil {
		err = perr
	}
	if err != nil {
		r := rcFailure
		errors.As(err, &r)
		b := binary.BigEndian.AppendUint16(nil, tagNoSessions)
		return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(b, 10), uint32(r))
	}
	var b []byte
	if out.handle != nil {
		b = binary.BigEndian.AppendUint32(b, *out.handle)
	}
	if tag == tagSessions {
		params, proofs := t.prove(c, params)
		b = binary.BigEndian.AppendUint32(b, uint32(len(params)))
		b = append(append(b, params...), proofs...)
	} else {
		b = append(b, params...)
	}
	head := binary.BigEndian.AppendUint16(nil, tag)
	head = binary.BigEndian.AppendUint32(head, uint32(10+len(b)))
	return append(binary.BigEndian.AppendUint32(head, 0), b...)
}

// tpmCommands lists how many handles a command has, and how many of them, the first ones, need an
// authorization.
var tpmCommands = map[uint32]struct {
	handles int
	auths   int
	run     func(*tpm, *command, *response) error
}{
	ccStartup:             {0, 0, (*tpm).startup},
	ccGetCapability:       {0, 0, (*tpm).getCapability},
	ccFlushContext:        {0, 0, (*tpm).flushContext}, // its handle is a parameter
	ccPCRRead:             {0, 0, (*tpm).pcrRead},
	ccPCRExtend:           {1, 1, (*tpm).pcrExtend},
	ccHierarchyChangeAuth: {1, 1, (*tpm).hierarchyChangeAuth},
	ccNVReadPublic:        {1, 0, (*tpm).nvReadPublic},
	ccNVDefineSpace:       {1, 1, (*tpm).nvDefineSpace},
	ccNVUndefineSpace:     {2, 1, (*tpm).nvUndefineSpace},
	ccNVWrite:             {2, 1, (*tpm).nvWrite},
	ccNVRead:              {2, 1, (*tpm).nvRead},
	ccCreatePrimary:       {1, 1, (*tpm).createPrimary},
	ccQuote:               {1, 1, (*tpm).quote},
	ccStartAuthSession:    {2, 0, (*tpm).startAuthSession},
	ccPolicySecret:        {2, 1, (*tpm).policySecret},
	ccPolicyPCR:           {1, 0, (*tpm).policyPCR},
	ccActivateCredential:  {2, 2, (*tpm).activateCredential},
	ccCreate:              {1, 1, (*tpm).create},
	ccLoad:                {1, 1, (*tpm).load},
	ccUnseal:              {1, 1, (*tpm).unseal},
}

func (t *tpm) run(tag uint16, c *command, out *response) error {
	spec, ok := tpmCommands[c.code]
	if !ok {
		return rcCommandCode
	}
	if !t.started && c.code != ccStartup {
		return rcInitialize
	}
	for range spec.handles {
		var h uint32
		if !c.params.ReadUint32(&h) {
			return rcCommandSize
		}
		c.handles = append(c.handles, h)
	}
	if tag == tagSessions {
		if err := c.readAuths(); err != nil {
			return err
		}
	}
	if len(c.auths) < spec.auths {
		return rcAuthMissing
	}
	if err := t.authorize(c, spec.auths); err != nil {
		return err
	}
	return spec.run(t, c, out)
}

func (t *tpm) startup(c *command, _ *response) error {
	if t.started {
		return rcInitialize
	}
	t.started = true
	return nil
}

// getCapability lists the loaded objects, or the sessions.
func (t *tpm) getCapability(c *command, out *response) error {
	var capability, property, count uint32
	if !c.params.ReadUint32(&capability) || !c.params.ReadUint32(&property) || !c.params.ReadUint32(&count) {
		return rcCommandSize
	}
	if capability != 1 || property>>24 != firstTransient>>24 && property>>24 != hmacSession>>24 {
		return rcValue
	}
	out.params.AddUint8(0) // no more
	out.params.AddUint32(capability)
	if property>>24 == hmacSession>>24 {
		out.params.AddUint32(uint32(len(t.sessions)))
		for _, h := range slices.Sorted(maps.Keys(t.sessions)) {
			out.params.AddUint32(h)
		}
		return nil
	}
	out.params.AddUint32(uint32(len(t.keys)))
	for h := uint32(firstTransient); h < firstTransient+maxTransient; h++ {
		if t.keys[h] != nil {
			out.params.AddUint32(h)
		}
	}
	return nil
}

func (t *tpm) flushContext(c *command, _ *response) error {
	var h uint32
	if !c.params.ReadUint32(&h) {
		return rcCommandSize
	}
	if t.keys[h] == nil && t.sessions[h] == nil {
		return rcHandle
	}
	delete(t.keys, h)
	delete(t.sessions, h)
	return nil
}

// readSelection reads a TPML_PCR_SELECTION of the SHA-256 bank.
func readSelection(s *cryptobyte.String) (indices []uint, err error) {
	var count uint32
	if !s.ReadUint32(&count) {
		return nil, rcCommandSize
	}
	for range count {
		var alg uint16
		var bits cryptobyte.String
		if !s.ReadUint16(&alg) || !s.ReadUint8LengthPrefixed(&bits) {
			return nil, rcCommandSize
		}
		if alg != algSHA256 || len(bits) > 3 {
			return nil, rcValue
		}
		for i := range uint(8 * len(bits)) {
			if bits[i/8]&(1<<(i%8)) != 0 {
				indices = append(indices, i)
			}
		}
	}
	return indices, nil
}

func addSelection(b *cryptobyte.Builder, indices []uint) {
	var bits [3]byte
	for _, i := range indices {
		bits[i/8] |= 1 << (i % 8)
	}
	b.AddUint32(1)
	b.AddUint16(algSHA256)
	b.AddUint8(3)
	b.AddBytes(bits[:])
}

func (t *tpm) pcrRead(c *command, out *response) error {
	indices, err := readSelection(&c.params)
	if err != nil {
		return err
	}
	indices = indices[:min(len(indices), 8)]
	out.params.AddUint32(0) // the update counter is unused
	addSelection(&out.params, indices)
	out.params.AddUint32(uint32(len(indices)))
	for _, i := range indices {
		addSized(&out.params, t.pcrs[i][:])
	}
	return nil
}

func (t *tpm) pcrExtend(c *command, _ *response) error {
	var count uint32
	var alg uint16
	var digest []byte
	if !c.params.ReadUint32(&count) || !c.params.ReadUint16(&alg) || !c.params.ReadBytes(&digest, sha256.Size) {
		return rcCommandSize
	}
	i := c.handles[0]
	if int64(i) >= int64(len(t.pcrs)) {
		return rcHandle
	}
	if count != 1 || alg != algSHA256 {
		return rcValue
	}
	t.pcrs[i] = sha256.Sum256(append(t.pcrs[i][:], digest...))
	return nil
}

func (t *tpm) hierarchyChangeAuth(c *command, _ *response) error {
	var auth cryptobyte.String
	if !c.params.ReadUint16LengthPrefixed(&auth) {
		return rcCommandSize
	}
	if c.handles[0] != handlePlatform {
		return rcHandle
	}
	t.platform = append([]byte{}, auth...)
	return nil
}

func nvKey(h uint32) string { return strconv.FormatUint(uint64(h), 16) }

// public is the TPMS_NV_PUBLIC of an index.
func (i *tpmIndex) public(h uint32) []byte {
	var b cryptobyte.Builder
	b.AddUint32(h)
	b.AddUint16(algSHA256)
	b.AddUint32(i.Attributes)
	addSized(&b, i.Policy)
	b.AddUint16(uint16(len(i.Data)))
	return b.BytesOrPanic() // only lengths above 64 KiB could fail
}

// nameOf returns the Name of an object or index: a digest of its public area.
func nameOf(public []byte) []byte {
	d := sha256.Sum256(public)
	return append([]byte{0, algSHA256}, d[:]...)
}

func (t *tpm) nvReadPublic(c *command, out *response) error {
	i := t.kept.NV[nvKey(c.handles[0])]
	if i == nil {
		return rcHandle
	}
	p := i.public(c.handles[0])
	addSized(&out.params, p)
	addSized(&out.params, nameOf(p))
	return nil
}

func (t *tpm) nvDefineSpace(c *command, _ *response) error {
	var auth, info, policy cryptobyte.String
	var index, attributes uint32
	var alg, size uint16
	if !c.params.ReadUint16LengthPrefixed(&auth) || !c.params.ReadUint16LengthPrefixed(&info) || !info.ReadUint32(&index) ||
		!info.ReadUint16(&alg) || !info.ReadUint32(&attributes) || !info.ReadUint16LengthPrefixed(&policy) || !info.ReadUint16(&size) {
		return rcCommandSize
	}
	switch {
	case c.handles[0] != handlePlatform || index>>24 != 1:
		return rcHandle
	case alg != algSHA256 || size > maxNV || len(auth) > 0:
		return rcValue
	case t.kept.NV[nvKey(index)] != nil:
		return rcNVDefined
	}
	t.kept.NV[nvKey(index)] = &tpmIndex{Attributes: attributes, Policy: append([]byte{}, policy...), Data: make([]byte, size)}
	return t.keep()
}

func (t *tpm) nvUndefineSpace(c *command, _ *response) error {
	if c.handles[0] != handlePlatform || t.kept.NV[nvKey(c.handles[1])] == nil {
		return rcHandle
	}
	delete(t.kept.NV, nvKey(c.handles[1]))
	return t.keep()
}

func (t *tpm) nvWrite(c *command, _ *response) error {
	var data cryptobyte.String
	var offset uint16
	if !c.params.ReadUint16LengthPrefixed(&data) || !c.params.ReadUint16(&offset) {
		return rcCommandSize
	}
	i := t.kept.NV[nvKey(c.handles[1])]
	switch {
	case i == nil:
		return rcHandle
	case c.handles[0] != handlePlatform || i.Attributes&nvPPWrite == 0:
		return rcNVAuth
	case int(offset)+len(data) > len(i.Data):
		return rcNVRange
	}
	copy(i.Data[offset:], data)
	i.Attributes |= nvWritten
	return t.keep()
}

func (t *tpm) nvRead(c *command, out *response) error {
	var size, offset uint16
	if !c.params.ReadUint16(&size) || !c.params.ReadUint16(&offset) {
		return rcCommandSize
	}
	i := t.kept.NV[nvKey(c.handles[1])]
	switch {
	case i == nil:
		return rcHandle
	case c.handles[0] != c.handles[1] || i.Attributes&nvAuthRead == 0:
		return rcNVAuth
	case int(offset)+int(size) > len(i.Data):
		return rcNVRange
	}
	addSized(&out.params, i.Data[offset:offset+size])
	return nil
}

// akTail is the length of the unique part, the point, at the end of a template.
const akTail = 2 * (2 + 32)

// createPrimary makes a key on P-256 of the endorsement or owner hierarchy, always the same for
// the same template.
func (t *tpm) createPrimary(c *command, out *response) error {
	var sensitive, template, outside cryptobyte.String
	if !c.params.ReadUint16LengthPrefixed(&sensitive) || !c.params.ReadUint16LengthPrefixed(&template) || !c.params.ReadUint16LengthPrefixed(&outside) {
		return rcCommandSize
	}
	hierarchy := c.handles[0]
	if hierarchy != handleEndorsement && hierarchy != handleOwner {
		return rcHandle
	}
	// Only keys on P-256 with SHA-256 as name algorithm are simulated.
	if len(template) < akTail+10 || binary.BigEndian.Uint16(template) != algECC || binary.BigEndian.Uint16(template[2:]) != algSHA256 {
		return rcValue
	}
	key := &tpmKey{}
	for n := byte(0); key.private == nil; n++ { // a number above the curve's order is one in four billion
		mac := hmac.New(sha256.New, t.kept.Seed)
		mac.Write(template)
		if hierarchy == handleOwner {
			mac.Write([]byte("owner"))
		}
		mac.Write([]byte{n})
		key.private, _ = ecdsa.ParseRawPrivateKey(elliptic.P256(), mac.Sum(nil))
	}
	point, err := key.private.PublicKey.Bytes()
	if err != nil {
		return err
	}
	var unique cryptobyte.Builder
	addSized(&unique, point[1:33])
	addSized(&unique, point[33:])
	key.public = append(append([]byte{}, template[:len(template)-akTail]...), unique.BytesOrPanic()...)
	handle, err := t.loaded(key)
	if err != nil {
		return err
	}
	out.handle = &handle
	addSized(&out.params, key.public)
	addCreation(&out.params, hierarchy, binary.BigEndian.AppendUint32(nil, hierarchy), outside)
	addSized(&out.params, nameOf(key.public))
	return nil
}

// loaded gives an object a handle.
func (t *tpm) loaded(key *tpmKey) (uint32, error) {
	for h := uint32(firstTransient); h < firstTransient+maxTransient; h++ {
		if t.keys[h] == nil {
			t.keys[h] = key
			return h, nil
		}
	}
	return 0, rcObjectMemory
}

// addCreation adds what a TPM states about the creation of an object: the data, their digest and a ticket.
func addCreation(b *cryptobyte.Builder, hierarchy uint32, parent, outside []byte) {
	var creation cryptobyte.Builder
	creation.AddUint32(0) // no registers
	addSized(&creation, nil)
	creation.AddUint8(1) // locality zero
	creation.AddUint16(algNull)
	addSized(&creation, parent)
	addSized(&creation, parent)
	addSized(&creation, outside)
	data := creation.BytesOrPanic()
	digest := sha256.Sum256(data)
	addSized(b, data)
	addSized(b, digest[:])
	b.AddUint16(creationTag)
	b.AddUint32(hierarchy)
	addSized(b, nil)
}

func (t *tpm) quote(c *command, out *response) error {
	var extra cryptobyte.String
	var scheme uint16
	if !c.params.ReadUint16LengthPrefixed(&extra) || !c.params.ReadUint16(&scheme) {
		return rcCommandSize
	}
	if scheme != algNull {
		return rcValue
	}
	indices, err := readSelection(&c.params)
	if err != nil {
		return err
	}
	key := t.keys[c.handles[0]]
	switch {
	case key == nil:
		return rcHandle
	case key.attributes()&objectSign == 0:
		return rcKey
	}
	signer := append(binary.BigEndian.AppendUint32(nil, handleEndorsement), nameOf(key.public)...)
	var b cryptobyte.Builder
	b.AddUint32(quoteMagic)
	b.AddUint16(quoteType)
	addSized(&b, nameOf(signer)) // qualified: the path from the hierarchy
	addSized(&b, extra)
	b.AddUint64(uint64(time.Since(t.on).Milliseconds()))
	b.AddUint32(t.kept.Resets)
	b.AddUint32(0)
	b.AddUint8(1)
	b.AddUint64(0) // version of the firmware: there is none
	addSelection(&b, indices)
	addSized(&b, t.registers(indices))
	quoted := b.BytesOrPanic()
	digest := sha256.Sum256(quoted)
	r, s, err := ecdsa.Sign(rand.Reader, key.private, digest[:])
	if err != nil {
		return err
	}
	addSized(&out.params, quoted)
	out.params.AddUint16(algECDSA)
	out.params.AddUint16(algSHA256)
	addSized(&out.params, r.FillBytes(make([]byte, 32)))
	addSized(&out.params, s.FillBytes(make([]byte, 32)))
	return nil
}

// registers returns the digest of registers.
func (t *tpm) registers(indices []uint) []byte {
	h := sha256.New()
	for _, i := range indices {
		h.Write(t.pcrs[i][:])
	}
	return h.Sum(nil)
}

func addSized(b *cryptobyte.Builder, v []byte) {
	b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes(v) })
}

// replaceFile replaces a file atomically.
func replaceFile(path string, data []byte, mode fs.FileMode) error {
	return replaceFileFrom(path, bytes.NewReader(data), mode)
}

// replaceFileFrom writes a file with what from has. The kernel copies it without this process if from is a file.
func replaceFileFrom(path string, from io.Reader, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	_, err = io.Copy(f, from)
	if err = errors.Join(err, f.Chmod(mode), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}
