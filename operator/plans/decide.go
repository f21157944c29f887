package plans

import (
	"cmp"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/version"
	"constellation/operator/api/upgradev1"
	"constellation/operator/nodelock"
)

const (
	// most is the maximum number of nodes in the status. It is also the maximum number of failed nodes,
	// independent of the Plan, because the status must record all of them.
	most = 100
	// named is the maximum number of nodes in a message.
	named = 5
)

// Reasons of conditions, and of events.
const (
	reasonVersion          = "Version"
	reasonChannel          = "Channel"
	reasonError            = "Error"
	reasonValid            = "PlanIsValid"
	reasonResolved         = "Resolved"
	reasonSyncJob          = "SyncJob"
	reasonComplete         = "Complete"
	reasonWaiting          = "Waiting"
	reasonJobFailed        = "JobFailed"
	reasonNotReady         = "NotReady"
	reasonValidationFailed = "ValidationFailed"

	eventValidated    = "Validated"
	eventInvalid      = "ValidateFailed"
	eventUnresolved   = "ResolveFailed"
	eventJobComplete  = "JobComplete"
	eventJobWaiting   = "JobCompleteWaiting"
	eventCancelled    = "Cancelled"
	eventKeptCordoned = "KeptCordoned"
	eventJobRefused   = "JobRefused"
)

// decision has the actions for one Plan. Its parts are carried out in this order, and a part only
// after all parts before it.
type decision struct {
	// marks are changes of Nodes after their upgrade.
	marks []mark
	// deletes are Jobs to delete.
	deletes []*job
	// status is written if it differs.
	status upgradev1.PlanStatus
	// creates are nodes for which a Job is created. They are in status.Applying.
	creates []upgraded
	// taken are the names of those that get their slot now.
	taken []string
	// completes is true if the condition Complete becomes True.
	completes bool
	// lock requests the node lock. pass gives it to the operator.
	lock, pass bool
	// again is when the next round is due without an event; zero: never.
	again time.Time
	// events are recorded after all other parts.
	events []event
}

// mark is a change of a Node.
type mark struct {
	node     upgraded
	labels   map[string]string
	uncordon bool
	// cordonedFor is the new value of the cordon annotation; nil: unchanged.
	cordonedFor *string
	// waits is the new value of nodelock.AnnotationWaits; nil: unchanged.
	waits *string
}

// notes returns the annotations that change, with their new values; empty: removed.
func (m mark) notes() map[string]string {
	out := map[string]string{}
	if m.cordonedFor != nil {
		out[annotationCordoned] = *m.cordonedFor
	}
	if m.waits != nil {
		out[nodelock.AnnotationWaits] = *m.waits
	}
	return out
}

type event struct {
	warning      bool
	reason, note string
	node         string // related Node; may be empty
}

func (d *decision) note(reason, format string, args ...any) {
	d.events = append(d.events, event{reason: reason, note: fmt.Sprintf(format, args...)})
}

func (d *decision) at(t time.Time) {
	if d.again.IsZero() || t.Before(d.again) {
		d.again = t
	}
}

