package enrol

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"constellation/engine/attestation"
	"constellation/engine/attestation/authority"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
)

// parallel is how many machines are enrolled at a time.
const parallel = 8

// Job is one machine of a batch.
type Job struct {
	Target sshhost.Target
	Spec   Spec
	// Authority certifies the machine as Identity; nil: it gets no identity.
	Authority *authority.Authority
	Identity  attestation.Identity
	// TPM is where the machine makes its key: the address of a TPM, attestation.AutoTPM or NoTPM. Empty: it keeps
	// the key that it has.
	TPM string
	// Rejoin resets a node that its cluster does not have any more, so that it joins again.
	Rejoin bool
	// Accept returns an error if the machine may not be certified with its key in this TPM, as in Key; nil: it may.
	Accept func(Key) error
}

// Key is where the key of a machine is.
type Key struct {
	// Attested is whether a TPM holds it. EK is the endorsement key of that TPM, sha256: and its hash in hex. TPM is
	// its address, as the machine states it.
	Attested bool
	EK, TPM  string
	// Hash is sha256: and the hash of the public key in hex.
	Hash string
	// Vendor is the root of the certificate that the vendor of that TPM issued; empty: none was verified.
	Vendor string
	// Unused is why a TPM of the machine does not hold it.
	Unused string
}

// Batch are machines that are enrolled side by side.
type Batch struct {
	// SSH are the options for all of them; its Target is not used.
	SSH  sshhost.Options
	Jobs []Job
	Who  string
	Now  func() time.Time
	// Rehearse only reports what would be done.
	Rehearse bool
	// Connected is the connection to the machine of the only job; nil: SSH.
	Connected Machine
}

// Result is the enrolment or the removal of one machine.
type Result struct {
	Outcome
	// Key is that of an enrolled machine.
	Key  Key
	Took time.Duration
	Err  error
}

// InstallAll enrols machines and returns their results in the order of the jobs. step is called at each step of
// a machine, done after the last one; neither is called concurrently.
func InstallAll(ctx context.Context, b Batch, step func(i int, s Step), done func(i int, r Result)) []Result {
	out := make([]Result, len(b.Jobs))
	places := make(chan struct{}, parallel)
	var mu sync.Mutex
	var all sync.WaitGroup
	for i, j := range b.Jobs {
		all.Go(func() {
			places <- struct{}{}
			defer func() { <-places }()
			began := time.Now()
			out[i].Outcome, out[i].Key, out[i].Err = b.one(ctx, j, func(s Step) {
				mu.Lock()
				defer mu.Unlock()
				step(i, s)
			})
			out[i].Took = time.Since(began).Round(time.Millisecond)
			mu.Lock()
			defer mu.Unlock()
			done(i, out[i])
		})
	}
	all.Wait()
	return out
}

func (b *Batch) one(ctx context.Context, j Job, report func(Step)) (out Outcome, key Key, err error) {
	if ctx.Err() != nil {
		return out, key, context.Cause(ctx)
	}
	h := b.Connected
	if h == nil {
		report(Step{Title: "log in"})
		o := b.SSH
		o.Target = j.Target
		s, err := sshhost.Dial(ctx, o)
		if err != nil {
			return out, key, err
		}
		defer s.Close()
		h = s
	}
	restart := false
	r := Request{Spec: j.Spec, Who: b.Who, Now: b.Now, Report: report, Rejoin: j.Rejoin}
	r.Reset = func(ctx context.Context, m Machine) (err error) { restart, err = resetNode(ctx, m); return err }
	if b.Rehearse {
		out, err = Examine(ctx, h, r)
		return out, key, err
	}
	if j.Authority != nil {
		r.Prepare = func(ctx context.Context, m Machine) (err error) { key, err = Identify(ctx, m, j); return err }
	}
	out, err = Install(ctx, h, r)
	if restart {
		out.Notes = append(out.Notes, "restart the machine: its TPM shows the previous membership until then, and it joins afterwards")
	}
	if key.Unused != "" {
		out.Notes = append(out.Notes, key.Unused)
	}
	return out, key, err
}

