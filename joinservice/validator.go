package joinservice

import (
	"context"
	"crypto/x509"
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

// snapshot has the attestation requirements for joining machines at one moment. It is
// immutable: a connection is judged by the requirements at its start.
type snapshot struct {
	validator attestation.Validator
	// self judges this machine, by the vendor's API. node is its name.
	self      attestation.Validator
	node      string
	clusterID []byte
	// generations are the alternative requirements; a machine must satisfy one.
	generations int
}

// demandsRetry is the retry interval for an unusable join-config that does not change: the TPM
// may be busy, or the cloud's roots may be missing for now.
const demandsRetry = 5 * time.Second

// watchDemands updates the snapshot from the ConfigMap join-config until ctx ends, and calls
// ready after the first one. An unusable ConfigMap leaves the last good snapshot in place and
// is retried.
func (j *judge) watchDemands(ctx context.Context, ready func()) error {
	if !j.kube.synced(ctx) {
		return nil
	}
	var used map[string]string
	again := false // the authorities of the certifier changed
	retry := time.NewTimer(0)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-j.kube.changed:
		case <-retry.C:
		case <-j.certification.signal():
			again = true
		}
		data := j.kube.config()
		if data == nil || used != nil && maps.Equal(used, data) && !again {
			continue // the next change wakes the loop
		}
		next, err := newSnapshot(ctx, data, j.issuer, j.method, j.certification.roots())
		if err != nil {
			if ctx.Err() == nil {
				j.log.Error("join-config not usable", "err", err, "retry_in", demandsRetry, "last_good_kept", j.snapshot.Load() != nil)
			}
			retry.Reset(demandsRetry)
			continue
		}
		if j.method.Unmeasured && used == nil {
			j.log.Warn("measurements not judged", "variant", string(j.method.Variant), "reason", "evidence of this variant proves which machine joins, not what it booted")
		}
		used, again = data, false
		j.snapshot.Store(next)
		j.log.Info("join-config loaded", "variant", string(next.validator.Variant()), "generations", next.generations)
		ready()
	}
}

// newSnapshot parses join-config. The measurements apply to machines in the same cloud project
// as this machine, which issuer proves to be a member of the cluster in join-config. Certificates of
// certifiers take the place of the vendor's API.
func newSnapshot(ctx context.Context, data map[string]string, issuer attestation.Issuer, method attestation.Method, certifiers *x509.CertPool) (*snapshot, error) {
	newest, others, err := accepted(data, method)
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
	// This machine's own measurements do not matter: during an upgrade join-config already
	// describes the next image.
	lenient := attestation.Measurements{}
	for pcr, m := range newest {
		lenient[pcr] = attestation.Measurement{Expected: m.Expected, WarnOnly: true}
	}
	own := method.Validator(roots, lenient, attestation.Options{PCR15: attestation.PCR15ClusterID(id)})
	self, err := attestSelf(ctx, issuer, own)
	if err != nil {
		return nil, err
	}
	judge := func(rule attestation.PCR15) attestation.Validator {
		return method.Validator(roots, newest, attestation.Options{PCR15: rule, UID: self.Identity.UID, Alternatives: others, Certifiers: certifiers})
	}
	return &snapshot{
		self:        own,
		node:        self.Identity.Name,
		clusterID:   id,
		generations: 1 + len(others),
		validator:   joiner{fresh: judge(attestation.PCR15Zero()), claimed: judge(attestation.PCR15ClusterID(id))},
	}, nil
}

// Keys of join-config. The newest requirements have a key without suffix, which is all that
// join services up to v1.1.0 read. Each generation, including the newest, has a key with its
// image version as suffix.
const (
	keyNewest     = "attestationConfig"
	keyGeneration = keyNewest + "."
)

// accepted returns the measurements of the newest image and those of the other generations, in
// the order of their keys. A machine must match one of them. A generation that cannot be
// decoded, or enforces no register, makes all unusable: using the rest could refuse valid
// machines, and a generation with only warnings would accept any machine. The evidence of an
// unmeasured method proves which machine it is, so it needs no measurements.
func accepted(data map[string]string, method attestation.Method) (newest attestation.Measurements, others []attestation.Measurements, err error) {
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
		if c.Variant != method.Variant {
			return nil, nil, fmt.Errorf("read %s: variant is %q, want %q", key, c.Variant, method.Variant)
		}
		switch {
		case method.Unmeasured:
		case len(c.Measurements) == 0:
			return nil, nil, fmt.Errorf("read %s: no measurements, so every machine would be accepted", key)
		case !c.Measurements.Enforces():
			return nil, nil, fmt.Errorf("read %s: all %d measurements are warnOnly, so every machine would be accepted; remove warnOnly from a register, or remove the image with its requirements", key, len(c.Measurements))
		}
		if key == keyNewest {
			newest = c.Measurements
			continue
		}
		others = append(others, c.Measurements)
	}
	return newest, others, nil
}

// joiner accepts an unclaimed machine, which may request a ticket, and one that this cluster
// has claimed, which may only report its progress: its connection may break after the claim.
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
