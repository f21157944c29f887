package kube

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/yaml"

	"constellation/engine"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cluster"
	"constellation/engine/version"
	"constellation/internal/delay"
	"constellation/operator/api/v1alpha1"
)

var (
	_ engine.Adopter  = (*Client)(nil)
	_ engine.Enroller = (*Client)(nil)
)

const (
	// agentSetup is the DaemonSet that installs or removes agents, and the ConfigMap with their keys.
	agentSetup = "constellation-agent-setup"
	// annotationAgent on a Node of an adopted cluster is the release of its agent and a digest of its keys.
	annotationAgent = "constellation.edgeless.systems/agent"
	setupPoll       = 500 * time.Millisecond
	// setupRetries is how often the pod of a machine may fail until its reason counts.
	setupRetries = 3
)

// inventoryJSON is the content of the ConfigMap.
func inventoryJSON(i machines.Inventory) (string, error) {
	b, err := json.Marshal(i)
	return string(b), err
}

// Versions implements [engine.Adopter].
func (c *Client) Versions(ctx context.Context) ([]string, error) {
	var out []string
	err := retry(ctx, func(ctx context.Context) error {
		m, err := c.core.CoreV1().ConfigMaps(systemNamespace).Get(ctx, kubeadmConfigName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var config struct {
			KubernetesVersion string `json:"kubernetesVersion"`
		}
		if err := yaml.Unmarshal([]byte(m.Data[keyClusterConfig]), &config); err != nil {
			return fmt.Errorf("read ConfigMap %s: %w", kubeadmConfigName, err)
		}
		pods, err := c.core.CoreV1().Pods(systemNamespace).List(ctx, metav1.ListOptions{LabelSelector: "component=kube-apiserver,tier=control-plane"})
		if err != nil {
			return err
		}
		out = out[:0]
		add := func(text string) { // a tag of the owner need not be a version
			if v, err := version.Parse(strings.ReplaceAll(text, "_", "+")); err == nil {
				out = append(out, v.String())
			}
		}
		add(config.KubernetesVersion)
		for i := range pods.Items {
			for _, x := range pods.Items[i].Spec.Containers {
				if _, tag, ok := strings.Cut(x.Image[strings.LastIndexByte(x.Image, '/')+1:], ":"); ok && x.Name == "kube-apiserver" {
					tag, _, _ = strings.Cut(tag, "@")
					add(tag)
				}
			}
		}
		return nil
	})
	slices.Sort(out)
	return slices.Compact(out), classify(err)
}

// HasInventory implements [engine.Adopter].
func (c *Client) HasInventory(ctx context.Context, i machines.Inventory) (bool, error) {
	want, err := inventoryJSON(i)
	if err != nil {
		return false, err
	}
	if has, err := c.hasInventory(ctx, want); err != nil || !has {
		return false, err
	}
	for _, e := range i.Machines {
		n, err := c.core.CoreV1().Nodes().Get(ctx, e.Name, metav1.GetOptions{})
		if err != nil {
			return false, classify(err)
		}
		if n.Spec.ProviderID != e.ProviderID {
			return false, nil
		}
	}
	return true, nil
}

// hasInventory reports whether the ConfigMap has this content.
func (c *Client) hasInventory(ctx context.Context, text string) (bool, error) {
	m, err := c.core.CoreV1().ConfigMaps(Namespace).Get(ctx, machines.InventoryConfigMap, metav1.GetOptions{})
	if err != nil {
		return false, classify(err)
	}
	return m.Data[machines.InventoryKey] == text, nil
}

// UpgradesPackages reports whether the list of machines in the cluster has upgrades in place upgrade packages.
func (c *Client) UpgradesPackages(ctx context.Context) (bool, error) {
	m, err := c.core.CoreV1().ConfigMaps(Namespace).Get(ctx, machines.InventoryConfigMap, metav1.GetOptions{})
	if err != nil {
		return false, fmt.Errorf("read ConfigMap %s: %w", machines.InventoryConfigMap, classify(err))
	}
	i, err := machines.ParseInventory([]byte(m.Data[machines.InventoryKey]))
	return i.Packages == machines.PackagesUpgrade, err
}

// setInventory writes the ConfigMap. The namespace is there.
func (c *Client) setInventory(ctx context.Context, i machines.Inventory) error {
	text, err := inventoryJSON(i)
	if err != nil {
		return err
	}
	m := applycorev1.ConfigMap(machines.InventoryConfigMap, Namespace).WithData(map[string]string{machines.InventoryKey: text})
	if _, err := c.core.CoreV1().ConfigMaps(Namespace).Apply(ctx, m, metav1.ApplyOptions{FieldManager: fieldManager, Force: true}); err != nil {
		return fmt.Errorf("write ConfigMap %s: %w", machines.InventoryConfigMap, classify(err))
	}
	return nil
}

// PublishesInventory implements [engine.Enroller].
func (c *Client) PublishesInventory(ctx context.Context, i machines.Inventory) (bool, error) {
	want, err := inventoryJSON(i)
	if err != nil {
		return false, err
	}
	for name := range new(machines.Records).ByConfigMap() {
		if _, err := c.core.CoreV1().ConfigMaps(Namespace).Get(ctx, name, metav1.GetOptions{}); err != nil {
			return false, classify(err)
		}
	}
	return c.hasInventory(ctx, want)
}

// MachineRecords implements [engine.Enroller].
func (c *Client) MachineRecords(ctx context.Context) (r machines.Records, err error) {
	for name, to := range r.ByConfigMap() {
		m, err := c.core.CoreV1().ConfigMaps(Namespace).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return machines.Records{}, fmt.Errorf("read ConfigMap %s: %w", name, classify(err))
		}
		*to = m.Data
	}
	return r, nil
}

