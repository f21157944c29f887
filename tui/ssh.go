package tui

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/tui/term"
)

// sshOptions are the flags of verbs that log in to machines.
type sshOptions struct {
	machines       []string
	key            string
	jump           []string
	hostKeys       []string
	sudo           bool
	timeout        time.Duration
	nonInteractive bool
}

// sshFlags adds these flags.
func sshFlags(cmd *cobra.Command, o *sshOptions, most string) {
	fl := cmd.Flags()
	fl.StringArrayVar(&o.machines, "ssh", nil, "machine to log in to, as `USER@HOST` or USER@HOST:PORT"+most)
	fl.StringVar(&o.key, "key", "", "private key `file` (default: the agent's keys and those in ~/.ssh)")
	fl.StringSliceVar(&o.jump, "jump", nil, "comma-separated jump hosts, as `USER@HOST`")
	fl.StringArrayVar(&o.hostKeys, "host-key", nil, "`fingerprint` of a host key to accept, as SHA256:...; may be repeated")
	fl.BoolVar(&o.sudo, "sudo", false, "use sudo where root is needed")
	fl.DurationVar(&o.timeout, "timeout", sshhost.DefaultTimeout, "limit of each connection, such as 10s")
	fl.BoolVar(&o.nonInteractive, "non-interactive", false, "never prompt")
	_ = cmd.MarkFlagFilename("key")
	for _, name := range []string{"ssh", "jump", "host-key"} {
		_ = cmd.RegisterFlagCompletionFunc(name, fixed())
	}
}

// targets returns the machines of the flags.
func (o *sshOptions) targets() ([]sshhost.Target, error) {
	if len(o.machines) == 0 {
		return nil, badFlag(errors.New("no machine is named"), "name each machine with --ssh USER@HOST")
	}
	if o.timeout <= 0 {
		return nil, badFlag(fmt.Errorf("--timeout is %s, want more than 0", o.timeout), "omit it for the default")
	}
	if err := o.keyFile(); err != nil {
		return nil, err
	}
	jump, err := o.jumpHosts()
	if err != nil {
		return nil, err
	}
	out, err := o.logins()
	for i := range out {
		out[i].KeyFile, out[i].Jump, out[i].Sudo = o.key, jump, o.sudo
	}
	return out, err
}

// badFlag is the error of a flag that is not valid.
func badFlag(err error, remedy string) error {
	return &plan.Error{Op: "read flags", Err: err, Remedy: remedy, Exit: plan.ExitUsage}
}

// keyFile returns an error if --key names no file.
func (o *sshOptions) keyFile() error {
	if o.key == "" {
		return nil
	}
	i, err := os.Stat(o.key)
	switch {
	case err == nil && !i.IsDir():
		return nil
	case err == nil || !errors.Is(err, fs.ErrNotExist):
		err = errors.New("it is no file that can be read")
	default:
		err = errors.New("the file does not exist")
	}
	return badFlag(fmt.Errorf("--key %s: %w", strconv.QuoteToASCII(o.key), err), "name the file of a private key")
}

// jumpHosts returns those of --jump.
func (o *sshOptions) jumpHosts() (out []sshhost.Target, err error) {
	for _, s := range o.jump {
		j, err := sshhost.ParseTarget(s)
		if err != nil {
			return nil, err
		}
		out = append(out, j)
	}
	return out, nil
}

// logins returns those of --ssh.
func (o *sshOptions) logins() (out []sshhost.Target, err error) {
	for _, s := range o.machines {
		t, err := sshhost.ParseTarget(s)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(out, func(x sshhost.Target) bool { return x.Address() == t.Address() }) {
			return nil, badFlag(fmt.Errorf("--ssh names %s twice", t.Address()), "name each machine once")
		}
		out = append(out, t)
	}
	return out, nil
}

// options returns how machines are reached. Prompts are written only on a terminal, each
// within a call of around.
func (o *sshOptions) options(s *session, around func(prompt func())) sshhost.Options {
	in, ok := s.Stdin.(*os.File)
	if !ok || !term.IsTerminal(in) || !term.IsTerminal(s.Stderr) || s.Env("CI") != "" || o.nonInteractive {
		return o.asking(s, nil)
	}
	return o.asking(s, &secretPrompts{known: map[string][]byte{}, ask: func(ctx context.Context, question string) (b []byte, err error) {
		around(func() { b, err = term.ReadSecret(ctx, in, s.Stderr, question+": ") })
		return b, err
	}})
}

// asking returns how machines are reached, with prompts of p; nil: there are none.
func (o *sshOptions) asking(s *session, p *secretPrompts) sshhost.Options {
	out := sshhost.UserFiles(s.Env)
	out.Fingerprints, out.Timeout = o.hostKeys, o.timeout
	if p == nil {
		return out
	}
	out.Passphrase = func(ctx context.Context, file string) ([]byte, error) {
		return p.secret(ctx, "Passphrase of "+term.Clean(filepath.Clean(file)))
	}
	out.SudoPassword = func(ctx context.Context, t sshhost.Target) ([]byte, error) {
		question := "Password of " + term.Clean(t.User) + " for sudo"
		if len(o.machines) > 1 {
			question += ", sent to each machine that demands it"
		}
		return p.secret(ctx, question)
	}
	return out
}

// secretPrompts prompts for each secret once, however many machines need it.
type secretPrompts struct {
	ask func(ctx context.Context, question string) ([]byte, error)

	mu    sync.Mutex
	known map[string][]byte
}

// forget has the next secret prompted for.
func (p *secretPrompts) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.known)
}

func (p *secretPrompts) secret(ctx context.Context, question string) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b, ok := p.known[question]; ok {
		return slices.Clone(b), nil
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	b, err := p.ask(ctx, question)
	if err != nil {
		if ctx.Err() == nil {
			err = errors.New("the prompt was not answered")
		}
		return nil, err
	}
	p.known[question] = slices.Clone(b)
	return b, nil
}

// jumpText names the jump hosts; empty without any.
func (o *sshOptions) jumpText() string {
	if len(o.jump) == 0 {
		return ""
	}
	return " through " + strings.Join(o.jump, ", ")
}
