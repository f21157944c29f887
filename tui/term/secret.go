package term

import (
	"context"
	"fmt"
	"io"
	"os"

	"golang.org/x/term"
)

// ReadSecret prompts for a secret on a terminal and returns what the user typed, which is not
// echoed. The end of ctx restores the terminal.
func ReadSecret(ctx context.Context, in *os.File, out io.Writer, question string) ([]byte, error) {
	fd := int(in.Fd())
	before, err := term.GetState(fd)
	if err != nil {
		return nil, err
	}
	DiscardInput(in)
	fmt.Fprint(out, question)
	type answer struct {
		secret []byte
		err    error
	}
	typed := make(chan answer, 1)
	go func() {
		b, err := term.ReadPassword(fd)
		typed <- answer{b, err}
	}()
	select {
	case a := <-typed:
		fmt.Fprintln(out)
		return a.secret, a.err
	case <-ctx.Done():
		_ = term.Restore(fd, before)
		fmt.Fprintln(out)
		return nil, context.Cause(ctx)
	}
}
