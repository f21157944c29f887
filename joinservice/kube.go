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
	"sync/atomic"
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

	// requests per second and burst: client-go's defaults, 5 and 10, would admit two machines per
	// second. The API server throttles the excess.
	clientQPS, clientBurst = 600, 1200

	// tokenTTL is how long a machine may take from its ticket to kubeadm's first request.
	tokenTTL = 15 * time.Minute
	// componentsAge is how long a components ConfigMap is cached; its statement may change.
	componentsAge = time.Minute
)

// kube is the service's client of the cluster.
type kube struct {
	core   coreclient.CoreV1Interface
	coord  coordinationclient.LeasesGetter
	update *rest.RESTClient // of our own kinds
	ns     string

	configs  cache.Store   // the ConfigMap join-config
	versions cache.Store   // the NodeVersion
	pending  cache.Indexer // PendingNodes, by machine
	revoked  cache.Store   // the record of revoked machines
	record   reads         // the same, read past the store
	// revokedChanged holds one signal while a change of the record is unread.
	revokedChanged chan struct{}
	changed        chan struct{}
	watches        []cache.Controller

	flight singleflight.Group
	known  sync.Map // name of a components ConfigMap to components

	registrySecret string // name; empty: none
	pulls          atomic.Pointer[pulls]
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

// byLeaver is the index of PendingNodes whose machine is scheduled for removal, by the
// machine's ID without incarnation.
const byLeaver = "leaver"

// pendingNodes keeps all PendingNodes in a store. Their number is that of machines in
// transition, not of nodes.
func (k *kube) pendingNodes() cache.Indexer {
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(k.update, "pendingnodes", metav1.NamespaceAll, fields.Everything()),
		ObjectType:    &v1alpha1.PendingNode{},
		Handler:       cache.ResourceEventHandlerFuncs{},
		Indexers: cache.Indexers{byLeaver: func(obj any) ([]string, error) {
			if p, ok := obj.(*v1alpha1.PendingNode); ok && p.Spec.Goal == v1alpha1.LeaveGoal {
				return []string{leaverKey(p.Spec.ProviderID)}, nil
			}
			return nil, nil
		}},
	})
	k.watches = append(k.watches, controller)
	return store.(cache.Indexer)
}

// leaverKey returns the key in the index of a machine. Some clouds vary the case.
func leaverKey(machine string) string {
	id, _ := cloud.SplitKey(machine)
	return strings.ToLower(id)
}

// leavingError means that a machine is scheduled for removal, permanently.
type leavingError struct{ intent string }

func (e *leavingError) Error() string {
	return fmt.Sprintf("this machine is scheduled for removal by PendingNode %s", e.intent)
}

// staying returns a *leavingError if the store has the machine as scheduled for removal.
func (k *kube) staying(id attestation.Identity) error {
	bound, err := k.pending.ByIndex(byLeaver, leaverKey(id.ProviderID))
	if err != nil {
		return fmt.Errorf("find PendingNode: %w", err)
	}
	for _, obj := range bound {
		if p := obj.(*v1alpha1.PendingNode); cloud.SameMachine(p.Spec.ProviderID, id.ProviderID) {
			return &leavingError{p.Name}
		}
	}
	return nil
}

// stayingNow is staying with a fresh read of the API server.
func (k *kube) stayingNow(ctx context.Context, id attestation.Identity) error {
	var all v1alpha1.PendingNodeList
	if err := k.update.Get().Resource("pendingnodes").Do(ctx).Into(&all); err != nil {
		return fmt.Errorf("list PendingNodes: %w", err)
	}
	for _, p := range all.Items {
		if p.Spec.Goal == v1alpha1.LeaveGoal && cloud.SameMachine(p.Spec.ProviderID, id.ProviderID) {
			return &leavingError{p.Name}
		}
	}
	return nil
}

// notYetNode returns an error that wraps errAlreadyNode if there is a Node of the machine's
// name. The disk of a former node keeps its data, whatever its TPM reports after a power
// cycle, so it is not admitted again as a new machine. It reads the API server directly, since
// the same machine may retry at once.
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
		default: // the reader has not seen the last change yet, and will see this one too
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

// await returns when the API server answers, or ctx ends. On a new machine the service may
// start before the network works; the watches would back off instead.
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

