package preflight

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes/scheme"

	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/engine/words"
)

// changelogs has the changelog of every minor, with what it requires.
const changelogs = "https://github.com/kubernetes/kubernetes/tree/master/CHANGELOG"

var actionChecks = []checkItem{
	{
		id: "required-actions", title: "no action that the changelog of the hop requires is left to do", area: "versions", ref: changelogs, byData: true,
		needs: []source{sourceActions, sourcePods, sourceConfigs, sourceClaims, sourceVolumes}, run: actionsRequired,
	},
}

// unknownMinors are the minors of the hop without complete data, as "v1.38 and v1.39"; empty if
// there are none.
func (w *world) unknownMinors() string {
	unknown := lifecycle.UnknownMinors(w.request.From, w.request.To)
	if len(unknown) == 0 {
		return ""
	}
	var names []string
	for _, v := range unknown {
		names = append(names, v.MinorString())
	}
	return words.And(names)
}

// beyondData is the finding of a check that reads the data of minors, when the hop goes to minors
// without complete data; nil if there are none.
func (c checkItem) beyondData(w *world) []plan.Finding {
	minors := w.unknownMinors()
	if !c.byData || minors == "" {
		return nil
	}
	f := plan.Finding{
		Severity: plan.NotChecked, Title: fmt.Sprintf("not checked for %s whether %s", minors, c.title),
		Detail: "this program has no complete data on " + minors, Remedy: "read the changelog of " + minors,
	}
	if c.derived != nil {
		f.Detail += "; " + c.derived(w)
	}
	return []plan.Finding{f}
}

// derivedRemovals describes what removed APIs of minors without data are found by.
func derivedRemovals(w *world) string {
	s := "removals that the API servers or the types in this program announce are found"
	if newer := w.newerThanTypes(); len(newer) > 0 {
		s += "; served, and newer than the types: " + enumerate(newer, maxTold)
	}
	return s
}

// newerThanTypes returns the alpha and beta versions of built-in APIs that the cluster serves and
// that this program has no types of.
func (w *world) newerThanTypes() (out []string) {
	for _, gv := range w.served {
		builtIn := !strings.Contains(gv.Group, ".") || strings.HasSuffix(gv.Group, ".k8s.io")
		stable := !strings.ContainsAny(gv.Version, "ab") // v1, not v1alpha1 or v1beta1
		if !builtIn || stable || scheme.Scheme.IsVersionRegistered(gv) {
			continue
		}
		if slices.ContainsFunc(w.kinds, func(k kind) bool { return k.Spec.Group == gv.Group }) {
			continue
		}
		if slices.ContainsFunc(w.apiServices, func(s apiService) bool {
			return s.Spec.Service != nil && s.Spec.Group == gv.Group && s.Spec.Version == gv.Version
		}) {
			continue
		}
		out = append(out, gv.String())
	}
	slices.SortFunc(out, func(a, b string) int {
		ga, va, _ := strings.Cut(a, "/")
		gb, vb, _ := strings.Cut(b, "/")
		return cmp.Or(cmp.Compare(ga, gb), version.CompareKubeAwareVersionStrings(vb, va))
	})
	return out
}

// grant is a ClusterRole that grants a permission, with those who have it.
type grant struct {
	role     string
	subjects []string
}

// actionKey identifies what an action of the data looks for among objects.
type actionKey struct{ objects, containing string }