// decide returns the actions for a Plan. It is pure: its only input is v.
func decide(v view) decision {
	p := v.plan
	var d decision
	// A copy of the parts that are changed in place below.
	d.status = p.Status
	d.status.Conditions = slices.Clone(p.Status.Conditions)
	own := &upgradev1.RolloutStatus{}
	if p.Status.Constellation != nil {
		*own = *p.Status.Constellation
	}
	d.status.Constellation = own
	own.ObservedGeneration, d.status.ObservedGeneration = p.Generation, p.Generation
	stamp := v.now.UTC().Format(time.RFC3339)
	set := func(kind string, status corev1.ConditionStatus, reason, message string) bool {
		return setCondition(&d.status.Conditions, upgradev1.Condition{Type: kind, Status: status, Reason: reason, Message: message}, stamp)
	}
	summarize := func(o outcome) {
		set(upgradev1.ConditionReady, truth(o.ready), o.reason, unless(o.ready, o.message))
		set(upgradev1.ConditionReconciling, truth(o.busy), o.reason, unless(!o.busy, o.message))
		set(upgradev1.ConditionStalled, truth(o.stalled), o.reason, unless(!o.stalled, o.message))
	}
	notReady := func(reason string, why error) decision {
		set(upgradev1.ConditionComplete, corev1.ConditionFalse, reasonNotReady, "")
		own.Waiting = nil
		summarize(outcome{reason: reason, message: why.Error(), stalled: true})
		return d
	}
	if !v.polled.IsZero() {
		own.LastPolled, own.PolledChannel = new(metav1.NewTime(v.polled)), v.channel
	}
	if v.invalid != nil {
		if set(upgradev1.ConditionValidated, corev1.ConditionFalse, reasonError, v.invalid.Error()) {
			d.events = append(d.events, event{warning: true, reason: eventInvalid, note: v.invalid.Error()})
		}
		return notReady(reasonValidationFailed, v.invalid)
	}
	if set(upgradev1.ConditionValidated, corev1.ConditionTrue, reasonValid, "") {
		d.note(eventValidated, "Plan is valid")
	}
	if v.unresolved != nil {
		if set(upgradev1.ConditionResolved, corev1.ConditionFalse, reasonError, v.unresolved.Error()) {
			d.events = append(d.events, event{warning: true, reason: eventUnresolved, note: v.unresolved.Error()})
		}
		d.status.LatestHash = ""
		return notReady(eventUnresolved, v.unresolved)
	}
	reason, message := reasonVersion, ""
	if p.Spec.Version == "" {
		reason = reasonChannel
	}
	if v.stale != nil {
		message = fmt.Sprintf("%v; using its previous answer", v.stale)
	}
	if set(upgradev1.ConditionResolved, corev1.ConditionTrue, reason, message) && message != "" {
		d.events = append(d.events, event{warning: true, reason: eventUnresolved, note: message})
	}
	if d.status.LatestVersion != v.version || d.status.LatestHash != v.hash {
		d.note(reasonResolved, "Resolved latest version from Spec.%s: %s", reason, v.version)
	}
	d.status.LatestVersion, d.status.LatestHash = v.version, v.hash
	r := &roller{view: v, d: &d, own: own, known: make(map[string]upgradev1.NodeStatus, len(own.Nodes)), now: metav1.NewTime(v.now.UTC().Truncate(time.Second))}
	r.roll()
	complete, reason, message := r.complete()
	if set(upgradev1.ConditionComplete, complete, reason, message) {
		switch {
		case complete == corev1.ConditionTrue:
			d.completes = true
			d.note(reasonComplete, "Jobs complete for version %s. Hash: %s", v.version, v.hash)
		case reason == reasonWaiting:
			d.note(reasonWaiting, "%s", message)
		}
	}
	summarize(r.outcome(complete == corev1.ConditionTrue, reason, message))
	return d
}

// outcome is what the conditions for generic tools report. A Plan that is stalled and busy upgrades
// other nodes than the one that somebody must care for.
type outcome struct {
	reason, message      string
	ready, busy, stalled bool
}

func truth(is bool) corev1.ConditionStatus {
	if is {
		return corev1.ConditionTrue
	}
	return corev1.ConditionFalse
}

// unless returns text, or nothing if is.
func unless(is bool, text string) string {
	if is {
		return ""
	}
	return text
}

// setCondition sets a condition. It reports whether the status changed or, unless the status is True,
// the reason.
func setCondition(all *[]upgradev1.Condition, c upgradev1.Condition, now string) bool {
	for i := range *all {
		old := &(*all)[i]
		if old.Type != c.Type {
			continue
		}
		if old.Status == c.Status && old.Reason == c.Reason && old.Message == c.Message {
			return false
		}
		turned := old.Status != c.Status || old.Reason != c.Reason && c.Status != corev1.ConditionTrue || c.Message != "" && old.Message == ""
		c.LastTransitionTime, c.LastUpdateTime = old.LastTransitionTime, now
		if old.Status != c.Status {
			c.LastTransitionTime = now
		}
		*old = c
		return turned
	}
	c.LastTransitionTime, c.LastUpdateTime = now, now
	*all = append(*all, c)
	return true
}

