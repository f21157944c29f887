package evidence

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
)

// pcrCluster is the register that carries the cluster ID.
const pcrCluster = 15

// quotedPCRs is how many registers a quote covers, counted from zero. The ones
// above are for debugging and late launch; software may reset them.
const quotedPCRs = 16

// extend returns what a SHA-256 register holds after digest was added to old.
func extend(old, digest []byte) []byte {
	h := sha256.New()
	h.Write(old)
	h.Write(digest)
	return h.Sum(nil)
}

// ClusterIDPCR returns what PCR 15 holds on a member of the cluster: a zero
// register extended once with SHA-256(clusterID).
func ClusterIDPCR(clusterID []byte) []byte {
	return extend(make([]byte, pcrSize), clusterIDDigest(clusterID))
}

func clusterIDDigest(clusterID []byte) []byte {
	d := sha256.Sum256(clusterID)
	return d[:]
}

// PCR15 is a validator's rule for the register with the cluster ID. The zero value is
// PCR15Zero, the strictest: an unused machine.
type PCR15 struct {
	member bool
	want   []byte // nil with member: any cluster
}

// PCR15Zero requires a machine that belongs to no cluster yet.
func PCR15Zero() PCR15 { return PCR15{} }

// PCR15ClusterID requires a member of exactly this cluster.
func PCR15ClusterID(clusterID []byte) PCR15 {
	return PCR15{member: true, want: ClusterIDPCR(clusterID)}
}

// PCR15Member requires a member of some cluster. It is for callers without the cluster's ID;
// they must verify the machine's owner by [Identity].
func PCR15Member() PCR15 { return PCR15{member: true} }

// check returns an error that wraps ErrMember if got breaks the rule.
func (r PCR15) check(got []byte) error {
	zero := subtle.ConstantTimeCompare(got, make([]byte, pcrSize)) == 1
	switch {
	case !r.member && !zero:
		return fmt.Errorf("%w: the machine already belongs to a cluster: PCR 15 (cluster ID) is %x, expected zero", ErrMember, got)
	case r.member && zero:
		return fmt.Errorf("%w: the machine belongs to no cluster: PCR 15 (cluster ID) is zero", ErrMember)
	case r.want != nil && subtle.ConstantTimeCompare(got, r.want) != 1:
		return fmt.Errorf("%w: the machine belongs to another cluster: PCR 15 (cluster ID) is %x, expected %x", ErrMember, got, r.want)
	}
	return nil
}

// MeasuredEvent is one measurement of firmware or a boot loader.
type MeasuredEvent struct {
	PCR uint32 `json:"pcr"`
	// Digest is the SHA-256 of what was measured, 32 bytes.
	Digest []byte `json:"digest"`
	// Description is for users; it is not measured.
	Description string `json:"description"`
}

// check refuses events that cannot be measured.
func (e MeasuredEvent) check() error {
	if e.PCR >= quotedPCRs || e.PCR == pcrCluster {
		return fmt.Errorf("PCR %d is not for measuring a boot", e.PCR)
	}
	if len(e.Digest) != sha256.Size {
		return fmt.Errorf("digest of %q has %d bytes, want %d", e.Description, len(e.Digest), sha256.Size)
	}
	if len(e.Description) > maxEventData {
		return fmt.Errorf("description of an event of PCR %d has %d bytes, at most %d are allowed", e.PCR, len(e.Description), maxEventData)
	}
	return nil
}

// PredictPCRs returns what the registers that events name hold after a boot that
// measures events in this order. Registers without an event are left out.
func PredictPCRs(events []MeasuredEvent) map[uint32][]byte {
	pcrs := map[uint32][]byte{}
	for _, e := range events {
		old, ok := pcrs[e.PCR]
		if !ok {
			old = make([]byte, pcrSize)
		}
		pcrs[e.PCR] = extend(old, e.Digest)
	}
	return pcrs
}

func isZero(pcr []byte) bool { return len(bytes.Trim(pcr, "\x00")) == 0 }
