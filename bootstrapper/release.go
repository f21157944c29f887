package bootstrapper

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/engine/attestation"
	"constellation/joinservice/joinproto"
)

const (
	// standingEvery is how often a member asks whether it was released, unless it is asked to wait otherwise.
	standingEvery = 20 * time.Second
	// resetPause is the pause before a reset that failed is repeated.
	resetPause = 10 * time.Second
)

// errReset means that the machine was released from its cluster and has been reset.
var errReset = errors.New("the machine was released from its cluster and reset")

// watchRelease asks the join services of the cluster whether the machine was released, until ctx ends. A released machine
// is reset, and the error is errReset. Only a control plane that proves that it is a member of the same cluster is
// believed.
func (b *bootstrapper) watchRelease(ctx context.Context) error {
	h, held := b.lock.holder()
	if !held || h.State != member {
		return nil
	}
	validator, err := b.serviceValidator(ctx)
	if err != nil {
		return err
	}
	c := &JoinClient{Metadata: b.m.Metadata, Issuer: b.m.Issuer, Log: b.m.Log, port: b.m.joinPort, hurry: b.m.hurry}
	log := b.m.Log.With("node", h.Node)
	for {
		released, wait := c.released(ctx, memberValidator{validator, h.clusterID()})
		if released {
			break
		}
		if err := c.pause(ctx, &pause{}, wait, standingEvery); err != nil {
			return err
		}
	}
	log.Info("machine released from the cluster")
	for {
		unused, err := b.reset(ctx, func(line string) { log.Info("reset", "line", line) })
		if err == nil && unused {
			log.Info("released machine reset")
			return errReset
		}
		if err == nil {
			log.Info("released machine restarts", "reason", "only a restart clears register 15 of its TPM")
			err = b.m.Restart(ctx)
		}
		log.Warn("reset of released machine not complete, will retry", "err", err)
		if err := c.pause(ctx, &pause{}, resetPause, resetPause); err != nil {
			return err
		}
	}
}

// released reports whether a join service that v accepts says that this machine was released, and after which pause to
// ask again.
func (c *JoinClient) released(ctx context.Context, v attestation.Validator) (released bool, wait time.Duration) {
	self, err := c.Metadata.Self(ctx)
	if err != nil {
		return false, standingEvery
	}
	endpoints, err := c.endpoints(ctx, self)
	if err != nil {
		return false, standingEvery
	}
	wait = standingEvery
	for _, e := range endpoints {
		err := c.standing(ctx, e, v)
		if hasReason(err, joinproto.ReasonReleased) {
			return true, 0
		}
		if asked := askedToWait(err); asked > 0 {
			return false, asked
		}
		if status.Code(err) == codes.PermissionDenied {
			break // an answer: it is a member
		}
	}
	return false, wait
}

// standing sends a request for a ticket without a certificate request: the answer to a member is whether it was
// released.
func (c *JoinClient) standing(ctx context.Context, endpoint string, v attestation.Validator) error {
	conn, err := c.connect(endpoint, v)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, ticketTimeout)
	defer cancel()
	_, err = joinproto.NewJoinServiceClient(conn).IssueJoinTicket(ctx, &joinproto.IssueJoinTicketRequest{})
	return err
}

// hasReason reports whether a call failed for a reason of package joinproto.
func hasReason(err error, reason string) bool {
	st, ok := status.FromError(err)
	if !ok {
		return false
	}
	for _, d := range st.Details() {
		if i, ok := d.(*errdetails.ErrorInfo); ok && i.GetDomain() == joinproto.ErrorDomain && i.GetReason() == reason {
			return true
		}
	}
	return false
}

// restartMachine restarts the machine by systemd.
func restartMachine(ctx context.Context) error {
	if out, err := exec.CommandContext(ctx, "systemctl", "reboot").CombinedOutput(); err != nil {
		return fmt.Errorf("restart the machine: %w: %.200s", err, out)
	}
	<-ctx.Done() // systemd ends this process
	return context.Cause(ctx)
}
