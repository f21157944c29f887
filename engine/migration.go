package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/engine/attestation/keyprocess"
	"constellation/engine/check"
	"constellation/engine/cloud/providers"
	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/kms"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/internal/delay"
)

// IDs of the steps of `upgrade apply` that have an existing cluster encrypt Secrets.
const (
	StepEncryptPrepare = "prepare-encryption"
	StepEncryptKeys    = "supply-keys"
	StepEncryptSecrets = "encrypt-secrets"
)

// Migrator is what the encryption of an existing cluster needs of it.
type Migrator interface {
	Encryptor
	// Migration returns what join-config has about it.
	Migration(context.Context) (cluster.Migration, error)
	PublishMigration(context.Context, cluster.Migration) error
	// CanEncrypt reports whether the API server of each control plane was started to encrypt, or to wait for keys.
	CanEncrypt(context.Context) (bool, error)
	// EncryptingAPIServers returns the key with which the API server of each control plane encrypts, after it encrypted something.
	EncryptingAPIServers(context.Context) ([]cluster.APIServerKey, error)
}

// encryptOp names what fails.
const encryptOp = "encrypt Secrets in etcd"

// migrating has an existing cluster encrypt Secrets. New control planes get keys while API servers still store Secrets as they are. When
// all of them read encrypted Secrets, they begin to write them.
type migrating struct {
	*clusterRun
	keys *recovering
	hash string // of the ID of the key
}

// migrates returns the encryption that a hop brings to the cluster; nil if it brings none. note says why a cluster that could encrypt does
// not.
func (e *Engine) migrates(ctx context.Context, c *check.Run, run *clusterRun, r ApplyRequest) (m *migrating, note string, err error) {
	switch {
	case c.State.ClusterValues.EncryptionPending && !wanted(c):
		return nil, "An earlier upgrade began to encrypt Secrets, and `encryptSecrets: false` stops that: run `constellation encryption disable`.", nil
	case r.skips(StepEncryptPrepare) && !pending(c), !bringsEncryption(c, run.release):
		return nil, "", nil
	}
	m, err = e.migratingTo(ctx, c, run)
	var own *plan.Error
	if errors.As(err, &own) && own.Exit == plan.ExitUsage && !pending(c) {
		return nil, "Secrets stay without encryption in etcd: " + own.Err.Error() + ".", nil
	}
	return m, "", err
}

// bringsEncryption reports whether the hop to a release has an existing cluster encrypt Secrets, or completes that.
func bringsEncryption(c *check.Run, to *release.Release) bool {
	from, _ := providers.Named(c.State.Infrastructure.Provider)
	switch {
	case pending(c):
		return true
	case c.State.ClusterValues.EncryptsSecrets, c.State.Adopted(), !from.SealsKeys, !wanted(c):
		return false
	}
	return replacesAll(c) && keyService(to, c.Hop.Planned())
}

// wanted reports whether the configuration permits the encryption of Secrets.
func wanted(c *check.Run) bool { return c.Config.EncryptSecrets == nil || *c.Config.EncryptSecrets }

// pending reports whether an earlier upgrade began an encryption that the configuration still permits.
func pending(c *check.Run) bool { return c.State.ClusterValues.EncryptionPending && wanted(c) }

// migratingTo returns the encryption of a cluster in an upgrade. Its new control planes have the image of the upgrade, which the
// configuration does not name after `--to`.
func (e *Engine) migratingTo(ctx context.Context, c *check.Run, run *clusterRun) (*migrating, error) {
	expected, err := c.Expected(ctx)
	if err != nil {
		return nil, err
	}
	return e.migrating(run, expected)
}

// migrating returns the encryption of a cluster, with keys of its master secret. Control planes that get keys have the measurements of
// the expected configuration.
func (e *Engine) migrating(run *clusterRun, expected *workspace.Config) (*migrating, error) {
	_, judge, err := memberValidator(expected, run.state)
	if err != nil {
		return nil, err
	}
	m := &migrating{clusterRun: run, keys: &recovering{clusterRun: run, fingerprints: map[string]string{}, judge: judge}}
	if err := m.keys.derive(); err != nil {
		return nil, err
	}
	if err := m.keys.deriveKMS(); err != nil {
		return nil, err
	}
	m.hash, err = keyHash(m.keys.master, max(m.keys.master.KMS, 1))
	return m, err
}

// replacesAll reports whether a hop replaces all control planes.
func replacesAll(c *check.Run) bool {
	return c.Hop.ReplaceControlPlanes && c.Hop.ControlPlanesInPlace == ""
}

