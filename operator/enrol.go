package operator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"constellation/agent/upgradeproto"
	"constellation/engine/component"
)

// Agents of old images verify no statements: they run any program that their caller names. Before
// such an agent upgrades its machine, the operator replaces the agent once. Instead of kubeadm, the
// operator names an enrolment program, which installs the agent and the release keys of a newer
// image and ends the old agent. See packages agent and release.
//
// The agent's own report decides only whether the operator replaces it. A captured machine can
// report anything.

const (
	// enrolTimeout is the maximum time until the new agent answers.
	enrolTimeout = 3 * time.Minute
	enrolPoll    = time.Second
)

// enrolToken begins the tokens of runs that bring an agent.
const enrolToken = "enrol/"

// enrol makes sure that the agent verifies what it installs, if there is an enrolment program.
func (h *agentHost) enrol(ctx context.Context, version string, c component.Signed) error {
	if c.Agent == nil {
		return nil
	}
	verifies, err := h.verifies(ctx)
	if err != nil || verifies {
		return err
	}
	kubelet, ok := c.List.ByName("kubelet")
	if !ok {
		return errors.New("the list of components has no kubelet")
	}
	ctx, cancel := context.WithTimeoutCause(ctx, enrolTimeout, fmt.Errorf("no agent that verifies components has responded within %s", enrolTimeout))
	defer cancel()
	if h.log != nil {
		h.log.Info("agent enrolment started", "node", h.node, "digest", c.Agent.Digest)
	}
	// Each attempt has its own token: the old agent would answer a used token with the earlier failure.
	req := &upgradeproto.UpgradeRequest{
		Token: fmt.Sprintf("%s%d", enrolToken, time.Now().UnixNano()), KubernetesVersion: version, What: upgradeproto.What_NODE,
		Components: component.ToProto(component.List{*c.Agent, kubelet}),
	}
	if err := h.enrolOnce(ctx, req); err != nil && !wasCut(err) {
		return err
	}
	tick := time.NewTicker(enrolPoll)
	defer tick.Stop()
	for {
		verifies, err := h.verifies(ctx)
		switch {
		case verifies:
			if h.log != nil {
				h.log.Info("agent enrolled", "node", h.node)
			}
			return nil
		case err != nil && !wasCut(err) && ctx.Err() == nil:
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// verifies returns whether the agent reports that it verifies components.
func (h *agentHost) verifies(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	s, err := h.agent.Status(ctx, &upgradeproto.StatusRequest{})
	return s.GetVerifiesComponents(), err
}

// enrolOnce has the old agent run the enrolment program. The stream of a success is cut, because
// the old agent ends.
func (h *agentHost) enrolOnce(ctx context.Context, req *upgradeproto.UpgradeRequest) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := h.agent.Upgrade(ctx, req)
	for err == nil {
		var m *upgradeproto.UpgradeResponse
		if m, err = stream.Recv(); err != nil {
			break
		}
		switch k := m.GetKind().(type) {
		case *upgradeproto.UpgradeResponse_Log:
			if h.log != nil {
				h.log.Info("agent enrolment", "node", h.node, "source", k.Log.GetSource(), "line", strings.TrimSpace(k.Log.GetLine()))
			}
		case *upgradeproto.UpgradeResponse_Failure:
			return errFailed{k.Failure}
		case *upgradeproto.UpgradeResponse_Success:
			return errors.New("the old agent still runs after the installation of the new one")
		}
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
