package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"strings"
	"time"

	"helm.sh/helm/v3/pkg/action"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chartutil"
	helmkube "helm.sh/helm/v3/pkg/kube"
	"helm.sh/helm/v3/pkg/release"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	"constellation/assets"
	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
)

// by ends the descriptions of revisions that this program rolled back.
const by = " by constellation"

// CompareChart implements [engine.Cluster].
//
// It renders the new manifest locally with the API server's capabilities. A server-side dry
// run would reject objects whose kinds come with the same upgrade.
func (c *Client) CompareChart(ctx context.Context, want cluster.Chart) (plan.ChartChange, error) {
	out := plan.ChartChange{Chart: want.Name, Namespace: want.Namespace, To: want.Version}
	ch, err := load(want)
	if err != nil {
		return out, fmt.Errorf("%w: %w", engine.ErrChart, err)
	}
	cfg, err := c.helm(want.Namespace)
	if err != nil {
		return out, err
	}
	var now *release.Release
	err = retry(ctx, func(context.Context) (err error) {
		now, err = deployed(cfg, want.Name)
		return err
	})
	if err != nil {
		return out, fmt.Errorf("read chart %s: %w", want.Name, err)
	}
	if now != nil && isJust(now, ch, want.Values) {
		out.From = now.Chart.Metadata.Version
		return out, nil
	}
	manifest, err := c.render(ctx, want)
	if err != nil || now == nil {
		return out, err
	}
	if now.Chart != nil && now.Chart.Metadata != nil {
		m := now.Chart.Metadata
		out.From = m.Version
		out.Content = out.From == out.To && m.Annotations[digestAnnotation] != ch.Metadata.Annotations[digestAnnotation]
		out.Defaults = len(engine.DiffValues(asStored(now.Chart.Values), asStored(ch.Values)))
	}
	out.Values = engine.DiffValues(asStored(now.Config), asStored(want.Values))
	out.ByHand = byHand(now)
	if want.Destructive != "" && out.From != out.To {
		out.Destroys = append(out.Destroys, want.Destructive)
	}
	err = c.destroyed(ctx, want, now.Manifest, manifest, &out)
	return out, err
}

// deployed returns the deployed revision; nil if there is none.
func deployed(cfg *action.Configuration, name string) (*release.Release, error) {
	r, err := cfg.Releases.Deployed(name)
	if absentRelease(err) {
		return nil, nil
	}
	return r, err
}

// byHand describes a revision that another program made; empty if this program made it.
func byHand(r *release.Release) string {
	ours := r.Chart != nil && r.Chart.Metadata != nil && r.Chart.Metadata.Annotations[digestAnnotation] != ""
	text := r.Info.Description
	if ours && (!strings.HasPrefix(text, "Rollback to ") || strings.HasSuffix(text, by)) {
		return ""
	}
	return fmt.Sprintf("revision %d of %s (%q)", r.Version, r.Info.LastDeployed.UTC().Format("2006-01-02 15:04 UTC"), text)
}

