package plans

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/operator/api/upgradev1"
)

// writers is the number of concurrent writes for one Plan.
const writers = 32

// act carries out a decision. Each part starts when the previous part is complete.
func (k *controller) act(ctx context.Context, v view, d decision) error {
	if err := all(d.marks, func(m mark) error { return k.mark(ctx, m) }); err != nil {
		return err
	}
	for _, m := range d.marks {
		if m.labels != nil && m.node.job != nil {
			k.book.credit(v.plan.Name, m.node.job.uid)
			k.Log.Info("node upgraded", "node", m.node.name, "plan", v.plan.Name, "version", v.version)
		}
	}
	if err := all(d.deletes, func(j *job) error { return k.deleteJob(ctx, j) }); err != nil {
		return err
	}
	p := v.plan
	if !apiequality.Semantic.DeepEqual(p.Status, d.status) {
		var err error
		if p, err = k.report(ctx, v.plan, d.status); err != nil {
			return err
		}
	}
	var mu sync.Mutex
	begun, refused := d.taken, 0
	err := all(d.creates, func(u upgraded) error {
		err := k.create(ctx, p, u, v)
		mu.Lock()
		defer mu.Unlock()
		if u.refused != "" {
			refused++
		}
		switch {
		case err != nil:
			begun = slices.DeleteFunc(begun, func(name string) bool { return name == u.name })
		case u.refused != "":
			begun = append(begun, u.name)
		}
		return err
	})
	// The other actions have events also if the API server refused a Job.
	if len(begun) > 0 {
		d.events = append(d.events, synced(v.version, v.hash, begun))
	}
	k.notify(ctx, p, d, len(v.plan.Status.Applying) == refused)
	for _, e := range d.events {
		k.events.note(p, e)
	}
	return err
}

// all calls f for each, a few at a time, and returns the first error.
func all[T any](list []T, f func(T) error) error {
	if len(list) == 0 {
		return nil
	}
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		first error
		slots = make(chan struct{}, writers)
	)
	for _, e := range list {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if err := f(e); err != nil {
				mu.Lock()
				defer mu.Unlock()
				if first == nil {
					first = err
				}
			}
		})
	}
	wg.Wait()
	return first
}

// effect runs an effect, before and after which tests may kill the process.
func (k *controller) effect(what string, do func() error) error {
	k.at("before:" + what)
	err := do()
	k.at("after:" + what)
	return err
}

// mark changes a Node, if it is still the same one. A Node that is gone is a success.
func (k *controller) mark(ctx context.Context, m mark) error {
	meta := map[string]any{"uid": m.node.uid}
	patch := map[string]any{"metadata": meta}
	if m.labels != nil {
		meta["labels"] = m.labels
	}
	notes := map[string]any{}
	for key, value := range m.notes() {
		if notes[key] = value; value == "" {
			notes[key] = nil
		}
	}
	if len(notes) > 0 {
		meta["annotations"] = notes
	}
	if m.uncordon {
		patch["spec"] = map[string]any{"unschedulable": nil}
	}
	body, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.node.name}}
	what := "cordon note"
	if m.labels != nil {
		what = "mark node"
	} else if m.uncordon {
		what = "uncordon"
	} else if m.waits != nil {
		what = "wait note"
	}
	err = k.effect(what, func() error {
		if k.noPatch.Load() {
			return k.update(ctx, n, m)
		}
		err := k.client.Patch(ctx, n, client.RawPatch(types.MergePatchType, body))
		if !apierrors.IsForbidden(err) {
			return err
		}
		if instead := k.update(ctx, n, m); !apierrors.IsForbidden(instead) {
			k.noPatch.Store(instead == nil)
			return instead
		}
		return err
	})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) && err != nil {
		return nil // another Node of that name, which arrives as an event
	}
	if err != nil {
		return fmt.Errorf("mark Node %s: %w", m.node.name, err)
	}
	if o, err := trimNode(n); err == nil {
		k.book.setNode(o.(*node), true)
	}
	return nil
}

// update makes the same change as mark, but with the right to update Nodes instead of patch. The role
// of system-upgrade-controller has only that.
func (k *controller) update(ctx context.Context, n *corev1.Node, m mark) error {
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if err := k.live.Get(ctx, client.ObjectKey{Name: m.node.name}, n); err != nil {
			return err
		}
		if string(n.UID) != m.node.uid {
			return apierrors.NewNotFound(corev1.Resource("nodes"), m.node.name)
		}
		for key, value := range m.labels {
			metav1.SetMetaDataLabel(&n.ObjectMeta, key, value)
		}
		for key, value := range m.notes() {
			if value == "" {
				delete(n.Annotations, key)
			} else {
				metav1.SetMetaDataAnnotation(&n.ObjectMeta, key, value)
			}
		}
		if m.uncordon {
			n.Spec.Unschedulable = false
		}
		return k.client.Update(ctx, n)
	})
}

// deleteJob deletes a Job, and its pods in the background.
func (k *controller) deleteJob(ctx context.Context, j *job) error {
	if j.deleting {
		return nil
	}
	err := k.effect("delete job", func() error {
		return k.client.Delete(ctx, &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: j.namespace, Name: j.name}},
			client.PropagationPolicy(metav1.DeletePropagationBackground), client.Preconditions{UID: &j.uid})
	})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete Job %s: %w", j.name, err)
	}
	return nil
}

// report writes the status, if the Plan is unchanged.
func (k *controller) report(ctx context.Context, p *upgradev1.Plan, s upgradev1.PlanStatus) (*upgradev1.Plan, error) {
	with := *p
	with.Status = s
	out := with.DeepCopy() // the client stores the answer in it
	if err := k.effect("write status", func() error { return k.client.Status().Update(ctx, out) }); err != nil {
		if apierrors.IsNotFound(err) {
			return p, nil
		}
		return nil, fmt.Errorf("write status of Plan %s: %w", p.Name, err)
	}
	out.ManagedFields = nil
	k.book.setPlan(out, true)
	return out, nil
}

// create creates the Job of a node that has a concurrency slot.
func (k *controller) create(ctx context.Context, p *upgradev1.Plan, u upgraded, v view) error {
	refuse := func(err error) {
		if k.book.refuse(p.Name, u.name, err.Error()) {
			k.queue.AddAfter(p.Name, soon) // to report it
		}
	}
	if (p.Spec.Drain != nil || p.Spec.Cordon) && !u.unschedulable && u.cordonedFor == "" {
		if err := k.mark(ctx, mark{node: u, cordonedFor: new(p.Namespace + "/" + p.Name)}); err != nil {
			refuse(err)
			return err
		}
	}
	j := makeJob(p, *u.node, k.Name, k.Settings, v.delay)
	err := k.effect("create job", func() error { return k.client.Create(ctx, j) })
	if apierrors.IsAlreadyExists(err) {
		return nil // an earlier attempt created it; the informer will deliver it
	}
	if err != nil {
		refuse(err)
		return fmt.Errorf("create Job %s: %w", j.Name, err)
	}
	k.book.refuse(p.Name, u.name, "")
	k.Log.Info("node begun", "node", u.name, "plan", p.Name, "version", v.version, "job", j.Name)
	if o, err := trimJob(j); err == nil {
		k.book.setJob(o.(*job), true)
	}
	return nil
}