// PublishInventory implements [engine.Enroller].
func (c *Client) PublishInventory(ctx context.Context, i machines.Inventory) error {
	if err := c.ownNamespace(ctx); err != nil {
		return classify(err)
	}
	for name := range new(machines.Records).ByConfigMap() {
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: Namespace}}
		if _, err := c.core.CoreV1().ConfigMaps(Namespace).Create(ctx, m, metav1.CreateOptions{FieldManager: fieldManager}); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create ConfigMap %s: %w", name, classify(err))
		}
	}
	return c.setInventory(ctx, i)
}

// SetInventory implements [engine.Adopter].
func (c *Client) SetInventory(ctx context.Context, i machines.Inventory) error {
	if err := c.ownNamespace(ctx); err != nil {
		return classify(err)
	}
	for _, e := range i.Machines {
		var n *corev1.Node
		err := retry(ctx, func(ctx context.Context) (err error) {
			n, err = c.core.CoreV1().Nodes().Get(ctx, e.Name, metav1.GetOptions{})
			return err
		})
		switch {
		case err != nil:
			return fmt.Errorf("read node %s: %w", e.Name, err)
		case n.Spec.ProviderID == e.ProviderID:
			continue
		case n.Spec.ProviderID != "":
			return fmt.Errorf("node %s has the provider ID %s, and the configuration %s: write the former there as providerID of the machine", e.Name, n.Spec.ProviderID, e.ProviderID)
		}
		if err := c.patchNode(ctx, e.Name, "spec", map[string]any{"providerID": e.ProviderID}); err != nil {
			return err
		}
	}
	return c.setInventory(ctx, i)
}

// agentMark is the annotation of a Node with this agent.
func agentMark(release string, keys []byte) string {
	sum := sha256.Sum256(keys)
	return release + " sha256:" + hex.EncodeToString(sum[:])
}

// LackAgents implements [engine.Adopter].
func (c *Client) LackAgents(ctx context.Context, release string, keys []byte) (lack []string, err error) {
	l, err := c.core.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, classify(err)
	}
	for i := range l.Items {
		if l.Items[i].Annotations[annotationAgent] != agentMark(release, keys) {
			lack = append(lack, l.Items[i].Name)
		}
	}
	return lack, nil
}

