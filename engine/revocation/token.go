package revocation

import (
	"crypto/sha256"
	"encoding/binary"
	"strconv"
)

// tokenDigits is how many different characters a token ID is made of.
const tokenDigits = 36

// TokenID returns the ID of the bootstrap token of a node: six characters that follow
// from its name. The ID is no secret.
func TokenID(node string) string {
	sum := sha256.Sum256([]byte("bootstrap token of " + node))
	s := strconv.FormatUint(binary.BigEndian.Uint64(sum[:]), tokenDigits)
	return s[len(s)-6:]
}

// TokenSecret returns the name of the Secret, in kube-system, of the bootstrap token of a
// node.
func TokenSecret(node string) string { return "bootstrap-token-" + TokenID(node) }
