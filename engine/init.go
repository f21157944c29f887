package engine

import (
	"context"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/bootstrapper/initproto"
	"constellation/engine/attestation"
	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cloud/providers"
	"constellation/engine/cluster"
	"constellation/engine/component"
	"constellation/engine/plan"
	"constellation/engine/registry"
	"constellation/engine/rollout"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/internal/delay"
)

// IDs of the steps of init.
const (
	StepPreflight  = "preflight"
	StepFirstNode  = "init-first-node"
	StepKubeconfig = "write-kubeconfig"
	StepComponents = "components"
	StepJoinConfig = "join-config"
	StepReady      = "wait-ready"
)

// limits are how long init waits for what it cannot hasten.
type limits struct {
	contact time.Duration // until a first machine is reached
	silence time.Duration // of a machine at work
	api     time.Duration // until the API server answers through the load balancer
	ack     time.Duration // until the machine got the acknowledgement of its result
	glance  time.Duration // of an observation, which must not hold anything up
	chart   time.Duration // until a chart's pods are ready
	still   time.Duration // without any change while machines become nodes
	poll    time.Duration // poll interval of the cloud, which has no watch
	gather  time.Duration // how long changes are collected before the next observation

	services time.Duration // for pods on nodes that are Ready
	gone     time.Duration // of a first machine that was asked before while its API server answers: it has nothing more to say
	quiet    time.Duration // silence of the API server until it is reported
	members  time.Duration // until the members of etcd have the versions of the hop
	denials  time.Duration // by the API server, until they are believed: one that starts does not know at once what anybody may do
}

var defaultLimits = limits{
	contact: 10 * time.Minute,
	silence: 10 * time.Minute,
	api:     3 * time.Minute,
	ack:     20 * time.Second,
	glance:  10 * time.Second,
	chart:   5 * time.Minute,
	still:   5 * time.Minute,
	poll:    time.Second,
	gather:  50 * time.Millisecond,

	services: time.Minute,
	gone:     15 * time.Second,
	quiet:    3 * time.Second,
	members:  2 * time.Minute,
	denials:  time.Minute,
}

// clusterRun is what the steps of every verb share. Steps run one after the other.
type clusterRun struct {
	e *Engine
	*facts
	components cluster.Components
	// inUse are other components that the cluster's machines may still join with. They get
	// the statement that they lack.
	inUse []cluster.Components
	// enrols are the nodes whose agents verify nothing yet and get to do so.
	enrols []cluster.Node

	// accepted says which findings were accepted by name; nil: none.
	accepted func(id string) bool

	cluster Cluster // nil until there is a kubeconfig
	nodes   rollout.Tracker
	after   func(time.Duration) <-chan time.Time // see WatchRequest; nil is time.After
}

// initRun is what the steps of one init plan share.
type initRun struct {
	*clusterRun
	target cluster.NodeTarget
	// etcdTag is the tag of etcd's image that the first node is asked for; empty: that of
	// Kubernetes.
	etcdTag string
	link    *link // to the first node's bootstrapper; nil if there is none
	// certifierKeys are those of the cluster's certifier, which the first node gets; nil: it has none.
	certifierKeys []byte
	// kmsKeys are those that encrypt Secrets in etcd, likewise.
	kmsKeys []byte

	// What this run has made before any machine was asked, and takes back if the
	// machine turns out to be another's.
	madeSecret, madeID bool
}

// PlanInit looks at everything and returns what is left to do to get the cluster that
// the configuration describes. It changes nothing.
//
// Findings that forbid the plan are in it. The error has ExitUsage if the
// configuration cannot be read or the workspace's files belong to another cluster.
func (e *Engine) PlanInit(ctx context.Context) (*plan.Plan, error) {
	if _, _, err := e.ws.Load(); err != nil {
		return nil, err
	}
	if err := e.ws.OnMachines(plan.VerbInit); err != nil {
		return nil, err
	}
	f, findings, err := e.examine(ctx, func(plan.Event) {})
	if err != nil {
		return nil, err
	}
	if f.foreign != nil {
		return nil, f.foreign
	}
	now := e.now()
	p := &plan.Plan{ID: newRunID(plan.VerbInit, now), Verb: plan.VerbInit, Simulated: e.simulated(), NotAttested: e.notAttested(), Findings: findings, Created: now.UTC()}
	if f.config == nil || f.state == nil {
		// load has just read them: somebody changes the files at this moment.
		return p, nil
	}
	i := &initRun{clusterRun: &clusterRun{e: e, facts: f}}
	p.Cluster, p.Nodes = f.config.Name, f.config.Counts()
	p.To = plan.Target{Release: f.config.Services.String(), Image: f.config.Image.String(), Kubernetes: f.config.Kubernetes.String()}
	p.Files = []plan.File{
		{Path: e.ws.Path(workspace.MasterSecretFile), Mode: "0600", Secret: true, Note: "keys of the cluster are derived from it: keep a copy offline"},
		{Path: e.ws.Path(workspace.KubeconfigFile), Mode: "0600", Secret: true, Note: "access to the cluster as administrator"},
		{Path: e.ws.Path(workspace.StateFile), Mode: "0600", Secret: true, Note: "needed for every later change of the cluster"},
	}
	if f.state.Enrolled() {
		p.Files = append(p.Files, plan.File{Path: e.ws.Path(workspace.AuthorityKeyFile), Mode: "0600", Secret: true, Note: "certifies machines: keep a copy offline"},
			plan.File{Path: e.ws.Path(workspace.SigningKeyFile), Mode: "0600", Secret: true, Note: "signs what machines install: keep a copy offline"})
		p.Notes = append(p.Notes, "The network of pods is yours to install, when the first node is there: nodes are not Ready before.")
	}
	i.components = cluster.Components{Name: cluster.ComponentsName(f.list), Kubernetes: f.config.Kubernetes.String(), List: f.list, Statement: f.statement}
	i.target = cluster.NodeTarget{Image: f.image.Reference, ImageVersion: f.image.Version, Components: i.components.Name, Kubernetes: i.components.Kubernetes}
	i.etcdTag = f.nextEtcd()
	p.Steps = i.steps()
	if len(p.Blocked()) > 0 {
		return p, nil
	}
	if err := i.observe(ctx, p); err != nil {
		return nil, err
	}
	if p.Finished() {
		i.noteRollout(ctx, p)
	}
	return p, nil
}

