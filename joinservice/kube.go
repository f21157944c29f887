package joinservice

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/engine/component/componentproto"
	"constellation/engine/kubeadm"
	"constellation/engine/revocation"
	"constellation/operator/api/v1alpha1"
)

const (
	systemNamespace = "kube-system"
	joinConfig      = "join-config"
	componentPrefix = "k8s-components-"

	// requests a second and in a burst: client-go's own 5 and 10 would let two machines
	// join a second. The API server sheds what is too much for it.
	clientQPS, clientBurst = 600, 1200

	// tokenTTL is how long a machine may take from its ticket to kubeadm's first
	// request.
	tokenTTL = 15 * time.Minute
	// componentsAge is how long a components ConfigMap counts as read: its statement may
	// change.
	componentsAge = time.Minute
)

// kube is the service's hands in the cluster.
type kube struct {
	core   coreclient.CoreV1Interface
	coord  coordinationclient.LeasesGetter
	update *rest.RESTClient // our own kinds
	ns     string

	configs  cache.Store   // the ConfigMap join-config
	versions cache.Store   // the NodeVersion
	pending  cache.Indexer // PendingNodes, by machine
	revoked  cache.Store   // the record of revoked machines
	record   reads         // of the same, past the store
	// revokedChanged holds one signal while the record has changed and was not read.
	revokedChanged chan struct{}
	changed        chan struct{}
	watches        []cache.Controller

	flight singleflight.Group
	known  sync.Map // name of a components ConfigMap to components
}

func newKube(c *rest.Config, namespace string) (*kube, error) {
	c = rest.CopyConfig(c)
	c.QPS, c.Burst = clientQPS, clientBurst
	c.UserAgent = "constellation-joinservice"
	builtin := rest.CopyConfig(c)
	builtin.ContentType = "application/vnd.kubernetes.protobuf"
	builtin.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	k := &kube{ns: namespace, changed: make(chan struct{}, 1)}
	core, err := coreclient.NewForConfig(builtin)
	if err != nil {
		return nil, fmt.Errorf("connect to API server: %w", err)
	}
	k.core = core
	if k.coord, err = coordinationclient.NewForConfig(builtin); err != nil {
		return nil, fmt.Errorf("connect to API server: %w", err)
	}
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	c.GroupVersion, c.APIPath = &v1alpha1.GroupVersion, "/apis"
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	if k.update, err = rest.RESTClientFor(c); err != nil {
		return nil, fmt.Errorf("connect to API server: %w", err)
	}
	k.configs = k.informer(core.RESTClient(), "configmaps", systemNamespace, joinConfig, &corev1.ConfigMap{})
	k.versions = k.informer(k.update, "nodeversions", metav1.NamespaceAll, v1alpha1.NodeVersionName, &v1alpha1.NodeVersion{})
	k.pending = k.pendingNodes()
	k.revoked, k.revokedChanged = k.revokedNodes()
	return k, nil
}

// byLeaver is the index of PendingNodes whose machine is bound to leave, by the
// machine's ID.
const byLeaver = "leaver"

// pendingNodes keeps all PendingNodes in a store. They are as many as machines are on
// their way, not as nodes.
func (k *kube) pendingNodes() cache.Indexer {
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(k.update, "pendingnodes", metav1.NamespaceAll, fields.Everything()),
		ObjectType:    &v1alpha1.PendingNode{},
		Handler:       cache.ResourceEventHandlerFuncs{},
		Indexers: cache.Indexers{byLeaver: func(obj any) ([]string, error) {
			if p, ok := obj.(*v1alpha1.PendingNode); ok && p.Spec.Goal == v1alpha1.LeaveGoal {
				return []string{strings.ToLower(p.Spec.ProviderID)}, nil // some clouds change the case between calls
			}
			return nil, nil
		}},
	})
	k.watches = append(k.watches, controller)
	return store.(cache.Indexer)
}

// leavingError means that a machine is bound to leave the cluster, for ever.
type leavingError struct{ intent string }

func (e *leavingError) Error() string {
	return fmt.Sprintf("this machine is to leave the cluster, says PendingNode %s", e.intent)
}

