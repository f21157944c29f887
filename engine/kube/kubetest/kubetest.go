// Package kubetest tests implementations of the engine's access to a cluster.
//
// [Contract] is the test that each implementation must pass. [Cluster] is an implementation in
// memory, for tests of the engine. Contract runs against it and, in package kube, against a real
// API server. No program links the package.
package kubetest

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"constellation/assets"
	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/kms"
	"constellation/engine/plan"
	"constellation/engine/registry"
	"constellation/engine/revocation"
)

// Cluster is an in-memory cluster, initially empty. It is safe for concurrent use.
type Cluster struct {
	mu         sync.Mutex
	down       error
	calls      []string
	hook       func(call string) error
	version    string
	components map[string]cluster.Components
	joinConfig *cluster.JoinConfig
	// joinRevision counts its changes.
	joinRevision int
	signing      string // lifetime of node certificates; empty: the default of Kubernetes
	etcdTag      string
	registry     registry.Registry
	kinds        map[string][32]byte
	charts       map[string][]revision
	chartSet     map[string]int
	otherPlans   string
	neverReady   func(cluster.Chart) bool
	expected     map[string]cluster.ExpectedNode
	target       *cluster.NodeTarget
	plans        []cluster.NodePlan // nil: the kind does not exist
	rollout      cluster.Rollout    // the fields of its target are ignored
	holder       *holding
	nodes        map[string]cluster.Node
	skipped      map[string]bool // groups
	services     []cluster.Service
	watchers     map[chan struct{}]bool
	lines        []cluster.LogLine
	revoked      revocation.List
	tokens       map[string]bool // nodes that have a bootstrap token
	tainted      map[string]bool
	keys         kms.Rotation
	keysInUse    func() []cluster.APIServerKey
}

// holding is the current holder of the cluster's lock.
type holding struct {
	by    cluster.Holder
	lost  func(error)
	alive bool
}

type revision struct {
	chart  string // digest of files and values
	number int
	of     cluster.Chart
}

// New returns an empty cluster.
func New() *Cluster {
	return &Cluster{
		version: "v1.35.4", components: map[string]cluster.Components{}, kinds: map[string][32]byte{}, charts: map[string][]revision{},
		expected: map[string]cluster.ExpectedNode{}, nodes: map[string]cluster.Node{}, skipped: map[string]bool{}, watchers: map[chan struct{}]bool{},
		neverReady: func(cluster.Chart) bool { return false },
	}
}

var (
	_ engine.Cluster   = (*Cluster)(nil)
	_ engine.Encryptor = (*Cluster)(nil)
)

// SetDown makes every call fail as if the API server did not answer; nil ends that. Watches end.
func (c *Cluster) SetDown(down bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down = nil
	if down {
		c.down = fmt.Errorf("%w: connection refused", cluster.ErrUnreachable)
		for w := range c.watchers {
			close(w)
			delete(c.watchers, w)
		}
	}
}

// OnCall calls f at the beginning of each method, with its name. The method returns an error of
// f.
func (c *Cluster) OnCall(f func(call string) error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hook = f
}

// Calls returns the names of the mutating methods that were called, in order.
func (c *Cluster) Calls() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.calls)
}

// NeverReady sets the charts that never become ready.
func (c *Cluster) NeverReady(f func(cluster.Chart) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.neverReady = f
}

// SetOtherPlans sets what OtherPlans returns.
func (c *Cluster) SetOtherPlans(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.otherPlans = name
}

// PutNode adds or replaces a node.
func (c *Cluster) PutNode(n cluster.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodes[n.Name] = n
	c.changedLocked()
}

// RemoveNode removes a node.
func (c *Cluster) RemoveNode(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.nodes, name)
	c.changedLocked()
}

// SetServices sets what Services returns.
func (c *Cluster) SetServices(s ...cluster.Service) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.services = s
}

// SetPaused sets a field of NodeVersion that the engine does not manage.
func (c *Cluster) SetPaused(paused bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rollout.Target.Paused = paused
	c.changedLocked()
}

