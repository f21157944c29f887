package build

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"constellation/internal/testneeds"
)

// What kube-proxy reads back of its maps must be what it has written, or it removes it.
func TestToolsNameProtocols(t *testing.T) {
	testneeds.Root(t, "to change the root directory and make a network namespace")
	for _, r := range recipes {
		t.Run(r.version, func(t *testing.T) {
			a := cached(t, r.version)
			root := t.TempDir()
			f, err := os.Open(filepath.Join(a.Dir, filepath.FromSlash(toolsPath)))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			unpack(t, f, root)
			const element = "tcp . 80 : accept, udp . 53 : accept, sctp . 9 : accept"
			cmd := exec.Command("/bin/sh", "-c", `chroot "$1" nft --file - && chroot "$1" nft list map ip t m`, "sh", root)
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
			cmd.Stdin = strings.NewReader("add table ip t\nadd map ip t m { type inet_proto . inet_service : verdict; }\n" +
				"add element ip t m { " + element + " }\n")
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("nft: %v, %s", err, out)
			}
			for _, want := range strings.Split(element, ", ") {
				if !strings.Contains(string(out), want) {
					t.Errorf("nft lists %s, want %q in it", out, want)
				}
			}
		})
	}
}