// noteRollout states in a finished plan that nodes are not at the target yet: that is no work of init.
func (i *initRun) noteRollout(ctx context.Context, p *plan.Plan) {
	_, _ = i.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
		r, err := k.Rollout(ctx)
		if err == nil && r.Observed && !r.Reached {
			p.End.Nothing = fmt.Sprintf("cluster %s is complete: nothing to do for init. Its rollout to %s goes on; `%s` shows it", p.Cluster, r.Target, i.e.command("status"))
		}
		return false, err
	})
}

// observe determines which steps are done. A step that cannot be judged counts as not done: it
// checks again when it runs.
func (i *initRun) observe(ctx context.Context, p *plan.Plan) error {
	if err := i.sameCluster(ctx); err != nil {
		return err
	}
	all := true
	for k := range p.Steps {
		s := &p.Steps[k]
		if s.ID == StepPreflight {
			continue
		}
		done, err := s.Done(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.Finished = err == nil && done
		all = all && s.Finished
	}
	p.Steps[0].Finished = all
	return nil
}

// sameCluster returns an error with ExitUsage if the kubeconfig leads to a cluster
// that is not the one of the state file. A cluster that cannot be asked is believed.
func (i *initRun) sameCluster(ctx context.Context) error {
	foreign, err := i.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
		j, err := k.JoinConfig(ctx)
		return j.ClusterID != hex.EncodeToString(i.state.ClusterValues.ClusterID), err
	})
	if err != nil || !foreign {
		return ctx.Err() // of other errors the steps tell
	}
	return i.e.ws.ForeignKubeconfig()
}

// connect returns the cluster, which needs a kubeconfig.
func (i *clusterRun) connect(ctx context.Context) (Cluster, error) {
	if i.cluster != nil {
		return i.cluster, nil
	}
	b, err := i.e.ws.Kubeconfig()
	if err != nil {
		return nil, err
	}
	c, err := i.e.connect(ctx, b)
	if err != nil {
		return nil, &plan.Error{Op: "read " + i.e.ws.Path(workspace.KubeconfigFile), Err: err, Remedy: "restore the file from a backup"}
	}
	i.cluster = c
	return c, nil
}

// glance is the body of a Done: a short observation of the cluster. If it fails, the step
// counts as not done; the step then runs, waits, and reports the reason.
func (i *clusterRun) glance(ctx context.Context, look func(context.Context, Cluster) (bool, error)) (bool, error) {
	k, err := i.connect(ctx)
	if err != nil {
		return false, absentIsFine(err)
	}
	limited, cancel := context.WithTimeout(ctx, i.e.limits.glance)
	defer cancel()
	done, err := look(limited, k)
	if err != nil && ctx.Err() == nil && limited.Err() != nil {
		return false, nil
	}
	return err == nil && done, absentIsFine(err)
}

func absentIsFine(err error) error {
	if errors.Is(err, cluster.ErrAbsent) || errors.Is(err, cluster.ErrUnreachable) || errors.Is(err, workspace.ErrAbsent) {
		return nil
	}
	return err
}

