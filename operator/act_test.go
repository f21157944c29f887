package operator

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
)

// The kubelet and controllers change a new Node while the operator writes its old node's name to it.
func TestReplacementNodesAreAdoptedDespiteOtherWrites(t *testing.T) {
	c := newCluster(t)
	oldNode := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "donor", Labels: map[string]string{"team": "blue"}}}
	tainted := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "tainted"},
		Spec:       corev1.NodeSpec{Taints: []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}},
	}
	image := map[string]string{v1alpha1.AnnotationImage: image2}
	noted := func(oldNode string) map[string]string {
		m := maps.Clone(image)
		m[v1alpha1.AnnotationDonor] = oldNode
		return m
	}
	for name, tt := range map[string]struct {
		oldNode  *corev1.Node
		seen     map[string]string // annotations when it was seen
		change   func(*corev1.Node)
		conflict bool
		labels   map[string]string
		want     map[string]string // annotations
	}{
		"as it was observed":           {oldNode: oldNode, seen: image, labels: map[string]string{"team": "blue"}, want: noted("donor")},
		"of a deleted old node":        {seen: image, want: noted("donor")},
		"that was adopted":             {oldNode: oldNode, seen: noted("donor"), labels: map[string]string{"team": "blue"}, want: noted("donor")},
		"that claims another":          {oldNode: oldNode, seen: noted("other"), labels: map[string]string{"team": "blue"}, want: noted("donor")},
		"without annotations":          {oldNode: oldNode, labels: map[string]string{"team": "blue"}, want: map[string]string{v1alpha1.AnnotationDonor: "donor"}},
		"with a taint of its old node": {oldNode: tainted, seen: image, want: noted("donor")},
		"that has changed": {
			oldNode: oldNode, seen: image, change: func(n *corev1.Node) { n.Labels["beta"] = "yes" },
			labels: map[string]string{"team": "blue", "beta": "yes"}, want: noted("donor"),
		},
		"that was adopted by another old node": {
			oldNode: oldNode, seen: image, change: func(n *corev1.Node) { n.Annotations[v1alpha1.AnnotationDonor] = "other" },
			conflict: true, want: noted("other"),
		},
		"that was given a label": {
			oldNode: oldNode, seen: image, change: func(n *corev1.Node) { n.Labels["team"] = "red" },
			conflict: true, labels: map[string]string{"team": "red"}, want: image,
		},
	} {
		t.Run("a replacement node "+name, func(t *testing.T) {
			newNode := &corev1.Node{ObjectMeta: metav1.ObjectMeta{GenerateName: "heir-", Labels: map[string]string{"os": "linux"}, Annotations: tt.seen}}
			c.create(newNode)
			if tt.change != nil {
				changed := newNode.DeepCopy()
				tt.change(changed)
				if err := c.admin.Update(t.Context(), changed); err != nil {
					t.Fatal(err)
				}
			}
			r := &nodeVersions{client: c.admin, view: newView(c.admin, time.Now)}
			if _, err := r.adopt(t.Context(), newNode, tt.oldNode, "donor"); apierrors.IsConflict(err) != tt.conflict || err != nil && !tt.conflict {
				t.Errorf("adopted: %v", err)
			}
			var is corev1.Node
			if err := c.admin.Get(t.Context(), client.ObjectKeyFromObject(newNode), &is); err != nil {
				t.Fatal(err)
			}
			delete(is.Labels, "os")
			if !maps.Equal(is.Labels, tt.labels) || !maps.Equal(is.Annotations, tt.want) {
				t.Errorf("labels %v, annotations %v; want %v, %v", is.Labels, is.Annotations, tt.labels, tt.want)
			}
			gpu := false
			for _, taint := range is.Spec.Taints {
				gpu = gpu || taint.Key == "gpu"
			}
			if gpu != (tt.oldNode == tainted) {
				t.Errorf("taints %v", is.Spec.Taints)
			}
		})
	}
	r := &nodeVersions{client: c.admin, view: newView(c.admin, time.Now)}
	gone := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gone", UID: "1", Labels: map[string]string{"os": "linux"}, Annotations: image}}
	for _, n := range []*corev1.Node{nil, gone} {
		if did, err := r.adopt(t.Context(), n, oldNode, "donor"); did || err != nil {
			t.Errorf("a deleted replacement node: %t, %v", did, err)
		}
	}
}

// deletions is a cloud that accepts deletions and shows them late.
type deletions struct {
	cloudAPI
	is  []cloud.Instance
	err error
}

func (d *deletions) DeleteInstances(context.Context, []string) error { return d.err }

func (d *deletions) Describe(context.Context, []string) ([]cloud.Instance, error) { return d.is, nil }