// VendorRoots reads the certificates of TPM vendors in a folder, for Job.Authority.
func VendorRoots(dir string) (*x509.CertPool, error) {
	p, err := authority.ReadEKRoots(dir)
	if err != nil {
		return nil, &plan.Error{Op: "read the certificates of TPM vendors", Err: err, Exit: plan.ExitUsage, Remedy: "name a folder with the root and intermediate certificates of the vendor, in PEM or DER"}
	}
	return p, nil
}

// unusedTPM begins the line in which the bootstrapper states why a TPM does not hold the key.
const unusedTPM = "the key is in a file, because "

// Identify has the bootstrapper of a machine make a key, and certifies it as j says. A machine that has a certificate
// gets a new one for the same key.
func Identify(ctx context.Context, m Machine, j Job) (key Key, err error) {
	op := "certify " + m.Target().String()
	ctx, cancel := context.WithTimeoutCause(ctx, limit, &plan.Error{Op: op, Err: fmt.Errorf("it did not end within %s", limit), Remedy: "check the load of the machine, then run the same command again"})
	defer cancel()
	verb := func(in []byte, args ...string) ([]byte, error) {
		r, err := m.Run(ctx, sshhost.Command{Argv: inEnvironment(append([]string{"identity"}, args...)...), Root: true, Stdin: bytes.NewReader(in)})
		if err != nil {
			return nil, err
		}
		if err := r.Err(); err != nil {
			return nil, &plan.Error{Op: op, Err: fmt.Errorf("bootstrapper identity %s: %w", args[0], err), Remedy: "mend it on the machine, then run the same command again"}
		}
		if _, why, ok := strings.Cut(string(r.Stderr), unusedTPM); ok && args[0] == "request" {
			line, _, _ := strings.Cut(why, "\n")
			key.Unused = unusedTPM + sshhost.Text([]byte(line))
		}
		return document(r.Stdout), nil
	}
	bad := func(err error) error {
		return &plan.Error{Op: op, Err: errors.New(sshhost.Text([]byte(err.Error()))), Remedy: "run the same command again; if it repeats, the machine runs another program than the one that was sent"}
	}
	args := []string{"request"}
	if j.TPM != "" {
		args = append(args, "-tpm", j.TPM)
	}
	request, err := verb(nil, args...)
	if err != nil {
		return key, err
	}
	challenge, expect, err := j.Authority.Challenge(request)
	if errors.Is(err, authority.ErrVendor) {
		return key, &plan.Error{Op: op, Err: err, Remedy: "add the vendor's root and intermediate certificates to the folder of --tpm-roots; if this cannot be a TPM of that vendor, do not enrol the machine"}
	}
	if err != nil {
		return key, bad(err)
	}
	key.Hash, key.Vendor = expect.Key, expect.Vendor
	if j.Authority.EKRoots != nil && key.Vendor == "" {
		why := "its key is in a file"
		if expect.Kind == attestation.KindTPM {
			why = "its TPM has no certificate of its vendor"
		}
		return key, &plan.Error{Op: op, Err: fmt.Errorf("the vendor of its TPM is to be verified, and %s", why), Remedy: "leave out --tpm-roots to enrol it all the same"}
	}
	if expect.Kind == attestation.KindTPM {
		key.Attested, key.EK, key.Unused = true, "sha256:"+expect.EK, ""
	}
	if j.Accept != nil {
		if err := j.Accept(key); err != nil {
			return key, err
		}
	}
	answer, err := verb(challenge, "answer")
	if err != nil {
		return key, err
	}
	certificate, err := j.Authority.Certify(request, answer, expect, j.Identity)
	if err != nil {
		return key, bad(err)
	}
	stored, err := verb(certificate, "store")
	if err != nil || !key.Attested {
		return key, err
	}
	var id attestation.EnrolledIdentity
	if err := json.Unmarshal(stored, &id); err != nil {
		return key, bad(fmt.Errorf("read the identity that it stored: %w", err))
	}
	key.TPM = id.TPM
	return key, nil
}