// staying returns a *leavingError if the machine was seen to be bound to leave.
func (k *kube) staying(id attestation.Identity) error {
	bound, err := k.pending.ByIndex(byLeaver, strings.ToLower(id.ProviderID))
	if err != nil {
		return fmt.Errorf("find PendingNode: %w", err)
	}
	if len(bound) > 0 {
		return &leavingError{bound[0].(*v1alpha1.PendingNode).Name}
	}
	return nil
}

// stayingNow is staying as the API server knows it now, not as it was seen last.
func (k *kube) stayingNow(ctx context.Context, id attestation.Identity) error {
	var all v1alpha1.PendingNodeList
	if err := k.update.Get().Resource("pendingnodes").Do(ctx).Into(&all); err != nil {
		return fmt.Errorf("list PendingNodes: %w", err)
	}
	for _, p := range all.Items {
		if p.Spec.Goal == v1alpha1.LeaveGoal && strings.EqualFold(p.Spec.ProviderID, id.ProviderID) {
			return &leavingError{p.Name}
		}
	}
	return nil
}

// notYetNode returns an error that wraps errAlreadyNode if there is a Node of the machine's name. A
// machine that was a node keeps what was written to its disk, whatever its TPM says after a power
// cycle, so it is not let in again as a new one. Asked of the API server now: the next request of
// the same machine may come at once.
func (k *kube) notYetNode(ctx context.Context, id attestation.Identity) error {
	_, err := k.core.Nodes().Get(ctx, id.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("read Node %s: %w", id.Name, err)
	}
	return fmt.Errorf("%w: %s", errAlreadyNode, id.Name)
}

// informer keeps one object in a store.
func (k *kube) informer(c cache.Getter, resource, namespace, name string, kind runtime.Object) cache.Store {
	notify := func() {
		select {
		case k.changed <- struct{}{}:
		default: // somebody has not looked yet, and will see this change too
		}
	}
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(c, resource, namespace, fields.OneTermEqualSelector("metadata.name", name)),
		ObjectType:    kind,
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { notify() },
			UpdateFunc: func(any, any) { notify() },
			DeleteFunc: func(any) { notify() },
		},
	})
	k.watches = append(k.watches, controller)
	return store
}

// await returns when the API server answers, or ctx ends. On a new machine the service
// may start before the machine's network leads to it; the watches would only come back
// later each time.
func (k *kube) await(ctx context.Context, log *slog.Logger) {
	const least, most = 100 * time.Millisecond, 500 * time.Millisecond
	for wait := least; ; wait = min(2*wait, most) {
		try, cancel := context.WithTimeout(ctx, turnGap)
		err := k.core.RESTClient().Get().AbsPath("/version").Do(try).Error()
		cancel()
		if err == nil || ctx.Err() != nil {
			return
		}
		if wait == least {
			log.Info("API server not reachable yet", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// watch keeps the stores up to date until ctx ends.
func (k *kube) watch(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, w := range k.watches {
		wg.Go(func() { w.RunWithContext(ctx) })
	}
	wg.Wait()
	return nil
}

// synced waits until the stores hold what the API server has, or ctx ends.
func (k *kube) synced(ctx context.Context) bool {
	var all []cache.InformerSynced
	for _, w := range k.watches {
		all = append(all, w.HasSynced)
	}
	return cache.WaitForCacheSync(ctx.Done(), all...)
}

// config returns the data of join-config as it was seen last; nil if it is not there.
func (k *kube) config() map[string]string {
	obj, ok, err := k.configs.GetByKey(systemNamespace + "/" + joinConfig)
	if err != nil || !ok {
		return nil
	}
	return obj.(*corev1.ConfigMap).Data
}

// nodeVersion returns the NodeVersion as the API server has it now. What was seen last may
// be old for seconds after an API server began anew, and that is just when the upgrade of
// a control plane has changed what machines install. Machines that ask together share a
// look.
func (k *kube) nodeVersion(ctx context.Context) (*v1alpha1.NodeVersion, error) {
	if _, ok, err := k.versions.GetByKey(v1alpha1.NodeVersionName); err != nil || !ok {
		return nil, fmt.Errorf("%w: there is no NodeVersion %s", errNoComponents, v1alpha1.NodeVersionName)
	}
	nv, err, _ := k.flight.Do("NodeVersion", func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ticketTimeout/2)
		defer cancel()
		nv := &v1alpha1.NodeVersion{}
		err := k.update.Get().Resource("nodeversions").Name(v1alpha1.NodeVersionName).Do(ctx).Into(nv)
		return nv, err
	})
	switch {
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("%w: there is no NodeVersion %s", errNoComponents, v1alpha1.NodeVersionName)
	case err != nil:
		return nil, fmt.Errorf("read NodeVersion: %w", err)
	}
	return nv.(*v1alpha1.NodeVersion), nil
}

// components returns what machines of a role install. The error wraps
// errNoComponents while the operator has published nothing for the role.
func (k *kube) components(ctx context.Context, role cloud.Role) (components, error) {
	nv, err := k.nodeVersion(ctx)
	if err != nil {
		return components{}, err
	}
	join := nv.Status.JoinComponents
	name := join.Worker
	if role == cloud.ControlPlane {
		name = join.ControlPlane
	}
	if name == "" {
		return components{}, fmt.Errorf("%w for the role %s", errNoComponents, role)
	}
	// The list never changes; the statement may, when a release builder changes keys.
	if c, ok := k.known.Load(name); ok && time.Since(c.(components).read) < componentsAge {
		return c.(components), nil
	}
	c, err, _ := k.flight.Do(name, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ticketTimeout/2)
		defer cancel()
		cm, err := k.core.ConfigMaps(systemNamespace).Get(ctx, name, metav1.GetOptions{})
		if c, ok := k.known.Load(name); ok && err != nil && !apierrors.IsNotFound(err) {
			return c, nil // as good as it was a minute ago
		}
		if err != nil {
			return nil, fmt.Errorf("read components: %w", err)
		}
		c, err := parseComponents(cm)
		if err != nil {
			return nil, fmt.Errorf("read components %s: %w", name, err)
		}
		c.read = time.Now()
		k.known.Store(name, c) // checked against its name
		return c, nil
	})
	if err != nil {
		return components{}, err
	}
	return c.(components), nil
}

