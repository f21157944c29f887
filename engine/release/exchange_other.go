//go:build !linux

package release

import "os"

// exchange makes two paths change places. For a moment b is not there.
func exchange(a, b string) error {
	aside := a + ".old"
	if err := os.Rename(b, aside); err != nil {
		return err
	}
	if err := os.Rename(a, b); err != nil {
		_ = os.Rename(aside, b)
		return err
	}
	return os.Rename(aside, a)
}
