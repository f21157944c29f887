// Package tarcheck finds parts of a tar archive that two readers understand in two ways.
package tarcheck

import (
	"archive/tar"
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Names are the names of an archive by their lower case: two names that differ in case only are one
// file on some computers.
type Names map[string]string

// Entry returns an error for a sparse file, in the format of GNU or of PAX, and for a name that
// differs in case only from an earlier one.
func (n Names) Entry(h *tar.Header, name string) error {
	if h.Typeflag == tar.TypeGNUSparse {
		return errors.New("is a sparse file")
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return errors.New("is a sparse file")
		}
	}
	folded := strings.ToLower(name)
	if other, ok := n[folded]; ok && other != name {
		return fmt.Errorf("differs from %q in case only", other)
	}
	n[folded] = name
	return nil
}

// End reads what follows the end of an archive. The error is not nil if it is more than padding, such
// as a second archive.
func End(r io.Reader) error {
	b := bufio.NewReader(r)
	for {
		c, err := b.ReadByte()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case c != 0:
			return errors.New("archive has data after its end")
		}
	}
}