// keyService reports whether the join service of a release hands keys over, and machines of an image have a key service.
func keyService(r *release.Release, to compat.Planned) bool {
	if to.Image.IsZero() {
		return false
	}
	for _, v := range []version.Version{r.Version, to.Image} {
		if ok, err := handsKeysOver(r, v); !ok || err != nil {
			return false
		}
	}
	return true
}

// look asks the cluster about the migration.
func (m *migrating) look(ctx context.Context, ok func(cluster.Migration) bool) (bool, error) {
	return m.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
		x, err := migrator(k)
		if err != nil {
			return false, err
		}
		have, err := x.Migration(ctx)
		return err == nil && ok(have), err
	})
}

func migrator(k Cluster) (Migrator, error) {
	x, ok := k.(Migrator)
	if !ok {
		return nil, errors.New("this connection encrypts no Secrets")
	}
	return x, nil
}

// first is the step before the services and the target.
func (m *migrating) first() plan.Step {
	return plan.Step{
		ID: StepEncryptPrepare, Title: "Prepare the encryption of Secrets", Effect: "new control planes get keys from the master secret, and still store Secrets as they are",
		Details: []string{"`encryptSecrets: false` in " + workspace.ConfigFile + " leaves them as they are"},
		Done: func(ctx context.Context) (bool, error) {
			if !m.state.ClusterValues.KeyService() {
				return false, nil
			}
			return m.look(ctx, func(have cluster.Migration) bool { return have.Fingerprint == m.keys.kmsID() })
		},
		Run: m.prepare,
	}
}

func (m *migrating) prepare(ctx context.Context, r *plan.Reporter) error {
	// Before join-config has it: `recover` reads the state.
	if err := m.record(m.state.ClusterValues.EncryptsSecrets, true); err != nil {
		return err
	}
	return m.publish(ctx, r, func(have cluster.Migration) cluster.Migration { return have })
}

// publish changes what join-config has about the migration.
func (m *migrating) publish(ctx context.Context, r *plan.Reporter, change func(have cluster.Migration) cluster.Migration) error {
	return m.inCluster(ctx, r, encryptOp, func(ctx context.Context, k Cluster) error {
		x, err := migrator(k)
		if err != nil {
			return err
		}
		have, err := x.Migration(ctx)
		if err != nil {
			return err
		}
		id := m.keys.kmsID()
		if have.Fingerprint != "" && have.Fingerprint != id {
			return otherSecret(fmt.Sprintf("join-config has keys of the key service with fingerprint %s, and those of the file have %s", have.Fingerprint, id))
		}
		next := change(have)
		next.Fingerprint = id
		return x.PublishMigration(ctx, next)
	})
}

// record has the state of the workspace say whether the cluster encrypts Secrets, and whether that is not complete.
func (m *migrating) record(encrypts, pending bool) error {
	v := &m.state.ClusterValues
	if v.EncryptsSecrets == encrypts && v.EncryptionPending == pending {
		return nil
	}
	v.EncryptsSecrets, v.EncryptionPending = encrypts, pending
	return m.e.ws.WriteState(m.state)
}

// last are the steps after the rollout.
func (m *migrating) last() []plan.Step {
	return []plan.Step{
		{
			ID: StepEncryptKeys, Title: "Give all control planes the keys", Effect: "each API server reads encrypted Secrets",
			Done: func(ctx context.Context) (bool, error) {
				return m.look(ctx, func(have cluster.Migration) bool { return have.Encrypts })
			},
			Run: m.supplyAll,
		},
		{
			ID: StepEncryptSecrets, Title: "Encrypt Secrets in etcd", Effect: "each API server encrypts Secrets, and all Secrets are written again",
			Details: []string{"API servers read their configuration once a minute"},
			Done: func(ctx context.Context) (bool, error) {
				if m.state.ClusterValues.EncryptionPending {
					return false, nil
				}
				return m.look(ctx, func(have cluster.Migration) bool { return have.Done != "" })
			},
			Run: m.encrypt,
		},
	}
}

// supplyPause is the pause between two attempts to reach a control plane that waits for keys.
const supplyPause = 2 * time.Second