// Paused returns it.
func (c *Cluster) Paused() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rollout.Target.Paused
}

// SetRollout sets the operator's status; f gets the previous one. The target remains the
// cluster's own.
func (c *Cluster) SetRollout(f func(*cluster.Rollout)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	how := c.rollout.Target
	f(&c.rollout)
	c.rollout.Target = how
	c.changedLocked()
}

// Holder returns the holder of the cluster's lock; the zero value if it is free.
func (c *Cluster) Holder() cluster.Holder {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.holder == nil {
		return cluster.Holder{}
	}
	return c.holder.by
}

// Seize gives the lock to another holder. If alive is set, no later Hold can take over from it.
func (c *Cluster) Seize(by cluster.Holder, alive bool) {
	c.mu.Lock()
	before := c.holder
	c.holder = &holding{by: by, alive: alive}
	c.mu.Unlock()
	if before != nil && before.lost != nil {
		before.lost(&cluster.HeldError{By: by})
	}
}

// Say adds a line to the log of the join service.
func (c *Cluster) Say(l cluster.LogLine) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lines = append(c.lines, l)
	c.changedLocked()
}

func (c *Cluster) changedLocked() {
	for w := range c.watchers {
		select {
		case w <- struct{}{}:
		default:
		}
	}
}

// enter begins a call; change marks a mutating one. Without an error, it returns with the lock
// held.
func (c *Cluster) enter(ctx context.Context, call string, change bool) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c.mu.Lock()
	if c.hook != nil {
		hook := c.hook
		c.mu.Unlock()
		if err := hook(call); err != nil {
			return err
		}
		c.mu.Lock()
	}
	if c.down != nil {
		err := c.down
		c.mu.Unlock()
		return fmt.Errorf("%s: %w", call, err)
	}
	if change {
		c.calls = append(c.calls, call)
	}
	return nil
}

func absent(what string) error { return fmt.Errorf("read %s: %w", what, cluster.ErrAbsent) }

// Version implements [engine.Cluster].
func (c *Cluster) Version(ctx context.Context) (string, error) {
	if err := c.enter(ctx, "Version", false); err != nil {
		return "", err
	}
	defer c.mu.Unlock()
	return c.version, nil
}

// Components implements [engine.Cluster].
func (c *Cluster) Components(ctx context.Context, name string) (cluster.Components, error) {
	if err := c.enter(ctx, "Components", false); err != nil {
		return cluster.Components{}, err
	}
	defer c.mu.Unlock()
	have, ok := c.components[name]
	if !ok {
		return cluster.Components{}, absent(name)
	}
	return have, nil
}

// PublishComponents implements [engine.Cluster].
func (c *Cluster) PublishComponents(ctx context.Context, want cluster.Components) error {
	if err := c.enter(ctx, "PublishComponents", true); err != nil {
		return err
	}
	defer c.mu.Unlock()
	if want.Name != cluster.ComponentsName(want.List) {
		return errors.New("the name does not belong to the list")
	}
	if have, ok := c.components[want.Name]; ok && (have.Kubernetes != want.Kubernetes || !slices.Equal(have.List, want.List)) {
		return errors.New("it exists with other content")
	}
	if want.Statement == "" {
		want.Statement = c.components[want.Name].Statement
	}
	if have := c.components[want.Name]; want.Agent == nil {
		want.Agent, want.Unenrolled = have.Agent, have.Unenrolled
	}
	c.components[want.Name] = want
	return nil
}

// JoinConfig implements [engine.Cluster].
func (c *Cluster) JoinConfig(ctx context.Context) (cluster.JoinConfig, error) {
	if err := c.enter(ctx, "JoinConfig", false); err != nil {
		return cluster.JoinConfig{}, err
	}
	defer c.mu.Unlock()
	if c.joinConfig == nil {
		return cluster.JoinConfig{}, absent("join-config")
	}
	out := *c.joinConfig
	out.Generations = maps.Clone(out.Generations)
	out.Revision = strconv.Itoa(c.joinRevision)
	return out, nil
}

