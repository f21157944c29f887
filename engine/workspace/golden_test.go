package workspace

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"constellation/internal/golden"
)

// fixedRoot is a certificate that does not change between runs.
const fixedRoot = `-----BEGIN CERTIFICATE-----
MIIBQjCB6aADAgECAgEBMAoGCCqGSM49BAMCMBAxDjAMBgNVBAMTBWNsb3VkMCAX
DTcwMDEwMTAwMDAwMFoYDzIwOTkwMTAxMDAwMDAwWjAQMQ4wDAYDVQQDEwVjbG91
ZDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABBNelqIUybURMpTi1WlHPhrAEq44
iEieZkZC33G0Jxh/zqvLv32OBF8OJAqfV+zE6HXnE3F37vnzOeqSzgkWerujMjAw
MA8GA1UdEwEB/wQFMAMBAf8wHQYDVR0OBBYEFFkKtVXHIlYIU3ZIlXT7TZ0GpmGu
MAoGCCqGSM49BAMCA0gAMEUCIQCXWPeFNvTxwSUKQFmbuhrVWmdNp7BVOTQVs0vX
a+1y7QIgRoGMM73GCFUCtCZGlKkUesEdGI8FVivyJLwA79ftwec=
-----END CERTIFICATE-----
`

// TestFilesOnDiskAreFrozen compares what is written for a sandbox with files that an older
// program wrote, and reads them.
func TestFilesOnDiskAreFrozen(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*SandboxInfo)
	}{
		{"real", func(*SandboxInfo) {}},
		{"simulated", func(i *SandboxInfo) { i.Simulated = true }},
		{"hollow", func(i *SandboxInfo) { i.Hollow = true }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			i := testSandbox(t)
			i.TrustRoots = fixedRoot
			tt.edit(i)
			s, err := newState(*i)
			if err != nil {
				t.Fatal(err)
			}
			state, err := s.marshal()
			if err != nil {
				t.Fatal(err)
			}
			config, err := GenerateConfig("sandbox", GenerateOptions{Sandbox: i})
			if err != nil {
				t.Fatal(err)
			}
			golden.Equal(t, filepath.Join("testdata", "state-"+tt.name+".yaml"), state)
			golden.Equal(t, filepath.Join("testdata", "config-"+tt.name+".yaml"), config)
			old, err := os.ReadFile(filepath.Join("testdata", "state-"+tt.name+".yaml"))
			if err != nil {
				t.Fatal(err)
			}
			read, err := ParseState(old)
			if err != nil {
				t.Fatal(err)
			}
			if again, err := read.marshal(); err != nil || !bytes.Equal(again, old) {
				t.Errorf("a state file that was read and written: %v\n%s", err, again)
			}
		})
	}
}