// InstallAgents implements [engine.Adopter].
func (c *Client) InstallAgents(ctx context.Context, image, release string, keys []byte, secrets []string, report func(text string, ready, wanted int64)) error {
	m := applycorev1.ConfigMap(agentSetup, Namespace).WithData(map[string]string{"release-keys.pem": string(keys)})
	if _, err := c.core.CoreV1().ConfigMaps(Namespace).Apply(ctx, m, metav1.ApplyOptions{FieldManager: fieldManager, Force: true}); err != nil {
		return fmt.Errorf("write ConfigMap %s: %w", agentSetup, classify(err))
	}
	if _, err := c.onEachMachine(ctx, []string{"install", "-root", "/host", "-keys", "/keys/release-keys.pem"}, image, secrets, report); err != nil {
		return err
	}
	return c.annotateNodes(ctx, annotationAgent, agentMark(release, keys))
}

// RemoveAgents implements [engine.Adopter].
func (c *Client) RemoveAgents(ctx context.Context, image string, secrets []string, report func(text string, ready, wanted int64)) (map[string]string, error) {
	messages, err := c.onEachMachine(ctx, []string{"remove", "-root", "/host", "-result", "/dev/termination-log"}, image, secrets, report)
	if err != nil {
		return nil, err
	}
	left := map[string]string{}
	for node, text := range messages {
		var r struct {
			Kept map[string]string `json:"kept"`
		}
		if json.Unmarshal([]byte(text), &r) == nil && len(r.Kept) > 0 {
			left[node] = strings.Join(slices.Sorted(maps.Keys(r.Kept)), ", ")
		}
	}
	return left, nil
}

// onEachMachine executes the agent with arguments on each machine, by a DaemonSet that is removed again, and
// returns the last messages of its containers, by node.
func (c *Client) onEachMachine(ctx context.Context, args []string, image string, secrets []string, report func(text string, ready, wanted int64)) (map[string]string, error) {
	sets := c.core.AppsV1().DaemonSets(Namespace)
	remove := func(ctx context.Context) error {
		err := sets.Delete(ctx, agentSetup, metav1.DeleteOptions{PropagationPolicy: new(metav1.DeletePropagationForeground)})
		for err == nil {
			if _, err = sets.Get(ctx, agentSetup, metav1.GetOptions{}); err == nil && !delay.For(ctx, setupPoll) {
				err = context.Cause(ctx)
			}
		}
		if apierrors.IsNotFound(err) {
			return nil
		}
		return classify(err)
	}
	if err := c.ownNamespace(ctx); err != nil { // an undo may find none
		return nil, classify(err)
	}
	if err := remove(ctx); err != nil { // that of a run that was cut off
		return nil, err
	}
	if _, err := sets.Create(ctx, agentDaemonSet(args, image, secrets), metav1.CreateOptions{FieldManager: fieldManager}); err != nil {
		return nil, fmt.Errorf("create DaemonSet %s: %w", agentSetup, classify(err))
	}
	messages, err := c.awaitSetup(ctx, report)
	// It is removed in any case, also after an interruption.
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	return messages, errors.Join(err, remove(late))
}

// awaitSetup waits until the container of each machine has done its work. If ctx expires, the error names the
// machines that have not.
func (c *Client) awaitSetup(ctx context.Context, report func(text string, ready, wanted int64)) (map[string]string, error) {
	left := "no pod has started"
	for {
		set, pods, err := c.setupPods(ctx)
		if err == nil { // else a short outage of the API server
			messages, waits := map[string]string{}, map[string]string{}
			for i := range pods {
				if err := judgeSetup(&pods[i], messages, waits); err != nil {
					return nil, err
				}
			}
			left = strings.Join(slices.Sorted(maps.Values(waits)), ", ")
			wanted := int64(set.Status.DesiredNumberScheduled)
			report(left, int64(len(messages)), wanted)
			if set.Status.ObservedGeneration == set.Generation && wanted > 0 && int64(len(messages)) == wanted {
				return messages, nil
			}
		}
		if delay.For(ctx, setupPoll) {
			continue
		}
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return nil, fmt.Errorf("not done in time: %s; repair these machines, or delete their Nodes", left)
		}
		return nil, context.Cause(ctx)
	}
}