// roller decides about the nodes of a Plan that is valid and whose version is known.
type roller struct {
	view
	d     *decision
	own   *upgradev1.RolloutStatus
	now   metav1.Time
	known map[string]upgradev1.NodeStatus // from the status, for the same hash

	nodes    []upgradev1.NodeStatus
	keep     []upgraded // that keep or get a concurrency slot
	failed   []upgradev1.NodeStatus
	marked   int
	busyCP   bool   // a control plane has a slot
	template string // hash of the Plan's pod settings; see templateHash
	refused  string // why a Job cannot be created
	problem  string // why a node cannot be upgraded
	invalid  bool   // the Plan is the cause
	passes   bool   // a problem that can end by itself
	never    bool   // the window never opens
	shares   bool   // only the operator's node lock is in the way
}

func (r *roller) spec() upgradev1.Rollout { return rollout(r.plan) }

func (r *roller) roll() {
	for _, n := range r.own.Nodes {
		if n.Hash == r.hash {
			r.known[n.Name] = n
		}
	}
	cancelled := r.spec().State == upgradev1.Cancelled
	r.nodes, r.keep = make([]upgradev1.NodeStatus, 0, len(r.begun)), make([]upgraded, 0, len(r.begun))
	for _, u := range r.begun {
		if cancelled {
			r.cancel(u)
			continue
		}
		if r.advance(u) {
			r.keep = append(r.keep, u)
			r.busyCP = r.busyCP || u.controlPlane
		}
	}
	inPlace := make(map[string]bool, len(r.begun))
	for _, u := range r.begun {
		inPlace[u.name] = true
	}
	for _, s := range r.suspects {
		r.judge(s, inPlace)
	}
	r.releaseOthers(cancelled)
	// Failed nodes without a slot stay in the status.
	for name, n := range r.known {
		if n.State == upgradev1.NodeFailed && !inPlace[name] && r.current(n) && !cancelled {
			r.failed = append(r.failed, n)
			r.nodes = append(r.nodes, n)
		}
	}
	why := r.blocked()
	if why == nil {
		r.take()
	}
	if r.share() {
		why.message = "sharing the drains of " + r.lock + ", which holds the node lock"
	}
	left := r.total - r.done - r.marked - len(r.keep)
	r.own.Waiting = since(r.own.Waiting, why, left > 0, r.now)
	slices.SortFunc(r.keep, func(a, b upgraded) int { return strings.Compare(a.name, b.name) })
	r.d.status.Applying = slices.Grow([]string(nil), len(r.keep))
	for _, u := range r.keep {
		r.d.status.Applying = append(r.d.status.Applying, u.host)
	}
	r.own.Counts = upgradev1.Counts{
		Total: int32(r.total), Done: int32(min(r.done+r.marked, r.total)), Applying: int32(len(r.keep)), Failed: int32(len(r.failed)),
	}
	slices.SortFunc(r.failed, func(a, b upgradev1.NodeStatus) int { return strings.Compare(a.Name, b.Name) })
	r.own.Nodes = list(r.nodes)
}

// list returns the nodes for the status, failed ones first, because these must be recorded.
func list(nodes []upgradev1.NodeStatus) []upgradev1.NodeStatus {
	plain := func(n upgradev1.NodeStatus) bool {
		return n.Attempts == 0 && (n.State == upgradev1.NodeRunning || n.State == upgradev1.NodeSettling)
	}
	slices.SortFunc(nodes, func(a, b upgradev1.NodeStatus) int {
		if x, y := plain(a), plain(b); x != y {
			if x {
				return 1
			}
			return -1
		}
		return strings.Compare(a.Name, b.Name)
	})
	for i, n := range nodes {
		if i >= most && plain(n) {
			return nodes[:i]
		}
	}
	return nodes
}

// current reports whether the record of a failed node is of the current Plan.
func (r *roller) current(n upgradev1.NodeStatus) bool {
	return n.Generation == r.plan.Generation && n.Retry == r.spec().Retry
}

// setState records the state of a node.
func (r *roller) setState(u upgraded, state upgradev1.NodeState, reason, format string, args ...any) *upgradev1.NodeStatus {
	n, ok := r.known[u.name]
	if !ok {
		n = upgradev1.NodeStatus{Name: u.name, Hash: r.hash}
	}
	if n.State != state {
		n.Since = r.now
	}
	n.State, n.Reason, n.Message = state, reason, fmt.Sprintf(format, args...)
	r.nodes = append(r.nodes, n)
	return &r.nodes[len(r.nodes)-1]
}

