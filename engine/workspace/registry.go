package workspace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"constellation/engine/plan"
	"constellation/engine/registry"
)

// Registry returns the registry of a configuration with its login; the zero value for nil.
// Errors contain nothing of the file with the login.
func (w *Workspace) Registry(c *RegistryConfig) (registry.Registry, error) {
	if c == nil {
		return registry.Registry{}, nil
	}
	r := registry.Registry{Address: c.Address, CABundle: c.CABundle}
	if c.PullSecret == "" {
		return r, nil
	}
	file := c.PullSecret
	if !filepath.IsAbs(file) {
		file = w.Path(file)
	}
	bad := func(err error, remedy string) (registry.Registry, error) {
		return registry.Registry{}, &plan.Error{Op: "read registry.pullSecret " + file, Err: err, Exit: plan.ExitUsage, Remedy: remedy}
	}
	info, err := os.Stat(file)
	var b []byte
	switch {
	case err != nil:
	case !info.Mode().IsRegular():
		err = errors.New("it is not a regular file")
	case info.Size() > maxFile:
		err = fmt.Errorf("it has %d bytes, limit is %d", info.Size(), maxFile)
	case info.Mode().Perm()&0o077 != 0:
		return bad(fmt.Errorf("others can access it: its mode is %#o", info.Mode().Perm()), "chmod 0600 "+file)
	default:
		b, err = os.ReadFile(file)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return bad(errors.New("no such file"), "write it with `docker --config DIR login "+r.Host()+"`, or name another file in "+ConfigFile)
	}
	if err != nil {
		return bad(WithoutPath(err), "name a config.json, as `docker login` writes it, in "+ConfigFile)
	}
	if r, err = r.WithLogin(b); err != nil {
		return bad(err, "write it with `docker --config DIR login "+r.Host()+"`, without a credential store")
	}
	return r, nil
}