func TestAcceptedDeletionIsNotRequestedAgainBeforeItIsVisible(t *testing.T) {
	now := time.Now()
	c := &deletions{is: []cloud.Instance{{ProviderID: "x://a", State: cloud.Ready}}}
	f := newFleet(c, func() time.Time { return now })
	f.known["x://a"] = seen{Instance: c.is[0], listed: true}
	step := func(what string, want bool) {
		t.Helper()
		if is := f.goes("x://a"); is != want {
			t.Errorf("%s: %t, want %t", what, is, want)
		}
	}
	remove := func(fails error) {
		t.Helper()
		c.err = fails
		if err := f.DeleteInstances(t.Context(), []string{"x://a"}); !errors.Is(err, fails) {
			t.Fatal(err)
		}
	}
	step("no request was sent", false)
	remove(cloud.ErrThrottled)
	step("the cloud refused", false)
	remove(nil)
	step("the cloud accepted", true)
	now = now.Add(time.Second)
	if err := f.follow(t.Context(), map[string]claim{"x://a": {leaves: true}}); err != nil {
		t.Fatal(err)
	}
	step("the cloud still lists the machine", false)
	remove(nil)
	step("the cloud accepted once more", true)
	now = now.Add(askedFor)
	step("the cloud returns no data", false)
}

// busyCloud changes its instances during a request, and answers with the state before.
type busyCloud struct {
	cloudAPI
	meanwhile func()
	follows   bool                      // it does so once when it is asked for IDs
	is        map[string]cloud.Instance // by ID
	hidden    map[string]bool           // IDs that are missing from lists
}

func (b *busyCloud) Instances(context.Context) ([]cloud.Instance, error) {
	var list []cloud.Instance
	for id, i := range b.is {
		if !b.hidden[id] {
			list = append(list, i)
		}
	}
	b.meanwhile()
	return list, nil
}

func (b *busyCloud) CreateInstances(_ context.Context, group string, tokens []string) ([]cloud.Instance, error) {
	i := cloud.Instance{ProviderID: "x://new", Token: tokens[0], Group: group, State: cloud.Creating}
	b.is[i.ProviderID] = i
	return []cloud.Instance{i}, nil
}

func (b *busyCloud) DeleteInstances(_ context.Context, ids []string) error {
	for _, id := range ids {
		delete(b.is, id)
	}
	return nil
}

func (b *busyCloud) Describe(_ context.Context, ids []string) ([]cloud.Instance, error) {
	var out []cloud.Instance
	defer func() {
		if during := b.meanwhile; b.follows {
			b.follows = false
			during()
		}
	}()
	for _, id := range ids {
		if i, ok := b.is[id]; ok {
			out = append(out, i)
		}
	}
	return out, nil
}

// lateAnswer lists an instance whose creation is answered before the list is.
type lateAnswer struct{ *busyCloud }

func (l lateAnswer) Instances(ctx context.Context) ([]cloud.Instance, error) {
	l.meanwhile()
	l.meanwhile = func() {}
	return l.busyCloud.Instances(ctx)
}

