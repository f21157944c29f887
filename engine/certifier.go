package engine

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"time"

	"constellation/engine/attestation"
	"constellation/engine/attestation/certifier/signer"
	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/internal/delay"
)

// firstCertifierKeys returns the keys that the certifier of a new cluster begins with. A cluster that replaces one whose control
// planes are all lost gets the same keys, from the same master secret.
func firstCertifierKeys(m workspace.MasterSecret) ([]byte, error) {
	owner, err := signer.NewOwner(m.CertifierSecret())
	if err != nil {
		return nil, err
	}
	keys, err := owner.Keys(max(m.Certifier, 1))
	if err != nil {
		return nil, err
	}
	return keys.Encode()
}

// CertifiedBy is the certificate of a machine by the certifier of its cluster.
type CertifiedBy struct {
	Generation uint32    `json:"generation"`
	Until      time.Time `json:"until"`
}

// certifierOf has the owner's side of a certifier. Nil: the cluster has none, or the workspace lacks the master secret.
type certifierOf struct {
	owner *signer.Owner
	// generation is that of the keys in the master secret's file.
	generation uint32
}

// certifierOf returns what the workspace has about the certifier of its cluster.
func (e *Engine) certifierOf(s *workspace.State) (*certifierOf, error) {
	if !s.ClusterValues.Certifier {
		return nil, nil
	}
	m, err := e.ws.MasterSecret()
	if errors.Is(err, workspace.ErrAbsent) {
		return nil, nil // it may be kept offline
	}
	if err != nil {
		return nil, err
	}
	owner, err := signer.NewOwner(m.CertifierSecret())
	return &certifierOf{owner, max(m.Certifier, 1)}, err
}

// roots are the authorities of the certifier that may take the place of the cloud's API: those of the present generation, and of the
// next one, because a rotation is published before the file has its generation.
func (c *certifierOf) roots() (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	for _, g := range []uint32{c.generation, c.generation + 1} {
		a, err := c.authority(g)
		if err != nil {
			return nil, err
		}
		pool.AddCert(a)
	}
	return pool, nil
}

// authority returns the authority of a generation.
func (c *certifierOf) authority(generation uint32) (*x509.Certificate, error) {
	k, err := c.owner.Keys(generation)
	if err != nil {
		return nil, err
	}
	b, _ := pem.Decode(k.Authorities(time.Now()))
	if b == nil {
		return nil, errors.New("the authority of the certifier is not PEM")
	}
	return x509.ParseCertificate(b.Bytes)
}

// certified returns by which generation a certificate in evidence is; nil: by none that is known.
func (c *certifierOf) certified(der []byte) *CertifiedBy {
	cert, err := x509.ParseCertificate(der)
	if c == nil || err != nil {
		return nil
	}
	for _, g := range []uint32{c.generation, c.generation + 1, max(c.generation, 2) - 1} {
		if a, err := c.authority(g); err == nil && cert.CheckSignatureFrom(a) == nil {
			return &CertifiedBy{g, cert.NotAfter.UTC()}
		}
	}
	return nil
}

// IDs of the steps of `certifier rotate`.
const (
	StepRotationPublish = "publish-rotation"
	StepRotationRecord  = "record-generation"
	StepRotationWait    = "wait-for-certifiers"
)

// Rotator is what a rotation of the certifier's keys needs of a cluster besides [Cluster] and [Verifier].
type Rotator interface {
	// CertifierRotation returns the newest rotation that was published; empty: none was.
	CertifierRotation(context.Context) (string, error)
	// PublishCertifierRotation puts a rotation in the place of old, and records who did so. The error wraps cluster.ErrConflict
	// if another one is there.
	PublishCertifierRotation(ctx context.Context, old, rotation, record string) error
}

// RotateRequest says how the keys of the certifier are rotated.
type RotateRequest struct {
	// Revoke ends the certificates of the former keys at once. Without it, they are accepted until they end.
	Revoke bool
	// Reason is recorded, for an audit; it may be empty.
	Reason string
	// Rehearse makes a plan that has no effect.
	Rehearse bool
}

// rotating is one rotation. Steps run one after the other.
type rotating struct {
	*clusterRun
	request   RotateRequest
	certifier *certifierOf
	rotator   Rotator
	to        uint32 // generation
}

// rotateOp names what fails.
const rotateOp = "rotate the keys of the certifier"

