package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/bootstrapper/initproto"
	"constellation/engine/attestation"
	"constellation/engine/attestation/certifier/signer"
	"constellation/engine/attestation/keyprocess"
	"constellation/engine/cloud"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/internal/delay"
)

// IDs of the steps of `recover`.
const (
	StepRecoverKeys = "send-keys"
	StepRecoverWait = "wait-for-secrets"
)

// SecretReader is what a recovery needs of a cluster besides [Cluster].
type SecretReader interface {
	// SecretsReadable returns an error if the API server that answers does not read Secrets. It returns none of them. Another call may
	// reach another API server.
	SecretsReadable(context.Context) error
}

// RecoverRequest says which control planes get their keys.
type RecoverRequest struct {
	// Nodes are the names of control planes; none: all that wait for keys.
	Nodes []string
	// Rehearse makes a plan that sends no keys.
	Rehearse bool
}

// recoverOp names what fails.
const recoverOp = "recover the keys of control planes"

// recovering is one recovery. Steps run one after the other.
type recovering struct {
	*clusterRun
	request RecoverRequest
	master  workspace.MasterSecret
	// certifierKeys and kmsKeys are nil if the cluster has none; fingerprints are theirs, by process.
	certifierKeys, kmsKeys []byte
	fingerprints           map[string]string
	// names are the control planes of the cloud; none: the cloud does not answer.
	names []string
	judge attestation.Validator
	// waiting are the control planes that the plan found, with what they lost.
	waiting map[string][]string
	problem *plan.Error // why the last connection of the plan was refused; nil: it was not
}

// PlanRecover returns the plan to send secret keys to control planes that cannot read theirs. It changes nothing, and sends no keys.
func (e *Engine) PlanRecover(ctx context.Context, r RecoverRequest) (*plan.Plan, error) {
	c, s, err := e.ws.Load()
	if errors.Is(err, workspace.ErrAdopted) || err == nil && s.Adopted() {
		return nil, &plan.Error{Op: recoverOp, Err: errors.New("the cluster was adopted: its control planes have no such keys"), Remedy: "use this command for clusters that `constellation init` made", Exit: plan.ExitUsage}
	}
	if err != nil {
		return nil, err
	}
	if err := e.ws.OnMachines(plan.VerbRecover); err != nil { // hollow machines
		return nil, err
	}
	if !s.ClusterValues.KeyService() && !s.ClusterValues.Certifier {
		return nil, &plan.Error{Op: recoverOp, Err: errors.New("control planes of this cluster have no secret keys: it does not encrypt Secrets, and has no certifier"), Remedy: "`journalctl -u kubelet` on a control plane shows why its API server does not answer", Exit: plan.ExitUsage}
	}
	x := &recovering{clusterRun: &clusterRun{e: e, facts: &facts{config: c, state: s}}, request: r, fingerprints: map[string]string{}}
	if _, x.judge, err = memberValidator(c, s); err != nil {
		return nil, err
	}
	if err := x.derive(); err != nil {
		return nil, err
	}
	if err := x.list(ctx); err != nil {
		return nil, err
	}
	now := e.now()
	p := &plan.Plan{ID: newRunID(plan.VerbRecover, now), Verb: plan.VerbRecover, Cluster: c.Name, Simulated: e.simulated(), NotAttested: e.notAttested(), Created: now.UTC(), Rehearsal: r.Rehearse}
	x.look(ctx)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if len(x.names) == 0 {
		p.Notes = append(p.Notes, "The cloud does not list its machines: control planes are found at "+s.Infrastructure.InitEndpoint+" alone.")
	}
	p.End.Command = e.command(string(plan.VerbRecover))
	for _, n := range r.Nodes {
		p.End.Command += " " + n
	}
	p.End.Done = "control planes have their keys, and API servers read Secrets"
	p.End.Nothing = "no control plane waits for keys, and API servers read Secrets: nothing to recover"
	p.End.Next = []string{e.command("verify")}
	if err := addSteps(ctx, p, x.steps()); err != nil {
		return nil, err
	}
	return p, nil
}

// derive derives the keys from the master secret. The workspace accepts that of its cluster alone.
func (x *recovering) derive() error {
	ws, v := x.e.ws, x.state.ClusterValues
	m, err := ws.MasterSecret()
	if errors.Is(err, workspace.ErrAbsent) {
		return &plan.Error{Op: recoverOp, Err: ws.Absent(workspace.MasterSecretFile), Remedy: "copy the file of this cluster there: the keys are derived from it", Exit: plan.ExitUsage}
	}
	if err != nil {
		return err
	}
	x.master = m
	if v.KeyService() {
		if err := x.deriveKMS(); err != nil {
			return err
		}
	}
	if v.Certifier {
		if x.certifierKeys, err = firstCertifierKeys(m); err != nil {
			return err
		}
		k, err := signer.Parse(x.certifierKeys)
		if err != nil {
			return err
		}
		x.fingerprints[keyprocess.Certifier] = k.Fingerprint()
	}
	return nil
}