// SecretsReadable implements [engine.SecretReader].
func (c *Cluster) SecretsReadable(ctx context.Context) error {
	if err := c.enter(ctx, "SecretsReadable", false); err != nil {
		return err
	}
	c.mu.Unlock()
	return nil
}

// KeyRotation implements [engine.Encryptor].
func (c *Cluster) KeyRotation(ctx context.Context) (kms.Rotation, error) {
	if err := c.enter(ctx, "KeyRotation", false); err != nil {
		return kms.Rotation{}, err
	}
	defer c.mu.Unlock()
	return c.keys, nil
}

// PublishKeyRotation implements [engine.Encryptor].
func (c *Cluster) PublishKeyRotation(ctx context.Context, old, next kms.Rotation) error {
	if err := c.enter(ctx, "PublishKeyRotation", true); err != nil {
		return err
	}
	defer c.mu.Unlock()
	if c.keys != old && c.keys != next {
		return cluster.ErrConflict
	}
	c.keys = next
	return nil
}

// SetAPIServerKeys sets what APIServerKeys returns.
func (c *Cluster) SetAPIServerKeys(f func() []cluster.APIServerKey) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.keysInUse = f
}

// APIServerKeys implements [engine.Encryptor].
func (c *Cluster) APIServerKeys(ctx context.Context) ([]cluster.APIServerKey, error) {
	if err := c.enter(ctx, "APIServerKeys", false); err != nil {
		return nil, err
	}
	defer c.mu.Unlock()
	if c.keysInUse == nil {
		return nil, nil
	}
	return c.keysInUse(), nil
}

// secretCount is the number of Secrets of the twin.
const secretCount = 3

// RewriteSecrets implements [engine.Encryptor].
func (c *Cluster) RewriteSecrets(ctx context.Context, progress func(done, total int64)) (int64, error) {
	if err := c.enter(ctx, "RewriteSecrets", true); err != nil {
		return 0, err
	}
	defer c.mu.Unlock()
	progress(secretCount, secretCount)
	return secretCount, nil
}

// PublishJoinConfig implements [engine.Cluster].
func (c *Cluster) PublishJoinConfig(ctx context.Context, j cluster.JoinConfig) error {
	if err := c.enter(ctx, "PublishJoinConfig", true); err != nil {
		return err
	}
	defer c.mu.Unlock()
	if j.Revision != "" && (c.joinConfig == nil || j.Revision != strconv.Itoa(c.joinRevision)) {
		return fmt.Errorf("join-config: %w", cluster.ErrConflict)
	}
	j.Generations = maps.Clone(j.Generations)
	j.Revision = ""
	if c.joinConfig == nil || !reflect.DeepEqual(*c.joinConfig, j) {
		c.joinRevision++
	}
	c.joinConfig = &j
	return nil
}

// BoundSigning implements [engine.Cluster].
func (c *Cluster) BoundSigning(ctx context.Context, duration string) (bool, error) {
	if err := c.enter(ctx, "BoundSigning", true); err != nil {
		return false, err
	}
	defer c.mu.Unlock()
	if c.signing != "" {
		return false, nil
	}
	c.signing = duration
	return true, nil
}

// EtcdTag implements [engine.Cluster].
func (c *Cluster) EtcdTag(ctx context.Context) (string, error) {
	if err := c.enter(ctx, "EtcdTag", false); err != nil {
		return "", err
	}
	defer c.mu.Unlock()
	return c.etcdTag, nil
}

// SetEtcdTag implements [engine.Cluster].
func (c *Cluster) SetEtcdTag(ctx context.Context, from, to string) error {
	if err := c.enter(ctx, "SetEtcdTag", true); err != nil {
		return err
	}
	defer c.mu.Unlock()
	if c.etcdTag != from && c.etcdTag != to {
		return fmt.Errorf("etcd.local.imageTag is %q, want %q: %w", c.etcdTag, from, cluster.ErrConflict)
	}
	c.etcdTag = to
	return nil
}

// PutKubeadmConfig does nothing: the configuration is part of the cluster.
func (c *Cluster) PutKubeadmConfig() {}

