package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"constellation/engine/backup"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// Restorer is what restoring a backup and comparing with it need of a cluster. engine/kube
// implements it on the Kubernetes API.
type Restorer interface {
	// Restore restores the objects of a backup that the cluster lacks, and reports each object
	// once; calls of report do not overlap. The failure of one object is in its report. The error
	// concerns the whole restore: the API server denies access, the backup is unreadable, a
	// selector matches nothing, or ctx ended. It can be called again after any interruption and
	// continues.
	Restore(ctx context.Context, b *backup.Backup, o RestoreOptions, report func(RestoreReport)) error
	// Differences compares the cluster with a backup, without what API servers set, and
	// reports each object that differs. It needs the same memory however many there are.
	Differences(ctx context.Context, b *backup.Backup, only []Selector, report func(Difference)) (Compared, error)
	// ClusterUID returns the unique ID of the cluster: the UID of the namespace kube-system.
	ClusterUID(ctx context.Context) (string, error)
}

// RestoreOptions say what is restored and how.
type RestoreOptions struct {
	// Only restores what one of them matches, with the definitions that it needs; empty
	// restores everything.
	Only []Selector
	// Overwrite makes objects that exist and differ as they were. Without it they are left.
	Overwrite bool
	// DryRun has the API server judge each write without carrying it out.
	DryRun bool
	// Look sends no writes at all: reports say what would be tried.
	Look bool
	// Unproven means that nothing proves who made the backup. Objects that the cluster itself
	// depends on are then restored only if Only names them.
	Unproven bool
}

// What became of an object, or would.
const (
	RestoreCreated     = "created"
	RestoreCompleted   = "completed"   // it was there without its status: a restore was interrupted, or it was to be overwritten
	RestoreOverwritten = "overwritten" // it differed
	RestoreSame        = "same"        // it is there as it was
	RestoreLeft        = "left"        // it is there and differs
	RestoreLeftOut     = "left-out"    // a rule says that it is not restored
	RestoreFailed      = "failed"
	// RestoreWaits is no end: Text says what is waited for.
	RestoreWaits = "waits"
)

// RestoreReport says what became of an object.
type RestoreReport struct {
	Object ObjectName
	// State is one of the constants above.
	State string
	// Text is the reason or a note. It contains no content of the object.
	Text string
	// Remedy is what can be done about it; often empty.
	Remedy string
	// Only selects an object that a rule left out; empty if no selector lifts the rule.
	Only string
	// Code is whether the object was left out because it runs code.
	Code bool
}