// otherSecret is the error of a master secret that is not that of the cluster. Nothing was sent.
func otherSecret(why string) *plan.Error {
	return &plan.Error{
		Op: recoverOp, Err: fmt.Errorf("%s is of another cluster: %s; no keys were sent", workspace.MasterSecretFile, why), Exit: plan.ExitBlocked,
		Remedy: "put the file of this cluster there: `constellation init` wrote it, and you were asked to keep a copy offline",
	}
}

// list reads the names of control planes from the cloud, which need not answer.
func (x *recovering) list(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, x.e.limits.glance)
	defer cancel()
	provider, err := x.e.provider(limited, x.config, x.state)
	if err != nil {
		return err
	}
	machines, err := provider.Machines(limited)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		x.e.log.Info("machines not listed", "err", err)
		return nil
	}
	for _, m := range machines {
		if m.Role == cloud.ControlPlane && m.Stage != plan.NodeGone {
			x.names = append(x.names, m.Name)
		}
	}
	slices.Sort(x.names)
	for _, n := range x.request.Nodes {
		if !slices.Contains(x.names, n) {
			return &plan.Error{Op: recoverOp, Err: fmt.Errorf("%s is no control plane: the cloud lists %s", n, words.And(x.names)), Remedy: "name a control plane, or none for all", Exit: plan.ExitUsage}
		}
	}
	return nil
}

// wanted reports whether a machine may get keys.
func (x *recovering) wanted(name string) bool {
	return len(x.request.Nodes) == 0 || slices.Contains(x.request.Nodes, name)
}

// plannedContacts bounds the connections that a plan makes to find control planes.
const plannedContacts = 8

// look finds control planes that wait for keys. Those that it does not find now get their keys all the same, when they answer.
func (x *recovering) look(ctx context.Context) {
	x.waiting = map[string][]string{}
	seen := map[string]bool{}
	for range plannedContacts {
		l, lost, err := x.contact(ctx, func(name string) bool { return x.wanted(name) && !seen[name] })
		if l == nil {
			if err != nil && !err.again {
				x.problem = err.Error
			}
			return
		}
		name := l.machine.Name
		l.Close()
		seen[name] = true
		if err != nil {
			x.problem = err.Error
			return
		}
		if reasons := reasonsOf(lost); len(reasons) > 0 {
			x.waiting[name] = reasons
		}
	}
}

func reasonsOf(lost *initproto.RecoveryResponse) (out []string) {
	for _, l := range lost.GetLost() {
		out = append(out, fmt.Sprintf("keys of the %s: %s", l.GetProcess(), l.GetReason()))
	}
	return out
}

// contact connects to the bootstrapper of a member that next accepts, and asks which keys it waits for. The caller closes the link, which
// is nil if there is none.
func (x *recovering) contact(ctx context.Context, next func(name string) bool) (*link, *initproto.RecoveryResponse, *attempt) {
	ctx, cancel := context.WithTimeout(ctx, x.e.limits.ack)
	defer cancel()
	d := dialer{x.state.Infrastructure.InitEndpoint, x.judge, func(s attestation.Statement) error {
		if !next(s.Identity.Name) {
			return fmt.Errorf("%w: %s", errOther, s.Identity.Name)
		}
		return nil
	}}
	l, err := d.dial(ctx)
	if err != nil {
		e, again := dialError(d.endpoint, x.config.Advice(), err)
		e.Op = strings.ReplaceAll(e.Op, "the first machine", "a control plane")
		if errors.Is(err, attestation.ErrMember) {
			// An unused machine listens there, too.
			e.Op, again = "check that a control plane at "+d.endpoint+" belongs to this cluster", true
			e.Remedy = "a machine that is not in use yet joins by itself; one of another cluster must not be behind this address"
		}
		return nil, nil, &attempt{Error: e, again: again}
	}
	lost, err := initproto.NewBootstrapperClient(l).Recovery(ctx, &initproto.RecoveryRequest{InitSecret: x.state.Infrastructure.InitSecret})
	if err != nil {
		return l, nil, x.callError(l.machine.Name, err)
	}
	for _, k := range lost.GetLost() {
		if want := k.GetFingerprint(); want != "" && want != x.fingerprints[k.GetProcess()] {
			return l, lost, &attempt{Error: otherSecret(fmt.Sprintf("%s had keys of the %s with fingerprint %s, and those of the file have %s", l.machine.Name, k.GetProcess(), want, x.fingerprints[k.GetProcess()]))}
		}
	}
	return l, lost, nil
}