// Registry implements [engine.Cluster].
func (c *Cluster) Registry(ctx context.Context) (registry.Registry, error) {
	if err := c.enter(ctx, "Registry", false); err != nil {
		return registry.Registry{}, err
	}
	defer c.mu.Unlock()
	return c.registry, nil
}

// HasRegistry implements [engine.Cluster].
func (c *Cluster) HasRegistry(ctx context.Context, want registry.Registry, _ bool) (bool, error) {
	if err := c.enter(ctx, "HasRegistry", false); err != nil {
		return false, err
	}
	defer c.mu.Unlock()
	return c.registry == want, nil
}

// SetRegistry implements [engine.Cluster].
func (c *Cluster) SetRegistry(ctx context.Context, want registry.Registry, _ bool) (bool, error) {
	if err := c.enter(ctx, "SetRegistry", true); err != nil {
		return false, err
	}
	defer c.mu.Unlock()
	changed := c.registry.Address != want.Address
	c.registry = want
	return changed, nil
}

// OutdatedKinds implements [engine.Cluster].
func (c *Cluster) OutdatedKinds(ctx context.Context, kinds []assets.File) (outdated []string, err error) {
	if err := c.enter(ctx, "OutdatedKinds", false); err != nil {
		return nil, err
	}
	defer c.mu.Unlock()
	for _, k := range kinds {
		if have, ok := c.kinds[k.Name]; !ok || have != sha256.Sum256(k.Data) {
			outdated = append(outdated, k.Name)
		}
	}
	return outdated, nil
}

// ApplyKinds implements [engine.Cluster].
func (c *Cluster) ApplyKinds(ctx context.Context, kinds []assets.File, report func(string)) error {
	if err := c.enter(ctx, "ApplyKinds", true); err != nil {
		return err
	}
	defer c.mu.Unlock()
	for _, k := range kinds {
		c.kinds[k.Name] = sha256.Sum256(k.Data)
		report(k.Name)
	}
	return nil
}

func digest(ch cluster.Chart) string {
	ch.Recreate, ch.Destructive = false, ""
	b, err := json.Marshal(ch)
	if err != nil {
		panic(err)
	}
	return fmt.Sprintf("%x", sha256.Sum256(b))
}

func key(ch cluster.Chart) string { return ch.Namespace + "/" + ch.Name }

// ChartCurrent implements [engine.Cluster].
func (c *Cluster) ChartCurrent(ctx context.Context, ch cluster.Chart) (bool, error) {
	if err := c.enter(ctx, "ChartCurrent", false); err != nil {
		return false, err
	}
	defer c.mu.Unlock()
	all := c.charts[key(ch)]
	return len(all) > 0 && all[len(all)-1].chart == digest(ch) && !c.neverReady(ch), nil
}

// ApplyChart implements [engine.Cluster].
func (c *Cluster) ApplyChart(ctx context.Context, ch cluster.Chart, report func(string, int64, int64)) error {
	if err := c.enter(ctx, "ApplyChart "+ch.Name, true); err != nil {
		return err
	}
	all := c.charts[key(ch)]
	never := c.neverReady(ch)
	if !never && (len(all) == 0 || all[len(all)-1].chart != digest(ch)) {
		c.charts[key(ch)] = append(all, revision{digest(ch), len(all) + 1, ch})
	}
	c.mu.Unlock()
	if never {
		report("deployment "+ch.Name, 0, 1)
		<-ctx.Done()
		if errors.Is(ctx.Err(), context.Canceled) {
			return ctx.Err()
		}
		return fmt.Errorf("wait for chart %s: not ready in time", ch.Name)
	}
	return nil
}

