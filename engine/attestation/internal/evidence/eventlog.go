package evidence

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// The event log is in the crypto-agile format of the TCG PC Client Platform
// Firmware Profile, as firmware writes it and as tools read it: one
// TCG_PCClientPCREvent that names the digest algorithms, then one
// TCG_PCR_EVENT2 for each thing measured. All numbers are little-endian.

// maxEventData bounds what an event that we write says, in bytes; maxEvents and
// maxAlgorithms bound what a log that we read holds.
const (
	maxEventData  = 1024
	maxEvents     = 4096
	maxAlgorithms = 8
)

const (
	eventNoAction = 0x03 // describes the log, is not measured
	eventIPL      = 0x0d // initial program load: what a boot loader measures
)

// signatures of events that describe the log; each is 16 bytes.
const (
	specID          = "Spec ID Event03\x00"
	startupLocality = "StartupLocality\x00"
)

// newEventLog returns a log without events, for SHA-256 alone.
func newEventLog() []byte {
	spec := append([]byte(specID),
		0, 0, 0, 0, // platform class: client
		0, 2, 0, // minor and major version, errata
		2, // size of UINTN: 8 bytes
	)
	spec = binary.LittleEndian.AppendUint32(spec, 1) // algorithms
	spec = binary.LittleEndian.AppendUint16(spec, algSHA256)
	spec = binary.LittleEndian.AppendUint16(spec, pcrSize)
	spec = append(spec, 0) // no vendor information

	log := binary.LittleEndian.AppendUint32(nil, 0) // PCR
	log = binary.LittleEndian.AppendUint32(log, eventNoAction)
	log = append(log, make([]byte, 20)...) // SHA-1 of nothing
	log = binary.LittleEndian.AppendUint32(log, uint32(len(spec)))
	return append(log, spec...)
}

// appendEvent adds e, which must have passed its check, to log.
func appendEvent(log []byte, e MeasuredEvent) []byte {
	log = binary.LittleEndian.AppendUint32(log, e.PCR)
	log = binary.LittleEndian.AppendUint32(log, eventIPL)
	log = binary.LittleEndian.AppendUint32(log, 1)
	log = binary.LittleEndian.AppendUint16(log, algSHA256)
	log = append(log, e.Digest...)
	log = binary.LittleEndian.AppendUint32(log, uint32(len(e.Description)))
	return append(log, e.Description...)
}

// replayLog returns what the SHA-256 registers that log covers hold after the
// boot that it describes. An empty log covers none.
func replayLog(log []byte) (map[uint32][]byte, error) {
	if len(log) == 0 {
		return nil, nil
	}
	pcrs := map[uint32][]byte{}
	if err := readLog(log, func(e logEvent) {
		old := pcrs[e.pcr]
		switch {
		case e.kind == eventNoAction:
			pcrs[0] = startValue(e.locality)
			return
		case old == nil:
			old = make([]byte, pcrSize)
		}
		pcrs[e.pcr] = extend(old, e.digest)
	}); err != nil {
		return nil, err
	}
	return pcrs, nil
}

// startValue is PCR 0 after a start from a locality: a TPM sets the last byte.
func startValue(locality byte) []byte {
	v := make([]byte, pcrSize)
	v[pcrSize-1] = locality
	return v
}

// logEvent is an event that changes a register, or the start of the TPM.
type logEvent struct {
	pcr uint32
	// kind is eventNoAction for the start of the TPM from a locality.
	kind         uint32
	digest, data []byte
	locality     byte
}

