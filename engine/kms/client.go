//go:build linux

package kms

import (
	"context"

	"constellation/engine/attestation"
	"constellation/engine/attestation/keyprocess"
)

// Client uses the key service of the same machine. It may be used concurrently.
type Client struct {
	// Socket is the path of its socket for the join service.
	Socket string
}

// HandOver returns the keys for a new control plane, as Keys.Encode returns them. The key service logs it.
func (c Client) HandOver(ctx context.Context, to attestation.Identity) ([]byte, error) {
	a, err := keyprocess.Call(ctx, keyprocess.KeyService, c.Socket, keyprocess.Message{Op: keyprocess.HandOver, Machine: &to})
	return a.Keys, err
}

// Raise has the key service encrypt with the keys of a greater generation, and store that. A generation that it has already changes
// nothing. It returns the one that encrypts. The key service logs it, and refuses another raise for a while.
func (c Client) Raise(ctx context.Context, generation uint32) (now uint32, err error) {
	a, err := keyprocess.Call(ctx, keyprocess.KeyService, c.Socket, keyprocess.Message{Op: keyprocess.Raise, Generation: generation})
	return a.Generation, err
}

// Ready returns the generation that encrypts on this machine, and an error if the key service does not answer.
func (c Client) Ready(ctx context.Context) (generation uint32, err error) {
	a, err := keyprocess.Call(ctx, keyprocess.KeyService, c.Socket, keyprocess.Message{Op: keyprocess.Generation})
	return a.Generation, err
}

// Used returns the generation with which the API server of this machine encrypts; 0: not known yet. A key service of an earlier release
// does not know the question, and returns an error.
func (c Client) Used(ctx context.Context) (generation uint32, err error) {
	a, err := keyprocess.Call(ctx, keyprocess.KeyService, c.Socket, keyprocess.Message{Op: keyprocess.Used})
	return a.Generation, err
}

// SetEncryption has the API server of this machine store Secrets in a mode, see type Encryption of package kubeadm. The API server reads
// that within a minute. A mode that it has already changes nothing.
func (c Client) SetEncryption(ctx context.Context, mode string) error {
	_, err := keyprocess.Call(ctx, keyprocess.KeyService, c.Socket, keyprocess.Message{Op: keyprocess.Encryption, Encryption: mode})
	return err
}