// CompareChart implements [engine.Cluster]. The chart itself lists the destroyed objects.
func (c *Cluster) CompareChart(ctx context.Context, ch cluster.Chart) (plan.ChartChange, error) {
	out := plan.ChartChange{Chart: ch.Name, Namespace: ch.Namespace, To: ch.Version}
	if err := c.enter(ctx, "CompareChart", false); err != nil {
		return out, err
	}
	defer c.mu.Unlock()
	if all := c.charts[key(ch)]; len(all) > 0 {
		old := all[len(all)-1].of
		out.From = old.Version
		out.Content = old.Version == ch.Version && !reflect.DeepEqual(old.Files, ch.Files)
		out.Values = engine.DiffValues(old.Values, ch.Values)
		if ch.Destructive != "" && out.From != out.To {
			out.Destroys = []string{ch.Destructive}
		}
	}
	return out, nil
}

// ChartSet implements [engine.Cluster].
func (c *Cluster) ChartSet(ctx context.Context) (map[string]int, error) {
	if err := c.enter(ctx, "ChartSet", false); err != nil {
		return nil, err
	}
	defer c.mu.Unlock()
	return maps.Clone(c.chartSet), nil
}

// SetChartSet implements [engine.Cluster].
func (c *Cluster) SetChartSet(ctx context.Context, before map[string]int) error {
	if err := c.enter(ctx, "SetChartSet", true); err != nil {
		return err
	}
	defer c.mu.Unlock()
	c.chartSet = maps.Clone(before)
	return nil
}

// ChartRevision implements [engine.Cluster].
func (c *Cluster) ChartRevision(ctx context.Context, ch cluster.Chart) (int, error) {
	if err := c.enter(ctx, "ChartRevision", false); err != nil {
		return 0, err
	}
	defer c.mu.Unlock()
	return len(c.charts[key(ch)]), nil
}

// RevertChart implements [engine.Cluster].
func (c *Cluster) RevertChart(ctx context.Context, ch cluster.Chart, to int) error {
	if err := c.enter(ctx, "RevertChart "+ch.Name, true); err != nil {
		return err
	}
	defer c.mu.Unlock()
	all := c.charts[key(ch)]
	switch {
	case to == 0:
		delete(c.charts, key(ch))
	case to > len(all):
		return fmt.Errorf("chart %s has no revision %d", ch.Name, to)
	case to < len(all):
		c.charts[key(ch)] = append(all, revision{all[to-1].chart, len(all) + 1, all[to-1].of})
	}
	return nil
}

// Values returns the values of an installed chart; nil if there are none.
func (c *Cluster) Values(namespace, name string) map[string]any {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := c.charts[namespace+"/"+name]
	if len(all) == 0 {
		return nil
	}
	return all[len(all)-1].of.Values
}

// Revisions returns how often a chart was changed.
func (c *Cluster) Revisions(ch cluster.Chart) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.charts[key(ch)])
}

// OtherPlans implements [engine.Cluster].
func (c *Cluster) OtherPlans(ctx context.Context) (string, error) {
	if err := c.enter(ctx, "OtherPlans", false); err != nil {
		return "", err
	}
	defer c.mu.Unlock()
	return c.otherPlans, nil
}

// Expect implements [engine.Cluster].
func (c *Cluster) Expect(ctx context.Context, n cluster.ExpectedNode) error {
	if err := c.enter(ctx, "Expect", true); err != nil {
		return err
	}
	defer c.mu.Unlock()
	if c.nodes[n.Name].Components != n.Components || n.Components == "" {
		c.expected[n.Name] = n
		c.changedLocked()
	}
	return nil
}

// Annotate annotates an expected node that exists, as the operator does.
func (c *Cluster) Annotate(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, x := c.nodes[name], c.expected[name]
	n.Components = x.Components
	if c.target != nil {
		n.Image = c.target.Image
	}
	c.nodes[name] = n
	delete(c.expected, name)
	c.changedLocked()
}

// NodeTarget implements [engine.Cluster].
func (c *Cluster) NodeTarget(ctx context.Context) (cluster.NodeTarget, error) {
	if err := c.enter(ctx, "NodeTarget", false); err != nil {
		return cluster.NodeTarget{}, err
	}
	defer c.mu.Unlock()
	if c.target == nil {
		return cluster.NodeTarget{}, absent("NodeVersion")
	}
	return c.targetLocked(), nil
}