// setupPods returns the DaemonSet of agents and its pods.
func (c *Client) setupPods(ctx context.Context) (*appsv1.DaemonSet, []corev1.Pod, error) {
	set, err := c.core.AppsV1().DaemonSets(Namespace).Get(ctx, agentSetup, metav1.GetOptions{})
	if err != nil {
		return nil, nil, err
	}
	l, err := c.core.CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=" + agentSetup})
	if err != nil {
		return nil, nil, err
	}
	return set, l.Items, nil
}

// judgeSetup adds the result of a pod to messages, or what it waits for to waits, both by node. It returns the reason
// of a machine that refuses.
func judgeSetup(p *corev1.Pod, messages, waits map[string]string) error {
	node := p.Spec.NodeName
	waits[node] = cmp.Or(node, p.Name)
	for _, s := range p.Status.InitContainerStatuses {
		switch {
		case s.State.Terminated != nil && s.State.Terminated.ExitCode == 0:
			messages[node] = s.State.Terminated.Message
			delete(waits, node)
		case s.LastTerminationState.Terminated != nil && s.RestartCount >= setupRetries:
			return fmt.Errorf("machine %s: %s", node, strings.TrimSpace(s.LastTerminationState.Terminated.Message))
		case s.State.Waiting != nil && s.State.Waiting.Message != "":
			waits[node] = node + ": " + s.State.Waiting.Message
		}
	}
	return nil
}

// agentDaemonSet executes the agent once on each machine, with the machine's file system at /host.
func agentDaemonSet(args []string, image string, secrets []string) *appsv1.DaemonSet {
	labels := map[string]string{"app.kubernetes.io/name": agentSetup, "app.kubernetes.io/part-of": "constellation"}
	pulls := make([]corev1.LocalObjectReference, len(secrets))
	for i, s := range secrets {
		pulls[i].Name = s
	}
	return &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: agentSetup, Namespace: Namespace, Labels: labels},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					// systemd answers callers of its own process namespace only.
					HostPID: true, HostNetwork: true, DNSPolicy: corev1.DNSDefault, ImagePullSecrets: pulls,
					AutomountServiceAccountToken: new(false), EnableServiceLinks: new(false),
					PriorityClassName: "system-node-critical", TerminationGracePeriodSeconds: new(int64(1)),
					Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
					InitContainers: []corev1.Container{{
						Name: "setup", Image: image, Args: args,
						TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
						SecurityContext:          &corev1.SecurityContext{Privileged: new(true), RunAsUser: new(int64(0)), RunAsGroup: new(int64(0))},
						VolumeMounts:             []corev1.VolumeMount{{Name: "host", MountPath: "/host"}, {Name: "keys", MountPath: "/keys", ReadOnly: true}},
					}},
					// A DaemonSet starts pods that end again. This one stays until the DaemonSet goes.
					Containers: []corev1.Container{{
						Name: "done", Image: image, Args: []string{"wait"},
						SecurityContext: &corev1.SecurityContext{
							AllowPrivilegeEscalation: new(false), ReadOnlyRootFilesystem: new(true), RunAsNonRoot: new(true), RunAsUser: new(int64(65532)),
							Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}, SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
						},
					}},
					Volumes: []corev1.Volume{
						{Name: "host", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/", Type: new(corev1.HostPathDirectory)}}},
						{Name: "keys", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: agentSetup}, Optional: new(true)}}},
					},
				},
			},
		},
	}
}

// annotateNodes writes an annotation of all Nodes.
func (c *Client) annotateNodes(ctx context.Context, key, value string) error {
	l, err := c.core.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return classify(err)
	}
	for i := range l.Items {
		if err := c.patchNode(ctx, l.Items[i].Name, "metadata", map[string]any{"annotations": map[string]any{key: value}}); err != nil {
			return err
		}
	}
	return nil
}

// patchNode merges values into one field of a Node. A nil value removes its key.
func (c *Client) patchNode(ctx context.Context, name, field string, values map[string]any) error {
	b, err := json.Marshal(map[string]any{field: values})
	if err != nil {
		return err
	}
	err = retry(ctx, func(ctx context.Context) error {
		_, err := c.core.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, b, metav1.PatchOptions{FieldManager: fieldManager})
		return err
	})
	if err != nil {
		return fmt.Errorf("change node %s: %w", name, err)
	}
	return nil
}