// callError puts an error of a call into the user's words.
func (x *recovering) callError(name string, err error) *attempt {
	e, again := callError(x.config.Advice(), err)
	e.Op = "recover the keys of " + name
	switch status.Code(err) {
	case codes.Unimplemented:
		e.Err, e.Remedy = errors.New("the bootstrapper of its image has no recovery"), "replace the machine: "+x.config.Advice().Renew
	case codes.FailedPrecondition, codes.InvalidArgument:
		e.Remedy = "the journal of constellation-bootstrapper on the machine has the reason"
	}
	return &attempt{Error: e, again: again}
}

func (x *recovering) steps() []plan.Step {
	who := "each control plane that waits for keys gets them"
	if len(x.request.Nodes) > 0 {
		who = words.And(x.request.Nodes) + " get the keys"
	}
	first := plan.Step{
		ID: StepRecoverKeys, Title: "Send the keys to control planes that wait for them",
		Effect: who + " over attested TLS, and seals them to its TPM",
		Done: func(ctx context.Context) (bool, error) {
			return len(x.waiting) == 0 && x.problem == nil && x.readable(ctx), nil
		},
		Run: x.send,
	}
	for _, n := range slices.Sorted(maps.Keys(x.waiting)) {
		first.Details = append(first.Details, n+" waits for "+strings.Join(x.waiting[n], ", "))
	}
	if len(x.waiting) == 0 {
		text := "no control plane waits for keys at " + x.state.Infrastructure.InitEndpoint + " yet"
		if x.problem != nil {
			text = x.problem.Error()
		}
		first.Details = []string{text}
	}
	return []plan.Step{first, {
		ID: StepRecoverWait, Title: "Wait until API servers read Secrets", Effect: "the API server at " + x.state.Infrastructure.ClusterEndpoint + " decrypts Secrets",
		Done: func(ctx context.Context) (bool, error) { return x.readable(ctx), nil },
		Run:  x.wait,
	}}
}

// readSure is how often, for each control plane, the API server that a load balancer selects must read Secrets.
const readSure = 3

// readable reports whether API servers read Secrets now.
func (x *recovering) readable(ctx context.Context) bool {
	ok, err := x.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) { return true, x.read(ctx, k) })
	return ok && err == nil
}

// read returns an error unless the API servers behind a number of connections read Secrets: a load balancer selects them.
func (x *recovering) read(ctx context.Context, k Cluster) error {
	s, ok := k.(SecretReader)
	if !ok {
		return errors.New("this connection reads no Secrets")
	}
	for range readSure * max(len(x.names), 1) {
		if err := s.SecretsReadable(ctx); err != nil {
			return err
		}
	}
	return nil
}

// send sends the keys until all control planes have answered, or until the cluster reads Secrets and no further one waits.
func (x *recovering) send(ctx context.Context, r *plan.Reporter) error {
	r.Hide(x.master.Key, x.master.Salt, x.state.Infrastructure.InitSecret, x.master.KMSSecret(), x.master.CertifierSecret(), x.kmsKeys, x.certifierKeys)
	settled := map[string]bool{}
	var recovered []string
	news := x.e.now()
	var last *attempt
	wait := backoff{least: 250 * time.Millisecond, most: 2 * time.Second}
	for attempts := 1; ; attempts++ {
		name, got, failure := x.sendOne(ctx, r, func(name string) bool { return x.wanted(name) && !settled[name] })
		if ctx.Err() != nil {
			return ctx.Err()
		}
		switch {
		case failure == nil:
			settled[name], news, wait.last = true, x.e.now(), 0
			if got {
				recovered = append(recovered, name)
				r.Send(plan.Event{Kind: plan.KindProgress, Object: "control planes", Text: "control planes with keys", Current: int64(len(recovered)), Total: int64(max(len(x.targets()), len(recovered)))})
			}
		case errors.Is(failure.Err, errOther): // one that has its keys still listens for a moment
		default:
			last = failure
			if failure.Exit == plan.ExitBlocked { // another master secret
				return failure.Error
			}
		}
		if x.complete(settled) {
			break
		}
		quiet := x.e.now().Sub(news)
		if quiet > x.e.limits.gone && x.readable(ctx) {
			break
		}
		if err := x.giveUp(last, quiet, recovered); err != nil {
			return err
		}
		r.Send(plan.Event{Kind: plan.KindWait, Object: "control-planes", Attempt: attempts, Text: x.missing(settled, last)})
		if !delay.For(ctx, wait.next()) {
			return ctx.Err()
		}
	}
	r.Wait("", "", "")
	slices.Sort(recovered)
	text := "no control plane waited for keys"
	if len(recovered) > 0 {
		text = words.And(recovered) + " got the keys"
	}
	var silent []string
	for _, n := range x.targets() {
		if !settled[n] {
			silent = append(silent, n)
		}
	}
	if len(silent) > 0 {
		text += "; " + words.And(silent) + " asked for none"
	}
	r.Conclude(text)
	return nil
}

