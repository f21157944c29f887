package plans

import (
	"slices"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/operator/api/upgradev1"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/nodelock"
)

// sharing is a desk with a Plan that waits for the operator, which holds the node lock and has n0 cordoned.
func sharing(t *testing.T, change ...func(*upgradev1.Plan)) *desk {
	d := newDesk(t, planOf(append([]func(*upgradev1.Plan){func(p *upgradev1.Plan) {
		p.Spec.Constellation, p.Spec.Drain = &upgradev1.Rollout{Alone: true}, &upgradev1.DrainSpec{}
	}}, change...)...), 3)
	d.lock = nodelock.Replacements
	d.upgradesInPlace("n0")
	return d
}

// upgradesInPlace cordons a node as the operator does.
func (d *desk) upgradesInPlace(name string) {
	d.change(name, func(n *corev1.Node) {
		n.Labels[v1alpha1.LabelInPlace] = "true"
		n.Spec.Unschedulable = true
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, v1alpha1.AnnotationCordoned, d.now.Format(time.RFC3339))
	})
}

func (d *desk) lend(name, plan string) {
	d.change(name, func(n *corev1.Node) {
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, nodelock.AnnotationLent, nodelock.Note(plan, d.now))
	})
}

// waits returns the Plan that is noted as waiting for a node.
func (d *desk) waits(name string) string {
	plan, _ := nodelock.ParseNote(d.last[name].Annotations[nodelock.AnnotationWaits])
	return plan
}

const (
	sharingPlan = "system-upgrade/k3s-server"
	otherPlan   = "system-upgrade/other"
)

func TestPlanUpgradesNodeThatTheOperatorHasDrained(t *testing.T) {
	begin := func(t *testing.T, change ...func(*upgradev1.Plan)) *desk {
		d := sharing(t, change...)
		out := d.step()
		if w := out.status.Constellation.Waiting; w == nil || w.Message != "sharing the drains of node replacements, which holds the node lock" {
			t.Errorf("waiting %+v", w)
		}
		if len(out.creates) > 0 || d.waits("n0") != sharingPlan || d.waits("n1") != "" || !out.lock {
			t.Fatalf("%v started; n0 and n1 are noted for %q and %q; lock %t", creates(out), d.waits("n0"), d.waits("n1"), out.lock)
		}
		d.lend("n0", sharingPlan)
		if out := d.step(); !slices.Equal(creates(out), []string{"n0"}) || d.waits("n0") != sharingPlan {
			t.Fatalf("%v started; n0 is noted for %q", creates(out), d.waits("n0"))
		}
		return d
	}
	t.Run("it gives the node back when it is complete", func(t *testing.T) {
		d := begin(t)
		if out := d.step(); len(out.marks) > 0 {
			t.Fatalf("%d changes of Nodes while the Job runs", len(out.marks))
		}
		d.end("n0", batchv1.JobComplete)
		out := d.step()
		n := d.last["n0"]
		if d.waits("n0") != "" || n.Labels[upgradev1.LabelOfPlan("k3s-server")] != out.status.LatestHash || !n.Spec.Unschedulable || n.Annotations[annotationCordoned] != "" {
			t.Errorf("noted for %q, labels %v, unschedulable %t, cordoned for %q", d.waits("n0"), n.Labels, n.Spec.Unschedulable, n.Annotations[annotationCordoned])
		}
	})
	t.Run("a node on which it failed stays cordoned for the Plan", func(t *testing.T) {
		d := begin(t)
		d.end("n0", batchv1.JobFailed)
		d.step()
		if by := d.last["n0"].Annotations[annotationCordoned]; d.waits("n0") != "" || by != sharingPlan {
			t.Errorf("noted for %q, cordoned for %q", d.waits("n0"), by)
		}
		if out := d.step(); len(out.marks) > 0 || d.waits("n0") != "" {
			t.Errorf("%d more changes of Nodes, noted for %q", len(out.marks), d.waits("n0"))
		}
	})
	t.Run("it keeps the node while it retries", func(t *testing.T) {
		d := begin(t, func(p *upgradev1.Plan) { p.Spec.Constellation.Retries = 1 })
		d.end("n0", batchv1.JobFailed)
		if d.step(); d.waits("n0") != sharingPlan {
			t.Errorf("noted for %q", d.waits("n0"))
		}
	})
	t.Run("a paused Plan ends its Job first", func(t *testing.T) {
		d := begin(t)
		d.edit(func(p *upgradev1.Plan) { p.Spec.Constellation.State = upgradev1.Paused })
		if d.step(); d.waits("n0") != sharingPlan {
			t.Fatalf("noted for %q", d.waits("n0"))
		}
		d.end("n0", batchv1.JobComplete)
		if d.step(); d.waits("n0") != "" {
			t.Errorf("noted for %q", d.waits("n0"))
		}
	})
	t.Run("a cancelled Plan gives the node back", func(t *testing.T) {
		d := begin(t)
		d.edit(func(p *upgradev1.Plan) { p.Spec.Constellation.State = upgradev1.Cancelled })
		d.step()
		if d.step(); d.waits("n0") != "" {
			t.Errorf("noted for %q", d.waits("n0"))
		}
	})
	t.Run("it renews its note", func(t *testing.T) {
		d := begin(t)
		was := d.last["n0"].Annotations[nodelock.AnnotationWaits]
		out := d.step()
		if len(out.marks) > 0 || out.again.IsZero() || out.again.After(d.now.Add(nodelock.NoteRenewal)) {
			t.Fatalf("%d changes of Nodes, next round at %s", len(out.marks), out.again)
		}
		d.now = d.now.Add(nodelock.NoteRenewal)
		if d.step(); d.last["n0"].Annotations[nodelock.AnnotationWaits] == was {
			t.Error("the note was not renewed")
		}
	})
}

