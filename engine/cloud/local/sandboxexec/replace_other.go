//go:build !unix

package sandboxexec

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
)

// replace runs the program at path as a child process and returns its exit code. The console
// delivers interrupts to both processes, so this one ignores them.
func replace(path string, argv []string) (int, error) {
	signal.Ignore(os.Interrupt)
	cmd := exec.Command(path, argv[1:]...) //nolint:noctx // it ends when the program does
	cmd.Args[0], cmd.Stdin, cmd.Stdout, cmd.Stderr = argv[0], os.Stdin, os.Stdout, os.Stderr
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		return 0, err
	}
	return cmd.ProcessState.ExitCode(), nil
}
