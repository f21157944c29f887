package evidence

import (
	"context"
	"testing"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// For tests that use package authority, which imports this one.

// RequestAuto is RequestIdentity with AutoTPM on a machine whose first TPM would be at an address.
func RequestAuto(ctx context.Context, dir, first string) (out []byte, unused, err error) {
	return requestIdentity(ctx, dir, AutoTPM, first)
}

// StoreEKCertificate does what a vendor of TPMs does.
func StoreEKCertificate(t testing.TB, address string, rsa bool, der []byte) {
	t.Helper()
	index := tpm2.TPMHandle(0x01c0000a)
	if rsa {
		index = 0x01c00002
	}
	if err := use(context.Background(), address, func(t transport.TPM) error { return writeNV(t, index, der) }); err != nil {
		t.Fatal(err)
	}
}
