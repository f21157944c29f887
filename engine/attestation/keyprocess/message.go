package keyprocess

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"constellation/engine/attestation"
)

// Names of processes with keys, in errors and in requests of machines that lost keys.
const (
	KeyService = "key service"
	Certifier  = "certifier"
	CASigner   = "CA signer"
)

// timeout bounds one connection. A TPM may take seconds to seal.
const timeout = 30 * time.Second

// MaxMessage bounds a message, in bytes.
const MaxMessage = 512 << 10

// Message is a request of a join service, or an answer: one of each, in JSON, for each connection.
type Message struct {
	Op string `json:"op,omitempty"`

	ID        string                `json:"id,omitempty"`
	Request   []byte                `json:"request,omitempty"`
	Challenge []byte                `json:"challenge,omitempty"`
	Answer    []byte                `json:"answer,omitempty"`
	Key       string                `json:"key,omitempty"`
	Machine   *attestation.Identity `json:"machine,omitempty"`

	Certificate []byte `json:"certificate,omitempty"` // DER
	Authorities []byte `json:"authorities,omitempty"` // PEM
	Generation  uint32 `json:"generation,omitempty"`
	Keys        []byte `json:"keys,omitempty"` // secret
	Rotation    []byte `json:"rotation,omitempty"`
	Encryption  string `json:"encryption,omitempty"`

	Document  []byte `json:"document,omitempty"`  // evidence
	Recipient []byte `json:"recipient,omitempty"` // public key, see joinproto.Seal
	Sealed    []byte `json:"sealed,omitempty"`    // encrypted to Recipient

	Error string `json:"error,omitempty"`
	// Unavailable says that Error is no refusal: the same request may succeed later.
	Unavailable bool `json:"unavailable,omitempty"`
}

// Values of Message.Op.
const (
	Challenge   = "challenge"
	Certify     = "certify"
	Authorities = "authorities"
	HandOver    = "hand-over"
	Rotate      = "rotate"
	Generation  = "generation"
	Raise       = "raise"
	Used        = "used"
	Encryption  = "encryption"

	// Of the CA signer.
	Authority          = "authority"
	SignServing        = "sign-serving"
	SealSecrets        = "seal-secrets"
	Evidence           = "evidence"
	OwnEvidence        = "own-evidence"
	RequestCertificate = "request-certificate"
	AnswerChallenge    = "answer-challenge"
	UseCertificate     = "use-certificate"
)

// Send writes a message and ends the direction.
func Send(conn net.Conn, m Message) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	defer clear(b)
	if len(b) > MaxMessage {
		return fmt.Errorf("message has %d bytes, at most %d are allowed", len(b), MaxMessage)
	}
	if _, err := conn.Write(b); err != nil {
		return err
	}
	return conn.(interface{ CloseWrite() error }).CloseWrite()
}

// Receive reads a message until the end of the direction. Its errors contain nothing of the message.
func Receive(conn net.Conn, m *Message) error {
	b, err := io.ReadAll(io.LimitReader(conn, MaxMessage+1))
	if err != nil {
		return err
	}
	defer clear(b)
	if len(b) > MaxMessage {
		return fmt.Errorf("message has more than %d bytes", MaxMessage)
	}
	if Strict(b, m) != nil {
		return errors.New("message is malformed")
	}
	return nil
}

// Strict reads exactly one JSON document without unknown fields. Its errors can quote it.
func Strict(b []byte, to any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("unexpected data after it")
	}
	return nil
}

// UnavailableError is an error of an answer after which the same request may succeed. It is no refusal.
type UnavailableError struct{ Err error }

// Error implements error.
func (e *UnavailableError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *UnavailableError) Unwrap() error { return e.Err }

// RefusedError means that a process with keys answered, and refused.
type RefusedError struct{ Process, Op, Reason string }

// Error implements error.
func (e *RefusedError) Error() string { return "ask the " + e.Process + " (" + e.Op + "): " + e.Reason }