// advance continues with a node that has a slot, and reports whether it keeps the slot.
func (r *roller) advance(u upgraded) bool {
	if u.job == nil {
		return r.withoutJob(u)
	}
	was, j := r.known[u.name], u.job
	switch {
	case j.deleting:
		r.setState(u, cmp.Or(was.State, upgradev1.NodeRunning), "JobEnding", "Job %s is being deleted", j.name)
		return true
	case j.name != u.want && j.phase == jobActive && j.brings == labelValue(r.version):
		r.setState(u, upgradev1.NodeRunning, "JobSuperseded", "Job %s of the previous Plan continues to its end", j.name)
		return true
	case j.name != u.want, j.phase != jobComplete && r.replaced(j), j.phase == jobComplete && u.credited:
		r.d.deletes = append(r.d.deletes, j)
		r.setState(u, upgradev1.NodeRunning, "JobReplaced", "Job %s is deleted, because the Plan has changed", j.name)
		return true
	}
	switch j.phase {
	case jobComplete:
		return !r.completed(u)
	case jobFailed:
		return r.hasFailed(u)
	}
	r.setRunning(u)
	return true
}

// withoutJob continues with a node that has a slot and no job: it waits after a failure, or creates
// the job. It reports whether the node keeps the slot.
func (r *roller) withoutJob(u upgraded) bool {
	was, known := r.known[u.name]
	switch {
	case known && was.State == upgradev1.NodeFailed && r.current(was):
		n := r.setState(u, was.State, was.Reason, "%s", was.Message)
		r.failed = append(r.failed, *n)
		return r.spec().FailureBudget == nil
	case known && was.State == upgradev1.NodeRetrying && r.view.now.Before(was.Since.Add(r.retryDelay)):
		r.setState(u, was.State, was.Reason, "%s", was.Message)
		r.d.at(was.Since.Add(r.retryDelay))
		return true
	}
	n := r.setState(u, upgradev1.NodeRunning, "JobWanted", "gets Job %s", u.want)
	if !r.current(was) {
		n.Attempts = 0
	}
	if u.refused != "" {
		n.Reason, n.Message = eventJobRefused, fmt.Sprintf("Job %s cannot be created: %s", u.want, u.refused)
		r.refused = n.Message
		if known && was.Reason != n.Reason {
			r.d.events = append(r.d.events, event{warning: true, reason: eventJobRefused, node: u.name, note: n.Message})
		}
	}
	r.d.creates = append(r.d.creates, u)
	return true
}

// setRunning records the state of a node whose job runs, with what its pods report.
func (r *roller) setRunning(u upgraded) {
	was, known := r.known[u.name]
	j := u.job
	n := r.setState(u, upgradev1.NodeRunning, cmp.Or(u.news.reason, "JobRunning"), "%s", cmp.Or(u.news.message, fmt.Sprintf("Job %s runs", j.name)))
	if !u.ready { // for example while it reboots
		n.Message += "; the node is not Ready"
	}
	if known && u.news.isBad() && was.Reason != n.Reason {
		r.d.events = append(r.d.events, event{warning: true, reason: n.Reason, node: u.name, note: n.Message})
	}
	if j.failed > 0 {
		n.Message += fmt.Sprintf("; %d of its pods failed", j.failed)
	}
}

// replaced reports whether the Plan's pod settings have changed since a Job was created.
func (r *roller) replaced(j *job) bool {
	made, ours := j.template, j.template != ""
	if ours && r.template == "" {
		p := r.plan.DeepCopy()
		p.Status.LatestHash = r.hash
		r.template = templateHash(p)
	}
	return ours && made != r.template
}

