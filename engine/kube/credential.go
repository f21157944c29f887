package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

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
		// A prompt has no line break: it is passed on as soon as it comes.
		buf, kept := make([]byte, 4096), 0
		for {
			n, err := r.Read(buf[kept:])
			n += kept
			kept = 0
			if err == nil {
				kept = incompleteRune(buf[:n])
			}
			text := strings.ReplaceAll(string(buf[:n-kept]), "\r\n", "\n")
			for i, line := range strings.Split(text, "\n") {
				if i > 0 {
					fmt.Fprintln(stderr)
				}
				fmt.Fprint(stderr, printable(line))
			}
			copy(buf, buf[n-kept:n])
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

// incompleteRune returns the length of the start of a character at the end of b.
func incompleteRune(b []byte) int {
	for i := 1; i <= min(len(b), utf8.UTFMax-1); i++ {
		if utf8.RuneStart(b[len(b)-i]) {
			if !utf8.FullRune(b[len(b)-i:]) {
				return i
			}
			break
		}
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