func (i *initRun) steps() []plan.Step {
	c := i.config
	all := words.Count(c.ControlPlanes(), "control plane") + " and " + words.Count(c.Workers(), "worker")
	kubernetes := "Kubernetes " + c.Kubernetes.String()
	proof := "is attested"
	if i.state.NotAttested() {
		proof = "shows its certificate"
	}
	if i.etcdTag != "" {
		kubernetes += " and etcd " + i.etcdTag + ", which the next minor needs"
	}
	steps := []plan.Step{
		{
			ID:     StepPreflight,
			Title:  "Run the preflight checks",
			Effect: "nothing is changed",
			Done:   i.finished,
			Run:    i.preflight,
		},
		{
			ID:     StepFirstNode,
			Title:  "Bootstrap the first node",
			Effect: fmt.Sprintf("one control plane %s and runs kubeadm init with %s; %s is written", proof, kubernetes, workspace.MasterSecretFile),
			Done: func(context.Context) (bool, error) {
				return i.e.ws.Has(workspace.KubeconfigFile) || i.e.ws.Has(workspace.PendingFile), nil
			},
			Run: i.firstNode,
		},
		{
			ID:     StepKubeconfig,
			Title:  "Write the kubeconfig",
			Effect: fmt.Sprintf("%s is the kubeconfig of the cluster at %s", workspace.KubeconfigFile, i.state.Infrastructure.ClusterEndpoint),
			Done:   i.kubeconfigWritten,
			Run:    i.writeKubeconfig,
		},
		i.componentsStep(),
		{
			ID:     StepJoinConfig,
			Title:  "Publish attestation requirements",
			Effect: fmt.Sprintf("ConfigMap join-config requires %s", i.demands()),
			Done: func(ctx context.Context) (bool, error) {
				want, err := i.joinConfig()
				if err != nil {
					return false, err
				}
				return i.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
					got, err := k.JoinConfig(ctx)
					return got.Accepts(want.Attestation) && got.TrustRoots == want.TrustRoots && got.ClusterID == want.ClusterID, err
				})
			},
			Run: func(ctx context.Context, r *plan.Reporter) error {
				want, err := i.joinConfig()
				if err != nil {
					return err
				}
				return i.inCluster(ctx, r, "publish join configuration", func(ctx context.Context, k Cluster) error {
					return changeJoinConfig(ctx, k, func(have cluster.JoinConfig) (cluster.JoinConfig, error) {
						if have.Generations == nil {
							return want, nil
						}
						// An upgrade was prepared meanwhile; machines of other images still join.
						want.Generations, want.Weakened = maps.Clone(have.Generations), have.Weakened
						if v := i.config.Image; !v.IsZero() {
							want.Generations[v.String()] = want.Attestation
						}
						return want, nil
					})
				})
			},
		},
	}
	steps = append(steps, i.inventorySteps()...)
	return append(steps,
		plan.Step{
			ID:     plan.StepCharts,
			Title:  "Install the services",
			Effect: i.chartsEffect(),
			Done:   i.chartsDone,
			Run:    i.installCharts,
		},
		plan.Step{
			ID:     check.StepTarget,
			Title:  "Set the target of all nodes",
			Effect: fmt.Sprintf("NodeVersion constellation-version is set to %s; machines join from then on, even if this program ends", i.target),
			Final:  true,
			Done: func(ctx context.Context) (bool, error) {
				return i.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
					got, err := k.NodeTarget(ctx)
					want := i.target
					want.Etcd = got.Etcd // a later hop may have changed it
					if err != nil || !got.Same(want) {
						return false, err
					}
					return i.enrolledInPlace(ctx, k)
				})
			},
			Run: i.setTarget,
		},
		plan.Step{
			ID:     StepReady,
			Title:  "Wait for the nodes",
			Effect: all + " are Ready nodes",
			Done:   i.allReady,
			Run:    i.waitReady,
		},
	)
}

// Enroller is what init needs of a cluster of enrolled machines besides [Cluster]. Every method is idempotent.
type Enroller interface {
	// PublishesInventory reports whether the cluster has this list of machines. Machines that it lacks get no ticket.
	PublishesInventory(ctx context.Context, i machines.Inventory) (bool, error)
	// PublishInventory makes it so.
	PublishInventory(ctx context.Context, i machines.Inventory) error
	// GroupsInPlace reports whether the groups of an inventory are upgraded in place.
	GroupsInPlace(ctx context.Context, i machines.Inventory) (bool, error)
	// SetGroupsInPlace makes it so. The kinds of the operator are there.
	SetGroupsInPlace(ctx context.Context, i machines.Inventory) error
	// MachineRecords returns what the services recorded about enrolled machines.
	MachineRecords(ctx context.Context) (machines.Records, error)
}

// inventorySteps publish the list of enrolled machines; a cloud has its own.
func (i *initRun) inventorySteps() []plan.Step {
	if !i.state.Enrolled() {
		return nil
	}
	list := workspace.EnrolledInventory(i.config, i.state)
	return []plan.Step{{
		ID: StepInventory, Title: "Publish the list of machines",
		Effect: "ConfigMap " + machines.InventoryConfigMap + " lists " + words.Count(len(list.Machines), "machine") + "; others get no ticket to join",
		Done: func(ctx context.Context) (bool, error) {
			return i.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
				e, ok := k.(Enroller)
				if !ok {
					return false, nil
				}
				return e.PublishesInventory(ctx, list)
			})
		},
		Run: func(ctx context.Context, r *plan.Reporter) error {
			return i.inCluster(ctx, r, "publish the list of machines", func(ctx context.Context, k Cluster) error {
				e, ok := k.(Enroller)
				if !ok {
					return errors.New("this program has no Kubernetes client")
				}
				return e.PublishInventory(ctx, list)
			})
		},
	}}
}

// enrolledInPlace reports whether the groups of enrolled machines are upgraded in place; true for machines of a cloud.
func (i *initRun) enrolledInPlace(ctx context.Context, k Cluster) (bool, error) {
	e, ok := k.(Enroller)
	if !ok || !i.state.Enrolled() {
		return true, nil
	}
	return e.GroupsInPlace(ctx, workspace.EnrolledInventory(i.config, i.state))
}