// PlanRotate returns the plan to rotate the keys of the certifier, or what is left of a rotation that is under way. It changes
// nothing. Findings that forbid it are in the plan: a control plane whose certifier does not have the present keys would not
// get the next ones.
func (e *Engine) PlanRotate(ctx context.Context, r RotateRequest) (*plan.Plan, error) {
	if err := (RevokeRequest{Reason: r.Reason}).check(); err != nil {
		return nil, err
	}
	_, s, err := e.ws.Load()
	if err != nil {
		return nil, err
	}
	if !s.ClusterValues.Certifier {
		return nil, &plan.Error{Op: rotateOp, Err: errors.New("the cluster has no certifier"), Remedy: "new clusters in Google Cloud have one", Exit: plan.ExitUsage}
	}
	c, err := e.certifierOf(s)
	if err != nil {
		return nil, err
	}
	if c == nil {
		return nil, &plan.Error{Op: rotateOp, Err: e.ws.Absent(workspace.MasterSecretFile), Remedy: "copy the file of this cluster there: the keys are derived from it", Exit: plan.ExitUsage}
	}
	i, err := e.watcher(ctx, rotateOp, WatchRequest{})
	if err != nil {
		return nil, err
	}
	rotator, ok := i.cluster.(Rotator)
	if !ok {
		return nil, errors.New("this connection rotates no keys")
	}
	x := &rotating{clusterRun: i, request: r, certifier: c, rotator: rotator}
	limited, cancel := context.WithTimeout(ctx, e.limits.api)
	defer cancel()
	text, err := rotator.CertifierRotation(limited)
	if err != nil {
		return nil, i.clusterError(rotateOp, err)
	}
	now := e.now()
	p := &plan.Plan{ID: newRunID(plan.VerbRotate, now), Verb: plan.VerbRotate, Cluster: i.state.Infrastructure.Name, Simulated: e.simulated(), Created: now.UTC(), Rehearsal: r.Rehearse}
	published, revokes, err := c.published(text)
	if err != nil {
		p.Findings = append(p.Findings, plan.Finding{
			ID: "certifier-rotation-unknown", Severity: plan.Block, Source: "cluster", Title: "join-config has a rotation that is not of this owner", Detail: err.Error(),
			Remedy: "certifiers refuse it; find out who wrote it, then remove the key certifierRotation of ConfigMap kube-system/join-config",
		})
		return p, nil
	}
	v, err := e.Verify(ctx)
	if err != nil {
		return nil, err
	}
	present := max(c.generation, published)
	behind := notAt(&v, present)
	x.to = present + 1
	if published == present && len(behind) > 0 || published > c.generation {
		x.to = present // it is under way
	}
	x.judge(p, behind, present, revokes)
	p.End.Command = e.command(string(plan.VerbRotate)) + r.flags()
	p.End.Done = fmt.Sprintf("all certifiers use keys of generation %d", x.to)
	p.End.Next = []string{e.command("verify")}
	p.Files = []plan.File{{Path: e.ws.Path(workspace.MasterSecretFile), Mode: "0600", Secret: true, Note: "has the generation now: renew your copy"}}
	if len(p.Blocked()) > 0 {
		return p, nil
	}
	if err := addSteps(ctx, p, x.steps()); err != nil {
		return nil, i.clusterError(rotateOp, err)
	}
	return p, nil
}

// flags are the arguments that make the same request, with a leading space each.
func (r RotateRequest) flags() (s string) {
	if r.Revoke {
		s += " --revoke"
	}
	if r.Reason != "" {
		s += " --reason " + check.ShellQuote(r.Reason)
	}
	return s
}

// published returns the generation that a rotation leads to, 0 without one, and whether it revokes former certificates.
func (c *certifierOf) published(text string) (generation uint32, revokes bool, err error) {
	if text == "" {
		return 0, false, nil
	}
	return c.owner.Rotated([]byte(text))
}

// notAt returns the control planes whose evidence has no certificate of a generation.
func notAt(v *Verification, generation uint32) (nodes []string) {
	for _, m := range v.Machines {
		if m.Result != Verified || m.Certifier == nil || m.Certifier.Generation != generation {
			nodes = append(nodes, m.Node)
		}
	}
	return nodes
}

// judge adds findings. behind are control planes without the present keys. revokes is about the rotation that led to these.
func (x *rotating) judge(p *plan.Plan, behind []string, present uint32, revokes bool) {
	if x.to > present {
		if len(behind) > 0 {
			p.Findings = append(p.Findings, plan.Finding{
				ID: "certifier-behind", Severity: plan.Block, Source: "cluster", Title: fmt.Sprintf("%s %s no certificate of generation %d", words.And(behind), words.Verb(len(behind), "show"), present),
				Detail: "the next keys are encrypted for the present ones, so these control planes would not get them",
				Remedy: "`constellation verify` shows the reason; a new control plane needs about a minute. Replace a control plane that stays behind",
			})
		}
		return
	}
	p.Notes = append(p.Notes, fmt.Sprintf("The rotation to generation %d is under way: this completes it.", x.to))
	if x.request.Revoke && !revokes {
		p.Findings = append(p.Findings, plan.Finding{
			ID: "certifier-rotation-under-way", Severity: plan.Block, Source: "cluster", Title: fmt.Sprintf("the rotation to generation %d is under way", x.to),
			Remedy: "complete it without --revoke, then run this command again",
		})
	}
}

