package conformance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// stopGrace is how long a verb may take to stop after its interruption.
const stopGrace = 5 * time.Minute

// thisProgram executes verbs of this program in a workspace.
func thisProgram(dir string) Runner {
	return func(ctx context.Context, out io.Writer, args ...string) (int, error) {
		program, err := os.Executable()
		if err != nil {
			return 0, fmt.Errorf("find this program: %w", err)
		}
		cmd := exec.CommandContext(ctx, program, append([]string{"-C", dir}, args...)...)
		cmd.Stdout, cmd.Stderr = out, out
		// A second signal would end the verb at once, so it gets none of those of the terminal.
		cmd.SysProcAttr = apart()
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
		cmd.WaitDelay = stopGrace
		err = cmd.Run()
		if e, ok := errors.AsType[*exec.ExitError](err); ok {
			return e.ExitCode(), nil
		}
		if err != nil && ctx.Err() == nil {
			return 0, fmt.Errorf("run %s: %w", program, err)
		}
		return 0, nil
	}
}
