// Package certifier has attestation keys of machines certified inside of a cluster.
//
// Some vendors of clouds certify only which instance a key belongs to (attestation.Vendor). Group, role and address are in the
// vendor's API. A join service judges the vendor's evidence and asks the API. Then the certifier on its machine signs what the API
// had, and for some days that certificate takes the place of the API (attestation.Options.Certifiers). It counts together with the
// vendor's certificate alone. So the key of a certifier is not enough to make evidence: the vendor must have certified the
// same attestation key, for the same instance, in the project of the cluster.
//
// The certifier is a process of its own without a network; package signer has it. Programs that reach it by a [Client] do not link
// what signs.
//
//   - New control planes get the keys from a certifier ([Client.HandOver]), by the join service, in their tickets.
//   - A cluster that lost all control planes gets the same keys from its owner, who derives them from a secret.
//   - The owner rotates them. Certificates of the former keys are accepted until they end.
//
// A program that may open the socket can have any machine certified, and can have the keys: docs/security.md has what follows.
package certifier

import "time"

// Life is how long a certificate is valid.
const Life = 7 * 24 * time.Hour

// Socket is where the certifier of a machine serves its join service. Only root may enter the directory.
const Socket = "/run/constellation-certifier/certifier.sock"