func (x *rotating) steps() []plan.Step {
	from := x.to - 1
	former := fmt.Sprintf("certificates of generation %d are accepted until they end", from)
	if x.request.Revoke {
		former = fmt.Sprintf("certificates of generation %d are refused from then on", from)
	}
	return []plan.Step{
		{
			ID: StepRotationPublish, Title: "Publish the next keys",
			Effect:  fmt.Sprintf("join-config has the keys of generation %d, which only certifiers with those of generation %d can read; %s", x.to, from, former),
			Warning: "A rotation cannot be undone. To replace its keys, rotate again.",
			Final:   true,
			Done: func(ctx context.Context) (bool, error) {
				return x.glance(ctx, func(ctx context.Context, _ Cluster) (bool, error) {
					text, err := x.rotator.CertifierRotation(ctx)
					if err != nil {
						return false, err
					}
					g, _, err := x.certifier.published(text)
					return err == nil && g >= x.to, nil
				})
			},
			Run: x.publish,
		},
		{
			ID: StepRotationRecord, Title: "Record the generation",
			Effect: fmt.Sprintf("%s has generation %d: a cluster that replaces this one begins with it", workspace.MasterSecretFile, x.to),
			Done: func(context.Context) (bool, error) {
				m, err := x.e.ws.MasterSecret()
				return m.Certifier >= x.to, err
			},
			Run: func(context.Context, *plan.Reporter) error {
				m, err := x.e.ws.MasterSecret()
				if err != nil {
					return err
				}
				m.Certifier = x.to
				return x.e.ws.WriteMasterSecret(m)
			},
		},
		{
			ID: StepRotationWait, Title: "Wait for the certifiers", Effect: fmt.Sprintf("the evidence of each control plane has a certificate of generation %d", x.to),
			Done: func(ctx context.Context) (bool, error) {
				v, err := x.e.Verify(ctx)
				return err == nil && len(notAt(&v, x.to)) == 0, nil
			},
			Run: x.wait,
		},
	}
}

func (x *rotating) publish(ctx context.Context, r *plan.Reporter) error {
	return x.inCluster(ctx, r, rotateOp, func(ctx context.Context, _ Cluster) error {
		old, err := x.rotator.CertifierRotation(ctx)
		if err != nil {
			return err
		}
		switch g, _, err := x.certifier.published(old); {
		case err != nil:
			return err
		case g >= x.to:
			return nil
		}
		rotation, err := x.certifier.owner.Rotation(x.to-1, x.request.Revoke)
		if err != nil {
			return err
		}
		record := fmt.Sprintf("generation %d by %s at %s", x.to, someone(), x.e.now().UTC().Format(time.RFC3339))
		if x.request.Revoke {
			record += ", former certificates revoked"
		}
		if x.request.Reason != "" {
			record += ": " + x.request.Reason
		}
		if err := x.rotator.PublishCertifierRotation(ctx, old, string(rotation), record); err != nil {
			return err
		}
		r.Send(plan.Event{Kind: plan.KindLog, Source: "certifier", Level: "info", Text: "keys of the certifier were rotated: " + record})
		return nil
	})
}

// rotationPoll is the poll interval for certificates. Join services look for a rotation once a minute.
const rotationPoll = 5 * time.Second

// wait waits until all control planes show certificates by the next keys.
func (x *rotating) wait(ctx context.Context, r *plan.Reporter) error {
	var before []string
	changed := x.e.now()
	for {
		v, err := x.e.Verify(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		behind := notAt(&v, x.to)
		if err == nil && len(behind) == 0 {
			return nil
		}
		text := fmt.Sprintf("%s %s no certificate of generation %d yet", words.And(behind), words.Verb(len(behind), "show"), x.to)
		if err != nil {
			text = err.Error()
		}
		if !slices.Equal(before, behind) {
			before, changed = behind, x.e.now()
		}
		if x.e.now().Sub(changed) > x.e.limits.still {
			return &plan.Error{
				Op: "wait for the certifiers", Err: errors.New(text),
				Remedy: "the join service of a control plane logs why a rotation was not accepted; replace that control plane, which gives the new one the keys of another, and run the same command again",
			}
		}
		r.Wait("certifiers", "", text)
		if !delay.For(ctx, min(rotationPoll, x.e.limits.still/4)) {
			return ctx.Err()
		}
	}
}

// judgeWith returns what judges control planes as v does, but by certificates of the certifier where they can take the place of the
// cloud's API. It is nil without a certifier.
func judgeWith(c *workspace.Config, s *workspace.State, by *certifierOf) (attestation.Validator, error) {
	if by == nil {
		return nil, nil
	}
	roots, err := by.roots()
	if err != nil {
		return nil, err
	}
	judge, _, err := judgeOf(c, s, roots)
	if err != nil {
		return nil, err
	}
	return judge(attestation.PCR15ClusterID(s.ClusterValues.ClusterID)), nil
}
