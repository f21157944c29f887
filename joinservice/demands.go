package joinservice

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"constellation/engine/attestation"
)

// snapshot is what the cluster demands of joining machines at one moment. It never
// changes: a connection that has begun is judged by what held when it began.
type snapshot struct {
	validator attestation.Validator
	clusterID []byte
	// generations is how many demands there are; a machine must satisfy one.
	generations int
}

// demandsRetry is how long a join-config that cannot be used is left alone, unless
// it changes. The TPM may be busy, the cloud's roots may come later.
const demandsRetry = 5 * time.Second

// watchDemands keeps the snapshot equal to the ConfigMap join-config until ctx ends,
// and calls ready once there is one. A ConfigMap that cannot be used leaves the
// last good snapshot in place and is tried again.
func (s *Server) watchDemands(ctx context.Context, ready func()) error {
	if !s.kube.synced(ctx) {
		return nil
	}
	var used map[string]string
	retry := time.NewTimer(0)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.kube.changed:
		case <-retry.C:
		}
		data := s.kube.config()
		if data == nil || used != nil && maps.Equal(used, data) {
			continue // the next change wakes us
		}
		next, err := newSnapshot(ctx, data, s.issuer)
		if err != nil {
			if ctx.Err() == nil {
				s.log.Error("join-config not usable", "err", err, "retry_in", demandsRetry, "last_good_kept", s.snapshot.Load() != nil)
			}
			retry.Reset(demandsRetry)
			continue
		}
		used = data
		s.snapshot.Store(next)
		s.log.Info("join-config loaded", "variant", string(next.validator.Variant()), "generations", next.generations)
		ready()
	}
}

// newSnapshot reads join-config. The measurements apply to machines in the same
// project of the cloud as this machine, which issuer proves to be a member of the
// cluster that join-config names.
func newSnapshot(ctx context.Context, data map[string]string, issuer attestation.Issuer) (*snapshot, error) {
	newest, others, err := accepted(data)
	if err != nil {
		return nil, err
	}
	id, err := hex.DecodeString(data["clusterID"])
	if err != nil || len(id) != 32 {
		return nil, errors.New("read clusterID: want 32 bytes in hex")
	}
	roots, err := attestation.ParseRoots([]byte(data["trustRoots"]))
	if err != nil {
		return nil, fmt.Errorf("read trustRoots: %w", err)
	}
	// What this machine runs is not the question here: during an upgrade join-config
	// already describes the next image.
	lenient := attestation.Measurements{}
	for pcr, m := range newest {
		lenient[pcr] = attestation.Measurement{Expected: m.Expected, WarnOnly: true}
	}
	nonce := make([]byte, attestation.MaxUserData)
	if _, err := rand.Read(nonce); err != nil {
		return nil, err
	}
	doc, err := issuer.Issue(ctx, nonce)
	if err != nil {
		return nil, fmt.Errorf("attest this machine: %w", err)
	}
	self, err := attestation.NewTPMValidator(roots, lenient, attestation.Options{PCR15: attestation.PCR15ClusterID(id)}).Validate(ctx, doc, nonce)
	if err != nil {
		return nil, fmt.Errorf("attest this machine: %w", err)
	}
	judge := func(rule attestation.PCR15) attestation.Validator {
		return attestation.NewTPMValidator(roots, newest, attestation.Options{PCR15: rule, UID: self.Identity.UID, Alternatives: others})
	}
	return &snapshot{
		clusterID:   id,
		generations: 1 + len(others),
		validator:   joiner{fresh: judge(attestation.PCR15Zero()), claimed: judge(attestation.PCR15ClusterID(id))},
	}, nil
}

// Keys of join-config. The newest demand has a key of its own, which is all that join
// services of v1.1.0 and before read; each generation, the newest among them, has the key
// followed by the version of its image.
const (
	keyNewest     = "attestationConfig"
	keyGeneration = keyNewest + "."
)

// accepted returns the measurements of the newest image and those of the other
// generations, in the order of their keys. A machine must fit one of them. A generation that
// cannot be read, or enforces no register, makes the whole unusable: a part of it could
// refuse machines that belong here, and a demand that only warns refuses none.
func accepted(data map[string]string) (newest attestation.Measurements, others []attestation.Measurements, err error) {
	keys := slices.DeleteFunc(slices.Collect(maps.Keys(data)), func(k string) bool {
		return !strings.HasPrefix(k, keyGeneration) || data[k] == data[keyNewest]
	})
	slices.Sort(keys)
	for _, key := range append([]string{keyNewest}, keys...) {
		var c struct {
			Variant      attestation.Variant      `json:"variant"`
			Measurements attestation.Measurements `json:"measurements"`
		}
		if err := json.Unmarshal([]byte(data[key]), &c); err != nil {
			return nil, nil, fmt.Errorf("read %s: %w", key, err)
		}
		if c.Variant != attestation.TPM2 {
			return nil, nil, fmt.Errorf("read %s: variant %q is not known", key, c.Variant)
		}
		if len(c.Measurements) == 0 {
			return nil, nil, fmt.Errorf("read %s: no measurements, which would let every machine in", key)
		}
		if !c.Measurements.Enforces() {
			return nil, nil, fmt.Errorf("read %s: all %d measurements are warnOnly, which would let every machine in; give it one register without warnOnly, or remove it with its image", key, len(c.Measurements))
		}
		if key == keyNewest {
			newest = c.Measurements
			continue
		}
		others = append(others, c.Measurements)
	}
	return newest, others, nil
}

// joiner accepts a machine that belongs to no cluster, which may ask for a ticket, and
// one that this cluster has claimed, which may only report how its join goes: its
// connection can break after it was claimed.
type joiner struct{ fresh, claimed attestation.Validator }

// Variant implements attestation.Validator.
func (j joiner) Variant() attestation.Variant { return j.fresh.Variant() }

// Validate implements attestation.Validator.
func (j joiner) Validate(ctx context.Context, document, userData []byte) (attestation.Statement, error) {
	st, err := j.fresh.Validate(ctx, document, userData)
	if errors.Is(err, attestation.ErrMember) {
		return j.claimed.Validate(ctx, document, userData)
	}
	return st, err
}

// unused reports whether the machine belongs to no cluster yet.
func unused(st attestation.Statement) bool {
	pcr := st.PCRs[15]
	return len(pcr) > 0 && !slices.ContainsFunc(pcr, func(b byte) bool { return b != 0 })
}