// completed handles a node whose Job has completed, and reports whether the node is done.
func (r *roller) completed(u upgraded) bool {
	ended := u.job.ended
	m, changed := r.release(u)
	if until := ended.Add(r.delay); r.view.now.Before(until) {
		if r.known[u.name].State != upgradev1.NodeSettling {
			r.d.events = append(r.d.events, event{
				reason: eventJobWaiting, node: u.name,
				note: fmt.Sprintf("Job completed on Node %s, waiting %s PostCompleteDelay", u.name, r.delay),
			})
		}
		r.setState(u, upgradev1.NodeSettling, "Delay", "its slot is freed after %s", until.UTC().Format(time.RFC3339))
		r.d.at(until)
		if changed {
			r.d.marks = append(r.d.marks, m)
		}
		return false
	}
	if r.soak > 0 {
		from := ended
		if u.readySince.After(from) {
			from = u.readySince
		}
		until := from.Add(r.soak)
		if !u.ready || r.view.now.Before(until) {
			if u.ready {
				r.setState(u, upgradev1.NodeSettling, "Soak", "it is Ready, and must stay Ready until %s", until.UTC().Format(time.RFC3339))
				r.d.at(until)
			} else {
				r.setState(u, upgradev1.NodeSettling, "NotReady", "it was upgraded and is not Ready")
			}
			if changed {
				r.d.marks = append(r.d.marks, m)
			}
			return false
		}
	}
	m.labels = map[string]string{}
	for k, val := range r.plan.Spec.PostCompleteLabels {
		m.labels[k] = strings.NewReplacer("$(LATEST_VERSION)", r.version, "$(LATEST_HASH)", r.hash).Replace(val)
	}
	m.labels[upgradev1.LabelOfPlan(r.plan.Name)] = r.hash
	r.d.marks = append(r.d.marks, m)
	r.marked++
	r.d.events = append(r.d.events, event{reason: eventJobComplete, node: u.name, note: fmt.Sprintf("Job completed on Node %s", u.name)})
	return true
}

// release uncordons a node that was cordoned for this Plan.
func (r *roller) release(u upgraded) (m mark, changed bool) {
	m.node = u
	if r.plan.Spec.Drain == nil && !r.plan.Spec.Cordon {
		return m, false
	}
	us := r.plan.Namespace + "/" + r.plan.Name
	switch {
	case u.also != "" && u.cordonedFor == us:
		// Another Plan needs the node cordoned, and will uncordon it.
		m.cordonedFor = new(r.plan.Namespace + "/" + u.also)
		return m, true
	case u.also != "" || u.job != nil && u.job.keepCordon:
		return m, false
	}
	m.uncordon = u.unschedulable
	if u.cordonedFor == us {
		m.cordonedFor = new("")
	}
	return m, m.uncordon || m.cordonedFor != nil
}

// hasFailed handles a node whose Job has failed, and reports whether it keeps its slot.
func (r *roller) hasFailed(u upgraded) bool {
	was, known := r.known[u.name]
	if known && was.Job == string(u.job.uid) && was.Retry != r.spec().Retry {
		r.d.deletes = append(r.d.deletes, u.job)
		n := r.setState(u, upgradev1.NodeRunning, "JobReplaced", "Job %s is deleted and created again, because a retry was requested", u.job.name)
		n.Attempts, n.Retry, n.Job, n.Generation = 0, r.spec().Retry, "", r.plan.Generation
		return true
	}
	attempts := was.Attempts
	if was.Job != string(u.job.uid) {
		attempts++
	}
	message := fmt.Sprintf("Job %s/%s failed on Node %s: %s: %s", u.job.namespace, u.job.name, u.name, u.job.reason, u.job.message)
	if u.news.isBad() {
		message += "; " + u.news.message
	}
	state := upgradev1.NodeFailed
	if attempts <= r.spec().Retries {
		state = upgradev1.NodeRetrying
	}
	if !known || was.Job != string(u.job.uid) {
		r.d.events = append(r.d.events, event{warning: true, reason: reasonJobFailed, node: u.name, note: message})
	}
	n := r.setState(u, state, cmp.Or(u.job.reason, reasonJobFailed), "%s", message)
	if was.Job != string(u.job.uid) {
		n.Since = r.now
	}
	n.Attempts, n.Job, n.Generation, n.Retry = attempts, string(u.job.uid), r.plan.Generation, r.spec().Retry
	if state == upgradev1.NodeRetrying {
		if next := n.Since.Add(r.retryDelay); r.view.now.Before(next) {
			r.d.at(next)
		} else {
			r.d.deletes = append(r.d.deletes, u.job)
		}
		return true
	}
	r.failed = append(r.failed, *n)
	return r.spec().FailureBudget == nil
}