// componentsSteps publish what nodes install, and the agent where that is due.
func (i *clusterRun) componentsSteps() []plan.Step {
	if len(i.enrols) == 0 {
		return []plan.Step{i.componentsStep()}
	}
	return []plan.Step{i.componentsStep(), i.agentsStep()}
}

// componentsStep publishes what nodes install.
func (i *clusterRun) componentsStep() plan.Step {
	all := func() []cluster.Components {
		first := i.components // a step before this one may have signed them
		if len(i.enrols) > 0 {
			first.Agent = nil // a step of its own names it
		}
		return append([]cluster.Components{first}, i.inUse...)
	}
	s := plan.Step{
		ID:     StepComponents,
		Title:  "Publish components of nodes",
		Effect: fmt.Sprintf("ConfigMap %s lists %s", shortName(i.components.Name), names(i.components.List)),
		Done: func(ctx context.Context) (bool, error) {
			return i.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
				for _, want := range all() {
					if got, err := k.Components(ctx, want.Name); err != nil || !got.Serves(want) {
						return false, err
					}
				}
				return true, nil
			})
		},
		Run: func(ctx context.Context, r *plan.Reporter) error {
			return i.inCluster(ctx, r, "publish components", func(ctx context.Context, k Cluster) error {
				for _, want := range all() {
					if err := k.PublishComponents(ctx, want); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
	for _, c := range i.inUse {
		s.Details = append(s.Details, fmt.Sprintf("ConfigMap %s, of Kubernetes %s, gets the release builder's statement, which new machines require", shortName(c.Name), c.Kubernetes))
	}
	return s
}

// changeJoinConfig replaces what machines must prove by what change makes of it, which
// may be asked again if somebody else is faster. have is zero if there is nothing yet.
func changeJoinConfig(ctx context.Context, k Cluster, change func(have cluster.JoinConfig) (cluster.JoinConfig, error)) error {
	for {
		have, err := k.JoinConfig(ctx)
		if err != nil && !errors.Is(err, cluster.ErrAbsent) {
			return err
		}
		want, err := change(have)
		if err != nil {
			return err
		}
		if err := enforces(want); err != nil {
			return err
		}
		want.Revision = have.Revision
		if err := k.PublishJoinConfig(ctx, want); !errors.Is(err, cluster.ErrConflict) {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// finished reports whether every later step is done, so that there is nothing to
// check for.
func (i *initRun) finished(ctx context.Context) (bool, error) {
	for _, s := range i.steps()[1:] {
		if done, err := s.Done(ctx); err != nil || !done {
			return false, nil // the step itself will tell why
		}
	}
	return true, nil
}

// preflight checks again: the plan may be old. What it learns replaces what the plan
// was made with only if that is the same; otherwise the plan that was shown is not
// the one that would be carried out.
func (i *initRun) preflight(ctx context.Context, r *plan.Reporter) error {
	f, findings, err := i.e.examine(ctx, r.Send)
	if err != nil {
		return err
	}
	var blocks []plan.Finding
	for _, f := range findings {
		if f.Severity == plan.Block {
			blocks = append(blocks, f)
		}
	}
	if len(blocks) > 0 {
		return blocked(blocks)
	}
	if f.image.Reference != i.image.Reference || cluster.ComponentsName(f.list) != i.components.Name || f.config.Services.Compare(i.config.Services) != 0 {
		return &plan.Error{Op: "check before start", Err: errors.New("configuration or cloud changed after the plan was made"), Exit: plan.ExitBlocked, Remedy: "review the new plan: run the same command again"}
	}
	// Not least the state: another run may have gone on since the plan was made.
	i.facts = f
	return nil
}

// inCluster calls f with the cluster and puts its error into the user's words.
func (i *clusterRun) inCluster(ctx context.Context, r *plan.Reporter, op string, f func(context.Context, Cluster) error) error {
	k, err := i.connect(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, i.e.limits.api)
	defer cancel()
	_, stop := i.monitorAPI(ctx, r, k, i.e.limits.poll)
	defer stop()
	return i.clusterError(op, f(ctx, k))
}

func (i *clusterRun) clusterError(op string, err error) error {
	var own *plan.Error
	if err == nil || errors.Is(err, context.Canceled) || errors.As(err, &own) {
		return err
	}
	e := &plan.Error{Op: op, Err: err}
	switch {
	case errors.Is(err, cluster.ErrUnreachable) || errors.Is(err, context.DeadlineExceeded):
		e.Err = fmt.Errorf("the API server at %s does not answer in time: %w", i.state.Infrastructure.ClusterEndpoint, err)
		e.Remedy = "is a control plane up? " + i.config.Advice().Look + " shows the machines, `constellation status` the cluster; run the same command again afterwards"
	case errors.Is(err, cluster.ErrDenied):
		e.Remedy = workspace.KubeconfigFile + " is not of this cluster or not its administrator's: restore the file"
	default:
		e.Remedy = "run the same command again; finished steps are skipped"
	}
	return e
}

// firstNode makes sure of the secrets, finds a machine, has it run kubeadm init and
// stores what it gives back.
func (i *initRun) firstNode(ctx context.Context, r *plan.Reporter) error {
	if err := i.prepareSecrets(r); err != nil {
		return err
	}
	if err := i.unpin(ctx, r); err != nil {
		return err
	}
	_ = i.tellBoot(ctx, r) // of a cloud that does not answer the waiting below tells
	v, err := initValidator(i.config, i.state)
	if err != nil {
		return err
	}
	d := dialer{i.state.Infrastructure.InitEndpoint, v, i.accept}

	var seq uint64 // of the last response that was passed on
	wait := backoff{least: 250 * time.Millisecond, most: 5 * time.Second}
	contact := i.e.now() // when a machine was last heard of, or the beginning
	limit := i.e.limits.contact
	for attempt := 1; ; attempt++ {
		before := seq
		result, failure := i.attach(ctx, r, d, &seq)
		if ctx.Err() != nil {
			i.closeLink()
			return ctx.Err()
		}
		if failure == nil {
			return i.store(r, result)
		}
		i.closeLink()
		if failure.taken {
			i.retreat(r)
		}
		if !failure.again {
			return failure.Error
		}
		if seq > before {
			contact, limit = i.e.now(), i.e.limits.silence
			wait.last = 0
		}
		over := i.e.now().Sub(contact)
		if seq == 0 && over > i.e.limits.gone && i.state.ClusterValues.InitNode != "" && servesTLS(ctx, i.state.Infrastructure.ClusterEndpoint) {
			// Its bootstrapper ends when its result was fetched; one that only died is back
			// long before.
			failure.Op = "get the result of the first machine"
			failure.Err = fmt.Errorf("it was fetched before: the API server at %s answers, and no bootstrapper does", i.state.Infrastructure.ClusterEndpoint)
			failure.Remedy = "restore " + workspace.KubeconfigFile + " from your copy; if it is lost, take the machines down and up again"
			return failure.Error
		}
		if over > limit {
			failure.Op = fmt.Sprintf("wait %s for the first machine at %s", over.Round(time.Second), d.endpoint)
			failure.Remedy = "check that a machine is up: " + i.config.Advice().Failed + ". Run the same command again to continue waiting"
			if errors.Is(failure.Err, errOther) {
				failure.Remedy = "if the result of the first machine was fetched already, restore " + workspace.KubeconfigFile + " from your copy; if it is lost, take the machines down and up again"
			}
			return failure.Error
		}
		waiting := plan.Event{Kind: plan.KindWait, Object: "first-node", Attempt: attempt, Text: i.whyWaiting(failure, seq)}
		if errors.Is(i.tellBoot(ctx, r), cloud.ErrUnavailable) {
			waiting.Text = "the cloud does not answer, so no machine is reachable; the run continues when it does"
			waiting.Remedy = i.restart()
		}
		r.Send(waiting)
		pauseFor := wait.next()
		if errors.Is(failure.Err, errOther) {
			pauseFor = wait.least // the load balancer takes the next one at once
		}
		if !delay.For(ctx, pauseFor) {
			return ctx.Err()
		}
	}
}

// servesTLS reports whether a server completes a TLS handshake at endpoint. Its identity does
// not matter: nothing is sent.
func servesTLS(ctx context.Context, endpoint string) bool {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	d := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}}
	conn, err := d.DialContext(ctx, "tcp", endpoint)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// attempt is a try that did not work.
type attempt struct {
	*plan.Error
	again bool // whether another one may
	taken bool // the machine is another cluster's, and got nothing of ours
}

func (i *initRun) whyWaiting(a *attempt, seq uint64) string {
	cause := a.Err.Error()
	switch {
	case errors.Is(a.Err, errOther):
		return fmt.Sprintf("the previously contacted machine has not answered yet: %v", a.Err)
	case seq > 0:
		return fmt.Sprintf("the connection to the first machine is lost (%s); its work goes on", cause)
	}
	return fmt.Sprintf("no control plane answers at %s yet (%s)", i.state.Infrastructure.InitEndpoint, cause)
}

// prepareSecrets makes the master secret and derives the cluster's ID, once. The
// order of the two writes matters: without the secret the ID would be worth nothing.
func (i *initRun) prepareSecrets(r *plan.Reporter) error {
	ws, v := i.e.ws, &i.state.ClusterValues
	m, err := ws.MasterSecret()
	if errors.Is(err, workspace.ErrAbsent) {
		m = workspace.NewMasterSecret()
		err = ws.WriteMasterSecret(m)
		i.madeSecret = err == nil
	}
	if err != nil {
		return err
	}
	r.Hide(m.Key, m.Salt, i.state.Infrastructure.InitSecret)
	if len(v.ClusterID) == 0 {
		v.MeasurementSalt = workspace.NewMasterSecret().Salt
		v.ClusterID = m.ClusterID(v.MeasurementSalt)
		v.InitNode = ""
		from, _ := providers.Named(i.state.Infrastructure.Provider)
		v.Certifier = from.Certifier
		if err := ws.WriteState(i.state); err != nil {
			return err
		}
		i.madeID = true
	}
	r.Hide(v.MeasurementSalt, []byte(i.login.Password))
	if v.Certifier {
		if i.certifierKeys, err = firstCertifierKeys(m); err != nil {
			return err
		}
		r.Hide(m.CertifierSecret(), i.certifierKeys)
	}
	encrypts, err := i.encrypts(r)
	if err != nil || !encrypts {
		return err
	}
	i.kmsKeys, err = firstKMSKeys(m)
	r.Hide(m.KMSSecret(), i.kmsKeys)
	return err
}

// retreat removes the files of this run after an init that cannot succeed: the machine belongs
// to another cluster, and no other machine was contacted. Files of an earlier run stay, since
// that run may have got further.
func (i *initRun) retreat(r *plan.Reporter) {
	if !i.madeID {
		return
	}
	i.state.ClusterValues = workspace.ClusterValues{}
	err := i.e.ws.WriteState(i.state)
	if err == nil && i.madeSecret {
		err = workspace.WithoutPath(os.Remove(i.e.ws.Path(workspace.MasterSecretFile)))
	}
	if err != nil {
		r.Log("engine", "", "warn", fmt.Sprintf("what this run wrote could not be taken back: %v", err))
	}
	i.madeID, i.madeSecret = false, false
}

// taken is what to do about a machine that works for another cluster.
func (i *clusterRun) taken() string {
	return "another init came first: continue in the directory where it was run, which has that cluster's files. " +
		"A new cluster needs unused machines: " + i.config.Advice().Renew
}

// unpin discards the machine of an earlier attempt if the cloud reports that it was deleted:
// its work is lost, and another machine may be used.
func (i *initRun) unpin(ctx context.Context, r *plan.Reporter) error {
	pinned := i.state.ClusterValues.InitNode
	if pinned == "" {
		return nil
	}
	list, err := i.provider.Machines(ctx)
	if err != nil {
		return check.CloudError("list machines", i.config.Advice(), err)
	}
	for _, m := range list {
		if m.ProviderID == pinned && m.Stage != plan.NodeGone {
			return nil
		}
	}
	r.Log("engine", "", "warn", pinned+" was to become the first node and no longer exists; trying another machine")
	i.state.ClusterValues.InitNode = ""
	return i.e.ws.WriteState(i.state)
}

// accept takes the first machine that shows good evidence, remembers it before it is
// sent anything, and refuses all others from then on.
func (i *initRun) accept(s attestation.Statement) error {
	pinned := &i.state.ClusterValues.InitNode
	switch {
	case *pinned == s.Identity.ProviderID:
		return nil
	case *pinned != "":
		return fmt.Errorf("%w: %s, not %s", errOther, s.Identity.ProviderID, *pinned)
	}
	*pinned = s.Identity.ProviderID
	if err := i.e.ws.WriteState(i.state); err != nil {
		*pinned = ""
		return err
	}
	return nil
}

func (i *initRun) closeLink() {
	if i.link != nil {
		i.link.Close()
		i.link = nil
	}
}

// attach connects to the machine, starts its work or follows what is under way, and
// passes on what it says after the response number seq.
func (i *initRun) attach(ctx context.Context, r *plan.Reporter, d dialer, seq *uint64) (*initproto.Success, *attempt) {
	l, err := d.dial(ctx)
	if err != nil {
		var own *plan.Error
		if errors.As(err, &own) { // the state could not be written
			return nil, &attempt{Error: own}
		}
		e, again := dialError(d.endpoint, i.config.Advice(), err)
		a := &attempt{Error: e, again: again}
		if errors.Is(err, attestation.ErrMember) {
			e.Remedy, e.Exit = i.taken(), plan.ExitBlocked
			a.taken = i.state.ClusterValues.InitNode == ""
		}
		return nil, a
	}
	i.link = l
	name := l.machine.Name
	r.Wait("", "", "")
	text := "attested"
	if !l.attested {
		text = "certified by this workspace, not attested"
	}
	i.nodes.Set(r, rollout.Entry{Name: name, Group: i.config.ControlPlaneGroup(), State: plan.NodeJoining, Text: text})

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silence := time.AfterFunc(i.e.limits.silence, func() { cancel(errSilent) })
	defer silence.Stop()
	stream, err := initproto.NewBootstrapperClient(l).Init(ctx, i.request())
	for err == nil {
		var resp *initproto.InitResponse
		if resp, err = stream.Recv(); err != nil {
			break
		}
		silence.Reset(i.e.limits.silence)
		if resp.Seq <= *seq {
			continue // told before the connection was lost
		}
		*seq = resp.Seq
		switch k := resp.Kind.(type) {
		case *initproto.InitResponse_Progress:
			p := k.Progress
			r.Send(plan.Event{Kind: plan.KindProgress, Object: p.Step, State: p.State, Text: p.Text, Node: name, Current: p.Current, Total: p.Total})
		case *initproto.InitResponse_Log:
			r.Log(k.Log.Source, name, k.Log.Level, k.Log.Line)
		case *initproto.InitResponse_Success:
			return k.Success, nil
		case *initproto.InitResponse_Failure:
			f := k.Failure
			i.nodes.Set(r, rollout.Entry{Name: name, State: plan.NodeFailed, Text: f.Message})
			e := &plan.Error{Op: fmt.Sprintf("make %s the first node (%s)", name, f.Step), Err: errors.New(f.Message), Remedy: f.Remedy}
			if !f.Retry {
				e.Err = &deadEnd{e.Err}
			}
			if e.Remedy == "" {
				e.Remedy = "take the machines down and up again: a machine accepts no second attempt until it was reset"
			}
			return nil, &attempt{Error: e}
		}
	}
	if errors.Is(context.Cause(ctx), errSilent) {
		err = errSilent
	}
	e, again := streamError(name, i.config.Advice(), err)
	a := &attempt{Error: e, again: again}
	if c := status.Code(err); *seq == 0 && (c == codes.AlreadyExists || c == codes.FailedPrecondition) {
		e.Remedy, e.Exit = i.taken(), plan.ExitBlocked
		a.taken = true
	}
	return nil, a
}

// deadEnd is an error that the same command meets again, whatever is mended.
type deadEnd struct{ error }

func (e *deadEnd) Unwrap() error { return e.error }

// errSilent means that a machine said nothing for too long.
var errSilent = errors.New("the machine has stopped sending")

func streamError(node string, a providers.Advice, err error) (*plan.Error, bool) {
	if errors.Is(err, io.EOF) {
		return &plan.Error{Op: "make " + node + " the first node", Err: errors.New("the connection ended before the result")}, true
	}
	if _, ok := status.FromError(err); ok {
		e, again := callError(a, err)
		e.Op = "make " + node + " the first node"
		return e, again
	}
	return &plan.Error{Op: "make " + node + " the first node", Err: err}, true
}

func (i *initRun) request() *initproto.InitRequest {
	s := i.state.Infrastructure
	return &initproto.InitRequest{
		InitSecret:        s.InitSecret,
		ClusterName:       i.config.Name,
		ClusterId:         i.state.ClusterValues.ClusterID,
		KubernetesVersion: i.config.Kubernetes.String(),
		Components:        component.ToProto(i.list),
		ApiServerCertSans: s.APIServerCertSANs,
		ServiceCidr:       i.config.ServiceCIDR.String(),
		PodCidr:           i.config.PodCIDR.String(),

		ComponentsStatement: i.statement,
		EtcdImageTag:        i.etcdTag,
		Registry:            registry.ToProto(i.login),
		CertifierKeys:       i.certifierKeys,
		HardeningOff:        i.config.HardeningOff(),
		KmsKeys:             i.kmsKeys,
	}
}

// store writes the result of the first node to disk, safe from crashes. The machine keeps it
// until the acknowledgement, which is the next step.
func (i *initRun) store(r *plan.Reporter, s *initproto.Success) error {
	defer i.nodes.Set(r, rollout.Entry{Name: s.NodeName, State: plan.NodeNotReady})
	if id := i.state.ClusterValues.ClusterID; string(s.ClusterId) != string(id) {
		return &plan.Error{Op: "store the result of " + s.NodeName, Err: &deadEnd{errors.New("it is of another cluster")}, Remedy: "take the machines down and up again"}
	}
	k, err := workspace.WithServer(s.Kubeconfig, i.state.Infrastructure.ClusterEndpoint)
	if err != nil {
		return &plan.Error{Op: "store the result of " + s.NodeName, Err: err, Remedy: "image and this program are incompatible"}
	}
	if err := i.storeEncryption(r, s); err != nil {
		return err
	}
	return i.e.ws.Write(workspace.PendingFile, k, 0o600)
}

// kubeconfigWritten reports whether the kubeconfig has its name, leads to where the
// API server is now, and works.
func (i *initRun) kubeconfigWritten(ctx context.Context) (bool, error) {
	b, err := i.e.ws.Kubeconfig()
	if err != nil || i.e.ws.Has(workspace.PendingFile) || !workspace.LeadsTo(b, i.state.Infrastructure.ClusterEndpoint) {
		return false, absentIsFine(err)
	}
	return i.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
		_, err := k.Version(ctx)
		return true, err
	})
}

// writeKubeconfig acknowledges the result to the machine, renames the kubeconfig to its final
// name and waits until it works.
func (i *initRun) writeKubeconfig(ctx context.Context, r *plan.Reporter) error {
	defer i.closeLink()
	ws, endpoint := i.e.ws, i.state.Infrastructure.ClusterEndpoint
	if ws.Has(workspace.PendingFile) {
		if err := i.acknowledge(ctx, r); err != nil {
			return err
		}
		if err := ws.Rename(workspace.PendingFile, workspace.KubeconfigFile); err != nil {
			return err
		}
	}
	b, err := ws.Kubeconfig()
	if err != nil {
		return err
	}
	if !workspace.LeadsTo(b, endpoint) { // the way to the API server changed
		if b, err = workspace.WithServer(b, endpoint); err != nil {
			return &plan.Error{Op: "read " + ws.Path(workspace.KubeconfigFile), Err: err, Remedy: "restore the file from a backup"}
		}
		if err := ws.Write(workspace.KubeconfigFile, b, 0o600); err != nil {
			return err
		}
	}
	i.cluster = nil // made with the old content, if at all
	k, err := i.connect(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, i.e.limits.api)
	defer cancel()
	wait := backoff{least: 100 * time.Millisecond, most: 2 * time.Second}
	for {
		_, err := k.Version(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || !errors.Is(err, cluster.ErrUnreachable) {
			return i.clusterError("reach the API server", err)
		}
		r.Wait("api-server", "", fmt.Sprintf("the API server at %s does not answer yet (%v)", endpoint, err))
		if !delay.For(ctx, wait.next()) {
			return i.clusterError("reach the API server", err)
		}
	}
}

// acknowledge confirms to the first node that its result is stored, so that it deletes it and
// stops listening. An unreachable machine was acknowledged before, or was switched off; both
// are fine.
func (i *initRun) acknowledge(ctx context.Context, r *plan.Reporter) error {
	limited, cancel := context.WithTimeout(ctx, i.e.limits.ack)
	defer cancel()
	wait := backoff{least: 100 * time.Millisecond, most: time.Second}
	v, err := initValidator(i.config, i.state)
	if err != nil {
		return err
	}
	d := dialer{i.state.Infrastructure.InitEndpoint, v, i.accept}
	sent, failures := false, 0
	for {
		var err error
		if i.link == nil {
			i.link, err = d.dial(limited)
		}
		if i.link != nil {
			sent = true
			_, err = initproto.NewBootstrapperClient(i.link).Ack(limited, &initproto.AckRequest{InitSecret: i.state.Infrastructure.InitSecret})
			i.closeLink()
		}
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if status.Code(err) == codes.FailedPrecondition {
			r.Log("engine", "", "warn", "the first machine has no result to be acknowledged: "+status.Convert(err).Message())
			return nil
		}
		failures++
		// A machine that stops right after the acknowledgement may lose its own answer.
		if sent && failures >= 4 || !delay.For(limited, wait.next()) {
			r.Log("engine", "", "info", "the first machine does not answer any more; it has the acknowledgement of its result, or was switched off")
			return nil
		}
	}
}

// joinConfig returns what the join service is to demand.
func (i *initRun) joinConfig() (cluster.JoinConfig, error) {
	demanded, err := check.AttestationJSON(i.config, i.state)
	if err != nil {
		return cluster.JoinConfig{}, err
	}
	return cluster.JoinConfig{Attestation: demanded, TrustRoots: trustRoots(i.config, i.state), ClusterID: hex.EncodeToString(i.state.ClusterValues.ClusterID)}, nil
}

// setTarget annotates the first node like any other and sets the target of all nodes for the
// operator.
func (i *initRun) setTarget(ctx context.Context, r *plan.Reporter) error {
	id, name := i.state.ClusterValues.InitNode, ""
	for _, m := range i.machines {
		if m.ProviderID == id {
			name = m.Name
		}
	}
	first := cluster.ExpectedNode{Name: name, Components: i.components.Name, ControlPlane: true, ProviderID: id, Deadline: i.e.now().Add(time.Hour)}
	return i.inCluster(ctx, r, "set the target", func(ctx context.Context, k Cluster) error {
		if name != "" {
			if err := k.Expect(ctx, first); err != nil {
				return err
			}
		}
		if e, ok := k.(Enroller); ok && i.state.Enrolled() {
			if err := e.SetGroupsInPlace(ctx, workspace.EnrolledInventory(i.config, i.state)); err != nil {
				return err
			}
		}
		target, err := i.withEtcd(ctx, k)
		if err != nil {
			return err
		}
		return k.SetNodeTarget(ctx, target)
	})
}

// withEtcd returns the target with the tag of etcd's image. The tag in the target records that this
// program set the one in kubeadm's configuration, so that a later hop removes it there. A target
// that exists keeps its tag. Machines of older images ignore the tag in the request.
func (i *initRun) withEtcd(ctx context.Context, k Cluster) (cluster.NodeTarget, error) {
	t := i.target
	have, err := k.NodeTarget(ctx)
	if !errors.Is(err, cluster.ErrAbsent) {
		t.Etcd = have.Etcd
		return t, err
	}
	if i.etcdTag == "" {
		return t, nil
	}
	tag, err := k.EtcdTag(ctx)
	if err != nil {
		return t, err
	}
	if tag == i.etcdTag {
		t.Etcd = tag
	} else {
		i.e.log.Info("etcd tag not recorded", "want", i.etcdTag, "tag", tag)
	}
	return t, nil
}

// tellBoot passes on how far the machines' start has come.
func (i *initRun) tellBoot(ctx context.Context, r *plan.Reporter) error {
	list, err := i.provider.Machines(ctx)
	if err == nil {
		i.tell(r, rollout.Join(list, nil, nil, i.config.Counts()))
	}
	return err
}

// demands describes the measurements: "PCRs 4, 9 and 11".
func (i *initRun) demands() string {
	if i.state.Enrolled() {
		return "a certificate of the authority of this workspace, and measures nothing"
	}
	var enforced, warned int
	for _, m := range i.config.Attestation.TPM2.Measurements {
		if m.WarnOnly {
			warned++
		} else {
			enforced++
		}
	}
	s := fmt.Sprintf("%d measurements", enforced)
	if v := i.config.Image; !v.IsZero() {
		s += " of image " + v.String()
	}
	if warned > 0 {
		s += fmt.Sprintf(" (%d more only warn)", warned)
	}
	return s
}

// shortName is a components ConfigMap's name as people can compare it.
func shortName(name string) string {
	const keep = len("k8s-components-sha256-") + 8
	if len(name) > keep {
		return name[:keep] + "…"
	}
	return name
}

func names(l component.List) string {
	var out []string
	for _, c := range l {
		out = append(out, c.Name)
	}
	return strings.Join(out, ", ")
}