func parseComponents(cm *corev1.ConfigMap) (components, error) {
	var list component.List
	if err := json.Unmarshal([]byte(cm.Data["components"]), &list); err != nil {
		return components{}, fmt.Errorf("%w: %w", errComponents, err)
	}
	if want := componentPrefix + strings.ReplaceAll(list.Digest(), ":", "-"); cm.Name != want {
		return components{}, fmt.Errorf("%w: the content is that of %s", errComponents, want)
	}
	c := components{name: cm.Name, version: cm.Data["cluster-version"], statement: cm.Annotations[v1alpha1.AnnotationStatement]}
	if c.version == "" || len(list) == 0 {
		return components{}, fmt.Errorf("%w: no version or no components", errComponents)
	}
	for _, e := range list {
		c.list = append(c.list, &componentproto.Component{
			Name: e.Name, Url: e.URL, Digest: e.Digest, Path: e.Path, Mode: e.Mode, Extract: e.Extract,
		})
	}
	return c, nil
}

// expect notes that a machine is about to join, or extends the note. One write for a
// machine that asks for the first time.
func (k *kube) expect(ctx context.Context, id attestation.Identity, components string, deadline time.Time) error {
	d := metav1.NewTime(deadline.UTC().Truncate(time.Second))
	jn := &v1alpha1.JoiningNode{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "JoiningNode"},
		ObjectMeta: metav1.ObjectMeta{Name: id.Name},
		Spec: v1alpha1.JoiningNodeSpec{
			Name: id.Name, ComponentsReference: components, IsControlPlane: id.Role == cloud.ControlPlane,
			ProviderID: id.ProviderID, Deadline: &d,
		},
	}
	patch, err := json.Marshal(map[string]any{"spec": jn.Spec})
	if err != nil {
		return fmt.Errorf("encode JoiningNode %s: %w", id.Name, err)
	}
	err = put(ctx,
		func() error { return k.update.Post().Resource("joiningnodes").Body(jn).Do(ctx).Error() },
		func() error {
			return k.update.Patch(types.MergePatchType).Resource("joiningnodes").Name(id.Name).Body(patch).Do(ctx).Error()
		})
	if err != nil {
		return fmt.Errorf("write JoiningNode %s: %w", id.Name, err)
	}
	return nil
}

