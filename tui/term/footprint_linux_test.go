package term

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// The pages of the program's file are released, and the program continues.
func TestStartupPagesAreReleased(t *testing.T) {
	pages := func() (kib int) {
		t.Helper()
		data, err := os.ReadFile("/proc/self/status")
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(data)) {
			if n, _ := fmt.Sscanf(line, "RssFile: %d kB", &kib); n == 1 {
				return kib
			}
		}
		t.Fatal("no RssFile")
		return 0
	}
	was := pages()
	ReleaseStartupPages()
	// The kernel loads what continues. Where its cache has the file in large pieces, that is most of it.
	if is := pages(); is > was*9/10 {
		t.Errorf("%d kB of the program's file are in memory, of %d kB before", is, was)
	}
}