func (c *Cluster) targetLocked() cluster.NodeTarget {
	t := *c.target
	t.Paused, t.Cancelled = c.rollout.Target.Paused, c.rollout.Target.Cancelled
	return t
}

// SetNodeTarget implements [engine.Cluster].
func (c *Cluster) SetNodeTarget(ctx context.Context, t cluster.NodeTarget) error {
	if err := c.enter(ctx, "SetNodeTarget", true); err != nil {
		return err
	}
	defer c.mu.Unlock()
	t.Conditions = nil
	if c.target != nil && !reflect.DeepEqual(*c.target, t) {
		c.rollout.Observed, c.rollout.Reached = false, false
	}
	c.target = &t
	c.rollout.Target.Cancelled = false
	c.changedLocked()
	return nil
}

// TryNodeTarget implements [engine.Cluster].
func (c *Cluster) TryNodeTarget(ctx context.Context, _ cluster.NodeTarget) error {
	if err := c.enter(ctx, "TryNodeTarget", false); err != nil {
		return err
	}
	c.mu.Unlock()
	return nil
}

// Rollout implements [engine.Cluster].
func (c *Cluster) Rollout(ctx context.Context) (cluster.Rollout, error) {
	if err := c.enter(ctx, "Rollout", false); err != nil {
		return cluster.Rollout{}, err
	}
	defer c.mu.Unlock()
	if c.target == nil {
		return cluster.Rollout{}, absent("NodeVersion")
	}
	out := c.rollout
	out.Target, out.Moves = c.targetLocked(), slices.Clone(out.Moves)
	return out, nil
}

// Plans implements [engine.Cluster].
func (c *Cluster) Plans(ctx context.Context) ([]cluster.NodePlan, error) {
	if err := c.enter(ctx, "Plans", false); err != nil {
		return nil, err
	}
	defer c.mu.Unlock()
	if c.plans == nil {
		return nil, absent("kind plans.upgrade.cattle.io")
	}
	return slices.Clone(c.plans), nil
}

// SetPlans sets the Plans. Before the first call the cluster lacks the kind.
func (c *Cluster) SetPlans(plans ...cluster.NodePlan) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.plans = append([]cluster.NodePlan{}, plans...)
	c.changedLocked()
}

// SkipState implements [engine.Cluster]. Groups are those that its nodes name.
func (c *Cluster) SkipState(ctx context.Context, name string) (cluster.SkipState, error) {
	if err := c.enter(ctx, "SkipState", false); err != nil {
		return cluster.SkipState{}, err
	}
	defer c.mu.Unlock()
	grouped := false
	for _, n := range c.nodes {
		if n.Name == name {
			h := cluster.SkipState{Name: name, Kind: cluster.SkipNode, Held: n.Skipped}
			if ro := c.rollout; c.target != nil {
				ro.Target = c.targetLocked()
				h.Failed = ro.FailedOn(name)
			}
			if c.skipped[n.Group] {
				h.By = n.Group
			}
			return h, nil
		}
		grouped = grouped || n.Group == name
	}
	if !grouped {
		return cluster.SkipState{}, absent("group " + name)
	}
	return cluster.SkipState{Name: name, Kind: cluster.SkipGroup, Held: c.skipped[name]}, nil
}

// SetSkipState implements [engine.Cluster].
func (c *Cluster) SetSkipState(ctx context.Context, h cluster.SkipState, held bool) error {
	if err := c.enter(ctx, "SetSkipState", true); err != nil {
		return err
	}
	defer c.mu.Unlock()
	if h.Kind == cluster.SkipGroup {
		c.skipped[h.Name] = held
		c.changedLocked()
		return nil
	}
	n, ok := c.nodes[h.Name]
	if !ok {
		return absent("node " + h.Name)
	}
	n.Skipped = held
	c.nodes[h.Name] = n
	c.changedLocked()
	return nil
}