// actions reads what the actions of the hop's minors look for.
func (r *reader) actions(ctx context.Context) error {
	w := r.w
	w.grants, w.actionObjects, w.labelDrivers = map[string][]grant{}, map[actionKey][]string{}, map[string]bool{}
	for _, m := range w.minorsOfHop() {
		for _, a := range m.Actions {
			var err error
			switch {
			case a.Permission != "":
				w.grants[a.Permission], err = r.granting(ctx, a.Permission)
			case a.SharedSELinux:
				err = r.labelDrivers(ctx)
			case a.Objects != "":
				key := actionKey{a.Objects, a.Containing}
				w.actionObjects[key], err = r.objectsContaining(ctx, key)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// granting returns the bound ClusterRoles that name a resource of the core group. Those that
// every cluster has do not count.
func (r *reader) granting(ctx context.Context, resource string) (out []grant, err error) {
	roles := map[string]bool{}
	err = each(ctx, r.core.RbacV1().ClusterRoles().List, func(o *rbacv1.ClusterRole) {
		names := func(rule rbacv1.PolicyRule) bool {
			return slices.Contains(rule.APIGroups, corev1.GroupName) && slices.Contains(rule.Resources, resource)
		}
		if o.Labels["kubernetes.io/bootstrapping"] != "rbac-defaults" && slices.ContainsFunc(o.Rules, names) {
			roles[o.Name] = true
		}
	})
	if err != nil || len(roles) == 0 {
		return nil, err
	}
	subjects := map[string][]string{}
	err = each(ctx, r.core.RbacV1().ClusterRoleBindings().List, func(o *rbacv1.ClusterRoleBinding) {
		if o.RoleRef.Kind != "ClusterRole" || !roles[o.RoleRef.Name] {
			return
		}
		for _, s := range o.Subjects {
			subjects[o.RoleRef.Name] = append(subjects[o.RoleRef.Name], object(s.Kind, s.Namespace, s.Name))
		}
	})
	for _, role := range slices.Sorted(maps.Keys(subjects)) {
		out = append(out, grant{role, first(subjects[role])})
	}
	return out, err
}

// labelDrivers reads the CSI drivers that mount volumes with an SELinux label.
func (r *reader) labelDrivers(ctx context.Context) error {
	return each(ctx, r.core.StorageV1().CSIDrivers().List, func(o *storagev1.CSIDriver) {
		if deref(o.Spec.SELinuxMount) {
			r.w.labelDrivers[o.Name] = true
		}
	})
}

// objectsContaining lists the objects of a resource that contain a text, through the preferred
// version of its group. A resource that is not served has none.
func (r *reader) objectsContaining(ctx context.Context, key actionKey) (out []string, err error) {
	resource := schema.ParseGroupResource(key.objects)
	b, err := r.core.Discovery().RESTClient().Get().AbsPath("/apis/"+resource.Group).SetHeader("Accept", runtime.ContentTypeJSON).DoRaw(ctx)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var group metav1.APIGroup
	if err := json.Unmarshal(b, &group); err != nil {
		return nil, fmt.Errorf("%w: %w", errAnswer, err)
	}
	err = slimPages(ctx, r, "/apis/"+group.PreferredVersion.GroupVersion+"/"+resource.Resource, pageSize, func(o *json.RawMessage) {
		var of struct {
			Metadata metav1.ObjectMeta `json:"metadata"`
		}
		if strings.Contains(string(*o), key.containing) && json.Unmarshal(*o, &of) == nil {
			out = append(out, object(strings.TrimSuffix(resource.Resource, "s"), of.Metadata.Namespace, of.Metadata.Name))
		}
	})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return first(out), err
}

// actionsRequired finds the actions of the changelog that this cluster needs. Settings of kubelets
// are reported by changed-settings.
func actionsRequired(w *world, _ *probe) (out []plan.Finding) {
	for _, m := range w.minorsOfHop() {
		for _, a := range m.Actions {
			f := plan.Finding{Title: fmt.Sprintf("%s requires an action: %s", m.Kubernetes, a.Title), Remedy: a.Remedy, Reference: m.Sources[a.Source]}
			if !strings.HasPrefix(f.Reference, "https://") {
				f.Reference = "" // that of the check
			}
			switch {
			case a.Flag != "":
				f.Detail, f.Objects = w.withFlag(a.Component, a.Flag)
			case a.Permission != "":
				f.Detail, f.Objects = w.granted(a.Permission)
			case a.SharedSELinux:
				f.Detail, f.Objects = w.sharedWithOtherLabels()
			case a.Objects != "":
				if f.Objects = w.actionObjects[actionKey{a.Objects, a.Containing}]; len(f.Objects) > 0 {
					f.Detail = "in " + enumerate(f.Objects, maxTold)
				}
			case a.Undetected != "":
				f.Severity, f.Detail = plan.NotChecked, a.Undetected
			}
			if f.Detail != "" {
				out = append(out, f)
			}
		}
	}
	return out
}

// withFlag names the places where a component gets a flag.
func (w *world) withFlag(component, flag string) (detail string, objects []string) {
	var where []string
	for _, s := range w.flagSources() {
		has := func(f string) bool { name, _, _ := splitFlag(f); return name == flag }
		if s.component == component && slices.ContainsFunc(s.flags, has) {
			where, objects = append(where, s.where), append(objects, s.object)
		}
	}
	if len(where) == 0 {
		return "", nil
	}
	return fmt.Sprintf("--%s in %s", flag, enumerate(first(where), maxTold)), first(objects)
}

// granted names the roles that grant a permission, and who has them.
func (w *world) granted(permission string) (detail string, objects []string) {
	var parts []string
	for _, g := range w.grants[permission] {
		parts = append(parts, fmt.Sprintf("the ClusterRole %s grants %s to %s", printable(g.role), permission, enumerate(g.subjects, 5)))
		objects = append(objects, object("ClusterRole", "", g.role))
	}
	return strings.Join(parts[:min(len(parts), maxTold)], "; "), first(objects)
}

// sharedWithOtherLabels finds claims of drivers that mount with a label, if pods with different
// labels use them. A pod without options for SELinux has no label of its own.
func (w *world) sharedWithOtherLabels() (detail string, objects []string) {
	labels := map[types.NamespacedName]map[string]string{} // claim to label to pod
	for i := range w.pods {
		p := &w.pods[i]
		if p.over() {
			continue
		}
		for _, c := range p.claims {
			key := types.NamespacedName{Namespace: p.namespace, Name: c}
			if labels[key] == nil {
				labels[key] = map[string]string{}
			}
			if _, ok := labels[key][p.seLinux]; !ok {
				labels[key][p.seLinux] = p.name
			}
		}
	}
	var lines []string
	for key, by := range labels {
		claim, ok := w.claims[key]
		pv := w.volumes[claim.Spec.VolumeName]
		if len(by) < 2 || !ok || pv.Spec.CSI == nil || !w.labelDrivers[pv.Spec.CSI.Driver] {
			continue
		}
		lines = append(lines, fmt.Sprintf("%s of driver %s is used by %s", printable(key.String()), printable(pv.Spec.CSI.Driver), enumerate(slices.Sorted(maps.Values(by)), 3)))
		objects = append(objects, object("PersistentVolumeClaim", key.Namespace, key.Name))
	}
	slices.Sort(lines)
	return strings.Join(lines[:min(len(lines), maxTold)], "; "), first(objects)
}

// seLinuxLabel is the SELinux label with which volumes of a pod would be mounted; empty if it has
// none, or if its volumes are relabelled file by file as before.
func seLinuxLabel(p *corev1.Pod) string {
	describe := func(o *corev1.SELinuxOptions) string {
		if o == nil || *o == (corev1.SELinuxOptions{}) {
			return ""
		}
		return strings.Join([]string{o.User, o.Role, o.Type, o.Level}, ":")
	}
	label := ""
	if s := p.Spec.SecurityContext; s != nil {
		if deref(s.SELinuxChangePolicy) == corev1.SELinuxChangePolicyRecursive {
			return ""
		}
		label = describe(s.SELinuxOptions)
	}
	for i := range p.Spec.Containers {
		if s := p.Spec.Containers[i].SecurityContext; s != nil {
			label = cmp.Or(describe(s.SELinuxOptions), label)
		}
	}
	return label
}