// watch updates the stores until ctx ends.
func (k *kube) watch(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, w := range k.watches {
		wg.Go(func() { w.RunWithContext(ctx) })
	}
	wg.Wait()
	return nil
}

// synced waits until the stores are filled, or ctx ends.
func (k *kube) synced(ctx context.Context) bool {
	var all []cache.InformerSynced
	for _, w := range k.watches {
		all = append(all, w.HasSynced)
	}
	return cache.WaitForCacheSync(ctx.Done(), all...)
}

// config returns the cached data of join-config; nil if it does not exist.
func (k *kube) config() map[string]string {
	obj, ok, err := k.configs.GetByKey(systemNamespace + "/" + joinConfig)
	if err != nil || !ok {
		return nil
	}
	return obj.(*corev1.ConfigMap).Data
}

// nodeVersion reads the NodeVersion from the API server. A cached copy may be stale for
// seconds after an API server restarts, and such restarts happen exactly when the upgrade of a
// control plane has changed the components. Concurrent callers share a request.
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

// components returns the components for machines of a role. The error wraps errNoComponents
// while the operator has published none.
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
	// The list is immutable; the statement changes when a release builder rotates keys.
	if c, ok := k.known.Load(name); ok && time.Since(c.(components).read) < componentsAge {
		return c.(components), nil
	}
	c, err, _ := k.flight.Do(name, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ticketTimeout/2)
		defer cancel()
		cm, err := k.core.ConfigMaps(systemNamespace).Get(ctx, name, metav1.GetOptions{})
		if c, ok := k.known.Load(name); ok && err != nil && !apierrors.IsNotFound(err) {
			return c, nil // a copy of a minute ago is good enough
		}
		if err != nil {
			return nil, fmt.Errorf("read components: %w", err)
		}
		c, err := parseComponents(cm)
		if err != nil {
			return nil, fmt.Errorf("read components %s: %w", name, err)
		}
		c.read = time.Now()
		k.known.Store(name, c) // verified against its name
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
		return components{}, fmt.Errorf("%w: the content matches %s", errComponents, want)
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

// expect records that a machine is about to join, or extends the record. The first request of
// a machine costs one write.
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

// put creates an object or, if it exists, changes it. Most machines ask once, and then this
// costs the API server a fifth less than server-side apply.
func put(ctx context.Context, create, change func() error) error {
	for {
		err := create()
		if !apierrors.IsAlreadyExists(err) {
			return err
		}
		if err = change(); !apierrors.IsNotFound(err) || ctx.Err() != nil {
			return err
		}
		// It was deleted in between.
	}
}

// tokenNode is the annotation of a token's Secret with its machine's name.
const tokenNode = "constellation.edgeless.systems/node"

// putToken creates the bootstrap token of a machine, or replaces it. The Secret's name follows
// from the machine's, so a machine has at most one. The first request of a machine costs one
// write.
//
// Two machines can share a name of six characters. Then the second one is asked to retry until
// the first has joined.
func (k *kube) putToken(ctx context.Context, id attestation.Identity, expires time.Time) (string, error) {
	tokenID := kubeadm.TokenID(id.Name)
	token, err := tokenSecret()
	if err != nil {
		return "", fmt.Errorf("create bootstrap token: %w", err)
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: revocation.TokenSecret(id.Name), Annotations: map[string]string{tokenNode: id.Name}},
		Type:       corev1.SecretTypeBootstrapToken,
		Data: map[string][]byte{
			"token-id":                       []byte(tokenID),
			"token-secret":                   []byte(token),
			"expiration":                     []byte(expires.UTC().Format(time.RFC3339)),
			"usage-bootstrap-authentication": []byte("true"),
			// kubeadm's discovery requires cluster-info to be signed with the token.
			"usage-bootstrap-signing": []byte("true"),
			"auth-extra-groups":       []byte(kubeadm.JoinGroup),
			"description":             []byte("lets " + id.Name + " join"),
		},
	}
	// The test operation protects another machine's token: this service may not read Secrets, so
	// it cannot check first.
	patch, err := json.Marshal([]map[string]any{
		{"op": "test", "path": "/metadata/annotations", "value": secret.Annotations},
		{"op": "replace", "path": "/data", "value": secret.Data},
	})
	if err != nil {
		return "", errors.New("encode bootstrap token")
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

// deleteToken deletes the token of a machine that has joined.
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
	const fair = 256 - 256%len(tokenAlphabet) // bytes below it give each character equal probability
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