// ChangeRollout implements [engine.Cluster].
func (c *Cluster) ChangeRollout(ctx context.Context, change cluster.RolloutChange) error {
	if err := c.enter(ctx, "ChangeRollout", true); err != nil {
		return err
	}
	defer c.mu.Unlock()
	if c.target == nil {
		return absent("NodeVersion")
	}
	if change.Paused != nil {
		c.rollout.Target.Paused = *change.Paused
	}
	if change.Cancelled != nil {
		c.rollout.Target.Cancelled = *change.Cancelled
	}
	c.changedLocked()
	return nil
}

// WatchRollout implements [engine.Cluster].
func (c *Cluster) WatchRollout(ctx context.Context, changed func()) error {
	return c.watchAs(ctx, "WatchRollout", changed)
}

// Hold implements [engine.Cluster]. It takes over from a dead holder at once.
func (c *Cluster) Hold(ctx context.Context, h cluster.Holder, lost func(error)) (release func(), err error) {
	if err := c.enter(ctx, "Hold", false); err != nil {
		return nil, err
	}
	defer c.mu.Unlock()
	if x := c.holder; x != nil {
		if x.alive && !x.by.Same(h) {
			return nil, &cluster.HeldError{By: x.by}
		}
		if x.lost != nil {
			go x.lost(&cluster.HeldError{By: h})
		}
	}
	mine := &holding{by: h, lost: lost, alive: true}
	c.holder = mine
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.holder == mine {
			c.holder = nil
		}
	}, nil
}

// Revoked implements [engine.Cluster].
func (c *Cluster) Revoked(ctx context.Context) (revocation.List, error) {
	if err := c.enter(ctx, "Revoked", false); err != nil {
		return nil, err
	}
	defer c.mu.Unlock()
	return maps.Clone(c.revoked), nil
}

// Revoke implements [engine.Cluster].
func (c *Cluster) Revoke(ctx context.Context, node string, e revocation.Entry) error {
	if err := c.enter(ctx, "Revoke "+node, true); err != nil {
		return err
	}
	defer c.mu.Unlock()
	value, err := e.Encode()
	if err != nil {
		return err
	}
	read, err := revocation.Parse(map[string]string{node: value})
	if err != nil {
		return err
	}
	for _, name := range c.revoked.Expired(time.Now()) {
		delete(c.revoked, name)
	}
	if c.revoked == nil {
		c.revoked = revocation.List{}
	}
	c.revoked[node] = read[node]
	delete(c.tokens, node)
	delete(c.expected, node)
	c.changedLocked()
	return nil
}

// ExpireRevocations implements [engine.Cluster].
func (c *Cluster) ExpireRevocations(ctx context.Context, now time.Time) error {
	if err := c.enter(ctx, "ExpireRevocations", true); err != nil {
		return err
	}
	defer c.mu.Unlock()
	for _, name := range c.revoked.Expired(now) {
		delete(c.revoked, name)
	}
	c.changedLocked()
	return nil
}

// RemoveMachine implements [engine.Cluster].
func (c *Cluster) RemoveMachine(ctx context.Context, node string, e revocation.Entry) error {
	if err := c.enter(ctx, "RemoveMachine "+node, true); err != nil {
		return err
	}
	defer c.mu.Unlock()
	if n, ok := c.nodes[node]; ok {
		n.Cordoned = true
		c.nodes[node] = n
		if c.tainted == nil {
			c.tainted = map[string]bool{}
		}
		c.tainted[node] = true
	}
	by := "by " + e.By
	if e.Reason != "" {
		by += ": " + e.Reason
	}
	c.moveLocked(cluster.Move{Name: revocation.RemovalPrefix + node, Node: node, Group: groupName(e.Group), Leaves: true, Revoked: by})
	return nil
}

// RefillMachine implements [engine.Cluster].
func (c *Cluster) RefillMachine(ctx context.Context, node string, e revocation.Entry, _ string, _ time.Time) error {
	if err := c.enter(ctx, "RefillMachine "+node, true); err != nil {
		return err
	}
	defer c.mu.Unlock()
	c.moveLocked(cluster.Move{Name: revocation.RefillPrefix + node, Group: groupName(e.Group), Donor: node})
	return nil
}

