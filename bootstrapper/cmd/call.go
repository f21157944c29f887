package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"constellation/engine/callhome/caller"
	"constellation/engine/plain"
)

// call serves a console that cannot log in to this machine.
func call(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	if len(args) != 2 {
		fmt.Fprintln(stderr, "bootstrapper: call needs the address of the console and the digest of its certificate; see bootstrapper -h")
		return exitUsage
	}
	token, err := readInput(stdin)
	if err == nil && os.Geteuid() != 0 {
		err = &caller.Error{Err: errors.New("this user is not root"), Remedy: "run the command as root"}
	}
	if err == nil {
		c := caller.Call{
			Console: args[0], Pin: args[1], Token: strings.TrimSpace(string(token)),
			Print: func(line string) { fmt.Fprintln(stdout, printable(line)) },
		}
		err = c.Run(ctx)
	}
	if err == nil {
		return 0
	}
	fmt.Fprintln(stderr, "bootstrapper: call:", printable(err.Error()))
	var e *caller.Error
	if errors.As(err, &e) && e.Remedy != "" {
		fmt.Fprintln(stderr, "next:", printable(e.Remedy))
	}
	return exitFailed
}

// printable replaces characters that a terminal does not show as themselves.
func printable(s string) string {
	var f plain.Filter
	return strings.Map(func(r rune) rune {
		if f.Shows(r) {
			return r
		}
		return ' '
	}, s)
}
