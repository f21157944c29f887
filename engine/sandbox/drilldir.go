package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"constellation/engine/plan"
)

// DrillDir is the directory for all files of a drill, in the workspace in which the drill runs.
// It contains the workspace of the drill's sandbox.
const DrillDir = "constellation-drill"

// drillMark is the file that marks a drill's directory, and its lock.
const drillMark = ".constellation-drill"

// LockDrill turns an existing directory into a drill's. It refuses a directory with other
// content, and one in which a drill runs.
func LockDrill(dir string) (unlock func(), err error) {
	mark := filepath.Join(dir, drillMark)
	if _, err := os.Lstat(mark); errors.Is(err, fs.ErrNotExist) {
		if l, err := os.ReadDir(dir); err != nil || len(l) > 0 {
			return nil, errors.Join(err, fmt.Errorf("%s is there already, and no drill has made it", dir))
		}
	}
	f, err := os.OpenFile(mark, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("another drill runs in %s", filepath.Dir(dir))
	}
	return func() { f.Close() }, nil
}

// ClearDrill empties a drill's directory, except for the mark. The caller holds
// its lock.
func ClearDrill(dir string) error {
	l, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range l {
		if e.Name() == drillMark {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// downDrill removes the remains of a killed drill from a workspace.
func (s *Sandboxes) downDrill(ctx context.Context, workspace string, t *teller) error {
	dir := filepath.Join(workspace, DrillDir)
	if _, err := os.Lstat(filepath.Join(dir, drillMark)); err != nil {
		return nil
	}
	op := "remove what a drill left in " + workspace
	unlock, err := LockDrill(dir)
	if err != nil {
		return &plan.Error{Op: op, Err: err, Exit: plan.ExitHeld, Remedy: "wait for it, or end it with Ctrl-C where it runs"}
	}
	defer unlock()
	const step = "remove-drill"
	t.step(step, plan.StateRunning, "Remove what a drill left")
	if _, err := s.Status(ctx, filepath.Join(dir, "cluster")); err == nil {
		err = s.Down(ctx, filepath.Join(dir, "cluster"), nil)
		if err != nil {
			return err
		}
	}
	if err := ClearDrill(dir); err != nil {
		return &plan.Error{Op: op, Err: err}
	}
	if err := os.RemoveAll(dir); err != nil {
		return &plan.Error{Op: op, Err: err}
	}
	t.step(step, plan.StateDone, "it is gone")
	return nil
}
