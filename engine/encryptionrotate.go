package engine

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/kms"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/internal/delay"
)

// IDs of the steps of `encryption rotate`.
const (
	StepKeyPublish = "publish-generation"
	StepKeyRecord  = "record-key-generation"
	StepKeyWait    = "wait-for-api-servers"
	StepKeyRewrite = "rewrite-secrets"
)

// Encryptor is what a rotation of the key that encrypts Secrets needs of a cluster besides [Cluster].
type Encryptor interface {
	SecretReader
	// KeyRotation returns what join-config has about the key.
	KeyRotation(context.Context) (kms.Rotation, error)
	// PublishKeyRotation puts next in the place of old. The error wraps cluster.ErrConflict if something else is there.
	PublishKeyRotation(ctx context.Context, old, next kms.Rotation) error
	// APIServerKeys returns the key of the API server of each control plane.
	APIServerKeys(context.Context) ([]cluster.APIServerKey, error)
	// RewriteSecrets has each Secret that another key encrypted encrypted again, and returns how many there are.
	RewriteSecrets(ctx context.Context, progress func(done, total int64)) (int64, error)
}

// RotateKeyRequest says how the key that encrypts Secrets is rotated.
type RotateKeyRequest struct {
	// Reason is recorded, for an audit; it may be empty.
	Reason string
	// Rehearse makes a plan that has no effect.
	Rehearse bool
}

// rotateKeyOp names what fails.
const rotateKeyOp = "rotate the key that encrypts Secrets"

// keyRotating is one rotation. Steps run one after the other.
type keyRotating struct {
	*clusterRun
	request RotateKeyRequest
	cluster Encryptor
	to      uint32 // generation
	hash    string // of the ID of its key
}

// encryptionOf returns the master secret of a cluster that encrypts Secrets, and the cluster.
func (e *Engine) encryptionOf(ctx context.Context, op string) (workspace.MasterSecret, *clusterRun, Encryptor, error) {
	fail := func(err error) (workspace.MasterSecret, *clusterRun, Encryptor, error) {
		return workspace.MasterSecret{}, nil, nil, err
	}
	_, s, err := e.ws.Load()
	if err != nil {
		return fail(err)
	}
	if !s.ClusterValues.EncryptsSecrets {
		return fail(&plan.Error{Op: op, Err: errors.New("the cluster stores Secrets without encryption"), Remedy: "docs/encryption.md lists the clusters that encrypt Secrets", Exit: plan.ExitUsage})
	}
	m, err := e.ws.MasterSecret()
	if errors.Is(err, workspace.ErrAbsent) {
		return fail(&plan.Error{Op: op, Err: e.ws.Absent(workspace.MasterSecretFile), Remedy: "copy the file of this cluster there: the IDs of its keys are derived from it", Exit: plan.ExitUsage})
	}
	if err != nil {
		return fail(err)
	}
	i, err := e.watcher(ctx, op, WatchRequest{})
	if err != nil {
		return fail(err)
	}
	k, ok := i.cluster.(Encryptor)
	if !ok {
		return fail(errors.New("this connection rotates no keys"))
	}
	return m, i, k, nil
}

// keyHash returns the hashed ID of the key of a generation.
func keyHash(m workspace.MasterSecret, generation uint32) (string, error) {
	k, err := kms.First(m.KMSSecret(), generation)
	if err != nil {
		return "", err
	}
	return kms.HashedID(k.ID()), nil
}

