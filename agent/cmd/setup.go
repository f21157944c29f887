//go:build linux

package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"

	"constellation/agent"
)

// Verbs of the pods that install the agent on machines that somebody else made.
const (
	verbInstall = "install"
	verbRemove  = "remove"
	verbWait    = "wait" // does nothing until it is ended; its container is Ready meanwhile
)

// setup executes one of the verbs. A removal prints its result as JSON.
func setup(ctx context.Context, verb string, args []string, out io.Writer) error {
	f := flag.NewFlagSet("agent "+verb, flag.ContinueOnError)
	root := f.String("root", "/", "root `directory` of the host's file system")
	keys := f.String("keys", "", "`file` with the public keys of those who sign the components of this host")
	result := f.String("result", "", "`file` that gets the result of a removal as JSON; empty prints it")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	s := agent.Setup{Root: *root, Program: program}
	switch verb {
	case verbInstall:
		if s.Keys, err = os.ReadFile(*keys); err != nil {
			return fmt.Errorf("-keys: %w", err)
		}
		return s.Install(ctx)
	case verbRemove:
		r, err := s.Remove(ctx)
		if err != nil {
			return err
		}
		b, err := json.Marshal(r)
		if err != nil {
			return fmt.Errorf("marshal the result: %w", err)
		}
		if *result != "" {
			return os.WriteFile(*result, b, 0o600)
		}
		_, err = fmt.Fprintln(out, string(b))
		return err
	}
	<-ctx.Done()
	return nil
}
