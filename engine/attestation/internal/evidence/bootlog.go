package evidence

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"
)

// Numbers of registers; see pcrName.
const pcrSecureBoot = 7

// bootLog is the part of an event log that a verifier can judge. It is without descriptions and
// digests of other algorithms, so each of its bytes has a meaning:
//
//	BootLog ::= SEQUENCE {
//	  locality   INTEGER, -- from which the TPM was started
//	  registers  SEQUENCE OF SEQUENCE { index INTEGER, digests OCTET STRING },
//	  secureBoot OCTET STRING -- data of the first event of register 7
//	}
//
// It has the registers of firmware and boot loaders. Those that an operating system extends after
// them, beyond the event log, are left out.
type bootLog struct {
	locality   byte
	registers  []events
	secureBoot []byte
}

// events are the SHA-256 digests that a register was extended with, one after the other.
type events struct {
	index   uint32
	digests []byte
}

// loggedPCRs are the registers that firmware and boot loaders alone extend: 0 to 9, and 14 for the
// machine owner's keys of shim.
func loggedPCRs() []uint32 { return []uint32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 14} }

// maxVariable bounds the data of the event that states whether Secure Boot is on, in bytes.
const maxVariable = 128

// newBootLog reads an event log of firmware.
func newBootLog(log []byte) (bootLog, error) {
	var b bootLog
	if len(log) == 0 {
		return b, errors.New("there is none")
	}
	digests := map[uint32][]byte{}
	err := readLog(log, func(e logEvent) {
		if e.kind == eventNoAction {
			b.locality = e.locality
			return
		}
		if e.pcr == pcrSecureBoot && digests[e.pcr] == nil {
			b.secureBoot = e.data
		}
		digests[e.pcr] = append(digests[e.pcr], e.digest...)
	})
	if err != nil {
		return b, err
	}
	for _, i := range loggedPCRs() {
		if digests[i] != nil {
			b.registers = append(b.registers, events{i, digests[i]})
		}
	}
	if len(b.secureBoot) > maxVariable {
		return b, fmt.Errorf("its first event of %s has %d bytes, at most %d are allowed", pcrName(pcrSecureBoot), len(b.secureBoot), maxVariable)
	}
	return b, nil
}

func (b bootLog) marshal() ([]byte, error) {
	var out cryptobyte.Builder
	out.AddASN1(asn1.SEQUENCE, func(out *cryptobyte.Builder) {
		out.AddASN1Uint64(uint64(b.locality))
		out.AddASN1(asn1.SEQUENCE, func(out *cryptobyte.Builder) {
			for _, r := range b.registers {
				out.AddASN1(asn1.SEQUENCE, func(out *cryptobyte.Builder) {
					out.AddASN1Uint64(uint64(r.index))
					out.AddASN1OctetString(r.digests)
				})
			}
		})
		out.AddASN1OctetString(b.secureBoot)
	})
	return out.Bytes()
}

// parseBootLog reads what marshal returned. The result refers to der's memory.
func parseBootLog(der []byte) (bootLog, error) {
	var (
		b          bootLog
		in         = cryptobyte.String(der)
		body, regs cryptobyte.String
		locality   uint64
	)
	if !in.ReadASN1(&body, asn1.SEQUENCE) || !in.Empty() || !body.ReadASN1Integer(&locality) || !body.ReadASN1(&regs, asn1.SEQUENCE) {
		return b, errors.New("it cannot be read")
	}
	if locality > 255 {
		return b, fmt.Errorf("locality %d does not exist", locality)
	}
	b.locality = byte(locality)
	for !regs.Empty() {
		var (
			one cryptobyte.String
			e   events
		)
		if !regs.ReadASN1(&one, asn1.SEQUENCE) || !one.ReadASN1Integer(&e.index) || !readOctets(&one, &e.digests) || !one.Empty() {
			return b, errors.New("its registers cannot be read")
		}
		switch {
		case !slices.Contains(loggedPCRs(), e.index):
			return b, fmt.Errorf("it has events of %s, which an operating system extends", pcrName(e.index))
		case len(e.digests) == 0 || len(e.digests)%pcrSize != 0:
			return b, fmt.Errorf("digests of %s in it have %d bytes", pcrName(e.index), len(e.digests))
		case len(b.registers) > 0 && b.registers[len(b.registers)-1].index >= e.index:
			return b, errors.New("its registers are not in ascending order")
		}
		b.registers = append(b.registers, e)
	}
	if !readOctets(&body, &b.secureBoot) || !body.Empty() {
		return b, errors.New("its state of Secure Boot cannot be read")
	}
	return b, nil
}