// PlanRotateKey returns the plan to rotate the key that encrypts Secrets in etcd, or to complete a rotation that is under way. It
// changes nothing.
func (e *Engine) PlanRotateKey(ctx context.Context, r RotateKeyRequest) (*plan.Plan, error) {
	if err := (RevokeRequest{Reason: r.Reason}).check(); err != nil {
		return nil, err
	}
	m, i, k, err := e.encryptionOf(ctx, rotateKeyOp)
	if err != nil {
		return nil, err
	}
	if s, err := e.ws.State(); err == nil && s.ClusterValues.EncryptionPending {
		return nil, &plan.Error{Op: rotateKeyOp, Err: errors.New("an upgrade has not encrypted all Secrets yet"), Remedy: "run `constellation upgrade apply` first: it continues there", Exit: plan.ExitUsage}
	}
	limited, cancel := context.WithTimeout(ctx, e.limits.api)
	defer cancel()
	have, err := k.KeyRotation(limited)
	if err != nil {
		return nil, i.clusterError(rotateKeyOp, err)
	}
	recorded := max(m.KMS, 1)
	x := &keyRotating{clusterRun: i, request: r, cluster: k, to: max(recorded, have.Generation) + 1}
	now := e.now()
	p := &plan.Plan{ID: newRunID(plan.VerbEncrypt, now), Verb: plan.VerbEncrypt, Cluster: i.state.Infrastructure.Name, Simulated: e.simulated(), NotAttested: e.notAttested(), Created: now.UTC(), Rehearsal: r.Rehearse}
	if have.Generation >= recorded && have.Rewritten < have.Generation {
		x.to = have.Generation
		p.Notes = append(p.Notes, fmt.Sprintf("The rotation to generation %d is under way: this completes it.", x.to))
	}
	if x.hash, err = keyHash(m, x.to); err != nil {
		return nil, &plan.Error{Op: rotateKeyOp, Err: err, Remedy: "keys cannot be rotated more often: make a new cluster", Exit: plan.ExitBlocked}
	}
	p.End.Command = e.command(string(plan.VerbEncrypt))
	if r.Reason != "" {
		p.End.Command += " --reason " + check.ShellQuote(r.Reason)
	}
	p.End.Done = fmt.Sprintf("all Secrets are encrypted with the key of generation %d", x.to)
	p.End.Next = []string{e.command("encryption status")}
	p.Files = []plan.File{{Path: e.ws.Path(workspace.MasterSecretFile), Mode: "0600", Secret: true, Note: "has the generation now: renew your copy"}}
	if err := addSteps(ctx, p, x.steps()); err != nil {
		return nil, i.clusterError(rotateKeyOp, err)
	}
	return p, nil
}

func (x *keyRotating) steps() []plan.Step {
	published := func(ok func(kms.Rotation) bool) func(context.Context) (bool, error) {
		return func(ctx context.Context) (bool, error) {
			return x.glance(ctx, func(ctx context.Context, _ Cluster) (bool, error) {
				have, err := x.cluster.KeyRotation(ctx)
				return err == nil && ok(have), err
			})
		}
	}
	return []plan.Step{
		{
			ID: StepKeyPublish, Title: "Publish the next generation",
			Effect:  fmt.Sprintf("join-config has generation %d, which join services pass to the key services of their machines", x.to),
			Warning: "A generation is never taken back. Former ones still decrypt.",
			Final:   true,
			Done:    published(func(have kms.Rotation) bool { return have.Generation >= x.to }),
			Run:     x.publish,
		},
		{
			ID: StepKeyRecord, Title: "Record the generation",
			Effect: fmt.Sprintf("%s has generation %d: a cluster that replaces this one, and `constellation recover`, use it", workspace.MasterSecretFile, x.to),
			Done: func(context.Context) (bool, error) {
				m, err := x.e.ws.MasterSecret()
				return m.KMS >= x.to, err
			},
			Run: func(context.Context, *plan.Reporter) error {
				m, err := x.e.ws.MasterSecret()
				if err != nil {
					return err
				}
				m.KMS = x.to
				return x.e.ws.WriteMasterSecret(m)
			},
		},
		{
			ID: StepKeyWait, Title: "Wait for the API servers", Effect: fmt.Sprintf("each API server encrypts with the key of generation %d", x.to),
			Done: published(func(have kms.Rotation) bool { return have.Rewritten >= x.to }), // else Run observes them
			Run:  x.wait,
		},
		{
			ID: StepKeyRewrite, Title: "Encrypt all Secrets again", Effect: fmt.Sprintf("each Secret that another key encrypted is written again, so that the key of generation %d encrypts it", x.to),
			Done: published(func(have kms.Rotation) bool { return have.Rewritten >= x.to }),
			Run:  x.rewrite,
		},
	}
}