// groupObject is the ScalingGroup of a role in an adopted cluster.
func groupObject(g cloud.Group) *unstructured.Unstructured {
	role := v1alpha1.WorkerRole
	if g.Role == cloud.ControlPlane {
		role = v1alpha1.ControlPlaneRole
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": v1alpha1.GroupVersion.String(), "kind": "ScalingGroup",
		"metadata": map[string]any{"name": g.Name},
		"spec": map[string]any{
			"nodeImage": v1alpha1.NodeVersionName, "groupId": g.ID, "nodeGroupName": g.Name, "min": int64(1), "max": int64(10), "role": string(role), "strategy": string(v1alpha1.InPlaceStrategy),
		},
	}}
}

// HasGroups implements [engine.Adopter].
func (c *Client) HasGroups(ctx context.Context, i machines.Inventory) (bool, error) {
	if in, err := c.GroupsInPlace(ctx, i); err != nil || !in {
		return false, err
	}
	l, err := c.core.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return false, classify(err)
	}
	return !slices.ContainsFunc(l.Items, func(n corev1.Node) bool { return n.Annotations[v1alpha1.AnnotationComponents] == "" }), nil
}

// GroupsInPlace implements [engine.Enroller].
func (c *Client) GroupsInPlace(ctx context.Context, i machines.Inventory) (bool, error) {
	for _, g := range i.Groups() {
		o, err := c.dynamic.Resource(resourceOf("scalinggroups")).Get(ctx, g.Name, metav1.GetOptions{})
		if err != nil {
			return false, classify(err)
		}
		if s, _, _ := unstructured.NestedString(o.Object, "spec", "strategy"); s != string(v1alpha1.InPlaceStrategy) {
			return false, nil
		}
	}
	return true, nil
}

// SetGroupsInPlace implements [engine.Enroller].
func (c *Client) SetGroupsInPlace(ctx context.Context, i machines.Inventory) error {
	for _, g := range i.Groups() {
		b, err := groupObject(g).MarshalJSON()
		if err != nil {
			return err
		}
		err = retry(ctx, func(ctx context.Context) error {
			_, err := c.dynamic.Resource(resourceOf("scalinggroups")).Patch(ctx, g.Name, types.ApplyPatchType, b, metav1.PatchOptions{FieldManager: fieldManager, Force: new(true)})
			return err
		})
		if err != nil {
			return fmt.Errorf("write ScalingGroup %s: %w", g.Name, err)
		}
	}
	return nil
}

// SetGroups implements [engine.Adopter].
func (c *Client) SetGroups(ctx context.Context, i machines.Inventory, components string) error {
	if err := c.SetGroupsInPlace(ctx, i); err != nil {
		return err
	}
	group := map[string]string{}
	for _, m := range i.Machines {
		group[m.Name] = machines.GroupID(i.Cluster, m.Group)
	}
	l, err := c.core.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return classify(err)
	}
	for k := range l.Items {
		n := &l.Items[k]
		if n.Annotations[v1alpha1.AnnotationComponents] != "" || group[n.Name] == "" {
			continue
		}
		marks := map[string]any{v1alpha1.AnnotationComponents: components, v1alpha1.AnnotationGroup: group[n.Name]}
		if err := c.patchNode(ctx, n.Name, "metadata", map[string]any{"annotations": marks}); err != nil {
			return err
		}
	}
	return nil
}

// kindsOfOurs are the resources of our kinds, in the order in which their objects are deleted.
var kindsOfOurs = []string{"nodeversions", "pendingnodes", "joiningnodes", "scalinggroups", "autoscalingstrategies"}

// RemoveTarget implements [engine.Adopter].
func (c *Client) RemoveTarget(ctx context.Context) error {
	pending, err := c.dynamic.Resource(resourceOf("pendingnodes")).List(ctx, metav1.ListOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return classify(err)
	}
	if pending != nil && len(pending.Items) > 0 {
		name, _, _ := unstructured.NestedString(pending.Items[0].Object, "spec", "nodeName")
		return fmt.Errorf("node %s is being upgraded: wait for its end, or end the rollout with `constellation upgrade cancel`", name)
	}
	return c.deleteAll(ctx, kindsOfOurs[0])
}