// supply gives keys to control planes that wait for them until the returned function is called. Failures are logged, once each: supplyAll
// follows.
func (m *migrating) supply(ctx context.Context, r *plan.Reporter) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	m.hide(r)
	var wg sync.WaitGroup
	wg.Go(func() {
		settled, told := map[string]bool{}, ""
		for {
			failure := m.supplyOne(ctx, r, settled)
			// A machine that joins right now refuses keys.
			quiet := failure == nil || failure.again || status.Code(failure.Err) == codes.FailedPrecondition
			if !quiet && failure.Error.Error() != told {
				told = failure.Error.Error()
				r.Log("engine", "", "warn", told)
			}
			if !delay.For(ctx, min(supplyPause, m.e.limits.still/4)) {
				return
			}
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

func (m *migrating) hide(r *plan.Reporter) {
	k := m.keys
	r.Hide(k.master.Key, k.master.Salt, m.state.Infrastructure.InitSecret, k.master.KMSSecret(), k.master.CertifierSecret(), k.kmsKeys, k.certifierKeys)
}

// supplyOne gives keys to one control plane that is not settled.
func (m *migrating) supplyOne(ctx context.Context, r *plan.Reporter, settled map[string]bool) *attempt {
	name, got, failure := m.keys.sendOne(ctx, r, func(name string) bool { return !settled[name] })
	if got {
		settled[name] = true
	}
	return failure
}

// supplyAll gives keys to control planes that wait for them, until each API server reads encrypted Secrets.
func (m *migrating) supplyAll(ctx context.Context, r *plan.Reporter) error {
	return m.await(ctx, r, Migrator.APIServerKeys, m.encrypted, plan.Error{
		Op:     "give all control planes the keys",
		Remedy: "Secrets are stored as before. Replace a control plane whose image is of an earlier release; `journalctl -u constellation-bootstrapper -u constellation-kms` on the others shows what they lack. Then run the same command again",
	})
}

// await waits until all API servers are as wanted, as read shows. Control planes that wait for keys get them meanwhile: one may have
// joined late. failed is the error of a wait without news.
func (m *migrating) await(ctx context.Context, r *plan.Reporter, read func(Migrator, context.Context) ([]cluster.APIServerKey, error), wanted func(cluster.APIServerKey) string, failed plan.Error) error {
	x, err := m.use(ctx)
	if err != nil {
		return err
	}
	m.hide(r)
	settled := map[string]bool{}
	var last *attempt
	least, changed := -1, m.e.now()
	for {
		limited, cancel := context.WithTimeout(ctx, m.e.limits.api)
		servers, err := read(x, limited)
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		behind, text := behindOf(servers, wanted)
		switch {
		case err != nil:
			text = err.Error()
		case behind == 0 && len(servers) > 0:
			r.Wait("", "", "")
			return nil
		case least < 0 || behind < least:
			least, changed = behind, m.e.now()
		}
		if m.e.now().Sub(changed) > m.e.limits.still {
			if failed.Err = errors.New(text); last != nil {
				failed.Err = fmt.Errorf("%s (%w)", text, last.Err)
				failed.Remedy = cmp.Or(last.Remedy, failed.Remedy)
			}
			return &failed
		}
		r.Wait("api-servers", "", text)
		switch failure := m.supplyOne(ctx, r, settled); {
		case failure == nil || failure.again: // none waits
		case failure.Exit == plan.ExitBlocked: // another master secret
			return failure.Error
		default:
			last = failure
		}
		if !delay.For(ctx, min(keyPoll, m.e.limits.still/4)) {
			return ctx.Err()
		}
	}
}

// encrypted is empty for an API server with the key, and otherwise the reason.
func (m *migrating) encrypted(s cluster.APIServerKey) string {
	switch {
	case s.Err != nil:
		return s.Err.Error()
	case s.Key != m.hash:
		return "another key"
	}
	return ""
}

// storesPlain is empty for an API server that stores Secrets as they are, and otherwise the reason.
func storesPlain(s cluster.APIServerKey) string {
	switch {
	case errors.Is(s.Err, cluster.ErrNotEncrypting):
		return ""
	case s.Err != nil:
		return s.Err.Error()
	}
	return "the API server encrypts Secrets"
}

// behindOf counts the API servers for which reason is not empty, and describes them.
func behindOf(servers []cluster.APIServerKey, reason func(cluster.APIServerKey) string) (int, string) {
	var reasons, parts []string
	nodes, n := map[string][]string{}, 0
	for _, s := range servers {
		why := reason(s)
		if why == "" {
			continue
		}
		if n++; nodes[why] == nil {
			reasons = append(reasons, why)
		}
		nodes[why] = append(nodes[why], s.Node)
	}
	for _, reason := range reasons {
		parts = append(parts, words.And(nodes[reason])+": "+reason)
	}
	if len(servers) == 0 {
		return 0, "no node has the label of a control plane"
	}
	return n, strings.Join(parts, "; ")
}

// encrypt has all API servers encrypt Secrets, and all Secrets be written again.
func (m *migrating) encrypt(ctx context.Context, r *plan.Reporter) error {
	// Before the first one is encrypted: `recover` and backups have to know.
	if err := m.record(true, true); err != nil {
		return err
	}
	publish := func(done string) error {
		return m.publish(ctx, r, func(cluster.Migration) cluster.Migration { return cluster.Migration{Encrypts: true, Done: done} })
	}
	if err := publish(""); err != nil {
		return err
	}
	if err := m.awaitMode(ctx, r, m.encrypted); err != nil {
		return err
	}
	n, err := m.rewrite(ctx, r)
	if err != nil {
		return err
	}
	if err := publish(m.e.now().UTC().Format(time.RFC3339)); err != nil {
		return err
	}
	r.Conclude(words.Count(int(n), "Secret") + " encrypted")
	return m.record(true, false)
}

// awaitMode waits until API servers store Secrets in the published mode.
func (m *migrating) awaitMode(ctx context.Context, r *plan.Reporter, wanted func(cluster.APIServerKey) string) error {
	return m.await(ctx, r, Migrator.EncryptingAPIServers, wanted, plan.Error{
		Op:     "wait for the API servers",
		Remedy: "the join service of a control plane logs why the mode of encryption was not set there. Then run the same command again",
	})
}

// use returns the connection to the cluster.
func (m *migrating) use(ctx context.Context) (Migrator, error) {
	k, err := m.connect(ctx)
	if err != nil {
		return nil, err
	}
	return migrator(k)
}

// rewrite has each Secret stored again, in the mode of the API servers, and returns how many there are.
func (m *migrating) rewrite(ctx context.Context, r *plan.Reporter) (int64, error) {
	x, err := m.use(ctx)
	if err != nil {
		return 0, err
	}
	n, err := x.RewriteSecrets(ctx, func(done, total int64) {
		r.Send(plan.Event{Kind: plan.KindProgress, Object: "secrets", Text: "Secrets", Current: done, Total: total})
	})
	return n, m.clusterError("write all Secrets again", err)
}

// migrate adds the steps of an encryption to those of the plan, if the hop brings one.
func (a *applyRun) migrate(steps []plan.Step) []plan.Step {
	if a.migration == nil {
		return steps
	}
	at := slices.IndexFunc(steps, func(s plan.Step) bool { return s.ID == plan.StepCharts })
	if at >= 0 {
		steps = slices.Insert(steps, at, a.migration.first())
	}
	return append(steps, a.migration.last()...)
}

// encryptionPending reports whether an upgrade brought all control planes that can encrypt, and Secrets are not encrypted yet.
func (e *Engine) encryptionPending(ctx context.Context, c *check.Run) (bool, error) {
	if !pending(c) {
		return false, nil
	}
	run := &clusterRun{e: e, facts: &facts{config: c.Config, state: c.State}}
	return run.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
		x, err := migrator(k)
		if err != nil {
			return false, err
		}
		return x.CanEncrypt(ctx)
	})
}

// encryptOnly fills the plan where an earlier upgrade has not encrypted all Secrets.
func (e *Engine) encryptOnly(ctx context.Context, c *check.Run, p *plan.Plan, r ApplyRequest) error {
	run := &clusterRun{e: e, facts: &facts{config: c.Config, state: c.State, provider: c.Cloud}}
	a := &applyRun{clusterRun: run, request: r, plan: p}
	var err error
	if a.migration, err = e.migratingTo(ctx, c, run); err != nil {
		return err
	}
	if err := a.skip(ctx, a.migration.last()); err != nil {
		return err
	}
	n := &c.Now
	images := n.ControlPlaneImage.Add(n.WorkerImage.Oldest).Add(n.WorkerImage.Newest)
	p.From = plan.Target{Release: n.Services.String(), Image: images.String(), Kubernetes: n.Kubernetes.String()}
	p.To = p.From
	p.End.Done = "Secrets of cluster " + p.Cluster + " are encrypted in etcd"
	p.End.Nothing = "the target of all nodes is reached; `constellation upgrade apply` without --detach and --skip-phases encrypts the Secrets"
	a.finish(p.End.Done)
	if !r.Rehearse {
		p.End.Next = []string{e.command("encryption status")}
	}
	return nil
}

// kmsID is the fingerprint of the keys of the key service.
func (x *recovering) kmsID() string { return x.fingerprints[keyprocess.KeyService] }

// deriveKMS derives the keys of the key service from the master secret.
func (x *recovering) deriveKMS() error {
	k, err := kms.First(x.master.KMSSecret(), max(x.master.KMS, 1))
	if err != nil {
		return err
	}
	x.fingerprints[keyprocess.KeyService] = k.Fingerprint()
	x.kmsKeys, err = k.Encode()
	return err
}

// IDs of the steps of `encryption disable`.
const (
	StepPlainMode    = "stop-encryption"
	StepPlainSecrets = "decrypt-secrets"
)

// DisableEncryptionRequest says how the encryption of Secrets is undone.
type DisableEncryptionRequest struct {
	// Rehearse makes a plan that has no effect.
	Rehearse bool
}

// disableOp names what fails.
const disableOp = "store Secrets without encryption"

// PlanDisableEncryption returns the plan to store Secrets without encryption in a cluster that an upgrade encrypted. It changes nothing.
func (e *Engine) PlanDisableEncryption(ctx context.Context, r DisableEncryptionRequest) (*plan.Plan, error) {
	c, s, err := e.ws.Load()
	if err != nil {
		return nil, err
	}
	if err := e.ws.OnMachines(plan.VerbDecrypt); err != nil {
		return nil, err
	}
	if !s.ClusterValues.KeyService() {
		return nil, &plan.Error{Err: errors.New("nothing to do: the cluster stores Secrets without encryption"), Exit: plan.ExitNothing}
	}
	if c.EncryptSecrets == nil || *c.EncryptSecrets {
		return nil, &plan.Error{Op: disableOp, Err: errors.New("the next upgrade would encrypt them again"), Remedy: "write `encryptSecrets: false` into " + workspace.ConfigFile + " first", Exit: plan.ExitUsage}
	}
	m, err := e.migrating(&clusterRun{e: e, facts: &facts{config: c, state: s}}, c)
	if err != nil {
		return nil, err
	}
	x, err := m.use(ctx)
	if err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, e.limits.api)
	defer cancel()
	have, err := x.Migration(limited)
	if err != nil {
		return nil, m.clusterError(disableOp, err)
	}
	if have.Fingerprint == "" && !s.ClusterValues.EncryptionPending {
		return nil, &plan.Error{Op: disableOp, Err: errors.New("this cluster encrypts Secrets since its init: the configuration that its machines share demands it"), Remedy: "make a new cluster with `encryptSecrets: false`, and restore a backup there", Exit: plan.ExitUsage}
	}
	now := e.now()
	p := &plan.Plan{ID: newRunID(plan.VerbDecrypt, now), Verb: plan.VerbDecrypt, Cluster: c.Name, Simulated: e.simulated(), NotAttested: e.notAttested(), Created: now.UTC(), Rehearsal: r.Rehearse}
	p.End.Command = e.command(string(plan.VerbDecrypt))
	p.End.Done = "Secrets of cluster " + c.Name + " are stored in etcd as they are"
	p.End.Next = []string{e.command("encryption status")}
	if err := addSteps(ctx, p, m.undo()); err != nil {
		return nil, m.clusterError(disableOp, err)
	}
	return p, nil
}

// undo are the steps after which Secrets are stored as they are.
func (m *migrating) undo() []plan.Step {
	return []plan.Step{
		{
			ID: StepPlainMode, Title: "Stop the encryption of Secrets", Effect: "each API server stores Secrets as they are, and still reads encrypted ones",
			Warning: "A disk or a snapshot of etcd then shows the Secrets of the cluster.",
			Details: []string{"API servers read their configuration once a minute"},
			Done:    func(context.Context) (bool, error) { return false, nil }, // Run observes the API servers
			Run: func(ctx context.Context, r *plan.Reporter) error {
				if err := m.publish(ctx, r, func(cluster.Migration) cluster.Migration { return cluster.Migration{} }); err != nil {
					return err
				}
				return m.awaitMode(ctx, r, storesPlain)
			},
		},
		{
			ID: StepPlainSecrets, Title: "Write all Secrets again", Effect: "no Secret needs a key",
			Done: func(context.Context) (bool, error) { return false, nil },
			Run: func(ctx context.Context, r *plan.Reporter) error {
				n, err := m.rewrite(ctx, r)
				if err != nil {
					return err
				}
				r.Conclude(words.Count(int(n), "Secret") + " stored without encryption")
				return m.record(false, false)
			},
		},
	}
}
