package release

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"constellation/engine/version"
)

// An agent of an old image verifies nothing and runs the program that its caller names as
// kubeadm. This installs its successor, once: an enrolment program is the new agent with the
// release keys appended, and installs both when it runs as kubeadm. Package agent implements
// that part.
//
// The keys are appended to the program because an old agent passes on nothing else.

// FirstVerifying is the first release whose OS image has release keys, and an agent that
// installs only components with a statement of a release builder.
var FirstVerifying = version.MustParse("v1.1.0")

// AgentVerifies reports whether the agent in the OS image of a release verifies components.
func AgentVerifies(image version.Version) bool { return !image.Less(FirstVerifying) }

// enrolmentMagic ends an enrolment program, after the length of the keys in eight bytes.
const enrolmentMagic = "constellation-enrolment\n"

// ErrNoEnrolment means that a program has no release keys appended.
var ErrNoEnrolment = errors.New("the program carries no release keys")

// Enrolment returns the enrolment program for an agent and the public keys in keys, which are
// PEM.
func Enrolment(agent, keys []byte) ([]byte, error) {
	if _, err := ParseKeys("release-keys", keys); err != nil {
		return nil, err
	}
	if _, _, err := SplitEnrolment(agent); err == nil {
		return nil, errors.New("create enrolment program: the agent is an enrolment program already")
	}
	b := bytes.Join([][]byte{agent, keys}, nil)
	b = binary.BigEndian.AppendUint64(b, uint64(len(keys)))
	return append(b, enrolmentMagic...), nil
}

// SplitEnrolment returns the agent and the keys of an enrolment program. The error wraps
// ErrNoEnrolment for other programs.
func SplitEnrolment(program []byte) (agent, keys []byte, err error) {
	rest, ok := bytes.CutSuffix(program, []byte(enrolmentMagic))
	if !ok || len(rest) < 8 {
		return nil, nil, ErrNoEnrolment
	}
	rest, length := rest[:len(rest)-8], binary.BigEndian.Uint64(rest[len(rest)-8:])
	if length > maxFile || length > uint64(len(rest)) {
		return nil, nil, fmt.Errorf("%w: invalid length %d", ErrNoEnrolment, length)
	}
	at := len(rest) - int(length)
	agent, keys = rest[:at], rest[at:]
	if _, err := ParseKeys("release-keys", keys); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrNoEnrolment, err)
	}
	return agent, keys, nil
}
