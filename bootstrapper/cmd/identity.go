package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"constellation/bootstrapper"
	"constellation/engine/attestation"
	"constellation/engine/cloud/machines"
)

const (
	// maxInput bounds a message of an enrolment, in bytes.
	maxInput = 64 << 10

	identityUsage = "Verbs of identity, in this order. Each can be repeated.\n" +
		"  request [-tpm ADDRESS|none|auto]\n" +
		"            create a key on first use, in a TPM or in a file (none, the default),\n" +
		"            and write a request for its certificate to stdout.\n" +
		"            auto takes /dev/tpmrm0 if there is one that works, else a file\n" +
		"  answer    read a challenge of the workspace's authority from stdin, write the answer to stdout\n" +
		"  store     read the certificate from stdin, store it, write the machine's identity to stdout\n"
)

// identity runs a verb of the machine's half of an enrolment; see package authority.
func identity(ctx context.Context, m bootstrapper.Machine, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	tpm := ""
	if len(args) > 1 && args[0] == "request" {
		f := flag.NewFlagSet("bootstrapper identity request", flag.ContinueOnError)
		f.SetOutput(stderr)
		f.StringVar(&tpm, "tpm", tpm, "`address` of the TPM that makes the key, none for a key in a file, or auto for /dev/tpmrm0 if there is one that works; default: the present key, else none")
		if err := f.Parse(args[1:]); errors.Is(err, flag.ErrHelp) {
			return 0
		} else if err != nil {
			return exitUsage
		}
		args = append(args[:1:1], f.Args()...)
	}
	if len(args) != 1 {
		fmt.Fprintln(stderr, "bootstrapper: identity needs one verb: request, answer or store; see bootstrapper -h")
		return exitUsage
	}
	dir, ok := strings.CutPrefix(m.TPM, "enrolled:")
	if !ok {
		dir = machines.IdentityDir
	}
	dir = filepath.Join(m.Root, dir)
	var out []byte
	var err error
	switch verb := args[0]; verb {
	case "request":
		var unused error
		out, unused, err = attestation.RequestIdentity(ctx, dir, tpm)
		if unused != nil && err == nil {
			fmt.Fprintf(stderr, "bootstrapper: the key is in a file, because the TPM is not usable: %v\n", unused)
		}
	case "answer", "store":
		var in []byte
		if in, err = readInput(stdin); err != nil {
			break
		}
		if verb == "answer" {
			out, err = attestation.AnswerIdentity(ctx, dir, in)
			break
		}
		var id attestation.EnrolledIdentity
		if id, err = attestation.StoreIdentity(ctx, dir, in); err == nil {
			out, err = json.Marshal(id)
			out = append(out, '\n')
		}
	default:
		fmt.Fprintf(stderr, "bootstrapper: unexpected verb %q of identity; see bootstrapper -h\n", verb)
		return exitUsage
	}
	if err == nil {
		_, err = stdout.Write(out)
	}
	if err != nil {
		fmt.Fprintf(stderr, "bootstrapper: identity %s: %v\n", args[0], err)
		return exitFailed
	}
	return 0
}

func readInput(r io.Reader) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxInput+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read stdin: %w", err)
	case len(b) > maxInput:
		return nil, fmt.Errorf("read stdin: more than %d bytes", maxInput)
	}
	return b, nil
}