// document is the JSON document at the end of an output. A startup file of the shell may print before.
func document(out []byte) []byte {
	if i := bytes.IndexByte(out, '{'); i > 0 {
		return out[i:]
	}
	return out
}

// inEnvironment is the bootstrapper with the environment that its unit gives it. Without the bootstrapper
// there is nothing to do.
func inEnvironment(args ...string) []string {
	const program = `[ -x "$1" ] || exit 0
b=$1
if [ -e "$2" ]; then set -a; . "$2"; set +a; fi
shift 2
exec "$b" "$@"`
	return append([]string{"sh", "-c", program, "sh", Bootstrapper, EnvironmentFile}, args...)
}

// Removal is a machine to give back.
type Removal struct {
	SSH sshhost.Options // with its Target
	// Cluster is the unique ID of the cluster of the workspace, Machine the name of the machine there.
	Cluster, Machine string
	Who              string
	Now              func() time.Time
	Report           func(Step)
	// Connected is the connection to the machine; nil: SSH.
	Connected Machine
}

// RemoveOne resets a machine and takes its enrolment back. It returns an error that wraps ErrNotEnrolled if
// the machine has none, and a plan.Error if it is enrolled under another name.
func RemoveOne(ctx context.Context, r Removal) (Outcome, error) {
	h := r.Connected
	if h == nil {
		r.Report(Step{Title: "log in"})
		s, err := sshhost.Dial(ctx, r.SSH)
		if err != nil {
			return Outcome{}, err
		}
		defer s.Close()
		h = s
	}
	if err := named(ctx, h, r.Cluster, r.Machine, "remove"); err != nil {
		return Outcome{}, err
	}
	return Remove(ctx, h, Request{Spec: Spec{Cluster: r.Cluster}, Who: r.Who, Now: r.Now, Reset: ResetNode, Report: r.Report})
}

// named returns an error if the machine is enrolled under another name.
func named(ctx context.Context, m Machine, cluster, name, verb string) error {
	j, err := Read(ctx, m)
	if err != nil || j == nil || j.Cluster != cluster || j.Machine == name {
		return err
	}
	return &plan.Error{Op: verb + " " + name, Err: fmt.Errorf("%s is the machine %s of this cluster", m.Target(), j.Machine), Remedy: "correct the name or --ssh", Exit: plan.ExitUsage}
}

// Logs are the units whose messages [Follow] prints.
var Logs = []string{"constellation-bootstrapper", "constellation-agent", "kubelet", "containerd", "haproxy", "keepalived"}

// LogRequest selects messages of a machine.
type LogRequest struct {
	SSH              sshhost.Options // with its Target
	Cluster, Machine string
	Units            []string // empty: all of Logs
	Lines            int
	Follow           bool
}

// Follow writes messages of a machine to w, as the machine prints them: they are hostile.
func Follow(ctx context.Context, r LogRequest, w io.Writer) error {
	h, err := sshhost.Dial(ctx, r.SSH)
	if err != nil {
		return err
	}
	defer h.Close()
	if err := named(ctx, h, r.Cluster, r.Machine, "read the log of"); err != nil {
		return err
	}
	argv := []string{"journalctl", "--no-pager", "-q", "-o", "short-iso", "-n", fmt.Sprint(r.Lines)}
	units := r.Units
	if len(units) == 0 {
		units = Logs
	}
	for _, u := range units {
		argv = append(argv, "-u", u)
	}
	if r.Follow {
		argv = append(argv, "-f")
	}
	res, err := h.Run(ctx, sshhost.Command{Argv: argv, Root: true, Stdout: w})
	if err != nil {
		return err
	}
	if err := res.Err(); err != nil {
		return &plan.Error{Op: "read the log of " + r.Machine, Err: err, Remedy: "check that journald runs on the machine"}
	}
	return nil
}

// Self names this console to others: the user and the computer.
func Self(env func(string) string) string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	user := env("USER")
	if user == "" {
		user = fmt.Sprint("uid ", os.Getuid())
	}
	return user + "@" + host
}