func groupName(id string) string { return id[strings.LastIndexByte(id, '/')+1:] }

// moveLocked adds a move unless one of that name exists.
func (c *Cluster) moveLocked(m cluster.Move) {
	if slices.ContainsFunc(c.rollout.Moves, func(o cluster.Move) bool { return o.Name == m.Name }) {
		return
	}
	c.rollout.Moves = append(slices.Clone(c.rollout.Moves), m)
	slices.SortFunc(c.rollout.Moves, func(a, b cluster.Move) int { return cmp.Compare(a.Name, b.Name) })
	c.changedLocked()
}

// GiveToken gives a node a bootstrap token, as the join service does.
func (c *Cluster) GiveToken(node string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tokens == nil {
		c.tokens = map[string]bool{}
	}
	c.tokens[node] = true
}

// HasToken reports whether a node has a bootstrap token.
func (c *Cluster) HasToken(node string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.tokens[node]
}

// Tainted reports whether the node has a taint that evicts its pods.
func (c *Cluster) Tainted(node string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.tainted[node]
}

// EndMove removes the record of a move, as the operator does.
func (c *Cluster) EndMove(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rollout.Moves = slices.DeleteFunc(slices.Clone(c.rollout.Moves), func(m cluster.Move) bool { return m.Name == name })
	c.changedLocked()
}

// Nodes implements [engine.Cluster].
func (c *Cluster) Nodes(ctx context.Context) ([]*cluster.Node, error) {
	if err := c.enter(ctx, "Nodes", false); err != nil {
		return nil, err
	}
	defer c.mu.Unlock()
	out := make([]*cluster.Node, 0, len(c.nodes))
	for _, n := range c.nodes {
		out = append(out, &n)
	}
	slices.SortFunc(out, func(a, b *cluster.Node) int { return cmp.Compare(a.Name, b.Name) })
	return out, nil
}

// Expected implements [engine.Cluster].
func (c *Cluster) Expected(ctx context.Context) ([]cluster.ExpectedNode, error) {
	if err := c.enter(ctx, "Expected", false); err != nil {
		return nil, err
	}
	defer c.mu.Unlock()
	return slices.SortedFunc(maps.Values(c.expected), func(a, b cluster.ExpectedNode) int { return cmp.Compare(a.Name, b.Name) }), nil
}

func (c *Cluster) watch() chan struct{} {
	w := make(chan struct{}, 1)
	c.watchers[w] = true
	return w
}

func (c *Cluster) unwatch(w chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.watchers, w)
}

// Watch implements [engine.Cluster].
func (c *Cluster) Watch(ctx context.Context, changed func()) error {
	return c.watchAs(ctx, "Watch", changed)
}

func (c *Cluster) watchAs(ctx context.Context, call string, changed func()) error {
	if err := c.enter(ctx, call, false); err != nil {
		return err
	}
	w := c.watch()
	c.mu.Unlock()
	defer c.unwatch(w)
	changed()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case _, ok := <-w:
			if !ok {
				return cluster.ErrUnreachable
			}
			changed()
		}
	}
}

// Follow implements [engine.Cluster].
func (c *Cluster) Follow(ctx context.Context, _ string, since time.Time, line func(cluster.LogLine)) error {
	if err := c.enter(ctx, "Follow", false); err != nil {
		return err
	}
	w := c.watch()
	c.mu.Unlock()
	defer c.unwatch(w)
	told := 0
	for {
		c.mu.Lock()
		news := slices.Clone(c.lines[told:])
		told = len(c.lines)
		c.mu.Unlock()
		for _, l := range news {
			if l.Time.After(since) {
				line(l)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case _, ok := <-w:
			if !ok {
				return cluster.ErrUnreachable
			}
		}
	}
}

// Services implements [engine.Cluster].
func (c *Cluster) Services(ctx context.Context) ([]cluster.Service, error) {
	if err := c.enter(ctx, "Services", false); err != nil {
		return nil, err
	}
	defer c.mu.Unlock()
	return slices.Clone(c.services), nil
}
