//go:build !linux

package release

import "os"

// exchange swaps two paths. For a moment b does not exist.
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