// cancel cancels the started upgrade of a node and uncordons it.
func (r *roller) cancel(u upgraded) {
	if u.job != nil && u.job.phase == jobActive {
		if !u.job.deleting {
			r.d.deletes = append(r.d.deletes, u.job)
			r.d.events = append(r.d.events, event{reason: eventCancelled, node: u.name, note: fmt.Sprintf("Job cancelled on Node %s", u.name)})
		}
		r.setState(u, upgradev1.NodeRunning, "Cancelled", "Job %s is being deleted", u.job.name)
		r.keep = append(r.keep, u)
		return
	}
	if u.job != nil && u.job.phase == jobComplete && !u.credited {
		if !r.completed(u) {
			r.keep = append(r.keep, u)
		}
		return
	}
	if u.job != nil {
		r.d.deletes = append(r.d.deletes, u.job)
	}
}

// releaseOthers uncordons nodes that are cordoned for this Plan and no longer belong to it.
func (r *roller) releaseOthers(cancelled bool) {
	marked := map[string]bool{}
	for _, m := range r.d.marks {
		marked[m.node.name] = true
	}
	for _, u := range r.cordoned {
		active := u.job != nil && u.job.phase == jobActive
		if active || marked[u.name] || !cancelled && u.key != "" {
			continue
		}
		m := mark{node: u, uncordon: u.unschedulable && u.also == "", cordonedFor: new("")}
		if u.also != "" {
			m.cordonedFor = new(r.plan.Namespace + "/" + u.also)
		}
		r.d.marks = append(r.d.marks, m)
	}
}

// judge handles a Job whose node has no slot.
func (r *roller) judge(s suspect, inPlace map[string]bool) {
	j := s.job
	if j.deleting || s.node != nil && inPlace[s.node.name] {
		return
	}
	switch {
	case s.node == nil:
		r.d.deletes = append(r.d.deletes, j)
	case j.brings != labelValue(r.version):
		r.d.deletes = append(r.d.deletes, j)
	case j.phase == jobComplete && j.hash == r.hash && s.node.labels.Get(upgradev1.LabelOfPlan(r.plan.Name)) != r.hash && !s.node.credited && s.node.key != "":
		// Its node lost its slot before it was marked.
		r.completed(*s.node)
	}
}

// reason is why no upgrade may start.
type reason struct{ word, message string }

// blocked returns why no upgrade may start; nil: it may.
func (r *roller) blocked() *reason {
	spec := r.spec()
	left := r.total - r.done - r.marked - len(r.keep)
	if left <= 0 {
		return nil
	}
	if spec.State == upgradev1.Paused || spec.State == upgradev1.Cancelled {
		return &reason{string(spec.State), fmt.Sprintf("the Plan is %s: set spec.constellation.state to Running", strings.ToLower(string(spec.State)))}
	}
	if r.window != nil {
		open, changes := r.window.open(r.view.now)
		if !changes.IsZero() {
			r.d.at(changes)
		}
		switch {
		case !open && changes.IsZero():
			r.never = true
			return &reason{"Window", "the window never opens: it has no days"}
		case !open:
			return &reason{"Window", fmt.Sprintf("the window opens at %s", changes.UTC().Format(time.RFC3339))}
		}
	}
	if r.depends != "" {
		return &reason{"DependsOn", r.depends}
	}
	limit := most
	if b := spec.FailureBudget; b != nil {
		limit = min(limit, share(b, r.total))
	}
	if n := len(r.failed); n > limit || n >= most {
		return &reason{"FailureBudget", fmt.Sprintf("%d nodes failed, the maximum is %d: see status.constellation.nodes, and set spec.constellation.retry to a new value", n, limit)}
	}
	if spec.Alone {
		r.d.lock = true
		if r.mayLock && r.awaited && !slices.ContainsFunc(r.keep, func(u upgraded) bool { return !r.failedNow(u) }) {
			// The operator leads, because the Plan can share its drains.
			r.d.pass = true
			return &reason{"Alone", "giving way to " + nodelock.Replacements + ", between two nodes"}
		}
		if !r.mayLock {
			r.d.at(r.view.now.Add(nodelock.Poll))
			r.shares = r.lock == nodelock.Replacements
			switch {
			case r.lock != "":
				return &reason{"Alone", fmt.Sprintf("waiting for %s, which holds the node lock", r.lock)}
			case r.lockTrouble != nil:
				return &reason{"Alone", fmt.Sprintf("acquire the node lock: %v", r.lockTrouble)}
			}
			return &reason{"Alone", "waiting for the node lock"}
		}
	}
	if h := spec.Health; h != nil && h.MaxUnavailable != nil && r.room() <= 0 {
		return &reason{"Unavailable", fmt.Sprintf("%d of %d nodes of the cluster are not Ready or cordoned; the maximum is %s", r.absent, r.view.nodes, h.MaxUnavailable)}
	}
	return nil
}