func TestPlanWaitsOnlyForNodesItMayUpgrade(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*upgradev1.Plan)
		edit   func(*desk)
		want   []string // noted nodes
	}{
		{name: "one that the operator has cordoned", want: []string{"n0"}},
		{name: "as many as its concurrency", edit: func(d *desk) { d.upgradesInPlace("n1"); d.upgradesInPlace("n2") }, change: func(p *upgradev1.Plan) { p.Spec.Concurrency = 2 }, want: []string{"n0", "n1"}},
		{name: "none without alone", change: func(p *upgradev1.Plan) { p.Spec.Constellation.Alone, p.Spec.Concurrency = false, 0 }},
		{name: "none while it is paused", change: func(p *upgradev1.Plan) { p.Spec.Constellation.State = upgradev1.Paused }},
		{name: "none while another Plan holds the lock", edit: func(d *desk) { d.lock = "plan " + otherPlan }},
		{name: "none that another Plan waits for", edit: func(d *desk) {
			d.change("n0", func(n *corev1.Node) {
				metav1.SetMetaDataAnnotation(&n.ObjectMeta, nodelock.AnnotationWaits, nodelock.Note(otherPlan, d.now))
			})
		}},
		{name: "none that it has upgraded", edit: func(d *desk) {
			hash := d.step().status.LatestHash
			d.change("n0", func(n *corev1.Node) { n.Labels[upgradev1.LabelOfPlan("k3s-server")] = hash })
		}},
		{name: "none that somebody else cordoned", edit: func(d *desk) {
			d.change("n0", func(n *corev1.Node) { delete(n.Annotations, v1alpha1.AnnotationCordoned) })
		}},
		{name: "none that the operator has released", edit: func(d *desk) {
			d.step()
			d.change("n0", func(n *corev1.Node) { n.Spec.Unschedulable = false })
		}},
		{name: "one with a note that is not valid", edit: func(d *desk) {
			d.change("n0", func(n *corev1.Node) { metav1.SetMetaDataAnnotation(&n.ObjectMeta, nodelock.AnnotationWaits, "x") })
		}, want: []string{"n0"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := sharing(t, func(p *upgradev1.Plan) {
				if tt.change != nil {
					tt.change(p)
				}
			})
			if tt.edit != nil {
				tt.edit(d)
			}
			if out := d.step(); len(out.creates) > 0 {
				t.Errorf("%v started", creates(out))
			}
			var got []string
			for _, name := range []string{"n0", "n1", "n2"} {
				if d.waits(name) == sharingPlan {
					got = append(got, name)
				}
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("noted %v, want %v", got, tt.want)
			}
		})
	}
}

// TestPlanIsNotLentWhatAnotherPlanUpgrades: a Job starts on a node only if the node is lent to its own Plan.
func TestPlanIsNotLentWhatAnotherPlanUpgrades(t *testing.T) {
	d := sharing(t)
	d.step()
	d.lend("n0", otherPlan)
	if out := d.step(); len(out.creates) > 0 {
		t.Errorf("%v started on a node that is lent to %s", creates(out), otherPlan)
	}
	// A node writes its own annotations: without the operator's cordon they mean nothing.
	d.change("n1", func(n *corev1.Node) {
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, nodelock.AnnotationLent, nodelock.Note(sharingPlan, d.now))
	})
	if out := d.step(); len(out.creates) > 0 {
		t.Errorf("%v started on a node that the operator has not drained", creates(out))
	}
}

func TestPlanGivesWayToTheOperatorBetweenTwoNodes(t *testing.T) {
	plan := func(p *upgradev1.Plan) { p.Spec.Constellation = &upgradev1.Rollout{Alone: true} }
	t.Run("not while a Job runs", func(t *testing.T) {
		d := newDesk(t, planOf(plan), 2)
		first := creates(d.step())
		d.awaited = true
		if out := d.step(); out.pass {
			t.Fatal("the lock is given away while a Job runs")
		}
		d.end(first[0], batchv1.JobComplete)
		out := d.step()
		if !out.pass || !out.lock || len(out.creates) > 0 {
			t.Errorf("pass %t, lock %t, %v started", out.pass, out.lock, creates(out))
		}
	})
	t.Run("also after a failure", func(t *testing.T) {
		d := newDesk(t, planOf(plan), 2)
		d.end(creates(d.step())[0], batchv1.JobFailed)
		d.awaited = true
		if out := d.step(); !out.pass {
			t.Error("a failed Plan keeps the lock")
		}
	})
	t.Run("not without alone", func(t *testing.T) {
		d := newDesk(t, planOf(), 2)
		d.awaited = true
		if out := d.step(); out.pass || len(out.creates) != 1 {
			t.Errorf("pass %t, %v started", out.pass, creates(out))
		}
	})
}
