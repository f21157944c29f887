package release

import (
	"encoding/json"
	"errors"
	"fmt"

	"constellation/engine/component"
	"constellation/engine/version"
)

// A statement is a release builder's signature over the components that machines may run: the
// digests of lists of components by version of Kubernetes and architecture. A list's digest
// covers every field of every component. Write access to a list, or access to an agent, does
// not permit signing.
//
// The transferred text is JSON: the statement, its signature, and the key sets that lead from
// the keys of a machine to the signing key. It is public, and accompanies the list: in the
// annotation of the ConfigMap, the init request, the join ticket and the request to an agent.

// MachineKeys is the path of the release builders' public keys on a machine, below the root of
// its file system: PEM, one or more. It is part of the measured image.
const MachineKeys = "usr/lib/constellation/release-keys.pem"

// MaxStatement bounds the text of a statement in bytes; a real one has about 1 kB, and each
// key set adds as much.
const MaxStatement = 32 << 10

// statementType prevents a signature over another kind of document from being valid for a
// statement.
const statementType = "constellation-components"

// Errors of a Trust. Their texts include the remedy.
var (
	// ErrNoStatement means that the components have no statement.
	ErrNoStatement = errors.New("the components have no statement of a release builder; publish it with `constellation init`, `upgrade apply` or `upgrade prepare` of the current program")
	// ErrNotVouched means that a valid statement does not cover the components.
	ErrNotVouched = errors.New("the statement of the release builder does not cover these components; run `constellation upgrade prepare` of the program that published them")
	// ErrNoMachineKeys means that this machine cannot verify any statement.
	ErrNoMachineKeys = errors.New("this machine has no release keys; replace it with a machine of a newer image")
)

// Vouched are the digests of signed lists of components by version of Kubernetes, such as
// v1.36.3, and architecture, such as amd64.
type Vouched map[string]map[string]string

// statement is the signed document.
type statement struct {
	Schema     string  `json:"schema"`
	Type       string  `json:"type"`
	Kubernetes Vouched `json:"kubernetes"`
}

// signedStatement is the transferred form.
type signedStatement struct {
	// Statement is the document as text, to preserve the signed bytes.
	Statement string         `json:"statement"`
	Signature string         `json:"signature"`
	Keys      []signedKeySet `json:"keys,omitempty"`
}

// encodeStatement returns the document for v.
func encodeStatement(v Vouched) ([]byte, error) {
	b, err := encodeJSON(statement{schema, statementType, v})
	if err != nil {
		return nil, err
	}
	_, err = parseStatement(b)
	return b, err
}

func parseStatement(b []byte) (Vouched, error) {
	var s statement
	if err := strictJSON(b, &s); err != nil {
		return nil, fmt.Errorf("read statement: %w", err)
	}
	switch {
	case s.Schema != schema:
		return nil, fmt.Errorf("read statement: its format is %q, want %q", shorten(s.Schema), schema)
	case s.Type != statementType:
		return nil, fmt.Errorf("read statement: its type is %q, want %q", shorten(s.Type), statementType)
	case len(s.Kubernetes) == 0:
		return nil, errors.New("read statement: it names no version of Kubernetes")
	}
	for v, lists := range s.Kubernetes {
		if !validVersion(v) {
			return nil, fmt.Errorf("read statement: %q is not a version", shorten(v))
		}
		for arch, d := range lists {
			if !digestRE.MatchString(d) {
				return nil, fmt.Errorf("read statement: invalid digest for Kubernetes %s on %s: %q", v, shorten(arch), shorten(d))
			}
		}
	}
	return s.Kubernetes, nil
}

// joinStatement returns the transferred text.
func joinStatement(document, signature []byte, chain []signedKeySet) (string, error) {
	b, err := json.Marshal(signedStatement{string(document), string(signature), chain})
	if err == nil && len(b) > MaxStatement {
		err = fmt.Errorf("statement has %d bytes, more than %d; start a new chain of key sets with the next image", len(b), MaxStatement)
	}
	return string(b), err
}

// Vouch signs a statement over v. It is deterministic, so signing again changes nothing. Its
// key must be one of the machines' keys.
func (k *PrivateKey) Vouch(v Vouched) (string, error) {
	b, err := encodeStatement(v)
	if err != nil {
		return "", fmt.Errorf("sign statement: %w", err)
	}
	sig, err := k.signAgain(b)
	if err != nil {
		return "", fmt.Errorf("sign statement: %w", err)
	}
	return joinStatement(b, sig, nil)
}

// Trust is the set of keys whose statements a machine accepts. The zero value accepts none.
type Trust struct{ keys []Key }

// NewTrust returns the trust in keys.
func NewTrust(keys ...Key) Trust { return Trust{signing(keys)} }

// Verify returns nil if the statement in text covers list for a machine of arch and Kubernetes
// v. The error wraps ErrNoStatement if text is empty, ErrNotVouched if a trusted statement
// covers another list or version, ErrUntrusted if no trusted key signed it, and
// ErrNoMachineKeys if there are no trusted keys.
//
// Key sets expire, but statements do not: a machine joins with the statement of its cluster's
// last upgrade, and its clock is not trusted. To revoke a key, remove it from the next image.
func (t Trust) Verify(text string, v version.Version, arch string, list component.List) error {
	vouched, err := t.read(text)
	if err != nil {
		return err
	}
	want, ok := vouched[v.String()][arch]
	switch {
	case !ok:
		return fmt.Errorf("%w: it does not name Kubernetes %s for %s", ErrNotVouched, v, arch)
	case list.Digest() != want:
		return fmt.Errorf("%w: for Kubernetes %s on %s it names the list %s, not %s", ErrNotVouched, v, arch, want, list.Digest())
	}
	return nil
}

// over returns nil if the statement in text covers exactly the list with a digest.
func (t Trust) over(text, digest string) error {
	vouched, err := t.read(text)
	if err != nil {
		return err
	}
	for v, lists := range vouched {
		for arch, d := range lists {
			if d != digest || len(vouched) > 1 || len(lists) > 1 {
				return fmt.Errorf("%w: it names the list %s for Kubernetes %s on %s", ErrNotVouched, d, v, arch)
			}
		}
	}
	return nil
}

// read returns the lists of the statement in text, if a trusted key signed it.
func (t Trust) read(text string) (Vouched, error) {
	switch {
	case len(t.keys) == 0:
		return nil, ErrNoMachineKeys
	case text == "":
		return nil, ErrNoStatement
	case len(text) > MaxStatement:
		return nil, fmt.Errorf("%w: the statement has %d bytes, more than %d", ErrUntrusted, len(text), MaxStatement)
	}
	var s signedStatement
	if err := strictJSON([]byte(text), &s); err != nil {
		return nil, fmt.Errorf("%w: read statement: %w", ErrUntrusted, err)
	}
	for _, k := range s.Keys {
		if n := len(k.Signatures); n == 0 || n > 32 {
			return nil, fmt.Errorf("%w: read statement: a key set has %d signatures", ErrUntrusted, n)
		}
	}
	signers := &trusted{keys: t.keys}
	if err := signers.follow(s.Keys, ""); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUntrusted, err)
	}
	if _, err := verify([]byte(s.Statement), []byte(s.Signature), signers.keys); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUntrusted, err)
	}
	vouched, err := parseStatement([]byte(s.Statement))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUntrusted, err)
	}
	return vouched, nil
}