// room returns how many more nodes of the cluster may become unavailable.
func (r *roller) room() int {
	h := r.spec().Health
	if h == nil || h.MaxUnavailable == nil {
		return r.view.nodes
	}
	n := share(h.MaxUnavailable, r.view.nodes) - r.absent
	for _, u := range r.keep {
		if u.available() {
			n--
		}
	}
	return n
}

// take assigns free slots to nodes.
func (r *roller) take() {
	free := min(int(min(r.plan.Spec.Concurrency, int64(r.total)))-len(r.keep), r.room())
	if free <= 0 {
		return
	}
	marked := map[string]bool{}
	for _, m := range r.d.marks {
		marked[m.node.name] = true
	}
	for u := range r.turn() {
		if marked[u.name] || r.failedNow(u) {
			continue
		}
		if problem, theirs := r.refuses(u); problem != "" {
			r.problem, r.invalid, r.passes = cmp.Or(r.problem, problem), r.invalid || theirs, r.passes || u.kubelet == ""
			continue
		}
		free--
		if r.advance(u) {
			r.keep = append(r.keep, u)
			r.d.taken = append(r.d.taken, u.name)
		}
		if free == 0 {
			break
		}
	}
}

// synced is the event about nodes whose Jobs are created.
func synced(version, hash string, nodes []string) event {
	slices.Sort(nodes)
	return event{reason: reasonSyncJob, note: fmt.Sprintf("Jobs synced for version %s on Nodes %s. Hash: %s", version, names(nodes), hash)}
}

// turn returns the remaining nodes, in the order of their upgrades.
func (r *roller) turn() iter.Seq[upgraded] {
	return func(yield func(upgraded) bool) {
		first, stop := iter.Pull(r.candidates(true))
		defer stop()
		a, more := first()
		if r.spec().ControlPlanesFirst {
			busy := r.busyCP || more
			for ; more; a, more = first() {
				if !yield(a) {
					return
				}
			}
			if busy {
				return
			}
		}
		for b := range r.candidates(false) {
			for ; more && a.key < b.key; a, more = first() {
				if !yield(a) {
					return
				}
			}
			if !yield(b) {
				return
			}
		}
		for ; more; a, more = first() {
			if !yield(a) {
				return
			}
		}
	}
}

// refuses returns why a node must not be upgraded, and whether the Plan is the cause.
func (r *roller) refuses(u upgraded) (problem string, theirs bool) {
	if u.os == windows && (r.plan.Spec.Drain != nil || r.plan.Spec.Cordon) && r.settings.KubectlImageWindows == "" {
		return fmt.Sprintf("Node %s runs Windows, and no kubectl image for Windows is configured: set SYSTEM_UPGRADE_JOB_KUBECTL_IMAGE_WINDOWS", u.name), true
	}
	if !r.spec().KubernetesVersions {
		return "", false
	}
	to, err := kubernetesVersion(r.version)
	if err != nil {
		return fmt.Sprintf("version %s is not a version of Kubernetes, but spec.constellation.kubernetesVersions is set", r.version), true
	}
	from, err := kubernetesVersion(u.kubelet)
	if err != nil {
		return fmt.Sprintf("Node %s does not report its Kubernetes version", u.name), false
	}
	switch {
	case to.Less(from):
		return fmt.Sprintf("Node %s runs %s: %s is older", u.name, u.kubelet, r.version), false
	case to.Major() != from.Major() || to.Minor() > from.Minor()+1:
		return fmt.Sprintf("Node %s runs %s: %s skips a minor version", u.name, u.kubelet, r.version), false
	}
	return "", false
}