// put creates an object or, if it exists, changes it. For machines that ask once, which
// is most, it costs the API server a fifth less than server-side apply.
func put(ctx context.Context, create, change func() error) error {
	for {
		err := create()
		if !apierrors.IsAlreadyExists(err) {
			return err
		}
		if err = change(); !apierrors.IsNotFound(err) || ctx.Err() != nil {
			return err
		}
		// Somebody removed it in between.
	}
}

// tokenNode is the annotation of a token's Secret that says whose it is.
const tokenNode = "constellation.edgeless.systems/node"

// putToken makes the bootstrap token of a machine, or replaces the one it had: the
// Secret's name follows from the machine's, so a machine has at most one. One write
// for a machine that asks for the first time.
//
// Two machines can be unlucky enough to share a name of six characters. Then the
// second comes back until the first has joined.
func (k *kube) putToken(ctx context.Context, id attestation.Identity, expires time.Time) (string, error) {
	tokenID := kubeadm.TokenID(id.Name)
	token, err := tokenSecret()
	if err != nil {
		return "", fmt.Errorf("make bootstrap token: %w", err)
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: revocation.TokenSecret(id.Name), Annotations: map[string]string{tokenNode: id.Name}},
		Type:       corev1.SecretTypeBootstrapToken,
		Data: map[string][]byte{
			"token-id":                       []byte(tokenID),
			"token-secret":                   []byte(token),
			"expiration":                     []byte(expires.UTC().Format(time.RFC3339)),
			"usage-bootstrap-authentication": []byte("true"),
			// kubeadm's discovery wants cluster-info signed with the token.
			"usage-bootstrap-signing": []byte("true"),
			"auth-extra-groups":       []byte(kubeadm.JoinGroup),
			"description":             []byte("lets " + id.Name + " join"),
		},
	}
	// The test makes sure that another machine's token is left alone: this service may
	// not read Secrets, so it cannot look first.
	patch, err := json.Marshal([]map[string]any{
		{"op": "test", "path": "/metadata/annotations", "value": secret.Annotations},
		{"op": "replace", "path": "/data", "value": secret.Data},
	})
	if err != nil {
		return "", errors.New("make bootstrap token: cannot be encoded")
	}
	secrets := k.core.Secrets(systemNamespace)
	err = put(ctx,
		func() error { _, err := secrets.Create(ctx, secret, metav1.CreateOptions{}); return err },
		func() error {
			_, err := secrets.Patch(ctx, secret.Name, types.JSONPatchType, patch, metav1.PatchOptions{})
			return err
		})
	// A failed test of the patch is Invalid, and so is the refusal of an admission policy.
	if apierrors.IsInvalid(err) && !strings.Contains(err.Error(), "ValidatingAdmissionPolicy") {
		return "", errTokenTaken
	}
	if err != nil {
		return "", fmt.Errorf("write bootstrap token: %w", err)
	}
	return tokenID + "." + token, nil
}

// deleteToken removes the token of a machine that has joined.
func (k *kube) deleteToken(ctx context.Context, node string) error {
	err := k.core.Secrets(systemNamespace).Delete(ctx, revocation.TokenSecret(node), metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete bootstrap token: %w", err)
	}
	return nil
}

const tokenAlphabet = "0123456789abcdefghijklmnopqrstuvwxyz"

// tokenSecret is sixteen random characters, 82 bits.
func tokenSecret() (string, error) {
	const fair = 256 - 256%len(tokenAlphabet) // bytes below it give each character equally often
	var out []byte
	for buf := make([]byte, 32); len(out) < 16; {
		if _, err := rand.Read(buf); err != nil {
			return "", err
		}
		for _, b := range buf {
			if int(b) < fair && len(out) < 16 {
				out = append(out, tokenAlphabet[int(b)%len(tokenAlphabet)])
			}
		}
	}
	return string(out), nil
}

func (k *kube) getLease(ctx context.Context, name string) (*coordinationv1.Lease, error) {
	return k.coord.Leases(k.ns).Get(ctx, name, metav1.GetOptions{})
}

func (k *kube) createLease(ctx context.Context, l *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	return k.coord.Leases(k.ns).Create(ctx, l, metav1.CreateOptions{})
}

func (k *kube) updateLease(ctx context.Context, l *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	return k.coord.Leases(k.ns).Update(ctx, l, metav1.UpdateOptions{})
}