// giveUp returns the error of a recovery without news; nil while it may go on. Evidence that was refused does not get better.
func (x *recovering) giveUp(last *attempt, quiet time.Duration, recovered []string) error {
	limit := x.e.limits.contact
	if last != nil && !last.again {
		limit = x.e.limits.gone
	}
	if quiet <= limit {
		return nil
	}
	if last != nil && !last.again {
		return last.Error
	}
	e := &plan.Error{Op: recoverOp, Err: fmt.Errorf("no control plane that waits for keys answered at %s for %s", x.state.Infrastructure.InitEndpoint, quiet.Round(time.Second))}
	if last != nil && last.Err != nil {
		e.Err = fmt.Errorf("%w: %w", e.Err, last.Err)
	}
	e.Remedy = "restart the control planes: a bootstrapper that starts and finds no keys listens. `journalctl -u constellation-bootstrapper -u constellation-kms` on one shows what it lacks. Then run the same command again"
	if len(recovered) > 0 {
		e.Remedy = "these have their keys: " + words.And(recovered) + ". Start the others; then run the same command again"
	}
	return e
}

// targets are the control planes that may get keys; none: not known.
func (x *recovering) targets() []string {
	if len(x.request.Nodes) > 0 {
		return x.request.Nodes
	}
	return x.names
}

// complete reports whether all control planes have answered.
func (x *recovering) complete(settled map[string]bool) bool {
	all := x.targets()
	return len(all) > 0 && !slices.ContainsFunc(all, func(n string) bool { return !settled[n] })
}

// missing describes the control planes that have not asked for keys.
func (x *recovering) missing(settled map[string]bool, last *attempt) string {
	var open []string
	for _, n := range x.targets() {
		if !settled[n] {
			open = append(open, n)
		}
	}
	text := "no further control plane asks for keys yet"
	if len(open) > 0 {
		text = fmt.Sprintf("%s %s for no keys yet", words.And(open), words.Verb(len(open), "ask"))
	}
	if last != nil && last.Err != nil {
		text += " (" + last.Err.Error() + ")"
	}
	return text
}

// sendOne sends keys to one control plane, and reports whether it waited for any.
func (x *recovering) sendOne(ctx context.Context, r *plan.Reporter, next func(string) bool) (name string, got bool, failure *attempt) {
	l, lost, failure := x.contact(ctx, next)
	if l == nil {
		return "", false, failure
	}
	defer l.Close()
	name = l.machine.Name
	if failure != nil || len(lost.GetLost()) == 0 {
		return name, false, failure
	}
	req := &initproto.RecoverRequest{InitSecret: x.state.Infrastructure.InitSecret, ClusterId: x.state.ClusterValues.ClusterID}
	var what []string
	for _, k := range lost.GetLost() {
		switch k.GetProcess() {
		case keyprocess.KeyService:
			req.KmsKeys = x.kmsKeys
		case keyprocess.Certifier:
			req.CertifierKeys = x.certifierKeys
		}
		what = append(what, k.GetProcess())
		r.Log("engine", name, "info", fmt.Sprintf("%s waits for keys of the %s: %s", name, k.GetProcess(), k.GetReason()))
	}
	limited, cancel := context.WithTimeout(ctx, time.Minute) // a TPM and the start of a process
	defer cancel()
	if _, err := initproto.NewBootstrapperClient(l).Recover(limited, req); err != nil {
		return name, false, x.callError(name, err)
	}
	r.Log("engine", name, "info", fmt.Sprintf("%s sealed keys of the %s to its TPM", name, strings.Join(what, " and the ")))
	return name, true, nil
}

// wait waits until the API server reads Secrets.
func (x *recovering) wait(ctx context.Context, r *plan.Reporter) error {
	k, err := x.connect(ctx)
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, x.e.limits.api)
	defer cancel()
	wait := backoff{least: 100 * time.Millisecond, most: 2 * time.Second}
	for {
		err := x.read(limited, k)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if limited.Err() != nil {
			return x.clusterError("read Secrets", err)
		}
		r.Wait("api-server", "", fmt.Sprintf("the API server at %s does not read Secrets yet (%v)", x.state.Infrastructure.ClusterEndpoint, err))
		if !delay.For(limited, wait.next()) && ctx.Err() == nil {
			return x.clusterError("read Secrets", err)
		}
	}
}