// kubernetesVersion parses a version of Kubernetes without the distribution's suffix.
func kubernetesVersion(s string) (version.Version, error) {
	core, _, _ := strings.Cut(s, "+")
	core, _, _ = strings.Cut(core, "-")
	return version.Parse(core)
}

// names formats the first few names.
func names(all []string) string {
	if len(all) <= named {
		return strings.Join(all, ",")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(all[:named], ","), len(all)-named)
}

// since returns the time since which a reason has applied.
func since(old *upgradev1.Waiting, why *reason, left bool, now metav1.Time) *upgradev1.Waiting {
	if why == nil || !left {
		return nil
	}
	w := &upgradev1.Waiting{Reason: why.word, Message: why.message, Since: now}
	if old != nil && old.Reason == w.Reason {
		w.Since = old.Since
	}
	return w
}

// stuck names the first node whose pod makes no progress, and why; empty: none.
func (r *roller) stuck() string {
	var first *upgradev1.NodeStatus
	n := 0
	for i := range r.nodes {
		s := &r.nodes[i]
		if s.State != upgradev1.NodeRunning || !isBad(s.Reason) {
			continue
		}
		if n++; first == nil || s.Name < first.Name {
			first = s
		}
	}
	switch n {
	case 0:
		return ""
	case 1:
		return fmt.Sprintf("; Node %s: %s", first.Name, first.Message)
	}
	return fmt.Sprintf("; Node %s and %d more make no progress: %s", first.Name, n-1, first.Message)
}

// outcome returns what the conditions for generic tools report, from the condition Complete.
func (r *roller) outcome(complete bool, reason, message string) outcome {
	if complete {
		return outcome{reason: reason, message: message, ready: true}
	}
	o := outcome{reason: reason, message: message}
	o.busy = r.marked > 0 || slices.ContainsFunc(r.nodes, func(n upgradev1.NodeStatus) bool {
		return n.State != upgradev1.NodeFailed && n.Reason != eventJobRefused
	})
	switch w := r.own.Waiting; {
	case len(r.failed) > 0:
		o.stalled = true
	case r.refused != "":
		o.reason, o.stalled = eventJobRefused, true
	case len(r.keep) > 0:
	case w != nil:
		state := r.spec().State
		o.reason, o.stalled = w.Reason, r.never
		o.busy = o.busy || !r.never && state != upgradev1.Paused && state != upgradev1.Cancelled
	case r.problem != "" && !r.passes:
		o.stalled = true
	default:
		o.busy = true
	}
	return o
}

// complete returns the condition Complete.
func (r *roller) complete() (status corev1.ConditionStatus, reason, message string) {
	left := r.total - r.done - r.marked - len(r.keep)
	switch {
	case len(r.failed) > 0:
		return corev1.ConditionFalse, reasonJobFailed, r.failed[0].Message
	case r.refused != "":
		return corev1.ConditionFalse, reasonSyncJob, r.refused
	case len(r.keep) > 0:
		var at []string
		for _, u := range r.keep {
			at = append(at, u.name)
		}
		return corev1.ConditionFalse, reasonSyncJob, fmt.Sprintf("version %s is applied to Nodes %s%s", r.version, names(at), r.stuck())
	case left > 0 && r.own.Waiting != nil:
		return corev1.ConditionFalse, reasonWaiting, r.own.Waiting.Message
	case left > 0 && r.problem != "" && r.invalid:
		return corev1.ConditionFalse, reasonValidationFailed, r.problem
	case left > 0 && r.problem != "":
		return corev1.ConditionFalse, reasonWaiting, r.problem
	case left > 0 && r.plan.Spec.Concurrency <= 0:
		return corev1.ConditionTrue, reasonComplete, fmt.Sprintf("spec.concurrency is %d: none of %d nodes is upgraded", r.plan.Spec.Concurrency, left)
	case left > 0 && r.marked > 0:
		// Slots became free in this round.
		return corev1.ConditionFalse, reasonSyncJob, fmt.Sprintf("%d nodes are left for version %s", left, r.version)
	case left > 0:
		return corev1.ConditionFalse, reasonWaiting, fmt.Sprintf("%d nodes are left for version %s", left, r.version)
	}
	return corev1.ConditionTrue, reasonComplete, ""
}