// render renders a chart's manifest.
func (c *Client) render(ctx context.Context, want cluster.Chart) (string, error) {
	ch, err := load(want) // rendering changes it
	if err != nil {
		return "", err
	}
	var have chartutil.VersionSet
	var version *chartutil.KubeVersion
	err = retry(ctx, func(context.Context) error {
		v, err := c.discovery.ServerVersion()
		if err != nil {
			return err
		}
		version = &chartutil.KubeVersion{Version: v.GitVersion, Major: v.Major, Minor: v.Minor}
		have, err = action.GetVersionSet(c.discovery)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read API server capabilities: %w", err)
	}
	kinds, err := kindsIn(want, ch)
	if err != nil {
		return "", fmt.Errorf("%w: %w", engine.ErrChart, err)
	}
	for _, k := range kinds {
		have = append(have, served(k)...)
	}
	i := action.NewInstall(&action.Configuration{Log: func(string, ...any) {}})
	i.ReleaseName, i.Namespace, i.DryRun, i.ClientOnly, i.IsUpgrade, i.SkipCRDs = want.Name, want.Namespace, true, true, true, true
	i.KubeVersion, i.APIVersions = version, have
	r, err := i.RunWithContext(ctx, ch, want.Values)
	if err != nil {
		return "", fmt.Errorf("%w: render chart %s: %w", engine.ErrChart, want.Name, err)
	}
	return r.Manifest, nil
}

// served are the versions of a kind as Helm's capabilities name them.
func served(kind assets.File) (out []string) {
	var crd struct {
		Spec struct {
			Group    string                  `json:"group"`
			Names    struct{ Kind string }   `json:"names"`
			Versions []struct{ Name string } `json:"versions"`
		} `json:"spec"`
	}
	if yaml.Unmarshal(kind.Data, &crd) != nil { // the error is reported when it is applied
		return nil
	}
	for _, v := range crd.Spec.Versions {
		gv := crd.Spec.Group + "/" + v.Name
		out = append(out, gv, gv+"/"+crd.Spec.Names.Kind)
	}
	return out
}

// kindsIn are the kinds in a chart's folder crds that come before the chart.
func kindsIn(want cluster.Chart, ch *chart.Chart) (out []assets.File, err error) {
	if !want.Foreign || want.SkipKinds {
		return nil, nil
	}
	for _, f := range ch.CRDObjects() {
		all, err := objectsOf(string(f.File.Data))
		if err != nil {
			return nil, fmt.Errorf("read %s of chart %s: %w", f.Name, want.Name, err)
		}
		for _, u := range all {
			b, err := json.Marshal(u)
			if err != nil {
				return nil, err
			}
			out = append(out, assets.File{Name: u.GetName(), Data: b})
		}
	}
	return out, nil
}

// objectsOf parses a manifest.
func objectsOf(manifest string) (out []*unstructured.Unstructured, err error) {
	d := yamlutil.NewYAMLOrJSONDecoder(strings.NewReader(manifest), 4096)
	for {
		u := &unstructured.Unstructured{}
		switch err := d.Decode(&u.Object); {
		case errors.Is(err, io.EOF):
			return out, nil
		case err != nil:
			return nil, err
		}
		if u.GetKind() != "" && u.GetName() != "" {
			out = append(out, u)
		}
	}
}

// piece is an object of a manifest with its client for the API server.
type piece struct {
	*unstructured.Unstructured
	at   dynamic.ResourceInterface
	name string // "StatefulSet shop/db"
}

// manifest maps the objects of a manifest by identity. It omits objects whose kind the cluster
// does not have, since none of them can exist.
func (c *Client) manifest(text, namespace string) (map[string]piece, []string, error) {
	all, err := objectsOf(text)
	if err != nil {
		return nil, nil, fmt.Errorf("read manifest: %w", err)
	}
	mapper, err := getter{c}.ToRESTMapper()
	if err != nil {
		return nil, nil, err
	}
	out := map[string]piece{}
	var order []string
	for _, u := range all {
		gvk := u.GroupVersionKind()
		m, err := mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
		if meta.IsNoMatchError(err) {
			continue
		}
		if err != nil {
			return nil, nil, fmt.Errorf("find kind %s: %w", gvk.Kind, err)
		}
		o := piece{u, c.dynamic.Resource(m.Resource), gvk.Kind + " " + u.GetName()}
		if m.Scope.Name() == meta.RESTScopeNameNamespace {
			if u.GetNamespace() == "" {
				u.SetNamespace(namespace)
			}
			o.at = c.dynamic.Resource(m.Resource).Namespace(u.GetNamespace())
			o.name = gvk.Kind + " " + u.GetNamespace() + "/" + u.GetName()
		}
		key := gvk.Group + " " + o.name
		out[key] = o
		order = append(order, key)
	}
	return out, order, nil
}

// lost describes the data loss when a chart no longer has an object of a kind.
var lost = map[schema.GroupKind]string{
	{Group: "apps", Kind: "StatefulSet"}:   "is deleted with its pods; its volumes stay",
	{Kind: "PersistentVolumeClaim"}:        "is deleted with its volume's data",
	{Kind: "PersistentVolume"}:             "is deleted with its data",
	{Kind: "Namespace"}:                    "is deleted with everything in it",
	{Group: kindsOfKinds.Group, Kind: crd}: "",
}

const crd = "CustomResourceDefinition"

// destroyed adds the objects that a change of manifests deletes.
func (c *Client) destroyed(ctx context.Context, want cluster.Chart, from, to string, out *plan.ChartChange) error {
	old, order, err := c.manifest(from, want.Namespace)
	if err != nil {
		return err
	}
	next, _, err := c.manifest(to, want.Namespace)
	if err != nil {
		return fmt.Errorf("%w: %w", engine.ErrChart, err)
	}
	add := func(o piece, text string) {
		out.Destroys = append(out.Destroys, o.name+" "+text)
		out.Objects = append(out.Objects, strings.ToLower(strings.Replace(o.name, " ", "/", 1)))
	}
	for _, key := range order {
		o := old[key]
		text, data := lost[o.GroupVersionKind().GroupKind()]
		if _, stays := next[key]; stays || !data {
			continue
		}
		live, err := get(ctx, o)
		if err != nil {
			return err
		}
		if live == nil || live.GetAnnotations()[helmkube.ResourcePolicyAnno] == helmkube.KeepPolicy {
			continue
		}
		if o.GetKind() == crd {
			n, err := c.countOf(ctx, live)
			if err != nil {
				return err
			}
			if n == 0 {
				continue
			}
			text = "is deleted together with 1 object of its kind"
			if n > 1 {
				text = fmt.Sprintf("is deleted together with %d objects of its kind", n)
			}
		}
		add(o, text)
	}
	fixed, err := c.immutable(ctx, want.Namespace, from, to)
	if err != nil {
		return err
	}
	for _, o := range fixed {
		text := "is deleted and recreated because it cannot be updated: " + o.why
		switch o.GetKind() {
		case "PersistentVolumeClaim", "PersistentVolume":
			text += "; its data is lost"
		case "StatefulSet":
			text += "; its pods stop in the meantime, its volumes stay"
		}
		add(o.piece, text)
	}
	return nil
}

// get returns an object of the API server; nil if it does not exist.
func get(ctx context.Context, o piece) (live *unstructured.Unstructured, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		live, err = o.at.Get(ctx, o.GetName(), metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			live, err = nil, nil
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", o.name, err)
	}
	return live, nil
}

// countOf counts the objects of a definition.
func (c *Client) countOf(ctx context.Context, kind *unstructured.Unstructured) (n int64, err error) {
	served := servedResources(kind)
	if len(served) == 0 {
		return 0, nil
	}
	err = retry(ctx, func(ctx context.Context) error {
		l, err := c.dynamic.Resource(served[0]).List(ctx, metav1.ListOptions{Limit: 1})
		if err != nil {
			return err
		}
		n = int64(len(l.Items))
		if l.GetRemainingItemCount() != nil {
			n += *l.GetRemainingItemCount()
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("count objects of %s: %w", kind.GetName(), err)
	}
	return n, nil
}

// fixed is an object that cannot be updated to its manifest.
type fixed struct {
	piece
	why string
}

// immutableRE matches the API server's messages about immutable fields.
var immutableRE = regexp.MustCompile(`immutable|[Ff]orbidden: updates to|may not (be )?change|cannot change|updates to \S+ are forbidden`)

// immutable returns the changed objects of the manifest to that the API server refuses to
// update. It finds out by a dry run.
func (c *Client) immutable(ctx context.Context, namespace, from, to string) (out []fixed, err error) {
	old, _, err := c.manifest(from, namespace)
	if err != nil {
		return nil, err
	}
	next, order, err := c.manifest(to, namespace)
	if err != nil {
		return nil, err
	}
	for _, key := range order {
		o, was := next[key], old[key]
		if was.Unstructured == nil || reflect.DeepEqual(was.Object, o.Object) {
			continue
		}
		b, err := json.Marshal(o)
		if err != nil {
			return nil, err
		}
		var refused error
		err = retry(ctx, func(ctx context.Context) error {
			if _, err := o.at.Get(ctx, o.GetName(), metav1.GetOptions{}); err != nil { // a patch would create it
				return client404(err)
			}
			_, err := o.at.Patch(ctx, o.GetName(), types.ApplyPatchType, b, metav1.PatchOptions{FieldManager: fieldManager, Force: new(true), DryRun: []string{metav1.DryRunAll}})
			refused = nil
			if apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsBadRequest(err) || apierrors.IsConflict(err) {
				refused, err = err, nil
			}
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("dry-run update of %s: %w", o.name, err)
		}
		if refused == nil || !immutableRE.MatchString(refused.Error()) {
			continue
		}
		why := "the API server reports an immutable field"
		var s apierrors.APIStatus
		if errors.As(refused, &s) && s.Status().Details != nil {
			var fields []string
			for _, x := range s.Status().Details.Causes {
				fields = append(fields, x.Field)
			}
			if len(fields) > 0 {
				why = strings.Join(fields, ", ") + " is immutable"
			}
		}
		out = append(out, fixed{o, why})
	}
	return out, nil
}

// client404 ignores NotFound errors.
func client404(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// clear deletes objects that cannot be updated to the manifest to, and waits until they are
// gone.
func (c *Client) clear(ctx context.Context, namespace, from, to string) error {
	all, err := c.immutable(ctx, namespace, from, to)
	if err != nil {
		return err
	}
	for _, o := range all {
		c.log.Warn("immutable object deleted, will be recreated", "object", o.name, "why", o.why)
		err := retry(ctx, func(ctx context.Context) error {
			return client404(o.at.Delete(ctx, o.GetName(), metav1.DeleteOptions{PropagationPolicy: new(metav1.DeletePropagationForeground)}))
		})
		if err != nil {
			return fmt.Errorf("delete %s: %w", o.name, err)
		}
	}
	for _, o := range all {
		for {
			live, err := get(ctx, o.piece)
			if err != nil {
				return err
			}
			if live == nil {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("wait for deletion of %s: %w", o.name, ctx.Err())
			case <-time.After(readyPoll):
			}
		}
	}
	return nil
}

// chartSet is the name of the ConfigMap with the revisions of all charts before the current
// set began.
const chartSet = "constellation-chart-set"

// ChartSet implements [engine.Cluster].
func (c *Client) ChartSet(ctx context.Context) (before map[string]int, err error) {
	var m *corev1.ConfigMap
	err = retry(ctx, func(ctx context.Context) (err error) {
		m, err = c.core.CoreV1().ConfigMaps(Namespace).Get(ctx, chartSet, metav1.GetOptions{})
		return err
	})
	if errors.Is(err, cluster.ErrAbsent) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal([]byte(m.Data["before"]), &before)
	}
	if err != nil {
		return nil, fmt.Errorf("read ConfigMap %s: %w", chartSet, err)
	}
	return before, nil
}

// SetChartSet implements [engine.Cluster].
func (c *Client) SetChartSet(ctx context.Context, before map[string]int) error {
	maps := c.core.CoreV1().ConfigMaps(Namespace)
	if before == nil {
		err := retry(ctx, func(ctx context.Context) error { return client404(maps.Delete(ctx, chartSet, metav1.DeleteOptions{})) })
		if err != nil {
			return fmt.Errorf("delete ConfigMap %s: %w", chartSet, err)
		}
		return nil
	}
	b, err := json.Marshal(before)
	if err != nil {
		return err
	}
	if err := c.ownNamespace(ctx); err != nil {
		return err
	}
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: chartSet, Labels: map[string]string{partOfLabel: partOf}}, Data: map[string]string{"before": string(b)}}
	err = retry(ctx, func(ctx context.Context) error {
		_, err := maps.Create(ctx, m, metav1.CreateOptions{FieldManager: fieldManager})
		if apierrors.IsAlreadyExists(err) {
			_, err = maps.Update(ctx, m, metav1.UpdateOptions{FieldManager: fieldManager})
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("write ConfigMap %s: %w", chartSet, err)
	}
	return nil
}
