package kms

import (
	"fmt"
	"strconv"
)

// What ConfigMap kube-system/join-config has about the keys, for join services. None of it is secret.
const (
	// GenerationKey is the generation of the key that encrypts, after a first rotation. Control planes derive the keys of all generations.
	GenerationKey = "kmsGeneration"
	// FingerprintKey is in a cluster that is older than its encryption of Secrets: the fingerprint of the keys of its key services. A control
	// plane without keys waits for them after it joined.
	FingerprintKey = "kmsFingerprint"
	// ModeKey is the mode in which API servers store Secrets, a kubeadm.Encryption. Only with FingerprintKey.
	ModeKey = "kmsMode"
)

// annotationPrefix is common to annotations of join-config. Policy constellation-machine-configuration permits the operator to write them.
const (
	annotationPrefix     = "constellation.edgeless.systems/kms-"
	annotationGeneration = annotationPrefix + "generation"
	annotationRewritten  = annotationPrefix + "rewritten"
	annotationTarget     = annotationPrefix + "target"
	annotationOperator   = annotationPrefix + "operator"
)

// Rotation is what join-config has about rotations of the key that encrypts Secrets in etcd. The zero value is that of a new cluster.
type Rotation struct {
	// Generation is what key services use; 0: that of init.
	Generation uint32
	// Rewritten is the generation with which all Secrets were written again; 0: with none.
	Rewritten uint32
	// Record states who published Generation, when and why.
	Record string
	// Target identifies the last target of all nodes after which the operator rotated the key, or decided not to; empty: it saw none yet.
	Target string
	// Operator is the last generation that the operator published; 0: none. It completes the rotation to that one alone.
	Operator uint32
}

// RotationOf reads data and annotations of join-config.
func RotationOf(data, notes map[string]string) (Rotation, error) {
	r := Rotation{Record: notes[annotationGeneration], Target: notes[annotationTarget]}
	for _, n := range []struct {
		key, text string
		to        *uint32
	}{
		{GenerationKey, data[GenerationKey], &r.Generation},
		{annotationRewritten, notes[annotationRewritten], &r.Rewritten},
		{annotationOperator, notes[annotationOperator], &r.Operator},
	} {
		if n.text == "" {
			continue
		}
		v, err := strconv.ParseUint(n.text, 10, 32)
		if err != nil {
			return Rotation{}, fmt.Errorf("%s of join-config is %.40q, want a number", n.key, n.text)
		}
		*n.to = uint32(v)
	}
	return r, nil
}

// Fields returns the data and annotations of join-config. Zero fields are left out.
func (r Rotation) Fields() (data, notes map[string]string) {
	data, notes = map[string]string{}, map[string]string{}
	put := func(to map[string]string, key string, n uint32) {
		if n > 0 {
			to[key] = strconv.FormatUint(uint64(n), 10)
		}
	}
	put(data, GenerationKey, r.Generation)
	put(notes, annotationRewritten, r.Rewritten)
	put(notes, annotationOperator, r.Operator)
	for key, text := range map[string]string{annotationGeneration: r.Record, annotationTarget: r.Target} {
		if text != "" {
			notes[key] = text
		}
	}
	return data, notes
}