// TestMachineThatAListContainedIsGoneAtOnce: a machine that ends before it joins has its surge slot
// until it counts as gone. Only one that no list has ever contained may still appear.
func TestMachineThatAListContainedIsGoneAtOnce(t *testing.T) {
	for name, tt := range map[string]struct {
		hidden bool // from the list that overlaps the creation
		want   v1alpha1.InstanceState
	}{
		"the list contained it": {false, "Terminated"},
		"no list contained it":  {true, "Creating"},
	} {
		t.Run(name, func(t *testing.T) {
			b := &busyCloud{is: map[string]cloud.Instance{}, hidden: map[string]bool{"x://new": tt.hidden}}
			now := time.Now()
			f := newFleet(lateAnswer{b}, func() time.Time { now = now.Add(time.Millisecond); return now })
			b.meanwhile = func() {
				if _, err := f.CreateInstances(t.Context(), "g", []string{"t"}); err != nil {
					t.Fatal(err)
				}
			}
			intent := map[string]claim{"x://new": {}}
			if err := f.refresh(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			delete(b.is, "x://new")
			if err := f.refresh(t.Context(), intent); err != nil {
				t.Fatal(err)
			}
			if all, _, _, _ := f.view(); len(all) != 1 || all[0].State != tt.want {
				t.Errorf("the machine that the cloud no longer has is %+v, want %s", all, tt.want)
			}
		})
	}
}

func TestListMissesConcurrentChanges(t *testing.T) {
	type view struct {
		all      map[string]v1alpha1.InstanceState
		complete bool
	}
	made := func(ctx context.Context, f *fleet) error {
		_, err := f.CreateInstances(ctx, "g", []string{"t"})
		return err
	}
	ends := func(ctx context.Context, f *fleet) error {
		ids := []string{"x://old"}
		err := f.DeleteInstances(ctx, ids)
		if !f.confirmDeletion(ctx, ids) {
			return errors.New("the machine is still listed")
		}
		return err
	}
	for name, tt := range map[string]struct {
		follow bool // it is asked for by its ID, not listed
		hidden []string
		during func(context.Context, *fleet) error
		want   view
	}{
		"no change": {
			during: func(context.Context, *fleet) error { return nil },
			want:   view{map[string]v1alpha1.InstanceState{"x://old": "Ready"}, true},
		},
		"a machine is created, and the list is complete": {
			during: made,
			want:   view{map[string]v1alpha1.InstanceState{"x://old": "Ready", "x://new": "Creating"}, true},
		},
		"a machine is created, and another is missing from the list": {
			hidden: []string{"x://old"},
			during: made,
			want:   view{map[string]v1alpha1.InstanceState{"x://old": "Ready", "x://new": "Creating"}, false},
		},
		"a deleted machine does not come back": {
			during: ends,
			want:   view{map[string]v1alpha1.InstanceState{"x://old": "Terminated"}, true},
		},
		"a deleted machine that is requested by its ID does not come back": {
			follow: true,
			during: ends,
			want:   view{map[string]v1alpha1.InstanceState{"x://old": "Terminated"}, true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := &busyCloud{meanwhile: func() {}, is: map[string]cloud.Instance{"x://old": {ProviderID: "x://old", State: cloud.Ready}}, hidden: map[string]bool{}}
			f := newFleet(c, time.Now)
			about := map[string]claim{"x://old": {ready: true}}
			if err := f.refresh(t.Context(), about); err != nil {
				t.Fatal(err)
			}
			for _, id := range tt.hidden {
				c.hidden[id] = true
			}
			c.meanwhile = func() {
				if err := tt.during(t.Context(), f); err != nil {
					t.Error(err)
				}
			}
			var err error
			if c.follows = tt.follow; tt.follow {
				about["x://old"] = claim{leaves: true}
				err = f.follow(t.Context(), about)
			} else {
				err = f.refresh(t.Context(), about)
			}
			if err != nil {
				t.Fatal(err)
			}
			all, complete, _, _ := f.view()
			is := view{map[string]v1alpha1.InstanceState{}, complete}
			for _, i := range all {
				is.all[i.ID] = i.State
			}
			if !reflect.DeepEqual(is, tt.want) {
				t.Errorf("is %+v, want %+v", is, tt.want)
			}
		})
	}
}

func TestTaintOfARevokedNodeIsNotInherited(t *testing.T) {
	oldNode := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-1"}, Spec: corev1.NodeSpec{Taints: []corev1.Taint{
		{Key: v1alpha1.AnnotationRevoked, Effect: corev1.TaintEffectNoExecute}, {Key: "gpu", Effect: corev1.TaintEffectNoSchedule},
	}}}
	newNode := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-2"}}
	inherit(newNode, oldNode)
	if len(newNode.Spec.Taints) != 1 || newNode.Spec.Taints[0].Key != "gpu" {
		t.Errorf("replacement node has taints %v, want gpu alone", newNode.Spec.Taints)
	}
}

// pickyCloud describes no instance in a request that contains an ID that it cannot parse.
type pickyCloud struct {
	cloudAPI
	calls int
	err   error
}

func (p *pickyCloud) Describe(_ context.Context, ids []string) (found []cloud.Instance, _ error) {
	p.calls++
	if p.err != nil {
		return nil, p.err
	}
	for _, id := range ids {
		switch {
		case id == "bad":
			return nil, fmt.Errorf("parse provider ID %q", id)
		case strings.HasPrefix(id, "other://"):
			return nil, fmt.Errorf("instance %s: %w", id, cloud.ErrNotFound)
		case id != "x://gone":
			found = append(found, cloud.Instance{ProviderID: id, State: cloud.Ready})
		}
	}
	return found, nil
}

// A kubelet writes the provider ID of its Node. An ID that the cloud refuses must not hide the state
// of other machines.
func TestOneRefusedIDHidesNoOtherMachine(t *testing.T) {
	var ids []string
	for i := range 1000 {
		ids = append(ids, fmt.Sprintf("x://%d", i))
	}
	ids = append(ids, "x://gone", "bad", "other://a")
	c := &pickyCloud{}
	f := newFleet(c, time.Now)
	found, asked := f.describe(t.Context(), ids)
	if len(found) != 1000 || asked["bad"] || !asked["x://gone"] || !asked["other://a"] || len(asked) != 1002 {
		t.Errorf("%d found, %d answered, bad answered: %t", len(found), len(asked), asked["bad"])
	}
	if c.calls > 50 {
		t.Errorf("%d requests, want at most 50", c.calls)
	}
	c.calls, c.err = 0, fmt.Errorf("describe: %w", cloud.ErrThrottled)
	if found, asked := f.describe(t.Context(), ids); len(found)+len(asked) > 0 || c.calls != 1 {
		t.Errorf("a throttled request: %d found, %d answered, %d requests", len(found), len(asked), c.calls)
	}
	c.calls, c.err = 0, errors.New("every request is refused")
	if found, asked := f.describe(t.Context(), ids); len(found)+len(asked) > 0 || c.calls > maxRefusals+1 {
		t.Errorf("every request is refused: %d found, %d answered, %d requests", len(found), len(asked), c.calls)
	}
}