// explains returns an error unless pcrs are the registers after the boot that b describes. A
// register without events must be zero.
func (b bootLog) explains(pcrs map[uint32][]byte) error {
	left := b.registers
	for _, i := range loggedPCRs() {
		want := make([]byte, pcrSize)
		if len(left) > 0 && left[0].index == i {
			if i == 0 {
				want = startValue(b.locality)
			}
			for d := range slices.Chunk(left[0].digests, pcrSize) {
				want = extend(want, d)
			}
			left = left[1:]
		} else if i == 0 && b.locality != 0 {
			return errors.New("it names the locality of a start without events")
		}
		if subtle.ConstantTimeCompare(pcrs[i], want) != 1 {
			return fmt.Errorf("%s is %x, its events add up to %x", pcrName(i), pcrs[i], want)
		}
	}
	return nil
}

// secureBootVariable starts the data of the event that firmware measures first into register 7, by
// the TCG's PC Client Platform Firmware Profile: the identifier of the UEFI global variables.
var secureBootVariable = []byte{0x61, 0xdf, 0xe4, 0x8b, 0xca, 0x93, 0xd2, 0x11, 0xaa, 0x0d, 0x00, 0xe0, 0x98, 0x03, 0x2b, 0x8c}

// secureBootName is the name of the variable in UTF-16.
var secureBootName = []byte("S\x00e\x00c\x00u\x00r\x00e\x00B\x00o\x00o\x00t\x00")

// secureBootEnabled reports whether firmware started with Secure Boot. Nothing that runs later can
// change that, because the first event of a register cannot be replaced. The label of the event
// is not measured, so its data alone counts.
func (b bootLog) secureBootEnabled() (bool, error) {
	n := slices.IndexFunc(b.registers, func(e events) bool { return e.index == pcrSecureBoot })
	if n < 0 {
		return false, fmt.Errorf("it has no event of %s", pcrName(pcrSecureBoot))
	}
	sum := sha256.Sum256(b.secureBoot)
	if subtle.ConstantTimeCompare(sum[:], b.registers[n].digests[:pcrSize]) != 1 {
		return false, fmt.Errorf("its state of Secure Boot is not what firmware measured into %s first", pcrName(pcrSecureBoot))
	}
	v := b.secureBoot
	head := len(secureBootVariable) + 16
	if len(v) < head || !bytes.HasPrefix(v, secureBootVariable) {
		return false, errors.New("its first event of register 7 is of no UEFI global variable")
	}
	chars, size := binary.LittleEndian.Uint64(v[head-16:]), binary.LittleEndian.Uint64(v[head-8:])
	name, value := v[head:], []byte(nil)
	if chars != uint64(len(secureBootName)/2) || !bytes.HasPrefix(name, secureBootName) {
		return false, errors.New("its first event of register 7 is not of the variable SecureBoot")
	}
	value = name[len(secureBootName):]
	switch {
	case uint64(len(value)) != size || size > 1 || size == 1 && value[0] > 1:
		return false, fmt.Errorf("its value of the variable SecureBoot is %x", value)
	case size == 0: // firmware without the variable
		return false, nil
	}
	return value[0] == 1, nil
}
