package workspace

import (
	"bytes"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// MasterSecret is what all keys of a cluster are derived from. It is made on the
// user's computer, stays in one file there and never leaves: machines get what is
// derived from it.
type MasterSecret struct {
	// Key and Salt have 32 bytes each.
	Key  []byte `json:"key"`
	Salt []byte `json:"salt"`
	// Certifier is the generation of the certifier's keys that a cluster begins with; 0: 1. A rotation raises it.
	Certifier uint32 `json:"certifierGeneration,omitempty"`
	// KMS is the generation of the key that encrypts Secrets in etcd, likewise. Every generation decrypts all of them.
	KMS uint32 `json:"kmsGeneration,omitempty"`
}

const secretSize = 32

// NewMasterSecret makes one from the system's random numbers.
func NewMasterSecret() MasterSecret {
	m := MasterSecret{Key: make([]byte, secretSize), Salt: make([]byte, secretSize)}
	rand.Read(m.Key) // never fails; the runtime ends the program otherwise
	rand.Read(m.Salt)
	return m
}

// parseMasterSecret reads constellation-mastersecret.json. Its errors hold nothing of
// the content.
func parseMasterSecret(b []byte) (MasterSecret, error) {
	var m MasterSecret
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&m); err != nil {
		return MasterSecret{}, errors.New("is not a JSON object with key and salt in base64")
	}
	if _, err := d.Token(); err != io.EOF {
		return MasterSecret{}, errors.New("holds something after the JSON object")
	}
	if len(m.Key) != secretSize || len(m.Salt) != secretSize {
		return MasterSecret{}, fmt.Errorf("key and salt must have %d bytes each", secretSize)
	}
	return m, nil
}

// derive returns 32 bytes for one use, named by info.
func derive(key, salt []byte, info string) []byte {
	out, err := hkdf.Key(sha256.New, key, salt, "key-"+info, secretSize)
	if err != nil { // only for more than 255 times 32 bytes, or a key too short under FIPS 140
		panic(fmt.Sprintf("derive key %s: %v", info, err))
	}
	return out
}

// ClusterID names the cluster that this master secret and salt make. It is not
// secret: machines put it into PCR 15.
func (m MasterSecret) ClusterID(measurementSalt []byte) []byte {
	return derive(derive(m.Key, m.Salt, "measurementSecret"), measurementSalt, "clusterID")
}

// CertifierSecret is what the keys of the cluster's certifier are derived from; see package signer. It is as secret as m, and stays on
// the user's computer, too: machines get keys of one generation.
func (m MasterSecret) CertifierSecret() []byte { return derive(m.Key, m.Salt, "certifierSecret") }

// BackupSecret is what the keys that authenticate backups are derived from; see package backup. It is as secret as m, and stays on the
// user's computer.
func (m MasterSecret) BackupSecret() []byte { return derive(m.Key, m.Salt, "backupSecret") }

// KMSSecret is what the keys that encrypt Secrets in etcd are derived from; see package kms. It is as secret as m. Control planes have it,
// sealed to their TPMs.
func (m MasterSecret) KMSSecret() []byte { return derive(m.Key, m.Salt, "kmsSecret") }

// String hides the secret from careless printing.
func (m MasterSecret) String() string { return "(hidden)" }

// GoString hides the secret from %#v.
func (m MasterSecret) GoString() string { return "(hidden)" }