func (x *keyRotating) publish(ctx context.Context, r *plan.Reporter) error {
	return x.inCluster(ctx, r, rotateKeyOp, func(ctx context.Context, _ Cluster) error {
		old, err := x.cluster.KeyRotation(ctx)
		if err != nil || old.Generation >= x.to {
			return err
		}
		next := old
		next.Generation, next.Record = x.to, fmt.Sprintf("generation %d by %s at %s", x.to, someone(), x.e.now().UTC().Format(time.RFC3339))
		if x.request.Reason != "" {
			next.Record += ": " + x.request.Reason
		}
		if err := x.cluster.PublishKeyRotation(ctx, old, next); err != nil {
			return err
		}
		r.Log("encryption", "", "info", "key that encrypts Secrets was rotated: "+next.Record)
		return nil
	})
}

// keyPoll is the poll interval for the keys of API servers. They read that of their key service once a minute.
const keyPoll = 5 * time.Second

// wait waits until all API servers encrypt with the new key.
func (x *keyRotating) wait(ctx context.Context, r *plan.Reporter) error {
	least, changed := -1, x.e.now()
	for {
		behind, text, err := x.behind(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err == nil && behind == 0 {
			return nil
		}
		if err != nil {
			text = err.Error()
		} else if least < 0 || behind < least {
			least, changed = behind, x.e.now()
		}
		if x.e.now().Sub(changed) > x.e.limits.still {
			return &plan.Error{
				Op: "wait for the API servers", Err: errors.New(text),
				Remedy: "the join service of a control plane logs why its key service was not raised. One of an earlier release does not know how: upgrade the cluster first. Then run the same command again",
			}
		}
		r.Wait("api-servers", "", text)
		if !delay.For(ctx, min(keyPoll, x.e.limits.still/4)) {
			return ctx.Err()
		}
	}
}

// behind counts the API servers that are not known to encrypt with the new key, and describes them.
func (x *keyRotating) behind(ctx context.Context) (n int, text string, err error) {
	limited, cancel := context.WithTimeout(ctx, x.e.limits.api)
	defer cancel()
	servers, err := x.cluster.APIServerKeys(limited)
	if err != nil {
		return 0, "", err
	}
	if len(servers) == 0 {
		return 0, "", errors.New("no node has the label of a control plane")
	}
	var former, unknown []string
	for _, s := range servers {
		switch {
		case s.Err != nil:
			unknown = append(unknown, fmt.Sprintf("%s: %v", s.Node, s.Err))
		case s.Key != x.hash:
			former = append(former, s.Node)
		}
	}
	if len(former) > 0 {
		unknown = append([]string{fmt.Sprintf("%s %s with a former key", words.And(former), words.Verb(len(former), "encrypt"))}, unknown...)
	}
	return len(former) + len(unknown), strings.Join(unknown, "; "), nil
}

func (x *keyRotating) rewrite(ctx context.Context, r *plan.Reporter) error {
	n, err := x.cluster.RewriteSecrets(ctx, func(done, total int64) {
		r.Send(plan.Event{Kind: plan.KindProgress, Object: "secrets", Text: "Secrets", Current: done, Total: total})
	})
	if err != nil {
		return x.clusterError("encrypt all Secrets again", err)
	}
	r.Conclude(fmt.Sprintf("the key of generation %d encrypts %s", x.to, words.Count(int(n), "Secret")))
	return x.inCluster(ctx, r, rotateKeyOp, func(ctx context.Context, _ Cluster) error {
		for {
			old, err := x.cluster.KeyRotation(ctx)
			if err != nil || old.Rewritten >= x.to {
				return err
			}
			next := old
			next.Rewritten = x.to
			if err := x.cluster.PublishKeyRotation(ctx, old, next); !errors.Is(err, cluster.ErrConflict) || ctx.Err() != nil {
				return err
			}
		}
	})
}

// EncryptionStatus describes the key that encrypts Secrets. It is the JSON output of `encryption status`.
type EncryptionStatus struct {
	Schema  string    `json:"schema"`
	Cluster string    `json:"cluster"`
	Time    time.Time `json:"time"`
	// Encrypts is whether API servers encrypt Secrets. Without it, the other fields are empty.
	Encrypts bool `json:"encrypts"`
	// Generation is the published one, Recorded that in the file of the master secret.
	Generation uint32 `json:"generation,omitempty"`
	Recorded   uint32 `json:"recorded,omitempty"`
	// Pending is whether an upgrade has not encrypted all Secrets yet.
	Pending bool `json:"pending,omitempty"`
	// Rewritten is whether all Secrets were written since Generation was published.
	Rewritten bool `json:"rewritten"`
	// ByOperator is whether the operator completes this rotation, after an upgrade.
	ByOperator bool   `json:"byOperator,omitempty"`
	Record     string `json:"record,omitempty"`
	// APIServers has one entry for each control plane.
	APIServers []APIServerKey `json:"apiServers,omitempty"`
}

// APIServerKey is the key with which the API server of a control plane encrypts.
type APIServerKey struct {
	Node string `json:"node"`
	// Generation is 0 if the key is none of this master secret, or not known.
	Generation uint32 `json:"generation,omitempty"`
	// Problem is why the key is not known; empty if it is.
	Problem string `json:"problem,omitempty"`
}

// Encryption describes the key that encrypts Secrets. It changes nothing.
func (e *Engine) Encryption(ctx context.Context) (EncryptionStatus, error) {
	const op = "read the state of the encryption"
	out := EncryptionStatus{Schema: plan.Schema, Time: e.now().UTC()}
	c, s, err := e.ws.Load()
	if err != nil {
		return out, err
	}
	out.Cluster, out.Pending = c.Name, s.ClusterValues.EncryptionPending
	if !s.ClusterValues.EncryptsSecrets {
		return out, nil
	}
	m, i, k, err := e.encryptionOf(ctx, op)
	if err != nil {
		return out, err
	}
	limited, cancel := context.WithTimeout(ctx, e.limits.api)
	defer cancel()
	have, err := k.KeyRotation(limited)
	if err != nil {
		return out, i.clusterError(op, err)
	}
	out.Encrypts, out.Recorded, out.Record = true, max(m.KMS, 1), have.Record
	// The generation of init is not published. All Secrets have been written with it.
	out.Generation, out.Rewritten = max(have.Generation, 1), have.Generation == 0 || have.Rewritten >= have.Generation
	out.ByOperator = !out.Rewritten && have.Operator == have.Generation
	if have.Generation == 0 {
		out.Generation = out.Recorded
	}
	byKey := map[string]uint32{}
	last := max(out.Generation, out.Recorded) + 1
	for g := max(last, kms.MaxRaise+1) - kms.MaxRaise; g <= last; g++ {
		h, err := keyHash(m, g)
		if err != nil {
			break
		}
		byKey[h] = g
	}
	servers, err := k.APIServerKeys(limited)
	if err != nil {
		return out, i.clusterError(op, err)
	}
	for _, a := range servers {
		x := APIServerKey{Node: a.Node, Generation: byKey[a.Key]}
		if a.Err != nil {
			x.Problem = a.Err.Error()
		}
		out.APIServers = append(out.APIServers, x)
	}
	return out, nil
}