// deleteAll deletes all objects of a kind of ours, which may be gone.
func (c *Client) deleteAll(ctx context.Context, kind string) error {
	err := retry(ctx, func(ctx context.Context) error {
		return c.dynamic.Resource(resourceOf(kind)).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
	})
	if err != nil && !errors.Is(err, cluster.ErrAbsent) && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete %s: %w", kind, err)
	}
	return nil
}

// removePlans removes the namespace and the kind of Plans, unless there is a Plan or somebody else made the
// namespace.
func (c *Client) removePlans(ctx context.Context, gone func(error) error) error {
	n, err := c.core.CoreV1().Namespaces().Get(ctx, engine.PlansNamespace, metav1.GetOptions{})
	if err != nil || n.Labels["app.kubernetes.io/part-of"] != "constellation" {
		return gone(err)
	}
	l, err := c.dynamic.Resource(plans).List(ctx, metav1.ListOptions{Limit: 1})
	if err == nil && len(l.Items) > 0 {
		return nil
	}
	if gone(err) != nil {
		return classify(err)
	}
	if err := gone(c.core.CoreV1().Namespaces().Delete(ctx, engine.PlansNamespace, metav1.DeleteOptions{})); err != nil {
		return fmt.Errorf("delete namespace %s: %w", engine.PlansNamespace, err)
	}
	if err := gone(c.dynamic.Resource(kindsOfKinds).Delete(ctx, "plans.upgrade.cattle.io", metav1.DeleteOptions{})); err != nil {
		return fmt.Errorf("delete the kind of Plans: %w", err)
	}
	return nil
}

// RemoveData implements [engine.Adopter].
func (c *Client) RemoveData(ctx context.Context) error {
	gone := func(err error) error {
		if err == nil || apierrors.IsNotFound(err) {
			return nil
		}
		return classify(err)
	}
	for _, kind := range kindsOfOurs {
		if err := c.deleteAll(ctx, kind); err != nil {
			return err
		}
		if err := gone(c.dynamic.Resource(kindsOfKinds).Delete(ctx, kind+"."+v1alpha1.GroupVersion.Group, metav1.DeleteOptions{})); err != nil {
			return fmt.Errorf("delete kind %s: %w", kind, err)
		}
	}
	maps, err := c.core.CoreV1().ConfigMaps("kube-system").List(ctx, metav1.ListOptions{})
	if err != nil {
		return classify(err)
	}
	for i := range maps.Items {
		if name := maps.Items[i].Name; strings.HasPrefix(name, "k8s-components-") || name == "k8s-version" {
			if err := gone(c.core.CoreV1().ConfigMaps("kube-system").Delete(ctx, name, metav1.DeleteOptions{})); err != nil {
				return fmt.Errorf("delete ConfigMap %s: %w", name, err)
			}
		}
	}
	nodes, err := c.core.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return classify(err)
	}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		drop := func(all map[string]string) map[string]any {
			out := map[string]any{}
			for k := range all {
				if prefix, _, _ := strings.Cut(k, "/"); prefix == "constellation.edgeless.systems" {
					out[k] = nil
				}
			}
			return out
		}
		if err := c.patchNode(ctx, n.Name, "metadata", map[string]any{"annotations": drop(n.Annotations), "labels": drop(n.Labels)}); err != nil {
			return err
		}
	}
	if err := c.removePlans(ctx, gone); err != nil {
		return err
	}
	if err := gone(c.core.CoordinationV1().Leases("kube-system").Delete(ctx, "constellation-node-upgrades", metav1.DeleteOptions{})); err != nil {
		return fmt.Errorf("delete the lock of nodes: %w", err)
	}
	err = gone(c.core.CoreV1().Namespaces().Delete(ctx, Namespace, metav1.DeleteOptions{}))
	for err == nil {
		if _, err = c.core.CoreV1().Namespaces().Get(ctx, Namespace, metav1.GetOptions{}); err == nil && !delay.For(ctx, setupPoll) {
			err = context.Cause(ctx)
		}
	}
	return gone(err)
}
