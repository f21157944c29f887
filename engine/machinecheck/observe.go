package machinecheck

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	_ "embed" // the script
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"constellation/engine/plan"
	"constellation/engine/sshhost"
)

//go:embed probe.sh
var script string

// Limit is the least time that the script, and each command of Fix, may take. On a slow machine, for which the user
// raises the limit of connections, it is three times that one.
const Limit = time.Minute

func limitOf(o sshhost.Options) time.Duration { return max(Limit, 3*o.Timeout) }

// Machine runs commands on a machine. *sshhost.Host implements it.
type Machine interface {
	Run(context.Context, sshhost.Command) (sshhost.Result, error)
	Target() sshhost.Target
}

// Observe reads the facts of a machine. It does so as root if the user is root or may use sudo. balancer is the address
// of a balancer that the machine is to have, or the zero value. limit is the time that this may take.
func Observe(ctx context.Context, h Machine, balancer netip.Addr, limit time.Duration) (Facts, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, &plan.Error{
		Op: "check " + h.Target().String(), Err: fmt.Errorf("the machine did not end the script within %s", limit),
		Remedy: "check the load of the machine, and file systems that hang; raise --timeout for a slow machine",
	})
	defer cancel()
	c := sshhost.Command{Argv: []string{"true"}, Root: true}
	_, err := h.Run(ctx, c) // asks for a password, if one is needed, before the time counts
	if errors.Is(err, sshhost.ErrNotRoot) {
		c.Root, err = false, nil
	}
	if err != nil {
		return Facts{}, err
	}
	mark := rand.Text()
	c.Argv, c.Stdin, c.MaxOutput = []string{"sh", "-s", "--", mark}, strings.NewReader(script), MaxAnswer
	if balancer.IsValid() {
		c.Argv = append(c.Argv, balancer.String())
	}
	from := time.Now()
	r, err := h.Run(ctx, c)
	if err != nil {
		return Facts{}, err
	}
	op := "check " + h.Target().String()
	if err := r.Err(); err != nil {
		return Facts{}, &plan.Error{Op: op, Err: err, Remedy: "check that the user may run sh"}
	}
	f, err := Parse(r.Stdout, mark, from, time.Now())
	if err != nil {
		return Facts{}, &plan.Error{Op: op, Err: err, Remedy: "check what startup files of the user's shell print, then run the command again"}
	}
	return f, nil
}

// CADigest returns what Facts.CA is for a certificate authority in PEM.
func CADigest(certificate []byte) string {
	b, _ := pem.Decode(certificate)
	if b == nil {
		return ""
	}
	sum := sha256.Sum256([]byte(base64.StdEncoding.EncodeToString(b.Bytes)))
	return hex.EncodeToString(sum[:])
}