// ObjectName names an object of a cluster.
type ObjectName struct {
	Group     string `json:"group"` // empty for the core group
	Resource  string `json:"resource"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
}

// String is "example.com/widgets/shop/blue", without a namespace
// "example.com/widgets/blue", "core/secrets/shop/password" for the core group.
func (o ObjectName) String() string {
	parts := []string{cmp.Or(o.Group, "core"), o.Resource}
	if o.Namespace != "" {
		parts = append(parts, o.Namespace)
	}
	if o.Name != "" {
		parts = append(parts, o.Name)
	}
	return strings.Join(parts, "/")
}

// Selector chooses objects: those of a type, of a namespace, or one.
type Selector struct {
	Group, Resource string
	// Namespace and Name are empty if any will do. With one of them alone, Namespace is
	// set: of types without namespaces it is the name.
	Namespace, Name string
}

// ParseSelector reads "group/resource[/namespace[/name]]", and "group/resource/name" for
// types without namespaces. The core group is "core". "resource.group", as kubectl writes
// it, is a type, too.
func ParseSelector(s string) (Selector, error) {
	parts := strings.Split(s, "/")
	if len(parts) == 1 {
		if resource, group, ok := strings.Cut(s, "."); ok && resource != "" && group != "" {
			return Selector{Group: group, Resource: resource}, nil
		}
	}
	if len(parts) < 2 || len(parts) > 4 || parts[0] == "" || parts[1] == "" || parts[len(parts)-1] == "" {
		return Selector{}, fmt.Errorf("%q: want group/resource[/namespace/name], such as example.com/widgets/shop/blue or core/secrets", s)
	}
	o := Selector{Group: parts[0], Resource: parts[1]}
	if o.Group == "core" {
		o.Group = ""
	}
	if len(parts) > 2 {
		o.Namespace = parts[2]
	}
	if len(parts) > 3 {
		o.Name = parts[3]
	}
	return o, nil
}

// String is what ParseSelector reads.
func (s Selector) String() string {
	return ObjectName(s).String()
}

// OfType reports whether objects of a type can match.
func (s Selector) OfType(group, resource string) bool {
	return s.Group == group && s.Resource == resource
}

// Matches reports whether an object is chosen.
func (s Selector) Matches(o ObjectName) bool {
	switch {
	case !s.OfType(o.Group, o.Resource):
		return false
	case s.Namespace == "" && s.Name == "":
		return true
	case o.Namespace == "":
		return s.Name == "" && s.Namespace == o.Name || s.Namespace == "" && s.Name == o.Name
	}
	return s.Namespace == o.Namespace && (s.Name == "" || s.Name == o.Name)
}

// How an object differs from a backup.
const (
	ChangeAdded   = "added"   // the cluster has it, the backup has not
	ChangeRemoved = "removed" // the backup has it, the cluster has not
	ChangeChanged = "changed"
)

// Difference is an object that is not as it was.
type Difference struct {
	Object ObjectName `json:"object"`
	Change string     `json:"change"`
	// Fields are the paths that differ, sorted: "spec.replicas". Values are not told, since
	// they may be secret. More counts those that are not named.
	Fields []string `json:"fields,omitempty"`
	More   int      `json:"more,omitempty"`
}

// Compared says what was compared.
type Compared struct {
	// Types and Objects count the selected content of the backup.
	Types   int64 `json:"types"`
	Objects int64 `json:"objects"`
	// Skipped says what could not be compared, and why.
	Skipped []string `json:"skipped,omitempty"`
}

// StepRestore is the ID of the only step of `backup restore`.
const StepRestore = "restore"

// RestoreRequest says which backup is restored, and how.
type RestoreRequest struct {
	// ID is that of the backup, Dir the directory that its run is in; empty means that of
	// the workspace.
	ID, Dir string
	// Only are selectors, see [ParseSelector]; empty means everything.
	Only              []string
	Overwrite, DryRun bool
	// Acknowledge are the IDs of findings that the user accepts.
	Acknowledge []string
	// Identity is a file with a secret key that decrypts the backup, see [Engine.UseIdentity].
	Identity string
}

// IDs of the findings of `backup restore` that must be acknowledged.
const (
	FindingForeignBackup  = "backup-foreign"
	FindingUnprovenBackup = "backup-unauthenticated"
)

// RestoreAcks are the IDs that `backup restore --ack` accepts.
var RestoreAcks = []string{FindingForeignBackup, FindingUnprovenBackup}

// flags are the arguments that make the same request, with a leading space each.
func (r RestoreRequest) flags() string {
	s := " " + check.ShellQuote(r.ID)
	if r.Dir != "" {
		s += " --dir " + check.ShellQuote(r.Dir)
	}
	for _, o := range r.Only {
		s += " --only " + check.ShellQuote(o)
	}
	if r.Overwrite {
		s += " --overwrite"
	}
	if r.DryRun {
		s += " --dry-run"
	}
	if r.Identity != "" {
		s += " --identity " + check.ShellQuote(r.Identity)
	}
	for _, id := range r.Acknowledge {
		s += " --ack " + check.ShellQuote(id)
	}
	return s
}

// restoring is one request with what it is about.
type restoring struct {
	e       *Engine
	r       RestoreRequest
	only    []Selector
	b       *backup.Backup
	cluster Restorer
	name    string // of the cluster
	holes   []backup.Hole
}

// openRestore opens and verifies a backup and connects to the cluster. The backup has to
// be closed.
func (e *Engine) openRestore(ctx context.Context, r RestoreRequest, emit func(plan.Event)) (x *restoring, err error) {
	x = &restoring{e: e, r: r}
	for _, o := range r.Only {
		s, err := ParseSelector(o)
		if err != nil {
			return nil, &plan.Error{Op: "read --only", Err: err, Exit: plan.ExitUsage, Remedy: "`constellation backup show " + check.ShellQuote(r.ID) + "` names the types of the backup"}
		}
		x.only = append(x.only, s)
	}
	for _, id := range r.Acknowledge {
		if !slices.Contains(RestoreAcks, id) {
			return nil, &plan.Error{Op: "read --ack", Err: fmt.Errorf("%q is no finding of a restore", id), Exit: plan.ExitUsage, Remedy: "the findings are " + strings.Join(RestoreAcks, ", ")}
		}
	}
	kubeconfig, err := e.ws.Kubeconfig()
	if errors.Is(err, workspace.ErrAbsent) {
		return nil, &plan.Error{Op: "use backup " + r.ID, Err: e.ws.Absent(workspace.KubeconfigFile), Exit: plan.ExitUsage, Remedy: "copy the cluster's kubeconfig there under this name, or name another directory with -C"}
	}
	if err != nil {
		return nil, err
	}
	if x.cluster, err = e.backups(ctx, kubeconfig); err != nil {
		return nil, &plan.Error{Op: "read " + e.ws.Path(workspace.KubeconfigFile), Err: err, Exit: plan.ExitUsage, Remedy: workspace.RestoreKubeconfig}
	}
	if err := e.UseIdentity(r.Identity); err != nil {
		return nil, err
	}
	if x.b, err = e.OpenBackup(r.Dir, r.ID); err != nil {
		return nil, err
	}
	opened := x.b
	defer func() {
		if err != nil {
			opened.Close()
		}
	}()
	if err = locked(x.b); err != nil {
		return nil, err
	}
	m := x.b.Manifest()
	x.name = m.Cluster.Name
	if c, err := e.ws.Config(); err == nil { // a workspace without one can be restored, too
		x.name = c.Name
	}
	x.name = cmp.Or(x.name, "the cluster")
	err = x.b.Verify(ctx, func(done, total int64) {
		emit(plan.Event{Kind: plan.KindProgress, Object: "verify", Text: "backup " + r.ID, Current: done, Total: total})
	})
	var broken *backup.NotWhole
	if errors.As(err, &broken) && len(broken.Damage) == 0 {
		x.holes, err = broken.Holes, nil // what it has is as it was written
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		err = backupError("verify backup "+r.ID, err)
		return nil, &plan.Error{Err: err, Remedy: plan.Remedy(err) + ". Undamaged files of this one can be passed to `kubectl create -f`"}
	}
	// Reading waits for an API server that is away as long as that takes, which is right in
	// the middle of a restore and says nothing before it.
	reach, cancel := context.WithTimeout(ctx, restoreReach)
	defer cancel()
	if _, err := x.cluster.ClusterUID(reach); ctx.Err() != nil {
		return nil, ctx.Err()
	} else if errors.Is(err, context.DeadlineExceeded) {
		return nil, x.clusterFailed("ask the cluster", fmt.Errorf("%w: no answer within %s", cluster.ErrUnreachable, restoreReach))
	} else if errors.Is(err, cluster.ErrUnreachable) {
		return nil, x.clusterFailed("ask the cluster", err)
	}
	return x, nil
}

// restoreReach is how long the API server may take for its first answer.
const restoreReach = 20 * time.Second

// clusterFailed makes an error in the user's words of one of [Restorer].
func (x *restoring) clusterFailed(what string, err error) error {
	var e *plan.Error
	switch {
	case errors.As(err, &e):
		return err
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		return err
	}
	out := &plan.Error{Op: what, Err: err, Remedy: "run the same command again; restored objects stay"}
	switch {
	case errors.Is(err, cluster.ErrForbidden):
		out.Remedy = "use a kubeconfig of a user with this right"
	case errors.Is(err, cluster.ErrUnreachable):
		out.Remedy = "bring its API server up, then run the same command again; restored objects stay"
	case errors.Is(err, cluster.ErrDenied):
		out.Remedy = workspace.KubeconfigFile + " is not of this cluster or not its administrator's: restore the file"
	}
	return out
}

// tally counts what became of objects.
type tally map[string]int64

// did counts what was changed, or would be.
func (t tally) did() int64 {
	return t[RestoreCreated] + t[RestoreCompleted] + t[RestoreOverwritten]
}

// String is "1,003 created, 2 left as they are now".
func (t tally) String() string {
	var parts []string
	for _, p := range []struct{ state, words string }{
		{RestoreCreated, "created"},
		{RestoreCompleted, "completed"},
		{RestoreOverwritten, "overwritten"},
		{RestoreSame, "there as they were"},
		{RestoreLeft, "differ and are left"},
		{RestoreLeftOut, "left out by a rule"},
		{RestoreFailed, "failed"},
	} {
		if n := t[p.state]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, p.words))
		}
	}
	return cmp.Or(strings.Join(parts, ", "), "no objects")
}

// PlanRestore verifies a backup, observes the cluster, and returns the plan to restore missing
// objects. It changes nothing. emit gets progress; calls do not overlap. The caller must close
// the plan at the end, run or not.
//
// The error has ExitUsage if the request is at fault. A damaged backup is refused; one with a
// hole is a warning.
func (e *Engine) PlanRestore(ctx context.Context, r RestoreRequest, emit func(plan.Event)) (*plan.Plan, error) {
	x, err := e.openRestore(ctx, r, emit)
	if err != nil {
		return nil, err
	}
	m := x.b.Manifest()
	would := tally{}
	var seen int64
	var failed []RestoreReport
	var without leftOut
	look := x.options()
	look.DryRun, look.Look = false, true
	err = x.cluster.Restore(ctx, x.b, look, func(o RestoreReport) {
		if o.State == RestoreWaits {
			return
		}
		would[o.State]++
		without.add(o)
		if o.State == RestoreFailed && len(failed) < maxFailures {
			failed = append(failed, o)
		}
		if seen++; seen%1000 == 0 {
			emit(plan.Event{Kind: plan.KindProgress, Object: "compare", Text: "objects with those of the cluster", Current: seen, Total: m.Objects})
		}
	})
	var here string
	if err == nil {
		here, err = x.cluster.ClusterUID(ctx)
	}
	if err != nil {
		x.b.Close()
		return nil, x.clusterFailed("compare backup "+r.ID+" with the cluster", err)
	}
	now := e.now()
	p := &plan.Plan{ID: newRunID(plan.VerbRestore, now), Verb: plan.VerbRestore, Cluster: x.name, Acknowledged: r.Acknowledge, Simulated: x.e.simulated(), NotAttested: x.e.notAttested(), Created: now.UTC()}
	p.OnClose = x.b.Close
	p.End.Command = e.command(string(plan.VerbRestore)) + r.flags()
	p.End.Next = []string{e.command("backup diff") + RestoreRequest{ID: r.ID, Dir: r.Dir, Only: r.Only, Identity: r.Identity}.flags()}
	p.End.Nothing = "nothing to restore: " + would.String()
	if would[RestoreLeft] > 0 {
		p.End.Nothing += "; --overwrite replaces objects that differ"
	}
	find := func(id string, s plan.Severity, title, detail, remedy string) {
		p.Findings = append(p.Findings, plan.Finding{ID: id, Severity: s, Source: "backup", Title: title, Detail: detail, Remedy: remedy})
	}
	x.authentication(p)
	if here != m.Cluster.UID {
		find("other-cluster", plan.Warn, "the backup is of another cluster", "objects of that cluster's own operation are left out: its ConfigMaps, Helm's records and Constellation's kinds, unless --only names them",
			"continue if this cluster replaces that one")
	}
	for _, h := range x.holes {
		find("hole", plan.Warn, "the backup is incomplete: it has no "+Selector{Group: h.Group, Resource: h.Resource}.String(), h.Reason, "continue if you do not need it; otherwise choose another one from `constellation backup list`")
	}
	for _, o := range failed {
		find("cannot", plan.Warn, o.Object.String()+" cannot be restored as the cluster is now", o.Text, o.Remedy)
	}
	if r.Overwrite && would[RestoreOverwritten] > 0 {
		find("overwrite", plan.Warn, fmt.Sprintf("%d objects that differ are overwritten with their state in the backup", would[RestoreOverwritten]), "changes since the backup are lost", p.End.Next[0]+" names them and the fields")
	}
	if len(without.code) > 0 {
		p.End.Next = append(p.End.Next, x.command(without.code))
		find("runs-code", plan.Warn, without.title(), "the user who creates such an object runs programs in the cluster, so a restore creates it only if --only names it", "after you have read these objects in the backup: "+x.command(without.code))
	}
	p.Steps = []plan.Step{x.step(p, would)}
	if would[RestoreFailed] > 0 { // of each the run says why
		p.Steps[0].Finished = false
	}
	return p, nil
}

// options are those of the request.
func (x *restoring) options() RestoreOptions {
	return RestoreOptions{Only: x.only, Overwrite: x.r.Overwrite, DryRun: x.r.DryRun, Unproven: x.b.Authentication() != backup.Authenticated}
}

// command restores what the selectors name, with the other arguments of the request.
func (x *restoring) command(only []string) string {
	r := x.r
	r.Only = only
	return x.e.command(string(plan.VerbRestore)) + r.flags()
}

// authentication adds the finding of a backup of which nothing proves who made it. A dry run has no effect that
// must be acknowledged.
func (x *restoring) authentication(p *plan.Plan) {
	f := plan.Finding{
		Severity: plan.Warn, Source: "backup", Named: !x.r.DryRun, Reference: "docs/backup.md#authentication",
		Remedy: "restore it only if you know who made it and who could write it since",
	}
	const risk = "An attacker who made or changed it decides what this restore writes, with your rights. Objects that the cluster itself depends on are left out, unless --only names them."
	switch x.b.Authentication() {
	case backup.Authenticated:
		return
	case backup.Foreign:
		f.ID, f.Title = FindingForeignBackup, "the backup was authenticated with another master secret than that of this workspace"
		f.Detail = "The workspace cannot verify its tag. " + risk
		if !x.e.ws.Has(workspace.MasterSecretFile) {
			f.Title = "the backup was authenticated with a master secret, and this workspace has none"
			f.Remedy = "copy the " + workspace.MasterSecretFile + " of its cluster into the workspace; otherwise " + f.Remedy
		}
	default:
		f.ID, f.Title = FindingUnprovenBackup, "the backup is not authenticated: nothing proves who made it, and that nobody changed it"
		f.Detail = "It was made without a master secret, or by an older program. " + risk
	}
	p.Findings = append(p.Findings, f)
}

// leftOut counts by type what a restore left out because it runs code, and has a selector for each type.
type leftOut struct {
	code  []string
	types []string
	count map[string]int64
}

func (l *leftOut) add(o RestoreReport) {
	if o.State != RestoreLeftOut || !o.Code {
		return
	}
	t := Selector{Group: o.Object.Group, Resource: o.Object.Resource}
	if l.count == nil {
		l.count = map[string]int64{}
	}
	name := t.String()
	if l.count[name]++; l.count[name] == 1 {
		l.types = append(l.types, name)
	}
	only := t
	if s, err := ParseSelector(o.Only); err == nil && !s.OfType(t.Group, t.Resource) {
		only = s // a definition is selected with its objects
	}
	if !slices.Contains(l.code, only.String()) {
		l.code = append(l.code, only.String())
	}
}

// title ends with "2 upgrade.cattle.io/plans, 1 core/pods".
func (l *leftOut) title() string {
	var parts []string
	for _, t := range l.types {
		parts = append(parts, fmt.Sprintf("%d %s", l.count[t], t))
	}
	return "left out, because objects of these kinds can run code: " + strings.Join(parts, ", ")
}

// maxFailures bounds the failed objects that are reported one by one.
const maxFailures = 20

// step restores, and reports the result of each object.
func (x *restoring) step(p *plan.Plan, would tally) plan.Step {
	title, what := "Restore backup "+x.r.ID, "of "+x.name
	if x.r.DryRun {
		title = "Try to restore backup " + x.r.ID + " (dry run)"
	}
	finished := would.did() == 0 && would[RestoreFailed] == 0
	s := plan.Step{ID: StepRestore, Title: title, Effect: would.String(), Finished: finished}
	if x.r.DryRun {
		s.Effect = "dry run in the API server: " + s.Effect
	}
	// What the cluster has was looked at when the plan was made, and Run looks again.
	s.Done = func(context.Context) (bool, error) { return finished, nil }
	s.Run = func(ctx context.Context, r *plan.Reporter) error {
		got, told := tally{}, int64(0)
		var total, seen int64
		for _, n := range would {
			total += n
		}
		var first RestoreReport
		last := x.e.now()
		err := x.cluster.Restore(ctx, x.b, x.options(), func(o RestoreReport) {
			if o.State == RestoreWaits {
				r.Wait(o.Object.String(), "", o.Text)
				return
			}
			r.Wait("", "", "")
			got[o.State]++
			if o.Only != "" {
				o.Remedy = x.command([]string{o.Only})
			}
			seen++
			level := "info"
			switch {
			case o.State == RestoreSame:
				level = "debug"
			case o.State == RestoreFailed && told < maxFailures:
				level = "error"
				if told++; told == 1 {
					first = o
				}
			}
			text := o.State + " " + o.Object.String()
			if o.Text != "" {
				text += ": " + o.Text
			}
			r.Send(plan.Event{Kind: plan.KindLog, Source: "restore", Level: level, Object: o.Object.String(), State: o.State, Text: text, Remedy: o.Remedy})
			if now := x.e.now(); now.Sub(last) >= progressEvery {
				last = now
				r.Progress(seen, max(total, seen), "objects")
			}
		})
		if err != nil {
			return x.clusterFailed("restore backup "+x.r.ID, err)
		}
		r.Progress(seen, max(total, seen), "objects")
		p.End.Done = fmt.Sprintf("backup %s %s: %s", x.r.ID, what, got)
		if x.r.DryRun {
			p.End.Done = fmt.Sprintf("nothing was changed; backup %s %s would be restored: %s", x.r.ID, what, got)
		}
		if n := got[RestoreFailed]; n > 0 {
			return &plan.Error{
				Op: "restore backup " + x.r.ID, Err: fmt.Errorf("%d of %d objects could not be restored; the first: %s: %s", n, seen, first.Object, first.Text),
				Remedy: cmp.Or(first.Remedy, "remove the causes, then run the same command again; restored objects stay"),
			}
		}
		return nil
	}
	return s
}

// Differ compares the cluster with a backup and reports each object that differs, in the order
// of the backup; calls of report do not overlap. emit gets progress. A damaged backup is
// refused; the missing types of one with a hole are reported as skipped.
func (e *Engine) Differ(ctx context.Context, r RestoreRequest, emit func(plan.Event), report func(Difference)) (Compared, error) {
	x, err := e.openRestore(ctx, r, emit)
	if err != nil {
		return Compared{}, err
	}
	defer x.b.Close()
	c, err := x.cluster.Differences(ctx, x.b, x.only, report)
	for _, h := range x.holes {
		c.Skipped = append(c.Skipped, "not in the backup: "+h.String())
	}
	if err != nil {
		return c, x.clusterFailed("compare backup "+r.ID+" with the cluster", err)
	}
	return c, nil
}
