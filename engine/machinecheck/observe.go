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
	"net/netip"
	"strings"
	"time"

	"constellation/engine/plan"
	"constellation/engine/sshhost"
)

//go:embed probe.sh
var script string

// Limit is the time that the script may take.
const Limit = time.Minute

// Machine runs commands on a machine. *sshhost.Host implements it.
type Machine interface {
	Run(context.Context, sshhost.Command) (sshhost.Result, error)
	Target() sshhost.Target
}

// Observe reads the facts of a machine. It does so as root if the user is root or may use sudo. balancer is the address
// of a balancer that the machine is to have, or the zero value.
func Observe(ctx context.Context, h Machine, balancer netip.Addr) (Facts, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, Limit, &plan.Error{Op: "check " + h.Target().String(), Err: errors.New("the machine did not end the script within " + Limit.String()), Remedy: "check the load of the machine, and file systems that hang"})
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
