package kube

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"constellation/engine"
)

// credentialTimeout bounds a credential plugin. Some of them wait for a login in a browser.
const credentialTimeout = 60 * time.Second

// CredentialTimeout is the variable that shortens the limit of credential plugins, such as 10s.
const CredentialTimeout = "CONSTELLATION_CREDENTIAL_TIMEOUT"

// RunCredentialPlugin runs a credential plugin of a kubeconfig, args, and returns the exit code.
// client-go runs plugins without a limit, with the terminal as stderr. This child process adds a
// limit and removes control characters from stderr.
func RunCredentialPlugin(args []string, limit string, stdin io.Reader, stdout, stderr io.Writer) int {
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		fmt.Fprintln(stderr, "run credential plugin: no command")
		return 2
	}
	timeout, err := time.ParseDuration(limit)
	if err != nil || timeout <= 0 || timeout > credentialTimeout {
		timeout = credentialTimeout
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	c := exec.CommandContext(ctx, args[0], args[1:]...)
	c.Stdin, c.Stdout = stdin, stdout
	c.WaitDelay = time.Second // for its children
	r, w := io.Pipe()
	c.Stderr = w
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		lines := bufio.NewReader(r)
		for {
			line, err := lines.ReadString('\n')
			if text := printable(strings.TrimRight(line, "\r\n")); text != "" {
				fmt.Fprintln(stderr, text)
			}
			if err != nil {
				return
			}
		}
	}()
	err = c.Run()
	w.Close()
	<-copied
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		fmt.Fprintf(stderr, "run credential plugin %s: no answer within %s\n", printable(args[0]), timeout)
		return 1
	case errors.As(err, &exit):
		return max(exit.ExitCode(), 1)
	case err != nil:
		fmt.Fprintf(stderr, "run credential plugin %s: %s\n", printable(args[0]), printable(err.Error()))
		return 1
	}
	return 0
}

// printable escapes characters that a terminal does not show as themselves.
func printable(s string) string {
	var b strings.Builder
	var f engine.TextFilter
	for _, r := range s {
		if f.Shows(r) {
			b.WriteRune(r)
			continue
		}
		q := strconv.QuoteRuneToASCII(r)
		b.WriteString(q[1 : len(q)-1])
	}
	return b.String()
}
