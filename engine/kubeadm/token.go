package kubeadm

import (
	"crypto/sha256"
	"encoding/binary"
	"strconv"
)

// JoinGroup is the group of the bootstrap tokens of joining machines. Chart constellation-services
// binds it to what kubeadm join needs. It is not kubeadm's own group of tokens, whose members get
// the client certificate of any node approved.
const JoinGroup = "system:bootstrappers:constellation:join"

// TokenUser is the prefix of the user name of a bootstrap token; the token's ID follows.
const TokenUser = "system:bootstrap:"

const tokenIDDigits = 36 // 0-9 and a-z

// TokenID returns the ID of the bootstrap token of a machine: six characters of a-z and 0-9 that
// follow from the name of its Node. It is not secret. An API server that has authenticated a
// token reports the ID, and thereby the only machine that the token is for.
func TokenID(node string) string {
	sum := sha256.Sum256([]byte("bootstrap token of " + node))
	s := strconv.FormatUint(binary.BigEndian.Uint64(sum[:]), tokenIDDigits)
	return s[len(s)-6:]
}