// readLog calls each for the events of a log, in order. The start of the TPM comes before the
// events of PCR 0.
func readLog(log []byte, each func(logEvent)) error {
	r := reader{b: log}
	sizes, err := r.specID()
	if err != nil {
		return err
	}
	began := false // PCR 0 has a value
	for n := 1; len(r.b) > 0; n++ {
		if n > maxEvents {
			return fmt.Errorf("it has more than %d events", maxEvents)
		}
		e, err := r.event(n, sizes)
		if err != nil {
			return err
		}
		if e.kind == eventNoAction {
			// Started from another locality than 0, a TPM sets the last byte of PCR 0.
			if len(e.data) == len(startupLocality)+1 && string(e.data[:len(startupLocality)]) == startupLocality {
				if began {
					return fmt.Errorf("event %d sets the startup locality after PCR 0 was extended", n)
				}
				began = true
				each(logEvent{kind: eventNoAction, locality: e.data[len(e.data)-1]})
			}
			continue
		}
		if e.pcr > lastPCR {
			return fmt.Errorf("event %d is for PCR %d, which does not exist", n, e.pcr)
		}
		if e.digest == nil {
			return fmt.Errorf("event %d has no SHA-256 digest", n)
		}
		began = began || e.pcr == 0
		each(e)
	}
	return nil
}

// event reads the event with number n.
func (r *reader) event(n int, sizes map[uint16]uint16) (logEvent, error) {
	e := logEvent{pcr: r.uint32(), kind: r.uint32()}
	count := r.uint32()
	if int64(count) > int64(len(sizes)) {
		return e, fmt.Errorf("event %d has %d digests, the log names %d algorithms", n, count, len(sizes))
	}
	for range count {
		alg := r.uint16()
		size, ok := sizes[alg]
		if !ok {
			if r.short {
				break
			}
			return e, fmt.Errorf("event %d has a digest of algorithm %#04x, which the log does not name", n, alg)
		}
		d := r.bytes(uint32(size))
		if alg == algSHA256 {
			if e.digest != nil {
				return e, fmt.Errorf("event %d has two SHA-256 digests", n)
			}
			e.digest = d
		}
	}
	e.data = r.bytes(r.uint32())
	if r.short {
		return e, fmt.Errorf("event %d is cut off", n)
	}
	return e, nil
}

// reader takes little-endian numbers off the front of b. After it ran short,
// everything it returns is zero.
type reader struct {
	b     []byte
	short bool
}

func (r *reader) bytes(n uint32) []byte {
	if uint64(n) > uint64(len(r.b)) {
		r.short, r.b = true, nil
		return nil
	}
	v := r.b[:n]
	r.b = r.b[n:]
	return v
}

func (r *reader) uint8() uint8 {
	if v := r.bytes(1); v != nil {
		return v[0]
	}
	return 0
}

func (r *reader) uint16() uint16 {
	if v := r.bytes(2); v != nil {
		return binary.LittleEndian.Uint16(v)
	}
	return 0
}

func (r *reader) uint32() uint32 {
	if v := r.bytes(4); v != nil {
		return binary.LittleEndian.Uint32(v)
	}
	return 0
}

// specID reads the event that opens a crypto-agile log, and returns the size of
// the digests of each algorithm.
func (r *reader) specID() (map[uint16]uint16, error) {
	_, kind := r.uint32(), r.uint32()
	r.bytes(20)
	spec := reader{b: r.bytes(r.uint32())}
	if r.short {
		return nil, errors.New("its first event is cut off")
	}
	if kind != eventNoAction || string(spec.bytes(uint32(len(specID)))) != specID {
		return nil, errors.New("it is not in the crypto-agile format")
	}
	spec.bytes(8) // platform class, version, errata, size of UINTN
	count := spec.uint32()
	if count > maxAlgorithms {
		return nil, fmt.Errorf("it names %d digest algorithms, at most %d are allowed", count, maxAlgorithms)
	}
	sizes := map[uint16]uint16{}
	for range count {
		alg, size := spec.uint16(), spec.uint16()
		if size == 0 || size > 64 {
			return nil, fmt.Errorf("digests of algorithm %#04x in it have %d bytes", alg, size)
		}
		if _, twice := sizes[alg]; twice {
			return nil, fmt.Errorf("it names the algorithm %#04x twice", alg)
		}
		sizes[alg] = size
	}
	spec.bytes(uint32(spec.uint8()))
	if spec.short || len(spec.b) > 0 {
		return nil, errors.New("its first event cannot be read")
	}
	if sizes[algSHA256] != pcrSize {
		return nil, errors.New("it has no SHA-256 digests")
	}
	return sizes, nil
}
